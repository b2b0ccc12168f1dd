"""What each device of a lab may use of this machine, by control groups: a share of a core, and memory that really ends.

The folders are manyhands/LAB/DEVICE in each of version 1's hierarchies, or in version 2's only one. The CPU quota is
given out every 10 ms (less often below a tenth of a core: the kernel gives no less than 1 ms): with the usual 100 ms a
step of some milliseconds either waits for the next period or does not, and times fall into two heaps. Pages of
libraries count for whoever touched them first. In version 1, where the kernel groups real-time processes
too, none of those can enter: a process becomes one, if it must, outside.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from manyhands.facts.errors import BadValue, LabError
from manyhands.lab.lines import check_lab_name

OURS = "manyhands"
PERIOD_MICROSECONDS = 10_000
_LEAST_MICROSECONDS = 1000  # of quota, says the kernel: shares below a tenth get a longer period
_MOST_MICROSECONDS = 1_000_000  # of period
_NO_LIMIT = 2**62  # version 1 writes a number where version 2 writes 'max'
_FREEZE_SECONDS = 5.0
_KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.005
_ATTEMPTS = 3


@dataclass(frozen=True)
class GroupStatistics:
    """What a device used since its group was made."""

    cpu_seconds: float
    throttled_seconds: float  # in which it would have computed, but had used its share
    memory_bytes: int
    peak_bytes: int
    memory_limit_bytes: int | None
    oom_kills: int
    is_frozen: bool


def quota_and_period(share: float) -> tuple[int, int]:
    """Microseconds of computing in so many microseconds, for a share of one core."""
    if not 0.001 <= share <= 10_000:
        raise BadValue(f"A share of the CPU is {share:g}; it must be 0.001 to 10000 cores.")
    period = min(_MOST_MICROSECONDS, max(PERIOD_MICROSECONDS, round(_LEAST_MICROSECONDS / share)))
    return max(_LEAST_MICROSECONDS, round(share * period)), period


class Groups(ABC):
    """The groups of all labs on this machine."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(dict.fromkeys(roots))

    # What differs between the versions

    @abstractmethod
    def _prepare(self, folder: Path) -> None:
        """Let the children of a folder have what we limit."""

    @abstractmethod
    def _limit_memory(self, lab: str, device: str, memory_bytes: int | None) -> None: ...

    @abstractmethod
    def _quota(self, lab: str, device: str) -> str:
        """The CPU limit as the kernel writes it; `_set_quota` takes it back."""

    @abstractmethod
    def _set_quota(self, lab: str, device: str, quota: str) -> None: ...

    @abstractmethod
    def _quota_for(self, share: float | None) -> str: ...

    @abstractmethod
    def _set_frozen(self, lab: str, device: str, *, frozen: bool) -> None: ...

    @abstractmethod
    def is_frozen(self, lab: str, device: str) -> bool: ...

    @abstractmethod
    def statistics(self, lab: str, device: str) -> GroupStatistics: ...

    # What does not

    def refused(self) -> str:
        """Why no group can be made although all seems to be there; empty where one can."""
        return ""

    def share(self, lab: str, device: str) -> float | None:
        """The share of one core that the device may use now; None: as much as it likes."""
        quota, period = self._quota(lab, device).split()
        return None if quota in ("-1", "max") else int(quota) / int(period)

    def make(self, lab: str, device: str, cpu_share: float | None, memory_bytes: int | None) -> None:
        """A device's group with its limits (None: no limit); one that is there already gets these limits."""
        check_lab_name(lab)
        if memory_bytes is not None and memory_bytes <= 0:
            raise BadValue(f"{device}: its memory is {memory_bytes} bytes; it must be > 0.")
        for root in self._roots:
            for attempt in range(_ATTEMPTS):  # the last lab to go takes our folder with it, perhaps just now
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
            _make_folder(folder)
            self._prepare(folder)
        _make_folder(self._folder(root, lab, device))

    def set_cpu(self, lab: str, device: str, share: float | None) -> None:
        """The share of one core (it may be more than 1) that the device has from now on; None: no limit."""
        self._set_quota(lab, device, self._quota_for(share))

    def enter(self, lab: str, device: str) -> None:
        """Put the calling process, and what it will start, into the device's group."""
        for root in self._roots:
            _write(self._folder(root, lab, device) / "cgroup.procs", "0")  # 0: whoever writes

    def freeze(self, lab: str, device: str) -> None:
        """Stop every process of the device where it is; connections stay open, and silent."""
        self._set_frozen(lab, device, frozen=True)
        what = f"{device} of lab '{lab}' cannot be frozen"
        _wait(lambda: self.is_frozen(lab, device), _FREEZE_SECONDS, what)

    def thaw(self, lab: str, device: str) -> None:
        self._set_frozen(lab, device, frozen=False)

    def processes(self, lab: str, device: str) -> list[int]:
        """The ids of the processes inside; empty also where there is no such group."""
        found: set[int] = set()
        for root in self._roots:
            for folder in _below(self._folder(root, lab, device)):
                with contextlib.suppress(OSError):
                    found.update(int(word) for word in (folder / "cgroup.procs").read_text().split())
        return sorted(found - {0})  # 0: one that this process may not see; to kill it would mean to kill ourselves

    def kill(self, lab: str, device: str) -> None:
        """End everything inside by SIGKILL, also what is frozen; the limits stay for what comes next.

        Dying costs CPU time too, so there is no quota until all are dead.
        """
        if not self.processes(lab, device):
            return
        quota = ""
        with contextlib.suppress(LabError):
            quota = self._quota(lab, device)
            self._set_quota(lab, device, self._quota_for(None))

        def is_empty() -> bool:
            left = self.processes(lab, device)
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(LabError):
                self._set_frozen(lab, device, frozen=False)
            return not left

        try:
            _wait(is_empty, _KILL_SECONDS, f"{device} of lab '{lab}' still has processes that SIGKILL does not end")
        finally:
            if quota:
                with contextlib.suppress(LabError):
                    self._set_quota(lab, device, quota)

    def labs(self) -> set[str]:
        return {path.name for root in self._roots for path in _folders(root / OURS)}

    def devices(self, lab: str) -> set[str]:
        return {path.name for root in self._roots for path in _folders(root / OURS / check_lab_name(lab))}

    def remove(self, lab: str) -> None:
        """Kill what is left of a lab and take its groups away, all that are there."""
        survivors: list[LabError] = []
        for device in sorted(self.devices(lab)):
            try:
                self.kill(lab, device)
            except LabError as error:
                survivors.append(error)
        if survivors:
            raise survivors[0]
        for root in self._roots:
            for folder in reversed(_below(root / OURS / lab)):
                _remove_folder(folder)  # and whoever came in meanwhile
            with contextlib.suppress(OSError):
                (root / OURS).rmdir()  # unless it holds another lab

    def _folder(self, root: Path, lab: str, device: str) -> Path:
        if not device or "/" in device or device.startswith("."):
            raise BadValue(f"'{device:.80}' cannot name a device.")
        return root / OURS / check_lab_name(lab) / device


