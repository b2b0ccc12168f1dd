"""What channels cost and give on this machine's own cores: memory of a device, and two cores against one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from manyhands.api.bench_infer_networks import Library, Subject
from manyhands.api.bench_infer_simulated import ALL, ALONE, BOTH, COATES, COATES_DECOUPLED, MODNN, MODNN_DECOUPLED, ONE
from manyhands.api.bench_infer_site import WARM_UPS, Stand, interleaved, listed
from manyhands.api.bench_tile_setup import usable
from manyhands.api.papers import HEADLINES
from manyhands.api.planning_inference import plan_for
from manyhands.api.session import open_session
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.profiler.bench_capture import Figures, Progress

DEVICES = 4
ROUND = 8
TRIAL_SAMPLES = 6


def bench_memory(library: Library, subject: Subject, say: Progress) -> tuple[Figures, dict[str, int]]:
    """Most tensor bytes alive at once on the fullest device, counted in one inference of real workers."""
    original = library.graph(subject, decoupled=False)
    decoupled = library.graph(subject, decoupled=True)
    found: dict[str, int] = {}
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
            found[name] = stand.run(plan, WARM_UPS + 1, ROUND if name == ALL else 0, memory=True).peak_bytes
    figures: Figures = {
        "memory_reduction_4": 1 - found[BOTH] / found[ONE],
        "memory_reduction_4_paper": HEADLINES["decnn_memory"].value,
        "memory_reduction_4_modnn": 1 - found[MODNN] / found[ONE],
        "memory_reduction_4_coates": 1 - found[COATES] / found[ONE],
        "memory_reduction_4_modnn_decoupled": 1 - found[MODNN_DECOUPLED] / found[ONE],
        "memory_reduction_4_coates_decoupled": 1 - found[COATES_DECOUPLED] / found[ONE],
        "memory_reduction_scheme1": 1 - found[ALONE] / found[ONE],
        "scheme3_memory": found[ALL] / found[BOTH],
    }
    return figures | {
        "memory_setting": f"{subject}; decoupled: {subject.decoupled_text}; most tensor bytes alive at once (weights, "
        f"maps, what is received) on the fullest of {DEVICES} workers in one inference, PyTorch's default kernels: "
        + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.items()),
    }, found


def bench_speedup(library: Library, subject: Subject, blocks: int, samples: int, say: Progress) -> Figures:
    """Channels on two workers of one thread against the same decoupled network on one of them."""
    graph = library.graph(subject, decoupled=True)
    chosen = library.known(subject, decoupled=True).profile.kernels
    ways: dict[str, Mapping[str, Kernel]] = {"PyTorch's default": {}}
    if chosen:
        ways["chosen"] = chosen
    with open_session(Cluster.local(2), threads=1, pin=usable()) as session:
        stand = Stand(session, graph, {})
        network, cluster = graph.network, session.cluster
        sides: dict[str, Plan] = {
            "one": plan_for(network, cluster, strategy="single").plan,
            "two": plan_for(network, cluster, strategy="channels").plan,
        }
        best: dict[str, str] = {}
        trials: dict[str, str] = {}
        for side, plan in sides.items():
            say(f"kernels of {side}")
            tried = {way: _trial(stand, plan, own) for way, own in ways.items()}
            best[side] = min(tried, key=tried.__getitem__)
            trials[side] = ", ".join(f"{way} {1e3 * seconds:.1f} ms" for way, seconds in tried.items())
        latencies: dict[str, list[float]] = {side: [] for side in sides}
        inside: dict[str, list[float]] = {side: [] for side in sides}
        for block in range(blocks):
            say(f"two cores against one, block {block + 1} of {blocks}")
            for side, plan in sides.items():
                ran = stand.run(plan, samples, kernels=ways[best[side]])
                latencies[side].append(ran.latency)
                inside[side].append(ran.inside)
    return {
        "speedup_2": _ratio(latencies),
        "speedup_2_inside": _ratio(inside),
        "latency_one_worker_seconds": statistics.median(latencies["one"]),
        "latency_two_workers_seconds": statistics.median(latencies["two"]),
        "speedup_2_setting": f"{subject} decoupled ({subject.decoupled_text}), one sample at a time, workers of one "
        f"thread each on a core of its own; from asking to the answer (inside: from the first computing to the last); "
        f"medians of {samples} samples, {blocks} blocks in turns: one {listed(latencies['one'])} s, two "
        f"{listed(latencies['two'])} s. Kernels, the faster of two in a trial: one: {best['one']} ({trials['one']}); "
        f"two: {best['two']} ({trials['two']}). One: {_text(sides['one'])}; two: {_text(sides['two'])}",
    }


def _trial(stand: Stand, plan: Plan, kernels: Mapping[str, Kernel]) -> float:
    """Seconds of a sample; infinite where a plan cannot run by these kernels."""
    try:
        return stand.run(plan, TRIAL_SAMPLES, kernels=kernels).latency
    except ManyhandsError:
        return float("inf")


def _ratio(seconds: Mapping[str, list[float]]) -> float:
    return statistics.median(one / two for one, two in zip(seconds["one"], seconds["two"], strict=True))


def _text(plan: Plan) -> str:
    return " | ".join(f"{'+'.join(stage.devices)} {stage.share}" for stage in plan.stages)
