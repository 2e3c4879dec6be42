"""Signals and angles against gradients written out, what is true of freezing as property tests, what is false as counterexamples."""

import json
import math
import warnings

import pytest
import torch
import zoo
from hypothesis import assume, given
from hypothesis import strategies as st
from zoo import Plain, inner, plain

from dpft.freezing import (
    UndefinedAngle,
    angle,
    angle_range,
    clip_groups,
    freezing_effect,
    module_layers,
    signals,
    status_changes,
    true_gradient,
)
from dpft.gradients import Partition, per_example_gradients
from dpft.oracle import only_training, select_rows

SEEDS = st.integers(0, 10**6)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_angle(x, y):
    """The textbook formula in the exact arithmetic of rationals' nearest thing: 50 digits."""
    import mpmath

    with mpmath.workdps(60):
        x, y = [mpmath.mpf(v) for v in x.tolist()], [mpmath.mpf(v) for v in y.tolist()]
        dot, squares = sum(a * b for a, b in zip(x, y, strict=True)), [sum(a * a for a in v) for v in (x, y)]
        return float(mpmath.acos(max(-1, min(1, dot / mpmath.sqrt(squares[0] * squares[1])))))


def layers_of(model):
    return [Partition(name, (parameter,)) for name, parameter in model.named_parameters()]


def distortion_angles(model, loss_fn, batch, clip, sigma, layers=None, **more):
    return signals(model, loss_fn, batch, clip, sigma, **more).angles(layers)


def flat(vector):
    return torch.cat([value.flatten() for value in vector.values()])


# Angles

@given(seed=SEEDS, d=st.integers(1, 6), near=st.sampled_from([1.0, 1e-3, 1e-8, 1e-12, 0.0]), sign=st.sampled_from([1, -1]),
       scale=st.sampled_from([1.0, 1e-300, 1e300, 1e-30]))
def test_angles_are_precise_everywhere(seed, d, near, sign, scale):
    x = normal(seed, d)
    y = sign * x + near * normal(seed + 1, d)
    assume(y.norm() > 0)
    found = angle([scale * x], list(y.split(1))) if d == 1 else angle([scale * x[:1], scale * x[1:]], [y[:1], y[1:]])
    wanted = exact_angle(scale * x, y)
    assert abs(found.item() - wanted) <= 1e-15 * 4 + 1e-15 * d
    assert found.dtype == torch.float64


@pytest.mark.parametrize("wrong", [[torch.zeros(3)], [torch.tensor([1.0, math.nan, 0.0])], [torch.tensor([1.0, math.inf, 0.0])], []])
def test_a_vector_without_direction_has_no_angle(wrong):
    for pair in ((wrong, [torch.ones(3)]), ([torch.ones(3)], wrong)):
        with pytest.warns(UndefinedAngle, match="there: the angle is undefined"):
            assert angle(*pair, "there").isnan()


# The triangle of signals

@given(seed=SEEDS, d=st.integers(1, 8), bend=st.floats(0, 30), noise=st.floats(0, 30))
def test_the_sphere_bounds_the_angle(seed, d, bend, noise):
    true = normal(seed, d)
    biased = true + bend * normal(seed + 1, d)
    private = biased + noise * normal(seed + 2, d)
    first, second, whole = angle([true], [biased]), angle([biased], [private]), angle([true], [private])
    low, high = angle_range(first, second)
    assert low - 1e-12 <= whole <= high + 1e-12
    assert high <= first + second


# Signals of models

def oracle(model, loss_fn, batch, clip, norm_of=None):
    """Unbiased and biased mean written out, by parameter; `norm_of`: names whose gradients count in the clip factor."""
    rows = per_example_gradients(model, loss_fn, batch)
    norms = torch.cat([value.flatten(1) for name, value in rows.items() if norm_of is None or name in norm_of], 1).norm(dim=1)
    factors = (clip / norms).clamp(max=1)
    means = {name: value.mean(0) for name, value in rows.items()}
    return means, {name: torch.tensordot(factors, value, dims=1) / len(factors) for name, value in rows.items()}, norms


