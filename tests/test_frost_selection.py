"""PSEL without a model, DP-FROST with one: what is chosen, what it costs, what moves, and what is refused."""

import copy
import json
import math
import warnings

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification
from zoo import toy

from dpft.baselines import admitted
from dpft.engine import Engine
from dpft.frost import DPFrost, EntrySelection, paper_settings, partitions, select, sensitivity
from dpft.frost.entries import entry_magnitudes
from dpft.frost.selection import check_fits, freezing_threshold, released, take
from dpft.gradients import Partition, per_example_gradients
from dpft.loop import fine_tune
from dpft.method import Context, Method
from dpft.models import load_model
from dpft.tasks import load_data


def invented(sizes):
    return [Partition(str(i), (nn.Parameter(torch.empty(size, device="meta")),)) for i, size in enumerate(sizes)]


def watcher(true, sigma=0.0, seed=0, seen=None):
    generator = torch.Generator().manual_seed(seed)
    def observe(asked, delta):
        numbers = [int(part.name) for part in asked]
        if seen is not None:
            seen.append((numbers, delta))
        return torch.tensor([true[i] for i in numbers]).double() + sigma * delta * torch.randn(len(asked), generator=generator).double()
    return observe


# The pieces of PSEL

def test_the_threshold_is_the_largest_of_what_would_stay_frozen():
    assert freezing_threshold([3.0, 1.0, 2.0], [10, 10, 10], 15) == 2.0
    assert freezing_threshold([3.0, 1.0, 2.0], [10, 10, 10], 0) == 1.0
    assert freezing_threshold([3.0, 1.0], [1, 2], 3 * (1 + 1e-15)) == 3.0


def test_a_misfit_is_skipped_and_not_stopped_at():
    assert take([9.0, 5.0, 4.0, 1.0], [80, 20, 20, 5], [-math.inf] * 4, 30) == [1, 3]
    assert take([9.0, 5.0], [80, 90], [-math.inf] * 2, 30) == []
    assert take([9.0, 5.0, 4.0], [1, 1, 1], [6.0] * 3, 30) == [0]                # the gap test fails for the rest, and the index stays


selections = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=15), st.sampled_from([0.03, 0.25, 0.5, 0.9, 1.0]),
                       st.integers(1, 6), st.sampled_from([0.0, 0.3, 5.0]), st.integers(0, 2**20))


@given(case=selections)
@settings(max_examples=80)
def test_every_selection_keeps_the_rules(case):
    sizes, ratio, rounds, sigma, seed = case
    true = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()
    seen: list = []
    found = select(invented(sizes), watcher(true, sigma, seed, seen), ratio, sigma, rounds, 0.5)
    total, held, gone = sum(sizes), 0, set()
    assert len(found.rounds) == len(seen) == rounds and len(set(found.numbers)) == len(found.numbers)
    for t, (past, (asked, delta)) in enumerate(zip(found.rounds, seen, strict=True), 1):
        assert asked == [i for i in range(len(sizes)) if i not in gone]
        assert delta == past.sensitivity == sensitivity([sizes[i] for i in asked])   # of those that remain
        assert past.noisy.isnan().tolist() == [i in gone for i in range(len(sizes))]
        held, gone = held + sum(sizes[i] for i in past.chosen), gone | set(past.chosen)
        assert held <= past.allowance <= ratio * t / rounds * total + 1e-6
        if t < rounds:
            assert all(past.values[i] > past.threshold + 5.0 * past.std[i] - 1e-9 for i in past.chosen)
    left = [sizes[i] for i in range(len(sizes)) if i not in gone]
    assert not left or min(left) > admitted(ratio, total) - held                     # the last round leaves no room for any
    json.dumps(found.record(), allow_nan=False)


def test_without_noise_the_largest_are_chosen_and_rounds_do_not_matter():
    true = [3.0, 9.0, 1.0, 8.0, 2.0]
    for rounds in (1, 2, 5):
        assert sorted(select(invented([10] * 5), watcher(true), 0.4, 0.0, rounds, 1.0).numbers) == [1, 3]


