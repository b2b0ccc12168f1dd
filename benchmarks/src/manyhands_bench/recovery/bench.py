"""Figures of `manyhands bench recovery`: the time for which a loss stops training, what is lost, the cost of backups.

Environment D of ASTEROID as four local workers, in the shape of its Fig. 9: a first stage on A, a second shared by B
and C, a last on D, so that A's copy lies on B, D's on A, and B and C have each other's. Each is killed in turn, once
with incremental (light) and once with full (heavy) re-planning, and once stopped silently. Seconds count from the
signal itself.
"""

from __future__ import annotations

import random
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BatchNorm
from manyhands.job.evaluation import captured
from manyhands.models.registry import ZOO, build, loss_function
from manyhands.profiler.this_machine import identify
from manyhands.runtime.failure_detector import HEARTBEAT_TIMEOUT_SECONDS
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.ours import plan_text
from manyhands_bench.pipeline.torch_setting import TorchSetting
from manyhands_bench.recovery.lab import OPTIMIZER as LAB_OPTIMIZER
from manyhands_bench.recovery.lab import QUICK_LAB, LabExtent, bench_lab
from manyhands_bench.recovery.plots import Passage, draw_passages
from manyhands_bench.recovery.site import DrawnPictures, Groups, Site, Strike, Trip
from manyhands_bench.recovery.soak import loss_difference, soak, soak_site
from manyhands_bench.recovery.torchrun import NODES, TUNED, seconds_after_kill

SETTING = TorchSetting("mobilenetv2", (3, 32, 32), 32, 4)
QUICK = TorchSetting("tiny", (1, 16, 16), 32, 2)
OPTIMIZER = Optimizer("SGD", lr=1e-5, momentum=0.9)
"""The optimizer, with small steps: MobileNetV2 normalises 8 numbers where maps are 1x1, and larger steps amplify the
last bit a hundred-fold in every step, in whichever order sums are taken."""
CLASSES = 10
STEPS_BEFORE = 6
"""The steps completed when a worker is struck: copies have been taken by then."""
SAME_LOSS = 1e-6
"""The relative difference of losses in float64 that counts as none: sums in another order differ by less."""
SEED = 7


@dataclass(frozen=True)
class RecoveryExtent:
    """The amount of measuring."""

    setting: TorchSetting
    workers: int
    struck: int | None
    """The number of workers that are struck, from the first on; None: all."""
    steps_after: int
    """Steps that a run makes after the failure."""
    blocks: int
    """Blocks of turns: incremental and full plans, with and without backups."""
    steps: int
    """Steps of a block."""
    measure_seconds: float
    """Seconds for which the devices are measured; 0: their times are estimated."""


FULL = RecoveryExtent(SETTING, 4, None, 10, blocks=10, steps=6, measure_seconds=4.0)
QUICK_EXTENT = RecoveryExtent(QUICK, 3, 1, 6, blocks=2, steps=4, measure_seconds=0.0)


@dataclass
class Recoveries:
    """The trips by device, for each way of failing and re-planning."""

    light: dict[str, Trip] = field(default_factory=dict)
    heavy: dict[str, Trip] = field(default_factory=dict)
    silent: dict[str, Trip] = field(default_factory=dict)

    @property
    def every(self) -> list[Trip]:
        return [*self.light.values(), *self.heavy.values(), *self.silent.values()]


def shape_of(names: Sequence[str]) -> Groups:
    """Return the stages' devices as in Fig. 9: one device, those that share, one device; with up to three devices, the
    first alone, and the others share."""
    first, *others = names
    return ((first,), tuple(others[:-1]), (others[-1],)) if len(others) > 2 else ((first,), tuple(others))


