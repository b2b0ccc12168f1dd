"""Coordinator and workers on different hosts, as far as the kernel can tell: network namespaces joined by a bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.facts.errors import WorkerLost
from manyhands.runtime.coordinator import Coordinator
from manyhands.session import measuring
from real_runs import Pictures, assert_close, marked, network, shared, train

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` command here"),
]

WORKERS = ("alpha", "zulu")
"""One before and one after 'coordinator': of two names the smaller one connects."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """A bridge of this host and a namespace for each worker."""

    tag: str
    subnet: str
    address: str

    def namespace(self, name: str) -> str:
        return f"mh-{self.tag}-{name}"

    def link(self, name: str) -> str:
        return f"mh{self.tag}{name[0]}"

    def up(self) -> None:
        bridge = self.link("bridge")
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{self.address}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(WORKERS, start=2):
            space = self.namespace(name)
            ip("netns", "add", space)
            ip("link", "add", self.link(name), "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", self.link(name), "master", bridge, "up")
            ip("-n", space, "address", "add", f"{self.subnet}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        for name in (*WORKERS, "bridge"):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("link", "delete", self.link(name))
            if name != "bridge":
                with contextlib.suppress(subprocess.CalledProcessError):
                    ip("netns", "delete", self.namespace(name))


@contextlib.contextmanager
def standing(found: Hosts) -> Iterator[Hosts]:
    """For as long as they are needed."""
    try:
        try:
            found.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces cannot be made here: {error.stderr}")
        yield found
    finally:
        found.down()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    number = os.getpid() % 250
    with standing(Hosts(f"{os.getpid() % 10**6}", f"10.213.{number}", f"10.213.{number}.1")) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator on all addresses of this host, and workers by the command a person types."""
    patch, mark = pytest.MonkeyPatch(), f"namespaces-{os.getpid()}"
    patch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    processes = []
    logs = tmp_path_factory.mktemp("logs")
    try:
        with Coordinator("0.0.0.0") as coordinator:
            for name in WORKERS:
                words = [
                    "ip", "netns", "exec", hosts.namespace(name), sys.executable, "-m", "manyhands", "worker",
                    "--join", f"{hosts.address}:{coordinator.address[1]}", "--token", coordinator.token,
                    "--name", name, "--threads", "1", "--wait", "10",
                ]  # fmt: skip
                with open(logs / f"{name}.log", "wb") as log:
                    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MANYHANDS_MARK": mark}
                    processes.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment))
            coordinator.wait_for(WORKERS, 60)
            yield coordinator
        for name, process in zip(WORKERS, processes):
            process.wait(45)  # one that was cut off waits for the coordinator to come back
            if name == "alpha":
                assert process.returncode == 0, (logs / "alpha.log").read_text()
        assert not marked(mark)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        patch.undo()


def test_training_between_hosts_is_exact_and_encrypted(cluster: Coordinator, hosts: Hosts, tmp_path: Path) -> None:
    assert cluster.encrypted
    assert {member.address[0] for member in cluster.members.values()} == {f"{hosts.subnet}.2", f"{hosts.subnet}.3"}
    ran = train(cluster, shared(WORKERS, 5, 7), tmp_path / "hosts", steps=20)
    ran.assert_as_planned()
    one = train(cluster, "single", tmp_path / "single", steps=20)
    assert_close(ran.state, one.state)
    found = mh.evaluate(network(), Pictures(20), batch_size=12, cluster=cluster)
    assert found.accuracy is not None


def test_a_cable_that_is_pulled_is_done_without(cluster: Coordinator, hosts: Hosts, tmp_path: Path) -> None:
    """Nothing is said any more, not even goodbye: the silence is noticed, and the other goes on to the same weights."""
    fired: list[float] = []
    went_on: list[float] = []

    def at_step(step: int, loss: float, seconds: float) -> None:
        if fired and not went_on and step > 6:
            went_on.append(time.monotonic())
        if step == 3:
            ip("-n", hosts.namespace("zulu"), "link", "set", "eth0", "down")
            fired.append(time.monotonic())

    plan = shared(WORKERS, 5, 7)
    ran = train(cluster, plan, tmp_path / "pulled", steps=40, on_step=at_step)
    assert fired, "the fault did not fire"
    assert went_on[0] - fired[0] < cluster.times.timeout_seconds + 6
    assert ran.result.plan.devices == ("alpha",)
    assert len(ran.result.losses) == 40
    assert len(ran.result.recoveries) == 1
    alone = train(cluster, "single", tmp_path / "alone", steps=40)
    assert_close(ran.state, alone.state)
    start = time.monotonic()
    with pytest.raises(WorkerLost, match="zulu was lost before this began"):
        cluster.members_for(["zulu"])
    assert time.monotonic() - start < 2
