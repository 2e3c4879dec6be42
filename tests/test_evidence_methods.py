"""How nine methods and their compositions are scored and compared."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpft.book.evidence import methods
from dpft.book.experiments import write_records
from dpft.book.figures import interval, label_of, paired

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


# Compositions


def test_the_best_mean_wins_and_one_seed_makes_none(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    runs = [entry(label, seed, score) for label, scores in (("LoRA + BiTFiT", (0.9, 0.1)), ("LastLayer, then Full", (0.6, 0.6)))
            for seed, score in enumerate(scores)]
    write_records(tmp_path / "compositions.jsonl", runs)
    assert methods.winner() == "LastLayer, then Full"
    assert methods.rivals(methods.winner()) == ("LastLayer", "Full", "BiTFiT", "DPFrost", "LayerFreeze")


def test_a_composition_is_compared_with_each_rival_on_each_task():
    label = "LastLayer, then Full"
    made = [entry(name, seed, float(name == label), data=task, model=model, target_epsilon=2.0)
            for task, (model, _) in methods.TASKS.items() for name in (label, *methods.rivals(label)) for seed in range(2)]
    found = list(methods.comparisons(made, label))
    assert [(task, rival) for task, rival, _ in found] == [(task, rival) for task in methods.TASKS for rival in methods.rivals(label)]
    assert {tuple(values) for task, _, values in found if task != "sst2"} == {(1.0, 1.0)}
