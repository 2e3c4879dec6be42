"""What a saved run holds, what it does not, and that it is refused on another base."""

import copy
import json
import math
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
from dpft.saving import (
    ADAPTER,
    PART,
    add_again,
    additions,
    base_name,
    free_folder,
    frozen_fingerprint,
    note_addition,
    restores,
    stored_name,
    write_model,
)

LLAMA = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=40,
             max_position_embeddings=24, pad_token_id=0, bos_token_id=1, eos_token_id=1)
ROBERTA = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40, num_labels=3,
               max_position_embeddings=24, pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders with pre-trained weights, by family."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    hf.RobertaForSequenceClassification(hf.RobertaConfig(**ROBERTA)).save_pretrained(folder / "roberta")
    hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).save_pretrained(folder / "llama")
    return folder


def pretrained(bases, name):
    kind = {"roberta": hf.RobertaForSequenceClassification, "llama": hf.LlamaForCausalLM}[name]
    return kind.from_pretrained(bases / name, dtype=torch.float32)


def tuned(model, method, name="roberta", **settings):
    _, loss_fn, batch = zoo.build(name, rows=8)
    data, collate = zoo.as_data(batch)
    settings = {"noise_multiplier": 1.0, "steps": 2, "batch_size": 4, "learning_rate": 0.1, "clip": 0.5, **settings}
    return dpft.fine_tune(model, data, method, loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01, seed=1, progress=False,
                          **settings)


