"""What was found when the papers' experiments were run again."""

from functools import partial

from dpft.book.audits import audit_entry, audit_grid
from dpft.book.bench import cost_figure, model_figure
from dpft.book.drawings import DRAWINGS
from dpft.book.evidence.attacks import attack_entry, larger_attack_grid, membership_grid, membership_tuning_grid
from dpft.book.evidence.defaults import EXPERIMENTS as DEFAULTS
from dpft.book.evidence.freezing import EXPERIMENTS as FREEZING
from dpft.book.evidence.frost import EXPERIMENTS as FROST
from dpft.book.evidence.gpu import EXPERIMENTS as GPU
from dpft.book.evidence.language import EXPERIMENTS as LANGUAGE
from dpft.book.evidence.methods import EXPERIMENTS as METHODS
from dpft.book.evidence.protocol import EXPERIMENTS as PROTOCOL
from dpft.book.evidence.sizes import EXPERIMENTS as SIZES
from dpft.book.experiments import Experiment, measured_run, quickstart_grid, quickstart_tuning_grid
from dpft.book.figures import Drawing

EXPERIMENTS = {
    **FROST, **FREEZING, **METHODS, **LANGUAGE, **PROTOCOL, **DEFAULTS, **GPU, **SIZES,
    "quickstart-tuning": Experiment("Which learning rate is best for each method of the front page?", quickstart_tuning_grid,
                                    measured_run, "digits; six minutes on one core"),
    "quickstart": Experiment("How accurate are the head, the biases and everything on digits?", quickstart_grid, measured_run,
                             "digits; six minutes on one core"),
    "attacks": Experiment("What can an attacker learn about single rows?", None, attack_entry,
                          "E2E, digits; about half an hour on one core", reduced=True),
    "attacks-larger": Experiment("Does a model of 135 million parameters memorise secrets?", larger_attack_grid, attack_entry,
                                 "E2E, SmolLM2; 20 runs, about 15 minutes each on one core"),
    "membership-tuning": Experiment("At which learning rate is each attacked run best?", membership_tuning_grid, measured_run,
                                    "digits; two minutes on one core"),
    "membership": Experiment("Does privacy lower an attack that works without it?", membership_grid, attack_entry,
                             "digits; 25 minutes on one core"),
    "audits": Experiment("Does any method reveal more than it claims?", partial(audit_grid, False), audit_entry,
                         "synthetic canaries; 26 audits, 14 minutes on a busy machine, 4 on a free core", reduced=True,
                         full=partial(audit_grid, True))}

FIGURES = {**DRAWINGS,
           "costs": Drawing("time and memory of a step by tokens and pixels", cost_figure, ("costs",)),
           "costs-models": Drawing("time and memory of a step by width and depth", model_figure, ("costs",))}

__all__ = ["EXPERIMENTS", "FIGURES"]
