"""Split training over recorded links: seconds of 100 batches, beside baselines on the same engine (SPLIT Fig. 16-18).

Each trace is played from where it moves most. Every method begins with the mean rates of what is played:
JointDNN stays with them; ours and K=0 learn the rest from their own transfers. Each runs as many batches as it should
do in the same seconds of the trace, so that all see the same link, and their seconds are scaled up to 100 batches. The
baseline that never uses the link is run once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.facts.catalogue import CATALOGUE
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.trace import LinkTrace, Trace
from manyhands.files.traces import read_link_trace
from manyhands.planner.split import Deployment, LinkRates, SplitProfile, memory_of, modules, seconds_of
from manyhands.planner.split_choice import BASELINES, choose
from manyhands.split.controller import FIRST_TAU
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.split.plots import Course, draw_course, draw_lines
from manyhands_bench.split.site import MODE, K, SplitSetting, SplitSite, TimedSplit, mean_rates

TRACES: dict[str, str] = {
    "foot": "ghent-4g/foot_0006.txt",
    "car": "ghent-4g/car_0001.txt",
    "train": "ghent-4g/train_0002.txt",
    "lte_tmobile": "mahimahi-100ms/TMobile-LTE-short_up.txt,mahimahi-100ms/TMobile-LTE-short_down.txt",
    "lte_verizon": "mahimahi-100ms/Verizon-LTE-short_up.txt,mahimahi-100ms/Verizon-LTE-short_down.txt",
    "5g": "lumos5g/5g_trace_110_driving.txt",
}
MORE_TRACES: dict[str, str] = {
    "bicycle": "ghent-4g/bicycle_0002.txt",
    "bus": "ghent-4g/bus_0003.txt",
    "tram": "ghent-4g/tram_0002.txt",
    "lte_att": "mahimahi-100ms/ATT-LTE-driving-2016_up.txt,mahimahi-100ms/ATT-LTE-driving-2016_down.txt",
    "5g_tmobile": "5gophers/car-driving-trace-1_tmobile.txt",
    "5g_walking": "5gophers/walking-trace.txt",
}
LONG_TRACE = "mahimahi-100ms/TMobile-UMTS-driving_up.txt,mahimahi-100ms/TMobile-UMTS-driving_down.txt"
LONG_BEGIN = 440.0
"""The second at which Fig. 18 begins: the link is fast at first, then slow for long enough that another deployment
pays."""
RATES = (0.5, 2.0, 8.0, 25.0, 80.0, 200.0)
"""Mbit/s, of Fig. 16."""
OURS, BESIDE, GROUPED = "ours", "window", "grouped"
"""Our method in its usual mode, in the other mode, and the name of the usual mode."""
LINKED = ("k0", "jointdnn")
"""Baselines that use the link."""
ALONE = "edge-only"
SECTION_SECONDS = 120.0
MOVING_SECONDS = 5.0
"""The span of each of the means by which a trace's movement is judged."""
LOOKED_AT_SECONDS = 30.0
"""The length of trace whose means are compared: a run begins where they differ most."""
LEAST_BATCHES = 3
MBIT = 1e6 / 8
EDGE_KIND = "jetson-tx2"
"""The catalogue's device whose watts the edge is assumed to draw."""


@dataclass(frozen=True)
class TraceExtent:
    """The amount of measuring."""

    traces: Mapping[str, str]
    run_seconds: float
    """Seconds that each method runs on a trace."""
    most_batches: int
    rates: Sequence[float]
    rate_seconds: float
    """Seconds that each method runs at each of the fixed rates."""
    alone_batches: int
    long_seconds: float
    """Seconds of the run for Fig. 18."""


# ---- Where a trace moves most


