"""The commands as a user types them: what they print, and how they fail."""

import dataclasses
import inspect
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import asdict, replace
from typing import get_type_hints

import pytest
import torch

import dpft as dpft_package
from dpft import cli
from dpft.cli import core
from dpft.ledger import Ledger
from dpft.models import load_tokenizer
from dpft.privacy import SampledGaussian, split_budget
from dpft.registry import method_named
from dpft.settings import Settings
from dpft.tasks import LOCAL, sst2

DIGITS = ["--data", "digits", "--model", "mlp", "--limit", "200", "--no-progress", "--steps", "2", "--accountant", "rdp"]


def test_train_then_account(run, tmp_path):
    status, out, _ = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite", "--output", tmp_path / "model")
    assert status == 0
    assert "differentially private" in out and "accuracy on dev: 0." in out and (tmp_path / "model" / "guarantee.json").exists()
    run("train", *DIGITS, "--epsilon", "2", "--method", "last-layer", "--ledger", tmp_path / "l.sqlite", "--score", "none")
    status, out, _ = run("account", tmp_path / "l.sqlite")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 5 and "BiTFiT()" in lines[1] and "LastLayer()" in lines[2] and "finished" in lines[2]
    each = [float(line.split()[-1]) for line in lines[1:3]]
    together = float(lines[3].split("epsilon ")[1].split()[0])
    planned = float(lines[4].split()[0].strip("("))
    assert max(each) < planned < together < sum(each)
    assert lines[3].endswith("however the runs were chosen") and "if all were planned before the first began" in lines[4]
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


def test_verify_recomputes_what_a_run_claims(run, saved):
    status, out, _ = run("verify", saved / "model")
    assert status == 0 and out.count("ok: ") >= 6 and "sealed" in out
    status, out, _ = run("verify", saved / "model", "--ledger", saved / "team.sqlite")
    assert status == 0
    status, out, _ = run("account", saved / "team.sqlite")
    assert status == 0 and "Anna" in out


def test_the_checkpoint_folder_is_empty_at_the_end(saved):
    assert list((saved / "state").iterdir()) == []


def test_an_error_after_the_first_draw_says_what_the_ledger_has_charged(run, tmp_path, monkeypatch):
    from dpft import loop

    def fails(loop, step):
        raise RuntimeError("no room\nfor it")
    monkeypatch.setattr(loop, "entry_of", fails)
    status, _, err = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite")
    assert status == 1 and err.endswith(f"dpft: RuntimeError: no room; {tmp_path / 'l.sqlite'} has charged the plan of this run; "
                                        "with --checkpoint the same command would continue it\n")


def test_a_ledger_in_the_folder_that_is_published_is_refused_before_anything_is_spent(run, tmp_path):
    """The command makes a Ledger of it, which was not looked at: it trained, could not save, and said that it had."""
    status, out, err = run("train", *DIGITS, "--epsilon", "4", "--output", tmp_path / "o1", "--ledger", tmp_path / "o1" / "l.sqlite")
    assert status == 1 and not out and err.count("\n") == 1 and "lies in the folder that is published" in err and "--ledger" in err
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
    assert ("and with room the same command saves it" if checkpoint else "start again with --checkpoint") in err
    assert sum("the run is complete" in line for line in err.splitlines()) == 1
    if checkpoint:
        status, out, _ = run(*words)
        assert status == 0 and f"saved in {tmp_path / 'o1'}" in out
        with Ledger(tmp_path / "l.sqlite") as ledger:
            assert len(ledger.runs()) == 1


@pytest.mark.parametrize("change", [
    lambda claim: claim["mechanisms"][0].update(noise_multiplier=9.9), lambda claim: claim["mechanisms"][0].update(steps=1),
    lambda claim: claim.update(mechanisms=[]), lambda claim: claim.update(target_delta=1e-2), lambda claim: claim.update(unit="person"),
    lambda claim: claim.update(uncharged=[]), lambda claim: claim.update(accountant="prv"), lambda claim: claim.update(clip=0.01)])
def test_verify_refuses_a_changed_guarantee(run, saved, tmp_path, change):
    shutil.copytree(saved / "model", tmp_path / "model")
    claim = json.loads((tmp_path / "model" / "guarantee.json").read_text())
    change(claim)
    (tmp_path / "model" / "guarantee.json").write_text(json.dumps(claim))
    status, out, err = run("verify", tmp_path / "model")
    assert status == 1 and err.startswith("dpft: ") and err.count("\n") == 1 and "Traceback" not in err + out


