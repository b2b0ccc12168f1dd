"""The control groups of all labs on this machine, whichever version of them the kernel has.

The folders are manyhands/LAB/DEVICE in each of version 1's hierarchies, or in version 2's only one. The CPU quota is
granted every 10 ms (less often below a tenth of a core: the kernel grants no less than 1 ms): with the usual 100 ms a
step of some milliseconds either waits for the next period or does not, and times fall into two clusters. Pages of
libraries are charged to the process that touched them first.
"""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.facts.errors import BadValue, LabError
from manyhands.lab.kernel_files import (
    KILL_SECONDS,
    folders_below,
    folders_in,
    make_folder,
    remove_folder,
    wait_until,
    write_file,
)
from manyhands.lab.lines import check_lab_name

OURS = "manyhands"
PERIOD_MICROSECONDS = 10_000
_LEAST_MICROSECONDS = 1000  # of quota, the kernel's minimum: shares below a tenth get a longer period
_MOST_MICROSECONDS = 1_000_000  # of period
_FREEZE_SECONDS = 5.0
_ATTEMPTS = 3


@dataclass(frozen=True)
class GroupStatistics:
    """The resources that a device used since its group was made."""

    cpu_seconds: float
    throttled_seconds: float  # in which it would have computed, but had used its share
    memory_bytes: int
    peak_bytes: int
    memory_limit_bytes: int | None
    oom_kills: int
    is_frozen: bool


def quota_and_period(share: float) -> tuple[int, int]:
    """Return (quota, period) in microseconds, for a share of one core: the computing time allowed in each period."""
    if not 0.001 <= share <= 10_000:
        raise BadValue(f"A share of the CPU is {share:g}; it must be 0.001 to 10000 cores.")
    period = min(_MOST_MICROSECONDS, max(PERIOD_MICROSECONDS, round(_LEAST_MICROSECONDS / share)))
    return max(_LEAST_MICROSECONDS, round(share * period)), period


