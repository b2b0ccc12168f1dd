"""Access to plain files and nothing else: a pipe would be waited for, a link in a run's folder may lead to another
user's file."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from manyhands.facts.errors import BadFile


def open_descriptor(path: str | Path, flags: int, mode: int = 0o666, *, follows_links: bool = True) -> int:
    """Return a descriptor of a plain file, without waiting for anything.

    Anything else at that path is a BadFile; so is a link, unless `follows_links`. Other errors are those of the system.
    """
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags | (0 if follows_links else getattr(os, "O_NOFOLLOW", 0)), mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follows_links:
            raise BadFile(f"{path}: is a symbolic link, which is not followed here.", hint="Remove it.") from error
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise BadFile(f"{path}: is not a plain file.") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile(f"{path}: is not a plain file.")
    return descriptor


def open_plain(path: str | Path) -> io.BufferedReader:
    """Return a plain file, open for reading."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")
