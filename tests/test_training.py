"""The engine and `fine_tune`: noise, sampling, blocks, checkpoints, bad input."""

import copy
import fcntl
import itertools
import math
import os
import random
import re
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from torch import nn, tensor
from transformers import TrainerCallback
from zoo import net, toy

import dpft
from dpft.book.audits import Stopped, stopping
from dpft.checkpoint import CheckpointError, earlier_runs
from dpft.data import TensorData
from dpft.gradients import Block, per_example_gradients
from dpft.guarantee import CHECKED
from dpft.ledger import Ledger, PlanSpent
from dpft.method import Method
from dpft.plan import noise_spread, scaled_blocks
from dpft.privacy import Request
from dpft.step import Step
from dpft.updates import make_optimizer, make_schedule

CHECK = "that the start-up check of a batch passed"
NOISE = dict(epsilon=None, noise_multiplier=1.0)  # nothing to solve


def engine(model=None, method=None, data=None, **settings):
    settings = {"epsilon": 2.0, "batch_size": 20, "steps": 4, "clip": 0.5, "seed": 0, "accountant": "rdp", **settings}
    return dpft.Engine(model or net(), zoo.image_loss, method or dpft.Full(), data or toy(), **settings)


def run_all(e, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(e.parameters(), 0.1)
    for step in e:
        step.take(optimizer)
    return e


def sums_of(e):
    "The sums of one step before noise, flat, and the batches."
    step = next(iter(e))
    batches = []
    for batch in step:
        step.add(batch)
        batches.append(batch)
    return torch.cat([value.flatten() for value in step.sums.values()]).double(), batches, step


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_physical_batches_do_not_change_the_step():
    assert torch.allclose(*(sums_of(engine(physical_batch_size=size))[0] for size in (64, 3)), atol=1e-5)


def test_an_example_that_is_not_finite_contributes_nothing_and_is_counted():
    data = toy()
    sums = []
    for value in (math.inf, 1e38):
        data.images[7] = value                               # the second overflows in the norm
        found, _, step = sums_of(engine(data=data, batch_size=60))
        sums.append(found)
        assert step.not_finite == 1
    assert torch.isfinite(sums[0]).all() and torch.allclose(*sums, atol=1e-6)
    run = dpft.fine_tune(net(), data, dpft.Full(), epsilon=3.0, steps=2, batch_size=60, accountant="rdp", show_loss=True)
    assert [entry["not_finite"] for entry in run.history] == [1, 1] and "not finite" in run.report()


def norms_of(model, data):
    "Norms of the examples' gradients by the slow oracle."
    found = per_example_gradients(model, zoo.image_loss, data.batch(range(len(data))))
    return torch.cat([value.flatten(1) for value in found.values()], 1).norm(dim=1)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_the_share_of_clipped_examples_is_kept_where_the_loss_is_shown_and_nowhere_else(clipping):
    norms = norms_of(net(), toy()).sort().values
    clip = ((norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2).item()    # half of them are longer
    run = tune(steps=2, batch_size=len(norms), clip=clip, clipping=clipping, show_loss=True, learning_rate=1e-9)
    assert [entry["clipped"] for entry in run.history] == [0.5, 0.5]
    assert "the share of gradients that were clipped" in run.guarantee.uncharged and "were clipped" in run.report()
    assert [entry["clipped"] for entry in tune(steps=2, epsilon=math.inf, show_loss=True).history] == [0.0, 0.0]
    _, _, step = sums_of(engine())
    with pytest.raises(ValueError, match="show_loss=True"):
        assert step.clipped


def test_same_seed_same_run_other_seed_other_run_and_no_seed_is_never_the_same():
    a, b, c, d, f = (weights(run_all(engine(seed=s)).model) for s in (0, 0, 1, None, None))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(d, f)


def test_without_privacy_the_step_is_the_plain_gradient():
    model = net()
    e = engine(copy.deepcopy(model), epsilon=math.inf, batch_size=60)
    _, batches, step = sums_of(e)
    step.privatize()
    loss = sum(zoo.image_loss(model, batch).sum() for batch in batches) / 60
    for p, g in zip(e.model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        assert torch.allclose(p.grad, g, atol=1e-6)
    assert e.guarantee.epsilon() == math.inf


def mixing():
    "BatchNorm in a frozen trunk, with a large row that moves its statistics."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    return model


def whoever_turns_modes(model):
    "What a loop does around a score."
    model.eval()
    model.train()
    return {"accuracy": 0.0}


class TurnsModes(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        whoever_turns_modes(model)


@pytest.mark.parametrize("settings", [{"evaluate": whoever_turns_modes, "evaluate_every": 1}, {"callbacks": [TurnsModes()]}])
def test_no_score_and_no_callback_turns_a_layer_on_that_mixes_rows(settings, monkeypatch):
    seen = []
    pictures = toy().images.clone()
    pictures[0] *= 1000

    def privatize(step, own=Step.privatize):
        seen.append([value.flatten().clone() for value in step.sums.values()])
        own(step)

    def sums(data):
        seen.clear()
        dpft.fine_tune(mixing(), data, dpft.Trainable(), noise_multiplier=1.0, delta=1e-3, batch_size=len(data), steps=3, clip=0.1,
                       learning_rate=1e-30, progress=False, loss_fn=zoo.image_loss, **settings)
        return [torch.cat(one) for one in seen]

    monkeypatch.setattr(Step, "privatize", privatize)
    data = TensorData(pictures, toy().labels)
    with_it, without = sums(data), sums(data.subset(range(1, len(data))))
    assert [float((one - other).norm()) <= 0.1 * 1.0001 for one, other in zip(with_it, without, strict=True)] == [True] * 3


@pytest.mark.parametrize("left_out", ["a batch", "the rest"])
def test_a_step_has_all_of_its_draw(left_out):
    """One example whose loss is not finite decides over its whole batch where a loop leaves such batches out."""
    e = engine(physical_batch_size=4)
    step = next(iter(e))
    for number, batch in enumerate(step):
        if number == 1 and left_out == "a batch":
            continue
        step.add(batch)
        if number == 1:
            break
    with pytest.raises(RuntimeError, match="iterate to the end and add every batch"):
        step.privatize()


def test_steps_must_be_made_private_and_done_in_order():
    e = engine()
    steps = iter(e)
    step = next(steps)
    with pytest.raises(RuntimeError, match="privatize"):
        step.done()
    step.privatize()
    with pytest.raises(RuntimeError, match="already"):
        step.privatize()
    with pytest.raises(RuntimeError, match="left before"):
        next(steps)


def test_blocks_are_rescaled_to_the_solved_multiplier():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    first, second = scaled_blocks([dpft.Block([a], clip=3.0, noise=2.0), dpft.Block([b], clip=1.0, noise=0.5)], [a, b], 0.2, 1.1)
    assert first.clip == pytest.approx(0.6) and second.clip == pytest.approx(0.2)
    assert ((first.clip / first.noise) ** 2 + (second.clip / second.noise) ** 2) ** -0.5 == pytest.approx(1.1)
    with pytest.raises(ValueError, match="lies in 0 blocks"):
        scaled_blocks([dpft.Block([a])], [a, b], 0.2, 1.1)
    with pytest.raises(ValueError, match="lies in 2 blocks"):
        scaled_blocks([dpft.Block([a, b]), dpft.Block([b])], [a, b], 0.2, 1.1)


class Selecting(Method):
    """Spends two rounds on a noisy count before the head trains."""

    def __init__(self):
        self.seen = []

    def __repr__(self):
        return "Selecting()"

    def requests(self, context):
        return [Request(0.5, 2, 0.1, "count")]

    def start(self, context):
        for _ in range(2):
            rows = sum((len(batch[1]) for batch in context.draw(0.5)), 0)
            self.seen.append(context.release(torch.tensor([float(rows)]), 1.0).item())
        context.train_only(context.head)


def test_a_method_may_spend_what_it_asked_for_and_no_more():
    method = Selecting()
    e = run_all(engine(method=method))
    assert [m.name for m in e.guarantee.mechanisms] == ["train", "count"]
    assert [m.steps for m in e.guarantee.mechanisms] == [4, 2]
    assert e.guarantee.epsilon() <= 2.0
    assert all(abs(value - 30) < 30 for value in method.seen) and method.seen[0] != method.seen[1]
    with pytest.raises(ValueError, match="is left"):
        e.context.draw(0.5)
    with pytest.raises(ValueError, match="draw of its own"):
        e.context.release(torch.zeros(1), 1.0)


def test_a_run_that_is_refused_at_its_start_has_spent_nothing():
    ledger = Ledger()
    with pytest.raises(ValueError, match="nothing to train"):
        engine(method=Unlabelled(), ledger=ledger)
    assert ledger.charged() == []
    e = engine(ledger=ledger)
    assert ledger.charged() == [] and e.guarantee.epsilon() == 0.0
    next(iter(next(iter(e))), None)                          # the first draw
    assert ledger.charged() == e.plan.mechanisms


class Later(Method):
    """Everything, then only the head from step 2 on, then everything again."""

    def start(self, context):
        context.train_only(context.model.parameters())

    def step(self, context, t):
        context.train_only(context.head if t == 2 else context.model.parameters())


def test_what_trains_may_change_at_any_step_both_ways():
    e = engine(method=Later())
    optimizer = torch.optim.SGD(e.parameters(), 0.1)
    moved = []
    for step in e:
        before = e.model[1].weight.detach().clone()
        step.take(optimizer)
        moved.append(not torch.equal(before, e.model[1].weight))
    assert moved == [True, True, False, True]


# fine_tune -----------------------------------------------------------------------------------------------------------------------


def tune(model=None, data=None, **settings):
    settings = {"epsilon": 3.0, "steps": 6, "batch_size": 20, "progress": False, "seed": 0, "clip": 0.5, "accountant": "rdp", **settings}
    return dpft.fine_tune(model or net(), data or toy(), settings.pop("method", dpft.Full()), **settings)


@pytest.mark.parametrize("losses", [lambda m, b: torch.nn.functional.cross_entropy(m(b[0]).detach(), b[1], reduction="none"),
                                    lambda m, b: (m(b[0]).argmax(1) != b[1]).float()], ids=["detached", "counted"])
def test_losses_without_a_gradient_are_refused_before_anything_is_charged(losses, tmp_path):
    "All steps were charged, and the model walked after the noise."
    with pytest.raises(ValueError, match="no parameter that trains changes the loss"):
        tune(loss_fn=losses, ledger=tmp_path / "book")
    with dpft.Ledger(tmp_path / "book") as ledger:
        assert not any(ledger.spent(name) for name in ledger.runs())


def test_fine_tune_learns_and_reports():
    run = tune(data=toy(400), epsilon=8.0, steps=60, batch_size=100, learning_rate=0.05, evaluate=toy(200, seed=1), show_loss=True)
    assert run.scores["accuracy"] > 0.65       # forty starts, data sets and seeds: 0.90 with a spread of 0.03; chance is 0.33
    assert run.epsilon <= 8.0 and run.delta == 1 / 800
    report = run.report()
    for part in ("add/remove", "Poisson", "the number of examples, 400", "the training loss", "scores on examples", "seed"):
        assert part in report
    assert len(run.history) == 61 and {"step", "loss", "learning_rate"} <= set(run.history[0])


@pytest.mark.parametrize("progress", [False, True])
def test_no_loss_is_kept_or_shown_unless_it_is_asked_for(progress, capsys):
    run = tune(progress=progress)
    assert all(not {"loss", "not_finite", "clipped"} & entry.keys() for entry in run.history) and "training loss" not in run.report()
    said = capsys.readouterr()
    assert "loss" not in said.err and (progress or said.out == said.err == "")
    assert "loss" in tune(show_loss=True).history[0]


@pytest.mark.parametrize("settings", [dict(schedule="cosine", warmup=0.3), dict(optimizer="sgd", learning_rate=0.5), dict(average=0.9),
                                      dict(optimizer=torch.optim.RMSprop), dict(clipping="automatic"), dict(accountant="prv"),
                                      dict(precision="bf16"), dict(epochs=1.0, steps=None), dict(noise_multiplier=1.0, epsilon=None)])
def test_options_are_honoured(settings):
    start = net()
    run = tune(copy.deepcopy(start), **settings)
    assert torch.isfinite(weights(run.model)).all() and not torch.equal(weights(run.model), weights(start))
    assert run.guarantee.mechanisms[0].steps == (3 if settings.get("epochs") else 6)


# checkpoints -----------------------------------------------------------------------------------------------------------------------


ADAMW = torch.optim.AdamW


def interrupted(folder, at, model=None, **settings):
    """A run that is stopped by its optimizer at one step."""
    kind = stopping(at)
    kind.__module__, kind.__qualname__ = ADAMW.__module__, ADAMW.__qualname__      # by which a checkpoint knows it
    with pytest.raises(Stopped):
        tune(model, checkpoint=folder, checkpoint_every=2, **{"optimizer": kind, "learning_rate": 0.05, **settings})


def ledger_of(folder):
    return Ledger(folder.with_name(f"{folder.name}.ledger"))


@pytest.mark.parametrize("at, average", [(1, None), (4, 0.9)])
def test_a_seeded_run_repeats_the_steps_that_were_lost(tmp_path, at, average):
    settings, folder = dict(average=average, schedule="linear", learning_rate=0.05), tmp_path / "run"
    interrupted(folder, at, **settings)
    resumed = tune(checkpoint=folder, checkpoint_every=2, optimizer=ADAMW, **settings)
    assert torch.equal(weights(resumed.model), weights(tune(**settings).model)) and len(resumed.history) == 6
    assert not [*folder.iterdir()] and resumed.guarantee.reproducible
    with ledger_of(folder) as ledger:
        (run,) = ledger.hypothetical()
        assert ledger.claims(run, "train") == 6 and ledger.repeated(run) == 2 - at % 2


def test_a_loop_of_ones_own_names_after_a_break_what_it_has_read(tmp_path):
    first = engine(checkpoint=tmp_path / "run")
    step = next(iter(first))
    step.take()
    assert step.loss >= 0
    first.context.assume_public("the weather")
    first.not_checked = ["the weather"]
    first.save()
    second = engine(checkpoint=tmp_path / "run")
    second.resume()
    next(iter(second))
    assert second.guarantee.uncharged == first.guarantee.uncharged == [CHECK, "the training loss"]
    assert second.guarantee.assumed_public == first.guarantee.assumed_public and "the weather" in second.guarantee.assumed_public
    assert second.guarantee.not_checked == ["the weather"]


def test_a_checkpoint_of_something_else_is_refused_and_others_may_have_its_folder(tmp_path):
    interrupted(tmp_path / "run", 4)
    for word, other in dict(data=toy(59), epsilon=2.0, method=dpft.BiTFiT(), learning_rate=0.1, optimizer="sgd", precision="bf16",
                            average=0.9, loss_fn=zoo.image_loss, seed=None).items():
        with pytest.raises(CheckpointError, match=f"another {word}"):
            tune(checkpoint=tmp_path / "run", **{"learning_rate": 0.05, "optimizer": ADAMW} | {word: other})
        number = os.open(tmp_path / "run", os.O_RDONLY)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(number)


@pytest.mark.parametrize("ledger, seed", [(False, None), (True, 0)])
def test_a_run_that_the_check_refuses_has_claimed_nothing_and_leaves_its_folder_to_a_corrected_one(tmp_path, ledger, seed):
    own = {"checkpoint": tmp_path / "run", "ledger": tmp_path / "shared" if ledger else None, "seed": seed}
    model = net()
    with pytest.raises(ValueError, match="changes with the contents of the examples beside it"):
        tune(model, loss_fn=lambda m, b: zoo.image_loss(m, b) / zoo.image_loss(m, b).sum(), **own)
    assert not [*(tmp_path / "run").iterdir()] and not earlier_runs(model)
    with Ledger(own["ledger"] or tmp_path / "run.ledger") as found:
        assert found.runs() == []
    assert tune(model, **own).epsilon <= 3.0 and earlier_runs(model)


def test_a_state_that_is_no_plain_data_is_refused(tmp_path):
    "A checkpoint that someone put a program into does not run it."
    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    interrupted(tmp_path / "run", 4)
    torch.save({"step": 0, "method": Program()}, tmp_path / "run" / "state.pt")
    with pytest.raises(CheckpointError, match=r"is damaged or not dpft.s .UnpicklingError."):
        tune(checkpoint=tmp_path / "run", optimizer=ADAMW, learning_rate=0.05)
    assert not (tmp_path / "ran").exists()


def test_no_file_of_the_package_loads_more_than_tensors():
    "What unpickles or evaluates otherwise, ruff refuses."
    for file in Path(dpft.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "allow_pickle" not in text and not re.search(r"from torch import [^\n]*\bload\b", text), file
        assert all("weights_only=True" in text[found.end():found.end() + 150] for found in re.finditer(r"torch\.load\b", text)), file


# claims ----------------------------------------------------------------------------------------------------------------------------


class Noting(torch.optim.SGD):
    "Writes down the steps that are made, and ends the process in one of them."

    def __init__(self, parameters, path, kill=None):
        super().__init__(parameters, 0.1)
        self.path, self.kill = path, kill

    def step(self, closure=None):
        with open(self.path, "a") as file:
            file.write("made\n")
        if self.kill == len(self.path.read_text().split()):
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(closure)


@pytest.mark.parametrize("kill", [1, 3])
def test_a_killed_run_goes_on_at_the_ledgers_next_number(tmp_path, kill):
    "Killed in a step that was claimed and never saved."
    folder = tmp_path / "run"
    if (child := os.fork()) == 0:
        try:
            e = engine(checkpoint=folder, seed=None)
            optimizer = Noting(e.parameters(), tmp_path / "made", kill)
            for step in e:
                step.take(optimizer)
                e.save(optimizer)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    e = engine(checkpoint=folder, seed=None)
    assert e.account.steps == kill and e.plan.steps == 4
    optimizer = Noting(e.parameters(), tmp_path / "made")
    e.resume(optimizer)
    numbers = [(step.take(optimizer), step.t)[1] for step in e]
    assert numbers == [*range(kill, 4)] and len((tmp_path / "made").read_text().split()) == 4
    assert e.spent == e.plan.mechanisms and e.ledger.finished(e.account.run)
    with pytest.raises(PlanSpent):
        e.ledger.claim(e.account.run, "train")
    assert CHECK in e.guarantee.uncharged


def test_engines_that_resume_copies_of_one_folder_share_its_plan(tmp_path):
    ledger, folder = Ledger(tmp_path / "ledger"), tmp_path / "run"
    first = engine(checkpoint=folder, ledger=ledger, seed=None, steps=5)
    next(iter(first)).take()
    first.save()
    shutil.copytree(folder, tmp_path / "copy")
    both = [engine(checkpoint=path, ledger=ledger, seed=None, steps=5) for path in (folder, tmp_path / "copy")]
    made, loops = [0], [iter(e) for e in both]
    for steps in itertools.cycle(loops):
        if (step := next(steps, None)) is None:
            break
        step.take()
        made.append(step.t)
    assert made == [*range(5)] and ledger.claims(both[0].account.run, "train") == 5
    assert both[0].account.run == both[1].account.run == first.account.run


def test_an_engine_is_not_copied():
    e = engine(seed=None)
    with pytest.raises(TypeError, match="a keystream is not copied"):
        copy.deepcopy(e)


def test_a_seed_that_the_script_sets_reaches_no_dropout():
    def masked():
        e = engine(net(dropout=0.5), seed=None, batch_size=60, noise_multiplier=1.0, epsilon=None)      # every row is drawn
        step = next(iter(e))
        for batch in step:
            torch.manual_seed(42)
            before = torch.get_rng_state()
            step.add(batch)
            assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([value.flatten() for value in step.sums.values()])

    assert not torch.allclose(masked(), masked(), atol=1e-3)


class Augmented(torch.utils.data.Dataset):
    "Rows whose numbers are drawn when they are read, by each library's generator."

    def __init__(self):
        self.seen = []

    def __len__(self):
        return 8

    def __getitem__(self, row):
        self.seen.append((torch.rand(1).item(), np.random.random(), random.random()))  # noqa: NPY002
        return torch.full((1, 8, 8), self.seen[-1][row % 3]), row % 10


def test_a_seed_that_the_script_sets_reaches_no_row_that_is_read():
    def read():
        rows = Augmented()
        e = dpft.Engine(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), None, dpft.Full(), rows, noise_multiplier=1.0,
                        batch_size=8, steps=1, delta=0.01, check=False)
        step = next(iter(e))
        torch.manual_seed(42), np.random.seed(42), random.seed(42)  # noqa: NPY002
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        for batch in step:
            step.add(batch)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
        assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
        return rows.seen[-8:]

    first, second = read(), read()
    assert all(one != other for a, b in zip(first, second, strict=True) for one, other in zip(a, b, strict=True))


def test_a_release_that_was_stored_is_used_again_without_a_draw(tmp_path):
    first = engine(method=Selecting(), checkpoint=tmp_path / "run", seed=None)
    first.account.close()                       # killed before it saved a state
    drawn = []

    class Again(Selecting):
        def __repr__(self):
            return "Selecting()"

        def start(self, context):
            own, context.draw = context.draw, lambda rate: (drawn.append(batch) or batch for batch in own(rate))
            super().start(context)

    second = engine(method=Again(), checkpoint=tmp_path / "run", seed=None)
    assert second.method.seen == first.method.seen and drawn == [] and second.ledger.claims(second.account.run, "count") == 2
    assert run_all(second).spent == second.plan.mechanisms


def test_a_run_that_stops_early_states_its_plan_or_what_it_claimed():
    for independent, stated in (("", 4), ("at six o'clock", 1)):
        e = engine(seed=None)
        next(iter(e)).take()
        e.finish(independent)
        assert [m.steps for m in e.guarantee.stated] == [m.steps for m in e.ledger.stated(e.account.run)] == [stated]
        assert e.guarantee.epsilon() == pytest.approx(e.plan.epsilon(stated))
        with pytest.raises(PlanSpent):
            e.ledger.claim(e.account.run, "train")


def test_a_checkpoint_whose_run_is_complete_says_that_another_begins(tmp_path):
    def once(epsilon=2.0):
        return dpft.fine_tune(net(), toy(), dpft.Full(), epsilon=epsilon, steps=1, batch_size=8, accountant="rdp", loss_fn=zoo.image_loss,
                              checkpoint=tmp_path / "state", progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*this begins another")
        once()
    with pytest.warns(UserWarning, match="state has no unfinished run, so this begins another; its epsilon adds"):
        once(epsilon=3.0)


# bad input -------------------------------------------------------------------------------------------------------------------------


class Unlabelled(Method):
    def start(self, context):
        context.train_only([])


BAD = [
    (dict(epsilon=0.0), "epsilon=0"), (dict(epsilon=-1.0), "epsilon=-1"), (dict(delta=0.0), "delta=0"), (dict(delta=1.5), "delta=1.5"),
    (dict(delta=0.5), "below 1/60"), (dict(epsilon=1e-4, delta=1e-6, accountant="rdp"), "floor"), (dict(batch_size=61), "batch_size=61"),
    (dict(batch_size=0), "batch_size=0"), (dict(steps=0, epochs=0), "steps=0"), (dict(clip=0.0), "clip=0"),
    (dict(batch_size=10.5), "batch_size=10.5"), (dict(physical_batch_size=2.5), "physical_batch_size=2.5"),
    (dict(steps=4.5), "steps=4.5"), (dict(steps=None, epochs=math.inf), "epochs=inf"), (dict(steps=None, epochs=math.nan), "epochs=nan"),
    (dict(clip=math.inf), "clip=inf"),
    (dict(clipping="round"), "clipping='round'"), (dict(accountant="gdp"), "gdp"), (dict(optimizer="adagrad"), "optimizer='adagrad'"),
    (dict(schedule="steps"), "steps is not a valid SchedulerType"),
    (dict(unit="user"), "no column 'user'"), (dict(precision="fp16"), "precision='fp16'"),
    (dict(noise_multiplier=1.0), "only one of them"), (dict(epsilon=None), "either epsilon or"), (dict(average=1.5), "average=1.5"),
    (dict(method=Unlabelled()), "nothing to train"),
    (dict(model=nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))), "BatchNorm"),
    (dict(model="mpl"), "mlp"), (dict(loss_fn=lambda m, b: zoo.image_loss(m, b).mean()), "one loss for each example"),
    (dict(cache_folder="."), "cache_folder= does nothing without cache="),
]


@pytest.mark.parametrize("settings, words", BAD)
def test_bad_input_is_one_sentence_that_names_it(settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        tune(**settings)
    assert "\n" not in str(caught.value)


# ---- features of frozen layers


class OnlyTheHead(Method):
    "Everything, and from step 2 on the last layer alone."

    def start(self, context):
        context.train_only(context.model.parameters())

    def step(self, context, t):
        if t == 2:
            context.train_only(context.model[-1].parameters())


def test_peak_memory_is_set_by_the_physical_batch_and_not_by_the_draw():
    from dpft.book.contenders import LiveBytes

    peaks = []
    for expected in (30, 240):
        e = engine(nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)), data=toy(256), batch_size=expected,
                   physical_batch_size=8, steps=2)
        steps = iter(e)
        for step in steps:
            with LiveBytes() as live:
                for batch in step:
                    step.add(batch)
            drawn = step.examples
            step.privatize()
            step.done()
        peaks.append(live.peak)
    assert drawn > 200 and peaks[1] <= peaks[0] + 16 * 256   # a draw's row numbers


def test_a_draw_that_must_drown_in_its_noise_is_warned_of():
    with pytest.warns(UserWarning, match="batch_size=1 is small for 163 entries"):
        engine(batch_size=1, steps=1, noise_multiplier=1.0, epsilon=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(batch_size=20, steps=4)


# ---- several views of one picture


def mean_gradients(model, batches, copies):
    "For each picture the mean over its views, by the slow oracle; (n, entries)."
    rows = [per_example_gradients(model, zoo.image_loss, batch) for batch in batches]
    flat = torch.cat([torch.cat([value.flatten(1) for value in part.values()], dim=1) for part in rows]).double()
    return flat.unflatten(0, (-1, copies)).mean(1)


@pytest.mark.parametrize("physical, clipping", [(1, "flat"), (5, "automatic"), (7, "flat"), (64, "automatic")])
def test_the_mean_over_views_is_bounded_whatever_the_batches(physical, clipping):
    model, augment = net(), dpft.Augmentation(copies=3, crop=1)
    e = engine(copy.deepcopy(model), augment=augment, physical_batch_size=physical, clipping=clipping)
    found, batches, step = sums_of(e)
    assert all(len(batch[1]) % 3 == 0 and len(batch[1]) <= max(3, physical) for batch in batches)      # a group never straddles
    means = mean_gradients(model, batches, 3)
    factors = (0.5 / means.norm(dim=1)).clamp(max=1) if clipping == "flat" else 0.5 / (means.norm(dim=1) + 0.01)
    assert torch.allclose(found, (factors[:, None] * means).sum(0), rtol=1e-4, atol=1e-6)
    assert step.examples == len(means)
    assert step.loss == pytest.approx(torch.cat([zoo.image_loss(model, batch) for batch in batches]).mean().item(), rel=1e-4)
    other = torch.cat([images for images, _ in sums_of(engine(augment=augment))[1]])                 # cut otherwise, the same views
    assert torch.equal(torch.cat([images for images, _ in batches]), other)


def test_a_person_brings_the_mean_views_of_all_her_rows():
    data, unit, model = toy(12), [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4], net()
    e = engine(copy.deepcopy(model), data=data, unit=unit, batch_size=5, clip=0.3, augment=dpft.Augmentation(copies=2, crop=0),
               physical_batch_size=6, delta=0.01)
    found, batches, _ = sums_of(e)
    assert sum(len(batch[1]) for batch in batches) == 24
    means = mean_gradients(model, batches, 2)                                                 # whole people, in the order of their rows
    people = torch.zeros(5, means.shape[1], dtype=torch.float64).index_add_(0, torch.tensor(unit), means)
    exact = ((0.3 / people.norm(dim=1)).clamp(max=1)[:, None] * people).sum(0)
    assert float((found - exact).norm() / exact.norm()) < 1e-4     # the margin for rounding keeps it below the bound by some 1e-5


# ---- the average when what trains changes


class Thaws(Method):
    "The last layer, and from step 2 on everything."

    unfreezes = True

    def start(self, context):
        context.train_only(context.model[-1].parameters())

    def step(self, context, t):
        if t == 2:
            context.train_only(context.model.parameters())


@pytest.mark.parametrize("method, decay", [(dpft.Full, 0.99), (OnlyTheHead, 0.3), (Thaws, 0.3)])
def test_the_average_is_that_of_whole_models_whatever_trains_when(tmp_path, method, decay):
    start, models = net(), []
    model = copy.deepcopy(start)

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            models.append(weights(model))

    settings = dict(method=method(), learning_rate=0.3, epsilon=20.0)
    found, wanted = weights(tune(model, average=decay, optimizer=Recording, **settings).model), weights(start)
    for t, values in enumerate(models):
        kept = min(decay, (1 + t) / (10 + t))
        wanted = kept * wanted + (1 - kept) * values
    assert torch.allclose(found, wanted, atol=1e-6) and not torch.allclose(found, models[-1], atol=1e-4)
    at, folder = 4, tmp_path / "folder"
    whole = tune(copy.deepcopy(start), average=decay, **settings)
    interrupted(folder, at, copy.deepcopy(start), average=decay, **settings)
    resumed = tune(copy.deepcopy(start), average=decay, checkpoint=folder, checkpoint_every=2, optimizer=ADAMW, **settings)
    assert torch.equal(weights(resumed.model), weights(whole.model))


# ---- end of several views of one picture


def test_an_optimizer_keeps_its_moments_while_the_phase_lasts():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    tune(model, optimizer=optimizer, steps=4, **NOISE)
    assert [int(state["step"]) for state in optimizer.state.values()] == [4] * 4


def test_what_is_new_must_be_held_by_the_optimizer():
    e = engine(method=Thaws(), **NOISE)
    with pytest.raises(ValueError, match="the optimizer does not hold the parameters"):
        run_all(e, torch.optim.SGD(e.parameters(), 0.1))


def test_each_entry_has_the_noise_of_the_block_that_holds_it():
    "One parameter, two blocks: the second block's noise comes beside the first's."
    one, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    mask = tensor([[True, False], [False, True]])
    spread = noise_spread([Block([one], [mask], noise=2.0), Block([one, other], [~mask, torch.ones(3, dtype=bool)], noise=5.0)])
    assert torch.equal(spread[id(one)], tensor([[2.0, 5.0], [5.0, 2.0]])) and torch.equal(spread[id(other)], torch.full((3,), 5.0))


def test_a_run_with_a_checkpoint_leaves_soon_after_it_was_told_to(tmp_path, capsys):
    told = []

    class Told(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if not told:
                told.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(SystemExit) as left:
        tune(optimizer=Told, checkpoint=tmp_path / "run", **NOISE)
    assert left.value.code == 128 + signal.SIGTERM and (tmp_path / "run" / "state.pt").exists()
    assert f"the state after step 2 of 6 is in {tmp_path / 'run'}" in capsys.readouterr().err
    assert [mechanism.steps for mechanism in ledger_of(tmp_path / "run").spent()] == [2]  # its wish travels with the next sum


def test_what_is_checked_on_the_first_batch_is_claimed_from_then_on():
    running, loose = engine(**NOISE), engine(epsilon=math.inf)
    assert running.guarantee.checked == []
    for one in (running, loose):
        next(iter(one)).take()
    assert running.guarantee.checked == list(CHECKED) and loose.guarantee.checked == []
    assert running.guarantee.run == running.account.run in running.ledger.runs() and loose.guarantee.run == ""


def test_a_run_without_noise_is_noted_in_a_ledger_that_it_was_given(tmp_path):
    given, own = engine(epsilon=math.inf, ledger=tmp_path / "shared"), engine(epsilon=math.inf)
    for one in (given, own):
        next(iter(one)).take()
    assert list(given.ledger.unpaid()) == [given.account.run] and own.ledger.unpaid() == {}


# what moves the weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, warmup, rates", [
    ("constant", 0, [1, 1, 1, 1]), ("linear", 0, [1, 0.75, 0.5, 0.25]), ("constant", 2, [1 / 3, 2 / 3, 1, 1]),
    ("cosine", 0, [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]), ("linear", 0.5, [1 / 3, 2 / 3, 1, 0.5]),
    (lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), 0, [1, 0.5, 0.25, 0.125])])
def test_the_rate_falls_as_its_schedule_says_and_no_step_has_none(schedule, warmup, rates):
    optimizer, found = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), []
    schedule_of = make_schedule(optimizer, schedule, 4, warmup)
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule_of.step()
    assert found == pytest.approx(rates)


def test_an_optimizer_instance_holds_what_trains_and_nothing_outside_the_model():
    model, other = net(), nn.Parameter(torch.zeros(1))
    every = [*model.parameters()]
    assert make_optimizer(torch.optim.SGD(every, 0.1), every, 0.1, model=model).defaults["lr"] == 0.1
    with pytest.raises(ValueError, match="lacks 2 of the 4"):
        make_optimizer(torch.optim.SGD(model[1].parameters(), 0.1), every, 0.1)
    with pytest.raises(ValueError, match="holds 1 parameters outside the model, whose gradients are not clipped"):
        make_optimizer(torch.optim.SGD([*every, other], 0.1), every, 0.1, model=model)


def test_a_schedule_goes_past_lost_steps_without_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = engine(checkpoint=tmp_path / "run", seed=None)
        next(iter(first)).take()                                 # claimed, and never saved
        e = engine(checkpoint=tmp_path / "run", seed=None)
        optimizer = torch.optim.SGD(e.parameters(), 1.0)
        e.resume(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert optimizer.param_groups[0]["lr"] == 0.5
