"""The root cause where devices miss each other: the device that was lost; errors of those that miss it are symptoms."""

from __future__ import annotations

import time
from collections.abc import Mapping

from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands.runtime.control_messages import Failed, Leaving
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.heartbeats import no_heartbeat
from manyhands.runtime.member import Event, Lost, Member, MemberJoined

LIMITS = 1.5
"""Heartbeat timeouts to wait for news of the lost device: by then every device has answered or is lost."""
_POLL_SECONDS = 0.02
ENDING_SECONDS = 0.2
"""Seconds to wait for a process to end whose connections broke: if it ends, it does so within a moment."""
_SYMPTOMS = (WorkerLost, TimedOut)


def is_symptom(error: BaseException | Failed) -> bool:
    """Return whether this error only says that another device is missed."""
    if isinstance(error, Failed):
        return error.kind in {kind.__name__ for kind in _SYMPTOMS}
    return isinstance(error, _SYMPTOMS)


def find_root_cause(
    coordinator: Coordinator, members: Mapping[str, Member], generation: int
) -> tuple[str, str | Failed] | None:
    """Return the worker that was lost and how, or that failed in a way of its own.

    Every device is asked for an answer: the search is over when all have answered, and takes `LIMITS` timeouts at most.
    """
    cause: tuple[str, str | Failed] | None = None
    others: list[Event] = []
    tickets = {name: coordinator.clock_sync.ask(name) for name, member in members.items() if not member.is_lost}
    end = time.monotonic() + coordinator.times.timeout_seconds * LIMITS
    while cause is None and (seconds_left := end - time.monotonic()) > 0:
        tickets = {
            name: ticket for name, ticket in tickets.items() if not coordinator.clock_sync.has_answered(name, ticket)
        }
        event = coordinator.next_event(min(seconds_left, _POLL_SECONDS) if tickets else 0.0)
        if event is None:
            if not tickets:
                break
            continue
        name, message = event
        if isinstance(message, Lost) and message.member is members.get(name):
            cause = name, message.reason
        elif isinstance(message, Failed) and message.generation == generation and not is_symptom(message):
            cause = name, message
        elif isinstance(message, (MemberJoined, Leaving)):
            others.append(event)
    for event in others:
        coordinator.events.put(event)  # they are not handled here
    if cause is not None:
        return cause
    for name, member in members.items():
        if member.is_lost:
            return name, member.reason
    name = max(members, key=coordinator.membership.silent_seconds)
    seconds = coordinator.membership.silent_seconds(name)
    return (name, no_heartbeat(seconds)) if seconds > coordinator.times.timeout_seconds / 2 else None


def lost(coordinator: Coordinator, name: str, when: str, reason: str) -> WorkerLost:
    """Return the error that names a lost worker, when it was lost, and how."""
    if coordinator.members[name].is_evicted:
        return WorkerLost(f"Worker {name} was evicted {when}: {reason}.")
    ending = coordinator.local.ending(name, ENDING_SECONDS)
    words = coordinator.local.last_words(name)[-800:] if ending else ""
    return WorkerLost(f"Worker {name} was lost {when}: {ending or reason}.", hint=f"It said:\n{words}" if words else "")
