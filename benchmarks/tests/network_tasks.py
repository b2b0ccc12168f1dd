"""Work and networks for the tests of `bench networks`, in a module that processes of their own can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands_bench.networks.bench import NetworkTask
from manyhands_bench.networks.outcome import NetworkOutcome


def behave(task: str, report: Callable[[Any], None]) -> None:
    """What the task's name says."""
    report(f"{task} began")
    if task.startswith("/"):
        Path(task).write_text(str(os.getpid()))
        time.sleep(60)
    if task == "raises":
        raise ValueError("this went wrong")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "hangs":
        time.sleep(60)
    if task == "large":
        held = bytearray(os.urandom(1)) * 2**29
        time.sleep(60)
        del held
    print("printed")
    report(f"{task} done")


def pretend(task: NetworkTask, report: Callable[[Any], None]) -> None:
    """A network whose process ends as its name says."""
    outcome = NetworkOutcome(task.name, is_drawn=bool(task.preferred), captured=True, step="tiles")
    report(outcome)
    if "crash" in task.name:
        os._exit(3)
    outcome.is_complete = True
    report(outcome)


class Small(nn.Module):
    """Convolutions with dropout between them."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(p), nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Attending(nn.Module):
    """A layer whose samples look at each other: it cannot be shared by samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.softmax(x @ x.T, -1) @ x)


class Refused(nn.Module):
    """Control flow that depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).mean((2, 3))
        return x if x.sum() > 0 else -x
