"""Invites workers: they listen, and the coordinator dials them.

    manyhands split serve                              # on a machine in the cloud: `serving.listen`
    coordinator.invite(host, port, token)              # on the edge: from now on it is a worker like any other
    coordinator.keep_inviting(host, port, token)       # and is invited again whenever it is lost

All connections between the two, for control and data, are dialled from the coordinator's side, at the one port that the
worker listens on, with the worker's own token: the edge needs no port that the cloud could reach, and reveals no
address to it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.hosts import host_and_port
from manyhands.transport.endpoint import Address
from manyhands.transport.keys import Credentials
from manyhands.transport.security import Security

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator

INVITE_SECONDS = 30.0
PAUSES_SECONDS = (1.0, 2.0, 4.0, 5.0)
"""Pauses between attempts to invite a lost worker again; the last one repeats for as long as it takes."""
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 6.0
"""By then a worker that accepts the connection and sends nothing has been given up."""


@dataclass(frozen=True)
class Invitation:
    """The way an invited worker was reached, and by which others are to reach it."""

    host: str
    """The host as it was typed."""
    port: int
    security: Security
    """The security of data connections to it."""
    credentials: Credentials | None = None
    """The credentials with which it was dialled."""

    def is_to(self, host: str, port: int) -> bool:
        return (self.host, self.port) == (host, port)


def peer_address(
    reader: tuple[str, Invitation | None], peer: tuple[str, Invitation | None], address: tuple[str, int]
) -> Address:
    """Return the address of a peer as the reader needs it, with the side that dials.

    Workers that were not invited dial those that were, and the coordinator, which they have reached before. Otherwise
    the smaller name dials. An invited worker does not
    learn the addresses of the workers that dial it.
    """
    (name, invited), (other, invitation) = reader, peer
    if invited is None and COORDINATOR in (name, other):
        is_dialled = other == COORDINATOR or invitation is not None  # a worker that has come once can come again
    elif (invited is None) == (invitation is None):
        is_dialled = name < other
    else:
        is_dialled = invitation is not None
    if invited is not None and not is_dialled:
        return Address("", 0, is_dialled=False)
    return Address(*address, is_dialled, invitation.security if invitation is not None and is_dialled else None)


class Inviting:
    """A thread that invites a worker again whenever it is lost. It ends with `close`, or with its coordinator."""

    def __init__(self, coordinator: Coordinator, host: str, port: int, token: str) -> None:
        self.coordinator, self.host, self.port, self._token = coordinator, host, port, token
        self.failure = ""
        """The reason why the last attempt failed; empty where it did not."""
        self.attempts = 0
        """Attempts since the worker was last a member."""
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
        except Exception as error:  # of any kind: the next attempt may fail differently
            failure = error.message if isinstance(error, ManyhandsError) else repr(error)
        is_news = failure and failure != self.failure and not self._closing.is_set()
        self.failure = failure
        if is_news:
            self.coordinator.on_event(f"{host_and_port(self.host, self.port)} could not be invited: {failure:.300}")

    def close(self) -> None:
        """End the thread: it invites no more. A worker that is a member stays."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS * self.coordinator.security.timeout_factor)
