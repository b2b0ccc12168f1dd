"""The candidates of the engine's micro-benchmark, each as two processes that talk to each other.

    python -m manyhands_bench.core.links raw b ...      # prints its address, then serves
    python -m manyhands_bench.core.links raw a ...      # measures

Commands come as lines of JSON on stdin, answers leave as lines beginning with '@' (gloo prints to stdout too).
What a candidate does not need is not imported: torch alone takes seconds.
"""

from __future__ import annotations

import datetime
import importlib
import json
import socket
import statistics
import sys
import time
from typing import Any, Protocol

PING_BYTES = 4096
BURST_MESSAGE_BYTES = 16 * 2**20
BURST_MESSAGES = 4
DYING_BYTES = 256 * 2**20
PINGS_AT_ONCE = 200
SIZES = {"4kb": 4096, "64kb": 64 * 1024, "128kb": 128 * 1024, "1mb": 2**20, "16mb": 16 * 2**20}
"""At which sizes memory in common is compared with TCP."""
MOST_MESSAGES_OF_A_SIZE = 32
LIMIT_SECONDS = 30.0
GLOO_LIMIT_SECONDS = 10.0
HOST = "127.0.0.1"


class BenchLink(Protocol):
    """One end: `a` begins, `b` answers."""

    def start(self) -> str:
        """Of `b`: where it listens."""

    def connect(self, address: str) -> None: ...

    def ping(self, number: int) -> None:
        """`a` sends 4 KB and has them back; `b` returns them."""

    def burst(self) -> None:
        """`a` sends some messages of 16 MB and has a word back; `b` takes them into memory it has."""

    def prepare_dying(self) -> None:
        """Take the memory first, for that alone takes longer than the message is under way."""

    def send_dying(self) -> None:
        """`b` sends one large message and is killed meanwhile."""

    def receive_dying(self) -> None:
        """`a` waits for it."""


class RawLink:
    """A socket and nothing else."""

    def __init__(self, role: str) -> None:
        self.is_a = role == "a"
        self.small = memoryview(bytearray(PING_BYTES))
        self.large = memoryview(bytearray(BURST_MESSAGE_BYTES))
        self.listening: socket.socket | None = None

    def start(self) -> str:
        self.listening = socket.create_server((HOST, 0))
        return str(self.listening.getsockname()[1])

    def connect(self, address: str) -> None:
        if self.listening is not None:
            self.listening.settimeout(LIMIT_SECONDS)
            self.socket = self.listening.accept()[0]
        else:
            self.socket = socket.create_connection((HOST, int(address)), timeout=LIMIT_SECONDS)
        self.socket.setblocking(True)  # a timeout would cost a poll in each call
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _receive(self, view: memoryview) -> None:
        place = 0
        while place < len(view):
            count = self.socket.recv_into(view[place:])
            if not count:
                raise ConnectionResetError("closed by the other side")
            place += count

    def ping(self, number: int) -> None:
        if self.is_a:
            self.socket.sendall(self.small)
        self._receive(self.small)
        if not self.is_a:
            self.socket.sendall(self.small)

    def burst(self) -> None:
        for _ in range(BURST_MESSAGES):
            self.socket.sendall(self.large) if self.is_a else self._receive(self.large)
        self._receive(self.small[:1]) if self.is_a else self.socket.sendall(b"\0")

    def prepare_dying(self) -> None:
        self.dying = memoryview(bytearray(b"\1") * DYING_BYTES)

    def send_dying(self) -> None:
        self.socket.sendall(self.dying)

    def receive_dying(self) -> None:
        self._receive(self.dying)