@pytest.mark.parametrize("name", ["cnn", "gpt2", "bert"])
def test_signals_are_those_of_gradients_written_out(name):
    model, loss_fn, batch = zoo.build(name, rows=7)
    _, _, norms = oracle(model, loss_fn, batch, 1.0)
    clip = norms.median().item()
    unbiased, biased, _ = oracle(model, loss_fn, batch, clip)
    pieces = [select_rows(batch, part) for part in torch.arange(7).split(3)]
    for form in (batch, pieces, iter(pieces)):
        found = signals(model, loss_fn, form, clip, true=unbiased)
        assert torch.allclose(flat(found.vectors["unbiased"]), flat(unbiased), atol=1e-12)
        assert torch.allclose(flat(found.vectors["biased"]), flat(biased), atol=1e-12)
        assert torch.equal(flat(found.vectors["private"]), flat(found.vectors["biased"]))     # no noise
    assert torch.allclose(flat(true_gradient(model, loss_fn, pieces)), flat(unbiased), atol=1e-12)
    chosen = [layer for layer in module_layers(model) if "unused" not in layer.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedAngle)                          # attention's key biases have no gradient
        angles = distortion_angles(model, loss_fn, pieces, clip, 1.0, chosen)
    names = {id(p): name for name, p in model.named_parameters()}
    for layer, clipping, strength in zip(chosen, angles.clipping, angles.strength, strict=True):
        own = [names[id(p)] for p in layer.parameters]
        first, second = (torch.cat([vector[name].flatten() for name in own]) for vector in (unbiased, biased))
        assert strength.item() == pytest.approx(second.norm().item(), abs=1e-12)
        if first.norm() > 1e-8:
            assert clipping.item() == pytest.approx(exact_angle(first, second), abs=1e-9)
    whole = distortion_angles(model, loss_fn, batch, clip, 0.0)
    assert whole.layers == ("all",) and whole.noise.item() == 0 and whole.total == whole.clipping
    assert whole.clipping.item() == pytest.approx(exact_angle(flat(unbiased), flat(biased)), abs=1e-9)


@given(seed=SEEDS, clip=st.floats(0.1, 5), sigma=st.floats(0.1, 5), size=st.floats(1, 50))
def test_angles_of_chosen_gradients(seed, clip, sigma, size):
    rows, whole = normal(seed, 6, 5), normal(seed + 1, 5)
    model = plain(2, 3)
    true = {"p0": whole[:2], "p1": whole[2:]}
    found = signals(model, inner, (rows,), clip, sigma, true=true, batch_size=size, generator=torch.Generator().manual_seed(seed))
    biased = ((clip / rows.norm(dim=1)).clamp(max=1)[:, None] * rows).sum(0) / size
    noise = flat(found.vectors["private"]) - biased
    random = torch.Generator().manual_seed(seed)
    drawn = torch.cat([torch.randn(n, dtype=torch.float64, generator=random) for n in (2, 3)]) * sigma * clip / size
    assert torch.allclose(noise, drawn, atol=1e-12)
    angles = found.angles(layers_of(model))
    assert angles.reference == "true"
    for i, part in enumerate((slice(0, 2), slice(2, 5))):
        trio = whole[part], biased[part], (biased + noise)[part]
        for value, (first, second) in zip((angles.clipping, angles.noise, angles.total), ((0, 1), (1, 2), (0, 2)), strict=True):
            assert value[i].item() == pytest.approx(angle([trio[first]], [trio[second]]).item(), abs=1e-7)
    low, high = angle_range(angles.clipping, angles.noise)
    assert ((low - 1e-9 <= angles.total) & (angles.total <= high + 1e-9)).all()


def test_a_whole_set_is_streamed():
    """Physical batches come one by one and none is kept."""
    seen, alive = [], []
    def physical():
        for i in range(5):
            batch = (normal(i, 3, 4),)
            seen.append(batch[0])
            alive.append(len(seen))
            yield batch
    model = Plain([4])
    found = signals(model, inner, physical(), 1.0)
    rows = torch.cat(seen)
    assert torch.allclose(found.vectors["unbiased"]["p0"], rows.mean(0)) and alive == [1, 2, 3, 4, 5]
    assert torch.allclose(true_gradient(model, inner, ((normal(i, 3, 4),) for i in range(5)))["p0"], rows.mean(0))


