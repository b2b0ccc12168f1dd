"""Training on the devices of a lab, by the workers that real devices run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lab_places import ROOT_ONLY, assert_nothing_left, cluster, tag
from torch import nn

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import WorkerLost
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.job import base as job
from manyhands.lab.lab import Lab
from manyhands.lab.removal import labs as labs_that_are_up
from manyhands.session import lab_session as labs
from manyhands.session import measuring
from real_runs import BATCH, LAYERS, Pictures, assert_close, shared, train

pytestmark = ROOT_ONLY


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.Job, "write_pictures", lambda *_: None)
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    speed = labs.this_machine(threads=1).gflops
    monkeypatch.setattr("lab_places.CORE_GFLOPS", speed)


def test_exact_on_unequal_devices_with_slots(tmp_path: Path) -> None:
    """Two slots each, over real links; the scale is in the result."""
    asked = LabCluster(cluster(0.6, 0.3, name=tag()), scale=1.5, slots=2)
    names = ("d1.1", "d1.2", "d2.1", "d2.2")
    seen: list[str] = []

    def watch(step: int, loss: float, seconds: float) -> None:
        if step == 2:
            seen.extend(f"{one.name} {one.processes}" for one in Lab.find(tag()).status())

    ran = train(asked, shared(names, 4, 4, 2, 2), tmp_path / "lab", steps=8, on_step=watch)
    ran.assert_as_planned()
    assert seen == ["d1 3", "d2 3"], "two workers and their parent on each device"
    assert ran.result.scale == 1.5
    assert_nothing_left()
    one = train(Cluster.local(1), "single", tmp_path / "one", steps=8)
    assert_close(ran.state, one.state)


def test_a_device_that_is_cut_off_is_done_without(tmp_path: Path) -> None:
    fired: list[float] = []

    def cut(step: int, loss: float, seconds: float) -> None:
        if step == 3:
            Lab.find(tag()).cut("d2")
            fired.append(time.monotonic())

    asked = LabCluster(cluster(0.3, 0.3, name=tag()))
    ran = train(asked, shared(("d1", "d2"), 6, 6), tmp_path / "cut", steps=30, on_step=cut)
    assert fired, "the fault did not fire"
    assert ran.result.plan.devices == ("d1",)
    assert [one["devices"] for one in ran.result.recoveries] == [["d1"]]
    assert ran.result.recoveries[0]["seconds"] < 30
    assert_nothing_left()
    one = train(Cluster.local(1), "single", tmp_path / "one", steps=30)
    assert_close(ran.state, one.state)


def test_time_that_goes_slowly_is_waited_for(tmp_path: Path) -> None:
    """A round trip of 3 s is none too long where everything takes 60 times as long: nobody is lost."""
    asked = LabCluster(cluster(40, 25, name=tag(), delay=0.025, rate=2e6), scale=60.0)
    ran = train(asked, piped_in_two(), tmp_path, steps=2)
    ran.assert_as_planned()
    assert ran.result.measured_seconds > 2 * 1.5
    assert_nothing_left()


def piped_in_two() -> Plan:
    stages = (Stage((0, 1), ("d1",), Single()), Stage((1, LAYERS), ("d2",), Single()))
    return Plan("Sequential", BATCH, stages)


class Hungry(nn.Module):
    """Takes more memory in its forward pass than anybody planned for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 400_000, 1, 1)
        return x + 0 * wide.mean(dim=1, keepdim=True)


def test_a_device_that_runs_out_of_memory_is_killed_and_named(tmp_path: Path) -> None:
    asked = LabCluster(cluster(0.4, 0.4, name=tag(), memory_bytes=700 * 10**6))
    model = nn.Sequential(Hungry(), nn.Flatten(), nn.Linear(64, 5)).double()
    with pytest.raises(WorkerLost, match=r"d[12] ran out of its 700 MB of memory"):
        train(asked, shared(("d1", "d2"), BATCH // 2, BATCH // 2), tmp_path, model=model, data=Pictures(), steps=3)
    assert len(model) == LAYERS
    assert_nothing_left()


def test_ctrl_c_takes_the_lab_down(tmp_path: Path) -> None:
    words = ["train", "--lab", "home", "--epochs", "1000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Run folder"):
                break
        assert any(lab == "home" for lab in labs_that_are_up()), said
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 130, rest
    finally:
        process.kill()
        process.communicate()
    assert "home" not in labs_that_are_up()
