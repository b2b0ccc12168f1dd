"""Labels, grid and legend, the same for every panel that a bench draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.observe.figures import wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def finish_axes(axes: Axes, across: str, up: str, title: str) -> None:
    """Give a panel its labels, grid, legend and, where there is one, its title."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(wrapped(title), fontsize=10, loc="left", parse_math=False)
    axes.legend(fontsize=8, framealpha=0.85)
