"""One device's messages by way of boards, to and from workers of its machine: those that are small and waited for, and
the parts of sums of gradients.

Both ends know from the plan which messages of a round have a place on the board between them (`transport.board`).
Whether one is there is up to the sender: until the two have memory in common, and whenever a place may yet be read, a
message goes over the connection as all others do. So the receiver looks for both.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from manyhands.schedule.actions import Message, Receive, Reduce, Send, is_urgent
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import Hop, byte_points, rounds_of, topic
from manyhands.transport.board import LARGE_BYTES, ReadingBoard, TensorShape, WritingBoard, put_alike
from manyhands.transport.endpoint import Endpoint
from manyhands.transport.memory import as_bytes, copy_pieces

LARGEST_BYTES = LARGE_BYTES
"""The largest message of tensors that has a place on a board. Of those that travel as bytes, as parts of sums and
channels do, as many as find room have one."""
_WAITS = 100e-6, 30e-6, 4e-3
"""A thread looks at a board all the time at first, giving way to others. Then it naps between looks, which costs less
than being woken at its sockets does; there it sleeps after the last of these times."""
_BULK_WAITS = 0.0, 200e-6, 10e-3
"""The same of a thread that waits for parts of sums while another one computes on its core: it looks now and then."""


class _Planned(NamedTuple):
    """A message that has a place on a board."""

    tensors: tuple[TensorShape, ...]
    bytes: int


_Messages = dict[str, dict[str, _Planned]]
"""Peer -> message -> what it is."""


class DeviceBoards:
    """The boards of one device in one generation. A round is begun and ended by one thread; in between, another one may
    add up gradients."""

    def __init__(
        self,
        endpoint: Endpoint,
        schedule: Schedule,
        form_of: Callable[[str, Message], Sequence[TensorShape] | None],
        rows_go_apart: Callable[[Reduce], bool],
        *,
        is_used: bool,
    ) -> None:
        """`form_of`: the tensors as which a message to or from a peer travels; None: in a form of its own, so that it
        has no place. `rows_go_apart`: whether rows of a reduction do. `is_used`: whether any message has a place."""
        self.endpoint, self.mailbox, self.network = endpoint, endpoint.mailbox, schedule.network
        self._stride = schedule.plan.steps_per_round
        self._sent: _Messages = {}
        self._received: _Messages = {}
        if is_used and schedule.is_fixed:  # else messages differ from round to round, or arrivals decide what is next
            self._find(schedule, form_of, rows_go_apart)
        self._writing: dict[str, WritingBoard] = {}
        self._reading: dict[str, ReadingBoard] = {}
        self._stamp = self._turn = 0
        self._put_bytes: Counter[str] = Counter()
        self._read_bytes: Counter[str] = Counter()
        """Peer -> bytes of this round that went by its board."""
        self._lock = threading.Lock()
        self._sleepers: Counter[str] = Counter()
        """Peer -> threads that want to be woken when a message of its is on the board."""
        self._is_closed = False

    def _find(
        self,
        schedule: Schedule,
        form_of: Callable[[str, Message], Sequence[TensorShape] | None],
        rows_go_apart: Callable[[Reduce], bool],
    ) -> None:
        device = self.endpoint.name
        for action in schedule.actions[device]:
            if isinstance(action, Send):
                self._add(self._sent, action.to, action.message, form_of(action.to, action.message))
            elif isinstance(action, Receive):
                self._add(self._received, action.source, action.message, form_of(action.source, action.message))
            elif isinstance(action, Reduce) and not rows_go_apart(action):
                self._find_parts(device, action)

    def _find_parts(self, device: str, reduce: Reduce) -> None:
        """Find the messages of a sum: rows that are waited for, or parts of gradients, each of which is one row."""
        points, is_sum = byte_points(reduce, self.network), reduce.what == "gradients"
        for number, hops in enumerate(rounds_of(reduce)):
            for hop in hops:
                if device in (hop.source, hop.target):
                    ends = points[hop.first : hop.last + 1]
                    sizes = [last - first for first, last in pairwise(ends)] if not is_sum else [ends[-1] - ends[0]]
                    rows = tuple(TensorShape(torch.uint8, (size,)) for size in sizes)
                    if is_sum or sum(sizes) <= LARGEST_BYTES:
                        self._add_rows(hop, topic(reduce, number, hop.first), rows)

    def _add(self, messages: _Messages, peer: str, message: Message, form: Sequence[TensorShape] | None) -> None:
        if form is None or not is_urgent(message):
            return
        if message.bytes <= LARGEST_BYTES or [shape.dtype for shape in form] == [torch.uint8]:
            messages.setdefault(peer, {})[message.topic] = _Planned(tuple(form), message.bytes)

    def _add_rows(self, hop: Hop, name: str, rows: tuple[TensorShape, ...]) -> None:
        is_sent = hop.source == self.endpoint.name
        messages, peer = (self._sent, hop.target) if is_sent else (self._received, hop.source)
        messages.setdefault(peer, {})[name] = _Planned(rows, sum(row.bytes for row in rows))

    # Rounds

    def begin_round(self, step: int) -> None:
        """Begin a round; boards that two devices have found by now are used from here on."""
        number = step // self._stride
        self._stamp, self._turn = (self.mailbox.generation << 32) + number + 1, number % 2
        for peer, messages in self._sent.items():
            memory = self.endpoint.board_to(peer)
            if memory is None:  # none yet, or its link is being slowed now
                self._writing.pop(peer, None)
            elif peer not in self._writing:
                self._writing[peer] = WritingBoard(memory, _shapes(messages))
        for peer in self._received:
            self._begin_reading(peer)

    def end_round(self) -> None:
        """Free the places of this round: others may write there again, and bytes are counted."""
        for peer, size in self._put_bytes.items():
            self.endpoint.count_put(peer, size)
        for peer, size in self._read_bytes.items():
            self.mailbox.count_read(peer, size)
        self._put_bytes.clear()
        self._read_bytes.clear()
        for board in self._reading.values():
            board.finish(self._stamp)

    def close(self) -> None:
        """Want to be woken from now on: nobody looks at the boards any more."""
        with self._lock:
            self._is_closed = True
            for board in self._reading.values():
                board.say_awake(False)

    # Messages

    def put(self, to: str, name: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Leave a message for a peer. Return False where it must be sent; nothing was done then."""
        board = self._writing.get(to)
        if board is None or not board.put(name, self._stamp, self._turn, tensors):
            return False
        self._is_put(board, to, self._sent[to][name].bytes)
        return True

    def put_bytes(self, to: str, name: str, pieces: Sequence[memoryview]) -> bool:
        """Do the same with a message that travels as bytes, which lie in some pieces."""
        board = self._writing.get(to)
        if board is None or not board.put_bytes(name, self._stamp, self._turn, pieces):
            return False
        self._is_put(board, to, self._sent[to][name].bytes)
        return True

    def _is_put(self, board: WritingBoard, to: str, size: int) -> None:
        if board.is_reader_asleep:
            self.endpoint.wake(to)
        with self._lock:
            self._put_bytes[to] += size

    def put_row(self, targets: Sequence[tuple[str, str]], row: torch.Tensor) -> Sequence[tuple[str, str]]:
        """Leave the same dense row for several peers; `targets`: each with its message's name. Return those to which it
        must be sent."""
        free, others = [], []
        for target in targets:
            to, name = target
            board = self._writing.get(to)
            if board is None or not board.is_free(name, self._turn):
                others.append(target)
            else:
                free.append((to, board, name))
        if free:
            memory = as_bytes(row)
            put_alike([(board, name) for _, board, name in free], self._stamp, self._turn, memory)
            for to, board, _ in free:
                self._is_put(board, to, len(memory))
        return others

    def has_place(self, source: str, name: str) -> bool:
        """Return whether a message from a peer may come by the board."""
        return name in self._received.get(source, ())

    def take(self, source: str, step: int, name: str, *, outlives_round: bool = False) -> tuple[torch.Tensor, ...]:
        """Wait for a message that may come by the board, and return its tensors: they stay until the round ends, or as
        long as they are used."""
        came = self._sent_here(source, step, name, is_bulk=False)
        if came is not None:
            return _tensors_in(came, self._received[source][name].tensors)
        tensors = self._reading[source].read(name, self._turn)
        return tuple(tensor.clone() for tensor in tensors) if outlives_round else tensors

    def take_bytes(self, source: str, step: int, name: str) -> memoryview:
        """Do the same for a part of a sum, and return its bytes."""
        came = self._sent_here(source, step, name, is_bulk=True)
        return self._reading[source].read_bytes(name, self._turn) if came is None else came

    def store(self, source: str, step: int, name: str, pieces: Sequence[memoryview], *, is_bulk: bool = False) -> None:
        """Wait for bytes that may come by the board, and write them to some pieces: where they come over the
        connection, the mailbox writes them there as they arrive. `is_bulk`: no computing waits for them."""
        if (board := self._reading.get(source)) is not None:
            self._watch(board, name, is_bulk=is_bulk)
        self._count_sleeper(source, 1)
        try:
            came = self.mailbox.receive(source, step, name, pieces, lambda: self._is_on_board(source, name))
        finally:
            self._count_sleeper(source, -1)
        if not came:
            copy_pieces([self._reading[source].read_bytes(name, self._turn)], pieces)
            self._is_read(source, name)

    def _sent_here(self, source: str, step: int, name: str, *, is_bulk: bool) -> memoryview | None:
        """Wait for a message, and return its bytes where it came over the connection; None: it is on the board."""
        board = self._reading.get(source)
        if board is None or not self._watch(board, name, is_bulk=is_bulk):
            came = self._wait(source, step, name)
            if came is not None:
                return came
        self._is_read(source, name)
        return None

    def _is_read(self, source: str, name: str) -> None:
        with self._lock:
            self._read_bytes[source] += self._received[source][name].bytes

    def _watch(self, board: ReadingBoard, name: str, *, is_bulk: bool) -> bool:
        """Look for a message for a moment; return whether it has come."""
        if name not in board.places:
            return False
        stamp, turn = self._stamp, self._turn
        if board.has(name, stamp, turn):
            return True
        watch, nap, doze = _BULK_WAITS if is_bulk else _WAITS
        start = now = time.monotonic()
        while now < start + doze:
            if now < start + watch:
                os.sched_yield()
            else:
                time.sleep(nap)
            if board.has(name, stamp, turn):
                return True
            now = time.monotonic()
        return False

    def _wait(self, source: str, step: int, name: str) -> memoryview | None:
        """Wait as the mailbox does; None: the message is on the board."""
        self._count_sleeper(source, 1)
        try:
            return self.mailbox.take_unless(source, step, name, lambda: self._is_on_board(source, name))
        finally:
            self._count_sleeper(source, -1)

    def _count_sleeper(self, source: str, change: int) -> None:
        """Say on the board whether any thread wants to be woken."""
        with self._lock:
            self._sleepers[source] += change
            if (board := self._reading.get(source)) is not None:
                board.say_awake(not self._sleepers[source] and not self._is_closed)

    def _is_on_board(self, source: str, name: str) -> bool:
        board = self._begin_reading(source)
        return board is not None and name in board.places and board.has(name, self._stamp, self._turn)

    def _begin_reading(self, source: str) -> ReadingBoard | None:
        """Return the board that a peer writes; None: there is none, or not yet."""
        board = self._reading.get(source)
        if board is None and (memory := self.endpoint.board_from(source)) is not None:
            board = self._reading[source] = ReadingBoard(memory, _shapes(self._received[source]))
        return board


def _shapes(messages: dict[str, _Planned]) -> dict[str, tuple[TensorShape, ...]]:
    return {name: planned.tensors for name, planned in messages.items()}


def _tensors_in(memory: memoryview, shapes: Sequence[TensorShape]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a message that lie in memory one after another."""
    tensors, begin = [], 0
    for part in shapes:
        piece = memory[begin : begin + part.bytes]
        if begin % part.dtype.itemsize:
            piece = memoryview(bytearray(piece))
        flat = torch.frombuffer(piece, dtype=part.dtype) if part.bytes else torch.empty(0, dtype=part.dtype)
        tensors.append(flat.view(part.shape))
        begin += part.bytes
    return tuple(tensors)
