"""What two readers of the notes found: masks as rows, series, sets of classes, shared texts, published ledgers, and the like."""

import pytest
import torch
from torch import nn, tensor

import dpft
from dpft.checkpoint import CheckpointError
from dpft.curve import PrivacyCurve, group_epsilon
from dpft.data import (
    Public,
    TableData,
    Task,
    TensorData,
    as_dataset,
    check_disjoint_rows,
    check_labels,
    class_list,
    mark_of,
    read_labels,
    shared_rows,
    take,
)
from dpft.ledger import Ledger, LedgerError
from dpft.noise import Keystream
from dpft.privacy import SampledGaussian
from dpft.sampling import Population
from dpft.settings import Settings
from dpft.texts import encode

MASK = tensor([False, True, True, False, True])


def pictures(**more):
    return TensorData(torch.arange(5.0).view(5, 1, 1, 1), tensor([0, 1, 0, 1, 2]), **more)


@pytest.mark.parametrize("mask", [MASK, MASK.numpy(), MASK.tolist()], ids=["tensor", "array", "list"])
def test_a_mask_names_rows_and_is_no_list_of_zeros_and_ones(mask):
    """As numbers it would be rows 0 and 1 again and again, each copy a unit of its own."""
    images, table = pictures(), TableData({"x": [*range(5)]})
    for chosen in (images.subset(mask), take(images, mask)):
        assert chosen.images.flatten().tolist() == [1, 2, 4] and chosen.labels.tolist() == [1, 0, 2]
    assert images.batch(mask)[0].flatten().tolist() == [1, 2, 4]
    assert table.subset(mask).columns["x"] == [1, 2, 4] == take(table, mask).columns["x"]
    for data in (images, table):
        with pytest.raises(IndexError):
            data.subset(mask[:3])
    assert images.subset([4, 0]).images.flatten().tolist() == [4, 0] and len(images.subset([])) == 0


def test_chosen_pictures_protect_the_people_of_their_task():
    who = [f"person {row // 2}" for row in range(5)]
    task = Task("mine", "image", pictures(table=TableData({"who": who})), None, classes=("a", "b", "c"), unit="who")
    assert mark_of(task.train) == mark_of(task.train.subset([0, 1, 4])) == "who"
    assert Population(task.train.subset([0, 1, 4]), Settings(epsilon=1.0)).size == 2


def test_a_series_is_read_in_its_order_and_not_by_its_labels():
    import pandas as pd

    rows = pd.Series([10, 20, 30], index=[2, 0, 1])
    assert list(as_dataset(rows)) == [10, 20, 30] and list(as_dataset(rows[rows > 10])) == [20, 30]


@pytest.mark.parametrize("classes", [{"neg", "pos"}, frozenset("ab"), {"a": 1}.keys(), 2.0, True, "ab", 0])
def test_classes_without_an_order_or_a_number_are_refused(classes):
    with pytest.raises(ValueError, match="give how many there are, or the list of their names"):
        class_list(classes)
    with pytest.raises(ValueError, match="give how many there are, or the list of their names"):
        read_labels(["neg", "pos"], "label", classes)


def test_classes_may_be_an_array():
    import numpy as np

    assert class_list(np.array(["a", "b"])) == (["a", "b"], False)
    check_labels([0, 1], np.array(["a", "b"]))


SAID = {"text": ["ann has a cough", "good"]}


@pytest.mark.parametrize("public, private, found", [
    ({**SAID, "stars": [3, 4]}, {"sentence": ["ann has a cough", "dull"], "stars": [5, 4]}, [0]),
    ({**SAID, "stars": [3, 4]}, {"text": ["good", "dull"], "stars": [4, 4]}, [1]),
    ({**SAID, "title": ["p. 3", "p. 4"]}, {"text": ["ann has a cough"]}, [0]), (SAID, {"sentence": ["good"]}, [1]),
    ({"x": [1.0, 2.0]}, {"x": [2.0]}, [1])])
def test_texts_are_compared_whatever_else_the_rows_have(public, private, found):
    assert shared_rows(public, private) == found


def test_texts_of_other_names_beside_one_of_the_same_name_are_not_compared_by_that_one_alone():
    public = Public({"text": ["ann has a cough"], "title": ["p. 3"]}, "a book")
    with pytest.raises(ValueError, match=r"the texts have different names, 'text' and 'sentence'; give the columns"):
        check_disjoint_rows(public, {"sentence": ["ann has a cough"], "title": ["p. 4"]})


