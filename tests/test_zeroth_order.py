"""A zeroth-order step: its differences against an oracle, their bound, what it keeps, and what it refuses."""

import math

import pytest
import torch
import zoo
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import dpft
from dpft import (
    BiTFiT,
    Block,
    Chain,
    DPFrost,
    Full,
    LargestWeights,
    LastLayer,
    LayerFreeze,
    LoRA,
    Method,
    RapFT,
    Then,
    ZerothOrder,
    registry,
)
from dpft.book.audits import audit_settings, resumed
from dpft.boundary import influence, toy_network, toy_pictures
from dpft.gradients import per_example_gradients
from dpft.oracle import select_rows
from dpft.zeroth_order import DIFFERENCES, Directions

ROWS, CLIP = 12, 0.3


def engine(method=None, model=None, **given):
    data = toy_pictures(ROWS)
    model = toy_network().double() if model is None else model
    data = TensorDataset(data.images.double(), data.labels)
    return dpft.Engine(model, given.pop("loss_fn", zoo.image_loss), method or ZerothOrder(), data, **{
        "epsilon": 8.0, "delta": 1e-3, "batch_size": ROWS, "steps": 2, "clip": CLIP, "accountant": "rdp", "physical_batch_size": 5,
        "seed": 1, **given})


def added(e):
    "The first step, with all that was drawn; its batches."
    step, batches = next(iter(e)), []
    for batch in step:
        step.add(batch)
        batches.append(batch)
    return step, batches


def differences(e, step, batches, smoothing):
    "Each example's, at a model of its own for each point: (B, K)."
    found = []
    for number in range(e.along.number):
        z = {name: value for name, _, value in e.along.draw(step, number)}
        def loss(sign, one, z=z):
            moved = {name: p.detach() + sign * smoothing * z.get(name, 0) for name, p in e.model.named_parameters()}
            return zoo.image_loss(lambda *inputs: functional_call(e.model, moved, inputs), one).item()
        rows = [select_rows(batch, torch.tensor([row])) for batch in batches for row in range(len(batch[1]))]
        found.append([(loss(1, one) - loss(-1, one)) / (2 * smoothing) for one in rows])
    return torch.tensor(found, dtype=torch.float64).T


def clipped(values, clip=CLIP):
    return torch.stack([row if row.norm() <= clip else row * clip / row.norm() for row in values])


@pytest.mark.parametrize("method, smoothing", [
    (ZerothOrder(), 1e-3), (ZerothOrder(directions=3, smoothing=0.1), 0.1), (ZerothOrder(BiTFiT(), 2), 1e-3),
    (ZerothOrder(LastLayer()), 1e-3), (ZerothOrder(LoRA(2, targets=("1", "4"))), 1e-3),
    (ZerothOrder(Chain(Full(), LayerFreeze(1, 0, ["1", "4", "6"])), 2), 1e-3)], ids=repr)
def test_the_sum_is_that_of_an_oracle(method, smoothing):
    e = engine(method)
    before = {name: value.clone() for name, value in e.model.state_dict().items()}
    step, batches = added(e)
    rows = differences(e, step, batches, smoothing)
    assert set(step.sums) == {DIFFERENCES} and step.sums[DIFFERENCES].dtype == torch.float64 and len(rows) == ROWS
    assert (rows.norm(dim=1) > CLIP).any()                                                 # else nothing is tried
    assert step.sums[DIFFERENCES].tolist() == pytest.approx(clipped(rows).sum(0).tolist(), abs=1e-8)
    assert all(torch.equal(value, before[name]) for name, value in e.model.state_dict().items())


def test_a_difference_of_a_quadratic_loss_is_the_gradient_along_the_direction():
    def loss(model, batch):
        return (model(batch[0].flatten(1)) ** 2).sum(1)
    torch.manual_seed(0)
    e = engine(ZerothOrder(directions=2, smoothing=0.5), nn.Linear(16, 3).double(), loss_fn=loss, epsilon=math.inf)
    step, batches = added(e)
    total = 0.0
    for batch in batches:
        rows = per_example_gradients(e.model, loss, batch)
        total += torch.stack([sum((rows[name] * z).sum() for name, _, z in e.along.draw(step, k)) for k in range(2)])
    assert step.sums[DIFFERENCES].tolist() == pytest.approx(total.tolist(), rel=1e-9)


