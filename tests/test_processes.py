"""Several processes: real ones, over loopback, against one; agreement, order, faults, and a run that is killed and continued."""

import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import traceback
from unittest.mock import patch

import fresh
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dpft
from dpft.data import TensorData
from dpft.ledger import Ledger, LedgerError
from dpft.method import Method
from dpft.privacy import Request
from dpft.processes import (
    HOW_TO_GO_ON,
    ProcessError,
    Processes,
    at_first_signal,
    check_whole,
    form,
    launched,
    own_device,
    reached,
    speaks,
    told_to_stop,
)
from dpft.step import Step


def toy(size=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return TensorData(torch.randn(size, 1, 4, 4, generator=generator) + labels[:, None, None, None], labels)


def net(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images.to(model[1].weight.dtype)), labels, reduction="none")


def engine(model=None, method=None, data=None, **settings):
    settings = {"batch_size": 20, "steps": 4, "clip": 0.5, "seed": 0, "accountant": "rdp", **settings}
    if "epsilon" not in settings:
        settings["noise_multiplier"] = 1.1                                       # nothing to solve for
    return dpft.Engine(model or net(), loss, method or dpft.Full(), data or toy(), **settings)


def added(step):
    for batch in step:
        step.add(batch)
    return step


def run_all(e, rate=0.1):
    optimizer = torch.optim.SGD(e.model.parameters(), rate)
    for step in e:
        added(step).privatize()
        optimizer.step()
        step.done()
    return e


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def gradient(e):
    return torch.cat([p.grad.flatten() for p in e.parameters()]).numpy()


def tune(model=None, data=None, **settings):
    settings = {"noise_multiplier": 1.1, "steps": 6, "batch_size": 20, "progress": False, "seed": 0, "clip": 0.5, "accountant": "rdp",
                "learning_rate": 0.05, **settings}
    return dpft.fine_tune(model or net(), data or toy(), settings.pop("method", dpft.Full()), loss_fn=loss, **settings)


# real processes --------------------------------------------------------------------------------------------------------------------


def worker(rank, size, meeting, pipe):
    "Join the others, then do one task after another until the pipe is closed."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((task(**arguments), None))
        except Exception as error:
            pipe.send((type(error).__name__ + ": " + str(error), traceback.format_exc()))


class Ranks:
    "As many processes as one likes, each of which does the same task; what they return, in order."

    def __init__(self, size, meeting):
        context = fresh.CONTEXT
        pipes = [context.Pipe() for _ in range(size)]
        self.processes = [context.Process(target=worker, args=(rank, size, meeting, pipes[rank][1]), daemon=True) for rank in range(size)]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self.pipes = [ours for ours, _ in pipes]

    def ask(self, task, **arguments):
        for pipe in self.pipes:
            pipe.send((task, arguments))
        return [pipe.recv() if pipe.poll(60) else ("no answer in a minute", "hangs") for pipe in self.pipes]

    def __call__(self, task, **arguments):
        answers = self.ask(task, **arguments)
        assert all(trace is None for _, trace in answers), answers
        return [answer for answer, _ in answers]

    def errors(self, task, **arguments):
        answers = self.ask(task, **arguments)
        assert all(trace is not None for _, trace in answers), answers
        return [answer for answer, _ in answers]

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two") / "meeting")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    ranks = Ranks(3, tmp_path_factory.mktemp("three") / "meeting")
    yield ranks
    ranks.close()


# the same sum ----------------------------------------------------------------------------------------------------------------------


def without_noise(total, std, keystream, *context):
    return total


def noiseless(double=False, still=False, **settings):
    "The first step's mean with the noise off, how many examples it had here and in all, the mean loss, and the spread of gradients."
    e = engine(net().double() if double else net(), **settings if still else {"epsilon": math.inf, **settings})
    step = added(next(iter(e)))
    here = step.examples
    with patch("dpft.step.add_noise", without_noise):           # which a run without privacy does not call
        step.privatize()
    return gradient(e), here, step.examples, step.loss


