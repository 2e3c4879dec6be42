"""Whatever changes a sum changes its noise: what the identity of a seeded run cannot read, other noise for the same sums."""

import torch
from torch import nn

import dpft
from dpft.gradients import Block
from dpft.settings import Settings

ROWS = torch.randn(64, 30, generator=torch.Generator().manual_seed(5))
CLASSES = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(6))


def each_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def first_release(data=None, method=None, **settings):
    "The first noisy sum of the weights, without its noise, and that noise's deviation."
    torch.manual_seed(0)
    model = nn.Linear(30, 5)
    torch.seed()                                                                  # as any program's generator: somewhere else in each run
    own = {"epsilon": 2.0, "steps": 2, "batch_size": 32, "clip": 1.0, "accountant": "rdp"}
    if "settings" not in settings:
        settings = {**own, "seed": 1, "loop": "one look", **settings}
    engine = dpft.Engine(model, each_loss, method or dpft.Full(), data or torch.utils.data.TensorDataset(ROWS, CLASSES), **settings)
    step = next(iter(engine.remaining()))
    for batch in step:
        step.add(batch)
    true = step.sums["weight"].clone()
    step.privatize()
    return engine, model.weight.grad * 32, true, float(torch.as_tensor(engine.spread[id(model.weight)]).max())


def left(one, other):
    "How much noise is left in the difference of two releases."
    return float(((one[1] - other[1]) - (one[2] - other[2])).abs().max())


class Scaled(torch.utils.data.Dataset):
    "Items that code of one's own makes; the rows that it holds are the same."
    def __init__(self, gain):
        self.gain, self.column_names = gain, ["x"]

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, row):
        return self.gain * ROWS[row], CLASSES[row]

    def content(self):
        return ["rows", ROWS, CLASSES]


class Masked(dpft.Method):
    "A method that reads what it trains from elsewhere, and keeps it in no argument."
    kept = None

    def __init__(self):
        self.mask = Masked.kept.clone()

    def start(self, context):
        context.train_only([context.model.weight])

    def blocks(self, context):
        return [Block([context.model.weight], [self.mask])]


class Drawn(dpft.Method):
    "A method that draws what it trains from torch's generator."
    def start(self, context):
        context.train_only([context.model.weight])
        self.mask = torch.rand_like(context.model.weight) < 0.5

    def blocks(self, context):
        return [Block([context.model.weight], [self.mask])]


def test_code_of_a_data_set_keeps_the_noise_of_two_sums_apart():
    one, other = first_release(Scaled(1.0)), first_release(Scaled(0.5))
    assert left(one, other) > 0.5 and not one[0].store.portable


def test_a_mixed_precision_around_the_call_keeps_it_apart():
    one = first_release()
    with torch.autocast("cpu", torch.bfloat16):
        other = first_release()
    assert one[0].store.portable and not other[0].store.portable and left(one, other) > 0.5


def test_what_a_method_holds_besides_its_arguments_keeps_it_apart():
    found = []
    for seed in (0, 1):
        Masked.kept = torch.rand(5, 30, generator=torch.Generator().manual_seed(seed)) < 0.5
        found.append(first_release(method=Masked()))
    assert left(*found) > 0.5 and not found[0][0].store.portable


def test_a_method_draws_from_the_generator_of_its_run():
    one, other = first_release(method=Drawn()), first_release(method=Drawn())
    assert torch.equal(one[0].method.mask, other[0].method.mask) and torch.equal(one[1], other[1])


def test_a_loop_of_ones_own_is_none_of_fine_tunes_whichever_way_its_knobs_come():
    knobs = Settings(epsilon=2.0, steps=2, batch_size=32, clip=1.0, accountant="rdp", seed=1)
    assert not first_release(settings=knobs)[0].store.portable and not first_release(loop=None)[0].store.portable
    assert first_release(loop="one look")[0].store.portable


def test_the_same_sums_under_other_noise_are_another_release(tmp_path):
    "Two equal draws at two scales would give the sum away."
    class Split(dpft.Method):
        share = iter((0.6, 1.4))

        def start(self, context):
            context.train_only(context.model.parameters())
            self.ratio = next(Split.share)

        def blocks(self, context):
            return [Block([context.model.weight], noise=self.ratio), Block([context.model.bias], noise=1.0)]
    one = first_release(method=Split(), checkpoint=tmp_path, seed=None)
    one[0].store.close()
    other = first_release(method=Split(), checkpoint=tmp_path, seed=None)
    assert torch.equal(one[2], other[2]) and one[3] != other[3]
    alike = (one[1] - one[2]) / one[3] - (other[1] - other[2]) / other[3]
    (spent,) = other[0].ledger.spent(other[0].store.run)                                          # both sums of the draw
    assert alike.abs().max() > 0.5 and spent.noise_multiplier < 0.8 * one[0].plan.mechanisms[0].noise_multiplier
