"""A small GPT-2 from its recipe, the scores of texts, what a completion's loss counts."""

import json
import math
from collections import Counter

import pytest
import torch

from dpft.book import experiments
from dpft.book.evidence import language
from dpft.book.evidence.language import Recipe, completions, generation_scores
from dpft.book.text_scores import SCORES, cider, meteor, nist, text_scores
from dpft.data import Public, TableData, Task
from dpft.losses import example_losses, perplexity
from dpft.models import load_model, load_tokenizer
from dpft.privacy import SampledGaussian, epsilon
from dpft.texts import encode

WORDS = ["the", "inn", "by", "the", "river", "serves", "good", "food", "and", "the", "food", "is", "cheap", "while", "a", "pub", "near",
         "the", "city", "serves", "dear", "wine"]
ALL = set(SCORES)
MICRO = Recipe(layers=1, width=16, heads=2, vocabulary=290, context=48, batch_size=8, learning_rate=1e-2, epochs=2)


def sentences(count, seed=0):
    "Sentences of a tiny language, in which some words follow others."
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(WORDS), (count,), generator=generator).tolist()
    return [" ".join((WORDS * 3)[start:start + 12]) + "." for start in starts]


def pairs(count, first=0):
    "Facts and a sentence that says them; each fact twice."
    names = ["inn", "pub", "bar", "cafe", "hall"]
    rows = [(f"name[{names[i % 5]}], place[{i}]", f"The {names[i % 5]} is at {i}{end}")
            for i in range(first, first + count) for end in (".", " here.")]
    return TableData({"mr": [mr for mr, _ in rows], "ref": [ref for _, ref in rows]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A model of the micro recipe."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return language.pretrained_gpt2(MICRO, Public(TableData({"text": sentences(400)}), "made up"))


@pytest.fixture
def small_world(folder, monkeypatch):
    "The task of the experiments, made tiny."
    encoded = [encode(pairs(*part), load_tokenizer(str(folder)), ("mr", "ref"), 48, "causal") for part in ((40,), (6, 40), (10, 46))]
    task = Task("tiny", "causal", *encoded, columns=("mr", "ref"))
    monkeypatch.setattr(language, "language_model", lambda name: str(folder))
    for room in (language, experiments):
        monkeypatch.setattr(room, "prepared_task", lambda *_: task)
    return {"data": "tiny", "model": "micro", "max_length": 48, "accountant": "rdp", "delta": 1e-3, "steps": 2, "batch_size": 16,
            "every": 2, "beams": 1, "clip": 1.0, "method": "BiTFiT", "options": {}, "learning_rate": 1e-2, "target_epsilon": 3.0, "seed": 0}


def test_the_recipe_makes_a_transformers_folder_once_and_the_model_has_learnt(folder, monkeypatch):
    model, tokenizer = load_model(str(folder), kind="causal"), load_tokenizer(str(folder))
    facts = json.loads((folder / "pretraining.json").read_text())
    assert type(model).__name__ == "GPT2LMHeadModel" and model.config.n_positions == 48 and len(tokenizer) == model.config.vocab_size == 290
    assert tokenizer.decode(tokenizer("An inn, é!")["input_ids"]) == "An inn, é!"     # bytes, so that nothing is unknown
    fresh = language.blank_gpt2(MICRO, tokenizer)
    unseen = language.packed_windows(sentences(40, seed=1), tokenizer, 48)
    assert perplexity(model, unseen) < 0.3 * perplexity(fresh, unseen)
    assert facts["perplexity"] < 60 and facts["source"] == "made up"
    monkeypatch.setenv("DPFT_CACHE", str(folder.parent))
    monkeypatch.setattr(language, "pretrain", lambda *_: pytest.fail("trained again"))
    text = Public(TableData({"text": sentences(400)}), "made up")
    assert language.pretrained_gpt2(MICRO, text) == folder
    with pytest.raises(BaseException, match="trained again"):                          # another text, another model
        language.pretrained_gpt2(MICRO, Public(TableData({"text": sentences(401)}), "made up"))
    assert language.language_model("gpt2") == "gpt2"


def test_windows_hold_the_texts_end_to_end(folder):
    tokenizer = load_tokenizer(str(folder))
    texts = sentences(30)
    windows = language.packed_windows(texts, tokenizer, 16)
    stream = [token for text in texts for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    assert windows.fields["input_ids"].tolist() == stream[:len(stream) // 16 * 16] and set(windows.lengths.tolist()) == {16}
    assert len(language._first_characters(["ab", "cd", "ef"], 3)) == 2 and len(language._first_characters(["ab", "cd"], None)) == 2
    held, rest = language._rows(windows, 0, 2), language._rows(windows, 2, len(windows))
    assert torch.cat([held[1]["input_ids"], rest[0]["input_ids"]]).tolist() == stream[16:48]


def test_scores_of_texts_as_counted_by_hand():
    def both(*given):
        return {name: value for name, value in text_scores(*given).items() if name in ("bleu", "rouge_l")}
    assert both(["the inn is by the river"], [["no", "the inn is by the river"]]) == pytest.approx({"bleu": 100, "rouge_l": 100})
    # five tokens against six: precisions 5/5, 4/4, 3/3, 2/2 and a brevity penalty of exp(1 - 6/5)
    found = text_scores(["a b c d e"], [["a b c d e f"]])
    assert found["bleu"] == pytest.approx(100 * math.exp(-0.2)) and found["rouge_l"] == pytest.approx(100 * 2 * (1 * 5 / 6) / (1 + 5 / 6))
    # the second has more references than the first, and the better one counts
    found = both(["a b c d", "w x y z"], [["a b c d"], ["q", "w x y z", "w x"]])
    assert found == pytest.approx({"bleu": 100, "rouge_l": 100})
    assert text_scores(["p q", "r s"], [["a b"], ["c d"]])["rouge_l"] == 0
    assert set(text_scores(["a"], [["a"]])) == ALL


def test_nist_as_counted_by_hand():
    # four words, each once: log2(4 / 1) bits for each word; the pairs tell nothing more
    assert nist(["a b", "c d"], [["a b"], ["c d"]]) == pytest.approx(2)
    assert nist(["a x", "c y"], [["a b"], ["c d"]]) == pytest.approx(1) and nist(["x"], [["a b"]]) == 0
    beta = math.log(0.5) / math.log(1.5) ** 2                                    # a text of a third of the length
    assert nist(["a"], [["a b c"]]) == pytest.approx(math.log2(3) * math.exp(beta * math.log(1 / 3) ** 2))
    assert nist(["", ""], [["a b"], ["c d"]]) == 0
    assert nist(["A B.", "c d"], [["a b."], ["c d"]]) == nist(["a b .", "c d"], [["a b ."], ["c d"]])


def test_meteor_as_counted_by_hand():
    # all n words in one piece: 1 less half of a piece per word, cubed
    assert meteor(["a b c d"], [["a b c d"]]) == pytest.approx(100 * (1 - 0.5 * (1 / 4) ** 3))
    # three of four words, of six in the reference, in two pieces
    precision, recall, penalty = 3 / 4, 3 / 6, 0.5 * (2 / 3) ** 3
    f = precision * recall / (0.9 * precision + 0.1 * recall)
    assert meteor(["a b x d"], [["a b c d e f"]]) == pytest.approx(100 * f * (1 - penalty))
    assert meteor(["serving wines"], [["serves wine"]]) == pytest.approx(meteor(["serves wine"], [["serves wine"]]))   # stems
    assert meteor(["cheap"], [["inexpensive"]]) == 0                             # a synonym, which is not looked for
    assert meteor(["a b", "q"], [["x", "a b"], ["r"]]) == pytest.approx(50 * (1 - 0.5 * (1 / 2) ** 3))


def test_cider_as_counted_by_hand():
    # one word and one pair match whole, and there are no longer n-grams: (1 + 1 + 0 + 0) / 4, times ten
    assert cider(["a b", "c d"], [["a b"], ["c d"]]) == pytest.approx(5)
    # a word more: cosines 2 / sqrt(2 * 3) and 1 / sqrt(2), for a length that is one off
    apart = math.exp(-1 / 72) * (2 / math.sqrt(6) + 1 / math.sqrt(2)) / 4 * 10
    assert cider(["a b x", "c d"], [["a b"], ["c d"]]) == pytest.approx((apart + 5) / 2)
    assert cider(["a b", "c d"], [["a b", "q r"], ["c d"]]) == pytest.approx((2.5 + 5) / 2)    # the mean over references
    # "the" is there for both prompts, so it weighs nothing, and repeating a word is clipped
    assert cider(["the", "the"], [["the"], ["the"]]) == 0
    again = 10 / 4 * math.exp(-4 / 72) * 1 / 3 * 3                               # min(3, 1) * 1 over norms 3 and 1, for words alone
    assert cider(["a a a", "b"], [["a"], ["b"]]) == pytest.approx((again / 3 + 2.5) / 2)
    assert cider(["a"], [["a"]]) == 0 and cider(["", "b"], [["a"], ["b"]]) == pytest.approx(1.25)


def test_completions_do_not_depend_on_who_else_is_asked(folder):
    model, tokenizer = load_model(str(folder), kind="causal"), load_tokenizer(str(folder))
    prompts = [tokenizer(text)["input_ids"] for text in ("the inn", "a pub near the city serves dear", "good")]
    together = completions(model, tokenizer, prompts, new_tokens=6)
    assert together == [completions(model, tokenizer, [prompt], new_tokens=6)[0] for prompt in prompts]
    by_hand = list(prompts[0])
    for _ in range(6):
        by_hand.append(int(model(torch.tensor([by_hand])).logits[0, -1].argmax()))
    assert together[0] == tokenizer.decode(by_hand[len(prompts[0]):], skip_special_tokens=True)
    long = [tokenizer("wine " * 30)["input_ids"][:46]]
    assert len(tokenizer(completions(model, tokenizer, long, new_tokens=20)[0])["input_ids"]) <= 2 and not model.training


def test_the_prompt_does_not_count(folder):
    model, tokenizer = load_model(str(folder), kind="causal").eval(), load_tokenizer(str(folder))
    data = language.score_set(pairs(4), tokenizer, ("mr", "ref"), 1, 48)
    item = data[0]
    counted = item["labels"] != -100
    assert tokenizer.decode(item["input_ids"][counted]) == "The inn is at 0." + language.END
    batch = data.batch([0, 1, 2])
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    for row in range(3):
        places = [t for t in range(1, batch["labels"].shape[1]) if batch["labels"][row, t] != -100]
        wanted = -sum(scores[row, t - 1, batch["input_ids"][row, t]].item() for t in places) / len(places)
        assert example_losses(model, batch)[row].item() == pytest.approx(wanted, rel=1e-4)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    embeddings = model.get_input_embeddings().weight
    loss = example_losses(model, other).sum()
    gradient, = torch.autograd.grad(loss, embeddings)
    assert gradient.abs().sum() > 0                          # the prompt is read, though it is not to be predicted


def test_perplexity_weighs_tokens_and_every_other_prompt_is_whole(folder):
    model, tokenizer = load_model(str(folder), kind="causal"), load_tokenizer(str(folder))
    data = pairs(6)
    half = language.score_set(data, tokenizer, ("mr", "ref"), 2, 48)
    assert Counter(half.table["mr"]) == {f"name[{name}], place[{i}]": 2 for name, i in (("inn", 0), ("bar", 2), ("hall", 4))}
    prompts, references = language.prompts_and_references(half, ("mr", "ref"))
    assert [tokenizer.decode(prompt) for prompt in prompts] == [f"name[{name}], place[{i}]{language.END}"
                                                                for name, i in (("inn", 0), ("bar", 2), ("hall", 4))]
    assert references[1] == ["The bar is at 2.", "The bar is at 2 here."]
    found = generation_scores(model, tokenizer, data, every=2, beams=0, max_length=48)
    total, count = 0.0, 0
    for row in range(len(half)):
        own = int((half[row]["labels"] != -100).sum())
        total, count = total + own * example_losses(model, half.batch([row])).item(), count + own
    assert found == {"perplexity": pytest.approx(math.exp(total / count), rel=1e-4)}
    assert set(generation_scores(model, tokenizer, data, beams=1, max_length=48)) == {"perplexity", *ALL}


def test_a_record_says_what_it_was_made_of_and_what_it_found(small_world):
    grid = [small_world, {**small_world, "method": language.UNTOUCHED, "target_epsilon": 0.0}]
    one, none = (experiments.make_record("tiny", language.language_run, settings, True) for settings in grid)
    assert 0 < one["epsilon"] <= 3 and none["epsilon"] == 0.0 and one["trainable"] == 192 and none["trainable"] == 0
    for entry in (one, none):
        assert set(entry["metrics"]) == {"perplexity", *ALL} and entry["reduced"] is True and entry["model"] == "micro"
        assert {"versions", "device", "seconds"} <= set(entry)
    assert {"data_hash", "mechanisms", "delta", "accountant"} <= set(one)
    assert one["metrics"]["perplexity"] != none["metrics"]["perplexity"]


def test_the_papers_noise_is_larger_than_it_says(small_world):
    settings = {**small_world, "options": {"irrelevance": 0.7}}
    size, said = 80, language.noise_multiplier(3.0, 1e-3, 16 / 80, 2, accountant="rdp")
    true = language.papers_noise(settings)
    assert true == pytest.approx(said / math.sqrt(0.7**3 + 0.3**3)) and true == pytest.approx(1.644 * said, rel=1e-3)      # RAP-T1
    assert epsilon([SampledGaussian(true, 16 / size, 2)], 1e-3, "rdp") < 0.6 * 3.0


def test_public_relevance_by_name(small_world, folder):
    language.development_pairs.cache_clear()
    settings = {**small_world, "options": {"relevance_data": "development pairs", "irrelevance": 0.7}}
    found = language.taken(settings)["options"]["relevance_data"]
    assert isinstance(found, Public) and len(found) == 2 and settings["options"]["relevance_data"] == "development pairs"
    private = {"relevance_data": "private"}
    assert language.taken({**small_world, "options": private})["options"] == private


@pytest.mark.parametrize("variant", language.VARIANTS)
def test_each_variant_runs_and_states_what_it_spends(variant, small_world, monkeypatch):
    monkeypatch.setattr(language, "public_text", lambda: Public(TableData({"text": sentences(20)}), "made up"))
    monkeypatch.setitem(language.BASES, "Adapter", {"width": 4})
    language.public_windows.cache_clear()
    language.development_pairs.cache_clear()
    drawn = {"relevance_rate": 0.5} if "private" in variant or "published" in variant or "nothing" in variant else {}
    entry = language.rap_entry({**small_world, "beams": 0, "steps": 4}, "Adapter", 3.0, variant, warmup_steps=2, **drawn)
    found = language.language_run(entry)
    assert found["metrics"]["perplexity"] > 1 and found["trainable"] > 100
    if variant in ("as published", "relevance for nothing"):
        assert found["epsilon"] == "inf"                     # the mask was taken from private data and not paid for
    elif entry.get("accounting") == "paper":
        assert 0 < found["epsilon"] < 2
    else:
        assert 2.5 < found["epsilon"] <= 3 and len(found["mechanisms"]) == 1 + (variant == "private relevance")


def test_as_published_is_as_published():
    from dpft.rapft.mask import AS_PUBLISHED
    entry = language.rap_entry(language.E2E, "BiTFiT", 3.0, "as published")
    assert AS_PUBLISHED.items() <= entry["options"].items() and entry["options"]["relevance_data"] == "paper"
    assert entry["options"]["method"] == ["BiTFiT", {"reinitialise": "random"}] and entry["accounting"] == "paper"
    assert language.rap_entry(language.E2E, "BiTFiT", 3.0, "tight")["options"]["method"] == ["BiTFiT", {}]
