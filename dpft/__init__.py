"""Differentially private fine-tuning by freezing."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpft.auditing import audit
    from dpft.baselines import Adapter, Full, LargestWeights, LastLayer, LoRA, NormOnly, RandomPartitions
    from dpft.bitfit import BiTFiT
    from dpft.composition import Chain, Then
    from dpft.data import Augmentation, Public, load_data
    from dpft.freezing import LayerFreeze
    from dpft.frost import DPFrost, EntrySelection
    from dpft.gradients import Block, Partition
    from dpft.guarantee import Guarantee, sentence_units, verify
    from dpft.models import load_model
    from dpft.privacy import Budget, Ledger, SampledGaussian
    from dpft.rapft import RapFT, clipped_relevance, relevance_map, relevance_mask
    from dpft.training import Engine, Method, Run, fine_tune, load
    from dpft.tuning import NoisyAccuracy, TrialLaw, Tuning, plan_table, price, tune

_HOMES = {
    "audit": "auditing", "Adapter": "baselines", "Full": "baselines", "LargestWeights": "baselines", "LastLayer": "baselines",
    "LoRA": "baselines", "NormOnly": "baselines", "RandomPartitions": "baselines", "BiTFiT": "bitfit", "Chain": "composition",
    "Then": "composition", "Augmentation": "data", "Public": "data", "load_data": "data", "LayerFreeze": "freezing", "DPFrost": "frost",
    "EntrySelection": "frost", "Block": "gradients", "Partition": "gradients", "Guarantee": "guarantee", "sentence_units": "guarantee",
    "verify": "guarantee", "load_model": "models", "Budget": "privacy", "Ledger": "privacy", "SampledGaussian": "privacy",
    "RapFT": "rapft", "clipped_relevance": "rapft", "relevance_map": "rapft", "relevance_mask": "rapft", "Engine": "training",
    "Method": "training", "Run": "training", "fine_tune": "training", "load": "training", "NoisyAccuracy": "tuning",
    "TrialLaw": "tuning", "Tuning": "tuning", "plan_table": "tuning", "price": "tuning", "tune": "tuning",
}

__all__ = ["Adapter", "Augmentation", "BiTFiT", "Block", "Budget", "Chain", "DPFrost", "Engine", "EntrySelection", "Full", "Guarantee",
           "LargestWeights", "LastLayer", "LayerFreeze", "Ledger", "LoRA", "Method", "NoisyAccuracy", "NormOnly", "Partition", "Public",
           "RandomPartitions", "RapFT", "Run", "SampledGaussian", "Then", "TrialLaw", "Tuning", "audit", "clipped_relevance", "fine_tune",
           "load", "load_data", "load_model", "plan_table", "price", "relevance_map", "relevance_mask", "sentence_units", "tune", "verify"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used, so that `import dpft` is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpft' has no attribute {name!r}")
    return getattr(import_module(f"dpft.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
