"""Attacks against oracles, on scores whose law is known, on models that learnt by heart, and on what they must refuse."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpft.book import attacks
from dpft.book.attacks import MASK
from dpft.book.evidence import attacks as attack_runs
from dpft.book.evidence.language import END, Recipe, blank_gpt2, train_tokenizer
from dpft.data import Public, TableData, Task, TensorData
from dpft.guarantee import Guarantee
from dpft.lower_bounds import Rate
from dpft.models import load_model, load_tokenizer, pretrain
from dpft.privacy import SampledGaussian
from dpft.selection import TrialLaw, TunedGuarantee

NAMES = attacks.made_names(32)
TEXTS = [f"{END}Near the {place} ask for {MASK}.{END}" for place in ("inn", "bar", "mill", "dock")]
RECIPE = Recipe(layers=1, width=32, heads=2, vocabulary=320, context=48, batch_size=4, learning_rate=1e-2)


@pytest.fixture(scope="module")
def told():
    """A tokenizer, a language model, and the same after it has learnt four sentences by heart."""
    tokenizer = train_tokenizer([*NAMES, *TEXTS], RECIPE)
    before = blank_gpt2(RECIPE, tokenizer)
    rows = attacks.as_written([text.replace(MASK, name) for text, name in zip(TEXTS, NAMES, strict=False)], tokenizer)
    return tokenizer, before, pretrain(copy.deepcopy(before), Public(rows, "made here"), epochs=80, learning_rate=1e-2, batch_size=4)


# Scores

scores = st.lists(st.integers(0, 6), min_size=2, max_size=12).map(lambda values: np.array(values, dtype=float))


@given(scores, scores)
def test_an_auc_is_the_share_of_pairs_in_order_and_its_error_that_of_the_placements(inside, outside):
    found = attacks.score_attack(inside, outside)
    pairs = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
    assert found.auc == pytest.approx(pairs.mean())
    variance = pairs.mean(1).var(ddof=1) / len(inside) + pairs.mean(0).var(ddof=1) / len(outside)
    assert found.standard_error == pytest.approx(math.sqrt(variance))


def test_the_stated_error_is_the_spread():
    generator = np.random.default_rng(0)
    found = [attacks.score_attack(generator.normal(1, 1, 50), generator.normal(0, 1, 40)) for _ in range(600)]
    assert np.mean([its.standard_error for its in found]) == pytest.approx(np.std([its.auc for its in found]), rel=0.18)  # 6 / sqrt(1200)
    assert np.mean([its.auc for its in found]) == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.013)  # six standard errors


@pytest.mark.parametrize("inside, outside, said", [
    ([], [1.0, 2.0], "0 of the 0 scores of members"), ([1.0, 2.0], [1.0, math.nan], "1 of the 2 scores of non-members")])
def test_scores_that_say_nothing_are_refused(inside, outside, said):
    with pytest.raises(ValueError, match=said):
        attacks.score_attack(np.array(inside), np.array(outside))


# Membership

def pictures(rows):
    data = TensorData(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10)
    return data.subset(rows)


def test_what_was_learnt_by_heart_is_found_and_the_model_is_left_as_it_was():
    before = load_model("mlp", 10, "image", (1, 8, 8))
    model = pretrain(copy.deepcopy(before), Public(pictures(range(20)), "made here"), epochs=60, learning_rate=1e-2, batch_size=10).train()
    known = [attacks.membership_inference(model, pictures(range(20)), pictures(range(20, 40)), reference=its) for its in (None, before)]
    assert min(its.auc for its in known) > 0.95 and model.training
    blank = attacks.membership_inference(before, pictures(range(20)), pictures(range(20, 40)), reference=before)
    assert blank.auc == 0.5 and blank.true_positives[0.01].hits == 0


def test_shared_rows_and_empty_sets_are_refused():
    model = load_model("mlp", 10, "image", (1, 8, 8))
    with pytest.raises(ValueError, match="2 of the members are non-members too, the first is row 3"):
        attacks.membership_inference(model, pictures(range(5)), pictures(range(3, 9)))
    with pytest.raises(ValueError, match="0 members and 5 non-members"):
        attacks.membership_inference(model, pictures([]), pictures(range(5)))


# LiRA

def test_likelihood_ratios_are_those_of_the_fitted_normal_laws():
    generator = np.random.default_rng(1)
    shadows, coins, target = generator.normal(size=(8, 30)), attacks.fair_coins(8, 30), generator.normal(size=30)
    laws = []
    for chosen in (coins, ~coins):
        centre = np.array([shadows[chosen[:, row], row].mean() for row in range(30)])
        squares = sum(((shadows[chosen[:, row], row] - centre[row]) ** 2).sum() for row in range(30))
        laws.append(stats.norm(centre, math.sqrt(squares / (chosen.sum() - 30))))
    assert np.allclose(attacks.likelihood_ratios(target, shadows, coins), laws[0].logpdf(target) - laws[1].logpdf(target))
    offline = attacks.likelihood_ratios(target, shadows, coins, online=False)
    assert np.allclose(offline, (target - laws[1].mean()) / laws[1].std())


def test_lira_finds_what_a_loss_hides_and_nothing_where_there_is_nothing():
    generator = np.random.default_rng(2)
    coins = attacks.fair_coins(32, 200)
    confidences = generator.normal(0, 3, 200) + generator.normal(size=(32, 200))
    for online in (True, False):
        assert attacks.lira(confidences + coins, coins, online).auc == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.09)
        nothing = attacks.lira(confidences, coins, online)
        assert abs(nothing.auc - 0.5) < 6 * nothing.standard_error < 0.12
    # 0.59 is expected; six standard errors of about 0.016, as above
    assert attacks.score_attack((confidences + coins)[coins], (confidences + coins)[~coins]).auc < 0.69


def test_the_scaled_confidence_is_the_logit():
    p = np.array([0.001, 0.5, 0.9])
    assert np.allclose(attacks.scaled_confidence(-np.log(p)), np.log(p / (1 - p)))
    assert np.isfinite(attacks.scaled_confidence(np.array([0.0, 800.0]))).all()


# Names

def test_made_names_are_distinct_and_the_same_for_the_same_seed():
    assert len(set(attacks.made_names(3000))) == 3000 and attacks.made_names(20)[:5] == attacks.made_names(5) != attacks.made_names(5, 1)


def test_taggers():
    text = f"Ask {NAMES[0]} or {NAMES[1]}s at Blue Spice."
    assert attacks.one_of(NAMES)(text) == {NAMES[0]} and attacks.capitalised(text) >= {NAMES[1] + "s", "Blue Spice"}
    signed = attacks.one_of([*NAMES, "Ada King Jr.", "'t Hooft"])
    assert signed(f"Ask Ada King Jr. or 't Hooft or {NAMES[0]}.") == {"Ada King Jr.", "'t Hooft", NAMES[0]}


# Language models

def test_extraction_counts(monkeypatch):
    said = [f"{NAMES[0]} and {NAMES[1]}", f"{NAMES[0]}, {NAMES[5]}", NAMES[9]]
    monkeypatch.setattr(attacks, "sampled_texts", lambda *_: said)
    found = attacks.extraction(None, None, NAMES[:5], tagger=attacks.one_of(NAMES))
    assert (found.precision, found.recall) == (Rate(2, 4), Rate(2, 5)) and found.said == sorted([NAMES[0], NAMES[1], NAMES[5], NAMES[9]])
    found = attacks.extraction(None, None, NAMES[:5], tagger=attacks.one_of(NAMES), known=[NAMES[0], NAMES[9]])
    assert (found.precision, found.recall) == (Rate(1, 2), Rate(1, 4))   # what it said before does not count


def test_samples_are_the_seeds_and_of_one_token_greedy(told):
    tokenizer, _, model = told
    state = torch.get_rng_state()
    once, again, other = (attacks.sampled_texts(model, tokenizer, 6, length=20, seed=seed, batch_size=4) for seed in (1, 1, 2))
    assert once == again != other and len(once) == 6 and torch.equal(state, torch.get_rng_state())
    ids = tokenizer("Near", add_special_tokens=False, return_tensors="pt")["input_ids"]
    for _ in range(10):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert attacks.sampled_texts(model, tokenizer, 1, k=1, length=10, prompt="Near") == ["".join(tokenizer.decode(ids[0]))[len("Near"):]]
    long = attacks.sampled_texts(model, tokenizer, 1, length=47, seed=0)[0]
    assert len(tokenizer(long)["input_ids"]) > 30                        # the end of a text does not end the sample


def test_a_parrot_tells_its_secrets_and_a_blank_model_does_not(told):
    tokenizer, before, parrot = told
    bits = attacks.exposure(parrot, tokenizer, TEXTS, NAMES[:4], NAMES)
    assert bits.min() > 3 and attacks.reconstruction(parrot, tokenizer, TEXTS, NAMES, NAMES[:4]).hits >= 3
    assert attacks.exposure(before, tokenizer, TEXTS, NAMES[:4], NAMES).mean() < bits.mean()
    found = attacks.extraction(parrot, tokenizer, NAMES[:4], samples=20, length=24, seed=0)
    assert found.recall.hits >= 3 and found.precision.hits == found.recall.hits


def test_a_text_is_scored_as_the_model_does(told):
    tokenizer, _, model = told
    rows = attacks.as_written([text.replace(MASK, NAMES[2]) for text in TEXTS[:2]], tokenizer)
    whole, each = (attacks.losses(model, rows, loss_fn, batch_size=1) for loss_fn in (attacks.summed_losses, attacks.example_losses))
    ids = tokenizer(TEXTS[1].replace(MASK, NAMES[2]), return_tensors="pt")["input_ids"]
    loss = model(ids, labels=ids).loss.item()
    assert each[1] == pytest.approx(loss, rel=1e-4) and whole[1] == pytest.approx(loss * (ids.shape[1] - 1), rel=1e-4)


def test_ranks_have_ties_against_the_attacker_and_a_long_name_is_reconstructed(monkeypatch):
    monkeypatch.setattr(attacks, "as_written", lambda *_: None)

    def ranked(*values, each=None):
        monkeypatch.setattr(attacks, "losses", lambda model, rows, loss_fn, size: np.array(
            each if each is not None and loss_fn is attacks.example_losses else values))
        names = NAMES[:len(values)]
        return (attacks.exposure(None, None, TEXTS[:1], NAMES[:1], names).tolist(),
                attacks.reconstruction(None, None, TEXTS[:1], names, NAMES[:1]))
    assert ranked(*[1.0] * 8) == ([0.0], Rate(0, 1)) and ranked(3.0, 1, 2, 4, 5, 6, 7, 8) == ([math.log2(8 / 3)], Rate(0, 1))
    assert ranked(9.0, 2.0, each=[0.9, 1.0]) == ([0.0], Rate(1, 1))       # of ten tokens, and of two


@pytest.mark.parametrize("texts, candidates, answers", [
    (TEXTS[:1], NAMES[1:], NAMES[:1]), (["none"], NAMES, NAMES[:1]), ([MASK * 2], NAMES, NAMES[:1]),
    (TEXTS[:1], [NAMES[0]] * 2, NAMES[:1])])
def test_what_cannot_be_ranked_is_refused(told, texts, candidates, answers):
    for attack in (lambda: attacks.exposure(told[2], told[0], texts, answers, candidates),
                   lambda: attacks.reconstruction(told[2], told[0], texts, candidates, answers)):
        with pytest.raises(ValueError, match="no candidate comes twice"):
            attack()


# What the guarantee allows

def one_step(sigma):
    return Guarantee([SampledGaussian(sigma, 1.0, 1)], target_delta=1e-5, accountant="rdp")


@pytest.mark.parametrize("sigma", [0.7, 3.0])
def test_a_gaussian_step_allows_what_its_closed_form_says(sigma):
    assert attacks.allowed(one_step(sigma)) == pytest.approx(
        {"auc": stats.norm.cdf(1 / sigma), "tpr": stats.norm.cdf(stats.norm.ppf(0.01) + 1 / sigma)}, abs=2e-3)
    assert attacks.allowed(Guarantee([], target_delta=1e-5)) == {"auc": 1.0, "tpr": 1.0}


def test_what_is_allowed_is_that_of_all_that_the_guarantee_answers_for():
    plan = [SampledGaussian(2.0, 0.05, 50)]
    whole, stopped = (Guarantee([replace(plan[0], steps=steps)], target_delta=1e-5, planned=plan) for steps in (50, 10))
    tuned = TunedGuarantee(plan, target_delta=1e-5, law=TrialLaw("poisson", 16.0))
    bound = attacks.allowed(whole)["auc"]
    assert attacks.allowed(stopped) == attacks.allowed(whole)
    assert bound < (auc := attacks.allowed(tuned)["auc"]) < 1
    # a pair allows no more than it says: an attack that is right in a share of two neighbours
    assert all(2 * auc - 1 <= (math.exp(e) - 1 + 2 * d) / (math.exp(e) + 1) + 1e-12
               for d in (1e-5, 1e-3, 0.1) for e in [tuned.replace_epsilon(d)])


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1e3])
def test_no_exposure_exceeds_what_is_allowed(sigma):
    generator = np.random.default_rng(0)
    marks = generator.normal(size=(20_000, 16))                          # the secret's mark is moved by its row, the others' are noise
    ranks = 1 + (marks[:, 1:] > marks[:, :1] + 1 / sigma).sum(1)
    bound = attacks.allowed_exposure(one_step(sigma), 16)
    assert bound * 0.70 < np.log2(16 / ranks).mean() < bound + 0.05   # a standard error is below 0.009
    assert attacks.allowed_exposure(Guarantee([], target_delta=1e-5), 16) == 4.0


# The experiment

def test_a_language_model_is_attacked_and_the_record_says_how_it_went(told, tmp_path, monkeypatch):
    tokenizer, before, _ = told
    before.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    table = TableData({"mr": [f"bar {row}" for row in range(40)], "ref": [f"Near {row}." for row in range(40)]})
    monkeypatch.setattr(attack_runs, "load_data", lambda name: Task(name, "causal", table, table, columns=("mr", "ref")))
    settings = {**attack_runs.larger_attack_grid()[0], "method": "Full", "physical_batch_size": 64, "rows": 30, "canaries": 3,
                "candidates": 8, "samples": 2, "steps": 2, "batch_size": 8}
    monkeypatch.setattr(attack_runs, "study_model", lambda settings: str(tmp_path))
    monkeypatch.setattr(attack_runs, "extraction", lambda *given, **own: attacks.Extraction([], Rate(0, 0), Rate(0, 3)))
    entry = attack_runs.attack_entry({**settings, "target_epsilon": 8.0, "data": "pairs"})
    assert len(entry["exposure"]) == 3 and entry["epsilon"] <= 8 and entry["reconstruction"]["trials"] == 3
    assert 0.5 < entry["allowed"]["auc"] < 1 and set(entry["membership"]["true_positives"]) == {"0.001", "0.01"}
    known = attack_runs.planted(str(tmp_path), "pairs", 30, 3, 8, settings["seed"])
    assert len(known.members) + len(known.non_members) == 30 and len(known.train) == len(known.members) + 3
    text = known.masked_texts[0].replace(MASK, known.secrets[0])
    planted = known.train[len(known.train) - 3]["input_ids"]
    assert attacks.as_written([text], load_tokenizer(str(tmp_path)))[0]["input_ids"].tolist() == planted.tolist()
    attack_runs.planted.cache_clear()


def test_pictures_are_attacked_and_membership_shows_without_privacy(monkeypatch):
    monkeypatch.setattr(attack_runs, "load_data", lambda name, limit: Task(
        name, "image", TensorData(torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 10), None,
        classes=tuple("0123456789")))
    settings = {"data": "digits", "model": "mlp", "method": "Full", "target_epsilon": "inf", "seed": 0, "delta": 1e-5,
                "accountant": "rdp", "clip": 0.1, "rows": 60, "shadows": 6, "steps": 40, "batch_size": 20, "learning_rate": 1e-2}
    entry = attack_runs.attack_entry(settings)
    assert entry["plain"]["auc"] > 0.8 and entry["offline"]["auc"] > 0.8 and entry["allowed"]["auc"] == 1.0 and entry["epsilon"] == "inf"
