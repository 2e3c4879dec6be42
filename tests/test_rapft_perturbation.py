"""Rap-FT: which entries are weak, what two blocks cost, where the mask comes from, and what a run then promises."""

import math

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpft.baselines import Adapter, Full, LargestWeights, LoRA
from dpft.bitfit import BiTFiT
from dpft.book.audits import Stopped, stopping
from dpft.clipping import effective_noise_multiplier
from dpft.composition import Chain, Then
from dpft.data import Public
from dpft.engine import Engine
from dpft.frost import DPFrost
from dpft.gradients import Block, gradients, per_example_gradients
from dpft.guarantee import Guarantee, verify
from dpft.ledger import Ledger
from dpft.loop import fine_tune
from dpft.method import Context, Method
from dpft.oracle import trainable
from dpft.plan import scaled_blocks
from dpft.rapft import RapFT, clipped_relevance, relevance_mask
from dpft.rapft.perturbation import allocate, relevance_blocks

# The mask

maps = st.lists(st.lists(st.sampled_from([0.0, 0.0, -1.0, 0.5, 2.0, 2.0, 7.0]), min_size=1, max_size=12), min_size=1, max_size=5)


@given(rows=maps, share=st.floats(0.05, 0.95), ranking=st.sampled_from(["magnitude", "signed"]))
@settings(max_examples=60)
def test_exactly_so_many_are_weak_and_none_of_them_outranks_a_strong_one(rows, share, ranking):
    relevance = {str(i): torch.tensor(row) for i, row in enumerate(rows)}
    size = sum(map(len, rows))
    if not 0 < round(share * size) < size or not any(map(any, rows)):
        with pytest.raises(ValueError, match=r"block empty|every relevance is exactly zero"):
            relevance_mask(relevance, share, ranking=ranking)
        return
    weak = relevance_mask(relevance, share, ranking=ranking)
    values = [row.abs() if ranking == "magnitude" else row for row in relevance.values()]
    scores = torch.cat([(v - v.min()) / (v.max() - v.min()) if v.max() > v.min() else v * 0 for v in values])
    flat = torch.cat([*weak.values()])
    assert int(flat.sum()) == round(share * size)
    border = scores[flat].max()
    assert border <= scores[~flat].min()
    tied = flat[scores == border]                                                # the first ones among equals
    assert tied.sum() == tied.int().cumprod(0).sum()


def test_as_published_each_layer_has_its_share_rounded_up():
    """Finding 5: the paper ranks within each layer and takes the ceiling; ours ranks all together and rounds."""
    unlike = {"even": torch.arange(1.0, 11.0), "peaked": torch.arange(1.0, 12.0) ** 9}
    ours, papers = relevance_mask(unlike, 0.65), relevance_mask(unlike, 0.65, ranks="layer", rounding="up")
    assert [int(mask.sum()) for mask in papers.values()] == [7, 8]               # ceil(6.5), ceil(7.15)
    assert sum(int(mask.sum()) for mask in ours.values()) == 14 and int(ours["peaked"].sum()) > 8
    assert int(relevance_mask({"a": torch.arange(100.0)}, 0.55, rounding="up")["a"].sum()) == 55   # 0.55 * 100 is 55.00000000000001
    for name, value in (("ranks", "tensor"), ("rounding", "down")):
        with pytest.raises(ValueError, match=f"{name}='{value}'"):
            relevance_mask(unlike, 0.65, **{name: value})


def test_entries_that_do_not_train_are_neither_counted_nor_weak():
    relevance = {"a": torch.tensor([[0.0, 5.0], [1.0, 2.0]]), "b": torch.tensor([3.0, 4.0])}
    inside = torch.tensor([[False, True], [True, True]])
    weak = relevance_mask(relevance, 0.6, entries={"a": inside})
    assert not weak["a"][~inside].any() and sum(int(mask.sum()) for mask in weak.values()) == 3


def test_relevance_that_cannot_be_ranked_is_refused():
    for bad, told in ((torch.zeros(4), "zero"), *((torch.tensor([1.0, x]), "not finite") for x in (math.nan, math.inf))):
        with pytest.raises(ValueError, match=told):
            relevance_mask({"a": bad})
    with pytest.raises(ValueError, match="ranking='size'"):
        relevance_mask({"a": torch.tensor([1.0, 2.0])}, ranking="size")
    with pytest.raises(ValueError, match="weak block empty"):
        relevance_mask({"a": torch.tensor([1.0, 2.0])}, 0.1)