class GroupsV1(Groups):
    """A hierarchy for each controller; cpu and cpuacct are often one."""

    def __init__(self, cpu: Path, memory: Path, freezer: Path, cpuacct: Path | None = None) -> None:
        self._cpu, self._memory, self._freezer, self._cpuacct = cpu, memory, freezer, cpuacct or cpu
        super().__init__((cpu, self._cpuacct, memory, freezer))

    def _prepare(self, folder: Path) -> None:
        pass

    def _limit_memory(self, lab: str, device: str, memory_bytes: int | None) -> None:
        folder = self._folder(self._memory, lab, device)
        text = "-1" if memory_bytes is None else str(memory_bytes)
        both = folder / "memory.memsw.limit_in_bytes"  # memory and swap: never less than memory alone
        if both.exists():
            _write(both, "-1")
        _write(folder / "memory.limit_in_bytes", text)
        if both.exists():
            _write(both, text)
        elif (folder / "memory.swappiness").exists():
            _write(folder / "memory.swappiness", "0")

    def _quota_for(self, share: float | None) -> str:
        quota, period = (-1, PERIOD_MICROSECONDS) if share is None else quota_and_period(share)
        return f"{quota} {period}"

    def _quota(self, lab: str, device: str) -> str:
        folder = self._folder(self._cpu, lab, device)
        return f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"

    def _set_quota(self, lab: str, device: str, quota: str) -> None:
        folder = self._folder(self._cpu, lab, device)
        share, period = quota.split()
        _write(folder / "cpu.cfs_period_us", period)
        _write(folder / "cpu.cfs_quota_us", share)

    def _set_frozen(self, lab: str, device: str, *, frozen: bool) -> None:
        _write(self._folder(self._freezer, lab, device) / "freezer.state", "FROZEN" if frozen else "THAWED")

    def is_frozen(self, lab: str, device: str) -> bool:
        return _read(self._folder(self._freezer, lab, device) / "freezer.state") == "FROZEN"

    def statistics(self, lab: str, device: str) -> GroupStatistics:
        memory = self._folder(self._memory, lab, device)
        limit = int(_read(memory / "memory.limit_in_bytes"))
        return GroupStatistics(
            cpu_seconds=int(_read(self._folder(self._cpuacct, lab, device) / "cpuacct.usage")) / 1e9,
            throttled_seconds=_pairs(self._folder(self._cpu, lab, device) / "cpu.stat").get("throttled_time", 0) / 1e9,
            memory_bytes=int(_read(memory / "memory.usage_in_bytes")),
            peak_bytes=int(_read(memory / "memory.max_usage_in_bytes")),
            memory_limit_bytes=None if not 0 <= limit < _NO_LIMIT else limit,
            oom_kills=_pairs(memory / "memory.oom_control").get("oom_kill", 0),
            is_frozen=self.is_frozen(lab, device),
        )


