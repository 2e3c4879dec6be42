"""Wrong inputs, as people type them: each ends in one sentence that names the thing, and nothing is charged or lost."""



import pytest
import torch
import transformers as hf
from torch import nn

import dpft
from dpft.data import Task, shared_rows
from dpft.ledger import Ledger
from dpft.scores import NoisyAccuracy

DIGITS = {"--data": "digits", "--model": "mlp", "--limit": "60", "--steps": "1", "--accountant": "rdp", "--epsilon": "4",
          "--score": "none"}


@pytest.fixture(autouse=True, scope="module")
def quick():
    "The same few digits for every command."
    from dpft.book import tasks
    kept, load = {}, tasks.load_data
    def once(name, *rest, **more):
        key = repr((name, rest, sorted(more.items())))
        if name != "digits":
            return load(name, *rest, **more)
        if key not in kept:
            kept[key] = load(name, *rest, **more)
        return kept[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "load_data", once)
        yield


def one_sentence(status, out, err, said):
    """One line of the program's own, whoever found the mistake; libraries may have warned above it."""
    lines = [line for line in err.splitlines() if line.startswith("dpft: ")]
    assert status in (1, 2) and len(lines) == 1 and lines[0] == err.splitlines()[-1] and said in lines[0], err
    assert not any(word in err + out for word in ("Traceback", "Usage:", "╭"))


def nothing_charged(folder):
    """What never ran has left no run in the ledger, if there is one."""
    path = folder / "book.sqlite"
    return not path.exists() or not Ledger(path, read_only=True).runs()


def train_words(changed):
    words = {name: value if isinstance(value, list) else [value] for name, value in {**DIGITS, **changed}.items()}
    typed = ((name, value) for name, values in words.items() for value in values if value is not None)
    return [str(part) for name, value in typed for part in ((name, value) if value != "" else (name,))]


