"""Signals and angles against gradients written out, and what is always true of freezing."""

import math

import pytest
import torch
import zoo
from hypothesis import assume, given
from hypothesis import strategies as st
from zoo import Plain, inner, plain

from dpft.book.angles import angle
from dpft.book.distortion import clip_groups, freezing_effect, layer_angles, signals, status_changes, true_gradient
from dpft.norms import Partition
from dpft.oracle import only_training, select_rows

SEEDS = st.integers(0, 10**6)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers_of(model):
    return [Partition(name, (parameter,)) for name, parameter in model.named_parameters()]


def flat(vector):
    return torch.cat([value.flatten() for value in vector.values()])


@given(seed=SEEDS, d=st.integers(1, 6), near=st.sampled_from([1.0, 1e-3, 1e-8, 1e-12, 0.0]), sign=st.sampled_from([1, -1]),
       scale=st.sampled_from([1.0, 1e30, 1e-30]))
def test_angles_are_precise_everywhere(seed, d, near, sign, scale):
    import mpmath

    x = normal(seed, d)
    y = sign * x + near * normal(seed + 1, d)
    assume(y.norm() > 0)
    with mpmath.workdps(60):   # the textbook formula in 60 digits
        u, v = [mpmath.mpf(e) for e in (scale * x).tolist()], [mpmath.mpf(e) for e in y.tolist()]
        dot, squares = sum(a * b for a, b in zip(u, v, strict=True)), [sum(a * a for a in w) for w in (u, v)]
        wanted = float(mpmath.acos(max(-1, min(1, dot / mpmath.sqrt(squares[0] * squares[1])))))
    assert abs(angle([scale * x], list(y.split(1))).item() - wanted) <= 1e-15 * (4 + d)


def test_signals_and_angles_are_those_of_gradients_written_out():
    rows, model = normal(0, 6, 5), plain(2, 3)
    true = {"p0": normal(1, 5)[:2], "p1": normal(1, 5)[2:]}
    found = signals(model, inner, [(rows[:4],), (rows[4:],)], 1.5, 2.0, true=true, batch_size=8,
                    generator=torch.Generator().manual_seed(3))
    biased = ((1.5 / rows.norm(dim=1)).clamp(max=1)[:, None] * rows).sum(0) / 8
    random = torch.Generator().manual_seed(3)
    noise = torch.cat([torch.randn(n, dtype=torch.float64, generator=random) for n in (2, 3)]) * 2.0 * 1.5 / 8
    for kind, wanted in (("unbiased", rows.sum(0) / 8), ("biased", biased), ("private", biased + noise)):
        assert torch.allclose(flat(found[kind]), wanted, atol=1e-12)
    assert torch.allclose(flat(true_gradient(model, inner, [(rows[:4],), (rows[4:],)])), rows.mean(0), atol=1e-12)
    angles = layer_angles(model, found, layers_of(model))
    for name, part in (("p0", slice(0, 2)), ("p1", slice(2, 5))):
        trio = flat(true)[part], biased[part], (biased + noise)[part]
        for kind, (one, other) in {"clipping": (0, 1), "noise": (1, 2), "total": (0, 2)}.items():
            assert angles[name][kind] == pytest.approx(angle([trio[one]], [trio[other]]).item(), abs=1e-7)
        assert angles[name]["strength"] == pytest.approx(biased[part].norm().item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])                           # of the last the squares overflow
def test_an_example_that_is_not_finite_counts_nowhere(bad):
    rows = torch.cat([normal(0, 4, 5), torch.full((1, 5), bad, dtype=torch.float64)])
    model = plain(2, 3)
    with pytest.warns(UserWarning, match="1 of 5 examples have a gradient that is not finite"):
        found = signals(model, inner, [(rows,)], 1.0)
        assert torch.allclose(flat(found["unbiased"]), rows[:4].sum(0) / 5)
        for clip, clipped in ((1e-3, 4), (1e3, 0)):
            groups = clip_groups(model, inner, [(rows,)], clip)
            assert (groups["clipped"], groups["unclipped"]) == (clipped, 4 - clipped)
            assert math.isnan(groups["clipped_angle" if clip > 1 else "unclipped_angle"][0])       # of an empty group
            status = status_changes(model, inner, [(rows,)], clip, layers_of(model)[1:])
            assert (status["examples"], status["clipped_before"], status["clipped_after"]) == (4, clipped, clipped)


