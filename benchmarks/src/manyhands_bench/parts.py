"""A bench made of parts: each returns its own figures, and one that cannot be measured does not end the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from manyhands.facts.errors import BadValue, ManyhandsError, unknown
from manyhands.files.documents import write_document
from manyhands.profiler.this_machine import identify
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.results import Host

KEPT = "figures.json"
PROFILE_MACHINE = "profile_machine"
"""The key under which a bench that simulates names the profile its layers' seconds come from."""
Bench = TypeVar("Bench")


def check_asked(parts: Mapping[str, object], only: Sequence[str], quick: bool, full: bool) -> None:
    """Check the requested parts and options before anything is measured."""
    for name in only:
        if name not in parts:
            raise unknown("part", name, parts)
    if quick and full:
        raise BadValue("--quick and --full cannot both be given.", hint="Leave one of them out.")


def measure_parts(
    parts: Mapping[str, Callable[[Bench], Figures]],
    bench: Bench,
    *,
    only: Sequence[str],
    quick: bool,
    out: Path | None,
    say: Progress,
) -> Figures:
    """Return the figures of every part, flat, and the seconds each took. A part that cannot be measured gives the
    reason, and the others go on: `_skipped` if something is missing here, `_failed` if something went wrong. The
    figures so far are stored in `out`."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    figures: Figures = {"machine": identify(1).text, "quick": int(quick)}
    for name in (part for part in parts if not only or part in only):
        say(name)
        begin = time.monotonic()
        try:
            figures |= parts[name](bench)
        except ManyhandsError as error:
            figures[f"{name}_failed"] = f"{error.message} {error.hint}".strip()
        figures[f"seconds_{name}"] = time.monotonic() - begin
        if out is not None:
            write_document(out / KEPT, {name: _finite(value) for name, value in figures.items()})
    return figures


def _finite(value: float | int | str) -> float | int | str | None:
    """Return a figure as documents have it: null if it is no number, since it could not be measured."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def profiled_here() -> str:
    """Return this machine's name among results: simulated figures give it when their profile was measured here."""
    machine = identify(1)
    return Host(machine.processor, machine.cores).slug


def failed(figures: Figures) -> list[str]:
    """Return the names of parts that went wrong, and of trials of a part."""
    return [name for name in figures if name.endswith("_failed")]
