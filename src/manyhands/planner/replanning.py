"""A plan for the devices there are now, made from the one that ran before some left or joined (ASTEROID §3.4).

light   The old plan, mended: batch, micro-batches and order stay. Samples and tiles are divided anew among those left
        of a stage; a stage with nobody left is dissolved; cuts move to where the round is shortest, each stage's
        devices taken as they are, or where that is much faster one of them in the next or a shared stage in two; a
        device that joins goes where it helps most. Cuts that are nearly as good where they were stay: every layer that
        moves takes its weights along.
heavy   Planned from nothing, as at the start.

What a stage takes is read off `steps.py` (samples) or off the sum of its devices' speeds (tiles, channels), for all its
possible layers at once. With the devices of every stage given, the best cuts follow from the last stage to the first,
by the recurrence of `hybrid.py` and one candidate for each place. The price, a simulation, has the last word, on
memory as well: what it refuses gives way to a simpler shape, down to one device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal

import msgspec
import numpy
from numpy.typing import NDArray

from manyhands.facts.boxes import cut_points
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError, unknown
from manyhands.facts.network import Network
from manyhands.facts.plan import EVERYWHERE, ByChannels, BySamples, ByTiles, LayerName, Plan, Share, Single, Stage
from manyhands.facts.plan_check import group_ops, layer_range, resolve
from manyhands.facts.profile import Profile
from manyhands.planner.shares import Counts, Numbers
from manyhands.planner.simple import proportional
from manyhands.planner.steps import Batch, Ground, StageTable, Steps
from manyhands.planner.strategies import STRATEGIES, choose, plan_by_name
from manyhands.planner.task import Price, Task
from manyhands.planner.tile_plans import grids, tile_shares
from manyhands.planner.tiles import MESSAGE_SECONDS, TilePrices
from manyhands.schedule.tiles import maps_of

How = Literal["light", "heavy"]
WAYS = ("auto", "light", "heavy")
NEAR_IDEAL = 1.25
"""A mended plan within this of the ideal is taken without looking for another."""
WORTH_MOVING = 1.05
"""Cuts stay where they are unless moving them makes the round that much shorter."""
WORTH_JOINING = 1.01
"""A device that shortens the round by less is left out."""
WORTH_REGROUPING = 1.1
"""A device stays in its stage unless the round gets that much shorter with it in the next, or the one before."""
WORTH_DISSOLVING = 1.2
"""The same for the only device of a stage, which then is no more."""
_TINY = 1e-30


@dataclass(frozen=True)
class Replanned:
    """A plan for the present devices: how it was made, why so, and its price."""

    plan: Plan
    how: How
    reason: str
    seconds: float


def replanned(
    plan: Plan,
    network: Network,
    cluster: Cluster,
    profile: Profile,
    *,
    price: Price,
    how: str = "auto",
    strategy: str = "pipeline",
    reference_seconds: float | None = None,
) -> Replanned:
    """The old `plan` for the devices of `cluster`: some of the plan's may be missing, some may be new.

    `profile` knows the present devices, and where it can those that left. `reference_seconds`: what a round of the old
    plan took; in proportion to capacity it says what is to be hoped for now. Without it, that is the work divided
    perfectly among the present devices, with nothing to send, which few plans come near. `strategy`: for a new plan.
    """
    if how not in WAYS:
        raise unknown("way of re-planning", how, WAYS)
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if how == "heavy":
        return _heavy(plan, network, cluster, profile, price, strategy)
    try:
        light = _light(plan, network, cluster, profile, price)
    except ManyhandsError as error:
        if how == "light":
            raise
        heavy = _heavy(plan, network, cluster, profile, price, strategy)
        return replace(heavy, reason=f"The old plan cannot be mended ({error.message}) {heavy.reason}")
    if how == "light":
        return light
    ideal = _ideal_seconds(plan, light.plan, network, cluster, profile, reference_seconds)
    if light.seconds <= NEAR_IDEAL * ideal:
        return light
    far = f"{light.seconds:.3g} s a round, where {ideal:.3g} s was to be hoped for"
    try:
        heavy = _heavy(plan, network, cluster, profile, price, strategy)
    except ManyhandsError as error:
        return replace(light, reason=f"{light.reason} Mended it takes {far}; anew nothing was found ({error.message})")
    if light.seconds <= heavy.seconds:
        return replace(light, reason=f"{light.reason} Mended it takes {far}; anew {heavy.seconds:.3g} s.")
    return replace(heavy, reason=f"Mended, the old plan takes {far}; anew {heavy.seconds:.3g} s. {heavy.reason}")


def _ideal_seconds(
    old: Plan, light: Plan, network: Network, cluster: Cluster, profile: Profile, reference_seconds: float | None
) -> float:
    """What a round would take with the old one's merits. After a loss, a device that neither plan works with does not
    count: it was left out for a reason. Where all are left and one joined, all count."""
    samples, layers = old.micro_batch_size, range(len(network.layers))

    def speed(name: str) -> float:
        seconds = sum(sum(profile.of(name).layer_seconds(layer, samples)) for layer in layers)
        return 1 / max(seconds, _TINY)

    if reference_seconds is None:
        return old.micro_batches / sum(map(speed, cluster.names))
    worked = {name for stage in old.stages for name in stage.devices}
    works = worked | {name for stage in light.stages for name in stage.devices}
    present = [name for name in cluster.names if name in works or worked <= set(cluster.names)]
    known = [speed(name) for name in worked if name in profile.devices]
    usual = sum(known) / len(known) if known else 1.0
    return reference_seconds * (sum(known) + usual * (len(worked) - len(known))) / sum(map(speed, present))


# ---- Heavy


def _heavy(plan: Plan, network: Network, cluster: Cluster, profile: Profile, price: Price, strategy: str) -> Replanned:
    """The named strategy's plan, or where it has none, the best of all."""
    has_statistics = plan.is_training and any(op.statistics for op in network.ops)
    task = Task(
        network, cluster, profile, plan.batch_size,
        micro_batches=plan.micro_batches if has_statistics else None,  # else batch norm would see other batches
        order="1f1b" if plan.order == "eager" else plan.order,
        optimizer_slots=plan.optimizer_slots,
        batch_norm=plan.batch_norm,
        warm_up="2(P-p)-1" if isinstance(plan.warm_up, tuple) else plan.warm_up,
    )  # fmt: skip

    def finished(found: Plan) -> Plan:
        order = "stream" if plan.order == "stream" else found.order
        homes = _homes(plan, found.stages, network, cluster)
        other = msgspec.structs.replace(found, order=order, homes=homes, bucket_bytes=plan.bucket_bytes)
        return resolve(other, network, cluster)

    def whole_price(found: Plan) -> float:
        return price(finished(found))

    refusal: ManyhandsError | None = None
    for name, own, words in _attempts(strategy, task):
        try:
            found = (choose(own, whole_price) if name == "auto" else plan_by_name(name, own, whole_price))[0]
        except ManyhandsError as error:
            refusal = refusal or error
            continue
        if found.plan is None:
            refusal = refusal or BadPlan(found.reason)
            continue
        return Replanned(finished(found.plan), "heavy", f"Planned anew ({found.name}){words}.", found.seconds)
    assert refusal is not None
    raise refusal


