"""A model that `fully_shard` has divided over real processes, against one process with the whole model."""

import math
import os
import signal
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_processes import Ranks, added, constant_noise
from torch import nn
from torch.utils.data import TensorDataset
from transformers import RobertaConfig, RobertaForSequenceClassification

import dpft


class Layer(nn.Module):
    "Attention, a perceptron, and a scale that is read without a rule."

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(8, 24), nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 9), nn.GELU())
        self.last, self.scale = nn.Linear(9, 8), nn.Parameter(torch.ones(8))

    def forward(self, h):
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return h + self.scale * self.last(self.mlp(h))


class Small(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(20, 8), nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 3)

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


class Unruly(Small):
    "One of its layers has no rule."

    def __init__(self):
        super().__init__()
        self.layers.append(nn.GRU(8, 8, batch_first=True))

    def forward(self, tokens):
        return self.head(self.layers[-1](self.embedding(tokens))[0].mean(1))


def roberta():
    torch.manual_seed(0)
    config = dict(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=9, max_position_embeddings=9)
    return RobertaForSequenceClassification(RobertaConfig(**config, num_labels=3, pad_token_id=1))


def tokens():
    rows = torch.randint(2, 20, (60, 5), generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, rows[:, 0] % 3)


def loss(model, batch):
    found = model(batch[0])
    return F.cross_entropy(getattr(found, "logits", found), batch[1], reduction="none")


