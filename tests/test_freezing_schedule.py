"""Layer freezing: what a layer is, what freezes when, that the account does not notice, and that the cache sees what remains."""

import itertools

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo import toy

import dpft
from dpft.book import networks as networks  # names wrn-16-4
from dpft.book.audits import Stopped, stopping
from dpft.composition import Chain, Then
from dpft.features import Features
from dpft.freezing.schedule import LayerFreeze, layers
from dpft.gradients import per_example_gradients
from dpft.ledger import Ledger
from dpft.method import Context
from dpft.models import load_model, set_modes
from dpft.oracle import batch_rows, trainable


class Counted(zoo.CountsExamples, nn.Linear):
    "A layer that counts the examples that go through."


def net(seed=0):
    "Five layers, 1, 3, 5, 7, 9, of widths for which a row's product does not depend on its place in a batch."
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(),
                         nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def engine(method, model=None, **changes):
    options = {"epsilon": 2.0, "batch_size": 20, "steps": 6, "clip": 0.5, "seed": 0, "accountant": "rdp", **changes}
    return dpft.Engine(net() if model is None else model, zoo.image_loss, method, toy(), **options)


def run_all(e, watch=lambda step: None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(e.model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for step in e:
        for batch in step:
            step.add(batch)
        watch(step)
        step.privatize()
        optimizer.step()
        step.done()
    return e


def tune(model=None, method=None, **changes):
    method = method or LayerFreeze([2, 3], [2, 4])
    options = {"cache": 0.0, "epsilon": 2.0, "batch_size": 20, "steps": 6, "clip": 0.5, "seed": 0, "accountant": "rdp", "progress": False,
               "learning_rate": 0.05, **changes}
    return dpft.fine_tune(net() if model is None else model, toy(), method, loss_fn=zoo.image_loss, **options)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def names(model):
    return [layer.name for layer in layers(model)]


def started(method, model, steps=1):
    method.start(Context(model, zoo.image_loss, 1, steps, 1))
    return method


# ---- what a layer is


class Block2(nn.Module):
    "Norm, convolution, twice, and a way around, with a projection where the width changes."

    def __init__(self, before, after):
        super().__init__()
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        self.norm1, self.conv1 = nn.GroupNorm(1, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(1, after), nn.Conv2d(after, after, 3, padding=1)

    def forward(self, x):
        return self.around(x) + self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())


class ResNet(nn.Module):
    "Registered from the head down, so that only the pass tells the order."

    def __init__(self, widths):
        super().__init__()
        self.head = nn.Linear(widths[-1], 3)
        self.blocks = nn.Sequential(*(Block2(before, after) for before, after in itertools.pairwise(widths)))
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1)

    def forward(self, x):
        size = x.shape[0]
        return self.head(self.blocks(self.stem(x)).mean((2, 3)).view(size, -1))


FOUND = {
    "roberta": ["roberta.embeddings", "roberta.encoder.layer.0", "roberta.encoder.layer.1", "classifier"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"],
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "score"],
    "gpt2-lm": ["transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f"],  # the head is tied to wte, and holds it
    "vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1", "classifier"],
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"],
    "cnn": ["stem", "grouped", "strided", "twice", "head"],
}


@pytest.mark.parametrize("name", FOUND)
def test_layers_of_every_family(name):
    model = zoo.build(name)[0]
    found = layers(model)
    assert [layer.name for layer in found] == FOUND[name]
    held = [parameter for layer in found for parameter in layer.parameters]
    unused = {"unused.weight", "unused.bias"}                     # the convolutional network never calls it
    assert len(held) == len(set(held)) and set(held) == {p for n, p in model.named_parameters() if n not in unused}
    head = {id(p) for p in dpft.models.fresh_head(model)}
    assert head <= {id(p) for p in found[-1].parameters}


