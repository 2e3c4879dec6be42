"""Ways and mechanisms of the kernel against the slow oracle; which layers are exact, `test_characterisation` says."""

import copy
import gc
import platform
import warnings
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from test_characterisation import EXACT, agrees, flat, joined, noise, off, wave
from torch import nn, tensor
from torch.autograd.graph import saved_tensors_hooks

import dpft.forms
import dpft.gradients
import dpft.hooks
import dpft.layer_rules
import dpft.norms
from dpft.clipping import clip_factor
from dpft.forms import Outer, pair_squares
from dpft.gradients import (
    Block,
    Partition,
    clipped_sum,
    gradients,
    mapped_gradients,
    per_example_gradients,
    per_example_norms,
    reuse_memory,
    unseen,
    weighted_sum,
)
from dpft.oracle import per_example_losses, select_rows
from dpft.step import Lowered


class Net(nn.Module):
    "Layers by name."

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.double()


def slow_but_exact(model, batch, *names, way="materialised by vmap"):
    "The engine agrees with the oracle, with one warning that names the parameters and the way they take."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        agrees(model, wave, batch)
    assert len(seen) == 1, [str(one.message) for one in seen]
    named, text = str(seen[0].message).split(":")
    assert sorted(named.split(", ")) == sorted(names) and text.endswith(way)


# ---- what trains may change, and nothing is left behind


