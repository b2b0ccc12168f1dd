"""A user's own loop: how many lines of a script it takes, and what it costs beside `mh.train`.

lines_changed_max   of the scripts in examples/port_*: lines that differ between before.py and after.py
loop_overhead       seconds of a step in a loop over mh.prepare / seconds of a step of mh.train, same plan and data: the
                    median of interleaved pairs
"""

from __future__ import annotations

import difflib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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
READ_EVERY = 10
"""The loop reads its loss after steps 0, 10, 20, ..., as scripts that print it do: nothing is under way then."""
WARM_UP_STEPS = READ_EVERY
"""Both ways are timed from the end of this step on, for a whole number of times that the loss is read."""


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


@dataclass(frozen=True)
class LoopSetting:
    """The network and the number of pairs and steps."""

    repeats: int = 9
    steps: int = 60
    """Steps that are timed: a multiple of READ_EVERY."""
    width: int = 24
    size: int = 24
    batch_size: int = 16


def loop_overhead(
    setting: LoopSetting = LoopSetting(), say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Return the median of the loop's step time over that of `mh.train`, the largest less the smallest of these ratios,
    and the median seconds of a step: a pipeline of two local workers, trained in turns, each first in every other
    pair."""
    width, size, samples = setting.width, setting.size, setting.batch_size * 8
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(samples, width, size, size, generator=generator)
    classes = torch.randint(0, 10, (samples,), generator=generator)
    layers = len(mh.capture(network(width), pictures[:4]).network.layers)
    stages = (mh.Stage((0, layers // 2), ("local-1",)), mh.Stage((layers // 2, layers), ("local-2",)))
    plan = mh.Plan("Sequential", setting.batch_size, stages, micro_batches=2)
    seconds: dict[str, list[float]] = {"train": [], "loop": []}
    with Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as cluster:
        for pair in range(setting.repeats):
            for kind in ("loop", "train") if pair % 2 else ("train", "loop"):
                model, data = network(width), TensorDataset(pictures, classes)
                run = _looped if kind == "loop" else _trained
                seconds[kind].append(run(cluster, plan, data, model, setting.steps))
            say(f"pair {pair + 1} of {setting.repeats}: {seconds['loop'][-1] / seconds['train'][-1]:.3f}")
    ratios = [of_loop / of_train for of_loop, of_train in zip(seconds["loop"], seconds["train"], strict=True)]
    return {
        "loop_overhead": statistics.median(ratios), "loop_overhead_spread": max(ratios) - min(ratios),
        "loop_step_seconds": statistics.median(seconds["loop"]),
        "train_step_seconds": statistics.median(seconds["train"]),
    }  # fmt: skip


def _trained(cluster: Coordinator, plan: mh.Plan, data: TensorDataset, model: nn.Module, steps: int) -> float:
    """Return the seconds of a step of `mh.train`, after those to warm up."""
    ended: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        mh.train(
            model, data, loss=functional.cross_entropy, optimizer=SGD, batch_size=plan.batch_size, shuffle=False,
            steps=WARM_UP_STEPS + 1 + steps, cluster=cluster, plan=plan, folder=Path(folder) / "run", verify=False,
            on_step=lambda step, loss, seconds: ended.append(time.perf_counter()),
        )  # fmt: skip
    return (ended[-1] - ended[WARM_UP_STEPS]) / steps


def _looped(cluster: Coordinator, plan: mh.Plan, data: TensorDataset, model: nn.Module, steps: int) -> float:
    """Return the seconds of a step in a loop, after those to warm up."""
    pictures, classes = data.tensors
    size = plan.batch_size
    read_at: dict[int, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mh.prepare(
            model, functional.cross_entropy, SGD, cluster=cluster, plan=plan, folder=Path(folder) / "run", verify=False
        ) as step,
    ):
        for number in range(WARM_UP_STEPS + 1 + steps):
            first = number * size % len(pictures)
            loss = step((pictures[first : first + size], classes[first : first + size]))
            if number % READ_EVERY == 0:
                loss.item()
                read_at[number] = time.perf_counter()
    return (read_at[WARM_UP_STEPS + steps] - read_at[WARM_UP_STEPS]) / steps
