"""Chains and phases: what trains is the fold, what is released is the parts', sums stay exact, and a broken run goes on."""

import copy

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import one_stream
from torch import nn
from zoo import toy

import dpft
from dpft.baselines import Full, LargestWeights, LastLayer, LoRA, NormOnly, RandomPartitions
from dpft.book.audits import Stopped, stopping
from dpft.composition import Chain, Then
from dpft.engine import Engine
from dpft.freezing import LayerFreeze
from dpft.frost import DPFrost, EntrySelection
from dpft.gradients import gradients, per_example_gradients
from dpft.ledger import Ledger
from dpft.loop import fine_tune
from dpft.method import Context, Method
from dpft.models import load_model
from dpft.privacy import Request


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(),
                         nn.Linear(5, 3))


BODY = [name for name, _ in net().named_parameters() if not name.startswith("8.")]
HEAD = {"8.weight", "8.bias"}
SETTINGS = dict(epsilon=3.0, batch_size=20, steps=4, clip=0.5, seed=0, accountant="rdp", delta=1e-3)


class Adds(Method):
    """Lets these train besides."""

    def __init__(self, *names):
        self.names = names

    def adapt(self, context):
        return [context.model.get_parameter(name) for name in self.names]


class Keeps(Method):
    """Lets only these train on; more of them may go at their steps."""

    def __init__(self, *names, **later):
        self.names, self.later = names, later

    def choose(self, context, among):
        return [p for name, p in context.model.named_parameters() if name in self.names and any(p is other for other in among)]

    def step(self, context, t):
        context.freeze([context.model.get_parameter(name) for name in self.later.get(f"t{t}", ())])


class Still(Keeps):
    """As Keeps, but never at a later step."""

    step = Method.step


class Turns(Keeps):
    """Keeps the first names, and from step 2 on the others."""

    unfreezes = True

    def __init__(self, first, second):
        super().__init__(*first)
        self.first, self.second = first, second

    def step(self, context, t):
        if t == 2:
            context.train_only([*(context.model.get_parameter(name) for name in self.second), *context.head])


class Asks(Adds):
    """Also counts the examples, twice, and remembers what it was told."""

    def requests(self, context):
        return [Request(0.5, 2, 0.1, "count")]

    def adapt(self, context):
        self._told = []
        for _ in range(2):
            rows = sum((len(batch[1]) for batch in context.draw(0.5)), 0)
            self._told.append(context.release(torch.tensor([rows], dtype=torch.float64), 1.0).item())
        self._sigma = context.noise_multiplier()
        return super().adapt(context)


def engine(method, model=None, **changes):
    return Engine(model or net(), zoo.image_loss, method, toy(), **SETTINGS | changes)


def walk(e, rate=0.1):
    """All steps with plain SGD over all parameters: what trained and what moved in each."""
    optimizer, trained, moved = torch.optim.SGD(e.model.parameters(), rate), [], []
    for step in e:
        before = {name: p.detach().clone() for name, p in e.model.named_parameters()}
        step.take(optimizer)
        trained.append(set(e.trains))
        moved.append({name for name, p in e.model.named_parameters() if not torch.equal(p, before[name])})
    return trained, moved


def begun(method, model=None):
    """What trains after the start, without any data."""
    model = model or net()
    method.start(Context(model, zoo.image_loss, 1, 4, 10))
    return {name for name, p in model.named_parameters() if p.requires_grad}


def tune(method, model=None, **changes):
    return fine_tune(model or net(), toy(), method, **{"loss_fn": zoo.image_loss, "progress": False, **SETTINGS, **changes})


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# the fold --------------------------------------------------------------------------------------------------------------------------

some = st.sets(st.sampled_from(BODY), min_size=1)
parts = st.lists(st.tuples(st.booleans(), some), min_size=1, max_size=5)


def folded(sets):
    trains = set(sets[0][1])
    for adds, names in sets[1:]:
        trains = trains | names if adds else trains & names
    return trains


@given(parts)
@settings(max_examples=30)
def test_a_chain_trains_what_the_fold_says(sets):
    made = [(Adds if adds else Still)(*sorted(names)) for adds, names in sets]
    empty = [i for i in range(1, len(sets)) if not sets[i][0] and not folded(sets[:i])]
    if empty:
        with pytest.raises(ValueError, match="nothing to choose"):
            begun(Chain(*made))
        return
    assert begun(Chain(*made)) == folded(sets) | HEAD
    if len(made) > 2:
        assert begun(Chain(Chain(*made[:2]), *made[2:])) == begun(Chain(made[0], Chain(*made[1:]))) == folded(sets) | HEAD


