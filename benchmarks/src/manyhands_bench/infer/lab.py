"""The baselines and channels measured in the lab: four equal devices behind the paper's links, beside their simulation.

The devices are as fast as the paper's, by the time that the original network takes on one of them. Everything,
computing and links, goes a little faster than in real time, so that a device's share of a core is not too small.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from manyhands.facts.cluster import Cluster, LabCluster, preset
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError
from manyhands.facts.link import Link
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.lab.removal import missing
from manyhands.plans.inference import plan_for, sample_seconds
from manyhands.profiler.this_machine import this_machine
from manyhands.session.lab_session import play_here
from manyhands.session.measuring import measure
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.infer.networks import GROUPS, DecnnNetwork, Library, ProfiledNetwork
from manyhands_bench.infer.simulated import (
    ALL,
    BOTH,
    COATES,
    COATES_DECOUPLED,
    MODNN,
    MODNN_DECOUPLED,
    PAIRS,
    TILED,
    MethodSeconds,
    pair_text,
    streamed,
)
from manyhands_bench.infer.site import Ran, Stand, interleaved

LARGEST_SHARE = 0.35
"""The largest share of a core for each of four devices."""
SCALE = 0.5
"""The time scale; slower if the largest share would be exceeded."""
MEMORY_BYTES = 3 * 10**9
ROUND = 16
STRATEGIES = {
    MODNN: ("modnn", False), COATES: ("coates", False), MODNN_DECOUPLED: ("modnn", True),
    COATES_DECOUPLED: ("coates", True), BOTH: ("channels", True), ALL: ("channels", True),
}  # fmt: skip
"""Method -> strategy, and whether the network is decoupled."""


@dataclass(frozen=True)
class InferLabExtent:
    """The amount of measuring."""

    pairs: tuple[str, ...]
    turns: int
    at_once: int
    measure_seconds: float


@dataclass(frozen=True)
class MeasuredMethod:
    """The figures of one method at one pair of rate and round trip."""

    predicted: MethodSeconds
    latency: float
    """Seconds from the first computing to the last, as simulated; NaN for schemes 1+2+3."""
    asked_latency: float
    """Seconds from the request to the answer, including the transfer of the picture to the devices."""
    interval: float

    @property
    def errors(self) -> list[float]:
        errors = [abs(self.interval / self.predicted.interval - 1)]
        return errors if math.isnan(self.latency) else [abs(self.latency / self.predicted.latency - 1), *errors]


def lab_of(pair: str, seconds: float, subject: DecnnNetwork, name: str) -> LabCluster:
    """Return four devices on which a network that takes `seconds` on a core of this machine takes as long as in the
    paper."""
    core = this_machine(threads=1).gflops
    share = seconds / subject.paper_seconds
    real = preset(PAIRS[pair])
    rate = real.link.bytes_per_second
    devices = tuple(
        Device(
            name=f"d{number}", gflops=core * share, memory_bytes=MEMORY_BYTES, up_bytes_per_second=rate,
            down_bytes_per_second=rate,
        )
        for number in range(1, GROUPS + 1)
    )  # fmt: skip
    return LabCluster(
        Cluster(name, devices, Link(rate, real.link.delay_seconds)), scale=max(SCALE, share / LARGEST_SHARE)
    )


Measurements = dict[str, dict[str, MeasuredMethod]]
"""Pair of rate and round trip -> method -> seconds."""


def bench_lab(
    library: Library, subject: DecnnNetwork, extent: InferLabExtent, say: Progress
) -> tuple[Figures, Measurements]:
    """Measure every method over some pairs; return the reason if there can be no lab."""
    if why := missing():
        return {"lab_skipped": why}, {}
    graphs = {decoupled: library.graph(subject, decoupled=decoupled) for decoupled in (False, True)}
    seconds = library.profiled(subject, decoupled=False).seconds
    kernels = {decoupled: library.profiled(subject, decoupled=decoupled).profile.kernels for decoupled in graphs}
    measured: Measurements = {}
    scale = share = 1.0
    for number, pair in enumerate(extent.pairs):
        lab_cluster = lab_of(pair, seconds, subject, f"infer{os.getpid()}.{number}")
        try:
            played = play_here(lab_cluster)
        except LabError as error:
            return {"lab_skipped": error.message}, {}
        scale, share = played.scale, played.seats[0].share
        with open_session(lab_cluster) as session:
            measured[pair] = _methods(session, graphs, kernels, extent, partial(_said, say, pair))
    return lab_figures(measured) | {
        "lab_setting": f"{subject}, decoupled: {subject.decoupled_text}; {GROUPS} devices with {share:.3f} of a core "
        f"each, on which it takes {subject.paper_seconds:g} s in real time; time scale {scale:.3g}; the kernels chosen "
        f"on this machine for each network; latency: median of {extent.turns - 2} samples one by one, from the first "
        "computing of any device to the last (asked: from asking to the answer, with the picture's way to the "
        f"devices); throughput: {extent.at_once} samples at once; predicted: simulated from what the lab's own devices "
        "measured",
        "lab": _text(measured, scale),
    }, measured


def _methods(
    session: Session, graphs: Mapping[bool, Graph], kernels: Mapping[bool, dict[str, Kernel]], extent: InferLabExtent,
    say: Progress,
) -> dict[str, MeasuredMethod]:  # fmt: skip
    profiled = {}
    for decoupled, graph in graphs.items():
        say(f"measuring {graph.name}")
        profiled[decoupled] = measure(
            session, graph, 1, ladder=(1,), seconds=extent.measure_seconds, refresh=True, kernels=kernels[decoupled],
            training=False,
        )  # fmt: skip
    methods = {}
    for name, (strategy, decoupled) in STRATEGIES.items():
        say(name)
        graph, (cluster, profile) = graphs[decoupled], profiled[decoupled]
        plan = plan_for(graph.network, cluster, profile, strategy=strategy).plan
        network = ProfiledNetwork(graph.network, profile.of(cluster.names[0]))
        latency = sample_seconds(plan, graph.network, cluster, profile)
        if name == ALL:
            plan = interleaved(plan, ROUND)
        stream = streamed(plan, network, cluster, profile)
        predicted = MethodSeconds(stream.latency if name == ALL else latency, stream.interval)
        ran = Stand(session, graph, kernels[decoupled]).run(plan, extent.turns, extent.at_once)
        methods[name] = MeasuredMethod(predicted, _inside(ran), ran.latency, ran.interval)
    return methods


def _said(say: Progress, pair: str, text: str) -> None:
    say(f"lab, {pair_text(pair)}: {text}")


def _inside(ran: Ran) -> float:
    return ran.inside if any(log.spans for log in ran.logs.values()) else math.nan


def lab_figures(measured: Mapping[str, Mapping[str, MeasuredMethod]]) -> Figures:
    """Return the measured gains over the baselines, and the error of the simulation."""
    figures: Figures = {}
    latencies, asked_latencies, throughputs = [], [], []
    for pair, methods in measured.items():
        latencies.append(min(methods[name].latency for name in TILED) / methods[BOTH].latency)
        asked_latencies.append(min(methods[name].asked_latency for name in TILED) / methods[BOTH].asked_latency)
        throughputs.append(min(methods[name].interval for name in TILED) / methods[ALL].interval)
        figures[f"lab_vs_rivals_latency_{pair}"] = latencies[-1]
        figures[f"lab_vs_rivals_asked_latency_{pair}"] = asked_latencies[-1]
        figures[f"lab_vs_rivals_throughput_{pair}"] = throughputs[-1]
        figures[f"lab_scheme3_gain_{pair}"] = methods[BOTH].interval / methods[ALL].interval
    errors = [error for methods in measured.values() for method in methods.values() for error in method.errors]
    return {
        "lab_worst_vs_rivals": min([*latencies, *throughputs]),
        "lab_worst_vs_rivals_asked": min([*asked_latencies, *throughputs]),
        "lab_sim_error": statistics.median(errors),
        "lab_sim_error_worst": max(errors),
        **figures,
    }


def _text(measured: Mapping[str, Mapping[str, MeasuredMethod]], scale: float) -> str:
    lines: Sequence[str] = [
        f"{pair_text(pair)}: "
        + ", ".join(
            f"{name} {_life(method.latency, scale)} (asked {_life(method.asked_latency, scale)}, predicted "
            f"{_life(method.predicted.latency, scale)}) {scale / method.interval:.2f}/s (predicted "
            f"{scale / method.predicted.interval:.2f}/s)"
            for name, method in methods.items()
        )
        for pair, methods in measured.items()
    ]
    return "in real time\n  " + "\n  ".join(lines)


def _life(seconds: float, scale: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds / scale:.0f} ms"
