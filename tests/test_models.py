"""Models: built, loaded, scored; and one loss for each example that depends on no other."""

import copy
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_characterisation import agrees, wave
from torch import nn, tensor

import dpft
import dpft.models as models
from dpft.book.networks import StandardisedConv2d
from dpft.gradients import gradients
from dpft.losses import accuracy, default_loss, example_losses, logits
from dpft.method import Context
from dpft.models import (
    BUILT,
    freeze_batchnorm,
    head_parameters,
    load_model,
    load_tokenizer,
    pretrain,
    replace_batchnorm,
    set_modes,
    validate,
)
from dpft.networks import cnn, mlp, tempered_cnn, tempered_cnn_5, tempered_cnn_8
from dpft.tasks import digits, font_digits

SHAPES = {"tempered-cnn": (1, 28, 28), "tempered-cnn-5": (3, 32, 32), "tempered-cnn-8": (3, 16, 16), "cnn": (1, 8, 8),
          "mlp": (1, 8, 8), "vit-small": (1, 8, 8), "wrn-16-4": (1, 8, 8)}


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def text_config(kind):
    from transformers import BertConfig, GPT2Config, RobertaConfig

    if kind == "gpt2":
        return GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=24, pad_token_id=0, num_labels=3)
    config = {"bert": BertConfig, "roberta": RobertaConfig}[kind]
    return config(vocab_size=40, max_position_embeddings=24, num_labels=3, pad_token_id=0, **SMALL)


def text_model(name):
    import transformers as hf

    torch.manual_seed(0)
    if name == "mean-pooled":
        return models.MeanPooledClassifier(text_config("bert"))
    if name == "gpt2-lm":
        return hf.GPT2LMHeadModel(text_config("gpt2"))
    return hf.AutoModelForSequenceClassification.from_config(text_config(name))


TEXTS = ["mean-pooled", "bert", "roberta", "gpt2", "gpt2-lm"]


def text_batch(causal, lengths, seed, width=None):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), width or max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, 40, (length,), generator=generator)
    mask = (torch.arange(ids.shape[1]) < tensor(lengths)[:, None]).long()
    labels = torch.where(mask.bool(), ids, -100) if causal else torch.arange(len(lengths)) % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@given(st.integers(14, 40), st.integers(14, 40), st.integers(1, 3), st.integers(2, 5))
@settings(max_examples=20)
def test_image_models_take_any_size(height, width, channels, classes):
    for build in (tempered_cnn, tempered_cnn_5, tempered_cnn_8, cnn, mlp):
        assert build(classes, (channels, height, width))(torch.rand(2, channels, height, width)).shape == (2, classes)


@pytest.mark.parametrize("name", BUILT)
def test_built_models_follow_the_seed_and_have_a_loss_for_each_example(name):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, same, other = (load_model(name, 10, image_shape=SHAPES[name], seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected), "the generator is left alone"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
    validate(first)
    x = torch.rand(3, *SHAPES[name], dtype=torch.float64, requires_grad=True)
    losses = default_loss(first)(first.double().train(), (x, torch.arange(3)))
    assert losses.shape == (3,)
    (influence,) = torch.autograd.grad(losses[1], x)
    assert influence[1].any() and not influence[[0, 2]].any()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 4))
@settings(max_examples=20)
def test_mean_pooling_is_the_mean_of_the_real_tokens(lengths, extra):
    model = text_model("mean-pooled").double().eval()
    batch = text_batch(False, lengths, seed=0, width=max(lengths) + extra)
    for row, length in enumerate(lengths):
        tokens = model.bert(batch["input_ids"][row : row + 1, :length]).last_hidden_state[0]
        expected = model.classifier(sum(tokens) / length)
        assert torch.allclose(logits(model, batch)[row], expected, rtol=1e-8, atol=1e-10)


