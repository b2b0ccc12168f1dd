"""Reads and writes the kernel's files by which control groups are made and changed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from manyhands.facts.errors import LabError

KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.005


def read_file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from None


def write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise LabError(f"'{text}' cannot be written to {path}: {error.strerror}.") from None


def read_pairs(path: Path) -> dict[str, int]:
    """Return a file's lines of a name and a number."""
    words = (line.split() for line in read_file(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def folders_in(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def folders_below(path: Path) -> list[Path]:
    """Return a folder and all folders below it, parents first; empty where it does not exist."""
    if not path.is_dir():
        return []
    return [path, *(each for child in folders_in(path) for each in folders_below(child))]


def make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise LabError(f"The control group {path} cannot be made: {error.strerror}.") from None


def remove_folder(path: Path) -> None:
    """Remove a group, which stays busy for a moment after its last process is dead. Processes that entered meanwhile
    are killed too."""

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

    wait_until(is_gone, KILL_SECONDS, f"The control group {path} cannot be removed")


def wait_until(is_done: Callable[[], bool], limit_seconds: float, failure: str) -> None:
    end = time.monotonic() + limit_seconds
    while not is_done():
        if time.monotonic() > end:
            raise LabError(f"{failure} (waited {limit_seconds:g} s).")
        time.sleep(_LOOK_SECONDS)
