"""Safe reading of files of data sets, which may come from anywhere: only plain ones are opened, and no more is read
than allowed."""

from __future__ import annotations

import os
from pathlib import Path

from manyhands.facts.errors import BadData, BadFile
from manyhands.facts.units import format_bytes
from manyhands.files.plain import open_plain

_CLUTTER = ("thumbs.db", "desktop.ini", "__macosx")


def read_bytes(file: Path, largest_bytes: int) -> bytes:
    """Return all of a plain file, or raise an error for one that is longer than allowed."""
    try:
        with open_plain(file) as opened:
            content = opened.read(largest_bytes + 1)
    except FileNotFoundError as error:
        raise BadFile(f"{file}: there is no such file.") from error
    except OSError as error:
        raise BadFile(f"{file}: cannot be read: {error.strerror or error}.") from error
    if len(content) > largest_bytes:
        raise BadFile(f"{file}: is longer than {format_bytes(largest_bytes)}.")
    return content


def read_text(file: Path, largest_bytes: int, encoding: str = "utf-8-sig") -> str:
    try:
        return read_bytes(file, largest_bytes).decode(encoding)
    except UnicodeDecodeError as error:
        raise BadFile(f"{file}: is not text in {encoding.upper()[:5]}: byte {error.start} is wrong.") from error


def entries(folder: Path, *, most: int) -> list[Path]:
    """Return what lies in a folder, by name, without what systems leave there; more than `most` entries are an
    error."""
    names: list[str] = []
    try:
        with os.scandir(folder) as scanned:
            for entry in scanned:
                if not entry.name.startswith(".") and entry.name.lower() not in _CLUTTER:
                    names.append(entry.name)
                if len(names) > most:
                    raise BadData(f"{folder}: holds more than {most:,} files; at most so many are read.")
    except OSError as error:
        raise BadFile(f"{folder}: cannot be read: {error.strerror or error}.") from error
    return [folder / name for name in sorted(names)]


def has_any(folder: Path, suffix: str) -> bool:
    """Return whether a file of that suffix is in the folder; a folder that may not be read has none."""
    try:
        with os.scandir(folder) as scanned:
            return any(entry.name.lower().endswith(suffix) for entry in scanned)
    except OSError:
        return False
