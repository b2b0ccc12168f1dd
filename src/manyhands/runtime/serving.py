"""A worker that listens: coordinators come to it, one at a time (see `inviting`); and what every worker's process does.

A worker that goes to a coordinator is in `service`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from manyhands.facts.errors import ManyhandsError
from manyhands.facts.hosts import host_and_port
from manyhands.graph.accelerators import check_gpu
from manyhands.graph.compiler import leave_out_compiler, without_collecting
from manyhands.runtime.audit import AuditLog
from manyhands.runtime.control import encode
from manyhands.runtime.control_messages import Heartbeat, Refusal
from manyhands.runtime.failed_proofs import REPORT_SECONDS, FailedProofs
from manyhands.runtime.joining import Joining
from manyhands.runtime.shared_token import config_folder
from manyhands.runtime.worker import Worker
from manyhands.transport.channel import SEND_LIMIT_SECONDS
from manyhands.transport.keys import fingerprint
from manyhands.transport.proofs import KeyRefused, WrongProof
from manyhands.transport.security import DeviceSecurity, Security, is_loopback, is_secret, new_token
from manyhands.transport.transport import ControlChannel, ControlConnection, TcpTransport, Transport

LISTEN_PORT = 7078
TAKEOVER_SECONDS = 3.0
"""Seconds without a message, heartbeats included, after which a coordinator gives way to one that comes."""
_ANSWER_SECONDS = 10.0
"""Seconds within which a coordinator that comes takes the worker in, or it is not waited for."""
_REFUSE_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_MOST_TURNED_AWAY = 20
"""Most refusals that are reported in a minute."""
_SAME_SECONDS = 0.25
"""Seconds within which a second signal counts as the same: the parent of several workers passes on what a terminal
sends to all."""


def load_everything() -> None:
    """Load what PyTorch otherwise loads to work out the shapes of a sent graph, and leave out its compiler, which
    optimizers would load at their first step: a worker compiles nothing.

    It takes half a second or more, in which no device is to wait.
    """
    leave_out_compiler()
    with without_collecting():
        importlib.import_module("torch.fx.experimental.symbolic_shapes")


@contextlib.contextmanager
def asked_to_leave_by_signal(leave: Callable[[], bool]) -> Iterator[None]:
    """Call `leave` on Ctrl-C and SIGTERM; it returns whether anything is to be done first.

    If not, and at the second signal, the process ends at once. Where Ctrl-C is ignored, as in a shell's background, it
    stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None

    def obey(number: int, frame: object) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is not None and now - asked_at < _SAME_SECONDS:
            return
        if asked_at is not None:
            os._exit(128 + number)
        if leave():
            asked_at = now
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os._exit(128 + number)

    handled = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handled.append(signal.SIGINT)
    before = {number: signal.signal(number, obey) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ask_to_leave(worker: Worker, name: str, report: Callable[[str], None]) -> None:
    """Call `Worker.ask_to_leave`, and report why leaving takes a moment where it does."""
    if worker.is_needed:
        report(f"{name} leaves as soon as others have what it holds. Ctrl-C again leaves at once.")
    worker.ask_to_leave()


def listen(
    joining: Joining,
    report: Callable[[str], None] | None = None,
    *,
    once: bool = False,
    on_listening: Callable[[tuple[str, int], str], None] | None = None,
    stopping: threading.Event | None = None,
    transport: Transport | None = None,
) -> None:
    """Listen at joining's host and port, and work for whichever coordinator comes with the token, one at a time.

    When one has gone the next is waited for, unless `once`: then a loss is WorkerLost. An empty token: a new one is
    made. Beyond this machine everything is encrypted. `on_listening` is called with the address and the token when
    others can come. Ends when `stopping` is set, and by Ctrl-C or SIGTERM: the worker hands over first. A second
    one: at once.
    """
    ending = stopping or threading.Event()

    def leave() -> bool:
        ending.set()
        return True

    if joining.compute != "cpu":
        check_gpu(joining.compute)  # fails now rather than with every coordinator
    with (
        asked_to_leave_by_signal(leave),
        contextlib.closing(_Reception(joining, report, transport or TcpTransport(), ending)) as reception,
    ):
        reception.announce(on_listening)
        while not ending.is_set() and not reception.is_orphaned:
            reached = reception.next_peer(_LOOK_SECONDS)
            if reached is None:
                continue
            loss = _work(reached, joining, reception)
            if once and loss is not None and not ending.is_set():
                raise loss
            if once:
                return
        if ending.is_set():
            reception.report(f"{reception.name} has left.")


def _work(reached: ControlConnection, joining: Joining, reception: _Reception) -> ManyhandsError | None:
    """Work for one coordinator until it is gone; return why, where it did not end as it should."""
    origin = reached.channel.peer_host
    limit_seconds = min(joining.limit_seconds, _ANSWER_SECONDS * joining.timeout_factor)
    invited = dataclasses.replace(joining, name=reception.name, host=origin, limit_seconds=limit_seconds)
    try:
        worker = reception.worker = Worker(invited, reception.transport, reached)
        reception.report(f"Working for a coordinator from {origin}.")
        worker.on_joined = lambda: reception.has_joined(reached.channel)
        worker.run()
    except ManyhandsError as error:
        reception.report(f"The coordinator from {origin} is gone: {error.message}")
        return error
    finally:
        reception.leave()
    reception.report(f"The coordinator from {origin} has ended its run.")
    return None


class _Reception:
    """A listening port and its thread: lets one coordinator in at a time and tells others why they must wait."""

    def __init__(
        self, joining: Joining, report: Callable[[str], None] | None, transport: Transport, ending: threading.Event
    ) -> None:
        self.transport, self._report = transport, report
        self.worker: Worker | None = None
        """The worker that is at work; it is asked to leave when `ending` is set."""
        self._ending = ending
        self.name = joining.name or socket.gethostname()
        self._parent = joining.parent
        encrypted = joining.encrypted if joining.encrypted is not None else not is_loopback(joining.host)
        self._change = threading.Condition()
        self._reported_at: dict[str, float] = {}
        """Report about a peer that was turned away -> when it was made."""
        token = joining.token or new_token()
        credentials = joining.credentials() if encrypted and not is_secret(token) else None
        self.security: Security = DeviceSecurity(
            token, encrypted=encrypted, timeout_factor=joining.timeout_factor, credentials=credentials
        )
        self._audit = AuditLog(config_folder() if credentials is not None else None)
        self._failed_proofs = FailedProofs(self.report, self._audit)
        self.listener = transport.listen(self.name, joining.host, joining.port, self.security)
        self.listener.tell_of_failures(self._turned_away)
        self._present: _PendingPeer | None = None
        """The coordinator that this worker works for."""
        self._next: _PendingPeer | None = None
        """The next coordinator, as soon as the worker has left the present one."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="reception", daemon=True)
        self._thread.start()

    def announce(self, on_listening: Callable[[tuple[str, int], str], None] | None) -> None:
        (host, port), token = self.listener.address, self.security.token
        kind = "encrypted" if self.security.encrypted else "plain, for this machine only"
        self.report(f"{self.name} listens on {host_and_port(host, port)} ({kind}). Ctrl-C ends it.")
        if on_listening is not None:
            on_listening((host, port), token)

    def has_joined(self, channel: ControlChannel) -> None:
        key = fingerprint(channel.peer_key) if channel.peer_key else "none"
        self._audit.record("joined", name="a coordinator", origin=channel.peer_host, key=key)

    def report(self, text: str) -> None:
        """Report; where the reader has stopped reading, go on without."""
        if self._report is not None:
            with contextlib.suppress(OSError):
                self._report(text)

    @property
    def is_orphaned(self) -> bool:
        """Whether the parent process with which this one ends is gone."""
        return bool(self._parent) and os.getppid() != self._parent

    def next_peer(self, limit_seconds: float) -> ControlConnection | None:
        with self._change:
            if not self._change.wait_for(lambda: self._next, limit_seconds):
                return None
            peer = self._present = self._next
            self._next = None
        assert peer is not None
        peer.received_at = time.monotonic()
        return ControlConnection(peer, self.security, self.listener)

    def leave(self) -> None:
        """Leave the coordinator that was present and has gone."""
        self.worker = None
        with self._change:
            peer, self._present = self._present, None
        if peer is not None:
            peer.close()

    def _receive(self) -> None:
        leaving_worker: Worker | None = None
        while not self._closing.is_set():
            channel = self.listener.accept(_LOOK_SECONDS)
            self._failed_proofs.report()
            if self._ending.is_set() and (worker := self.worker) is not None and worker is not leaving_worker:
                leaving_worker = worker
                ask_to_leave(worker, self.name, self.report)
            if channel is not None:
                with contextlib.suppress(ManyhandsError):
                    self._judge(_PendingPeer(channel))

    def _judge(self, peer: _PendingPeer) -> None:
        """Give a free worker to the coordinator that comes. A present one that is silent makes way."""
        with self._change:
            present, older = self._present, self._next
            if present is None:
                is_free = older is None
            else:
                is_free = present.silent_seconds > TAKEOVER_SECONDS * self.security.timeout_factor
            if is_free:
                self._next = peer
                self._change.notify_all()
        if not is_free:
            self.report(f"A coordinator from {peer.peer_host} was refused: another one is here.")
            refusal = Refusal(
                f"{self.name} is working for another coordinator.", "Wait until that one has ended, or start another."
            )
            with contextlib.closing(peer):
                peer.send(encode(refusal), _REFUSE_SECONDS)
            return
        if older is not None:
            older.close()
        if present is not None:
            self.report(
                f"The coordinator from {present.peer_host} has been silent; one from {peer.peer_host} has come."
            )
            present.close()

    def _turned_away(self, origin: str, error: ManyhandsError) -> None:
        """Report a peer that failed its proof, in its thread: wrong tokens as a count, other reasons once a minute."""
        if isinstance(error, WrongProof):
            self._failed_proofs.note(origin)
            return
        if isinstance(error, KeyRefused):
            self._audit.record("refused", origin=origin, key=fingerprint(error.public), reason=error.message)
        now, words = time.monotonic(), f"{origin}: {error.message}"
        with self._change:
            is_news = now - self._reported_at.get(words, -REPORT_SECONDS) >= REPORT_SECONDS
            if is_news:
                self._reported_at = {text: at for text, at in self._reported_at.items() if now - at < REPORT_SECONDS}
                is_news = len(self._reported_at) < _MOST_TURNED_AWAY
            if is_news:
                self._reported_at[words] = now
        if is_news:
            self.report(f"Turned away: {words}")

    def close(self) -> None:
        """Close the port and all connections; no thread and no descriptor is left."""
        self._closing.set()
        self.listener.close()
        self._thread.join(2.0)
        self._failed_proofs.report(is_last=True)
        self.leave()
        if self._next is not None:
            self._next.close()


class _PendingPeer:
    """A coordinator's channel that records since when nothing has come; during a long message it is not silent.

    See `transport.ControlChannel`.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self.local_host, self.peer_host, self.peer_key = channel.local_host, channel.peer_host, channel.peer_key
        self.received_at = time.monotonic()
        self._unfinished = 0

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.received_at

    def send(self, data: bytes, limit_seconds: float = SEND_LIMIT_SECONDS) -> None:
        self._channel.send(data, limit_seconds)

    def limit_received(self, largest_bytes: int) -> None:
        self._channel.limit_received(largest_bytes)

    def receive(self, limit_seconds: float) -> bytes | None:
        data = self._channel.receive(limit_seconds)
        unfinished = self._channel.unfinished_bytes
        is_speaking, self._unfinished = unfinished != self._unfinished, unfinished
        if data is None and is_speaking:
            data = encode(Heartbeat())  # part of a message proves as much as a heartbeat
        if data is not None:
            self.received_at = time.monotonic()
        return data

    @property
    def unfinished_bytes(self) -> int:
        return self._channel.unfinished_bytes

    def close(self) -> None:
        self._channel.close()