def test_what_stands_out_is_chosen_early_and_measured_no_more():
    found = select(invented([10] * 10), watcher([50.0, 40.0] + [1.0] * 8, 0.5), 0.4, 0.5, 2, 1.0, clip=10.0)
    assert found.rounds[0].chosen == [0, 1] and len(found.numbers) == 4
    assert found.rounds[1].noisy[:2].isnan().all() and found.thresholds == [past.threshold for past in found.rounds]
    assert found.size == 40 and [part.name for part in found.chosen][:2] == ["0", "1"]


@pytest.mark.parametrize("bad,told", [({"ratio": 0.0}, "ratio=0.0"), ({"ratio": 1.1}, "ratio=1.1"), ({"rounds": 0}, "rounds=0"),
                                      ({"sample_rate": 0.0}, "sample_rate=0.0"), ({"sample_rate": 1.5}, "sample_rate=1.5"),
                                      ({"gap": -1.0}, "gap=-1.0"), ({"ratio": math.nan}, "ratio=nan")])
def test_settings_out_of_range_are_refused_everywhere(bad, told):
    arguments = {"ratio": 0.5, "rounds": 2, "sample_rate": 0.5, "gap": 5.0, **bad}
    with pytest.raises(ValueError, match=told):
        DPFrost(**arguments)
    with pytest.raises(ValueError, match=told):
        select(invented([1, 2]), watcher([1.0, 2.0]), **arguments)
    if "rounds" not in bad and "gap" not in bad:
        with pytest.raises(ValueError, match=told):
            EntrySelection(arguments["ratio"], arguments["sample_rate"])


def test_other_bad_settings_are_refused():
    for bad in ({"reselect": 0}, {"kind": "x"}, {"order": 3}, {"clip": -1.0}):
        (name, value), = bad.items()
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            DPFrost(0.5, **bad)
    with pytest.raises(ValueError, match="no settings for 'mars'"):
        paper_settings("mars", 10)


def test_the_papers_settings():
    assert paper_settings("sst2", 67_349) == {"batch_size": 1024, "epochs": 3, "delta": 0.5 / 67_349, "clip": 0.1,
                                               "accountant": "rdp", "optimizer": "adamw"}
    assert paper_settings("cifar100", 50_000)["batch_size"] == 1000


# With a model

def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(),
                         nn.Linear(6, 3))


SETTINGS = dict(batch_size=30, steps=4, clip=0.5, seed=0, accountant="rdp", delta=1e-3)


def engine(method, model=None, **changes):
    settings = {"epsilon": 3.0, **SETTINGS, **changes}
    return Engine(model or net(), zoo.image_loss, method, toy(120), **settings)


def tune(method, model=None, **changes):
    changes = {"epsilon": 3.0, "progress": False, "loss_fn": zoo.image_loss, **SETTINGS, **changes}
    return fine_tune(model or net(), toy(120), method, **changes)


@pytest.mark.parametrize("method,rounds", [(DPFrost(0.4, sample_rate=0.5), 5), (DPFrost(0.4, sample_rate=0.5, rounds=1), 1),
                                           (DPFrost(0.4, sample_rate=0.5, kind="mgn", order=2), 5), (EntrySelection(0.4, 0.5), 1)])
def test_the_budget_is_met_and_the_ledger_has_every_round(method, rounds):
    run = tune(method, weight_decay=0.1)
    assert [(m.name, m.steps) for m in run.mechanisms] == [("train", 4), ("select", rounds)]
    assert 3.0 - 0.01 <= run.epsilon <= 3.0
    assert run.guarantee.planned == run.mechanisms


@pytest.mark.parametrize("way", [dict(), dict(kind="mg"), dict(order=2, clip_order=2), dict(rounds=1), dict(clip_order=2)])
def test_what_was_chosen_moves_with_the_head_and_nothing_else(way):
    before, method = net(), DPFrost(0.4, sample_rate=0.5, **way)
    run = tune(method, copy.deepcopy(before), weight_decay=0.1)
    names = {id(p): name for name, p in run.model.named_parameters()}
    chosen = {names[id(p)] for part in method.selection.chosen for p in part.parameters}
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert chosen and moved == chosen | {"7.weight", "7.bias"} == set(run.trained)
    total = sum(part.size for part in method.selection.partitions)
    assert method.selection.size <= 0.4 * total and total == sum(p.numel() for p in before[:7].parameters())