# The blocks

@pytest.mark.parametrize("beta,expected", [(0.6, 1.890), (0.7, 1.644), (0.8, 1.387), (0.9, 1.170)])
def test_the_papers_bounds_cost_less_than_it_says_and_the_tight_ones_what_it_says(beta, expected):
    assert abs(effective_noise_multiplier(*allocate([beta, 1 - beta], "paper")) - expected) < 5e-4
    assert abs(effective_noise_multiplier(*allocate([beta, 1 - beta], "tight")) - 1) < 1e-9
    clips, noises = allocate([beta, 1 - beta], "weighted", [1.0, 1.0])
    assert abs(clips.square().sum() - 1) < 1e-9 and abs(noises[0] - noises[1]) < 1e-9 * noises[0]   # plain noise, block by block


numbers = st.lists(st.floats(0.01, 100), min_size=2, max_size=5)


def split(sizes, generator, allocation="tight", preference=None):
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    weak = {p: torch.rand(p.shape, generator=generator) < 0.6 for p in parameters}
    weak[parameters[0]][:2] = torch.tensor([True, False])
    return weak, relevance_blocks(Block(parameters), weak, allocation, preference)


allocations = st.sampled_from([("tight", None), ("paper", None), ("weighted", 5.0), ("weighted", 0.1)])


@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4), seed=st.integers(0, 2**20), how=allocations, sigma=st.floats(0.3, 20))
@settings(max_examples=40)
def test_blocks_cover_all_once_and_cost_what_the_plan_says(sizes, seed, how, sigma):
    weak, blocks = split(sizes, torch.Generator().manual_seed(seed), *how)
    scaled = scaled_blocks(blocks, weak, 0.7, sigma)                            # refuses what is not covered once
    found = effective_noise_multiplier(torch.tensor([b.clip for b in scaled], dtype=torch.float64),
                                       torch.tensor([b.noise for b in scaled], dtype=torch.float64))
    assert abs(found - sigma) < 1e-6 * sigma
    counts = [int(sum(mask.sum() for mask in block.masks)) for block in blocks]
    assert counts == [int(sum(m.sum() for m in weak.values())), int(sum((~m).sum() for m in weak.values()))]
    clips, noises = allocate(counts, how[0], None if how[1] is None else [1.0, how[1]])
    assert [b.clip for b in blocks] == clips.tolist() and [b.noise for b in blocks] == noises.tolist()


@pytest.mark.parametrize("name", ["gpt2-lm", "roberta", "cnn"])
def test_the_engine_bounds_masked_blocks_as_the_oracle_does(name):
    model, loss_fn, batch = zoo.build(name)
    zoo.freeze(model, "no embeddings")
    generator = torch.Generator().manual_seed(1)
    weak = {p: torch.rand(p.shape, generator=generator) < 0.7 for p in trainable(model).values()}
    blocks = scaled_blocks(relevance_blocks(Block(list(weak)), weak, "paper"), weak, 0.5, 1.0)
    found = gradients(model, loss_fn, batch).clipped_sum(blocks)[0]
    rows = per_example_gradients(model, loss_fn, batch)
    masks = [{id(p): mask for p, mask in zip(block.parameters, block.masks, strict=True)} for block in blocks]
    named = {name: id(p) for name, p in trainable(model).items()}
    for block, own in zip(blocks, masks, strict=True):
        held = {n: g * own[named[n]] for n, g in rows.items() if named[n] in own}
        factors = (block.clip / torch.cat([g.flatten(1) for g in held.values()], 1).norm(dim=1)).clamp(max=1)
        for n, g in held.items():
            assert torch.allclose(found[n] * own[named[n]], torch.tensordot(factors, g, dims=1), rtol=1e-7, atol=1e-12)


def test_a_block_that_has_frozen_leaves_the_other_alone_and_a_stranger_is_refused():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    weak = {a: torch.ones(3, dtype=torch.bool), b: torch.zeros(2, dtype=torch.bool)}
    assert len(relevance_blocks(Block([a, b]), weak)) == 2
    alone, = relevance_blocks(Block([b]), weak, "weighted", 9.0)
    assert (alone.clip, list(alone.parameters)) == (1.0, [b])
    with pytest.raises(ValueError, match=r"shape .7,. trains that had no relevance"):
        relevance_blocks(Block([a, nn.Parameter(torch.zeros(7))]), weak)


