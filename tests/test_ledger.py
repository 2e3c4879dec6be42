"""The ledger: no number is claimed twice, no plan is passed, and nothing that was written can be changed unseen."""

import math
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import fresh
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpft.curve import Budget, odometer
from dpft.ledger import Ledger, LedgerError, PlanSpent
from dpft.privacy import BudgetError, SampledGaussian, epsilon, noise_multiplier, rdp_conversion, rdp_total

TRAIN = {"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 10}
SELECT = {"name": "select", "noise_multiplier": 2.0, "sample_rate": 0.02, "steps": 3}
PLAN = {"mechanisms": [TRAIN, SELECT], "delta": 1e-5, "accountant": "prv", "data": "reviews", "unit": "person", "size": 1000,
        "method": "BiTFiT()", "divisor": 10.0, "seed": None}
PLANNED = [SampledGaussian(1.0, 0.01, 10), SampledGaussian(2.0, 0.02, 3)]
HUNDRED = SampledGaussian(1.0, 0.01, 100)
TWO_RUNS = 1.02 * epsilon([HUNDRED] * 2, 1e-5, "rdp")   # two runs of a hundred steps pass a filter, and three do not
COLUMNS = ["number", "kind", "run", "mechanism", "step", "content", "hash"]


def plan(steps: int = 10, **more) -> dict:
    return {"mechanisms": [TRAIN | {"steps": steps}], "delta": 1e-5, **more}


def claimed(ledger: Ledger, run: str, count: int, mechanism: str = "train") -> list[int]:
    return [ledger.claim(run, mechanism) for _ in range(count)]


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        for statement in statements:
            file.execute(statement)


def rows(ledger: Ledger, kind: str) -> list[tuple]:
    return ledger._query("SELECT run, mechanism, step FROM ledger WHERE kind = ?", kind)


def test_a_mechanism_has_as_many_numbers_as_it_has_steps(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        ledger.begin("a", PLAN)
        assert claimed(ledger, "a", 4) == [0, 1, 2, 3] and claimed(ledger, "a", 3, "select") == [0, 1, 2]
        with pytest.raises(PlanSpent, match='run "a" has made 3 of 3 draws of "select" and may make no more'):
            ledger.claim("a", "select")
    with Ledger(tmp_path / "l") as ledger:     # another process
        assert claimed(ledger, "a", 6) == [4, 5, 6, 7, 8, 9] and ledger.claims("a", "train") == 10
        with pytest.raises(PlanSpent):
            ledger.claim("a", "train")
        assert ledger.spent("a") == ledger.planned("a") == PLANNED


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["train", "select"]), st.booleans()), max_size=40))
@settings(max_examples=20)
def test_however_many_ledgers_claim_no_number_comes_twice(tmp_path_factory, calls):
    "Three that have the file open, each reopened at times, as after a crash."
    path = tmp_path_factory.mktemp("ledger") / "l"
    ledgers, got = [Ledger(path) for _ in range(3)], []
    ledgers[0].begin("a", PLAN)
    for who, mechanism, crashes in calls:
        if crashes:
            ledgers[who].close()
            ledgers[who] = Ledger(path)
        try:
            got.append((mechanism, ledgers[who].claim("a", mechanism)))
        except PlanSpent:
            got.append((mechanism, None))
    for m in PLANNED:
        name = "train" if m.steps == 10 else "select"
        asked = [number for one, number in got if one == name]
        assert asked == [*range(m.steps), *[None] * len(asked)][:len(asked)]
    for ledger in ledgers:
        ledger.close()


def at_once(path: Path, work) -> list:
    "What two processes found that did the same at the same time."
    together, results = fresh.CONTEXT.Barrier(2), fresh.CONTEXT.Queue()
    both = [fresh.CONTEXT.Process(target=work, args=(str(path), name, together, results)) for name in "ab"]
    for one in both:
        one.start()
    found = [results.get(timeout=120) for _ in both]
    for one in both:
        one.join()
    return found


