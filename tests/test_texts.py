"""Data in memory, digits, what is shared, and how texts and conversations become tokens."""


import numpy as np
import pytest
import torch
import zoo
from datasets import ClassLabel, Dataset, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from dpft.book.tasks import fingerprint
from dpft.data import Public, TableData, TensorData, check_disjoint_rows, shared_rows
from dpft.tasks import digits, font_digits, load_data
from dpft.texts import EncodedData, collate_for, encode


def test_tensor_data_batch_is_its_items():
    data = zoo.images()
    x, y = data.batch([5, 0, 5])
    for row, index in enumerate([5, 0, 5]):
        image, label = data[index]
        assert torch.equal(x[row], image) and y[row] == label
        assert torch.allclose(image, (data.images[index].float() / 255 - 0.1) / 0.5)
    assert all(torch.equal(a, b) for a, (b, _) in zip(x, data.__getitems__([5, 0, 5])))
    assert image.dtype == torch.float32 and isinstance(label, int)
    with pytest.raises(IndexError):
        data[7]
    with pytest.raises(ValueError, match="7 images but 6 labels"):
        TensorData(data.images, data.labels[:6])


def test_public_passes_through():
    data = zoo.images()
    public = Public(data, "nowhere")
    assert len(public) == 7 and public.source == "nowhere" and torch.equal(public.batch([1])[0], data.batch([1])[0])
    assert torch.equal(public[2][0], data[2][0]) and fingerprint(public) == fingerprint(data)
    assert not hasattr(Public([1], "list"), "batch")
    import copy
    import pickle

    assert len(copy.deepcopy(public)) == len(pickle.loads(pickle.dumps(public))) == 7


def test_digits_are_split_without_overlap_and_by_class():
    task = load_data("digits")
    assert (len(task.train), len(task.dev), task.image_shape, task.classes) == (1437, 360, (1, 8, 8), tuple("0123456789"))
    shares = [torch.bincount(part.labels, minlength=10) / len(part) for part in (task.train, task.dev)]
    assert (shares[0] - shares[1]).abs().max() < 0.003
    from sklearn.datasets import load_digits

    both = torch.cat([task.train.images, task.dev.images]).flatten(1).tolist()
    assert sorted(both) == sorted(load_digits().data.astype(int).tolist())
    assert isinstance(task.public, Public) and task.assumed_public


def test_font_digits_follow_the_seed_and_look_like_digits():
    a, b, c = (font_digits.__wrapped__(500, seed) for seed in (3, 3, 4))
    assert fingerprint(a) == fingerprint(b) != fingerprint(c)
    assert a.images.shape == (500, 1, 8, 8) and a.images.max() == 16 and torch.equal(torch.bincount(a.labels), torch.full((10,), 50))
    ink = (a.images.float() / 16).mean((1, 2, 3))
    assert (ink > 0.02).all() and (ink < 0.9).all()  # over 6,000 images 0.08 to 0.63
    from sklearn.neighbors import KNeighborsClassifier

    train, public = digits().train, font_digits(3000)
    neighbours = KNeighborsClassifier(5).fit(public.images.flatten(1), public.labels)
    assert neighbours.score(train.images.flatten(1), train.labels) > 0.4  # chance is 0.1; over seeds 0.67 +- 0.03


def test_public_data_is_made_when_it_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr("dpft.tasks.font_digits", lambda: asked.append(1))
    task = load_data("digits", limit=10)
    assert not asked and task.public is None and asked and digits().public is None


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hub"


def test_hub_text_layout(hub_cache, tokenizer):

    hub_cache.mkdir()
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["bad", "good"]), "idx": Value("int32")})
    for part, size in (("train", 8), ("validation", 4), ("test", 3)):
        columns = {
            "sentence": [f"{'a b' if row % 2 else 'c'} d" for row in range(size)],
            "label": [row % 2 for row in range(size)],
            "idx": list(range(size)),
        }
        Dataset.from_dict(columns, features=features).to_parquet(hub_cache / f"{part}.parquet")
    task = load_data(f"hub:{hub_cache}", limit=5)
    assert (task.kind, task.columns, task.classes) == ("text", ("sentence", "label"), ("bad", "good"))
    assert (len(task.train), len(task.dev), len(task.test)) == (5, 4, 3)
    encoded = encode(task.dev, tokenizer, task.columns, classes=task.classes)
    assert encoded.lengths.tolist() == [4, 5, 4, 5] and encoded.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"no column 'stars'.*'sentence', 'label', 'idx'"):
        load_data(str(hub_cache), columns=("sentence", "stars"))


