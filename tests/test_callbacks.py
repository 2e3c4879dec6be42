"""Callbacks of Transformers, scores during a run, and schedules of the user's: what they see, what they may do, and what it costs."""

import json
import signal

import pytest
import torch
from test_processes import Ranks
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback

import dpft
from dpft.data import Public
from dpft.ledger import Ledger
from dpft.noise import Keystream
from dpft.scores import NoisyAccuracy, noisy_accuracy


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())


TRAIN, OTHER = rows(60, 0), rows(40, 1)


def tuned(**more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    given = dict(noise_multiplier=2.0, steps=6, batch_size=20, clip=1.0, learning_rate=0.05, accountant="rdp", progress=False,
                 optimizer="sgd")
    if "epsilon" in more:
        del given["noise_multiplier"]
    return dpft.fine_tune(model, TRAIN, dpft.Full(), **{**given, **more})


class Recorder(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self, stop=None):
        self.stop, self.events, self.logs, self.metrics, self.given = stop, [], [], [], []

    def on_train_begin(self, args, state, control, **more):
        self.events.append(("begin", state.global_step))
        self.args = args
        self.given.append(more)

    def on_step_begin(self, args, state, control, **more):
        self.events.append(("step begins", state.global_step))

    def on_step_end(self, args, state, control, **more):
        self.events.append(("step", state.global_step))
        self.given.append(more)
        if state.global_step == self.stop:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **more):
        self.logs.append((state.global_step, logs))

    def on_evaluate(self, args, state, control, metrics=None, **more):
        self.events.append(("score", state.global_step))
        self.metrics.append(metrics)

    def on_save(self, args, state, control, **more):
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **more):
        self.events.append(("end", state.global_step))


def test_events_come_in_order_and_show_what_was_released(tmp_path):
    seen = Recorder()
    run = tuned(callbacks=[seen], evaluate=Public(OTHER, "elsewhere"), evaluate_every=3, checkpoint=tmp_path, checkpoint_every=4)
    steps = [event for event in seen.events if event[0] != "step begins"]
    assert steps == [("begin", 0), ("step", 1), ("step", 2), ("step", 3), ("score", 3), ("step", 4), ("save", 4), ("step", 5), ("step", 6),
                     ("save", 6), ("score", 6), ("end", 6)]
    assert [t for name, t in seen.events if name == "step begins"] == list(range(6))
    told = [logs for _, logs in seen.logs if "learning_rate" in logs]
    assert len(told) == 6 and all({"learning_rate", "grad_norm", "epsilon", "epoch"} == set(logs) for logs in told)
    assert all(list(metrics) == ["eval_accuracy"] for metrics in seen.metrics) and len(seen.metrics) == 2
    assert [entry["step"] for entry in run.history if "scores" in entry] == [3, 6]
    assert run.scores["accuracy"] == seen.metrics[-1]["eval_accuracy"]
    for more in seen.given:
        assert more["train_dataloader"] is None and more["eval_dataloader"] is None
        assert not any(value is TRAIN or value is OTHER for value in more.values())
    assert "training loss" not in run.report()


def test_arguments_hold_neither_seed_nor_folders_nor_people(tmp_path):
    seen, people = Recorder(), [f"patient {i // 2}" for i in range(60)]
    tuned(callbacks=[seen], seed=1234567, checkpoint=tmp_path / "state", output=tmp_path / "saved", ledger=tmp_path / "book", unit=people,
          unit_cap=2, batch_size=10)
    text = seen.args.to_json_string() + str(seen.args.to_dict()) + str(seen.args.to_sanitized_dict())
    assert "1234567" not in text and str(tmp_path) not in text and "patient" not in text
    assert str(tmp_path) not in str(vars(seen.args)) and 1234567 not in vars(seen.args).values()
    known = json.loads(seen.args.to_json_string())
    assert known["learning_rate"] == 0.05 and known["noise_multiplier"] == 2.0 and known["method"] == "Full()" and known["steps"] == 6
    assert seen.args.max_steps == 6 and seen.args.per_device_train_batch_size == 10 and seen.args.run_name is None


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_run_that_is_stopped_states_its_whole_plan_and_pays_for_its_steps(tmp_path, stop):
    whole = tuned()
    run = tuned(callbacks=[Recorder(stop)], ledger=tmp_path / "book", output=tmp_path / "saved")
    assert sum("learning_rate" in entry for entry in run.history) == stop and run.trained == whole.trained
    assert [m.steps for m in run.guarantee.spent] == [stop]
    assert run.epsilon == pytest.approx(whole.epsilon, rel=1e-9)
    assert ("stopped before the end of its plan" in run.report()) == (stop < 6)
    assert dpft.verify(tmp_path / "saved")
    with Ledger(tmp_path / "book") as ledger:
        assert [m.steps for name in ledger.runs() for m in ledger.spent(name)] == [stop]


