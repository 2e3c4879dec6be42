"""What was found when the papers' experiments were run again."""

from dpft.evidence.freezing import EXPERIMENTS as FREEZING
from dpft.evidence.frost import EXPERIMENTS as FROST

EXPERIMENTS = {**FROST, **FREEZING}

__all__ = ["EXPERIMENTS"]
