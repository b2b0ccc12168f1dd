"""Small files that only their owner may read, such as tokens and keys: mode 0600, in a folder of mode 0700."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from manyhands.files.plain import open_descriptor

_OTHERS = 0o077


def read_private(path: Path, most_bytes: int) -> bytes | None:
    """Return the first bytes of a plain file; None where there is none.

    Other users lose the right to read it, if they had it.
    """
    try:
        descriptor = open_descriptor(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_mode & _OTHERS:
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o600)
        return file.read(most_bytes)


def write_private(path: Path, content: bytes, *, replace: bool) -> None:
    """Write all of the content or nothing; FileExistsError where the file exists already and is not to be replaced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
