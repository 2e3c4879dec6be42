"""The runner of mutants: what a test notices is killed, what none notices survives, a judgement is kept, and a second run resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

SOURCE = '''"A small module."

Number = int | float

def bounded(value: Number, bound: float = 1.0) -> Number:
    "The value, at most the bound."
    if bound <= 0:
        raise ValueError(f"bound={bound}: it must be positive")
    return min(value, bound)

def unseen(flag):
    return not flag
'''
TEST = '''
from toy.small import bounded, unseen

def test_bounded():
    assert bounded(3, 2) == 2 and bounded(3) == 1 and bounded(0.5) == 0.5

def test_unseen():
    unseen(True)
'''


@pytest.fixture
def project(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy" / "__init__.py").write_text("")
    (tmp_path / "toy" / "small.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_small.py").write_text(TEST)
    return tmp_path


def tried(project):
    "Run the program on the small project: what it printed, and its records by what they change."
    words = ["--root", project, "--package", "toy", "--modules", "small", "--tests", "small", "--warm", "hypothesis"]
    done = subprocess.run([sys.executable, mutants.__file__, *words], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (project / "nbs" / "results" / "mutants.jsonl").read_text().splitlines())
    return done.stdout, {record["after"]: record for record in records}


def test_a_change_that_a_test_notices_is_killed_and_another_survives(project):
    before = {path: path.read_bytes() for path in project.rglob("*.py")}
    said, records = tried(project)
    killed, survivor, edge = records["return min(value, )"], records["return flag"], records["if bound < 0:"]
    assert (killed["result"], killed["test"], killed["line"]) == ("killed", "tests/test_small.py::test_bounded", 9)
    assert (survivor["result"], survivor["function"], survivor["operator"]) == ("survived", "unseen", "remove_unary_ops")
    assert edge["result"] == "survived" and "| all |" in said
    assert before == {path: path.read_bytes() for path in before}

    judgements = project / "nbs" / "results" / "mutants-judged.json"
    judgements.write_text(json.dumps({edge["id"]: "equivalent: nobody asks for a bound of 0"}))
    (project / "tests" / "test_small.py").write_text(TEST.replace("    unseen(True)", "    assert not unseen(True)"))
    said, records = tried(project)
    assert records["return flag"]["result"] == "killed" and "return min(" not in said
    assert records["if bound < 0:"]["judgement"].startswith("equivalent") and "100.0%" in said.splitlines()[-1]


def test_texts_types_and_docstrings_are_left_alone_and_the_sample_does_not_depend_on_the_rest():
    _, found = mutants.changes("small", SOURCE)
    assert {mutant.function for mutant in found} == {"bounded", "unseen"}
    assert not any("positive" in mutant.new or "Number" in mutant.new or "small" in mutant.new for mutant in found)
    keys = {mutant.key for mutant in found}
    assert keys < {mutant.key for mutant in mutants.changes("small", SOURCE + "\nX = 3\n")[1]} and len(keys) == len(found)


def test_the_score_leaves_out_what_is_equivalent():
    kinds = [("killed", "")] * 6 + [("timeout", ""), ("survived", "equivalent: dead"), ("survived", "")]
    text = mutants.table([{"module": "m", "result": result, "judgement": judgement} for result, judgement in kinds])
    assert text.splitlines()[-1] == "| all | 9 | 6 | 1 | 1 | 1 | 87.5% |"


def test_an_endless_mutant_is_ended():
    def endless():
        while True:
            pass
    assert mutants.forked(endless, 1) in (14, 24)
    assert mutants.forked(lambda: [Path(__file__).name]) == ["test_mutants.py"]
