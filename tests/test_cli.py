"""The commands as a user types them: what they print, and how they fail."""

import json
import os
import subprocess
import sys
from typing import get_type_hints

import pytest

import dpft as dpft_package
from dpft import cli
from dpft.models import load_tokenizer
from dpft.privacy import Ledger

DIGITS = ["--data", "digits", "--model", "mlp", "--limit", "200", "--no-progress", "--steps", "2", "--accountant", "rdp"]


def dpft(*words, monkeypatch, capsys):
    """Run the program in this process: exit status, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["dpft", *map(str, words)])
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code or 0
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *words: dpft(*words, monkeypatch=monkeypatch, capsys=capsys)


def test_train_then_account(run, tmp_path):
    status, out, _ = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite", "--output", tmp_path / "model")
    assert status == 0
    assert "differentially private" in out and "accuracy on dev: 0." in out and (tmp_path / "model" / "guarantee.json").exists()
    run("train", *DIGITS, "--epsilon", "2", "--method", "last-layer", "--ledger", tmp_path / "l.sqlite", "--score", "none")
    status, out, _ = run("account", tmp_path / "l.sqlite")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 4 and "BiTFiT()" in lines[1] and "LastLayer()" in lines[2] and "finished" in lines[2]
    each = [float(line.split()[-1]) for line in lines[1:3]]
    together = float(lines[3].split("epsilon ")[1].split()[0])
    assert max(each) < together < sum(each)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert len(ledger.runs()) == 2


@pytest.mark.skipif("DPFT_DATA" not in os.environ, reason="needs the SST-2 files: set DPFT_DATA to their folder")
def test_the_main_job_on_a_slice_of_real_text(run, tmp_path):
    status, out, _ = run("train", "--data", "sst2", "--model", "minilm", "--method", "bitfit", "--epsilon", "2", "--limit", "2000",
                         "--epochs", "1", "--batch-size", "250", "--clip", "1", "--no-progress", "--output", tmp_path)
    assert status == 0 and "(2.00, 2.50e-04)-differentially private" in out and "accuracy on dev: 0." in out
    saved = dpft_package.load(tmp_path)
    tokens = load_tokenizer(str(tmp_path))(["a delight", "a mess"], return_tensors="pt", padding=True)
    assert saved(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits.shape == (2, 2)


def test_without_privacy_it_says_so(run):
    status, out, _ = run("train", *DIGITS, "--epsilon", "inf", "--method", "full", "--pretrain", "1")
    assert status == 0 and "No privacy guarantee" in out


@pytest.mark.parametrize("words, message", [
    (["--epsilon", "0"], "epsilon=0"), (["--epsilon", "0.0001"], "epsilon"), (["--epsilon", "2", "--delta", "2"], "delta=2"),
    (["--epsilon", "2", "--delta", "0.1"], "below 1/200"), (["--epsilon", "2", "--batch-size", "500"], "batch_size=500"),
    (["--epsilon", "2", "--method", "bitft"], "did you mean bitfit"), (["--epsilon", "2", "--model", "mpl"], "mlp"),
    (["--epsilon", "2", "--data", "digts"], "did you mean digits"), (["--epsilon", "2", "--score", "test"], "no test part"),
    (["--epsilon", "2", "--score", "train"], "score='train'"), ([], "either epsilon or noise_multiplier"),
    (["--epsilon", "2", "--data", "sst2", "--root", "nowhere"], "nowhere"), (["--epsilon", "2", "--clip", "-1"], "clip=-1"),
])
def test_bad_input_ends_in_one_sentence(run, words, message):
    status, out, err = run("train", *DIGITS, *words)
    assert status == 1 and message in err and err.startswith("dpft: ") and err.count("\n") == 1 and "Traceback" not in err + out


@pytest.mark.parametrize("command", ["train", "account", "quickstart", "bench"])
def test_every_flag_has_help(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0 and "--" in out
    options = [hint for name, hint in get_type_hints(getattr(cli, command), include_extras=True).items() if name != "return"]
    assert options and all(option.__metadata__[0].help for option in options)


@pytest.mark.parametrize("words, message", [
    (["--lengths", "a"], "lengths='a'"), (["--width", "30"], "multiple of 32"), (["--rows", "0"], "at least 1")])
def test_bench_refuses_what_it_cannot_measure(run, words, message):
    status, _, err = run("bench", *words)
    assert status == 1 and message in err


def test_bench_measures_all_contenders(run, tmp_path):
    small = ["--lengths", "16", "--rows", "2", "--repeats", "2", "--width", "32", "--layers", "1"]
    status, out, _ = run("bench", *small, "--output", tmp_path)
    found = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    assert status == 0 and "held / plain" in out
    assert [(entry["trains"], entry["who"]) for entry in found] == [(t, w) for t in ("biases", "full") for w in ("plain", "opacus", "dpft")]
    held = {(entry["trains"], entry["who"]): entry["held_ratio"] for entry in found}
    assert held["biases", "dpft"] <= 1.02 < held["biases", "opacus"]


def test_account_refuses_what_is_no_ledger(run, tmp_path):
    assert run("account", tmp_path / "none.sqlite")[2].startswith("dpft: there is no ledger")
    (tmp_path / "text").write_text("not a ledger")
    status, _, err = run("account", tmp_path / "text")
    assert status == 1 and "ledger" in err and err.count("\n") == 1


def test_as_a_module_and_its_version():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    out = subprocess.run([sys.executable, "-m", "dpft", "--version"], capture_output=True, text=True, env=environment)
    assert out.returncode == 0 and out.stdout.startswith("dpft 0.")


def test_importing_the_package_stays_light():
    script = "import sys, dpft; print([name for name in ('torch', 'transformers', 'opacus', 'datasets') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"
