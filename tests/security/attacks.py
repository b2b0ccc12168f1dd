"""Clients that mean harm, each in a thread of its own: the silent, the slow, the many, the loud, one of the house."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from manyhands.facts.errors import ManyhandsError
from manyhands.facts.version import __version__
from manyhands.runtime.control import PROTOCOL, encode
from manyhands.runtime.control_messages import Heartbeat, Hello, Progress, Ready
from manyhands.runtime.control_parts import Arrival, Facts
from manyhands.transport.channel import Channel, connect
from manyhands.transport.dialling import dial
from manyhands.transport.proofs import DIALLED
from manyhands.transport.security import PREAMBLE, Purpose, Security, new_secret, new_token, preamble

Address = tuple[str, int]
HELLO = Hello(__version__, PROTOCOL, "intruder", "127.0.0.1", 9, Facts("a machine", 1, 1, 10**9, "2.6"))


class Attack:
    """Goes on from `with` to the end of the block; `done` counts what it did."""

    def __init__(self, what: Callable[[Attack], None]) -> None:
        self._what = what
        self.done = 0
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what.__name__, daemon=True)

    def _run(self) -> None:
        while not self.is_over.is_set():
            with contextlib.suppress(OSError, ManyhandsError):
                self._what(self)
            time.sleep(0.001)

    def __enter__(self) -> Attack:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def wait_for(self, count: int, limit_seconds: float = 60.0) -> None:
        end = time.monotonic() + limit_seconds
        while self.done < count:
            assert time.monotonic() < end, f"{self.done} of {count}"
            time.sleep(0.01)


def silent(address: Address, count: int, security: Security) -> Attack:
    """So many connections that say nothing, every second one after its first words; whoever is dropped comes again."""

    def hold(attack: Attack) -> None:
        held: list[socket.socket] = []
        try:
            while not attack.is_over.wait(0.005):
                if len(held) < count:
                    held.append(socket.create_connection(address, 5))
                    if len(held) % 2:
                        held[-1].sendall(preamble(security, Purpose.CONTROL))
                    attack.done += 1
                held = [one for one in held if not _is_gone(one)]
        finally:
            for one in held:
                one.close()

    return Attack(hold)


def _is_gone(connected: socket.socket) -> bool:
    connected.setblocking(False)
    try:
        return not connected.recv(PREAMBLE.size)
    except BlockingIOError:
        return False
    except OSError:
        return True


def slow(address: Address, security: Security, seconds: float = 0.1) -> Attack:
    """The right words, one byte at a time."""

    def drip(attack: Attack) -> None:
        with socket.create_connection(address, 5) as connected:
            for byte in preamble(security, Purpose.CONTROL) + bytes(64):
                connected.sendall(bytes([byte]))
                attack.done += 1
                if attack.is_over.wait(seconds):
                    return

    return Attack(drip)


def loud(address: Address) -> Attack:
    """Garbage, as fast as it is taken, over one connection after another."""

    def shout(attack: Attack) -> None:
        with socket.create_connection(address, 5) as connected:
            attack.done += 1
            for _ in range(16):
                connected.sendall(secrets.token_bytes(1 << 16))

    return Attack(shout)


def guessing(address: Address, encrypted: bool) -> Attack:
    """One token after another."""

    def guess(attack: Attack) -> None:
        attack.done += 1
        DIALLED.reset()  # its own program would not hold it back
        dial(
            *address,
            Security(new_token() if attack.done % 2 else new_secret(), encrypted),
            Purpose.CONTROL,
            time.monotonic() + 2,
            once=True,
        ).close()

    return Attack(guess)


def one_of_the_house(address: Address, security: Security) -> Attack:
    """Knows the token, joins, and floods: messages of rounds that are not, beats, and one that is never finished."""
    arrivals = tuple(Arrival("worker-1", 10**6, 0.1, 0.0) for _ in range(50))
    words = [
        encode(one)
        for one in (
            Progress(-7, 10**9, 0.1, (float("1e9"),), (0,), arrivals),
            Heartbeat(arrivals),
            Ready(10**6),
            Heartbeat(),
        )
    ]

    def flood(attack: Attack) -> None:
        name = f"intruder-{secrets.token_hex(3)}"
        channel: Channel = connect(*address, security, 5.0)
        try:
            channel.send(encode(msgspec.structs.replace(HELLO, name=name)))
            assert channel.receive(5.0) is not None
            for number in range(5000):
                if attack.is_over.is_set():
                    return
                channel.send(words[number % len(words)], 5.0)
                attack.done += 1
            channel._wire.write([memoryview((60 * 2**20).to_bytes(4, "little") + bytes(1 << 16))])
        finally:
            channel.close()

    return Attack(flood)


def asking_for_data(address: Address, security: Security) -> Attack:
    """Knows the token, and looks for somebody at a data port, under one name after another."""

    def ask(attack: Attack) -> None:
        wire = dial(*address, security, Purpose.DATA, time.monotonic() + 2, once=True)
        attack.done += 1
        content = b'{"from": "%s", "to": "coordinator"}' % secrets.token_hex(4).encode()
        wire.write([memoryview(len(content).to_bytes(4, "little") + content + secrets.token_bytes(1 << 16))])
        wire.close()

    return Attack(ask)
