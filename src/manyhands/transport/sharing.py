"""The agreement of two ends of a connection on shared memory: by showing that they have it, not by guessing.

    sender, before its first large message        receiver
    offer: where the memory is handed over, its
    key, and the connection as the sender sees it
                                                  gets it, with that key in it, from a process of its own network
                                                  namespace and user, and sees the same connection from its end
                                                  answer: the nonce, which is in the memory and nowhere else
    fills it from the next frame on

There is one ring for each direction, made when it is first of use. Meanwhile, and wherever one of these conditions does
not hold, bytes go over the connection. A relay in between has two connections, and the two ends see different ones: it
is not bypassed. Offer and answer are frames of the connection, so they are encrypted where it is.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

import msgspec

from manyhands.facts.errors import BadValue
from manyhands.facts.hosts import plain_host
from manyhands.facts.units import parse_bytes
from manyhands.transport.frames import SHARED_CHUNK_BYTES, BadFrame
from manyhands.transport.security import is_loopback
from manyhands.transport.shared_memory import EmptyingRing, FillingRing, Unshared, find
from manyhands.transport.wire import Wire

SHARING_VARIABLE = "MANYHANDS_SHARED_MEMORY"
"""The environment variable with a ring's size; 0 for none at all."""
RING_BYTES = 4 * 2**20
SMALLEST_SHARED_BYTES = 128 * 1024
LARGEST_RING_BYTES = 2**30
MOST_ROOM_BYTES = 2**28
"""The largest ring that is made because messages are large."""
_SMALLEST_RING_BYTES = SHARED_CHUNK_BYTES


@dataclass(frozen=True)
class SharingSetting:
    """Whether and for which payloads an endpoint uses shared memory."""

    ring_bytes: int = RING_BYTES
    """The size of each ring, one per direction of each pair; its pages are taken from the system as it fills for the
    first time. 0: no ring, TCP for everything."""
    smallest_bytes: int = SMALLEST_SHARED_BYTES
    """Payloads below this go over the connection: see docs/explanation/engine.md."""

    def __post_init__(self) -> None:
        if self.ring_bytes and not _SMALLEST_RING_BYTES <= self.ring_bytes <= LARGEST_RING_BYTES:
            raise BadValue(
                f"Memory in common of {self.ring_bytes} bytes; it must have {_SMALLEST_RING_BYTES} to"
                f" {LARGEST_RING_BYTES}, or 0 for none.",
                hint=f"Set {SHARING_VARIABLE}, or leave it out.",
            )

    @classmethod
    def of_environment(cls) -> SharingSetting:
        text = os.environ.get(SHARING_VARIABLE, "")
        return cls(parse_bytes(text, SHARING_VARIABLE)) if text else cls()


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The ring that one side made, and how it sees the connection."""

    place: bytes
    size: int
    key: bytes
    near: tuple[str, int]
    far: tuple[str, int]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Offer)


class MemorySharing:
    """The shared memory of one connection, both ways."""

    def __init__(self, wire: Wire, setting: SharingSetting) -> None:
        self._wire, self._setting = wire, setting
        self.ring_bytes = setting.ring_bytes
        """The size of the ring that this end will make."""
        self._offered: FillingRing | None = None
        self.filling: FillingRing | None = None
        """The ring this end fills, once the other side has shown that it has it."""
        self.emptying: EmptyingRing | None = None
        self.may_offer = setting.ring_bytes > 0
        self.refusal = ""
        """The reason why there is no ring to fill."""

    def make_room(self, size: int) -> None:
        """Make the ring large enough for so many bytes at once, if it is not made yet and there is to be one."""
        if self.ring_bytes:
            self.ring_bytes = max(self.ring_bytes, min(size, MOST_ROOM_BYTES))

    def offer(self) -> bytes | None:
        """Make a ring, once, and return the offer; None where the other side is on another host, or this system has no
        shared memory."""
        self.may_offer = False
        try:
            near, far = ends(self._wire)
            if near[0] != far[0] and not (is_loopback(near[0]) and is_loopback(far[0])):
                raise Unshared("another host")
            self._offered = ring = FillingRing(self.ring_bytes)
        except (OSError, ValueError, Unshared) as error:
            self.refusal = str(error)
            return None
        return _encoder.encode(Offer(ring.place, ring.size, ring.key, near, far))

    def answer(self, content: bytes, *, is_welcome: bool) -> bytes:
        """Return the answer to the other side's offer: the proof that this end has its ring; empty where it has not."""
        if self.emptying is not None:
            raise BadFrame("memory was offered twice")
        try:
            offer = _decoder.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"an offer of memory that is none: {error}") from error
        try:
            if not is_welcome or not self._setting.ring_bytes or not 0 < offer.size <= LARGEST_RING_BYTES:
                return b""
            if ends(self._wire) != (offer.far, offer.near):
                return b""
            self.emptying = find(offer.place, offer.size, offer.key)
        except (OSError, ValueError, Unshared):
            return b""
        return self.emptying.nonce

    def conclude(self, answer: bytes) -> None:
        """Take the other side's answer to this end's offer."""
        ring, self._offered = self._offered, None
        if ring is None:
            raise BadFrame("an answer to an offer of memory that was not made")
        if secrets.compare_digest(answer, ring.nonce):
            ring.hand_over()
            self.filling = ring
        else:
            self.refusal = "the other side does not have it"
            ring.close()

    def close(self) -> None:
        """Release all memory; no thread may fill or empty it meanwhile."""
        self.may_offer = False
        for ring in (self._offered, self.filling, self.emptying):
            if ring is not None:
                ring.close()
        self._offered = self.filling = self.emptying = None


def ends(wire: Wire) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return a connection's own address and the other end's."""
    near, far = wire.socket.getsockname(), wire.socket.getpeername()
    return (plain_host(near[0]), int(near[1])), (plain_host(far[0]), int(far[1]))
