"""Where other devices reach a worker: at a port and an address of its choice, through a forwarded port."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import manyhands as mh
from manyhands.facts.errors import AddressTaken, BadValue
from manyhands.runtime.addresses import Advertised
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.joining import Joining
from manyhands.runtime.service import serve
from manyhands.runtime.worker import Worker
from manyhands.session import measuring
from manyhands.transport.transport import TcpTransport
from real_runs import BATCH, Pictures, network, trained_alone

HERE = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


class Forwarder:
    """Another machine that forwards a port of its own to one of ours, and counts what passes."""

    def __init__(self, port: int) -> None:
        self.to, self.passed, self._open = port, 0, list[socket.socket]()
        self._listening = socket.create_server((HERE, 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outer, _ = self._listening.accept()
                inner = socket.create_connection((HERE, self.to))
                self._open += [outer, inner]
                for ends in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.passed += len(piece)
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for connected in (self._listening, *self._open):
            connected.close()


@contextlib.contextmanager
def joined(coordinator: Coordinator, *options: dict[str, Any]) -> Iterator[None]:
    """Workers pi-1 and so on, in threads of this process."""
    (host, port), token = coordinator.address, coordinator.token
    threads = []
    for number, given in enumerate(options, 1):
        joining = Joining(host, port, token, f"pi-{number}", threads=1, limit_seconds=20, **given)
        words = {"rejoin": False, "transport": TcpTransport()}
        threads.append(threading.Thread(target=serve, args=(joining,), kwargs=words, daemon=True))
        threads[-1].start()
    coordinator.wait_for([f"pi-{number}" for number in range(1, len(options) + 1)], 20)
    yield
    coordinator.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.slow
def test_two_train_exactly_through_forwarded_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from containers whose host publishes their ports: all their data connections come through the forwarders."""
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    ports = [free_port(), free_port()]
    forwarders = [Forwarder(port) for port in ports]
    options = [
        {"data_port": port, "advertised": Advertised(HERE, forwarder.port)}
        for port, forwarder in zip(ports, forwarders, strict=True)
    ]
    model, steps = network(dropout=0.0), 4
    with Coordinator() as coordinator, joined(coordinator, *options):
        addresses = [coordinator.members[name].address for name in ("pi-1", "pi-2")]
        assert addresses == [(HERE, forwarder.port) for forwarder in forwarders]
        mh.train(
            model, Pictures(), loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05), batch_size=BATCH,
            steps=steps, shuffle=False, plan="samples", cluster=coordinator, folder=tmp_path / "run",
        )  # fmt: skip
    assert all(forwarder.passed > 10_000 for forwarder in forwarders)
    for forwarder in forwarders:
        forwarder.close()
    for name, expected in trained_alone(steps).items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-10, atol=1e-10)


def test_a_port_and_an_address_of_its_own() -> None:
    port = free_port()
    with (
        Coordinator() as coordinator,
        joined(coordinator, {"data_port": port, "advertised": Advertised("127.0.0.2")}, {"data_port": port}),
    ):
        assert coordinator.members["pi-1"].address == ("127.0.0.2", port)
        assert coordinator.members["pi-2"].address == (HERE, port)


def test_a_data_port_in_use_is_named() -> None:
    with Coordinator() as coordinator, socket.create_server((HERE, 0)) as taken:
        port = int(taken.getsockname()[1])
        joining = Joining(*coordinator.address, coordinator.token, "pi", threads=1, data_port=port)
        with pytest.raises(AddressTaken, match=f"Cannot listen on {HERE}:{port}: address already in use"):
            Worker(joining, TcpTransport())


def test_nothing_plain_is_advertised_beyond_this_machine() -> None:
    """A coordinator on loopback encrypts nothing."""
    with Coordinator() as coordinator:
        elsewhere = Advertised("192.0.2.1", 9)
        joining = Joining(*coordinator.address, coordinator.token, "pi", threads=1, advertised=elsewhere)
        with pytest.raises(BadValue, match=r"--advertise 192\.0\.2\.1: the coordinator is for this machine only"):
            Worker(joining, TcpTransport())


def test_nothing_plain_is_sent_on_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.runtime.joining.interface_address", lambda interface, like: "192.0.2.1")
    with Coordinator() as coordinator:
        joining = Joining(*coordinator.address, coordinator.token, "pi", threads=1, interface="wlan0")
        with pytest.raises(BadValue, match="--interface wlan0: the coordinator is for this machine only"):
            Worker(joining, TcpTransport())
