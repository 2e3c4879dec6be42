"""Each deliberately broken engine of `planted` is caught by what is said to catch it, which is silent about the honest engine."""

from unittest.mock import patch

import pytest
import torch
from planted import BUGS, IN_SECURE_MODE, table
from test_training import engine

import dpft
from dpft.rapft import RapFT


@pytest.mark.parametrize("bug", [*BUGS, *IN_SECURE_MODE], ids=[bug.name for bug in [*BUGS, *IN_SECURE_MODE]])
def test_a_planted_bug_is_caught_and_the_honest_engine_is_not_accused(bug):
    bug.catch()
    assert bug.caught(), f"nobody noticed: {bug.name}"


def test_the_table_names_a_catcher_for_each(monkeypatch):
    monkeypatch.setattr("planted.BUGS", BUGS[:3])
    text = table()
    assert len(text.splitlines()) == 5 and "nothing" not in text and "audit of one step" in text


def test_the_mean_divides_by_the_expected_size():
    for seed in range(3):
        e = engine(dpft.load_model("mlp", 3, "image", (1, 4, 4)), seed=seed, epsilon=None, noise_multiplier=0.7)
        step = next(iter(e))
        for batch in step:
            step.add(batch)
        own = {name: value.clone() for name, value in step.sums.items()}
        with patch("dpft.step.add_noise", lambda total, std, keystream, *context: total):
            step.privatize()
        for name, parameter in e.trains.items():
            assert torch.allclose(parameter.grad * e.plan.batch_size, own[name], rtol=1e-5)


def test_a_relevance_mask_is_paid_for():
    method = RapFT(dpft.BiTFiT(), relevance_data="private", share=0.1)
    e = engine(dpft.load_model("mlp", 3, "image", (1, 4, 4)), method=method)
    next(iter(e))
    assert method.masks and ("relevance", 1) in [(m.name, m.steps) for m in e.spent]
