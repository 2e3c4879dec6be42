"""What was found when the papers' experiments were run again."""

from dpft.evidence.frost import EXPERIMENTS as FROST

EXPERIMENTS = {**FROST}

__all__ = ["EXPERIMENTS"]
