"""Which columns are read, what the labels are, in which forms data may come, and what is refused before a charge."""

import lzma
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
import zoo
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from torch import nn
from torch.utils.data import TensorDataset
from zoo import Items

import dpft
from dpft.book.tasks import fingerprint
from dpft.data import TableData, TensorData, as_dataset, as_task, kind_of_task, read_labels, read_schema
from dpft.gradients import clipped_sum, per_example_gradients
from dpft.ledger import Ledger
from dpft.models import load_model
from dpft.prepared import prepare
from dpft.sampling import Units, gather, units_of
from dpft.tasks import load_data, read_file
from dpft.texts import Selected, encode_tags

WORDS = ["[PAD]", "[UNK]", *"abcdefgh"]
TINY = dict(vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=16)
KNOBS = dict(noise_multiplier=1.0, delta=1e-2, steps=1, batch_size=4, accountant="rdp")


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")


def bert(names=2, **config):
    torch.manual_seed(0)
    names = [f"LABEL_{number}" for number in range(names)] if isinstance(names, int) else names
    return hf.BertForSequenceClassification(hf.BertConfig(**TINY | config, id2label=dict(enumerate(names)),
                                                          label2id={name: number for number, name in enumerate(names)}))


# ---- the roles of columns


@pytest.mark.parametrize("columns, unit, line", [
    ({"text": "a", "label": 0, "user": "p"}, "user", "reads: text; label: label; unit: user"),
    ({"text": "a", "user": "p", "label": 0}, None, "reads: text; label: label; not used: user"),
    ({"user": "p", "note": "a", "label": 0, "patient_name": "ann"}, "user",
     "reads: note; label: label; unit: user; not used: patient_name"),
    ({"text": "a", "comment": "b", "label": 0}, None, "reads: text; label: label; not used: comment"),
    ({"hypothesis": "a", "premise": "b", "genre": "x", "label": 0}, None, "reads: premise + hypothesis; label: label; not used: genre"),
    ({"sentence1": "a", "sentence2": "b", "label": 0.5, "idx": 1}, None, "reads: sentence1 + sentence2; label: label; not used: idx"),
    ({"review": "a", "stars": 3}, None, "reads: review; label: stars"),
    ({"review": "a", "stars": 3, "user_id": 7}, None, "reads: review; label: stars; not used: user_id"),
    ({"id": 3, "prompt": "a", "completion": "b"}, None, "reads: prompt; writes: completion; not used: id"),
    ({"instruction": "a", "input": "b", "output": "c"}, None, "reads: instruction + input; writes: output"),
    ({"instruction": "a", "output": "c"}, None, "reads: instruction; writes: output"),
    ({"text": "a"}, None, "writes: text"),
    ({"sentence": "a", "label": 0, "input_ids": [5], "attention_mask": [1], "idx": 3, "user": "p"}, "user",
     "reads: input_ids + attention_mask; label: label; unit: user; not used: sentence, idx"),
    ({"pixel_values": torch.zeros(1, 2, 2), "labels": 0}, None, "reads: pixel_values; label: labels"),
    ({"x": [0.5], "label": 0, "user_id": 4}, "user_id", "reads: x; label: label; unit: user_id"),
    ({"id": "7", "tokens": ["a", "b"], "pos_tags": [4, 5], "ner_tags": [0, 1]}, None,
     "reads: tokens; label: ner_tags; not used: id, pos_tags"),
    ({"text": "a b", "tokens": np.array(["a", "b"], dtype=object), "tags": np.array([0, 1])}, None,
     "reads: tokens; label: tags; not used: text"),
    ({"text": "a", "labels": [0, 1], "keywords": ["x", "y"]}, None, "reads: text; label: labels; not used: keywords"),
    ({"words": ["a", "b"], "labels": ["O", "X"], "speaker": "ann"}, "speaker", "reads: words; label: labels; unit: speaker"),
])
def test_a_schema_says_what_it_takes(columns, unit, line):
    rows = [columns] * 3
    for data in (as_dataset(rows), Items(rows)):
        assert read_schema(data, unit=unit).line() == line


