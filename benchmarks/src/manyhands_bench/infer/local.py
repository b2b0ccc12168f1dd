"""The cost and the gain of channels on this machine's own cores: memory of a device, and two cores against one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan
from manyhands.facts.profile import Kernel
from manyhands.plans.inference import plan_for
from manyhands.profiler.kernels import choose_kernels
from manyhands.session.opening import open_session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.infer.networks import GROUPS, DecnnNetwork, Library, half_graph, one_core
from manyhands_bench.infer.simulated import ALL, ALONE, BOTH, COATES, COATES_DECOUPLED, MODNN, MODNN_DECOUPLED, ONE
from manyhands_bench.infer.site import WARM_UPS, Ran, Stand, interleaved, listed
from manyhands_bench.papers import HEADLINES
from manyhands_bench.tile.setup import usable

DEVICES = 4
ROUND = 8
TRIAL_SAMPLES = 6
TRIALS = 3
BATCHES = (1, 4, 8)
STREAM_SAMPLES = 64
TRIAL_STREAM = 32
DEFAULT_KERNELS = "PyTorch's default"


def bench_memory(library: Library, subject: DecnnNetwork, say: Progress) -> tuple[Figures, dict[str, int]]:
    """Return the most tensor bytes alive at once on the fullest device, counted in one inference of real workers."""
    original = library.graph(subject, decoupled=False)
    decoupled = library.graph(subject, decoupled=True)
    peaks: dict[str, int] = {}
    with open_session(Cluster.local(DEVICES), threads=1, pin=usable()) as session:
        for name, strategy, graph in (
            (ONE, "single", original), (ALONE, "single", decoupled), (MODNN, "modnn", original),
            (COATES, "coates", original), (MODNN_DECOUPLED, "modnn", decoupled),
            (COATES_DECOUPLED, "coates", decoupled), (BOTH, "channels", decoupled), (ALL, "channels", decoupled),
        ):  # fmt: skip
            say(f"memory, {name}")
            stand = Stand(session, graph, {})
            plan = plan_for(graph.network, session.cluster, strategy=strategy).plan
            if name == ALL:
                plan = interleaved(plan, ROUND)
            peaks[name] = stand.run(plan, WARM_UPS + 1, ROUND if name == ALL else 0, memory=True).peak_bytes
    figures: Figures = {
        "memory_reduction_4": 1 - peaks[BOTH] / peaks[ONE],
        "memory_reduction_4_paper": HEADLINES["decnn_memory"].value,
        "memory_reduction_4_modnn": 1 - peaks[MODNN] / peaks[ONE],
        "memory_reduction_4_coates": 1 - peaks[COATES] / peaks[ONE],
        "memory_reduction_4_modnn_decoupled": 1 - peaks[MODNN_DECOUPLED] / peaks[ONE],
        "memory_reduction_4_coates_decoupled": 1 - peaks[COATES_DECOUPLED] / peaks[ONE],
        "memory_reduction_scheme1": 1 - peaks[ALONE] / peaks[ONE],
        "scheme3_memory": peaks[ALL] / peaks[BOTH],
    }
    return figures | {
        "memory_setting": f"{subject}; decoupled: {subject.decoupled_text}; most tensor bytes alive at once (weights, "
        f"maps, what is received) on the fullest of {DEVICES} workers in one inference, PyTorch's default kernels: "
        + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in peaks.items()),
    }, peaks


def bench_speedup(library: Library, subject: DecnnNetwork, blocks: int, samples: int, say: Progress) -> Figures:
    """Compare channels on two workers of one thread with the same decoupled network on one of them, and with two halves
    that exchange nothing: in a stream, each side in the batches that suit it best, and one sample at a time."""
    whole, half = library.graph(subject, decoupled=True), half_graph(subject)
    chosen = library.profiled(subject, decoupled=True).profile.kernels
    say("choosing kernels of a half")
    with one_core():
        chosen_of_half = choose_kernels(half, 1, threads=1, seconds=library.seconds, training=False).kernels
    with open_session(Cluster.local(2), threads=1, pin=usable()) as session:
        cluster = session.cluster
        stand = Stand(session, whole, {})
        sides = {
            name: _Side(stand, partial(_batched, plan_for(whole.network, cluster, strategy=strategy).plan), chosen)
            for name, strategy in (("one", "single"), ("two", "channels"))
        }
        sides["halves"] = _Side(Stand(session, half, {}), partial(_one_each, half.network, cluster), chosen_of_half)
        for name, side in sides.items():
            say(f"kernels and batches of {name}")
            side.tune()
        for block in range(blocks):
            say(f"two cores against one, block {block + 1} of {blocks}")
            in_turn = list(sides.values())[:: -1 if block % 2 else 1]
            for side in in_turn:
                side.measure_latency(samples)
            for side in in_turn:
                side.measure_stream()
    single, two, halves = sides.values()
    return {
        "speedup_2": _ratio(single.intervals, two.intervals),
        "limit_2": _ratio(single.intervals, halves.intervals),
        "speedup_2_latency": _ratio(single.latencies, two.latencies),
        "limit_2_latency": _ratio(single.latencies, halves.latencies),
        "speedup_2_inside": _ratio(single.inside, two.inside),
        "interval_one_worker_seconds": statistics.median(single.intervals),
        "interval_two_workers_seconds": statistics.median(two.intervals),
        "interval_bare_halves_seconds": statistics.median(halves.intervals),
        "latency_one_worker_seconds": statistics.median(single.latencies),
        "latency_two_workers_seconds": statistics.median(two.latencies),
        "latency_bare_halves_seconds": statistics.median(halves.latencies),
        "speedup_2_setting": f"{subject} decoupled ({subject.decoupled_text}), workers of one thread each on a core of "
        f"its own, {blocks} blocks in turns, every other one the other way round, medians of ratios inside a block. "
        f"speedup_2: throughput, as in the paper's Fig. 10, a stream of {STREAM_SAMPLES} samples, seconds from answer "
        f"to answer: one {listed(single.intervals)}, two {listed(two.intervals)}, bare halves "
        f"{listed(halves.intervals)}. "
        f"speedup_2_latency: one sample at a time, seconds from asking to the answer, medians of "
        f"{samples} (inside: from the first computing to the last, of {TRIAL_SAMPLES} that were traced): one "
        f"{listed(single.latencies)}, two {listed(two.latencies)}, bare halves {listed(halves.latencies)}. "
        f"One: {single.text}; two: {two.text}; bare halves: {halves.text}",
        "limit_2_setting": f"bare halves: each worker has a network of its own with half of the groups "
        f"({GROUPS // 2} groups, x{subject.widen / 2:g}, no shuffle); both compute a sample at once and exchange "
        "nothing: what halving alone could give on this machine",
    }


def _batched(plan: Plan, batch: int) -> Plan:
    return msgspec.structs.replace(plan, batch_size=batch * plan.batch_size)


def _one_each(network: Network, cluster: Cluster, batch: int) -> Plan:
    """Return a plan in which every device computes `batch` samples of its own."""
    plan = plan_for(network, cluster, objective="throughput", strategy="samples").plan
    share = BySamples((batch,) * len(cluster.names))
    (stage,) = plan.stages
    return msgspec.structs.replace(
        plan, batch_size=batch * len(cluster.names), stages=(msgspec.structs.replace(stage, share=share),)
    )


class _Side:
    """One side: its plans with the kernels and in the batches that suit them best, as far as trials tell."""

    def __init__(self, stand: Stand, plan_of: Callable[[int], Plan], chosen: Mapping[str, Kernel]) -> None:
        """Create a side. `plan_of` returns a plan for a number of samples at a time, for each device that has samples
        of its own."""
        self._stand, self._plan_of = stand, plan_of
        self._ways: dict[str, Mapping[str, Kernel]] = {DEFAULT_KERNELS: {}} | ({"chosen": chosen} if chosen else {})
        self._way, self._batch = DEFAULT_KERNELS, 1
        self._trials: dict[str, float] = {}
        self.intervals: list[float] = []
        """Seconds for as many samples as there are devices with samples of their own; otherwise for one sample."""
        self.latencies: list[float] = []
        self.inside: list[float] = []

    def tune(self) -> None:
        """Choose kernels and batch size by the best of several trials of each: on a shared machine, one says little."""
        self._trials = {way: min(self._tried(way) for _ in range(TRIALS)) for way in self._ways}
        self._way = min(self._trials, key=self._trials.__getitem__)
        rounds = [{batch: self._tried(self._way, batch) for batch in BATCHES} for _ in range(TRIALS)]
        intervals = {batch: min(round[batch] for round in rounds) for batch in BATCHES}
        self._batch = min(intervals, key=intervals.__getitem__)
        self._trials |= {f"batches of {batch}": seconds for batch, seconds in intervals.items()}

    def _tried(self, way: str, batch: int = 0) -> float:
        """Return the seconds of a sample alone, or in a stream of batches; infinite if a plan cannot run this way."""
        try:
            return self._interval(way, batch, TRIAL_STREAM) if batch else self._run(TRIAL_SAMPLES, way).latency
        except ManyhandsError:
            return float("inf")

    def _interval(self, way: str, batch: int, samples: int) -> float:
        """Return the seconds from one sample to the next; if devices have samples of their own, from one of each to
        the next."""
        each = self._plan_of(1).batch_size
        return each * self._run(WARM_UPS, way, each * samples, batch).interval

    def _run(self, turns: int, way: str, at_once: int = 0, batch: int = 1, *, traced: bool = False) -> Ran:
        return self._stand.run(self._plan_of(batch), turns, at_once, traced=traced, kernels=self._ways[way])

    def measure_latency(self, samples: int) -> None:
        self.latencies.append(self._run(samples, self._way).latency)
        self.inside.append(self._run(TRIAL_SAMPLES, self._way, traced=True).inside)

    def measure_stream(self) -> None:
        self.intervals.append(self._interval(self._way, self._batch, STREAM_SAMPLES))

    @property
    def text(self) -> str:
        tried = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self._trials.items())
        shares = " | ".join(f"{'+'.join(stage.devices)} {stage.share}" for stage in self._plan_of(1).stages)
        return f"{shares}, kernels {self._way}, streams in batches of {self._batch} (tried: {tried})"


def _ratio(ones: list[float], twos: list[float]) -> float:
    return statistics.median(single / two for single, two in zip(ones, twos, strict=True))
