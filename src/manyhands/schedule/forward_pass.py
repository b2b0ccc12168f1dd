"""The forward pass of one stage as actions of each of its devices: what its geometry says, in order."""

from __future__ import annotations

from collections import defaultdict

from manyhands.facts.network import DTYPE_BYTES
from manyhands.facts.precision import SUMMED_IN
from manyhands.schedule.actions import Action, Forward, Reduce
from manyhands.schedule.geometry import Group, StageGeometry
from manyhands.schedule.packing import Mail, packed_messages


def statistics_ops(geometry: StageGeometry, first: int, last: int) -> list[int]:
    """Return the operators in a range at which the devices of a stage add up statistics."""
    return [index for index in range(first, last) if geometry.adds_up(geometry.network.ops[index])]


def statistics_sum(geometry: StageGeometry, index: int, *, backward: bool = False, later: bool = False) -> Reduce:
    """Return the sum of an operator's statistics over the devices of a stage.

    Batch norm, forward: the count, and mean and variance per channel; backward: two sums per channel. Other operators
    of a tiled stage add up some numbers per sample, each way.
    """
    network = geometry.network
    op = network.ops[index]
    count = 2 * op.statistics + (0 if backward else 1) if op.statistics else op.tile_sums * geometry.samples
    dtype = network.tensors[op.inputs[0]].dtype
    size = count * DTYPE_BYTES[SUMMED_IN.get(dtype, dtype)]
    return Reduce(
        geometry.index, "statistics", index, index + 1, geometry.devices, size, 0, backward, later,
        places=geometry.places,
    )  # fmt: skip


class ForwardPass:
    """The forward pass of one stage, device by device: group after group, with what each fetches before it."""

    def __init__(self, geometry: StageGeometry) -> None:
        self.geometry, self.stage = geometry, geometry.index
        self._halos = {
            group.first: Mail(packed_messages(geometry.network, group.fetches, "halo", self.stage))
            for group in geometry.groups
        }
        self._sums = {
            group.first: Mail(packed_messages(geometry.network, group.sums, "partial", self.stage))
            for group in geometry.groups
        }
        self._leaving: dict[int, list[Mail]] = defaultdict(list)
        """Operator -> what is sent before it."""
        for group in geometry.groups:
            self._leaving[geometry.ready_at(group)].append(self._halos[group.first])
        self._adds_up = {group.first: statistics_ops(geometry, group.first, group.last) for group in geometry.groups}

    def actions(self, device: str) -> list[Action]:
        """Return what a device computes, adds up and exchanges inside the stage."""
        out: list[Action] = []
        for group in self.geometry.groups:
            self._add_group(out, device, group)
        return out

    def _add_group(self, out: list[Action], device: str, group: Group) -> None:
        stage, start, halos = self.stage, group.first, self._halos[group.first]
        out += self._sends_at(device, start)
        adds_up = list(self._adds_up[start])
        if start in self.geometry.interior_first:
            out.append(Forward(stage, 0, start, start + 1, "interior"))
            out += [*halos.receives(device), Forward(stage, 0, start, start + 1, "rim")]
            start += 1
        elif start in adds_up:  # one wait for both: what is fetched travels beside the sums
            out += [statistics_sum(self.geometry, start), *halos.receives(device)]
            adds_up.remove(start)
        else:
            out += halos.receives(device)
        if group.sums:
            sums = self._sums[group.first]
            out += [Forward(stage, 0, start, group.last, "partial"), *sums.sends(device)]
            out += [*sums.receives(device), Forward(stage, 0, start, group.last, "sum")]
            return
        for op in adds_up:
            if op > start:
                out.append(Forward(stage, 0, start, op))
            out.append(statistics_sum(self.geometry, op))
            start = op
        if self.geometry.continues(group):
            start = _continued(out, stage, start)
        for op in sorted(op for op in self._leaving if start < op < group.last):
            sends = self._sends_at(device, op)
            if sends:
                out += [Forward(stage, 0, start, op), *sends]
                start = op
        if start < group.last:
            out.append(Forward(stage, 0, start, group.last))

    def _sends_at(self, device: str, op: int) -> list[Action]:
        return [send for mail in self._leaving.get(op, ()) for send in mail.sends(device)]


def _continued(actions: list[Action], stage: int, first: int) -> int:
    """Return where computing that goes on at an operator begins.

    An action that ends there is removed, to be replaced by a longer one.
    """
    last = actions[-1] if actions else None
    if not isinstance(last, Forward) or last.part or (last.stage, last.last) != (stage, first):
        return first
    actions.pop()
    return last.first
