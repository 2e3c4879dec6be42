"""What the baselines train and add, that nothing else moves, that their per-example gradients are the oracle's, and what they refuse."""

import copy
import json
import math
import warnings

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import one_stream
from torch import nn
from transformers import BertConfig, RobertaConfig, RobertaForSequenceClassification

from dpft import load
from dpft.baselines import (
    Adapted,
    Adapter,
    Full,
    LargestWeights,
    LastLayer,
    LoRA,
    NormOnly,
    RandomPartitions,
    Trainable,
    admitted,
    check_fits,
    linear_layers,
    merge_lora,
    partitions,
    remove_adapters,
)
from dpft.composition import Chain
from dpft.gradients import gradients, per_example_gradients
from dpft.loop import fine_tune
from dpft.losses import logits
from dpft.method import Context
from dpft.models import fresh_head, load_model, mean_pooled_classifier
from dpft.saving import additions

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
HEAD = {"roberta": "classifier.", "bert": "classifier.", "gpt2": "score.", "llama": "lm_head.", "vit": "classifier.",
        "cnn": "head.", "mean-pooled": "classifier."}
TRANSFORMERS = ["roberta", "bert", "gpt2", "gpt2-lm", "vit", "llama"]


def build(name):
    if name != "mean-pooled":
        return zoo.build(name, rows=8)
    _, loss_fn, batch = zoo.build("bert", rows=8)
    torch.manual_seed(0)
    return mean_pooled_classifier()(BertConfig(**SMALL, vocab_size=40, num_labels=3)).double(), loss_fn, batch


def moved(name, method):
    "Names of the parameters, and of the buffers, that a short noisy run with weight decay changes; and all names."
    model, loss_fn, batch = build(name)
    data, collate = zoo.as_data(batch)
    before = copy.deepcopy(model)
    run = fine_tune(model, data, method, noise_multiplier=1.0, steps=3, batch_size=4, learning_rate=0.01, weight_decay=0.1, clip=0.5,
                    loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01, seed=1, progress=False)
    buffers = dict(before.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in run.model.named_buffers())
    names = {key for key, _ in before.named_parameters()}
    return {key for key in names if not torch.equal(before.get_parameter(key), run.model.get_parameter(key))}, names, set(run.trained)


@pytest.mark.parametrize("name", HEAD)
def test_the_probe_moves_the_head_alone(name):
    found, names, trained = moved(name, LastLayer())
    assert found == trained == {key for key in names if key.startswith(HEAD[name])}


@pytest.mark.parametrize("name", [*HEAD, "gpt2-lm"])
def test_full_moves_everything(name):
    found, names, trained = moved(name, Full())
    assert found == trained == names


@one_stream()
def test_a_probe_is_logistic_regression_on_fixed_features():
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 9), nn.Tanh()).double(), nn.Linear(9, 3).double()
    inputs, labels = torch.randn(20, 6, dtype=torch.float64), torch.arange(20) % 3
    regression, model = nn.Sequential(copy.deepcopy(head)), nn.Sequential(body, head)
    settings = dict(epsilon=math.inf, steps=5, batch_size=8, learning_rate=0.5, optimizer="sgd", loss_fn=zoo.image_loss, seed=3,
                    progress=False)
    fine_tune(model, list(zip(inputs, labels, strict=True)), LastLayer(), **settings)
    with torch.no_grad():
        features = body(inputs)
    fine_tune(regression, list(zip(features, labels, strict=True)), Full(), **settings)
    assert torch.allclose(model[1].weight, regression[0].weight, rtol=1e-10)
    assert torch.allclose(model[1].bias, regression[0].bias, rtol=1e-10)


# What is chosen and added

def unseen(model, batch):
    raise AssertionError("looked at data")


def begun(method, name, rows=5):
    "A model of the zoo after a method has started on it, blind; loss and batch."
    model, loss_fn, batch = zoo.build(name, rows)
    method.start(Context(model, unseen, 1, 1, 1))
    return model, loss_fn, batch


