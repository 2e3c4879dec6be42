"""The engine against the slow oracle: any model, any freezing, any input; and what it refuses."""

import warnings
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, tensor
from torch.autograd.graph import saved_tensors_hooks

import dpft.forms
from dpft.clipping import clip_factor
from dpft.forms import Dense, Outer, Rows, only_rows, pair_squares
from dpft.gradients import (
    Block,
    Partition,
    clipped_sum,
    gradients,
    mapped_gradients,
    per_example_gradients,
    per_example_norms,
    reuse_memory,
    unseen,
    weighted_sum,
)
from dpft.hooks import _without_compiler
from dpft.norms import Gradients
from dpft.oracle import per_example_losses, select_rows


def flat(rows):
    "All per-example gradients side by side, (B, d)."
    return torch.cat([value.reshape(len(value), -1) for value in rows.values()], dim=1)


def total(sums):
    return torch.cat([value.flatten() for value in sums.values()])


def relative(found, wanted):
    "Largest difference, in units of the largest value wanted."
    scale = wanted.abs().max()
    return ((found - wanted).abs().max() / torch.where(scale > 0, scale, 1.0)).item()


def summed(rows, groups):
    return torch.zeros(int(groups.max()) + 1, rows.shape[1], dtype=rows.dtype).index_add_(0, groups, rows)


def worst_error(model, loss_fn, batch, groups=None):
    "Worst relative error of everything that the engine returns, for what trains now."
    oracle = per_example_gradients(model, loss_fn, batch)
    rows = flat(oracle)
    factors = torch.linspace(-1.0, 1.0, len(rows), dtype=rows.dtype)
    groups = torch.arange(len(rows)) // 2 if groups is None else groups
    units = summed(rows, groups)
    clip = 0.7 * rows.norm(dim=1).median().item() or 1.0
    errors = [
        relative(per_example_norms(model, loss_fn, batch), rows.norm(dim=1)),
        relative(per_example_norms(model, loss_fn, batch, order=1), rows.abs().sum(1)),
        relative(total(weighted_sum(model, loss_fn, batch, factors)), factors @ rows),
        relative(total(weighted_sum(model, loss_fn, batch, factors.abs(), absolute=True)), factors.abs() @ rows.abs()),
    ]
    for style in ("flat", "automatic"):
        alone = clip_factor(rows.norm(dim=1), clip, style) @ rows
        together = clip_factor(units.norm(dim=1), clip, style) @ units
        errors.append(relative(total(clipped_sum(model, loss_fn, batch, clip, style)), alone))
        errors.append(relative(total(clipped_sum(model, loss_fn, batch, clip, style, groups)), together))
    return max(errors)


def exact(model, loss_fn, batch, **settings):
    "The engine agrees with the oracle and stays silent."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worst_error(model, loss_fn, batch, **settings) <= 1e-9


def slow_but_exact(model, loss_fn, batch, *names, way="materialised by vmap"):
    "The engine agrees with the oracle, with one warning that names the parameters and the way they take."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert worst_error(model, loss_fn, batch) <= 1e-9
    assert len(seen) == 1, [str(one.message) for one in seen]
    named, text = str(seen[0].message).split(":")
    assert sorted(named.split(", ")) == sorted(names) and text.endswith(way)


class Net(nn.Module):
    "A body that returns (B, ..., anything); the loss is any smooth function of one example."

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.double()


class Chain(Net):
    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def wave(model, batch):
    "A loss with a gradient of its own for each output."
    values = model(batch[0]).flatten(1)
    weights = torch.linspace(0.5, 2.0, values.shape[1], dtype=values.dtype)
    return (torch.sin(values * weights) + 0.1 * values.square()).sum(1)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the families


@pytest.mark.parametrize("name", zoo.NAMES)
def test_engine_agrees_with_the_oracle_under_every_freeze_set(name, record_property):
    model, loss_fn, batch = zoo.build(name)
    worst = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for freeze_set in zoo.FREEZE_SETS:
            zoo.freeze(model, freeze_set)
            worst[freeze_set] = worst_error(model, loss_fn, batch, groups=torch.tensor([0, 1, 0, 2, 1]))
    record_property("worst relative error", max(worst.values()))
    print(f"{name}: worst relative error {max(worst.values()):.1e}")
    assert max(worst.values()) <= 1e-9, worst


