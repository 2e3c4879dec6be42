"""Forms of data, modes of layers and optimizers that a caller brings, and what each could do around a private run."""


import datasets
import pandas as pd
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import TensorDataset

from dpft import DPFrost, Engine, Full, LastLayer, Public, fine_tune
from dpft.data import as_dataset
from dpft.frost import selection
from dpft.method import Request, bounded_rows
from dpft.noise import Keystream, grid_step
from dpft.scores import NoisyAccuracy, apart, noisy_accuracy
from dpft.tuning import tune

TEXTS = {"text": ["a b c", "b c a", "c a b", "a a b"] * 10, "label": [0, 1] * 20}
OTHERS = {"text": ["b b c", "c c a", "c b b"], "label": [0, 1, 1]}
WORDS = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=8, max_position_embeddings=32)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")


def bert():
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(num_labels=2, **WORDS))


def splits(rows):
    parts = {"train": rows, "validation": OTHERS, "test": OTHERS}
    return datasets.DatasetDict({name: datasets.Dataset.from_dict(part) for name, part in parts.items()})


def one_by_one(rows):
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


FORMS = {"columns": dict, "rows": one_by_one, "frame": pd.DataFrame, "set": datasets.Dataset.from_dict, "splits": splits}
KNOBS = dict(epsilon=8.0, progress=False, accountant="rdp")


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def pictures(size=200):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size) % 2)


# ---- data in any form


@pytest.mark.parametrize("form", FORMS)
def test_a_search_counts_the_rows_of_a_data_set_in_any_form(tokenizer, form):
    """The number of columns, or of splits, would be taken for the number of examples: a rate and a delta that are far too large."""
    found = tune(bert(), FORMS[form](TEXTS), Full(), {"learning_rate": [1e-3, 1e-2]}, lambda model: 1.0, trials=2, steps=1, batch_size=5,
                 tokenizer=tokenizer, **KNOBS).guarantee
    assert found.target_delta == 1 / 80 and {one.sample_rate for one in found.planned} == {5 / 40}
    assert "the number of examples, 40" in found.assumed_public


@pytest.mark.parametrize("trained, scored", [("columns", "rows"), ("rows", "frame"), ("frame", "set"), ("set", "columns"),
                                             ("splits", "rows")])
def test_rows_to_score_on_are_read_in_any_form(tokenizer, trained, scored):
    given = dict(steps=1, batch_size=5, tokenizer=tokenizer, **KNOBS)
    run = fine_tune(bert(), FORMS[trained](TEXTS), Full(), evaluate=Public(FORMS[scored](OTHERS), source="the web"), **given)
    assert 0 <= run.scores["accuracy"] <= 1
    assert NoisyAccuracy(FORMS[scored](OTHERS), 1.0).data[0]["text"] == "b b c"
    with pytest.raises(ValueError, match=r"1 of the 3 rows of the public data .* is row 2"):
        both = {"text": [*OTHERS["text"][:2], "a b c"], "label": [0, 1, 1]}
        fine_tune(bert(), FORMS[trained](TEXTS), Full(), evaluate=Public(FORMS[scored](both), source="the web"), **given)


def test_a_person_is_the_same_as_a_whole_number_a_fraction_or_a_text():
    rows = {"x": [0.0, 1.0, 2.0, 3.0], "label": [0, 1, 0, 1], "person": [1, 1, 2, 2]}
    for own, ok in (([1.0, 3.0], False), (["1", "3"], False), ([4.0, 3.0], True), (["1.5", "3"], True)):
        dev = as_dataset(pd.DataFrame({"x": [9.0, 8.0], "label": [0, 1], "person": own}))
        if ok:
            apart(NoisyAccuracy(dev, 1.0, unit="person"), rows, "person")
        else:
            with pytest.raises(ValueError, match="1 of the 2 scored rows belong to people who are trained on too, the first is row 0"):
                apart(NoisyAccuracy(dev, 1.0, unit="person"), rows, "person")


# ---- modes of layers


def test_a_draw_before_the_first_step_wakes_no_layer_that_mixes():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.classifier = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x):
            return self.classifier(self.norm(self.first(x)))

    class Looks(LastLayer):
        def requests(self, context):
            return [Request(0.2, 1, 0.2, "mean")]

        def start(self, context):
            super().start(context)
            total = torch.zeros(2)
            for batch in context.draw(0.2):
                modes.append(context.model.norm.training)
                with torch.no_grad():
                    total += bounded_rows(context.model(batch[0]), 1.0)
            context.release(total, 1.0)

    modes, model = [], Normed()
    before = model.norm.running_mean.clone()
    engine = Engine(model, loss, Looks(), pictures(), epsilon=4.0, batch_size=20, steps=1, accountant="rdp")
    assert modes and not any(modes) and torch.equal(model.norm.running_mean, before) and engine.t == 0


def test_a_later_selection_is_measured_without_dropout_as_the_first_one_is(monkeypatch):
    seen, rounds, own = [], [], selection.gradient_magnitudes

    class Drop(nn.Dropout):
        def forward(self, x):
            seen.append(self.training)
            return super().forward(x)

    def measured(*given, **more):
        seen.clear()
        found = own(*given, **more)
        rounds.append((len(seen), sum(seen)))
        return found

    monkeypatch.setattr(selection, "gradient_magnitudes", measured)
    model = nn.Sequential(nn.Linear(4, 8), Drop(0.5), nn.ReLU(), nn.Linear(8, 8), Drop(0.5), nn.ReLU(), nn.Linear(8, 2))
    method = DPFrost(ratio=0.9, rounds=1, sample_rate=0.2, reselect=2)
    engine = Engine(model, loss, method, pictures(), epsilon=8.0, batch_size=20, steps=4, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in engine:
        assert len(rounds) == 1 + (step.t >= 2)
        for batch in step:
            seen.clear()
            step.add(batch)
            assert any(seen)               # but for the checks
        step.privatize()
        optimizer.step()
        step.done()
    assert len(rounds) == 2 and all(passed and not awake for passed, awake in rounds)


# ---- optimizers


def test_the_lowest_bits_of_a_paid_score_tell_nothing():
    "Every score is a whole number of steps of one grid, however many answers are right."
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    step = grid_step(1.0).item()
    for right in (0, 1):
        data = [(torch.eye(2)[row % 2], row % 2 if row < right else 1 - row % 2) for row in range(64)]
        found = torch.tensor([64 * noisy_accuracy(model, data, 1.0, Keystream(seed), 0) for seed in range(50)], dtype=torch.float64)
        assert torch.equal(found, (found / step).round() * step)
