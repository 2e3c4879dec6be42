"""What was found when the papers' experiments were run again."""

from functools import partial

from dpft.auditing import audit_entry, audit_grid
from dpft.book.bench import batch_figure, cost_figure, model_figure
from dpft.book.drawings import DRAWINGS
from dpft.book.evidence.attacks import attack_entry, attack_grid, larger_attack_grid
from dpft.book.evidence.freezing import EXPERIMENTS as FREEZING
from dpft.book.evidence.frost import EXPERIMENTS as FROST
from dpft.book.evidence.language import EXPERIMENTS as LANGUAGE
from dpft.book.evidence.language import language_model
from dpft.book.evidence.methods import EXPERIMENTS as METHODS
from dpft.book.evidence.protocol import EXPERIMENTS as PROTOCOL
from dpft.book.experiments import Experiment
from dpft.book.figures import Drawing
from dpft.book.pretrained import smollm2

AUDITS = {"audits": Experiment("Does any method reveal more than it claims?", audit_grid, audit_entry,
                               "synthetic canaries; 26 audits, 14 minutes on a busy machine, 4 on a free core")}


def attacked_model(name: str) -> str:
    "The folder of a language model to attack: SmolLM2, or one that is trained here."
    return smollm2() if name == "smollm2" else language_model(name)


ATTACKS = {"attacks": Experiment("What can an attacker learn about single rows?", attack_grid,
                                 partial(attack_entry, language_model=attacked_model),
                                 "E2E, digits; 17 runs, about 5 minutes on one core; in full about 2 h"),
           "attacks-larger": Experiment("Does a model of 135 million parameters memorise secrets?", larger_attack_grid,
                                        partial(attack_entry, language_model=attacked_model),
                                        "E2E, SmolLM2; 20 runs, about 15 minutes each on one core", single=True,
                                        priority=lambda settings: settings["seed"], seconds=lambda settings: 900.0)}
EXPERIMENTS = {**FROST, **FREEZING, **METHODS, **LANGUAGE, **ATTACKS, **AUDITS, **PROTOCOL}

FIGURES = {**DRAWINGS,
           "costs": Drawing("time and memory of a step by tokens and pixels", cost_figure, ("costs",)),
           "costs-models": Drawing("time and memory of a step by width and depth", model_figure, ("costs",)),
           "costs-batches": Drawing("largest batch that fits, and its throughput", batch_figure, ("costs",))}

__all__ = ["EXPERIMENTS", "FIGURES"]
