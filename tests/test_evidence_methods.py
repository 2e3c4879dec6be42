"""The grids of nine methods and their compositions, how they are scored and compared, and what a step of each costs."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpft.book import evidence
from dpft.book.evidence import frost, methods
from dpft.book.experiments import measured_run, write_records
from dpft.book.figures import interval, label_of, paired
from dpft.registry import method_from

DIGITS = {"data": "digits", "model": "vit-small", "steps": 3, "batch_size": 16, "clip": 0.1, "limit": 64, "accountant": "rdp",
          "target_epsilon": 8.0, "seed": 0}


def grid(name):
    return list(evidence.EXPERIMENTS[name].grid())


def only(settings, *without):
    return {name: value for name, value in settings.items() if name not in without}


# Scores


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.integers(1, 10**5))
def test_the_interval_holds_both_parts_and_shrinks_with_the_test_file(scores, examples):
    centre, half = interval(scores, examples)
    seeds = interval(scores)
    assert centre == seeds[0] and seeds[1] <= half <= seeds[1] + 1.96 * 0.5 / examples**0.5 + 1e-12
    assert interval(scores, 4 * examples)[1] <= half


def test_the_interval_covers_the_truth_when_seeds_and_examples_are_both_drawn():
    generator = torch.Generator().manual_seed(0)
    covered = narrow = 0
    for _ in range(400):                                                         # 5 models of accuracy 0.8 ± 0.02 on a file of 300
        truth = 0.8 + 0.02 * torch.randn(5, 1, generator=generator)
        easy = torch.rand(1, 300, generator=generator)                           # the same examples are hard for all five
        scores = (easy < truth).float().mean(1).tolist()
        (centre, half), (_, without) = interval(scores, 300), interval(scores)
        covered, narrow = covered + (abs(centre - 0.8) <= half), narrow + (abs(centre - 0.8) <= without)
    assert covered >= 0.90 * 400 and narrow < 0.80 * 400   # 0.957 and 0.63 are expected, with deviations of 0.010 and 0.024


def entry(label, seed, score, **more):
    return {"label": label, "method": "Then", "seed": seed, "metrics": {"accuracy": score, "test_accuracy": 1 - score}, **more}


def test_pairs_are_of_one_seed_and_a_win_takes_two():
    records = [entry("a", 0, 0.9), entry("a", 1, 0.8), entry("b", 1, 0.5), entry("b", 2, 0.1), {**entry("?", 0, 0.4), "method": "c"}]
    assert paired(records, "a", "b", "accuracy") == [pytest.approx(0.3)]
    assert paired(records, "a", "b", "test_accuracy") == [pytest.approx(-0.3)]
    assert label_of({"method": "c"}) == "c" and paired(records, "a", "c", "accuracy") == []
    assert not methods.beaten([0.3]) and not methods.beaten([]) and methods.beaten([0.3, 0.3]) and not methods.beaten([0.3, 0.0])
    told = [methods.described_difference(values)[-1] for values in ([0.3], [0.3, 0.3, 0.31], [-0.3, -0.3], [0.3, -0.3])]
    assert told == ["too few seeds", "ahead", "behind", "undecided"]


# SST-2


def test_all_nine_methods_have_the_same_runs(tuned_file):
    nine = {*frost.METHODS, *methods.OTHERS}
    runs, rest = grid("frost-text") + grid("methods-text"), grid("methods-headline")
    times = Counter((run["method"], run["target_epsilon"]) for run in runs)
    assert {method for method, _ in times} == nine and len({times[method, 2.0] for method in nine}) == 1
    assert all(times[method, "inf"] == 1 and times[method, 0.5] == times[method, 8.0] == times[method, 2.0] for method in nine)
    assert len({json.dumps(only(run, "method", "options", "learning_rate", "target_epsilon", "seed")) for run in runs}) == 1
    for method in nine:
        seeds = [run["seed"] for run in runs + rest if (run["method"], run["target_epsilon"]) == (method, 2.0)]
        assert sorted(seeds) == list(range(10))


def test_tuning_is_that_of_the_four_and_its_rates_are_used(tuned_file):
    alike = {json.dumps(only(run, "method", "options", "learning_rate")) for run in grid("frost-tuning") + grid("methods-tuning")}
    assert len(alike) == 1 and set(Counter(run["method"] for run in grid("methods-tuning")).values()) == {2}
    text = grid("methods-text")
    assert {run["learning_rate"] for run in text if run["target_epsilon"] != "inf"} == {1e-3}
    chosen = {run["seed"]: run["options"] for run in text if run["method"] == "RandomPartitions"}
    assert chosen == {seed: {"ratio": 0.25, "seed": seed} for seed in range(3)}  # DP-FROST's ratio, another choice for each seed
    assert all(repr(method_from(run["method"], run["options"])) for run in text)
    assert [run["method"] for run in text[-10:]] == ["LargestWeights"] * 10 and text[0]["target_epsilon"] == 2.0


def test_images_complete_what_frost_vision_has(tuned_file):
    runs, others = grid("methods-images"), grid("frost-vision")
    vit = [run for run in runs if run["model"] == "vit-small"]
    assert {run["label"] for run in vit} == {"1/3+BiTFiT", "2/3+BiTFiT"} and {run["seed"] for run in vit} == {run["seed"] for run in others}
    own = ("label", "method", "options", "learning_rate", "seed")
    assert {json.dumps(only(run, *own), sort_keys=True) for run in vit} == {json.dumps(only(run, *own), sort_keys=True) for run in others}
    assert {run["label"] for run in runs if run["model"] == "cnn"} == {"LastLayer", "BiTFiT", "1/3+BiTFiT", "2/3+BiTFiT", "Full"}
    assert {(run["options"]["steps"], run["options"]["rate"]) for run in vit} == {(10, 5.0), (20, 5.0)}


# Compositions


@pytest.mark.parametrize("label", methods.COMPOSITIONS)
def test_every_composition_trains_within_its_budget(label):
    rates = {part: own[0] for part, own in methods.PART_RATES.items()}
    own = methods.composed(label, rates, {**methods.PART_OPTIONS, "LayerFreeze": {"layers": 1, "after": 1}}, DIGITS["steps"])
    found = measured_run({**DIGITS, **only(own, "label")})
    assert 0 < found["epsilon"] <= 8 and 0 <= found["metrics"]["accuracy"] <= 1
    kind, first, second = methods.COMPOSITIONS[label]
    assert own["learning_rate"] == rates[first] and {first, second} <= set(methods.PARTS)
    if kind == "Then":
        assert own["options"]["steps"] == 1 and own["options"]["rate"] * rates[first] == pytest.approx(rates[second])


def test_the_search_takes_the_better_rate_of_each_part_and_its_best_mean_wins(tuned_file, tmp_path):
    assert methods.part_rates() == dict.fromkeys(methods.PARTS, 1e-3)
    assert {run["learning_rate"] for run in grid("compositions")} == {1e-3} and {run["held_out"] for run in grid("compositions")} == {300}
    assert methods.winner() == "LastLayer, then BiTFiT"
    fluke = {"label": "LoRA + BiTFiT", "learning_rate": 1e-3, "reduced": True}   # one seed does not make a mean
    write_records(tmp_path / "compositions.jsonl", [{**fluke, "metrics": {"accuracy": 0.15}}])
    assert methods.winner() == "LastLayer, then BiTFiT"
    write_records(tmp_path / "compositions.jsonl", [{**fluke, "metrics": {"accuracy": 0.9}}])
    assert methods.winner() == "LoRA + BiTFiT"
    needed = {"compositions": "compositions-parts", "compositions-confirmed": "compositions", "methods-text": "methods-tuning"}
    for name, needs in needed.items():
        (tmp_path / f"{needs}.jsonl").unlink()
        with pytest.raises(ValueError, match=f"dpft run {needs}$"):
            grid(name)


def test_search_and_confirmation_share_no_run_and_no_score(tuned_file):
    search, confirmed = grid("compositions-parts") + grid("compositions"), grid("compositions-confirmed")
    assert not {run["seed"] for run in search} & {run["seed"] for run in confirmed} and not any("held_out" in run for run in confirmed)


def test_each_rival_runs_beside_the_winner_on_each_task_once(tuned_file):
    label = methods.winner()
    runs = grid("compositions-confirmed") + [run for name in ("frost-text", "methods-text", "methods-headline", "frost-vision")
                                             for run in grid(name) if run["target_epsilon"] == 2.0]
    for task, model, seeds in (("digits", "vit-small", 10), ("cifar10", "vit-small", 5), ("sst2", "minilm", 5)):
        own = [run for run in runs if (run["data"], run["model"]) == (task, model) and run["seed"] < seeds]
        for rival in (label, *methods.rivals(label)):
            assert sorted(run["seed"] for run in own if label_of(run) == rival) == list(range(seeds)), (task, rival)
        assert len({json.dumps(only(run, "label", "method", "options", "learning_rate", "seed"), sort_keys=True) for run in own}) == 1
        made = [{**run, "metrics": dict.fromkeys(("accuracy", "test_accuracy"), float(label_of(run) == label))} for run in own]
        found = list(methods.comparisons(made, label))
        assert [(name, rival) for name, rival, _ in found] == [(task, rival) for rival in methods.rivals(label)]
        assert all(values == [1.0] * seeds for *_, values in found)
    assert {"BiTFiT", "DPFrost", "LayerFreeze", *methods.COMPOSITIONS[label][1:]} <= set(methods.rivals(label))


# Cost
