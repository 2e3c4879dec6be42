"""Secure mode: what the lowest bits of a release tell, and that with it they tell nothing."""

import math
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from test_processes import engine, net, run_all, tune

import dpft
import dpft.noise as noise_module
from dpft.engine import check_secure
from dpft.guarantee import Guarantee, verify
from dpft.noise import GRID_BITS, Keystream, grid_step, on_grid, perturbed_on_grid, secure_std

# the grid --------------------------------------------------------------------------------------------------------------------------


STDS = st.floats(1e-12, 1e12)


@given(STDS)
def test_the_step_is_a_power_of_two_just_below_the_deviation(std):
    step = grid_step(std).item()
    assert math.frexp(step)[0] == 0.5 and std / 2 < step * 2.0**GRID_BITS <= std


@given(STDS, st.lists(st.floats(-1000, 1000), min_size=1, max_size=6), st.lists(st.floats(-16, 16), min_size=6, max_size=6))
def test_rounding_commutes_with_the_noise_and_adding_is_exact(std, sums, noise):
    "In exact arithmetic: what is released is the Gaussian mechanism of the rounded sum, rounded."
    step, total = grid_step(std), torch.tensor(sums, dtype=torch.float64) * std
    drawn = torch.tensor(noise[:len(sums)], dtype=torch.float64) * std
    released, g = on_grid(total, step) + on_grid(drawn, step), Fraction(step.item())

    def nearest(value):
        return math.floor(value / g + Fraction(1, 2)) * g

    for s, z, r in zip(total.tolist(), drawn.tolist(), released.tolist(), strict=True):
        slack = abs(Fraction(s)) * Fraction(2) ** -50                    # dividing and adding a half may round a large sum
        rounded = Fraction(on_grid(torch.tensor(s, dtype=torch.float64), step).item())
        assert abs(rounded - Fraction(s)) <= g / 2 + slack
        assert nearest(rounded + Fraction(z)) == Fraction(r)


@settings(max_examples=50)
@given(st.integers(1, 3000), st.floats(0.1, 20), st.floats(1e-3, 10), st.integers(0, 999))
def test_one_unit_moves_the_rounded_sum_by_no_more_than_the_noise_is_made_for(entries, sigma, clip, seed):
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(entries, generator=generator, dtype=torch.float64) * 30 * clip
    one = torch.randn(entries, generator=generator, dtype=torch.float64)
    std = secure_std(sigma * clip, clip, entries)
    step = grid_step(std)
    moved = on_grid(total + one * (clip / one.norm()), step) - on_grid(total, step)
    assert moved.norm() * sigma <= std * (1 + 1e-12)
    assert sigma * clip <= std <= sigma * clip * (1 + 1e-4)


def test_the_end_of_the_grid_and_what_no_grid_can_hold():
    step = grid_step(1.0)
    far = on_grid(torch.tensor([1e30, -1e30, 65_535.5]), step)
    assert far.tolist() == [65_536.0, -65_536.0, 65_535.5]
    with pytest.raises(ValueError, match="secure_mode: a noise of 1e\\+05 for 1,000,000 entries"):
        secure_std(1e5, 1.0, 10**6)


# the noise -------------------------------------------------------------------------------------------------------------------------


def test_half_of_four_draws_is_standard_normal_and_each_draw_counts():
    stream = Keystream(bytes(32))
    sample = stream.secure_normal((500_000,), "a").numpy()
    assert sample.dtype == np.float64 and torch.equal(stream.secure_normal((2, 3), "a"), stream.secure_normal((2, 3), "a"))
    squares = (sample**2).sum()
    assert 1e-6 < stats.chi2.sf(squares, len(sample)) < 1 - 1e-6
    assert abs((sample**4).mean() - 3) < 5 * math.sqrt(96 / len(sample)) and abs((sample**3).mean()) < 5 * math.sqrt(15 / len(sample))
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    parts = [stream.normal((500_000,), 0.5, "a", "draw", draw, dtype=torch.float64).numpy() for draw in range(4)]
    assert np.array_equal(sum(parts), sample)
    assert np.abs(np.corrcoef(parts) - np.eye(4)).max() < 5 / math.sqrt(len(sample))
    assert abs(np.corrcoef(sample, stream.normal((500_000,), 1.0, "a", dtype=torch.float64).numpy())[0, 1]) < 5 / math.sqrt(len(sample))


# the attack ------------------------------------------------------------------------------------------------------------------------


def could_be(released, total):
    "Whether some float32 number, added in float32, leads from the total to what was released."
    noise = (released.double() - total.double()).float()
    near = [torch.nextafter(noise, torch.tensor(end)) for end in (-math.inf, math.inf)]
    return torch.stack([total + candidate == released for candidate in (noise, *near)]).any(0)


def released_and_sums(secure, seed):
    "What one step of an engine releases, before it is divided, its true sum, and the sum of the neighbouring data set."
    model = net().double() if secure else net()                          # sums of all magnitudes, of which few lie on the grid by chance
    e = engine(model, secure_mode=secure, batch_size=60, seed=seed)
    step, kept = next(iter(e)), {}
    for batch in step:
        step.add(batch)
    true = {name: value.clone() for name, value in step.sums.items()}
    unit = torch.randn(sum(value.numel() for value in true.values()), generator=torch.Generator().manual_seed(seed))
    unit *= e.plan.clip / unit.norm()
    parts = unit.split([value.numel() for value in true.values()])
    other = {name: value + part.view_as(value) for (name, value), part in zip(true.items(), parts, strict=True)}
    def spy(*given):
        noisy, counts = dpft.Engine.release(e, *given)
        kept.update({name: value.clone() for name, value in e.layout.views(noisy).items()})
        return noisy, counts
    with patch.object(e, "release", spy):
        step.privatize()
    return e, kept, true, other


