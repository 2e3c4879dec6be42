"""Runs every method on the simulated accelerator and prints, as JSON, what the host waited for in each part of each step."""

import json
import sys
import warnings

import simulated
import torch
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification
from zoo import SMALL, ConvNet, as_data, classifier_loss, image_loss, text_batch

import dpft
import dpft.noise

STEPS = 3


def text_model():
    torch.manual_seed(0)
    config = {**SMALL, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = RobertaForSequenceClassification(RobertaConfig(**config, pad_token_id=1))
    batch = text_batch(torch.Generator().manual_seed(0), 16)
    return model, classifier_loss, batch


def picture_model():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    return ConvNet(), image_loss, (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator))


MODELS = {"text": text_model, "picture": picture_model}
METHODS = {
    "Full": dpft.Full,
    "BiTFiT": dpft.BiTFiT,
    "LastLayer": dpft.LastLayer,
    "NormOnly": dpft.NormOnly,
    "LayerFreeze": lambda: dpft.LayerFreeze(after=1),
    "DPFrost": lambda: dpft.DPFrost(0.5, rounds=2, sample_rate=0.5),
    "EntrySelection": lambda: dpft.EntrySelection(0.5),
    "RandomPartitions": lambda: dpft.RandomPartitions(0.5),
    "LargestWeights": lambda: dpft.LargestWeights(0.5),
    "RapFT": lambda: dpft.RapFT(dpft.BiTFiT(), relevance_data="private", share=0.1),
    "LoRA": dpft.LoRA,
    "Adapter": dpft.Adapter,
}
TEXT = ("LoRA", "Adapter")                                   # that need the layers of a transformer


class Generators:
    "torch, with a generator of the processor in place of the device's, which is not simulated."
    Generator = staticmethod(lambda device="cpu": torch.Generator())

    def __getattr__(self, name):
        return getattr(torch, name)


def waits_of(model, method, **knobs):
    "[{part of a step: waits}] of a run's steps, their batches apart."
    model, loss, batch = MODELS[model]()
    model = model.to(simulated.NAME)
    data, collate = as_data(batch)
    settings = {"batch_size": 16, "physical_batch_size": 8, "steps": STEPS, "seed": 0, "clip": 0.5, "epsilon": 8.0, "accountant": "rdp",
                **knobs}
    waits, steps = simulated.WAITS, []
    with waits.listed() as start:
        engine = dpft.Engine(model, loss, METHODS[method](), data, collate_fn=collate, **settings)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with waits.listed() as between:
        for step in engine:
            parts = {"next": [*between], "batches": []}
            between.clear()
            batches = iter(step)
            while True:
                with waits.listed() as found:
                    batch = next(batches, None)
                    if batch is not None:
                        step.add(batch)
                if batch is None:
                    parts["draw"] = found
                    break
                parts["batches"].append(found)
            with waits.listed() as parts["privatize"]:
                step.privatize()
            optimizer.step()
            with waits.listed() as parts["done"]:
                step.done()
            between.clear()
            steps.append(parts)
    return {"start": start, "steps": steps, "end": [*between]}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dpft.noise.torch = Generators()
    module = simulated.set_up()
    with simulated.Device():
        print(json.dumps({f"{model} {method}": waits_of(model, method) for model in MODELS for method in (sys.argv[1:] or METHODS)
                          if model == "text" or method not in TEXT}))
