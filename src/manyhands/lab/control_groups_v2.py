"""Control groups of version 2."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

from manyhands.facts.errors import LabError
from manyhands.lab.control_groups import OURS, PERIOD_MICROSECONDS, ControlGroups, GroupStatistics, quota_and_period
from manyhands.lab.kernel_files import (
    make_folder,
    read_file,
    read_pairs,
    remove_folder,
    write_file,
)


class ControlGroupsV2(ControlGroups):
    """Groups in one hierarchy, in which every folder passes the controllers on to its children."""

    def __init__(self, root: Path) -> None:
        self._root = root
        super().__init__((root,))

    def _prepare(self, folder: Path) -> None:
        passed_on = folder / "cgroup.subtree_control"
        if not {"cpu", "memory"} <= set(read_file(passed_on).split()):
            write_file(passed_on, "+cpu +memory")

    def refused(self) -> str:
        """Return why no group can be made, by trying it beside our groups: a root that holds processes itself, as in a
        container, passes no controllers on."""
        return _refused(self._root)

    def try_one(self) -> None:
        folder = self._root / f"{OURS}.try{os.getpid()}"
        self._prepare(self._root)
        make_folder(folder)
        try:
            self._prepare(folder)
            for name in ("cpu.max", "memory.max"):
                read_file(folder / name)
        finally:
            remove_folder(folder)

    def _here(self, lab: str, device: str) -> Path:
        return self._folder(self._root, lab, device)

    def _limit_memory(self, lab: str, device: str, memory_bytes: int | None) -> None:
        folder = self._here(lab, device)
        if (folder / "memory.swap.max").exists():
            write_file(folder / "memory.swap.max", "max" if memory_bytes is None else "0")
        write_file(folder / "memory.max", "max" if memory_bytes is None else str(memory_bytes))

    def _quota_for(self, share: float | None) -> str:
        if share is None:
            return f"max {PERIOD_MICROSECONDS}"
        quota, period = quota_and_period(share)
        return f"{quota} {period}"

    def _quota(self, lab: str, device: str) -> str:
        return read_file(self._here(lab, device) / "cpu.max")

    def _set_quota(self, lab: str, device: str, quota: str) -> None:
        self._write_quota(self._here(lab, device), quota)

    def _part(self, lab: str, device: str, process: int) -> Path:
        return self._here(lab, device) / str(process)

    def _write_quota(self, folder: Path, quota: str) -> None:
        write_file(folder / "cpu.max", quota)

    def _set_frozen(self, lab: str, device: str, *, frozen: bool) -> None:
        write_file(self._here(lab, device) / "cgroup.freeze", str(int(frozen)))

    def is_frozen(self, lab: str, device: str) -> bool:
        return read_pairs(self._here(lab, device) / "cgroup.events").get("frozen") == 1

    def statistics(self, lab: str, device: str) -> GroupStatistics:
        folder = self._here(lab, device)
        cpu, now, limit = (
            read_pairs(folder / "cpu.stat"),
            int(read_file(folder / "memory.current")),
            read_file(folder / "memory.max"),
        )
        peak = folder / "memory.peak"  # since Linux 5.19
        return GroupStatistics(
            cpu_seconds=cpu.get("usage_usec", 0) / 1e6,
            throttled_seconds=cpu.get("throttled_usec", 0) / 1e6,
            memory_bytes=now,
            peak_bytes=int(read_file(peak)) if peak.exists() else now,
            memory_limit_bytes=None if limit == "max" else int(limit),
            oom_kills=read_pairs(folder / "memory.events").get("oom_kill", 0),
            is_frozen=self.is_frozen(lab, device),
        )


@functools.cache
def _refused(root: Path) -> str:
    try:
        ControlGroupsV2(root).try_one()
    except LabError as error:
        return f"The control groups cannot limit processor and memory: {error.message}" + (
            " The root group holds processes, as in many containers: move them into a group of their own."
            if os.strerror(errno.EBUSY) in error.message
            else ""
        )
    return ""