class ControlGroups(ABC):
    """The groups of all labs on this machine."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(dict.fromkeys(roots))

    # What differs between the versions

    @abstractmethod
    def _prepare(self, folder: Path) -> None:
        """Enable, for the children of a folder, the controllers that limit them."""

    @abstractmethod
    def _limit_memory(self, lab: str, device: str, memory_bytes: int | None) -> None: ...

    @abstractmethod
    def _quota(self, lab: str, device: str) -> str:
        """Return the CPU limit as the kernel writes it; `_set_quota` accepts it."""

    @abstractmethod
    def _set_quota(self, lab: str, device: str, quota: str) -> None: ...

    @abstractmethod
    def _part(self, lab: str, device: str, process: int) -> Path:
        """Return the folder in which the kernel limits one process of a device's by itself."""

    @abstractmethod
    def _write_quota(self, folder: Path, quota: str) -> None: ...

    @abstractmethod
    def _quota_for(self, share: float | None) -> str: ...

    @abstractmethod
    def _set_frozen(self, lab: str, device: str, *, frozen: bool) -> None: ...

    @abstractmethod
    def is_frozen(self, lab: str, device: str) -> bool: ...

    @abstractmethod
    def statistics(self, lab: str, device: str) -> GroupStatistics: ...

    # What is common to both

    def refused(self) -> str:
        """Return why no group can be made although everything seems to be in place; empty where one can."""
        return ""

    def share(self, lab: str, device: str) -> float | None:
        """Return the share of one core that the device may use now; None: no limit."""
        quota, period = self._quota(lab, device).split()
        return None if quota in ("-1", "max") else int(quota) / int(period)

    def make(self, lab: str, device: str, cpu_share: float | None, memory_bytes: int | None) -> None:
        """Make a device's group with its limits (None: no limit); a group that exists already gets these limits."""
        check_lab_name(lab)
        if memory_bytes is not None and memory_bytes <= 0:
            raise BadValue(f"{device}: its memory is {memory_bytes} bytes; it must be > 0.")
        for root in self._roots:
            for attempt in range(_ATTEMPTS):  # the last lab to be removed removes our folder too, perhaps just now
                try:
                    self._make_folders(root, lab, device)
                    break
                except LabError:
                    if attempt == _ATTEMPTS - 1:
                        raise
        self._limit_memory(lab, device, memory_bytes)
        self.set_cpu(lab, device, cpu_share)

    def _make_folders(self, root: Path, lab: str, device: str) -> None:
        self._prepare(root)
        for folder in (root / OURS, root / OURS / lab):
            make_folder(folder)
            self._prepare(folder)
        make_folder(self._folder(root, lab, device))

    def set_cpu(self, lab: str, device: str, share: float | None) -> None:
        """Set the share of one core (it may be more than 1) that the device has from now on; None: no limit."""
        self._set_quota(lab, device, self._quota_for(share))

    def divide(self, lab: str, device: str, shares: Mapping[int, float]) -> None:
        """Give every process of a device a share of a core of its own, within the device's: process -> share.

        Without it a device's processes share what the device may use, so that one that is busy alone is as fast as all
        of its cores. What the processes start is inside; no other process may enter the device afterwards.
        """
        parts = {process: self._part(lab, device, process) for process in shares}
        for process, folder in parts.items():
            make_folder(folder)
            write_file(folder / "cgroup.procs", str(process))
        self._prepare(next(iter(parts.values())).parent)
        for process, folder in parts.items():
            self._write_quota(folder, self._quota_for(shares[process]))

    def enter(self, lab: str, device: str) -> None:
        """Move the calling process, and every process that it will start, into the device's group."""
        for root in self._roots:
            write_file(self._folder(root, lab, device) / "cgroup.procs", "0")  # 0: the writing process

    def freeze(self, lab: str, device: str) -> None:
        """Suspend every process of the device; its connections stay open, and silent."""
        self._set_frozen(lab, device, frozen=True)
        failure = f"{device} of lab '{lab}' cannot be frozen"
        wait_until(lambda: self.is_frozen(lab, device), _FREEZE_SECONDS, failure)

    def thaw(self, lab: str, device: str) -> None:
        self._set_frozen(lab, device, frozen=False)

    def processes(self, lab: str, device: str) -> list[int]:
        """Return the ids of the processes inside; empty also where there is no such group."""
        pids: set[int] = set()
        for root in self._roots:
            for folder in folders_below(self._folder(root, lab, device)):
                with contextlib.suppress(OSError):
                    pids.update(int(word) for word in (folder / "cgroup.procs").read_text().split())
        return sorted(pids - {0})  # 0: a process that this one may not see; killing 0 would kill this process itself

    def kill(self, lab: str, device: str) -> None:
        """End every process inside by SIGKILL, frozen ones too; the limits remain for later processes.

        Dying costs CPU time too, so there is no quota until all are dead.
        """
        if not self.processes(lab, device):
            return
        quota = ""
        with contextlib.suppress(LabError):
            quota = self._quota(lab, device)
            self._set_quota(lab, device, self._quota_for(None))

        def is_empty() -> bool:
            alive = self.processes(lab, device)
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(LabError):
                self._set_frozen(lab, device, frozen=False)
            return not alive

        try:
            wait_until(is_empty, KILL_SECONDS, f"{device} of lab '{lab}' still has processes that SIGKILL does not end")
        finally:
            if quota:
                with contextlib.suppress(LabError):
                    self._set_quota(lab, device, quota)

    def labs(self) -> set[str]:
        return {path.name for root in self._roots for path in folders_in(root / OURS)}

    def devices(self, lab: str) -> set[str]:
        return {path.name for root in self._roots for path in folders_in(root / OURS / check_lab_name(lab))}

    def remove(self, lab: str) -> None:
        """Kill what is left of a lab and remove its groups, all that exist."""
        survivors: list[LabError] = []
        for device in sorted(self.devices(lab)):
            try:
                self.kill(lab, device)
            except LabError as error:
                survivors.append(error)
        if survivors:
            raise survivors[0]
        for root in self._roots:
            for folder in reversed(folders_below(root / OURS / lab)):
                remove_folder(folder)  # and the processes that entered meanwhile
            with contextlib.suppress(OSError):
                (root / OURS).rmdir()  # unless it holds another lab

    def _folder(self, root: Path, lab: str, device: str) -> Path:
        if not device or "/" in device or device.startswith("."):
            raise BadValue(f"'{device:.80}' cannot name a device.")
        return root / OURS / check_lab_name(lab) / device
