"""The control channel: whole messages both ways over one connection, every wait with a limit.

    listener = Listener("0.0.0.0", 8765, security)
    channel = listener.accept(limit_seconds=1.0)          # the coordinator
    channel = connect("coordinator", 8765, security, 30.0)  # a worker

The content of a message is opaque: bytes go in, the same bytes come out.
"""

from __future__ import annotations

import queue
import select
import struct
import threading
import time
from collections.abc import Callable

from manyhands.facts.errors import BadValue, ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.hosts import plain_host
from manyhands.transport.dialling import dial
from manyhands.transport.listener import PeerListener
from manyhands.transport.security import Purpose, Security
from manyhands.transport.wire import Broken, Wire, wait, write_all

LARGEST_CONTROL_BYTES = 64 * 2**20
SEND_LIMIT_SECONDS = 30.0
_PIECE_BYTES = 64 * 1024
"""The most memory that is allocated for a message before more of it has come."""
_LENGTH = struct.Struct("<I")


class Channel:
    """One end of a control channel. Several threads may send at once while one receives."""

    def __init__(self, wire: Wire, *, largest_bytes: int = LARGEST_CONTROL_BYTES) -> None:
        self._wire, self._largest_bytes = wire, largest_bytes
        self._largest_received_bytes = largest_bytes
        self.local_host = plain_host(str(wire.socket.getsockname()[0]))
        self.peer_host = plain_host(str(wire.socket.getpeername()[0]))
        self.peer_key = wire.peer_key
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._buffer = bytearray(_LENGTH.size)
        """The length of a message, then what has come of it, and room for the next piece."""
        self._filled = 0
        """Bytes of the buffer that are filled: a limit may pass at any byte."""
        self._size: int | None = None
        """The size of the message; None: its length has not come yet."""
        self._lost: WorkerLost | None = None

    def send(self, data: bytes, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        """Send a message and return when it has left.

        WorkerLost where the connection broke; TimedOut ends it too, since half of the message may have left.
        """
        if len(data) > self._largest_bytes:
            raise BadValue(f"A control message of {len(data)} bytes; at most {self._largest_bytes} are sent.")
        deadline = time.monotonic() + limit_seconds
        if not self._sending.acquire(timeout=limit_seconds):
            raise TimedOut(f"{self.peer_host} took no message within {limit_seconds:g} s: another is still under way.")
        try:
            self._check()
            content = _LENGTH.pack(len(data)) + data if len(data) < 2**16 else b""
            if content:
                write_all(self._wire, content, deadline)
            else:
                write_all(self._wire, _LENGTH.pack(len(data)), deadline)
                write_all(self._wire, data, deadline)
        except Broken as error:
            raise self._lose(str(error)) from error
        except TimeoutError as error:
            self._lose(f"it took no message within {limit_seconds:g} s")
            raise TimedOut(
                f"{self.peer_host} did not take a message of {len(data)} bytes within {limit_seconds:g} s.",
                hint="It is connected but does not read: is it stopped, or the network down?",
            ) from error
        finally:
            self._sending.release()

    def limit_received(self, largest_bytes: int) -> None:
        """Break the connection where a longer message arrives from now on."""
        self._largest_received_bytes = largest_bytes

    def receive(self, limit_seconds: float) -> bytes | None:
        """Return the next message; None where the limit passed. What had come of it is kept for the next call.

        Memory grows with what arrives: a peer that announces a long message and sends nothing costs nothing.
        """
        deadline = time.monotonic() + limit_seconds
        if not self._receiving.acquire(timeout=max(0.0, limit_seconds)):
            return None
        try:
            self._check()
            if self._size is None:
                self._fill(_LENGTH.size, deadline)
                (size,) = _LENGTH.unpack(self._buffer)
                if size > self._largest_received_bytes:
                    largest = self._largest_received_bytes
                    raise Broken(f"it announces a message of {size} bytes; at most {largest} are read")
                self._size, self._filled = size, 0
                self._buffer = bytearray()
            self._fill(self._size, deadline)
            message = self._buffer
            self._size, self._filled = None, 0
            self._buffer = bytearray(_LENGTH.size)
            return bytes(message)
        except TimeoutError:
            return None
        except Broken as error:
            raise self._lose(str(error)) from error
        finally:
            self._receiving.release()

    def _fill(self, size: int, deadline: float) -> None:
        """Read until the buffer holds `size` bytes."""
        while self._filled < size:
            if self._filled == len(self._buffer):
                self._buffer += bytes(min(_PIECE_BYTES, size - self._filled))
            with memoryview(self._buffer) as whole, whole[self._filled :] as free:
                count = self._wire.read([free])
            self._filled += count
            if not count:
                wait(self._wire, select.POLLIN, deadline)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes received of a message that is not complete yet: a peer that is still sending is not silent."""
        return self._filled if self._size is None else _LENGTH.size + self._filled

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _lose(self, reason: str) -> WorkerLost:
        if self._lost is None:
            self._lost = WorkerLost(f"The connection to {self.peer_host} broke: {reason}.")
        self._wire.shut()
        return self._lost

    def close(self) -> None:
        """Close the channel from any thread; waiting threads get WorkerLost."""
        self._lose("it was closed on this side")
        with self._sending, self._receiving:
            self._wire.close()


class Listener:
    """A listener at which workers join. Peers without the token are dropped and counted."""

    def __init__(self, host: str, port: int, security: Security, *, largest_bytes: int = LARGEST_CONTROL_BYTES) -> None:
        self._largest_bytes = largest_bytes
        self._ready: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        """None: the listener was closed, and whoever waits in `accept` need not wait any longer."""
        self.peer_listener = PeerListener(host, port, security, Purpose.CONTROL, self._admit)
        """Peers with another purpose may be received at it too."""
        self.address = self.peer_listener.address

    def _admit(self, wire: Wire) -> None:
        self._ready.put(Channel(wire, largest_bytes=self._largest_bytes))

    def tell_of_failures(self, on_failure: Callable[[str, ManyhandsError], None]) -> None:
        """Call `on_failure` with the address and the reason of every handshake that fails from now on."""
        self.peer_listener.on_turned_away = on_failure

    @property
    def dropped(self) -> int:
        """The number of peers that were turned away."""
        return self.peer_listener.dropped

    @property
    def reasons(self) -> list[str]:
        """The reasons why the last of them were turned away."""
        return list(self.peer_listener.reasons)

    def accept(self, limit_seconds: float) -> Channel | None:
        """Return the channel of the next peer that passed; None where none came within the limit, or before `close`."""
        try:
            return self._ready.get(timeout=max(0.0, limit_seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        self.peer_listener.close()
        while (channel := self.accept(0.0)) is not None:
            channel.close()
        self._ready.put(None)


def connect(
    host: str,
    port: int,
    security: Security,
    limit_seconds: float,
    *,
    largest_bytes: int = LARGEST_CONTROL_BYTES,
    once: bool = False,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Channel:
    """Join a listener, which may not exist yet: tried until the limit, unless `once`. Refused where it does not admit
    this device."""
    deadline = time.monotonic() + limit_seconds
    wire = dial(host, port, security, Purpose.CONTROL, deadline, is_cancelled, once=once)
    return Channel(wire, largest_bytes=largest_bytes)