def claim_all(path: str, name: str, together, results) -> None:
    with Ledger(path, timeout=60) as ledger:
        ledger.begin("shared", plan(40))
        together.wait()
        got = []
        try:
            while True:
                got.append(ledger.claim("shared", "train"))
        except PlanSpent:
            results.put(got)


def begin(path: str, name: str, together, results) -> None:
    with Ledger(path, timeout=60) as ledger:
        together.wait()
        try:
            ledger.begin(name, plan(100))
            results.put("let in")
        except BudgetError:
            results.put("refused")


def test_two_processes_that_claim_at_once_share_the_plan(tmp_path):
    one, two = at_once(tmp_path / "l", claim_all)
    assert sorted(one + two) == list(range(40)) and not set(one) & set(two)
    with Ledger(tmp_path / "l") as ledger:    # opening verifies the chain
        assert ledger.claims("shared", "train") == 40


def test_of_two_processes_that_begin_at_once_one_gets_the_rest(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        ledger.set_budget(TWO_RUNS, 1e-5)
        ledger.begin("first", plan(100))
    assert sorted(at_once(tmp_path / "l", begin)) == ["let in", "refused"]
    with Ledger(tmp_path / "l") as ledger:
        assert len(ledger.runs()) == 2 and ledger.used() <= TWO_RUNS


def test_the_same_plan_goes_on_and_another_is_refused():
    with Ledger() as ledger:
        ledger.begin("a", PLAN)
        head = ledger.head
        ledger.begin("a", dict(reversed(PLAN.items())))
        for other, field in ((PLAN | {"delta": 1e-6}, "delta is 1e-05 in the ledger and 1e-06 now"), (PLAN | {"new": 1}, "new is None"),
                             ({**PLAN, "mechanisms": [TRAIN]}, "mechanisms is"), (PLAN | {"seed": 1}, "seed is None")):
            with pytest.raises(LedgerError, match=field):
                ledger.begin("a", other)
        assert ledger.plan("a") == PLAN and ledger.head == head


@pytest.mark.parametrize("bad", [{}, {"mechanisms": [{"name": "train"}]}, {"mechanisms": 3}, {"mechanisms": [TRAIN, TRAIN]}])
def test_a_plan_that_cannot_be_counted_is_refused(bad):
    with Ledger() as ledger:
        with pytest.raises(LedgerError):
            ledger.begin("a", bad)
        assert ledger.runs() == []


@pytest.mark.parametrize("field, what", [("data", "data set"), ("unit", "privacy unit")])
def test_one_ledger_is_for_one_data_set_and_one_unit(field, what):
    with Ledger() as ledger:
        ledger.begin("one", PLAN)
        with pytest.raises(LedgerError, match=f"for another {what}: .* give each {what} a ledger of its own"):
            ledger.begin("two", PLAN | {field: "another"})
        ledger.begin("says nothing", plan())
        assert ledger.runs() == ["one", "says nothing"]


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_run_states_its_plan_unless_the_stop_was_declared_independent(accountant):
    whole, three = (epsilon(SampledGaussian(1.0, 0.01, steps), 1e-5, accountant) for steps in (10, 3))
    with Ledger() as ledger:
        for run in "abc":
            ledger.begin(run, plan())
            assert ledger.epsilon(1e-5, run, accountant) == pytest.approx(whole)
        for run in "ab":
            claimed(ledger, run, 3)
            assert ledger.epsilon(1e-5, run, accountant) == pytest.approx(whole)    # killed, perhaps
        ledger.finish("a")
        ledger.finish("b", independent="the machine was needed")
        ledger.finish("c")                                                          # before its first claim
        assert [ledger.epsilon(1e-5, run, accountant) for run in "abc"] == pytest.approx([whole, three, 0.0])
        assert [sum(m.steps for m in ledger.stated(run)) for run in "abc"] == [10, 3, 0]
        assert ledger.charged() == [SampledGaussian(1.0, 0.01, 3)] * 2
        ledger.finish("a")
        with pytest.raises(PlanSpent, match="since it was finished"):
            ledger.claim("a", "train")


def test_several_runs_are_read_by_an_odometer_or_as_one_plan():
    with Ledger() as ledger:
        assert ledger.epsilon(1e-5) == 0
        for run in "ab":
            ledger.begin(run, PLAN)
        assert ledger.epsilon(1e-5) == odometer(lambda order: rdp_total(PLANNED * 2, order), 1e-5) > epsilon(PLANNED * 2, 1e-5, "rdp")
        assert ledger.epsilon(1e-5, planned=True) == epsilon(PLANNED * 2, 1e-5, "prv")      # the runs' own accountant
        assert ledger.epsilon(1e-5, accountant="rdp", planned=True) == epsilon(PLANNED * 2, 1e-5, "rdp")
        ledger.finish("b")
        assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5, ["a"]) == ledger.epsilon(1e-5, "a") == epsilon(PLANNED, 1e-5)
        ledger.begin("by rdp", plan(accountant="rdp"))
        assert ledger.accountant("by rdp") == "rdp" and ledger.accountant() == "prv"        # where they differ
        ledger.note_unpaid("c", "epsilon is infinite")
        assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5, "c") == math.inf > ledger.epsilon(1e-5, "a")


