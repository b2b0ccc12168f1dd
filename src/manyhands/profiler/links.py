"""The link between two processes of this machine, measured over TCP on the loopback address.

A cluster of local workers has this link. Links between machines are measured by the workers themselves, over their
encrypted channels; until a cluster has been measured, its file's numbers are used and marked as estimated.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time

from manyhands.facts.errors import ManyhandsError
from manyhands.facts.link import Link

LIMIT_SECONDS = 20.0
"""The longest wait for the other process at any point; then it is ended and the measurement fails."""
SMALL_BYTES = 4096
LARGE_BYTES = 16 << 20
ROUND_TRIPS = 200
REPEATS = 5


def measure_loopback(large_bytes: int = LARGE_BYTES) -> Link:
    """Return the rate of a large message and half the round trip of a small one, medians, between two processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_SECONDS)
        port = server.getsockname()[1]
        code = f"from manyhands.profiler.links import echo; echo({port}, {large_bytes})"
        peer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)
        try:
            channel, _ = server.accept()
            with channel:
                _prepare(channel)
                return _measure(channel, large_bytes)
        except OSError as error:
            raise ManyhandsError(f"The loopback link could not be measured: {error}.") from error
        finally:
            peer.kill()
            peer.wait(LIMIT_SECONDS)


def _prepare(channel: socket.socket) -> None:
    channel.settimeout(LIMIT_SECONDS)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _measure(channel: socket.socket, large_bytes: int) -> Link:
    small, trips = bytes(SMALL_BYTES), []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        channel.sendall(small)
        _receive(channel, SMALL_BYTES)
        trips.append(time.perf_counter() - start)
    large, rates = bytes(large_bytes), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        channel.sendall(large)
        _receive(channel, 1)  # the other side has received it all
        rates.append(large_bytes / (time.perf_counter() - start))
    return Link(statistics.median(rates), statistics.median(trips) / 2)


def _receive(channel: socket.socket, count: int) -> None:
    buffer = memoryview(bytearray(min(count, 1 << 20)))
    while count:
        got = channel.recv_into(buffer[: min(count, len(buffer))])
        if not got:
            raise ConnectionError("the other process closed the connection")
        count -= got


def echo(port: int, large_bytes: int) -> None:
    """Run the other end: send back small messages, acknowledge large ones, then exit."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as channel:
        _prepare(channel)
        small = bytes(SMALL_BYTES)
        for _ in range(ROUND_TRIPS):
            _receive(channel, SMALL_BYTES)
            channel.sendall(small)
        for _ in range(REPEATS):
            _receive(channel, large_bytes)
            channel.sendall(b"k")
