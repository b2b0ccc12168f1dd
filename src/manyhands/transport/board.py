"""Boards: memory in which a device leaves what another one of its machine will read, in places that both know.

    head: done, read │ awake      place of the first message, for even and for odd rounds      place of the second, …
                                  stamp │ its tensors                stamp │ its tensors

The writer copies tensors to their place and then writes the round's stamp; the reader waits for that stamp and reads
them where they lie. No header, no system call, nothing allocated: for messages that travel in every round. The reader
writes `done`, the stamp of the last round that it has ended: a place is written again when the round that it was
written in, two before, is done there. Large messages have one place for all rounds: what is written there stays in the
processor's cache, and the round before is mostly done when they are due. The reader writes `read` when it begins to
read, which one that computes on a GPU never does: nothing is left for it. It writes `awake`: 0 where it wants to be
woken.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from manyhands.transport.memory import copy_pieces

HEAD_BYTES = 4096
BOARD_BYTES = 64 * 2**20
"""The size of a board; its pages are taken from the system as they are first written."""
LARGE_BYTES = 256 * 1024
"""The size beyond which a message has one place for all rounds."""
_DONE, _READ, _AWAKE = 0, 1, 8
"""The words of the head; the last one, which changes at other times, in a cache line of its own."""
_LINE_BYTES = 64


class TensorShape(NamedTuple):
    """The type and shape of one tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Place(NamedTuple):
    """The place of one message in one kind of round: the word with its stamp, and its tensors."""

    word: int
    tensors: tuple[torch.Tensor, ...]
    """Its tensors; none where it is large."""
    first: memoryview
    """The bytes of the first tensor."""


class Board:
    """One side's view of a board on which some messages have a place. See `WritingBoard`, `ReadingBoard`."""

    def __init__(self, memory: memoryview, messages: Mapping[str, Sequence[TensorShape]]) -> None:
        """`messages`: the same on both sides; of the largest, those that find no room have no place. A message of more
        than `LARGE_BYTES` has one tensor."""
        self._words = memory.cast("Q")
        self._lock = threading.Lock()
        self.places: dict[str, tuple[Place, Place]] = {}
        """Message -> its places in even and odd rounds."""
        begin = HEAD_BYTES
        for total, name in sorted((sum(part.bytes for part in parts), name) for name, parts in messages.items()):
            size = _LINE_BYTES + sum(_lined(part.bytes) for part in messages[name])
            count = 1 if total > LARGE_BYTES else 2
            if begin + count * size > len(memory):
                continue
            starts = range(begin, begin + count * size, size)
            places = [self._place(memory, start, messages[name], is_large=count == 1) for start in starts]
            self.places[name] = places[0], places[-1]
            begin += count * size

    def _place(self, memory: memoryview, start: int, parts: Sequence[TensorShape], *, is_large: bool) -> Place:
        begin, tensors, pieces = start + _LINE_BYTES, [], []
        if is_large:
            return Place(start // 8, (), memory[begin : begin + parts[0].bytes])
        for part in parts:
            piece = memory[begin : begin + part.bytes]
            pieces.append(piece)
            flat = torch.frombuffer(piece, dtype=part.dtype) if part.bytes else torch.empty(0, dtype=part.dtype)
            tensors.append(flat.view(part.shape))
            begin += _lined(part.bytes)
        return Place(start // 8, tuple(tensors), pieces[0] if pieces else memory[begin:begin])

    def _fence(self) -> None:
        """Complete all reads and writes of memory before those that follow: some processors would reorder them.

        To release a lock and then acquire it again does that on every one of them.
        """
        with self._lock:
            pass
        with self._lock:
            pass


class WritingBoard(Board):
    """The board at the side that writes messages."""

    def __init__(self, memory: memoryview, messages: Mapping[str, Sequence[TensorShape]]) -> None:
        super().__init__(memory, messages)
        for places in self.places.values():
            for place in places:
                self._words[place.word] = 0
        self._written = {name: [0, 0] for name in self.places}
        """Message -> the stamps with which its places were written."""
        self._is_read = False

    def is_free(self, name: str, turn: int) -> bool:
        """Return whether a message has a place that is read, and nothing there may yet be read."""
        written = self._written.get(name)
        if written is None or self._words[_DONE] < written[turn]:
            return False
        self._is_read = self._is_read or self._words[_READ] != 0
        return self._is_read

    def put(self, name: str, stamp: int, turn: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy a message to its place; `turn`: 0 in even rounds, 1 in odd ones. Return False where it has none, or what
        is there may yet be read, or nobody reads the board; nothing was done then."""
        if not self.is_free(name, turn):
            return False
        place = self.places[name][turn]
        for target, tensor in zip(place.tensors, tensors, strict=True):
            target.copy_(tensor)
        self._fence()
        self._stamp(name, stamp, turn)
        self._fence()  # before a look at whether the reader sleeps: it looks here after it has said so
        return True

    def put_bytes(self, name: str, stamp: int, turn: int, pieces: Sequence[memoryview]) -> bool:
        """Do the same with a message of one tensor, whose bytes lie in some pieces; other threads run meanwhile."""
        if not self.is_free(name, turn):
            return False
        copy_pieces(pieces, [self.places[name][turn].first])
        self._fence()
        self._stamp(name, stamp, turn)
        self._fence()
        return True

    def _stamp(self, name: str, stamp: int, turn: int) -> None:
        even, odd = self.places[name]
        written = self._written[name]
        written[turn] = stamp
        if even is odd:
            written[1 - turn] = stamp
        self._words[self.places[name][turn].word] = stamp

    @property
    def is_reader_asleep(self) -> bool:
        return self._words[_AWAKE] == 0


def put_alike(targets: Sequence[tuple[WritingBoard, str]], stamp: int, turn: int, row: memoryview) -> None:
    """Copy the same bytes, a message of one tensor, to a free place on each of some boards: as `put` on each, but
    memory is waited for once."""
    if not targets:
        return
    for board, name in targets:
        board.places[name][turn].first[:] = row
    fence = targets[0][0]._fence
    fence()
    for board, name in targets:
        board._stamp(name, stamp, turn)
    fence()


class ReadingBoard(Board):
    """The board at the side that reads messages, and says so."""

    def __init__(self, memory: memoryview, messages: Mapping[str, Sequence[TensorShape]]) -> None:
        super().__init__(memory, messages)
        self._words[_READ] = 1

    def has(self, name: str, stamp: int, turn: int) -> bool:
        """Return whether a message that has a place has come."""
        return self._words[self.places[name][turn].word] == stamp

    def read(self, name: str, turn: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a message that has come, where they lie: they stay until `finish` of this round."""
        self._fence()
        return self.places[name][turn].tensors

    def read_bytes(self, name: str, turn: int) -> memoryview:
        """Do the same for a message of one tensor, and return its bytes."""
        self._fence()
        return self.places[name][turn].first

    def finish(self, stamp: int) -> None:
        """Note that this round has ended: nothing of it will be read any more."""
        self._fence()
        self._words[_DONE] = stamp

    def say_awake(self, is_awake: bool) -> None:
        """Say whether this side looks by itself. After `say_awake(False)`, look once more before sleeping."""
        self._words[_AWAKE] = is_awake
        self._fence()


def _lined(size: int) -> int:
    """Return a size rounded up to whole cache lines."""
    return -(-size // _LINE_BYTES) * _LINE_BYTES