def _attempts(strategy: str, task: Task) -> Iterator[tuple[str, Task, str]]:
    """What is tried, with the words for it: the strategy, all of them, and all with another number of micro-batches."""
    count = len(task.cluster.devices)
    yield "single" if count == 1 else strategy, task, ""
    if strategy != "auto" and count > 1:
        yield "auto", task, f": {strategy} has no plan for these {count} devices"
    if task.micro_batches is not None:
        words = f": nothing fits with {task.micro_batches} micro-batches, and batch statistics change with their number"
        yield "auto", replace(task, micro_batches=None), words


def _homes(plan: Plan, stages: Sequence[Stage], network: Network, cluster: Cluster) -> dict[str, str]:
    """An input whose home is lost moves to the first device of the first stage that reads it."""
    found = {}
    for name, home in plan.homes.items():
        if home != EVERYWHERE and home not in cluster.names:
            layer = network.layer_of_op[min(network.readers.get(name, (0,)))]
            home = next(one.devices[0] for one in stages if layer_range(one)[0] <= layer < layer_range(one)[1])
        found[name] = home
    return found


# ---- Light


@dataclass(frozen=True)
class _Crew:
    """The devices of a stage to be, and the old stage they come from; None: a device that joins."""

    devices: tuple[str, ...]
    old: Stage | None
    warm_up: int
    """K_p, where the plan gives one number per stage."""
    is_plain: bool = False
    """Shared by samples, however the old stage was."""

    @property
    def kind(self) -> str:
        if len(self.devices) == 1:
            return "single"
        if self.old is None or self.is_plain:
            return "samples"
        return {ByTiles: "tiles", ByChannels: "channels"}.get(type(self.old.share), "samples")


