"""The bench: what it counts is exact, what it refuses is named, and a wrong contender is seen. No test looks at a clock."""

import json
import math
import sys
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpft.book import bench, contenders
from dpft.book.contenders import CONTENDERS, LiveBytes, Setting, WatchedLoss, measure_memory, median_interval
from dpft.gradients import per_example_gradients
from dpft.losses import example_losses

CPU = torch.device("cpu")
TEXT = Setting("text", "encoder", 32, 1, 8, 4, "full", ("plain", "opacus", "opacus-ghost", "dpft"), 2)
IMAGE = replace(TEXT, model="convolutions", width=8, layers=2, size=16, rows=3)


def taking_part(setting, loss=None):
    """Every contender of a setting with its error and reason."""
    loss = loss or WatchedLoss()
    found = list(contenders.enter(setting, setting.build(CPU), loss, CPU))
    return {name: (contender, error, reason) for name, contender, error, reason in found}


# Times


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_an_interval_holds_the_median_and_nothing_that_was_not_seen(values):
    low, high = median_interval(values)
    assert low in values and high in values
    assert sum(value <= high for value in values) * 2 >= len(values) <= sum(value >= low for value in values) * 2


def test_everybody_takes_as_many_turns_and_begins_as_often():
    order = []
    them = {name: contenders.Contender(nn.Identity(), lambda batch, name=name: order.append(name) or {}) for name in "abc"}
    seconds = contenders.interleaved(them, (), repeats=6, warm=3)
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 6)
    rounds = [order[i:i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 9 and all(sorted(turn) == list("abc") for turn in rounds)
    assert {first: sum(turn[0] == first for turn in rounds) for first in "abc"} == dict.fromkeys("abc", 3)


# Bytes


def test_storages_are_counted_once_and_taken_off_when_freed():
    given_before = torch.ones(1000)
    with LiveBytes() as count:
        first = torch.ones(100)
        assert count.now == 400
        view, same = first[:50], first.add_(1)
        assert count.now == 400
        second = first + 1
        assert (count.now, count.peak) == (800, 800)
        del first, view, same
        assert (count.now, count.peak) == (400, 800)
        given_before.mul_(2)
        kept = given_before.t()
        assert count.now == 400
        del second, kept
    assert (count.now, count.peak) == (0, 800)


@pytest.mark.parametrize("setting", [TEXT, replace(IMAGE, trains="biases")], ids=["text", "image-biases"])
def test_a_private_step_holds_what_a_plain_one_holds(setting):
    loss, batch = WatchedLoss(), setting.batch(setting.rows, CPU)
    found = {name: measure_memory(contender, loss, batch, CPU)
             for name, (contender, _, _) in taking_part(replace(setting, who=("plain", "dpft")), loss).items()}
    again = measure_memory(taking_part(replace(setting, who=("dpft",)), loss)["dpft"][0], loss, batch, CPU)
    assert again == found["dpft"], "the count is the same on every run"
    assert found["dpft"].held <= 1.02 * found["plain"].held
    model = setting.build(CPU)
    assert found["plain"].after == sum(p.nbytes for p in model.parameters() if p.requires_grad)


# Right answers


@pytest.mark.parametrize("trains", ["biases", "full"])
@pytest.mark.parametrize("setting", [TEXT, IMAGE], ids=["text", "image"])
def test_all_contenders_agree_with_the_oracle(setting, trains):
    for name, (_, error, reason) in taking_part(replace(setting, trains=trains)).items():
        assert not reason and error < 1e-4, name


@pytest.mark.parametrize("setting", bench.plan("peers", True)[1:], ids=lambda setting: f"{setting.model}-{setting.trains}")
def test_whole_steps_move_the_model_and_are_timed_beside_a_plain_one(setting):
    setting = replace(setting, who=("plain-step", "dpft-step", "opacus-step"), repeats=1)
    entries = {entry["who"]: entry for entry in bench.measure(setting, CPU)}
    tied = setting.model == "gpt2" and setting.trains == "full"
    assert bool(entries["opacus-step"]["cannot"]) == tied
    assert not entries["plain-step"]["cannot"] and not entries["dpft-step"]["cannot"]
    assert entries["plain-step"]["time_ratio"] == 1 and entries["dpft-step"]["seconds"] > 0
    model, batch = setting.build(CPU), setting.batch(3, CPU)
    before = [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]
    contenders.dpft_step(model, WatchedLoss()).step(batch)
    now = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert not any(map(torch.equal, before, now))             # of a sum of zero, too: noise moves it


def test_a_step_of_eight_physical_batches_is_the_step_of_the_whole_batch():
    "Float32 gradients of 16 rows, added up in another order: a few hundred roundings of 6e-8."
    *_, setting = bench.plan("peers", True)
    assert setting.part == "eighths" and setting.who == ("plain-eighths", "dpft-eighths")
    models = [setting.build(CPU) for _ in range(2)]
    for model, parts in zip(models, (1, 8), strict=True):
        contenders.plain_step(model, WatchedLoss(), parts).step(setting.batch(setting.rows, CPU))
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    first, second = bench.measure(replace(setting, repeats=1), CPU)
    assert not first["cannot"] and not second["cannot"] and second["time_ratio"] > 0


def whole(who, trains, ratio, *, part="peers", width=384, cannot=""):
    return {"part": part, "model": "encoder", "width": width, "layers": 4, "size": 128, "rows": 8, "trains": trains, "who": who,
            "parameters": 1000, "seconds": ratio, "time_ratio": ratio, "time_interval": [0.9 * ratio, 1.1 * ratio], "peak_mib": 1.0,
            "peak_ratio": ratio, "cannot": cannot}


WHOLE_STEPS = [whole("plain-step", "biases", 1.0), whole("dpft", "biases", 1.01), whole("dpft-step", "biases", 1.04),
               whole("fastdp-step", "biases", 0.0, cannot="AttributeError: no head mask, none"),
               whole("plain-step", "full", 1.0, width=768), whole("dpft-step", "full", 1.2, width=768),
               whole("plain-eighths", "full", 1.0, part="eighths"), whole("dpft-eighths", "full", 1.16, part="eighths")]


def test_whole_steps_are_judged_by_their_bounds():
    judged = [(value, bound, met) for _, value, bound, met in bench.judged_peers(WHOLE_STEPS)]
    assert judged == [(1.04, 1.03, False), (1.04, 1.2, True), (1.2, 1.25, True), (1.2, 1.2, True), (1.16, 1.15, False), (1.16, 1.2, True)]
    assert bench.marks_table(bench.judged_peers(WHOLE_STEPS)).count("missed") == 2


def test_what_a_number_costs():
    found = list(bench.measure_numbers(1000, 3, CPU))
    assert [e["who"] for e in found] == ["torch.randn", "update", "noise", "secure noise"]
    assert all(0 < e["interval"][0] <= e["nanoseconds"] <= e["interval"][1] for e in found)
    assert "secure noise" in bench.bench_report(found)


def test_what_a_peer_cannot_do_is_said():
    found = taking_part(replace(TEXT, model="gpt2"))
    assert "Parameter tying is not supported" in found["opacus-ghost"][2] and found["opacus"][2].startswith("RuntimeError")
    assert not found["plain"][2] and not found["dpft"][2]
    entries = list(bench.measure(replace(TEXT, model="gpt2"), CPU))
    assert [entry["who"] for entry in entries if entry["cannot"]] == ["opacus", "opacus-ghost"]
    assert bench.bench_report(entries).count("RuntimeError") >= 1


@pytest.mark.parametrize("spoil", ["scale", "missing", "unclipped", "nan"])
def test_a_wrong_contender_is_seen(spoil, monkeypatch):
    right = CONTENDERS["dpft"]
    def wrong(model, loss):
        contender = right(model, loss)
        def step(batch):
            sums = contender.step(batch)
            name = max(sums, key=lambda key: sums[key].norm())
            if spoil == "unclipped":
                return {key: sum(values) for key, values in per_example_gradients(model, example_losses, batch).items()}
            if spoil == "missing":
                return {key: values for key, values in sums.items() if key != name}
            return sums | {name: sums[name] * (1.01 if spoil == "scale" else math.nan)}
        return contenders.Contender(model, step)
    monkeypatch.setitem(bench.CONTENDERS, "dpft", wrong)
    entries = list(bench.measure(replace(TEXT, who=("plain", "dpft")), CPU))
    assert "its sum is wrong" in entries[1]["cannot"] and "time_ratio" not in entries[1] and not entries[0]["cannot"]
    json.dumps(entries, allow_nan=False)


def test_fastdp_takes_part_where_it_is_installed(monkeypatch):
    def engine(model, **settings):
        """A stand-in that leaves clipped sums where FastDP leaves them, by its documentation."""
        assert settings["max_grad_norm"] == contenders.CLIP and settings["noise_multiplier"] == 0
        model.stand_in = True
    module = types.ModuleType("fastDP")
    module.PrivacyEngine = engine
    module.__spec__ = types.SimpleNamespace(name="fastDP")
    monkeypatch.setitem(sys.modules, "fastDP", module)
    setting = replace(TEXT, who=("plain", "fastdp"))
    loss, model = WatchedLoss(), setting.build(CPU)
    contender = CONTENDERS["fastdp"](model, loss)
    assert model.stand_in and contender.step(setting.batch(2, CPU)) == {}
    entries = list(bench.run_bench([setting], CPU))          # the stand-in sums nothing, so it is wrong, and said to be
    assert [entry["who"] for entry in entries] == ["plain", "fastdp"] and "wrong by 100.0%" in entries[1]["cannot"]


def test_who_is_not_installed_is_said_once(monkeypatch):
    monkeypatch.setattr(bench, "library", lambda who: "surely_not_installed" if who == "fastdp" else "torch")
    entries = list(bench.run_bench([replace(TEXT, who=("plain", "fastdp"), trains=which) for which in bench.TRAINS], CPU))
    assert [entry["who"] for entry in entries] == ["fastdp", *["plain"] * len(bench.TRAINS)]
    assert "surely_not_installed is not installed" in bench.bench_report(entries)


# Settings, records, tables, figures


@pytest.mark.parametrize("setting", bench.plan("gpu", True), ids=lambda setting: f"{setting.model}-{setting.trains}-{setting.precision}")
def test_the_questions_for_a_gpu_at_tiny_shapes(setting):
    found = list(bench.run_bench([setting], CPU))
    assert [(entry["who"], entry["cannot"]) for entry in found] == [(who, "") for who in setting.who]
    assert all(entry["share_of_rate"] > 0 and entry["matrix_rate"] > 0 for entry in found)


def test_the_gpu_questions_have_the_shapes_of_the_marks():
    large, lora, *bases = bench.plan("gpu")                                # the largest first
    assert lora == replace(large, trains="lora")
    assert all((base.width, base.layers, base.size) == (768, 12, 256) for base in bases)
    assert [base.precision for base in bases] == ["bf16", "bf16", None, None]
    assert sum(setting.limit for setting in (large, lora, *bases)) <= 480
    with torch.device("meta"):
        parameters = sum(p.numel() for p in contenders.MODELS[large.model](large.width, large.layers, large.size).parameters())
        assert 6.5e9 < parameters < 7.5e9
        assert sum(p.numel() for p in contenders.encoder(768, 12, 512).parameters()) == pytest.approx(125e6, rel=0.01)
        half = bench.plan("llama")[0]
        assert sum(p.numel() for p in contenders.llama(half.width, half.layers, half.size).parameters()) == pytest.approx(5e8, rel=0.01)


def test_a_private_step_of_a_llama_needs_little_more_than_a_plain_one(run, tmp_path):
    status, said, err = run("bench", "--llama", "--quick", "--output", tmp_path)
    entries = [json.loads(line) for line in (tmp_path / "costs-llama.jsonl").read_text(encoding="utf-8").splitlines()]
    assert status == 0 and {(entry["trains"], entry["who"], entry["cannot"]) for entry in entries} == {
        (which, who, "") for which in ("biases", "lora") for who in ("plain-step", "dpft-step")}, (said, err)


def test_a_part_that_fails_or_is_slow_takes_nothing_from_those_after_it(run, tmp_path, monkeypatch):
    slow, broken, right = (replace(setting, who=("plain", "dpft"), repeats=1, limit=limit)
                           for setting, limit in zip(bench.plan("gpu", True), (0.05, 100.0, 100.0), strict=False))
    monkeypatch.setattr(bench, "plan", lambda part, quick: [slow, replace(broken, model="no such model"), right])
    status, said, err = run("bench", "--gpu", "--quick", "--output", tmp_path)
    late, failed, *others = [json.loads(line) for line in (tmp_path / "costs-gpu.jsonl").read_text(encoding="utf-8").splitlines()]
    assert status == 0 and "not done after 0.05 s" in late["cannot"] and "no such model" in failed["cannot"] and "KeyError" in said, err
    assert [(entry["who"], entry["cannot"]) for entry in others] == [("plain", ""), ("dpft", "")], others
    seconds = contenders.interleaved({"a": contenders.Contender(nn.Identity(), lambda batch: {})}, (), repeats=9, most=0.0)
    assert len(seconds["a"]) == 3                                          # as few as give a median


# Fixed time


def test_the_fixed_time_of_a_step_is_measured_on_every_shape_and_recorded(run, tmp_path, monkeypatch):
    scripts = []
    inside = types.SimpleNamespace(run=lambda command, **_: scripts.append(command[2]) or exec(command[2], {}))
    monkeypatch.setattr(bench, "subprocess", inside)                               # in this process, which has imported all
    status, out, err = run("bench", "--overhead", "--quick", "--output", tmp_path)
    assert status == 0, err
    (record,) = [json.loads(line) for line in (tmp_path / "costs-overhead.jsonl").read_text(encoding="utf-8").splitlines()]
    values = {(row["shape"], row["what"]): row["value"] for row in record["rows"]}
    assert all(math.isfinite(value) for value in values.values()) and len(values) == len(record["rows"])
    asked = {("full", "Engine / plain"), ("biases", "Engine / plain"), ("biases", "clipped_sum alone / plain"),
             ("biases", "first step / plain"), ("full", "making the Engine / plain"), ("8", "default physical batch / plain"),
             ("lora", "Engine / plain"), ("lora", "Opacus / plain"), ("lora, parts", "private step: norms / plain"),
             ("full, parts", "private step: noise / plain"), ("biases, parts", "plain step: optimizer / plain"),
             ("8", "a ledger file's commit, wall time"), ("8", "import and 1 private steps"), ("frozen", "with features / full step")}
    assert all(any(shape.endswith(end) and what == known for shape, known in values) for end, what in asked)
    assert all(row["what"] in out for row in record["rows"]) and len(scripts) == 2


def test_each_part_of_a_step_has_its_own_time_and_afterwards_all_is_as_before(monkeypatch):
    owner, now = types.SimpleNamespace(), [0.0]
    def inner():
        now[0] += 2.0
    def outer():
        now[0] += 1.0
        owner.inner()
        owner.inner()
    owner.inner, owner.outer = inner, outer
    monkeypatch.setattr(bench, "parts_of_a_step", lambda: [("inside", owner, "inner"), ("outside", owner, "outer")])
    monkeypatch.setattr(bench.time, "process_time", lambda: now[0])
    spent = {}
    with bench.parted(spent):
        owner.outer()
        owner.inner()
    assert spent == {"outside": 1.0, "inside": 6.0} and (owner.inner, owner.outer) == (inner, outer)


def test_a_mark_of_fixed_time_is_met_or_missed_by_its_shape():
    rows = [{"shape": f"encoder, 12 × 32, {trains}", "what": "Engine / plain", "value": 1.6, "unit": ""} for trains in ("full", "biases")]
    full, biases = bench.overhead_table({"rows": rows}).splitlines()[2:]
    assert "1.8 | met" in full and "1.5 | missed" in biases


def test_the_command_writes_records_a_table_and_figures(run, monkeypatch, tmp_path):
    settings = [replace(its, who=("plain", "opacus", "dpft"), repeats=1) for its in
                (replace(TEXT, trains="biases"), replace(TEXT, size=16, trains="biases"), replace(IMAGE, part="images", trains="biases"))]
    monkeypatch.setattr(bench, "plan", lambda part, quick: settings)
    status, said, err = run("bench", "--quick", "--output", tmp_path)
    found = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    assert status == 0 and "held_ratio" in said and len(found) == 9, err
    for entry in found:
        assert {"device", "threads", "processor", "versions", "made", "seconds", "time_ratio", "time_interval", "peak_mib", "held_ratio",
                "after_mib", "error", "rows", "repeats"} <= entry.keys()
    plain, *lines = bench.cost_figure(found).axes[0].get_lines()
    assert set(plain.get_ydata()) == {1} and [line.get_label() for line in lines] == ["opacus", "dpft"]
    expected = sorted((e["size"], e["time_ratio"]) for e in found if (e["part"], e["who"]) == ("text", "dpft"))
    assert list(zip(*lines[-1].get_data(), strict=True)) == expected
    bench.cost_figure([entry for entry in found if entry["part"] != "images"])     # nothing measured there: no panels, no error


def test_a_contender_that_fails_on_the_whole_batch_has_a_row_with_the_reason(monkeypatch):
    def greedy(model, loss):
        inner = contenders.dpft(model, loss)
        def step(batch):
            if len(batch["labels"]) > 3:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return inner.step(batch)
        return contenders.Contender(model, step)
    monkeypatch.setitem(CONTENDERS, "dpft", greedy)
    plain, failed = bench.measure(replace(TEXT, who=("plain", "dpft"), repeats=1), CPU)
    assert "can't allocate" in failed["cannot"] and "seconds" not in failed and plain["time_ratio"] == 1
