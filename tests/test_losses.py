"""Each task has the loss that Transformers gives an example alone, and a score of its own; what is unknown is asked for."""


from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn, tensor

from dpft.gradients import clipped_sum, per_example_gradients
from dpft.losses import (
    ACCURACY,
    EXACT,
    PERPLEXITY,
    R2,
    TASKS,
    accuracy,
    default_loss,
    exact_match,
    example_losses,
    logits,
    measure_for,
    perplexity,
    summed_losses,
    task_of,
)

SMALL = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
             max_position_embeddings=24, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BART = dict(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=24, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=2, dropout=0.0)
T5 = dict(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
          dropout_rate=0.0)
GPT = dict(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=24, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
           attn_pdrop=0.0)
LLAMA = {name: value for name, value in SMALL.items() if not name.endswith("prob")} | {"num_key_value_heads": 1}
WHISPER = BART | dict(num_mel_bins=4, max_source_positions=8, max_target_positions=24)
ROWS, TOKENS = 5, 7


def made(kind, config, **more):
    torch.manual_seed(0)
    return kind(config(**more)).double().eval()


def numbers(*shape, high=40, low=1, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def text(**labels):
    mask = (torch.arange(TOKENS) < tensor([7, 3, 5, 6, 7])[:, None]).long()
    return {"input_ids": numbers(ROWS, TOKENS) * mask, "attention_mask": mask, **labels}


def token_labels(high, seed=1):
    labels = numbers(ROWS, TOKENS, high=high, low=0, seed=seed)
    labels[0, :3] = labels[1, 2:] = labels[2, 5:] = -100
    return labels


def pixels(size=8, **labels):
    images = torch.randn(ROWS, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": images, **labels}


VIT = {name: value for name, value in SMALL.items() if name not in ("vocab_size", "max_position_embeddings", "pad_token_id")}
VIT |= dict(image_size=8, patch_size=4, num_labels=3)
CLASSES, SETS = tensor([0, 2, 1, 1, 0]), tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0]])
REALS = torch.linspace(-1, 2, 5, dtype=torch.float64)
SPANS = {"start_positions": tensor([1, 0, 2, 3, 0]), "end_positions": tensor([3, 2, 2, 9, 6])}  # 9 lies beyond the text

CLIPS = dict(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
             conv_kernel=(4, 3), conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
             feat_extract_norm="layer", do_stable_layer_norm=True, apply_spec_augment=False, layerdrop=0.0, pad_token_id=0,
             **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0))


def clips(size=90):
    mask = (torch.arange(size) < tensor([90, 50, 70, 80, 61])[:, None]).long()
    labels = numbers(ROWS, 4, high=9)
    labels[1, 2:] = labels[3, 3:] = -100
    sounds = torch.randn(ROWS, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"input_values": sounds * mask, "attention_mask": mask, "labels": labels}


