"""The command line: `dpft`."""

from dpft.cli.book import audit, bench, figures_named, quickstart, run_named
from dpft.cli.core import account, app, main, plan, train, verify

__all__ = ["account", "app", "audit", "bench", "figures_named", "main", "plan", "quickstart", "run_named", "train", "verify"]
