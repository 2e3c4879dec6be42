"""Transformers' Trainer and an Opacus script as doors to the same engine."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import dpft
from dpft import BiTFiT, Full, Ledger, Privacy, PrivateTrainer, SampledGaussian, fine_tune
from dpft.porting import losses_by, make_private
from dpft.trainer import settings_of

BERT = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                  max_position_embeddings=16)


def rows(count=64):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (count, 8), generator=generator).tolist()
    return Dataset.from_list([{"input_ids": one, "attention_mask": [1] * 8, "label": i % 2, "who": f"p{i // 2}"}
                              for i, one in enumerate(ids)])


def arguments(folder, **others):
    return TrainingArguments(str(folder), **{
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 6, "learning_rate": 1e-3, "save_strategy": "no",
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 2, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True} | others)


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


@pytest.fixture
def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BERT)


def test_a_stock_classifier_trains_as_fine_tune_does(bert, tmp_path):
    twin, privacy = copy.deepcopy(bert), Privacy(epsilon=3.0, seed=1, unit="who")
    trainer = PrivateTrainer(model=bert, args=arguments(tmp_path / "out"), train_dataset=rows(), privacy=privacy, method=BiTFiT())
    result = trainer.train()
    given = settings_of(trainer.args, privacy)
    run = fine_tune(twin, rows(), BiTFiT(), epsilon=3.0, seed=1, unit="who", steps=6, batch_size=16, physical_batch_size=4, clip=1.0,
                    learning_rate=1e-3, schedule="cosine", warmup=2, optimizer=given.optimizer, progress=False)
    assert math.isclose(result.metrics["epsilon"], run.epsilon, rel_tol=1e-6) and trainer.guarantee.unit == run.guarantee.unit
    for (name, ours), theirs in zip(bert.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert set(trainer.private_rows(rows()["who"]).column_names) == {"input_ids", "attention_mask", "label"}   # a unit's name for each row
    assert math.isnan(result.training_loss) and not any("loss" in entry for entry in trainer.state.log_history)


def test_a_stock_language_model_trains_and_its_loss_is_shown_on_request(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                                       pad_token_id=0))

    def collate(features):
        ids = torch.tensor([one["input_ids"] for one in features])
        return {"input_ids": ids, "labels": ids.clone()}

    trainer = PrivateTrainer(model=model, args=arguments(tmp_path / "out"), train_dataset=rows().remove_columns(["label", "who"]),
                             data_collator=collate, privacy=Privacy(epsilon=8.0, show_loss=True))
    result = trainer.train()
    assert 2 < result.training_loss < 6 and result.metrics["epsilon"] <= 8
    assert "loss" in trainer.state.log_history[0]


def test_callbacks_logs_evaluation_and_saving_follow_the_arguments(bert, tmp_path):
    seen = []

    class Listen(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append((state.global_step, *sorted(logs)))

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 5

    args = arguments(tmp_path / "out", eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=2)
    trainer = PrivateTrainer(model=bert, args=args, train_dataset=rows(), eval_dataset=rows(16), compute_metrics=accuracy,
                             callbacks=[Listen], privacy=Privacy(epsilon=3.0))
    trainer.train()
    logged = [(step, "eval_accuracy" in names, "epsilon" in names) for step, *names in seen]
    assert logged == [(2, False, True), (3, True, False), (4, False, True), (5, True, False)]
    assert (tmp_path / "out-checkpoint").is_dir() and trainer.state.global_step == 5
    assert any("scores on" in fact for fact in trainer.guarantee.uncharged)


def test_what_it_saves_opens_anywhere_and_is_verified_with_the_trainer_s_own_files(bert, tmp_path):
    trainer = PrivateTrainer(model=bert, args=arguments(tmp_path / "out"), train_dataset=rows(), privacy=Privacy(epsilon=3.0),
                             eval_dataset=rows(16), compute_metrics=accuracy)
    metrics = trainer.train().metrics
    trainer.evaluate()
    trainer.save_model()
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.create_model_card()
    assert (tmp_path / "out/trainer_state.json").exists() and "none changed" in dpft.verify(tmp_path / "out")[-1]
    card = (tmp_path / "out/README.md").read_text()
    assert "scores on examples" in card
    again = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    ids = torch.tensor(rows(4)["input_ids"])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, bert.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(("name", "value"), [
    ("label_smoothing_factor", 0.1), ("neftune_noise_alpha", 5.0), ("auto_find_batch_size", True), ("torch_compile", True)])
def test_an_argument_that_cannot_hold_is_refused_with_the_way_out(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value}"):
        settings_of(arguments(tmp_path, **{name: value}))


def test_a_loss_of_the_whole_batch_is_refused(bert, tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    with pytest.raises(ValueError, match="one loss for each"):
        Own(model=bert, args=arguments(tmp_path), train_dataset=rows(), privacy=Privacy(epsilon=3.0))


def test_defaults_made_for_training_without_privacy_give_way(tmp_path):
    given = settings_of(TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no"), Privacy(epsilon=3.0))
    assert given.learning_rate is None and given.seed is None and given.clip == 1.0 and given.epochs == 3.0


def test_before_training_it_saves_as_transformers_does(bert, tmp_path):
    trainer = PrivateTrainer(model=bert, args=arguments(tmp_path / "out"), privacy=Privacy(epsilon=3.0))
    assert isinstance(trainer, Trainer) and trainer.guarantee is None
    trainer.save_model()
    assert (tmp_path / "out/model.safetensors").exists() and not (tmp_path / "out/guarantee.json").exists()
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()


# ---- Opacus


def points():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def test_an_opacus_script_makes_an_engine():
    torch.manual_seed(0)
    model, loader = nn.Linear(4, 2), DataLoader(points(), batch_size=16, shuffle=True)
    twin = copy.deepcopy(model)
    engine = make_private(module=model, data_loader=loader, criterion=nn.CrossEntropyLoss(), target_epsilon=3.0, target_delta=1e-3,
                          epochs=2, max_grad_norm=0.5, seed=1)
    other = dpft.Engine(twin, None, Full(), points(), epsilon=3.0, delta=1e-3, epochs=2, clip=0.5, batch_size=16, seed=1)
    for one, net in ((engine, model), (other, twin)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in one:
            for batch in step:
                step.add(batch)
            step.privatize()
            optimizer.step()
            step.done()
    assert engine.guarantee.epsilon() == other.guarantee.epsilon() <= 3.0
    assert torch.allclose(model.weight, twin.weight, atol=1e-6)


def test_a_criterion_gives_one_loss_for_each_example():
    model, (inputs, labels) = nn.Linear(4, 2), points().tensors
    for criterion in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        losses = losses_by(criterion)(model, (inputs, labels))
        assert torch.allclose(losses.mean(), nn.functional.cross_entropy(model(inputs), labels))
    soft = torch.rand(len(labels), 2)
    assert losses_by(nn.CrossEntropyLoss())(model, (inputs, soft)).shape == (len(labels),)
    pictures = torch.randn(3, 2, 5)
    assert losses_by(nn.MSELoss())(nn.Identity(), (pictures, 0 * pictures)).shape == (3,)
    with pytest.raises(ValueError, match="reduction"):
        losses_by(nn.Identity())


def test_an_opacus_history_goes_on_under_its_budget(tmp_path):
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(50):
        accountant.step(noise_multiplier=1.1, sample_rate=0.01)
    with Ledger(tmp_path / "mine.ledger") as ledger:
        found = ledger.import_opacus(accountant, delta=1e-5)
        assert found == [SampledGaussian(1.1, 0.01, 50)]
        spent = ledger.epsilon(1e-5, accountant="rdp")
        assert math.isclose(spent, accountant.get_epsilon(1e-5), rel_tol=0.02)
        ledger.set_budget(2.0, 1e-5)
        assert 0 < ledger.left() < 1
    with Ledger(tmp_path / "other.ledger") as ledger:
        assert ledger.import_opacus(accountant.state_dict()) == ledger.import_opacus([(1.1, 0.01, 50)]) == found
