"""Stand-ins for contenders of another library that need more memory than there is; importable, for they run in processes of their own."""

import os
import resource
import signal

import torch

from dpft.book.contenders import Contender, plain_step


def greedy(model, loss):
    "Asks for all that its process may have; a page that nobody writes to costs nothing."
    contender = plain_step(model, loss)
    def step(batch):
        if len(batch["labels"]) > 3:
            most = resource.getrlimit(resource.RLIMIT_DATA)[0]
            assert most == resource.RLIM_INFINITY or torch.empty(most, dtype=torch.uint8).nbytes
        return contender.step(batch)
    return Contender(model, step)


def killed(model, loss):
    "The system ends it, as if it had no memory left."
    def step(batch):
        if len(batch["labels"]) > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}
    return Contender(model, step)


def stops(model, loss):
    "An error that has nothing to do with memory."
    def step(batch):
        if len(batch["labels"]) > 3:
            raise ValueError("four are too many\nfor it")
        return {}
    return Contender(model, step)
