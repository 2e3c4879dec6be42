"""The guarantee: its values agree with exact attacks and accountants, its card says all, and a published folder shows any change."""

import json
import math
import sqlite3
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpft.card import QUESTIONS, Statement, claim, rounded_up, table
from dpft.curve import best_true_positive_rate, grouped
from dpft.guarantee import VALUES, Guarantee, VerificationError, content_digest, file_digests, verify
from dpft.ledger import Ledger, row_hash
from dpft.privacy import PrivacyCurve, SampledGaussian, epsilon

TRAIN = SampledGaussian(0.8838, 1024 / 67349, 197, "train")
SELECT = SampledGaussian(2.0, 0.02, 5, "select")
PLANS = st.lists(st.builds(SampledGaussian, st.floats(0.5, 10), st.floats(0.001, 1), st.integers(1, 300)), min_size=1, max_size=2)


def example(**changes) -> Guarantee:
    usual = {"target_delta": 1e-5, "accountant": "rdp", "clip": 0.1, "assumed_public": ["the two classes"],
             "uncharged": ["development accuracy"], "spent": [TRAIN, SELECT], "planned": [TRAIN, SELECT]}
    return Guarantee([TRAIN, SELECT], **(usual | changes))


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_guarantee_holds_for_a_unit_added_as_well_as_for_one_removed(accountant):
    """Under little sampled noise the curve of adding is far above that of removing."""
    plan = [SampledGaussian(0.2, 0.9, 1)]
    removed, added = (PrivacyCurve(plan, relation=way).epsilon(1e-5) for way in ("remove", "add"))
    assert Guarantee(plan, target_delta=1e-5, accountant=accountant).epsilon() >= max(removed, added)


@pytest.mark.parametrize("sigma", [0.7, 2.0, 10.0])
def test_tpr_is_the_best_attack_on_the_gaussian(sigma):
    guarantee = Guarantee([SampledGaussian(sigma, 1.0, 1)], target_delta=1e-5)
    for fpr in np.geomspace(1e-5, 1, 20):
        exact = stats.norm.cdf(stats.norm.ppf(fpr) + 1 / sigma)
        assert exact - 1e-12 <= guarantee.tpr(fpr) <= exact + 3e-6


@given(PLANS)
@settings(max_examples=5, deadline=None)
def test_tpr_is_a_trade_off(plan):
    """At least guessing, monotone, concave, and below the line of every pair."""
    guarantee = Guarantee(plan, target_delta=1e-5, accountant="rdp")
    rates = np.linspace(0, 1, 21)
    values = np.array([guarantee.tpr(x) for x in rates])
    assert (values >= rates).all() and values[-1] == 1 and (np.diff(values) >= -1e-12).all() and (np.diff(values, 2) <= 1e-9).all()
    for delta in (1e-2, 1e-5):
        value = epsilon(plan, delta, "rdp")
        assert all(found <= best_true_positive_rate(value, delta, x) + 1e-9 for x, found in zip(rates, values))


def test_larger_groups_cost_more_and_replacing_lies_between_one_unit_and_two():
    two = grouped(lambda delta: epsilon([TRAIN, SELECT], delta, "rdp"), 1e-5, 2)
    for accountant in ("rdp", "prv"):
        guarantee = example(accountant=accountant)
        values = [guarantee.epsilon(group=k) for k in (1, 2, 3, 10)]
        assert values == sorted(values) and values[0] == guarantee.epsilon()
        assert values[1] < two
    assert guarantee.epsilon() < guarantee.replace_epsilon() < two
    quiet = Guarantee([SampledGaussian(50.0, 0.01, 3)], target_delta=1e-5, accountant="rdp")
    assert quiet.epsilon(group=2) == quiet.epsilon() > quiet.replace_epsilon()  # RDP's floor is above the curve


@pytest.mark.parametrize("call, words", [
    (lambda: example(target_delta=1.0), "target_delta=1.0"), (lambda: example(target_delta=math.nan), "target_delta=nan"),
    (lambda: example(planned=[TRAIN]), "more was released than planned"),
    (lambda: example().tpr(math.nan), "fpr=nan: it must"), (lambda: example().epsilon(group=1001), "group=1001")])
