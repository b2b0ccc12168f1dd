"""Asks the members of a job what state they hold."""

from __future__ import annotations

import time
from collections.abc import Sequence

from manyhands.runtime.control_messages import Failed, Holding, Survey
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.member import Member

_POLL_SECONDS = 0.05


def ask_what_they_hold(
    coordinator: Coordinator, members: Sequence[Member], since: int, limit: float
) -> dict[str, Holding] | None:
    """Return the state that each member holds; None where one was lost meanwhile, or was evicted without answer.

    `since`: the generation with which the job began; `limit`: when waiting ends, by the clock of this process.
    """
    generation, began = coordinator.new_generation(), time.monotonic()
    for member in members:
        coordinator.send(member.name, Survey(generation, since))
    answers: dict[str, Holding] = {}
    while len(answers) < len(members):
        if any(member.is_lost for member in members):
            return None
        if time.monotonic() > limit:
            waited = f"{time.monotonic() - began:.1f} s"
            for member in members:
                if member.name not in answers:
                    coordinator.evict(member.name, f"it did not report within {waited} what state it holds")
            return None
        event = coordinator.next_event(_POLL_SECONDS)
        if event is None:
            continue
        name, message = event
        if isinstance(message, Holding) and message.generation == generation:
            answers[name] = message
        elif isinstance(message, Failed) and message.generation == generation:
            return None
    return answers
