"""Differentially private fine-tuning by freezing."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpft.baselines import Full, LastLayer
    from dpft.bitfit import BiTFiT
    from dpft.data import Public, load_data
    from dpft.gradients import Block, Partition
    from dpft.guarantee import Guarantee
    from dpft.models import load_model
    from dpft.privacy import Ledger, SampledGaussian
    from dpft.training import Engine, Method, Run, fine_tune, load

_HOMES = {
    "Full": "baselines", "LastLayer": "baselines", "BiTFiT": "bitfit", "Public": "data", "load_data": "data", "Block": "gradients",
    "Partition": "gradients", "Guarantee": "guarantee", "load_model": "models", "Ledger": "privacy", "SampledGaussian": "privacy",
    "Engine": "training", "Method": "training", "Run": "training", "fine_tune": "training", "load": "training",
}

__all__ = ["BiTFiT", "Block", "Engine", "Full", "Guarantee", "LastLayer", "Ledger", "Method", "Partition", "Public", "Run",
           "SampledGaussian", "fine_tune", "load", "load_data", "load_model"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used, so that `import dpft` is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpft' has no attribute {name!r}")
    return getattr(import_module(f"dpft.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
