"""The identity of a run: whatever changes a sum changes the secret of a seeded run; what cannot be named leaves the digest in its keys."""

import functools
import importlib.util
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification
from zoo import toy

import dpft
from dpft import engine as engine_room
from dpft import identity as identity_room
from dpft.baselines import Full
from dpft.composition import Chain, Then
from dpft.datasets import Public, TensorData
from dpft.identity import identity, name_of_code, name_of_optimizer
from dpft.scores import NoisyAccuracy
from dpft.settings import Settings

NUMBERS = itertools.count()


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *(layers or (nn.Tanh(),)), nn.Linear(8, 3))


def store(model=None, method=None, loss_fn=None, **settings):
    "What keeps the secret of a seeded run with a loop of one's own that says what it does."
    settings = dict(noise_multiplier=1.0, batch_size=20, steps=4, clip=0.5, seed=0, loop="plain SGD") | settings
    return dpft.Engine(model or net(), loss_fn or zoo.image_loss, method or Full(), toy(), **settings).store


def written(folder, text, known=True):
    "A module that somebody wrote into a file of the same name each time."
    path = folder / f"version{next(NUMBERS)}" / "own.py"
    path.parent.mkdir()
    path.write_text("import torch\nfrom torch import nn\nimport torch.nn.functional as F\nfrom dpft import Method\n" + text)
    spec = importlib.util.spec_from_file_location("own_code_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    if known:
        sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def forget():
    yield
    sys.modules.pop("own_code_of_a_test", None)


HALF = """
SHARE = 0.5

def kept(parameters):
    return parameters[:int(len(parameters) * SHARE)]

class Half(Method):
    least = 1
    def __init__(self, k=2): self.k = k
    def choose(self, context, among): return kept(among)[-self.k:]
"""


@pytest.mark.parametrize("known", [True, False])
def test_another_version_of_ones_own_method_is_another_run(tmp_path, known):
    changes = [("[-self.k:]", "[:self.k]"), ("SHARE = 0.5", "SHARE = 0.75"), ("least = 1", "least = 2"),
               ("return parameters[:", "return parameters[0:")]
    texts = HALF, HALF, *(HALF.replace(*change) for change in changes)
    first, again, *others = (written(tmp_path, text, known).Half() for text in texts)
    assert {repr(method) for method in (first, again, *others)} == {"Half(k=2)"}
    run = store(method=first)
    assert run.portable and run.secret == store(method=again).secret
    assert len({run.secret, *(store(method=other).secret for other in others)}) == 5
    for within in (lambda one: Chain(Full(), one), lambda one: Then(Full(), 2, one)):
        named = [name_of_code(within(method)) for method in (first, again, others[1])]
        assert named[0] == named[1] != named[2] and named[0][1]


def test_a_method_whose_code_cannot_be_read_keeps_the_digest_in_its_keys():
    space = {"Full": Full}                        # as in a session whose lines are not kept
    exec("class Unread(Full):\n    def start(self, context): super().start(context)\n", space)
    captured = 3

    class Captures(Full):
        def start(self, context):
            assert captured
            super().start(context)

    assert not store(method=space["Unread"]()).portable and not store(method=Captures()).portable
    assert not name_of_code(Then(Full(), 2, space["Unread"]()))[1]


class Opaque:
    def __rmul__(self, x): return x


class Takes(Full):
    def __init__(self, what): self.what = what


def test_an_argument_of_a_method_enters_by_what_it_is_and_not_by_how_it_is_printed():
    rows = [torch.zeros(5000), torch.zeros(5000)]
    rows[1][2500] = 1                           # in the part of a tensor that is not printed
    assert repr(Takes(rows[0])) == repr(Takes(rows[1]))
    assert store(method=Takes(rows[0])).secret != store(method=Takes(rows[1])).secret
    public = [dpft.Public(toy(20, seed), "a web page") for seed in (0, 1)]
    assert repr(Takes(public[0])) == repr(Takes(public[1]))
    assert store(method=Takes(public[0])).secret != store(method=Takes(public[1])).secret
    assert store(method=Takes(0.5)).portable and store(method=Takes(net)).portable
    assert not store(method=Takes(object())).portable and not store(method=Takes(lambda x: x)).portable


def test_code_whose_file_was_edited_since_keeps_the_digest_in_its_keys(tmp_path):
    known = store(method=written(tmp_path, HALF).Half())
    for change in (("[-self.k:]", "[:self.k]"), ("SHARE = 0.5", "# more\nSHARE = 0.5"), (HALF, "(")):
        own = written(tmp_path, HALF)
        method = own.Half()
        assert store(method=method).secret == known.secret and known.portable
        Path(own.__file__).write_text(Path(own.__file__).read_text().replace(*change))
        run = store(method=method)
        assert not run.portable and run.secret != known.secret
    assert store(method=written(tmp_path, HALF).Half()).secret == known.secret


WORDS = """
from dpft import Full
def weigh(x): return x
class Words(Full):
    def __init__(self, what=None, **more): self.what, self.more = what, more
"""


def test_sets_and_functions_enter_alike_in_every_process(tmp_path):
    forth, back = [set(members) for members in ((0, 8), (8, 0))]
    assert [*forth] != [*back]                      # as strings are, by the hashes of each process
    given = {"{0, 8}": lambda numbers, _: numbers, "frozenset({0, 8})": lambda numbers, _: frozenset(numbers),
             "<function weigh>": lambda _, own: own.weigh, "{(0, 'a')}": lambda _, own: {(0, "a")}}
    secrets = set()
    for said, argument in given.items():
        runs = []
        for numbers in (forth, back):
            own = written(tmp_path, WORDS)
            method = own.Words(argument(numbers, own), more=argument(numbers, own))
            assert repr(method) == f"Words(what={said}, more={said})"
            runs.append(store(method=method))
        assert runs[0].portable and runs[0].secret == runs[1].secret
        secrets.add(runs[0].secret)
    assert len(secrets) == len(given)


def test_a_model_that_computes_something_else_is_another_run():
    "With equal weights: another layer without weights, another constant, other buffers."
    plain = store(net()).secret
    assert store(net(nn.Tanh())).secret == plain
    assert len({plain, store(net(nn.ReLU())).secret, store(net(nn.LeakyReLU(0.1))).secret, store(net(nn.LeakyReLU(0.2))).secret}) == 4
    norms = [net(nn.BatchNorm1d(8)) for _ in range(2)]
    norms[1][2].running_mean += 1
    fixed = [dpft.models.freeze_batchnorm(model) for model in norms]
    assert store(fixed[0]).secret != store(fixed[1]).secret


LAYER = """
class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x): return x * self.scale
"""


def test_ones_own_layer_enters_by_its_code_and_by_its_constants(tmp_path):
    first, again, other = (written(tmp_path, text).Scaled for text in (LAYER, LAYER, LAYER.replace("x * self", "x / self")))
    one = store(net(first(2.0)))
    assert one.portable and one.secret == store(net(again(2.0))).secret
    assert len({one.secret, store(net(other(2.0))).secret, store(net(first(3.0))).secret}) == 3
    assert store(net(first(torch.tensor(2.0)))).secret != store(net(first(torch.tensor(3.0)))).secret
    assert not store(net(first(Opaque()))).portable


def test_a_loss_enters_with_what_it_calls(tmp_path):
    text = ("def tempered(x): return x / 2\n"
            "def loss(model, batch): return F.cross_entropy(tempered(model(batch[0])), batch[1], reduction='none')\n")
    first, again, other = (written(tmp_path, version).loss for version in (text, text, text.replace("/ 2", "/ 3")))
    assert name_of_code(first) == name_of_code(again) != name_of_code(other) and name_of_code(first)[1]
    assert store(loss_fn=first).secret != store(loss_fn=other).secret


def test_the_version_of_the_package_is_part_of_the_identity(monkeypatch):
    now = store().secret
    assert store().secret == now
    monkeypatch.setattr(engine_room, "__version__", "0.0.0")
    assert store().secret != now


def test_the_model_is_hashed_only_where_somebody_compares_it(tmp_path, monkeypatch):
    hashed, honest = [], identity_room.model_fingerprint
    monkeypatch.setattr(identity_room, "model_fingerprint", lambda model: hashed.append(model) or honest(model))
    store(seed=None)
    store(seed=None, ledger=tmp_path / "ledger.sqlite")
    assert hashed == []
    store(seed=3)
    assert len(hashed) == 1
    store(seed=None, checkpoint=tmp_path / "run").close()
    assert len(hashed) == 2


def test_one_pass_tells_what_changes_a_sum_from_what_only_a_continued_run_must_agree_with():
    found = identity(Settings(epsilon=1.0, average=0.9))
    assert found.sums["epsilon"] == "1.0" and found.run == {"average": "0.9"} and "average" not in found.sums
    assert found.complete and not identity(Settings(loss_fn=lambda model, batch: batch)).complete
    assert "learning_rate" not in identity(Settings(), ("engine",)).sums


def test_every_entry_of_a_dictionary_is_read(tmp_path):
    "Also the third, and those of a keyword-only default and of `partial`."
    for size in (2, 3, 6):
        plain = {f"k{i}": float(i) for i in range(size)}
        assert len({name_of_code(plain), *(name_of_code({**plain, k: 9.0}) for k in plain)}) == size + 1 and name_of_code(plain)[1]
    made = [functools.partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay) for decay in (0.0, 0.0, 0.5)]
    first, again, other = map(name_of_optimizer, made)
    assert first == again != other and first[1]
    losses = [functools.partial(focal, temperature=1.0, smoothing=0.1, gamma=gamma) for gamma in (0.0, 0.0, 4.0)]
    first, again, other = (store(loss_fn=loss) for loss in losses)
    assert first.portable and first.secret == again.secret != other.secret


