"""A model that an earlier run has trained is recognised: as an object, from its folder, by the ledger; and what is then said or refused."""

import copy
import itertools
import json
import math
import re

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import dpft
from dpft import Full, LoRA
from dpft.baselines import Adapter, Trainable, merge_lora, remove_adapters
from dpft.boundary import neighbours, toy_network, toy_pictures
from dpft.datasets import Public
from dpft.identity import model_fingerprint
from dpft.loop import load
from dpft.privacy import SampledGaussian, epsilon
from dpft.provenance import START, note_of, note_of_folder, notes_on, part_hashes, record_weights, sentence, trained_in
from dpft.verification import verify

DATA = toy_pictures()
OTHER = neighbours(DATA)["another"]


def made(model=None, data=DATA, method=None, epsilon=3.0, **knobs):
    usual = dict(steps=2, batch_size=8, public_size=24, clip=0.5, accountant="rdp", progress=False)
    return dpft.fine_tune(model or toy_network(), data, method or Full(), epsilon=epsilon, **{**usual, **knobs})


class StopsAfter(TrainerCallback):
    "Ends a run after so many steps."
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step == self.steps


def said(run):
    "What the guarantee says of the start: (under public facts, under what nobody paid for)."
    found = run.guarantee
    return tuple([one for one in where if one.startswith(START)] for where in (found.assumed_public, found.uncharged))


def same_weights(run):
    "Fresh modules with a run's weights, which bear no trace of it."
    model = toy_network()
    model.load_state_dict(run.model.state_dict())
    return model


def test_a_fresh_start_is_a_public_fact():
    public, unpaid = said(made())
    assert public == [f"{START} (Sequential)"] and not unpaid


