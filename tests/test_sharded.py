"""A model cut over several processes: real ones, against one that holds it all."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from streams import one_stream
from test_processes import Ranks
from torch import nn

import dpft
from torch.utils.data import TensorDataset


class Layer(nn.Module):
    def __init__(self, width=8, hidden=12):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Text(nn.Module):
    "Token numbers, a class token, two layers, a head."

    def __init__(self, words=11, width=8, classes=3):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.start = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.words(tokens)
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def texts(size=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(0, 11, (size, 5), generator=generator), torch.randint(0, 3, (size,), generator=generator))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def net(how=None, seed=0):
    "The same model, whole, or cut in one of several ways."
    torch.manual_seed(seed)
    model = Text()
    return model if how is None else CUTS[how](model)


def by_fsdp(model):
    from torch.distributed.fsdp import fully_shard
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


CUTS = {"fsdp": by_fsdp}


def engine(how=None, method=None, model=None, **settings):
    settings = {"batch_size": 16, "steps": 3, "clip": 0.5, "seed": 0, "accountant": "rdp", "physical_batch_size": 5, **settings}
    if "epsilon" not in settings:
        settings["noise_multiplier"] = 1.1
    return dpft.Engine(net(how) if model is None else model, loss, method or dpft.Full(), texts(), **settings)


def whole(values):
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).detach().clone()


@one_stream()
def trained(how=None, steps=3, optimizer=torch.optim.AdamW, still=False, **settings):
    "Gradients of the first step, weights after the last, and what the run knows."
    e = engine(how, steps=steps, **settings)
    if still:
        e.keystream.normal = lambda shape, *context, device="cpu", dtype=torch.float32: torch.zeros(shape, dtype=dtype)
    moves, first = optimizer(e.model.parameters(), 0.05), None
    for step in e:
        for batch in step:
            step.add(batch)
        step.privatize()
        first = first or {name: whole(p.grad) for name, p in e.model.named_parameters() if p.grad is not None}
        moves.step()
        step.done()
    after = {name: whole(p) for name, p in e.model.named_parameters()}
    examples = step.examples
    rows = len(e.ledger.query("SELECT 1 FROM ledger WHERE kind = 'spend'")) if False else None
    return first, after, examples, e.guarantee.epsilon(), rows


def apart(one, other):
    "The largest difference, relative to the largest entry."
    scale = max(v.abs().max().item() for v in one.values())
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one) / scale


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two") / "meeting")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("settings", [dict(), dict(epsilon=math.inf), dict(secure_mode=True)])
def test_fully_sharded_gives_what_one_process_gives(two, settings):
    first, after, examples, epsilon, _ = trained(**settings)
    for theirs in two(trained, how="fsdp", **settings):
        assert apart(first, theirs[0]) < 1e-6
        assert apart(after, theirs[1]) < 1e-5
        assert theirs[2:4] == (examples, epsilon)
