"""Which columns are read, what the labels are, and in which forms data may come."""

import datetime
import gzip
import json
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from dpft.identity import repeated_rows
from dpft.inputs import check_outputs
from dpft.sources import classes_of
from torch import nn, tensor
from zoo import Items

import dpft
from dpft.book.tasks import fingerprint
from dpft.data import (
    TableData,
    Task,
    TensorData,
    as_dataset,
    as_task,
    column_names,
    has_batch_protocol,
    kind_of_task,
    kinds_of,
    names_a_row,
    read_labels,
    read_schema,
    read_tags,
    shared_rows,
)
from dpft.models import load_model
from dpft.prepared import check_causal, prepare
from dpft.sampling import Units, gather, units_of
from dpft.tasks import load_data, read_file, task_of
from dpft.texts import EncodedData, Selected, collate_for, encode, encode_tags, token_rows

WORDS = ["[PAD]", "[UNK]", *"abcdefgh"]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")


def table(**columns):
    return TableData(columns)


# ---- columns


@pytest.mark.parametrize("columns, unit, line", [
    ({"text": "a", "label": 0, "user": "p"}, "user", "reads: text; label: label; unit: user"),
    ({"text": "a", "user": "p", "label": 0}, None, "reads: text; label: label; not used: user"),
    ({"user": "p", "text": "a", "label": 0, "patient_name": "ann"}, "user",
     "reads: text; label: label; unit: user; not used: patient_name"),
    ({"question": "a", "sentence": "b", "label": 0, "idx": 7}, None, "reads: question + sentence; label: label; not used: idx"),
    ({"hypothesis": "a", "premise": "b", "genre": "x", "label": 0}, None, "reads: premise + hypothesis; label: label; not used: genre"),
    ({"sentence1": "a", "sentence2": "b", "label": 0.5, "idx": 1}, None, "reads: sentence1 + sentence2; label: label; not used: idx"),
    ({"text": "a", "text_pair": "b", "label": 0}, None, "reads: text + text_pair; label: label"),
    ({"review": "a", "stars": 3}, None, "reads: review; label: stars"),
    ({"review": "a", "stars": 3, "date": "2020", "idx": 0}, None, "reads: review; label: stars; not used: date, idx"),
    ({"id": 3, "prompt": "a", "completion": "b"}, None, "reads: prompt; writes: completion; not used: id"),
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
    ({"a": "x", "b": "y"}, {}, "column 'b' holds texts, not class numbers"),
    ({"text": "a", "label": 0}, {"unit": "user"}, "no column 'user'; the data has 'text', 'label'"),
    ({"text": "a", "label": 0}, {"columns": ("text", "stars")}, "no column 'stars'"),
    ({"text": "a", "user": "p", "label": 0}, {"columns": ("text", "user", "label"), "unit": "user"}, "must not read it"),
    ({"text": "a", "label": 0}, {"unit": "label", "columns": ("text", "label")}, "names the unit of privacy"),
])
def test_an_unclear_schema_is_a_question(columns, more, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_schema(as_dataset([columns] * 3), **more)
    assert "\n" not in str(caught.value)


def test_tokens_without_a_label_stay_without_one():
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}] * 3
    for columns in (None, ("input_ids",), ("input_ids", "attention_mask")):
        schema = read_schema(as_dataset(rows), columns)
        assert (schema.kind, schema.label) == ("tokens", None) and schema.reads[0] == "input_ids"
    ready = prepare(nn.Linear(1, 1), as_task(rows))
    assert ready.kind == "causal" and gather(ready.train, [0])["input_ids"].tolist() == [[1, 2]]
    narrow = tokenised().with_format("torch", columns=["input_ids", "label"])
    assert read_schema(narrow).line() == "reads: input_ids; label: label"


def test_columns_decide_otherwise():
    data = as_dataset([{"title": "a", "note": "b", "user": "p", "label": 0, "stars": 1}] * 3)
    assert read_schema(data, ("title", "note", "stars")).line() == "reads: title + note; label: stars; not used: user, label"
    assert read_schema(data, ("title", "user", "label")).reads == ("title", "user")        # asked for by name
    assert read_schema(data, ("title", "note")).kind == "causal"                           # a text at the end is to be written
    named = as_dataset([{"text": "a", "label": "good"}] * 3)
    assert read_schema(named, ("text", "label")).kind == "text"                            # unless its name says label


@pytest.mark.parametrize("name", ["id", "idx", "user", "user_id", "userId", "patient_name", "reviewer", "customer-no", "email", "guid"])
def test_names_of_rows_and_people_are_never_texts(name):
    assert names_a_row(name)
    assert name not in read_schema(as_dataset([{name: "p1", "text": "a", "label": 0}] * 3)).columns


@pytest.mark.parametrize("name", ["text", "sentence", "video", "input_ids", "token_type_ids", "bid", "author_notes", "userland", "label"])
def test_other_names_are_not_taken_for_ids(name):
    assert not names_a_row(name)


@pytest.mark.parametrize("given", [dict(unit="user"), {}])
def test_the_model_never_sees_who_wrote_a_row(tokenizer, given):
    "The tokens are those of the texts alone, whatever order the columns stand in."
    people = ["g", "h", "g", "h"]
    data = table(user=people, text=["a b", "c", "d", "e f"], label=[0, 1, 0, 1])
    ready = prepare(zoo.build("bert")[0], data, tokenizer, **given)
    tokens = [ready.train[row]["input_ids"].tolist() for row in range(4)]
    assert tokens == [tokenizer(text)["input_ids"] for text in data["text"]]
    assert not {tokenizer.convert_tokens_to_ids(who) for who in people} & {token for row in tokens for token in row}
    assert len(units_of(ready.train, "user")) == 2 and ready.schema.unit == given.get("unit")


# ---- labels


