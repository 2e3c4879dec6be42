"""A model cut over several processes: real ones, against one that holds it all."""

import copy
import errno
import gc
import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import fresh
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from streams import one_stream
from test_processes import Ranks, worker
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dpft
from dpft.gradients import clipped_sum, per_example_gradients
from dpft.method import Block, Method
from dpft.noise import Keystream
from dpft.processes import local
from dpft.sharded_runs import ShardStream, told_to_all
from dpft.sharded_state import finish_save, plain_copy
from dpft.sharding import parameter_bytes
from dpft.step import perturbed, perturbed_on_grid


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


def plain_name(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def whole(values):
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).detach().clone()


@contextmanager
def one_noise():
    "Sums whose last bits differ get the same noise in here; elsewhere their digest is part of its key."
    with one_stream(), patch("dpft.account.noise_key", lambda digest, first, portable: ""):
        yield


@one_noise()
def trained(how=None, steps=2, optimizer=torch.optim.AdamW, **settings):
    "Gradients of the first step, weights after the last, examples of the last, and what the run knows."
    e = engine(how, steps=steps, **settings)
    moves, first = optimizer(e.model.parameters(), 0.05), None
    for step in e:
        for batch in step:
            step.add(batch)
        step.privatize()
        first = first or {plain_name(name): whole(p.grad) for name, p in e.model.named_parameters() if p.grad is not None}
        moves.step()
        step.done()
    return first, {plain_name(name): whole(p) for name, p in e.model.named_parameters()}, step.examples, e.guarantee.epsilon()


def apart(one, other):
    "The largest difference, relative to the largest entry."
    scale = max(v.abs().max().item() for v in one.values())
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one) / scale


def all_ranks(size, meeting, pipes):
    "One process loads what models in shards need, and all ranks are forked from it."
    os.setsid()
    for rank in range(size):
        if os.fork() == 0:
            worker(rank, size, meeting, pipes[rank])
            os._exit(0)
    signal.pause()


