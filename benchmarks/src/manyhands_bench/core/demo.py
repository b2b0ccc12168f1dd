"""The demonstration of `manyhands train`, on several workers: what was predicted before the first run beside what a
step took."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from manyhands.facts.cluster import Cluster
from manyhands.training.config import TrainConfig
from manyhands.training.named import train_by_name
from manyhands_bench.figures import Figures, Progress

WORKERS = (2, 4)
REPEATS = 3
BATCH_SIZE = 64
EPOCHS = 10


@contextlib.contextmanager
def nothing_stored(folder: Path) -> Iterator[None]:
    """Keep what is measured in an empty folder within the context."""
    before = os.environ.get("MANYHANDS_HOME")
    os.environ["MANYHANDS_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MANYHANDS_HOME"]
        else:
            os.environ["MANYHANDS_HOME"] = before


def bench_demo(quick: bool, say: Progress) -> Figures:
    """Compare the predictions of the demonstration with its measurements, each time as on a machine on which nothing
    has been measured before; all workers share the samples."""
    figures: Figures = {}
    for workers in WORKERS:
        runs: list[tuple[float, float]] = []
        for repeat in range(1 if quick else REPEATS):
            say(f"the demonstration on {workers} workers, {repeat + 1}")
            with tempfile.TemporaryDirectory() as folder, nothing_stored(Path(folder) / "home"):
                config = TrainConfig(
                    plan="samples", folder=Path(folder) / "run", batch_size=BATCH_SIZE, epochs=2 if quick else EPOCHS
                )
                result = train_by_name(config, Cluster.local(workers))
            runs.append((result.predicted_seconds, result.measured_seconds))
        figures[f"demo_sim_error_{workers}"] = statistics.median(abs(p - m) / m for p, m in runs)
        figures[f"demo_sim_error_{workers}_setting"] = (
            f"manyhands train on {workers} workers that share the samples, nothing stored; predicted and measured ms "
            "of a step: " + ", ".join(f"{1e3 * p:.1f} and {1e3 * m:.1f}" for p, m in runs)
        )
    return figures
