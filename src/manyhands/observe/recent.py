"""The list of recent runs, wherever they were written, so that users need not name the folder of the newest.

    recent/0f3a9c5d1e7b2a64.json    in the cache folder: {"folder": "/home/me/digits-run"}

Every run folder has a file of its own, so that two runs that begin at the same moment never write to the same one. The
list is a convenience: where it cannot be written or read, runs go on without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from manyhands.facts.errors import ManyhandsError
from manyhands.files.documents import cache_folder, read_document, write_document

MOST_RECENT = 100
"""The number of runs that are remembered; the oldest are forgotten."""


def remember(folder: Path) -> None:
    """Note that a run begins, or goes on, in this folder. Forgets runs whose folder no longer exists, and the oldest
    ones."""
    with contextlib.suppress(ManyhandsError, OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        whole = str(folder.resolve())
        name = hashlib.sha256(os.fsencode(whole)).hexdigest()[:16]
        write_document(_index() / f"{name}.json", {"folder": whole})
        kept_count = 0
        for entry, folder_known in _entries():
            if kept_count < MOST_RECENT and folder_known is not None and folder_known.is_dir():
                kept_count += 1
            else:
                entry.unlink(missing_ok=True)


def recent_runs() -> list[Path]:
    """Return the folders of recent runs that still exist, the one that began last first."""
    with contextlib.suppress(OSError, RuntimeError):
        return [folder for _, folder in _entries() if folder is not None and folder.is_dir()]
    return []


def _index() -> Path:
    return cache_folder() / "recent"


def _entries() -> Iterator[tuple[Path, Path | None]]:
    """Yield each file of the list, the newest first, and the folder it names; None: it names none."""
    entries = []
    for entry in _index().glob("*.json"):
        with contextlib.suppress(OSError):  # another run has just forgotten it
            entries.append((entry.stat().st_mtime_ns, entry))
    for _, entry in sorted(entries, reverse=True):
        yield entry, _folder_in(entry)


def _folder_in(entry: Path) -> Path | None:
    try:
        raw = read_document(entry)
    except ManyhandsError:
        return None
    folder = raw.get("folder") if isinstance(raw, dict) else None
    return Path(folder) if isinstance(folder, str) and os.path.isabs(folder) and "\0" not in folder else None
