"""Runs from a queue: order, time, processes, failures, what is said, and the command."""

import itertools
import multiprocessing
import os
import time

import pytest
import torch

from dpft.book import evidence, experiments, queue
from dpft.book.experiments import Experiment, measured_run, packed, read_records, unpacked
from dpft.book.queue import Source, run_queue
from dpft.models import load_model
from dpft.tasks import load_data

TINY = {"data": "digits", "model": "mlp", "method": "LastLayer", "target_epsilon": 8.0, "steps": 2, "batch_size": 64, "accountant": "rdp"}


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    return tmp_path


def noted(settings):
    began = time.monotonic()
    time.sleep(settings.get("nap", 0))
    return {"metrics": {"accuracy": 0.5}, "process": os.getpid(), "threads": torch.get_num_threads(), "span": [began, time.monotonic()]}


def failing(settings):
    if settings["seed"] == 1:
        raise ValueError("seed 1 is not for us")
    return noted(settings)


def dying(settings):
    os._exit(3)


def many(count, measure=noted, nap=0.0, **fields):
    return Experiment("?", lambda: [{"data": "digits", "method": "m", "nap": nap, "seed": seed} for seed in range(count)], measure,
                      "nothing", **fields)


def seeds(name):
    return [entry["seed"] for entry in experiments.recorded(experiments.results_file(name))]


def test_the_most_informative_run_is_made_first_and_the_state_is_said():
    said = []
    known = {"late": many(2, priority=lambda s: 5 + s["seed"]), "soon": many(3, priority=lambda s: -s["seed"])}
    made = run_queue(Source(known), 1, say=said.append)
    assert [line.split(":")[0] for line in said] == ["soon", "soon", "soon", "late", "late"] and seeds("soon") == [2, 1, 0]
    assert "3 of 5 done, 2 left" in said[2] and "5 of 5 done, 0 left" in said[4] and (made.fresh, made.there, made.left) == (5, 0, 0)


def test_what_is_there_is_not_made_again_and_other_settings_are():
    run_queue(Source({"e": many(2)}), 1)
    made = run_queue(Source({"e": many(3)}), 1)
    assert (made.fresh, made.there) == (1, 2) and seeds("e") == [0, 1, 2]
    assert run_queue(Source({"e": many(3, nap=0.001)}), 1).fresh == 3           # another setting, another run
    assert run_queue(Source({"e": many(9)}, wanted=lambda run: run["seed"] > 7), 1).fresh == 1


def test_the_papers_grid_is_another_one_and_marked_as_such():
    its = many(1, reduced=True, full=lambda: [{"data": "digits", "method": "m", "seed": 9}])
    for full in (False, True):
        run_queue(Source({"e": its, "s": many(1)}, full), 1)
    records = {name: experiments.recorded(experiments.results_file(name)) for name in "es"}
    assert [(entry["seed"], entry["reduced"]) for entry in records["e"]] == [(0, True), (9, False)]
    assert [entry["reduced"] for entry in records["s"]] == [False]              # one grid, which is as large as it gets
    assert [entry["seed"] for entry in experiments.records_of("e")] == [9]


def test_several_processes_have_one_thread_each_and_a_group_stays_in_one():
    run_queue(Source({"e": many(6, nap=0.05, group=lambda settings: "odd" * (settings["seed"] % 2))}), 2)
    records = read_records(experiments.results_file("e"))
    assert sorted(entry["seed"] for entry in records) == list(range(6)) and {entry["threads"] for entry in records} == {1}
    assert os.getpid() not in {entry["process"] for entry in records}
    odd = [entry for entry in records if entry["seed"] % 2]
    assert len({entry["process"] for entry in odd}) == 1
    assert all(first["span"][1] <= second["span"][0] for first, second in itertools.pairwise(odd))


def test_no_run_is_begun_that_would_not_end_in_time():
    its = Experiment("?", lambda: [{"data": "d", "method": "m", "steps": 10**seed, "seed": seed} for seed in (0, 6, 1)], noted, "nothing",
                     seconds=lambda settings: float(settings["steps"]))
    made = run_queue(Source({"e": its}), 1, hours=0.5)
    assert seeds("e") == [0, 1] and (made.fresh, made.left) == (2, 1)


def test_times_of_similar_runs_replace_what_was_believed():
    run_queue(Source({"e": many(2, nap=0.01)}), 1)
    jobs = Source({"e": many(3, nap=0.01)}).pending()
    assert len(jobs) == 1 and jobs[0].seconds < 1 and Source({"e": many(1, nap=0.02)}).pending()[0].seconds == 60


def test_a_run_that_fails_is_named_and_the_others_are_made():
    said = []
    with pytest.raises(ValueError, match="1 jobs failed, the first: e: m, seed 1 failed: ValueError: seed 1 is not for us"):
        run_queue(Source({"e": many(3, failing)}), 1, say=said.append)
    assert seeds("e") == [0, 2] and any("failed" in line for line in said)


