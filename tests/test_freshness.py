"""A record is stale when what computed it has changed, and not when anything else has."""

import itertools
import sys

import pytest

from dpft.book import experiments, provenance
from dpft.book.evidence import EXPERIMENTS
from dpft.book.provenance import is_stale, modules_behind, roots_of, source_hash, why_stale

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