def every_transition(names):
    "A walk that goes from each to each other exactly once: a circuit of Hierholzer's."
    left, stack, walk = {name: [other for other in names if other != name] for name in names}, [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_trains_may_change_at_any_step(name):
    "Every ordered transition between two freeze sets, on one model: no stale state, no broken bound, nothing left behind."
    model, loss_fn, batch = zoo.build(name, rows=3)
    sets, oracles, clip, errors, norms = list(zoo.FREEZE_SETS), {}, 0.05, [], []
    for freeze_set in sets:
        zoo.freeze(model, freeze_set)
        oracles[freeze_set] = flat(per_example_gradients(model, loss_fn, batch))
    one = {key: value[:1] for key, value in batch.items()} if isinstance(batch, dict) else tuple(value[:1] for value in batch)
    walk = every_transition(sets)
    assert sorted(pairwise(walk)) == sorted(pair for pair in product(sets, sets) if pair[0] != pair[1])
    for freeze_set in walk:
        zoo.freeze(model, freeze_set)
        flags = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
        rows = oracles[freeze_set]
        errors.append(relative(total(clipped_sum(model, loss_fn, batch, clip)), clip_factor(rows.norm(dim=1), clip) @ rows))
        norms.append(total(clipped_sum(model, loss_fn, one, clip)).norm().item() / clip)
        assert errors[-1] <= 1e-9 and norms[-1] <= 1 + 1e-9
        assert flags == {key: parameter.requires_grad for key, parameter in model.named_parameters()}
        assert untouched(model)
    print(f"{name}: {len(errors)} steps, worst relative error {max(errors):.1e}, longest release {max(norms):.9f} of the clip bound")


def untouched(model):
    "No hook, no stand-in for a parameter, and no gradient is left."
    return all(not module._forward_hooks and not module._forward_pre_hooks and not set(module._parameters) & set(module.__dict__)
               for module in model.modules()) and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["vit", "gpt2-lm"])
@pytest.mark.parametrize("after", [1, 5, 12])
def test_an_error_in_the_loss_leaves_the_model_as_it_was(name, after):
    model, loss_fn, batch = zoo.build(name)
    zoo.freeze(model, "biases")
    next(model.parameters()).requires_grad_(True)
    flags, modes = [p.requires_grad for p in model.parameters()], [module.training for module in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    calls = []

    def failing(model, batch):
        calls.append(len(calls))
        losses = loss_fn(model, batch)
        if len(calls) >= after:
            raise KeyError("the user's own mistake")
        return losses

    with pytest.raises(KeyError, match="own mistake"):
        for _ in range(after):
            gradients(model, failing, batch)
    assert flags == [p.requires_grad for p in model.parameters()] and modes == [module.training for module in model.modules()]
    assert untouched(model) and all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["roberta", "gpt2", "vit"])
def test_gradient_checkpointing_changes_nothing(name):
    model, loss_fn, batch = zoo.build(name)
    model.train()
    wanted = clipped_sum(model, loss_fn, batch, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name is about to change
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert relative(total(clipped_sum(model, loss_fn, batch, 0.1)), total(wanted)) <= 1e-12
    zoo.freeze(model, "biases")
    exact(model, loss_fn, batch)


def test_bfloat16_autocast_is_close_and_its_sums_are_float32():
    model, loss_fn, batch = zoo.build("roberta")
    model.float()

    def mixed(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch).float()

    mixed.full_precision = loss_fn  # the oracle's comparison is in float32; in bfloat16 a draw may call a layer slow
    clip = per_example_norms(model, loss_fn, batch).median().item() / 2
    wanted = total(clipped_sum(model, loss_fn, batch, clip))
    inside = clipped_sum(model, mixed, batch, clip)
    with torch.autocast("cpu", torch.bfloat16):
        outside = clipped_sum(model, loss_fn, batch, clip)
    for found in (inside, outside):
        assert all(value.dtype == torch.float32 for value in found.values())
        assert (total(found) - wanted).norm() <= 0.05 * wanted.norm()
    assert relative(total(outside), total(inside)) <= 1e-6  # autocast around the call reaches the forward pass only


# ---- layers


class Scale(nn.Module):
    "Llama's way of writing a norm: a bare parameter."

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def test_llama_from_its_config_is_exact_without_a_fallback():
    model, loss_fn, batch = zoo.build("llama")
    exact(model, loss_fn, batch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    exact(model, loss_fn, batch)


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 2, 3, 4), (5, 2, 2, 2, 4)])
def test_linear_takes_any_number_of_dimensions(shape):
    exact(Chain(a=nn.Linear(4, 6), act=nn.Tanh(), b=nn.Linear(6, 3, bias=False)), wave, (noise(*shape),))


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 2, 3, 4)])
@pytest.mark.parametrize("layer", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4, eps=1e-6), lambda: nn.RMSNorm(4), lambda: Scale(4),
                                   lambda: nn.LayerNorm(4, elementwise_affine=False)])
def test_norms_take_any_number_of_dimensions(layer, shape):
    exact(Chain(a=nn.Linear(4, 4), norm=layer(), b=nn.Linear(4, 2)), wave, (noise(*shape),))


def test_norms_over_several_dimensions():
    exact(Chain(norm=nn.LayerNorm((3, 4)), flatten=nn.Flatten(), b=nn.Linear(12, 2)), wave, (noise(5, 2, 3, 4)[:, 0],))


