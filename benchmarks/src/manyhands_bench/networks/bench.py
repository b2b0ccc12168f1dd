"""`manyhands bench networks`: the public networks that the installed packages have, each in a process of its own."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import manyhands
from manyhands.facts.errors import BadValue
from manyhands.profiler.this_machine import identify
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.networks.catalogue import (
    all_networks,
    chosen_networks,
    detectors,
    drawn_tenth,
    missing_packages,
)
from manyhands_bench.networks.outcome import LINES, NetworkOutcome, append_outcome, read_outcomes
from manyhands_bench.networks.processes import ProcessLimits, TaskEnd, run_tasks
from manyhands_bench.networks.summary import failures, summarize

QUICK_NETWORKS = 12
LIMIT_SECONDS = 900.0
LEAST_MEMORY_BYTES = 8 * 2**30
"""The limit of each process: this, or its part of the machine's memory if that is more."""
TRAINED_MEMORY = 8.0
"""The factor of that limit for networks that are trained: plain PyTorch, a coordinator and two workers hold each."""
SHARES_TRAINED = ("samples", "pipeline", "tiles")
"""Ways of sharing, which the drawn networks are trained with in turn."""
_PACKAGES = ("torch", "torchvision", "timm", "transformers")
_LISTED = 40


@dataclass(frozen=True)
class NetworksOptions:
    """The options of a walk."""

    only: tuple[str, ...] = ()
    """Libraries or networks; empty: all."""
    limit: int | None = None
    processes: int | None = None
    """Networks at a time; None: as many as there are cores."""
    out: Path = Path("networks-study")
    """The folder of the file of outcomes, in which a stopped walk is gone on with."""
    quick: bool = False

    def __post_init__(self) -> None:
        for name, value in (("--limit", self.limit), ("--processes", self.processes)):
            if value is not None and value < 1:
                raise BadValue(f"{name} is {value}; it must be at least 1.")


@dataclass(frozen=True)
class NetworkTask:
    """A network to examine in a process of its own."""

    name: str
    preferred: str
    """The way of sharing that it is trained with, if it can be; empty: it is not trained."""
    folder: str
    cores: tuple[int, ...] = ()
    """The cores that it keeps to; empty: any. Its two workers have one thread each then: many networks are trained at
    once, and each would start as many threads as there are cores."""


def bench_networks(options: NetworksOptions, on_progress: Progress | None = None) -> Figures:
    """Return every figure of the walk, flat."""
    return figures_of(walk(options, on_progress))


def figures_of(outcomes: Sequence[NetworkOutcome]) -> Figures:
    """Return the figures of a walk's outcomes, with its settings and its failures as texts."""
    figures = summarize(outcomes)
    figures["machine"] = identify(1).text
    figures["versions"] = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES if _version(name))
    drawn = [outcome for outcome in outcomes if outcome.is_drawn]
    figures["networks_trained"] = ", ".join(
        f"{outcome.name} by {outcome.trained_by or 'nothing'}"
        + (f" ({outcome.trained_difference:.1e})" if outcome.trained_difference is not None else "")
        + (f" (reordered: {outcome.reordered_difference:.1e})" if outcome.reordered_difference is not None else "")
        for outcome in drawn
    )
    for library, package in missing_packages().items():
        figures[f"{library}_skipped"] = f"{package} is not installed."
    for place, (count, step, reason, names) in enumerate(failures(outcomes)[:_LISTED], 1):
        figures[f"failure_{place:02}"] = f"{count} x {step}: {reason} ({names})"
    return figures


