"""Profiles measured by the workers themselves, all at once: what they share (cores, memory) is in the numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from manyhands.executor.messages import COORDINATOR
from manyhands.executor.optimizers import at_start
from manyhands.facts.errors import TimedOut, error_named
from manyhands.facts.link import Link
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.profile import Kernel
from manyhands.graph.document import to_document
from manyhands.graph.graph import Graph
from manyhands.runtime.control_messages import (
    AskIds,
    Failed,
    Ids,
    Measure,
    Measured,
    PeersProbed,
    Probed,
    ProbeLinks,
    ProbePeers,
    Ready,
    Start,
    Stop,
)
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.member import Lost
from manyhands.runtime.member_probes import MEMBER_LIMIT_SECONDS as LIMIT_OF_MEMBER_PROBE
from manyhands.runtime.reachability import LIMIT_SECONDS as LIMIT_OF_OWN_PROBE
from manyhands.runtime.reachability import ProbeAnswer, probe_all
from manyhands.runtime.root_cause import find_root_cause, is_symptom, lost

LIMIT_SECONDS = 300.0
PROBE_SECONDS = 60.0
PAIR_SECONDS = 20.0
"""A short look at a link that takes so long has seen that next to nothing passes."""


def measure_on(
    coordinator: Coordinator,
    graph: Graph,
    names: Iterable[str],
    *,
    ladder: tuple[int, ...],
    seconds: float,
    kernels: Mapping[str, Kernel] | None,
    optimizer: Optimizer | None = None,
    training: bool = True,
) -> dict[str, Measured]:
    """Device -> what it measured, in about `seconds`; `training`: False for inference."""
    generation = coordinator.new_generation()
    document = to_document(graph)
    given = dict(kernels) if kernels is not None else None
    stepping = at_start(optimizer).to_dict() if optimizer is not None else None
    wanted = list(coordinator.members_for(names))
    for name in wanted:
        asked = Measure(generation, document, graph.network, ladder, seconds, given, stepping, training)
        coordinator.send(name, asked)
    what = f"measure {graph.name}"
    return _answers(coordinator, generation, wanted, Measured, what, seconds + LIMIT_SECONDS)


def probe_links(coordinator: Coordinator, names: Iterable[str]) -> dict[str, Probed]:
    """Device -> what exchanging data with all the others took it."""
    generation, devices = coordinator.new_generation(), tuple(coordinator.members_for(names))
    for name in devices:
        peers = coordinator.addresses(devices, name, with_coordinator=False)
        coordinator.send(name, ProbeLinks(generation, devices, peers))
    _answers(coordinator, generation, devices, Ready, "get ready to measure the links", PROBE_SECONDS)
    for name in devices:
        coordinator.send(name, Start(generation, 0, 0, ()))
    return _answers(coordinator, generation, devices, Probed, "measure the links", PROBE_SECONDS)


def probe_pair(coordinator: Coordinator, pair: tuple[str, str], sizes: Mapping[str, int]) -> dict[str, Link]:
    """Sender -> its link to the other of two workers, from one transfer of so many bytes; `TimedOut` where they do not
    arrive. Nothing else may run meanwhile."""
    generation, devices = coordinator.new_generation(), tuple(coordinator.members_for(pair))
    for name in devices:
        peers = coordinator.addresses(devices, name, with_coordinator=False)
        coordinator.send(name, ProbeLinks(generation, devices, peers, dict(sizes)))
    _answers(coordinator, generation, devices, Ready, "get ready to look at the link", PROBE_SECONDS)
    for name in devices:
        coordinator.send(name, Start(generation, 0, 0, ()))
    found = _answers(coordinator, generation, devices, Probed, "look at the link", PAIR_SECONDS)
    return {name: link for name, one in found.items() for link in one.links.values()}


def probe_reachability(coordinator: Coordinator, names: Iterable[str]) -> dict[str, dict[str, ProbeAnswer]]:
    """Who connects -> to whom -> what came of it, for every pair of these workers and the coordinator."""
    generation, wanted = coordinator.new_generation(), tuple(coordinator.members_for(names))
    for name in wanted:
        coordinator.send(name, ProbePeers(generation, coordinator.addresses(wanted, name), LIMIT_OF_MEMBER_PROBE))
    own = coordinator.addresses(wanted, COORDINATOR, with_coordinator=False)
    found = {COORDINATOR: probe_all(COORDINATOR, own, LIMIT_OF_OWN_PROBE)}
    answers = _answers(coordinator, generation, wanted, PeersProbed, "reach the others", PROBE_SECONDS)
    return found | {name: answers[name].answers for name in wanted}


def ask_ids(coordinator: Coordinator, names: Iterable[str]) -> dict[str, bytes]:
    """Worker -> the digests of the ids of the samples it has itself, in the order of its rows."""
    generation, wanted = coordinator.new_generation(), tuple(coordinator.members_for(names))
    for name in wanted:
        coordinator.send(name, AskIds(generation))
    found = _answers(coordinator, generation, wanted, Ids, "tell which samples it has", PROBE_SECONDS)
    return {name: found[name].digests for name in wanted}


T = TypeVar("T", Measured, Probed, Ready, Ids, PeersProbed)


def _answers(
    coordinator: Coordinator, generation: int, names: Sequence[str], kind: type[T], what: str, limit_seconds: float
) -> dict[str, T]:
    """One answer from each; whoever fails or is lost ends the wait, and what the others are at."""
    try:
        return _collected(coordinator, generation, names, kind, what, limit_seconds)
    except BaseException:
        for name in names:
            coordinator.send(name, Stop(generation), 2.0)
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
            cause = find_root_cause(coordinator, members, generation) if is_symptom(message) else None
            if cause is not None and isinstance(cause[1], str):
                raise lost(coordinator, cause[0], when, cause[1])
            raise error_named(message.kind, f"Worker {name}: {message.message}", message.hint)
        if isinstance(message, kind) and message.generation == generation:
            found[name] = message
    return found