def site_for(
    session: Session, setting: TorchSetting, measure_seconds: float, dtype: torch.dtype = torch.float32,
    optimizer: Optimizer = OPTIMIZER, batch_norm: BatchNorm = "synchronised",
) -> Site:  # fmt: skip
    torch.manual_seed(0)
    module, loss = build(setting.model).to(dtype), loss_function(ZOO[setting.model].loss)
    data = DrawnPictures(setting.shape, 16 * setting.samples, CLASSES, dtype)
    graph = captured(module, data, loss, granularity="blocks", name=setting.model)
    return Site.of(
        session, graph, data, optimizer, samples=setting.samples, micro_batches=setting.micro_batches,
        groups=shape_of(session.cluster.names), measure_seconds=measure_seconds, batch_norm=batch_norm,
    )  # fmt: skip


def lab_site(session: Session, setting: TorchSetting, measure_seconds: float) -> Site:
    """Return the lab's job: as the paper's, every device normalises by its own samples."""
    return site_for(session, setting, measure_seconds, optimizer=LAB_OPTIMIZER, batch_norm="local")


# Failures


class Failures:
    """The runs through failures of one site's workers."""

    def __init__(self, site: Site, extent: RecoveryExtent, say: Progress) -> None:
        self.site, self.extent, self.say = site, extent, say
        self.drawing = random.Random(SEED)
        self.steps = STEPS_BEFORE + extent.steps_after
        say("undisturbed")
        self.calm = site.travel(self.steps)
        moments = [moment for moment, _, _ in self.calm.steps]
        self.round_seconds = statistics.median(b - a for a, b in zip(moments[1:], moments[2:]))

    def trip(self, name: str, how: str, number: signal.Signals = signal.SIGKILL) -> Trip:
        """Run through one failure, at a random moment of a round."""
        self.say(f"{name} {'killed' if number == signal.SIGKILL else 'stopped'}, {how}")
        strike = Strike(name, STEPS_BEFORE - 1, self.drawing.random() * self.round_seconds, number)
        return self.site.travel(self.steps, how=how, strike=strike)

    def rounds_lost(self, trips: Sequence[Trip]) -> int:
        """Return the number of rounds that were not reported exactly once."""
        return sum(trip.rounds_lost(self.steps) for trip in trips)


def bench_exactness(session: Session, extent: RecoveryExtent, backup_every: int, say: Progress) -> Figures:
    """Compare the losses of a run through a failure with those of a calm run, in float64, where rounding hides
    nothing."""
    site = replace(site_for(session, extent.setting, 0.0, torch.float64), backup_every=backup_every)
    failures = Failures(site, extent, lambda text: say(f"float64: {text}"))
    name = session.cluster.names[0]
    trip = failures.trip(name, "light")
    site.bring_back([name])
    lost = failures.rounds_lost([trip])
    lost += sum(abs(a - b) > SAME_LOSS * abs(b) for a, b in zip(trip.losses, failures.calm.losses))
    return {"losses_differ": loss_difference(trip, failures.calm), "rounds_lost": lost}


def bench_failures(site: Site, extent: RecoveryExtent, out: Path | None, say: Progress) -> Figures:
    """Strike every device in turn: kill it, with incremental and full re-planning, and stop it; also measure the speed
    of the remaining devices afterwards."""
    failures = Failures(site, extent, say)
    recoveries, after = Recoveries(), {}
    names = site.session.cluster.names[: extent.struck]
    for place, name in enumerate(names):
        ways = ("light", "heavy") if place % 2 == 0 else ("heavy", "light")
        for how in ways:
            getattr(recoveries, how)[name] = failures.trip(name, how)
            if how == ways[-1]:
                say(f"without {name}, light and heavy in turns")
                after[name] = _speed_after(site, recoveries.light[name], recoveries.heavy[name], extent)
            site.bring_back([name])
        recoveries.silent[name] = failures.trip(name, "light", signal.SIGSTOP)
        site.bring_back([name])
    if out is not None:
        _draw(recoveries, names[min(1, len(names) - 1)], extent.setting, out)
    return _failure_figures(site, failures, recoveries, after, extent)


@dataclass(frozen=True)
class After:
    """The throughput after incremental re-planning over that after full, with the remaining workers."""

    measured: float
    predicted: float


