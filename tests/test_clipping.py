"""No gradient is longer than its bound, whatever it is; and unequal blocks cost one number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from dpft.clipping import STABILISER, clip_factor, effective_noise_multiplier

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=64)
BOUNDS = st.floats(1e-6, 1e6)
STYLES = st.sampled_from(["flat", "automatic"])


@given(st.lists(NUMBERS, min_size=1, max_size=8), BOUNDS, STYLES, st.sampled_from([1, 2]), st.sampled_from([torch.float32, torch.float64]))
def test_no_gradient_is_longer_than_its_bound(values, clip, style, order, dtype):
    gradient = tensor(values, dtype=dtype)
    norm = gradient.norm(order)
    factor = clip_factor(norm[None], clip, style)[0]
    assert factor.isfinite() or norm * factor == 0 or norm < 1e-30  # a subnormal norm may overflow the quotient, not the product
    if not norm.isfinite() or norm == 0:
        assert factor == 0
    else:
        assert (gradient * factor).norm(2) <= clip * (1 + 8 * torch.finfo(dtype).eps)
        assert factor <= 1 or style == "automatic"


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), BOUNDS)
def test_flat_clipping_is_the_definition(norms, clip):
    wanted = [min(1.0, clip / norm) if norm > 0 else 0.0 for norm in norms]
    assert torch.allclose(clip_factor(tensor(norms, dtype=torch.float64), clip), tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)


@given(st.floats(1e-9, 1e9), st.floats(1.0, 1e3), BOUNDS)
def test_automatic_clipping_grows_with_the_norm_and_stays_below_the_bound(norm, ratio, clip):
    lengths = tensor([norm, norm * ratio], dtype=torch.float64)
    lengths = lengths * clip_factor(lengths, clip, "automatic")
    assert lengths[0] <= lengths[1] * (1 + 1e-12) and lengths[1] <= clip
    assert math.isclose(lengths[0].item(), clip * norm / (norm + STABILISER), rel_tol=1e-9)


def test_each_block_has_its_own_bound():
    norms = tensor([[2.0, 2.0], [0.1, torch.nan], [0.0, 4.0]])
    assert torch.allclose(clip_factor(norms, tensor([1.0, 3.0])), tensor([[0.5, 1.0], [1.0, 0.0], [0.0, 0.75]]))


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, tensor([1.0, 0.0])])
def test_a_bound_that_is_not_positive_is_refused(clip):
    with pytest.raises(ValueError, match="must be positive"):
        clip_factor(torch.ones(3, 2), clip)


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="'flat' or 'automatic'"):
        clip_factor(torch.ones(3), 1.0, "adaptive")


POSITIVE = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=6), POSITIVE)
def test_effective_noise_multiplier(blocks, scale):
    clips, stds = tensor(blocks, dtype=torch.float64).T
    found = effective_noise_multiplier(clips, stds)
    assert math.isclose(found, sum((clip / std) ** 2 for clip, std in blocks) ** -0.5, rel_tol=1e-9)
    assert math.isclose(effective_noise_multiplier(clips * scale, stds * scale), found, rel_tol=1e-9)  # units do not matter
    assert found <= (stds / clips).min().item() * (1 + 1e-12)  # no cheaper than its most exposed block
    split = torch.cat([clips * math.sqrt(0.5)] * 2), torch.cat([stds] * 2)
    assert math.isclose(effective_noise_multiplier(*split), found, rel_tol=1e-9)  # a block cut in two equal halves costs the same


@pytest.mark.parametrize(("clips", "stds"), [([1.0, 0.0], [1.0, 1.0]), ([1.0], [-1.0]), ([math.nan], [1.0])])
def test_blocks_that_are_not_positive_are_refused(clips, stds):
    with pytest.raises(ValueError, match="must all be positive"):
        effective_noise_multiplier(tensor(clips), tensor(stds))


def test_the_smallest_factor_that_is_precise_is_kept_and_smaller_ones_are_zero():
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).tiny
        assert clip_factor(tensor([2.0], dtype=dtype), 2 * tiny).item() == tiny
        assert clip_factor(tensor([4.0], dtype=dtype), 2 * tiny).item() == 0


def test_a_block_without_noise_has_no_noise_multiplier():
    with pytest.raises(ValueError, match="must all be positive"):
        effective_noise_multiplier(tensor([1.0, 1.0]), tensor([1.0, 0.0]))