def test_mean_pooled_classifier_saves_loads_and_has_no_dropout(tmp_path):
    model = text_model("mean-pooled")
    assert model.train().config.hidden_dropout_prob == 0 and all(
        module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )
    batch = text_batch(False, [4, 6], seed=0)
    assert torch.equal(logits(model, batch), logits(model, batch))
    assert not any("pooler" in name for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = load_model(str(tmp_path), classes=3)
    assert type(loaded) is models.MeanPooledClassifier
    assert torch.equal(logits(loaded.eval(), batch), logits(model.eval(), batch))
    import pickle

    assert pickle.loads(pickle.dumps(models.MeanPooledClassifier)) is models.MeanPooledClassifier
    assert torch.equal(logits(copy.deepcopy(model), batch), logits(model, batch))


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_unknown_names_get_the_nearest(load):
    with pytest.raises(ValueError, match=r"unknown model 'minilmm'; did you mean .*minilm"):
        load("minilmm")


def save_tokenizer(folder, **special):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as token_models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(token_models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2, "b": 3}, unk_token="a"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)


def test_transformers_models_load_from_a_folder(tmp_path):
    import transformers as hf

    text_model("bert").save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert", pad_token="<pad>", unk_token="a")
    model = load_model(str(tmp_path / "bert"), classes=5)  # another head than the saved one
    assert type(model) is hf.BertForSequenceClassification and model.classifier.out_features == 5
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, text_model("bert").bert.embeddings.word_embeddings.weight)
    assert torch.equal(model.classifier.weight, load_model(str(tmp_path / "bert"), classes=5).classifier.weight)
    assert load_tokenizer(str(tmp_path / "bert"))("a b")["input_ids"] == [2, 3]

    config = text_config("gpt2")
    config.pad_token_id, config.eos_token_id = None, 1
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2", eos_token="<end>")
    model = load_model(str(tmp_path / "gpt2"), kind="causal")
    assert type(model) is hf.GPT2LMHeadModel and model.config.pad_token_id == 1
    assert load_tokenizer(str(tmp_path / "gpt2")).pad_token_id == 1
    classifier = load_model(str(tmp_path / "gpt2"), classes=2)
    assert logits(classifier, text_batch(False, [3, 5], seed=0)).shape == (2, 2)

    load_model("vit-small", 4, image_shape=(1, 8, 8)).save_pretrained(tmp_path / "vit")
    model = load_model(str(tmp_path / "vit"), classes=4, kind="image")
    assert torch.equal(model.classifier.weight, load_model("vit-small", 4, image_shape=(1, 8, 8)).classifier.weight)
    with pytest.raises(ValueError, match="unknown kind 'sound'; it is one of text, image, causal"):
        load_model(str(tmp_path / "vit"), kind="sound")


@pytest.mark.parametrize("name", [*SHAPES, *TEXTS])
def test_head_is_the_last_thing_before_the_scores(name):
    model = load_model(name, 10, image_shape=SHAPES[name]) if name in SHAPES else text_model(name)
    head = {id(parameter) for parameter in head_parameters(model)}
    names = [key for key, parameter in model.named_parameters() if id(parameter) in head]
    tied = name == "gpt2-lm"  # its head is the word embedding
    last = names[-1] if tied else list(dict(model.named_parameters()))[-1]
    assert names and (names == ["transformer.wte.weight"] if tied else last in names)
    assert len(names) <= 4


def test_head_is_found_by_name_before_position():
    model = nn.ModuleDict({"classifier": nn.Linear(3, 2), "late": nn.Linear(4, 4)})
    assert head_parameters(model) == list(model["classifier"].parameters())
    model = nn.ModuleDict({"classifier": nn.Identity(), "late": nn.Linear(4, 4), "end": nn.ReLU()})
    assert head_parameters(model) == list(model["late"].parameters())
    with pytest.raises(ValueError, match=r"ReLU has no head.*name the last layer 'classifier'"):
        head_parameters(nn.ReLU())