CONVOLUTIONS = [
    (nn.Conv1d, dict(kernel_size=3)),
    (nn.Conv1d, dict(kernel_size=3, stride=2, padding=1, dilation=2, groups=2)),
    (nn.Conv1d, dict(kernel_size=4, padding="same", padding_mode="circular")),
    (nn.Conv2d, dict(kernel_size=(3, 2), stride=(1, 2), padding=(2, 0))),
    (nn.Conv2d, dict(kernel_size=3, dilation=2, groups=4, bias=False)),
    (nn.Conv2d, dict(kernel_size=3, padding=1, padding_mode="reflect")),
    (nn.Conv2d, dict(kernel_size=3, padding="same", padding_mode="replicate", groups=2)),
    (nn.Conv2d, dict(kernel_size=6, padding="valid")),
    (nn.Conv3d, dict(kernel_size=2, stride=2)),
    (nn.Conv3d, dict(kernel_size=(1, 2, 3), padding=(0, 1, 2), groups=2, padding_mode="circular")),
    (nn.Conv1d, dict(kernel_size=3, stride=2, groups=4)),                                    # of one channel each, and a rest
    (nn.Conv2d, dict(kernel_size=(2, 3), stride=(3, 2), padding=1, dilation=(2, 1), groups=4)),
    (nn.Conv3d, dict(kernel_size=2, padding=1, groups=4, padding_mode="circular")),
]


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS)
def test_convolutions(kind, options):
    space = {nn.Conv1d: (9,), nn.Conv2d: (6, 7), nn.Conv3d: (4, 3, 4)}[kind]
    exact(Chain(conv=kind(4, 8, **options), norm=nn.GroupNorm(4, 8), act=nn.SiLU(inplace=True)), wave, (noise(5, 4, *space),))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_patches_of_a_few_examples_at_a_time(channels, monkeypatch):
    monkeypatch.setattr("dpft.layer_rules.PATCHES", 300)                                       # of 5 examples: two, two and one
    exact(Chain(conv=nn.Conv2d(channels, 2, 3)), wave, (noise(5, channels, 6, 7),))


def test_convolutions_with_more_channels_than_positions_keep_their_factors():
    model = Chain(conv=nn.Conv2d(12, 16, 2, groups=2, stride=2), flatten=nn.Flatten(), head=nn.Linear(16, 2)).double()
    batch = (noise(5, 12, 2, 2),)
    found = gradients(model, wave, batch)
    assert [*map(type, found.uses["conv.weight"])] == [Outer]
    exact(model, wave, batch)


class ThreeBranches(Net):
    "Query, key and value of one input."

    def forward(self, x):
        return self.value(x) * torch.sigmoid(self.query(x) * self.key(x))


@pytest.mark.parametrize("tokens", [2, 3])
def test_matrices_with_one_input_are_measured_as_one(tokens, monkeypatch):
    model = ThreeBranches(query=nn.Linear(12, 16), key=nn.Linear(12, 16), value=nn.Linear(12, 16)).double()
    batch, calls = (noise(5, tokens, 12),), []
    exact(model, wave, batch)
    found = gradients(model, wave, batch)
    honest = dpft.forms.token_products
    monkeypatch.setattr("dpft.forms.token_products", lambda *pair: (calls.append(1), honest(*pair))[1])
    together = found.norms()
    assert len(calls) == 2                                                                   # one of the input, one of all outputs
    parts = [Partition(name, (parameter,)) for name, parameter in model.named_parameters()]
    assert relative(found.norms(partitions=parts).square().sum(1).sqrt(), together) <= 1e-12
    assert len(calls) == 2 + 3 * 2                                                           # apart, each has its own


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 131])
def test_each_pair_of_tokens_is_multiplied_once(tokens):
    left, right = noise(4, tokens, 5), noise(4, tokens, 7, seed=1)
    assert relative(pair_squares(left, right)[0], (left.mT @ right).square().sum((1, 2))) <= 1e-12


def test_embedding_with_a_padding_row_and_repeated_tokens():
    ids = torch.tensor([[1, 2, 2, 0], [0, 0, 0, 0], [3, 3, 3, 3], [4, 1, 0, 2], [1, 1, 2, 2]])
    exact(Chain(embedding=nn.Embedding(5, 4, padding_idx=0), act=nn.Tanh(), head=nn.Linear(4, 2)), wave, (ids,))


class Tied(Net):
    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))


@pytest.mark.parametrize("vocabulary", [7, 300])
def test_a_head_tied_to_its_embedding(vocabulary):
    model = Tied(embedding=nn.Embedding(vocabulary, 4), head=nn.Linear(4, vocabulary))
    model.head.weight = model.embedding.weight
    exact(model, wave, (torch.randint(0, vocabulary, (5, 3), generator=torch.Generator().manual_seed(1)),))


