"""What the two simple methods train, that nothing else moves, and the lengths of gradient and noise that chapter 10 compares."""

import copy
import math

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig

from dpft.baselines import Full, LastLayer
from dpft.models import BUILT, load_model, mean_pooled_classifier
from dpft.training import Context, Engine, fine_tune

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
HEAD = {"roberta": "classifier.", "bert": "classifier.", "gpt2": "score.", "gpt2-lm": "transformer.wte.", "vit": "classifier.",
        "cnn": "head.", "mean-pooled": "classifier."}


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


@pytest.mark.parametrize("name", HEAD)
def test_full_moves_everything(name):
    found, names, trained = moved(name, Full())
    assert found == trained == names


@pytest.mark.parametrize("name", BUILT)
def test_the_probe_of_a_built_model_is_its_last_linear_layer(name):
    model = load_model(name, 7, image_shape=(1, 28, 28))
    LastLayer().start(Context(model, zoo.image_loss, 1, 1, 1))
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    assert [id(p) for p in trains] == [id(last.weight), id(last.bias)] and len(last.bias) == 7


def test_a_model_without_a_head_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="has no head.*'classifier'"):
        LastLayer().start(Context(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), zoo.image_loss, 1, 1, 1))


@pytest.mark.parametrize("first,second", [(Full(), LastLayer()), (LastLayer(), Full())])
def test_what_trained_before_does_not_linger(first, second):
    model, loss_fn, _ = zoo.build("cnn")
    context = Context(model, loss_fn, 1, 1, 1)
    first.start(context)
    second.start(context)
    alone = copy.deepcopy(model)
    second.start(Context(alone, loss_fn, 1, 1, 1))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in alone.parameters()]


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


@given(width=st.integers(1, 60), sigma=st.sampled_from([0.5, 4.0]), clip=st.floats(1e-3, 10), probe=st.booleans(),
       seed=st.integers(0, 2**20))
@settings(max_examples=25)
def test_noise_is_as_long_as_the_lemma_says_and_the_gradient_is_bounded(width, sigma, clip, probe, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4)).double()
    data = [(3 * torch.randn(5, dtype=torch.float64), torch.tensor(i % 4)) for i in range(12)]
    size = 6
    engine = Engine(model, zoo.image_loss, LastLayer() if probe else Full(), data, noise_multiplier=sigma, batch_size=size, steps=1,
                    clip=clip, accountant="rdp", delta=0.01, seed=seed)
    for step in engine:
        for batch in step:
            step.add(batch)
        sums = {name: value.clone() for name, value in step.sums.items()}
        step.privatize()
        step.done()
    square = sum(((engine.trains[name].grad - value / size) ** 2).sum().item() for name, value in sums.items())
    signal = math.sqrt(sum((value / size).square().sum().item() for value in sums.values()))
    entries = sum(parameter.numel() for parameter in engine.parameters())
    assert signal <= step.examples * clip / size * (1 + 1e-9)
    excess = square / (sigma * clip / size) ** 2 - entries                    # chi-square with `entries` degrees of freedom
    assert abs(excess) < 7 * math.sqrt(2 * entries) + 25