def test_validate_names_the_layer():
    bad = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"bn": nn.BatchNorm1d(3)}))
    with pytest.raises(ValueError) as error:
        validate(bad)
    message = "1.bn: BatchNorm mixes examples, so no per-example bound exists; use dpft.models.replace_batchnorm(model)"
    assert str(error.value) == f"{message}, or of a pre-trained model dpft.models.freeze_batchnorm(model)"
    for layer in (
        nn.BatchNorm2d(2),
        nn.SyncBatchNorm(2),
        nn.BatchNorm3d(2, track_running_stats=False),
        nn.LazyBatchNorm2d(),
        nn.InstanceNorm2d(2, track_running_stats=True),
    ):
        with pytest.raises(ValueError, match="mixes examples"):
            validate(layer)
    for layer in (nn.InstanceNorm2d(2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)):
        validate(layer)


@given(st.integers(1, 70), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_replace_batchnorm_makes_examples_independent(channels, affine, flat):
    torch.manual_seed(0)
    norm = (nn.BatchNorm1d if flat else nn.BatchNorm2d)(channels, affine=affine)
    if affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    model = nn.Sequential(norm, nn.Tanh()).double()
    fixed = replace_batchnorm(model)
    validate(fixed)
    assert isinstance(model[0], type(norm)) and isinstance(fixed[0], nn.GroupNorm)
    if affine:
        assert torch.equal(fixed[0].weight, norm.weight) and torch.equal(fixed[0].bias, norm.bias)
    x = torch.randn(4, channels, *([] if flat else [3, 3]), dtype=torch.float64, requires_grad=True)
    out = fixed(x)
    (influence,) = torch.autograd.grad((out[0] * torch.randn_like(out[0])).sum(), x)
    assert influence[1:].abs().max() == 0
    assert channels < 3 or not affine or influence[0].abs().median() > 1e-3  # two numbers alone would come out as plus and minus one
    if channels > 1:  # the input still matters, and so does a bias before the layer
        assert not torch.allclose(fixed(x[:1]), fixed(torch.randn_like(x[:1])))
        shift = torch.zeros(channels, dtype=torch.float64)
        shift[0] = 1
        assert not torch.allclose(out, fixed(x + shift.view(1, -1, *([] if flat else [1, 1]))), atol=1e-6)


EFFICIENT = dict(image_size=32, width_coefficient=0.25, hidden_dim=320, kernel_sizes=[3, 3], in_channels=[8, 8], out_channels=[8, 16],
                 strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 2], depthwise_padding=[], num_labels=3, dropout_rate=0.0,
                 drop_connect_rate=0.0)


def own_network():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 8),
                         nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


PRETRAINED = {
    "resnet": lambda hf: hf.ResNetForImageClassification(hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=3)),
    "efficientnet": lambda hf: hf.EfficientNetForImageClassification(hf.EfficientNetConfig(**EFFICIENT)),
    "own": lambda hf: own_network(),
}


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def measured(name):
    """A network whose norms have measured pictures, and whose scales and shifts are not the first ones."""
    import transformers as hf

    torch.manual_seed(0)
    model = PRETRAINED[name](hf).train()
    with torch.no_grad():
        for _ in range(3):
            logits(model, torch.randn(8, 3, 32, 32))
        for module in model.modules():
            if isinstance(module, NORMS):
                module.weight.add_(0.3 * torch.randn_like(module.weight)), module.bias.add_(0.3 * torch.randn_like(module.bias))
    return model.eval().double()


def pictures(name, rows=4):
    images, labels = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double(), torch.arange(rows) % 3
    return (images, labels) if name == "own" else {"pixel_values": images, "labels": labels}


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_frozen_norm_computes_what_it_did_and_its_gradients_are_autograds(name):
    model, batch = measured(name), pictures(name)
    before, keys = logits(model, batch), list(model.state_dict())
    assert freeze_batchnorm(model) is model
    assert torch.equal(logits(model, batch), before) and list(model.state_dict()) == keys
    model.train()
    assert models.frozen_statistics(model) and not any(m.training for m in model.modules() if isinstance(m, NORMS))
    for module in model.modules():                                               # other layers may differ in training mode
        if isinstance(module, nn.Dropout):
            module.eval()
    validate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(model, example_losses, batch)


