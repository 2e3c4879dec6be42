"""The cached prefix against the same loss without it: values, norms and sums, whatever is frozen, stored, changed or thrown at it."""

import copy
import gc
import math
import os
import stat
import textwrap

import fresh
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpft.prefix
from dpft.calls import jolted
from dpft.gradients import Block, clipped_sum, gradients, per_example_gradients
from dpft.models import set_modes
from dpft.oracle import select_rows
from dpft.prefix import Prefix, hit_share, worth_it
from dpft.shelf import FileShelf, Shelf, row_keys, token_counts

FIRST_TO_TRAIN = {"roberta": "layer.1.", "bert": "layer.1.", "gpt2": "h.1.", "gpt2-lm": "h.1.", "vit": "layers.1.", "cnn": "strided",
                  "llama": "layers.1."}
LOWER = ("embed", "wte", "wpe", "layer.0", "layers.0", "h.0")


def train_from(model, first):
    "Freeze everything that was registered before the first parameter of this name."
    reached = False
    for name, parameter in model.named_parameters():
        reached = reached or first in name
        parameter.requires_grad_(reached)
    assert reached
    set_modes(model)


def half_frozen(name, rows=5):
    model, loss_fn, batch = zoo.build(name, rows)
    train_from(model, FIRST_TO_TRAIN[name])
    return model, loss_fn, batch


def everything(model, loss_fn, batch):
    "Losses, norms, clipped and weighted sums of the engine, and a weighted gradient by autograd, as one list of tensors."
    taken = gradients(model, loss_fn, batch)
    factors = torch.linspace(-1.0, 1.0, taken.size, dtype=torch.float64)
    sums = taken.clipped_sum([Block(list(taken.parameters.values()), clip=0.05)])[0]
    losses = loss_fn(model, batch)
    plain = torch.autograd.grad(losses @ factors.to(losses), list(taken.parameters.values()), allow_unused=True)
    return [taken.losses, taken.norms(), *sums.values(), *taken.weighted_sum(factors).values(), losses.detach(),
            *(x for x in plain if x is not None)]


def difference(model, loss_fn, prefix, batch):
    "Largest difference that the cache makes; each is asked from the same random state."
    state = torch.get_rng_state()
    wanted = everything(model, loss_fn, batch)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    found = everything(model, prefix, batch)
    assert torch.equal(torch.get_rng_state(), after)  # the cache draws nothing
    assert all(torch.equal(x.isfinite(), y.isfinite()) for x, y in zip(found, wanted, strict=True))
    return max((x - y).nan_to_num(0).abs().max().item() if x.numel() else 0.0 for x, y in zip(found, wanted, strict=True))


def untouched(model):
    return not any("forward" in module.__dict__ for module in model.modules())


class Counted(zoo.CountsExamples, nn.Sequential):
    "Layers that count how many examples went through."


def square_loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def numbers(rows=6, width=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))


def small(below=None, above=None, width=4):
    "A frozen part and a part that trains."
    torch.manual_seed(0)
    below = below or [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)]
    above = above or [nn.Tanh(), nn.Linear(width, width)]
    model = nn.Sequential(Counted(*below), *above).double()
    model[0].requires_grad_(False)
    set_modes(model)
    return model


@pytest.mark.parametrize("name", [*zoo.NAMES, "llama"])
def test_same_cold_half_warm_and_warm(name):
    model, loss_fn, batch = half_frozen(name)
    prefix = Prefix(model, loss_fn)
    assert difference(model, loss_fn, prefix, select_rows(batch, torch.tensor([1, 3]))) <= 1e-12
    assert prefix.reason is None and (prefix.misses, prefix.saves > 0.4) == (2, True)
    assert difference(model, loss_fn, prefix, batch) <= 1e-12      # three of five are new
    hits, misses = prefix.hits, prefix.misses
    assert misses == 5
    assert difference(model, loss_fn, prefix, batch) <= 1e-12      # all are there
    assert (prefix.misses, prefix.hits) == (misses, hits + 2 * 5)
    oracle = [per_example_gradients(model, each, batch) for each in (loss_fn, prefix)]
    assert max((oracle[0][each] - oracle[1][each]).abs().max().item() for each in oracle[0]) <= 1e-12 and prefix.hits == hits + 3 * 5
    assert untouched(model)


@pytest.mark.parametrize("name", ["roberta", "bert", "vit", "cnn", "llama"])
def test_head_alone_stores_what_the_head_reads(name):
    model, loss_fn, batch = zoo.build(name)
    for each, parameter in model.named_parameters():
        parameter.requires_grad_(each.startswith(("classifier", "head", "lm_head")))
    set_modes(model)
    prefix = Prefix(model, loss_fn)
    assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert prefix.cut == [{"roberta": "classifier.dropout", "bert": "dropout", "vit": "vit", "cnn": "twice", "llama": "model.norm"}[name]]


def test_the_weights_of_the_proof_are_not_symmetric_and_are_put_back():
    """Under a symmetric weight whatever depends on W less its transpose is hidden from the proof."""
    layer = nn.Linear(6, 6)
    before = layer.weight.clone()
    with jolted([layer]):
        weight = layer.weight.detach()
        assert (weight - weight.T).norm() > 0.5 * weight.norm() and len(weight.unique()) > 6
    assert torch.equal(layer.weight, before)


def test_a_second_visit_makes_no_call_below():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss)
    clipped_sum(model, prefix, batch, 1.0)
    before, looked = model[0].examples, prefix.hits
    for _ in range(3):
        clipped_sum(model, prefix, batch, 1.0)
        prefix(model, batch)
    assert model[0].examples == before and prefix.hits - looked == 6 * 6 and prefix.bytes == 6 * 4 * 8


