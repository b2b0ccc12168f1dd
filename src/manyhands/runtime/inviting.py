"""Workers that are invited: they listen, and the coordinator dials them.

    manyhands split serve                              # on a machine in the cloud: `serving.listen`
    coordinator.invite(host, port, token)              # on the edge: from now on it is a worker like any other
    coordinator.keep_inviting(host, port, token)       # and comes back whenever its link does

Everything between the two is dialled from the coordinator's side, control and data, at the one port that the worker
listens on, by its own token: the edge needs no port that the cloud could reach, and tells it no address.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.facts.errors import ManyhandsError
from manyhands.transport.endpoint import Address
from manyhands.transport.keys import Credentials
from manyhands.transport.security import Security

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator

INVITE_SECONDS = 30.0
PAUSES_SECONDS = (1.0, 2.0, 4.0, 5.0)
"""Between two attempts to have a lost one back; the last for as long as it takes."""
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 6.0
"""A worker that accepts the connection and then sends nothing is given up by then."""


@dataclass(frozen=True)
class Invitation:
    """How an invited worker was reached, and is to be reached by others."""

    host: str
    """As it was typed."""
    port: int
    security: Security
    """Of data connections to it."""
    credentials: Credentials | None = None
    """With which it was dialled."""

    def is_to(self, host: str, port: int) -> bool:
        return (self.host, self.port) == (host, port)


def peer_address(
    reader: tuple[str, Invitation | None], peer: tuple[str, Invitation | None], address: tuple[str, int]
) -> Address:
    """Where a peer is as the reader is to meet it: an invited one is dialled by those who are not. Among others the
    smaller name dials. An invited one learns nothing of where those are who dial it."""
    (name, invited), (other, invitation) = reader, peer
    if (invited is None) == (invitation is None):
        is_dialled = name < other
    else:
        is_dialled = invitation is not None
    if invited is not None and not is_dialled:
        return Address("", 0, is_dialled=False)
    return Address(*address, is_dialled, invitation.security if invitation is not None and is_dialled else None)


class Inviting:
    """A thread that has a worker back whenever it is lost. It ends with `close`, or with its coordinator."""

    def __init__(self, coordinator: Coordinator, host: str, port: int, token: str) -> None:
        self.coordinator, self.host, self.port, self._token = coordinator, host, port, token
        self.failure = ""
        """Why the last attempt failed; empty where it did not."""
        self.attempts = 0
        """Since it was last here."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"inviting {host}:{port}", daemon=True)
        self._thread.start()

    def is_here(self) -> bool:
        return any(
            member.invitation and member.invitation.is_to(self.host, self.port) for member in self.coordinator.alive()
        )

    def _run(self) -> None:
        pause, was_here = 0.0, False
        while not self._closing.wait(pause):
            if self.is_here():
                self.attempts, pause, was_here = 0, _LOOK_SECONDS, True
            elif was_here:
                pause, was_here = PAUSES_SECONDS[0], False
            else:
                self._invite()
                pause = PAUSES_SECONDS[min(self.attempts, len(PAUSES_SECONDS)) - 1]

    def _invite(self) -> None:
        self.attempts += 1
        try:
            limit_seconds = self.coordinator.security.handshake_seconds
            self.coordinator.invite(
                self.host, self.port, self._token, limit_seconds=limit_seconds, once=True,
                is_cancelled=self._closing.is_set,
            )  # fmt: skip
            failure = ""
        except Exception as error:  # whatever it is: it may be another the next time
            failure = error.message if isinstance(error, ManyhandsError) else repr(error)
        is_news = failure and failure != self.failure and not self._closing.is_set()
        self.failure = failure
        if is_news:
            self.coordinator.on_event(f"{self.host}:{self.port} was invited in vain: {failure:.300}")

    def close(self) -> None:
        """Nobody is invited from now on; whoever is here stays."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS * self.coordinator.security.patience)
