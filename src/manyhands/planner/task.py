"""A planning task, and the candidate plans for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.plan import BatchNorm, LayerName, Order, Plan, Stage, WarmUp
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.planner.recomputing import within_memory

Grid = tuple[int, ...]
"""Rows and columns of tiles, or depths, rows and columns."""
Weights = tuple[float, ...] | None
MOST_TRIED = 5
"""The finer ways to cut a batch that are tried until it fits in memory, besides the finest."""
STREAMS = ("stream", "interleave")
"""Orders of inference: forward only."""
Price = Callable[[Plan], float]
"""Simulates a plan and returns the quantity that is minimised (usually seconds of a step); raises OutOfMemory."""
Best = Literal["throughput", "latency", "memory", "energy"]
BEST: tuple[Best, ...] = ("throughput", "latency", "memory", "energy")
"""The goals that a training plan is optimised for. A step ends before the next begins, so the plan with the most
samples a second is the one with the shortest step: the first two choose alike."""


@dataclass(frozen=True)
class TileOptions:
    """The tile settings that the user fixes; the planner chooses all others."""

    grid: Grid | None = None
    rows: Weights = None
    columns: Weights = None
    forward_groups: tuple[LayerName, ...] | None = None
    backward_groups: tuple[LayerName, ...] | None = None
    is_grouped: bool = False
    """Whether the groups are fixed by the user, not chosen."""
    depths: Weights = None

    @property
    def sizes(self) -> tuple[Weights, Weights, Weights]:
        """The relative sizes of tiles along depth, rows and columns, where they are fixed."""
        return (self.depths, self.rows, self.columns)


@dataclass(frozen=True)
class Task:
    """A planning task: the network, the cluster, its profile and the settings of a step."""

    network: Network
    cluster: Cluster
    profile: Profile
    batch_size: int
    micro_batches: int | None = None
    """None: chosen by the strategy."""
    order: Order = "1f1b"
    optimizer_slots: int = 1
    batch_norm: BatchNorm = "synchronised"
    warm_up: WarmUp = "2(P-p)-1"
    tiles: TileOptions = TileOptions()
    home: str = ""
    """The device that has the inputs; empty: they are available wherever they are read."""
    best: Best = "throughput"
    gradient_norm: bool = False
    """Whether the devices learn the norm of all gradients before each update."""

    @property
    def is_training(self) -> bool:
        return self.order not in STREAMS

    def layer_seconds(self, device: str, layer: int, samples: float) -> float:
        """Return the seconds of forward and, in training, backward of one layer."""
        forward, backward = self.profile.of(device).layer_seconds(layer, samples)
        return forward + backward if self.is_training else forward

    def step_seconds(self, device: str, samples: int) -> float:
        """Return the seconds of the whole network on one device."""
        return sum(self.layer_seconds(device, layer, samples) for layer in range(len(self.network.layers)))

    def fastest(self) -> str:
        return min(self.cluster.names, key=lambda name: self.step_seconds(name, self.batch_size))

    def plan(self, stages: list[Stage], micro_batches: int) -> Plan:
        return Plan(
            network=self.network.name,
            batch_size=self.batch_size,
            stages=tuple(stages),
            micro_batches=micro_batches,
            order=self.order,
            warm_up=self.warm_up,
            batch_norm=self.batch_norm,
            optimizer_slots=self.optimizer_slots,
            homes=dict.fromkeys(self.network.inputs, self.home) if self.home else {},
        )


@dataclass(frozen=True)
class PlanCandidate:
    """A plan with its price, or the reason why it has none."""

    name: str
    plan: Plan | None
    seconds: float
    reason: str = ""
    hint: str = ""
    """The remedy, where there is no plan."""
    score: float | None = None
    """The quantity that plans are compared by if that is not seconds: bytes, or joules a sample."""


def fitting(name: str, make: Callable[[Task], Plan], task: Task, price: Price) -> PlanCandidate:
    """Return the strategy's plan with its price. A plan that does not fit in memory is tried with more, smaller
    micro-batches, and then with layers run forward again in the backward pass. If none fits, the error is that of the
    smallest micro-batches, which says how much memory is needed at least."""
    plan = resolve(make(task), task.network, task.cluster)
    try:
        return PlanCandidate(name, plan, price(plan))
    except OutOfMemory as error:
        refusal, finest = error, plan
    counts = [count for count in range(plan.micro_batches + 1, task.batch_size + 1) if task.batch_size % count == 0]
    counts = counts if task.micro_batches is None else []
    for count in counts[:MOST_TRIED] + counts[MOST_TRIED:][-1:]:
        try:
            finest = resolve(make(replace(task, micro_batches=count)), task.network, task.cluster)
            return PlanCandidate(name, finest, price(finest))
        except OutOfMemory as error:
            refusal = error
        except BadPlan:  # too few samples for its devices: memory is still the problem
            continue
    try:
        return PlanCandidate(name, *within_memory(finest, task.network, price))
    except OutOfMemory:
        raise refusal from None
