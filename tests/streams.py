"""Runs that are to be compared entry by entry share one stream of randomness, whatever else sets them apart."""

from contextlib import contextmanager
from unittest.mock import patch

from dpft.noise import Keystream


@contextmanager
def one_stream(seed=0):
    "Every run in here draws and perturbs alike; outside, a run's secret depends on its settings and its data as well."
    with patch("dpft.store.secret_of", lambda given, identity, private: Keystream(seed if given is None else given).key("tests")):
        yield
