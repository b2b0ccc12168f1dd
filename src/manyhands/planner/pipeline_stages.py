"""A planned pipeline: its stages, the devices and the share of each, and the plan made of them."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Share, Single, Stage
from manyhands.planner.context import Batch
from manyhands.planner.steps import StageTable, Steps


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a pipeline."""

    first: int
    last: int
    devices: tuple[str, ...]
    samples: tuple[int, ...]
    rows: tuple[float, ...] = ()
    """Relative heights of tiles; empty: shared by samples."""
    columns: int = 1

    @property
    def share(self) -> Share:
        if self.rows:
            return ByTiles(self.rows, (1,) * self.columns)
        return BySamples(self.samples) if len(self.devices) > 1 else Single()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with the time of a round of it, by Eq. 4-6."""

    batch: Batch
    stages: tuple[PlannedStage, ...]
    seconds: float

    def plan(self, network: Network) -> Plan:
        stages = tuple(Stage((stage.first, stage.last), stage.devices, stage.share) for stage in self.stages)
        batch = self.batch
        return Plan(
            network=network.name,
            batch_size=batch.samples * batch.count,
            stages=stages,
            micro_batches=batch.count,
            order="1f1b",
            warm_up=batch.warm_up,
            batch_norm="synchronised" if batch.is_synchronised else "local",
            optimizer_slots=batch.optimizer_slots,
        )


def planned_stage(steps: Steps, table: StageTable, line: int) -> PlannedStage:
    """Return a line of a table as a stage, device by device."""
    number, columns = int(table.group[line]), int(table.columns[line])
    a, b = steps.groups[number]
    first, last, names = int(table.first[line]), int(table.last[line]), steps.names[a:b]
    if columns:
        parts = [float(table.parts[line, steps.kinds[device]]) for device in range(a, b)]
        rows = (1.0,) * (len(names) // columns) if columns > 1 else tuple(round(p / max(parts), 3) for p in parts)
        return PlannedStage(first, last, names, (), rows, columns)
    counts_by_kind = table.shares.of(line, [int(count) for count in steps.counts[number]])
    return PlannedStage(first, last, names, tuple(counts_by_kind[steps.kinds[device]].pop(0) for device in range(a, b)))
