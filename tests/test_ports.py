"""Scripts in the field's usual form run as they are, and privately with a few changed lines."""

import copy
import csv
import io
import math
import re
from contextlib import redirect_stdout
from difflib import ndiff

import torch
import transformers as hf
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import dpft
from dpft.trainer import settings_of

OPACUS = """\
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, EPOCHS, LR = 64, 4, 0.5
EPSILON, DELTA, MAX_GRAD_NORM = 3.0, 1e-4, 1.0

torch.manual_seed(0)
inputs = torch.randn(1024, 8)
labels = (inputs[:, :4].sum(1) > 0).long()
train_set = TensorDataset(inputs[:768], labels[:768])
test_set = TensorDataset(inputs[768:], labels[768:])
train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
test_loader = DataLoader(test_set, batch_size=256)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
criterion = nn.CrossEntropyLoss()

privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader, epochs=EPOCHS,
    target_epsilon=EPSILON, target_delta=DELTA, max_grad_norm=MAX_GRAD_NORM)

model.train()
for epoch in range(EPOCHS):
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    right = sum((model(data).argmax(1) == target).sum().item()
                for data, target in test_loader)
epsilon = privacy_engine.get_epsilon(DELTA)
print(f"accuracy {right / len(test_set):.2f}")
print(f"epsilon {epsilon:.2f} at delta {DELTA}")
"""
BY_DPFT = [  # lines of the script, and what takes their place
    ("from opacus import PrivacyEngine\n", "from dpft import make_private\n"),
    ("privacy_engine = PrivacyEngine()\nmodel, optimizer, train_loader = privacy_engine.make_private_with_epsilon(\n"
     "    module=model, optimizer=optimizer,", "engine = make_private(\n    module=model, criterion=criterion,"),
    ("for epoch in range(EPOCHS):\n    for data, target in train_loader:\n        optimizer.zero_grad()\n"
     "        loss = criterion(model(data), target)\n        loss.backward()\n        optimizer.step()\n",
     "for step in engine:\n    step.take(optimizer)\n"),
    ("privacy_engine.get_epsilon(DELTA)", "engine.guarantee.epsilon()")]

CLASSIFIER = """\
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer,
    TrainingArguments)

args = TrainingArguments(
    OUTPUT, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4,
    learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=1, save_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True)
raw = load_dataset("csv", data_files={"train": TRAIN, "validation": VALIDATION})
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)

def preprocess(examples):
    return tokenizer(examples["text"], truncation=True, max_length=16)

tokenized = raw.map(preprocess, batched=True)

def compute_metrics(found):
    right = np.argmax(found.predictions, axis=1) == found.label_ids
    return {"accuracy": right.mean().item()}

trainer = Trainer(
    model=model, args=args, train_dataset=tokenized["train"],
    eval_dataset=tokenized["validation"], processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=compute_metrics)
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
print("accuracy", trainer.evaluate()["eval_accuracy"])
"""
WRITER = """\
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer,
    TrainingArguments)

args = TrainingArguments(
    OUTPUT, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=4,
    learning_rate=1e-3, lr_scheduler_type="cosine", save_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True)
raw = load_dataset("csv", data_files={"train": TRAIN, "validation": VALIDATION})
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL)

def tokenize(examples):
    return tokenizer(examples["text"], truncation=True, max_length=16)

tokenized = raw.map(tokenize, batched=True, remove_columns=["text", "label"])
trainer = Trainer(
    model=model, args=args, train_dataset=tokenized["train"],
    eval_dataset=tokenized["validation"], processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
print("loss", trainer.evaluate()["eval_loss"])
"""
BY_OUR_TRAINER = [
    ("args = TrainingArguments(\n", "from dpft import Privacy, PrivateTrainer\n\nargs = TrainingArguments(\n"),
    ("trainer = Trainer(\n", "trainer = PrivateTrainer(privacy=Privacy(epsilon=3.0, seed=1),\n")]
WORDS = ["[PAD]", "[UNK]", "[EOS]", *["the", "night", "was", "quiet", "and", "ward", "staff", "kind", "food", "cold"]]


