"""What is to be run, and what a run starts from or has come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from manyhands.data.preload import Preload
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph

if TYPE_CHECKING:
    from manyhands.runtime.state import Located

WAIT_LIMIT_SECONDS = 600.0


@dataclass
class RunState:
    """What a run starts from or has come to: weights and buffers by name, the optimiser's state, steps done."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    steps_done: int = 0


@dataclass
class Order:
    """What is to be run."""

    graph: Graph
    plan: Plan
    start: RunState
    """What it starts from, or the last that was saved where workers have what is later: see `located`."""
    last_step: int
    optimizer: Optimizer | None = None
    seed: int = 0
    kernels: Mapping[str, Mapping[str, Kernel]] = field(default_factory=dict)
    """Device -> operator -> kernel."""
    snapshots: tuple[int, ...] = ()
    trace_steps: range = range(0)
    memory_step: int = -1
    """The step in which every device counts the bytes it holds."""
    watch_every: int = 0
    """One round in so many is looked at by whoever looks on; 0: none."""
    wait_limit_seconds: float = WAIT_LIMIT_SECONDS
    """The longest that anybody waits for a message, whatever a round's time is."""
    predicted_seconds: float | None = None
    """Of a round, by the planner; None: nobody has asked it."""
    located: Located | None = None
    """Where the state lies that it starts from; None: all of `start` is here."""
    preload: Preload | None = None
    """All samples, to be preloaded at the devices before the first step; then batches are of their numbers."""
    backup_every: int = 0
    """Rounds between two copies of all state that are kept against losses; 0: none are."""


def snapshot_steps(first: int, last: int, every: int) -> tuple[int, ...]:
    """Steps done at which state is kept: every so many, and at the end."""
    found = {step for step in range(first + 1, last + 1) if step % every == 0} | {last}
    return tuple(sorted(step for step in found if step > first))
