"""A part of `make faults` that takes seconds: broken runs end as unbroken ones, and the judge would notice if they did not."""

import json
import math
import signal
from pathlib import Path

import faults
import fresh
import pytest
import torch
from torch import nn

import dpft
from dpft.ledger import Ledger, LedgerError
from dpft.privacy import BudgetError
from dpft.store import CheckpointError, Store


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What the reduced run found; in a process of its own, because it forks, and torch cannot go backward on both sides of a fork."""
    output = tmp_path_factory.mktemp("faults") / "records.jsonl"
    done = fresh.run("import faults; faults.main()", "--output", output, said=output.with_name("said"), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("kind, least", [("crash point", 16), ("crash", 3), ("kill", 4), ("full disk", 1), ("SIGTERM", 1), ("damage", 8),
                                         ("two processes differ", 1), ("flipped ledger", 1)])
def test_no_fault_shows_in_the_end(records, kind, least):
    found = [record for record in records if record["kind"] == kind]
    assert len(found) >= least and {record["processes"] for record in found} >= ({1, 2} if least == 4 else set())
    assert [(record["where"], record["wrong"]) for record in found if record["wrong"]] == []


LINGERS = """
import json, pathlib, random, sys, time
import faults
own = faults.attempt
def attempt(*arguments, **settings):
    status = own(*arguments, **settings)
    time.sleep(1)                                                    # between the end of the run and that of the process
    return status
