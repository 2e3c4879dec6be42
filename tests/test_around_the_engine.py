"""Forms of data, modes of layers and optimizers that a caller brings, and what each could do around a private run."""


import datasets
import pandas as pd
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import TensorDataset

from dpft import DPFrost, Engine, Full, LastLayer, Public, fine_tune
from dpft.data import TensorData, as_dataset, as_task, shared_rows
from dpft.frost import selection
from dpft.method import Request, bounded_rows
from dpft.noise import Keystream, grid_step
from dpft.prepared import prepare
from dpft.scores import NoisyAccuracy, apart, noisy_accuracy
from dpft.tasks import load_data
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


@pytest.mark.parametrize("scored", ["columns", "rows", "frame", "set"])
@pytest.mark.parametrize("trained", FORMS)
def test_rows_to_score_on_are_read_in_any_form(tokenizer, trained, scored):
    given = dict(steps=1, batch_size=5, tokenizer=tokenizer, **KNOBS)
    run = fine_tune(bert(), FORMS[trained](TEXTS), Full(), evaluate=Public(FORMS[scored](OTHERS), source="the web"), **given)
    assert 0 <= run.scores["accuracy"] <= 1
    assert NoisyAccuracy(FORMS[scored](OTHERS), 1.0).data[0]["text"] == "b b c"
    with pytest.raises(ValueError, match=r"1 of the 3 rows of the public data .* is row 2"):
        both = {"text": [*OTHERS["text"][:2], "a b c"], "label": [0, 1, 1]}
        fine_tune(bert(), FORMS[trained](TEXTS), Full(), evaluate=Public(FORMS[scored](both), source="the web"), **given)


def test_rows_in_half_precision_and_pictures_in_files_are_compared_too():
    def half(size):
        return TensorDataset(torch.arange(4.0 * size).view(size, 4).bfloat16(), torch.arange(size) % 2)

    assert shared_rows(Public(half(3), source="the web"), half(9)) == [0, 1, 2]

    from io import BytesIO

    from PIL import Image
    stored = []
    for level in range(4):
        file = BytesIO()
        Image.new("L", (2, 2), level).save(file, "png")
        stored.append({"image": {"bytes": file.getvalue(), "path": None}, "label": 0})
    assert shared_rows(stored[2:], stored[:3]) == [0]


def test_a_person_is_the_same_as_a_whole_number_a_fraction_or_a_text():
    rows = {"x": [0.0, 1.0, 2.0, 3.0], "label": [0, 1, 0, 1], "person": [1, 1, 2, 2]}
    for own, ok in (([1.0, 3.0], False), (["1", "3"], False), ([4.0, 3.0], True), (["1.5", "3"], True)):
        dev = as_dataset(pd.DataFrame({"x": [9.0, 8.0], "label": [0, 1], "person": own}))
        if ok:
            apart(NoisyAccuracy(dev, 1.0, unit="person"), rows, "person")
        else:
            with pytest.raises(ValueError, match="1 of the 2 scored rows belong to people who are trained on too, the first is row 0"):
                apart(NoisyAccuracy(dev, 1.0, unit="person"), rows, "person")


def test_a_data_set_that_changes_its_labels_is_judged_by_what_it_gives():
    class FromOne(torch.utils.data.Dataset):
        "Class numbers from 1, as the files have them; an item counts from 0."
        labels = torch.arange(12) % 3 + 1

        def __len__(self):
            return 12

        def __getitem__(self, row):
            return torch.full((3, 8, 8), row / 12), int(self.labels[row]) - 1

    model = hf.ViTForImageClassification(hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                                      image_size=8, patch_size=4, num_labels=3))
    fine_tune(model, FromOne(), LastLayer(), noise_multiplier=1.0, steps=1, batch_size=4, delta=0.01, progress=False, accountant="rdp")


def test_a_search_may_have_a_loss_of_its_own(tokenizer):
    def own(model, batch):
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return nn.functional.cross_entropy(scores.transpose(1, 2), batch["labels"].clamp(min=0), reduction="none").mean(1)

    masked = hf.BertForMaskedLM(hf.BertConfig(**WORDS))
    written, others = ([{"text": text} for text in rows["text"]] for rows in (TEXTS, OTHERS))
    found = tune(masked, written, Full(), {"learning_rate": [1e-3, 1e-2]}, Public(others, source="the web"), trials=2, steps=1,
                 batch_size=5, loss_fn=own, tokenizer=tokenizer, **KNOBS)
    assert found.best is not None


MOODS = {"review": ["a b", "c a b"] * 6, "sentiment": ["positive", "negative"] * 6}
NAMED = ("review", "sentiment")


