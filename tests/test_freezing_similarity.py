"""Canonical correlations of activations: an independent oracle, invariances, what is refused; and the activations themselves."""

import math

import numpy as np
import pytest
import torch
import zoo
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dpft.book.similarity import activations, checked, directions, pwcca
from dpft.data import Public, TensorData
from dpft.losses import logits


def cca(x, y):
    return directions(checked(x, "x"), checked(y, "y"))[0]


def pair(seed, examples=80, first=5, second=4):
    "Two sets of activations that share something, in float64."
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(examples, 3, generator=generator, dtype=torch.float64)
    def side(dimensions):
        mixture, noise = torch.randn(3, dimensions, generator=generator), torch.randn(examples, dimensions, generator=generator)
        return common @ mixture.double() + 0.7 * noise.double()
    return side(first), side(second)


def mixing(dimensions, seed):
    "An invertible matrix, well away from a singular one."
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    return left @ torch.diag(torch.logspace(-2, 2, dimensions, dtype=torch.float64)) @ right


def eigenvalue_oracle(x, y):
    "Squared correlations from covariances: eigenvalues of S_xx^-1 S_xy S_yy^-1 S_yx, and the directions that belong to them."
    x, y = (np.asarray(values, dtype=np.float64) - np.asarray(values, dtype=np.float64).mean(0) for values in (x, y))
    xx, xy, yy = x.T @ x, x.T @ y, y.T @ y
    values, vectors = np.linalg.eig(np.linalg.solve(xx, xy) @ np.linalg.solve(yy, xy.T))
    order = np.argsort(-values.real)[: min(x.shape[1], y.shape[1])]
    h = x @ vectors.real[:, order]
    return np.sqrt(np.clip(values.real[order], 0, 1)), h / np.linalg.norm(h, axis=0), x


