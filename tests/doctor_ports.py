"""Ports of this machine that are shut, each in its own way."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """One at which connecting is not answered: its queue is full, and nobody takes from it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port: int = listener.getsockname()[1]
        for _ in range(4):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(("127.0.0.1", port))
        yield port


def closed_port() -> int:
    """One that was free a moment ago: connecting is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
