"""The bytes that tiles send, and the gain of choosing where they exchange: `bytes_match` and `grouping_gain`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from manyhands.executor.log import MeasuredSpan
from manyhands.executor.messages import COORDINATOR, feed_parts, plan_bytes
from manyhands.facts.cluster import Cluster
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import LayerName, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.planner.tiles import ExchangeGroups, TilePrices, with_groups
from manyhands.runtime.measuring import measure_on, probe_links
from manyhands.schedule.actions import Action, Reduce, Send
from manyhands.schedule.policies import FixedOrder, Policy
from manyhands.schedule.policy import Schedule
from manyhands.session.session import Session
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.tile.setup import WARM_UP_STEPS, Grid, TiledNetwork, TileVariant, grid_text

SLOW = Link(2e6 / 8, 0.3e-3)
"""A link of 2 Mbit/s, with the delay of a switch and two network stacks."""
PROFILE_SECONDS = 10.0
BYTES_STEPS = 2


# Bytes


def bench_bytes(subject: TiledNetwork, session: Session, ways: Sequence[TileVariant], say: Progress) -> Figures:
    """Compare the bytes of every pair in a run's logs with the plan's, and count what they carry (Fig. 5.2c). Return
    the first way's figures, and whether the bytes of all ways match."""
    say("bytes sent")
    by_way: list[Figures] = []
    for way in ways:
        plan = subject.tiles(session.cluster.names, way)
        logs = subject.run(session, plan, BYTES_STEPS).logs
        schedule = Schedule(plan, subject.graph.network)
        planned = plan_bytes(dict(schedule.actions), subject.graph.network)
        sent = {
            (name, other): count
            for name, log in logs.items()
            for other, count in log.sent_bytes.items()
            if other != COORDINATOR
        }
        by_way.append({
            "bytes_match": int(sent == {pair: count * BYTES_STEPS for pair, count in planned.items()}),
            "bytes_per_step": sum(sent.values()) / BYTES_STEPS,
            "bytes_per_step_planned": sum(planned.values()),
            **{f"bytes_{kind}": count for kind, count in step_bytes(subject, schedule).items()},
        })  # fmt: skip
    return by_way[0] | {
        "bytes_match": int(all(of_way["bytes_match"] for of_way in by_way)),
        **{f"bytes_boundary_{way}": of_way["bytes_boundary"] for way, of_way in zip(ways, by_way)},
        "bytes_setting": f"{subject}, tiles {', '.join(map(str, ways))}, {BYTES_STEPS} steps: every pair's bytes by "
        "the workers' logs against the plan's; input_output includes what the coordinator feeds, which is no exchange "
        "between tiles",
    }


def step_bytes(subject: TiledNetwork, schedule: Schedule) -> dict[str, int]:
    """Return the bytes of one step by content: samples and outputs, boundary data, sums of batch norm, weights."""
    network = subject.graph.network
    counts: Counter[str] = Counter(input_output=0, boundary=0, statistics=0, weights=0)
    for device, actions in schedule.actions.items():
        fed = feed_parts(subject.graph, schedule.lowering, device, targets=True)
        counts["input_output"] += sum(part.bytes for part in fed)
        for action in actions:
            if isinstance(action, Send):
                counts[_carried(action)] += action.message.bytes
    sums = {action for actions in schedule.actions.values() for action in actions if isinstance(action, Reduce)}
    for reduce in sums:
        kind = "weights" if reduce.what == "gradients" else "statistics"
        counts[kind] += _travelling(reduce, network)
    return dict(counts)


def _carried(action: Send) -> str:
    kind = action.message.kind
    if kind in ("weights", "weight-gradient"):
        return "weights"
    return "boundary" if kind in ("halo", "halo-gradient") else "input_output"


def _travelling(reduce: Reduce, network: Network) -> int:
    return sum(plan_bytes(dict.fromkeys(reduce.devices, (reduce,)), network).values())


# Groups


ONE_GROUP = ("one group", "one group each way")
EVERY_LAYER = ("every layer", "every layer, deltas")
"""The extremes, by the planner's names: backward as forward's adjoint, or by groups of deltas."""


def groups_text(groups: ExchangeGroups) -> str:
    ahead = "every layer" if groups.forward is None else _starts_text(groups.forward)
    back = "adjoint" if groups.backward is None else _starts_text(groups.backward)
    return f"{groups.name}: forward {ahead}, backward {back}"


def _starts_text(starts: Sequence[LayerName]) -> str:
    return f"{len(starts)} group(s) at {', '.join(map(str, starts))}"


def without_weights(plan: Plan, network: Network) -> dict[str, list[Action]]:
    """Return each device's actions of the plan, without adding up the weights' gradients."""
    actions = Schedule(plan, network).actions
    return {device: [action for action in ordered if not _is_of_weights(action)] for device, ordered in actions.items()}


def as_policies(actions: Mapping[str, Sequence[Action]]) -> dict[str, Policy]:
    return {device: FixedOrder(ordered) for device, ordered in actions.items()}


def _is_of_weights(action: Action) -> bool:
    return isinstance(action, Reduce) and action.what == "gradients"


