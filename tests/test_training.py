"""The engine and `fine_tune`: noise, sampling, blocks, checkpoints, bad input."""

import copy
import dataclasses
import json
import math
import os
import pickle
import signal
import textwrap
import types
import warnings
from collections import OrderedDict

import fresh
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from streams import one_stream
from torch import nn, tensor
from transformers import TrainerCallback
from zoo import toy

import dpft
from dpft import engine as engine_room
from dpft import identity as identity_room
from dpft import loop
from dpft.auditing import Stopped, stopping
from dpft.datasets import TableData, TensorData
from dpft.gradients import Block, clipped_sum, per_example_gradients
from dpft.guarantee import CHECKED
from dpft.ledger import Ledger, LedgerError
from dpft.loop import progress_is_due
from dpft.losses import perplexity
from dpft.method import Context, Method
from dpft.models import set_modes
from dpft.noise import grid_step, on_grid, secure_std
from dpft.plan import Plan, choice_hash, make_plan, noise_spread, scaled_blocks
from dpft.prepared import as_task, prepare
from dpft.privacy import Request, SampledGaussian, epsilon
from dpft.processes import speaks
from dpft.sampling import Share
from dpft.settings import Settings
from dpft.sources import load_data
from dpft.step import Step
from dpft.store import CheckpointError, Store
from dpft.updates import Average, make_optimizer, make_schedule

NOISE = dict(epsilon=None, noise_multiplier=1.0)  # nothing to solve


