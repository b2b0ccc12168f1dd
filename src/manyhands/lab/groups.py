"""The control groups of this machine: the version that is mounted here, and whether it can be used."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from manyhands.facts.errors import LabError
from manyhands.lab.control_groups import ControlGroups
from manyhands.lab.control_groups_v1 import ControlGroupsV1
from manyhands.lab.control_groups_v2 import ControlGroupsV2
from manyhands.lab.kernel_files import read_file


def find(mounts: Path = Path("/proc/self/mounts")) -> ControlGroups:
    """Return the groups of the version that has the cpu and memory controllers here."""
    mounted = _found(mounts)
    if mounted is None:
        hint = "Mount control groups, or run the lab without limits."
        raise LabError("No control groups with the cpu and memory controllers are mounted here.", hint=hint)
    return mounted


def missing() -> str:
    """Return why control groups cannot be used here, as a sentence; empty if they can."""
    if platform.system() != "Linux":
        return f"Control groups exist on Linux only; this is {platform.system()}."
    if os.geteuid() != 0:
        return "Control groups need root: type sudo before the command."
    try:
        mounted = find()
    except LabError as error:
        return error.message
    closed = [str(root) for root in mounted._roots if not os.access(root, os.W_OK)]
    return f"The control groups are mounted read-only: {', '.join(closed)}." if closed else mounted.refused()


def _found(mounts: Path) -> ControlGroups | None:
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
        return ControlGroupsV1(first["cpu"], first["memory"], first["freezer"], first.get("cpuacct"))
    for root in unified:
        with contextlib.suppress(LabError):
            if {"cpu", "memory"} <= set(read_file(root / "cgroup.controllers").split()):
                return ControlGroupsV2(root)
    return None