def test_the_check_at_the_start_does_without_the_cache():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss)
    assert prefix.full_precision is square_loss
    lowered = lambda model, batch: square_loss(model, batch)  # noqa: E731
    lowered.full_precision = square_loss
    assert Prefix(model, lowered).full_precision is square_loss
    clipped_sum(model, prefix, batch, 1.0)
    assert prefix.misses == len(batch[0]) and prefix.hits == 3 * len(batch[0])   # a look at a whole batch goes as the step does


@pytest.mark.parametrize("name", ["bert", "gpt2-lm", "cnn"])
def test_any_order_of_freezing_without_a_word(name):
    model, loss_fn, batch = zoo.build(name)
    names = [each for each, _ in model.named_parameters() if "unused" not in each]
    prefix = Prefix(model, loss_fn)
    for first in [names[-1], FIRST_TO_TRAIN[name], names[0], names[-1], names[1], FIRST_TO_TRAIN[name]]:
        train_from(model, first)
        for _ in range(2):
            assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert untouched(model)


def test_freezing_more_is_used_after_refresh_and_unfreezing_is_seen_at_once():
    model, loss_fn, batch = half_frozen("bert")
    prefix = Prefix(model, loss_fn)
    clipped_sum(model, prefix, batch, 1.0)
    assert prefix.cut == ["bert.encoder.layer.0"]
    train_from(model, "classifier")
    prefix.refresh()
    assert difference(model, loss_fn, prefix, batch) <= 1e-12 and prefix.cut == ["dropout"]
    train_from(model, "embeddings.LayerNorm")
    assert difference(model, loss_fn, prefix, batch) <= 1e-12 and prefix.cut == [] and prefix.bytes == 0
    train_from(model, "layer.1.")
    prefix.refresh()
    assert difference(model, loss_fn, prefix, batch) <= 1e-12 and prefix.cut == ["bert.encoder.layer.0"]


def test_refresh_keeps_what_still_serves():
    model, loss_fn, batch = half_frozen("bert")
    prefix = Prefix(model, loss_fn)
    difference(model, loss_fn, prefix, batch)
    prefix.refresh()
    misses = prefix.misses
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1." in name and name.endswith("bias"))
    prefix.refresh()
    assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert prefix.misses == misses == 5


def double_in_place(model):
    with torch.no_grad():
        model[0][0].weight.mul_(2)


def step_of_an_optimizer(model):
    parameter = model[0][2].weight
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], 0.5).step()
    parameter.grad = None


def through_data(model):
    model[0][2].weight.data.add_(0.3)


def other_data(model):
    model[0][0].bias.data = torch.full((4,), 0.7, dtype=torch.float64)


def buffer_in_place(model):
    model[0][1].scale.mul_(3)


def other_module(model):
    model[0][0] = nn.Linear(4, 4).double().requires_grad_(False)
    nn.init.eye_(model[0][0].weight)


def other_parameter(model):
    model[0][0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64), requires_grad=False)


def training_mode(model):
    model[0].train()


class Scaled(nn.Module):
    "A buffer that scales, and dropout that follows the mode."

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return F.dropout(x, 0.5, self.training) * self.scale


@pytest.mark.parametrize("change", [double_in_place, step_of_an_optimizer, through_data, other_data, buffer_in_place, other_module,
                                    other_parameter, training_mode])
def test_a_change_below_empties_the_cache(change):
    model = small(below=[nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)])
    prefix, batch = Prefix(model, square_loss), numbers()
    assert difference(model, square_loss, prefix, batch) <= 1e-12 and prefix.bytes
    old = prefix(model, batch).detach()
    change(model)
    for _ in range(2):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert not torch.allclose(prefix(model, batch), old)


def test_what_trains_may_change_all_the_time():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(4):
        for parameter, value in zip(optimizer.param_groups[0]["params"], clipped_sum(model, prefix, batch, 1.0).values(), strict=True):
            parameter.grad = value
        optimizer.step()
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.misses == len(batch[0])


def test_random_augmentation_is_never_answered_from_another_draw():
    model, loss_fn, (pixels, labels) = half_frozen("cnn")
    prefix = Prefix(model, loss_fn)
    for shift in range(4):
        assert difference(model, loss_fn, prefix, (pixels.roll(shift, 3), labels)) <= 1e-12
    assert prefix.misses == 4 * len(labels)
    assert difference(model, loss_fn, prefix, (pixels.roll(1, 3).flip(0), labels.flip(0))) <= 1e-12
    assert prefix.misses == 4 * len(labels)


def test_augmentation_inside_the_loss_is_refused():
    model, batch = small(), numbers()
    def noisy(model, batch):
        return square_loss(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))
    prefix = Prefix(model, noisy)
    torch.manual_seed(1)
    wanted = noisy(model, batch)
    torch.manual_seed(1)
    assert torch.equal(prefix(model, batch), wanted) and "random numbers" in prefix.reason


def test_another_source_of_randomness_is_refused():
    model, batch, own = small(), numbers(), torch.Generator().manual_seed(0)
    def noisy(model, batch):
        return square_loss(model, (batch[0] + torch.randn(batch[0].shape, generator=own, dtype=torch.float64), batch[1]))
    prefix = Prefix(model, noisy)
    prefix(model, batch)
    assert "settled" in prefix.reason and prefix.bytes == 0


def padded(batch, tokens, fill=1):
    "The same texts at another padded length."
    now = batch["input_ids"].shape[1]
    values = {"input_ids": fill, "attention_mask": 0}
    return {name: F.pad(value, (0, tokens - now), value=values[name]) if name in values else value for name, value in batch.items()}