def test_a_seeded_run_repeats_steps_and_is_listed_apart():
    with Ledger() as ledger:
        ledger.begin("real", plan())
        for run in ("one", "two"):
            ledger.begin(run, plan(seed=42))
        assert ledger.hypothetical() == ["one", "two"]
        assert [ledger.claim("one", "train", t) for t in (0, 1, 2, 1, 2, 3)] == [0, 1, 2, 1, 2, 3]
        assert ledger.repeated("one") == 2 and ledger.claims("one", "train") == 4 and ledger.repeated("two") == 0
        for number in (5, -1):
            with pytest.raises(LedgerError, match="is at 4 of \"train\", so it cannot claim"):
                ledger.claim("one", "train", number)
        ledger.claim("real", "train")
        with pytest.raises(LedgerError, match="is at 1 of \"train\", so it cannot claim 0"):
            ledger.claim("real", "train", 0)                                       # without a seed nothing is repeated
        assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5, "real") == pytest.approx(ledger.epsilon(1e-5, "one"))
        with pytest.raises(ValueError, match="share draws and noise"):
            ledger.epsilon(1e-5, ["one", "two"])


def solved(target: float, steps: int = 24, rate: float = 0.25, accountant: str = "prv", delta: float = 1e-3) -> dict:
    sigma = noise_multiplier(target, delta, rate, steps, accountant=accountant, tolerance=1e-4)
    return {"mechanisms": [{"name": "train", "noise_multiplier": sigma, "sample_rate": rate, "steps": steps}], "delta": delta,
            "accountant": accountant}


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_budget_admits_one_run_of_its_own_epsilon_and_nothing_after_it(accountant):
    """By the run's accountant, however much more its divergence is; what it leaves by an early end does not come back then."""
    with Ledger() as ledger:
        ledger.set_budget(3.0, 1e-3)
        with pytest.raises(BudgetError, match=r"would have 3.10"):
            ledger.begin("more", solved(3.1, accountant=accountant))
        ledger.begin("one", solved(3.0, accountant=accountant))
        assert ledger.used() == ledger.epsilon(1e-3, "one") == pytest.approx(3.0, abs=1e-3)
        ledger.claim("one", "train")
        ledger.finish("one")
        if accountant == "prv":
            assert ledger.budget.share(ledger.planned()) > 1 and ledger.left() == 0
            with pytest.raises(BudgetError, match="nothing is left"):
                ledger.begin("small", plan(1))
        else:
            assert ledger.left() > 0.9


