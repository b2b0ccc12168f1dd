"""Devices that come and go, as people type it: Ctrl-C on a worker is a departure, and the run goes on."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from command_processes import Command, leftovers

from manyhands.runtime.coordinator import Coordinator


@pytest.mark.slow
@pytest.mark.parametrize("in_slots", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "slots"])
def test_ctrl_c_on_a_worker_is_a_departure(tmp_path: Path, in_slots: bool) -> None:
    """As a terminal sends it: to the whole group, so that each of several workers on a device hears it twice."""
    heard: list[str] = []
    names = ["pi.1", "pi.2"] if in_slots else ["pi"]
    more = ("--slots", "2") if in_slots else ()
    with Coordinator(on_event=heard.append) as coordinator:
        where = "{}:{}".format(*coordinator.address)
        words = ("worker", "--join", where, "--token", coordinator.token, "--name", "pi", "--threads", "1", *more)
        worker = Command(tmp_path, words, in_group=True)
        coordinator.wait_for(names, 60)
        worker.interrupt()
        assert worker.ended(30) == 0, worker.text
        assert all(coordinator.members[name].has_left for name in names)
    for name in names:
        assert f"{name} has left." in worker.text
        assert f"{name} left" in heard
    assert not [text for text in heard if "lost" in text]
    assert "Stopped" not in worker.text
    assert leftovers(worker.mark) == []


@pytest.mark.slow
def test_one_of_two_leaves_and_the_run_goes_on_and_can_be_gone_on_with(tmp_path: Path) -> None:
    """`--devices 2:6`: it waits for two, goes on with one; what it prints in the end brings the devices back."""
    options = ("--listen", "127.0.0.1:0", "--devices", "2:6")
    shared = ("--share", "samples")
    train = Command(tmp_path, ("train", *options, *shared, "--steps", "1000000", "--out", "run"))
    found = re.search(r"manyhands (worker --join \S+)", train.wait_for("manyhands worker --join"))
    assert found is not None
    join = found.group(1).split()
    leaving, staying = (Command(tmp_path, (*join, "--name", name, "--threads", "1")) for name in ("leaving", "staying"))
    wait_for_step(tmp_path / "run", 5)
    leaving.interrupt()
    assert leaving.ended(60) == 0, leaving.text
    assert "leaving leaves as soon as others have what it holds" in leaving.text
    assert "leaving has left." in leaving.text
    train.wait_for("leaving leaves and hands over.")
    train.wait_for("leaving has left.")
    train.wait_for("Going on with staying from step")
    train.interrupt()
    assert train.ended(60) == 130, train.text
    assert f"Go on with: manyhands train --resume run {' '.join(options)}\n" in train.text
    assert staying.ended(60) == 0, staying.text
    kinds = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert kinds.count("left") == 1
    assert "lost" not in kinds
    assert "waiting" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("floor", [1, 2])
def test_one_of_two_is_killed(tmp_path: Path, floor: int) -> None:
    """The other has every layer: it goes on at once, unless --min-devices says that two are needed."""
    words = ("--listen", "127.0.0.1:0", "--devices", "2:6", "--min-devices", str(floor), "--steps", "1000000")
    train = Command(tmp_path, ("train", *words, "--share", "samples", "--out", "run"))
    found = re.search(r"manyhands (worker --join \S+)", train.wait_for("manyhands worker --join"))
    assert found is not None
    join = found.group(1).split()
    killed, other = (Command(tmp_path, (*join, "--name", name, "--threads", "1")) for name in ("killed", "other"))
    wait_for_step(tmp_path / "run", 5)
    killed.kill()
    train.wait_for("Worker killed was lost at step")
    if floor == 1:
        train.wait_for("Going on with other from step")
    else:
        train.wait_for("1 worker(s) left, 2 needed: waiting 60 s for others.")
    train.interrupt()
    assert train.ended(60) == 130, train.text
    assert ("--devices 2:6 --min-devices 2" in train.text) is (floor == 2)
    assert other.ended(60) == 0, other.text
    assert killed.ended(10) == -signal.SIGKILL


def wait_for_step(folder: Path, step: int, limit_seconds: float = 90.0) -> None:
    """Until the run has reported it."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        metrics = folder / "metrics.csv"
        if metrics.exists() and f"\n{step}," in metrics.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached within {limit_seconds:g} s")