def focal(model, batch, temperature=1.0, smoothing=0.0, gamma=0.0):
    losses = F.cross_entropy(model(batch[0]) / temperature, batch[1], label_smoothing=smoothing, reduction="none")
    return (1 - (-losses).exp())**gamma * losses


def test_a_list_enters_by_what_it_holds_and_may_hold_itself():
    pair, ring = [1, 2], [1]
    ring.append(ring)
    assert name_of_code([pair, pair]) == name_of_code([[1, 2], [1, 2]]) != name_of_code([[1, 2], []])
    assert name_of_code(ring)[1] and name_of_code({"a", "b"}) == name_of_code({"b", "a"}) != name_of_code({"a", "c"})
    shared = [net(), net()]
    assert name_of_code([*shared, shared[0]]) != name_of_code([*shared, shared[1]])


class Weighted(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", torch.tensor(weight), persistent=False)

    def forward(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1], weight=self.weight, reduction="none")


class Scale(nn.Module):
    def __init__(self, how, scale):
        super().__init__()
        if how == "buffer":
            self.register_buffer("scale", torch.tensor(scale), persistent=False)
        else:
            self.scale = {"array": lambda: np.array([scale]), "number": lambda: np.float32(scale)}[how]()

    def forward(self, x): return x * torch.as_tensor(self.scale, dtype=torch.float32)


