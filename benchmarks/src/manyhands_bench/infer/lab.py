"""The rivals and channels measured in the lab: four equal devices behind the paper's links, beside their simulation.

The devices are as fast as the paper's: by the time the original network takes on one of them. Everything, computing and
links, goes a little faster than in life, so that a device's share of a core is not too small.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from manyhands.facts.cluster import Cluster, Device, Link
from manyhands.facts.errors import LabError
from manyhands.facts.lab import LabCluster
from manyhands.facts.presets import preset
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.lab.lab import missing
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
"""Of a core, for one device of four."""
SCALE = 0.5
"""Or slower, where that share would be exceeded."""
MEMORY_BYTES = 3 * 10**9
ROUND = 16
STRATEGIES = {
    MODNN: ("modnn", False), COATES: ("coates", False), MODNN_DECOUPLED: ("modnn", True),
    COATES_DECOUPLED: ("coates", True), BOTH: ("channels", True), ALL: ("channels", True),
}  # fmt: skip
"""Method -> strategy, and whether the network is decoupled."""


@dataclass(frozen=True)
class InferLabExtent:
    """How much is measured."""

    pairs: tuple[str, ...]
    turns: int
    at_once: int
    measure_seconds: float


@dataclass(frozen=True)
class MeasuredMethod:
    """One method at one pair."""

    predicted: MethodSeconds
    latency: float
    """From the first computing to the last, as simulated; of schemes 1+2+3 nothing is said."""
    asked_latency: float
    """From asking to the answer: with the picture's way to the devices."""
    interval: float

    @property
    def errors(self) -> list[float]:
        found = [abs(self.interval / self.predicted.interval - 1)]
        return found if math.isnan(self.latency) else [abs(self.latency / self.predicted.latency - 1), *found]


def lab_of(pair: str, seconds: float, subject: DecnnNetwork, name: str) -> LabCluster:
    """Four devices on which a network that takes so many seconds on a core of this machine takes as long as in the
    paper."""
    core = this_machine(threads=1).gflops
    share = seconds / subject.paper_seconds
    life = preset(PAIRS[pair])
    rate = life.link.bytes_per_second
    devices = tuple(
        Device(
            name=f"d{number}", gflops=core * share, memory_bytes=MEMORY_BYTES, up_bytes_per_second=rate,
            down_bytes_per_second=rate,
        )
        for number in range(1, GROUPS + 1)
    )  # fmt: skip
    return LabCluster(
        Cluster(name, devices, Link(rate, life.link.delay_seconds)), scale=max(SCALE, share / LARGEST_SHARE)
    )


Found = dict[str, dict[str, MeasuredMethod]]
"""Pair of rate and round trip -> method -> seconds."""


def bench_lab(library: Library, subject: DecnnNetwork, extent: InferLabExtent, say: Progress) -> tuple[Figures, Found]:
    """Every method over some pairs; where there can be no lab, why."""
    if why := missing():
        return {"lab_skipped": why}, {}
    graphs = {decoupled: library.graph(subject, decoupled=decoupled) for decoupled in (False, True)}
    seconds = library.known(subject, decoupled=False).seconds
    kernels = {decoupled: library.known(subject, decoupled=decoupled).profile.kernels for decoupled in graphs}
    found: Found = {}
    scale = share = 1.0
    for number, pair in enumerate(extent.pairs):
        asked = lab_of(pair, seconds, subject, f"infer{os.getpid()}.{number}")
        try:
            played = play_here(asked)
        except LabError as error:
            return {"lab_skipped": error.message}, {}
        scale, share = played.scale, played.seats[0].share
        with open_session(asked) as session:
            found[pair] = _methods(session, graphs, kernels, extent, partial(_said, say, pair))
    return lab_figures(found) | {
        "lab_setting": f"{subject}, decoupled: {subject.decoupled_text}; {GROUPS} devices with {share:.3f} of a core "
        f"each, on which it takes {subject.paper_seconds:g} s in life; time scale {scale:.3g}; the kernels chosen on "
        f"this machine for each network; latency: median of {extent.turns - 2} samples one by one, from the first "
        "computing of any device to the last (asked: from asking to the answer, with the picture's way to the "
        f"devices); throughput: {extent.at_once} samples at once; predicted: simulated from what the lab's own devices "
        "measured",
        "lab": _text(found, scale),
    }, found


