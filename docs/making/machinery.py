"""Drawings of a run's machinery: staying alive, transport, codec, deciding, silos, the lab, prediction accuracy."""

from __future__ import annotations

from making.pen import COLOURS, Pen


def alive() -> str:
    """Draw the loss of a device; the others go on from the last copies."""
    pen = Pen(760, 262, "A device is lost, and the others go on from the last round of which everything exists")
    pen.text(24, 32, "A device is lost: nobody's round is", "title")
    rounds = (40, 41, 42, 43, None, 43, 44, 45)
    for place, number in enumerate(rounds):
        pen.text(122 + place * 76, 62, f"round {number}" if number else "", "small faint")
    for row, name in enumerate(("laptop", "pi4", "nano")):
        y = 74 + row * 42
        pen.text(24, y + 21, name)
        for place, number in enumerate(rounds):
            x = 110 + place * 76
            if number is None:
                if name != "nano":
                    pen.label(x, y, 74, 34, "re-plan", "e edge")
                continue
            if name == "nano" and place > 3:
                continue
            width = 38 if place == 3 else 74
            again = " thin" if place == 3 else ""
            pen.box(x, y, width, 34, f"{COLOURS[row]} edge{again}")
            if number in (40, 42) and place < 4:
                pen.circle(x + 66, y + 17, 5, "none")
    pen.text(154 + 3 * 76, 180, "✕ killed", "small")
    pen.circle(116, 218, 5, "none")
    pen.line(111, 218, 121, 218, "line")
    pen.text(
        128,
        222,
        "a copy of all weights, also held by another device. Round 43 was half done: it is run again",
        "small faint",
    )
    pen.text(
        128,
        240,
        "as a whole, with the same batches and dropout, so losses and weights are those of a calm run.",
        "small faint",
    )
    return pen.svg()


def engine() -> str:
    """Draw the ways of bytes between two workers."""
    pen = Pen(760, 226, "How a tensor travels from one worker to another")
    pen.text(24, 32, "From tensor to tensor", "title")
    pen.label(30, 96, 110, 44, "tensor", "a edge")
    pen.label(620, 96, 110, 44, "tensor, waiting", "b edge")
    pen.label(230, 56, 290, 34, "TLS 1.3 over TCP: other machines", "c edge")
    pen.label(230, 101, 290, 34, "TCP: headers, small messages, beats", "d edge")
    pen.label(230, 146, 290, 34, "memory in common: large, same machine", "e edge")
    for y in (73, 118, 163):
        pen.arrow(142, 118, 226, y)
        pen.arrow(522, y, 616, 118)
    pen.text(
        30,
        206,
        "Sizes and senders are known from the plan: bytes land where they belong, anything else is refused.",
        "small faint",
    )
    return pen.svg()


def codec() -> str:
    """Draw numbers rounded to a few levels, and the error that is kept."""
    pen = Pen(760, 250, "Two-bit codes: each number goes to the nearest of four levels")
    pen.text(24, 32, "In n bits: the nearest of 2ⁿ levels (here n = 2)", "title")
    values = (0.04, 0.22, 0.41, 0.63, 0.98, 0.86, 0.55, 0.3, 0.12, 0.7, 0.47, 0.02)
    levels = [place / 3 for place in range(4)]
    for place, level in enumerate(levels):
        y = 206 - level * 150
        pen.line(90, y, 700, y, "line dash")
        pen.text(80, y + 4, f"code {place}", "small end faint")
    for place, value in enumerate(values):
        x = 120 + place * 50
        near = min(levels, key=lambda level: abs(level - value))
        pen.line(x, 206 - value * 150, x, 206 - near * 150, "line")
        pen.circle(x, 206 - value * 150, 5, "a")
        pen.box(x - 5, 206 - near * 150 - 5, 10, 10, "b", 2)
    pen.text(
        90,
        236,
        "round: h · square: C(h), what arrives · line: the error, kept to correct the gradient that returns",
        "small faint",
    )
    return pen.svg()


