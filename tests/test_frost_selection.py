"""PSEL without a model, DP-FROST with one: what is chosen, what it costs, what moves, and what is refused."""

import copy
import math

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo import toy

from dpft.baselines import admitted
from dpft.engine import Engine
from dpft.frost import DPFrost, EntrySelection, partitions, select, sensitivity
from dpft.frost.entries import entry_magnitudes
from dpft.frost.selection import freezing_threshold, take
from dpft.gradients import Partition, per_example_gradients
from dpft.loop import fine_tune
from dpft.method import Context


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


def test_without_noise_the_largest_are_chosen_and_rounds_do_not_matter():
    true = [3.0, 9.0, 1.0, 8.0, 2.0]
    for rounds in (1, 2, 5):
        assert sorted(select(invented([10] * 5), watcher(true), 0.4, 0.0, rounds, 1.0).numbers) == [1, 3]


def test_what_stands_out_is_chosen_early_and_measured_no_more():
    found = select(invented([10] * 10), watcher([50.0, 40.0] + [1.0] * 8, 0.5), 0.4, 0.5, 2, 1.0, clip=10.0)
    assert found.rounds[0].chosen == [0, 1] and len(found.numbers) == 4
    assert found.rounds[1].noisy[:2].isnan().all()
    assert found.size == 40 and [part.name for part in found.chosen][:2] == ["0", "1"]


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
    first = method.selection.numbers
    stop_at.clear()
    method, go = start()
    run = go()
    assert method.selection.numbers == first
    assert [(m.name, m.steps) for m in run.mechanisms] == [("train", 4), ("select", 5)] and run.epsilon <= 3.0


# Single entries

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


def test_people_are_the_unit_of_the_selection_too():
    people = torch.arange(120) // 2
    for method in (DPFrost(0.4, sample_rate=0.5), EntrySelection(0.4, 0.5)):
        run = tune(method, unit=people, batch_size=20)
        assert [m.name for m in run.mechanisms] == ["train", "select"] and run.epsilon <= 3.0


def test_a_selection_whose_step_a_crash_has_lost_is_made_at_the_next_step():
    e = engine(DPFrost(0.4, sample_rate=0.5, rounds=1, reselect=3), steps=9)
    for t, made in ((2, 1), (4, 2), (5, 2), (8, 3)):                             # selections are due at 3 and 6; neither step comes
        e.method.step(e.context, t)
        assert len(e.method.state(e.context)["rounds"]) == made


@pytest.mark.parametrize("make, told", [
    (lambda: DPFrost(0.0), "ratio=0.0"), (lambda: DPFrost(math.nan), "ratio=nan"), (lambda: EntrySelection(1.1), "ratio=1.1"),
    (lambda: DPFrost(0.5, rounds=0), "rounds=0"), (lambda: DPFrost(0.5, reselect=0), "reselect=0"),
    (lambda: DPFrost(0.5, gap=-1.0), "gap=-1.0"), (lambda: DPFrost(0.5, kind="x"), "kind='x'"), (lambda: DPFrost(0.5, order=3), "order=3"),
    (lambda: engine(DPFrost(0.5, sample_rate=1.5)), "sample_rate=1.5"), (lambda: engine(DPFrost(0.5, clip=-1.0)), "clip=-"),
    (lambda: engine(DPFrost(0.4, reselect=9)), "reselect=9 selections do not fit into 4 steps"),
    (lambda: engine(DPFrost(0.001)), "is less than any partition; the smallest, "),
    (lambda: engine(DPFrost(0.5), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), "choose LastLayer"),
    (lambda: engine(EntrySelection(1e-9)), "lets no entry train"), (lambda: DPFrost(0.5).selection, "nothing has been selected yet"),
    (lambda: DPFrost(0.5).start(Context(net(), zoo.image_loss, 1, 4, 10)), "needs a run")])
def test_what_cannot_be_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