def test_verify_refuses_a_changed_or_a_missing_ledger(run, saved, tmp_path):
    shutil.copytree(saved / "model", tmp_path / "model")
    ledger = tmp_path / "model" / "ledger.sqlite"
    ledger.chmod(0o600)
    with sqlite3.connect(ledger) as file:
        table = file.execute("select name from sqlite_master where type='table' and name not like 'sqlite%'").fetchone()[0]
        last = file.execute(f"select max(rowid) from {table}").fetchone()[0]
        file.execute(f"delete from {table} where rowid = {last - 1}")
    status, _, err = run("verify", tmp_path / "model")
    assert status == 1 and "changed, removed or moved" in err
    ledger.unlink()
    status, _, err = run("verify", tmp_path / "model")
    assert status == 1 and "no ledger" in err


def test_a_shared_ledger_refuses_what_would_pass_the_budget(run, tmp_path):
    with Ledger(tmp_path / "l.sqlite", who="Bo") as ledger:
        ledger.set_budget(4.1, 2.5e-3)
    status, _, _ = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite", "--who", "Anna")
    assert status == 0
    status, _, err = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite")
    assert status == 1 and "budget" in err and "Anna" in err and err.count("\n") == 1


@pytest.mark.skipif("DPFT_DATA" not in os.environ, reason="needs the SST-2 files: set DPFT_DATA to their folder")
def test_the_main_job_on_a_slice_of_real_text(run, tmp_path, monkeypatch):
    def few(root):
        task = sst2(root)
        return replace(task, dev=task.dev.subset(range(20)))
    monkeypatch.setitem(LOCAL, "sst2", few)
    status, out, _ = run("train", "--data", "sst2", "--model", "minilm", "--method", "bitfit", "--epsilon", "2", "--limit", "500",
                         "--steps", "2", "--batch-size", "20", "--clip", "1", "--no-progress", "--output", tmp_path)
    assert status == 0 and "(2.00, 1.00e-03)-differentially private" in out and "accuracy on dev: 0." in out
    saved = dpft_package.load(tmp_path)
    tokens = load_tokenizer(str(tmp_path))(["a delight", "a mess"], return_tensors="pt", padding=True)
    assert saved(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits.shape == (2, 2)


def test_without_privacy_it_says_so(run):
    status, out, _ = run("train", *DIGITS, "--epsilon", "inf", "--method", "full", "--pretrain", "1")
    assert status == 0 and "No privacy guarantee" in out


@pytest.mark.parametrize("words, message", [
    (["--epsilon", "0"], "--epsilon 0"), (["--epsilon", "2", "--delta", "2"], "--delta 2"),
    (["--epsilon", "2", "--delta", "0.1"], "below 1/200"), (["--epsilon", "2", "--batch-size", "500"], "--batch-size 500"),
    (["--epsilon", "2", "--method", "bitft"], "did you mean bitfit"), (["--epsilon", "2", "--model", "mpl"], "mlp"),
    (["--epsilon", "2", "--data", "digts"], "did you mean digits"), (["--epsilon", "2", "--score", "test"], "no test part"),
    (["--epsilon", "2", "--score", "train"], "--score train"), ([], "either epsilon or noise_multiplier"),
    (["--epsilon", "2", "--unit", "writer"], "no column 'writer'"), (["--epsilon", "2", "--unit-cap", "2"], "--unit-cap 2"),
    (["--epsilon", "2", "--option", "ratio"], "name=value"), (["--epsilon", "2", "--option", "ratio=1"], "BiTFiT has no option 'ratio'"),
    (["--epsilon", "2", "--method", "dp-frost", "--option", "ratio=2"], "ratio=2 must lie in (0, 1]"),
    (["--epsilon", "2", "--data", "sst2", "--root", "nowhere"], "nowhere"), (["--epsilon", "2", "--clip", "-1"], "--clip -1"),
])
def test_bad_input_ends_in_one_sentence(run, words, message):
    status, out, err = run("train", *DIGITS, *words)
    assert status == 1 and message in err and err.startswith("dpft: ") and err.count("\n") == 1 and "Traceback" not in err + out


@pytest.mark.parametrize("method, options, spent", [
    ("dp-frost", ["ratio=0.5", "rounds=1", "sample_rate=1.0"], "select"),
    ("rap-ft", ["relevance_rate=1.0", "level=group"], "relevance")])
def test_the_papers_methods_pay_for_their_look_at_the_data(run, method, options, spent):
    words = [word for option in options for word in ("--option", option)]
    status, out, err = run("train", *DIGITS, "--epsilon", "8", "--method", method, *words, "--accountant", "rdp")
    assert status == 0 and spent in out, err


def test_an_option_may_be_a_method_itself():
    method, _ = method_named("rap-ft", ['method=["LoRA", {"rank": 2}]', "warmup_steps=3", "share=0.2"])
    assert method.method.rank == 2 and method.warmup_steps == 3 and method.share == 0.2


@pytest.mark.parametrize("command", ["train", "plan", "account", "verify", "quickstart", "bench", "audit"])
def test_every_flag_has_help(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0 and "--" in out
    options = [hint for name, hint in get_type_hints(getattr(cli, command), include_extras=True).items() if name != "return"]
    assert options and all(option.__metadata__[0].help for option in options)


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


# JSON, for programs


def test_account_and_verify_say_the_same_in_json(run, saved):
    status, out, _ = run("account", saved / "team.sqlite", "--json")
    found = json.loads(out)
    assert status == 0 and found["runs"][0]["who"] == "Anna" and found["runs"][0]["finished"] is True
    assert found["runs"][0]["epsilon"] == pytest.approx(found["epsilon"]) and found["runs"][0]["mechanisms"][0]["steps"] == 2
    _, text, _ = run("account", saved / "team.sqlite")
    assert f"together: epsilon {found['epsilon']:.3f} at delta {found['delta']:.3g} (rdp)" in text
    assert found["epsilon_by"] == found["accountant"] == "rdp"


def test_account_says_by_what_the_epsilon_of_several_runs_is_computed(run, tmp_path):
    one = SampledGaussian(1.0, 0.01, 10, "train")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        for name in "ab":
            ledger.begin(name, {"mechanisms": [asdict(one)], "delta": 1e-5, "data": "ab" * 32, "size": 1000})
            ledger.claim(name, "train")
    found = json.loads(run("account", tmp_path / "l.sqlite", "--accountant", "prv", "--json")[1])
    assert (found["accountant"], found["epsilon_by"], len(found["runs"])) == ("prv", "rdp", 2)


def test_plan_and_audit_speak_json(run, tmp_path):
    status, out, _ = run("plan", "--size", 1000, "--trainable", 50, "--epsilon", 2, "--steps", "10,20", "--batch-sizes", "50,100", "--json",
                         "--output", tmp_path / "plan.svg")
    found = json.loads(out)
    assert status == 0 and len(found["cells"]) == 4 and found["recommended"] in found["cells"] and not (tmp_path / "plan.svg").exists()
    assert found["delta"] == 0.5 / 1000 and found["command"].startswith("dpft train --data YOUR_DATA")
    status, out, _ = run("audit", "--method", "full", "--canaries", 60, "--steps", 2, "--accountant", "rdp", "--json")
    found = json.loads(out)
    assert found["method"] == "Full" and set(found["audited"]) == {"separation", "threshold", "guesses"}
    assert found["refuted"] == (status == 1)


def test_the_smallest_data_can_be_planned(run, tmp_path):
    """It complained of a batch size of two that nobody had given."""
    status, out, err = run("plan", "--epsilon", "2", "--size", "1", "--trainable", "5", "--steps", "10", "--output", tmp_path / "plan.svg")
    assert status == 0 and "--batch-size 1 --steps 10" in out, err


def test_a_blank_after_a_comma_is_no_part_of_a_name(run, tiny, tmp_path):
    (tmp_path / "rows.csv").write_text("note,mood\n" + "good film,pos\nbad film,neg\n" * 10)
    common = ["train", "--data", tmp_path / "rows.csv", "--model", tiny, "--epsilon", "4", "--score", "none", "--steps", "1",
              "--batch-size", "4", "--no-progress", "--accountant", "rdp", "--columns", "note, mood"]
    status, out, err = run(*common, "--classes", "neg, pos")
    assert status == 0 and "differentially private" in out, err


def test_a_plan_leaves_out_what_a_method_spends_besides_training(run):
    status, out, _ = run("plan", "--size", 1000, "--trainable", 50, "--epsilon", 2, "--steps", 20, "--batch-sizes", 100, "--method",
                         "dp-frost", "--json")
    found = json.loads(out)
    train, _ = split_budget(2.0, found["delta"], train=(0.1, 20), select=(0.02, 5), train_share=0.9, accountant="rdp")
    assert status == 0 and found["share_besides_training"] == 0.1
    assert found["recommended"]["noise_multiplier"] == pytest.approx(train, rel=1e-2)


def test_an_audit_takes_the_options_of_its_method(run, monkeypatch):
    """They were left out without a word, so that another configuration was audited than the one asked for."""
    words = ["audit", "--method", "dp-frost", "--canaries", "60", "--steps", "2", "--accountant", "rdp"]
    status, out, err = run(*words, "--option", "nonsense=1")
    assert status == 1 and "has no option 'nonsense'" in err and not out
    audited = []
    monkeypatch.setattr("dpft.auditing.audit", lambda method, *rest, **more: audited.append(method))
    monkeypatch.setattr("dpft.cli.book.told", lambda *its: None)
    assert run(*words, "--option", "rounds=1")[0] == 0 and audited[0].rounds == 1


@pytest.mark.parametrize("words, said", [
    (["--full", "--method", "bitfit"], "--method does nothing beside --full"),
    (["--full", "--option", "ratio=1"], "--option does nothing beside --full"), (["--full", "--boundary"], "--boundary does nothing"),
    (["--method", "bitfit", "--output", "records"], "--output does nothing without --full"),
    (["--method", "bitfit", "--boundary", "--precision", "bf16"], "--precision does nothing beside --boundary")])
def test_an_audit_refuses_what_it_would_leave_out(run, monkeypatch, words, said):
    for name in ("dpft.cli.book.audit_all", "dpft.cli.book.audit_outputs", "dpft.auditing.audit", "dpft.cli.book.told"):
        monkeypatch.setattr(name, lambda *its, **more: None)
    status, out, err = run("audit", *words)
    assert status == 1 and said in err and err.count("\n") == 1 and not out


def test_json_holds_no_bare_infinity(capsys):
    core.print_json({"epsilon": float("inf"), "nested": [float("nan"), {"x": 1.5}]})
    assert json.loads(capsys.readouterr().out) == {"epsilon": "inf", "nested": ["nan", {"x": 1.5}]}


# One place for a knob


def test_the_options_of_train_are_the_knobs_with_their_defaults():
    options = inspect.signature(core.train).parameters
    for knob in dataclasses.fields(Settings):
        assert (knob.name in options) == (knob.name not in core.OBJECTS), knob.name
        if knob.name in options and knob.name not in core.SET_HERE:
            assert options[knob.name].default == knob.default
    assert set(core.OBJECTS) < {knob.name for knob in dataclasses.fields(Settings)}


def test_a_new_knob_is_an_option_at_once(monkeypatch):
    more = dataclasses.make_dataclass("More", [("gain", float, dataclasses.field(default=2.0, metadata={
        "help": "a new knob; None: never", "of": "engine", "identifies": True}))], bases=(Settings,), frozen=True, kw_only=True)
    monkeypatch.setattr(core, "Settings", more)
    new = {option.name: option for option in core.knob_options()}["gain"]
    assert new.default == 2.0 and new.annotation.__metadata__[0].help == "A new knob. (default: never)"


# What is refused before anything is read or spent


# the first is typer's from 0.27 on, the other that of the oldest that settings.ini allows
UNKNOWN = ("No such option: --epsilonn", "No such option '--epsilonn'")


@pytest.mark.parametrize("words, said", [
    (["train", "--epsilon", "two"], "Invalid value for '--epsilon'"), (["train", "--epsilonn", "3"], UNKNOWN),
    (["train"], "Missing option '--data'"), (["trian"], "No such command 'trian'"), (["account"], "Missing argument"),
    (["train", "--data"], "--data' requires an argument")])
def test_what_is_typed_wrongly_ends_in_one_sentence_that_names_the_help(run, words, said):
    status, out, err = run(*words)
    assert status == 2 and out == "" and err.startswith("dpft: ") and err.count("\n") == 1
    assert any(one in err for one in said) if isinstance(said, tuple) else said.strip("'") in err
    assert err.rstrip().endswith(" --help") and "; see " in err


def test_nothing_typed_shows_the_help(run):
    status, out, err = run()
    assert "train" in out + err and "dpft: " not in err and status in (0, 2)


def test_a_status_of_a_command_is_that_of_the_program(run, monkeypatch):
    def audit(*words, **more):
        raise cli.core.typer.Exit(3)
    monkeypatch.setattr(core, "check_positive", audit)
    assert run("plan", "--epsilon", "2", "--size", "10", "--trainable", "5")[0] == 3


@pytest.mark.parametrize("words, message", [
    (["--batch-size", "0"], "--batch-size 0"), (["--learning-rate", "0"], "--learning-rate 0"), (["--steps", "0"], "--steps 0"),
    (["--epochs", "0"], "--epochs 0"), (["--physical-batch-size", "0"], "--physical-batch-size 0"),
    (["--public-size", "0"], "--public-size 0"),
    (["--limit", "0"], "limit must be at least 1"), (["--device", "cuda:7"], "no such device"), (["--device", "abacus"], "no such device"),
    (["--model", "minilm"], "classifies texts"), (["--model", "./nowhere"], "there is no such folder"),
    (["--model", "a/b/c"], "there is no such folder"), (["--data", "nothing.csv"], "nothing.csv"),
    (["--method", "nowhere.py:Mine"], "there is no file nowhere.py")])
def test_zeros_devices_folders_and_kinds_are_refused_in_one_sentence(run, words, message, tmp_path):
    status, out, err = run("train", *DIGITS, "--epsilon", "4", "--ledger", tmp_path / "l.sqlite", *words)
    assert status == 1 and message in err and err.startswith("dpft: ") and err.count("\n") == 1 and "Traceback" not in err + out
    assert not (tmp_path / "l.sqlite").exists()


@pytest.mark.parametrize("words, message", [
    (["plan", "--epsilon", "2", "--size", "0", "--trainable", "5"], "--size 0"),
    (["plan", "--epsilon", "2", "--size", "10", "--trainable", "0"], "--trainable 0"),
    (["account", "x.sqlite", "--delta", "0"], "--delta 0"), (["account", "x.sqlite", "--budget", "0", "--delta", "1e-5"], "--budget 0"),
    (["audit", "--method", "full", "--steps", "0"], "--steps 0")])
def test_zero_is_not_taken_for_nothing(run, words, message):
    status, _, err = run(*words)
    assert status == 1 and message in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [["train", *DIGITS, "--epsilon", "4", "--ledger"], ["account", "--budget", "3", "--delta", "1e-5"]])
def test_a_file_that_is_no_ledger_keeps_who_may_read_it(run, tmp_path, words):
    mine = tmp_path / "mine"
    for content in ("id,text\n1,a\n" * 99, None):
        mine.unlink(missing_ok=True)
        if content is None:
            with sqlite3.connect(mine) as other:
                other.execute("CREATE TABLE visits (day TEXT)")
        else:
            mine.write_text(content)
        mine.chmod(0o644)
        before = mine.read_bytes()
        status, _, err = run(*words, mine)
        assert status == 1 and err.count("\n") == 1 and mine.read_bytes() == before and mine.stat().st_mode & 0o777 == 0o644, err


def test_what_pytorch_refuses_is_one_sentence(run, monkeypatch):
    def failing(*_, **__):
        raise torch.OutOfMemoryError("out of memory\nhelp\nmore help")
    monkeypatch.setattr("dpft.loop.fine_tune", failing)
    status, _, err = run("train", *DIGITS, "--epsilon", "4")
    assert status == 1 and err == "dpft: OutOfMemoryError: out of memory\n"


@pytest.mark.parametrize("option", ["--output", "--checkpoint", "--ledger", "--cache-folder"])
def test_an_empty_place_is_refused(run, tmp_path, monkeypatch, option):
    """It was the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    status, _, err = run("train", *DIGITS, "--epsilon", "4", option, "")
    assert status == 1 and err == f"dpft: {option} is empty; name a place, or leave it out\n" and not list(tmp_path.iterdir())


def test_the_home_folder_is_meant_by_a_tilde_after_an_equals_sign(run, tmp_path, monkeypatch):
    """A shell leaves it alone there, and a folder named ~ was made in the current one, with the ledger in it."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    status, out, err = run("train", *DIGITS, "--epsilon", "4", "--score", "none", "--ledger=~/book.sqlite", "--output=~/saved")
    assert status == 0 and f"saved in {tmp_path / 'home' / 'saved'}" in out, err
    assert {"book.sqlite", "saved"} <= {path.name for path in (tmp_path / "home").iterdir()}
    assert run("account", "~/book.sqlite")[0] == 0 and run("verify", "~/saved", "--ledger=~/book.sqlite")[0] == 0
    (tmp_path / "home" / "rows.csv").write_text("text,label\ngood,1\nbad,0\n")
    status, _, err = run("train", "--data=~/rows.csv", "--model=~/nowhere", "--epsilon", "4")
    assert status == 1 and f"--model {tmp_path / 'home' / 'nowhere'}: there is no such folder" in err
    status, _, err = run("train", "--data=~/rows.csv", "--model", "cnn", "--epsilon", "4")
    assert status == 1 and "reads pictures and" in err
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("typed, meant", [
    ("~", "/home/me"), ("--root=~", "/home/me"), ("~/a b", "/home/me/a b"), ("--reason=~5 rows are gone", None), ("--who", None),
    ("--option=ratio=~/x", None), ("~nobody-of-this-name/x", None), ("a~/b", None)])
def test_only_a_home_folder_is_put_in_place_of_a_tilde(monkeypatch, typed, meant):
    monkeypatch.setenv("HOME", "/home/me")
    name, equals, _ = typed.rpartition("=") if meant else ("", "", "")
    assert core.at_home(typed) == (name + equals + meant if meant else typed)


@pytest.mark.parametrize("words", [["quickstart", "--output", "mine.py"], ["quickstart", "--output", "mine.py/below"],
                                   ["train", *DIGITS, "--epsilon", "4", "--cache", "0.1", "--cache-folder", "mine.py"]])
def test_a_file_in_place_of_a_folder_is_named_in_words(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("my own work")
    status, out, err = run(*words)
    assert status == 1 and err.count("\n") == 1 and "Errno" not in err and f"{words[-1]} cannot be a folder, because a file is in" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"] and not out


def test_a_file_named_as_a_checkpoint_is_refused_in_words(run, tmp_path):
    (tmp_path / "state").write_text("mine")
    for place, why in ((tmp_path / "state", "File exists"), (tmp_path / "state" / "run", "Not a directory")):
        status, _, err = run("train", *DIGITS, "--epsilon", "4", "--checkpoint", place)
        assert status == 1 and err == f"dpft: checkpoint {place} cannot be a folder ({why}); choose another place\n"


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


def test_a_stopped_run_says_how_to_go_on(run, monkeypatch):
    def stopped(*words, **more):
        raise KeyboardInterrupt
    monkeypatch.setattr("dpft.sources.load_data", stopped)
    status, _, err = run("train", *DIGITS, "--epsilon", "4")
    assert status == 130 and "--checkpoint the same command continues" in err and "Traceback" not in err


def test_the_shell_completes_commands_and_methods():
    environment = {**os.environ, "_DPFT_COMPLETE": "complete_bash", "COMP_WORDS": "dpft train --method la", "COMP_CWORD": "3"}
    words = [sys.executable, "-c", "import sys; sys.argv = ['dpft']; from dpft.cli import app; app(prog_name='dpft')"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert {"last-layer", "layer-freeze", "largest-weights"} == set(done.stdout.split())


def test_bash_itself_completes(tmp_path):
    """The script that --install-completion writes, in a real bash."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    program = tmp_path / "dpft"
    program.write_text(f"#!{sys.executable}\nfrom dpft.cli import main\nmain()\n")
    program.chmod(0o700)
    asks = ('eval "$(_DPFT_COMPLETE=source_bash dpft)"; COMP_WORDS=(dpft train --method la); COMP_CWORD=3; '
            '_dpft_completion dpft; echo "${COMPREPLY[@]}"; complete -p dpft')
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", asks], capture_output=True, text=True, env=environment)
    assert {"last-layer", "layer-freeze", "largest-weights"} <= set(done.stdout.split()), done.stderr
    assert "_dpft_completion" in done.stdout


def test_a_command_puts_the_handler_of_sigterm_back(run):
    """Another program may run a command inside itself and keep its own way to stop."""
    import signal
    own, before = (lambda number, frame: None), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, own)
        assert run("train", *DIGITS, "--epsilon", "4", "--score", "none")[0] == 0
        assert signal.getsignal(signal.SIGTERM) is own
        assert run("train", *DIGITS, "--epsilon", "4", "--limit", "0")[0] == 1          # refused after the handler was set
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what people bring


@pytest.mark.parametrize("said, typed", [
    ("batch_size=0 must be at least 1", "--batch-size 0 must be at least 1"), ("say overwrite=True", "say --overwrite"),
    ("name texts and label with columns=", "name texts and label with --columns"),
    ("unit_cap=2 without unit=: name it", "--unit-cap 2 without --unit: name it"),
    ("ratio=2 must lie in (0, 1]; clip=3.", "ratio=2 must lie in (0, 1]; --clip 3."),
    ("call fine_tune(model, clip=3)", "call fine_tune(model, clip=3)"),
    ("pass loss_fn=, a function", "pass loss_fn=, a function (in Python; no option of the command)"),
    ("give root= or set DPFT_DATA, or use source='hub'", "give --root or set DPFT_DATA")])
def test_a_sentence_names_the_options_that_exist(said, typed):
    options = {"batch_size": "--batch-size", "overwrite": "--overwrite", "columns": "--columns", "unit": "--unit", "unit_cap": "--unit-cap",
               "clip": "--clip"}
    assert core.in_shell(said, options) == typed


def test_the_options_are_those_of_the_command_that_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dpft", "train"])
    known = core.typed_options()
    assert known["batch_size"] == "--batch-size" and known["overwrite"] == "--overwrite" and not {"evaluate", "loss_fn"} & set(known)
    monkeypatch.setattr(sys, "argv", ["dpft"])
    assert core.typed_options() == {}


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


def test_a_tagged_corpus_is_trained_on_by_the_command(run, tiny, tmp_path):
    rows = [{"id": row, "tokens": ["a", "b", "c"][:1 + row % 3], "ner_tags": ["O", "X", "O"][:1 + row % 3]} for row in range(24)]
    for part in ("train", "validation"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, out, err = run("train", "--data", tmp_path, "--model", tiny, *FEW, "--output", tmp_path / "saved")
    assert status == 0 and "accuracy on dev: " in out and "reads: tokens; label: ner_tags; not used: id" in err, err
    assert type(dpft_package.load(tmp_path / "saved")).__name__ == "BertForTokenClassification"


@pytest.mark.parametrize("labels, kind", [
    ([0, 1, 2], "BertForSequenceClassification"), ([[0, 2], [1, 0], [2]], "BertForTokenClassification")])
def test_tokens_with_labels_get_a_head_of_their_own_by_the_command(run, tiny, tmp_path, labels, kind):
    from datasets import Dataset

    tokens = [[2, 3], [4, 5], [6]]
    data = {"sentence": ["a"] * 24, "idx": list(range(24)), "input_ids": tokens * 8, "labels": labels * 8}
    Dataset.from_dict(data).save_to_disk(str(tmp_path / "data"))
    status, _, err = run("train", "--data", tmp_path / "data", "--model", tiny, *FEW, "--output", tmp_path / "saved")
    assert status == 0 and "reads: input_ids; label: labels; not used: sentence, idx" in err, err
    model = dpft_package.load(tmp_path / "saved")
    assert type(model).__name__ == kind and model.num_labels == 3


def test_a_pretrained_network_with_batch_normalisation_is_frozen_by_an_option(run, tmp_path):
    import numpy as np
    import torch
    from PIL import Image
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic"))
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 8, 8))
    model.save_pretrained(tmp_path / "model")
    for number in range(24):
        folder = tmp_path / "pictures" / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(folder / f"{number}.png")
    words = ["train", "--data", tmp_path / "pictures", "--model", tmp_path / "model", *FEW]
    status, _, err = run(*words)
    assert status == 1 and err.splitlines()[-1].endswith("say --freeze-batchnorm if the model is pre-trained, or choose one without it")
    status, out, err = run(*words, "--freeze-batchnorm")
    assert status == 0 and "reads: image; label: label" in err and "statistics" in out, err


@pytest.fixture
def quick_llm(monkeypatch):
    """`dpft llm` with stand-ins for the weights, the data and the training; how often it trained."""
    from types import SimpleNamespace

    from dpft.cli import book
    trained = []
    for name in ("dpft.book.pretrained.prepare_weights", "dpft.models.load_model", "dpft.models.load_tokenizer", "dpft.sources.load_data"):
        monkeypatch.setattr(name, lambda *_, **__: None)
    monkeypatch.setattr("dpft.card.claim", lambda guarantee: f"claimed: {guarantee}")
    monkeypatch.setattr(book, "written", lambda model, tokenizer, task, every: {
        "facts": ["f"], "people": ["p"], "texts": ["t"], "scores": {"perplexity": every}})
    def train(folder, task, output, steps, batch_size, epsilon, learning_rate):
        trained.append(steps)
        return SimpleNamespace(guarantee=f"{epsilon:g}", model=None)
    monkeypatch.setattr(book, "trained_llm", train)
    return trained


def test_the_result_of_a_language_model_is_printed_again(run, quick_llm, tmp_path):
    first = run("llm", "--output", tmp_path, "--steps", "3")
    assert first[0] == 0 and "claimed: 8" in first[1] and run("llm", "--output", tmp_path, "--steps", "3") == first
    assert quick_llm == [3]
    for name in ("before", "after"):
        kept = json.loads((tmp_path / f"{name}.json").read_text())
        assert kept["settings"] == {"steps": 3, "batch_size": 128, "epsilon": 8.0, "learning_rate": 6e-3, "every": 60}


@pytest.mark.parametrize("words, differs", [
    (["--steps", "4"], "steps 3, not 4"), (["--epsilon", "2", "--steps", "3"], "epsilon 8.0, not 2.0"),
    (["--batch-size", "64", "--steps", "3"], "batch_size 128, not 64"),
    (["--learning-rate", "2e-3", "--steps", "3"], "learning_rate 0.006, not 0.002"),
    (["--every", "30"], "steps 3, not 36, every 60, not 30")])
def test_a_language_model_of_other_options_is_not_taken_for_this_one(run, quick_llm, tmp_path, words, differs):
    run("llm", "--output", tmp_path, "--steps", "3")
    held = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, err = run("llm", "--output", tmp_path, *words)
    assert status == 1 and not out and str(tmp_path) in err and differs in err and "--output" in err and err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == held and quick_llm == [3]


def test_a_half_done_or_an_old_folder_of_a_language_model_is_looked_at_too(run, quick_llm, tmp_path):
    run("llm", "--output", tmp_path)
    (tmp_path / "after.json").unlink()                                   # stopped while it trained
    status, _, err = run("llm", "--output", tmp_path, "--every", "30")
    assert status == 1 and "every 60, not 30" in err and not (tmp_path / "after.json").exists()
    kept = json.loads((tmp_path / "before.json").read_text())
    del kept["settings"]                                                 # as earlier versions wrote it
    (tmp_path / "before.json").write_text(json.dumps(kept))
    status, _, err = run("llm", "--output", tmp_path)
    assert status == 1 and "steps unknown, not 36" in err


def test_the_quick_start_computes_on_one_thread(run, monkeypatch, tmp_path):
    """With two a run took minutes on a machine whose second core was busy, and without it seconds."""
    from dpft.book import experiments
    from dpft.book.provenance import read_records, results_file
    entry, seen = next(iter(read_records(results_file("quickstart")))), []

    def made(budgets, seeds):
        seen.append(torch.get_num_threads())
        yield entry

    monkeypatch.setattr(experiments, "quickstart", made)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert run("quickstart", "--output", tmp_path)[0] == 0
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_the_records_of_the_quick_start_can_be_drawn_again(run, monkeypatch, tmp_path):
    """What a figure that lacks its records advises is done as it says, and the figure is there."""
    from dpft.book import experiments
    from dpft.book.provenance import read_records, results_file
    kept = [entry for entry in read_records(results_file("quickstart")) if entry["seed"] == 0]
    monkeypatch.setattr(experiments, "quickstart", lambda budgets, seeds: iter(kept))
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path / "my results"))
    draw = ("figures", "quickstart", "--output", tmp_path / "drawn")
    status, out, _ = run(*draw)
    advice = out.splitlines()[0].partition("; ")[2].removesuffix(" makes them.")
    assert status == 0 and "skipped" in out and advice.startswith("dpft quickstart ")
    assert run(*shlex.split(advice)[1:], "--seeds", "1")[0] == 0
    status, out, _ = run(*draw)
    assert status == 0 and "skipped" not in out and (tmp_path / "drawn" / "quickstart.svg").exists()
