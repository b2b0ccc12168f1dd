"""Control channels inside one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from manyhands.facts.errors import BadValue, ManyhandsError, WorkerLost
from manyhands.transport.channel import LARGEST_CONTROL_BYTES, SEND_LIMIT_SECONDS
from manyhands.transport.security import Security

if TYPE_CHECKING:
    from manyhands.transport.inprocess import InProcessTransport


class InProcessChannel:
    """One end of a control channel. See `channel.Channel`."""

    other: InProcessChannel

    def __init__(self, transport: InProcessTransport, name: str, host: str) -> None:
        self.transport, self.name = transport, name
        self.local_host = self.peer_host = host
        self.peer_key = b""
        self._messages: deque[bytes] = deque()
        self._largest_received_bytes = LARGEST_CONTROL_BYTES
        self._ended = ""
        """The reason why nothing more will come than what has come already."""
        self._lost: WorkerLost | None = None

    def send(self, data: bytes, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        if len(data) > LARGEST_CONTROL_BYTES:
            raise BadValue(f"A control message of {len(data)} bytes; at most {LARGEST_CONTROL_BYTES} are sent.")
        with self.transport.change:
            if self._lost is not None or self._ended:
                raise self._lost or self._broken(self._ended)
            self.transport.pass_on(self.name, self.other.name, partial(self.other._messages.append, bytes(data)))

    def limit_received(self, largest_bytes: int) -> None:
        self._largest_received_bytes = largest_bytes

    def receive(self, limit_seconds: float) -> bytes | None:
        deadline = time.monotonic() + limit_seconds
        with self.transport.change:
            while self._lost is None:
                size, largest = len(self._messages[0]) if self._messages else 0, self._largest_received_bytes
                if size > largest:
                    self.break_off(f"it announces a message of {size} bytes; at most {largest} are read")
                    break
                if self._messages:
                    return self._messages.popleft()
                if self._ended:
                    self.break_off(self._ended)
                    break
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    return None
                self.transport.change.wait(seconds_left)
            assert self._lost is not None
            raise self._lost

    @property
    def unfinished_bytes(self) -> int:
        """Always 0: messages come as a whole."""
        return 0

    def _broken(self, reason: str) -> WorkerLost:
        return WorkerLost(f"The connection to {self.peer_host} broke: {reason}.")

    def break_off(self, reason: str) -> None:
        """Break the channel at this end."""
        with self.transport.change:
            self._lost = self._lost or self._broken(reason)
            self.transport.channels.discard(self)
            self.transport.change.notify_all()

    def end(self, reason: str) -> None:
        """Note that the other end is closed; what came before can still be read."""
        self._ended = self._ended or reason

    def close(self) -> None:
        with self.transport.change:
            if self._lost is None:
                self.break_off("it was closed on this side")
                ending = partial(self.other.end, "it was closed on the other side")
                self.transport.pass_on(self.name, self.other.name, ending)


class InProcessListener:
    """A listener at which workers join. See `channel.Listener`."""

    def __init__(self, transport: InProcessTransport, name: str, address: tuple[str, int], security: Security) -> None:
        self.transport, self.name, self.address, self.security = transport, name, address, security
        self.ready: deque[InProcessChannel | None] = deque()
        """None: the listener was closed, and whoever waits in `accept` need not wait any longer."""
        self.dropped = 0
        """Always 0: a peer that does not fit is refused before it connects."""
        self.reasons: list[str] = []

    def tell_of_failures(self, on_failure: Callable[[str, ManyhandsError], None]) -> None:
        """Do nothing: no handshake fails here."""

    def accept(self, limit_seconds: float) -> InProcessChannel | None:
        with self.transport.change:
            self.transport.change.wait_for(lambda: self.ready, max(0.0, limit_seconds))
            return self.ready.popleft() if self.ready else None

    def close(self) -> None:
        with self.transport.change:
            self.transport.listeners.pop(self.address[1], None)
            while self.ready:
                channel = self.ready.popleft()
                if channel is not None:
                    channel.close()
            self.ready.append(None)
            self.transport.change.notify_all()