@pytest.mark.parametrize("values, classes, words", [
    ([0, 1] * 20 + [7], None, "the label of row 40 stands alone"), ([0, 1] * 20 + [2], None, "the label of row 40 stands alone"),
    ([0, 2, 2, 0], None, "the label of row 1 stands alone"), ([0, None, 1, float("nan")], None, "2 of 4 rows have no label"),
    (["ham", "", "spam"], None, "1 of 3 rows have no label"), ([0.5, 1.0], 3, "holds fractions"),
    ([0.0, 1.0], None, "whole numbers stored as floats"), ([0.5, float("inf")], None, "row 1 in column 'label' is not finite"),
    ([0, 1, 2], 2, "the label of row 2 is outside the 2 classes"), (["ham", "hma"], ("ham", "spam"), "row 1 in column 'label' is none"),
    (["a", "b", "c"], 2, "has 3 names for 2 classes"), ([0, "a"], None, "neither class numbers nor class names"),
    ([object(), 1], None, "neither class numbers"), ([["a", "b"], ["c", "d"]], None, "column 'label' holds lists of names"),
    ([[1, None], [0, 1]], None, "column 'label' holds lists of what"), ([np.array(["a"])] * 2, None, "column 'label' holds lists of names"),
    ([[1, 0], [1]], None, "lists that are not as long"), ([], None, "column 'label' has no rows; give"),
    (["ham", "spam"] * 20 + ["hma"], None, "the label of row 40 stands alone"), ([-1, 0, 1], None, "row 0 is not a class number"),
])
def test_bad_labels_are_one_sentence_without_a_value(values, classes, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_labels(values, classes=classes)
    said = str(caught.value)
    assert "\n" not in said and "hma" not in said and "7" not in said.replace("row 7", "")


@pytest.mark.parametrize("wrong", [None, 3, float("nan"), "x", [[0], [1]]])
def test_a_row_without_a_list_of_tags_is_refused_by_its_number(wrong):
    with pytest.raises(ValueError, match="row 1 of column 'tags' is not a list with a tag for each word"):
        read_tags([[0, 1], wrong])


@pytest.mark.parametrize("values, classes, numbers, names, derived", [
    ([0, 1, 1], None, [0, 1, 1], ("0", "1"), True), ([0, 0], None, [0, 0], ("0", "1"), True),
    (["b", "a", "b"], None, [1, 0, 1], ("a", "b"), True), (["b", "a", "b"], ("b", "a"), [0, 1, 0], ("b", "a"), False),
    (["b", "a"], 2, [1, 0], ("a", "b"), True), ([True, False], None, [1, 0], ("0", "1"), True), ([1.0, 0.0], 2, [1, 0], ("0", "1"), False),
    (np.array([1, 0]), None, [1, 0], ("0", "1"), True), ([0, 1] * 20 + [7], 8, [0, 1] * 20 + [7], tuple("01234567"), False),
    ([0.5, 2.0], None, [0.5, 2.0], (), False), ([3, 4], 1, [3.0, 4.0], (), False),
    ([[1, 0], [1, 1]], 2, [[1, 0], [1, 1]], ("0", "1"), False),
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


def labelled_file(folder, form, labels, name="rows"):
    path = folder / f"{name}.{form}"
    frame = pd.DataFrame({"text": ["a b", "c"] * (len(labels) // 2), "label": labels})
    frame.to_csv(path, index=False) if form == "csv" else frame.to_json(path, orient="records", lines=True)
    return str(path)


@pytest.mark.parametrize("labels, classes", [
    (["true", "false"] * 6, ["true", "false"]), (["True", "False"] * 6, ["true", "false"]), ([0, 1] * 6, ["1", "0"]),
    ([1, 2, 3] * 4, ["1", "2", "3"]), ([1, 2, 3] * 4, ["3", "2", "1"]), ([-1, 1] * 6, ["-1", "1"]), ([2, 1] * 6, ["1", "2", "x"]),
    ([1.0, 2.0] * 6, ["1", "2"]), ([1.5, 2.0] * 6, ["1.5", "2"]), (["01", "02"] * 6, ["02", "01"])])
@pytest.mark.parametrize("form", ["csv", "jsonl", "rows"])
def test_a_label_that_spells_a_class_is_that_class_in_every_form(tmp_path, tokenizer, labels, classes, form):
    data = table(text=["a b", "c"] * 6, label=labels) if form == "rows" else read_file(labelled_file(tmp_path, form, labels))
    wanted = [next(place for place, name in enumerate(classes) if str(label).lower().removesuffix(".0") == name) for label in labels] \
        if labels[0] != "True" or form == "csv" else None
    if wanted is None:                          # texts, and not what the names say
        with pytest.raises(ValueError, match="the label of row 0 in column 'label' is none of the 2 classes"):
            as_task(data, classes=classes)
        return
    task = as_task(data, classes=classes)
    assert task.classes == tuple(classes)
    assert encode(task.train, tokenizer, task.columns, classes=classes).labels.tolist() == wanted


def test_one_files_number_is_anothers_text(tmp_path, tokenizer):
    task = load_data(labelled_file(tmp_path, "jsonl", [str(1 + row % 5) for row in range(20)]))
    dev = read_file(labelled_file(tmp_path, "csv", [1, 2, 3, 4], "dev"))
    ready = prepare(bert(list("12345")), task, tokenizer)
    assert ready.classes == tuple("12345") and ready.encoded(dev).labels.tolist() == [0, 1, 2, 3]
    mixed = load_data(labelled_file(tmp_path, "csv", ["1", "2", "x"] * 4, "mixed"))
    assert prepare(bert(["1", "2", "x"]), mixed, tokenizer).encoded(dev.select([0, 1])).labels.tolist() == [0, 1]


def test_a_number_is_a_place_where_names_are_other_words_or_the_data_say_so(tokenizer):
    rows = table(text=["a", "b"] * 6, label=[0, 1] * 6)
    assert as_task(rows, classes=["neg", "pos"]).classes == ("neg", "pos")
    assert encode(rows, tokenizer, ("text", "label"), classes=["neg", "pos"]).labels.tolist() == [0, 1] * 6
    def hub(names, labels=(0, 1)):
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        return Dataset.from_dict({"text": ["a", "b"] * 6, "label": [*labels] * 6}, features=features)
    for names, classes, wanted in ((["1", "0"], None, [0, 1]), (["1", "2"], None, [0, 1]), (["pos", "neg"], ["neg", "pos"], [1, 0]),
                                   (["a", "b"], ["1", "0"], [0, 1]), (["b", "a"], ["a", "b", "c"], [1, 0]), (["a", "b"], 2, [0, 1])):
        classes = classes or names
        assert encode(hub(names), tokenizer, ("text", "label"), classes=classes).labels.tolist() == wanted * 6
    for labels, words in (((0, -1), "row 1 is not a class number"), ((0, None), "6 of 12 rows have no label")):
        with pytest.raises(ValueError, match=words):
            encode(hub(["a", "b"], labels), tokenizer, ("text", "label"), classes=["a", "b"])


def test_tags_whose_numbers_are_of_another_order_are_refused(tokenizer):
    from datasets import Sequence as Several

    features = Features({"tokens": Several(Value("string")), "ner_tags": Several(ClassLabel(names=["O", "B", "I"]))})
    data = Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[0, 1]]}, features=features)
    for asked in (lambda: classes_of(data, read_schema(data), ["B", "I", "O"]),
                  lambda: encode_tags(data, tokenizer, ("tokens", "ner_tags"), classes=["B", "I", "O"])):
        with pytest.raises(ValueError, match="column 'ner_tags' numbers its classes in another order, O, B, I"):
            asked()


@pytest.mark.parametrize("tags, words", [
    ([["O", "PER"]] * 59 + [["O", "Jane Doe 12.3.1950"]], "the label of row 59 stands alone"),
    ([["O", "PER"]] * 59 + [["Jane Doe"] * 12], "the label of row 59 stands alone"),
    ([["meet", f"Doe {row}"] for row in range(60)], "61 different texts, most of them in one row"),
    ([[0, 1]] * 60 + [[0, 900]], "the label of row 60 stands alone"), ([[0, 1]] * 3 + [[0, 900]], "the label of row 3 stands alone"),
    ([["O", "PER"]] * 60 + [["O", "NA"]], "the label of row 60 stands alone"), ([[0, 2**70]] * 3, "tags or tokens")])
def test_a_private_word_does_not_become_the_name_of_a_tag(tags, words):
    rows = {"tokens": [["a"] * len(row) for row in tags], "ner_tags": tags}
    with pytest.raises(ValueError, match=words) as caught:
        as_task(rows)
    assert "Doe" not in str(caught.value) and "900" not in str(caught.value)
    assert as_task({**rows, "ner_tags": [["O", "PER"]] * len(tags), "tokens": [["a", "b"]] * len(tags)}).classes == ("O", "PER")


def test_a_rare_tag_is_a_class_where_the_classes_are_given():
    rows = {"tokens": [["a", "b"]] * 61, "ner_tags": [["O", "PER"]] * 60 + [["O", "LOC"]]}
    assert as_task(rows, classes=["O", "PER", "LOC"]).classes == ("O", "PER", "LOC")


@pytest.mark.parametrize("mark", ["NA", "N/A", "null", "None", "nan"])
def test_a_mark_for_a_missing_label_is_a_class_only_if_it_is_named(tmp_path, mark):
    labels = [mark, "Low"] * 8
    for data in (table(text=["a b", "c"] * 8, label=labels), read_file(labelled_file(tmp_path, "csv", labels))):
        with pytest.raises(ValueError, match="8 of 16 rows have no label in column 'label', the first is row 0"):
            as_task(data)
        assert as_task(data, classes=[mark, "Low"]).classes == (mark, "Low")


@pytest.mark.parametrize("gap", [None, float("nan"), "", "NaN", np.nan, pd.NA])
@pytest.mark.parametrize("kind", [object, "string"])
def test_a_first_text_that_is_missing_leaves_the_column_a_text(gap, kind):
    frame = pd.DataFrame({"text": pd.Series([gap, "a", "b"] * 4, dtype=kind), "label": [0, 1] * 6})
    found = read_schema(as_dataset(frame))
    assert found.kind == "text" and found.line() == "reads: text; label: label"
    assert kinds_of(table(a=["", None], b=[None, None], c=[float("nan")] * 2)) == {"a": "text", "b": "other", "c": "number"}


@pytest.mark.parametrize("labels, classes, words", [
    ([0, 1] * 6, ["0", "1", "1"], "classes= has '1' twice"), ([0, 1] * 6, 0, "classes=0: give how many"),
    ([0, 1] * 6, "ab", "classes='ab': give"),
    (["a", "b"] * 6, 3, "column 'label' names 2 of the 3 classes"),
    ([1, "1"] * 6, None, "neither class numbers nor class names alone, but both"),
    (["1.0", "1", "2"] * 4, None, "spells one number in two ways"), ([0, 2**70] * 6, None, "the label of row 1 stands alone"),
    ([0, 2**70] * 6, 2, "the label of row 1 is outside the 2 classes"), ([0.5, 10**400] * 6, None, "holds a number that is too large")])
def test_classes_that_cannot_be_are_refused(labels, classes, words):
    rows = table(text=["a", "b"] * 6, label=labels)
    with pytest.raises(ValueError, match=words):
        task_of(rows, classes=classes)


def test_the_number_of_classes_may_be_numpys():
    assert as_task(table(text=["a", "b"] * 6, label=[0, 1] * 6), classes=np.int64(3)).classes == ("0", "1", "2")
    assert load_data("digits", classes=np.int64(10)).classes == tuple("0123456789")


def test_pictures_or_labels_of_one_class_are_nothing_to_learn(tmp_path):
    from PIL import Image as Picture

    (tmp_path / "only").mkdir()
    for number in range(6):
        Picture.fromarray(np.full((4, 4), number, np.uint8)).save(tmp_path / "only" / f"{number}.png")
    features = Features({"text": Value("string"), "label": ClassLabel(names=["one"])})
    rows = Dataset.from_dict({"text": ["a"] * 4, "label": [0] * 4}, features=features)
    for attempt in (lambda: load_data(str(tmp_path)), lambda: as_task(rows)):
        with pytest.raises(ValueError, match="column 'label' holds a single class, and there is nothing to learn"):
            attempt()


# ---- people


@pytest.mark.parametrize("missing", [None, float("nan"), np.nan, pd.NaT, pd.NA, np.datetime64("NaT"), "", "  ", "nan", "None"])
def test_a_row_without_a_person_is_refused_and_counted(missing):
    who = ["ann", missing, "bob", "ann", missing]
    with pytest.raises(ValueError, match="2 of 5 rows have no unit in 'person', the first is row 1"):
        Units(who, "person")
    with pytest.raises(ValueError, match="2 of 5 rows have no unit in 'person'"):
        units_of(table(text=list("abcde"), person=who), "person")


def test_missing_people_in_tensors_and_frames_are_refused():
    with pytest.raises(ValueError, match="1 of 3 rows have no unit"):
        units_of([1, 2, 3], torch.tensor([1.0, float("nan"), 1.0]))
    frame = pd.DataFrame({"text": list("abc"), "label": [0, 1, 0], "user": [1, None, 1]})
    with pytest.raises(ValueError, match="1 of 3 rows have no unit"):
        units_of(as_dataset(frame), "user")
    assert len(Units([datetime.date(2020, 1, 1), datetime.date(2020, 1, 2), datetime.date(2020, 1, 1)])) == 2


@pytest.mark.parametrize("tags", [["B", "O"], [1, 0]])
def test_sentences_of_words_are_told_again_whatever_their_tags(tags):
    private = table(tokens=[["Ann", "has"], ["all", "well"]], ner_tags=[tags, tags])
    public = table(tokens=[["all", "well "], ["all", "ill"]], ner_tags=[tags[::-1], tags])
    assert shared_rows(public, private) == [0] and repeated_rows(private) == 0
    assert repeated_rows(table(tokens=[["a", "b"], np.array(["a", "b"], dtype=object)], ner_tags=[tags, tags[::-1]])) == 2


def test_rows_of_what_is_neither_text_nor_number_are_told_again():
    days = [datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)]
    data = table(x=[1.0, 1, 1.0], day=[days[0], days[0], days[1]])
    assert repeated_rows(data) == 2 and shared_rows(table(x=[1], day=[days[1]]), data) == [0]
    assert repeated_rows(table(x=[[1.0, [2.0]], [1.0, [2.0]], [1.0, [3.0]]])) == 2
    assert repeated_rows(pd.DataFrame({"text": ["a", "a", "b"]})) == 2


def test_rows_of_one_person_under_another_are_counted(tokenizer):
    data = table(text=["a b", " a b", "c", "c", "d"], label=[0, 1, 0, 0, 1], user=["p", "q", "r", "r", "s"])
    assert repeated_rows(data) == 4 and repeated_rows(data, data["user"]) == 2
    encoded = encode(data, tokenizer, ("text", "label"))
    assert repeated_rows(encoded, data["user"]) == 2
    data = TensorData(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 0]))
    assert repeated_rows(data) == 3 and repeated_rows(data, ["p"] * 3) == 0


def test_a_shared_text_is_found_whoever_wrote_it():
    private = table(text=["a b", "c"], label=[0, 1], user=["p", "q"], idx=[0, 1])
    public = table(text=["c", "e"], label=["x", "y"], id=["9", "10"])
    assert shared_rows(public, private) == [0]


# ---- forms