def section(trace: LinkTrace, seconds: float = SECTION_SECONDS) -> tuple[LinkTrace, float]:
    """Return the part of a trace that begins where it moves most, and the second at which it begins."""
    length = max(trace.up.length_seconds, trace.down.length_seconds)
    latest = max(0.0, length - LOOKED_AT_SECONDS)  # not where it begins again
    starts = [MOVING_SECONDS * place for place in range(math.floor(latest / MOVING_SECONDS) + 1)]
    begin = max(starts, key=lambda start: movement(trace, start))
    up, down = (part(way, begin, min(seconds, length)) for way in (trace.up, trace.down))
    return LinkTrace(up, down, trace.is_one_way, trace.name), begin


def movement(trace: LinkTrace, begin: float) -> float:
    """Return how much means over a few seconds differ from `begin` on: their deviations, both directions together."""
    places = [begin + MOVING_SECONDS * place for place in range(round(LOOKED_AT_SECONDS / MOVING_SECONDS))]
    return sum(
        statistics.pstdev(way.integral(place, place + MOVING_SECONDS) / MOVING_SECONDS for place in places)
        for way in (trace.up, trace.down)
    )


def part(way: Trace, begin: float, seconds: float) -> Trace:
    """Return one direction of a trace from a moment on."""
    moments, rates, now = [], [], 0.0
    while now < seconds:
        rate, holds = way.at(begin + now)
        moments.append(now)
        rates.append(rate)
        now += holds
    return Trace(tuple(moments), tuple(rates))


def read_traces(folder: Path, names: Mapping[str, str]) -> dict[str, LinkTrace]:
    return {
        name: read_link_trace(",".join(str(folder / file) for file in path.split(","))) for name, path in names.items()
    }


# ---- Runs


@dataclass
class Contest:
    """The runs of all methods on one trace, over the same stretch of it."""

    name: str
    trace: LinkTrace
    begin: float
    timed: dict[str, TimedSplit] = field(default_factory=dict)
    alone: float = 0.0
    """Seconds of 100 batches at the edge alone."""

    @property
    def window(self) -> tuple[float, float]:
        """The beginning and end of the time, in seconds of the trace, in which all of them ran."""
        every = self.timed.values()
        return max(timed.rounds[0].begin for timed in every), min(timed.rounds[-1].end for timed in every)

    def seconds(self, method: str) -> float:
        """Return the seconds of 100 batches."""
        return self.alone if method == ALONE else self.timed[method].seconds_within(*self.window)

    @property
    def best_baseline(self) -> str:
        return min((ALONE, *(method for method in LINKED if method in self.timed)), key=self.seconds)

    def gain(self, method: str = OURS) -> float:
        return self.seconds(self.best_baseline) / self.seconds(method)

    @property
    def text(self) -> str:
        up, down = (way.mean / MBIT for way in (self.trace.up, self.trace.down))
        rate = f"{up:.3g} Mbit/s both ways" if self.trace.is_one_way else f"{up:.3g} up, {down:.3g} Mbit/s down"
        way = ", one direction recorded, which serves both" if self.trace.is_one_way else ""
        methods = "; ".join(
            f"{name} {_deployed(timed)}, {timed.steps} batches in {timed.seconds:.1f} s"
            for name, timed in self.timed.items()
        )
        file = Path(self.trace.name.split(",")[0]).name
        return f"{self.name}: {file} from {self.begin:g} s on, mean {rate}{way}; {methods}"


def _deployed(timed: TimedSplit) -> str:
    return " -> ".join(
        f"cut {deployment.cut} K={deployment.k} {deployment.bits} bits"
        if deployment.cut != timed.profile.edge_only
        else "edge only"
        for _, deployment in timed.deployments()
    )


def _way(method: str) -> tuple[str, str]:
    """Return the baseline, empty for ours, and the mode of a method."""
    return ("", MODE) if method == OURS else ("", BESIDE) if method == BESIDE else (method, MODE)


