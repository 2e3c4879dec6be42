"""Each way of each study goes from its tuning to its runs to a verdict, with stand-ins for data and models."""

import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dpft.book import experiments, pretrained
from dpft.book.evidence import EXPERIMENTS, gpu, language, protocol, sizes
from dpft.book.evidence.freezing import spent
from dpft.book.evidence.protocol import STUDIES, measure_of, study_grid, study_verdict, tuning_grid
from dpft.book.experiments import make_record, recorded, results_file, settings_in, write_records
from dpft.book.pretrained import EfficientNetLite0
from dpft.data import Public, TableData, Task, TensorData
from dpft.losses import logits
from dpft.models import load_tokenizer

TINY = {"steps": 8, "batch_size": 6, "physical_batch_size": 4, "accountant": "rdp"}      # so tuning runs have two steps
WORDS = ["the", "film", "is", "good", "bad", "dull", "fine", "a", "very", "long", "short", "plot", "inn", "pub", "serves", "food",
         "near", "river"]


def pictures(name, limit=None):
    "Thirty pictures of ten things, which is what `load_data` gives for the name."
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (42, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = TensorData(images, torch.arange(42) % 10, 255.0)
    return Task(name, "image", data.subset(range(30)), data.subset(range(30, 42)), classes=tuple("0123456789"))


def many_pictures(name, limit=None):
    "More of them than a vector has directions."
    images = torch.randint(0, 256, (1400, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    data = TensorData(images, torch.arange(1400) % 10, 255.0)
    return Task(name, "image", data, data.subset(range(12)), classes=tuple("0123456789"))


def phrases(first, count):
    return [" ".join((WORDS * 4)[start * 5 % 17:][:4 + start % 5]) for start in range(first, first + count)]


def texts(name, limit=None):
    parts = [TableData({"sentence": phrases(first, count), "label": [row % 2 for row in range(count)]})
             for first, count in ((0, 30), (30, 8), (40, 8))]
    return Task(name, "text", *parts, classes=("no", "yes"), columns=("sentence", "label"))


def facts(name, limit=None):
    parts = [TableData({"mr": [f"name {number}" for number in range(first, first + count)], "ref": phrases(first, count)})
             for first, count in ((0, 30), (30, 8), (40, 8))]
    return Task(name, "causal", *parts, columns=("mr", "ref"))


def stand_in_bert(folder):
    "A BERT of one narrow layer, with the vocabulary of MiniLM's tokenizer."
    tokenizer = load_tokenizer("minilm")
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                        num_labels=2)
    pretrained.normalised_classifier()(config).save_pretrained(folder)
    return folder


def stand_in_llama(folder):
    "A Llama of two narrow layers with a tied embedding, and a tokenizer of words."
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[END]", "name", *map(str, range(60)), *WORDS])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[END]", bos_token="[END]", unk_token="[UNK]")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
                                 num_key_value_heads=2, max_position_embeddings=160, tie_word_embeddings=True, pad_token_id=0,
                                 eos_token_id=2, bos_token_id=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def stand_in_gpt2(folder, tokenizer):
    "A GPT-2 of two narrow layers, whose biases have learned something."
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=2, vocab_size=len(tokenizer), n_positions=192, pad_token_id=0,
                                       eos_token_id=2, bos_token_id=2))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):                                                # those of a new model are zero, and have no relevance
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    "A cache with stand-ins in the place of the pre-trained weights; of the network on pictures, two of its seven stages."
    folder = tmp_path_factory.mktemp("cache")
    torch.manual_seed(0)
    (folder / "efficientnet-lite0").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "STAGES", ((3, 1, 1, 8, 1), (5, 2, 6, 12, 2)))
        save_file(EfficientNetLite0(1000).state_dict(), str(folder / "efficientnet-lite0" / "model.safetensors"))
        stand_in_bert(folder / "minilm")
        stand_in_llama(folder / "smollm2")
        stand_in_gpt2(folder / "gpt2", load_tokenizer(str(folder / "smollm2")))
        yield folder


@pytest.fixture(scope="module")
def forgotten():
    "Data and models that are kept between runs, as those of a queue are: none from before, and none afterwards."
    kept = (experiments.prepared_task, pretrained.feature_task, pretrained._pictures, pretrained._lite, pretrained._minilm,
            language.development_pairs)
    for its in kept:
        its.cache_clear()
    yield
    for its in kept:
        its.cache_clear()


