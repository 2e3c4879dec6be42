"""The guarantee: what it says agrees with exact attacks, with other accountants, with its ledger, and with itself after a round trip."""

import hashlib
import json
import math
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpft import privacy
from dpft.card import rounded_up
from dpft.curve import PrivacyCurve, best_true_positive_rate, group_epsilon, sentence_units
from dpft.guarantee import READINGS, Guarantee, Statement, claim, content_digest, file_digests
from dpft.ledger import Ledger, row_hash
from dpft.privacy import BudgetError, SampledGaussian, StepLoss, epsilon, loss_grid
from dpft.verification import VerificationError, verify

TRAIN = SampledGaussian(0.8838, 1024 / 67349, 197, "train")
SELECT = SampledGaussian(2.0, 0.02, 5, "select")
PLANS = st.lists(st.builds(SampledGaussian, st.floats(0.5, 10), st.floats(0.001, 1), st.integers(1, 300)), min_size=1, max_size=2)


def example(**changes) -> Guarantee:
    fields = {"target_delta": 1e-5, "accountant": "rdp", "clip": 0.1, "assumed_public": ["the two classes"],
              "uncharged": ["development accuracy"], "spent": [TRAIN, SELECT], "planned": [TRAIN, SELECT]}
    return Guarantee([TRAIN, SELECT], **(fields | changes))


# --- the curve -------------------------------------------------------------------------------------------------------


def worst_pair(rate, group, relation):
    """Means and weights of the two mixtures of the lemma on worst pairs."""
    drawn = np.arange(group + 1.0)
    there, nobody = (drawn, stats.binom.pmf(drawn, group, rate)), (np.zeros(1), np.ones(1))
    other = (-drawn, there[1])
    return {"remove": (there, nobody), "add": (nobody, other), "replace": (there, other)}[relation]


def densities(y, pair, sigma):
    return [stats.norm.pdf(y[:, None], means, sigma) @ weights for means, weights in pair]


KINDS = st.one_of(st.tuples(st.sampled_from(["remove", "add"]), st.integers(1, 12)), st.just(("replace", 1)))


@also(1.0, 0.998046875, ("remove", 6), 0.0)  # hardly ever is nobody drawn
@also(1.0, 0.998046875, ("add", 6), 1.0)
@also(1.0, 0.875, ("add", 10), 2.0)  # all but a billionth are drawn, and the largest loss is that of nobody
@also(0.25, 0.9996652512896982, ("add", 12), 2.0)  # just below the largest loss
@also(0.25, 0.00195, ("add", 1), 1.0)  # all positive losses are below 0.002, the negative ones reach 40
@given(st.floats(0.25, 8), st.one_of(st.floats(1e-4, 1), st.floats(0.999, 1)), KINDS, st.floats(0, 3))
@settings(max_examples=8, deadline=None)
def test_one_step_by_integration(sigma, rate, kind, share):
    """At epsilon 0 and anywhere on the curve; also groups of which nearly all are drawn."""
    relation, group = kind
    pair = worst_pair(rate, group, relation)
    y = np.linspace(-group - 9 * sigma, group + 9 * sigma, 2**17)
    p, r = densities(y, pair, sigma)
    curve = PrivacyCurve([SampledGaussian(sigma, rate, 1)], group, relation)
    for value in (0.0, share * group * rate, share * group / sigma):
        exact = np.maximum(p - math.exp(value) * r, 0).sum() * (y[1] - y[0])
        assert (1 - 1e-6) * exact - 1e-9 <= curve.delta(value) <= 1.01 * exact + 1e-5


@pytest.mark.parametrize("relation, group", [("remove", 1), ("add", 1), ("replace", 1), ("remove", 3), ("add", 3)])
def test_two_mechanisms_by_monte_carlo(relation, group):
    """Six steps of one kind and two of another: E max(0, 1 - exp(epsilon - loss)) over drawn outputs.

    The margin is Bernstein's for means of numbers in [0, 1] at a failure probability of 1e-8 for each of the twenty comparisons.
    """
    plan, generator, loss = [SampledGaussian(0.9, 0.1, 6), SampledGaussian(2.0, 0.5, 2)], np.random.default_rng(5), np.zeros(200_000)
    for m in plan:
        pair = (means, weights), _ = worst_pair(m.sample_rate, group, relation)
        for _ in range(m.steps):
            drawn = generator.choice(means, len(loss), p=weights) + m.noise_multiplier * generator.standard_normal(len(loss))
            p, r = densities(drawn, pair, m.noise_multiplier)
            loss += np.log(p / r)
    curve = PrivacyCurve(plan, group, relation)
    for value in (0.0, 0.5, 1.0, 2.0):
        draws = np.maximum(0, -np.expm1(np.minimum(value - loss, 0)))
        assert abs(curve.delta(value) - draws.mean()) <= 6.2 * draws.std() / len(draws)**0.5 + 13 / len(draws)


@pytest.mark.parametrize("relation", ["remove", "add"])
@pytest.mark.parametrize("sigma, rate, group", [(1.0, 0.01, 2), (0.7, 0.1, 10), (5.0, 0.001, 7), (1.0, 0.9, 10)])
def test_a_step_is_that_of_dp_accounting(sigma, rate, group, relation):
    """The library finds the output of each loss one by one, to 1e-9 deviations, and cuts the ends off."""
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss

    ours = StepLoss(sigma, rate, group, relation)
    drawn = np.arange(group + 1.0)
    theirs = MixtureGaussianPrivacyLoss(1000.0, 1000 / sigma * drawn, stats.binom.pmf(drawn, group, rate),
                                        adjacency_type=AdjacencyType[relation.upper()])
    grid = loss_grid(ours.low, ours.high, 0.01, math.inf) * 0.01
    found = ours.curve(grid) + np.maximum(-np.expm1(grid), 0)
    assert abs(found - theirs.get_delta_for_epsilon(grid)).max() <= 1e-11


