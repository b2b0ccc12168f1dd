"""The site of `manyhands bench split`: an edge that is slowed down and a server, one network, and timed runs of it.

Workers, capture and measurements are made once and serve all runs: ours and every baseline's.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.executor.packing_cost import packing_cost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.trace import LinkTrace
from manyhands.graph.graph import Graph
from manyhands.job.evaluation import captured
from manyhands.job.opening import OpenedRun
from manyhands.job.workload import Workload
from manyhands.models.registry import build
from manyhands.planner.split import Deployment, LinkRates, SplitProfile, seconds_of
from manyhands.runtime.order import RunState
from manyhands.runtime.record import RunRecord
from manyhands.session.measuring import measure
from manyhands.split.config import SplitConfig
from manyhands.split.job import SplitJob, SplitResult
from manyhands.split.session import Two
from manyhands_bench.recovery.site import DrawnPictures

OPTIMIZER = Optimizer("SGD", lr=1e-3, momentum=0.9)
CLASSES = 10
K = 5
SLICE_SECONDS = 0.5
LONGEST_PREDICTED_SECONDS = 600.0
MODE = "grouped"
"""The default of `split_train`, which counts as ours; the other mode is measured beside it."""


@dataclass(frozen=True)
class SplitSetting:
    """The network and batch that are trained, and how many times slower the edge is than the server."""

    model: str
    shape: tuple[int, ...]
    batch_size: int
    slowdown: float
    small_images: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        small = ", the paper's variant for small pictures" if self.small_images else ""
        return f"{self.model} {shape}{small}, batch {self.batch_size}, edge {self.slowdown:g} times slower than server"

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        options: dict[str, Any] = {"small_images": True} if self.small_images else {}
        return build(self.model, num_classes=CLASSES, **options)


@dataclass(frozen=True)
class Round:
    """A round and its steps. Seconds count from the moment at which the link began to follow its trace."""

    begin: float
    end: float
    first_step: int
    steps: int


@dataclass
class TimedSplit:
    """One run, and the moments at which its rounds began and ended."""

    steps: int
    rounds: list[Round]
    result: SplitResult
    mode: str

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the first round to the end of the last, with every pause in which layers
        changed sides."""
        return self.rounds[-1].end - self.rounds[0].begin

    @property
    def seconds_of_100(self) -> float:
        return 100 * self.seconds / self.steps

    def done_at(self, moment: float) -> float:
        """Return the batches completed by then; in a round they are spread evenly."""
        completed = 0.0
        for round in self.rounds:
            part = (moment - round.begin) / max(round.end - round.begin, 1e-9)
            completed += round.steps * min(max(part, 0.0), 1.0)
        return completed

    def seconds_within(self, begin: float, end: float) -> float:
        """Return the seconds of 100 batches, at the speed between two moments."""
        completed = self.done_at(end) - self.done_at(begin)
        return 100 * (end - begin) / completed if completed else math.inf

    @property
    def profile(self) -> SplitProfile:
        assert self.result.split is not None
        return self.result.split

    def deployments(self) -> list[tuple[int, Deployment]]:
        """Return (step, the deployment from that step on) for every deployment."""
        assert self.result.deployment is not None
        changes = self.result.changes
        first = changes[0].before if changes else self.result.deployment
        return [(0, first), *((change.step, change.after) for change in changes)]

    def stretches(self) -> list[tuple[Deployment, list[Round]]]:
        """Return each deployment with its rounds, without a change between them."""
        stretches = []
        deployments = self.deployments()
        for (step, deployment), after in itertools.zip_longest(deployments, deployments[1:]):
            end = self.steps if after is None else after[0]
            rounds = [round for round in self.rounds if step <= round.first_step < end]
            if rounds:
                stretches.append((deployment, rounds))
        return stretches

    def predictions(self, trace: LinkTrace) -> list[tuple[float, float]]:
        """Return, for each stretch, the seconds predicted at the rates in force, and the seconds measured."""
        pairs = []
        for deployment, rounds in self.stretches():
            predicted = sum(self._predicted(deployment, round, trace) for round in rounds)
            pairs.append((predicted, sum(round_.end - round_.begin for round_ in rounds)))
        return pairs

    def _predicted(self, deployment: Deployment, round_: Round, trace: LinkTrace) -> float:
        """Return the seconds that a round's batches should take from its beginning on, at the rates from moment to
        moment."""
        remaining, now = 1.0, round_.begin
        while remaining > 0 and now < round_.begin + LONGEST_PREDICTED_SECONDS:
            rates = mean_rates(trace, now, now + SLICE_SECONDS)
            whole = seconds_of(self.profile, rates, round_.steps, deployment, drains=self.mode == "grouped")
            progress = min(remaining, SLICE_SECONDS / whole)
            now += progress * whole if progress == remaining else SLICE_SECONDS
            remaining -= progress
        return now - round_.begin

    def moments(self) -> list[tuple[float, int]]:
        """Return (seconds, cut) for the beginning of each deployment's first round."""
        return [(rounds[0].begin, deployment.cut) for deployment, rounds in self.stretches()]