TEACHER = nn.Linear(16, 3)
CRITERION = nn.CrossEntropyLoss(weight=torch.ones(3), reduction="none")


def distilled(model, batch): return F.cross_entropy(model(batch[0]), TEACHER(batch[0].flatten(1)).detach().softmax(1), reduction="none")


def weighted(model, batch): return CRITERION(model(batch[0]), batch[1])


def test_the_tensors_of_every_module_that_is_reached_are_read(monkeypatch):
    first, again, other = (store(loss_fn=Weighted(weight)) for weight in ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 3.0]))
    assert first.portable and first.secret == again.secret != other.secret
    for how in ("buffer", "array", "number"):
        first, again, other = (store(net(Scale(how, scale))) for scale in (1.0, 1.0, 2.0))
        assert first.portable and first.secret == again.secret != other.secret, how
    for loss, name, value in [(distilled, "TEACHER", nn.Linear(16, 3)),
                              (weighted, "CRITERION", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 3.0]), reduction="none"))]:
        before = store(loss_fn=loss)
        monkeypatch.setattr(sys.modules[__name__], name, value)
        assert before.portable and store(loss_fn=loss).secret != before.secret


def test_a_configuration_is_read_whole_and_not_by_where_it_lies(tmp_path):
    def llama(**more):
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                                          num_attention_heads=2, pad_token_id=0, **more))
    first, again, other = llama(), llama(), llama(rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    assert name_of_code(first) == name_of_code(again) != name_of_code(other) and name_of_code(first)[1]
    named = name_of_code(llama())
    first.save_pretrained(tmp_path)
    assert named == name_of_code(first)
    one, two = (name_of_code(LlamaForSequenceClassification.from_pretrained(tmp_path)) for _ in range(2))
    assert one == two and one[1]


@pytest.mark.parametrize("name", [*zoo.NAMES, "llama", "lstm"])
def test_ordinary_models_are_read_whole(name):
    made = [nn.LSTM(4, 4) if name == "lstm" else zoo.build(name)[0] for _ in range(2)]
    weights = [list(model.parameters()) for model in made]
    first, again = map(name_of_code, made, weights)
    assert first == again and first[1]


def halved(module, grad_input, grad_output): return (grad_input[0] * 0.5,)


def tripled(module, inputs): return 3 * module.weight.new_tensor(1)


def test_what_trains_at_the_start_hooks_and_a_forward_of_ones_own_are_read():
    def frozen(model): model[1].requires_grad_(False)
    def forward(model): model[1].forward = types.MethodType(tripled, model[1])
    def hook(model): model[1].register_full_backward_hook(halved)
    def of_tensor(model): model[1].weight.register_hook(torch.neg)
    def half(model): model.bfloat16()
    names = [name_of_code(net())]
    for change in (frozen, forward, hook, of_tensor, half):
        model = net()
        change(model)
        weights = list(model.parameters())
        names.append(name_of_code(model, weights))
    names[0] = name_of_code(model := net(), list(model.parameters()))
    assert len(set(names)) == 6 and all(sure for _, sure in names)
    model = net()
    model[1].forward = lambda x: x[:, :8]    # what the next layer takes
    assert not store(model).portable
    starts = [net(), net()]
    frozen(starts[1])
    assert len({store(model, dpft.baselines.Trainable()).secret for model in starts}) == 2


def test_an_attribute_that_nobody_can_read_keeps_the_digest_in_its_keys():
    "Of a library's layer too; but the name still tells what can be read."
    models = net(), net(nn.ReLU())
    for model in models:
        model[1].kept = object()
    stores = [store(model) for model in models]
    assert not any(one.portable for one in stores) and stores[0].secret != stores[1].secret
    model = net()
    model[1].log = logging.getLogger(__name__)
    assert store(model).portable


def test_an_optimizer_enters_by_its_groups_and_by_what_it_remembers():
    def made(rate, swapped=False, steps=0):
        model = net()
        parts = [model[1], model[3]][::-1 if swapped else 1]
        rates = [{"params": part.parameters(), "lr": lr} for part, lr in zip(parts, (0.1, rate), strict=True)]
        optimizer = torch.optim.SGD(rates, lr=0.1, momentum=0.9)
        for _ in range(steps):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        return model, optimizer
    named = [name_of_optimizer(made(*given)[1]) for given in [(0.1,), (0.1,), (0.2,), (0.1, False, 1)]]
    assert named[0] == named[1] and len(set(named)) == 3 and all(sure for _, sure in named)
    groups = [identity_room.names_by_group(optimizer, model) for model, optimizer in (made(0.2), made(0.2, True))]
    assert groups[0] == groups[1][::-1] == [["1.weight", "1.bias"], ["3.weight", "3.bias"]]


HOOK = "def hook(optimizer, *rest):\n    for p in optimizer.param_groups[0]['params']: p.data.mul_({})\n"


@pytest.mark.parametrize("table", ["step_pre", "step_post", "state_dict_pre", "load_state_dict_pre"])
def test_an_optimizer_enters_by_its_hooks(tmp_path, table):
    def made(hook=None):
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        if hook is not None:
            getattr(optimizer, f"register_{table}_hook")(hook)
        return name_of_optimizer(optimizer)
    first, again, other = (made(written(tmp_path, HOOK.format(by)).hook) for by in (0.5, 0.5, 0.6))
    assert first == again and len({made(), first, other}) == 3 and first[1] and made()[1]
    by = 0.5
    assert not made(lambda optimizer, *rest: optimizer.param_groups[0]["params"][0].data.mul_(by))[1]


def test_a_function_that_scores_the_model_during_the_run_leaves_the_identity_incomplete():
    def changing(model):
        model.eval()
        return {"accuracy": 0.0}
    data = TensorData(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))
    assert not identity(Settings(evaluate=changing, evaluate_every=1)).complete
    for known in (Settings(evaluate=changing), *(Settings(evaluate=one, evaluate_every=1)
                                                 for one in (data, Public(data, "made for this test"), NoisyAccuracy(data)))):
        assert identity(known).complete and identity(known).sums == identity(Settings()).sums


@pytest.mark.parametrize("body", ["float(os.environ['AA'])", "float(os.getenv('AA', 1))", "float(open('scale.txt').read())",
                                  "hash('a') % 7", "os.getpid()", "uuid.uuid4().int", "id(model)", "secrets.randbits(3)",
                                  "look('AA', 1)", "helped()", "float(os.path.Path('scale').read_text())", "numpy.load('scale.npy')",
                                  "model.random()"])
def test_a_function_that_reads_what_is_around_it_leaves_the_identity_incomplete(tmp_path, body):
    text = f"import os\nfrom os import getenv as look\ndef helped(): return os.environ\ndef loss(model, batch): return {body}\n"
    assert not name_of_code(written(tmp_path, text).loss)[1]
    assert name_of_code(written(tmp_path, text.replace(f"return {body}", "return os.sep")).loss)[1]



def by_rows(items):
    return torch.stack([torch.as_tensor(image) for image, _ in items]), torch.tensor([int(label) for _, label in items])


def test_a_collate_fn_leaves_the_identity_incomplete_as_a_data_set_of_ones_own_does():
    """It may hash words or read files: two runs of one seed had other sums under the same noise, and their difference was bare."""
    known = identity(Settings(collate_fn=by_rows))
    assert name_of_code(by_rows)[1] and not known.complete and known.sums != identity(Settings()).sums
    assert store().portable and not store(collate_fn=by_rows).portable


def test_selected_columns_are_plain_where_their_table_is():
    from dpft.identity import plain_data
    from dpft.texts import Selected
    rows = [{"x": torch.zeros(2), "label": 0, "note": "unused"}]
    own = type("Own", (), {"__len__": lambda self: 1, "__getitem__": lambda self, i: {"x": torch.rand(2), "label": 0}})()
    own_columns = type("Own", (), {"names": ["x"], "table": rows, "__getitem__": lambda self, i: {"x": torch.rand(2)}})()
    assert not plain_data(own_columns)
    assert plain_data(Selected(rows, {"x": "x", "label": "labels"})) and not plain_data(Selected(own, {"x": "x", "label": "labels"}))


def test_a_dataclass_enters_whole(tmp_path):
    """Names that a configuration may change without meaning are anybody's in a dataclass."""
    text = ("from dataclasses import dataclass\n@dataclass\nclass Scaled:\n    dtype: float = 1.0\n"
            "    def __call__(self, model, batch): return self.dtype * model(batch[0])\n")
    own = written(tmp_path, text)
    assert name_of_code(own.Scaled(1.0)) != name_of_code(own.Scaled(2.0)) and name_of_code(own.Scaled(1.0)) == name_of_code(own.Scaled(1.0))


CONSTANTS = """
ALPHA = 1.0
def helped(x): return x * ALPHA
"""


