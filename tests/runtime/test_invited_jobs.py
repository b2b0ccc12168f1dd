"""Jobs over an edge and a server that was invited: same results, same bytes, and every connection goes out."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fault_cluster import FaultCluster, reference
from listening import LIMIT_SECONDS, Listening, ListeningProcess
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.job import base as job
from manyhands.runtime import inviting
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.measuring import probe_pair
from manyhands.runtime.processes import WorkerProcess
from manyhands.session import measuring
from manyhands.transport.security import is_loopback
from real_runs import BATCH, LAYERS, train

SERVER = "a-server"
"""Smaller than all other names: where they decided, it would dial."""


def split(names: tuple[str, ...]) -> Plan:
    """The first layer on one, the others on the other; all on one that is alone."""
    first, last = names[0], names[-1]
    if first == last:
        return Plan("Sequential", BATCH, (Stage((0, LAYERS), names, Single()),), micro_batches=2)
    stages = (Stage((0, 1), ("edge",), Single()), Stage((1, LAYERS), (SERVER,), Single()))
    return Plan("Sequential", BATCH, stages, micro_batches=2)


def connections(process: psutil.Process) -> list[tuple[str, int, str, int, str]]:
    """Near and far ends, and in which state."""
    found = getattr(process, "net_connections", None) or process.connections
    return [
        (
            one.laddr.ip,
            one.laddr.port,
            one.raddr.ip if one.raddr else "",
            one.raddr.port if one.raddr else 0,
            one.status,
        )
        for one in found("inet")
    ]


@pytest.mark.slow
def test_a_server_that_comes_and_goes_in_the_middle_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in this process: it is cut off, the edge goes on alone, and it is invited again."""
    monkeypatch.setattr(inviting, "PAUSES_SECONDS", (0.02, 0.05))
    with FaultCluster(("edge",)) as cluster:
        transport, coordinator = cluster.transport, cluster.coordinator
        server = Listening(SERVER, transport=transport)
        keeper = coordinator.keep_inviting(*server.address, server.token)
        cluster.until(lambda: len(coordinator.alive()) == 2)
        others: list[Listening] = []

        def cut() -> None:
            transport.cut(SERVER)
            server.stop()
            cluster.until(lambda: len(coordinator.alive()) == 1)

        def restart() -> None:
            others.append(Listening(SERVER, transport=transport, port=server.address[1], token=server.token))
            cluster.until(lambda: len(coordinator.alive()) == 2)

        trip = cluster.travel(
            split(("edge", SERVER)), at_step={2: cut, 4: restart}, rewrite=lambda old, names: split(names)
        )
        keeper.close()
        trip.check(reference(2), generations=3)
        assert [len(plan.devices) for plan in trip.plans] == [1, 2]
        assert others[0].error is None
    others[0].stop()


def test_a_server_that_is_asked_to_end_hands_over() -> None:
    with FaultCluster(("edge",)) as cluster, Listening(SERVER, transport=cluster.transport) as server:
        cluster.coordinator.invite(*server.address, server.token)

        def ask() -> None:
            server.stopping.set()
            cluster.until(lambda: cluster.coordinator.members[SERVER].is_leaving)

        trip = cluster.travel(split(("edge", SERVER)), at_step={2: ask}, rewrite=lambda old, names: split(names))
        trip.check(reference(2), generations=2)
        assert trip.outcome.replayed_steps == 0
        assert trip.events == ["leaving", "replanned", "recovered", "left"]
        server.thread.join(LIMIT_SECONDS)
        assert not server.thread.is_alive()
        assert server.error is None


@pytest.mark.slow
def test_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encrypted; killed and started again; who has connected to whom is what the kernel says."""
    monkeypatch.setattr(job.Job, "write_pictures", lambda *_: None)
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    server = ListeningProcess(SERVER)
    again: ListeningProcess | None = None
    try:
        with Coordinator() as coordinator:
            coordinator.start_workers([WorkerProcess(("edge",))], 1, 60)
            assert coordinator.invite(*server.address, server.token) == SERVER
            coordinator.keep_inviting(*server.address, server.token)
            looked = []

            def look(step: int, loss: float | None, seconds: float) -> None:
                if not looked:
                    edge = coordinator.members["edge"].facts.pid
                    looked.append({pid: connections(psutil.Process(pid)) for pid in (psutil.Process().pid, edge)})
                    looked.append({server.process.pid: connections(psutil.Process(server.process.pid))})

            ran = train(coordinator, split(("edge", SERVER)), tmp_path / "run", steps=4, on_step=look)
            ran.assert_as_planned()
            edge_side, server_side = looked
            for found in edge_side.values():
                assert all(is_loopback(near) for near, _, _, _, state in found if state == psutil.CONN_LISTEN)
            listens, port = [], server.address[1]
            for near, near_port, _, _, state in server_side[server.process.pid]:
                if state == psutil.CONN_LISTEN:
                    listens.append((near, near_port))
                else:
                    assert near_port == port, "the server has dialled somebody"
            assert listens == [server.address], "one port for all"
            out = {pid: [far for _, _, _, far, state in found if far == port] for pid, found in edge_side.items()}
            assert {pid: len(ports) for pid, ports in out.items()} == {
                psutil.Process().pid: 2,  # control and data
                coordinator.members["edge"].facts.pid: 1,
            }

            lost = coordinator.members[SERVER]
            server.kill()
            again = ListeningProcess(SERVER, token=server.token, port=port)
            coordinator.wait_for(["edge", SERVER], LIMIT_SECONDS)
            assert lost.is_lost
            found = probe_pair(coordinator, ("edge", SERVER), {"edge": 100_000, SERVER: 100_000})
            assert set(found) == {"edge", SERVER}, "data passes both ways"
        again.process.terminate()
        words = again.words()
        assert again.process.returncode == 0, words
        assert "has ended its run" in words
    finally:
        for one in (server, again):
            if one is not None:
                one.kill()
