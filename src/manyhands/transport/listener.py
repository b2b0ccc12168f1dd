"""Listens for peers and performs the handshake: the server's end of control channels and data connections.

Every peer proves who it is in a thread of its own with a limit, so that a silent one delays no other. Where too many
are pending at once, room is made by the rule of `admission`.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from manyhands.facts.errors import AddressTaken, ManyhandsError, Refused, TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.transport.admission import Admission, Pending
from manyhands.transport.limiter import ProofLimiter
from manyhands.transport.security import Purpose, Security, admit, prepare
from manyhands.transport.wire import Wire

_MOST_HANDSHAKES = 128
_MOST_HANDSHAKES_PER_ADDRESS = 96
"""Workers behind one router may all come from one address, and at once."""
_RETRY_SECONDS = 0.05
_LISTEN_POLL_MILLISECONDS = 500
"""On Linux closing wakes the thread at once; elsewhere it checks this often."""


class PeerListener:
    """A listening address. `on_peer` is called, in the peer's thread, with every wire that passed the handshake.

    One address may serve several purposes: see `receive`.
    """

    def __init__(
        self, host: str, port: int, security: Security, purpose: Purpose, on_peer: Callable[[Wire], None]
    ) -> None:
        prepare(security)
        self._security = security
        self._receivers = {purpose: (security, on_peer)}
        self._limiter = ProofLimiter()
        self.on_turned_away: Callable[[str, ManyhandsError], None] = lambda origin, error: None
        """Called with the address and the reason, in the peer's thread, when a handshake has failed."""
        self._socket = listen(host, port)
        bound = self._socket.getsockname()
        self.address: tuple[str, int] = (str(bound[0]), int(bound[1]))
        self.dropped = 0
        self.reasons: deque[str] = deque(maxlen=100)
        """The reasons why the last peers were turned away."""
        self._lock = threading.Lock()
        self._admission = Admission(_MOST_HANDSHAKES, _MOST_HANDSHAKES_PER_ADDRESS)
        self._threads: set[threading.Thread] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"listener {self.address[1]}", daemon=True)
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
                    time.sleep(_RETRY_SECONDS)  # out of descriptors: peers wait in the kernel's queue
                continue
            pending = self._admission.enter(connected, str(origin[0]))
            if pending is None:
                self._drop(connected, str(origin[0]), Refused("too many at once"))
                continue
            thread = threading.Thread(target=self._ask, args=(pending,), name="pending peer", daemon=True)
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                self._forget(thread, pending)
                self._drop(connected, pending.host, Refused("too many at once"))

    def receive(self, purpose: Purpose, security: Security, on_peer: Callable[[Wire], None]) -> None:
        """Admit peers of this purpose at this address too, by a security of their own."""
        prepare(security)
        self._receivers = {**self._receivers, purpose: (security, on_peer)}

    def receive_no_more(self, purpose: Purpose) -> None:
        self._receivers = {other: receiver for other, receiver in self._receivers.items() if other != purpose}

    def _ask(self, pending: Pending) -> None:
        receivers = self._receivers
        try:
            deadline = time.monotonic() + self._security.handshake_seconds
            securities = {purpose: security for purpose, (security, _) in receivers.items()}
            wire, purpose = admit(pending.connected, securities, deadline, self._limiter)
            self._admission.authorize(pending)  # from here on another object owns it: `close` does not end it
            receivers[purpose][1](wire)
        except TimeoutError:
            self._turn_away(pending, TimedOut(f"no handshake within {self._security.handshake_seconds:g} s"))
        except Exception as error:  # whatever this peer did ends its own connection only
            self._turn_away(pending, error if isinstance(error, ManyhandsError) else Refused(str(error)))
        finally:
            self._forget(threading.current_thread(), pending)

    def _forget(self, thread: threading.Thread, pending: Pending) -> None:
        self._admission.leave(pending)
        with self._lock:
            self._threads.discard(thread)

    def _turn_away(self, pending: Pending, error: ManyhandsError) -> None:
        if pending.evicted.is_set():
            error = Refused("others came, and it had shown nothing yet")
        self._drop(pending.connected, pending.host, error)

    def _drop(self, connected: socket.socket, host: str, error: ManyhandsError) -> None:
        connected.close()
        with self._lock:
            self.dropped += 1
            self.reasons.append(f"{host}: {error.message:.300}")
        self.on_turned_away(host, error)

    def close(self) -> None:
        """End every thread and descriptor except those of peers that were admitted."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._admission.shut_down_pending()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        self._socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket that does not block; AddressTaken gives the address and the reason."""
    where = host_and_port(host or "*", port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressTaken(f"Cannot listen on {where}: {error.strerror}.", hint="Check the host.") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":  # all addresses: IPv4 too, whatever this system's default is
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
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
