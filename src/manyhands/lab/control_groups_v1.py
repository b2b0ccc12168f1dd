"""Control groups of version 1.

Where the kernel groups real-time processes too, none of those can enter a group: a process that needs real-time
priority must stay outside.
"""

from __future__ import annotations

from pathlib import Path

from manyhands.lab.control_groups import PERIOD_MICROSECONDS, ControlGroups, GroupStatistics, quota_and_period
from manyhands.lab.kernel_files import (
    read_file,
    read_pairs,
    write_file,
)

_NO_LIMIT = 2**62  # version 1 writes a number where version 2 writes 'max'


class ControlGroupsV1(ControlGroups):
    """Groups with a hierarchy for each controller; cpu and cpuacct are often one."""

    def __init__(self, cpu: Path, memory: Path, freezer: Path, cpuacct: Path | None = None) -> None:
        self._cpu, self._memory, self._freezer, self._cpuacct = cpu, memory, freezer, cpuacct or cpu
        super().__init__((cpu, self._cpuacct, memory, freezer))

    def _prepare(self, folder: Path) -> None:
        pass

    def _limit_memory(self, lab: str, device: str, memory_bytes: int | None) -> None:
        folder = self._folder(self._memory, lab, device)
        text = "-1" if memory_bytes is None else str(memory_bytes)
        with_swap = folder / "memory.memsw.limit_in_bytes"  # memory and swap: never less than memory alone
        if with_swap.exists():
            write_file(with_swap, "-1")
        write_file(folder / "memory.limit_in_bytes", text)
        if with_swap.exists():
            write_file(with_swap, text)
        elif (folder / "memory.swappiness").exists():
            write_file(folder / "memory.swappiness", "0")

    def _quota_for(self, share: float | None) -> str:
        quota, period = (-1, PERIOD_MICROSECONDS) if share is None else quota_and_period(share)
        return f"{quota} {period}"

    def _quota(self, lab: str, device: str) -> str:
        folder = self._folder(self._cpu, lab, device)
        return f"{read_file(folder / 'cpu.cfs_quota_us')} {read_file(folder / 'cpu.cfs_period_us')}"

    def _set_quota(self, lab: str, device: str, quota: str) -> None:
        self._write_quota(self._folder(self._cpu, lab, device), quota)

    def _part(self, lab: str, device: str, process: int) -> Path:
        return self._folder(self._cpu, lab, device) / str(process)

    def _write_quota(self, folder: Path, quota: str) -> None:
        share, period = quota.split()
        write_file(folder / "cpu.cfs_period_us", period)
        write_file(folder / "cpu.cfs_quota_us", share)

    def _set_frozen(self, lab: str, device: str, *, frozen: bool) -> None:
        write_file(self._folder(self._freezer, lab, device) / "freezer.state", "FROZEN" if frozen else "THAWED")

    def is_frozen(self, lab: str, device: str) -> bool:
        return read_file(self._folder(self._freezer, lab, device) / "freezer.state") == "FROZEN"

    def statistics(self, lab: str, device: str) -> GroupStatistics:
        memory = self._folder(self._memory, lab, device)
        limit = int(read_file(memory / "memory.limit_in_bytes"))
        return GroupStatistics(
            cpu_seconds=int(read_file(self._folder(self._cpuacct, lab, device) / "cpuacct.usage")) / 1e9,
            throttled_seconds=read_pairs(self._folder(self._cpu, lab, device) / "cpu.stat").get("throttled_time", 0)
            / 1e9,
            memory_bytes=int(read_file(memory / "memory.usage_in_bytes")),
            peak_bytes=int(read_file(memory / "memory.max_usage_in_bytes")),
            memory_limit_bytes=None if not 0 <= limit < _NO_LIMIT else limit,
            oom_kills=read_pairs(memory / "memory.oom_control").get("oom_kill", 0),
            is_frozen=self.is_frozen(lab, device),
        )
