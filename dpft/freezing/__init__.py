"""DP-SGD-LF: freeze the lower layers late, and see why it helps."""

from dpft.freezing.angles import UndefinedAngle, angle, angle_range, expected_noise_angle
from dpft.freezing.distortion import (
    Angles, ClipGroups, FreezingEffect, Signals, StatusChanges, clip_groups, freezing_effect, module_layers, signals,
    status_changes, true_gradient,
)
from dpft.freezing.schedule import LayerFreeze, layers, paper_settings

__all__ = ["Angles", "ClipGroups", "FreezingEffect", "LayerFreeze", "Signals", "StatusChanges", "UndefinedAngle", "angle",
           "angle_range", "clip_groups", "expected_noise_angle", "freezing_effect", "layers", "module_layers", "paper_settings",
           "signals", "status_changes", "true_gradient"]
