"""Experiments that continue where they stopped, the grids of the evidence, and runs that branch off a common trunk."""

import inspect
import itertools
import json
import os

import pytest
import torch

from dpft import fine_tune
from dpft.book import evidence, experiments
from dpft.book.evidence import attacks, freezing, frost
from dpft.book.evidence.protocol import STUDIES
from dpft.book.experiments import Experiment, measured_run, read_records, run_experiment, with_fresh_head
from dpft.book.provenance import is_stale
from dpft.data import VOCABULARY, Public, TableData, Task, TensorData
from dpft.freezing import layers
from dpft.models import load_model
from dpft.processes import own_device
from dpft.registry import method_from
from dpft.tasks import load_data

TINY = {"data": "digits", "model": "mlp", "method": "LastLayer", "target_epsilon": 8.0, "steps": 2, "batch_size": 64, "accountant": "rdp"}


def grid_of(count, **more):
    return Experiment("?", lambda full: ({**TINY, **more, "seed": seed} for seed in range(count)), measured_run, "nothing")


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


def test_a_stopped_experiment_continues_and_equals_the_unbroken_one(tmp_path):
    whole = list(run_experiment("e", grid_of(3), tmp_path / "whole.jsonl"))
    broken = run_experiment("e", grid_of(3), tmp_path / "broken.jsonl")
    next(broken)
    broken.close()
    assert len(read_records(tmp_path / "broken.jsonl")) == 1                 # what was made is there, though the run was stopped
    again = list(run_experiment("e", grid_of(3), tmp_path / "broken.jsonl"))
    assert again[0] is None and None not in again[1:]
    drop = {"seconds", "peak_memory_mib"}
    same = [{k: v for k, v in entry.items() if k not in drop} for entry in read_records(tmp_path / "broken.jsonl")]
    assert same == [{k: v for k, v in json.loads(json.dumps(entry)).items() if k not in drop} for entry in whole]


def test_only_equal_settings_are_skipped(tmp_path):
    file = tmp_path / "r.jsonl"
    list(run_experiment("e", grid_of(1), file))
    assert list(run_experiment("e", grid_of(1), file)) == [None]
    assert None not in list(run_experiment("e", grid_of(1, clip=0.2), file))
    assert None not in list(run_experiment("e", grid_of(1, clip=0.3, clipping="automatic"), file))
    assert None not in list(run_experiment("e", grid_of(1, clip=0.3), file))     # another run: it has a setting less
    assert list(run_experiment("e", grid_of(1, clip=0.3), file)) == [None]
    assert None not in list(run_experiment("other", grid_of(1), file))
    assert list(run_experiment("e", grid_of(2), file, wanted=lambda settings: settings["seed"] > 5)) == []
    assert len(read_records(file)) == 5


def test_a_record_tells_where_it_comes_from(tmp_path):
    entry = next(run_experiment("e", grid_of(1), tmp_path / "r.jsonl"))
    device = "CPU" if own_device(None) == "cpu" else torch.cuda.get_device_name()
    assert entry["reduced"] and entry["peak_memory_mib"] > 50 and entry["device"].startswith(device) and entry["epsilon"] <= 8
    assert not is_stale(entry) and is_stale({**entry, "source_hash": "0" * 16}) and is_stale({})
    assert next(run_experiment("e", grid_of(1), tmp_path / "f.jsonl", full=True))["reduced"] is False


def test_held_out_rows_leave_the_training_data_and_nothing_else_is_scored(monkeypatch):
    whole = experiments.prepared_task("digits", "mlp")
    part = experiments.prepared_task("digits", "mlp", held_out=100)
    assert len(part.dev) == 100 and len(part.train) == len(whole.train) - 100 and part.test is None
    images = {image.numpy().tobytes() for image, _ in part.train}
    assert sum(image.numpy().tobytes() in images for image, _ in part.dev) <= 2    # equal pictures may occur twice in the data
    assert set(measured_run({**TINY, "held_out": 100, "seed": 0})["metrics"]) == {"accuracy"}


def test_wrong_settings_and_methods_within_methods():
    with pytest.raises(ValueError, match="'rate' is not an argument"):
        measured_run({**TINY, "rate": 1.0})
    assert repr(method_from("DPFrost", {"ratio": 0.25})).startswith("DPFrost(ratio=0.25")


def test_a_new_head_on_trained_weights():
    trained, fresh = load_model("vit-small", 100, "image", (3, 32, 32), seed=1), load_model("vit-small", 10, "image", (3, 32, 32), seed=2)
    head = {name: value.clone() for name, value in fresh.state_dict().items() if "classifier" in name}
    model = with_fresh_head(trained, fresh)
    for name, value in model.state_dict().items():
        assert torch.equal(value, head[name] if name in head else trained.state_dict()[name]), name


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", sorted(   # the others wait for tuning: test_protocol
    set(evidence.EXPERIMENTS) - {*STUDIES, "digits-rates", "language-texts", "frost-design-again", "frost-design-text"}))
