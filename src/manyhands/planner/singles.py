"""Plans on one device alone: the fastest of each kind."""

from __future__ import annotations

from functools import partial

from manyhands.facts.errors import ManyhandsError
from manyhands.planner.simple import single
from manyhands.planner.task import PlanCandidate, Price, Task, fitting

MOST_KINDS = 8
"""The most kinds of devices of which one is tried alone, the fastest first."""


def singles(task: Task, price: Price) -> list[PlanCandidate]:
    """Return the fastest device of each kind alone; devices that it does not fit on are left out, unless it fits on
    none."""
    candidates: list[PlanCandidate] = []
    refusal: ManyhandsError | None = None
    for name, device in kinds(task):
        try:
            candidates.append(fitting(name, partial(single, device=device), task, price))
        except ManyhandsError as error:
            refusal = refusal or error
    if not candidates:
        assert refusal is not None
        raise refusal
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def kinds(task: Task) -> list[tuple[str, str]]:
    """Return the name of a plan on one device, and the device: the fastest of each kind, up to MOST_KINDS of them."""
    kinds: dict[str, str] = {}
    for device in sorted(task.cluster.devices, key=lambda device: task.step_seconds(device.name, task.batch_size)):
        kinds.setdefault(f"{device.kind} {device.gflops} {device.memory_bytes}", device.name)
    return [(f"single on {name}", name) for name in list(kinds.values())[:MOST_KINDS]]
