"""Arrays packed in one file (.npz): sizes are known before memory is allocated, and all its faults are one kind of
error."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import psutil

from manyhands.facts.errors import BadData, BadFile, ManyhandsError
from manyhands.facts.units import format_bytes


@contextmanager
def reading(path: Path, *, hint: str = "", memory_hint: str = "") -> Iterator[None]:
    """Raise BadFile, which names the file, for what numpy and zipfile raise of a file that is not theirs, or too
    large."""
    try:
        yield
    except ManyhandsError:
        raise
    except MemoryError as error:
        raise BadData(f"{path}: its arrays do not fit this machine's memory.", hint=memory_hint) from error
    except Exception as error:  # from tokenize.TokenError to lzma.LZMAError: they raise nearly anything
        raise BadFile(f"{path}: cannot be read: {str(error)[:200]}.", hint=hint) from error


def check_room(path: Path, needed_bytes: int, largest_bytes: int, *, hint: str = "") -> None:
    """Refuse arrays that are too large, before anything is unpacked: a small file may unpack to all of a machine's
    memory."""
    if needed_bytes > largest_bytes:
        raise BadData(
            f"{path}: {format_bytes(needed_bytes)} unpacked; at most {format_bytes(largest_bytes)} are read.", hint=hint
        )
    available_bytes = int(psutil.virtual_memory().available)
    if needed_bytes > available_bytes:
        raise BadData(
            f"{path}: {format_bytes(needed_bytes)} unpacked; {format_bytes(available_bytes)} of memory are left here.",
            hint=hint,
        )


def check_texts(path: Path, name: str, texts: numpy.ndarray) -> None:
    """Refuse an array of text with invalid letters: Python breaks on them, or cannot print them."""
    codes = numpy.ascontiguousarray(texts).view(numpy.dtype(numpy.uint32).newbyteorder(texts.dtype.byteorder))
    if ((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))).any():
        raise BadData(f"{path}: {name} holds text with letters that there are not.")


def sizes_of(path: Path) -> dict[str, int]:
    """Return array -> its bytes, unpacked. Two entries of one name are refused: numpy would read one, and manyhands the
    other."""
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(path) as packed:
        for entry in packed.infolist():
            name = entry.filename.removesuffix(".npy")
            if name in sizes:
                raise BadFile(f"{path}: holds {name:.80} twice.", hint="Write it again with numpy.savez.")
            sizes[name] = entry.file_size
    return sizes
