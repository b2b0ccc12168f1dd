"""The README's picture: the plan in drawings/desk.json, each device's layers, and one step."""

from __future__ import annotations

import json
from typing import Any

from making.pen import COLOURS, Pen
from making.planned import FILE

LEFT, WIDTH, ROW = 150.0, 700.0, 46.0
KINDS = {"pi5": "Raspberry Pi 5"}


def draw() -> str:
    planned = json.loads(FILE.read_text())
    devices = list(dict.fromkeys(name for stage in planned["plan"]["stages"] for name in stage["devices"]))
    colour = {name: COLOURS[place] for place, name in enumerate(devices)}
    pen = Pen(LEFT + WIDTH + 30, 204 + (ROW + 32) * len(devices), "One network, shared among four devices")
    pen.text(24, 34, "One network, four devices, one plan", "title")
    pen.text(
        24, 54, f"{planned['network']}, batch {planned['batch_size']}: {_told(planned['plan']['stages'])}", "faint"
    )
    edges = _edges([layer["macs"] for layer in planned["layers"]])
    top = _plan(pen, planned, devices, colour, edges, 76)
    _step(pen, planned, devices, colour, top + 44)
    return pen.svg()


def _told(stages: list[dict[str, Any]]) -> str:
    """Return each stage in words."""
    parts = []
    for stage in stages:
        first, end = stage["layers"]
        count = len(stage["devices"])
        parts.append(f"layers {first} to {end - 1} {f'by tiles on {count} devices' if count > 1 else 'on one device'}")
    return ", ".join(parts)


def _edges(works: list[int]) -> list[float]:
    """Return the edges between layers: each is as wide as its work, and no narrower than can be seen."""
    least = sum(works) / 120
    wide = [max(work, least) for work in works]
    edges = [LEFT]
    for width in wide:
        edges.append(edges[-1] + WIDTH * width / sum(wide))
    return edges


def _plan(
    pen: Pen, planned: dict[str, Any], devices: list[str], colour: dict[str, str], edges: list[float], top: float
) -> float:
    """Draw rows of devices over columns of layers, and return where they end; a tile's box is as high as its part of
    the image."""
    for first, last in zip(edges, edges[1:]):
        pen.box(first, top, last - first, 14, "none edge", 2)
    pen.text(LEFT - 12, top + 11, "layers", "end faint small")
    top += 24
    for place, name in enumerate(devices):
        y = top + place * ROW
        kind = KINDS.get(name.split("-")[0])
        pen.text(LEFT - 12, y + (18 if kind else 25), name, "end")
        pen.text(LEFT - 12, y + 33, kind or "", "end faint small")
        pen.box(LEFT, y, WIDTH, ROW - 6, "none", 3)
    for stage in planned["plan"]["stages"]:
        first, last = (edges[place] for place in stage["layers"])
        rows = stage.get("share", {}).get("rows", [1.0])
        for name, part in zip(stage["devices"], rows):
            y = top + devices.index(name) * ROW
            share = part / sum(rows)
            words = "all" if len(rows) == 1 else f"{share:.0%} of the image"
            if last - first < 110:
                words = words.removesuffix(" of the image")
            pen.box(first, y, last - first, ROW - 6, f"{colour[name]} thin", 3)
            pen.label(first, y + (ROW - 6) * _above(rows, stage["devices"].index(name)), last - first,
                      max((ROW - 6) * share, 15) if share < 1 else ROW - 6, words, f"{colour[name]} edge")  # fmt: skip
    return top + ROW * len(devices)


def _above(rows: list[float], place: int) -> float:
    """Return how far down a tile begins, as a part of its row of the drawing, within which it is kept."""
    return min(sum(rows[:place]) / sum(rows), 1 - 15 / (ROW - 6)) if len(rows) > 1 else 0.0


def _step(pen: Pen, planned: dict[str, Any], devices: list[str], colour: dict[str, str], top: float) -> None:
    """Draw one simulated step: what each device computes, and when."""
    seconds = planned["seconds"]
    alone = planned["alone_seconds"]["laptop"]
    pen.text(24, top, "One training step", "title")
    pen.text(
        190, top, f"simulated: {seconds:.2f} s; the laptop alone would take {alone:.2f} s, "
        f"a Pi 5 {planned['alone_seconds']['pi5']:.1f} s (estimated speeds)", "faint",
    )  # fmt: skip
    top += 14
    height = 26
    for place, name in enumerate(devices):
        y = top + place * (height + 6)
        pen.text(LEFT - 12, y + 17, name, "end")
        pen.box(LEFT, y, WIDTH, height, "none", 3)
        for start, end, kind in _merged([span for span in planned["spans"] if span["device"] == name], seconds / WIDTH):
            style = f"{colour[name]} thin" if kind == "forward" else colour[name]
            pen.box(LEFT + WIDTH * start / seconds, y, WIDTH * (end - start) / seconds, height, style, 0)
    y = top + len(devices) * (height + 6) + 14
    pen.box(LEFT, y - 10, 14, 12, "a thin", 2)
    pen.text(LEFT + 20, y, "forward", "small faint")
    pen.box(LEFT + 80, y - 10, 14, 12, "a", 2)
    pen.text(LEFT + 100, y, "backward and update", "small faint")
    pen.box(LEFT + 230, y - 10, 14, 12, "none", 2)
    pen.text(LEFT + 250, y, "waits", "small faint")
    pen.text(LEFT + WIDTH, y, planned["command"], "small faint end")


def _merged(spans: list[dict[str, Any]], gap: float) -> list[tuple[float, float, str]]:
    """Return spans with neighbours of one kind joined if less than a pixel lies between them."""
    joined: list[tuple[float, float, str]] = []
    for span in sorted(spans, key=lambda span: span["start"]):
        kind = "forward" if span["kind"] == "forward" else "backward"
        if joined and joined[-1][2] == kind and span["start"] - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span["end"]), kind)
        else:
            joined.append((span["start"], span["end"], kind))
    return joined