def test_hub_images(hub_cache):
    from datasets import Image
    from PIL import Image as Picture

    hub_cache.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 6), np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=["x", "y"])})
    for part in ("train", "test"):
        pictures = [Picture.fromarray(picture) for picture in pixels]
        Dataset.from_dict({"image": pictures, "label": [0, 1, 0, 1, 1]}, features=features).to_parquet(hub_cache / f"{part}.parquet")
    task = load_data(str(hub_cache))
    assert (task.kind, task.columns, task.classes, task.image_shape, task.test) == (
        "image",
        ("image", "label"),
        ("x", "y"),
        (1, 6, 6),
        task.dev,
    )
    assert torch.equal(task.train.images[:, 0], torch.from_numpy(pixels)) and task.dev.labels.tolist() == [0, 1, 0, 1, 1]


ragged = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=1, max_size=10)


@given(ragged, st.integers(0, 7), st.randoms(use_true_random=False))
def test_encoded_batches_are_padded_items(rows, pad_id, chance):
    tokens = tensor([token for row in rows for token in row], dtype=torch.int32)
    lengths = tensor([len(row) for row in rows])
    for causal in (False, True):
        fields = {"input_ids": tokens, **({"labels": tokens + 1} if causal else {"token_type_ids": tokens % 2})}
        data = EncodedData(fields, lengths, None if causal else torch.arange(len(rows)), pad_id)
        chosen = [chance.randrange(len(rows)) for _ in range(4)]
        longest = max(len(rows[row]) for row in chosen)
        batch = data.batch(chosen)
        assert batch["input_ids"].tolist() == [rows[row] + [pad_id] * (longest - len(rows[row])) for row in chosen]
        assert batch["attention_mask"].tolist() == [[1] * len(rows[row]) + [0] * (longest - len(rows[row])) for row in chosen]
        if causal:
            assert batch["labels"].tolist() == [[token + 1 for token in rows[row]] + [-100] * (longest - len(rows[row])) for row in chosen]
        else:
            assert batch["labels"].tolist() == chosen
        collated = collate_for(data)([data[row] for row in chosen])
        assert collated.keys() == batch.keys() and all(torch.equal(collated[name], batch[name]) for name in batch)
        assert len(list(data)) == len(rows)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(3, 10))
@settings(max_examples=30)
def test_encode_is_the_tokenizer_row_by_row(tokenizer, rows, max_length):
    texts = [" ".join(row) for row in rows]
    data = encode(TableData({"text": texts, "y": [row % 2 for row in range(len(rows))]}), tokenizer, ("text", "y"), max_length, classes=2)
    for row, text in enumerate(texts):
        assert data[row]["input_ids"].tolist() == tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        assert data.lengths[row] == len(data[row]["input_ids"]) <= max_length
    pairs = encode(TableData({"one": texts, "two": texts[::-1], "y": [0] * len(rows)}), tokenizer, ("one", "two", "y"), 64)
    want = tokenizer(texts[0], texts[-1])
    assert all(pairs[0][name].tolist() == want[name] for name in want)


@given(
    st.lists(st.tuples(*[st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6)] * 2), min_size=1, max_size=6), st.integers(8, 14)
)
@settings(max_examples=30)
def test_encode_completions_counts_the_completion_only(tokenizer, rows, max_length):
    table = TableData({"mr": [" ".join(head) for head, _ in rows], "ref": [" ".join(tail) for _, tail in rows]})
    tokenizer.eos_token = "z"
    try:
        data = encode(table, tokenizer, ("mr", "ref"), max_length, kind="causal")
    finally:
        tokenizer.eos_token = None
    ids = tokenizer.convert_tokens_to_ids
    for row, (head, tail) in enumerate(rows):
        whole = [*ids(head), 3, *ids(tail), ids("z")][:max_length]
        assert data[row]["input_ids"].tolist() == whole
        assert data[row]["labels"].tolist() == [-100] * (len(head) + 1) + whole[len(head) + 1 :]