@pytest.mark.parametrize("planned", [False, True])
def test_runs_that_may_depend_on_each_other_pass_a_filter_and_planned_ones_compose(planned):
    with Ledger() as ledger:
        ledger.set_budget(3.0, 1e-3, planned=planned)
        for run in "ab":
            ledger.begin(run, solved(1.5))
        every = ledger.planned()
        order = ledger.budget.order
        filtered = rdp_total(every, order) + rdp_conversion(order, 1e-3)
        assert ledger.used() == pytest.approx(epsilon(every, 1e-3) if planned else filtered)
        with pytest.raises(BudgetError, match=r'all runs would have \d.\d+: "a" 1.50, "b" 1.50, "c" 2.50; this run may have epsilon='):
            ledger.begin("c", solved(2.5))


@pytest.mark.parametrize("before", [[], [1.5], [1.0, 1.0]])
@pytest.mark.parametrize("planned", [False, True])
def test_what_is_left_is_used_up_and_never_passed(before, planned):
    with Ledger() as ledger:
        ledger.set_budget(3.0, 1e-3, planned=planned)
        for number, target in enumerate(before):
            ledger.begin(str(number), solved(target))
        whole = solved(3.0)
        whole["mechanisms"].append({"name": "select", "noise_multiplier": 40.0, "sample_rate": 0.1, "steps": 3})
        made = [SampledGaussian(m["noise_multiplier"], m["sample_rate"], m["steps"], m["name"]) for m in whole["mechanisms"]]
        found = ledger.fit(made, "prv")
        assert len({a.noise_multiplier / b.noise_multiplier for a, b in zip(found, made)}) == 1    # all by the same factor
        ledger.begin("left", whole | {"mechanisms": [vars(m) for m in found]})
        assert 2.99 < ledger.used() <= 3.0 and ledger.left() < 0.01
        with pytest.raises(BudgetError):
            ledger.begin("more", plan(1000))


def test_a_refused_plan_leaves_no_row_and_names_who_spent(tmp_path):
    with Ledger(tmp_path / "l", who="Anna") as anna, Ledger(tmp_path / "l") as other:
        anna.set_budget(TWO_RUNS, 1e-5)
        anna.begin("one", plan(100))
        other.begin("two", plan(100))
        head = anna.head
        with pytest.raises(BudgetError, match=r'"one" \(Anna\) 0.\d+, "two" 0.\d+, "three" 0.\d+; this run may have .*="left"'):
            other.begin("three", plan(100))
        assert anna.runs() == ["one", "two"] and anna.head == head and anna.owner("one") == "Anna" and anna.owner("two") == ""
        other.begin("two", plan(100))           # to resume is no new run
        other.begin("small", plan(1))
        assert claimed(other, "two", 100)[-1] == 99


@pytest.mark.parametrize("early", [True, False])
def test_what_a_stopped_run_left_comes_back_if_the_order_was_fixed_first(early):
    with Ledger() as ledger:
        if early:
            ledger.set_budget(TWO_RUNS, 1e-5)
        for run in ("one", "two"):
            ledger.begin(run, plan(100))
            ledger.claim(run, "train")
        if not early:
            ledger.set_budget(TWO_RUNS, 1e-5)
        assert ledger.budget == Budget(TWO_RUNS, 1e-5).for_first([HUNDRED])
        full = ledger.left()
        ledger.finish("two")
        assert (ledger.left() > full) == early
        if early:
            ledger.begin("three", plan(99))
        else:
            with pytest.raises(BudgetError, match='this run may have epsilon'):
                ledger.begin("three", plan(99))
            ledger.finish("one", independent="the machine was needed")
            assert ledger.left() > full