@pytest.mark.parametrize("name", ["roberta", "bert", "gpt2", "llama-cls"])
def test_a_text_is_the_same_at_every_padded_length(name):
    if name == "llama-cls":
        model, _, _ = half_frozen("llama")
        batch = zoo.text_batch(torch.Generator().manual_seed(0))
        def loss_fn(model, batch):
            ids, mask = batch["input_ids"], batch["attention_mask"]
            scores = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            each = F.cross_entropy(scores.transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
            return each.sum(1) / mask[:, 1:].sum(1)
    else:
        model, loss_fn, batch = half_frozen(name)
    prefix = Prefix(model, loss_fn)
    for tokens in (7, 10, 8, 7):
        assert difference(model, loss_fn, prefix, padded(batch, tokens)) <= 1e-12
    assert prefix.plan.trims and prefix.misses == 5
    assert prefix.bytes == int(batch["attention_mask"].sum()) * 16 * 8


def test_texts_without_a_mask_are_kept_with_their_length():
    model, loss_fn, batch = half_frozen("roberta")
    bare = lambda tokens: {name: value for name, value in padded(batch, tokens).items() if name != "attention_mask"}  # noqa: E731
    prefix = Prefix(model, loss_fn)
    for tokens in (7, 9, 7):
        assert difference(model, loss_fn, prefix, bare(tokens)) <= 1e-12
    assert prefix.misses == 10 and prefix.reason is None


def blind(model, batch):
    "A loss that does not hand the mask on, so that padding is attended to."
    return zoo.classifier_loss(model, {name: value for name, value in batch.items() if name != "attention_mask"})


def reads_padding(model, batch):
    "The mean over all positions, padded ones too."
    hidden = model.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return model.bert.pooler(hidden.mean(1, keepdim=True)).square().mean(1)


@pytest.mark.parametrize(("loss_fn", "first"), [(blind, "layer.1."), (blind, "classifier"), (reads_padding, "layer.1.")])
def test_padding_that_matters_is_kept(loss_fn, first):
    model, _, batch = half_frozen("bert")
    train_from(model, first)
    for parameter in model.classifier.parameters():
        parameter.requires_grad_(loss_fn is blind)
    prefix = Prefix(model, loss_fn)
    for tokens in (7, 9, 7):
        assert difference(model, loss_fn, prefix, padded(batch, tokens, fill=0)) <= 1e-12
    assert prefix.plan.trims is False and prefix.misses == 10


def test_left_padding_is_kept():
    model, loss_fn, batch = half_frozen("bert")
    flipped = {name: value.flip(1) if value.ndim > 1 else value for name, value in batch.items()}
    assert token_counts(flipped) is None and token_counts(batch) == batch["attention_mask"].sum(1).tolist()
    prefix = Prefix(model, loss_fn)
    for _ in range(2):
        assert difference(model, loss_fn, prefix, flipped) <= 1e-12
    assert prefix.misses == 5 and prefix.plan.trims is None


def test_full_texts_first_and_padding_later():
    model, loss_fn, batch = half_frozen("bert")
    full = batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
    prefix = Prefix(model, loss_fn)
    assert difference(model, loss_fn, prefix, full) <= 1e-12 and prefix.plan.trims is None
    for tokens in (7, 9):
        assert difference(model, loss_fn, prefix, padded(full, tokens)) <= 1e-12
        assert difference(model, loss_fn, prefix, padded(batch, tokens)) <= 1e-12
    assert prefix.plan.trims and prefix.misses == 5 + int((batch["attention_mask"].sum(1) < 7).sum())


def test_duplicates_are_computed_once():
    model, loss_fn, batch = half_frozen("bert")
    prefix = Prefix(model, loss_fn)
    twice = select_rows(batch, torch.tensor([0, 1, 0, 0, 1]))
    assert difference(model, loss_fn, prefix, twice) <= 1e-12 and prefix.misses == 2


def test_one_example_at_a_time_and_alone_first():
    model, loss_fn, batch = half_frozen("vit")
    prefix = Prefix(model, loss_fn)
    for i in range(5):
        assert difference(model, loss_fn, prefix, select_rows(batch, torch.tensor([i]))) <= 1e-12
    assert difference(model, loss_fn, prefix, batch) <= 1e-12 and prefix.bytes == 5 * 5 * 16 * 8


class Unknown(nn.Module):
    "A layer that no tap sees: its weight acts on the batch as a whole."

    def __init__(self, branches):
        super().__init__()
        self.branches, self.weight = branches, nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        if self.branches and x.sum().item() > 1e9:  # vmap cannot follow
            return x
        return (x @ self.weight.T) @ self.weight


@pytest.mark.filterwarnings("ignore:.*no fast rule")
@pytest.mark.parametrize("branches", [True, False])
def test_layers_without_a_rule_fall_back_and_the_cut_settles(branches):
    model = small(above=[Unknown(branches), nn.Linear(4, 4)])
    model[0][2].requires_grad_(True)
    set_modes(model)
    prefix, batch = Prefix(model, square_loss), numbers()
    for _ in range(3):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.cut == ["0.1"] and prefix.misses == 6


@pytest.mark.filterwarnings("ignore:.*no fast rule")
def test_one_search_for_each_freeze_set(monkeypatch):
    searches = []
    class Noted(dpft.prefix.Search):
        def __init__(self, *args):
            searches.append(args)
            super().__init__(*args)
    monkeypatch.setattr(dpft.prefix, "Search", Noted)
    model = small(above=[Unknown(True), nn.Linear(4, 4)])
    prefix, batch = Prefix(model, square_loss), numbers()
    for expected in (1, 1, 1, 2, 2):
        if expected == 2:
            model[1].requires_grad_(False)
        prefix.refresh()
        clipped_sum(model, prefix, batch, 1.0)
        with torch.no_grad():
            model[0][0].weight.add_(0.1)  # what is stored goes, the plan stays
        assert len(searches) == expected
    assert prefix.cut == ["1"]
    model[0].requires_grad_(True)
    for _ in range(3):
        assert difference(model, square_loss, prefix, batch) <= 1e-12 and len(searches) == 3  # once refused, it stays so


class Around(nn.Module):
    "A skip connection from the first part to the last, around the one between; with an in-place activation."

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.between = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.merge, self.last = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x):
        first = self.act(self.first(x))
        return self.last(torch.tanh(self.merge(torch.cat([first, self.between(first)], 1))))