@pytest.mark.parametrize("method", ["Full", "BiTFiT", "NormOnly"])
def test_a_run_trains_scales_and_shifts_and_never_the_statistics(method):
    how = getattr(dpft, method)()
    model, batch = freeze_batchnorm(measured("resnet")).float(), pictures("resnet", 12)
    data = [{"pixel_values": image.float(), "labels": label} for image, label in zip(*batch.values(), strict=True)]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    run = dpft.fine_tune(model, data, how, noise_multiplier=1.0, steps=2, batch_size=6, accountant="rdp", seed=0, progress=False)
    assert all(torch.equal(value, buffers[name]) for name, value in run.model.named_buffers())
    norms = {name for name, _ in model.named_parameters() if ".normalization." in name}
    assert set(run.trained) & norms == ({name for name in norms if name.endswith("bias")} if method == "BiTFiT" else norms)
    set_modes(model)
    assert not any(module.training for module in model.modules() if isinstance(module, NORMS))


def test_nothing_thaws_a_frozen_norm():
    import pickle

    model = freeze_batchnorm(measured("own"))
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.train(True)
        twin[1].training = True
        before = {name: value.clone() for name, value in twin.named_buffers()}
        twin(torch.randn(5, 3, 32, 32).double())
        assert not twin[1].training and all(torch.equal(value, before[name]) for name, value in twin.named_buffers())
    plain = own_network().double()
    plain.load_state_dict(model.state_dict())                                    # saved as what it was
    images = pictures("own")
    assert torch.equal(logits(plain.eval(), images), logits(model, images))


def test_a_norm_below_what_trains_is_accepted_as_it_is():
    model = measured("resnet")
    for how, accepted in ((dpft.LastLayer(), True), (dpft.BiTFiT(), False), (dpft.Full(), False)):
        how.start(Context(model, example_losses, 1, 1, 1))
        if accepted:
            validate(model)
        else:
            with pytest.raises(ValueError, match="BatchNorm mixes examples"):
                validate(model)
        validate(model, dropout=False)                                           # a run that is in evaluation mode throughout
    without = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    without[0].requires_grad_(False)
    for dropout in (True, False):
        with pytest.raises(ValueError, match="BatchNorm mixes examples"):
            validate(without, dropout)                                           # it has no statistics but the batch's


def test_what_cannot_be_frozen_is_refused_and_what_has_measured_nothing_is_told():
    with pytest.raises(ValueError, match=r"1 keeps no statistics.*replace_batchnorm"):
        freeze_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))
    with pytest.warns(UserWarning, match="BatchNorm2d has measured nothing yet"):
        freeze_batchnorm(nn.BatchNorm2d(3))
    instance = nn.Sequential(nn.InstanceNorm2d(2, affine=True, track_running_stats=True), nn.InstanceNorm2d(2))
    instance(1 + torch.randn(3, 2, 4, 4))
    validate(freeze_batchnorm(instance))
    assert models.frozen_statistics(instance) == ["0"]


def test_a_model_of_a_gguf_file_trains_and_comes_back(tmp_path):
    gguf = pytest.importorskip("gguf")
    words, width, rng = ["<pad>", "<s>", "</s>", *"abcdefgh", "ab", "cd"], 8, np.random.default_rng(0)
    (tmp_path / "base").mkdir()
    file = gguf.GGUFWriter(tmp_path / "base" / "tiny.gguf", "llama")
    for add, value in (("context_length", 32), ("embedding_length", width), ("block_count", 1), ("feed_forward_length", 16),
                       ("head_count", 2), ("head_count_kv", 2), ("layer_norm_rms_eps", 1e-5), ("rope_dimension_count", 4),
                       ("vocab_size", len(words)), ("tokenizer_model", "gpt2"), ("tokenizer_pre", "default"), ("token_list", words),
                       ("token_types", [3] * 3 + [1] * 10), ("token_merges", ["a b", "c d"]), ("bos_token_id", 1), ("eos_token_id", 2)):
        getattr(file, f"add_{add}")(value)
    shapes = {f"blk.0.{name}": (width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {"blk.0.ffn_gate": (16, width), "blk.0.ffn_up": (16, width), "blk.0.ffn_down": (width, 16), "token_embd": (len(words), width),
               "output": (len(words), width), "output_norm": (width,), "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file(), file.close()
    name = str(tmp_path / "base" / "tiny.gguf")
    same = load_model(name, kind="causal"), load_model(str(tmp_path / "base"), kind="causal", gguf_file="tiny.gguf")
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in same), strict=True))
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}] * 6
    for number, model in enumerate((name, same[1])):
        run = dpft.fine_tune(model, rows, dpft.LoRA(1), noise_multiplier=1.0, steps=1, batch_size=4, accountant="rdp", progress=False,
                             output=tmp_path / f"saved{number}")
        again = dpft.load(tmp_path / f"saved{number}")
        assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), again.parameters(), strict=True))
        assert (tmp_path / f"saved{number}" / "adapter_model.safetensors").exists()
    run = dpft.fine_tune(name, rows, dpft.Full(), noise_multiplier=1.0, steps=1, batch_size=4, accountant="rdp", progress=False,
                         output=tmp_path / "whole")
    again = dpft.load(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), again.parameters(), strict=True))
    assert "quantization_config" not in (tmp_path / "whole" / "config.json").read_text()


