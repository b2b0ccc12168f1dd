"""Arrays packed in one file (.npz): sizes before memory is taken, and one word for all that can be wrong with it."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manyhands.facts.errors import BadData, BadFile

_BROKEN = (OSError, EOFError, RuntimeError, NotImplementedError, ValueError, zipfile.BadZipFile, zlib.error)


@contextmanager
def reading(path: Path, *, hint: str = "", memory_hint: str = "") -> Iterator[None]:
    """What numpy and zipfile raise of a file that is none of theirs, or too large, is its fault, said so."""
    try:
        yield
    except MemoryError as error:
        raise BadData(f"{path}: its arrays do not fit this machine's memory.", hint=memory_hint) from error
    except _BROKEN as error:
        raise BadFile(f"{path}: cannot be read: {str(error)[:200]}.", hint=hint) from error


def sizes_of(path: Path) -> dict[str, int]:
    """Array -> its bytes, unpacked."""
    with zipfile.ZipFile(path) as packed:
        return {entry.filename.removesuffix(".npy"): entry.file_size for entry in packed.infolist()}