def ported(script, changes):
    """A script with these changes, and the number of its lines that are new or other than before."""
    text = script
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    lines = [line for line in ndiff(script.splitlines(), text.splitlines()) if line.startswith("+ ") and line[2:].strip()]
    return text, len(lines)


def output_of(script, **names):
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(script, "script", "exec"), names)
    return out.getvalue(), names


def test_an_opacus_script_of_forty_lines_changes_by_at_most_eight():
    port, changed = ported(OPACUS, BY_DPFT)
    assert 35 <= len(OPACUS.strip().splitlines()) <= 50 and changed <= 8
    said = [output_of(script)[0] for script in (OPACUS, port)]
    accuracies, spent = zip(*(map(float, re.findall(r"accuracy (\S+)\nepsilon (\S+)", out)[0]) for out in said), strict=True)
    assert min(accuracies) > 0.7                                            # of 256 rows; far above a coin, and below the usual 0.95
    assert all(2.9 <= one <= 3.0 for one in spent)


def small(folder, kind, config, **sizes):
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    kind(config(vocab_size=len(WORDS), pad_token_id=0, **sizes)).save_pretrained(folder / "model")
    for part, count in (("train", 60), ("validation", 20)):
        with (folder / f"{part}.csv").open("w", newline="") as out:
            texts = [" ".join(WORDS[3 + row % 5:5 + row % 5 + row % 3]) for row in range(count)]
            csv.writer(out).writerows([("text", "label"), *((text, row % 2) for row, text in enumerate(texts))])
    return {"MODEL": str(folder / "model"), "TRAIN": str(folder / "train.csv"), "VALIDATION": str(folder / "validation.csv"),
            "OUTPUT": str(folder / "out")}


def runs_alike(script, places, load, columns, collator):
    """A stock script, its private port, and `fine_tune` on the same rows with the same plan."""
    port, changed = ported(script, BY_OUR_TRAINER)
    assert changed <= 5
    output_of(script, **places)                                            # it is a script that runs without us
    model = load(places["MODEL"])
    out, names = output_of(port, **places)
    trainer, twin = names["trainer"], copy.deepcopy(model)
    tokenizer = hf.AutoTokenizer.from_pretrained(places["MODEL"])
    rows = load_dataset("csv", data_files={"train": places["TRAIN"]})["train"]
    rows = rows.map(lambda one: tokenizer(one["text"], truncation=True, max_length=16)).select_columns(columns)
    given = settings_of(trainer.args, trainer.privacy)
    torch.manual_seed(trainer.args.seed)
    run = dpft.fine_tune(twin, rows, dpft.Full(), epsilon=3.0, seed=1, steps=4, batch_size=16, physical_batch_size=8, clip=1.0,
                         learning_rate=1e-3, schedule=given.schedule, warmup=given.warmup, optimizer=given.optimizer,
                         tokenizer=tokenizer, collate_fn=collator(tokenizer), progress=False)
    assert math.isclose(names["result"].metrics["epsilon"], run.epsilon, rel_tol=1e-6) and "epsilon" in out
    for (name, ours), theirs in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert "none changed" in dpft.verify(places["OUTPUT"])[-1]


def test_the_stock_classifier_changes_by_at_most_five_lines_and_trains_as_fine_tune_does(tmp_path):
    places = small(tmp_path, hf.BertForSequenceClassification, hf.BertConfig, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=24, max_position_embeddings=16)
    runs_alike(CLASSIFIER, places, lambda folder: hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2),
               ["input_ids", "attention_mask", "label"], hf.DataCollatorWithPadding)


def test_the_stock_language_model_changes_by_at_most_five_lines_and_trains_as_fine_tune_does(tmp_path):
    places = small(tmp_path, hf.GPT2LMHeadModel, hf.GPT2Config, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    runs_alike(WRITER, places, hf.AutoModelForCausalLM.from_pretrained, ["input_ids", "attention_mask"],
               lambda tokenizer: hf.DataCollatorForLanguageModeling(tokenizer, mlm=False))