def batches_in(profile: SplitProfile, method: str, trace: LinkTrace, seconds: float, most: int) -> int:
    """Return how many batches should be completed in the first seconds of a trace with the first deployment; at least
    two groups for a method that runs ahead, so that filling and draining count for what they are."""
    baseline, mode = _way(method)
    mean = LinkRates(trace.up.mean, trace.down.mean)
    chooser = BASELINES[baseline] if baseline else choose
    first = chooser(profile, mean, FIRST_TAU, None, K, drains=mode == GROUPED)
    fit, now = 0.0, 0.0
    while now < seconds:
        rates = mean_rates(trace, now, now + 1)
        fit += FIRST_TAU / seconds_of(profile, rates, FIRST_TAU, first, drains=mode == GROUPED) * min(1, seconds - now)
        now += 1
    group, least = (1, LEAST_BATCHES) if baseline else (K + 1, 2)
    return max(least, round(min(fit, most) / group)) * group


def run_contest(
    site: SplitSite, contest: Contest, order: Sequence[str], extent: TraceExtent, profile: SplitProfile, say: Progress
) -> Contest:  # fmt: skip
    """Run the methods one after another in the given order, and return the contest with their times."""
    for method in order:
        baseline, mode = _way(method)
        batches = batches_in(profile, method, contest.trace, extent.run_seconds, extent.most_batches)
        say(f"{contest.name}: {method}, {batches} batches")
        contest.timed[method] = site.run(batches, trace=contest.trace, rival=baseline, mode=mode)
    return contest


def run_alone(site: SplitSite, batches: int, say: Progress) -> TimedSplit:
    say(f"{ALONE}, {batches} batches")
    return site.run(batches, trace=LinkTrace.constant(MBIT, MBIT), rival=ALONE)


def bench_traces(site: SplitSite, folder: Path, extent: TraceExtent, out: Path | None, say: Progress) -> Figures:
    """Run all methods on every trace, and return the figures that follow from these runs."""
    alone = run_alone(site, extent.alone_batches, say)
    contests = []
    methods = [OURS, "k0", "jointdnn", BESIDE]
    for place, (name, whole) in enumerate(read_traces(folder, extent.traces).items()):
        trace, begin = section(whole)
        turn = place % len(methods)
        order = methods[turn:] + methods[:turn]
        contest = Contest(name, trace, begin, alone=alone.seconds_of_100)
        contests.append(run_contest(site, contest, order, extent, alone.profile, say))
    figures = trace_figures(contests, alone, site.setting)
    if out is not None:
        figures |= bench_course(site, folder, extent, alone.profile, out, say)
    figures |= bench_rates(site, alone, extent, out, say)
    return figures


def trace_figures(contests: Sequence[Contest], alone: TimedSplit, setting: SplitSetting) -> Figures:
    gains = [contest.gain() for contest in contests]
    figures: Figures = {
        "worst_vs_best_rival": min(gains),
        "gain_geomean": statistics.geometric_mean(gains),
        f"gain_geomean_{BESIDE}": statistics.geometric_mean(contest.gain(BESIDE) for contest in contests),
        f"worst_vs_best_rival_{BESIDE}": min(contest.gain(BESIDE) for contest in contests),
        "sim_error": sim_error(contests, OURS),
        f"sim_error_{BESIDE}": sim_error(contests, BESIDE),
        "sim_error_k0": sim_error(contests, "k0"),
        "edge_only_seconds": alone.seconds_of_100,
        "redeployments": sum(len(contest.timed[OURS].result.changes) for contest in contests),
        **_resources(contests, alone),
    }
    for contest in contests:
        for method in (OURS, BESIDE, *LINKED):
            figures[f"{contest.name}_seconds_{method}"] = contest.seconds(method)
        figures[f"{contest.name}_vs_best_rival"] = contest.gain()
        figures[f"{contest.name}_sim_error"] = sim_error([contest], OURS)
    figures["traces_setting"] = (
        f"{setting}; ours: {MODE}, K={K}; {BESIDE} beside it; baselines: {', '.join((ALONE, *LINKED))} on the same "
        f"engine and, but for jointdnn, the same codec; seconds of 100 batches, scaled up from what each did in the "
        f"same time of the trace; {ALONE} does not use the link and was run once, {alone.steps} batches; links "
        "shaped in the processes, edge and server with 1 thread each"
    )
    figures["traces_each"] = "\n  ".join(
        f"{contest.text}; best baseline {contest.best_baseline}, gain {contest.gain():.2f}" for contest in contests
    )
    return figures


