"""Control groups in a tree of plain files: what would be written where."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue, LabError
from manyhands.lab import control_groups_v2, groups
from manyhands.lab.control_groups import ControlGroups, GroupStatistics, quota_and_period
from manyhands.lab.control_groups_v1 import ControlGroupsV1
from manyhands.lab.control_groups_v2 import ControlGroupsV2

V1_FILES = {
    "cpu": {
        "cpu.cfs_quota_us": "-1",
        "cpu.cfs_period_us": "100000",
        "cpu.stat": "nr_periods 5\nthrottled_time 250000000",
    },
    "cpuacct": {"cpuacct.usage": "1500000000"},
    "memory": {
        "memory.limit_in_bytes": "9223372036854771712",
        "memory.memsw.limit_in_bytes": "9223372036854771712",
        "memory.usage_in_bytes": "4096",
        "memory.max_usage_in_bytes": "8192",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    },
    "freezer": {"freezer.state": "THAWED"},
}
V2_FILES = {
    "cgroup.subtree_control": "",
    "cgroup.freeze": "0",
    "cgroup.events": "populated 1\nfrozen 0",
    "cpu.max": "max 100000",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1\nthrottled_usec 250000",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.current": "4096",
    "memory.peak": "8192",
    "memory.events": "low 0\nmax 7\noom 2\noom_kill 2",
}


class Tree:
    """A kernel of plain files: new folders have files in them, and go with them."""

    def __init__(self, root: Path, files: Callable[[Path], dict[str, str]]) -> None:
        self.root, self.files = root, files
        root.mkdir(exist_ok=True)

    def fill(self, folder: Path) -> None:
        for name, text in {"cgroup.procs": "", **self.files(folder)}.items():
            (folder / name).write_text(text + "\n")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            if not path.is_dir():
                os.mkdir(path)
                self.fill(path)

        def rmdir(path: Path) -> None:
            if any(child.is_dir() for child in path.iterdir()):
                raise OSError(16, "Device or resource busy")
            shutil.rmtree(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ControlGroupsV1, Path]:
    root = tmp_path / "cgroup"
    root.mkdir()
    for controller in V1_FILES:
        (root / controller).mkdir()
    tree = Tree(root, lambda folder: V1_FILES[folder.relative_to(root).parts[0]])
    tree.install(monkeypatch)
    return ControlGroupsV1(root / "cpu", root / "memory", root / "freezer", root / "cpuacct"), root


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ControlGroupsV2, Path]:
    root = tmp_path / "cgroup"
    tree = Tree(root, lambda folder: V2_FILES)
    tree.fill(root)
    tree.install(monkeypatch)
    return ControlGroupsV2(root), root


def text(path: Path) -> str:
    return path.read_text().strip()


def test_version_one_is_given_its_limits(first: tuple[ControlGroupsV1, Path]) -> None:
    found, root = first
    found.make("a", "pi4-1", 0.25, 64_000_000)
    assert text(root / "cpu/manyhands/a/pi4-1/cpu.cfs_quota_us") == "2500"
    assert text(root / "cpu/manyhands/a/pi4-1/cpu.cfs_period_us") == "10000"
    assert text(root / "memory/manyhands/a/pi4-1/memory.limit_in_bytes") == "64000000"
    assert text(root / "memory/manyhands/a/pi4-1/memory.memsw.limit_in_bytes") == "64000000"
    found.set_cpu("a", "pi4-1", None)
    assert text(root / "cpu/manyhands/a/pi4-1/cpu.cfs_quota_us") == "-1"
    found.enter("a", "pi4-1")
    for controller in V1_FILES:
        assert text(root / controller / "manyhands/a/pi4-1/cgroup.procs") == "0"
    found.freeze("a", "pi4-1")
    assert found.statistics("a", "pi4-1") == GroupStatistics(1.5, 0.25, 4096, 8192, 64_000_000, 2, True)
    found.thaw("a", "pi4-1")
    assert not found.is_frozen("a", "pi4-1")
    found.make("a", "pi4-1", None, None)
    assert text(root / "memory/manyhands/a/pi4-1/memory.limit_in_bytes") == "-1"
    assert found.statistics("a", "pi4-1").memory_limit_bytes is None


def test_version_two_is_given_its_limits(second: tuple[ControlGroupsV2, Path]) -> None:
    found, root = second
    found.make("a", "pi4-1", 1.5, 64_000_000)
    here = root / "manyhands/a/pi4-1"
    for folder in (root, root / "manyhands", root / "manyhands/a"):
        assert text(folder / "cgroup.subtree_control") == "+cpu +memory"
    assert text(here / "cgroup.subtree_control") == ""  # it has processes of its own
    assert (text(here / "cpu.max"), text(here / "memory.max"), text(here / "memory.swap.max")) == (
        "15000 10000", "64000000", "0",
    )  # fmt: skip
    found.set_cpu("a", "pi4-1", 0.05)
    assert text(here / "cpu.max") == "1000 20000"
    found.set_cpu("a", "pi4-1", None)
    assert text(here / "cpu.max") == "max 10000"
    found.enter("a", "pi4-1")
    assert text(here / "cgroup.procs") == "0"
    assert found.statistics("a", "pi4-1") == GroupStatistics(1.5, 0.25, 4096, 8192, 64_000_000, 2, False)
    (here / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    found.freeze("a", "pi4-1")
    assert text(here / "cgroup.freeze") == "1"
    assert found.statistics("a", "pi4-1").is_frozen
    (here / "memory.peak").unlink()  # before Linux 5.19
    assert found.statistics("a", "pi4-1").peak_bytes == 4096


def test_controllers_already_passed_on_are_left_alone(second: tuple[ControlGroupsV2, Path]) -> None:
    found, root = second
    (root / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    found.make("a", "x", None, None)
    assert text(root / "cgroup.subtree_control") == "cpuset cpu io memory pids"


@pytest.mark.parametrize("version", ["first", "second"])
def test_labs_come_and_go(version: str, request: pytest.FixtureRequest) -> None:
    found: ControlGroups
    found, root = request.getfixturevalue(version)
    for lab, device in (("a", "x"), ("a", "y"), ("b", "x")):
        found.make(lab, device, 0.5, 10**9)
    assert found.labs() == {"a", "b"}
    assert found.devices("a") == {"x", "y"}
    found.remove("a")
    found.remove("a")
    assert found.labs() == {"b"}
    assert found.devices("b") == {"x"}
    found.remove("b")
    assert not list(root.rglob("manyhands"))
    assert found.labs() == set()
    assert found.processes("b", "x") == []


@pytest.mark.parametrize("version", ["first", "second"])
def test_killing_ends_what_is_inside_and_keeps_the_share(
    version: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: ControlGroups
    found, root = request.getfixturevalue(version)
    found.make("a", "x", 0.5, 10**9)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    files = list(root.rglob("x/cgroup.procs"))
    for file in files:
        file.write_text(f"{process.pid}\n")
    assert found.processes("a", "x") == [process.pid]
    kill = os.kill

    def and_empty(number: int, sign: int) -> None:
        kill(number, sign)
        for file in files:
            file.write_text("")

    monkeypatch.setattr(os, "kill", and_empty)
    found.kill("a", "x")
    assert process.wait(5) == -signal.SIGKILL
    assert found.processes("a", "x") == []
    quotas = [text(file) for file in (*root.rglob("x/cpu.cfs_quota_us"), *root.rglob("x/cpu.max"))]
    assert quotas in (["5000"], ["5000 10000"])


@pytest.mark.parametrize("version", ["first", "second"])
def test_the_share_is_what_the_quota_says_now(version: str, request: pytest.FixtureRequest) -> None:
    found: ControlGroups
    found, _ = request.getfixturevalue(version)
    found.make("a", "x", 0.25, None)
    assert found.share("a", "x") == 0.25
    found.set_cpu("a", "x", 0.004)
    assert found.share("a", "x") == pytest.approx(0.004)
    found.set_cpu("a", "x", None)
    assert found.share("a", "x") is None
    with pytest.raises(LabError, match="No such file"):
        found.share("a", "y")


def test_who_comes_in_while_a_group_is_removed_dies_too(
    second: tuple[ControlGroupsV2, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, root = second
    found.make("a", "x", None, None)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    rmdir, inside = Path.rmdir, root / "manyhands/a/x/cgroup.procs"
    tries: list[Path] = []

    def busy_at_first(path: Path) -> None:
        if path.name == "x" and process.poll() is None:
            inside.write_text(f"{process.pid}\n")  # just now
            tries.append(path)
            raise OSError(16, "Device or resource busy")
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", busy_at_first)
    found.remove("a")
    assert process.wait(5) == -signal.SIGKILL
    assert tries
    assert found.labs() == set()


def test_version_two_is_tried_before_it_is_promised(
    second: tuple[ControlGroupsV2, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, root = second
    before = sorted(path.name for path in root.iterdir())
    assert found.refused() == ""
    assert text(root / "cgroup.subtree_control") == "+cpu +memory"
    assert sorted(path.name for path in root.iterdir()) == before

    def refuse(path: Path, words: str) -> None:
        raise LabError(f"'{words}' cannot be written to {path}: {os.strerror(16)}.")

    control_groups_v2._refused.cache_clear()
    (root / "cgroup.subtree_control").write_text("\n")
    monkeypatch.setattr(control_groups_v2, "write_file", refuse)
    monkeypatch.setattr(groups, "find", lambda: found)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert "Device or resource busy. The root group holds processes" in groups.missing()
    assert sorted(path.name for path in root.iterdir()) == before
    control_groups_v2._refused.cache_clear()


@given(st.floats(min_value=0.001, max_value=64.0))
def test_quotas_are_what_the_kernel_takes(share: float) -> None:
    quota, period = quota_and_period(share)
    assert quota >= 1000
    assert 10_000 <= period <= 1_000_000
    assert quota / period == pytest.approx(share, rel=0.002)
    assert period == 10_000 or share < 0.1


def test_absurd_values_are_refused(second: tuple[ControlGroupsV2, Path]) -> None:
    found, _ = second
    for share in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(BadValue, match="must be"):
            quota_and_period(share)
    with pytest.raises(BadValue, match="must be > 0"):
        found.make("a", "x", None, 0)
    for lab, device in (("a", "../x"), ("..", "x"), ("a", ""), ("a-b", "x")):
        with pytest.raises(BadValue, match="cannot name"):
            found.make(lab, device, None, None)


def test_a_process_that_cannot_be_seen_is_not_taken_for_a_group_of_processes(
    second: tuple[ControlGroupsV2, Path],
) -> None:
    found, root = second
    found.make("a", "x", None, None)
    (root / "manyhands/a/x/cgroup.procs").write_text("0\n")
    assert found.processes("a", "x") == []


def test_what_fails_is_said(second: tuple[ControlGroupsV2, Path]) -> None:
    found, _ = second
    with pytest.raises(LabError, match=r"cpu.max: No such file"):
        found.set_cpu("a", "x", 0.5)


def test_the_version_with_controllers_is_found(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    unified = tmp_path / "unified"
    unified.mkdir()
    controllers = unified / "cgroup.controllers"
    controllers.write_text("\n")
    mounts.write_text(
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /c/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
        "cgroup /c/memory cgroup rw,memory 0 0\n"
        "cgroup /c/freezer cgroup rw,freezer 0 0\n"
        f"cgroup2 {unified} cgroup2 rw 0 0\n"
    )
    found = groups.find(mounts)
    assert isinstance(found, ControlGroupsV1)
    assert found._roots == (Path("/c/cpu,cpuacct"), Path("/c/memory"), Path("/c/freezer"))
    mounts.write_text(f"cgroup2 {unified} cgroup2 rw 0 0\n")
    with pytest.raises(LabError, match="No control groups"):
        groups.find(mounts)
    controllers.write_text("cpuset cpu io memory pids\n")
    assert isinstance(groups.find(mounts), ControlGroupsV2)
    with pytest.raises(LabError, match="No control groups"):
        groups.find(tmp_path / "nothing")


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert groups.missing() == "Control groups exist on Linux only; this is Darwin."
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in groups.missing()
