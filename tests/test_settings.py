"""The identity of a run: whatever changes a sum changes the secret of a seeded run; what cannot be named leaves the digest in its keys."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from torch import nn
from zoo import toy

import dpft
from dpft import engine as engine_room
from dpft.baselines import Full
from dpft.composition import Chain, Then
from dpft.settings import Settings, identity, name_of_code

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
               ("return parameters[:", "return parameters[-")]
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
    hashed, honest = [], engine_room.model_fingerprint
    monkeypatch.setattr(engine_room, "model_fingerprint", lambda model: hashed.append(model) or honest(model))
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
