"""`manyhands bench chaos`: training jobs under random faults, drawn from a seed, with real processes and connections.

What each figure means, and how each fault is made, is in docs/explanation/chaos.md.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.facts.errors import BadValue
from manyhands.profiler.this_machine import identify
from manyhands_bench.chaos.draw import FAULTS_EACH, SHARES, ChaosScenario, chosen_kinds, scenario, scenarios
from manyhands_bench.chaos.fork_server import ForkServer
from manyhands_bench.chaos.place import kinds_skipped
from manyhands_bench.chaos.reference import MICRO_BATCHES, Reference
from manyhands_bench.chaos.scenario import run_scenario
from manyhands_bench.chaos.summary import ChaosRun, ScenarioOutcome, read_runs, summarize, write_run
from manyhands_bench.figures import Figures, Progress

FAULTS, QUICK_FAULTS = 500, 24
SEED = 30


@dataclass(frozen=True)
class ChaosOptions:
    """The options of a run."""

    seed: int = SEED
    faults: int | None = None
    """Faults in all; None: as many as the hours allow, or 500."""
    hours: float | None = None
    only: tuple[str, ...] = ()
    scenario: int | None = None
    """The only scenario to run; None: all."""
    add: tuple[Path, ...] = ()
    """Stored runs whose scenarios are added."""
    out: Path | None = None
    """Where this run is stored, and folders of scenarios in which something went wrong."""

    def __post_init__(self) -> None:
        if self.hours is not None and not self.hours > 0:
            raise BadValue(f"--hours is {self.hours:g}; it must be more than 0.")
        if self.faults is not None and self.faults < 0:
            raise BadValue(f"--faults is {self.faults}; it must be 0 or more.")
        if self.faults == 0 and not self.add:
            raise BadValue("--faults 0 runs nothing, and no stored runs are to be added up.", hint="Add --add FILE.")
        if self.scenario is not None and self.scenario < 0:
            raise BadValue(f"--scenario is {self.scenario}; they count from 0.")


def bench_chaos(options: ChaosOptions, on_progress: Progress | None = None) -> Figures:
    """Return every figure of the benchmark, flat."""
    say = on_progress or (lambda text: None)
    before = read_runs(options.add)
    skipped = kinds_skipped()
    kinds = chosen_kinds(options.only, tuple(skipped))
    left_out = {name: why for name, why in skipped.items() if not options.only or name in options.only}
    outcomes = _run_all(options, kinds, say)
    figures = summarize([*before, *outcomes])
    figures |= {
        "kinds_skipped": len(left_out),
        "machine": identify(1).text,
        "chaos_setting": f"seed {options.seed}; {', '.join(kinds)} over {', '.join(SHARES)}; three or four workers of "
        f"one thread, a split's two; a small CNN in float64 beside plain PyTorch; {len(before)} stored scenario(s) "
        "added",
    }  # fmt: skip
    for name, why in left_out.items():
        figures[f"{name}_skipped"] = why
    for outcome in (outcome for outcome in outcomes if not outcome.is_good):
        figures[f"scenario_{outcome.seed}_{outcome.number}_failed"] = failure_text(outcome, options.only)
    return figures


def _run_all(options: ChaosOptions, kinds: Sequence[str], say: Progress) -> list[ScenarioOutcome]:
    if options.faults == 0:  # stored runs are added up: no process is needed
        return []
    outcomes: list[ScenarioOutcome] = []
    references = {count: Reference(count) for count in set(MICRO_BATCHES.values())}
    base = Path(tempfile.mkdtemp(prefix="mh-chaos-"))  # short: Unix sockets lie here
    end = time.monotonic() + options.hours * 3600 if options.hours is not None else None
    try:
        with ForkServer(secrets.token_hex(4), base / "home") as forks:
            for drawn in _drawn(options, kinds):
                if end is not None and time.monotonic() > end:
                    break
                say(f"{drawn.name}: {', '.join(fault.kind for fault in drawn.faults)}")
                outcomes.append(run_scenario(drawn, base, forks, references, say))
                say(_line(outcomes[-1]))
                if options.out is not None:
                    write_run(options.out / f"chaos-{options.seed}.json", ChaosRun(options.seed, outcomes))
    finally:
        _keep(base, outcomes)
    return outcomes


def _drawn(options: ChaosOptions, kinds: Sequence[str]) -> Iterable[ChaosScenario]:
    if options.scenario is not None:
        faults = FAULTS_EACH if options.faults is None else options.faults
        return [scenario(options.seed, options.scenario, kinds, faults)]
    has_end = options.faults is not None or options.hours is None
    return scenarios(options.seed, kinds, (FAULTS if options.faults is None else options.faults) if has_end else None)


def _line(outcome: ScenarioOutcome) -> str:
    fired = sum(fault.has_fired for fault in outcome.faults)
    text = f"{outcome.seed}-{outcome.number}-{outcome.share}: {fired} of {outcome.planned_faults} faults fired in "
    text += f"{outcome.seconds:.0f} s, {outcome.rounds} rounds, weights differ by {outcome.weights_differ:.1e}"
    return text if outcome.is_good else f"{text}. WRONG: {outcome.failure or 'see its folder'}"


def failure_text(outcome: ScenarioOutcome, only: Sequence[str]) -> str:
    """Return what went wrong in a scenario, and the command that repeats it alone."""
    wrong = [
        outcome.failure,
        f"{outcome.rounds_lost} round(s) lost" if outcome.rounds_lost else "",
        f"weights differ by {outcome.weights_differ:.1e}" if outcome.weights_differ > 0 else "",
        f"{outcome.processes_left} process(es) left" if outcome.processes_left else "",
        f"given up without a reason: {', '.join(outcome.false_evictions)}" if outcome.false_evictions else "",
        ", ".join(f"{fault.kind} did not fire" for fault in outcome.faults if not fault.has_fired),
    ]
    words = f"manyhands bench chaos --seed {outcome.seed} --scenario {outcome.number}"
    words += f" --only {','.join(only)}" if only else ""
    return f"{'; '.join(filter(None, wrong))}. Logs: {outcome.folder}. Repeat it: {words}"


def _keep(base: Path, outcomes: Sequence[ScenarioOutcome]) -> None:
    """Remove the folder around all scenarios if they all went well; otherwise keep the folders of those that failed."""
    if all(outcome.is_good for outcome in outcomes):
        shutil.rmtree(base, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            shutil.rmtree(base / "home")