def test_a_wrong_argument_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# --- the card --------------------------------------------------------------------------------------------------------


def test_without_noise_it_says_so_plainly():
    for guarantee in (Guarantee([], target_delta=1e-5), example(private=False), example(unpaid="the relevance map")):
        assert guarantee.epsilon() == math.inf == guarantee.epsilon(group=3) == guarantee.replace_epsilon()
        assert guarantee.tpr(0.001) == 1.0
        assert guarantee.report().startswith("**No privacy guarantee.**")
        assert "differentially private" not in guarantee.report()
    assert "No noise was added to the relevance map" in guarantee.report()


COMPUTED = [  # what a run answers of the list of NIST SP 800-226
    "| unit | patient_id |", "one patient", "a delta of 1 / N (1 / 400 here)", "times the 400 it is 0.004",
    "| adjacency | add/remove one unit |", "such as one patient under two names", "If neighbours replace one patient instead",
    "| sampling | Poisson |", "| accountant | rdp |", "noise multiplier 0.8838", "197 steps", "flat, bound 0.1", "the two classes",
    "development accuracy", "Assumed about the arithmetic:", "| version of torch |", "What is not covered:", "accepts 1 % of false alarms",
    "Other runs on the same data have a privacy cost too", "fixed seed", "BiTFiT()", "a1b2", "no layer mixes examples", "other rows"]


def test_a_card_says_all_that_a_run_knows_and_never_rounds_down():
    report = example(unit="patient_id", units=400, reproducible=True, method="BiTFiT()", run="a1b2", checked=["no layer mixes examples"],
                     not_checked=["other rows"], secure_mode=False).report()
    assert [text for text in COMPUTED if text not in report] == [] and "fixed seed" not in example().report()
    assert "A person who has two of them" in example().report() and "has charged more than this run" in example(others=True).report()
    claimed = float(report.split("(")[1].split(",")[0])
    assert example().epsilon() <= claimed < example().epsilon() + 0.01
    assert "(1.99, 7.43e-06)" in claim(Guarantee([TRAIN], target_delta=1 / (2 * 67349)))


@given(st.floats(1e-12, 1e12), st.sampled_from([None, 1, 3]))
def test_a_rounded_number_is_never_too_small(value, digits):
    found = rounded_up(value, digits)
    assert value <= found <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12) if digits else value <= found <= value + 0.01 + 1e-9 * value


@pytest.mark.parametrize("name", [one.name for one in fields(Statement)])
def test_what_only_people_know_is_answered_or_not_stated(name):
    line = f"| {QUESTIONS[name]} | "
    assert line + "not stated |" in example().report()
    assert line + r"as agreed \| with the board |" in example(statement=Statement(**{name: "as agreed |\nwith the board"})).report()
    assert table([("none", "")]).count("\n") == 1


def test_a_large_epsilon_is_a_warning_and_never_a_large_number():
    loud = Guarantee([SampledGaussian(0.05, 0.5, 100)], target_delta=1e-5, accountant="rdp")
    report = loud.report()
    assert loud.epsilon() > 1000 and "Caution: epsilon is above 10" in report.split("What it means")[0]
    assert "may be more than 1,000" in report and "e+" not in report.split("| | |")[0]
    factor = rounded_up(math.exp(example().epsilon()), 3)
    assert "Caution" not in example().report() and f"at most a factor of {factor:.3g}," in example().report()


def test_a_run_that_ended_early_states_its_plan_unless_its_owner_declares_why():
    few = [replace(TRAIN, steps=50)]
    usual = dict(spent=few, planned=[TRAIN], target_delta=1e-5)
    stopped, declared = Guarantee(few, **usual), Guarantee(few, independent="the machine was needed", **usual)
    assert stopped.epsilon() == epsilon([TRAIN], 1e-5) > declared.epsilon() == epsilon(few, 1e-5)
    assert "when to stop may have depended" in stopped.report() and "the machine was needed" in declared.report()
    assert "before the end" not in example().report()


# --- a file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", [example(), example(private=False), Guarantee([], target_delta=0.5),
                                       example(clip=None, run="a", not_checked=["x"], statement=Statement(trust="two engineers"))])
