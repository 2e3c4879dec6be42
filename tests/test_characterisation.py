"""What dpft computes, held by its public names and by one backward pass for each example, whatever lies between the two.

Nothing here knows a stream, a digest or a module inside the kernel."""

import copy
import math
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
import zoo
from scipy.stats import binom
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dpft
from dpft import (
    Adapter,
    BiTFiT,
    Block,
    Chain,
    DPFrost,
    Full,
    LargestWeights,
    LastLayer,
    LayerFreeze,
    LoRA,
    NormOnly,
    Partition,
    RandomPartitions,
    RapFT,
    SampledGaussian,
    Then,
    Trainable,
)
from dpft.gradients import clipped_sum, per_example_norms, weighted_sum
from dpft.models import freeze_batchnorm
from dpft.oracle import per_example_gradients
from dpft.registry import METHODS

EXACT, SLACK = 1e-9, 1e-6  # of float64 against the oracle; of blocks that make up one bound
STABILISER = 0.01          # gamma of automatic clipping
RARELY = 1e-6              # how often a test of draws may fail by chance


def flat(named):
    "One row for each example, or one vector."
    return torch.cat([value.flatten(1) if value.ndim > 1 else value[:, None] for value in named.values()], 1).double()


def joined(named):
    return torch.cat([value.flatten() for value in named.values()]).double()


def bounded(rows, clip, style="flat"):
    "Rows with their 2-norm bounded; one that is not finite is nothing."
    norms = rows.norm(dim=1, keepdim=True)
    factors = (clip / norms).clamp(max=1) if style == "flat" else clip / (norms + STABILISER)
    return torch.where(norms.isfinite() & (norms > 0), rows * factors, 0.0).nan_to_num(0.0)


def by_unit(rows, units):
    return rows.new_zeros(int(units.max()) + 1, rows.shape[1]).index_add_(0, units, rows)


def off(found, wanted, least=1e-12):
    return ((found.double() - wanted).norm() / wanted.norm().clamp(min=least)).item()


def agrees(model, loss_fn, batch):
    "Sums and norms of what trains now are the oracle's."
    rows = flat(per_example_gradients(model, loss_fn, batch))
    size = len(rows)
    units, factors = torch.arange(size) % (size - 1), torch.linspace(-1.0, 1.0, size, dtype=torch.float64)
    clip = 0.7 * rows.norm(dim=1).median().item()
    assert clip > 0
    errors = {"norms": off(per_example_norms(model, loss_fn, batch), rows.norm(dim=1)),
              "1-norms": off(per_example_norms(model, loss_fn, batch, order=1), rows.abs().sum(1)),
              "weighted": off(joined(weighted_sum(model, loss_fn, batch, factors)), factors @ rows),
              "absolute": off(joined(weighted_sum(model, loss_fn, batch, factors.abs(), absolute=True)), factors.abs() @ rows.abs())}
    for style in ("flat", "automatic"):
        errors[style] = off(joined(clipped_sum(model, loss_fn, batch, clip, style)), bounded(rows, clip, style).sum(0), clip)
        errors[f"{style}, units"] = off(joined(clipped_sum(model, loss_fn, batch, clip, style, groups=units)),
                                        bounded(by_unit(rows, units), clip, style).sum(0), clip)
    assert max(errors.values()) <= EXACT, errors


# ---- 1. the zoo against the oracle


@pytest.mark.parametrize("name", ["roberta", "gpt2", "gpt2-lm", "llama", "vit", "cnn"])
def test_a_family_is_exact(name):
    "With all that trains, and then with less of it: what trains may change between two calls."
    model, loss_fn, batch = zoo.build(name, rows=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for freeze_set in ("full", "norms" if name == "llama" else "biases"):
            zoo.freeze(model, freeze_set)
            agrees(model, loss_fn, batch)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wave(model, batch):
    "A smooth loss that treats each output in its own way."
    values = model(batch[0]).flatten(1)
    return (torch.sin(values * torch.linspace(0.5, 2.0, values.shape[1], dtype=values.dtype)) + 0.1 * values.square()).sum(1)


class Low(nn.Module):
    "A frozen matrix and a low-rank one beside it, as LoRA adds."

    def __init__(self):
        super().__init__()
        self.base, self.scale = nn.Linear(4, 5).requires_grad_(False), 0.5
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x))


