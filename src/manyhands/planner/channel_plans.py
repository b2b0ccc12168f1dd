"""Plans by channels (DECNN Scheme 2): how many channel groups each device takes, and how dense operators are cut.

A decoupled network has g groups that need no data of each other between two shuffles. Groups are not divided: unequal
devices get unequal numbers of them, and a device may get none. A network that is not decoupled is cut into parts of its
channels by speed, and every convolution waits for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb, gcd
from typing import NamedTuple

from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import ByChannels, Plan, Stage
from manyhands.facts.reads import Blocks
from manyhands.planner.cost import CostModel
from manyhands.planner.pricing import Named, Pricer, alike
from manyhands.planner.simple import proportional
from manyhands.planner.task import PlanCandidate, Task

UNDIVIDED = 16
"""The parts per device that the channels of a network without groups are cut into."""
TOLD_APART = 64
"""The most ways to give out groups for which equal devices are distinguished: an odd number of outputs is not cut
equally for all."""
MOST_COMPOSITIONS = 4000
"""With more ways than this to give groups to devices, only those close to the devices' speeds are tried."""
MOST_SIMULATED = 48
MOST_SHOWN = 8
_SLACK = 0.95
"""Channels that do not divide evenly may leave a device a little less than its share."""


def channel_groups(network: Network) -> int:
    """Return the largest g that divides the groups of all convolutions on maps, except the first one and depthwise
    ones. 1 means that the network is not decoupled."""
    divisor = 0
    for op in network.ops:
        if op.channels not in ("dense", "grouped") or "conv" not in op.target or not _is_inside(network, op):
            continue
        groups = groups_of(network, op)
        if groups < network.tensors[op.inputs[0]].shape[1]:
            divisor = gcd(divisor, groups)
    return divisor or 1


def groups_of(network: Network, op: Op) -> int:
    """Return the number of groups in which a convolution reads its channels."""
    rule = op.reads[0].rules[1]
    return network.tensors[op.inputs[0]].shape[1] // rule.inputs if isinstance(rule, Blocks) else 1


def _is_inside(network: Network, op: Op) -> bool:
    """Return whether an operator works on maps of more than one position, and not on the network's input."""
    shape = network.tensors[op.inputs[0]].shape
    return op.inputs[0] not in network.inputs and len(shape) == 4 and shape[2] * shape[3] > 1


class DenseCut(NamedTuple):
    """A way to cut the dense operators that read divided channels."""

    name: str
    input_based: tuple[str, ...] | None
    """None: chosen by bytes."""
    everywhere: tuple[str, ...]


def dense_cuts(network: Network, first: int, last: int) -> list[DenseCut]:
    """Return the ways to cut the dense operators in [first, last); equivalent ways are listed once."""
    divided, everywhere, ends = _divided(network, first, last)
    cuts = [DenseCut("by bytes", None, ())]
    if divided:
        cuts.append(DenseCut("input-based", tuple(divided), ()))
        cuts.append(DenseCut("output-based", (), ()))
    if everywhere:
        cuts.append(DenseCut("sums everywhere", (*everywhere, *ends), tuple(everywhere)))
    return cuts


def _divided(network: Network, first: int, last: int) -> tuple[list[str], list[str], list[str]]:
    """Return the dense operators that read divided channels; those, in turns, whose sums all devices should have
    because another dense operator reads them; and the remaining ones, whose sums go to their owners."""
    is_divided: dict[str, bool] = {}
    in_turns: dict[str, bool] = {}
    divided: list[str] = []
    everywhere: list[str] = []
    ends: list[str] = []
    for op in network.ops[first:last]:
        reads = [is_divided.get(name, False) for name in op.inputs]
        reads_in_turns = [in_turns.get(name, False) for name in op.inputs]
        makes = op.channels != "" and (any(reads) or op.channels in ("dense", "grouped"))
        makes_in_turns = op.channels != "" and (any(reads_in_turns) or op.channels in ("dense", "grouped"))
        if op.channels == "dense":
            if any(reads):
                divided.append(op.name)
            if any(reads_in_turns) and _feeds_dense(network, op, last):
                everywhere.append(op.name)
                makes_in_turns = False
            elif any(reads_in_turns):
                ends.append(op.name)
        for name in op.outputs:
            is_divided[name], in_turns[name] = makes, makes_in_turns
    return divided, everywhere, ends


def _feeds_dense(network: Network, op: Op, last: int) -> bool:
    """Return whether a dense operator reads, channel by channel, what is made of this operator's output."""
    reached = set(op.outputs)
    for index in range(network.producer[op.outputs[0]] + 1, last):
        other = network.ops[index]
        if any(name in reached for name in other.inputs):
            if other.channels == "dense":
                return True
            if other.channels in ("free", "shaped"):
                reached.update(other.outputs)
    return False


