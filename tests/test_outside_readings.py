"""What outside readings found: texts that would be published, scores of the wrong thing, and errors that quote rows."""

import datetime
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CpmAntConfig,
    CpmAntForCausalLM,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from dpft import BiTFiT, Engine, Full, Public, RapFT, Then, fine_tune
from dpft.cli.core import train_command
from dpft.composition import Chain
from dpft.datasets import TableData, TensorData
from dpft.identity import repeated_rows, shared_rows
from dpft.ledger import Ledger, LedgerError
from dpft.losses import example_losses, problem_of
from dpft.method import Method
from dpft.models import head_parameters, load_model
from dpft.noise import Keystream
from dpft.privacy import SampledGaussian, epsilon
from dpft.registry import method_named
from dpft.schema import read_labels
from dpft.scores import noisy_accuracy, right_answers, scored
from dpft.selection import settle, trial_noise

ROWS = [{"text": "Ann Smith has it", "label": 1}, {"text": "Bob has not", "label": 0}]
KNOBS = dict(epsilon=8.0, progress=False, accountant="rdp", steps=1)


@pytest.mark.parametrize("call", [
    lambda: Engine(ROWS, None, Full(), nn.Linear(2, 2), epsilon=8.0), lambda: fine_tune(nn.Linear(2, 2), Full(), ROWS, **KNOBS),
    lambda: RapFT(BiTFiT(), relevance_data=ROWS), lambda: Chain(Full(), ROWS), lambda: Then(Full(), 1, ROWS)])
def test_an_argument_in_the_wrong_place_is_told_by_its_type_and_not_by_its_rows(call):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert "a list" in str(error.value) and "Ann" not in str(error.value)


def test_texts_that_stand_alone_are_no_names_of_classes():
    with pytest.raises(ValueError, match="20 different texts, most of them in one row, and class names are published") as error:
        read_labels([f"Ann Smith {row} has it" for row in range(20)], "target")
    assert "Ann" not in str(error.value)
    assert len(read_labels([f"place {row % 20}" for row in range(60)], "target").classes) == 20


def test_the_cheapest_way_is_found_before_its_noise_is_asked_for():
    with pytest.raises(ValueError, match="charge='cheapest': choose composition"):
        trial_noise(2.0, 1e-5, 0.01, 100, 16, "cheapest", accountant="rdp")


@pytest.mark.parametrize("price", [
    lambda: trial_noise(2.0, 1e-5, 0.01, 100, 16, "compositon", accountant="rdp"),
    lambda: settle(2.0, 1e-5, 0.01, 100, 16, 16, "compositon", accountant="rdp")])
def test_a_misspelt_way_to_account_for_a_search_is_refused(price):
    with pytest.raises(ValueError, match="charge='compositon': choose composition, selection, none"):
        price()


def test_the_size_of_an_evaluation_set_is_in_no_guarantee():
    rows, scored_on = (TensorDataset(torch.randn(size, 4), torch.arange(size) % 2) for size in (40, 34))
    run = fine_tune(nn.Linear(4, 2), rows, Full(), evaluate=scored_on, **KNOBS)
    assert "34" not in " ".join(run.guarantee.uncharged) and "scores on examples, unless they are public" in run.guarantee.uncharged


def test_a_model_of_one_output_is_not_scored_as_if_it_had_classes():
    labels = torch.tensor([0, 1, 1])
    assert problem_of(nn.Linear(4, 1), torch.zeros(3, 1), labels) is None
    assert problem_of(nn.Linear(4, 2), torch.zeros(3, 2), labels) == "single_label_classification"


def test_rows_of_words_and_of_dates_are_compared():
    words = [{"tokens": ["Ann", "left"], "tags": ["B", "O"]}, {"tokens": ["he", "stays"], "tags": ["O", "O"]}]
    assert repeated_rows([*words, words[0]]) and not repeated_rows(words) and shared_rows(words[1:], words) == [0]
    days = [{"day": datetime.date(2026, 1, 1), "size": 1.0}, {"day": datetime.date(2026, 1, 2), "size": 1.0}]
    assert repeated_rows([*days, days[1]]) and not repeated_rows(days)


