"""DP-SGD-LF: freeze the lower layers late, and see why it helps."""

from dpft.freezing.angles import UndefinedAngle, angle, angle_range, expected_noise_angle
from dpft.freezing.bound import convergence_bound, noise_energy, paper_bound_not_valid, unclipped_bound
from dpft.freezing.distortion import (
    Angles, ClipGroups, FreezingEffect, Signals, StatusChanges, clip_groups, distortion_angles,
    freezing_effect, module_layers, signals, status_changes, true_gradient,
)
from dpft.freezing.schedule import LayerFreeze, layers, paper_settings
from dpft.freezing.similarity import activations, cca, mean_cca, pwcca, svcca

__all__ = ["Angles", "ClipGroups", "FreezingEffect", "LayerFreeze", "Signals", "StatusChanges", "UndefinedAngle", "activations", "angle",
           "angle_range", "cca", "clip_groups", "convergence_bound", "distortion_angles", "expected_noise_angle", "freezing_effect",
           "layers", "mean_cca", "module_layers", "noise_energy", "paper_bound_not_valid", "paper_settings", "pwcca", "signals",
           "status_changes", "svcca", "true_gradient", "unclipped_bound"]
