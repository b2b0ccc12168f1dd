"""The pictures of `manyhands bench split`."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands_bench.split.plots import Course, Study, draw_course, draw_lines, draw_studies


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    rates = [(0.01 * place, 5.0 + place % 3) for place in range(1000)]
    course = Course(rates, rates, [(0.0, 3), (6.0, 9)], [(0.0, 10.0), (6.0, 4.0)], 10.0, 12)
    drawn = [
        draw_course(course, tmp_path / "18.png", "Fig. 18"),
        draw_lines({"ours": [(1, 2), (2, 3)], "k0": [(1, 1), (2, 2)]}, tmp_path / "16.png", across="x", up="y",
                   title="Fig. 16", is_logarithmic=True),
        draw_studies([Study("K", ["1", "5"], {"32 bits": [0.5, 0.4]}), Study("bits", ["2"], {"a": [0.1]})], 0.6,
                     tmp_path / "6.png", "Fig. 6-8"),
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