class Reused(Net):
    def forward(self, x):
        return self.again(torch.tanh(self.again(torch.tanh(self.again(x)) + x)))


def test_a_module_used_three_times_adds_up():
    exact(Reused(again=nn.Linear(6, 6), unused=nn.Linear(3, 3)), wave, (noise(5, 2, 6),))
    exact(Reused(again=nn.Conv1d(6, 6, 1)), wave, (noise(5, 6, 2),))
    exact(Reused(again=nn.LayerNorm(6)), wave, (noise(5, 2, 6),))


def test_an_unused_parameter_and_a_frozen_loss_give_zero():
    model = Reused(again=nn.Linear(6, 6), unused=nn.Linear(3, 3))
    model.again.requires_grad_(False)
    exact(model, wave, (noise(5, 2, 6),))
    assert total(clipped_sum(model, wave, (noise(5, 2, 6),), 1.0)).abs().max() == 0
    assert per_example_norms(model, wave, (noise(5, 2, 6),)).tolist() == [0.0] * 5


class Folded(Net):
    "Windows of a sequence as further rows, as Swin has them."

    def forward(self, x):
        rows, windows = x.shape[:2]
        return self.head(torch.tanh(self.inner(x.flatten(0, 1)))).unflatten(0, (rows, windows))


class TimeFirst(Net):
    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def test_rows_folded_into_the_leading_dimension():
    exact(Folded(inner=nn.Linear(4, 5), head=nn.Linear(5, 2)), wave, (noise(5, 3, 2, 4),))


def test_time_before_examples_is_not_taken_for_examples():
    for tokens in (3, 5, 6):  # 3 is the size of the check, 5 the size of the batch
        slow_but_exact(TimeFirst(inner=nn.Linear(4, 5)), wave, (noise(5, tokens, 4),), "inner.weight", "inner.bias")


class Shared(Net):
    "A learned prompt, the same for every example, goes through a layer once for the whole batch."

    def forward(self, x):
        return x + self.project(self.positions(torch.arange(x.shape[1])[None]))


def test_what_is_computed_once_for_the_whole_batch_still_belongs_to_each_example():
    model = Shared(positions=nn.Embedding(6, 5), project=nn.Linear(5, 4))
    exact(model, wave, (noise(5, 6, 4),))
    model.project.requires_grad_(False)
    exact(model, wave, (noise(5, 6, 4),))
    clipped = total(clipped_sum(model, wave, (noise(5, 6, 4),), 1e-3)).norm()
    assert 1e-3 * 1.01 < clipped <= 5e-3 * (1 + 1e-9)  # five examples are bounded one by one, not as one


class Bare(Net):
    def __init__(self):
        super().__init__(head=nn.Linear(4, 2))
        self.token = nn.Parameter(noise(1, 1, 4))
        self.position = nn.Parameter(noise(1, 4, 4, seed=1))
        self.scale = nn.Parameter(noise(4, seed=2))
        self.gain = nn.Parameter(noise(1, seed=3)[0])

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(torch.tanh(x * self.scale)) * self.gain


class Odd(Net):
    "A bare matrix and a layer's weight, used in ways that no tap follows."

    def __init__(self):
        super().__init__(embedding=nn.Linear(4, 4), head=nn.Linear(4, 2))
        self.matrix = nn.Parameter(noise(4, 4))

    def forward(self, x):
        return self.head(F.linear(torch.tanh(F.linear(x, self.matrix)), self.embedding.weight))


class Attention(Net):
    def __init__(self):
        super().__init__(attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2))

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Failing(Bare):
    "Fails in the middle of its forward pass, when told so."
    fails = False

    def forward(self, x):
        values = super().forward(x)
        if self.fails:
            raise KeyError("the model's own mistake")
        return values


def test_an_error_in_the_forward_pass_leaves_bare_parameters_in_place():
    model, batch = Failing(), (noise(5, 3, 4),)
    wanted = total(clipped_sum(model, wave, batch, 1.0))
    model.fails = True
    with pytest.raises(KeyError, match="own mistake"):
        clipped_sum(model, wave, batch, 1.0)
    assert untouched(model) and all(parameter.requires_grad for parameter in model.parameters())
    model.fails = False
    assert torch.equal(total(clipped_sum(model, wave, batch, 1.0)), wanted)


def test_bare_parameters_are_exact_without_a_fallback():
    exact(Bare(), wave, (noise(5, 3, 4),))


def test_odd_uses_fall_back_with_one_warning_and_stay_exact():
    model = Odd()
    model.embedding.bias.requires_grad_(False)
    slow_but_exact(model, wave, (noise(5, 3, 4),), "matrix", "embedding.weight")


def test_multi_head_attention_falls_back_and_stays_exact():
    names = [f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]
    slow_but_exact(Attention(), wave, (noise(5, 3, 4),), *names)