@pytest.fixture
def world(weights, forgotten, tmp_path, monkeypatch):
    "Everything that the studies read, made small; no result of one test serves another."
    monkeypatch.setenv("DPFT_CACHE", str(weights))
    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    made = {"cifar10": pictures, "cifar100": many_pictures, "sst2": texts, "e2e": facts}
    real = experiments.load_data
    for module in (experiments, pretrained):
        monkeypatch.setattr(module, "load_data", lambda name, limit=None: made[name](name) if name in made else real(name, limit))
    public = TableData({"text": [" ".join(phrases(first, 40)) for first in range(0, 4000, 40)]})
    monkeypatch.setattr(pretrained, "public_text", lambda: Public(public, source="made up"))
    monkeypatch.setattr(pretrained, "PUBLIC_ROWS", 1400)
    monkeypatch.setattr(pretrained, "minilm_folder", lambda: weights / "minilm")
    monkeypatch.setattr(language, "language_model", lambda name: str(weights / "gpt2"))


def small(name):
    "A study of eight steps on a few rows, otherwise as it is."
    study = STUDIES[name]
    sizes = {name: value for name, value in (("side", 32), ("limit", 26)) if name in study.shared}
    brief = {"public_epochs": 1, "public_limit": 64, "physical_batch_size": 256} if "public_epochs" in study.shared else {}
    shared = {**study.shared, **TINY, **sizes, **brief}
    looks = {label: replace(way, options={**way.options, "relevance_rate": 0.9})      # a free look must find a row
             for label, way in study.ways.items() if "allow_non_private" in way.options}
    return replace(study, shared=shared, held_out=6, ways=study.ways | looks)


def with_scores(run, score, **more):
    "A record as a run of these settings would leave it."
    name = "perplexity" if run["data"] == "e2e" else "test_accuracy" if run["data"] == "sst2" and "held_out" not in run else "accuracy"
    return {**run, "reduced": False, "metrics": {name: score}, **more}


def promised(study, label):
    "The epsilon that a run may spend at most: what looks at private data for nothing promises nothing."
    free = study.ways[label].options.get("allow_non_private")
    return float("inf") if free else float(study.epsilons[0])


def whole_way(name, label, study):
    "One real run of the tuning and one of the study; the others get scores by their rates, so that the ladder ends."
    study = replace(study, ways={label: study.ways[label]})
    file, done = results_file(f"{name}-tuning"), []
    sign = -1 if study.shared["data"] == "e2e" else 1
    for round in range(9):
        new = [run for run in tuning_grid(f"{name}-tuning", study) if run not in done]
        if not round:
            entry = make_record(f"{name}-tuning", measure_of(study), new[-1], False)
            assert entry["metrics"] and float(entry["epsilon"]) <= promised(study, label)
            assert bool(entry["mechanisms"]) == (promised(study, label) < float("inf"))
        if not new:
            break
        bound = [run["clip"] if study.shared.get("optimizer") == "sgd" else 1 for run in new]
        scores = [5 - sign * abs(run["learning_rate"] * its / study.ways[label].rate - 1) for run, its in zip(new, bound, strict=True)]
        write_records(file, [with_scores(run, score, experiment=f"{name}-tuning") for run, score in zip(new, scores, strict=True)])
        done += new
    else:
        raise AssertionError(f"the tuning of {label} does not end")
    runs = study_grid(name, study)
    assert len({run["seed"] for run in runs if run["target_epsilon"] == study.epsilons[0]}) == study.headline
    entry = make_record(name, measure_of(study), runs[0], False)
    write_records(results_file(name), [with_scores(run, entry["metrics"][next(iter(with_scores(run, 0)["metrics"]))] + 1e-3 * run["seed"],
                                                   experiment=name) for run in runs])
    return entry


# a way of each kind of data, model and method; the others differ in settings
MADE = {"digits": ("LoRA + BiTFiT",), "images-head": ("LastLayer",), "images-head-whitened": ("LastLayer",),
        "text-head-smollm2": ("LastLayer",), "images-small": ("DPFrost", "LastLayer, then BiTFiT"),
        "text-short": ("RandomPartitions",),
        "language": ("LoRA",), "language-small": ("LoRA, Rap-FT as published", "BiTFiT, Rap-FT at true ε")}


