"""Drawings of the ways to share a network: tiles, pipeline, split, channels, decoupled, mixed."""

from __future__ import annotations

from making.pen import COLOURS, Pen


def tiles() -> str:
    """Draw one device's view of a 2x2 grid: the tile it owns and the halo it fetches; then the way back."""
    pen = Pen(760, 300, "Tiles: each device owns a quarter of every map and fetches a halo")
    pen.text(24, 32, "Tiles: a quarter of every map each, and a halo from the neighbours", "title")
    names = ("pi-1", "pi-2", "pi-3", "pi-4")
    for x, words in ((40, "forward"), (400, "backward (the adjoint)")):
        pen.text(x, 62, words)
        for place, name in enumerate(names):
            left, top = x + place % 2 * 92, 76 + place // 2 * 92
            pen.box(left, top, 90, 90, f"{COLOURS[place]} edge")
            pen.text(left + (45 if place % 2 == 0 else 60), top + (45 if place < 2 else 62), name, "mid small on")
        _halo(pen, x)
    pen.text(240, 96, "pi-1 reads its tile and, in", "small")
    pen.text(240, 112, "its frame, a halo of others:", "small")
    pen.text(240, 128, "one message from each,", "small")
    pen.text(240, 144, "then a group of layers", "small")
    pen.text(240, 160, "without another", "small")
    pen.text(600, 96, "gradients of the halo", "small")
    pen.text(600, 112, "go back to whoever owns", "small")
    pen.text(600, 128, "it, and are added there:", "small")
    pen.text(600, 144, "exactly one device's", "small")
    pen.text(600, 160, "gradients", "small")
    pen.text(
        40,
        284,
        "Weights are whole on every device; gradients are added up once a batch, while backward goes on.",
        "faint small",
    )
    return pen.svg()


def _halo(pen: Pen, x: float) -> None:
    """Draw the halo that pi-1 has of its neighbours, in its own frame."""
    pen.box(x + 92, 76, 16, 90, "none", 0)
    pen.box(x, 168, 90, 16, "none", 0)
    pen.box(x + 92, 168, 16, 16, "none", 0)
    pen.box(x, 76, 108, 108, "hollow sa dash", 2)


def _one_f_one_b(stages: int, count: int, backward: int) -> list[list[tuple[int, int, str, int]]]:
    """Return the passes of each stage with their times: K_p = 2(P-p)-1 forward passes ahead, then one forward, one
    backward."""
    ready: dict[tuple[str, int, int], int] = {}
    spans: list[list[tuple[int, int, str, int]]] = [[] for _ in range(stages)]
    finished = [{"f": 0, "b": 0} for _ in range(stages)]
    free = [0] * stages
    while any(counts["b"] < count for counts in finished):
        options = []
        for p in range(stages):
            ahead = min(2 * (stages - p) - 1, count)
            forward = finished[p]["f"] < count and finished[p]["f"] - finished[p]["b"] < ahead
            kind = "f" if forward else "b"
            which = finished[p][kind]
            if which >= count:
                continue
            needs = (kind, p - 1, which) if kind == "f" else ("b", p + 1, which) if p + 1 < stages else ("f", p, which)
            came = 0 if kind == "f" and p == 0 else ready.get(needs)
            if came is not None:
                options.append((max(free[p], came), p, kind, which))
        start, p, kind, which = min(options)
        end = start + (1 if kind == "f" else backward)
        spans[p].append((start, end, kind, which))
        free[p] = ready[(kind, p, which)] = end
        finished[p][kind] += 1
    return spans


def pipeline() -> str:
    """Draw a round of three stages and eight micro-batches, in the order 1F1B."""
    spans = _one_f_one_b(3, 8, 2)
    length = max(end for row in spans for _, end, _, _ in row) + 2
    unit = 620 / length
    pen = Pen(760, 236, "A pipeline's round: three stages, eight micro-batches, one forward, one backward")
    pen.text(24, 32, "A pipeline's round: 1F1B", "title")
    for p, (row, devices) in enumerate(zip(spans, ("pi4-1, pi4-2", "nano", "laptop"))):
        y = 54 + p * 44
        pen.text(24, y + 15, f"stage {p}")
        pen.text(24, y + 30, devices, "small faint")
        pen.box(110, y, 620, 34, "none", 2)
        for start, end, kind, which in row:
            style = f"{COLOURS[p]} edge" + (" thin" if kind == "f" else "")
            pen.label(110 + start * unit, y, (end - start) * unit, 34, str(which), style)
    last = max(end for _, end, _, _ in spans[0])
    pen.label(110 + last * unit, 54, 2 * unit, 34, "∑", "e edge")
    pen.text(
        110,
        206,
        "pale: forward · full: backward · ∑: a shared stage's gradients are added up, the optimiser steps",
        "small faint",
    )
    pen.text(
        110,
        222,
        "empty: bubbles. Stage p of P runs 2(P−p)−1 forward passes ahead, and holds no more than so many.",
        "small faint",
    )
    return pen.svg()


