"""Runs from a queue: order, time, processes, interruption, and what is said."""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch

from dpft.book import evidence, experiments, provenance, queue
from dpft.book.experiments import Experiment, measured_run, packed, read_records, unpacked
from dpft.data import TensorData
from dpft.models import load_model

TINY = {"data": "digits", "model": "mlp", "method": "LastLayer", "target_epsilon": 8.0, "steps": 2, "batch_size": 64, "accountant": "rdp"}


def noted(settings):
    return {"metrics": {"accuracy": 0.5}, "process": os.getpid()}


def failing(settings):
    if settings["seed"] == 1:
        raise ValueError("seed 1 is not for us")
    return noted(settings)


def sleeping(settings):
    time.sleep(settings["nap"])
    return noted(settings)


def napping(*naps, believed=None):
    return Experiment("?", lambda full: [{"data": "d", "method": "m", "seed": 0, "nap": nap} for nap in naps], sleeping, "nothing",
                      seconds=lambda settings: float(settings["nap"]) if believed is None else believed)


def many(count, measure=noted, **fields):
    entries = [{"data": "digits", "method": "m", "seed": seed} for seed in range(count)]
    return Experiment("?", lambda full: entries, measure, "nothing", **fields)


def seeds(path):
    return [entry["seed"] for entry in read_records(path)]


def test_the_most_informative_run_is_made_first(tmp_path):
    known = {"late": many(2, priority=lambda s: 5 + s["seed"]), "soon": many(3, priority=lambda s: -s["seed"])}
    said = []
    queue.run_queue(queue.Source(known, tmp_path), 1, say=said.append)
    order = [line.split(":")[0] for line in said if ": " in line and " done" in line]
    assert order == ["soon", "soon", "soon", "late", "late"] and seeds(tmp_path / "soon.jsonl") == [2, 1, 0]
    assert "3 of 5 done" in said[2] and "5 of 5 done" in said[4]


def test_what_is_there_is_counted_and_not_made_again(tmp_path):
    queue.run_queue(queue.Source({"e": many(2)}, tmp_path), 1)
    said = []
    made = queue.run_queue(queue.Source({"e": many(3)}, tmp_path), 1, say=said.append)
    assert (made.fresh, made.there) == (1, 2) and "3 of 3 done" in said[0] and len(read_records(tmp_path / "e.jsonl")) == 3


def test_several_processes_make_each_run_once_with_one_thread_and_no_two_of_a_group_at_once(tmp_path):
    queue.run_queue(queue.Source({"e": many(6, spanning, group=lambda settings: "odd" * (settings["seed"] % 2))}, tmp_path), 2)
    records = read_records(tmp_path / "e.jsonl")
    assert sorted(entry["seed"] for entry in records) == list(range(6)) and {entry["threads"] for entry in records} == {1}
    assert os.getpid() not in {entry["process"] for entry in records}
    spans = sorted(tuple(entry["span"]) for entry in records if entry["seed"] % 2)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_a_run_of_the_reduced_grid_is_none_of_the_full_one(tmp_path):
    queue.run_queue(queue.Source({"e": many(2)}, tmp_path), 1)
    left = [len(queue.Source({"e": many(3)}, tmp_path, full=full).pending()) for full in (False, True)]
    assert left == [1, 3]
    both = many(2, single=True)                                       # one grid for all, whose records are of the full one
    queue.run_queue(queue.Source({"s": both}, tmp_path), 1)
    assert [entry["reduced"] for entry in read_records(tmp_path / "s.jsonl")] == [False, False]
    assert not queue.Source({"s": both}, tmp_path).pending() and not queue.Source({"s": both}, tmp_path, full=True).pending()
    assert list(experiments.run_experiment("s", both, tmp_path / "s.jsonl")) == [None, None]


def test_experiments_that_wait_find_a_worker_for_each_core(tmp_path, monkeypatch):
    def waits(full):
        raise ValueError("make the first before")
    monkeypatch.setattr(queue, "Worker", lambda: "idle")
    known = {"first": many(1), "second": Experiment("?", waits, noted, "nothing")}
    assert len(queue.Queue(queue.Source(known, tmp_path), 3, 1.0, print).workers) == 3
    assert len(queue.Queue(queue.Source({"first": many(1)}, tmp_path), 3, 1.0, print).workers) == 1


