"""Of the engine, its parts and the loop: what a small change once left unnoticed by all other fast tests (`make mutants`)."""

import copy
import dataclasses
import json
import math
import os
import pickle
import signal
import types

import pytest
import torch
import zoo
from test_training import OnlyTheHead, Thaws, engine, net, run_all, tune
from torch import nn, tensor
from zoo import toy

import dpft
from dpft import engine as engine_room
from dpft import loop
from dpft import plan as plan_room
from dpft.sources import load_data
from dpft.gradients import Block
from dpft.loop import make_schedule, progress_is_due
from dpft.method import Context
from dpft.noise import grid_step, on_grid, secure_std
from dpft.ledger import Ledger
from dpft.privacy import Request, SampledGaussian
from dpft.step import Share
from dpft.store import Store

NOISE = dict(epsilon=None, noise_multiplier=1.0)  # nothing to solve


def test_the_noise_of_a_step_is_the_same_in_every_version():
    "Its stream is named by what it hides: the mechanism, the step, the digest of the sums, the parameter."
    running = engine(**NOISE)
    step = next(iter(running))
    for batch in step:
        step.add(batch)
    sums, digest = {name: total.clone() for name, total in step.sums.items()}, running.charge("train", step.t, step.sums)
    step.privatize()
    for name, total in sums.items():
        noise = running.keystream.normal(total.shape, 1.0, "noise", "train", step.t, digest, name)
        parameter = running.trains[name]
        assert torch.equal(parameter.grad, (total + noise * running.spread[id(parameter)]) / running.plan.batch_size)


def test_a_ledger_tells_with_what_a_run_was_planned():
    ledger = Ledger()
    for seed in (0, None):
        e = engine(ledger=ledger, seed=seed, clip=0.5, **NOISE)
        next(iter(next(iter(e))), None)
        plan = ledger.plan(e.store.run)
        assert (plan["clip"], plan["clipping"], plan["unit"], plan["size"], plan["reproducible"]) == (0.5, "flat", "example", 60, seed == 0)
        assert plan["delta"] == e.plan.delta and plan["epsilon"] == e.plan.epsilon() and plan["accountant"] == "rdp"


def test_the_folder_of_an_unfinished_run_is_its_owners(tmp_path):
    store = Store(tmp_path / "a" / "run", {})
    assert store.folder.stat().st_mode & 0o077 == 0


def test_a_state_that_holds_more_than_numbers_is_not_unpacked(tmp_path):
    store, told = Store(tmp_path, {}), []
    store.save({"step": 3})
    assert Store(tmp_path, {}).step == 3

    class Harm:
        def __reduce__(self):
            return told.append, ("done",)

    store.save({"step": Harm()})
    with pytest.raises(pickle.UnpicklingError):
        Store(tmp_path, {})
    assert not told


def test_a_state_of_another_device_is_read_into_memory(tmp_path, monkeypatch):
    Store(tmp_path, {}).save({"step": 1})
    read, asked = torch.load, {}
    monkeypatch.setattr(torch, "load", lambda path, **settings: asked.update(settings) or read(path, **settings))
    Store(tmp_path, {})
    assert asked == {"weights_only": True, "map_location": "cpu"}


def test_a_checkpoint_must_agree_in_all_that_a_run_depends_on():
    identity = engine(**NOISE).store.identity
    assert identity["number of processes"] == 1 and identity["method"] == "Full()" and identity["plan"]["clip"] == 0.5
    assert {"model", "data", "tokens", "units", "unit_cap", "augmentation"} <= set(identity)


def test_every_entry_of_a_small_model_tells_it_from_others():
    model = nn.Linear(3, 2)
    known = engine_room.model_fingerprint(model)
    for parameter in model.parameters():
        for place in range(parameter.numel()):
            other = copy.deepcopy(model)
            dict(other.named_parameters())[next(n for n, p in model.named_parameters() if p is parameter)].data.view(-1)[place] += 1
            assert engine_room.model_fingerprint(other) != known


def test_what_has_trained_is_remembered_after_it_is_frozen():
    run = tune(method=OnlyTheHead(), steps=4, **NOISE)
    assert run.trained == sorted(name for name, _ in run.model.named_parameters())


def test_an_optimizer_keeps_its_moments_while_the_phase_lasts():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    tune(model, optimizer=optimizer, steps=4, **NOISE)
    assert [int(state["step"]) for state in optimizer.state.values()] == [4] * 4


def test_other_processes_answer_with_what_the_first_told_them():
    e = engine(**NOISE)
    e._ledger, e._told = None, ([SampledGaussian(1.0, 0.1, 3)], "head of the ledger")
    assert e.spent == [SampledGaussian(1.0, 0.1, 3)] and e._head() == "head of the ledger"
    with pytest.raises(ValueError, match="only the first process"):
        _ = e.ledger


