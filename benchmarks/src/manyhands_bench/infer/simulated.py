"""Latency and throughput over the paper's seven links (DECNN Fig. 8-10), simulated with measured computing times.

One factor makes this machine's core as slow as the paper's device: the one at which the original ResNet-50 takes as
long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile
from manyhands.planner.pricing import subcluster
from manyhands.planner.task import PlanCandidate
from manyhands.plans.inference import plan_for
from manyhands.plans.simulating import simulate
from manyhands.schedule.actions import Forward
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.infer.networks import DecnnNetwork, Library, ProfiledNetwork
from manyhands_bench.papers import DECNN_SPEEDUPS
from manyhands_bench.parts import PROFILE_MACHINE, profiled_here

PAIRS = {
    "880_0.15": "decnn-880", "480_1": "decnn-480-1", "480_5": "decnn-480-5", "240_5": "decnn-240-5",
    "240_10": "decnn-240-10", "240_20": "decnn-240-20", "240_40": "decnn-240-40",
}  # fmt: skip
"""Mbit/s and milliseconds of a round trip -> preset."""
FAST, WEAK, SCALING = "880_0.15", "240_40", "240_20"
UNSCALED = (FAST, SCALING, WEAK)
"""Pairs that are simulated at this machine's own speed too."""
ONE, ALONE = "one device", "scheme 1"
MODNN, COATES, MODNN_DECOUPLED, COATES_DECOUPLED = "MoDNN", "Coates", "MoDNN + scheme 1", "Coates + scheme 1"
TILED = (MODNN, COATES, MODNN_DECOUPLED, COATES_DECOUPLED)
"""The baselines, each with the original and with the decoupled network."""
BOTH, ALL = "schemes 1+2", "schemes 1+2+3"
METHODS = (ONE, *TILED, ALONE, BOTH, ALL)
STREAM, SETTLED = 10, 4
"""The samples of a simulated stream, and the number of them that fill it."""


@dataclass(frozen=True)
class MethodSeconds:
    """The seconds of a sample by a method."""

    latency: float
    """Seconds of a sample alone; with schemes 1+2+3, in a stream: that is what they are for."""
    interval: float
    """Seconds from one answer to the next in a stream."""


def streamed(plan: Plan, profiled: ProfiledNetwork, cluster: Cluster, profile: Profile) -> MethodSeconds:
    """Return the mean time that a sample of a stream is under way, and the mean time between the ends of two."""
    long = msgspec.structs.replace(plan, micro_batches=STREAM, batch_size=STREAM * plan.micro_batch_size)
    result = simulate(long, profiled.network, cluster, profile)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in result.spans:
        if isinstance(span.what, Forward):
            number = span.what.micro_batch
            starts[number] = min(span.start, starts.get(number, math.inf))
            ends[number] = max(span.end, ends.get(number, 0.0))
    under_way = [ends[number] - starts[number] for number in range(SETTLED, STREAM)]
    last, settled = STREAM - 1, SETTLED - 1
    return MethodSeconds(statistics.fmean(under_way), (ends[last] - ends[settled]) / (last - settled))