TRAIN = [  # options of `dpft train`, and what the sentence says
    ({"--epsilon": "0"}, "epsilon=0"), ({"--epsilon": "-1"}, "epsilon=-1"), ({"--epsilon": "nan"}, "epsilon=nan"),
    ({"--epsilon": None}, "either epsilon or noise_multiplier"),
    ({"--noise-multiplier": "1"}, "either epsilon or noise_multiplier"),
    ({"--noise-multiplier": "0", "--epsilon": None}, "noise_multiplier=0"),
    ({"--delta": "0"}, "delta=0"), ({"--delta": "1"}, "delta=1"), ({"--delta": "0.5"}, "below 1/60"),
    ({"--clip": "0"}, "clip=0"), ({"--clip": "-1"}, "clip=-1"), ({"--clip": "inf"}, "clip=inf"),
    ({"--clipping": "soft"}, "clipping='soft'"), ({"--accountant": "magic"}, "accountant='magic'"),
    ({"--batch-size": "0"}, "batch_size=0"), ({"--batch-size": "61"}, "batch_size=61"),
    ({"--steps": "0"}, "steps=0"), ({"--steps": "-3"}, "steps=-3"), ({"--epochs": "0", "--steps": None}, "epochs=0"),
    ({"--epochs": "inf", "--steps": None}, "epochs=inf"),
    ({"--learning-rate": "0"}, "learning_rate=0"), ({"--learning-rate": "inf"}, "learning_rate=inf"),
    ({"--weight-decay": "-1"}, "weight_decay=-1"), ({"--warmup": "-1"}, "warmup=-1"),
    ({"--schedule": "step"}, "step is not a valid SchedulerType"),
    ({"--optimizer": "lion"}, "optimizer='lion'"), ({"--average": "1"}, "average=1"), ({"--precision": "fp16"}, "precision='fp16'"),
    ({"--physical-batch-size": "0"}, "physical_batch_size=0"), ({"--public-size": "0"}, "public_size=0"),
    ({"--unit-cap": "0"}, "unit_cap=0"),
    ({"--unit": "writer"}, "no column 'writer'"), ({"--unit-cap": "2"}, "unit_cap=2"), ({"--cache": "-1"}, "cache=-1"),
    ({"--cache": "inf"}, "cache=inf"), ({"--method": "Method"}, "Method"), ({"--method": "dp-frost", "--option": "ratio=x"}, "dp-frost"),
    ({"--limit": "0"}, "limit must be at least 1"), ({"--method": "bitft"}, "did you mean bitfit"),
    ({"--method": "my.py"}, "unknown method 'my.py'"), ({"--method": "my.own.Method"}, "unknown method 'my.own.Method'"),
    ({"--method": "nowhere.py:Mine"}, "nowhere.py cannot be imported"), ({"--option": "ratio"}, "name=value"),
    ({"--option": "ratio=1"}, "no option 'ratio'"), ({"--method": "dp-frost", "--option": "ratio=2"}, "ratio=2"),
    ({"--model": "mpl"}, "mlp"), ({"--model": "minilm"}, "classifies texts"), ({"--model": "./nowhere"}, "./nowhere"),
    ({"--data": "digts"}, "did you mean digits"), ({"--data": "nothing.csv"}, "nothing.csv"), ({"--score": "train"}, "--score train"),
    ({"--score": "test"}, "no test part"), ({"--device": "abacus"}, "no such device"), ({"--device": "cuda:9"}, "no such device"),
    ({"--evaluate-every": "0"}, "evaluate_every=0"), ({"--evaluate-every": "1"}, "without evaluate="),
    ({"--checkpoint-every": "0"}, "checkpoint_every=0"),
    ({"--epsilon": "inf", "--secure-mode": ""}, "secure_mode=True with epsilon=inf"),
    ({"--checkpoint-every": "1"}, "checkpoint_every=1 does nothing without checkpoint="),
    ({"--who": "Ann", "--ledger": None}, "--who does nothing without --ledger"),
    ({"--overwrite": "", "--output": None}, "overwrite=True does nothing without output="),
    ({"--freeze-batchnorm": ""}, "--freeze-batchnorm does nothing to --model mlp"),
    ({"--classes": "pos"}, "--classes 'pos': name two"), ({"--classes": "a,,b"}, "--classes 'a,,b': name two"),
    ({"--method": "lora", "--option": "rank=abc"}, "--option rank=abc of method lora: give a whole number"),
    ({"--method": "lora", "--option": "seed=1.5"}, "--option seed=1.5 of method lora: give a whole number"),
    ({"--method": "lora", "--option": "alpha=[1]"}, "--option alpha=[1] of method lora: give a number"),
    ({"--method": "lora", "--option": "targets=['query','value']"}, "a list is written as JSON, such as"),
    ({"--method": "lora", "--option": "targets=[query,value]"}, "--option targets=[query,value]: a list is written as JSON"),
    ({"--method": "lora", "--option": "targets=query,value"}, """'targets=["query", "value"]'"""),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed,said", TRAIN, ids=[" ".join(map(str, sum(changed.items(), ()))) for changed, _ in TRAIN])
def test_train_refuses_in_one_sentence_and_charges_nothing(run, tmp_path, changed, said):
    places = {"--ledger": tmp_path / "book.sqlite", "--output": tmp_path / "saved"}
    status, out, err = run("train", *train_words({**places, **changed}), "--no-progress")
    one_sentence(status, out, err, said)
    assert nothing_charged(tmp_path) and not [*tmp_path.glob("saved/*")]


def csv(text):
    return lambda folder: [(folder / f"{part}.csv").write_bytes(text) for part in ("train", "validation")]


FILES = [  # what lies in the folder of a data set
    (csv(b"text,label\n"), "no rows"), (csv(b"text,text,label\na,b,0\nc,d,1\n"), "text"),
    (csv(b"text,label\na b,0.5\nc d,1.5\n"), "numbers rather than classes"),
    (csv(b"text,label\na b,\nc d,1\n"), "label"), (csv(b"x,y\n1,2\n3,4\n"), "no column of texts"),
    (lambda folder: (folder / "notes.txt").write_text("hi"), ""),
    (lambda folder: (folder / "train.json").write_text("{"), ""), (lambda folder: (folder / "train.parquet").write_bytes(b"no"), "")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write,said", FILES, ids=["header only", "two columns of one name", "numbers for classes", "a label missing",
                                                  "no texts", "no table", "broken JSON", "broken Parquet"])