def split() -> str:
    """Draw edge and cloud with feature replay."""
    pen = Pen(760, 250, "Edge and cloud: features up, gradients down, the edge runs ahead")
    pen.text(24, 32, "Edge and cloud: the edge runs ahead and replays", "title")
    rows = {"edge": 56, "cloud": 146}
    for name, y in rows.items():
        pen.text(24, y + 21, name)
        pen.box(90, y, 640, 34, "none", 2)
    unit = 40
    for group in (0, 1):
        x = 90 + group * 320
        for i in range(3):
            pen.label(x + i * unit, 56, unit, 34, f"{group * 3 + i}", "a edge thin")
            pen.label(x + (1.5 + i) * unit, 146, unit, 34, f"{group * 3 + i}", "b edge")
            pen.label(x + (3.6 + i) * unit, 56, unit, 34, f"{group * 3 + i}", "a edge")
        pen.arrow(x + unit, 92, x + 1.5 * unit, 142)
        pen.arrow(x + 2.5 * unit, 144, x + 3.6 * unit, 94)
    pen.text(134, 112, "features, packed", "small")
    pen.text(244, 134, "gradients", "small")
    pen.text(
        90, 208, "pale: forward at the edge, ahead of the gradients by at most K updates (here K = 2)", "small faint"
    )
    pen.text(
        90,
        224,
        "full: the cloud's part; at the edge the batch again, on the weights of now, then backward and step",
        "small faint",
    )
    return pen.svg()


def decouple() -> str:
    """Draw a dense convolution, a grouped one, and a shuffle."""
    pen = Pen(760, 250, "A dense convolution, a grouped one, and a shuffle")
    pen.text(24, 32, "Decoupled: groups of channels that rarely meet", "title")
    for column, (words, note) in enumerate((
        ("dense", "every output reads every channel"), ("grouped", "a quarter of the weights and the work"),
        ("shuffle", "the only place where groups meet"),
    )):  # fmt: skip
        x = 40 + column * 245
        pen.text(x, 62, words)
        pen.text(x, 228, note, "small faint")
        for i in range(4):
            y = 76 + i * 34
            pen.box(x, y, 44, 28, f"{'a' if column == 0 else COLOURS[i]} edge", 3)
            for j in range(4):
                if column == 0 or (column == 1 and i == j) or column == 2:
                    pen.line(x + 46, y + 14, x + 138, 76 + j * 34 + 14, "line")
            if column < 2:
                pen.box(x + 140, y, 44, 28, f"{'a' if column == 0 else COLOURS[i]} edge", 3)
            else:
                for j in range(4):
                    pen.box(x + 140 + j * 11, y, 11, 28, f"{COLOURS[j]}", 0)
    return pen.svg()


def channels() -> str:
    """Draw a decoupled network on four devices, and two samples under way."""
    pen = Pen(760, 300, "Channels on four devices, synchronised at shuffles only; two samples under way")
    pen.text(24, 32, "By channels: devices meet at shuffles only", "title")
    for i in range(4):
        y = 52 + i * 30
        pen.text(24, y + 17, f"device {i + 1}", "small")
        for j in range(3):
            pen.box(90 + j * 220, y, 180, 24, f"{COLOURS[i]} edge")
    for j in range(2):
        x = 270 + j * 220
        for i in range(4):
            for k in range(4):
                pen.line(x + 2, 64 + i * 30, x + 38, 64 + k * 30)
        pen.text(x + 20, 186, "shuffle", "small mid faint")
    pen.text(24, 222, "Scheme 3: while one sample waits, the next is computed, and never overtakes it")
    for y, name, spans in (
        (236, "sample 0", ((0, 4), (6, 8), (10, 14))),
        (264, "sample 1", ((4, 6), (8, 10), (14, 18))),
    ):
        pen.text(24, y + 15, name, "small")
        pen.box(90, y, 640, 22, "none", 2)
        for start, end in spans:
            pen.box(90 + start * 34, y, (end - start) * 34, 22, f"{'a' if y == 236 else 'b'} edge")
    return pen.svg()


def mixed() -> str:
    """Draw the corners of the plan space, and a plan between them."""
    pen = Pen(760, 300, "Each published system is a corner of one plan space; a mixed plan lies between")
    pen.text(24, 32, "One plan space: each stage is shared in its own way", "title")
    corners = (
        ("one device", ((0, 4, "a"),), ()),
        ("samples", ((0, 4, "abcd"),), ()),
        ("pipeline", ((0, 1.4, "a"), (1.4, 3, "bc"), (3, 4, "d")), ()),
        ("tiles, then one device", ((0, 3.2, "abcd"), (3.2, 4, "a")), ()),
        ("mixed", ((0, 1.7, "abcd"), (1.7, 3, "ab"), (3, 4, "a")), ()),
    )
    for row, (name, stages, _) in enumerate(corners):
        y = 56 + row * 44
        pen.text(24, y + 21, name)
        for first, last, kinds in stages:
            for place, kind in enumerate(kinds):
                height = 34 / len(kinds)
                pen.box(190 + first * 130, y + place * height, (last - first) * 130, height, f"{kind} edge", 2)
    pen.text(
        190,
        290,
        "layers from left to right; a colour is a device. All are simulated, the fastest that fits is taken.",
        "small faint",
    )
    return pen.svg()
