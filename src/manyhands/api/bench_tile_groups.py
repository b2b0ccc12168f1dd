"""What tiles send, and what choosing where they exchange gains: `bytes_match` and `grouping_gain` of bench tile."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import msgspec

from manyhands.api.bench_tile_setup import WARM_UP_STEPS, Figures, Grid, Progress, Subject, grid_text
from manyhands.api.session import Session
from manyhands.executor.log import MeasuredSpan
from manyhands.executor.messages import COORDINATOR, feed_parts, plan_bytes
from manyhands.facts.cluster import Cluster, Link
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile
from manyhands.planner.grouping import Costs, Direction, InteriorTile
from manyhands.runtime.measuring import measure_on, probe_links
from manyhands.schedule.actions import Action, Reduce, Send
from manyhands.schedule.policy import FixedOrder, Policy, Schedule
from manyhands.simulator.simulate import simulate

SLOW = Link(2e6 / 8, 0.3e-3)
"""2 Mbit/s, and a delay as of a switch and two network stacks."""
RATIOS = (0.1, 1.0, 10.0, 100.0, 1000.0, 1e4)
"""Prices of a boundary element, in multiply-accumulates, whose optimal groupings are candidates."""
MOST_MEASURED = 3
"""How many of the simulated candidates are run in earnest."""
PROFILE_SECONDS = 10.0


# Bytes


def bench_bytes(subject: Subject, session: Session, grid: Grid, say: Progress) -> Figures:
    """Bytes of every pair in a run's logs against those that the plan says, and what they carry (Fig. 5.2c)."""
    say("bytes sent")
    plan = subject.tiles(session.cluster.names, grid)
    steps = 2
    logs = subject.run(session, plan, steps).logs
    schedule = Schedule(plan, subject.graph.network)
    planned = plan_bytes(dict(schedule.actions), subject.graph.network)
    sent = {
        (name, other): count
        for name, log in logs.items()
        for other, count in log.sent_bytes.items()
        if other != COORDINATOR
    }
    kinds = step_bytes(subject, schedule)
    return {
        "bytes_match": int(sent == {pair: count * steps for pair, count in planned.items()}),
        "bytes_per_step": sum(sent.values()) / steps,
        "bytes_per_step_planned": sum(planned.values()),
        **{f"bytes_{kind}": count for kind, count in kinds.items()},
        "bytes_setting": f"{subject}, {grid_text(grid)} tiles, {steps} steps: every pair's bytes by the workers' logs "
        "against the plan's; input_output includes what the coordinator feeds, which is no exchange between tiles",
    }


def step_bytes(subject: Subject, schedule: Schedule) -> dict[str, int]:
    """Bytes of one step by what they are: samples and outputs, boundary data, sums of batch norm, weights."""
    network = subject.graph.network
    found: Counter[str] = Counter(input_output=0, boundary=0, statistics=0, weights=0)
    for device, actions in schedule.actions.items():
        fed = feed_parts(subject.graph, schedule.lowering, device, targets=True)
        found["input_output"] += sum(part.bytes for part in fed)
        for action in actions:
            if isinstance(action, Send):
                found[_carried(action)] += action.message.bytes
    sums = {action for actions in schedule.actions.values() for action in actions if isinstance(action, Reduce)}
    for reduce in sums:
        kind = "weights" if reduce.what == "gradients" else "statistics"
        found[kind] += _travelling(reduce, network)
    return dict(found)


def _carried(action: Send) -> str:
    kind = action.message.kind
    if kind in ("weights", "weight-gradient"):
        return "weights"
    return "boundary" if kind in ("halo", "halo-gradient") else "input_output"


def _travelling(reduce: Reduce, network: Network) -> int:
    return sum(plan_bytes({device: (reduce,) for device in reduce.devices}, network).values())


# Groups


class Grouping(NamedTuple):
    """Where groups start, counted in the paper's layers; backward None: the adjoint of forward."""

    forward: tuple[int, ...]
    backward: tuple[int, ...] | None

    def text(self, layers: int) -> str:
        ahead, back = (_starts_text(starts, layers) for starts in self)
        return f"forward {ahead}, backward {back}"


def _starts_text(starts: tuple[int, ...] | None, layers: int) -> str:
    if starts is None:
        return "adjoint"
    if len(starts) == layers:
        return "every layer"
    return f"{len(starts)} group(s) at {','.join(map(str, starts))}"


def candidates(subject: Subject, grid: Grid) -> tuple[list[Grouping], Grouping, Grouping]:
    """Groupings worth looking at: optimal at some price of communication; and the extremes, one group and every layer.

    The extremes are the paper's: the same forward and backward.
    """
    tile = InteriorTile(subject.chain, grid)
    every, one = tuple(range(len(subject.chain))), (0,)

    def worth(direction: Direction) -> list[tuple[int, ...]]:
        found = [tile.best(direction, Costs(1.0, ratio)).starts for ratio in RATIOS]
        return list(dict.fromkeys([one, *found, every]))

    ways: list[tuple[int, ...] | None] = [None, *worth("backward")]
    all_of_them = [Grouping(forward, backward) for forward, backward in product(worth("forward"), ways)]
    return all_of_them, Grouping(one, one), Grouping(every, every)


