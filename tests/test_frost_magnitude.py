"""Partitions of every family, magnitudes by the letter of the definitions, and how far one example moves them."""

import itertools
import math

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RobertaConfig, RobertaForSequenceClassification
from zoo import inner, plain

from dpft.forms import Groups
from dpft.frost import gradient_magnitudes, partitions, sensitivity
from dpft.frost.magnitude import absolute_norms, absolute_sum
from dpft.gradients import gradients, per_example_gradients

KINDS = ("mg", "mgn", "mgna")
WAYS = list(itertools.product(KINDS, (1, 2), (None, 2)))


def measure(rows, sizes, **ways):
    model = plain(*sizes)
    return gradient_magnitudes(model, inner, [(rows,)] if len(rows) else [], partitions(model, head=()), **ways)


def by_definition(rows, sizes, kind="mgna", order=1, clip=1.0, clip_order=None):
    """Definitions 7 and 8, entry by entry."""
    sizes = list(sizes)
    roots = [size ** (1 / order) for size in sizes]
    spread = torch.cat([torch.full((size,), 1.0 if kind == "mg" else root, dtype=torch.float64)
                        for size, root in zip(sizes, roots, strict=True)])
    bound = clip if kind == "mg" else clip / (sum(sizes) / len(sizes)) ** (1 / order)
    total = torch.zeros(sum(sizes), dtype=torch.float64)
    for row in rows:
        scaled = (row.abs() if kind == "mgna" else row) / spread
        if not scaled.isfinite().all():
            continue
        norm = torch.stack([part.norm(order) for part in scaled.split(sizes)]).norm(clip_order or order).item()
        total += scaled * (min(1.0, bound / norm) if norm else 0.0)
    found = torch.stack([part.norm(order) for part in total.split(sizes)])
    return found / torch.tensor(roots) if kind == "mg" else found


def written_out(model, loss_fn, batch, pieces):
    rows = per_example_gradients(model, loss_fn, batch)
    names = {id(p): name for name, p in model.named_parameters()}
    return torch.cat([rows[names[id(p)]].flatten(1) for piece in pieces for p in piece.parameters], 1)


# Partitions

def test_roberta_base_has_a_hundred_partitions():
    with torch.device("meta"):
        model = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1))
    found = partitions(model)
    assert len(found) == 100 and sum(part.size for part in found) == 124_055_040
    assert max(found, key=lambda part: part.size).name == "roberta.embeddings.word_embeddings"
    assert min(part.size for part in found) == 768 and not any("classifier" in part.name for part in found)


@pytest.mark.parametrize("name", [*zoo.NAMES, "llama"])
def test_partitions_cover_all_but_a_fresh_head_once(name):
    model, _, _ = zoo.build(name)
    found = partitions(model)
    inside = [id(p) for part in found for p in part.parameters]
    assert len(inside) == len(set(inside)) and len({part.name for part in found}) == len(found)
    outside = {key for key, p in model.named_parameters() if id(p) not in set(inside)}
    fresh = {"roberta": "classifier.", "bert": "classifier.", "gpt2": "score.", "vit": "classifier.", "cnn": "head."}.get(name)
    assert outside == {key for key, _ in model.named_parameters() if fresh and key.startswith(fresh)}


def test_packed_attention_and_recurrent_layers():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "rnn": nn.LSTM(3, 4)})
    names = [part.name for part in partitions(model, head=())]
    assert names == ["attention.in_proj", "attention.out_proj", "rnn.ih_l0", "rnn.hh_l0"]


def test_a_lora_pair_is_one_partition_and_nothing_else_is_offered():
    model, _, _ = zoo.build("roberta")
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["query", "value"]), model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or name.startswith("classifier"))
    found = partitions(model)
    assert [part.name.rpartition(".")[2] for part in found] == ["query", "value"] * 2
    assert all(len(part.parameters) == 2 and part.size == 2 * (16 + 16) for part in found)