def names_of(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def in_head(model):
    head = {id(parameter) for parameter in fresh_head(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in head}


def kicked(model):
    "Zeros, behind which gradients hide, replaced."
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.3)
    return model


def check_exact(method, name, rows=5):
    "The engine's sum over a method's blocks is the oracle's, by fast rules alone."
    model, loss_fn, batch = begun(method, name, rows)
    kicked(model)
    block, = method.blocks(Context(model, loss_fn, 1, 1, 1))
    masks = dict(zip(block.parameters, block.masks or [None] * len(block.parameters), strict=True))
    rows_of = {key: values if masks[model.get_parameter(key)] is None else values * masks[model.get_parameter(key)]
               for key, values in per_example_gradients(model, loss_fn, batch).items()}
    flat = torch.cat([values.flatten(1) for values in rows_of.values()], 1)
    clip = flat.norm(dim=1).min().item() / 2                                     # so that every example is clipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")                                           # no way around the rules
        sums, norms = gradients(model, loss_fn, batch).clipped_sum([type(block)(block.parameters, block.masks, clip)])
    wanted = (clip / flat.norm(dim=1)).clamp(max=1) @ flat
    found = torch.cat([sums[key].flatten() for key in rows_of])
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()
    assert torch.allclose(norms[:, 0], flat.norm(dim=1), rtol=1e-9)


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("method", [LoRA(3, alpha=7), Adapter(4), NormOnly(), LargestWeights(0.1)], ids=repr)
def test_per_example_gradients_are_the_oracles_by_rules_alone(method, name):
    check_exact(copy.deepcopy(method), name, rows=7 if name == "bert" else 5)


def run_of(method, name, optimizer, **settings):
    model, loss_fn, batch = zoo.build(name, rows=8)
    data, collate = zoo.as_data(batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = fine_tune(model, data, method, steps=3, batch_size=4, learning_rate=0.05, weight_decay=0.3, clip=0.5, optimizer=optimizer,
                    loss_fn=loss_fn, collate_fn=collate, accountant="rdp", delta=0.01, seed=1, progress=False,
                    **({"noise_multiplier": 1.0} | settings))
    return run, before


def momentum(parameters, lr, weight_decay):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)


@pytest.mark.parametrize("name", ["roberta", "gpt2-lm"])
@pytest.mark.parametrize("method", [LoRA(2), Adapter(3), NormOnly(), RandomPartitions(0.3)], ids=repr)
def test_a_private_run_moves_what_the_method_names_and_nothing_else(method, name):
    run, before = run_of(copy.deepcopy(method), name, "adamw")
    after = {key.replace(".base_layer", ""): value for key, value in run.model.named_parameters()}
    changed = {key for key, value in after.items() if key not in before or not torch.equal(value, before[key])}
    assert changed == set(run.trained) == names_of(run.model) and changed >= in_head(run.model)
    assert run.epsilon < math.inf and len(run.mechanisms) == 1
    if isinstance(method, LoRA | Adapter):
        assert not (changed - in_head(run.model)) & set(before)


@pytest.mark.parametrize("optimizer", ["adamw", momentum])
@pytest.mark.parametrize("name", ["bert", "cnn"])
def test_masked_entries_stay_bit_for_bit(name, optimizer):
    method = LargestWeights(0.25)
    run, before = run_of(method, name, optimizer)
    head, moved_in, kept = in_head(run.model), 0, 0
    for key, after in run.model.named_parameters():
        if key in head:
            assert (after != before[key]).all()
            continue
        mask = method.masks.get(after, torch.zeros_like(after, dtype=torch.bool))
        assert torch.equal(after[~mask], before[key][~mask])
        moved_in, kept = moved_in + int((after != before[key])[mask].sum()), kept + int(mask.sum())
    body = sum(p.numel() for key, p in run.model.named_parameters() if key not in head)
    assert kept == admitted(0.25, body) and moved_in == kept                     # noise moves every entry of the mask


class Rounded(nn.Module):
    """Few different magnitudes, so that many entries are as large as the last that is chosen."""

    def __init__(self, sizes, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ParameterList([nn.Parameter(torch.randint(-3, 4, (size,)).double()) for size in sizes])
        self.head = nn.Linear(2, 2).double()


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), ratio=st.floats(0.05, 1.0), seed=st.integers(0, 2**20))
@settings(max_examples=60)
def test_the_mask_holds_the_largest_entries_and_exactly_as_many_as_fit(sizes, ratio, seed):
    model, method = Rounded(sizes, seed), LargestWeights(ratio)
    if admitted(ratio, sum(sizes)) == 0:
        with pytest.raises(ValueError, match="lets no entry train"):
            method.start(Context(model, unseen, 1, 1, 1))
        return
    method.start(Context(model, unseen, 1, 1, 1))
    masks = torch.cat([method.masks.get(p, torch.zeros_like(p, dtype=torch.bool)) for p in model.body])
    values = torch.cat([p.detach().abs() for p in model.body])
    assert int(masks.sum()) == admitted(ratio, sum(sizes))
    assert masks.all() or values[masks].min() >= values[~masks].max()
    assert names_of(model) == {f"body.{i}" for i, p in enumerate(model.body) if p in method.masks} | {"head.weight", "head.bias"}


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), ratio=st.floats(0.05, 1.0), seed=st.integers(0, 2**20))
@settings(max_examples=60)
def test_a_random_choice_fits_and_nothing_more_would(sizes, ratio, seed):
    model, room = Rounded(sizes, 0), admitted(ratio, sum(sizes))
    if min(sizes) > room:
        with pytest.raises(ValueError, match="is less than any partition; the smallest, body"):
            RandomPartitions(ratio, seed).start(Context(model, unseen, 1, 1, 1))
        return
    RandomPartitions(ratio, seed).start(Context(model, unseen, 1, 1, 1))
    chosen, left = ([p.numel() for p in model.body if p.requires_grad is flag] for flag in (True, False))
    assert sum(chosen) <= room and all(size > room - sum(chosen) for size in left)
    assert model.head.weight.requires_grad
    torch.rand(3)                                                                # another global state
    again = Rounded(sizes, 0)
    RandomPartitions(ratio, seed).start(Context(again, unseen, 1, 1, 1))
    assert names_of(again) == names_of(model)