def test_files_that_cannot_be_learnt_from_end_in_one_sentence(run, tmp_path, write, said):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    status, out, err = run("train", "--data", tmp_path / "data", "--model", "minilm", "--epsilon", "4", "--score", "none", "--no-progress",
                           "--ledger", tmp_path / "book.sqlite")
    one_sentence(status, out, err, said)
    assert nothing_charged(tmp_path)


def test_what_lies_at_the_output_is_kept_and_nothing_is_charged(run, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dpft.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for output in ("saved", "file", "file/below"):
        status, out, err = run("train", *train_words({}), "--no-progress",
                               "--output", tmp_path / output, "--ledger", tmp_path / "book.sqlite")
        one_sentence(status, out, err, "")
    assert (tmp_path / "file").read_text() == "mine"
    assert nothing_charged(tmp_path)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["dpft.json"]


OTHERS = [  # other commands
    (["account", "none.sqlite"], "there is no ledger"), (["account", "none.sqlite", "--delta", "0"], "--delta 0"),
    (["account", "none.sqlite", "--budget", "5", "--delta", "1e-5", "--remove-budget"], "--budget or --remove-budget"),
    (["account", "none.sqlite", "--remove-budget", "--reason", "a slip of the pen"], "there is no ledger at none.sqlite"),
    (["verify", "nowhere"], "nowhere"), (["plan", "--epsilon", "2", "--trainable", "5"], "the size of the data is missing"),
    (["plan", "--epsilon", "0", "--size", "10", "--trainable", "5"], "epsilon"),
    (["plan", "--epsilon", "2", "--size", "0", "--trainable", "5"], "--size 0"),
    (["plan", "--epsilon", "2", "--size", "100", "--trainable", "5", "--batch-sizes", "a"], "--batch-sizes 'a'"),
    (["account", "none.sqlite", "--who", "Ann"], "--who does nothing without --budget or --remove-budget"),
    (["account", "none.sqlite", "--reason", "a slip"], "--reason does nothing without --budget"),
    (["plan", "--epsilon", "2", "--data", "sst2", "--model", "cnn"], "--model cnn reads pictures and sst2 holds texts"),
    (["plan", "--epsilon", "2", "--data", "digits", "--model", "minilm", "--trainable", "9"], "--model minilm classifies texts"),
    (["plan", "--epsilon", "2", "--size", "100"], "--trainable"), (["audit", "--method", "nothing"], "nothing"),
    (["run", "nothing"], "nothing"),]


@pytest.mark.parametrize("words,said", OTHERS, ids=[" ".join(words) for words, _ in OTHERS])
def test_other_commands_refuse_in_one_sentence(run, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    one_sentence(*run(*words), said)
    assert list(tmp_path.iterdir()) == []


# ---- in Python

X, Y = torch.arange(120.0).view(40, 3) / 120, torch.arange(40) % 2
ROWS = torch.utils.data.TensorDataset(X, Y)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def nan_rows():
    x = X.clone()
    x[3] = float("nan")
    return x


OWN = nn.Linear(3, 2)
AT_HAND = torch.optim.SGD(OWN.parameters(), lr=0.1)

CALLS = [
    (dict(train=[]), "empty|no rows|has 0|at least one"), (dict(train=Stream()), "this Stream has no rows by number"),
    (dict(unit=["a"] * 39), "39"), (dict(loss_fn=lambda model, batch: torch.tensor(1.0)), "one loss|per example|losses"),
    (dict(model=nn.BatchNorm1d(3)), "BatchNorm"), (dict(steps=2, unknown=1), "unexpected keyword argument 'unknown'"),
    (dict(epsilom=2), "did you mean epsilon"), (dict(lr=1e-3), "'lr'; here it is learning_rate="),
    (dict(callbacks="tensorboard"), "callbacks='tensorboard'"),
    (dict(evaluate_every=3), "without evaluate="),
    (dict(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)), "the optimizer lacks"),
    (dict(method=dpft.Full), "method=Full: pass an object of it"), (dict(method="Full"), "method='Full': pass a method"),
    (dict(model=None), "model=None: pass a module"), (dict(model=nn.Linear), "pass a module"),
    (dict(secure_mode=True, epsilon=float("inf"), noise_multiplier=None), "secure_mode=True with epsilon=inf"),
    (dict(cache_folder=__file__, cache=0.1), "File exists: .*test_wrong_inputs.py"),
    (dict(checkpoint_every=1), "checkpoint_every=1 does nothing without checkpoint="),
    (dict(learning_rate="1e-3"), "learning_rate='1e-3': give a number"),
    (dict(clip=[1.0]), r"clip=\[1.0\]: give a number"), (dict(noise_multiplier="1"), "noise_multiplier='1': give a number"),
    (dict(seed="1"), "seed='1': give a whole number"), (dict(seed=1.5), "seed=1.5: give a whole number"),
    (dict(steps=2.0), "steps=2.0: give a whole number"), (dict(tokenizer="name"), "tokenizer='name' is a text; give tokenizer"),
    (dict(loss_fn="mse"), "loss_fn='mse' is a text; give"), (dict(columns="text,label"), "columns='text,label' is a text; give"),
    *((({name: "no"}), f"{name}='no': give True or False") for name in
      ("dropout", "secure_mode", "show_loss", "progress", "overwrite")),
    (dict(optimizer=None), "optimizer=None: choose one of adamw, adam, sgd, adambc, or pass a class"),
    (dict(optimizer=5), "optimizer=5: choose"),
    (dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), "unexpected keyword argument 'lr'"),
    (dict(schedule=torch.optim.lr_scheduler.StepLR), "missing 1 required positional argument: 'step_size'"),
    (dict(show_loss=1), "show_loss=1: give True or False"), (dict(progress=None), "progress=None: give True or False"),
    (dict(augment="flip"), "augment='flip' is a text; give views of each picture"),
    (dict(unit=2), "object of type 'int' has no len"),
    (dict(loss_fn=nn.functional.mse_loss), r"loss_fn=mse_loss takes scores and labels; let loss_fn be a function \(model, batch\)"),
    (dict(callbacks=[hf.EarlyStoppingCallback(2)]), "EarlyStoppingCallback requires IntervalStrategy"),
    (dict(evaluate="dev"), "evaluate='dev' is a text; give data set"), (dict(model=nn.ReLU()), "ReLU has no parameters, so nothing")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed,said", CALLS, ids=[" ".join(changed) for changed, _ in CALLS])
def test_calls_are_refused_and_charge_nothing(tmp_path, changed, said):
    given = dict(model=nn.Linear(3, 2), train=ROWS, method=dpft.Full(), noise_multiplier=1.0, steps=1, batch_size=10, clip=1.0,
                 accountant="rdp", progress=False, ledger=tmp_path / "book.sqlite")
    with pytest.raises((ValueError, TypeError, AssertionError, OSError), match=said) as refused:
        dpft.fine_tune(**{**given, **changed}, output=tmp_path / "new" / "saved")
    assert str(refused.value).count("\n") == 0 and not [*tmp_path.glob("new/saved/*")]
    assert nothing_charged(tmp_path)


@pytest.mark.parametrize("asked", [
    lambda task: dpft.Public(task, "somewhere"), lambda task: NoisyAccuracy(task), lambda task: shared_rows(task, task.train),
    lambda task: dpft.Engine(OWN, None, dpft.Full(), task, noise_multiplier=1.0, steps=1),
    lambda task: dpft.tune(OWN, ROWS, dpft.Full(), {"clip": [0.1, 0.2]}, task, epsilon=1.0, delta=1e-3, steps=1)])
def test_a_task_where_one_data_set_is_asked_for_is_refused_with_its_parts(asked):
    with pytest.raises(ValueError, match=r"a Task is several data sets; give one of them, such as task.train, task.dev or task.test"):
        asked(Task("rows", "image", ROWS, ROWS))


def test_a_budget_that_is_passed_and_a_ledger_that_is_none_charge_nothing(run, tmp_path):
    with Ledger(tmp_path / "book.sqlite") as book:
        book.set_budget(1.0, 1e-2)
    status, out, err = run("train", *train_words({}), "--no-progress", "--ledger", tmp_path / "book.sqlite")
    one_sentence(status, out, err, "budget")
    with Ledger(tmp_path / "book.sqlite") as book:
        assert not any(book.spent(name) for name in book.runs())
    (tmp_path / "text").write_text("no ledger")
    one_sentence(*run("train", *train_words({}), "--no-progress", "--ledger", tmp_path / "text"), "ledger")
    assert (tmp_path / "text").read_text() == "no ledger"
