"""Biases are found by what they do, have the gradient that the chapter says, and are all that DP-BiTFiT trains besides a head."""

import copy
import warnings

import pytest
import torch
import transformers as hf
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpft.bitfit import BiTFiT, add_biases, biases
from dpft.book.audits import Stopped, stopping
from dpft.clipping import clip_factor
from dpft.gradients import clipped_sum, per_example_gradients, weighted_sum
from dpft.loop import fine_tune
from dpft.losses import logits
from dpft.method import Context
from dpft.models import freeze_batchnorm, fresh_head, replace_batchnorm

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
SWIN = dict(image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)


class OwnNames(nn.Module):
    "Parameters under names that are, and names that are not, those of biases."

    def __init__(self):
        super().__init__()
        self.q_bias = nn.Parameter(torch.zeros(1, 1, 6))         # as LayoutLMv2 has it
        self.output_bias = nn.Parameter(torch.zeros([]))         # a scalar
        self.relative_attention_bias = nn.Parameter(torch.zeros(9, 6))
        self.biased = nn.Parameter(torch.zeros(6))
        self.debias = nn.Parameter(torch.zeros(6))
        self.bias_scale = nn.Parameter(torch.zeros(6))
        self.unbiased = nn.Linear(6, 6, bias=False)
        self.register_buffer("bias", torch.zeros(6))


FAMILIES = {  # name -> (model, endings that must be among its biases, parts of names that must not)
    "t5": lambda: (hf.T5ForConditionalGeneration(hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40)),
                   [], ["relative_attention_bias"]),
    "beit": lambda: (hf.BeitForImageClassification(hf.BeitConfig(**SMALL, image_size=16, patch_size=8, use_relative_position_bias=True)),
                     ["layernorm_before.bias"], ["relative_position_bias_table", "cls_token", "lambda"]),
    "swin": lambda: (hf.SwinForImageClassification(hf.SwinConfig(**SWIN)), ["layernorm_before.bias", "classifier.bias"],
                     ["relative_position_bias_table"]),
    "swinv2": lambda: (hf.Swinv2ForImageClassification(hf.Swinv2Config(**SWIN)), ["continuous_position_bias_mlp.0.bias"],
                       ["continuous_position_bias_mlp.0.weight", "continuous_position_bias_mlp.2.weight", "logit_scale"]),
    "roberta-mlm": lambda: (hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL, vocab_size=40)), ["lm_head.bias", "lm_head.dense.bias"],
                            ["lm_head.decoder"]),
    "bert-mlm": lambda: (hf.BertForMaskedLM(hf.BertConfig(**SMALL, vocab_size=40)), ["cls.predictions.bias"], ["decoder.weight"]),
    "deberta": lambda: (hf.DebertaForSequenceClassification(hf.DebertaConfig(**SMALL, vocab_size=40)), ["q_bias", "v_bias"],
                        ["embeddings.weight"]),
    "xlnet": lambda: (hf.XLNetModel(hf.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=24, vocab_size=40)), ["layer_1.bias"],
                      ["r_w_bias", "r_r_bias", "r_s_bias"]),
    "gpt2": lambda: (hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40)), ["attn.c_attn.bias"],
                     ["lm_head", "wte"]),
    "vit": lambda: (zoo.build("vit")[0], ["patch_embeddings.projection.bias", "classifier.bias"], ["cls_token", "position"]),
    "cnn": lambda: (zoo.build("cnn")[0], ["stem.bias", "norm.bias", "twice.bias"], ["grouped"]),
    "llama": lambda: (hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=40)), [], ["norm"]),
    "attention": lambda: (nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=4, vdim=4), ["in_proj_bias", "out_proj.bias"],
                          ["bias_k", "bias_v", "proj_weight"]),
    "lstm": lambda: (nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), ["bias_ih_l0", "bias_hh_l1_reverse"], ["weight"]),
    "gru cell": lambda: (nn.GRUCell(3, 4), ["bias_ih", "bias_hh"], ["weight"]),
    "own names": lambda: (OwnNames(), ["q_bias", "output_bias"],
                          ["relative_attention_bias", "biased", "debias", "bias_scale", "unbiased"]),
}
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, Conv1D)


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_are_what_they_must_be(family):
    model, wanted, unwanted = FAMILIES[family]()
    found = biases(model)
    assert all(any(name.endswith(ending) for name in found) for ending in wanted), sorted(found)
    assert not [name for name in found for part in unwanted if part in name]
    plain = {id(layer.bias) for layer in model.modules() if isinstance(layer, PLAIN) and isinstance(layer.bias, nn.Parameter)}
    assert plain <= {id(parameter) for parameter in found.values()}, "a plain layer's bias is missing"
    assert len({id(parameter) for parameter in found.values()}) == len(found), "a tied bias counts twice"
    tables = [name for name, p in found.items() if name.endswith("_bias") and sum(size > 1 for size in p.shape) > 1]
    assert not tables and (wanted or not found)