@pytest.mark.parametrize("columns, more, words", [
    ({"title": "a", "member_note": "b", "label": 0}, {}, "cannot tell which of 'title', 'member_note' are texts"),
    ({"text": "a", "one": 1, "two": 2}, {}, "cannot tell which of 'one', 'two' is the label"),
    ({"a": "x", "b": "y"}, {}, "cannot tell which of 'a', 'b' is the label"),
    ({"prompt": "a", "completion": "b", "label": 0}, {}, "cannot tell which of 'prompt', 'completion', 'label'"),
    ({"text": "a", "label": 0}, {"unit": "user"}, "unit='user': no column 'user'; the data has 'text', 'label'; name the one that"),
    ({"text": "a", "label": 0}, {"columns": ("text", "stars")}, "no column 'stars'.* with columns="),
    ({"text": "a", "user": "p", "label": 0}, {"columns": ("text", "user", "label"), "unit": "user"}, "must not read it"),
    ({"text": "a", "label": 0}, {"unit": "label", "columns": ("text", "label")}, "names the unit of privacy"),
])
def test_an_unclear_schema_is_a_question(columns, more, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_schema(as_dataset([columns] * 3), **more)
    assert "\n" not in str(caught.value)


def test_columns_decide_otherwise():
    data = as_dataset([{"title": "a", "note": "b", "user": "p", "label": 0, "stars": 1}] * 3)
    assert read_schema(data, ("title", "note", "stars")).line() == "reads: title + note; label: stars; not used: user, label"
    assert read_schema(data, ("title", "user", "label")).reads == ("title", "user")        # asked for by name
    assert read_schema(data, ("title", "note")).kind == "causal"                           # a text at the end is to be written
    named = as_dataset([{"text": "a", "label": "good"}] * 3)
    assert read_schema(named, ("text", "label")).kind == "text"                            # unless its name says label


VISITS = {"text": ["a", "b", "c", "d"] * 30, "label": [0, 1] * 60, "patient_id": [row // 3 for row in range(120)],
          "user": [row % 2 for row in range(120)], "idx": [*range(120)]}


def test_a_column_that_repeats_as_a_persons_is_said_while_the_unit_is_missing(tokenizer):
    ready = prepare(bert(), VISITS, tokenizer)
    assert ready.reading().split("\n")[1:] == [
        "column 'patient_id' repeats, and each row is protected by itself; to protect whom it names, say unit='patient_id'"]
    assert read_schema(TableData(VISITS), unit="patient_id").hints == ()
    assert read_schema(TableData(VISITS), unit="example").hints == ()


def test_texts_that_are_written_because_of_columns_are_said():
    rows = as_dataset([{"note": "a", "verdict": "good", "prompt": "a", "completion": "b"}] * 3)
    assert read_schema(rows, ("note", "verdict")).hints == (
        "column 'verdict' is a text to be written; if it names classes, say label='verdict'",)
    assert read_schema(rows, ("note", "verdict"), label="verdict").hints == read_schema(rows, ("prompt", "completion")).hints == ()


@pytest.mark.parametrize("given", [dict(unit="user"), {}])
def test_the_model_never_sees_who_wrote_a_row(tokenizer, given):
    "The tokens are those of the texts alone, whatever order the columns stand in."
    people = ["g", "h", "g", "h"]
    data = TableData({"user": people, "text": ["a b", "c", "d", "e f"], "label": [0, 1, 0, 1]})
    ready = prepare(bert(), data, tokenizer, **given)
    tokens = [ready.train[row]["input_ids"].tolist() for row in range(4)]
    assert tokens == [tokenizer(text)["input_ids"] for text in data["text"]]
    assert not {tokenizer.convert_tokens_to_ids(who) for who in people} & {token for row in tokens for token in row}
    assert len(units_of(ready.train, "user")) == 2 and ready.schema.unit == given.get("unit")


# ---- labels


@pytest.mark.parametrize("values, classes, words", [
    ([0, None, 1, float("nan")], None, "2 of 4 rows have no label"),
    (["ham", "", "spam"], None, "1 of 3 rows have no label"), ([0.5, 1.0], 3, "holds fractions"),
    ([0.0, 1.0], None, "whole numbers stored as floats"), ([0.5, float("inf")], None, "row 1 in column 'label' is not finite"),
    ([0, 1, 2], 2, "the label of row 2 is outside the 2 classes"), (["ham", "hma"], ("ham", "spam"), "row 1 in column 'label' is none"),
    (["a", "b", "c"], 2, "has 3 names for 2 classes"), ([0, "a"], None, "neither class numbers nor class names"),
    ([object(), 1], None, "neither class numbers"), ([["a", "b"], ["c", "d"]], None, "a 1 for each class"),
    ([[1, None], [0, 1]], None, "a 1 for each class"), ([[1, 0], [1]], None, "in lists of one length"),
    ([], None, "column 'label' has no rows; give"), ([-1, 0, 1], None, "row 0 is no class number"),
    ([f"note {row}" for row in range(20)], None, "holds 20 different texts"), (["a", "a"], None, "a single class"),
])
def test_bad_labels_are_one_sentence_without_a_value(values, classes, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_labels(values, classes=classes)
    assert "\n" not in str(caught.value) and "hma" not in str(caught.value)


@pytest.mark.parametrize("values, classes, numbers, names, derived", [
    ([0, 1, 1], None, [0, 1, 1], ("0", "1"), True), ([0, 0], None, [0, 0], ("0", "1"), True),
    (["b", "a", "b"], None, [1, 0, 1], ("a", "b"), True), (["b", "a", "b"], ("b", "a"), [0, 1, 0], ("b", "a"), False),
    (["b", "a"], 2, [1, 0], ("a", "b"), True), ([True, False], None, [1, 0], ("0", "1"), True), ([1.0, 0.0], 2, [1, 0], ("0", "1"), False),
    (np.array([1, 0]), None, [1, 0], ("0", "1"), True), ([0, 1] * 20 + [7], 8, [0, 1] * 20 + [7], tuple("01234567"), False),
    ([5, 1], tuple("12345"), [4, 0], tuple("12345"), False), ([0.5, 2.0], None, [0.5, 2.0], (), False),
    ([3, 4], 1, [3.0, 4.0], (), False), ([[1, 0], [1, 1]], 2, [[1, 0], [1, 1]], ("0", "1"), False),
])
def test_labels_are_class_numbers_or_fractions(values, classes, numbers, names, derived):
    found = read_labels(list(values), classes=classes)
    assert (found.values.tolist(), found.classes, found.derived) == (numbers, names, derived)


def test_the_classes_of_the_labels_are_listed_as_public_and_those_of_a_list_are_not():
    rows = [{"text": "a", "label": label} for label in [0, 1, 2] * 4]
    assert as_task(rows).assumed_public == ["the classes 0 to 2"]
    assert as_task(rows, classes=3).assumed_public == []
    known = Dataset.from_list(rows, features=Features({"text": Value("string"), "label": ClassLabel(names=["x", "y", "z", "never"])}))
    assert as_task(known).classes == ("x", "y", "z", "never") and not as_task(known).assumed_public


def test_names_of_classes_have_the_numbers_that_the_model_gives_them(tokenizer):
    data = {"text": ["a", "b", "c"], "label": ["positive", "negative", "positive"]}
    assert prepare(bert(["positive", "negative"]), data, tokenizer).train.labels.tolist() == [0, 1, 0]
    assert prepare(bert(), data, tokenizer).train.labels.tolist() == [1, 0, 1]
    for model, train, said in ((bert(["good", "bad"]), data, "none of the 2 classes"),
                               (bert(["positive", "negative"]), as_task(data), "number their classes differently")):
        with pytest.raises(ValueError, match=said):
            prepare(model, train, tokenizer)


def test_a_named_model_takes_the_names_of_the_classes_and_keeps_them(tokenizer, tmp_path):
    "Transformers' pipeline then answers with them; a checkpoint's own names stay, and another order is refused."
    data = {"text": ["a", "b", "c"] * 4, "label": ["positive", "negative", "positive"] * 4}
    bert().save_pretrained(tmp_path / "new")
    bert(["positive", "negative"]).save_pretrained(tmp_path / "old")
    run = dpft.fine_tune(str(tmp_path / "new"), data, dpft.Full(), tokenizer=tokenizer, progress=False, **KNOBS)
    run.save(tmp_path / "run")
    for config in (run.model.config, dpft.load(tmp_path / "run").config, hf.AutoConfig.from_pretrained(tmp_path / "run")):
        assert config.id2label == {0: "negative", 1: "positive"} and config.label2id["positive"] == 1
    with pytest.raises(ValueError, match="number their classes differently"):
        prepare(str(tmp_path / "old"), data, tokenizer)
    assert load_model(str(tmp_path / "old"), ["bad", "good"]).config.id2label == {0: "positive", 1: "negative"}


def test_a_text_may_have_several_labels(tokenizer):
    rows = [{"text": text, "labels": own} for text, own in zip("abcd", [[1, 0, 1], [0.0, 0.0, 0.0], [1, 1, 0], [0, 1, 0]], strict=True)]
    model = bert(3, problem_type="multi_label_classification")
    ready = prepare(model, rows, tokenizer)
    assert ready.train.labels.tolist() == [row["labels"] for row in rows] and ready.train.labels.is_floating_point()
    named = [{"text": "a", "labels": ["x"]}] * 2
    for other, data, said in ((bert(), rows, "in lists of one length"), (model, named, "a 1 for each class")):
        with pytest.raises(ValueError, match=said):
            prepare(other, data, tokenizer)


def test_a_regression_on_texts_is_for_a_model_with_one_output(tokenizer):
    rows = [{"sentence1": "a", "sentence2": "b", "label": score} for score in (0.5, 2.0, 1.0)]
    with pytest.raises(ValueError, match="holds fractions"):
        prepare(bert(), rows, tokenizer)
    ready = prepare(bert(1), rows, tokenizer)
    assert ready.train.labels.tolist() == [0.5, 2.0, 1.0] and ready.classes == ()


def labelled_in_some_form(form, labels):
    "The same tokens with labels, as people hold them."
    ids = torch.full((len(labels), 3), 4)
    if form == "tensors":
        return TensorDataset(ids, torch.tensor(labels))
    if form == "texts":
        names = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "neu", "pos"])})
        return Dataset.from_dict({"text": ["a b"] * len(labels), "label": labels}, names)
    return Dataset.from_dict({"input_ids": ids.tolist() if form == "tokens" else [[4, 5][:1 + row % 2] for row in range(len(ids))],
                              "labels": labels})


