"""Adapters of Kronecker products: the matrix that they stand for, exact gradients, and what they share."""

import copy

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpft
from dpft import Adapter, BiTFiT, Chain, Compacter, DPFrost, LoRA
from dpft.baselines import Adapted, partitions, place, remove_adapters
from dpft.compacter import KroneckerLinear, mixing_layer
from dpft.gradients import Block, gradients, per_example_gradients
from dpft.method import Context
from dpft.oracle import trainable
from dpft.saving import additions

KINDS = ["bert", "roberta", "gpt2", "vit", "llama"]


def begun(method, name, rows=5):
    "A tiny model in float64 whose shared matrices are not next to nothing, after a method began."
    model, loss_fn, batch = zoo.build(name, rows=rows)
    method.start(Context(model, loss_fn, rows, 1, rows))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "mixing" in key:
                parameter.normal_()
    return model, loss_fn, batch


@given(n=st.integers(1, 4), inputs=st.integers(1, 3), outputs=st.integers(1, 3), rank=st.integers(1, 3),
       between=st.lists(st.integers(1, 3), max_size=2), seed=st.integers(0, 2**20))
def test_the_layer_is_a_sum_of_kronecker_products(n, inputs, outputs, rank, between, seed):
    torch.manual_seed(seed)
    mixing = mixing_layer(n).double()
    layer = KroneckerLinear(n * inputs, n * outputs, mixing, rank).double()
    with torch.no_grad():
        layer.bias.normal_()
    whole = sum(torch.kron(A, s @ t) for A, s, t in zip(
        mixing.weight.view(n, n, n), layer.up.weight.split(rank, 1), layer.down.weight.split(rank), strict=True))
    x = torch.randn(2, *between, n * inputs, dtype=torch.float64)
    assert torch.allclose(layer(x), x @ whole.T + layer.bias, rtol=0, atol=1e-12)


def test_the_matrices_that_are_shared_begin_small_and_are_one_parameter():
    torch.manual_seed(0)
    weight = mixing_layer(16).weight                                             # 4,096 numbers of deviation 0.01
    assert weight.shape == (256, 16, 1) and abs(weight.std().item() / 0.01 - 1) < 0.07
    model, *_ = begun(Compacter(4, 2), "bert")
    assert sum("mixing" in name for name, _ in model.named_parameters()) == 1
    uses = {id(module.shared[0]) for module in copy.deepcopy(model).modules() if isinstance(module, KroneckerLinear)}
    assert len(uses) == 1


@pytest.mark.filterwarnings("error:.*no fast rule")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", [Compacter(4, 2), Compacter(8, 4, 2, seed=3), Chain(LoRA(2), Compacter(4, 2))],
                         ids=["rank 1", "rank 2", "beside LoRA"])
def test_clipped_sums_are_the_oracles(method, name):
    model, loss_fn, batch = begun(copy.deepcopy(method), name)
    rows = per_example_gradients(model, loss_fn, batch)
    flat = torch.cat([values.flatten(1) for values in rows.values()], 1)
    clip = flat.norm(dim=1).median().item()
    block = Block(list(trainable(model).values()), None, clip)
    sums, norms = gradients(model, loss_fn, batch).clipped_sum([block])
    wanted = (clip / flat.norm(dim=1)).clamp(max=1) @ flat
    found = torch.cat([sums[key].flatten() for key in rows])
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()
    assert torch.allclose(norms[:, 0], flat.norm(dim=1), rtol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_taken_out_again_the_model_is_as_it_was(name):
    plain, _, _ = zoo.build(name)
    before = copy.deepcopy(plain.state_dict())
    Compacter(4, 2).start(Context(plain, lambda *_: 1 / 0, 1, 1, 1))
    found = [module for module in plain.modules() if isinstance(module, Adapted)]
    assert len(found) == 4 and len(partitions(plain)) == 5 and len(additions(plain)) == 1        # and what they share
    remove_adapters(plain)
    assert not additions(plain) and plain.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("bad, words", [
    (dict(width=0), "width=0"), (dict(divisions=0), "divisions=0"), (dict(rank=-1), "rank=-1"), (dict(width=2.5), "width=2.5"),
    (dict(width=10, divisions=4), "the bottleneck has 10 numbers")])
def test_impossible_sizes_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        Compacter(**bad)


def test_a_model_that_does_not_divide_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    with pytest.raises(ValueError, match="2 has 10 numbers, which divisions=3 cannot cut"):
        Compacter(6, 3, after=("0", "2")).start(Context(model, lambda *_: 1 / 0, 1, 1, 1))
    assert not additions(model) and not any(isinstance(module, Adapted) for module in model.modules())


def test_dp_frost_chooses_among_compacters():
    model, loss_fn, batch = zoo.build("bert", rows=8)
    data, collate = zoo.as_data(batch)
    run = dpft.fine_tune(model, data, Chain(Compacter(4, 2), DPFrost(0.6, rounds=1, sample_rate=1.0)), epsilon=8.0, steps=2,
                         batch_size=4, clip=0.5, loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01, progress=False)
    chosen = {place(name)[0] for name in run.trained if "adapter" in name}
    assert 0 < len(chosen) < 5


def test_biases_that_are_added_stay_out_of_the_adapters():
    model, _, _ = zoo.build("llama")
    Chain(Compacter(4, 2), BiTFiT(add_missing=True)).start(Context(model, lambda *_: 1 / 0, 1, 1, 1))
    inside = [name for name, _ in model.named_parameters() if "adapter" in name and name.endswith("bias")]
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    assert len(adapted) == 4 and len(inside) == 2 * 4                            # of each Kronecker layer, its own
    assert any(name.endswith("base_layer.bias") and p.requires_grad for name, p in model.named_parameters())


def test_a_model_that_is_cut_apart_is_refused():
    mixing = mixing_layer(2)
    mixing.weight.__class__ = type("DTensor", (nn.Parameter,), {})               # as fully_shard leaves it
    with pytest.raises(ValueError, match="ignored_params"):
        KroneckerLinear(4, 4, mixing, 1)(torch.ones(3, 4))


def test_sizes_are_whole_numbers():
    compacter = Compacter(8.0, 4.0, 1.0)
    sizes = (compacter.width, compacter.divisions, compacter.rank, Adapter(8.0).width, LoRA(2.0).rank)
    assert [type(size) for size in sizes] == [int] * 5


@pytest.mark.parametrize("between", [(), (5,)], ids=["rows", "tokens"])
def test_the_layer_can_be_traced(between):
    mixing = mixing_layer(3)
    layer = KroneckerLinear(6, 9, mixing, 2)
    layer.add_module("shared_by_all", mixing)                                    # as it is a part of the whole model
    x = torch.randn(4, *between, 6)
    with torch.no_grad():
        layer.bias.normal_()
        assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))           # as late freezing does, for any number of rows
