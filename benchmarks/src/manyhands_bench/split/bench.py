"""Figures of `manyhands bench split`: split training over recorded links beside its baselines, and its accuracy.

The edge, which is slowed down, and the server are two processes of this machine; their link follows recordings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.profiler.this_machine import identify
from manyhands.split.session import open_two
from manyhands_bench.claims import ESTIMATED
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE, check_asked, measure_parts
from manyhands_bench.split.accuracy import SplitAccuracyExtent, bench_accuracy
from manyhands_bench.split.decisions import bench_decisions
from manyhands_bench.split.site import SplitSetting, SplitSite
from manyhands_bench.split.traces import (
    MORE_TRACES,
    RATES,
    TRACES,
    TraceExtent,
    bench_bytes,
    bench_traces,
    skipped,
)

SHARED = Path("../shared/data")
TRACES_FOLDER, PICTURES = SHARED / "traces", SHARED / "cifar10_jpeg.npz"
SETTING = SplitSetting("mobilenetv3-large", (3, 32, 32), 8, 16.0, small_images=True)
"""The paper's network for CIFAR-10. A TX2 or a Pi is further from the paper's server than 16 times, but so is that
server from a core of this machine."""
QUICK_SETTING = SplitSetting("tiny", (1, 16, 16), 8, 4.0)
RUNS = TraceExtent(TRACES, 11.0, 150, RATES, 3.0, 4, 60.0)
FULL_RUNS = TraceExtent(TRACES | MORE_TRACES, 60.0, 400, (0.5, 1, 2, 5, 10, 20, 40, 80, 200), 12.0, 8, 110.0)
QUICK_RUNS = TraceExtent({name: TRACES[name] for name in ("foot", "lte_verizon")}, 1.0, 60, (25.0,), 0.5, 3, 2.0)
ACCURACIES = SplitAccuracyExtent(3000, 10_000, 1500, 3, 200, ks=(1, 3, 5, 12), bits=(2, 4, 8))
FULL_ACCURACIES = SplitAccuracyExtent(12_000, 10_000, 4000, 3, 4000)
QUICK_ACCURACIES = SplitAccuracyExtent(256, 128, 8, 1, 4, ks=(1, 3), bits=(4, 8))
QUICK_MEASURE_SECONDS = 0.2


@dataclass(frozen=True)
class DecisionBench:
    """The settings that a part that runs by itself is given."""

    traces: Path
    quick: bool
    say: Progress
    out: Path | None


def _decisions(bench: DecisionBench) -> Figures:
    if why := skipped(bench.traces):
        return {"decisions_skipped": why}
    return bench_decisions(bench.traces, bench.quick, bench.out, bench.say)


PARTS: dict[str, Callable[[DecisionBench], Figures]] = {"decisions": _decisions}
"""Parts that run only when they are asked for: the decision engine over whole recordings, by a virtual clock."""


def bench_split(
    quick: bool = False,
    full: bool = False,
    traces: Path = TRACES_FOLDER,
    pictures: Path = PICTURES,
    out: Path | None = None,
    only: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> Figures:
    """Return every figure of `manyhands bench split`, flat, or those of the parts in `only`. A part whose data are
    missing is skipped with a reason."""
    say = on_progress or (lambda text: None)
    check_asked(PARTS, only, quick, full)
    if only:
        bench = DecisionBench(traces, quick, say, out)
        return measure_parts(PARTS, bench, only=only, quick=quick, out=None, say=say) | {PROFILE_MACHINE: ESTIMATED}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    setting = QUICK_SETTING if quick else SETTING
    runs, accuracies = (QUICK_RUNS, QUICK_ACCURACIES) if quick else (RUNS, ACCURACIES)
    if full:
        runs, accuracies = FULL_RUNS, FULL_ACCURACIES
    figures: Figures = {"machine": identify(1).text, "quick": int(quick)}
    with open_two(edge_slowdown=setting.slowdown) as two, tempfile.TemporaryDirectory() as folder:
        say(f"measuring {setting.model}")
        site = SplitSite.of(two, setting, Path(folder), measure_seconds=QUICK_MEASURE_SECONDS if quick else None)
        figures |= bench_bytes(site, say)
        why = skipped(traces)
        figures |= {"traces_skipped": why} if why else bench_traces(site, traces, runs, out, say)
    if not pictures.exists():
        return figures | {"accuracy_skipped": f"there is no file {pictures}; name one with --pictures"}
    return figures | bench_accuracy(pictures, accuracies, out, say)