@pytest.mark.parametrize("form", ["tensors", "texts", "tokens", "ragged"])
@pytest.mark.parametrize("loop", ["fine_tune", "Engine"])
def test_labels_beyond_the_outputs_of_a_model_are_refused_before_anything_is_charged(tmp_path, tokenizer, form, loop):
    """A step that meets one has been charged, and corrected data are no longer the data of the charge."""
    model, given, data = bert(), dict(KNOBS, ledger=tmp_path / "book.sqlite"), labelled_in_some_form(form, [0, 1] * 4 + [2])
    with pytest.raises(ValueError, match=r"^the label of row 8 is "):
        if loop == "fine_tune":
            dpft.fine_tune(model, data, dpft.LastLayer(), tokenizer=tokenizer, progress=False, **given)
        else:
            dpft.Engine(model, None, dpft.LastLayer(), prepare(model, data, tokenizer).train, **given)
    with Ledger(tmp_path / "book.sqlite") as ledger:
        assert ledger.runs() == []


@pytest.mark.parametrize("label, kind", [
    ([0, 1], "text"), ([[5, 6, 7], [8, 9]], "causal"), ([[-100, 6, 7], [-100, 9]], "causal"), ([[0, 1, 0], [1, -100]], "tagging"),
    ([[5, 6], [8]], "seq2seq")])
def test_labels_of_tokens_say_which_head_a_named_model_needs(label, kind):
    data = as_dataset({"input_ids": [[5, 6, 7], [8, 9]], "labels": label})
    assert kind_of_task(data, read_schema(data)) == kind and as_task(data).kind == kind