def test_a_stop_by_what_nobody_paid_for_is_named():
    assert "when training stopped, after step 2 of 6" in tuned(callbacks=[Recorder(2)], show_loss=True).report()
    assert "when training stopped" in tuned(callbacks=[Recorder(2)], evaluate=OTHER, evaluate_every=1).report()
    assert "when training stopped" not in tuned(callbacks=[Recorder(2)], evaluate=Public(OTHER, "elsewhere"), evaluate_every=1).report()


class Worse:
    """Scores that fall."""

    def __init__(self, *values):
        self.values = list(values)

    def __call__(self, model):
        return {"score": self.values.pop(0) if len(self.values) > 1 else self.values[0]}


class Failing(torch.optim.SGD):
    calls, fails = 0, 4

    def step(self, closure=None):
        Failing.calls += 1
        if Failing.calls == Failing.fails:
            raise KeyboardInterrupt
        return super().step(closure)


Failing.__module__, Failing.__qualname__ = torch.optim.SGD.__module__, torch.optim.SGD.__qualname__   # a run goes on with the same one


@pytest.mark.parametrize("name, steps", [("eval_loss", 6), ("score", 3)])
def test_of_a_function_s_score_less_is_better_where_its_name_says_so(name, steps):
    falling = iter(range(100, 0, -1))
    run = tuned(callbacks=[EarlyStoppingCallback(2)], evaluate=lambda model: {name: float(next(falling))}, evaluate_every=1)
    assert [entry["step"] for entry in run.history if "learning_rate" in entry][-1] == steps


def test_early_stopping_goes_on_counting_after_a_crash(tmp_path):
    Failing.calls = 0
    given = dict(evaluate_every=1, checkpoint=tmp_path, checkpoint_every=1, seed=0)
    with pytest.raises(KeyboardInterrupt):
        tuned(callbacks=[EarlyStoppingCallback(3)], evaluate=Worse(5.0, 4.0, 3.0), optimizer=Failing, **given)
    again = Recorder()
    run = tuned(callbacks=[EarlyStoppingCallback(3), again], evaluate=Worse(2.0), optimizer=torch.optim.SGD, **given)
    assert again.events[:3] == [("begin", 3), ("step begins", 3), ("step", 4)]
    assert run.history[-1]["step"] == 4 and [m.steps for m in run.guarantee.spent] == [4]


def test_ctrl_c_stops_as_sigterm_does_and_the_same_call_goes_on(tmp_path, capsys):
    number = signal.SIGINT
    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 2:
                signal.raise_signal(number)
    with pytest.raises(SystemExit) as left:
        tuned(callbacks=[Told()], checkpoint=tmp_path)
    assert left.value.code == 128 + number and "the state after step 3 of 6 is in" in capsys.readouterr().err
    run = tuned(callbacks=[Told()], checkpoint=tmp_path)
    assert [m.steps for m in run.guarantee.spent] == [6] and run.history[-1]["step"] == 6


def test_a_callback_that_fails_is_named_and_left_out():
    class Broken(TrainerCallback):
        calls = 0

        def on_step_end(self, *args, **more):
            Broken.calls += 1
            raise OSError("no space left")
    seen = Recorder()
    with pytest.warns(UserWarning, match=r"Broken.on_step_end failed \(OSError: no space left\); the run goes on"):
        run = tuned(callbacks=[Broken, seen])
    assert Broken.calls == 1 and run.history[-1]["step"] == 6 and ("end", 6) in seen.events