class Patient(Ranks):
    "Processes that are waited for as long as a loaded machine needs."

    def __init__(self, size, meeting):
        pipes = [fresh.CONTEXT.Pipe() for _ in range(size)]
        self.pipes, theirs = zip(*pipes, strict=True)
        self.first = fresh.CONTEXT.Process(target=all_ranks, args=(size, meeting, theirs), daemon=True)
        self.first.start()
        for pipe in theirs:
            pipe.close()

    def ask(self, task, **arguments):
        for pipe in self.pipes:
            pipe.send((task, arguments))
        return [pipe.recv() if pipe.poll(900) else ("no answer", "hangs") for pipe in self.pipes]

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        os.killpg(self.first.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Patient(2, tmp_path_factory.mktemp("two") / "meeting")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = Patient(4, tmp_path_factory.mktemp("four") / "meeting")
    yield ranks
    ranks.close()


WAYS = [dict(), dict(epsilon=math.inf), dict(secure_mode=True, steps=1)]


@pytest.fixture(scope="module")
def alone():
    return [trained(**settings) for settings in WAYS]


def check_same(one, other):
    "First gradient, noise and all, and last weights: 1e-6 of the largest, which is some 8 units in the last place."
    assert apart(one[0], other[0]) < 1e-6
    assert apart(one[1], other[1]) < 1e-6
    assert one[2:] == other[2:]


@pytest.mark.parametrize("way", [0, 1, 2])
@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_two_processes_give_what_one_gives(two, alone, how, way):
    for theirs in two(trained, how=how, **WAYS[way]):
        check_same(alone[way], theirs)


@pytest.mark.parametrize("state, found", [
    (SimpleNamespace(_fsdp_param_groups=["a", "b"]), ["a", "b"]), (SimpleNamespace(_fsdp_param_group="a"), ["a"]),
    (SimpleNamespace(_fsdp_param_group=None), [])], ids=["torch 2.13", "torch 2.11", "none"])
def test_the_groups_of_a_module_are_found_in_older_torch_too(state, found):
    from dpft.sharding import groups_of
    assert groups_of(state) == found


@pytest.mark.parametrize("how", ["both", "teams", "copies", "fsdp"])
def test_four_processes_give_what_one_gives(four, alone, how):
    for theirs in four(trained, how=how):
        check_same(alone[0], theirs)


def sums_with_padding(how=None, pad=1):
    "Of all rows on each process, so those of a team."
    model, data = net(), texts().tensors
    model.words.padding_idx = pad
    found = clipped_sum(CUTS[how](model) if how else model, loss, (data[0][:12], data[1][:12]), 0.5)
    return {name: whole(total) for name, total in found.items()}


@pytest.mark.parametrize("pad", [1, 7])
def test_the_padding_of_a_cut_table_is_a_row_of_the_whole_one(two, pad):
    "The second process holds the rows from 6, so its second one is token 7, and token 1 is not its."
    one = sums_with_padding(pad=pad)
    assert not one["words.weight"][pad].any() and one["words.weight"][8 - pad].any()
    for theirs in two(sums_with_padding, how="tensor", pad=pad):
        assert apart(one, theirs) < 1e-6 and not theirs["words.weight"][pad].any()


# methods, checkpointed activations, idle processes ---------------------------------------------------------------------------------


def by_kept(model):
    "Activations of each layer computed again in the backward pass, by the wrapper that goes with fully_shard."
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    return model


CUTS |= {"kept": by_kept, "kept and fsdp": lambda model: by_fsdp(by_kept(model)),
         "kept and tensor": lambda model: by_kept(by_tensor(model))}
METHODS = [dict(method=dpft.BiTFiT()),
           dict(method=dpft.LayerFreeze(layers=1, after=1, order=["words", "layers.0", "layers.1", "head"])),
           dict(physical_batch_size=1, batch_size=4)]


@pytest.mark.parametrize("settings", METHODS, ids=["biases", "frozen late", "one row at a time"])
def test_methods_and_small_batches(two, settings):
    for how, same in (("fsdp", None), ("kept and fsdp", "kept"), ("kept and tensor", "kept")):     # the names of wrapped layers are others
        one = trained(same, **settings)
        for theirs in two(trained, how=how, **settings):
            check_same(one, theirs)


@pytest.mark.parametrize("trains", ["everything", "below", "above", "within"])
@pytest.mark.parametrize("wrapper", [False, True])
def test_checkpointed_activations_beside_the_oracle(trains, wrapper):
    chosen = {"everything": "", "below": "words", "above": "head", "within": "layers.0.up"}[trains]
    plain, model = net().double(), net().double()
    if wrapper:
        by_kept(model)
    else:
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for one in (plain, model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name.replace("_checkpoint_wrapped_module.", "").startswith(chosen))
    batch = texts().tensors[0][:6], texts().tensors[1][:6]
    rows = per_example_gradients(plain, loss, batch)
    norms = torch.cat([row.flatten(1) for row in rows.values()], 1).norm(dim=1)
    factors = (0.3 / norms).clamp(max=1)
    found = clipped_sum(model, loss, batch, 0.3)
    for one, (name, row) in zip(found.values(), rows.items(), strict=True):
        assert torch.allclose(one, torch.tensordot(factors, row, dims=1), rtol=0, atol=1e-9), name


# one ledger, one draw, one noise -----------------------------------------------------------------------------------------------------


@one_stream()
def run_and_look(how, folder=None):
    "The rows of each step that are here, and what was charged."
    e = engine(how, steps=2, ledger=folder)
    moves, seen = torch.optim.SGD(e.model.parameters(), 0.1), []
    for step in e:
        for batch in step:
            counts = e.draws.counts(batch)
            seen += [(step.t, tuple(row.tolist())) for row in batch[0]] if counts else []
            step.add(batch)
        step.privatize()
        moves.step()
        step.done()
    return seen, e.spent


def test_one_draw_and_one_ledger(two, tmp_path):
    whole_draw, spent = run_and_look(None, tmp_path / "one")
    fsdp = two(run_and_look, how="fsdp", folder=tmp_path / "fsdp")
    assert sorted(fsdp[0][0] + fsdp[1][0]) == sorted(whole_draw)       # each drawn row in one slice
    tensor = two(run_and_look, how="tensor", folder=tmp_path / "tensor")
    assert tensor[0][0] == tensor[1][0] and sorted(tensor[0][0]) == sorted(whole_draw)
    for theirs in (fsdp, tensor):
        assert all(each[1] == spent for each in theirs)
    for name in ("one", "fsdp", "tensor"):
        rows = dpft.Ledger(tmp_path / name).chain.file.query("SELECT kind, count(*) FROM ledger GROUP BY kind ORDER BY kind")
        assert rows == dpft.Ledger(tmp_path / "one").chain.file.query("SELECT kind, count(*) FROM ledger GROUP BY kind ORDER BY kind")


def noise_of(how):
    "All noise of one step under the run's own key, as each process finds it, in standard deviations."
    e = engine(how, steps=1)
    step = next(iter(e))
    for batch in step:
        step.add(batch)
    sums = {name: whole(total) for name, total in step.sums.items()}
    step.privatize()
    return {name: (whole(p.grad) * 16 - sums[name]) / (1.1 * 0.5) for name, p in e.model.named_parameters()}


@pytest.mark.parametrize("how", ["fsdp", "tensor", "both"])
def test_no_two_shards_get_the_same_noise(two, four, how):
    "The shares of 24 numbers or more differ somewhere by 0.1, but for 0.06^24; the variance of 579 is within 0.6 and 1.5, but for 1e-12."
    every = (four if how == "both" else two)(noise_of, how=how)
    for one in every[1:]:
        assert all(torch.equal(one[name], every[0][name]) for name in one)          # one noise, bit for bit
    noise = torch.cat([value.flatten() for value in every[0].values()])
    assert 0.6 < noise.square().mean() < 1.5
    names = [f"layers.{i}.{way}.weight" for i in (0, 1) for way in ("up", "down")]
    for dim in (0, 1):
        for pieces in (2, 4):
            parts = [part for name in names for part in every[0][name].chunk(pieces, dim)]
            for i, part in enumerate(parts):
                others = [other for other in parts[:i] if other.numel() == part.numel()]
                assert all((part.flatten() - other.flatten()).abs().max() > 0.1 for other in others)


@pytest.mark.parametrize("shape, box", [((7,), [(2, 5)]), ((300, 700), [(120, 240), (0, 700)]), ((300, 700), [(0, 300), (13, 500)]),
                                        ((3, 5, 7), [(1, 3), (0, 5), (2, 4)]), ((), []), ((5, 3), [(5, 5), (0, 3)])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_of_a_part_is_a_part_of_the_noise(shape, box, dtype):
    stream = Keystream(3)
    part = ShardStream(stream, shape, box)
    sizes = [high - low for low, high in box]
    cut = tuple(slice(*span) for span in box)
    assert torch.equal(part.normal(sizes, 2.0, "noise", 1, dtype=dtype), stream.normal(shape, 2.0, "noise", 1, dtype=dtype)[cut])
    assert torch.equal(part.secure_normal(sizes, "noise", 2), stream.secure_normal(shape, "noise", 2)[cut])
    total = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for add in (perturbed, perturbed_on_grid):                              # as a step does, in the sum's own memory
        wanted = add(total.clone(), 0.3, stream, "train", 0)[cut]
        assert torch.equal(add(total[cut].clone(), 0.3, part, "train", 0), wanted)


def test_a_sum_that_is_not_the_part_gets_no_noise():
    part = ShardStream(Keystream(3), (6, 4), [(0, 3), (0, 4)])
    with pytest.raises(RuntimeError, match="is not the entries"):
        perturbed(torch.zeros(4, 4), 1.0, part, "train", 0)
    assert not hasattr(part, "key") and not hasattr(part, "secret")         # so nothing else can draw from it


# what is refused ---------------------------------------------------------------------------------------------------------------------


class Half(Method):
    "Every second entry of the head."

    def start(self, context):
        context.train_only([context.model.head.bias])

    def blocks(self, context):
        return [Block([context.model.head.bias], [torch.tensor([True, False, True])])]


class Odd(nn.Module):
    "Scales by a number that depends on the weights in a way that no tap sees."

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x @ self.inner.weight.tanh()


def two_views(model, batch):
    "R-Drop: each text twice in one pass, in training mode alone."
    if not model.training:
        return loss(model, batch)
    found = model(torch.cat([batch[0], batch[0]])).chunk(2)
    return sum(F.cross_entropy(each, batch[1], reduction="none") for each in found)


def refused(what):
    if what == "views":
        e = dpft.Engine(net("fsdp"), two_views, dpft.Full(), texts(), noise_multiplier=1.0, batch_size=16, steps=1, clip=1.0,
                        accountant="rdp")
        return [next(iter(e)).take()]
    if what == "odd":
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(nn.Sequential(Odd(), nn.Linear(4, 2)))
        data = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)
        e = dpft.Engine(model, loss, dpft.Full(), data, noise_multiplier=1.0, batch_size=12, steps=1, clip=1.0, accountant="rdp")
        return e.guarantee, [next(iter(e)).take()]
    if what == "pipeline":
        from torch.distributed.pipelining import PipelineStage
        return dpft.Engine(PipelineStage(nn.Linear(2, 2), dist.get_rank(), 2, torch.device("cpu")), loss, dpft.Full(), texts(),
                           noise_multiplier=1.0, steps=1, batch_size=8)
    methods = {"draws": dpft.DPFrost(ratio=0.5), "entries": Half()}
    return engine("fsdp", method=methods[what], epsilon=4.0)


class Long(Text):
    "Cuts texts of more than five tokens into windows, window by window."

    def forward(self, tokens):
        x = self.words(torch.cat(tokens.split(5, 1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1)).view(-1, len(tokens), 3).mean(0)


def another_form():
    model, (tokens, labels) = by_fsdp(Long()), texts()[:6]
    clipped_sum(model, loss, (tokens, labels), 1.0)
    clipped_sum(model, loss, (tokens.repeat(1, 6), labels), 1.0)


def test_rows_that_come_in_another_form_are_refused(two):
    "One example's rows were counted as those of six, each bounded by itself."
    for answer in two.errors(another_form):
        assert answer.startswith("NotByExample") and "gets rows in another form than those that were compared" in answer


class Kept:
    "Adds up the losses that it has seen."
    total = 0.0

    def __call__(self, model, batch):
        losses = loss(model, batch) / (1 + self.total)
        self.total += 1e-9 * float(losses.detach().sum())
        return losses


def left_in_the_loss():
    kept = Kept()
    e = dpft.Engine(net("fsdp"), kept, dpft.Full(), texts(), noise_multiplier=1.0, batch_size=16, steps=1, clip=1.0, accountant="rdp")
    next(iter(e)).take()
    return kept.total


def test_what_a_loss_holds_is_put_back_after_a_look(two):
    assert two(left_in_the_loss) == [0.0, 0.0]


@pytest.mark.parametrize("what, word", [("views", "no fast rule"), ("odd", "no fast rule"),
                                        ("pipeline", "stage of a pipeline"), ("draws", "not supported"),
                                        ("entries", "not supported")])
def test_what_is_not_supported_is_refused_by_a_sentence(two, what, word):
    for answer in two.errors(refused, what=what):
        assert answer.startswith("ValueError") and word in answer


# checkpoints, saving, memory ---------------------------------------------------------------------------------------------------------


@one_noise()
def stopped_and_continued(folder, how, stop=None, damage=False):
    "A run with a checkpoint after each step, stopped after some; the weights and what was spent."
    e = engine(how, steps=3, checkpoint=folder)
    moves = torch.optim.AdamW(e.model.parameters(), 0.05)
    e.resume(moves)
    begun = e.t
    for step in e:
        step.take(moves)
        e.save(moves)
        if e.t == stop:
            e.store.close()
            break
    return begun, {name: whole(p) for name, p in e.model.named_parameters()}, e.spent[0].steps


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_a_sharded_run_continues_from_its_checkpoint(two, tmp_path, how):
    straight = two(stopped_and_continued, folder=tmp_path / "a", how=how)
    first = two(stopped_and_continued, folder=tmp_path / "b", how=how, stop=2)
    assert len([*(tmp_path / "b").glob("shards-*")]) == 1 and all(
        file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "b").glob("shards-*/*"))
    second = two(stopped_and_continued, folder=tmp_path / "b", how=how)
    assert {one[0] for one in first} == {0} and {one[0] for one in second} == {2}
    for one, other in zip(straight, second, strict=True):
        assert one[2] == other[2] == 3 and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    assert not [*(tmp_path / "b").glob("shards-*")]                       # secrets: they go with the run


def test_damaged_shards_are_refused(two, tmp_path):
    two(stopped_and_continued, folder=tmp_path, how="fsdp", stop=1)
    file = max(tmp_path.glob("shards-*/*"), key=lambda one: one.stat().st_size)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    for answer in two.errors(stopped_and_continued, folder=tmp_path, how="fsdp"):
        assert answer.startswith("CheckpointError") and "is damaged" in answer


@one_noise()
def tuned(how, folder):
    run = dpft.fine_tune(net(how), texts(), dpft.Full(), noise_multiplier=1.0, steps=2, batch_size=16, loss_fn=loss, progress=False, seed=0,
                         clip=0.5, accountant="rdp", output=folder, average=0.5, evaluate=score)
    return {name: whole(p) for name, p in run.model.named_parameters()}, run.scores


def score(model):
    with torch.no_grad():
        return {"loss": loss(model, texts(seed=1).tensors).mean().item()}


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_fine_tune_saves_a_whole_model(two, tmp_path, how):
    weights, scores = tuned(None, tmp_path / "one")
    for theirs, found in two(tuned, how=how, folder=tmp_path / how):
        assert apart(weights, theirs) < 1e-6 and found["loss"] == pytest.approx(scores["loss"], rel=1e-5)
    saved = dpft.load(tmp_path / how, model=net(seed=3))
    assert apart(weights, dict(saved.named_parameters())) < 1e-6


def bytes_of(how):
    "Parameters kept between passes, and the most that are there at once during one step, in bytes."
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)], nn.Linear(64, 3))
    if how:
        from torch.distributed.fsdp import fully_shard
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    data = TensorDataset(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)
    e = dpft.Engine(model, loss, dpft.Full(), data, noise_multiplier=1.0, batch_size=16, steps=1, clip=1.0, accountant="rdp")
    kept = sum(local(p).nbytes for p in model.parameters())
    most = 0
    def look(module, *_):
        nonlocal most
        most = max(most, parameter_bytes(model))
    def look_back(module, inputs, output):
        look(module)
        if output.requires_grad:
            output.register_hook(lambda gradient: look(module))
    for module in model.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look_back)
    next(iter(e)).take()
    return kept, max(most, kept)