def test_round_trip(tmp_path, guarantee):
    path = tmp_path / "guarantee.json"
    guarantee.save(path)
    loaded, content = Guarantee.load(path), json.loads(path.read_text())
    assert loaded == guarantee and [m.name for m in loaded.mechanisms] == [m.name for m in guarantee.mechanisms]
    assert content["epsilon"] == (guarantee.epsilon() if guarantee.private else None)
    assert content_digest(content) == content_digest(loaded.content())


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"mechanisms": 3}', b"\xff\xfe", *(
    json.dumps(example().content() | {"kind": kind}).encode() for kind in ("dpft.loop:fine_tune", "json:loads", "nosep", 3, ["a"]))])
def test_a_file_that_holds_no_guarantee_calls_nothing(tmp_path, content, monkeypatch):
    monkeypatch.setattr("dpft.loop.fine_tune", lambda **_: pytest.fail("a file called fine_tune"))
    (tmp_path / "guarantee.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"guarantee.json is not a guarantee that this version can read"):
        verify(tmp_path)


# --- a folder that was published --------------------------------------------------------------------------------------

RELEASED = [SampledGaussian(1.1, 0.1, 3, "train"), SampledGaussian(2.0, 0.2, 1, "select")]
PLAN = {"mechanisms": [asdict(m) for m in RELEASED], "delta": 1e-4, "accountant": "rdp", "clip": 0.5, "clipping": "flat",
        "method": "Full()"}


def claimed(ledger: Ledger, steps: int = 3, plan=PLAN) -> None:
    """Begin and claim; the run is finished if nothing remains of its plan."""
    ledger.begin("demo", plan)
    for name in ["train"] * steps + ["select"] * (len(plan["mechanisms"]) - 1):
        ledger.claim("demo", name)
    if steps == sum(m["steps"] for m in plan["mechanisms"] if m["name"] == "train"):
        ledger.finish("demo")


def stated(ledger: Ledger, kind=Guarantee, **more) -> Guarantee:
    return kind(ledger.spent("demo"), target_delta=1e-4, spent=ledger.spent("demo"), planned=ledger.planned("demo"), accountant="rdp",
                clip=0.5, run="demo", method="Full()", versions={}, uncharged=["dev accuracy"], assumed_public=["the size"], **more)


def folder_of(place: Path, others: int = 0, steps: int = 3, **kind) -> Path:
    """What a run publishes, with stand-ins for the weights."""
    folder = place / "model"
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 10)
    (folder / "dpft.json").write_text("{}")
    with Ledger(place / "owner.sqlite", who="Anna Agnew") as book:
        for number in range(others):
            book.begin(f"other {number}", PLAN)
        if "demo" not in book.runs():
            claimed(book, steps)
        stated(book, **kind).publish(folder, book, "## How to load\n")
    return folder


def changed(folder: Path, **others) -> Path:
    path = folder / "guarantee.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | others, indent=1) + "\n")
    return folder