def without_weights(plan: Plan, network: Network) -> dict[str, Policy]:
    """The plan's actions but for adding up the weights' gradients."""
    schedule = Schedule(plan, network)
    return {
        device: FixedOrder([action for action in actions if not _is_of_weights(action)])
        for device, actions in schedule.actions.items()
    }


def _is_of_weights(action: Action) -> bool:
    return isinstance(action, Reduce) and action.what == "gradients"


@dataclass
class Priced:
    """A subject on a cluster, by the simulator, without the sums of the weights' gradients."""

    subject: Subject
    cluster: Cluster
    profile: Profile | None
    grid: Grid

    def seconds(self, grouping: Grouping) -> float:
        network = self.subject.graph.network
        plan = self.subject.tiles(self.cluster.names, self.grid, *grouping)
        policies = without_weights(plan, network)
        return simulate(plan, network, self.cluster, self.profile, keep_spans=False, policies=policies).seconds


def measured_profile(subject: Subject, session: Session) -> Profile:
    """Seconds of every layer by the chosen kernels, all workers at once."""
    found = measure_on(
        session.coordinator, subject.graph, session.cluster.names, ladder=(1,), seconds=PROFILE_SECONDS,
        kernels=subject.kernels,
    )  # fmt: skip
    return Profile({name: one.profile for name, one in found.items()})


def linked(cluster: Cluster, link: Link) -> Cluster:
    """The cluster with the same link between any two, which is also all that a device's port carries."""
    rate = link.bytes_per_second
    devices = tuple(
        msgspec.structs.replace(device, up_bytes_per_second=rate, down_bytes_per_second=rate)
        for device in cluster.devices
    )
    return Cluster(cluster.name, devices, link)


def bench_groups(subject: Subject, session: Session, grid: Grid, blocks: int, steps: int, say: Progress) -> Figures:
    """The best grouping against one group and against every layer: measured here, and simulated at 2 Mbit/s."""
    say("measuring layers and links for groupings")
    found, one, every = candidates(subject, grid)
    profile = measured_profile(subject, session)
    probed = probe_links(session.coordinator, session.cluster.names).values()
    rate, delay = (
        statistics.median(numbers)
        for numbers in zip(*((link.bytes_per_second, link.delay_seconds) for link in probed), strict=True)
    )
    say(f"simulating {len(found)} groupings over two links")
    slow = Priced(subject, linked(session.cluster, SLOW), profile, grid)
    slow_seconds = {grouping: slow.seconds(grouping) for grouping in found}
    slow_best = min(found, key=slow_seconds.__getitem__)
    fast = Priced(subject, linked(session.cluster, Link(rate, delay)), profile, grid)
    promising = sorted(found, key=fast.seconds)[:MOST_MEASURED]
    rounds = []
    for block in range(blocks):
        say(f"groupings in earnest, block {block + 1} of {blocks}")
        rounds.append({g: bare_step_seconds(subject, session, grid, g, steps) for g in {*promising, one, every}})
    fast_seconds = {g: statistics.median(own[g] for own in rounds) for g in rounds[0]}
    fast_best = min(fast_seconds, key=fast_seconds.__getitem__)
    gains = {
        "fast": statistics.median(max(own[one], own[every]) / own[fast_best] for own in rounds),
        "slow": max(slow_seconds[one], slow_seconds[every]) / slow_seconds[slow_best],
    }
    figures: Figures = {"grouping_gain": min(gains.values())}
    for name, best, seconds in (("fast", fast_best, fast_seconds), ("slow", slow_best, slow_seconds)):
        figures |= {
            f"grouping_gain_{name}": gains[name],
            f"grouping_gain_{name}_over_one_group": seconds[one] / seconds[best],
            f"grouping_gain_{name}_over_every_layer": seconds[every] / seconds[best],
            f"grouping_{name}_seconds": seconds[best],
            f"grouping_{name}": best.text(len(subject.chain)),
        }
    return figures | {
        "grouping_setting": f"{subject}, {grid_text(grid)} tiles, the weights' reduction left out; fast: measured over "
        f"loopback in {blocks} blocks of {steps} steps, the {MOST_MEASURED} groupings that the simulator found best of "
        f"{len(found)} beside the extremes; slow: simulated at 2 Mbit/s from the layers' measured seconds"
    }


def bare_step_seconds(subject: Subject, session: Session, grid: Grid, grouping: Grouping, steps: int) -> float:
    """A step from its first action to the end of its last backward: without waiting for the weights' sums."""
    plan = subject.tiles(session.cluster.names, grid, *grouping)
    logs = subject.run(session, plan, steps + WARM_UP_STEPS, trace=True).logs
    spans = [span for log in logs.values() for span in log.spans]
    return statistics.median(
        _bare_seconds(span for span in spans if span.step == step) for step in sorted({span.step for span in spans})
    )


def _bare_seconds(spans: Iterable[MeasuredSpan]) -> float:
    known: Sequence[MeasuredSpan] = list(spans)
    return max(span.end for span in known if span.kind == "backward") - min(span.start for span in known)
