"""A physical batch's clipped sum as one graph of operators: equal to the ordinary way, or not taken."""

import copy
import warnings

import numpy as np
import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dpft
from dpft.capture import Graphs, fill, round_up
from dpft.gradients import clipped_sum, gradients
from dpft.hooks import Hooks
from dpft.norms import Block, Layout, Sums
from dpft.oracle import per_example_gradients


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_batch_is_filled_by_a_quarter_at_most_and_few_sizes_are_left(rows, most):
    size = round_up(rows, most)
    assert rows <= size <= max(rows, min(most, 5 * rows // 4 + 1))
    assert len({round_up(each, 10_000) for each in range(64, 128)}) == 4 + 1                    # and the next octave's first


def test_a_filled_batch_ends_with_copies_of_its_first_row():
    batch = {"x": torch.arange(6).view(3, 2), "kept": 7, "y": torch.tensor([3, 4, 5])}
    found = fill(batch, 5)
    assert found["x"][:, 0].tolist() == [0, 2, 4, 0, 0] and found["y"].tolist() == [3, 4, 5, 3, 3] and found["kept"] == 7


def captured(model, loss_fn, batch, clip=0.3, style="flat", most=64):
    "What captures batches of a model, after one batch in the ordinary way."
    hooks = Hooks(model)
    gradients(model, loss_fn, batch, None, hooks)
    return Graphs(model, loss_fn, hooks, [Block([*hooks.parameters.values()], clip=clip)], style, most)


def ordinary(its, batch):
    "Sums, losses and norms without a graph."
    found, sums = gradients(its.model, its.loss_fn, batch, None, its.hooks), Sums(Layout(its.hooks.parameters))
    _, norms = found.clipped_sum(its.blocks, its.style, True, sums)
    return sums.whole(), found.losses, norms


def replayed(its, batch):
    "The same by a graph; nothing where there is none."
    sums = Sums(Layout(its.hooks.parameters))
    found = its.add(batch, sums)
    return None if found is None else (sums.whole(), *found)


def assert_alike(one, two):
    for a, b in zip([*one[0].values(), *one[1:]], [*two[0].values(), *two[1:]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("freeze_set", ["full", "biases"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_graph_gives_the_sums_losses_and_norms_of_the_ordinary_way(name, freeze_set):
    model, loss_fn, batch = zoo.build(name, rows=5)
    zoo.freeze(model.eval(), freeze_set)
    its = captured(model, loss_fn, batch)
    assert replayed(its, batch) is None                                       # the first of its shape
    assert_alike(replayed(its, batch), ordinary(its, batch))
    _, _, other = zoo.build(name, rows=5, seed=3)
    assert_alike(replayed(its, other), ordinary(its, other))
    with torch.no_grad():                                                     # as an optimizer does
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert_alike(replayed(its, other), ordinary(its, other))


def rows_of(batch, count):
    return {name: x[:count] for name, x in batch.items()} if isinstance(batch, dict) else tuple(x[:count] for x in batch)


def test_batches_of_other_sizes_share_a_graph_and_no_filling_row_is_counted():
    model, loss_fn, batch = zoo.build("bert", rows=16)
    its = captured(model.eval(), loss_fn, batch)
    replayed(its, batch)
    for count in (16, 15):
        few = rows_of(batch, count)
        assert_alike(replayed(its, few), ordinary(its, few))
    assert replayed(its, rows_of(batch, 13)) is None                          # filled to 14, as for the first time
    for count in (14, 13):
        few = rows_of(batch, count)
        assert_alike(replayed(its, few), ordinary(its, few))
    assert len(its.known) == 2


class Small(nn.Module):
    "A model that does something else as well."

    def __init__(self, also=lambda hidden: hidden):
        super().__init__()
        self.first, self.second, self.also = nn.Linear(3, 8), nn.Linear(8, 2), also

    def forward(self, x):
        return self.second(self.also(torch.tanh(self.first(x))))


def small_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def small_batch(rows=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=draw), torch.randint(0, 2, (rows,), generator=draw)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_is_left_to_the_ordinary_way(value):
    its = captured(Small(), small_loss, small_batch())
    inputs, labels = small_batch()
    assert [replayed(its, (inputs, labels)) is None for _ in range(2)] == [True, False]
    inputs[2] = value
    sums = Sums(Layout(its.hooks.parameters))
    assert its.add((inputs, labels), sums) is None and not sums.packs
    assert all(torch.isfinite(each).all() for each in ordinary(its, (inputs, labels))[0].values())


def test_a_norm_in_doubt_is_left_to_the_ordinary_way():
    "Two tokens that nearly cancel; so is every batch that has one, wherever it lies."
    def loss(model, batch):
        return (model(batch[0]) * batch[1]).sum((1, 2))
    torch.manual_seed(0)
    layer, inputs, weights = nn.Linear(300, 200), torch.randn(3, 2, 300), torch.randn(3, 2, 200)
    its = captured(layer, loss, (inputs, weights))
    assert [replayed(its, (inputs, weights)) is None for _ in range(2)] == [True, False]
    inputs[1, 1], weights[1, 1] = inputs[1, 0], -weights[1, 0] * (1 + 1e-7)
    assert replayed(its, (inputs, weights)) is None


def only_positive(hidden):
    rows = (hidden[:, 0] > 0).nonzero()[:, 0]
    return hidden.index_add(0, rows, hidden[rows]) if len(rows) else hidden


READING = {
    "numpy": lambda hidden: hidden * torch.tensor(hidden.detach().numpy().sum(1, keepdims=True)),
    "array": lambda hidden: hidden * float(np.asarray(hidden).max()),
    "tolist": lambda hidden: hidden * len(set(hidden.detach().sign().sum(1).tolist())),
    "bool": lambda hidden: hidden if hidden.abs().max() < 5 else hidden / 2,
    "nonzero": only_positive,
    "mask": lambda hidden: hidden.masked_select(hidden < 9).view_as(hidden)}


@pytest.mark.parametrize("kind", READING)
def test_a_model_whose_python_reads_numbers_is_taken_as_usual(kind):
    also = READING[kind]
    its = captured(Small(lambda hidden: also(hidden.detach()) * 0 + also(hidden.detach()) + hidden), small_loss, small_batch())
    replayed(its, small_batch())
    with pytest.warns(UserWarning, match="could not be captured"):
        assert replayed(its, small_batch()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replayed(its, small_batch(seed=1)) is None                     # it is said once


def test_a_replay_that_fails_is_taken_as_usual(monkeypatch):
    its = captured(Small(), small_loss, small_batch())
    for _ in range(2):
        replayed(its, small_batch())
    def fails(*_):
        raise RuntimeError("shape mismatch\nand more")
    its.known = dict.fromkeys(its.known, fails)
    sums = Sums(Layout(its.hooks.parameters))
    with pytest.warns(UserWarning, match="shape mismatch$"):
        assert its.add(small_batch(), sums) is None and not sums.packs
    assert replayed(its, small_batch()) is None


class ByPlace(nn.Module):
    "Divides each row by a number of its place, as a dropout of its own would."

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(14, 1))

    def forward(self, hidden):
        return hidden / self.table[:len(hidden)]


def test_a_filling_row_that_is_not_finite_reaches_no_sum():
    "A copy of the first row may be dropped to nothing where the first row isn't, and 0 times NaN is NaN."
    its = captured(Small(ByPlace()), small_loss, small_batch(14))
    assert [replayed(its, small_batch(14)) is None for _ in range(2)] == [True, False]
    assert_alike(replayed(its, small_batch(13)), ordinary(its, small_batch(13)))
    its.model.also.table[13] = 0.0
    assert replayed(its, small_batch(13)) is None


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        nn.init.zeros_(self.head.weight)

    def block(self, x):
        return torch.tanh(self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)))

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_dropout_that_is_recomputed_is_not_captured_even_below_a_head_of_zeros():
    its = captured(Checkpointed(), small_loss, small_batch(16))
    replayed(its, small_batch(16))
    with pytest.warns(UserWarning, match="other sums"):
        assert replayed(its, small_batch(16)) is None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.register_buffer("table", torch.ones(8))

    def forward(self, hidden):
        return hidden * self.factor * self.table


@pytest.mark.parametrize("change", [lambda layer: setattr(layer, "factor", 3.0), lambda layer: layer.table.mul_(3.0),
                                    lambda layer: setattr(layer, "table", torch.full((8,), 3.0))], ids=["number", "in place", "buffer"])
def test_what_a_module_holds_may_change(change):
    its = captured(Small(Scaled()), small_loss, small_batch())
    for _ in range(2):
        before = replayed(its, small_batch())
    change(its.model.also)
    after = [found for _ in range(2) if (found := replayed(its, small_batch())) is not None]
    assert after and (after[-1][1] != before[1]).all()
    assert_alike(after[-1], ordinary(its, small_batch()))


def test_a_batch_of_more_than_tensors_is_taken_as_usual():
    inputs, labels = small_batch()
    loss = lambda model, batch: small_loss(model, (batch["x"], batch["rest"][0]))  # noqa: E731
    its = captured(Small(), loss, {"x": inputs, "rest": (labels,)})
    assert [replayed(its, {"x": inputs, "rest": (labels,)}) for _ in range(3)] == [None] * 3 and not its.before


def test_several_blocks_are_captured():
    its = captured(Small(), small_loss, small_batch())
    first, second = ([*layer.parameters()] for layer in (its.model.first, its.model.second))
    its.blocks = [Block(first, clip=0.1), Block(second, clip=0.2)]
    replayed(its, small_batch())
    assert_alike(replayed(its, small_batch()), ordinary(its, small_batch()))


def test_a_shape_that_is_always_in_doubt_is_given_up():
    def loss(model, batch):
        return (model(batch[0]) * batch[1]).sum((1, 2))
    torch.manual_seed(0)
    inputs, weights = torch.randn(3, 2, 300), torch.randn(3, 2, 200)
    its = captured(nn.Linear(300, 200), loss, (inputs, weights))
    for _ in range(2):
        replayed(its, (inputs, weights))
    inputs[1, 1], weights[1, 1] = inputs[1, 0], -weights[1, 0] * (1 + 1e-7)
    assert [replayed(its, (inputs, weights)) for _ in range(2)] == [None, None] and any(its.known.values())
    with pytest.warns(UserWarning, match="in doubt, or zero"):
        replayed(its, (inputs, weights))
    assert not any(its.known.values())


def test_another_mode_is_another_graph():
    model = Small(nn.Dropout(0.5))
    its = captured(model, small_loss, small_batch())
    for _ in range(2):
        replayed(its, small_batch())
    torch.manual_seed(5)
    dropped = replayed(its, small_batch())
    torch.manual_seed(5)
    assert_alike(dropped, ordinary(its, small_batch()))
    model.eval()
    assert replayed(its, small_batch()) is None
    assert_alike(replayed(its, small_batch()), ordinary(its, small_batch()))


def test_gradients_one_example_at_a_time_are_never_captured():
    its = captured(Small(), small_loss, small_batch())
    its.hooks.ways.slow[its.model.first.weight] = per_example_gradients
    assert [replayed(its, small_batch()) for _ in range(3)] == [None] * 3 and not its.known


DATA = TensorDataset(*small_batch(64, seed=2))


def after(method, steps=6, model=None, **settings):
    "The weights after a run, and its engine."
    torch.manual_seed(0)
    engine = dpft.Engine(model or Small(nn.Dropout(0.0)), small_loss, method, DATA, noise_multiplier=1.0, delta=1e-3, accountant="rdp",
                         batch_size=24, steps=steps, seed=1, **settings)
    optimizer = torch.optim.SGD(engine.parameters(), 0.5)
    graphs = []
    for step in engine:
        step.take(optimizer)
        graphs.append(sum(graph is not None for graph in engine.graphs.known.values()) if engine.graphs else 0)
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()]), engine, graphs


@pytest.mark.parametrize("settings", [{}, {"secure_mode": True}, {"clipping": "automatic"}, {"precision": "bf16"},
                                      {"physical_batch_size": 8}],
                         ids=lambda settings: next(iter(settings), "plain"))
def test_a_run_by_graphs_is_the_run_without_them(settings):
    own, engine, graphs = after(dpft.Full(), steps=12, capture=True, **settings)
    usual, plain, _ = after(dpft.Full(), steps=12, **settings)
    assert graphs[-1] > 0 and plain.graphs is None
    torch.testing.assert_close(own, usual, rtol=1e-4, atol=1e-5)
    assert engine.plan.epsilon() == plain.plan.epsilon()


class TieLater(dpft.Method):
    "A frozen head becomes the table that trains, while no module and no choice changes."

    def start(self, context):
        context.train_only([context.model.table.weight])

    def step(self, context, t):
        if t == 2:
            context.model.head.weight = context.model.table.weight


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)

    def forward(self, words):
        return self.head(torch.tanh(self.table(words)))


def test_hooks_are_set_again_where_a_step_ties_parameters():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[0], reduction="none").sum(1)
    torch.manual_seed(0)
    words = TensorDataset(torch.randint(0, 9, (32, 5)))
    engine = dpft.Engine(Tied(), loss, TieLater(), words, noise_multiplier=1e-6, delta=1e-3, accountant="rdp", batch_size=8, steps=4,
                         seed=1)
    for step in engine:
        wanted = 0.0
        for batch in step:
            wanted = wanted + clipped_sum(engine.model, loss, batch, engine.plan.clip)["table.weight"]
            step.add(batch)
        step.privatize()
        torch.testing.assert_close(engine.model.table.weight.grad, wanted / 8, rtol=1e-3, atol=1e-4)
        step.done()


