"""Kinds of layers that people put into a model, each against one backward pass for each example."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from test_gradients import noise, wave
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from zoo import apart

from dpft.gradients import clipped_sum, per_example_gradients
from dpft.models import freeze_batchnorm
from dpft.oracle import evaluating


class With(nn.Module):
    """A layer between two linear ones, read as `read` says: the first shows whether gradients go through, the last takes any shape."""

    def __init__(self, layer, read=None, inputs=4):
        super().__init__()
        self.layer, self.below = layer, nn.Linear(inputs, inputs)
        self.read = read or (lambda layer, x: layer(x))

    def forward(self, x):
        x = torch.tanh(self.below(x)) if x.is_floating_point() else x
        return self.read(self.layer, x)


def first(layer, x):
    return layer(x)[0]


def step_by_step(cell, x):
    "A cell over the positions, by a loop."
    state = None
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
    return state[0] if isinstance(state, tuple) else state


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(noise(2, 4, 3))

    def forward(self, x):
        return torch.einsum("btd,hdk->bhtk", x, self.weight)


class Scan(nn.Module):
    "A linear recurrence with a decay that is learnt."

    def __init__(self):
        super().__init__()
        self.decay, self.gain = nn.Parameter(noise(4)), nn.Parameter(noise(4, seed=1))

    def forward(self, x):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + self.gain * x[:, t]
            out.append(state)
        return torch.stack(out, 1)


class Experts(nn.Module):
    "Each position goes to one of two experts."

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        return sum(expert(x) * shares[..., i:i + 1] for i, expert in enumerate(self.experts))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))


def frozen_norm(norm):
    "A normalisation whose statistics are those of other rows, and stay."
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    return freeze_batchnorm(nn.Sequential(norm))[0]


IDS = torch.tensor([[1, 2, 2, 0], [3, 3, 6, 4]])
WORDS, LINE, PLANE, SPACE, FLAT = noise(2, 3, 4), noise(2, 4, 4), noise(2, 4, 4, 4), noise(2, 4, 2, 3, 4), noise(2, 4)
BLOCK = dict(dim_feedforward=6, dropout=0.0, activation="gelu", batch_first=True)
LAYERS = {  # the layer, how it is read, its input
    "Linear": (lambda: nn.Linear(4, 3), None, WORDS),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 3), lambda layer, x: layer(x, x.sin()), FLAT),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), None, LINE),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), None, PLANE),
    "Conv3d": (lambda: nn.Conv3d(4, 2, 2), None, SPACE),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 3, 3), None, LINE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), None, PLANE),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 2, 2), None, SPACE),
    "Embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), None, IDS),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 4, mode="mean"), None, IDS),
    "LayerNorm": (lambda: nn.LayerNorm(4), None, WORDS),
    "RMSNorm": (lambda: nn.RMSNorm(4, eps=1e-6), None, WORDS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), None, PLANE),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), None, LINE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), None, PLANE),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), None, SPACE),
    "BatchNorm1d, frozen": (lambda: frozen_norm(nn.BatchNorm1d(4)), None, FLAT),
    "BatchNorm2d, frozen": (lambda: frozen_norm(nn.BatchNorm2d(4)), None, PLANE),
    "BatchNorm3d, frozen": (lambda: frozen_norm(nn.BatchNorm3d(4)), None, SPACE),
    "PReLU": (lambda: nn.PReLU(4), None, PLANE),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0], WORDS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, **BLOCK), None, WORDS),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, **BLOCK), lambda layer, x: layer(x, x.sin()), WORDS),
    "RNN": (lambda: nn.RNN(4, 3, batch_first=True), first, WORDS),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), first, WORDS),
    "GRU": (lambda: nn.GRU(4, 3, batch_first=True), first, WORDS),
    "RNNCell": (lambda: nn.RNNCell(4, 3), step_by_step, WORDS),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), step_by_step, WORDS),
    "GRUCell": (lambda: nn.GRUCell(4, 3), step_by_step, WORDS),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), None, WORDS),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), None, WORDS),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), None, WORDS),
    "Conv1D of Transformers": (lambda: hf.pytorch_utils.Conv1D(3, 4), None, WORDS),
    "tied": (Tied, None, IDS),
    "used three times": (lambda: nn.Linear(4, 4), lambda layer, x: layer(layer(layer(x).tanh()).tanh()), WORDS),
    "checkpointed": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
                     lambda layer, x: checkpoint(layer, x, use_reentrant=False), WORDS),
    "compiled": (lambda: nn.Linear(4, 3), lambda layer, x: torch.compile(layer, backend="eager")(x), WORDS),
    "scripted": (lambda: torch.jit.script(nn.Linear(4, 3)), None, WORDS),
    "a function of one's own": (lambda: nn.Linear(4, 3), lambda layer, x: Square.apply(layer(x)), WORDS),
    "functional": (lambda: nn.Linear(4, 3), lambda layer, x: F.linear(x, layer.weight.sin(), layer.bias), WORDS),
    "einsum": (Einsum, None, WORDS),
    "scan": (Scan, None, WORDS),
    "mixture of experts": (Experts, None, WORDS),
    "ParameterList": (lambda: nn.ParameterList([noise(4), noise(1, 3, 4)]), lambda layer, x: x * layer[0] + layer[1], WORDS),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_the_clipped_sum_through_a_layer_is_autograds(name):
    torch.manual_seed(0)
    make, read, x = LAYERS[name]
    model = With(make(), read, x.shape[-1]).double()
    if not x.is_floating_point():
        del model.below
        model.below = nn.Identity()
    with evaluating(model):
        rows = per_example_gradients(model, wave, (x,))
        norms = torch.cat([values.flatten(1) for values in rows.values()], 1).norm(dim=1)
        clip = norms.mean().item()
        found = clipped_sum(model, wave, (x,), clip)
    assert all(any(parameter is own for own in model.parameters()) for parameter in model.layer.parameters())
    assert all(values.any() for key, values in rows.items() if key.startswith("layer")), "every parameter of the layer has a gradient"
    factors = (clip / norms).clamp(max=1)
    off = sum((found[key] - torch.tensordot(factors, values, 1)).square().sum() for key, values in rows.items()).sqrt().item()
    assert 0 < factors.min() < 1 and off <= 1e-5 * clip
    assert apart(found.values())


def test_there_are_more_than_thirty():
    assert len(LAYERS) >= 35