def test_a_skip_connection_around_the_cut_is_stored_too():
    model = Around().double()
    train_from(model, "merge")
    prefix, batch = Prefix(model, square_loss), numbers()
    for _ in range(2):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.cut == ["act", "between"] and prefix.reason is None


class Shared(nn.Module):
    "A layer that is called below, and again above; outputs in a tuple; a call per part."

    def __init__(self):
        super().__init__()
        self.layer, self.pair, self.last = nn.Linear(4, 4), Pair(), nn.Linear(4, 4)

    def forward(self, x):
        once, scale, nothing = self.pair(torch.tanh(self.layer(torch.tanh(self.layer(x)))))
        assert nothing is None and scale == 2
        return self.layer(torch.tanh(self.last(once.add_(1.0))))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x), 2, None


def test_shared_layers_tuples_and_changes_in_place():
    model = Shared().double()
    train_from(model, "last")
    prefix, batch = Prefix(model, square_loss), numbers()
    for size in (6, 6, 1, 1, 6):
        assert difference(model, square_loss, prefix, select_rows(batch, torch.arange(size))) <= 1e-12
    assert prefix.cut == ["pair"] and len(prefix.plan.calls) == 3


def test_dropout_below_must_be_off_and_dropout_above_goes_on():
    model = small(below=[nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)], above=[nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)])
    assert not model[0][1].training and model[2].training
    prefix, batch = Prefix(model, square_loss), numbers()
    for _ in range(3):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.misses == 6
    model.train()
    for _ in range(2):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.cut == ["0.0"]  # as far as the dropout
    model[0][0].requires_grad_(True)
    assert difference(model, square_loss, prefix, batch) <= 1e-12 and prefix.reason


def test_bfloat16():
    model, loss_fn, batch = half_frozen("bert")
    model.float()
    def lowered(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch).float()
    lowered.full_precision = loss_fn
    prefix = Prefix(model, lowered)
    wanted = clipped_sum(model, lowered, batch, 0.1)
    for _ in range(2):
        found = clipped_sum(model, prefix, batch, 0.1)
        assert all((found[name] - wanted[name]).abs().max() <= 1e-3 for name in wanted) and found.keys() == wanted.keys()
    assert {part.dtype for row in prefix.shelf.places.values() for part in row} == {torch.bfloat16, torch.float32} or prefix.bytes
    assert prefix.misses == 5 and torch.equal(prefix(model, batch), lowered(model, batch))


def test_rows_made_under_another_autocast_are_not_taken():
    model, loss_fn, batch = half_frozen("bert")
    model.float()
    prefix = Prefix(model, loss_fn)
    exact = prefix(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(prefix(model, batch), loss_fn(model, batch))
    assert torch.equal(prefix(model, batch), exact) and prefix.misses == 10


@pytest.mark.parametrize("room", [0, 2.5])
def test_what_does_not_fit_is_computed(room):
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss, limit=int(room * 4 * 8))
    for _ in range(3):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.bytes == int(room) * 32 and prefix.room(6) == (int(room * 32) / (6 * 32) if room else 1.0)
    assert prefix.hits == (0 if room == 0 else prefix.hits)


def test_the_file_has_no_name_and_is_the_owners(tmp_path):
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss, folder=tmp_path / "secret")
    for _ in range(2):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    held = os.fstat(prefix.shelf.file.fileno())
    assert held.st_size == prefix.bytes == 6 * 32 and stat.S_IMODE(held.st_mode) == 0o600 and held.st_nlink == 0
    assert list((tmp_path / "secret").iterdir()) == [] and stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o700
    file = prefix.shelf.file
    prefix.clear()
    assert file.closed and prefix.bytes == 0 and difference(model, square_loss, prefix, batch) <= 1e-12


def test_a_killed_process_leaves_nothing(tmp_path):
    script = """
        import os, signal, sys, torch
        from dpft.shelf import FileShelf
        shelf = FileShelf(2**20, sys.argv[1])
        shelf.put(b"key", [torch.ones(1, 100)])
        assert torch.equal(shelf.get(b"key")[0], torch.ones(1, 100))
        os.kill(os.getpid(), signal.SIGKILL)"""
    ended = fresh.run(textwrap.dedent(script), tmp_path / "cache", said=tmp_path / "it")
    assert ended.returncode == -9 and list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_stops_the_admission(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss, folder=tmp_path)
    difference(model, square_loss, prefix, select_rows(batch, torch.arange(3)))
    monkeypatch.setattr(os, "pwrite", full)
    assert difference(model, square_loss, prefix, batch) <= 1e-12 and prefix.bytes == 3 * 32