Crews = tuple[_Crew, ...]


@dataclass(frozen=True)
class _Table:
    """[first, last] -> seconds of a stage of these layers; infinite where it cannot be."""

    forward: Numbers
    backward: Numbers
    reduce: Numbers


class _Part(Ground):
    """A ground for some of its devices."""

    def __init__(self, whole: Ground, names: tuple[str, ...]) -> None:
        self.network, self.cluster, self.names = whole.network, whole.cluster, names
        self.kinds = [whole.kinds[whole.names.index(name)] for name in names]
        self.budgets, self.ladders, self.bytes = whole.budgets, whole.ladders, whole.bytes


def _light(plan: Plan, network: Network, cluster: Cluster, profile: Profile, price: Price) -> Replanned:
    """Of the shapes that the old plan can take, the first that can be cut, resolves and fits."""
    mending = _Mending(plan, network, cluster, profile)
    refusal: ManyhandsError | None = None
    for alternatives in mending.shapes():
        for is_tight in (True, False):  # the model's memory is a little too large; the price knows
            best = min(alternatives, key=lambda crews: mending.cut(crews, is_tight)[0])
            crews = mending.grown(mending.regrouped(best, is_tight), is_tight)
            for cuts in mending.ways_to_cut(crews, is_tight):
                try:
                    found = mending.built(crews, cuts)
                    return Replanned(found, "light", mending.reason(found), price(found))
                except ManyhandsError as error:
                    refusal = refusal or error
    raise refusal or BadPlan(
        f"The plan's devices ({', '.join(plan.devices)}) are not in cluster {cluster.name} any more.",
        hint="Plan anew: how='heavy'.",
    )