def built_on(model):
    return nn.Sequential(model[:4], nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("hand_on", [lambda model: model, copy.deepcopy, built_on], ids=["itself", "a copy", "a part of it"])
def test_a_model_that_a_run_gave_out_is_no_public_start(hand_on):
    first = made()
    other = hand_on(copy.deepcopy(first.model))
    public, unpaid = said(made(hand_on(first.model)))
    assert not public and len(unpaid) == 1
    assert first.guarantee.run in unpaid[0] and "at epsilon 3.00" in unpaid[0]
    assert said(made(other, OTHER)) == (public, unpaid)     # whether the data are the same is private


def test_every_earlier_run_is_named():
    first = made()
    second = made(first.model)
    _, unpaid = said(made(second.model))
    assert [run.guarantee.run in one for run, one in zip((first, second), unpaid, strict=True)] == [True, True]


def test_a_run_that_spent_more_than_its_plan_is_named_with_what_it_spent(tmp_path):
    """A repeated draw whose sum was another is charged a second time, and whoever trains on must hear of it."""
    with dpft.Ledger(tmp_path / "ledger.sqlite") as ledger:
        engine = dpft.Engine(toy_network(), None, Full(), DATA, epsilon=3.0, steps=2, batch_size=8, public_size=24, clip=0.5,
                             accountant="rdp", ledger=ledger)
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        for step in engine:
            for batch in step:
                step.add(batch)
            if step.t == 0:
                spread = {name: engine.spread[id(parameter)] for name, parameter in engine.trains.items()}
                engine.releases("train", 0, {name: torch.ones_like(value) for name, value in engine.trains.items()}, spread)
            step.privatize()
            optimizer.step()
            step.done()
        assert engine.guarantee.beyond_plan
        stated = f"at epsilon {math.ceil(100 * engine.guarantee.epsilon()) / 100:.2f}"
        assert stated != "at epsilon 3.00"
        fresh = toy_network()
        fresh.load_state_dict(engine.model.state_dict())
        for start in (engine.model, fresh):
            _, unpaid = said(made(start, ledger=ledger))
            assert len(unpaid) == 1 and stated in unpaid[0]


def test_a_start_without_noise_is_called_that():
    first = made(epsilon=math.inf)
    public, unpaid = said(made(copy.deepcopy(first.model)))
    assert not public and "without a privacy guarantee" in unpaid[0]
    assert said(made(first.model, epsilon=math.inf)) == ([f"{START} (Sequential)"], [])      # which promises nothing itself


def test_public_data_leave_a_public_start():
    first = made(data=Public(DATA, "made for this test"), epsilon=math.inf)
    assert not list(notes_on(first.model)) and said(made(first.model))[0]


def test_a_run_that_broke_off_leaves_its_trace_too():
    from dpft.auditing import Stopped, stopping
    model = toy_network()
    with pytest.raises(Stopped):
        made(model, optimizer=stopping(2))
    assert "trained them at epsilon 3.00" in said(made(model))[1][0]


def test_a_loop_by_hand_leaves_its_trace_and_finds_that_of_others():
    model = toy_network()
    usual = dict(epsilon=3.0, steps=2, batch_size=8, clip=0.5, accountant="rdp")
    for number in range(2):
        engine = dpft.Engine(model, None, Full(), DATA, **usual)
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        for step in engine:
            step.take(optimizer)
        assert len([one for one in engine.guarantee.uncharged if one.startswith(START)]) == number


def test_a_saved_run_is_recognised_when_it_is_loaded(tmp_path):
    first = made()
    first.save(tmp_path / "saved")
    public, unpaid = said(made(load(tmp_path / "saved", toy_network())))
    assert not public and first.guarantee.run in unpaid[0] and "epsilon 3.00" in unpaid[0]


def test_the_card_of_a_saved_run_says_so(tmp_path):
    second = made(made().model)
    second.save(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    unpaid = card.split("Accesses to private data that were not charged:")[1].split("Checked before")[0]
    assert START in unpaid and START not in card.split("Assumed to be public:")[1].split("Assumed about the arithmetic")[0]
    assert verify(tmp_path / "saved")


def under_a_new_head(run):
    "A new network, all but the head of which was copied, without the modules, from another."
    model = toy_network()
    model.load_state_dict({name: value for name, value in run.model.state_dict().items() if not name.startswith("6")}, strict=False)
    return model


def elsewhere(run):
    "One trained layer, as another part of a network of another form."
    trained = run.model[1]
    layer = nn.Linear(trained.in_features, trained.out_features)
    layer.load_state_dict(trained.state_dict())
    return nn.Sequential(nn.Flatten(), nn.Tanh(), layer, nn.Linear(layer.out_features, 3))


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("hand_on", [same_weights, under_a_new_head, elsewhere])
def test_a_ledger_knows_the_weights_again_or_some_of_them(tmp_path, average, hand_on):
    ledger = dpft.Ledger(tmp_path / "ledger.sqlite")
    first = made(ledger=ledger, average=average)
    model = hand_on(first)
    assert not list(notes_on(model))
    public, unpaid = said(made(model, ledger=ledger))
    assert not public and first.guarantee.run in unpaid[0] and "at epsilon 3.00" in unpaid[0]


@pytest.mark.parametrize("knobs", [{}, {"average": 0.9}, {"callbacks": [StopsAfter(1)], "average": 0.9}],
                         ids=["last", "average", "stopped"])
def test_only_the_weights_that_a_run_leaves_are_recorded(tmp_path, knobs):
    ledger = dpft.Ledger(tmp_path / "ledger.sqlite")
    run = made(ledger=ledger, **knobs)
    assert len(ledger.chain.file.query("SELECT 1 FROM ledger WHERE kind = 'weights'")) == 1
    assert trained_in(ledger, lambda: model_fingerprint(run.model)) == [run.guarantee.run]


@pytest.mark.parametrize("hand_on", [same_weights, lambda run: run.model, under_a_new_head, elsewhere],
                         ids=["weights", "object", "under a new head", "elsewhere"])
def test_noise_that_comes_too_late_is_refused_before_anything_is_spent(tmp_path, hand_on):
    ledger = dpft.Ledger(tmp_path / "ledger.sqlite")
    first = made(ledger=ledger, epsilon=math.inf)
    words = r"has trained this model, or a part of it, on the same data without privacy.*start from the weights before that run"
    with pytest.raises(ValueError, match=words):
        made(hand_on(first), ledger=ledger)
    assert not ledger.runs()


@pytest.mark.parametrize("method, budget", [(Full(), math.inf), (dpft.BiTFiT(), math.inf), (dpft.BiTFiT(), 3.0),
                                            (LoRA(targets=("1",)), math.inf)],
                         ids=["all", "biases", "biases privately", "lora"])
def test_what_an_earlier_run_left_as_it_was_stays_public(tmp_path, method, budget):
    "Frozen layers, layers without a gradient, and new biases that are zero."
    class Spare(nn.Sequential):
        "A network with a layer that nothing uses."

    def network():
        model = Spare(*toy_network())
        model.spare = nn.Linear(3, 3)
        torch.nn.init.eye_(model.spare.weight)
        model.forward = lambda x: nn.Sequential(*[part for name, part in model.named_children() if name != "spare"])(x)
        return model
    ledger = dpft.Ledger(tmp_path / "ledger.sqlite")
    made(network(), ledger=ledger, method=method, epsilon=budget)
    public, unpaid = said(made(network(), ledger=ledger))
    assert public and not unpaid


def test_values_are_recognised_wherever_they_are_and_equal_ones_nowhere():
    first, second = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    second[1].load_state_dict(first.state_dict())
    assert set(part_hashes(first).values()) < set(part_hashes(second).values())
    nn.init.zeros_(first.bias)
    assert list(part_hashes(first)) == ["weight"] and part_hashes(first, {id(first.bias)}) == {}
    first.weight.data[0, 0] += 1
    assert not set(part_hashes(first).values()) & set(part_hashes(second).values())
    turned = nn.Linear(4, 3)
    turned.weight.data.copy_(second[1].weight.T)
    assert part_hashes(turned)["weight"] not in part_hashes(second).values()


def test_what_a_ledger_publishes_holds_no_digest_of_weights(tmp_path):
    ledger = dpft.Ledger(tmp_path / "ledger.sqlite")
    run = made(ledger=ledger)
    run.save(tmp_path / "saved")
    fingerprint = model_fingerprint(run.model)
    assert trained_in(ledger, lambda: fingerprint) == [run.guarantee.run]
    with dpft.Ledger(tmp_path / "saved" / "ledger.sqlite", read_only=True) as published:
        kinds = {kind for kind, in published.chain.file.query("SELECT kind FROM ledger")}
    assert kinds == {"begin", "spend", "finish", "seal"}


def test_a_frozen_trunk_stays_as_public_as_it_was():
    model = toy_network()
    made(model, method=LoRA(targets=("1",)))
    noted = [name for name, module in model.named_modules() if module.__dict__.get("_trained_by")]
    assert {"", "1", "1.base_layer", "6"} <= {*noted} and all(name.startswith("1") or name in ("", "6") for name in noted)
    assert not list(notes_on(nn.Sequential(model[3], nn.Tanh()))) and list(notes_on(nn.Sequential(model[1])))


def moved(model):
    "Other modules with the same parameter objects."
    fresh = toy_network()
    for name, parameter in list(model.named_parameters()):
        home, _, own = name.rpartition(".")
        setattr(fresh.get_submodule(home), own, parameter)
    return fresh


def rebuilt(model):
    "The same model with new layers in place of those that trained."
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            fresh = nn.Linear(layer.in_features, layer.out_features)
            fresh.load_state_dict(layer.state_dict())
            model.set_submodule(name, fresh)
    return model


@pytest.mark.parametrize("hand_on", [moved, rebuilt])
def test_weights_that_move_into_other_modules_keep_their_note(hand_on):
    first = made()
    notes = list(notes_on(first.model))
    assert len(notes) == 1 and list(notes_on(hand_on(first.model))) == notes


def of_peft(model):
    from peft import LoraConfig, get_peft_model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["1"]))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("budget", [3.0, math.inf])
