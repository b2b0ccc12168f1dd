"""What `manyhands bench pipeline` measures: our pipelines against PyTorch's own, over local workers and in the lab.

Every ratio is taken inside one run: all sides stay alive on the same cores (in the lab: on the same devices) and take
turns, block by block, and the median of the blocks' ratios counts. Our side runs what our planner chose from a profile
measured in that run. PyTorch's sides run what the best of several hand-chosen settings was in trials before the blocks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import torch

from manyhands.data.preload import Preload
from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadValue, LabError
from manyhands.facts.link import Link
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BUCKET_BYTES, BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.graph.graph import Graph
from manyhands.job.evaluation import captured
from manyhands.lab.lab import Lab
from manyhands.lab.removal import missing
from manyhands.models.registry import ZOO, build, loss_function
from manyhands.plans import planning as public
from manyhands.profiler.kernels import Choice, choose_kernels
from manyhands.profiler.this_machine import this_machine
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.run import Run
from manyhands.schedule.orders import passes
from manyhands.session.lab_session import play_here
from manyhands.session.measuring import measure
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands.simulator.simulate import simulate
from manyhands.training.tuning import Trials, fastest_in_trial, same_batches
from manyhands_bench.core.bench import SameBatch
from manyhands_bench.pipeline.torch_pipeline import LEARNING_RATE, MOMENTUM, BareRound, Setting, TorchGroup, Way
from manyhands_bench.tile.setup import kernels_text

Figures = dict[str, float | int | str]
Progress = Callable[[str], None]

SETTING = Setting("mobilenetv2", (3, 96, 96), 16, 8)
QUICK = Setting("mobilenetv2", (3, 64, 64), 8, 4)
OPTIMIZER = Optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM)
WARM_UP_STEPS = 2
"""Steps at the start of every block that do not count."""
TRIAL_STEPS = 3
TUNED_PLANS = 6
"""Of our planner's best, so many are tried: PyTorch's settings are tried too."""
WORTH_TIMING = 1.5
"""A rival that took so many times as long as the best in trials is timed with fewer steps."""
LAB_SHARES = (0.6, 0.4, 0.25)
LAB_BYTES_PER_SECOND = 12.5e6
LAB_DELAY_SECONDS = 0.002
LAB_MEMORY_BYTES = 3 * 10**9
"""Enough for our worker and PyTorch's side by side: neither is to run out of it."""
_LADDER = (1, 2, 4, 8)


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    setting: Setting
    blocks: int
    steps: int
    measures: int
    """How often the profile is taken anew for a prediction: a machine's speed drifts."""
    measure_seconds: float
    splits: int
    """Hand-chosen splits that PyTorch's pipeline is tried with."""
    kernel_samples: int = 1
    """For so many samples our kernels are chosen, within these seconds; PyTorch's ways try channels_last."""
    kernel_seconds: float = 0.0


LOCAL = Extent(SETTING, 9, 6, measures=3, measure_seconds=6.0, splits=5, kernel_samples=8, kernel_seconds=12.0)
LAB = Extent(SETTING, 6, 4, measures=3, measure_seconds=15.0, splits=3, kernel_samples=4, kernel_seconds=12.0)
QUICK_EXTENT = Extent(QUICK, 1, 3, measures=1, measure_seconds=3.0, splits=2)


@dataclass
class Ours:
    """Our side: workers at hand, the captured network, a batch."""

    session: Session
    setting: Setting
    data: SameBatch = field(init=False)
    graph: Graph = field(init=False)
    choice: Choice = field(default_factory=Choice)

    laying: Preload = field(init=False)
    """PyTorch's processes have the batch at hand, so do our workers."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.data = SameBatch(self.setting.model, self.setting.shape, self.setting.samples)
        self.laying = Preload.of(self.data)
        module, loss = build(self.setting.model), loss_function(ZOO[self.setting.model].loss)
        self.graph = captured(module, self.data, loss, granularity="blocks", name=self.setting.model)

    def choose_kernels(self, samples: int, seconds: float) -> None:
        """The fastest for so many samples with one thread, by whole steps on one core."""
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
        os.sched_setaffinity(0, {min(before)})
        try:
            self.choice = choose_kernels(self.graph, samples, threads=1, seconds=seconds)
        finally:
            os.sched_setaffinity(0, before)
            torch.set_num_threads(threads)

    def measure(self, seconds: float) -> tuple[Cluster, Profile]:
        """As things are now."""
        ladder = tuple(size for size in _LADDER if size <= self.setting.samples)
        return measure(
            self.session, self.graph, self.setting.samples, optimizer=OPTIMIZER, seconds=seconds, refresh=True,
            ladder=ladder, kernels=self.choice.kernels,
        )  # fmt: skip

    def plans(self, cluster: Cluster, profile: Profile, micro_batches: int | None = None) -> list[Plan]:
        """As our planner ranks them; each device normalises over its own samples, as PyTorch's ways do."""
        found = public.plan(
            self.graph.network, cluster, batch_size=self.setting.samples, strategy="pipeline",
            micro_batches=micro_batches, batch_norm="local", optimizer_slots=1, profile=profile,
        )  # fmt: skip
        return [found.plan, *found.runners_up]

    def tuned(self, plans: Sequence[Plan]) -> Trials:
        """The fastest of some in a trial first, as `train(tune=...)` does."""
        return fastest_in_trial(
            self.session.coordinator, self.graph, plans, OPTIMIZER,
            dict.fromkeys(self.session.cluster.names, self.choice.kernels),
            self.laying, is_laid=True,
        )  # fmt: skip

    def two_stages(self, cut: int) -> Plan:
        """By hand, one device each."""
        first, second = self.session.cluster.names[:2]
        stages = Stage((0, cut), (first,)), Stage((cut, len(self.graph.network.layers)), (second,))
        plan = Plan(
            self.graph.name, self.setting.samples, stages, micro_batches=self.setting.micro_batches, batch_norm="local"
        )
        return resolve(plan, self.graph.network)

    def predicted(self, plan: Plan, cluster: Cluster, profile: Profile) -> float:
        return simulate(plan, self.graph.network, cluster, profile, keep_spans=False).seconds

    def seconds(self, plan: Plan, steps: int) -> float:
        """Of a round, as the coordinator sees it end."""
        order = Order(
            graph=self.graph, plan=plan, start=RunState(dict(self.graph.state)), last_step=steps + WARM_UP_STEPS,
            optimizer=OPTIMIZER, kernels=dict.fromkeys(plan.devices, self.choice.kernels), preload=self.laying,
        )  # fmt: skip
        run = Run(self.session.coordinator, order)
        run.prepare()
        return steady(run.run(same_batches(self.laying, steps + WARM_UP_STEPS, is_laid=True)).step_seconds)


def steady(seconds: Sequence[float]) -> float:
    """The usual step, without those that warm up."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def plan_text(plan: Plan) -> str:
    """Stages, devices, shares, micro-batches and order, in one line."""
    stages = []
    for stage in plan.stages:
        names = "+".join(stage.devices)
        shares = f" ({'+'.join(map(str, stage.share.samples))})" if isinstance(stage.share, BySamples) else ""
        stages.append(f"[{stage.layers[0]}, {stage.layers[1]}) on {names}{shares}")
    buckets = f", buckets of {plan.bucket_bytes / 1e6:.3g} MB" if plan.bucket_bytes != BUCKET_BYTES else ""
    return f"{' | '.join(stages)}; {plan.micro_batches} micro-batches, {plan.order}{buckets}"


# PyTorch's hand-chosen settings


def splits(
    units: Sequence[tuple[float, int]], speeds: Sequence[float], bytes_per_second: float, count: int
) -> list[tuple[int, ...]]:
    """The bounds of the most even pipelines over devices of these speeds, by their slowest stage or link."""

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(units))
        stages = [
            sum(seconds for seconds, _ in units[first:last]) / speed
            for (first, last), speed in zip(pairwise(bounds), speeds, strict=True)
        ]
        return max([*stages, *(units[cut - 1][1] / bytes_per_second for cut in cuts)])

    every = combinations(range(1, len(units)), len(speeds) - 1)
    return [(0, *cuts, len(units)) for cuts in sorted(every, key=slowest)[:count]]


def shared_out(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Samples in proportion to speeds, at least one each."""
    shares = [max(1, int(samples * speed / sum(speeds))) for speed in speeds]
    while sum(shares) < samples:  # whoever is furthest below its due
        most = max(range(len(speeds)), key=lambda one: speeds[one] / sum(speeds) * samples - shares[one])
        shares[most] += 1
    while sum(shares) > samples:
        shares[shares.index(max(shares))] -= 1
    return tuple(shares)


