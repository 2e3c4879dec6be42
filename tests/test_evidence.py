"""Runs that branch off a common trunk, and where the models of all runs are."""

import json

import pytest
import torch

from dpft.book import experiments
from dpft.book.evidence import EXPERIMENTS, attacks, freezing
from dpft.book.experiments import measured_run
from dpft.data import TensorData
from dpft.freezing import layers
from dpft.models import load_model
from dpft.tasks import load_data

TINY = {"data": "digits", "model": "mlp", "method": "LastLayer", "target_epsilon": 8.0, "steps": 2, "batch_size": 64, "accountant": "rdp"}


def attacked(method):
    task = load_data("digits", limit=64)
    model = load_model("mlp", len(task.classes), task.kind, task.image_shape)
    settings = {"method": method, "target_epsilon": 8.0, "steps": 2, "batch_size": 16, "accountant": "rdp", "learning_rate": 1e-2}
    return attacks.attacked_run(settings, model, task.train)


@pytest.mark.parametrize("module, work", [
    (experiments, lambda: measured_run({**TINY, "seed": 0})),
    (freezing, lambda: freezing.fresh({"data": "digits", "model": "mlp", "limit": 64}, 0)),
    (attacks, lambda: attacked("Full"))], ids=["a run", "a trunk", "an attacked run"])
def test_models_are_where_this_machine_trains(module, work, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "own_device", lambda device: asked.append(device) or "cpu")
    work()
    assert asked == [None]


@pytest.fixture
def tiny_fashion(monkeypatch):
    "Sixty-four noisy pictures of 16 x 16, two classes."
    torch.manual_seed(0)
    labels = torch.arange(64) % 10
    images = (torch.rand(64, 1, 16, 16) * 80 + labels[:, None, None, None] * 15).to(torch.uint8)
    task = experiments.prepared_task("digits", "mlp")
    data = TensorData(images, labels, 255.0)
    from dataclasses import replace
    monkeypatch.setattr(freezing, "prepared_task", lambda *_: replace(task, train=data, dev=data))
    freezing._trunk.cache_clear()
    yield {"data": "tiny", "model": "tempered-cnn", "noise_multiplier": 2.0, "batch_size": 16, "clip": 1.0, "learning_rate": 0.5}
    freezing._trunk.cache_clear()


def test_the_trunk_passes_all_stops_and_a_branch_trains_only_what_is_kept(tiny_fashion):
    states = freezing.trunk(tiny_fashion, [2, 5], 0)
    assert sorted(states) == [2, 5]
    alone = freezing.trunk({**tiny_fashion, "limit": 64}, [5], 0)                # the same run without the earlier stop
    assert all(torch.equal(alone[5][name], states[5][name]) for name in states[5])
    model = freezing.branch(tiny_fashion, states[2], [2, 3], 3, seed=7)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, states[2][name])}
    kept = {id(p) for layer in layers(model)[2:] for p in layer.parameters}
    assert moved == {name for name, p in model.named_parameters() if id(p) in kept}


def test_a_cell_of_the_table_states_what_the_whole_run_spent(tiny_fashion):
    settings = {**tiny_fashion, "steps": 5, "last": 3, "stops": [2, 5], "seed": 0}
    frozen, plain = (freezing.table_entry({**settings, "last": last}) for last in (3, 0))
    assert frozen["epsilon"] == plain["epsilon"] == freezing.spent(tiny_fashion, 5, 64)
    assert freezing.spent(freezing.ROWS["fashion_mnist"][0], 187, 60_000) == pytest.approx(0.9993, abs=2e-3)   # as the paper accounts


def test_angles_are_looked_at_before_and_after_freezing_without_touching_the_run(tiny_fashion, monkeypatch):
    settings = {**tiny_fashion, "steps": 6, "after": 4, "every": 2, "seed": 0}
    looked = freezing.angle_entry(settings)
    assert [(look["step"], look["frozen"]) for look in looked["series"]] == [(2, False), (4, False), (6, True)]
    for look in looked["series"]:
        assert look["clipped_after"] <= look["clipped_before"] <= 16
        for layer in look["before"]:
            assert look["after"][layer]["strength"] >= 0
    assert looked["aligned_with"] == "the full gradient"                         # of the batch's own sum random gradients pass as well
    json.dumps(looked, allow_nan=True)
    monkeypatch.setattr(freezing, "_look", lambda *_: {})
    assert freezing.angle_entry(settings)["metrics"] == looked["metrics"]        # the diagnostics change nothing


def test_the_last_steps_of_the_table_lie_within_each_run():
    for settings in (*freezing.five_seeds(False), *freezing.five_seeds(True), *freezing.paired_grid()):
        assert settings["steps"] - settings["last"] in settings["stops"], settings


def test_a_layer_is_at_no_distance_from_where_it_ends(tiny_fashion, monkeypatch):
    monkeypatch.setattr(freezing, "activations", lambda model, data, names, pool: {
        name: torch.cat([p.detach().flatten()[:60].view(20, 3) for n, p in model.named_parameters() if n == f"{name}.weight"])
        for name in names})
    found = freezing.similarity_entry({**tiny_fashion, "stops": [1, 4], "seed": 0})["distances"]
    assert max(found["4"].values()) < 1e-6 and all(0 <= value <= 1 for value in found["1"].values()) and max(found["1"].values()) > 1e-6


def test_runs_that_share_a_trunk_are_of_one_group():
    for name, size in (("lf-table1", 21), ("lf-layers", 9)):
        groups = {}
        for settings in EXPERIMENTS[name].rows(name)[0]:
            groups.setdefault(EXPERIMENTS[name].group(settings), []).append(settings)
        assert max(map(len, groups.values())) <= size and all(len({run["seed"] for run in runs}) == 1 for runs in groups.values())
