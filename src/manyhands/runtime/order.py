"""The order of what is to be run, and the state that a run starts from or has come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from manyhands.data.preload import Preload
from manyhands.facts.clipping import Clipping
from manyhands.facts.collectives import BUILTIN
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs

if TYPE_CHECKING:
    from manyhands.runtime.state import Located

WAIT_LIMIT_SECONDS = 600.0
IDLE_SECONDS = 10 * 365 * 24 * 3600.0
"""Seconds that a worker waits for a feed that may come at any time: a coordinator that is gone is noticed by other
means."""


@dataclass
class RunState:
    """The state a run starts from or has come to: weights and buffers by name, the optimiser's state, steps done."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    steps_done: int = 0


class StepRates(Protocol):
    """The numbers that schedules give each step: learning rates and what else they change, of all groups."""

    def is_known(self, step: int) -> bool:
        """Return whether they can be told by now: no validation before the step is outstanding."""

    def at(self, step: int) -> tuple[float, ...]: ...


@dataclass
class Order:
    """A description of what is to be run."""

    graph: Graph
    plan: Plan
    start: RunState
    """The state it starts from, or the last that was saved where workers have a later one: see `located`."""
    last_step: int
    optimizer: Optimizer | None = None
    rates: StepRates | None = None
    """What schedules make of the optimizer's options at each step; None: they stay as they are."""
    seed: int = 0
    kernels: Mapping[str, Mapping[str, Kernel]] = field(default_factory=dict)
    """Device -> operator -> kernel."""
    snapshots: tuple[int, ...] = ()
    trace_steps: range = range(0)
    memory_step: int = -1
    """The step in which every device counts the bytes it holds."""
    watch_every: int = 0
    """Rounds from one that is recorded for live observation to the next; 0: none is recorded."""
    wait_limit_seconds: float = WAIT_LIMIT_SECONDS
    """The longest that any process waits for a message, whatever a round's time is."""
    predicted_seconds: float | None = None
    """A round's time by the planner; None: the planner was not asked."""
    located: Located | None = None
    """The places of the state that it starts from; None: the coordinator has all of `start`."""
    preload: Preload | None = None
    """All samples, to be preloaded on the devices before the first step; batches then consist of sample numbers."""
    backup_every: int = 0
    """Rounds between two copies of all state that are kept against losses; 0: no copies."""
    clipping: Clipping | None = None
    """The limits of gradients; None: there are none. For one of their norm, the plan has `gradient_norm`."""
    scales_loss: bool = False
    """Whether the loss is scaled, and steps whose gradients overflow are skipped: the plan has `gradient_norm`."""
    ema: float | None = None
    """The decay of an average of the weights, which is kept with the optimizer's state; None: there is none."""
    waits_for_batches: bool = False
    """Whether batches come from somebody's own loop, when they come: no wait for the next one has a limit."""
    collectives: str = BUILTIN
    """How devices form sums together: see `facts.collectives`."""
    trusts_network: bool = False
    """Whether sums may travel beyond this machine without encryption."""
    is_aside: bool = False
    """Whether it only measures: workers keep the state of the job that is under way, and none of this."""
    lengths: LengthGraphs | None = None
    """The graphs of batches of several lengths, of which `graph` is the longest; None: all batches have one shape."""

    @property
    def uses_groups(self) -> bool:
        """Whether process groups of PyTorch may form sums, in place of messages."""
        return self.collectives != BUILTIN

    @property
    def first_step(self) -> int:
        """The steps done when it begins."""
        return self.start.steps_done if self.located is None else self.located.steps_done

    def at_longest(self, step: int, seconds: float) -> float:
        """Return the seconds that a step of the longest batches may take where this one took `seconds`."""
        return seconds if self.lengths is None else seconds * self.lengths.work_ratio(step)

    def graph_at(self, step: int) -> Graph:
        """Return the graph that a step runs."""
        length = self.lengths.length(step) if self.lengths is not None else None
        return self.graph if self.lengths is None or length is None else self.lengths.graphs[length]


def snapshot_steps(first: int, last: int, every: int) -> tuple[int, ...]:
    """Return the steps done at which state is kept: every `every` steps, and at the end."""
    steps = {*range((first // every + 1) * every, last + 1, every), last}
    return tuple(sorted(step for step in steps if step > first))
