"""The ledger: nothing that was spent is forgotten, nothing that was written can be changed, two writers do not mix."""

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpft.privacy import Ledger, LedgerError, SampledGaussian, _row_hash, epsilon

PLAN = {
    "mechanisms": [{"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 10},
                   {"name": "select", "noise_multiplier": 2.0, "sample_rate": 0.02, "steps": 3}],
    "delta": 1e-5, "epsilon": 2.0, "accountant": "prv", "data": "ab" * 32, "size": 1000, "method": "BiTFiT"}
COLUMNS = ["number", "kind", "run", "mechanism", "step", "digest", "content", "hash"]


def steps(mechanisms: list[SampledGaussian]) -> dict[str, int]:
    return {m.name: m.steps for m in mechanisms}


def filled(path: Path) -> Path:
    with Ledger(path) as ledger:
        ledger.begin("a", PLAN)
        ledger.begin("b", PLAN | {"method": "Full"})
        for t in range(3):
            ledger.spend("a", "train", t, f"d{t}", {"batch": 7})
        ledger.spend("b", "select", 0, "d0")
        ledger.finish("a")
    return path


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


# --- accounting ------------------------------------------------------------------------------------------------------


def test_spent_and_charged(tmp_path):
    with Ledger(tmp_path / "l.db") as ledger:
        ledger.begin("a", PLAN)
        assert ledger.spent("a") == [] and steps(ledger.charged("a")) == {"train": 10, "select": 3}
        assert ledger.spend("a", "train", 0, "x") is True
        assert ledger.spend("a", "train", 0, "x") is False  # an identical replay
        assert ledger.spend("a", "train", 0, "y") is True   # the same step, another sum
        assert ledger.spend("a", "select", 0, "x") is True  # another mechanism
        assert steps(ledger.spent("a")) == {"train": 2, "select": 1}
        assert steps(ledger.charged("a")) == {"train": 11, "select": 3}  # nine steps and two to come
        assert not ledger.finished("a")
        ledger.finish("a")
        ledger.finish("a")
        assert ledger.finished("a") and ledger.charged("a") == ledger.spent("a")
        assert ledger.spent("a")[0] == SampledGaussian(1.0, 0.01, 2)


def test_epsilon_is_that_of_what_is_charged():
    with Ledger(None) as ledger:
        assert ledger.epsilon(1e-5) == 0
        ledger.begin("a", PLAN)
        ledger.begin("b", PLAN)
        planned = [SampledGaussian(1.0, 0.01, 10), SampledGaussian(2.0, 0.02, 3)]
        assert ledger.epsilon(1e-5, "a") == epsilon(planned, 1e-5, "rdp")
        assert ledger.epsilon(1e-5) == epsilon(planned * 2, 1e-5, "rdp")
        assert ledger.epsilon(1e-5, accountant="prv") == epsilon(planned * 2, 1e-5, "prv")
        ledger.finish("b")
        assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5, "a")
        assert ledger.runs() == ["a", "b"] and ledger.plan("a") == PLAN


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("xyz")), max_size=30))
@settings(max_examples=30)
def test_charges_cover_everything_released(calls):
    """Whatever is replayed: each different (step, digest) is charged once, and what is to come is charged on top."""
    with Ledger(None) as ledger:
        ledger.begin("a", PLAN)
        charged = [ledger.spend("a", "train", step, digest) for step, digest in calls]
        assert charged == [call not in calls[:i] for i, call in enumerate(calls)]
        released, done = len(set(calls)), len({step for step, _ in calls})
        assert steps(ledger.spent("a")).get("train", 0) == released
        assert steps(ledger.charged("a"))["train"] == released + max(0, 10 - done)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_same_plan_resumes(tmp_path):
    path = filled(tmp_path / "l.db")
    with Ledger(path) as ledger:
        ledger.begin("a", dict(reversed(PLAN.items())))  # the same plan, written in another order
        assert ledger.spend("a", "train", 2, "d2") is False
        assert ledger.spend("a", "train", 3, "d3") is True


@pytest.mark.parametrize("other, message", [
    (PLAN | {"delta": 1e-6}, "delta is 1e-05 in the ledger and 1e-06 now"),
    (PLAN | {"data": "cd" * 32}, "data is 'abab"),
    (PLAN | {"new": 1}, "new is None in the ledger and 1 now"),
    ({k: v for k, v in PLAN.items() if k != "size"}, "size is 1000 in the ledger and None now"),
    (PLAN | {"mechanisms": [PLAN["mechanisms"][0], PLAN["mechanisms"][1] | {"noise_multiplier": 3.0}]},
     r"mechanisms\[1\].noise_multiplier is 2.0 in the ledger and 3.0 now"),
    (PLAN | {"mechanisms": PLAN["mechanisms"][:1]}, "mechanisms is "),
])
def test_another_plan_is_refused_by_field(other, message):
    with Ledger() as ledger:
        ledger.begin("a", PLAN)
        with pytest.raises(LedgerError, match=message):
            ledger.begin("a", other)
        assert ledger.plan("a") == PLAN