sizes = st.integers(1, 7)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.integers(0, 10**6))
def test_correlations_and_weights_agree_with_the_eigenvalue_formula(first, second, seed):
    x, y = pair(seed, 60, first, second)
    correlations, h, centred = eigenvalue_oracle(x, y)
    assert np.allclose(cca(x, y), correlations, atol=1e-7)                                    # the oracle squares its condition
    assume(len(correlations) == 1 or np.min(-np.diff(correlations)) > 1e-3)
    for order in (1, 2):
        weights = (np.abs(h.T @ centred) ** order).sum(1)
        assert pwcca(x, y, order) == pytest.approx(1 - (weights * correlations).sum() / weights.sum(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.integers(0, 10**6))
def test_correlations_do_not_change_under_invertible_maps_and_translation(first, second, seed):
    x, y = pair(seed, 60, first, second)
    moved = x @ mixing(first, seed) + 30, y @ mixing(second, seed + 1) - 2
    assert torch.allclose(cca(*moved), cca(x, y), atol=1e-9)
    assert torch.allclose(cca(y, x), cca(x, y), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.integers(0, 10**6), st.floats(0.01, 100))
def test_pwcca_ignores_maps_of_y_and_units_order_and_signs_of_x(first, second, seed, scale):
    x, y = pair(seed, 60, first, second)
    correlations = cca(x, y)
    assume(len(correlations) == 1 or (-correlations.diff()).min() > 1e-3)
    before = pwcca(x, y)
    order = torch.randperm(first, generator=torch.Generator().manual_seed(seed))
    signs = 1 - 2 * (torch.arange(first) % 2)
    assert pwcca(x, y @ mixing(second, seed) + 5) == pytest.approx(before, abs=1e-8)
    assert pwcca((scale * x * signs - 7)[:, order], y) == pytest.approx(before, abs=1e-8)
    rotation = torch.linalg.qr(mixing(first, seed))[0]
    assert pwcca(x @ rotation, y, order=2) == pytest.approx(pwcca(x, y, order=2), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_that_depend_on_others_or_never_move_add_nothing(dtype):
    x, y = (values.to(dtype) for values in pair(1))
    more = torch.cat([x, x[:, :2] - x[:, 1:3], torch.full((len(x), 1), 0.1, dtype=dtype), x @ torch.ones(5, 1, dtype=dtype)], 1)
    assert len(cca(more, more)) == 5
    assert torch.allclose(cca(more, y), cca(x, y), atol=1e-5 if dtype == torch.float32 else 1e-10)
    assert pwcca(more, more) == pytest.approx(0, abs=1e-9) and pwcca(x, more) == pytest.approx(0, abs=1e-5)


def test_correlations_between_badly_scaled_columns_stay_right():
    x, y = pair(2)
    units = torch.tensor([1e-8, 1.0, 1e8, 1e-3, 1e5], dtype=torch.float64)
    assert torch.allclose(cca(x * units, y), cca(x, y), atol=1e-10)
    nearly = torch.cat([x, x[:, :1] + 1e-7 * torch.randn(80, 1, generator=torch.Generator().manual_seed(0)).double()], 1)
    assert len(cca(nearly, nearly)) == 6 and torch.allclose(cca(nearly[:, :5], y), cca(x, y))  # a sixth direction, small but real


NAN, RAMP = torch.zeros(20, 3), torch.arange(60.0).view(20, 3) ** 2
NAN[4, 1] = math.nan


# ---- activations


def pictures(size=10):
    return TensorData(torch.rand(size, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(size) % 3)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("data", [pictures(), Public(pictures(), "drawn"), [pictures()[i] for i in range(10)]])
def test_activations_are_those_of_evaluation_mode_and_leave_the_model_as_it_was(data):
    model = convolutions()
    model[2].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    found = activations(model, data, ["0", "4"], batch_size=4)
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        images = pictures().batch(range(10))[0]
        model.eval()
        assert torch.allclose(found["0"], model[0](images).mean((2, 3)), atol=1e-6) and torch.allclose(found["4"], model(images), atol=1e-6)


def test_positions_are_the_same_at_every_call_and_are_real_ones():
    model = convolutions()
    found, again, other = (activations(model, pictures(), ["0", "4"], "positions", 3, size, seed=seed)
                           for size, seed in ((4, 0), (10, 0), (4, 1)))
    assert found["0"].shape == (30, 4) and found["4"].shape == (30, 3)
    assert torch.allclose(found["0"], again["0"], atol=1e-6) and not torch.allclose(found["0"], other["0"], atol=1e-3)
    places = model[0](pictures().batch(range(10))[0]).flatten(2).mT                           # (10, 36, 4)
    assert all(any(torch.allclose(row, place, atol=1e-6) for place in places[i // 3]) for i, row in enumerate(found["0"]))
    assert torch.allclose(found["4"], activations(model, pictures(), ["4"])["4"].repeat_interleave(3, 0), atol=1e-6)


@pytest.mark.parametrize("left", [False, True])
def test_of_tokens_only_those_attended_to_count(left):
    model, _, batch = zoo.build("bert", rows=9)
    if left:                                                                                  # padding in front
        order = batch["attention_mask"].argsort(dim=1, stable=True)
        batch = batch | {name: batch[name].gather(1, order) for name in ("input_ids", "attention_mask")}
    data, collate = zoo.as_data(batch)
    layer = "bert.encoder.layer.0"
    found = activations(model, data, [layer, "classifier"], collate=collate, batch_size=4)
    whole = {}
    handle = model.bert.encoder.layer[0].register_forward_hook(
        lambda module, args, output: whole.update(out=output if isinstance(output, torch.Tensor) else output[0]))
    with torch.no_grad():
        scores = logits(model.eval(), batch)
    handle.remove()
    mask = batch["attention_mask"].bool()
    mean = torch.stack([tokens[real].mean(0) for tokens, real in zip(whole["out"], mask, strict=True)])
    assert torch.allclose(found[layer], mean.float(), atol=1e-5) and torch.allclose(found["classifier"], scores.float(), atol=1e-5)
    rows = activations(model, data, [layer], "positions", 5, collate=collate)[layer].view(9, 5, -1)
    for row, tokens, real in zip(rows, whole["out"].float(), mask, strict=True):
        assert all(any(torch.allclose(one, token, atol=1e-5) for token in tokens[real]) for one in row)


def test_a_convolution_over_time_has_its_channels_first():
    model = nn.Sequential(nn.Conv1d(2, 5, 3), nn.Flatten(), nn.Linear(20, 3))
    data = [(torch.randn(2, 6), 0) for _ in range(7)]
    assert activations(model, data, ["0"])["0"].shape == (7, 5)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.unused, self.line = nn.ReLU(), nn.Linear(1, 1), nn.Linear(192, 3)

    def forward(self, x):
        return self.line(self.act(self.act(x).flatten(1)))


@pytest.mark.parametrize("layers, settings, words", [
    (["nothing"], {}, "no layer 'nothing' in Twice; its layers are act, unused, line"), (["act"], {}, "layer 'act' was used 2 times"),
    (["unused"], {}, "layer 'unused' was used 0 times")])
def test_layers_that_do_not_answer_once_are_refused(layers, settings, words):
    model = Twice()
    with pytest.raises(ValueError, match=words):
        activations(model, pictures(), layers, **settings)
    assert not any(module._forward_hooks for module in model.modules()) and model.training