def same(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def files(folder):
    return {file.name for file in folder.iterdir()}


METHODS = {  # name -> (base, method)
    "biases": ("roberta", dpft.BiTFiT), "added biases": ("llama", lambda: dpft.BiTFiT(add_missing=True, norms=True)),
    "random biases": ("llama", lambda: dpft.BiTFiT(add_missing=True, values="random")),
    "biases anew": ("roberta", lambda: dpft.BiTFiT(reinitialise="random")), "head": ("roberta", dpft.LastLayer),
    "lora": ("roberta", lambda: LoRA(2)), "lora on llama": ("llama", lambda: LoRA(2)), "adapter": ("roberta", lambda: Adapter(2)),
    "lora and biases": ("roberta", lambda: Chain(LoRA(2), dpft.BiTFiT())),
    "biases and lora": ("llama", lambda: Chain(dpft.BiTFiT(add_missing=True), LoRA(2))),
    "lora and added biases": ("llama", lambda: Chain(LoRA(2), dpft.BiTFiT(add_missing=True))),
    "adapter over lora": ("roberta", lambda: Chain(LoRA(2, targets="attention.output.dense"), Adapter(2))),
    "lora over adapter": ("roberta", lambda: Chain(Adapter(2), LoRA(2, targets="attention.output.dense"))),
    "full": ("roberta", dpft.Full),
}


@pytest.fixture(scope="module")
def runs(bases):
    """Name of a method -> its run, which is made once: saving leaves it as it is."""
    return cache(lambda name: tuned(pretrained(bases, METHODS[name][0]), METHODS[name][1](), METHODS[name][0]))


@pytest.mark.parametrize("whole", [None, True, False])
@pytest.mark.parametrize("name", METHODS)
def test_every_run_comes_back_bit_for_bit(runs, tmp_path, name, whole):
    run = runs(name)
    run.save(tmp_path, whole)
    part = (whole is not True and name != "full") or whole is False
    assert json.loads((tmp_path / "dpft.json").read_text())["part"] == part
    assert (not list(tmp_path.glob("model*.safetensors"))) == part
    assert same(dpft.load(tmp_path), run.model)
    assert dpft.Guarantee.load(tmp_path / "guarantee.json").mechanisms == run.mechanisms
    card = (tmp_path / "README.md").read_text()
    assert "differentially private" in card and "How to load" in card and ("holds only" in card) == part


def test_the_part_holds_what_trained_and_nothing_else(bases, tmp_path):
    run = tuned(pretrained(bases, "roberta"), dpft.BiTFiT())
    run.save(tmp_path)
    stored = load_file(tmp_path / PART)
    assert set(stored) == set(run.trained) and not any(name.endswith("query.weight") for name in stored)
    assert not {"state.pt", "run.json"} & files(tmp_path)
    base = pretrained(bases, "roberta")
    base.load_state_dict(stored, strict=False)                              # as the card says, without this package
    assert same(base, run.model)


def test_a_lora_run_is_an_adapter_that_peft_reads(bases, tmp_path):
    from peft import PeftModel

    for number, method in enumerate((LoRA(2), Chain(LoRA(2), dpft.BiTFiT()))):
        folder = tmp_path / str(number)
        run = tuned(pretrained(bases, "roberta"), method)
        run.save(folder)
        assert {ADAPTER, "adapter_config.json"} <= files(folder)
        peft = PeftModel.from_pretrained(pretrained(bases, "roberta"), folder).eval()
        ids = torch.randint(2, 40, (3, 7))
        run.model.eval()
        assert torch.equal(peft(input_ids=ids).logits, run.model(input_ids=ids).logits)
        plain = pretrained(bases, "roberta").eval()
        assert not torch.equal(plain(input_ids=ids).logits, run.model(input_ids=ids).logits)


def test_a_peft_model_of_ones_own_is_saved_and_loaded(bases, tmp_path):
    from peft import LoraConfig, get_peft_model

    class What(dpft.Method):
        def adapt(self, context):
            return [p for name, p in context.model.named_parameters() if "lora_" in name or "modules_to_save" in name]

        def start(self, context):
            context.train_only(self.adapt(context))

    model = get_peft_model(pretrained(bases, "roberta"), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    run = tuned(model.double(), What())
    run.save(tmp_path)
    again = dpft.load(tmp_path)
    assert type(again) is type(run.model)
    ids = torch.randint(2, 40, (3, 7))
    assert torch.equal(again.eval()(input_ids=ids).logits, run.model.eval()(input_ids=ids).logits)
    with pytest.raises(ValueError, match="merge_and_unload"):
        run.save(tmp_path / "whole", whole=True)


@pytest.mark.parametrize("name", ["biases", "lora", "added biases", "adapter"])
def test_another_base_is_refused_and_left_as_it_was(bases, tmp_path, name):
    base, method = METHODS[name]
    tuned(pretrained(bases, base), method(), base).save(tmp_path)
    other = pretrained(bases, base)
    with torch.no_grad():
        next(p for n, p in other.named_parameters() if n.endswith("down_proj.weight") or n.endswith("1.output.dense.weight")).mul_(1.01)
    before = copy.deepcopy(other)
    with pytest.raises(ValueError, match="another base model"):
        dpft.load(tmp_path, model=other)
    assert same(other, before)
    with pytest.raises(ValueError, match="another base model"):
        dpft.load(tmp_path, model=pretrained(bases, "llama" if base == "roberta" else "roberta"))
    assert same(dpft.load(tmp_path, model=pretrained(bases, base)), dpft.load(tmp_path))


def test_a_base_that_changed_since_it_was_loaded_is_saved_whole(bases, tmp_path):
    model = pretrained(bases, "roberta")
    model.roberta.encoder.layer[0].output.dense.weight.data.mul_(1.01)       # trained on public data, say
    run = tuned(model, dpft.BiTFiT())
    run.save(tmp_path)
    assert (tmp_path / "model.safetensors").exists() and same(dpft.load(tmp_path), run.model)
    with pytest.raises(ValueError, match="overwrite=True"):
        run.save(tmp_path, whole=False)
    run.save(tmp_path, whole=False, overwrite=True)                         # on the user's word, for whoever has that base
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match="cannot be loaded; pass the base"):
        dpft.load(tmp_path)
    assert same(dpft.load(tmp_path, model=copy.deepcopy(run.model)), run.model)


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


def test_a_module_of_ones_own_in_parts(tmp_path):
    def net():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 3, bias=False))

    data = [(torch.randn(1, 4, 4), torch.tensor(i % 3)) for i in range(8)]
    run = dpft.fine_tune(net(), data, dpft.BiTFiT(add_missing=True), noise_multiplier=1.0, steps=2, batch_size=4, delta=0.01, seed=0,
                         accountant="rdp", loss_fn=zoo.image_loss, progress=False)
    run.save(tmp_path / "whole")
    with pytest.raises(ValueError, match="user-defined module"):
        dpft.load(tmp_path / "whole")
    assert same(dpft.load(tmp_path / "whole", model=net()), run.model)
    run.save(tmp_path / "part", whole=False)
    assert set(load_file(tmp_path / "part" / PART)) == {"1.bias", "3.weight"}
    assert same(dpft.load(tmp_path / "part", model=net()), run.model)
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


def test_the_fingerprint_sees_every_frozen_parameter_and_nothing_else():
    model, _, _ = zoo.build("roberta")
    trained = {name for name in dict(model.named_parameters()) if name.endswith("bias")}
    one = frozen_fingerprint(model, trained)
    for name, _ in model.named_parameters():
        other = copy.deepcopy(model)
        other.get_parameter(name).data.flatten()[0] += 1e-3
        assert (frozen_fingerprint(other, trained) == one) == (name in trained), name
    assert frozen_fingerprint(model, trained - {min(trained)}) != one


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
    with pytest.raises(TypeError):
        note_addition(model, add_scale, [], by=torch.ones(1))


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
    (tmp_path / "file").write_text("notes")
    with pytest.raises(ValueError, match="file is a file"):
        free_folder(tmp_path / "file", overwrite=True)
    for name in ("dpft.json", "guarantee.json", "README.md"):
        (folder := tmp_path / name.partition(".")[0]).mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(ValueError, match=f"holds {name} already, .*overwrite=True"):
            free_folder(folder)
        assert free_folder(folder, overwrite=True) == folder and (folder / name).read_text() == "{}"


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
        with pytest.raises(ValueError, match="only record of what its runs have spent" if overwrite else "holds ledger.sqlite already"):
            call()
    with pytest.raises(ValueError, match="only record of what its runs have spent"):
        run.guarantee.publish(folder, run.ledger)
    assert contents(folder) == {"ledger.sqlite": before}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["patients.csv", "config.json", "model-00001-of-00002.safetensors", "part/notes.txt"])