def test_an_exception_leaves_the_model_as_it_was():
    model, batch = small(), numbers()
    after: list[bool] = []
    def failing(model, batch):
        found = square_loss(model, batch)
        if after:
            raise KeyError("in the loss")
        return found
    prefix = Prefix(model, failing)
    assert difference(model, square_loss, prefix, batch) <= 1e-12
    after.append(True)
    flags = [p.requires_grad for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    for rows in (batch, select_rows(batch, torch.tensor([0])), numbers(seed=1)):
        with pytest.raises(KeyError, match="in the loss"):
            clipped_sum(model, prefix, rows, 1.0)
        assert untouched(model) and flags == [p.requires_grad for p in model.parameters()]
    after.clear()
    assert all(map(torch.equal, values, model.parameters())) and difference(model, square_loss, prefix, batch) <= 1e-12


def test_an_exception_at_the_first_batch_leaves_the_model_as_it_was():
    model, batch = small(), numbers()
    values = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    def failing(model, batch):
        square_loss(model, batch)
        raise KeyError("in the loss")
    for when in range(3):
        with pytest.raises(KeyError, match="in the loss"):
            Prefix(model, failing)(model, batch)
        assert untouched(model), when
    assert all(p.data_ptr() == place and torch.equal(p, value) for p, (place, value) in zip(model.parameters(), values, strict=True))


def test_empty_batches_other_models_and_odd_batches_pass_through():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss)
    empty = select_rows(batch, torch.tensor([], dtype=torch.long))
    assert prefix(model, empty).shape == (0,) and all(not value.any() for value in clipped_sum(model, prefix, empty, 1.0).values())
    other = copy.deepcopy(model)
    assert torch.equal(prefix(other, batch), square_loss(other, batch)) and prefix.misses == 0
    for odd in [(*batch, object()), (batch[0].clone().requires_grad_(), batch[1])]:
        assert torch.equal(prefix(model, odd), square_loss(model, odd)) and prefix.bytes == 0
    inputs = odd[0]
    prefix(model, odd).sum().backward()
    assert inputs.grad.abs().sum() > 0
    prefix.enabled = False
    assert torch.equal(prefix(model, batch), square_loss(model, batch)) and prefix.bytes == 0


class Segments(nn.Module):
    "Layers that are run again in the backward pass: one segment is frozen, one holds a frozen and a trained layer."

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = checkpoint(lambda x: torch.tanh(self.b(torch.tanh(self.a(x)))), x, use_reentrant=self.reentrant)
        return checkpoint(lambda x: self.d(torch.tanh(self.c(x))), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = Segments(reentrant).double()
    train_from(model, "d.")
    prefix, batch = Prefix(model, square_loss), numbers()
    wanted = clipped_sum(model, square_loss, batch, 0.1)
    for _ in range(2):
        found = clipped_sum(model, prefix, batch, 0.1)
        assert all((found[name] - wanted[name]).abs().max() <= 1e-12 for name in wanted)
        assert reentrant or difference(model, square_loss, prefix, batch) <= 1e-12  # autograd itself needs inputs that require gradients
    assert prefix.cut == ["b"]  # c is made again with d, on what b returned


def test_checkpointed_transformer():
    model, loss_fn, batch = half_frozen("bert")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prefix = Prefix(model, loss_fn)
    assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert "word_embeddings" in prefix.reason  # a hook there makes its output require a gradient
    model.disable_input_require_grads()
    prefix.refresh()
    for _ in range(2):
        assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert prefix.cut == ["bert.encoder.layer.0"]


class Borrows(nn.Module):
    "Frozen layers below that read a trained weight without calling its module, by value only or with its gradient."

    def __init__(self, detached):
        super().__init__()
        self.detached, self.a, self.b, self.head = detached, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        weight = self.head.weight.detach() if self.detached else self.head.weight
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)) @ weight)))


@pytest.mark.parametrize("detached", [True, False])
def test_what_depends_on_trained_weights_is_not_stored(detached):
    model = Borrows(detached).double()
    train_from(model, "head")
    prefix, batch = Prefix(model, square_loss), numbers()
    before = model.head.weight.detach().clone()
    for _ in range(3):
        wanted, found = square_loss(model, batch), prefix(model, batch)
        gradient = [torch.autograd.grad(each.sum(), model.head.weight)[0] for each in (wanted, found)]
        assert torch.equal(wanted, found) and torch.equal(*gradient)
        with torch.no_grad():
            model.head.weight.add_(0.1)
    assert prefix.cut == ["a"] and torch.allclose(model.head.weight, before + 0.3)


def test_examples_must_come_first():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False)
    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.head = layer, nn.Linear(4, 4)
        def forward(self, x):
            return self.head(self.below(x.transpose(0, 1)).transpose(0, 1)).mean(1)
    model = TokensFirst().double()
    train_from(model, "head")
    batch = (torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64))
    prefix = Prefix(model, square_loss)
    for size in (5, 3, 1):  # with three examples tokens and examples look alike
        assert difference(model, square_loss, prefix, select_rows(batch, torch.arange(size))) <= 1e-12
    assert "examples first" in prefix.reason
    square = Prefix(model, square_loss)
    assert difference(model, square_loss, square, select_rows(batch, torch.arange(3))) <= 1e-12 and "examples first" in square.reason


class Windows(nn.Module):
    "Several rows for each example, as windows of an image have."

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(2, 2), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.a(x.reshape(-1, 2))).reshape(-1, 4))


def test_several_rows_for_each_example():
    model = Windows().double()
    train_from(model, "head")
    prefix, batch = Prefix(model, square_loss), numbers()
    for size in (6, 4, 1):
        assert difference(model, square_loss, prefix, select_rows(batch, torch.arange(size))) <= 1e-12
    assert prefix.cut == ["a"] and prefix.misses == 6


def test_a_loss_that_is_not_finite_is_answered_by_the_loss_itself():
    model, (x, y) = small(above=[nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)]), numbers()
    x[2, 1], y[4, 0] = math.nan, math.inf
    prefix = Prefix(model, square_loss)
    for _ in range(2):
        assert difference(model, square_loss, prefix, (x, y)) <= 1e-12
    nothing = Prefix(model, square_loss)
    assert not nothing(model, (x * math.nan, y)).isfinite().any() and "finite" in nothing.reason
    assert difference(model, square_loss, nothing, numbers()) <= 1e-12 and nothing.reason is None


