"""A worker's own folder for temporary files, which nobody else can read and which does not outlive it.

    TMPDIR/manyhands-UID/       mode 0700, stays; workers may remove folders in it, nothing else
        worker-XXXXXXXX/        one worker's, locked while it runs

A worker that was killed cannot tidy up: the kernel then drops its lock, and the next worker removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "worker-"
_MOST_TRIES = 8


@dataclass(frozen=True)
class OwnFolder:
    """The folder that a worker may write to, and its parent folder."""

    path: Path
    parent: Path


@contextlib.contextmanager
def own_folder() -> Iterator[OwnFolder]:
    """Yield a fresh folder for temporary files of this process and its children (TMPDIR); removed at the end.

    Raises OSError where none can be made.
    """
    parent = _parent()
    _remove_abandoned(parent)
    path, lock = _locked_folder(parent)
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(path)
    tempfile.tempdir = None  # it is cached, perhaps by a parent before a fork
    owner = os.getpid()
    try:
        yield OwnFolder(path, parent)
    finally:
        if os.getpid() == owner:  # a forked child shares the folder
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
            tempfile.tempdir = None
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _parent() -> Path:
    """Return this user's parent folder of workers' folders; a fresh one where another user has taken its name."""
    usual = Path(tempfile.gettempdir()) / f"manyhands-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    facts = os.lstat(usual)
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
        return usual
    return Path(tempfile.mkdtemp(prefix=f"manyhands-{os.geteuid()}-"))


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that locks it; one that was taken for abandoned meanwhile is given up."""
    for _ in range(_MOST_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _lock(path)
        if lock is not None and path.is_dir():
            return path, lock
        if lock is not None:
            os.close(lock)
    raise OSError(f"no folder in {parent} could be kept")


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None where another process holds it, or the folder is gone."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened
