"""The timed part of `manyhands bench pipeline`: our pipelines against PyTorch's own, on local workers and in the lab.

Every ratio is taken inside one run: all sides stay alive on the same cores (in the lab: on the same devices) and take
turns, block by block, and the median of the blocks' ratios counts. Our side runs what our planner chose from a profile
measured in that run. PyTorch's sides run the best of several hand-chosen settings, by trials before the blocks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError
from manyhands.facts.link import Link
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile
from manyhands.lab.lab import Lab
from manyhands.lab.removal import missing
from manyhands.profiler.kernels import Choice
from manyhands.profiler.this_machine import this_machine
from manyhands.session.lab_session import play_here
from manyhands.session.opening import open_session
from manyhands.training.tuning import Trials
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.ours import WARM_UP_STEPS, Ours, plan_text, steady
from manyhands_bench.pipeline.torch_group import TorchGroup
from manyhands_bench.pipeline.torch_setting import TorchSetting
from manyhands_bench.pipeline.torch_tuning import Tuned, tuned
from manyhands_bench.tile.setup import kernels_text

SETTING = TorchSetting("mobilenetv2", (3, 96, 96), 16, 8)
QUICK = TorchSetting("mobilenetv2", (3, 64, 64), 8, 4)
TUNED_PLANS = 6
"""How many of our planner's best plans are tried, as PyTorch's settings are."""
WORTH_TIMING = 1.5
"""A baseline slower than this many times the best in trials is timed with fewer steps."""
LAB_SHARES = (0.6, 0.4, 0.25)
LAB_BYTES_PER_SECOND = 12.5e6
LAB_DELAY_SECONDS = 0.002
LAB_MEMORY_BYTES = 3 * 10**9
"""Enough for our worker and PyTorch's process side by side: neither is to run out of memory."""


@dataclass(frozen=True)
class PipelineExtent:
    """The amount of measuring."""

    setting: TorchSetting
    blocks: int
    steps: int
    measures: int
    """The number of times that the profile is taken anew for a prediction: a machine's speed drifts."""
    measure_seconds: float
    splits: int
    """The number of hand-chosen splits that PyTorch's pipeline is tried with."""
    kernel_samples: int = 1
    """Samples for which our kernels are chosen, within `kernel_seconds`; PyTorch's variants try channels_last."""
    kernel_seconds: float = 0.0


LOCAL = PipelineExtent(SETTING, 9, 6, measures=3, measure_seconds=6.0, splits=5, kernel_samples=8, kernel_seconds=12.0)
LAB = PipelineExtent(SETTING, 6, 4, measures=3, measure_seconds=15.0, splits=3, kernel_samples=4, kernel_seconds=12.0)
QUICK_EXTENT = PipelineExtent(QUICK, 1, 3, measures=1, measure_seconds=3.0, splits=2)


# PyTorch's hand-chosen settings


# Against PyTorch


@dataclass
class TorchComparison:
    """The blocks of one comparison: seconds of a step, by side."""

    plan: Plan
    trials: Trials
    """The trials of our plans; `plan` is the fastest of them."""
    pipeline: Plan
    """Our plan with two stages or more and the setting's micro-batches: the counterpart of PyTorch's pipelines."""
    tuned: Tuned
    choice: Choice
    ours: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    predictions: dict[int, float] = field(default_factory=dict)
    """Block before which the profile was taken -> seconds of a step that it predicts."""

    @property
    def prediction_error(self) -> float:
        """The median relative error of predictions, each over the blocks up to the next: a machine's speed drifts."""
        ends = [*list(self.predictions)[1:], len(self.ours)]
        measured = [statistics.median(self.ours[first:end]) for first, end in zip(self.predictions, ends, strict=True)]
        pairs = zip(self.predictions.values(), measured, strict=True)
        return statistics.median(abs(predicted - actual) / actual for predicted, actual in pairs)

    def best_of(self, kinds: Iterable[str]) -> str:
        return min(kinds, key=lambda kind: statistics.median(self.theirs[kind]))

    def figures(self, place: str, setting: str) -> Figures:
        ours, predicted = statistics.median(self.ours), statistics.median(self.predictions.values())
        best, best_pipeline = self.best_of(self.theirs), self.best_of(("1f1b", "gpipe"))
        figures: Figures = {
            f"measured_vs_best_torch_{place}": _ratio(self.theirs[best], self.ours),
            f"ours_{place}_seconds": ours,
            **{f"torch_{kind}_{place}_seconds": statistics.median(seconds) for kind, seconds in self.theirs.items()},
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
        figures[f"blocks_{place}"] = "; ".join(f"{name} {listed(row)} s" for name, row in rows.items())
        return figures


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return how many times as fast ours is."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def compare(
    ours: Ours,
    group: TorchGroup,
    extent: PipelineExtent,
    speeds: Sequence[float],
    bytes_per_second: float,
    say: Progress,
) -> TorchComparison:
    """Plan, tune both sides, let them take turns, and return the comparison."""
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
    baselines = tuned(group, ours.setting, speeds, bytes_per_second, extent.splits, plan, cluster.names, say)
    compared = TorchComparison(
        plan, trials, pipeline, baselines, ours.choice, theirs={kind: [] for kind in baselines.best}
    )
    every = max(1, extent.blocks // extent.measures)
    for block in range(extent.blocks):
        say(f"block {block + 1} of {extent.blocks}")
        if block % every == 0:
            compared.predictions[block] = ours.predicted(plan, *ours.measure(extent.measure_seconds))
        compared.ours.append(ours.seconds(plan, extent.steps))
        compared.pipelined.append(ours.seconds(pipeline, extent.steps) if pipeline != plan else compared.ours[-1])
        for kind, way in baselines.best.items():
            steps = extent.steps if baselines.trials[way] <= WORTH_TIMING * min(baselines.trials.values()) else 2
            compared.theirs[kind].append(steady(group.run(way, steps + WARM_UP_STEPS)))
    return compared


def _pipelined(ours: Ours, cluster: Cluster, profile: Profile, plan: Plan) -> Plan:
    """Return our planner's best plan with the setting's micro-batches; if it has one stage, the best cut into two."""
    count = ours.setting.micro_batches
    best = plan if plan.micro_batches == count else ours.plans(cluster, profile, count)[0]
    if len(best.stages) > 1:
        return best
    cuts = range(1, len(ours.graph.network.layers))
    return min(map(ours.two_stages, cuts), key=lambda candidate: ours.predicted(candidate, cluster, profile))


def usable() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def two_cores(setting: TorchSetting) -> Iterator[tuple[Ours, TorchGroup]]:
    """Yield two workers of ours and two processes of PyTorch, one of each on each of two cores."""
    cores = [*usable(), *usable()][:2]
    with (
        open_session(Cluster.local(2), threads=1, pin=cores) as session,
        TorchGroup(setting, [(), ()], cores=cores) as group,
    ):
        yield Ours(session, setting), group


def bench_local(say: Progress, quick: bool) -> Figures:
    """Compare both sides on two workers of one thread, each on a core of its own."""
    extent = QUICK_EXTENT if quick else LOCAL
    with two_cores(extent.setting) as (ours, group):
        compared = compare(ours, group, extent, (1.0, 1.0), float("inf"), lambda text: say(f"local: {text}"))
    where = f"{extent.setting}, two processes of one thread, each on a core of its own, SGD with momentum"
    return compared.figures("local", where)


# In the lab


def lab_cluster(name: str) -> LabCluster:
    """Return three devices whose speeds are shares of one of this machine's cores."""
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
def _in_lab(cluster: LabCluster, setting: TorchSetting) -> Iterator[tuple[Ours, TorchGroup]]:
    """Yield a worker of ours and a process of PyTorch on every device, within its share and in its network."""
    with open_session(cluster) as session:
        lab = Lab.find(cluster.cluster.name)
        names = cluster.cluster.names
        for name in names:  # importing torch is not to take minutes
            lab.groups.set_cpu(lab.name, name, None)
        places = [lab.words(name) for name in names]
        with TorchGroup(setting, places, host=lab.address(names[0]), interface="eth0") as group:
            ours = Ours(session, setting)
            lab.settle()
            yield ours, group


def bench_lab(say: Progress, quick: bool) -> Figures:
    """Compare both sides on three unequal devices behind slow links; return the reason if there can be no lab."""
    extent = QUICK_EXTENT if quick else LAB
    if why := missing():
        return {"lab_skipped": why}
    cluster = lab_cluster(f"pipeline{os.getpid()}")
    try:
        play_here(cluster)
    except LabError as error:
        return {"lab_skipped": error.message}
    with _in_lab(cluster, extent.setting) as (ours, group):
        compared = compare(ours, group, extent, LAB_SHARES, LAB_BYTES_PER_SECOND, lambda text: say(f"lab: {text}"))
    return compared.figures("lab", f"{extent.setting}, {_lab_text()}, SGD with momentum")


def summary(figures: Figures) -> Figures:
    """Return the worse of the figures measured over local workers and in the lab."""

    def numbers(stem: str) -> list[float]:
        values = [figures.get(f"{stem}_{place}") for place in ("local", "lab")]
        return [number for number in values if isinstance(number, (int, float))]

    result: Figures = {}
    if ratios := numbers("measured_vs_best_torch"):
        result["measured_vs_best_torch"] = min(ratios)
    if errors := numbers("pipeline_sim_error"):
        result["sim_error"] = max(errors)
    return result


# What the executor adds to computing
