"""What `test_boundary` does not reach: searches, caches, resumed runs, people in secure mode, texts, the command, two processes.

As there, all outputs of two runs on data sets that differ in a record are compared byte by byte, once charged sums are constants."""

import io
import itertools
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from test_boundary import made, people
from test_processes import Ranks

import dpft
from dpft import Adapter, BiTFiT, Chain, DPFrost, Full, LastLayer, LoRA, Then
from dpft.auditing import Stopped, stopping
from dpft.boundary import differing, files_in, given_out, neighbours, toy_network, toy_pictures, withheld
from dpft.data import Public, TensorData
from dpft.scores import NoisyAccuracy

DATA = toy_pictures()
THREE = ("without it", "not a number", "another class")


def compared(make, data=DATA, others=None):
    "Name of a neighbour -> what differs on it; the run on the data itself is made once."
    if others is None:
        others = {name: neighbours(data)[name] for name in THREE}
    here = given_out(lambda: make(data))
    assert "error" not in here, here["error"]
    return {name: differing(here, given_out(lambda other=other: make(other))) for name, other in others.items()}


def nothing(found):
    assert found and not any(found.values()), found


# searches ------------------------------------------------------------------------------------------------------------------------

SCORES = {"public": lambda: Public(toy_pictures(12), "made for these tests"), "paid for": lambda: NoisyAccuracy(toy_pictures(12))}


@pytest.mark.parametrize("charge, score", [
    ("composition", "public"), ("selection", "public"), ("none", "public"), ("selection", "paid for")])
def test_a_search_gives_nothing_away(tmp_path, charge, score):
    number = itertools.count()

    def make(rows):
        found = dpft.tune(toy_network(), rows, BiTFiT(), {"learning_rate": [0.1, 0.2]}, SCORES[score](), 4.0, trials=2, charge=charge,
                          delta=0.01, steps=2, batch_size=8, public_size=24, accountant="rdp", clip=0.5, progress=False,
                          ledger=tmp_path / f"{next(number)}.sqlite")
        print(found.report(), found.trials, found.best, found.charge, found.price)      # into what is compared
        return found.run

    nothing(compared(make))


# caches --------------------------------------------------------------------------------------------------------------------------

CACHED = {
    "LastLayer": LastLayer, "Chain": lambda: Chain(LoRA(targets=("4",)), Adapter(after=("4",))),
    "Then": lambda: Then(LoRA(targets=("4",)), 0.5, LastLayer())}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_a_cached_trunk_gives_nothing_away(tmp_path, name, folder):
    own = {"cache_folder": tmp_path} if folder else {}

    def make(rows):
        return made(rows, CACHED[name](), steps=6, batch_size=12, cache=1.0, **own)

    nothing(compared(make))
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
    nothing(compared(resumed(tmp_path, itertools.count(), **knobs)))


def test_a_resumed_run_of_people_gives_nothing_away(tmp_path):
    others = {name: neighbours(DATA)[name] for name in ("another", "not a number")}
    knobs = {"unit": True, "public_size": 12, "batch_size": 4}
    nothing(compared(resumed(tmp_path, itertools.count(), **knobs), others=others))


def test_a_resumed_search_of_entries_gives_nothing_away(tmp_path):
    number = itertools.count()

    def make(rows):
        own = {"checkpoint": tmp_path / str(next(number)), "checkpoint_every": 1, "steps": 3}
        with pytest.raises(Stopped):
            made(rows, DPFrost(0.6, rounds=2, sample_rate=0.5), optimizer=STOPPING, **own)
        return made(rows, DPFrost(0.6, rounds=2, sample_rate=0.5), optimizer=ADAMW, **own)

    nothing(compared(make))


# secure mode, people, and what is left in folders -------------------------------------------------------------------------------------


def test_people_in_secure_mode_do_not_show():
    def make(rows):
        return made(rows, unit=people(rows), public_size=12, batch_size=4, secure_mode=True)

    nothing(compared(make, others={name: neighbours(DATA)[name] for name in ("another", "very large", "another class")}))


def test_a_person_more_is_not_seen_when_the_number_of_people_is_public():
    def make(units):
        return made(DATA, unit=units, public_size=12, batch_size=4)

    nothing(compared(make, people(DATA), {"a new person": [*people(DATA)[:-1], 99]}))


def test_what_a_finished_run_leaves_behind_is_its_ledger(tmp_path):
    with withheld():
        made(DATA, checkpoint=tmp_path / "run")
    assert set(files_in(tmp_path)) == {"run.ledger", "run.ledger, mode"}


