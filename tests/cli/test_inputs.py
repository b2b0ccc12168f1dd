"""`manyhands plan --cluster local:N`: this machine's own times, and which they are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from forking import run_command

from manyhands.explaining.what_if import with_speed
from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.optimizer import parse
from manyhands.facts.profile import DeviceProfile, Profile, estimate
from manyhands.files.documents import write_document
from manyhands.plans.local_cluster import threads_each
from manyhands.plans.local_profiles import is_plain_local, keep_links, local_times
from manyhands.plans.networks import capture_model, load_network
from manyhands.plans.planning import plan
from manyhands.plans.simulating import simulate
from manyhands.profiler.store import load_profile, profile_path, save_profile
from manyhands.profiler.this_machine import identify
from manyhands.session.measuring import profile_place

pytestmark = pytest.mark.xdist_group("train")  # its workers are started once
TIMES = 20.0
"""Slower than any of the machines that this may run on is than itself a moment later."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in which this machine is a slow one: 0.5 GFLOP/s for each of two workers."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    threads = threads_each(2)
    machine = identify(threads)
    device = Device(
        name="local",
        kind="local",
        gflops=0.5,
        memory_bytes=10**10,
        memory_bytes_per_second=1e9,
        cores=machine.cores,
        estimated=False,
    )
    document = {"machine": machine.text, "cluster": Cluster("this machine", (device,)).to_dict()}
    write_document(tmp_path / "home" / "machines" / f"{machine.slug}.json", document)
    return tmp_path / "home"


def planned(*words: str, cwd: Path) -> Any:
    shown = run_command(
        "plan", "-m", "tiny", "-c", "local:2", "-b", "32", "--share", "samples", "--no-what-if", "--json", *words,
        cwd=cwd,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def slower(profile: DeviceProfile, times: float) -> DeviceProfile:
    alone = Cluster.local(1)
    return with_speed(alone, Profile({"local-1": profile}), ("local-1",), 1 / times)[1].of("local-1")


@pytest.mark.slow
def test_a_run_is_planned_with_what_the_last_one_measured(home: Path, tmp_path: Path) -> None:
    """It was planned with a guess of 50 GFLOP/s a worker: 3 ms of what took 52."""
    words = ("train", "--devices", "2", "--batch-size", "32", "--steps", "3", "--json", "--out", "run")
    trained = run_command(*words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    known = planned(cwd=tmp_path)
    assert "measured on this machine" in known["times"]
    assert "by a run of as many workers" in known["times"]
    assert known["simulation"]["warnings"] == []
    found = [path for path in (home / "profiles").glob("*_2workers_*.json") if not path.name.endswith(".rate.json")]
    assert len(found) == 1
    save_profile(slower(load_profile(found[0]), TIMES), found[0])
    again = planned(cwd=tmp_path)
    assert again["simulation"]["seconds"] > 5 * known["simulation"]["seconds"]
    shown = run_command("plan", "-m", "tiny", "-c", "local:2", "--no-what-if", cwd=tmp_path)
    assert f"Times: measured on this machine ({identify(threads_each(2)).text})" in shown.stdout


@pytest.mark.slow
def test_stored_profiles_serve_the_most_fitting_first(home: Path) -> None:
    """Where a run of as many workers keeps its profile it is found, also beside one of `manyhands profile`."""
    graph, cluster, machine = capture_model("tiny"), Cluster.local(2), identify(threads_each(2))
    network = graph.network
    guessed = local_times(network, cluster)
    assert "estimated from the measured speed of this machine" in guessed.note
    assert guessed.profile.is_estimated

    def measured(gflops: float) -> DeviceProfile:
        guess = estimate(network, Device(name="x", gflops=gflops, memory_bytes=10**9))
        return msgspec.structs.replace(guess, source="measured", machine=machine.text)

    save_profile(measured(7.0), profile_path(network, machine))
    known = local_times(network, cluster)
    assert "by manyhands profile, alone" in known.note
    assert [known.profile.of(name).layers for name in known.cluster.names] == [measured(7.0).layers] * 2

    facts = SimpleNamespace(slowdown=1, compute="cpu")
    session: Any = SimpleNamespace(
        cluster=cluster, is_local=True, threads=threads_each(2), kind="",
        coordinator=SimpleNamespace(members={"local-1": SimpleNamespace(facts=facts)}),
    )  # fmt: skip
    place = profile_place(session, graph, "local-1", parse("SGD:lr=0.1,momentum=0.9"))
    save_profile(measured(3.0), place)
    write_document(place.with_suffix(".rate.json"), 1e9)
    known = local_times(network, cluster)
    assert "by a run of as many workers" in known.note
    assert known.profile.of("local-2").layers == measured(3.0).layers


def test_links_are_those_that_the_last_run_found(home: Path) -> None:
    found = Cluster.local(2, bytes_per_second=123e6, delay_seconds=4e-3, estimated=False)
    keep_links(found, threads_each(2))
    known = local_times(load_network("tiny"), Cluster.local(2)).cluster
    assert known.link == found.link
    assert {device.gflops for device in known.devices} == {0.5 * min(1, identify().cores / 2)}, "speed is not the run's"


def test_an_estimate_is_by_this_machines_cores(home: Path) -> None:
    network, cluster = load_network("tiny"), Cluster.local(2)
    known = local_times(network, cluster)
    assert {device.gflops for device in known.cluster.devices} == {0.5 * min(1, identify().cores / 2)}
    assert sum(device.memory_bytes for device in known.cluster.devices) <= 10**10
    chosen = plan(network, cluster, batch_size=32, strategy="samples").plan
    own = simulate(chosen, network, known.cluster, known.profile)
    assert own.seconds > 5 * simulate(chosen, network, cluster).seconds
    assert own.warnings == ["Times are estimated from the devices' speed, not measured."]


@pytest.mark.slow
def test_a_files_own_numbers_count(tmp_path: Path) -> None:
    assert is_plain_local(Cluster.local(3))
    assert not is_plain_local(Cluster.local(3, gflops=12.0))
    write_document(tmp_path / "mine.yaml", Cluster.local(2, gflops=12.0).to_dict())
    shown = run_command("plan", "-m", "tiny", "-c", "mine.yaml", "--no-what-if", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "Times: " not in shown.stdout
