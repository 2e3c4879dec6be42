"""Processes that begin with the libraries loaded: a fresh interpreter imports them once, and each process is forked from it.

A process started from nothing imports torch and Transformers for eight seconds before it does anything.
Nothing has been computed in the server, so a process forked from it is as good as a new one."""

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

LOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "peft", "datasets", "opacus",
          "scipy.stats", "sklearn.datasets", "pytest", "hypothesis", *(f"transformers.models.{name}.modeling_{name}" for name in
          ("bert", "gpt2", "llama", "roberta", "vit")), "dpft.loop", "dpft.cli", "dpft.auditing", "dpft.book.bench")
CONTEXT = multiprocessing.get_context("forkserver")


def begin() -> None:
    """Start the server, before any test has changed the environment that its processes have.

    A program has one server; whoever starts it says what is loaded, and a queue of the book would load less."""
    CONTEXT.set_forkserver_preload(list(LOADED))
    forkserver.ensure_running()


def output_of(said: Path, name: str) -> Path:
    "Where a program's `out` or `err` lies; its name is kept whole, for it may hold a stop."
    return said.with_name(f"{said.name}.{name}")


def _program(code: str, words: Sequence[str], environment: Mapping[str, str], said: Path) -> None:
    "Run a text, or a module after `-m `, as `python -c` or `python -m` would; the process ends with its status."
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(output_of(said, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv = ["-c", *words]
    status: Any = 0
    try:
        if code.startswith("-m "):
            runpy.run_module(code.removeprefix("-m "), run_name="__main__", alter_sys=True)
        else:
            exec(compile(code, "<text>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


class Program:
    "A program that runs in a process of its own; its outputs lie in files beside `said`."

    def __init__(self, code: str, *words: object, said: Path, environment: Mapping[str, str] | None = None):
        self.said = said
        arguments = (code, [str(word) for word in words], dict(environment or {}), said)
        self.process = CONTEXT.Process(target=_program, args=arguments, daemon=False)
        self.process.start()

    def poll(self) -> int | None:
        "The status, if it has ended."
        self.process.join(0)
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()

    def wait(self, timeout: float = 240) -> int | None:
        "The status; what does not end in time is killed, and an error."
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"not ended after {timeout} s: {self.stderr}")
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    @property
    def stdout(self) -> str:
        return self._read("out")

    @property
    def stderr(self) -> str:
        return self._read("err")

    def _read(self, name: str) -> str:
        path = output_of(self.said, name)
        return path.read_text(errors="replace") if path.exists() else ""


def run(code: str, *words: object, said: Path, environment: Mapping[str, str] | None = None, timeout: float = 240) -> Program:
    "A program that has ended: `returncode`, `stdout`, `stderr`."
    program = Program(code, *words, said=said, environment=environment)
    program.wait(timeout)
    return program
