"""Planning: a table against single solves, the time of a run against its parts, and the command."""

import json
import math

import pytest

from dpft.bitfit import BiTFiT
from dpft.frost.selection import DPFrost
from dpft.models import load_model
from dpft.plan import make_plan
from dpft.planning import DATA_SHAPES, DataShape, Pace, plan_table, recommended, rehearse
from dpft.privacy import BudgetError
from dpft.tasks import load_data

DIGITS = DATA_SHAPES["digits"]


def test_a_plan_is_what_single_solves_give():
    pace = Pace(400, first=2.0, later=0.5, step=3.0)
    cells = plan_table(1000, 400, 2.0, batch_sizes=[50, 200], steps=[10, 40], pace=pace)
    assert [(cell.steps, cell.batch_size) for cell in cells] == [(10, 50), (10, 200), (40, 50), (40, 200)]
    for cell in cells:
        sigma = make_plan(1000, cell.batch_size, cell.steps, 2.0, accountant="rdp").mechanisms[0].noise_multiplier
        assert sigma - 1e-3 <= cell.noise_multiplier <= sigma + 6e-3
        assert cell.step_ratio == pytest.approx(cell.batch_size / (cell.noise_multiplier * 20))
        assert cell.ratio == pytest.approx(cell.step_ratio * math.sqrt(cell.steps))
        assert cell.seconds == pace.seconds(1000, cell.batch_size, cell.steps)
    best = recommended(cells)
    assert best.ratio >= 0.9 * max(cell.ratio for cell in cells)
    assert all(cell.examples >= best.examples for cell in cells if cell.ratio >= 0.9 * max(c.ratio for c in cells))


def test_a_row_costs_the_whole_model_once():
    assert Pace(1, first=2.0, later=0.5, step=3.0).seconds(100, 100, 4) == pytest.approx(4 * 3 + 100 * 2 + 300 * 0.5)
    assert Pace(1, first=2.0, later=2.0, step=0.0).seconds(100, 10, 7) == pytest.approx(70 * 2)


def test_no_plan_meets_a_budget_below_the_floor():
    cells = plan_table(1000, 400, 0.01, delta=1e-9, batch_sizes=[10, 100], steps=[5])
    assert all(math.isinf(cell.noise_multiplier) and cell.ratio == 0 for cell in cells)
    with pytest.raises(BudgetError, match="no plan in the table"):
        recommended(cells)


def test_published_shapes_are_the_real_ones():
    task = load_data("digits")
    assert DataShape(len(task.train), task.kind, len(task.classes), task.image_shape) == DIGITS


@pytest.mark.parametrize("method", [BiTFiT(), DPFrost(0.5)])
def test_a_rehearsal_counts_what_trains_and_times_its_steps(method):
    model = load_model("mlp", 10, "image", (1, 8, 8))
    pace = rehearse(model, method, DIGITS)
    assert pace.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) and pace.first == pace.later > 0 < pace.step
    assert rehearse(load_model("mlp", 10, "image", (1, 8, 8)), method, DataShape(9, "image", 10, (1, 8, 8), rows=1e6)).later > pace.later


@pytest.fixture
def notes(tmp_path):
    rows = [f"p{i % 40},a note of {i % 7} words,{'good' if i % 3 else 'bad'}\n" for i in range(120)]
    (tmp_path / "notes.csv").write_text("patient,text,label\n" + "".join(rows))
    return str(tmp_path / "notes.csv")


@pytest.mark.parametrize("words, said, command", [
    (["--data", "digits", "--model", "mlp"], "1,437 examples, ", "--data digits --model mlp --method bitfit"),
    (["--data", "NOTES", "--unit", "patient", "--trainable", "50"], "40 patients (counted in ",
     "--data NOTES --model YOUR_MODEL --method bitfit --unit patient"),
    (["--data", "NOTES", "--unit", "patient", "--trainable", "50", "--size", "38"], "38 patients, 50 parameters", "--public-size 38"),
    (["--data", "NOTES", "--unit", "patient", "--trainable", "50", "--label", "label"], "40 patients", "--label label"),
    (["--size", "400", "--kind", "image", "--classes", "3", "--model", "mlp"], "400 examples, ", "--data YOUR_DATA --model mlp")])
def test_a_plan_takes_what_the_user_has(run, notes, words, said, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [notes if word == "NOTES" else word for word in words]
    status, out, err = run("plan", *words, "--epsilon", "2", "--steps", "10,40", "--batch-sizes", "8,20")
    last = out.strip().splitlines()[-1]
    assert status == 0 and said in out and last.startswith("dpft train --data ") and command.replace("NOTES", notes) in last, err
    assert ("On this machine a step takes" in out) == ("--model" in words) and [path.name for path in tmp_path.iterdir()] == ["notes.csv"]


def test_data_of_the_book_are_not_read_and_json_is_the_same(run, monkeypatch):
    monkeypatch.setattr("dpft.book.tasks.load_data", lambda *words, **more: pytest.fail("a plan must not read these data"))
    words = "--data", "digits", "--trainable", "50", "--epsilon", "2", "--steps", "10,40", "--batch-sizes", "100,300"
    status, out, _ = run("plan", *words, "--json")
    found = json.loads(out)
    assert status == 0 and len(found["cells"]) == 4 and found["recommended"] in found["cells"] and found["delta"] == 0.5 / 1437


@pytest.mark.parametrize("words, message", [
    (["--size", "100"], "--trainable"), (["--trainable", "10"], "--size"), (["--data", "digts", "--trainable", "5"], "did you mean digits"),
    (["--data", "digits", "--model", "mpl"], "did you mean mlp"), (["--data", "digits", "--model", "mlp", "--method", "bitft"], "bitfit"),
    (["--size", "100", "--trainable", "5", "--steps", "a"], "--steps 'a'"), (["--size", "-5", "--trainable", "5"], "--size -5"),
    (["--size", "100", "--trainable", "5", "--batch-sizes", "500"], "batch_size=500"),
    (["--size", "100", "--trainable", "5", "--unit", "patient"], "--unit does nothing without a file"),
    (["--size", "0", "--trainable", "5"], "--size 0"), (["--size", "9", "--trainable", "0"], "--trainable 0")])
def test_a_bad_plan_ends_in_one_sentence(run, words, message):
    status, out, err = run("plan", "--epsilon", "2", *words)
    assert status == 1 and message in err and err.startswith("dpft: ") and err.count("\n") == 1 and "Traceback" not in out + err
