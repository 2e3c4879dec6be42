"""The bound in the arithmetic that there is: no example is released longer than C, whatever cancels in its gradient."""

import warnings
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_training import engine
from torch import nn

import dpft.norms
from dpft.clipping import clip_factor
from dpft.forms import Dense, Outer, Rows, short_factors
from dpft.gradients import clipped_sum, gradients
from dpft.norms import Gradients, gamma, plain_arithmetic

SLACK = 1e-6


def fed_loss(model, batch):
    "The example brings the output gradient of the last layer, as a loss may."
    return (model(batch[0]).float() * batch[1].float()).flatten(1).sum(1)


def trusted(layer, look):
    "A model that the engine has compared with the oracle, so that it takes the fast rule."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped_sum(layer, fed_loss, look, 1.0)
    return layer


def released(model, batch, loss_fn=fed_loss, clip=1.0):
    "The norm of what one example alone adds to the sum, over the bound, in float64."
    sums = clipped_sum(model, loss_fn, batch, clip)
    return sum(value.double().square().sum().item() for value in sums.values()) ** 0.5 / clip


def exactly(use):
    "The true norms of gradients with these factors, in float64 and by the other rule where there is one."
    doubled = use.map(lambda x: x.double() if x.is_floating_point() else x)
    if isinstance(use, Outer):
        left, right = doubled.left, doubled.right
        return ((left @ left.mT) * (right @ right.mT)).sum((1, 2, 3)).clamp(min=0).sqrt()
    return doubled.dense().flatten(1).norm(dim=1)


def norms_of(*uses):
    "What the engine takes for the norms of the sum of these uses of one parameter."
    parameter = nn.Parameter(torch.zeros(uses[0].dense()[0].shape if isinstance(uses[0], Dense) else uses[0].shape))
    return Gradients(torch.zeros(uses[0].size), {"weight": parameter}, {"weight": [*uses]}, uses[0].size).norms()


def cancelling(p, d, seeds, gap, dtype=torch.float32):
    "Two tokens of the same input, whose output gradients are constant and nearly cancel."
    left, right = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        one, other = torch.rand(2, generator=generator) + 0.5
        x = torch.full((d,), other.item()) if seed % 2 else torch.randn(d, generator=generator)
        left.append(torch.stack([one.expand(p), (-one * (1 + gap)).expand(p)]))
        right.append(torch.stack([x, x]))
    return torch.stack(left)[:, None].to(dtype), torch.stack(right)[:, None].to(dtype)


SHAPES = [(768, 768), (768, 3072), (768, 30522)]