def test_each_of_two_processes_keeps_half_of_the_parameters(two):
    (whole_bytes, _), parts = bytes_of(None), two(bytes_of, how="fsdp")
    for kept, most in parts:
        print(f"a process keeps {kept / whole_bytes:.3f} of the parameters' bytes, and has at most {most / whole_bytes:.3f} at once")
        assert kept <= 0.6 * whole_bytes and most <= 0.75 * whole_bytes


# what only shows in one row, in no row, in a scalar, in a second launch, when the disk is full ---------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    ranks = Patient(1, tmp_path_factory.mktemp("one") / "meeting")
    yield ranks
    ranks.close()


def coupled(model, batch):
    "Each example's loss depends on the mean of its batch, of which one row shows nothing."
    return F.cross_entropy(model(batch[0] - batch[0].mean(0)), batch[1], reduction="none")


def small(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard
        return fully_shard(model)
    if how == "tensor":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        return parallelize_module(model, mesh_of(dist.get_world_size()), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def one_after_the_other(how, loss_fn, parts):
    "The clipped sums of several batches of the same rows."
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    model = small(how)
    return [{name: whole(total) for name, total in clipped_sum(model, loss_fn, tuple(x[rows] for x in data), 1.0).items()}
            for rows in parts]


@pytest.mark.parametrize("ranks, how", [("one", None), ("one", "fsdp"), ("two", "tensor")])
@pytest.mark.parametrize("before", [[[0]], [[0], [1], [2]]], ids=["one row", "one row at a time"])
def test_a_coupled_loss_is_refused_after_batches_of_one_row(request, ranks, how, before):
    for answer in request.getfixturevalue(ranks).errors(one_after_the_other, how=how, loss_fn=coupled, parts=[*before, [*range(6)]]):
        assert answer.startswith("ValueError") and "the examples beside it" in answer


@pytest.mark.parametrize("ranks, how", [("one", "fsdp"), ("two", "tensor")])
def test_batches_of_one_row_have_the_sums_of_a_whole_model(request, ranks, how):
    "A whole model takes one row by itself, where the margin for rounding is narrower by some 1e-6 of the sum."
    parts = [[0], [1], [*range(6)], [2]]
    wanted = one_after_the_other(None, loss, parts)
    for theirs in request.getfixturevalue(ranks)(one_after_the_other, how=how, loss_fn=loss, parts=parts):
        assert all(apart(sums, other) < 3e-6 for sums, other in zip(wanted, theirs, strict=True))


def test_copies_of_one_row_settle_nothing_and_are_refused(two):
    for answer in two.errors(one_after_the_other, how="tensor", loss_fn=coupled, parts=[[0, 0, 0]]):
        assert answer.startswith("ValueError") and "one example alone" in answer


@one_noise()
def few_drawn(how=None, secure_mode=False):
    "Of twelve rows one is expected in a step, so that several draws are empty."
    data = TensorDataset(*(x[:12] for x in texts().tensors))
    e = dpft.Engine(net(how), loss, dpft.Full(), data, noise_multiplier=1.1, batch_size=1, steps=8, clip=0.5, seed=0, accountant="rdp",
                    secure_mode=secure_mode)
    moves, drawn = torch.optim.SGD(e.model.parameters(), 0.1), []
    for step in e:
        step.take(moves)
        drawn.append(step.examples)
    return drawn, {name: whole(p) for name, p in e.model.named_parameters()}


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
@pytest.mark.parametrize("secure_mode", [False, True])
def test_an_empty_draw_gets_its_noise(two, how, secure_mode):
    drawn, weights = few_drawn(secure_mode=secure_mode)
    assert 0 in drawn and max(drawn) > 0
    for theirs, found in two(few_drawn, how=how, secure_mode=secure_mode):
        assert theirs == drawn and apart(weights, found) < 1e-6


class Scaled(Text):
    "With one number of its own, of shape ()."

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return self.scale * super().forward(tokens)


def sums_with_scalar(how=None):
    torch.manual_seed(0)
    model = Scaled()
    found = clipped_sum(CUTS[how](model) if how else model, loss, texts()[:6], 0.5)
    return {name: whole(total) for name, total in found.items()}


def test_a_parameter_without_dimensions(two):
    wanted = sums_with_scalar()
    for theirs in two(sums_with_scalar, how="tensor"):
        assert wanted["scale"].shape == theirs["scale"].shape == () and apart(wanted, theirs) < 1e-6


def let_go(how):
    "Whether anything still holds a model that was used and is forgotten."
    model = net(how)
    clipped_sum(model, loss, texts()[:6], 0.5)
    seen, weights = weakref.ref(model), weakref.ref(model.head.weight)
    del model
    gc.collect()
    return seen() is None, weights() is None


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_a_model_that_nobody_uses_is_let_go(two, how):
    assert two(let_go, how=how) == [(True, True)] * 2


class Counts(nn.Module):
    "A layer with buffers, one of them shared and one that is not saved."

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.arange(4.0))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("seen", self.seen)

    def forward(self, x):
        return self.inner(x) * self.mask + self.seen


def copy_of(how):
    "Whether the whole copy of a cut model is a model like any other, and what it shares."
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    torch.manual_seed(0)
    model = nn.Sequential(checkpoint_wrapper(Counts()), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(5, 4)
    wanted, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    def cut(one):
        if how == "tensor":
            return parallelize_module(one, mesh_of(1), {"2": ColwiseParallel()})
        fully_shard(one[0])
        return fully_shard(one)
    cut(model)
    model(x).sum().backward()
    twin = plain_copy(model)
    assert torch.equal(twin(x), wanted)
    content = io.BytesIO()
    torch.save(twin, content)
    content.seek(0)
    for other in (copy.deepcopy(twin), torch.load(content, weights_only=False)):
        assert torch.equal(other(x), wanted)
    assert twin.state_dict().keys() == state.keys() and all(torch.equal(value, state[name]) for name, value in twin.state_dict().items())
    twin.load_state_dict(state)                            # the wrapper's hooks put its own name before the others
    inner = twin[0]._checkpoint_wrapped_module
    assert inner.seen is inner.again.seen
    inner.seen += 1
    assert not inner.seen.equal(model[0]._checkpoint_wrapped_module.seen)
    names = {name for module in twin.modules() for name in vars(module) if "composable" in name or "fsdp" in name}
    cut(twin)
    return names, torch.equal(twin(x), wanted + 0 * wanted)


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_a_whole_copy_has_nothing_of_the_cut_model(one, how):
    names, same = one(copy_of, how=how)[0]
    assert names == set() and not same                     # for its buffer was moved


FRESH = """
    import json, sys
    import torch, torch.distributed as dist
    from torch.utils.data import TensorDataset
    from torch.distributed.fsdp import fully_shard
    import dpft
    rank, folder, steps, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[5]}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    data = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3)
    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    e = dpft.Engine(model, loss, dpft.Full(), data, noise_multiplier=1.1, batch_size=8, steps=3, clip=0.5, accountant="rdp", seed=seed,
                    checkpoint=folder)
    moves = torch.optim.SGD(model.parameters(), 0.1)
    e.resume(moves)
    begun = e.t
    for step in e:
        step.take(moves)
        e.save(moves)
        if e.t == steps:
            break
    if rank == 0:
        print(json.dumps([begun, e.t, e.store.secret.hex(), e.store.facts.identity]))
"""


def launch(folder, steps, seed=None):
    "A run in two new interpreters, which share no name that torch drew when it was loaded."
    folder.mkdir(exist_ok=True)
    meeting = folder.parent / f"meeting{os.urandom(4).hex()}"
    words = [str(folder), str(steps), json.dumps(seed), str(meeting)]
    made = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(FRESH), str(rank), *words], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for rank in range(2)]
    said = [process.communicate(timeout=600) for process in made]
    assert all(process.returncode == 0 for process in made), said
    return json.loads(said[0][0].splitlines()[-1])


