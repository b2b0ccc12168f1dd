"""A link's recorded rate over time, and its form as text.

    0     16.8          a moment and a rate: s, Mbit/s
    0.840 22.5
    1.840 25.8 3.1      or two: up (from the edge), then down

Each rate holds until the next line; after the last it begins again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import msgspec

from manyhands.facts.errors import BadFile, BadValue

MOST_LINES = 1_000_000
_BYTES_PER_MEGABIT = 1e6 / 8
_SHORTEST_SECONDS = 1e-6
_HINT = "Write lines of: 12.0 31.5 (s, Mbit/s), or 12.0 31.5 80 (s, up, down)."


class Trace(msgspec.Struct, frozen=True, dict=True):
    """The recorded rate of one direction."""

    seconds: tuple[float, ...]
    bytes_per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or len(self.seconds) != len(self.bytes_per_second):
            raise BadValue("A trace has one rate for each moment, and at least one.")
        if not all(map(math.isfinite, self.seconds)) or any(not a < b for a, b in pairwise(self.seconds)):
            raise BadValue("A trace's moments must follow each other.")
        if any(not 0 <= rate < math.inf for rate in self.bytes_per_second):
            raise BadValue("A trace's rates must be >= 0.")
        if not 0 < self.length_seconds < math.inf:
            raise BadValue("A trace's moments are too far apart, or too near.")

    @cached_property
    def length_seconds(self) -> float:
        """The length of the recording; the last rate lasts as long as the ones before it, on average."""
        first, last, count = self.seconds[0], self.seconds[-1], len(self.seconds)
        return (last - first) * count / (count - 1) if count > 1 else 1.0

    def at(self, seconds: float) -> tuple[float, float]:
        """Return the rate at a moment after its beginning, and how long it holds from then on."""
        place = seconds % self.length_seconds + self.seconds[0]
        index = max(0, bisect_right(self.seconds, place) - 1)
        return self.bytes_per_second[index], max(self._end(index) - place, _SHORTEST_SECONDS)

    def rate(self, seconds: float) -> float:
        """Return the bytes per second at a moment after its beginning."""
        return self.at(seconds)[0]

    def _end(self, index: int) -> float:
        return self.seconds[index + 1] if index + 1 < len(self.seconds) else self.seconds[0] + self.length_seconds

    @cached_property
    def _passed(self) -> tuple[float, ...]:
        """Bytes from the beginning to each moment, and to the end."""
        sums = [0.0]
        for index, rate in enumerate(self.bytes_per_second):
            sums.append(sums[-1] + rate * (self._end(index) - self.seconds[index]))
        return tuple(sums)

    def integral(self, begin: float, end: float) -> float:
        """Return the bytes that pass between two moments after its beginning."""
        return self._until(end) - self._until(begin)

    def _until(self, seconds: float) -> float:
        rounds, place = divmod(seconds, self.length_seconds)
        place += self.seconds[0]
        index = max(0, bisect_right(self.seconds, place) - 1)
        return (
            rounds * self._passed[-1]
            + self._passed[index]
            + self.bytes_per_second[index] * (place - self.seconds[index])
        )

    @property
    def mean(self) -> float:
        """Bytes per second, over all of it."""
        return self._passed[-1] / self.length_seconds

    def scaled(self, *, rates: float = 1.0, times: float = 1.0) -> Trace:
        """Return the same ups and downs with rates and times multiplied."""
        for factor in (rates, times):
            if not 0 < factor < math.inf:
                raise BadValue(f"A trace is scaled by {factor}; it must be > 0.")
        return Trace(
            tuple(moment * times for moment in self.seconds), tuple(rate * rates for rate in self.bytes_per_second)
        )


class LinkTrace(msgspec.Struct, frozen=True):
    """The recorded rates of both directions of a link, from the edge's side."""

    up: Trace
    down: Trace
    is_one_way: bool = False
    """Whether one direction was recorded and stands for both."""
    name: str = ""

    @classmethod
    def constant(cls, up_bytes_per_second: float, down_bytes_per_second: float) -> LinkTrace:
        """Return the trace of a link that does not change."""
        return cls(Trace((0.0,), (up_bytes_per_second,)), Trace((0.0,), (down_bytes_per_second,)), name="constant")

    def scaled(self, *, rates: float = 1.0, times: float = 1.0) -> LinkTrace:
        return msgspec.structs.replace(
            self, up=self.up.scaled(rates=rates, times=times), down=self.down.scaled(rates=rates, times=times)
        )


def parse_trace(text: str, where: str) -> Trace:
    """Return the trace in lines of `seconds megabits_per_second`; '#' begins a comment."""
    directions = _parsed(text, where)
    if len(directions) > 1:
        raise BadFile(f"{where}: it has two rates a line, up and down; one is wanted here.", hint=_HINT)
    return directions[0]


def parse_link_trace(text: str, where: str) -> LinkTrace:
    """Return the trace in such lines, or in lines with two rates: up and down."""
    directions = _parsed(text, where)
    return LinkTrace(directions[0], directions[-1], is_one_way=len(directions) == 1, name=where)


def _parsed(text: str, where: str) -> list[Trace]:
    """Return one direction, or up and down."""
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if number > MOST_LINES:
            raise BadFile(f"{where}: more than {MOST_LINES} lines, the most that are read.")
        words = line.partition("#")[0].split()
        if not words:
            continue
        row = _row(words)
        if row is None or (rows and len(row) != len(rows[0])):
            raise BadFile(f"{where}:{number}: '{line:.60}' is not a moment and a rate.", hint=_HINT)
        if rows and not row[0] > rows[-1][0]:
            raise BadFile(f"{where}:{number}: {row[0]:g} s does not come after {rows[-1][0]:g} s.", hint=_HINT)
        rows.append(row)
    if not rows:
        raise BadFile(f"{where}: there is no line with a moment and a rate in it.", hint=_HINT)
    moments, *directions = (tuple(column) for column in zip(*rows))
    return [_direction(moments, rates, where) for rates in directions]


def _row(words: Sequence[str]) -> list[float] | None:
    """Return a moment and one or two rates in megabits per second; None where these words are none."""
    if len(words) not in (2, 3) or any("_" in word for word in words):
        return None
    try:
        row = [float(word) for word in words]
    except ValueError:
        return None
    return row if all(map(math.isfinite, row)) and min(row[1:]) >= 0 else None


def _direction(moments: tuple[float, ...], megabits: Sequence[float], where: str) -> Trace:
    try:
        trace = Trace(moments, tuple(rate * _BYTES_PER_MEGABIT for rate in megabits))
    except BadValue as error:
        raise BadFile(f"{where}: {error.message}") from error
    if not 0 < trace.mean < math.inf:
        raise BadFile(f"{where}: nothing ever passes: every rate is 0.", hint=_HINT)
    return trace