def tokenised(rows=6):
    data = {"sentence": ["a b", "c"] * (rows // 2), "label": [0, 1] * (rows // 2), "idx": list(range(rows)),
            "input_ids": [[2, 3, 0], [4, 0, 0]] * (rows // 2), "attention_mask": [[1, 1, 0], [1, 0, 0]] * (rows // 2)}
    return Dataset.from_dict(data)


FORMS = {
    "datasets.Dataset": lambda rows: Dataset.from_list(rows),
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
    data = FORMS[form](tokenised().to_list())
    ready = prepare(zoo.build("bert")[0], data)
    batch = gather(ready.train, [1, 0])
    assert {name: values.tolist() for name, values in batch.items()} == (
        {"input_ids": [[4, 0], [2, 3]], "attention_mask": [[1, 0], [1, 1]], "labels": [1, 0]} if form not in ("torch Dataset", "transform")
        else {"input_ids": [[4, 0, 0], [2, 3, 0]], "attention_mask": [[1, 0, 0], [1, 1, 0]], "labels": [1, 0]})
    assert len(ready.train) == 6 and fingerprint(ready.train)


@pytest.mark.parametrize("form", FORMS)
def test_texts_in_every_form_give_the_same_tokens(form, tokenizer):
    rows = [{"user": f"p{i // 2}", "text": text, "label": i % 2} for i, text in enumerate(["a b", "c", "d e f", "g"])]
    ready = prepare(zoo.build("bert")[0], FORMS[form](rows), tokenizer, unit="user")
    assert ready.train.batch([2, 1])["input_ids"].tolist() == [[5, 6, 7], [4, 0, 0]]
    assert ready.schema.line() == "reads: text; label: label; unit: user"
    assert len(units_of(ready.train, "user")) == 2


def test_another_librarys_batch_is_not_ours():
    assert has_batch_protocol(TensorData(torch.zeros(1, 1, 2, 2), torch.zeros(1)))
    assert not has_batch_protocol(tokenised()) and not has_batch_protocol([1]) and not has_batch_protocol(dpft.Public(tokenised(), "x"))
    numbers = tokenised().remove_columns("sentence")
    assert gather(numbers, [1, 0])["input_ids"].tolist() == [[4, 0, 0], [2, 3, 0]]


@pytest.mark.parametrize("data, words", [
    (lambda: tokenised().to_iterable_dataset(), "this IterableDataset has no length or no rows by number"),
    (lambda: (row for row in [{"a": 1}]), "this generator has no length"), (lambda: "train.csv", "load it first with dpft.load_data"),
    (lambda: torch.utils.data.DataLoader([1, 2]), "makes its own batches"),
    (lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns are named 'a'"),
    (lambda: [{"text": "a", "label": 1}, {"text": "b"}], "rows 0 and 1 differ: only one of them has 'label'"),
    (lambda: (torch.zeros(3, 2), torch.zeros(3)), "give torch.utils.data.TensorDataset"),
    (lambda: {"text": ["a"], "label": [0, 1]}, "columns must be of one length"),
])
def test_what_cannot_be_drawn_from_is_refused(data, words):
    with pytest.raises(ValueError, match=words) as caught:
        prepare(nn.Linear(1, 1), data())
    assert "\n" not in str(caught.value)


def test_tuples_pass_as_they_are():
    pairs = torch.utils.data.TensorDataset(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0]))
    ready = prepare(nn.Linear(2, 2), pairs)
    assert ready.train is pairs and ready.schema.line() == "reads: the items as they come"
    assert [part.tolist() for part in gather(ready.train, [2, 0])] == [[[4.0, 5.0], [0.0, 1.0]], [0, 0]]


def test_items_lose_their_unit_and_their_row_numbers():
    rows = [{"x": [float(i)], "label": i % 2, "user": i // 2, "idx": i} for i in range(4)]
    ready = prepare(nn.Linear(1, 2), rows, unit="user")
    assert gather(ready.train, [3]).keys() == {"x", "label"} and len(units_of(ready.train, "user")) == 2
    assert gather(prepare(nn.Linear(1, 2), rows, columns=("x", "idx", "label")).train, [3]).keys() == {"x", "idx", "label"}


def test_padding_and_gaps_in_the_attention_mask(tokenizer):
    rows = {"input_ids": [[0, 0, 5, 6], [7, 8, 9, 3]], "labels": [[-100, -100, 1, 0], [0, 1, 1, 0]]}
    left = token_rows(as_dataset(rows | {"attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1]]}), read_schema(as_dataset(
        rows | {"attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1]]})))
    assert isinstance(left, EncodedData) and left[0]["input_ids"].tolist() == [5, 6] and left[0]["labels"].tolist() == [1, 0]
    gaps = as_dataset(rows | {"attention_mask": [[1, 0, 1, 1], [1, 1, 1, 1]]})
    kept = token_rows(gaps, read_schema(gaps))
    assert isinstance(kept, Selected) and gather(kept, [0])["attention_mask"].tolist() == [[1, 0, 1, 1]]
    pairs = as_dataset({"input_ids": [[5, 6], [7]], "labels": [[1, 2, 3], [4]]})          # as for a sequence-to-sequence model
    batch = gather(token_rows(pairs, read_schema(pairs), pad_id=9), [0, 1])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 9]] and batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


@pytest.mark.parametrize("kind", ["padding", "tokens", "seq2seq", "default"])
def test_collators_of_transformers(kind, tokenizer):
    from transformers import DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding, default_data_collator

    collate = {"padding": DataCollatorWithPadding(tokenizer), "tokens": DataCollatorForTokenClassification(tokenizer),
               "seq2seq": DataCollatorForSeq2Seq(tokenizer), "default": default_data_collator}[kind]
    labels = [0, 1] if kind in ("padding", "default") else [[1, 2], [3]]
    ids = [[2, 3], [4, 5]] if kind == "default" else [[2, 3], [4]]
    data = Dataset.from_dict({"input_ids": ids, "labels" if kind != "padding" else "label": labels, "idx": [0, 1], "sentence": ["a", "b"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = prepare(zoo.build("bert")[0], data, unit=None, collate_fn=collate).train
        assert rows[0].keys() == set(data.column_names) - {"idx", "sentence"}
        batch = gather(rows, [1, 0], collate)
        assert type(batch) is dict and batch["input_ids"].tolist() == ([[4, 5], [2, 3]] if kind == "default" else [[4, 0], [2, 3]])
        assert batch["labels"].tolist() == ([1, 0] if labels == [0, 1] else [[3, -100], [1, 2]])


def test_a_collator_of_ones_own_gets_the_items_as_they_are():
    rows = [{"input_ids": [5, 0], "attention_mask": [1, 0], "weight": 0.5, "label": i % 2, "user": "ann", "idx": i} for i in range(4)]
    ready = prepare(zoo.build("bert")[0], rows, unit="user", collate_fn=list)
    assert gather(ready.train, [1], list) == [{"input_ids": [5, 0], "attention_mask": [1, 0], "weight": 0.5, "label": 1}]
    assert ready.schema.unit == "user"


def test_a_tokenised_data_set_trains_with_a_collator_of_transformers(tokenizer):
    from transformers import DataCollatorWithPadding

    torch.manual_seed(0)
    for collate in (None, DataCollatorWithPadding(tokenizer)):
        ready = prepare(zoo.build("bert")[0], tokenised(24), collate_fn=collate)
        run = dpft.fine_tune(zoo.build("bert")[0].float(), ready.train, dpft.BiTFiT(),
                             noise_multiplier=1.0, steps=2, batch_size=8, delta=1e-3, accountant="rdp", collate_fn=collate, progress=False)
        assert run.epsilon > 0


def test_pictures_of_the_hub_may_be_given_as_they_are():
    from PIL import Image as Picture

    pictures = [Picture.fromarray(np.full((4, 4), i, np.uint8)) for i in range(6)]
    data = Dataset.from_dict({"image": pictures, "label": [0, 1] * 3, "patient": [0, 0, 1, 1, 2, 2]})
    ready = prepare(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), data, unit="patient")
    assert isinstance(ready.train, TensorData) and ready.train.images.flatten(1)[:, 0].tolist() == list(range(6))
    assert ready.schema.line() == "reads: image; label: label; unit: patient" and len(units_of(ready.train, "patient")) == 3
    assert fingerprint(data) and ready.kind == "image"
    with pytest.raises(ValueError, match=r"^the picture of row 1 has another size or number of channels than that of row 0; resize"):
        prepare(nn.Linear(1, 1), as_dataset({"image": [pictures[0], pictures[1].resize((2, 2))], "label": [0, 1]}))
    with pytest.raises(ValueError, match="part 0 of an item has type Image, which is not a tensor"):
        collate_for([(pictures[0], 1)])([(pictures[0], 1)])


@pytest.mark.parametrize("channels, name", [(1, "cnn"), (3, "cnn"), (3, "mlp"), (3, "vit-small"), (3, "tempered-cnn")])
@pytest.mark.parametrize("form", [Dataset.from_dict, lambda columns: [dict(zip(columns, row)) for row in zip(*columns.values())]])
def test_a_named_model_is_made_for_the_pictures_that_are_given(form, name, channels):
    """It was made for one channel of 28 by 28, and failed after its plan was charged."""
    from PIL import Image as Picture

    shape = (16, 16, 3)[:2 + (channels > 1)]
    pictures = [Picture.fromarray(np.full(shape, i, np.uint8)) for i in range(6)]
    ready = prepare(name, form({"image": pictures, "label": [0, 1] * 3}))
    assert ready.recipe["image_shape"] == (channels, 16, 16) and isinstance(ready.train, TensorData)
    assert ready.model(ready.train.batch([0, 1])[0]).shape == (2, 2) if name != "vit-small" else ready.model is not None
    assert len(ready.encoded(form({"image": pictures[:2], "label": [1, 0]}))) == 2


def small(kind="bert", **settings):
    import transformers as hf

    config = {"bert": hf.BertConfig, "roberta": hf.RobertaConfig, "opt": hf.OPTConfig}[kind](**{
        "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8,
        **({"ffn_dim": 4, "word_embed_proj_dim": 4} if kind == "opt" else {"intermediate_size": 4}), **settings})
    return {"bert": hf.BertForSequenceClassification, "roberta": hf.RobertaForSequenceClassification,
            "opt": hf.OPTForSequenceClassification}[kind](config)


@pytest.mark.parametrize("kind, places", [("bert", 8), ("roberta", 6), ("opt", 8)])
def test_a_row_is_cut_to_the_places_that_a_model_has(tokenizer, kind, places):
    """It failed in the forward pass, after its plan was charged."""
    model = small(kind, pad_token_id=1 if kind == "roberta" else 0)
    ready = prepare(model, [{"text": "a b c d " * 5, "label": row % 2} for row in range(4)], tokenizer)
    assert ready.train.lengths.tolist() == [places] * 4 and ready.reading().endswith(f"; at most {places} tokens of a row")
    model(**ready.train.batch([0, 1]))
    assert ready.encoded([{"text": "a b c d " * 5, "label": 1}]).lengths.tolist() == [places]


def test_a_tokenizer_may_state_fewer_tokens(tokenizer):
    import copy

    short = copy.deepcopy(tokenizer)
    short.model_max_length = 5
    ready = prepare(small(), [{"text": "a b c d " * 5, "label": row % 2} for row in range(4)], short)
    assert ready.train.lengths.tolist() == [5] * 4 and ready.reading().endswith("at most 5 tokens of a row")


def test_tokens_without_a_place_are_refused_before_anything_is_spent():
    rows = [{"input_ids": [2] * (9 if row == 3 else 4), "labels": row % 2} for row in range(6)]
    with pytest.raises(ValueError, match="row 3 has more tokens than the 8 that the model has places for"):
        prepare(small(), rows)
    ready = prepare(small(), rows[:3])
    with pytest.raises(ValueError, match="row 1 has more tokens"):
        ready.encoded(rows[2:5])


def test_a_model_may_be_named_by_a_path(tokenizer, tmp_path):
    small().save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    rows = [{"text": "a b", "label": row % 2} for row in range(12)]
    run = dpft.fine_tune(tmp_path / "bert", rows, dpft.LastLayer(), noise_multiplier=1.0, steps=1, batch_size=6, accountant="rdp",
                         progress=False)
    assert run.prepared.recipe["name"] == str(tmp_path / "bert")


def test_a_task_is_no_data_to_score_on(tokenizer, tmp_path):
    (tmp_path / "test.csv").write_text("text,label\n" + "a b,0\nc d,1\n" * 6)
    task = load_data(str(tmp_path / "test.csv"))
    with pytest.raises(ValueError, match=r"evaluate= is a Task.* such as task\.dev, task\.test or task\.train"):
        dpft.fine_tune(small(), task, dpft.LastLayer(), noise_multiplier=1.0, steps=1, batch_size=6, tokenizer=tokenizer,
                       evaluate=task, progress=False)


def test_an_evaluation_set_is_read_as_the_training_data_was(tokenizer):
    model = zoo.build("bert")[0]
    ready = prepare(model, pd.DataFrame({"text": ["a b", "c"] * 4, "label": [0, 1] * 4, "user": [1, 2] * 4}), tokenizer, unit="user")
    dev = ready.encoded([{"text": "d", "label": 1}])
    assert dev.batch([0])["input_ids"].tolist() == [[5]] and dev.labels.tolist() == [1]
    with pytest.raises(ValueError, match=r"the label of row 0 is outside the 3 classes|the label of row 0 is outside the 2 classes"):
        ready.encoded([{"text": "d", "label": 5}])


def test_a_regression_on_texts_is_for_a_model_with_one_output(tokenizer):
    rows = [{"sentence1": "a", "sentence2": "b", "label": score} for score in (0.5, 2.0, 1.0)]
    model = zoo.build("bert")[0]
    with pytest.raises(ValueError, match="holds fractions"):
        prepare(model, rows, tokenizer)
    model.num_labels = 1
    ready = prepare(model, rows, tokenizer)
    assert ready.train.labels.tolist() == [0.5, 2.0, 1.0] and ready.classes == ()


@pytest.mark.parametrize("scores", [[-1, 0, 2], [1, 2.5, -3], [np.float32(0.5), np.float32(2), np.float32(1)], [1.0, 2.0, 3.0], [3, 4, 5],
                                    [Decimal("0.5"), Decimal("2"), Decimal("1.5")]])
def test_a_model_with_one_output_learns_numbers_of_any_kind(scores, tokenizer):
    rows = [{"text": text, "label": score} for text, score in zip("abc", scores, strict=True)]
    model = zoo.build("bert")[0]
    model.num_labels = 1
    ready = prepare(model, rows, tokenizer)
    assert ready.train.labels.tolist() == [float(score) for score in scores] and ready.classes == ()
    assert ready.encoded(rows[:1]).labels.tolist() == [float(scores[0])]
    tokens = prepare(model, [{"input_ids": [2, 3], "labels": float(score)} for score in scores], tokenizer)
    assert tokens.train.labels.tolist() == ready.train.labels.tolist()
    negative = [{"input_ids": [2, 3], "labels": number} for number in (-1, 0, 2)]
    assert prepare(model, negative, tokenizer).train.labels.tolist() == [-1, 0, 2]


# ---- words with tags, and tokens whose labels say what they are for


CORPUS = [{"tokens": ["a", "b c", "d"], "ner_tags": ["O", "X", "O"]}, {"tokens": ["e"], "ner_tags": ["X"]}]


@pytest.mark.parametrize("form", FORMS)
def test_a_word_gives_its_tag_to_its_first_token(form, tokenizer):
    model = zoo.build("bert")[0]
    ready = prepare(model, FORMS[form](CORPUS), tokenizer)
    batch = ready.train.batch([1, 0])
    assert batch["input_ids"].tolist() == [[6, 0, 0, 0], [2, 3, 4, 5]]                  # "b c" are two tokens
    assert batch["labels"].tolist() == [[1, -100, -100, -100], [0, 1, -100, 0]]
    assert ready.kind == "tagging" and ready.classes == ("O", "X") and "the classes O, X" in ready.assumed_public
    numbers = ready.encoded([{"tokens": ["g"], "ner_tags": ["O"]}])
    assert numbers.batch([0])["labels"].tolist() == [[0]]


@pytest.mark.parametrize("change, words", [
    (dict(ner_tags=["O"]), "row 1 has 2 words in column 'tokens' and 1 tags in 'ner_tags'"),
    (dict(tokens=[], ner_tags=[]), "row 1 has a text of zero tokens"),
    (dict(ner_tags=["O", "Y"]), "a tag of row 1 in column 'ner_tags' is none of the 2 classes"),
    (dict(ner_tags=["O", 1]), "neither all names nor all class numbers"), (dict(ner_tags=["O", None]), "neither all names nor all")])
def test_a_corpus_that_does_not_match_is_refused(change, words, tokenizer):
    rows = as_dataset([CORPUS[0], {"tokens": ["f", "g"], "ner_tags": ["O", "X"]} | change])
    with pytest.raises(ValueError, match=words) as caught:
        encode_tags(rows, tokenizer, ("tokens", "ner_tags"), classes=("O", "X"))
    assert "\n" not in str(caught.value) and "Y" not in str(caught.value)


def test_a_tokenizer_that_cannot_say_whose_a_token_is_is_refused():
    def slow(rows, **settings):
        raise AssertionError("You need to instantiate it with add_prefix_space=True")
    with pytest.raises(ValueError, match="add_prefix_space=True"):
        encode_tags(as_dataset(CORPUS), slow, ("tokens", "ner_tags"))


def test_the_names_of_tags_are_the_data_sets_own():
    from datasets import Sequence as Several

    features = Features({"tokens": Several(Value("string")), "ner_tags": Several(ClassLabel(names=["O", "B", "I"]))})
    data = Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[0, 1]]}, features=features)
    task = as_task(data)
    assert task.kind == "tagging" and task.classes == ("O", "B", "I") and task.assumed_public == []
    assert as_task([{"tokens": ["a"], "tags": [2]}]).classes == ("0", "1", "2")


@pytest.mark.parametrize("label, kind", [
    ([0, 1], "text"), ([[5, 6, 7], [8, 9]], "causal"), ([[-100, 6, 7], [-100, 9]], "causal"), ([[0, 1, 0], [1, -100]], "tagging"),
    ([[5, 6], [8]], "seq2seq")])
def test_labels_of_tokens_say_which_head_a_named_model_needs(label, kind):
    data = as_dataset({"input_ids": [[5, 6, 7], [8, 9]], "labels": label})
    assert kind_of_task(data, read_schema(data)) == kind and as_task(data).kind == kind


def test_hidden_tokens_are_not_taken_for_tags():
    data = as_dataset({"input_ids": [[5, 103, 7]], "labels": [[-100, 29000, -100]]})
    with pytest.raises(ValueError, match="may be tags or tokens to be found; load the model with the head that is meant"):
        classes_of(data, read_schema(data))


def test_tags_beyond_the_classes_of_a_tagger_are_refused_before_a_step():
    import transformers as hf

    tagger = hf.BertForTokenClassification(hf.BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                                                         intermediate_size=4, max_position_embeddings=8))
    rows = [{"input_ids": [2, 3], "labels": [0, 1]}, {"input_ids": [4], "labels": [2]}]
    with pytest.raises(ValueError, match=r"^a tag is no class of the model, which numbers its 2 from 0; correct it, or load"):
        dpft.fine_tune(tagger, rows, dpft.Full(), 4.0)
    tagger.num_labels = 3
    check_outputs(tagger, prepare(tagger, rows).train)


def small_bert():
    import transformers as hf

    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=12, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                                                          intermediate_size=4, max_position_embeddings=8))


def labelled_in_some_form(form, labels):
    "The same tokens with labels, as people hold them."
    ids = torch.full((len(labels), 3), 4)
    if form == "tensors":
        return torch.utils.data.TensorDataset(ids, torch.tensor(labels))
    if form == "texts":
        names = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "neu", "pos"])})
        return Dataset.from_dict({"text": ["a b"] * len(labels), "label": labels}, names)
    return Dataset.from_dict({"input_ids": ids.tolist() if form == "tokens" else [[4, 5][:1 + row % 2] for row in range(len(ids))],
                              "labels": labels})


