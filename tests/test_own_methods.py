"""Three methods written from the chapter on methods alone, one file each: they train, pay, are audited, resumed and chained."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import dpft
from dpft.auditing import audit
from dpft.book.audits import Stopped, resumed, stopping
from dpft.data import TensorData
from dpft.ledger import Ledger

HERE = Path(__file__).parent / "own_methods"
SIZE, BATCH = 60, 20
ROUNDING = 1e-3   # of a sum of 60 terms of at most 0.5 in float32: 60 roundings of at most 30 * 2**-24


def method(file, name):
    spec = importlib.util.spec_from_file_location(f"own_{file}", HERE / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


PublicGradients = method("public_gradients", "PublicGradients")
ByTurns = method("by_turns", "ByTurns")
PrivateNorms = method("private_norms", "PrivateNorms")


def data(size=SIZE):
    generator = torch.Generator().manual_seed(0)
    return TensorData(torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))


def tune(method, model=None, train=None, **changes):
    settings = dict(epsilon=8.0, batch_size=BATCH, steps=6, learning_rate=0.05, accountant="rdp", seed=3, progress=False, cache=0)
    return dpft.fine_tune(model or net(), train or data(), method, **settings | changes)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# the layers of largest public gradient ------------------------------------------------------------------------------------------------

def test_the_layers_of_largest_public_gradient_train_and_the_public_data_is_named():
    model = net()
    public = dpft.load_data("digits").public
    images, labels = public.batch(range(len(public)))
    nn.functional.cross_entropy(model(images), labels, reduction="sum").backward()
    norms = {number: sum(p.grad.square().sum() for p in model[number].parameters()) for number in (1, 3)}
    run = tune(PublicGradients(1), seed=None)
    largest = max(norms, key=norms.get)
    assert max(norms.values()) > 1.01 * min(norms.values())          # no tie that rounding could turn
    assert set(run.trained) == {f"{number}.{kind}" for number in (largest, 5) for kind in ("weight", "bias")}
    assert public.source in run.report() and [m.name for m in run.mechanisms] == ["train"]


def test_it_is_known_to_the_command_by_its_file(run):
    status, out, err = run("train", "--data", "digits", "--model", "mlp", "--limit", "200", "--steps", "2", "--no-progress",
                           "--accountant", "rdp", "--epsilon", "8", "--method", f"{HERE / 'public_gradients.py'}:PublicGradients",
                           "--option", "k=1")
    assert status == 0 and "PublicGradients(k=1, data='digits')" in out, err


# another layer each epoch -------------------------------------------------------------------------------------------------------------

def test_another_layer_trains_each_epoch():
    seen = []

    class Watched(ByTurns):
        def step(self, context, t):
            super().step(context, t)
            seen.append([name for name, p in context.model.named_parameters() if p.requires_grad and name[0] != "5"])
    run = tune(Watched())
    epoch = [["1.weight", "1.bias"]] * (SIZE // BATCH), [["3.weight", "3.bias"]] * (SIZE // BATCH)
    assert seen[1:] == epoch[0] + epoch[1]                            # the first is the start
    assert set(run.trained) == {f"{number}.{kind}" for number in (1, 3, 5) for kind in ("weight", "bias")}


@pytest.mark.parametrize("own", [ByTurns, lambda: PrivateNorms(1), lambda: dpft.Chain(dpft.Full(), PrivateNorms(1)),
                                 lambda: dpft.Chain(PrivateNorms(2), dpft.BiTFiT())])
@pytest.mark.parametrize("at", [1, 4])
def test_a_broken_run_ends_where_an_unbroken_one_ends_and_pays_once(tmp_path, own, at):
    whole = tune(own(), optimizer=torch.optim.AdamW)
    with pytest.raises(Stopped):
        tune(own(), checkpoint=tmp_path, checkpoint_every=1, optimizer=stopping(at))
    resumed = tune(own(), checkpoint=tmp_path, checkpoint_every=1, optimizer=torch.optim.AdamW)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.mechanisms == whole.mechanisms and resumed.trained == whole.trained
    with Ledger(f"{tmp_path}.ledger") as ledger:
        assert ledger.spent() == whole.mechanisms


# a private mean that is paid for ------------------------------------------------------------------------------------------------------

def test_a_private_mean_is_charged():
    run = tune(PrivateNorms(1, sample_rate=0.3, share=0.2))
    spent = {m.name: m for m in run.mechanisms}
    assert (spent["norms"].sample_rate, spent["norms"].steps) == (0.3, 1) and spent["train"].steps == 6
    assert run.epsilon <= 8.0 and len(run.trained) == 4
    alone = dpft.epsilon([spent["train"]], run.delta, accountant="rdp")
    assert alone < run.epsilon                                        # the mean costs something
    assert "PrivateNorms(k=1, sample_rate=0.3, share=0.2, bound=1.0)" in run.report()


def sums(train, **changes):
    "What is released, without noise, of everybody."
    class Seen(PrivateNorms):
        def means(self, context, layers):
            self.found = super().means(context, layers) * context.size
            return self.found
    seen = Seen(1, sample_rate=1.0, bound=0.5)
    tune(seen, train=train, epsilon=float("inf"), steps=1, **changes)
    return seen.found


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_example_moves_the_mean_by_no_more_than_the_bound(scale):
    every = data()
    every = TensorData(every.images.clone(), every.labels)
    every.images[0] *= scale
    with_it, without = sums(every), sums(every.subset(range(1, SIZE)))
    assert (with_it - without).norm() <= 0.5 + ROUNDING


def test_one_person_moves_the_mean_by_no_more_than_the_bound():
    people = [0] * 30 + [1 + row // 2 for row in range(30)]
    with_her = sums(data(), unit=people, batch_size=10)
    without = sums(data().subset(range(30, SIZE)), unit=people[30:], batch_size=10)
    assert (with_her - without).norm() <= 0.5 + ROUNDING


def test_it_is_audited():
    "A p-value of an honest claim is below 1e-6 in at most one of a million runs."
    found = audit(PrivateNorms(1, sample_rate=1.0), 8.0, canaries=60, tune=resumed(3), accountant="rdp", cache=0.0)
    assert found.p_value() > 1e-6 and [m.name for m in found.mechanisms] == ["train", "norms"]


def test_it_selects_among_what_a_chain_lets_train():
    run = tune(dpft.Chain(dpft.BiTFiT(), PrivateNorms(1)))
    own = [name for name in run.trained if name[0] != "5"]
    assert len(own) == 1 and own[0] in ("1.bias", "3.bias")
    assert sorted(m.name for m in run.mechanisms) == ["norms", "train"]


def test_a_method_may_be_used_for_two_runs_and_pays_in_each():
    again = PrivateNorms(1)
    for run in (tune(again), tune(again, seed=4)):
        assert sorted(m.name for m in run.mechanisms) == ["norms", "train"]


class Chooses(dpft.Method):
    "Whatever a function of the model gives."
    def __init__(self, choice):
        self.choice = choice

    def choose(self, context, among):
        return self.choice(context.model)


@pytest.mark.parametrize("choice, said", [
    (lambda model: ["1.weight"], "'1.weight' is not a parameter of Sequential, so it cannot train"),
    (lambda model: net().parameters(), "Parameter is not a parameter of Sequential, so it cannot train"),
    (lambda model: [*model[1].parameters(), model[3]], "Linear is not a parameter of Sequential, so it cannot train")])
def test_what_is_no_parameter_of_the_model_is_not_chosen_in_silence(choice, said):
    with pytest.raises(ValueError, match=said):
        dpft.Engine(net(), None, Chooses(choice), data(), noise_multiplier=1.0, steps=1, batch_size=BATCH, accountant="rdp")