def test_seeds_choose_differently():
    assert len({frozenset(names_of(begun(RandomPartitions(0.3, seed), "bert")[0])) for seed in range(8)}) > 4


def test_a_share_is_rounded_down_but_for_rounding_itself():
    assert [admitted(ratio, 10) for ratio in (0.29, 0.1 + 0.2, 0.3, 1.0)] == [2, 3, 3, 10] and admitted(0.7 / 0.1 / 10, 100) == 70


@pytest.mark.parametrize("ratio", [0, -0.1, 1.0001, math.nan])
@pytest.mark.parametrize("method", [RandomPartitions, LargestWeights])
def test_a_share_lies_between_nothing_and_everything(method, ratio):
    with pytest.raises(ValueError, match="must lie in \\(0, 1\\]"):
        method(ratio)


def test_selectors_choose_among_what_is_there():
    model, *_ = begun(LoRA(2), "bert")
    context = Context(model, unseen, 1, 1, 1)
    among = [p for key, p in model.named_parameters() if "lora_" in key]
    chosen = {id(p) for p in RandomPartitions(0.5).choose(context, among)}
    assert len(chosen) == 4 and chosen < {id(p) for p in among}                  # two pairs of four
    biases = [p for key, p in model.named_parameters() if key.endswith("bias") and not key.startswith("classifier")]
    method = LargestWeights(0.5)
    assert {id(p) for p in method.choose(context, biases)} <= {id(p) for p in biases}
    assert sum(int(mask.sum()) for mask in method.masks.values()) == sum(p.numel() for p in biases) // 2
    with pytest.raises(ValueError, match="no partition to choose from; choose LastLayer"):
        RandomPartitions(0.5).choose(context, [])


