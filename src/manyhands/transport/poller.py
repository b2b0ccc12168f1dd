"""A poller for sockets that are ready: epoll where there is one, without what the standard selectors do around every
look."""

from __future__ import annotations

import select
import selectors
import socket
from typing import Generic, TypeVar

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
T = TypeVar("T")


class Poller(Generic[T]):
    """Sockets, each with a value of the caller's; used by one thread at a time."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._selector = None if self._epoll is not None else selectors.DefaultSelector()
        self._data: dict[int, T] = {}

    def register(self, ready: socket.socket, events: int, data: T) -> None:
        self._data[ready.fileno()] = data
        if self._epoll is not None:
            self._epoll.register(ready.fileno(), _mask(events))
        elif self._selector is not None:
            self._selector.register(ready, events, data)

    def modify(self, ready: socket.socket, events: int, data: T) -> None:
        self._data[ready.fileno()] = data
        if self._epoll is not None:
            self._epoll.modify(ready.fileno(), _mask(events))
        elif self._selector is not None:
            self._selector.modify(ready, events, data)

    def unregister(self, ready: socket.socket) -> None:
        del self._data[ready.fileno()]
        if self._epoll is not None:
            self._epoll.unregister(ready.fileno())
        elif self._selector is not None:
            self._selector.unregister(ready)

    def poll(self, limit_seconds: float) -> list[tuple[T, int]]:
        """Return the values of sockets that are ready, and for what; an error or a hang-up counts as both, so that the
        next read finds it."""
        if self._epoll is None:
            assert self._selector is not None
            return [(key.data, mask) for key, mask in self._selector.select(limit_seconds)]
        data = self._data
        ready = []
        for descriptor, events in self._epoll.poll(limit_seconds):
            if events == select.EPOLLIN:
                ready.append((data[descriptor], READ))
            else:
                mask = (WRITE if events & ~select.EPOLLIN else 0) | (READ if events & ~select.EPOLLOUT else 0)
                ready.append((data[descriptor], mask))
        return ready

    def poll_precisely(self, limit_seconds: float) -> list[tuple[T, int]]:
        """Do the same as `poll`, but with a limit that is kept to the microsecond: epoll alone counts whole
        milliseconds."""
        if self._epoll is not None and limit_seconds > 0:
            try:
                select.select([self._epoll], [], [], limit_seconds)
                limit_seconds = 0.0
            except ValueError:
                pass  # more descriptors than select() knows
        return self.poll(limit_seconds)

    def close(self) -> None:
        self._data.clear()
        if self._epoll is not None:
            self._epoll.close()
        elif self._selector is not None:
            self._selector.close()


def _mask(events: int) -> int:
    return (select.EPOLLIN if events & READ else 0) | (select.EPOLLOUT if events & WRITE else 0)