# Runs

ROWS, PUBLIC = 24, 8  # a rate of 1 is priced by a formula, others by series that take seconds
SETTINGS = dict(batch_size=ROWS, steps=4, clip=0.5, seed=0, accountant="rdp", delta=1e-3, progress=False, learning_rate=1e-2)
SOURCES = {"public": {}, "private": dict(relevance_data="private", share=0.1, relevance_rate=1.0),
           "random": dict(relevance_data="random"), "paper": dict(relevance_data="paper", allow_non_private=True, relevance_rate=0.5)}
METHODS = {"lora": lambda: LoRA(rank=2), "bitfit": BiTFiT, "adapter": lambda: Adapter(width=3)}


def language():
    """A tiny language model whose biases are not zero, its data, and public data of the same kind."""
    model, loss_fn, batch = zoo.build("gpt2-lm", rows=ROWS + PUBLIC)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    rows, collate = zoo.as_data(batch)
    return model, loss_fn, rows[:ROWS], collate, Public(rows[ROWS:], "elsewhere")


def source(name, public):
    return SOURCES[name] or dict(relevance_data=public)


def tune(method, model=None, **changes):
    own, loss_fn, rows, collate, _ = language()
    return fine_tune(model or own, rows, method, **{"epsilon": 4.0, "loss_fn": loss_fn, "collate_fn": collate, **SETTINGS, **changes})


@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize("what", METHODS)
def test_a_run_with_each_method_and_each_source(what, where, tmp_path):
    public, warmup = language()[-1], 2 if what == "lora" else 0
    method = RapFT(METHODS[what](), **source(where, public), warmup_steps=warmup)
    run = tune(method, ledger=tmp_path / "ledger.sqlite")
    sizes = {id(p): p.numel() for p in method.masks}
    assert sum(int(mask.sum()) for mask in method.masks.values()) == round(0.7 * sum(sizes.values()))
    assert set(run.trained) == {name for name, p in run.model.named_parameters() if id(p) in sizes}
    paid = [("relevance", 1)] if where == "private" else []
    if where == "paper":
        assert run.epsilon == math.inf and not run.mechanisms and not Ledger(tmp_path / "ledger.sqlite").runs()
    else:
        assert [(m.name, m.steps) for m in run.mechanisms] == [("train", 4), *paid] and 3.9 < run.epsilon <= 4.0
        book = Ledger(tmp_path / "ledger.sqlite")
        assert [(m.name, m.steps) for m in book.spent()] == [("train", 4), *paid] and book.finished(book.runs()[0])
    stated = "the data that the method looked at (elsewhere)" in run.guarantee.assumed_public
    assert stated == (where == "public")


def test_a_random_split_is_that_of_the_seed_and_looks_at_no_data():
    """Two splits of 368 entries agree in .7 * .7 + .3 * .3 = .58 of them; nine in ten would be 12 deviations more."""
    def split(**changes):
        method = RapFT(BiTFiT(), relevance_data="random")
        tune(method, **changes)
        return torch.cat([mask.flatten() for mask in method.masks.values()])
    first = split()
    assert len(first) == 368 and torch.equal(first, split())
    for other in (split(seed=1), split(seed=None)):
        assert float((first == other).float().mean()) < 0.9
    drawn = []
    class Watched(RapFT):
        def start(self, context):
            context.draw = lambda rate: drawn.append(rate)
            super().start(context)
    tune(Watched(BiTFiT(), relevance_data="random"))
    assert drawn == []


def test_the_engine_has_one_block_during_the_warm_up_and_two_afterwards():
    model, loss_fn, rows, collate, public = language()
    method = RapFT(LoRA(rank=2), relevance_data=public, warmup_steps=2, allocation="paper", irrelevance=0.6)
    engine = Engine(model, loss_fn, method, rows, epsilon=4.0, collate_fn=collate, batch_size=ROWS, steps=4, accountant="rdp", delta=1e-3,
                    clip=1.0)
    optimizer, seen = torch.optim.SGD(engine.parameters(), 0.1), []
    for step in engine:
        step.take(optimizer)
        clips, stds = (torch.tensor([getattr(b, what) for b in engine.blocks], dtype=torch.float64) for what in ("clip", "noise"))
        assert abs(effective_noise_multiplier(clips, stds) - engine.plan.mechanisms[0].noise_multiplier) < 1e-9
        seen.append((len(engine.blocks), method.changes))
    assert seen == [(1, True), (1, True), (2, False), (2, False)]
    assert torch.allclose(clips, torch.tensor([0.36, 0.16], dtype=torch.float64), atol=2e-3)


