"""Incremental re-planning: the shapes that an old plan can take on the present devices, and the plans made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import msgspec
import numpy

from manyhands.facts.boxes import cut_points
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import EVERYWHERE, ByChannels, BySamples, ByTiles, LayerName, Plan, Share, Single, Stage
from manyhands.facts.plan_check import group_ops, layer_range, resolve
from manyhands.planner.cutting import Cutting, StageDraft, StageDrafts
from manyhands.planner.simple import proportional
from manyhands.planner.tile_plans import cuts_longer_sides, grids, share_of, tile_sizes
from manyhands.planner.tiles import TilePrices

WORTH_MOVING = 1.05
"""Cuts stay where they are unless moving them makes the round shorter by this factor."""
WORTH_JOINING = 1.01
"""A device that shortens the round by less than this factor is left out."""
WORTH_REGROUPING = 1.1
"""A device stays in its stage unless the round gets shorter by this factor with it in a neighbouring stage."""
WORTH_DISSOLVING = 1.2
"""The same for the only device of a stage, which is then dissolved."""


def homes_for(plan: Plan, stages: Sequence[Stage], network: Network, cluster: Cluster) -> dict[str, str]:
    """Return the homes of the inputs: one whose device is lost moves to the first device of the first stage that reads
    it."""
    homes = {}
    for name, home in plan.homes.items():
        if home != EVERYWHERE and home not in cluster.names:
            layer = network.layer_of_op[min(network.readers.get(name, (0,)))]
            home = next(stage.devices[0] for stage in stages if layer_range(stage)[0] <= layer < layer_range(stage)[1])
        homes[name] = home
    return homes


class IncrementalReplanner(Cutting):
    """The shapes that one plan can take on a cluster that has changed."""

    # Shapes

    def shapes(self) -> Iterator[list[StageDrafts]]:
        """Yield what the stages may become, the nearest to the old plan first; among alternatives the caller takes the
        fastest."""
        old = [self._draft(index) for index in range(len(self.plan.stages))]
        remaining = tuple(draft for draft in old if draft.devices)
        if not remaining:
            return
        if len(self.cluster.names) > 1:
            refilled = self._refilled(old) if len(remaining) < len(old) else []
            working = [name for stage in self.plan.stages for name in stage.devices]
            is_shared = len(working) > len(set(working))  # by tiles, and its tail on one of them: as before
            yield from filter(None, [refilled, [remaining]] if is_shared else [[remaining], refilled])
            fair = tuple(self._fair(draft) for draft in remaining)
            if fair != remaining:
                yield [fair]
            all_devices = self._fair(
                replace(remaining[0], devices=tuple(dict.fromkeys(n for c in remaining for n in c.devices)))
            )
            if len(remaining) > 1 and len(all_devices.devices) > 1:
                yield [(all_devices,)]
        everywhere = (name for draft in remaining for name in draft.devices)
        yield [(replace(remaining[0], devices=(max(everywhere, key=self.speeds.__getitem__),)),)]

    def _draft(self, index: int) -> StageDraft:
        stage = self.plan.stages[index]
        devices = tuple(name for name in stage.devices if name in self.cluster.names)
        return StageDraft(devices, stage, self.plan.warm_up_of(index))

    def _fair(self, draft: StageDraft) -> StageDraft:
        """Return the same devices shared by samples: the fastest, as many as a micro-batch has samples for."""
        chosen = sorted(draft.devices, key=self.speeds.__getitem__, reverse=True)[: self.samples]
        return replace(draft, devices=tuple(name for name in draft.devices if name in chosen), is_plain=True)

    def _refilled(self, old: list[StageDraft]) -> list[StageDrafts]:
        """Return the stages with one device given to each stage that lost all of its own: shared where the order allows
        that, else moved."""
        alternatives: list[list[StageDraft]] = [old]
        while any(not draft.devices for draft in alternatives[0]):
            place = next(place for place, draft in enumerate(alternatives[0]) if not draft.devices)
            further = []
            for drafts in alternatives:
                if self.plan.may_repeat_devices:
                    fastest = max((n for draft in drafts for n in draft.devices), key=self.speeds.__getitem__)
                    further.append([*drafts[:place], replace(drafts[place], devices=(fastest,)), *drafts[place + 1 :]])
                    continue
                for giver, draft in enumerate(drafts):
                    if len(draft.devices) > 1:
                        other = list(drafts)
                        other[place] = replace(drafts[place], devices=draft.devices[-1:])
                        other[giver] = replace(draft, devices=draft.devices[:-1])
                        further.append(other)
            if not further:
                return []
            alternatives = further
        return [tuple(drafts) for drafts in alternatives]

    def regrouped(self, drafts: StageDrafts, is_tight: bool) -> StageDrafts:
        """Return the stages with one device moved to a neighbour, or a shared stage split in two, where that makes the
        round much faster after a loss."""
        if all(name in self.cluster.names for name in self.plan.devices):
            return drafts
        least, best = self.cut(drafts, is_tight)[0], drafts
        for other in self._shifted(drafts):
            worth = WORTH_DISSOLVING if len(other) < len(drafts) else WORTH_REGROUPING
            seconds = worth * self.cut(other, is_tight)[0]
            if seconds < least:
                least, best = seconds, other
        return best

    def _shifted(self, drafts: StageDrafts) -> Iterator[StageDrafts]:
        for place in range(len(drafts) - 1):
            for giver, taker in ((place, place + 1), (place + 1, place)):
                name = drafts[giver].devices[-1 if giver < taker else 0]
                less = tuple(device for device in drafts[giver].devices if device != name)
                more = replace(drafts[taker], devices=(*drafts[taker].devices, name))
                is_plain = {drafts[giver].kind, more.kind} <= {"single", "samples"}
                if is_plain and name not in drafts[taker].devices and len(more.devices) <= self.samples:
                    changed = {giver: replace(drafts[giver], devices=less), taker: more}
                    shifted = (changed.get(index, draft) for index, draft in enumerate(drafts))
                    yield tuple(draft for draft in shifted if draft.devices)
        for place, draft in enumerate(drafts):
            for size in range(1, len(draft.devices) if draft.kind == "samples" else 0):
                halves = (
                    replace(draft, devices=draft.devices[:size]),
                    StageDraft(draft.devices[size:], None, draft.warm_up),
                )
                yield (*drafts[:place], *halves, *drafts[place + 1 :])

    def grown(self, drafts: StageDrafts, is_tight: bool) -> StageDrafts:
        """Return the stages with the devices that joined or were unused before, each where the round gets shortest."""
        seconds = self.cut(drafts, is_tight)[0]
        if len(self.cluster.names) == 1:
            return drafts
        useless: set[int] = set()
        used = {*self.plan.devices, *(name for draft in drafts for name in draft.devices)}
        joining = [name for name in self.cluster.names if name not in used]
        for name in sorted(joining, key=self.speeds.__getitem__, reverse=True):
            kind = self.context.kinds[self.context.names.index(name)]
            if kind in useless:
                continue
            options = [(self.cut(other, is_tight)[0], other) for other in self._joined(drafts, name)]
            best = min(options, key=lambda entry: entry[0])
            if best[0] * WORTH_JOINING <= seconds and best[0] < inf:
                seconds, drafts = best
            else:
                useless.add(kind)
        return drafts

    def _joined(self, drafts: StageDrafts, name: str) -> Iterator[StageDrafts]:
        """Yield the stages with one more device: in each stage, or as a stage of its own at each place."""
        for place, draft in enumerate(drafts):
            more = replace(draft, devices=(*draft.devices, name))
            if more.kind != "samples" or len(more.devices) <= self.samples:
                yield (*drafts[:place], more, *drafts[place + 1 :])
        for place in range(len(drafts) + 1):
            warm_up = drafts[min(place, len(drafts) - 1)].warm_up
            yield (*drafts[:place], StageDraft((name,), None, warm_up), *drafts[place:])

    def ways_to_cut(self, drafts: StageDrafts, is_tight: bool) -> list[tuple[int, ...]]:
        """Return the cuts to try: the old ones where they are nearly as good as the best, or where the model is
        uncertain."""
        seconds, best = self.cut(drafts, is_tight)
        if not best:
            return []
        old = [layer_range(draft.old) for draft in drafts if draft.old is not None]
        old_ends = tuple(last for _, last in old)
        if (
            len(old) < len(drafts)
            or (0, *old_ends[:-1]) != tuple(first for first, _ in old)
            or old_ends[-1] != self.layers
        ):
            return [best]  # a stage is new, or one was dissolved
        kept_seconds = self.cut(drafts, is_tight, old_ends)[0]
        is_divided = any(draft.kind in ("tiles", "channels") for draft in drafts)
        if kept_seconds <= (inf if is_divided else WORTH_MOVING * seconds) and kept_seconds < inf:
            return [old_ends, best]
        return [best]

    # Plans

    def built(self, drafts: StageDrafts, ends: tuple[int, ...]) -> Plan:
        """Return the plan of these stages, checked."""
        stages: list[Stage] = []
        for place, (draft, first, last) in enumerate(zip(drafts, (0, *ends), ends)):
            old = draft.old or Stage((first, last), ())
            devices, share = self._share(draft, first, last, self._ahead(drafts, place))
            stages.append(msgspec.structs.replace(old, layers=(first, last), devices=devices, share=share))
        plan = msgspec.structs.replace(
            self.plan,
            stages=tuple(stages),
            warm_up=tuple(draft.warm_up for draft in drafts)
            if isinstance(self.plan.warm_up, tuple)
            else self.plan.warm_up,
            homes=homes_for(self.plan, stages, self.network, self.cluster),
        )
        for place, draft in enumerate(drafts):
            if draft.kind == "tiles":
                plan = self._best_grid(plan, place, draft)
        return resolve(plan, self.network, self.cluster)

    def _share(self, draft: StageDraft, first: int, last: int, ahead: int) -> tuple[tuple[str, ...], Share]:
        if draft.kind == "samples":
            return self._samples(draft, first, last, ahead)
        if draft.kind == "channels":
            return self._channels(draft, first, last)
        return draft.devices, Single()  # tiles get theirs when the stages are known

    def _channels(self, draft: StageDraft, first: int, last: int) -> tuple[tuple[str, ...], Share]:
        """Return as many channel groups as before, by speed, at least one each; with fewer groups than devices, the
        fastest ones."""
        assert draft.old is not None
        old = draft.old.share
        assert isinstance(old, ByChannels)
        total = sum(old.groups)
        chosen = sorted(draft.devices, key=self.speeds.__getitem__, reverse=True)[:total]
        names = tuple(name for name in draft.devices if name in chosen)
        if len(names) == 1:
            return names, Single()
        more = proportional(total - len(names), [self.speeds[name] for name in names])
        based = None if old.input_based is None else self._inside(old.input_based, first, last)
        everywhere = self._inside(old.everywhere, first, last)
        return names, ByChannels(tuple(1 + extra for extra in more), based, everywhere)

    def _samples(self, draft: StageDraft, first: int, last: int, ahead: int) -> tuple[tuple[str, ...], Share]:
        """Return the best shares; with batch norm per device, none is too small to have statistics."""
        least = self._least_samples(first, last)
        names = draft.devices
        if len(names) * least > self.samples:
            fastest = sorted(names, key=self.speeds.__getitem__, reverse=True)[: max(1, self.samples // least)]
            names = tuple(name for name in names if name in fastest)
        if len(names) == 1:
            return names, Single()
        chosen = replace(draft, devices=names)
        place = numpy.array([first]), numpy.array([last])
        lines = self._solved(chosen, *place, ahead, is_tight=True)
        if not len(lines):
            lines = self._solved(chosen, *place, ahead, is_tight=False)
        steps = self.steps(names)
        counts_by_kind = lines.shares.of(0, [int(number) for number in steps.counts[lines.group[0]]])
        counts = [counts_by_kind[kind].pop(0) for kind in steps.kinds]
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

    def _best_grid(self, plan: Plan, place: int, draft: StageDraft) -> Plan:
        """Return the plan with rows and columns by capacity, in the cheapest grid that so many devices can make.

        Where a map is too small for a tile each, the slowest are left out.
        """
        by_speed = sorted(draft.devices, key=self.speeds.__getitem__, reverse=True)
        for count in range(len(by_speed), 1, -1):
            chosen = tuple(name for name in draft.devices if name in by_speed[:count])
            possible = self._gridded(plan, place, replace(draft, devices=chosen))
            if len(possible) == 1:
                return possible[0]
            if possible:
                prices = [
                    TilePrices(candidate, place, self.network, self.cluster, self.profile) for candidate in possible
                ]
                return min(zip(prices, possible), key=lambda entry: entry[0].every_layer().seconds)[1]
        height, width = self._map_of(plan.stages[place], len(draft.devices))
        raise BadPlan(
            f"stages[{place}]: maps of {height} x {width} cannot be cut into tiles for {len(draft.devices)} devices."
        )

    def _map_of(self, stage: Stage, count: int) -> tuple[int, ...]:
        """Return the extents of the map that a stage begins with, or `count` rows and columns where it begins with
        none."""
        image = self.network.first_map(self.network.layers[layer_range(stage)[0]].first)
        return (count, count) if image is None else self.network.extents(image.name)

    def _gridded(self, plan: Plan, place: int, draft: StageDraft) -> list[Plan]:
        """Return the plan with a stage on every grid that its devices can make; grids with an empty tile are left
        out."""
        stage = plan.stages[place]
        first, last = layer_range(stage)
        extents = self._map_of(stage, len(draft.devices))
        speeds = [self.speeds[name] for name in draft.devices]
        assert draft.old is not None
        old = draft.old.share
        assert isinstance(old, ByTiles)
        groups = [self._groups(starts, draft.old, first, last) for starts in (old.forward_groups, old.backward_groups)]
        early = self._inside(old.interior_first, first, last)
        possible: list[Plan] = []
        for grid in grids(len(draft.devices), len(extents)):
            sizes = tile_sizes(grid, speeds, extents)
            if not cuts_longer_sides(grid, extents) or any(
                a == b for extent, weights in zip(extents, sizes) for a, b in pairwise(cut_points(extent, weights))
            ):
                continue
            share = msgspec.structs.replace(
                share_of(sizes), forward_groups=groups[0], backward_groups=groups[1], interior_first=early
            )
            changed = msgspec.structs.replace(stage, devices=draft.devices, share=share)
            gridded = msgspec.structs.replace(plan, stages=(*plan.stages[:place], changed, *plan.stages[place + 1 :]))
            possible.append(gridded)
        return possible

    def _inside(self, names: tuple[LayerName, ...], first: int, last: int) -> tuple[LayerName, ...]:
        """Return the layers and operators that lie within a stage."""
        layers, ops = self.network.layers, group_ops(names, self.network)
        low, high = layers[first].first, layers[last - 1].last
        return tuple(name for name, op in zip(names, ops) if low <= op < high)

    def _groups(
        self, groups: tuple[LayerName, ...] | None, old: Stage, first: int, last: int
    ) -> tuple[LayerName, ...] | None:
        """Return the old groups that lie in the stage; layers that are new to it get one group each."""
        if groups is None:
            return None
        start, end = layer_range(old)
        before = range(first, min(start, last))
        after = range(max(end, first), last)
        inside = self._inside(groups, first, last)
        starts_by_op = dict(zip(group_ops((*before, *inside, *after), self.network), (*before, *inside, *after)))
        starts_by_op.setdefault(self.network.layers[first].first, first)
        return tuple(starts_by_op[op] for op in sorted(starts_by_op))

    def reason(self, plan: Plan) -> str:
        """Return in words what was changed in the old plan."""
        old, new = self.plan, plan
        words = []
        lost = [name for name in old.devices if name not in self.cluster.names]
        if lost:
            words.append(f"without {', '.join(lost)}")
        joined = [name for name in new.devices if name not in old.devices]
        if joined:
            words.append(f"with {', '.join(joined)}")
        if len(old.stages) != len(new.stages):
            words.append(f"{len(new.stages)} stage(s) instead of {len(old.stages)}")
        cuts = [tuple(layer_range(stage)[1] for stage in plan_shown.stages[:-1]) for plan_shown in (old, new)]
        if cuts[0] != cuts[1]:
            shown = [", ".join(map(str, ends)) or "none" for ends in cuts]
            words.append(f"cuts {shown[1]} instead of {shown[0]}")
        idle = [name for name in self.cluster.names if name not in new.devices]
        if idle:
            words.append(f"{', '.join(idle)} would not help")
        return f"The old plan, adapted: {'; '.join(words) or 'nothing had to change'}."
