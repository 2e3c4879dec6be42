"""The plan of the runs: equal tuning that grows with its records, runs that follow it, and the rules of verdicts."""

import inspect
from dataclasses import replace
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpft import fine_tune
from dpft.book.evidence import EXPERIMENTS, protocol
from dpft.book.evidence.language import APART, PUBLIC
from dpft.book.evidence.protocol import (
    RATE_FACTORS,
    STUDIES,
    Study,
    Way,
    counted,
    deviation_ratio,
    entry,
    growing,
    holm,
    indifferent,
    judged,
    lowered,
    no_better,
    off_the_rate,
    overlaps,
    p_value,
    rate_differences,
    size_gaps,
    size_steps,
    steadier,
    study_grid,
    study_of_size,
    study_verdict,
    timed,
    tuning_grid,
    untuned,
)
from dpft.book.experiments import arguments_of, write_records
from dpft.book.figures import paired
from dpft.registry import method_from

SMALL = Study({"data": "digits", "model": "mlp", "steps": 40, "batch_size": 64, "optimizer": "adamw"},
              {"A": Way("LastLayer", {}, 1e-2, 100.0), "B": Way("BiTFiT", {}, 1e-2, 100.0)}, 100, elsewhere=("A",))


def tune(folder, best_rate, best_clip=1.0, study=SMALL, best_whole=None):
    """Make every tuning run that the grid names, until it names no more; the score falls with the distance from the best,
    which may be another in runs of full length."""
    made = []
    for _ in range(12):
        new = [run for run in tuning_grid("small-tuning", study) if run not in made]
        if not new:
            return made
        best = {10: best_rate, 40: best_whole}
        far = [abs(run["learning_rate"] / best[run["steps"]] - 1) + abs(run["clip"] - best_clip) for run in new]
        write_records(folder / "small-tuning.jsonl", [{**run, "reduced": True, "metrics": {"accuracy": -distance - ("clipping" in run)}}
                                                      for run, distance in zip(new, far, strict=True)])
        made += new
    raise AssertionError("the tuning does not end")


def test_tuning_is_equal_follows_its_records_and_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    first = list(tuning_grid("small-tuning", SMALL))
    assert [(run["label"], run["clip"], run.get("clipping", "flat")) for run in first[:3]] == [
        ("A", 0.1, "flat"), ("A", 1.0, "flat"), ("A", 1.0, "automatic")] and len(first) == 6
    assert {run["steps"] for run in first} == {10} and {run["held_out"] for run in first} == {100}
    made = tune(tmp_path, 3e-2)
    for label, budgets in (("A", 3), ("B", 1)):
        own = [run for run in made if run["label"] == label]
        assert len(own) == 7 + 3 * (budgets - 1) and {run["seed"] for run in own} == {protocol.TUNED_WITH}
    runs = study_grid("small", SMALL)
    assert {run["learning_rate"] for run in runs} == {3e-2} and {run["clip"] for run in runs} == {1.0}
    counted = {(label, budget): sum((run["label"], run["target_epsilon"]) == (label, budget) for run in runs)
               for label in "AB" for budget in (2.0, 0.5, 8.0)}
    assert counted == {("A", 2.0): 5, ("A", 0.5): 3, ("A", 8.0): 3, ("B", 2.0): 5, ("B", 0.5): 0, ("B", 8.0): 0}
    assert all("held_out" not in run and run["steps"] == 40 and run["seed"] != protocol.TUNED_WITH for run in runs)


def test_a_best_rate_at_the_edge_extends_the_ladder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    tune(tmp_path, 0.81)                                                         # two steps of 3 beyond the first five
    assert {run["learning_rate"] for run in study_grid("small", SMALL)} == {0.81}


