"""Places the cuts between stages once the devices of each stage are known: the shortest round, by dynamic
programming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

import msgspec
import numpy
from numpy.typing import NDArray

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import ByChannels, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.planner.context import Batch, PlanningContext
from manyhands.planner.shares import Counts, Numbers
from manyhands.planner.steps import StageTable, Steps
from manyhands.planner.tiles import MESSAGE_SECONDS
from manyhands.schedule.tileable import maps_of

TINY = 1e-30


@dataclass(frozen=True)
class StageDraft:
    """A stage to be planned: its devices, and the old stage they come from (None for a device that joins)."""

    devices: tuple[str, ...]
    old: Stage | None
    warm_up: int
    """K_p, where the plan gives one number per stage."""
    is_plain: bool = False
    """Whether it is shared by samples, however the old stage was shared."""

    @property
    def kind(self) -> str:
        if len(self.devices) == 1:
            return "single"
        if self.old is None or self.is_plain:
            return "samples"
        return self.old.share.by if isinstance(self.old.share, (ByTiles, ByChannels)) else "samples"


StageDrafts = tuple[StageDraft, ...]


@dataclass(frozen=True)
class _Table:
    """[first, last] -> seconds of a stage of these layers; infinite where it is impossible."""

    forward: Numbers
    backward: Numbers
    reduce: Numbers


class Cutting:
    """The rounds of one plan on the present devices: the seconds of each, and its best cuts."""

    def __init__(self, plan: Plan, network: Network, cluster: Cluster, profile: Profile) -> None:
        homeless = resolve(msgspec.structs.replace(plan, homes={}), network)
        self.plan = msgspec.structs.replace(homeless, homes=plan.homes)
        self.network, self.cluster, self.profile = network, cluster, profile
        self.layers, self.samples = len(network.layers), plan.micro_batch_size
        is_synchronised = plan.batch_norm == "synchronised"
        warm_up = "2(P-p)-1" if isinstance(plan.warm_up, tuple) else plan.warm_up
        self.batch = Batch(self.samples, plan.micro_batches, plan.optimizer_slots, is_synchronised, warm_up)
        self.context = PlanningContext(network, cluster, profile, self.samples, plan.optimizer_slots, cluster.names)
        ladders = self.context.ladders.total
        whole = {name: ladders[kind][self.samples, -1] for name, kind in zip(self.context.names, self.context.kinds)}
        self.speeds = {name: 1 / max(float(seconds), TINY) for name, seconds in whole.items()}
        self._steps: dict[tuple[str, ...], Steps] = {}
        self._tables: dict[tuple[object, ...], _Table] = {}
        self._cuts: dict[tuple[object, ...], tuple[float, tuple[int, ...]]] = {}
        self._prices: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[float, float, float]] = {}
        self._legal: dict[tuple[str, int], NDArray[numpy.bool_]] = {}

    def steps(self, names: tuple[str, ...]) -> Steps:
        if names not in self._steps:
            self._steps[names] = Steps(self.context.only(names), self.batch)
        return self._steps[names]

    def cut(
        self, drafts: StageDrafts, is_tight: bool, only: tuple[int, ...] | None = None
    ) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of a round and where each stage ends; no ends mean that it is impossible. `only` fixes the
        ends."""
        key = (tuple((draft.devices, draft.kind, draft.warm_up) for draft in drafts), is_tight, only)
        if key not in self._cuts:
            self._cuts[key] = self._cut(drafts, is_tight, only)
        return self._cuts[key]

    def _cut(self, drafts: StageDrafts, is_tight: bool, only: tuple[int, ...] | None) -> tuple[float, tuple[int, ...]]:
        count = self.plan.micro_batches
        names = [name for draft in drafts for name in draft.devices]
        is_overlapped = self.plan.order != "sequential" and len(names) == len(set(names))
        if len(names) != len(set(names)) and not self.plan.may_repeat_devices:
            return inf, ()
        longest, ending = numpy.full(self.layers + 1, inf), numpy.zeros(self.layers + 1)
        choices: list[Counts] = []
        for place in range(len(drafts) - 1, -1, -1):
            table = self._table(drafts[place], self._ahead(drafts, place), is_tight)
            stage_seconds = table.forward + table.backward
            if place == len(drafts) - 1:
                ahead = back = numpy.zeros(self.layers + 1)
                behind, behind_ending = numpy.full(self.layers + 1, inf), ending
                behind[-1] = 0.0
            else:
                ahead, back = self._cut_seconds(drafts[place].devices, drafts[place + 1].devices)
                behind, behind_ending = longest, ending
            crossing = ahead + back
            if is_overlapped:
                total = numpy.maximum(
                    numpy.maximum(count * stage_seconds, count * crossing + stage_seconds),
                    behind + stage_seconds + crossing,
                )
            else:
                total = count * (stage_seconds + crossing) + behind
            after = numpy.maximum(table.reduce, behind_ending - table.backward - back)
            round_seconds = numpy.where(numpy.isfinite(total), total + numpy.maximum(after, 0.0), inf)
            if only is not None:
                others = numpy.arange(self.layers + 1) != only[place]
                round_seconds[:, others] = inf
            choice = round_seconds.argmin(1)
            rows = numpy.arange(self.layers + 1)
            is_possible = numpy.isfinite(round_seconds[rows, choice])
            longest = numpy.where(is_possible, total[rows, choice], inf)
            ending = numpy.where(is_possible, after[rows, choice], 0.0)
            choices.append(choice)
        seconds = float(longest[0] + max(ending[0], 0.0))
        if seconds == inf:
            return inf, ()
        ends, place = [], 0
        for choice in reversed(choices):
            place = int(choice[place])
            ends.append(place)
        return seconds, tuple(ends)

    def _ahead(self, drafts: StageDrafts, place: int) -> int:
        """Return how many micro-batches a stage holds at once."""
        if self.plan.order in ("sequential", "stream"):
            return 1
        if self.plan.order == "gpipe":
            return self.plan.micro_batches
        if isinstance(self.plan.warm_up, tuple):
            return drafts[place].warm_up
        return self.batch.ahead(len(drafts) - place)

    @cached_property
    def _ranges(self) -> tuple[Counts, Counts]:
        """The first and last layers of all runs of layers."""
        first, last = numpy.triu_indices(self.layers + 1, 1)
        return first, last

    def _table(self, draft: StageDraft, ahead: int, is_tight: bool) -> _Table:
        key = (draft.devices, draft.kind, ahead, is_tight)
        if key not in self._tables:
            divided = draft.kind in ("tiles", "channels")
            table = self._divided(draft, ahead, is_tight) if divided else self._shared(draft, ahead, is_tight)
            illegal = ~self._is_legal(draft.kind, len(draft.devices))
            table.forward[illegal] = inf
            self._tables[key] = table
        return self._tables[key]

    def _empty(self) -> _Table:
        shape = (self.layers + 1, self.layers + 1)
        return _Table(numpy.full(shape, inf), numpy.zeros(shape), numpy.zeros(shape))

    def _shared(self, draft: StageDraft, ahead: int, is_tight: bool) -> _Table:
        """Return the table of a stage shared by samples, with the best shares for every run of layers."""
        table = self._empty()
        if len(draft.devices) > self.samples:
            return table
        first, last = self._ranges
        lines = self._solved(draft, first, last, ahead, is_tight)
        place = (lines.first, lines.last)
        table.forward[place], table.backward[place] = lines.forward, lines.backward
        if self.plan.is_training:
            table.reduce[place] = lines.reduce
        else:
            table.backward[place] = 0.0
        return table

    def _solved(self, draft: StageDraft, first: Counts, last: Counts, ahead: int, is_tight: bool) -> StageTable:
        steps = self.steps(draft.devices)
        group = numpy.full(len(first), steps.groups.index((0, len(draft.devices))))
        lines = steps.stages(first, last, group)
        return steps.within_memory(lines, ahead) if is_tight else lines

    def _divided(self, draft: StageDraft, ahead: int, is_tight: bool) -> _Table:
        """Return the table of a stage whose operators are divided in proportion to speed, with an exchange at every
        layer, forward and backward."""
        table = self._empty()
        first, last = self._ranges
        context, names = self.context, draft.devices
        kinds = [context.kinds[context.names.index(name)] for name in names]
        between = self.cluster.bytes_per_second_between
        rate = min(between(a, b) for a in names for b in names if a != b)
        delay = max(self.cluster.link_between(a, b).delay_seconds for a in names for b in names if a != b)
        exchanges = (last - first) * (delay + MESSAGE_SECONDS)
        for matrix, tables in ((table.forward, context.ladders.forward), (table.backward, context.ladders.backward)):
            rows = [tables[kind][self.samples] for kind in kinds]
            speed = sum(1 / numpy.maximum(row[last] - row[first], TINY) for row in rows)
            matrix[first, last] = 1 / speed + exchanges
        weights = context.bytes.summed(first, last) + context.bytes.tied(first, last)
        table.reduce[first, last] = 2 * weights / rate + 2 * delay
        if not self.plan.is_training:
            table.backward[:], table.reduce[:] = 0.0, 0.0
        if is_tight:
            fixed, each = self.steps(names[:1]).memory(first, last, ahead)
            whole = sum(self.speeds[name] for name in names)
            for name, kind in zip(names, kinds):
                part = self.speeds[name] / whole * self.samples
                is_over = fixed + each * part > context.budgets[kind]
                table.forward[first[is_over], last[is_over]] = inf
        return table

    def _is_legal(self, kind: str, size: int) -> NDArray[numpy.bool_]:
        """Return [first, last] -> whether a stage of these layers may be shared this way, as the checker of plans
        decides."""
        if (kind, size) in self._legal:
            return self._legal[kind, size]
        network, count = self.network, self.layers + 1
        legal = numpy.triu(numpy.ones((count, count), bool), 1)
        may_cut = numpy.array(self.network.may_cut) & self._may_part
        legal &= may_cut[:, None] & may_cut[None, :]
        legal &= self.plan.order != "replay" or kind == "single"
        is_synchronised = self.plan.batch_norm == "synchronised"
        if kind == "samples":
            legal &= self._none_of(lambda op: network.ops[op].mixes_samples)
            if network.loss_combination == "whole" and self.plan.is_training:
                legal[:, -1] = False
            if self.plan.order == "eager" and is_synchronised:
                legal &= self._none_of(lambda op: network.ops[op].statistics > 0)
        elif kind in ("tiles", "channels"):
            legal &= self.plan.order != "eager"
        if kind == "tiles":
            for first in range(self.layers):
                _, obstacle = maps_of(network, network.layers[first].first, len(network.ops))
                end = self.layers if obstacle is None else network.layer_of_op[obstacle]
                legal[first, end + 1 :] = False
        self._legal[kind, size] = legal
        return legal

    def _none_of(self, is_one: Callable[[int], bool]) -> NDArray[numpy.bool_]:
        """Return [first, last] -> whether the condition holds for no operator of these layers."""
        each = [any(is_one(op) for op in range(layer.first, layer.last)) for layer in self.network.layers]
        sums = numpy.concatenate([[0], numpy.cumsum(each)])
        is_free: NDArray[numpy.bool_] = sums[None, :] == sums[:, None]
        return is_free

    @cached_property
    def _may_part(self) -> NDArray[numpy.bool_]:
        """[layer] -> whether a stage may start before it without parting layers that train the same weight, where the
        stages of the old plan cannot add up its gradients among them."""
        may_part = numpy.ones(self.layers + 1, bool)
        has_gateway = any(stage.reduce == "gateway" for stage in self.plan.stages)
        if not self.plan.is_training or not (has_gateway or self.plan.order == "replay"):
            return may_part
        first_use: dict[str, int] = {}
        for index, layer in enumerate(self.network.layers):
            for name in layer.weights:
                if self.network.weights[name].trainable:
                    may_part[first_use.setdefault(name, index) + 1 : index + 1] = False
        return may_part

    def _cut_seconds(self, senders: tuple[str, ...], receivers: tuple[str, ...]) -> tuple[Numbers, Numbers]:
        """Return, for every layer, the seconds that a micro-batch takes to cross the cut before it, forward and
        backward."""
        ahead, back, delay = self._between(senders, receivers)
        crossing, returning = (self.context.bytes.crossing * self.samples, self.context.bytes.returning * self.samples)
        backward = returning * back * self.plan.is_training
        return crossing * ahead + delay, numpy.where(backward > 0, backward + delay, 0.0)

    def _between(self, senders: tuple[str, ...], receivers: tuple[str, ...]) -> tuple[float, float, float]:
        """Return the seconds per byte that two groups exchange, there and back, and the delay: the slowest link or port
        decides, with each device's part by its speed."""
        if (senders, receivers) in self._prices:
            return self._prices[senders, receivers]
        slowest, delay = [0.0, 0.0], 0.0
        ports: dict[tuple[int, str, str], float] = {}
        for a, start, end in self._parts(senders):
            for b, low, high in self._parts(receivers):
                part = min(end, high) - max(start, low)
                if part <= 0 or a == b:
                    continue
                for way, names in enumerate(((a, b), (b, a))):
                    link = self.cluster.link_between(*names)
                    delay = max(delay, link.delay_seconds)
                    slowest[way] = max(slowest[way], part / link.bytes_per_second)
                    sender, receiver = (self.cluster.device(name) for name in names)
                    if sender.host_name != receiver.host_name:
                        for port, rate in (
                            ((way, "up", sender.host_name), sender.up_bytes_per_second),
                            ((way, "down", receiver.host_name), receiver.down_bytes_per_second),
                        ):
                            ports[port] = ports.get(port, 0.0) + part / rate
        for (way, _, _), seconds in ports.items():
            slowest[way] = max(slowest[way], seconds)
        self._prices[senders, receivers] = (slowest[0], slowest[1], delay)
        return self._prices[senders, receivers]

    def _parts(self, names: tuple[str, ...]) -> list[tuple[str, float, float]]:
        whole, parts, start = sum(self.speeds[name] for name in names), [], 0.0
        for name in names:
            end = start + self.speeds[name] / whole
            parts.append((name, start, end))
            start = end
        return parts