def test_what_trained_before_does_not_hide_the_rest():
    model, _, _ = zoo.build("roberta")
    before = len(partitions(model))
    zoo.freeze(model, "biases")
    assert len(partitions(model)) == before


# Magnitudes

@pytest.mark.parametrize("name", zoo.NAMES)
def test_magnitudes_of_every_family_are_those_of_the_definition(name):
    model, loss_fn, batch = zoo.build(name)
    model.eval()
    pieces = [part for part in partitions(model) if not part.name.startswith("unused")]
    rows, sizes = written_out(model, loss_fn, batch, pieces), [part.size for part in pieces]
    data, collate = zoo.as_data(batch)
    batches = [collate(data[:2]), collate(data[2:])]
    for kind, order, clip_order in WAYS:
        found = gradient_magnitudes(model, loss_fn, batches, pieces, kind, order, 3.0, clip_order)
        assert torch.allclose(found, by_definition(rows, sizes, kind, order, 3.0, clip_order), rtol=1e-6, atol=1e-12)


def test_the_model_requires_gradients_as_before():
    model, loss_fn, batch = zoo.build("roberta")
    zoo.freeze(model, "biases")
    flags = [p.requires_grad for p in model.parameters()]
    gradient_magnitudes(model, loss_fn, [batch], partitions(model))
    assert flags == [p.requires_grad for p in model.parameters()]


@given(tokens=st.integers(1, 9), words=st.integers(1, 6), seed=st.integers(0, 2**20), rows=st.integers(1, 4))
@settings(max_examples=25)
def test_repeated_words_add_up_before_the_absolute_value(tokens, words, seed, rows):
    torch.manual_seed(seed)
    table = nn.Embedding(words, 3).double()
    batch = torch.randint(0, words, (rows, tokens)), torch.randn(rows, tokens, 3, dtype=torch.float64)
    def loss_fn(model, batch):
        return (model(batch[0]) * batch[1]).sum((1, 2))
    taken, oracle = gradients(table, loss_fn, batch), per_example_gradients(table, loss_fn, batch)["weight"]
    factors = torch.rand(rows, dtype=torch.float64)
    assert torch.allclose(absolute_norms(taken, "weight"), oracle.abs().sum((1, 2)), rtol=1e-12)
    assert torch.allclose(absolute_sum(taken, "weight", factors), torch.tensordot(factors, oracle.abs(), 1), rtol=1e-12)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and func is not torch.ops.aten.detach.default and not value._is_view():
                self.most = max(self.most, value.numel())
        return out


@pytest.mark.parametrize("kind,order", [("mgna", 1), ("mgna", 2), ("mgn", 2)])
def test_no_table_of_examples_times_entries_is_ever_written(kind, order, monkeypatch):
    for module in ("norms", "layer_rules"):
        monkeypatch.setattr(f"dpft.{module}.CHUNK", 5000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 20), nn.Linear(20, 50), nn.Tanh(), nn.Flatten(), nn.Linear(300, 3))
    batch = torch.randint(0, 2000, (16, 6)), torch.arange(16) % 3
    pieces = partitions(model)
    gradients(model, zoo.image_loss, batch)                                      # checks against the slow oracle, once
    gradient_magnitudes(model, zoo.image_loss, [batch], pieces)
    with Largest() as seen:
        gradient_magnitudes(model, zoo.image_loss, [batch], pieces, kind, order)
    largest_parameter = 2000 * 20
    assert seen.most <= (5000 if (kind, order) == ("mgna", 1) else largest_parameter) < 16 * sum(part.size for part in pieces) / 10


# Sensitivity

rows_of_gradients = st.integers(0, 2**30).map(lambda seed: torch.Generator().manual_seed(seed))


@given(generator=rows_of_gradients, sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5), way=st.sampled_from(WAYS),
       clip=st.sampled_from([0.01, 1.0, 50.0]), others=st.integers(0, 3))