def test_encode_refuses_bad_rows(tokenizer):
    table = {"text": ["a", "b"], "label": [0, 1]}
    for columns, message in (
        ({"text": ["", "  "]}, "2 of 2 rows have no text in column 'text', the first is row 0"),
        ({"text": ["a", None]}, "1 of 2 rows have no text"), ({"text": ["a", 3]}, "row 1 of column 'text' is not a text"),
        ({"label": [0, 2]}, "the label of row 1 is outside the 2 classes"),
        ({"label": [0, "x"]}, "column 'label' holds neither class numbers nor class names"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(TableData({**table, **columns}), tokenizer, ("text", "label"), classes=2)
    for rows in (TableData(table), [{"text": "a", "label": 0}]):
        with pytest.raises(ValueError, match="no column 'sentence'; the data has 'text', 'label'"):
            encode(rows, tokenizer, ("sentence", "label"))
    pairs = TableData({"mr": ["a b c d e f g h", "a"], "ref": ["a", "b"]})
    with pytest.raises(ValueError, match="1 of 2 rows have no token of a completion within 5, for the prompt fills them"):
        encode(pairs, tokenizer, ("mr", "ref"), 5, kind="causal")
    with pytest.raises(ValueError, match="1 of 2 rows have no text in column 'ref'"):
        encode({**pairs.columns, "ref": ["a", ""]}, tokenizer, ("mr", "ref"), 50, kind="causal")


def flipped(data):
    return TensorData(data.images, 1 - data.labels.clamp(max=1), data.scale, data.mean, data.std)


def as_items(data):
    return [data[row] for row in range(len(data))]


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
@settings(max_examples=30)
def test_shared_rows_are_those_in_both(first, second):
    """Of texts, pictures, tuples and padded tokens alike; the order, the label and blanks around a text make no difference."""
    first, second = sorted(first), sorted(second, reverse=True)
    expected = [place for place, row in enumerate(first) if row in second]
    texts = [f"text {row}" for row in range(12)]
    pictures = zoo.images(12)
    pairs = [(TableData({"sentence": [f" {texts[row]}\n" for row in first], "label": [0] * len(first)}),
              TableData({"sentence": [texts[row] for row in second], "label": [1] * len(second)})),
             (flipped(pictures.subset(first)), pictures.subset(second)),
             (as_items(flipped(pictures.subset(first))), as_items(pictures.subset(second))),
             ([{"input_ids": tensor([row, 7]), "attention_mask": tensor([1, 1]), "labels": 1} for row in first],
              [{"input_ids": tensor([row, 7, 0]), "attention_mask": tensor([1, 1, 0]), "labels": 0} for row in second])]
    for public, private in pairs:
        assert shared_rows(Public(public, "elsewhere"), private) == expected
        if expected:
            with pytest.raises(ValueError, match=rf"^{len(expected)} of the {len(first)} rows .*\(elsewhere\).*row {expected[0]};"):
                check_disjoint_rows(Public(public, "elsewhere"), private)
        else:
            check_disjoint_rows(Public(public, "elsewhere"), private)


def test_a_picture_is_known_under_another_scale_and_normalisation():
    stored = zoo.images()
    floats = TensorData(stored.images.float() / 255, stored.labels)
    assert shared_rows(floats, stored) == list(range(7))
    brighter = TensorData(stored.images, stored.labels, 128.0)
    assert shared_rows(brighter, stored) == [] and shared_rows(zoo.images(seed=1), stored) == []


def test_encoded_texts_compare_with_encoded_texts_only(tokenizer):
    table = TableData({"text": ["a b c", "d", "e f"], "label": [0, 1, 0]})
    other = TableData({"text": ["d", "a b", "e f"], "label": [0, 1, 0]})
    first, second = (encode(data, tokenizer, ("text", "label")) for data in (table, other))
    assert shared_rows(first, second) == [1, 2] == shared_rows(as_items(first), second)
    with pytest.raises(ValueError, match=r"cannot be compared with .* before they are tokenised"):
        shared_rows(table, second)
    with pytest.raises(ValueError, match="pictures cannot be compared with numbers"):
        shared_rows(zoo.images(), as_items(zoo.images()))
    assert shared_rows(TableData({"text": [], "label": []}), table) == [] == shared_rows(table, first.__class__({"input_ids": tensor([])},
                                                                                                           tensor([], dtype=int)))


TURN = "{% for m in messages %}{% if m['role'] == 'user' %}[CLS] {{ m['content'] }} q {% else %}"


TEMPLATES = {  # how a template may write what the assistant says
    "marked": TURN + "{% generation %}{{ m['content'] }} [SEP] {% endgeneration %}{% endif %}{% endfor %}",
    "marked without space": TURN + "{% generation %}{{ m['content'] }} [SEP]{% endgeneration %} {% endif %}{% endfor %}",
    "not marked": TURN + "{{ m['content'] }} [SEP] {% endif %}{% endfor %}",
    "with a prompt": "{% for m in messages %}{% if m['role'] == 'user' %}[CLS] {{ m['content'] }}{% else %} q {{ m['content'] }} [SEP] "
                     "{% endif %}{% endfor %}{% if add_generation_prompt %} q {% endif %}",
}


words = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map(" ".join)


def conversation(turns):
    return [{"role": role, "content": text} for ask, answer in turns for role, text in (("user", ask), ("assistant", answer))]


@given(st.lists(st.lists(st.tuples(words, words), min_size=1, max_size=3), min_size=1, max_size=4), st.sampled_from(sorted(TEMPLATES)))
@settings(max_examples=40)
def test_conversations_count_what_the_assistant_says(tokenizer, rows, name):
    tokenizer.chat_template = TEMPLATES[name]
    encoded = encode(TableData({"messages": [conversation(turns) for turns in rows]}), tokenizer, ("messages",), 200, "causal")
    for row, turns in zip(as_items(encoded), rows, strict=True):
        assert tokenizer.decode(row["input_ids"]).split() == [
            word for ask, answer in turns for word in ("[CLS]", *ask.split(), "q", *answer.split(), "[SEP]")]
        counted = row["labels"] != -100
        assert torch.equal(row["labels"][counted], row["input_ids"][counted])
        assert tokenizer.decode(row["labels"][counted]).split() == [word for _, answer in turns for word in (*answer.split(), "[SEP]")]


def test_bad_conversations_are_refused(tokenizer):
    good = conversation([("a", "b")])
    tokenizer.chat_template = TEMPLATES["not marked"]
    for rows, most, template, said in (
            *(([good, bad], 128, "not marked", "1 of 2 rows have no conversation.* the first is row 1")
              for bad in ([], "a text", [{"role": "user"}], None)),
            ([good, good[:1]], 128, "not marked", "1 of 2 rows have no answer of the assistant's, the first is row 1"),
            ([good, good], 3, "not marked", "2 of 2 rows have no word of the assistant's within 3 tokens.* larger max_length="),
            ([conversation([("a", "b"), ("c", "d")])], 128, "counted", "the chat template rewrites earlier turns"),
            ([good], 128, "none", "no chat template")):
        tokenizer.chat_template = {**TEMPLATES, "none": None, "counted": "{{ messages | length }} " + TEMPLATES["not marked"]}[template]
        with pytest.raises(ValueError, match=said):
            encode(TableData({"messages": rows}), tokenizer, ("messages",), most, "causal")


def test_conversations_in_sharegpts_form_are_read_alike(tokenizer):
    tokenizer.chat_template = TEMPLATES["not marked"]
    rows = [conversation([("a", "b"), ("c", "d")])]
    other = [[{"from": {"user": "human", "assistant": "gpt"}[said["role"]], "value": said["content"]} for said in row] for row in rows]
    first, second = (encode({"messages": given}, tokenizer, ("messages",), kind="causal").fields for given in (rows, other))
    assert all(torch.equal(first[name], second[name]) for name in ("labels", "input_ids"))


def test_of_several_prompts_some_may_be_blank(tokenizer):
    table = {"instruction": ["a", "b"], "input": ["c", ""], "output": ["d", "e"]}
    found = encode(table, tokenizer, ("instruction", "input", "output"), kind="causal")
    assert [tokenizer.decode(row["input_ids"]) for row in found] == ["a c [SEP] d", "b [SEP] e"]
    with pytest.raises(ValueError, match=r"1 of 2 rows have no text in column 'instruction \+ input'"):
        encode({**table, "instruction": ["a", " "]}, tokenizer, ("instruction", "input", "output"), kind="causal")


def test_shared_conversations_are_found():
    first, second = (TableData({"messages": [conversation(turns) for turns in rows]}) for rows in (
        [[("a", "b")], [("c", "d")]], [[("c", "d")], [("a", "d")]]))
    assert shared_rows(first, second) == [1]


def test_a_column_that_one_set_lacks_hides_no_shared_row():
    private = TableData({"text": ["a b", "c"], "label": [0, 1], "date": ["monday", "tuesday"]})
    assert shared_rows(TableData({"text": ["c", "d"], "label": [0, 1]}), private) == [0]
    assert shared_rows(private, TableData({"text": ["c", "d"], "label": [0, 1]})) == [1]
    assert shared_rows(TableData({"review": ["c", "d"], "label": [0, 1]}), private.__class__({"text": ["a", "c"], "label": [0, 1]})) == [0]