@dataclass
class Tuned:
    """PyTorch's ways, the best setting of each kind, and every trial."""

    best: dict[str, Way]
    trials: dict[Way, float]

    def text(self, kind: str) -> str:
        tried = [f"{way} {seconds:.3g} s" for way, seconds in self.trials.items() if way.kind == kind]
        return f"{self.best[kind]}; best of {len(tried)} tried: {'; '.join(tried)}"


def tuned(
    group: TorchGroup, setting: Setting, speeds: Sequence[float], bytes_per_second: float, count: int,
    ours: Plan, names: Sequence[str], say: Progress,
) -> Tuned:  # fmt: skip
    """Try what a careful person would: splits by capacity and an even one, fewer devices, shares by capacity; and our
    plan's own cuts, where a device each has them."""
    everyone = tuple(range(len(speeds)))
    trials: dict[Way, float] = {}

    def attempt(ways: Iterable[Way]) -> None:
        for way in ways:
            if way not in trials:
                say(f"trying {way}")
                trials[way] = min(group.run(way, TRIAL_STEPS)[1:])

    def best(kind: str, most: int = 1) -> list[Way]:
        return sorted((way for way in trials if way.kind == kind), key=lambda way: trials[way])[:most]

    usual = setting.micro_batches
    units = group.units(setting.samples // usual)
    even = splits(units, [1.0] * len(speeds), bytes_per_second, 1)
    bounds = [*splits(units, speeds, bytes_per_second, count), *even]
    attempt(Way("1f1b", everyone, one, usual) for one in bounds)
    if len(speeds) > 2:
        fewer = splits(units, speeds[:2], bytes_per_second, max(1, count // 2))
        attempt(Way("1f1b", everyone[:2], one, usual) for one in fewer)
    if len(ours.stages) > 1 and all(len(stage.devices) == 1 for stage in ours.stages):
        ranks = tuple(names.index(stage.devices[0]) for stage in ours.stages)
        if ranks == tuple(sorted(ranks)):
            attempt([Way("1f1b", ranks, (0, *(int(stage.layers[1]) for stage in ours.stages)), usual)])
    attempt(
        replace(leading, micro_batches=number)
        for leading in best("1f1b", 3)
        for number in {ours.micro_batches, usual // 2}
        if number >= len(leading.ranks) and setting.samples % number == 0
    )
    attempt(replace(way, kind="gpipe") for way in best("1f1b", 3))
    samples = setting.samples
    shares = {shared_out(samples, [1.0] * len(speeds)), shared_out(samples, speeds)}
    attempt(Way("ddp", everyone, shares=one) for one in sorted(shares))
    attempt([replace(best(kind)[0], channels_last=True) for kind in ("1f1b", "gpipe", "ddp")])
    return Tuned({kind: best(kind)[0] for kind in ("1f1b", "gpipe", "ddp")}, trials)


# Against PyTorch


@dataclass
class Compared:
    """Blocks of one comparison: seconds of a step, by side."""

    plan: Plan
    trials: Trials
    """Of ours: the plan is the first of them."""
    pipeline: Plan
    """Ours with two stages or more and the setting's micro-batches: what is like PyTorch's pipelines."""
    tuned: Tuned
    choice: Choice
    ours: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    predictions: dict[int, float] = field(default_factory=dict)
    """Block before which the profile was taken -> seconds of a step that it predicts."""

    @property
    def prediction_error(self) -> float:
        """How far predictions are off, each from the blocks up to the next: a machine's speed drifts."""
        ends = [*list(self.predictions)[1:], len(self.ours)]
        measured = [statistics.median(self.ours[first:end]) for first, end in zip(self.predictions, ends, strict=True)]
        pairs = zip(self.predictions.values(), measured, strict=True)
        return statistics.median(abs(predicted - taken) / taken for predicted, taken in pairs)

    def best_of(self, kinds: Iterable[str]) -> str:
        return min(kinds, key=lambda kind: statistics.median(self.theirs[kind]))

    def figures(self, place: str, setting: str) -> Figures:
        ours, predicted = statistics.median(self.ours), statistics.median(self.predictions.values())
        best, best_pipeline = self.best_of(self.theirs), self.best_of(("1f1b", "gpipe"))
        found: Figures = {
            f"measured_vs_best_torch_{place}": _ratio(self.theirs[best], self.ours),
            f"ours_{place}_seconds": ours,
            **{f"torch_{kind}_{place}_seconds": statistics.median(one) for kind, one in self.theirs.items()},
            f"best_torch_{place}": best,
            f"pipeline_sim_error_{place}": self.prediction_error,
            f"predicted_{place}_seconds": predicted,
            f"pipelined_{place}_seconds": statistics.median(self.pipelined),
            f"pipelined_vs_torch_pipelines_{place}": _ratio(self.theirs[best_pipeline], self.pipelined),
            f"setting_{place}": setting,
            f"ours_{place}_setting": f"the fastest of our planner's {TUNED_PLANS} best, and of those nearest to it, in "
            f"a trial: {plan_text(self.plan)}; kernels {kernels_text(self.choice)}; tried: "
            + "; ".join(f"{plan_text(plan)} {seconds:.3g} s" for plan, seconds in self.trials),
            f"pipelined_{place}_setting": plan_text(self.pipeline),
            **{f"torch_{kind}_{place}_setting": self.tuned.text(kind) for kind in self.theirs},
        }
        predictions = list(self.predictions.values())
        rows = {"ours": self.ours, "pipelined": self.pipelined, "predicted": predictions, **self.theirs}
        found[f"blocks_{place}"] = "; ".join(f"{name} {_listed(row)} s" for name, row in rows.items())
        return found


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast ours is."""
    return statistics.median(their / own for their, own in zip(theirs, ours, strict=True))


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def compare(
    ours: Ours, group: TorchGroup, extent: Extent, speeds: Sequence[float], bytes_per_second: float, say: Progress
) -> Compared:
    """Plan, tune, and take turns."""
    if extent.kernel_seconds:
        say("choosing kernels")
        ours.choose_kernels(extent.kernel_samples, extent.kernel_seconds)
    say(f"measuring {ours.setting.model} on all devices")
    cluster, profile = ours.measure(extent.measure_seconds)
    say("trying our planner's best")
    trials = ours.tuned(ours.plans(cluster, profile)[:TUNED_PLANS])
    plan = trials[0][0]
    pipeline = _pipelined(ours, cluster, profile, plan)
    say(f"ours: {plan_text(plan)}")
    found = tuned(group, ours.setting, speeds, bytes_per_second, extent.splits, plan, cluster.names, say)
    compared = Compared(plan, trials, pipeline, found, ours.choice, theirs={kind: [] for kind in found.best})
    every = max(1, extent.blocks // extent.measures)
    for block in range(extent.blocks):
        say(f"block {block + 1} of {extent.blocks}")
        if block % every == 0:
            compared.predictions[block] = ours.predicted(plan, *ours.measure(extent.measure_seconds))
        compared.ours.append(ours.seconds(plan, extent.steps))
        compared.pipelined.append(ours.seconds(pipeline, extent.steps) if pipeline != plan else compared.ours[-1])
        for kind, way in found.best.items():
            steps = extent.steps if found.trials[way] <= WORTH_TIMING * min(found.trials.values()) else 2
            compared.theirs[kind].append(steady(group.run(way, steps + WARM_UP_STEPS)))
    return compared


def _pipelined(ours: Ours, cluster: Cluster, profile: Profile, plan: Plan) -> Plan:
    """Our planner's best with the setting's micro-batches; where that is one stage, the best cut into two."""
    count = ours.setting.micro_batches
    found = plan if plan.micro_batches == count else ours.plans(cluster, profile, count)[0]
    if len(found.stages) > 1:
        return found
    cuts = range(1, len(ours.graph.network.layers))
    return min(map(ours.two_stages, cuts), key=lambda one: ours.predicted(one, cluster, profile))


def usable() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def _two_cores(setting: Setting) -> Iterator[tuple[Ours, TorchGroup]]:
    """Two workers of ours and two processes of PyTorch, one of each on each of two cores."""
    cores = [*usable(), *usable()][:2]
    with (
        open_session(Cluster.local(2), threads=1, pin=cores) as session,
        TorchGroup(setting, [(), ()], cores=cores) as group,
    ):
        yield Ours(session, setting), group


def bench_local(say: Progress, quick: bool) -> Figures:
    """Two workers of one thread on a core each."""
    extent = QUICK_EXTENT if quick else LOCAL
    with _two_cores(extent.setting) as (ours, group):
        compared = compare(ours, group, extent, (1.0, 1.0), float("inf"), lambda text: say(f"local: {text}"))
    where = f"{extent.setting}, two processes of one thread, each on a core of its own, SGD with momentum"
    return compared.figures("local", where)


# In the lab


def lab_cluster(name: str) -> LabCluster:
    """Three devices, whose speeds are parts of one of this machine's cores."""
    core = this_machine(threads=1).gflops
    devices = tuple(
        Device(
            name=f"d{number}", gflops=core * share, memory_bytes=LAB_MEMORY_BYTES,
            up_bytes_per_second=LAB_BYTES_PER_SECOND, down_bytes_per_second=LAB_BYTES_PER_SECOND,
        )
        for number, share in enumerate(LAB_SHARES, 1)
    )  # fmt: skip
    return LabCluster(Cluster(name, devices, Link(LAB_BYTES_PER_SECOND, LAB_DELAY_SECONDS)), scale=1.0)


def _lab_text() -> str:
    shares = "/".join(f"{share:.0%}" for share in LAB_SHARES)
    rate, delay = LAB_BYTES_PER_SECOND * 8 / 1e6, LAB_DELAY_SECONDS * 1e3
    return f"{len(LAB_SHARES)} devices with {shares} of a core, {rate:g} Mbit/s, {delay:g} ms one way"


@contextlib.contextmanager
def _in_lab(asked: LabCluster, setting: Setting) -> Iterator[tuple[Ours, TorchGroup]]:
    """A worker of ours and a process of PyTorch on every device: within its share, in its network."""
    with open_session(asked) as session:
        lab = Lab.find(asked.cluster.name)
        names = asked.cluster.names
        for name in names:  # importing torch is not to take minutes
            lab.groups.set_cpu(lab.name, name, None)
        places = [lab.words(name) for name in names]
        with TorchGroup(setting, places, host=lab.address(names[0]), interface="eth0") as group:
            ours = Ours(session, setting)
            lab.settle()
            yield ours, group


def bench_lab(say: Progress, quick: bool) -> Figures:
    """Three unequal devices behind slow links; where there can be no lab, why."""
    extent = QUICK_EXTENT if quick else LAB
    if why := missing():
        return {"lab_skipped": why}
    asked = lab_cluster(f"pipeline{os.getpid()}")
    try:
        play_here(asked)
    except LabError as error:
        return {"lab_skipped": error.message}
    with _in_lab(asked, extent.setting) as (ours, group):
        compared = compare(ours, group, extent, LAB_SHARES, LAB_BYTES_PER_SECOND, lambda text: say(f"lab: {text}"))
    return compared.figures("lab", f"{extent.setting}, {_lab_text()}, SGD with momentum")


def summary(figures: Figures) -> Figures:
    """The worse of what was found over local workers and in the lab."""

    def numbers(stem: str) -> list[float]:
        found = [figures.get(f"{stem}_{place}") for place in ("local", "lab")]
        return [number for number in found if isinstance(number, (int, float))]

    result: Figures = {}
    if ratios := numbers("measured_vs_best_torch"):
        result["measured_vs_best_torch"] = min(ratios)
    if errors := numbers("pipeline_sim_error"):
        result["sim_error"] = max(errors)
    return result


# What the executor adds to computing


def critical_path(plan: Plan, stages: Sequence[BareRound]) -> float:
    """Seconds of a round in the plan's order, whose stages take these, if nothing had to be sent."""
    orders = [list(passes(plan, stage)) for stage in range(len(stages))]
    ended: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * len(stages)
    while any(orders):
        before = len(ended)
        for stage, order in enumerate(orders):
            while order:
                what, micro_batch = order[0]
                giver = stage - 1 if what == "forward" else stage + 1
                given = ended.get((giver, what, micro_batch)) if 0 <= giver < len(stages) else 0.0
                if given is None:
                    break
                begin = max(clocks[stage], given)
                seconds = stages[stage].forward if what == "forward" else stages[stage].backward
                clocks[stage] = ended[stage, what, micro_batch] = begin + seconds[micro_batch]
                order.pop(0)
        assert len(ended) > before, "an order in which every stage waits"
    return max(clock + stage.step for clock, stage in zip(clocks, stages, strict=True))


def executor_overhead(say: Progress, quick: bool) -> Figures:
    """A round of two stages on two cores over the critical path of their bare computing, as found in the same run.

    Both are the usual of several rounds, each with whatever held it up.
    """
    setting, blocks, steps, seconds = (QUICK, 1, 3, 0.3) if quick else (SETTING, 11, 5, 1.2)
    micro_batch = setting.samples // setting.micro_batches
    with _two_cores(setting) as (ours, group):
        units = group.units(micro_batch)
        if len(units) != len(ours.graph.network.layers):
            raise BadValue(f"{setting}: PyTorch's units are not our layers, so their stages cannot be compared.")
        bounds = splits(units, (1.0, 1.0), float("inf"), 1)[0]
        plan = ours.two_stages(bounds[1])
        rounds, paths = [], []
        bare: list[list[BareRound]] = [[] for _ in plan.stages]
        for block in range(blocks):
            say(f"executor overhead, block {block + 1} of {blocks}")
            rounds.append(ours.seconds(plan, steps))
            found = group.bare(bounds, micro_batch, seconds)
            paths.append(statistics.median(critical_path(plan, both) for both in zip(*found)))
            for own, new in zip(bare, found, strict=True):
                own += new
    stages = "; ".join(
        f"stage {number}: forward {_usual(one for own in stage for one in own.forward)}, backward "
        f"{_usual(one for own in stage for one in own.backward)} a micro-batch, optimiser "
        f"{_usual(own.step for own in stage)}"
        for number, stage in enumerate(bare)
    )
    return {
        "executor_overhead": statistics.median(own / path for own, path in zip(rounds, paths, strict=True)),
        "executor_round_seconds": statistics.median(rounds),
        "executor_bare_seconds": statistics.median(paths),
        "executor_setting": f"{setting}, {plan_text(plan)}, a core each; {stages}; rounds {_listed(rounds)} s, bare "
        f"{_listed(paths)} s",
    }


def _usual(seconds: Iterable[float]) -> str:
    """The median, in words."""
    return f"{1e3 * statistics.median(seconds):.3g} ms"
