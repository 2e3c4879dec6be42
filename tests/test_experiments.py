"""Records, runs that are made once and continued, the quickstart, and the command `dpft run`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpft.book import evidence, experiments, figures, pretrained
from dpft.book.experiments import Experiment, make_runs, measured_run, packed, read_records, recorded, results_file, unpacked, write_records
from dpft.data import VOCABULARY, TableData, Task
from dpft.models import load_model
from dpft.tasks import load_data

TINY = {"data": "digits", "model": "mlp", "method": "LastLayer", "target_epsilon": 8.0, "steps": 2, "batch_size": 64, "accountant": "rdp"}


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    return tmp_path


def noted(settings):
    return {"metrics": {"accuracy": 0.5}, "process": os.getpid(), "threads": torch.get_num_threads()}


def failing(settings):
    if settings["seed"] == 1:
        raise ValueError("seed 1 is not for us")
    return noted(settings)


def many(count, measure=noted, **fields):
    return Experiment("?", lambda: [{"data": "digits", "method": "m", "seed": seed} for seed in range(count)], measure, "nothing", **fields)


def odd(settings):
    return "odd" * (settings["seed"] % 2)


def seeds(name):
    return [entry["seed"] for entry in recorded(results_file(name))]


# ---- records


def test_a_record_says_all_that_is_needed_and_the_same_seed_gives_it_again(tmp_path):
    runs = [{**run, "epochs": 0.25, "public_epochs": 1} for run in experiments.quickstart_grid([0]) if run["target_epsilon"] == "inf"]
    records, again = ([experiments.make_record("quickstart", experiments.measured_run, run, False) for run in runs] for _ in range(2))
    assert len(records) == 3 and {r["method"] for r in records} == {"Full", "LastLayer", "BiTFiT"}
    for entry, other in zip(records, again, strict=True):
        assert {"experiment", "data", "model", "seed", "delta", "accountant", "mechanisms", "metrics", "device", "versions", "commit",
                "data_hash", "learning_rate", "batch_size", "epochs", "clip"} <= set(entry)
        assert entry["epsilon"] == "inf"
        assert {**entry, "seconds": 0} == {**other, "seconds": 0}
    write_records(tmp_path / "r.jsonl", records)
    assert read_records(tmp_path / "r.jsonl") == json.loads(json.dumps(records))
    (tmp_path / "r.jsonl").write_text("{}\n{broken\n")
    with pytest.raises(ValueError, match="line 2 is not a record"):
        read_records(tmp_path / "r.jsonl")
    table = figures.text_table(records).splitlines()
    assert len(table) == 5 and "not private" in table[0]


def test_records_lie_in_the_checkout_around_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("DPFT_RESULTS")
    inside = tmp_path / "nbs" / "evidence"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert results_file("a") == Path("nbs/results/a.jsonl")          # no checkout around: where it is to be
    (tmp_path / "nbs" / "results").mkdir()
    assert results_file("a") == Path("../../nbs/results/a.jsonl")


def test_full_records_stand_in_place_of_reduced_ones(tmp_path):
    write_records(tmp_path / "a.jsonl", [{"n": 1, "reduced": True}])
    assert [entry["n"] for entry in experiments.records_of("a", "b")] == [1]
    write_records(tmp_path / "b.jsonl", [{"n": 4, "reduced": False}])
    assert [entry["n"] for entry in experiments.records_of("a", "b")] == [4]


def test_answers_are_packed_whole_and_lie_in_the_order_of_the_rows():
    for values in (torch.tensor([True, False] * 7 + [True]), torch.arange(11) % 10):
        assert torch.equal(unpacked(packed(values)).long(), values.long())
    task = load_data("digits", limit=64)
    model = load_model("mlp", len(task.classes), task.kind, task.image_shape)
    said, right = experiments.answered(model, task.train)
    assert torch.equal(said, model(task.train.batch(range(len(task.train)))[0]).argmax(1))
    assert torch.equal(right, said == torch.as_tensor(task.train.labels))


def test_a_run_records_its_answers_and_the_shares_that_were_clipped():
    seen = measured_run({**TINY, "seed": 0})
    assert unpacked(seen["answers"]["accuracy"]["right"]).double().mean().item() == pytest.approx(seen["metrics"]["accuracy"])
    assert len(seen["steps_seen"]["clipped"]) == len(seen["steps_seen"]["loss"]) == 2


def test_held_out_rows_leave_the_training_data_and_nothing_else_is_scored():
    whole, part = experiments.prepared_task("digits", "mlp"), experiments.prepared_task("digits", "mlp", held_out=100)
    assert len(part.dev) == 100 and len(part.train) == len(whole.train) - 100 and part.test is None
    images = {image.numpy().tobytes() for image, _ in part.train}
    assert sum(image.numpy().tobytes() in images for image, _ in part.dev) <= 2    # equal pictures may occur twice in the data


def test_a_task_of_texts_states_each_public_fact_once(monkeypatch):
    rows = TableData({"text": ["a good film"] * 4, "label": [0, 1, 0, 1]})
    task = Task("reviews", "text", rows, rows, classes=("no", "yes"), columns=("text", "label"), assumed_public=[VOCABULARY])
    monkeypatch.setattr(experiments, "load_data", lambda name, limit: task)
    experiments.prepared_task.cache_clear()
    assert experiments.prepared_task("reviews", "minilm").assumed_public == [VOCABULARY] == task.assumed_public
    experiments.prepared_task.cache_clear()


# ---- runs


def test_what_is_there_is_not_made_again_and_the_rows_come_in_order():
    said = []
    assert make_runs({"e": many(2), "f": many(1)}, say=said.append) == 3 and [line.split(":")[0] for line in said] == ["e", "e", "f"]
    assert make_runs({"e": many(3)}) == 1 and seeds("e") == [0, 1, 2]
    assert make_runs({"e": many(9)}, wanted=lambda run: run["seed"] > 7) == 1 and make_runs({"e": many(12)}, hours=0.0) == 0


def test_the_papers_table_is_another_one_and_marked_as_such():
    its = many(1, reduced=True, full=lambda: [{"data": "digits", "method": "m", "seed": 9}])
    for full in (False, True):
        make_runs({"e": its, "s": many(1)}, full)
    assert [(entry["seed"], entry["reduced"]) for entry in recorded(results_file("e"))] == [(0, True), (9, False)]
    assert [entry["reduced"] for entry in recorded(results_file("s"))] == [False]


@pytest.mark.parametrize("name", sorted(name for name, its in evidence.EXPERIMENTS.items() if its.grid is None))
def test_a_table_that_was_run_whole_is_read_from_the_books_records(name):
    rows, _ = evidence.EXPERIMENTS[name].rows(name)              # wherever new records go
    assert rows and all({"method", "seed"} <= row.keys() and "metrics" not in row for row in rows)
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)


def test_several_processes_have_one_thread_each_and_a_group_stays_in_one():
    make_runs({"e": many(6, group=odd)}, workers=2)
    records = recorded(results_file("e"))
    assert sorted(entry["seed"] for entry in records) == [*range(6)] and {entry["threads"] for entry in records} == {1}
    assert len({entry["process"] for entry in records if entry["seed"] % 2}) == 1 and os.getpid() not in {e["process"] for e in records}


SLOW = """
import os, sys, time
from pathlib import Path
from dpft.book.experiments import Experiment, make_runs

