"""What a saved run holds, who can open it, and that nobody misreads it."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
import zoo
from safetensors.torch import load_file
from torch import nn

import dpft
from dpft.baselines import Adapter, LoRA, merge_lora
from dpft.composition import Chain
from dpft.guarantee import verify
from dpft.ledger import Ledger
from dpft.models import mean_pooled_classifier
from dpft.saving import WEIGHTS, add_again, additions, base_name, free_folder, note_addition, read_model, restores, stored_name, write_model

LLAMA = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=40,
             max_position_embeddings=24, pad_token_id=0, bos_token_id=1, eos_token_id=1)
ROBERTA = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40, num_labels=3,
               max_position_embeddings=24, pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
KINDS = {"roberta": hf.RobertaForSequenceClassification, "llama": hf.LlamaForCausalLM}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders with pre-trained weights, by family."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    hf.RobertaForSequenceClassification(hf.RobertaConfig(**ROBERTA)).save_pretrained(folder / "roberta")
    hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).save_pretrained(folder / "llama")
    return folder


def pretrained(bases, name):
    return KINDS[name].from_pretrained(bases / name, dtype=torch.float32)


def tuned(model, method, name="roberta", **settings):
    _, loss_fn, batch = zoo.build(name, rows=8)
    data, collate = zoo.as_data(batch)
    settings = {"noise_multiplier": 1.0, "steps": 2, "batch_size": 4, "learning_rate": 0.1, "clip": 0.5, **settings}
    return dpft.fine_tune(model, data, method, loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01, seed=1, progress=False,
                          **settings)


def same(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def files(folder):
    return {file.name for file in folder.iterdir()}


METHODS = {  # name -> (family, method, whether its base lies in a folder)
    "biases": ("roberta", dpft.BiTFiT, True), "added biases": ("llama", lambda: dpft.BiTFiT(add_missing=True, norms=True), True),
    "random biases": ("llama", lambda: dpft.BiTFiT(add_missing=True, values="random"), False), "head": ("bert", dpft.LastLayer, False),
    "lora": ("roberta", lambda: LoRA(2), True), "lora on a model without a base": ("llama", lambda: LoRA(2), False),
    "adapter": ("roberta", lambda: Adapter(2), True), "full": ("llama", dpft.Full, True),
    "frost": ("bert", lambda: dpft.DPFrost(ratio=0.25), False), "random partitions": ("gpt2-lm", dpft.RandomPartitions, False),
    "norms": ("llama", dpft.NormOnly, True), "lora and biases": ("roberta", lambda: Chain(LoRA(2), dpft.BiTFiT()), True),
    "biases and lora": ("llama", lambda: Chain(dpft.BiTFiT(add_missing=True), LoRA(2)), True),
    "lora and added biases": ("llama", lambda: Chain(LoRA(2), dpft.BiTFiT(add_missing=True)), False),
    "adapter over lora": ("roberta", lambda: Chain(LoRA(2, targets="attention.output.dense"), Adapter(2)), True),
    "lora over adapter": ("roberta", lambda: Chain(Adapter(2), LoRA(2, targets="attention.output.dense")), True),
    "mean of the tokens": ("pooled", dpft.BiTFiT, False),
}


@pytest.fixture(scope="module")
def runs(bases):
    """Name of a method -> its run, which is made once: saving leaves it as it is."""
    def made(name):
        family, method, based = METHODS[name]
        if family == "pooled":
            torch.manual_seed(0)
            kind = mean_pooled_classifier()
            return tuned(kind(kind.config_class(**{**ROBERTA, "pad_token_id": 0})), method(), "bert")
        more = {"noise_multiplier": None, "epsilon": 9.0} if name == "frost" else {}
        return tuned(pretrained(bases, family) if based else zoo.build(family)[0].float(), method(), family, **more)
    return cache(made)


ADDED = {"added biases", "random biases", "adapter", "biases and lora", "lora and added biases", "adapter over lora", "lora over adapter"}
ADAPTERS = {"lora", "lora on a model without a base", "lora and biases"}


def form_of(name, whole):
    return "adapter" if name in ADAPTERS else "part" if whole is False else "all" if name in ADDED else "model"


@pytest.mark.parametrize("whole", [None, False])
@pytest.mark.parametrize("name", METHODS)
def test_every_run_comes_back_bit_for_bit(runs, tmp_path, name, whole):
    run, form = runs(name), form_of(name, whole)
    run.save(tmp_path, whole)
    assert json.loads((tmp_path / "dpft.json").read_text())["form"] == form
    assert ("model.safetensors" in files(tmp_path)) == (form == "model")
    base = runs(name).model if form == "part" and not METHODS[name][2] else None    # which nobody can name
    assert base is not None or same(dpft.load(tmp_path), run.model)
    assert dpft.Guarantee.load(tmp_path / "guarantee.json").mechanisms == run.mechanisms
    card = (tmp_path / "README.md").read_text()
    assert "differentially private" in card and "How to load" in card and ("holds only" in card) == (form == "part")


OPEN = """
import json, sys, torch, transformers as hf
from peft import PeftModel
hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
found = {}
for name, (folder, kind, base) in json.load(open(sys.argv[1])).items():
    for way in ("class", "auto", "peft"):
        auto = hf.AutoModelForCausalLM if "Causal" in kind or "LMHead" in kind else hf.AutoModelForSequenceClassification
        own = getattr(hf, kind, auto)
        try:
            model = (PeftModel.from_pretrained(own.from_pretrained(base or folder + "/base"), folder) if way == "peft"
                     else (own if way == "class" else auto).from_pretrained(folder))
            with torch.no_grad():
                found[f"{name}/{way}"] = model.eval()(input_ids=torch.arange(2, 12).view(2, 5)).logits
        except (OSError, ValueError) as error:
            found[f"{name}/{way}"] = f"{type(error).__name__}: {error}"
    words = hf.AutoTokenizer.from_pretrained(folder)
    assert words("two words")["input_ids"] == [3, 4] and len(words) == 5, name
