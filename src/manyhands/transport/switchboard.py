"""Endpoints that hand frames to each other inside one process, as they would be on a wire.

board = Switchboard(["a", "b"])
board.fail_after("a", 7)          # a dies when it sends its 7th message, half of it delivered
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from manyhands.facts.errors import WorkerLost
from manyhands.transport.frames import CHUNK_BYTES, PRELUDE, Header, decode, encode, header_bytes
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.memory import Memory, as_bytes, byte_count


class Switchboard:
    """The mailboxes of all devices, and the faults to inject."""

    def __init__(self, names: Iterable[str], *, limit_seconds: float = 60.0) -> None:
        self.endpoints = {name: InProcessEndpoint(self, name, limit_seconds) for name in names}
        self.lock = threading.Lock()
        self._fail_after: dict[str, int] = {}
        self.failed: set[str] = set()

    def fail_after(self, name: str, messages: int) -> None:
        """Make `name` fail in the middle of its message number `messages`, counted from 1."""
        self._fail_after[name] = messages

    def dies_now(self, name: str, count: int) -> bool:
        return self._fail_after.get(name) == count

    def lose(self, name: str) -> None:
        """Notify all devices at once that `name` is lost, and stop `name` itself."""
        self.failed.add(name)
        error = WorkerLost(f"{name} was lost: its connection broke.")
        for other, endpoint in self.endpoints.items():
            if other == name:
                endpoint.mailbox.interrupt(error)
            else:
                endpoint.mailbox.lose(name, error)


class InProcessEndpoint:
    """One device on a switchboard."""

    def __init__(self, board: Switchboard, name: str, limit_seconds: float) -> None:
        self.board, self.name = board, name
        self.mailbox = Mailbox(name, limit_seconds=limit_seconds)
        self.sent_bytes: Counter[str] = Counter()
        self.unplanned_bytes: Counter[str] = Counter()
        self._messages = 0

    def send(
        self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False, unplanned: bool = False
    ) -> None:
        size = byte_count(parts)
        content = b"".join(as_bytes(part) for part in parts)
        with self.board.lock:
            self._messages += 1
            dies = self.board.dies_now(self.name, self._messages)
            (self.unplanned_bytes if unplanned else self.sent_bytes)[to] += size
        header = Header(self.name, self.mailbox.generation, step, topic, size, 0, 0)
        for head, payload in frames(header, content):
            part = payload[: len(payload) // 2] if dies else payload
            deliver(self.board.endpoints[to].mailbox, self.name, head, part)
            if dies:
                self.board.lose(self.name)
                return

    def board_to(self, peer: str) -> None:
        """Return None: every message passes the network that tests look at."""

    def board_from(self, peer: str) -> None:
        """Return None: see `board_to`."""

    def count_put(self, peer: str, size: int) -> None:
        raise AssertionError("there is no board")

    def wake(self, peer: str) -> None:
        raise AssertionError("there is no board")

    def release(self) -> None:
        """Do nothing: everything was copied as it was sent."""

    def flush(self, limit_seconds: float) -> None:
        """Do nothing: no message is ever under way."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def deliver(mailbox: Mailbox, peer: str, head: bytes, payload: bytes) -> None:
    """Deliver one frame as bytes, through the same reading as from a socket. A payload cut short is never complete."""
    size = header_bytes(head[: PRELUDE.size])
    header = decode(head[PRELUDE.size : PRELUDE.size + size])
    views = mailbox.accept(peer, header)
    if views is None:
        return
    place = 0
    with mailbox.writing:
        for view in views if mailbox.wants(header) else []:
            part = payload[place : place + len(view)]
            view[: len(part)] = part
            place += len(view)
    if len(payload) == header.length:
        mailbox.wrote(header)


def frames(header: Header, content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield a message as it would be on a wire: head and payload of each frame."""
    for offset in range(0, header.bytes, CHUNK_BYTES) or (0,):
        length = min(CHUNK_BYTES, header.bytes - offset)
        head = Header(header.origin, header.generation, header.step, header.topic, header.bytes, offset, length)
        yield encode(head), content[offset : offset + length]
