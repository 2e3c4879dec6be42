"""The checkpoint: a run that is killed at any line goes on, and no number of processes passes its plan."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import fresh
import pytest
import torch
from torch import nn

from dpft import checkpoint, ledger
from dpft.checkpoint import Checkpoint, CheckpointError, earlier_runs, facts, note_of, note_run, restore, sentence, snapshot
from dpft.ledger import Ledger, PlanSpent
from dpft.privacy import BudgetError

PLAN = {"mechanisms": [{"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 6},
                       {"name": "select", "noise_multiplier": 2.0, "sample_rate": 0.02, "steps": 1}], "delta": 1e-5}
FACTS = {"model": "net", "method": "Full()"}


def run(folder: Path, draws: Path, steps: int | None = None, ledger: Path | None = None) -> list[int]:
    "A private run with all of its lines: claim, draw, release, save. What it drew is written down at once."
    kept = Checkpoint(folder, FACTS)
    made: list[int] = []
    try:
        with Ledger(ledger or kept.ledger_path) as book:
            kept.begin(book, PLAN)
            weights = kept.load(book).get("weights", torch.zeros(3))
            if not kept.releases():
                try:
                    number = book.claim(kept.run, "select")
                    with draws.open("a") as file:
                        file.write(f"select {number}\n")
                    kept.store_release("select", number, torch.ones(3))
                except PlanSpent:
                    pass                       # it was lost, and the method goes on without it
            while len(made) != steps:
                try:
                    number = book.claim(kept.run, "train")
                except PlanSpent:              # by this process, or by another that has the last number
                    break
                with draws.open("a") as file:
                    file.write(f"train {number}\n")
                made.append(number)
                weights = weights + 1
                if kept.due(weights.nbytes):
                    kept.save(book, {"weights": weights})
    finally:
        kept.close()
    return made


def drawn(draws: Path) -> list[str]:
    return draws.read_text().splitlines() if draws.exists() else []


def killed_at(line: int, after: str, folder: Path, draws: Path) -> bool:
    "Run a step in a process of its own, which is killed at the so-manieth line that it comes to for the first time; whether it was."
    if (child := os.fork()) == 0:
        seen, files = set(), {__file__, ledger.__file__, checkpoint.__file__}

        def step(frame, event, _):
            if frame.f_code.co_filename not in files:
                return None
            if event == "line" and (seen or frame.f_code.co_name == after):
                seen.add((frame.f_code.co_filename, frame.f_lineno))
                if len(seen) == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return step

        sys.settrace(step)
        try:
            run(folder, draws, steps=1)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before, after", [(0, "begin"), (1, "claim")])
def test_a_kill_at_any_line_repeats_nothing_and_passes_no_plan(tmp_path, before, after, monkeypatch):
    "From where the ledger learns of a run to its first saved state, or in its second step; then the same command, to the end."
    query = Ledger._query       # a kill loses nothing that was handed to the system, so nothing needs to be synced
    monkeypatch.setattr(Ledger, "_query", lambda self, sql, *values: query(self, sql.replace("= EXTRA", "= OFF"), *values))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setitem(PLAN, "mechanisms", [PLAN["mechanisms"][0] | {"steps": 3}, PLAN["mechanisms"][1]])
    for line in range(1, 1000):
        place = tmp_path / str(line)
        place.mkdir()
        if before:
            run(place / "run", place / "draws", steps=1)
        killed = killed_at(line, after, place / "run", place / "draws")
        made = drawn(place / "draws")
        with Ledger(place / "run.ledger") as book:                           # what was drawn had been claimed
            claims = [f"{name} {number}" for name in ("select", "train") for one in book.runs() for number in range(book.claims(one, name))]
            assert set(made) <= set(claims) and len(claims) - len(made) <= 1 and len(book.runs()) <= 1
        run(place / "run", place / "draws")
        made = drawn(place / "draws")
        assert len(made) == len(set(made)) and set(made) <= {"select 0", "train 0", "train 1", "train 2"}
        with Ledger(place / "run.ledger") as book:
            (name,) = book.runs()
            assert book.claims(name, "train") == 3 and book.stated(name) == book.planned(name)
            kept = Checkpoint(place / "run", FACTS)
            assert kept.load(book)["weights"][0] >= 2                        # a kill costs at most the step that it hit
        kept.remove()
        assert not [*(place / "run").iterdir()]
        kept.close()
        shutil.rmtree(place)
        if not killed:
            break
    assert line > (50 if before else 100)


def go_on(folder: str, draws: str, ledger: str, together) -> None:
    together.wait()
    run(Path(folder), Path(draws), ledger=Path(ledger))


def test_two_processes_that_resume_one_run_share_its_plan(tmp_path):
    "The folder was copied, so neither is refused."
    run(tmp_path / "run", tmp_path / "draws", steps=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    together = fresh.CONTEXT.Barrier(2)
    both = [fresh.CONTEXT.Process(target=go_on, args=(str(tmp_path / name), str(tmp_path / name) + ".draws", str(tmp_path / "run.ledger"),
                                                      together)) for name in ("run", "copy")]
    for one in both:
        one.start()
    for one in both:
        one.join()
        assert one.exitcode == 0
    made = [line for name in ("draws", "run.draws", "copy.draws") for line in drawn(tmp_path / name)]
    assert sorted(made) == ["select 0", *(f"train {t}" for t in range(6))]


def test_a_folder_from_a_backup_goes_on_at_the_ledgers_next_number(tmp_path):
    assert run(tmp_path / "run", tmp_path / "draws", steps=2) == [0, 1]
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    assert run(tmp_path / "run", tmp_path / "draws", steps=2) == [2, 3]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "backup").rename(tmp_path / "run")
    assert run(tmp_path / "run", tmp_path / "draws") == [4, 5] and len(drawn(tmp_path / "draws")) == 7
    with Ledger(tmp_path / "run.ledger") as book:
        assert Checkpoint(tmp_path / "run", FACTS).load(book)["weights"].tolist() == [4.0] * 3       # 2 of the backup, 2 since


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", ["deleted", "rolled back"])
def test_a_ledger_without_the_checkpoints_head_is_refused(tmp_path, steps, how):
    with Ledger(tmp_path / "run.ledger") as book:
        book.begin("another run of these data", PLAN)
    before = (tmp_path / "run.ledger").read_bytes()
    run(tmp_path / "run", tmp_path / "draws", steps=steps)
    (tmp_path / "run.ledger").unlink()
    if how == "rolled back":
        (tmp_path / "run.ledger").write_bytes(before)
    with pytest.raises(CheckpointError, match=r"run.ledger lacks rows that checkpoint .*run has seen; bring back the ledger"):
        run(tmp_path / "run", tmp_path / "draws")


def test_the_plan_that_holds_is_the_recorded_one(tmp_path):
    kept, book = Checkpoint(tmp_path / "run", FACTS), Ledger()
    kept.begin(book, PLAN)
    kept.close()
    again = Checkpoint(tmp_path / "run", FACTS)
    again.begin(book, PLAN | {"delta": 1e-9})                     # nothing is computed anew
    assert again.run == kept.run and book.plan(kept.run) == PLAN
    with pytest.raises(CheckpointError, match="lacks rows"):
        again.begin(Ledger(), PLAN)


NET = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("what, now", [
    ("model", (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "Full()", {"learning_rate": 0.1}, "100 examples of [x]")),
    ("method", (NET, "BiTFiT()", {"learning_rate": 0.1}, "100 examples of [x]")),
    ("learning_rate", (NET, "Full()", {"learning_rate": 0.2}, "100 examples of [x]")),
    ("epsilon", (NET, "Full()", {"learning_rate": 0.1, "epsilon": 2.0}, "100 examples of [x]")),
    ("data", (NET, "Full()", {"learning_rate": 0.1}, "200 examples of [x]"))])
def test_another_run_is_refused_by_what_differs(tmp_path, what, now):
    Checkpoint(tmp_path, facts(NET, "Full()", {"learning_rate": 0.1}, "100 examples of [x]")).begin(Ledger(), PLAN)
    with pytest.raises(CheckpointError, match=rf"belongs to a run with another {what}: .* or choose an empty folder"):
        Checkpoint(tmp_path, facts(*now))
    Checkpoint(tmp_path, facts(NET, "Full()", {"learning_rate": 0.1}, "100 examples of [x]")).close()    # the lock was released


def test_a_run_that_its_ledger_refuses_leaves_the_folder_free(tmp_path):
    book = Ledger()
    book.set_budget(0.5, 1e-5)
    kept = Checkpoint(tmp_path / "run", FACTS)
    with pytest.raises(BudgetError):
        kept.begin(book, {"mechanisms": [PLAN["mechanisms"][0] | {"noise_multiplier": 0.3}]})
    kept.close()
    assert [*(tmp_path / "run").iterdir()] == []
    Checkpoint(tmp_path / "run", FACTS | {"method": "BiTFiT()"}).begin(book, PLAN | {"mechanisms": []})


def hold(folder: str, begun, end) -> None:
    kept = Checkpoint(folder, FACTS)
    begun.set()
    end.wait()
    kept.close()


def test_the_lock_refuses_another_process_and_ends_with_it(tmp_path):
    begun, end = fresh.CONTEXT.Event(), fresh.CONTEXT.Event()
    other = fresh.CONTEXT.Process(target=hold, args=(str(tmp_path / "run"), begun, end))
    other.start()
    assert begun.wait(120)
    with pytest.raises(CheckpointError, match="another process is using checkpoint"):
        Checkpoint(tmp_path / "run", FACTS)
    other.kill()
    other.join()
    Checkpoint(tmp_path / "run", FACTS).close()


def test_a_new_run_of_this_process_takes_the_folder_over(tmp_path):
    "As when a cell that failed is run again: the engine that it left still exists."
    left, book = Checkpoint(tmp_path, FACTS), Ledger()
    left.begin(book, PLAN)
    now = Checkpoint(tmp_path, FACTS)
    now.save(book, {"step": 1})
    with pytest.raises(CheckpointError, match="was closed, or another run of this process uses it"):
        left.save(book, {"step": 0})
    assert now.load(book)["step"] == 1


def test_only_the_owner_reads_it_and_it_holds_what_was_given(tmp_path):
    kept, book = Checkpoint(tmp_path / "run", FACTS), Ledger()
    kept.begin(book, PLAN)
    kept.save(book, {"weights": torch.ones(2)})
    kept.store_release("rap/ft, 2", 3, {"map": torch.ones(2)})
    kept.store_release("rap/ft, 2", 0, 1.5)
    files = [*(tmp_path / "run").iterdir()]
    assert len(files) == 4 and {path.stat().st_mode & 0o777 for path in (*files, tmp_path / "run")} == {0o600, 0o700}
    assert kept.load(book).keys() == {"weights", "head"}
    assert [*kept.releases()] == [("rap/ft, 2", 0), ("rap/ft, 2", 3)] and kept.releases()["rap/ft, 2", 0] == 1.5
    assert kept.ledger_path == tmp_path / "run.ledger"
    kept.remove()
    assert [*(tmp_path / "run").iterdir()] == []


def test_without_a_folder_nothing_is_stored():
    kept, book = Checkpoint(None, FACTS), Ledger()
    kept.begin(book, PLAN)
    assert not kept.due(1) and kept.ledger_path is None
    kept.save(book, {"step": 1})
    kept.store_release("select", 0, 1.0)
    assert kept.load(book) == kept.releases() == {}


@pytest.mark.parametrize("content", [b"", b"notes", b"PK\x03\x04 and then nonsense"])
def test_a_damaged_state_is_refused_and_the_run_goes_on_without_it(tmp_path, content):
    run(tmp_path / "run", tmp_path / "draws", steps=2)
    (tmp_path / "run" / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state.pt is damaged .* remove it, and the run goes on without it"):
        run(tmp_path / "run", tmp_path / "draws")
    (tmp_path / "run" / "state.pt").unlink()
    assert run(tmp_path / "run", tmp_path / "draws") == [2, 3, 4, 5]


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"run": print}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="is damaged or not dpft's"):
        Checkpoint(tmp_path, FACTS)


def test_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch):
    kept, book = Checkpoint(tmp_path, FACTS), Ledger()
    kept.begin(book, PLAN)
    kept.save(book, {"step": 1})
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device.*the last good checkpoint stays"):
        kept.save(book, {"step": 2})
    assert kept.load(book)["step"] == 1 and not [*tmp_path.glob("*.part")]


def test_what_is_small_is_saved_always_and_what_is_large_once_a_minute(tmp_path):
    kept, book = Checkpoint(tmp_path, FACTS), Ledger()
    assert kept.due(2**30)                             # nothing was saved yet
    kept.save(book, {})
    last = kept._saved
    assert kept.due(2**20, last) and kept.due(2**30, last + 61) and not kept.due(2**30, last + 59)


def test_the_next_step_is_the_one_that_would_have_come(tmp_path):
    def made(order):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
        optimizer = torch.optim.AdamW([dict(model.named_parameters())[name] for name in order], 0.1)
        return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)

    def step(model, optimizer, schedule):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.1 + p.numel())
        optimizer.step()
        schedule.step()

    names = ["2.weight", "0.bias"]
    one, other = made(names), made(names[::-1])
    step(*one)
    one[0][1].running_mean += 1
    kept, book = Checkpoint(tmp_path, FACTS), Ledger()
    kept.begin(book, PLAN)
    kept.save(book, snapshot(one[0], set(names), *one[1:], history=[{"step": 1}]))
    state = kept.load(book)
    assert state["weights"].keys() == set(names) and state["history"] == [{"step": 1}]
    restore(state, *other)
    step(*one)
    step(*other)
    for name, value in one[0].state_dict().items():
        assert torch.equal(value, other[0].state_dict()[name]), name
    assert one[2].get_last_lr() == other[2].get_last_lr()


def test_a_note_stays_with_what_a_run_trained(tmp_path):
    note = {"run": "a", "private": True, "epsilon": 2.0, "delta": 1e-5}
    trunk, adapted = nn.Linear(3, 4), nn.Module()
    adapted.base_layer, adapted.lora = nn.Linear(3, 4), nn.Linear(3, 4)
    note_run(nn.Sequential(trunk, nn.Linear(4, 2)), ["0.bias"], note)
    note_run(nn.Sequential(adapted), ["0.lora.weight"], note | {"run": "b", "private": False})
    assert earlier_runs(nn.Sequential(trunk, nn.Linear(4, 9))) == [note] and "at epsilon 2.00" in sentence(note)
    (found,) = earlier_runs(adapted.base_layer)              # into which the adapter may be merged
    assert found["run"] == "b" and "without a privacy guarantee" in sentence(found) and earlier_runs(nn.Linear(3, 4)) == []
    (tmp_path / "guarantee.json").write_text(json.dumps({"run": "a", "private": True, "epsilon": 2.0, "target_delta": 1e-5}))
    assert note_of(tmp_path) == note and note_of(tmp_path / "none") is None
