"""Our plan beside the baselines' plans, simulated on the same cluster: `manyhands plan --compare`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError, OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.plan import BatchNorm, Plan, WarmUp
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.facts.summary import Summarized
from manyhands.facts.units import format_bytes, format_seconds
from manyhands.planner.baselines import every_baseline, hetpipe, volume
from manyhands.planner.simple import single
from manyhands.planner.strategies import pipeline
from manyhands.planner.task import Task, fitting
from manyhands.plans.simulating import cluster_of, network_of, simulate
from manyhands.simulator.result import Simulation

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph

OURS, ALONE, HETPIPE = "manyhands", "one device", "HetPipe"


@dataclass(frozen=True)
class ComparisonRow:
    """One way to train, as simulated."""

    name: str
    plan: Plan | None
    seconds: float
    """Seconds of a mini-batch; infinite where there is no plan."""
    samples_per_second: float
    bytes: float
    """Bytes between devices for a mini-batch."""
    volume: int
    """The same bytes by Eq. 1 and 2 of ASTEROID."""
    peak_bytes: float
    """Peak of the device that comes closest to its memory, or exceeds it."""
    joules_per_sample: float
    busy_part: float
    """The mean fraction of the time that the plan's devices compute."""
    problem: str = ""
    """The device that runs out of memory, or why there is no plan."""
    is_synchronous: bool = True

    @property
    def runs(self) -> bool:
        return self.plan is not None and not self.problem

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "seconds": self.seconds if self.plan else None, "runs": self.runs,
            "samples_per_second": self.samples_per_second, "bytes": self.bytes, "volume": self.volume,
            "peak_bytes": self.peak_bytes, "joules_per_sample": self.joules_per_sample,
            "busy_part": self.busy_part, "problem": self.problem, "synchronous": self.is_synchronous,
            "plan": self.plan.to_dict() if self.plan else None,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class Comparison(Summarized):
    """All rows, ours first, and the reason why it wins."""

    rows: list[ComparisonRow]
    why: str

    def summary(self) -> dict[str, str]:
        return {row.name: format_seconds(row.seconds) if row.runs else "does not run" for row in self.rows}

    def row(self, name: str) -> ComparisonRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def ours(self) -> ComparisonRow:
        return self.rows[0]

    def best_baseline(self) -> ComparisonRow | None:
        """Return the fastest synchronous baseline that fits in memory; one device alone counts."""
        return min(
            (row for row in self.rows[1:] if row.runs and row.is_synchronous), key=lambda row: row.seconds, default=None
        )

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [row.to_dict() for row in self.rows], "why": self.why}


def compare(
    graph: Graph | Network | str,
    cluster: Cluster | str | Path,
    *,
    batch_size: int,
    micro_batches: int | None = None,
    optimizer_slots: int = 1,
    batch_norm: BatchNorm = "synchronised",
    warm_up: WarmUp = "2(P-p)-1",
    profile: Profile | None = None,
) -> Comparison:
    """Compare our pipeline planner with one device alone and every baseline, over the same profile."""
    network, machines = network_of(graph), cluster_of(cluster)
    profile = profile or estimate_cluster(network, machines)
    task = Task(
        network, machines, profile, batch_size, micro_batches, "1f1b", optimizer_slots, batch_norm, warm_up
    )  # fmt: skip
    outcomes: dict[bytes, float | OutOfMemory] = {}

    def price(plan: Plan) -> float:
        """Return the price of a plan, simulated once however many baselines use it."""
        key = msgspec.json.encode(plan)
        if key not in outcomes:
            try:
                outcomes[key] = simulate(plan, network, machines, profile, keep_spans=False, within_memory=True).seconds
            except OutOfMemory as error:
                outcomes[key] = error
        outcome = outcomes[key]
        if isinstance(outcome, OutOfMemory):
            raise outcome
        return outcome

    def row(name: str, make: Callable[[], Plan]) -> ComparisonRow:
        try:
            return _row(name, task, resolve(make(), network, machines))
        except ManyhandsError as error:
            return _no_row(name, error)

    def alone() -> Plan:
        plan = fitting(ALONE, single, task, price).plan
        assert plan is not None
        return plan

    rows = [row(OURS, lambda: pipeline(task, price)), row(ALONE, alone)]
    for name, made in every_baseline(task, price):
        rows.append(_no_row(name, made) if isinstance(made, ManyhandsError) else _row(name, task, made))
    if rows[1].runs and rows[1].seconds < rows[0].seconds:  # then distributing it is a mistake
        rows[0] = _row(OURS, task, rows[1].plan)
    rows.append(_hetpipe_row(task))
    comparison = Comparison(rows, "")
    return Comparison(rows, _why(comparison, task))


