"""Deliberately broken engines, each with the named test or the audit that catches it: what the chapter on auditing shows as a table."""

import importlib
import math
import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from dpft import DPFrost, Full, checks, engine, forms, step
from dpft.account import Account
from dpft.auditing import CanaryTable, audit
from dpft.engine import Engine
from dpft.frost import selection
from dpft.gradients import Block
from dpft.norms import Gradients
from dpft.oracle import select_rows
from dpft.step import Step

ROOMS = "oracle", "forms", "layer_rules", "norms", "hooks", "gradients", "checks"


def everywhere(name, value):
    "Something else under a name, in each module of the engine's gradients that knows it."
    stack = ExitStack()
    for module in (import_module(f"dpft.{room}") for room in ROOMS):
        if hasattr(module, name):
            stack.enter_context(patch.object(module, name, value))
    return stack


# The bugs -------------------------------------------------------------------------------------------------------------------------


def no_clipping():
    def ones(norms, clip, style="flat"):
        return norms.isfinite().to(norms)

    return everywhere("clip_factor", ones)


def clip_after_sum():
    honest = Gradients.clipped_sum

    def late(self, blocks, style="flat", last=False, into=None):
        sums, norms = honest(self, [Block(block.parameters, block.masks, 1e30) for block in blocks], style, last)
        length = math.sqrt(sum(value.square().sum().item() for value in sums.values()))
        sums = {name: value * min(1.0, blocks[0].clip / max(length, 1e-30)) for name, value in sums.items()}
        if into is None:
            return sums, norms
        for name, value in sums.items():
            into[name] += value
        return into, norms

    return patch.object(Gradients, "clipped_sum", late)


def a_tenth_less_noise():
    honest = engine.noise_spread

    def less(blocks):
        return {known: 0.9 * spread for known, spread in honest(blocks).items()}

    return patch.object(engine, "noise_spread", less)


def noise_of_one_physical_batch():
    honest = Step.privatize

    def share(self):
        scales = self.engine.scales
        root = math.sqrt(max(1, self.batches))
        self.engine.scales = {known: std / root for known, std in scales.items()}
        try:
            honest(self)
        finally:
            self.engine.scales = scales

    return patch.object(Step, "privatize", share)


def mean_by_the_actual_batch():
    honest = Step.privatize

    def actual(self):
        plan = self.engine.plan
        self.engine.plan = replace(plan, batch_size=max(1, self.examples))
        try:
            honest(self)
        finally:
            self.engine.plan = plan

    return patch.object(Step, "privatize", actual)