def _speed_after(site: Site, light: Trip, heavy: Trip, extent: RecoveryExtent) -> After:
    """Measure the throughput of both plans in alternating blocks."""
    plans = [trip.outcome.plan for trip in (light, heavy)]
    ours, other = (plan for plan in plans if plan is not None)
    predicted = site.predicted_seconds(other) / site.predicted_seconds(ours)
    if ours.stages == other.stages:
        return After(1.0, predicted)
    ratios = []
    for block in range(max(2, extent.blocks // 3)):
        turns = (ours, other) if block % 2 == 0 else (other, ours)
        seconds = {plan is ours: site.round_seconds(plan, extent.steps) for plan in turns}
        ratios.append(seconds[False] / seconds[True])
    return After(statistics.median(ratios), predicted)


def _median(trips: dict[str, Trip], quantity: Callable[[Trip], float]) -> float:
    return float(statistics.median(quantity(trip) for trip in trips.values()))


def _failure_figures(
    site: Site, failures: Failures, recoveries: Recoveries, after: dict[str, After], extent: RecoveryExtent
) -> Figures:
    light, heavy = (
        _median(trips, lambda trip: trip.recovery_seconds) for trips in (recoveries.light, recoveries.heavy)
    )  # fmt: skip
    ratios = [
        recoveries.heavy[name].recovery_seconds / trip.recovery_seconds for name, trip in recoveries.light.items()
    ]
    silence_seconds = site.session.coordinator.times.timeout_seconds
    return {
        "recovery_seconds": light,
        "recovery_seconds_worst": max(trip.recovery_seconds for trip in recoveries.light.values()),
        "recovery_seconds_heavy": heavy,
        "light_vs_heavy": statistics.median(ratios),
        "recovery_seconds_silent": _median(recoveries.silent, lambda trip: trip.recovery_seconds),
        "silence_seconds": silence_seconds,
        "detect_seconds": _median(recoveries.light, lambda trip: trip.detect_seconds),
        "replan_seconds": _median(recoveries.light, lambda trip: trip.replan_seconds),
        "replan_seconds_heavy": _median(recoveries.heavy, lambda trip: trip.replan_seconds),
        "first_round_seconds": _median(recoveries.light, lambda trip: trip.first_round_seconds),
        "caught_up_seconds": _median(recoveries.light, lambda trip: trip.caught_up_seconds),
        "rounds_replayed": _median(recoveries.light, lambda trip: trip.facts["replayed"]),
        "bytes_moved": _median(recoveries.light, lambda trip: trip.facts["bytes_moved"]),
        "bytes_moved_heavy": _median(recoveries.heavy, lambda trip: trip.facts["bytes_moved"]),
        "throughput_after": statistics.median(trips.measured for trips in after.values()),
        "throughput_after_least": min(trips.measured for trips in after.values()),
        "throughput_after_predicted": statistics.median(trips.predicted for trips in after.values()),
        "rounds_lost": failures.rounds_lost(recoveries.every),
        "losses_differ_float32": max(loss_difference(trip, failures.calm) for trip in recoveries.every),
        "round_seconds": failures.round_seconds,
        "backup_every": site.backup_every,
        "failures": len(recoveries.every),
        "recovery_setting": f"{extent.setting}, float32, batch norm synchronised, SGD with momentum; "
        f"{len(site.session.cluster.names)} workers of {site.session.threads} thread(s) as "
        f"{plan_text(site.plan)}; struck at a random moment of round {STEPS_BEFORE}, seconds from the signal to the "
        f"start of the next round that was completed",
        "recovery_each": "; ".join(
            f"{name}: light {recoveries.light[name].recovery_seconds:.2f} s, "
            f"heavy {recoveries.heavy[name].recovery_seconds:.2f} s, "
            f"silent {recoveries.silent[name].recovery_seconds:.2f} s (limit {silence_seconds:g} s)"
            for name in recoveries.light
        ),
        "plans_after": "; ".join(
            f"without {name}: light {_plan_after(recoveries.light[name])}, "
            f"heavy {_plan_after(recoveries.heavy[name])}, light's throughput over heavy's {ratio.measured:.2f}, "
            f"predicted {ratio.predicted:.2f}"
            for name, ratio in after.items()
        ),
    }


def _plan_after(trip: Trip) -> str:
    return plan_text(trip.outcome.plan).partition(";")[0] if trip.outcome.plan is not None else ""


def _draw(recoveries: Recoveries, name: str, setting: TorchSetting, out: Path) -> None:
    """Draw Fig. 17: the throughput when one device is killed."""
    passages = []
    for how, trips in (("light", recoveries.light), ("heavy", recoveries.heavy)):
        trip = trips[name]
        rounds = tuple(moment - trip.struck_at for moment, _, _ in trip.steps)
        passages.append(Passage(how, rounds, trip.recovery_seconds, setting.samples))
    out.mkdir(parents=True, exist_ok=True)
    draw_passages(passages, out / "fig_17.png", f"Fig. 17: {setting}; {name} killed")


# What being ready costs


def bench_backups(site: Site, extent: RecoveryExtent, say: Progress) -> Figures:
    """Compare rounds in which copies are sent with rounds without, in alternating blocks."""
    ratios, pairs = [], []
    for block in range(extent.blocks):
        say(f"copies, block {block + 1} of {extent.blocks}")
        order = (0, site.backup_every) if block % 2 == 0 else (site.backup_every, 0)
        seconds = {every: site.round_seconds(site.plan, extent.steps, every) for every in order}
        pairs.append((seconds[site.backup_every], seconds[0]))
        ratios.append(pairs[-1][0] / pairs[-1][1])
    return {
        "backup_overhead": statistics.median(ratios),
        "backup_blocks": f"{extent.blocks} pairs of blocks of {extent.steps} rounds, mean rounds with over without: "
        + ", ".join(f"{ratio:.3f}" for ratio in ratios),
    }


# The baseline: torchrun


def bench_torchrun(setting: TorchSetting, say: Progress) -> Figures:
    """Measure torchrun as it is out of the box, and with a rendezvous that waits as little as ours does."""
    figures: Figures = {}
    try:
        for key, rendezvous in (("torchrun_seconds", ""), ("torchrun_tuned_seconds", TUNED)):
            say(f"torchrun, {rendezvous or 'as it is'}")
            figures[key] = seconds_after_kill(setting.model, setting.shape, setting.samples, rendezvous)
    except ManyhandsError as error:
        figures["torchrun_skipped"] = error.message
    return figures | {
        "torchrun_setting": f"{setting.model}, batch {setting.samples // NODES} each, DistributedDataParallel over "
        f"gloo, {NODES} nodes of 1 process (--nnodes={NODES - 1}:{NODES} --max-restarts=3, c10d), the last node killed "
        f"(agent and worker), from the kill to the next step's start; tuned: --rdzv-conf={TUNED}",
    }


def bench_recovery(
    quick: bool = False, kills: int | None = None, lab: bool = False, out: Path | None = None,
    on_progress: Progress | None = None,
) -> Figures:  # fmt: skip
    """Return every figure of `manyhands bench recovery`, flat. With `kills`, only the soak with that many kills; with
    `lab`, only the lab."""
    say = on_progress or (lambda text: None)
    extent = QUICK_EXTENT if quick else FULL
    figures: Figures = {"machine": identify(1).text, "quick": int(quick)}
    if lab:
        return figures | bench_lab(QUICK_LAB if quick else LabExtent(), lab_site, out, say)
    with open_session(Cluster.local(extent.workers), threads=1, silence_seconds=HEARTBEAT_TIMEOUT_SECONDS) as session:
        if kills is None:
            say("measuring")
            site = site_for(session, extent.setting, extent.measure_seconds)
            figures |= bench_failures(site, extent, out, say)
            if not quick:  # the soak is in float64 too
                exact = bench_exactness(session, extent, site.backup_every, say)
                figures |= exact | {"rounds_lost": int(figures["rounds_lost"]) + int(exact["rounds_lost"])}
            figures |= bench_backups(site, extent, say)
        figures |= soak(soak_site(session), kills or (2 if quick else 5), say)
    if kills is None and not quick:
        figures |= bench_torchrun(extent.setting, say)
    return figures
