"""The candidates of the transport's micro-benchmark, each as two processes that exchange messages.

    python -m manyhands_bench.core.links raw b ...      # prints its address, then serves
    python -m manyhands_bench.core.links raw a ...      # measures

Commands come as lines of JSON on stdin, answers leave as lines beginning with '@' (gloo prints to stdout too). Only
what a candidate needs is imported: torch alone takes seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from manyhands_bench.core.link_baselines import CurveLink, GlooLink, RawLink, ZeroMqLink
from manyhands_bench.core.link_protocol import (
    BURST_MESSAGE_BYTES,
    BURST_MESSAGES,
    DYING_BYTES,
    HOST,
    LIMIT_SECONDS,
    PING_BYTES,
    LinkEnd,
)

PINGS_AT_ONCE = 200
SIZES = {"4kb": 4096, "64kb": 64 * 1024, "128kb": 128 * 1024, "1mb": 2**20, "16mb": 16 * 2**20}
"""The sizes at which shared memory is compared with TCP."""
MOST_MESSAGES_OF_A_SIZE = 32


def messages_of(size: int) -> int:
    """Return how many messages of this size make a stream."""
    return max(2, min(MOST_MESSAGES_OF_A_SIZE, 32 * 2**20 // size))


class EndpointLink:
    """This package's transport, over TCP alone."""

    encrypted = False
    shared_bytes = 0

    def __init__(self, role: str) -> None:
        import torch

        from manyhands.transport.security import Security
        from manyhands.transport.sharing import SharingSetting
        from manyhands.transport.tcp import TcpEndpoint

        torch.set_num_threads(1)
        self.is_a, self.peer = role == "a", "b" if role == "a" else "a"
        security = Security("a token for a benchmark on one machine", self.encrypted)
        sharing = SharingSetting(self.shared_bytes, smallest_bytes=1)
        self.endpoint = TcpEndpoint(role, security, limit_seconds=LIMIT_SECONDS, sharing=sharing)
        self.small = [torch.zeros(PING_BYTES, dtype=torch.uint8)]
        self.large = [[torch.zeros(BURST_MESSAGE_BYTES, dtype=torch.uint8)] for _ in range(BURST_MESSAGES)]
        self.word = [torch.zeros(1, dtype=torch.uint8)]
        self.step = 0

    def start(self) -> str:
        return str(self.endpoint.address[1])

    def connect(self, address: str) -> None:
        expected = {(self.peer, f"ping {number}"): PING_BYTES for number in range(PINGS_AT_ONCE)}
        expected |= {(self.peer, f"burst {number}"): BURST_MESSAGE_BYTES for number in range(BURST_MESSAGES)}
        for size in SIZES.values():
            expected |= {(self.peer, f"{size} {number}"): size for number in range(messages_of(size))}
        expected |= {(self.peer, "word"): 1, (self.peer, "dying"): DYING_BYTES}
        self.endpoint.mailbox.open(0, expected)
        self.endpoint.connect({self.peer: (HOST, int(address or 0))}, LIMIT_SECONDS)

    def ping(self, number: int) -> None:
        if number % PINGS_AT_ONCE == 0:
            self._next_step()
        topic = f"ping {number % PINGS_AT_ONCE}"
        if self.is_a:
            self.endpoint.send(self.peer, self.step, topic, self.small)
        self.endpoint.mailbox.receive(self.peer, self.step, topic, self.small)
        if not self.is_a:
            self.endpoint.send(self.peer, self.step, topic, self.small)

    def _next_step(self) -> None:
        self.step += 1
        self.endpoint.mailbox.begin_step(self.step)

    def burst(self) -> None:
        self._stream({f"burst {number}": tensors for number, tensors in enumerate(self.large)})

    def _stream(self, messages: dict[str, Any]) -> None:
        self._next_step()
        for topic, tensors in messages.items():
            if self.is_a:
                self.endpoint.send(self.peer, self.step, topic, tensors)
            else:
                self.endpoint.mailbox.post(self.peer, self.step, topic, tensors)
        if self.is_a:
            self.endpoint.mailbox.receive(self.peer, self.step, "word", self.word)
            return
        for topic, tensors in messages.items():
            self.endpoint.mailbox.receive(self.peer, self.step, topic, tensors)
        self.endpoint.send(self.peer, self.step, "word", self.word)

    def compare(self, size: int) -> list[float]:
        """Return the median seconds of a message's round trip, and those of a stream of messages with its reply."""
        tensors = self._of_size(size)
        self._next_step()
        seconds = []
        for number, tensor in enumerate(tensors):
            start = time.perf_counter()
            if self.is_a:
                self.endpoint.send(self.peer, self.step, f"{size} {number}", tensor)
            self.endpoint.mailbox.receive(self.peer, self.step, f"{size} {number}", tensor)
            if not self.is_a:
                self.endpoint.send(self.peer, self.step, f"{size} {number}", tensor)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        self._stream({f"{size} {number}": tensor for number, tensor in enumerate(tensors)})
        return [statistics.median(seconds), time.perf_counter() - start]

    def _of_size(self, size: int) -> list[Any]:
        """Return messages of this size, each in memory of its own."""
        count = len(self.large)
        return [[self.large[number % count][0][number // count * size :][:size]] for number in range(messages_of(size))]

    def prepare_dying(self) -> None:
        import torch

        self.dying = [torch.ones(DYING_BYTES, dtype=torch.uint8)]
        self._next_step()

    def send_dying(self) -> None:
        self.endpoint.send(self.peer, self.step, "dying", self.dying)
        self.endpoint.flush(LIMIT_SECONDS)

    def receive_dying(self) -> None:
        self.endpoint.mailbox.receive(self.peer, self.step, "dying", self.dying)


class EncryptedEndpointLink(EndpointLink):
    encrypted = True


class SharedEndpointLink(EndpointLink):
    """The transport with every payload, however small, through shared memory."""

    shared_bytes = 4 * 2**20


LINKS: dict[str, Any] = {
    "raw": RawLink,
    "tcp": EndpointLink,
    "tls": EncryptedEndpointLink,
    "shm": SharedEndpointLink,
    "zeromq": ZeroMqLink,
    "zeromq_curve": CurveLink,
    "gloo": GlooLink,
}


def _answer(value: object) -> None:
    print("@" + json.dumps(value), flush=True)


def serve(kind: str, role: str) -> None:
    """Carry out the commands on stdin until they end."""
    link: LinkEnd = LINKS[kind](role)
    pings = 0
    for line in sys.stdin:
        command, argument = json.loads(line)
        if command == "start":
            _answer(link.start())
        elif command == "connect":
            link.connect(argument)
            _answer("connected")
        elif command == "ping":
            seconds = []
            for _ in range(argument):
                start = time.perf_counter()
                link.ping(pings)
                pings += 1
                seconds.append(time.perf_counter() - start)
            _answer(seconds)
        elif command == "burst":
            start = time.perf_counter()
            link.burst()
            _answer(time.perf_counter() - start)
        elif command == "compare":
            assert isinstance(link, EndpointLink)
            _answer(link.compare(argument))
        elif command == "send_dying":
            link.prepare_dying()
            _answer("go")
            link.send_dying()
        elif command == "receive_dying":
            link.prepare_dying()
            _answer("go")
            try:
                link.receive_dying()
                outcome = "arrived"
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            _answer([time.monotonic(), outcome])


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