# ---- what a bias is, and what its gradient is


CHANNELS = 6
LAYERS = {  # name -> (layer, shape of one example's input, whether channels come first)
    "linear": (lambda: nn.Linear(4, CHANNELS), lambda t: (t, 4), False),
    "transposed": (lambda: Conv1D(CHANNELS, 4), lambda t: (t, 4), False),
    "flat linear": (lambda: nn.Linear(4, CHANNELS), lambda t: (4,), False),
    "layer norm": (lambda: nn.LayerNorm(CHANNELS), lambda t: (t, CHANNELS), False),
    "group norm": (lambda: nn.GroupNorm(2, CHANNELS), lambda t: (CHANNELS, t), True),
    "convolution 1d": (lambda: nn.Conv1d(3, CHANNELS, 3, padding=1, groups=3), lambda t: (3, t), True),
    "convolution 2d": (lambda: nn.Conv2d(3, CHANNELS, 3, padding=1, stride=2), lambda t: (3, t, 3), True),
    "convolution 3d": (lambda: nn.Conv3d(2, CHANNELS, 1), lambda t: (2, t, 2, 2), True),
}


def randomised(layer, seed):
    torch.manual_seed(seed)
    for parameter in layer.double().parameters():
        nn.init.normal_(parameter)
    return layer


class Around(nn.Module):
    "A layer between others, used once or several times in one pass."

    def __init__(self, layer, first, uses):
        super().__init__()
        self.layer, self.first, self.uses = layer, nn.Parameter(torch.ones(first).double()), uses
        self.head = nn.Linear(CHANNELS, 3).double()

    def forward(self, inputs):
        self.outputs = []
        for use in range(self.uses):
            output = self.layer(torch.tanh(inputs * (use + 1)) * self.first)
            if output.requires_grad:
                output.retain_grad()
            self.outputs.append(output)
        hidden = torch.tanh(sum(output * (use + 1) for use, output in enumerate(self.outputs)))
        channels_last = hidden if hidden.shape[-1] == CHANNELS and hidden.ndim < 4 and not self.channels_first else hidden.movedim(1, -1)
        return self.head(channels_last.flatten(1, -2).mean(1) if channels_last.ndim > 2 else channels_last)


@given(kind=st.sampled_from(sorted(LAYERS)), rows=st.integers(1, 4), positions=st.integers(3, 7), uses=st.integers(1, 3),
       seed=st.integers(0, 99))