def walk(options: NetworksOptions, on_progress: Progress | None = None) -> list[NetworkOutcome]:
    """Return the outcome of every network that is asked for, in the order of the catalogue; those that an earlier walk
    has stored, with the same versions and sources, are not walked again."""
    say = on_progress or (lambda text: None)
    say("listing the networks")
    limit = min(options.limit or QUICK_NETWORKS, QUICK_NETWORKS) if options.quick else options.limit
    names = chosen_networks(all_networks(), options.only, limit)
    apart = detectors()
    drawn = drawn_tenth([name for name in names if name not in apart])
    preferred = {name: SHARES_TRAINED[place % len(SHARES_TRAINED)] for place, name in enumerate(drawn)}
    path, made_with = options.out / LINES, sources_and_versions()
    outcomes = {
        name: outcome
        for name, outcome in read_outcomes(path, made_with).items()
        if outcome.is_drawn == (name in preferred)
    }
    with tempfile.TemporaryDirectory(prefix="mh-networks-") as folder:
        left_names = sorted((name for name in names if name not in outcomes), key=lambda name: name not in preferred)
        pairs = _pairs_of_cores()  # the longest, those that are trained, come first
        tasks = [
            NetworkTask(name, preferred[name], f"{folder}/run-{place}", pairs[place % len(pairs)])
            if name in preferred
            else NetworkTask(name, "", f"{folder}/run-{place}")
            for place, name in enumerate(left_names)
        ]
        begin = time.monotonic()
        ends = run_tasks(tasks, examine_task, _limits(options), options.out / "logs")
        for done, end in enumerate(ends, 1):
            outcome = _outcome_of(end)
            outcome.is_detector = outcome.name in apart
            append_outcome(path, outcome, made_with)
            outcomes[outcome.name] = outcome
            left = (time.monotonic() - begin) / done * (len(tasks) - done)
            say(f"{done} of {len(tasks)}, about {left / 60:.0f} min left: {_line(outcome)}")
    return [outcomes[name] for name in names]


def examine_task(task: NetworkTask, report: Any) -> None:
    """Examine a network and report its outcome, in the process of its own."""
    import torch

    from manyhands_bench.networks.examine import examine

    torch.set_num_threads(1)
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    os.environ["MANYHANDS_HOME"] = str(Path(task.folder).parent / "home")  # measured beside others: of no use later
    report(examine(task.name, task.preferred or "samples", Path(task.folder), report, bool(task.preferred)))


def _outcome_of(end: TaskEnd) -> NetworkOutcome:
    outcome: NetworkOutcome = end.reported or NetworkOutcome(end.task.name, is_drawn=bool(end.task.preferred))
    if end.ending:
        outcome.add_end(end.ending, end.text)
        outcome.is_complete = True
    return outcome


def _limits(options: NetworksOptions) -> ProcessLimits:
    processes = options.processes or identify(1).cores
    part = psutil.virtual_memory().total // processes
    return ProcessLimits(processes, LIMIT_SECONDS, max(part, LEAST_MEMORY_BYTES), _memory_factor)


def _memory_factor(task: NetworkTask) -> float:
    return TRAINED_MEMORY if task.preferred else 1.0


def _pairs_of_cores() -> list[tuple[int, ...]]:
    """Return the cores that this process may use, two by two."""
    cores = sorted(os.sched_getaffinity(0))
    return [tuple(cores[place : place + 2]) for place in range(0, len(cores), 2)]


def _line(outcome: NetworkOutcome) -> str:
    """Return what became of a network, in a few words."""
    if outcome.not_run:
        return f"{outcome.name}: does not run here"
    parts = ["captured" if outcome.captured else "not captured", *(s for s, has in outcome.shares.items() if has)]
    if outcome.trained_difference is not None:
        parts.append(f"trained by {outcome.trained_by}: {outcome.trained_difference:.0e}")
    return f"{outcome.name}: {', '.join(parts)}, {outcome.seconds:.0f} s"


def sources_and_versions() -> str:
    """Return the packages' versions and a digest of the sources of manyhands and of this bench: outcomes of others are
    not mixed with those of these."""
    digest = hashlib.sha256()
    for folder in (Path(manyhands.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return " ".join([*(f"{name}={_version(name)}" for name in _PACKAGES), digest.hexdigest()[:16]])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