root, faults.attempt = pathlib.Path(sys.argv[1]), attempt
wanted = faults.unbroken(root / "whole", 2)
print(json.dumps(faults.kill_at(root / "killed", random.Random(0), 2, wanted, moment=wanted["events"])))
"""


def test_a_process_killed_after_the_end_of_the_run_is_not_started_again(tmp_path):
    done = fresh.run(LINGERS, tmp_path, said=tmp_path / "said")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["killed"] and record["where"].startswith("after its end") and record["wrong"] == [], record


# the judge ------------------------------------------------------------------------------------------------------------------------


def test_a_budget_that_falls_is_seen():
    assert faults.falls([{"spent": {"train": 1}}, {"key": "k"}, {"spent": {"train": 2}}]) == []
    assert faults.falls([{"spent": {"train": 2, "look": 1}}, {"spent": {"train": 2}}]) == ["look fell from 1 to 0"]


def made(key="k", total="s", noise="n", out="o"):
    return [{"key": key, "sum": total, "noise": noise}, {"released": "train 0", "value": out, "sum": total, "rank": 0}]


@pytest.mark.parametrize("again, wrong", [
    (made(), 0), (made("other", "t", "m", "p"), 0), (made(total="t"), 3), (made("other", "t"), 1), (made(out="p"), 1)])
def test_noise_that_serves_two_sums_is_seen(again, wrong):
    assert bool(faults.served_twice([*made(), {"event": "opened"}, *again])) == bool(wrong)


def test_a_run_that_ends_elsewhere_or_pays_another_price_is_seen(tmp_path):
    place, wanted = faults.Place(tmp_path), {"ended": ("w", ["m"]), "spent": {"train": 1}}
    place.folder.mkdir()
    with Ledger(place.folder / "ledger.sqlite") as ledger:
        ledger.begin("run", {"mechanisms": [vars(faults.PLAN[0])]})
        ledger.spend("run", "train", 0, "x")

    def judged(ended, before, **changes):
        place.log.write_text("".join(json.dumps(event) + "\n" for event in (*made(), *ended)))
        return faults.judged(place, {**wanted, **changes}, before, 2, processes=1)["wrong"]

    right = [{"ended": "w", "mechanisms": ["m"], "rank": 0}]
    assert judged(right, {"train": 1}) == []
    assert judged([right[0] | {"ended": "v"}], {"train": 1}) == judged([], {"train": 1}) == ["not identical"]
    assert judged([{"refused": "LedgerError: why", "rank": 0}], {"train": 1}) == []
    assert "1 released, {} in the ledger" in judged(right, {})
    assert "spent fell over the crash: {'train': 2} to {'train': 1}" in judged(right, {"train": 2})
    assert judged(right, {"train": 1}, spent={"train": 2}) == ["spent {'train': 1}"]


def test_the_disk_knows_what_a_power_cut_takes(tmp_path):
    """A name lasts from the folder's sync on, contents from the file's."""
    disk, path = faults.Disk(tmp_path), tmp_path / "a"

    def write(content):
        path.write_bytes(content)

    disk.operation("open", "a", path.touch)
    disk.operation("write", "a", lambda: write(b"one"))
    disk.operation("sync", "a", lambda: None)
    assert disk.left("cut") == {} and disk.left("after") == {"a": b"one"}
    disk.operation("sync", ".", lambda: None)
    disk.operation("write", "a", lambda: write(b"two"))
    assert disk.left("cut") == {"a": b"one"} and disk.left("after") == {"a": b"two"}
    disk.operation("rename", "a", lambda: path.rename(tmp_path / "b"), target="b")
    assert disk.left("cut") == {"a": b"one"}
    disk.operation("sync", ".", lambda: None)
    assert disk.left("cut") == {"b": b"one"}


# the program ----------------------------------------------------------------------------------------------------------------------


def test_the_program_leaves_with_a_checkpoint_when_it_is_told_to_stop(tmp_path):
    record = faults.commanded(tmp_path, 1, lambda words, size, said: fresh.Program("-m dpft", *words, said=said.with_suffix("")))
    assert record["wrong"] == [], record


# the store ------------------------------------------------------------------------------------------------------------------------


def test_a_state_without_its_secret_is_of_another_run(tmp_path):
    store = Store(tmp_path, {"model": "m"}, {"data": "d"})
    store.save({"step": 3})
    (tmp_path / "run.json").unlink()
    store.close()
    Store(tmp_path, {"model": "m"}, {"data": "d"}).close()
    assert Store(tmp_path, {"model": "m"}, {"data": "d"}).step == 0


def test_the_secret_goes_last(tmp_path, monkeypatch):
    store, gone = Store(tmp_path, {"model": "m"}, {"data": "d"}), []
    store.save({"step": 3})
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: gone.append(path.name))
    store.remove()
    assert gone == ["state.part", "state.pt", "run.part", "run.json"]


@pytest.mark.parametrize("name", ["run.json", "state.pt"])
def test_every_flipped_bit_is_seen(tmp_path, name):
    store = Store(tmp_path, {"model": "m"}, {"data": "d"})
    store.save({"step": 3, "weights": torch.zeros(5)})
    store.begin()
    store.close()
    whole = (tmp_path / name).read_bytes()
    for place in range(0, len(whole), 1 if name == "run.json" else 29):
        (tmp_path / name).write_bytes(faults.flipped(whole, place))
        with pytest.raises(CheckpointError, match="is damaged"):
            Store(tmp_path, {"model": "m"}, {"data": "d"})
    (tmp_path / name).write_bytes(whole)
    again = Store(tmp_path, {"model": "m"}, {"data": "d"})
    assert again.step == 3 and again.begun


def test_a_name_is_on_disk_before_it_counts(tmp_path, monkeypatch):
    """The folder is synced after the move, or a power cut would take back the secret of a run that its ledger has begun."""
    synced = []
    monkeypatch.setattr("dpft.store.sync_folder", lambda folder: synced.append(sorted(path.name for path in folder.iterdir())))
    Store(tmp_path, {"model": "m"}, {"data": "d"}).save({"step": 1})
    assert synced == [["run.json"], ["run.json", "state.pt"]]


# told to stop ---------------------------------------------------------------------------------------------------------------------


def tune(**settings):
    return dpft.fine_tune(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), faults.rows(), dpft.Full(), steps=1, batch_size=10,
                          loss_fn=faults.loss, accountant="rdp", progress=False, **settings)


def test_without_a_checkpoint_the_signal_is_left_alone(tmp_path):
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(signal.getsignal(signal.SIGTERM))
            return super().step(closure)

    before = signal.getsignal(signal.SIGTERM)
    for folder in (None, tmp_path / "run"):
        tune(noise_multiplier=1.1, optimizer=Looking, checkpoint=folder)
        assert signal.getsignal(signal.SIGTERM) == before
    assert seen[0] == before and seen[1] != before


# what nothing pays for ------------------------------------------------------------------------------------------------------------


def test_a_run_that_promises_nothing_shows_in_a_shared_ledger(tmp_path, run):
    path = tmp_path / "team.sqlite"
    tune(epsilon=math.inf, ledger=path)
    with Ledger(path) as ledger:
        (name, reason), = ledger.unpaid().items()
        assert reason == "epsilon is infinite" and ledger.runs() == [] and ledger.epsilon(1e-5) == ledger.epsilon(1e-5, name) == math.inf
        with pytest.raises(BudgetError, match=f'run "{name}" has no privacy guarantee .epsilon is infinite., so no budget can hold'):
            ledger.set_budget(2.0, 1e-5)
        assert ledger.budgets() == []
    status, out, _ = run("account", path)
    assert status == 0 and f"run {name} has no privacy guarantee: epsilon is infinite" in out


def test_a_ledger_with_a_budget_refuses_a_run_that_promises_nothing(tmp_path):
    with Ledger(tmp_path / "team.sqlite") as ledger:
        ledger.set_budget(2.0, 1e-5)
        with pytest.raises(BudgetError, match=r"limits its data set to epsilon=2, and this run has no privacy guarantee .epsilon is inf"):
            tune(epsilon=math.inf, ledger=ledger)
        assert ledger.unpaid() == {} and ledger.head


def test_an_index_that_hides_a_charge_is_damage(tmp_path):
    """Counts are read from the index, which the chain of hashes does not cover."""
    path = tmp_path / "l.sqlite"
    with Ledger(path) as ledger:
        ledger.begin("run", {"mechanisms": [vars(faults.PLAN[0])]})
        ledger.spend("run", "train", 0, "digest of a sum")
    whole = path.read_bytes()
    first = whole.index(b"digest of a sum")
    second = whole.index(b"digest of a sum", first + 1)
    page = 4096
    table, index = (first, second) if first // page < second // page else (second, first)
    path.write_bytes(faults.flipped(whole, index - 3))
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(path)
    path.write_bytes(faults.flipped(whole, table))
    with pytest.raises(LedgerError, match=r"damaged|row 2 was changed"):
        Ledger(path)
