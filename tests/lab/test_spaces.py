"""What a lab's network is to be, decided without making it."""

from __future__ import annotations

import math
import platform
from pathlib import Path

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadValue, LabError, UnknownName
from manyhands.facts.link import DirectedLink, Link
from manyhands.lab import spaces
from manyhands.lab.lines import PortFlow
from manyhands.lab.spaces import Spaces

MBIT = 125_000.0


def device(name: str, up: float = math.inf, down: float = math.inf) -> Device:
    return Device(name=name, gflops=1, memory_bytes=10**9, up_bytes_per_second=up, down_bytes_per_second=down)


def cluster(*names: str, link: Link = Link(math.inf, 0.0), links: tuple[DirectedLink, ...] = ()) -> Cluster:  # noqa: B008
    return Cluster("x", tuple(device(name, 100 * MBIT, 100 * MBIT) for name in names), link, links)


def test_who_is_where() -> None:
    found = Spaces("a", cluster("pi4-1", "nano"))
    assert found.members == ("desk", "pi4-1", "nano")
    assert (found.hub, found.namespace("pi4-1"), found.namespace("desk")) == ("mh-a", "mh-a-pi4-1", "mh-a-desk")
    assert (found.address("desk"), found.address("nano")) == ("10.77.0.1", "10.77.0.3")
    assert (found.port("nano"), found.number("nano")) == ("p2", 2)
    with pytest.raises(UnknownName, match="nono"):
        found.address("nono")


def test_the_desk_is_taken() -> None:
    with pytest.raises(LabError, match="coordinator's place"):
        Spaces("a", cluster("desk"))
    with pytest.raises(BadValue, match="cannot name a lab"):
        Spaces("a-b", cluster("nano"))


@pytest.mark.parametrize("netem", [True, False])
def test_a_switch_only_where_delays_need_it(monkeypatch: pytest.MonkeyPatch, netem: bool) -> None:
    monkeypatch.setattr(spaces, "has_netem", lambda: netem)
    assert not Spaces("a", cluster("x", "y")).uses_switch
    assert Spaces("a", cluster("x", "y", link=Link(MBIT, 0.01))).uses_switch is not netem
    one = DirectedLink("x", "y", Link(MBIT, 0.01))
    assert Spaces("a", cluster("x", "y", links=(one,))).uses_switch is not netem
    assert Spaces("a", cluster("x", "y"), uses_switch=True).uses_switch


def test_only_pairs_slower_than_both_ports_have_a_class() -> None:
    links = (DirectedLink("x", "y", Link(5 * MBIT, 0.01)), DirectedLink("y", "x", Link(500 * MBIT, 0.0)))
    shaped = Spaces("a", cluster("x", "y", "z", links=links), uses_switch=True)
    assert shaped.flows("y") == [PortFlow(1, 5 * MBIT)]
    assert shaped.flows("x") == shaped.flows("z") == []
    held = Spaces("a", cluster("x", "y", "z", links=links), uses_switch=False)
    assert held.flows("y") == [PortFlow(1, 5 * MBIT, 0.01)]


def test_a_lab_is_told_from_others_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mh-a", "mh-a-desk", "mh-a-b-c", "mh-ab", "mh-ab-desk", "mh-a.b", "other", "mh-old-desk"):
        (tmp_path / name).touch()
    monkeypatch.setattr(spaces, "_FOLDER", tmp_path)
    assert Spaces.names_of("a") == ["mh-a", "mh-a-b-c", "mh-a-desk"]
    assert Spaces.names_of("old") == ["mh-old-desk"]
    assert Spaces.exists("ab")
    assert not Spaces.exists("b")
    monkeypatch.setattr(spaces, "_FOLDER", tmp_path / "nothing")
    assert not Spaces.exists("a")


def test_the_kernels_words_are_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "ip"
    tool.write_text("#!/bin/sh\ncat >/dev/null\necho 'RTNETLINK answers: File exists' >&2\n"
                    "echo 'Command failed -:2' >&2\nexit 1\n")  # fmt: skip
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(LabError, match="`ip link add b` failed: RTNETLINK answers: File exists"):
        spaces.run_batch("ip", ["link add a", "link add b"])
    spaces.run_batch("ip", ["link add a"], forced=True)
    spaces.run_batch("ip", [])


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert spaces.missing() == "Network namespaces exist on Linux only; this is Darwin."
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in spaces.missing()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path: None if name == "tc" else name)
    assert spaces.missing() == "The command `tc` is not here: install iproute2 (apt install iproute2)."


def test_a_rate_of_nothing_is_refused() -> None:
    found = Spaces("a", cluster("x"))
    with pytest.raises(BadValue, match="must be > 0"):
        found.set_rates("x", 0.0, 1.0)
    with pytest.raises(UnknownName):
        found.set_rates("desk", 1.0, 1.0)


def test_a_namespace_that_is_not_there_cannot_be_entered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spaces, "_FOLDER", tmp_path)
    monkeypatch.setattr(spaces, "_call", lambda *words: None)
    with pytest.raises(LabError, match="'mh-a' cannot be entered: No such file"), spaces.entered("mh-a"):
        pytest.fail("entered")


def test_an_error_inside_is_the_one_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plain user may neither go nor come back; what he is told is the first."""

    def refuse(*words: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "mh-a").touch()
    monkeypatch.setattr(spaces, "_FOLDER", tmp_path)
    monkeypatch.setattr(spaces, "_call", refuse)
    with pytest.raises(LabError, match="'mh-a' cannot be entered: Operation not permitted"), spaces.entered("mh-a"):
        pytest.fail("entered")


def test_a_ports_rate_is_read_from_what_tc_says() -> None:
    def tbf(rate: float, **more: object) -> dict[str, object]:
        return {"kind": "tbf", "options": {"rate": rate, "burst": 3028}, **more}

    assert spaces.port_rate([]) == math.inf
    assert spaces.port_rate([{"kind": "noqueue", "root": True, "options": {}}]) == math.inf
    assert spaces.port_rate([tbf(125_000, root=True)]) == 125_000
    htb = {"kind": "htb", "root": True, "options": {}}
    assert spaces.port_rate([htb, tbf(250_000, parent="1:2"), tbf(1000, parent="1:11")]) == 250_000
    assert spaces.port_rate([tbf(12.5e9, root=True)]) == math.inf