@pytest.mark.parametrize("name,label", [(name, label) for name, labels in MADE.items() for label in labels])
def test_a_way_goes_from_its_tuning_to_its_runs(name, label, world):
    study = small(name)
    entry = whole_way(name, label, study)
    assert float(entry["epsilon"]) <= promised(study, label) and entry["seconds"] > 0
    if study.shared["data"] == "e2e":
        assert entry["untouched"]["perplexity"] > 1                              # of the same rows, before
    else:
        assert set(entry["answers"]) == set(entry["metrics"]) and len(entry["steps_seen"]["loss"]) == TINY["steps"]


@pytest.mark.parametrize("settings", [{"data": "cifar10", "model": "efficientnet-lite0", "side": 32},
                                      {"data": "sst2", "model": "minilm", "scale": 10.0}], ids=["pictures", "sentences"])
def test_a_head_alone_sees_what_the_whole_network_gives_its_own(settings, world, tmp_path, monkeypatch):
    whole, task = pretrained.prepared(settings)
    alone = {**settings, "model": "head", "scale": 10.0}
    head, rows = pretrained.prepared(alone)
    own = whole.head if settings["data"] == "cifar10" else whole.classifier
    torch.manual_seed(1)
    torch.nn.init.normal_(own.weight)
    head[1].load_state_dict(own.state_dict())
    for part in ("train", "dev", "test"):
        if getattr(task, part) is not None:
            kept = torch.arange(len(getattr(task, part))).flip(0)
            said = [logits(model.eval(), getattr(its, part).batch(kept)) for model, its in ((whole, task), (head, rows))]
            assert len(kept) >= 8 and (said[0] - said[1]).abs().max() < 0.01 * said[0].abs().max()
    assert rows.assumed_public == task.assumed_public
    pretrained.feature_task.cache_clear()
    if settings["data"] == "sst2":                                               # its weights lie elsewhere, and the cache may not be there
        with monkeypatch.context() as patch:
            patch.setenv("DPFT_CACHE", str(tmp_path / "new" / "cache"))
            assert len(pretrained.prepared(alone)[1].train) == len(rows.train)
        pretrained.feature_task.cache_clear()
    monkeypatch.setattr(pretrained, "headless", None)                            # vectors that are kept take no network
    again = pretrained.prepared({**alone, "held_out": 6})[1]
    assert len(again.dev) == 6 and len(again.train) == len(rows.train) - 6 and again.test is None
    assert {str(row.tolist()) for row in again.dev.images} <= {str(row.tolist()) for row in rows.train.images}


def test_a_picture_and_its_mirror_have_one_vector(world, monkeypatch):
    given = [pictures("cifar10")]
    given.append(replace(given[0], train=replace(given[0].train, images=given[0].train.images.flip(-1))))
    found = []
    for task in given:
        monkeypatch.setattr(pretrained, "load_data", lambda name, task=task: task)
        its = [pretrained.feature_task("cifar10", 32, "efficientnet-lite0", mirrored=mirrored).train.images for mirrored in (False, True)]
        pretrained.feature_task.cache_clear()
        found.append(its)
    alone, both = ((one - two).norm() / one.norm() for one, two in zip(*found, strict=True))
    assert both < alone / 10


