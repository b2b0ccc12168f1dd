"""What both processes of the transport's micro-benchmark do, whatever carries the bytes."""

from __future__ import annotations

from typing import Protocol

PING_BYTES = 4096


BURST_MESSAGE_BYTES = 16 * 2**20


BURST_MESSAGES = 4


DYING_BYTES = 256 * 2**20


LIMIT_SECONDS = 30.0


GLOO_LIMIT_SECONDS = 10.0


HOST = "127.0.0.1"


class LinkEnd(Protocol):
    """One end: `a` begins, `b` answers."""

    def start(self) -> str:
        """Return where `b` listens."""

    def connect(self, address: str) -> None: ...

    def ping(self, number: int) -> None:
        """`a` sends 4 KB and has them back; `b` returns them."""

    def burst(self) -> None:
        """`a` sends some messages of 16 MB and has a word back; `b` takes them into memory it has."""

    def prepare_dying(self) -> None:
        """Take the memory first, for that alone takes longer than the message is under way."""

    def send_dying(self) -> None:
        """`b` sends one large message and is killed meanwhile."""

    def receive_dying(self) -> None:
        """`a` waits for it."""
