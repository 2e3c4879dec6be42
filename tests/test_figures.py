"""Figures as pure functions of records: the same files twice, one look for a method, and what happens when records are missing."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import same_color
from scipy import stats

import dpft
from dpft.book import drawings, figures
from dpft.book.evidence import FIGURES
from dpft.book.experiments import packed, write_records
from dpft.book.figures import COLOURS, MARKERS, Drawing, markdown_table, redraw, standing_on
from dpft.method import Method


def entry(experiment, method, epsilon, seed, score=0.8, data="sst2", **more):
    metrics = {"accuracy": score - 0.01 * seed, "test_accuracy": score + 0.01 * seed, "perplexity": 9.0 + seed}
    return {"experiment": experiment, "data": data, "model": "m", "method": method, "target_epsilon": epsilon, "seed": seed,
            "reduced": True, "device": "CPU", "metrics": metrics, **more}


def grid(experiment, methods=("Full", "BiTFiT"), budgets=(0.5, 8.0, "inf"), **more):
    return [entry(experiment, method, epsilon, seed, **more) for method in methods for epsilon in budgets for seed in range(3)]


def attack(epsilon, seed):
    found = {"auc": 0.6, "standard_error": 0.02}
    return entry("attacks", "Full", epsilon, seed, data="e2e", allowed={"auc": 0.9}, membership=found, calibrated=found)


def moved(experiment, device, **more):
    distances = {str(step): {layer: (1 - step / 4) / (2 + place) for place, layer in enumerate("ab")} for step in (1, 2, 4)}
    return entry(experiment, "Full", 1, 0, data="fashion_mnist", distances=distances) | {"device": device, **more}


def turned(experiment, device, clip, **more):
    look = {when: {layer: {"strength": scale, "total": 1 / scale} for layer in "ab"} for when, scale in (("before", 1.0), ("after", 1.2))}
    return entry(experiment, "LayerFreeze", 2.0, 0, data="cifar10", clip=clip, series=[look, look]) | {"device": device, **more}


def cost(who, size, part="text", trains="biases"):
    return {"experiment": "cost", "part": part, "trains": trains, "who": who, "size": size, "width": size, "layers": size, "rows": 4,
            "cannot": "", "seconds": 0.1 * size, "peak_mib": 2.0 * size, "examples_per_second": 3.0, "device": "CPU",
            "time_ratio": 1.0 + (who != "plain"), "time_interval": [0.9, 2.5], "peak_ratio": 1.5}


RECORDS = {
    "quickstart": [{key: value for key, value in e.items() if key != "reduced"} for e in grid("quickstart", data="digits")],
    "frost-text": grid("frost-text", ("Full", "DPFrost")),
    "methods-text": grid("methods-text", ("LoRA", "LargestWeights")),
    "frost-vision": grid("frost-vision", ("Full", "DPFrost"), (2.0,), data="cifar10"),
    "methods-images": grid("methods-images", ("Then",), (2.0,), data="cifar10", label="1/3+BiTFiT"),
    "e2e-methods": [*grid("e2e-methods", data="e2e"), entry("e2e-methods", "Untouched", 0.0, 0, data="e2e")],
    "methods-cost": [{"experiment": "methods-cost", "method": "all", "reduced": True,
                      "costs": {label: {"step_seconds": 2.0, "peak_mib": 30.0} for label in ("Full", "LoRA", "BiTFiT")}}],
    "methods-headline": grid("methods-headline", budgets=(2.0,)),
    "audits": [entry("audits", method, 8.0, 0, audited=3.0, claim=7.0, kind="separation", bounds={"separation": 4.0, "guesses": 1.0})
               for method in ("Full", "RapFT")],
    "lf-pwcca": [moved("lf-pwcca", "CPU, 1 threads")],
    "lf-angles": [turned("lf-angles", "CPU, 1 threads", clip) for clip in (1.0, 5.0)],
    "text-short": grid("text-short", budgets=(0.5, 2.0)),
    "attacks": [attack(epsilon, seed) for epsilon in (2.0, "inf") for seed in range(2)],
    "costs": [cost(who, size, part, trains) for who in ("plain", "dpft") for size in (16, 32) for trains in ("biases", "full")
              for part in ("text", "images", "models", "depths")]}


@pytest.fixture
def results(tmp_path, monkeypatch):
    "A folder with some of the records of every figure."
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setenv("DPFT_RESULTS", str(folder))
    for name, entries in RECORDS.items():
        write_records(folder / f"{name}.jsonl", entries)
    return folder


def test_every_figure_is_drawn_and_the_svg_is_the_same_twice(results, tmp_path):
    before = plt.get_fignums()                               # what other tests have left open
    first, second = (list(redraw(FIGURES, tmp_path / where)) for where in ("a", "b"))
    assert first == second and len(first) == len(FIGURES) and not any("skipped" in sentence for sentence in first)
    for name in FIGURES:
        svg = (tmp_path / "a" / f"{name}.svg").read_bytes()
        assert svg == (tmp_path / "b" / f"{name}.svg").read_bytes() and b"<dc:date>" not in svg
    assert plt.get_fignums() == before


def test_every_method_has_a_look_of_its_own():
    public = {name for name in dpft.__all__ if isinstance(getattr(dpft, name), type) and issubclass(getattr(dpft, name), Method)}
    assert public - {"Method"} <= set(COLOURS) == set(MARKERS)
    assert len(set(COLOURS.values())) == len(set(MARKERS.values())) == len(COLOURS)


def test_a_method_has_the_same_colour_in_every_figure(results):
    "In whatever figure a method has a place, its marker has the method's colour and shape."
    seen = {}
    for name in ("quickstart", "tradeoff-text", "tradeoff-images", "tradeoff-language", "price", "attacks"):
        figure = FIGURES[name].draw(standing_on(FIGURES[name]))
        for bars in (bars for axis in figure.axes for bars in axis.containers):
            label = bars.get_label().partition(" (")[0]
            kind = label if label in COLOURS else "Then"
            assert same_color(bars.lines[0].get_color(), COLOURS[kind]) and bars.lines[0].get_marker() == MARKERS[kind]
            seen.setdefault(label, set()).add(name)
    plt.close("all")
    assert len(seen["BiTFiT"]) == 5 and len(seen["Full"]) == 3 and "1/3+BiTFiT" in seen and "LoRA" in seen  # Full is the zero of the others


def test_figures_tell_the_numbers_of_seeds_and_axes_what_they_measure(results):
    figure = FIGURES["tradeoff-text"].draw(standing_on(FIGURES["tradeoff-text"]))
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert {"LoRA (3)", "DPFrost (3)"} <= set(names) and not any(name.startswith("Full") for name in names)
    assert [axis.get_title().splitlines()[0] for axis in figure.axes] == ["ε = 0.5", "ε = 2", "ε = 8"]
    assert all(axis.get_title().splitlines()[1] == "Full: 81.0 %" for axis in figure.axes)
    assert figure.get_supxlabel() == "test accuracy less that of Full, in points"
    figure = FIGURES["tradeoff-language"].draw(standing_on(FIGURES["tradeoff-language"]))
    axis = figure.axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0.5", "8", "∞"] and "perplexity" in axis.get_ylabel()
    assert {"Full (3)", "BiTFiT (3)"} <= {text.get_text() for text in axis.texts}
    plt.close("all")


def test_leads_are_paired_by_seed_and_take_three_of_them():
    runs = [{**entry("x", method, 2.0, seed), "metrics": {"accuracy": score}}
            for method, scores in (("Full", (0.5, 0.6, 0.9)), ("LoRA", (0.6, 0.7, 1.0)), ("BiTFiT", (0.1, 0.2)))
            for seed, score in enumerate(scores)]
    found = figures.leads(runs, "Full", "accuracy")
    assert list(found) == ["LoRA"] and found["LoRA"] == pytest.approx([0.1] * 3)       # what a seed does to both cancels
    other = [{**run, "seed": run["seed"] + (run["method"] == "LoRA")} for run in runs]
    assert figures.leads(other, "Full", "accuracy") == {}                              # two seeds in common are too few
    assert figures.leads(runs, "Adapter", "accuracy") == {}


def answered(label, seed, right):
    return {**entry("x", label, 2.0, seed), "answers": {"accuracy": {"right": packed(torch.as_tensor(right))}}}


def test_an_interval_over_examples_too_covers_what_one_over_seeds_cannot():
    draws = np.random.default_rng(0)
    known = draws.random((2, 400)) < 0.7                                               # as if every seed answered alike
    alike = [answered(label, seed, right) for label, right in zip(("LoRA", "Full"), known, strict=True) for seed in range(5)]
    centre, seeds, both = figures.paired_twice(alike, "LoRA", "Full", "accuracy")
    gaps = known[0].astype(float) - known[1]
    assert centre == pytest.approx(gaps.mean()) and seeds == 0
    assert both == pytest.approx(1.96 * stats.sem(gaps))
    covered = {"seeds": 0, "both": 0}
    for _ in range(200):                                                               # no method is better: both draw their rights alike
        ease, off = draws.normal(0, 1, (2, 100)), draws.normal(0, 0.1, (2, 5, 1))
        right = ease[:, None] + off + draws.normal(0, 0.5, (2, 5, 100)) > 0
        runs = [answered(label, seed, right[k, seed]) for k, label in enumerate(("LoRA", "Full")) for seed in range(5)]
        centre, seeds, both = figures.paired_twice(runs, "LoRA", "Full", "accuracy")
        covered["seeds"] += abs(centre) <= seeds
        covered["both"] += abs(centre) <= both
    assert covered["both"] >= 185 and covered["seeds"] <= 165
    with pytest.raises(ValueError, match="LoRA and Full have 1 seeds in common; an interval takes two"):
        figures.paired_twice([run for run in alike if run["seed"] == 0], "LoRA", "Full", "accuracy")


def test_a_mean_off_the_panel_is_an_arrow_with_its_number():
    found = {"LoRA": [1.0, 2.0, 3.0], "BiTFiT": [-25.0, -24.0, -26.0]}
    low, high = figures.lead_limits([found], reach=12)
    assert -12 <= low < 2 - 4.30 / 3**0.5 and 2 + 4.30 / 3**0.5 < high <= 12
    figure, axis = plt.subplots()
    figures.draw_leads(axis, {"LoRA": "LoRA (3)", "BiTFiT": "BiTFiT (3)"}, found, (low, high))
    assert [bars.get_label() for bars in axis.containers] == ["LoRA (3)"] and [text.get_text() for text in axis.texts] == ["−25"]
    plt.close(figure)


def test_few_methods_have_their_names_at_their_lines(results):
    figure, axis = plt.subplots(figsize=(4, 3))
    axis.set(xlim=(0, 3), ylim=(0, 1))
    figures.names_at_lines(axis, {"Full (3)": (2.0, 0.50), "BiTFiT (3)": (2.1, 0.51), "LoRA (1)": (2.0, 0.9)})
    figure.canvas.draw()
    texts = {text.get_text(): text for text in axis.texts}
    assert set(texts) == {"Full (3)", "BiTFiT (3)", "LoRA (1)"} and same_color(texts["LoRA (1)"].get_color(), COLOURS["LoRA"])
    boxes = sorted((text.get_window_extent() for text in texts.values()), key=lambda box: box.y0)
    assert all(below.y0 + 11 * figure.dpi / 72 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))
    plt.close("all")


def test_numbers_below_zero_have_a_minus_sign_and_code_keeps_its_hyphens():
    row = ["-1.5 ± 0.2", "0 behind, -2", "`dpft run --seed -1`", "2026-11-25", "lite-0", 1e-5, -3]
    assert markdown_table(["a-1"], [row]).splitlines()[-1] == (
        "| −1.5 ± 0.2 | 0 behind, −2 | `dpft run --seed -1` | 2026-11-25 | lite-0 | 1e-05 | −3 |")


def test_missing_records_are_one_sentence_and_the_rest_is_drawn(run, results, tmp_path):
    (results / "audits.jsonl").unlink()
    status, out, _ = run("figures", "audits", "tradeoff-text", "--output", tmp_path / "a", "--format", "png")
    lines = out.splitlines()
    assert status == 0 and lines[0] == "audits: skipped, because there are no records of audits; dpft run audits makes them."
    assert lines[1].startswith("tradeoff-text: test accuracy on SST-2 minus full fine-tuning's; 42 records, reduced, 3 seeds, CPU.")
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["tradeoff-text.png"]


def test_an_unknown_figure_is_refused_with_the_nearest(run, results, tmp_path):
    status, _, err = run("figures", "tradeof-text", "--output", tmp_path / "a")
    assert status != 0 and "'tradeof-text'; did you mean tradeoff-text" in err and err.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_only_the_data_that_a_figure_shows_counts(results):
    write_records(results / "compositions-confirmed.jsonl", [entry("compositions-confirmed", "LayerFreeze", 2.0, 0, data=data)
                                                             for data in ("digits", "cifar10", "sst2")])
    for name, data in (("tradeoff-text", {"sst2"}), ("tradeoff-images", {"digits", "cifar10"})):
        assert {e["data"] for e in standing_on(FIGURES[name])} == data


@pytest.mark.parametrize("count", [2, 5, 85])
def test_an_interval_is_students_for_any_number_of_seeds(count):
    values = [math.sin(n) for n in range(count)]
    low, high = stats.t.interval(0.95, count - 1, loc=statistics.mean(values), scale=stats.sem(values))
    rounding = (0.005 + 1e-9) * stats.sem(values)                                          # quantiles have two decimals
    centre, half = figures.interval(values)
    assert abs(centre - half - low) <= rounding and abs(centre + half - high) <= rounding
    assert figures.student(values) == (centre - half, centre + half)


def test_seeds_of_an_attack_are_pooled_and_settings_are_not():
    def at(method, epsilon, seed, auc, hits):
        return {"data": "e2e", "method": method, "target_epsilon": epsilon, "seed": seed, "allowed": {"auc": 0.8 + seed / 100},
                "exposure": [float(seed)] * 2, "recall": {"hits": hits, "trials": 10, "interval": [0.0, 1.0]},
                "membership": {"auc": auc, "standard_error": 0.03, "true_positives": {}}}
    records = [at("Full", 2.0, 0, 0.5, 1), at("Full", 2.0, 1, 0.7, 2), at("Full", 8.0, 0, 0.9, 3), at("LoRA", 2.0, 0, 0.8, 4)]
    whole = {(its["method"], its["target_epsilon"]): its for its in drawings.pooled_attacks(records)}
    assert {key: its["seeds"] for key, its in whole.items()} == {("Full", 2.0): 2, ("Full", 8.0): 1, ("LoRA", 2.0): 1}
    both = whole["Full", 2.0]
    assert both["membership"]["auc"] == pytest.approx(0.6) and both["membership"]["standard_error"] == pytest.approx(0.03 / 2**0.5)
    assert both["recall"]["hits"] == 3 and both["recall"]["trials"] == 20 and both["allowed"] == {"auc": 0.81}
    low, high = both["recall"]["interval"]
    assert low == pytest.approx(0.0321, abs=1e-3) and high == pytest.approx(0.3789, abs=1e-3)
    assert both["exposure"] == [0.0, 0.0, 1.0, 1.0] and records[0]["exposure"] == [0.0, 0.0]


def test_full_and_reduced_runs_are_never_in_one_picture(results):
    some = Drawing("", figures.text_tradeoff, ("frost-text",), ("methods-text",))
    assert {e["reduced"] for e in standing_on(some)} == {True}
    write_records(results / "methods-text.jsonl", [{**e, "reduced": False} for e in RECORDS["methods-text"]])
    assert {e["reduced"] for e in standing_on(some)} == {False}


@pytest.mark.parametrize("there", [False, True], ids=["CPU", "GPU"])
def test_a_figure_of_the_gpu_shows_what_there_is_and_says_on_what(results, tmp_path, there):
    card = {"reduced": False, "model": "larger"}
    if there:
        write_records(results / "gpu-figures.jsonl", [
            *grid("gpu-figures", budgets=(2.0,), data="cifar10", **card, device="NVIDIA H200"),
            moved("gpu-figures", "NVIDIA H200", **card), turned("gpu-figures", "NVIDIA H200", 1.0, **card),
            entry("gpu-figures", "Full", 8.0, 0, data="sst2", **card) | {"metrics": {}, "cannot": "RuntimeError: no memory"}])
    names = ("pwcca", "angles", "utility")
    said = list(redraw({name: FIGURES[name] for name in names}, tmp_path))
    for name, sentence in zip(names, said, strict=True):
        figure = FIGURES[name].draw(standing_on(FIGURES[name]))
        titles = [axis.get_title().splitlines()[-1] for axis in figure.axes if axis.get_title()]
        assert titles == (["NVIDIA H200"] if there else ["CPU" if name == "utility" else "CPU, 1 thread"])
        assert titles[0] in sentence
        assert all(axis.get_lines() for axis in figure.axes)
        plt.close(figure)
    (strength, *_), (angle, *_) = (axis.get_lines()[1:] for axis in FIGURES["angles"].draw(standing_on(FIGURES["angles"])).axes)
    assert list(strength.get_ydata()) == pytest.approx([1.2, 1.2])
    assert list(angle.get_ydata()) == pytest.approx([math.degrees(1 / 1.2 - 1)] * 2)
    plt.close("all")