def sim_error(contests: Sequence[Contest], method: str) -> float:
    """Return the median error over stretches without a change: predicted at the rates in force, against measured."""
    pairs = [pair for contest in contests for pair in contest.timed[method].predictions(contest.trace)]
    return statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs)


# ---- Memory and energy, modelled


def _resources(contests: Sequence[Contest], alone: TimedSplit) -> Figures:
    memory: dict[str, list[float]] = {ALONE: [], "jointdnn": []}
    energy: dict[str, list[float]] = {ALONE: [], "jointdnn": []}
    for contest in contests:
        ours, joint = contest.timed[OURS], contest.timed["jointdnn"]
        peak = _most_memory(ours)
        memory[ALONE].append(peak / _most_memory(alone))
        memory["jointdnn"].append(peak / _most_memory(joint))
        spent = joules(ours, contest.trace)
        energy[ALONE].append(spent / joules(alone, contest.trace))
        energy["jointdnn"].append(spent / joules(joint, contest.trace))
    mean = statistics.geometric_mean
    return {
        "edge_memory_ratio": mean(memory[ALONE]),
        "edge_memory_ratio_jointdnn": mean(memory["jointdnn"]),
        "edge_energy_ratio": mean(energy[ALONE]),
        "edge_energy_ratio_jointdnn": mean(energy["jointdnn"]),
        "edge_setting": f"modelled; memory: as schedule/memory counts it, at its most; energy: idle, computing and "
        f"transfer watts of {EDGE_KIND}, over measured seconds and modelled parts of them; geometric means over traces",
    }


def _most_memory(timed: TimedSplit) -> float:
    return max(memory_of(timed.profile, deployment) for _, deployment in timed.deployments())


def joules(timed: TimedSplit, trace: LinkTrace) -> float:
    """Return the joules of a batch at the edge: idle power throughout, more while it computes and moves bytes."""
    kind = CATALOGUE[EDGE_KIND]
    total = 0.0
    for deployment, rounds in timed.stretches():
        for round in rounds:
            seconds = round.end - round.begin
            busy, moving = _busy(timed, deployment, mean_rates(trace, round.begin, round.end))
            total += kind.watts_idle * seconds + kind.watts_transfer * min(moving * round.steps, 2 * seconds)
            total += (kind.watts_active - kind.watts_idle) * min(busy * round.steps, seconds)
    return total / timed.steps


def _busy(timed: TimedSplit, deployment: Deployment, rates: LinkRates) -> tuple[float, float]:
    """Return the seconds of a batch for which the edge computes, and for which its link is busy."""
    profile = timed.profile
    if deployment.cut == profile.edge_only:
        return math.inf, 0.0
    times = modules(profile, rates, [deployment.k], [deployment.bits], drains=timed.mode == GROUPED)
    place = profile.index(deployment.cut)
    return float(times.t1[0, place, 0]), float(times.t2[0, place, 0] + times.t4[0, place, 0])


# ---- Fig. 18, Fig. 16, bytes


