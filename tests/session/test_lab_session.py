"""Labs as typed, and what stands in for one where there can be none."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadFile, BadValue, LabError, UnknownName
from manyhands.facts.lab import play
from manyhands.facts.link import Link
from manyhands.job import base as job
from manyhands.session import lab_session as labs
from manyhands.session import measuring
from manyhands.session.lab_session import lab_cluster
from real_runs import assert_close, shared, train


@pytest.mark.parametrize(("gflops", "scale", "limit"), [(50.0, 1.0, 5.0), (10.0, 1.0, 20.0), (50.0, 8.0, 40.0)])
def test_a_device_with_little_of_a_core_is_given_time(gflops: float, scale: float, limit: float) -> None:
    """At least that of the lab's scale; a tenth of a core hears nothing for ten times as long."""
    devices = tuple(Device(name=name, gflops=speed, memory_bytes=10**9) for name, speed in (("a", 50.0), ("b", gflops)))
    asked = LabCluster(Cluster("two", devices, Link(1e6, 0.0)), scale=scale)
    played = play(asked, core_gflops=100.0 / scale, cores=[0, 1])
    assert labs.HEARTBEAT_TIMEOUT_SECONDS * labs._timeout_factor(played) == pytest.approx(limit)


def test_what_is_typed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("0 10\n")
    found = lab_cluster("edge-cloud", scale=200.0, traces=(str(trace),))
    assert found.traces == (("edge", str(trace)),)
    assert lab_cluster("home", slots=2, traces=(f"nano={trace}",)).traces == (("nano", str(trace)),)
    up = tmp_path / "up.txt"
    up.write_text("0 2\n")
    assert lab_cluster("edge-cloud", traces=(f"edge={up},{trace}",)).traces == (("edge", f"{up},{trace}"),)
    with pytest.raises(BadValue, match="there is no file"):
        lab_cluster("home", traces=("nowhere.txt",))
    with pytest.raises(BadValue, match=r"there is no file nowhere\.txt"):
        lab_cluster("edge-cloud", traces=(f"edge={up},nowhere.txt",))
    with pytest.raises(UnknownName, match="nanoo"):
        lab_cluster("home", traces=(f"nanoo={trace}",))
    trace.write_text("0 fast\n")
    with pytest.raises(BadFile, match=r"trace\.txt:1: '0 fast' is not a moment and a rate"):
        lab_cluster("edge-cloud", traces=(str(trace),))
    with pytest.raises(BadValue, match="this machine itself"):
        lab_cluster("local:2")
    with pytest.raises(UnknownName, match="pi3x7"):
        lab_cluster("pi3x7")


def test_no_lab_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "missing", lambda: "Network namespaces need root.")
    with pytest.raises(LabError, match="There can be no lab here: Network namespaces need root") as found:
        labs.bring_up(Cluster.lab("pi3x6"))
    assert not found.value.hint


@pytest.mark.slow
def test_plain_processes_behind_shaped_links_train_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, its steps take as long as the links make them, and the bytes are the plan's."""
    monkeypatch.setattr(labs, "missing", lambda: "Network namespaces need root.")
    monkeypatch.setattr(job.Job, "write_pictures", lambda *_: None)
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    devices = tuple(Device(name=name, gflops=1.0, memory_bytes=10**9) for name in ("slow", "far"))
    asked = LabCluster(Cluster("shaped", devices, Link(1e6, 0.02)), scale=2.0)
    said: list[str] = []
    ran = train(asked, shared(("slow", "far"), 5, 7), tmp_path / "shaped", steps=6, say=said.append)
    ran.assert_as_planned()
    assert any("There can be no lab here: Network namespaces need root" in text for text in said)
    assert ran.result.scale == 2.0
    assert ran.result.stands_in
    # Two batch norms forward, two back, gradients in two rounds: each waits for a delay of 2 x 20 ms.
    assert ran.result.measured_seconds > 6 * 0.04
    one = train(Cluster.local(1), "single", tmp_path / "one", steps=6)
    assert_close(ran.state, one.state)
