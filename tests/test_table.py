"""Architectures that people bring, each with each way to train it: sums are exact by the default loss, one private step runs.

Of 26 architectures and six methods, 156 pairs, at least 140 work; each of the others is refused by a sentence that names the way out."""

import warnings

import pytest
import torch
import transformers as hf
from torch import nn, tensor

import dpft
from dpft.datasets import as_dataset
from dpft.gradients import clipped_sum, evaluating, gradients, members, per_example_gradients
from dpft.losses import default_loss, task_of
from dpft.models import freeze_batchnorm, load_model
from dpft.method import Context

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
    "wide ResNet": lambda: load_model("wrn-16-4", 3, image_shape=(3, 16, 16)),
}
ALL = TEXT | WRITERS | IMAGES
METHODS = {"Full": dpft.Full, "BiTFiT": dpft.BiTFiT, "BiTFiT-Add": lambda: dpft.BiTFiT(add_missing=True), "LoRA": lambda: dpft.LoRA(2)}
WITHOUT_BIASES = {"Llama", "Qwen3", "Mistral", "Gemma", "Mixtral", "T5"}
WITHOUT_LAYERS = {"ResNet", "wide ResNet"}                                       # no linear layer outside the head


def built(name):
    """A model in float64 with statistics of its own frozen, and a batch of three different examples."""
    torch.manual_seed(0)
    model = ALL[name]()
    if name == "Mixtral":
        model.set_experts_implementation("eager")                                # the grouped kernel knows no float64
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(37, generator=generator)[:6] + 3 for _ in range(3)])  # no token twice: positions pass for tokens
    if name in IMAGES:
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        if name == "ResNet":
            with torch.no_grad():
                model.train()(torch.randn(8, 3, 16, 16, generator=generator))
        model = freeze_batchnorm(model)
        labels = tensor([0, 1, 2])
        return model.double(), (pixels.double(), labels) if name == "wide ResNet" else {"pixel_values": pixels.double(), "labels": labels}
    labels = {"classification": tensor([0, 1, 2]), "tagging": ids % 3}.get(task_of(model), ids)
    first = {"input_features": torch.randn(3, 4, 16, generator=generator).double()} if name == "Whisper" else {"input_ids": ids}
    return model.double(), {**first, "labels": labels}


