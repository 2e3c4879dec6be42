"""What a run and a saved folder predict, and how they are scored."""

import csv
import io
import random
import re

import pytest
import torch
import transformers as hf
from sklearn import metrics
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import TensorDataset

import dpft
from dpft.data import Public, Schema
from dpft.predictions import check_not_trained_on, evaluation, predictions
from dpft.prepared import Prepared

WORDS = ["[PAD]", "[UNK]", "[SEP]", "all", "went", "well", "was", "rude", "slow", "kind", "they", "."]
TINY = dict(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, pad_token_id=0)


@pytest.fixture(scope="module")
def words():
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]")


def notes(size, first=0):
    "A hospital's table."
    draw = random.Random(first)
    return [{"note_id": first + number, "patient_id": f"p{first + number // 2}",
             "note": " ".join(draw.choices(WORDS[3:], k=draw.randint(1, 6))), "outcome": draw.choice(["complaint", "fine"])}
            for number in range(size)]


@pytest.fixture(scope="module")
def tuned(words):
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY, num_labels=2, max_position_embeddings=16))
    return dpft.fine_tune(model, notes(40), dpft.LastLayer(), epsilon=9.0, steps=3, batch_size=10, tokenizer=words, unit="patient_id",
                          columns=("note", "outcome"), label="outcome", delta=1e-3, accountant="rdp", progress=False)


def without(rows, name):
    return [{key: value for key, value in row.items() if key != name} for row in rows]


def test_a_prediction_is_the_models_in_the_order_of_the_rows_and_needs_no_label(tuned, words):
    rows = notes(7, 1000)
    found = tuned.predict(without(rows, "outcome"))
    assert list(found) == ["prediction", "p(complaint)", "p(fine)"] and tuned.predict(rows) == found
    for row, said, share in zip(rows, found["prediction"], found["p(fine)"], strict=True):
        with torch.no_grad():
            scores = tuned.model.eval()(**words(row["note"], return_tensors="pt")).logits.softmax(-1)[0]
        assert share == pytest.approx(scores[1].item(), abs=1e-5) and said == ["complaint", "fine"][int(scores.argmax())]


def test_a_saved_folder_and_a_loaded_model_predict_and_score_as_the_run_does(tuned, tmp_path):
    tuned.save(tmp_path / "saved")
    rows = notes(7, 1000)
    for form in (tmp_path / "saved", dpft.load(tmp_path / "saved")):
        assert dpft.predict(form, rows) == tuned.predict(rows) == dpft.predict(tuned, rows)
        assert dpft.evaluate(form, rows) == tuned.evaluate(rows)


def test_rows_that_were_trained_on_are_refused_and_a_repeated_text_is_not(tuned):
    new = notes(4, 2000)
    new[1]["note"] = notes(40)[3]["note"]
    assert tuned.evaluate(new)["rows"] == 4
    with pytest.raises(ValueError, match="1 of the 5 scored rows are in the training data too, the first is row 4"):
        tuned.evaluate([*new, notes(40)[3]])
    data = TensorDataset(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="3 of the 3 rows of the scored data"):
        check_not_trained_on(data, data)