@settings(max_examples=120)
def test_one_example_never_moves_the_vector_further_than_the_sensitivity(generator, sizes, way, clip, others):
    kind, order, clip_order = way
    rows = torch.randn(others + 1, sum(sizes), generator=generator, dtype=torch.float64) ** 3
    rows *= 10.0 ** torch.randint(-4, 4, (others + 1, 1), generator=generator)
    without, with_it = (measure(part, sizes, kind=kind, order=order, clip=clip, clip_order=clip_order) for part in (rows[1:], rows))
    assert (with_it - without).norm() <= sensitivity(sizes, clip, kind, order) * (1 + 1e-9)


@pytest.mark.parametrize("kind,order,clip_order", WAYS)
def test_the_sensitivity_is_reached(kind, order, clip_order):
    sizes, clip = [5, 2, 9], 0.7
    row = torch.zeros(1, 16, dtype=torch.float64)
    row[0, 5:7] = torch.tensor([300.0, -400.0])                                  # all of it in the smallest partition
    moved = measure(row, sizes, kind=kind, order=order, clip=clip, clip_order=clip_order)
    assert math.isclose(moved.norm().item(), sensitivity(sizes, clip, kind, order), rel_tol=1e-12)


# Faults and bad input

@pytest.mark.parametrize("kind,order,clip_order", WAYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_with_a_gradient_that_is_not_finite_adds_nothing(kind, order, clip_order, bad):
    torch.manual_seed(0)
    rows = torch.randn(4, 10, dtype=torch.float64)
    good = rows[[0, 1, 3]]
    rows[2, 7] = bad                                                             # in one partition only
    found = measure(rows, [6, 4], kind=kind, order=order, clip_order=clip_order)
    assert torch.allclose(found, measure(good, [6, 4], kind=kind, order=order, clip_order=clip_order), rtol=1e-12)


def test_an_empty_draw_and_zero_gradients_give_zeros():
    for kind, order, clip_order in WAYS:
        ways = dict(kind=kind, order=order, clip_order=clip_order)
        assert measure(torch.zeros(0, 7), [3, 4], **ways).tolist() == [0.0, 0.0]
        assert measure(torch.zeros(2, 7, dtype=torch.float64), [3, 4], **ways).tolist() == [0.0, 0.0]


def test_the_rows_of_a_unit_are_summed_before_they_are_bounded():
    model, loss_fn, batch = zoo.build("roberta")
    model.eval()
    pieces, units = partitions(model), Groups(torch.tensor([0, 1, 0, 2, 1]))
    rows = written_out(model, loss_fn, batch, pieces)
    merged = torch.zeros(3, rows.shape[1], dtype=rows.dtype).index_add_(0, units.index, rows)
    for kind, order in itertools.product(KINDS, (1, 2)):
        found = gradient_magnitudes(model, loss_fn, [batch], pieces, kind, order, 3.0, groups=lambda _: units)
        assert torch.allclose(found, by_definition(merged, [part.size for part in pieces], kind, order, 3.0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind,order", [("mgna", 1), ("mg", 1), ("mgna", 2)])
def test_autocast_around_a_measurement_does_not_move_it_further_than_its_sensitivity(kind, order):
    sizes, count = (2, 30, 7), 2000
    model = plain(*sizes).float()
    rows = 100 * torch.randn(count, sum(sizes), generator=torch.Generator().manual_seed(0))
    def found(number):
        with torch.autocast("cpu", torch.bfloat16):
            return gradient_magnitudes(model, inner, [(rows[:number],)], partitions(model, head=()), kind=kind, order=order)
    moves = [found(number) for number in range(count - 30, count + 1)]
    worst = max((b - a).norm().item() for a, b in itertools.pairwise(moves))
    assert worst <= sensitivity(sizes, kind=kind, order=order) * (1 + 1e-3)