@settings(max_examples=40)
def test_the_gradient_of_a_bias_is_the_sum_of_its_outputs_gradients(kind, rows, positions, uses, seed):
    make, shape, channels_first = LAYERS[kind]
    model = Around(randomised(make(), seed), (1,), uses)
    model.channels_first = channels_first
    batch = torch.randn(rows, *shape(positions), dtype=torch.float64), torch.randint(0, 3, (rows,))

    zoo.image_loss(model, batch).sum().backward()
    total = torch.zeros(rows, CHANNELS, dtype=torch.float64)
    for output in model.outputs:
        gradient = output.grad.movedim(1, -1) if channels_first else output.grad
        total += gradient.reshape(rows, -1, CHANNELS).sum(1)

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "layer.bias")
    oracle = per_example_gradients(model, zoo.image_loss, batch)["layer.bias"]
    factors = torch.rand(rows, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")                           # the slow way round would be right, but not by the lemma
        fast = weighted_sum(model, zoo.image_loss, batch, factors)["layer.bias"]
    scale = oracle.abs().max().clamp(min=1e-12)
    assert (total - oracle).abs().max() < 1e-10 * scale
    assert (fast - factors @ total).abs().max() < 1e-10 * scale


# ---- the method


HEAD = {"roberta": "classifier.", "bert": "classifier.", "gpt2": "score.", "gpt2-lm": None, "vit": "classifier.", "cnn": "head."}


def tune(name, method, **settings):
    "A short noisy run with weight decay; the model before, and the run."
    model, loss_fn, batch = zoo.build(name, rows=8)
    data, collate = zoo.as_data(batch)
    before = copy.deepcopy(model)
    settings = {"noise_multiplier": 1.0, "steps": 3, "batch_size": 4, "learning_rate": 0.01, "weight_decay": 0.1, "clip": 0.5, **settings}
    run = fine_tune(model, data, method, loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01, seed=1, progress=False,
                    **settings)
    return before, run


@pytest.mark.parametrize("name", zoo.NAMES)
def test_only_biases_and_a_fresh_head_move(name):
    before, run = tune(name, BiTFiT(), clipping="automatic")
    head = HEAD[name]
    wanted = {key for key, _ in before.named_parameters() if key.endswith(".bias") or (head and key.startswith(head))}
    state, after = before.state_dict(), run.model.state_dict()
    moved = {key for key, _ in before.named_parameters() if not torch.equal(state[key], after[key])}
    assert moved == wanted == set(run.trained)
    buffers = set(state) - {key for key, _ in before.named_parameters(remove_duplicate=False)}
    assert all(torch.equal(state[key], after[key]) for key in buffers)
    for key in wanted:
        assert bool((state[key] != after[key]).all()), f"{key}: an entry got no noise"


@pytest.mark.parametrize("make", [
    lambda: hf.T5ForSequenceClassification(hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40)),
    lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**SMALL, vocab_size=40)),
    lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=40)),
    lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)),
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(8, 3, bias=False)),
])
def test_a_model_without_biases_is_refused_and_left_as_it_was(make):
    model = make()
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ValueError) as error:
        BiTFiT().start(Context(model, zoo.image_loss, 1, 1, 1))
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert all(part in str(error.value) for part in (type(model).__name__, "LastLayer()", "Full()"))


# ---- biases that were not there


