"""Workers that stand for slower devices: what they say of themselves, what they measure, how they are kept apart."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import UnknownName, WorkerLost
from manyhands.facts.profile import DeviceProfile, LayerTiming, Timing
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.runtime import timing_here
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.joining import Joining
from manyhands.runtime.measuring import measure_on
from manyhands.runtime.worker import Worker
from manyhands.session.measuring import alike, profile_place
from manyhands.session.session import Session
from manyhands.transport.transport import TcpTransport
from real_runs import Pictures, network


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(network(dropout=0.0), Pictures(4).pictures)


def profile_of(graph: Graph, name: str, forward: float) -> DeviceProfile:
    found = graph.network
    layers = tuple(LayerTiming(layer.name, (Timing(4, forward, 2 * forward),)) for layer in found.layers)
    return DeviceProfile(found.name, found.fingerprint, found.input_text, found.granularity, name, "measured", layers)


def work(worker: Worker) -> None:
    with suppress(WorkerLost):  # the connection may break before it has read that it is to leave
        worker.run()


@pytest.mark.slow
def test_what_a_slow_worker_measures(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it will take; others are not concerned."""
    monkeypatch.setattr(timing_here, "measure_network", lambda graph, **rest: profile_of(graph, rest["device"], 0.5))
    monkeypatch.setattr(timing_here, "step_bytes_per_second", lambda *rest: 8e9)
    with Coordinator(heartbeat_seconds=0.1) as coordinator:
        threads = []
        for name, slowdown in (("edge", 4.0), ("server", 1.0)):
            joining = Joining(*coordinator.address, coordinator.token, name, slowdown=slowdown)
            worker = Worker(joining, TcpTransport())
            threads.append(threading.Thread(target=work, args=(worker,), daemon=True))
            threads[-1].start()
        coordinator.wait_for(("edge", "server"), 10)
        found = measure_on(coordinator, graph, ("edge", "server"), ladder=(4,), seconds=1.0, kernels={})
        assert found["edge"].profile.layer_seconds(0, 4) == (2.0, 4.0)
        assert found["edge"].memory_bytes_per_second == 2e9
        assert found["server"].profile.layer_seconds(0, 4) == (0.5, 1.0)
        assert found["server"].memory_bytes_per_second == 8e9
    for thread in threads:
        thread.join(5)


def test_unequal_workers_of_one_machine_keep_their_own_numbers(graph: Graph) -> None:
    cluster = Cluster.local(3)
    members = {
        name: SimpleNamespace(facts=SimpleNamespace(slowdown=slowdown, compute="cpu"))
        for name, slowdown in zip(cluster.names, (4.0, 1.0, 1.0))
    }
    coordinator: Any = SimpleNamespace(members=members)
    session = Session(coordinator, cluster, True, 1)
    first, second, third = cluster.names
    known = {first: (profile_of(graph, first, 4.0), 2e9), second: (profile_of(graph, second, 1.0), 8e9),
             third: (profile_of(graph, third, 2.0), 4e9)}  # fmt: skip
    found = alike(session, known)
    assert found[first] == known[first]
    assert found[second][0].layer_seconds(0, 4) == found[third][0].layer_seconds(0, 4) == (1.5, 3.0)
    places = {profile_place(session, graph, name, None) for name in cluster.names}
    assert len(places) == 2


@pytest.mark.slow
def test_a_process_is_as_slow_as_it_was_asked_to_be() -> None:
    cluster = Cluster.local(1)
    (name,) = cluster.names
    with Coordinator.local_cluster(cluster, slowdowns={name: 2.5}) as coordinator:
        assert coordinator.members[name].facts.slowdown == 2.5


def test_nobody_is_slow() -> None:
    with pytest.raises(UnknownName, match="nobody"):
        Coordinator.local_cluster(Cluster.local(1), slowdowns={"nobody": 2.0})
