"""Rap-FT: what is relevant, and where the noise goes."""

from dpft.rapft.mask import relevance_mask
from dpft.rapft.perturbation import RapFT
from dpft.rapft.relevance import clipped_relevance, relevance_map

__all__ = ["RapFT", "clipped_relevance", "relevance_map", "relevance_mask"]
