"""Connections that a library has opened in this process, found by their addresses and shut from outside.

A library that waits for a peer in native code cannot be interrupted. Its wait ends at once if its connections are shut:
to it, the peers have closed them. Only connections at the addresses that were given are touched: each is looked at and
shut by a descriptor of its own, which nobody can close and use again meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection, Iterator

from manyhands.facts.errors import ManyhandsError

_DESCRIPTORS = ("/proc/self/fd", "/dev/fd")
Place = tuple[str, int]
"""Host and port."""


def listening() -> set[Place]:
    """Return the addresses at which this process listens for TCP connections."""
    places = set()
    for each in _sockets():
        with contextlib.suppress(OSError):
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                places.add(_place(each.getsockname()))
    return places


def shut(here: Collection[Place], there: Collection[Place]) -> int:
    """Shut all connections that came to an address of `here`, or go to one of `there`; return how many there were."""
    count = 0
    for each in _sockets():
        with contextlib.suppress(OSError):  # it listens, or was closed just now
            if _place(each.getpeername()) in there or _place(each.getsockname()) in here:
                each.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _sockets() -> Iterator[socket.socket]:
    """Yield every TCP socket of this process, by a duplicate that is closed afterwards."""
    for number in _descriptors():
        try:
            duplicate = os.dup(number)
        except OSError:
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
                os.close(duplicate)
                continue
            each = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        with each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                yield each


def _descriptors() -> list[int]:
    for folder in _DESCRIPTORS:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(folder) if name.isdigit()]
    raise ManyhandsError("This system does not list a process's open files.")


def _place(address: tuple[str, int, int, int] | tuple[str, int]) -> Place:
    host = address[0].partition("%")[0]
    return host.removeprefix("::ffff:"), address[1]
