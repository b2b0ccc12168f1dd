"""A user's own loop: how many lines of a script it takes, and what it costs beside `mh.train`.

lines_changed_max   of the scripts in examples/port_*: lines that differ between before.py and after.py
loop_overhead       seconds of a step in a loop over mh.prepare / seconds of a step of mh.train, same plan and data
"""

from __future__ import annotations

import difflib
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.errors import BadFile
from manyhands.runtime.coordinator import Coordinator

EXAMPLES = Path(__file__).parents[4] / "examples"
SGD = mh.Optimizer("SGD", lr=0.01, momentum=0.9)
WARM_UP_STEPS = 5
READ_EVERY = 10
"""The loop prints its loss once in so many steps, as scripts do."""


def lines_changed(before: str, after: str) -> int:
    """Return how many lines of a script changed: written anew, added or taken out; empty ones do not count."""
    old, new = ([line for line in text.splitlines() if line.strip()] for text in (before, after))
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")


def lines_changed_max(folder: Path = EXAMPLES) -> int:
    """Return the most lines that any of the ported scripts changes."""
    ports = sorted(folder.glob("port_*"))
    if not ports:
        raise BadFile(f"{folder}: has no ported scripts.", hint="Run this in a copy of the repository.")
    return max(lines_changed((port / "before.py").read_text(), (port / "after.py").read_text()) for port in ports)


def network(width: int) -> nn.Sequential:
    """Return a network of two halves of about the same work."""
    torch.manual_seed(0)

    def half(channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(half(width), half(width), head)


def loop_overhead(*, repeats: int = 5, steps: int = 60, width: int = 24, size: int = 24, batch_size: int = 16) -> float:
    """Return the median, over interleaved repeats, of the loop's step time over that of `mh.train`: a pipeline of two
    local workers."""
    samples = batch_size * 8
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(samples, width, size, size, generator=generator)
    classes = torch.randint(0, 10, (samples,), generator=generator)
    layers = len(mh.capture(network(width), pictures[:4]).network.layers)
    stages = (mh.Stage((0, layers // 2), ("local-1",)), mh.Stage((layers // 2, layers), ("local-2",)))
    plan = mh.Plan("Sequential", batch_size, stages, micro_batches=2)
    ratios = []
    with Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as cluster:
        for _ in range(repeats):
            of_train = _trained(cluster, plan, TensorDataset(pictures, classes), network(width), steps)
            of_loop = _looped(cluster, plan, pictures, classes, network(width), steps)
            ratios.append(of_loop / of_train)
    return statistics.median(ratios)


def _trained(cluster: Coordinator, plan: mh.Plan, data: TensorDataset, model: nn.Module, steps: int) -> float:
    """Return the seconds of a step of `mh.train`, from the first ones on."""
    ended: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        mh.train(
            model, data, loss=functional.cross_entropy, optimizer=SGD, batch_size=plan.batch_size, shuffle=False,
            steps=steps, cluster=cluster, plan=plan, folder=Path(folder) / "run", verify=False,
            on_step=lambda step, loss, seconds: ended.append(time.perf_counter()),
        )  # fmt: skip
    return (ended[-1] - ended[WARM_UP_STEPS]) / (len(ended) - 1 - WARM_UP_STEPS)


def _looped(
    cluster: Coordinator, plan: mh.Plan, pictures: torch.Tensor, classes: torch.Tensor, model: nn.Module, steps: int
) -> float:
    """Return the seconds of a step in a loop, from the first ones on."""
    size, began = plan.batch_size, 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        mh.prepare(
            model, functional.cross_entropy, SGD, cluster=cluster, plan=plan, folder=Path(folder) / "run", verify=False
        ) as step,
    ):
        for number in range(steps):
            first = number * size % len(pictures)
            loss = step((pictures[first : first + size], classes[first : first + size]))
            if number == WARM_UP_STEPS:
                loss.item()
                began = time.perf_counter()
            elif number % READ_EVERY == 0:
                loss.item()
        loss.item()
        return (time.perf_counter() - began) / (steps - 1 - WARM_UP_STEPS)
