"""A picture of a timeline: one band per device, computing above, sending and receiving below, bubbles blank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.observe.figures import MOST_DEVICES, first_devices, new_figure, short_name, wrapped, write_figure
from manyhands.observe.trace import SpanLike, sane, short_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SPANS = 20_000
AXIS_LABEL = "seconds (thick: computing; thin: sending above, receiving below)"
COLOURS = {"forward": "#4C78A8", "backward": "#F58518", "loss": "#5B3A8E", "copy": "#D6A5C9", "step": "#54A24B",
           "value": "#72B7B2", "gradient": "#E45756", "halo": "#B279A2", "halo-gradient": "#FF9DA6",
           "partial": "#8E6C8A", "input": "#9D755D", "output": "#3FA7D6", "output-gradient": "#A23B72",
           "weights": "#A6D854", "weight-gradient": "#7A8B2F", "reduce": "#EECA3B", "send": "#2F6F73",
           "receive": "#C4C4C4"}  # fmt: skip
"""A simulated transfer has its message's kind; a measured one is 'send' (handed to the link) or 'receive' (waited)."""
_MEANINGS = {"send": "send (hand over)", "receive": "receive (wait)"}
_OTHER_COLOUR = "#888888"
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
    """Write a PNG. Where there are very many devices, only the first are drawn, and the title says so."""
    figure = new_figure(12, 1.4 + 0.62 * min(len(devices), MOST_DEVICES))
    axes = figure.subplots()
    kinds = draw_bands(axes, spans, devices, seconds, notes=notes)
    axes.set_xlabel(AXIS_LABEL)
    axes.set_title(wrapped(first_devices(title, len(devices))), fontsize=10, loc="left", parse_math=False)
    draw_legend(figure, kinds)
    return write_figure(figure, path)


def draw_bands(
    axes: Axes,
    spans: Iterable[SpanLike],
    devices: Sequence[str],
    seconds: float,
    *,
    notes: Mapping[str, str] | None = None,
) -> set[str]:
    """Draw spans from 0 to `seconds` into the axes, the first device on top, and return the kinds that were drawn."""
    shown = list(devices)[:MOST_DEVICES]
    place = {device: len(shown) - 1 - i for i, device in enumerate(shown)}
    drawn = [s for s in spans if s.device in place and s.track in _ROWS and sane(s) and s.end > s.start][:MOST_SPANS]
    bars: dict[tuple[float, float, str, float], list[tuple[float, float]]] = defaultdict(list)
    for span in drawn:
        offset, height = _ROWS[span.track]
        bottom, width = place[span.device] + offset, span.end - span.start
        edge = 0.3 if width > 0.004 * seconds else 0.0  # an edge would wash out a thin bar
        bars[bottom, height, COLOURS.get(span.kind, _OTHER_COLOUR), edge].append((span.start, width))
        if span.kind in ("forward", "backward") and width > 0.012 * seconds:
            text, middle = short_label(span)[1:].partition(" ")[0], span.start + width / 2
            axes.text(middle, bottom + height / 2, text, ha="center", va="center", fontsize=7, color="white",
                      clip_on=True)  # fmt: skip
    for (bottom, height, colour, edge), ranges in bars.items():  # one call for many bars: far quicker than one each
        axes.broken_barh(ranges, (bottom, height), facecolors=colour, edgecolor="white", linewidth=edge)
    labels = [f"{short_name(device)}\n{(notes or {}).get(device, '')}".strip() for device in reversed(shown)]
    axes.set_yticks([i + 0.45 for i in range(len(shown))], labels, fontsize=8, parse_math=False)
    axes.set_xlim(0, seconds * 1.005 or 1.0)
    axes.set_ylim(-0.15, len(shown) + 0.05)
    axes.grid(axis="x", alpha=0.25)
    return {span.kind for span in drawn}


def draw_legend(figure: Figure, kinds: set[str]) -> None:
    """Draw the colours of the kinds that were drawn, beside the axes."""
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label=_MEANINGS.get(kind, kind)) for kind, colour in COLOURS.items() if kind in kinds
    ]
    if kinds - COLOURS.keys():
        handles.append(Patch(color=_OTHER_COLOUR, label="other"))
    if handles:
        figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