@pytest.mark.parametrize("relation", ["remove", "add", "replace"])
@pytest.mark.parametrize("sigma, rate, steps", [(0.8838, 1024 / 67349, 197), (1.0, 0.01, 2000), (1.5, 0.25, 100)])
def test_a_curve_is_that_of_dp_accounting(sigma, rate, steps, relation):
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    kind = NeighboringRelation.REPLACE_ONE if relation == "replace" else NeighboringRelation.ADD_OR_REMOVE_ONE
    theirs = from_gaussian_mechanism(sigma, sampling_prob=rate, neighboring_relation=kind).self_compose(steps)
    side = theirs._pmf_add if relation == "add" else theirs._pmf_remove
    curve = PrivacyCurve([SampledGaussian(sigma, rate, steps)], relation=relation)
    for value in (0.3, 1.0, 2.5):
        assert curve.delta(value) == pytest.approx(side.get_delta_for_epsilon(value), rel=2e-3, abs=1e-9)


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (20.0, 400), (5.0, 3), (0.3, 2)])
@pytest.mark.parametrize("relation, reach", [("remove", 1), ("add", 1), ("replace", 2)])
def test_curve_is_just_above_the_exact_gaussian(sigma, steps, relation, reach):
    curve, mu = PrivacyCurve([SampledGaussian(sigma, 1.0, steps)], relation=relation), reach * steps**0.5 / sigma
    for value in np.linspace(0, 4 * mu, 9):
        exact = stats.norm.cdf(mu / 2 - value / mu) - math.exp(value + stats.norm.logcdf(-mu / 2 - value / mu))
        assert exact <= curve.delta(value) <= 1.01 * exact + 3e-12


@given(PLANS, KINDS)
@settings(max_examples=5, deadline=None)
def test_curve_has_the_shape_of_a_privacy_curve(plan, kind):
    relation, group = kind
    curve = PrivacyCurve(plan, group, relation)
    assert curve.deltas.min() >= 0 and curve.deltas.max() <= 1
    assert (np.diff(curve.deltas) <= 1e-9).all()
    for delta in (0.1, 1e-3, 1e-6):
        assert curve.delta(curve.epsilon(delta)) <= delta


def coarser(grid):
    "Each fifth point, the ends, and 0, where two formulas meet."
    return np.union1d([0], grid[[0, *range(1, len(grid) - 1, 5), -1]])


def test_any_grid_is_an_upper_bound(monkeypatch):
    """Chords over a coarser grid raise the curve."""
    plan, values = [SampledGaussian(1.0, 0.1, 20)], np.linspace(0, 8, 33)
    for relation, group in (("remove", 1), ("add", 1), ("replace", 1), ("remove", 4)):
        fine = PrivacyCurve(plan, group, relation).delta(values)
        with monkeypatch.context() as patch:
            patch.setattr(privacy, "loss_grid", lambda *ends: coarser(loss_grid(*ends)))
            coarse = PrivacyCurve(plan, group, relation).delta(values)
        assert (coarse >= fine * (1 - 1e-6) - 1e-12).all() and coarse.sum() > fine.sum()
    grid = loss_grid(-3.0, 5.0, 1e-3, 0.02)
    assert grid[0] * 1e-3 < -3 and grid[-1] * 1e-3 > 5 and (np.diff(grid) > 0).all() and {-1, 0, 1, 19, 20, 21} <= set(grid)


def test_delta_of_many_values_is_delta_of_each():
    curve, values = PrivacyCurve([TRAIN]), [3.0, 0.0, 1.5, 1.5, 900.0]
    assert curve.delta(np.array(values)) == pytest.approx([curve.delta(value) for value in values], rel=1e-9)
    assert curve.delta(math.inf) == curve.delta(900.0) < 2e-12 and PrivacyCurve([]).delta(0.0) == 0 == PrivacyCurve([]).epsilon(0.1)
    with pytest.raises(ValueError, match='group=2: "replace" is for one unit'):
        PrivacyCurve([TRAIN], 2, "replace")


@given(st.floats(0, 2 * math.pi), st.floats(0, 1), st.floats(0, 2 * math.pi), st.floats(0, 1), st.floats(0.05, 1), st.floats(0, 2))
@settings(max_examples=25, deadline=None)
def test_no_two_vectors_are_a_worse_replacement(angle, length, other, shorter, rate, value):
    """Lemma on worst pairs, by integration in the plane: any v and v' in the unit disc against the opposite unit vectors."""
    grid = np.stack(np.meshgrid(np.linspace(-7, 7, 141), np.linspace(-7, 7, 141)), -1)

    def hockey_stick(first, second):
        def density(mean):
            return np.exp(-np.square(grid - mean).sum(-1) / 2) / (2 * math.pi)
        p, r = ((1 - rate) * density((0, 0)) + rate * density(mean) for mean in (first, second))
        return np.maximum(p - math.exp(value) * r, 0).sum() * 0.1**2

    first, second = (size * np.array([math.cos(turn), math.sin(turn)]) for size, turn in ((length, angle), (shorter, other)))
    assert hockey_stick(first, second) <= hockey_stick(np.array([1.0, 0]), np.array([-1.0, 0])) + 1e-5


def test_very_little_and_very_much_noise():
    value = PrivacyCurve([SampledGaussian(0.2, 0.5, 500)]).epsilon(1e-5)
    assert 3000 < value < epsilon([SampledGaussian(0.2, 0.5, 500)], 1e-5, "rdp")
    assert PrivacyCurve([TRAIN]).epsilon(1e-13) == math.inf  # below what float64 resolves: nothing is claimed
    for group in (1, 2):
        assert PrivacyCurve([SampledGaussian(0.01, 0.01, 10)], group, "remove").epsilon(1e-5) > 10_000
        assert PrivacyCurve([SampledGaussian(0.01, 0.01, 10)], group, "add").epsilon(1e-5) < 100
        assert PrivacyCurve([SampledGaussian(2.0**20, 0.01, 10)], group).epsilon(1e-5) < 1e-3
    many = PrivacyCurve([SampledGaussian(3000.0, 1.0, 10**6)])  # mu = 1/3
    assert many.delta(2.4335) >= stats.norm.cdf(1 / 6 - 7.3005) - math.exp(2.4335 + stats.norm.logcdf(-1 / 6 - 7.3005))