@pytest.mark.parametrize("plan", [{}, {"mechanisms": [{"name": "train"}]}, {"mechanisms": 3}, PLAN | {"path": Path("x")},
                                  {"mechanisms": [PLAN["mechanisms"][0]] * 2}])
def test_a_plan_that_cannot_be_charged_is_refused(plan):
    with Ledger() as ledger:
        with pytest.raises(LedgerError):
            ledger.begin("a", plan)
        assert ledger.runs() == []


def test_unknown_names():
    with Ledger() as ledger:
        for call in (lambda: ledger.spend("a", "train", 0, "x"), lambda: ledger.finish("a"), lambda: ledger.plan("a"),
                     lambda: ledger.charged("a")):
            with pytest.raises(LedgerError, match='run "a" is not in the ledger'):
                call()
        ledger.begin("a", PLAN)
        with pytest.raises(LedgerError, match="no mechanism \"relevance\".*'train', 'select'"):
            ledger.spend("a", "relevance", 0, "x")


# --- the chain -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> bytes:
    return filled(tmp_path_factory.mktemp("ledger") / "l.db").read_bytes()


ROWS = 7  # of `filled`


def check_refused(content: bytes, path: Path, *statements: str) -> None:
    path.write_bytes(content)
    Ledger(path).close()
    change(path, *statements)
    with pytest.raises(LedgerError, match="removed|moved"):
        Ledger(path)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", range(1, ROWS + 1))
def test_every_edit_is_caught(original, tmp_path, row, column):
    value = "number + 100" if column == "number" else "step + 1" if column == "step" else f"{column} || '0'"
    check_refused(original, tmp_path / "l.db", f"UPDATE ledger SET {column} = {value} WHERE number = {row}")


@pytest.mark.parametrize("row", range(1, ROWS + 1))
def test_every_deletion_is_caught(original, tmp_path, row):
    check_refused(original, tmp_path / "l.db", f"DELETE FROM ledger WHERE number = {row}")


@pytest.mark.parametrize("row", range(1, ROWS))
def test_closing_the_gap_does_not_help(original, tmp_path, row):
    check_refused(original, tmp_path / "l.db", f"DELETE FROM ledger WHERE number = {row}",
                  *(f"UPDATE ledger SET number = {n - 1} WHERE number = {n}" for n in range(row + 1, ROWS + 1)),
                  f"UPDATE sqlite_sequence SET seq = {ROWS - 1}")


@given(st.integers(1, ROWS), st.integers(1, ROWS))
@settings(max_examples=20)
def test_every_swap_is_caught(original, tmp_path_factory, i, j):
    if i != j:
        check_refused(original, tmp_path_factory.mktemp("swap") / "l.db", f"UPDATE ledger SET number = 99 WHERE number = {i}",
                      f"UPDATE ledger SET number = {i} WHERE number = {j}", f"UPDATE ledger SET number = {j} WHERE number = 99")


@given(st.integers(1, ROWS), st.sampled_from(["kind", "run", "mechanism", "digest", "content", "hash"]), st.text(max_size=8))
@settings(max_examples=40)
def test_every_text_is_protected(original, tmp_path_factory, row, column, text):
    path = tmp_path_factory.mktemp("edit") / "l.db"
    path.write_bytes(original)
    connection = sqlite3.connect(path)
    old, = connection.execute(f"SELECT {column} FROM ledger WHERE number = ?", (row,)).fetchone()
    try:
        with connection:
            connection.execute(f"UPDATE ledger SET {column} = ? WHERE number = ?", (text, row))
    except sqlite3.IntegrityError:  # the same row twice: the data base itself refuses
        text = old
    connection.close()
    if text == old:
        Ledger(path).close()
    else:
        with pytest.raises(LedgerError, match=f"row {row} was"):
            Ledger(path)


@pytest.mark.parametrize("row", range(1, ROWS))
def test_rewriting_one_row_with_its_own_hash_breaks_the_next(original, tmp_path, row):
    path = tmp_path / "l.db"
    path.write_bytes(original)
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT * FROM ledger ORDER BY number").fetchall()
    changed = [*rows[row - 1][:-2], '{"batch":8}']
    new_hash = _row_hash(rows[row - 2][-1] if row > 1 else "", tuple(changed))
    with connection:
        connection.execute("UPDATE ledger SET content = ?, hash = ? WHERE number = ?", (changed[-1], new_hash, row))
    connection.close()
    with pytest.raises(LedgerError, match=f"row {row + 1} was"):
        Ledger(path)