class Deciding(Net):
    "A weight in odd use, and a decision by a value, which vmap cannot follow."

    def forward(self, x):
        y = F.linear(x, self.inner.weight)
        return y.sin() if x.nan_to_num(0, 0, 0).abs().sum() >= 0 else y


def test_what_vmap_cannot_follow_is_taken_one_by_one():
    slow_but_exact(Deciding(inner=nn.Linear(4, 4, bias=False)), wave, (noise(5, 3, 4),), "inner.weight",
                   way="computed one example at a time")


def test_vmap_under_dropout_and_in_chunks_bounds_every_example(monkeypatch):
    monkeypatch.setattr("dpft.norms.CHUNK", 40)
    monkeypatch.setattr("dpft.gradients.CHUNK", 40)
    model, batch = Odd(), (noise(7, 3, 4),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worst_error(model, wave, batch) <= 1e-9
    rows, found = per_example_gradients(model, wave, batch), mapped_gradients(model, wave, batch)
    assert all(torch.allclose(found[name], values, rtol=1e-12, atol=1e-12) for name, values in rows.items())
    model.dropout = nn.Dropout(0.5)
    noisy = mapped_gradients(model, lambda m, b: wave(m, (m.dropout(b[0]),)), batch)
    assert all(values.isfinite().all() for values in noisy.values())


class ZeroGate(Net):
    "A weight in odd use behind a gate that starts at zero, as LoRA's and adapters' do."

    def __init__(self):
        super().__init__(inner=nn.Linear(4, 4, bias=False), gate=nn.Linear(4, 4, bias=False))
        nn.init.zeros_(self.gate.weight)

    def forward(self, x):
        return x + self.gate(torch.tanh(F.linear(x, self.inner.weight)))


def test_a_zero_matrix_does_not_hide_what_is_behind_it():
    model, batch = ZeroGate(), (noise(5, 3, 4),)
    slow_but_exact(model, wave, batch, "inner.weight")
    assert not model.gate.weight.any()
    with torch.no_grad():
        model.gate.weight.copy_(noise(4, 4))
    exact(model, wave, batch)


def test_a_first_batch_that_shows_nothing_decides_nothing():
    "One example, or the same one many times, cannot show that rows are confused."
    model, batch = TimeFirst(inner=nn.Linear(4, 5)), (noise(5, 6, 4),)
    for first in ((batch[0][:1],), (batch[0][:1].expand(4, -1, -1),)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clipped_sum(model, wave, first, 1.0)
    slow_but_exact(model, wave, batch, "inner.weight", "inner.bias")


def test_an_empty_batch_sums_to_zero():
    model, loss_fn, batch = zoo.build("bert")
    empty = {name: value[:0] for name, value in batch.items()}
    assert per_example_norms(model, loss_fn, empty).shape == (0,)
    sums = clipped_sum(model, loss_fn, empty, 1.0)
    assert {name: value.shape for name, value in sums.items()} == {name: p.shape for name, p in model.named_parameters()}
    assert all(not value.any() for value in sums.values())


# ---- partitions, blocks, masks


def test_norms_of_partitions():
    model, loss_fn, batch = zoo.build("gpt2-lm")
    named = dict(model.named_parameters())
    oracle = per_example_gradients(model, loss_fn, batch)
    parts = [Partition("a", tuple(list(named.values())[:5])), Partition("b", tuple(list(named.values())[5:]))]
    names = list(named)
    for order, measure in ((1, lambda rows: rows.abs().sum(1)), (2, lambda rows: rows.norm(dim=1))):
        wanted = torch.stack([measure(flat({name: oracle[name] for name in part})) for part in (names[:5], names[5:])], dim=1)
        found = per_example_norms(model, loss_fn, batch, order, parts, scale=torch.tensor([2.0, 0.5]))
        assert relative(found, wanted * torch.tensor([2.0, 0.5])) <= 1e-9
    with pytest.raises(ValueError, match="order=3"):
        per_example_norms(model, loss_fn, batch, order=3)


@pytest.mark.parametrize("family", ["roberta", "gpt2-lm"])  # a table that is looked up, and one that is the output layer too
def test_masked_norms_are_those_of_the_masked_gradients(family):
    model, loss_fn, batch = zoo.build(family)
    batch["input_ids"][:, 2] = batch["input_ids"][:, 1]      # a row that is looked up twice counts as one
    taken, oracle = gradients(model, loss_fn, batch), per_example_gradients(model, loss_fn, batch)
    for name, own in oracle.items():
        mask = noise(*own.shape[1:], seed=1) > 0.3
        assert torch.allclose(taken.square_norms(name, mask), (own * mask).square().flatten(1).sum(1), rtol=1e-10, atol=1e-24), name


def test_blocks_with_masks_are_bounded_each_by_its_own_bound():
    model, loss_fn, batch = zoo.build("roberta")
    zoo.freeze(model, "no embeddings")
    oracle = per_example_gradients(model, loss_fn, batch)
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masks = {name: noise(*p.shape, seed=i) > 0.3 for i, (name, p) in enumerate(trains.items())}
    rest = {name: ~mask for name, mask in masks.items()}
    blocks = [Block(list(trains.values()), list(chosen.values()), clip=clip) for chosen, clip in ((masks, 0.02), (rest, 0.3))]
    sums, norms = gradients(model, loss_fn, batch).clipped_sum(blocks)
    weak, strong = (flat({name: value * chosen[name] for name, value in oracle.items()}) for chosen in (masks, rest))
    wanted = clip_factor(weak.norm(dim=1), 0.02) @ weak + clip_factor(strong.norm(dim=1), 0.3) @ strong
    assert relative(total(sums), wanted) <= 1e-9
    assert relative(norms, torch.stack([weak.norm(dim=1), strong.norm(dim=1)], dim=1)) <= 1e-9


def test_factors_may_differ_between_parameters():
    model, loss_fn, batch = zoo.build("cnn")
    oracle = per_example_gradients(model, loss_fn, batch)
    factors = {name: noise(5, seed=i) for i, name in enumerate(oracle)}
    found = weighted_sum(model, loss_fn, batch, factors)
    assert relative(total(found), torch.cat([(factors[name] @ rows.flatten(1)) for name, rows in oracle.items()])) <= 1e-9


def test_chunks_do_not_show(monkeypatch):
    model, loss_fn, batch = zoo.build("vit")
    for module in ("norms", "layer_rules", "gradients"):
        monkeypatch.setattr(f"dpft.{module}.CHUNK", 300)
    exact(model, loss_fn, batch)


# ---- what is refused


@pytest.mark.parametrize("reduce", [torch.mean, lambda losses: losses[:2], lambda losses: losses[:, None], lambda losses: 1.0])
def test_a_loss_of_the_wrong_shape_is_refused(reduce):
    model, loss_fn, batch = zoo.build("cnn")
    with pytest.raises(ValueError, match="one loss per example"):
        gradients(model, lambda m, b: reduce(loss_fn(m, b)), batch)


def test_the_error_does_not_tell_how_many_examples_were_drawn():
    "That number is drawn at random, and what hides an example in a batch."
    model, loss_fn, batch = zoo.build("cnn")
    def told(rows, reduce):
        with pytest.raises(ValueError) as error:
            gradients(model, lambda m, b: reduce(loss_fn(m, b)), select_rows(batch, torch.arange(rows)))
        return str(error.value)
    for reduce in (lambda losses: losses[:1], lambda losses: losses[:, None], lambda losses: 1.0, lambda losses: losses.repeat(2)):
        assert told(2, reduce) == told(3, reduce)


def test_nothing_to_train_and_no_tensor_are_refused():
    model, loss_fn, batch = zoo.build("cnn")
    with pytest.raises(ValueError, match="at least one tensor"):
        gradients(model, loss_fn, {"text": "a"})
    with pytest.raises(ValueError, match="ConvNet has nothing to train"):
        gradients(model.requires_grad_(False), loss_fn, batch)


# ---- the bound


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", [0, 3])
def test_an_example_that_is_not_finite_contributes_exactly_nothing(bad, dtype, where):
    model, loss_fn, _ = zoo.build("cnn")
    model.to(dtype)

    def scaled(model, batch):
        return loss_fn(model, batch) * batch[2] * (batch[2] if dtype == torch.float64 else 1)

    pixels, scale = noise(5, 3, 8, 8).to(dtype), torch.ones(5, dtype=dtype)
    scale[where] = bad if dtype == torch.float32 else bad * 1e130  # its square is no float64 either
    others = torch.tensor([i for i in range(5) if i != where])
    labels = torch.tensor([0, 1, 2, 0, 1])
    for freeze_set in ("full", "biases"):
        zoo.freeze(model, freeze_set)
        wanted = clipped_sum(model, scaled, (pixels[others], labels[others], torch.ones(4, dtype=dtype)), 0.1)
        found = clipped_sum(model, scaled, (pixels, labels, scale), 0.1)
        assert relative(total(found), total(wanted)) <= (1e-5 if dtype == torch.float32 else 1e-12)
        alone = clipped_sum(model, scaled, (pixels[where:where + 1], labels[where:where + 1], scale[where:where + 1]), 0.1)
        assert all(not value.any() for value in alone.values())


def test_a_factor_of_zero_silences_what_is_not_finite():
    model = Chain(a=nn.Linear(4, 3))
    x = noise(4, 2, 4)
    x[1] = torch.nan
    for absolute in (False, True):
        found = weighted_sum(model, wave, (x,), torch.tensor([1.0, 0.0, 1.0, 0.5]), absolute)
        wanted = weighted_sum(model, wave, (x[[0, 2, 3]],), torch.tensor([1.0, 1.0, 0.5]), absolute)
        assert relative(total(found), total(wanted)) <= 1e-12


@st.composite
def small_nets(draw):
    "A random small net, a batch for it, and a bound."
    width, hidden, tokens, rows = (draw(st.integers(1, high)) for high in (5, 6, 4, 5))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    parts = {"a": nn.Linear(width, hidden, bias=draw(st.booleans())), "act": nn.Tanh()}
    if draw(st.booleans()):
        parts["norm"] = nn.LayerNorm(hidden)
    parts["b"] = nn.Linear(hidden, draw(st.integers(1, 4)))
    model = Chain(**parts)
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    model.b.bias.requires_grad_(True)
    scale = 10.0 ** draw(st.integers(-6, 12))
    batch = noise(rows + 1, tokens, width, seed=draw(st.integers(0, 99))) * 10.0 ** noise(rows + 1, 1, 1, seed=7)
    return model, (batch,), scale, 10.0 ** draw(st.integers(-3, 2)), draw(st.sampled_from(["flat", "automatic"]))


@settings(max_examples=60)
@given(small_nets())
def test_one_example_moves_the_sum_by_no_more_than_the_bound(case):
    model, batch, scale, clip, style = case

    def loss_fn(model, batch):
        return wave(model, batch) * scale

    with_it = total(clipped_sum(model, loss_fn, batch, clip, style))
    without = total(clipped_sum(model, loss_fn, (batch[0][:-1],), clip, style))
    assert (with_it - without).norm() <= clip * (1 + 1e-9)


@pytest.mark.parametrize("difference", [1e-2, 1e-4, 1e-6, 1e-8])
def test_cancellation_does_not_break_the_bound(difference):
    "Two tokens whose outer products cancel: the norm is lost in rounding, the bound is not."
    def loss_fn(model, batch):
        values = model(batch[0])
        return 1e6 * (values[:, 0] - values[:, 1]).sum(1)

    for seed in range(20):
        torch.manual_seed(seed)
        model = Chain(layer=nn.Linear(64, 64, bias=False)).float()
        x = noise(6, 1, 64, seed=seed)
        batch = torch.cat([x, x + difference * noise(6, 1, 64, seed=seed + 100)], dim=1).float()
        clipped_sum(model, loss_fn, (noise(6, 2, 64).float(),), 1.0)  # the check has been made
        for i in range(6):
            pair = batch[[i, (i + 1) % 6]]
            taken = gradients(model, loss_fn, (pair,))
            factors = clip_factor(taken.norms(), 1.0) * torch.tensor([1.0, 0.0])
            assert taken.weighted_sum(factors)["layer.weight"].norm() <= 1 + 1e-3


# ---- memory


def saved_bytes(model, run):
    "Bytes that autograd keeps for the backward pass; every storage counts once, parameters do not."
    kept, weights = {}, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("name", zoo.NAMES)
def test_bias_training_keeps_no_more_than_plain_autograd(name):
    model, loss_fn, batch = zoo.build(name)
    zoo.freeze(model, "biases")
    clipped_sum(model, loss_fn, batch, 1.0)  # the check has been made
    fast = saved_bytes(model, lambda: clipped_sum(model, loss_fn, batch, 1.0))
    plain = saved_bytes(model, lambda: per_example_losses(model, loss_fn, batch).sum().backward())
    model.zero_grad()
    zoo.freeze(model, "full")
    clipped_sum(model, loss_fn, batch, 1.0)
    full = saved_bytes(model, lambda: clipped_sum(model, loss_fn, batch, 1.0))
    print(f"{name}: bytes kept for biases {fast}, plain {plain}, all weights {full}")
    assert fast <= 1.02 * plain and fast < full


def test_nothing_is_kept_after_the_pass():
    import gc

    def alive():
        gc.collect()
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))

    model, loss_fn, batch = zoo.build("bert")
    clipped_sum(model, loss_fn, batch, 1.0)
    before = alive()
    clipped_sum(model, loss_fn, batch, 1.0)
    assert alive() == before


