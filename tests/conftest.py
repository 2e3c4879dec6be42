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
    settings.load_profile("dpft")


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