@pytest.mark.parametrize("form", ["tensors", "texts", "tokens", "ragged"])
@pytest.mark.parametrize("loop", ["fine_tune", "Engine"])
def test_labels_beyond_the_outputs_of_a_model_are_refused_before_anything_is_charged(tmp_path, tokenizer, form, loop):
    """A step that meets one has been charged, and corrected data are no longer the data of the charge."""
    model, given = small_bert(), dict(steps=2, batch_size=4, ledger=tmp_path / "book.sqlite")
    bad, good = (labelled_in_some_form(form, [0, 1] * 4 + [last]) for last in (2, 1))
    def run(data):
        if loop == "fine_tune":
            return dpft.fine_tune(model, data, dpft.LastLayer(), 8.0, tokenizer=tokenizer, accountant="rdp", progress=False, **given)
        train = prepare(model, data, tokenizer).train
        return dpft.Engine(model, None, dpft.LastLayer(), train, epsilon=8.0, accountant="rdp", **given)
    with pytest.raises(ValueError, match=r"^the label of row 8 is no class of the model, which numbers its 2 from 0; correct it"):
        run(bad)
    assert not any(tmp_path.iterdir())
    run(good)


def test_labels_of_other_tasks_than_single_classes_are_not_held_against_the_outputs():
    rows = torch.full((4, 3), 4)
    def data(labels):
        return torch.utils.data.TensorDataset(rows, labels)
    model = small_bert()
    for right in (tensor([0, 1, -100, 1]), tensor([0.0, 9.0, 1.0, 2.0]), tensor([[0, 1], [7, 1], [1, 1], [0, 0]])):
        check_outputs(model, data(right))
    with pytest.raises(ValueError, match=r"^the label of row 2 is no class of the model"):
        check_outputs(model, data(tensor([0, 1, -1, 1])))
    for stated, outputs in (("regression", 2), ("multi_label_classification", 2), (None, 1)):
        model.config.problem_type, model.num_labels = stated, outputs
        check_outputs(model, data(tensor([0, 1, 5, 1])))
    check_outputs(nn.Linear(3, 2), data(tensor([0, 1, 5, 1])))