def test_every_grid_is_json_without_repetitions_and_its_settings_exist(name, full, tuned_file):
    grid = list(evidence.EXPERIMENTS[name].grid(full))
    assert len({json.dumps(settings, sort_keys=True) for settings in grid}) == len(grid) > 0
    known = {*experiments.OWN, *inspect.signature(fine_tune).parameters, "label", "timed_steps"}
    for settings in grid:
        assert json.loads(json.dumps(settings)) == settings
        if name.startswith("frost"):
            assert set(settings) <= known
            method_from(settings["method"], settings["options"])


def test_tuning_takes_the_best_and_says_when_there_is_none(tuned_file, tmp_path):
    assert frost.tuned(False)["DPFrost"] == {"learning_rate": 1e-3, "options": {"ratio": 0.25}}
    (tmp_path / "frost-tuning.jsonl").unlink()
    with pytest.raises(ValueError, match="dpft run frost-tuning --full"):
        frost.tuned(True)


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


def test_a_trunk_that_was_stopped_goes_on_and_serves_other_processes(tiny_fashion, tmp_path):
    whole = freezing.trunk(tiny_fashion, [2, 30], 0)
    freezing._trunk.cache_clear()
    experiments.keep_unfinished(tmp_path / "unfinished")
    try:
        model, task = freezing.fresh(tiny_fashion, 0)
        shared = {name: tiny_fashion[name] for name in freezing.SHARED if name in tiny_fashion}
        folder = freezing._trunk_folder(json.dumps(shared), (2, 30), 0)
        names = [name for name, _ in model.named_parameters()]
        for t in freezing.walk(model, task, names, tiny_fashion, 30, 0, folder / "state"):
            if t == 2:
                freezing.keep_state(folder / "2.safetensors", freezing.state_of(model))
            if t == 27:
                break
        model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
        again = freezing.trunk(tiny_fashion, [2, 30], 0)
        freezing._trunk.cache_clear()
        kept = freezing.trunk(tiny_fashion, [2, 30], 0)
    finally:
        experiments.keep_unfinished(None)
    for t, state in whole.items():
        for found in (again, kept):
            assert all(torch.equal(found[t][name], value) for name, value in state.items()), t


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


def test_the_command_lists_runs_and_continues(run, monkeypatch, tmp_path):
    monkeypatch.setitem(evidence.EXPERIMENTS, "tiny", grid_of(2))
    status, out, _ = run("run")
    assert status == 0 and all(name in out for name in evidence.EXPERIMENTS)
    for expected in ("2 runs made, 0 there already", "0 runs made, 2 there already"):
        status, out, _ = run("run", "tiny", "--workers", 1, "--output", tmp_path)
        assert status == 0 and expected in out
    status, out, _ = run("run", "tiny", "--workers", 1, "--output", tmp_path, "--again", "--method", "LastLayer")
    assert "2 runs made" in out and len(read_records(tmp_path / "tiny.jsonl")) == 2
    for words, message in ((("run", "tinny"), "did you mean tiny"), (("run", "tiny", "--method", "Full"), "no such runs")):
        status, _, err = run(*words, "--output", tmp_path)
        assert status != 0 and message in err and err.count("\n") == 1


def test_what_runs_stand_on_is_looked_for_where_their_records_go(run, monkeypatch, tmp_path):
    monkeypatch.setenv("DPFT_RESULTS", "elsewhere")
    status, _, err = run("run", "digits", "--plan", "--output", tmp_path)     # it has a tuning among the records of the book
    assert status == 1 and str(tmp_path / "digits-tuning.jsonl") in err and "make it first" in err
    assert os.environ["DPFT_RESULTS"] == "elsewhere"


@pytest.fixture
def pair(monkeypatch):
    "An experiment of two methods with two seeds each, whose runs take no time."
    its = Experiment("?", lambda full: ({**TINY, "method": method, "seed": seed} for method in ("Full", "LastLayer") for seed in range(2)),
                     lambda settings: {"metrics": {"accuracy": 0.5}}, "nothing")
    monkeypatch.setitem(evidence.EXPERIMENTS, "pair", its)


@pytest.mark.parametrize("words, message", [
    (["--method", "Ful"], "no such runs"), (["--data", "digit"], "no such runs"), (["--plan"], "leave one of them out")])
