"""The kernel's kills when memory has run out: it kills without an exception in the process, but it counts its kills."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from manyhands.facts.units import format_bytes

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PROCESSES = Path("/proc")
KILLED_IN_GROUP = "killed by the kernel because memory ran out"
"""What is reported where a process' own control group counted the kill."""


@dataclass(frozen=True)
class MemoryKills:
    """The number of processes that the kernel had killed for memory, in a process' control group and on the machine."""

    group: Path | None
    """The control group of the process' memory; None where none is visible."""
    in_group: int
    on_machine: int


def memory_kills(process: int) -> MemoryKills:
    """Return the counts as they are now; to be called while the process lives."""
    group = group_of(process)
    return MemoryKills(group, _group_kills(group), _count(_PROCESSES / "vmstat", "oom_kill"))


def killed_for_memory(before: MemoryKills) -> str:
    """Return how the kernel killed a process for memory since `before`, in words; empty where it did not.

    The machine's count covers all processes, so it is a hint and no proof.
    """
    if before.group is not None and _group_kills(before.group) > before.in_group:
        limit = limit_bytes(before.group)
        of = f" (its control group may have {format_bytes(limit)})" if limit else ""
        return f"{KILLED_IN_GROUP}{of}"
    if _count(_PROCESSES / "vmstat", "oom_kill") > before.on_machine:
        return "perhaps killed by the kernel: memory ran out on this machine meanwhile"
    return ""


def group_of(process: int) -> Path | None:
    """Return the folder of the control group that a process' memory counts for, if any besides the machine's."""
    with contextlib.suppress(OSError):
        for line in (_PROCESSES / str(process) / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                folder = _CONTROL_GROUPS / "memory" / path.lstrip("/")
            elif number == "0" and (_CONTROL_GROUPS / "cgroup.controllers").exists():
                folder = _CONTROL_GROUPS / path.lstrip("/")
            else:
                continue
            if folder.is_dir():
                return folder
    return None


def _group_kills(group: Path | None) -> int:
    if group is None:
        return 0
    return _count(group / "memory.events", "oom_kill") + _count(group / "memory.oom_control", "oom_kill")


def limit_bytes(group: Path | None) -> int:
    """Return the memory limit of a control group; 0: no limit."""
    if group is None:
        return 0
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / name).read_text())
            return limit if limit < 2**62 else 0
    return 0


def _count(path: Path, name: str) -> int:
    """Return a number from a file of lines 'name number'; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, number = line.partition(" ")
            if key == name:
                return int(number)
    return 0


def free_bytes() -> int:
    """Return the bytes this process may still take: of its control group, where that has a limit, or of the machine."""
    import psutil

    limit = limit_bytes(group_of(os.getpid()))
    free = int(psutil.virtual_memory().available)
    return min(free, limit - int(psutil.Process().memory_info().rss)) if limit else free