def test_no_leaf_of_a_loss_gets_a_raw_gradient():
    model, loss_fn, batch = zoo.build("cnn")
    scale = nn.Parameter(torch.tensor(2.0))
    clipped_sum(model, lambda m, b: scale * loss_fn(m, b), batch, 1.0)
    assert scale.grad is None and all(parameter.grad is None for parameter in model.parameters())


def test_bias_contributions_hold_one_vector_for_each_example():
    model, loss_fn, batch = zoo.build("roberta")
    zoo.freeze(model, "biases")
    taken = gradients(model, loss_fn, batch)
    assert isinstance(taken, Gradients)
    held = sum(use.values.numel() for uses in taken.uses.values() for use in uses)
    assert held == len(batch["labels"]) * sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("freeze_set", ["full", "biases", "last layer"])
def test_compiled_layers_are_exact_and_no_hook_is_compiled(freeze_set):
    import torch._dynamo

    torch._dynamo.reset()
    model, loss_fn, batch = zoo.build("bert", rows=3)
    zoo.freeze(model.eval(), freeze_set)
    for layer in model.bert.encoder.layer:
        layer.compile(backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=32):
        clipped_sum(model, loss_fn, batch, 1.0)
    assert worst_error(model, loss_fn, batch) <= 1e-9
    torch._dynamo.reset()