def test_a_process_that_dies_is_a_failure_and_no_endless_wait():
    with pytest.raises(ValueError, match="jobs failed"):
        run_queue(Source({"e": many(1, dying), "f": many(2, dying)}), 2)
    assert seeds("e") == []


def test_a_grid_that_stands_on_other_records_waits_for_them():
    def later():
        if not seeds("first"):
            raise ValueError("make the first before")
        return [{"data": "d", "method": "m", "seed": 7}]
    known = {"second": Experiment("?", later, noted, "nothing"), "first": many(1)}
    assert run_queue(Source(known), 1).fresh == 2 and seeds("second") == [7]
    with pytest.raises(ValueError, match="make it first"):
        run_queue(Source({"third": Experiment("?", lambda: (_ for _ in ()).throw(ValueError("make it first")), noted, "nothing")}), 1)


def added(name):
    queue.add_record(experiments.results_file(name), {"experiment": name, "seed": 0, "reduced": False, "metrics": {}})


def test_two_programs_that_make_one_run_write_it_once():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(added, ["e"] * 6)
    assert seeds("e") == [0]


def test_runs_that_share_a_trunk_are_of_one_group():
    for name, size in (("lf-table1", 21), ("lf-layers", 9)):
        its = evidence.EXPERIMENTS[name]
        groups = {}
        for settings in its.grid():
            groups.setdefault(its.group(settings), []).append(settings)
        assert max(map(len, groups.values())) <= size and all(len({run["seed"] for run in runs}) == 1 for runs in groups.values())


def test_answers_are_packed_whole_and_lie_in_the_order_of_the_rows():
    for values in (torch.tensor([True, False] * 7 + [True]), torch.arange(11) % 10, torch.tensor([], dtype=torch.bool)):
        assert torch.equal(unpacked(packed(values)).long(), values.long())
    task = load_data("digits", limit=64)
    model = load_model("mlp", len(task.classes), task.kind, task.image_shape)
    said, right = experiments.answered(model, task.train)
    assert torch.equal(said, model(task.train.batch(range(len(task.train)))[0]).argmax(1))
    assert torch.equal(right, said == torch.as_tensor(task.train.labels))


def test_the_command_lists_plans_makes_and_repeats(run, monkeypatch, results):
    its = Experiment("?", lambda: [{**TINY, "method": method, "seed": seed} for method in ("Full", "LastLayer") for seed in range(2)],
                     lambda settings: {"metrics": {"accuracy": 0.5}}, "nothing")
    monkeypatch.setitem(evidence.EXPERIMENTS, "pair", its)
    words = ("run", "pair", "--workers", 1)
    status, out, _ = run("run")
    assert status == 0 and all(name in out for name in evidence.EXPERIMENTS)
    status, out, _ = run(*words, "--plan")
    assert status == 0 and "    4 runs" in out and not (results / "pair.jsonl").exists()
    for expected in ("4 runs made, 0 there already", "0 runs made, 4 there already"):
        assert expected in run(*words)[1]
    before = read_records(results / "pair.jsonl")
    for more, message in ((["--method", "Ful"], "no such runs"), (["--data", "digit"], "no such runs"), (["--plan"], "leave one of them")):
        status, _, err = run(*words, "--again", *more)
        assert status == 1 and message in err and err.count("\n") == 1 and read_records(results / "pair.jsonl") == before
    assert "2 runs made, 0 there already" in run(*words, "--again", "--method", "Full")[1]
    made = read_records(results / "pair.jsonl")                                 # the others are untouched
    assert made[:2] == before[2:] and [(e["method"], e["seed"]) for e in made[2:]] == [("Full", 0), ("Full", 1)]
    assert "did you mean pair" in run("run", "pairr")[2]


def test_what_runs_stand_on_is_looked_for_where_their_records_go(run, monkeypatch, tmp_path):
    monkeypatch.setenv("DPFT_RESULTS", "elsewhere")
    status, _, err = run("run", "digits", "--plan", "--output", tmp_path)     # it has a tuning among the records of the book
    assert status == 1 and str(tmp_path / "digits-tuning.jsonl") in err and "make it first" in err
    assert os.environ["DPFT_RESULTS"] == "elsewhere"


def test_a_run_records_its_answers_and_the_shares_that_were_clipped():
    seen = measured_run({**TINY, "seed": 0})
    right = unpacked(seen["answers"]["accuracy"]["right"])
    assert right.double().mean().item() == pytest.approx(seen["metrics"]["accuracy"])
    assert len(seen["steps_seen"]["clipped"]) == len(seen["steps_seen"]["loss"]) == 2
    assert set(measured_run({**TINY, "held_out": 100, "seed": 0})["metrics"]) == {"accuracy"}
    with pytest.raises(TypeError, match="rate"):
        measured_run({**TINY, "rate": 1.0, "seed": 0})