@pytest.mark.parametrize("name", [name for name in FOUND if name != "gpt2-lm"])
def test_below_a_waist_everything_can_be_cached(name):
    model, loss_fn, batch = zoo.build(name)
    found = layers(model)
    for count in range(1, len(found)):
        for layer in found[:count]:
            for parameter in layer.parameters:
                parameter.requires_grad_(False)
        set_modes(model)
        features, rows = Features(model, loss_fn), range(batch_rows(batch))
        with features.rows(batch, rows):
            losses = features(model, batch)
        saves = count > 1 or name == "vit"     # a look-up is no arithmetic; the first convolution's output is read twice
        assert torch.allclose(losses, loss_fn(model, batch)) and (features.split is not None or not saves) and not features.off


@pytest.mark.parametrize(("name", "shape", "sizes"), [
    ("tempered-cnn", (1, 28, 28), [1_040, 8_224, 16_416, 330]), ("tempered-cnn-5", (1, 28, 28), [320, 18_496, 73_856, 295_168, 2_570]),
    ("tempered-cnn-8", (3, 32, 32), [896, 9_248, 18_496, 36_928, 73_856, 147_584, 295_168, 23_050]),
    ("cnn", (1, 8, 8), [192, 4_704, 9_312, 5_130]), ("wrn-16-4", (3, 32, 32), 8)])
def test_layers_of_the_papers_networks(name, shape, sizes):
    found = [layer.size for layer in layers(load_model(name, 10, "image", shape))]
    assert found == sizes or len(found) == sizes                                       # stem, six blocks and head


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=5))
def test_a_residual_network_is_stem_blocks_and_head_in_the_order_of_its_pass(widths):
    model = ResNet(widths)
    blocks = ["blocks"] if len(widths) == 2 else [f"blocks.{i}" for i in range(len(widths) - 1)]  # the highest module that is the layer
    assert names(model) == ["stem", *blocks, "head"]
    assert sum(layer.size for layer in layers(model)) == sum(p.numel() for p in model.parameters())


@settings(max_examples=20)
@given(st.lists(st.lists(st.sampled_from(["norm", "prelu", "tanh", "flat"]), max_size=3), min_size=2, max_size=5))
def test_norms_and_vectors_belong_to_the_layer_before_them(tails):
    made = {"norm": lambda: nn.LayerNorm(4), "prelu": lambda: nn.PReLU(), "tanh": nn.Tanh, "flat": nn.Flatten}
    parts = [nn.Sequential(nn.Linear(4, 4), *(made[kind]() for kind in tail)) for tail in tails]
    found = layers(nn.Sequential(*parts))
    assert [set(layer.parameters) for layer in found] == [set(part.parameters()) for part in parts]


def test_a_norm_before_everything_belongs_to_what_follows():
    assert [layer.size for layer in layers(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)))] == [8 + 20, 10]


def encoder_decoders():
    import transformers

    small = dict(vocab_size=40, d_model=16)
    both = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                decoder_ffn_dim=24)
    return {
        "t5": (transformers.T5ForConditionalGeneration(transformers.T5Config(
            **small, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2)), "encoder.block.1", "decoder.block.0"),
        "bart": (transformers.BartForConditionalGeneration(transformers.BartConfig(**small, **both, max_position_embeddings=32)),
                 "model.encoder.layers.1", "model.decoder.layers.0"),
        "bart-classifier": (transformers.BartForSequenceClassification(
                                transformers.BartConfig(**small, **both, max_position_embeddings=32)),
                            "model.encoder.layers.1", "model.decoder.layers.0"),
        "whisper": (transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
            vocab_size=60, num_mel_bins=8, d_model=16, max_source_positions=16, max_target_positions=16, **both, pad_token_id=1,
            bos_token_id=2, eos_token_id=3, decoder_start_token_id=4)), "model.encoder.layers.1", "model.decoder.layers.0")}


