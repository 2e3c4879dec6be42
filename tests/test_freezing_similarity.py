"""Canonical correlations of activations: an independent oracle, invariances, what is refused; and the activations themselves."""

import math

import numpy as np
import pytest
import torch
import zoo
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import dpft
from dpft.data import Public, TensorData
from dpft.freezing.similarity import activations, cca, mean_cca, pwcca, svcca
from dpft.losses import logits

MEASURES = [mean_cca, pwcca, svcca]


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
    assert mean_cca(x, y) == pytest.approx(1 - correlations.mean(), abs=1e-7)


def test_the_correlations_are_those_of_scikit_learn():
    from sklearn.cross_decomposition import CCA

    x, y = pair(3)
    first, second = CCA(4, scale=False, max_iter=5000, tol=1e-12).fit_transform(x.numpy(), y.numpy())
    expected = [np.corrcoef(first[:, i], second[:, i])[0, 1] for i in range(4)]
    assert np.allclose(cca(x, y), expected, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, st.integers(0, 10**6))
def test_correlations_do_not_change_under_invertible_maps_and_translation(first, second, seed):
    x, y = pair(seed, 60, first, second)
    moved = x @ mixing(first, seed) + 30, y @ mixing(second, seed + 1) - 2
    assert torch.allclose(cca(*moved), cca(x, y), atol=1e-9) and mean_cca(*moved) == pytest.approx(mean_cca(x, y), abs=1e-9)
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


def test_pwcca_is_not_invariant_to_maps_of_x_and_says_nothing_else():
    waves = torch.stack([torch.cos(2 * math.pi * k * torch.arange(80.0).double() / 80) for k in (1, 2, 3)], 1)    # orthogonal columns
    x, y = waves[:, :2], waves[:, [0, 2]]                                       # one correlation of 1, and one of 0
    assert pwcca(x, y) == pytest.approx(1 / 2, abs=1e-2) and pwcca(x * torch.tensor([1.0, 1e3]), y) == pytest.approx(1000 / 1001, abs=1e-2)
    assert "not to mixing the columns of x" in " ".join(pwcca.__doc__.split())


