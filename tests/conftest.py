"""The tests are about the installed package: `make test` says where it lies, and this file makes sure that it is the one imported.

With `DPFT_SALT=n` every seeded stream is another one, and tests marked `pinned`, which hold for one stream by value, are left out."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")     # a second thread gains small models nothing, and beside a busy core each sum waits for it
SALT = os.environ.get("DPFT_SALT", "")
SALTED = Path(__file__).parent / "salted"


def salt() -> None:
    "Salt this process, and those that its tests start."
    os.environ["DPFT_TESTING"] = "1"
    if str(SALTED) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SALTED), os.environ.get("PYTHONPATH", "")]))
    spec = importlib.util.spec_from_file_location("salted", SALTED / "sitecustomize.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # as in the background of a shell; some tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "pinned: holds for one seeded stream by value, so it is left out under DPFT_SALT")
    if SALT:
        salt()
    installed = os.environ.get("DPFT_INSTALLED")
    if installed:
        import dpft

        found = Path(dpft.__file__).resolve()
        if not found.is_relative_to(Path(installed).resolve()):
            raise pytest.UsageError(f"the tests would import {found} instead of the installed package under {installed}")
    from hypothesis import settings

    own = {"derandomize": False} if SALT else {}      # in continuous integration hypothesis would draw the same examples each time
    settings.register_profile("dpft", deadline=None, **own)  # no test asserts a wall-clock time
    settings.register_profile("full", deadline=None, max_examples=1000, print_blob=True, **own)
    settings.load_profile(os.environ.get("DPFT_PROFILE", "dpft"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    pinned = [item for item in items if SALT and item.get_closest_marker("pinned")]
    if pinned:
        config.hook.pytest_deselected(items=pinned)
        items[:] = [item for item in items if item not in pinned]


def pytest_collection_finish(session: pytest.Session) -> None:
    if "fresh" in sys.modules and session.items and not session.config.option.collectonly:
        sys.modules["fresh"].begin()


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the program in this process, as a user types it: exit status, standard output, standard error."""
    def program(*words):
        from dpft import cli

        monkeypatch.setattr(sys, "argv", ["dpft", *map(str, words)])
        status = 0
        with patch.dict(os.environ):                # `--output` says where records lie, for its process
            try:
                cli.main()
            except SystemExit as end:
                status = end.code or 0
        out = capsys.readouterr()
        return status, out.out, out.err
    return program


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    "Two processes, which do the same task."
    from test_processes import Ranks

    ranks = Ranks(2, tmp_path_factory.mktemp("two") / "meeting")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def tokenizer():
    "One that knows the letters, and that files may replace by their own."
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
