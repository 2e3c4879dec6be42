"""A record is stale when what computed it has changed, and not when anything else has; one run repeated vouches for those of its way."""

import itertools
import json
import sys

import pytest
import torch

from dpft.book import evidence, experiments, provenance, queue
from dpft.book.evidence import EXPERIMENTS
from dpft.book.experiments import Experiment, make_record, measured_run, packed, read_records, write_records
from dpft.book.provenance import is_stale, modules_behind, recheck_of, roots_of, source_hash, way_of, why_stale

NUMBERS = itertools.count()
LAZY = """
from importlib import import_module
def __getattr__(name):
    if name != 'found':
        raise AttributeError(name)
    return import_module('PACKAGE.home').Found
"""
FILES = {"a.py": "from . import b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import PACKAGE.idle\n"
                 "def use():\n    'Of the text.'\n    from PACKAGE.late import value\n    return b.one + value\n",
         "b.py": "one = 1\n", "late.py": "from PACKAGE import found\nvalue = 2\n", "idle.py": "three = 3\n",
         "home.py": "class Found:\n    four = 4\n", "__init__.py": LAZY}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package, with some of its files changed, and give its name; each under a name of its own."""
    def made(**changed):
        name = f"planted_{next(NUMBERS)}"
        (tmp_path / name).mkdir()
        for file, text in {**FILES, **{f"{key}.py": value for key, value in changed.items()}}.items():
            (tmp_path / name / file).write_text(text.replace("PACKAGE", name))
        return name
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for name in [name for name in sys.modules if name.startswith("planted_")]:
        del sys.modules[name]


def hashed(package, **changed):
    name = package(**changed)
    return source_hash(f"{name}.a", called=name)


def test_the_modules_behind_another_are_those_that_it_imports_when_it_runs(package):
    name = package()
    found = modules_behind(f"{name}.a")
    late = {f"{name}.late", f"{name}.home"}                                      # within a function, and lazily from the package
    assert set(found) == {name, f"{name}.a", f"{name}.b", *late}
    assert modules_behind(f"{name}.b") == [f"{name}.b"]


def test_only_code_that_is_used_makes_another_hash(package):
    first = hashed(package)
    assert hashed(package) == first
    assert hashed(package, idle="three = 30\n") == first                          # imported for its types alone
    assert hashed(package, b="# the number one\none = (1)\n") == first            # comments and brackets compute nothing
    assert hashed(package, a=FILES["a.py"].replace("Of the text.", "Other words.")) == first
    for name, text in {"b": "one = 7\n", "late": "from PACKAGE import found\nvalue = 7\n", "home": "class Found:\n    four = 7\n"}.items():
        assert hashed(package, **{name: text}) != first, name


def test_training_is_behind_a_run_and_the_command_line_and_the_pictures_are_not():
    behind = set(modules_behind("dpft.book.evidence.frost"))
    assert {"dpft.engine", "dpft.step", "dpft.gradients", "dpft.privacy", "dpft.frost.selection"} <= behind
    assert not {"dpft.cli.book", "dpft.book.drawings", "dpft.book.evidence", "dpft.rapft.perturbation", "dpft.auditing"} & behind


def test_the_methods_that_a_run_names_are_among_its_modules():
    measure = EXPERIMENTS["frost-text"].measure
    assert roots_of(measure, {"method": "Full", "options": {}}) == ("dpft.baselines", "dpft.book.evidence.frost", "dpft.book.experiments")
    wrapped = {"method": "RapFT", "options": {"method": ["LayerFreeze", {}]}}
    assert {"dpft.rapft.perturbation", "dpft.freezing.schedule"} <= set(roots_of(measure, wrapped))
    assert roots_of(lambda settings: settings, {"method": "Untouched"})          # neither a method nor a module of the package


def test_other_packages_make_a_record_stale_and_other_files_do_not():
    entry = provenance.provenance(("dpft.privacy",))
    assert not is_stale(entry) and why_stale(entry) == []
    changed = {**entry, "versions": {**entry["versions"], "torch": "0.1"}}
    assert is_stale(changed) and why_stale(changed) == [f"torch {entry['versions']['torch']} in place of 0.1"]
    assert not is_stale({**entry, "versions": {**entry["versions"], "dpft": "0.0.0"}})       # its modules are looked at themselves
    series = ".".join(entry["versions"]["python"].split(".")[:2])
    assert not is_stale({**entry, "versions": {**entry["versions"], "python": f"{series}.99"}})
    assert why_stale({**entry, "source_hash": "0" * 16}) == ["the source of dpft.privacy, or of what it imports"]
    assert is_stale({**entry, "modules": ["dpft.gone"]}) and is_stale({})


def test_every_experiment_says_what_it_stands_on(tmp_path):
    experiment = experiments.Experiment("?", lambda full: [{"data": "digits", "method": "LoRA", "seed": 0}],
                                        lambda settings: {"metrics": {}}, "nothing")
    (entry,) = experiments.run_experiment("e", experiment, tmp_path / "e.jsonl")
    assert {"dpft.baselines", "dpft.book.experiments"} <= set(entry["modules"]) and not is_stale(entry)


# a run that is repeated ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("changes", [{"options": {"init": "top-k"}}, {"clipping": "automatic"}, {"data": "sst2"}, {"label": "other"}])
def test_another_way_is_not_vouched_for_and_other_numbers_are(changes, world, tmp_path):
    entry = next(entry for entry in stored(tmp_path) if entry["method"] == "LastLayer")
    rest = {name: value for name, value in entry.items() if name not in changes}
    write_records(tmp_path / "planted.jsonl", [{"experiment": "planted", **changes, **rest}])
    queue.run_rechecks(source(tmp_path, method="LastLayer", data="digits", options={}, seed=2), None)
    other = stored(tmp_path)[-1]
    assert is_stale(other) and not is_stale(entry) and way_of(other) != way_of(entry)
    assert not is_stale({**entry, "seed": 99, "learning_rate": 7.0})


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
