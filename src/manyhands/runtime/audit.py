"""The audit log of a user: which devices joined, which were refused and why, failed proofs, evictions, revocations.

    FOLDER/audit.jsonl     one JSON object a line: {"time": ..., "event": "joined", "name": "pi-1", ...}
    FOLDER/audit.1.jsonl   what came before, once the first is full (1 MiB)

Only its owner can read it (mode 0600). It is appended to and never changed. No problem with it ends a run.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from pathlib import Path

from manyhands.facts.errors import BadFile
from manyhands.files.plain import open_descriptor
from manyhands.runtime.private_files import read_private

AUDIT_FILE = "audit.jsonl"
OLDER_FILE = "audit.1.jsonl"
MOST_BYTES = 2**20
_LONGEST_FACT = 300


class AuditLog:
    """A log that threads and processes may write at once. Without a folder, as in runs of this machine alone, it writes
    nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / AUDIT_FILE if folder is not None else None

    def record(self, event: str, **facts: str | int) -> None:
        """Record an event with its facts; long texts are truncated, since others may have sent them."""
        if self._path is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        shortened_facts = {
            name: fact if isinstance(fact, int) else fact[:_LONGEST_FACT] for name, fact in facts.items()
        }
        line = json.dumps({"time": now, "event": event, **shortened_facts}).encode() + b"\n"
        with contextlib.suppress(OSError, BadFile):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = open_descriptor(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, follows_links=False)
            with open(descriptor, "ab", buffering=0) as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                file.write(line)
                if os.fstat(descriptor).st_size > MOST_BYTES:
                    os.replace(self._path, self._path.with_name(OLDER_FILE))


def entries(folder: Path) -> list[dict[str, str | int]]:
    """Return all recorded entries, the oldest first; lines that cannot be read are left out."""
    recorded: list[dict[str, str | int]] = []
    for name in (OLDER_FILE, AUDIT_FILE):
        for line in (read_private(folder / name, 2 * MOST_BYTES) or b"").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and all(isinstance(fact, (str, int)) for fact in entry.values()):
                    recorded.append(entry)
    return recorded
