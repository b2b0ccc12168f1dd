"""How devices find each other: of two names the smaller one connects, the larger one is connected to, unless their
addresses say otherwise: one that was invited never connects, it is connected to.

Inside the handshake the guest says who he is and whom he looks for. A guest nobody has named yet waits: the others may
have learnt of him a moment earlier. He is refused when his time is up.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from manyhands.engine.door import Door, knock
from manyhands.engine.endpoint import Address, Peers
from manyhands.engine.security import Purpose, Security
from manyhands.engine.wire import Broken, Wire, read_exactly, write_all
from manyhands.facts.errors import ManyhandsError, Refused, TimedOut

STRANGER_SECONDS = 10.0
"""How long a guest waits to be named."""
_MOST_STRANGERS = 256
_MOST_AT_ONCE = 16
_LARGEST_HELLO_BYTES = 4096
_RETRY_SECONDS = 0.1
_LENGTH = struct.Struct("<I")

WELCOME, UNKNOWN, TAKEN, WRONG_NAME = "welcome", "unknown", "taken", "wrong name"


class Meeting:
    """One device's door and its list of those it expects."""

    def __init__(
        self,
        name: str,
        security: Security,
        host: str,
        port: int,
        install: Callable[[str, Wire], None],
        is_connected: Callable[[str], bool],
        door: Door | None = None,
    ) -> None:
        """`door`: one that is somebody else's, in place of one at `host` and `port`."""
        self.name, self._security = name, security
        self._install, self._is_connected = install, is_connected
        self._named: set[str] = set()
        self._strangers: dict[str, tuple[Wire, float]] = {}
        self._looking: set[Wire] = set()
        self._change = threading.Condition()
        self._is_closing = False
        self._owns_door = door is None
        self._door = door or Door(host, port, security, Purpose.DATA, self._hear)
        self.address = self._door.address
        if door is not None:
            door.receive(Purpose.DATA, security, self._hear)

    # Those who come

    def _hear(self, wire: Wire) -> None:
        deadline = time.monotonic() + self._security.handshake_seconds
        hello = _read_hello(wire, deadline)
        guest, wanted = hello.get("from", ""), hello.get("to", "")
        with self._change:
            if wanted != self.name or not guest or guest == self.name:
                verdict = WRONG_NAME
            elif self._is_connected(guest):
                verdict = TAKEN
            elif guest in self._named:
                verdict = WELCOME
            else:
                self._park(guest, wire)
                return
        if verdict != WELCOME:
            _write_hello(wire, {"verdict": verdict, "name": self.name}, deadline)
            raise Refused(f"'{guest:.64}' looks for '{wanted:.64}' at {self.name}: {verdict}.")
        self._welcome(guest, wire)

    def _park(self, guest: str, wire: Wire) -> None:
        """Keep a stranger until he is named; a second one of the same name takes the place of the first."""
        older = self._strangers.pop(guest, None)
        if older is not None:
            older[0].close()
        if self._is_closing or len(self._strangers) >= _MOST_STRANGERS:
            raise Refused("Too many wait to be named.")
        self._strangers[guest] = (wire, time.monotonic() + STRANGER_SECONDS * self._security.patience)

    def _welcome(self, guest: str, wire: Wire) -> None:
        try:
            _write_hello(
                wire, {"verdict": WELCOME, "name": self.name}, time.monotonic() + self._security.handshake_seconds
            )
        except TimeoutError as error:
            raise Broken("it took no answer") from error
        with self._change:
            self._install(guest, wire)
            self._change.notify_all()

    def tidy(self) -> None:
        """Send away strangers whose time is up."""
        now = time.monotonic()
        with self._change:
            overdue = [name for name, (_, until) in self._strangers.items() if now > until]
            wires = [self._strangers.pop(name)[0] for name in overdue]
        for wire in wires:
            _send_away(wire, {"verdict": UNKNOWN, "name": self.name})

    def forget(self, peer: str) -> None:
        """A lost peer is a stranger until it is named again: its return must not hide its loss."""
        with self._change:
            self._named.discard(peer)

    # Those we look for

    def gather(self, peers: Peers, limit_seconds: float) -> None:
        """See `TcpEndpoint.connect`."""
        deadline = time.monotonic() + limit_seconds
        with self._change:
            self._named.update(peers)
            waiting = [(name, *self._strangers.pop(name)) for name in peers if name in self._strangers]
        for name, wire, _ in waiting:
            try:
                _check_alive(wire)
                self._welcome(name, wire)
            except Broken:
                wire.close()  # he gave up; he knocks again, or is missed below
        addresses = {name: Address.of(peers[name]) for name in sorted(peers)}
        outward = [
            name
            for name, address in addresses.items()
            if address.is_dialled_by(self.name, name) and not self._is_connected(name)
        ]
        if outward:
            with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(outward)), f"connect {self.name}") as pool:
                attempts = [pool.submit(self._reach, name, addresses[name], deadline) for name in outward]
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
        """Connect to one peer. One that does not know us yet, or has not noticed that we were gone, is asked again."""
        host, port = address.host, address.port
        security = address.security or self._security
        where = f"{peer} at {host}:{port}"
        refusal: Refused | None = None
        while not self._is_connected(peer):
            try:
                wire = knock(host, port, security, Purpose.DATA, deadline, lambda: self._is_closing)
            except TimedOut as error:
                raise refusal or error from None
            with self._change:
                self._looking.add(wire)
            try:
                _write_hello(wire, {"from": self.name, "to": peer}, deadline)
                answer = _read_hello(wire, deadline)
                verdict = answer.get("verdict")
                if verdict == WELCOME:
                    self._install(peer, wire)
                    return
            except TimeoutError:
                wire.close()
                raise refusal or TimedOut(
                    f"{where} did not let {self.name} in: it has not been told of it.",
                    hint=f"connect() must be called on {peer} too, with {self.name} among its peers.",
                ) from None
            except Broken as error:
                wire.close()
                refusal = Refused(f"{where} broke the connection off ({error}).")
            else:
                wire.close()
                if verdict == UNKNOWN:
                    refusal = Refused(f"{where} does not know {self.name}.", hint=f"Is {self.name} in its plan?")
                elif verdict == TAKEN:
                    hint = "Two devices must not have the same name."
                    refusal = Refused(f"{where} is connected to a {self.name} already.", hint=hint)
                else:
                    raise Refused(
                        f"{host}:{port} is {answer.get('name', 'somebody else')}, not {peer}.",
                        hint="Its address has changed: let it join again.",
                    )
            finally:
                with self._change:
                    self._looking.discard(wire)
            if self._is_closing or time.monotonic() + _RETRY_SECONDS > deadline:
                raise refusal
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        with self._change:
            self._is_closing = True
            wires = [wire for wire, _ in self._strangers.values()]
            self._strangers.clear()
            for wire in self._looking:
                wire.shut()
            self._change.notify_all()
        for wire in wires:
            wire.close()
        if self._owns_door:
            self._door.close()
        else:
            self._door.receive_no_more(Purpose.DATA)


def _write_hello(wire: Wire, fields: Mapping[str, str], deadline: float) -> None:
    content = json.dumps(fields).encode()
    write_all(wire, _LENGTH.pack(len(content)) + content, deadline)


def _read_hello(wire: Wire, deadline: float) -> dict[str, str]:
    (size,) = _LENGTH.unpack(read_exactly(wire, _LENGTH.size, deadline))
    if size > _LARGEST_HELLO_BYTES:
        raise Broken(f"a hello of {size} bytes; at most {_LARGEST_HELLO_BYTES} are read")
    try:
        found = json.loads(read_exactly(wire, size, deadline))
    except (ValueError, RecursionError) as error:
        raise Broken("a hello that is none") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise Broken("a hello that is none")
    return found


def _send_away(wire: Wire, fields: Mapping[str, str]) -> None:
    try:
        _write_hello(wire, fields, time.monotonic())
    except (Broken, TimeoutError):
        pass
    finally:
        wire.close()


def _check_alive(wire: Wire) -> None:
    """A guest who waits says nothing: bytes or an end mean that he is gone."""
    if wire.read([memoryview(bytearray(1))]):
        raise Broken("it did not wait for its answer")