CASES = {  # model, batch, task
    "classes": (lambda: made(hf.BertForSequenceClassification, hf.BertConfig, **SMALL, num_labels=3), text(labels=CLASSES),
                "classification"),
    "classes of gpt2": (lambda: made(hf.GPT2ForSequenceClassification, hf.GPT2Config, **GPT, num_labels=3), text(labels=CLASSES),
                        "classification"),
    "images": (lambda: made(hf.ViTForImageClassification, hf.ViTConfig, **VIT), pixels(labels=CLASSES), "classification"),
    "a regression": (lambda: made(hf.BertForSequenceClassification, hf.BertConfig, **SMALL, num_labels=1), text(labels=REALS),
                     "classification"),
    "a regression of three": (lambda: made(hf.BertForSequenceClassification, hf.BertConfig, **SMALL, num_labels=3,
                                           problem_type="regression"), text(labels=SETS.double() - REALS[:, None]), "classification"),
    "several labels": (lambda: made(hf.BertForSequenceClassification, hf.BertConfig, **SMALL, num_labels=3,
                                    problem_type="multi_label_classification"), text(labels=SETS.double()), "classification"),
    "several labels, not said": (lambda: made(hf.RobertaForSequenceClassification, hf.RobertaConfig, **SMALL, num_labels=3),
                                 text(labels=SETS.double()), "classification"),
    "tags": (lambda: made(hf.BertForTokenClassification, hf.BertConfig, **SMALL, num_labels=3), text(labels=token_labels(3)), "tagging"),
    "tags of gpt2": (lambda: made(hf.GPT2ForTokenClassification, hf.GPT2Config, **GPT, num_labels=3, classifier_dropout=0.0),
                     text(labels=token_labels(3)), "tagging"),
    "masked": (lambda: made(hf.RobertaForMaskedLM, hf.RobertaConfig, **SMALL), text(labels=token_labels(40)), "masked"),
    "causal": (lambda: made(hf.GPT2LMHeadModel, hf.GPT2Config, **GPT), text(labels=token_labels(40)), "causal"),
    "causal llama": (lambda: made(hf.LlamaForCausalLM, hf.LlamaConfig, **LLAMA), text(labels=token_labels(40)), "causal"),
    "t5": (lambda: made(hf.T5ForConditionalGeneration, hf.T5Config, **T5), text(labels=token_labels(40)), "seq2seq"),
    "t5 with its decoder's input": (lambda: made(hf.T5ForConditionalGeneration, hf.T5Config, **T5),
                                    text(labels=token_labels(40), decoder_input_ids=numbers(ROWS, TOKENS, seed=4)), "seq2seq"),
    "bart": (lambda: made(hf.BartForConditionalGeneration, hf.BartConfig, **BART), text(labels=token_labels(40)), "seq2seq"),
    "whisper": (lambda: made(hf.WhisperForConditionalGeneration, hf.WhisperConfig, **WHISPER),
                {"input_features": torch.randn(ROWS, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
                 "labels": token_labels(40)}, "seq2seq"),
    "answers": (lambda: made(hf.BertForQuestionAnswering, hf.BertConfig, **SMALL), text(**SPANS), "question answering"),
    "choices": (lambda: made(hf.BertForMultipleChoice, hf.BertConfig, **SMALL),
                {"input_ids": numbers(ROWS, 3, TOKENS), "labels": CLASSES}, "choice"),
    "speech": (lambda: made(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config, **CLIPS), clips(), "speech"),
    "speech, a mean": (lambda: made(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config, **CLIPS, ctc_loss_reduction="mean"), clips(), "speech"),
    "next sentence": (lambda: made(hf.BertForNextSentencePrediction, hf.BertConfig, **SMALL), text(labels=CLASSES % 2), "choice"),
}


def alone(batch, row):
    return {name: values[row:row + 1] for name, values in batch.items()}


@pytest.mark.parametrize("case", CASES)
def test_each_examples_loss_is_transformers_own_loss_of_it_alone(case):
    make, batch, task = CASES[case]
    model = make()
    assert task_of(model) == task
    losses = default_loss(model)(model, batch)
    assert losses.shape == (ROWS,) and torch.equal(losses, example_losses(model, batch))
    for row in range(ROWS):
        single = alone(batch, row)
        if case == "answers" and row == 3:                                       # Transformers divides by the ends in sight: none is NaN
            starts = -model(**single).start_logits.log_softmax(-1)[0, SPANS["start_positions"][row]].item()
            assert losses[row].item() == pytest.approx(starts / 2, rel=1e-6)
            continue
        assert losses[row].item() == pytest.approx(model(**single).loss.item(), rel=1e-5, abs=1e-6), row


@pytest.mark.parametrize("case", CASES)
def test_no_row_moves_anothers_loss(case):
    make, batch, _ = CASES[case]
    model = make()
    before = example_losses(model, batch)
    other = {name: values.clone() for name, values in batch.items()}
    for values in other.values():
        values[1:] = values[1:].flip(0)
    assert example_losses(model, other)[0].item() == pytest.approx(before[0].item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*no fast rule")
@pytest.mark.parametrize("case", ["classes", "several labels", "a regression", "tags", "masked", "causal llama", "t5", "answers",
                                  "choices", "speech"])
def test_the_engine_bounds_each_task_as_the_oracle_does(case):
    make, batch, _ = CASES[case]
    model = make()
    loss_fn = default_loss(model)
    rows = per_example_gradients(model, loss_fn, batch)
    norms = torch.cat([values.flatten(1) for values in rows.values()], 1).norm(dim=1)
    clip = norms.median().item()
    factors = (clip / norms).clamp(max=1)
    for name, value in clipped_sum(model, loss_fn, batch, clip).items():
        want = torch.tensordot(factors, rows[name], dims=1)
        assert (value - want).norm() <= 1e-6 * clip, name


def test_minus_100_counts_nothing_in_every_task():
    for case, (make, batch, _) in CASES.items():
        if "regression" in case or "speech" in case:         # a number like any other; a clip in which nothing is said
            continue
        nothing = {name: torch.full_like(values, -100) if name in ("labels", *SPANS) else values for name, values in batch.items()}
        assert example_losses(make(), nothing).tolist() == [0] * ROWS, case


def test_names_that_say_the_task_are_all_tried():
    tried = {task for _, _, task in CASES.values()}
    assert tried >= set(TASKS.values()) - {"generation"}


class Tagger(hf.BertForTokenClassification):
    """A user's own head."""


def test_wrapped_and_inherited_heads_keep_their_task():
    from peft import LoraConfig, get_peft_model

    model = Tagger(hf.BertConfig(**SMALL, num_labels=3))
    assert task_of(model) == task_of(nn.DataParallel(model)) == "tagging"
    assert task_of(torch.compile(model)) == "tagging"
    assert task_of(get_peft_model(model, LoraConfig(target_modules=["query"]))) == "tagging"


@pytest.mark.parametrize("make", [
    lambda: made(hf.BartForCausalLM, hf.BartConfig, **BART), lambda: made(hf.BertForPreTraining, hf.BertConfig, **SMALL),
    lambda: made(hf.XLNetLMHeadModel, hf.XLNetConfig, d_model=16, n_layer=1, n_head=2, d_inner=24, vocab_size=40),
    lambda: made(hf.ElectraForPreTraining, hf.ElectraConfig, **SMALL, embedding_size=16)])
def test_a_head_that_is_not_known_is_a_question(make):
    model = make()
    assert task_of(model) is None
    for score in (example_losses, summed_losses):
        with pytest.raises(ValueError, match="let loss_fn be a function") as caught:
            score(model, text(labels=token_labels(40)))
        assert type(model).__name__ in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.long)])
