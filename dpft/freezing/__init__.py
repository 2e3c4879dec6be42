"""DP-SGD-LF: freeze the lower layers late."""

from dpft.freezing.schedule import LayerFreeze, layers

__all__ = ["LayerFreeze", "layers"]