def test_watched_calls_are_made():
    model, batch, seen = small(), numbers(), []
    handle = model[0][0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    prefix = Prefix(model, square_loss)
    for _ in range(2):
        prefix(model, batch)
    assert "watched" in prefix.reason and len(seen) >= 2
    handle.remove()
    prefix.refresh()
    assert difference(model, square_loss, prefix, batch) <= 1e-12 and prefix.cut == ["1"]
    model[0][0].register_forward_hook(lambda module, args, output: seen.append(0))
    seen.clear()
    assert difference(model, square_loss, prefix, batch) <= 1e-12 and seen


class Bare(nn.Module):
    "A trained parameter that belongs to no layer, between frozen ones."

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x) * self.scale))


def test_bare_parameters_are_refused_or_lie_above():
    model = Bare().double()
    train_from(model, "scale")
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    batch = numbers()
    prefix = Prefix(model, square_loss)
    assert difference(model, square_loss, prefix, batch) <= 1e-12 and "Bare" in prefix.reason
    above = small(above=[Bare()])
    prefix = Prefix(above, square_loss)
    for _ in range(2):
        assert difference(above, square_loss, prefix, batch) <= 1e-12
    assert prefix.cut == ["0"]


def test_lora_in_the_upper_half_alone():
    peft = pytest.importorskip("peft")
    model, loss_fn, batch = zoo.build("gpt2-lm")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], layers_to_transform=[1], lora_dropout=0.0, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config)
    set_modes(model)
    prefix = Prefix(model, loss_fn)
    for _ in range(2):
        assert difference(model, loss_fn, prefix, batch) <= 1e-12
    assert any("h.0" in name for name in prefix.cut) and prefix.saves > 0.3


class Number(nn.Module):
    "A number that is a parameter, as the logit scale of CLIP."

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.value * x


def test_a_parameter_without_a_dimension():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Number(), nn.Linear(4, 4)).double()
    train_from(model, "2")
    prefix, batch = Prefix(model, square_loss), numbers()
    for _ in range(2):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.reason is None and prefix.hits and model[2].value.item() == 1.5


class Choosy(nn.Module):
    "Takes another way now and then."

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head, self.detour = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return self.head(self.b(x) if self.detour else x)


def test_calls_that_change_from_batch_to_batch():
    model = Choosy().double()
    train_from(model, "head")
    for ways in [(True, False, True), (False, True, False)]:
        prefix = Prefix(model, square_loss)
        for seed, model.detour in enumerate(ways):
            assert difference(model, square_loss, prefix, numbers(seed=seed)) <= 1e-12
            model.detour = not model.detour  # some rows are known, the others do not come that way
            mixed = tuple(map(torch.cat, zip(numbers(seed=seed), numbers(rows=4), strict=True)))
            assert difference(model, square_loss, prefix, mixed) <= 1e-12
        assert untouched(model) and (prefix.reason is not None) == ways[0]


class Later(nn.Module):
    "Reads one more frozen output from some time on, with dropout above."

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head, self.drop, self.late = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5), False

    def forward(self, x):
        first = self.a(x)
        return self.drop(self.head(torch.tanh(self.b(first)) + (first if self.late else 0.0)))


def test_poison_that_is_read_later_is_found_later():
    model = Later().double()
    train_from(model, "head")
    prefix, batch = Prefix(model, square_loss), numbers()
    for model.late in (False, True, False, True):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.cut == ["b"] and model.drop.training


class Swallows(nn.Module):
    "Reads a frozen output in a way that hides one kind of poison or another."

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first = self.a(x)
        return self.head(torch.tanh(self.b(first)) + self.read(first))


@pytest.mark.parametrize("read", [lambda x: torch.where(x > 0, 0.0, 1.0), lambda x: torch.where(x > 10, 0.0, 1.0), torch.square])
def test_what_hides_one_poison_is_found_by_the_other(read):
    model = Swallows(read).double()
    model.a.bias.data[:2] = -20.0  # beyond the second threshold when its sign is turned, and never as it is
    train_from(model, "head")
    prefix, batch = Prefix(model, square_loss), numbers()
    for _ in range(2):
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert "a" in prefix.cut


class Reorders(nn.Module):
    "Its frozen part sees the rows in another order, and the head sees them as they came: for some batches only."

    def __init__(self, order):
        super().__init__()
        self.below, self.head, self.order = Inner(), nn.Linear(4, 4), order

    def forward(self, x):
        if self.order is longest_first_inside:    # the part itself returns its rows in another order
            self.below.order = longest_first(x).tolist()
            return self.head(self.below(x)[torch.tensor(self.below.order).argsort()])
        order = self.order(x)
        x = self.below.first(x)
        return self.head(self.below.last(torch.tanh(x[order]))[order.argsort()])


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.order = nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x):
        return self.last(torch.tanh(self.first(x[self.order])))


def longest_first(x):
    return x[:, 0].argsort(descending=True, stable=True)


def longest_first_inside(x):
    raise AssertionError


def longest_first_in_large_batches(x):
    return longest_first(x) if len(x) > 5 else torch.arange(len(x))


def longest_first_when_one_is_short(x):
    return longest_first(x) if x[:, 0].mean() < 1 else torch.arange(len(x))


def backwards(x):
    return torch.arange(len(x)).flip(0)


def of_length(length, rows=6, seed=0):
    x, y = numbers(rows, seed=seed)
    x[:, 0] = length
    return x, y


def joined(*batches):
    return tuple(map(torch.cat, zip(*batches, strict=True)))


REORDERINGS = [longest_first, longest_first_inside, longest_first_in_large_batches, longest_first_when_one_is_short, backwards]


def reordering(order):
    torch.manual_seed(0)
    model = Reorders(order).double()
    train_from(model, "head")
    return model, Prefix(model, square_loss)


