"""AdamBC against the paper's update written out, with the noise that a run really adds, and where it is refused."""

import math

import pytest
import torch
from test_training import engine
from torch import nn

import dpft
from dpft.book.audits import Stopped, stopping
from dpft.boundary import toy_network, toy_pictures
from dpft.norms import Sums
from dpft.updates import AdamBC


def written_out(grads, start, rate, std, betas=(0.9, 0.999), floor=0.1, decay=0.0):
    "DP-AdamBC as the paper has it: the noise's variance is taken off the corrected second moment."
    found, mean, square = start.double().clone(), 0.0, 0.0
    for t, grad in enumerate(grads, 1):
        mean = betas[0] * mean + (1 - betas[0]) * grad.double()
        square = betas[1] * square + (1 - betas[1]) * grad.double() ** 2
        second = (square / (1 - betas[1] ** t) - std**2).clamp(min=floor * std**2 + 1e-16)
        found = found * (1 - rate * decay) - rate * mean / (1 - betas[0] ** t) / second.sqrt()
    return found


@pytest.mark.parametrize("std", [0.0, 0.3, 2.0])
def test_it_is_the_papers_loop(std):
    torch.manual_seed(0)
    p, grads = nn.Parameter(torch.randn(50, dtype=torch.float64)), [torch.randn(50, dtype=torch.float64) for _ in range(30)]
    start, optimizer = p.detach().clone(), AdamBC([p], 0.01, noise=lambda p: std, weight_decay=0.1)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(p.detach(), written_out(grads, start, 0.01, std, decay=0.1), rtol=1e-10, atol=1e-12)


def test_a_run_by_it_is_the_papers_loop_under_the_plans_noise():
    e = engine(noise_multiplier=0.5, epsilon=None, steps=6)
    optimizer, grads = AdamBC(e.parameters(), 0.05, noise=e.noise), []
    start = {name: p.detach().clone() for name, p in e.trains.items()}
    for step in e:
        step.take()
        grads.append({name: p.grad.clone() for name, p in e.trains.items()})
        optimizer.step()
    for name, p in e.trains.items():
        wanted = written_out([one[name] for one in grads], start[name], 0.05, 0.5 * e.plan.clip / e.plan.batch_size)
        torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method, knobs", [
    (dpft.BiTFiT(), {}), (dpft.LargestWeights(0.5), {}), (dpft.RapFT(dpft.Full(), relevance_data="random"), {}),
    (dpft.BiTFiT(), {"secure_mode": True}), (dpft.BiTFiT(), {"epsilon": math.inf})], ids=repr)
def test_it_knows_the_noise_of_every_entry(method, knobs):
    "Of masks, blocks and secure mode too: what is subtracted is what was added, over the divisor."
    e, added = engine(method=method, **knobs), {}
    honest = e.release
    e.release = lambda name, number, sums, stds, *rest: (added.update(stds), honest(name, number, sums, stds, *rest))[1]
    next(iter(e)).take()
    packs = {name: torch.as_tensor(added[name]).double().expand(total.shape) for name, total in Sums(e.layout).whole().items()}
    for name, spread in e.layout.views(packs).items():
        wanted = spread / e.plan.batch_size if e.plan.private else torch.zeros_like(spread)
        found = torch.as_tensor(e.noise(e.trains[name])).double()
        torch.testing.assert_close(found.expand(wanted.shape), wanted)


def test_a_killed_run_goes_on_bit_by_bit(tmp_path):
    def run(optimizer, **more):
        return dpft.fine_tune(toy_network(), toy_pictures(), dpft.BiTFiT(), optimizer=optimizer, epsilon=8.0, batch_size=6, steps=5,
                              accountant="rdp", seed=3, progress=False, learning_rate=0.1, **more).model.state_dict()
    kept = {"checkpoint": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(Stopped):
        run(stopping(3, AdamBC), **kept)
    stopped, whole, plain = run(AdamBC, **kept), run("adambc"), run("adam")
    assert all(torch.equal(value, whole[name]) for name, value in stopped.items())
    assert any(not torch.equal(value, whole[name]) for name, value in plain.items())


def test_without_the_noise_or_for_a_zeroth_order_method_it_is_refused():
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"noise=engine\.noise"):
        AdamBC([p]).step()
    with pytest.raises(ValueError, match="along its directions"):
        dpft.fine_tune(toy_network(), toy_pictures(), dpft.ZerothOrder(), optimizer="adambc", epsilon=8.0, batch_size=6, steps=2,
                       accountant="rdp", progress=False)