def every_transition(names):
    "A walk that goes from each to each other exactly once: a circuit of Hierholzer's."
    left, stack, walk = {name: [other for other in names if other != name] for name in names}, [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_trains_may_change_at_any_step(name):
    "Every ordered transition between two freeze sets, on one model: no stale state, no broken bound, nothing left behind."
    model, loss_fn, batch = zoo.build(name, rows=3)
    sets, oracles, clip = list(zoo.FREEZE_SETS), {}, 0.05
    for freeze_set in sets:
        zoo.freeze(model, freeze_set)
        oracles[freeze_set] = flat(per_example_gradients(model, loss_fn, batch))
    walk = every_transition(sets)
    assert sorted(pairwise(walk)) == sorted(pair for pair in product(sets, sets) if pair[0] != pair[1])
    for freeze_set in walk:
        zoo.freeze(model, freeze_set)
        flags = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
        rows = oracles[freeze_set]
        assert off(joined(clipped_sum(model, loss_fn, batch, clip)), clip_factor(rows.norm(dim=1), clip) @ rows) <= EXACT
        assert joined(clipped_sum(model, loss_fn, select_rows(batch, tensor([0])), clip)).norm() <= clip * (1 + EXACT)
        assert flags == {key: parameter.requires_grad for key, parameter in model.named_parameters()} and untouched(model)


def untouched(model):
    "No hook, no stand-in for a parameter, and no gradient is left."
    return all(not module._forward_hooks and not module._forward_pre_hooks and not set(module._parameters) & set(module.__dict__)
               for module in model.modules()) and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("where", ["loss", "forward"])
@pytest.mark.parametrize("after", [1, 5])
def test_an_error_leaves_the_model_as_it_was(where, after):
    model, loss_fn, batch = zoo.build("vit", rows=3)          # with a bare class token and positions
    zoo.freeze(model, "biases")
    model.vit.embeddings.cls_token.requires_grad_(True)
    flags, modes = [p.requires_grad for p in model.parameters()], [module.training for module in model.modules()]
    values, calls = {key: value.clone() for key, value in model.state_dict().items()}, []

    def fails(*_):
        calls.append(1)
        if len(calls) >= after:
            raise KeyError("the user's own mistake")

    hook = model.vit.embeddings.register_forward_pre_hook(fails) if where == "forward" else None
    with pytest.raises(KeyError, match="own mistake"):
        for _ in range(after):
            gradients(model, lambda m, b: (fails() if hook is None else None, loss_fn(m, b))[1], batch)
    if hook is not None:
        hook.remove()
    assert flags == [p.requires_grad for p in model.parameters()] and modes == [module.training for module in model.modules()]
    assert untouched(model) and all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


def test_gradient_checkpointing_changes_nothing():
    model, loss_fn, batch = zoo.build("roberta")
    model.train()
    wanted = joined(clipped_sum(model, loss_fn, batch, 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name is about to change
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert off(joined(clipped_sum(model, loss_fn, batch, 0.1)), wanted) <= 1e-12


def test_bfloat16_autocast_is_close_and_its_sums_are_float32():
    model, loss_fn, batch = zoo.build("roberta")
    model.float()

    def mixed(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch).float()

    mixed.full_precision = loss_fn  # the oracle's comparison is in float32; in bfloat16 a draw may call a layer slow
    clip = per_example_norms(model, loss_fn, batch).median().item() / 2
    wanted = joined(clipped_sum(model, loss_fn, batch, clip))
    inside = clipped_sum(model, mixed, batch, clip)
    with torch.autocast("cpu", torch.bfloat16):
        outside = clipped_sum(model, loss_fn, batch, clip)
    for found in (inside, outside):
        assert all(value.dtype == torch.float32 for value in found.values()) and off(joined(found), wanted) <= 0.05
    assert off(joined(outside), joined(inside)) <= 1e-6  # autocast around the call reaches the forward pass only


# ---- forms


@pytest.mark.parametrize("channels", [1, 3])
def test_the_patches_of_a_few_examples_at_a_time(channels, monkeypatch):
    monkeypatch.setattr("dpft.layer_rules.PATCHES", 300)                                       # of 5 examples: two, two and one
    agrees(nn.Conv2d(channels, 2, 3).double(), wave, (noise(5, channels, 6, 7),))


def test_chunks_do_not_show(monkeypatch):
    model, loss_fn, batch = zoo.build("vit")
    for module in ("norms", "layer_rules", "gradients"):
        monkeypatch.setattr(f"dpft.{module}.CHUNK", 300)
    agrees(model, loss_fn, batch)


def test_convolutions_with_more_channels_than_positions_keep_their_factors():
    model, batch = Net(conv=nn.Conv2d(12, 16, 2, groups=2, stride=2)), (noise(5, 12, 2, 2),)
    assert [*map(type, gradients(model.conv, wave, batch).uses["weight"])] == [Outer]
    agrees(model.conv, wave, batch)


@pytest.mark.parametrize("tokens", [2, 3])
def test_matrices_with_one_input_are_measured_as_one(tokens, monkeypatch):
    class ThreeBranches(Net):
        def forward(self, x):
            return self.value(x) * torch.sigmoid(self.query(x) * self.key(x))

    model = ThreeBranches(query=nn.Linear(12, 16), key=nn.Linear(12, 16), value=nn.Linear(12, 16))
    batch, calls = (noise(5, tokens, 12),), []
    agrees(model, wave, batch)
    found = gradients(model, wave, batch)
    honest = dpft.forms.token_products
    monkeypatch.setattr("dpft.forms.token_products", lambda *pair: (calls.append(1), honest(*pair))[1])
    together = found.norms()
    assert len(calls) == 2                                                                   # one of the input, one of all outputs
    parts = [Partition(name, (parameter,)) for name, parameter in model.named_parameters()]
    assert off(found.norms(partitions=parts).square().sum(1).sqrt(), together) <= 1e-12
    assert len(calls) == 2 + 3 * 2                                                           # apart, each has its own


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 131])
def test_each_pair_of_tokens_is_multiplied_once(tokens):
    left, right = noise(4, tokens, 5), noise(4, tokens, 7, seed=1)
    assert off(pair_squares(left, right)[0], (left.mT @ right).square().sum((1, 2))) <= 1e-12


def test_what_is_not_used_and_an_empty_batch_sum_to_zero():
    model, loss_fn, batch = zoo.build("cnn")
    zoo.freeze(model.requires_grad_(False), "full")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("unused"))
    assert not joined(clipped_sum(model, loss_fn, batch, 1.0)).any() and not per_example_norms(model, loss_fn, batch).any()
    model.requires_grad_(True)
    empty = select_rows(batch, torch.arange(0))
    assert per_example_norms(model, loss_fn, empty).shape == (0,)
    sums = clipped_sum(model, loss_fn, empty, 1.0)
    assert {name: value.shape for name, value in sums.items()} == {name: p.shape for name, p in model.named_parameters()}
    assert not joined(sums).any()


# ---- the ladder: what hooks do not see as autograd does


class Attention(Net):
    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Functional(Net):
    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.below(x)), self.inner.weight))


class ZeroGate(Net):
    "A weight in odd use behind a gate that starts at zero, as LoRA's and adapters' do."

    def forward(self, x):
        return x + self.gate(torch.tanh(F.linear(x, self.inner.weight)))


class Deciding(Net):
    "A weight in odd use, and a decision by a value, which vmap cannot follow."

    def forward(self, x):
        y = F.linear(x, self.inner.weight)
        return y.sin() if x.nan_to_num(0, 0, 0).abs().sum() >= 0 else y


class TimeFirst(Net):
    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Sorts(Net):
    "A layer that sees rows by their length, the first number; as a recurrent net sees packed texts."

    def forward(self, x):
        order = x[:, 0].argsort(descending=True, stable=True)
        return self.head(torch.tanh(self.inner(x[order]))[order.argsort()])


class Packed(Net):
    "Texts of several lengths, sorted inside: later steps have fewer rows."

    def forward(self, x):
        lengths = (x[..., 0] != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.inner(x), lengths, batch_first=True, enforce_sorted=False)
        padded = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        return self.head(padded[:, 0])


def square(width=4, **more):
    return nn.Linear(width, width, bias=False, **more)


def zero_gate():
    model = ZeroGate(inner=square(), gate=square())
    nn.init.zeros_(model.gate.weight)
    return model


LENGTHS = torch.cat([tensor([1.0, 3, 2, 4], dtype=torch.float64)[:, None], noise(4, 3)], 1)
SLOW = {
    "attention": (lambda: Attention(attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2)), noise(5, 3, 4),
                  [f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]),
    "functional": (lambda: Functional(below=nn.Linear(4, 4), inner=square(), head=nn.Linear(4, 2)), noise(5, 3, 4), ["inner.weight"]),
    "behind a zero": (zero_gate, noise(5, 3, 4), ["inner.weight"]),
    "time first, 3": (lambda: TimeFirst(inner=nn.Linear(4, 5)), noise(5, 3, 4), ["inner.weight", "inner.bias"]),
    "time first, as many as examples": (lambda: TimeFirst(inner=nn.Linear(4, 5)), noise(5, 5, 4), ["inner.weight", "inner.bias"]),
    "sorted": (lambda: Sorts(inner=nn.Linear(4, 5), head=nn.Linear(5, 3)), LENGTHS, ["inner.weight", "inner.bias"]),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_hooks_do_not_see_takes_the_slow_way_with_one_warning(name):
    make, x, names = SLOW[name]
    slow_but_exact(make(), (x,), *names)


def test_what_vmap_cannot_follow_is_taken_one_by_one():
    slow_but_exact(Deciding(inner=square()), (noise(5, 3, 4),), "inner.weight", way="computed one example at a time")


def test_vmap_under_dropout_and_in_chunks_bounds_every_example(monkeypatch):
    monkeypatch.setattr("dpft.gradients.CHUNK", 40)
    model, batch = SLOW["functional"][0](), (noise(7, 3, 4),)
    rows, found = per_example_gradients(model, wave, batch), mapped_gradients(model, wave, batch)
    assert all(torch.allclose(found[name], values, rtol=1e-12, atol=1e-12) for name, values in rows.items())
    model.dropout = nn.Dropout(0.5)
    noisy = mapped_gradients(model, lambda m, b: wave(m, (m.dropout(b[0]),)), batch)
    assert all(values.isfinite().all() for values in noisy.values())


def test_a_first_batch_that_shows_nothing_decides_nothing():
    "One example, or the same one many times, cannot show that rows are confused."
    model, batch = TimeFirst(inner=nn.Linear(4, 5)), (noise(5, 6, 4),)
    for first in ((batch[0][:1],), (batch[0][:1].expand(4, -1, -1),)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clipped_sum(model, wave, first, 1.0)
    slow_but_exact(model, batch, "inner.weight", "inner.bias")


@pytest.mark.filterwarnings("ignore")
def test_a_later_batch_may_have_rows_of_fewer_lengths():
    model, x = Packed(inner=nn.Linear(4, 4), rnn=nn.GRU(4, 3, bidirectional=True, batch_first=True), head=nn.Linear(6, 2)), noise(5, 3, 4)
    gradients(model, wave, (x,))
    x[0, 1:] = 0
    agrees(model, wave, (x,))


def test_a_pass_that_stops_when_some_hooks_are_missing_leaves_all_to_the_slow_way(monkeypatch):
    monkeypatch.setattr("dpft.gradients._can_skip", lambda *_: False)
    with pytest.warns(UserWarning, match="head.weight"):
        agrees(SLOW["attention"][0](), wave, (noise(5, 3, 4),))


def test_an_activation_that_flips_by_rounding_does_not_make_a_layer_slow():
    class AtAKink(Net):
        "A unit whose input is rounded to one side of zero in a batch, and to the other alone."

        def forward(self, x):
            return self.head(torch.relu(self.inner(x) + 1e-9 * (len(x) - 1.5)) + x)

    model, batch = AtAKink(inner=square(), head=nn.Linear(4, 3)), (noise(4, 4) * tensor([0.0, 1.0, 1.0, 1.0]),)
    with torch.no_grad():
        model.inner.weight[:, 1:] = 0                  # so all that decides is how many rows stand beside
    assert unseen(model, wave, batch, range(4))[0] == []


# ---- masks, blocks, factors


@pytest.mark.parametrize("family", ["roberta", "gpt2-lm"])  # a table that is looked up, and one that is the output layer too
def test_masked_norms_are_those_of_the_masked_gradients(family):
    model, loss_fn, batch = zoo.build(family)
    batch["input_ids"][:, 2] = batch["input_ids"][:, 1]      # a row that is looked up twice counts as one
    found, oracle = gradients(model, loss_fn, batch), per_example_gradients(model, loss_fn, batch)
    for name, own in oracle.items():
        mask = noise(*own.shape[1:], seed=1) > 0.3
        assert torch.allclose(found.square_norms(name, mask), (own * mask).square().flatten(1).sum(1), rtol=1e-10, atol=1e-24), name


def test_blocks_with_masks_are_bounded_each_by_its_own_bound():
    model, loss_fn, batch = zoo.build("roberta")
    zoo.freeze(model, "no embeddings")
    oracle = per_example_gradients(model, loss_fn, batch)
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masks = {name: noise(*p.shape, seed=i) > 0.3 for i, (name, p) in enumerate(trains.items())}
    rest = {name: ~mask for name, mask in masks.items()}
    blocks = [Block(list(trains.values()), list(chosen.values()), clip=clip) for chosen, clip in ((masks, 0.02), (rest, 0.3))]
    sums, norms = gradients(model, loss_fn, batch).clipped_sum(blocks)
    weak, strong = (flat({name: value * chosen[name] for name, value in oracle.items()}) for chosen in (masks, rest))
    wanted = clip_factor(weak.norm(dim=1), 0.02) @ weak + clip_factor(strong.norm(dim=1), 0.3) @ strong
    assert off(joined(sums), wanted) <= EXACT
    assert off(norms, torch.stack([weak.norm(dim=1), strong.norm(dim=1)], dim=1)) <= EXACT


def test_factors_may_differ_between_parameters():
    model, loss_fn, batch = zoo.build("cnn")
    oracle = per_example_gradients(model, loss_fn, batch)
    factors = {name: noise(5, seed=i) for i, name in enumerate(oracle)}
    found = weighted_sum(model, loss_fn, batch, factors)
    assert off(joined(found), torch.cat([(factors[name] @ rows.flatten(1)) for name, rows in oracle.items()])) <= EXACT


# ---- what is refused


@pytest.mark.parametrize("reduce", [torch.mean, lambda losses: losses[:1], lambda losses: losses[:, None], lambda losses: 1.0,
                                    lambda losses: losses.repeat(2)])
def test_a_loss_of_the_wrong_shape_is_refused_without_saying_how_many_examples_were_drawn(reduce):
    "That number is drawn at random, and what hides an example in a batch."
    model, loss_fn, batch = zoo.build("cnn")
    said = set()
    for rows in (2, 3):
        with pytest.raises(ValueError, match="one loss per example") as error:
            gradients(model, lambda m, b: reduce(loss_fn(m, b)), select_rows(batch, torch.arange(rows)))
        said.add(str(error.value))
    assert len(said) == 1


@pytest.mark.parametrize("call, words", [
    (lambda model, loss, batch: gradients(model, loss, {"text": "a"}), "at least one tensor"),
    (lambda model, loss, batch: gradients(model.requires_grad_(False), loss, batch), "ConvNet has nothing to train"),
    (lambda model, loss, batch: per_example_norms(model, loss, batch, order=3), "order=3")])
def test_what_has_no_gradients_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(*zoo.build("cnn"))


# ---- memory


def saved_bytes(model, run):
    "Bytes that autograd keeps for the backward pass; every storage counts once, parameters do not."
    kept, weights = {}, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("name", zoo.NAMES)
def test_bias_training_keeps_no_more_than_plain_autograd(name):
    model, loss_fn, batch = zoo.build(name)
    zoo.freeze(model, "biases")
    clipped_sum(model, loss_fn, batch, 1.0)  # the check has been made
    fast = saved_bytes(model, lambda: clipped_sum(model, loss_fn, batch, 1.0))
    plain = saved_bytes(model, lambda: per_example_losses(model, loss_fn, batch).sum().backward())
    model.zero_grad()
    zoo.freeze(model, "full")
    clipped_sum(model, loss_fn, batch, 1.0)
    full = saved_bytes(model, lambda: clipped_sum(model, loss_fn, batch, 1.0))
    assert fast <= 1.02 * plain and fast < full


def test_nothing_is_kept_after_the_pass():
    def alive():
        gc.collect()
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))

    model, loss_fn, batch = zoo.build("bert")
    clipped_sum(model, loss_fn, batch, 1.0)
    before = alive()
    clipped_sum(model, loss_fn, batch, 1.0)
    assert alive() == before
    assert reuse_memory() == (platform.libc_ver()[0] == "glibc")


def test_no_leaf_of_a_loss_gets_a_raw_gradient():
    model, loss_fn, batch = zoo.build("cnn")
    scale = nn.Parameter(torch.tensor(2.0))
    clipped_sum(model, lambda m, b: scale * loss_fn(m, b), batch, 1.0)
    assert scale.grad is None and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("freeze_set", ["full", "biases"])
def test_compiled_layers_are_exact_and_no_hook_is_compiled(freeze_set):
    import torch._dynamo

    torch._dynamo.reset()
    model, loss_fn, batch = zoo.build("bert", rows=3)
    zoo.freeze(model.eval(), freeze_set)
    for layer in model.bert.encoder.layer:
        layer.compile(backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=32):
        clipped_sum(model, loss_fn, batch, 1.0)
    agrees(model, loss_fn, batch)
    torch._dynamo.reset()


def test_a_part_in_doubt_beside_one_that_is_not_is_measured_again(monkeypatch):
    """A selection measures many partitions at once, of which some cancel."""
    net = Net(first=nn.Linear(16, 16), second=nn.Linear(16, 16)).double()
    forward = lambda model, batch: model.second(torch.tanh(model.first(batch[0]))).square().sum((1, 2))  # noqa: E731
    inputs = (noise(5, 3, 16),)
    parts = [Partition(name, (layer.weight,)) for name, layer in net.named_children()]
    plain = gradients(net, forward, inputs).norms(2, parts)
    asked = iter([torch.tensor([True] * 5), torch.tensor([False] * 5)])
    monkeypatch.setattr(dpft.norms.Measured, "doubtful", lambda self: next(asked))
    torch.testing.assert_close(gradients(net, forward, inputs).norms(2, parts), plain, rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_takes_the_private_steps_of_the_plain_one(monkeypatch):
    "By the compiler's own graphs of both passes, cut at the hooks; what makes machine code of them is left out, for it takes a minute."
    import torch._dynamo
    from torch._dynamo.convert_frame import input_codes
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    monkeypatch.setattr(dpft.hooks, "STACKED", 0)                                 # each layer is listened to by itself
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))

    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def after_three_steps(model):
        engine = dpft.Engine(model, losses, dpft.Full(), data, noise_multiplier=1.0, delta=1e-5, accountant="rdp", clip=0.1,
                             batch_size=32, steps=3, seed=1)
        optimizer = torch.optim.SGD(engine.parameters(), 1.0)
        for step in engine:
            step.take(optimizer)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    torch._dynamo.reset()
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=32):
        found = after_three_steps(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    seen = {code.co_name for ref in input_codes.seen if (code := ref()) is not None and code.co_filename == dpft.hooks.__file__}
    assert not seen                                # it compiled a function for every layer's hook, and gave up when there were many
    assert torch.allclose(found, after_three_steps(copy.deepcopy(plain)), rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


# ---- small layers are asked together


class Alike(nn.Module):
    "Layers of few kinds, one used twice, one not at all, one in part frozen; norms differ in their eps."

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.norms = nn.ModuleList(nn.LayerNorm(4, eps=eps) for eps in (1e-5, 0.5, 0.5))
        self.scales = nn.ModuleList(nn.RMSNorm(4) for _ in range(2))
        self.turned = nn.ModuleList(transformers.pytorch_utils.Conv1D(4, 4) for _ in range(2))
        self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.linears[1].weight.requires_grad_(False)
        self.double()

    def forward(self, x):
        for layer in (*self.linears, *self.norms, *self.turned, *self.scales, self.linears[0]):
            x = x + layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("most", [dpft.norms.STACKED, 0])
def test_small_layers_are_asked_together_and_large_ones_alone(most, monkeypatch):
    model, batch = Alike(), (torch.randn(3, 2, 4).double(),)
    rows_of = []
    rule = dpft.layer_rules.RULES[nn.Linear]
    def bias(module, gradient):
        rows_of.append(len(gradient))
        return rule.bias(module, gradient)
    monkeypatch.setattr(dpft.hooks, "STACKED", most)
    monkeypatch.setitem(dpft.layer_rules.RULES, nn.Linear, replace(rule, bias=bias))
    agrees(model, wave, batch)
    assert (max(rows_of) == 5 * 3) == (most > 0)   # four that train whole, of which one is used twice


def test_units_and_half_precision_of_small_layers_asked_together():
    model, x = Alike(), torch.randn(4, 2, 4).double()
    index, clip = torch.tensor([0, 0, 1, 2]), 0.05
    rows = flat(per_example_gradients(model, wave, (x,)))
    people = torch.zeros(3, rows.shape[1], dtype=rows.dtype).index_add_(0, index, rows)
    wanted = clip_factor(people.norm(dim=1), clip) @ people
    assert off(joined(clipped_sum(model, wave, (x,), clip, groups=index)), wanted) <= EXACT
    lowered = clipped_sum(model.float(), Lowered(wave), (x.float(),), clip, groups=index)
    assert off(joined(lowered).double(), wanted) <= 0.05


def test_an_input_changed_after_a_small_layer_has_read_it_is_refused():
    class Rude(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.first(x) * 1
            out = self.second(hidden)
            hidden.mul_(2)
            return out

    with pytest.raises(RuntimeError, match="changed in place"):
        dpft.hooks.Hooks(Rude()).run(lambda m, b: m(b[0]).sum((1,)), (torch.randn(3, 4),))


def test_a_batch_of_one_takes_the_fast_way_of_those_before(monkeypatch):
    "A table of positions is looked up once for the whole batch; with one row that looks like a look-up for each."
    model, loss_fn, batch = zoo.build("gpt2", rows=3)
    zoo.freeze(model, "full")
    gradients(model, loss_fn, batch)
    one = select_rows(batch, tensor([1]))
    rows = flat(per_example_gradients(model, loss_fn, one))
    monkeypatch.setattr(dpft.gradients, "per_example_gradients", None)
    assert off(joined(clipped_sum(model, loss_fn, one, 0.1)), clip_factor(rows.norm(dim=1), 0.1) @ rows) <= EXACT
