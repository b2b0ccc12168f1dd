"""Profiles and link measurements made by all workers at once, so that they include what the workers share
(cores, memory)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from manyhands.executor.messages import COORDINATOR
from manyhands.executor.schedules import at_start
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
from manyhands.runtime.route_probing import ANSWER_LIMIT_SECONDS, ask_for_routes, note_routes, report_relays

LIMIT_SECONDS = 300.0
PROBE_SECONDS = 60.0
PAIR_SECONDS = 20.0
"""Seconds after which a short look at a link ends: next to nothing passes over a link that is this slow."""


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
    """Return device -> what it measured, in about `seconds`; `training`: False for inference."""
    generation = coordinator.new_generation()
    document = to_document(graph)
    kernel_document = dict(kernels) if kernels is not None else None
    stepping = at_start(optimizer).to_dict() if optimizer is not None else None
    devices = list(coordinator.members_for(names))
    for name in devices:
        command = Measure(
            generation,
            document,
            graph.network,
            ladder,
            seconds,
            kernel_document,
            stepping,
            training,
            gpu_math=coordinator.gpu_math,
        )
        coordinator.send(name, command)
    task = f"measure {graph.name}"
    return _answers(coordinator, generation, devices, Measured, task, seconds + LIMIT_SECONDS)


def measure_quickly_on(
    coordinator: Coordinator,
    graph: Graph,
    names: Iterable[str],
    *,
    ladder: tuple[int, ...],
    seconds: float,
    kernels: Mapping[str, Kernel],
    optimizer: Optimizer | None,
    alone: bool,
) -> dict[str, Measured]:
    """Return device -> what it measured of training within `seconds`; `alone`: without time for which others' work
    paused it."""
    generation, document = coordinator.new_generation(), to_document(graph)
    stepping = at_start(optimizer).to_dict() if optimizer is not None else None
    devices = list(coordinator.members_for(names))
    for name in devices:
        command = Measure(
            generation,
            document,
            graph.network,
            ladder,
            seconds,
            dict(kernels),
            stepping,
            is_quick=True,
            alone=alone,
            gpu_math=coordinator.gpu_math,
        )
        coordinator.send(name, command)
    return _answers(coordinator, generation, devices, Measured, f"measure {graph.name}", seconds + LIMIT_SECONDS)


def learn_routes(coordinator: Coordinator, names: Iterable[str]) -> None:
    """Find out how those of these workers connect that may not reach each other."""
    generation, devices = coordinator.new_generation(), tuple(names)
    answering = ask_for_routes(coordinator, devices, generation)
    if answering:
        limit_seconds = ANSWER_LIMIT_SECONDS * coordinator.security.timeout_factor
        answers = _answers(coordinator, generation, answering, PeersProbed, "reach the others", limit_seconds)
        for name, answer in answers.items():
            note_routes(coordinator, name, answer)
    report_relays(coordinator, devices)


def probe_links(coordinator: Coordinator, names: Iterable[str], *, is_quick: bool = False) -> dict[str, Probed]:
    """Return device -> what exchanging data with all the others took on it. `is_quick`: with few repeats."""
    devices = tuple(coordinator.members_for(names))
    generation = _connected(coordinator, devices, {}, is_quick=is_quick)
    for name in devices:
        coordinator.send(name, Start(generation, 0, 0, ()))
    return _answers(coordinator, generation, devices, Probed, "measure the links", PROBE_SECONDS)


def probe_pair(
    coordinator: Coordinator, pair: tuple[str, str], sizes: Mapping[str, int], limit_seconds: float = PAIR_SECONDS
) -> dict[str, Link]:
    """Return sender -> its link to the other of two workers, from one transfer of the given number of bytes.

    Raises `TimedOut` where they do not arrive within the limit. Nothing else may run meanwhile.
    """
    devices = tuple(coordinator.members_for(pair))
    generation = _connected(coordinator, devices, sizes)
    for name in devices:
        coordinator.send(name, Start(generation, 0, 0, ()))
    answers = _answers(coordinator, generation, devices, Probed, "look at the link", limit_seconds)
    return {name: link for name, answer in answers.items() for link in answer.links.values()}


def _connected(
    coordinator: Coordinator, devices: tuple[str, ...], sizes: Mapping[str, int], *, is_quick: bool = False
) -> int:
    """Connect these devices to each other for a measurement, and return its generation. Where that fails though nobody
    is lost, they are asked who reaches whom, and connect in another way as long as there is one."""
    routes = coordinator.routes
    while True:
        learn_routes(coordinator, devices)
        generation = coordinator.new_generation()
        for name in devices:
            peers = coordinator.addresses(devices, name, with_coordinator=False)
            coordinator.send(name, ProbeLinks(generation, devices, peers, dict(sizes), is_quick=is_quick))
        try:
            _answers(coordinator, generation, devices, Ready, "get ready to measure the links", PROBE_SECONDS)
            return generation
        except TimedOut:
            if any(coordinator.members[name].is_lost for name in devices):
                raise
            routes.suspect(devices)
            relayed = routes.relayed(devices)
            if not routes.unknown(devices) and not (relayed and routes.give_up(relayed)):
                raise


def probe_reachability(coordinator: Coordinator, names: Iterable[str]) -> dict[str, dict[str, ProbeAnswer]]:
    """Return connecting device -> target -> the outcome, for every pair of these workers and the coordinator."""
    generation, workers = coordinator.new_generation(), tuple(coordinator.members_for(names))
    for name in workers:
        coordinator.send(name, ProbePeers(generation, coordinator.addresses(workers, name), LIMIT_OF_MEMBER_PROBE))
    peers = coordinator.addresses(workers, COORDINATOR, with_coordinator=False)
    own_answers = {COORDINATOR: probe_all(COORDINATOR, peers, LIMIT_OF_OWN_PROBE)}
    answers = _answers(coordinator, generation, workers, PeersProbed, "reach the others", PROBE_SECONDS)
    return own_answers | {name: answers[name].answers for name in workers}


def ask_ids(coordinator: Coordinator, names: Iterable[str]) -> dict[str, bytes]:
    """Return worker -> the digests of the ids of its own samples, in the order of its rows."""
    generation, workers = coordinator.new_generation(), tuple(coordinator.members_for(names))
    for name in workers:
        coordinator.send(name, AskIds(generation))
    answers = _answers(coordinator, generation, workers, Ids, "report which samples it has", PROBE_SECONDS)
    return {name: answers[name].digests for name in workers}


T = TypeVar("T", Measured, Probed, Ready, Ids, PeersProbed)


def _answers(
    coordinator: Coordinator, generation: int, names: Sequence[str], kind: type[T], task: str, limit_seconds: float
) -> dict[str, T]:
    """Return one answer from each worker; a worker that fails or is lost ends the wait, and stops the others."""
    try:
        return _collected(coordinator, generation, names, kind, task, limit_seconds)
    except BaseException:
        for name in names:
            coordinator.send(name, Stop(generation), 2.0)
        raise


def _collected(
    coordinator: Coordinator, generation: int, names: Sequence[str], kind: type[T], task: str, limit_seconds: float
) -> dict[str, T]:
    members = {name: coordinator.members[name] for name in names}
    when = f"when it was to {task}"
    answers: dict[str, T] = {}
    end = time.monotonic() + limit_seconds
    while len(answers) < len(names):
        event = coordinator.next_event(max(0.0, end - time.monotonic()))
        if event is None:
            missing = ", ".join(name for name in names if name not in answers)
            raise TimedOut(f"{missing} did not {task} within {limit_seconds:g} s.")
        name, message = event
        if isinstance(message, Lost) and message.member is members.get(name):
            raise lost(coordinator, name, when, message.reason)
        if isinstance(message, Failed) and message.generation == generation:
            cause = find_root_cause(coordinator, members, generation) if is_symptom(message) else None
            if cause is not None and isinstance(cause[1], str):
                raise lost(coordinator, cause[0], when, cause[1])
            raise error_named(message.kind, f"Worker {name}: {message.message}", message.hint)
        if isinstance(message, kind) and message.generation == generation:
            answers[name] = message
    return answers
