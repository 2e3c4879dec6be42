"""One run repeated says whether the records of its way still hold; another answer, another way or other code is not vouched for."""

import json
import sys

import pytest
import torch

from dpft.book import evidence, queue
from dpft.book.experiments import Experiment, make_record, measured_run, packed, read_records, write_records
from dpft.book.provenance import is_stale, maker_of, recheck_of, way_of, why_stale

ROWS = 400
ANSWERS = torch.arange(ROWS) % 10
HOME = """
import torch
from dpft.book.experiments import packed
FLIPS, SCORE, BUDGET, MADE = 0, 0.8, 2.0, []
def measure(settings):
    MADE.append(settings)
    said = torch.arange(400) % 10
    said[:FLIPS] = (said[:FLIPS] + 1) % 10
    return {"epsilon": BUDGET, "delta": 1e-5, "metrics": {"accuracy": SCORE}, "answers": {"accuracy": {"said": packed(said), "right": ""}}}
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """An experiment whose measurement stands in a module of its own, with records of two methods and three seeds by other code."""
    (tmp_path / "planted_home.py").write_text(HOME)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    import planted_home
    grid = [{"data": "digits", "method": method, "options": {}, "seed": seed, "learning_rate": 0.1 + seed}
            for method in ("LastLayer", "BiTFiT") for seed in range(3)]
    monkeypatch.setitem(evidence.EXPERIMENTS, "planted", Experiment("?", lambda full: grid, planted_home.measure, "nothing"))
    records = [{**make_record("planted", planted_home.measure, settings, True), "source_hash": "0" * 16, "commit": "0ld",
                "seconds": 100.0 - settings["seed"]} for settings in grid]
    write_records(tmp_path / "planted.jsonl", records)
    planted_home.MADE.clear()
    yield planted_home
    del sys.modules["planted_home"]


def source(tmp_path, **wanted):
    return queue.Source({"planted": evidence.EXPERIMENTS["planted"]}, tmp_path,
                        wanted=lambda name, settings: all(settings[key] == value for key, value in wanted.items()))


def stored(tmp_path):
    return read_records(tmp_path / "planted.jsonl")


def test_one_run_of_each_way_vouches_for_its_records(world, tmp_path):
    assert all(map(is_stale, stored(tmp_path)))
    said = []
    made = queue.run_rechecks(source(tmp_path), None, said.append)
    assert (made.fresh, made.left, made.failed) == (2, 0, [])
    assert [(run["method"], run["seed"]) for run in world.MADE] == [("LastLayer", 2), ("BiTFiT", 2)]      # the shortest of three
    assert not any(map(is_stale, stored(tmp_path)))
    assert "100.00% of the answers for accuracy" in said[0] and "98 s before" in said[0]
    lines = read_records(tmp_path / "rechecked.jsonl")
    assert all(line["equal"] and line["unequal"] == [] and line["seconds_before"] == 98.0 and line["of_commit"] == "0ld" for line in lines)
    first = stored(tmp_path)[0]
    assert recheck_of(first) in lines
    assert queue.planned_repeats(source(tmp_path)) == []                          # nothing is stale, so nothing is repeated


def test_a_way_that_was_not_repeated_stays_stale(world, tmp_path):
    queue.run_rechecks(source(tmp_path, method="BiTFiT"), None)
    assert {entry["method"]: is_stale(entry) for entry in stored(tmp_path)} == {"LastLayer": True, "BiTFiT": False}


@pytest.mark.parametrize("changes", [{"options": {"init": "top-k"}}, {"clipping": "automatic"}, {"data": "sst2"}, {"label": "other"}])
def test_another_way_is_not_vouched_for_and_other_numbers_are(changes, world, tmp_path):
    entry = next(entry for entry in stored(tmp_path) if entry["method"] == "LastLayer")
    rest = {name: value for name, value in entry.items() if name not in changes}
    write_records(tmp_path / "planted.jsonl", [{"experiment": "planted", **changes, **rest}])
    queue.run_rechecks(source(tmp_path, method="LastLayer", data="digits", options={}, seed=2), None)
    other = stored(tmp_path)[-1]
    assert is_stale(other) and not is_stale(entry) and way_of(other) != way_of(entry)
    assert not is_stale({**entry, "seed": 99, "learning_rate": 7.0})


def test_records_of_other_code_or_packages_stay_stale(world, tmp_path):
    queue.run_rechecks(source(tmp_path), None)
    entry = stored(tmp_path)[0]
    assert not is_stale(entry)
    assert is_stale({**entry, "source_hash": "1" * 16}) and is_stale({**entry, "versions": {**entry["versions"], "torch": "0.1"}})
    write_records(tmp_path / "planted.jsonl", [{**entry, "source_hash": "1" * 16}])
    assert [its.records for its in queue.planned_repeats(source(tmp_path))] == [1]
    assert maker_of(entry) != maker_of({**entry, "source_hash": "1" * 16})


def test_code_that_changes_after_a_recheck_makes_the_records_stale_again(world, tmp_path):
    queue.run_rechecks(source(tmp_path), None)
    lines = read_records(tmp_path / "rechecked.jsonl")
    (tmp_path / "rechecked.jsonl").write_text("".join(json.dumps({**line, "source_hash": "2" * 16}) + "\n" for line in lines))
    assert all(map(is_stale, stored(tmp_path))) and "the source of" in why_stale(stored(tmp_path)[0])[0]
    (tmp_path / "rechecked.jsonl").write_text("".join(
        json.dumps({**line, "versions": {**line["versions"], "torch": "0.1"}}) + "\n" for line in lines))
    assert all(map(is_stale, stored(tmp_path)))


FAULTS = {"three answers in 400": ("FLIPS", 3, r"99\.25% of the answers"), "the score": ("SCORE", 0.8025, "metrics.accuracy is 0.8025"),
          "the budget": ("BUDGET", 2.00001, "epsilon is 2.00001")}


@pytest.mark.parametrize("name", FAULTS)
def test_another_answer_is_refused_and_its_records_stay_stale(name, world, tmp_path, monkeypatch):
    which, value, message = FAULTS[name]
    monkeypatch.setattr(world, which, value)
    with pytest.raises(ValueError, match="another answer.*" + message):
        queue.run_rechecks(source(tmp_path), None)
    assert all(map(is_stale, stored(tmp_path)))
    lines = read_records(tmp_path / "rechecked.jsonl")
    assert len(lines) == 2 and not any(line["equal"] for line in lines) and recheck_of(stored(tmp_path)[0]) is None


@pytest.mark.parametrize("which,value", [("FLIPS", 2), ("SCORE", 0.8015), ("BUDGET", 2.000001)])
def test_rounding_is_not_another_answer(which, value, world, tmp_path, monkeypatch):
    monkeypatch.setattr(world, which, value)
    queue.run_rechecks(source(tmp_path), None)
    assert not any(map(is_stale, stored(tmp_path)))


def test_the_last_recheck_counts(world, tmp_path, monkeypatch):
    queue.run_rechecks(source(tmp_path), None)
    lines = read_records(tmp_path / "rechecked.jsonl")
    write_records(tmp_path / "rechecked.jsonl", [{**line, "equal": False} for line in lines])
    assert all(map(is_stale, stored(tmp_path)))


def test_what_is_compared_and_what_is_not():
    base = {"epsilon": 2.0, "metrics": {"perplexity": 20.0}, "trainable": 100, "kind": "a",
            "steps_seen": {"loss": [1.0, 0.5]}, "step_seconds": 3.0}
    def told(**changes):
        return queue.differences(base, {**base, **changes})[0]
    assert told() == told(step_seconds=9.0) == told(new=1) == told(metrics={"perplexity": 20.03}) == []
    assert told(metrics={"perplexity": 20.05}) and told(trainable=101) and told(kind="b") and told(steps_seen={"loss": [1.0, 0.48]})
    assert told(steps_seen={"loss": [1.0]}) == ["steps_seen.loss.1 is not returned any more"]
    assert told(steps_seen={"loss": [1.0, 0.504]}) == [] and told(metrics={"perplexity": float("nan")})
    only_times = {"metrics": {}, "costs": {"Full": 3.0}, "step_seconds": 1.0}
    assert queue.differences(only_times, only_times)[0] == ["the record holds times and bytes alone, which do not repeat"]
    with_answers = {**base, "answers": {"accuracy": {"said": packed(ANSWERS), "right": ""}}}
    assert queue.differences(with_answers, base)[0] == ["accuracy is not returned any more"]
    assert queue.differences(base, with_answers)[0] == []
    assert queue.same_share(packed(ANSWERS), packed(ANSWERS[:-1])) == 0.0


def test_a_real_run_repeats(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    tiny = {"data": "digits", "model": "mlp", "method": "LastLayer", "options": {}, "target_epsilon": 8.0, "steps": 3, "batch_size": 64,
            "accountant": "rdp", "seed": 0}
    its = Experiment("?", lambda full: [tiny], measured_run, "nothing")
    entry = {**json.loads(json.dumps(make_record("e", measured_run, tiny, False))), "source_hash": "0" * 16}
    line = queue.rechecked(its, entry)
    assert line["equal"] and line["same_answers"] == {"accuracy": 1.0} and line["settings"] == tiny
    write_records(tmp_path / "rechecked.jsonl", [line])
    assert why_stale(entry) == [] and why_stale({**entry, "method": "Full"})
    right = entry["answers"]["accuracy"]["said"]
    said = queue.unpacked(right)
    said[:5] = (said[:5] + 1) % 10                                              # of 360: below the stated share
    entry["answers"]["accuracy"]["said"] = packed(said)
    assert not queue.rechecked(its, entry)["equal"]


def test_the_command_plans_repeats_and_refuses(world, run, tmp_path, monkeypatch):
    status, out, _ = run("run", "planted", "--recheck", "--plan")
    assert status == 0 and "2 runs to repeat, 0.05 h when their records were made, for 6 stale records" in out and "98 s before" in out
    assert world.MADE == [] and not (tmp_path / "rechecked.jsonl").exists()
    status, out, _ = run("run", "planted", "--recheck", "--hours", "0.01")
    assert status == 0 and "0 runs are the same, 2 were not begun" in out and world.MADE == []
    status, out, _ = run("run", "planted", "--recheck", "--method", "BiTFiT")
    assert status == 0 and "1 runs are the same, 0 were not begun" in out
    status, _, err = run("run", "planted", "--recheck", "--again")
    assert status and "leave one of them out" in err and len(stored(tmp_path)) == 6
    monkeypatch.setattr(world, "FLIPS", 50)
    status, _, err = run("run", "planted", "--recheck")
    assert status and "1 runs give another answer" in err
