"""Lower bounds against formulas and simulations, audits of fine_tune for every method, and what is refused."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpft import BiTFiT, Full, auditing
from dpft.auditing import Audit, CanaryLayers, CanaryTable, audit
from dpft.book import audits
from dpft.book.audits import METHODS, VARIANTS, audit_entry, audit_grid, audit_settings, audit_table, method_to_audit, refuted
from dpft.book.evidence import EXPERIMENTS
from dpft.book.experiments import read_records
from dpft.curve import best_true_positive_rate
from dpft.lower_bounds import (
    clopper_pearson,
    epsilon_of_rates,
    gaussian_epsilon,
    guess_bound,
    guess_p_value,
    mu_of_rates,
    separation_bound,
)
from dpft.privacy import SampledGaussian

QUICK = {"accountant": "rdp", "cache": 0.0}
RARE = 1e-6  # how often an assertion about a random run may fail


# The bounds -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.1, 0.7, 1.0, 3.0, 9.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_the_gaussian_epsilon_is_that_of_dp_accounting(mu, delta):
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    assert gaussian_epsilon(mu, delta) == pytest.approx(get_epsilon_gaussian(1 / mu, delta), abs=1e-5)


def independent(m, r, v, epsilon, delta):
    "The exact chance of v right guesses when each coin is told truly with probability delta and else by randomised response."
    return stats.binom.sf(v - 1, r, delta + (1 - delta) / (1 + math.exp(-epsilon)))


def steinke(m, r, v, epsilon, delta):
    "The bound of the paper, from its statement."
    chance = 1 / (1 + math.exp(-epsilon))
    spread = [(stats.binom.cdf(v - 1, r, chance) - stats.binom.cdf(v - 1 - k, r, chance)) / k for k in range(1, v + 1)]
    return min(1.0, stats.binom.sf(v - 1, r, chance) + 2 * m * delta * max(spread, default=0.0))


@given(st.integers(1, 60), st.floats(0, 6), st.sampled_from([0.0, 1e-8, 1e-5, 1e-3, 0.1]), st.data())
def test_guesses_are_never_likelier_than_the_p_value_says(r, epsilon, delta, data):
    v, m = data.draw(st.integers(0, r)), r + data.draw(st.integers(0, 100))
    p = guess_p_value(v, r, m, epsilon, delta)
    assert independent(m, r, v, epsilon, delta) <= p + 1e-12
    together = delta * (v <= r) + (1 - delta) * stats.binom.sf(v - 1, r, 1 / (1 + math.exp(-epsilon)))
    assert together <= p + 1e-12


def test_without_delta_the_p_value_is_the_papers_and_with_it_of_its_size():
    for v in (30, 40, 45, 50):
        assert guess_p_value(v, 50, 1000, 1.0, 0.0) == pytest.approx(steinke(1000, 50, v, 1.0, 0.0), abs=1e-12)
        ours, theirs = guess_p_value(v, 50, 1000, 1.0, 1e-6), steinke(1000, 50, v, 1.0, 1e-6)
        assert abs(ours - theirs) < 1e-3                              # both add at most 2 m delta


def test_the_bound_of_guesses_inverts_the_p_value():
    for v in (30, 45, 50):
        bound = guess_bound(v, 50, 1000, 1e-6)
        assert guess_p_value(v, 50, 1000, bound, 1e-6) == pytest.approx(0.05, abs=1e-6) or bound == 0
        assert guess_bound(v, 50, 1000, 1e-6, 0.001) <= bound
    assert guess_bound(25, 50, 1000, 1e-6) == 0 and guess_bound(10_000, 10_000, 10_000, 0.0) > 7


@pytest.mark.parametrize("count", [40, 400])
def test_the_bounds_are_wrong_as_rarely_as_they_say(count):
    rng, trials = np.random.default_rng(1), 400
    pairs = [(rng.normal(1, 1, count // 2), rng.normal(0, 1, count // 2)) for _ in range(trials)]
    separated = sum(separation_bound(*pair) > 1 for pair in pairs)
    assert 1e-7 < stats.binom.cdf(separated, trials, 0.05) < 1 - 1e-7            # exact: neither too often nor too rarely
    thresholds = sum(mu_of_rates(*clopper_pearson(*pair, 0.5)) > 1 for pair in pairs)
    assert stats.binom.sf(thresholds - 1, trials, 0.05) > 1e-7
    for pair in pairs[:10]:
        assert separation_bound(*pair, 0.001) <= separation_bound(*pair, 0.05)


def test_clopper_pearson_is_scipys_interval():
    inside, outside = np.arange(50.0), np.arange(50.0) - 20
    true, false = clopper_pearson(inside, outside, 24.5, 0.1)
    assert true == pytest.approx(stats.binomtest(25, 50).proportion_ci(0.9, "exact").low)
    assert false == pytest.approx(stats.binomtest(5, 50).proportion_ci(0.9, "exact").high)
    assert clopper_pearson(inside, outside, 99, 0.1)[0] == 0 and clopper_pearson(inside, outside, -99, 0.1)[1] == 1


@given(st.floats(0.0, 8), st.floats(1e-9, 0.1), st.floats(0.001, 0.999))
def test_the_best_attack_of_a_pair_reads_as_that_epsilon_and_no_more(epsilon, delta, fpr):
    best = best_true_positive_rate(epsilon, delta, fpr)
    found = epsilon_of_rates(best, fpr, delta)
    assert best > 1 - 1e-9 or found <= epsilon + 1e-5


def test_scores_without_noise_or_without_difference():
    inside, outside = np.ones(50), np.zeros(50)
    assert separation_bound(inside, outside) == math.inf and separation_bound(outside, inside) == 0
    assert separation_bound(np.zeros(50), np.zeros(50)) == 0


def test_holms_test_by_hand():
    assert refuted([0.001, 0.2, 0.012, 0.03]) == [True, False, True, False]
    assert refuted([0.04, 0.04]) == [False, False] and refuted([0.04]) == [True] and refuted([]) == []
    assert refuted([math.nan]) == [False] and refuted([0.001, math.nan]) == [True, False]


# Audits ---------------------------------------------------------------------------------------------------------------------------


def test_a_single_step_is_audited_to_95_percent():
    "With 150,000 canaries the standard error of mu is 0.0055, so both ends are more than 4.8 of them away."
    found = audit(Full(), noise_multiplier=1.0, steps=1, model=CanaryTable(150_000), seed=0, **QUICK)
    assert found.mu == 1.0 and found.claim == pytest.approx(gaussian_epsilon(1.0, 1e-6)) and found.claim < found.epsilon
    assert 0.95 * found.claim <= found.lower_bound() and found.lower_bound(error=RARE) <= found.claim
    assert 0 < found.lower_bound("guesses") < found.lower_bound("threshold") and found.lower_bound("threshold", RARE) <= found.claim


def test_a_whole_run_on_a_linear_model_is_audited_to_70_percent():
    found = audit(Full(), 8.0, steps=20, model=CanaryTable(10_000), seed=0, **QUICK)
    assert 0.7 * found.epsilon <= found.lower_bound() and found.lower_bound(error=RARE) <= found.claim


def test_with_sampling_the_bound_is_of_rates():
    found = audit(Full(), noise_multiplier=0.6, steps=10, sample_rate=0.25, model=CanaryTable(4000), seed=0, **QUICK)
    assert found.mu is None and found.kinds == ["threshold", "guesses"] and found.claim == found.epsilon
    assert found.lower_bound() > 0.5 and found.lower_bound(error=RARE) < found.claim
    with pytest.raises(ValueError, match="the plan samples"):
        found.lower_bound("separation")


@cache
def small(label):
    "One audit of the grid, of few canaries."
    settings = {entry["label"]: entry for entry in audit_grid(False)}[label]
    size = 4000 if "sample_rate" in settings else 1000 if settings.get("table") else 200
    return audit_settings(settings | {"canaries": size, "steps": min(settings["steps"], 20)})


def apart(found):
    "How many standard errors lie between the mean scores of canaries that were in and of the others."
    inside, outside = found.scores[found.coins], found.scores[~found.coins]
    return (inside.mean() - outside.mean()) / math.sqrt(inside.var(ddof=1) / len(inside) + outside.var(ddof=1) / len(outside))


ALONE = [label for label in (*METHODS, *VARIANTS) if label not in ("two processes", "q = 1/4")]  # those have tests of their own


# a zeroth-order step releases one number, which all canaries share
@pytest.mark.parametrize("label", [label for label in ALONE if label != "ZerothOrder"])
def test_a_method_shows_its_canaries(label):
    found = small(label)
    assert found.claim <= found.epsilon <= 8.0
    assert apart(found) > 3.0  # 8.5 or more is expected, with a standard deviation of 1


def test_no_claim_of_the_family_is_refuted():
    found = [small(label) for label in ALONE]
    assert not any(refuted([one.p_value() for one in found], RARE))
    assert all(one.lower_bound(error=RARE / len(found)) <= one.claim for one in found)
    assert all(one.lower_bound("guesses", RARE / len(found)) <= one.claim for one in found)


def test_what_processes_write_is_what_they_found(monkeypatch):
    settings = next(entry for entry in audit_grid(False) if entry["label"] == "two processes") | {"canaries": 60, "processes": 1}
    monkeypatch.setattr(audits.multiprocessing, "spawn", lambda run, args, count: run(0, *args))
    found, alone = audits.in_processes(settings), audit_settings(settings)
    assert found.claim == alone.claim and np.array_equal(found.coins, alone.coins) and np.array_equal(found.scores, alone.scores)


def test_a_record_of_the_grid():
    entry = audit_entry(next(iter(audit_grid(False))) | {"canaries": 60})
    assert entry["audited"] <= entry["bounds"]["separation"] and entry["claim"] < entry["epsilon"] <= 8 and 0 < entry["p_value"] <= 1


def test_a_false_claim_is_refuted():
    "A p-value is below 1e-6 in one of a million honest runs; a noise three times smaller than claimed lies 8 standard errors beyond that."
    for method, model in ((BiTFiT(), CanaryLayers(600)), (Full(), CanaryTable(4000))):
        found = audit(method, noise_multiplier=1.0, steps=4, model=model, seed=0, **QUICK)
        lied = replace(found, mechanisms=[replace(m, noise_multiplier=3 * m.noise_multiplier) for m in found.mechanisms])
        assert found.p_value() > RARE > lied.p_value() and lied.lower_bound(error=RARE) > lied.claim
    assert lied.p_value("threshold") < RARE


@pytest.mark.parametrize("label, share", [
    ("Full", 0.01), ("BiTFiT", 0.01), ("NormOnly", 0.01), ("LoRA", 0.01), ("Adapter", 0.4)])  # an adapter's random start is in its scores
def test_canaries_own_their_scores(label, share):
    "Without noise to speak of, canaries that were out are hardly moved; their mean strays by six standard errors in 1 of 10^9."
    found = audit(method_to_audit(label)[1](2), noise_multiplier=1e-3, steps=2, canaries=60, seed=0, **QUICK)
    out, inside = found.scores[~found.coins], found.scores[found.coins]
    assert out.std() < share * inside.mean() and abs(out.mean()) < 0.05 * inside.mean() + 6 * out.std() / len(out) ** 0.5


def test_an_unknown_kind_and_a_model_that_is_not_finite():
    scores = np.zeros(60)
    with pytest.raises(ValueError, match="kind='luck'"):
        Audit(scores, scores > 0, 1.0, 1e-6, [SampledGaussian(1.0, 1.0, 1)]).lower_bound("luck")
    model = CanaryLayers(60)
    model.norm.bias.data.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        auditing.canary_losses(model, model.pictures, 60)


# The command ----------------------------------------------------------------------------------------------------------------------


def test_the_command_refuses_a_false_claim(run, monkeypatch):
    honest = auditing.audit
    monkeypatch.setattr(auditing, "audit", lambda *args, **settings: replace(
        honest(*args, **settings), mechanisms=[SampledGaussian(100.0, 1.0, 1)]))
    status, _, err = run("audit", "--method", "full", "--canaries", 600, "--steps", 2, "--accountant", "rdp", "--seed", 0)
    assert status == 1 and err.startswith("dpft: the claim of Full is false") and err.count("\n") == 1


def test_all_methods_by_one_command(run, monkeypatch, tmp_path):
    rarely = {"canaries": 60, "sample_rate": 0.25}   # what is sampled shows far less than it claims, so that none is accused by chance
    small_grid = [settings | rarely for settings in list(audit_grid(True))[:2]]
    experiment = replace(EXPERIMENTS["audits"], full=lambda: small_grid)
    monkeypatch.setitem(EXPERIMENTS, "audits", experiment)
    assert run("run", "audits", "--full", "--output", tmp_path, "--workers", 1)[0] == 0
    records = {record["label"]: record for record in read_records(tmp_path / "audits.jsonl")}    # whichever was done first
    assert {*records} == {"Full", "LastLayer"} and not records["Full"]["reduced"]
    with pytest.raises(ValueError, match="the claim of LastLayer is false"):
        audit_table([records["Full"], records["LastLayer"] | {"p_value": 1e-9}])
