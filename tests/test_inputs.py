"""What would fail in a first step is refused before a run is charged, so that corrected data are still the first data of a ledger."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpft
from dpft.data import TensorData
from dpft.losses import default_loss


def bert():
    import transformers as hf

    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=12, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                                                          intermediate_size=4, max_position_embeddings=8))


def line():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def pairs(width=3, labels=(0, 1)):
    return [(torch.full((width,), row / 8), labels[row % 2]) for row in range(16)]


def tokens(name):
    return [{"input_ids": [2, 3, 4], name: row % 2} for row in range(16)]


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def failing(model, batch):
    raise KeyError("label 1 of the first row")


WRONG = {  # the model, wrong rows and the loss, which error says what, right rows and the loss
    "no labels in a batch": (bert, tokens("y"), None, ValueError, r"^the batch holds .* and no 'labels'; name the labels so",
                             tokens("labels"), None),
    "rows of another width": (line, pairs(4), None, RuntimeError, "shapes cannot be multiplied", pairs(), None),
    "labels that are words": (line, pairs(labels=("a", "b")), None, ValueError, r"^part 1 of an item has type str", pairs(), None),
    "one loss of a batch": (line, pairs(), mean_loss, ValueError, r"^loss_fn gives \(\) where one loss for each example is needed",
                            pairs(), default_loss(line())),
    "a loss that fails": (line, pairs(), failing, KeyError, "label 1 of the first row", pairs(), None),
}


@pytest.mark.parametrize("loop", ["fine_tune", "Engine"])
@pytest.mark.parametrize("what", WRONG)
def test_what_fails_on_the_first_batch_is_refused_before_a_charge_and_may_be_corrected(tmp_path, what, loop):
    make, wrong, bad_loss, error, said, right, good_loss = WRONG[what]
    given = dict(epsilon=8.0, steps=1, batch_size=4, accountant="rdp", ledger=tmp_path / "book.sqlite")
    def run(rows, loss_fn):
        model = make()
        if loop == "fine_tune":
            return dpft.fine_tune(model, rows, dpft.Full(), loss_fn=loss_fn, progress=False, **given)
        from dpft.prepared import prepare
        for step in dpft.Engine(model, loss_fn, dpft.Full(), prepare(model, rows).train, **given):
            step.take()
    with pytest.raises(error, match=said):
        run(wrong, bad_loss)
    with dpft.Ledger(given["ledger"]) as ledger:
        assert ledger.spent() == []
    run(right, good_loss)


class Counting(nn.Module):
    "A module that changes with each pass in training mode."

    def __init__(self):
        super().__init__()
        self.line, self.drop = line(), nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.line(self.drop(x))


def test_no_row_is_left_to_the_check_that_names_it_and_a_layer_without_a_shape_is_named():
    with pytest.raises(ValueError, match=r"^the data set has 0 units"):
        dpft.fine_tune(line(), [], dpft.Full(), 8.0, steps=1, batch_size=4, progress=False)
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"^0.weight has no shape yet; run the model once on a batch$"):
        dpft.fine_tune(lazy, pairs(), dpft.Full(), 8.0, steps=1, batch_size=4, progress=False)


def tagger():
    import transformers as hf

    torch.manual_seed(0)
    return hf.BertForTokenClassification(hf.BertConfig(vocab_size=12, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
                                                       intermediate_size=4, max_position_embeddings=8, num_labels=3))


@pytest.mark.parametrize("odd", [{"input_ids": [5, 6, 7], "labels": [0, 1]}, {"input_ids": [5, 6], "labels": [0, 1, 2]}])
def test_a_row_with_other_numbers_of_tokens_and_labels_is_refused_before_a_charge(tmp_path, odd):
    """Padding would make them equal, and pair a label with no token of the row's."""
    rows = [{"input_ids": [5, 6, 7], "labels": [0, 1, 2]} for _ in range(12)]
    given = dict(epsilon=8.0, steps=1, batch_size=4, accountant="rdp", ledger=tmp_path / "book.sqlite", progress=False)
    said = rf"^row 9 has {len(odd['input_ids'])} tokens and {len(odd['labels'])} labels; give each token one label, and -100"
    with pytest.raises(ValueError, match=said):
        dpft.fine_tune(tagger(), [*rows[:9], odd, *rows[10:]], dpft.Full(), **given)
    assert not any(tmp_path.iterdir())
    dpft.fine_tune(tagger(), rows, dpft.Full(), **given)


def forms_of_rows():
    import datasets
    import pandas as pd

    frame = pd.DataFrame({"a": [row / 40 for row in range(40)], "labels": [row % 2 for row in range(40)],
                          "user": [f"person {row // 2}" for row in range(40)]})
    return {"frame": frame, "columns": frame.to_dict("list"), "rows": frame.to_dict("records"), "shuffled": frame.sample(frac=1.0),
            "datasets": datasets.Dataset.from_pandas(frame)}