def test_freezing_effect_is_what_freezing_does():
    model, loss_fn, batch = zoo.build("cnn", rows=6)
    layers = [layer for layer in layers_of(model) if layer.parameters[0].numel()]
    kept = layers[len(layers) // 2:]
    true = true_gradient(model, loss_fn, [batch])
    def after(clip, sigma, **more):
        return layer_angles(model, signals(model, loss_fn, [batch], clip, sigma, true=true, **more), kept)
    clip = 0.5 * flat(true).norm().item()
    pieces = [select_rows(batch, part) for part in torch.arange(6).split(4)]
    effect = freezing_effect(model, loss_fn, pieces, clip, 1.0, kept, true=true, generator=torch.Generator().manual_seed(5))
    before = after(clip, 1.0)
    with only_training(model, [p for layer in kept for p in layer.parameters]):
        later = after(clip, 1.0, generator=torch.Generator().manual_seed(5))           # the same noise
    for layer in kept:
        assert effect["after"][layer.name] == pytest.approx(later[layer.name], abs=1e-9, nan_ok=True)
        for kind in ("strength", "clipping"):
            assert effect["before"][layer.name][kind] == pytest.approx(before[layer.name][kind], abs=1e-9, nan_ok=True)


@given(seed=SEEDS, clip=st.floats(0.5, 4))
def test_groups_are_those_of_gradients_written_out(seed, clip):
    rows, whole = normal(seed, 9, 5), normal(seed + 1, 5)
    long = rows.norm(dim=1) > clip
    assume(long.any() and not long.all())
    found = clip_groups(Plain([5]), inner, [(rows[:4],), (rows[4:],)], clip, true={"p0": whole})
    for kind, group in (("clipped", long), ("unclipped", ~long)):
        assert found[kind] == int(group.sum())
        assert found[f"{kind}_angle"][0] == pytest.approx(angle([whole], [rows[group].mean(0)]).item(), abs=1e-7)
    factors, step = (clip / rows.norm(dim=1)).clamp(max=1)[:, None], 1e-6
    w, v = (factors * rows)[long].sum(0), rows[~long].sum(0)
    turned = [angle([whole], [v + (1 + sign * step) * w]).cos() for sign in (1, -1)]   # @lem-scaling by differences
    slope = (turned[0] - turned[1]) / (2 * step) * (v + w).norm() / w.norm()
    assert found["gain"][0] == pytest.approx(slope.item(), abs=1e-5 * (1 + ((v + w).norm() / w.norm()).item()))


@given(seed=SEEDS, clip=st.floats(0.8, 3))
def test_status_changes_only_from_clipped_to_unclipped(seed, clip):
    rows, model = normal(seed, 12, 6), plain(3, 3)
    found = status_changes(model, inner, [(rows[:5],), (rows[5:],)], clip, layers_of(model)[1:])
    before, after = rows.norm(dim=1) > clip, rows[:, 3:].norm(dim=1) > clip
    assert (found["examples"], found["clipped_before"], found["clipped_after"]) == (12, int(before.sum()), int(after.sum()))
    assert not (after & ~before).any()
    for kind, groups in (("clipped", (before, after)), ("unclipped", (~before, ~after))):
        if all(group.any() for group in groups):
            one, other = (rows[group][:, 3:].sum(0) for group in groups)
            assert found[f"turned_{kind}"][0] == pytest.approx(angle([one], [other]).item(), abs=1e-7)
