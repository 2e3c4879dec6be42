"""Architectures that people bring, each with each way to train it: sums are exact by the default loss, one private step runs.

`nbs/results/models.json` is the table of 26 architectures and six methods, 156 pairs, which the reference shows and these tests hold
to: at least 140 work, and each of the others is refused by a sentence that names the way out."""

import copy
import json
import re
import warnings
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn, tensor
from zoo import apart

import dpft
from dpft.book.networks import wide_resnet
from dpft.data import as_dataset
from dpft.gradients import clipped_sum, gradients, per_example_gradients
from dpft.losses import default_loss, task_of
from dpft.method import Context
from dpft.models import freeze_batchnorm
from dpft.norms import members
from dpft.oracle import evaluating

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=64,
             pad_token_id=0)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
KEYS = {"num_key_value_heads": 2}
GPT = dict(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=24, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
BART = dict(vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=24, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=2, dropout=0.0)
IMAGE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=8, num_labels=3)
RESNET = dict(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)


def made(kind, config, *more, **settings):
    return lambda: kind(config(*more, **settings))


TEXT = {  # classifiers of texts
    "BERT": made(hf.BertForSequenceClassification, hf.BertConfig, **SIZES, **QUIET, num_labels=3),
    "RoBERTa": made(hf.RobertaForSequenceClassification, hf.RobertaConfig, **SIZES, **QUIET, num_labels=3),
    "DistilBERT": made(hf.DistilBertForSequenceClassification, hf.DistilBertConfig, vocab_size=40, dim=16, n_layers=2, n_heads=2,
                       hidden_dim=24, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3),
    "DeBERTa": made(hf.DebertaForSequenceClassification, hf.DebertaConfig, **SIZES, **QUIET, num_labels=3),
    "DeBERTa-v3": made(hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config, **SIZES, **QUIET, num_labels=3, relative_attention=True,
                       pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True, position_buckets=4),
    "ALBERT": made(hf.AlbertForSequenceClassification, hf.AlbertConfig, **SIZES, **QUIET, embedding_size=8, num_labels=3,
                   classifier_dropout_prob=0.0),
    "ELECTRA": made(hf.ElectraForSequenceClassification, hf.ElectraConfig, **SIZES, **QUIET, embedding_size=8, num_labels=3),
    "XLNet": made(hf.XLNetForSequenceClassification, hf.XLNetConfig, vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=24,
                  dropout=0.0, num_labels=3, summary_last_dropout=0.0),
    "GPT-2, classes": made(hf.GPT2ForSequenceClassification, hf.GPT2Config, **GPT, num_labels=3),
    "BERT, tags": made(hf.BertForTokenClassification, hf.BertConfig, **SIZES, **QUIET, num_labels=3),
}
WRITERS = {
    "GPT-2": made(hf.GPT2LMHeadModel, hf.GPT2Config, **GPT),
    "Llama": made(hf.LlamaForCausalLM, hf.LlamaConfig, **SIZES, **KEYS),
    "Qwen2": made(hf.Qwen2ForCausalLM, hf.Qwen2Config, **SIZES, **KEYS),
    "Qwen3": made(hf.Qwen3ForCausalLM, hf.Qwen3Config, **SIZES, **KEYS, head_dim=8),
    "Mistral": made(hf.MistralForCausalLM, hf.MistralConfig, **SIZES, **KEYS),
    "Phi": made(hf.PhiForCausalLM, hf.PhiConfig, **SIZES, resid_pdrop=0.0, embd_pdrop=0.0),
    "Gemma": made(hf.GemmaForCausalLM, hf.GemmaConfig, **SIZES, **KEYS, head_dim=8),
    "Mixtral": made(hf.MixtralForCausalLM, hf.MixtralConfig, **SIZES, **KEYS, num_local_experts=2),
    "Mamba": made(hf.MambaForCausalLM, hf.MambaConfig, vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0),
    "T5": made(hf.T5ForConditionalGeneration, hf.T5Config, vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
               decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0),
    "BART": made(hf.BartForConditionalGeneration, hf.BartConfig, **BART),
    "Whisper": made(hf.WhisperForConditionalGeneration, hf.WhisperConfig, **BART, num_mel_bins=4, max_source_positions=8,
                    max_target_positions=24),
}
IMAGES = {
    "ViT": made(hf.ViTForImageClassification, hf.ViTConfig, **IMAGE, **QUIET),
    "ConvNeXt": made(hf.ConvNextForImageClassification, hf.ConvNextConfig, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3),
    "Swin": made(hf.SwinForImageClassification, hf.SwinConfig, image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2],
                 window_size=2, num_labels=3, drop_path_rate=0.0),
    "ResNet": made(hf.ResNetForImageClassification, hf.ResNetConfig, **RESNET),
    "CLIP, classes": made(hf.CLIPForImageClassification, hf.CLIPConfig, num_labels=3, projection_dim=8,
                          vision_config={**IMAGE, "num_labels": 3}, text_config={**SIZES}),
    "wide ResNet": lambda: wide_resnet(3, (3, 16, 16), depth=10, width=1),
}
ALL = TEXT | WRITERS | IMAGES
SHOWN = json.loads((Path(__file__).parent.parent / "nbs" / "results" / "models.json").read_text(encoding="utf-8"))
REFUSED = {(one["model"], one["method"]): re.escape(one["sentence"]).replace("…", ".*") for one in SHOWN["refused"]}
METHODS = {"Full": dpft.Full, "BiTFiT": dpft.BiTFiT, "LoRA": lambda: dpft.LoRA(2)}
CHOOSE = {"DPFrost": lambda: dpft.DPFrost(0.25, rounds=1), "LayerFreeze": lambda: dpft.LayerFreeze(None, [1]),
          "RapFT": lambda: dpft.RapFT(dpft.Full(), relevance_data="private", share=0.05, relevance_rate=1.0)}