# --- readings --------------------------------------------------------------------------------------------------------


def test_epsilon_is_the_accountants():
    for accountant in ("rdp", "prv"):
        guarantee = example(accountant=accountant)
        assert guarantee.epsilon() == epsilon([TRAIN, SELECT], 1e-5, accountant)
        assert guarantee.epsilon(1e-6) == epsilon([TRAIN, SELECT], 1e-6, accountant)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_guarantee_holds_for_a_unit_added_as_well_as_for_one_removed(accountant):
    """Under little sampled noise the curve of adding is far above that of removing."""
    plan = [SampledGaussian(0.2, 0.9, 1)]
    removed, added = (PrivacyCurve(plan, relation=way).epsilon(1e-5) for way in ("remove", "add"))
    assert Guarantee(plan, target_delta=1e-5, accountant=accountant).epsilon() >= max(removed, added)


def test_delta_and_epsilon_are_one_curve_with_prv():
    guarantee = example(accountant="prv")
    for delta in (1e-3, 1e-5, 1e-7):
        assert 0.85 * delta <= guarantee.delta(guarantee.epsilon(delta)) <= delta  # PRV adds 0.01 to its epsilon


@given(st.floats(0.1, 6), st.floats(0, 3))
@settings(max_examples=20)
def test_delta_inverts_epsilon_with_rdp(sigma, value):
    """The pair that `delta` returns is true, and 1 % less would not have been shown."""
    guarantee = Guarantee([SampledGaussian(sigma, 0.01, 50)], target_delta=1e-5, accountant="rdp")
    delta = guarantee.delta(value)
    assert delta == 1 or guarantee.epsilon(delta) <= value
    assert delta < 1.02e-10 or guarantee.epsilon(delta / 1.02) > value


@given(st.floats(0, 6), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 1))
def test_best_attack_by_randomised_response(value, delta, fpr, other):
    """Monotone, between guessing and certainty, and reached by the mechanism that reveals with delta and else lies with e^-epsilon."""
    bound = best_true_positive_rate(value, delta, fpr)
    assert fpr - 1e-12 <= bound <= 1
    low, high = sorted((fpr, other))
    assert best_true_positive_rate(value, delta, low) <= best_true_positive_rate(value, delta, high) + 1e-12
    lie = (1 - delta) / (1 + math.exp(value))  # probability of a false alarm of "says yes"
    assert best_true_positive_rate(value, delta, lie) >= delta + (1 - delta) - lie - 1e-9


@pytest.mark.parametrize("sigma", [0.7, 2.0, 10.0])
def test_tpr_is_the_best_attack_on_the_gaussian(sigma):
    guarantee = Guarantee([SampledGaussian(sigma, 1.0, 1)], target_delta=1e-5)
    for fpr in np.geomspace(1e-5, 1, 20):
        exact = stats.norm.cdf(stats.norm.ppf(fpr) + 1 / sigma)
        assert exact - 1e-12 <= guarantee.tpr(fpr) <= exact + 3e-6


def test_tpr_is_the_best_attack_on_a_sampled_step():
    """Neyman and Pearson: thresholds on the output, for a unit that is drawn with probability 0.3."""
    guarantee = Guarantee([SampledGaussian(0.8, 0.3, 1)], target_delta=1e-5, accountant="rdp")
    for fpr in (1e-4, 0.01, 0.2, 0.5, 0.9):
        threshold = stats.norm.isf(fpr, scale=0.8)
        exact = 0.7 * fpr + 0.3 * stats.norm.sf(threshold, loc=1, scale=0.8)
        assert guarantee.tpr(fpr) == pytest.approx(exact, abs=3e-6)


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


@pytest.mark.parametrize("sigma, steps", [(20.0, 4), (40.0, 1), (10.0, 2)])
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_groups_cover_the_exact_group(sigma, steps, group):
    """Without sampling, k units at once are the same Gaussian mechanism with k times the sensitivity."""
    plan = [SampledGaussian(sigma, 1.0, steps)]
    mu, bound = group * steps**0.5 / sigma, group_epsilon(plan, 1e-5, group)
    direct = PrivacyCurve(plan, group).epsilon(1e-5)
    for value in (bound, direct):
        curve = stats.norm.cdf(mu / 2 - value / mu) - math.exp(value + stats.norm.logcdf(-mu / 2 - value / mu))
        assert curve <= 1e-5
    assert bound >= group * epsilon(plan, 1e-5, "rdp") - 1e-9 and direct <= bound


def test_a_group_of_one_is_a_unit_and_larger_groups_cost_more():
    for accountant in ("rdp", "prv"):
        guarantee = example(accountant=accountant)
        values = [guarantee.epsilon(group=k) for k in (1, 2, 3, 10)]
        assert values == sorted(values) and values[0] == guarantee.epsilon()
        assert values[1] < group_epsilon([TRAIN, SELECT], 1e-5, 2)
    quiet = Guarantee([SampledGaussian(50.0, 0.01, 3)], target_delta=1e-5, accountant="rdp")
    assert quiet.epsilon(group=2) == quiet.epsilon()  # RDP's floor is above the curve
    assert quiet.replace_epsilon() == PrivacyCurve(quiet.mechanisms, relation="replace").epsilon(1e-5) < quiet.epsilon()
    with pytest.raises(BudgetError, match="groups of 50"):
        group_epsilon([TRAIN, SELECT], 1e-5, 50)
    for group in (0, 1001):
        with pytest.raises(ValueError, match=f"group={group}"):
            guarantee.epsilon(group=group)