def test_a_classifier_of_ones_own_says_no_number_of_outputs_and_is_left_alone():
    class MyForSequenceClassification(nn.Linear):
        pass

    rows = torch.utils.data.TensorDataset(torch.zeros(4, 3), tensor([0, 1, 5, 1]))
    check_outputs(MyForSequenceClassification(3, 6), rows)


def test_a_mean_pooled_classifier_knows_its_outputs_as_those_of_transformers_do():
    from transformers import BertConfig

    from dpft.models import MeanPooledClassifier, name_classes

    model = MeanPooledClassifier(BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4))
    with pytest.raises(ValueError, match=r"^the label of row 2 is no class of the model, which numbers its 2"):
        check_outputs(model, torch.utils.data.TensorDataset(torch.zeros(4, 3), tensor([0, 1, 5, 1])))
    name_classes(model, ["no", "yes"])
    assert model.config.id2label == {0: "no", 1: "yes"}


def writer(name):
    "A tiny language model that writes, or only looks like one."
    import transformers as hf

    torch.manual_seed(0)
    tiny = dict(vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=16)
    t5 = dict(vocab_size=12, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return {"gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=16)),
            "decoder": lambda: hf.BertLMHeadModel(hf.BertConfig(is_decoder=True, **tiny)),
            "encoder": lambda: hf.BertLMHeadModel(hf.BertConfig(**tiny)),
            "masked": lambda: hf.BertForMaskedLM(hf.BertConfig(**tiny)),
            "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5))}[name]()


@pytest.mark.parametrize("name, said", [
    ("gpt2", None), ("decoder", None), ("encoder", "BertLMHeadModel sees the tokens that it is to predict; load it as a decoder"),
    ("masked", "the head of BertForMaskedLM is for masked"), ("t5", "the head of T5ForConditionalGeneration is for seq2seq")])
def test_texts_are_continued_only_by_a_model_that_does_not_see_what_it_predicts(tokenizer, name, said):
    data, model = [{"prompt": "a b", "completion": "c d"}] * 12, writer(name)
    def run():
        return dpft.fine_tune(model, data, dpft.Full(), noise_multiplier=1.0, steps=1, batch_size=4, accountant="rdp",
                              tokenizer=tokenizer, delta=0.01, progress=False)
    prepare(model, data, tokenizer, loss_fn=zoo.language_loss)       # which may read the texts in a way of its own
    if said is None:
        run()
    else:
        with pytest.raises(ValueError, match=said):
            run()


def test_a_command_whose_model_cannot_write_asks_for_the_classes():
    from dpft.cli.core import check_written

    task = Task("a.csv", "causal", None, None, columns=("review", "mood"))
    with pytest.raises(ValueError, match=r"sees the tokens .*; or, if column 'mood' names classes, give .* --classes"):
        check_written(writer("encoder"), task)
    check_written(writer("gpt2"), task)


@pytest.mark.parametrize("padding", [None, 0, 1, 2])
def test_the_question_whether_a_model_writes_holds_no_padding(padding, monkeypatch):
    "Transformers warns of padding without a mask, and a user of dpft cannot give one."
    model, seen = writer("gpt2"), []
    model.config.pad_token_id = padding
    own = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids: seen.append(input_ids) or own(self, input_ids))
    check_causal(model)
    assert len(seen) == 2 and all(padding not in ids.flatten().tolist() for ids in seen)
    assert torch.equal(seen[0][:, 0], seen[1][:, 0]) and not torch.equal(seen[0], seen[1])


# ---- no row is shown


def test_no_repr_shows_a_row(tokenizer):
    rows = [{"text": "a b", "label": i % 2, "user": "ann"} for i in range(4)]
    ready = prepare(zoo.build("bert")[0], rows, tokenizer, unit="user")
    data = [as_dataset(rows), ready, ready.train, Selected(as_dataset(rows), {"text": "text"}), Units([1, 1, 2]),
            TensorData(torch.full((2, 1, 2, 2), 77.0), torch.tensor([0, 1]))]
    for shown in map(repr, data):
        assert not any(secret in shown for secret in ("ann", "a b", "77", "4 rows", "tensor("))


# ---- files


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


CSV = "text,label,user\nhello,0,ann\n\"a, b\nc\",1,bob\n"


def test_a_csv_becomes_a_task_that_does_not_read_its_people(tmp_path):
    task = load_data(str(written(tmp_path, "notes.csv", CSV)), unit="user")
    assert (task.kind, task.columns, task.classes, len(task.train), task.dev) == ("text", ("text", "label"), ("0", "1"), 2, None)
    assert task.train["text"] == ["hello", "a, b\nc"] and task.assumed_public == ["the classes"]
    assert load_data(str(tmp_path / "notes.csv")).columns == ("text", "label")


def test_every_kind_of_file(tmp_path):
    rows = Dataset.from_list([{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.jsonl")
    written(tmp_path, "rows.json", '[{"text": "a", "label": 0},\n {"text": "b", "label": 1}]')
    rows.to_csv(tmp_path / "rows.csv")
    written(tmp_path, "rows.tsv", "text\tlabel\na\t0\nb\t1\n")
    rows.save_to_disk(tmp_path / "kept")
    files = [*tmp_path.glob("rows.*"), *(tmp_path / "kept").glob("*.arrow")]
    assert len(files) == 6
    for path in files:
        data = read_file(path)
        assert (list(data["text"]), list(data["label"])) == (["a", "b"], [0, 1]), path.name
        assert load_data(str(path)).columns == ("text", "label")
    assert load_data(str(tmp_path / "kept")).train["text"] == ["a", "b"]


@pytest.mark.parametrize("name, content, words", [
    ("x.csv", "text,label\ncafé secret,1\n".encode("latin-1"), "x.csv is not in UTF-8"),
    ("x.csv", "text,label\n", "no rows below its header"),
    ("x.csv", "", "x.csv is empty"), ("x.csv", "text,text\nsecret,b\n", "two columns are named 'text'"),
    ("x.csv", "text,label\nsecret,1,2\n", "row 2, counting the header, has 3 values for 2 columns"), ("x.txt", "secret", "ends in '.txt'"),
    ("x.jsonl", '{"text": "a"}\n{"text": secret}\n', "line 2 of x.jsonl is not JSON"), ("x.jsonl", "[]", "has no rows"),
    ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "secret"}\n', "only one of them has 'label'"),
    ("x.json", '["secret"]', "not objects with names"),
    ("x.parquet", "secret", "not a Parquet file"), ("x.arrow", "secret", "not an Arrow file"),
    ("x.csv", "text,label\nsecret,\nb,1\n", "1 of 2 rows have no label"), ("x.jsonl", '{"a": 1}\n{"a": "secret"}\n', "two types"),
    ("x.jsonl", b'{"text": "caf\xe9 secret"}\n', "not in UTF-8"),
    ("x.csv", "secret one,1\nsecret two,0\n", "x.csv has a number for a column's name, .* put a line of names above it"),
    ("x.csv", "secret,1,1\nb,0,0\n", "has a number for a column's name"),
    ("x.tsv", "gj04\t1\t\tsecret\n", "has a number for a column's name"),
    ("x.csv", "\ufeffsecret,-0.5\nb,0.5\n", "has a number for a column's name"),
    ("x.jsonl", "{}\n{}\n", "x.jsonl has no rows, or rows that are not objects with names"),
])
def test_a_bad_file_is_one_sentence_without_a_value(tmp_path, name, content, words):
    with pytest.raises(ValueError, match=words) as caught:
        load_data(str(written(tmp_path, name, content)))
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_what_json_allows_in_a_text_ends_no_line(tmp_path, name):
    texts = ["a\u2028b", "c\u2029d", "e\x85f", "g"]
    for start, end in (("", "\n"), ("\ufeff", "\r\n")):
        lines = [json.dumps({"text": text, "label": row % 2}, ensure_ascii=False) for row, text in enumerate(texts)]
        path = written(tmp_path, name, start + end.join(lines) + end)
        assert read_file(path)["text"][:] == texts
        assert read_file(written(tmp_path, name, f"{start}[{','.join(lines)}]"))["text"][:] == texts


@pytest.mark.parametrize("name, separator, said", [
    ("x.csv", ";", "semicolons"), ("x.csv", "\t", "tabs"), ("x.csv", "|", "bars"), ("x.tsv", ",", "commas"),
                                                   ("x.tsv", ";", "semicolons")])
def test_another_separator_is_named_and_no_text_is_learned_with_its_label(tmp_path, name, separator, said):
    path = written(tmp_path, name, separator.join(["text", "label"]) + "\n" + separator.join(["fine", "1"]) + "\n")
    with pytest.raises(ValueError, match=rf"x\..sv .* separated by {said}, .*; save it with"):
        read_file(path)
    assert read_file(written(tmp_path, name, f"text\na{separator if name == 'x.csv' else ''} b\n")).column_names == ["text"]


@pytest.mark.parametrize("content", ['text;label\n"nice, really";good\n"bad, too";bad\n', "\ufefftext;label\nnice, really;good\nbad;bad\n",
                                     '"text";"label"\n"nice, really";"good"\n'])
def test_semicolons_are_named_where_texts_have_commas(tmp_path, content):
    with pytest.raises(ValueError, match="separated by semicolons, not by commas; save it with commas"):
        read_file(written(tmp_path, "x.csv", content))


def test_blanks_before_a_quotation_mark_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.csv has blanks before a quotation mark"):
        read_file(written(tmp_path, "x.csv", 'text, label\n"nice", "good"\n"awful", "bad"\n'))
    kept = 'text,label\n"he said, ""no""",good\n"a, ""b"", c",bad\nshe waved,bad\n'
    assert read_file(written(tmp_path, "y.csv", kept))["text"][:2] == ['he said, "no"', 'a, "b", c']


@pytest.mark.parametrize("written", ["a good film\nbad\nawful film\n", "good,pos\nbad,neg\nfine,pos\n", "pos\tgood\nneg\tbad\npos\tfine\n"])
def test_a_first_line_that_may_be_a_row_does_not_become_the_names_of_columns(tmp_path, written):
    path = tmp_path / ("rows.tsv" if "\t" in written else "rows.csv")
    path.write_text(written)
    with pytest.raises(ValueError, match="first line may be a row; put a line of names above it") as refused:
        load_data(str(path))
    assert not any(word in str(refused.value) for word in ("good", "pos"))
    mark = "\t" if path.suffix == ".tsv" else ","
    path.write_text(f"a text{mark}label\n" + f"good film{mark}pos\nbad{mark}neg\n" * 2)
    assert load_data(str(path)).columns == ("a text", "label")


def test_blanks_around_the_names_in_a_header_do_not_belong_to_them(tmp_path):
    (tmp_path / "rows.csv").write_text("text , label, person\ngood,1,07\nbad,0,7\n")
    rows = read_file(tmp_path / "rows.csv", unit="person")
    assert rows.column_names == ["text", "label", "person"] and rows["person"][:] == ["07", "7"]
    (tmp_path / "rows.csv").write_text("text, text\ngood,1\n")
    with pytest.raises(ValueError, match="two columns are named 'text'"):
        read_file(tmp_path / "rows.csv")


@pytest.mark.parametrize("classes", [np.array(["neg", "pos"]), ("neg", "pos")])
def test_columns_and_classes_may_be_arrays_and_a_text_is_no_list_of_names(tmp_path, classes):
    (tmp_path / "rows.csv").write_text("text,mood\ngood,pos\nbad,neg\n")
    with pytest.raises(ValueError, match="columns='text,mood': give a list of names"):
        load_data(str(tmp_path / "rows.csv"), columns="text,mood")
    for columns in (np.array(["text", "mood"]), ["text", "mood"]):
        task = load_data(str(tmp_path / "rows.csv"), columns=columns, classes=classes)
        assert task.columns == ("text", "mood") and task.classes == ("neg", "pos")


def test_the_name_of_a_quoted_column_may_hold_the_files_own_separator(tmp_path):
    assert read_file(written(tmp_path, "x.csv", '"long, short"\n"a, b"\n')).column_names == ["long, short"]


def test_a_number_that_no_column_holds_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"x\.json holds whole numbers of more than 64 bits"):
        read_file(written(tmp_path, "x.json", '[{"text": "a", "id": 1%s}]' % ("0" * 20)))


def test_a_quotation_mark_joins_no_lines_of_tab_separated_values(tmp_path):
    "The files of GLUE quote nothing; a table that was written with quotation marks quotes whole values."
    plain = 'text\tlabel\n"a b\t0\nc "d\t1\ne"\t0\nf\t1\n'
    data = read_file(written(tmp_path, "x.tsv", plain))
    assert (data["text"][:], data["label"][:]) == (['"a b', 'c "d', 'e"', "f"], [0, 1, 0, 1])
    named = read_file(written(tmp_path, "x.tsv", 'text\tlabel\n"Good" film\t1\nbad "film"\t0\n'))
    assert named["text"][:] == ['"Good" film', 'bad "film"']
    frame = pd.DataFrame({"text": ['a "b" c', "d\te", "f"], "label": [0, 1, 0]})
    frame.to_csv(tmp_path / "x.tsv", sep="\t", index=False)
    assert read_file(tmp_path / "x.tsv")["text"][:] == frame["text"].tolist()
    with pytest.raises(ValueError, match=r"lines 2 to 3 of x\.tsv may be one value in quotation marks or several rows"):
        read_file(written(tmp_path, "x.tsv", 'text\tlabel\n"a\nb"\t0\n'))


@pytest.mark.parametrize("content, line", [
    ('label,text\n0,a\n1,"secret\n0,b\n1,c\n', 3), ('label,text\n0,"a secret\n1,b\n0,"c\n1,d\n', 2),
    ('"label",text\n0,"secret" b\n1,c\n', 2),
    ('label,text\n0,"a\nb"\n1,c\n"0,secret\n', 5), ('\ufeffid,"text, all\n0,secret\n', 1)])
def test_a_quotation_mark_that_nothing_closes_joins_no_rows(tmp_path, content, line):
    with pytest.raises(ValueError, match=rf"line {line} of x.csv has a quotation mark that is not closed") as caught:
        read_file(written(tmp_path, "x.csv", content))
    assert "secret" not in str(caught.value)


def test_marks_that_are_closed_or_stand_within_a_text_are_read(tmp_path):
    texts = ['5" disk', 'a "b" c', '"', '""', 'x, "y"\n"z"', "", "plain"]
    frame = pd.DataFrame({"label": [0, 1] * 3 + [0], "text": texts})
    frame.to_csv(tmp_path / "x.csv", index=False)
    assert read_file(tmp_path / "x.csv")["text"][:] == texts
    written(tmp_path, "x.csv", '\ufeff"label","text"\r\n0,5" disk\r\n1,"a ""b"""\r\n')
    assert read_file(tmp_path / "x.csv")[:] == {"label": [0, 1], "text": ['5" disk', 'a "b"']}


@pytest.mark.parametrize("content, lines", [
    ('text,label\n"secret one,1\nsecret two,0\nthree,1\nfour",0\nfive,1\nsix,0\n', "2 to 5"),
    ('label,text\r\nyes,one\r\nno,two\r\nyes,"secret\r\nno,four"\r\nyes,five', "4 to 5"),
    ('id,label,text\n1,0,a\n2,1,"b\n3,0,c\n4,1,d"\n5,1,e\n', "3 to 5")])
def test_two_stray_marks_that_join_rows_to_one_value_are_refused(tmp_path, content, lines):
    with pytest.raises(ValueError, match=f"lines {lines} of x.csv stand between two quotation marks and read as rows") as caught:
        read_file(written(tmp_path, "x.csv", content))
    assert "secret" not in str(caught.value)


def test_a_text_of_several_lines_is_a_value(tmp_path):
    for content in ('text,label\n"one, and\ntwo, or",1\nthree,0\n', 'label,text\n1,"Great\nLoved it, mostly"\n0,c\n1,d\n',
                    'label,text\n1,"Dear all,\n\nno, yes"\n0,c\n1,d\n', 'text\n"a\nb"\na\nb\n'):
        rows = read_file(written(tmp_path, "x.csv", content))
        assert any("\n" in text for text in rows["text"])


@pytest.mark.parametrize("form", ["lines", "list", "nested"])
def test_half_of_a_character_is_refused_by_its_row_and_not_shown(tmp_path, form):
    half = '{"text": "secret \\ud83d", "label": 0}' if form != "nested" else '{"text": ["secret \\ud83d"], "label": 0}'
    rows = ['{"text": "\\ud83d\\ude00", "label": 1}' if form != "nested" else '{"text": ["a"], "label": 1}', half]
    path = written(tmp_path, "x.json", f"[{','.join(rows)}]" if form == "list" else "\n".join(rows))
    with pytest.raises(ValueError, match=r"^row 1 of x.json holds half of a character") as caught:
        read_file(path)
    assert "secret" not in str(caught.value)
    assert read_file(written(tmp_path, "y.json", rows[0])).num_rows == 1


def test_half_of_a_character_in_a_list_of_rows_is_refused_by_its_row(tokenizer):
    for kind, rows, columns in (("text", [{"text": text, "label": row} for row, text in enumerate(["a", "\ud83d"])], ("text", "label")),
                                ("causal", [{"p": "a", "c": text} for text in ("b", "\ud83d")], ("p", "c"))):
        with pytest.raises(ValueError, match=r"row 1 of column '(text|c)' is not a text"):
            encode(rows, tokenizer, columns, kind=kind)


@pytest.mark.parametrize("words", [["a", None], ["a", 3], None, "ab", ["a", "\ud83d"]])
def test_words_that_are_none_are_refused_by_their_row(tokenizer, words):
    rows = TableData({"tokens": [["a", "b"], words], "tags": [["O", "X"], ["O", "X"]]})
    with pytest.raises(ValueError, match="row 1 of column 'tokens' is not a list of words"):
        encode_tags(rows, tokenizer, ("tokens", "tags"))


def test_json_that_is_nested_too_deeply_is_refused_by_its_line(tmp_path):
    deep = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(ValueError, match=r"line 2 of x.jsonl is not JSON"):
        read_file(written(tmp_path, "x.jsonl", '{"text": "a"}\n' + deep))


@pytest.mark.parametrize("form", ["pandas", "arrow"])
def test_a_data_set_in_another_librarys_format_is_read_as_its_rows_are(form, tokenizer):
    rows = Dataset.from_dict({"text": ["a", "b c"] * 4, "label": [0, 1] * 4, "aside": [0] * 8}).with_format(form, columns=["text", "label"])
    ready = prepare(bert(["x", "y"]), rows, tokenizer)
    assert ready.schema.line() == "reads: text; label: label" and ready.train.labels.tolist() == [0, 1] * 4


def test_a_table_of_arrow_is_a_table(tokenizer):
    import pyarrow as pa

    rows = pa.table({"text": ["a", "b c"] * 4, "label": [0, 1] * 4})
    assert prepare(bert(["x", "y"]), rows, tokenizer).train.labels.tolist() == [0, 1] * 4
    with pytest.raises(ValueError, match="two columns are named 'a'"):
        as_dataset(pa.table([[1], [2]], names=["a", "a"]))


@pytest.mark.parametrize("rows", [[("text", 0), ("more", 1)], ["text", "more"], pd.Series(["text", "more"])])
def test_texts_that_are_no_table_are_refused_with_the_way_to_give_them(rows):
    with pytest.raises(ValueError, match=r"not pictures with labels; give texts as a table, such as \{'text'"):
        dpft.fine_tune("mlp", rows, dpft.Full(), 4.0)


def test_a_path_names_data_as_its_text_does(tmp_path):
    written(tmp_path, "x.csv", "text,label\na,0\nb,1\n")
    assert load_data(tmp_path / "x.csv").train["text"][:] == ["a", "b"]


def test_what_a_table_holds_besides_has_a_fingerprint():
    from fractions import Fraction
    from uuid import UUID

    def table_of(value):
        return fingerprint(as_dataset(pd.DataFrame({"text": ["a", "b"], "aside": pd.Series([value, value], dtype=object)})))
    for one, other in ((Decimal("1.0"), Decimal("1.00")), (UUID(int=1), UUID(int=2)), (datetime.timedelta(1), datetime.timedelta(2)),
                       (pd.Period("2020"), pd.Period("2021")), (pd.Interval(0, 1), pd.Interval(0, 2)), (Fraction(1, 2), Fraction(1, 3)),
                       (pd.NA, None), ("\ud83d", "?"), (pd.Timedelta(1), pd.Timedelta(2))):
        assert table_of(one) == table_of(one) != table_of(other)
    class Other:
        pass
    with pytest.raises(ValueError, match="cannot fingerprint a Other"):
        table_of(Other())


def test_no_repr_of_a_task_shows_whose_rows_it_has():
    assert "ann" not in repr(as_task(table(text=["a", "b"] * 4, label=[0, 1] * 4), unit=["ann", "bob"] * 4))


def test_a_folder_of_files_and_one_of_pictures(tmp_path, monkeypatch):
    import datasets
    from PIL import Image as Picture

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts, pictures, empty = tmp_path / "texts", tmp_path / "pictures", tmp_path / "empty"
    for folder in (texts, empty):
        folder.mkdir()
    written(texts, "train.csv", CSV)
    written(texts, "validation.jsonl", '{"text": "x", "label": 0, "user": "cem"}\n')
    task = load_data(str(texts), columns=("text", "label"), classes=("no", "yes"))
    assert (len(task.train), len(task.dev), task.test, task.classes) == (2, 1, None, ("no", "yes"))
    for name in ("cat", "dog"):
        (pictures / "train" / name).mkdir(parents=True)
        for number in range(2):
            Picture.fromarray(np.full((4, 4, 3), number, np.uint8)).save(pictures / "train" / name / f"{number}.png")
    task = load_data(str(pictures))
    assert (task.kind, task.classes, task.image_shape, len(task.train)) == ("image", ("cat", "dog"), (3, 4, 4), 4)
    assert task.train.labels.tolist() == [0, 0, 1, 1] and task.train.images.flatten(1)[:, 0].tolist() == [0, 1, 0, 1]
    assert not (tmp_path / "cache").exists()                       # no second copy
    assert len(load_data(str(pictures / "train")).train) == 4      # without parts
    (pictures / "test" / "cow").mkdir(parents=True)
    Picture.fromarray(np.zeros((4, 4, 3), np.uint8)).save(pictures / "test" / "cow" / "0.png")
    with pytest.raises(ValueError, match="has the class 'cow', which the training pictures do not have"):
        load_data(str(pictures))
    with pytest.raises(ValueError, match="holds no data set"):
        load_data(str(empty))


def test_a_file_is_read_without_a_copy_on_the_disk(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load_data(str(written(tmp_path, "notes.csv", CSV)), limit=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.csv"]


def test_no_rows_have_no_columns():
    assert column_names([]) == ()


@pytest.mark.parametrize("columns", [("rejected", "chosen"), ("messages", "label"), ("prompt", "completion", "label")])
def test_what_is_to_be_learned_is_asked_where_it_cannot_be_told(columns):
    talk = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2
    own = {name: [0, 1] if name == "label" else talk if name in ("rejected", "chosen", "messages") else ["a", "b"] for name in columns}
    with pytest.raises(ValueError, match=r"cannot tell .* with columns="):
        read_schema(table(**own), None)


def bert(names):
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    return BertForSequenceClassification(config)


def test_names_of_classes_have_the_numbers_that_the_model_gives_them(tokenizer):
    data = table(text=["a", "b", "c"], label=["positive", "negative", "positive"])
    ready = prepare(bert(["positive", "negative"]), data, tokenizer)
    assert ready.train.labels.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="none of the 2 classes"):
        prepare(bert(["good", "bad"]), data, tokenizer)
    assert prepare(bert(["LABEL_0", "LABEL_1"]), data, tokenizer).train.labels.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="number the same classes differently"):
        prepare(bert(["positive", "negative"]), as_task(data), tokenizer)


@pytest.mark.parametrize("own, named", [(["NEGATIVE", "POSITIVE"], ["positive", "negative"]), (["neg", "neu", "pos"], ["neg", "pos"]),
                                        (["neg", "pos"], ["sports", "tech"])])
def test_classes_that_a_model_and_the_data_name_differently_are_refused(own, named, tokenizer):
    "The saved model would answer with its own names for the data's classes."
    features = Features({"text": Value("string"), "label": ClassLabel(names=named)})
    data = Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]}, features=features)
    with pytest.raises(ValueError, match=r"are not the data's.*id2label"):
        prepare(bert(own), data, tokenizer)
    assert prepare(bert(named), data, tokenizer).classes == tuple(named)
    assert prepare(bert(own), table(text=["a", "b", "c"], label=[0, 1, 0]), tokenizer).train.labels.tolist() == [0, 1, 0]


