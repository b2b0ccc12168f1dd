"""Groups of tests: one process runs all of a group, and makes once what is costly: workers, captured networks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

WITH_CLOCKS = (
    "tests/cli", "tests/dashboard", "tests/data", "tests/doctor", "tests/faults", "tests/inference", "tests/lab",
    "tests/observe", "tests/profiler", "tests/runtime", "tests/security", "tests/session", "tests/split",
    "tests/training", "tests/transport", "benchmarks/tests",
)  # fmt: skip
"""Folders whose tests run real processes over real sockets against real clocks."""

WRONG_NUMBERS = ("are not close", "Mismatched elements", "are not equal")
"""What torch and NumPy say of results that differ from those expected."""


def try_again(item: pytest.Item, root: Path) -> None:
    """Give a test with a clock a second try: a machine that others use too can stop a process for seconds, and what
    measures time or waits for a process may fail then. The run's summary names each test that needed it. A result with
    wrong numbers is never tried again: a race that spoils a result one time in a hundred must be seen."""
    folder = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
    if folder.startswith(tuple(f"{name}/" for name in WITH_CLOCKS)):
        item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=list(WRONG_NUMBERS)))


def group_of(item: pytest.Item) -> str:
    return "_".join(sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")}))


DEEPER = ("resnet34", "vgg19", "yolov2-16", "efficientnet-b1", "mobilenetv2-32", "efficientnet-b1-32")
"""More layers of the kinds that another network of the zoo has: with the slow tests."""


LONGEST = (
    "mypy", "faults", "tests/graph/test_loss.py", "tests/executor/test_tile_operators.py",
    "tests/exactness/test_tiled_training.py", "tests/exactness/test_tiles_beside_sums.py", "one machine", "commands",
    "tests/split/test_silos.py", "tests/exactness/test_hybrid_pipelines.py", "tests/exactness/test_replay.py",
    "tests/exactness/test_exact_training.py", "tests/executor/test_codec.py", "tests/graph/test_kernels.py",
    "tests/transport/test_shaping.py", "tests/graph/test_exactness.py", "tests/exactness/test_tied_weights.py",
)  # fmt: skip
"""The groups that take longest, and files of tests in none: they start first, so that no process is left with one at
the end."""


def unit_of(nodeid: str) -> str:
    """What one process of `-n` runs as a whole: a test's group, else its file, whose tests share what it captures."""
    return nodeid.rpartition("@")[2] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests for `-n`: LONGEST, then the other groups, then the other files. xdist keeps this order."""
    places = {name: place for place, name in enumerate(LONGEST)}

    def turn(item: pytest.Item) -> int:
        group = group_of(item)
        return places.get(group or unit_of(item.nodeid), len(LONGEST) + (not group))

    items.sort(key=turn)


def by_name(kind: str, names: Iterable[str], slow: Iterable[str] = ()) -> list[Any]:
    """Parameters with a group for each; `slow` ones are with the slow tests, as DEEPER is."""
    late = {*DEEPER, *slow}
    return [
        pytest.param(name, id=name, marks=[pytest.mark.xdist_group(f"{kind} {name}"), *slow_if(name in late)])
        for name in names
    ]


def slow_if(is_so: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if is_so else []


def thinned(cases: Iterable[tuple[Any, ...]], every: int = 4) -> list[Any]:
    """One of so many with the quick tests: each starts a process of its own."""
    return [pytest.param(*case, marks=slow_if(place % every != 0)) for place, case in enumerate(cases)]


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Of a test with many cases, mark those as slow that its `quick` does not name: quick("a", "b"), or quick(every=3)
    for the first of three. A name that no case has is an error where all cases were collected."""
    cases: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("quick") is not None and hasattr(item, "callspec"):
            cases.setdefault((str(item.path), item.originalname), []).append(item)  # type: ignore[attr-defined]
    for (_, name), these in cases.items():
        mark = these[0].get_closest_marker("quick")
        every, names = mark.kwargs.get("every"), set(mark.args)
        missing = names - {item.callspec.id for item in these}
        if missing and len(these) > len(names):
            raise pytest.UsageError(f"{name} has no case {', '.join(sorted(missing))}")
        for place, item in enumerate(these):
            if (place % every != 0) if every else (item.callspec.id not in names):
                item.add_marker(pytest.mark.slow)