def test_replacing_lies_between_one_unit_and_two():
    guarantee = example(accountant="prv")
    assert guarantee.epsilon() < guarantee.replace_epsilon() < group_epsilon([TRAIN, SELECT], 1e-5, 2)


# --- report and file -------------------------------------------------------------------------------------------------


def test_without_noise_it_says_so_plainly():
    for guarantee in (Guarantee([], target_delta=1e-5), example(private=False)):
        assert guarantee.epsilon() == math.inf == guarantee.epsilon(group=3) == guarantee.replace_epsilon()
        assert guarantee.delta(10.0) == guarantee.tpr(0.001) == 1.0
        assert guarantee.report().startswith("**No privacy guarantee.**")
        assert "differentially private" not in guarantee.report()


def test_report_names_everything():
    report = example(reproducible=True, unit="person", checked=["no example moves another's loss"],
                     method="BiTFiT()", run="a1b2", data="cd" * 32).report()
    for text in ("differentially private", "one person", "1.00e-05", "Poisson", "rdp", "flat, bound 0.1", "0.8838", "197 steps",
                 "the two classes", "development accuracy", "fixed seed", "opacus", "add/remove one unit", "select", "BiTFiT()", "a1b2",
                 "What it means", "What the unit is", "What is not covered", "a guess detects it with 1 %", "replace one person",
                 "no example moves another's loss"):
        assert text in report, text
    assert "cdcd" not in report  # no digest of the data
    assert "fixed seed" not in example().report()
    claimed = float(report.split("(")[1].split(",")[0])
    assert example().epsilon() <= claimed < example().epsilon() + 0.01  # never rounded down


@pytest.mark.parametrize("guarantee", [
    example(), example(private=False), Guarantee([], target_delta=0.5), example(clip=None, reproducible=True, run="a", not_checked=["x"])])
def test_round_trip(tmp_path, guarantee):
    path = tmp_path / "guarantee.json"
    guarantee.save(path)
    loaded = Guarantee.load(path)
    assert loaded == guarantee and [m.name for m in loaded.mechanisms] == [m.name for m in guarantee.mechanisms]
    content = json.loads(path.read_text())
    assert content["epsilon"] == (guarantee.epsilon() if guarantee.private else None)
    assert content_digest(content) == content_digest(loaded.content())


def test_a_file_of_an_older_version_is_read(tmp_path):
    content = {name: value for name, value in example().content().items()
               if name not in ("run", "method", "ledger_head", "checked", "not_checked", "epsilon_replace_one", "tpr_at_1_percent",
                               "files", "others", "statement")}
    (tmp_path / "old.json").write_text(json.dumps(content | {"data": "cd" * 32, "secrets": ["x"]}))
    found = Guarantee.load(tmp_path / "old.json")
    assert found == example() and "cdcd" not in repr(found) and "data" not in found.content()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"mechanisms": 3}', "not json"])
def test_bad_files(tmp_path, content):
    path = tmp_path / "guarantee.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="not a guarantee that this version can read"):
        Guarantee.load(path)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_bad_target(delta):
    with pytest.raises(ValueError, match=f"target_delta={delta}"):
        Guarantee([TRAIN], target_delta=delta)


@pytest.mark.parametrize("call", [lambda g: g.delta(-1.0), lambda g: g.delta(math.nan), lambda g: g.tpr(1.5), lambda g: g.tpr(math.nan)])
def test_bad_questions(call):
    with pytest.raises(ValueError, match="must"):
        call(example())


# --- verify ----------------------------------------------------------------------------------------------------------

RELEASED = [SampledGaussian(1.1, 0.1, 3, "train"), SampledGaussian(2.0, 0.2, 1, "select")]
PLAN = {"mechanisms": [asdict(m) for m in RELEASED], "delta": 1e-4, "accountant": "rdp", "clip": 0.5, "clipping": "flat",
        "method": "Full()"}


def claimed(ledger: Ledger, run: str = "demo", steps: int = 3) -> None:
    """Begin and claim; the run is finished if nothing remains of its plan."""
    ledger.begin(run, PLAN)
    for name in ["train"] * steps + ["select"]:
        ledger.claim(run, name)
    if steps == 3:
        ledger.finish(run)


def saved(folder: Path, seal: bool = True, steps: int = 3) -> Path:
    """A folder without a list of its files, with the owner's ledger beside the published one."""
    with Ledger(folder / "owner.sqlite") as ledger:
        ledger.begin("other", PLAN)
        claimed(ledger, steps=steps)
        stated = Guarantee(ledger.spent("demo"), target_delta=1e-4, spent=ledger.spent("demo"), planned=RELEASED, accountant="rdp",
                           clip=0.5, run="demo", method="Full()", ledger_head=ledger.publish(folder / "ledger.sqlite", "demo"),
                           uncharged=["dev accuracy"], assumed_public=["the size"], versions={"opacus": "1"})
        if seal:
            ledger.publish(folder / "ledger.sqlite", "demo", seal=content_digest(stated.content()))
    stated.save(folder / "guarantee.json")
    (folder / "README.md").write_text("# Model card\n\n" + stated.report())
    return folder


def changed(folder: Path, **fields) -> Path:
    path = folder / "guarantee.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def test_an_honest_run_is_verified(tmp_path):
    sentences = verify(saved(tmp_path))
    for text in ("all rows in place", "the last when the guarantee was stated", "3 steps, as charged", "computed again with rdp",
                 "as sealed", "the same claim", "accountant, method, clip, clipping", "nor the rest of the card were sealed"):
        assert any(text in sentence for sentence in sentences), text
    assert verify(tmp_path / "guarantee.json", tmp_path / "ledger.sqlite") == sentences
    with Ledger(tmp_path / "owner.sqlite") as ledger:  # others may go on
        ledger.begin("later", PLAN)
    assert len(verify(tmp_path, tmp_path / "owner.sqlite")) == len(sentences)