def test_a_folder_with_files_that_no_run_wrote_is_refused(tmp_path, name, overwrite):
    """The digest of a private file went into the guarantee, and the files of a base were replaced."""
    run = toy_run()
    for folder in (tmp_path / "own", tmp_path / "earlier")[:1 + overwrite]:
        if folder.name == "earlier":
            run.save(folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
        before = contents(folder)
        for call in (lambda: run.save(folder, overwrite=overwrite), lambda: toy_run(output=folder, overwrite=overwrite)):  # noqa: B023
            with pytest.raises(ValueError, match=f"{name}, which no run wrote"):
                call()
        assert contents(folder) == before
        (folder / name).unlink()
        (folder / ".gitattributes").write_text("of a repository")
        run.save(folder, overwrite=overwrite)
        assert verify(folder)


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
            words = "holds README.md already, which saving would replace; name another folder"
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


@pytest.mark.parametrize("method", [dpft.Full, dpft.BiTFiT])
def test_a_changed_head_never_loads_as_the_stock_one(bases, tmp_path, method):
    model = pretrained(bases, "roberta")
    model.classifier = OwnHead()
    run = tuned(model, method())
    run.save(tmp_path, whole=True)
    assert "`dpft.load(path, model=…)` gives the model" in (tmp_path / "README.md").read_text()
    with pytest.raises(ValueError, match="pass the model that was saved"):
        dpft.load(tmp_path)
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


def as_a_run(folder, model, trained):
    "Write a model as a run does, and leave out its guarantee."
    folder.mkdir(exist_ok=True)
    description = write_model(model, trained, folder, whole=True)
    (folder / "dpft.json").write_text(json.dumps(description | {"kind": "image", "trained": trained}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit", "beit", "neox", "mixtral", "bart"])
def test_a_whole_save_of_transformers_comes_back_whatever_its_names_in_the_file(tmp_path, name, dtype):
    """Its own loader reads the folder too, and `dpft.load` one that Transformers wrote with the names of the family."""
    model = small(name).to(dtype)
    as_a_run(tmp_path, model, [key for key, _ in model.named_parameters()])
    assert same(dpft.load(tmp_path), model) and same(dpft.load(tmp_path, small(name).to(dtype)), model)
    assert {tensor.dtype for tensor in dpft.load(tmp_path).parameters()} == {dtype}
    assert same(type(model).from_pretrained(tmp_path, dtype=dtype), model)
    if name != "bart":
        model.save_pretrained(tmp_path)
        assert same(dpft.load(tmp_path), model)


@pytest.mark.parametrize("add", [lambda model: dpft.baselines.LoRA(2), lambda model: Adapter(2)], ids=["lora", "adapter"])
def test_what_was_added_to_a_renamed_family_comes_back_with_the_whole(tmp_path, add):
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 8, 8), torch.arange(12) % 2)
    run = dpft.fine_tune(small("vit"), data, add(None), noise_multiplier=1.0, steps=2, batch_size=4, accountant="rdp", delta=0.01,
                         progress=False)
    run.save(tmp_path, whole=True)
    assert same(dpft.load(tmp_path), run.model)


def test_a_model_of_mixed_precision_comes_back_as_it_was(tmp_path):
    model = small("vit").to(torch.bfloat16)
    model.classifier.float()
    again = dpft.load(as_a_run(tmp_path, model, ["classifier.bias"]))
    assert again.classifier.weight.dtype == torch.float32 and {p.dtype for p in again.vit.parameters()} == {torch.bfloat16}
    given = dpft.load(tmp_path, small("vit"))
    assert {tensor.dtype for tensor in given.parameters()} == {torch.float32} and same(given, again.float())


def test_another_shape_is_refused_in_a_sentence_and_nothing_is_overwritten(tmp_path):
    model = small("vit")
    as_a_run(tmp_path, model, ["classifier.bias"])
    other = hf.ViTForImageClassification(hf.ViTConfig(**model.config.to_dict() | {"num_labels": 3, "id2label": None, "label2id": None}))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"classifier\.bias is in one of them only, or of another shape; pass the model that was saved"):
        dpft.load(tmp_path, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_the_fingerprint_sees_the_statistics_of_a_norm():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other = copy.deepcopy(model)
    other[1].running_mean += 1
    assert frozen_fingerprint(model, []) != frozen_fingerprint(other, [])


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
