"""Figures of `manyhands bench capture` from several packages: capture and kernels, and the simulator's speed."""

from __future__ import annotations

import statistics
import time

from manyhands.facts.cluster import Cluster
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.plans.networks import load_network
from manyhands.simulator.simulate import simulate
from manyhands_bench.capture.measure import bench_capture as measure_capture
from manyhands_bench.figures import Figures, Progress

REPEATS = 5


def bench_capture(quick: bool = False, on_progress: Progress | None = None) -> Figures:
    """Return every figure of `manyhands bench capture`, flat."""
    figures = measure_capture(quick, on_progress)
    figures.update(bench_simulator())
    return figures


def bench_simulator() -> Figures:
    """Measure actions simulated per second: resnet50 over 8 stages of 8 devices each, 16 micro-batches, median of
    repeats."""
    network = load_network("resnet50")
    cluster = Cluster.local(64)
    bounds = [round(i * len(network.layers) / 8) for i in range(9)]
    stages = tuple(
        Stage((first, last), cluster.names[8 * i : 8 * i + 8], BySamples((1,) * 8))
        for i, (first, last) in enumerate(zip(bounds, bounds[1:]))
    )
    plan = Plan(network="resnet50", batch_size=128, micro_batches=16, stages=stages)
    rates = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = simulate(plan, network, cluster, keep_spans=False)
        rates.append(result.actions / (time.perf_counter() - start))
    return {"simulate_actions_per_second": statistics.median(rates), "simulate_actions": result.actions}