@pytest.mark.parametrize("model, method, merge", [
    (of_peft, Trainable(), lambda model: model.merge_and_unload()),
    (of_peft, Trainable(), lambda model: model.unload()),
    (nn.Sequential, LoRA(targets=("0.1",)), merge_lora),
    (nn.Sequential, LoRA(targets=("0.1",)), lambda model: merge_lora(model)[0][1]),
    (nn.Sequential, Adapter(2, after=("0.1",)), remove_adapters)],
    ids=["peft", "unloaded", "merge_lora", "one layer of it", "remove_adapters"])
def test_no_note_is_lost_when_what_trained_is_merged_or_taken_out(model, method, merge, budget, copied):
    first = made(model(toy_network()), method=method, epsilon=budget)
    notes = list(notes_on(first.model))
    assert [note["private"] for note in notes] == [budget < math.inf]
    assert list(notes_on(merge(copy.deepcopy(first.model) if copied else first.model))) == notes


def test_a_merge_of_what_nobody_trained_leaves_a_public_start():
    assert not list(notes_on(of_peft(toy_network()).merge_and_unload()))


def test_a_merged_model_is_no_public_start_even_where_the_ledger_is_the_same(tmp_path):
    ledger = dpft.Ledger(tmp_path / "ledger.sqlite")
    first = made(of_peft(toy_network()), method=Trainable(), epsilon=math.inf, ledger=ledger)
    public, unpaid = said(made(first.model.merge_and_unload(), ledger=ledger))
    assert not public and "without a privacy guarantee" in unpaid[0]


