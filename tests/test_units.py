"""People as the unit of privacy: drawn whole, summed, then bounded."""

import io
import json
import warnings
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training import engine, net, run_all, toy
from torch import nn

import dpft
from dpft.checkpoint import CheckpointError
from dpft.data import TableData, Task, TensorData, as_dataset, as_task, protecting, take, unit_for
from dpft.gradients import gradients, per_example_gradients
from dpft.method import Method
from dpft.prepared import prepare
from dpft.privacy import Request
from dpft.sampling import Augmentation, Units, units_of
from dpft.scores import NoisyAccuracy, apart, people_of


def owners(size=60, people=17, seed=1):
    return torch.randint(0, people, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def exact_sum(model, data, unit, clip):
    "Sum over people of their clipped summed gradients, by the slow oracle; flat."
    rows = per_example_gradients(model, zoo.image_loss, data.batch(range(len(data))))
    flat = torch.cat([value.flatten(1) for value in rows.values()], dim=1).double()
    names = {name: number for number, name in enumerate(dict.fromkeys(unit))}
    people = torch.zeros(len(names), flat.shape[1], dtype=flat.dtype).index_add_(0, torch.tensor([names[name] for name in unit]), flat)
    return ((clip / people.norm(dim=1)).clamp(max=1.0)[:, None] * people).sum(0), people


def one_sum(e):
    "The engine's sum for one step, before noise; flat."
    step = next(iter(e))
    for batch in step:
        step.add(batch)
    return torch.cat([value.flatten() for value in step.sums.values()]).double()


# ---- units of a data set


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=40).filter(lambda labels: len(set(labels)) < len(labels)),
       st.integers(1, 12), st.integers(1, 5) | st.none(), st.integers(0, 3))
def test_batches_hold_whole_units_each_once_and_no_more_rows_than_the_cap(labels, most, cap, seed):
    units = Units(labels, cap=cap)
    drawn = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))[: max(1, len(units) - 1)]
    seen = Counter()
    met = []
    for rows, numbers in units.batches(drawn, most, bytes([seed]) * 32):
        owners = [units.index[rows[numbers == number]].unique() for number in range(int(numbers.max()) + 1)]
        assert all(len(owner) == 1 for owner in owners)
        met += [int(owner) for owner in owners]
        assert len(rows) <= most or len(owners) == 1
        seen.update(rows.tolist())
    assert met == drawn.tolist() and max(seen.values()) == 1
    for unit in drawn.tolist():
        brought = sum(units.index[row] == unit for row in seen)
        assert brought == min(int(units.counts[unit]), cap or 1000)


