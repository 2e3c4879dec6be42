"""What the host waits for in a step, counted for every method on a simulated accelerator, where mixed devices raise."""

import json

import fresh
import pytest
from synchronising import CASES

CACHE = ("features.py",)


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    "Of each case, what was waited for where; in a process of its own, for the device is known to torch ever after."
    done = fresh.run("-m synchronising", said=tmp_path_factory.mktemp("waits") / "said")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def own(found):
    "Without what the model asks for by itself."
    return [(what, where) for what, where in found if not where.startswith("transformers/")]


@pytest.mark.parametrize("case", CASES)
def test_a_batch_and_a_step_ask_the_device_for_little(waits, case):
    """At most two waits for a physical batch, none for features that are stored, and six for a step; one is for what the pass wrote.

    The first step looks at its batches for faults, and in the second layer freezing searches for the trunk.
    """
    *_, step = waits["cases"][case]
    assert step["batches"]
    for batch in step["batches"]:
        assert len(own(batch)) <= 2 and not any(where.startswith(CACHE) for _, where in batch), batch
    assert len(own(step["next"] + step["draw"] + step["privatize"] + step["done"])) <= 6
    assert not [where for batch in step["batches"] for what, where in own(batch) if what == "upload"]


def test_rows_that_a_trunk_has_not_seen_are_asked_for_once(waits):
    "The second batch after layer freezing has found the trunk: its rows are computed, and stored."
    *_, batch = waits["cases"]["text LayerFreeze"][1]["batches"]
    read = [where for what, where in own(batch) if what.startswith("read")]
    assert len(read) <= 3 and sum(where.startswith(CACHE) for where in read) == 1, batch


def test_the_simulated_device_computes_what_the_cpu_does_and_only_its_generator_is_asked_for(waits):
    "Float32 sums of 16 gradients bounded by 0.5: 1e-4 is a hundred units in the last place of 8."
    assert waits["difference"] < 1e-4 and set(waits["asked"]) <= {"0"}


def test_the_simulation_notices(waits):
    "Each kind of wait, and devices that meet."
    assert waits["kinds"] == ["read: _local_scalar_dense", "read: a copy to the host", "read: a copy to the host", "read: equal",
                              "read: nonzero", "read: a mask as an index", "upload", "upload", "upload"]
    assert "tensors on two devices" in waits["mixed"]