def test_nothing_counts_as_checked_before_the_first_step_or_without_privacy():
    e = engine(**NOISE)
    assert e.guarantee.checked == []
    assert run_all(e).guarantee.checked == list(engine_room.CHECKED)
    assert run_all(engine(epsilon=math.inf)).guarantee.checked == []


def test_an_example_without_a_finite_loss_counts_as_zero_in_the_mean():
    data = toy()
    data.images[7] = math.nan
    e = engine(data=data, batch_size=60, **NOISE)
    step = next(iter(e))
    losses = torch.cat([(step.add(batch), zoo.image_loss(e.model, batch))[1] for batch in step])
    assert losses.isnan().sum() == 1 and step.loss == pytest.approx(losses.nan_to_num(0.0).mean().item(), rel=1e-5)


def test_the_loop_is_silent_without_progress(capsys):
    tune(steps=2, **NOISE)
    said = capsys.readouterr()
    assert said.out == said.err == ""


def test_epsilon_is_shown_at_both_ends_and_twenty_times_between():
    due = [t for t in range(1, 101) if progress_is_due(t, 100)]
    assert due == [1, *range(5, 101, 5)]
    assert all(progress_is_due(t, 7) for t in range(1, 8))


def test_a_function_of_the_users_may_score_the_model():
    run = tune(steps=1, **NOISE, evaluate=lambda model: {"parameters": sum(1 for _ in model.parameters())})
    assert run.scores == {"parameters": 4}


def test_texts_to_go_on_with_are_scored_by_perplexity(monkeypatch):
    class Texts(list):
        labels = None

    def perplexity(model, data):
        return 7.0

    monkeypatch.setattr(loop, "perplexity", perplexity)
    assert tune(steps=1, **NOISE, evaluate=Texts([1, 2])).scores == {"perplexity": 7.0}


def test_a_saved_run_says_of_what_kind_it_is_and_what_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "write_model", lambda *_: {"base": None})     # weights have tests of their own
    monkeypatch.setattr(loop, "how_to_load", lambda _: "load it\n")
    tune(steps=1, epsilon=math.inf).save(tmp_path)
    told = json.loads((tmp_path / "dpft.json").read_text())
    assert told["kind"] == "image" and told["trained"] == ["1.bias", "1.weight", "4.bias", "4.weight"]
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("# Model card\n\n") and card.endswith("load it\n") and "\n\n\n" not in card


def test_a_part_of_a_method_has_the_steps_of_its_phase_or_all():
    context = Context(net(), zoo.image_loss, 10, 7, 60)
    assert context.part(0, 1).steps == 7 and context.part(0, 1, 3).steps == 3 and context.steps == 7
    assert context.part(2, 2).part(1, 1)._own == range(3, 4)


def test_a_new_phase_is_known_to_the_engine():
    e = engine(**NOISE)
    assert not e.new_phase
    e.context.begin_phase()
    assert e.new_phase is True


class Unused(nn.Module):
    "One parameter that no example uses."

    def __init__(self):
        super().__init__()
        self.body, self.unused = net(), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.body(x)


def test_without_privacy_a_parameter_may_be_unused():
    e = run_all(engine(Unused(), epsilon=math.inf))
    assert e.model.unused.item() == 0


class ThawsAll(Thaws):
    "What `Thaws` does, for a model around the small one."

    def start(self, context):
        context.train_only(context.model.body[-1].parameters())


def test_what_is_new_may_stay_where_it_is_when_its_gradient_is_zero_and_not_otherwise():
    run_all(engine(Unused(), ThawsAll(), epsilon=math.inf))            # the smallest of the new ones has no gradient
    e = engine(method=Thaws(), **NOISE)
    with pytest.raises(ValueError, match="the optimizer does not hold the parameters"):
        run_all(e, torch.optim.SGD(e.parameters(), 0.1))


@pytest.mark.parametrize("schedule, rates", [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]),
                                             ("cosine", [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4])])
def test_the_rate_falls_as_its_schedule_says(schedule, rates):
    optimizer, found = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), []
    schedule = make_schedule(optimizer, schedule, 4)
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates)


def test_data_of_no_items_holds_no_texts():
    assert not loop.holds_texts([]) and loop.holds_texts([{"text": "a"}]) and not loop.holds_texts([("a", 1)])


def test_a_view_counts_with_its_share_of_the_loss():
    def loss(model, batch):
        return batch
    for copies in (2, 3):
        share = Share(loss, copies)
        assert share(None, tensor([6.0])).item() == share.full_precision(None, tensor([6.0])).item() == 6 / copies


def test_without_memory_for_it_there_is_no_cache():
    without, cached = engine(cache=0, **NOISE), engine(cache=0.1, **NOISE)
    assert without.prefix is None and without.loss_fn is zoo.image_loss and cached.loss_fn is cached.prefix is not None


def test_a_method_is_asked_what_it_requests_with_the_run_before_it():
    class Asks(dpft.Full):
        def requests(self, context):
            self.asked = context
            return super().requests(context)

    running = engine(method=Asks(), **NOISE)
    assert running.method.asked is running.context


