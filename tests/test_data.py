"""Data: sources, identity, tokens, and the cut of a draw into physical batches."""

import io
import lzma
import os
import random
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from dpft.identity import repeated_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from dpft.book.tasks import CIFAR10_CLASSES, fingerprint
from dpft.data import Public, TableData, TensorData, as_dataset, check_disjoint_rows, check_labels, shared_rows
from dpft.noise import Keystream
from dpft.registry import did_you_mean
from dpft.sampling import Augmentation, chosen_views, gather, physical_batches, poisson_draw
from dpft.tasks import digits, font_digits, load_data, read_file, task_of
from dpft.texts import EncodedData, collate_for, encode


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def images(size=7, channels=3, side=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size, channels, side, side), generator=generator, dtype=torch.uint8)
    return TensorData(pixels, torch.arange(size) % 3, 255.0, [0.1] * channels, [0.5] * channels)


# Data sets


def test_tensor_data_batch_is_its_items():
    data = images()
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


def test_tensor_data_serves_a_torch_loader():
    data = images(10)
    batches = list(torch.utils.data.DataLoader(data, batch_size=4))
    assert torch.equal(torch.cat([x for x, _ in batches]), data.batch(range(10))[0])
    assert torch.equal(torch.cat([y for _, y in batches]), data.labels)


def test_public_passes_through():
    data = images()
    public = Public(data, "nowhere")
    assert len(public) == 7 and public.source == "nowhere" and torch.equal(public.batch([1])[0], data.batch([1])[0])
    assert torch.equal(public[2][0], data[2][0]) and fingerprint(public) == fingerprint(data)
    assert not hasattr(Public([1], "list"), "batch")
    import copy
    import pickle

    assert len(copy.deepcopy(public)) == len(pickle.loads(pickle.dumps(public))) == 7


@given(st.lists(st.integers(-3, 6), min_size=1, max_size=12), st.integers(1, 5))
def test_check_labels_names_the_first_bad_row(labels, classes):
    bad = [row for row, label in enumerate(labels) if not 0 <= label < classes]
    for given_labels in (labels, tensor(labels), np.array(labels), TableData({"label": labels})):
        if bad:
            with pytest.raises(ValueError, match=f"the label of row {bad[0]} "):
                check_labels(given_labels, classes)
        else:
            check_labels(given_labels, [str(number) for number in range(classes)])


@pytest.mark.parametrize("label", ["good", 1.0, None, True])
def test_check_labels_refuses_what_is_no_number(label):
    with pytest.raises(ValueError, match="row 1 is not a class number"):
        check_labels([0, label], 2)


# Identity

SAMPLE = """
from dpft.data import TableData
from dpft.book.tasks import fingerprint
from dpft.tasks import digits
print(fingerprint(TableData({"t": ["ä", "b"], "label": [0, 1]})), fingerprint(digits().train))
"""


def test_fingerprint_is_the_same_in_every_process():
    here = [fingerprint(TableData({"t": ["ä", "b"], "label": [0, 1]})), fingerprint(digits().train)]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", SAMPLE], capture_output=True, text=True, env=environment, check=True)
        assert run.stdout.split() == here


