"""The protocol of both processes of the transport's micro-benchmark, whatever carries the bytes."""

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
        """Return the address at which `b` listens."""

    def connect(self, address: str) -> None: ...

    def ping(self, number: int) -> None:
        """Send 4 KB and receive them back at `a`; return them at `b`."""

    def burst(self) -> None:
        """Send some messages of 16 MB and receive a word back at `a`; receive them into existing memory at `b`."""

    def prepare_dying(self) -> None:
        """Allocate the memory first: that alone takes longer than the transfer of the message."""

    def send_dying(self) -> None:
        """Send one large message from `b`, which is killed meanwhile."""

    def receive_dying(self) -> None:
        """Wait for the message at `a`."""
