"""Timed streams of samples over workers, shared by the measured parts of `manyhands bench infer`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from manyhands.executor.log import DeviceLog
from manyhands.facts.errors import WorkerLost
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.graph.batching import named_sample
from manyhands.graph.graph import Graph
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.streaming import Streaming
from manyhands.session.session import Session

ANSWER_SECONDS = 120.0
"""The limit for an answer, after which the bench gives up."""
WARM_UPS = 2
"""Samples at the start of every stream that do not count."""


_AT_ONE_MOMENT_SECONDS = 0.002
"""Answers of one batch are logged within this time of each other."""


@dataclass
class Ran:
    """A stream that has ended: batches sent one by one, each after the previous one's answer, then many at once."""

    turns: int
    """The number of batches that were sent one by one; most hold one sample."""
    asked: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    logs: Mapping[str, DeviceLog] = field(default_factory=dict)
    last: Any = None
    """The last answer."""

    @property
    def latency(self) -> float:
        """The median seconds from the request to the answer, of batches sent one by one."""
        turns = zip(self.asked[WARM_UPS : self.turns], self.answered[WARM_UPS : self.turns], strict=True)
        return statistics.median(end - start for start, end in turns)

    @property
    def interval(self) -> float:
        """The seconds from one answer to the next, of many sent at once; if they are computed in batches, whose
        answers come at one moment, only whole batches count."""
        moments, counts = _moments(self.answered[self.turns :])
        if len(moments) > 2 and counts[-1] < max(counts):
            del moments[-1], counts[-1]
        first = 0
        while sum(counts[: first + 1]) < WARM_UPS and first < len(moments) - 2:
            first += 1
        return (moments[-1] - moments[first]) / sum(counts[first + 1 :])

    @property
    def inside(self) -> float:
        """The median seconds from the first computing of any device to the last, without the transfers of the picture
        and of the answer."""
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        for log in self.logs.values():
            for span in log.spans:
                if span.kind == "forward":
                    starts[span.step] = min(span.start, starts.get(span.step, math.inf))
                    ends[span.step] = max(span.end, ends.get(span.step, 0.0))
        return statistics.median(ends[step] - starts[step] for step in starts)

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of the device that holds most."""
        return max(log.peak_bytes for log in self.logs.values())


@dataclass
class Stand:
    """A network loaded by the workers of a session, with the kernels that all of them use."""

    session: Session
    graph: Graph
    kernels: Mapping[str, Kernel]
    sample: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.graph.network.tensors[self.graph.network.inputs[0]].shape[1:]
        self.sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))

    def run(
        self, plan: Plan, turns: int, at_once: int = 0, *, memory: bool = False, traced: bool = True,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> Ran:  # fmt: skip
        """Send `turns` batches one by one, and then `at_once` samples at once. With `memory` the first batch counts
        tensor bytes; `traced`: the beginning and end of each action are recorded, which takes a little time."""
        chosen = self.kernels if kernels is None else kernels
        spans = range(WARM_UPS, turns) if traced and plan.steps_per_round == 1 else range(0)
        order = Order(
            self.graph, plan, RunState(dict(self.graph.state)), 0, kernels=dict.fromkeys(plan.devices, chosen),
            trace_steps=spans, memory_step=0 if memory else -1, wait_limit_seconds=ANSWER_SECONDS,
        )  # fmt: skip
        streaming = Streaming(
            self.session.coordinator,
            order,
            _nobody_else,
            RetryPolicy(attempts=0),
            most_waiting=max(plan.step_size, at_once),
        )
        ran = Ran(turns)
        try:
            streaming.start()
            values = named_sample(self.graph, self.sample)
            for number in range(turns + at_once):
                ran.asked.append(time.monotonic())
                size = plan.step_size if number < turns else 1
                future = [streaming.submit(values, ANSWER_SECONDS) for _ in range(size)][-1]
                future.add_done_callback(partial(_note, ran.answered))
                if number < turns or number == turns + at_once - 1:
                    ran.last = future.result(ANSWER_SECONDS)  # answers come in order: this is the last one
        except BaseException:
            streaming.close(cancel=True)
            raise
        streaming.close()
        ran.logs = streaming.logs
        return ran


def _moments(answered: list[float]) -> tuple[list[float], list[int]]:
    """Return the moments at which answers came, and how many at each."""
    moments: list[float] = []
    counts: list[int] = []
    for moment in answered:
        if moments and moment - moments[-1] < _AT_ONE_MOMENT_SECONDS:
            counts[-1] += 1
        else:
            moments.append(moment)
            counts.append(1)
    return moments, counts


def _note(moments: list[float], _: Future[Any]) -> None:
    moments.append(time.monotonic())


def _nobody_else(plan: Plan, names: tuple[str, ...]) -> tuple[Plan, Mapping[str, Mapping[str, Kernel]]]:
    raise WorkerLost(f"Of the bench's workers only {', '.join(names)} are left: nothing is measured with fewer.")


def interleaved(plan: Plan, samples: int) -> Plan:
    """Return the plan with schemes 1+2+3: two samples in flight, in rounds of `samples`."""
    return msgspec.structs.replace(
        plan, order="interleave", micro_batches=samples, batch_size=samples * plan.micro_batch_size
    )


def listed(numbers: Sequence[float], digits: int = 3) -> str:
    return ", ".join(f"{number:.{digits}g}" for number in numbers)