def test_a_budget_keeps_its_order_and_is_loosened_only_with_a_reason(tmp_path):
    with Ledger(tmp_path / "l", who="Anna") as ledger:
        for step in (4.0, 1e-5), (3.5, 1e-5):     # tighter: no reason needed
            ledger.set_budget(*step)
        assert ledger.budget.order == 0
        ledger.begin("one", plan(100))
        order = ledger.budget.order
        ledger.claim("one", "train")
        ledger.begin("of another kind", {"mechanisms": [TRAIN | {"noise_multiplier": 30.0, "sample_rate": 1.0}]})
        ledger.set_budget(3.0, 1e-5)
        for looser in ((3.5, 1e-5), (3.0, 1e-4), (3.0, 1e-5, "", True), (None,)):
            with pytest.raises(BudgetError, match=r"epsilon=3 at delta=1e-05.*give a reason"):
                ledger.set_budget(*looser)
        ledger.set_budget(5.0, 1e-5, "more work")
        assert ledger.budget == Budget(5.0, 1e-5, False, order, "more work") and all(one["early"] for one in ledger.budgets())
        with pytest.raises(BudgetError, match='all runs would have'):
            ledger.set_budget(0.2, 1e-5)
        ledger.set_budget(None, reason="the data are public now")
        assert ledger.budget is None and {one["who"] for one in ledger.budgets()} == {"Anna"}
        ledger.set_budget(5.0, 1e-5)
        assert not ledger.budgets()[-1]["early"]


@pytest.mark.parametrize("run, begin", [("unpaid", lambda ledger: ledger.note_unpaid("unpaid", "epsilon=inf")),
                                        ("seeded", lambda ledger: ledger.begin("seeded", plan(seed=0)))])
def test_a_budget_and_a_run_without_a_guarantee_exclude_each_other(run, begin):
    with Ledger() as ledger:
        ledger.set_budget(2.0, 1e-5)
        with pytest.raises(BudgetError, match=f'run "{run}" has no privacy guarantee'):
            begin(ledger)
        assert ledger.runs() == [] and ledger.unpaid() == {}
    with Ledger() as ledger:
        begin(ledger)
        begin(ledger)
        with pytest.raises(BudgetError, match=f'run "{run}" has no privacy guarantee'):
            ledger.set_budget(2.0, 1e-5)
        assert ledger.budget is None


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("ledger") / "l"
    with Ledger(path) as ledger:
        ledger.set_budget(9.0, 1e-5)
        ledger.begin("a", PLAN)
        claimed(ledger, "a", 2)
        ledger.finish("a")
    return path.read_bytes()


ROWS = 5    # of `filled`


def refused(content: bytes, path: Path, *statements: str) -> None:
    path.write_bytes(content)
    Ledger(path).close()
    change(path, *statements)
    with pytest.raises(LedgerError, match=r"row(s after)? \d (was|were) .*; restore it from a backup"):
        Ledger(path)


@pytest.mark.parametrize("row", range(1, ROWS + 1))
def test_every_edit_and_every_deletion_is_found(filled, tmp_path, row):
    for column in COLUMNS:
        value = "number + 100" if column == "number" else "step + 100" if column == "step" else f"{column} || '0'"
        refused(filled, tmp_path / "l", f"UPDATE ledger SET {column} = {value} WHERE number = {row}")
    refused(filled, tmp_path / "l", f"DELETE FROM ledger WHERE number = {row}")
    refused(filled, tmp_path / "l", f"DELETE FROM ledger WHERE number = {row}",
            *(f"UPDATE ledger SET number = {n - 1} WHERE number = {n}" for n in range(row + 1, ROWS + 1)))


def test_a_file_is_made_with_its_first_row_and_only_the_owner_may_read_it(tmp_path):
    old = os.umask(0)
    try:
        with Ledger(tmp_path / "new" / "l") as ledger, Ledger(tmp_path / "new" / "l") as other:
            assert ledger.runs() == [] and ledger.budget is None and not (tmp_path / "new").exists()
            with pytest.raises(LedgerError):
                ledger.begin("a", {})
            assert not (tmp_path / "new").exists()
            ledger.begin("a", PLAN)
            assert other.runs() == ["a"] and other.claim("a", "train") == 0
    finally:
        os.umask(old)
    assert (tmp_path / "new" / "l").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("statement, why", [("CREATE TABLE ledger (number INTEGER)", "a database but no ledger"),
                                            (f"PRAGMA application_id = {0x64706674}", "a ledger of another version")])
