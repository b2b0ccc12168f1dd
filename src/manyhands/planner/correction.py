"""A profile's predictions for every stage of a plan, and profiles corrected by the measured times of the stages.

A stage's layers on a device are scaled by one factor, measured over promised, at the rung of their ladders that has as
many samples as the device's share; where there is none, one is added. That share then has the price that was measured.
The other rungs of those layers are scaled by the factor's root, half way: if the machine has become slower they are
just as wrong, and if only this share was misjudged they are right. A tile is a fraction of a sample: both rungs beside
it are scaled. Where several devices share a profile (workers on equal hardware), a rung takes the median of their
factors.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from manyhands.facts.network import Network
from manyhands.facts.profile import Corrected, DeviceProfile, LayerTiming, Timing
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import Backward, Forward, Receive, Reduce, Send
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.policy import Schedule

WORTH = 0.05
"""A profile whose error is within this stays as it is, so that the same run is planned as before."""
MOST = 8.0
"""A larger factor is more likely an accident than the machine; if it is real, the next run continues from here."""
MOST_RUNGS = 16
"""The most rungs of a ladder; with more, the rungs beside a share are scaled instead."""

Place = tuple[int, str]
"""A stage, and a device in it."""


@dataclass(frozen=True)
class Promise:
    """The predicted seconds of a device for one stage in a round."""

    compute_seconds: float
    """Forward and backward."""
    copying_seconds: float = 0.0
    """Its part of the seconds that moving bytes takes from computing, whether it shows while the stage computes or
    waits."""

    def factor(self, measured_seconds: float) -> float:
        """Return how many times longer than predicted the layers themselves took, after deducting what copying can
        explain."""
        if not self.compute_seconds:
            return 1.0
        least = measured_seconds - self.copying_seconds
        return min(max(self.compute_seconds, least), measured_seconds) / self.compute_seconds


@dataclass(frozen=True)
class TimingEvidence:
    """The observation that some layers took `factor` times what a profile predicts."""

    factor: float
    samples: Mapping[int, frozenset[float]]
    """Layer -> how many samples it was run on: a fraction of one for a tile, several numbers where operators differ."""


def promises(schedule: Schedule, costs: CostModel) -> dict[Place, Promise]:
    """Return the prediction for every stage on every device that computes in it."""
    by_place: dict[Place, Promise] = {}
    for device, work in schedule.lowering.work.items():
        computing = {geometry.index: 0.0 for geometry in work.geometries}
        copying = 0.0
        for action in schedule.every_action(device):
            if isinstance(action, (Forward, Backward)):
                computing[action.stage] += costs.compute_seconds(work.geometry(action.stage), device, action)
            elif isinstance(action, (Send, Receive, Reduce)) and not (isinstance(action, Reduce) and action.is_awaited):
                copying += costs.copy_seconds(device, action)  # while it waits, it does not compute
        total = sum(computing.values())
        for stage, seconds in computing.items():
            by_place[stage, device] = Promise(seconds, copying * seconds / total if total else 0.0)
    return by_place


def evidence(geometry: StageGeometry, network: Network, device: str, factor: float) -> TimingEvidence:
    """Return what the time of a stage on a device says about its layers."""
    ahead, back = geometry.fractions(device), geometry.backward_fractions(device)
    samples: dict[int, set[float]] = {}
    for op in range(geometry.first, geometry.last):
        facts = network.ops[op]
        if geometry.is_split_inside and not (facts.macs or facts.moved_bytes):  # takes no time
            continue
        layer_samples = samples.setdefault(network.layer_of_op[op], set())
        layer_samples |= {part[op - geometry.first] * geometry.samples for part in (ahead, back)}
    return TimingEvidence(factor, {layer: frozenset(s for s in numbers if s > 0) for layer, numbers in samples.items()})


def corrected(profile: DeviceProfile, evidence: Iterable[TimingEvidence], *, steps: int, when: str) -> DeviceProfile:
    """Return the profile with its layers corrected by the evidence, or the same profile where it was right.

    `steps`: the number of steps that each piece of evidence is the median of.
    """
    pieces = tuple(evidence)
    whole = {int(n) for piece in pieces for samples in piece.samples.values() for n in samples if n == int(n)}
    ladders = [_with_rungs(profile, layer, whole) for layer in range(len(profile.layers))]
    factors: dict[tuple[int, int], list[float]] = {}
    for piece in pieces:
        factor = min(max(piece.factor, 1 / MOST), MOST)
        for layer, samples in piece.samples.items():
            ladder = ladders[layer]
            for rung in {rung for number in samples for rung in rungs(ladder, number)}:
                factors.setdefault((layer, rung), []).append(factor)
    applied = {place: _worth(statistics.median(measured)) for place, measured in factors.items()}
    if all(factor == 1.0 for factor in applied.values()):
        return profile
    layers = []
    for number, ladder in enumerate(ladders):
        by_rung = {rung: factor for (rung_layer, rung), factor in applied.items() if rung_layer == number}
        layers.append(LayerTiming(profile.layers[number].layer, _scaled(ladder, by_rung) if by_rung else ladder))
    before = profile.corrected or Corrected(0, 0, "")
    return msgspec.structs.replace(
        profile, layers=tuple(layers), corrected=Corrected(before.runs + 1, before.steps + steps, when)
    )


def _with_rungs(profile: DeviceProfile, layer: int, samples: Iterable[int]) -> tuple[Timing, ...]:
    """Return a layer's ladder with rungs added at these numbers of samples; they hold what was interpolated so far."""
    ladder = profile.ladders[layer]
    new = sorted(set(samples) - {timing.samples for timing in ladder})[: max(0, MOST_RUNGS - len(ladder))]
    added = [Timing(number, *profile.layer_seconds(layer, number)) for number in new]
    return tuple(sorted([*ladder, *added], key=lambda timing: timing.samples))


def rungs(ladder: Sequence[Timing], samples: float) -> tuple[int, ...]:
    """Return the rungs of a ladder that a number of samples is interpolated from."""
    place = bisect_left(ladder, samples, key=lambda timing: timing.samples)
    if place < len(ladder) and ladder[place].samples == samples:
        return (place,)
    if place == 0 or len(ladder) == 1:
        return (0,)
    high = min(place, len(ladder) - 1)
    return (high - 1, high)


def _worth(factor: float) -> float:
    return factor if abs(factor - 1) > WORTH else 1.0


def _scaled(ladder: tuple[Timing, ...], factors: Mapping[int, float]) -> tuple[Timing, ...]:
    forward = _rising([timing.forward_seconds for timing in ladder], factors)
    backward = _rising([timing.backward_seconds for timing in ladder], factors)
    return tuple(Timing(timing.samples, f, b) for timing, f, b in zip(ladder, forward, backward))


def _rising(before: list[float], factors: Mapping[int, float]) -> list[float]:
    """Return every rung times its factor, and the others times the factor's root. Where more samples took no less time
    before, they do not take less now: an unmeasured rung yields to its neighbours, and a measured one to those below
    it."""
    other = math.sqrt(statistics.median(factors.values()))
    scaled = [seconds * factors.get(rung, other) for rung, seconds in enumerate(before)]
    rises = [low <= high for low, high in zip(before, before[1:])]
    for low in range(len(scaled) - 2, -1, -1):
        if rises[low] and low not in factors:
            scaled[low] = min(scaled[low], scaled[low + 1])
    for low in range(len(scaled) - 1):
        if rises[low]:
            scaled[low + 1] = max(scaled[low + 1], scaled[low])
    return scaled
