"""The commands as a user types them: what they print, and how they fail."""

import dataclasses
import inspect
import json
import os
import shlex
import subprocess
import sys
from typing import get_type_hints

import pytest
import torch

from dpft import cli
from dpft.cli import core
from dpft.ledger import Ledger
from dpft.privacy import split_budget
from dpft.settings import Settings

DIGITS = ["--data", "digits", "--model", "mlp", "--limit", "200", "--no-progress", "--steps", "2", "--accountant", "rdp"]


def test_train_then_account(run, tmp_path):
    status, out, _ = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite", "--output", tmp_path / "model")
    report = out
    assert status == 0
    assert "differentially private" in out and "accuracy on dev: 0." in out and (tmp_path / "model" / "guarantee.json").exists()
    run("train", *DIGITS, "--epsilon", "2", "--method", "last-layer", "--ledger", tmp_path / "l.sqlite", "--score", "none")
    status, out, _ = run("account", tmp_path / "l.sqlite")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 4 and "BiTFiT()" in lines[1] and "LastLayer()" in lines[2] and "finished" in lines[2]
    each = [float(line.split("  delta")[0].split()[-1]) for line in lines[1:3]]
    planned, together = (float(lines[3].split(before)[1].split()[0]) for before in ("epsilon ", "began, or "))
    assert max(each) < planned < together < sum(each) and f"{each[0]:.2f}, " in report     # the report's own
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert len(ledger.runs()) == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A private run, saved, whose ledger others share."""
    folder = tmp_path_factory.mktemp("saved")
    words = ["dpft", "train", *DIGITS, "--epsilon", "4", "--ledger", str(folder / "team.sqlite"), "--who", "Anna", "--checkpoint",
             str(folder / "state"), "--output", str(folder / "model")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        cli.main.__globals__["app"](standalone_mode=False)
    return folder


def test_account_says_where_a_killed_run_stopped(run, tmp_path):
    with Ledger(tmp_path / "l.sqlite") as ledger:
        ledger.begin("killed", {"mechanisms": [{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 100, "name": "train"}],
                                "delta": 1e-3, "accountant": "rdp", "method": "BiTFiT()"})
        for _ in range(5):
            ledger.claim("killed", "train")
    status, out, _ = run("account", tmp_path / "l.sqlite")
    assert status == 0 and "not finished, 5 of 100 steps" in out
    assert json.loads(run("account", tmp_path / "l.sqlite", "--json")[1])["runs"][0]["claimed"] == {"train": 5}


def test_verify_recomputes_what_a_run_claims(run, saved):
    status, out, _ = run("verify", saved / "model")
    assert status == 0 and out.count("ok: ") >= 6 and "sealed" in out
    status, out, _ = run("verify", saved / "model", "--ledger", saved / "team.sqlite")
    assert status == 0
    status, out, _ = run("account", saved / "team.sqlite")
    assert status == 0 and "Anna" in out


def test_an_error_after_the_first_draw_says_what_the_ledger_has_charged(run, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no room\nfor it")
    monkeypatch.setattr("dpft.loop.checkpoint_is_due", fails)
    status, _, err = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite")
    assert status == 1 and err.endswith(f"dpft: RuntimeError: no room; {tmp_path / 'l.sqlite'} has charged what this run "
                                        "claimed; with checkpoint= the same call would continue it\n")


def test_a_ledger_in_the_folder_that_is_published_is_refused_before_anything_is_spent(run, tmp_path):
    """The command makes a Ledger of it, which was not looked at: it trained, could not save, and said that it had."""
    status, out, err = run("train", *DIGITS, "--epsilon", "4", "--output", tmp_path / "o1", "--ledger", tmp_path / "o1" / "l.sqlite")
    assert status == 1 and not out and err.count("\n") == 1 and "lies in the folder that is published" in err
    with Ledger(tmp_path / "o1" / "l.sqlite") as ledger:
        assert not ledger.runs()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_run_that_could_not_be_saved_is_not_said_to_be(run, tmp_path, monkeypatch, checkpoint):
    def full(*_):
        raise OSError(28, "No space left on device")
    words = ["train", *DIGITS, "--epsilon", "4", "--output", tmp_path / "o1", "--ledger", tmp_path / "l.sqlite", "--no-progress", "--seed",
             "0", *(["--checkpoint", tmp_path / "state"] if checkpoint else [])]
    with monkeypatch.context() as patch:
        patch.setattr("dpft.loop.write_model", full)
        status, out, err = run(*words)
    assert status == 1 and "saved in" not in out and "No space left" in err
    assert ("the same command saves it" if checkpoint else "start again with --checkpoint") in err
    assert sum("the run is complete" in line for line in err.splitlines()) == 1
    if checkpoint:
        status, out, _ = run(*words)
        assert status == 0 and f"saved in {tmp_path / 'o1'}" in out
        with Ledger(tmp_path / "l.sqlite") as ledger:
            assert len(ledger.runs()) == 1


def test_without_privacy_it_says_so(run):
    status, out, _ = run("train", *DIGITS, "--epsilon", "inf", "--method", "full", "--pretrain", "1")
    assert status == 0 and "No privacy guarantee" in out


@pytest.mark.parametrize("words, message", [
    (["--epsilon", "0"], "epsilon=0"), (["--delta", "0.1"], "below 1/200"), (["--batch-size", "500"], "batch_size=500"),
    (["--batch-size", "0"], "batch_size=0"), (["--method", "bitft"], "did you mean bitfit"), (["--model", "mpl"], "mlp"),
    (["--method", "nowhere.py:Mine"], "nowhere.py cannot be imported"), (["--model", "minilm"], "classifies texts"),
    (["--data", "digts"], "did you mean digits"), (["--score", "test"], "no test part"), (["--unit", "writer"], "no column 'writer'"),
    (["--option", "ratio"], "name=value"), (["--option", "ratio=1"], "BiTFiT has no option 'ratio'"), (["--output", ""], "output is empty"),
    (["--data", "sst2", "--root", "nowhere"], "nowhere"), (["--device", "abacus"], "no such device"), (["--limit", "0"], "at least 1"),
    (["--lr", "1"], "no option --lr; here it is learning_rate="), (["--gradient-checkpointing"], "gradient_checkpointing_enable()")])
def test_bad_input_ends_in_one_sentence(run, tmp_path, words, message):
    status, out, err = run("train", *DIGITS, "--epsilon", "2", "--ledger", tmp_path / "l.sqlite", *words)
    assert status and message in err and err.startswith("dpft: ") and err.count("\n") == 1 and "Traceback" not in err + out
    assert not (tmp_path / "l.sqlite").exists() or not Ledger(tmp_path / "l.sqlite").runs()


@pytest.mark.parametrize("command", ["train", "plan", "account", "verify", "quickstart", "bench", "audit"])
def test_every_flag_has_help(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0 and "--" in out
    options = [hint for name, hint in get_type_hints(getattr(cli, command), include_extras=True).items() if name != "return"]
    assert options and all(option.__metadata__[0].help for option in options)


def test_help_and_a_mistyped_option_wait_for_no_library():
    code = "import sys; sys.argv = ['dpft', {}]\nfrom dpft.cli import main\ntry:\n    main()\nexcept SystemExit: pass\n" \
           "assert not {{'torch', 'transformers', 'numpy', 'pandas', 'rich'}} & sys.modules.keys()"
    for words in ("'--help'", "'train', '--help'", "'train', '--nonsense'", "'train', '--lr', '3'"):
        done = subprocess.run([sys.executable, "-c", code.format(words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_account_refuses_what_is_no_ledger(run, tmp_path):
    assert run("account", tmp_path / "none.sqlite")[2].startswith("dpft: there is no ledger")
    (tmp_path / "text").write_text("not a ledger")
    status, _, err = run("account", tmp_path / "text")
    assert status == 1 and "ledger" in err and err.count("\n") == 1


# JSON, for programs


def test_account_and_verify_say_the_same_in_json(run, saved):
    status, out, _ = run("account", saved / "team.sqlite", "--json")
    found = json.loads(out)
    assert status == 0 and found["runs"][0]["who"] == "Anna" and found["runs"][0]["finished"] is True
    assert found["runs"][0]["epsilon"] == pytest.approx(found["epsilon"]) and found["runs"][0]["mechanisms"][0]["steps"] == 2
    _, text, _ = run("account", saved / "team.sqlite")
    assert f"together: epsilon {found['epsilon']:.2f} at delta {found['delta']:.3g} (rdp)" in text and found["accountant"] == "rdp"


def test_a_budget_admits_a_run_of_its_epsilon_and_left_takes_the_rest(run, tmp_path):
    ledger = tmp_path / "b.sqlite"
    assert run("account", ledger, "--budget", "4", "--delta", "1e-3", "--who", "Anna")[0] == 0
    status, out, err = run("train", *DIGITS[:-2], "--epsilon", "2", "--ledger", ledger, "--score", "none")
    assert status == 0 and "(2.00, 1.00e-03)-differentially private" in out, err
    assert run("train", *DIGITS[:-2], "--epsilon", "left", "--ledger", ledger, "--score", "none")[0] == 0
    status, out, err = run("train", *DIGITS[:-2], "--epsilon", "1", "--ledger", ledger, "--score", "none")
    assert status == 1 and ("nothing is left" in err or 'or epsilon="left"' in err)
    status, out, _ = run("account", ledger)
    assert "budget epsilon 4 at delta 0.001, by Anna" in out and "0% is left" in out


def test_a_plan_leaves_out_what_a_method_spends_besides_training(run):
    status, out, _ = run("plan", "--size", 1000, "--trainable", 50, "--epsilon", 2, "--steps", 20, "--batch-sizes", 100, "--method",
                         "dp-frost", "--json")
    found = json.loads(out)
    train, _ = split_budget(2.0, found["delta"], train=(0.1, 20), select=(0.02, 5), train_share=0.9, accountant="rdp")
    assert status == 0 and found["share_besides_training"] == 0.1
    assert found["recommended"]["noise_multiplier"] == pytest.approx(train, rel=1e-2)


# One place for a knob


def test_the_options_of_train_are_the_knobs_with_their_defaults(run):
    options, (_, said, _) = inspect.signature(core.train).parameters, run("train", "--help")
    assert all(f"--{name.replace('_', '-')}" in said for name in options)      # none is cut at the edge of a terminal
    for knob in dataclasses.fields(Settings):
        assert (knob.name in options) == (knob.name not in core.OBJECTS or knob.name == "columns"), knob.name
        if knob.name in options and knob.name not in core.SET_HERE:
            assert options[knob.name].default == knob.default
    assert set(core.OBJECTS) < {knob.name for knob in dataclasses.fields(Settings)}


# What is refused before anything is read or spent


@pytest.mark.parametrize("words, message", [
    (["account", "x.sqlite", "--delta", "0"], "--delta 0"), (["account", "x.sqlite", "--budget", "0", "--delta", "1e-5"], "--budget 0"),
    (["audit", "--method", "full", "--steps", "0"], "--steps 0")])
def test_zero_is_not_taken_for_nothing(run, words, message):
    status, _, err = run(*words)
    assert status == 1 and message in err and err.count("\n") == 1


def test_what_pytorch_refuses_is_one_sentence(run, monkeypatch):
    def failing(*_, **__):
        raise torch.OutOfMemoryError("out of memory\nhelp\nmore help")
    monkeypatch.setattr("dpft.loop.fine_tune", failing)
    status, _, err = run("train", *DIGITS, "--epsilon", "4")
    assert status == 1 and err == "dpft: OutOfMemoryError: out of memory\n"


@pytest.fixture
def table(tmp_path):
    def written(text):
        (tmp_path / "data").mkdir()
        for part in ("train", "validation"):
            (tmp_path / "data" / f"{part}.csv").write_text(text)
        return tmp_path / "data"
    return written


@pytest.mark.parametrize("text", ["text,label\n", "text,label\na b,0.5\nc d,1.5\n", "text,label\na b,\nc d,1\n"])
def test_a_table_that_cannot_be_learnt_from_ends_in_one_sentence(run, table, text):
    status, out, err = run("train", "--data", table(text), "--model", "minilm", "--epsilon", "4", "--score", "none", "--no-progress")
    assert status == 1 and err.splitlines()[-1].startswith("dpft: ") and err.count("dpft: ") == 1 and "Traceback" not in err + out


@pytest.mark.parametrize("said", ["2", "bad,good"])
def test_classes_that_are_said_make_texts_under_any_name_labels(run, table, monkeypatch, said):
    words = ["train", "--data", table("review,mood\na b,good\nc d,bad\n" + "c,bad\nd,good\n" * 5), "--model", "minilm", "--epsilon", "4",
             "--columns", "review,mood"]
    status, _, err = run(*words)
    assert status == 1 and "the names of the classes with --classes" in err
    seen = []
    monkeypatch.setattr("dpft.models.load_model", lambda **recipe: seen.append(recipe) or (_ for _ in ()).throw(ValueError("seen")))
    run(*words, "--classes", said)
    assert seen[0]["classes"] == ["bad", "good"] and seen[0]["kind"] == "text"


def test_the_shell_completes_commands_and_methods():
    environment = {**os.environ, "_DPFT_COMPLETE": "complete_bash", "COMP_WORDS": "dpft train --method la", "COMP_CWORD": "3"}
    words = [sys.executable, "-c", "import sys; sys.argv = ['dpft']; from dpft.cli import app; app(prog_name='dpft')"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert {"last-layer", "layer-freeze", "largest-weights"} == set(done.stdout.split())


# ---- what people bring


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a model and a tokenizer of eight words, as Transformers saves them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder, words = tmp_path_factory.mktemp("tiny"), ["[PAD]", "[UNK]", *"abcdefgh"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=10, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
                         max_position_embeddings=16)).save_pretrained(folder)
    return folder


FEW = ["--epsilon", "8", "--steps", "1", "--batch-size", "6", "--accountant", "rdp"]


def test_a_file_without_a_part_to_score_is_trained_on_and_the_run_says_what_it_reads(run, tiny, tmp_path):
    rows = "".join(f"p{row // 2},a b,{'yes' if row % 2 else 'no'}\n" for row in range(24))
    (tmp_path / "rows.csv").write_text("user,text,label\n" + rows)
    status, out, err = run("train", "--data", tmp_path / "rows.csv", "--model", tiny, "--unit", "user", *FEW)
    assert status == 0 and "accuracy on" not in out and "reads: text; label: label; unit: user; at most 16 tokens of a row\n" in err
    status, _, err = run("train", "--data", tmp_path / "rows.csv", "--model", tiny, "--score", "dev", *FEW, "--no-progress")
    assert status == 1 and "give a folder with train and validation files, or choose --score none" in err


def test_a_pretrained_network_with_batch_normalisation_is_frozen_by_an_option(run, tmp_path):
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, embedding_size=4, hidden_sizes=[4], depths=[1],
                                                      layer_type="basic"))
    with torch.no_grad():
        model.train()(torch.randn(8, 1, 8, 8))
    model.save_pretrained(tmp_path / "model")
    words = ["train", "--data", "digits", "--limit", "24", "--model", tmp_path / "model", *FEW]
    status, _, err = run(*words)
    assert status == 1 and err.splitlines()[-1].count("freeze_batchnorm(model)")
    status, out, err = run(*words, "--freeze-batchnorm")
    assert status == 0 and "statistics" in out, err


def test_the_records_of_the_quick_start_can_be_drawn_again(run, monkeypatch, tmp_path):
    """What a figure that lacks its records advises is done as it says, and the figure is there."""
    from dpft.book.evidence import EXPERIMENTS
    from dpft.book.experiments import Experiment, read_records, results_file, settings_in
    kept = [entry for entry in read_records(results_file("quickstart")) if entry["seed"] == 0]
    monkeypatch.setitem(EXPERIMENTS, "quickstart", Experiment(
        "?", lambda: map(settings_in, kept), lambda run: next({"metrics": e["metrics"]} for e in kept if settings_in(e) == run), ""))
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path / "mine"))
    draw = ("figures", "quickstart", "--output", tmp_path / "drawn")
    status, out, _ = run(*draw)
    advice = out.splitlines()[0].partition("; ")[2].removesuffix(" makes them.")
    assert status == 0 and "skipped" in out and advice == "dpft run quickstart"
    assert run(*shlex.split(advice)[1:], "--workers", "1")[0] == 0
    status, out, _ = run(*draw)
    assert status == 0 and "skipped" not in out and (tmp_path / "drawn" / "quickstart.svg").exists()
