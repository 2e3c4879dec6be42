"""Random models, batches, freeze sets, masks and bounds: what must hold of every one of them; `make fuzz` tries many more."""

import copy
import itertools
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import dpft
from dpft.forms import Groups
from dpft.gradients import Block, clipped_sum, gradients
from dpft.method import Method
from dpft.noise import Keystream
from dpft.norms import members
from dpft.oracle import batch_rows, select_rows


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small batches, and of layers that take the slow way
        yield


# random models ---------------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Twice(nn.Module):
    "One module, used two times."

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(torch.tanh(self.body(x)))


class Scale(nn.Module):
    "A parameter of its own, in no layer."

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.scale


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=number != 1) for number in range(3))

    def forward(self, x):
        weights = self.query(x) @ self.key(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        return weights.softmax(-1) @ self.value(x)


class Channels(nn.Module):
    "Mean over all positions of (B, c, ...)."

    def forward(self, x):
        return x.flatten(2).mean(2)


class Tokens(nn.Module):
    "Embeddings of tokens and of their places, and a head that may be tied to the table."

    def __init__(self, vocabulary, width, length, tied, body):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        self.body = body
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        hidden = self.table(ids) + self.places(torch.arange(ids.shape[1])[None])
        return self.head(self.body(hidden))


def layer(draw, width, kinds):
    "One layer that keeps the width of (..., width)."
    kind = draw(st.sampled_from(kinds))
    if kind == "residual":
        return Residual(nn.Sequential(nn.Linear(width, width), nn.GELU()))
    made = {"linear": lambda: nn.Linear(width, width, bias=draw(st.booleans())), "norm": lambda: nn.LayerNorm(width), "tanh": nn.Tanh,
            "relu": lambda: nn.ReLU(inplace=draw(st.booleans())), "twice": lambda: Twice(nn.Linear(width, width)),
            "scale": lambda: Scale(width), "attention": lambda: Attention(width)}
    return made[kind]()


VECTOR = ("linear", "norm", "tanh", "residual", "twice", "scale")


def convolution(draw, kind, channels, first):
    groups = draw(st.sampled_from([1, channels]))
    return (nn.Conv1d if kind == "sound" else nn.Conv2d)(channels, channels, draw(st.integers(1, 3)), stride=draw(st.integers(1, 2)),
                                                         padding=draw(st.integers(0 if first else 1, 2)), groups=groups,
                                                         bias=draw(st.booleans()))


@st.composite
def models(draw, kinds=("vectors", "sequences", "sound", "images", "tokens")):
    "A random small net, and a batch for it: a tuple of inputs and a factor for each example's loss."
    kind, rows, seed = draw(st.sampled_from(kinds)), draw(st.integers(1, 5)), draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    width, length = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    if kind in ("sound", "images"):
        size = (rows, width, 5) if kind == "sound" else (rows, width, 4, 4)
        inputs, body = torch.randn(size), [convolution(draw, kind, width, not number) for number in range(draw(st.integers(1, 2)))]
        norm = [nn.GroupNorm(draw(st.sampled_from([1, width])), width)] if draw(st.booleans()) else []
        if body[0](inputs[:1]).numel() == width:                         # of a single number a norm layer makes a constant, and refuses
            norm = []
        model = nn.Sequential(body[0], *norm, nn.ReLU(), *body[1:], Channels(), nn.Linear(width, 3))
    elif kind == "tokens":
        body = nn.Sequential(*(layer(draw, width, (*VECTOR, "attention")) for _ in range(draw(st.integers(0, 2)))))
        model, inputs = Tokens(6, width, length, draw(st.booleans()), body), torch.randint(0, 6, (rows, length))
    else:
        allowed = VECTOR if kind == "vectors" else (*VECTOR, "attention")
        body = [layer(draw, width, allowed) for _ in range(draw(st.integers(0, 3)))]
        model = nn.Sequential(nn.Linear(width, width), *body, nn.Linear(width, 2))
        inputs = torch.randn((rows, width) if kind == "vectors" else (rows, length, width))
    return model, (inputs, torch.ones(rows))


BAD = (*["plain"] * 9, "zero", "nan", "inf", "1e30", *["edge"] * 4, "tiny", "nan input", "inf input", "large input")
FACTORS = {"zero": 0.0, "nan": math.nan, "inf": math.inf, "1e30": 1e30, "edge": 1e19, "tiny": 1e-30}  # edge: some squares are no float32
INPUTS = {"nan input": math.nan, "inf input": -math.inf, "large input": 1e30}


def spoiled(batch, kinds):
    "The batch with some examples as bad as they get."
    inputs, factors = (part.clone() for part in batch)
    for row, kind in enumerate(kinds):
        factors[row] = FACTORS.get(kind, 1.0)
        if kind in INPUTS and inputs.is_floating_point():
            inputs[row].view(-1)[0] = INPUTS[kind]
    return inputs, factors


def wave(model, batch):
    "A loss with a gradient of its own for each output, times the example's factor."
    values = model(batch[0]).flatten(1)
    weights = torch.linspace(0.5, 2.0, values.shape[1], dtype=values.dtype)
    return (torch.sin(values * weights) + 0.1 * values.square()).sum(1) * batch[1]


def freeze(draw, model):
    "A random part of the parameters trains, at least one."
    every = list(model.parameters())
    kept = draw(st.lists(st.booleans(), min_size=len(every), max_size=len(every)))
    kept[draw(st.integers(0, len(every) - 1))] = True
    for parameter, trains in zip(every, kept, strict=True):
        parameter.requires_grad_(trains)
    return [parameter for parameter, trains in zip(every, kept, strict=True) if trains]


def blocks_of(draw, parameters, clip):
    "One block; one for each parameter; two that share each parameter's entries; or one that leaves some entries out."
    how = draw(st.sampled_from(["one", "each", "masks", "part"]))
    if how == "one":
        return [Block(parameters, None, clip)]
    if how == "each":
        return [Block([parameter], None, clip * draw(st.sampled_from([0.1, 1.0, 3.0]))) for parameter in parameters]
    masks = [torch.rand(parameter.shape) < 0.5 for parameter in parameters]
    for mask in masks:
        mask.view(-1)[0] = True
    if how == "part":
        return [Block(parameters, masks, clip)]
    return [Block(parameters, masks, clip), Block(parameters, [~mask for mask in masks], 0.5 * clip)]


@st.composite
def cases(draw):
    "A model with what trains, a spoiled batch, blocks, and how they are bounded."
    model, batch = draw(models())
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    model.to(dtype)
    kinds = draw(st.lists(st.sampled_from(BAD), min_size=len(batch[1]), max_size=len(batch[1])))
    batch = tuple(part.to(dtype) if part.is_floating_point() else part for part in spoiled(batch, kinds))
    clip = 10.0 ** draw(st.integers(-4, 3))
    scale = 10.0 ** draw(st.sampled_from([0, 0, -6, 6]))
    return SimpleNamespace(model=model, batch=batch, kinds=kinds, blocks=blocks_of(draw, freeze(draw, model), clip), dtype=dtype,
                           loss=lambda model, batch: scale * wave(model, batch), style=draw(st.sampled_from(["flat", "automatic"])),
                           units=draw(st.none() | st.lists(st.integers(0, 1), min_size=len(kinds), max_size=len(kinds))),
                           out=draw(st.integers(0, len(kinds) - 1)))


def rounding(case):
    """How far above 1 rounding may lift one example's influence over its bound, in a sum over a batch.

    A sum of m products, m the positions of all examples, is off by at most m units of rounding, u, times the length that it would have
    if nothing cancelled; once in each of two sums.
    No norm is taken for less than 4 sqrt(u) of that length, so the length is at most 1 / (4 sqrt(u)) bounds, and what is off is at most
    m sqrt(u) / 4 bounds: less than allowed here, which was the allowance of an earlier margin.
    """
    positions = case.batch[0].numel() // (case.batch[0].shape[1] if case.batch[0].is_floating_point() else 1)
    return 4 * positions * math.sqrt(torch.finfo(case.dtype).eps)


def block_lengths(sums, case):
    "The 2-norm of a sum in each block, over its bound."
    names = {id(parameter): name for name, parameter in case.model.named_parameters()}
    for block in case.blocks:
        parts = [sums[names[id(p)]] * (1 if mask is None else mask) for p, mask in members(block)]
        yield math.sqrt(sum(part.double().square().sum().item() for part in parts)) / block.clip


def summed(case, rows):
    "The released sum over some rows, units together."
    units = None if case.units is None else torch.tensor(case.units)[rows]
    batch = select_rows(case.batch, rows)
    if units is not None:
        units = Groups(torch.unique(units, return_inverse=True)[1])
    return gradients(case.model, case.loss, batch, units).clipped_sum(case.blocks, case.style)[0]


HALF, QUARTER = (settings(max_examples=settings.default.max_examples // part) for part in (2, 4))


# 1. one example or unit moves the sum by no more than the bound ----------------------------------------------------------------------


def is_rounding(case):
    """Whether some example's gradient in a block is rounding rather than a gradient, as that of a bias before a normalisation is.

    Such numbers change with the rows beside them, and a clip bound below them makes unit vectors of them: the bound on a sum holds up to
    the rounding of other rows (@sec-threat-model).
    """
    wide, same = copy.deepcopy(case.model).double(), {id(p): name for name, p in case.model.named_parameters()}
    for row in range(len(case.kinds)):
        one = select_rows(case.batch, torch.tensor([row]))
        found = []
        for model, batch in ((case.model, one), (wide, tuple(x.double() if x.is_floating_point() else x for x in one))):
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(case.loss(model, batch).sum(), [*named.values()], allow_unused=True)
            found.append({name: torch.zeros(1) if g is None else g.double() for name, g in zip(named, grads, strict=True)})
        for block in case.blocks:
            names = [same[id(p)] for p in block.parameters]
            off = sum((found[0][name] - found[1][name]).square().sum() for name in names)
            if off > 1e-4 * sum(found[1][name].square().sum() for name in names):
                return True
    return False


@given(cases())
def test_one_unit_more_or_less_moves_the_sum_by_no_more_than_the_bound(case):
    assume(not is_rounding(case))
    units = torch.tensor(range(len(case.kinds)) if case.units is None else case.units)
    rest = torch.nonzero(units != units[case.out])[:, 0]
    whole, without = summed(case, torch.arange(len(units))), summed(case, rest)
    moved = {name: whole[name] - without[name] for name in whole}
    alone = summed(case, torch.nonzero(units == units[case.out])[:, 0])
    for name, value in (*whole.items(), *without.items()):
        assert value.isfinite().all(), name
    for ratio, own in zip(block_lengths(moved, case), block_lengths(alone, case), strict=True):
        assert max(ratio, own) <= 1 + rounding(case)


def square_norms(case, one):
    "Of one example's gradient, in each block, by autograd and in the model's own precision."
    parameters = list({id(p): p for block in case.blocks for p in block.parameters}.values())
    found = torch.autograd.grad(case.loss(case.model, one).sum(), parameters, allow_unused=True)
    gradient = {id(p): torch.zeros_like(p) if value is None else value for p, value in zip(parameters, found, strict=True)}
    return torch.stack([sum((gradient[id(p)] if mask is None else gradient[id(p)][mask]).square().sum()
                            for p, mask in members(block)) for block in case.blocks])


@HALF
@given(cases())
def test_what_is_not_finite_contributes_exactly_nothing(case):
    for row in range(len(case.kinds)):
        one = select_rows(case.batch, torch.tensor([row]))
        if square_norms(case, one).isfinite().all():
            continue
        sums = gradients(case.model, case.loss, one).clipped_sum(case.blocks, case.style)[0]
        assert not any(value.any() or value.isnan().any() for value in sums.values())


@QUARTER
@given(models(), st.sampled_from(["flat", "automatic"]), st.data())
def test_an_empty_batch_and_zero_gradients_sum_to_zero(made, style, data):
    model, batch = made
    freeze(data.draw, model)
    nothing = (batch[0], torch.zeros_like(batch[1]))
    for rows in (nothing, select_rows(batch, torch.arange(0)), select_rows(nothing, torch.arange(1))):
        sums = clipped_sum(model, wave, rows, 0.5, style)
        assert len(sums) > 0 and not any(value.any() for value in sums.values()) and batch_rows(rows) in (0, 1, len(batch[1]))


# 2. the engine: the sum before the noise, and the noise -------------------------------------------------------------------------------


class Fuzzed(Method):
    "What trains, in which blocks."

    def __init__(self, parameters, blocks):
        self.parameters, self.own = parameters, blocks

    def __repr__(self):
        return "Fuzzed()"

    def start(self, context):
        context.train_only(self.parameters)

    def blocks(self, context):
        return self.own


def fuzzed_engine(model, batch, blocks, loss=wave, **settings):
    parameters = list(dict.fromkeys(p for block in blocks for p in block.parameters))
    settings = {"noise_multiplier": 1.3, "steps": 1, "accountant": "rdp", "clip": 1.0, "delta": 1e-3, "public_size": 8, "cache": 0.0,
                "batch_size": 8, **settings}
    return dpft.Engine(model, loss, Fuzzed(parameters, blocks), list(zip(*batch, strict=True)), collate_fn=together, **settings)


def together(rows):
    return tuple(torch.stack(part) for part in zip(*rows, strict=True))


def collected(engine):
    "A step with its sums, before they are private."
    step = next(iter(engine))
    for batch in step:
        step.add(batch)
    return step


@HALF
@given(cases(), st.integers(1, 3), st.booleans())
def test_a_data_set_with_one_unit_less_has_a_sum_within_the_bound(case, physical, secure):
    "Draws of everything, cut into physical batches: the engine's own sums, for data sets of one unit more or less."
    units = list(range(len(case.kinds))) if case.units is None else case.units
    rest = [row for row, unit in enumerate(units) if unit != units[case.out]]
    assume(rest)
    sums = []
    for rows in (list(range(len(units))), rest):
        e = fuzzed_engine(case.model, select_rows(case.batch, torch.tensor(rows)), case.blocks, case.loss, clipping=case.style,
                          unit=[units[row] for row in rows] if len({units[row] for row in rows}) < len(rows) else None,
                          physical_batch_size=physical, secure_mode=secure)
        sums.append(collected(e).sums)
    moved = {name: sums[0][name] - sums[1][name] for name in sums[0]}
    for ratio in block_lengths(moved, case):
        assert ratio <= 1 + rounding(case)


PER_EXAMPLE = 1e-6 / 10_000  # a family of up to 10,000 examples accuses honest noise once in a million times


def unsurprising(noise, error):
    "Whether the sum of squares is one that standard normal numbers have, at this two-sided level."
    return error / 2 < stats.chi2.sf(noise.square().sum().item(), len(noise)) < 1 - error / 2


def noise_of_runs(pool, made, sigma, secure, seed, data):
    "The gradients are zero, so what is released is the noise: two steps of one run, and one of another."
    model, batch = made
    model.register_parameter("spare", nn.Parameter(torch.zeros(40, 40)))  # enough numbers to see a tenth less noise
    trains = [*freeze(data.draw, model), *[model.spare] * (not model.spare.requires_grad)]
    blocks = blocks_of(data.draw, trains, 1.0)
    scale = data.draw(st.sampled_from([0.01, 1.0, 30.0]))
    drawn = []
    for run in range(2):
        own = None if run else seed
        e = fuzzed_engine(model, batch, blocks, lambda model, batch: 0 * wave(model, batch), noise_multiplier=sigma, steps=2 - run,
                          clip=scale, seed=own, secure_mode=secure, check=False)   # no gradient is any's, rightly
        total = sum((b.clip / b.noise) ** 2 for b in e.blocks) ** -0.5
        assert sigma * (1 - 1e-9) <= total <= sigma * (1 + 1e-4)
        stated = scale * sigma * math.sqrt(sum(block.clip**2 for block in blocks))   # of every entry, by the lemma on blocks
        before = {name: parameter.detach().clone() for name, parameter in e.trains.items()}
        optimizer = torch.optim.AdamW(e.parameters(), 0.1, weight_decay=0.3)
        for step in e:
            step.take(optimizer)
            for name, parameter in e.trains.items():
                where = torch.stack([torch.ones(p.shape, dtype=torch.bool) if mask is None else mask
                                     for block in blocks for p, mask in members(block) if p is parameter]).any(0)
                noise = parameter.grad.double() * e.plan.batch_size / stated
                assert not noise[~where].any()
                assert torch.equal(parameter[~where], before[name][~where])
                drawn.append(noise[where])
                pool.extend([] if own is not None else [noise[where]])   # a seed may come again, and with it the noise
    together = torch.cat(drawn)
    assert unsurprising(together, PER_EXAMPLE)
    values = together.numpy()
    assert len(np.unique(values)) >= len(values) - 4                 # float32 may meet by chance, two equal tensors meet everywhere
    for a, b in itertools.combinations([part for part in drawn if len(part) >= 8], 2):
        assert abs(correlation(a, b)) < 1


def test_noise_is_as_stated_fresh_and_only_where_something_trains():
    pool = []
    HALF(given(st.just(pool), models(), st.floats(0.3, 5.0), st.booleans(), st.none() | st.integers(0, 2**30), st.data())(noise_of_runs))()
    whole = torch.cat(pool)
    assert unsurprising(whole, 1e-6), f"standard deviation {whole.std():.4f} of {len(whole):,} numbers, 1 was stated"


def correlation(a, b):
    "Of two noises, in units of what only one pair of independent ones in ten thousand million exceeds."
    size = min(len(a), len(b))
    a, b = a[:size], b[:size]
    found = float(a @ b / a.norm() / b.norm())
    return found / (2 * stats.beta.isf(PER_EXAMPLE / 2000, (size - 1) / 2, (size - 1) / 2) - 1)


CONTEXTS = st.lists(st.tuples(st.text(max_size=4), st.integers(0, 9)), min_size=2, max_size=6, unique=True)


@QUARTER
@given(CONTEXTS, st.integers(1, 4000), st.booleans())
def test_streams_of_different_contexts_and_secrets_share_nothing(contexts, size, secure):
    first, second = Keystream(), Keystream()

    def draw(stream, context):
        return stream.secure_normal((size,), *context) if secure else stream.normal((size,), 1.0, *context, dtype=torch.float64)

    found = [draw(stream, context) for stream in (first, second) for context in contexts]
    whole = torch.cat(found)
    assert len(whole.unique()) == len(whole)
    assert unsurprising(whole, PER_EXAMPLE)
    if size >= 8:
        assert all(abs(correlation(a, b)) < 1 for a, b in itertools.combinations(found, 2))
