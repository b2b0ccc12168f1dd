"""How a worker reads what launched it: torchrun's and Slurm's variables, and where it says that it is reached."""

from __future__ import annotations

import socket

import pytest

from manyhands.facts.errors import BadValue
from manyhands.runtime.addresses import Advertised, of_slot
from manyhands.session.launching import Launch, check_data_port, launched, parse_advertise, parse_health_port

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}  # fmt: skip
"""As torchrun 2.13 sets them: two machines with four processes each."""
SLURM = {
    "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_NTASKS": "7", "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}  # fmt: skip
"""As srun 22.05 sets them: three machines."""


def test_torchrun() -> None:
    assert launched(TORCHRUN) == Launch("torchrun", 5, 8, 1, 4, "node-0", 7077)
    assert launched(TORCHRUN | {"MANYHANDS_LISTEN": "0.0.0.0:7100"}) == Launch("torchrun", 5, 8, 1, 4, "node-0", 7100)


def test_slurm() -> None:
    assert launched(SLURM) == Launch("slurm", 4, 7, 0, 3, "10.0.0.7", 7077)
    without = {name: value for name, value in SLURM.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    assert launched(without | {"SLURM_SRUN_COMM_HOST": "login"}) == Launch("slurm", 4, 7, 0, 3, "login", 7077)
    with pytest.raises(BadValue, match="neither SLURM_LAUNCH_NODE_IPADDR nor"):
        launched(without)


def test_torchrun_within_slurm_is_torchrun() -> None:
    launch = launched(TORCHRUN | SLURM)
    assert launch is not None
    assert launch.launcher == "torchrun"
    launch = launched(TORCHRUN | SLURM, "slurm")
    assert launch is not None
    assert launch.launcher == "slurm"


@pytest.mark.parametrize(
    "environment",
    [{}, {"MASTER_ADDR": "node-0"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0"}, TORCHRUN | {"RANK": ""}],
    ids=["nothing", "an address alone", "no address", "a batch script, which is no step", "an empty rank"],
)
def test_what_no_launcher_has_set(environment: dict[str, str]) -> None:
    assert launched(environment) is None


def test_none_looks_at_nothing() -> None:
    assert launched(TORCHRUN | SLURM, "none") is None


@pytest.mark.parametrize(
    ("environment", "launcher", "reported"),
    [
        ({}, "torchrun", "torchrun has not started this"),
        (TORCHRUN, "slurm", "srun has not started this"),
        (TORCHRUN, "mpi", "it must be one of auto, none, torchrun, slurm"),
        (TORCHRUN | {"RANK": "five"}, "auto", "RANK is 'five'; it must be a number from 0"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "auto", "WORLD_SIZE is '0'; it must be a number from 1"),
        (SLURM | {"SLURM_LOCALID": "-1"}, "auto", "SLURM_LOCALID is '-1'"),
        (SLURM | {"MANYHANDS_LISTEN": "0.0.0.0:99999"}, "auto", "at most 65535"),
    ],
)
def test_mistakes(environment: dict[str, str], launcher: str, reported: str) -> None:
    with pytest.raises(BadValue) as caught:
        launched(environment, launcher)
    assert reported in str(caught.value)
    assert caught.value.hint or "at most" in reported


def test_what_a_rank_is_called_and_computes_on() -> None:
    several, single = Launch("slurm", 3, 8, 1, 2, "a", 1), Launch("slurm", 3, 4, 0, 1, "a", 1)
    assert (several.name("node"), single.name("node")) == ("node-1", "node")
    assert several.compute("cpu", None) == "cpu"
    assert several.compute("cuda:0", None) == "cuda:0", "typed"
    assert several.compute("cuda", None) == several.compute("cuda", "0,1") == "cuda:1"
    assert several.compute("cuda", "3") == "cuda", "the launcher shows each its own"
    assert "rank 3 of 8, 2 of 2 on this machine; joining a:1." in several.text
    assert "rank 3 of 4; joining [::1]:1." in Launch("slurm", 3, 4, 0, 1, "::1", 1).text


def test_a_coordinator_on_loopback_is_not_where_other_machines_reach_its_neighbours() -> None:
    """A machine's own name is often 127.0.1.1 there."""
    assert Launch("torchrun", 0, 2, 0, 2, "localhost", 1).advertised() is None, "no other machine takes part"
    advertised = Launch("torchrun", 0, 4, 0, 2, "localhost", 1).advertised()
    assert advertised is not None
    assert advertised.port == 0
    assert Launch("torchrun", 0, 4, 0, 2, "192.0.2.1", 1).advertised() is None


def test_addresses_to_advertise() -> None:
    assert parse_advertise("127.0.0.1") == Advertised("127.0.0.1")
    assert parse_advertise("192.0.2.77:7079") == Advertised("192.0.2.77", 7079), "another machine forwards"
    for text, reported in (
        ("192.0.2.77", "192.0.2.77 is not an address of this machine"), ("0.0.0.0", "stands for every address"),
        ("no such host.", "is not an address"), ("192.0.2.77:0x", "is not an address"),
    ):  # fmt: skip
        with pytest.raises(BadValue, match=reported):
            parse_advertise(text)
    with pytest.raises(BadValue) as caught:
        parse_advertise("192.0.2.77")
    assert "--advertise 192.0.2.77:PORT --data-port PORT" in caught.value.hint


def test_where_it_listens() -> None:
    assert Advertised("10.0.0.1").listening_host("10.0.0.9") == "10.0.0.1"
    assert Advertised("10.0.0.1", 7079).listening_host("172.17.0.2") == "0.0.0.0"
    assert Advertised("10.0.0.1", 7079).listening_host("fd00::2") == "::"


def test_the_ports_of_slots_follow_one_another() -> None:
    assert of_slot(1, Advertised("10.0.0.1", 7079), 7080) == (Advertised("10.0.0.1", 7079), 7080)
    assert of_slot(3, Advertised("10.0.0.1", 7079), 7080) == (Advertised("10.0.0.1", 7081), 7082)
    assert of_slot(3, Advertised("10.0.0.1"), 0) == (Advertised("10.0.0.1"), 0)
    assert check_data_port(65535, 1) == 65535
    for port, slots in ((65535, 2), (65536, 1), (-1, 1)):
        with pytest.raises(BadValue, match="--data-port is"):
            check_data_port(port, slots)


def test_where_health_is_answered() -> None:
    assert parse_health_port("8080", 1) == ("127.0.0.1", 8080)
    assert parse_health_port("0.0.0.0:8080", 1) == ("0.0.0.0", 8080)
    assert parse_health_port("[::]:8080", 1) == ("::", 8080)
    for text in ("99999", "host", "1.2.3.4:99999", ""):
        with pytest.raises(BadValue):
            parse_health_port(text, 1)
    with pytest.raises(BadValue, match="--slots 2 are as many processes"):
        parse_health_port("8080", 2)


def test_a_name_that_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(BadValue, match="Name or service not known"):
        parse_advertise("elsewhere")
    assert Launch("torchrun", 0, 4, 0, 2, "elsewhere", 1).advertised() is None
