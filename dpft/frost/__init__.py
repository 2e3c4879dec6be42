"""DP-FROST: choose what to train, privately."""

from dpft.baselines import partitions
from dpft.frost.entries import EntrySelection
from dpft.frost.estimation import Estimate, estimate
from dpft.frost.magnitude import gradient_magnitudes, sensitivity
from dpft.frost.selection import DPFrost, Selection, select

__all__ = ["DPFrost", "EntrySelection", "Estimate", "Selection", "estimate", "gradient_magnitudes",
           "partitions", "select", "sensitivity"]