def test_the_released_magnitudes_hide_under_noise_of_the_remaining_sensitivity(monkeypatch):
    released_with: list[float] = []
    original = Context.release
    def watch(self, total, bound, summed=False):
        released_with.append(bound)
        return original(self, total, bound, summed)
    monkeypatch.setattr(Context, "release", watch)
    method = DPFrost(0.4, sample_rate=1.0, gap=0.0)
    engine(method, epsilon=50.0)
    past = method.selection.rounds
    assert released_with == [one.sensitivity for one in past] and len(set(released_with)) > 1


def test_the_noise_of_a_round_has_the_stated_deviation():
    draws, deep = [], nn.Sequential(nn.Flatten(), nn.Linear(16, 4), *(nn.Linear(4, 4) for _ in range(60)), nn.Linear(4, 3))
    for seed in range(8):
        method = DPFrost(0.9, sample_rate=1e-6, rounds=5)                        # draws are empty: what is released is noise
        sigma = engine(method, copy.deepcopy(deep), seed=seed).plan.mechanisms[1].noise_multiplier
        draws += [values / (sigma * past.sensitivity) for past in method.selection.rounds
                  for values in past.noisy[~past.noisy.isnan()].tolist()]
    draws, n = torch.tensor(draws), len(draws)                                   # standard normal numbers
    assert n >= 1600
    assert abs(draws.std() - 1) < 5.5 / math.sqrt(2 * n) and abs(draws.mean()) < 5.5 / math.sqrt(n)   # 5.5 standard errors: 4e-8 each


def test_empty_draws_give_noise_and_no_crash():
    for method in (DPFrost(0.4, sample_rate=1e-6), DPFrost(0.4, sample_rate=1e-6, kind="mg", order=2), EntrySelection(0.4, 1e-6)):
        assert tune(method).epsilon <= 3.0


def test_without_privacy_the_choice_is_by_the_magnitudes_themselves():
    method = DPFrost(0.4, sample_rate=1.0, rounds=1)
    run = tune(method, epsilon=math.inf)
    values = method.selection.rounds[0].values
    assert run.epsilon == math.inf and not run.mechanisms and (method.selection.rounds[0].std == 0).all()
    assert values.argmax().item() in method.selection.numbers or method.selection.partitions[values.argmax()].size > method.selection.size


def test_the_same_seed_chooses_the_same():
    records = []
    for _ in range(2):
        method = DPFrost(0.4, sample_rate=0.5)
        engine(method)
        records.append(method.selection.record())
    assert records[0] == records[1]


def test_dropout_does_not_reach_the_selection_and_modes_stay():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))
    seen = []
    def loss_fn(model, batch):
        seen.append(model[2].training)
        return zoo.image_loss(model, batch)
    Engine(model, loss_fn, DPFrost(0.9, sample_rate=1.0, rounds=1), toy(120), epsilon=3.0, check=False, **SETTINGS)
    assert seen and not any(seen) and model.training


def test_gradients_that_are_not_finite_add_nothing_and_the_run_goes_on():
    class Spiky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(mask)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            mask, = ctx.saved_tensors
            return gradient.masked_fill(mask[:, None], math.inf), None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.bad, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            rows = x.flatten(1)
            return self.head(torch.tanh(self.body(rows)) + Spiky.apply(self.bad(rows[:, :8]), rows[:, 0] > 1.5))

    torch.manual_seed(0)
    model = Model()
    bad = toy(120).batch(range(120))[0].flatten(1)[:, 0] > 1.5
    assert 10 < bad.sum() < 110
    method = DPFrost(0.7, sample_rate=1.0, rounds=2)
    run = tune(method, model)
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert all(past.noisy[~past.noisy.isnan()].isfinite().all() for past in method.selection.rounds)


def test_a_model_with_a_single_partition():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))
    method = DPFrost(1.0, sample_rate=0.5)
    tune(method, model)
    assert [part.name for part in method.selection.chosen] == ["1"]
    with pytest.raises(ValueError, match=r"no partition is that small; these would fit: 1 .85 entries. from ratio=1 on"):
        engine(DPFrost(0.5), nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3)))
    with pytest.raises(ValueError, match="no partition outside its head; choose LastLayer"):
        engine(DPFrost(0.5), nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))