def _row(name: str, task: Task, plan: Plan | None) -> ComparisonRow:
    assert plan is not None
    result = simulate(plan, task.network, task.cluster, task.profile, keep_spans=False)
    tightest = max(result.devices.values(), key=lambda device: device.peak_bytes / device.memory_bytes)
    problem = ""
    if tightest.peak_bytes > tightest.memory_bytes:
        peak, budget = format_bytes(tightest.peak_bytes), format_bytes(tightest.memory_bytes)
        problem = f"{tightest.device} runs out of memory: {peak} of {budget}"
    return ComparisonRow(
        name, plan, result.seconds, result.samples_per_second, result.total_bytes, volume(plan, task),
        tightest.peak_bytes, result.joules_per_sample, _busy(result), problem,
    )  # fmt: skip


def _busy(result: Simulation) -> float:
    return sum(1 - result.idle_part(name) for name in result.devices) / len(result.devices)


def _no_row(name: str, error: ManyhandsError) -> ComparisonRow:
    return ComparisonRow(name, None, float("inf"), 0.0, 0.0, 0, 0.0, 0.0, 0.0, error.message.split("\n")[0])


def _hetpipe_row(task: Task) -> ComparisonRow:
    """Return the row of HetPipe. It is asynchronous: priced by its virtual workers' pipelines and the server's port,
    and never a candidate."""

    def price_on(plan: Plan, cluster: Cluster) -> float:
        return simulate(plan, task.network, cluster, task.profile, keep_spans=False, within_memory=True).seconds

    try:
        pipes = hetpipe(task, price_on)
    except ManyhandsError as error:
        return _no_row(HETPIPE, error)
    peak, joules, busy = 0.0, 0.0, []
    for worker in pipes.workers:
        devices = tuple(task.cluster.device(name) for name in worker.plan.devices)
        group = task.cluster.with_devices("group", devices)
        result = simulate(worker.plan, task.network, group, task.profile, keep_spans=False)
        peak = max(peak, *(device.peak_bytes for device in result.devices.values()))
        joules += result.joules * task.batch_size / len(pipes.workers) / worker.samples
        busy.append(_busy(result))
    return ComparisonRow(
        HETPIPE, pipes.workers[0].plan, pipes.seconds, task.batch_size / pipes.seconds, pipes.bytes, pipes.bytes, peak,
        joules / task.batch_size, sum(busy) / len(busy), "", is_synchronous=False,
    )  # fmt: skip


def _why(comparison: Comparison, task: Task) -> str:
    """Return in words what made the difference to the best baseline."""
    ours, baseline = comparison.ours, comparison.best_baseline()
    if not ours.runs:
        return f"Nothing fits: {ours.problem}."
    assert ours.plan is not None
    if baseline is None:
        return "No baseline's plan fits in memory."
    plan = ours.plan
    stages = f"{len(plan.stages)} stage(s) of {', '.join(str(len(stage.devices)) for stage in plan.stages)} device(s)"
    ratio = baseline.seconds / ours.seconds
    if ratio < 1.0005:
        return f"{stages}: the plan of {baseline.name} cannot be bettered here."
    reasons = []
    if ours.bytes < 0.95 * baseline.bytes:
        reasons.append(f"{format_bytes(ours.bytes)} between devices in place of {format_bytes(baseline.bytes)}")
    if ours.busy_part > 1.05 * baseline.busy_part:
        reasons.append(f"devices compute {ours.busy_part:.0%} of the time in place of {baseline.busy_part:.0%}")
    left_out = len(task.cluster.devices) - len(plan.devices)
    if left_out:
        reasons.append(f"{left_out} device(s) that would slow it are left out")
    return f"{stages}, {ratio:.2f} times as fast as {baseline.name}: {'; '.join(reasons) or 'better balanced'}."