def test_a_refined_study_takes_the_rate_that_is_best_at_full_length(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    study = replace(SMALL, refined=True)
    made = tune(tmp_path, 3e-2, study=study, best_whole=1e-2 / 3)                # one step beyond the first three
    whole = [run for run in made if run["steps"] == 40]
    assert sorted({run["learning_rate"] for run in whole}) == [1.11e-3, 3.33e-3, 1e-2, 3e-2, 9e-2] and len(whole) == 2 * 5
    assert {run["held_out"] for run in whole} == {100} and {run["target_epsilon"] for run in whole} == {2.0}
    runs = [run for run in study_grid("small", study) if run["target_epsilon"] == 2.0]
    assert {run["learning_rate"] for run in runs} == {3.33e-3} and len(runs) == 10


def test_where_all_rates_are_tried_at_each_bound_the_middle_rate_decides_nothing(tmp_path, monkeypatch, refined=True, whole=3):
    best = {(0.1, 3e-2): 3.0, (1.0, 1e-2): 2.0, (0.1, 1e-2): 1.0}               # bound 1 at the middle rate, 0.1 at three times that
    for every_bound, found in ((False, (1.0, 1e-2)), (True, (0.1, 3e-2))):
        study, made = replace(SMALL, refined=refined, every_bound=every_bound), []
        folder = tmp_path / str(every_bound)
        folder.mkdir()
        monkeypatch.setenv("DPFT_RESULTS", str(folder))
        while new := [run for run in tuning_grid("small-tuning", study) if run not in made]:
            made += new
            write_records(folder / "small-tuning.jsonl", [
                {**run, "reduced": True, "metrics": {"accuracy": best.get((run["clip"], run["learning_rate"]), 0) - ("clipping" in run)}}
                for run in new])
        assert {(run["clip"], run["learning_rate"]) for run in study_grid("small", study)
                if run["target_epsilon"] == 2.0} == {found}
        bounds = 3 if every_bound else 1
        assert sum(run["target_epsilon"] == 2.0 for run in made) == len(SMALL.ways) * (3 - bounds + bounds * (5 + whole))


def test_runs_wait_for_their_tuning(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    with pytest.raises(ValueError, match=r"dpft run small-tuning$"):
        study_grid("small", SMALL)


def test_a_smaller_bound_of_sgd_comes_with_a_larger_rate():
    sgd = Study({**SMALL.shared, "optimizer": "sgd"}, SMALL.ways, 100)
    assert entry(sgd, "A", "0.1", 2.0, 2.0, 0)["learning_rate"] == 20.0 and entry(SMALL, "A", "0.1", 2.0, 2.0, 0)["learning_rate"] == 2.0


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_study_can_be_made_and_is_an_experiment(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    study, runs = STUDIES[name], EXPERIMENTS[f"{name}-tuning"].rows(f"{name}-tuning")[0]
    assert len(runs) == len(study.clips) * len(study.ways) and name in EXPERIMENTS
    for run in runs:
        plain = {key: value for key, value in run.items() if key not in APART}
        inspect.signature(fine_tune).bind_partial(**arguments_of(plain))        # each setting is one of its arguments
        assert arguments_of(plain)["epsilon"] == float(study.epsilons[0])
        options = {name: "random" if value in PUBLIC else value for name, value in run["options"].items() if not isinstance(value, list)}
        if run["method"] != "Compacter":                    # written in the how-to of a method of one's own
            assert method_from(run["method"], run["options"] | options) is not None


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_bonferroni_and_no_correction(values):
    decided = holm(values)
    for name, value in values.items():
        assert (value <= 0.05 / len(values)) <= decided[name] <= (value <= 0.05)
    kept = [values[name] for name, its in decided.items() if its]
    assert all(value <= min((values[name] for name, its in decided.items() if not its), default=1.0) for value in kept)


def test_a_p_value_needs_two_seeds():
    assert p_value([0.1]) == 1.0 and p_value([0.1, -0.1]) == 1.0


def test_differences_without_a_spread_are_judged_by_their_signs():
    alike = [4 / 360] * 5                                                        # differences of a metric that takes few values
    assert p_value(alike) == 1 / 16 and judged([alike])[0] == "undecided"        # five times heads or five times tails
    assert p_value([0.8 - 0.7, 0.9 - 0.8]) == 0.5                                # equal but for rounding
    for value, verdict in ((0.0, "held"), (-0.02, "did not hold"), (-0.01, "undecided")):
        assert judged([[value] * 8], -0.01)[0] == verdict                        # the last one is the margin itself


AHEAD, SPREAD, OPEN = [0.02, 0.03, 0.025, 0.02, 0.03], [0.05, 0.06, -0.03, 0.07, -0.02], [0.02, -0.03, 0.01, 0.02, -0.02]
BEHIND = [-value for value in AHEAD]
WEAK = [0.005, 0.024, 0.02, 0.006, 0.03]                                         # sure alone, and not among three


def records(cells):
    "Made-up records of two ways, a cell for each list of differences, with the second way at 0.5."
    return [{"label": label, "method": label, "seed": seed, "cell": cell, "metrics": {"accuracy": 0.5 + (gap if label == "new" else 0)}}
            for cell, gaps in enumerate(cells) for seed, gap in enumerate(gaps) for label in ("new", "old")]


@pytest.mark.parametrize(("cells", "more", "verdict"), [
    # each of: all decided for it, or one decided against it, whatever becomes of the others
    ([AHEAD] * 3, {}, "held"), ([BEHIND] * 3, {}, "did not hold"), ([AHEAD, BEHIND], {}, "did not hold"),
    ([BEHIND, OPEN], {}, "did not hold"), ([BEHIND, []], {}, "did not hold"), ([OPEN, OPEN, BEHIND, BEHIND, BEHIND], {}, "did not hold"),
    ([AHEAD, OPEN], {}, "undecided"), ([AHEAD, []], {}, "undecided"), ([], {}, "undecided"), ([[], []], {}, "undecided"),
    ([WEAK], {}, "held"), ([WEAK] * 3, {}, "undecided"),                         # by Holm
    # what lacks, lacks in either direction
    ([AHEAD[:4]], {}, "undecided"), ([BEHIND[:4]], {}, "undecided"), ([AHEAD], {"lacks": "never tuned"}, "undecided"),
    ([BEHIND], {"lacks": "never tuned"}, "undecided"), ([BEHIND], {"untestable": "too small a model"}, "not testable here"),
    # a margin of equality
    ([[-0.004, -0.005, -0.006, -0.004, -0.005]], {"margin": -0.01}, "held"), ([BEHIND], {"margin": -0.01}, "did not hold"),
    # a gain that is worth something: surely smaller is refuted, surely above zero held, and both at once held
    ([OPEN], {"worth": 0.05}, "did not hold"), ([OPEN], {"worth": 0.01}, "undecided"), ([BEHIND], {"worth": 0.01}, "did not hold"),
    ([AHEAD], {"worth": 0.01}, "held"), ([AHEAD], {"worth": 0.05}, "held"), ([AHEAD, OPEN], {"worth": 0.05}, "did not hold"),
    ([OPEN[:4]], {"worth": 0.05}, "undecided"), ([[]], {"worth": 0.05}, "undecided"),
    # in the mean: each independent run once
    ([AHEAD, OPEN], {"runs": AHEAD}, "held in the mean"), ([AHEAD, BEHIND], {"runs": AHEAD}, "held in the mean"),
    ([AHEAD] * 2, {"runs": AHEAD}, "held"), ([AHEAD, OPEN], {"runs": BEHIND}, "did not hold"),
    ([AHEAD, OPEN], {"runs": OPEN}, "undecided"), ([AHEAD, OPEN], {"runs": AHEAD[:4]}, "undecided"),
    ([AHEAD, OPEN], {"runs": AHEAD, "lacks": "never tuned"}, "undecided"),
    # a claim about sizes counts models: two steps are too few, however sure
    ([[0.4, 0.41]], {"units": "steps"}, "undecided"), ([BEHIND], {"units": "steps"}, "did not hold")])
def test_one_rule_serves_both_directions(cells, more, verdict):
    made = records(cells)
    gaps = [paired([run for run in made if run["cell"] == cell], "new", "old", "accuracy") for cell in range(len(cells))]
    found = judged(gaps, **more)
    assert found[0] == verdict, found


def test_a_verdict_says_what_it_stands_on():
    assert judged([BEHIND, OPEN, OPEN]) == ("did not hold", "0 of 3 ahead, 1 behind")
    assert judged([AHEAD, []]) == ("undecided", "1 of 1 ahead, 0 behind; 1 not run")
    assert judged([AHEAD[:4]]) == ("undecided", "1 of 1 ahead, 0 behind; 4 of 5 seeds")
    assert judged([[0.4, 0.41]], units="steps") == ("undecided", "1 of 1 ahead, 0 behind; 2 of 5 steps")
    assert judged([AHEAD, OPEN], runs=AHEAD)[1].startswith("+0.0250 in the mean of 5 runs (p = ")


def test_what_is_seen_along_runs_and_costs():
    assert [counted(right, 20, "seen", 5)[0] for right in (20, 18, 10, 2, 0)] == [
        "held", "held", "held in part", "did not hold", "did not hold"]
    for right in (0, 20):
        assert counted(right, 20, "seen", 4) == ("undecided", f"seen at {right} of 20; 4 of 5 runs")
        assert counted(right, 20, "seen", 5, "one look")[0] == "undecided" and counted(right, 20, "seen", None)[0] != "undecided"
    assert counted(0, 0, "seen", 5)[0] == timed([], 1.0, 5)[0] == "undecided"
    inside, outside, both = (0.9, 1.0), (1.1, 1.2), (0.9, 1.2)
    assert [timed(its, 1.05, 5)[0] for its in ([inside], [outside], [inside, outside], [inside, both], [outside, both])] == [
        "held", "did not hold", "did not hold", "undecided", "did not hold"]
    assert timed([inside], 1.05, 4)[0] == timed([outside], 1.05, 4)[0] == "undecided"


def test_a_choice_that_cannot_matter_leaves_nothing_to_judge():
    """The control of choices: a gain that is surely below two points says so, one that may be larger or is too seldom run doesn't."""
    small = [0.005, 0.0, 0.004, 0.002, 0.001]
    assert indifferent(small) == "the choice without noise gains +0.2 ± 0.3 points over a random one"
    assert indifferent(small[:4]) == indifferent(AHEAD) == indifferent(SPREAD) == ""
    assert indifferent(BEHIND) and judged([OPEN], untestable=indifferent(small))[0] == "not testable here"


def test_a_lead_that_grows_is_a_lead():
    assert growing([AHEAD], [AHEAD])[0] == "held" and growing([AHEAD], [BEHIND])[0] == "did not hold"
    assert growing([OPEN], [AHEAD])[0] == "held" and growing([OPEN], [OPEN])[0] == "undecided"
    assert growing([BEHIND, AHEAD], [AHEAD, AHEAD]) == ("did not hold", "no lead to grow: 1 of 2 ahead, 1 behind")
    assert growing([BEHIND], [AHEAD], lacks="never tuned")[0] == "undecided"


def test_a_deviation_is_smaller_by_the_test_of_pitman_and_morgan():
    """Made-up scores that share most of their noise: the interval covers the true ratio nineteen times in twenty, and decides both ways."""
    draw, covered, decided = np.random.default_rng(7), 0, []
    for _ in range(400):
        shared, first, second = draw.normal(size=(3, 40))
        one, other = [*(0.5 * (0.8 * shared + 0.6 * first))], [*(0.8 * shared + 0.6 * second)]
        ratio, low, high = deviation_ratio(one, other)
        assert low < ratio < high and ratio == pytest.approx(np.std(one) / np.std(other))
        assert deviation_ratio(other, one) == pytest.approx((1 / ratio, 1 / high, 1 / low))
        covered += low <= 0.5 <= high
        decided.append((steadier(one, other)[0], steadier(other, one)[0]))
    assert 360 <= covered <= 395 and decided.count(("held", "did not hold")) > 390
    assert steadier(one[:19], other[:19]) == ("undecided", "19 of 20 pairs")
    alike = [steadier(*draw.normal(size=(2, 20)))[0] for _ in range(100)]
    assert alike.count("undecided") > 80


def test_an_attack_is_lowered_where_it_works():
    strong, weak = [0.75, 0.76, 0.74, 0.75, 0.77], [0.55, 0.53, 0.54, 0.52, 0.56]
    assert lowered([strong], [AHEAD])[0] == "held" and lowered([strong], [BEHIND])[0] == "did not hold"
    assert lowered([strong, weak], [AHEAD, BEHIND]) == ("held", "1 of 1 ahead, 0 behind; in 1 cell no attack works without it")
    assert lowered([weak, weak], [AHEAD, AHEAD])[0] == "not testable here"
    assert lowered([weak, strong[:4]], [AHEAD, AHEAD]) == ("undecided", "4 of 5 seeds")


def test_the_overlap_of_choices_counts_entries(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    parts = [{"name": name, "size": size} for name, size in (("a", 1), ("b", 2), ("c", 5))]
    write_records(tmp_path / "some.jsonl", [
        {"method": "DPFrost", "label": "MGNA", "target_epsilon": 2.0, "seed": seed, "selection": {"partitions": parts, "chosen": chosen}}
        for seed, chosen in enumerate(([0, 1], [1, 2], [2], [2], [0]))])
    assert overlaps("MGNA", "some") == [2 / 8, 0.0, 0.0, 1 / 3, 5 / 7, 5 / 7, 0.0, 1.0, 0.0, 0.0]
    assert overlaps("MG", "some") == []


def test_tuning_and_training_are_read_from_records():
    def run(method, rate, score, **more):
        return {"method": method, "learning_rate": rate, "clip": 1.0, "metrics": {"accuracy": score}, **more}
    rates = [3.0**power for power in range(5)]
    whole = [run("Full", rate, -abs(rate - 9), clip=clip) for rate in rates for clip in (0.1, 1.0)]
    whole += [run("Full", 9.0, 0.0, clipping="automatic")]
    assert untuned(whole, ["Full"]) == ""
    assert untuned(whole, ["Full", "LoRA"]) == "never tuned: LoRA"
    assert "at 4 of 5 rates" in untuned([its for its in whole if its["learning_rate"] > 1], ["Full"])
    assert untuned([its for its in whole if its["learning_rate"] <= 9], ["Full"]).endswith("best at an edge: Full")
    assert "tuned at 1 of 3 clip bounds" in untuned([run("Full", rate, -abs(rate - 9)) for rate in rates], ["Full"])
    assert "edge" in untuned(whole, ["Full"], sign=-1)                           # of perplexity less is more
    control = [run("Full", rate, rate, label="a control") for rate in (27.0, 81.0, 243.0)]      # another way of the same method
    assert untuned([*whole, *control], ["Full"]) == "" and untuned(control, ["Full"]) == "never tuned: Full"
    scaled = [run("Full", rate / clip, -abs(rate - 81), clip=clip) for rate in rates for clip in (0.1, 1.0)]      # as SGD has them
    assert untuned([*scaled, run("Full", 1.0, -100.0, clipping="automatic")], ["Full"]) == "best at an edge: Full"
    long = [run("Full", rate, rate, steps=40) for rate in (3.0, 9.0)]                                         # the best is no longer inside
    assert "best at an edge: Full" in untuned([{"steps": 10, **its} for its in whole] + long, ["Full"])
    assert untuned([{"steps": 10, **its} for its in whole] + long + [run("Full", 27.0, 0.0, steps=40)], ["Full"]) == ""
    scores = [{"method": way, "metrics": {"accuracy": score}} for way, score in (("a", 0.6), ("a", 0.7), ("b", 0.5), ("b", 0.4))]
    assert no_better(scores, ["a", "b"], 0.5) == "no better than untouched: b" and no_better(scores, ["a"], 0.5) == ""


def of_size(folder, recipe, scores):
    "Records of one size: scores of the biases and of everything by seed, at the headline budget, and others elsewhere."
    write_records(folder / f"{study_of_size(recipe)}.jsonl", [
        {"label": way, "method": way, "seed": seed, "target_epsilon": budget,
         "metrics": {"perplexity": score if budget == 3 else 7.0 + seed}}
        for budget in (3.0, 7.0) for way, its in scores.items() for seed, score in its.items()])


def test_the_gap_of_a_size_is_the_logarithm_of_a_quotient_at_the_headline_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    of_size(tmp_path, "least", {"BiTFiT": {0: 80.0, 1: 90.0, 2: 64.0}, "Full": {0: 10.0, 1: 10.0, 2: 8.0}})
    of_size(tmp_path, "tiny", {"BiTFiT": {1: 60.0, 0: 40.0, 2: 30.0}, "Full": {0: 10.0, 1: 20.0}})
    assert size_gaps("least") == pytest.approx({0: log(8), 1: log(9), 2: log(8)})
    assert size_gaps("tiny") == pytest.approx({0: log(4), 1: log(3)})    # a seed without its pair is left out
    assert size_gaps("mini") == {}
    (first,) = size_steps()         # means of a model, above zero where the gap falls
    assert first == pytest.approx((2 * log(8) + log(9)) / 3 - (log(4) + log(3)) / 2)
    of_size(tmp_path, "mini", {"BiTFiT": {1: 12.0, 2: 8.0}, "Full": {1: 2.0, 2: 1.0}})
    assert size_steps()[1] == pytest.approx((log(4) + log(3)) / 2 - (log(6) + log(8)) / 2)


@pytest.mark.parametrize(("untouched", "found"), [(None, ""), (0.3, ""), (0.5, "no better than untouched: B")])
def test_a_study_is_held_against_the_untouched_model_where_its_records_lack_it(untouched, found, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    write_records(tmp_path / "small.jsonl", [
        {"label": label, "method": label, "target_epsilon": 2.0, "seed": seed, "reduced": False,
         "metrics": {"accuracy": score + seed / 1000}} for label, score in (("A", 0.6), ("B", 0.45)) for seed in range(5)])
    verdict, said = study_verdict("small", replace(SMALL, untouched=untouched), "A", ["B"])
    assert (verdict == "not testable here") == bool(found) and found in said


RATES = {"BiTFiT": 0.03, "Full": 0.01}   # a multiple of either may be one of the other


def test_what_is_lost_beside_the_rate_is_compared_by_seed_and_bound(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    def run(label, rate, seed, accuracy, **more):
        return {"label": label, "method": label, "clip": 0.1, "learning_rate": rate, "target_epsilon": 2.0, "steps": 60, "seed": seed,
                "metrics": {"accuracy": accuracy}, **more}
    slope = {"BiTFiT": 4.0, "Full": 1.0}
    write_records(tmp_path / "digits.jsonl", [run(label, rate, seed, 0.8) for label, rate in RATES.items() for seed in range(3)])
    write_records(tmp_path / "digits-rates.jsonl", [
        run(label, protocol.three_digits(rate * factor), seed, accuracy, **other)
        for label, rate in RATES.items() for factor in RATE_FACTORS for seed in ((2, 0, 1) if label == "Full" else (1, 2))
        for accuracy, other in ((0.8 - slope[label] * rate * factor, {}), (0.1, {"clip": 1.0}))])   # another bound, not compared
    for label, rate in RATES.items():
        for factor in RATE_FACTORS:
            lost = off_the_rate(label, factor)
            assert lost == pytest.approx(dict.fromkeys((0, 1, 2) if label == "Full" else (1, 2), slope[label] * rate * factor), rel=1e-9)
    for factor, its in zip(RATE_FACTORS, rate_differences(), strict=True):   # below zero where the biases lose more
        assert its == pytest.approx([(0.01 - 4 * 0.03) * factor] * 2, rel=1e-9)