@dataclass(frozen=True)
class Case:
    """A cluster, and both networks as its devices run them."""

    cluster: Cluster
    original: ProfiledNetwork
    decoupled: ProfiledNetwork
    streams: int
    """The number of a strategy's plans, the fastest for one sample first, that are tried as streams."""

    def plans(self, profiled: ProfiledNetwork, strategy: str) -> list[PlanCandidate]:
        return plan_for(profiled.network, self.cluster, profiled.on(self.cluster), strategy=strategy).candidates

    def _timed(self, profiled: ProfiledNetwork, candidates: Sequence[PlanCandidate], order: str = "") -> MethodSeconds:
        """Return the best latency of any plan and the best throughput of any, as if each had been requested."""
        profile = profiled.on(self.cluster)
        plans = [candidate.plan for candidate in candidates[: self.streams] if candidate.plan is not None]
        if order:
            plans = [msgspec.structs.replace(plan, order="interleave") for plan in plans]
        streams = [streamed(plan, profiled, self.cluster, profile) for plan in plans]
        latency = min(stream.latency for stream in streams) if order else candidates[0].seconds
        return MethodSeconds(latency, min(stream.interval for stream in streams))

    def methods(self) -> dict[str, MethodSeconds]:
        channels = self.plans(self.decoupled, "channels")
        return {
            ONE: self._timed(self.original, self.plans(self.original, "single")),
            MODNN: self._timed(self.original, self.plans(self.original, "modnn")),
            COATES: self._timed(self.original, self.plans(self.original, "coates")),
            MODNN_DECOUPLED: self._timed(self.decoupled, self.plans(self.decoupled, "modnn")),
            COATES_DECOUPLED: self._timed(self.decoupled, self.plans(self.decoupled, "coates")),
            ALONE: self._timed(self.decoupled, self.plans(self.decoupled, "single")),
            BOTH: self._timed(self.decoupled, channels),
            ALL: self._timed(self.decoupled, channels, order="interleave"),
        }


Table = Mapping[str, Mapping[str, MethodSeconds]]
"""Pair of rate and round trip -> method -> seconds."""


def ahead_of(methods: Mapping[str, MethodSeconds], others: Sequence[str] = TILED) -> tuple[float, float]:
    """Return how many times as fast ours is as the best of others: latency with schemes 1+2, throughput with 1+2+3."""
    latency = min(methods[name].latency for name in others) / methods[BOTH].latency
    interval = min(methods[name].interval for name in others) / methods[ALL].interval
    return latency, interval


def devices_of(pair: str, count: int = 0) -> Cluster:
    cluster = preset(PAIRS[pair])
    return subcluster(cluster, cluster.names[:count]) if count else cluster


def table(
    original: ProfiledNetwork, decoupled: ProfiledNetwork, pairs: Iterable[str], streams: int, say: Progress
) -> dict[str, dict[str, MethodSeconds]]:
    rows = {}
    for pair in pairs:
        say(f"simulating {original.network.name} at {pair_text(pair)}")
        rows[pair] = Case(devices_of(pair), original, decoupled, streams).methods()
    return rows


def pair_text(pair: str) -> str:
    rate, _, trip = pair.partition("_")
    return f"{rate} Mbit/s, {trip} ms"


@dataclass(frozen=True)
class Simulated:
    """All simulated results, for figures and pictures."""

    tables: dict[str, Table]
    """Model -> its table for four devices."""
    two: dict[str, Mapping[str, MethodSeconds]]
    """Model -> its methods on two devices, at the pair for scaling."""
    unscaled: dict[str, Table]
    factor: float


def bench_simulated(
    library: Library,
    subjects: Sequence[DecnnNetwork],
    reference: DecnnNetwork,
    pairs: Sequence[str],
    streams: int,
    say: Progress,
) -> tuple[Figures, Simulated]:
    """Simulate the networks over the links, and return the figures and all results."""
    measured = {
        subject: (library.profiled(subject, decoupled=False), library.profiled(subject, decoupled=True))
        for subject in subjects
    }
    factor = reference.paper_seconds / library.profiled(reference, decoupled=False).seconds
    tables: dict[str, Table] = {}
    two: dict[str, Mapping[str, MethodSeconds]] = {}
    for subject, (original, decoupled) in measured.items():
        slow = (original.scaled(factor), decoupled.scaled(factor))
        tables[subject.model] = table(*slow, pairs, streams, say)
        if SCALING in pairs:
            two[subject.model] = Case(devices_of(SCALING, 2), *slow, streams).methods()
    plain: dict[str, Table] = {}
    if reference in measured:
        plain[reference.model] = table(*measured[reference], [pair for pair in pairs if pair in UNSCALED], streams, say)
    simulated = Simulated(tables, two, plain, factor)
    return _figures(simulated, measured, reference), simulated