@pytest.mark.parametrize("order", REORDERINGS)
def test_rows_that_change_places_are_never_given_to_one_another(order):
    """The first batches keep their order, or hold one row, so they show nothing; a later one mixes what each of them stored."""
    long, short = of_length(8.0), of_length(-80.0, rows=2, seed=1)
    alone = select_rows(long, torch.tensor([0]))
    mixed, last = joined(short, long), joined(long, short, of_length(-80.0, rows=1, seed=2))
    for batches in [(long, mixed, last), (long, short, mixed, last), (short, long, mixed), (alone, long, short, mixed), (long, last, long)]:
        model, prefix = reordering(order)
        for batch in batches:
            assert difference(model, square_loss, prefix, batch) <= 1e-12
        if order is backwards:
            assert prefix.cut == ["below.first"]
        else:
            assert prefix.reason is not None and prefix.bytes == 0   # what was stored before it showed is gone


@pytest.mark.parametrize("order", REORDERINGS[:4])
def test_a_model_that_does_not_reorder_keeps_its_rows(order):
    model, prefix = reordering(order)
    batches = [of_length(8.0, rows, seed=rows) for rows in (1, 6, 2, 3)]
    for batch in [*batches, joined(*batches), joined(*batches[::-1])]:
        assert difference(model, square_loss, prefix, batch) <= 1e-12
    assert prefix.reason is None and prefix.misses == 12


class Coupled(nn.Module):
    "Its frozen part scales all rows by the largest number, once that is beyond a limit."

    def __init__(self):
        super().__init__()
        self.below, self.head = Inner(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.below.first(x)
        return self.head(self.below.last(x * (100 / x.abs().max()).clamp(max=1)))


def test_rows_stored_before_a_coupling_shows_are_not_trusted():
    large = tuple(1000 * x for x in numbers(rows=2, seed=1))
    for batches in [(numbers(), large, joined(numbers(), large), numbers()), (joined(numbers(), large), numbers())]:
        model = Coupled().double()
        train_from(model, "head")
        prefix = Prefix(model, square_loss)
        for batch in batches:
            assert torch.allclose(prefix(model, batch), square_loss(model, batch), rtol=1e-12)
        assert prefix.cut in ([], ["below.first"])


class InPieces(nn.Module):
    "Calls its frozen part on pieces of the batch, or on each of two inputs, the second one first in small batches."

    def __init__(self, pieces):
        super().__init__()
        self.pieces, self.below, self.head = pieces, nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x):
        if self.pieces:
            return self.head(torch.cat([self.below(x.reshape(-1, 2)[i:i + 8]) for i in range(0, 2 * len(x), 8)]).reshape(-1, 4))
        left, right = x.split(2, 1)
        if len(x) > 4:
            return self.head(torch.cat([self.below(left), self.below(right)], 1))
        return self.head(torch.cat([self.below(right), self.below(left)], 1).roll(2, 1))


@pytest.mark.parametrize("pieces", [True, False])
def test_calls_of_one_module_that_change_their_parts(pieces):
    model = InPieces(pieces).double()
    train_from(model, "head")
    prefix = Prefix(model, square_loss)
    some, others = numbers(rows=4), numbers(rows=9, seed=1)
    for batch in [some, some, others, joined(some, others), some]:
        assert difference(model, square_loss, prefix, batch) <= 1e-12


@pytest.mark.parametrize("inside", [True, False])
def test_what_the_frozen_part_is_given_may_change_with_time(inside):
    """A schedule that a callback moves: of the size of images, say, or of a factor between two frozen layers."""
    class Factor(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.last(torch.tanh(self.first(x if inside else x * factor[0])) * (factor[0] if inside else 1)))

    factor, model = [1.0], Factor().double()
    train_from(model, "head")
    prefix, batch = Prefix(model, square_loss), numbers()
    for step, factor[0] in enumerate((1.0, 1.0, 0.5, 0.5, 2.0)):
        more = joined(numbers(rows=2, seed=step + 1), batch)     # some rows are new, and some are not
        for part in (more, batch, select_rows(batch, torch.tensor([4, 2]))):
            assert torch.allclose(prefix(model, part), square_loss(model, part), rtol=1e-12)
    assert prefix.reason is None and prefix.hits > 18


class Detour(nn.Module):
    "Some rows go through one more frozen layer."

    def __init__(self):
        super().__init__()
        self.first, self.more, self.last, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x, far = torch.tanh(self.first(x)), x[:, :1] > 5
        if far.any():
            x = torch.where(far, self.more(x), x)
        return self.head(self.last(x))


def test_a_layer_that_comes_into_use_later_is_watched_too():
    model, far = Detour().double(), of_length(8.0, rows=3, seed=1)
    train_from(model, "head")
    prefix, near = Prefix(model, square_loss), of_length(0.0)
    for change in (lambda: None, lambda: model.more.weight.data.mul_(2), lambda: model.more.requires_grad_(True)):
        change()
        for batch in (near, joined(near, far), far):
            assert difference(model, square_loss, prefix, batch) <= 1e-12


def test_a_single_row_cut_from_a_table():
    model, (x, y) = small(), numbers()
    prefix = Prefix(model, lambda model, batch: (model(batch[0]).mean(1) - batch[1]).square())
    one = (x[::3][:1], y[:, 2][:1])
    assert one[1].stride() == (4,)
    for _ in range(2):
        assert torch.equal(prefix(model, one), prefix.loss_fn(model, one))
    assert prefix.hits


class Tally(nn.Module):
    "Counts its calls in a buffer, and scales by it."

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_the_proof_does_not_count_as_calls():
    model, batch = small(above=[nn.Linear(4, 4), Tally()]), numbers()
    prefix = Prefix(model, square_loss)
    for step in range(1, 4):
        found = prefix(model, batch)
        assert model[2].calls == step and prefix.reason is None
        model[2].calls -= 1
        assert torch.allclose(found, square_loss(model, batch))