def net(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def engine(model=None, method=None, data=None, **settings):
    settings = {"epsilon": 2.0, "batch_size": 20, "steps": 4, "clip": 0.5, "seed": 0, "accountant": "rdp", **settings}
    return dpft.Engine(model or net(), zoo.image_loss, method or dpft.Full(), data or toy(), **settings)


def run_all(e, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(e.parameters(), 0.1)
    for step in e:
        step.take(optimizer)
    return e


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_step_is_the_clipped_sum_plus_noise_over_the_expected_size():
    model = net()
    e = engine(copy.deepcopy(model), noise_multiplier=0.7, epsilon=None)
    step = next(iter(e))
    batches = list(step)
    for batch in batches:
        step.add(batch)
    exact = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in batches:
        for name, value in clipped_sum(model, zoo.image_loss, (x, y), 0.5).items():
            exact[name] += value
    step.privatize()
    noise = torch.cat([(20 * p.grad - exact[name]).flatten() for name, p in e.model.named_parameters()])
    assert abs(noise.std() / (0.7 * 0.5) - 1) < 0.3 and noise.abs().min() > 0


def test_noise_has_the_stated_deviation_and_is_fresh_in_each_step_and_parameter():
    class Zero(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(100, 100), nn.Linear(100, 100)

        def forward(self, x):
            return 0 * self.b(self.a(x.flatten(1)[:, :1].expand(-1, 100)))[:, :3]

    e = engine(Zero(), noise_multiplier=1.3, epsilon=None, steps=3, clip=0.2)
    seen = []
    for step in e:
        for batch in step:
            step.add(batch)
        step.privatize()
        seen += [20 * e.model.a.weight.grad.flatten(), 20 * e.model.b.weight.grad.flatten()]
        step.done()
    noise = torch.stack(seen).double()                       # six draws of 10,000
    variance = (noise / (1.3 * 0.2)).square().mean(1)
    assert ((variance - 1).abs() < 5 * math.sqrt(2 / 10_000)).all()
    correlation = torch.corrcoef(noise) - torch.eye(6, dtype=torch.float64)
    assert correlation.abs().max() < 5 / math.sqrt(10_000)


def test_an_empty_draw_is_a_noise_only_step():
    e = engine(batch_size=1, steps=30, epsilon=None, noise_multiplier=1.0)
    drawn = []
    for step in e:
        count = 0
        for batch in step:
            step.add(batch)
            count += len(batch[1])
        drawn.append(count)
        step.privatize()
        assert all(p.grad.abs().sum() > 0 for p in e.model.parameters())
        step.done()
    assert 0 in drawn and max(drawn) > 1                     # Poisson, not fixed batches
    assert sum(m.steps for m in e.guarantee.mechanisms) == 30


@one_stream()
def test_physical_batches_do_not_change_the_step():
    whole, parts = (run_all(engine(physical_batch_size=size)) for size in (64, 3))
    assert torch.allclose(weights(whole.model), weights(parts.model), atol=0.2)
    grads = []
    for size in (64, 3):
        e = engine(physical_batch_size=size)
        step = next(iter(e))
        for batch in step:
            step.add(batch)
        grads.append(torch.cat([value.flatten() for value in step.sums.values()]))
    assert torch.allclose(*grads, atol=1e-5)


def test_an_example_that_is_not_finite_contributes_nothing_and_is_counted():
    data = toy()
    sums = []
    for value in (math.nan, 1e38):
        data.images[7] = value                               # the second overflows in the norm
        step = next(iter(engine(data=data, batch_size=60)))
        for batch in step:
            step.add(batch)
        sums.append(torch.cat([total.flatten() for total in step.sums.values()]))
        assert step.not_finite == 1
    assert torch.isfinite(sums[0]).all() and torch.allclose(*sums, atol=1e-6)
    run = dpft.fine_tune(net(), data, dpft.Full(), epsilon=3.0, steps=2, batch_size=60, accountant="rdp", show_loss=True)
    assert [entry["not_finite"] for entry in run.history] == [1, 1] and "not finite" in run.report()


def norms_of(model, data):
    "Norms of the examples' gradients by the slow oracle."
    found = per_example_gradients(model, zoo.image_loss, data.batch(range(len(data))))
    return torch.cat([value.flatten(1) for value in found.values()], 1).norm(dim=1)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_the_share_of_clipped_examples_is_kept_where_the_loss_is_shown(clipping):
    norms = norms_of(net(), toy()).sort().values
    clip = ((norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2).item()    # half of them are longer
    run = tune(steps=2, batch_size=len(norms), clip=clip, clipping=clipping, show_loss=True, learning_rate=1e-9)
    assert [entry["clipped"] for entry in run.history] == [0.5, 0.5]
    assert "the share of gradients that were clipped" in run.guarantee.uncharged and "were clipped" in run.report()
    assert [entry["clipped"] for entry in tune(steps=2, clip=1e6, show_loss=True).history] == [0.0, 0.0]
    assert [entry["clipped"] for entry in tune(steps=2, epsilon=math.inf, show_loss=True).history] == [0.0, 0.0]


def test_an_example_that_is_not_finite_is_not_among_the_clipped():
    data = toy()
    data.images[7] = 1e38                                    # its norm overflows
    size = len(data)
    run = tune(data=data, steps=1, batch_size=size, clip=1e-6, show_loss=True)
    assert run.history[0]["not_finite"] == 1 and run.history[0]["clipped"] == pytest.approx((size - 1) / size)


def test_the_share_of_clipped_examples_is_not_counted_unless_it_is_asked_for():
    run = tune()
    assert all("clipped" not in entry for entry in run.history) and "were clipped" not in run.report()
    e = engine()
    step = next(iter(e))
    for batch in step:
        step.add(batch)
    with pytest.raises(ValueError, match="show_loss=True"):
        assert step.clipped
    assert not any("clipped" in what for what in e.guarantee.uncharged)
    shown = dpft.Engine(net(), zoo.image_loss, dpft.Full(), toy(), settings=Settings(
        epsilon=2.0, batch_size=20, steps=4, clip=1e-6, seed=0, accountant="rdp", show_loss=True))
    step = next(iter(shown))
    step.take()
    assert step.clipped == 1.0 and "the share of gradients that were clipped" in shown.guarantee.uncharged


def test_labels_outside_the_models_classes_are_refused():
    data = toy()
    data.labels[3] = 5
    with pytest.raises(ValueError, match=r"^the label of row 3 is no class of the model, which numbers its 3 from 0$"):
        tune(data=data, batch_size=60)
    rows = [(x / 255, y) for x, y in zip(data.images, data.labels, strict=True)]          # whose labels nobody holds together
    with pytest.raises(ValueError, match=r"the label in row \d+ of a batch is outside the 3 classes"):
        tune(data=rows, batch_size=60)


def test_same_seed_same_run_other_seed_other_run_and_no_seed_is_never_the_same():
    a, b, c, d, f = (weights(run_all(engine(seed=s)).model) for s in (0, 0, 1, None, None))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(d, f)


def test_without_privacy_the_step_is_the_plain_gradient():
    model = net()
    e = engine(copy.deepcopy(model), epsilon=math.inf, batch_size=60)
    step = next(iter(e))
    batches = list(step)
    for batch in batches:
        step.add(batch)
    step.privatize()
    loss = sum(zoo.image_loss(model, batch).sum() for batch in batches) / 60
    for p, g in zip(e.model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        assert torch.allclose(p.grad, g, atol=1e-6)
    assert e.guarantee.epsilon() == math.inf


def test_the_plan_meets_the_target_and_the_ledger_agrees_with_it():
    e = run_all(engine(epsilon=1.5))
    assert 1.49 < e.guarantee.epsilon() <= 1.5
    assert e.ledger.finished(e.store.run)
    assert e.ledger.charged() == e.plan.mechanisms


def mixing():
    "BatchNorm in a frozen trunk, with a large row that moves its statistics."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    return model


def whoever_turns_modes(model):
    "What a loop does around a score."
    model.eval()
    model.train()
    return {"accuracy": 0.0}


class TurnsModes(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        whoever_turns_modes(model)


@pytest.mark.parametrize("settings", [{"evaluate": whoever_turns_modes, "evaluate_every": 1}, {"callbacks": [TurnsModes()]}])
def test_no_score_and_no_callback_turns_a_layer_on_that_mixes_rows(settings, monkeypatch):
    seen = []
    pictures = toy().images.clone()
    pictures[0] *= 1000

    def privatize(step, own=Step.privatize):
        seen.append([value.flatten().clone() for value in step.sums.values()])
        own(step)

    def sums(data):
        seen.clear()
        dpft.fine_tune(mixing(), data, dpft.Trainable(), noise_multiplier=1.0, delta=1e-3, batch_size=len(data), steps=3, clip=0.1,
                       learning_rate=1e-30, progress=False, loss_fn=zoo.image_loss, **settings)
        return [torch.cat(one) for one in seen]

    monkeypatch.setattr(Step, "privatize", privatize)
    data = TensorData(pictures, toy().labels)
    with_it, without = sums(data), sums(data.subset(range(1, len(data))))
    assert [float((one - other).norm()) <= 0.1 * 1.0001 for one, other in zip(with_it, without, strict=True)] == [True] * 3


def test_a_layer_that_joins_the_model_is_checked_before_data_pass_it():
    e = engine()
    step = next(iter(e))
    e.model[2] = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8, affine=False))
    with pytest.raises(ValueError, match="BatchNorm mixes examples"):
        step.take()


@pytest.mark.parametrize("left_out", ["a batch", "the rest"])
def test_a_step_has_all_of_its_draw(left_out):
    """One example whose loss is not finite decides over its whole batch where a loop leaves such batches out."""
    e = engine(physical_batch_size=4)
    step = next(iter(e))
    for number, batch in enumerate(step):
        if number == 1 and left_out == "a batch":
            continue
        step.add(batch)
        if number == 1:
            break
    with pytest.raises(RuntimeError, match="iterate to the end and add every batch"):
        step.privatize()


def test_steps_must_be_made_private_and_done_in_order():
    e = engine()
    steps = iter(e)
    step = next(steps)
    with pytest.raises(RuntimeError, match="privatize"):
        step.done()
    step.privatize()
    with pytest.raises(RuntimeError, match="already"):
        step.privatize()
    with pytest.raises(RuntimeError, match="left before"):
        next(steps)


def test_blocks_are_rescaled_to_the_solved_multiplier():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    first, second = scaled_blocks([dpft.Block([a], clip=3.0, noise=2.0), dpft.Block([b], clip=1.0, noise=0.5)], [a, b], 0.2, 1.1)
    assert first.clip == pytest.approx(0.6) and second.clip == pytest.approx(0.2)
    assert ((first.clip / first.noise) ** 2 + (second.clip / second.noise) ** 2) ** -0.5 == pytest.approx(1.1)
    with pytest.raises(ValueError, match="lies in 0 blocks"):
        scaled_blocks([dpft.Block([a])], [a, b], 0.2, 1.1)
    with pytest.raises(ValueError, match="lies in 2 blocks"):
        scaled_blocks([dpft.Block([a, b]), dpft.Block([b])], [a, b], 0.2, 1.1)


class Half(Method):
    """Half of the entries of the first weight train, in a block of their own, beside the head."""

    def start(self, context):
        context.train_only([context.model[1].weight, *context.head])

    def blocks(self, context):
        weight = context.model[1].weight
        mask = torch.arange(weight.numel()).reshape(weight.shape) % 2 == 0
        return [dpft.Block([weight], [mask], clip=0.5, noise=2.0), dpft.Block(context.head)]


def test_masked_entries_stay_where_they_are_under_momentum_and_decay():
    model = net()
    before = model[1].weight.detach().clone()
    e = engine(model, Half())
    run_all(e, torch.optim.AdamW(e.parameters(), 0.1, weight_decay=0.5))
    moved = (model[1].weight != before).flatten()
    assert moved[::2].all() and not moved[1::2].any()


class Selecting(Method):
    """Spends two rounds on a noisy count before the head trains."""

    def __init__(self):
        self.seen = []

    def __repr__(self):
        return "Selecting()"

    def requests(self, context):
        return [Request(0.5, 2, 0.1, "count")]

    def start(self, context):
        for _ in range(2):
            rows = sum((len(batch[1]) for batch in context.draw(0.5)), 0)
            self.seen.append(context.release(torch.tensor([float(rows)]), 1.0).item())
        context.train_only(context.head)


def test_a_method_may_spend_what_it_asked_for_and_no_more():
    method = Selecting()
    e = run_all(engine(method=method))
    assert [m.name for m in e.guarantee.mechanisms] == ["train", "count"]
    assert [m.steps for m in e.guarantee.mechanisms] == [4, 2]
    assert e.guarantee.epsilon() <= 2.0
    assert all(abs(value - 30) < 30 for value in method.seen) and method.seen[0] != method.seen[1]
    with pytest.raises(ValueError, match="is left"):
        e.context.draw(0.5)
    with pytest.raises(ValueError, match="draw of its own"):
        e.context.release(torch.zeros(1), 1.0)


def test_a_run_that_is_refused_at_its_start_has_spent_nothing():
    ledger = Ledger()
    with pytest.raises(ValueError, match="nothing to train"):
        engine(method=Unlabelled(), ledger=ledger)
    assert ledger.charged() == []
    e = engine(ledger=ledger)
    assert ledger.charged() == [] and e.guarantee.epsilon() == 0.0
    next(iter(next(iter(e))), None)                          # the first draw
    assert ledger.charged() == e.plan.mechanisms


def test_noise_multiplier_cannot_be_shared_with_a_request():
    with pytest.raises(ValueError, match="give epsilon"):
        engine(method=Selecting(), epsilon=None, noise_multiplier=1.0)


class Later(Method):
    """Everything, then only the head from step 2 on, then everything again."""

    def start(self, context):
        context.train_only(context.model.parameters())

    def step(self, context, t):
        context.train_only(context.head if t == 2 else context.model.parameters())


def test_what_trains_may_change_at_any_step_both_ways():
    e = engine(method=Later())
    optimizer = torch.optim.SGD(e.parameters(), 0.1)
    moved = []
    for step in e:
        before = e.model[1].weight.detach().clone()
        step.take(optimizer)
        moved.append(not torch.equal(before, e.model[1].weight))
    assert moved == [True, True, False, True]


def test_a_frozen_prefix_is_in_evaluation_mode_and_the_rest_is_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    for p in model[:2].parameters():
        p.requires_grad_(False)
    set_modes(model)
    assert [m.training for m in model] == [False, False, True, True, True]
    set_modes(model, dropout=False)
    assert not any(m.training for m in model)


def test_dropout_is_keyed_by_step_so_that_a_replay_is_the_same_and_the_users_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    e = engine(net(dropout=0.5))
    sums = []
    for _ in range(2):
        step = Step(e)
        for batch in step:
            step.add(batch)
        sums.append(torch.cat([v.flatten() for v in step.sums.values()]))
    step = Step(e)
    batches = list(step)
    torch.manual_seed(3)
    step.add(batches[0])
    assert torch.equal(*sums) and torch.equal(torch.rand(1), expected)


# fine_tune -----------------------------------------------------------------------------------------------------------------------


def tune(model=None, data=None, **settings):
    settings = {"epsilon": 3.0, "steps": 6, "batch_size": 20, "progress": False, "seed": 0, "clip": 0.5, "accountant": "rdp", **settings}
    return dpft.fine_tune(model or net(), data or toy(), settings.pop("method", dpft.Full()), **settings)


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.Adafactor])
def test_an_optimizer_is_given_what_it_takes(kind):
    assert tune(optimizer=kind, steps=2).guarantee.mechanisms[0].steps == 2
    if kind is torch.optim.Rprop:
        with pytest.raises(ValueError, match="Rprop takes no weight_decay"):
            tune(optimizer=kind, weight_decay=0.1)


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    "It would call the loss again, with gradients that nothing bounds."
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        tune(optimizer=torch.optim.LBFGS, ledger=tmp_path / "book")
    with dpft.Ledger(tmp_path / "book") as ledger:
        assert not any(ledger.spent(name) for name in ledger.runs())


@pytest.mark.parametrize("losses", [lambda m, b: torch.nn.functional.cross_entropy(m(b[0]).detach(), b[1], reduction="none"),
                                    lambda m, b: (m(b[0]).argmax(1) != b[1]).float()], ids=["detached", "counted"])
def test_losses_without_a_gradient_are_refused_before_anything_is_charged(losses, tmp_path):
    "All steps were charged, and the model walked after the noise."
    with pytest.raises(ValueError, match="losses have no gradient"):
        tune(loss_fn=losses, ledger=tmp_path / "book")
    with dpft.Ledger(tmp_path / "book") as ledger:
        assert not any(ledger.spent(name) for name in ledger.runs())


def test_fine_tune_learns_and_reports():
    run = tune(data=toy(400), epsilon=8.0, steps=60, batch_size=100, learning_rate=0.05, evaluate=toy(200, seed=1), show_loss=True)
    assert run.scores["accuracy"] > 0.65       # forty starts, data sets and seeds: 0.90 with a spread of 0.03; chance is 0.33
    assert run.epsilon <= 8.0 and run.delta == 1 / 800
    report = run.report()
    for part in ("add/remove", "Poisson", "the number of examples, 400", "the training loss", "scores on examples", "seed"):
        assert part in report
    assert len(run.history) == 61 and {"step", "loss", "learning_rate"} <= set(run.history[0])


def test_the_number_of_examples_of_a_draw_is_named_in_the_guarantee_once_it_was_read():
    e = engine()
    step = next(iter(e))
    for batch in step:
        step.add(batch)
    assert e.guarantee.uncharged == []
    assert step.examples > 0 and e.guarantee.uncharged == ["the number of examples that were drawn"]


@pytest.mark.parametrize("progress", [False, True])
def test_no_loss_is_kept_or_shown_unless_it_is_asked_for(progress, capsys):
    run = tune(progress=progress)
    assert all("loss" not in entry and "not_finite" not in entry for entry in run.history)
    assert "loss" not in capsys.readouterr().err and "training loss" not in run.report()
    assert "loss" in tune(show_loss=True).history[0]


@pytest.mark.parametrize("settings", [dict(schedule="cosine", warmup=0.3), dict(optimizer="sgd", learning_rate=0.5), dict(average=0.9),
                                      dict(optimizer=torch.optim.RMSprop), dict(clipping="automatic"), dict(accountant="prv"),
                                      dict(precision="bf16"), dict(epochs=1.0, steps=None), dict(noise_multiplier=1.0, epsilon=None)])
def test_options_are_honoured(settings):
    start = net()
    run = tune(copy.deepcopy(start), **settings)
    assert torch.isfinite(weights(run.model)).all() and not torch.equal(weights(run.model), weights(start))
    assert run.guarantee.mechanisms[0].steps == (3 if settings.get("epochs") else 6)


def test_schedules():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule = make_schedule(optimizer, "linear", 10, warmup=4)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_the_average_is_that_of_the_iterates_with_a_warm_up():
    p = nn.Parameter(torch.tensor([1.0]))
    average, wanted = Average(0.15, [p]), 1.0
    for t, value in enumerate((2.0, 3.0, 5.0)):
        p.data.fill_(value)
        average.update()
        kept = min(0.15, (1 + t) / (10 + t))                                                  # 0.1, then the decay itself
        wanted = kept * wanted + (1 - kept) * value
    average.put()
    assert p.item() == pytest.approx(wanted)


def test_an_optimizer_instance_must_hold_what_trains():
    model = net()
    assert make_optimizer(torch.optim.SGD(model.parameters(), 0.1), list(model.parameters()), 0.1).defaults["lr"] == 0.1
    with pytest.raises(ValueError, match="lacks 2 of the 4"):
        make_optimizer(torch.optim.SGD(model[1].parameters(), 0.1), list(model.parameters()), 0.1)


def test_saving_and_loading_a_module(tmp_path):
    run = dpft.fine_tune("mlp", dpft.load_data("digits", limit=100), dpft.BiTFiT(), epsilon=8.0, steps=2, batch_size=20, progress=False)
    run.save(tmp_path)
    assert torch.equal(weights(dpft.load(tmp_path)), weights(run.model))
    assert dpft.Guarantee.load(tmp_path / "guarantee.json").epsilon() == pytest.approx(run.epsilon)
    assert "differentially private" in (tmp_path / "README.md").read_text()
    own = tune()
    own.save(tmp_path / "own")
    with pytest.raises(ValueError, match="model=MyModule"):
        dpft.load(tmp_path / "own")
    assert torch.equal(weights(dpft.load(tmp_path / "own", model=net(seed=9))), weights(own.model))
    with pytest.raises(ValueError, match="not a saved run"):
        dpft.load(tmp_path / "elsewhere")


# checkpoints -----------------------------------------------------------------------------------------------------------------------


def interrupted(folder, at, model=None, **settings):
    """A run that is stopped by its optimizer at one step."""
    with pytest.raises(Stopped):
        tune(model, checkpoint=folder, checkpoint_every=2, optimizer=stopping(at), **{"learning_rate": 0.05, **settings})


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("average", [None, 0.9])
def test_a_resumed_run_ends_bit_identical_and_pays_once(tmp_path, at, average):
    settings = dict(average=average, schedule="linear")
    whole = tune(learning_rate=0.05, **settings)
    interrupted(tmp_path, at, **settings)
    assert (tmp_path / "run.json").stat().st_mode & 0o077 == 0
    resumed = tune(checkpoint=tmp_path, checkpoint_every=2, learning_rate=0.05, **settings)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.guarantee.mechanisms == whole.guarantee.mechanisms and len(resumed.history) == 6
    assert not (tmp_path / "run.json").exists() and not (tmp_path / "state.pt").exists()      # secrets are gone
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert len(ledger.runs()) == 1 and sum(m.steps for m in ledger.charged()) == 6


def test_without_a_seed_too_a_resumed_run_replays_the_same_noise(tmp_path):
    interrupted(tmp_path, 4, seed=None)
    resumed = tune(checkpoint=tmp_path, checkpoint_every=2, learning_rate=0.05, seed=None)
    assert sum(m.steps for m in resumed.mechanisms) == 6 and not resumed.guarantee.reproducible


def test_a_loop_of_ones_own_names_after_a_break_what_it_has_read(tmp_path):
    first = engine(checkpoint=tmp_path, loop="by hand")
    step = next(iter(first))
    step.take()
    assert step.loss >= 0
    first.context.assume_public("the weather")
    first.save()
    first.store.close()
    second = engine(checkpoint=tmp_path, loop="by hand")
    second.resume()
    assert second.guarantee.uncharged == first.guarantee.uncharged == ["the training loss"]
    assert second.guarantee.assumed_public == first.guarantee.assumed_public and "the weather" in second.guarantee.assumed_public


def test_a_replay_that_differs_is_charged_and_gets_fresh_noise():
    for seeded in (dict(seed=0, loop="by hand"), dict(seed=0), dict(seed=None)):
        e = engine(**seeded)
        def released(value, e=e):
            return e.releases("train", 0, {"a": torch.full((3,), value)}, {"a": 1.0})[0]["a"] - value
        first = released(1.0)
        assert torch.equal(released(1.0), first) and len(e.spent) == 1 and e.spent[0].steps == 1
        sigma, q = e.plan.mechanisms[0].noise_multiplier, e.plan.sample_rate
        near = float(np.nextafter(np.float32(1.0), np.float32(2.0)))
        assert not torch.allclose(released(near), first, atol=1e-3)        # fresh noise
        assert epsilon(e.spent, 1e-3) == pytest.approx(epsilon([SampledGaussian(sigma / 2**0.5, q, 1)], 1e-3))   # of one draw
        assert torch.equal(released(1.0), first)                           # the first sum keeps its noise


def test_a_seed_is_keyed_by_name_only_where_the_identity_is_complete():
    for settings, portable in ((dict(loop="by hand"), True), ({}, False), (dict(loop="by hand", seed=None), False),
                               (dict(loop="by hand", collate_fn=lambda rows: torch.utils.data.default_collate(rows)), False)):
        assert engine(**settings).store.portable is portable


def test_a_killed_process_resumes_and_its_budget_never_falls(tmp_path):
    script = textwrap.dedent("""
        import sys, os, signal, torch
        import test_training as t
        torch.set_num_threads(int(sys.argv[2]))                  # the replay is asked for the same bits, so it sums in the same order
        class Killing(torch.optim.AdamW):
            same_as = "AdamW"
            def step(self, closure=None):
                self.count = getattr(self, "count", 0) + 1
                if self.count == 5: os.kill(os.getpid(), signal.SIGKILL)
                return super().step(closure)
        t.tune(checkpoint=sys.argv[1], checkpoint_every=3, optimizer=Killing, learning_rate=0.05)
    """)
    (tmp_path / "said").mkdir()
    result = fresh.run(script, tmp_path, torch.get_num_threads(), said=tmp_path / "said" / "it")
    assert result.returncode == -9, result.stderr
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert sum(m.steps for m in ledger.spent()) == 5 and sum(m.steps for m in ledger.charged()) == 6
    resumed = tune(checkpoint=tmp_path, checkpoint_every=3, learning_rate=0.05)
    assert torch.equal(weights(resumed.model), weights(tune(learning_rate=0.05).model))
    assert sum(m.steps for m in resumed.mechanisms) == 6


@pytest.mark.parametrize("change, word", [
    (dict(data=toy(60, seed=5)), "data"), (dict(model=net(seed=5)), "model"), (dict(epsilon=2.0), "epsilon"),
    (dict(method=dpft.BiTFiT()), "method"), (dict(learning_rate=0.1), "learning_rate"), (dict(optimizer="sgd"), "optimizer"),
    (dict(schedule="linear"), "schedule"), (dict(weight_decay=0.1), "weight_decay"), (dict(precision="bf16"), "precision"),
    (dict(physical_batch_size=7), "physical_batch_size"), (dict(dropout=False), "dropout"), (dict(average=0.9), "average"),
    (dict(loss_fn=zoo.image_loss), "loss_fn")])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, change, word):
    interrupted(tmp_path, 4)
    with pytest.raises(CheckpointError, match=f"another {word}"):
        tune(checkpoint=tmp_path, **{"learning_rate": 0.05} | change)


def test_a_lost_or_rolled_back_ledger_is_refused(tmp_path):
    interrupted(tmp_path, 4)
    (tmp_path / "ledger.sqlite").unlink()
    with pytest.raises(LedgerError, match="rows are missing"):
        tune(checkpoint=tmp_path, learning_rate=0.05)


@pytest.mark.parametrize("factor, refused", [(1 + 2**-50, False), (1 + 1e-5, True)])
def test_a_run_goes_on_where_epsilon_is_rounded_otherwise(tmp_path, monkeypatch, factor, refused):
    """Another number of threads added up another last digit, and a killed run could not go on."""
    interrupted(tmp_path, 4)
    own = Plan.epsilon
    monkeypatch.setattr(Plan, "epsilon", lambda *a: own(*a) * factor)
    if refused:
        with pytest.raises(LedgerError, match="another plan: epsilon is"):
            tune(checkpoint=tmp_path, learning_rate=0.05)
    else:
        assert len(tune(checkpoint=tmp_path, learning_rate=0.05).history) == 6


def test_a_ledger_with_another_plan_is_refused(tmp_path):
    interrupted(tmp_path, 4)
    record = json.loads((tmp_path / "run.json").read_text())
    with Ledger(tmp_path / "other.sqlite") as other:
        other.begin(record["run"], {"mechanisms": [{"name": "train", "noise_multiplier": 9.0, "sample_rate": 0.1, "steps": 6}]})
    with pytest.raises(LedgerError, match="another plan"):
        tune(checkpoint=tmp_path, ledger=tmp_path / "other.sqlite", learning_rate=0.05)


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_run_that_is_refused_before_its_first_draw_leaves_the_folder_to_a_corrected_one(tmp_path, ledger, seed):
    own = {"checkpoint": tmp_path / "new" / "state", "ledger": tmp_path / "ledger.sqlite" if ledger else None, "seed": seed}
    mixing = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="BatchNorm mixes examples"):
        tune(mixing, **own)
    assert not list(tmp_path.iterdir())
    assert tune(**own).epsilon <= 3.0
    with pytest.raises(ValueError, match="BatchNorm mixes examples"):                                  # nor does a folder that was there
        tune(mixing, **own | {"checkpoint": tmp_path})
    assert not (tmp_path / "run.json").exists()


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    store = Store(tmp_path, {"model": "m"}, {})
    store.save({"step": 1})
    real = os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*last good"):
        store.save({"step": 2})
    monkeypatch.setattr(os, "fsync", real)
    store.close()
    assert Store(tmp_path, {"model": "m"}, {}).step == 1
    assert not list(tmp_path.glob("*.part"))


