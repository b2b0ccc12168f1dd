"""The pictures of `manyhands bench infer`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from infer_methods import measured, methods
from manyhands_bench.infer.accuracy import Accuracy, DecoupledVariant
from manyhands_bench.infer.drawn import draw_lab, draw_memory, draw_scores, draw_simulated
from manyhands_bench.infer.simulated import (
    ALL,
    BOTH,
    METHODS,
    PAIRS,
    TILED,
    Simulated,
)


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    tables = {"net": {pair: methods(0.3, 0.2, 0.1) for pair in PAIRS}}
    found = Simulated(tables, {"net": methods(0.5, 0.4, 0.3)}, {}, 7.0)  # type: ignore[arg-type]
    own = {name: measured(0.4, 0.5) for name in TILED} | {BOTH: measured(0.2, 0.2), ALL: measured(0.1, 0.2, math.nan)}
    ways = (
        DecoupledVariant(),
        *(DecoupledVariant(widen, shuffles) for widen in (1.0, 1.5) for shuffles in (0, 3, "all")),
    )
    rows = {str(way): [0.8 + 0.01 * place, 0.82] for place, way in enumerate(ways)}
    drawn = [
        *draw_simulated(found, tmp_path),
        draw_memory({name: 10**6 * place for place, name in enumerate(METHODS, 1)}, "net", tmp_path),
        draw_lab({"880_0.15": own, "240_20": own}, "net", tmp_path),
        draw_scores(rows, Accuracy(ways=ways, seeds=2), tmp_path),
    ]
    assert [path.name for path in drawn] == ["fig_8_net.png", "fig_10.png", "fig_12.png", "lab.png", "accuracy.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