# ---- forms


def tokenised(rows=6):
    data = {"sentence": ["a b", "c"] * (rows // 2), "label": [0, 1] * (rows // 2), "idx": list(range(rows)),
            "input_ids": [[2, 3, 0], [4, 0, 0]] * (rows // 2), "attention_mask": [[1, 1, 0], [1, 0, 0]] * (rows // 2)}
    return Dataset.from_dict(data)


FORMS = {
    "datasets.Dataset": Dataset.from_list,
    "torch format": lambda rows: Dataset.from_list(rows).with_format("torch"),
    "splits": lambda rows: DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:2])}),
    "list": list,
    "frame": pd.DataFrame,
    "columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "torch Dataset": Items,
    "transform": lambda rows: Dataset.from_list(rows).with_transform(lambda batch: batch),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenised_data_set_in_every_form_gives_one_batch(form):
    ready = prepare(bert(), FORMS[form](tokenised().to_list()))
    batch = {name: values.tolist() for name, values in gather(ready.train, [1, 0]).items()}
    padded = form in ("torch Dataset", "transform")
    assert batch == {"input_ids": [[4, 0, 0], [2, 3, 0]] if padded else [[4, 0], [2, 3]],
                     "attention_mask": [[1, 0, 0], [1, 1, 0]] if padded else [[1, 0], [1, 1]], "labels": [1, 0]}
    assert len(ready.train) == 6 and fingerprint(ready.train) and ready.assumed_public.count("the tokenizer's vocabulary") == 1


@pytest.mark.parametrize("form", FORMS)
def test_texts_in_every_form_give_the_same_tokens(form, tokenizer):
    rows = [{"user": f"p{i // 2}", "text": text, "label": i % 2} for i, text in enumerate(["a b", "c", "d e f", "g"])]
    ready = prepare(bert(), FORMS[form](rows), tokenizer, unit="user")
    assert ready.train.batch([2, 1])["input_ids"].tolist() == [[5, 6, 7], [4, 0, 0]]
    assert ready.schema.line() == "reads: text; label: label; unit: user" and len(units_of(ready.train, "user")) == 2
    dev = ready.encoded([{"text": "d", "label": 1}])
    assert dev.batch([0])["input_ids"].tolist() == [[5]] and dev.labels.tolist() == [1]


@pytest.mark.parametrize("data, words", [
    (lambda: tokenised().to_iterable_dataset(), "this IterableDataset has no rows by number"),
    (lambda: (row for row in [{"a": 1}]), "this generator has no rows"), (lambda: "train.csv", "load it first with dpft.load_data"),
    (lambda: torch.utils.data.DataLoader([1, 2]), "this DataLoader has no rows by number, .* give the data set inside"),
    (lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are named 'a'"),
    (lambda: [{"text": "a", "label": 1}, {"text": "b"}], "rows 0 and 1 differ: only one of them has 'label'"),
    (lambda: (torch.zeros(3, 2), torch.zeros(3)), "give torch.utils.data.TensorDataset"),
    (lambda: {"text": ["a"], "label": [0, 1]}, "columns must be of one length"),
])
def test_what_cannot_be_drawn_from_is_refused(data, words):
    with pytest.raises(ValueError, match=words) as caught:
        prepare(nn.Linear(1, 1), data())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["padding", "tokens", "seq2seq", "default"])
