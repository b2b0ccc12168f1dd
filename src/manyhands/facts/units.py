"""Numbers with units: '100 Mbit/s', '2 ms', '4 GB', read and written the way a person does.

Inside the program every quantity is a plain float in seconds, bytes or bytes per second, and its name says so.
"""

from __future__ import annotations

import math
import re

from manyhands.facts.errors import BadValue

_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*$")

_BYTES = {"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_RATES = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8,
          "B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}  # fmt: skip
_SECONDS = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60, "h": 3600}


def _parse(value: float | str, units: dict[str, float], quantity: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValue(f"{quantity}: {value!r} is not a quantity.", hint=f"Write it like '{example}'.")
    if isinstance(value, (int, float)):
        if "" not in units:
            raise BadValue(f"{quantity}: {value!r} has no unit.", hint=f"Write it like '{example}'.")
        number, unit = float(min(value, 1e300)), ""
    else:
        match = _NUMBER.match(value[:60])
        if match is None or match.group(2) not in units:
            unit_names = ", ".join(u for u in units if u)
            raise BadValue(
                f"{quantity}: cannot read '{value}'.", hint=f"Write it like '{example}' (units: {unit_names})."
            )
        number, unit = float(match.group(1)), match.group(2)
    result = number * units[unit]
    if not 0 <= result < 1e30:
        raise BadValue(f"{quantity}: {value!r} must be a number between 0 and 1e30.")
    return result


def parse_bytes(value: float | str, quantity: str = "size") -> int:
    """Return the bytes in '4 GB', '512 MiB' or a plain number."""
    return round(_parse(value, _BYTES, quantity, "4 GB"))


def parse_rate(value: float | str, quantity: str = "rate") -> float:
    """Return the bytes per second in '100 Mbit/s' or '12 MB/s'. A plain number has no unit and is refused."""
    return _parse(value, _RATES, quantity, "100 Mbit/s")


def parse_seconds(value: float | str, quantity: str = "time") -> float:
    """Return the seconds in '2 ms', '0.5 s' or a plain number."""
    return _parse(value, _SECONDS, quantity, "2 ms")


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    index = next((index for index, (size, _) in enumerate(steps) if abs(value) >= size), len(steps) - 1)
    size, unit = steps[index]
    text = f"{value / size:.3g}"
    if abs(float(text)) >= 1000:  # rounded up to the next unit, or beyond the last
        return f"{value / size:.0f} {unit}" if index == 0 else f"{math.copysign(1, value):g} {steps[index - 1][1]}"
    return f"{text} {unit}"


def format_bytes(count: float) -> str:
    """Return '812 MB' for 812_000_000."""
    return _scaled(count, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])


def format_rate(bytes_per_second: float) -> str:
    """Return '100 Mbit/s' for 12_500_000 bytes per second."""
    return _scaled(bytes_per_second * 8, [(1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")])


def format_seconds(seconds: float) -> str:
    """Return '2.1 ms' for 0.0021."""
    return _scaled(seconds, [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])


def format_count(count: float) -> str:
    """Return '4.09 G' for 4_090_000_000: multiply-accumulates, parameters."""
    return _scaled(count, [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")]).strip()
