"""DP-SGD-LF: freeze the lower layers late."""

from dpft.freezing.schedule import LayerFreeze, layers, paper_settings

__all__ = ["LayerFreeze", "layers", "paper_settings"]