@pytest.mark.parametrize("settings", [dict(), dict(still=True), dict(still=True, physical_batch_size=3),
                                      dict(still=True, double=True, batch_size=60)])
@pytest.mark.parametrize("ranks", ["two", "three"])
def test_a_draw_shared_out_gives_the_sum_of_one_process(request, ranks, settings):
    whole, drawn, _, mean = noiseless(**settings)
    parts = request.getfixturevalue(ranks)(noiseless, **settings)
    tolerance = 1e-14 if settings.get("double") else 1e-6
    for total, _, examples, loss_mean in parts:
        assert np.abs(total - whole).max() <= tolerance and examples == drawn and loss_mean == pytest.approx(mean, rel=1e-5)
        assert np.array_equal(total, parts[0][0])
    here = [count for _, count, _, _ in parts]
    assert sum(here) == drawn and max(here) - min(here) <= 1


def rows_of(sizes, seed=0, lengths=False):
    "Numbers of the units that this process gets, in each of several steps."
    data = toy(sizes["size"])
    data.images[:, 0, 0, 0] = torch.arange(sizes["size"])
    if lengths:
        data.lengths = [(7 * i) % 11 for i in range(sizes["size"])]
    e = engine(data=data, batch_size=sizes["batch"], steps=sizes["steps"], epsilon=math.inf, seed=seed, physical_batch_size=4)
    return [[int(i) for batch in e.batches("train", t) for i in batch[0][:, 0, 0, 0]] for t in range(sizes["steps"])]


@pytest.mark.parametrize("lengths", [False, True])
def test_every_drawn_unit_is_in_exactly_one_slice(two, three, lengths):
    sizes = dict(size=60, batch=20, steps=8)
    whole = rows_of(sizes, lengths=lengths)
    for ranks, count in ((two, 2), (three, 3)):
        parts = ranks(rows_of, sizes=sizes, lengths=lengths)
        for t, drawn in enumerate(whole):
            assert [part[t] for part in parts] == [drawn[rank::count] for rank in range(count)]


