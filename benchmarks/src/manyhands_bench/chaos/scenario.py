"""A scenario, run to its end and judged by its outcome."""

from __future__ import annotations

import contextlib
import csv
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file

from manyhands.executor import checkpoint
from manyhands_bench.chaos.draw import ChaosScenario, Fault
from manyhands_bench.chaos.faults import Struck, course
from manyhands_bench.chaos.fork_server import ForkServer, wait_gone
from manyhands_bench.chaos.place import place_for
from manyhands_bench.chaos.reference import MICRO_BATCHES, Reference
from manyhands_bench.chaos.summary import FaultOutcome, ScenarioOutcome
from manyhands_bench.chaos.trial import END_SECONDS, START_SECONDS, ScenarioProcesses, Stuck
from manyhands_bench.figures import Progress

RECOVERY_LIMIT_SECONDS = 60.0
"""A job that takes longer hangs: six times the aim."""
LAST_STEPS = 3
LEAVE_SECONDS = 15.0
"""Workers end by themselves within this time once their coordinator has ended."""


def run_scenario(
    scenario: ChaosScenario, base: Path, forks: ForkServer, references: Mapping[int, Reference], say: Progress
) -> ScenarioOutcome:
    """Run a scenario and return its outcome. Its folder is kept if something went wrong."""
    began = time.monotonic()
    lab = f"c{secrets.token_hex(3)}"
    folder = base / lab
    outcome = ScenarioOutcome(scenario.seed, scenario.number, scenario.share, len(scenario.faults))
    with place_for(folder, lab, scenario.devices) as place:
        trial = ScenarioProcesses(scenario, place, forks)
        try:
            _start(trial)
            for fault in scenario.faults:
                outcome.faults.append(_strike(trial, fault, say))
            _stop(trial)
            _judge(trial, references[MICRO_BATCHES[scenario.share]], outcome)
        except Stuck as stuck:
            outcome.failure, outcome.hangs = str(stuck), int(stuck.is_hang)
        outcome.false_evictions = list(trial.false_evictions)
        outcome.processes_left = 0 if outcome.failure else _count_left(forks)
        forks.end_children()
    outcome.seconds = time.monotonic() - began
    if outcome.is_good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        outcome.folder = str(folder)
    return outcome


def _start(trial: ScenarioProcesses) -> None:
    trial.start_coordinator()
    for name in trial.scenario.devices:
        trial.start_worker(name)
    trial.until(lambda: len(trial.watched.steps) > 1, START_SECONDS, "starting")


def _strike(trial: ScenarioProcesses, fault: Fault, say: Progress) -> FaultOutcome:
    """Make one fault: wait for its moment, strike, wait for recovery, repair."""
    trial.until_calm(fault.after_steps, START_SECONDS, f"before {fault.kind}")
    trial.pause(fault.delay_seconds)
    happens = course(fault, trial)
    try:
        struck = next(happens)
    except ProcessLookupError as error:  # its victim had ended just before
        raise Stuck(f"{fault.kind}: {error}", is_hang=False) from error
    with contextlib.closing(happens):
        expected = struck.victims if fault.is_fatal else ()

        def has_recovered() -> bool:
            return trial.watched.recovered_at(struck.at, struck.incarnation, expected) is not None

        text = f"{fault.kind} of {', '.join(struck.victims) or 'the job'}"
        is_resumed = trial.incarnation > struck.incarnation
        may_end = trial.may_end_with(struck.victims)
        if not trial.until(has_recovered, RECOVERY_LIMIT_SECONDS, text, may_end=may_end, restarts=is_resumed):
            next(happens, None)
            trial.unusable |= set(struck.victims)
            trial.start_coordinator()
            trial.until(has_recovered, RECOVERY_LIMIT_SECONDS, f"{text}, resumed", restarts=True)
        next(happens, None)
    trial.look()
    return _outcome(trial, fault, struck, expected, say)


def _outcome(
    trial: ScenarioProcesses, fault: Fault, struck: Struck, expected: tuple[str, ...], say: Progress
) -> FaultOutcome:  # fmt: skip
    recovered = trial.watched.recovered_at(struck.at, struck.incarnation, expected)
    seconds = recovered - struck.at if recovered is not None else None
    names = ", ".join(struck.victims)
    text = f"{seconds:.2f} s" if seconds is not None else "not recovered"
    say(f"{trial.scenario.name}: {fault.kind} {names}: {text}" + ("" if struck.has_fired else ", DID NOT FIRE"))
    return FaultOutcome(fault.kind, trial.scenario.share, struck.has_fired, seconds, names)


def _stop(trial: ScenarioProcesses) -> None:
    """End the job as Ctrl-C does: a checkpoint of its last round remains."""
    trial.until_calm(LAST_STEPS, START_SECONDS, "at the end")
    trial.is_ending = True
    os.kill(trial.coordinator, signal.SIGINT)
    if not wait_gone(trial.coordinator, END_SECONDS):
        raise Stuck(f"stopping: not within {END_SECONDS:g} s", is_hang=True)
    trial.look()


def _judge(trial: ScenarioProcesses, reference: Reference, outcome: ScenarioOutcome) -> None:
    """Compare weights and rounds with those of one device."""
    folder = trial.place.disk / "run"
    newest = checkpoint.latest(folder)
    if newest is None:
        raise Stuck("at the end: no checkpoint is left", is_hang=False)
    steps = int(newest.name.rpartition("-")[2])
    outcome.rounds = steps
    outcome.weights_differ = reference.differs(load_file(newest / "model.safetensors"), steps)
    outcome.rounds_lost = rounds_lost(_metric_steps(folder), steps)


def rounds_lost(recorded: list[int], steps: int) -> int:
    """Return how many rounds are missing from the record or surplus in it: each must be there exactly once."""
    counts = {step: recorded.count(step) for step in {*recorded, *range(steps)}}
    return sum(abs(count - (0 <= step < steps)) for step, count in counts.items())


def _metric_steps(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def _count_left(forks: ForkServer) -> int:
    """Return the number of processes that are still there although the job has ended."""
    end = time.monotonic() + LEAVE_SECONDS
    while remaining := len(forks.children()):
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return remaining