class Positions(nn.Module):
    "Tokens, one row of positions for all examples, and a token in front of each."

    def __init__(self, looked_up):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.looked_up, self.table = looked_up, nn.Embedding(6, 4) if looked_up else nn.Parameter(noise(1, 5, 4))
        self.front = nn.Parameter(noise(1, 1, 4, seed=1))

    def forward(self, ids):
        where = self.table(torch.arange(ids.shape[1])[None]) if self.looked_up else self.table[:, :ids.shape[1]]
        x = torch.cat([self.front.expand(len(ids), -1, -1), self.words(ids) + where], 1)
        return self.head(torch.tanh(x))


class Tied(nn.Module):
    def __init__(self, vocabulary=9, width=4):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


class Twice(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.layer(self.norm(self.layer(x).tanh())))


class Bare(nn.Module):
    "Parameters in no layer: a token, positions, a scale and a number."

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Parameter(noise(1, 1, 4)), nn.Parameter(noise(1, 4, 4, seed=1))
        self.scale, self.gain, self.head = nn.Parameter(noise(4, seed=2)), nn.Parameter(noise(1, seed=3)[0]), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(torch.tanh(x * self.scale)) * self.gain


class With(nn.Module):
    "A layer behind a linear one, read as `read` says, so that its input has a gradient too."

    def __init__(self, layer, read=lambda layer, x: layer(x)):
        super().__init__()
        self.layer, self.below, self.read = layer, nn.Linear(4, 4), read

    def forward(self, x):
        x = torch.tanh(self.below(x)) if x.is_floating_point() else x
        return self.read(self.layer, x)


def step_by_step(cell, x):
    "A cell over the positions, by a loop."
    state = None
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
    return state[0]


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(noise(2, 4, 3))

    def forward(self, x):
        return torch.einsum("btd,hdk->bhtk", x, self.weight)


def frozen_norm(norm):
    "A normalisation whose statistics are those of other rows, and stay."
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    return freeze_batchnorm(norm)