def mean_rates(trace: LinkTrace, begin: float, end: float) -> LinkRates:
    """Return the mean rates of the link between two moments."""
    seconds = max(end - begin, 1e-9)
    up, down = (way.integral(begin, begin + seconds) / seconds for way in (trace.up, trace.down))
    return LinkRates(up, down)


class _Job(SplitJob):
    """A job that does not write the pictures for people to look at."""

    def write_pictures(self, *_: Any) -> None:
        pass


@dataclass
class SplitSite:
    """The two ends, and the network and data they train."""

    two: Two
    setting: SplitSetting
    graph: Graph
    module: nn.Module
    data: Dataset[Any]
    folder: Path

    @classmethod
    def of(cls, two: Two, setting: SplitSetting, folder: Path, *, measure_seconds: float | None = None) -> SplitSite:
        """Capture and measure the network as the machine is now; later runs find the stored measurements."""
        data = DrawnPictures(setting.shape, 32 * setting.batch_size, CLASSES, torch.float32)
        module = setting.module()
        graph = captured(module, data, nn.functional.cross_entropy, granularity="blocks", name=setting.model)
        size = setting.batch_size
        measure(
            two.session, graph, size, optimizer=OPTIMIZER, refresh=True, ladder=(size,), seconds=measure_seconds
        )  # fmt: skip
        packing_cost(threads=1, refresh=True)
        return cls(two, setting, graph, module, data, folder)

    def run(
        self, steps: int, *, trace: LinkTrace | None = None, rival: str = "", mode: str = MODE, k: int = K,
        cut: int | str = "auto", bits: int | str = "auto",
    ) -> TimedSplit:  # fmt: skip
        """Train `steps` batches from the beginning, over a link that follows a trace from its beginning."""
        config = SplitConfig(
            cut=cut, bits=bits, k=k, mode=mode, rival=rival, batch_size=self.setting.batch_size, steps=steps,
            backup_every=0,
        )  # fmt: skip
        workload = Workload(self.module, self.data, nn.functional.cross_entropy, OPTIMIZER, config)
        events: list[tuple[float, int, float]] = []

        def stepped(step: int, loss: float, seconds: float) -> None:
            events.append((time.monotonic() - began, step, seconds))

        with tempfile.TemporaryDirectory(dir=self.folder) as name, closing(RunRecord(Path(name) / "run")) as record:
            opened = OpenedRun(self.graph, record, RunState(dict(self.graph.state)), record.folder, steps, False)
            job = _Job(workload, self.two.session, opened).between(self.two, trace)
            planned = job.prepared()
            began = time.monotonic()
            result = job.train(planned, stepped)
        return TimedSplit(steps, list(rounds_of(events)), result, mode)


def rounds_of(events: list[tuple[float, int, float]]) -> Iterator[Round]:
    """Yield the rounds of logged steps, each (moment, step, its part of its round's seconds): the steps of a round are
    logged one after another."""
    for _, group in itertools.groupby(events, key=lambda event: event[2]):
        steps = list(group)
        end, first, each = steps[0]
        yield Round(end - each * len(steps), end, first, len(steps))