@pytest.mark.parametrize("name", ["t5", "bart", "bart-classifier", "whisper"])
def test_of_an_encoder_and_its_decoder_the_encoder_comes_first(name):
    model, last, first = encoder_decoders()[name]
    found = layers(model)
    called = [layer.name for layer in found]
    assert called.index(last) < called.index(first) and len(called) >= 5
    held = [p for layer in found for p in layer.parameters]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    tied = model.get_input_embeddings().weight
    if model.get_output_embeddings() is not None:
        assert any(p is tied for p in found[-1].parameters)                      # the head is the embedding, and trains to the end
    started(LayerFreeze(2, 1), model, steps=3)


def test_towers_of_a_transformer_have_no_order_and_the_message_says_so():
    import transformers

    part = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    clip = transformers.CLIPModel(transformers.CLIPConfig(
        text_config=dict(vocab_size=40, **part), vision_config=dict(image_size=16, patch_size=8, **part)))
    with pytest.raises(ValueError, match=r"2 stacks of blocks side by side: text_model\.encoder\.layers, vision_model.*order=\["):
        layers(clip)


class Towers(nn.Module):
    "Two towers side by side, then a trunk."

    def __init__(self):
        super().__init__()
        self.left, self.right, self.trunk, self.head = (nn.Linear(a, b) for a, b in ((4, 4), (4, 4), (8, 4), (4, 2)))

    def forward(self, x):
        return self.head(self.trunk(torch.cat([self.left(x), self.right(x)], 1)))


def test_what_is_parallel_is_one_layer():
    assert [layer.size for layer in layers(Towers())] == [40, 36, 10]


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def test_weights_that_are_changed_on_the_way_and_wrappers_are_followed():
    chain = nn.Sequential(Standardised(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), Standardised(4, 4, 2), nn.Flatten(), nn.Linear(4, 3))
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = chain
        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else self.inner(-x)      # cannot be followed, and need not be
    assert names(Wrapper()) == ["inner.0", "inner.3", "inner.5"]


def test_adapters_belong_to_the_layer_that_they_adapt():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(zoo.build("roberta")[0], LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    found = layers(model)
    assert [layer.name.removeprefix("base_model.model.") for layer in found] == FOUND["roberta"]
    assert {p for layer in found for p in layer.parameters} == set(model.parameters())
    assert all(sum(p.requires_grad for p in layer.parameters) == 2 for layer in found[1:3])


class Winding(nn.Module):
    "A pass that depends on its values."

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(self.a(x)) if x.sum() > 0 else self.b(x)


def test_a_chain_with_a_part_that_cannot_be_followed_is_taken_module_by_module():
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Winding(), nn.ReLU()), nn.Linear(3, 2))) == ["0", "1", "2"]


# ---- what freezes, and when


