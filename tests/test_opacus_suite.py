"""Opacus' own suite for per-example gradients, run against our engine.

The suite builds a layer at random, takes each example's gradient alone, and compares them with what its wrapped model left in
`.grad_sample`.  Here `wrap_model` is replaced, so that what it finds there comes from `dpft.gradients`: for the layers that we claim from
the hooks alone, with no oracle behind them; for all others from `gradients`, which compares them and takes a slow way.
The suite goes over each layer in all of Opacus' modes; our engine has one, so each layer is taken once for each reduction of the loss.
"""

import unittest
import warnings
from collections import Counter, defaultdict
from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dpft import gradients as engine
from dpft import layer_rules
from dpft.hooks import Hooks

opacus_utils = pytest.importorskip("opacus.utils.per_sample_gradients_utils")
common = pytest.importorskip("opacus.tests.grad_samples.common")
HONEST = common.GradSampleHooks_test.run_test_with_reduction

CLAIMED = {"linear": nn.Linear, "conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d, "embedding": nn.Embedding,
           "layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, "group_norm": nn.GroupNorm}
OTHERS = ["instance_norm1d", "instance_norm2d", "instance_norm3d", "embedding_bag", "dp_multihead_attention", "dp_rnn", "sequence_bias"]
EXAMPLES = {"conv1d": 100, "conv2d": 100, "conv3d": 100}  # random layers, as many as the suite itself: most groups do not divide
FEW = 25  # for the other layers that we claim
VARIANTS = {"stride": lambda layer: max(layer.stride) > 1, "dilation": lambda layer: max(layer.dilation) > 1,
            "groups": lambda layer: layer.groups > 1, "padding": lambda layer: any(layer._reversed_padding_repeated_twice)}


def chosen(inputs, rows, batch_first):
    """The examples `rows` of an input as the suite makes them: a tensor, bags of an EmbeddingBag, or packed sequences."""
    if isinstance(inputs, PackedSequence):
        sequences = opacus_utils.unpack_packedsequences(inputs)
        return pack_sequence([sequences[i] for i in rows.tolist()], enforce_sorted=False)
    if isinstance(inputs, tuple):
        values, starts = inputs
        bags = [values[start:end] for start, end in zip(starts, [*starts[1:], len(values)], strict=True)]
        lengths = torch.tensor([0, *(len(bags[i]) for i in rows.tolist())])
        return torch.cat([bags[i] for i in rows.tolist()]), lengths.cumsum(0)[:-1]
    return inputs.index_select(0 if batch_first else 1, rows)


def count(inputs, batch_first):
    """Number of examples in an input."""
    if isinstance(inputs, PackedSequence):
        return int(inputs.batch_sizes[0])
    return len(inputs[1]) if isinstance(inputs, tuple) else inputs.shape[0 if batch_first else 1]


def outputs_by_example(model, inputs, batch_first):
    """One output for each example."""
    if isinstance(inputs, PackedSequence):                   # packed again for these rows, so put back into their order
        outputs = model(inputs)
        sequences, order = opacus_utils.unpack_packedsequences(outputs), outputs.unsorted_indices
        return [sequences[i] for i in (range(len(sequences)) if order is None else order.tolist())]
    if isinstance(inputs, tuple):
        return list(model(*inputs))
    if batch_first:
        return list(model(inputs))
    if isinstance(model, (nn.Linear, nn.Embedding)):         # our rules want examples first, and these layers do not care
        return list(model(inputs.transpose(0, 1)))
    return list(model(inputs).transpose(0, 1))


class Wrapped(nn.Module):
    """What the suite takes for a wrapped model: its forward pass leaves every example's gradient in `.grad_sample`."""

    def __init__(self, model, batch_first, loss_reduction, counts):
        super().__init__()
        self._module, self.batch_first, self.loss_reduction, self.counts = model, batch_first, loss_reduction, counts

    def forward(self, *arguments):
        inputs = arguments if len(arguments) > 1 else arguments[0]
        rows = (torch.arange(count(inputs, self.batch_first)),)

        def loss_fn(model, batch):
            """The suite's loss, L1 to zero, of each example alone."""
            outputs = outputs_by_example(model, chosen(inputs, batch[0], self.batch_first), self.batch_first)
            return torch.stack([output.abs().sum() if self.loss_reduction == "sum" else output.abs().mean() for output in outputs])

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no fast rule gives.*")
            taken, way = self.take(loss_fn, rows)
        self.counts["wrapped"] += 1
        self.counts[way] += 1
        for name, parameter in taken.parameters.items():
            parameter.grad_sample = self.instantiated(taken, name)
        return self._module(*arguments)

    def take(self, loss_fn, rows):
        """The gradients and how they came: from the hooks alone for a layer that we claim, and the engine must trust them too."""
        examples, module = len(rows[0]), self._module
        if isinstance(module, tuple(CLAIMED.values())) and examples:  # one example shows nothing, so it is not compared
            slow = examples > 1 and engine.unseen(module, loss_fn, rows, range(examples))[0]
            with Hooks(module) as hooks:
                return hooks.run(loss_fn, rows), "by the fallback" if slow else "by fast rules"
        try:
            taken = engine.gradients(module, loss_fn, rows)
        except (RuntimeError, ValueError):                   # said aloud, so nothing wrong is released; the suite goes on with the oracle
            alone = engine.per_example_gradients(module, loss_fn, rows)
            uses = {name: [engine.Dense(alone[name])] for name in engine.trainable(module)}
            return engine.Gradients(torch.zeros(examples), engine.trainable(module), uses, examples), "refused"
        fast = all(way is None for way in engine.known(module, loss_fn).ways.values())
        return taken, "empty" if not examples else "by fast rules" if fast and examples > 1 else "by the fallback"

    @staticmethod
    def instantiated(taken, name):
        """The gradients of one parameter, (B, *shape), once it is sure that the norms and weighted sums are theirs."""
        parameter = taken.parameters[name]
        rows = torch.stack([taken.weighted_sum({name: one})[name] for one in torch.eye(taken.size)]) if taken.size else (
            torch.zeros(0, *parameter.shape))
        dense = sum((use.dense() for use in taken.uses[name]), torch.zeros_like(rows))
        torch.testing.assert_close(dense, rows, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(taken.square_norms(name), dense.flatten(1).square().sum(1), atol=1e-5, rtol=1e-3)
        return dense


def once(honest):
    """What compares a layer's gradients, but only the first time for an input, a layer and a reduction of the loss."""
    taken = []

    def compared(self, x, module, *, loss_reduction, **more):
        if taken and (x is not taken[0][0] or module is not taken[0][1]):
            taken.clear()
        if loss_reduction not in [reduction for *_, reduction in taken]:
            taken.append((x, module, loss_reduction))
            honest(self, x, module, loss_reduction=loss_reduction, **more)

    return compared


def run_suite(name, monkeypatch, examples=None):
    """Run one file of the suite; its result, and for each kind of model how many were wrapped and how they went."""
    counts = defaultdict(Counter)

    def wrap_model(model, grad_sample_mode="hooks", *, batch_first=True, loss_reduction="mean", **_):
        kind = next(iter(model.children())) if type(model).__name__.endswith("Adapter") else model
        found = counts[type(kind).__name__]
        found.update(f"with {what}" for what, has in VARIANTS.items() if name.startswith("conv") and has(kind))
        return Wrapped(model, batch_first, loss_reduction, found)

    profile = settings(max_examples=examples or EXAMPLES.get(name, FEW), database=None, deadline=None, phases=[Phase.generate],
                       suppress_health_check=list(HealthCheck))
    monkeypatch.setattr(opacus_utils, "wrap_model", wrap_model)
    monkeypatch.setattr(common.GradSampleHooks_test, "run_test_with_reduction", once(HONEST))
    suite = unittest.TestSuite()
    for test in cases(unittest.defaultTestLoader.loadTestsFromModule(import_module(f"opacus.tests.grad_samples.{name}_test"))):
        method = getattr(type(test), test._testMethodName)
        if hasattr(method, "hypothesis"):
            monkeypatch.setattr(method, "_hypothesis_internal_use_settings", profile)
            monkeypatch.setattr(method, "_hypothesis_internal_use_seed", 0)  # the same layers each time, and well spread
        suite.addTest(test)
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite.run(result)
    return result, {kind: dict(found) for kind, found in counts.items()}


def cases(suite):
    """The single tests of a suite, those of the shared base class left out."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        elif type(test).__module__.rpartition(".")[2] != "common":
            yield test


@pytest.mark.parametrize("name", CLAIMED)
def test_layers_that_we_claim(name, monkeypatch):
    """Convolutions with every option are among the layers, or more layers are drawn: most random groups divide no channels."""
    kind = CLAIMED[name].__name__
    for times in (1, 4, 16):
        result, counts = run_suite(name, monkeypatch, times * EXAMPLES.get(name, FEW))
        if not name.startswith("conv") or all(counts.get(kind, {}).get(f"with {what}") for what in VARIANTS):
            break
    assert result.testsRun and not result.failures and not result.errors, [text for _, text in result.failures + result.errors]
    assert set(counts) == {kind}
    found = counts[kind]
    assert found.get("by fast rules", 0) > 0 and "by the fallback" not in found
    assert not name.startswith("conv") or all(found.get(f"with {what}") for what in VARIANTS)


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_we_do_not_claim(name, monkeypatch):
    result, counts = run_suite(name, monkeypatch, examples=10)
    assert result.testsRun and not result.failures and not result.errors, [text for _, text in result.failures + result.errors]
    assert counts


@pytest.mark.parametrize("name, kind, rule", [
    ("linear", nn.Linear, lambda module, gradient, inputs: layer_rules.linear_weight(module, 1.001 * gradient, inputs)),
    ("conv1d", nn.Conv1d, lambda module, gradient, inputs: layer_rules.convolution_weight(module, gradient, inputs.flip(-1))),
    ("embedding", nn.Embedding, lambda module, gradient, inputs: layer_rules.embedding_weight(module, gradient, inputs * 0))])
def test_a_broken_rule_is_seen(name, kind, rule, monkeypatch):
    monkeypatch.setitem(layer_rules.RULES, kind, layer_rules.Rule(rule, layer_rules.RULES[kind].bias))
    monkeypatch.setattr(engine, "unseen", lambda *_: ([], []))  # so that the suite alone must see it
    result, _ = run_suite(name, monkeypatch, examples=20)
    assert result.failures or result.errors
