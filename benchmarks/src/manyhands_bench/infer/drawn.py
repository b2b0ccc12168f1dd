"""Pictures of the results of `manyhands bench infer`, like those of DECNN's section 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from manyhands_bench.infer.accuracy import Accuracy, DecoupledVariant, Rows
from manyhands_bench.infer.lab import MeasuredMethod
from manyhands_bench.infer.networks import GROUPS
from manyhands_bench.infer.plots import Bars, draw_accuracy, draw_bars, draw_scaling
from manyhands_bench.infer.simulated import (
    ALL,
    ALONE,
    METHODS,
    ONE,
    SCALING,
    MethodSeconds,
    Simulated,
    Table,
    pair_text,
)


def draw_simulated(simulated: Simulated, out: Path) -> list[Path]:
    """Draw Fig. 8 for every network, and Fig. 10 if two devices were simulated."""
    paths = [
        _draw_table(rows, out / f"fig_8_{model}.png", f"Fig. 8: {model} on {GROUPS} devices, simulated")
        for model, rows in simulated.tables.items()
    ]
    scaled = {
        model: _speedups(methods, simulated.tables[model][SCALING])
        for model, methods in simulated.two.items()
        if SCALING in simulated.tables[model]
    }
    if scaled:
        title = f"Fig. 10: throughput over one device with the original network, {pair_text(SCALING)}, simulated"
        paths.append(draw_scaling(scaled, out / "fig_10.png", title))
    return paths


def _draw_table(rows: Table, path: Path, title: str) -> Path:
    places = [pair_text(pair).replace(", ", "\n") for pair in rows]
    by_method = {name: list(rows.values()) for name in METHODS}
    return draw_bars(
        [
            Bars("samples a second", places, {k: [1 / row[k].interval for row in v] for k, v in by_method.items()}),
            Bars("latency, ms", places, {k: [1e3 * row[k].latency for row in v] for k, v in by_method.items()}),
        ],
        METHODS, path, title + f"; latency of {ALL} is that in a stream",
    )  # fmt: skip


def _speedups(
    two: Mapping[str, MethodSeconds], four: Mapping[str, MethodSeconds]
) -> dict[str, list[tuple[int, float]]]:
    """Return for each method (devices, throughput over that of the original on one device)."""
    alone = four[ONE].interval
    begin = {name: alone / four[ALONE if "scheme" in name else ONE].interval for name in METHODS}
    return {
        name: [(1, begin[name]), (2, alone / two[name].interval), (GROUPS, alone / four[name].interval)]
        for name in METHODS
        if name not in (ONE, ALONE)
    }


def draw_memory(peaks: Mapping[str, int], network: str, out: Path) -> Path:
    """Draw Fig. 12: the peak tensor bytes of the fullest device by method."""
    sizes = {name: [size / 1e6] for name, size in peaks.items()}
    bars = Bars("MB of tensors, fullest device", [f"{GROUPS} devices, or one"], sizes, labels="{:.0f}")
    return draw_bars(
        [bars], METHODS, out / "fig_12.png", f"Fig. 12: {network}, most tensor bytes alive at once, counted"
    )


def draw_lab(measured: Mapping[str, Mapping[str, MeasuredMethod]], network: str, out: Path) -> Path:
    """Draw the measured throughput and latency, with the prediction as a mark on each bar; in the lab's time."""
    pairs = list(measured)
    places = [pair_text(pair) for pair in pairs]
    names = list(next(iter(measured.values())))
    latency = {
        name: [1e3 * measured[pair][name].latency for pair in pairs]
        for name in names
        if not any(math.isnan(measured[pair][name].latency) for pair in pairs)
    }
    return draw_bars(
        [
            Bars(
                "samples a second", places, {k: [1 / measured[pair][k].interval for pair in pairs] for k in names},
                {k: [1 / measured[pair][k].predicted.interval for pair in pairs] for k in names},
            ),
            Bars(
                "latency, ms", places, latency,
                {k: [1e3 * measured[pair][k].predicted.latency for pair in pairs] for k in latency},
            ),
        ],
        METHODS, out / "lab.png", f"{network} on {GROUPS} devices of the lab, in the lab's time; marks: predicted",
    )  # fmt: skip


def draw_scores(rows: Rows, setting: Accuracy, out: Path) -> Path:
    """Draw accuracy by shuffles, with a line for every width."""
    lines: dict[str, dict[str, list[float]]] = {}
    for way in setting.ways:
        if way.widen:
            lines.setdefault(f"x{way.widen:g}", {})[str(way.shuffles)] = rows[str(way)]
    return draw_accuracy(
        lines, rows[str(DecoupledVariant())], out / "accuracy.png", f"CIFAR-10 (JPEG copy), {setting.text}"
    )