class GroupsV2(Groups):
    """One hierarchy, in which every folder passes the controllers on to its children."""

    def __init__(self, root: Path) -> None:
        self._root = root
        super().__init__((root,))

    def _prepare(self, folder: Path) -> None:
        passed_on = folder / "cgroup.subtree_control"
        if not {"cpu", "memory"} <= set(_read(passed_on).split()):
            _write(passed_on, "+cpu +memory")

    def refused(self) -> str:
        """Tried, beside our groups: a root that holds processes itself, as in a container, passes nothing on."""
        return _refused(self._root)

    def try_one(self) -> None:
        folder = self._root / f"{OURS}.try{os.getpid()}"
        self._prepare(self._root)
        _make_folder(folder)
        try:
            self._prepare(folder)
            for name in ("cpu.max", "memory.max"):
                _read(folder / name)
        finally:
            _remove_folder(folder)

    def _here(self, lab: str, device: str) -> Path:
        return self._folder(self._root, lab, device)

    def _limit_memory(self, lab: str, device: str, memory_bytes: int | None) -> None:
        folder = self._here(lab, device)
        if (folder / "memory.swap.max").exists():
            _write(folder / "memory.swap.max", "max" if memory_bytes is None else "0")
        _write(folder / "memory.max", "max" if memory_bytes is None else str(memory_bytes))

    def _quota_for(self, share: float | None) -> str:
        if share is None:
            return f"max {PERIOD_MICROSECONDS}"
        quota, period = quota_and_period(share)
        return f"{quota} {period}"

    def _quota(self, lab: str, device: str) -> str:
        return _read(self._here(lab, device) / "cpu.max")

    def _set_quota(self, lab: str, device: str, quota: str) -> None:
        _write(self._here(lab, device) / "cpu.max", quota)

    def _set_frozen(self, lab: str, device: str, *, frozen: bool) -> None:
        _write(self._here(lab, device) / "cgroup.freeze", str(int(frozen)))

    def is_frozen(self, lab: str, device: str) -> bool:
        return _pairs(self._here(lab, device) / "cgroup.events").get("frozen") == 1

    def statistics(self, lab: str, device: str) -> GroupStatistics:
        folder = self._here(lab, device)
        cpu, now, limit = (
            _pairs(folder / "cpu.stat"),
            int(_read(folder / "memory.current")),
            _read(folder / "memory.max"),
        )
        peak = folder / "memory.peak"  # since Linux 5.19
        return GroupStatistics(
            cpu_seconds=cpu.get("usage_usec", 0) / 1e6,
            throttled_seconds=cpu.get("throttled_usec", 0) / 1e6,
            memory_bytes=now,
            peak_bytes=int(_read(peak)) if peak.exists() else now,
            memory_limit_bytes=None if limit == "max" else int(limit),
            oom_kills=_pairs(folder / "memory.events").get("oom_kill", 0),
            is_frozen=self.is_frozen(lab, device),
        )


