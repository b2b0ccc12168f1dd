"""Whether devices may form process groups together, and the store by which they find each other."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from manyhands.facts.device import Device
from manyhands.facts.errors import AddressTaken, BadValue, ManyhandsError, NotInstalled, Refused
from manyhands.job.collectives_config import CollectivesConfig
from manyhands.runtime.collective_store import obstacle, store_at
from manyhands.runtime.control_parts import Facts
from manyhands.runtime.identity import Identity
from manyhands.runtime.inviting import Invitation
from manyhands.runtime.member import Member
from manyhands.transport.library_sockets import listening
from manyhands.transport.security import Security


def member(
    name: str, host: str = "127.0.0.1", torch: str = "2.13.0+cpu", backends: tuple[str, ...] = ("gloo",)
) -> Member:
    channel: Any = None
    facts = Facts("a machine", 4, 4, 10**9, torch, backends=backends)
    return Member(name, channel, (host, 7000), Device(name=name, gflops=1.0, memory_bytes=10**9), facts, Identity())


def members(*made: Member) -> dict[str, Member]:
    return {one.name: one for one in made}


def test_devices_of_one_machine_may() -> None:
    assert obstacle(members(member("a"), member("b", torch="2.13.0+cu130")), trusts_network=False) is None


def test_beyond_loopback_only_where_the_network_is_trusted() -> None:
    devices = members(member("a", "10.0.0.1"), member("b", "10.0.0.2"))
    error = obstacle(devices, trusts_network=False)
    assert isinstance(error, BadValue)
    assert "not encrypted" in error.message
    assert "--trusted-network" in error.hint
    assert obstacle(devices, trusts_network=True) is None


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        (member("b", torch="2.6.0"), Refused, "a has 2.13.0, b 2.6.0"),
        (member("b", backends=()), NotInstalled, "The PyTorch of b, 2.13.0+cpu, has no gloo"),
        (
            replace(member("b"), invitation=Invitation("h", 1, Security("12345678", encrypted=False))),
            BadValue,
            "b was connected to",
        ),
    ],
)
def test_what_else_is_in_the_way(other: Member, kind: type[ManyhandsError], text: str) -> None:
    error = obstacle(members(member("a"), other), trusts_network=False)
    assert isinstance(error, kind)
    assert text in error.message
    assert "--collectives" in error.hint


def test_the_store_listens_at_its_address_alone_and_ends() -> None:
    before = listening()
    store, port = store_at("127.0.0.1")
    assert listening() - before == {("127.0.0.1", port)}
    del store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(AddressTaken, match=r"192\.0\.2\.1"):
        store_at("192.0.2.1")


def test_groups_beyond_this_machine_are_refused_before_any_device_joins() -> None:
    with pytest.raises(BadValue, match="does not encrypt"):
        CollectivesConfig(collectives="torch").check_joining("0.0.0.0:7077")
    for config, listen in (
        (CollectivesConfig(collectives="torch", trusted_network=True), "0.0.0.0:7077"),
        (CollectivesConfig(collectives="torch"), "127.0.0.1:7077"),
        (CollectivesConfig(collectives="auto"), "0.0.0.0:7077"),
        (CollectivesConfig(), "0.0.0.0:7077"),
    ):
        config.check_joining(listen)
    with pytest.raises(BadValue, match="trusted-network is for"):
        CollectivesConfig(trusted_network=True)


def test_what_a_device_says_of_its_backends_travels() -> None:
    facts = member("a").facts
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts).backends == ("gloo",)
