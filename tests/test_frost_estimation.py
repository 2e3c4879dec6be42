"""The estimate of several noisy rounds: monotone, stationary, right on average, as uncertain as it says."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpft.frost import estimate
from dpft.frost.estimation import best_scales, best_values


def misfit(noisy, sensitivities, scales, values):
    "Squared distance of the released values from the model, each round in units of its sensitivity."
    off = (noisy - scales[:, None] * values) / sensitivities[:, None]
    return torch.where(noisy.isnan(), 0.0, off).square().sum()


def simulate(seed=0, rounds=5, partitions=40, noise=0.3, dropped=4, rate=1.0):
    "What the rounds saw, the sensitivities, the true values and scales; the largest are dropped round by round."
    generator = torch.Generator().manual_seed(seed)
    true = torch.rand(partitions, generator=generator).double() ** 2 * 5 + 0.2
    scales = rate * (1 + torch.rand(rounds, generator=generator).double())
    scales[0] = rate
    deltas = rate * (0.5 + torch.rand(rounds, generator=generator).double())
    seen = scales[:, None] * true + noise * deltas[:, None] * torch.randn(rounds, partitions, generator=generator).double()
    order = true.argsort(descending=True)
    for j in range(rounds):
        seen[j, order[:min(dropped * j, partitions - 1)]] = torch.nan
    return seen, deltas, true, scales


cases = st.tuples(st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 40), st.sampled_from([0.0, 0.1, 1.0, 5.0]), st.integers(0, 9))


@given(case=cases)
@settings(max_examples=40)
def test_no_sweep_raises_the_misfit(case):
    noisy, deltas, _, _ = simulate(*case)
    runs = [estimate(list(noisy), deltas, 1.0, iterations=n) for n in (1, 2, 3, 5, 9, 20, 60)]
    course = [misfit(noisy, deltas, run.scales, run.values.nan_to_num()).item() for run in runs]
    assert all(later <= earlier + 1e-9 * course[0] + 1e-18 for earlier, later in itertools.pairwise(course))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [1.0, 0.02])
def test_the_end_is_stationary(seed, rate):
    noisy, deltas, _, _ = simulate(seed, rate=rate)
    found = estimate(list(noisy), deltas, rate)
    scales, values = found.scales[1:].clone().requires_grad_(), found.values.clone().requires_grad_()
    loss = misfit(noisy, deltas, torch.cat([torch.tensor([rate]).double(), scales]), values)
    by_scale, by_value = torch.autograd.grad(loss, [scales, values])
    assert (by_scale * found.scales[1:]).abs().max() < 1e-5 * loss.item() + 1e-6    # per relative change
    assert (by_value * found.values).abs().max() < 1e-5 * loss.item() + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_no_other_optimizer_finds_less(seed):
    noisy, deltas, _, _ = simulate(seed, partitions=12, dropped=2)
    found = estimate(list(noisy), deltas, 1.0)
    ours = misfit(noisy, deltas, found.scales, found.values).item()
    unknown = [torch.ones(4, dtype=torch.float64, requires_grad=True), noisy[0].clone().requires_grad_()]
    optimizer = torch.optim.LBFGS(unknown, max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe")
    def loss():
        optimizer.zero_grad()
        value = misfit(noisy, deltas, torch.cat([torch.ones(1).double(), unknown[0]]), unknown[1])
        value.backward()
        return value
    optimizer.step(loss)
    assert ours <= loss().item() * (1 + 1e-8)
    assert torch.allclose(found.values, unknown[1].detach(), rtol=1e-4)


def test_without_noise_the_truth_is_found():
    noisy, deltas, true, scales = simulate(noise=0.0, rate=0.02)
    found = estimate(list(noisy), deltas, 0.02)
    assert torch.allclose(found.values, true, rtol=1e-8) and torch.allclose(found.scales, scales, rtol=1e-8)


def test_each_block_is_the_minimum_of_its_own():
    noisy, deltas, true, scales = simulate(3)
    seen, filled = (~noisy.isnan()).double(), noisy.nan_to_num()
    values = best_values(seen, filled, deltas, scales)
    new = best_scales(seen, filled, true)
    for other in (1e-3 * torch.randn(40).double() for _ in range(5)):
        assert misfit(noisy, deltas, scales, values) <= misfit(noisy, deltas, scales, values + other)
        assert misfit(noisy, deltas, new, true) <= misfit(noisy, deltas, new + other[:5], true)


def test_the_first_round_alone_is_what_was_seen_over_the_rate():
    found = estimate([torch.tensor([2.0, -1.0])], [0.1], 0.5)
    assert found.values.tolist() == [4.0, -2.0] and found.scales.tolist() == [0.5]
    assert torch.allclose(found.std(3.0), torch.tensor(3.0 * 0.1 / 0.5).double())


def test_rate_and_first_scale_are_a_matter_of_units():
    noisy, deltas, _, _ = simulate(1)
    whole, part = estimate(list(noisy), deltas, 1.0), estimate(list(noisy), deltas, 0.1)
    assert torch.allclose(part.values, 10 * whole.values) and torch.allclose(part.std(1.0), 10 * whole.std(1.0))


def test_rounds_of_one_partition_and_rounds_that_see_nothing_more():
    one = estimate([torch.tensor([3.0]), torch.tensor([5.0])], [1.0, 1.0], 1.0)
    assert math.isclose(one.values.item(), 3.0, rel_tol=1e-6) and math.isclose(one.scales[1].item(), 5 / 3, rel_tol=1e-6)
    gone = estimate([torch.tensor([3.0, 1.0]), torch.tensor([math.nan, math.nan])], [1.0, 1.0], 1.0)
    assert gone.values.tolist() == [3.0, 1.0] and gone.scales[1] == 1.0
    never = estimate([torch.tensor([3.0, math.nan])], [1.0], 1.0)
    assert never.values[0] == 3.0 and never.values[1].isnan() and never.std(1.0)[1] == math.inf


def test_all_zero_rounds_do_not_crash():
    found = estimate([torch.zeros(4), torch.zeros(4)], [1.0, 1.0], 0.5)
    assert found.values.tolist() == [0.0] * 4 and found.scales.isfinite().all()
