"""Several processes: real ones, over loopback, against one; agreement, order, faults, and a run that is killed and continued."""

import math
import os
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
from zoo import net, toy

import dpft
from dpft.ledger import Ledger
from dpft.method import Method
from dpft.privacy import Request
from dpft.processes import Processes, check_whole, on_terminate, own_device
from dpft.step import Step

LIMIT = 1200  # seconds until a process that does not answer is taken to hang, on any machine


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
        pipes = [fresh.CONTEXT.Pipe() for _ in range(size)]
        self.processes = [fresh.CONTEXT.Process(target=worker, args=(rank, size, meeting, pipes[rank][1]), daemon=True)
                          for rank in range(size)]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self.pipes = [ours for ours, _ in pipes]

    def ask(self, task, **arguments):
        for pipe in self.pipes:
            pipe.send((task, arguments))
        return [self.answer(pipe) for pipe in self.pipes]

    def answer(self, pipe):
        try:
            return pipe.recv() if pipe.poll(LIMIT) else ("no answer", "hangs")
        except EOFError:
            return "killed", "no answer"

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
def three(tmp_path_factory):
    ranks = Ranks(3, tmp_path_factory.mktemp("three") / "meeting")
    yield ranks
    ranks.close()


# one draw, one sum -----------------------------------------------------------------------------------------------------------------


def constant_noise(total, std, keystream, *context):
    "In place of noise, its standard deviation: what is added twice, or nowhere, shows."
    return total.add_(std)


