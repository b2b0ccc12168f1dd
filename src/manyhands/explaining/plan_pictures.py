"""Pictures of a plan, from what was planned and simulated."""

from __future__ import annotations

from pathlib import Path

from manyhands.explaining.explain import faster_text
from manyhands.explaining.explanation import Explanation
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.units import format_bytes, format_seconds
from manyhands.observe.figures import need_plots
from manyhands.simulator.result import Simulation


def check_picture_name(path: str) -> None:
    """Check the file's name before anything is planned."""
    if path and Path(path).suffix.lower() != ".png":
        raise BadValue(f"--picture is '{path}'; pictures are written as PNG.", hint=f"Type --picture {path}.png")
    if path:
        need_plots()


def write_plan_picture(
    path: Path, plan: Plan, network: Network, cluster: Cluster, result: Simulation, explained: Explanation
) -> Path:
    """Draw which device holds which layers and which part, what it computes and holds, and what limits the plan."""
    from manyhands.observe.plan_picture import DeviceLoad, draw_plan

    loads = {
        name: DeviceLoad(1 - result.idle_part(name), totals.peak_bytes, totals.memory_bytes)
        for name, totals in result.devices.items()
    }
    size = f"batch {plan.batch_size} in {plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"
    summary = f"{size}: {format_seconds(result.seconds)} a step"
    if not plan.is_training:
        summary = f"inference: {format_seconds(explained.seconds)} a sample"
    travels = f"{format_bytes(result.total_bytes)} between devices"
    title = f"{network.name} ({network.input_text}) on {cluster.name}, {summary}, {travels}, simulated"
    notes = [f"What limits it: {explained.binding.text}."] if explained.binding else []
    notes += [
        f"With {change.change}: {format_seconds(change.seconds)}, {faster_text(change.speed_up)}."
        for change in explained.best_changes
    ]
    return draw_plan(plan, network, cluster.names, loads, path, title=title, notes=notes)