torch.save(found, sys.argv[2])
"""


def test_transformers_and_peft_alone_open_a_folder_with_the_same_logits_or_refuse_it(runs, bases, tmp_path):
    """In another process, which does not have this package's classes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[SEP]": 2, "two": 3, "words": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]")
    asked, expected = {}, {}
    for name, whole in [*((name, None) for name in METHODS), ("biases", False), ("lora", True), ("lora on a model without a base", True)]:
        run = runs(name)
        case = f"{name} {whole}"
        replace(run, prepared=replace(run.prepared, tokenizer=words)).save(tmp_path / case, whole)
        family, _, based = METHODS[name]
        asked[case] = str(tmp_path / case), type(run.model).__name__, str(bases / family) if based else None
        with torch.no_grad():
            expected[case] = run.model.eval()(input_ids=torch.arange(2, 12).view(2, 5)).logits
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run([sys.executable, "-c", OPEN, tmp_path / "asked.json", tmp_path / "found.pt"], capture_output=True, text=True,
                          env={"PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    opened = set()
    for case, found in torch.load(tmp_path / "found.pt").items():
        if not isinstance(found, str):
            opened.add(case)
            name = case.partition("/")[0]
            rounding = 1e-5 if name.endswith("True") else 0      # of adding the product to the matrix
            assert (found - expected[name]).abs().max() <= rounding, case
    stock = [f"{name} None" for name in METHODS if form_of(name, None) == "model" and METHODS[name][0] != "pooled"]
    merged = ["lora True", "lora on a model without a base True"]
    assert opened == {f"{case}/{way}" for case in [*stock, *merged, "lora None", "lora and biases None"] for way in ("class", "auto")} | {
        f"{name} None/peft" for name in ADAPTERS}


def test_a_part_holds_what_trained_and_nothing_else(runs, bases, tmp_path):
    run = runs("biases")
    run.save(tmp_path, whole=False)
    assert set(load_file(tmp_path / WEIGHTS)) == set(run.trained) and not {"state.pt", "run.json"} & files(tmp_path)
    base = pretrained(bases, "roberta")
    base.load_state_dict(load_file(tmp_path / WEIGHTS), strict=False)
    assert same(base, run.model) and same(dpft.load(tmp_path, model=pretrained(bases, "roberta")), run.model)
    with pytest.raises(ValueError, match="do not fit"):
        dpft.load(tmp_path, model=pretrained(bases, "llama"))


def test_a_peft_model_of_ones_own_is_saved_as_peft_saves_it_or_merged(bases, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model
    model = get_peft_model(pretrained(bases, "roberta"), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    run = tuned(model, dpft.Trainable())
    run.save(tmp_path / "own")
    run.save(tmp_path / "merged", whole=True)
    ids = torch.randint(2, 40, (3, 7))
    expected = run.model.eval()(input_ids=ids).logits
    for again in (dpft.load(tmp_path / "own"), PeftModel.from_pretrained(pretrained(bases, "roberta"), tmp_path / "own")):
        assert type(again) is type(run.model) and torch.equal(again.eval()(input_ids=ids).logits, expected)
    plain = KINDS["roberta"].from_pretrained(tmp_path / "merged")
    assert torch.allclose(plain.eval()(input_ids=ids).logits, expected, atol=1e-6) and type(run.model) is type(model)


def test_a_base_that_changed_since_it_was_loaded_is_not_named(bases, tmp_path):
    for number, method in enumerate([LoRA(2), dpft.BiTFiT()]):
        model = pretrained(bases, "roberta")
        model.roberta.encoder.layer[0].output.dense.weight.data.mul_(1.01)       # trained on public data, say
        run = tuned(model, method)
        run.save(tmp_path / str(number), whole=False)
        if number:
            with pytest.raises(ValueError, match="has no name and cannot be loaded; pass the base"):
                dpft.load(tmp_path / "1")
        model = copy.deepcopy(run.model) if number else None
        assert same(dpft.load(tmp_path / str(number), model=model), run.model)
    assert json.loads((tmp_path / "0" / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_what_was_merged_is_no_part_any_more(bases, tmp_path):
    run = tuned(pretrained(bases, "roberta"), LoRA(2))
    merge_lora(run.model)
    with pytest.raises(ValueError, match="is no longer in the model"):
        run.save(tmp_path, whole=False)
    run.save(tmp_path)
    assert same(dpft.load(tmp_path), run.model)


@pytest.mark.parametrize("epsilon", [math.inf, 3.0])
def test_a_run_whose_model_was_trained_on_is_not_saved_under_its_guarantee(bases, tmp_path, epsilon):
    first = tuned(pretrained(bases, "roberta"), dpft.BiTFiT())
    kept = replace(first, model=copy.deepcopy(first.model))
    second = tuned(first.model, dpft.BiTFiT(), noise_multiplier=None, epsilon=epsilon)
    assert second.model is first.model
    with pytest.raises(ValueError, match="has trained this model since, and the guarantee does not cover that"):
        first.save(tmp_path / "first")
    assert not (tmp_path / "first").exists() or not files(tmp_path / "first")
    kept.save(tmp_path / "kept")
    second.save(tmp_path / "second")
    assert same(dpft.load(tmp_path / "second"), second.model)


def test_a_module_of_ones_own_needs_the_module(tmp_path):
    def net():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 3, bias=False))

    data = [(torch.randn(1, 4, 4), torch.tensor(i % 3)) for i in range(8)]
    run = dpft.fine_tune(net(), data, dpft.BiTFiT(add_missing=True), noise_multiplier=1.0, steps=2, batch_size=4, delta=0.01, seed=0,
                         accountant="rdp", loss_fn=zoo.image_loss, progress=False)
    run.save(tmp_path / "whole")
    assert "`dpft.load(path, model=…)` gives the model" in (tmp_path / "whole" / "README.md").read_text()
    with pytest.raises(ValueError, match="user-defined module"):
        dpft.load(tmp_path / "whole")
    run.save(tmp_path / "part", whole=False)
    assert set(load_file(tmp_path / "part" / WEIGHTS)) == {"1.bias", "3.weight"}
    assert all(same(dpft.load(tmp_path / name, model=net()), run.model) for name in ("whole", "part"))
    with pytest.raises(ValueError, match="do not fit"):
        dpft.load(tmp_path / "whole", model=nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Linear(32, 3)))


# ---- the pieces


def test_names_in_all_their_wrappings():
    for name, stored, plain in [
            ("a.query.lora_A.default.weight", "base_model.model.a.query.lora_A.weight", "a.query.lora_A.weight"),
            ("a.query.base_layer.bias", "base_model.model.a.query.base_layer.bias", "a.query.bias"),
            ("base_model.model.head.modules_to_save.default.bias", "base_model.model.head.bias", "head.bias"),
            ("base_model.model.head.original_module.bias", "base_model.model.head.original_module.bias", "head.bias")]:
        assert (stored_name(name, ["default"]), base_name(name, ["default"])) == (stored, plain)
    assert stored_name("a.default.bias", []) == "a.default.bias" == base_name("a.default.bias", [])


def test_nothing_is_called_that_did_not_allow_it(tmp_path):
    model = nn.Linear(2, 2)
    for function in ("os:system", "dpft.models:pretrain", "dpft.loop:load", "nowhere"):
        with pytest.raises(ValueError, match="not marked with"):
            add_again(model, [{"function": function, "parameters": [], "settings": {}}])

    @restores
    def add_scale(model, by):
        model.register_parameter("scale", nn.Parameter(torch.full((1,), by)))
        note_addition(model, add_scale, ["scale"], by=by)

    add_scale(model, by=2.0)
    other = nn.Linear(2, 2)
    add_again(other, additions(model))
    assert other.scale.item() == 2.0 and additions(other) == additions(model)


# --- a place to save in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places, states", [(["output"], 1), (["checkpoint"], 8)])
def test_room_is_looked_for_before_the_first_draw(tmp_path, monkeypatch, places, states):
    """A run that its disk cannot hold is refused with nothing paid; the same call, with room to the byte, goes through."""
    rows = torch.utils.data.TensorDataset(torch.arange(120.0).view(40, 3) / 120, torch.arange(40) % 2)
    room = 4 * (3 * 2 + 2) * states                              # bytes of what trains, which is the whole model
    def tuned():
        torch.manual_seed(0)
        return dpft.fine_tune(nn.Linear(3, 2), rows, dpft.Full(), noise_multiplier=1.0, steps=2, batch_size=10, accountant="rdp",
                              progress=False, ledger=tmp_path / "book", **{place: tmp_path / place for place in places})
    monkeypatch.setattr("dpft.saving.shutil.disk_usage", lambda _: SimpleNamespace(free=room - 1))
    with pytest.raises(ValueError, match=r"^.* has room for .* and the run needs .*; make room, or choose another place$"):
        tuned()
    if (tmp_path / "book").exists():
        with Ledger(tmp_path / "book") as book:
            assert not any(book.spent(name) for name in book.runs())
    monkeypatch.setattr("dpft.saving.shutil.disk_usage", lambda _: SimpleNamespace(free=room))
    assert [m.steps for m in tuned().guarantee.spent] == [2]


def test_a_folder_to_save_in_is_checked_before_training(tmp_path):
    assert list(free_folder(tmp_path / "new" / "run").iterdir()) == [] and free_folder(tmp_path / "new" / "run")
    (folder := tmp_path / "old").mkdir()
    (folder / "README.md").write_text("{}")
    with pytest.raises(ValueError, match=r"holds README\.md, which no run wrote"):
        free_folder(folder, overwrite=True)
    (folder / "dpft.json").write_text('{"files": []}')
    with pytest.raises(ValueError, match=r"holds a run already, .*overwrite=True"):
        free_folder(folder)
    assert free_folder(folder, overwrite=True) == folder and (folder / "README.md").read_text() == "{}"


def toy_run(**settings):
    rows = torch.utils.data.TensorDataset(torch.arange(120.0).view(40, 3) / 120, torch.arange(40) % 2)
    torch.manual_seed(0)
    return dpft.fine_tune(nn.Linear(3, 2), rows, dpft.Full(), noise_multiplier=1.0, steps=2, batch_size=10, accountant="rdp",
                          progress=False, **settings)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def no_room_for(monkeypatch, name):
    "From here on a file of this name finds no room."
    write = Path.write_text

    def full(path, *args, **kwargs):
        if path.name == name:
            write(path, "half")
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)
    monkeypatch.setattr(Path, "write_text", full)


@pytest.mark.parametrize("name", ["guarantee.json", "README.md", "dpft.json"])
def test_a_save_that_fails_leaves_the_folder_as_it_was_and_can_be_repeated(tmp_path, monkeypatch, name):
    """It left half a run, which the next attempt refused to replace; with overwrite=True it removed the earlier run first."""
    run, free, held = toy_run(ledger=tmp_path / "book"), tmp_path / "free", tmp_path / "held"
    toy_run().save(held)
    (held / ".notes.txt").write_text("mine")
    before = contents(held)
    with monkeypatch.context() as patch:
        no_room_for(patch, name)
        for folder in (free, held):
            with pytest.raises(OSError, match="No space left"):
                run.save(folder, overwrite=folder == held)
    assert not contents(free) and not list(free.iterdir()) and contents(held) == before
    run.save(free)
    run.save(held, overwrite=True)
    for folder in (free, held):
        assert same(dpft.load(folder, nn.Linear(3, 2)), run.model) and verify(folder)
    assert (held / ".notes.txt").read_text() == "mine" and contents(held).keys() == contents(free).keys() | {".notes.txt"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_an_owners_ledger_is_never_replaced_or_removed(tmp_path, private, overwrite):
    """A run without a ledger of its own replaced it by the published copy; one without privacy removed it."""
    folder, run = tmp_path / "project", toy_run()
    if not private:
        run.ledger, run.guarantee = None, replace(run.guarantee, private=False, mechanisms=[], spent=[], planned=[])
    toy_run(ledger=folder / "ledger.sqlite").ledger.close()
    before = (folder / "ledger.sqlite").read_bytes()
    for call in (lambda: run.save(folder, overwrite=overwrite), lambda: toy_run(output=folder, overwrite=overwrite)):
        with pytest.raises(ValueError, match="only record of what its runs have spent"):
            call()
    with pytest.raises(ValueError, match="only record of what its runs have spent"):
        run.guarantee.publish(folder, run.ledger)
    assert contents(folder) == {"ledger.sqlite": before}


@pytest.mark.parametrize("name", ["patients.csv", "config.json", "part/notes.txt"])
def test_a_folder_with_files_that_no_run_wrote_is_refused(tmp_path, name):
    """The digest of a private file went into the guarantee, and the files of a base were replaced."""
    run = toy_run()
    for overwrite in (False, True):
        folder = tmp_path / str(overwrite)
        if overwrite:
            run.save(folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
        before = contents(folder)
        with pytest.raises(ValueError, match=f"{name}, which no run wrote"):
            run.save(folder, overwrite=overwrite)
        assert contents(folder) == before
        (folder / name).unlink()
        (folder / ".gitattributes").write_text("of a repository")
        run.save(folder, overwrite=overwrite)
        assert verify(folder)
    with pytest.raises(ValueError, match="holds a run already"):        # asked before the run
        toy_run(output=folder)


def test_a_base_that_lay_in_the_folder_of_the_run_that_is_replaced_is_not_referred_to(bases, tmp_path):
    tuned(pretrained(bases, "roberta"), dpft.Full()).save(tmp_path)
    run = tuned(hf.RobertaForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32), dpft.BiTFiT())
    run.save(tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").exists() and same(dpft.load(tmp_path), run.model)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("cause", ["room", "foreign"])
def test_a_run_whose_save_fails_is_kept_and_the_promised_way_out_leads_out(tmp_path, monkeypatch, checkpoint, cause):
    output = tmp_path / "run"
    own = {"output": output, "ledger": tmp_path / "book"} | ({"checkpoint": tmp_path / "state"} if checkpoint else {})
    with monkeypatch.context() as patch:
        if cause == "room":
            no_room_for(patch, "guarantee.json")
            words = "No space left"
        else:
            patch.setattr("dpft.loop.check_room", lambda *_: (output / "README.md").write_text("somebody's"))
            words = "holds README.md, which no run wrote"
        if checkpoint:
            with pytest.raises(ValueError, match=f"the run is complete, but .*{words}.*the same command saves it"):
                toy_run(**own)
        else:
            with pytest.warns(UserWarning, match=f"complete and in memory, but .*{words}.*call run.save"):
                run = toy_run(**own)
            assert str(output) in run.unsaved
    (output / "README.md").unlink(missing_ok=True)
    if checkpoint:
        run = toy_run(**own)
    else:
        run.save(output)
    assert run.unsaved == "" and verify(output) and same(dpft.load(output, nn.Linear(3, 2)), run.model)
    assert [m.steps for m in run.guarantee.spent] == [2]


def test_a_run_that_is_replaced_leaves_none_of_its_files_and_nothing_outside_is_touched(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside.txt"
    folder.mkdir()
    outside.write_text("mine")
    (folder / "dpft.json").write_text(json.dumps({"files": ["tokenizer.json", "../outside.txt"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".notes.txt").write_text("mine")
    toy_run().save(folder, overwrite=True)
    assert not (folder / "tokenizer.json").exists() and (folder / ".notes.txt").exists() and outside.read_text() == "mine"


class OwnHead(nn.Module):
    "A head of one's own, which the configuration does not know."
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 5), nn.Linear(5, 3)

    def forward(self, features, **_):
        return self.last(self.first(features[:, 0]).tanh())


def test_a_changed_head_never_loads_as_the_stock_one(bases, tmp_path):
    model = pretrained(bases, "roberta")
    model.classifier = OwnHead()
    run = tuned(model, dpft.Full())
    run.save(tmp_path)
    assert "`dpft.load(path, model=…)` gives the model" in (tmp_path / "README.md").read_text()
    for call, words in ((lambda: dpft.load(tmp_path), "pass the model that was saved"),
                        (lambda: hf.AutoModelForSequenceClassification.from_pretrained(tmp_path), "no file named model.safetensors")):
        with pytest.raises((ValueError, OSError), match=words):
            call()
    other = pretrained(bases, "roberta")
    other.classifier = OwnHead()
    assert same(dpft.load(tmp_path, other), run.model)


def small(name):
    "A tiny model, of a family whose parameters Transformers writes under other names, or whose classes it leaves out."
    torch.manual_seed(0)
    tiny = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16)
    picture = dict(tiny, image_size=8, patch_size=4, num_labels=2)
    bart = dict(vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16)
    return {"vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**picture)),
            "beit": lambda: hf.BeitForImageClassification(hf.BeitConfig(**picture)),
            "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(vocab_size=20, **tiny)),
            "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=20, num_key_value_heads=1, num_local_experts=2, **tiny)),
            "bart": lambda: hf.BartForSequenceClassification(hf.BartConfig(num_labels=2, **bart))}[name]().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit", "beit", "neox", "mixtral", "bart"])
def test_a_whole_save_of_transformers_comes_back_whatever_its_names_in_the_file(tmp_path, name, dtype):
    model = small(name).to(dtype)
    description = write_model(model, [key for key, _ in model.named_parameters()], tmp_path)
    again = read_model(tmp_path, description)
    assert same(again, model) and same(read_model(tmp_path, description, small(name).to(dtype)), model)
    assert {tensor.dtype for tensor in again.parameters()} == {dtype}
    assert same(type(model).from_pretrained(tmp_path, dtype=dtype), model)


@pytest.mark.parametrize("add", [LoRA, Adapter])
def test_what_was_added_to_a_renamed_family_comes_back(tmp_path, add):
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 8, 8), torch.arange(12) % 2)
    run = dpft.fine_tune(small("vit"), data, add(2), noise_multiplier=1.0, steps=2, batch_size=4, accountant="rdp", delta=0.01,
                         progress=False)
    run.save(tmp_path)
    assert same(dpft.load(tmp_path), run.model)


def test_a_model_of_mixed_precision_comes_back_as_it_was(tmp_path):
    model = small("vit").to(torch.bfloat16)
    model.classifier.float()
    description = write_model(model, ["classifier.bias"], tmp_path)
    assert same(read_model(tmp_path, description), model)
    given = read_model(tmp_path, description, small("vit"))
    assert {tensor.dtype for tensor in given.parameters()} == {torch.float32} and same(given, model.float())


def test_another_shape_is_refused_in_a_sentence_and_nothing_is_overwritten(tmp_path):
    model = small("vit")
    description = write_model(model, ["classifier.bias"], tmp_path)
    other = hf.ViTForImageClassification(hf.ViTConfig(**model.config.to_dict() | {"num_labels": 3, "id2label": None, "label2id": None}))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"classifier\.bias is in one of them only, or of another shape; pass the model that was saved"):
        read_model(tmp_path, description, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("inside", ["ledger", "checkpoint"])
def test_secrets_are_not_kept_in_the_folder_that_is_published(bases, tmp_path, inside):
    with pytest.raises(ValueError, match=rf"{inside}=.* lies in the folder that is published"):
        tuned(pretrained(bases, "roberta"), dpft.LastLayer(), output=tmp_path / "run", **{inside: tmp_path / "run" / "mine"})
    if inside == "ledger":
        with Ledger(tmp_path / "run" / "book") as book, pytest.raises(ValueError, match=r"ledger=.* lies in the folder that is published"):
            tuned(pretrained(bases, "roberta"), dpft.LastLayer(), output=tmp_path / "run", ledger=book)
    run = tuned(pretrained(bases, "roberta"), dpft.LastLayer(), ledger=tmp_path / "saved" / "mine.sqlite")
    with pytest.raises(ValueError, match="lies in the folder that is published"):
        run.save(tmp_path / "saved")


def test_a_damaged_description_of_a_saved_run_is_named(tmp_path):
    (tmp_path / "dpft.json").write_text('{"part": tr')
    with pytest.raises(ValueError, match=r"dpft.json is damaged \(Expecting value: line 1 column 10.*take another copy of the folder"):
        dpft.load(tmp_path, nn.Linear(3, 2))


@pytest.mark.parametrize("what", ["longer", "gone"])
def test_a_saved_file_that_is_damaged_or_gone_is_one_sentence(tmp_path, what):
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    run = dpft.fine_tune(nn.Linear(3, 2), rows, dpft.Full(), noise_multiplier=1.0, delta=1e-3, steps=1, batch_size=8, clip=1.0,
                         accountant="rdp", progress=False)
    run.save(tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    if what == "longer":
        file.write_bytes(file.read_bytes() + b"x")
    else:
        file.unlink()
    with pytest.raises(ValueError, match=r"out .*(cannot be read|do not fit|is damaged)"):
        dpft.load(tmp_path / "out", nn.Linear(3, 2))