def test_a_named_model_takes_the_names_of_the_classes_and_keeps_them(tokenizer, tmp_path):
    "Transformers' pipeline then answers with them; a checkpoint's own names stay, and another order is refused."
    from transformers import AutoConfig
    data = table(text=["a", "b", "c"] * 4, label=["positive", "negative", "positive"] * 4)
    bert([f"LABEL_{number}" for number in range(2)]).save_pretrained(tmp_path / "new")
    bert(["positive", "negative"]).save_pretrained(tmp_path / "old")
    settings = {"tokenizer": tokenizer, "epsilon": 8.0, "steps": 1, "batch_size": 4, "learning_rate": 0.1}
    run = dpft.fine_tune(str(tmp_path / "new"), data, dpft.Full(), **settings)
    run.save(tmp_path / "run")
    for config in (run.model.config, dpft.load(tmp_path / "run").config, AutoConfig.from_pretrained(tmp_path / "run")):
        assert config.id2label == {0: "negative", 1: "positive"} and config.label2id["positive"] == 1
    with pytest.raises(ValueError, match="number the same classes differently"):
        prepare(str(tmp_path / "old"), data, tokenizer)
    assert load_model(str(tmp_path / "old"), ["bad", "good"]).config.id2label == {0: "positive", 1: "negative"}


