"""A descriptor handed from one process of this machine to another, over a Unix socket that is no file.

    maker: Handover(descriptor)              other process: fetch(place)
    listens at a random abstract name ◀───── connects
    same user? ────── the descriptor ──────▶ same user? takes it

An abstract name exists in one network namespace only, so a device of a lab, which has a network of its own, cannot
bypass its links; the kernel tells each side the other's user. `/proc` is not needed: a confined worker must not look
into other processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading

LONGEST_PLACE = 64
FETCH_SECONDS = 2.0
"""The time after which an unanswered fetch fails. Its caller may be the thread that moves bytes."""
_PREFIX = b"manyhands-"
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class Handover:
    """Gives one descriptor to every process of the same user that requests it, until it is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.place = _PREFIX + secrets.token_hex(16).encode()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(b"\0" + self.place)
            self._listening.listen(4)
            self._thread = threading.Thread(target=self._serve, name="handover", daemon=True)
            self._thread.start()
        except BaseException:
            self._listening.close()
            raise

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listening.accept()
            except OSError:  # closed
                return
            with peer, contextlib.suppress(OSError):
                if _user_of(peer) == os.geteuid():
                    peer.settimeout(FETCH_SECONDS)
                    socket.send_fds(peer, [b"\0"], [self._descriptor])

    def close(self) -> None:
        """Stop handing the descriptor over; it stays open."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listening.close()


def fetch(place: bytes) -> int:
    """Return the descriptor that another process of the same user hands over there; OSError where it does not."""
    if not place.startswith(_PREFIX) or len(place) > LONGEST_PLACE:
        raise OSError("no place of ours")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(FETCH_SECONDS)
        asking.connect(b"\0" + place)
        if _user_of(asking) != os.geteuid():
            raise OSError("another user's")
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if len(descriptors) != 1:
        raise OSError("nothing was handed over")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _user_of(other: socket.socket) -> int:
    content = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(content)[1])
