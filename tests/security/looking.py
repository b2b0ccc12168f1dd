"""Who could read what: rights of files, what is in them, and what processes show to everybody."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import psutil


def assert_private(folder: Path) -> None:
    """Nobody but the owner has any right to the folder or to anything in it."""
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert path.is_symlink() or mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


def holding(folder: Path, secret: str) -> list[Path]:
    """Files with this in them, as it is or without its dashes."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if secret.encode() in content or secret.replace("-", "").encode() in content:
                found.append(path)
    return found


def processes_showing(secret: str) -> list[str]:
    """Command lines and names with this in them: every user of the machine can read those."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            shown = " ".join([*process.cmdline(), process.name()])
            if secret in shown:
                found.append(shown)
    return found