def compositions(total: int, kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to give `total` groups to devices, some of which may get none. Devices of one kind get them in
    falling order, because swapping them changes nothing."""

    def give(counts: tuple[int, ...], remaining: int) -> Iterator[tuple[int, ...]]:
        place = len(counts)
        if place == len(kinds):
            if not remaining:
                yield counts
            return
        before = next(
            (counts[earlier] for earlier in range(place - 1, -1, -1) if kinds[earlier] == kinds[place]), remaining
        )
        for count in range(min(remaining, before), -1, -1):
            yield from give((*counts, count), remaining - count)

    yield from give((), total)


def promising_shares(task: Task, total: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the ways to give groups to two devices or more, each with a lower bound on the seconds of the busiest
    device; best first."""
    names = task.cluster.names
    kinds = list(alike(task).values())
    if comb(total + len(names) - 1, total) <= TOLD_APART:
        kinds = list(range(len(names)))
    each = {name: _least_seconds(task, name) / total for name in names}
    ranked = []
    for number, counts in enumerate(compositions(total, kinds)):
        if number >= MOST_COMPOSITIONS:
            return shares_by_speed(task, total)
        if sum(map(bool, counts)) > 1:
            ranked.append((max(each[name] * count for name, count in zip(names, counts)), counts))
    return sorted(ranked, key=lambda entry: entry[0])


def shares_by_speed(task: Task, total: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the shares of only the fastest two devices, three and so on, in proportion to their speeds."""
    each = {name: _least_seconds(task, name) / total for name in task.cluster.names}
    fastest = sorted(each, key=each.__getitem__)
    ranked = []
    for count in range(2, min(total, len(fastest)) + 1):
        chosen = fastest[:count]
        extra = proportional(total - count, [1.0 / max(each[name], 1e-30) for name in chosen])
        groups_by_name = dict(zip(chosen, (number + 1 for number in extra)))
        least = max(each[name] * number for name, number in groups_by_name.items())
        ranked.append((least, tuple(groups_by_name.get(name, 0) for name in each)))
    return sorted(ranked, key=lambda entry: entry[0])


def _least_seconds(task: Task, name: str) -> float:
    """Return the seconds of one sample's divisible operators, all of them on one device."""
    costs = CostModel(task.network, task.cluster, task.profile)
    profile = task.profile.of(name)
    return sum(
        costs.range_seconds(profile, name, index, index + 1, 1.0)[0]
        for index, op in enumerate(task.network.ops)
        if op.macs and op.channels in ("dense", "grouped")
    )


def channel_stage(layers: tuple[int, int], names: Sequence[str], counts: Sequence[int], cut: DenseCut) -> Stage:
    """Return a stage by channels; devices without a group are left out."""
    holders = [(name, count) for name, count in zip(names, counts) if count]
    devices = tuple(name for name, _ in holders)
    share = ByChannels(tuple(count for _, count in holders), input_based=cut.input_based, everywhere=cut.everywhere)
    return Stage(layers, devices, share)


def channels(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return plans with the network as one stage by channels. Every division of its groups that may win is
    simulated."""
    names, network = task.cluster.names, task.network
    if len(names) < 2:
        raise BadPlan(f"Channels need at least two devices; cluster {task.cluster.name} has {len(names)}.")
    total = channel_groups(network)
    cuts = dense_cuts(network, 0, len(network.ops))
    shares = promising_shares(task, total) if total > 1 else shares_by_speed(task, UNDIVIDED * len(names))[:2]
    candidates: list[PlanCandidate] = []
    refusal: ManyhandsError | None = None
    simulated = 0
    for least, counts in shares:
        fastest = min((pricer.best, *(candidate.seconds for candidate in candidates)))
        if candidates and (_SLACK * least >= fastest or simulated >= MOST_SIMULATED):
            break
        try:
            ranked = pricer.rank(_plans(task, names, counts, cuts))
        except ManyhandsError as error:
            refusal = refusal or error
            continue
        simulated += len(cuts)
        candidates += ranked
    if not candidates:
        raise refusal or BadPlan(f"{network.name} has {total} channel group(s): too few for two devices.")
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _plans(task: Task, names: Sequence[str], counts: Sequence[int], cuts: Sequence[DenseCut]) -> Iterator[Named]:
    for cut in cuts:
        stage = channel_stage((0, len(task.network.layers)), names, counts, cut)
        words = f" {cut.name}" if len(cuts) > 1 else ""
        plan: Plan = task.plan([stage], 1)
        shown = counts if len(counts) <= MOST_SHOWN else [count for count in counts if count]
        yield f"channels {','.join(map(str, shown))}{words}", plan
