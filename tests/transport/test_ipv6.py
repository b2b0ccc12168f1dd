"""The same over IPv6: an address that means both families, loopback that is plain, tensors between two devices."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import torch
from endpoint_pairs import joined

from manyhands.facts.errors import AddressTaken, BadValue
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.identity import interface_address
from manyhands.runtime.joining import Joining
from manyhands.runtime.worker import Worker
from manyhands.session.joining import join_text, listen_on, parse_address, reachable
from manyhands.transport.channel import Listener, connect
from manyhands.transport.listener import listen
from manyhands.transport.security import Security, is_loopback


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def test_tensors_travel(security: Security) -> None:
    with joined(security, {"x": 4000}, host="::1") as (a, b):
        sent, came = torch.arange(1000.0), torch.empty(1000)
        a.send("b", 0, "x", [sent])
        b.mailbox.receive("a", 0, "x", [came])
        assert torch.equal(sent, came)


def test_two_colons_mean_both_families(security: Security) -> None:
    listener = Listener("::", 0, security)
    try:
        for host in ("::1", "127.0.0.1"):
            channel = connect(host, listener.address[1], security, 5.0)
            accepted = listener.accept(5.0)
            assert accepted is not None
            assert accepted.peer_host == accepted.local_host == channel.peer_host == host, "one spelling on both sides"
            for end in (channel, accepted):
                end.close()
    finally:
        listener.close()


@pytest.mark.parametrize(("host", "is_here"), [
    ("::1", True), ("[::1]", True), ("::ffff:127.0.0.1", True), ("::", False), ("fd00::1", False),
    ("::ffff:10.0.0.1", False), ("fe80::1%lo", False),
])  # fmt: skip
def test_loopback(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here


def test_a_worker_joins_a_coordinator_of_its_own_machine() -> None:
    with Coordinator("::1") as coordinator:
        assert not coordinator.encrypted
        host, port = parse_address(coordinator.join_command().split()[-1])
        worker = Worker(Joining(host, port, coordinator.token, "a"))
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        coordinator.wait_for(["a"], 10)
        assert f"[::1]:{port}" in join_text(coordinator)
        assert worker.endpoint.address[0] == "::1"
    thread.join(5)


def test_an_address_in_use_is_shown_in_brackets() -> None:
    with contextlib.closing(listen("::1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressTaken, match=rf"Cannot listen on \[::1\]:{port}: address already in use"):
            listen("::1", port)


def test_where_others_reach_all_addresses() -> None:
    """A machine without an IPv6 address of its own is reached by IPv4."""
    assert reachable("::") not in ("::", "")
    assert reachable("fd00::1") == "fd00::1"


@pytest.mark.parametrize("text", ["::1", "fd00::5", "fd00::5:7077"])
def test_an_address_without_brackets_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(BadValue, match="is not an address") as refused:
        parse_address(text, 7077)
    assert "[fd00::5]:7077" in refused.value.hint


# Interfaces


def test_the_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("lo", "fd00::1") == "::1", "of the family that leads to the coordinator"


def test_an_interface_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadValue, match="The interface 'tailscale9' is not here") as refused:
        interface_address("tailscale9")
    assert "lo (127.0.0.1)" in refused.value.hint


def test_a_coordinator_listens_on_an_interface() -> None:
    assert listen_on("lo") == "127.0.0.1"
    assert listen_on("lo", "0.0.0.0:7000") == listen_on("lo", "127.0.0.1:7000") == "127.0.0.1:7000"
    assert listen_on("lo", "[::]:7000") == "[::1]:7000"
    assert parse_address(listen_on("lo", "[::]:7000")) == ("::1", 7000)
    with pytest.raises(BadValue, match=r"--interface lo has 127\.0\.0\.1; --listen says 10\.0\.0\.1") as refused:
        listen_on("lo", "10.0.0.1:7000")
    assert "--listen 0.0.0.0:7000" in refused.value.hint


def test_a_worker_meets_others_on_the_interface_it_names() -> None:
    """Joined over IPv4 loopback, it listens where the interface says."""
    with Coordinator("127.0.0.1") as coordinator:
        worker = Worker(Joining(*coordinator.address, coordinator.token, "a", interface="lo"))
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        coordinator.wait_for(["a"], 10)
        assert coordinator.members["a"].address == worker.endpoint.address
        assert worker.endpoint.address[0] == "127.0.0.1"
    thread.join(5)
    assert not thread.is_alive()