CHECKPOINT = "from dpft.store import Store\nimport sys\nStore(sys.argv[1], {'a': 1}, {})"


@pytest.mark.parametrize("refuse", ["plan", "store", "identity"])
def test_a_run_that_is_refused_lets_others_have_its_folder(tmp_path, refuse):
    """It kept the lock, and another process was told that the folder is in use."""
    import fcntl
    interrupted(tmp_path, 4)
    if refuse == "plan":
        record = json.loads((tmp_path / "run.json").read_text())
        with Ledger(tmp_path / "other.sqlite") as other:
            other.begin(record["run"], {"mechanisms": [{"name": "train", "noise_multiplier": 9.0, "sample_rate": 0.1, "steps": 6}]})
        with pytest.raises(LedgerError, match="another plan"):
            tune(checkpoint=tmp_path, ledger=tmp_path / "other.sqlite", learning_rate=0.05)
    elif refuse == "store":
        with pytest.raises(CheckpointError, match="another learning_rate"):
            tune(checkpoint=tmp_path, learning_rate=0.06)
    else:
        (tmp_path / "run.json").write_text("{}")
        with pytest.raises(CheckpointError, match="damaged"):
            tune(checkpoint=tmp_path, learning_rate=0.05)
    number = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(number)


def test_files_of_others_in_a_checkpoint_folder_are_not_removed(tmp_path):
    (tmp_path / "other" / "shards-0").mkdir(parents=True)
    (tmp_path / "other" / "shards-0" / "weights.bin").write_bytes(b"mine")
    tune(checkpoint=tmp_path / "other")
    assert (tmp_path / "other" / "shards-0" / "weights.bin").read_bytes() == b"mine"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.pt").write_bytes(b"the state of another program, longer than a digest")
    with pytest.raises(CheckpointError, match=r"state.pt is damaged, of an older version, or not dpft.s; choose an empty folder"):
        tune(checkpoint=tmp_path / "state")
    assert (tmp_path / "state" / "state.pt").exists()


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"run": 1}'])
def test_a_record_of_a_run_that_is_no_such_record_is_called_damaged(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        tune(checkpoint=tmp_path)


def test_two_engines_of_one_process_do_not_share_a_folder(tmp_path):
    """Both had the run and its key."""
    def engine():
        return dpft.Engine(net(), zoo.image_loss, dpft.Full(), toy(), noise_multiplier=1.0, steps=4, batch_size=20, seed=0,
                           checkpoint=tmp_path, accountant="rdp")
    first = engine()
    with pytest.raises(CheckpointError, match=r"^another engine of this process is using checkpoint .*engine.store.close\(\), or choose"):
        engine()
    first.store.close()
    second = engine()
    first.store.close()                                        # closes nothing of the second's
    with pytest.raises(CheckpointError, match="another engine of this process"):
        engine()
    del second                                                 # nobody can use it any more
    engine().store.close()


def test_a_key_that_a_kill_left_half_written_is_removed_with_the_run(tmp_path, monkeypatch, request):
    """A process that is killed before a file is moved to its name leaves the whole content under another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)               # ignored where tests run in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    store = Store(tmp_path, {"model": "m"}, {})
    store.save({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr("dpft.store.Path.replace", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        for write in (store.begin, lambda: store.save({"step": 2})):
            with pytest.raises(KeyboardInterrupt):
                write()
    assert {"run.part", "state.part"} <= {path.name for path in tmp_path.iterdir()}
    store.remove()
    assert not list(tmp_path.iterdir())
    store.close()


# bad input -------------------------------------------------------------------------------------------------------------------------


class Unlabelled(Method):
    def start(self, context):
        context.train_only([])


BAD = [
    (dict(epsilon=0.0), "epsilon=0"), (dict(epsilon=-1.0), "epsilon=-1"), (dict(delta=0.0), "delta=0"), (dict(delta=1.5), "delta=1.5"),
    (dict(delta=0.5), "below 1/60"), (dict(epsilon=1e-4, delta=1e-6, accountant="rdp"), "floor"), (dict(batch_size=61), "batch_size=61"),
    (dict(batch_size=0), "batch_size=0"), (dict(steps=0, epochs=0), "steps=0"), (dict(clip=0.0), "clip=0"),
    (dict(batch_size=10.5), "batch_size=10.5"), (dict(physical_batch_size=2.5), "physical_batch_size=2.5"),
    (dict(steps=4.5), "steps=4.5"), (dict(steps=None, epochs=math.inf), "epochs=inf"), (dict(steps=None, epochs=math.nan), "epochs=nan"),
    (dict(clip=math.inf), "clip=inf"),
    (dict(clipping="round"), "clipping='round'"), (dict(accountant="gdp"), "gdp"), (dict(optimizer="adagrad"), "optimizer='adagrad'"),
    (dict(schedule="steps"), "schedule='steps'"), (dict(unit="user"), "no column 'user'"), (dict(precision="fp16"), "precision='fp16'"),
    (dict(noise_multiplier=1.0), "only one of them"), (dict(epsilon=None), "either epsilon or"), (dict(average=1.5), "average=1.5"),
    (dict(method=Unlabelled()), "nothing to train"),
    (dict(model=nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))), "BatchNorm"),
    (dict(model="mpl"), "mlp"), (dict(loss_fn=lambda m, b: zoo.image_loss(m, b).mean()), "one loss per example"),
    (dict(loss_fn=lambda m, b: zoo.image_loss(m, b) / zoo.image_loss(m, b).sum()), "changes with the examples beside it"),
]


@pytest.mark.parametrize("settings, words", BAD)
def test_bad_input_is_one_sentence_that_names_it(settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        tune(**settings)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_numpy_count_as_such():
    assert tune(batch_size=np.int64(20), steps=np.int32(2), physical_batch_size=np.int64(8)).guarantee.mechanisms[0].steps == 2


def test_bad_columns_and_labels():
    table = TableData({"text": ["a b", "c"], "label": [0, 1]})
    with pytest.raises(ValueError, match="sentence"):
        dpft.fine_tune(nn.Linear(1, 1), table, dpft.Full(), epsilon=1.0, columns=("sentence", "label"), tokenizer=object())
    with pytest.raises(ValueError, match="tokenizer="):
        dpft.fine_tune(nn.Linear(1, 1), table, dpft.Full(), epsilon=1.0)


def test_a_method_without_start_says_so():
    with pytest.raises(NotImplementedError, match="start"):
        engine(method=Method())


def test_engine_matches_the_oracle_under_fine_tunes_own_loss():
    model, batch = net().double(), (torch.randn(5, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1]))
    loss = dpft.models.default_loss(model)
    oracle = per_example_gradients(model, loss, batch)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in oracle.values()]).sum(0).sqrt()
    factors = (0.5 / norms).clamp(max=1)
    for name, value in clipped_sum(model, loss, batch, 0.5).items():
        assert torch.allclose(value, torch.tensordot(factors, oracle[name], dims=1), atol=1e-12)
    assert F.cross_entropy(model(batch[0]), batch[1]).item() == pytest.approx(loss(model, batch).mean().item())


def test_epsilon_of_a_plan_in_progress_grows_to_the_whole():
    plan = make_plan(1000, 100, 50, target_epsilon=2.0)
    values = [plan.epsilon(steps) for steps in (1, 10, 50)]
    assert values == sorted(values) and values[-1] == plan.epsilon() <= 2.0
    assert plan.epsilon() == pytest.approx(epsilon(plan.mechanisms, plan.delta))


# ---- features of frozen layers


SGD = "SGD at 0.1"  # a run that names its loop has the same noise however its sums are rounded


class OnlyTheHead(Method):
    "Everything, and from step 2 on the last layer alone."

    def start(self, context):
        context.train_only(context.model.parameters())

    def step(self, context, t):
        if t == 2:
            context.train_only(context.model[-1].parameters())


def test_features_change_nothing_but_the_work():
    cached, plain = (run_all(engine(method=OnlyTheHead(), batch_size=30, steps=12, cache=cache, loop=SGD)) for cache in (1.0, 0))
    assert torch.allclose(weights(cached.model), weights(plain.model), atol=1e-6)
    assert plain.features is None and cached.features.hits > 0 and cached.features.store.bytes == 0   # nothing stays after the run


@pytest.mark.parametrize(("method", "cache", "there"), [
    (dpft.LastLayer(), None, True), (dpft.LayerFreeze(after=1), None, True), (dpft.BiTFiT(), None, False), (dpft.BiTFiT(), 0.1, True),
    (dpft.LastLayer(), 0, False), (dpft.Then(dpft.Full(), None, dpft.LastLayer(), steps=2), None, True)])
def test_features_are_stored_by_default_where_layers_freeze(method, cache, there):
    assert (engine(method=method, cache=cache, **NOISE).features is not None) == there


def test_public_rows_that_are_private_too_are_refused():
    data = toy()
    with pytest.raises(ValueError, match="row"):
        dpft.fine_tune(net(), data, dpft.Full(), epsilon=2.0, batch_size=20, steps=1, accountant="rdp", progress=False,
                       evaluate=dpft.Public(TensorData(data.images[:5], data.labels[:5]), "the same rows"))


def test_peak_memory_is_set_by_the_physical_batch_and_not_by_the_draw():
    from dpft.book.contenders import LiveBytes

    peaks = []
    for expected in (30, 240):
        e = engine(nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)), data=toy(256), batch_size=expected,
                   physical_batch_size=8, steps=2)
        steps = iter(e)
        for step in steps:
            with LiveBytes() as live:
                for batch in step:
                    step.add(batch)
            drawn = step.examples
            step.privatize()
            step.done()
        peaks.append(live.peak)
    assert drawn > 200 and peaks[1] <= peaks[0] + 16 * 256   # a draw's row numbers


class Table(nn.Module):
    "Nearly all of its memory is its parameters."

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20_000, 64), nn.Linear(64, 3)

    def forward(self, images):
        return self.head(self.table(images.flatten(1).abs().long().clamp(max=9)).mean(1))


def test_a_step_of_one_batch_holds_its_gradient_once():
    """Beside the weights: the sum, which becomes the gradient, and no sum of zeros, no gradient of the step before.

    Noise is made in pieces of less than two megabytes.
    """
    from dpft.book.contenders import LiveBytes

    model = Table()
    steps = iter(engine(model, data=toy(16), batch_size=16, steps=4))
    size, peaks = sum(p.nbytes for p in model.parameters()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    next(steps).take(optimizer)                            # which compares the gradients with the oracle's
    with LiveBytes() as live:
        for step in steps:
            step.take(optimizer)
            peaks.append(live.peak / size)
    assert max(peaks) < 1.5 and peaks[-1] < peaks[0] + 0.1, peaks


def test_sums_that_share_memory_are_added_apart():
    "Without privacy, autograd gives two parameters one tensor; a step of several batches must not add to it twice."
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, images):
            return images.flatten(1)[:, :3] + (self.a + self.b)

    step = next(iter(engine(Both(), data=toy(24), batch_size=24, physical_batch_size=6, steps=1, epsilon=math.inf)))
    for batch in step:
        before = {name: value.clone() for name, value in step.sums.items()}
        step.add(batch)
        loss = zoo.image_loss(step.engine.model, batch).sum()
        wanted = torch.autograd.grad(loss, step.engine.parameters())
        for (name, value), gradient in zip(step.sums.items(), wanted, strict=True):
            assert torch.allclose(value - before[name], gradient, atol=1e-5)


def test_a_draw_that_must_drown_in_its_noise_is_warned_of():
    with pytest.warns(UserWarning, match="batch_size=1 is small for 163 entries"):
        engine(batch_size=1, steps=1, noise_multiplier=1.0, epsilon=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(batch_size=20, steps=4)


# ---- several views of one picture


def sums_of(e):
    "The sums of one step before noise, flat, and the batches."
    step = next(iter(e))
    batches = []
    for batch in step:
        step.add(batch)
        batches.append(batch)
    return torch.cat([value.flatten() for value in step.sums.values()]).double(), batches, step


def mean_gradients(model, batches, copies):
    "For each picture the mean over its views, by the slow oracle; (n, entries)."
    rows = [per_example_gradients(model, zoo.image_loss, batch) for batch in batches]
    flat = torch.cat([torch.cat([value.flatten(1) for value in part.values()], dim=1) for part in rows]).double()
    return flat.unflatten(0, (-1, copies)).mean(1)


@pytest.mark.parametrize("settings", [{}, dict(epsilon=math.inf), dict(unit=[row // 2 for row in range(60)]), dict(average=0.9)])
@one_stream()
def test_one_unmoved_copy_is_no_augmentation(settings):
    runs = [tune(augment=augment, **settings) for augment in (None, dpft.Augmentation(1, 0, False))]
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))


@pytest.mark.parametrize("physical", [1, 5, 7, 64])
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@one_stream()
def test_the_mean_over_views_is_bounded_whatever_the_batches(physical, clipping):
    model, augment = net(), dpft.Augmentation(copies=3, crop=1)
    e = engine(copy.deepcopy(model), augment=augment, physical_batch_size=physical, clipping=clipping)
    found, batches, step = sums_of(e)
    assert all(len(batch[1]) % 3 == 0 and len(batch[1]) <= max(3, physical) for batch in batches)      # a group never straddles
    means = mean_gradients(model, batches, 3)
    factors = (0.5 / means.norm(dim=1)).clamp(max=1) if clipping == "flat" else 0.5 / (means.norm(dim=1) + 0.01)
    assert torch.allclose(found, (factors[:, None] * means).sum(0), rtol=1e-4, atol=1e-6)
    assert step.examples == len(means)
    assert step.loss == pytest.approx(torch.cat([zoo.image_loss(model, batch) for batch in batches]).mean().item(), rel=1e-4)
    other = torch.cat([images for images, _ in sums_of(engine(augment=augment))[1]])                 # cut otherwise, the same views
    assert torch.equal(torch.cat([images for images, _ in batches]), other)


def test_views_differ_between_steps_and_follow_the_seed():
    e = engine(augment=dpft.Augmentation(copies=2, crop=1), batch_size=60, steps=2)
    views = [torch.cat([batch[0] for batch in e.batches(1.0, "train", t, views=True)]) for t in (0, 1, 0)]
    assert torch.equal(views[0], views[2]) and not torch.equal(views[0], views[1])


def test_a_person_brings_the_mean_views_of_all_her_rows():
    data, unit, model = toy(12), [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4], net()
    e = engine(copy.deepcopy(model), data=data, unit=unit, batch_size=5, clip=0.3, augment=dpft.Augmentation(copies=2, crop=0),
               physical_batch_size=6)
    found, batches, _ = sums_of(e)
    assert sum(len(batch[1]) for batch in batches) == 24
    means = mean_gradients(model, batches, 2)                                                 # whole people, in the order of their rows
    people = torch.zeros(5, means.shape[1], dtype=torch.float64).index_add_(0, torch.tensor(unit), means)
    exact = ((0.3 / people.norm(dim=1)).clamp(max=1)[:, None] * people).sum(0)
    assert float((found - exact).norm() / exact.norm()) < 1e-4     # the margin for rounding keeps it below the bound by some 1e-5


@one_stream(3)
def test_an_example_with_all_its_views_moves_the_sum_by_no_more_than_the_bound():
    data = toy(20)
    data.images[-1] *= 1e3                                                                    # long gradients, were they not bounded
    settings = dict(augment=dpft.Augmentation(copies=8, crop=1), clip=0.5, seed=3, delta=0.01)
    whole, _, _ = sums_of(engine(data=data, batch_size=20, **settings))
    without, _, _ = sums_of(engine(data=data.subset(range(19)), batch_size=19, **settings))
    assert 0.45 < (whole - without).norm() <= 0.5 * (1 + 1e-4)


def test_a_view_that_is_not_finite_takes_its_example_along():
    class Burst(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 3)

        def forward(self, x):
            flat = x.flatten(1)
            return self.line(flat) / (flat[:, :1] < 50)                                       # one place of one picture bursts the loss

    data = toy(8)
    data.images[0, 0, 0, 0] = 100.0
    e = engine(Burst(), data=data, batch_size=8, delta=0.01, augment=dpft.Augmentation(copies=16, crop=0))
    found, batches, step = sums_of(e)
    burst = batches[0][0][:16, 0, 0, 0] == 100
    assert 0 < burst.sum() < 16
    assert found.isfinite().all() and step.not_finite == 1 and step.examples == 8


def test_without_privacy_the_gradient_is_the_mean_over_views_too():
    model = net()
    e = engine(copy.deepcopy(model), epsilon=math.inf, augment=dpft.Augmentation(copies=3, crop=1), physical_batch_size=9)
    found, batches, step = sums_of(e)
    assert torch.allclose(found, mean_gradients(model, batches, 3).sum(0), rtol=1e-4, atol=1e-6) and e.draws.open == []
    step.privatize()
    grads = torch.cat([p.grad.flatten() for p in e.parameters()]).double()
    assert torch.allclose(grads, found / 20, rtol=1e-5, atol=1e-8)


def test_a_batch_of_views_is_taken_once_and_no_other_is():
    e = engine(augment=dpft.Augmentation(copies=2, crop=0))
    step = next(iter(e))
    first = next(iter(step))
    step.add(first)
    for batch in (first, toy(4).batch([0, 1])):
        with pytest.raises(ValueError, match="a step takes the batches that it yields, each once and whole"):
            step.add(batch)


def test_a_method_that_draws_sees_plain_pictures():
    seen = []

    class Looks(Method):
        def requests(self, context):
            return [Request(0.5, 1, 0.2, "look")]

        def start(self, context):
            total = torch.zeros(())
            for batch in context.draw(0.5):
                seen.append(batch[0])
                assert context.groups(batch) is None
                total = total + len(batch[1])
            context.release(total, 1.0)
            context.train_only(context.model.parameters())

    e = engine(method=Looks(), augment=dpft.Augmentation(copies=3, crop=1))
    known = {tuple(image.flatten().tolist()) for image in e.train.images}
    assert seen and all(tuple(image.flatten().tolist()) in known for batch in seen for image in batch)


def test_a_resumed_run_sees_the_same_views_and_another_augmentation_is_refused(tmp_path):
    settings = dict(augment=dpft.Augmentation(copies=2, crop=1), average=0.9)
    whole = tune(learning_rate=0.05, **settings)
    interrupted(tmp_path, 4, **settings)
    with pytest.raises(CheckpointError, match="another augment"):
        tune(checkpoint=tmp_path, learning_rate=0.05, average=0.9, augment=dpft.Augmentation(copies=3, crop=1))
    resumed = tune(checkpoint=tmp_path, checkpoint_every=2, learning_rate=0.05, **settings)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_no_view_gets_the_features_of_another():
    settings = dict(method=OnlyTheHead(), batch_size=60, steps=12, augment=dpft.Augmentation(copies=2, crop=0, flip=True), loop=SGD)
    cached, plain = (run_all(engine(cache=cache, **settings)) for cache in (1.0, 0))
    assert cached.features.hits > 0 and torch.allclose(weights(cached.model), weights(plain.model), atol=1e-6)


def test_tokens_have_no_views():
    data = TableData({"input_ids": [[1, 2]] * 8, "labels": [0, 1] * 4})
    model, loss_fn, _ = zoo.build("bert")
    e = dpft.Engine(model, loss_fn, dpft.Full(), data, epsilon=2.0, batch_size=8, accountant="rdp", augment=dpft.Augmentation())
    with pytest.raises(ValueError, match="augment= takes pictures"):
        list(next(iter(e)))


# ---- the average when what trains changes


class Thaws(Method):
    "The last layer, and from step 2 on everything."

    unfreezes = True

    def start(self, context):
        context.train_only(context.model[-1].parameters())

    def step(self, context, t):
        if t == 2:
            context.train_only(context.model.parameters())


@pytest.mark.parametrize("method", [dpft.Full, OnlyTheHead, Thaws])
@pytest.mark.parametrize("decay", [0.3, 0.99])
def test_the_average_is_that_of_whole_models_whatever_trains_when(tmp_path, method, decay):
    start, models = net(), []
    model = copy.deepcopy(start)

    class Recording(torch.optim.SGD):
        same_as = "SGD"

        def step(self, closure=None):
            super().step(closure)
            models.append(weights(model))

    settings = dict(method=method(), learning_rate=0.3, epsilon=20.0)
    found, wanted = weights(tune(model, average=decay, optimizer=Recording, **settings).model), weights(start)
    for t, values in enumerate(models):
        kept = min(decay, (1 + t) / (10 + t))
        wanted = kept * wanted + (1 - kept) * values
    assert torch.allclose(found, wanted, atol=1e-6) and not torch.allclose(found, models[-1], atol=1e-4)
    at, folder = 4, tmp_path / "folder"
    whole = tune(copy.deepcopy(start), average=decay, **settings)
    interrupted(folder, at, copy.deepcopy(start), average=decay, **settings)
    resumed = tune(copy.deepcopy(start), average=decay, checkpoint=folder, checkpoint_every=2, **settings)
    assert torch.equal(weights(resumed.model), weights(whole.model))


# ---- end of several views of one picture


@pytest.mark.parametrize("loop", [None, "plain SGD"])
def test_the_noise_of_a_step_is_the_same_in_every_version(loop):
    "Its stream is named by the mechanism, the step and the parameter, and by the sums unless it is known how the loop uses them."
    running = engine(loop=loop, **NOISE)
    step = next(iter(running))
    for batch in step:
        step.add(batch)
    sums = {name: total.clone() for name, total in step.sums.items()}
    scales = [running.spread[id(running.trains[name])] for name in sums]
    noise = f"{choice_hash(running.trains, running.blocks)} {scales}"
    found = [running.keystream.digest(total, name) for name, total in sums.items()]
    digest = running.keystream.key("sums", "train", 0, noise, *found).hex()
    step.privatize()
    for name, total in sums.items():
        noise = running.keystream.normal(total.shape, 1.0, "noise", "train", 0, "" if loop else digest, name)
        parameter = running.trains[name]
        assert torch.equal(parameter.grad, (total + noise * running.spread[id(parameter)]) / running.plan.batch_size)


def test_a_ledger_tells_with_what_a_run_was_planned():
    ledger = Ledger()
    for seed in (0, None):
        e = engine(ledger=ledger, seed=seed, clip=0.5, **NOISE)
        next(iter(next(iter(e))), None)
        plan = ledger.plan(e.store.run)
        assert (plan["clip"], plan["clipping"], plan["unit"], plan["size"], plan["reproducible"]) == (0.5, "flat", "example", 60, seed == 0)
        assert plan["delta"] == e.plan.delta and plan["epsilon"] == e.plan.epsilon() and plan["accountant"] == "rdp"


def test_the_folder_of_an_unfinished_run_is_its_owners(tmp_path):
    store = Store(tmp_path / "a" / "run", {}, {})
    assert store.folder.stat().st_mode & 0o077 == 0


def test_a_state_that_holds_more_than_numbers_is_not_unpacked(tmp_path):
    store, told = Store(tmp_path, {}, {}), []
    store.save({"step": 3})
    store.close()
    assert Store(tmp_path, {}, {}).step == 3
    store = Store(tmp_path, {}, {})

    class Harm:
        def __reduce__(self):
            return told.append, ("done",)

    store.save({"step": Harm()})
    store.close()
    with pytest.raises(pickle.UnpicklingError):
        Store(tmp_path, {}, {})
    assert not told


def test_a_state_of_another_device_is_read_into_memory(tmp_path, monkeypatch):
    Store(tmp_path, {}, {}).save({"step": 1})
    read, asked = torch.load, {}
    monkeypatch.setattr(torch, "load", lambda path, **settings: asked.update(settings) or read(path, **settings))
    Store(tmp_path, {}, {})
    assert asked == {"weights_only": True, "map_location": "cpu"}


def test_a_checkpoint_must_agree_in_all_that_a_run_depends_on():
    store = engine(**NOISE).store
    assert store.identity["number of processes"] == 1 and store.identity["method"] == "Full()" and store.identity["plan"]["clip"] == 0.5
    assert {"model", "unit_cap", "augment", "loop", "device"} <= set(store.identity) and set(store.private) == {"data", "tokens", "units"}


def test_every_entry_of_a_small_model_tells_it_from_others():
    model = nn.Linear(3, 2)
    known = identity_room.model_fingerprint(model)
    for parameter in model.parameters():
        for place in range(parameter.numel()):
            other = copy.deepcopy(model)
            dict(other.named_parameters())[next(n for n, p in model.named_parameters() if p is parameter)].data.view(-1)[place] += 1
            assert identity_room.model_fingerprint(other) != known


def test_what_has_trained_is_remembered_after_it_is_frozen():
    run = tune(method=OnlyTheHead(), steps=4, **NOISE)
    assert run.trained == sorted(name for name, _ in run.model.named_parameters())


def test_an_optimizer_keeps_its_moments_while_the_phase_lasts():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    tune(model, optimizer=optimizer, steps=4, **NOISE)
    assert [int(state["step"]) for state in optimizer.state.values()] == [4] * 4


def test_other_processes_answer_with_what_the_first_told_them():
    e, told = engine(**NOISE), [SampledGaussian(1.0, 0.1, 3)]
    e.account.held, e.account.told = None, (told, "head of the ledger")
    assert e.spent == e.guarantee.spent == told and e.guarantee.ledger_head == "head of the ledger"
    with pytest.raises(ValueError, match="only the first process"):
        _ = e.ledger


def test_nothing_counts_as_checked_before_the_first_step_or_without_privacy():
    e = engine(**NOISE)
    assert e.guarantee.checked == []
    assert run_all(e).guarantee.checked == list(CHECKED)
    assert run_all(engine(epsilon=math.inf)).guarantee.checked == []


def test_an_example_without_a_finite_loss_counts_as_zero_in_the_mean():
    data = toy()
    data.images[7] = math.nan
    e = engine(data=data, batch_size=60, **NOISE)
    step = next(iter(e))
    losses = torch.cat([(step.add(batch), zoo.image_loss(e.model, batch))[1] for batch in step])
    assert losses.isnan().sum() == 1 and step.loss == pytest.approx(losses.nan_to_num(0.0).mean().item(), rel=1e-5)


def test_the_loop_is_silent_without_progress(capsys):
    tune(steps=2, **NOISE)
    said = capsys.readouterr()
    assert said.out == said.err == ""


def test_the_line_about_what_is_read_leaves_the_word_to_an_error(monkeypatch, capsys):
    """Of several processes the first that has an error tells it, and this line was taken for one: then none told any."""
    class Shared:
        told = 0

        def add(self, name, one):
            self.told += one
            return self.told

    monkeypatch.setattr("dpft.processes._store", Shared())
    tune(steps=1, progress=True)
    assert "reads: " in capsys.readouterr().err and speaks()


def test_epsilon_is_shown_at_both_ends_and_twenty_times_between():
    due = [t for t in range(1, 101) if progress_is_due(t, 100)]
    assert due == [1, *range(5, 101, 5)]
    assert all(progress_is_due(t, 7) for t in range(1, 8))


def test_a_function_of_the_users_may_score_the_model():
    run = tune(steps=1, **NOISE, evaluate=lambda model: {"parameters": sum(1 for _ in model.parameters())})
    assert run.scores == {"parameters": 4}


def test_texts_to_go_on_with_are_scored_by_perplexity():
    model, _, batch = zoo.build("gpt2-lm", rows=8)
    data, _ = zoo.as_data({**batch, "labels": batch["input_ids"]})
    run = tune(model, data, steps=1, batch_size=4, evaluate=data, **NOISE)
    assert run.scores == {"perplexity": pytest.approx(perplexity(run.model, data))}


def test_a_saved_run_says_of_what_kind_it_is_and_what_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "write_model", lambda *_: {"base": None})     # weights have tests of their own
    monkeypatch.setattr(loop, "how_to_load", lambda _: "load it\n")
    tune(steps=1, epsilon=math.inf).save(tmp_path)
    told = json.loads((tmp_path / "dpft.json").read_text())
    assert told["kind"] == "image" and told["trained"] == ["1.bias", "1.weight", "4.bias", "4.weight"]
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("# Model card\n\n") and card.endswith("load it\n") and "\n\n\n" not in card


def test_a_part_of_a_method_has_the_steps_of_its_phase_or_all():
    context = Context(net(), zoo.image_loss, 10, 7, 60)
    assert context.part(0, 1).steps == 7 and context.part(0, 1, 3).steps == 3 and context.steps == 7
    assert context.part(2, 2).part(1, 1).allowance.own == range(3, 4)


def test_a_new_phase_is_known_to_the_loop():
    context = engine(**NOISE).context
    assert not context.needs().new_phase
    context.begin_phase()
    assert context.needs().new_phase is True


class Unused(nn.Module):
    "One parameter that no example uses."

    def __init__(self):
        super().__init__()
        self.body, self.unused = net(), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.body(x)


def test_without_privacy_a_parameter_may_be_unused():
    e = run_all(engine(Unused(), epsilon=math.inf))
    assert e.model.unused.item() == 0


class ThawsAll(Thaws):
    "What `Thaws` does, for a model around the small one."

    def start(self, context):
        context.train_only(context.model.body[-1].parameters())


def test_what_is_new_may_stay_where_it_is_when_its_gradient_is_zero_and_not_otherwise():
    run_all(engine(Unused(), ThawsAll(), epsilon=math.inf))            # the smallest of the new ones has no gradient
    e = engine(method=Thaws(), **NOISE)
    with pytest.raises(ValueError, match="the optimizer does not hold the parameters"):
        run_all(e, torch.optim.SGD(e.parameters(), 0.1))


@pytest.mark.parametrize("schedule, rates", [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]),
                                             ("cosine", [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4])])
def test_the_rate_falls_as_its_schedule_says(schedule, rates):
    optimizer, found = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), []
    schedule = make_schedule(optimizer, schedule, 4)
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates)


def test_a_view_counts_with_its_share_of_the_loss():
    def loss(model, batch):
        return batch
    for copies in (2, 3):
        share = Share(loss, copies)
        assert share(None, tensor([6.0])).item() == share.full_precision(None, tensor([6.0])).item() == 6 / copies


def test_a_method_is_asked_what_it_requests_with_the_run_before_it():
    class Asks(dpft.Full):
        def requests(self, context):
            self.asked = context
            return super().requests(context)

    running = engine(method=Asks(), **NOISE)
    assert running.method.asked is running.context


def test_a_model_made_by_name_is_remembered_by_name():
    "So that its folder says how to load it."
    task = load_data("digits")
    ready = prepare("cnn", task)
    assert ready.recipe == {"name": "cnn", "classes": [*task.classes], "kind": "image", "image_shape": task.image_shape}
    assert prepare(ready.model, task).recipe is None


def test_a_module_names_its_tokenizer_by_where_it_came_from(monkeypatch):
    monkeypatch.setattr("dpft.prepared.load_tokenizer", lambda name: pytest.fail(f"asked for {name}"))
    model = net()
    model.config = types.SimpleNamespace(_name_or_path="where/it/came/from")
    with pytest.raises(pytest.fail.Exception, match="asked for where/it/came/from"):
        prepare(model, [{"text": "a", "label": 0}, {"text": "b", "label": 1}])


def test_each_entry_has_the_noise_of_the_block_that_holds_it():
    "One parameter, two blocks: the second block's noise comes beside the first's."
    one, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    mask = tensor([[True, False], [False, True]])
    spread = noise_spread([Block([one], [mask], noise=2.0), Block([one, other], [~mask, torch.ones(3, dtype=bool)], noise=5.0)])
    assert torch.equal(spread[id(one)], tensor([[2.0, 5.0], [5.0, 2.0]])) and torch.equal(spread[id(other)], torch.full((3,), 5.0))


def test_a_run_with_a_checkpoint_leaves_soon_after_it_was_told_to(tmp_path, capsys):
    told = []

    class Told(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if not told:
                told.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(SystemExit) as left:
        tune(optimizer=Told, checkpoint=tmp_path, **NOISE)
    assert left.value.code == 128 + signal.SIGTERM and (tmp_path / "state.pt").exists()
    assert f"the state after step 2 of 6 is in {tmp_path}" in capsys.readouterr().err
    assert [mechanism.steps for mechanism in Ledger(tmp_path / "ledger.sqlite").spent()] == [2]  # its wish travels with the next sum


@pytest.mark.parametrize("loop", [None, "plain SGD"])
@pytest.mark.parametrize("secure_mode", [False, True])
def test_the_noise_of_a_methods_release_is_the_same_in_every_version(secure_mode, loop):
    total = torch.arange(3.0)

    class Looks(dpft.Full):
        sums = torch.arange(3.0)      # its own: what it captured could not be read, and the digest would be part of the name

        def requests(self, context):
            return [Request(0.5, 1, 0.2)]

        def start(self, context):
            list(context.draw(0.5))
            self.released = context.release(self.sums, 2.0)
            super().start(context)

    running = engine(method=Looks(), secure_mode=secure_mode, loop=loop)
    name, std, stream = running.requests[0].name, running.plan.mechanisms[1].noise_multiplier * 2.0, running.keystream
    released = secure_std(std, 2.0, 3) if secure_mode else std
    digest = stream.key("sums", name, 0, f" {[released]}", stream.digest(total, "total")).hex()          # nothing trains yet
    named = "noise", name, 0, "" if loop else digest, "total"
    if secure_mode:
        std = secure_std(std, 2.0, 3)
        step = grid_step(std)
        wanted = on_grid(total, step) + on_grid(stream.secure_normal((3,), *named) * std, step)
    else:
        wanted = total + stream.normal((3,), 1.0, *named) * std
    assert torch.equal(running.method.released, wanted.float())


def test_what_trained_before_a_freeze_has_trained():
    run = tune(method=dpft.Then(dpft.Full(), None, dpft.LastLayer(), steps=3), **NOISE)
    assert run.trained == sorted(name for name, _ in run.model.named_parameters())


def test_labels_beyond_the_classes_are_refused_before_a_step():
    task = load_data("digits")
    with pytest.raises(ValueError, match="class"):
        prepare(net(), dataclasses.replace(task, classes=task.classes[:5]))


def test_rows_that_end_in_text_are_for_writing():
    rows = [{"question": "a", "reply": "b"}]
    assert as_task(rows, ("question", "reply")).kind == "causal"
    assert as_task([{"text": "a", "label": 0}], None).kind == "text"


def test_secure_mode_is_for_devices_with_float64():
    for device in ("cpu", "cuda"):
        engine_room.check_secure(True, True, torch.device(device))
    with pytest.raises(ValueError, match="mps does not have"):
        engine_room.check_secure(True, True, torch.device("mps"))


def test_what_is_checked_on_the_first_batch_is_claimed_from_then_on():
    running, loose = engine(**NOISE), engine(epsilon=math.inf)
    assert running.guarantee.checked == []
    for one in (running, loose):
        next(iter(one)).take()
    assert running.guarantee.checked == list(CHECKED) and loose.guarantee.checked == []
    assert running.guarantee.run == running.store.run in running.ledger.runs() and loose.guarantee.run == ""


def test_a_run_without_noise_is_noted_in_a_ledger_that_it_was_given(tmp_path):
    given, own = engine(epsilon=math.inf, ledger=tmp_path / "shared"), engine(epsilon=math.inf)
    for one in (given, own):
        next(iter(one)).take()
    assert list(given.ledger.unpaid()) == [given.store.run] and own.ledger.unpaid() == {}


@pytest.mark.parametrize("made", ["before", "after", "foreach", "data"])
def test_an_optimizer_that_leaves_out_what_a_method_added_is_told_of(made):
    """Made before the engine, as a loop without privacy does, it knows nothing of what LoRA adds."""
    class Direct(torch.optim.Optimizer):
        "Writes past torch's count of changes, as old optimizers do."
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            for one in self.param_groups[0]["params"]:
                one.data -= 0.1 * one.grad

    make = {"foreach": lambda p: torch.optim.AdamW(p, foreach=True), "data": Direct}.get(made, lambda p: torch.optim.SGD(p, lr=0.1))
    model = nn.Sequential(OrderedDict(query=nn.Linear(6, 8), activation=nn.Tanh(), classifier=nn.Linear(8, 2)))
    early = make(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.arange(20) % 2)
    engine = dpft.Engine(model, None, dpft.baselines.LoRA(2), data, noise_multiplier=1.0, steps=2, batch_size=5, delta=0.01,
                         accountant="rdp")
    optimizer = early if made == "before" else make(engine.parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in engine:
            step.take(optimizer)
    said = [str(one.message) for one in said if "make it after the engine" in str(one.message)]
    assert len(said) == (made == "before")
    assert made != "before" or said[0].startswith("the optimizer lacks 2 of the 4 parameters that train, such as query.lora_A.")


def test_steps_without_an_optimizer_are_meant(recwarn):
    data = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.arange(20) % 2)
    engine = dpft.Engine(nn.Linear(6, 2), None, dpft.Full(), data, noise_multiplier=1.0, steps=1, batch_size=5, delta=0.01,
                         accountant="rdp")
    for step in engine:
        step.take()
    assert not [one for one in recwarn if "make it after the engine" in str(one.message)]


def test_a_seeded_run_goes_on_only_while_all_that_changes_a_sum_is_read(tmp_path):
    """Its noise is keyed by name: a sum that differs unseen would meet noise that another run of this seed has given to its own."""
    begun = engine(checkpoint=tmp_path, loop="by hand")
    next(iter(begun)).take(torch.optim.SGD(begun.parameters(), 0.1))
    begun.store.close()
    assert begun.store.portable
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CheckpointError, match="could all be read, and now one cannot"):
        engine(checkpoint=tmp_path, loop="by hand")
    assert engine(checkpoint=tmp_path, loop="by hand").store.portable