IDS = torch.tensor([[1, 2, 2, 0], [3, 3, 6, 4], [5, 0, 5, 5], [8, 7, 1, 1], [2, 2, 2, 2]])
WORDS, PLANE, LINE, FLAT = noise(5, 3, 4), noise(5, 4, 5, 5), noise(5, 4, 6), noise(5, 4)
LAYERS = {  # the model and its input
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), FLAT),
    "linear over tokens": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3, bias=False)), WORDS),
    "linear over 4-D inputs": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), noise(5, 2, 3, 4)),
    "long texts": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), noise(4, 70, 4)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.Tanh(), nn.Conv1d(6, 2, 2, stride=2)), LINE),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding="same"), nn.Tanh(), nn.Conv2d(6, 2, 3, stride=2)), PLANE),
    "conv3d": (lambda: nn.Conv3d(4, 2, 2), noise(5, 4, 3, 3, 3)),
    "conv of one position": (lambda: nn.Conv2d(4, 3, 5, padding="valid"), PLANE),
    "circular": (lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="circular"), LINE),
    "reflected": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), PLANE),
    "replicated, of uneven sides": (lambda: nn.Conv3d(4, 8, (1, 2, 3), padding=(0, 1, 2), groups=2, padding_mode="replicate"),
                                    noise(5, 4, 4, 3, 4)),
    "grouped, dilated": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4), nn.Tanh(),
                                               nn.Conv2d(8, 8, 1, groups=8, bias=False)), PLANE),
    "grouped, a rest": (lambda: nn.Conv1d(4, 8, 3, stride=2, groups=4), noise(5, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), PLANE),
    "GroupNorm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(3, 6)), PLANE),
    "GroupNorm without positions": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 2)), FLAT),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), WORDS),
    "norms over 4-D inputs": (lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 4), nn.RMSNorm(4)), noise(5, 2, 3, 4)),
    "RMSNorm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, eps=1e-6), nn.Linear(6, 3)), WORDS),
    "InstanceNorm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True)), PLANE),
    "BatchNorm, frozen": (lambda: nn.Sequential(nn.Linear(4, 4), frozen_norm(nn.BatchNorm1d(4))), FLAT),
    "PReLU": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.PReLU(4)), PLANE),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)), IDS),
    "bags": (lambda: nn.EmbeddingBag(9, 4, mode="mean"), IDS),
    "tied head": (Tied, IDS),
    "tied head, many words": (lambda: Tied(300), IDS),
    "positions, looked up": (lambda: Positions(True), IDS),
    "positions, broadcast": (lambda: Positions(False), IDS),
    "bare parameters": (Bare, WORDS),
    "low rank": (Low, WORDS),
    "called twice": (Twice, WORDS),
    "called twice, wide": (lambda: nn.Sequential(nn.Linear(4, 40), Twice(40)), WORDS),
    "Conv1D of Transformers": (lambda: With(hf.pytorch_utils.Conv1D(3, 4)), WORDS),
    "checkpointed": (lambda: With(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
                                  lambda layer, x: checkpoint(layer, x, use_reentrant=False)), WORDS),
    "bilinear": (lambda: With(nn.Bilinear(4, 4, 3), lambda layer, x: layer(x, x.sin())), FLAT),
    "attention": (lambda: With(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True)), WORDS),
    "functional": (lambda: With(nn.Linear(4, 3), lambda layer, x: F.linear(x, layer.weight.sin(), layer.bias)), WORDS),
    "recurrent": (lambda: With(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), lambda layer, x: layer(x)[0]), WORDS),
    "cell": (lambda: With(nn.LSTMCell(4, 3), step_by_step), WORDS),
    "weight norm": (lambda: With(parametrizations.weight_norm(nn.Linear(4, 3))), WORDS),
    "orthogonal": (lambda: With(parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley")), WORDS),
    "scripted": (lambda: With(torch.jit.script(nn.Linear(4, 3).double())), WORDS),
    "einsum": (lambda: With(Einsum()), WORDS),
}
SLOW = {"transposed", "InstanceNorm", "PReLU", "bags", "bilinear", "attention", "functional", "recurrent", "cell", "weight norm",
        "orthogonal", "scripted", "einsum"}   # exact by a slow way, which a warning says


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_exact(name):
    torch.manual_seed(0)
    make, x = LAYERS[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        agrees(make().double().eval(), wave, (x,))
    slow = any("no fast rule" in str(one.message) for one in seen)
    assert slow == (name in SLOW)

def test_norms_of_partitions_are_those_of_their_parameters():
    torch.manual_seed(0)
    model = LAYERS["LayerNorm"][0]().double()
    parts = [Partition(name, tuple(layer.parameters())) for name, layer in model.named_children()]
    rows = per_example_gradients(model, wave, (WORDS,))
    for order in (1, 2):
        wanted = torch.stack([flat({name: value for name, value in rows.items() if name.startswith(part.name)}).norm(order, dim=1)
                              for part in parts], 1)
        assert off(per_example_norms(model, wave, (WORDS,), order, parts), wanted) <= EXACT


# ---- 2. what each method trains, and the sums it adds up


class Net(nn.Module):
    "A layer of each kind that a method asks for; no dropout."

    def __init__(self):
        super().__init__()
        self.below, self.norm, self.middle, self.head = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.norm(self.below(x.flatten(1)))))))


def net():
    torch.manual_seed(0)
    return Net()


SIZE = 12
EACH = ("below.weight", "below.bias", "norm.weight", "norm.bias", "middle.weight", "middle.bias", "head.weight", "head.bias")
HEAD = EACH[-2:]   # it is fresh, so it trains under every method
BIASES, NORMS = (*EACH[1:-2:2], *HEAD), (*EACH[2:4], *HEAD)
LOW = (*(f"{layer}.lora_{part}.default.weight" for layer in ("below", "middle") for part in "AB"), *HEAD)
NARROW = (*(f"middle.adapter.{layer}.{part}" for layer in ("down", "up") for part in ("weight", "bias")), *HEAD)
SELECT = dict(rounds=1, sample_rate=1.0)
PRIVATE = dict(relevance_data="private", share=0.1, relevance_rate=1.0)
ORDER = ["below", "norm", "middle", "head"]
# the method, and what trains in the first step and in the second; None: what it selected
METHODS_TRIED = {
    "Full": (Full, EACH, EACH),
    "Trainable": (Trainable, EACH, EACH),
    "LastLayer": (LastLayer, HEAD, HEAD),
    "NormOnly": (NormOnly, NORMS, NORMS),
    "BiTFiT": (BiTFiT, BIASES, BIASES),
    "RandomPartitions": (lambda: RandomPartitions(0.4), None, None),
    "LargestWeights": (lambda: LargestWeights(0.25), None, None),
    "LoRA": (lambda: LoRA(2, targets=("below", "middle")), LOW, LOW),
    "Adapter": (lambda: Adapter(2, after="middle"), NARROW, NARROW),
    "DPFrost": (lambda: DPFrost(0.4, **SELECT), None, None),
    "LayerFreeze": (lambda: LayerFreeze(2, 1, ORDER), EACH, EACH[4:]),
    "RapFT": (lambda: RapFT(Full(), relevance_data="random"), EACH, EACH),
    "RapFT, private": (lambda: RapFT(BiTFiT(), **PRIVATE), BIASES, BIASES),
    "Chain": (lambda: Chain(BiTFiT(), LayerFreeze(2, 1, ORDER)), BIASES, BIASES[2:]),
    "Chain, selecting": (lambda: Chain(LoRA(2, targets=("below", "middle")), DPFrost(0.6, **SELECT)), None, None),
    "Then": (lambda: Then(Full(), None, BiTFiT(), steps=1), EACH, BIASES),
}


