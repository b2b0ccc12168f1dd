"""A terminal's screen in memory: enough of ECMA-48 for what rich prints. Bytes in, rows of coloured cells out."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]|\x1b.|[\r\n\b\t]|.", re.S
)


@dataclass(frozen=True)
class Style:
    """The style of a cell: a colour of the palette (None: the default), bold, dim."""

    colour: str | None = None
    bold: bool = False
    dim: bool = False


PLAIN = Style()
Cell = tuple[str, Style]
_BLANK: Cell = (" ", PLAIN)


@dataclass
class Screen:
    """The rows of a terminal, which scroll up when the cursor moves below the last."""

    columns: int
    rows: int
    cells: list[list[Cell]] = field(init=False)
    _row: int = 0
    _column: int = 0
    _style: Style = PLAIN
    _rest: str = ""

    def __post_init__(self) -> None:
        self.cells = [[_BLANK] * self.columns for _ in range(self.rows)]

    def feed(self, text: str) -> None:
        text = self._rest + text
        cut = text.rfind("\x1b")
        is_half = cut >= 0 and not re.match(r"\x1b(?:\[[?\d;]*[A-Za-z]|\][^\x07]*\x07|[^\[\]])", text[cut:])
        self._rest, text = (text[cut:], text[:cut]) if is_half else ("", text)
        for token in _TOKEN.finditer(text):
            if token[2]:
                self._control(token[1], token[2])
            elif token[0][0] != "\x1b":
                self._put(token[0])

    def lines(self) -> list[list[Cell]]:
        """Return the rows without the blanks at their ends."""
        lines = []
        for row in self.cells:
            end = len(row)
            while end and row[end - 1][0] == " ":
                end -= 1
            lines.append(row[:end])
        return lines

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._down()
        elif letter == "\b":
            self._column = max(0, self._column - 1)
        elif letter == "\t":
            self._column = min(self.columns - 1, (self._column // 8 + 1) * 8)
        elif letter >= " ":
            if self._column >= self.columns:
                self._column = 0
                self._down()
            self.cells[self._row][self._column] = (letter, self._style)
            self._column += 2 if unicodedata.east_asian_width(letter) == "W" else 1

    def _down(self) -> None:
        if self._row + 1 < self.rows:
            self._row += 1
        else:
            self.cells = [*self.cells[1:], [_BLANK] * self.columns]

    def _control(self, numbers: str, kind: str) -> None:
        values = [int(number) for number in numbers.split(";") if number.isdigit()]
        count = values[0] if values else 1
        if kind == "A":
            self._row = max(0, self._row - count)
        elif kind == "B":
            self._row = min(self.rows - 1, self._row + count)
        elif kind == "C":
            self._column = min(self.columns - 1, self._column + count)
        elif kind == "D":
            self._column = max(0, self._column - count)
        elif kind == "G":
            self._column = count - 1
        elif kind == "H":
            self._row, self._column = (values[0] - 1 if values else 0), (values[1] - 1 if len(values) > 1 else 0)
        elif kind == "K":
            self._erase_line(values[0] if values else 0)
        elif kind == "J":
            self._erase_line(0)
            for row in range(self._row + 1, self.rows):
                self.cells[row] = [_BLANK] * self.columns
        elif kind == "m":
            self._restyle(values or [0])

    def _erase_line(self, which: int) -> None:
        row = self.cells[self._row]
        first, last = {0: (self._column, self.columns), 1: (0, self._column + 1), 2: (0, self.columns)}[which]
        row[first:last] = [_BLANK] * (last - first)

    def _restyle(self, values: list[int]) -> None:
        colour, bold, dim = self._style.colour, self._style.bold, self._style.dim
        while values:
            value = values.pop(0)
            if value == 0:
                colour, bold, dim = None, False, False
            elif value in (1, 2, 22):
                bold, dim = (value == 1) or (bold and value == 2), (value == 2) or (dim and value == 1)
            elif 30 <= value <= 37 or 90 <= value <= 97:
                colour = "c" + str(value % 10 if value < 90 else value - 90)
            elif value == 39:
                colour = None
            elif value in (38, 48) and values:
                colour = self._far_colour(values, colour if value == 48 else None)
        self._style = Style(colour, bold, dim)

    @staticmethod
    def _far_colour(values: list[int], unchanged: str | None) -> str | None:
        """Return the nearest of eight colours to one of 256 or of 16 million; `unchanged` for a background."""
        if values.pop(0) == 5 and values:
            number = values.pop(0)
            if unchanged is not None or number >= 232:
                return unchanged if unchanged is not None else "c0"
            if number < 16:
                return f"c{number % 8}"
            number -= 16
            red, green, blue = number // 36, number // 6 % 6, number % 6
        elif len(values) >= 3:
            red, green, blue = (values.pop(0) // 43 for _ in range(3))
        else:
            return unchanged
        return unchanged if unchanged is not None else f"c{(red > 2) + 2 * (green > 2) + 4 * (blue > 2)}"
