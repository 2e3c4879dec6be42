"""Differentially private fine-tuning by freezing.

What the common tasks need is here; what is rarer stays in its module, such as `dpft.selection.TrialLaw`,
`dpft.privacy.PrivacyCurve` or `dpft.rapft.relevance_map`.
"""

__version__ = "0.1.0"

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpft.auditing import audit
    from dpft.baselines import Adapter, Full, LargestWeights, LastLayer, LoRA, NormOnly, RandomPartitions, Trainable, partitions
    from dpft.bitfit import BiTFiT
    from dpft.card import Statement
    from dpft.composition import Chain, Then
    from dpft.curve import Budget
    from dpft.data import Public
    from dpft.engine import Engine
    from dpft.freezing import LayerFreeze
    from dpft.frost import DPFrost, EntrySelection
    from dpft.guarantee import Guarantee, verify
    from dpft.ledger import Ledger
    from dpft.loop import Run, evaluate, fine_tune, load, predict
    from dpft.method import Context, Method
    from dpft.models import freeze_batchnorm, load_model
    from dpft.norms import Block, Partition
    from dpft.planning import plan_table
    from dpft.porting import make_private
    from dpft.privacy import Request, SampledGaussian, epsilon, noise_multiplier
    from dpft.rapft import RapFT
    from dpft.sampling import Augmentation
    from dpft.scores import NoisyAccuracy
    from dpft.settings import Settings
    from dpft.tasks import load_data
    from dpft.trainer import Privacy, PrivateTrainer
    from dpft.tuning import Tuning, tune
    from dpft.zeroth_order import ZerothOrder

_HOMES = {  # module -> what it gives to the package
    "auditing": "audit",
    "baselines": "Adapter Full LargestWeights LastLayer LoRA NormOnly RandomPartitions Trainable partitions",
    "bitfit": "BiTFiT",
    "card": "Statement",
    "composition": "Chain Then",
    "curve": "Budget",
    "data": "Public",
    "engine": "Engine",
    "freezing": "LayerFreeze",
    "frost": "DPFrost EntrySelection",
    "guarantee": "Guarantee verify",
    "ledger": "Ledger",
    "loop": "Run evaluate fine_tune load predict",
    "method": "Context Method",
    "models": "freeze_batchnorm load_model",
    "norms": "Block Partition",
    "planning": "plan_table",
    "porting": "make_private",
    "privacy": "Request SampledGaussian epsilon noise_multiplier",
    "rapft": "RapFT",
    "sampling": "Augmentation",
    "scores": "NoisyAccuracy",
    "settings": "Settings",
    "tasks": "load_data",
    "trainer": "Privacy PrivateTrainer",
    "tuning": "Tuning tune",
    "zeroth_order": "ZerothOrder",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
_RARE = {  # names that were here once: the module that has them
    "TrialLaw": "selection", "clipped_relevance": "rapft", "price": "selection", "relevance_map": "rapft",
    "relevance_mask": "rapft",
}

__all__ = [  # noqa: PLE0604
    *_MODULES,
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module, or a module, when it is first used, so that `import dpft` is quick."""
    module = _MODULES.get(name) or _RARE.get(name)
    if module is None:
        if name.startswith("_") or "." in name or find_spec(f"dpft.{name}") is None:
            raise AttributeError(f"module 'dpft' has no attribute {name!r}")
        return import_module(f"dpft.{name}")
    value = globals()[name] = getattr(import_module(f"dpft.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
