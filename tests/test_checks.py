"""The start-up check: what it refuses, what it lets through, and that it leaves no trace."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpft import checks
from dpft.checks import Coupled, check

B, V = 16, 20
LENGTHS = torch.tensor([3, 9, 5, 8, 2, 7, 6, 9, 4, 3, 8, 5, 6, 2, 7, 4])

def texts(lengths=LENGTHS, left=False, positions=False):
    "A batch of texts, and what collates some of them by themselves."
    torch.manual_seed(1)
    rows = [torch.randint(5, V, (int(n),)) for n in lengths]
    labels = torch.randint(0, 3, (len(rows),))
    def collate(chosen):
        width = max(len(rows[i]) for i in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for j, i in enumerate(chosen):
            place = slice(width - len(rows[i]), width) if left else slice(len(rows[i]))
            ids[j, place], mask[j, place] = rows[i], 1
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels[chosen]}
        return batch | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {})
    return collate([*range(len(rows))]), collate

class Text(nn.Module):
    "A small text model with one thing about it."

    def __init__(self, kind="plain"):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.e = nn.Embedding(V, 8, max_norm=1.0 if kind == "max_norm" else None)
        self.l, self.h = nn.Linear(8, 8), nn.Linear(8, 3)
        if kind == "tied":
            self.h = nn.Linear(8, V, bias=False)
            self.h.weight = self.e.weight
        if kind == "attention":
            self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        if kind == "lstm":
            self.r = nn.LSTM(8, 8, batch_first=True)
        if kind in ("running mean", "counter"):
            self.register_buffer("m", torch.zeros(8))
        if kind == "rotary":
            self.register_buffer("m", torch.zeros(0), persistent=False)
        if kind == "zero head":
            nn.init.zeros_(self.h.weight)

    def forward(self, batch):
        kind, mask = self.kind, batch["attention_mask"]
        x, m = self.e(batch["input_ids"]), mask[..., None].to(self.e.weight)
        if kind == "attention":
            x = self.a(x, x, x, key_padding_mask=~mask.bool())[0]
        if kind == "lstm":
            x = self.r(x)[0]
        if kind == "rotary":
            if len(self.m) < x.shape[1]:
                self.m = torch.arange(x.shape[1]).to(x) / 10
            x = x * self.m[:x.shape[1], None].cos()
        if kind == "packed":
            out = torch.zeros_like(x)
            out[mask.bool()] = self.l(x[mask.bool()]).relu()
            x = out
        elif kind == "sorted":
            order = mask.sum(1).argsort(descending=True)
            x = self.l(x[order]).relu()[order.argsort()]
        elif kind == "functional":
            x = F.linear(x, self.l.weight, self.l.bias).relu()
        else:
            x = self.l(x).relu()
        if kind == "across":
            pooled = x.mean(1)
            x = x + (torch.softmax(pooled @ pooled.T, -1) @ pooled)[:, None]
        if kind == "capacity":
            x = x * (torch.arange(len(x)) < 10).to(x)[:, None, None]
        if kind == "running mean":
            self.m.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            x = x - self.m
        if kind == "counter":
            self.m += 1
        p = x.mean(1) if kind in ("padding mean", "zero head") else (x * m).sum(1) / m.sum(1)
        if kind == "mixed" and self.training:
            p = 0.7 * p + 0.3 * p[torch.randperm(len(p))]
        return self.h(p)[:, :3]

def text_loss(model, batch):
    return F.cross_entropy(model(batch), batch["labels"], reduction="none")

class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x

def mlp(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3))

def vectors():
    torch.manual_seed(2)
    x, y = torch.randn(B, 6), torch.randint(0, 3, (B,))
    return (x, y), lambda rows: (x[rows], y[rows])

def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

def contrastive(model, batch):
    scores = model(batch[0])
    return ce(model, batch) + (scores - scores.mean(0)).square().sum(1)

def mixup(model, batch):
    order = torch.randperm(len(batch[0]))
    scores = model(0.5 * batch[0] + 0.5 * batch[0][order])
    return F.cross_entropy(scores, batch[1], reduction="none") / 2 + F.cross_entropy(
        scores, batch[1][order], reduction="none") / 2

def checked(model, loss_fn, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the slow way
        return check(model.train(), loss_fn, *data)

OTHER = mlp()

@pytest.mark.parametrize("model, loss_fn, data", [
    (mlp, ce, vectors), (lambda: mlp(nn.Dropout(0.5)), ce, vectors), (lambda: mlp(Noisy()), ce, vectors),
    (Text, text_loss, texts), (lambda: Text("tied"), text_loss, texts),
    (lambda: Text("counter"), text_loss, texts), (lambda: Text("rotary"), text_loss, texts),
    (lambda: mlp(nn.BatchNorm1d(8).eval().requires_grad_(False)), ce, vectors)])
def test_honest_models_are_accepted(model, loss_fn, data):
    model = model()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train = lambda mode=True, own=module: own  # stays in evaluation mode
    report = checked(model, loss_fn, data())
    assert not report.slow

@pytest.mark.parametrize("kind, names", [
    ("functional", {"l.weight", "l.bias"}), ("packed", {"l.weight", "l.bias"}), ("sorted", {"l.weight", "l.bias"}),
    ("attention", {"a.in_proj_weight"}), ("lstm", {"r.weight_hh_l0"})])
def test_what_hooks_do_not_see_is_named(kind, names):
    slow = checked(Text(kind), text_loss, texts()).slow
    assert names <= slow.keys() and "h.weight" not in slow

@pytest.mark.parametrize("model, loss_fn, data, why", [
    (lambda: mlp(nn.BatchNorm1d(8)), ce, vectors, "BatchNorm1d"),
    (lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)), ce, vectors, "BatchNorm1d"),
    (mlp, lambda m, b: ce(m, b).mean().expand(len(b[0])), vectors, "examples beside it"),
    (mlp, lambda m, b: ce(m, b).mean(), vectors, "reduction='none'"),
    (mlp, contrastive, vectors, "examples beside it"), (mlp, mixup, vectors, "examples beside it"),
    (lambda: Text("padding mean"), text_loss, texts, "padding"),
    (lambda: Text("across"), text_loss, texts, "examples beside it"),
    (lambda: Text("capacity"), text_loss, texts, "examples beside it"),
    (lambda: Text("mixed"), text_loss, texts, "examples beside it"),
    (lambda: Text("max_norm"), text_loss, texts, "max_norm writes"),
    (mlp, lambda m, b: ce(OTHER, b), vectors, "the model that it is given")])
def test_coupled_examples_are_refused(model, loss_fn, data, why):
    with pytest.raises(Coupled, match=why):
        checked(model(), loss_fn, data())

@pytest.mark.parametrize("row", (0, 7, B - 1))
def test_an_example_that_is_not_finite_is_left_out_and_hides_no_coupling(row):
    for loss_fn in (ce, contrastive):
        (x, y), _ = vectors()
        x[row] = torch.inf
        data = (x, y), lambda rows, x=x, y=y: (x[rows], y[rows])
        if loss_fn is ce:
            checked(mlp(), loss_fn, data)
        else:
            with pytest.raises(Coupled, match="examples beside it"):
                checked(mlp(), loss_fn, data)

def test_running_statistics_are_refused():
    with pytest.raises(Coupled, match="writes into m "):
        checked(Text("running mean"), text_loss, texts())

def test_a_head_of_zeros_hides_nothing():
    model = Text("zero head")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)  # whose gradients end at the head
    with pytest.raises(Coupled, match="padding"):
        checked(model, text_loss, texts())

def test_a_loss_that_closes_over_the_model_is_compared_like_any_other():
    for kind in ("plain", "padding mean"):
        model = Text(kind)
        def loss_fn(_, batch, model=model):
            return text_loss(model, batch)
        if kind == "plain":
            checked(model, loss_fn, texts())
        else:
            with pytest.raises(Coupled, match="padding"):
                checked(model, loss_fn, texts())

def test_padding_is_found_where_every_probe_is_nearly_full_or_a_mask_says_it():
    for data in (texts([9, 8, 9, 9, 8, 9]), (texts()[0], None)):
        checked(Text(), text_loss, data)
        with pytest.raises(Coupled, match="padding"):
            checked(Text("padding mean"), text_loss, data)

def test_padding_is_tried_up_to_what_is_declared_or_what_the_model_has_room_for():
    class Placed(Text):
        def __init__(self, room):
            super().__init__()
            self.p = nn.Embedding(room, 8)
            self.seen = 0
        def forward(self, batch):
            width = batch["input_ids"].shape[1]
            self.seen = max(self.seen, width)
            return super().forward(batch) + 0 * self.p(torch.arange(width)).sum()
    for room, largest, seen, said in ((40, None, 18, ""), (40, 30, 30, ""), (40, 9, 9, ""),
                                      (12, None, 18, "padding beyond 11"), (9, None, 18, "no room")):
        model = Placed(room)
        report = check(model, text_loss, *texts(), largest=largest)
        assert model.seen == seen
        assert said in report.text() and bool(said) == bool(report.not_checked)

def test_left_padding_needs_positions():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=40,
                                     num_labels=3, pad_token_id=0)
    model = transformers.GPT2LMHeadModel(config).train()
    def loss_fn(model, batch):
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        ids = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, :-1] == 0, -100)
        losses = F.cross_entropy(model(**inputs).logits[:, :-1].transpose(1, 2), ids,
                                 reduction="none", ignore_index=-100)
        return losses.sum(1) / (ids != -100).sum(1).clamp(min=1)
    check(model, loss_fn, *texts(left=True, positions=True))
    with pytest.raises(Coupled, match="padding"):
        check(model, loss_fn, *texts(left=True))

def speech(norm, seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model = transformers.Wav2Vec2ForSequenceClassification(transformers.Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(16, 16, 16), conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2), num_feat_extract_layers=3,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, feat_extract_norm=norm, num_labels=3,
        classifier_proj_size=8, mask_time_length=2)).train()
    lengths = [1600, 400, *torch.randint(400, 1601, (4,)).tolist()]
    if seed % 2:
        lengths = [1600, 1500, 1550, 1600, 1580, 1520]
    clips, labels = [torch.randn(n) for n in lengths], torch.randint(0, 3, (6,))
    def collate(rows):
        width = max(lengths[i] for i in rows)
        mask = torch.stack([(torch.arange(width) < lengths[i]).long() for i in rows])
        values = torch.stack([F.pad(clips[i], (0, width - lengths[i])) for i in rows])
        return {"input_values": values, "attention_mask": mask, "labels": labels[rows]}
    def loss_fn(model, batch):
        scores = model(batch["input_values"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(scores, batch["labels"], reduction="none")
    return model, loss_fn, collate([*range(6)]), collate

@pytest.mark.parametrize("seed", range(4))
def test_a_norm_over_time_is_refused_and_a_norm_over_features_is_not(seed, monkeypatch):
    monkeypatch.setattr(checks, "unseen", lambda *_: ([], []))  # another test's business
    assert "evaluation mode" in check(*speech("layer", seed)).text()  # it masks at random
    with pytest.raises(Coupled, match="padding"):
        check(*speech("group", seed))

@pytest.mark.parametrize("seed", range(3))
def test_random_augmentation_is_accepted_and_a_collator_that_mixes_is_not(seed):
    torch.manual_seed(seed)
    images, labels = torch.randn(B, 3, 6, 6), F.one_hot(torch.randint(0, 3, (B,)), 3).float()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    def flipped(rows):
        flip = torch.rand(len(rows), 1, 1, 1) < 0.5
        return torch.where(flip, images[rows].flip(-1), images[rows]), labels[rows]
    def mixed(rows):
        order = torch.randperm(len(rows))
        return tuple(0.7 * x[rows] + 0.3 * x[rows][order] for x in (images, labels))
    check(model, ce, flipped([*range(B)]), flipped)
    with pytest.raises(Coupled, match="examples beside it"):
        check(model, ce, mixed([*range(B)]), mixed)

def test_a_bfloat16_model_is_compared_in_float32():
    check(Text().bfloat16(), text_loss, *texts())
    with pytest.raises(Coupled, match="padding"):
        check(Text("padding mean").bfloat16(), text_loss, *texts())

def test_what_could_not_be_compared_is_said():
    weight = torch.tensor([1.0, 2.0, 3.0])
    report = check(Text(), lambda m, b: F.cross_entropy(m(b), b["labels"], weight=weight, reduction="none"),
                   *texts())
    assert "float64" in report.text()
    one = texts([7])
    report = check(Text(), text_loss, *one)
    assert "the batch has one" in report.text() and "hooks" in report.text()
    assert report.later == [name for name, _ in Text().named_parameters()]

def test_gradients_that_are_zero_are_not_checked_and_no_reason_to_refuse():
    report = check(mlp(), lambda m, b: 0 * ce(m, b), *vectors())
    assert "gradients, which are zero" in report.text() and len(report.later) == 4

def test_nothing_is_left_behind_even_after_an_exception():
    def state(model):
        return ([x.clone() for x in (*model.parameters(), *model.buffers())],
                [x.data_ptr() for x in (*model.parameters(), *model.buffers())],
                [(m.training, getattr(m, "p", None)) for m in model.modules()],
                [(x.requires_grad, x.dtype, x.grad) for x in model.parameters()],
                torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    for kind in ("counter", "running mean", "plain"):
        model = nn.ModuleDict({"text": Text(kind), "drop": nn.Dropout(0.3), "still": nn.Linear(2, 2)})
        model["still"].requires_grad_(False).eval()
        calls = []
        def loss_fn(model, batch, calls=calls, kind=kind):
            calls.append(np.random.rand() + random.random())  # noqa: NPY002
            if kind == "plain" and len(calls) == 5:
                raise KeyboardInterrupt
            return model["drop"](text_loss(model["text"], batch))
        data = texts()
        before = state(model)
        try:
            check(model, loss_fn, *data)
            assert kind == "counter"
        except (Coupled, KeyboardInterrupt):
            assert kind != "counter"
        after = state(model)
        assert all(torch.equal(x, y) for x, y in zip(before[0], after[0]))
        assert before[1:] == after[1:]


class NearlyTied(nn.Module):
    "A choice that rounding makes, which is another in a large batch, as with a maximum of two numbers that are nearly equal."

    def __init__(self, dtypes):
        super().__init__()
        self.layer, self.dtypes = nn.Linear(3, 2), dtypes

    def forward(self, x):
        hidden = self.layer(x)
        return hidden * (1.001 if len(x) > 4 and hidden.dtype in self.dtypes else 1.0)


@pytest.mark.parametrize(("dtypes", "refused"), [((torch.float32,), False), ((torch.float32, torch.float64), True)])
def test_what_rounding_alone_decides_is_no_influence(dtypes, refused):
    """A network with max-pooling was refused by one first batch in a hundred; in double precision a coupling would show as well."""
    torch.manual_seed(0)
    model, batch = NearlyTied(dtypes), (torch.randn(16, 3), torch.randint(0, 2, (16,)))
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    if refused:
        with pytest.raises(Coupled):
            check(model, loss, batch)
    else:
        check(model, loss, batch)
