"""Memory that two processes of one machine have in common: a ring that one of them fills and the other empties.

    ┌───────────────────────────┬─────────────────────────────────────────────────────┬───────────────────┐
    │ head: key, nonce, taken   │ ring: payloads, one behind the other, round again   │ board (board.py)  │
    └───────────────────────────┴─────────────────────────────────────────────────────┴───────────────────┘

Frames travel over the connection as usual; where the payload of one lies in the ring, its header says so and nothing
follows it. `taken` is all that the emptying side writes: how many bytes it has read. A payload that does not fit goes
over the connection, so no thread ever waits for the ring. Where everything was taken, filling begins at the start
again: so only as much of it is ever used as was under way at once, and that stays in the processor's cache.

The memory has no name: it is a file of the kernel's that its maker hands over (`handover`), and it disappears with its
last user, however that one ends. Its size is sealed: neither side can take pages away from the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Sequence

from manyhands.transport.board import BOARD_BYTES
from manyhands.transport.handover import Handover, fetch
from manyhands.transport.memory import copy_pieces

KEY_BYTES = 32
NONCE_BYTES = 32
HEAD_BYTES = 4096
_TITLE = "manyhands"
_TAKEN = slice(128, 136)
_IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Unshared(Exception):
    """Raised where there is no shared memory; gives the reason in a few words. Bytes go over the connection then."""


class Ring:
    """One side's view of the ring, used by one thread at a time."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(descriptor, HEAD_BYTES + size + BOARD_BYTES)
        self._view = memoryview(self._memory)
        self._taken = self._view[_TAKEN].cast("Q")
        self._passed = 0
        """Payload bytes put or taken since the beginning."""

    @property
    def board(self) -> memoryview:
        """The memory behind the ring. What is made of it keeps it mapped."""
        return memoryview(self._memory)[HEAD_BYTES + self.size :]

    @property
    def key(self) -> bytes:
        return bytes(self._view[:KEY_BYTES])

    @property
    def nonce(self) -> bytes:
        return bytes(self._view[KEY_BYTES : KEY_BYTES + NONCE_BYTES])

    def _parts(self, place: int, length: int) -> list[memoryview]:
        """Return `length` bytes from `place` on: in one piece, or in two where the ring ends between them."""
        assert 0 <= place < self.size, "checked where headers are read"
        assert 0 <= length <= self.size, "checked where headers are read"
        begin = HEAD_BYTES + place
        end = min(begin + length, HEAD_BYTES + self.size)
        over = length - (end - begin)
        return [self._view[begin:end], self._view[HEAD_BYTES : HEAD_BYTES + over]] if over else [self._view[begin:end]]

    def close(self) -> None:
        self._taken.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a board is in use: its last user unmaps the memory
            self._memory.close()


class FillingRing(Ring):
    """The ring at the sender's side, which makes it."""

    def __init__(self, size: int) -> None:
        self._seen_taken = self._next = 0
        self.descriptor = _make(HEAD_BYTES + size + BOARD_BYTES)
        try:
            super().__init__(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._view[: KEY_BYTES + NONCE_BYTES] = secrets.token_bytes(KEY_BYTES + NONCE_BYTES)
        try:
            self._handover: Handover | None = Handover(self.descriptor)
        except BaseException:
            self._handover = None
            self.close()
            raise
        self.place = self._handover.place
        """The place at which the other side fetches the memory."""

    def put(self, views: Sequence[memoryview], length: int) -> int:
        """Copy a payload into the ring; return where it begins, or -1 where there is no room and nothing was done."""
        taken_bytes = self._taken[0]
        if self._seen_taken < taken_bytes <= self._passed:  # any other value is not credible
            self._seen_taken = taken_bytes
        under_way = self._passed - self._seen_taken
        if under_way + length > self.size:
            return -1
        place = self._next if under_way else 0
        copy_pieces(views, self._parts(place, length))
        self._passed += length
        self._next = (place + length) % self.size
        return place

    def hand_over(self) -> None:
        """Note that the other side has the memory: it need not be offered any more."""
        if self._handover is not None:
            self._handover.close()
            self._handover = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self.hand_over()
        super().close()


class EmptyingRing(Ring):
    """The ring at the receiver's side, which fetches it."""

    def read(self, place: int, length: int, into: Sequence[memoryview]) -> None:
        copy_pieces(self._parts(place, length), into)

    def free(self, length: int) -> None:
        """Free the room of the next payload, which was read or is not wanted.

        To be called after a lock was released and another one acquired since `read`: some processors would let the
        other side see this before the bytes are read.
        """
        self._passed += length
        self._taken[0] = self._passed


def _make(size: int) -> int:
    """Return memory without a name, whose size cannot change; OSError where this system has none."""
    if sys.platform != "linux" or not _IS_AVAILABLE:
        raise OSError("not on this system")
    descriptor = os.memfd_create(_TITLE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def find(place: bytes, size: int, key: bytes) -> EmptyingRing:
    """Return the ring that another process made, once it is verified; Unshared where this process cannot have it, or
    should not."""
    if not _IS_AVAILABLE:
        raise Unshared("not on this system")
    opened = -1
    try:
        opened = fetch(place)
        facts = os.fstat(opened)
        if not stat.S_ISREG(facts.st_mode):
            raise Unshared("no memory of ours")
        if facts.st_uid != os.geteuid():
            raise Unshared("another user's")
        if (
            facts.st_size != HEAD_BYTES + size + BOARD_BYTES
            or fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals() != _seals()
        ):
            raise Unshared("not of the size it should have")
        if not secrets.compare_digest(os.pread(opened, KEY_BYTES, 0), key):
            raise Unshared("somebody else's")
        return EmptyingRing(opened, size)
    except (OSError, ValueError, OverflowError) as error:
        raise Unshared(str(error)) from error
    finally:
        if opened >= 0:
            os.close(opened)