@pytest.mark.parametrize("form", ["frame", "columns", "rows", "shuffled", "datasets"])
def test_the_engine_takes_rows_in_any_form_and_keeps_the_names_of_people_from_the_model(form):
    class Line(nn.Linear):
        def forward(self, a):
            return super().forward(a[:, None].float())

    def loss(model, batch):
        assert set(batch) == {"a", "labels"}
        return F.cross_entropy(model(batch["a"]), batch["labels"], reduction="none")

    model = Line(1, 2)
    engine = dpft.Engine(model, loss, dpft.Full(), forms_of_rows()[form], unit="user", epsilon=8.0, steps=2, batch_size=4, accountant="rdp")
    optimizer = torch.optim.SGD(engine.parameters(), 0.1)
    for step in engine:
        step.take(optimizer)
    assert engine.unit == "user" and engine.plan.size == 20 and engine.guarantee.epsilon() <= 8.0


class Uneven(torch.utils.data.Dataset):
    "Rows that are made when they are read; only the first half has every name."
    def __init__(self, lacking):
        self.lacking = lacking

    def __len__(self):
        return 8

    def __getitem__(self, row):
        item = {"input_ids": [2, 3, 4], "labels": row % 2, "writer": f"w{row}"}
        return item if row < 4 else {name: value for name, value in item.items() if name != self.lacking}


@pytest.mark.parametrize("lacking, unit", [("labels", None), ("writer", "writer")])
def test_rows_that_lack_a_name_beyond_the_first_are_one_sentence(lacking, unit):
    parts = [dpft.data.as_dataset({name: values for name, values in {"input_ids": [[2, 3, 4]] * 4, "labels": [0, 1] * 2,
                                                                          "writer": list("abcd")}.items() if name not in left_out})
             for left_out in ((), (lacking,))]
    for rows in (Uneven(lacking), torch.utils.data.ConcatDataset(parts)):
        with pytest.raises(ValueError, match=rf"^rows 0 and 4 differ: only one of them has '{lacking}'; give every row the same names"):
            dpft.fine_tune(bert(), rows, dpft.BiTFiT(), epsilon=8.0, steps=1, batch_size=4, unit=unit, progress=False)


def test_a_key_that_a_data_set_of_its_own_misses_is_its_own_error():
    class Broken(Uneven):
        def __getitem__(self, row):
            return super().__getitem__(row) if row < 4 else {}[f"file of row {row}"]

    with pytest.raises(KeyError, match="file of row 4"):
        dpft.fine_tune(bert(), Broken("none"), dpft.BiTFiT(), epsilon=8.0, steps=1, batch_size=4, progress=False)


# ---- what a first try often meets

ROWS = torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16) % 2


class Streamed(torch.utils.data.IterableDataset):
    "Has a length, and rows in order alone."

    def __len__(self):
        return len(ROWS[0])

    def __iter__(self):
        return zip(*ROWS, strict=True)


def test_inputs_in_double_precision_are_named_with_the_way_out(tmp_path):
    double = TensorDataset(ROWS[0].double(), ROWS[1])
    with pytest.raises(ValueError, match=r"^the inputs are float64 and the model is float32; convert them, such as with \.to\(torch"):
        trained(line(), double, tmp_path)
    trained(line().double(), double, tmp_path)


def test_a_stream_with_a_length_has_no_rows_by_number(tmp_path):
    with pytest.raises(ValueError, match=r"^this Streamed has no length or no rows by number"):
        trained(line(), Streamed(), tmp_path)


@pytest.mark.parametrize("form", ["tensors", "pairs"])
def test_a_layer_without_a_shape_is_named_before_its_rows(form, tmp_path):
    with pytest.raises(ValueError, match=r"^weight has no shape yet; run the model once on a batch$"):
        trained(nn.LazyLinear(2), TensorDataset(*ROWS) if form == "tensors" else [*TensorDataset(*ROWS)], tmp_path)


def test_a_picture_with_a_label_that_the_network_has_no_output_for_is_refused_before_a_charge(tmp_path):
    pictures = TensorData(torch.zeros(16, 1, 4, 4, dtype=torch.uint8), torch.arange(16) % 3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(ValueError, match=r"^the label of row 2 is no class of the model, which numbers its 2 from 0$"):
        trained(network, pictures, tmp_path)
    trained(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), pictures, tmp_path)     # with the same ledger


def trained(model, rows, folder):
    return dpft.fine_tune(model, rows, dpft.Full(), noise_multiplier=1.0, delta=1e-3, steps=1, batch_size=8, clip=1.0, accountant="rdp",
                          progress=False, ledger=folder / "run.ledger")
