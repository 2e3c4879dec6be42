"""What is refused before anything is charged costs nothing, and what is charged is said; no text quotes or measures a private row."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2ForSequenceClassification

from dpft import Full, fine_tune
from dpft.data import TableData
from dpft.ledger import Ledger
from dpft.method import Method

KNOBS = dict(epsilon=8.0, progress=False, accountant="rdp", steps=1)
X, Y = torch.randn(40, 4), torch.arange(40) % 3
WRONG = {"features": (nn.Linear(5, 3), X, Y), "precision": (nn.Linear(4, 3), X.double(), Y), "labels from 1": (nn.Linear(4, 3), X, Y + 1),
         "labels that are floats": (nn.Linear(4, 3), X, Y.float()), "labels of two dimensions": (nn.Linear(4, 3), X, Y[:, None]),
         "one logit": (nn.Linear(4, 1), X, Y % 2), "a model of two outputs": (nn.LSTM(4, 3, batch_first=True), torch.randn(40, 5, 4), Y),
         "bytes": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)), torch.ones(40, 1, 8, 8, dtype=torch.uint8), Y)}



def test_the_size_of_an_evaluation_set_is_in_no_guarantee():
    rows, scored_on = (TensorDataset(torch.randn(size, 4), torch.arange(size) % 2) for size in (40, 34))
    run = fine_tune(nn.Linear(4, 2), rows, Full(), evaluate=scored_on, **KNOBS)
    assert "34" not in " ".join(run.guarantee.uncharged) and "scores on examples, unless they are public" in run.guarantee.uncharged



def test_a_guarantee_is_given_up_before_the_run_is_recorded():
    class Peek(Method):
        def choose(self, context, among):
            context.void_guarantee("the gradient of one batch")
            return list(among)
    with pytest.raises(ValueError, match=r"call void_guarantee in requests\(context\)"):
        fine_tune(nn.Linear(4, 2), TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), Peek(), **KNOBS)



def test_no_warning_tells_how_long_a_private_text_is():
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



@pytest.mark.parametrize("model, inputs, labels", WRONG.values(), ids=WRONG)
def test_tensors_that_do_not_go_through_a_model_cost_nothing(tmp_path, model, inputs, labels):
    with pytest.raises((ValueError, RuntimeError)) as error:
        fine_tune(model, TensorDataset(inputs, labels), Full(), ledger=tmp_path / "l.sqlite", **KNOBS)
    assert str(error.value).count("\n") <= 2
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert ledger.runs() == []



def test_a_classifier_without_a_padding_token_costs_nothing(tmp_path):
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, num_labels=2))
    rows = [{"input_ids": [1 + row % 7, 2, 3], "labels": row % 2} for row in range(40)]
    with pytest.raises(ValueError, match="has no padding token"):
        fine_tune(model, rows, Full(), ledger=tmp_path / "l.sqlite", **KNOBS)
    assert not (tmp_path / "l.sqlite").exists()