@pytest.mark.parametrize("classes", [2, ["negative", "positive"]])
def test_texts_under_any_name_are_class_names_where_there_are_classes(tmp_path, classes):
    """Otherwise nobody could learn a column of class names that is not called label."""
    pd.DataFrame(MOODS).to_csv(tmp_path / "a.csv", index=False)
    for task in (load_data(str(tmp_path / "a.csv"), columns=NAMED, classes=classes), as_task(MOODS, NAMED, classes=classes)):
        assert (task.kind, task.columns, task.classes) == ("text", NAMED, ("negative", "positive"))
    assert load_data(str(tmp_path / "a.csv"), columns=NAMED).kind == "causal"
    with pytest.raises(ValueError, match=r"cannot tell which of .* call it 'label' if it holds the names of classes"):
        load_data(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("described", [False, True])
def test_a_model_that_classifies_takes_the_last_of_the_named_columns_for_its_label(tokenizer, described):
    data = as_task(MOODS, NAMED, classes=2) if described else MOODS
    ready = prepare(bert(), data, tokenizer, NAMED)
    assert ready.schema.line() == "reads: review; label: sentiment" and ready.classes == ("negative", "positive")
    assert ready.train.labels.tolist() == [1, 0] * 6
    assert ready.model.config.id2label == {0: "negative", 1: "positive"}    # as a saved model says them
    writer = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    assert described or prepare(writer, MOODS, tokenizer, NAMED).schema.kind == "causal"


def test_a_model_may_return_its_scores_in_a_dictionary_and_its_rows_have_the_names_that_it_takes():
    class Said(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return {"logits": self.layer(x)}

    given = dict(noise_multiplier=1.0, steps=1, batch_size=20, delta=0.01, progress=False, accountant="rdp")
    fine_tune(Said(), pictures(40), Full(), **given)
    one, other, labels = torch.randn(40, 4), torch.randn(40, 4), torch.arange(40) % 2
    with pytest.raises(ValueError, match="pass loss_fn="):
        fine_tune(nn.Bilinear(4, 4, 2), TensorDataset(one, other, labels), Full(), **given)
    rows = [{"input": one[row], "label": int(labels[row])} for row in range(40)]
    fine_tune(nn.Linear(4, 2), rows, Full(), **given)


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


def test_a_run_that_is_refused_for_its_optimizer_leaves_the_folder_to_a_corrected_one(tmp_path):
    def run(**knobs):
        torch.manual_seed(0)
        return fine_tune(nn.Linear(4, 2), pictures(), Full(), steps=2, batch_size=20, checkpoint=tmp_path, **KNOBS, **knobs)

    for wrong in (dict(optimizer="adamW"), dict(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))):
        with pytest.raises(ValueError):
            run(**wrong)
    run()


@pytest.mark.parametrize("given, said", [
    (lambda o: torch.optim.lr_scheduler.StepLR(o, 1), "this one fails at 0 .*calls its parameter optimizer"),
    (lambda share: "fast", "this one fails at 0"), (lambda share: float("nan"), "a factor of the learning rate is a finite number")])
def test_a_schedule_that_gives_no_factor_is_named(given, said):
    with pytest.raises(ValueError, match=said):
        fine_tune(nn.Linear(4, 2), TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), Full(), steps=2, schedule=given, **KNOBS)


def test_a_loss_of_torch_that_takes_scores_is_named():
    with pytest.raises(TypeError, match=r"loss_fn=CrossEntropyLoss\(\) takes scores and labels; pass loss_fn=, a function"):
        fine_tune(nn.Linear(4, 2), TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), Full(), steps=2,
                  loss_fn=nn.CrossEntropyLoss(reduction="none"), **KNOBS)


def test_vectors_in_tensor_data_stay_vectors():
    rows, labels = torch.randn(40, 4), torch.arange(40) % 2
    data = TensorData(rows.double(), labels, mean=(1.0, 0.0, 0.0, 0.0), std=(2.0,))
    found, _ = data.batch([3, 5])
    torch.testing.assert_close(found, (rows[[3, 5]] - torch.tensor([1.0, 0, 0, 0])) / 2)
    fine_tune(nn.Linear(4, 2), data, Full(), steps=1, **KNOBS)


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


def test_what_is_promised_of_paid_scores_says_that_they_lie_on_a_grid():
    rows, scored = (TensorDataset(torch.randn(size, 4), torch.arange(size) % 2) for size in (40, 20))
    run = fine_tune(nn.Linear(4, 2), rows, Full(), steps=1, evaluate=NoisyAccuracy(scored), **KNOBS)
    assert run.score_guarantee.secure_mode
