"""What was found when the papers' experiments were run again."""

from dpft.auditing import audit_entry, audit_grid
from dpft.evidence.freezing import EXPERIMENTS as FREEZING
from dpft.evidence.frost import EXPERIMENTS as FROST
from dpft.evidence.language import EXPERIMENTS as LANGUAGE
from dpft.evidence.methods import EXPERIMENTS as METHODS
from dpft.experiments import Experiment

AUDITS = {"audits": Experiment("Does any method show more than it claims?", audit_grid, audit_entry,
                               "canaries, which are made; 21 audits, about 10 minutes on two cores")}
EXPERIMENTS = {**FROST, **FREEZING, **METHODS, **LANGUAGE, **AUDITS}

__all__ = ["EXPERIMENTS"]