def test_scores_are_numbers_by_their_names():
    assert scored(None, lambda model: {"f1": torch.tensor(0.5), "n": np.float32(2)}) == {"f1": 0.5, "n": 2.0}
    assert scored(None, lambda model: 0.5) == {"score": 0.5}


def test_a_paid_score_holds_any_count():
    "A grid as fine as the noise would end at 4,096 for a tenth of an answer's noise."
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    rows = TensorDataset(torch.eye(2).repeat(5000, 1), torch.arange(10000) % 2)
    assert noisy_accuracy(model, rows, 0.01, Keystream(0), 0) == pytest.approx(1.0, abs=1e-4)


def test_what_is_scored_is_collated_as_what_is_trained_on():
    "Each row is a dictionary, which the model cannot read; the user's function makes pairs of it, and turns the labels around."
    inputs = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    rows = [{"seen": row, "kind": int(row[0] > 0)} for row in inputs]
    def collate(items):
        return torch.stack([item["seen"] for item in items]), torch.tensor([1 - item["kind"] for item in items])
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[9.0, 0.0], [-9.0, 0.0]]))
        model.bias.zero_()
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    knobs = KNOBS | {"delta": 1e-2, "collate_fn": collate, "loss_fn": loss}
    run = fine_tune(model, rows[:20], Full(), learning_rate=1e-6, evaluate=Public(rows[20:], source="drawn for the test"), **knobs)
    assert run.scores == {"accuracy": 1.0}


def test_a_guarantee_is_given_up_before_the_run_is_recorded():
    class Peek(Method):
        def choose(self, context, among):
            context.forfeit("the gradient of one batch")
            return list(among)
    with pytest.raises(ValueError, match=r"call forfeit in requests\(context\)"):
        fine_tune(nn.Linear(4, 2), TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), Peek(), **KNOBS)


def test_no_warning_tells_how_long_a_private_text_is():
    import logging

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dpft.texts import encode
    words = ["a", "b", "[PAD]", "[EOS]", "[UNK]"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]",
                                        model_max_length=32)
    tokenizer.chat_template = "{% for message in messages %}{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}"
    logger, said = logging.getLogger("transformers"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        encode(TableData({"prompt": ["a b", "a"], "completion": ["b", "a " * 77]}), tokenizer, ("prompt", "completion"), 128, "causal")
        encode(TableData({"messages": [[{"role": "assistant", "content": "a " * 77}]]}), tokenizer, ("messages",), 128, "causal")
    finally:
        logger.removeHandler(handler)
    assert not [line for line in said if "77" in line], said


def test_encoded_texts_with_class_numbers_never_make_a_regression():
    "Nothing says how many classes there are, so a model that is loaded by its name would get one output."
    from dpft.prepared import prepare
    from dpft.texts import EncodedData
    rows = {"input_ids": torch.arange(1, 13)}
    texts = EncodedData(rows, torch.full((4,), 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="encoded, and nothing says how many classes"):
        prepare("minilm", texts)
    assert prepare(load_model("minilm", classes=2), texts).model.config.num_labels == 2


def test_rounding_after_many_steps_makes_no_epsilon_too_small():
    exact = 13.79                                                          # of the Gaussian mechanism that they are together
    prv, rdp = (epsilon(SampledGaussian(464.13, 1.0, 811782), 1e-10, accountant) for accountant in ("prv", "rdp"))
    assert exact < prv < rdp


@pytest.mark.parametrize("way", ["pictures", "channels", "tokens"])
def test_what_a_model_does_not_take_is_refused_before_anything_is_charged(tmp_path, way):
    import transformers as hf

    shape = (1, 8, 8) if way == "channels" else (3, 16, 16)
    pictures = TensorData(torch.rand(20, *shape), torch.arange(20) % 2)
    words = TableData({"text": ["a b", "a c"] * 10, "label": [0, 1] * 10})
    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2)

    def tokenizer(text, **options):
        return {"input_ids": [[*map(ord, row)] for row in text], "special_tokens_mask": [[0] * len(row) for row in text]}
    tokenizer.pad_token_id, tokenizer.model_max_length = 0, 64
    model = (hf.BertForSequenceClassification(hf.BertConfig(vocab_size=90, **small)) if way == "tokens" else
             hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **small)))
    with pytest.raises(ValueError, match="beyond the 90 that the model has embeddings for" if way == "tokens" else
                       rf"does not take pictures of {shape[0]} × {shape[1]}"):
        fine_tune(model, words if way == "tokens" else pictures, Full(), ledger=tmp_path / "ledger.sqlite",
                  **({"tokenizer": tokenizer} if way == "tokens" else {}), **KNOBS)
    assert not (tmp_path / "ledger.sqlite").exists()