@pytest.mark.parametrize(("d", "p"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tokens_that_nearly_cancel_have_no_norm_that_is_too_small(d, p, dtype):
    seeds = range(40, 50) if p < 5000 else range(42, 44)
    for gap in (0.0, 1e-5, 1e-3, 3e-3, 1e-2):
        left, right = cancelling(p, d, seeds, gap, dtype)
        use = Outer(left, right, torch.Size([p, d]))
        assert (exactly(use) <= norms_of(use) * (1 + SLACK)).all(), (p, gap)


# The worst example, by ascent -----------------------------------------------------------------------------------------------------


def worst_by_ascent(make, start, rounds=18, seed=0):
    "Random changes of the best examples so far, of every size: the largest true norm over the engine's."
    generator, best, parts = torch.Generator().manual_seed(seed), None, start
    for number in range(rounds):
        scale = 10.0 ** -(1 + number % 6)
        change = [part * (1 + scale * torch.randn(part.shape, generator=generator)) for part in parts]
        flat = [part + scale * torch.randn(len(part), *(1,) * (part.ndim - 1), generator=generator) for part in parts]
        found = [(exactly(make(each)) / norms_of(make(each)), each) for each in (parts, change, flat)]
        values = torch.stack([value.nan_to_num(0, 0, 0) for value, _ in found])
        pick = values.argmax(0)
        rows = torch.arange(len(parts[0]))
        parts = [torch.stack([each[i] for _, each in found])[pick, rows] for i in range(len(parts))]
        best = values.max().item() if best is None else max(best, values.max().item())
    return best


def outer(p, d, dtype, groups=1):
    return lambda parts: Outer(parts[0].to(dtype), parts[1].to(dtype), torch.Size([groups * p, d]))


def table(v, d, dtype, index):
    return lambda parts: Rows(index, parts[0].to(dtype), torch.Size([v, d]))


RULES = {
    "linear 24 x 40": (outer(40, 24, torch.float32), lambda: cancelling(40, 24, range(16), 1e-4)),
    "linear 768 x 768": (outer(768, 768, torch.float32), lambda: cancelling(768, 768, range(4), 1e-3)),
    "linear 3072 x 768, bf16": (outer(3072, 768, torch.bfloat16), lambda: cancelling(3072, 768, range(44, 47), 4e-3)),
    "linear 3072 x 768": (outer(3072, 768, torch.float32), lambda: cancelling(3072, 768, range(44, 47), 3e-3)),
    "embedding, one token twice": (table(9, 700, torch.float32, torch.full((4, 2), 3)),
                                   lambda: [cancelling(700, 4, range(4), 1e-3)[0][:, 0]]),
    "embedding, bf16": (table(9, 700, torch.bfloat16, torch.full((4, 2), 3)),
                        lambda: [cancelling(700, 4, range(4), 4e-3)[0][:, 0]]),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_example_is_found_whose_norm_is_too_small(rule):
    make, start = RULES[rule]
    worst = worst_by_ascent(make, [*start()])
    print(f"{rule}: largest true norm over the engine's {worst:.7f}")
    assert 0.5 < worst <= 1 + SLACK


def test_the_bound_holds_for_a_tied_head_whose_uses_cancel():
    "The embedding's rows and the head's products are the same gradient with opposite signs."
    for seed in range(20):
        torch.manual_seed(seed)
        v, d, tokens = 300, 700, 3
        index = torch.randint(0, v, (4, tokens))
        right = torch.rand(4, tokens, d) if seed % 2 else torch.rand(4, 1, 1).expand(4, tokens, d).clone()
        left = -(1 + 1e-3 * torch.rand(())) * nn.functional.one_hot(index, v).float()[:, None]
        uses = Rows(index, right, torch.Size([v, d])), Outer(left, right[:, None].clone(), torch.Size([v, d]))
        dense = sum(use.map(lambda x: x.double() if x.is_floating_point() else x).dense() for use in uses)
        assert (dense.flatten(1).norm(dim=1) <= norms_of(*uses) * (1 + SLACK)).all()


@pytest.mark.parametrize("size", [1, 200, 50_257, 3_000_000])
def test_a_long_gradient_of_equal_numbers_is_measured_right(size):
    values = torch.full((2, size), 0.1)
    wanted = values.double().norm(dim=1)
    found = norms_of(Dense(values))
    assert (found >= wanted * (1 - SLACK)).all() and (found <= wanted * (1 + 1e-4)).all()


class Words(nn.Module):
    "Only the tokens are free: an embedding, frozen, and a head."

    def __init__(self, vocabulary, width):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.table.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.table(ids))


def word_loss(model, batch):
    ids = batch[0]
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


def test_no_sequence_of_tokens_is_released_beyond_the_bound():
    "A search over tokens alone: the longest release of the sequences tried, kept and changed one token at a time."
    torch.manual_seed(0)
    model = Words(2000, 256)
    with torch.no_grad():
        model.table.weight[1::2] = model.table.weight[::2] * 1.001      # pairs of nearly the same word
    generator = torch.Generator().manual_seed(1)
    ids, clip = torch.randint(0, 2000, (24, 9), generator=generator), 1e-4
    clipped_sum(model, word_loss, (ids,), clip)
    exact = Words(2000, 256).double()
    exact.load_state_dict(model.state_dict())
    best = torch.zeros(24, dtype=torch.float64)
    for _ in range(12):
        change = ids.clone()
        place = torch.randint(0, 9, (24, 1), generator=generator)
        change.scatter_(1, place, torch.randint(0, 2000, (24, 1), generator=generator))
        taken = gradients(model, word_loss, (change,))
        use = taken.uses["head.weight"][0]
        found = exactly(use) * clip_factor(taken.norms(), clip).double() / clip if isinstance(use, Outer) else best
        better = found > best
        ids[better], best = change[better], torch.maximum(best, found)
    assert best.max() <= 1 + SLACK
    for i in range(4):
        assert released(model, (ids[i:i + 1],), word_loss, clip) <= 1 + SLACK


# What a CPU multiplies in bfloat16 ------------------------------------------------------------------------------------------------


@contextmanager
def rounding_processor():
    "A processor that rounds the factors of a float32 product to bfloat16 wherever it is allowed to."
    honest, matmul = torch.Tensor.addmm_, torch.backends.mkldnn.matmul

    def rounded(total, left, right):
        return honest(total, *(x.bfloat16().float() if matmul.fp32_precision == "bf16" else x for x in (left, right)))

    with patch.object(torch.Tensor, "addmm_", rounded):
        yield


def largest_release(dtype, size=64):
    "Over bounds that leave all numbers of a gradient equal, so that rounding may raise all at once: one example of one token."
    torch.manual_seed(0)
    model = trusted(nn.Linear(size, size, bias=False).to(dtype), (torch.randn(3, 1, size).to(dtype),) * 2)
    ones = torch.ones(1, 1, size).to(dtype)
    return max(released(model, (ones, ones), clip=1 + i / 97) for i in range(97))


def test_nobody_is_released_beyond_the_bound_where_factors_are_rounded():
    with rounding_processor():
        assert 0.99 < largest_release(torch.bfloat16) <= 1 + SLACK


def test_a_margin_without_that_rounding_would_be_too_small():
    with rounding_processor(), patch.object(dpft.norms, "SHORT", 0.0):
        assert largest_release(torch.bfloat16) > 1.001


def test_factors_in_float32_are_never_rounded():
    with rounding_processor():
        assert largest_release(torch.float32) <= 1 + SLACK
        assert largest_release(torch.float32) > 1 - 1e-4      # nor does it pay the margin


# What a GPU's tensor cores multiply in TF32 ---------------------------------------------------------------------------------------


def cut(numbers, largest):
    "What is left down to 23 binary digits below the first one of the largest."
    last = np.exp2(np.frexp(largest)[1] - 24.0)
    return np.where(largest > 0, np.trunc(numbers / last) * last, 0.0)


def tensor_core(left, right, block=8):
    "Products of matrices in blocks of `block` terms, cut when they are aligned with the running sum, and again when it is stored."
    left, right = (x.double().numpy() for x in (left, right))
    total = np.zeros((*left.shape[:-1], right.shape[-1]))
    for start in range(0, left.shape[-1], block):
        them = left[..., start:start + block, None] * right[..., None, start:start + block, :]     # (..., p, k, d)
        them = np.concatenate([them, total[..., None, :]], -2)
        total = cut(them, np.abs(them).max(-2, keepdims=True)).sum(-2)
        total = cut(total, np.abs(total))
    return torch.from_numpy(total).float()


@pytest.mark.parametrize("block", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["normal", "of one sign", "of all sizes", "that cancel"])
def test_what_a_tensor_core_cuts_off_is_within_four_roundings_an_operation(kind, block):
    draw, count = torch.Generator().manual_seed(block), 384
    left, right = torch.randn(2, 3, count, generator=draw)
    if kind == "of one sign":
        left, right = left.abs() + 1, right.abs() + 1
    if kind == "of all sizes":
        left = left * torch.exp2(torch.randint(-30, 30, left.shape, generator=draw))
    if kind == "that cancel":
        left[:, 1::2], right[:, 1::2] = left[:, ::2], -right[:, ::2]
    left, right = left.bfloat16().float(), right.bfloat16().float().mT
    exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    lost = ((tensor_core(left, right, block).double() - exact).abs() / size).max().item()
    assert lost <= gamma(dpft.forms.CUT * count, torch.float32)


def test_bfloat16_factors_on_a_gpu_are_multiplied_in_tf32_and_count_four_times():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def made(device, dtype):
        with FakeTensorMode():
            return Outer(*(torch.empty(2, 1, 3, size, dtype=dtype, device=device) for size in (40, 50)), torch.Size([40, 50]))
    on_cpu, on_gpu = made("cpu", torch.bfloat16), made("cuda", torch.bfloat16)
    assert on_gpu.short and on_gpu.depth() == 4 * on_cpu.depth() and on_gpu.terms() == 4 * on_cpu.terms()
    assert not made("cuda", torch.float32).short and made("cuda", torch.float32).depth() == on_cpu.depth()
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    with plain_arithmetic("cpu"):
        with short_factors(True):
            assert [each.fp32_precision for each in backends] == ["tf32", "bf16"]
        with short_factors(False):
            assert [each.fp32_precision for each in backends] == ["ieee", "ieee"]
        assert [each.fp32_precision for each in backends] == ["ieee", "ieee"]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.01), (torch.bfloat16, 1.06)])