@given(st.lists(st.tuples(st.text(max_size=5), st.integers(0, 9)), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_fingerprint_changes_with_any_row(rows, chance):
    def table(rows):
        return TableData({"text": [text for text, _ in rows], "label": [label for _, label in rows]})

    before = fingerprint(table(rows))
    assert before == fingerprint(table(list(rows)))
    place = chance.randrange(len(rows))
    text, label = rows[place]
    for changed in ((text + "x", label), (text, label + 1), (text, str(label)), (text, float(label))):
        assert fingerprint(table([*rows[:place], changed, *rows[place + 1 :]])) != before
    assert fingerprint(table(rows[:place] + rows[place + 1 :]) if len(rows) > 1 else []) != before
    assert fingerprint(table([*rows, rows[0]])) != before
    shuffled = rows[:]
    chance.shuffle(shuffled)
    assert (fingerprint(table(shuffled)) == before) == (shuffled == rows)


def test_fingerprint_sees_bytes_shapes_types_and_scaling():
    data = images()
    seen = {fingerprint(data)}
    for row in range(7):
        changed = data.images.clone()
        changed[row, 0, 0, 0] ^= 1
        seen.add(fingerprint(TensorData(changed, data.labels, data.scale, data.mean, data.std)))
    seen.add(fingerprint(TensorData(data.images, data.labels, 1.0, data.mean, data.std)))
    seen.add(fingerprint(TensorData(data.images.view(7, 3, 2, 8), data.labels, data.scale, data.mean, data.std)))
    seen.add(fingerprint(data.subset(list(reversed(range(7))))))
    assert len(seen) == 11
    items = [
        [],
        [[]],
        [""],
        [b""],
        [None],
        ["ab", "c"],
        ["a", "bc"],
        [("a", "b"), "c"],
        [("a", ("b", "c"))],
        [{"a": 1}],
        [("a", 1)],
        [1],
        [1.0],
        [True],
        ["1"],
        [np.array(["a", None], dtype=object)],
        [np.array(["a", 1], dtype=object)],
        [tensor(1)],
        [tensor([1])],
        ["xstr;y", "z"],
        ["x", "ystr;z"],  # a text that looks like the head of the next
        [tensor([1], dtype=torch.int32)],
    ]
    assert len({fingerprint(item) for item in items}) == len(items)
    with pytest.raises(ValueError, match="cannot fingerprint a set"):
        fingerprint([{1, 2}])


def test_names_of_several_types_within_a_value_have_an_order():
    mixed, other = ([{1: "a", "b": 2, None: 3}], [{None: 3, "b": 2, 1: "a"}])
    assert fingerprint(TableData({"extra": mixed})) == fingerprint(TableData({"extra": other}))


def test_fingerprint_of_a_table_and_of_a_datasets_dataset_agree():
    from datasets import Dataset

    columns = {"text": ["one", "two", "three"], "label": [0, 1, 1]}
    assert fingerprint(Dataset.from_dict(columns)) == fingerprint(TableData(columns))


# Sources


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


@pytest.mark.parametrize("name, near", [("digit", "digits"), ("sst-2", "sst2"), ("cifar", "cifar10"), ("fashion-mnist", "fashion_mnist")])
def test_unknown_name_gets_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"unknown data set '{name}'; did you mean .*{near}"):
        load_data(name)


def test_public_data_is_made_when_it_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr("dpft.tasks.font_digits", lambda: asked.append(1))
    task = load_data("digits", limit=10)
    assert not asked and task.public is None and asked and digits().public is None


@pytest.mark.parametrize("name, said", [
    ("alph", "did you mean alpha?"), ("ALPHA", "did you mean alpha?"), ("dpfrost", "did you mean DPFrost?"), ("bet", "did you mean beta?"),
    ("zzz", "choose alpha, beta, DPFrost")])
def test_a_refusal_ends_in_the_nearest_names_whatever_their_case(name, said):
    assert did_you_mean(name, iter(["alpha", "beta", "DPFrost"])) == said


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("DPFT_DATA", raising=False)
    with pytest.raises(ValueError, match="set DPFT_DATA to their folder"):
        load_data("sst2")
    with pytest.raises(ValueError, match=r"cifar10_train_0.webp does not exist; give root=, or set DPFT_DATA"):
        load_data("cifar10", root=tmp_path)
    monkeypatch.setenv("DPFT_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"e2e_nlg_train.parquet does not exist"):
        load_data("e2e")


def parquet(path, columns):
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path)


def test_local_tables(tmp_path):
    for part, size in (("train", 9), ("dev", 4), ("test", 5)):
        parquet(
            tmp_path / f"sst2_{part}.parquet",
            {"sentence": [f"{part} {row}" for row in range(size)], "label": np.array([row % 2 for row in range(size)], dtype=np.int8)},
        )
        parquet(tmp_path / f"e2e_nlg_{part}.parquet", {"mr": [f"name[{row}]" for row in range(size)], "ref": ["It is."] * size})
    task = load_data("sst2", root=tmp_path)
    assert (task.kind, task.columns, task.classes) == ("text", ("sentence", "label"), ("negative", "positive"))
    assert (len(task.train), len(task.dev), len(task.test), task.train[3]) == (9, 4, 5, {"sentence": "train 3", "label": 1})
    check_labels(task.train, task.classes)
    task = load_data("e2e", root=tmp_path, limit=6)
    assert (task.kind, task.columns, task.classes, len(task.train), len(task.dev)) == ("causal", ("mr", "ref"), (), 6, 4)
    assert fingerprint(task.train) == fingerprint(load_data("e2e", root=tmp_path, limit=6).train)
    with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
        load_data("e2e", root=tmp_path, limit=0)


@pytest.mark.parametrize("given, said", [
    ({"source": "nonsense"}, "source=nonsense: choose local or hub"), ({"source": "hub"}, "'digits' lies in one place only"),
    ({"columns": ("nonsense",)}, "columns=nonsense: those of digits are fixed"), ({"classes": 3}, "classes=3: digits has 10"),
    ({"unit": "writer"}, "no column 'writer' in digits"), ({"limit": 1.5}, "not 1.5, and a whole number")])
def test_what_a_named_task_does_not_take_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        load_data("digits", **given)
    assert len(load_data("digits", classes=10, unit="example", limit=np.int64(7)).train) == 7


def test_local_fashion_mnist(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {}
    for part, size in (("train", 6), ("test", 3)):
        arrays[f"x_{part}"], arrays[f"y_{part}"] = (
            generator.integers(0, 256, (size, 28, 28), np.uint8),
            generator.integers(0, 10, size, np.uint8),
        )
    with io.BytesIO() as buffer:
        np.savez(buffer, **arrays)
        (tmp_path / "fashion_mnist.npz.xz").write_bytes(lzma.compress(buffer.getvalue()))
    task = load_data("fashion_mnist", root=tmp_path)
    assert (len(task.train), len(task.dev), task.test, task.image_shape, len(task.classes)) == (6, 3, None, (1, 28, 28), 10)
    image, label = task.train[4]
    assert label == arrays["y_train"][4]
    assert np.allclose(image[0], (arrays["x_train"][4] / 255 - 0.2860) / 0.3530, atol=1e-5)


def sheet_of(pixels):
    """100 small pictures a row, as one picture; built picture by picture."""
    from PIL import Image

    sheet = Image.new("RGB", (3200, 32 * (len(pixels) // 100)))
    for place, picture in enumerate(pixels):
        sheet.paste(Image.fromarray(picture), (32 * (place % 100), 32 * (place // 100)))
    return sheet


def test_local_cifar(tmp_path):
    generator = np.random.default_rng(0)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar100").mkdir()
    parts = [generator.integers(0, 256, (200, 32, 32, 3), np.uint8) for _ in range(10)]
    held = generator.integers(0, 256, (100, 32, 32, 3), np.uint8)
    for label, pixels in enumerate(parts):
        sheet_of(pixels).save(tmp_path / f"cifar10/cifar10_train_{label}.webp", lossless=True)
        grey = np.repeat(np.arange(10 * label, 10 * label + 10, dtype=np.uint8), 100)[:, None, None, None]
        sheet_of(np.tile(grey, (1, 32, 32, 3))).save(tmp_path / f"cifar100/cifar100_train_{label}.jpg", quality=95, subsampling=0)
    sheet_of(held).save(tmp_path / "cifar10/cifar10_test.webp", lossless=True)
    task = load_data("cifar10", root=tmp_path)
    assert task.classes == CIFAR10_CLASSES and task.image_shape == (3, 32, 32)
    assert torch.equal(task.train.images.permute(0, 2, 3, 1), torch.from_numpy(np.concatenate(parts)))
    assert torch.equal(task.train.labels, torch.arange(10).repeat_interleave(200))
    assert torch.equal(task.dev.images.permute(0, 2, 3, 1), torch.from_numpy(held)) and task.dev.labels.tolist() == [
        row // 10 for row in range(100)
    ]
    assert len(load_data("cifar10", root=tmp_path, limit=50).train.labels.unique()) > 5  # not the first fifty, which are all airplanes
    task = load_data("cifar100", root=tmp_path)
    assert (len(task.train), len(task.dev)) == (9000, 1000)
    for part in (task.train, task.dev):  # a picture's grey value was its class
        assert (part.images.float().mean((1, 2, 3)) - part.labels).abs().max() < 2


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hub"


def test_hub_text_layout(hub_cache, tokenizer):
    from datasets import ClassLabel, Dataset, Features, Value

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


def test_hub_json_pairs_and_causal(hub_cache):
    import json

    for kind, rows in {
        "pairs": [{"question": "q", "context": "c", "label": row % 3} for row in range(6)],
        "causal": [{"meaning_representation": "name[A]", "human_reference": "A is."} for _ in range(6)],
    }.items():
        folder = hub_cache / kind
        folder.mkdir(parents=True)
        for part in ("train", "test"):
            (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_data(str(hub_cache / "pairs"))
    assert (task.kind, task.columns, task.classes) == ("text", ("question", "context", "label"), ("0", "1", "2"))
    assert task.test is task.dev
    task = load_data(str(hub_cache / "causal"))
    assert (task.kind, task.columns, task.classes) == ("causal", ("meaning_representation", "human_reference"), ())


def test_hub_images(hub_cache):
    from datasets import ClassLabel, Dataset, Features, Image
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


@pytest.mark.parametrize("part", ["bytes", "path"])
def test_pictures_that_are_stored_as_files_are_decoded(run, tmp_path, part):
    from io import BytesIO

    from PIL import Image as Picture

    pixels, rows = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8), []
    for number, picture in enumerate(pixels):
        Picture.fromarray(picture).save(file := BytesIO(), "png")
        (tmp_path / f"{number}.png").write_bytes(file.getvalue())
        rows.append({"bytes": file.getvalue(), "path": None} if part == "bytes"
                    else {"bytes": None, "path": str(tmp_path / f"{number}.png")})
    parquet(path := tmp_path / "rows.parquet", {"image": rows, "label": [0, 1] * 3})
    task = load_data(str(path))
    assert task.image_shape == (1, 8, 8) and torch.equal(task.train.images[:, 0], torch.from_numpy(pixels))
    for wrong, said in ((None, "row 5 has no picture"), ({"bytes": b"no", "path": None}, "picture of row 5 cannot be opened")):
        parquet(path, {"image": [*rows[:5], wrong], "label": [0, 1] * 3})
        with pytest.raises(ValueError, match=said):
            load_data(str(path))
        status, _, err = run("train", "--data", path, "--model", "cnn", "--epsilon", "4")
        assert status == 1 and said in err and "labels" not in err and err.count("\n") == 1


@pytest.mark.parametrize("form", ["feature", "bytes", "undecoded", "parquet", "pictures"])
def test_a_picture_that_notes_how_it_is_turned_is_turned_in_every_form(tmp_path, form):
    from io import BytesIO

    from datasets import Dataset, Image
    from PIL import Image as Picture

    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    exif = Picture.Exif()
    exif[274] = 6                                                   # turn it by 90 degrees, clockwise
    Picture.fromarray(pixels).save(file := BytesIO(), "png", exif=exif)
    stored = [{"bytes": file.getvalue(), "path": None}] * 4
    rows = Dataset.from_dict({"image": stored, "label": [0, 1] * 2})
    if form == "pictures":
        rows = {"image": [Picture.open(BytesIO(file.getvalue())) for _ in range(4)], "label": [0, 1] * 2}
    elif form != "bytes":
        rows = rows.cast_column("image", Image(decode=form != "undecoded"))
    if form == "parquet":
        rows.to_parquet(tmp_path / "rows.parquet")
        rows = read_file(tmp_path / "rows.parquet")
    assert torch.equal(task_of(rows).train.images[0, 0], torch.from_numpy(np.rot90(pixels, -1).copy()))


@pytest.mark.parametrize("place, fault", [(0, "broken"), (2, "broken"), (0, "truncated"), (3, "truncated"), (1, "huge")])
def test_a_picture_that_cannot_be_opened_is_named_by_its_row(tmp_path, place, fault, monkeypatch):
    from PIL import Image as Picture

    for number in range(4):
        path = tmp_path / "ab"[number // 2] / f"secret{number}.png"
        path.parent.mkdir(exist_ok=True)
        side = 40 if (number, fault) == (place, "huge") else 16
        Picture.fromarray(np.random.default_rng(number).integers(0, 256, (side, side), np.uint8)).save(path)
        if number == place and fault != "huge":
            path.write_bytes(b"none" if fault == "broken" else path.read_bytes()[:150])
    monkeypatch.setattr(Picture, "MAX_IMAGE_PIXELS", 500)           # twice as many are refused
    with pytest.raises(ValueError, match=f"the picture of row {place} cannot be opened") as caught:
        load_data(str(tmp_path))
    assert "secret" not in str(caught.value)


def shades(mode):
    "A picture with dark, middle and light parts in a mode of Pillow, and its levels from 0 to 255."
    from PIL import Image as Picture

    grey = np.repeat(np.array([[0, 100, 200, 255]], np.uint8), 4, 0)
    colour = np.stack([grey, grey.T, np.zeros_like(grey)], 2)
    if mode == "1":
        return Picture.fromarray(grey > 150), np.where(grey > 150, 255, 0)
    if mode.startswith("I;16"):
        return Picture.fromarray(grey.astype(np.uint16) * 257), grey
    if mode in ("P", "PA"):
        return Picture.fromarray(colour).convert("P", palette=Picture.Palette.ADAPTIVE).convert(mode), colour
    if mode == "CMYK":
        return Picture.fromarray(colour).convert(mode), colour
    return (Picture.fromarray(grey), grey) if mode == "L" else (Picture.fromarray(colour), colour)


@pytest.mark.parametrize("mode, ending", [
    ("1", "png"), ("P", "png"), ("P", "gif"), ("PA", None), ("I;16", "png"), ("I;16", "tiff"), ("CMYK", "tiff"),
                                          ("CMYK", None), ("RGB", "png"), ("L", "png"), ("L", None)])
def test_a_picture_of_any_mode_is_read_as_it_is_seen(tmp_path, mode, ending):
    picture, levels = shades(mode)
    if ending:
        picture.save(tmp_path / f"x.{ending}")
        picture = {"bytes": None, "path": str(tmp_path / f"x.{ending}")}
    task = task_of({"image": [picture] * 4, "label": [0, 1] * 2})
    found = task.train.images[0].permute(1, 2, 0).numpy()
    assert np.abs(found - levels.reshape(found.shape)).max() <= (2 if mode in ("P", "PA") else 0)


@pytest.mark.parametrize("mode", ["I", "F", "HSV"])
def test_a_picture_whose_levels_have_no_known_range_is_refused(mode):
    from PIL import Image as Picture

    picture = Picture.new("RGB", (4, 4)).convert("L" if mode in "IF" else "RGB").convert(mode)
    with pytest.raises(ValueError, match=f"the picture of row 1 has mode '{mode}'"):
        task_of({"image": [Picture.new("L", (4, 4)), picture], "label": [0, 1]})


REAL = {
    "sst2": (67349, 872, 1821),
    "e2e": (42061, 4672, 4693),
    "fashion_mnist": (60000, 10000, 0),
    "cifar10": (50000, 10000, 0),
    "cifar100": (45000, 5000, 0),
}


@pytest.mark.skipif("DPFT_DATA" not in os.environ, reason="DPFT_DATA names no folder with the real files")
@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    task = load_data(name)
    assert (len(task.train), len(task.dev), len(task.test or [])) == REAL[name]
    if task.kind == "image":
        check_labels(task.train, task.classes)
        assert torch.bincount(task.train.labels).unique().numel() == 1
        if name != "cifar100":
            x, _ = task.train.batch(random.Random(0).sample(range(len(task.train)), 4000))
            assert x.mean().abs() < 0.05 and (x.std() - 1).abs() < 0.05
    elif name == "sst2":
        assert abs(sum(task.train["label"]) / 67349 - 0.5578) < 1e-4 and abs(sum(task.dev["label"]) / 872 - 0.5092) < 1e-4


# Tokens

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
        ({"text": ["a", "  "]}, "row 1 has a text of zero tokens"),
        ({"text": ["a", None]}, "row 1 of column 'text' is not a text"),
        ({"label": [0, 2]}, "the label of row 1 is outside the 2 classes"),
        ({"label": [0, "x"]}, "column 'label' holds neither class numbers nor class names"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(TableData({**table, **columns}), tokenizer, ("text", "label"), classes=2)
    for rows in (TableData(table), [{"text": "a", "label": 0}]):
        with pytest.raises(ValueError, match="no column 'sentence'; the data has 'text', 'label'"):
            encode(rows, tokenizer, ("sentence", "label"))
    pairs = TableData({"mr": ["a b c d e f g h", "a"], "ref": ["a", ""]})
    with pytest.raises(ValueError, match="the prompt of row 0 fills all 5 tokens that are read of a row; shorten it"):
        encode(pairs, tokenizer, ("mr", "ref"), 5, kind="causal")
    with pytest.raises(ValueError, match="row 1 has a text of zero tokens"):
        encode(pairs, tokenizer, ("mr", "ref"), 50, kind="causal")


def test_gather_takes_either_way_to_the_same_batch(tokenizer):
    data = images()
    plain = [data[row] for row in range(7)]
    for rows in ([3, 1, 1], tensor([3, 1, 1])):
        assert all(torch.equal(a, b) for a, b in zip(gather(data, rows), gather(plain, rows)))
    with pytest.raises(ValueError, match="tokenise them first"):
        collate_for(TableData({"text": ["a"], "label": [0]}))
    with pytest.raises(ValueError, match="no items to collate"):
        collate_for(data)([])
    raw = [{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7], "labels": 0}]
    assert collate_for(raw, tokenizer)(raw)["input_ids"].tolist() == [[5, 6], [7, 0]]


# Rows by themselves


FULL = [{"input_ids": [2, 5, 6, 8, 3], "label": 0}, {"input_ids": [2, 7, 3], "label": 1}, {"input_ids": [2, 5, 3], "label": 1}]


def padded_rows(items, side="right", to=None, fill=0):
    "Lists as rows of one length."
    most = to or max(map(len, items))
    pad = [[fill] * (most - len(item)) for item in items]
    return tensor([p + list(i) if side == "left" else list(i) + p for i, p in zip(items, pad, strict=True)])


def tokens_of(items):
    return [item["input_ids"] for item in items]


def with_positions(items):
    ids = padded_rows(tokens_of(items))
    return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids), "mask": ids > 0}


def with_pairs(items):
    "A mask of pairs of tokens, (B, 1, T, T)."
    real = padded_rows(tokens_of(items), "left") > 0
    return {"mask": (real[:, :, None] & real[:, None] & torch.ones(2 * [real.shape[1]]).tril().bool())[:, None]}


def as_encoding(items):
    from transformers import BatchEncoding
    return BatchEncoding({"input_ids": padded_rows(tokens_of(items)), "labels": tensor([item["label"] for item in items])})


SOUND = {
    "padded on the right": lambda items: {"input_ids": padded_rows(tokens_of(items)), "label": tensor([i["label"] for i in items])},
    "padded on the left": lambda items: {"input_ids": padded_rows(tokens_of(items), "left")},
    "padded with -100": lambda items: {"labels": padded_rows(tokens_of(items), fill=-100)},
    "padded with nothing": lambda items: {"x": padded_rows(tokens_of(items), fill=float("nan"))},
    "cut to one length": lambda items: {"input_ids": padded_rows([item[:2] for item in tokens_of(items)])},
    "of one length": lambda items: {"input_ids": padded_rows(tokens_of(items), to=9)},
    "positions": with_positions,
    "pairs": with_pairs,
    "an encoding": as_encoding,
    "a tuple": lambda items: (padded_rows(tokens_of(items)), tensor([item["label"] for item in items])),
    "nested": lambda items: {"text": {"ids": padded_rows(tokens_of(items))}, "more": (tensor([item["label"] for item in items]),)},
    "a table as long as the batch": lambda items: (tensor([item["label"] for item in items]), torch.tensor([0.2, 0.3, 0.5])),
    "two entries a row": lambda items: (tensor([i["label"] for i in items]), tensor([[i["label"], 7] for i in items]).flatten()),
    "a number": lambda items: (tensor([item["label"] for item in items]), tensor(len(items))),
    "whole numbers as other types": lambda items: (tensor(np.array([float(i["label"]) if len(items) > 1 else i["label"] for i in items])),),
    "rounded otherwise": lambda items: (tensor([i["label"] + 0.1 for i in items]) * (1 + (len(items) > 1) * 2**-23),),
}


def mixed(items):
    x = tensor([item["label"] for item in items]).float()
    return (x + 1e-3 * x.roll(1),)


def packed_rows(items):
    "What is left of a row is filled with the next text."
    texts, most = tokens_of(items), max(map(len, tokens_of(items)))
    return {"input_ids": tensor([(text + texts[(i + 1) % len(texts)])[:most] for i, text in enumerate(texts)])}


UNSOUND = {
    "sorted": lambda items: {"input_ids": padded_rows(sorted(tokens_of(items), key=len))},
    "only the labels sorted": lambda items: (padded_rows(tokens_of(items)), tensor(sorted(-i["label"] for i in items))),
    "mixed": mixed,
    "centred": lambda items: (tensor([i["label"] for i in items]) - torch.tensor([float(i["label"]) for i in items]).mean(),),
    "filled up": packed_rows,
    "random": lambda items: (torch.rand(len(items)),),
    "squeezed": lambda items: (padded_rows(tokens_of(items)).squeeze(),),
    "a field that others have": lambda items: {"x": torch.ones(len(items))} | ({"y": torch.ones(len(items))} if len(items) > 1 else {}),
    "a number for all": lambda items: (tensor([i["label"] for i in items]), tensor(50 * (len(items) > 1))),
    "one number for all, in a list": lambda items: (tensor([i["label"] for i in items]), tensor([50 * (len(items) > 1)] * 2)),
    "a table of the batch": lambda items: (tensor([i["label"] for i in items]), padded_rows(tokens_of(items)).float().mean().expand(3)),
}


# Draws


def test_poisson_draw_is_the_keystream_of_its_context():
    draw = poisson_draw(400, 0.2, Keystream(0), "train", 3)
    assert torch.equal(draw, poisson_draw(400, 0.2, Keystream(0), "train", 3)) and torch.equal(draw, draw.unique())
    assert not torch.equal(draw, poisson_draw(400, 0.2, Keystream(0), "train", 4))
    assert not torch.equal(draw, poisson_draw(400, 0.2, Keystream(0), "select", 3))
    assert torch.equal(poisson_draw(9, 1.0, Keystream(0), 0), torch.arange(9))
    for rate in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match="sampling rate must be above 0 and at most 1"):
            poisson_draw(9, rate, Keystream(0), 0)


@given(st.sets(st.integers(0, 60)), st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_physical_batches_partition_the_draw(draw, size, by_length, chance):
    indices = sorted(draw)
    lengths = [chance.randint(1, 5) for _ in range(61)] if by_length else None
    batches = physical_batches(indices, size, lengths)
    assert sorted(row for batch in batches for row in batch.tolist()) == indices
    assert all(len(batch) == size for batch in batches[:-1]) and all(0 < len(batch) <= size for batch in batches)
    flat = [row for batch in batches for row in batch.tolist()]
    assert flat == (sorted(indices, key=lambda row: -lengths[row]) if by_length else indices)
    assert all(batch.dtype == torch.long for batch in batches)


def test_physical_batches_refuse_no_room():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        physical_batches([1, 2], 0)


# Rows on both sides


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
    pictures = images(12)
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
    stored = images()
    floats = TensorData(stored.images.float() / 255, stored.labels)
    assert shared_rows(floats, stored) == list(range(7))
    brighter = TensorData(stored.images, stored.labels, 128.0)
    assert shared_rows(brighter, stored) == [] and shared_rows(images(seed=1), stored) == []


def test_encoded_texts_compare_with_encoded_texts_only(tokenizer):
    table = TableData({"text": ["a b c", "d", "e f"], "label": [0, 1, 0]})
    other = TableData({"text": ["d", "a b", "e f"], "label": [0, 1, 0]})
    first, second = (encode(data, tokenizer, ("text", "label")) for data in (table, other))
    assert shared_rows(first, second) == [1, 2] == shared_rows(as_items(first), second)
    with pytest.raises(ValueError, match=r"texts cannot be compared with tokens; .* before they are tokenised"):
        shared_rows(table, second)
    with pytest.raises(ValueError, match="images cannot be compared with numbers"):
        shared_rows(images(), as_items(images()))
    assert shared_rows(TableData({"text": [], "label": []}), table) == [] == shared_rows(table, first.__class__({"input_ids": tensor([])},
                                                                                                           tensor([], dtype=int)))


def test_two_texts_are_not_one():
    """Neither columns nor rows run into each other."""
    one, other = TableData({"a": ["x"], "b": ["y z"]}), TableData({"a": ["x y"], "b": ["z"]})
    assert shared_rows(one, other) == [] and shared_rows(one, one) == [0]


# ---- several views of one picture


def seen(images, crop, flip):
    """All views of one picture (C, H, W), by padding and cutting."""
    height, width = images.shape[1:]
    padded = torch.nn.functional.pad(images[None], (crop,) * 4, mode="reflect")[0]
    windows = [padded[:, y : y + height, x : x + width] for y in range(2 * crop + 1) for x in range(2 * crop + 1)]
    return windows + [window.flip(2) for window in windows] if flip else windows


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.booleans(), st.integers(1, 3),
       st.lists(st.integers(0, 10**6), min_size=1, max_size=6, unique=True))
def test_every_view_is_a_window_and_depends_on_its_row_and_the_key_alone(copies, crop, flip, channels, numbers):
    rows, augment = torch.tensor(numbers), Augmentation(copies, crop, flip)
    images, labels = torch.randn(len(rows), channels, 4, 5), torch.arange(len(rows))
    views, repeated = augment((images, labels), rows, b"key")
    assert views.shape == (len(rows) * copies, channels, 4, 5) and repeated.tolist() == labels.repeat_interleave(copies).tolist()
    for i, image in enumerate(images):
        known = seen(image, crop, flip)
        assert len({tuple(window.flatten().tolist()) for window in known}) <= augment.variants
        assert all(any(torch.equal(view, window) for window in known) for view in views[i * copies : (i + 1) * copies])
        alone, _ = augment((images[i : i + 1], labels[i : i + 1]), rows[i : i + 1], b"key")
        assert torch.equal(alone, views[i * copies : (i + 1) * copies])


def test_views_are_drawn_evenly_and_anew_for_each_key():
    rows = torch.arange(100)
    down, right, mirrored = chosen_views(rows, b"a", 50, 2, True)
    for values, options in ((down, 5), (right, 5), (mirrored, 2)):
        counts = torch.bincount(values - values.min(), minlength=options)
        assert len(counts) == options and ((counts - 5000 / options).abs() < 5 * (5000 / options) ** 0.5).all()
    assert (down, right)[0].min() == -2 and right.max() == 2 and mirrored.max() == 1
    other = chosen_views(rows, b"b", 50, 2, True)[0]
    assert abs((down == other).float().mean() - 0.2) < 0.04


def test_one_copy_that_may_not_move_is_the_picture_itself():
    images, labels = torch.randn(3, 2, 4, 4), torch.arange(3)
    views, same = Augmentation(1, 0, False)((images, labels), torch.arange(3), b"")
    assert torch.equal(views, images) and torch.equal(same, labels)


def test_a_dictionary_of_series_is_read_by_position_as_the_frame_is():
    "Their labels say where a row stood before it was shuffled or filtered."
    frame = pd.DataFrame({"x": range(20), "patient": [i // 2 for i in range(20)]})
    for kept in (frame.sample(frac=1.0, random_state=0), frame[frame.x > 7], pd.concat([frame, frame])):
        whole, parts = as_dataset(kept), as_dataset({name: kept[name] for name in kept})
        assert [parts[row] for row in range(len(parts))] == [whole[row] for row in range(len(whole))]
        mixed = as_dataset({"x": kept.x.tolist(), "patient": kept.patient})
        assert [mixed[row] for row in range(len(mixed))] == [whole[row] for row in range(len(whole))]


def test_a_dictionary_of_pictures_keeps_its_other_parts():
    images = torch.randn(3, 1, 4, 4)
    batch = Augmentation(2, 0, False)({"pixel_values": images, "labels": torch.arange(3), "scale": torch.tensor(2.0)}, torch.arange(3), b"")
    assert list(batch) == ["pixel_values", "labels", "scale"] and batch["labels"].tolist() == [0, 0, 1, 1, 2, 2] and batch["scale"] == 2
    assert torch.equal(batch["pixel_values"], images.repeat_interleave(2, 0))


@pytest.mark.parametrize("settings, batch, words", [
    (dict(copies=0), None, "copies=0"), (dict(crop=-1), None, "crop=-1"),
    (dict(crop=4), "images", "crop=4 moves pictures of 4 x 4 out of sight"),
    (dict(crop=0), "tokens", "augment= takes pictures"), (dict(crop=0), "bytes", "augment= takes pictures")])
def test_what_is_no_picture_has_no_views(settings, batch, words):
    batches = {"images": (torch.zeros(1, 1, 4, 4), torch.zeros(1)), "tokens": {"input_ids": torch.zeros(1, 4)},
               "bytes": (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1))}
    with pytest.raises(ValueError, match=words):
        Augmentation(**settings)(batches[batch], torch.tensor([0]), b"")


# ---- end of several views of one picture


# conversations ------------------------------------------------------------------------------------------------------------------------


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
    for bad in ([], "a text", [{"role": "user"}], None):
        with pytest.raises(ValueError, match="row 1 is not a conversation"):
            encode(TableData({"messages": [good, bad]}), tokenizer, ("messages",), kind="causal")
    with pytest.raises(ValueError, match="row 1 has no word of the assistant's within 128 tokens"):
        encode(TableData({"messages": [good, good[:1]]}), tokenizer, ("messages",), kind="causal")
    with pytest.raises(ValueError, match="row 0 has no word of the assistant's within 3 tokens"):
        encode(TableData({"messages": [good]}), tokenizer, ("messages",), 3, "causal")
    tokenizer.chat_template = "{{ messages | length }} " + TEMPLATES["not marked"]
    with pytest.raises(ValueError, match="row 0: the chat template rewrites earlier turns"):
        encode(TableData({"messages": [conversation([("a", "b"), ("c", "d")])]}), tokenizer, ("messages",), kind="causal")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode(TableData({"messages": [good]}), tokenizer, ("messages",), kind="causal")


def test_shared_conversations_are_found():
    first, second = (TableData({"messages": [conversation(turns) for turns in rows]}) for rows in (
        [[("a", "b")], [("c", "d")]], [[("c", "d")], [("a", "d")]]))
    assert shared_rows(first, second) == [1]


def test_hub_conversations(hub_cache):
    (hub_cache / "chats").mkdir(parents=True)
    import json
    for part in ("train", "validation"):
        (hub_cache / f"chats/{part}.jsonl").write_text("\n".join(json.dumps({"messages": conversation([("a", "b")])}) for _ in range(3)))
    task = load_data(str(hub_cache / "chats"))
    assert (task.kind, task.columns, len(task.train)) == ("causal", ("messages",), 3)


def test_a_shared_conversation_is_found_in_any_order_of_its_keys():
    def talk(*said, turned=False, **more):
        turns = [{"role": role, "content": content, **more} for role, content in said]
        return [{"messages": [dict(reversed(turn.items())) if turned else turn for turn in turns]}]
    private = talk(("user", "my secret"), ("assistant", "kept"))
    for more in ({"turned": True}, {"name": None}, {"name": "x"}):
        assert shared_rows(talk(("user", "my secret"), ("assistant", "kept"), **more), private) == [0]
    assert shared_rows(talk(("user", "another"), ("assistant", "kept"), turned=True), private) == []


def test_more_texts_than_a_tokenizer_takes_are_refused(tokenizer):
    data = TableData({"x": ["a"], "y": ["b"], "z": ["c"], "label": [0]})
    with pytest.raises(ValueError, match=r"3 texts, and a tokenizer takes one or a pair"):
        encode(data, tokenizer, ("x", "y", "z", "label"))


def test_the_ending_of_a_file_may_be_in_capitals_and_a_part_is_one_file(tmp_path):
    (tmp_path / "train.CSV").write_text("text,label\ngood,1\nbad,0\n")
    assert load_data(str(tmp_path)).train["text"] == ["good", "bad"]
    (tmp_path / "train.json").write_text('[{"text": "other", "label": 1}]')
    with pytest.raises(ValueError, match=r"holds train.CSV and train.json; keep one file named train"):
        load_data(str(tmp_path))


def test_a_folder_of_tables_under_other_names_is_refused_and_pictures_beside_metadata_are_not_a_table(tmp_path):
    from PIL import Image
    tables, pictures = tmp_path / "tables", tmp_path / "pictures"
    tables.mkdir()
    pictures.mkdir()
    for year in (2019, 2020):
        (tables / f"{year}.csv").write_text("text,label\na secret,0\nanother,1\n")
    with pytest.raises(ValueError, match=r"2019.csv, 2020.csv; name the parts"):
        load_data(str(tables))
    for number in range(6):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(pictures / f"{number}.png")
    rows = [f"{number}.png,{number % 2}" for number in range(6)]
    (pictures / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n")
    assert load_data(str(pictures)).kind == "image"


@pytest.mark.parametrize("name", ["date", "url", "source", "lang"])
def test_what_is_said_about_a_row_hides_no_shared_text(name):
    "The same text on another day is the same text; where nothing else is there, such a column is the text."
    private = TableData({"text": ["a b", "c"], "label": [0, 1], name: ["x", "y"]})
    public = TableData({"text": ["c", "d"], "label": [0, 1], name: ["z", "z"]})
    assert shared_rows(public, private) == [0] and repeated_rows(TableData({"text": ["c", "c"], name: ["x", "y"]})) == 2
    assert shared_rows(TableData({"review": ["c", "d"], "label": [0, 1]}), private) == [0]
    assert shared_rows(TableData({name: ["y", "d"], "label": [0, 1]}), TableData({name: ["x", "y"], "label": [0, 1]})) == [0]


def test_a_column_that_one_set_lacks_hides_no_shared_row():
    private = TableData({"text": ["a b", "c"], "label": [0, 1], "date": ["monday", "tuesday"]})
    assert shared_rows(TableData({"text": ["c", "d"], "label": [0, 1]}), private) == [0]
    assert shared_rows(private, TableData({"text": ["c", "d"], "label": [0, 1]})) == [1]
    assert shared_rows(TableData({"review": ["c", "d"], "label": [0, 1]}), private.__class__({"text": ["a", "c"], "label": [0, 1]})) == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_that_numpy_does_not_know_have_a_fingerprint_and_may_be_trained_on(dtype):
    values = torch.arange(24.0).view(12, 2)
    labels = torch.arange(12) % 2
    def kept(numbers):
        return torch.utils.data.TensorDataset(numbers.to(dtype), labels)
    assert fingerprint(kept(values)) == fingerprint(kept(values)) != fingerprint(kept(values + 8))
    assert fingerprint(kept(values)) != fingerprint(torch.utils.data.TensorDataset(values.to(dtype).view(torch.uint8), labels))
    if dtype == torch.bfloat16:
        from dpft import Full, fine_tune

        run = fine_tune(torch.nn.Linear(2, 2).to(dtype), kept(values), Full(), noise_multiplier=1.0, steps=1, batch_size=4,
                        accountant="rdp", delta=0.01, progress=False)
        assert len(run.history) == 1


def test_fractions_beside_pictures_are_not_cut_to_whole_numbers():
    """A regression on pictures: what the loss sees is what the column holds."""
    from datasets import Dataset
    from PIL import Image

    pictures = [Image.fromarray(np.full((4, 4), row, dtype="uint8")) for row in range(8)]
    task = task_of(Dataset.from_dict({"image": pictures, "label": [row / 8 for row in range(8)]}))
    assert task.classes == () and task.train.batch([2, 5])[1].tolist() == [0.25, 0.625]
    assert [task.train[row][1] for row in (2, 5)] == [0.25, 0.625] and task.train.subset([5])[0][1] == 0.625
    whole = TensorData(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1], dtype=torch.uint8))
    assert whole.labels.dtype == torch.int64 and isinstance(whole[1][1], int)


def test_pictures_beside_a_table_leave_no_copy_in_the_cache_of_datasets(tmp_path, monkeypatch):
    "`datasets` would keep what the table says, and the pictures' places, in the user's home."
    import datasets
    from PIL import Image
    cache, pictures = tmp_path / "cache", tmp_path / "pictures"
    cache.mkdir()
    pictures.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    for number in range(6):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(pictures / f"{number}.png")
    rows = [f"{number}.png,{number % 2}" for number in range(6)]
    (pictures / "metadata.csv").write_text("\n".join(["file_name,label", *rows]) + "\n")
    task = load_data(str(pictures))
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert task.train.batch(torch.arange(6))[1].tolist() == [0, 1] * 3


def pictures_in(folder, count=2):
    from PIL import Image
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (4, 4), (40 * number, 0, 0)).save(folder / f"{number}.png")


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "Test"), ("TRAIN", "TEST"), ("Training", "Testing")])
def test_parts_are_known_in_any_case_so_that_no_test_row_is_trained_on(tmp_path, names):
    for part, count in zip(names, (3, 2), strict=True):
        for kind in ("cat", "dog"):
            pictures_in(tmp_path / "pictures" / part / kind, count)
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{part}.csv").write_text("text,label\n" + f"{part} a,x\n{part} b,y\n" * count)
    pictures, rows = load_data(tmp_path / "pictures"), load_data(tmp_path / "rows")
    assert (len(pictures.train), len(pictures.dev), len(rows.train), len(rows.dev)) == (6, 4, 6, 4)
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "a", "label": "x"}\n')
    (tmp_path / "rows" / f"{names[0]}.csv").rename(tmp_path / "rows" / "TRAINING.csv")
    with pytest.raises(ValueError, match=r"holds TRAINING.csv and train.jsonl; keep one for train"):
        load_data(tmp_path / "rows")


def test_a_folder_below_data_is_read_by_the_rules_of_one_that_is_not(tmp_path):
    table = "text,label,user\nNA,01,007\nb,02,07\nc,01,7\nd,02,8\n"
    for folder in (tmp_path / "plain", tmp_path / "nested" / "data"):
        folder.mkdir(parents=True)
        (folder / "train.csv").write_text(table)
    plain, nested = (load_data(tmp_path / name, unit="user") for name in ("plain", "nested"))
    assert plain.classes == nested.classes == ("01", "02")
    assert [nested.train[row]["user"] for row in range(4)] == ["007", "07", "7", "8"] and nested.train[0]["text"] == "NA"


def test_texts_in_folders_and_files_that_are_no_data_are_refused(tmp_path):
    for name in ("pos", "neg"):
        (tmp_path / "texts" / "train" / name).mkdir(parents=True)
        (tmp_path / "texts" / "train" / name / "1.txt").write_text("two\nlines\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.txt").write_text("This data set is confidential.")
    for name in ("texts", "notes"):
        with pytest.raises(ValueError, match="holds no data set"):
            load_data(tmp_path / name)
    pictures_in(tmp_path / "deep" / "Train" / "cats" / "black")
    with pytest.raises(ValueError, match="would not be read as train; rename it train"):
        load_data(tmp_path / "deep")


def test_numbers_to_score_are_not_read_by_the_alphabet_of_the_training_names(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na b,true\nc d,fake\n")
    (tmp_path / "validation.csv").write_text("text,label\na b,0\nc d,1\n")
    with pytest.raises(ValueError, match="has names in the training rows and numbers in those to score"):
        load_data(tmp_path)
    (tmp_path / "train.csv").write_text("text,label\na b,0\nc d,1\n")
    assert load_data(tmp_path).classes == ("0", "1")


@pytest.mark.parametrize("kind", ["texts", "tags", "pictures"])
def test_numbers_to_score_are_refused_by_a_run_that_trains_on_names(kind, tokenizer):
    from PIL import Image
    from torch import nn
    from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

    import dpft

    sizes = dict(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    rows = {"texts": lambda labels: [{"text": "a b", "label": one} for one in labels],
            "tags": lambda labels: [{"tokens": ["a", "b"], "tags": [one, one]} for one in labels],
            "pictures": lambda labels: [{"image": Image.new("L", (8, 8)), "label": one} for one in labels]}[kind]
    model = {"texts": lambda: BertForSequenceClassification(BertConfig(**sizes)),
             "tags": lambda: BertForTokenClassification(BertConfig(**sizes)),
             "pictures": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))}[kind]()
    names, numbers = ["pos", "neg"] * 12, [1, 0] * 4
    def run(train, scored):
        return dpft.fine_tune(model, rows(train), dpft.Full(), 8.0, steps=1, batch_size=4, evaluate=rows(scored), progress=False,
                              tokenizer=None if kind == "pictures" else tokenizer)
    with pytest.raises(ValueError, match=r"has names in the training rows and numbers in those to score.*write names in both"):
        run(names, numbers)
    assert run(names, names[:8]).scores
    assert run([1, 0] * 12, numbers).scores


def test_pictures_to_score_have_the_shape_of_the_others(tmp_path):
    from PIL import Image
    for part, mode, side in (("train", "RGB", 4), ("test", "L", 6)):
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            Image.new(mode, (side, side)).save(tmp_path / part / kind / "1.png")
    with pytest.raises(ValueError, match="training pictures are 3 × 4 × 4 and others to score 1 × 6 × 6"):
        load_data(tmp_path)


def test_a_quoted_value_of_a_tsv_that_goes_on_over_a_line_is_refused(tmp_path):
    path = tmp_path / "train.tsv"
    for text in ('text\n"good\nfilm"\n"bad film, very"\n', 'label\ttext\npos\t"good\nfilm\tnice"\nneg\tbad\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="may be one value in quotation marks or several rows"):
            load_data(path)
    path.write_text('text\tlabel\n"open at the start\tx\nplain, then "a word" and more\ty\n')
    assert len(load_data(path).train) == 2                                     # marks that belong to texts


@pytest.mark.parametrize("name", ["", None, 3, ["a"], "text,label\nAnn Smith is ill,1\n", "Ann Smith is ill. " * 500])
def test_a_name_that_is_none_is_refused_without_its_content(name):
    with pytest.raises(ValueError, match="name must be that of a data set, a file or a folder"):
        load_data(name)


def test_pictures_that_nothing_labels_are_refused_with_a_way_to_label_them(tmp_path):
    for folder in ("flat", "deep/cat/indoors", "deep/dog/indoors", "pictures/cat", "pictures/dog"):
        pictures_in(tmp_path / folder)
    for name in ("flat", "deep"):
        with pytest.raises(ValueError, match=f"{name} shows pictures without labels; give it a folder of pictures for each class, or"):
            load_data(tmp_path / name)
    assert load_data(tmp_path / "pictures").classes == ("cat", "dog")


def test_hidden_files_of_macos_are_no_parts(tmp_path):
    for name in ("train.csv", "._train.csv", ".test.csv"):
        (tmp_path / name).write_text("text,label\na,0\nb,1\n")
    task = load_data(tmp_path)
    assert (len(task.train), task.dev) == (2, None)


def test_a_test_file_alone_is_scored_under_its_name(tmp_path):
    from dpft.cli.core import name_of_part, scored_part

    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("text,label\na b,0\nc d,1\n")
    task = load_data(tmp_path)
    assert scored_part(task, "test") is scored_part(task, None) is not None and name_of_part(task, None) == "test"
    (tmp_path / "validation.csv").write_text("text,label\na b,0\n")
    task = load_data(tmp_path)
    assert task.test is not task.dev and name_of_part(task, None) == "dev" and name_of_part(task, "test") == "test"


def test_an_empty_column_of_people_with_a_blank_in_its_name_is_read(tmp_path):
    (tmp_path / "rows.csv").write_text("text, user,label\na,,0\nb,,1\n")
    assert read_file(tmp_path / "rows.csv", unit="user").column_names == ["text", "user", "label"]
