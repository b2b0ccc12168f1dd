"""Asks workers which of the others they can reach, where that is in doubt (see `routes`), before they connect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from manyhands.executor.messages import COORDINATOR
from manyhands.runtime.control_messages import PeersProbed, ProbePeers
from manyhands.runtime.coordinator import Coordinator
from manyhands.transport.endpoint import Address

PROBE_LIMIT_SECONDS = 6.0
"""Longest time of a probe: six round trips of a handshake, over a link with most of a second of delay."""
ANSWER_LIMIT_SECONDS = 30.0


def ask_for_routes(coordinator: Coordinator, names: Iterable[str], generation: int) -> tuple[str, ...]:
    """Ask the pairs among these workers whose ways are not known to probe each other; return the workers that will
    answer."""
    members = coordinator.members
    targets: defaultdict[str, dict[str, Address]] = defaultdict(dict)
    for first, second in coordinator.routes.unknown(names):
        for source, target in ((first.name, second.name), (second.name, first.name)):
            targets[source][target] = Address(*members[target].address, True)
    limit_seconds = PROBE_LIMIT_SECONDS * coordinator.security.timeout_factor
    for source, addresses in targets.items():
        coordinator.send(source, ProbePeers(generation, addresses, limit_seconds))
    return tuple(targets)


def note_routes(coordinator: Coordinator, source: str, message: PeersProbed) -> None:
    """Note what a worker has found."""
    for target, answer in message.answers.items():
        if target in coordinator.members:
            coordinator.routes.note(source, target, is_open=answer.is_open)


def report_relays(coordinator: Coordinator, names: Iterable[str]) -> None:
    """Tell people which pairs are relayed, each time that this is new."""
    for (first, second), relay in coordinator.routes.relayed(tuple(names)).items():
        if coordinator.routes.is_news(first, second, relay):
            coordinator.on_event(
                f"{first} and {second} do not reach each other: {relay_shown(relay)} relays between them"
            )


def relay_shown(relay: str) -> str:
    """Return a relay's name for people."""
    return "the coordinator" if relay == COORDINATOR else relay