def test_ordinary_norms_are_raised_by_little(dtype, most):
    "What the margin costs where tokens are nearly orthogonal, the dearest of ordinary cases."
    torch.manual_seed(0)
    left, right = torch.randn(4, 1, 128, 768).to(dtype), torch.randn(4, 1, 128, 3072).to(dtype)
    use = Outer(left, right, torch.Size([768, 3072]))
    assert (norms_of(use) / exactly(use)).max() <= most


def test_a_bound_whose_squares_fall_out_of_float32_is_refused_before_anything_is_drawn():
    "At C = 1e-25 all norms were 0 and nothing was clipped: an example was released at 1.6 C."
    with pytest.raises(ValueError, match="multiply the loss and clip by the same number"):
        engine(clip=1e-25)
    assert engine(clip=1e-12).plan.clip == 1e-12



@pytest.mark.parametrize("factor", [1.003, 1.0019])
def test_factors_that_half_precision_would_shorten_are_measured_in_full(factor):
    "Every entry is a number that bfloat16 rounds down, so products in bfloat16 are all too small."
    use = Outer(torch.full((2, 1, 3, 512), factor), torch.full((2, 1, 3, 512), factor), torch.Size([512, 512]))
    assert (exactly(use) <= norms_of(use) * (1 + SLACK)).all()
