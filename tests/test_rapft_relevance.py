"""Rules against their formulas and captum, maps against one example at a time, and what relevance refuses."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from captum.attr import LRP
from captum.attr._utils.lrp_rules import EpsilonRule
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dpft.baselines import insert_adapters
from dpft.bitfit import biases
from dpft.forms import Groups
from dpft.gradients import gradients, per_example_gradients
from dpft.losses import logits
from dpft.networks import TemperedSigmoid
from dpft.oracle import evaluating, select_rows
from dpft.rapft.propagation import relevance_rules
from dpft.rapft.relevance import Initialisation, clipped_relevance, initial_relevance, relevance_loss, relevance_map
from dpft.rapft.rules import Rules


def drawn(*shape, seed=0):
    """Numbers that look normal and are the same everywhere: whole numbers are mixed, and no stream is drawn from."""
    mixed = (torch.arange(math.prod(shape)) + 1) * 2654435761 % 2**32 + seed * 40503
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 15)) * 739982445 % 2**32
    return math.sqrt(2) * torch.erfinv((mixed.double() + 0.5) / 2**31 - 1).view(shape)


def rounded(*parts):
    """What a sum of these terms may lose: n terms, each right to 1e4 units of rounding of the largest."""
    return sum(part.numel() * part.abs().max().item() for part in parts) * 1e4 * torch.finfo(torch.float64).eps


def passed(function, inputs, out, rule="epsilon"):
    """Relevance of each input when the outputs have relevance `out`."""
    inputs = [values.clone().requires_grad_() for values in inputs]
    with relevance_rules(nn.Identity(), rule):
        output = function(*inputs)
        modified = torch.autograd.grad(output, inputs, out / output.detach(), allow_unused=True)
    return [values.detach() * found for values, found in zip(inputs, modified, strict=True)]


def rows_by_oracle(model, batch, rule="epsilon", init=None):
    """(B, *shape) relevance of every parameter, one example at a time."""
    with evaluating(model), relevance_rules(model, rule) as mode:
        found = per_example_gradients(model, relevance_loss(Initialisation(init), mode.rules), batch)
    return {name: values * dict(model.named_parameters())[name].detach() for name, values in found.items()}


def adapted(kind):
    """A small model of each family with something of each kind of fine-tuning, none of it at zero."""
    model, _, batch = zoo.build("gpt2-lm" if kind == "adapter" else "roberta", rows=4)
    if kind == "adapter":
        insert_adapters(model, ["transformer.h.0.mlp.c_proj", "transformer.h.1.attn.c_proj"], width=3)
        chosen = [p for name, p in model.named_parameters() if "adapter" in name]
    elif kind == "lora":
        inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"]), model)
        chosen = [p for name, p in model.named_parameters() if "lora_" in name]
    else:
        chosen = list(biases(model).values())
    model.double().requires_grad_(False)
    for i, parameter in enumerate(chosen):
        parameter.requires_grad_(True)
        with torch.no_grad():
            parameter.copy_(0.3 * drawn(*parameter.shape, seed=i))
    return model, batch


# The rules of linear layers and convolutions

LAYERS = {"linear": (lambda: nn.Linear(5, 4), (3, 5)), "conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2), (3, 2, 6)),
          "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2), (3, 2, 5, 5))}


class Two(nn.Module):
    """A layer, a ReLU and a head."""

    def __init__(self, layer, inputs):
        super().__init__()
        self.layer, self.relu, self.head = layer, nn.ReLU(), nn.Linear(layer(inputs).flatten(1).shape[1], 2)

    def forward(self, inputs):
        return self.head(self.relu(self.layer(inputs)).flatten(1))


@pytest.mark.parametrize("name", LAYERS)
def test_the_epsilon_rule_is_captums(name):
    torch.manual_seed(1)
    make, shape = LAYERS[name]
    layer, inputs = make(), torch.randn(shape)
    net = Two(layer, inputs).double()
    net.layer.rule = net.head.rule = EpsilonRule(epsilon=0)
    inputs = inputs.double()
    wanted = LRP(net).attribute(inputs.clone().requires_grad_(), target=1).detach()
    values = inputs.clone().requires_grad_()
    with relevance_rules(net):
        found, = torch.autograd.grad(net(values)[:, 1].sum(), values)
    torch.testing.assert_close(found * inputs, wanted)


def two_signs(x, weight, bias, out, alpha):
    """Eq. (4) entry by entry, for inputs and for weights."""
    to_x, to_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for n, i in itertools.product(range(len(x)), range(len(weight))):
        z = x[n] * weight[i]
        for part, sign in ((alpha, 1), (1 - alpha, -1)):
            kept = (sign * z).clamp(min=0) * sign
            total = kept.sum() + sign * (sign * bias[i]).clamp(min=0)
            if total != 0:
                to_x[n] += part * out[n, i] * kept / total
                to_weight[i] += part * out[n, i] * kept / total
    return to_x, to_weight


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.floats(0, 2), st.integers(0, 10**6))
def test_alpha_beta_is_equation_4(rows, into, out, alpha, seed):
    x, weight, bias, relevance = drawn(rows, into, seed=seed), drawn(out, into, seed=seed + 1), drawn(out, seed=seed + 2), drawn(rows, out)
    found = passed(F.linear, [x, weight, bias], relevance, Rules("alpha-beta", alpha=alpha))
    for mine, wanted in zip(found, two_signs(x, weight, bias, relevance, alpha), strict=False):
        torch.testing.assert_close(mine, wanted)


# Conservation, rule by rule: RAP-LRP

def total(values):
    return sum(found.sum().item() for found in values)


@pytest.mark.parametrize("function", [F.gelu, F.relu, torch.tanh, F.silu, TemperedSigmoid(1.58, 3.0, 0.79)])
def test_activations_pass_relevance_through(function):
    x = drawn(3, 4)
    out = drawn(3, 4, seed=1) * (function(x) != 0)
    model = function if isinstance(function, nn.Module) else nn.Identity()
    values = x.clone().requires_grad_()
    with relevance_rules(model):
        output = function(values)
        modified, = torch.autograd.grad(output, values, torch.where(output == 0, 0, out / output).detach())
    torch.testing.assert_close(x * modified, out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [lambda x, w, b: F.layer_norm(x, (6,), w, b),
                                      lambda x, w, b: F.group_norm(x[..., None], 2, w, b)[..., 0]])
def test_a_norm_that_is_held_conserves_and_its_gradient_does_not(function):
    x, weight, bias, out = drawn(4, 6), drawn(6, seed=1), drawn(6, seed=2), drawn(4, 6, seed=3)
    to_x, to_weight, to_bias = passed(function, [x, weight, bias], out)
    assert (to_x + to_bias / 4).sum().item() == pytest.approx(out.sum().item())
    assert to_weight.sum().item() == pytest.approx(to_x.sum().item())
    plain = x.clone().requires_grad_()
    output = function(plain, weight, None)
    modified, = torch.autograd.grad(output, plain, out / output.detach())
    assert (x * modified).sum().item() == pytest.approx(0, abs=1e-2 * out.abs().sum().item())  # eq. (6): of degree zero but for eps


@pytest.mark.parametrize("function", [torch.matmul, torch.bmm, torch.mul])
def test_products_give_twice_the_relevance_and_half_of_it_each_after_eq_11(function):
    x, y = drawn(3, 4, 4), drawn(3, 4, 4, seed=1)
    out = drawn(3, 4, 4, seed=2)
    found = passed(function, [x, y], out)
    assert [part.sum().item() for part in found] == pytest.approx([out.sum().item() / 2] * 2)
    plain = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    twice = torch.autograd.grad(function(*plain), plain, out / function(x, y))
    assert sum((a * b).sum().item() for a, b in zip((x, y), twice, strict=True)) == pytest.approx(2 * out.sum().item())


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_skips_are_normalised_as_in_eq_11_example_by_example(seed):
    x, y, out = drawn(3, 5, seed=seed), drawn(3, 5, seed=seed + 1), drawn(3, 5, seed=seed + 2)
    found = passed(torch.add, [x, y], out)
    for i in range(3):
        raw = x[i] * out[i] / (x[i] + y[i]), y[i] * out[i] / (x[i] + y[i])
        sums = [part.sum() for part in raw]
        for mine, part, own in zip(found, raw, sums, strict=True):
            weight = own.abs() / (sums[0].abs() + sums[1].abs()) * out[i].sum() / own
            torch.testing.assert_close(mine[i], part * weight, rtol=1e-5, atol=1e-8)
    assert total(found) == pytest.approx(out.sum().item(), rel=1e-6, abs=1e-6)


def test_skips_in_place_and_masks_and_merges():
    x, y = drawn(3, 5), drawn(3, 5, seed=1)
    def in_place(x, y):
        z = x * 1
        z += y
        return z
    out = drawn(3, 5, seed=2)
    for one, other in zip(passed(in_place, [x, y], out), passed(torch.add, [x, y], out), strict=True):
        torch.testing.assert_close(one, other)
    mask = torch.zeros(3, 5, dtype=torch.float64).masked_fill(torch.arange(5) > 2, float("-inf"))
    values = x.clone().requires_grad_()
    with relevance_rules(nn.Identity()):
        found, = torch.autograd.grad((values + mask).softmax(-1)[:, 0].sum(), values)
    assert found.isfinite().all()
    merged = passed(lambda x: torch.cat([F.linear(x, y), F.linear(x, -y.flip(0))], 1), [x], drawn(3, 6))[0]   # eq. (12): used twice
    assert merged.sum().item() == pytest.approx(drawn(3, 6).sum().item())


# Transformers

@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("rule", ["epsilon", "alpha-beta"])
def test_values_are_untouched_and_everything_is_restored(name, rule):
    model, _, batch = zoo.build(name)
    model.eval()
    before, attention = logits(model, batch), getattr(getattr(model, "config", None), "_attn_implementation", None)
    plain = torch.autograd.grad(before.sum(), list(model.parameters()), allow_unused=True)
    names, forwards = set(ALL_ATTENTION_FUNCTIONS), {module: "forward" in vars(module) for module in model.modules()}
    with pytest.raises(ZeroDivisionError), relevance_rules(model, rule):
        assert torch.equal(logits(model, batch), before)
        raise ZeroDivisionError
    assert set(ALL_ATTENTION_FUNCTIONS) == names and getattr(getattr(model, "config", None), "_attn_implementation", None) == attention
    assert {module: "forward" in vars(module) for module in model.modules()} == forwards
    after = torch.autograd.grad(logits(model, batch).sum(), list(model.parameters()), allow_unused=True)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(plain, after, strict=True))


class Written(nn.Module):
    """Causal attention written out, for which the rules of each operation are known."""

    def forward(self, query, key, value, mask=None):
        scores = query @ key.mT * 0.7
        return (scores if mask is None else scores + mask).softmax(-1) @ value


@pytest.mark.parametrize("masked", ["none", "causal", "boolean"])
def test_fused_attention_is_attention_written_out(masked):
    q, k, v = (drawn(2, 2, 4, 3, seed=i).requires_grad_() for i in range(3))
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    added = None if masked == "none" else torch.zeros(4, 4, dtype=torch.float64).masked_fill(~lower, float("-inf"))
    options = {"none": {}, "causal": {"is_causal": True}, "boolean": {"attn_mask": lower}}[masked]
    out = drawn(2, 2, 4, 3, seed=4)
    with relevance_rules(nn.Identity()):
        fused = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, scale=0.7, **options), [q, k, v], out)
        written = torch.autograd.grad(Written()(q, k, v, added), [q, k, v], out)
    for one, other in zip(fused, written, strict=True):
        torch.testing.assert_close(one, other)


def test_shared_key_heads_are_heads_written_out_whose_relevance_adds_up():
    q, (k, v) = drawn(2, 6, 4, 3).requires_grad_(), (drawn(2, 2, 4, 3, seed=i).requires_grad_() for i in (1, 2))
    out = drawn(2, 6, 4, 3, seed=4)
    with relevance_rules(nn.Identity()):
        value = F.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=True)
        shared = torch.autograd.grad(value, [q, k, v], out)
        each = [torch.stack([x[:, i // 3] for i in range(6)], 1) for x in (k, v)]
        apart = torch.autograd.grad(Written()(q, *each, None), [q, k, v], out)
    assert torch.equal(value, F.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=True))
    for one, other in zip(shared, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class WrittenNorm(nn.RMSNorm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


def test_a_root_mean_square_norm_is_linear_in_relevance_however_it_is_written():
    x, out, found = drawn(2, 3, 5).requires_grad_(), drawn(2, 3, 5, seed=1), []
    for norm in (nn.RMSNorm(5, eps=1e-3).double(), WrittenNorm(5).double()):
        with torch.no_grad():
            norm.weight.copy_(drawn(5, seed=2))
        plain = norm(x)
        with relevance_rules(norm):
            value = norm(x)
            found.append(torch.autograd.grad(value, [x, norm.weight], out))
        assert torch.equal(value, plain)
        assert (x * found[-1][0]).sum().item() == pytest.approx((value * out).sum().item()) == (norm.weight * found[-1][1]).sum().item()
    scale = (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    for one, other, exact in zip(*found, (out * norm.weight * scale, (out * x * scale).sum((0, 1))), strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, exact)


@pytest.mark.parametrize("name", ["roberta", "gpt2-lm"])
def test_the_map_does_not_depend_on_the_attention_implementation(name):
    model, _, batch = zoo.build(name)
    found = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found.append(relevance_map(model, [batch]))
    for key, values in found[0].items():
        torch.testing.assert_close(values, found[1][key], rtol=1e-4, atol=1e-7)


def test_relevance_of_a_parameter_does_not_depend_on_which_others_train():
    model, _, batch = zoo.build("bert")
    with torch.no_grad():
        for i, bias in enumerate(biases(model).values()):
            bias.copy_(0.1 * drawn(*bias.shape, seed=i))
    every = relevance_map(model, [batch])
    for which in ("biases", "norms", "last layer"):
        zoo.freeze(model, which)
        for name, values in relevance_map(model, [batch]).items():
            torch.testing.assert_close(values, every[name], rtol=1e-9, atol=1e-12)


# Maps

@pytest.mark.parametrize("kind", ["adapter", "lora", "biases"])
@pytest.mark.parametrize("rule", ["epsilon", "alpha-beta"])
def test_maps_are_those_of_one_example_at_a_time(kind, rule):
    model, batch = adapted(kind)
    rows = rows_by_oracle(model, batch, rule)
    first, second = select_rows(batch, torch.tensor([0, 1])), select_rows(batch, torch.tensor([2, 3]))
    for name, values in relevance_map(model, [first, second], rule=rule).items():
        torch.testing.assert_close(values, rows[name].sum(0))
    norms = torch.stack([values.flatten(1).square().sum(1) for values in rows.values()]).sum(0).sqrt()
    clip = norms.median().item()                                                 # some are clipped and some are not
    factors = (clip / norms).clamp(max=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no fast rule")
        found = clipped_relevance(model, batch, clip, rule=rule)
    for name, values in found.items():
        torch.testing.assert_close(values, torch.tensordot(factors, rows[name], 1))


def test_the_rows_of_a_unit_are_clipped_together():
    model, _, batch = zoo.build("gpt2-lm", rows=4)
    rows = {name: torch.stack([values[0] + values[2], values[1], values[3]]) for name, values in rows_by_oracle(model, batch).items()}
    norms = torch.stack([values.flatten(1).square().sum(1) for values in rows.values()]).sum(0).sqrt()
    found = clipped_relevance(model, batch, 0.1, units=Groups(torch.tensor([0, 1, 0, 2])))
    for name, values in found.items():
        torch.testing.assert_close(values, torch.tensordot((0.1 / norms).clamp(max=1), rows[name], 1), rtol=1e-5, atol=1e-8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, rows):
        return self.head(torch.tanh(self.body(rows)))


def size(found):
    return torch.cat([values.flatten() for values in found.values()]).norm().item()


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.floats(1e-3, 10), st.floats(0.1, 1e3))
def test_one_example_moves_the_sum_by_at_most_the_clip(seed, clip, scale):
    torch.manual_seed(seed)
    net, rows = Net(), drawn(4, 3, seed=seed) * scale
    whole, less = clipped_relevance(net, (rows,), clip), clipped_relevance(net, (rows[1:],), clip)
    assert size({name: whole[name] - less[name] for name in whole}) <= clip * (1 + 1e-6)
    assert size(clipped_relevance(net, (rows[:0],), clip)) == 0


def test_an_example_that_is_not_finite_contributes_nothing():
    torch.manual_seed(0)
    net, rows = Net(), drawn(4, 3)
    bad = rows.clone()
    bad[2, 1] = float("inf")
    found, wanted = clipped_relevance(net, (bad,), 0.1), clipped_relevance(net, (rows[[0, 1, 3]],), 0.1)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name])
    with pytest.raises(ValueError, match=r"body\.weight: its relevance is not finite"):
        relevance_map(net, [(bad,)])


# Where relevance begins

@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 10**6), st.integers(1, 4), st.floats(0.05, 1))
def test_initialisations_keep_what_their_definitions_say(tokens, vocabulary, seed, count, p):
    count = min(count, vocabulary)
    scores = 2 * drawn(1, tokens, vocabulary, seed=seed)
    chances = scores.softmax(-1)[0]
    every = torch.ones(1, tokens, dtype=torch.bool)
    def kept(**options):
        return initial_relevance(scores, every, Initialisation(**options))[0]
    torch.testing.assert_close(kept(init="naive"), chances)
    assert (kept(init="top-k", k=count) > 0).sum(1).tolist() == [count] * tokens
    for row, own in zip(kept(init="top-p", p=p), chances, strict=True):
        taken = own.sort(descending=True).values[: int((row > 0).sum())]
        torch.testing.assert_close(row.sum(), taken.sum())
        assert taken.sum() >= p - 1e-9 and taken[:-1].sum() < p
    paths = sorted(itertools.product(range(vocabulary), repeat=tokens), reverse=True,
                   key=lambda path: sum(chances[t, v].log().item() for t, v in enumerate(path)))[:count]
    wanted = torch.zeros_like(chances)
    for path in paths:
        wanted[range(tokens), path] = chances[range(tokens), path]
    torch.testing.assert_close(kept(init="beam", beams=count), wanted)


def test_only_positions_that_count_begin():
    model, _, batch = zoo.build("gpt2-lm")
    tokens = batch["input_ids"]
    labels = tokens.clone()
    labels[:, :3] = -100
    short = {"input_ids": tokens, "labels": labels}
    changed = {"input_ids": tokens, "labels": labels.masked_fill(labels > 0, 7)}  # which labels they are does not matter
    one, other = relevance_map(model, [short]), relevance_map(model, [changed])
    whole = relevance_map(model, [batch])
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any((one[name] - whole[name]).abs().max() > 1e-6 for name in one)
    padded = {"input_ids": torch.cat([tokens, tokens[:, :2]], 1),
              "attention_mask": torch.cat([torch.ones_like(tokens), torch.zeros_like(tokens[:, :2])], 1)}
    for name, values in relevance_map(model, [padded]).items():
        torch.testing.assert_close(values, whole[name], rtol=1e-6, atol=1e-9)


# Bad input

SMALL = {"vocab_size": 40, "d_model": 16}
OTHERS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
        **SMALL, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2, decoder_start_token_id=0)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(
        **SMALL, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0)),
    "deberta": lambda: transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=32,
        relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "swin": lambda: transformers.SwinForImageClassification(transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=3)),
    "clip": lambda: transformers.CLIPForImageClassification(transformers.CLIPConfig(
        text_config=dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2),
        vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8),
        num_labels=3)),
}


def other_batch(name):
    if name in ("swin", "clip"):
        return {"pixel_values": drawn(3, 3, 16, 16), "labels": torch.arange(3) % 3}
    tokens = torch.arange(2, 20).view(3, 6)
    return {"input_ids": tokens, "labels": tokens[:, :5] if name in ("t5", "bart") else torch.tensor([0, 1, 0])}


@pytest.mark.parametrize("name", OTHERS)
def test_relevance_reaches_attention_that_is_written_out_and_encoder_decoders(name):
    torch.manual_seed(0)
    model, batch = OTHERS[name]().double().eval(), other_batch(name)
    before = logits(model, batch)
    with relevance_rules(model):                                                 # what T5 adds in place is laid out in memory anew
        torch.testing.assert_close(logits(model, batch), before, rtol=1e-12, atol=1e-12)
    assert torch.equal(logits(model, batch), before)                             # and everything is as it was
    whole = relevance_map(model, [batch])
    apart = relevance_map(model, [select_rows(batch, torch.tensor([i])) for i in range(3)])
    looked = [key for key in whole if any(part in key for part in ("q_proj.weight", "query.weight", ".q.weight", "query_proj.weight"))]
    assert looked and all(bool(whole[key].any()) for key in looked if "text_model" not in key)   # relevance passes the scores too
    for key, values in whole.items():                                            # and no example moves another's
        torch.testing.assert_close(values, apart[key], rtol=1e-6, atol=1e-9 * max(1.0, values.abs().max().item()))


def test_attention_that_relevance_cannot_reach_is_refused():
    with pytest.raises(ValueError, match="MultiheadAttention"), relevance_rules(nn.TransformerEncoderLayer(4, 2, 4)):
        pass
    model = zoo.build("gpt2-lm")[0]
    with relevance_rules(model), pytest.raises(ValueError, match="has no hook for relevance"), relevance_rules(model):
        pass
    many, _, tokens = zoo.build("llama")
    with pytest.raises(ValueError, match="query heads share one key head"):
        relevance_map(many, [tokens])


class TokensFirst(nn.Module):
    "Examples along the second dimension where two branches meet."

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.out((x.transpose(0, 1) + self.inner(x).transpose(0, 1)).transpose(0, 1).sum(1))


def test_a_sum_of_features_whose_first_dimension_is_not_that_of_the_examples_is_refused():
    torch.manual_seed(0)
    batch = torch.randn(8, 8, 4), torch.zeros(8, dtype=torch.long)     # as many tokens as examples
    with pytest.raises(ValueError, match="first dimension is not that of the examples"):
        clipped_relevance(TokensFirst(), batch, 1.0)


def test_zero_times_an_overflow_is_zero_in_a_clipped_map():
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.5]]))
        net.bias.zero_()
    rows, labels = torch.tensor([[2e38, 1.0], [2e38, 1.0]]), torch.tensor([0, 0])
    one, both = (clipped_relevance(net, (rows[:n], labels[:n]), 10.0)["weight"] for n in (1, 2))
    assert both.isfinite().all()
    torch.testing.assert_close(both, 2 * one)


def test_a_map_of_tokens_that_cancel_moves_the_sum_by_no_more_than_the_bound():
    "Rounding of tokens of a million leaves more of them than a bound of a hundredth."
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.w(x).sum(1)

    torch.manual_seed(0)
    model, labels = Pooled(), torch.zeros(8, dtype=torch.long)
    first, second = 1e6 * torch.randn(2, 8, 64)
    rows = torch.stack([first, second, -first, -second], 1)
    clipped_relevance(model, (torch.randn(8, 4, 64), labels), 1.0)
    every, less = (clipped_relevance(model, (rows[:n], labels[:n]), 0.01)["w.weight"].double() for n in (8, 7))
    assert (every - less).norm() <= 0.01


class Sorts(nn.Sequential):
    "A layer that sees rows in the order of their first number."

    def forward(self, x):
        order = x[:, 0].argsort(stable=True)
        return self[1](torch.tanh(self[0](x[order]))[order.argsort()])


def test_relevance_is_exact_where_a_model_moves_rows():
    model = Sorts(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    moved = drawn(6, 4, seed=1) - 9 * torch.arange(6)[:, None], torch.zeros(6, dtype=torch.long)
    with evaluating(model), relevance_rules(model) as mode:
        loss = relevance_loss(Initialisation(), mode.rules)
        with pytest.warns(UserWarning, match="^0.weight, 0.bias: no fast rule"):
            found = gradients(model, loss, moved)
        factors = torch.arange(1.0, 7).double()
        oracle = per_example_gradients(model, loss, moved)
        for name, values in found.weighted_sum(factors).items():
            assert torch.allclose(values, torch.tensordot(factors, oracle[name], 1), rtol=1e-9, atol=1e-12), name