def test_a_prefix_that_costs_nothing_is_not_stored():
    model = zoo.build("bert")[0]
    train_from(model, "layer.0.")
    prefix = Prefix(model, zoo.classifier_loss)
    prefix(model, zoo.build("bert")[2])
    assert "nothing to gain" in prefix.reason and prefix.bytes == 0


def test_a_full_cache_no_longer_asks_for_rows():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss, limit=32)
    prefix(model, batch)
    before = model[0].examples
    other = numbers(seed=1)
    assert torch.equal(prefix(model, other), square_loss(model, other)) and model[0].examples == before + 2 * 6
    assert prefix.misses == 12


@pytest.fixture
def nothing_collected():
    "A compiler notes which models are counted by now, and stops where one of them is collected meanwhile."
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_compiled_and_replicated_models_are_left_alone(nothing_collected):
    model, batch = small(), numbers()
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        prefix = Prefix(wrapped, square_loss)
        assert torch.allclose(prefix(wrapped, batch), square_loss(wrapped, batch)) and "compiled or replicated" in prefix.reason
    compiled = small()
    compiled.compile(backend="eager")
    prefix = Prefix(compiled, square_loss)
    assert torch.allclose(prefix(compiled, batch), square_loss(compiled, batch)) and "compiled or replicated" in prefix.reason
    loss_fn = torch.compile(square_loss, backend="eager")
    prefix = Prefix(model, loss_fn)
    assert torch.allclose(prefix(model, batch), loss_fn(model, batch)) and "loss function is compiled" in prefix.reason
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    prefix = Prefix(model, square_loss)
    prefix(model, batch)
    assert prefix.reason == "nothing trains"


def test_rows_from_inference_mode_serve_training():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss)
    with torch.inference_mode():
        prefix(model, batch)
    assert prefix.misses == 6 and difference(model, square_loss, prefix, batch) <= 1e-12 and prefix.misses == 6


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), st.randoms())
def test_keys_tell_rows_apart_and_nothing_else(rows, width, dtype, random):
    values = torch.tensor([[random.randint(0, 1) for _ in range(width)] for _ in range(rows)]).to(dtype)
    keys = row_keys((values, torch.tensor(3.0), "constant"), b"secret")
    assert keys is not None and all(len(key) == 16 for key in keys)
    for i in range(rows):
        for j in range(rows):
            assert (keys[i] == keys[j]) == torch.equal(values[i], values[j])
    assert row_keys((values, torch.tensor(4.0), "constant"), b"secret") != keys
    assert row_keys((values, torch.tensor(3.0), "constant"), b"other") != keys
    assert row_keys((values.flip(0), torch.tensor(3.0), "constant"), b"secret") == keys[::-1]
    assert row_keys({"x": values}, b"secret") != row_keys({"y": values}, b"secret")


@pytest.mark.parametrize("make", [lambda folder: Shelf(100), lambda folder: FileShelf(100, folder)])
def test_shelf(make, tmp_path):
    shelf = make(tmp_path)
    row = [torch.arange(4.0).view(1, 4), torch.tensor([[True, False]]), torch.ones(2, 1, 3, dtype=torch.bfloat16)]
    shelf.put(b"a", row)
    shelf.put(b"a", row)
    assert shelf.bytes == 16 + 2 + 12 and b"a" in shelf and b"b" not in shelf
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(shelf.get(b"a"), row, strict=True))
    shelf.put(b"b", [torch.zeros(1, 100)])
    assert b"b" not in shelf and shelf.full
    shelf.put(b"c", [torch.zeros(1, 2)])
    assert b"c" in shelf and shelf.bytes == 38
    shelf.clear()
    assert shelf.bytes == 0 and b"a" not in shelf and not shelf.full


@settings(max_examples=50)
@given(st.floats(1e-4, 1.0), st.integers(1, 500), st.floats(0.05, 1.0))
def test_hit_share(rate, steps, room):
    share = hit_share(rate, steps, room)
    visits = rate * steps
    exact = room * (1 - (1 - (1 - rate) ** steps) / visits)
    assert share == pytest.approx(exact, abs=1e-9) and -1e-12 <= share < room
    assert hit_share(rate, steps + 1, room) >= share - 1e-12
    assert abs(hit_share(visits / 1e7, int(1e7), 1.0) - (1 - (1 - math.exp(-visits)) / visits)) <= 1e-5 or visits > 100


def test_worth_it():
    assert worth_it(0.01, 300) and not worth_it(0.01, 50) and not worth_it(0.01, 300, room=0.3) and not worth_it(0.0, 10)
    assert hit_share(1.0, 10) == pytest.approx(0.9) and hit_share(0.5, 0) == 0.0
    assert worth_it(0.01, 1, stored=0.6) and hit_share(0.01, 1, stored=0.6) == pytest.approx(0.6)  # near the end nearly all is known
    assert hit_share(1.0, 10, room=0.5, stored=0.5) == pytest.approx(0.5)


def test_how_much_is_stored():
    model, batch = small(), numbers()
    prefix = Prefix(model, square_loss)
    prefix(model, select_rows(batch, torch.arange(3)))
    assert prefix.stored(6) == 0.5 and prefix.stored(2) == 1.0 and prefix.room(6) == 1.0


def test_stored_rows_are_no_view_of_anything():
    model = small()
    prefix, batch = Prefix(model, square_loss), numbers()
    prefix(model, batch)
    output = torch.ones(6, 4)
    form, leaves = prefix.plan.keep(6)(prefix.plan.stored[0], output)
    output.zero_()
    assert leaves[0].shape == (6, 1, 4) and bool((leaves[0] == 1).all()) and form.leaves[0].per == 1


def test_a_loss_that_is_not_one_number_for_each_example_is_named():
    model, batch = small(), numbers()
    with pytest.raises(ValueError, match="one loss per example"):
        Prefix(model, lambda model, batch: square_loss(model, batch).mean())(model, batch)
    assert untouched(model)
