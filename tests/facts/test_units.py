"""Units: what a person writes comes back as a number, and a number as what a person reads."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.facts.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 GB", 4 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1kB", 1000),
        ("7", 7),
        (7, 7),
        (1.6, 2),
        (".5 KB", 500),
        ("0 B", 0),
    ],
)
def test_bytes(text: float | str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100 Mbit/s", 12.5e6), ("1 Gbit/s", 125e6), ("12 MB/s", 12e6), ("8 bit/s", 1.0), ("1e3 kbit/s", 125e3)],
)
def test_rates_are_bytes_per_second(text: str, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2 ms", 0.002), ("60 us", 60e-6), ("60 µs", 60e-6), ("1.5 min", 90.0), ("3", 3.0), (0.25, 0.25), ("1 h", 3600.0)],
)
def test_seconds(text: float | str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate, parse_seconds])
@pytest.mark.parametrize(
    "bad",
    ["", "fast", "-1 s", "-1 GB", "1 parsec", "1 2 s", "nan", "inf", True, None, [1], math.nan, math.inf, -1, "1e999"],
)
def test_nonsense_is_refused_with_the_fields_name(parse: Callable[[object, str], float], bad: object) -> None:
    with pytest.raises(BadValue, match="the field"):
        parse(bad, "the field")


def test_a_rate_needs_a_unit_and_the_error_shows_one() -> None:
    with pytest.raises(BadValue, match="no unit") as caught:
        parse_rate(100, "link.rate")
    assert "100 Mbit/s" in caught.value.hint


def test_bits_and_bytes_are_not_confused() -> None:
    assert parse_rate("8 Mbit/s") == parse_rate("1 MB/s")
    with pytest.raises(BadValue, match="cannot read '8 Mb/s'"):
        parse_rate("8 Mb/s")  # bits or bytes? ask


@given(st.floats(1, 9e17))
def test_what_is_written_reads_back_within_three_digits(value: float) -> None:
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=0.006, abs=0.55)
    assert parse_rate(format_rate(value)) == pytest.approx(value, rel=0.006)


@given(st.floats(1e-9, 1e6))
def test_seconds_read_back_within_three_digits(value: float) -> None:
    assert parse_seconds(format_seconds(value)) == pytest.approx(value, rel=0.006)


def test_written_like_a_person() -> None:
    assert format_bytes(812_000_000) == "812 MB"
    assert format_rate(12_500_000) == "100 Mbit/s"
    assert format_seconds(0.0021) == "2.1 ms"
    assert format_seconds(0) == "0 ns"
    assert format_count(4_090_000_000) == "4.09 G"
    assert format_count(7) == "7"


def test_rounding_does_not_pass_the_unit() -> None:
    assert format_bytes(999_999_488) == "1 GB"
    assert format_bytes(999_400_000) == "999 MB"
    assert format_bytes(999_500_000) == "1 GB"
    assert format_bytes(-999_999_999) == "-1 GB"
    assert format_rate(999_999 / 8) == "1 Mbit/s"
    assert format_seconds(0.9999) == "1 s"
    assert format_seconds(1234.4) == "1234 s"
    assert format_bytes(1.5e15) == "1500 TB"
    assert format_bytes(0.5) == "0.5 B"


@given(st.floats(1e-12, 1e25))
def test_no_number_is_written_with_an_exponent_or_past_its_unit(value: float) -> None:
    for text in (format_bytes(value), format_rate(value), format_seconds(value)):
        number, unit = text.split()
        assert "e+" not in number
        assert float(number) < 1000 or unit in ("TB", "Gbit/s", "s")
