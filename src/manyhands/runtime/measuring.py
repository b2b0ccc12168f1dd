"""Profiles measured by the workers themselves, all at once: what they share (cores, memory) is in the numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from manyhands.facts.errors import TimedOut, error_named
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.profile import Kernel
from manyhands.graph.document import to_document
from manyhands.graph.graph import Graph
from manyhands.runtime.blame import culprit, is_witness, lost
from manyhands.runtime.control import Failed, Measure, Measured, Probed, ProbeLinks, Ready, Start, Stop
from manyhands.runtime.coordinator import Coordinator, Lost

LIMIT_SECONDS = 300.0
PROBE_SECONDS = 60.0


def measure_on(
    coordinator: Coordinator,
    graph: Graph,
    names: Iterable[str],
    *,
    ladder: tuple[int, ...],
    seconds: float,
    kernels: Mapping[str, Kernel] | None,
    optimizer: Optimizer | None = None,
) -> dict[str, Measured]:
    """Device -> what it measured, in about `seconds`."""
    generation = coordinator.new_generation()
    document = to_document(graph)
    given = dict(kernels) if kernels is not None else None
    stepping = optimizer.to_dict() if optimizer is not None else None
    wanted = list(coordinator.muster(names))
    for name in wanted:
        coordinator.say(name, Measure(generation, document, graph.network, ladder, seconds, given, stepping))
    what = f"measure {graph.name}"
    return _answers(coordinator, generation, wanted, Measured, what, seconds + LIMIT_SECONDS)


def probe_links(coordinator: Coordinator, names: Iterable[str]) -> dict[str, Probed]:
    """Device -> what exchanging data with all the others took it."""
    generation, devices = coordinator.new_generation(), tuple(coordinator.muster(names))
    peers = {name: coordinator.members[name].address for name in devices}
    for name in devices:
        coordinator.say(name, ProbeLinks(generation, devices, peers))
    _answers(coordinator, generation, devices, Ready, "get ready to measure the links", PROBE_SECONDS)
    for name in devices:
        coordinator.say(name, Start(generation, 0, 0, ()))
    return _answers(coordinator, generation, devices, Probed, "measure the links", PROBE_SECONDS)


T = TypeVar("T", Measured, Probed, Ready)


def _answers(
    coordinator: Coordinator, generation: int, names: Sequence[str], kind: type[T], what: str, limit_seconds: float
) -> dict[str, T]:
    """One answer from each; whoever fails or is lost ends the wait, and what the others are at."""
    try:
        return _collected(coordinator, generation, names, kind, what, limit_seconds)
    except BaseException:
        for name in names:
            coordinator.say(name, Stop(generation), 2.0)
        raise


def _collected(
    coordinator: Coordinator, generation: int, names: Sequence[str], kind: type[T], what: str, limit_seconds: float
) -> dict[str, T]:
    members = {name: coordinator.members[name] for name in names}
    when = f"when it was to {what}"
    found: dict[str, T] = {}
    end = time.monotonic() + limit_seconds
    while len(found) < len(names):
        event = coordinator.next_event(max(0.0, end - time.monotonic()))
        if event is None:
            missing = ", ".join(name for name in names if name not in found)
            raise TimedOut(f"{missing} did not {what} within {limit_seconds:g} s.")
        name, message = event
        if isinstance(message, Lost) and message.member is members.get(name):
            raise lost(coordinator, name, when, message.reason)
        if isinstance(message, Failed) and message.generation == generation:
            cause = culprit(coordinator, members, generation) if is_witness(message) else None
            if cause is not None and isinstance(cause[1], str):
                raise lost(coordinator, cause[0], when, cause[1])
            raise error_named(message.kind, f"Worker {name}: {message.message}", message.hint)
        if isinstance(message, kind) and message.generation == generation:
            found[name] = message
    return found