def test_a_module_of_ones_own_is_a_classifier_or_asks(labels):
    model, x = nn.Linear(2, 3), torch.zeros(4, 2)
    own = tensor([0, 1, 2, -100])
    assert torch.allclose(example_losses(model, (x, own)), nn.functional.cross_entropy(model(x), own, reduction="none"), rtol=1e-6)
    with pytest.raises(ValueError, match="let loss_fn be"):
        example_losses(model, (x, labels))
    with pytest.raises(ValueError, match="there is no standard score for Linear"):
        measure_for(model, list(zip(x, labels, strict=True)))


def test_one_score_a_row_is_no_choice_among_classes():
    model, data = nn.Linear(2, 1), [(torch.zeros(2), 0), (torch.ones(2), 1)]
    with pytest.raises(ValueError, match="let loss_fn be"):
        example_losses(model, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)))
    with pytest.raises(ValueError, match="there is no standard score for Linear"):
        measure_for(model, data)
    with pytest.raises(ValueError, match="are not classes"):
        accuracy(model, data)


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_of_items_without_names_only_pairs_say_their_labels(parts):
    model = made(hf.BertForTokenClassification, hf.BertConfig, **SMALL, num_labels=3)
    batch = (text()["input_ids"], text()["attention_mask"], numbers(ROWS, TOKENS, high=3, low=0), CLASSES)[:parts]
    for measured in (default_loss(model), lambda model, batch: measure_for(model, [batch])(model, [tuple(part[0] for part in batch)])):
        with pytest.raises(ValueError, match=f"has {parts} parts without names, .* (let loss_fn be|give a function of the model)"):
            measured(model, batch)


def test_missing_or_impossible_labels_are_one_sentence():
    model = CASES["classes"][0]()
    with pytest.raises(ValueError, match="no 'labels'"):
        example_losses(model, text())
    with pytest.raises(ValueError, match="no 'start_positions'"):
        example_losses(CASES["answers"][0](), text(labels=CLASSES))


# ---- scores


def rows_of(batch):
    return [{name: values[row] for name, values in batch.items()} for row in range(ROWS)]