PLAN = {"mechanisms": [{"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 2}], "delta": 1e-3}


def test_a_published_ledger_stays_one_when_it_is_opened(tmp_path):
    with Ledger(tmp_path / "owner") as ledger:
        ledger.begin("demo", PLAN)
        ledger.claim("demo", "train")
        ledger.finish("demo")
        ledger.publish(tmp_path / "copy", "demo", seal="seal")
        with pytest.raises(ValueError, match="name the runs to publish"):
            ledger.publish(tmp_path / "none", [])
        assert not (tmp_path / "none").exists()
        before = (tmp_path / "copy").read_bytes()
        with Ledger(tmp_path / "copy") as copy:
            assert copy.runs() == ["demo"]
            with pytest.raises(LedgerError, match="is a published copy; begin in the owner's file"):
                copy.begin("more", PLAN)
        assert (tmp_path / "copy").read_bytes() == before
        ledger.publish(tmp_path / "copy", ["demo"], seal="seal")          # it takes the place of a copy, and not of an owner's


def test_a_checkpoint_that_was_begun_with_callbacks_is_not_continued_without(tmp_path):
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 2:
                raise KeyboardInterrupt
    rows = [(torch.full((3,), row / 8), row % 2) for row in range(16)]
    given = dict(epsilon=8.0, steps=4, batch_size=4, accountant="rdp", checkpoint=tmp_path / "run", checkpoint_every=1, progress=False)
    def run(**more):
        torch.manual_seed(0)
        return dpft.fine_tune(nn.Linear(3, 2), rows, dpft.Full(), **given, **more)
    with pytest.raises(KeyboardInterrupt):
        run(callbacks=[Stops()])
    with pytest.raises(CheckpointError, match="belongs to a run with another callbacks"):
        run()


def test_a_card_keeps_what_people_wrote_in_one_cell():
    from dpft.card import _table

    assert _table([("licence", "Apache-2.0 | MIT"), ("author", "Ann\nBob"), ("none", "")]).splitlines()[2:] == [
        r"| licence | Apache-2.0 \| MIT |", "| author | Ann Bob |"]


@pytest.mark.parametrize("call, said", [
    (lambda: Settings(epsilon=1.0, augment=dpft.Augmentation), "give views of pictures, such as"),
    (lambda: dpft.Augmentation(copies=2.0), "in whole numbers"),
    (lambda: as_dataset({"text": "abc", "label": 0}), "'text' is no list; give a value for each row"),
    (lambda: as_dataset({"text": ["abc"], "label": 0}), "'label' is no list"),
    (lambda: PrivacyCurve([SampledGaussian(1.0, 0.1, 2)], relation="removed"), "relation='removed': choose remove, add, replace"),
    (lambda: PrivacyCurve([SampledGaussian(1.0, 0.1, 2)], group=2.5), "group=2.5: a group has 1 to 1000 units"),
    (lambda: PrivacyCurve([SampledGaussian(1.0, 0.1, 2)]).delta(-1.0), "epsilon must be at least 0"),
    (lambda: group_epsilon([SampledGaussian(1.0, 0.1, 2)], 1e-5, 0), "group=0: a group has"),
    (lambda: encode({"text": ["a"]}, None, ("text", "label"), kind="Causal"), "kind='Causal': choose 'text' or 'causal'"),
    (lambda: encode({"text": ["a"], "label": [0]}, None, ("label",)), "name no text; give the text columns, then the label's")])
def test_a_wrong_argument_is_one_sentence(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_numbers_and_arrays_of_numpy_are_taken():
    import numpy as np

    data = TensorData(np.zeros((2, 1, 2, 2), np.float32), [0, 1])
    assert data.batch([1])[1].tolist() == [1] and Keystream(np.int64(3)).secret == Keystream(3).secret


def test_a_guarantee_is_verified_by_a_ledger_or_its_path(tmp_path):
    rows = [(torch.full((3,), row / 8), row % 2) for row in range(16)]
    with Ledger(tmp_path / "owner.sqlite") as ledger:
        run = dpft.fine_tune(nn.Linear(3, 2), rows, dpft.Full(), 8.0, steps=1, batch_size=4, ledger=ledger, progress=False)
        run.save(tmp_path / "saved")
        assert dpft.verify(tmp_path / "saved", ledger) == dpft.verify(tmp_path / "saved", tmp_path / "owner.sqlite")
