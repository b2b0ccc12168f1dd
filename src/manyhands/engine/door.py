"""Listening and connecting, with the handshake done: what both control channels and data connections begin with.

Every guest is asked for the token in a thread of his own with a limit, so that one who is silent keeps
nobody waiting. Where too many are at the door at once, room is made by the rule of `admission`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from manyhands.engine.admission import Admission, Pending
from manyhands.engine.limiter import ProofLimiter
from manyhands.engine.proofs import TakesNoProofs
from manyhands.engine.security import Purpose, Security, admit, enter, prepare
from manyhands.engine.wire import Broken, Wire
from manyhands.facts.errors import AddressTaken, ManyhandsError, Refused, TimedOut

_MOST_HANDSHAKES = 128
_MOST_HANDSHAKES_PER_ADDRESS = 96
"""Workers of one house may all come from one address, and at once."""
_RETRY_SECONDS = 0.05
_LISTEN_POLL_MILLISECONDS = 500
"""On Linux closing wakes the thread at once; elsewhere it looks up this often."""
_CONNECT_POLL_MILLISECONDS = 100


class Door:
    """A listening address. `on_guest` is called, in the guest's thread, with every wire that passed the handshake.

    One address may serve several purposes: see `receive`.
    """

    def __init__(
        self, host: str, port: int, security: Security, purpose: Purpose, on_guest: Callable[[Wire], None]
    ) -> None:
        prepare(security)
        self._security = security
        self._receivers = {purpose: (security, on_guest)}
        self._limiter = ProofLimiter()
        self.on_turned_away: Callable[[str, ManyhandsError], None] = lambda origin, error: None
        """Told the address and the reason, in the guest's thread, when a handshake has failed."""
        self._socket = listen(host, port)
        found = self._socket.getsockname()
        self.address: tuple[str, int] = (str(found[0]), int(found[1]))
        self.dropped = 0
        self.reasons: deque[str] = deque(maxlen=100)
        """Why the last guests were turned away."""
        self._lock = threading.Lock()
        self._admission = Admission(_MOST_HANDSHAKES, _MOST_HANDSHAKES_PER_ADDRESS)
        self._guests: set[threading.Thread] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"door {self.address[1]}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._is_closing:
            if not poll.poll(_LISTEN_POLL_MILLISECONDS) or self._is_closing:
                continue
            try:
                connected, origin = self._socket.accept()
            except OSError as error:
                if not self._is_closing and error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    time.sleep(_RETRY_SECONDS)  # out of descriptors: guests wait in the kernel's queue
                continue
            guest = self._admission.enter(connected, str(origin[0]))
            if guest is None:
                self._drop(connected, str(origin[0]), Refused("too many at once"))
                continue
            thread = threading.Thread(target=self._ask, args=(guest,), name="guest", daemon=True)
            with self._lock:
                self._guests.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads to give
                self._forget(thread, guest)
                self._drop(connected, guest.host, Refused("too many at once"))

    def receive(self, purpose: Purpose, security: Security, on_guest: Callable[[Wire], None]) -> None:
        """From now on guests of this purpose are let in at this address too, by a security of their own."""
        prepare(security)
        self._receivers = {**self._receivers, purpose: (security, on_guest)}

    def receive_no_more(self, purpose: Purpose) -> None:
        self._receivers = {known: one for known, one in self._receivers.items() if known != purpose}

    def _ask(self, guest: Pending) -> None:
        receivers = self._receivers
        try:
            deadline = time.monotonic() + self._security.handshake_seconds
            securities = {purpose: security for purpose, (security, _) in receivers.items()}
            wire, purpose = admit(guest.connected, securities, deadline, self._limiter)
            self._admission.authorize(guest)  # from here on he is another's: `close` does not send him away
            receivers[purpose][1](wire)
        except TimeoutError:
            self._turn_away(guest, TimedOut(f"no handshake within {self._security.handshake_seconds:g} s"))
        except Exception as error:  # whatever he did: it is the end of him, and of nobody else
            self._turn_away(guest, error if isinstance(error, ManyhandsError) else Refused(str(error)))
        finally:
            self._forget(threading.current_thread(), guest)

    def _forget(self, thread: threading.Thread, guest: Pending) -> None:
        self._admission.leave(guest)
        with self._lock:
            self._guests.discard(thread)

    def _turn_away(self, guest: Pending, error: ManyhandsError) -> None:
        if guest.evicted.is_set():
            error = Refused("others came, and it had shown nothing yet")
        self._drop(guest.connected, guest.host, error)

    def _drop(self, connected: socket.socket, host: str, error: ManyhandsError) -> None:
        connected.close()
        with self._lock:
            self.dropped += 1
            self.reasons.append(f"{host}: {error.message:.300}")
        self.on_turned_away(host, error)

    def close(self) -> None:
        """No thread and no descriptor is left, but for those who were let in."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._admission.shut_down_pending()
        with self._lock:
            threads = list(self._guests)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that does not block; AddressTaken says which address and why not."""
    where = f"{host or '*'}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressTaken(f"Cannot listen on {where}: {error.strerror}.", hint="Check the host.") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            hint = "Choose another port (0 takes any free one), or end the program that has it: ss -ltnp"
        elif error.errno == errno.EACCES:
            hint = "Ports below 1024 are for administrators: choose a larger one."
        else:
            hint = "Choose an address of this machine: ip address. 0.0.0.0 takes all of them."
        raise AddressTaken(f"Cannot listen on {where}: {(error.strerror or str(error)).lower()}.", hint=hint) from error
    listening.setblocking(False)
    return listening


