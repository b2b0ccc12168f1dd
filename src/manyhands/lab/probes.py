"""Small programs that measure a lab's devices from inside. They import only the standard library, to start quickly.

python -m manyhands.lab.probes sink HOST PORT SECONDS HEAD_BYTES HEAD_SECONDS    prints the rate of what it received
python -m manyhands.lab.probes source HOST PORT SECONDS
python -m manyhands.lab.probes echo HOST PORT SECONDS      sends datagrams back, until none came for so long
python -m manyhands.lab.probes ping HOST PORT COUNT SECONDS    prints the median of round trips; waits so long for each
python -m manyhands.lab.probes burn SECONDS
python -m manyhands.lab.probes hoard BYTES                 takes memory, page by page
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

LIMIT_SECONDS = 60.0
"""No probe waits longer than this for a peer."""
_PAGE = 4096


def sink(host: str, port: str, seconds: str, head_bytes: str, head_seconds: str) -> None:
    """Receive one stream and count its bytes for `seconds`, once its head has arrived."""
    with socket.create_server((host, int(port))) as server:
        server.settimeout(LIMIT_SECONDS)
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(LIMIT_SECONDS)
            head, counted = int(head_bytes), 0
            began = last = time.monotonic()
            end_of_head = began + float(head_seconds)
            end = end_of_head + LIMIT_SECONDS + float(seconds)
            while last < end and (count := len(connection.recv(1 << 20))):
                last = time.monotonic()
                if head > 0 or last < end_of_head:
                    head -= count
                    began, end = last, max(last, end_of_head) + float(seconds)
                else:
                    counted += count
            print(json.dumps(counted / (last - began) if last > began else 0.0), flush=True)


def source(host: str, port: str, seconds: str) -> None:
    block = bytes(1 << 16)
    with socket.create_connection((host, int(port)), LIMIT_SECONDS) as connection:
        end = time.monotonic() + float(seconds) + LIMIT_SECONDS
        try:
            while time.monotonic() < end:
                connection.sendall(block)
        except OSError:
            pass  # the other side has seen enough


def at_once() -> None:
    """Make the scheduler wake this process as soon as a packet arrives, whatever else computes; otherwise the wait for
    a core would be measured too."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))


def echo(host: str, port: str, seconds: str) -> None:
    at_once()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind((host, int(port)))
        bound.settimeout(float(seconds))
        print("listening", flush=True)
        while True:
            try:
                data, sender = bound.recvfrom(2048)
            except TimeoutError:
                return
            bound.sendto(data, sender)
            if data == b"end":
                return


def ping(host: str, port: str, count: str, seconds: str) -> None:
    at_once()
    round_trips = []
    first = min(3, int(count) // 3)  # slower: the path is not warmed up yet
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.connect((host, int(port)))
        bound.settimeout(float(seconds))
        for number in range(int(count) + first):
            begun = time.perf_counter()
            bound.send(b"%08d" % number)
            bound.recv(2048)
            round_trips.append(time.perf_counter() - begun)
            time.sleep(0.002)
        bound.send(b"end")
    print(json.dumps(statistics.median(round_trips[first:])), flush=True)


def burn(seconds: str) -> None:
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        sum(range(1000))


def hoard(count: str) -> None:
    blocks = []
    for _ in range(int(count) // (1 << 20)):
        block = bytearray(1 << 20)
        block[::_PAGE] = b"\1" * (len(block) // _PAGE)
        blocks.append(block)
    print("still here", flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "sink": sink, "source": source, "echo": echo, "ping": ping, "burn": burn, "hoard": hoard,
    }  # fmt: skip
    programs[sys.argv[1]](*sys.argv[2:])