def divide(model, **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model.roberta.encoder.layer if hasattr(model, "roberta") else model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(value):
    return (value.full_tensor() if hasattr(value, "placements") else value).detach().numpy()


def engine(model, method=None, **settings):
    settings = {"batch_size": 10, "steps": 3, "clip": 0.5, "seed": 0, "accountant": "rdp", "noise_multiplier": 1.1, **settings}
    return dpft.Engine(model, loss, method or dpft.Full(), tokens(), **settings)


class Masked(dpft.Method):
    "Every second entry of two parameters."

    def start(self, context):
        context.train_only([context.model.head.weight, context.model.embedding.weight])

    def blocks(self, context):
        own = [context.model.head.weight, context.model.embedding.weight]
        return [dpft.Block(own, [torch.arange(p.numel()).reshape(p.shape) % 2 == 0 for p in own])]


METHODS = {"full": dpft.Full, "masked": Masked, "biases": dpft.BiTFiT, "lora": dpft.LoRA, "half": lambda: dpft.RandomPartitions(0.5),
           "freeze": lambda: dpft.LayerFreeze(after=1)}


def first_mean(divided, method="full", make=Small, double=False, people=False, **settings):
    "The first step's mean with constant noise, its examples, and the share of the parameters' bytes that are here."
    model = make().double() if double else make()
    unit = [i // 3 for i in range(60)] if people else None
    e = engine(divide(model) if divided else model, METHODS[method](), unit=unit, dropout=False, **settings)
    step = added(next(iter(e)))
    with patch("dpft.step.add_noise", constant_noise):
        step.privatize()
    here = sum((p.to_local() if divided and hasattr(p, "placements") else p).nbytes for p in model.parameters())
    return ({name: whole(p.grad) for name, p in e.trains.items()}, step.examples,
            here / sum(p.numel() * p.element_size() for p in model.parameters()))


@pytest.mark.parametrize("settings", [
    *(dict(method=name) for name in METHODS), dict(make=roberta), dict(method="biases", make=roberta), dict(double=True, batch_size=60),
    dict(batch_size=1), dict(people=True, physical_batch_size=7)])
def test_each_process_has_a_share_of_the_sum_of_one_and_every_entry_is_noisy_once(two, settings):
    """Also where one process has no rows at all."""
    expected, count, _ = first_mean(False, **settings)
    for found, examples, share in two(first_mean, divided=True, **settings):
        assert found.keys() == expected.keys() and examples == count and share < (0.7 if settings.get("method") == "lora" else 0.6)
        for name, value in expected.items():
            assert np.abs(found[name] - value).max() <= (1e-10 if settings.get("double") else 1e-6), name


def trained(method="full", **settings):
    "What trains after three steps, each shard as it lies here, and the noise of entries without a gradient."
    e = engine(divide(Small()), METHODS[method](), **settings)
    optimizer, noise = torch.optim.AdamW(e.parameters(), 0.01), []
    for step in e:
        added(step).privatize()
        noise.append(10 * whole(e.trains["embedding.weight"].grad)[:2] / 0.55 if method == "full" else 0)  # no row has tokens 0 and 1
        optimizer.step()
        step.done()
    return {name: whole(p) for name, p in e.model.named_parameters()}, np.array(noise), e.guarantee, [m.steps for m in e.spent]


@pytest.mark.parametrize("settings", [dict(), dict(method="lora", seed=None), dict(method="freeze"), dict(secure_mode=True),
                                      dict(method="masked", secure_mode=True)])
def test_replicas_stay_the_same_bits_and_one_run_is_charged(two, tmp_path, settings):
    (first, noise, guarantee, spent), second = two(trained, ledger=tmp_path / "book", **settings)
    assert all(np.array_equal(value, second[0][name]) for name, value in first.items())
    assert guarantee == second[2] and spent == second[3] == [3]
    if settings.get("method") == "masked":
        start = Small().head.weight.detach().numpy().flatten()
        assert ((first["head.weight"].flatten() == start) == (np.arange(24) % 2 == 1)).all()
    if settings == {}:
        assert 0.5 < noise.std() < 1.5 and np.unique(noise).size == noise.size
    with dpft.Ledger(tmp_path / "book") as ledger:
        assert len(ledger.runs()) == 1 and sum(m.steps for m in ledger.spent()) == 3


def test_four_processes_have_the_sum_of_one(tmp_path):
    ranks, expected = Ranks(4, tmp_path / "meeting"), first_mean(False)[0]
    for found, _, share in ranks(first_mean, divided=True):
        assert share < 0.35 and all(np.abs(found[name] - value).max() <= 1e-6 for name, value in expected.items())
    ranks.close()


class Dying(torch.optim.AdamW):
    stop_at = None

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count == self.stop_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def score(model):
    with torch.no_grad():
        return float(model(torch.arange(20).reshape(4, 5)).sum())


def tuned(folder, stop_at=None, **settings):
    Dying.stop_at = stop_at
    run = dpft.fine_tune(divide(Small()), tokens(), dpft.Full(), loss_fn=loss, noise_multiplier=1.1, steps=6, batch_size=10, progress=False,
                         seed=0, clip=0.5, accountant="rdp", learning_rate=0.05, optimizer=Dying, checkpoint=folder, checkpoint_every=2,
                         average=0.9, evaluate=score, **settings)
    return {name: whole(p) for name, p in run.model.named_parameters()}, run.scores


def test_a_run_goes_on_from_its_checkpoint_when_a_process_was_killed_and_is_saved_whole(two, tmp_path):
    (expected, scores), other = two(tuned, folder=tmp_path / "whole", output=tmp_path / "saved")
    saved = dict(dpft.load(tmp_path / "saved", Small()).named_parameters())
    assert scores == other[1] and all(np.array_equal(value, whole(saved[name])) for name, value in expected.items())
    killed = Ranks(2, tmp_path / "meeting")
    assert all(trace for _, trace in killed.ask(tuned, folder=tmp_path / "killed", stop_at=4))
    killed.close()
    for found, again in two(tuned, folder=tmp_path / "killed"):
        assert again == scores and all(np.array_equal(found[name], value) for name, value in expected.items())


def refused(what):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = {"slow": Unruly}.get(what, Small)()
    if what == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"head": ColwiseParallel()})
    else:
        divide(model, **{"mesh": dict(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))),
                         "policy": dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))}.get(what, {}))
    method = dpft.DPFrost(0.5, rounds=1, sample_rate=0.5) if what == "request" else dpft.Full()
    settings = {"check": dict(check=False), "plain": dict(epsilon=math.inf, noise_multiplier=None),
                "request": dict(epsilon=8.0, noise_multiplier=None)}.get(what, {})
    next(iter(engine(model, method, **settings)))


@pytest.mark.parametrize("what, words", [
    ("tensor", "tensor parallelism"), ("mesh", "not all processes in one row"), ("policy", "set precision="), ("slow", "no fast rule"),
    ("request", "releases something of its own"), ("check", "check=False"), ("plain", "epsilon=inf")])
def test_what_needs_the_whole_model_is_refused_in_a_sentence(two, what, words):
    errors = two.errors(refused, what=what)
    assert errors[0] == errors[1] and words in errors[0] and "\n" not in errors[0]
