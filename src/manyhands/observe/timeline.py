"""A picture of a timeline: one band per device, computing above, sending and receiving below, bubbles blank."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from manyhands.files.documents import write_bytes_atomic
from manyhands.observe.trace import SpanLike, short_label

MOST_DEVICES = 40
MOST_SPANS = 20_000
_COLOURS = {"forward": "#4C78A8", "backward": "#F58518", "step": "#54A24B",
            "value": "#72B7B2", "gradient": "#E45756", "halo": "#B279A2", "halo-gradient": "#FF9DA6",
            "input": "#9D755D", "weights": "#BAB0AC", "weight-gradient": "#BAB0AC", "reduce": "#EECA3B"}  # fmt: skip
_ROWS = {"compute": (0.32, 0.56), "send": (0.16, 0.14), "receive": (0.0, 0.14)}


def draw_timeline(
    spans: Sequence[SpanLike],
    devices: Sequence[str],
    seconds: float,
    path: Path,
    *,
    title: str,
    notes: dict[str, str] | None = None,
) -> Path:
    """Write a PNG. Of very many devices the first are drawn, and the title says so."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    shown = list(devices)[:MOST_DEVICES]
    place = {device: len(shown) - 1 - i for i, device in enumerate(shown)}
    drawn = [span for span in spans if span.device in place and span.end > span.start][:MOST_SPANS]
    figure, axes = plt.subplots(figsize=(12, 1.4 + 0.62 * len(shown)), layout="constrained")
    for span in drawn:
        offset, height = _ROWS[span.track]
        bottom = place[span.device] + offset
        colour = _COLOURS.get(span.kind, "#888888")
        width = span.end - span.start
        edge = 0.3 if width > 0.004 * seconds else 0.0  # an edge would wash out a thin bar
        axes.broken_barh([(span.start, width)], (bottom, height), facecolors=colour, edgecolor="white", linewidth=edge)
        if span.kind in ("forward", "backward") and (span.end - span.start) > 0.012 * seconds:
            middle = (span.start + span.end) / 2
            text = short_label(span)[1:]
            axes.text(middle, bottom + height / 2, text, ha="center", va="center", fontsize=7, color="white")
    labels = [f"{device}\n{(notes or {}).get(device, '')}".strip() for device in reversed(shown)]
    axes.set_yticks([i + 0.45 for i in range(len(shown))], labels, fontsize=8)
    axes.set_xlim(0, seconds * 1.005 or 1.0)
    axes.set_ylim(-0.15, len(shown) + 0.05)
    axes.set_xlabel("seconds (thick: computing; thin: sending above, receiving below)")
    axes.grid(axis="x", alpha=0.25)
    hidden = len(devices) - len(shown)
    axes.set_title(
        title + (f" (first {len(shown)} of {len(devices)} devices)" if hidden else ""), fontsize=10, loc="left"
    )
    kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in drawn)]
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in kinds],
        loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False,
    )  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    write_bytes_atomic(path, buffer.getvalue())
    return path
