"""The privacy curve: exact attacks, other libraries and brute force give no more than it says; groups, units and odometers."""

import math

import numpy as np
import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpft import privacy
from dpft.curve import best_true_positive_rate, grouped
from dpft.privacy import PrivacyCurve, SampledGaussian, StepLoss, epsilon, loss_grid

TRAIN = SampledGaussian(0.8838, 1024 / 67349, 197, "train")
PLANS = st.lists(st.builds(SampledGaussian, st.floats(0.5, 10), st.floats(0.001, 1), st.integers(1, 300)), min_size=1, max_size=2)


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


@given(st.floats(0, 6), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 1))
def test_best_attack_by_randomised_response(value, delta, fpr, other):
    """Monotone, between guessing and certainty, and reached by the mechanism that reveals with delta and else lies with e^-epsilon."""
    bound = best_true_positive_rate(value, delta, fpr)
    assert fpr - 1e-12 <= bound <= 1
    low, high = sorted((fpr, other))
    assert best_true_positive_rate(value, delta, low) <= best_true_positive_rate(value, delta, high) + 1e-12
    lie = (1 - delta) / (1 + math.exp(value))  # probability of a false alarm of "says yes"
    assert best_true_positive_rate(value, delta, lie) >= delta + (1 - delta) - lie - 1e-9


@pytest.mark.parametrize("sigma, steps", [(20.0, 4), (40.0, 1), (10.0, 2)])
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_groups_cover_the_exact_group(sigma, steps, group):
    """Without sampling, k units at once are the same Gaussian mechanism with k times the sensitivity."""
    plan = [SampledGaussian(sigma, 1.0, steps)]
    mu, bound = group * steps**0.5 / sigma, grouped(lambda delta: epsilon(plan, delta, "rdp"), 1e-5, group)
    direct = PrivacyCurve(plan, group).epsilon(1e-5)
    for value in (bound, direct):
        curve = stats.norm.cdf(mu / 2 - value / mu) - math.exp(value + stats.norm.logcdf(-mu / 2 - value / mu))
        assert curve <= 1e-5
    assert bound >= group * epsilon(plan, 1e-5, "rdp") - 1e-9 and direct <= bound


@pytest.mark.parametrize("call, words", [
    (lambda: PrivacyCurve([TRAIN], 2, "replace"), 'group=2: "replace" is for one unit'), (lambda: PrivacyCurve([TRAIN], 2.5), "group=2.5"),
    (lambda: PrivacyCurve([TRAIN], relation="removed"), "relation='removed': choose remove, add, replace"),
    (lambda: PrivacyCurve([TRAIN]).delta(-1.0), "epsilon must be at least 0"), (lambda: best_true_positive_rate(1.0, 0.1, 2.0), "fpr=2.0")])
def test_a_wrong_argument_is_one_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