RESNET = dict(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", num_labels=3)


def without_biases(name):
    "A model without some or all of its biases, a loss and a batch, in float64."
    torch.manual_seed(0)
    if name == "resnet":
        model = replace_batchnorm(hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET))).double()
        pixels = torch.randn(5, 3, 32, 32, dtype=torch.float64)
        return model, zoo.classifier_loss, {"pixel_values": pixels, "labels": torch.arange(5) % 3}
    if name == "plain":
        model = nn.Sequential(nn.Conv1d(3, 6, 3, bias=False), nn.RMSNorm(4), nn.Tanh(), nn.LayerNorm(4, bias=False), nn.Flatten(),
                              nn.Linear(24, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
        return model, zoo.image_loss, (torch.randn(5, 3, 6, dtype=torch.float64), torch.arange(5) % 3)
    return zoo.build(name)


def outputs(model, batch):
    with torch.no_grad():
        return logits(model.eval(), batch)


ADDED = {  # name -> layers that get a bias, with norms and without
    "llama": (19, 14), "resnet": (12, 12), "plain": (4, 3), "gpt2": (0, 0), "vit": (0, 0), "cnn": (1, 1)}


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("name", ADDED)
def test_added_zeros_change_nothing(name, norms):
    model, _, batch = without_biases(name)
    answers = outputs(model, batch)
    known = set(biases(model))
    added = add_biases(model, norms=norms)
    if name != "resnet":
        assert len(added) == ADDED[name][0 if norms else 1]
    assert set(added) == set(biases(model)) - known and all(not parameter.any() for parameter in added.values())
    head = {id(parameter) for parameter in fresh_head(model)}
    assert not any("lm_head" in key or id(parameter) in head for key, parameter in added.items())
    assert torch.allclose(outputs(model, batch), answers, rtol=1e-12, atol=1e-12)  # plus zero, by whatever kernel adds
    assert add_biases(model, norms=norms) == {}


@pytest.mark.parametrize("style", ["flat", "automatic"])
@pytest.mark.parametrize("name", ["llama", "resnet", "plain"])
def test_added_biases_have_the_gradients_of_the_oracle_by_fast_rules(name, style):
    model, loss_fn, batch = without_biases(name)
    BiTFiT(add_missing=True, norms=True, values="random").start(Context(model, loss_fn, 1, 1, 1))
    rows = per_example_gradients(model, loss_fn, batch)
    assert any("norm" in key or key == "1.bias" for key in rows)
    norms = torch.cat([value.flatten(1) for value in rows.values()], dim=1).norm(dim=1)
    clip = norms.median().item()
    factors = clip_factor(norms, clip, style)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = clipped_sum(model, loss_fn, batch, clip, style)
    assert set(sums) == set(rows)
    scale = max(value.abs().max() for value in rows.values())
    for key, value in sums.items():
        assert torch.allclose(value, torch.tensordot(factors, rows[key], dims=1), rtol=1e-9, atol=1e-11 * scale), key


def test_random_values_are_small_and_the_same_everywhere():
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(40, 3000, bias=False), nn.Linear(3000, 2))
        found.append(add_biases(model, values="random")["0.bias"].detach())
    assert torch.equal(*found) and 0.018 < found[0].std() < 0.022
    with pytest.raises(ValueError, match="'zero' or 'random'"):
        BiTFiT(values="ones")
    with pytest.raises(ValueError, match="'zero' or 'random'"):
        BiTFiT(reinitialise="ones")


@pytest.mark.parametrize("values", ["zero", "random"])
def test_biases_are_set_anew_and_nothing_else(values):
    model, loss_fn, _ = zoo.build("roberta")
    for parameter in biases(model).values():
        parameter.data.fill_(7.0)
    before = copy.deepcopy(model).state_dict()
    BiTFiT(reinitialise=values).start(Context(model, loss_fn, 1, 1, 1))
    for name, value in model.state_dict().items():
        anew = name.endswith("bias") and not name.startswith("classifier")
        assert torch.equal(value, before[name]) != anew, name
        assert not anew or ((value == 0).all() == (values == "zero") and value.abs().max() < 0.2)


def test_a_run_that_is_stopped_goes_on_with_its_added_biases(tmp_path):
    def run(folder, optimizer="sgd"):
        model, loss_fn, batch = without_biases("llama")
        data, collate = zoo.as_data(batch)
        return fine_tune(model, data, BiTFiT(add_missing=True, values="random", reinitialise="random"), noise_multiplier=1.0, steps=4,
                         batch_size=3, clip=0.5, learning_rate=1e-3, loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01,
                         seed=0, checkpoint=folder, checkpoint_every=folder and 2, optimizer=optimizer, progress=False)

    with pytest.raises(Stopped):
        run(tmp_path, stopping(3, torch.optim.SGD))
    resumed, unbroken = run(tmp_path, torch.optim.SGD), run(None)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True))


@pytest.mark.parametrize("add", [False, True])
def test_shifts_of_frozen_batch_norms_are_biases_and_so_are_those_before_them(add):
    torch.manual_seed(0)
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET))
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 32, 32))
    freeze_batchnorm(model).double()
    BiTFiT(add_missing=add).start(Context(model, zoo.classifier_loss, 1, 1, 1))
    batch = {"pixel_values": torch.randn(4, 3, 32, 32, dtype=torch.float64), "labels": torch.arange(4) % 3}
    rows = per_example_gradients(model, zoo.classifier_loss, batch)
    shifts = [name for name in rows if name.endswith("normalization.bias")]
    before = [name for name in rows if name.endswith("convolution.bias")]
    assert len(shifts) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) and bool(before) == add
    assert all(rows[name].any() for name in before)                              # with fixed statistics they can learn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = weighted_sum(model, zoo.classifier_loss, batch, torch.ones(4, dtype=torch.float64))
    scale = max(values.sum(0).abs().max() for values in rows.values())
    assert all((found[name] - values.sum(0)).abs().max() < 1e-10 * scale for name, values in rows.items())


def test_what_cannot_be_given_a_bias():
    attention = nn.MultiheadAttention(8, 2, bias=False)
    bare = nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.ConvTranspose1d(2, 2, 1, bias=False), nn.Embedding(3, 4),
                         nn.Linear(4, 2))
    assert add_biases(attention) == {} and add_biases(bare, norms=True) == {}
    with pytest.raises(ValueError, match="has no biases outside its head; choose LastLayer"):
        BiTFiT(add_missing=True).start(Context(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)), zoo.image_loss, 1, 1, 1))
    with pytest.raises(ValueError, match=r"BiTFiT\(add_missing=True\)"):
        BiTFiT().start(Context(without_biases("plain")[0], zoo.image_loss, 1, 1, 1))
