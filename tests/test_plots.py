"""Figures of a run, a plan and a search: what is drawn is what was recorded."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpft import Full, LastLayer, Public, fine_tune, plan_table, tune

matplotlib.use("agg")


def points(count=64, seed=0):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_a_run_draws_what_it_recorded_and_shows_a_card():
    run = fine_tune(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), points(), LastLayer(), epsilon=3.0, steps=4, batch_size=16,
                    evaluate=Public(points(16, 1), "made up"), progress=False)
    titles = {axis.get_title(loc="left"): axis for axis in run.plot().axes}
    assert set(titles) == {"epsilon spent", "norm of the noisy gradient", "accuracy"}          # no loss: nobody asked for it
    line = titles["epsilon spent"].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4] and line.get_ydata()[-1] == pytest.approx(run.epsilon)
    card = run._repr_markdown_()
    assert f"ε = {run.epsilon:.2f}" in card and "accuracy" in card
    shown = fine_tune(nn.Linear(4, 2), points(), LastLayer(), epsilon=3.0, steps=2, batch_size=16, show_loss=True, progress=False)
    assert "training loss (private)" in {axis.get_title(loc="left") for axis in shown.plot().axes}


def test_a_plan_is_a_heat_map_with_its_noise():
    cells = plan_table(1000, 100, 2.0, batch_sizes=[32, 64], steps=[100, 200])
    axis = cells.plot().axes[0]
    assert [text.get_text() for text in axis.texts] == [f"{cell.noise_multiplier:.2g}" for cell in cells]
    assert axis.images[0].get_array().tolist() == [[cells[0].ratio, cells[1].ratio], [cells[2].ratio, cells[3].ratio]]


def test_a_search_fills_its_best_setting():
    found = tune(nn.Linear(4, 2), points(), Full(), {"learning_rate": [0.001, 0.1]}, Public(points(16, 1), "made up"), epsilon=3.0,
                 trials=2, steps=2, batch_size=16, charge="composition", progress=False)
    axis = found.plot().axes[0]
    filled = [row for row, colour in enumerate(axis.collections[0].get_facecolors()) if colour[3]]
    assert [found.trials[row].score for row in filled] == [max(trial.score for trial in found.trials)]