# Zero, empty, not finite

def test_zero_gradients_give_nan_with_a_warning_that_names_the_layer():
    rows = torch.cat([torch.zeros(4, 2, dtype=torch.float64), normal(0, 4, 3)], 1)
    model = Plain([2, 3])
    with pytest.warns(UndefinedAngle, match="p0, unbiased to biased signal"):
        found = distortion_angles(model, inner, (rows,), 1.0, 1.0, layers_of(model))
    assert found.clipping.isnan().tolist() == [True, False] and found.strength[0] == 0
    with pytest.warns(UndefinedAngle):
        assert distortion_angles(model, inner, (0 * rows,), 1.0, 1.0).total.isnan()
    with pytest.warns(UndefinedAngle):
        effect = freezing_effect(model, inner, (0 * rows,), 1.0, 1.0, layers_of(model))
    assert math.isnan(effect.record()["after"]["p1"]["noise"]) and effect.clipped_before == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_counts_nowhere(bad):
    rows = normal(0, 5, 5)
    broken = rows.clone()
    broken[2, 3] = bad
    model, rest = Plain([2, 3]), rows[[0, 1, 3, 4]]
    with pytest.warns(UserWarning, match="1 of 5 examples"):
        found = signals(model, inner, (broken,), 1.0)
    assert torch.allclose(flat(found.vectors["unbiased"]), rest.sum(0) / 5)
    assert torch.allclose(flat(found.vectors["biased"]), ((1 / rest.norm(dim=1)).clamp(max=1)[:, None] * rest).sum(0) / 5)
    with pytest.warns(UserWarning, match="1 of 5 examples"):
        assert torch.allclose(flat(true_gradient(model, inner, [(broken,)])), rest.sum(0) / 5)


def test_layers_that_do_not_train_cannot_be_kept():
    model = Plain([2, 3])
    model.p1.requires_grad_(False)
    for measure in (lambda kept: freezing_effect(model, inner, (normal(0, 4, 5),), 1.0, 1.0, kept),
                    lambda kept: status_changes(model, inner, (normal(0, 4, 5),), 1.0, kept)):
        for kept in ([], layers_of(model)[1:]):
            with pytest.raises(ValueError, match="none of these layers trains"):
                measure(kept)


# Before and after freezing

@pytest.mark.parametrize("name", ["cnn", "gpt2"])
def test_freezing_effect_is_what_freezing_does(name):
    model, loss_fn, batch = zoo.build(name, rows=6)
    layers = module_layers(model)
    kept = layers[len(layers) // 2:]
    stays = [p for layer in kept for p in layer.parameters]
    clip = oracle(model, loss_fn, batch, 1.0)[2].sort().values[2:4].mean().item()
    true = true_gradient(model, loss_fn, batch)
    noise = lambda: torch.Generator().manual_seed(5)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedAngle)
        pieces = [select_rows(batch, part) for part in torch.arange(6).split(4)]
        effect = freezing_effect(model, loss_fn, pieces, clip, 1.0, kept, true=true, generator=noise())
        before = distortion_angles(model, loss_fn, batch, clip, 1.0, kept, true=true)
        with only_training(model, stays):
            after = distortion_angles(model, loss_fn, batch, clip, 1.0, kept, true=true, generator=noise())
            longer = int((oracle(model, loss_fn, batch, clip)[2] > clip).sum())
    for kind in ("strength", "clipping"):
        assert torch.allclose(getattr(effect.before, kind), getattr(before, kind), atol=1e-9, equal_nan=True)
    for kind in ("strength", "clipping", "noise", "total"):                      # the same noise: kept parameters, in the same order
        assert torch.allclose(getattr(effect.after, kind), getattr(after, kind), atol=1e-9, equal_nan=True)
    assert (effect.examples, effect.clipped_before, effect.clipped_after) == (6, 3, longer) and longer <= 3
    assert json.loads(json.dumps(effect.record()))["after"].keys() == {layer.name for layer in kept}


