"""The guarantee: what it says agrees with the accountants, with exact attacks and with itself after a round trip."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpft.guarantee import Guarantee, best_true_positive_rate, group_epsilon
from dpft.privacy import BudgetError, SampledGaussian, epsilon

TRAIN = SampledGaussian(0.8838, 1024 / 67349, 197, "train")
SELECT = SampledGaussian(2.0, 0.02, 5, "select")


def example(**changes) -> Guarantee:
    fields = {"target_delta": 1e-5, "accountant": "rdp", "clip": 0.1, "assumed_public": ["the two classes"],
              "uncharged": ["development accuracy"], "spent": [TRAIN], "planned": [TRAIN, SELECT]}
    return Guarantee([TRAIN, SELECT], **(fields | changes))


def test_epsilon_is_the_accountants():
    for accountant in ("rdp", "prv"):
        guarantee = example(accountant=accountant)
        assert guarantee.epsilon() == epsilon([TRAIN, SELECT], 1e-5, accountant)
        assert guarantee.epsilon(1e-6) == epsilon([TRAIN, SELECT], 1e-6, accountant)


@given(st.floats(0.1, 6), st.floats(0, 3))
@settings(max_examples=20)
def test_delta_inverts_epsilon(sigma, value):
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
def test_tpr_covers_the_best_attack_on_the_gaussian(sigma):
    guarantee = Guarantee([SampledGaussian(sigma, 1.0, 1)], target_delta=1e-5)
    for fpr in np.geomspace(1e-5, 1, 20):
        assert guarantee.tpr(fpr) >= stats.norm.cdf(stats.norm.ppf(fpr) + 1 / sigma) - 1e-12
    assert guarantee.tpr(0.01) < best_true_positive_rate(guarantee.epsilon(), 1e-5, 0.01)


@pytest.mark.parametrize("sigma, steps", [(20.0, 4), (40.0, 1), (10.0, 2)])
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_groups_cover_the_exact_group(sigma, steps, group):
    """Without sampling, k units at once are the same Gaussian mechanism with k times the sensitivity."""
    plan = [SampledGaussian(sigma, 1.0, steps)]
    mu, bound = group * steps**0.5 / sigma, group_epsilon(plan, 1e-5, group)
    curve = stats.norm.cdf(mu / 2 - bound / mu) - math.exp(bound + stats.norm.logcdf(-mu / 2 - bound / mu))
    assert curve <= 1e-5
    assert bound >= group * epsilon(plan, 1e-5, "rdp") - 1e-9


def test_a_group_of_one_is_a_unit_and_larger_groups_cost_more():
    guarantee = example()
    values = [guarantee.epsilon(group=k) for k in (1, 2, 3)]
    assert values == sorted(values) and values[0] == guarantee.epsilon()
    assert values[1] >= 2 * values[0]
    with pytest.raises(BudgetError, match="groups of 50"):
        guarantee.epsilon(group=50)
    with pytest.raises(ValueError, match="group=0"):
        guarantee.epsilon(group=0)


def test_without_noise_it_says_so_plainly():
    for guarantee in (Guarantee([], target_delta=1e-5), example(private=False)):
        assert guarantee.epsilon() == math.inf == guarantee.epsilon(group=3)
        assert guarantee.delta(10.0) == guarantee.tpr(0.001) == 1.0
        assert guarantee.report().startswith("**No privacy guarantee.**")
        assert "differentially private" not in guarantee.report()


def test_report_names_everything():
    report = example(reproducible=True, unit="person").report()
    for text in ("differentially private", "one person", "1.00e-05", "Poisson", "rdp", "flat, bound 0.1", "0.8838", "197 steps",
                 "the two classes", "development accuracy", "fixed seed", "opacus", "add/remove one unit", "select"):
        assert text in report, text
    assert "fixed seed" not in example().report()
    claimed = float(report.split("(")[1].split(",")[0])
    assert example().epsilon() <= claimed < example().epsilon() + 0.01  # never rounded down


@pytest.mark.parametrize("guarantee", [
    example(), example(private=False), Guarantee([], target_delta=0.5), example(clip=None, reproducible=True)])
def test_round_trip(tmp_path, guarantee):
    path = tmp_path / "guarantee.json"
    guarantee.save(path)
    loaded = Guarantee.load(path)
    assert loaded == guarantee and [m.name for m in loaded.mechanisms] == [m.name for m in guarantee.mechanisms]
    assert json.loads(path.read_text())["epsilon"] == (guarantee.epsilon() if guarantee.private else None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"mechanisms": 3}', "not json"])
def test_bad_files(tmp_path, content):
    path = tmp_path / "guarantee.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="no guarantee"):
        Guarantee.load(path)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_bad_target(delta):
    with pytest.raises(ValueError, match=f"target_delta={delta}"):
        Guarantee([TRAIN], target_delta=delta)


@pytest.mark.parametrize("call", [lambda g: g.delta(-1.0), lambda g: g.delta(math.nan), lambda g: g.tpr(1.5), lambda g: g.tpr(math.nan)])
def test_bad_questions(call):
    with pytest.raises(ValueError, match="must"):
        call(example())