def told(secure, seed):
    "Of each kind, how many entries show for certain that they are of the true sum, and how many that they are not."
    e, released, true, other = released_and_sums(secure, seed)
    for_certain = against = 0
    for name, value in released.items():
        spread = torch.as_tensor(e.spread[id(e.trains[name])], dtype=torch.float64)
        step = grid_step(spread)

        def possible(total, value=value, spread=spread, step=step):
            if not secure:
                return could_be(value, total)
            needed = (value - on_grid(total, step)) / step
            return (needed == needed.floor()) & (needed.abs() * step < 17 * spread)

        own, others = possible(true[name]), possible(other[name])
        for_certain, against = for_certain + int((own & ~others).sum()), against + int((~own).sum())
    return for_certain, against


def test_the_lowest_bits_name_the_data_set_without_secure_mode_and_nothing_with_it():
    plain, secure = ([told(mode, seed) for seed in range(10)] for mode in (False, True))
    assert all(for_certain > 0 for for_certain, _ in plain)              # every single release gives itself away
    assert secure == [(0, 0)] * 10


def test_the_attacker_is_never_wrong_and_the_usual_remedy_is_none():
    torch.manual_seed(0)
    for draw in (lambda: torch.randn(20_000), lambda: sum(torch.randn(20_000) for _ in range(4)) / 2,
                 lambda: Keystream().normal((20_000,), 1.0, "a")):
        nothing, one = torch.zeros(20_000), torch.ones(20_000)
        released = nothing + draw()
        assert could_be(released, nothing).all() and (~could_be(released, one)).float().mean() > 0.25


# a run -----------------------------------------------------------------------------------------------------------------------------


def test_what_a_method_asks_for_is_released_on_the_grid_too(monkeypatch):
    from test_training import Selecting

    seen = []

    def spy(total, std, keystream, *context):
        seen.append((context[0], std, perturbed_on_grid(total, std, keystream, *context)))
        return seen[-1][2]

    monkeypatch.setattr("dpft.step.perturbed_on_grid", spy)
    method = Selecting()
    e = run_all(engine(method=method, secure_mode=True, epsilon=2.0))
    asked = [(std, value) for name, std, value in seen if name == "count"]
    assert len(asked) == 2 and [value.item() for _, value in asked] == pytest.approx(method.seen)
    for std, value in asked:
        sigma = e.plan.mechanisms[1].noise_multiplier
        assert sigma < std < sigma * (1 + 1e-6)
        steps = value / grid_step(std)
        assert torch.equal(steps, steps.floor())


def test_where_secure_mode_would_mean_nothing_it_is_refused():
    with pytest.raises(ValueError, match="secure_mode=True with epsilon=inf"):
        tune(secure_mode=True, epsilon=math.inf, noise_multiplier=None)
    with pytest.raises(ValueError, match="float64, which device mps"):
        check_secure(True, True, torch.device("mps"))


# two processes ---------------------------------------------------------------------------------------------------------------------


def one_step(**settings):
    "The rounded sums of this process, and the gradients that all have."
    e = engine(secure_mode=True, seed=0, **settings)
    own, honest = {}, noise_module.on_grid

    def spy(values, step):
        own[len(own)] = (honest(values, step), step)
        return own[len(own) - 1][0].clone()

    noise_module.on_grid = spy
    try:
        next(iter(e)).take()
    finally:
        noise_module.on_grid = honest
    return [(value.numpy(), np.asarray(step)) for value, step in own.values()], [p.grad.numpy() for p in e.parameters()], e.plan.batch_size


def test_two_processes_add_up_exactly_and_only_the_first_adds_noise(two):
    (first, gradients, size), (second, same, _) = two(one_step)
    assert all(np.array_equal(a, b) for a, b in zip(gradients, same, strict=True))
    ((sums, step), (noise, _)), ((others, _),) = first, second             # all parameters lie in one piece
    gradient = np.concatenate([value.ravel() for value in gradients])
    assert np.array_equal((sums + noise + others) / step, np.floor((sums + noise + others) / step))
    assert np.array_equal(((sums + (noise + others)) / size).astype(np.float32), gradient)
    assert np.array_equal(((others + (sums + noise)) / size).astype(np.float32), gradient)


# what is said ----------------------------------------------------------------------------------------------------------------------


def test_verify_holds_the_mode_against_the_ledger(tmp_path):
    for mode in (False, True):
        run = tune(secure_mode=mode)
        run.save(tmp_path / str(mode))
        assert any("epsilon" in line for line in verify(tmp_path / str(mode)))
    claimed = Guarantee.load(tmp_path / "False" / "guarantee.json")
    claimed.secure_mode = True
    claimed.save(tmp_path / "False" / "guarantee.json")
    with pytest.raises(ValueError, match="secure_mode: the guarantee says True, the record False"):
        list(verify(tmp_path / "False"))
