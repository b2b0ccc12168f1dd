"""Dials workers that listen, and hands their connections to the rendezvous: see `inviting`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.runtime.device_book import own_credentials
from manyhands.runtime.inviting import Invitation
from manyhands.runtime.member import Member
from manyhands.runtime.rendezvous import HELLO_SECONDS, WELCOME_SECONDS, Rendezvous
from manyhands.transport.keys import Credentials, Role
from manyhands.transport.security import Security
from manyhands.transport.transport import Transport, reach_either


class Dialler:
    """Dials workers from the coordinator's side, each with that worker's own token."""

    def __init__(
        self,
        transport: Transport,
        rendezvous: Rendezvous,
        security: Security,
        credentials: Credentials | None,
        on_event: Callable[[str], None],
    ) -> None:
        self._transport, self._rendezvous, self._security = transport, rendezvous, security
        self._credentials, self._on_event = credentials, on_event

    def dial(
        self, host: str, port: int, token: str, *, limit_seconds: float, once: bool, is_cancelled: Callable[[], bool]
    ) -> str:
        """Make the worker at this address join, and return its name: see `Coordinator.invite`."""
        reached = reach_either(
            self._transport, COORDINATOR, (host, port), token, limit_seconds,
            timeout_factor=self._security.timeout_factor, once=once, is_cancelled=is_cancelled,
            credentials=self._dialling_credentials,
        )  # fmt: skip
        joined: Future[Member] = Future()
        secret, security = self._rendezvous.terms.secret, reached.security
        data = Security(secret, encrypted=security.encrypted, timeout_factor=security.timeout_factor)
        self._rendezvous.receive(reached.channel, Invitation(host, port, data, security.credentials), joined)
        try:
            return joined.result(HELLO_SECONDS + 2 * WELCOME_SECONDS).name
        except TimeoutError as error:  # its thread waits for something other than the worker
            reached.channel.close()
            raise TimedOut(f"{host_and_port(host, port)} was let in, and did not join.") from error

    def _dialling_credentials(self) -> Credentials | None:
        """Return the credentials to dial with: a coordinator reachable only from this machine may dial another one."""
        return self._credentials or own_credentials(Role.COORDINATOR, self._on_event)