def test_memory_is_reused_where_the_c_library_can_be_asked():
    import platform

    assert reuse_memory() == (platform.libc_ver()[0] == "glibc")


class Packed(Net):
    "A bidirectional network over packed sequences: its steps have fewer and fewer rows."

    def __init__(self):
        super().__init__(rnn=nn.GRU(4, 3, bidirectional=True, batch_first=True), head=nn.Linear(6, 2))

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def test_packed_sequences_fall_back_and_stay_exact():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worst_error(Packed(), wave, (noise(5, 3, 4),)) <= 1e-9


def test_a_pass_that_stops_when_some_taps_are_missing_leaves_all_to_the_slow_way(monkeypatch):
    monkeypatch.setattr("dpft.gradients._can_skip", lambda *_: False)
    model, batch = Attention(), (noise(5, 3, 4),)
    with pytest.warns(UserWarning, match="head.weight"):
        assert worst_error(model, wave, batch) <= 1e-9


def test_channels_without_positions_have_biases_and_norms_too():
    exact(Chain(norm=nn.GroupNorm(2, 4), a=nn.Linear(4, 2)), two_waves, (noise(5, 4),))


def two_waves(model, batch):
    return torch.sin(model(batch[0]) * tensor([0.5, 2.0], dtype=torch.float64)).sum(1)