def other_value(value):
    """Something else of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value * 0.5
    if isinstance(value, str):
        return {"rdp": "prv", "flat": "automatic"}.get(value, value + "x")
    return {**value, "trust": "nobody"} if isinstance(value, dict) else value[:-1] if value else ["x"]


def test_a_published_folder_is_verified_by_its_own_ledger_and_by_the_owners(tmp_path):
    folder = folder_of(tmp_path)
    for ledger in (None, tmp_path / "owner.sqlite", Ledger(tmp_path / "owner.sqlite")):
        sentences = " / ".join(verify(folder, ledger))
        for text in ("all rows in place", "accountant, method, clip, clipping", "3 steps, as charged", "computed again with rdp",
                     "as sealed", "model.safetensors, the model card, all 3 files"):
            assert text in sentences, text
    assert (folder / "README.md").read_text().endswith("## How to load\n")
    with Ledger(tmp_path / "owner.sqlite") as ledger:  # others may go on
        ledger.begin("later", PLAN)
    assert verify(folder, tmp_path / "owner.sqlite")
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = {path.name: path.read_bytes() for path in folder_of(tmp_path).iterdir()}
    assert first.keys() == again.keys() and verify(folder)  # publishing again replaces what was published


@pytest.mark.parametrize("name", sorted(set(example().content()) - {"private"}))
def test_every_changed_field_is_caught(tmp_path, name):
    folder = folder_of(tmp_path)
    content = json.loads((folder / "guarantee.json").read_text())
    with pytest.raises(ValueError):
        verify(changed(folder, **{name: other_value(content[name])}))


@pytest.mark.parametrize("name, words", [
    *((name, f"{name}: the guarantee says|more was released than planned") for name in (
        "mechanisms", "spent", "planned", "accountant", "clip", "clipping", "method", *VALUES)),
    ("target_delta", "delta: the guarantee says"), ("run", '"demox" is not in'), ("ledger_head", "was rewritten"),
    ("uncharged", "not the one that was sealed")])
def test_what_the_record_knows_is_caught_by_the_record(tmp_path, name, words):
    content = json.loads((folder_of(tmp_path) / "guarantee.json").read_text())
    with pytest.raises(ValueError, match=words):
        verify(changed(tmp_path / "model", **{name: other_value(content[name])}))


def test_a_lie_that_is_consistent_in_itself_and_one_that_is_said_twice_are_caught(tmp_path):
    """Everything in the file says the smaller epsilon; only the ledger knows better."""
    path = folder_of(tmp_path) / "guarantee.json"
    honest = path.read_text()
    path.write_text(honest.replace("{", '{\n "uncharged": [],\n "epsilon": 0.1,', 1))  # a reader would see the first, a check the last
    with pytest.raises(VerificationError, match="it was edited"):
        verify(path.parent)
    path.write_text(honest)
    replace(Guarantee.load(path), mechanisms=RELEASED[:1], spent=RELEASED[:1], planned=RELEASED[:1]).save(path)
    with pytest.raises(VerificationError, match="planned"):
        verify(path.parent)


def test_steps_after_the_statement_are_caught(tmp_path):
    folder_of(tmp_path, steps=2)
    assert any("never finished" in sentence for sentence in verify(tmp_path / "model", tmp_path / "owner.sqlite"))
    with Ledger(tmp_path / "owner.sqlite") as ledger:
        ledger.claim("demo", "train")
    with pytest.raises(VerificationError, match="spent"):
        verify(tmp_path / "model", tmp_path / "owner.sqlite")


def test_a_changed_row_a_rewritten_chain_and_a_missing_seal_are_caught(tmp_path):
    folder = folder_of(tmp_path)
    original = (folder / "ledger.sqlite").read_bytes()

    def edited(*statements):
        (folder / "ledger.sqlite").write_bytes(original)
        with sqlite3.connect(folder / "ledger.sqlite") as book:
            for statement in statements:
                book.execute(statement)
        return sqlite3.connect(folder / "ledger.sqlite")

    edit = "UPDATE ledger SET content = replace(content, '1.1', '1.9') WHERE kind = 'begin'"
    edited(edit)
    with pytest.raises(ValueError, match="row 2 was changed"):
        verify(folder)
    previous, book = "", edited(edit)
    with book:
        for row in book.execute("SELECT * FROM ledger ORDER BY number").fetchall():  # a forger who knows how the chain is made
            previous = row_hash(previous, row[:-1])
            book.execute("UPDATE ledger SET hash = ? WHERE number = ?", (previous, row[0]))
    with pytest.raises(VerificationError, match="was rewritten"):
        verify(folder)
    edited("DELETE FROM ledger WHERE kind = 'seal'", "UPDATE sqlite_sequence SET seq = (SELECT max(number) FROM ledger)")
    with pytest.raises(VerificationError, match="the seal was removed"):
        verify(folder)


def test_bad_places(tmp_path):
    with Ledger(tmp_path / "another.sqlite") as ledger:
        ledger.begin("mine", PLAN)
    folder = folder_of(tmp_path)
    for call, words in [(lambda: verify(tmp_path / "none"), "does not exist"),
                        (lambda: verify(folder, tmp_path / "none"), r"no ledger at .*none"),
                        (lambda: verify(folder, tmp_path / "another.sqlite"), '"demo" is not in')]:
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "none").exists()
    (tmp_path / "owner.sqlite").rename(folder / "ledger.sqlite")
    with pytest.raises(ValueError, match="the only record"):
        example().publish(folder)


@pytest.mark.parametrize("name, content, message", [
    ("model.safetensors", b"other weights", "was changed"), ("model.safetensors", None, "is missing"), ("README.md", None, "is missing"),
    ("README.md", b"**(0.01, 1e-09)-differentially private** for any group.\n", "was changed"), ("dpft.json", b"[]", "was changed"),
    ("pytorch_model.bin", b"other weights", "was added"), ("peft/adapter_model.safetensors", b"other weights", "was added"),
    ("config.json", b'{"auto_map": {"AutoModel": "there--code.Model"}}', "was added"), ("LICENSE", b"x", "was added")])
def test_weights_card_and_all_files_are_bound(tmp_path, name, content, message):
    path = folder_of(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(VerificationError, match=f"{path.name} {message}"):
        verify(tmp_path / "model")
    if message == "was changed":  # and listing it anew breaks the seal
        with pytest.raises(VerificationError, match="not the one that was sealed"):
            verify(changed(tmp_path / "model", files=file_digests(tmp_path / "model")))


def test_hidden_files_are_not_compared_and_links_to_folders_are_refused(tmp_path):
    """A repository and a download keep files of their own; whoever loads a folder follows its links."""
    folder = folder_of(tmp_path)
    (folder / ".cache").mkdir()
    for name in (".gitattributes", ".cache/config"):
        (folder / name).write_text("x")
    (folder / "dpft.json").rename(tmp_path / "blob")
    (folder / "dpft.json").symlink_to("../blob")   # a link to a file stands for its bytes
    assert verify(folder)
    (tmp_path / "blob").write_text("[]")
    with pytest.raises(VerificationError, match=r"dpft\.json was changed"):
        verify(folder)
    (folder / "extra").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(VerificationError, match=r"extra is a link to a folder.*put the files themselves there, or remove the link"):
        verify(folder)


def test_what_is_published_depends_on_no_other_run(tmp_path):
    """The same run beside another number of other runs: the same bytes, but for whether there are others."""
    contents = [{path.name: path.read_bytes() for path in folder_of(tmp_path / str(number), others).iterdir()}
                for number, others in enumerate([0, 1, 4])]
    assert contents[1] == contents[2]
    assert {name for name in contents[0] if contents[0][name] != contents[1][name]} == {"README.md", "guarantee.json", "ledger.sqlite"}
    for content in contents:
        for text in (b"Anna", b"other "):
            assert not any(text in whole for name, whole in content.items() if name != "README.md"), text
    assert b"has charged more" in contents[1]["README.md"]


def test_a_selection_does_not_say_whether_there_were_other_runs(tmp_path):
    from dpft.selection import TrialLaw, TunedGuarantee
    contents = [{path.name: path.read_bytes() for path in folder_of(
        tmp_path / str(others), others, kind=TunedGuarantee, law=TrialLaw("poisson", 4.0)).iterdir()} for others in (0, 3)]
    assert contents[0] == contents[1] and verify(tmp_path / "0" / "model")


def test_a_run_without_privacy_is_published_without_a_ledger(tmp_path):
    folder = folder_of(tmp_path)                                   # of an earlier run
    Guarantee([], target_delta=1e-4).publish(folder)
    assert not (folder / "ledger.sqlite").exists() and "no privacy guarantee" in verify(folder)[0]
    for lie in ({"epsilon": 1.0}, {"planned": [asdict(TRAIN)]}):
        with pytest.raises(VerificationError, match="of a run that is not private"):
            verify(changed(folder, **lie))
        Guarantee([], target_delta=1e-4).publish(folder)
    (folder / "README.md").write_text("(0.1, 1e-9)-differentially private")
    with pytest.raises(VerificationError, match=r"README.md was changed"):
        verify(folder)


def test_the_record_of_sst2_adds_up():
    found = json.loads((Path(__file__).parent.parent / "nbs/results/sst2_units.json").read_text())
    assert found["rows"] == 67349 and 0.89 < found["rows_inside_another"] / found["rows"] < 0.91
    assert found["units"] * found["mean_rows_per_unit"] == pytest.approx(found["rows"])
