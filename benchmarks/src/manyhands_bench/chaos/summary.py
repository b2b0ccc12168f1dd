"""The outcomes of faults and scenarios, and the figures that follow. Results of several runs can be added up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from manyhands.facts.decode import decode
from manyhands.facts.errors import BadValue
from manyhands.files.documents import read_document, write_document
from manyhands_bench.chaos.draw import KINDS
from manyhands_bench.figures import Figures


class FaultOutcome(msgspec.Struct):
    """The outcome of one fault."""

    kind: str
    share: str
    has_fired: bool
    recovery_seconds: float | None
    """From the moment it struck to the end of the first round after it (`Watched.recovered_at`); None: never."""
    victims: str = ""


class ScenarioOutcome(msgspec.Struct):
    """The outcome of one training job with several faults."""

    seed: int
    number: int
    share: str
    planned_faults: int
    faults: list[FaultOutcome] = []
    """The faults that were reached: fewer than planned if the scenario failed."""
    rounds: int = 0
    rounds_lost: int = 0
    weights_differ: float = 0.0
    """The largest absolute difference from one device's weights."""
    processes_left: int = 0
    false_evictions: list[str] = []
    hangs: int = 0
    failure: str = ""
    """The reason that it could not go on to its end; empty: it could."""
    folder: str = ""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        has_fired = len(self.faults) == self.planned_faults and all(fault.has_fired for fault in self.faults)
        is_clean = not (self.failure or self.rounds_lost or self.processes_left or self.false_evictions)
        return has_fired and is_clean and self.weights_differ <= MOST_DIFFERENCE


MOST_DIFFERENCE = 1e-10


class ChaosRun(msgspec.Struct):
    """One seeded run, as it is stored to be added up."""

    seed: int
    scenarios: list[ScenarioOutcome]


def write_run(path: Path, run: ChaosRun) -> None:
    write_document(path, msgspec.to_builtins(run))


def read_runs(paths: Sequence[Path]) -> list[ScenarioOutcome]:
    """Return the scenarios of stored runs. The same scenario twice would count twice, so it is refused."""
    outcomes: list[ScenarioOutcome] = []
    first: dict[tuple[int, int], Path] = {}
    for path in paths:
        for scenario in decode(read_document(path), ChaosRun, str(path)).scenarios:
            key = (scenario.seed, scenario.number)
            if key in first:
                raise BadValue(
                    f"{path}: holds scenario {scenario.number} of seed {scenario.seed}, and so does {first[key]}.",
                    hint="Give each run another --seed, and each file once.",
                )
            first[key] = path
            outcomes.append(scenario)
    return outcomes


def summarize(scenarios: Sequence[ScenarioOutcome]) -> Figures:
    """Return the benchmark's figures. Recovery times are those of faults that fired and were recovered from."""
    faults = [fault for scenario in scenarios for fault in scenario.faults]
    seconds = _recoveries(faults)
    figures: Figures = {
        "faults": sum(scenario.planned_faults for scenario in scenarios),
        "faults_fired": sum(fault.has_fired for fault in faults),
        "rounds_lost": sum(scenario.rounds_lost for scenario in scenarios),
        "weights_differ": max((scenario.weights_differ for scenario in scenarios), default=0.0),
        "processes_left": sum(scenario.processes_left for scenario in scenarios),
        "hangs": sum(scenario.hangs for scenario in scenarios),
        "recovery_seconds_median": statistics.median(seconds) if seconds else 0.0,
        "recovery_seconds_worst": max(seconds, default=0.0),
        "false_evictions": sum(len(scenario.false_evictions) for scenario in scenarios),
        "scenarios": len(scenarios),
        "failures": sum(bool(scenario.failure) for scenario in scenarios),
        "rounds": sum(scenario.rounds for scenario in scenarios),
        "seconds": sum(scenario.seconds for scenario in scenarios),
    }
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        if of_kind:
            each = _recoveries(of_kind)
            key = kind.replace("-", "_")
            figures[f"fired_{key}"] = sum(fault.has_fired for fault in of_kind)
            figures[f"recovery_seconds_median_{key}"] = statistics.median(each) if each else 0.0
            figures[f"recovery_seconds_worst_{key}"] = max(each, default=0.0)
    return figures


def by_kind(figures: Figures) -> dict[str, tuple[int, float, float]]:
    """Return for each kind of fault how many fired, and the median and worst seconds of recovery, from flat figures."""
    rows = {}
    for kind in KINDS:
        key = kind.replace("-", "_")
        if f"fired_{key}" in figures:
            median, worst = (float(figures[f"recovery_seconds_{statistic}_{key}"]) for statistic in ("median", "worst"))
            rows[kind] = int(figures[f"fired_{key}"]), median, worst
    return rows


def _recoveries(faults: Sequence[FaultOutcome]) -> list[float]:
    return [fault.recovery_seconds for fault in faults if fault.has_fired and fault.recovery_seconds is not None]
