"""The baselines of the transport's micro-benchmark: a bare socket, ZeroMQ and gloo."""

from __future__ import annotations

import datetime
import importlib
import socket
import time
from typing import Any

from manyhands_bench.core.link_protocol import (
    BURST_MESSAGE_BYTES,
    BURST_MESSAGES,
    DYING_BYTES,
    GLOO_LIMIT_SECONDS,
    HOST,
    LIMIT_SECONDS,
    PING_BYTES,
)


class RawLink:
    """A plain socket."""

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


class ZeroMqLink:
    """ZeroMQ by pyzmq's PAIR sockets; a monitor reports a lost peer, because a receive does not."""

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
        ready = dict(poller.poll(LIMIT_SECONDS * 1000))
        if self.socket not in ready:
            raise ConnectionResetError("its monitor says disconnected" if ready else "its time-out passed")
        self.socket.recv(copy=False)


class CurveLink(ZeroMqLink):
    encrypted = True


class GlooLink:
    """Gloo by torch.distributed's send and recv."""

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