def test_the_default_is_the_lower_half_rounded_up_twenty_steps_before_the_end():
    seen = []
    run_all(engine(LayerFreeze(), steps=25), lambda step: seen.append({name.split(".")[0] for name in step.sums}))
    assert seen == [{"1", "3", "5", "7", "9"}] * 5 + [{"7", "9"}] * 20
    seen.clear()
    even = nn.Sequential(nn.Flatten(), *(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 3))
    run_all(engine(LayerFreeze(after=1), even, steps=2), lambda step: seen.append({name.split(".")[0] for name in step.sums}))
    assert seen == [{"1", "2", "3", "4"}, {"3", "4"}]
    two = started(LayerFreeze(after=0), pair := nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    two.step(Context(pair, zoo.image_loss, 1, 2, 1), 0)
    assert [p.requires_grad for p in pair.parameters()] == [False, False, True, True]


def test_what_is_frozen_gets_no_signal_no_noise_and_does_not_move():
    moved, widths = [], []
    e = engine(LayerFreeze([1, 3], [2, 4]), steps=6)
    before = {}
    def watch(step):
        before.update({name: p.detach().clone() for name, p in e.model.named_parameters()})
        widths.append(sum(value.numel() for value in step.sums.values()))
        if step.t:
            moved.append({name.split(".")[0] for name, p in e.model.named_parameters() if not torch.equal(p, last[name])})
        last.update(before)
    last = {}
    run_all(e, watch)
    moved.append({name.split(".")[0] for name, p in e.model.named_parameters() if not torch.equal(p, last[name])})
    assert moved == [{"1", "3", "5", "7", "9"}] * 2 + [{"3", "5", "7", "9"}] * 2 + [{"7", "9"}] * 2   # despite momentum and decay
    sizes = [layer.size for layer in layers(e.model)]
    assert widths == [sum(sizes)] * 2 + [sum(sizes[1:])] * 2 + [sum(sizes[3:])] * 2


def test_the_bound_is_that_of_what_still_trains():
    e = engine(LayerFreeze(3, 1), steps=2, clip=0.2, noise_multiplier=1.0, epsilon=None)
    run_all(e, lambda step: assert_dp_sgd(e, step, 0.2))


def assert_dp_sgd(e, step, clip):
    "A step's sums are those of DP-SGD over all that trains at it, bounded example by example."
    total = {}
    for batch in e.batches("train", step.t):
        rows = per_example_gradients(e.model, zoo.image_loss, batch)
        norms = sum(values.flatten(1).square().sum(1) for values in rows.values()).sqrt()
        for name, values in rows.items():
            total[name] = total.get(name, 0) + torch.tensordot((clip / norms).clamp(max=1), values, dims=1)
    assert total.keys() == step.sums.keys() == trainable(e.model).keys()
    assert all(torch.allclose(step.sums[name], total[name], atol=1e-5) for name in total)


def test_the_account_and_the_run_until_it_freezes_are_those_of_dp_sgd():
    ends, trained = [], []
    for method in (LayerFreeze(3, 3), dpft.Full()):
        e, seen = engine(method), []
        run_all(e, lambda step, e=e, seen=seen: (assert_dp_sgd(e, step, 0.5), seen.append(len(step.sums))))
        trained.append(seen)
        ends.append((e.plan, e.guarantee.epsilon(), e.guarantee.mechanisms))
    assert ends[0] == ends[1] and ends[0][1] == pytest.approx(2.0, abs=0.01)
    assert trained == [[10] * 3 + [4] * 3, [10] * 6]


@pytest.mark.parametrize("at, average", [(3, None), (4, 0.9), (6, None)])
def test_a_run_resumed_before_or_after_freezing_is_the_same_run(tmp_path, at, average):
    whole = tune(average=average)
    with pytest.raises(Stopped):
        tune(average=average, checkpoint=tmp_path, checkpoint_every=1, optimizer=stopping(at))
    resumed = tune(average=average, checkpoint=tmp_path, checkpoint_every=1, optimizer=torch.optim.AdamW)
    assert torch.equal(weights(resumed.model), weights(whole.model)) and resumed.epsilon == whole.epsilon
    assert resumed.trained == whole.trained == sorted(name for name, _ in net().named_parameters())
    with Ledger(f"{tmp_path}.ledger") as ledger:
        assert sum(m.steps for m in ledger.charged()) == 6


def test_moments_of_frozen_parameters_are_dropped():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    tune(model, optimizer=optimizer, learning_rate=dpft.settings.Settings.learning_rate)
    assert {id(p) for p in optimizer.state} == {id(p) for p in model[7:].parameters()}


# ---- over another method


@pytest.mark.parametrize(("method", "wanted"), [
    (lambda: Chain(dpft.BiTFiT(), LayerFreeze([1, 3], [1, 3])), ["13579"] + ["3579"] * 2 + ["79"] * 3),
    (lambda: Chain(LayerFreeze(2, 2), dpft.BiTFiT()), ["13579"] * 6),                  # what is added after it trains on
    (lambda: Then(dpft.LastLayer(), None, LayerFreeze(3, 2), steps=3), ["9"] * 3 + ["13579"] * 2 + ["79"])])
def test_in_chains_and_phases(method, wanted):
    seen = []
    run_all(engine(method(), steps=6), lambda step: seen.append("".join(sorted({name.split(".")[0] for name in step.sums}))))
    assert seen == wanted


def test_a_method_that_trains_nothing_above_is_refused_before_the_run():
    model, loss_fn, _ = zoo.build("gpt2-lm")                                           # a language model has no fresh head
    context = Context(model, loss_fn, 1, 30, 1)
    with pytest.raises(ValueError, match="first 2 of 4 layers, so nothing would be left"):
        LayerFreeze(2).choose(context, list(model.transformer.h[0].parameters()))
    upper = list(model.transformer.h[1].parameters())
    assert LayerFreeze(2).choose(context, upper) == upper
    assert LayerFreeze(2).choose(Context(net(), zoo.image_loss, 1, 30, 1), []) == []   # the head always trains


# ---- one's own order


def test_ones_own_order_is_followed():
    model = Winding()
    with pytest.raises(ValueError, match=r"Winding: its layers cannot be put in order .*order=\["):
        started(LayerFreeze(), model)
    method = started(LayerFreeze(1, 0, order=["a", "b"]), model)
    method.step(Context(model, zoo.image_loss, 1, 2, 1), 0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["b.weight", "b.bias"]
    towers = Towers()
    started(LayerFreeze(order=["left", ["right.weight", "trunk"], "head"]), towers).step(Context(towers, zoo.image_loss, 1, 30, 1), 10)
    assert [name for name, p in towers.named_parameters() if p.requires_grad] == ["right.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(("order", "words"), [
    (["1", "2", "9"], "'2' names no parameter"), (["1", "3", "1.weight"], "two layers"), (["1"], "two layers at least"),
    ([["1", "3", "absent"], "9"], "'absent'. names no parameter"), (["1", "9.we"], "names no parameter")])
def test_an_order_that_cannot_be(order, words):
    with pytest.raises(ValueError, match=words):
        engine(LayerFreeze(1, 1, order=order))


# ---- bad input


@pytest.mark.parametrize(("words", "message"), [
    (dict(layers=0), "layers=0 must be a whole number, 1 or more"), (dict(after=-1), "0 or more"), (dict(layers=2.5), "whole number"),
    (dict(after="adaptive"), "fixed before the run"), (dict(layers=[1, 2]), "equally long"),
    (dict(layers=[2, 1], after=[1, 2]), "increasing")])
def test_a_schedule_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message):
        LayerFreeze(**words)


