"""The process of a worker: joins, works, hands over when it is asked to leave, and waits for a lost coordinator."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from manyhands.facts.errors import ManyhandsError, Refused, TimedOut, WorkerLost
from manyhands.facts.hosts import host_and_port
from manyhands.runtime.handshake import CalledOtherwise, Quarantined
from manyhands.runtime.health import JOINED, LEAVING, WAITING, Readiness
from manyhands.runtime.identity import interface_of
from manyhands.runtime.joining import Joining
from manyhands.runtime.seeking import GRACE_SECONDS, Found, seek
from manyhands.runtime.serving import ask_to_leave, asked_to_leave_by_signal
from manyhands.runtime.worker import Worker
from manyhands.transport.transport import TcpTransport, Transport

AGAIN_SECONDS = 10.0
"""Seconds after which a worker that stays and was refused tries again."""
_OTHER_SECONDS = 2.0
"""Seconds for which a worker that was refused looks for another coordinator."""
_MOST_RENAMES = 8
_PAUSE_SECONDS = 1.0
"""Seconds before a coordinator that was lost is looked for again."""


def serve(
    joining: Joining,
    report: Callable[[str], None] | None = None,
    *,
    stay: bool = False,
    rejoin: bool = True,
    transport: Transport | None = None,
    readiness: Readiness | None = None,
) -> None:
    """Work for a coordinator until it ends. A coordinator that is lost is waited for, and joined again when it is back.

    Without a host in `joining` the coordinator is looked for (`seeking`). `stay`: whatever happens, wait for the next
    one, until this process is told to end. `rejoin`: False to end when a coordinator is lost. Ctrl-C and SIGTERM ask
    the worker to leave: others get the state that it holds first, for which it has the grace period of `joining`. A
    second one ends it at once. `readiness` follows what it does.
    """
    service = _Service(joining, report or (lambda text: None), stay, rejoin, transport, readiness or Readiness())
    with asked_to_leave_by_signal(service.leave):
        while not service.is_over():
            pass


class _Service:
    """The course of a worker's process: it joins, works, and handles being lost, renamed or refused."""

    def __init__(
        self,
        joining: Joining,
        report: Callable[[str], None],
        stay: bool,
        rejoin: bool,
        transport: Transport | None,
        readiness: Readiness,
    ) -> None:
        self.joining, self._report = joining, report
        self._readiness = readiness
        self._stay, self._rejoin = stay, rejoin
        self._transport = transport
        self._name = joining.name or socket.gethostname()
        self._where = host_and_port(joining.host, joining.port)
        self._current: Worker | None = None
        self._found: Found | None = None
        """The coordinator that it has joined, if it was looked for."""
        self._is_asked = False
        """Whether it was asked to leave."""
        self._loss: WorkerLost | None = None
        """The loss of the coordinator that it waits for."""
        self._refused: dict[str, Refused] = {}
        """Coordinators that were found and refused it -> why."""
        self._renames = 0
        self._last_reported = ""

    def leave(self) -> bool:
        """Ask to leave, and return whether something is to be handed over first. Called by a signal."""
        if self._current is None:
            return False
        self._is_asked = True
        self._readiness.state = LEAVING
        asking = (self._current, self._name, self._report)
        threading.Thread(target=ask_to_leave, args=asking, name="leaving", daemon=True).start()
        if self.joining.grace_seconds:
            threading.Thread(target=self._end_after_grace, name="grace", daemon=True).start()
        return True

    def _end_after_grace(self) -> None:
        """End the process once the time to hand over is up; a process that has left by then has ended this thread."""
        time.sleep(self.joining.grace_seconds)
        try:
            self._report(f"{self._name} has not handed over within {self.joining.grace_seconds:g} s, and ends.")
        finally:  # also where nobody reads the report any more
            os._exit(128 + signal.SIGTERM)

    def is_over(self) -> bool:
        """Try once to join and, where this succeeds, work until that coordinator ends; return whether that was all."""
        if self._is_asked:  # asked before it had joined
            return True
        self._readiness.state = WAITING
        try:
            self._current = worker = self._worker()
        except (TimedOut, Refused) as error:
            if not self._stay:
                raise (self._loss if isinstance(error, TimedOut) else None) or error from None
            return self._go_on_after(error)
        worker.on_joined = self._joined
        try:
            worker.run()
        except CalledOtherwise as error:
            self._current = None
            return self._take(error)
        except Quarantined as error:
            self._current = None
            return self._wait_out(error)
        except Refused as error:
            self._current = None
            return self._turned_away(error)
        except WorkerLost as error:
            if self._is_asked or not self._rejoin or self._is_orphaned:
                raise
            self._current = None  # until it has joined again there is nothing to hand over
            self._report(f"{error.message} Waiting {self.joining.limit_seconds:g} s for it to come back.")
            self._loss = error
            time.sleep(_PAUSE_SECONDS)
            return False
        self._current = None
        if self._is_asked:
            self._report(f"{self._name} has left.")
            return True
        self._report(f"The coordinator at {self._where} has ended the run; {self._name} has left.")
        self._loss = None
        if self._stay:
            self._report("Waiting for the next one. Ctrl-C ends this worker.")
        return not self._stay

    @property
    def _is_orphaned(self) -> bool:
        """Whether the parent process with which this one ends is gone."""
        return bool(self.joining.parent) and os.getppid() != self.joining.parent

    def _worker(self) -> Worker:
        """Return a worker that has reached a coordinator."""
        if self._found is not None and self._renames:  # its address is known
            joining, self._found = self._found.joining, None
            return Worker(dataclasses.replace(self.joining, host=joining.host, port=joining.port), self._transport)
        if self.joining.host:
            return Worker(self.joining, self._transport)
        grace_seconds = GRACE_SECONDS if self._loss is None and not self._stay else self.joining.limit_seconds
        if self._refused:
            grace_seconds = _OTHER_SECONDS
        elif self._loss is None and not self._last_reported:
            self._report("Looking for a coordinator on this network.")
        try:
            coordinator = seek(
                self.joining, self._transport or TcpTransport(), avoid=self._refused, grace_seconds=grace_seconds
            )
        except (TimedOut, Refused) as error:
            refusals = list(self._refused.values())
            self._refused = {}
            raise (refusals[-1] if refusals else error) from None
        self._found, self._where = coordinator, host_and_port(coordinator.joining.host, coordinator.joining.port)
        return Worker(coordinator.joining, self._transport, coordinator.reached)

    def _joined(self) -> None:
        worker = self._current
        assert worker is not None, "it is what has joined"
        if not self._is_asked:
            self._readiness.state = JOINED
        local, again = worker.channel.local_host, " again" if self._loss is not None else ""
        through = interface_of(local)
        how = f"through {through} ({local})" if through else f"from {local}"
        self._report(f"Joined {self._where}{again} as {self._name} {how}. Ctrl-C leaves.")
        if worker.is_new_to_each_other:
            self._report("The devices know each other's keys now: next time no token is needed.")
        self._refused, self._renames, self._last_reported = {}, 0, ""

    def _take(self, error: CalledOtherwise) -> bool:
        """Take the name that the coordinator gave this worker, as another has its own; ask again under it."""
        self._renames += 1
        if self._renames > _MOST_RENAMES:
            raise error
        self._report(f"{error.message} This one is called {error.name} there. {error.hint}")
        self._name = error.name
        self.joining = dataclasses.replace(self.joining, name=error.name, is_named=False)
        return False

    def _wait_out(self, error: Quarantined) -> bool:
        """Wait until a worker that was evicted may join again: what kept it from working may have passed."""
        if not (self._rejoin or self._stay):
            raise error
        self._report(f"{error.message} Joining again in {error.again_seconds:.0f} s. Ctrl-C ends this worker.")
        until = time.monotonic() + error.again_seconds
        while time.monotonic() < until and not self._is_orphaned:
            time.sleep(_PAUSE_SECONDS)
        return self._is_orphaned

    def _turned_away(self, error: Refused) -> bool:
        """Note a refusal; where coordinators are looked for, there may be another that has room."""
        if self._found is not None and not self.joining.host:
            self._refused[self._found.announcement.instance] = error
            self._found = None
            return False
        if not self._stay:
            raise error
        return self._go_on_after(error)

    def _go_on_after(self, error: ManyhandsError) -> bool:
        """Report once why a worker that stays could not join, and let it try again."""
        text = f"{error.message} {error.hint}".strip()
        if isinstance(error, Refused):
            if text != self._last_reported:
                self._report(f"{text}\nTrying again every {AGAIN_SECONDS:g} s.")
            time.sleep(AGAIN_SECONDS)
        elif not self._last_reported:
            self._report("No coordinator yet; waiting for one. Ctrl-C ends this worker.")
        self._last_reported, self._loss = text, None
        return False
