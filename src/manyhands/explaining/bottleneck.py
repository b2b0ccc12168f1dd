"""The limits of a simulated step, in words: the largest parts of its critical path, each with its device and its share.

The parts add up to the whole step, so the first is the one to make faster. Whether that helps is checked by simulating
the same plan with only that part twice as fast (`checked`); for memory, see explain.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from manyhands.explaining.critical_path import GRADIENT_SUMS, Leg, critical_path
from manyhands.explaining.what_if import with_network, with_speed
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan
from manyhands.facts.plan_check import layer_range
from manyhands.facts.profile import Profile
from manyhands.facts.units import format_bytes, format_rate, format_seconds
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import MOST_SPANS, simulate

TWICE = 2.0
ABOUT_AS_BUSY = 0.9
"""Devices of a stage that compute at least this fraction of what the busiest does are limits too."""
WORTH_SAYING = 0.02
MOST_CHECKED = 3
_RESOURCES = {
    "up": "{}'s port out", "down": "{}'s port in", "link": "the link {} to {}", "out of": "the uplink out of {}",
    "into": "the uplink into {}", "relay": "the relay {}",
}  # fmt: skip
HELPS = 1.01
"""A limit is binding if a step is that much faster without it."""


@dataclass(frozen=True)
class Limit:
    """A resource or an event that a step waits for."""

    kind: Literal["compute", "transfer", "delay", "memory", "energy"]
    part: float
    """The fraction of the step's critical path; for memory, of the budget; for energy, of the joules."""
    text: str
    subject: str = ""
    """The text without its part: 'the sum of 98 MB of weight gradients'."""
    devices: tuple[str, ...] = ()
    seconds: float = 0.0
    stage: int | None = None
    use: str = ""
    """The use of a transfer."""
    bytes: float = 0.0
    relaxed: str = ""
    """The change by which it was checked: 'laptop twice as fast'."""
    relaxed_seconds: float | None = None
    """Seconds of a step after that change, simulated; None: not checked."""
    speed_up: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "devices": list(self.devices)}


@dataclass
class _Sum:
    """The sum of legs of one sort."""

    seconds: float = 0.0
    by_device: Counter[str] = field(default_factory=Counter)
    by_pair: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_stage: Counter[int] = field(default_factory=Counter)
    count: int = 0


def limits_of(result: Simulation, plan: Plan, network: Network, cluster: Cluster, unit: str = "step") -> list[Limit]:
    """Return what a simulation with spans spent its time on, the largest part first. `unit` names what took that time.

    Of a step with more spans than are kept there is no chain to follow: the busiest device, port or uplink stands for
    it.
    """
    describer = _Describer(result, plan, network, cluster, unit)
    if len(result.spans) >= MOST_SPANS:
        return [describer.busiest()]
    sums: defaultdict[tuple[str, str | int], _Sum] = defaultdict(_Sum)
    for leg in critical_path(result, cluster):
        legs = sums[leg.kind, _sort(leg)]
        legs.seconds += leg.seconds
        legs.count += 1
        legs.by_device[leg.source] += leg.seconds  # type: ignore[assignment]
        legs.by_pair[leg.source, leg.target] += leg.seconds  # type: ignore[assignment]
        legs.by_stage[leg.stage] += leg.seconds  # type: ignore[assignment]
    limits = [describer.limit(kind, sort, legs) for (kind, sort), legs in sums.items() if legs.seconds > 0]
    return sorted(limits, key=lambda limit: -limit.seconds)


def _sort(leg: Leg) -> str | int:
    """Return how a leg is grouped: computing by stage, transfers by their use, delays all together."""
    if leg.kind == "compute":
        return leg.stage
    return leg.use if leg.kind == "transfer" else ""