def test_another_database_is_left_alone(tmp_path, statement, why):
    change(tmp_path / "l", statement)
    content = (tmp_path / "l").read_bytes()
    with pytest.raises(LedgerError, match=why):
        Ledger(tmp_path / "l")
    assert (tmp_path / "l").read_bytes() == content


def test_reading_changes_nothing(filled, tmp_path):
    (tmp_path / "l").write_bytes(filled)
    (tmp_path / "l").chmod(0o444)
    with Ledger(tmp_path / "l", read_only=True) as ledger:
        assert ledger.runs() == ["a"] and ledger.claims("a", "train") == 2
        with pytest.raises(LedgerError, match="readonly"):
            ledger.begin("c", PLAN)
    assert (tmp_path / "l").read_bytes() == filled and (tmp_path / "l").stat().st_mode & 0o777 == 0o444


def test_a_locked_ledger_says_so_and_claims_later(tmp_path):
    with Ledger(tmp_path / "l", timeout=0.05) as ledger, Ledger(tmp_path / "l") as other:
        ledger.begin("a", PLAN)
        with other._transaction(), pytest.raises(LedgerError, match=r"another process has locked it for more than 0.05 s; wait"):
            ledger.claim("a", "train")
        assert ledger.claim("a", "train") == 0


def test_a_full_disk_loses_nothing(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        ledger.begin("a", plan(10**6))
        ledger._query(f"PRAGMA max_page_count = {ledger._query('PRAGMA page_count')[0][0]}")
        got = []
        with pytest.raises(LedgerError, match="full; nothing was recorded"):
            while True:
                got.append(ledger.claim("a", "train"))
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.claim("a", "train") == len(got)


def test_a_published_copy_has_its_runs_and_no_secret(tmp_path):
    with Ledger(tmp_path / "l", who="Anna Agnew") as ledger:
        for run in ("first", "second", "third"):
            ledger.begin(run, PLAN | {"seed": 987654321 if run == "second" else None, "settings": {"learning_rate": 0.123}})
        for run in ("third", "second", "first"):
            claimed(ledger, run, 3)
        ledger.claim("second", "train", 1)
        ledger.finish("second", independent="the machine was needed")
        head = ledger.publish(tmp_path / "p", ["second"], "the seal")
        content = (tmp_path / "p").read_bytes()
        assert head == ledger.publish(tmp_path / "p", "second", "the seal") and content == (tmp_path / "p").read_bytes()
        assert ledger.knows(head) and ledger.sealed("second", "the seal") and not ledger.sealed("first") and not ledger.knows("x")
        spent = ledger.spent("second")
    for word in ("first", "third", "Anna", "987654321", "reviews", "0.123"):
        assert word.encode() not in content, word
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o644
    with Ledger(tmp_path / "p", read_only=True) as copy:
        assert copy.runs() == copy.hypothetical() == ["second"] and copy.sealed("second", "the seal") and copy.knows(head)
        assert copy.spent() == copy.stated("second") == spent and copy.finished("second") and copy.repeated("second") == 1
        assert copy.plan("second")["unit"] == "person" and not {"data", "seed", "settings"} & set(copy.plan("second"))
    with Ledger(tmp_path / "p") as copy, pytest.raises(LedgerError, match="is a published copy; begin in the owner's file"):
        copy.begin("mine", plan())


def test_a_ledger_with_one_damaged_bit_is_not_replaced(tmp_path):
    with Ledger(tmp_path / "team.db") as ledger:
        ledger.begin("a", PLAN)
    damaged = bytearray((tmp_path / "team.db").read_bytes())
    damaged[0] ^= 1
    (tmp_path / "team.db").write_bytes(damaged)
    with Ledger(tmp_path / "other.db") as ledger:
        ledger.begin("b", PLAN)
        with pytest.raises(LedgerError, match="file is not a database"):
            ledger.publish(tmp_path / "team.db", ["b"])
    assert (tmp_path / "team.db").read_bytes() == damaged