def test_what_is_released_of_private_data_is_bounded_by_the_clip(monkeypatch):
    seen = []
    original = Context.release
    def watch(self, total, bound):
        seen.append((len(total), bound))
        return original(self, total, bound)
    monkeypatch.setattr(Context, "release", watch)
    method = RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=1.0, relevance_clip=0.3)
    tune(method)
    assert seen == [(sum(p.numel() for p in method.masks), 0.3)]


def test_an_empty_draw_is_noise_alone_and_no_crash():
    run = tune(RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=1e-9))
    assert [m.name for m in run.mechanisms] == ["train", "relevance"]


def test_without_noise_the_mask_is_that_of_the_clipped_sums():
    method = RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=1.0)
    run = tune(method, epsilon=math.inf, physical_batch_size=7)
    assert run.epsilon == math.inf and not run.guarantee.unpaid
    model, _, rows, collate, _ = language()
    zoo.freeze(model, "biases")
    wanted = relevance_mask(clipped_relevance(model, collate(rows), 0.01))
    found = {name: method.masks[p] for name, p in run.model.named_parameters() if p in method.masks}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_unit_of_several_rows_pays_once_for_its_relevance():
    method = RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=1.0)
    run = tune(method, unit=[i // 2 for i in range(ROWS)], batch_size=ROWS // 2)
    assert [m.name for m in run.mechanisms] == ["train", "relevance"]


def test_it_wraps_chains_selections_and_single_entries():
    public = language()[-1]
    chained = tune(RapFT(Chain(LoRA(rank=2), BiTFiT()), relevance_data=public, warmup_steps=1))
    assert any("lora" in name for name in chained.trained) and any(name.endswith("bias") for name in chained.trained)
    selected = tune(RapFT(DPFrost(0.6, sample_rate=1.0, rounds=2), relevance_data="private", share=0.1, relevance_rate=1.0))
    assert [(m.name, m.steps) for m in selected.mechanisms] == [("train", 4), ("select", 2), ("relevance", 1)] and selected.epsilon <= 4.0
    largest = LargestWeights(0.3)
    method = RapFT(largest, relevance_data=public)
    tune(method)
    assert all(not (mask & ~largest.masks[p]).any() for p, mask in method.masks.items())
    assert sum(int(mask.sum()) for mask in method.masks.values()) == round(0.7 * sum(int(mask.sum()) for mask in largest.masks.values()))


def test_as_the_second_phase_its_steps_count_from_its_own_beginning():
    inner = RapFT(BiTFiT(), relevance_data="private", share=0.1, relevance_rate=0.5, warmup_steps=1)
    run = tune(Then(Full(), None, inner, steps=2))
    assert [(m.name, m.steps) for m in run.mechanisms] == [("train", 4), ("relevance", 1)] and inner.masks


# Interrupted runs

@pytest.mark.parametrize("where, stopped_at", [("private", 2), ("private", 4), ("public", 4)])
def test_an_interrupted_run_goes_on_bit_for_bit_and_pays_once(where, stopped_at, tmp_path):
    public = language()[-1]
    def go(folder, optimizer=torch.optim.AdamW):
        method = RapFT(LoRA(rank=2), **source(where, public), warmup_steps=2)
        run = tune(method, checkpoint=folder, checkpoint_every=1, optimizer=optimizer, cache=0.0)  # a cache rounds otherwise
        names = {p: name for name, p in run.model.named_parameters()}
        return run, {names[p]: mask for p, mask in method.masks.items()}
    whole, mask = go(tmp_path / "whole")
    with pytest.raises(Stopped):
        go(tmp_path / "parts", stopping(stopped_at))
    again, mask_again = go(tmp_path / "parts")
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    assert mask.keys() == mask_again.keys() and all(torch.equal(mask[name], mask_again[name]) for name in mask)
    assert [(m.name, m.steps) for m in again.mechanisms] == [(m.name, m.steps) for m in whole.mechanisms]
    assert len(again.mechanisms) == {"private": 2, "public": 1, "paper": 0}[where]


def test_attention_without_a_rule_is_refused_before_anything_is_charged(tmp_path):
    model, loss_fn, batch = zoo.build("llama")                                   # all heads share one key head
    data, collate = zoo.as_data(batch)
    with Ledger(tmp_path / "ledger") as ledger:
        with pytest.raises(ValueError, match="query heads share one key head"):
            fine_tune(model, data, RapFT(Full(), relevance_data="private", share=0.1), epsilon=3.0, steps=2, batch_size=3, delta=0.01,
                      loss_fn=loss_fn, collate_fn=collate, accountant="rdp", ledger=ledger, progress=False)
        assert not ledger.runs()


# What is not paid for

def test_an_unpaid_map_is_named_wherever_the_run_is_described(tmp_path, run):
    tuned = tune(RapFT(BiTFiT(), **SOURCES["paper"], allocation="paper"))
    tuned.save(tmp_path)
    reason = "relevance mask of Rap-FT"
    card = (tmp_path / "README.md").read_text()
    assert "No privacy guarantee" in card and reason in card.splitlines()[2] and "epsilon" not in card.splitlines()[2]
    assert reason in tuned.guarantee.uncharged[0] and tuned.guarantee.planned == []
    read = Guarantee.load(tmp_path / "guarantee.json")
    assert read.epsilon() == math.inf and reason in read.unpaid and read.tpr(0.01) == 1.0
    assert any(reason in line for line in verify(tmp_path))
    status, out, _ = run("verify", tmp_path)
    assert status == 0 and reason in out and "there is no privacy guarantee" in out


def test_a_part_of_another_method_cannot_hide_it():
    run = tune(Then(RapFT(BiTFiT(), **SOURCES["paper"]), None, Full(), steps=2))
    assert run.epsilon == math.inf and "Rap-FT" in run.guarantee.unpaid


# What is refused


class Two(Method):
    def start(self, context):
        context.train_only(context.model.parameters())

    def blocks(self, context):
        first, *rest = trainable(context.model).values()
        return [Block([first]), Block(rest)]


HERE, PAID = Public([1], "here"), dict(relevance_data="private", share=0.1)


def rap(**settings):
    return RapFT(BiTFiT(), **settings)


@pytest.mark.parametrize("make, told", [
    (lambda: rap(relevance_data="private"), "needs a share"), (lambda: rap(relevance_data="random", share=0.1), "share=0.1"),
    (lambda: rap(relevance_data=[1]), "must be Public"), (lambda: rap(relevance_data="paper"), "no privacy guarantee"),
    (lambda: rap(allocation="x", **PAID), "allocation='x'"), (lambda: rap(preference=2.0, **PAID), "with a preference"),
    (lambda: rap(allocation="weighted", **PAID), "with a preference"), (lambda: rap(relevance_clip=0.0, **PAID), "clip=0"),
    (lambda: rap(irrelevance=1.0, **PAID), "irrelevance=1.0"), (lambda: rap(irrelevance=math.nan, **PAID), "irrelevance"),
    (lambda: rap(ranks="tensor", **PAID), "ranks='tensor'"), (lambda: rap(init="x", **PAID), "init='x'"),
    (lambda: rap(colour=1, **PAID), "no such option among colour"),
    (lambda: RapFT(RapFT(BiTFiT(), relevance_data=HERE), relevance_data=HERE), "wrap each phase"),
    (lambda: RapFT(Then(Full(), 1, BiTFiT()), relevance_data=HERE), "wrap each phase"),
    (lambda: RapFT(DPFrost(0.5, reselect=2), relevance_data=HERE), "wrap each phase"),
    (lambda: Chain(RapFT(BiTFiT(), relevance_data=HERE), LoRA()), "makes no sense"),
    (lambda: tune(RapFT(BiTFiT(), warmup_steps=99, **PAID)), "warmup_steps=99 leaves none"),
    (lambda: tune(RapFT(LoRA(rank=2), **PAID)), "warmup_steps"),                        # before anything is charged: all its maps are zero
    (lambda: tune(RapFT(Two(), relevance_data=language()[-1])), "Two cuts what trains into 2 blocks"),
    (lambda: tune(RapFT(BiTFiT(), relevance_data=Public(language()[2][3:4], "the same"))), "1 of the 1 rows of the public data"),
    (lambda: rap(relevance_data=HERE).masks, "no relevance has been taken yet")])
def test_what_cannot_be_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
