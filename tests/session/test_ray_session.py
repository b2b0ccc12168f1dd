"""Workers on a real Ray cluster of this machine: they train exactly, and one that is lost is replaced by Ray.

They need `pip install ray`, which the project's own tests do without.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn import functional

import manyhands as mh
from manyhands.facts.errors import BadValue, NotInstalled, Refused, TimedOut
from manyhands.runtime import admission
from manyhands.session import measuring
from manyhands.session.opening import open_session
from real_runs import BATCH, Pictures, network, trained_alone

STEPS, KILL_AT = 8, 3


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"count": 0}, "0 workers asked for; it must be 1 to 1000"),
        ({"count": 2, "num_cpus": 0}, "num_cpus is 0; it must be > 0"),
        ({"count": 2, "num_gpus": 0.5}, "num_gpus is 0.5; it must be 0 or 1"),
        ({"count": 2, "memory_bytes": -1}, "memory_bytes is -1"),
        ({"count": 2, "resources": {"edge": 0}}, "resources: 'edge' is 0; it must be > 0"),
        ({"count": 2, "address": "ray://head:10001"}, "Ray Client runs this script outside of the cluster"),
    ],
)
def test_mistakes(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(BadValue, match=reported):
        mh.Cluster.ray(**options)


def test_what_each_worker_asks_ray_for() -> None:
    plain = mh.Cluster.ray(2)
    assert (plain.names, plain.threads, plain.compute) == (("ray-1", "ray-2"), 1, "cpu")
    assert plain.requests() == {"num_cpus": 1.0, "num_gpus": 0.0}
    more = mh.Cluster.ray(1, num_cpus=2, num_gpus=1, memory_bytes=10**9, resources={"edge": 1})
    assert (more.threads, more.compute) == (2, "cuda:0")
    assert more.requests() == {"num_cpus": 2, "num_gpus": 1, "memory": 10**9, "resources": {"edge": 1}}


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotInstalled, match=r"mh\.Cluster\.ray needs ray") as caught, open_session(mh.Cluster.ray(2)):
        pass
    assert "pip install ray" in caught.value.hint


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of one machine, with three CPUs as it counts them."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - else 15: beside other tests they would hardly run
    module = pytest.importorskip("ray", reason="pip install ray")
    module.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield module
    module.shutdown()


def actors() -> list[psutil.Process]:
    """The processes of Ray that run a worker."""
    return [one for one in psutil.process_iter(["cmdline"]) if "ray::RayActor" in " ".join(one.info["cmdline"] or [])]


def workers_of(port: int) -> list[psutil.Process]:
    address = f":{port}"
    return [
        one for one in psutil.process_iter(["cmdline"])
        if "worker" in (words := one.info["cmdline"] or []) and any(word.endswith(address) for word in words)
    ]  # fmt: skip


class Kill(mh.Callback):
    """Kills one of Ray's actors with what it has started, as a machine that fails does."""

    def __init__(self) -> None:
        self.killed = 0

    def on_step(self, context: mh.CallbackContext) -> None:
        if context.step == KILL_AT and not self.killed:
            victim = actors()[0]
            self.killed = victim.pid
            os.kill(victim.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_they_train_exactly_though_an_actor_dies(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    model, kill, reports = network(dropout=0.0), Kill(), list[str]()
    with open_session(mh.Cluster.ray(2), say=reports.append) as session:
        coordinator = session.coordinator
        processes = {name: member.identity.process for name, member in coordinator.members.items()}
        port = coordinator.address[1]
        mh.train(
            model, Pictures(), loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05), batch_size=BATCH,
            steps=STEPS, shuffle=False, plan="samples", cluster=coordinator, folder=tmp_path / "run", callbacks=[kill],
        )  # fmt: skip
        assert kill.killed
        coordinator.wait_for(["ray-1", "ray-2"], 300)
        after = {name: member.identity.process for name, member in coordinator.members.items()}
        assert sum(after[name] != process for name, process in processes.items()) == 1, "one was replaced"
        assert len(workers_of(port)) == 2
    assert any("Ray starts another" in text for text in reports)
    assert workers_of(port) == []
    for name, expected in trained_alone(STEPS).items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-10, atol=1e-10)
    assert ray.is_initialized(), "it was there before"


@pytest.mark.slow
def test_more_than_ray_has_is_refused_with_what_it_has(ray: Any) -> None:
    cluster = mh.Cluster.ray(2, num_cpus=64)
    with (
        pytest.raises(TimedOut, match=r"Ray's cluster has 3 CPU \([\d.]+ free\)") as caught,
        open_session(cluster, limit_seconds=3),
    ):
        pass
    assert "Each worker asks for 64 CPU" in caught.value.hint


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_of_another_version_is_not_started_again(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "__version__", "9.0")
    reports: list[str] = []
    with (
        pytest.raises(Refused, match="ended with exit code 12") as caught,
        open_session(mh.Cluster.ray(1), say=reports.append, limit_seconds=200),
    ):
        pass
    assert "the coordinator runs 9.0" in caught.value.hint
    assert not [text for text in reports if "Ray starts another" in text]