def _figures(
    simulated: Simulated,
    measured: Mapping[DecnnNetwork, tuple[ProfiledNetwork, ProfiledNetwork]],
    reference: DecnnNetwork,
) -> Figures:
    rows_of_all = [row for rows in simulated.tables.values() for row in rows.values()]
    latency, throughput = (min(ahead_of(methods)[place] for methods in rows_of_all) for place in range(2))
    figures: Figures = {
        "worst_vs_rivals": min(latency, throughput),
        "worst_vs_rivals_latency": latency,
        "worst_vs_rivals_throughput": throughput,
        "worst_vs_one_device": min(min(ahead_of(methods, (ONE,))) for methods in rows_of_all),
        "worst_vs_one_device_decoupled": min(min(ahead_of(methods, (ALONE,))) for methods in rows_of_all),
    }
    gains = {model: _gain(rows[WEAK]) for model, rows in simulated.tables.items() if WEAK in rows}
    if gains:
        figures["scheme3_gain"] = statistics.geometric_mean(gains.values())
        figures |= {f"scheme3_gain_{model}": gain for model, gain in gains.items()}
    for model, rows in simulated.tables.items():
        for pair, methods in rows.items():
            figures |= _speedups(f"{model}_{pair}", methods)
            latency, throughput = ahead_of(methods)
            figures[f"vs_rivals_latency_{model}_{pair}"] = latency
            figures[f"vs_rivals_throughput_{model}_{pair}"] = throughput
    for model, methods in simulated.two.items():
        figures |= _speedups(f"{model}_{SCALING}_2devices", methods)
    for rows in simulated.unscaled.values():
        figures["unscaled_worst_vs_rivals"] = min(min(ahead_of(methods)) for methods in rows.values())
    figures["slower_factor"] = simulated.factor
    figures |= {f"table_{model}": _text(model, rows) for model, rows in simulated.tables.items()}
    figures |= {f"table_{model}_unscaled": _text("", rows) for model, rows in simulated.unscaled.items()}
    figures |= {f"table_{model}_2devices": _text("", {SCALING: methods}) for model, methods in simulated.two.items()}
    return figures | {
        PROFILE_MACHINE: profiled_here(),
        "simulated_setting": "layers' forward passes measured on one core of this machine, one thread, one sample, "
        "what the thread computed, the fastest kernels of each network, original and decoupled in turns, the least of "
        "some medians; all "
        f"{simulated.factor:.3g} times slower, so that {reference.model} takes "
        f"{1e3 * reference.paper_seconds:g} ms on one device as in the paper; then "
        + ", ".join(
            f"{subject.model} {1e3 * simulated.factor * original.seconds:.0f} ms "
            f"(paper {1e3 * subject.paper_seconds:g}), "
            f"decoupled ({subject.decoupled_text}) {1e3 * simulated.factor * decoupled.seconds:.0f} ms"
            for subject, (original, decoupled) in measured.items()
        )
        + "; 4 equal devices, each port limited to the rate, delay one way half the round trip, the picture at hand on "
        "every device; each method by the fastest of its plans for what is compared; latency of schemes 1+2+3 is that "
        "in a stream"
    }  # fmt: skip


def _gain(methods: Mapping[str, MethodSeconds]) -> float:
    return methods[BOTH].interval / methods[ALL].interval


def _speedups(name: str, methods: Mapping[str, MethodSeconds]) -> Figures:
    """Return the speed-ups over one device with the original network."""
    alone = methods[ONE]
    return {
        f"speedup_latency_{name}": alone.latency / methods[BOTH].latency,
        f"speedup_throughput_{name}": alone.interval / methods[ALL].interval,
    }


def _text(model: str, rows: Table) -> str:
    lines = []
    for pair, methods in rows.items():
        parts = []
        for name in METHODS:
            paper = DECNN_SPEEDUPS.get((model, pair, name))
            beside = f" ({methods[ONE].latency / methods[name].latency:.2f}x, paper {paper:g}x)" if paper else ""
            parts.append(f"{name} {1e3 * methods[name].latency:.0f} ms {1 / methods[name].interval:.2f}/s{beside}")
        lines.append(f"{pair_text(pair)}: " + ", ".join(parts))
    return "\n  " + "\n  ".join(lines)
