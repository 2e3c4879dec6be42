"""The settings of a run: each is declared once, and a run goes on with those that change it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import dpft
from dpft.settings import ELSEWHERE, OURS, Settings


def test_what_a_run_must_go_on_with_is_what_changes_a_step_and_no_place():
    facts, every = Settings(epsilon=1.0).facts(), {one.name for one in fields(Settings)}
    assert facts["epsilon"] == 1.0 and {"clip", "learning_rate", "optimizer", "seed", "secure_mode", "loss_fn", "average"} <= facts.keys()
    assert every - facts.keys() >= {"ledger", "checkpoint", "output", "overwrite", "statement", "progress", "evaluate", "show_loss"}
    assert "epochs" in facts and "epochs" not in Settings(steps=3).facts()


def test_numbers_of_numpy_are_plain_numbers():
    made = Settings(clip=np.float64(0.5), steps=np.int64(3), dropout=np.bool_(False))
    assert (type(made.clip), type(made.steps), made.dropout) == (float, int, False)


def test_help_says_what_every_setting_means():
    for function, readers in ((dpft.fine_tune, ("engine", "loop")), (dpft.Engine.__init__, ("engine",))):
        for one in fields(Settings):
            said = f"{one.name}={one.default!r}: {one.metadata['help']}" in function.__doc__
            assert said == (one.metadata["of"] in readers), one.name
    assert all(f"{name}: " in dpft.fine_tune.__doc__ for name in ("model", "train", "method"))


def test_only_public_names_are_listed():
    assert {*dir(dpft)} == {*dpft.__all__, "__version__"}


@pytest.mark.parametrize("name, said", [
    ("lr", "here it is learning_rate="), ("max_grad_norm", "here it is clip="), ("save_steps", "here it is checkpoint_every="),
    ("gradient_checkpointing", "call model.gradient_checkpointing_enable"), ("train_dataset", "here it is train="),
    ("per_device_train_batch_size", "physical_batch_size= the number of rows"), ("epsilom", "did you mean epsilon"), ("xyzzy", "'xyzzy'"),
    ("sampling_rate", "it follows from batch_size="), ("save_strategy", "checkpoint= names a folder"), ("run_name", "callbacks="),
    ("torch_compile", "the model as it is"), ("grad_sample_mode", "nothing to set")])
def test_a_name_from_elsewhere_is_answered_with_ours(name, said):
    with pytest.raises(TypeError, match="got an unexpected keyword argument") as refused:
        dpft.fine_tune(None, None, dpft.Full(), **{name: 1})
    assert said in str(refused.value)


def test_the_table_of_names_holds_none_of_ours():
    known = {one.name for one in fields(Settings)}
    assert not known & ELSEWHERE.keys() and OURS.keys() <= known | {"model", "train"}


FIRST = "    epsilon: float | str | None = setting("
NEW = '    shade: float = setting(0.5, "darkness of a test")\n'
TRIED = """
import inspect, json, sys
import dpft, dpft.cli, dpft.settings

sys.argv = ["dpft", "train", "--data", "digits", "--model", "mlp", "--limit", "100", "--method", "BiTFiT", "--steps", "1", "--epsilon", "8",
            "--accountant", "rdp", "--no-progress", "--shade", "0.75"]
seen, facts = [], dpft.settings.Settings.facts
dpft.settings.Settings.facts = lambda self: seen.append(found := facts(self)) or found
try:
    dpft.cli.main()
except SystemExit as end:
    assert not end.code, end.code
signatures = [inspect.signature(one).parameters["shade"].default for one in (dpft.fine_tune, dpft.Engine)]
print("\\n" + json.dumps({"file": dpft.__file__, "facts": seen[-1]["shade"], "signatures": signatures}))
"""


def test_a_new_setting_is_one_line(tmp_path):
    "It is in the signatures, the command, and among what a run must go on with."
    shutil.copytree(Path(dpft.__file__).parent, tmp_path / "dpft", ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "dpft" / "settings.py"
    text = settings.read_text(encoding="utf-8")
    assert text.count(FIRST) == 1
    settings.write_text(text.replace(FIRST, NEW + FIRST), encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, "-c", TRIED], cwd=tmp_path, capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": paths})
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(tmp_path) and found["signatures"] == [0.5, 0.5] and found["facts"] == 0.75
