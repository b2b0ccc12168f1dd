"""A plan's picture in the terminal, and its explanation in words and tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from manyhands.cli.show import WIDTH_WITHOUT_TERMINAL, print_table
from manyhands.facts.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from manyhands.explaining.bottleneck import Limit
    from manyhands.explaining.explanation import Explanation
    from manyhands.facts.cluster import Cluster
    from manyhands.facts.network import Network
    from manyhands.facts.plan import Plan
    from manyhands.plans.planned import Planned

MOST_CANDIDATES = 12
MOST_BESIDES = 2
ALSO_SAID = 0.05
"""Parts of a step that are worth a line."""
CHECKED_TOO = 0.2


def print_picture(plan: Plan, network: Network, cluster: Cluster) -> None:
    """Print a picture of the plan: devices down, layers across; letters where the output has no block characters."""
    from shutil import get_terminal_size

    from manyhands.observe.plan_lines import can_draw, plan_lines

    width = get_terminal_size().columns - 2 if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    typer.echo()
    plain = not can_draw(sys.stdout.encoding)
    for line in plan_lines(plan, network, cluster.names, width=width, plain=plain):
        typer.echo(f" {line}")
    typer.echo()


def print_explanation(explained: Explanation, planned: Planned) -> None:
    """Print what limits the plan, why others lost, and what would make it faster."""
    _print_limits(explained)
    if planned.candidates and planned.objective is None:
        _print_candidates(explained, planned)
    _print_what_if(explained, planned)


def _print_limits(explained: Explanation) -> None:
    binding = explained.binding
    if binding is None:
        return
    typer.echo(f"What limits it: {binding.text}.{_checked(binding)}")
    others = [limit for limit in explained.limits if limit is not binding and limit.part >= ALSO_SAID]
    for limit in others[:MOST_BESIDES]:
        typer.echo(f"  besides: {limit.text}.{_checked(limit) if limit.part >= CHECKED_TOO else ''}")
    for limit in explained.full:
        if limit is not binding:
            typer.echo(f"  besides: {limit.text}.{_checked(limit)}")
    typer.echo()


def _checked(limit: Limit) -> str:
    from manyhands.explaining.explain import faster_text

    if limit.relaxed_seconds is None or limit.speed_up is None:
        return ""
    how = "planned again" if limit.kind == "memory" else "simulated again"
    return f" With {limit.relaxed} ({how}): {format_seconds(limit.relaxed_seconds)}, {faster_text(limit.speed_up)}."


def _print_candidates(explained: Explanation, planned: Planned) -> None:
    """Print the other candidates, and why they lost."""
    score = {"memory": "holds at most", "energy": "J a sample"}.get(planned.best)
    unit = "" if planned.best in ("memory", "energy") else " as long"
    chosen = planned.candidates[0]
    scores = [candidate.score for candidate in planned.candidates]
    rows = [[chosen.name, format_seconds(chosen.seconds), "", "chosen"]]
    for runner_up in explained.runners_up[: MOST_CANDIDATES - 1]:
        seconds = "" if runner_up.seconds is None else format_seconds(runner_up.seconds)
        rows.append(
            [
                runner_up.name,
                seconds,
                "" if runner_up.times is None else f"{runner_up.times:.3g}x{unit}",
                runner_up.reason,
            ]
        )
    headings = ["plan", "a step", "", "why"]
    if score is not None:
        headings.insert(2, score)
        for row, value in zip(rows, scores):
            row.insert(2, "" if value is None else format_bytes(value) if planned.best == "memory" else f"{value:.3g}")
    print_table("Plans looked at, simulated", headings, rows, numbers=headings[1:-1])
    hidden = len(explained.runners_up) + 1 - len(rows)
    if hidden > 0:
        typer.echo(f"... and {hidden} more.")


def _print_what_if(explained: Explanation, planned: Planned) -> None:
    from manyhands.explaining.explain import faster_text

    of = "a step" if planned.objective is None else "a sample"
    rows = []
    for change in explained.best_changes:
        gains = faster_text(change.speed_up)
        if planned.best == "memory":
            gains += f", at most {format_bytes(change.score)} on a device"
        elif planned.best == "energy":
            gains += f", {change.score:.3g} J a sample"
        rows.append([change.change, format_seconds(change.seconds), gains])
    if rows:
        print_table("What if (planned again, simulated)", ["with", of, ""], rows, numbers=[of])
    notes = []
    named = [name for name in explained.searched if name != "auto"]
    if rows and planned.candidates and named:
        notes.append(f"These are plans by {' or '.join(named)}")
    if explained.skipped:
        notes.append(f"not looked at: {', '.join(explained.skipped)}")
    if notes:
        typer.echo(f"{'; '.join(notes).capitalize()}. --what-if takes its time and looks at all.")