def polite(settings):
    "Finishes its step when it is told to end, and can be killed from then on, as a run with a checkpoint."
    def told(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (settings["folder"] / "told").touch()
    signal.signal(signal.SIGTERM, told)
    (settings["folder"] / "begun").touch()
    while not (settings["folder"] / "told").exists():
        time.sleep(0.01)
    time.sleep(1)
    (settings["folder"] / "saved").touch()
    os._exit(143)


def test_a_run_is_told_once_to_end_and_has_time_for_its_step(tmp_path):
    worker = queue.Worker()
    worker.begin(queue.Job("e", {"folder": tmp_path}, polite, True, 0.0, "", tmp_path / "e.jsonl"), None)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    queue.end_all([worker])
    assert (tmp_path / "saved").exists() and worker.process.exitcode == 143


def launched(folder, ready):
    "A queue's process with a worker that trains."
    worker = queue.Worker()
    worker.begin(queue.Job("e", {"folder": folder}, polite, True, 0.0, "", folder / "e.jsonl"), None)
    ready.send(worker.process.pid)
    time.sleep(600)


def test_a_worker_ends_after_its_step_when_the_queue_was_killed(tmp_path):
    """It trained on for hours, unseen, and kept others from its state: a fork server lives as long as its processes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    launcher = context.Process(target=launched, args=(tmp_path, there))
    launcher.start()
    pid = here.recv()
    try:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        launcher.kill()
        end = time.monotonic() + 60
        while not (tmp_path / "saved").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert (tmp_path / "saved").exists()
    finally:
        launcher.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def queued(folder):
    "A queue's process, which says what it says into a file."
    served = queue._served

    def noticed(its):
        (folder / "ready").touch()
        served(its)

    queue._served = noticed
    queue.run_queue(queue.Source({"e": many(2, lingering)}, folder), 2, hours=1, say=(folder / "said").write_text)


def lingering(settings):
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_queue_that_is_told_to_end_says_what_is_left(number, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=queued, args=(tmp_path,))
    process.start()
    while not (tmp_path / "ready").exists() and process.is_alive():
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    assert (tmp_path / "said").read_text().startswith("told to end: 0 of 2 done, 2 left")


def noted_job(tmp_path):
    return queue.Job("e", {"seed": 0}, noted, True, 0.0, "", tmp_path / "e.jsonl")


def killed(worker):
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.join()


def test_an_idle_worker_that_died_keeps_no_other_alive():
    workers = [queue.Worker(), queue.Worker()]
    killed(workers[0])
    queue.end_all(workers)
    assert [worker.process.exitcode for worker in workers] == [-signal.SIGKILL, 0]


def test_a_worker_that_died_idle_is_replaced_before_its_next_job(tmp_path):
    worker = queue.Worker()
    killed(worker)
    worker.begin(noted_job(tmp_path), None)
    job, entry, _ = worker.finish()
    queue.end_all([worker])
    assert job.experiment == "e" and entry["process"] == worker.process.pid and worker.process.exitcode == 0


def test_a_worker_that_dies_before_it_reads_its_job_costs_that_job_alone(tmp_path):
    worker = queue.Worker()
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.begin(noted_job(tmp_path), None)
    killed(worker)
    assert worker.finish()[1:] == (None, f"its process ended without an answer (status {-signal.SIGKILL})")
    worker.begin(noted_job(tmp_path), None)
    assert worker.finish()[1]["metrics"] == {"accuracy": 0.5}
    queue.end_all([worker])


@pytest.mark.parametrize("killed", [False, True])
def test_the_time_of_a_run_that_was_interrupted_is_added_up_or_not_told(killed, tmp_path, monkeypatch):
    from dpft.step import Step

    settings = {**TINY, "steps": 8, "seed": 3, "checkpoint_every": 1}
    counted, done = itertools.count(1), Step.done

    def stopped(step):
        if next(counted) == 5:
            raise SystemExit(1)
        return done(step)
    monkeypatch.setattr(experiments, "_kept", tmp_path)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Step, "done", stopped)
        experiments.make_record("e", measured_run, settings, True)
    (spent,) = tmp_path.glob("*.seconds")
    assert 0 < float(spent.read_text()) < 1000
    if killed:
        spent.unlink()
    else:
        spent.write_text("1000")
    entry = experiments.make_record("e", measured_run, settings, True)
    assert list(tmp_path.iterdir()) == [] and len(entry["steps_seen"]["loss"]) == 8
    assert "seconds" not in entry if killed else entry["seconds"] > 1000


def test_the_state_of_a_run_is_known_by_its_experiment_its_code_and_its_packages(tmp_path, monkeypatch):
    seen = []

    def looking(settings):
        with experiments.unfinished(settings) as folder:
            seen.append(folder)
        return {}
    monkeypatch.setattr(experiments, "_kept", tmp_path)
    experiments.make_record("e", looking, TINY, True)
    experiments.make_record("e", looking, TINY, True)
    experiments.make_record("f", looking, TINY, True)
    with monkeypatch.context() as patch:
        patch.setattr(experiments, "versions", lambda: {"torch": "another"})
        experiments.make_record("e", looking, TINY, True)
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "source_hash", lambda *modules: "another")
        experiments.make_record("e", looking, TINY, True)
    assert seen[0] == seen[1] and len(set(seen)) == 4


def test_a_record_names_the_code_that_made_it_and_not_what_was_saved_meanwhile(monkeypatch):
    now = ["before"]
    monkeypatch.setattr(provenance, "source_hash", lambda *modules: now[0])
    monkeypatch.setattr(provenance, "commit", lambda: {"commit": now[0]})

    def editing(settings):
        now[0] = "after"
        return {}
    entry = experiments.make_record("e", editing, TINY, True)
    assert entry["source_hash"] == entry["commit"] == "before"


def test_two_queues_side_by_side_write_each_record_once(tmp_path):
    its = many(3)
    first, second = (queue.Queue(queue.Source({"e": its}, tmp_path), 0, float("inf"), print) for _ in range(2))
    for one in (first, second):
        for job in list(one.jobs):
            one.take(job, *queue.answer_of(job, None))
    assert seeds(tmp_path / "e.jsonl") == [0, 1, 2] and (first.made.fresh, second.made.fresh) == (3, 0)


def test_what_is_finished_when_the_queue_ends_is_written_down(tmp_path):
    its = napping(0.1)
    line = queue.Queue(queue.Source({"e": its}, tmp_path), 1, float("inf"), lambda said: None)
    line.begin()
    line.workers[0].connection.poll(60)                                          # it has answered, and nobody has listened
    line.end()
    assert seeds(tmp_path / "e.jsonl") == [0] and line.made.fresh == 1 and not line.jobs
    line.end()                                                                   # once is enough


def ends_on_interrupt(settings):
    os.kill(os.getpid(), signal.SIGINT)
    return noted(settings)


def test_a_worker_leaves_an_interrupt_to_its_queue(tmp_path):
    its = many(1, measure=ends_on_interrupt)
    made = queue.run_queue(queue.Source({"e": its}, tmp_path), 1, hours=1)
    assert made.fresh == 1


@pytest.mark.parametrize("method,module", [("DPFrost", "dpft.frost.selection"), ("LayerFreeze", "dpft.freezing.schedule")])
def test_the_state_of_a_run_is_known_by_the_code_of_its_method(method, module, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(experiments, "source_hash", lambda *modules: asked.extend(modules) or "hash")
    monkeypatch.setattr(experiments, "_kept", tmp_path)
    with experiments.unfinished({**TINY, "method": method}):
        pass
    assert module in asked


def test_runs_that_share_a_trunk_are_of_one_group():
    groups = {name: {its.group(settings) for settings in its.grid(False)} for name, its in evidence.EXPERIMENTS.items()
              if name in ("lf-table1", "lf-layers", "lf-pwcca")}
    assert groups["lf-layers"] <= groups["lf-pwcca"] | groups["lf-table1"] and "" not in set.union(*groups.values())


def spanning(settings):
    began = time.time()
    time.sleep(0.2)
    return {**noted(settings), "span": [began, time.time()], "threads": torch.get_num_threads()}


def parental(settings):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    return {**noted(settings), "exitcode": child.exitcode}


def test_a_run_may_start_processes_of_its_own(tmp_path):
    made = queue.run_queue(queue.Source({"e": many(2, parental)}, tmp_path), 2)
    assert made.fresh == 2 and {entry["exitcode"] for entry in read_records(tmp_path / "e.jsonl")} == {0}


def test_runs_of_one_group_wait_for_each_other_and_others_pass_them(tmp_path):
    jobs = queue.Source({"e": many(3, group=lambda settings: "same" if settings["seed"] < 2 else "")}, tmp_path).pending()
    assert queue.next_job(jobs, [], lambda job: 1.0, 9.0) is jobs[0]
    assert queue.next_job(jobs, jobs[:1], lambda job: 1.0, 9.0) is jobs[2]
    assert queue.next_job(jobs, jobs[:1], lambda job: 10.0, 9.0) is None


class Clock:
    "Stands still while workers start, for ten minutes at most; as soon as something is said, so many seconds are left of 72."

    def __init__(self, said, left):
        self.said, self.left, self.began, self.leap = said, left, time.monotonic(), None

    def monotonic(self):
        now = time.monotonic()
        if self.said and self.leap is None:
            self.leap = now
        return max(now - self.began - 600, 0) if self.leap is None else 72 - self.left + now - self.leap


def test_what_would_not_finish_is_not_begun_and_what_runs_over_is_stopped(tmp_path, monkeypatch):
    known = {"e": napping(5000, 0), "over": napping(300, believed=1.0)}
    said = []
    monkeypatch.setattr(queue, "time", Clock(said, left=5.0))        # the workers have the true one
    made = queue.run_queue(queue.Source(known, tmp_path), 1, hours=0.02, say=said.append)
    assert made.fresh == 1 and made.left == 2 and [entry["nap"] for entry in read_records(tmp_path / "e.jsonl")] == [0]
    assert "1 of 3 done, 2 left" in said[-1] and not (tmp_path / "over.jsonl").exists()


def test_no_run_begins_whose_group_waits_for_a_longer_one(tmp_path):
    """A branch of twenty steps was begun in the last minutes, and made its trunk of fifteen hundred first."""
    job = [queue.Job("e", {"seed": seed, "last": last}, noted, True, 0.0, str(seed), tmp_path / "e.jsonl")
           for seed in (0, 1) for last in (0, 20)]
    seconds = {0: 5000.0, 20: 30.0}
    assert queue.next_job(job, [], lambda its: seconds[its.settings["last"]], 100.0) is None
    assert queue.next_job(job[1:], [], lambda its: seconds[its.settings["last"]], 100.0) is job[1]
    assert queue.next_job(job[1:], [job[1]], lambda its: 30.0, 100.0) is job[2]


def test_times_of_earlier_runs_replace_what_was_believed(tmp_path):
    known = {"e": many(3, seconds=lambda settings: 9999.0)}
    source = queue.Source(known, tmp_path)
    assert source.seconds(source.pending()[0]) == 9999.0
    made = {"experiment": "e", "data": "digits", "method": "m", "seed": 0, "reduced": True, "seconds": 7.0}
    experiments.write_records(tmp_path / "e.jsonl", [made])
    assert source.seconds(source.pending()[0]) == 7.0


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path):
    with pytest.raises(ValueError, match="seed 1 is not for us"):
        queue.run_queue(queue.Source({"e": many(3, failing)}, tmp_path), 1)
    assert seeds(tmp_path / "e.jsonl") == [0, 2]


def test_a_process_that_dies_costs_its_run_alone(tmp_path):
    with pytest.raises(ValueError, match="ended without an answer"):
        queue.run_queue(queue.Source({"e": many(3, dying)}, tmp_path), 1, hours=1)
    assert sorted(seeds(tmp_path / "e.jsonl")) == [0, 2]


def dying(settings):
    if settings["seed"] == 1:
        os._exit(3)
    return noted(settings)


def test_a_grid_that_stands_on_other_records_waits_for_them(tmp_path):
    def second(full):
        if not (tmp_path / "first.jsonl").exists():
            raise ValueError("first.jsonl holds no runs; make them first: dpft run first")
        return [{"data": "digits", "method": "m", "seed": 7}]
    after = Experiment("?", second, noted, "nothing", priority=lambda settings: -9)
    made = queue.run_queue(queue.Source({"second": after, "first": many(2)}, tmp_path), 1)
    assert made.fresh == 3 and seeds(tmp_path / "second.jsonl") == [7]
    (tmp_path / "first.jsonl").unlink()
    with pytest.raises(ValueError, match="make them first: dpft run first"):
        queue.run_queue(queue.Source({"second": after}, tmp_path), 1)


def stopped_at_its_fifth_step(settings, folder):
    "A run in a process of its own, told to end when its fifth step is done."
    from dpft.step import Step
    experiments.keep_unfinished(folder)
    done, count = Step.done, itertools.count(1)

    def counted(self):
        if next(count) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return done(self)

    Step.done = counted
    measured_run(settings)


def test_a_run_that_is_told_to_stop_goes_on_from_its_state_and_ends_the_same(tmp_path):
    settings = {**TINY, "steps": 12, "seed": 3, "checkpoint_every": 1}
    experiments.keep_unfinished(None)
    whole = measured_run({name: value for name, value in settings.items() if name != "checkpoint_every"})
    process = queue.worker_context().Process(target=stopped_at_its_fifth_step, args=(settings, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == ["", ".ledger", ".seconds"]
    experiments.keep_unfinished(tmp_path)
    try:
        again = measured_run(settings)
    finally:
        experiments.keep_unfinished(None)
    assert list(tmp_path.iterdir()) == [] and again["answers"] == whole["answers"] and again["epsilon"] == whole["epsilon"]
    assert again["steps_seen"]["loss"] == whole["steps_seen"]["loss"] and len(again["steps_seen"]["clipped"]) == 12
    assert again["steps_seen"]["clipped"] == whole["steps_seen"]["clipped"]


def test_answers_are_packed_whole_and_say_what_was_right():
    for values in (torch.arange(23) % 3 == 0, torch.arange(200).to(torch.int64)):
        assert torch.equal(unpacked(packed(values)).to(values.dtype), values)
    found = measured_run({**TINY, "seed": 0})
    right = unpacked(found["answers"]["accuracy"]["right"])
    task = experiments.prepared_task("digits", "mlp")
    assert found["metrics"]["accuracy"] == pytest.approx(right.double().mean().item())
    assert torch.equal(unpacked(found["answers"]["accuracy"]["said"]) == task.dev.labels, right)
    json.dumps(found)


def test_answers_lie_in_the_order_of_the_rows_whatever_their_lengths():
    data = TensorData(torch.rand(70, 1, 8, 8), torch.arange(70) % 10)
    model = load_model("mlp", 10, "image", (1, 8, 8))
    plain = experiments.answered(model, data)
    data.lengths = torch.arange(70, 0, -1)
    assert all(torch.equal(one, other) for one, other in zip(plain, experiments.answered(model, data), strict=True))


def test_the_shares_of_clipped_examples_are_those_of_the_bound():
    loose, tight = (measured_run({**TINY, "seed": 0, "clip": clip})["steps_seen"]["clipped"] for clip in (1e6, 1e-6))
    assert loose == [0.0, 0.0] and tight == [1.0, 1.0]


def test_the_command_makes_several_experiments_and_plans_them(run, monkeypatch, tmp_path):
    for name in ("one", "two"):
        monkeypatch.setitem(evidence.EXPERIMENTS, name, many(2, seconds=lambda settings: 1800.0))
    status, out, _ = run("run", "one", "two", "--plan", "--output", tmp_path, "--workers", "1")
    assert status == 0 and "4 runs left, 2.0 h on one core" in out and not list(tmp_path.iterdir())
    status, out, _ = run("run", "one", "two", "--output", tmp_path, "--workers", "1")
    assert status == 0 and "4 runs made, 0 there already" in out
    assert {file.name for file in tmp_path.glob("*.jsonl")} == {"one.jsonl", "two.jsonl"}