def messages_of(size: int) -> int:
    """How many of this size make a stream."""
    return max(2, min(MOST_MESSAGES_OF_A_SIZE, 32 * 2**20 // size))


class EndpointLink:
    """This package's engine, over TCP alone."""

    encrypted = False
    shared_bytes = 0

    def __init__(self, role: str) -> None:
        import torch

        from manyhands.engine.security import Security
        from manyhands.engine.sharing import SharingSetting
        from manyhands.engine.tcp import TcpEndpoint

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
        """Seconds of one message there and back, the median of some, and of a stream of them with a word back."""
        tensors = self._of_size(size)
        self._next_step()
        seconds = []
        for number, one in enumerate(tensors):
            start = time.perf_counter()
            if self.is_a:
                self.endpoint.send(self.peer, self.step, f"{size} {number}", one)
            self.endpoint.mailbox.receive(self.peer, self.step, f"{size} {number}", one)
            if not self.is_a:
                self.endpoint.send(self.peer, self.step, f"{size} {number}", one)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        self._stream({f"{size} {number}": one for number, one in enumerate(tensors)})
        return [statistics.median(seconds), time.perf_counter() - start]

    def _of_size(self, size: int) -> list[Any]:
        """Messages of this size, each in memory of its own."""
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
    """The engine with every payload, however small, through memory in common."""

    shared_bytes = 4 * 2**20


class ZeroMqLink:
    """pyzmq, PAIR sockets; a monitor tells of a lost peer, for a receive does not."""

    encrypted = False

    def __init__(self, role: str) -> None:
        import zmq

        self.zmq: Any = zmq
        self.is_a = role == "a"
        self.socket: Any = zmq.Context().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVTIMEO, int(LIMIT_SECONDS * 1000))
        self.socket.setsockopt(zmq.SNDTIMEO, int(LIMIT_SECONDS * 1000))
        self.small = bytearray(PING_BYTES)
        self.large = memoryview(bytearray(BURST_MESSAGE_BYTES))
        self.monitor: Any = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def start(self) -> str:
        key = ""
        if self.encrypted:
            public, secret = self.zmq.curve_keypair()
            self.socket.curve_server, self.socket.curve_secretkey, self.socket.curve_publickey = True, secret, public
            key = public.decode()
        return f"{self.socket.bind_to_random_port(f'tcp://{HOST}')} {key}"

    def connect(self, address: str) -> None:
        if not self.is_a:
            return
        port, _, key = address.partition(" ")
        if self.encrypted:
            public, secret = self.zmq.curve_keypair()
            self.socket.curve_secretkey, self.socket.curve_publickey = secret, public
            self.socket.curve_serverkey = key.encode()
        self.socket.connect(f"tcp://{HOST}:{port}")

    def ping(self, number: int) -> None:
        if self.is_a:
            self.socket.send(self.small)
        self.small[:] = self.socket.recv()
        if not self.is_a:
            self.socket.send(self.small)

    def burst(self) -> None:
        for _ in range(BURST_MESSAGES):
            if self.is_a:
                self.socket.send(self.large, copy=False)
            else:
                self.large[:] = self.socket.recv(copy=False).buffer
        self.socket.recv() if self.is_a else self.socket.send(b"\0")

    def prepare_dying(self) -> None:
        self.dying = bytearray(b"\1") * DYING_BYTES

    def send_dying(self) -> None:
        self.socket.send(self.dying, copy=False)
        time.sleep(LIMIT_SECONDS)

    def receive_dying(self) -> None:
        poller = self.zmq.Poller()
        poller.register(self.socket, self.zmq.POLLIN)
        poller.register(self.monitor, self.zmq.POLLIN)
        found = dict(poller.poll(LIMIT_SECONDS * 1000))
        if self.socket not in found:
            raise ConnectionResetError("its monitor says disconnected" if found else "its time-out passed")
        self.socket.recv(copy=False)


class CurveLink(ZeroMqLink):
    encrypted = True


class GlooLink:
    """torch.distributed's send and recv."""

    def __init__(self, role: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch: Any = torch
        self.is_a = role == "a"
        self.small = torch.zeros(PING_BYTES, dtype=torch.uint8)
        self.large = torch.zeros(BURST_MESSAGE_BYTES, dtype=torch.uint8)
        self.word = torch.zeros(1, dtype=torch.uint8)

    def start(self) -> str:
        with socket.create_server((HOST, 0)) as free:
            self.port = str(free.getsockname()[1])
        return self.port

    def connect(self, address: str) -> None:
        distributed: Any = importlib.import_module("torch.distributed")
        limit = datetime.timedelta(seconds=GLOO_LIMIT_SECONDS)
        store = distributed.TCPStore(HOST, int(address or self.port), 2, is_master=not self.is_a, timeout=limit)
        self.group: Any = distributed
        rank, self.other = (0, 1) if self.is_a else (1, 0)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)

    def ping(self, number: int) -> None:
        if self.is_a:
            self.group.send(self.small, self.other)
        self.group.recv(self.small, self.other)
        if not self.is_a:
            self.group.send(self.small, self.other)

    def burst(self) -> None:
        for _ in range(BURST_MESSAGES):
            (self.group.send if self.is_a else self.group.recv)(self.large, self.other)
        (self.group.recv if self.is_a else self.group.send)(self.word, self.other)

    def prepare_dying(self) -> None:
        self.dying = self.torch.ones(DYING_BYTES, dtype=self.torch.uint8)

    def send_dying(self) -> None:
        self.group.send(self.dying, self.other)

    def receive_dying(self) -> None:
        self.group.recv(self.dying, self.other)


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
    """Obey the commands on stdin until they end."""
    link: BenchLink = LINKS[kind](role)
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