def test_beside_a_cache_of_features_capture_says_that_it_does_nothing():
    with pytest.warns(UserWarning, match="choose cache=0"):
        dpft.Engine(Small(), small_loss, dpft.LastLayer(), DATA, noise_multiplier=1.0, delta=1e-3, accountant="rdp", batch_size=8, steps=2,
                    cache=1.0, capture=True)


def test_what_trains_may_change_on_the_way():
    method = lambda: dpft.Then(dpft.Full(), None, dpft.BiTFiT(), steps=12)  # noqa: E731
    own, _, graphs = after(method(), steps=26, capture=True)
    usual, *_ = after(method(), steps=26)
    assert graphs[11] > 0 and graphs[-1] > 0
    torch.testing.assert_close(own, usual, rtol=1e-4, atol=1e-5)


def test_a_persons_rows_and_zeroth_order_steps_are_taken_as_usual():
    people = dpft.fine_tune(Small(), copy.deepcopy(DATA), dpft.Full(), noise_multiplier=1.0, delta=1e-3, accountant="rdp", batch_size=8,
                            steps=4, unit=[f"p{row // 2}" for row in range(64)], loss_fn=small_loss, capture=True, progress=False, seed=0)
    assert people.epsilon > 0
    _, engine, _ = after(dpft.ZerothOrder(), steps=3, capture=True)
    assert engine.graphs is None


def test_public_rows_teach_a_run_of_single_rows_the_fast_way():
    "A check of one public row compared no gradients, so each step took one example at a time, and nothing was captured."
    torch.manual_seed(0)
    rows = TensorDataset(*small_batch(1, seed=2))
    engine = dpft.Engine(Small(), small_loss, dpft.Full(), rows, noise_multiplier=1.0, delta=1e-3, accountant="rdp", batch_size=1, steps=5,
                         seed=1, check=dpft.Public(TensorDataset(*small_batch(2)), "random numbers"), capture=True)
    for step in engine:
        step.take(torch.optim.SGD(engine.parameters(), 0.5))
    assert engine.hooks.ways.sure and not engine.hooks.ways.slow and any(engine.graphs.known.values())