def engine(method, model=None, data=None, **given):
    given = {"epsilon": 8.0, "accountant": "rdp", "batch_size": SIZE, "steps": 2, "clip": 0.5, "physical_batch_size": 5, **given}
    return dpft.Engine(model or net(), given.pop("loss_fn", zoo.image_loss), method, data or pictures(), **given)


def pictures():
    data = zoo.toy(SIZE)
    return TensorDataset(*data.batch(range(SIZE)))


def oracle_sums(e, units=None, style="flat"):
    "The clipped sum over all rows of what trains now, in the method's blocks, by name; in float64."
    names = {id(p): name for name, p in e.model.named_parameters()}
    rows = {name: value.double() for name, value in per_example_gradients(copy.deepcopy(e.model), zoo.image_loss, pictures()[:]).items()}
    rows = {name: value if units is None else by_unit(value.flatten(1), units).view(-1, *value.shape[1:]) for name, value in rows.items()}
    sums = {name: torch.zeros_like(value[0]) for name, value in rows.items()}
    blocks = e.method.blocks(e.context)
    for block in blocks:
        assert isinstance(block, Block)
        masks = block.masks or [None] * len(block.parameters)
        own = {names[id(p)]: torch.ones_like(p, dtype=torch.bool) if mask is None else mask
               for p, mask in zip(block.parameters, masks, strict=True)}
        within = bounded(flat({name: rows[name] * mask for name, mask in own.items()}), 0.5 * block.clip, style).sum(0)
        for name, part in zip(own, within.split([mask.numel() for mask in own.values()]), strict=True):
            sums[name] += part.view_as(sums[name])
    return sums, sum(block.clip ** 2 for block in blocks) ** 0.5


def steps_agree(e, *how):
    "Each step's sums are the oracle's; what trained in each."
    trained, optimizer = [], torch.optim.SGD(e.model.parameters(), 1e-3)
    for step in e:
        wanted, total = oracle_sums(e, *how)
        for batch in step:
            step.add(batch)
        assert step.sums.keys() == wanted.keys() and total <= 1 + SLACK
        assert off(joined({name: step.sums[name] for name in wanted}), joined(wanted)) <= 1e-5
        assert {id(p) for p in e.parameters()} == {id(p) for name, p in e.model.named_parameters() if name in wanted}
        trained.append(tuple(wanted))
        step.privatize()
        assert all((p.grad is not None) == (name in wanted) for name, p in e.model.named_parameters())
        optimizer.step()
        step.done()
    return trained


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS_TRIED)
def test_the_sums_of_a_method_are_the_oracles(name):
    make, *wanted = METHODS_TRIED[name]
    e = engine(make())
    trained = steps_agree(e)
    assert len(trained) == 2
    for found, names in zip(trained, wanted, strict=True):
        assert sorted(found) == sorted(names) if names else set(HEAD) < set(found)


def test_every_method_of_the_registry_is_tried():
    own = {"ZerothOrder"}       # it has no gradients: test_zeroth_order has its oracle
    assert {known.kind for known in METHODS.values()} | {"Chain", "Then"} <= {name.partition(",")[0] for name in METHODS_TRIED} | own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("name", ["Full", "BiTFiT"])
def test_units_are_summed_before_they_are_bounded(name, clipping):
    owners = torch.tensor([0, 1, 2, 0, 1, 3, 3, 3, 4, 4, 4, 4])
    e = engine(METHODS_TRIED[name][0](), unit=[f"person {owner}" for owner in owners], batch_size=5, clipping=clipping, delta=0.01)
    assert len(steps_agree(e, owners, clipping)) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda: RandomPartitions(0.4), lambda: DPFrost(0.4, **SELECT)])
