"""Tuning: prices against brute force, noise against its target, searches against their ledger."""

import hashlib
import itertools
import json
import math
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.special import logsumexp

from dpft import tuning
from dpft.baselines import Full, LoRA
from dpft.bitfit import BiTFiT
from dpft.composition import Chain, Then
from dpft.curve import grouped
from dpft.data import Public, TensorData
from dpft.guarantee import Guarantee, verify
from dpft.ledger import Ledger
from dpft.losses import accuracy
from dpft.models import load_model
from dpft.noise import Keystream
from dpft.privacy import BudgetError, Request, SampledGaussian, epsilon, noise_multiplier
from dpft.scores import NoisyAccuracy, apart, noisy_accuracy
from dpft.selection import (
    CHARGES,
    LAWS,
    ORDERS,
    Charge,
    TrialLaw,
    TunedGuarantee,
    least_charge,
    price,
    selected_renyi,
    selection_epsilon,
    trial_leaks,
    trial_noise,
)
from dpft.tasks import load_data
from dpft.tuning import tune

SST2 = SampledGaussian(0.88, 1024 / 67349, 197)
DELTA = 1 / (2 * 67349)
laws = st.sampled_from(sorted(LAWS))


def one_step(sigma, q):
    "Renyi divergences of one step, by Opacus."
    from opacus.accountants.analysis.rdp import compute_rdp
    return np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=ORDERS.tolist()))


def generating(law, x):
    "E x^K in closed form."
    g = law.parameter
    if law.name == "poisson":
        return np.expm1(g * x) / np.expm1(g)
    return np.log1p((g - 1) * x) / np.log(g) if law.name == "logarithmic" else g * x / (1 - (1 - g) * x)


# The number of trials


@given(laws, st.floats(1.01, 60))
@settings(max_examples=40)
def test_the_law_has_its_mean_and_its_slope(name, mean):
    law = TrialLaw(name, mean)
    probabilities, k = np.array([*itertools.islice(law.probabilities(), 119)]), np.arange(1, 120)
    assert law.slope(1.0) == pytest.approx(mean)
    for x in (0.2, 0.6, 0.8):
        assert generating(law, x) == pytest.approx(probabilities @ x**k, abs=1e-9)
        assert law.slope(x) == pytest.approx((generating(law, x + 1e-5) - generating(law, x - 1e-5)) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("name", sorted(LAWS))
def test_numbers_of_trials_follow_the_law(name):
    "Chi-square over 20,000 seeded draws, and the mean within five standard errors: each fails once in a million streams at most."
    law, keystream = TrialLaw(name, 6.0), Keystream(3)
    drawn = [law.draw(int.from_bytes(keystream.key("k", i)[:6], "little") / 2**48) for i in range(20_000)]
    assert min(drawn) >= 1
    expected = np.array([*itertools.islice(law.probabilities(), 15)])
    expected = 20_000 * np.append(expected, 1 - expected.sum())
    counts = Counter(min(k, 16) for k in drawn)
    assert stats.chisquare([counts[k] for k in range(1, 17)], expected).pvalue > 1e-6
    assert abs(np.mean(drawn) - 6) < 5 * np.std(drawn) / math.sqrt(len(drawn))


# The bound


def divergence(p, q, order):
    return logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1)


def best_of(p, law):
    "The exact output distribution of selection, the last output being the best."
    return np.diff(np.append(0.0, generating(law, np.cumsum(p))))


def bound_of(p, q, law):
    "The theorem with everything about one trial computed exactly, in both directions."
    renyi = np.array([max(divergence(p, q, order), divergence(q, p, order)) for order in ORDERS])
    small = np.exp(np.log1p(1 / (ORDERS - 1)))[:, None]
    leaks = np.maximum(np.maximum(q - small * p, 0).sum(1), np.maximum(p - small * q, 0).sum(1))
    return selected_renyi(renyi, law, leaks)


