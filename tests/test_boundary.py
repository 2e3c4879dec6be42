"""Nothing leaves a run but what was paid for: all outputs on two data sets are the same bytes once the charged sums are constants."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dpft
from dpft import (
    Adapter,
    BiTFiT,
    Chain,
    Compacter,
    DPFrost,
    Full,
    LargestWeights,
    LastLayer,
    LayerFreeze,
    LoRA,
    NormOnly,
    RandomPartitions,
    RapFT,
    Then,
)
from dpft.boundary import SETTINGS, audit_boundary, differing, given_out, leaks, neighbours, toy_network, toy_pictures
from dpft.data import Public, TensorData
from dpft.engine import Engine
from dpft.loop import Run
from dpft.prepared import Prepared

PUBLIC = Public(toy_pictures(12), "made for these tests")
METHODS = {
    "Full": Full, "LastLayer": LastLayer, "BiTFiT": BiTFiT, "NormOnly": NormOnly,
    "RandomPartitions": lambda: RandomPartitions(0.6), "LargestWeights": lambda: LargestWeights(0.5),
    "LoRA": lambda: LoRA(targets=("1", "4")), "Adapter": lambda: Adapter(after=("1",)),
    "Compacter": lambda: Compacter(4, 2, after=("1",)),
    "DPFrost": lambda: DPFrost(0.6, rounds=2, sample_rate=0.5), "LayerFreeze": lambda: LayerFreeze(1, 1),
    "RapFT, private": lambda: RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=0.5),
    "RapFT, public": lambda: RapFT(BiTFiT(), relevance_data=PUBLIC),
    "Chain": lambda: Chain(LoRA(targets=("1",)), BiTFiT()), "Then": lambda: Then(Full(), 0.34, BiTFiT()),
}
USUAL = dict(epsilon=4.0, steps=2, batch_size=8, public_size=24, clip=0.5, accountant="rdp", progress=False)


def made(rows, method=None, model=None, **knobs):
    return dpft.fine_tune(model or toy_network(), rows, method or Full(), **{**USUAL, **knobs})


@pytest.mark.parametrize("name", METHODS)
def test_no_method_gives_anything_away(name):
    settings = {key: SETTINGS[key] for key in ("plain", "secure mode", "no cache")}
    found = list(audit_boundary(METHODS[name], settings))
    assert len(found) == 18 and not [each for each in found if each.differs]


@pytest.mark.parametrize("name", ["automatic clipping", "average", "small batches"])
def test_no_setting_gives_anything_away(name):
    assert not [each for each in audit_boundary(BiTFiT, {name: SETTINGS[name]}) if each.differs]


def compared(make, data, names=None):
    "Name of a neighbour, and what differs on it; the run on the data itself is made once."
    here, others = given_out(lambda: make(data)), neighbours(data)
    for name in names or others:
        yield name, differing(here, given_out(lambda other=others[name]: make(other)))


def people(data):
    return [row // 2 for row in range(len(data))]


def test_neither_a_person_nor_her_rows_show():
    data = toy_pictures()
    def make(rows):
        return made(rows, unit=people(rows), public_size=12, batch_size=4)
    same_size = [name for name, other in neighbours(data).items() if len(other) == len(data)]  # a record fewer is a person of one row
    for name, found in compared(make, data, same_size):
        assert not found, name
    def grouped(units):
        return made(data, unit=units, public_size=12, batch_size=4)
    assert not leaks(grouped, people(data), [0, 0, 0, *people(data)[3:]])     # a row changes its owner


def test_progress_shows_nothing_of_the_data():
    data = toy_pictures()
    def make(rows):
        return made(rows, progress=True)
    for name, found in compared(make, data):
        assert not [output for output in found if output != "standard error"], name      # a bar shows the time


def test_a_shared_ledger_and_a_checkpoint_give_nothing_away(tmp_path):
    data, number = toy_pictures(), itertools.count()
    def make(rows):
        folder = tmp_path / str(next(number))
        ledger = dpft.Ledger(folder.with_suffix(".sqlite"), who="Ada")
        made(rows, ledger=ledger)                                                         # somebody else's
        return made(rows, ledger=ledger, checkpoint=folder)
    for name, found in compared(make, data):
        assert not found, name


def own_loop(rows):
    "A loop by hand, and the run that it makes."
    model = toy_network()
    knobs = {name: value for name, value in USUAL.items() if name != "progress"}
    engine = Engine(model, None, Full(), rows, **knobs)
    optimizer = torch.optim.SGD(engine.parameters(), 0.1)
    for step in engine:
        step.take(optimizer)
    return Run(model, [], engine.guarantee, Prepared(model, rows), sorted(engine.trains), engine.ledger)


def test_a_loop_by_hand_gives_nothing_away():
    for name, found in compared(own_loop, toy_pictures()):
        assert not found, name


class Buffered(nn.Module):
    "A network that writes into a buffer what it sees."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.line = nn.Flatten(), nn.Linear(16, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, images):
        self.largest.copy_(torch.maximum(self.largest, images.detach().amax()))
        return self.line(self.flat(images))


def test_a_buffer_that_the_forward_pass_writes_is_refused_before_anything_is_claimed():
    for rows in (toy_pictures(), *neighbours(toy_pictures()).values()):
        with pytest.raises(ValueError, match="a pass writes into largest what depends on its examples"):
            made(rows, model=Buffered(), ledger=(ledger := dpft.Ledger()))
        assert ledger.runs() == []


# what the test is for: leaks that were planted --------------------------------------------------------------------------------------


class Remembers(Full):
    "A method that puts a private statistic where outputs are made from."

    def __init__(self, where):
        self.where = where

    def start(self, context):
        super().start(context)
        largest = context.needs().train.images.nan_to_num(0, 0, 0).max().item()
        if self.where == "buffer":
            context.model.register_buffer("largest", torch.tensor(largest))
        if self.where == "weight":
            with torch.no_grad():
                next(context.model.parameters()).add_(largest)
        if self.where == "argument":
            self.where = largest
        if self.where == "guarantee":
            context.assume_public(f"a largest pixel of {largest}")
        if self.where == "print":
            print(largest)
        if self.where == "warning":
            import warnings
            warnings.warn(f"the largest pixel is {largest}", stacklevel=1)
        if self.where == "error" and largest > 1e6:
            raise ValueError("a very large pixel")


CAUGHT = {"buffer": "model: largest", "weight": "model: 1.weight", "argument": "report()", "guarantee": "saved/README.md",
          "print": "standard output", "warning": "warnings", "error": "error"}


@pytest.mark.parametrize("where", CAUGHT)
def test_a_planted_leak_is_caught_where_it_leaves(where):
    data = toy_pictures()
    found = leaks(lambda rows: made(rows, Remembers(where)), data, neighbours(data)["very large"])
    assert CAUGHT[where] in found
    assert not leaks(lambda rows: made(rows, Remembers("nowhere")), data, neighbours(data)["very large"])


def test_a_digest_of_the_data_in_a_saved_file_is_caught(monkeypatch):
    from dpft.book.tasks import fingerprint
    honest = Run.save

    def careless(self, path, **more):
        honest(self, path, **more)
        (Path(path) / "provenance.json").write_text(json.dumps(fingerprint(self.prepared.train)))

    monkeypatch.setattr(Run, "save", careless)
    data = toy_pictures()
    assert leaks(made, data, neighbours(data)["another"]) == ["saved/provenance.json"]


def test_a_sum_that_is_released_beside_the_one_place_is_caught(monkeypatch):
    "Without the hook, noise covers the sums and everything differs; a gradient that passes beside it differs under the hook."
    from dpft import step as steps
    honest = steps.Step.privatize

    def careless(self):
        raw = {name: value.clone() for name, value in self.sums.items()}
        honest(self)
        for name, parameter in self.engine.trains.items():
            parameter.grad += 1e-3 * raw[name]

    monkeypatch.setattr(steps.Step, "privatize", careless)
    data = toy_pictures()
    assert "model: 1.weight" in leaks(lambda rows: made(rows, batch_size=24), data, neighbours(data)["another"])   # all are drawn


def test_the_loss_differs_only_when_it_was_asked_for_and_is_named():
    data = toy_pictures()
    found = leaks(lambda rows: made(rows, show_loss=True, batch_size=24), data, neighbours(data)["very large"])
    assert "history" in found and not {"report()", "repr(run)", "warnings"} & set(found)
    assert "the training loss" in made(data, show_loss=True).guarantee.uncharged


def test_the_hook_is_at_the_one_place_where_sums_become_public(monkeypatch):
    calls, honest = [], Engine.release

    def counted(self, name, number, *rest, **more):
        calls.append((name, number))
        return honest(self, name, number, *rest, **more)

    monkeypatch.setattr(Engine, "release", counted)
    made(toy_pictures(), DPFrost(0.6, rounds=2, sample_rate=0.5))
    other = calls[0][0]
    assert calls == [(other, 0), (other, 1), ("train", 0), ("train", 1)] and other != "train"


def test_a_run_is_the_same_bytes_twice():
    "The comparison itself: nothing but the data may make two runs differ."
    data = toy_pictures()
    assert given_out(lambda: made(data)) == given_out(lambda: made(data))
    assert isinstance(data, TensorData)


def test_the_command_compares_the_outputs_of_ones_own_method(tmp_path, monkeypatch, run):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom dpft.method import Method\n"
        "class Honest(Method):\n    def choose(self, context, among): return list(among)[:2]\n"
        "class Careless(Honest):\n    def start(self, context):\n        super().start(context)\n"
        "        context.model.register_buffer('first', context.needs().train.images[0].nan_to_num().clone())\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dpft.boundary.SETTINGS", {"plain": {}})
    status, out, _ = run("audit", "--boundary", "--method", "mine.py:Honest")
    assert status == 0 and "6 pairs" in out and "0 of which differ" in out
    status, _, err = run("audit", "--boundary", "--method", "mine.py:Careless")
    assert status == 1 and "leaks private data" in err and "model: first" in err