# Which of them this machine has


def find(mounts: Path = Path("/proc/self/mounts")) -> Groups:
    """The version that has the cpu and memory controllers here."""
    found = _found(mounts)
    if found is None:
        hint = "Mount control groups, or run the lab without limits."
        raise LabError("No control groups with the cpu and memory controllers are mounted here.", hint=hint)
    return found


def missing() -> str:
    """Why control groups cannot be used here, as a sentence; empty if they can."""
    if platform.system() != "Linux":
        return f"Control groups exist on Linux only; this is {platform.system()}."
    if os.geteuid() != 0:
        return "Control groups need root: type sudo before the command."
    try:
        found = find()
    except LabError as error:
        return error.message
    closed = [str(root) for root in found._roots if not os.access(root, os.W_OK)]
    return f"The control groups are mounted read-only: {', '.join(closed)}." if closed else found.refused()


@functools.cache
def _refused(root: Path) -> str:
    try:
        GroupsV2(root).try_one()
    except LabError as error:
        return f"The control groups cannot limit processor and memory: {error.message}" + (
            " The root group holds processes, as in many containers: move them into a group of their own."
            if os.strerror(errno.EBUSY) in error.message
            else ""
        )
    return ""


def _found(mounts: Path) -> Groups | None:
    first: dict[str, Path] = {}
    unified: list[Path] = []
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup":
            for option in options.split(","):
                first.setdefault(option, Path(where))
        elif kind == "cgroup2":
            unified.append(Path(where))
    if {"cpu", "memory", "freezer"} <= first.keys():
        return GroupsV1(first["cpu"], first["memory"], first["freezer"], first.get("cpuacct"))
    for root in unified:
        with contextlib.suppress(LabError):
            if {"cpu", "memory"} <= set(_read(root / "cgroup.controllers").split()):
                return GroupsV2(root)
    return None


# Files of the kernel


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise LabError(f"'{text}' cannot be written to {path}: {error.strerror}.") from None


def _pairs(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _below(path: Path) -> list[Path]:
    """A folder and all below it, parents first; nothing where it is not there."""
    if not path.is_dir():
        return []
    return [path, *(each for child in _folders(path) for each in _below(child))]


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise LabError(f"The control group {path} cannot be made: {error.strerror}.") from None


def _remove_folder(path: Path) -> None:
    """A group stays busy for a moment after its last process is dead. Who came in after the others died dies too."""

    def is_gone() -> bool:
        with contextlib.suppress(OSError):
            path.rmdir()
        if not path.exists():
            return True
        with contextlib.suppress(OSError):
            for process in {int(word) for word in (path / "cgroup.procs").read_text().split()} - {0}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        return False

    _wait(is_gone, _KILL_SECONDS, f"The control group {path} cannot be removed")


def _wait(is_done: Callable[[], bool], limit_seconds: float, what: str) -> None:
    end = time.monotonic() + limit_seconds
    while not is_done():
        if time.monotonic() > end:
            raise LabError(f"{what} (waited {limit_seconds:g} s).")
        time.sleep(_LOOK_SECONDS)