@pytest.mark.parametrize("make", [torch.as_tensor, torch.Tensor.numpy], ids=["tensor", "array"])
def test_items_that_are_tensors_are_stacked_and_never_split(make):
    "Two features of a bare row passed for an input and its label."
    rows = [make(row) for row in torch.randn(6, 2)]
    (batch,) = collate_for(rows)(rows)
    assert torch.equal(batch, torch.stack([torch.as_tensor(row) for row in rows]))


def test_pictures_of_unequal_sizes_are_refused_rather_than_padded():
    rows = [(torch.ones(3, size, 4), 0) for size in (4, 5)]
    with pytest.raises(ValueError, match=r"part 0 .*collate_fn="):
        collate_for(rows)(rows)
    words = [{"input_ids": torch.ones(size)} for size in (2, 3)]
    assert collate_for(words)(words)["input_ids"].shape == (2, 3)


def test_encode_takes_data_in_any_form(tokenizer):
    columns = {"text": ["a b", "c"], "label": [0, 1]}
    for data in (columns, pd.DataFrame(columns), table(**columns)):
        assert encode(data, tokenizer, ("text", "label")).labels.tolist() == [0, 1]


def test_numerals_are_numbered_by_their_value():
    assert read_labels([str(number) for number in range(12)]).values.tolist() == [*range(12)]
    assert read_labels(["1", "01", "2", "001"]).classes == read_labels(["01", "001", "1", "2"]).classes == ("001", "01", "1", "2")


@pytest.mark.parametrize("wrong", [7, -1, float("nan"), 1.5])
def test_labels_of_several_classes_are_zeros_and_ones(wrong):
    with pytest.raises(ValueError, match=r"row 1 in column 'label' .*neither 0 nor 1"):
        read_labels([[0, 1], [1, wrong]])
    assert read_labels([[0, 1], [1, -100], [0.25, 0.75]]).values.tolist() == [[0, 1], [1, -100], [0.25, 0.75]]


@pytest.mark.parametrize("classes", [None, 1, 2, ["x"]])
def test_one_class_is_nothing_to_learn(classes):
    "A model of one class would have one output, which is a regression."
    with pytest.raises(ValueError, match="column 'label' holds a single class"):
        read_labels(["x"] * 12, classes=classes)
    assert read_labels(["x"] * 12, classes=["w", "x"]).values.tolist() == [1] * 12


@pytest.mark.parametrize("name, content, words", [
    ("x.csv", "text,label\nfine,1\n".encode("utf-16"), "x.csv is in UTF-16; .* iconv -f utf-16 -t utf-8"),
    ("x.tsv", "text\tlabel\nfine\t1\n".encode("utf-16"), "x.tsv is in UTF-16"),
    ("x.jsonl", '{"text": "a"}'.encode("utf-16"), "x.jsonl is in UTF-16"),
    ("x.csv", "text,label\nfine,1\n".encode("utf-32"), "x.csv is in UTF-32; .* iconv -f utf-32 -t utf-8"),
    ("x.jsonl", '{"text": "a"}'.encode("utf-32"), "x.jsonl is in UTF-32"),
    ("x.csv", gzip.compress(b"text,label\nfine,1\n", mtime=0), "x.csv is compressed by gzip; unpack it first"),
    ("x.json", gzip.compress(b'[{"text": "a"}]', mtime=0), "x.json is compressed by gzip"),
    ("x.csv", b"PK\x03\x04 and more", "x.csv is a ZIP archive, as spreadsheets are; "),
    ("x.csv", "sep=,\ntext,label\nfine,1\n", "x.csv begins with a line that names its separator; remove that line"),
    ("x.csv", "\ufeffsep=;\ntext;label\nfine;1\n", "begins with a line that names its separator"),
    ("x.csv", '"sep=,"\ntext,label,more\nfine,1,2\n', "begins with a line that names its separator"),
    ("x.json", '{"text": ["a", "b"], "label": [0, 1]}', "x.json holds one object of columns"),
    ("x.json", '{\n "text": ["a", "b"],\n "label": [0, 1]\n}', "x.json holds one object of columns"),
    ("x.json", '{"text": {"0": "a", "1": "b"}, "label": {"0": 0, "1": 1}}', "x.json holds one object of columns"),
    ("x.json", '{"data": [{"text": "a", "label": 0}]}', "x.json holds one object of columns"),
    ("x.json", '{"version": 1, "data": [{"text": "a", "label": 0}]}', "x.json holds one object of columns"),
    ("x.json", '[{"text": "a", "user": "ann", "user": "bob"}]', "an object of x.json names 'user' twice; keep one"),
    ("x.jsonl", '{"text": "a"}\n{"text": "b", "user": "ann", "user": "bob"}', "line 2 of x.jsonl names 'user' twice; keep one"),
])
def test_a_file_of_another_layout_says_which(tmp_path, name, content, words):
    with pytest.raises(ValueError, match=words):
        read_file(written(tmp_path, name, content))


@pytest.mark.parametrize("data, words", [
    (DatasetDict(validation=Dataset.from_dict({"text": ["a"]}), test=Dataset.from_dict({"text": ["b"]})), "the splits validation, test;"),
    ({"train": [{"text": "a", "label": 0}], "test": [{"text": "b", "label": 1}]}, "the splits train, test;"),
    ({"train": [{"text": "a", "label": 0}] * 2, "test": [{"text": "b", "label": 1}]}, "the splits train, test;"),
    ({"train": pd.DataFrame({"text": ["a"]}), "dev": pd.DataFrame({"text": ["b"]})}, "the splits train, dev;"),
])
def test_splits_are_no_columns(data, words):
    with pytest.raises(ValueError, match=f"{words} give one of them"):
        as_dataset(data)


def test_a_named_model_names_the_columns_that_it_cannot_read():
    nested = [{"review": {"text": "a", "lang": "en"}, "label": row % 2} for row in range(4)]
    with pytest.raises(ValueError, match=r"no texts, pictures or tokens .* 'review' \(other\), 'label' \(number\)"):
        prepare("nowhere", nested)