@pytest.mark.parametrize(("method", "message"), [
    (LayerFreeze(5, 1), "layers=5 of 5 would freeze the head, 9; choose at most 4"), (LayerFreeze([1, 7], [1, 2]), "layers=7 of 5"),
    (LayerFreeze(2, 6), "after=6 lies outside the run of 6 steps"), (LayerFreeze([1, 2], [3, 99]), "after=99"),
    (LayerFreeze(), "step 20 before the end lies outside the run of 6 steps")])
def test_a_schedule_that_does_not_fit_is_refused_before_anything_is_spent(method, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        engine(method, ledger=tmp_path / "ledger.sqlite")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert not ledger.runs()


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), nn.Bilinear(2, 2, 2)])
def test_a_model_of_one_layer_is_refused(model):
    with pytest.raises(ValueError, match=r"cannot be put in order .*order="):
        layers(model)


# ---- the cache of what is frozen, by counts


def wide(seed=0, layer=Counted):
    "As `net`, of layers that count and are worth storing."
    torch.manual_seed(seed)
    sizes = [16, 24, 24, 24, 24, 3]
    parts = [part for a, b in itertools.pairwise(sizes) for part in (layer(a, b), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *parts[:-1])


def test_the_cache_changes_nothing_but_the_work():
    cached, plain = (run_all(engine(LayerFreeze([2, 3], [3, 12]), wide(layer=nn.Linear), batch_size=30, steps=24, cache=cache,
                                    loop="SGD at 0.1")) for cache in (1.0, 0))    # by name the noise is the same, however sums are rounded
    assert torch.allclose(weights(cached.model), weights(plain.model), atol=1e-6) and cached.features.hits > 0
    assert cached.features.store.bytes == 0


# ---- from the command line, and what it costs
