"""The contents of the results page's pictures of what was measured in the lab, and of the engine's decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands_bench.result_plots import LinePlot, draw_groups
from manyhands_bench.results import Result, StoredResults, first_result

Column = list[float | None]


def draw_lab_results(stored: StoredResults, folder: Path) -> list[Path]:
    """Draw every picture for which there are results, and return the files."""
    drawn = [
        _tiles(stored, folder / "results-tile-lab.png"),
        _hybrid(stored, folder / "results-asteroid-hybrid.png"),
        _recovery(stored, folder / "results-asteroid-recovery.png"),
        _decisions(stored, folder / "results-split-decisions.png"),
    ]
    return [path for path in drawn if path is not None]


def _where(result: Result) -> str:
    return f"{result.host.slug}, {result.date[:10]}"


def _panel(title: str, places: Sequence[str], lines: Mapping[str, Column], up: str) -> LinePlot | None:
    """Return a panel of the places that have any value; None where there is none."""
    kept = [n for n in range(len(places)) if any(column[n] is not None for column in lines.values())]
    if not kept:
        return None
    return LinePlot(title, [places[n] for n in kept], {k: [v[n] for n in kept] for k, v in lines.items()}, up)


def _drawn(panels: Sequence[LinePlot | None], path: Path) -> Path | None:
    drawn = [panel for panel in panels if panel is not None]
    return draw_groups(drawn, path) if drawn else None


def _tiles(stored: StoredResults, path: Path) -> Path | None:
    """Draw TILE's Fig. 6.1, 6.2, 6.3 and 6.6."""
    result = first_result(stored, "tile-lab")
    if result is None:
        return None
    get, where = result.figures.get, _where(result)
    splits = [f"{devices}x{tiles}" for devices in range(1, 7) for tiles in range(1, 5)]
    batches, tiles = (1, 2, 4, 8, 16), (1, 2, 4, 8, 24)
    groupings = {
        "planned": "ours, planned",
        "every_layer": "every layer",
        "1_group": "1 group",
        "optimal": "the paper's",
    }
    ways = {"tiles": "ours, tiles", "data_parallel": "data parallel", "layer_partition": "layer partition"}
    panels = [
        _panel(
            f"TILE, Fig. 6.1: speed-up over one core, one sample, devices x tiles on each, lab ({where})", splits,
            {
                "ours": [get(f"fig_6_1_speedup_{split}") for split in splits],
                "ours, without the weights' sums": [get(f"fig_6_1_speedup_{s}_without_weights") for s in splits],
            }, "times",
        ),
        _panel(
            f"TILE, Fig. 6.2: resident memory of the fullest tile, above a bare import of torch ({where})",
            [f"{count} tile(s)" for count in tiles],
            {"ours": [_megabytes(get(f"rss_bytes_{count}_tiles")) for count in tiles]}, "MB",
        ),
        _panel(
            "TILE, Fig. 6.3: seconds of a step on 24 tiles by grouping, in the lab", [f"batch {n}" for n in batches],
            {text: [get(f"fig_6_3_seconds_{key}_{n}") for n in batches] for key, text in groupings.items()}, "seconds",
        ),
        _panel(
            "TILE, Fig. 6.6: seconds of a step on two devices of four cores, in the lab",
            [f"batch {n}" for n in batches],
            {text: [get(f"fig_6_6_seconds_{key}_{n}") for n in batches] for key, text in ways.items()}, "seconds",
        ),
    ]  # fmt: skip
    return _drawn(panels, path)


def _megabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _hybrid(stored: StoredResults, path: Path) -> Path | None:
    """Draw a hybrid plan's step beside those of the baselines, measured and predicted."""
    result = first_result(stored, "pipeline-hybrid")
    if result is None:
        return None
    sides = {
        "manyhands": "ours, hybrid", "data_parallel": "data parallel", "pipeline_parallel": "pipeline parallel",
        "dapple": "DAPPLE",
    }  # fmt: skip
    lines: dict[str, Column] = {
        "measured": [result.figures.get(f"hybrid_lab_seconds_{side}") for side in sides],
        "predicted": [result.figures.get(f"hybrid_lab_predicted_seconds_{side}") for side in sides],
    }
    title = f"Seconds of a step, MobileNetV2 on environment C in the lab ({_where(result)})"
    return _drawn([_panel(title, list(sides.values()), lines, "seconds")], path)


def _recovery(stored: StoredResults, path: Path) -> Path | None:
    """Draw ASTEROID's Fig. 16: seconds, bytes and throughput after the loss of each device."""
    result = first_result(stored, "recovery-lab")
    if result is None:
        return None
    devices = ("tx2-1", "nano-1", "nano-2", "nano-3")
    panels = []
    for key, text, up in (
        ("recovery_seconds", "seconds to go on after a kill", "seconds"),
        ("megabytes_moved", "state moved", "MB"), ("samples_per_second", "throughput afterwards", "samples/s"),
    ):  # fmt: skip
        lines: dict[str, Column] = {
            label: [result.figures.get(f"lab_{key}_{how}_{device.replace('-', '_')}") for device in devices]
            for how, label in (("light", "ours, incremental"), ("heavy", "gathered and given out"))
        }
        title = f"ASTEROID, Fig. 16: {text}, EfficientNet-B1 on environment D in the lab ({_where(result)})"
        panels.append(_panel(title, devices, lines, up))
    return _drawn(panels, path)


def _decisions(stored: StoredResults, path: Path) -> Path | None:
    """Draw what deciding again has gained, by link."""
    result = first_result(stored, "split-decisions")
    if result is None:
        return None
    begin = "gain_over_frozen_link_"
    links = [key.removeprefix(begin) for key in result.figures if key.startswith(begin)]
    lines: dict[str, Column] = {
        "over the first deployment kept": [result.figures.get(f"{begin}{link}") for link in links],
        "over the best one to keep": [result.figures.get(f"gain_over_hindsight_link_{link}") for link in links],
    }
    panel = _panel("SPLIT: speed of the decision engine, simulated over 180 s of each link", links, lines, "times")
    return _drawn([panel], path)
