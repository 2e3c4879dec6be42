"""Draws of rows, physical batches, and views of a picture."""


import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from dpft.data import TableData
from dpft.noise import Keystream
from dpft.sampling import Augmentation, chosen_views, gather, physical_batches, poisson_draw
from dpft.texts import collate_for


def test_gather_takes_either_way_to_the_same_batch(tokenizer):
    data = zoo.images()
    plain = [data[row] for row in range(7)]
    for rows in ([3, 1, 1], tensor([3, 1, 1])):
        assert all(torch.equal(a, b) for a, b in zip(gather(data, rows), gather(plain, rows)))
    with pytest.raises(ValueError, match=r"'text' of the items, strs, cannot be stacked: .* tokenise texts with"):
        gather(TableData({"text": ["a"], "label": [0]}), [0])
    raw = [{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7], "labels": 0}]
    assert collate_for(raw, tokenizer)(raw)["input_ids"].tolist() == [[5, 6], [7, 0]]


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


words = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map(" ".join)

