"""Who is to blame when devices miss each other: the lost one is the cause, those that miss it are witnesses."""

from __future__ import annotations

import time
from collections.abc import Mapping

from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands.runtime.control import Failed
from manyhands.runtime.coordinator import Coordinator, Lost, Member, silence

NEWS_SECONDS = 3.0
"""How long, after somebody missed a peer, to wait for news of who was lost."""
SILENT_SECONDS = 2.5
"""Whoever has not even beaten for so long is the one."""
_WITNESSES = (WorkerLost, TimedOut)


def is_witness(error: BaseException | Failed) -> bool:
    """Whether this only says that somebody else is missed."""
    if isinstance(error, Failed):
        return error.kind in {kind.__name__ for kind in _WITNESSES}
    return isinstance(error, _WITNESSES)


def culprit(
    coordinator: Coordinator, members: Mapping[str, Member], generation: int
) -> tuple[str, str | Failed] | None:
    """The worker that was lost and how, or that failed in a way of its own; news may take a moment."""
    end = time.monotonic() + NEWS_SECONDS
    while (left := end - time.monotonic()) > 0:
        event = coordinator.next_event(left)
        if event is None:
            break
        name, message = event
        if isinstance(message, Lost) and message.member is members.get(name):
            return name, message.reason
        if isinstance(message, Failed) and message.generation == generation and not is_witness(message):
            return name, message
    for name, member in members.items():
        if member.is_lost:
            return name, member.reason
    name, member = max(members.items(), key=lambda item: item[1].silent_seconds)
    return (name, silence(member.silent_seconds)) if member.silent_seconds > SILENT_SECONDS else None


def lost(coordinator: Coordinator, name: str, when: str, reason: str) -> WorkerLost:
    """The error that names a lost worker, when it was lost, and how."""
    ending = coordinator.local.ending(name, 1.0)
    words = coordinator.local.last_words(name)[-800:] if ending else ""
    return WorkerLost(f"Worker {name} was lost {when}: {ending or reason}.", hint=f"It said:\n{words}" if words else "")
