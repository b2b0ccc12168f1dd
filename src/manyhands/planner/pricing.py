"""Objectives of plans for inference: seconds of a sample, alone (latency) or in a long stream (throughput).

Both are simulated, a stream by the difference of a long and a short one, so that filling and draining do not count. A
stream is expensive to simulate, so one sample of each plan is simulated first: the time that its busiest device or port
needs is the least that a stream can take per sample, and plans that can no longer win are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.plan import ByChannels, ByTiles, Plan
from manyhands.facts.plan_check import resolve
from manyhands.planner.task import PlanCandidate, Task

Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput")
ROUND = 16
"""Samples of a round with order interleave."""
MOST_STREAMS = 12
"""The most streams simulated per strategy, the most promising first."""
_SLACK = 0.999
"""Tolerance of the lower bound of a stream, whose clock is a floating-point number."""

Named = tuple[str, Plan]


@dataclass(frozen=True)
class MicroBatchPrice:
    """The simulated cost of one micro-batch alone."""

    seconds: float
    busiest_seconds: float
    """Seconds that its busiest device or port needs: a stream cannot be faster."""


Once = Callable[[Plan], MicroBatchPrice]
"""Simulates one micro-batch; raises OutOfMemory."""
Steady = Callable[[Plan], float]
"""Simulates a stream and returns the seconds of a sample; raises OutOfMemory."""


class Pricer:
    """Prices plans by an objective."""

    def __init__(self, task: Task, objective: Objective, once: Once, steady: Steady) -> None:
        self.task, self.objective = task, objective
        self._once, self._steady = once, steady
        self.best = inf
        """The least seconds of a sample so far: plans that cannot be faster are not simulated as streams."""

    @property
    def is_latency(self) -> bool:
        return self.objective == "latency"

    def may_win(self, plan: Plan) -> bool:
        """Return whether a plan, as a stream, may be faster than the fastest so far."""
        return self.is_latency or self.best == inf or self.least_seconds(plan) < self.best

    def least_seconds(self, plan: Plan) -> float:
        """Return a lower bound on the seconds of a sample in a stream by this plan; infinite where it cannot run."""
        try:
            return _SLACK * self._once(plan).busiest_seconds
        except ManyhandsError:
            return inf

    def rank(
        self, plans: Iterable[Named], *, most: int = MOST_STREAMS, may_interleave: bool = True
    ) -> list[PlanCandidate]:
        """Return plans with their prices, the fastest first; ties go to the plan named first.

        Raises the first refusal where none can run. `may_interleave`: a stream's samples may overlap inside a stage.
        """
        priced: list[tuple[float, str, Plan]] = []
        refusal: ManyhandsError | None = None
        keys: set[bytes] = set()
        for name, unresolved in plans:
            try:
                plan = resolve(unresolved, self.task.network, self.task.cluster)
                key = msgspec.msgpack.encode(plan)
                if key in keys:
                    continue
                keys.add(key)
                price = self._once(plan)
            except ManyhandsError as error:
                refusal = refusal or error
                continue
            priced.append((price.seconds if self.is_latency else price.busiest_seconds, name, plan))
        if not priced:
            raise refusal or BadPlan(f"There is no such plan of {self.task.network.name}.")
        priced.sort(key=lambda entry: entry[0])
        if self.is_latency:
            return [PlanCandidate(name, plan, seconds) for seconds, name, plan in priced]
        return self._streams(priced, most, may_interleave)

    def _streams(self, priced: list[tuple[float, str, Plan]], most: int, may_interleave: bool) -> list[PlanCandidate]:
        candidates: list[PlanCandidate] = []
        refusal: ManyhandsError | None = None
        for tried, (least, name, plan) in enumerate(priced):
            if tried >= most or (candidates and _SLACK * least >= self.best):
                break
            for words, stream in self._orders(name, plan, may_interleave):
                if candidates and _SLACK * least >= self.best:
                    break
                try:
                    seconds = self._steady(stream)
                except ManyhandsError as error:
                    refusal = refusal or error
                    continue
                candidates.append(PlanCandidate(words, stream, seconds))
                self.best = min(self.best, seconds)
        if not candidates:
            assert refusal is not None
            raise refusal
        return sorted(candidates, key=lambda candidate: candidate.seconds)

    def _orders(self, name: str, plan: Plan, may_interleave: bool) -> list[Named]:
        """Return the orders to try: one sample after another, and two under way where devices wait for each other
        inside a stage."""
        is_split = any(isinstance(s.share, (ByTiles, ByChannels)) and len(s.devices) > 1 for s in plan.stages)
        if not is_split or not may_interleave:
            return [(name, plan)]
        overlapped = msgspec.structs.replace(
            plan, order="interleave", micro_batches=ROUND, batch_size=ROUND * plan.micro_batch_size
        )
        return [(f"{name}, interleaved", overlapped), (name, plan)]


def subcluster(cluster: Cluster, names: Iterable[str]) -> Cluster:
    """Return some of a cluster's devices, in its order."""
    chosen = set(names)
    devices = tuple(device for device in cluster.devices if device.name in chosen)
    links = tuple(link for link in cluster.links if link.sender in chosen and link.receiver in chosen)
    return Cluster(cluster.name, devices, cluster.link, links, cluster.sites)


def alike(task: Task) -> dict[str, int]:
    """Return device -> its kind: devices of one kind are interchangeable in a plan."""
    named = {name for link in task.cluster.links for name in (link.sender, link.receiver)} | {task.home}
    kinds: list[tuple[object, object]] = []
    kind_of: dict[str, int] = {}
    for device in task.cluster.devices:
        profile = task.profile.of(device.name)
        is_own = device.name in named or device.host or any(d.host == device.name for d in task.cluster.devices)
        facts = device.name if is_own else msgspec.structs.replace(device, name="any", source="")
        key = (facts, profile.layers)
        if key not in kinds:
            kinds.append(key)
        kind_of[device.name] = kinds.index(key)
    return kind_of
