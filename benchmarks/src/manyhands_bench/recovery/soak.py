"""The soak of `manyhands bench recovery`: workers are killed at random, over and over, come back and join again, and
the job must not suffer: every round is completed, and the weights are those of a run in which nothing happened."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from manyhands.data.digits import load_digits
from manyhands.data.loader import length
from manyhands.facts.errors import TimedOut
from manyhands.facts.optimizer import Optimizer
from manyhands.job.evaluation import captured
from manyhands.models.tiny import tiny
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.order import RunState, snapshot_steps
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.recovery.site import Site, Trip

OPTIMIZER = Optimizer("SGD", lr=0.02, momentum=0.9)
SAMPLES, MICRO_BATCHES = 32, 2
STEPS_PER_KILL = 8
STEPS_BETWEEN_SNAPSHOTS = 40
MOST_DELAY_SECONDS = 0.5
"""The longest time from the end of a round to a kill: kills fall into rounds, recoveries and joins alike."""
STOPPED_PART = 0.15
"""The part of the kills that are stops (SIGSTOP): a loss without a closed connection."""
LEFT_ALIVE = 2
"""The number of workers that are always spared: weights are at two places."""
BACK_SECONDS = 120.0
SEED = 20240707
MOST_SECONDS = 500.0
"""Seconds after which no worker is killed any more; the remaining rounds run undisturbed."""


def digits_in_float64() -> Dataset[Any]:
    data = load_digits().train
    pictures, labels = zip(*(data[index] for index in range(length(data))))
    return TensorDataset(torch.stack(pictures).double(), torch.tensor([int(label) for label in labels]))


def soak_site(session: Session) -> Site:
    """Return a job of a small CNN on digits in float64, batch norm synchronised, dropout drawn from counters; the first
    and the last stage are on one device each, the other devices share the one between."""
    torch.manual_seed(0)
    first, *others, last = session.cluster.names
    module, data = tiny(width=8).double(), digits_in_float64()
    graph = captured(module, data, cross_entropy, granularity="blocks", name="tiny-float64")
    return Site.of(
        session, graph, data, OPTIMIZER, samples=SAMPLES, micro_batches=MICRO_BATCHES, measure_seconds=0.0,
        groups=((first,), tuple(others), (last,)) if others else ((first,), (last,)),
    )  # fmt: skip


@dataclass
class Reaper:
    """A killer of workers that also starts them again, called at the end of every round; each kill has its own thread.

    Rounds wait until the next kill is possible, but never while there is news of a loss or a join: the job handles
    it at once, as it would without a reaper.
    """

    site: Site
    kills: int
    say: Progress
    drawing: random.Random = field(default_factory=lambda: random.Random(SEED))
    began: float = field(default_factory=time.monotonic)
    done: list[tuple[float, str, signal.Signals]] = field(default_factory=list)
    """Moment, worker and kind of each kill."""
    struck: dict[str, signal.Signals] = field(default_factory=dict)
    """Workers that were struck and have not been started again, each with its signal."""
    armed: int = 0
    thread: threading.Thread | None = None

    @property
    def steps(self) -> int:
        return (self.kills + 2) * STEPS_PER_KILL

    @property
    def is_striking(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def may_strike(self) -> bool:
        return len(self._victims()) > LEFT_ALIVE and not self.is_striking

    def on_step(self, step: int, job: ElasticJob) -> None:
        self._bring_back()
        is_late = time.monotonic() - self.began > MOST_SECONDS
        is_due = self.armed < min(self.kills, step // STEPS_PER_KILL + 1) and not is_late
        is_last = step >= self.steps - STEPS_PER_KILL  # every kill falls into the run
        if is_due:
            self._wait_for(lambda: self.may_strike or job.has_news())
            if self.may_strike and not job.has_news():
                self.armed += 1
                self.say(f"soak, kill {self.armed} of {self.kills}")
                self._strike()
        elif is_last:
            self._wait_for(lambda: not self.is_striking or job.has_news())

    def _victims(self) -> list[str]:
        alive = self.site.session.coordinator.alive()
        return sorted(member.name for member in alive if member.name not in self.struck)

    def _strike(self) -> None:
        name = self.drawing.choice(self._victims())
        number = signal.SIGSTOP if self.drawing.random() < STOPPED_PART else signal.SIGKILL
        delay = self.drawing.uniform(0.0, MOST_DELAY_SECONDS)
        process = self.site.session.coordinator.local.processes[name].pid
        self.struck[name] = number

        def strike() -> None:
            time.sleep(delay)
            self.done.append((time.monotonic(), name, number))
            os.kill(process, number)

        self.thread = threading.Thread(target=strike, name="reaper", daemon=True)
        self.thread.start()

    def _bring_back(self) -> None:
        """Start lost workers again at once; they join when they are ready."""
        members = self.site.session.coordinator.members
        lost = [name for name in self.struck if members[name].is_lost]
        if lost:
            self.site.bring_back(lost, wait=False)
            for name in lost:
                del self.struck[name]

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + BACK_SECONDS
        while not is_so():
            self._bring_back()
            if time.monotonic() > end:
                raise TimedOut(f"Workers that were killed did not join again within {BACK_SECONDS:g} s.")
            time.sleep(0.01)


def soak(site: Site, kills: int, say: Progress) -> Figures:
    """Train the same steps twice: undisturbed, then with `kills` kills."""
    reaper = Reaper(site, kills, say)
    steps = reaper.steps
    snapshots = snapshot_steps(0, steps, STEPS_BETWEEN_SNAPSHOTS)
    say("soak, undisturbed")
    calm = site.travel(steps, snapshots=snapshots)
    began = time.monotonic()
    rough = site.travel(steps, how="auto", on_step=reaper.on_step, snapshots=snapshots)
    seconds = time.monotonic() - began
    events = [name for _, name, _ in rough.events]
    recoveries = rough.outcome.recoveries
    after_loss, after_join = (rough.recoveries_after(event) for event in ("lost", "joined"))
    return {
        "soak_kills": len(reaper.done),
        "soak_kills_asked": kills,
        "soak_kills_silent": sum(number == signal.SIGSTOP for _, _, number in reaper.done),
        "soak_seconds": seconds,
        "soak_seconds_undisturbed": calm.steps[-1][0] - calm.steps[0][0],
        "soak_rounds": steps,
        "soak_rounds_lost": rough.rounds_lost(steps),
        "soak_rounds_replayed": rough.outcome.replayed_steps,
        "soak_losses_noticed": events.count("lost"),
        "soak_joins": events.count("joined"),
        "soak_generations": rough.outcome.generations,
        "soak_rewinds": events.count("rewound"),
        "soak_recovery_seconds": statistics.median(after_loss) if after_loss else 0.0,
        "soak_joining_seconds": statistics.median(after_join) if after_join else 0.0,
        "soak_losses_differ": loss_difference(rough, calm),
        "soak_weights_differ": weight_difference(rough.outcome.state, calm.outcome.state),
        "soak_setting": f"tiny CNN on digits, float64, batch norm synchronised, dropout, SGD with momentum, batch "
        f"{SAMPLES} in {MICRO_BATCHES} micro-batches, {len(site.session.cluster.names)} workers of "
        f"{site.session.threads} thread(s), re-planning auto, copies every {site.backup_every} round(s), kept every "
        f"{STEPS_BETWEEN_SNAPSHOTS}; seed {SEED}; {STOPPED_PART:.0%} of the kills by SIGSTOP; the killed are started "
        f"again at once and join again; re-planned {_counted([facts['how'] for facts in recoveries])}",
    }


def loss_difference(trip: Trip, other: Trip) -> float:
    """Return the worst relative difference between two runs' losses."""
    pairs = zip(trip.losses, other.losses, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def weight_difference(state: RunState | None, other: RunState | None) -> float:
    """Return the worst difference between two runs' weights, relative to the largest number in the same tensor."""
    assert state is not None
    assert other is not None
    worst = 0.0
    for name, expected in other.weights.items():
        size = float(expected.double().abs().max()) if expected.numel() else 0.0
        if size:
            worst = max(worst, float((state.weights[name].double() - expected.double()).abs().max()) / size)
    return worst


def _counted(words: list[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words))) or "never"
