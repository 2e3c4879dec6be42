"""Features by row number: the sums are those of the full pass, whatever is stored, and what cannot be stored is not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import EfficientNetConfig, EfficientNetForImageClassification

from dpft.features import ENOUGH, Features, Store
from dpft.freezing import layers
from dpft.gradients import clipped_sum
from dpft.models import set_modes
from dpft.oracle import batch_rows, select_rows


def build(name, which):
    "A model of the zoo whose lower half, or all but its head, is frozen."
    if name == "efficientnet":
        torch.manual_seed(0)
        model = EfficientNetForImageClassification(EfficientNetConfig(
            image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, num_labels=3)).double()
        loss_fn, batch = zoo.classifier_loss, {"pixel_values": torch.randn(5, 3, 32, 32).double(), "labels": torch.arange(5) % 3}
        lower = [model.efficientnet]
    else:
        model, loss_fn, batch = zoo.build(name)
        found = layers(model)
        lower = [nn.ParameterList(x.parameters) for x in (found[:-1] if which == "head" else found[:(len(found) + 1) // 2])]
    for part in lower:
        part.requires_grad_(False)
    set_modes(model)
    return model, loss_fn, batch


def sums(model, loss_fn, batch):
    found = clipped_sum(model, loss_fn, batch, 0.1)
    return torch.cat([found[name].flatten() for name in sorted(found)])


def agree(model, loss_fn, features, batch, keys):
    "Whether the clipped sums with features are those without."
    wanted = sums(model, loss_fn, batch)
    with features.rows(batch, keys):
        return torch.allclose(sums(model, features, batch), wanted, rtol=1e-9, atol=1e-12)


def pair(width=48):
    "A frozen trunk with a head, in float64."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()), nn.Linear(8, 3)).double()
    model[0].requires_grad_(False)
    return model, (torch.randn(6, width).double(), torch.arange(6) % 3)


@pytest.mark.parametrize(("name", "which"), [
    ("bert", "half"), ("bert", "head"), ("roberta", "half"), ("gpt2", "half"), ("vit", "half"), ("vit", "head"), ("llama", "half"),
    ("cnn", "half"), ("cnn", "head"), ("efficientnet", "head")])
def test_sums_are_those_of_the_full_pass(name, which):
    model, loss_fn, batch = build(name, which)
    features, rows = Features(model, loss_fn), batch_rows(batch)
    sums(model, features, batch), sums(model, loss_fn, batch)        # checked before anything is stored
    for keys in ([0, 1], [*range(rows)], [*reversed(range(rows))]):
        assert agree(model, loss_fn, features, select_rows(batch, torch.tensor(keys)), keys)
    assert (features.hits, features.misses) == (2 + rows, rows) and not features.off


def test_the_store_skips_the_trunk_and_nothing_else_does():
    model, batch = pair()
    calls = []
    model[0][0].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    features = Features(model, zoo.image_loss)
    for _ in range(2):
        with features.rows(batch, range(6)):
            pass
    features.compared = ENOUGH
    calls.clear()
    with features.rows(batch, range(6)):
        features(model, batch)
        assert not calls
        features(model, select_rows(batch, torch.arange(2)))         # another batch
    features(model, batch)                                           # and outside of a step
    assert calls == [2, 6]


def test_the_wrong_rows_would_show():
    model, batch = pair()
    features = Features(model, zoo.image_loss)
    with features.rows(batch, range(6)):
        pass
    features.compared = ENOUGH
    assert agree(model, zoo.image_loss, features, batch, range(6))
    assert not agree(model, zoo.image_loss, features, batch, [1, 2, 3, 4, 5, 0])


def test_rows_that_read_otherwise_each_time_switch_it_off():
    model, batch = pair()
    features = Features(model, zoo.image_loss)
    with pytest.warns(UserWarning, match="differ from those of the full pass"):
        for turn in range(3):                    # one warning, in the second
            with features.rows((batch[0] + turn, batch[1]), range(6)):
                pass
    assert features.off and agree(model, zoo.image_loss, features, batch, range(6)) and not features.store.rows


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_the_trunk_must_be_off(training):
    model, batch = pair()
    model[0].insert(2, nn.Dropout(0.5))
    model.train(training)
    features = Features(model, zoo.image_loss)
    with features.rows(batch, range(6)):
        pass
    assert (features.split is None or features.split is model[0][2]) if training else features.split is model[1]


def test_dropout_of_the_head_stays_random():
    model, batch = pair()
    model = nn.Sequential(model[0].eval(), nn.Dropout(0.5), model[1])
    features = Features(model, zoo.image_loss)
    with features.rows(batch, range(6)):
        one, other = features(model, batch), features(model, batch)
    assert features.split is model[1] and not torch.equal(one, other)


def test_texts_are_stored_without_padding_and_padded_to_any_length():
    model, loss_fn, batch = build("bert", "half")
    longer = {name: F.pad(value, (0, 4), value=0) if value.ndim == 2 else value for name, value in batch.items()}
    features = Features(model, loss_fn)
    sums(model, features, longer), sums(model, loss_fn, longer)
    for some in (batch, longer, batch):
        assert agree(model, loss_fn, features, some, range(5))
    assert features.misses == 5
    assert [len(features.store.get(i)) for i in range(5)] == batch["attention_mask"].sum(1).tolist()


def reads_padding(model, batch):
    return F.cross_entropy(model(batch["x"].mean(1)), batch["labels"], reduction="none")


def test_a_trunk_that_reads_padding_is_not_stored():
    model, (x, labels) = pair()
    batch = {"x": x.repeat(1, 4).view(6, 4, -1), "attention_mask": torch.ones(6, 4), "labels": labels}
    batch["x"][:, 3], batch["attention_mask"][:2, 3] = 5, 0
    features = Features(model, reads_padding)
    with pytest.warns(UserWarning, match="not stored"), features.rows(batch, range(6)):
        pass


def test_freezing_more_moves_the_split_and_empties_the_store():
    model, batch = pair()
    model = nn.Sequential(*model[0], model[1])
    features = Features(model, zoo.image_loss)
    for frozen, split in [(1, 2), (3, 4)]:
        model[:frozen].requires_grad_(False)
        model[frozen:].requires_grad_(True)
        features.refresh(p for p in model.parameters() if p.requires_grad)
        assert not features.store.rows
        sums(model, features, batch), sums(model, zoo.image_loss, batch)
        assert all(agree(model, zoo.image_loss, features, batch, range(6)) for _ in range(3))
        assert features.split is model[split] and len(features.store.rows) == 6


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: setattr(x, "data", x.data * 2)])
def test_other_weights_below_give_other_features(change):
    model, batch = pair()
    features = Features(model, zoo.image_loss)
    for _ in range(2):
        assert agree(model, zoo.image_loss, features, batch, range(6))
        with torch.no_grad():
            change(model[0][0].weight)
    assert agree(model, zoo.image_loss, features, batch, range(6)) and not features.off


class Around(nn.Module):
    "The head reads two outputs of the trunk."

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 3)
        self.first.requires_grad_(False), self.second.requires_grad_(False)

    def forward(self, x):
        first = self.first(x)
        return self.head(torch.tanh(self.second(first))) + first[:, :3]


class Borrows(nn.Module):
    "The trunk reads a weight that trains."

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(48, 48).requires_grad_(False), nn.Linear(48, 3)

    def forward(self, x):
        return self.head(self.trunk(x) + self.head.bias.sum())


class Recomputed(Around):
    "Its upper half runs again in the backward pass."

    def forward(self, x):
        return checkpoint(lambda y: self.head(torch.tanh(y)), self.second(self.first(x)), use_reentrant=False)


@pytest.mark.parametrize("make", [Around, Borrows, Recomputed])
def test_what_one_tensor_does_not_carry_is_not_stored(make):
    torch.manual_seed(0)
    model, (_, batch) = make().double(), pair()
    features = Features(model, zoo.image_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(agree(model, zoo.image_loss, features, batch, range(6)) for _ in range(3))
    assert features.split is None or make is Recomputed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_file_holds_the_same_rows_and_has_no_name(tmp_path, dtype):
    rows = [torch.randn(n, 3).to(dtype) for n in (1, 4, 2)]
    memory, file = Store(10**6), Store(10**6, tmp_path)
    for key, row in enumerate(rows):
        memory.put(key, row), file.put(key, row)
    assert all(torch.equal(store.get(key), row) for store in (memory, file) for key, row in enumerate(rows))
    assert not [*tmp_path.iterdir()] and memory.bytes == file.bytes and file.get(9) is None


def test_a_full_store_admits_no_more_and_the_sums_stay():
    model, batch = pair()
    features = Features(model, zoo.image_loss, room=2 * 8 * 8)           # two rows of eight float64
    sums(model, features, batch), sums(model, zoo.image_loss, batch)
    assert all(agree(model, zoo.image_loss, features, batch, range(6)) for _ in range(3))
    assert len(features.store.rows) == 2 and features.hits == 4