def bench_course(
    site: SplitSite, folder: Path, extent: TraceExtent, profile: SplitProfile, out: Path, say: Progress
) -> Figures:  # fmt: skip
    """Run for longer and draw Fig. 18: the link and the cuts."""
    whole = read_traces(folder, {"long": LONG_TRACE})["long"]
    up, down = (part(way, LONG_BEGIN, SECTION_SECONDS) for way in (whole.up, whole.down))
    trace = LinkTrace(up, down, whole.is_one_way, whole.name)
    batches = batches_in(profile, OURS, trace, extent.long_seconds, extent.most_batches)
    say(f"rate and cut over time, {batches} batches")
    timed = site.run(batches, trace=trace)
    end = timed.rounds[-1].end
    rates = [set_rate for set_rate in timed.result.set_rates if set_rate[0] <= end]
    course = Course(
        up=[(seconds, rate / MBIT) for seconds, rate, _ in rates],
        down=[(seconds, rate / MBIT) for seconds, _, rate in rates],
        cuts=timed.moments(),
        speeds=[
            (round.begin, round.steps * site.setting.batch_size / (round.end - round.begin)) for round in timed.rounds
        ],
        end=end,
        layers=len(site.graph.network.layers),
    )
    name = Path(LONG_TRACE.split(",")[0]).stem.removesuffix("_up")
    title = f"Fig. 18: {site.setting}; {name} from {LONG_BEGIN:g} s on, {MODE}, K={K}"
    draw_course(course, out / "fig_18.png", title)
    return {
        "fig_18_redeployments": len(timed.result.changes),
        "fig_18_each": "; ".join(
            f"step {change.step}: cut {change.before.cut} -> {change.after.cut}, {change.seconds:.2f} s, "
            f"{change.bytes_moved} bytes"
            for change in timed.result.changes
        )
        or "no change",
    }


def bench_rates(site: SplitSite, alone: TimedSplit, extent: TraceExtent, out: Path | None, say: Progress) -> Figures:
    """Measure samples per second at fixed rates, and draw Fig. 16."""
    figures: Figures = {}
    size = site.setting.batch_size
    lines: dict[str, list[tuple[float, float]]] = {method: [] for method in (OURS, "k0", "jointdnn", ALONE)}
    for place, rate in enumerate(extent.rates):
        trace = LinkTrace.constant(rate * MBIT, rate * MBIT)
        order = [OURS, *LINKED] if place % 2 == 0 else [*LINKED, OURS]
        for method in order:
            batches = batches_in(alone.profile, method, trace, extent.rate_seconds, extent.most_batches)
            say(f"{rate:g} Mbit/s: {method}, {batches} batches")
            speed = size * batches / site.run(batches, trace=trace, rival=_way(method)[0]).seconds
            lines[method].append((rate, speed))
            figures[f"samples_per_second_{method}_{rate:g}".replace(".", "_")] = speed
        lines[ALONE].append((rate, 100 * size / alone.seconds_of_100))
        best = max(lines[method][-1][1] for method in (*LINKED, ALONE))
        figures[f"rate_{rate:g}_vs_best_rival".replace(".", "_")] = lines[OURS][-1][1] / best
    if out is not None:
        title = f"Fig. 16: {site.setting}; ours: {MODE}, K={K}"
        draw_lines(
            lines, out / "fig_16.png", across="Mbit/s, both ways", up="samples/s", title=title, is_logarithmic=True
        )  # fmt: skip
    return figures


def bench_bytes(site: SplitSite, say: Progress) -> Figures:
    """Return the bytes of features on the wire at 8 bits over those at 32."""
    cut = site.graph.network.layers[1].name
    sizes = {}
    for bits in (8, 32):
        say(f"bytes at {bits} bits")
        sizes[bits] = site.run(4, cut=cut, bits=bits, k=0).result.bytes_up
    return {"bytes_ratio_8bit": sizes[8] / sizes[32]}


def skipped(folder: Path) -> str:
    """Return the reason that traces cannot be played; empty: they can."""
    if not folder.is_dir():
        return f"there is no folder {folder}; name one with --traces"
    try:
        read_traces(folder, TRACES)
    except ManyhandsError as error:
        return error.message
    return ""