def test_norm_layers_of_every_kind():
    for name, end in (("bert", "LayerNorm"), ("gpt2", "ln_"), ("llama", "norm"), ("vit", "layernorm"), ("cnn", "norm")):
        model, *_ = begun(NormOnly(), name)
        wanted = {key for key, _ in model.named_parameters() if end in key}
        assert names_of(model) == wanted | in_head(model)
    model = nn.ModuleDict({"norm": nn.LayerNorm(3), "classifier": nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))})
    assert [id(p) for p in NormOnly().adapt(Context(model, unseen, 1, 1, 1))] == [id(model.norm.weight), id(model.norm.bias)]
    with pytest.raises(ValueError, match="Sequential has no norm layer"):
        NormOnly().start(Context(load_model("mlp", 10), unseen, 1, 1, 1))


# LoRA

@pytest.mark.parametrize("name", TRANSFORMERS)
def test_lora_starts_where_the_model_was_and_merges_into_it(name):
    plain, _, batch = zoo.build(name)
    model, loss_fn, _ = begun(LoRA(2), name)
    assert torch.equal(logits(model, batch), logits(plain, batch))
    first = per_example_gradients(model, loss_fn, batch)
    assert not any(values.any() for key, values in first.items() if "lora_A" in key)
    assert all(values.any() for key, values in first.items() if "lora_B" in key)
    kicked(model)
    answers = logits(model, batch)
    assert not torch.allclose(answers, logits(plain, batch), atol=1e-3)
    assert merge_lora(model) is model and torch.allclose(logits(model, batch), answers, atol=1e-10)
    assert list(model.state_dict()) == list(plain.state_dict()) and not hasattr(model, "peft_config")


@pytest.mark.parametrize("alpha,scale", [(None, 1.0), (6, 3.0), (1, 0.5)])
def test_the_product_is_scaled_by_alpha_over_the_rank(alpha, scale):
    plain, *_ = zoo.build("bert")
    model = kicked(begun(LoRA(2, alpha), "bert")[0])
    layer = model.bert.encoder.layer[0].attention.self.value
    product = layer.lora_B.default.weight @ layer.lora_A.default.weight
    merged = merge_lora(model).bert.encoder.layer[0].attention.self.value.weight
    assert torch.allclose(merged, plain.bert.encoder.layer[0].attention.self.value.weight + scale * product)


def test_fresh_matrices_come_from_their_seed_alone():
    torch.manual_seed(3)
    after = torch.rand(1)
    torch.manual_seed(3)
    model, _, _ = zoo.build("bert")
    for method in (LoRA(2, seed=1), Adapter(2, seed=1)):
        torch.manual_seed(3)
        method.start(Context(copy.deepcopy(model), unseen, 1, 1, 1))
        assert torch.equal(torch.rand(1), after)
    def first(method):
        fresh = copy.deepcopy(model)
        method.start(Context(fresh, unseen, 1, 1, 1))
        return torch.cat([p.flatten() for key, p in fresh.named_parameters() if "lora_A" in key or "adapter.down.weight" in key])
    for kind in (LoRA, Adapter):
        assert torch.equal(first(kind(2, seed=1)), first(kind(2, seed=1))) and not torch.equal(first(kind(2, seed=1)), first(kind(2)))


def test_a_target_is_a_name_or_its_end_and_no_part_of_one():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 2))
    LoRA(1, targets="2.1").start(Context(model, unseen, 1, 1, 1))
    assert {key for key in names_of(model) if "lora" in key} == {"2.1.lora_A.default.weight", "2.1.lora_B.default.weight"}
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.ModuleDict({"2": two, "12": copy.deepcopy(two), "head": nn.Linear(2, 2)})
    LoRA(1, targets="2.1").start(Context(model, unseen, 1, 1, 1))
    assert {key.partition(".lora")[0] for key in names_of(model) if "lora" in key} == {"2.1"}


SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3)
OTHERS = {  # models whose queries and values have other names, or that have none: what LoRA goes with
    "deberta": (lambda hf: hf.DebertaForSequenceClassification(hf.DebertaConfig(**SIZES)), {"in_proj"}),
    "deberta v2": (lambda hf: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**SIZES)), {"query_proj", "value_proj"}),
    "xlnet": (lambda hf: hf.XLNetForSequenceClassification(hf.XLNetConfig(
        d_model=16, n_layer=1, n_head=2, d_inner=24, vocab_size=40)), {"layer_1", "layer_2"}),
    "mamba": (lambda hf: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)),
              {"in_proj"}),
    "convnext": (lambda hf: hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
                 {"pwconv1", "pwconv2"}),
    "t5": (lambda hf: hf.T5ForConditionalGeneration(hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40)),
           {"q", "v"}),
    "swin": (lambda hf: hf.SwinForImageClassification(hf.SwinConfig(
        image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)),
        {"query", "value", "q_proj", "v_proj"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_lora_finds_layers_in_models_of_every_kind(name):
    import transformers as hf

    make, usual = OTHERS[name]
    torch.manual_seed(0)
    model = make(hf)
    LoRA(2).start(Context(model, unseen, 1, 1, 1))
    adapted = {key.split(".lora_")[0].rpartition(".")[2] for key in names_of(model) if "lora_" in key}
    assert adapted and adapted <= usual


# A model that says itself what trains

def wrapped_bert(**settings):
    from peft import LoraConfig, get_peft_model

    model, loss_fn, batch = zoo.build("bert", rows=8)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query"], **settings)).double(), loss_fn, batch


def test_what_requires_a_gradient_trains_and_nothing_else(tmp_path):
    from peft import PeftModel

    model, loss_fn, batch = wrapped_bert()
    data, collate = zoo.as_data(batch)
    wanted, before = names_of(model), copy.deepcopy(model)
    assert any("lora_A" in key for key in wanted) and any("modules_to_save" in key for key in wanted)
    run = fine_tune(model, data, Trainable(), noise_multiplier=1.0, steps=3, batch_size=4, learning_rate=0.05, clip=0.5, loss_fn=loss_fn,
                    collate_fn=collate, accountant="rdp", delta=0.01, seed=1, progress=False)
    old = dict(before.named_parameters())
    assert set(run.trained) == wanted == {key for key, value in run.model.named_parameters() if not torch.equal(value, old[key])}
    run.save(tmp_path)
    run.model.eval()
    for again in (PeftModel.from_pretrained(zoo.build("bert")[0], tmp_path), load(tmp_path, model=zoo.build("bert")[0])):
        assert torch.allclose(logits(again.eval().double(), batch), logits(run.model, batch), atol=1e-6)


def test_a_frozen_head_stays_frozen_and_nothing_to_train_is_refused():
    model, loss_fn, _ = zoo.build("cnn")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("stem"))
    Trainable().start(Context(model, loss_fn, 1, 1, 1))
    assert names_of(model) == {"stem.weight", "stem.bias"}
    with pytest.raises(ValueError, match="nothing to train"):
        Trainable().start(Context(model.requires_grad_(False), loss_fn, 1, 1, 1))


def test_packed_layers_are_not_offered():
    "torch's own attention and encoder layers read their matrices and call no layer, so a product beside these would never be used."
    model = nn.ModuleDict({"encoder": nn.TransformerEncoderLayer(8, 2, 16), "out": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    assert list(linear_layers(model)) == ["out"]


@pytest.mark.parametrize("order", [(LoRA(2, targets="dense"), Adapter(3)), (Adapter(3), LoRA(2, targets="dense"))], ids=repr)
def test_adapters_and_products_on_the_same_layers(order):
    plain, loss_fn, batch = zoo.build("bert")
    model, *_ = zoo.build("bert")
    context = Context(model, unseen, 1, 1, 1)
    added = [p for method in order for p in method.adapt(context)]
    assert len(added) == 30 and {id(p) for p in added} < {id(p) for p in model.parameters()}
    context.train_only(added)
    kicked(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = gradients(model, loss_fn, batch).weighted_sum(torch.ones(5, dtype=torch.float64))
    for key, values in per_example_gradients(model, loss_fn, batch).items():
        assert torch.allclose(sums[key], values.sum(0), rtol=1e-8, atol=1e-12)
    answers = logits(model, batch)
    assert torch.allclose(logits(merge_lora(model), batch), answers, atol=1e-10)
    assert list(remove_adapters(model).state_dict()) == list(plain.state_dict())


# Adapters

@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_adapter_after_both_halves_of_every_block(name):
    plain, _, batch = zoo.build(name)
    before = copy.deepcopy(plain.state_dict())
    model, *_ = begun(Adapter(4), name)
    inside = [key for key, module in model.named_modules() if isinstance(module, Adapted)]
    assert len(inside) == 4 and names_of(model) - in_head(model) == {
        f"{key}.adapter.{part}" for key in inside for part in ("down.weight", "down.bias", "up.weight", "up.bias")}
    assert sum(any(f".{half}" in key for half in ("attention.", "attn.", "self_attn.")) for key in inside) == 2
    near, far = logits(model, batch), logits(plain, batch)
    assert 0 < (near - far).abs().max() < 0.05
    assert len(partitions(model)) == 4                                           # an adapted model offers its adapters alone
    remove_adapters(model)
    assert torch.equal(logits(model, batch), far) and not additions(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("method", [LoRA(2), Adapter(3), LargestWeights(0.1), NormOnly()], ids=repr)
def test_saved_and_loaded(method, tmp_path):
    run, _ = run_of(copy.deepcopy(method), "bert", "adamw")
    run.save(tmp_path)
    json.loads((tmp_path / "dpft.json").read_text())
    again = load(tmp_path, model=zoo.build("bert")[0])
    _, _, batch = zoo.build("bert")
    run.model.eval(), again.eval()
    assert torch.allclose(logits(again, batch), logits(run.model, batch), atol=1e-6)


# What is refused

class HalfABlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"o_proj": nn.Linear(2, 2)})
        self.mixing, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize("method, model, words", [
    (LastLayer(), "gpt2-lm", r"GPT2LMHeadModel shares its output layer between lm_head and transformer.*BiTFiT"),
    (LastLayer(), nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), r"has no head.*'classifier'"),
    (LoRA(targets=("query", "keys")), "bert", r"'keys' outside its head; targets can be attention.output.dense, attention.self.key"),
    (LoRA(targets="classifier"), "bert", r"'classifier'.*targets can be"),        # the head trains anyway
    (LoRA(targets=["uery"]), "bert", "no linear layer of the name 'uery'"),
    (LoRA(), load_model("mlp", 10), r"usual name.*targets can be 1, 3"), (LoRA(), load_model("cnn", 10), "targets can be nothing"),
    (Adapter(), load_model("mlp", 10), "after can be 1, 3"), (Adapter(), HalfABlock(), r"not both ends.*after="),
    (Chain(LoRA(2), LoRA(1)), "bert", "already.*merge_lora"), (Chain(Adapter(2), Adapter(1)), "bert", "already.*remove_adapters"),
    (NormOnly(), load_model("mlp", 10), "has no norm layer"),
    (RandomPartitions(1e-9), "bert", r"is less than any partition; the smallest, .* would fit from ratio=")])
def test_what_cannot_be_is_refused_with_the_way_out(method, model, words):
    model = zoo.build(model)[0] if isinstance(model, str) else model
    with pytest.raises(ValueError, match=words):
        method.start(Context(model, unseen, 1, 1, 1))


def test_a_small_ratio_says_what_fits():
    with torch.device("meta"):
        roberta = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1))
    with pytest.warns(UserWarning, match=r"only 27 of 100 partitions, with 0.3% of all entries, fit into ratio=0.00390625"):
        check_fits(partitions(roberta), 0.25**4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fits(partitions(roberta), 0.25**3)