class _Describer:
    def __init__(self, result: Simulation, plan: Plan, network: Network, cluster: Cluster, unit: str) -> None:
        self.result, self.plan, self.network, self.cluster, self.what = result, plan, network, cluster, unit

    def limit(self, kind: str, sort: str | int, legs: _Sum) -> Limit:
        part = legs.seconds / self.result.seconds
        if kind == "compute":
            return self._compute(int(sort), legs, part)
        if kind == "transfer":
            return self._transfer(str(sort), legs, part)
        longest = max(self.cluster.link_between(a, b).delay_seconds if b else 0.0 for a, b in legs.by_pair)
        subject = f"waiting for links' delays ({legs.count} times up to {format_seconds(longest)})"
        return Limit("delay", part, f"{subject} is {self._of(part)}", subject, tuple(legs.by_device), legs.seconds)

    def busiest(self) -> Limit:
        busiest = max(self.result.devices.values(), key=lambda device: device.busy_seconds)
        part = busiest.busy_seconds / self.result.seconds
        carried, rates = self._carried()
        fullest = max(carried, key=lambda key: carried[key] / rates[key], default=None)
        if fullest is not None and carried[fullest] / rates[fullest] > busiest.busy_seconds:
            seconds, name = carried[fullest] / rates[fullest], _RESOURCES[fullest[0]].format(*fullest[1:])
            subject = f"{name} carries {format_bytes(carried[fullest])} at {format_rate(rates[fullest])}"
            text = f"{subject}: at least {self._of(seconds / self.result.seconds)}"
            part, count = seconds / self.result.seconds, carried[fullest]
            return Limit("transfer", part, text, subject, fullest[1:], seconds, None, "", count)
        text = f"{busiest.device} computes {self._of(part)}"
        return Limit("compute", part, text, f"computing on {busiest.device}", (busiest.device,), busiest.busy_seconds)

    def _of(self, part: float) -> str:
        return f"{percent(part)} of the {self.what}"

    def _compute(self, stage: int, legs: _Sum, part: float) -> Limit:
        """Return the limit of a stage: which of its devices the others wait for."""
        devices = tuple(name for name, _ in legs.by_device.most_common())
        is_one_of_many = len(self.plan.stages) > 1 and stage >= 0
        if legs.by_device[devices[0]] >= ABOUT_AS_BUSY * legs.seconds:
            devices = devices[:1]
            where = f"stage {stage} on " if is_one_of_many else ""
            beside = len(as_busy(devices, stage, self.result, self.plan)) - 1
            others = f", {beside} other{'s' * (beside > 1)} about as long" if beside else ""
            text = f"{where}{devices[0]} computes {self._of(part)}{others}"
            subject = f"computing {where}{'' if where else 'on '}{devices[0]}{self._share(stage, devices[0])}"
        else:
            subject = f"computing{f' stage {stage}' if is_one_of_many else ''}"
            text = f"{subject} is {self._of(part)} ({_listed(devices)} are waited for in turn)"
            subject += f" ({_listed(devices)} in turn)"
        return Limit("compute", part, text, subject, devices, legs.seconds, stage if stage >= 0 else None)

    def _share(self, stage: int, device: str) -> str:
        """Return ' (2 of 8 samples)', where that explains how long it takes."""
        if stage < 0:
            return ""
        planned = self.plan.stages[stage]
        if not isinstance(planned.share, BySamples) or device not in planned.devices:
            return ""
        return f" ({planned.share.samples[planned.devices.index(device)]} of {sum(planned.share.samples)} samples)"

    def _transfer(self, use: str, legs: _Sum, part: float) -> Limit:
        """Return the limit of transfers: gradient sums by their stage; others by the port or link that they fill
        most."""
        stage = legs.by_stage.most_common(1)[0][0]
        name, rate, carried, devices = self._crossed(legs)
        carries = f"{name} carries {format_bytes(carried)}{f' at {format_rate(rate)}' if rate < inf else ''}"
        if use == GRADIENT_SUMS:
            first, last = layer_range(self.plan.stages[stage])
            ops = self.network.layers[first].first, self.network.layers[last - 1].last
            weights = map(self.network.weights.__getitem__, self.network.weights_of(*ops))
            size = sum(weight.bytes for weight in weights if weight.trainable)
            whose = f"stage {stage}'s" if len(self.plan.stages) > 1 else "the"
            subject = f"the sum of {whose} {format_bytes(size)} of weight gradients"
            text = f"{subject} ends the {self.what}: {percent(part)} of it ({carries})"
            return Limit("transfer", part, text, f"{subject} ({carries})", devices, legs.seconds, stage, use, size)
        text = f"{carries}: waiting for {use} is {self._of(part)}"
        return Limit(
            "transfer", part, text, f"waiting for {use} ({carries})", devices, legs.seconds, None, use, carried
        )  # fmt: skip

    def _crossed(self, legs: _Sum) -> tuple[str, float, float, tuple[str, ...]]:
        """Return the port or link, among those that at least half of these transfers cross, that carries most for its
        rate: its name, its rate, its bytes in a step, and its devices."""
        waited: Counter[tuple[str, ...]] = Counter()
        rates: dict[tuple[str, ...], float] = {}
        for (a, b), seconds in legs.by_pair.items():
            for key, rate in self._resources(a, b):
                waited[key] += seconds
                rates[key] = rate
        carried, _ = self._carried()
        enough = max(waited.values()) / 2
        often = [key for key in waited if waited[key] >= enough]
        key = max(often, key=lambda key: (carried[key] / rates[key], waited[key]))
        name = _RESOURCES[key[0]].format(*key[1:])
        devices = legs.by_pair.most_common(1)[0][0] if key[0] == "relay" else key[1:]
        return name, rates[key], carried[key], devices

    def _carried(self) -> tuple[Counter[tuple[str, ...]], dict[tuple[str, ...], float]]:
        """Return the bytes that each port, uplink and link carries in a step, and its rate."""
        carried: Counter[tuple[str, ...]] = Counter()
        rates: dict[tuple[str, ...], float] = {}
        for (a, b), count in self.result.bytes_between.items():
            for key, rate in self._resources(a, b):
                carried[key] += count  # type: ignore[assignment]
                rates[key] = rate
        return carried, rates

    def _resources(self, a: str, b: str) -> list[tuple[tuple[str, ...], float]]:
        sender, receiver = self.cluster.device(a), self.cluster.device(b)
        link = self.cluster.link_between(a, b).bytes_per_second
        if sender.host_name == receiver.host_name:
            return [(("link", a, b), link)]
        ports = self.cluster.ports_between(a, b).items()
        return [*ports, (("link", sender.host_name, receiver.host_name), link)]


