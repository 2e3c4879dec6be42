"""DP-FROST: choose what to train, privately."""

from dpft.baselines import partitions
from dpft.frost.entries import EntrySelection
from dpft.frost.estimation import Estimate, estimate
from dpft.frost.magnitude import exact_magnitudes, gradient_magnitudes, sensitivity
from dpft.frost.selection import DPFrost, Selection, paper_settings, select

__all__ = ["DPFrost", "EntrySelection", "Estimate", "Selection", "estimate", "exact_magnitudes", "gradient_magnitudes",
           "paper_settings", "partitions", "select", "sensitivity"]