@given(parts, st.integers(0, 3), some)
@settings(max_examples=10)
def test_the_sums_of_a_chain_are_the_clipped_sums_of_the_oracle(sets, at, later):
    sets = [(True, sets[0][1]), *[(adds, names) for adds, names in sets[1:] if adds]]            # something is left at each place
    chain = Chain(*(Adds(*sorted(names)) for _, names in sets), Keeps(*BODY, **{f"t{at}": tuple(later)}))
    rows = [(x.double(), y) for x, y in toy()]
    e = Engine(net().double(), zoo.image_loss, chain, rows, **SETTINGS | dict(epsilon=None, noise_multiplier=1.0))
    batch = (torch.randn(7, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3, torch.arange(7) % 3)
    for t in range(4):
        chain.step(e.context, t)
        e.refresh()
        wanted = (folded(sets) | HEAD) - (later if t >= at else set())
        assert set(e.trains) == wanted
        found = gradients(e.model, e.loss_fn, batch).clipped_sum(e.blocks, "flat")[0]
        each = per_example_gradients(e.model, zoo.image_loss, batch)
        norms = torch.stack([each[name].flatten(1).square().sum(1) for name in wanted]).sum(0).sqrt()
        for name in wanted:
            factors = (0.5 / norms).clamp(max=1).view(-1, *[1] * (each[name].ndim - 1))
            assert torch.allclose(found[name], (each[name] * factors).sum(0), rtol=1e-9, atol=1e-12)


def test_order_matters_and_can_be_read():
    bias = begun(dpft.BiTFiT())
    half = begun(RandomPartitions(0.5, seed=1))
    assert begun(Chain(RandomPartitions(0.5, seed=1), dpft.BiTFiT())) == half | bias
    assert HEAD < begun(Chain(dpft.BiTFiT(), RandomPartitions(0.5, seed=1))) < bias
    assert begun(Chain(Full(), dpft.BiTFiT())) == begun(Full())
    assert begun(Chain(LastLayer(), dpft.BiTFiT())) == bias


def test_what_a_later_selector_froze_no_earlier_part_lets_train_again():
    low, high = ("1.weight", "1.bias"), ("4.weight", "4.bias")
    turns = Turns(("1.bias", "6.weight"), (*low, *high))
    trained, moved = walk(engine(Chain(turns, Keeps(*BODY, t1=low))))
    assert trained == moved == [{"1.bias", "6.weight"} | HEAD, {"6.weight"} | HEAD, {*high} | HEAD, {*high} | HEAD]


def test_what_an_adder_added_a_selector_before_it_never_takes_away():
    chain = Chain(Keeps("1.weight", "4.weight", t1=("4.weight",)), Adds("4.weight"), Keeps(*BODY, t2=("1.weight",)))
    trained, _ = walk(engine(chain))
    assert trained == [{"1.weight", "4.weight"} | HEAD] * 2 + [{"4.weight"} | HEAD] * 2


def test_layers_freeze_over_what_was_added():
    trained, moved = walk(engine(Chain(dpft.BiTFiT(), LayerFreeze(2, 2))))
    bias = begun(dpft.BiTFiT())
    frozen = bias - trained[-1]
    assert trained[:2] == [bias, bias] and trained[2] == trained[3] == moved[3] and "1.bias" in frozen and trained[3] > HEAD


# single entries --------------------------------------------------------------------------------------------------------------------

def entries_that_moved(method, **changes):
    before, model = net(), net()
    walk(engine(method, model, **changes))
    return {name: p != before.get_parameter(name) for name, p in model.named_parameters()}


def test_masks_hold_but_for_what_is_added_later():
    alone = entries_that_moved(LargestWeights(0.3))
    chained = entries_that_moved(Chain(LargestWeights(0.3), Adds("1.bias", "4.weight")))
    for name in BODY:
        expected = torch.ones_like(alone[name]) if name in ("1.bias", "4.weight") else alone[name]
        assert torch.equal(chained[name], expected), name
    upper = entries_that_moved(Chain(LargestWeights(0.3), Still("4.weight", "6.weight")))
    assert all(torch.equal(upper[n], alone[n] if n in ("4.weight", "6.weight") else torch.zeros_like(alone[n])) for n in BODY)


def test_a_ratio_of_entries_is_one_of_what_was_offered():
    for method in (LargestWeights(0.25), EntrySelection(0.25, 0.5)):
        moved = entries_that_moved(Chain(Adds("1.weight", "4.weight"), method), epsilon=float("inf"))
        assert sum(int(mask.sum()) for name, mask in moved.items() if name in BODY) == (8 * 16 + 6 * 8) // 4
        assert not moved["6.weight"].any()


# requests --------------------------------------------------------------------------------------------------------------------------

def test_equal_parts_each_find_their_own_draws_and_noise():
    first, second = Asks("1.bias"), Asks("4.bias")
    e = engine(Chain(first, second), delta=1e-2)
    walk(e)
    assert [(m.name, m.steps) for m in e.spent] == [("train", 4), ("count", 2), ("count 2", 2)]
    assert len({*first._told, *second._told}) == 4
    sigmas = [m.noise_multiplier for m in e.plan.mechanisms]
    assert [first._sigma, second._sigma] == sigmas[1:] and first._sigma != second._sigma
    assert e.guarantee.epsilon() <= 3.0
    with pytest.raises(ValueError, match="is left"):
        e.context.part(0, 1).draw(0.5)


def test_two_selections_by_the_same_settings_cost_two_and_nest():
    first, second = (DPFrost(0.6, rounds=2, sample_rate=0.5) for _ in range(2))
    run = tune(Chain(first, second))
    assert [(m.name, m.steps) for m in run.mechanisms] == [("train", 4), ("select", 2), ("select 2", 2)] and run.epsilon <= 3.0
    chosen = {id(p) for part in first.selection.chosen for p in part.parameters}
    offered = {id(p) for part in second.selection.partitions for p in part.parameters}
    assert offered == chosen and second.selection.size < first.selection.size


@pytest.mark.parametrize("method,names", [
    (Chain(Asks("1.bias"), Asks("4.bias")), ["count", "count 2"]),
    (Then(Asks("1.bias"), None, Asks("4.bias"), steps=2), ["count", "count 2"]),
    (Then(Chain(Asks("1.bias"), dpft.BiTFiT()), None, Chain(Full(), Asks("4.bias")), steps=1), ["count", "count 2"]),
    (Chain(dpft.BiTFiT(), NormOnly()), []), (Then(Full(), 1, dpft.BiTFiT()), [])])
def test_the_ledger_holds_the_parts_mechanisms_and_one_training(method, names):
    e = engine(method)
    walk(e)
    assert [(m.name, m.steps) for m in e.spent] == [("train", 4), *((name, 2) for name in names)] == [
        (m.name, m.steps) for m in e.plan.mechanisms]
    assert e.guarantee.epsilon() <= 3.0


# phases ----------------------------------------------------------------------------------------------------------------------------

class Clock(Adds):
    """Writes down the steps that it is told of."""

    def start(self, context):
        self._seen = [("start", context.steps)]
        super().start(context)

    def step(self, context, t):
        self._seen.append((t, context.steps))


def test_a_phase_has_its_own_clock():
    first, second, third = Clock("1.bias"), Clock("4.bias"), Clock("6.bias")
    trained, _ = walk(engine(Then(first, None, Then(second, None, third, steps=2), steps=3), steps=7))
    assert first._seen == [("start", 3), (0, 3), (1, 3), (2, 3)]
    assert second._seen == [("start", 2), (0, 2), (1, 2)] and third._seen == [("start", 2), (0, 2), (1, 2)]
    assert trained == [{"1.bias"} | HEAD] * 3 + [{"4.bias"} | HEAD] * 2 + [{"6.bias"} | HEAD] * 2


def test_the_end_in_a_phase_is_the_phases_end():
    trained, _ = walk(engine(Then(LayerFreeze(2), None, Full(), steps=22), steps=25))
    assert trained[1] == trained[22] == begun(Full()) and trained[2] == trained[21] < trained[0]


@one_stream()
def test_full_after_full_is_full_but_for_the_moments():
    whole = tune(Full(), optimizer="sgd", learning_rate=0.1)
    assert torch.equal(weights(tune(Then(Full(), 1 / 3, Full()), optimizer="sgd", learning_rate=0.1).model), weights(whole.model))
    adam = tune(Then(Full(), 1 / 3, Full()), optimizer="adam", learning_rate=0.1)
    assert not torch.equal(weights(adam.model), weights(tune(Full(), optimizer="adam", learning_rate=0.1).model))


def test_the_second_phase_has_its_own_learning_rate():
    run = tune(Then(Full(), None, Then(dpft.BiTFiT(), None, LastLayer(), steps=1, rate=3.0), steps=2, rate=5.0), learning_rate=0.01)
    assert [entry["learning_rate"] for entry in run.history] == pytest.approx([0.01, 0.01, 0.05, 0.15])
    linear = tune(Then(Full(), None, dpft.BiTFiT(), steps=2, rate=4.0), learning_rate=0.01, schedule="linear")
    assert [entry["learning_rate"] for entry in linear.history] == pytest.approx([0.01, 0.0075, 0.02, 0.01])


def test_the_second_phase_asks_of_the_model_as_it_then_is():
    class Seeing(Asks):
        def adapt(self, context):
            self._weights = weights(context.model)
            return super().adapt(context)

    second, start = Seeing("4.bias"), net()
    tune(Then(Full(), None, second, steps=2), copy.deepcopy(start), learning_rate=0.1)
    assert not torch.equal(second._weights, weights(start))


def vit(seed=0):
    torch.manual_seed(seed)
    return load_model("vit-small", 3, "image", (1, 4, 4))


def test_an_optimizer_that_misses_the_second_phase_is_noticed():
    e = engine(Then(LastLayer(), 1 / 3, Full()))
    optimizer = torch.optim.SGD(e.parameters(), 0.1)
    with pytest.raises(ValueError, match="optimizer does not hold"):
        for step in e:
            step.take(optimizer)


# nothing is paid for what cannot begin ----------------------------------------------------------------------------------------------

SELECT = dict(rounds=1, sample_rate=0.5)
HOPELESS = {  # what cannot begin, after something that is paid for
    "a schedule beyond the run": (lambda: Chain(DPFrost(0.6, **SELECT), LayerFreeze(1, 99)), "after=99 lies outside the run of 4 steps"),
    "the same once more": (lambda: Chain(LoRA(targets=("1", "4")), DPFrost(0.6, **SELECT), LoRA(targets="6")), "low-rank matrices"),
    "the second phase": (lambda: Then(Full(), None, LoRA(targets="query"), steps=2), "no linear layer of the name 'query'"),
    "the last of three phases": (lambda: Then(Full(), None, Then(Full(), None, LayerFreeze(1, 3), steps=1), steps=1), "after=3"),
    "under Rap-FT": (lambda: dpft.RapFT(HOPELESS["a schedule beyond the run"][0](), relevance_data="private", share=0.1), "after=99"),
}


@pytest.mark.parametrize("case", HOPELESS)
def test_what_cannot_begin_is_refused_before_anything_is_charged(case, tmp_path):
    method, message = HOPELESS[case]
    before = net()
    model = copy.deepcopy(before)
    with Ledger(tmp_path / "ledger") as ledger:
        with pytest.raises(ValueError, match=message):
            tune(method(), model, ledger=ledger)
        assert not ledger.runs() and not ledger.charged()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_a_rehearsal_leaves_nothing_behind():
    def go():
        torch.manual_seed(3)
        method, model = Chain(DPFrost(0.6, **SELECT), LoRA(targets=("1", "4"))), net()
        run = tune(method, model, seed=5)
        return run, method.parts[0].selection.numbers, torch.rand(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dpft.composition, "rehearse", lambda method, context: None)
        plain, chosen, after = go()
    run, again, later = go()
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), plain.model.parameters(), strict=True))
    assert again == chosen and run.mechanisms == plain.mechanisms and torch.equal(after, later)