def test_a_callback_that_cannot_begin_ends_the_call_before_anything_is_charged(tmp_path):
    class Unready(TrainerCallback):
        def on_train_begin(self, *args, **more):
            raise OSError("the server does not answer")
    with pytest.raises(OSError, match="the server does not answer"):
        tuned(callbacks=[Unready()], ledger=tmp_path / "book")
    with Ledger(tmp_path / "book") as ledger:
        assert all(not ledger.spent(name) for name in ledger.runs())


@pytest.mark.parametrize("given, said", [
    (dict(callbacks=[EarlyStoppingCallback(2)]), "EarlyStoppingCallback requires"), (dict(callbacks="me"), "text"),
    (dict(evaluate_every=2), "without evaluate="), (dict(evaluate=NoisyAccuracy(TRAIN)), "are in the private data too"),
    (dict(evaluate=Public(TRAIN, "elsewhere")), "are in the private data too"),
    (dict(epsilon=float("inf"), evaluate=NoisyAccuracy(OTHER)), "give it a noise_multiplier"),
    (dict(warmup=7), "longer than the run of 6"), (dict(optimizer=torch.optim.LBFGS), "LBFGS needs more than one dense gradient"),
    (dict(optimizer=torch.optim.SparseAdam), "SparseAdam needs"),
    (dict(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)), "learning_rate=0.05 does nothing beside an optimizer")])
def test_what_cannot_work_is_refused_before_anything_is_charged(tmp_path, given, said):
    with pytest.raises((AssertionError, ValueError), match=said):
        tuned(ledger=tmp_path / "book", **given)
    assert not (tmp_path / "book").exists() or not Ledger(tmp_path / "book").spent()