REFUSED |= {("wide ResNet", "LoRA"): "has no linear layer"}                      # beside the table, as DeBERTa and BERT's tags are
PAIRS = [(name, method) for name in ALL for method in METHODS]
ADDED = {f"{name}, BiTFiT-Add": name for name, method in REFUSED if method == "BiTFiT" and name in ALL}  # the way out it names


@lru_cache(maxsize=1)
def made_once(name):
    """A model in float64 with its statistics frozen, a batch of two different examples, and all their gradients, by autograd."""
    torch.manual_seed(0)
    model = ALL[name]()
    assert type(model).__name__ == SHOWN["models"].get(name, type(model).__name__)
    if name == "Mixtral":
        model.set_experts_implementation("eager")                                # the grouped kernel knows no float64
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(37, generator=generator)[:6] + 3 for _ in range(2)])  # no token twice: positions pass for tokens
    pixels, sounds = (torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in ((3, 16, 16), (4, 16)))
    if name == "ResNet":
        with torch.no_grad():
            model.train()(torch.randn(8, 3, 16, 16, generator=generator))
    if name in IMAGES:
        model = freeze_batchnorm(model)
        batch = {"pixel_values": pixels, "labels": tensor([0, 2])}
    else:
        labels = {"classification": tensor([0, 2]), "tagging": ids % 3}.get(task_of(model), ids)
        batch = {"input_features": sounds} if name == "Whisper" else {"input_ids": ids}
        batch["labels"] = labels
    batch = tuple(batch.values()) if name == "wide ResNet" else batch
    model = model.double()
    every = copy.deepcopy(model).requires_grad_(True)
    with evaluating(every):
        rows = per_example_gradients(every, default_loss(every), batch)
    return model, batch, rows


def built(name):
    """A copy of the model, and the batch."""
    model, batch, _ = made_once(name)
    return copy.deepcopy(model), batch


def rows_of(batch, times=3):
    """The examples of a batch, several times each."""
    if isinstance(batch, tuple):
        return list(zip(*batch, strict=True)) * times
    return [{key: values[row] for key, values in batch.items()} for row in range(2)] * times


def refused(name, method, call):
    """Whether the table says that a pair is refused: then with the sentence of the table, in one line."""
    if (name, method) not in REFUSED:
        return False
    with pytest.raises(ValueError, match=REFUSED[name, method]) as said:
        call()
    assert "\n" not in str(said.value)
    return True


def is_autograds(model, batch, rows):
    """The clipped sum is that of the gradients of the oracle; how many parameters took the slow way."""
    norms = torch.cat([values.flatten(1) for values in rows.values()], 1).norm(dim=1)
    clip = norms.mean().item()                                                   # between the two: one is cut, one is not
    with evaluating(model), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = clipped_sum(model, default_loss(model), batch, clip)
    factors = (clip / norms).clamp(max=1)
    off = sum((found[key] - torch.tensordot(factors, values, 1)).square().sum() for key, values in rows.items()).sqrt().item()
    assert set(found) == set(rows) and clip > 0 and off <= 1e-5 * clip and apart(found.values())
    return any("no fast rule" in str(one.message) for one in seen)


@pytest.mark.parametrize("name,method", PAIRS)
def test_the_clipped_sum_is_autograds_one_example_at_a_time(name, method):
    model, batch = built(name)
    context = Context(model, default_loss(model), 1, 1, 1)
    if refused(name, method, lambda: METHODS[method]().start(context)):
        return
    METHODS[method]().start(context)
    trains = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    oracle = made_once(name)[2]
    if method == "LoRA":                                                         # its own parameters: an oracle of their own
        no_zeros(trains)
        with evaluating(model):
            oracle = per_example_gradients(model, default_loss(model), batch)
    slow = is_autograds(model, batch, {key: oracle[key] for key in trains})
    assert method != "Full" or name not in SHOWN["models"] or slow == (name in SHOWN["slow"])