weights = st.lists(st.floats(0.02, 1.0), min_size=4, max_size=4).map(lambda values: np.array(values) / sum(values))


@given(weights, weights, laws, st.floats(1.2, 12))
@settings(max_examples=40)
def test_the_bound_covers_selection_exactly_computed(p, q, name, mean):
    law = TrialLaw(name, mean)
    bound, first, second = bound_of(p, q, law), best_of(p, law), best_of(q, law)
    for place in range(0, len(ORDERS), 8):
        exact = max(divergence(first, second, ORDERS[place]), divergence(second, first, ORDERS[place]))
        assert exact <= bound[place] + 1e-6


@pytest.mark.parametrize("name", sorted(LAWS))
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_the_bound_covers_selection_among_gaussians(name, sigma):
    "One output is a normal number, the largest is published: densities f'(Phi) phi, divergence by numerical integration."
    law = TrialLaw(name, 10.0)
    renyi = ORDERS / (2 * sigma**2)
    small, mu = np.log1p(1 / (ORDERS - 1)), 1 / sigma
    leaks = stats.norm.cdf(mu / 2 - small / mu) - np.exp(small) * stats.norm.cdf(-mu / 2 - small / mu)
    bound = selected_renyi(renyi, law, leaks)

    def density(x, mean):
        return law.slope(stats.norm.cdf(x, mean, sigma)) * stats.norm.pdf(x, mean, sigma)

    def moment(x, order, first, second):
        return density(x, first) ** order * density(x, second) ** (1 - order)
    for order in (2.0, 4.0):
        for pair in ((0.0, 1.0), (1.0, 0.0)):
            whole = integrate.quad(moment, -8 * sigma, 8 * sigma, args=(order, *pair), limit=400)[0]
            assert math.log(whole) / (order - 1) <= bound[np.argmin(abs(ORDERS - order))] + 1e-6


@pytest.mark.parametrize("name", ["geometric", "logarithmic"])
@pytest.mark.parametrize("mean", [2.0, 16.0, 100.0])
def test_the_bound_is_that_of_an_independent_implementation(name, mean):
    dp = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    renyi = 197 * one_step(0.88, 1024 / 67349)
    theirs = np.asarray(dp._compute_rdp_repeat_and_select(ORDERS, renyi, mean, LAWS[name]))
    ours = np.minimum.accumulate(selected_renyi(renyi, TrialLaw(name, mean))[::-1])[::-1] # theirs uses that divergences grow with the order
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_leaks_cover_the_gaussian_mechanism(accountant, sigma):
    small, mu = np.log1p(1 / (ORDERS - 1)), 1 / sigma
    exact = stats.norm.cdf(mu / 2 - small / mu) - np.exp(small) * stats.norm.cdf(-mu / 2 - small / mu)
    found = trial_leaks(((sigma, 1.0, 1),), accountant)
    assert (found >= exact - 1e-12).all() and (found <= 1).all()
    assert accountant == "rdp" or np.allclose(found, exact, atol=1e-3)


def test_leaks_of_a_sampled_mechanism_are_those_of_an_independent_accountant():
    "Of removing and adding a unit the worse, at every order."
    dp, pld = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.0)), 3)
    found = trial_leaks(((1.0, 0.2, 3),), "prv")
    for place in range(5, len(ORDERS), 20):
        assert found[place] == pytest.approx(accountant.get_delta(math.log1p(1 / (ORDERS[place] - 1))), abs=2e-3)


# The price


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_composition_is_one_run_of_all_steps(accountant):
    both = price(SST2, DELTA, 5, "logarithmic", accountant)
    assert both.composition == epsilon(SampledGaussian(0.88, 1024 / 67349, 5 * 197), DELTA, accountant)
    assert price(SST2, DELTA, 5, "logarithmic", accountant, different=3).composition < both.composition
    assert both.cheaper == ("composition" if both.composition <= both.selection else "selection")