def test_epochs_are_expected_passes_and_the_optimizer_sees_the_noisy_gradient():
    class Passes(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_epoch_begin(self, args, state, control, **more):
            self.seen.append(("begin", state.global_step))

        def on_epoch_end(self, args, state, control, **more):
            self.seen.append(("end", state.global_step))

        def on_pre_optimizer_step(self, args, state, control, model=None, **more):
            self.seen += [] if all(p.grad.abs().sum() > 0 for p in model.parameters()) else ["no gradient"]
    tuned(callbacks=[one := Passes()], steps=7)                                 # a third of the rows in each
    assert one.seen == [("begin", 0), ("end", 3), ("begin", 3), ("end", 6), ("begin", 6)]


def test_wishes_are_met(tmp_path):
    class Wishes(Recorder):
        def on_step_end(self, args, state, control, **more):
            super().on_step_end(args, state, control, **more)
            control.should_evaluate = control.should_save = state.global_step == 2
    seen = Wishes()
    run = tuned(callbacks=[seen], evaluate=Public(OTHER, "elsewhere"), checkpoint=tmp_path, checkpoint_every=100)
    assert ("score", 2) in seen.events and ("save", 2) in seen.events and ("score", 3) not in seen.events
    assert [entry["step"] for entry in run.history if "scores" in entry] == [2, 6]


# ---- paid scores


def test_paid_scores_have_a_guarantee_of_their_own(tmp_path):
    run = tuned(epsilon=3.0, evaluate=NoisyAccuracy(OTHER), evaluate_every=2, output=tmp_path / "saved")
    (mechanism,) = run.score_guarantee.mechanisms
    assert mechanism.steps == 3 and mechanism.sample_rate == 1.0
    assert 2.5 < run.score_guarantee.epsilon() <= run.epsilon <= 3.0
    assert "row of the development set" in run.report() and "unless they are public" not in run.report()
    assert "row of the development set" in (tmp_path / "saved" / "README.md").read_text()
    assert dpft.verify(tmp_path / "saved")
    assert all(0 <= entry["scores"]["accuracy"] <= 1 for entry in run.history if "scores" in entry)


def test_stopping_by_a_paid_score_pays_for_all_planned_scores():
    class First(Recorder):
        def on_evaluate(self, args, state, control, **more):
            control.should_training_stop = True
    whole, early = (tuned(epsilon=3.0, evaluate=NoisyAccuracy(OTHER), evaluate_every=1, callbacks=[one]) for one in (Recorder(), First()))
    assert early.history[-1]["step"] == 1 and "when training stopped" not in early.report()
    assert early.score_guarantee.epsilon() == pytest.approx(whole.score_guarantee.epsilon(), rel=1e-9)


def test_a_paid_score_is_not_drawn_twice(tmp_path):
    Failing.calls = 0
    given = dict(evaluate=NoisyAccuracy(OTHER, noise_multiplier=5.0), evaluate_every=1, checkpoint=tmp_path, checkpoint_every=100, seed=0)
    seen, again = Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        tuned(callbacks=[seen], optimizer=Failing, **given)
    tuned(callbacks=[again], optimizer=torch.optim.SGD, **given)
    assert again.metrics[:3] == seen.metrics and len(seen.metrics) == 3 and len(again.metrics) == 6


def resumed(folder, before, after):
    """A run that is interrupted in its fourth step and goes on with other knobs."""
    Failing.calls = 0
    with pytest.raises(KeyboardInterrupt):
        tuned(optimizer=Failing, checkpoint=folder, checkpoint_every=1, **before)
    return tuned(checkpoint=folder, checkpoint_every=1, optimizer=Failing, **after)


@pytest.mark.parametrize("before,said", [(dict(show_loss=True), "the training loss"),
                                         (dict(evaluate=OTHER, evaluate_every=1), "scores on examples, unless they are public")])
def test_a_run_that_continues_names_what_was_looked_at_before(tmp_path, before, said):
    assert said in resumed(tmp_path / "less", before, {}).guarantee.uncharged
    more = resumed(tmp_path / "more", {}, before).guarantee.uncharged
    assert {*more} == {*resumed(tmp_path / "as much", before, before).guarantee.uncharged} and more.count(said) == 1


def test_paid_scores_of_an_interrupted_run_are_counted_with_those_of_the_next_call(tmp_path):
    dear, cheap = (NoisyAccuracy(OTHER, noise_multiplier=sigma) for sigma in (1.0, 8.0))
    often, once = dict(evaluate=dear, evaluate_every=1), dict(evaluate=cheap)
    def priced(run):
        return {one.noise_multiplier: one.steps for one in run.score_guarantee.mechanisms}
    assert priced(resumed(tmp_path / "other", often, once)) == {1.0: 3, 8.0: 1}
    assert priced(resumed(tmp_path / "same", often, often)) == {1.0: 6}
    none = resumed(tmp_path / "none", often, {})
    assert priced(none) == {1.0: 3} and "row of the development set" in none.report()
    assert priced(resumed(tmp_path / "rows", often, dict(evaluate=NoisyAccuracy(rows(40, 2), noise_multiplier=1.0)))) == {1.0: 4}


def test_an_evaluation_that_fails_in_a_run_does_not_end_it():
    def broken(model):
        raise RuntimeError("no metric")
    with pytest.warns(UserWarning, match="the run goes on, but evaluate= failed"):
        run = tuned(evaluate=broken, evaluate_every=2)
    assert run.scores == {} and sum("learning_rate" in entry for entry in run.history) == 6


def test_a_noisy_accuracy_counts_rows_whatever_their_labels():
    """A row may move the count by one: neither many tokens in a row, nor rows without a label, may stretch it."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2)), model.bias.zero_()
    some = [(torch.eye(2)[0], 0)] * 3 + [(torch.eye(2)[0], -100)] * 97
    assert noisy_accuracy(model, some, 1e-9, Keystream(0), 0) == pytest.approx(0.03, abs=1e-6)
    import transformers as hf
    tagger = hf.BertForTokenClassification(hf.BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                                                         intermediate_size=4, max_position_embeddings=8))
    tagged = [{"input_ids": torch.ones(5, dtype=torch.long), "labels": torch.ones(5, dtype=torch.long)}] * 4
    with pytest.raises(ValueError, match="one row has several answers"):
        noisy_accuracy(tagger, tagged, 1.0, Keystream(0), 0)


def swapped(items):
    """The rows with each label exchanged: what a collate_fn of one's own may do and no other reader does."""
    return torch.stack([x for x, _ in items]), torch.stack([1 - y for _, y in items])


def test_a_paid_score_reads_its_rows_as_training_reads_its_own():
    many = rows(2000, 2)
    run = tuned(collate_fn=swapped, evaluate=NoisyAccuracy(many, noise_multiplier=2.0), noise_multiplier=0.5, steps=30,
                learning_rate=0.5)
    with torch.no_grad():
        said = run.model(many.tensors[0]).argmax(1)
    right = (said == 1 - many.tensors[1]).double().mean().item()
    assert abs(right - 0.5) > 0.05                                            # else both readings would agree
    assert run.scores["accuracy"] == pytest.approx(right, abs=0.02)


def test_a_row_that_a_collate_fn_makes_several_of_is_not_counted():
    """Two answers of one row would move the count by two, and rows that are mixed by more: each row is read alone."""
    def twice(items):
        x, y = swapped(items)
        return x.repeat(2, 1), y.repeat(2)

    def mixed(items):
        x, y = swapped(items)
        return x.mean(0).expand_as(x), y[:1].expand_as(y)

    with pytest.raises(ValueError, match="one row has several answers"):
        tuned(collate_fn=twice, evaluate=NoisyAccuracy(OTHER, noise_multiplier=2.0))
    with pytest.raises(ValueError, match=r"collate_fn=twice made \d+ rows of \d+, and each is bounded by itself"):
        tuned(collate_fn=twice)
    model = nn.Linear(4, 2)
    assert noisy_accuracy(model, OTHER, 1e-9, Keystream(0), 0, collate=mixed) == pytest.approx(
        noisy_accuracy(model, OTHER, 1e-9, Keystream(0), 0, collate=swapped), abs=1e-6)


# ---- schedules of the user's


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def test_a_scheduler_goes_on_after_a_crash(tmp_path):
    Failing.calls = 0
    given = dict(schedule=halving, checkpoint=tmp_path, checkpoint_every=1, seed=0)
    with pytest.raises(KeyboardInterrupt):
        tuned(optimizer=Failing, **given)
    found = [entry["learning_rate"] for entry in tuned(optimizer=torch.optim.SGD, **given).history]
    assert found == pytest.approx([0.05 * 0.5 ** (t // 2) for t in range(6)])


# ---- several processes


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("two") / "meeting")
    yield ranks
    ranks.close()


def rank():
    return torch.distributed.get_rank()


def stopped_by_the_second():
    """Only the second process's callback wants to stop."""
    seen = Recorder(2 if rank() == 1 else None)
    run = tuned(callbacks=[seen], seed=0)
    return [event for event in seen.events if event[0] != "step begins"], [m.steps for m in run.guarantee.spent], run.epsilon


def test_a_stop_that_one_process_wants_ends_all_after_the_same_step(two):
    events, spent, promised = zip(*two(stopped_by_the_second), strict=True)
    assert events[0] == events[1] == [("begin", 0), ("step", 1), ("step", 2), ("end", 2)] and spent == ([2], [2])
    assert promised[0] == promised[1] == pytest.approx(tuned().epsilon, rel=1e-9)         # the whole plan's


def paid_by_two():
    seen = Recorder()
    run = tuned(epsilon=3.0, evaluate=NoisyAccuracy(OTHER), evaluate_every=2, callbacks=[seen])
    (mechanism,) = run.score_guarantee.mechanisms
    return [metrics["eval_accuracy"] for metrics in seen.metrics], mechanism.steps, run.score_guarantee.epsilon(), run.scores


def test_a_paid_score_is_drawn_once_and_told_to_all(two):
    scores, times, promised, last = zip(*two(paid_by_two), strict=True)
    assert scores[0] == scores[1] and len(scores[0]) == 3 and last[0] == last[1] == {"accuracy": scores[0][-1]}
    assert times == (3, 3) and promised[0] == promised[1] <= 3.0


class Slows(TrainerCallback):
    "Sets the learning rate to nothing where the loss is large."

    def on_log(self, args, state, control, logs=None, optimizer=None, **more):
        if (logs or {}).get("loss", 0) > 0.1:
            for group in optimizer.param_groups:
                group["lr"] = 0.0


def test_what_callbacks_did_is_named_where_they_saw_what_is_not_charged():
    seen = {"show_loss": True}
    said = "what callbacks did that saw what is named here"
    assert said in tuned(callbacks=[Slows()], **seen).guarantee.uncharged
    assert said not in tuned(callbacks=[Slows()]).guarantee.uncharged and said not in tuned(**seen).guarantee.uncharged
    assert said not in tuned(callbacks=[Slows()], evaluate=Public(OTHER, "made up"), evaluate_every=2).guarantee.uncharged
