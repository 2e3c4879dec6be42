"""The corrected bound on every smooth problem tried, exactly for one step and by Monte Carlo for runs; the paper's where it breaks."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpft.freezing import convergence_bound, noise_energy, paper_bound_not_valid, unclipped_bound
from dpft.freezing.bound import largest_signal_energy


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# One step, every expectation a sum

def quadratic(seed, examples, d):
    """Least squares with a term for each example: gradients, loss over all, smoothness and Hessian."""
    inputs, targets = normal(seed, examples, d), 3 * normal(seed + 1, examples)
    hessian = inputs.mT @ inputs / examples
    def each(theta):
        return (inputs @ theta - targets)[:, None] * inputs
    def loss(theta):
        return (inputs @ theta - targets).square().mean() / 2
    return each, loss, hessian


@given(seed=st.integers(0, 10**6), d=st.integers(1, 4), rate=st.floats(0.1, 1), clip=st.floats(0.05, 20), sigma=st.floats(0, 5),
       eta=st.floats(1e-3, 3))
def test_one_step_obeys_both_forms_exactly(seed, d, rate, clip, sigma, eta):
    examples = 4
    each, loss, hessian = quadratic(seed, examples, d)
    size, theta = rate * examples, normal(seed + 2, d)
    gradients = each(theta)
    gradient, clipped = gradients.mean(0), gradients * (clip / gradients.norm(dim=1)).clamp(max=1)[:, None]
    std = sigma * clip / size
    after = alignment = energy = torch.zeros((), dtype=torch.float64)
    for present in itertools.product((0.0, 1.0), repeat=examples):               # every draw
        chance = math.prod(rate if here else 1 - rate for here in present)
        signal = torch.tensor(present, dtype=torch.float64) @ clipped / size
        after = after + chance * (loss(theta - eta * signal) + eta**2 * std**2 * hessian.trace() / 2)    # noise on a quadratic, exactly
        alignment, energy = alignment + chance * gradient @ signal, energy + chance * signal.square().sum()
    smoothness = torch.linalg.eigvalsh(hessian)[-1].item()
    common = (loss(theta) - after, torch.tensor([eta], dtype=torch.float64), smoothness, d, sigma, clip, size)
    slack = 1e-9 * (1 + abs(loss(theta)) + after) / eta
    assert alignment <= convergence_bound(*common, energy) + slack                                        # (A)
    assert gradient.square().sum() <= convergence_bound(*common, energy, alignment - gradient.square().sum()) + slack  # (B)
    assert energy <= largest_signal_energy(clip, size, rate) * (1 + 1e-9) <= largest_signal_energy(clip, size) * (1 + 2e-9)
    assert convergence_bound(*common, energy) <= convergence_bound(*common, sample_rate=rate) * (1 + 1e-9) + slack


@given(seed=st.integers(0, 10**6), d=st.integers(1, 3), sigma=st.floats(0, 3), eta=st.floats(0.01, 1.9))
def test_form_b_is_an_equation_on_an_isotropic_quadratic(seed, d, sigma, eta):
    x, steps = normal(seed, d), 5
    mean, variance, squares = x.clone(), 0.0, []
    for _ in range(steps):                                                        # f = |x|^2 / 2, no clipping: moments in closed form
        squares.append(mean.square().sum() + d * variance)
        mean, variance = (1 - eta) * mean, (1 - eta) ** 2 * variance + eta**2 * sigma**2
    drop = (x.square().sum() - mean.square().sum() - d * variance) / 2
    found = convergence_bound(drop, torch.full((steps,), eta), 1.0, d, sigma, 1.0, 1.0, torch.stack(squares), 0.0)
    assert torch.isclose(found, torch.stack(squares).mean(), rtol=1e-6)


# Whole runs

def logistic(seed, examples=40, d=6):
    inputs = normal(seed, examples, d) * torch.logspace(-1, 0.5, d, dtype=torch.float64)
    labels = torch.sign(inputs @ normal(seed + 1, d) + normal(seed + 2, examples))
    return inputs, labels


def simulate(seed, theta, free, steps, rate, clip, sigma, rates):
    """Runs of DP-SGD on the entries `free` of logistic regression: means over runs, expectations over each draw exact."""
    inputs, labels = logistic(seed)
    examples, chance, size, random = len(inputs), rate, rate * len(inputs), generator(seed + 9)
    loss = lambda t: torch.nn.functional.softplus(-labels * (t @ inputs.mT)).mean(1).mean()  # noqa: E731
    facts, first = [], loss(theta)
    for t in range(steps):
        weights = -labels * torch.sigmoid(-labels * (theta @ inputs.mT))
        norms = weights.abs() * inputs[:, free].norm(dim=1)
        bounded = weights * (clip / norms).clamp(max=1)
        gradient, mean = weights @ inputs[:, free] / examples, bounded @ inputs[:, free] / examples
        energy = mean.square().sum(1) + chance * (1 - chance) / size**2 * norms.clamp(max=clip).square().sum(1)
        facts.append(torch.stack([gradient.square().sum(1).mean(), (gradient * mean).sum(1).mean(), energy.mean()]))
        drawn = torch.rand(len(theta), examples, generator=random, dtype=torch.float64) < rate
        noise = torch.randn(len(theta), len(free), generator=random, dtype=torch.float64)
        theta = theta.clone()
        theta[:, free] -= rates[t] * ((bounded * drawn) @ inputs[:, free] / size + sigma * clip / size * noise)
    smoothness = torch.linalg.eigvalsh(inputs[:, free].mT @ inputs[:, free])[-1].item() / (4 * examples)
    return first - loss(theta), smoothness, *torch.stack(facts).unbind(1), size


@pytest.mark.parametrize("free", [range(6), range(3, 6)], ids=["all", "frozen"])
@pytest.mark.parametrize(("clip", "sigma", "eta"), [(0.3, 2.0, 0.5), (0.1, 8.0, 2.0), (5.0, 1.0, 0.3), (0.5, 0.0, 1.0)])
def test_runs_of_clipped_noisy_logistic_regression(free, clip, sigma, eta):
    free, steps = torch.tensor(list(free)), 30
    for seed in (0, 100):
        rates = eta / torch.arange(1.0, steps + 1, dtype=torch.float64).sqrt()
        drop, smoothness, squares, alignment, energy, size = simulate(seed, normal(seed + 5, 2000, 6), free, steps, 0.3, clip, sigma, rates)
        common = (drop, rates, smoothness, len(free), sigma, clip, size)
        assert (rates * alignment).sum() / rates.sum() <= convergence_bound(*common, energy)
        bound = convergence_bound(*common, energy, alignment - squares)
        assert squares.min() <= bound
        assert paper_bound_not_valid(drop, rates, smoothness, sigma, clip, size, alignment) < bound
        assert convergence_bound(*common, energy) <= convergence_bound(*common)


def test_a_bound_without_the_dimension_or_the_signal_is_broken_by_a_run():
    d, eta, steps = 200, 0.1, 40
    runs = 2000                                                                  # each of the margins below is eight standard errors
    random, x, squares = generator(0), math.sqrt(0.1 / 1.9) * normal(1, runs, d), []
    start = x.square().sum(1).mean() / 2
    for _ in range(steps):
        squares.append(x.square().sum(1).mean())
        x = (1 - eta) * x - eta * torch.randn(runs, d, generator=random, dtype=torch.float64)
    drop, squares, rates = start - x.square().sum(1).mean() / 2, torch.stack(squares), torch.full((steps,), eta)
    assert torch.isclose(squares.mean(), convergence_bound(drop, rates, 1.0, d, 1.0, 1.0, 1.0, squares, 0.0), rtol=0.02)
    assert convergence_bound(drop, rates, 1.0, 1, 1.0, 1.0, 1.0, squares, 0.0) < squares.min()            # one dimension's noise
    assert convergence_bound(drop, rates, 1.0, d, 1.0, 1.0, 1.0, 0.0, 0.0) < 0.98 * squares.min()         # no signal


def test_steps_that_look_back_break_the_bound_so_they_must_be_fixed_in_advance():
    """f = x^2 / 2, a step of 0.01 while |x| < 0.02 and none afterwards: the means over 20,000 runs, exact in the draw of the noise."""
    random, x, squares, energy, steps = generator(0), torch.full((20_000,), 0.018, dtype=torch.float64), [], [], []
    first = x.square().mean() / 2
    for _ in range(100):
        rate = 0.01 * (x.abs() < 0.02)
        squares.append(x.square().mean())
        steps.append(rate.mean())
        energy.append((rate.square() * x.square()).mean() / (rate.mean() ** 2 + 1e-300))
        noise = (rate.square() * 0.4**2).mean() / (rate.mean() ** 2 + 1e-300)
        energy[-1] = energy[-1] + noise                                          # E[eta^2 |s^P|^2] over (E eta)^2
        x = x - rate * (x + 0.4 * torch.randn(20_000, generator=random, dtype=torch.float64))
    looked_back = convergence_bound(first - x.square().mean() / 2, torch.stack(steps), 1.0, 0, 0.0, 1.0, 1.0, torch.stack(energy), 0.0)
    assert looked_back < 0.8 * torch.stack(squares).min()


# The paper's forms

def test_the_main_text_bounds_a_square_by_a_negative_number():
    x = 0.9 ** torch.arange(16, dtype=torch.float64)
    drop, rates = (1 - x[-1] ** 2) / 2, torch.full((15,), 0.1)
    found = paper_bound_not_valid(drop, rates, 1.0, 0.0, 1.0, 1.0, x[:-1].square())
    assert found.item() == pytest.approx(-0.05 * x[:-1].square().mean().item(), rel=1e-6) and found < 0
    assert convergence_bound(drop, rates, 1.0, 1, 0.0, 1.0, 1.0, x[:-1].square(), 0.0) >= x[-2].square()


@pytest.mark.parametrize(("d", "eta"), [(1000, 0.1), (10, 1.0), (3, 0.01)])
def test_the_appendix_is_too_small_by_2d_over_2_minus_eta_l(d, eta):
    truth, rates = d * eta / (2 - eta), torch.full((7,), eta, dtype=torch.float64)
    printed = paper_bound_not_valid(0.0, rates, 1.0, 1.0, 1.0, 1.0, 0.0).item()
    assert truth / printed == pytest.approx(2 * d / (2 - eta))
    assert convergence_bound(0.0, rates, 1.0, d, 1.0, 1.0, 1.0, truth, 0.0).item() == pytest.approx(truth)


# What freezing changes, and the corollary

def test_noise_energy_is_linear_in_the_dimension_and_quadratic_in_the_noise():
    assert noise_energy(60, 2.0, 0.5, 10) == pytest.approx(60 * 0.01)
    assert noise_energy(15, 2.0, 0.5, 10) * 4 == pytest.approx(noise_energy(60, 2.0, 0.5, 10))
    assert noise_energy(60, 0.0, float("inf"), 10) == 0


@given(gap=st.floats(0.01, 10), steps=st.integers(1, 1000), smoothness=st.floats(0.1, 10), share=st.floats(0.01, 1),
       variance=st.floats(0, 5), d=st.integers(1, 100), sigma=st.floats(0, 3))
def test_the_unclipped_bound_follows_from_form_b(gap, steps, smoothness, share, variance, d, sigma):
    """At the largest gradient that (B) allows with E|s|^2 = |gradient|^2 + V, the corollary is no smaller."""
    eta = share / smoothness
    energy = variance + noise_energy(d, sigma, 1.0, 4.0)
    largest = (gap / (eta * steps) + smoothness / 2 * eta * energy) / (1 - smoothness * eta / 2)
    fixed = convergence_bound(gap, torch.full((steps,), eta, dtype=torch.float64), smoothness, d, sigma, 1.0, 4.0, largest + variance, 0.0)
    assert fixed.item() == pytest.approx(largest)                                 # the fixed point of (B)
    assert unclipped_bound(gap, eta, steps, smoothness, variance, d, sigma, 1.0, 4.0) >= largest * (1 - 1e-9)


@pytest.mark.parametrize("rate", [0.0, -0.1, 0.51, float("nan")])
def test_the_unclipped_bound_refuses_steps_for_which_it_is_not_proved(rate):
    with pytest.raises(ValueError, match="one over the smoothness"):
        unclipped_bound(1.0, rate, 10, 2.0, 0.0, 1, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("rates", [[], [0.1, 0.0], [-0.1], [float("nan")], 0.1])
def test_step_sizes_must_be_positive_and_one_for_each_step(rates):
    for bound in (lambda: convergence_bound(1.0, torch.tensor(rates), 1.0, 1, 1.0, 1.0, 1.0),
                  lambda: paper_bound_not_valid(1.0, torch.tensor(rates), 1.0, 1.0, 1.0, 1.0, 0.0)):
        with pytest.raises(ValueError, match="positive step size"):
            bound()


@pytest.mark.parametrize("wrong", [(-1, 1.0, 1.0, 1.0), (1, -1.0, 1.0, 1.0), (1, 1.0, 0.0, 1.0), (1, 1.0, 1.0, 0.0)])
def test_noise_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        noise_energy(*wrong)


def test_the_bound_can_be_differentiated_and_needs_no_default_it_can_do_without():
    drop = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    convergence_bound(drop, torch.tensor([0.5, 0.5]), 1.0, 1, 0.0, 1.0, 10.0).backward()
    assert drop.grad == 1.0
    worst = convergence_bound(1.0, torch.tensor([0.5]), 1.0, 1, 0.0, 2.0, 10.0)
    assert worst.item() == pytest.approx((1 + 0.125 * 4 * 1.1) / 0.5)