def test_an_error_after_the_first_claim_says_what_was_charged(tmp_path):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no room")
    rows = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    with pytest.raises(RuntimeError, match="no room") as caught:
        fine_tune(nn.Linear(4, 2), rows, Full(), optimizer=Fails, batch_size=20, ledger=tmp_path / "ledger.sqlite", **KNOBS)
    assert caught.value.__notes__ == [
        f"{tmp_path / 'ledger.sqlite'} has charged what this run claimed; with checkpoint= the same call would continue it"]
    with pytest.raises(ValueError, match="learning_rate") as caught:   # refused before
        fine_tune(nn.Linear(4, 2), rows, Full(), ledger=tmp_path / "ledger.sqlite", learning_rate=-1.0, **KNOBS)
    assert not hasattr(caught.value, "__notes__")


PLAN = {"mechanisms": [{"name": "train", "noise_multiplier": 1.0, "sample_rate": 0.02, "steps": 50}]}


def test_a_ledger_with_one_damaged_bit_is_not_replaced(tmp_path):
    with Ledger(tmp_path / "team.db") as ledger:
        ledger.begin("a", PLAN)
    damaged = bytearray((tmp_path / "team.db").read_bytes())
    damaged[0] ^= 1
    (tmp_path / "team.db").write_bytes(damaged)
    with Ledger(tmp_path / "other.db") as ledger:
        ledger.begin("b", PLAN)
        with pytest.raises(LedgerError, match="file is not a database"):
            ledger.publish(tmp_path / "team.db", ["b"])
    assert (tmp_path / "team.db").read_bytes() == damaged


@pytest.mark.parametrize("changed", [dict(clip=np.float32(0.5)), dict(delta=np.float32(1e-3)), dict(steps=np.int64(1))])
def test_a_number_of_numpy_is_a_number(changed):
    rows = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2)
    assert fine_tune(nn.Linear(4, 2), rows, Full(), **{**KNOBS, **changed}).epsilon <= 8


class Named(Dataset):
    def __init__(self, **own):
        self.__dict__.update(own)

    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.arange(4.0) + row / 40, row % 2


@pytest.mark.parametrize("name", ["table", "content", "hashes"])
def test_attributes_of_a_users_data_set_are_not_taken_for_our_own(name):
    rows = Named(**{name: pd.DataFrame({"x": range(40)})})
    assert fine_tune(nn.Linear(4, 2), rows, Full(), evaluate=rows, **KNOBS).epsilon <= 8


def test_a_loss_that_compares_a_token_with_itself_is_not_taken_for_the_usual_one():
    sizes = dict(hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=24, num_hidden_layers=1, prompt_length=4)
    model = CpmAntForCausalLM(CpmAntConfig(vocab_size=40, **sizes)).eval()
    ids = torch.randint(1, 40, (3, 7), dtype=torch.int32)
    with pytest.raises(ValueError, match="pass loss_fn="):
        example_losses(model, {"input_ids": ids, "labels": ids.long()})


def test_no_setting_is_suggested_that_would_be_refused():
    with pytest.raises(TypeError) as error:
        Engine(nn.Linear(4, 2), None, Full(), TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), epsilon=8.0, lr=1.0)
    assert "learning_rate" not in str(error.value)


