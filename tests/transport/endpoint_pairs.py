"""Endpoints in pairs, and guests that do by hand what an endpoint does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer_process import SIZE, random_messages

from manyhands.transport.dialling import dial
from manyhands.transport.frames import Header, encode
from manyhands.transport.security import Purpose, Security
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.wire import Wire, write_all
from manyhands.transport.wire_hello import read_hello, write_hello


def join_all(endpoints: list[TcpEndpoint], limit_seconds: float = 10.0) -> None:
    """connect() on all sides at once."""
    addresses = {endpoint.name: endpoint.address for endpoint in endpoints}
    errors: list[BaseException] = []

    def join(endpoint: TcpEndpoint) -> None:
        try:
            endpoint.connect(addresses, limit_seconds)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(endpoint,)) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def joined(security: Security, expected: Mapping[str, int], *names: str, **options: Any) -> Iterator[list[TcpEndpoint]]:
    """Connected endpoints that expect the same topics from each other, in generation 0."""
    endpoints = [TcpEndpoint(name, security, limit_seconds=20.0, **options) for name in names or ("a", "b")]
    try:
        join_all(endpoints)
        for endpoint in endpoints:
            others = [other.name for other in endpoints if other is not endpoint]
            plan = {(other, topic): size for other in others for topic, size in expected.items()}
            endpoint.mailbox.open(0, plan)
        yield endpoints
    finally:
        for endpoint in endpoints:
            endpoint.close()


@contextmanager
def with_peer(
    security: Security, what: str, silence_seconds: float, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[tuple[TcpEndpoint, int]]:
    """'b' here, connected to 'a' in a process of its own, which is started by a command behind `prefix`."""
    b = TcpEndpoint("b", security, host=host, limit_seconds=30, silence_seconds=silence_seconds)
    sizes = {topic: len(content) for topic, content in random_messages(0).items()}
    b.mailbox.open(0, {("a", topic): size for topic, size in ({"x": SIZE, "right": 1} | sizes).items()})
    words = [security.token, security.encrypted, *b.address, silence_seconds, what]
    script = Path(__file__).with_name("peer_process.py")
    process = subprocess.Popen([*prefix, sys.executable, str(script), *map(str, words)])
    try:
        b.connect({"a": ("127.0.0.1", 0)}, 60)
        yield b, process.pid
    finally:
        process.kill()
        process.wait()
        b.close()


class Guest:
    """'a', by hand: handshake and hello are right, what follows is up to the test."""

    def __init__(self, endpoint: TcpEndpoint, security: Security, name: str = "a") -> None:
        self.name = name
        deadline = time.monotonic() + 10
        naming = threading.Thread(target=endpoint.connect, args=({name: ("", 0)}, 10.0))
        naming.start()
        self.wire: Wire = dial(*endpoint.address, security, Purpose.DATA, deadline)
        write_hello(self.wire, {"from": name, "to": endpoint.name}, deadline)
        assert read_hello(self.wire, deadline)["verdict"] == "welcome"
        naming.join()

    def write(self, data: bytes) -> None:
        write_all(self.wire, data, time.monotonic() + 10)

    def frame(
        self, payload: bytes, *, topic: str = "x", size: int | None = None, offset: int = 0, generation: int = 0,
        step: int = 0, origin: str = "",
    ) -> None:  # fmt: skip
        whole = len(payload) if size is None else size
        header = Header(origin or self.name, generation, step, topic, whole, offset, len(payload))
        self.write(encode(header) + payload)


def wait_until(condition: object, limit_seconds: float = 10.0) -> None:
    """Poll, for what has no event to wait for."""
    assert callable(condition)
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
