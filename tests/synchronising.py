"""Runs every method on the simulated accelerator and prints, as JSON, what the host waited for in each part of each step."""

import json
import warnings

import simulated
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification
from zoo import SMALL, ConvNet, as_data, classifier_loss, image_loss, text_batch

import dpft
import dpft.noise
from dpft.data import TensorData

STEPS = 3


def text_model():
    torch.manual_seed(0)
    config = {**SMALL, "num_hidden_layers": 1, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = RobertaForSequenceClassification(RobertaConfig(**config, pad_token_id=1))
    batch = text_batch(torch.Generator().manual_seed(0), 16)
    return model, classifier_loss, batch


def picture_model():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    return ConvNet(), image_loss, (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator))


MODELS = {"text": text_model, "picture": picture_model}
PLAIN = ("Full", "BiTFiT", "LastLayer", "NormOnly", "LoRA", "Adapter")
METHODS = {**{name: getattr(dpft, name) for name in PLAIN},
           "LayerFreeze": lambda: dpft.LayerFreeze(after=1), "DPFrost": lambda: dpft.DPFrost(0.5, rounds=2, sample_rate=0.5),
           **{name: lambda name=name: getattr(dpft, name)(0.5) for name in ("EntrySelection", "RandomPartitions", "LargestWeights")},
           "RapFT": lambda: dpft.RapFT(dpft.BiTFiT(), relevance_data="private", share=0.1)}
KNOBS = {"secure": {"secure_mode": True, "dropout": False}, "shown": {"show_loss": True},
         "people": {"unit": [f"person {i // 2}" for i in range(16)], "batch_size": 8}}
CASES = {**{f"text {method}": ("text", method, {}) for method in METHODS},
         **{f"picture {method}": ("picture", method, {}) for method in ("Full", "LastLayer", "DPFrost", "EntrySelection", "RapFT")},
         **{f"picture Full {name}": ("picture", "Full", knobs) for name, knobs in KNOBS.items()}}


class Generators:
    "torch, with a generator of the processor in place of the device's, which is not simulated."
    Generator = staticmethod(lambda device="cpu": torch.Generator())

    def __getattr__(self, name):
        return getattr(torch, name)


def waits_of(model, method, knobs):
    "What was waited for in each part of a run's steps, their batches apart."
    model, loss, batch = MODELS[model]()
    model = model.to(simulated.NAME)
    data, collate = as_data(batch)
    settings = {"batch_size": 16, "physical_batch_size": 8, "steps": STEPS, "seed": 0, "clip": 0.5, "epsilon": 8.0, "delta": 0.01,
                "accountant": "rdp", **knobs}
    waits, steps = simulated.WAITS, []
    with waits.listed():
        settings = dpft.Settings(loss_fn=loss, collate_fn=collate, **settings)
        engine = dpft.Engine(model, loss, METHODS[method](), data, settings=settings)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with waits.listed() as between:
        for step in engine:
            parts = {"next": [*between], "batches": []}
            between.clear()
            batches, batch = iter(step), step
            while batch is not None:
                with waits.listed() as found:
                    if (batch := next(batches, None)) is not None:
                        step.add(batch)
                parts["draw" if batch is None else "batches"] = found if batch is None else [*parts["batches"], found]
            with waits.listed() as parts["privatize"]:
                step.privatize()
                if engine.settings.show_loss:
                    assert step.not_finite == 0 and 0 <= step.clipped <= 1 and step.loss > 0
            optimizer.step()
            with waits.listed() as parts["done"]:
                step.done()
            between.clear()
            steps.append(parts)
    return steps


def noticed():
    "Each kind of wait once, and the error where devices meet."
    x, host = torch.ones(3, device=simulated.NAME), torch.ones(3)
    with simulated.WAITS.listed() as found:
        x.sum().item(), x.tolist(), x.cpu(), torch.equal(x, x), x.nonzero(), x[x > 0]
        host.to(x.device), torch.tensor([1.0], device=x.device), x[torch.tensor([0])]
        host.to(x.device, non_blocking=True), x[1:], x.new_zeros(2), torch.full((), 2.0, device=x.device)
    try:
        return [what for what, _ in found], str(x + host)
    except RuntimeError as error:
        return [what for what, _ in found], str(error)


def main():
    dpft.noise.torch = Generators()
    dpft.features.ENOUGH = 0            # the first batch is compared, as it is at the start of any run
    module = simulated.set_up()
    with simulated.Device():
        found = {case: waits_of(*CASES[case]) for case in CASES}
        kinds, mixed = noticed()
        there = {name: value.cpu() for name, value in sums_on(simulated.NAME).items()}
    here = sums_on("cpu")
    return {"cases": found, "kinds": kinds, "mixed": mixed,
            "asked": sorted({str(torch.device(x).index or 0) if not isinstance(x, int) else str(x) for x in module.asked}),
            "difference": max((here[name] - there[name]).abs().max().item() for name in here)}


def sums_on(device):
    "The bounded sums of a first step."
    model, loss, batch = picture_model()
    model, data = model.to(device), TensorData(*batch)
    engine = dpft.Engine(model, loss, dpft.Full(), data, batch_size=16, physical_batch_size=8, steps=3, seed=0, clip=0.5,
                         noise_multiplier=1.0, accountant="rdp")
    step = next(iter(engine))
    for batch in step:
        step.add(batch)
    return step.sums


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main()))