def test_appending_by_hand_is_caught(original, tmp_path):
    check_refused(original, tmp_path / "l.db", "INSERT INTO ledger (kind, run, mechanism, step, digest, content, hash) "
                                               "VALUES ('spend', 'a', 'train', 9, 'x', '{}', 'y')")


# --- files and processes ---------------------------------------------------------------------------------------------


def test_only_the_owner_may_read_it(tmp_path):
    path = tmp_path / "new" / "l.db"
    old = os.umask(0)
    try:
        filled(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    Ledger(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"some notes that somebody keeps\n" * 50, b"SQLite format 3\0 and then nonsense" * 30])
def test_another_file_is_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="notes.txt"):
        Ledger(path)
    assert path.read_bytes() == content


def test_another_database_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    change(path, "CREATE TABLE ledger (number INTEGER)")
    content = path.read_bytes()
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(path)
    assert path.read_bytes() == content


def test_places_where_no_ledger_can_be(tmp_path):
    with pytest.raises(LedgerError, match="is a directory"):
        Ledger(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="choose a place"):
        Ledger(tmp_path / "file" / "l.db")


def test_an_empty_file_becomes_a_ledger(tmp_path):
    """What is left when a process dies between making the file and its first transaction."""
    (tmp_path / "l.db").touch()
    filled(tmp_path / "l.db")


def test_a_locked_ledger_says_so(tmp_path):
    path = filled(tmp_path / "l.db")
    with Ledger(path, timeout=0.1) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerError, match="another process has locked it for more than 0.1 s; wait"):
            ledger.spend("a", "train", 5, "x")
        other.execute("ROLLBACK")
        assert ledger.spend("a", "train", 5, "x")


def test_a_transaction_excludes_other_writers_from_its_start(tmp_path):
    path = filled(tmp_path / "l.db")
    with Ledger(path) as one, Ledger(path, timeout=0.1) as two:
        with one._writing(), pytest.raises(LedgerError, match="locked"):
            two.spend("a", "train", 5, "x")
        assert two.spend("a", "train", 5, "x")


def test_a_full_disk_loses_nothing(tmp_path):
    path = filled(tmp_path / "l.db")
    with Ledger(path) as ledger:
        pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerError, match="full; nothing was recorded"):
            for t in range(1000):
                ledger.spend("a", "train", t, f"long digest {t}" * 20)
        written = steps(ledger.spent("a"))["train"]
    with Ledger(path) as ledger:
        assert steps(ledger.spent("a"))["train"] == written
        assert ledger.spend("a", "train", 5000, "x")


KILLED = """
import sys
from dpft.privacy import Ledger
with Ledger(sys.argv[1]) as ledger:
    ledger.begin("a", {plan})
    for t in range(int(sys.argv[2]), 10**6):
        assert ledger.spend("a", "train", t, f"digest {{t}}")
        print(t, flush=True)  # the release: only after spend has returned
"""


def test_kill_does_not_unspend(tmp_path):
    """A process that releases after each row is killed at some point, three times; every release is in the ledger."""
    path, released = tmp_path / "l.db", -1
    for delay in (0.02, 0.1, 0.25):
        child = subprocess.Popen([sys.executable, "-c", KILLED.format(plan=json.dumps(PLAN)), str(path), str(released + 1000)],
                                 stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first = int(child.stdout.readline())
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split("\n")[:-1]
        child.wait()
        released = int(rest[-1]) if rest else first
        with Ledger(path) as ledger:
            rows = {step for step, in ledger._query("SELECT step FROM ledger WHERE kind = 'spend'")}
            assert set(range(first, released + 1)) <= rows
            assert steps(ledger.spent("a"))["train"] == len(rows)


def write_rows(path: str, name: str, count: int, together) -> None:
    with Ledger(path, timeout=60) as ledger:
        ledger.begin(name, PLAN)
        together.wait()
        for t in range(count):
            ledger.spend(name, "train", t, "x")
            ledger.spend("shared", "train", t, name)


def test_two_processes_share_a_ledger(tmp_path):
    path = tmp_path / "l.db"
    with Ledger(path) as ledger:
        ledger.begin("shared", PLAN)
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    writers = [context.Process(target=write_rows, args=(str(path), name, 40, together)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with Ledger(path) as ledger:  # opening verifies the chain
        assert {run: steps(ledger.spent(run)) for run in ("one", "two", "shared")} == \
            {"one": {"train": 40}, "two": {"train": 40}, "shared": {"train": 80}}
