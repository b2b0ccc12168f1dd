"""The doctor in a lab: real links, whose rates it must find, and a device that drops what another sends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from lab_places import ROOT_ONLY, assert_nothing_left, cluster, tag

from manyhands.doctor.check import OK, WARNING, PairRate
from manyhands.doctor.network import pair_checks
from manyhands.facts.cluster import LabCluster
from manyhands.lab.lab import Lab
from manyhands.profiler.this_machine import this_machine
from manyhands.session.lab_session import lab_session

pytestmark = ROOT_ONLY

RATE = 12.5e6
NAMES = ("d1", "d2", "d3")


def route(lab: Lab, device: str, *words: str) -> None:
    space = lab.spaces.namespace(device)
    subprocess.run(["ip", "-n", space, "route", *words], check=True, capture_output=True, timeout=10)


def test_what_a_firewall_drops_and_where_there_is_no_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab_places.CORE_GFLOPS", this_machine(threads=1).gflops)
    asked = LabCluster(cluster(0.3, 0.3, 0.3, name=tag(), rate=RATE), scale=1)
    with lab_session(asked, logs=tmp_path, say=lambda text: None, limit_seconds=120) as session:
        lab, links = Lab.find(tag()), list[PairRate]()
        found = list(pair_checks(session.coordinator, NAMES, links, lambda text: None))
        assert [check.state for check in found] == [OK] * 3
        assert len(links) == 6
        assert all(0.5 * RATE < link.bytes_per_second < 1.2 * RATE for link in links), links
        route(lab, "d2", "add", "blackhole", lab.address("d1"))  # what d1 sends arrives, and no answer leaves
        route(lab, "d1", "add", "unreachable", lab.address("d3"))
        links.clear()
        found = list(pair_checks(session.coordinator, NAMES, links, lambda text: None))
        shut = {check.where: check for check in found if check.subject == "reach"}
        assert {where: check.state for where, check in shut.items()} == {"d1, d2": WARNING, "d1, d3": WARNING}
        for where, check in shut.items():
            source, target = where.split(", ")
            assert check.found == "they do not reach each other; the coordinator relays between them"
            assert f"ufw allow proto tcp from {lab.address(source)}" in check.fix
            assert f"On {source}, for what the network says: ping {lab.address(target)}" in check.fix
        assert [check.state for check in found if check.subject != "reach"] == [OK] * 3
        relayed = {(link.source, link.target) for link in links if link.relay}
        assert relayed == {("d1", "d2"), ("d2", "d1"), ("d1", "d3"), ("d3", "d1")}
        assert len(links) == 6
    assert_nothing_left()