SCORES = {"classes": ACCURACY, "images": ACCURACY, "choices": ACCURACY, "tags": ACCURACY, "a regression": R2, "a regression of three": R2,
          "several labels": EXACT, "several labels, not said": EXACT, "answers": EXACT, "masked": PERPLEXITY, "causal": PERPLEXITY,
          "t5": PERPLEXITY, "bart": PERPLEXITY}


@pytest.mark.parametrize("case", SCORES)
def test_the_score_is_the_tasks(case):
    make, batch, _ = CASES[case]
    model, data = make(), rows_of(batch)
    measure = measure_for(model, data)
    assert measure == SCORES[case] and measure.higher == (measure.name != "perplexity")
    value = measure(model, data)
    assert value <= 1 or measure.name == "perplexity"
    assert measure.name == "r2" or value >= 0
    for batch_size in (1, 2):
        assert measure(model, data, None, batch_size) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("case", ["tags", "masked", "causal", "t5"])
def test_accuracy_is_a_share_of_the_counted_tokens(case):
    make, batch, task = CASES[case]
    model, shift = make(), int(task == "causal")
    labels = batch["labels"][:, shift:]
    said = logits(model, batch).argmax(-1)[:, :TOKENS - shift]
    counted = labels != -100
    assert accuracy(model, rows_of(batch)) == pytest.approx((said == labels)[counted].double().mean().item(), abs=1e-12)


def test_numbers_have_no_accuracy():
    make, batch, _ = CASES["a regression"]
    with pytest.raises(ValueError, match="are not classes; score them with r2"):
        accuracy(make(), rows_of(batch))


class Says(nn.Module):
    """Answers with what it is given."""

    config = None

    def forward(self, x):
        return x


def test_an_exact_match_is_right_in_every_part():
    model = Says()
    said, labels = tensor([[2.0, -1, 3], [1, 1, 1], [-1, -1, -1]]), tensor([[1.0, 0, 1], [1, 0, 1], [0, -100, 0]])
    assert exact_match(model, list(zip(said, labels, strict=True))) == pytest.approx(2 / 3)


def test_an_exact_match_leaves_out_rows_without_a_counted_label():
    said, labels = tensor([[2.0, -1], [1, 1], [-1, 1]]), tensor([[1.0, 0], [-100, -100], [1, -100]])
    assert exact_match(Says(), list(zip(said, labels, strict=True))) == 1 / 2
    assert exact_match(Says(), list(zip(said[1:2], labels[1:2], strict=True))) == 0

    class Spans(nn.Module):
        "Always the span from 1 to 2, of four places."
        def forward(self, x):
            scores = [torch.eye(4)[torch.full((len(x),), place)] for place in (1, 2)]
            return SimpleNamespace(start_logits=scores[0], end_logits=scores[1])

    Spans.__name__ = "SpansForQuestionAnswering"
    ends = {"start_positions": [1, 1, 4, -100, 9], "end_positions": [2, 3, 2, -100, 9]}       # right, wrong, half, and two not counted
    rows = [{"x": torch.zeros(1), **{name: torch.tensor(values[row]) for name, values in ends.items()}} for row in range(5)]
    assert exact_match(Spans(), rows) == pytest.approx(2 / 3)


def test_perplexity_without_a_counted_token_is_refused():
    make, batch, _ = CASES["causal"]
    with pytest.raises(ValueError, match=r"all labels of the data are -100.*; give labels to some tokens"):
        perplexity(make(), rows_of(batch | {"labels": torch.full_like(batch["labels"], -100)}))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_virtual_tokens_have_no_labels_as_in_peft(kind):
    import peft

    more = {"encoder_hidden_size": 8} if kind == "PromptEncoderConfig" else {}
    model = peft.get_peft_model(made(hf.GPT2LMHeadModel, hf.GPT2Config, **GPT).float(), getattr(peft, kind)(
        task_type="CAUSAL_LM", num_virtual_tokens=3, **more)).eval()
    batch = text()
    batch["labels"] = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
    alone = torch.stack([model(**{name: value[row:row + 1] for name, value in batch.items()}).loss for row in range(ROWS)])
    assert torch.allclose(default_loss(model)(model, batch), alone, atol=1e-5)