def test_what_wants_a_draw_or_numbers_is_taken_on_trust():
    class Reads(Method):
        def choose(self, context, among):
            return [p for p in among if p.square().sum().item() > 0]
    class Converts(Method):
        def choose(self, context, among):
            return [p for p in among if p.detach().numpy().any()]
    asks = Asks("1.weight", "4.weight")
    for method in (Chain(asks, Reads()), Chain(asks, LargestWeights(0.5)), Then(Full(), None, Converts(), steps=2)):
        assert tune(method).guarantee.private


def test_a_failure_that_has_nothing_to_do_with_numbers_comes_before_anything_is_charged():
    class Fails(Method):
        def adapt(self, context):
            raise TypeError("there is no layer 'x' in this model")
    with Ledger() as ledger:
        with pytest.raises(TypeError, match="there is no layer 'x'"):
            tune(Then(Full(), None, Chain(dpft.BiTFiT(), Fails()), steps=2), ledger=ledger)
        assert not ledger.runs() and not ledger.charged()


# going on ---------------------------------------------------------------------------------------------------------------------------

def broken(method, folder, at, model, every, **changes):
    with pytest.raises(Stopped):
        tune(method, model, checkpoint=folder, checkpoint_every=every, optimizer=stopping(at), **changes)


ONE = dict(rounds=1, sample_rate=0.2)
RESUMED = {  # method, the optimizer step at which the run breaks, steps between checkpoints
    "at the boundary": (lambda: Then(Full(), None, dpft.BiTFiT(), steps=2), 4, 2),
    "in the second phase": (lambda: Then(Full(), None, dpft.BiTFiT(), steps=2, rate=3.0), 4, 1),
    "after entries in the second": (lambda: Then(Full(), None, Chain(EntrySelection(0.3, 0.5), dpft.BiTFiT()), steps=1), 3, 2),
    "in a phase of a phase": (lambda: Then(Full(), None, Then(EntrySelection(0.5, 0.5), None, EntrySelection(0.3, 0.5), steps=1), steps=1),
                              4, 3),
    "in a chain that freezes": (lambda: Chain(DPFrost(0.8, **ONE), dpft.BiTFiT(), Keeps(*BODY, t1=("1.bias",), t3=("4.bias",))), 3, 2),
    "after a third selection": (lambda: Chain(Full(), DPFrost(0.6, reselect=3, **ONE), Keeps(*BODY, t1=("1.bias",))), 4, 3),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_broken_run_ends_where_an_unbroken_one_ends_and_pays_once(tmp_path, name):
    method, at, every = RESUMED[name]
    changes = dict(learning_rate=0.05, cache=0, average=0.9 if "phase" in name else None)        # a cache would change the rounding
    whole = tune(method(), optimizer=torch.optim.AdamW, **changes)
    broken(method(), tmp_path, at, net(), every, **changes)
    resumed = tune(method(), checkpoint=tmp_path, checkpoint_every=every, optimizer=torch.optim.AdamW, **changes)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.mechanisms == whole.mechanisms and resumed.trained == whole.trained
    with Ledger(f"{tmp_path}.ledger") as ledger:
        assert ledger.spent() == whole.mechanisms


def test_added_matrices_come_back_with_their_moments(tmp_path):
    def method():
        return Then(dpft.BiTFiT(), None, Chain(LoRA(rank=2), DPFrost(0.5, rounds=1)), steps=1)
    changes = dict(learning_rate=0.05, cache=0, loss_fn=None)
    whole = tune(method(), vit(), optimizer=torch.optim.AdamW, **changes)
    broken(method(), tmp_path, 4, vit(), 1, **changes)
    resumed = tune(method(), vit(), checkpoint=tmp_path, checkpoint_every=1, optimizer=torch.optim.AdamW, **changes)
    assert torch.equal(weights(resumed.model), weights(whole.model)) and resumed.trained == whole.trained


# what makes no sense ---------------------------------------------------------------------------------------------------------------

class OwnStart(Method):
    def start(self, context):
        context.train_only(context.head)


class OwnBlocks(OwnStart):
    def blocks(self, context):
        return [dpft.Block(context.head)]


twice = Adds("1.bias")
BAD = [
    (lambda: Chain(), "needs at least one"),
    (lambda: Chain(twice, twice), "there twice"), (lambda: Chain(dpft.BiTFiT(), Then(Full(), 1, dpft.BiTFiT())), r"Then\(Chain\("),
    (lambda: Chain(dpft.BiTFiT(), OwnBlocks()), r"OwnBlocks\(Chain\("), (lambda: Chain(OwnBlocks()), r"OwnBlocks\(Chain\("),
    (lambda: Chain(dpft.BiTFiT(), Full()), "Full says by itself"),
    (lambda: Chain(Full(), OwnStart()), "OwnStart says by itself"),
    (lambda: Chain(LargestWeights(0.5), EntrySelection(0.5)), "EntrySelection is the second method that chooses single entries"),
    (lambda: Chain(DPFrost(0.5, reselect=2), RandomPartitions(0.5)), "put RandomPartitions first"),
    (lambda: begun(Chain(LastLayer(), RandomPartitions(0.5))), "only the head trains before RandomPartitions"),
    (lambda: Then(Full(), None, dpft.BiTFiT()), "either epochs or steps"),
    (lambda: Then(Full(), 1, dpft.BiTFiT(), steps=3), "either epochs or steps"),
    (lambda: Then(Full(), None, dpft.Trainable(), steps=1), "can only be the first phase"),
    (lambda: tune(Then(Full(), 9, dpft.BiTFiT())), "9 epochs are 27 steps, and the run has 4"),
]


@pytest.mark.parametrize("make,told", BAD)
def test_what_makes_no_sense_is_refused_in_one_sentence(make, told):
    with pytest.raises(ValueError, match=told) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_composition_is_described_by_its_parts():
    assert repr(Chain(Full(), Chain(dpft.BiTFiT(), NormOnly()))) == f"Chain({Full()!r}, {dpft.BiTFiT()!r}, {NormOnly()!r})"
    assert repr(Then(Full(), 1, dpft.BiTFiT())) == f"Then(first={Full()!r}, epochs=1, second={dpft.BiTFiT()!r}, steps=None, rate=1.0)"