def test_a_file_of_parameters_with_notes_is_read_again_without_running_code(tmp_path):
    model = made().model
    torch.save(dict(model.named_parameters()), tmp_path / "weights.pt")
    again = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in model.named_parameters())


def test_a_note_on_a_model_tells_nobody_which_data_it_was():
    def facts(run):
        return [{name: value for name, value in note.items() if name != "run"} for note in notes_on(run.model)]
    assert facts(made(public_size=24)) == facts(made(data=OTHER, public_size=24))


def test_two_runs_that_finish_at_once_are_two(tmp_path):
    "The same weights may be left by two runs; both are named."
    ledger, numbers = dpft.Ledger(tmp_path / "ledger.sqlite"), itertools.count()
    names = [made(ledger=ledger, seed=next(numbers)).guarantee.run for _ in range(2)]
    for name in names * 2:
        record_weights(ledger, name, "weights")
    assert trained_in(ledger, lambda: "weights") == names


def test_a_search_is_named_with_what_it_cost_as_a_whole(tmp_path):
    "Its guarantee has the mechanisms of one of its runs."
    said = {"run": "r", "private": True, "unit": "example", "target_delta": 1e-5, "accountant": "rdp", "epsilon": 3.7651,
            "planned": [{"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 100}], "mechanisms": []}
    (tmp_path / "guarantee.json").write_text(json.dumps(said))
    assert "epsilon 3.77 and" in sentence(note_of_folder(tmp_path))


def test_the_epsilon_of_an_earlier_run_is_rounded_up():
    note = note_of("r", True, "example", 1e-5, "rdp", [{"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 100}])
    stated = float(re.search(r"epsilon ([\d.]+) and", sentence(note))[1])
    assert epsilon([SampledGaussian(**one) for one in note["mechanisms"]], 1e-5, "rdp") <= stated


@pytest.mark.parametrize("mechanisms", [[{"noise": 1.0}], ["gaussian"], [{"noise_multiplier": "one", "sample_rate": 0.1, "steps": 3}]])
def test_a_guarantee_whose_mechanisms_mean_nothing_here_is_refused_in_one_sentence(tmp_path, mechanisms):
    made().save(tmp_path)
    path = tmp_path / "guarantee.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"planned": mechanisms, "mechanisms": mechanisms}))
    with pytest.raises(ValueError, match="is a guarantee that this version cannot read"):
        note_of_folder(tmp_path)
    path.write_text(json.dumps({"epsilon": 3.0}))
    assert note_of_folder(tmp_path) is None