def test_a_refused_run_has_spent_nothing(tmp_path):
    from dpft.ledger import Ledger
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(ValueError, match="these would fit"):
        engine(DPFrost(0.001), ledger=ledger)
    assert not ledger.runs()


def test_a_small_ratio_says_what_fits_and_what_ratio_admits_more():
    with torch.device("meta"):
        roberta = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1))
    pieces = partitions(roberta)
    with pytest.warns(UserWarning, match=r"only 27 of 100 partitions.*0.3%.*query \(590,592 entries\) from ratio=0.004761"):
        check_fits(pieces, 0.25**4)
    for ratio in (0.25, 0.25**2, 0.25**3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_fits(pieces, ratio)
    smallest = min(part.size for part in pieces)
    with pytest.raises(ValueError, match=r"token_type_embeddings .768 entries. from ratio=7e-06"):
        check_fits(pieces, (smallest - 1) / 124_055_040)
    check_fits(pieces, 1.0)


# Selecting again

def loop(e, rebuild):
    optimizer = torch.optim.SGD(e.parameters(), 0.1)
    chosen = []
    for step in e:
        if rebuild:
            optimizer = torch.optim.SGD(e.parameters(), 0.1)
        for batch in step:
            step.add(batch)
        step.privatize()
        optimizer.step()
        step.done()
        chosen.append(set(e.trains))
    return chosen


def test_reselection_follows_the_papers_times_and_is_paid_for():
    seen = set()
    for seed in range(24):                                                       # chosen by noise alone: a choice stays with chance 1/2
        e = engine(DPFrost(0.4, sample_rate=1e-6, rounds=2, reselect=3), steps=7, seed=seed)
        chosen = loop(e, rebuild=True)
        changes = {t for t in range(1, 7) if chosen[t] != chosen[t - 1]}
        assert changes <= {2, 4}
        assert [(m.name, m.steps) for m in e.spent] == [("train", 7), ("select", 6)] and e.guarantee.epsilon() <= 3.0
        if (seen := seen | changes) == {2, 4}:
            break
    assert seen == {2, 4}


def test_an_optimizer_without_the_new_selection_is_noticed():
    with pytest.raises(ValueError, match="optimizer does not hold"):
        for seed in range(24):                                                   # until a second selection differs, each with chance 1/2
            loop(engine(DPFrost(0.4, sample_rate=1e-6, rounds=1, reselect=2), seed=seed), rebuild=False)


def test_more_selections_than_steps_are_refused():
    with pytest.raises(ValueError, match="reselect=9 selections do not fit into 4 steps"):
        engine(DPFrost(0.4, reselect=9))


def test_a_resumed_run_selects_the_same_and_pays_once(tmp_path):
    class Stop(Exception):
        pass

    stop_at = [3]

    class Interrupted(DPFrost):
        def step(self, context, t):
            if t in stop_at:
                raise Stop
            super().step(context, t)

    def start():
        method = Interrupted(0.4, sample_rate=0.5)
        return method, lambda: tune(method, checkpoint=tmp_path, seed=5)

    method, go = start()
    with pytest.raises(Stop):
        go()
    first = method.selection.record()
    stop_at.clear()
    method, go = start()
    run = go()
    assert method.selection.record() == first
    assert [(m.name, m.steps) for m in run.mechanisms] == [("train", 4), ("select", 5)] and run.epsilon <= 3.0


# Several processes, single entries, other methods

class Stub:
    "A context of two processes that already agree on a draw."

    def __init__(self, first):
        self.first = first

    def draw(self, rate):
        return iter(())

    def total(self, sums):
        return {name: 2 * value for name, value in sums.items()}

    def release(self, total, bound, summed=False):
        return torch.zeros_like(total) if summed and not self.first else total


@pytest.mark.parametrize("first,additive,counts", [(True, False, 1), (False, False, 0), (True, True, 1), (False, True, 1)])
def test_of_several_processes_a_norm_of_the_whole_counts_once(first, additive, counts):
    found = released(Stub(first), 0.5, lambda batches, reduce: reduce({"x": torch.ones(2)})["x"], 1.0, additive)
    assert found.tolist() == [2.0 * counts] * 2


def test_single_entries_are_measured_by_the_definition():
    model = net().double()
    batch = tuple(part.double() if part.is_floating_point() else part for part in toy(9).batch(range(9)))
    pieces = partitions(model)
    rows = per_example_gradients(model, zoo.image_loss, batch)
    table = torch.cat([rows[name].flatten(1) for name in rows if not name.startswith("7.")], 1)
    for absolute, order in ((True, 1), (True, 2), (False, 1), (False, 2)):
        clipped = table * (0.7 / table.norm(order, dim=1, keepdim=True)).clamp(max=1)
        wanted = (clipped.abs() if absolute else clipped).sum(0).abs()
        found = entry_magnitudes(model, zoo.image_loss, iter([batch]), pieces, absolute, order, 0.7, lambda sums: sums)
        assert torch.allclose(found, wanted, rtol=1e-9)
        without = entry_magnitudes(model, zoo.image_loss, iter([tuple(part[1:] for part in batch)]), pieces, absolute, order, 0.7,
                                   lambda sums: sums)
        assert (found - without).norm() <= 0.7 * (1 + 1e-9)


def test_single_entries_move_and_no_others():
    before, method = net(), EntrySelection(0.25, 0.5)
    run = tune(method, copy.deepcopy(before), weight_decay=0.1, optimizer="adamw")
    moved = [(p != before.get_parameter(name)) for name, p in run.model.named_parameters() if not name.startswith("7.")]
    total = sum(mask.numel() for mask in moved)
    assert sum(int(mask.sum()) for mask in moved) == admitted(0.25, total)
    for name, p in run.model.named_parameters():
        if p in method.masks:
            assert torch.equal(method.masks[p], p != before.get_parameter(name))
    assert not torch.equal(run.model[7].weight, before[7].weight)


def test_selection_needs_a_run_and_a_trace_needs_a_selection():
    method = DPFrost(0.5)
    with pytest.raises(ValueError, match="nothing has been selected yet"):
        _ = method.selection
    with pytest.raises(ValueError, match="needs a run"):
        method.start(Context(net(), zoo.image_loss, 1, 4, 10))
    with pytest.raises(ValueError, match="lets no entry train"):
        EntrySelection(1e-9).start(Context(net(), zoo.image_loss, 1, 4, 10))


def test_a_method_is_described_by_its_settings_alone():
    method, other = DPFrost(0.4, sample_rate=0.5), DPFrost(0.4, sample_rate=0.5)
    engine(method)
    assert repr(method) == repr(other) and "ratio=0.4" in repr(method) and isinstance(method, Method)


def test_among_lora_pairs():
    from peft import LoraConfig, inject_adapter_in_model
    model, loss_fn, batch = zoo.build("roberta", rows=12)
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["query", "value"]), model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or name.startswith("classifier"))
    data, collate = zoo.as_data(batch)
    method = DPFrost(0.5, sample_rate=1.0)
    run = fine_tune(model, data, method, epsilon=3.0, steps=2, batch_size=6, loss_fn=loss_fn, collate_fn=collate, accountant="rdp",
                    delta=0.01, seed=1, progress=False)
    assert len(method.selection.partitions) == 4 and len(method.selection.chosen) == 2
    assert all("lora_" in name or name.startswith("classifier") for name in run.trained) and len(run.trained) == 4 + 4


def test_people_are_the_unit_of_the_selection_too():
    people = torch.arange(120) // 2
    for method in (DPFrost(0.4, sample_rate=0.5), EntrySelection(0.4, 0.5)):
        run = tune(method, unit=people, batch_size=20)
        assert [m.name for m in run.mechanisms] == ["train", "select"] and run.epsilon <= 3.0


def test_fine_tune_reselects_and_trains_what_it_selects():
    task = load_data("digits", limit=200)
    model = load_model("cnn", classes=10, kind="image", image_shape=task.image_shape)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    method = DPFrost(ratio=0.5, rounds=1, sample_rate=0.2, reselect=3)
    run = fine_tune(model, task, method, epsilon=4.0, steps=9, batch_size=40, accountant="rdp", seed=0, progress=False)
    moved = {name for name, value in run.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == set(run.trained) and sum(m.steps for m in run.mechanisms if m.name == "select") == 3
