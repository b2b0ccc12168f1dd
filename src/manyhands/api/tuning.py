"""Plans tried for a few steps on the workers at hand: where simulations are close, a trial decides."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.facts.errors import OutOfMemory
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.run import Run

WARM_UP, STEPS = 2, 4

Trials = list[tuple[Plan, float]]


def fastest_in_trial(
    coordinator: Coordinator,
    graph: Graph,
    plans: Sequence[Plan],
    optimizer: Optimizer,
    kernels: Mapping[str, Mapping[str, Kernel]],
    batch: tuple[Any, Any],
) -> Trials:
    """Plans with the seconds of a step, the fastest first. The same batch is trained on over and over, from the graph's
    own weights, which do not change."""
    inputs, targets = batch
    found: Trials = []
    for plan in plans:
        order = Order(
            graph=graph, plan=plan, start=RunState(dict(graph.state)), last_step=WARM_UP + STEPS, optimizer=optimizer,
            kernels={name: kernels.get(name, {}) for name in plan.devices},
        )  # fmt: skip
        run = Run(coordinator, order)
        try:
            run.prepare()
        except OutOfMemory:
            continue
        taken = run.run((step, inputs, targets) for step in range(WARM_UP + STEPS)).step_seconds
        found.append((plan, statistics.median(taken[WARM_UP:])))
    return sorted(found, key=lambda one: one[1])