def started(name, method):
    model, batch = built(name)
    if name in WITHOUT_BIASES and method == "BiTFiT" or name in WITHOUT_LAYERS and method == "LoRA":
        with pytest.raises(ValueError, match="has no biases|has no linear layer"):
            METHODS[method]().start(Context(model, default_loss(model), 1, 1, 1))
        return None
    METHODS[method]().start(Context(model, default_loss(model), 1, 1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():                  # LoRA's zeros hide what lies behind them
                parameter.normal_(std=0.1)
    return model, batch


CASES = [pytest.param(name, method) for name in ALL for method in METHODS if name in WITHOUT_BIASES or method != "BiTFiT-Add"]


@pytest.mark.parametrize("name,method", CASES)
def test_the_clipped_sum_is_autograds_one_example_at_a_time(name, method):
    if (made := started(name, method)) is None:
        return
    model, batch = made
    loss_fn = default_loss(model)
    with evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")                                          # some take the slow way, and say so
        rows = per_example_gradients(model, loss_fn, batch)
        norms = torch.cat([values.flatten(1) for values in rows.values()], 1).norm(dim=1)
        clip = norms.median().item()
        found = clipped_sum(model, loss_fn, batch, clip)
    factors = (clip / norms).clamp(max=1)
    off = sum((found[key] - torch.tensordot(factors, values, 1)).square().sum() for key, values in rows.items()).sqrt().item()
    assert clip > 0 and off <= 1e-5 * clip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,method", [case for case in CASES if case.values[1] == "Full"])
def test_one_private_step_runs_and_moves_what_trains(name, method):
    if started(name, method) is None:
        return
    model, batch = built(name)
    items = list(zip(*batch, strict=True)) if isinstance(batch, tuple) else [
        {key: values[row] for key, values in batch.items()} for row in range(3)]
    run = dpft.fine_tune(model, items * 4, METHODS[method](), noise_multiplier=1.0, steps=1, batch_size=4, accountant="rdp", delta=0.01,
                         seed=0, progress=False, dropout=False)
    assert run.trained and all(isinstance(p, nn.Parameter) and bool(p.isfinite().all()) for p in run.model.parameters())


# ---- methods that choose what trains, or change it on the way

CHOOSE = {"DPFrost": lambda: dpft.DPFrost(0.25, rounds=1), "LayerFreeze": lambda: dpft.LayerFreeze(None, [1]),
          "RapFT": lambda: dpft.RapFT(dpft.Full(), relevance_data="private", share=0.05, relevance_rate=1.0)}
TABLE = [name for name in ALL if name not in ("DeBERTa", "BERT, tags", "wide ResNet")] + ["CLIP, contrastive"]
REFUSED: dict[tuple[str, str], str] = {}   # what the sentence says
REFUSED |= {(name, "BiTFiT"): r"choose BiTFiT\(add_missing=True\)" for name in WITHOUT_BIASES}
REFUSED |= {("ResNet", "LoRA"): "has no linear layer", ("XLNet", "RapFT"): "has no attention hook",
            ("T5", "RapFT"): "cannot be told apart by example"}
REFUSED |= {("CLIP, contrastive", method): "depends on|changes with the examples beside it|put in order" for method in
            ("Full", "BiTFiT", "LoRA", *CHOOSE)}


def rows_of(batch):
    """The examples of a batch, four times each."""
    if isinstance(batch, tuple):
        return list(zip(*batch, strict=True)) * 4
    return [{key: values[row] for key, values in batch.items()} for row in range(3)] * 4


def opened(name, made):
    model, batch = built(name)
    engine = dpft.Engine(model, None, made(), as_dataset(rows_of(batch)), epsilon=50.0, delta=0.01, steps=3, batch_size=4, clip=0.01,
                         accountant="rdp", seed=0, dropout=False, cache=0.0)
    return engine, batch


def is_exact(engine, batch):
    """The bounded sums of what trains now, block by block, against one backward pass for each example."""
    model, loss_fn = engine.model, default_loss(engine.model)
    with evaluating(model):
        sums, _ = gradients(model, loss_fn, batch).clipped_sum(engine.blocks, "flat")
        wanted = {key: torch.zeros_like(value) for key, value in sums.items()}
        trains = engine.trains
        for row in range(3):
            one = tuple(part[row:row + 1] for part in batch) if isinstance(batch, tuple) else {
                key: values[row:row + 1] for key, values in batch.items()}
            found = torch.autograd.grad(loss_fn(model, one).sum(), list(trains.values()), allow_unused=True)
            own = {id(p): torch.zeros_like(p) if g is None else g for p, g in zip(trains.values(), found, strict=True)}
            for block in engine.blocks:
                parts = [(p, own[id(p)] * (1 if mask is None else mask)) for p, mask in members(block)]
                norm = torch.stack([part.norm() for _, part in parts]).norm()
                for p, part in parts:
                    key = next(key for key, one in trains.items() if one is p)
                    wanted[key] += part * (block.clip / norm).clamp(max=1)
    off = sum((sums[key] - wanted[key]).square().sum() for key in sums).sqrt().item()
    return off <= 1e-5 * sum(block.clip for block in engine.blocks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", CHOOSE)
@pytest.mark.parametrize("name", ALL)
def test_methods_that_choose_are_exact_and_take_private_steps(name, method):
    if (name, method) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, method]):
            next(iter(opened(name, CHOOSE[method])[0]))
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
@pytest.mark.parametrize("method", [*(m for m in METHODS if m != "BiTFiT-Add"), *CHOOSE])
def test_a_contrastive_loss_is_refused_by_every_method(method):
    """An image's loss there depends on the captions beside it, so no bound on one example exists."""
    torch.manual_seed(0)
    model = hf.CLIPModel(hf.CLIPConfig(projection_dim=8, vision_config=dict(IMAGE), text_config=dict(SIZES)))
    items = [{"input_ids": torch.randint(3, 39, (6,)), "pixel_values": torch.randn(3, 16, 16)} for _ in range(8)]
    def loss(model, batch):
        scores = model(**batch).logits_per_text
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="none")
    with pytest.raises(ValueError, match=REFUSED["CLIP, contrastive", method]):
        dpft.fine_tune(model, items, (METHODS | CHOOSE)[method](), loss_fn=loss, epsilon=50.0, delta=0.01, steps=2, batch_size=4,
                       accountant="rdp", progress=False, dropout=False)


def test_the_table_has_the_rows_that_it_should():
    assert len(TABLE) == 26
    works = 6 * 26 - sum(name in TABLE for name, _ in REFUSED)
    assert works >= 140