@dataclass
class Priced:
    """Tiles on a cluster, priced by planner and simulator without the sums of the weights' gradients."""

    plan: Plan
    network: Network
    cluster: Cluster
    profile: Profile

    @cached_property
    def groupings(self) -> list[ExchangeGroups]:
        """The groupings that the planner considers: the extremes and the optima."""
        return TilePrices(self.plan, 0, self.network, self.cluster, self.profile).groupings()

    def planned(self, groups: ExchangeGroups) -> Plan:
        return resolve(with_groups(self.plan, 0, groups), self.network)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Grouping -> seconds of a step."""
        return {groups.name: self.bare_seconds(self.planned(groups)) for groups in self.groupings}

    def bare_seconds(self, plan: Plan) -> float:
        return self.simulated(plan, without_weights(plan, self.network)).seconds

    def simulated(self, plan: Plan, actions: Mapping[str, Sequence[Action]]) -> Simulation:
        policies = as_policies(actions)
        return simulate(plan, self.network, self.cluster, self.profile, keep_spans=False, policies=policies)


def gains(seconds: Mapping[str, float], best: str) -> tuple[float, float]:
    """Return how many times as long as the best grouping one group takes, and an exchange at every layer, each in its
    faster way."""
    one_group, every = (min(seconds[name] for name in names) for names in (ONE_GROUP, EVERY_LAYER))
    return one_group / seconds[best], every / seconds[best]


def measured_profile(subject: TiledNetwork, session: Session) -> Profile:
    """Measure the seconds of every layer by the chosen kernels, on all workers at once."""
    measured = measure_on(
        session.coordinator, subject.graph, session.cluster.names, ladder=(1,), seconds=PROFILE_SECONDS,
        kernels=subject.kernels,
    )  # fmt: skip
    return Profile({name: answer.profile for name, answer in measured.items()})


def linked(cluster: Cluster, link: Link) -> Cluster:
    """Return the cluster with the same link between any two devices, whose rate is also that of every port."""
    rate = link.bytes_per_second
    devices = tuple(
        msgspec.structs.replace(device, up_bytes_per_second=rate, down_bytes_per_second=rate)
        for device in cluster.devices
    )
    return Cluster(cluster.name, devices, link)


def bench_groups(
    subject: TiledNetwork, session: Session, grid: Grid, trials: int, blocks: int, steps: int, say: Progress
) -> Figures:
    """Compare the best grouping with one group and with every layer: measured here, and simulated at 2 Mbit/s."""
    say("measuring layers and links for groupings")
    network, plan = subject.graph.network, subject.tiles(session.cluster.names, TileVariant(grid))
    profile = measured_profile(subject, session)
    probed = probe_links(session.coordinator, session.cluster.names).values()
    rate, delay = (
        statistics.median(numbers)
        for numbers in zip(*((link.bytes_per_second, link.delay_seconds) for link in probed), strict=True)
    )
    fast = Priced(plan, network, linked(session.cluster, Link(rate, delay)), profile)
    slow = Priced(plan, network, linked(session.cluster, SLOW), profile)
    rounds: list[dict[str, float]] = []
    for block in range(1 - trials, blocks + 1):
        say(f"groupings, block {block} of {blocks}" if block > 0 else "groupings, trying all")
        rounds.append({g.name: bare_step_seconds(subject, session, fast.planned(g), steps) for g in fast.groupings})
    counted = rounds[trials:]  # the best was chosen by those before, which do not count
    tried = {g.name: statistics.median(round[g.name] for round in rounds[:trials]) for g in fast.groupings}
    figures: Figures = {}
    for link, priced, chosen, sides in (("fast", fast, tried, counted), ("slow", slow, slow.seconds, [slow.seconds])):
        best = min(chosen, key=chosen.__getitem__)
        ratios = [gains(seconds, best) for seconds in sides]
        over_one, over_every = (statistics.median(column) for column in zip(*ratios, strict=True))
        medians = {name: statistics.median(seconds[name] for seconds in sides) for name in chosen}
        figures |= {
            f"grouping_gain_{link}": max(over_one, over_every),
            f"grouping_gain_{link}_over_one_group": over_one,
            f"grouping_gain_{link}_over_every_layer": over_every,
            f"grouping_{link}_seconds": medians[best],
            f"grouping_{link}": groups_text(next(groups for groups in priced.groupings if groups.name == best))
            + "; all: " + ", ".join(f"{name} {column:.4g} s" for name, column in medians.items()),
        }  # fmt: skip
    gain = min(float(figures["grouping_gain_fast"]), float(figures["grouping_gain_slow"]))
    return {"grouping_gain": gain} | figures | {
        "grouping_setting": f"{subject}, {grid_text(grid)} tiles, the weights' reduction left out; one group and every "
        "layer each in the faster of two ways backward; fast: measured over loopback, chosen by the median of "
        f"{trials} block(s), then {blocks} blocks of {steps} steps, medians; slow: simulated at 2 Mbit/s from the "
        "layers' measured seconds"
    }  # fmt: skip


def bare_step_seconds(subject: TiledNetwork, session: Session, plan: Plan, steps: int) -> float:
    """Return the median seconds of a step from its first action to the end of its last backward, so without waiting
    for the weights' sums."""
    logs = subject.run(session, plan, steps + WARM_UP_STEPS, trace=True).logs
    spans = [span for log in logs.values() for span in log.spans]
    return statistics.median(
        _bare_seconds(span for span in spans if span.step == step) for step in sorted({span.step for span in spans})
    )


def _bare_seconds(spans: Iterable[MeasuredSpan]) -> float:
    step_spans: Sequence[MeasuredSpan] = list(spans)
    return max(span.end for span in step_spans if span.kind == "backward") - min(span.start for span in step_spans)
