"""What a run does when its length, bound and learning rate are left out: the rule, and who overrides it."""

import math
from itertools import pairwise
from statistics import mean

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpft
from dpft.book.audits import Stopped, stopping
from dpft.book.experiments import recorded, results_file
from dpft.defaults import default_learning_rate, default_sizes
from dpft.settings import Settings


@pytest.mark.parametrize(("given", "size", "wanted"), [
    ({}, 400, (50, 100, 1.0)),                      # few people: an eighth of them, a hundred times
    ({}, 5_000, (625, 100, 1.0)),
    ({}, 67_349, (1024, 197, 1.0)),                 # many: three passes in batches of 1,024
    ({}, 3, (1, 100, 1.0)),
    ({"epochs": 1}, 400, (50, 8, 1.0)),             # what is given wins
    ({"steps": 7, "clip": 0.1}, 400, (50, 7, 0.1)),
    ({"batch_size": 100}, 400, (100, 100, 1.0)),
    ({"batch_size": 64, "epochs": 2, "clip": 0.0}, 640, (64, 20, 0.0)),  # a bound of 0 is refused later, not replaced
])
def test_lengths_and_bound_are_the_rule_unless_given(given, size, wanted):
    assert default_sizes(Settings(**given), size) == wanted


@pytest.mark.parametrize(("entries", "steps", "wanted"), [(770, 100, 0.019), (26_498, 197, 0.0066), (22_566_146, 100, 0.0015)])
def test_the_learning_rate_at_a_few_points(entries, steps, wanted):
    assert default_learning_rate(entries, steps) == wanted


def test_more_entries_and_more_steps_take_a_smaller_rate():
    sizes = [10**power for power in range(9)]
    for rates in ([default_learning_rate(n, 100) for n in sizes], [default_learning_rate(1000, n) for n in sizes]):
        assert all(after < before for before, after in pairwise(rates))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def tune(labels=None, method=None, **settings):
    rows = TensorDataset(torch.linspace(-1, 1, 160).view(40, 4), torch.arange(40) % 2 if labels is None else labels)
    return dpft.fine_tune(net(), rows, method or dpft.Full(), epsilon=8.0, accountant="rdp", progress=False, **settings)


def test_a_run_has_the_rule_s_values_whatever_the_labels_are():
    for labels in (None, torch.zeros(40, dtype=torch.long)):
        run = tune(labels)
        assert (run.guarantee.clip, len(run.history), run.mechanisms[0].sample_rate) == (1.0, 100, 5 / 40)
        assert {entry["learning_rate"] for entry in run.history} == {default_learning_rate(58, 100)}
        assert "batch_size=5, steps=100, clip=1, learning_rate=0.036: by dpft's rule, from public numbers alone" in run.report()


def test_what_is_given_wins_and_is_not_called_the_rule_s():
    run = tune(epochs=0.4, learning_rate=0.5)
    assert [entry["learning_rate"] for entry in run.history] == [0.5] * 3 and "batch_size=5, clip=1: by dpft's rule" in run.report()
    assert "by dpft's rule" not in tune(steps=2, batch_size=5, clip=0.1, learning_rate=0.5).report()


def test_a_run_that_is_resumed_when_less_trains_goes_on_at_its_rate(tmp_path):
    knobs = {"method": dpft.LayerFreeze(1, after=3), "steps": 8, "seed": 0, "checkpoint": tmp_path, "checkpoint_every": 1}
    with pytest.raises(Stopped):
        tune(optimizer=stopping(5), **knobs)
    run = tune(optimizer=torch.optim.AdamW, **knobs | {"method": dpft.LayerFreeze(1, after=3)})
    assert {entry["learning_rate"] for entry in run.history} == {default_learning_rate(58, 8)}


def test_the_hospital_finds_its_complaints_by_default():
    "Recorded: five seeds of a head on the made notes, at epsilon 3 and all else left out."
    runs = [one for one in recorded(results_file("defaults")) if one["data"] == "hospital" and "learning_rate" not in one]
    assert len(runs) == 5 and mean(one["metrics"]["recall_of_the_rarest"] for one in runs) >= 0.35
    assert all(math.isclose(one["epsilon"], 3, abs_tol=1e-3) for one in runs)


def test_sgd_moves_under_noise_as_far_as_adamw_does():
    run = tune(steps=2, optimizer="sgd")
    noise = run.mechanisms[0].noise_multiplier / 5
    assert math.isclose(run.history[0]["learning_rate"], default_learning_rate(58, 2) / noise, rel_tol=0.1)