def no_zeros(trains):
    """What starts at zero hides what lies behind it."""
    with torch.no_grad():
        for parameter in trains.values():
            if not parameter.any():
                parameter.normal_(std=0.1)


@pytest.mark.parametrize("case", ADDED)
def test_biases_that_are_added_are_exact(case):
    model, batch = built(ADDED[case])
    dpft.BiTFiT(add_missing=True).start(Context(model, default_loss(model), 1, 1, 1))
    no_zeros({key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad})
    with evaluating(model):
        rows = per_example_gradients(model, default_loss(model), batch)
    is_autograds(model, batch, rows)


# ---- methods that choose what trains, or change it on the way


def opened(name, method):
    model, batch = built(name)
    engine = dpft.Engine(model, None, method(), as_dataset(rows_of(batch)), epsilon=50.0, delta=0.01, steps=3, batch_size=3,
                         clip=0.01, accountant="rdp", seed=0, dropout=False, cache=0.0)
    return engine, batch


def is_exact(engine, batch):
    """The bounded sums of what trains now, block by block, against one backward pass for each example."""
    model, loss_fn = engine.model, default_loss(engine.model)
    with evaluating(model):
        sums, _ = gradients(model, loss_fn, batch).clipped_sum(engine.blocks, "flat")
        rows = per_example_gradients(model, loss_fn, batch)
    names = {id(parameter): key for key, parameter in engine.trains.items()}
    wanted = {key: torch.zeros_like(value) for key, value in sums.items()}
    for row in range(2):
        for block in engine.blocks:
            parts = [(names[id(p)], rows[names[id(p)]][row] * (1 if mask is None else mask)) for p, mask in members(block)]
            norm = torch.stack([part.norm() for _, part in parts]).norm()
            for key, part in parts:
                wanted[key] += part * (block.clip / norm).clamp(max=1)
    off = sum((sums[key] - wanted[key]).square().sum() for key in sums).sqrt().item()
    return off <= 1e-5 * sum(block.clip for block in engine.blocks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,method", [(name, method) for name in ALL for method in CHOOSE])
def test_methods_that_choose_are_exact_and_take_private_steps(name, method):
    if refused(name, method, lambda: next(iter(opened(name, CHOOSE[method])[0]))):
        return
    engine, batch = opened(name, CHOOSE[method])
    optimizer = torch.optim.SGD(engine.model.parameters(), 1e-3)
    for number, step in enumerate(engine):
        frozen = {name: p.detach().clone() for name, p in engine.model.named_parameters() if name not in engine.trains}
        step.take(optimizer)
        assert all(torch.equal(p, frozen[name]) for name, p in engine.model.named_parameters() if name in frozen)
        if number == 1:
            assert is_exact(engine, batch)         # after a choice, or with the lower layers frozen
            break
    assert all(bool(p.isfinite().all()) for p in engine.model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", SHOWN["methods"])
def test_a_contrastive_loss_is_refused_by_every_method(method):
    """An image's loss there depends on the captions beside it, so no bound on one example exists."""
    torch.manual_seed(0)
    model = hf.CLIPModel(hf.CLIPConfig(projection_dim=8, vision_config=dict(IMAGE), text_config=dict(SIZES)))
    items = [{"input_ids": torch.randint(3, 39, (6,)), "pixel_values": torch.randn(3, 16, 16)} for _ in range(8)]
    def loss(model, batch):
        scores = model(**batch).logits_per_text
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="none")
    assert refused("CLIP, contrastive", method, lambda: dpft.fine_tune(
        model, items, (METHODS | CHOOSE)[method](), loss_fn=loss, epsilon=50.0, delta=0.01, steps=6, batch_size=4, accountant="rdp",
        progress=False, dropout=False))


def test_the_reference_shows_the_table(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "nbs")
    page = __import__("_reference").architectures()
    assert all(f"| {name}" in page and f"`{kind}`" in page for name, kind in SHOWN["models"].items())
    assert all(one["sentence"] in page for one in SHOWN["refused"]) and page.count("| no ") == len(SHOWN["refused"])
    assert f"Of 156 pairs, {156 - len(SHOWN['refused'])} work" in page


def test_the_table_has_the_rows_that_it_should():
    shown, tried = SHOWN["models"], set(ALL) | {"CLIP, contrastive"}
    assert len(shown) == 26 and set(shown) <= tried and SHOWN["methods"] == [*METHODS, *CHOOSE] and set(SHOWN["slow"]) <= set(shown)
    assert 6 * len(shown) - len(SHOWN["refused"]) >= 140
    assert all(one["model"] in shown and one["method"] in SHOWN["methods"] for one in SHOWN["refused"])