def test_what_a_name_stands_for_when_the_run_begins_is_read(tmp_path):
    own = written(tmp_path, CONSTANTS)
    path = tmp_path / "loss_of_a_test.py"
    path.write_text("def loss(model, batch): return own.helped(model(batch[0])) * own.ALPHA * loss.by\n")
    spec = importlib.util.spec_from_file_location("loss_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.own, module.loss.by = own, 1.0
    names = [name_of_code(module.loss)]
    own.ALPHA = 2.0
    names.append(name_of_code(module.loss))
    module.loss.by = 2.0
    names.append(name_of_code(module.loss))
    assert len(set(names)) == 3 and all(sure for _, sure in names)


def test_layout_and_comments_change_nothing(tmp_path):
    texts = ("def loss(model, batch):\n    'One.'\n    return F.relu(model(batch[0]), inplace=False)  # so\n",
             "def loss(model, batch):\n    'Another.'\n\n    return F.relu(\n        model(batch[0]),\n        inplace=False)\n",
             "def loss(model, batch):\n    'One.'\n    return F.relu(model(batch[0]), inplace=True)  # so\n")
    first, again, other = (name_of_code(written(tmp_path, text).loss) for text in texts)
    assert first == again != other and first[1]


def test_a_wrapper_of_ones_own_is_not_taken_for_what_it_wraps(tmp_path):
    text = ("import functools\ndef loss(model, batch): return model(batch[0]).mean(1)\n"
            "def times(k):\n    @functools.wraps(loss)\n    def wrapper(*given): return k * loss(*given)\n    return wrapper\n"
            "two, three = times(2), times(3)\n@torch.no_grad()\ndef still(model, batch): return loss(model, batch)\n")
    own = written(tmp_path, text)
    assert not name_of_code(own.two)[1] and not name_of_code(own.three)[1]
    assert name_of_code(own.loss)[1] and name_of_code(own.still)[1] and name_of_code(F.max_pool2d)[1]


FIRST = "    epsilon: float | None = knob("
KNOB = '    shade: float = knob(0.5, "darkness of a test")\n'
TRIED = """
import inspect, json, sys
import torch, dpft, dpft.cli
from dpft.datasets import TensorData

def store(**knobs):
    rows = TensorData(torch.zeros(40, 2, 2), torch.arange(40) % 3)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return dpft.Engine(model, None, dpft.Full(), rows, noise_multiplier=1.0, batch_size=20, steps=1, seed=0, loop="none", **knobs).store

torch.manual_seed(0)
secrets = {shade: (torch.manual_seed(0), store(shade=shade).secret.hex())[1] for shade in (0.5, 0.75)}
torch.manual_seed(0)
usual = store().secret.hex()
sys.argv = ["dpft", "train", "--data", "digits", "--model", "mlp", "--limit", "100", "--method", "BiTFiT", "--steps", "1", "--epsilon", "8",
            "--accountant", "rdp", "--no-progress", "--shade", "0.75", "--ledger", sys.argv[1]]
try:
    dpft.cli.main()
except SystemExit as end:
    assert not end.code, end.code
with dpft.Ledger(sys.argv[-1]) as ledger:
    recorded = ledger.plan(ledger.runs()[0])["knobs"]
signatures = [inspect.signature(one).parameters["shade"].default for one in (dpft.fine_tune, dpft.Engine)]
print("\\n" + json.dumps({"file": dpft.__file__, "secrets": secrets, "usual": usual, "recorded": recorded, "signatures": signatures}))
"""


def test_a_new_knob_is_one_line(tmp_path):
    "It is in the signatures, the command, the record and the identity."
    package = Path(dpft.__file__).parent
    shutil.copytree(package, tmp_path / "dpft", ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "dpft" / "settings.py"
    text = settings.read_text(encoding="utf-8")
    assert text.count(FIRST) == 1
    settings.write_text(text.replace(FIRST, KNOB + FIRST), encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, "-c", TRIED, str(tmp_path / "ledger.sqlite")], cwd=tmp_path, capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": paths})
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(tmp_path) and found["signatures"] == [0.5, 0.5]
    assert found["secrets"]["0.5"] == found["usual"] != found["secrets"]["0.75"]
    assert found["recorded"]["shade"] == "0.75"


def test_a_method_that_keeps_an_argument_under_the_name_of_its_own_function_is_read_once():
    "Its bound function leads back to the method, without an end."
    class Circular(dpft.Method):
        def __init__(self, blocks):
            self.own = blocks
    name, complete = name_of_code(Circular(None))
    assert name and (name, complete) == name_of_code(Circular(None))


class Climbing(torch.optim.Optimizer):
    "An optimizer of one's own, below no class of torch's that moves parameters."
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(one.grad, alpha=group["lr"])


def test_an_optimizer_of_ones_own_is_not_known_by_its_name_alone():
    "A seed would hide two sums behind one noise, were its code changed."
    other = type("Climbing", (Climbing,), {"step": lambda self: None, "__module__": Climbing.__module__})
    assert name_of_optimizer(Climbing) != name_of_optimizer(other)
    made = name_of_optimizer(Climbing([torch.nn.Parameter(torch.ones(2))]))
    assert not made[1] and not identity(Settings(optimizer=Climbing([torch.nn.Parameter(torch.ones(2))]))).complete


def test_callbacks_leave_the_identity_incomplete_as_classes_too():
    from transformers import ProgressCallback
    assert identity(Settings()).complete and identity(Settings(callbacks=[])).complete
    assert not identity(Settings(callbacks=[ProgressCallback])).complete


def test_the_code_of_a_named_tuple_of_ones_own_is_read(tmp_path, monkeypatch):
    "Only what namedtuple itself has generated is left out."
    monkeypatch.syspath_prepend(tmp_path)
    source = """
from collections import namedtuple
from typing import NamedTuple
Plain = namedtuple("Plain", "a b")
class Loss(NamedTuple):
    temperature: float = {default}
    def __call__(self, model, batch):
        return {factor} * model(batch)
class Child(namedtuple("Base", "a")):
    @property
    def twice(self): return {factor} * self.a
"""
    found = []
    for number, (factor, default) in enumerate([(1, 1.0), (2, 1.0), (1, 2.0)]):
        (tmp_path / f"own_tuples_{number}.py").write_text(source.format(factor=factor, default=default))
        module = importlib.import_module(f"own_tuples_{number}")
        for made in (module.Loss, module.Child, module.Plain):
            made.__module__ = "own_tuples"
        found.append([name_of_code(one) for one in (module.Loss(1.0), module.Child(1), module.Plain(1, 2))])
    assert all(complete for named in found for _, complete in named)
    first, factors, defaults = ([name for name, _ in named] for named in found)
    assert first[0] != factors[0] and first[1] != factors[1] and first[2] == factors[2] == defaults[2]
    assert first[0] != defaults[0]