def first_mean(double=False, people=False, **settings):
    "The first step's mean with constant noise, the rows that were here, and how many examples it had in all."
    data, here = toy(), []
    data.images[:, 0, 0, 0] = torch.arange(60) / 60
    data.lengths = [(7 * i) % 11 for i in range(60)]
    unit = [i // 3 for i in range(60)] if people else None
    e = engine(net().double() if double else net(), data=data, unit=unit, **{"batch_size": 10, **settings})
    step = next(iter(e))
    for batch in step:
        here += [round(60 * float(value)) for value in batch[0][:, 0, 0, 0]]
        step.add(batch)
    with patch("dpft.step.add_noise", constant_noise):
        step.privatize()
    return gradient(e), here, step.examples


@pytest.mark.parametrize("settings", [dict(epsilon=math.inf), dict(physical_batch_size=3), dict(double=True, batch_size=60),
                                      dict(people=True, physical_batch_size=7), dict(batch_size=1), dict(batch_size=1, seed=6)])
@pytest.mark.parametrize("ranks", ["two", "three"])
def test_a_draw_shared_out_gives_the_sum_of_one_process_with_noise_once_and_each_unit_on_one(request, ranks, settings):
    """Also of a draw smaller than the number of processes, and of an empty one, which is all noise."""
    whole, drawn, count = first_mean(**settings)
    assert settings.get("batch_size", 10) > 1 or count == (0 if settings.get("seed") == 6 else 1)
    parts = request.getfixturevalue(ranks)(first_mean, **settings)
    for total, _, examples in parts:
        assert np.abs(total - whole).max() <= (1e-14 if settings.get("double") else 1e-6) and examples == count
        assert np.array_equal(total, parts[0][0])
    assert sorted(row for _, here, _ in parts for row in here) == sorted(drawn)
    rows = 3 if settings.get("people") else 1
    units = [{row // rows for row in here} for _, here, _ in parts]
    assert sum(map(len, units)) == len(set.union(*units)) and max(map(len, units)) - min(map(len, units)) <= 1


def order_of_a_step(folder):
    "What happens to one step's sum on this process, in order."
    e, seen = engine(ledger=folder), []
    e.checked, draw, claim, total = True, e.draws.draw, Ledger.claim, Processes.total
    e.draws.draw = lambda *a, **b: seen.append("draw") or draw(*a, **b)
    with (patch("dpft.step.add_noise", lambda *a: seen.append("noise") or a[0]),
          patch.object(Ledger, "claim", lambda *a: (claim(*a), seen.append("claim"))[0]),
          patch.object(Processes, "total", lambda *a: seen.append("reduce") or total(*a))):
        added(next(iter(e))).privatize()
    return seen


def test_the_first_claims_before_anybody_draws_and_adds_the_noise_before_the_reduction(two, tmp_path):
    first, second = two(order_of_a_step, folder=tmp_path / "book")
    assert first == ["claim", "draw", "noise", "reduce"] and second == ["draw", "reduce"]


# agreement -------------------------------------------------------------------------------------------------------------------------


class AtRandom(Method):
    "A random half of the entries trains beside a fresh random head, and another random layer joins at every step."

    def __init__(self, apart="", when=0):
        self.apart, self.when = apart, when    # in what processes differ, which nothing can make alike

    def start(self, context):
        with torch.no_grad():
            context.model[4].weight.normal_()                                    # as a method that adds parameters does
            context.model[4].bias.copy_(torch.from_numpy(np.random.default_rng().normal(size=3)))   # from another generator
        self.mask = torch.rand(8, 16) < 0.5
        context.train_only([context.model[1].weight, *context.head])

    def step(self, context, t):
        now = self.apart if t == self.when and dist.get_rank() else ""
        joins = [context.model[1].bias] if bool(torch.rand(()) < 0.5) != (now == "names") else []
        self.mask = self.mask != (now == "mask")
        self.clip = 2.0 if now == "clip" else 1.0
        context.train_only([context.model[1].weight, *context.head, *joins])

    def blocks(self, context):
        rest = [p for p in context.model.parameters() if p.requires_grad and p is not context.model[1].weight]
        return [dpft.Block([context.model[1].weight], [self.mask], clip=0.5), dpft.Block(rest, clip=getattr(self, "clip", 1.0))]

    def __repr__(self):
        return "AtRandom()"


def several_steps(seed=0):
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)                                                # generators differ, and so does the model at first
    model = net(seed=rank, dropout=0.5)
    model.register_buffer("shift", torch.full((3,), float(rank)))
    e = run_all(engine(model, AtRandom(), steps=6, seed=seed, physical_batch_size=4))
    return weights(e.model), e.model.shift.tolist(), [m.steps for m in e.spent], e.guarantee


@pytest.mark.parametrize("seed", [None, 0])
def test_parameters_are_the_same_bits_on_all_with_dropout_a_fresh_head_and_random_choices(two, seed):
    answers = two(several_steps, seed=seed)
    for found, shift, spent, guarantee in answers:
        assert np.array_equal(found, answers[0][0]) and shift == [0, 0, 0] and spent == [6] and guarantee == answers[0][3]


def dropped():
    "The mean loss here of one step's own slice, under dropout; the data are all one example."
    data = toy()
    data.images[:], data.labels[:] = data.images[0].clone(), 0
    return added(Step(engine(net(dropout=0.5), data=data, batch_size=60))).loss


def test_dropout_differs_between_the_processes(two):
    first, second = two(dropped)
    assert first != second


def disagreeing(what, path):
    run_all(engine(method=AtRandom(what, when=2), ledger=path))


@pytest.mark.parametrize("what", ["mask", "names", "clip"])
def test_processes_that_choose_differently_are_stopped_before_a_draw(two, tmp_path, what):
    errors = two.errors(disagreeing, what=what, path=tmp_path / "book")
    assert errors[0] == errors[1] and "process 1 has another choice of what trains than process 0" in errors[0]
    with Ledger(tmp_path / "book") as ledger:
        assert sum(m.steps for m in ledger.spent()) == 3                         # the step was claimed, and nothing drawn


def refused(what):
    rank = dist.get_rank()
    other = {"shard": lambda: engine(data=toy(60 - rank)), "clip": lambda: engine(clip=0.5 + rank),
             "model": lambda: engine(net() if rank else nn.Sequential(nn.Flatten(), nn.Linear(16, 3))),
             "epsilon": lambda: engine(epsilon=0.0), "folder": lambda: engine(checkpoint="/dev/null/no"),
             "ledger": lambda: engine(ledger="/dev/null/no"), "any": lambda: Processes().first(lambda: 1 / 0)}
    other[what]()


@pytest.mark.parametrize("what, words", [
    ("shard", "process 1 has another settings than process 0"), ("clip", "process 1 has another settings"),
    ("model", "process 1 has another model structure"), ("epsilon", "epsilon=0"), ("folder", "Not a directory"), ("ledger", "ledger"),
    ("any", "ProcessError: a process failed: ZeroDivisionError")])
def test_what_processes_do_not_share_and_an_error_of_the_first_stop_all_with_one_sentence(two, what, words):
    errors = two.errors(refused, what=what)
    assert errors[0] == errors[1] and words in errors[0] and "\n" not in errors[0]


# requests and the ledger -----------------------------------------------------------------------------------------------------------


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


def test_a_request_gives_the_total_over_all_noisy_alike_and_charged_once(two, tmp_path):
    alone, plain, noisy = counting(epsilon=math.inf)[0], two(counting, epsilon=math.inf), two(counting, path=tmp_path / "book")
    for number in range(2):
        assert sum(seen[number][0] for seen, *_ in plain) == alone[number][0]
        assert all(seen[number][1] == alone[number][1] for seen, *_ in plain)
    for seen, spent, guarantee, found in noisy:
        assert [answer[1:] for answer in seen] == [answer[1:] for answer in noisy[0][0]]
        assert spent == [("train", 4), ("count", 2)] and guarantee == noisy[0][2] and np.array_equal(found, noisy[0][3])
        assert all(0 < abs(value) < 30 for _, (_, *zeros), _ in seen for value in zeros)          # noise on what was zero
    with Ledger(tmp_path / "book") as ledger:
        assert ledger.spent() == noisy[0][2].mechanisms
        assert [kind for kind, in ledger._query("SELECT kind FROM ledger ORDER BY number")] == ["begin", *["claim"] * 6, "finish"]


def mixing_loss(model, batch):
    own = loss(model, batch)
    return own - own.mean() * dist.get_rank()                                    # on the second process only


def failing(fault, path):
    if fault == "check":
        dpft.Engine(net(), mixing_loss, dpft.Full(), toy(), noise_multiplier=1.1, batch_size=20, steps=4, ledger=path).check_start()
    if fault == "network":
        with patch.object(Processes, "total", side_effect=OSError("the network is gone")):
            run_all(engine(ledger=path))
    for step in engine(ledger=Ledger(path, timeout=0.1) if dist.get_rank() == 0 else path):
        if step.t == 1 and dist.get_rank() == 0:
            other = Ledger(path)
            other._query("BEGIN IMMEDIATE")
        added(step).privatize()
        step.done()


@pytest.mark.parametrize("fault, words, claims", [
    ("check", "Coupled: an example's loss changes with the contents of the examples beside it", 0),
    ("network", "OSError: the network is gone", 1), ("lock", "locked", 2)])
def test_a_fault_stops_all_with_its_sentence_and_what_was_claimed_is_spent(two, tmp_path, fault, words, claims):
    errors = two.errors(failing, fault=fault, path=tmp_path / "book")
    assert errors[0] == errors[1] and words in errors[0] and "\n" not in errors[0]
    with Ledger(tmp_path / "book") as ledger:
        assert sum(m.steps for m in ledger.spent()) == claims


# stopped and killed ----------------------------------------------------------------------------------------------------------------


class Breaking(torch.optim.AdamW):
    stop_at = None

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count == self.stop_at:
            raise KeyError("stop")
        return super().step(closure)


def tuned(folder, stop_at=None, **settings):
    Breaking.stop_at = stop_at
    run = tune(checkpoint=folder, checkpoint_every=2, optimizer=Breaking, evaluate=toy(30, seed=1), **settings)
    return weights(run.model), run.history, run.guarantee


def test_a_stopped_run_goes_on_alike_on_all_at_no_further_cost(two, tmp_path):
    assert all("stop" in error for error in two.errors(tuned, folder=tmp_path / "a", stop_at=4, seed=None))
    for found, history, guarantee in (answers := two(tuned, folder=tmp_path / "a", seed=None)):
        assert np.array_equal(found, answers[0][0]) and (history, guarantee) == answers[0][1:] and guarantee.mechanisms[0].steps == 6
        assert "scores" in history[-1] and [entry["step"] for entry in history[:-1]] == [1, 2, 5, 6]  # the third was not saved


KILLING = """
    import os, signal, torch
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
WORDS = ["train", "--no-progress", "--data=digits", "--model=mlp", "--method=full", "--noise-multiplier=1.1", "--steps=6",
         "--batch-size=60", "--accountant=rdp", "--seed=0", "--device=cpu", "--score=none"]


def torchrun(folder, name, dies=-1):
    "The command in two processes under torchrun, one of which may die in its fourth step."
    (folder / "killing.py").write_text(textwrap.dedent(KILLING))
    # looked at once in two seconds, for on a busy machine the survivor is stopped before it can say why
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--monitor-interval", "2",
               str(folder / "killing.py"), *WORDS, f"--checkpoint={folder / name}", f"--output={folder / name}-output"]
    return subprocess.run(command, env={**os.environ, "DIES": str(dies)}, capture_output=True, text=True, timeout=LIMIT)


def test_a_killed_process_ends_all_with_one_sentence_and_the_same_command_continues(tmp_path):
    from safetensors.numpy import load_file

    killed = torchrun(tmp_path, "killed", dies=1)
    said = [line for line in killed.stderr.splitlines() if line.startswith("dpft:")]
    assert killed.returncode != 0 and len(said) == 1 and "the same command" in said[0], killed.stderr
    with Ledger(tmp_path / "killed.ledger") as ledger:
        assert 4 <= sum(m.steps for m in ledger.spent()) <= 5 and sum(m.steps for m in ledger.charged()) == 6
    for done in (torchrun(tmp_path, "killed"), torchrun(tmp_path, "whole")):
        assert done.returncode == 0 and done.stdout.count("differentially private") == 1, done.stderr
    found, expected = (load_file(tmp_path / f"{name}-output" / "dpft.safetensors") for name in ("killed", "whole"))
    assert found and all(np.array_equal(found[name], value) for name, value in expected.items())


def lost():
    if dist.get_rank() == 1:
        os._exit(1)
    Processes().gather("anybody?")


def test_the_survivor_of_a_lost_process_says_how_to_go_on(tmp_path):
    ranks = Ranks(2, tmp_path / "meeting")
    (error, _), _ = ranks.ask(lost)
    ranks.close()
    assert error.startswith("ProcessError: another process of this run has ended") and "last checkpoint" in error and "\n" not in error


def test_a_process_that_is_on_terminate_says_so_and_undoes_what_is_half_done(capsys):
    with Ledger() as ledger:
        ledger.begin("run", {"mechanisms": []})
        with pytest.raises(SystemExit) as caught, ledger._transaction():
            ledger._append("finish", "run")
            on_terminate(15, None)
        assert not ledger.finished("run")
    assert caught.value.code == 143 and capsys.readouterr().err.startswith("dpft: this process was told to stop")


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("cuda") == "cuda:1" and chosen == ["cuda:1"] and own_device("cpu") == "cpu"


def test_models_that_exchange_gradients_themselves_are_refused():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    flattened = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)         # by its name: it needs processes to be made
    stage = type("Stage", (), {"__module__": "torch.distributed.pipelining.stage"})()
    for model, words in ((nn.Sequential(wrapped), r"model.module"), (nn.Sequential(flattened), "pass the whole model to every process"),
                         (stage, "stage of a pipeline")):
        with pytest.raises(ValueError, match=words):
            check_whole(model)
