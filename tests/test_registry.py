"""Methods by name: ours, those of installed packages, those in a file; and one of the user's through the commands."""

import importlib.metadata
import inspect

import pytest

import dpft
from dpft import registry
from dpft.book.audits import method_to_audit
from dpft.registry import METHODS, known_methods, method_from, method_named, method_type

MINE = '''
from dpft import Method

class Mine(Method):
    "The last of what may train."

    def __init__(self, fold=1, inner=None):
        self.fold, self.inner = fold, inner

    def choose(self, context, among):
        return list(among)[-self.fold:]

nothing = 3
'''


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("name", METHODS)
def test_every_name_makes_its_method_with_options_that_exist(name):
    method, rate = method_named(name)
    assert type(method).__name__ == METHODS[name].kind and rate == METHODS[name].learning_rate
    assert set(METHODS[name].options) <= set(inspect.signature(type(method)).parameters)
    assert method_type(METHODS[name].kind) is type(method) is getattr(dpft, METHODS[name].kind)


def test_a_method_in_a_file_is_found_and_takes_options(mine):
    method, rate = method_named(f"{mine}:Mine", ["fold=3", 'inner=["LoRA", {"rank": 2}]'])
    assert type(method).__name__ == "Mine" and method.fold == 3 and method.inner.rank == 2 and rate is None
    nested = method_from("Chain", {"parts": [["LoRA", {}], [f"{mine}:Mine", {"fold": 2}]]})
    assert nested.parts[1].fold == 2


@pytest.mark.parametrize("name, said", [
    ("bitft", "did you mean bitfit"), ("nowhere.py:Mine", "nowhere.py cannot be imported"), ("no.module:Mine", "cannot be imported"),
    ("{mine}:Yours", "no class of methods Yours"), ("{mine}:nothing", "derived from dpft.Method"), ("Ledger", "unknown method"),
    ("", "unknown method"), ("./mine:Mine", "./mine cannot be imported.*file.py:Class"), (".mine:Mine", ".mine cannot be imported"),
    (":Mine", "cannot be imported")])
def test_what_is_no_method_is_refused_in_a_sentence(mine, name, said):
    with pytest.raises(ValueError, match=said) as refused:
        method_type(name.format(mine=mine))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["import nothing_of_this_name", "raise ValueError('not today')", "class"])
def test_a_file_that_does_not_run_leaves_no_module(tmp_path, text):
    """What was half made stayed, and pickle or an import would have found it."""
    import sys
    (tmp_path / "halfmade.py").write_text(text)
    with pytest.raises((ValueError, SyntaxError)):
        method_named(f"{tmp_path}/halfmade.py:Mine")
    assert "dpft_methods_halfmade" not in sys.modules


def test_an_installed_package_names_its_methods_and_renames_none_of_ours(mine, monkeypatch):
    there = [importlib.metadata.EntryPoint("theirs", f"{mine}:Mine", registry.GROUP),
             *(importlib.metadata.EntryPoint(name, f"{mine}:Mine", registry.GROUP) for name in ("full", "BiTFiT", "Chain"))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: there if group == registry.GROUP else [])
    assert list(known_methods())[-1] == "theirs" and known_methods()["full"] == METHODS["full"]
    assert type(method_named("theirs", ["fold=2"])[0]).__name__ == "Mine" and type(method_named("full")[0]) is dpft.Full
    assert method_type("BiTFiT") is dpft.BiTFiT and method_type("Chain") is dpft.Chain      # names of records and of nested options


def test_the_options_of_an_audit_are_those_of_its_method():
    method = method_to_audit("dp-frost", ["rounds=1"])[1](6)
    plain = method_to_audit("dp-frost")[1](6)
    assert method.rounds == 1 != plain.rounds and method.ratio == plain.ratio
    for given, said in ((["nonsense=1"], "DPFrost has no option 'nonsense'"), (["ratio=x"], "ratio=x of method DPFrost: give a number")):
        with pytest.raises(ValueError, match=said):
            method_to_audit("dp-frost", given)[1](6)


def test_text_needs_no_quotes_and_a_list_is_json(mine):
    method, _ = method_named(f"{mine}:Mine", ["fold=3", "inner=rows of mine"])
    assert method.inner == "rows of mine" and method_named(f"{mine}:Mine", ['inner=["a", "b"]'])[0].inner == ["a", "b"]
    for given, said in (("inner=a,b", "a list is written as JSON"), ("fold", "write name=value"), ("olds=3", "has no option 'olds'")):
        with pytest.raises(ValueError, match=said):
            method_named(f"{mine}:Mine", [given])


def test_one_of_the_users_is_trained_and_planned(run, mine):
    words = "--data", "digits", "--model", "mlp", "--method", f"{mine}:Mine"
    status, out, err = run("train", *words, "--limit", "200", "--steps", "2", "--no-progress", "--accountant", "rdp", "--epsilon", "8")
    assert status == 0 and "differentially private" in out, err
    status, out, err = run("plan", *words, "--epsilon", "2", "--steps", "10", "--batch-sizes", "100")
    assert status == 0 and f"--method {mine}:Mine" in out, err
