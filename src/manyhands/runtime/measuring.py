"""Profiles measured by the workers themselves, all at once: what they share (cores, memory) is in the numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from manyhands.facts.errors import TimedOut, WorkerLost, error_named
from manyhands.facts.profile import Kernel
from manyhands.graph.document import to_document
from manyhands.graph.graph import Graph
from manyhands.runtime.control import Failed, Measure, Measured
from manyhands.runtime.coordinator import Coordinator, Lost

LIMIT_SECONDS = 300.0


def measure_on(
    coordinator: Coordinator,
    graph: Graph,
    names: Iterable[str],
    *,
    ladder: tuple[int, ...],
    seconds: float,
    kernels: Mapping[str, Kernel] | None,
) -> dict[str, Measured]:
    """Device -> what it measured, in about `seconds`."""
    wanted = list(names)
    generation = coordinator.new_generation()
    document = to_document(graph)
    given = dict(kernels) if kernels is not None else None
    for name in wanted:
        coordinator.say(name, Measure(generation, document, graph.network, ladder, seconds, given))
    found: dict[str, Measured] = {}
    end = time.monotonic() + seconds + LIMIT_SECONDS
    while len(found) < len(wanted):
        event = coordinator.next_event(max(0.0, end - time.monotonic()))
        if event is None:
            missing = ", ".join(name for name in wanted if name not in found)
            raise TimedOut(f"{missing} did not measure {graph.name} within {seconds + LIMIT_SECONDS:g} s.")
        name, message = event
        if isinstance(message, Lost) and name in wanted:
            ending = coordinator.local.ending(name, 1.0)
            raise WorkerLost(f"Worker {name} was lost while it measured {graph.name}: {ending or message.reason}.")
        if isinstance(message, Failed) and message.generation == generation:
            raise error_named(message.kind, f"{name}: {message.message}", message.hint)
        if isinstance(message, Measured) and message.generation == generation:
            found[name] = message
    return found