def test_whole_layers_are_selected_and_no_more_than_the_ratio(make):
    e = engine(make())
    outside = {name: p for name, p in e.model.named_parameters() if name not in HEAD}
    assert 0 < sum(p.numel() for p in outside.values() if p.requires_grad) <= 0.4 * sum(p.numel() for p in outside.values())
    assert all(outside[f"{layer}.weight"].requires_grad == outside[f"{layer}.bias"].requires_grad for layer in ORDER[:-1])


@pytest.mark.filterwarnings("ignore")
def test_the_largest_entries_train_and_the_others_stay_bit_for_bit():
    e = engine(LargestWeights(0.25))
    before, sizes = copy.deepcopy(e.model.state_dict()), [p.numel() for p in net().parameters()]
    steps_agree(e)
    changed = {name: p != before[name] for name, p in e.model.named_parameters()}
    assert torch.cat([changed.pop(name).flatten() for name in HEAD]).double().mean() > 0.9    # a tiny change may be rounded away
    magnitudes, moved = (joined({name: values[name] for name in changed}) for values in ({k: v.abs() for k, v in before.items()}, changed))
    room = int(0.25 * sum(sizes[:-2]))
    chosen = magnitudes >= magnitudes.sort(descending=True).values[room - 1]
    assert not moved[~chosen].any() and moved[chosen].mean() > 0.9


# ---- 3. draws


def marked(size):
    "Rows that say which they are: the gradient of row i is the i-th unit vector."
    return TensorDataset(torch.eye(size, dtype=torch.float64), torch.arange(size))


def draws(size, owners, **given):
    "For each step the rows that were drawn; the sums say the same, and no unit lies in two physical batches."
    e = engine(Full(), zoo.Plain([size]), marked(size), loss_fn=zoo.inner, epsilon=None, noise_multiplier=1.0, clip=float(size), **given)
    found = []
    for step in e:
        rows, met = torch.zeros(size, dtype=torch.float64), set()
        for batch in step:
            step.add(batch)
            here = set(owners[batch[1]].tolist())
            assert not here & met
            met |= here
            rows.index_add_(0, batch[1], torch.ones(len(batch[1]), dtype=torch.float64))
        assert torch.equal(step.sums["p0"].double(), rows) and rows.max() <= 1
        step.privatize()
        assert e.model.p0.grad.abs().min() > 0, "noise, whatever was drawn"
        step.done()
        found.append(rows)
    return torch.stack(found), e


def within(count, steps, rate, tests):
    "Whether a count of so many steps fits its rate, or is so far off as chance would have it less than once in a million runs."
    share = RARELY / (2 * tests)
    return binom.ppf(share, steps, rate) <= count <= binom.ppf(1 - share, steps, rate)


@pytest.mark.filterwarnings("ignore")
def test_units_are_drawn_whole_each_alone_at_the_rate():
    owners = torch.arange(30) % 20                        # ten of them have two rows
    seen, _ = draws(30, owners, batch_size=6, steps=80, unit=[f"person {owner}" for owner in owners], physical_batch_size=8)
    assert torch.equal(seen[:, :10], seen[:, 20:]), "two rows of one unit come together"
    units, rate, steps = seen[:, :20], 6 / 20, len(seen)
    pairs = torch.triu(units.T @ units, 1)
    tests = 20 + 190 + 1 + 1
    assert all(within(units[:, i].sum(), steps, rate, tests) for i in range(20))
    assert all(within(pairs[i, j], steps, rate ** 2, tests) for i in range(20) for j in range(i + 1, 20))
    sizes = Counter(units.sum(1).int().tolist())
    assert within(sizes[6], steps, binom.pmf(6, 20, rate), tests), "the size of a draw is random too"
    assert within((units[1::2] * units[::2]).sum(), 20 * (steps // 2), rate ** 2, tests), "one draw does not depend on the last"


@pytest.mark.filterwarnings("ignore")
def test_an_empty_draw_is_a_step():
    seen, e = draws(20, torch.arange(20), batch_size=1, steps=60)           # without an empty one less than once in 10^11 runs
    assert (seen.sum(1) == 0).any() and len(seen) == 60
    assert sum(m.steps for m in e.spent) == 60


# ---- 4. what was spent


def counted(mechanisms):
    steps = Counter()
    for m in mechanisms:
        steps[m.sample_rate, m.noise_multiplier] += m.steps
    return steps


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "accountant"), [("Full", "prv"), ("Then", "rdp"), ("DPFrost", "rdp"), ("RapFT, private", "rdp")])
def test_a_finished_run_has_spent_its_plan(name, accountant):
    run = dpft.fine_tune(net(), pictures(), METHODS_TRIED[name][0](), loss_fn=zoo.image_loss, epsilon=3.0, delta=1e-3,
                         batch_size=6, steps=4, accountant=accountant, progress=False)
    promise = run.guarantee
    assert counted(promise.spent) == counted(promise.planned)
    extra = {"DPFrost": {1.0: 1}, "RapFT, private": {1.0: 1}}.get(name, {})
    assert Counter({rate: steps for (rate, _), steps in counted(promise.spent).items()}) == {0.5: 4, **extra}
    assert promise.epsilon() == pytest.approx(dpft.epsilon(promise.spent, 1e-3, accountant), rel=1e-6)
    assert run.epsilon == pytest.approx(promise.epsilon()) and 2.5 < run.epsilon <= 3.0


