"""Small labs for tests, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.device import Device
from manyhands.facts.lab import play
from manyhands.facts.link import Link
from manyhands.lab import groups, record
from manyhands.lab.lab import Lab
from manyhands.lab.removal import labs, take_down
from manyhands.lab.spaces import Spaces

ROOT_ONLY = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root"),
    pytest.mark.skipif(shutil.which("tc") is None, reason="there is no `tc` command here"),
    pytest.mark.xdist_group("lab"),
]
CORE_GFLOPS = 10.0
"""Devices' speeds are shares of it."""


def cluster(
    *speeds: float, name: str, delay: float = 0.001, rate: float = 12.5e6, memory_bytes: int = 10**9
) -> Cluster:
    devices = tuple(
        Device(
            name=f"d{number}", gflops=CORE_GFLOPS * speed, memory_bytes=memory_bytes, up_bytes_per_second=rate,
            down_bytes_per_second=rate,
        )
        for number, speed in enumerate(speeds, 1)
    )  # fmt: skip
    return Cluster(name, devices, Link(rate, delay))


def tag() -> str:
    return f"t{os.getpid()}"


@contextlib.contextmanager
def small_lab(*speeds: float, **options: float | int) -> Iterator[Lab]:
    asked = LabCluster(cluster(*speeds, name=tag(), **options))  # type: ignore[arg-type]
    played = play(asked, core_gflops=CORE_GFLOPS, cores=sorted(os.sched_getaffinity(0)))
    try:
        with Lab.up(played, tag(), owned=True) as lab:
            yield lab
        assert_nothing_left()
    finally:
        take_down(tag())


def leftovers() -> list[str]:
    """Everything that bears this test's name."""
    name = tag()
    found = [*Spaces.names_of(name), *groups.find().devices(name), *(one for one in labs() if one == name)]
    found += [str(path) for path in record.folder().glob(f"{name}.*")]
    for root in Path("/sys/fs/cgroup").glob("**/manyhands/*"):
        if root.name == name:
            found.append(str(root))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and name in process.cmdline()[1:]:
                found.append(f"process {process.pid}: {process.cmdline()}")
    return found


def assert_nothing_left() -> None:
    assert leftovers() == []


def run_on(lab: Lab, device: str, code: str, limit_seconds: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*lab.words(device), sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_seconds
    )
