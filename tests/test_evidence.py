"""Experiments that continue where they stopped, the grids of the evidence, and runs that branch off a common trunk."""

import inspect
import json

import pytest
import torch

from dpft import fine_tune
from dpft.book import evidence, experiments
from dpft.book.evidence import attacks, freezing, frost
from dpft.book.evidence.protocol import STUDIES
from dpft.book.experiments import measured_run, with_fresh_head
from dpft.data import VOCABULARY, TableData, Task, TensorData
from dpft.freezing import layers
from dpft.models import load_model
from dpft.registry import method_from
from dpft.tasks import load_data

TINY = {"data": "digits", "model": "mlp", "method": "LastLayer", "target_epsilon": 8.0, "steps": 2, "batch_size": 64, "accountant": "rdp"}


def attacked(method):
    task = load_data("digits", limit=64)
    model = load_model("mlp", len(task.classes), task.kind, task.image_shape)
    settings = {"method": method, "target_epsilon": 8.0, "steps": 2, "batch_size": 16, "accountant": "rdp", "learning_rate": 1e-2}
    return attacks.attacked_run(settings, model, task.train, attacks.PICTURES)


@pytest.mark.parametrize("module, work", [
    (experiments, lambda: measured_run({**TINY, "seed": 0})),
    (freezing, lambda: freezing.fresh({"data": "digits", "model": "mlp", "limit": 64}, 0)),
    (attacks, lambda: attacked("Full"))], ids=["a run", "a trunk", "an attacked run"])
def test_models_are_where_this_machine_trains(module, work, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "own_device", lambda device: asked.append(device) or "cpu")
    work()
    assert asked == [None]


def test_held_out_rows_leave_the_training_data_and_nothing_else_is_scored(monkeypatch):
    whole = experiments.prepared_task("digits", "mlp")
    part = experiments.prepared_task("digits", "mlp", held_out=100)
    assert len(part.dev) == 100 and len(part.train) == len(whole.train) - 100 and part.test is None
    images = {image.numpy().tobytes() for image, _ in part.train}
    assert sum(image.numpy().tobytes() in images for image, _ in part.dev) <= 2    # equal pictures may occur twice in the data
    assert set(measured_run({**TINY, "held_out": 100, "seed": 0})["metrics"]) == {"accuracy"}


def test_a_new_head_on_trained_weights():
    trained, fresh = load_model("vit-small", 100, "image", (3, 32, 32), seed=1), load_model("vit-small", 10, "image", (3, 32, 32), seed=2)
    head = {name: value.clone() for name, value in fresh.state_dict().items() if "classifier" in name}
    model = with_fresh_head(trained, fresh)
    for name, value in model.state_dict().items():
        assert torch.equal(value, head[name] if name in head else trained.state_dict()[name]), name


@pytest.mark.parametrize("name", sorted(   # the others wait for tuning: test_protocol
    set(evidence.EXPERIMENTS) - {*STUDIES, "digits-rates", "language-texts", "frost-design-again", "frost-design-text"}))
def test_every_grid_is_json_without_repetitions_and_its_settings_exist(name, tuned_file):
    its = evidence.EXPERIMENTS[name]
    grid = list(its.grid()) + list((its.full or list)())
    assert len({json.dumps(settings, sort_keys=True) for settings in grid}) == len(grid) > 0
    known = {*experiments.OWN, *inspect.signature(fine_tune).parameters, "label", "timed_steps"}
    for settings in grid:
        assert json.loads(json.dumps(settings)) == settings
        if name.startswith("frost"):
            assert set(settings) <= known
            method_from(settings["method"], settings["options"])


def test_tuning_takes_the_best_and_says_when_there_is_none(tuned_file, tmp_path):
    assert frost.tuned()["DPFrost"] == {"learning_rate": 1e-3, "options": {"ratio": 0.25}}
    (tmp_path / "frost-tuning.jsonl").unlink()
    with pytest.raises(ValueError, match="dpft run frost-tuning"):
        frost.tuned()


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
    for settings in (*freezing.table_grid(), *freezing.five_seeds(True)):
        assert settings["steps"] - settings["last"] in settings["stops"], settings


def test_the_wide_resnet_keeps_its_budget_and_freezes_two_groups_of_three():
    for settings in freezing.wide_grid():
        assert settings["steps"] - settings["last"] in settings["stops"]
        assert 1.9 < freezing.spent(settings, settings["steps"], 50_000) <= settings["target_epsilon"]
    names = [layer.name for layer in layers(load_model("wrn-16-4"))]
    assert names[freezing.FROZEN["wrn-16-4"]:] == ["group3.0", "group3.1", "head"]


def test_a_layer_is_at_no_distance_from_where_it_ends(tiny_fashion, monkeypatch):
    monkeypatch.setattr(freezing, "activations", lambda model, data, names, pool: {
        name: torch.cat([p.detach().flatten()[:60].view(20, 3) for n, p in model.named_parameters() if n == f"{name}.weight"])
        for name in names})
    found = freezing.similarity_entry({**tiny_fashion, "stops": [1, 4], "seed": 0})["distances"]
    assert max(found["4"].values()) < 1e-6 and all(0 <= value <= 1 for value in found["1"].values()) and max(found["1"].values()) > 1e-6


def test_a_task_of_texts_states_each_public_fact_once_and_keeps_its_own_list(monkeypatch):
    rows = TableData({"text": ["a good film"] * 4, "label": [0, 1, 0, 1]})
    task = Task("reviews", "text", rows, rows, classes=("no", "yes"), columns=("text", "label"), assumed_public=[VOCABULARY])
    monkeypatch.setattr(experiments, "load_data", lambda name, limit: task)
    experiments.prepared_task.cache_clear()
    assert experiments.prepared_task("reviews", "minilm").assumed_public == [VOCABULARY]
    assert task.assumed_public == [VOCABULARY]
    experiments.prepared_task.cache_clear()