def test_an_example_adds_the_bound_and_never_more():
    "Without its clip factor it would add a thousand times as much."
    def loss(model, batch):
        return 1e3 * model(batch[0].flatten(1)).sum(1)
    torch.manual_seed(0)
    for directions in (1, 4):
        e = engine(ZerothOrder(directions=directions), nn.Linear(16, 1).double(), loss_fn=loss, physical_batch_size=1)
        step, last = next(iter(e)), torch.zeros(directions, dtype=torch.float64)
        for batch in step:
            step.add(batch)
            assert CLIP * (1 - 1e-12) < (step.sums[DIFFERENCES] - last).norm() <= CLIP * (1 + 1e-15)
            last = step.sums[DIFFERENCES].clone()


@pytest.mark.parametrize("knobs", [
    {}, {"clipping": "automatic"}, {"secure_mode": True}, {"unit": [row // 2 for row in range(ROWS)]}], ids=repr)
def test_one_unit_moves_what_is_released_by_no_more_than_the_bound(knobs):
    "Float32 losses are rounded, and over 2 lambda this is 1e-4; the noise is that of sigma C."
    size = len(set(knobs.get("unit", range(ROWS))))
    def make():
        dpft.fine_tune(toy_network(), toy_pictures(ROWS), ZerothOrder(directions=2), epsilon=8.0, delta=1e-3, clip=0.01,
                       batch_size=size - 1, public_size=size, steps=6, accountant="rdp", progress=False, dropout=False, **knobs)
    found = influence(make)
    assert len(found) == 6 and 0.9 < max(found) < 1.05


def test_a_step_releases_few_numbers_under_the_noise_of_the_plan(monkeypatch):
    seen = []
    honest = dpft.Engine.release
    monkeypatch.setattr(dpft.Engine, "release", lambda self, name, number, sums, stds, *rest: (
        seen.append((name, {key: value.numel() for key, value in sums.items()}, stds)), honest(self, name, number, sums, stds, *rest))[1])
    e = engine(ZerothOrder(directions=3))
    for step in e:
        step.take()
    sigma = e.plan.mechanisms[0].noise_multiplier
    assert [one[:2] for one in seen] == [("train", {DIFFERENCES: 3})] * 2 and seen[0][2] == {DIFFERENCES: pytest.approx(sigma * CLIP)}
    assert [(m.name, m.steps, m.sample_rate) for m in e.spent] == [("train", 2, 1.0)] and e.guarantee.epsilon() <= 8


def test_the_gradient_is_the_mean_of_number_times_direction():
    e = engine(ZerothOrder(directions=2))
    step, _ = added(e)
    total = step.sums[DIFFERENCES].clone()
    step.privatize()
    noise = e.keystream.normal((2,), e.blocks[0].noise, "noise", "train", 0, DIFFERENCES, dtype=torch.float64)
    released = (total + noise) / ROWS
    for name, p in e.trains.items():
        one, other = ({n: z for n, _, z in e.along.draw(step, number)}[name] for number in (0, 1))
        torch.testing.assert_close(p.grad, (released[0] * one + released[1] * other) / 2)
        assert not torch.equal(one, other)


def test_a_person_is_summed_and_then_bounded():
    people = [row // 3 for row in range(ROWS)]
    e = engine(ZerothOrder(directions=2), unit=people, batch_size=4, public_size=4, physical_batch_size=12)
    step, batches = added(e)
    rows = differences(e, step, batches, 1e-3).view(4, 3, 2).sum(1)
    assert step.sums[DIFFERENCES].tolist() == pytest.approx(clipped(rows).sum(0).tolist(), abs=1e-8)


def test_what_is_not_finite_contributes_nothing():
    def loss(model, batch):
        return zoo.image_loss(model, batch) + torch.where(batch[1] == 1, math.inf, 0.0)
    e = engine(loss_fn=loss, check=False)
    step, batches = added(e)
    rows = differences(e, step, batches, 1e-3)[torch.cat([batch[1] for batch in batches]) != 1]
    assert len(rows) == 8 and step.sums[DIFFERENCES].item() == pytest.approx(clipped(rows).sum().item(), abs=1e-8)


class Watched(nn.Module):
    "Notes whether a pass builds a graph; its loss varies by dropout alone."

    def __init__(self):
        super().__init__()
        self.weight, self.graphs, self.drops = nn.Parameter(torch.ones(1, dtype=torch.float64)), [], nn.Dropout(0.5)

    def forward(self, images):
        self.graphs.append(torch.is_grad_enabled())
        return self.drops(torch.ones_like(images)).sum((1, 2, 3)) + 0 * self.weight


def test_a_step_stores_no_activation_and_both_losses_see_the_same_dropout():
    model = Watched().train()
    e = engine(model=model, loss_fn=lambda model, batch: model(batch[0]), check=False, dropout=True)
    step, batches = added(e)
    assert model.graphs == [False] * 2 * len(batches) and step.sums[DIFFERENCES].item() == 0 and e.hooks is None
    one, other = (model(torch.ones(1, 1, 4, 4, dtype=torch.float64)) for _ in range(2))
    assert model.drops.training and one != other


@pytest.mark.parametrize("method", [ZerothOrder(directions=2), ZerothOrder(LoRA(2, targets=("1", "4")))], ids=repr)
def test_a_killed_run_goes_on_bit_by_bit(method):
    settings = dict(epsilon=8.0, delta=1e-3, batch_size=6, steps=5, accountant="rdp", seed=3, progress=False, learning_rate=0.1)
    stopped = resumed(3)(toy_network(), toy_pictures(), method, **settings)
    whole = dpft.fine_tune(toy_network(), toy_pictures(), method, optimizer=torch.optim.SGD, **settings)
    assert stopped.model.state_dict().keys() == whole.model.state_dict().keys()
    assert all(torch.equal(value, whole.model.state_dict()[name]) for name, value in stopped.model.state_dict().items())


def test_a_phase_of_it_before_or_after_another():
    for method, kinds in ((Then(ZerothOrder(), None, BiTFiT(), steps=1), (True, False)),
                          (Then(Full(), None, ZerothOrder(BiTFiT(), 2), steps=1), (False, True))):
        e, found = engine(method), []
        for step in e:
            for batch in step:
                step.add(batch)
            found.append(set(step.sums) == {DIFFERENCES})
            step.privatize()
            assert all(p.grad is not None for p in e.parameters())
            step.done()
        assert tuple(found) == kinds


def test_a_selection_and_phases_train_by_it():
    run = dpft.fine_tune(toy_network(), toy_pictures(), ZerothOrder(DPFrost(0.6, rounds=1, sample_rate=0.5)), epsilon=8.0, batch_size=8,
                         steps=2, accountant="rdp", progress=False)
    assert [m.name for m in run.mechanisms] == ["train", "select"] and 0 < len(run.trained) < 8
    e = engine(ZerothOrder(Then(Full(), None, BiTFiT(), steps=1)))
    for step in e:
        step.take()
    assert e.along == Directions(1, 1e-3) and len(e.trains) == 5


def test_the_name_of_commands():
    method, rate = registry.method_named("zeroth-order", ['method=["LoRA", {"rank": 2}]', "directions=4"])
    assert repr(method).startswith("ZerothOrder(method=LoRA(rank=2, ") and method.directions == 4 and rate


@pytest.mark.parametrize("make, why", [
    (lambda: ZerothOrder(LargestWeights(0.1)), "LargestWeights masks entries"),
    (lambda: ZerothOrder(RapFT(BiTFiT(), relevance_data="random")), "RapFT masks entries or has blocks of its own"),
    (lambda: ZerothOrder(Then(Full(), 1, LargestWeights(0.1))), "Then masks entries"),
    (lambda: ZerothOrder(ZerothOrder()), "ZerothOrder masks entries or has blocks"),
    (lambda: Chain(ZerothOrder(), BiTFiT()), "put the chain into it: ZerothOrder"),
    (lambda: RapFT(ZerothOrder(), relevance_data="random"), "ZerothOrder cuts blocks of its own"),
    (lambda: ZerothOrder(Full), "an object of it"),
    (lambda: ZerothOrder(directions=0), "directions=0 must be 1 or more"),
    (lambda: ZerothOrder(smoothing=0.0), "smoothing=0.0 positive"),
    (lambda: engine(precision="bf16"), "precision='bf16': a difference of two losses is lost")])
def test_what_does_not_apply_is_refused(make, why):
    with pytest.raises((ValueError, TypeError), match=why):
        make()


def test_a_second_block_beside_one_along_directions_is_refused():
    class Two(Method):
        def adapt(self, context):
            return list(context.model.parameters())

        def blocks(self, context):
            first, *rest = context.model.parameters()
            return [Block([first], along=Directions(1, 1e-3)), Block(rest)]

    with pytest.raises(ValueError, match="must be the only one"):
        engine(Two())


def test_an_audit_does_not_refute_it():
    settings = {"method": "ZerothOrder", "canaries": 60, "steps": 6, "cache": 0.0, "target_epsilon": 8.0, "accountant": "rdp", "seed": 0}
    found = audit_settings(settings)
    assert found.mu is not None and found.p_value() > 1e-6
