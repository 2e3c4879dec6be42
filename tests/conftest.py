"""The tests are about the installed package: `make test` says where it lies, and this file makes sure that it is the one imported."""

import os
import sys
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    installed = os.environ.get("DPFT_INSTALLED")
    if installed:
        import dpft

        found = Path(dpft.__file__).resolve()
        if not found.is_relative_to(Path(installed).resolve()):
            raise pytest.UsageError(f"the tests would import {found} instead of the installed package under {installed}")
    from hypothesis import settings

    settings.register_profile("dpft", deadline=None)  # no test asserts a wall-clock time
    settings.register_profile("full", deadline=None, max_examples=1000, print_blob=True)
    settings.load_profile(os.environ.get("DPFT_PROFILE", "dpft"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the program in this process, as a user types it: exit status, standard output, standard error."""
    def program(*words):
        from dpft import cli

        monkeypatch.setattr(sys, "argv", ["dpft", *map(str, words)])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
        out = capsys.readouterr()
        return status, out.out, out.err
    return program


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    """A folder of results with all that one experiment needs of another, in full and reduced; 1e-3 is best."""
    from dpft.book.evidence import frost, methods
    from dpft.book.experiments import write_records

    monkeypatch.setenv("DPFT_RESULTS", str(tmp_path))
    looked_for = {"frost-tuning": frost.METHODS, "methods-tuning": methods.OTHERS, "compositions-parts": methods.PARTS,
                  "compositions": methods.COMPOSITIONS}
    for experiment, labels in looked_for.items():
        write_records(tmp_path / f"{experiment}.jsonl", (
            {"method": label, "label": label, "learning_rate": rate, "options": {"ratio": 0.25} if label == "DPFrost" else {},
             "reduced": reduced, "metrics": {"accuracy": 0.1 * label.startswith("LastLayer, then BiTFiT") - abs(rate - 1e-3)}}
            for label in labels for rate in (1e-2, 1e-3) for reduced in (True, False)))