def test_smollm2_is_read_at_the_last_word_of_the_prompt(world, weights, monkeypatch):
    monkeypatch.setattr(pretrained, "DEPTH", 1)
    said = ["the film is good", "bad"]
    vectors = pretrained.vectors(pretrained.headless("smollm2"), pretrained.prompted(said, 64))
    whole, tokenizer = LlamaForCausalLM.from_pretrained(weights / "smollm2").eval(), load_tokenizer(str(weights / "smollm2"))
    for text, vector in zip(said, vectors, strict=True):
        tokens = tokenizer(text + " It was", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = whole(tokens, output_hidden_states=True).hidden_states[1]
        assert torch.allclose(vector, states[0, -1], atol=1e-5)


def test_too_few_public_rows_are_refused():
    with pytest.raises(ValueError, match="8 public rows say nothing of some of the 16 directions"):
        pretrained.whiten(torch.randn(4, 16), torch.randn(8, 16))


def test_phrases_in_smollm2s_tokens_are_for_no_other_network():
    with pytest.raises(ValueError, match="phrases are in SmolLM2's tokens, which minilm can't read"):
        pretrained.public_rows("phrases", 64, "minilm")


def test_the_layers_with_the_smallest_mean_loss_in_trials_train_on_private_sentences(world):
    with pytest.raises(ValueError, match="dpft run choice-trials"):
        sizes.best_layers()
    tried = {**next(sizes.trial_grid()), **TINY, "layers": [1]}
    entry = make_record("choice-trials", sizes.trial_run, tried, False)
    assert 0 < entry["metrics"]["loss"] < 2 and all(".layer.1." in name for name in entry["chosen"])
    runs = [{**tried, "layers": [layer], "seed": seed} for layer in range(2) for seed in range(2)]
    write_records(results_file("choice-trials"),
                  [{**run, "reduced": False, "metrics": {"loss": loss}} for run, loss in zip(runs, (0.1, 0.9, 0.4, 0.5), strict=True)])
    assert sizes.best_layers() == [1]
    private = [run for run in sizes.sentence_grid() if run["label"].endswith("layers")]
    assert all(run["layers"] == [1] for run in private if run["label"] == "tried layers")
    assert len({tuple(run["layers"]) for run in private if run["label"] == "random layers"}) > 1
    entry = make_record("choosers-sentences", sizes.sentence_run, {**private[0], **TINY}, False)
    model = pretrained.normalised_minilm()
    inside = [p.numel() for name, p in model.named_parameters() if ".layer.1." in name or "classifier" in name]
    assert entry["entries"] == sum(inside) < sum(p.numel() for p in model.parameters()) and entry["epsilon"] <= 2.0


@pytest.mark.parametrize("name,label", [(name, label) for name, its in STUDIES.items() for label, way in its.ways.items() if way.shares])
def test_a_phase_has_steps_in_a_run_of_any_length(name, label):
    study = STUDIES[name]
    lengths = [study.shared["steps"], max(1, study.shared["steps"] // 4), 2]
    for steps in lengths:
        options = protocol.options_at(study.ways[label], steps, 0)
        assert all(1 <= options[its] < steps for its in study.ways[label].shares)
        assert set(options) == set(study.ways[label].options) | set(study.ways[label].shares)
    runs = [protocol.entry(its, label, "1", 1e-3, 2.0, 0)["options"] for its in (study, protocol.short(study))]
    (share,) = study.ways[label].shares.items()
    assert all(abs(options[share[0]] / steps - share[1]) <= 0.5 / steps for options, steps in zip(runs, lengths, strict=False))


def test_a_random_choice_is_another_one_for_each_seed():
    runs = [protocol.entry(STUDIES["text-full"], "RandomPartitions", "1", 1e-3, 2.0, seed)["options"]["seed"] for seed in range(3)]
    assert runs == [0, 1, 2] and "seed" not in protocol.entry(STUDIES["text-full"], "Adapter", "1", 1e-3, 2.0, 1)["options"]


@pytest.mark.parametrize("name", ["images-small", "language"])
def test_records_of_a_study_come_to_a_verdict(name, world):
    study = small(name)
    labels = list(study.ways)[:2]
    assert study_verdict(name, study, *labels[:1], labels[1:])[0] == "undecided"
    for rank, label in enumerate(labels):
        its = replace(study, ways={label: study.ways[label]})
        sign = -1 if name == "language" else 1
        for _ in range(9):
            there = [settings_in(entry) for entry in recorded(results_file(f"{name}-tuning"))]
            new = [run for run in tuning_grid(f"{name}-tuning", its) if run not in there]
            write_records(results_file(f"{name}-tuning"),
                          [with_scores(run, 5 - sign * abs(run["learning_rate"] / its.ways[label].rate - 1), experiment="") for run in new])
        runs = [run for run in study_grid(name, its) if run["target_epsilon"] == study.epsilons[0]]
        more = [{**runs[0], "seed": seed} for seed in range(5)]
        write_records(results_file(name), [
            with_scores(run, 5 - sign * rank + 1e-3 * ((run["seed"] * (rank + 2)) % 5), experiment="") for run in more])
    assert study_verdict(name, study, labels[0], labels[1:]) == ("held", "1 of 1 ahead, 0 behind")
    assert study_verdict(name, study, labels[1], labels[:1]) == ("did not hold", "0 of 1 ahead, 1 behind")
    assert study_verdict(name, study, labels[0], [*labels[1:], "LoRA" if name != "language" else "Full"])[0] == "undecided"


def test_the_language_model_is_shown_before_and_after_and_goes_on(world, run, tmp_path, monkeypatch):
    from dpft.book import tasks
    monkeypatch.setattr(tasks, "load_data", lambda name, source=None: facts(name))
    words = ("llm", "--output", tmp_path / "llm", "--steps", "2", "--batch-size", "6", "--every", "3")
    status, out, err = run(*words)
    assert status == 0, err
    assert "before: perplexity" in out and "after: perplexity" in out
    assert "says: **(8.00, 1.00e-05)-differentially private** with respect to" in out
    assert out.count("people:") == 6 and all(name in out for name in ("bleu", "rouge_l", "nist", "meteor", "cider"))
    assert (tmp_path / "llm" / "model" / "dpft.json").exists()
    again = run(*words)
    assert again[0] == 0 and again[1] == out                                     # nothing is trained anew
    (tmp_path / "llm" / "after.json").unlink()
    status, out, err = run(*words)
    assert status == 0 and "after: perplexity" in out, err                       # the state is there, so no step is paid again


# ---- three figures on a GPU


def test_the_runs_for_a_gpu_are_rehearsed_to_the_end_and_the_most_valuable_come_first(world, run, tmp_path, monkeypatch):
    its = EXPERIMENTS["gpu-figures"]
    brief = {"limit": 26, "held_out": 6, "batch_size": 8, "steps": 3, "stops": [1, 2, 3], "physical_batch_size": 64, "widest": 20}
    def grid():
        return [{**row, **{name: value for name, value in brief.items() if name in row}} for row in its.grid()]
    monkeypatch.setitem(EXPERIMENTS, "gpu-figures", replace(its, grid=grid))
    status, _, err = run("run", "gpu-figures", "--workers", "1", "--output", tmp_path)
    records = recorded(tmp_path / "gpu-figures.jsonl")
    assert status == 0 and not any(entry["cannot"] for entry in records), (err, [entry["cannot"] for entry in records])
    assert [(entry["figure"], entry["data"]) for entry in records][:4] == [
        ("utility", "cifar10"), ("pwcca", "cifar10"), ("angles", "cifar10"), ("utility", "sst2")] and len(records) == 8
    distances = records[1]["distances"]
    assert set(distances) == {"1", "2", "3"} and all(0 <= value <= 1 for at in distances.values() for value in at.values())
    assert set(distances["3"].values()) <= {0.0} and min(distances["1"].values()) < max(distances["1"].values())
    lowest = next(iter(distances["2"]))
    assert distances["2"][lowest] == 0 < distances["1"][lowest]                    # frozen after the second step
    assert [look["frozen"] for look in records[2]["series"]] == [False] and "1.0" in records[2]["series"][0]["groups"]
    assert all(entry["reduced"] and "accuracy" in entry["metrics"] and entry["device"] for entry in records)


def test_the_runs_for_a_gpu_are_whole_tasks_and_a_failure_leaves_its_reason(monkeypatch):
    runs, reduced = EXPERIMENTS["gpu-figures"].rows("gpu-figures", full=True)
    assert not reduced and len(runs) == 20 and not any("limit" in row for row in runs) and EXPERIMENTS["gpu-figures"].hours == 0.1
    assert {(row["data"], row["method"], row["target_epsilon"]) for row in runs if row["figure"] == "utility"} == {
        (data, *rest) for data in ("cifar10", "sst2") for rest in itertools.product(("Full", "BiTFiT", "LastLayer"), (0.5, 2.0, 8.0))}
    assert spent(runs[1], runs[1]["steps"], 50_000) == pytest.approx(2.0, abs=0.1)
    def fails(settings):
        raise RuntimeError("CUDA out of memory")
    monkeypatch.setitem(gpu.MEASURES, "utility", fails)
    assert gpu.figure_entry({"figure": "utility"}) == {"metrics": {}, "cannot": "RuntimeError: CUDA out of memory"}