def decision() -> str:
    """Draw the fastest cut at several rates."""
    pen = Pen(760, 262, "The cut follows the rate of the link")
    pen.text(24, 32, "The cut follows the link", "title")
    for row, (words, cut) in enumerate((("fast link", 2), ("slow link", 5), ("no link", 8))):
        y = 58 + row * 60
        pen.text(24, y + 21, words)
        for layer in range(8):
            pen.box(140 + layer * 68, y, 66, 34, f"{'a' if layer < cut else 'b'} edge")
        if cut < 8:
            pen.line(139 + cut * 68, y - 8, 139 + cut * 68, y + 42, "line dash")
            pen.text(139 + cut * 68, y + 54, "features, packed", "small mid faint")
    pen.text(
        24,
        252,
        "blue: at the edge · orange: in the cloud. Rates are measured; only layers that change sides travel.",
        "small faint",
    )
    return pen.svg()


def silos() -> str:
    """Draw two edges with features of the same samples, and a server with the labels."""
    pen = Pen(760, 214, "Two silos and a server: features are joined by sample, data stays")
    pen.text(24, 32, "Data stays, features meet", "title")
    for y, name, kind in ((60, "edge-a: left", "a"), (140, "edge-b: right", "b")):
        pen.label(30, y, 130, 40, name, f"{kind} edge")
        pen.label(210, y, 120, 40, "its layers", f"{kind} edge thin")
        pen.arrow(162, y + 20, 206, y + 20)
        pen.arrow(332, y + 20, 426, 120)
    pen.label(430, 100, 150, 40, "server: the rest", "c edge")
    pen.label(620, 100, 110, 40, "loss (target)", "c edge")
    pen.arrow(582, 120, 616, 120)
    pen.text(
        30, 202, "The coordinator sees digests of ids, and sends each device the numbers of its rows.", "small faint"
    )
    return pen.svg()


def lab() -> str:
    """Draw devices as namespaces behind shaped ports."""
    pen = Pen(760, 300, "A lab: each device is a namespace with a rate, a share of a core and a memory limit")
    pen.text(24, 32, "Six devices out of one machine", "title")
    pen.box(20, 46, 720, 220, "hollow sd dash", 8)
    for place in range(4):
        x = 40 + place * 178
        pen.box(x, 64, 150, 92, "none", 6)
        pen.text(x + 75, 84, ("desk", "pi3-1", "pi3-2", "…")[place], "mid")
        if place in (1, 2):
            pen.text(x + 75, 104, "namespace + cgroup", "mid small faint")
            pen.text(x + 75, 122, "a share of a core", "mid small faint")
            pen.text(x + 75, 140, "1 GB, and no more", "mid small faint")
        elif place == 0:
            pen.text(x + 75, 104, "the coordinator,", "mid small faint")
            pen.text(x + 75, 122, "no limits", "mid small faint")
        pen.line(x + 75, 156, x + 75, 206)
        if place in (1, 2):
            pen.note(x + 82, 182, "100 Mbit/s")
    pen.label(40, 206, 684, 36, "switch: each frame waits for its pair's delay", "c edge")
    pen.text(
        24,
        288,
        "Where devices are faster than this machine's cores, all is slowed by one number, the time scale.",
        "small faint",
    )
    return pen.svg()


def honest() -> str:
    """Draw the cycle of predicting, running, comparing and correcting."""
    pen = Pen(760, 150, "Predicted, measured, compared, corrected")
    pen.text(24, 32, "Every run corrects the next plan", "title")
    for place, words in enumerate(("profile", "plan, simulated", "run, measured", "side by side")):
        pen.label(30 + place * 182, 60, 140, 40, words, f"{COLOURS[place]} edge")
        if place:
            pen.arrow(30 + place * 182 - 40, 80, 30 + place * 182 - 4, 80)
    pen.line(646, 100, 646, 124)
    pen.line(646, 124, 100, 124)
    pen.arrow(100, 124, 100, 104)
    pen.text(373, 142, "where a stage was off by more than 5 %, its layers are corrected", "small mid faint")
    return pen.svg()
