"""Nothing leaves a run but what was paid for: all outputs on two data sets are the same bytes once the charged sums are constants."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from test_processes import Ranks
from torch import nn

import dpft
from dpft import (
    Adapter,
    BiTFiT,
    Chain,
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
    ZerothOrder,
)
from dpft.book.audits import Stopped, stopping
from dpft.boundary import SETTINGS, audit_boundary, differing, files_in, given_out, influence, leaks, neighbours, toy_network, toy_pictures
from dpft.data import Public
from dpft.engine import Engine
from dpft.loop import Run, print_once
from dpft.prepared import Prepared
from dpft.scores import NoisyAccuracy

PUBLIC = Public(toy_pictures(12), "made for these tests")
METHODS = {
    "Full": Full, "LastLayer": LastLayer, "BiTFiT": BiTFiT, "NormOnly": NormOnly,
    "RandomPartitions": lambda: RandomPartitions(0.6), "LargestWeights": lambda: LargestWeights(0.5),
    "LoRA": lambda: LoRA(targets=("1", "4")), "Adapter": lambda: Adapter(after=("1",)),
    "DPFrost": lambda: DPFrost(0.6, rounds=2, sample_rate=0.5), "LayerFreeze": lambda: LayerFreeze(1, 1),
    "RapFT, private": lambda: RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=0.5),
    "RapFT, public": lambda: RapFT(BiTFiT(), relevance_data=PUBLIC),
    "Chain": lambda: Chain(LoRA(targets=("1",)), BiTFiT()), "Then": lambda: Then(Full(), 0.34, BiTFiT()),
    "ZerothOrder": lambda: ZerothOrder(directions=2),
}
USUAL = dict(epsilon=4.0, steps=2, batch_size=8, public_size=24, clip=0.5, accountant="rdp", progress=False)


def made(rows, method=None, model=None, **knobs):
    return dpft.fine_tune(model or toy_network(), rows, method or Full(), **{**USUAL, **knobs})


@pytest.mark.parametrize("name", METHODS)
def test_no_method_gives_anything_away(name):
    settings = {key: SETTINGS[key] for key in ("plain", "secure mode")}
    found = list(audit_boundary(METHODS[name], settings))
    assert len(found) == 10 and not [each for each in found if each.differs]


@pytest.mark.parametrize("name", ["automatic clipping", "average", "small batches", "no cache"])
def test_no_setting_gives_anything_away(name):
    assert not [each for each in audit_boundary(BiTFiT, {name: SETTINGS[name]}) if each.differs]


THREE = ("without it", "infinite", "another class")


def compared(make, data=None, others=None):
    "Neighbour -> what differs on it; the run on the data itself is made once."
    data = toy_pictures() if data is None else data
    if not isinstance(others, dict):
        others = {name: other for name, other in neighbours(data).items() if others is None or name in others}
    here = given_out(lambda: make(data))
    assert "error" not in here, here["error"]
    return {name: differing(here, given_out(lambda other=other: make(other))) for name, other in others.items()}


def nothing(found):
    assert found and not any(found.values()), found


def people(data):
    return [row // 2 for row in range(len(data))]


def test_neither_a_person_nor_her_rows_show():
    data = toy_pictures()
    def make(rows):
        return made(rows, unit=people(rows), public_size=12, batch_size=4)
    nothing(compared(make, data, {name: other for name, other in neighbours(data).items() if name != "without it"}))
    def grouped(units):
        return made(data, unit=units, public_size=12, batch_size=4)
    assert not leaks(grouped, people(data), [0, 0, 0, *people(data)[3:]])     # a row changes its owner


def test_progress_shows_nothing_of_the_data():
    data = toy_pictures()
    def make(rows):
        return made(rows, progress=True)
    assert {output for found in compared(make, data).values() for output in found} <= {"standard error"}      # a bar shows the time


def test_a_shared_ledger_and_a_checkpoint_give_nothing_away(tmp_path):
    data, number = toy_pictures(), itertools.count()
    def make(rows):
        folder = tmp_path / str(next(number))
        ledger = dpft.Ledger(folder.with_suffix(".sqlite"), who="Ada")
        made(rows, ledger=ledger)                                                         # somebody else's
        return made(rows, ledger=ledger, checkpoint=folder)
    nothing(compared(make, data))


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
    nothing(compared(own_loop))


# searches ------------------------------------------------------------------------------------------------------------------------

SCORES = {"public": lambda: Public(toy_pictures(12), "made for these tests"), "paid for": lambda: NoisyAccuracy(toy_pictures(12))}


@pytest.mark.parametrize("charge, score", [
    ("composition", "public"), ("selection", "paid for")])
def test_a_search_gives_nothing_away(tmp_path, charge, score):
    number = itertools.count()

    def make(rows):
        found = dpft.tune(toy_network(), rows, BiTFiT(), {"learning_rate": [0.1, 0.2]}, SCORES[score](), 4.0, trials=2, charge=charge,
                          delta=0.01, steps=2, batch_size=8, public_size=24, accountant="rdp", clip=0.5, progress=False,
                          ledger=tmp_path / f"{next(number)}.sqlite")
        print(found.report(), found.trials, found.best, found.charge, found.price)      # into what is compared
        return found.run

    nothing(compared(make, others=THREE))


# caches --------------------------------------------------------------------------------------------------------------------------

CACHED = {
    "LastLayer": LastLayer, "Chain": lambda: Chain(LoRA(targets=("4",)), Adapter(after=("4",))),
    "Then": lambda: Then(LoRA(targets=("4",)), 0.5, LastLayer())}


@pytest.mark.parametrize("name", CACHED)
def test_a_cached_trunk_gives_nothing_away(tmp_path, name):
    def make(rows):
        return made(rows, CACHED[name](), steps=6, batch_size=12, cache=1.0, cache_folder=tmp_path)

    nothing(compared(make, others=THREE))
    assert not files_in(tmp_path)


# resumed runs --------------------------------------------------------------------------------------------------------------------


ADAMW, STOPPING = torch.optim.AdamW, stopping(2)
STOPPING.__module__, STOPPING.__qualname__ = ADAMW.__module__, ADAMW.__qualname__      # by which a checkpoint knows it


def resumed(place, number, **knobs):
    "Makes a run that stops at its second step and is continued."
    def make(rows):
        own = {"checkpoint": place / str(next(number)), "checkpoint_every": 1, "steps": 3, **knobs}
        if "unit" in own:
            own["unit"] = people(rows)
        with pytest.raises(Stopped):
            made(rows, optimizer=STOPPING, **own)
        return made(rows, optimizer=ADAMW, **own)
    return make


@pytest.mark.parametrize("knobs", [{}, {"secure_mode": True}, {"average": 0.9}], ids=["plain", "secure mode", "average"])
def test_a_resumed_run_gives_nothing_away(tmp_path, knobs):
    nothing(compared(resumed(tmp_path, itertools.count(), **knobs), others=THREE))


def test_a_resumed_run_of_people_gives_nothing_away(tmp_path):
    others = {name: neighbours(toy_pictures())[name] for name in ("another", "infinite")}
    knobs = {"unit": True, "public_size": 12, "batch_size": 4}
    nothing(compared(resumed(tmp_path, itertools.count(), **knobs), others=others))


# secure mode, people, and what is left in folders -------------------------------------------------------------------------------------


def test_people_in_secure_mode_do_not_show():
    def make(rows):
        return made(rows, unit=people(rows), public_size=12, batch_size=4, secure_mode=True)

    nothing(compared(make, others={name: neighbours(toy_pictures())[name] for name in ("another", "very large", "another class")}))


# texts ---------------------------------------------------------------------------------------------------------------------------


def texts(*lengths):
    "Tokenised rows of these lengths."
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 40, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row.tolist(), "attention_mask": [1] * len(row), "labels": i % 3} for i, row in enumerate(rows)]


def reader():
    torch.manual_seed(0)
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=40, num_labels=3,
        max_position_embeddings=40, pad_token_id=1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0))


@pytest.mark.parametrize("method", [BiTFiT, Full])
def test_a_longer_text_does_not_show(method):
    hf.utils.logging.disable_progress_bar()                         # a bar of another library, which shows the time
    lengths = [5, 7, 3, 6, 4, 8, 5, 7, 3, 6, 4, 8]

    def make(rows):
        print_once.cache_clear()                                    # which columns are read is said once in a process
        return dpft.fine_tune(reader(), rows, method(), epsilon=4.0, steps=2, batch_size=6, public_size=12, clip=0.5, accountant="rdp",
                              progress=False)

    others = {"longer": texts(25, *lengths[1:]), "shorter": texts(1, *lengths[1:]), "without it": texts(*lengths)[1:]}
    nothing(compared(make, texts(*lengths), others))


# two processes ----------------------------------------------------------------------------------------------------------------------


def outputs_of_a_rank(which, how):
    "What a process of a shared run gives out on the data or on a neighbour."
    rows = neighbours(toy_pictures())[which] if which else toy_pictures()
    torch.manual_seed(0)
    methods = {"Full": Full, "DPFrost": lambda: DPFrost(0.6, rounds=2, sample_rate=0.5), "secure mode": BiTFiT}
    return given_out(lambda: made(rows, methods[how](), secure_mode=how == "secure mode"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("boundary") / "meeting")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("how", ["Full", "DPFrost", "secure mode"])
def test_neither_of_two_processes_gives_anything_away(two, how):
    here = two(outputs_of_a_rank, which="", how=how)
    assert not any("error" in each for each in here), [each.get("error") for each in here]
    assert {name for name in here[0] if name.startswith("model: ")} and "saved/guarantee.json" in here[0]
    for which in THREE:
        other = two(outputs_of_a_rank, which=which, how=how)
        assert [differing(one, another) for one, another in zip(here, other, strict=True)] == [[], []], which


# what a unit may do to the sums -----------------------------------------------------------------------------------------------------


class Late(nn.Module):
    "Adds the sum of the batch before to each picture, but not in its first passes."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
        self.passes, self.before = 0, 0

    def forward(self, images):
        self.passes += 1
        before, self.before = self.before, images.detach().sum(0)
        return self.inner(images + before if self.passes > 4 else images)


@pytest.mark.parametrize("method, knobs", [(Full, {}), (BiTFiT, {"secure_mode": True}),
                                           (Full, {"unit": people(toy_pictures()), "public_size": 12}),
                                           (lambda: DPFrost(0.6, rounds=2, sample_rate=1.0), {}),
                                           (lambda: RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=1.0), {})])
def test_an_honest_run_keeps_the_bound_of_every_sum(method, knobs):
    found = influence(lambda: made(toy_pictures(), method(), **{"steps": 3, "batch_size": knobs.get("public_size", 24), **knobs}))
    assert len(found) >= 3 and 0.5 < max(found) <= 1 + 1e-5


def test_a_model_that_mixes_examples_in_later_batches_exceeds_it():
    found = influence(lambda: made(toy_pictures(), model=Late(), steps=7, batch_size=24, clip=0.1, check=False))
    assert found[0] <= 1 + 1e-5 and max(found) > 1.1


def test_a_unit_that_is_never_drawn_moves_nothing():
    assert influence(lambda: made(toy_pictures(), batch_size=24, steps=2), unit=24) == [0.0, 0.0]      # there are 24


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


def test_the_command_compares_the_outputs_of_ones_own_method(tmp_path, monkeypatch, run):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom dpft.method import Method\n"
        "class Honest(Method):\n    def choose(self, context, among): return list(among)[:2]\n"
        "class Careless(Honest):\n    def start(self, context):\n        super().start(context)\n"
        "        context.model.register_buffer('first', context.needs().train.images[0].nan_to_num().clone())\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dpft.boundary.SETTINGS", {"plain": {}})
    status, out, _ = run("audit", "--boundary", "--method", "mine.py:Honest")
    assert status == 0 and "5 pairs" in out and "0 of which differ" in out
    status, _, err = run("audit", "--boundary", "--method", "mine.py:Careless")
    assert status == 1 and "leaks private data" in err and "model: first" in err