def test_collators_of_transformers(kind, tokenizer):
    collate = {"padding": hf.DataCollatorWithPadding(tokenizer), "tokens": hf.DataCollatorForTokenClassification(tokenizer),
               "seq2seq": hf.DataCollatorForSeq2Seq(tokenizer), "default": hf.default_data_collator}[kind]
    labels = [0, 1] if kind in ("padding", "default") else [[1, 2], [3]]
    ids = [[2, 3], [4, 5]] if kind == "default" else [[2, 3], [4]]
    data = Dataset.from_dict({"input_ids": ids, "labels" if kind != "padding" else "label": labels, "idx": [0, 1], "sentence": ["a", "b"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = prepare(bert(), data, unit=None, collate_fn=collate).train
        assert rows[0].keys() == set(data.column_names) - {"idx", "sentence"}
        batch = gather(rows, [1, 0], collate)
    assert type(batch) is dict and batch["input_ids"].tolist() == ([[4, 5], [2, 3]] if kind == "default" else [[4, 0], [2, 3]])
    assert batch["labels"].tolist() == ([1, 0] if labels == [0, 1] else [[3, -100], [1, 2]])


@pytest.mark.parametrize("channels, name", [(1, "cnn"), (3, "mlp")])
@pytest.mark.parametrize("form", [Dataset.from_dict, lambda columns: [dict(zip(columns, row)) for row in zip(*columns.values())]])
def test_a_named_model_is_made_for_the_pictures_that_are_given(form, name, channels):
    from PIL import Image as Picture

    shape = (16, 16, 3)[:2 + (channels > 1)]
    pictures = [Picture.fromarray(np.full(shape, i, np.uint8)) for i in range(6)]
    ready = prepare(name, form({"image": pictures, "label": [0, 1] * 3}))
    assert ready.recipe["image_shape"] == (channels, 16, 16) and isinstance(ready.train, TensorData)
    assert ready.model(ready.train.batch([0, 1])[0]).shape == (2, 2)
    assert len(ready.encoded(form({"image": pictures[:2], "label": [1, 0]}))) == 2


def test_no_repr_shows_a_row(tokenizer):
    rows = [{"text": "a b", "label": i % 2, "user": "ann"} for i in range(4)]
    ready = prepare(bert(), rows, tokenizer, unit="user")
    data = [as_dataset(rows), ready, ready.train, Selected(as_dataset(rows), {"text": "text"}), Units([1, 1, 2]),
            TensorData(torch.full((2, 1, 2, 2), 77.0), torch.tensor([0, 1]))]
    for shown in map(repr, data):
        assert not any(secret in shown for secret in ("ann", "a b", "77", "4 rows", "tensor("))


# ---- texts for a model


LONG = [{"text": "a b c d " * 5 if row else "a b c", "label": row % 2} for row in range(4)]


@pytest.mark.parametrize("kind, places", [("Bert", 8), ("Roberta", 6), ("OPT", 8)])
def test_a_row_is_cut_to_the_places_that_a_model_has(tokenizer, kind, places):
    """It failed in the forward pass, after its plan was charged."""
    more = {"ffn_dim": 4, "word_embed_proj_dim": 8} if kind == "OPT" else {}
    model = getattr(hf, f"{kind}ForSequenceClassification")(getattr(hf, f"{kind}Config")(
        **TINY | dict(max_position_embeddings=8, pad_token_id=1 if kind == "Roberta" else 0), **more))
    ready = prepare(model, LONG, tokenizer)
    assert ready.train.lengths.tolist() == [3, places, places, places]
    assert ready.reading().endswith(f"; at most {places} tokens of a row")
    model(**ready.train.batch([0, 1]))
    assert ready.encoded([LONG[1]]).lengths.tolist() == [places]


def test_the_length_of_texts_is_a_setting(tokenizer, capsys):
    run = dpft.fine_tune(bert(), LONG * 3, dpft.Full(), tokenizer=tokenizer, max_length=5, **KNOBS)
    assert run.prepared.train.lengths.tolist() == [3, 5, 5, 5] * 3 and run.prepared.encoded([LONG[1]]).lengths.tolist() == [5]
    assert "at most 5 tokens of a row" in capsys.readouterr().err
    with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
        dpft.fine_tune(bert(), LONG, dpft.Full(), tokenizer=tokenizer, max_length=0, **KNOBS)


def test_tokens_without_a_place_are_refused_before_anything_is_spent():
    rows = [{"input_ids": [2] * (17 if row == 3 else 4), "labels": row % 2} for row in range(6)]
    with pytest.raises(ValueError, match="row 3 has more tokens than the 16 that the model has places for"):
        dpft.fine_tune(bert(), rows, dpft.Full(), progress=False, **KNOBS)


CORPUS = [{"tokens": ["a", "b c", "d"], "ner_tags": ["O", "X", "O"]}, {"tokens": ["e"], "ner_tags": ["X"]}]


@pytest.mark.parametrize("form", ["datasets.Dataset", "frame", "torch Dataset"])
def test_a_word_gives_its_tag_to_its_first_token(form, tokenizer):
    ready = prepare(zoo.build("bert")[0], FORMS[form](CORPUS), tokenizer)
    batch = ready.train.batch([1, 0])
    assert batch["input_ids"].tolist() == [[6, 0, 0, 0], [2, 3, 4, 5]]                  # "b c" are two tokens
    assert batch["labels"].tolist() == [[1, -100, -100, -100], [0, 1, -100, 0]]
    assert ready.kind == "tagging" and ready.classes == ("O", "X") and "the classes O, X" in ready.assumed_public
    assert ready.encoded([{"tokens": ["g"], "ner_tags": ["O"]}]).batch([0])["labels"].tolist() == [[0]]


@pytest.mark.parametrize("change, words", [
    (dict(ner_tags=["O"]), "row 1 has 2 words in column 'tokens' and 1 tags in 'ner_tags'"),
    (dict(tokens=[], ner_tags=[]), "row 1 has 0 words"), (dict(ner_tags=["O", "Y"]), "a tag of row 1 in column 'ner_tags' is .* none of"),
    (dict(ner_tags=["O", 1]), "neither class numbers nor class names"), (dict(ner_tags=["O", None]), "a tag of row 1 in .* is missing")])
def test_a_corpus_that_does_not_match_is_refused(change, words, tokenizer):
    rows = as_dataset([CORPUS[0], {"tokens": ["f", "g"], "ner_tags": ["O", "X"]} | change])
    with pytest.raises(ValueError, match=words) as caught:
        encode_tags(rows, tokenizer, ("tokens", "ner_tags"), classes=("O", "X"))
    assert "\n" not in str(caught.value) and "Y" not in str(caught.value)


def writer(name):
    "A tiny language model that writes, or only looks like one."
    torch.manual_seed(0)
    t5 = dict(vocab_size=12, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return {"gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=16)),
            "decoder": lambda: hf.BertLMHeadModel(hf.BertConfig(is_decoder=True, **TINY)),
            "encoder": lambda: hf.BertLMHeadModel(hf.BertConfig(**TINY)),
            "masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**TINY)),
            "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(
                vocab_size=12, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=1,
                decoder_start_token_id=1, forced_eos_token_id=1)),
            "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5))}[name]()


@pytest.mark.parametrize("name, said", [
    ("gpt2", None), ("decoder", None), ("t5", None), ("bart", None), ("masked", "the head of BertForMaskedLM is for masked"),
    ("encoder", "BertLMHeadModel sees the tokens that it is to predict; load it as a decoder")])
def test_texts_are_continued_only_by_a_model_that_does_not_see_what_it_predicts(tokenizer, name, said):
    data, model = [{"prompt": "a b", "completion": "c d"}] * 12, writer(name)
    def run():
        return dpft.fine_tune(model, data, dpft.Full(), tokenizer=tokenizer, progress=False, **KNOBS)
    prepare(model, data, tokenizer, loss_fn=zoo.language_loss)       # which may read the texts in a way of its own
    if said is None:
        assert run().epsilon > 0
    else:
        with pytest.raises(ValueError, match=said):
            run()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_gets_prompt_and_completion_apart(tokenizer, name):
    rows = [{"prompt": "a b c", "completion": "d", "user": "p"}, {"prompt": "a", "completion": "e f", "user": "q"},
            {"prompt": "b", "completion": "g", "user": "p"}]
    model = writer(name)
    ready = prepare(model, rows, tokenizer, unit="user")
    batch = {name: values.tolist() for name, values in gather(ready.train, [0, 1]).items() if name != "token_type_ids"}
    assert batch == {"input_ids": [[2, 3, 4], [2, 0, 0]], "attention_mask": [[1, 1, 1], [1, 0, 0]], "labels": [[5, -100], [6, 7]]}
    collated = gather(ready.train, [0, 1], hf.DataCollatorForSeq2Seq(tokenizer, model))
    assert all(collated[name].tolist() == batch[name] for name in batch) and "decoder_input_ids" in collated
    assert ready.kind == "seq2seq" and len(units_of(ready.train, "user")) == 2 and "the tokenizer's vocabulary" in ready.assumed_public
    with pytest.raises(ValueError, match="reads one text and writes another; name both"):
        prepare(writer("t5"), {"text": ["a", "b"]}, tokenizer)


# ---- a loss or a collate function of one's own


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 2)

    def forward(self, x):
        return self.line(x)


GRAPHS = [{"x": [row / 8, 1.0], "edge_index": [row % 3, 0], "bmi_index": float(row), "y": row % 2, "patient": f"p{row // 2}"}
          for row in range(16)]


@pytest.mark.parametrize("own", ["loss", "collate"])
@pytest.mark.parametrize("form", [list, pd.DataFrame, Dataset.from_list])
@pytest.mark.parametrize("loop", ["fine_tune", "Engine"])
def test_a_loss_or_a_collate_function_of_ones_own_gets_every_column_but_the_units(own, form, loop):
    """What a name may stand for is not guessed where the user reads the columns."""
    seen = set()

    def loss(model, batch):
        seen.update(batch)
        return nn.functional.cross_entropy(model(batch["x"].float()), batch["y"], reduction="none")

    def collate(items):
        seen.update(*items)
        return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in ("x", "y")}

    knobs = dict(unit="patient", **KNOBS, **({"collate_fn": collate} if own == "collate" else {}))
    if loop == "fine_tune":
        assert dpft.fine_tune(Graph(), form(GRAPHS), dpft.Full(), loss_fn=loss, progress=False, **knobs).guarantee.unit == "patient"
    else:
        for step in dpft.Engine(Graph(), loss, dpft.Full(), form(GRAPHS), **knobs):
            step.take()
    assert seen == {"x", "edge_index", "bmi_index", "y"}


def test_the_columns_that_a_models_forward_takes_are_read_and_the_others_named():
    ready = prepare(Graph(), [{**row, "label": row["y"]} for row in GRAPHS], unit="patient")
    assert ready.reading() == "reads: x; label: label; unit: patient; not used: edge_index, bmi_index, y"
    assert set(ready.train[0]) == {"x", "labels"}
    ready = prepare(Graph(), GRAPHS, unit="patient", columns=("x",), label="y")
    assert ready.reading().startswith("reads: x; label: y; unit: patient") and set(ready.train[0]) == {"x", "labels"}


class Molecules(nn.Module):
    """A graph network over sums of neighbours: of graphs end to end, or with one dense adjacency each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, edges=None, graph=None, adjacency=None):
        hidden = torch.relu(self.inner(x))
        if adjacency is not None:
            return self.outer((adjacency.to(hidden) @ hidden).sum(1))
        sums = hidden.new_zeros(int(graph.max()) + 1, 4).index_add(0, graph[edges[:, 0]], hidden[edges[:, 1]])
        return self.outer(sums)


RINGS = [{"x": [[row / 8, place, 1.0] for place in range(3 + row % 3)], "edges": [[a, (a + 1) % (3 + row % 3)] for a in range(3 + row % 3)],
          "y": row % 2} for row in range(16)]


def end_to_end(items):
    starts = np.cumsum([0, *(len(item["x"]) for item in items)])
    return {"x": torch.cat([torch.tensor(item["x"]) for item in items]), "y": torch.tensor([item["y"] for item in items]),
            "edges": torch.cat([torch.tensor(item["edges"]) + start for item, start in zip(items, starts, strict=False)]),
            "graph": torch.cat([torch.full((len(item["x"]),), row) for row, item in enumerate(items)])}


def dense(items):
    most = max(len(item["x"]) for item in items)
    x, adjacency = torch.zeros(len(items), most, 3), torch.zeros(len(items), most, most)
    for row, item in enumerate(items):
        x[row, :len(item["x"])] = torch.tensor(item["x"])
        adjacency[row, *torch.tensor(item["edges"]).T] = 1
    return {"x": x, "adjacency": adjacency, "y": torch.tensor([item["y"] for item in items])}


def of_each_graph(model, batch):
    return nn.functional.cross_entropy(model(**{name: values for name, values in batch.items() if name != "y"}), batch["y"],
                                       reduction="none")


@pytest.mark.parametrize("first", ["x", "y"])
def test_graphs_whose_rows_a_collator_joins_are_refused_before_a_charge(tmp_path, first):
    def collate(items):
        batch = end_to_end(items)
        return {first: batch[first], **batch}
    with pytest.raises(ValueError, match="pad and stack what it packs end to end, such as graphs"):
        dpft.fine_tune(Molecules(), RINGS, dpft.Full(), loss_fn=of_each_graph, collate_fn=collate, ledger=tmp_path / "ledger.sqlite",
                       progress=False, **KNOBS)
    assert not (tmp_path / "ledger.sqlite").exists() or not dpft.Ledger(tmp_path / "ledger.sqlite").runs()


def test_graphs_with_one_dense_adjacency_each_are_bounded_exactly():
    model, batch = Molecules().double(), dense(RINGS[:6])
    batch = {name: values.double() if values.is_floating_point() else values for name, values in batch.items()}
    rows = per_example_gradients(model, of_each_graph, batch)
    norms = torch.cat([values.flatten(1) for values in rows.values()], 1).norm(dim=1)
    factors = (norms.median() / norms).clamp(max=1)
    for name, value in clipped_sum(model, of_each_graph, batch, float(norms.median())).items():
        assert torch.allclose(value, torch.tensordot(factors, rows[name], 1), rtol=1e-6)
    assert dpft.fine_tune(Molecules(), RINGS, dpft.Full(), loss_fn=of_each_graph, collate_fn=dense, progress=False, **KNOBS).epsilon > 0


@pytest.mark.parametrize("collate, said", [
    (hf.DataCollatorWithFlattening(), "collate_fn=DataCollatorWithFlattening made 1 rows of"),
    (lambda items: object(), "collate_fn returns a object; let it return a dictionary or tuple of tensors")])
def test_a_packed_batch_and_one_of_no_tensors_are_refused_by_name(collate, said):
    with pytest.raises(ValueError, match=said):
        dpft.fine_tune(writer("gpt2"), [{"input_ids": [3, 4, 5][:2 + row % 2]} for row in range(16)], dpft.Full(), collate_fn=collate,
                       progress=False, **KNOBS)


@pytest.mark.parametrize("name, packed, single", [("position_ids", [0, 1, 2, 0], [0, 1, 2, 3]), ("seq_lengths", [3, 1], [4])])
def test_rows_that_are_packed_are_refused_by_the_column_that_says_so(name, packed, single):
    rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6], name: single}] * 12
    assert prepare(writer("gpt2"), rows).kind == "causal"
    with pytest.raises(ValueError, match=f"the rows are packed, as '{name}' says"):
        prepare(writer("gpt2"), [*rows, {**rows[0], name: packed}])


@pytest.mark.parametrize("norm, masked, refused", [("layer", True, False), ("layer", False, True), ("group", False, True)])
def test_clips_are_bounded_one_by_one_and_padding_that_leaks_is_refused(norm, masked, refused):
    torch.manual_seed(0)
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8), conv_kernel=(4, 3),
        conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm=norm,
        do_stable_layer_norm=norm == "layer", apply_spec_augment=False, layerdrop=0.0))
    rows = [{"input_values": np.sin(np.arange(size) * (1 + row)).tolist(), "labels": [1 + row % 5, 2][:1 + row % 2]}
            for row, size in enumerate([90, 50, 70, 61] * 3)]
    if masked:
        rows = [{**row, "attention_mask": [1] * len(row["input_values"])} for row in rows]
    def run():                                                                   # with all rows: a batch of one has no padding
        return dpft.fine_tune(model, rows, dpft.Full(), progress=False, **{**KNOBS, "batch_size": len(rows)})
    if refused:
        with pytest.raises(ValueError, match="changes with the length of its padding"):
            run()
    else:
        assert run().epsilon > 0


# ---- missing values


NAN = float("nan")
HOLES = torch.tensor([[0.0, NAN], [NAN, NAN], [1, 1], [1, 1]])
GAPS = {  # rows with two missing values, and the sentence
    "tensors": (TensorDataset(HOLES, torch.tensor([0, 1, 0, 1])), "tensor 0 of the data: 2 of 4"),
    "pictures": (TensorData(HOLES, torch.tensor([0, 1, 0, 1])), "images: 2 of 4"),
    "rows": ([{"x": [1.0, NAN], "labels": 0}, {"x": [NAN, 1.0], "labels": 1}, *[{"x": [1.0, 2.0], "labels": 1}] * 2], "column 'x': 2 of 4"),
    "frame": (pd.DataFrame({"x": [0.5, None, 1.0, None], "labels": [0, 1, 0, 1]}), "column 'x': 2 of 4"),
    "set": (Dataset.from_dict({"x": [[0.5, 1.0], [1.0, None], None, [1.0, 2.0]], "labels": [0, 1, 0, 1]}), "column 'x': 2 of 4"),
}


@pytest.mark.parametrize("form", GAPS)
@pytest.mark.parametrize("loop", ["fine_tune", "Engine"])
def test_missing_values_are_counted_by_column_before_a_charge(tmp_path, form, loop):
    rows, said = GAPS[form]
    knobs = KNOBS | dict(batch_size=2, ledger=tmp_path / "ledger.sqlite")
    with pytest.raises(ValueError, match=f"^{said} rows have a missing value") as refused:
        if loop == "fine_tune":
            dpft.fine_tune(Graph(), rows, dpft.Full(), progress=False, **knobs)
        else:
            dpft.Engine(Graph(), None, dpft.Full(), rows, **knobs)
    assert "nan" not in str(refused.value).replace("(NaN or None)", "") and not (tmp_path / "ledger.sqlite").exists()


@pytest.mark.parametrize("rows, said", [
    ({"text": ["a", None, " ", "b"], "label": [0, 1, 0, 1]}, "2 of 4 rows have no text in column 'text'"),
    ({"text": ["a", "b", "a", "b"], "label": ["x", None, "y", "x"]}, "1 of 4 rows have no label in column 'label'"),
    ({"text": ["a", "b", "a", "b"], "label": [0.0, NAN, 1.0, 1.0]}, "1 of 4 rows have no label in column 'label'")])
def test_missing_texts_and_labels_are_counted(rows, said, tokenizer):
    with pytest.raises(ValueError, match=said):
        prepare(bert(), rows, tokenizer)


def test_a_report_says_what_a_row_counts_that_is_not_finite():
    run = dpft.fine_tune(Graph(), TensorDataset(torch.rand(8, 2), torch.arange(8) % 2), dpft.Full(), progress=False, **KNOBS)
    assert "| a gradient that is not finite | counts as exactly zero |" in run.report()


# ---- files


def test_every_kind_of_file(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = Dataset.from_list([{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.jsonl")
    rows.to_csv(tmp_path / "rows.csv")
    (tmp_path / "rows.json").write_text('[{"text": "a", "label": 0},\n {"text": "b", "label": 1}]')
    (tmp_path / "rows 2.csv").write_text('text;label\n"a";0\nb;1\n')          # as Excel writes where a comma begins fractions
    (tmp_path / "rows.tsv").write_text("text\tlabel\na\t0\nb\t1\n")
    rows.save_to_disk(tmp_path / "kept")
    before, files = {*tmp_path.iterdir()}, [*tmp_path.glob("rows*.*")]
    assert len(files) == 6
    for path in files:
        data = read_file(path)
        assert (list(data["text"]), list(data["label"])) == (["a", "b"], [0, 1]), path.name
        assert load_data(str(path)).columns == ("text", "label")
    assert load_data(str(tmp_path / "kept")).train["text"] == ["a", "b"] and {*tmp_path.iterdir()} == before   # no copy on the disk


@pytest.mark.parametrize("name, content, said", [
    ("a.csv", "text,label\nsecret,0,1\n", "cannot be read as CSV; expected 2 columns, got 3 in a line"),
    ("a.csv", "text,text\na,b\n", "two columns are named 'text'"), ("a.csv", "text,label\n", "has no rows below its header"),
    ("a.json", "{secret", "cannot be read as JSON"), ("a.jsonl", '{"who": 1}\n{"who": "secret"}\n', "cannot be read as JSONL"),
    ("a.jsonl", "[1, 2]", "cannot be read as JSONL"), ("a.parquet", "secret", "cannot be read as PARQUET"),
    ("a.txt", "secret", "ends in '.txt'; rows are read from .csv")])
def test_a_file_that_cannot_be_read_is_one_sentence_and_shows_no_value(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said) as refused:
        load_data(tmp_path / name)
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_unit_of_a_file_is_read_as_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,label,who\na,0,007\nb,1, 007\nc,0,7\n")
    assert load_data(tmp_path / "a.csv", unit="who").train["who"][:] == ["007", "007", "7"]


@pytest.mark.parametrize("ending", [".npz", ".npz.xz"])
def test_arrays_are_found_by_path_and_by_name(tmp_path, monkeypatch, ending):
    x, y, path = np.arange(40, dtype=np.uint8).reshape(10, 2, 2), np.arange(10) % 3, tmp_path / f"mnist{ending}"
    np.savez(tmp_path / "plain.npz", x_train=x[:6], y_train=y[:6], x_test=x[6:], y_test=y[6:])
    packed = (tmp_path / "plain.npz").read_bytes()
    path.write_bytes(lzma.compress(packed) if ending.endswith("xz") else packed)
    monkeypatch.setenv("DPFT_DATA", str(tmp_path))
    for name in (path, "mnist"):
        task = load_data(name, limit=5)
        assert (len(task.train), len(task.dev), task.image_shape, task.classes) == (5, 4, (1, 2, 2), ("0", "1", "2"))
        assert "the classes" in task.assumed_public and torch.equal(task.dev.images[:, 0], torch.from_numpy(x[6:]))
    (tmp_path / "notes.csv").write_text("text,label\na,0\nb,1\n")
    assert load_data("notes").train["text"][:] == ["a", "b"]


def test_a_folder_has_its_parts_and_a_limit_draws_the_same_rows(tmp_path):
    for part, size in (("train", 9), ("validation", 4), ("test", 3)):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "".join(f"{part} {row},{row % 2}\n" for row in range(size)))
    task = load_data(tmp_path, limit=5)
    assert [len(part) for part in (task.train, task.dev, task.test)] == [5, 4, 3] and task.dev["text"][0] == "validation 0"
    assert task.train["text"][:] == load_data(tmp_path, limit=5).train["text"][:]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"holds no data set: give it train.csv.* datasets.load_dataset\('imagefolder'"):
        load_data(tmp_path / "other")