def knock(
    host: str,
    port: int,
    security: Security,
    purpose: Purpose,
    deadline: float,
    is_cancelled: Callable[[], bool] = lambda: False,
    *,
    once: bool = False,
) -> Wire:
    """Connect and shake hands. Nobody there yet: tried until the deadline, then TimedOut says what stood in the way.

    `once`: one who is not there, or does not answer, is not tried again. Whatever is raised `is_before_proof`.
    """
    try:
        return _knock(host, port, security, purpose, deadline, is_cancelled, once=once)
    except ManyhandsError as error:
        error.is_before_proof = True
        raise


def _knock(
    host: str,
    port: int,
    security: Security,
    purpose: Purpose,
    deadline: float,
    is_cancelled: Callable[[], bool],
    *,
    once: bool,
) -> Wire:
    where = f"{host}:{port}"
    start = time.monotonic()
    reason, is_limited = "", False
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or is_cancelled() or (once and reason):
            spent = min(time.monotonic(), deadline) - start
            if is_limited:
                raise TimedOut(
                    f"{where} answered, but {reason}.",
                    hint="Somebody guesses tokens there, or a wrong one was tried too often. Wait, then try again.",
                )
            raise TimedOut(
                f"Nobody answered at {where} within {round(spent, 1):g} s ({reason or 'no time to try'}).",
                hint="Is it running, is this its address, and does a firewall let it through?",
            )
        connected: socket.socket | None = None
        pause, is_limited = _RETRY_SECONDS, False
        try:
            limit = time.monotonic() + min(left, security.handshake_seconds)
            connected = _connected(host, port, limit, is_cancelled)
            if connected.getsockname() == connected.getpeername():
                raise Broken("connected to itself")  # a free port on this machine can do that
            limit = min(deadline, time.monotonic() + security.handshake_seconds)
            return enter(connected, security, purpose, where, limit)
        except TimeoutError:
            reason = "no answer"
        except TakesNoProofs as error:
            reason, pause, is_limited = str(error), error.seconds, True
        except (Broken, OSError) as error:
            reason = ((error.strerror if isinstance(error, OSError) else "") or str(error)).lower()
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        if connected is not None:
            connected.close()
        _sleep(min(pause, deadline - time.monotonic()), is_cancelled)


def _sleep(seconds: float, is_cancelled: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not is_cancelled():
        time.sleep(min(left, _RETRY_SECONDS))


def _connected(host: str, port: int, deadline: float, is_cancelled: Callable[[], bool]) -> socket.socket:
    """As `socket.create_connection`, but whoever no longer wants it need not wait for it."""
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            code = connecting.connect_ex(address)
            poll = select.poll()
            poll.register(connecting, select.POLLOUT)
            while code == errno.EINPROGRESS:
                left = deadline - time.monotonic()
                if left <= 0 or is_cancelled():
                    raise TimeoutError
                if poll.poll(min(left * 1000, _CONNECT_POLL_MILLISECONDS)):
                    code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            return connecting
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
    raise failure