def test_a_wrong_choice_of_what_to_begin_anew_removes_nothing(run, pair, tmp_path, words, message):
    run("run", "pair", "--workers", 1, "--output", tmp_path)
    before = (tmp_path / "pair.jsonl").read_bytes()
    status, _, err = run("run", "pair", "--workers", 1, "--output", tmp_path, "--again", *words)
    assert status == 1 and message in err and err.count("\n") == 1
    assert (tmp_path / "pair.jsonl").read_bytes() == before and len(read_records(tmp_path / "pair.jsonl")) == 4


def test_only_the_chosen_runs_are_begun_anew(run, pair, tmp_path):
    file = tmp_path / "pair.jsonl"
    run("run", "pair", "--workers", 1, "--output", tmp_path)
    other = {**read_records(file)[0], "seed": 7}                              # of the method, but of another grid
    experiments.write_records(file, [other])
    before = read_records(file)
    status, out, _ = run("run", "pair", "--workers", 1, "--output", tmp_path, "--again", "--method", "Full")
    assert status == 0 and "2 runs made, 0 there already" in out
    made = read_records(file)
    assert made[:3] == [*before[2:4], other] and [(e["method"], e["seed"]) for e in made[3:]] == [("Full", 0), ("Full", 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["pair.jsonl"]
    status, out, _ = run("run", "pair", "--workers", 1, "--output", tmp_path, "--again")  # without a choice the file begins anew
    assert "4 runs made, 0 there already" in out and len(read_records(file)) == 4
    experiments.write_records(file, [{**before[0], "reduced": False}])                    # the other grid's stay
    run("run", "pair", "--workers", 1, "--output", tmp_path, "--again")
    assert sorted(entry["reduced"] for entry in read_records(file)) == [False, True, True, True, True]


def test_data_from_elsewhere_is_left_out_unless_it_is_named(run, monkeypatch, tmp_path):
    both = Experiment("?", lambda full: ({**TINY, "data": data, "seed": 0} for data in ("digits", "far")),
                      lambda settings: {"metrics": {"where": settings["data"]}}, "nothing", ("far",))
    monkeypatch.setitem(evidence.EXPERIMENTS, "both", both)
    run("run", "both", "--output", tmp_path)
    assert [entry["data"] for entry in read_records(tmp_path / "both.jsonl")] == ["digits"]
    run("run", "both", "--output", tmp_path, "--data", "far")
    assert [entry["data"] for entry in read_records(tmp_path / "both.jsonl")] == ["digits", "far"]
    kinds = {settings["data"] for settings in evidence.EXPERIMENTS["lf-table1"].grid(False)}
    assert kinds == {"mnist", "fashion_mnist"} and evidence.EXPERIMENTS["lf-table1"].elsewhere == ("mnist",)


def test_the_last_steps_of_the_table_lie_within_each_run():
    for full, settings in itertools.chain.from_iterable(((full, s) for s in freezing.table_grid(full)) for full in (False, True)):
        assert settings["steps"] - settings["last"] in settings["stops"], (full, settings)


def test_the_wide_resnet_keeps_its_budget_and_freezes_two_groups_of_three():
    for settings in freezing.wide_grid(False):
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


def test_two_processes_may_make_the_same_folder(tmp_path):
    def made(name, content):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(content)
        return tmp_path / name
    experiments.put_in_place(made("model.1", "first"), tmp_path / "model")
    experiments.put_in_place(made("model.2", "second"), tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(OSError):
        experiments.put_in_place(made("model.3", "third"), tmp_path / "nowhere" / "model")
    assert (tmp_path / "model.3").exists()


def test_public_data_among_the_settings_is_no_obstacle_to_a_kept_run(tmp_path):
    def folder(rows, source="a corpus"):
        public = Public(TensorData(torch.arange(float(rows))[:, None], torch.zeros(rows, dtype=torch.long)), source)
        with experiments.unfinished({"options": {"relevance_data": public}}) as state:
            return state
    experiments.keep_unfinished(tmp_path)
    try:
        assert folder(3) == folder(3)
        assert len({folder(3), folder(4), folder(3, "another")}) == 3
    finally:
        experiments.keep_unfinished(None)


def test_a_task_of_texts_states_each_public_fact_once_and_keeps_its_own_list(monkeypatch):
    rows = TableData({"text": ["a good film"] * 4, "label": [0, 1, 0, 1]})
    task = Task("reviews", "text", rows, rows, classes=("no", "yes"), columns=("text", "label"), assumed_public=[VOCABULARY])
    monkeypatch.setattr(experiments, "load_data", lambda name, limit: task)
    experiments.prepared_task.cache_clear()
    assert experiments.prepared_task("reviews", "minilm").assumed_public == [VOCABULARY]
    assert task.assumed_public == [VOCABULARY]
    experiments.prepared_task.cache_clear()