def test_which_rows_come_under_the_cap_is_random_and_keyed():
    units = Units([0] * 60 + [1], cap=10)  # 60 rows in 10 places: two choices agree with probability 4e-18
    drawn = [next(iter(units.batches(torch.tensor([0]), 64, bytes([key]) * 32)))[0].tolist() for key in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_which_rows_a_person_brings_does_not_depend_on_who_else_is_drawn():
    units, key = Units([person for person in range(40) for _ in range(3)], cap=1), bytes(32)
    every, without = ({row for rows, _ in units.batches(torch.arange(first, 40), 64, key) for row in rows.tolist()} for first in (0, 1))
    assert without < every and len(every) == 40 and len(without) == 39


def test_a_unit_may_be_named_by_column_by_list_or_by_tensor():
    table = TableData({"sentence": ["a", "b", "c"], "label": [0, 1, 0], "who": ["x", "y", "x"]})
    by_name = units_of(table, "who")
    for labels in (["x", "y", "x"], torch.tensor([4, 2, 4])):
        assert units_of(table, labels).index.tolist() == by_name.index.tolist() == [0, 1, 0]
    assert by_name.name == "who" and units_of(table, None) is None and units_of(table, "example") is None


@pytest.mark.parametrize("unit, cap, words", [
    ("nobody", None, "no column 'nobody'"), (["a", "b"], None, "names 2 rows and the data has 3"),
    ("label2", None, "one row each"), ("who", 0, "at least one row"), (None, 2, "needs a unit")])
def test_bad_units_are_refused(unit, cap, words):
    table = TableData({"sentence": ["a", "b", "c"], "label": [0, 1, 0], "who": ["x", "y", "x"], "label2": [1, 2, 3]})
    with pytest.raises(ValueError, match=words):
        units_of(table, unit, cap)


@pytest.mark.parametrize("who, kinds", [
    ([1, "1", 1, "1"], "number and text"), (["7", 7.0, "7", 7.0], "number and text"), (["ann", b"ann"] * 2, "bytes and text"),
    ([("ann", 1), ("ann", "1")] * 2, r"\(text, number\) and \(text, text\)")])
def test_one_person_does_not_pass_for_two_under_names_of_two_kinds(who, kinds):
    table = TableData({"sentence": list("abcd"), "label": [0, 1, 0, 1], "who": who})
    for unit, name in (("who", "who"), (who, "unit")):
        with pytest.raises(ValueError, match=f"unit '{name}' holds {kinds} values, .* read the column as text") as found:
            units_of(table, unit)
        assert "ann" not in str(found.value)      # the kinds of the names, and none of them
    with pytest.raises(ValueError, match=f"unit 'unit' holds {kinds} values"):
        people_of(table, who)


NAMES = {  # of people in a file, each twice
    "padded": ["1", "01", "001"], "powers": ["1e3", "1000", "1.0"], "twenty digits": [f"1234567890123456789{i}" for i in range(8)],
    "seventeen digits and a fraction": ["2.5", *(f"1234567890123456{i}" for i in range(8))], "plain": ["7", "8", "9"],
    "floats": ["1.0", "2.0", "3.0"], "texts": ["ann", "bob"]}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("form", ["csv", "jsonl", "frame"])
def test_people_are_as_many_as_their_names_in_every_form(tmp_path, names, form):
    frame = pd.DataFrame({"text": "a", "label": [0, 1] * len(names), "who": names * 2})
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        frame.to_csv(path, index=False)
    elif form == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    data = as_dataset(frame) if form == "frame" else dpft.load_data(str(path), unit="who").train
    assert units_of(data, "who").index.tolist() == [*range(len(names))] * 2
    assert people_of(data, "who") == names * 2


def test_blanks_around_a_name_in_a_csv_make_no_other_person(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label,who\na,0, 7\nb,1,7 \nc,1,8\nd,0,NA\n")
    data = dpft.load_data(str(tmp_path / "rows.csv"), unit="who").train
    assert data["who"][:] == ["7", "7", "8", "NA"]
    with pytest.raises(ValueError, match="1 of 4 rows have no unit in 'who', the first is row 3"):
        units_of(data, "who")


@pytest.mark.parametrize("who", [
    [2.0**53, 2.0**53 + 1, 5.0], [1.5, 2.0, 2.0], [float("inf"), 1.0, 1.0], [("a", 0.5), ("a", 1.0), ("a", 1.0)],
    np.array([1, 16777217, 16777216], np.float32), torch.tensor([1.0, 16777217.0, 16777216.0])])
def test_floats_that_may_be_two_peoples_are_no_names(who):
    for unit in (who, list(who.numpy() if isinstance(who, torch.Tensor) else who)):
        with pytest.raises(ValueError, match="unit 'unit' holds fractions, or floats so large"):
            units_of([0] * 3, unit)
    with pytest.raises(ValueError, match="unit 'unit' holds fractions, or floats so large"):
        people_of([0] * 3, who)


def test_large_whole_numbers_are_names_where_they_are_exact():
    assert len(units_of([0] * 4, [10**20, 10**20 + 1, 10**20, 10**20 + 1])) == 2
    assert len(units_of([0] * 3, [2.0**53 - 1, 2.0**53 - 2, 2.0**53 - 1])) == 2
    with pytest.raises(ValueError, match="unit 'unit' holds number and truth values"):
        units_of([0] * 4, [True, 1, False, 0])


def test_people_are_told_again_in_another_kind_of_file(tmp_path):
    (tmp_path / "train.csv").write_text("text,label,who\na,0,7.0\nb,1,7.0\nc,0,007\n")
    train = dpft.load_data(str(tmp_path / "train.csv"), unit="who").train
    for name, met in ((7, True), ("7", True), (7.0, True), (Decimal("7.0"), True), ("007", True), ("07", False), (8, False)):
        dev = TableData({"text": ["d"], "label": [0], "who": [name]})
        if met:
            with pytest.raises(ValueError, match="1 of the 1 scored rows belong to people who are trained on"):
                apart(NoisyAccuracy(dev, 1.0, unit="who"), train, "who")
        else:
            apart(NoisyAccuracy(dev, 1.0, unit="who"), train, "who")


# ---- the engine


@pytest.mark.parametrize("physical", [64, 7, 1])
def test_the_sum_is_that_of_people_bounded_whole(physical):
    data, unit, model = toy(), owners(), net()
    wanted, _ = exact_sum(model, data, unit, 0.5)
    e = engine(model, data=data, unit=unit, batch_size=len(set(unit)), physical_batch_size=physical)
    assert (one_sum(e) - wanted).norm() < 1e-4 * wanted.norm()             # norms are raised by what float32 may round


def test_one_person_moves_the_sum_by_no_more_than_the_bound_however_many_rows_she_has():
    data, model = toy(), net()
    data.images[:40], data.labels[:40] = data.images[0].clone(), data.labels[0].clone()  # 40 gradients that add up, whatever the model
    unit = [0 if row < 40 else row // 2 for row in range(60)]
    e = engine(model, data=data, unit=unit, batch_size=len(set(unit)))
    with_her = one_sum(e)
    left = TensorData(data.images[40:], data.labels[40:])
    without = one_sum(engine(net(), data=left, unit=unit[40:], batch_size=len(set(unit[40:]))))
    assert 0.45 < (with_her - without).norm() < 0.5 + 1e-5
    rows = one_sum(engine(net(), data=data, batch_size=60)) - one_sum(engine(net(), data=left, batch_size=20))
    assert rows.norm() > 2                                   # as examples she moves it by many bounds


def test_people_are_drawn_not_rows():
    data, unit = toy(), owners()
    people = len(set(unit))
    e = engine(data=data, unit=unit, batch_size=6, steps=400, epsilon=None, noise_multiplier=1.0, delta=1e-3)
    assert e.plan.size == people and e.plan.sample_rate == 6 / people
    drawn = []
    for t in range(400):
        rows = [row.numpy().tobytes() for batch in e.batches("train", t) for row in batch[0]]
        drawn.append(rows)
    value = {picture.numpy().tobytes(): unit[row] for row, picture in enumerate(data.batch(range(60))[0])}  # scaled entry by entry: exact
    size = Counter(unit)
    for rows in drawn:
        met = Counter(value[v] for v in rows)
        assert all(met[person] == size[person] for person in met)
    mean = sum(len({value[v] for v in rows}) for rows in drawn) / 400
    assert abs(mean - 6) < 5 * (6 / 400) ** 0.5              # 6.2 standard deviations of the mean


def test_a_cap_bounds_rows_and_the_guarantee_names_the_unit():
    unit = [0] * 50 + [1, 1] + list(range(2, 10))
    e = engine(data=toy(), unit=unit, unit_cap=3, batch_size=10, steps=3)
    rows = sum(len(batch[1]) for batch in e.batches("train", 0, 1.0))
    assert rows == 3 + 2 + 8
    run_all(engine(data=toy(), unit=unit, unit_cap=3, batch_size=5, steps=3))
    assert e.guarantee.unit == "unit" and "number of units, 10" in e.guarantee.assumed_public[0]


def test_a_batch_that_the_step_did_not_give_is_refused():
    e = engine(data=toy(), unit=owners(), batch_size=5)
    step = next(iter(e))
    batch = next(iter(step))
    with pytest.raises(ValueError, match="takes the batches that it yields, each once"):
        step.add((batch[0].clone(), batch[1]))


def by_size(items):
    images, labels = (torch.stack([torch.as_tensor(item[n]) for item in items]) for n in (0, 1))
    order = images.flatten(1)[:, 0].argsort()
    return images[order], labels[order]


class Looks(Method):
    "Releases how many were drawn, and everything trains."

    def __init__(self, asks=True):
        self.asks = asks

    def requests(self, context):
        return [Request(0.5, 1, 0.1, "look")]

    def start(self, context):
        context.train_only(context.model.parameters())
        total = torch.zeros(1)
        for batch in context.draw(0.5):
            groups = context.groups(batch) if self.asks else None
            norms = gradients(context.model, context.loss_fn, batch, groups).norms()
            total += (norms.clamp(max=1.0)).sum()
        context.release(total, 1.0)


@pytest.mark.parametrize("settings", [dict(), dict(augment=Augmentation(copies=3, crop=1)), dict(method=Looks())])
def test_a_collate_function_that_changes_the_order_is_refused_though_all_losses_are_alike(settings):
    "One person's rows would count as many people's; a model that begins at zero doesn't hide it."
    def one(collate, **more):
        model = net()
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return one_sum(engine(model=model, data=toy(), unit=owners(), batch_size=8, collate_fn=collate, steps=1, **settings | more))

    assert one(torch.utils.data.default_collate).norm() > 0
    with pytest.raises(ValueError, match="an example's gradient changes with the examples beside it"):
        one(by_size)
    if "method" not in settings:
        assert one(by_size, epsilon=float("inf")).norm() > 0


def test_reading_takes_its_random_numbers_from_the_run_and_leaves_torchs_as_they_were():
    """Else two runs of one seed had other sums under the same noise."""
    class Jittered:
        def __len__(self):
            return 20

        def __getitem__(self, row):
            return torch.full((4,), float(row)) + torch.rand(4), row % 3

    e = dpft.Engine(nn.Linear(4, 3), None, dpft.Full(), Jittered(), noise_multiplier=1.0, batch_size=10, steps=1, delta=1e-3,
                    seed=0, physical_batch_size=4, accountant="rdp")

    def read(elsewhere, step):
        torch.manual_seed(elsewhere)
        before = torch.get_rng_state()
        found = torch.cat([batch[0] for batch in e.batches("train", step, 0.5)])
        assert torch.equal(torch.get_rng_state(), before)
        return found

    first, again, other = read(1, 0), read(2, 0), read(1, 1)
    assert torch.equal(first, again)
    assert not set(first[:, 0].tolist()) & set(other[:, 0].tolist())


def test_a_method_that_draws_must_ask_for_the_units():
    engine(method=Looks(True), data=toy(), unit=owners(), batch_size=5)
    with pytest.raises(ValueError, match=r"context.groups"):
        engine(method=Looks(False), data=toy(), unit=owners(), batch_size=5)
    engine(method=Looks(False), data=toy(), batch_size=5)


def test_a_run_resumes_with_the_unit_that_it_had(tmp_path):
    settings = dict(data=toy(), unit=owners(), batch_size=5, checkpoint=tmp_path / "run")
    next(iter(engine(**settings))).take()
    with pytest.raises(CheckpointError, match="another data"):
        engine(**{**settings, "unit": None})
    e = run_all(engine(**settings))
    assert sum(m.steps for m in e.spent) == 4 and e.ledger.plan(e.account.run)["unit"] == "unit"


def test_without_privacy_the_mean_divides_by_people():
    data, unit, model = toy(), owners(), net()
    e = engine(model, data=data, unit=unit, batch_size=len(set(unit)), epsilon=float("inf"))
    step = next(iter(e))
    for batch in step:
        step.add(batch)
    step.privatize()
    losses = zoo.image_loss(model, data.batch(range(60)))
    wanted = torch.autograd.grad(losses.sum() / len(set(unit)), list(model.parameters()))
    assert all(torch.allclose(p.grad, g, atol=1e-5) for p, g in zip(model.parameters(), wanted, strict=True))


def words_of():
    "A tokenizer of eight words."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *"abcdefgh"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


# ---- data that say whom they protect


RUN = dict(epsilon=4.0, batch_size=4, steps=2, accountant="rdp", delta=1e-2, progress=False)


def people_file(folder, name="rows.csv", rows=24, first=0):
    path = folder / name
    letters = "hgfedcba" if first else "abcdefgh"
    frame = pd.DataFrame({"text": [" ".join(letters[: 1 + i % 5]) for i in range(rows)], "label": [i % 3 for i in range(rows)],
                          "who": [f"w{first + i // 3}" for i in range(rows)]})
    frame.to_csv(path, index=False)
    return str(path)


def tuned(train, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpft.fine_tune(zoo.build("bert")[0].float(), train, dpft.BiTFiT(), **{**RUN, "tokenizer": words_of(), **more})


def test_data_that_were_loaded_with_a_unit_protect_it_and_say_so(tmp_path, capsys):
    run = tuned(dpft.load_data(people_file(tmp_path), unit="who"), unit_cap=2, progress=True)
    assert run.guarantee.unit == "who" and run.guarantee.mechanisms[0].sample_rate == 0.5
    assert "the number of whos, 8" in run.guarantee.assumed_public and "unit: who" in capsys.readouterr().err
    run.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "guarantee.json").read_text())["unit"] == "who"


def test_the_unit_of_a_task_stays_when_its_rows_are_chosen(tmp_path):
    task = dpft.load_data(people_file(tmp_path), unit="who", limit=18)
    names, fewer = len(set(task.train["who"])), len(set(task.train["who"][:12]))
    table = Task("t", "text", TableData(task.train[:]).subset(range(12)), None, columns=task.columns, unit="who")
    for some, units in ((task, names), (task.assuming("a fact"), names), (replace(task, train=task.train.select(range(12))), fewer),
                        (replace(task, train=take(task.train, range(12))), fewer), (table, fewer)):
        ready = prepare(zoo.build("bert")[0], some, words_of())
        assert some.unit == "who" and ready.schema.unit == "who" and len(units_of(ready.train, None)) == units
    assert tuned(replace(task, train=task.train.select(range(12)))).guarantee.unit == "who"
    assert task.train.select(range(3))["text"][:] == task.train["text"][:3]


CHOICES = {"select": lambda rows: rows.select([20, 1, 2, 5, 7, 9, 10, 11, 13, 3, 4, 0]), "first": lambda rows: rows.select(range(12)),
           "filter": lambda rows: rows.filter(lambda row: row["label"] < 2), "shuffle": lambda rows: rows.shuffle(seed=0),
           "split": lambda rows: rows.train_test_split(0.5, seed=0)["train"], "map": lambda rows: rows.map(lambda row: {"more": 1}),
           "Subset": lambda rows: torch.utils.data.Subset(rows, range(12)), "sort": lambda rows: rows.sort("text"),
           "Subset of it": lambda rows: torch.utils.data.Subset(torch.utils.data.Subset(rows, range(20)), range(15)),
           "two": lambda rows: torch.utils.data.ConcatDataset([rows.select(range(12)), rows.select(range(12, 24))]),
           "joined": lambda rows: concatenate_datasets([rows.select(range(12)), rows.select(range(12))])}


@pytest.mark.parametrize("choice", CHOICES)
def test_rows_that_are_chosen_from_marked_ones_protect_the_same_people(tmp_path, choice):
    rows = CHOICES[choice](dpft.load_data(people_file(tmp_path), unit="who").train)
    names = {row["who"] for row in rows}
    ready = prepare(zoo.build("bert")[0].float(), rows, words_of())
    alone = dpft.Engine(ready.model, None, dpft.BiTFiT(), ready.train, epsilon=4.0, batch_size=4, steps=2, accountant="rdp", delta=1e-2)
    assert ready.schema.unit == "who" == alone.unit and alone.population.size == len(names)


def test_whom_rows_protect_is_said_once_and_does_not_reach_the_rows_it_was_said_of(tmp_path):
    plain = dpft.load_data(people_file(tmp_path)).train
    plain.info.description = "Stories."
    marked = protecting(protecting(plain, "label"), "who")
    assert plain.info.description == "Stories." and unit_for(plain) is None and unit_for(marked) == "who"
    assert protecting(marked, "who") is marked and marked.info.description.count("\n") == 1
    with pytest.raises(ValueError, match="put together of rows that name different units; load all of them with one unit="):
        unit_for(concatenate_datasets([marked, protecting(plain, "label")]))
    with pytest.raises(ValueError, match="no column 'who'"):
        tuned(marked.remove_columns("who"))


@pytest.mark.parametrize("other", ["text2", "example", [0, 1] * 12])
def test_a_run_that_protects_others_than_its_data_say_is_refused(tmp_path, other):
    task = dpft.load_data(people_file(tmp_path), unit="who")
    ready = prepare(zoo.build("bert")[0], task, words_of())
    for asked in (lambda: tuned(task, unit=other, ledger=tmp_path / "l.sqlite"),
                  lambda: dpft.Engine(ready.model, None, dpft.BiTFiT(), ready.train, epsilon=4.0, unit=other),
                  lambda: dpft.tune(ready.model, task, dpft.BiTFiT(), {"clip": [0.1, 0.2]}, lambda model: 1.0, epsilon=4.0, unit=other)):
        with pytest.raises(ValueError, match="loaded to protect whom column 'who' says, and unit= says another"):
            asked()
    assert not (tmp_path / "l.sqlite").exists()


def test_an_engine_protects_whom_pictures_were_loaded_for(tmp_path):
    from PIL import Image as Picture

    rows = []
    for number in range(12):
        Picture.fromarray(np.full((4, 4), number, np.uint8)).save(file := io.BytesIO(), "png")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": number % 3, "patient": number // 3})
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    task = dpft.load_data(str(tmp_path / "rows.parquet"), unit="patient")
    assert engine(data=task.train, batch_size=2, delta=0.05).population.size == 4
    assert engine(data=task.train.subset(range(9)), batch_size=2, delta=0.05).unit == "patient"
    assert engine(data=dpft.load_data(str(tmp_path / "rows.parquet")).train, batch_size=2, delta=0.05).unit == "example"


def test_each_rows_unit_of_a_task_is_kept():
    table = {"text": list("abcdefgh"), "label": [0, 1] * 4}
    task = as_task(table, unit=[row // 2 for row in range(8)])
    assert tuned(task, batch_size=2, delta=0.05).guarantee.mechanisms[0].sample_rate == 0.5


def test_a_search_and_its_scores_protect_whom_the_task_names(tmp_path):
    task = dpft.load_data(people_file(tmp_path), unit="who")
    dev = dpft.load_data(people_file(tmp_path, "dev.csv", first=20)).train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dpft.tune(zoo.build("bert")[0].float(), task, dpft.BiTFiT(), {"learning_rate": [1e-3, 1e-2]}, NoisyAccuracy(dev),
                          **RUN, trials=2, charge="composition", tokenizer=words_of())
    assert found.guarantee.unit == "who" and found.guarantee.mechanisms[0].sample_rate == 0.5
    assert found.score_guarantee.unit == "unit of the development set"
    assert NoisyAccuracy(task.train, 1.0).most == 3
    with pytest.raises(ValueError, match="3 of the 24 scored rows belong to people who are trained on too"):
        tuned(task, evaluate=NoisyAccuracy(dpft.load_data(people_file(tmp_path, "dev.csv", first=7)).train, 1.0))


@pytest.mark.parametrize("put", [lambda rows: torch.utils.data.StackDataset(rows), lambda rows: torch.utils.data.StackDataset(a=rows)],
                         ids=["in a row", "by name"])
def test_stacked_rows_protect_whom_they_say(tmp_path, put):
    assert unit_for(put(dpft.load_data(people_file(tmp_path), unit="who").train)) == "who"