def test_a_hook_is_kept_from_the_compiler():
    compiled, traced = torch.compile(nn.Linear(3, 2).double(), backend="eager"), []
    hook = _without_compiler(lambda *_: traced.append(torch.compiler.is_compiling()))
    compiled.register_forward_hook(hook)
    compiled(torch.randn(4, 3, dtype=torch.float64))
    assert traced == [False]


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


class AtAKink(Net):
    "A unit whose input is rounded to one side of zero in a batch, and to the other alone."

    def forward(self, x):
        near = self.inner(x) + 1e-9 * (len(x) - 1.5)
        return self.head(torch.relu(near) + x)


def test_an_activation_that_flips_by_rounding_does_not_make_a_layer_slow():
    model = AtAKink(inner=nn.Linear(4, 4, bias=False), head=nn.Linear(4, 3))
    batch = (noise(4, 4) * tensor([0.0, 1.0, 1.0, 1.0]),)
    with torch.no_grad():
        model.inner.weight[:, 1:] = 0                  # so all that decides is how many rows stand beside
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, wave, batch)
    assert unseen(model, wave, batch, range(4))[0] == []


# ---- rows that a model puts in another order


class Sorts(Net):
    "A layer that sees rows by their length, the first number; as a recurrent net sees packed texts."

    def __init__(self, way):
        super().__init__(layer=nn.Linear(4, 5), head=nn.Linear(5, 3))
        self.way = way

    def forward(self, x):
        order = x[:, 0].argsort(descending=True, stable=True)
        return self.head(self.way(torch.tanh(self.layer(self.way(x, order))), order.argsort()))


def of_lengths(*lengths):
    return (torch.cat([tensor(lengths, dtype=torch.float64)[:, None], noise(len(lengths), 3)], 1),)


@pytest.mark.parametrize("way", [lambda x, order: x[order], lambda x, order: x.index_select(0, order)])
def test_rows_sorted_inside_a_model_take_the_slow_way(way):
    slow_but_exact(Sorts(way), wave, of_lengths(1, 3, 2, 4), "layer.weight", "layer.bias")


class Once(torch.autograd.Function):
    "A step that gives its tensor away as it goes back, so it cannot do so twice."

    @staticmethod
    def forward(ctx, x):
        ctx.signs = x.sign()
        return x.abs()

    @staticmethod
    def backward(ctx, gradient):
        signs, ctx.signs = ctx.signs, None
        return signs.mul_(gradient)


def test_packed_sequences_of_any_order_stay_exact():
    class Unsorted(Packed):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4).double()

        def forward(self, x):
            lengths = (x[..., 0] != 0).sum(1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(self.inner(x), lengths, batch_first=True, enforce_sorted=False)
            padded = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]
            return self.head(padded[:, 0])
    model, x = Unsorted(), noise(5, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients(model, wave, (x,))
        x[0, 1:] = 0
        assert worst_error(model, wave, (x,)) <= 1e-9
