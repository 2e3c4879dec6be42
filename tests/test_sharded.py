"""A model cut over several processes: real ones, against one that holds it all."""

import math
from contextlib import contextmanager
from unittest.mock import patch

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


def by_fsdp(model, mesh=None):
    from torch.distributed.fsdp import fully_shard
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def mesh_of(*sizes):
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "layers")[-len(sizes):])


def by_tensor(model, mesh=None, ends=True):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    plan = {f"layers.{i}.{name}": way() for i in (0, 1) for name, way in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    if ends:
        plan |= {"words": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh or mesh_of(dist.get_world_size()), plan)


def by_both(model):
    mesh = mesh_of(2, dist.get_world_size() // 2)
    return by_fsdp(by_tensor(model, mesh["layers"]), mesh["rows"])


def in_teams(model):
    return by_tensor(model, mesh_of(2, dist.get_world_size() // 2)["layers"])


def in_copies(model):
    return by_fsdp(model, mesh_of(2, dist.get_world_size() // 2))


CUTS = {"fsdp": by_fsdp, "tensor": by_tensor, "both": by_both, "teams": in_teams, "copies": in_copies}


def engine(how=None, method=None, model=None, **settings):
    settings = {"batch_size": 16, "steps": 3, "clip": 0.5, "seed": 0, "accountant": "rdp", "physical_batch_size": 5, **settings}
    if "epsilon" not in settings:
        settings["noise_multiplier"] = 1.1
    return dpft.Engine(net(how) if model is None else model, loss, method or dpft.Full(), texts(), **settings)


def whole(values):
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).detach().clone()


@contextmanager
def one_noise():
    "Sums whose last bits differ get the same noise in here; elsewhere their digest is part of its key."
    with one_stream(), patch("dpft.account.noise_key", lambda digest, first, portable: ""):
        yield


@one_noise()
def trained(how=None, steps=3, optimizer=torch.optim.AdamW, **settings):
    "Gradients of the first step, weights after the last, examples of the last, and what the run knows."
    e = engine(how, steps=steps, **settings)
    moves, first = optimizer(e.model.parameters(), 0.05), None
    for step in e:
        for batch in step:
            step.add(batch)
        step.privatize()
        first = first or {name: whole(p.grad) for name, p in e.model.named_parameters() if p.grad is not None}
        moves.step()
        step.done()
    return first, {name: whole(p) for name, p in e.model.named_parameters()}, step.examples, e.guarantee.epsilon()


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
    first, after, examples, epsilon = trained(**settings)
    for theirs in two(trained, how="fsdp", **settings):
        assert apart(first, theirs[0]) < 1e-6
        assert apart(after, theirs[1]) < 1e-5
        assert theirs[2:4] == (examples, epsilon)