def slow(settings):
    Path(os.environ["DPFT_RESULTS"], f"{os.getpid()}.pid").touch()
    time.sleep(100)

if __name__ == "__main__":
    runs = [{"data": "digits", "method": "m", "seed": seed} for seed in range(9)]
    make_runs({"e": Experiment("?", lambda: runs, slow, "nothing")}, workers=2)
"""


def lives(pid):
    "Whether a process is there, and no zombie."
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text(encoding="utf-8")
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up under /proc")
def test_workers_end_with_a_command_that_is_killed(tmp_path):
    (tmp_path / "slow_runs.py").write_text(SLOW, encoding="utf-8")
    command = subprocess.Popen([sys.executable, str(tmp_path / "slow_runs.py")])
    def eventually(holds):
        for _ in range(600):
            if holds():
                return True
            time.sleep(0.1)
        return False
    try:
        assert eventually(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        command.kill()
        command.wait()
    workers = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert eventually(lambda: not any(map(lives, workers)))


def test_the_first_run_that_fails_ends_it():
    with pytest.raises(ValueError, match="seed 1 is not for us"):
        make_runs({"e": many(3, failing)})
    assert seeds("e") == [0]


def later():
    if not seeds("first"):
        raise ValueError("make the first before")
    return [{"data": "d", "method": "m", "seed": 7}]


def test_a_table_that_stands_on_other_records_waits_for_them():
    assert make_runs({"second": Experiment("?", later, noted, "nothing"), "first": many(1)}) == 2 and seeds("second") == [7]
    (results_file("first")).unlink()
    with pytest.raises(ValueError, match="make the first"):
        make_runs({"second": Experiment("?", later, noted, "nothing")})


def test_the_command_lists_plans_makes_and_repeats(run, monkeypatch, results):
    its = Experiment("?", lambda: [{**TINY, "method": method, "seed": seed} for method in ("Full", "LastLayer") for seed in range(2)],
                     lambda settings: {"metrics": {"accuracy": 0.5}}, "nothing")
    monkeypatch.setitem(evidence.EXPERIMENTS, "pair", its)
    words = ("run", "pair", "--workers", 1)
    assert all(name in run("run")[1] for name in evidence.EXPERIMENTS)
    assert "4 of 4 runs are missing" in run(*words, "--plan")[1] and not (results / "pair.jsonl").exists()
    assert "4 runs made" in run(*words)[1] and "0 runs made" in run(*words)[1]
    before = read_records(results / "pair.jsonl")
    for more in (["--method", "Ful"], ["--data", "digit"]):
        status, _, err = run(*words, "--again", *more)
        assert status == 1 and "no such runs" in err and read_records(results / "pair.jsonl") == before
    assert "2 runs made" in run(*words, "--again", "--method", "Full")[1]
    made = read_records(results / "pair.jsonl")                                 # the others are untouched
    assert made[:2] == before[2:] and [(e["method"], e["seed"]) for e in made[2:]] == [("Full", 0), ("Full", 1)]
    assert "did you mean pair" in run("run", "pairr")[2]


def test_a_run_without_its_data_stops_at_once_and_says_what_to_set(run, monkeypatch, tmp_path):
    monkeypatch.delenv("DPFT_DATA", raising=False)
    status, out, err = run("run", "frost-text", "--output", tmp_path / "new", "--workers", 1)
    assert status == 1 and not out and err.count("\n") == 1 and "set the environment variable DPFT_DATA" in err and "root" not in err
    assert not (tmp_path / "new" / "frost-text.jsonl").exists()


def test_a_start_is_the_same_for_all_seeds_unless_it_has_its_own():
    task = experiments.prepared_task("digits", "mlp")
    def first_weights(**own):
        model = experiments.start_of({"model": "mlp", "public": "font digits", "public_epochs": 1, "seed": 5, **own}, task)
        return next(model.parameters())
    assert torch.equal(first_weights(), first_weights(seed=6))
    assert torch.equal(first_weights(), first_weights(start_seed=0))
    assert not torch.equal(first_weights(), first_weights(start_seed=1))


def test_what_runs_stand_on_is_looked_for_where_their_records_go(run, tmp_path):
    status, _, err = run("run", "digits", "--plan", "--output", tmp_path / "new")     # it has a tuning among the records of the book
    assert status == 1 and "digits-tuning.jsonl" in err and "make it first" in err


# ---- weights


@pytest.mark.parametrize("right", [True, False])
def test_a_wheel_whose_code_is_run_has_a_checksum(tmp_path, monkeypatch, right):
    import hashlib
    import zipfile
    from types import SimpleNamespace

    wheel = tmp_path / "code-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("code/__init__.py", "")
    known = hashlib.sha256(wheel.read_bytes()).hexdigest() if right else 64 * "0"
    monkeypatch.setattr(pretrained.subprocess, "run", lambda *words, **options: SimpleNamespace(returncode=0, stderr=""))
    if right:
        assert (pretrained.fetch("code==1", "code/", tmp_path, known) / "__init__.py").exists()
    else:
        with pytest.raises(ValueError, match="code==1 is another wheel than expected"):
            pretrained.fetch("code==1", "code/", tmp_path, known)
        assert not (tmp_path / "code").exists()