def test_a_text_may_have_several_labels(tokenizer):
    rows = [{"text": text, "labels": own} for text, own in zip("abcd", [[1, 0, 1], [0.0, 0.0, 0.0], [1, 1, 0], [0, 1, 0]], strict=True)] * 5
    model = bert(["LABEL_0", "LABEL_1", "LABEL_2"])
    model.config.problem_type = "multi_label_classification"
    others = [row | {"text": row["text"] + " h"} for row in rows]
    run = dpft.fine_tune(model, rows, dpft.Full(), tokenizer=tokenizer, epsilon=8.0, steps=1, batch_size=4, learning_rate=0.1,
                         progress=False, evaluate=dpft.Public(others, "made up"))
    assert run.prepared.train.labels[:3].tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 0]] and run.prepared.train.labels.is_floating_point()
    encoded = encode(as_dataset(rows), tokenizer, ("text", "labels"))
    assert torch.equal(encoded.labels, run.prepared.train.labels)
    with pytest.raises(ValueError, match="as long as there are classes; give a model with as many outputs"):
        prepare(bert(["LABEL_0", "LABEL_1"]), rows, tokenizer)
    with pytest.raises(ValueError, match=r"holds lists of names; .* 1 for each class"):
        prepare(model, [{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": ["x"]}], tokenizer)


@pytest.mark.parametrize("mark", ["NA", "null", "N/A", "#N/A", " Unknown ", "?", "-"])
def test_a_mark_for_a_missing_person_is_no_person(mark):
    with pytest.raises(ValueError, match="2 of 5 rows have no unit in 'person', the first is row 1"):
        Units(["ann", mark, "bob", "ann", mark], "person")
    assert len(Units(["Nan-cy", "Noneen", "Nan-cy"])) == 2


@pytest.mark.parametrize("far", [9, 10**12, 2**62])
def test_a_class_number_beyond_all_rows_is_refused_before_anything_is_counted(far):
    with pytest.raises(ValueError, match="the label of row 3 stands alone"):
        read_labels([0, 1, 0, far, 1])


@pytest.mark.parametrize("spelled, kept", [
    (("true", "True", "false"), ["true", "True", "false"]), (("true", "false", "true"), [True, False, True]),
    (("2020-01-01", "2020-01-01T00:00:00", "2021-01-01"), ["2020-01-01", "2020-01-01T00:00:00", "2021-01-01"])])
def test_truth_values_and_dates_that_are_spelled_in_two_ways_stay_texts(tmp_path, spelled, kept):
    content = "text,who\n" + "".join(f"a{row},{one}\n" for row, one in enumerate(spelled))
    found = read_file(written(tmp_path, "x.csv", content))
    assert [*found["who"]] == kept


# ---- what may be one thing under two names


@pytest.mark.parametrize("people", [["ann", "ann ", "bob", "bob"], ["ann b", "ann  b", "c", "c"], ["ann", "ann\u00a0", "bob", "bob"],
                                    [("ann", 1), (" ann", 1), ("bob", 2), ("bob", 2)], ["ann\u200b", "ann", "bob", "bob"],
                                    ["ann\u00e9", "anne\u0301", "bob", "bob"], ["an\u00adn", "ann", "bob", "bob"]])
def test_names_of_people_that_differ_by_blanks_only_are_refused_in_every_form(people):
    from dpft.scores import people_of

    data = table(text=["a", "b", "c", "d"], label=[0, 1, 0, 1], user=people)
    for read in (units_of, people_of):
        with pytest.raises(ValueError, match="unit 'user' holds texts that differ by blanks only") as caught:
            read(data, "user")
        assert "ann" not in str(caught.value) and "bob" not in str(caught.value)
    assert len(units_of(table(user=["ann b", "annb", "Ann b", "ann b"]), "user")) == 3


def test_a_person_who_is_trained_on_is_found_under_a_name_with_blanks():
    from dpft.scores import NoisyAccuracy, apart

    trained, scored = ({"text": list("ab"), "label": [0, 1], "user": [who, who]} for who in ("ann", "ann "))
    with pytest.raises(ValueError, match="2 of the 2 scored rows belong to people who are trained on too"):
        apart(NoisyAccuracy(scored, unit="user"), trained, "user")


@pytest.mark.parametrize("labels", [["pos", " pos", "neg"], ["Pos", "pos", "neg"], ["not so", "not  so", "yes"],
                                    ["caf\u00e9", "cafe\u0301", "bar"]])
def test_names_of_classes_that_differ_by_blanks_or_case_only_are_refused_unless_they_are_given(labels):
    words = "column 'label' spells one name in two ways, by blanks, case or the code of an accent; spell it in one"
    with pytest.raises(ValueError, match=words) as caught:
        read_labels(labels * 2)
    assert not any(name in str(caught.value) for name in labels)
    assert read_labels(labels, classes=labels).values.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="column 'tags' spells one name in two ways"):
        classes_of(as_dataset([{"tokens": labels, "tags": labels}] * 3), read_schema(as_dataset([{"tokens": labels, "tags": labels}])))


def test_labels_with_decimal_commas_are_no_names_of_classes_unless_they_are_given():
    words = "column 'label' holds numbers with commas; write points, or give the list of classes"
    labels = ["1,5", "2,5", "2"]
    for wrong in (labels, ["1,5", "1.5"]):
        with pytest.raises(ValueError, match=words):
            read_labels(wrong * 2)
    assert read_labels(labels, classes=labels).values.tolist() == [0, 1, 2]
    assert read_labels(["a,b", "2,5"] * 2).values.tolist() == [1, 0] * 2


def test_a_text_model_on_pictures_is_refused_in_one_sentence(tmp_path):
    from PIL import Image as Picture

    zoo.build("bert")[0].save_pretrained(tmp_path / "bert")
    rows = [{"image": Picture.fromarray(np.full((4, 4), i, np.uint8)), "label": i % 2} for i in range(4)]
    with pytest.raises(ValueError, match=r"^Transformers has no head for the task 'image' on the model '.*bert'; give a model"):
        prepare(str(tmp_path / "bert"), rows)


# ---- advice that can be followed


@pytest.mark.parametrize("columns, words", [
    ({"email": "a", "label": 0}, "left to read \\('email' set aside, because such names identify rows or people\\); name the texts"),
    ({"subject": "a", "email": "b", "label": 0}, "left to read \\('subject', 'email' set aside"),
    ({"user": "p", "label": 0}, "no column is left to read; name the texts and then the label with columns="),
])
def test_what_was_set_aside_for_its_name_is_said(columns, words):
    with pytest.raises(ValueError, match=words):
        read_schema(as_dataset([columns] * 3), unit="user" if "user" in columns else None)


def test_the_way_to_name_classes_leads_to_classes(tmp_path):
    path = written(tmp_path, "x.csv", "review,mood\na b,good\nc d,bad\na,good\nb,bad\n")
    with pytest.raises(ValueError, match=r"column 'mood' holds texts, .* give load_data columns= and classes=; to write it"):
        load_data(path)
    task = load_data(path, columns=("review", "mood"), classes=2)
    assert (task.kind, task.classes) == ("text", ("bad", "good"))
    written(tmp_path, "y.csv", path.read_text().replace("mood", "label"))
    assert load_data(tmp_path / "y.csv").classes == task.classes


def test_a_long_prompt_is_refused_with_a_way_that_exists(tokenizer):
    rows = [{"prompt": "a b c d e f", "completion": "g"}]
    with pytest.raises(ValueError, match=r"row 0 fills all 4 tokens .* shorten it, drop the row, or encode .* dpft\.texts\.encode"):
        encode(rows, tokenizer, ("prompt", "completion"), 4, "causal")
    assert len(encode(rows, tokenizer, ("prompt", "completion"), 16, "causal")) == 1


# ---- what is scored


def scored_run(tokenizer, evaluate, model=None, train=None):
    train = [{"text": text, "label": label} for text, label in zip("abcdefgh", [0, 1] * 4, strict=True)] if train is None else train
    return dpft.fine_tune(model or small(), train, dpft.LastLayer(), noise_multiplier=1.0, steps=1, batch_size=4, delta=0.01,
                          accountant="rdp", tokenizer=tokenizer, evaluate=evaluate, progress=False)


@pytest.mark.parametrize("rows, words", [
    ([{"text": "h h", "label": 7}], "in the data to score: the label of row 0"),
    ([{"text": "", "label": 1}], "in the data to score: row 0 has a text of zero tokens"),
    ([{"sentence": "h h", "label": 1}], "in the data to score: no column 'text'; the data has 'sentence', 'label'"),
])
def test_an_error_in_the_data_to_score_says_so(tokenizer, rows, words):
    from dpft.scores import NoisyAccuracy

    for given in (rows, NoisyAccuracy(rows, 1.0)):
        with pytest.raises(ValueError, match=words):
            scored_run(tokenizer, given)


def test_an_error_in_pictures_to_score_says_so(tmp_path):
    from PIL import Image

    for part, mode in (("train", "L"), ("test", "F")):
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            Image.new(mode, (4, 4)).save(tmp_path / part / kind / "1.tiff")
    with pytest.raises(ValueError, match="in the data to score: the picture of row 0 has mode 'F'"):
        load_data(tmp_path)


@pytest.mark.parametrize("given, words", [
    ([], "there are no rows"), (torch.zeros(3, 2), "an item of the data has 1 parts without names"),
    ((pd.DataFrame({"x": [1.0]}), pd.DataFrame({"x": [1.0]})), "part 0 of an item"),
    (torch.utils.data.TensorDataset(torch.zeros(3, 5), torch.zeros(3).long()), r"row 0 cannot be scored \(RuntimeError\)"),
])
def test_what_cannot_be_scored_is_refused_before_anything_is_charged(given, words):
    train = torch.utils.data.TensorDataset(torch.randn(12, 2), torch.arange(12) % 2)
    with pytest.raises(ValueError, match=f"in the data to score: {words}"):
        scored_run(None, given, nn.Linear(2, 2), train)
    scored_run(None, torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.zeros(3).long()), nn.Linear(2, 2), train)


def test_the_vocabulary_is_a_public_fact_of_texts_that_were_encoded_beforehand(tokenizer):
    texts = {"text": ["a b", "b"] * 6, "label": [0, 1] * 6}
    ids = {"input_ids": [[2, 3, 4]] * 12, "labels": [0, 1] * 6}
    for data in (texts, encode(texts, tokenizer, ("text", "label")), ids):
        assert prepare(small_bert(), data, tokenizer).assumed_public.count("the tokenizer's vocabulary") == 1
    pairs = [(torch.zeros(3), row % 2) for row in range(12)]
    assert "the tokenizer's vocabulary" not in prepare(nn.Linear(3, 2), pairs).assumed_public