class Two(nn.Module):
    """A model whose output only its own loss understands."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x):
        return self.line(x), 0


def test_no_message_asks_for_the_loss_that_was_given():
    rows, public = (TensorDataset(torch.rand(40, 3) + shift, torch.arange(40) % 2) for shift in (0, 1))
    knobs = dict(noise_multiplier=1.0, steps=1, batch_size=8, accountant="rdp", progress=False,
                 loss_fn=lambda model, batch: nn.functional.cross_entropy(model(batch[0])[0], batch[1], reduction="none"))
    with pytest.raises(ValueError, match=r"no logits; give a function of the model in place of the data$"):
        dpft.fine_tune(Two(), rows, dpft.Full(), evaluate=Public(public, "made up"), **knobs)
    run = dpft.fine_tune(Two(), rows, dpft.Full(), **knobs)
    for asked in (run.evaluate, run.predict):
        with pytest.raises(ValueError, match=r"no logits; call run.model on the rows"):
            asked(public)


def test_scores_without_noise_are_listed_unless_the_rows_are_public(tuned):
    fact = "scores on examples, unless they are public"
    tuned.guarantee.uncharged = [one for one in tuned.guarantee.uncharged if one != fact]
    tuned.evaluate(Public(notes(4, 3000), "made up"))
    assert fact not in tuned.guarantee.uncharged
    tuned.evaluate(notes(4, 3000))
    assert fact in tuned.guarantee.uncharged and fact in tuned.report()


@pytest.mark.parametrize("bias, warned", [(0.0, False), (-100.0, True)])
def test_the_scores_of_a_classifier_are_scikit_learns_and_one_class_for_all_is_said(bias, warned):
    torch.manual_seed(0)
    x, model = torch.randn(100, 3), nn.Linear(3, 2)
    model.bias.data[1] = bias
    data = TensorDataset(x, (x[:, 0] > 0.5).long())
    found = evaluation(Prepared(model, None, classes=("fine", "complaint")), data)
    with torch.no_grad():
        scores = model(x)
    said, labels = scores.argmax(1), data.tensors[1]
    assert found["accuracy"] == metrics.accuracy_score(labels, said) and found["auc"] == pytest.approx(
        metrics.roc_auc_score(labels, scores.softmax(1)[:, 1]))
    assert found["classes"]["complaint"]["recall"] == metrics.recall_score(labels, said)
    assert found["f1"] == pytest.approx(metrics.f1_score(labels, said, average="macro"))
    assert found["confusion"] == metrics.confusion_matrix(labels, said).tolist()
    assert ("every row was given the class 'fine'" in str(found)) == warned == bool(found.warning)


def test_a_regression_has_errors_and_its_predictions_are_numbers():
    x = torch.randn(20, 3)
    model = nn.Linear(3, 1)
    data = TensorDataset(x, x[:, :1] * 2)
    found = evaluation(Prepared(model, None), data)
    with torch.no_grad():
        wrong = model(x) - data.tensors[1]
    assert found["mse"] == pytest.approx(wrong.square().mean().item(), rel=1e-4)
    assert found["mae"] == pytest.approx(wrong.abs().mean().item(), rel=1e-4) and found["r2"] < 1
    assert predictions(Prepared(model, None), TensorDataset(x))["prediction"] == pytest.approx(model(x).flatten().tolist())


def test_a_language_model_writes_on_and_is_scored_by_perplexity(words):
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0,
                                             eos_token_id=None, bos_token_id=None)).eval()
    ready = Prepared(model, None, words, kind="causal", schema=Schema("causal", ("prompt",), "completion"))
    rows = [{"prompt": "all went", "completion": "well ."}, {"prompt": "they was rude was", "completion": "slow"}]
    found = evaluation(ready, ready.encoded(rows))
    assert list(found) == ["rows", "perplexity"] and 1 < found["perplexity"] < 2 * len(WORDS)
    written = predictions(ready, without(rows, "completion"))["prediction"]
    for row, said in zip(rows, written, strict=True):
        tokens = torch.tensor([[*words(row["prompt"]).input_ids, words.sep_token_id]])
        expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False)[0, tokens.shape[1]:]
        assert said.startswith(words.decode(expected, skip_special_tokens=True)[:10])


def test_tags_are_one_for_each_word(words):
    torch.manual_seed(0)
    model = hf.BertForTokenClassification(hf.BertConfig(**TINY, num_labels=2, max_position_embeddings=16))
    ready = Prepared(model, None, words, kind="tagging", schema=Schema("tagging", ("words",), "tags"), classes=("O", "B"))
    rows = [{"words": ["all", "went", "well"], "tags": ["O", "O", "B"]}, {"words": ["slow"], "tags": ["B"]}]
    found, said = evaluation(ready, ready.encoded(rows)), predictions(ready, without(rows, "tags"))["prediction"]
    assert list(map(len, said)) == [3, 1] and sum(map(sum, found["confusion"])) == 4
    right = sum(one == other for row, tags in zip(rows, said, strict=True) for one, other in zip(row["tags"], tags, strict=True))
    assert found["accuracy"] == right / 4


def write(path, rows):
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)
    return path


def test_the_command_trains_scores_saves_and_predicts(run, tmp_path, words):
    hf.BertModel(hf.BertConfig(**TINY, max_position_embeddings=16)).save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    files = [write(tmp_path / f"{name}.csv", notes(size, first)) for name, size, first in (("train", 40, 0), ("test", 10, 500))]
    usual = ["train", "--data", files[0], "--model", tmp_path / "base", "--unit", "patient_id", "--columns", "note,outcome", "--classes",
             "complaint,fine", "--method", "last-layer", "--epsilon", "9", "--delta", "0.001", "--steps", "2", "--batch-size", "8",
             "--accountant", "rdp", "--no-progress"]
    status, out, error = run(*usual, "--test", files[1], "--output", tmp_path / "out")
    assert status == 0, error
    assert "f1-score" in out and "accuracy: " in out and "nothing was scored" not in out
    assert re.search(r"\n +complaint \[\d+, \d+\]\n +fine \[\d+, \d+\]\n", out) and out.index("accuracy: ") < out.index("private**")
    assert "nothing was scored, for" in run(*usual)[1]
    status, _, error = run(*usual, "--test", files[0])
    assert status == 1 and "40 of the 40 scored rows are in the training data too" in error
    blank = write(tmp_path / "new.csv", without(notes(10, 500), "outcome"))
    printed = run("predict", tmp_path / "out", blank)[1]
    said = run("predict", tmp_path / "out", blank, "--output", tmp_path / "found.csv")[1]
    assert said == f"predictions of 10 rows are in {tmp_path / 'found.csv'}\n"
    rows = [*csv.DictReader(io.StringIO(printed))]
    assert printed.split() == (tmp_path / "found.csv").read_text().split() and len(rows) == 10
    assert list(rows[0]) == ["note_id", "patient_id", "prediction", "p(complaint)", "p(fine)"]