def test_a_second_launch_is_the_same_run(tmp_path):
    first = launch(tmp_path / "a", steps=2, seed=5)
    assert launch(tmp_path / "b", steps=1, seed=5)[2:] == first[2:]     # one secret, so one run
    again = launch(tmp_path / "a", steps=3, seed=5)
    assert first[:2] == [0, 2] and again[:2] == [2, 3] and again[2:] == first[2:]


def no_room(folder, how, on, where):
    "A run whose second checkpoint finds no room on one process."
    from torch.distributed.checkpoint import FileSystemWriter
    e = engine(how, steps=3, checkpoint=folder)
    moves = torch.optim.AdamW(e.model.parameters(), 0.05)
    e.resume(moves)
    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for step in e:
        step.take(moves)
        if e.t < 2:
            e.save(moves)
            continue
        full = {"shards": patch.object(FileSystemWriter, "write_data", full_disk), "state": patch("dpft.store.Path.replace", full_disk),
                "after the state": patch("dpft.store.sync_folder", full_disk)}
        try:
            with full[where] if dist.get_rank() == on else nullcontext():
                e.save(moves)
        finally:
            e.store.close()


@pytest.mark.parametrize("on, where", [(0, "shards"), (1, "shards"), (0, "state"), (0, "after the state")])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(two, tmp_path, on, where):
    for answer in two.errors(no_room, folder=tmp_path, how="fsdp", on=on, where=where):
        assert answer.startswith("CheckpointError") and "No space left on device" in answer and "make room and start" in answer
        assert str(tmp_path) in answer
    named = where == "after the state"        # which has its shards then, and nobody knows whether it stays when the power is cut
    assert len([*tmp_path.glob("shards-*")]) == 1 + named
    begun = {answer[0] for answer in two(stopped_and_continued, folder=tmp_path, how="fsdp")}
    assert begun == {1 + named}