@pytest.mark.filterwarnings("ignore")
def test_each_step_is_charged_once_before_it_is_released(tmp_path):
    path = tmp_path / "ledger.db"
    e = engine(Full(), epsilon=None, noise_multiplier=2.0, batch_size=6, steps=3, ledger=path)
    for number, step in enumerate(e):
        for batch in step:
            step.add(batch)
        step.privatize()
        assert sum(m.steps for m in e.spent) == number + 1
        step.done()
    assert counted(e.spent) == counted([SampledGaussian(2.0, 0.5, 3)])
    with dpft.Ledger(path) as ledger:
        assert counted(ledger.spent()) == counted(e.spent)


# ---- 5. what is not finite, and what is not private


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_is_not_finite_adds_exactly_nothing(bad, dtype):
    model, loss_fn, batch = zoo.build("cnn")
    model.to(dtype)
    pixels, labels, scale = batch[0].to(dtype), batch[1], torch.ones(5, dtype=dtype)
    scale[2] = bad

    def scaled(model, batch):
        return loss_fn(model, batch[:2]) * batch[2]

    others = torch.tensor([0, 1, 3, 4])
    found = clipped_sum(model, scaled, (pixels, labels, scale), 0.1)
    wanted = clipped_sum(model, scaled, (pixels[others], labels[others], scale[others]), 0.1)
    assert off(joined(found), joined(wanted)) <= (1e-5 if dtype == torch.float32 else 1e-12)
    alone = clipped_sum(model, scaled, (pixels[2:3], labels[2:3], scale[2:3]), 0.1)
    assert all(not value.any() for value in alone.values())


def test_a_factor_of_zero_silences_what_is_not_finite():
    torch.manual_seed(0)
    model, x = LAYERS["linear over tokens"][0]().double(), WORDS.clone()
    x[1] = math.nan
    others = [0, 2, 3, 4]
    found = weighted_sum(model, wave, (x,), torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0]))
    assert off(joined(found), joined(weighted_sum(model, wave, (x[others],), torch.tensor([1.0, 1.0, 0.5, 1.0])))) <= 1e-12


@pytest.mark.filterwarnings("ignore")
def test_such_a_row_adds_nothing_to_a_step():
    def loss(model, batch):
        return torch.where(batch[1] == 4, math.nan, 1.0) * zoo.inner(model, batch)

    e = engine(Full(), zoo.Plain([SIZE]), marked(SIZE), loss_fn=loss, steps=1, clip=2.0)
    for step in e:
        for batch in step:
            step.add(batch)
        assert torch.equal(step.sums["p0"].double(), (torch.arange(SIZE) != 4).double())
        step.privatize()
        assert e.model.p0.grad.isfinite().all()
        step.done()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Full", "DPFrost"])
def test_a_run_without_noise_never_calls_itself_private(name):
    run = dpft.fine_tune(net(), pictures(), METHODS_TRIED[name][0](), loss_fn=zoo.image_loss, epsilon=math.inf, batch_size=6, steps=2,
                         progress=False)
    assert run.epsilon == math.inf == run.guarantee.epsilon() and not run.guarantee.private and not run.guarantee.spent
    text = run.report().lower()
    assert "not private" in text or "no privacy" in text or "without privacy" in text, text
