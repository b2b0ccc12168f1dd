"""One TCP connection to a peer: its queues, the memory shared with it, and when the last byte came from it."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.transport.frames import (
    ANSWER,
    BELL,
    OFFER,
    control,
)
from manyhands.transport.inbox import Inbox
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.outbox import Outbox, Outgoing, Precedence
from manyhands.transport.poller import READ
from manyhands.transport.security import is_loopback
from manyhands.transport.sharing import MemorySharing, SharingSetting
from manyhands.transport.wire import Wire


def is_far(wire: Wire) -> bool:
    """Return whether bytes come over a network. A connection that is lost counts as near: the next read detects the
    loss."""
    try:
        return not is_loopback(str(wire.socket.getpeername()[0]))
    except OSError:
        return False


class Connection:
    """The connection to one peer."""

    def __init__(
        self,
        peer: str,
        wire: Wire,
        mailbox: Mailbox,
        setting: SharingSetting,
        on_answer: Callable[[Connection], None],
        precedence: Precedence,
    ) -> None:
        self.peer, self.wire, self._on_answer = peer, wire, on_answer
        self.outbox, self.inbox = Outbox(wire, precedence), Inbox(peer, wire, mailbox, self._hear)
        self.sharing = MemorySharing(wire, setting)
        self._look_again = mailbox.look_again
        self._is_far = is_far(wire)
        self.outbox.smallest_shared_bytes = setting.smallest_bytes
        self.heard_at = time.monotonic()
        self.frames_at_last_heartbeat = 0
        self.events = READ
        self.is_registered = False

    @property
    def trickles(self) -> bool:
        """Whether a message is coming in parts, over a network."""
        return self.inbox.is_inside and self._is_far

    def offer_sharing(self) -> None:
        """Offer shared memory to the peer, before the first large message. May be called from any thread."""
        if not self.sharing.may_offer:
            return
        with self.outbox.writing:  # not while it is closed
            content = self.sharing.offer() if self.sharing.may_offer and not self.outbox.is_shaped else None
        if content is not None:
            self.outbox.put(Outgoing(control(OFFER, len(content)), [memoryview(content)]), urgent=True)

    @property
    def board_to(self) -> memoryview | None:
        """The board that the peer reads; None: it has shown none yet, or the connection is closing."""
        with self.outbox.writing:
            return self.sharing.filling.board if self.sharing.filling is not None else None

    @property
    def board_from(self) -> memoryview | None:
        """The board that the peer writes."""
        with self.outbox.writing:
            return self.sharing.emptying.board if self.sharing.emptying is not None else None

    def _hear(self, topic: str, content: bytes) -> None:
        """Handle a control frame of the peer's transport; called in the thread that runs the event loop."""
        if topic == BELL.topic:
            self._look_again()
        elif topic == OFFER:
            answer = self.sharing.answer(content, is_welcome=not self.outbox.is_shaped)
            self.inbox.ring = self.sharing.emptying
            views = [memoryview(answer)] if answer else []
            self.outbox.put(Outgoing(control(ANSWER, len(answer)), views), urgent=True)
            self._on_answer(self)
        elif topic == ANSWER:
            self.sharing.conclude(content)
            self.outbox.ring = self.sharing.filling

    def close(self) -> None:
        with self.outbox.writing:
            self.wire.close()
            self.outbox.ring = self.inbox.ring = None
            self.sharing.close()