class _Mending:
    """One plan and the present devices: which shapes it can take, and what they cost."""

    def __init__(self, plan: Plan, network: Network, cluster: Cluster, profile: Profile) -> None:
        homeless = resolve(msgspec.structs.replace(plan, homes={}), network)
        self.plan = msgspec.structs.replace(homeless, homes=plan.homes)
        self.network, self.cluster, self.profile = network, cluster, profile
        self.layers, self.samples = len(network.layers), plan.micro_batch_size
        is_synchronised = plan.batch_norm == "synchronised"
        warm_up = "2(P-p)-1" if isinstance(plan.warm_up, tuple) else plan.warm_up
        self.batch = Batch(self.samples, plan.micro_batches, plan.optimizer_slots, is_synchronised, warm_up)
        self.ground = Ground(network, cluster, profile, self.samples, plan.optimizer_slots, cluster.names)
        ladders = self.ground.ladders.total
        whole = {name: ladders[kind][self.samples, -1] for name, kind in zip(self.ground.names, self.ground.kinds)}
        self.speeds = {name: 1 / max(float(seconds), _TINY) for name, seconds in whole.items()}
        self._steps: dict[tuple[str, ...], Steps] = {}
        self._tables: dict[tuple[object, ...], _Table] = {}
        self._cuts: dict[tuple[object, ...], tuple[float, tuple[int, ...]]] = {}
        self._prices: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[float, float, float]] = {}
        self._legal: dict[tuple[str, int], NDArray[numpy.bool_]] = {}

    def steps(self, names: tuple[str, ...]) -> Steps:
        if names not in self._steps:
            self._steps[names] = Steps(_Part(self.ground, names), self.batch)
        return self._steps[names]

    # Shapes

    def shapes(self) -> Iterator[list[Crews]]:
        """What the stages may become, the nearest to the old plan first; of alternatives the fastest is taken."""
        old = [self._crew(index) for index in range(len(self.plan.stages))]
        left = tuple(crew for crew in old if crew.devices)
        if not left:
            return
        if len(self.cluster.names) > 1:
            refilled = self._refilled(old) if len(left) < len(old) else []
            working = [name for stage in self.plan.stages for name in stage.devices]
            is_shared = len(working) > len(set(working))  # by tiles, and its tail on one of them: as before
            yield from filter(None, [refilled, [left]] if is_shared else [[left], refilled])
            fair = tuple(self._fair(crew) for crew in left)
            if fair != left:
                yield [fair]
            everybody = self._fair(replace(left[0], devices=tuple(dict.fromkeys(n for c in left for n in c.devices))))
            if len(left) > 1 and len(everybody.devices) > 1:
                yield [(everybody,)]
        everywhere = (name for crew in left for name in crew.devices)
        yield [(replace(left[0], devices=(max(everywhere, key=self.speeds.__getitem__),)),)]

    def _crew(self, index: int) -> _Crew:
        stage = self.plan.stages[index]
        devices = tuple(name for name in stage.devices if name in self.cluster.names)
        return _Crew(devices, stage, self.plan.warm_up_of(index))

    def _fair(self, crew: _Crew) -> _Crew:
        """The same devices by samples, as many as a micro-batch has samples for: the fastest."""
        chosen = sorted(crew.devices, key=self.speeds.__getitem__, reverse=True)[: self.samples]
        return replace(crew, devices=tuple(name for name in crew.devices if name in chosen), is_plain=True)

    def _refilled(self, old: list[_Crew]) -> list[Crews]:
        """Stages that nobody is left of get one device of another: shared where the order lets it, else for good."""
        found: list[list[_Crew]] = [old]
        while any(not crew.devices for crew in found[0]):
            place = next(place for place, crew in enumerate(found[0]) if not crew.devices)
            further = []
            for crews in found:
                if self.plan.may_repeat_devices:
                    fastest = max((n for crew in crews for n in crew.devices), key=self.speeds.__getitem__)
                    further.append([*crews[:place], replace(crews[place], devices=(fastest,)), *crews[place + 1 :]])
                    continue
                for giver, crew in enumerate(crews):
                    if len(crew.devices) > 1:
                        other = list(crews)
                        other[place] = replace(crews[place], devices=crew.devices[-1:])
                        other[giver] = replace(crew, devices=crew.devices[:-1])
                        further.append(other)
            if not further:
                return []
            found = further
        return [tuple(crews) for crews in found]

    def regrouped(self, crews: Crews, is_tight: bool) -> Crews:
        """After a loss, with one device in the stage beside its own or a shared stage in two, where that is much
        faster."""
        if all(name in self.cluster.names for name in self.plan.devices):
            return crews
        least, best = self.cut(crews, is_tight)[0], crews
        for other in self._shifted(crews):
            worth = WORTH_DISSOLVING if len(other) < len(crews) else WORTH_REGROUPING
            seconds = worth * self.cut(other, is_tight)[0]
            if seconds < least:
                least, best = seconds, other
        return best

    def _shifted(self, crews: Crews) -> Iterator[Crews]:
        for place in range(len(crews) - 1):
            for giver, taker in ((place, place + 1), (place + 1, place)):
                name = crews[giver].devices[-1 if giver < taker else 0]
                less = tuple(one for one in crews[giver].devices if one != name)
                more = replace(crews[taker], devices=(*crews[taker].devices, name))
                is_plain = {crews[giver].kind, more.kind} <= {"single", "samples"}
                if is_plain and name not in crews[taker].devices and len(more.devices) <= self.samples:
                    changed = {giver: replace(crews[giver], devices=less), taker: more}
                    found = (changed.get(index, crew) for index, crew in enumerate(crews))
                    yield tuple(crew for crew in found if crew.devices)
        for place, crew in enumerate(crews):
            for size in range(1, len(crew.devices) if crew.kind == "samples" else 0):
                halves = replace(crew, devices=crew.devices[:size]), _Crew(crew.devices[size:], None, crew.warm_up)
                yield (*crews[:place], *halves, *crews[place + 1 :])

    def grown(self, crews: Crews, is_tight: bool) -> Crews:
        """With the devices that joined, or that the old plan had no use for: each where the round gets shortest."""
        seconds = self.cut(crews, is_tight)[0]
        if len(self.cluster.names) == 1:
            return crews
        useless: set[int] = set()
        taken = {*self.plan.devices, *(name for crew in crews for name in crew.devices)}
        joining = [name for name in self.cluster.names if name not in taken]
        for name in sorted(joining, key=self.speeds.__getitem__, reverse=True):
            kind = self.ground.kinds[self.ground.names.index(name)]
            if kind in useless:
                continue
            tried = [(self.cut(other, is_tight)[0], other) for other in self._joined(crews, name)]
            best = min(tried, key=lambda one: one[0])
            if best[0] * WORTH_JOINING <= seconds and best[0] < inf:
                seconds, crews = best
            else:
                useless.add(kind)
        return crews

    def _joined(self, crews: Crews, name: str) -> Iterator[Crews]:
        """One more device: in each stage, or as a stage of its own at each place."""
        for place, crew in enumerate(crews):
            more = replace(crew, devices=(*crew.devices, name))
            if more.kind != "samples" or len(more.devices) <= self.samples:
                yield (*crews[:place], more, *crews[place + 1 :])
        for place in range(len(crews) + 1):
            warm_up = crews[min(place, len(crews) - 1)].warm_up
            yield (*crews[:place], _Crew((name,), None, warm_up), *crews[place:])

    # Cuts

    def ways_to_cut(self, crews: Crews, is_tight: bool) -> list[tuple[int, ...]]:
        """The old cuts where they are about as good as the best, or where the model knows little; else the best."""
        seconds, best = self.cut(crews, is_tight)
        if not best:
            return []
        old = [layer_range(crew.old) for crew in crews if crew.old is not None]
        kept = tuple(last for _, last in old)
        if len(old) < len(crews) or (0, *kept[:-1]) != tuple(first for first, _ in old) or kept[-1] != self.layers:
            return [best]  # a stage is new, or one was dissolved
        kept_seconds = self.cut(crews, is_tight, kept)[0]
        is_divided = any(crew.kind in ("tiles", "channels") for crew in crews)
        if kept_seconds <= (inf if is_divided else WORTH_MOVING * seconds) and kept_seconds < inf:
            return [kept, best]
        return [best]

    def cut(self, crews: Crews, is_tight: bool, only: tuple[int, ...] | None = None) -> tuple[float, tuple[int, ...]]:
        """Seconds of a round and where each stage ends; no ends: it cannot be. `only`: with these ends."""
        key = (tuple((crew.devices, crew.kind, crew.warm_up) for crew in crews), is_tight, only)
        if key not in self._cuts:
            self._cuts[key] = self._cut(crews, is_tight, only)
        return self._cuts[key]

    def _cut(self, crews: Crews, is_tight: bool, only: tuple[int, ...] | None) -> tuple[float, tuple[int, ...]]:
        count = self.plan.micro_batches
        names = [name for crew in crews for name in crew.devices]
        is_overlapped = self.plan.order != "sequential" and len(names) == len(set(names))
        if len(names) != len(set(names)) and not self.plan.may_repeat_devices:
            return inf, ()
        longest, ending = numpy.full(self.layers + 1, inf), numpy.zeros(self.layers + 1)
        choices: list[Counts] = []
        for place in range(len(crews) - 1, -1, -1):
            table = self._table(crews[place], self._ahead(crews, place), is_tight)
            own = table.forward + table.backward
            if place == len(crews) - 1:
                ahead = back = numpy.zeros(self.layers + 1)
                behind, behind_ending = numpy.full(self.layers + 1, inf), ending
                behind[-1] = 0.0
            else:
                ahead, back = self._cut_seconds(crews[place].devices, crews[place + 1].devices)
                behind, behind_ending = longest, ending
            crossing = ahead + back
            if is_overlapped:
                total = numpy.maximum(numpy.maximum(count * own, count * crossing + own), behind + own + crossing)
            else:
                total = count * (own + crossing) + behind
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

    def _ahead(self, crews: Crews, place: int) -> int:
        """How many micro-batches a stage holds at once."""
        if self.plan.order in ("sequential", "stream"):
            return 1
        if self.plan.order == "gpipe":
            return self.plan.micro_batches
        if isinstance(self.plan.warm_up, tuple):
            return crews[place].warm_up
        return self.batch.ahead(len(crews) - place)

    @cached_property
    def _ranges(self) -> tuple[Counts, Counts]:
        """First and last of all runs of layers."""
        first, last = numpy.triu_indices(self.layers + 1, 1)
        return first, last

    def _table(self, crew: _Crew, ahead: int, is_tight: bool) -> _Table:
        key = (crew.devices, crew.kind, ahead, is_tight)
        if key not in self._tables:
            divided = crew.kind in ("tiles", "channels")
            table = self._divided(crew, ahead, is_tight) if divided else self._shared(crew, ahead, is_tight)
            illegal = ~self._is_legal(crew.kind, len(crew.devices))
            table.forward[illegal] = inf
            self._tables[key] = table
        return self._tables[key]

    def _empty(self) -> _Table:
        shape = (self.layers + 1, self.layers + 1)
        return _Table(numpy.full(shape, inf), numpy.zeros(shape), numpy.zeros(shape))

    def _shared(self, crew: _Crew, ahead: int, is_tight: bool) -> _Table:
        """By samples, with the best shares of every run of layers."""
        found = self._empty()
        if len(crew.devices) > self.samples:
            return found
        first, last = self._ranges
        lines = self._solved(crew, first, last, ahead, is_tight)
        place = (lines.first, lines.last)
        found.forward[place], found.backward[place] = lines.forward, lines.backward
        if self.plan.is_training:
            found.reduce[place] = lines.reduce
        else:
            found.backward[place] = 0.0
        return found

    def _solved(self, crew: _Crew, first: Counts, last: Counts, ahead: int, is_tight: bool) -> StageTable:
        steps = self.steps(crew.devices)
        group = numpy.full(len(first), steps.groups.index((0, len(crew.devices))))
        lines = steps.stages(first, last, group)
        return steps.within_memory(lines, ahead) if is_tight else lines

    def _divided(self, crew: _Crew, ahead: int, is_tight: bool) -> _Table:
        """Every operator divided in proportion to speed; an exchange at every layer, forward and backward."""
        found = self._empty()
        first, last = self._ranges
        ground, names = self.ground, crew.devices
        kinds = [ground.kinds[ground.names.index(name)] for name in names]
        between = self.cluster.bytes_per_second_between
        rate = min(between(a, b) for a in names for b in names if a != b)
        delay = max(self.cluster.link_between(a, b).delay_seconds for a in names for b in names if a != b)
        exchanges = (last - first) * (delay + MESSAGE_SECONDS)
        for matrix, tables in ((found.forward, ground.ladders.forward), (found.backward, ground.ladders.backward)):
            rows = [tables[kind][self.samples] for kind in kinds]
            speed = sum(1 / numpy.maximum(row[last] - row[first], _TINY) for row in rows)
            matrix[first, last] = 1 / speed + exchanges
        weights = ground.bytes.trained
        found.reduce[first, last] = 2 * (weights[last] - weights[first]) / rate + 2 * delay
        if not self.plan.is_training:
            found.backward[:], found.reduce[:] = 0.0, 0.0
        if is_tight:
            fixed, each = self.steps(names[:1]).memory(first, last, ahead)
            whole = sum(self.speeds[name] for name in names)
            for name, kind in zip(names, kinds):
                part = self.speeds[name] / whole * self.samples
                is_over = fixed + each * part > ground.budgets[kind]
                found.forward[first[is_over], last[is_over]] = inf
        return found

    def _is_legal(self, kind: str, size: int) -> NDArray[numpy.bool_]:
        """[first, last]: whether a stage of these layers may be shared so, as the checker of plans sees it."""
        if (kind, size) in self._legal:
            return self._legal[kind, size]
        network, count = self.network, self.layers + 1
        found = numpy.triu(numpy.ones((count, count), bool), 1)
        found &= self._may_cut[:, None] & self._may_cut[None, :]
        is_synchronised = self.plan.batch_norm == "synchronised"
        if kind == "samples":
            found &= self._none_of(lambda op: network.ops[op].mixes_samples)
            if network.loss_combination == "whole" and self.plan.is_training:
                found[:, -1] = False
            if self.plan.order == "eager" and is_synchronised:
                found &= self._none_of(lambda op: network.ops[op].statistics > 0)
        elif kind in ("tiles", "channels"):
            found &= self.plan.order != "eager"
        if kind == "tiles":
            for first in range(self.layers):
                _, obstacle = maps_of(network, network.layers[first].first, len(network.ops))
                end = self.layers if obstacle is None else network.layer_of_op[obstacle]
                found[first, end + 1 :] = False
        self._legal[kind, size] = found
        return found

    def _none_of(self, is_one: Callable[[int], bool]) -> NDArray[numpy.bool_]:
        """[first, last]: whether no operator of these layers is one of them."""
        each = [any(is_one(op) for op in range(layer.first, layer.last)) for layer in self.network.layers]
        sums = numpy.concatenate([[0], numpy.cumsum(each)])
        found: NDArray[numpy.bool_] = sums[None, :] == sums[:, None]
        return found

    @cached_property
    def _may_cut(self) -> NDArray[numpy.bool_]:
        """Before which layers a stage may start: not between two that change the same weight."""
        found = numpy.ones(self.layers + 1, bool)
        written = {name for op in self.network.ops for name in op.writes}
        first_use: dict[str, int] = {}
        for index, layer in enumerate(self.network.layers):
            for name in self.network.weights_of(layer.first, layer.last):
                if self.network.weights[name].trainable or name in written:
                    found[first_use.setdefault(name, index) + 1 : index + 1] = False
        return found

    def _cut_seconds(self, one: tuple[str, ...], other: tuple[str, ...]) -> tuple[Numbers, Numbers]:
        """For every layer, what crosses the cut before it takes forward and backward, for a micro-batch."""
        ahead, back, delay = self._between(one, other)
        crossing, returning = (self.ground.bytes.crossing * self.samples, self.ground.bytes.returning * self.samples)
        backward = returning * back * self.plan.is_training
        return crossing * ahead + delay, numpy.where(backward > 0, backward + delay, 0.0)

    def _between(self, one: tuple[str, ...], other: tuple[str, ...]) -> tuple[float, float, float]:
        """Seconds for a byte of all that two groups exchange, there and back, and the delay: the slowest link or port,
        each device's part by its speed."""
        if (one, other) in self._prices:
            return self._prices[one, other]
        slowest, delay = [0.0, 0.0], 0.0
        ports: dict[tuple[int, str, str], float] = {}
        for a, start, end in self._parts(one):
            for b, low, high in self._parts(other):
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
        self._prices[one, other] = (slowest[0], slowest[1], delay)
        return self._prices[one, other]

    def _parts(self, names: tuple[str, ...]) -> list[tuple[str, float, float]]:
        whole, found, start = sum(self.speeds[name] for name in names), [], 0.0
        for name in names:
            end = start + self.speeds[name] / whole
            found.append((name, start, end))
            start = end
        return found

    # Plans

    def built(self, crews: Crews, ends: tuple[int, ...]) -> Plan:
        """The plan of these stages, checked."""
        stages: list[Stage] = []
        for place, (crew, first, last) in enumerate(zip(crews, (0, *ends), ends)):
            old = crew.old or Stage((first, last), ())
            devices, share = self._share(crew, first, last, self._ahead(crews, place))
            stages.append(msgspec.structs.replace(old, layers=(first, last), devices=devices, share=share))
        plan = msgspec.structs.replace(
            self.plan,
            stages=tuple(stages),
            warm_up=tuple(crew.warm_up for crew in crews)
            if isinstance(self.plan.warm_up, tuple)
            else self.plan.warm_up,
            homes=_homes(self.plan, stages, self.network, self.cluster),
        )
        for place, crew in enumerate(crews):
            if crew.kind == "tiles":
                plan = self._best_grid(plan, place, crew)
        return resolve(plan, self.network, self.cluster)

    def _share(self, crew: _Crew, first: int, last: int, ahead: int) -> tuple[tuple[str, ...], Share]:
        if crew.kind == "samples":
            return self._samples(crew, first, last, ahead)
        if crew.kind == "channels":
            fastest = max(self.speeds[name] for name in crew.devices)
            groups = proportional(16 * len(crew.devices), [self.speeds[name] / fastest for name in crew.devices])
            return crew.devices, ByChannels(tuple(max(1, one) for one in groups))
        return crew.devices, Single()  # tiles get theirs when the stages are known

    def _samples(self, crew: _Crew, first: int, last: int, ahead: int) -> tuple[tuple[str, ...], Share]:
        """The best shares; with batch norm by device, none so small that it has no statistics."""
        least = self._least_samples(first, last)
        names = crew.devices
        if len(names) * least > self.samples:
            kept = sorted(names, key=self.speeds.__getitem__, reverse=True)[: max(1, self.samples // least)]
            names = tuple(name for name in names if name in kept)
        if len(names) == 1:
            return names, Single()
        one = replace(crew, devices=names)
        place = numpy.array([first]), numpy.array([last])
        lines = self._solved(one, *place, ahead, is_tight=True)
        if not len(lines):
            lines = self._solved(one, *place, ahead, is_tight=False)
        steps = self.steps(names)
        left = lines.shares.of(0, [int(number) for number in steps.counts[lines.group[0]]])
        counts = [left[kind].pop(0) for kind in steps.kinds]
        while min(counts) < least:
            counts[counts.index(max(counts))] -= 1
            counts[counts.index(min(counts))] += 1
        return names, BySamples(tuple(counts))

    def _least_samples(self, first: int, last: int) -> int:
        if self.plan.batch_norm != "local" or not self.plan.is_training:
            return 1
        layers = self.network.layers
        for op in self.network.ops[layers[first].first : layers[last - 1].last]:
            if op.statistics and self.network.tensors[op.inputs[0]].elements // op.statistics <= 1:
                return 2
        return 1

    def _best_grid(self, plan: Plan, place: int, crew: _Crew) -> Plan:
        """Rows and columns by capacity; of the grids that so many devices can make, the one with the least price."""
        stage, network = plan.stages[place], self.network
        first, last = layer_range(stage)
        start = network.ops[network.layers[first].first]
        shape = network.tensors[start.inputs[0]].shape if start.inputs else ()
        height, width = shape[2:] if len(shape) == 4 else (len(crew.devices),) * 2
        speeds = [self.speeds[name] for name in crew.devices]
        assert crew.old is not None
        old = crew.old.share
        assert isinstance(old, ByTiles)
        groups = [self._groups(own, crew.old, first, last) for own in (old.forward_groups, old.backward_groups)]
        early = self._inside(old.interior_first, first, last)
        possible: list[Plan] = []
        for count in grids(len(crew.devices)):
            if (count[0] - count[1]) * (height - width) < 0 or (height == width and count[0] < count[1]):
                continue  # the longer side is cut more often
            by_row = [sum(speeds[r * count[1] : (r + 1) * count[1]]) for r in range(count[0])]
            by_column = [sum(speeds[c :: count[1]]) for c in range(count[1])]
            rows, columns = tile_shares(by_row, height), tile_shares(by_column, width)
            if any(a == b for own in ((height, rows), (width, columns)) for a, b in pairwise(cut_points(*own))):
                continue  # a tile with nothing in it
            changed = msgspec.structs.replace(stage, share=ByTiles(rows, columns, groups[0], groups[1], early))
            tried = msgspec.structs.replace(plan, stages=(*plan.stages[:place], changed, *plan.stages[place + 1 :]))
            possible.append(tried)
        if not possible:
            raise BadPlan(
                f"stages[{place}]: maps of {height} x {width} cannot be cut into tiles for {len(crew.devices)} devices."
            )
        if len(possible) == 1:
            return possible[0]
        prices = [TilePrices(tried, place, network, self.cluster, self.profile) for tried in possible]
        return min(zip(prices, possible), key=lambda one: one[0].every_layer().seconds)[1]

    def _inside(self, names: tuple[LayerName, ...], first: int, last: int) -> tuple[LayerName, ...]:
        """Of layers and operators, those within a stage."""
        layers, ops = self.network.layers, group_ops(names, self.network)
        low, high = layers[first].first, layers[last - 1].last
        return tuple(name for name, op in zip(names, ops) if low <= op < high)

    def _groups(
        self, groups: tuple[LayerName, ...] | None, old: Stage, first: int, last: int
    ) -> tuple[LayerName, ...] | None:
        """The old groups that lie in the stage; layers that are new to it have one each."""
        if groups is None:
            return None
        start, end = layer_range(old)
        before = range(first, min(start, last))
        after = range(max(end, first), last)
        kept = self._inside(groups, first, last)
        found = dict(zip(group_ops((*before, *kept, *after), self.network), (*before, *kept, *after)))
        found.setdefault(self.network.layers[first].first, first)
        return tuple(found[op] for op in sorted(found))

    def reason(self, plan: Plan) -> str:
        """What was done to the old plan, for a person."""
        old, new = self.plan, plan
        words = []
        gone = [name for name in old.devices if name not in self.cluster.names]
        if gone:
            words.append(f"without {', '.join(gone)}")
        joined = [name for name in new.devices if name not in old.devices]
        if joined:
            words.append(f"with {', '.join(joined)}")
        if len(old.stages) != len(new.stages):
            words.append(f"{len(new.stages)} stage(s) instead of {len(old.stages)}")
        cuts = [tuple(layer_range(stage)[1] for stage in one.stages[:-1]) for one in (old, new)]
        if cuts[0] != cuts[1]:
            shown = [", ".join(map(str, one)) or "none" for one in cuts]
            words.append(f"cuts {shown[1]} instead of {shown[0]}")
        idle = [name for name in self.cluster.names if name not in new.devices]
        if idle:
            words.append(f"{', '.join(idle)} would not help")
        return f"The old plan, mended: {'; '.join(words) or 'nothing had to change'}."
