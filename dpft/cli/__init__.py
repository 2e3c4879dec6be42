"""The command line: `dpft`."""

from dpft.cli.core import app, main, plan, train  # isort: skip
from dpft.cli.ledger import account, verify  # isort: skip
from dpft.cli.book import audit, bench, figures_named, quickstart, run_named  # isort: skip

__all__ = ["account", "app", "audit", "bench", "figures_named", "main", "plan", "quickstart", "run_named", "train", "verify"]