def test_a_model_made_by_name_is_remembered_by_name():
    "So that its folder says how to load it."
    task = load_data("digits")
    ready = loop.prepare("cnn", task)
    assert ready.recipe == {"name": "cnn", "classes": 10, "kind": "image", "image_shape": task.image_shape}
    assert loop.prepare(ready.model, task).recipe is None


def test_a_module_names_its_tokenizer_by_where_it_came_from(monkeypatch):
    monkeypatch.setattr(loop, "load_tokenizer", lambda name: pytest.fail(f"asked for {name}"))
    model = net()
    model.config = types.SimpleNamespace(_name_or_path="where/it/came/from")
    with pytest.raises(pytest.fail.Exception, match="asked for where/it/came/from"):
        loop.prepare(model, [{"text": "a", "label": 0}, {"text": "b", "label": 1}])


def test_each_entry_has_the_noise_of_the_block_that_holds_it():
    "One parameter, two blocks: the second block's noise comes beside the first's."
    one, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    mask = tensor([[True, False], [False, True]])
    spread = plan_room.noise_spread([Block([one], [mask], noise=2.0), Block([one, other], [~mask, torch.ones(3, dtype=bool)], noise=5.0)])
    assert torch.equal(spread[id(one)], tensor([[2.0, 5.0], [5.0, 2.0]])) and torch.equal(spread[id(other)], torch.full((3,), 5.0))


def test_a_run_with_a_checkpoint_leaves_soon_after_it_was_told_to(tmp_path, capsys):
    told = []

    class Told(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if not told:
                told.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(SystemExit) as left:
        tune(optimizer=Told, checkpoint=tmp_path, **NOISE)
    assert left.value.code == 128 + signal.SIGTERM and (tmp_path / "state.pt").exists()
    assert f"the state after step 2 of 6 is in {tmp_path}" in capsys.readouterr().err
    assert [mechanism.steps for mechanism in Ledger(tmp_path / "ledger.sqlite").spent()] == [2]  # its wish travels with the next sum


def test_the_noise_of_a_methods_release_is_the_same_in_every_version():
    class Looks(dpft.Full):
        def requests(self, context):
            return [Request(0.5, 1, 0.2)]

        def start(self, context):
            running, total = context.engine, torch.arange(3.0)
            list(context.draw(0.5))
            name, std = running.requests[0].name, running.plan.mechanisms[1].noise_multiplier * 2.0
            digest = running.charge(name, 0, {"total": total})
            released = context.release(total, 2.0)
            noise = running.keystream.normal((3,), std, "noise", name, 0, digest)
            if running.secure_mode:
                std = secure_std(std, 2.0, 3)
                step = grid_step(std)
                total, noise = on_grid(total, step), on_grid(running.keystream.secure_normal((3,), "noise", name, 0, digest) * std, step)
            assert torch.equal(released, (total + noise).float())
            super().start(context)

    for secure_mode in (False, True):
        engine(method=Looks(), secure_mode=secure_mode)


def test_what_trained_before_a_freeze_has_trained():
    run = tune(method=dpft.Then(dpft.Full(), None, dpft.LastLayer(), steps=3), **NOISE)
    assert run.trained == sorted(name for name, _ in run.model.named_parameters())


def test_labels_beyond_the_classes_are_refused_before_a_step():
    task = load_data("digits")
    with pytest.raises(ValueError, match="class"):
        loop.prepare(net(), dataclasses.replace(task, classes=task.classes[:5]))


def test_rows_that_end_in_text_are_for_writing():
    rows = [{"question": "a", "reply": "b"}]
    assert loop.as_task(rows, ("question", "reply")).kind == "causal"
    assert loop.as_task([{"text": "a", "label": 0}], None).kind == "text"


def test_secure_mode_is_for_devices_with_float64():
    for device in ("cpu", "cuda"):
        engine_room.check_secure(True, True, torch.device(device))
    with pytest.raises(ValueError, match="mps does not have"):
        engine_room.check_secure(True, True, torch.device("mps"))


def test_what_is_checked_on_the_first_batch_is_claimed_from_then_on():
    running, loose = engine(**NOISE), engine(epsilon=math.inf)
    assert running.guarantee.checked == []
    for one in (running, loose):
        next(iter(one)).take()
    assert running.guarantee.checked == list(engine_room.CHECKED) and loose.guarantee.checked == []
    assert running.guarantee.run == running.store.run in running.ledger.runs() and loose.guarantee.run == ""


def test_a_run_without_noise_is_noted_in_a_ledger_that_it_was_given(tmp_path):
    given, own = engine(epsilon=math.inf, ledger=tmp_path / "shared"), engine(epsilon=math.inf)
    for one in (given, own):
        next(iter(one)).take()
    assert list(given.ledger.unpaid()) == [given.store.run] and own.ledger.unpaid() == {}