@settings(max_examples=30, deadline=None)
@given(sizes, sizes, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
def test_distances_lie_between_0_and_1_and_are_0_for_oneself(first, second, seed, dtype):
    x, y = (values.to(dtype) for values in pair(seed, 40, first, second))
    for measure in MEASURES:
        assert 0 <= measure(x, y) <= 1
        assert measure(x, x) == pytest.approx(0, abs=1e-12)
    assert pwcca(x.double(), x.double() @ mixing(first, seed)) == pytest.approx(0, abs=1e-10)
    assert svcca(x, y, keep=1.0) == pytest.approx(mean_cca(x, y), abs=1e-5)


def test_arrays_and_whole_numbers_are_taken_as_they_are():
    x, y = pair(0)
    assert pwcca(x.numpy(), y.numpy()) == pytest.approx(pwcca(x, y), abs=1e-12)
    whole = (10 * x).round().int()
    assert pwcca(whole, y) == pytest.approx(pwcca(whole.double(), y), abs=1e-6)


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


def test_directions_without_signal_weigh_nothing_in_pwcca():
    x, _ = pair(4, 200)
    generator = torch.Generator().manual_seed(0)
    wide, later = (torch.cat([x, 1e-7 * torch.randn(200, 5, generator=generator).double()], 1) for _ in range(2))
    assert pwcca(wide, later) < 1e-5 and svcca(wide, later) < 1e-5 and mean_cca(wide, later) > 0.3


def test_among_equal_correlations_squares_leave_nothing_to_chance():
    generator = torch.Generator().manual_seed(0)
    common, own, others = (torch.randn(200, size, generator=generator, dtype=torch.float64) for size in (5, 15, 15))
    x, y = torch.cat([common, own], 1) @ mixing(20, 0), torch.cat([common, others], 1)
    found = [[pwcca(x, y @ torch.linalg.qr(mixing(20, seed))[0], order) for seed in range(8)] for order in (1, 2)]
    assert max(found[1]) - min(found[1]) < 1e-9 < 1e-4 < max(found[0]) - min(found[0])


def test_independent_noise_looks_as_alike_as_the_lemma_says():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    sums = torch.stack([cca(x, torch.randn(30, 4, generator=generator, dtype=torch.float64)).square().sum() for _ in range(400)])
    assert abs(sums.mean() - 6 * 4 / 29) < 5 * sums.std() / 20
    few = cca(torch.randn(12, 8, generator=generator), torch.randn(12, 7, generator=generator))
    assert torch.allclose(few[: 8 + 7 - 11], torch.ones(4, dtype=few.dtype)) and few[4] < 1


def test_svcca_keeps_the_components_that_hold_the_share():
    x, y = pair(5, 200)
    strong = x * torch.tensor([1e3, 1e3, 1e-3, 1e-3, 1e-3], dtype=torch.float64)
    assert svcca(strong, y, 0.9) == pytest.approx(svcca(x[:, :2], y, 0.9), abs=1e-6)
    more = torch.cat([x, torch.zeros(200, 300, dtype=torch.float64)], 1)                         # more columns than rows
    assert svcca(more, y) == pytest.approx(svcca(x, y), abs=1e-9)
    rotation = torch.linalg.qr(mixing(5, 0))[0]
    assert svcca(3 * x @ rotation + 1, y) == pytest.approx(svcca(x, y), abs=1e-9)


@pytest.mark.parametrize("keep", [0.9999999, 1.0])
def test_svcca_takes_rounding_in_float32_for_no_direction(keep):
    generator = torch.Generator().manual_seed(0)
    common, *mixtures = (torch.randn(*shape, generator=generator) for shape in ((400, 5), (5, 8), (5, 8)))
    x, y = (common @ mixture for mixture in mixtures)                                            # one span of 5 dimensions
    assert mean_cca(x, y) < 1e-6 and svcca(x, y, keep) < 1e-6


NAN, RAMP = torch.zeros(20, 3), torch.arange(60.0).view(20, 3) ** 2
NAN[4, 1] = math.nan


@pytest.mark.parametrize("x, y, words", [
    (torch.randn(17, 16), torch.randn(17, 3), "x has 17 examples for 16 dimensions.*more examples, pool over positions, or use svcca"),
    (torch.randn(17, 3), torch.randn(17, 16), "y has 17 examples for 16"),
    (torch.randn(3, 16), torch.randn(3, 16), "x has 3 examples for 16"),
    (torch.randn(20, 3), torch.randn(19, 3), "x has 20 examples and y has 19"),
    (NAN, torch.randn(20, 3), "x holds .* not finite, the first in row 4"),
    (torch.randn(20, 3), NAN / 0, "y holds .* not finite"), (torch.ones(20, 3), torch.randn(20, 3), "x is the same for all 20 examples"),
    (torch.randn(20, 3, 2), torch.randn(20, 3), r"x has shape \(20, 3, 2\)"), (torch.randn(20), torch.randn(20, 3), r"x has shape \(20,\)"),
    (torch.zeros(0, 3), torch.zeros(0, 3), "x is the same for all 0 examples")])
@pytest.mark.parametrize("measure", [cca, mean_cca, pwcca])
def test_what_cannot_be_compared_is_refused(measure, x, y, words):
    with pytest.raises(ValueError, match=words):
        measure(x, y)


def test_other_bad_settings_are_refused():
    x, y = pair(0)
    for call, words in ((lambda: pwcca(x, y, 3), "order=3"), (lambda: svcca(x, y, 0), "keep=0"), (lambda: svcca(x, y, 1.5), "keep=1.5"),
                        (lambda: svcca(x, y[1:]), "80 examples and y has 79"),
                        (lambda: svcca(x[:5], y[:5], 1.0), "5 examples for 4 .*smaller keep")):
        with pytest.raises(ValueError, match=words):
            call()


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


def test_checkpoints_of_a_run_can_be_compared():
    model = dpft.load_model("cnn", 10, kind="image", image_shape=(1, 8, 8))
    probe = dpft.load_data("digits").public.subset(range(300))
    before = activations(model, probe, ["2", "8"])
    assert pwcca(before["2"], activations(model, probe, ["2"])["2"]) == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        for parameter in model[6].parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    after = activations(model, probe, ["2", "8"])
    assert pwcca(before["2"], after["2"]) == pytest.approx(0, abs=1e-6) and pwcca(before["8"], after["8"]) > 0.02


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.unused, self.line = nn.ReLU(), nn.Linear(1, 1), nn.Linear(192, 3)

    def forward(self, x):
        return self.line(self.act(self.act(x).flatten(1)))


@pytest.mark.parametrize("layers, settings, words", [
    (["nothing"], {}, "no layer 'nothing' in Twice; its layers are act, unused, line"), (["act"], {}, "layer 'act' was used 2 times"),
    (["unused"], {}, "layer 'unused' was used 0 times"), (["line"], dict(pool="max"), "pool='max'"),
    (["line"], dict(pool="positions", positions=0), "at least one")])
def test_layers_that_do_not_answer_once_are_refused(layers, settings, words):
    model = Twice()
    with pytest.raises(ValueError, match=words):
        activations(model, pictures(), layers, **settings)
    assert not any(module._forward_hooks for module in model.modules()) and model.training