def percent(part: float) -> str:
    return "under 1 %" if part < 0.01 else f"{100 * part:.0f} %"


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} others"


def checked(
    limits: Sequence[Limit], result: Simulation, plan: Plan, network: Network, cluster: Cluster, profile: Profile
) -> list[Limit]:
    """Return the limits, the first few simulated again without them: those that help before those that do not."""
    tried = [
        _check(limit, result, plan, network, cluster, profile)
        for limit in limits[:MOST_CHECKED]
        if limit.part >= WORTH_SAYING
    ]
    helps = [limit for limit in tried if (limit.speed_up or 0.0) >= HELPS]
    others = [limit for limit in tried if limit not in helps]
    return [*helps, *others, *limits[len(tried) :]]


def _check(limit: Limit, result: Simulation, plan: Plan, network: Network, cluster: Cluster, profile: Profile) -> Limit:
    if limit.kind == "compute":
        names = as_busy(limit.devices, limit.stage, result, plan)
        relaxed = f"{_all_of(names, plan, limit.stage)} twice as fast"
        cluster, profile = with_speed(cluster, profile, names, TWICE)
    elif limit.kind == "transfer":
        relaxed = "links and ports twice as fast"
        cluster = with_network(cluster, rate=TWICE)
    else:
        relaxed = "half the delay"
        cluster = with_network(cluster, delay=1 / TWICE)
    seconds = simulate(plan, network, cluster, profile, keep_spans=False).seconds
    times = result.seconds / seconds if seconds else inf
    return replace(limit, relaxed=relaxed, relaxed_seconds=seconds, speed_up=times)


def as_busy(devices: Sequence[str], stage: int | None, result: Simulation, plan: Plan) -> tuple[str, ...]:
    """Return the devices that the others wait for, and those of their stage that would be waited for next."""
    beside = plan.stages[stage].devices if stage is not None and stage >= 0 else ()
    busy = {name: result.devices[name].busy_seconds for name in {*devices, *beside}}
    enough = ABOUT_AS_BUSY * max(busy[name] for name in devices)
    return tuple(name for name in plan.devices if busy.get(name, 0.0) >= enough or name in devices)


def _all_of(names: Sequence[str], plan: Plan, stage: int | None) -> str:
    if len(names) > 3 and stage is not None and len(names) == len(plan.stages[stage].devices):
        return f"all {len(names)} devices of stage {stage}"
    return _listed(names)