def test_pretrain_refuses_what_is_not_public():
    task = digits()
    for data in (task.train, [task.train[0]]):
        with pytest.raises(ValueError, match=r"pretrain takes public data only; if this .* is public, say so"):
            pretrain(mlp(), data)
    with pytest.raises(ValueError, match="0 epochs in batches of 128 over 100 rows; give at least one of each"):
        pretrain(mlp(), font_digits(100), epochs=0)


def test_pretrain_follows_the_seed_and_learns():
    public = font_digits(600)
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(17)
        model = pretrain(load_model("mlp", 10, image_shape=(1, 8, 8)), public, epochs=6, batch_size=32, seed=seed)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(17)))
        states.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])
    assert accuracy(model, public) > 0.5  # chance is 0.1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 24), st.sampled_from([1, 3]), st.integers(1, 2), st.integers(1, 6), st.integers(0, 99))
def test_a_standardised_convolution_has_the_gradient_of_its_parameter(channels, filters, kernel, stride, side, seed):
    assume(channels * kernel**2 > 2)                                             # two weights have no gradient but rounding
    torch.manual_seed(seed)
    layer = StandardisedConv2d(channels, filters, kernel, stride).double()
    agrees(layer, wave, (torch.randn(4, channels, side, side, dtype=torch.float64),))


@pytest.mark.parametrize("filters, side, form", [(3, 6, "Dense"), (40, 2, "Projected")])
def test_the_form_of_its_gradients_is_the_cheaper_one_and_flat_channels_are_right_too(filters, side, form):
    torch.manual_seed(0)
    layer = StandardisedConv2d(4, filters).double()
    layer.weight.data[0] *= 1e-4                                                              # shorter than what it is divided by
    layer.weight.data[1] = 0.3
    batch = (torch.randn(5, 4, side, side, dtype=torch.float64),)
    agrees(layer, wave, batch)
    assert type(gradients(layer, wave, batch).uses["weight"][0]).__name__ == form


@pytest.mark.parametrize("method", [lambda: dpft.LoRA(2), dpft.Adapter], ids=["LoRA", "Adapter"])
def test_a_saved_run_with_added_layers_is_not_loaded_by_name_as_if_it_were_the_base(tmp_path, method):
    """Transformers would draw the layers anew whose names changed, and a run would train on those."""
    rows = [{"input_ids": [2, 3, 4], "labels": row % 3} for row in range(24)]
    run = dpft.fine_tune(text_model("bert"), rows, method(), 8.0, steps=1, batch_size=8, accountant="rdp", progress=False)
    run.save(tmp_path / "saved")
    for attempt in (lambda: load_model(tmp_path / "saved", 3), lambda: dpft.fine_tune(str(tmp_path / "saved"), rows, dpft.Full(), 8.0)):
        with pytest.raises(ValueError, match=r"saved holds what a run trained or added, .*dpft.load\('.*saved'\) gives"):
            attempt()
    again = dpft.load(tmp_path / "saved")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in run.model.state_dict().items())
