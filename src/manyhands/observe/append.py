"""Files that only grow and are valid whenever they are read: events.jsonl and metrics.csv of a run."""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from manyhands.facts.errors import BadFile, BadValue, unknown
from manyhands.files.documents import file_mode, make_folder, write_failed
from manyhands.files.plain import open_descriptor

_BLOCK_BYTES = 65_536
_OWN_FIELDS = ("time", "event")


class LineFile:
    """A file to which any thread appends whole lines, each by one write. One process writes a file at a time."""

    def __init__(self, path: str | Path) -> None:
        """Open or create the file. A last line that a crash left without its end is cut off."""
        self.path = Path(path)
        self._lock = threading.Lock()
        self._descriptor = -1
        self._is_torn = False
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            make_folder(self.path.parent)
            self._descriptor = open_descriptor(self.path, flags, file_mode(self.path), follows_links=False)
            self._fix()
        except OSError as error:
            self.close()
            raise write_failed(self.path, error) from error

    def write(self, line: str) -> None:
        """Append one line; its end is added. After an error the file is as it was before."""
        if line.splitlines() not in ([], [line]):  # every reader must see one line
            raise BadValue(f"{self.path}: '{line:.60}' is more than one line.")
        try:
            content = line.encode() + b"\n"
        except UnicodeEncodeError as error:
            raise BadValue(f"{self.path}: the line holds half a character pair and is not UTF-8.") from error
        with self._lock:
            if self._descriptor < 0:
                raise BadFile(f"{self.path}: is closed and cannot be written.")
            try:
                if self._is_torn:
                    self._fix()
                written = os.write(self._descriptor, content)
                if written < len(content):
                    self._is_torn = True
                    self._fix()
                    short = OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes fit")
                    raise write_failed(self.path, short, len(content))
            except OSError as error:
                raise write_failed(self.path, error, len(content)) from error

    def write_event(self, event: str, /, **facts: object) -> None:
        """Append a JSON object: the UTC time, the event's name, and plain facts about it."""
        if reserved := [name for name in _OWN_FIELDS if name in facts]:
            raise BadValue(f"{self.path}: an event has a field '{reserved[0]}' of its own.")
        time = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        try:
            self.write(json.dumps({"time": time, "event": event, **{k: _plain(v) for k, v in facts.items()}}))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadValue(f"{self.path}: the event '{event}' cannot be written as JSON: {error}") from error

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                try:
                    os.close(descriptor)
                except OSError as error:
                    raise write_failed(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _fix(self) -> None:
        """Cut off whatever follows the last line's end."""
        size = place = os.fstat(self._descriptor).st_size
        keep = 0
        while place > 0:
            place, until = max(0, place - _BLOCK_BYTES), place
            os.lseek(self._descriptor, place, os.SEEK_SET)
            block = os.read(self._descriptor, until - place)
            if (newline := block.rfind(b"\n")) >= 0:
                keep = place + newline + 1
                break
        if keep < size:
            os.ftruncate(self._descriptor, keep)
        self._is_torn = False


class Metrics:
    """Numbers in a CSV file, a row at a time. Where the file exists, rows are added below its last one."""

    def __init__(self, path: str | Path, columns: Iterable[str]) -> None:
        self.path, self.columns = Path(path), tuple(columns)
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise BadValue(f"{self.path}: columns must differ and be one at least, not {list(self.columns)}.")
        for name in self.columns:
            if not name.isprintable() or name != name.strip() or not name or any(c in name for c in ',"'):
                raise BadValue(f"{self.path}: '{name:.60}' cannot be a column's name.")
        self._file = LineFile(self.path)
        try:
            self._begin(",".join(self.columns))
        except BaseException:
            self._file.close()
            raise

    def write(self, /, **values: float | None) -> None:
        """Append a row; columns without a value stay empty."""
        for name in values:
            if name not in self.columns:
                raise unknown(f"column of {self.path.name}", name, self.columns)
        self._file.write(",".join(self._cell(name, values.get(name)) for name in self.columns))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, header: str) -> None:
        """Write the header, or check that it is the one the file has."""
        try:
            with open(self.path, "rb") as file:
                first = file.readline(_BLOCK_BYTES).decode(errors="replace").rstrip("\r\n")
                is_new = file.tell() == 0
        except OSError as error:
            raise BadFile(f"{self.path}: cannot be read: {error.strerror or error}.") from error
        if is_new:
            self._file.write(header)
        elif first != header:
            raise BadFile(
                f"{self.path}: has the columns {first:.200}, not {header:.200}.",
                hint="Move the file away, or start the run in a new folder.",
            )

    def _cell(self, name: str, value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, numbers.Integral):
            return repr(int(value))
        if isinstance(value, numbers.Real):  # also those of numpy, whose own repr is not a number
            return repr(float(value))
        raise BadValue(f"{self.path}: '{name}' is {type(value).__name__}, not a number.")


def _plain(value: object) -> object:
    """Return the value with NaN and infinities as text: JSON has neither, and the events that matter most may hold
    them."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