def other_value(value):
    """Something else of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value * 0.5
    if isinstance(value, str):
        return {"rdp": "prv", "flat": "automatic"}.get(value, value + "x")
    return {**value, "trust": "nobody"} if isinstance(value, dict) else value[:-1] if value else ["x"]


@pytest.mark.parametrize("name", sorted(set(example().content()) - {"private"}))
def test_every_changed_field_is_caught(tmp_path, name):
    saved(tmp_path)
    content = json.loads((tmp_path / "guarantee.json").read_text())
    changed(tmp_path, **{name: other_value(content[name])})
    with pytest.raises(ValueError):
        verify(tmp_path)


RECORDED = ["mechanisms", "spent", "planned", "target_delta", "accountant", "clip", "clipping", "method", "run", "ledger_head",
            *READINGS]


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_record_knows_is_caught_without_a_seal(tmp_path, name):
    saved(tmp_path, seal=False)
    assert any("never sealed" in sentence for sentence in verify(tmp_path))
    content = json.loads((tmp_path / "guarantee.json").read_text())
    changed(tmp_path, **{name: other_value(content[name])})
    with pytest.raises(ValueError):
        verify(tmp_path)


@pytest.mark.parametrize("field, value", [("noise_multiplier", 1.2), ("sample_rate", 0.05), ("steps", 2), ("name", "tune")])
@pytest.mark.parametrize("where", ["mechanisms", "spent", "planned"])
def test_every_changed_mechanism_is_caught(tmp_path, where, field, value):
    saved(tmp_path, seal=False)
    lines = json.loads((tmp_path / "guarantee.json").read_text())[where]
    lines[0][field] = value
    changed(tmp_path, **{where: lines})
    with pytest.raises(ValueError, match=f"{where}|more was released than planned"):
        verify(tmp_path)


def test_a_lie_that_is_consistent_in_itself_is_caught(tmp_path):
    """Everything in the file says the smaller epsilon; only the ledger knows better."""
    saved(tmp_path)
    less = replace(Guarantee.load(tmp_path / "guarantee.json"), mechanisms=RELEASED[:1], spent=RELEASED[:1], planned=RELEASED[:1])
    less.save(tmp_path / "guarantee.json")
    (tmp_path / "README.md").write_text(less.report())
    with pytest.raises(VerificationError, match="planned"):
        verify(tmp_path)


def test_steps_after_the_statement_are_caught(tmp_path):
    saved(tmp_path, steps=2)
    assert verify(tmp_path)[-4:] and any("never finished" in sentence for sentence in verify(tmp_path, tmp_path / "owner.sqlite"))
    with Ledger(tmp_path / "owner.sqlite") as ledger:
        ledger.claim("demo", "train")
    with pytest.raises(VerificationError, match="spent"):
        verify(tmp_path, tmp_path / "owner.sqlite")


def test_a_changed_row_is_caught_and_so_is_a_rewritten_chain(tmp_path):
    path = saved(tmp_path) / "ledger.sqlite"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE ledger SET content = replace(content, '1.1', '1.9') WHERE kind = 'begin'")
    with pytest.raises(ValueError, match="row 2 was changed"):
        verify(tmp_path)
    rows, previous = connection.execute("SELECT * FROM ledger ORDER BY number").fetchall(), ""
    with connection:
        for row in rows:  # a forger who knows how the chain is made
            previous = row_hash(previous, row[:-1])
            connection.execute("UPDATE ledger SET hash = ? WHERE number = ?", (previous, row[0]))
    connection.close()
    with pytest.raises(VerificationError, match="was rewritten"):
        verify(tmp_path)


def test_a_changed_model_card_is_caught(tmp_path):
    card = saved(tmp_path) / "README.md"
    card.write_text(card.read_text().replace(claim(Guarantee.load(tmp_path / "guarantee.json")), "**(0.10, 1e-9)-differentially private**"))
    with pytest.raises(VerificationError, match="does not state"):
        verify(tmp_path)


def test_bad_places(tmp_path):
    with pytest.raises(VerificationError, match="does not exist"):
        verify(tmp_path / "none")
    saved(tmp_path)
    with pytest.raises(VerificationError, match=r"no ledger at .*none"):
        verify(tmp_path, tmp_path / "none")
    assert not (tmp_path / "none").exists()  # looking does not make one
    with Ledger(tmp_path / "another.sqlite") as ledger:
        ledger.begin("mine", PLAN)
    with pytest.raises(VerificationError, match='"demo" is not in'):
        verify(tmp_path, tmp_path / "another.sqlite")
    (tmp_path / "ledger.sqlite").unlink()
    with pytest.raises(VerificationError, match="no ledger"):
        verify(tmp_path)


def test_a_run_without_privacy_promises_nothing(tmp_path):
    Guarantee([], target_delta=1e-4).save(tmp_path / "guarantee.json")
    assert "no privacy guarantee" in verify(tmp_path)[0]
    for lie in ({"epsilon": 1.0}, {"planned": [asdict(TRAIN)]}):
        Guarantee([], target_delta=1e-4).save(tmp_path / "guarantee.json")
        with pytest.raises(VerificationError):
            verify(changed(tmp_path, **lie))
    saved(tmp_path)
    with pytest.raises(VerificationError, match="not private"):  # a guarantee cannot be made to vanish either
        verify(changed(tmp_path, private=False))


def test_the_command(run, tmp_path):
    status, out, _ = run("verify", saved(tmp_path))
    assert status == 0 and out.count("ok: ") == len(verify(tmp_path))
    status, _, err = run("verify", changed(tmp_path, epsilon=0.1))
    assert status == 1 and err.startswith("dpft: epsilon: the guarantee says 0.1") and err.count("\n") == 1
    status, _, err = run("verify", tmp_path, "--ledger", tmp_path / "none")
    assert status == 1 and "no ledger" in err and err.count("\n") == 1


# --- what is stated ---------------------------------------------------------------------------------------------------

PLANNED = SampledGaussian(1.0, 0.1, 40, "train")


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_stopped_run_states_the_epsilon_of_its_plan(accountant):
    """Stopped after 5 of 40 steps, it stated 1.12 instead of 3.00: an odometer, which a curve does not support."""
    spent = [replace(PLANNED, steps=5)]
    stopped = Guarantee(spent, target_delta=1e-5, spent=spent, planned=[PLANNED], accountant=accountant)
    assert stopped.epsilon() == epsilon(PLANNED, 1e-5, accountant) and stopped.stated == [PLANNED]
    whole = Guarantee([PLANNED], target_delta=1e-5, spent=[PLANNED], planned=[PLANNED], accountant=accountant)
    assert (stopped.tpr(0.01), stopped.replace_epsilon(), stopped.epsilon(group=3)) == (
        whole.tpr(0.01), whole.replace_epsilon(), whole.epsilon(group=3))
    assert "stopped before the end of its plan" in stopped.report() and "stopped before" not in whole.report()
    assert Guarantee([], target_delta=1e-5, planned=[PLANNED], private=True).epsilon() == 0  # nothing was released


def test_only_an_end_that_is_declared_independent_states_less():
    spent = [replace(PLANNED, steps=5)]
    ended = Guarantee(spent, target_delta=1e-5, spent=spent, planned=[PLANNED], independent="the machine was needed")
    assert ended.epsilon() == epsilon(spent, 1e-5) < epsilon(PLANNED, 1e-5)
    assert "the machine was needed" in ended.report() and "stopped before the end" not in ended.report()


@pytest.mark.parametrize("spent", [[replace(PLANNED, steps=41)], [replace(PLANNED, noise_multiplier=0.9)], [PLANNED, SELECT]])
def test_more_than_was_planned_is_no_guarantee(spent):
    with pytest.raises(ValueError, match="more was released than planned"):
        Guarantee(spent, target_delta=1e-5, planned=[PLANNED])


def test_trials_of_a_search_answer_for_their_plans_together():
    spent = [SampledGaussian(1.0, 0.1, 120, "train, 3 trials")]
    assert Guarantee(spent, target_delta=1e-5, planned=[PLANNED] * 3).epsilon() == pytest.approx(epsilon(spent, 1e-5))


# --- words for an officer ---------------------------------------------------------------------------------------------


@also(1e-5)
@also(7.424e-6)
@also(1.1)
@given(st.floats(1e-300, 1e300))
def test_a_promise_is_rounded_up_and_by_no_more_than_a_digit(value):
    short, hundredths = rounded_up(value, 3), rounded_up(value)
    assert value <= short <= 1.01000001 * value and float(f"{short:.2e}") == short == rounded_up(short, 3)
    assert value <= hundredths and hundredths - value <= max(0.01, 1e-15 * value)
    assert rounded_up(1e-5, 3) == 1e-5 and rounded_up(1.1) == 1.1 and rounded_up(7.424e-6, 3) == 7.43e-6
    assert rounded_up(math.inf) == math.inf and rounded_up(0.0) == rounded_up(0.0, 3) == 0


def test_no_number_of_a_card_is_below_what_was_proven():
    told = claim(Guarantee([SampledGaussian(0.8838, 1024 / 67349, 197)], target_delta=1 / (2 * 67349)))
    assert "(1.99, 7.43e-06)" in told


def test_a_large_epsilon_is_a_warning_and_never_a_large_number():
    loud = Guarantee([SampledGaussian(0.05, 0.5, 100)], target_delta=1e-5, accountant="rdp")
    report = loud.report()
    assert loud.epsilon() > 1000 and "Caution: epsilon is above 10" in report.split("What it means")[0]
    assert "may be more than 1,000" in report and "e+" not in report.split("| | |")[0]
    factor = rounded_up(math.exp(example().epsilon()), 3)
    assert "Caution" not in example().report() and f"at most a factor of {factor:.3g}," in example().report()


def test_replacing_is_stated_as_such():
    text = example().report()
    assert f"epsilon is {rounded_up(example().replace_epsilon()):.2f}" in text and example().replace_epsilon() != example().epsilon()
    quiet = Guarantee([SampledGaussian(50.0, 0.01, 3)], target_delta=1e-5, accountant="rdp").report()
    assert "rdp is the looser accountant" in quiet and "looser accountant" not in example(accountant="prv").report()


def test_what_people_know_is_stated_or_said_to_be_missing():
    report = example().report()
    for question in ("data set, name and date", "owner of the data", "utility for subgroups", "licences", "retention",
                     "who sees data, checkpoints, ledger and logs"):
        assert f"| {question} | not stated |" in report
    told = example(statement=Statement(data_owner="the clinic", retention="five years")).report()
    assert "| owner of the data | the clinic |" in told and "| retention | five years |" in told and "not stated" in told


@pytest.mark.parametrize("others, text", [(True, "has charged more than this run"), (False, "charged nothing else"),
                                          (None, "is not counted here")])
def test_other_runs_are_named_without_numbers(others, text):
    assert text in example(others=others).report()


# --- a folder that was published --------------------------------------------------------------------------------------


def folder_of(place: Path, others: int = 0) -> Path:
    """What a run publishes, with stand-ins for the weights."""
    folder = place / "model"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 10)
    (folder / "dpft.json").write_text("{}")
    with Ledger(place / "owner.sqlite", who="Anna Agnew") as book:
        for number in range(others):
            book.begin(f"other {number}", PLAN)
        if "demo" not in book.runs():
            claimed(book)
        Guarantee(book.spent("demo"), target_delta=1e-4, spent=book.spent("demo"), planned=RELEASED, accountant="rdp", clip=0.5,
                  run="demo", method="Full()", ledger_head=book.head, versions={}, data="cd" * 32).publish(folder, book, "## How to load\n")
    return folder


def test_a_published_folder_is_verified_by_its_own_ledger_and_by_the_owners(tmp_path):
    folder = folder_of(tmp_path)
    for ledger in (None, tmp_path / "owner.sqlite"):
        sentences = verify(folder, ledger)
        for text in ("model.safetensors and the model card", "all 3 files", "as sealed", "3 steps, as charged", "all rows in place"):
            assert any(text in sentence for sentence in sentences), text
    assert (folder / "README.md").read_text().endswith("## How to load\n")


@pytest.mark.parametrize("name, content, message", [
    ("model.safetensors", b"other weights", "model.safetensors was changed"),
    ("model.safetensors", None, "model.safetensors is missing"),
    ("README.md", None, "README.md is missing"),
    ("README.md", "prefix", "README.md was changed"),
    ("README.md", "suffix", "README.md was changed"),
    ("dpft.json", b"[]", "dpft.json was changed"),
    ("pytorch_model.bin", b"other weights", "pytorch_model.bin was added"),
    ("peft/adapter_model.safetensors", b"other weights", "adapter_model.safetensors was added"),
    ("CLAIMS.md", b"anonymous", "CLAIMS.md was added"),
    ("config.json", b'{"auto_map": {"AutoModel": "there--code.Model"}}', "config.json was added"),
    ("tokenizer.json", b"{}", "tokenizer.json was added"), ("chat_template.jinja", b"x", "chat_template.jinja was added"),
    ("tf_model.h5", b"other weights", "tf_model.h5 was added"), ("MODEL.SAFETENSORS", b"other weights", "MODEL.SAFETENSORS was added"),
    ("LICENSE", b"x", "LICENSE was added")])
def test_weights_card_and_claims_are_bound(tmp_path, name, content, message):
    """Swapped weights, a prefixed claim and a missing card passed."""
    path = folder_of(tmp_path) / name
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        lie = "**(0.01, 1e-09)-differentially private** for any group.\n"
        path.write_text(lie + path.read_text() if content == "prefix" else path.read_text() + lie)
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(VerificationError, match=message):
        verify(tmp_path / "model")


def test_weights_that_are_relisted_break_the_seal(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").write_bytes(b"other weights")
    content = json.loads((folder / "guarantee.json").read_text())
    content["files"]["model.safetensors"] = hashlib.sha256(b"other weights").hexdigest()
    (folder / "guarantee.json").write_text(json.dumps(content))
    with pytest.raises(VerificationError, match="not the one that was sealed"):
        verify(folder)


def test_a_seal_that_was_cut_off_is_missed(tmp_path):
    folder = folder_of(tmp_path)
    with sqlite3.connect(folder / "ledger.sqlite") as book:
        (last,) = book.execute("SELECT max(number) FROM ledger").fetchone()
        kind, = book.execute("SELECT kind FROM ledger WHERE number = ?", (last,)).fetchone()
        assert kind == "seal"
        for (name,) in book.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            book.execute(f"DROP TRIGGER {name}")
        book.execute("DELETE FROM ledger WHERE number = ?", (last,))
        book.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'ledger'", (last - 1,))
    with pytest.raises(VerificationError):
        verify(folder)


def test_a_folder_made_up_as_a_whole_passes_alone_and_fails_against_the_owners_ledger(tmp_path):
    """What no check of the folder can catch; it is said in the chapter."""
    folder = folder_of(tmp_path)
    with Ledger(tmp_path / "forged.sqlite") as book:
        less = [replace(RELEASED[0], steps=1)]
        book.begin("demo", PLAN | {"mechanisms": [asdict(m) for m in less]})
        book.claim("demo", "train")
        book.finish("demo")
        Guarantee(less, target_delta=1e-4, spent=less, planned=less, accountant="rdp", clip=0.5, run="demo", method="Full()",
                  versions={}).publish(folder, book)
    assert verify(folder)
    with pytest.raises(VerificationError):
        verify(folder, tmp_path / "owner.sqlite")


def test_hidden_files_and_folders_are_left_alone(tmp_path):
    """A repository keeps its own there, and so do those who download a folder."""
    folder = folder_of(tmp_path)
    (folder / ".gitattributes").write_text("x")
    for name in (".git", ".cache/huggingface"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config").write_text("x")
    assert "all 3 files beside the ledger and the guarantee: none changed, missing or added" in verify(folder)


@pytest.mark.parametrize("sealed", [False, True])  # by an earlier version
def test_what_lies_in_a_hidden_folder_is_neither_sealed_nor_compared(tmp_path, sealed):
    place = tmp_path / "model" / ".git"
    place.mkdir(parents=True)
    (place / "index").write_text("before")
    folder = folder_of(tmp_path)
    assert ".git/index" not in file_digests(folder)
    if sealed:
        files = file_digests(folder) | {".git/index": "ab" * 32}
        stated = replace(Guarantee.load(folder / "guarantee.json"), private=False, mechanisms=[], spent=[], planned=[], files=files)
        stated.save(folder / "guarantee.json")
    (place / "index").write_text("after")
    assert "all 3 files beside the ledger and the guarantee: none changed, missing or added" in verify(folder)


@pytest.mark.parametrize("target", ["../code", "inside"])
def test_a_link_to_a_folder_is_neither_sealed_nor_verified(tmp_path, target):
    """Whoever loads the folder follows it, wherever it leads; the files there are not among those that are compared."""
    folder = folder_of(tmp_path)
    (folder / target).mkdir()
    (folder / target / ".config.json").write_text("{}")
    assert verify(folder)
    (folder / "extra").symlink_to(target, target_is_directory=True)
    with pytest.raises(VerificationError, match=r"extra is a link to a folder.*put the files themselves there, or remove the link"):
        verify(folder)
    with pytest.raises(ValueError, match="extra is a link to a folder"):
        file_digests(folder)
    (folder / "extra").rename(folder / ".extra")
    assert verify(folder)


def test_a_link_to_a_file_stands_for_its_bytes(tmp_path):
    """A download keeps the files elsewhere and links to them."""
    folder = folder_of(tmp_path)
    (folder / "dpft.json").rename(tmp_path / "blob")
    (folder / "dpft.json").symlink_to("../blob")
    assert verify(folder)
    (tmp_path / "blob").write_text("[]")
    with pytest.raises(VerificationError, match=r"dpft\.json was changed"):
        verify(folder)


def test_what_is_published_depends_on_no_other_run(tmp_path):
    """The same run beside another number of other runs: the same bytes, but for whether there are others."""
    folders = []
    for number, others in enumerate([0, 0, 1, 4]):
        (tmp_path / str(number)).mkdir()
        folders.append(folder_of(tmp_path / str(number), others))
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1] and contents[2] == contents[3]
    different = {name for name in contents[0] if contents[0][name] != contents[2][name]}
    assert different == {"README.md", "guarantee.json", "ledger.sqlite"}
    for content in contents:
        for text in (b"Anna", b"other ", b"cdcdcd"):
            assert not any(text in whole for name, whole in content.items() if name != "README.md"), text
    assert b"has charged more" in contents[3]["README.md"] and b"cdcd" not in contents[3]["README.md"]


def test_a_selection_does_not_say_whether_there_were_other_runs(tmp_path):
    from dpft.selection import TrialLaw, TunedGuarantee
    contents = []
    for number, others in enumerate((0, 3)):
        place = tmp_path / str(number)
        folder = folder_of(place) if place.mkdir() else folder_of(place, others)
        with Ledger(place / "owner.sqlite") as book:
            TunedGuarantee(book.spent("demo"), target_delta=1e-4, spent=book.spent("demo"), planned=RELEASED, accountant="rdp", clip=0.5,
                           run="demo", method="Full()", versions={}, law=TrialLaw("poisson", 4.0)).publish(folder, book)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert verify(folder) if number == 0 else True
    assert contents[0] == contents[1]


@pytest.mark.parametrize("kind", ["dpft.nonsense:X", "dpft.nonsense.deeper:X", "dpft.:X", "dpft.loop:fine_tune", "dpft.loop:Run", "nosep",
                                  "dpft.selection:TrialLaw", "dpft.guarantee:absent", "json:loads", "dpft.book.figures:\0", 3, ["a"]])
def test_a_file_calls_nothing_but_a_guarantee_of_this_package(tmp_path, kind, monkeypatch):
    """The kind that a file names was imported, and called with what else the file holds."""
    monkeypatch.setattr("dpft.loop.fine_tune", lambda **_: pytest.fail("a file called fine_tune"))
    folder = folder_of(tmp_path)
    content = json.loads((folder / "guarantee.json").read_text())
    (folder / "guarantee.json").write_text(json.dumps(content | {"kind": kind}))
    with pytest.raises(ValueError, match=r"^.*guarantee.json is not a guarantee that this version can read \(.*\)$"):
        verify(folder)


def test_a_guarantee_that_is_no_text_is_refused_in_one_sentence(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "guarantee.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"guarantee.json is not a guarantee that this version can read"):
        verify(folder)


def test_publishing_again_replaces_what_was_published(tmp_path):
    first = {path.name: path.read_bytes() for path in folder_of(tmp_path).iterdir()}
    assert first == {path.name: path.read_bytes() for path in folder_of(tmp_path).iterdir()} and verify(tmp_path / "model")


def test_a_run_without_privacy_is_published_without_a_ledger(tmp_path):
    folder = folder_of(tmp_path)                                   # of an earlier run
    Guarantee([], target_delta=1e-4).publish(folder)
    assert not (folder / "ledger.sqlite").exists() and "no privacy guarantee" in verify(folder)[0]
    (folder / "README.md").write_text("(0.1, 1e-9)-differentially private")
    with pytest.raises(VerificationError, match=r"README.md was changed"):
        verify(folder)


# --- sentences -------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=6).map(" ".join), max_size=12))
def test_units_by_brute_force(texts):
    """Each row goes to the longest, then first, row that holds its words one after the other."""
    def inside(part: list[str], whole: list[str]) -> bool:
        return any(whole[i:i + len(part)] == part for i in range(len(whole) - len(part) + 1))

    words = [text.split() for text in texts]
    owners = []
    for part in words:
        holders = [whole for whole in words if part and inside(part, whole)] or [part]
        owners.append(tuple(max(holders, key=len)))  # max takes the first of the longest
    seen = list(dict.fromkeys(owners))
    assert sentence_units(texts) == [seen.index(owner) for owner in owners]


def test_the_record_of_sst2_adds_up():
    found = json.loads((Path(__file__).parent.parent / "nbs/results/sst2_units.json").read_text())
    assert found["rows"] == 67349 and 0.89 < found["rows_inside_another"] / found["rows"] < 0.91
    assert found["units"] * found["mean_rows_per_unit"] == pytest.approx(found["rows"])


def test_a_guarantee_that_says_a_thing_twice_is_refused(tmp_path):
    "A reader would see the first, and a check the last."
    path = tmp_path / "guarantee.json"
    Guarantee([SampledGaussian(1.0, 0.1, 10, "train")], target_delta=1e-5).save(path)
    path.write_text(path.read_text().replace("{", '{\n "uncharged": [],\n "epsilon": 0.1,', 1))
    with pytest.raises(ValueError, match="'uncharged' twice"):
        Guarantee.load(path)