def shuffled_batches():
    def shuffled(size, rate, keystream, *context):
        count = max(1, round(rate * size))
        epoch, place = divmod(context[-1], size // count)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
        return order[place * count:][:count].sort().values

    return patch.object(step, "poisson_draw", shuffled)


def stale_freeze_set():
    honest = Engine.refresh

    def once(self):
        if not self.trains:
            honest(self)

    return patch.object(Engine, "refresh", once)


def unpaid_requests():
    honest = Account.claim

    def free(self, name, number):
        return honest(self, name, number) if name == "train" else number

    return patch.object(Account, "claim", free)


def first_sensitivity_reused():
    honest, first = selection.sensitivity, []

    def reused(*settings):
        first.append(honest(*settings))
        return first[0]

    return patch.object(selection, "sensitivity", reused)


def nan_passed_through():
    return everywhere("silence", lambda rows, factors: rows)


def raw_gradients_in_the_loss():
    "A plain backward pass, which fills the gradient of every leaf."
    honest = torch.autograd.grad

    def backward(outputs, inputs, **settings):
        if any(getattr(one, "ndim", 0) for one in inputs):   # neither anchors nor edges of the graph
            return honest(outputs, inputs, **settings)
        found = dict.fromkeys(range(len(inputs)))
        for number, edge in enumerate(inputs):
            if not isinstance(edge, torch.Tensor):
                edge.node.register_prehook(lambda own, number=number, edge=edge: found.update({number: own[edge.output_nr]}))
        outputs.backward()
        return [*found.values()]

    return patch.object(torch.autograd, "grad", backward)


def writes_are_not_compared():
    "The check does not see what a pass leaves in the model's buffers."
    return patch.object(torch.nn.Module, "named_buffers", lambda self, *_, **__: iter(()))


def margin_of_four_units():
    "Products in one piece, under a margin that does not grow with their length, and nothing measured again."
    stack = ExitStack()
    stack.enter_context(everywhere("gamma", lambda depth, dtype: 4 * torch.finfo(dtype).eps))
    stack.enter_context(everywhere("token_products", lambda left, right: left @ right.mT))
    stack.enter_context(everywhere("DOUBTFUL", math.inf))
    return stack


def products_in_half_precision():
    honest = forms.token_products

    def halved(left, right):
        return honest(left.bfloat16(), right.bfloat16()).float()

    return everywhere("token_products", halved)


def rows_padded_already():
    "The check takes its probes from the batch, all padded to one length, instead of collating them by themselves."
    honest = checks.choose_probes
    return everywhere("choose_probes", lambda batch, alone: honest(batch, lambda rows: select_rows(batch, torch.tensor(rows))))


# What catches them ----------------------------------------------------------------------------------------------------------------


def the_claim_stands(**settings):
    "An audit of one step at mu = 2; a true claim fails it once in a thousand seeds."
    found = audit(Full(), noise_multiplier=0.5, steps=1, model=CanaryTable(10_000), cache=0.0, accountant="rdp", seed=0, **settings)
    least, chance = found.lower_bound(error=1e-3), found.p_value()
    assert chance > 1e-3, f"claimed {found.claim:.2f}, audited {least:.2f}, p {'<' if chance < 1e-11 else '='} {max(chance, 1e-12):.1g}"


def named_test(file, name, /, *arguments, **knobs):
    "A test of another file as a function, with a folder or a patch where it wants one."
    test = getattr(importlib.import_module(file), name)
    wants = signature(test).parameters
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        own = {"tmp_path": Path(folder), "monkeypatch": monkeypatch}
        return test(*arguments, **{one: own[one] for one in wants if one in own}, **knobs)


@dataclass(frozen=True)
class Bug:
    name: str
    plant: Callable[[], AbstractContextManager]
    catch: Callable[[], None]                    # raises under the bug, and not without it

    @property
    def catcher(self):
        return self.catch.args[1] if self.catch.func is named_test else "audit of one step"

    def caught(self):
        "What the catcher says under the bug; empty when it notices nothing."
        with self.plant():
            try:
                self.catch()
            except (AssertionError, ValueError, pytest.fail.Exception) as error:
                line = traceback.extract_tb(error.__traceback__)[-1].line
                in_a_test = isinstance(error, AssertionError) and self.catch.func is named_test
                return line if in_a_test else str(error).strip().splitlines()[0]
        return ""


AUDIT, IN_PARTS = partial(the_claim_stands), partial(the_claim_stands, physical_batch_size=1250)
BUGS = [
    Bug("no clipping", no_clipping, AUDIT),
    Bug("clip after the sum", clip_after_sum, partial(named_test, "test_training", "test_physical_batches_do_not_change_the_step")),
    Bug("noise x 0.9", a_tenth_less_noise, AUDIT),
    Bug("noise of one physical batch, not of all", noise_of_one_physical_batch, IN_PARTS),
    Bug("mean by the actual batch", mean_by_the_actual_batch,
        partial(named_test, "test_planted_bugs", "test_the_mean_divides_by_the_expected_size")),
    Bug("shuffled batches accounted as Poisson", shuffled_batches,
        partial(named_test, "test_characterisation", "test_an_empty_draw_is_a_step")),
    Bug("stale freeze set", stale_freeze_set, partial(named_test, "test_training", "test_what_trains_may_change_at_any_step_both_ways")),
    Bug("uncharged selection", unpaid_requests,
        partial(named_test, "test_frost_selection", "test_the_budget_is_met_and_the_ledger_has_every_round",
                DPFrost(0.4, sample_rate=0.5), 5)),
    Bug("uncharged relevance mask", unpaid_requests, partial(named_test, "test_planted_bugs", "test_a_relevance_mask_is_paid_for")),
    Bug("sensitivity of the first round reused", first_sensitivity_reused,
        partial(named_test, "test_frost_selection", "test_the_released_magnitudes_hide_under_noise_of_the_remaining_sensitivity")),
    Bug("NaN passed through", nan_passed_through,
        partial(named_test, "test_training", "test_an_example_that_is_not_finite_contributes_nothing_and_is_counted")),
    Bug("raw gradients in a parameter of the loss", raw_gradients_in_the_loss,
        partial(named_test, "test_gradients", "test_no_leaf_of_a_loss_gets_a_raw_gradient")),
    Bug("buffers that a pass writes into", writes_are_not_compared,
        partial(named_test, "test_checks", "test_running_statistics_are_refused")),
    Bug("a margin of four units of rounding", margin_of_four_units,
        partial(named_test, "test_float_bound", "test_two_tokens_that_nearly_cancel_have_no_norm_that_is_too_small", 768, 3072,
                torch.float32)),
    Bug("inner products in bfloat16", products_in_half_precision,
        partial(named_test, "test_float_bound", "test_factors_that_half_precision_would_shorten_are_measured_in_full", 1.003)),
    Bug("a loss that depends on the padding, compared in padded rows", rows_padded_already,
        partial(named_test, "test_checks", "test_padding_is_found_where_every_probe_is_nearly_full_or_a_mask_says_it")),
]
SAFELY = {"secure_mode": True}
IN_SECURE_MODE = [
    Bug("no clipping, secure mode", no_clipping, partial(the_claim_stands, **SAFELY)),
    Bug("noise x 0.9, secure mode", a_tenth_less_noise, partial(the_claim_stands, **SAFELY)),
    Bug("noise of one physical batch, secure mode", noise_of_one_physical_batch,
        partial(the_claim_stands, physical_batch_size=1250, **SAFELY))]


def table():
    "Markdown: every bug, what catches it, and what that says."
    lines = ["| planted bug | caught by | which says |", "|---|---|---|"]
    for bug in BUGS:
        catcher = f"`{bug.catcher}`" if bug.catch.func is named_test else bug.catcher
        said = bug.caught()
        said = f"`{said.partition('  # ')[0].strip()}`" if said.startswith("assert ") else re.sub(r"<function (\w+) at \w+>", r"`\1`", said)
        lines.append(f"| {bug.name} | {catcher if said else '**nothing**'} | {said.replace('|', '/')} |")
    return "\n".join(lines)
