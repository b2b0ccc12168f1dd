"""The results of a run's validations, in RUN/validation.csv: a row each, whole whenever it is read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from manyhands.facts.errors import BadFile
from manyhands.files.documents import write_text_atomic
from manyhands.files.plain import open_plain

FILE = "validation.csv"
COLUMNS = ("step", "epoch", "samples", "seconds")

Row = dict[str, float]


class ValidationLog:
    """The rows so far. A metric that later ones have and earlier ones have not is a column that is empty there."""

    def __init__(self, folder: Path, steps_done: int | None = None) -> None:
        """`steps_done`: of the run that goes on; later rows are forgotten, as those steps are run again. None: a new
        run begins."""
        self.path = folder / FILE
        rows = self._read() if steps_done is not None else []
        self.rows: list[Row] = [row for row in rows if row.get("step", 0) <= (steps_done or 0)]

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        try:
            with io.TextIOWrapper(open_plain(self.path), newline="", errors="replace") as file:
                return [_numbers(row) for row in csv.DictReader(file)]
        except (OSError, csv.Error) as error:
            raise BadFile(f"{self.path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row: `step` is the number of steps done."""
        self.rows.append(dict(row))
        columns = dict.fromkeys([*COLUMNS, *(name for row in self.rows for name in row)])
        text = io.StringIO()
        writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text_atomic(self.path, text.getvalue())


def _numbers(row: Mapping[str | None, str | list[str] | None]) -> Row:
    numbers: Row = {}
    for name, text in row.items():
        if name and isinstance(text, str) and text:
            try:
                numbers[name] = int(text) if text.isdecimal() else float(text)
            except ValueError:
                continue
    return numbers
