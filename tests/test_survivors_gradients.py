"""Of gradients and clipping: what a small change once left unnoticed by all other fast tests (`make mutants`)."""

import sys
import types

import pytest
import torch
from test_gradients import Chain, exact, noise, wave
from torch import nn, tensor

from dpft.clipping import clip_factor, effective_noise_multiplier
from dpft.gradients import Dense, Outer, Rows, only_rows, untraced

NOISE = dict(epsilon=None, noise_multiplier=1.0)  # nothing to solve


def test_the_smallest_factor_that_is_precise_is_kept_and_smaller_ones_are_zero():
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).tiny
        assert clip_factor(tensor([2.0], dtype=dtype), 2 * tiny).item() == tiny
        assert clip_factor(tensor([4.0], dtype=dtype), 2 * tiny).item() == 0


def test_a_block_without_noise_has_no_noise_multiplier():
    with pytest.raises(ValueError, match="must all be positive"):
        effective_noise_multiplier(tensor([1.0, 1.0]), tensor([1.0, 0.0]))


def test_channels_without_positions_have_biases_and_norms_too():
    exact(Chain(norm=nn.GroupNorm(2, 4), a=nn.Linear(4, 2)), two_waves, (noise(5, 4),))


def two_waves(model, batch):
    return torch.sin(model(batch[0]) * tensor([0.5, 2.0], dtype=torch.float64)).sum(1)


def test_hooks_are_kept_from_the_compiler_where_there_is_one(monkeypatch):
    def hook():
        return 1
    monkeypatch.setattr(torch.compiler, "disable", lambda kept: ("not compiled", kept))
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert untraced(hook) is hook
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("compiler"))
    assert untraced(hook) == ("not compiled", hook)


def test_groups_of_outer_products_are_summed_in_their_order():
    left, right, factors = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 6), tensor([1.0, -0.5, 2.0])
    outer = Outer(left, right, torch.Size([10, 6]))
    torch.testing.assert_close(outer.weighted(factors), torch.tensordot(factors, outer.dense(), dims=1))


def test_look_ups_of_one_table_are_one_contribution_of_its_shape():
    uses = [Rows(tensor([[0, 2], [1, 1]]), torch.randn(2, 2, 3), torch.Size([4, 3])) for _ in range(2)]
    both = only_rows(uses)
    torch.testing.assert_close(both.dense(), uses[0].dense() + uses[1].dense())
    assert only_rows([*uses, Dense(torch.zeros(2, 4, 3))]) is None and only_rows([]) is None


def test_a_bare_row_of_one_is_stretched_over_the_examples():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(1, 3))

        def forward(self, values):
            return torch.cat([values, self.shift.expand(len(values), -1)], 1)

    exact(nn.Sequential(Shifted(), nn.Linear(6, 2)).double(), wave, (noise(5, 3),))
