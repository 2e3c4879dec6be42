"""Small models of every family that the papers fine-tune, with batches for them, in float64, without dropout; and what files share."""
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from dpft.data import TensorData

SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40,
             max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
GPT = dict(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=24, pad_token_id=1, num_labels=3,
           resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)


class CountsExamples:
    "Before a module's own class: counts the examples that go through, outside of it, so that a pass leaves no attribute changed."
    through: ClassVar = WeakKeyDictionary()

    @property
    def examples(self):
        return self.through.get(self, 0)

    @examples.setter
    def examples(self, count):
        self.through[self] = count

    def forward(self, x):
        self.examples += len(x)
        return super().forward(x)


class ConvNet(nn.Module):
    """Convolutions with groups, dilation and padding, GroupNorm, an in-place activation, a module used twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.ReLU(inplace=True)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4, bias=False)
        self.strided = nn.Conv2d(8, 8, 3, stride=2, padding="valid")
        self.twice = nn.Conv2d(8, 8, 1)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        x = self.strided(x + self.grouped(x))
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(x.flatten(2).mean(2))


def classifier_loss(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def language_loss(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none").mean(1)


def image_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def text_batch(generator, rows=5, tokens=7):
    ids = torch.randint(2, 40, (rows, tokens), generator=generator)
    mask = (torch.arange(tokens) < torch.randint(3, tokens + 1, (rows, 1), generator=generator)).long()
    return {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask, "labels": torch.randint(0, 3, (rows,), generator=generator)}


def build(name, rows=5, seed=0):
    """Model, loss and batch of one family."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    text = text_batch(generator, rows)
    pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    if name == "roberta":
        return RobertaForSequenceClassification(RobertaConfig(**SMALL, pad_token_id=1)).double(), classifier_loss, text
    if name == "bert":
        return BertForSequenceClassification(BertConfig(**SMALL)).double(), classifier_loss, text
    if name == "gpt2":
        return GPT2ForSequenceClassification(GPT2Config(**GPT)).double(), classifier_loss, text
    if name == "gpt2-lm":
        tokens = torch.randint(2, 40, (rows, 7), generator=generator)
        return GPT2LMHeadModel(GPT2Config(**GPT)).double(), language_loss, {"input_ids": tokens}
    if name == "llama":
        config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                             vocab_size=40, max_position_embeddings=24, pad_token_id=0, bos_token_id=1, eos_token_id=1)
        return LlamaForCausalLM(config).double(), language_loss, {"input_ids": torch.randint(2, 40, (rows, 7), generator=generator)}
    if name == "vit":
        config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
                           num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return ViTForImageClassification(config).double(), classifier_loss, {"pixel_values": pixels, "labels": text["labels"]}
    if name == "cnn":
        return ConvNet().double(), image_loss, (pixels, text["labels"])
    raise KeyError(name)


NAMES = ["roberta", "bert", "gpt2", "gpt2-lm", "vit", "cnn"]
HEADS = ("classifier", "score", "lm_head", "head", "pooler")
FREEZE_SETS = {
    "full": lambda name: True,
    "biases": lambda name: name.endswith("bias"),
    "last layer": lambda name: name.startswith(HEADS) or "wte" in name,
    "no embeddings": lambda name: not any(part in name for part in ("embed", "wte", "wpe")),
    "norms": lambda name: "norm" in name.lower() or ".ln_" in name,
    "embeddings": lambda name: any(part in name for part in ("embed", "wte", "wpe", "stem")),
}


def freeze(model, which):
    """Let train what the freeze set names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(FREEZE_SETS[which](name))


def as_data(batch):
    """The examples of a batch as a data set, and how they are put together again."""
    if isinstance(batch, dict):
        size = len(next(iter(batch.values())))
        return ([{name: value[i] for name, value in batch.items()} for i in range(size)],
                lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]})
    return list(zip(*batch, strict=True)), lambda items: tuple(torch.stack(part) for part in zip(*items, strict=True))


# What several files try their subject on

def toy(size=60, seed=0):
    """Noise on 4 x 4 pictures whose brightness tells their class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return TensorData(torch.randn(size, 1, 4, 4, generator=generator) + labels[:, None, None, None], labels)


def net(seed=0, dropout=0.0):
    "Two layers for those pictures."
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


class Plain(nn.Module):
    """A model whose per-example gradient is the example itself, in parameters of the given sizes; its loss is `inner`."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = list(sizes)
        for i, size in enumerate(sizes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size, dtype=torch.float64)))

    def forward(self, rows):
        return sum((getattr(self, f"p{i}") * part).sum(1) for i, part in enumerate(rows.split(self.sizes, dim=1)))


@lru_cache(maxsize=16)
def plain(*sizes):
    """A `Plain` for tests that measure it often and leave it as it is: the engine looks at it once."""
    return Plain(sizes)


def inner(model, batch):
    return model(batch[0])


def apart(tensors):
    "Whether each tensor has memory of its own, without holes, as noise that is added in place needs."
    places = sorted((each.data_ptr(), each.numel() * each.element_size(), each.is_contiguous()) for each in tensors)
    return all(whole for *_, whole in places) and all(a[0] + a[1] <= b[0] for a, b in pairwise(places))


class Items(torch.utils.data.Dataset):
    "Rows that are made when they are asked for."

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


def images(size=7, channels=3, side=4, seed=0):
    "Labelled pictures of random bytes."
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size, channels, side, side), generator=generator, dtype=torch.uint8)
    return TensorData(pixels, torch.arange(size) % 3, 255.0, [0.1] * channels, [0.5] * channels)
