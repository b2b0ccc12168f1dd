"""The arrived messages that an event-driven policy may look at. The mailbox is queried message by message, as the
policy needs to know."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.executor.messages import COORDINATOR
from manyhands.schedule.actions import Message
from manyhands.schedule.feeding import feed_topic
from manyhands.transport.mailbox import Mailbox


class ArrivedMessages:
    """The messages of a round that have arrived, as (source, message). A message that was already received counts as
    arrived."""

    def __init__(self, box: Mailbox, step: int, topic: Callable[[Message], str]) -> None:
        self._box, self._step, self._topic = box, step, topic
        self._seen: set[tuple[str, Message]] = set()

    def __contains__(self, key: object) -> bool:
        if key in self._seen:
            return True
        assert isinstance(key, tuple)
        source, message = key
        if not self._box.has_arrived(source, self._step, self._topic(message)):
            return False
        self._seen.add(key)
        return True


class FedMicroBatches:
    """The micro-batches of a round whose inputs and targets have arrived; they arrive in order."""

    def __init__(self, box: Mailbox, step: int) -> None:
        self._box, self._step = box, step
        self._count = 0

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        while self._count <= number:
            if not self._box.has_arrived(COORDINATOR, self._step, feed_topic(self._count)):
                return False
            self._count += 1
        return True