def people():
    "The first step's mean when a person has three rows, noise off, and which people's rows are here."
    data = toy()
    data.images[:, 0, 0, 0] = torch.arange(60) / 60
    e = engine(data=data, unit=[i // 3 for i in range(60)], batch_size=10, physical_batch_size=7, clip=0.05)
    step, here = next(iter(e)), []
    for batch in step:
        here += [round(60 * float(value)) // 3 for value in batch[0][:, 0, 0, 0]]
        step.add(batch)
    with patch("dpft.step.add_noise", without_noise):
        step.privatize()
    return gradient(e), here


def test_a_persons_rows_are_all_in_one_slice(two, three):
    whole, drawn = people()
    for ranks in (two, three):
        answers = ranks(people)
        assert all(np.abs(total - whole).max() <= 1e-7 for total, _ in answers)
        assert all(here.count(person) == 3 for _, here in answers for person in here)
        assert sorted(person for _, here in answers for person in here) == sorted(drawn)


def few(steps=25):
    "Each step's number of examples here and in all, and whether all of the gradient is noise."
    e = engine(batch_size=1, steps=steps)
    seen = []
    for step in e:
        added(step)
        here = step.examples
        step.privatize()
        seen.append((here, step.examples, float(np.abs(gradient(e)).min()), float(gradient(e).sum())))
        step.done()
    return seen, sum(m.steps for m in e.guarantee.mechanisms)


def test_an_empty_draw_and_one_smaller_than_the_number_of_processes(three):
    answers = three(few)
    for t in range(25):
        here, total = [seen[t][0] for seen, _ in answers], answers[0][0][t][1]
        assert sum(here) == total and all(seen[t][1:] == answers[0][0][t][1:] for seen, _ in answers)
        assert answers[0][0][t][2] > 0                                            # noise everywhere, even when nobody was drawn
    totals = [seen[1] for seen in answers[0][0]]
    assert 0 in totals and 1 in totals and 2 in totals
    assert [charged for _, charged in answers] == [25] * 3


# the noise -------------------------------------------------------------------------------------------------------------------------


class Zero(nn.Module):
    "Many parameters whose gradient is zero: what is in .grad is noise."

    def __init__(self):
        super().__init__()
        self.big = nn.Linear(100, 200)

    def forward(self, x):
        return 0 * self.big(x.flatten(1)[:, :1].expand(-1, 100))[:, :3]


def only_noise(seed=0):
    data = toy()
    e = dpft.Engine(Zero(), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), dpft.Full(), data, epsilon=None,
                    noise_multiplier=1.3, clip=0.2, batch_size=20, steps=2, seed=seed, check=False)
    seen = []
    for step in e:
        added(step).privatize()
        seen.append(20 * e.model.big.weight.grad.flatten().double().numpy())
        step.done()
    return seen


def test_the_noise_is_one_standard_normal_times_sigma_and_clip_and_the_same_on_all(two, three):
    for ranks in (two, three):
        answers = ranks(only_noise)
        for t in range(2):
            noise = answers[0][t] / (1.3 * 0.2)
            assert all(np.array_equal(answer[t], answers[0][t]) for answer in answers)
            assert abs((noise**2).mean() - 1) < 5 * math.sqrt(2 / noise.size) and abs(noise.mean()) < 5 / math.sqrt(noise.size)
            assert abs((noise**4).mean() - 3) < 5 * math.sqrt(96 / noise.size)
        assert abs(np.corrcoef(*answers[0])[0, 1]) < 5 / math.sqrt(20_000)


def order_of_a_step(folder):
    "What happens to one step's sum on this process, in order, and what is added up."
    e, seen = engine(ledger=folder), []
    claim, noisy, total = Ledger.claim, dpft.step.add_noise, Processes.total
    draw = e.draws.draw
    e.draws.draw = lambda *a, **b: seen.append("draw") or draw(*a, **b)
    def claimed(self, *a):
        number = claim(self, *a)
        seen.append("claim")
        return number
    def watched(self, sums, counts=()):
        seen.append("reduce")
        result, numbers = total(self, sums, counts)
        seen.append(float(sum((value - sums[name]).abs().sum() for name, value in result.items()) > 0))
        return result, numbers
    Processes.total, Ledger.claim, e.checked = watched, claimed, True
    try:
        with patch("dpft.step.add_noise", lambda *a: (seen.append("noise"), noisy(*a))[1]):
            added(next(iter(e))).privatize()
    finally:
        Processes.total, Ledger.claim = total, claim
    return seen


def test_the_first_claims_before_anybody_draws_and_adds_the_noise_before_the_reduction(two, tmp_path):
    first, second = two(order_of_a_step, folder=tmp_path / "book")
    assert first == ["claim", "draw", "noise", "reduce", 1.0] and second == ["draw", "reduce", 1.0]


# agreement -------------------------------------------------------------------------------------------------------------------------


class AtRandom(Method):
    "A random half of the entries trains beside a fresh random head, and another random layer joins at every step."

    def start(self, context):
        with torch.no_grad():
            context.model[4].weight.normal_()                                    # as a method that adds parameters does
            context.model[4].bias.copy_(torch.from_numpy(np.random.default_rng().normal(size=3)))   # from another generator
        self.mask = torch.rand(8, 16) < 0.5
        context.train_only([context.model[1].weight, *context.head])

    def step(self, context, t):
        joins = [context.model[1].bias] if bool(torch.rand(()) < 0.5) else []
        context.train_only([context.model[1].weight, *context.head, *joins])

    def blocks(self, context):
        rest = [p for p in context.model.parameters() if p.requires_grad and p is not context.model[1].weight]
        return [dpft.Block([context.model[1].weight], [self.mask], clip=0.5), dpft.Block(rest)]

    def __repr__(self):
        return "AtRandom()"


def several_steps(method=None, seed=0):
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)                                                # generators differ, and so does the model at first
    model = net(seed=rank, dropout=0.5)
    model.register_buffer("shift", torch.full((3,), float(rank)))
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    e = engine(model, method or AtRandom(), steps=6, seed=seed, physical_batch_size=4)
    state = torch.get_rng_state()
    run_all(e)
    same = torch.equal(state, torch.get_rng_state())
    return weights(e.model), e.model.shift.tolist(), e.model.flags.tolist(), same, [m.steps for m in e.spent], e.guarantee


@pytest.mark.parametrize("ranks, seed", [("two", None), ("three", 0)])
def test_parameters_are_the_same_bits_on_all_with_dropout_a_fresh_head_and_random_choices(request, ranks, seed):
    answers = request.getfixturevalue(ranks)(several_steps, seed=seed)
    for found, shift, flags, same, spent, guarantee in answers:
        assert np.array_equal(found, answers[0][0]) and shift == [0, 0, 0] and flags == [True, True]
        assert same and spent == [6] and guarantee == answers[0][5]


def dropped(step_number=0):
    "The mean loss here of one step's own slice, under dropout; the data are all one example."
    data = toy()
    data.images[:], data.labels[:] = data.images[0].clone(), 0
    e = engine(net(dropout=0.5), data=data, batch_size=60)
    return added(Step(e)).loss


def test_dropout_differs_between_the_processes(two):
    first, second = two(dropped)
    assert first != second


class Disagreeing(AtRandom):
    "Chooses by the process's number, which nothing can make alike."

    def __init__(self, what, when=0):
        self.what, self.when = what, when

    def start(self, context):
        super().start(context)
        if self.when == 0:
            self.choose(context)

    def step(self, context, t):
        if self.when and t == self.when:
            self.choose(context)

    def choose(self, context):
        rank = dist.get_rank()
        if self.what == "mask":
            self.mask = torch.arange(128).reshape(8, 16) % 2 == rank
        if self.what == "names" and rank:
            context.train_only([context.model[1].weight, context.model[1].bias, *context.head])
        if self.what == "clip":
            self.clip = 1.0 + rank

    def blocks(self, context):
        first, rest = super().blocks(context)
        return [first, dpft.Block(rest.parameters, clip=getattr(self, "clip", 1.0))]


def disagreeing(what, when, path):
    run_all(engine(method=Disagreeing(what, when), ledger=path))


@pytest.mark.parametrize("what", ["mask", "names", "clip"])
@pytest.mark.parametrize("when", [0, 2])
def test_processes_that_choose_differently_are_stopped_before_a_draw(two, tmp_path, what, when):
    errors = two.errors(disagreeing, what=what, when=when, path=tmp_path / "book")
    assert errors[0] == errors[1] and "process 1 has another choice of what trains than process 0" in errors[0]
    with Ledger(tmp_path / "book") as ledger:
        assert sum(m.steps for m in ledger.spent()) == when + (when > 0)         # the step was claimed, and nothing drawn


def other_input(what):
    rank = dist.get_rank()
    given = {"shard": dict(data=toy().subset(range(20 * rank, 40))),
             "model": dict(model=net() if rank else nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), "settings": dict(clip=0.5 + rank),
             "steps": dict(steps=4 + rank)}
    engine(**given[what])


@pytest.mark.parametrize("what, word", [("shard", "settings"), ("model", "model structure"),
                                        ("settings", "settings"), ("steps", "settings")])
def test_processes_with_other_data_models_or_settings_are_refused(two, what, word):
    errors = two.errors(other_input, what=what)
    assert errors[0] == errors[1] and f"process 1 has another {word} than process 0" in errors[0] and "\n" not in errors[0]


# requests --------------------------------------------------------------------------------------------------------------------------


class Counting(Method):
    "Spends two rounds on a noisy count of the draw, and lets it and a coin choose what trains."

    def requests(self, context):
        return [Request(0.5, 2, 0.1, "count")]

    def start(self, context):
        self._seen = []
        for _ in range(2):
            here = [len(batch[1]) for batch in context.draw(0.5)]
            for _ in here:
                torch.rand(1)                                                    # as often as there are batches, which differ
            noisy = context.release(torch.tensor([float(sum(here)), 0.0, 0.0]), 1.0)
            self._seen.append((sum(here), noisy.tolist(), torch.rand(1).item()))
        context.train_only(context.head)


def counting(epsilon=2.0, path=None):
    method = Counting()
    e = run_all(engine(data=toy(61), method=method, epsilon=epsilon, physical_batch_size=3, ledger=path))
    return method._seen, [(m.name, m.steps) for m in e.spent], e.guarantee, weights(e.model)


def test_a_request_gives_the_total_over_all(two, three):
    alone = counting(epsilon=math.inf)[0]
    for ranks in (two, three):
        answers = ranks(counting, epsilon=math.inf)
        for round_number in range(2):
            rounds = [answer[0][round_number] for answer in answers]
            assert sum(here for here, _, _ in rounds) == alone[round_number][0]
            assert all(total == alone[round_number][1] and coin == rounds[0][2] for _, total, coin in rounds)


def test_a_request_is_noisy_on_all_alike_and_charged_once(two, tmp_path):
    noisy = two(counting, path=tmp_path / "book")
    for seen, spent, guarantee, found in noisy:
        assert [answer[1:] for answer in seen] == [answer[1:] for answer in noisy[0][0]]
        assert spent == [("train", 4), ("count", 2)] and guarantee == noisy[0][2]
        assert np.array_equal(found, noisy[0][3])
        assert all(0 < abs(value) < 30 for _, (_, *zeros), _ in seen for value in zeros)          # noise on what was zero
    with Ledger(tmp_path / "book") as ledger:
        assert ledger.spent() == noisy[0][2].mechanisms


# the ledger ------------------------------------------------------------------------------------------------------------------------


def recorded(path):
    e = run_all(engine(ledger=path))
    try:
        return sum(m.steps for m in e.spent), e.ledger.finished(e.account.run), e.guarantee
    except ValueError as error:
        return sum(m.steps for m in e.spent), str(error), e.guarantee


def test_the_ledger_has_one_row_for_each_step_and_all_know_what_was_spent(two, tmp_path):
    (first, finished, one), (second, refused, other) = two(recorded, path=tmp_path / "book")
    assert first == second == 4 and one == other and finished is True and "only the first process" in refused
    with Ledger(tmp_path / "book") as ledger:
        rows = ledger._query("SELECT kind, step FROM ledger ORDER BY number")
    assert rows == [("begin", 0), *[("claim", t) for t in range(4)], ("finish", 0)]


def broken_reduction(path):
    e, total = engine(ledger=path), Processes.total
    def broken(self, sums, counts=()):
        raise OSError("the network is gone")
    Processes.total = broken
    try:
        run_all(e)
    finally:
        Processes.total = total


def test_the_row_is_there_when_the_reduction_fails(two, tmp_path):
    assert two.errors(broken_reduction, path=tmp_path / "book") == ["OSError: the network is gone"] * 2
    with Ledger(tmp_path / "book") as ledger:
        assert [m.steps for m in ledger.spent()] == [1] and not ledger.finished(ledger.runs()[0])


def locked(path):
    "The third step finds the ledger locked, on the process that has it."
    book = Ledger(path, timeout=0.1) if dist.get_rank() == 0 else path
    e = engine(ledger=book)
    for step in e:
        if step.t == 1 and dist.get_rank() == 0:
            other = Ledger(path)
            other._query("BEGIN IMMEDIATE")
        added(step).privatize()
        step.done()


def test_a_locked_ledger_on_the_first_stops_all_with_its_sentence(two, tmp_path):
    errors = two.errors(locked, path=tmp_path / "book")
    assert errors[0] == errors[1] and errors[0].startswith("LedgerError") and "locked" in errors[0] and "\n" not in errors[0]


def bad(**settings):
    engine(**settings)


@pytest.mark.parametrize("settings, word", [(dict(epsilon=0.0), "epsilon=0"), (dict(checkpoint="/dev/null/no"), "Not a directory"),
                                            (dict(ledger="/dev/null/no"), "ledger")])
def test_an_error_of_the_first_is_everybodys(two, settings, word):
    errors = two.errors(bad, **settings)
    assert errors[0] == errors[1] and word in errors[0]


def unexpected():
    Processes().first(lambda: 1 / 0)


def test_an_error_of_any_other_kind_stops_all_too(two):
    errors = two.errors(unexpected)
    assert errors[0] == errors[1] and errors[0].startswith("ProcessError") and "division by zero" in errors[0]


# fine_tune, checkpoints ------------------------------------------------------------------------------------------------------------


class Breaking(torch.optim.AdamW):
    stop_at = None

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count == self.stop_at:
            raise KeyError("stop")
        return super().step(closure)


def tuned(folder, stop_at=None, **settings):
    Breaking.stop_at = stop_at
    run = tune(checkpoint=folder, checkpoint_every=2, optimizer=Breaking, evaluate=toy(30, seed=1), progress=True, **settings)
    return weights(run.model), run.history, run.guarantee


@pytest.mark.parametrize("seed", [0, None])
def test_a_stopped_run_goes_on_alike_on_all_at_no_further_cost(two, tmp_path, seed, capfd):
    assert all("stop" in error for error in two.errors(tuned, folder=tmp_path / "a", stop_at=4, seed=seed))
    made = [1, 2, 3, 4, 5, 6] if seed == 0 else [1, 2, 5, 6]                    # the fourth was claimed, and the third not saved
    answers = two(tuned, folder=tmp_path / "a", seed=seed)
    for found, history, guarantee in answers:
        assert np.array_equal(found, answers[0][0]) and (history, guarantee) == answers[0][1:] and guarantee.mechanisms[0].steps == 6
        assert "scores" in history[-1] and [entry["step"] for entry in history[:-1]] == made
    if seed == 0:
        whole = two(tuned, folder=tmp_path / "b", seed=seed)
        assert np.array_equal(whole[0][0], answers[0][0]) and whole[0][1] == answers[0][1]
    assert not [*(tmp_path / "a").iterdir()]
    with Ledger(tmp_path / "a.ledger") as ledger:
        assert sum(m.steps for m in ledger.charged()) == 6


def mixing_loss(model, batch):
    own = loss(model, batch)
    return own - own.mean() * dist.get_rank()                                    # on the second process alone


def coupled(path):
    dpft.Engine(net(), mixing_loss, dpft.Full(), toy(), noise_multiplier=1.1, batch_size=20, steps=4, clip=0.5, accountant="rdp",
                ledger=path).check_start()


def test_a_check_that_fails_on_one_process_stops_all_before_a_claim(two, tmp_path):
    errors = two.errors(coupled, path=tmp_path / "book")
    assert errors[0] == errors[1] and "changes with the contents of the examples beside it" in errors[0]
    with Ledger(tmp_path / "book") as ledger:
        assert ledger.runs() == []


# killed ----------------------------------------------------------------------------------------------------------------------------

KILLING = """
    import os, signal, sys, torch
    class Killing(torch.optim.AdamW):
        def step(self, closure=None):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 4 and os.environ["RANK"] == os.environ.get("DIES"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(closure)
    import dpft.updates
    dpft.updates.OPTIMIZERS["adamw"] = Killing
    from dpft.cli import main
    main()
"""
COMMAND = dict(data="digits", model="mlp", method="full", noise_multiplier="1.1", steps="6", batch_size="60", accountant="rdp", seed="0",
               device="cpu", score="none", schedule="linear")


def words_of(folder):
    options = {**COMMAND, "checkpoint": str(folder / "checkpoint"), "output": str(folder / "output")}
    return ["train", "--no-progress", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


def torchrun(folder, dies):
    "The command under torchrun, where one process dies in its fourth step."
    (folder / "killing.py").write_text(textwrap.dedent(KILLING))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(folder / "killing.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DIES": str(dies)}
    return subprocess.run([*command, *words_of(folder)], env=environment, capture_output=True, text=True, timeout=120)


def both(folder):
    "The command again, as two processes with what torchrun tells each of them."
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": "again"}
    ranks = [fresh.Program(textwrap.dedent(KILLING), *words_of(folder), said=folder / f"rank{rank}",
                           environment={**told, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    for program in ranks:
        program.wait(120)
    return ranks


def uninterrupted():
    task = dpft.load_data("digits")
    model = dpft.load_model("mlp", classes=10, kind="image", image_shape=task.image_shape)
    run = dpft.fine_tune(model, task, dpft.Full(), noise_multiplier=1.1, steps=6, batch_size=60, accountant="rdp", seed=0,
                         learning_rate=5e-4, schedule="linear", epochs=3.0, warmup=0.0, progress=False)    # as the command says them
    return {name: value.numpy() for name, value in run.model.state_dict().items()}, run.guarantee


def test_a_killed_process_ends_all_with_one_sentence_and_the_same_command_continues(two, tmp_path):
    from safetensors.numpy import load_file

    killed = torchrun(tmp_path, dies=1)
    told = [line for line in killed.stderr.splitlines() if line.startswith("dpft:")]
    assert killed.returncode != 0 and len(told) == 1, killed.stderr
    assert "the same command" in told[0]
    with Ledger(tmp_path / "checkpoint.ledger") as ledger:
        assert 4 <= sum(m.steps for m in ledger.spent()) <= 5 and sum(m.steps for m in ledger.charged()) == 6
    resumed = both(tmp_path)
    assert [program.returncode for program in resumed] == [0, 0], [program.stderr for program in resumed]
    assert sum(program.stdout.count("differentially private") for program in resumed) == 1
    expected, guarantee = two(uninterrupted)[0]
    found = load_file(tmp_path / "output" / "model.safetensors")
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    assert dpft.Guarantee.load(tmp_path / "output" / "guarantee.json").mechanisms == guarantee.mechanisms
    with Ledger(tmp_path / "checkpoint.ledger") as ledger:
        assert len(ledger.runs()) == 1 and sum(m.steps for m in ledger.spent()) == 6


ASKED_TO_STOP = """
    import os, signal
    from dpft.cli import core
    honest = core.in_shell
    def signalled(*words):
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(*words)
    core.in_shell = signalled
    core.main()
"""


def test_a_signal_between_an_error_and_its_sentence_leaves_one_sentence(tmp_path):
    program = fresh.Program(textwrap.dedent(ASKED_TO_STOP), "train", "--data=digits", "--model=mlp", "--epsilon=4", "--limit=0",
                            "--no-progress", said=tmp_path / "said")
    program.wait(120)
    assert program.returncode == 128 + signal.SIGTERM and program.stderr.startswith("dpft: ") and program.stderr.count("\n") == 1


def lost():
    "One process leaves; what the other hears."
    if dist.get_rank() == 1:
        os._exit(1)
    Processes().gather("anybody?")


def test_the_survivor_of_a_lost_process_says_how_to_go_on(tmp_path):
    ranks = Ranks(2, tmp_path / "meeting")
    ranks.pipes[1].send((lost, {}))
    ranks.pipes[0].send((lost, {}))
    error, _trace = ranks.pipes[0].recv()
    ranks.close()
    assert error.startswith("ProcessError: another process of this run has ended") and "last checkpoint" in error and "\n" not in error


# alone -----------------------------------------------------------------------------------------------------------------------------


def audited():
    "What an audit of a run that all processes share finds, on this one."
    from dpft.auditing import audit

    found = audit(dpft.Full(), 8.0, canaries=200, cache=0.0, accountant="rdp", seed=0)
    return found.scores, found.lower_bound(error=0.001), found.claim


def test_canaries_of_a_shared_run_show_no_more_than_is_claimed(two):
    (first, bound, claim), (second, _, _) = two(audited)
    assert np.array_equal(first, second) and 2.0 < bound <= claim


def test_alone_everything_is_trivial(monkeypatch):
    alone = Processes()
    assert alone.alone and alone.is_first and alone.mark == () and alone.gather(3) == [3] and alone.first(lambda: 4) == 4
    sums = {"a": torch.ones(2)}
    assert alone.total(sums, [1, 2.5]) == (sums, [1, 2.5]) and alone.total(sums)[0]["a"] is sums["a"]
    with pytest.raises(ZeroDivisionError):
        alone.first(lambda: 1 / 0)
    assert not launched() and own_device("cpu") == "cpu" and speaks() and speaks()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert own_device(None) == "cuda"


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("cuda") == "cuda:1" and chosen == [1] and own_device("cpu") == "cpu"
    for rank, device in (("2", "cuda"), ("0", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ValueError, match="GPU of its own"):
            own_device(device)


def mixed():
    rank, processes = dist.get_rank(), Processes()
    sums, counts = processes.total({"a": torch.full((2, 3), 1.0 + rank), "b": torch.full((), (1 + rank) / 3, dtype=torch.float64)},
                                   [10 + rank, 0.5])
    return sums["a"].tolist(), sums["b"].item(), str(sums["a"].dtype), str(sums["b"].dtype), counts


def test_sums_of_several_types_and_their_counters_are_added_in_one_go(two):
    for a, b, a_type, b_type, counts in two(mixed):
        assert a == [[3.0] * 3] * 2 and b == pytest.approx(1.0, rel=1e-15) and (a_type, b_type) == ("torch.float32", "torch.float64")
        assert counts == [21, 1.0]


def test_models_that_exchange_gradients_themselves_are_refused():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match=r"model.module"):
        check_whole(wrapped)
    inner = nn.Sequential(nn.Linear(2, 2))
    nn.Module.__init__(wrapped)
    inner.append(wrapped)
    with pytest.raises(ValueError, match=r"model.module"):
        check_whole(inner)
    flattened = nn.Sequential(type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2))     # by its name: it needs processes to be made
    with pytest.raises(ValueError, match="pass the whole model to every process"):
        check_whole(flattened)
    stage = type("Stage", (), {"__module__": "torch.distributed.pipelining.stage"})()
    with pytest.raises(ValueError, match="stage of a pipeline"):
        check_whole(stage)
    assert form(nn.Linear(2, 1)) == [("weight", (1, 2), "torch.float32"), ("bias", (1,), "torch.float32")]


def test_a_process_that_is_told_to_stop_says_so_and_undoes_what_is_half_done(capsys):
    with Ledger() as ledger:
        ledger.begin("run", {"mechanisms": []})
        with pytest.raises(SystemExit) as caught, ledger._transaction():
            ledger._append("finish", "run")
            told_to_stop(15, None)
        assert not ledger.finished("run")
    assert caught.value.code == 143
    assert capsys.readouterr().err.startswith("dpft: this process was told to stop") and "last checkpoint" in HOW_TO_GO_ON


def test_an_unreachable_process_is_one_sentence():
    with pytest.raises(ProcessError, match=r"cannot be reached .Connection closed by peer") as caught, reached():
        raise RuntimeError("[/pytorch/gloo/pair.cc:1] Connection closed by peer\nmore")
    assert "\n" not in str(caught.value)
    with pytest.raises(LedgerError), reached():
        raise LedgerError("passes through")


def test_a_signal_that_a_process_ignores_stays_ignored():
    told, before = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with at_first_signal(told.append):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and told == []
            os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