def _methods(
    session: Session, graphs: Mapping[bool, Graph], kernels: Mapping[bool, dict[str, Kernel]], extent: InferLabExtent,
    say: Progress,
) -> dict[str, MeasuredMethod]:  # fmt: skip
    known = {}
    for decoupled, graph in graphs.items():
        say(f"measuring {graph.name}")
        known[decoupled] = measure(
            session, graph, 1, ladder=(1,), seconds=extent.measure_seconds, refresh=True, kernels=kernels[decoupled],
            training=False,
        )  # fmt: skip
    found = {}
    for name, (strategy, decoupled) in STRATEGIES.items():
        say(name)
        graph, (cluster, profile) = graphs[decoupled], known[decoupled]
        plan = plan_for(graph.network, cluster, profile, strategy=strategy).plan
        own = ProfiledNetwork(graph.network, profile.of(cluster.names[0]))
        latency = sample_seconds(plan, graph.network, cluster, profile)
        if name == ALL:
            plan = interleaved(plan, ROUND)
        stream = streamed(plan, own, cluster, profile)
        predicted = MethodSeconds(stream.latency if name == ALL else latency, stream.interval)
        ran = Stand(session, graph, kernels[decoupled]).run(plan, extent.turns, extent.at_once)
        found[name] = MeasuredMethod(predicted, _inside(ran), ran.latency, ran.interval)
    return found


def _said(say: Progress, pair: str, text: str) -> None:
    say(f"lab, {pair_text(pair)}: {text}")


def _inside(ran: Ran) -> float:
    return ran.inside if any(log.spans for log in ran.logs.values()) else math.nan


def lab_figures(found: Mapping[str, Mapping[str, MeasuredMethod]]) -> Figures:
    """What we are ahead of, as measured, and how far off the simulation was."""
    figures: Figures = {}
    latencies, asked, throughputs = [], [], []
    for pair, own in found.items():
        latencies.append(min(own[name].latency for name in TILED) / own[BOTH].latency)
        asked.append(min(own[name].asked_latency for name in TILED) / own[BOTH].asked_latency)
        throughputs.append(min(own[name].interval for name in TILED) / own[ALL].interval)
        figures[f"lab_vs_rivals_latency_{pair}"] = latencies[-1]
        figures[f"lab_vs_rivals_asked_latency_{pair}"] = asked[-1]
        figures[f"lab_vs_rivals_throughput_{pair}"] = throughputs[-1]
        figures[f"lab_scheme3_gain_{pair}"] = own[BOTH].interval / own[ALL].interval
    errors = [error for own in found.values() for one in own.values() for error in one.errors]
    return {
        "lab_worst_vs_rivals": min([*latencies, *throughputs]),
        "lab_worst_vs_rivals_asked": min([*asked, *throughputs]),
        "lab_sim_error": statistics.median(errors),
        "lab_sim_error_worst": max(errors),
        **figures,
    }


def _text(found: Mapping[str, Mapping[str, MeasuredMethod]], scale: float) -> str:
    lines: Sequence[str] = [
        f"{pair_text(pair)}: "
        + ", ".join(
            f"{name} {_life(one.latency, scale)} (asked {_life(one.asked_latency, scale)}, predicted "
            f"{_life(one.predicted.latency, scale)}) {scale / one.interval:.2f}/s (predicted "
            f"{scale / one.predicted.interval:.2f}/s)"
            for name, one in own.items()
        )
        for pair, own in found.items()
    ]
    return "in life's time\n  " + "\n  ".join(lines)


def _life(seconds: float, scale: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds / scale:.0f} ms"
