"""The contents of a worker's heartbeats: how far it is, what it waits for, and how fast messages came."""

from __future__ import annotations

import time

from manyhands.executor.executor import Executor
from manyhands.executor.messages import COORDINATOR
from manyhands.runtime.control_parts import Arrival, Standing
from manyhands.transport.transport import ConnectedEndpoint


def arrivals_at(endpoint: ConnectedEndpoint) -> tuple[Arrival, ...]:
    """Return how fast messages from other devices came since the last call; from any thread."""
    timed, now = endpoint.mailbox.take_timed(), time.monotonic()
    return tuple(
        Arrival(message.source, message.bytes, message.seconds, now - message.ended_at)
        for message in timed
        if message.source != COORDINATOR
    )


def standing_of(
    endpoint: ConnectedEndpoint, generation: int | None, executor: Executor | None, main_thread: int
) -> Standing | None:
    """Return how far a worker is in the generation it takes part in; None where it takes part in none."""
    if generation is None:
        return None
    box, missing = endpoint.mailbox, endpoint.missing_peers()
    return Standing(
        generation, step=executor.step if executor is not None else -1,
        moved=box.moved + (executor.actions_done if executor is not None else 0),
        is_busy=not missing and not box.is_waiting(main_thread), waits_for=tuple(missing or box.waited_for()),
        is_connecting=bool(missing), silent=endpoint.silent_peers(), refused=dict(box.refused_by),
    )  # fmt: skip
