"""The rendezvous of devices: each pair of them makes one connection.

The device with the smaller name connects to the one with the larger, unless their addresses say otherwise: a device
that was invited never connects, it is connected to.

Two that cannot reach each other both connect to a relay, and perform the same handshake through it.

Inside the handshake the connecting peer sends its name and the name it looks for. A peer that has not been named yet is
kept pending: other devices may have learnt of it a moment earlier. It is refused when its time is up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from manyhands.facts.errors import ManyhandsError, Refused, TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.transport.dialling import dial
from manyhands.transport.endpoint import Address, Peers
from manyhands.transport.limiter import ProofLimiter
from manyhands.transport.listener import PeerListener
from manyhands.transport.relay import Relay
from manyhands.transport.security import Purpose, Security, admit, enter
from manyhands.transport.tunnel import tunnel
from manyhands.transport.wire import Broken, Wire
from manyhands.transport.wire_hello import read_hello, write_hello

PENDING_SECONDS = 10.0
"""The time that a pending peer waits to be named."""
_MOST_PENDING = 256
_MOST_AT_ONCE = 16
_RETRY_SECONDS = 0.1

WELCOME, UNKNOWN, TAKEN, WRONG_NAME = "welcome", "unknown", "taken", "wrong name"
HERE = "here"
"""The answer to a probe, which is not a connection: the name is right."""


class PeerRendezvous:
    """One device's listener and the names of the peers it expects."""

    def __init__(
        self,
        name: str,
        security: Security,
        host: str,
        port: int,
        install: Callable[[str, Wire], None],
        is_connected: Callable[[str], bool],
        peer_listener: PeerListener | None = None,
    ) -> None:
        """Listen for peers. `peer_listener`: a listener that another object owns, in place of a new one at `host` and
        `port`."""
        self.name, self._security = name, security
        self._install, self._is_connected = install, is_connected
        self._named: set[str] = set()
        self._pending: dict[str, tuple[Wire, float]] = {}
        self._looking: set[Wire] = set()
        self._change = threading.Condition()
        self._is_closing = False
        self._limiter = ProofLimiter()
        self._owns_listener = peer_listener is None
        self._listener = peer_listener or PeerListener(host, port, security, Purpose.DATA, self._hear)
        self.address = self._listener.address
        self.relay = Relay(name, security)
        """The tunnels of pairs of others through this device."""
        if peer_listener is not None:
            peer_listener.receive(Purpose.DATA, security, self._hear)
        self._listener.receive(Purpose.RELAY, security, self.relay.receive)

    # Peers that connect to this device

    def _hear(self, wire: Wire) -> None:
        deadline = time.monotonic() + self._security.handshake_seconds
        hello = read_hello(wire, deadline)
        peer, named = hello.get("from", ""), hello.get("to", "")
        with self._change:
            if named != self.name or not peer or peer == self.name:
                verdict = WRONG_NAME
            elif "probe" in hello:
                verdict = HERE
            elif self._is_connected(peer):
                verdict = TAKEN
            elif peer in self._named:
                verdict = WELCOME
            else:
                self._park(peer, wire)
                return
        if verdict != WELCOME:
            write_hello(wire, {"verdict": verdict, "name": self.name}, deadline)
            if verdict == HERE:
                wire.close()
                return
            raise Refused(f"'{peer:.64}' looks for '{named:.64}' at {self.name}: {verdict}.")
        self._welcome(peer, wire)

    def _park(self, peer: str, wire: Wire) -> None:
        """Keep a peer pending until it is named; a second one of the same name replaces the first."""
        older = self._pending.pop(peer, None)
        if older is not None:
            older[0].close()
        if self._is_closing or len(self._pending) >= _MOST_PENDING:
            raise Refused("Too many peers wait to be named.")
        self._pending[peer] = (wire, time.monotonic() + PENDING_SECONDS * self._security.timeout_factor)

    def _welcome(self, peer: str, wire: Wire) -> None:
        try:
            write_hello(
                wire, {"verdict": WELCOME, "name": self.name}, time.monotonic() + self._security.handshake_seconds
            )
        except TimeoutError as error:
            raise Broken("it took no answer") from error
        with self._change:
            self._install(peer, wire)
            self._change.notify_all()

    def tidy(self) -> None:
        """Refuse pending peers whose time is up."""
        now = time.monotonic()
        with self._change:
            overdue = [name for name, (_, until) in self._pending.items() if now > until]
            wires = [self._pending.pop(name)[0] for name in overdue]
        for wire in wires:
            _send_away(wire, {"verdict": UNKNOWN, "name": self.name})

    def forget(self, peer: str) -> None:
        """Treat a lost peer as unknown until it is named again: its return must not hide its loss."""
        with self._change:
            self._named.discard(peer)

    # Peers that this device connects to

    def gather(self, peers: Peers, limit_seconds: float) -> None:
        """Connect to every peer; see `TcpEndpoint.connect`."""
        deadline = time.monotonic() + limit_seconds
        with self._change:
            self._named.update(peers)
            waiting = [(name, *self._pending.pop(name)) for name in peers if name in self._pending]
        for name, wire, _ in waiting:
            try:
                _check_alive(wire)
                self._welcome(name, wire)
            except Broken:
                wire.close()  # it gave up; it connects again, or is missing below
        addresses = {name: Address.of(peers[name]) for name in sorted(peers)}
        outward = [
            name
            for name, address in addresses.items()
            if (address.relay or address.is_dialled_by(self.name, name)) and not self._is_connected(name)
        ]
        if outward:
            relayed = sum(addresses[name].relay is not None for name in outward)  # each waits for the other end
            most = min(len(outward), _MOST_AT_ONCE + relayed)
            with ThreadPoolExecutor(most, f"connect {self.name}") as pool:
                attempts = [
                    pool.submit(self._meet if addresses[name].relay else self._reach, name, addresses[name], deadline)
                    for name in outward
                ]
            errors = [error for attempt in attempts if (error := attempt.exception()) is not None]
            self._raise_worst(errors)
        with self._change:
            while missing := sorted(name for name in peers if not self._is_connected(name)):
                if self._is_closing or not self._change.wait(max(0.0, min(0.5, deadline - time.monotonic()))):
                    if not self._is_closing and time.monotonic() < deadline:
                        continue
                    raise TimedOut(
                        f"{self.name} waited {limit_seconds:g} s for {', '.join(missing)} to connect to it.",
                        hint=f"Are they running, and can they reach {self.address[0]}:{self.address[1]}?",
                    )

    @staticmethod
    def _raise_worst(errors: list[BaseException]) -> None:
        for kind in (Refused, ManyhandsError, BaseException):
            for error in errors:
                if isinstance(error, kind):
                    raise error

    def _reach(self, peer: str, address: Address, deadline: float) -> None:
        """Connect to one peer; retry where it does not know this device yet, or has not noticed that the device was
        away."""
        host, port = address.host, address.port
        security = address.security or self._security
        where = f"{peer} at {host_and_port(host, port)}"
        refusal: Refused | None = None
        while not self._is_connected(peer):
            try:
                wire = dial(host, port, security, Purpose.DATA, deadline, lambda: self._is_closing)
            except TimedOut as error:
                raise refusal or error from None
            try:
                verdict, name = self._introduced(peer, wire, deadline)
            except TimeoutError:
                raise refusal or TimedOut(
                    f"{where} did not let {self.name} in: it has not been told of it.",
                    hint=f"connect() must be called on {peer} too, with {self.name} among its peers.",
                ) from None
            except Broken as error:
                refusal = Refused(f"{where} broke the connection off ({error}).")
            else:
                if verdict == WELCOME:
                    return
                if verdict == UNKNOWN:
                    refusal = Refused(f"{where} does not know {self.name}.", hint=f"Is {self.name} in its plan?")
                elif verdict == TAKEN:
                    hint = "Two devices must not have the same name."
                    refusal = Refused(f"{where} is connected to a {self.name} already.", hint=hint)
                else:
                    raise Refused(
                        f"{host_and_port(host, port)} is {name or 'somebody else'}, not {peer}.",
                        hint="Its address has changed: let it join again.",
                    )
            if self._is_closing or time.monotonic() + _RETRY_SECONDS > deadline:
                raise refusal
            time.sleep(_RETRY_SECONDS)

    def _introduced(self, peer: str, wire: Wire, deadline: float) -> tuple[str, str]:
        """Say who this device is and whom it looks for; return the verdict, and the name of who gave it. A connection
        that is welcome is installed, any other closed."""
        with self._change:
            self._looking.add(wire)
        is_welcome = False
        try:
            write_hello(wire, {"from": self.name, "to": peer}, deadline)
            answer = read_hello(wire, deadline)
            if answer.get("verdict") == WELCOME:
                self._install(peer, wire)
                is_welcome = True
            return answer.get("verdict", ""), answer.get("name", "")
        finally:
            with self._change:
                self._looking.discard(wire)
            if not is_welcome:
                wire.close()

    # Peers that only a relay can reach

    def _meet(self, peer: str, address: Address, deadline: float) -> None:
        """Connect to one peer through a relay, to which both connect; retry until both are there."""
        relay, failure = address.relay, ""
        assert relay is not None
        while not self._is_connected(peer):
            connected: socket.socket | None = None
            try:
                connected = tunnel(relay, self._security, self.name, peer, deadline, lambda: self._is_closing)
                self._shake_hands(peer, address, connected, deadline)
                continue
            except (ManyhandsError, Broken, OSError) as error:
                is_late = isinstance(error, TimedOut) and error.is_before_proof and bool(failure)
                if not is_late:
                    failure = error.message if isinstance(error, ManyhandsError) else str(error) or "no answer"
            if connected is not None and not self._is_connected(peer):
                with contextlib.suppress(OSError):
                    connected.close()
            if self._is_closing or time.monotonic() + _RETRY_SECONDS > deadline:
                raise TimedOut(
                    f"{self.name} could not reach {peer} through the relay {relay.name} at "
                    f"{host_and_port(relay.host, relay.port)}: {failure}",
                    hint="Another device may relay: manyhands worker --relay, where both can reach it.",
                )
            time.sleep(_RETRY_SECONDS)

    def _shake_hands(self, peer: str, address: Address, connected: socket.socket, deadline: float) -> None:
        """Perform the handshake of a data connection over a tunnel: the relay passes it on and cannot read it."""
        limit = min(deadline, time.monotonic() + self._security.handshake_seconds)
        if not address.is_dialled_by(self.name, peer):
            wire, _ = admit(connected, {Purpose.DATA: self._security}, limit, self._limiter)
            self._hear(wire)
            return
        wire = enter(connected, address.security or self._security, Purpose.DATA, f"{peer}, through a relay", limit)
        verdict, name = self._introduced(peer, wire, limit)
        if verdict != WELCOME:
            raise Refused(f"{name or peer} answered: {verdict or 'nothing'}")

    def close(self) -> None:
        with self._change:
            self._is_closing = True
            wires = [wire for wire, _ in self._pending.values()]
            self._pending.clear()
            for wire in self._looking:
                wire.shut()
            self._change.notify_all()
        for wire in wires:
            wire.close()
        self._listener.receive_no_more(Purpose.RELAY)
        self.relay.close()
        if self._owns_listener:
            self._listener.close()
        else:
            self._listener.receive_no_more(Purpose.DATA)


def answers_as(wire: Wire, name: str, peer: str, deadline: float) -> bool:
    """Return whether the device at the other end has the name that `name` looks for; ends the connection."""
    try:
        write_hello(wire, {"from": name, "to": peer, "probe": "yes"}, deadline)
        return read_hello(wire, deadline).get("verdict") == HERE
    finally:
        wire.close()


def _send_away(wire: Wire, fields: Mapping[str, str]) -> None:
    try:
        write_hello(wire, fields, time.monotonic())
    except (Broken, TimeoutError):
        pass
    finally:
        wire.close()


def _check_alive(wire: Wire) -> None:
    """Raise Broken unless a pending peer is still there: it sends nothing, so bytes or an end mean that it has left."""
    if wire.read([memoryview(bytearray(1))]):
        raise Broken("it did not wait for its answer")