def unread(folder, on):
    from torch.distributed.checkpoint import FileSystemReader
    def bad_sector(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with patch.object(FileSystemReader, "read_data", bad_sector) if dist.get_rank() == on else nullcontext():
        stopped_and_continued(folder, "fsdp")


@pytest.mark.parametrize("on", [0, 1])
def test_shards_that_one_process_cannot_read_are_one_sentence(two, tmp_path, on):
    two(stopped_and_continued, folder=tmp_path, how="fsdp", stop=1)
    for answer in two.errors(unread, folder=tmp_path, on=on):
        assert answer.startswith("CheckpointError") and "could not be read (Input/output error)" in answer and "state.pt" in answer


def by_columns(model):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    return fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))


def by_rows(model):
    from torch.distributed.fsdp import fully_shard
    return fully_shard(model)


CUTS |= {"columns": by_columns, "rows": by_rows}


def test_a_checkpoint_of_a_model_that_was_cut_in_another_way_is_refused(two, tmp_path):
    two(stopped_and_continued, folder=tmp_path, how="rows", stop=1)
    for answer in two.errors(stopped_and_continued, folder=tmp_path, how="columns"):
        assert answer.startswith("CheckpointError") and "was cut in another way" in answer


def told(device):
    "Where a tensor lies in what is sent, and in what arrives."
    sent = []
    def gathered(value, size):
        sent.append(value)
        return [value] * size
    with patch("dpft.sharded_runs.gathered", gathered):
        (arrived, size), none = told_to_all(((torch.ones(2), 3), None), torch.device(device))[0]
    return str(sent[0][0][0].device), str(arrived.device), size, none


def test_rows_travel_on_the_cpu_and_arrive_on_the_device(one):
    assert one(told, device="meta") == [("cpu", "meta", 3, None)]


def test_the_names_of_shards_are_on_disk_before_the_state_names_them(tmp_path):
    place, old, told = tmp_path / f"shards-{16 * 'a'}", tmp_path / f"shards-{16 * 'b'}", []
    for folder in (place, old):
        folder.mkdir()
        (folder / "a").write_bytes(b"shard")
    def save(state):
        assert state["files"].keys() == {"a"} and old.exists()
        told.append("state")
    store = SimpleNamespace(folder=tmp_path, save=save)
    with patch("dpft.sharded_state.sync_folder", told.append):
        finish_save(store, {"shards": place.name})
    assert told == [place, "state"] and place.exists() and not old.exists()