# The two groups

@given(seed=SEEDS, clip=st.floats(0.5, 4))
def test_groups_are_those_of_gradients_written_out(seed, clip):
    rows, whole = normal(seed, 9, 5), normal(seed + 1, 5)
    long = rows.norm(dim=1) > clip
    assume(long.any() and not long.all())
    model = plain(2, 3)
    found = clip_groups(model, inner, [(rows[:4],), (rows[4:],)], clip, layers_of(model), true={"p0": whole[:2], "p1": whole[2:]})
    assert (found.clipped, found.unclipped) == (int(long.sum()), int((~long).sum()))
    factors = (clip / rows.norm(dim=1)).clamp(max=1)[:, None]
    for i, part in enumerate((slice(0, 2), slice(2, 5))):
        for value, group in ((found.clipped_angle, long), (found.unclipped_angle, ~long)):
            assert value[i].item() == pytest.approx(angle([whole[part]], [rows[group][:, part].mean(0)]).item(), abs=1e-7)
        w, v, step = (factors * rows)[long][:, part].sum(0), rows[~long][:, part].sum(0), 1e-6
        turned = [angle([whole[part]], [v + (1 + sign * step) * w]).cos() for sign in (1, -1)]
        slope = (turned[0] - turned[1]) / (2 * step) * (v + w).norm() / w.norm()
        assert found.gain[i].item() == pytest.approx(slope.item(), abs=1e-5 * (1 + ((v + w).norm() / w.norm()).item()))


def test_an_empty_group_has_no_angle():
    with pytest.warns(UndefinedAngle, match="unclipped"):
        found = clip_groups(Plain([5]), inner, (normal(0, 6, 5),), 1e-3)
    assert found.unclipped == 0 and found.unclipped_angle.isnan().all() and found.clipped_angle.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.filterwarnings("ignore::dpft.freezing.angles.UndefinedAngle")             # a group is empty
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])                           # of the last the squares overflow
def test_an_example_that_is_left_out_is_in_no_group(bad):
    rows = torch.cat([normal(0, 4, 5), torch.full((1, 5), bad, dtype=torch.float64)])
    model, kept = plain(2, 3), slice(1, None)
    with pytest.warns(UserWarning, match="1 of 5 examples have a gradient that is not finite"):
        for clip, clipped in ((1e-3, 4), (1e3, 0)):
            found = clip_groups(model, inner, (rows,), clip)
            assert (found.clipped, found.unclipped) == (clipped, 4 - clipped)
            for effect in (freezing_effect(model, inner, (rows,), clip, 1.0, layers_of(model)[kept]),
                           status_changes(model, inner, (rows,), clip, layers_of(model)[kept])):
                assert (effect.examples, effect.clipped_before, effect.clipped_after) == (4, clipped, clipped)


@given(seed=SEEDS, clip=st.floats(0.8, 3))
def test_status_changes_only_from_clipped_to_unclipped(seed, clip):
    rows, model = normal(seed, 12, 6), plain(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedAngle)
        found = status_changes(model, inner, [(rows[:5],), (rows[5:],)], clip, layers_of(model)[1:])
    before, after = rows.norm(dim=1) > clip, rows[:, 3:].norm(dim=1) > clip
    assert (found.examples, found.clipped_before, found.clipped_after) == (12, int(before.sum()), int(after.sum()))
    assert not (after & ~before).any()
    for value, groups in ((found.turned_clipped, (before, after)), (found.turned_unclipped, (~before, ~after))):
        sums = [rows[group][:, 3:].sum(0) for group in groups]
        if all(group.any() for group in groups):
            assert value.item() == pytest.approx(angle([sums[0]], [sums[1]]).item(), abs=1e-7)
        else:
            assert value.isnan().all()


def test_layers_of_modules_count_tied_and_frozen_parameters_once_or_never():
    model, _, _ = zoo.build("gpt2-lm")
    layers = module_layers(model)
    found = [p for layer in layers for p in layer.parameters]
    assert len(found) == len(set(found)) == len(list(model.parameters()))
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    assert not any(layer.name.startswith("transformer.h.0") for layer in module_layers(model))