class Batched(Named):
    def batch(self, indices):
        return self.own(torch.stack([self[int(row)][0] for row in indices]), torch.tensor([self[int(row)][1] for row in indices]))


def test_a_data_set_that_makes_its_own_batches_is_scored_row_by_row():
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="batch gives one row 3 answers"):
        right_answers(model, Batched(own=lambda rows, labels: (rows.repeat_interleave(3, 0), labels.repeat_interleave(3))))
    centred = Batched(own=lambda rows, labels: (rows - rows.mean(0), labels))
    constant = int(model.bias.argmax())    # a row alone is its own mean
    assert right_answers(model, centred) == sum(centred[row][1] == constant for row in range(40))


X, Y = torch.randn(40, 4), torch.arange(40) % 3
WRONG = {"features": (nn.Linear(5, 3), X, Y), "precision": (nn.Linear(4, 3), X.double(), Y), "labels from 1": (nn.Linear(4, 3), X, Y + 1),
         "labels that are floats": (nn.Linear(4, 3), X, Y.float()), "labels of two dimensions": (nn.Linear(4, 3), X, Y[:, None]),
         "one logit": (nn.Linear(4, 1), X, Y % 2), "a model of two outputs": (nn.LSTM(4, 3, batch_first=True), torch.randn(40, 5, 4), Y),
         "bytes": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)), torch.ones(40, 1, 8, 8, dtype=torch.uint8), Y)}


@pytest.mark.parametrize("model, inputs, labels", WRONG.values(), ids=WRONG)
def test_tensors_that_do_not_go_through_a_model_cost_nothing(tmp_path, model, inputs, labels):
    with pytest.raises(ValueError) as error:
        fine_tune(model, TensorDataset(inputs, labels), Full(), ledger=tmp_path / "l.sqlite", **KNOBS)
    assert str(error.value).count("\n") <= 2 and not (tmp_path / "l.sqlite").exists()


class Lengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, lengths):
        if (lengths < 1).any():
            raise ValueError("a sequence has no steps")
        return self.inner(lengths.float())


@pytest.mark.parametrize("model, inputs", [(nn.Linear(4, 3), X), (Lengths(), torch.ones(40, 4, dtype=torch.long))])
def test_tensors_that_go_through_a_model_train(model, inputs):
    assert fine_tune(model, TensorDataset(inputs, Y), Full(), **KNOBS).epsilon <= 8


SMALL = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)


def test_a_classifier_without_a_padding_token_costs_nothing(tmp_path):
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, num_labels=2))
    rows = [{"input_ids": [1 + row % 7, 2, 3], "labels": row % 2} for row in range(40)]
    with pytest.raises(ValueError, match="has no padding token"):
        fine_tune(model, rows, Full(), ledger=tmp_path / "l.sqlite", **KNOBS)
    assert not (tmp_path / "l.sqlite").exists()


@pytest.mark.parametrize("model, new", [
    (lambda: DistilBertForSequenceClassification(DistilBertConfig(vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=24)),
     {"pre_classifier.weight", "pre_classifier.bias", "classifier.weight", "classifier.bias"}),
    (lambda: BertForSequenceClassification(BertConfig(**SMALL)), {"classifier.weight", "classifier.bias"}),
    (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), {"lm_head.weight"})])
def test_all_that_is_new_above_a_base_is_the_head(model, new):
    model = model()
    head = {id(parameter) for parameter in head_parameters(model)}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in head} == new


@pytest.mark.parametrize("kind", ["text", "causal"])
def test_the_first_of_several_end_tokens_pads(tmp_path, kind):
    LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=[1, 2, 3])).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), 2, kind).config.pad_token_id == 1


def test_true_is_no_number():
    with pytest.raises(ValueError, match="--option rank=True of method lora: give a whole number"):
        method_named("lora", ["rank=true"])


def test_a_recommended_command_has_the_budget_that_was_asked_for():
    said = train_command(None, None, "bitfit", 1.2345678, 7.421562e-06, SimpleNamespace(batch_size=10, steps=5))
    assert "--epsilon 1.2345678 " in said and "--delta 7.421562e-06 " in said