@given(laws, st.floats(2, 40), st.floats(0.7, 5), st.integers(1, 300))
@settings(max_examples=30)
def test_selection_costs_more_than_one_trial_and_grows(name, mean, sigma, steps):
    one = SampledGaussian(sigma, 0.01, steps)
    value = selection_epsilon(one, 1e-5, TrialLaw(name, mean), "rdp")
    assert value >= selection_epsilon(one, 1e-5, TrialLaw(name, 1 + (mean - 1) / 2), "rdp") - 1e-9
    assert value <= selection_epsilon(SampledGaussian(sigma, 0.01, steps + 10), 1e-5, TrialLaw(name, mean), "rdp") + 1e-9
    assert value <= selection_epsilon(one, 1e-6, TrialLaw(name, mean), "rdp")
    orders = ORDERS
    alone = steps * one_step(sigma, 0.01) - (math.log(1e-5) + np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
    assert value >= max(0, alone.min())


@pytest.mark.parametrize("way, law, accountant", [
    ("composition", "poisson", "rdp"), ("none", "poisson", "rdp"), ("selection", "poisson", "rdp"), ("selection", "geometric", "rdp"),
    ("selection", "logarithmic", "prv"), ("selection", "poisson", "prv")])
def test_the_solved_noise_meets_the_target_and_less_does_not(way, law, accountant):
    sigma = trial_noise(2.0, DELTA, 1024 / 67349, 50, 8, way, law, accountant)

    def cost(value):
        one = SampledGaussian(value, 1024 / 67349, 50)
        both = price(one, DELTA, 8, law, accountant)
        return epsilon(one, DELTA, accountant) if way == "none" else getattr(both, way)
    assert cost(sigma) <= 2.0 < cost(sigma - 2e-3)


def test_the_charge_takes_the_smaller_noise():
    ways = [least_charge(1.0, 1e-4, 0.1, 20, 12, 12, way, "geometric", "rdp") for way in CHARGES]
    assert ways[0].noise_multiplier == min(ways[1].noise_multiplier, ways[2].noise_multiplier) and ways[0].way == "selection"
    few = least_charge(1.0, 1e-4, 0.1, 20, 12, 1, "cheapest", "geometric", "rdp")
    assert few.way == "composition" and few.trials == 1 and few.noise_multiplier == pytest.approx(ways[3].noise_multiplier)
    with pytest.raises(BudgetError, match="cannot be met by a selection"):
        least_charge(0.02, 1e-5, 0.1, 20, 16, 16, "selection", "geometric", "prv")


# Scores


def test_noisy_accuracy_is_accuracy_plus_normal_noise():
    model = torch.nn.Linear(2, 2)
    rows = [(torch.eye(2)[i % 2], 0) for i in range(50)]
    count = accuracy(model, rows) * 50
    keystream = Keystream(5)
    values = [noisy_accuracy(model, rows, 3.0, keystream, "score") for _ in range(400)]      # each is drawn anew
    assert stats.kstest([(50 * value - count) / 3 for value in values], "norm").pvalue > 1e-6
    assert noisy_accuracy(model, rows, 3.0, Keystream(), 0) != noisy_accuracy(model, rows, 3.0, Keystream(), 0)


# Searches


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", limit=300)


def search(digits, charge="composition", score=None, choices=None, method=None, model="mlp", **changes):
    arguments = {"epsilon": 4.0, "trials": 3, "charge": charge, "law": "geometric", "steps": 2, "batch_size": 60, "accountant": "rdp",
                 "seed": 1, "progress": False, "clip": 1.0} | changes
    score = NoisyAccuracy(digits.dev) if score is None else score
    return tune(model, digits, method or BiTFiT(), choices or {"learning_rate": [1e-4, 1e-1, 1e-2]}, score, **arguments)


def test_composition_charges_every_trial(digits, tmp_path):
    found = search(digits, ledger=tmp_path / "l.sqlite", seed=None)
    assert len(found.trials) == 3 and sorted(trial.settings["learning_rate"] for trial in found.trials) == [1e-4, 1e-2, 1e-1]
    assert found.score == max(trial.score for trial in found.trials) and {"settings": found.best, "score": found.score} in \
        [vars(trial) for trial in found.trials]
    sigma = found.charge.noise_multiplier
    assert found.guarantee.mechanisms == [SampledGaussian(sigma, 60 / 300, 6)] and found.run.guarantee is found.guarantee
    assert sigma == pytest.approx(noise_multiplier(4.0, 1 / 600, 0.2, 6, accountant="rdp"))
    assert 3.9 < found.run.epsilon <= 4 and found.run.epsilon == pytest.approx(found.price.composition)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert len(ledger.runs()) == 3 and all(ledger.finished(run) for run in ledger.runs())
        assert epsilon(ledger.charged(), 1 / 600, "rdp") == pytest.approx(found.run.epsilon)
        assert ledger.epsilon(1 / 600) > found.run.epsilon  # the ledger does not know that they were planned together
    assert found.score_guarantee.mechanisms[0].steps == 3 and 3.8 < found.score_guarantee.epsilon() <= 4
    assert "the size of the private development set, 360" in found.guarantee.assumed_public
    assert found.guarantee.uncharged == ["that the start-up check of a batch passed"]
    assert "3 trials" in found.report() and "private development set" in found.report()


def test_selection_publishes_the_best_and_keeps_the_rest(digits, tmp_path):
    found = search(digits, "selection", trials=4, ledger=tmp_path / "l.sqlite")
    assert [trial.settings for trial in found.trials] == [found.best]
    assert isinstance(found.guarantee, TunedGuarantee) and found.guarantee.law == TrialLaw("geometric", 4.0)
    one = SampledGaussian(found.charge.noise_multiplier, 0.2, 2)
    assert found.guarantee.mechanisms == [one] and 3.9 < found.run.epsilon <= 4 and found.run.epsilon == found.price.selection
    assert found.run.epsilon == selection_epsilon(one, 1 / 600, TrialLaw("geometric", 4.0), "rdp")
    keystream = Keystream(1)
    count = TrialLaw("geometric", 4.0).draw(int.from_bytes(keystream.key("number of trials")[:6], "little") / 2**48)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert len(ledger.runs()) == count and epsilon(ledger.charged(), 1 / 600, "rdp") >= epsilon(one, 1 / 600, "rdp")
    assert isinstance(found.score_guarantee, TunedGuarantee) and 3.8 < found.score_guarantee.epsilon() <= 4
    assert f"{count} trials" not in found.report() and "random number of trials" in found.run.report()


@pytest.mark.parametrize("progress", [False, True])
def test_under_selection_nothing_tells_how_many_trials_there_were_or_which_won(digits, tmp_path, monkeypatch, capsys, progress):
    "The same winner after one trial and after six: all that is shown and saved is the same, byte for byte."
    def warned(tuned):
        warnings.warn(f"score {len(seen)}", stacklevel=1)
        seen.append(tuned)
        return -len(seen)
    outputs = []
    for count in (1, 6):
        seen = []
        monkeypatch.setattr(TrialLaw, "draw", lambda law, uniform, count=count: count)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = search(digits, "selection", score=warned, choices={"learning_rate": [0.1]}, seed=3, progress=progress)
        assert len(seen) == count
        found.run.save(tmp_path / str(count))
        files = {path.name: path.read_bytes() for path in sorted((tmp_path / str(count)).iterdir()) if path.name != "ledger.sqlite"}
        claim = json.loads(files.pop("guarantee.json"))
        claim["ledger_head"] = ""                                        # a digest of what is fresh in each run
        assert claim["files"].pop("README.md") == hashlib.sha256(files["README.md"]).hexdigest()     # the run's name stands in it
        assert claim["files"].keys() == files.keys() - {"README.md"}
        text = json.dumps(claim).replace(found.guarantee.run, "run")
        said = capsys.readouterr()
        outputs.append((files.keys(), files["README.md"].decode().replace(found.guarantee.run, "run"), text, said.out, said.err,
                        [str(one.message) for one in heard], found.report().replace(found.guarantee.run, "run"),
                        found.trials, found.charge, found.price, files["dpft.safetensors"]))
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(not hasattr(Ledger, "publish"), reason="the ledger publishes whole files")
def test_the_saved_ledger_holds_one_trial_only(digits, tmp_path):
    for seed in range(100):                                      # the number of trials is drawn, and one trial shows nothing
        found = search(digits, "selection", trials=6, ledger=(own := tmp_path / f"{seed}.sqlite"), seed=seed)
        with Ledger(own) as whole:
            if len(whole.runs()) > 1:
                break
    found.run.save(tmp_path / "model")
    with Ledger(own) as whole, Ledger(tmp_path / "model" / "ledger.sqlite", read_only=True) as published:
        assert published.runs() == [found.guarantee.run] and len(whole.runs()) > 1
    raw = (tmp_path / "model" / "ledger.sqlite").read_bytes()
    assert not any(run.encode() in raw for run in set(Ledger(own).runs()) - {found.guarantee.run})


def test_what_nobody_paid_for_is_named(digits):
    found = search(digits, "none", score=lambda model: 0.0)
    assert found.guarantee.mechanisms == [SampledGaussian(found.charge.noise_multiplier, 0.2, 2)]
    said = " ".join(found.guarantee.uncharged)
    for text in ("the choice of settings among 3 trials", f"epsilon {found.price.composition:.2f}", "by a function of the user's"):
        assert text in said
    public = search(digits, score=Public(digits.dev, "elsewhere"))
    assert public.guarantee.uncharged == ["that the start-up check of a batch passed"]
    assert any("(elsewhere)" in fact for fact in public.guarantee.assumed_public)
    plain = search(digits, score=digits.dev).guarantee.uncharged
    assert "the scores that chose among the trials, on examples, unless they are public" in plain


def test_a_search_trains_copies_and_repeats_under_its_seed(digits):
    model, seen = load_model("mlp", 10, "image", digits.image_shape), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = search(digits, model=model, score=lambda tuned: seen.append(tuned) or (math.nan if len(seen) == 1 else -len(seen)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.run.model is seen[1] and len({id(tuned) for tuned in seen}) == 3
    first, again, other = (search(digits, seed=seed).trials for seed in (1, 1, None))
    assert first == again != other


def test_selection_draws_its_settings_uniformly_and_composition_tries_each_once():
    keystream = Keystream(7)
    order = tuning.trial_order(keystream, 8, Charge("selection", 400, 1.0, TrialLaw("poisson", 400.0)))
    assert 300 < len(order) < 500 and stats.chisquare(np.bincount(order, minlength=8)).pvalue > 1e-6  # 400 expected, deviation 20
    assert sorted(tuning.trial_order(keystream, 8, Charge("composition", 8, 1.0, None))) == list(range(8))
    assert len(set(tuning.trial_order(keystream, 8, Charge("composition", 3, 1.0, None)))) == 3


def test_a_function_may_propose_in_the_light_of_earlier_trials(digits):
    def next_rate(done):
        return {"learning_rate": 0.1 / 2 ** len(done)}
    found = search(digits, choices=next_rate)
    assert [trial.settings["learning_rate"] for trial in found.trials] == [0.1, 0.05, 0.025]
    assert found.guarantee.mechanisms[0].steps == 6


def test_a_search_may_protect_people(digits):
    people = [row // 3 for row in range(300)]
    score = NoisyAccuracy(digits.dev, unit=[100 + row // 4 for row in range(len(digits.dev))])
    found = search(digits, unit=people, batch_size=20, charge="composition", choices={"learning_rate": [0.1, 0.2]}, trials=2, score=score)
    assert found.guarantee.unit == "unit" and found.guarantee.mechanisms[0].sample_rate == 0.2
    assert any("number of units, 100" in fact for fact in found.guarantee.assumed_public)
    assert found.score_guarantee.unit == "unit of the development set" and "more than 4" in found.score_guarantee.assumed_public[1]


@pytest.mark.parametrize("dev, message", [
    (None, "must name each row's person"),
    ([99] * 360, "360 of the 360 scored rows belong to people who are trained on too, the first is row 0"),
    ([None] + [200] * 359, "row 0 names no person"), ([math.nan] + [200] * 359, "row 0 names no person"),
    ([200] * 3, "names 3 rows")])
def test_nobody_is_trained_on_and_scored(digits, dev, message):
    people = [row // 3 for row in range(300)]
    with pytest.raises(ValueError, match=message):
        search(digits, unit=people, batch_size=20, score=NoisyAccuracy(digits.dev, unit=dev))


def test_nobody_is_trained_on_as_a_row_and_scored_as_a_person():
    rows = [{"text": f"row {row}", "label": row % 2, "who": f"p{row // 2}"} for row in range(20)]
    assert apart(NoisyAccuracy(rows[12:]), rows[:12], "who").most == 2
    for people, unit in ((None, "who"), ("who", None), ("who", "example")):
        with pytest.raises(ValueError, match="2 of the 10 scored rows belong to people who are trained on too") as refused:
            apart(NoisyAccuracy(rows[10:], unit=people), rows[:12], unit)
        assert "p5" not in str(refused.value)                            # no name is told


class Greedy(BiTFiT):
    def requests(self, context):
        return [Request(0.5, 1, 0.1, "greedy")]


@pytest.mark.parametrize("changes, message", [
    ({"trials": 1}, "trials=1"), ({"charge": "free"}, "charge='free'"), ({"law": "uniform", "charge": "selection"}, "law='uniform'"),
    ({"choices": {"batch_size": [8, 16]}}, "dpft plan"), ({"choices": {"learning_rte": [1]}}, "did you mean learning_rate"),
    ({"choices": {"learning_rate": 0.1}}, "must be lists"), ({"choices": {"learning_rate": []}}, "nothing to try"),
    ({"choices": [{}]}, "nothing to try"), ({"choices": {"seed": [1, 2]}}, "belongs to the search"),
    ({"callbacks": []}, "'callbacks' cannot differ"), ({"evaluate_every": 1}, "'evaluate_every'"),
    ({"output": "folder"}, "'output'"), ({"choices": [{"callbacks": []}]}, "'callbacks' cannot differ"),
    ({"checkpoint": "folder"}, "'checkpoint'"), ({"noise_multiplier": 1.0}, "'noise_multiplier'"), ({"clipp": 1.0}, "did you mean clip"),
    ({"unit": "person"}, "no column 'person'"), ({"choices": lambda done: {}, "charge": "selection"}, "depend on each other"),
    ({"choices": {"method": [Greedy()]}}, "Greedy may spend"), ({"choices": {"method": [Chain(LoRA(), Greedy())]}}, "Chain may spend"),
    ({"choices": {"method": [Then(Full(), None, Greedy(), steps=1)]}}, "Then may spend"),
    ({"epsilon": 0.0}, "epsilon=0"), ({"epsilon": 0.01, "delta": 1e-9, "accountant": "rdp"}, "cannot be met"),
    ({"score": Public([], "elsewhere")}, "there are no rows"),
    ({"batch_size": 301}, "batch_size=301"), ({"delta": 0.5}, "below 1/300"), ({"clip": -1.0}, "clip=-1"),
])
def test_bad_searches_are_refused_before_anything_is_spent(digits, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        search(digits, **({"ledger": tmp_path / "l.sqlite"} | changes))
    assert not (tmp_path / "l.sqlite").exists() or not Ledger(tmp_path / "l.sqlite").runs()


@pytest.mark.parametrize("mark", [lambda data: Public(data, "elsewhere"), NoisyAccuracy])
def test_scores_on_training_rows_are_refused(digits, mark):
    overlap = TensorData(digits.train.images[:3], digits.train.labels[:3], digits.train.scale)
    with pytest.raises(ValueError, match="3 of the 3 rows"):
        search(digits, score=mark(overlap))
    with pytest.raises(ValueError, match="no rows"):
        NoisyAccuracy([])


# The guarantee


def tuned(**changes):
    fields = {"target_delta": 1e-5, "accountant": "rdp", "law": TrialLaw("geometric", 8.0)}
    return TunedGuarantee([SampledGaussian(1.2, 0.01, 100)], **(fields | changes))


def test_a_tuned_guarantee_is_worse_than_its_trial_in_every_reading():
    whole, one = tuned(), Guarantee([SampledGaussian(1.2, 0.01, 100)], target_delta=1e-5, accountant="rdp")
    assert whole.epsilon() > one.epsilon() and whole.epsilon(1e-6) > whole.epsilon()
    assert all(one.tpr(fpr) < whole.tpr(fpr) <= 1 for fpr in (1e-3, 0.01, 0.1))
    assert whole.replace_epsilon() >= 2 * whole.epsilon() and whole.epsilon(group=3) > whole.epsilon(group=2)
    assert math.isinf(whole.epsilon(group=500)) and math.isinf(tuned(private=False).epsilon())
    for bad in (lambda: whole.epsilon(group=0), lambda: whole.epsilon(2.0)):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(BudgetError, match="no composed privacy curve"):
        whole._curve("remove")


@given(st.floats(0.1, 2), st.integers(2, 6))
def test_groups_of_a_pure_guarantee(value, group):
    "A curve that is flat in delta is pure differential privacy, where a group costs exactly its size."
    assert grouped(lambda delta: value, 1e-5, group) == pytest.approx(group * value)


@given(st.floats(0.05, 1), st.integers(2, 4))
def test_groups_of_a_curve_meet_the_delta_of_the_lemma(scale, group):
    value = grouped(lambda delta: scale * math.sqrt(2 * math.log(1 / delta)), 1e-5, group) / group
    whole = math.exp(-((value / scale) ** 2) / 2) * sum(math.exp(k * value) for k in range(group))
    assert 0.99e-5 < whole <= 1.000001e-5


def test_a_tuned_guarantee_is_saved_and_never_read_as_a_plain_one(tmp_path):
    tuned().save(tmp_path / "guarantee.json")
    assert TunedGuarantee.load(tmp_path / "guarantee.json") == tuned()
    report = tuned().report()
    assert "best of a random number of trials" in report and "geometric distribution, 8 expected" in report
    with pytest.raises(ValueError):
        verify(tmp_path / "guarantee.json", tmp_path / "no.sqlite")


# The command


@pytest.mark.parametrize("charge", ["composition", "selection"])
def test_a_tuned_run_is_saved_and_verified(digits, tmp_path, charge):
    found = search(digits, charge, trials=2 if charge == "composition" else 3, ledger=tmp_path / "l.sqlite",
                   choices={"learning_rate": [0.1, 0.2]})
    found.run.save(tmp_path / "model")
    said = verify(tmp_path / "model")
    assert any("sealed in the ledger" in line and "never" not in line for line in said)
    assert Guarantee.load(tmp_path / "model" / "guarantee.json") == found.guarantee == found.run.guarantee
    content = json.loads((tmp_path / "model" / "guarantee.json").read_text())
    content["mechanisms"][0]["steps"] -= 1
    (tmp_path / "model" / "guarantee.json").write_text(json.dumps(content))
    with pytest.raises(ValueError):
        verify(tmp_path / "model")