def test_a_run_that_is_saved_by_the_command_of_fine_tune_gives_nothing_away(tmp_path):
    number = itertools.count()

    def make(rows):
        run = made(rows, output=tmp_path / str(next(number)))
        print(*(f"{name} {content!r}" for name, content in files_in(tmp_path / str(next(number) - 1)).items()))
        return run

    nothing(compared(make))


@pytest.mark.parametrize("first", [False, True])
def test_a_later_run_on_the_model_of_an_earlier_one_gives_nothing_away(first):
    "The earlier run is named, with its epsilon and nothing of its data."
    def make(rows):
        return made(rows, model=made(DATA if first else rows).model)

    nothing(compared(make))


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
        return dpft.fine_tune(reader(), rows, method(), epsilon=4.0, steps=2, batch_size=6, public_size=12, clip=0.5, accountant="rdp",
                              progress=False)

    others = {"longer": texts(25, *lengths[1:]), "shorter": texts(1, *lengths[1:]), "without it": texts(*lengths)[1:]}
    nothing(compared(make, texts(*lengths), others))


# the command ---------------------------------------------------------------------------------------------------------------------


def command(rows, *words):
    "All that the command prints and writes when these rows are the digits of its data set."
    from dpft import cli, sources
    honest, out, err = sources.load_data, io.StringIO(), io.StringIO()

    def load_data(*arguments, **knobs):
        task = honest(*arguments, **knobs)
        task.train = rows
        return task

    with tempfile.TemporaryDirectory() as folder, withheld(), patch.object(sources, "load_data", load_data):
        told = ["dpft", "train", "--data", "digits", "--model", "mlp", "--limit", "40", "--public-size", "40", "--batch-size", "8",
                "--steps", "2", "--epsilon", "4", "--accountant", "rdp", "--output", f"{folder}/model", *words]
        with patch.object(sys, "argv", told), redirect_stdout(out), redirect_stderr(err):
            try:
                cli.main()
                status = 0
            except SystemExit as end:
                status = end.code or 0
        found = files_in(folder)
    printed = {"status": status, "standard output": out.getvalue().replace(folder, "FOLDER"), "standard error": err.getvalue()}
    return found | {name: str(value).encode() for name, value in printed.items()}


@pytest.mark.parametrize("words", [("--no-progress", "--score", "none"),
                                   ("--no-progress", "--secure-mode", "--method", "last-layer", "--score", "none")])
def test_the_quiet_command_prints_and_writes_nothing_of_the_data(words):
    from dpft.tasks import load_data
    data = load_data("digits", limit=40).train
    here = command(data, *words)
    pixels, labels = data.images.clone(), data.labels.clone()
    pixels[0], labels[0] = 255, (labels[0] + 1) % 10
    others = {"without it": data.subset(range(1, 40)), "white": TensorData(pixels, data.labels, data.scale, data.mean, data.std),
              "another class": TensorData(data.images, labels, data.scale, data.mean, data.std)}
    assert here["status"] == b"0" and b"-differentially private**" in here["model/README.md"]
    for name, other in others.items():
        assert not differing(here, command(other, *words)), name


# two processes ----------------------------------------------------------------------------------------------------------------------


def outputs_of_a_rank(which, how):
    "What a process of a shared run gives out on the data or on a neighbour."
    rows = neighbours(DATA)[which] if which else DATA
    torch.manual_seed(0)
    methods = {"Full": Full, "DPFrost": lambda: DPFrost(0.6, rounds=2, sample_rate=0.5), "secure mode": BiTFiT}
    return given_out(lambda: made(rows, methods[how](), secure_mode=how == "secure mode"))


class Patient(Ranks):
    "A minute is short for the first run of a process on a busy machine."

    def ask(self, task, **arguments):
        for pipe in self.pipes:
            pipe.send((task, arguments))
        return [pipe.recv() if pipe.poll(600) else ("no answer in ten minutes", "hangs") for pipe in self.pipes]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Patient(2, tmp_path_factory.mktemp("boundary") / "meeting")
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


def test_a_planted_leak_on_the_second_process_is_caught(two):
    "The comparison looks at every process."
    here, other = (two(leaky_rank, which=which) for which in ("", "another"))
    assert not differing(here[0], other[0]) and differing(here[1], other[1]) == ["standard output"]


def leaky_rank(which):
    import torch.distributed as dist
    rows = neighbours(DATA)[which] if which else DATA

    def make():
        if dist.get_rank() == 1:
            print(rows.images[0].sum())
        return made(rows)

    return given_out(make)


def test_the_folder_of_the_comparison_is_taken_out_of_errors():
    def failing():
        raise ValueError(f"no {Path(tempfile.gettempdir())}")
    with pytest.raises(ValueError, match="neither run came to its end"):
        differing(given_out(failing), given_out(failing))
