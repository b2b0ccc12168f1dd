"""The fewest bits and the largest K that a network tolerates, found by short trainings (SPLIT §4, Fig. 6, 8).

    reference   plain training, from several seeds: its score, and how much that varies from seed to seed
    K           the largest with which training loses no more than is allowed, at the last cut, where most weights are
                replayed; from the start, and again from the weights that the reference has ended with
    bits        for each cut, at that K: the fewest with which it loses no more than that

Trainings are rehearsed in one process (executor/rehearsal.py) on a calibration set, all from the same weights and over
the same batches. The time is limited: cuts that lie far apart are tried first, and a cut that was not reached is taken
to need what its neighbours need.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import torch
from torch.utils.data import Dataset

from manyhands.data.loader import example, length
from manyhands.data.order import BatchOrder, permutation
from manyhands.executor.boxes import dtype_of
from manyhands.executor.rehearsal import Batch, Rehearsal, Score
from manyhands.executor.share_loss import target_names
from manyhands.facts.calibration import UNPACKED, WIDTHS, Calibration, Measure, Tried
from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.facts.network import TensorSpec
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Replay, ReplayMode
from manyhands.graph.graph import Graph
from manyhands.graph.tape import bind_inputs, bind_tree
from manyhands.planner.split_profile import candidate_cuts

KS = (1, 2, 3, 4, 5, 6, 8)
MOST_BYTES = 256 * 10**6
"""The most that a calibration set may take in memory."""
_TIMED_STEPS = 3
_LEAST_STEPS = 20
"""Fewer steps say nothing about a setting: when time is short, fewer settings are tried instead."""
_SCORED_AT = (0.8, 0.9, 1.0)
"""Fractions of a training after which it is scored. A single score is noisy: their mean counts."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationSet:
    """A set of samples in memory, under the names that the graph and its loss use."""

    inputs: dict[str, torch.Tensor]
    targets: dict[str, torch.Tensor]
    axes: dict[str, int | None]
    """The axis that holds the samples, by tensor; None: the tensor has none."""
    count: int

    @classmethod
    def of(cls, graph: Graph, data: Dataset[Any], most_samples: int, seed: int = 0) -> CalibrationSet:
        """Return samples of a data set, drawn with `seed`: at most `most_samples`, and at most `MOST_BYTES`."""
        if graph.loss is None:
            raise BadValue("The network was captured without a loss.", hint="Capture it with one.")
        every = length(data)
        sample, _ = example(data, 1)
        size = sum(tensor.nbytes for tensor in bind_inputs(graph, sample).values())
        count = min(most_samples, every, MOST_BYTES // max(1, size))
        if count < 1:
            raise BadData(f"One sample has {size} bytes; a calibration set may have {MOST_BYTES} in all.")
        inputs, targets = example(_Picked(data, permutation(every, seed, 0)[:count].tolist()), count)
        named = bind_tree(graph.loss.input_tree[0][1], targets)
        specs = {spec.name: spec for spec in (*graph.inputs, *graph.loss.inputs)}
        return cls(
            {name: _typed(tensor, specs[name]) for name, tensor in bind_inputs(graph, inputs).items()},
            {name: _typed(named[name], specs[name]) for name in target_names(graph)},
            {name: spec.batch_axis for name, spec in specs.items()},
            count,
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices)

        def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            axes = {name: self.axes[name] for name in tensors}
            return {
                name: tensor if axes[name] is None else tensor.index_select(axes[name], chosen)  # type: ignore[arg-type]
                for name, tensor in tensors.items()
            }

        return cut(self.inputs), cut(self.targets)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the whole set, one batch after another; the last batch may be smaller."""
        for first in range(0, self.count, batch_size):
            yield self.batch(range(first, min(first + batch_size, self.count)))


class _Picked(Dataset[Any]):
    def __init__(self, data: Dataset[Any], indices: list[int]) -> None:
        self.data, self.indices = data, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]


def _typed(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return tensor.to(dtype_of(spec.dtype))


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration: what it tries, how exactly, and for how long."""

    cuts: Sequence[int] | None = None
    """None: every cut that Algorithm 2 would consider."""
    ks: Sequence[int] = KS
    allowed_drop: float = 0.01
    """Of accuracy, as a part of 1; of a loss, relative to it."""
    mode: ReplayMode = "grouped"
    steps: int = 200
    """Steps of each training, at most: fewer where the time is short."""
    repeats: int = 2
    seconds: float = 120.0
    seed: int = 0
    device: torch.device | str = "cpu"
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        is_possible = 0 <= self.allowed_drop < 1 and self.seconds > 0 and self.repeats >= 1 and self.steps >= 1
        if not is_possible or sorted({*self.ks}) != [*self.ks]:
            raise BadValue(
                f"A calibration with a drop of {self.allowed_drop}, {self.seconds} s, {self.repeats} repeats of "
                f"{self.steps} steps, K of {list(self.ks)}: the drop must be from 0 to below 1, the others > 0, Ks "
                "must increase."
            )

    def cuts_of(self, graph: Graph) -> list[int]:
        """Return the cuts to calibrate, in order."""
        cuts = sorted(set(candidate_cuts(graph.network) if self.cuts is None else self.cuts))
        if not cuts or cuts[0] < 1 or cuts[-1] >= len(graph.network.layers):
            raise BadValue(f"{graph.name} has {len(graph.network.layers)} layers; it cannot be cut at {cuts}.")
        return cuts


class CalibrationOptions(TypedDict, total=False):
    """The fields of `CalibrationSettings`, as keywords."""

    cuts: Sequence[int] | None
    ks: Sequence[int]
    allowed_drop: float
    mode: ReplayMode
    steps: int
    repeats: int
    seconds: float
    seed: int
    device: torch.device | str
    clock: Callable[[], float]


@takes_settings(CalibrationSettings)
def calibrate(
    graph: Graph,
    train: CalibrationSet,
    test: CalibrationSet,
    optimizer: Optimizer,
    *,
    batch_size: int,
    data: str = "",
    say: Say | None = None,
    **options: Unpack[CalibrationOptions],
) -> Calibration:
    """Return the fewest bits of each cut and the largest K, found in about `seconds`."""
    settings = settings_from(CalibrationSettings, "calibrate", options)
    cuts, clock = settings.cuts_of(graph), settings.clock
    order = BatchOrder(train.count, min(batch_size, train.count), shuffle=True, seed=settings.seed)
    trials = _Trials(graph, train, test, order, optimizer, settings, clock() + settings.seconds)
    began = clock()
    trials.fit(trainings=2 + 2 * len(cuts) + 2 * math.ceil(math.log2(len(settings.ks) + 1)))
    reference, spread = trials.reference()
    trials.reference(later=True)
    log = say or (lambda text: None)
    enough = f"{trials.limits[False]:.4g} is enough"
    log(f"{graph.name}: {trials.measure} {reference:.4g} after {trials.steps} steps, and {enough}")
    k, later_k = (trials.largest_k(cuts[-1], settings.ks, later=later) for later in (False, True))
    widths: dict[int, int] = {}
    for cut in _far_apart(cuts):
        width = trials.fewest_bits(cut, k)
        if width is not None:
            widths[cut] = width
            log(f"cut {cut}: {width} bits")
    for cut in cuts:
        widths.setdefault(cut, _by_neighbours(cut, widths))
    return Calibration(
        network=graph.name, fingerprint=graph.network.fingerprint, data=data, batch_size=batch_size,
        optimizer=str(optimizer), allowed_drop=settings.allowed_drop, measure=trials.measure, reference=reference,
        spread=spread, steps=trials.steps, repeats=settings.repeats, bits={str(cut): widths[cut] for cut in cuts},
        k=k, later_k=max(k, later_k), mode=settings.mode, tried=tuple(trials.tried),
        norms=tuple(trials.norms), is_complete=not trials.is_late, seconds=round(clock() - began, 3),
    )  # fmt: skip


@dataclass
class _Trials:
    """The short trainings of one calibration, until its time is up."""

    graph: Graph
    train: CalibrationSet
    test: CalibrationSet
    order: BatchOrder
    optimizer: Optimizer
    settings: CalibrationSettings
    end: float
    steps: int = 1
    limits: dict[bool, float] = field(default_factory=dict)
    """The score that is enough. False: from the initial weights; True: from those that the reference has ended with."""
    measure: Measure = "loss"
    is_late: bool = False
    tried: list[Tried] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ended: dict[str, torch.Tensor] = field(default_factory=dict)

    def fit(self, trainings: int) -> None:
        """Set how many steps a training may have in the time that is left. Replaying takes half as long again."""
        rehearsal = Rehearsal(self.graph, self.optimizer, 0, device=self.settings.device)
        rehearsal.train(*self.train.batch(self.order.indices(0)))  # the first step takes longer than all others
        began = self.settings.clock()
        for step in range(_TIMED_STEPS):
            rehearsal.train(*self.train.batch(self.order.indices(step)))
        each = max((self.settings.clock() - began) / _TIMED_STEPS, 1e-6)
        began = self.settings.clock()
        self._scored(rehearsal)
        scoring = len(_SCORED_AT) * (self.settings.clock() - began)
        affordable = ((self.end - self.settings.clock()) / (trainings * self.settings.repeats) - scoring) / (1.5 * each)
        self.steps = min(self.settings.steps, max(_LEAST_STEPS, int(affordable)))

    def reference(self, *, later: bool = False) -> tuple[float, float]:
        """Return the mean score of plain training, and half the range of its scores.

        This sets the limit, the score that is enough, for all later settings.
        """
        scores: list[Score] = []
        for number in range(self.settings.repeats):
            rehearsal = Rehearsal(
                self.graph,
                self.optimizer,
                0,
                seed=number,
                device=self.settings.device,
                state=self.ended if later else None,
            )
            norms = [rehearsal.norm()]
            run_scores: list[Score] = []
            for step in range(self.steps):
                self._step(rehearsal, number, step)
                norms.append(rehearsal.norm())
                if step + 1 in self._scored_after:
                    run_scores.append(self._scored(rehearsal))
            if not all(map(math.isfinite, [*norms, *(score.loss for score in run_scores)])):
                raise BadValue(
                    f"{self.graph.name} does not train with {self.optimizer}: its loss is {run_scores[-1].loss}.",
                    hint="Lower the learning rate.",
                )
            scores.append(_mean(run_scores))
            if not number and not later:
                self.norms, self.ended = norms, rehearsal.state()
        accuracies = [score.accuracy for score in scores if score.accuracy is not None]
        self.measure = "accuracy" if len(accuracies) == len(scores) else "loss"
        numbers = accuracies if self.measure == "accuracy" else [score.loss for score in scores]
        mean, spread = statistics.mean(numbers), (max(numbers) - min(numbers)) / 2
        is_higher_better, drop = self.measure == "accuracy", self.settings.allowed_drop
        self.limits[later] = mean - drop - spread if is_higher_better else mean * (1 + drop) + spread
        return mean, spread

    @property
    def _scored_after(self) -> set[int]:
        return {max(1, round(part * self.steps)) for part in _SCORED_AT}

    def _scored(self, rehearsal: Rehearsal) -> Score:
        return rehearsal.score(self.test.batches(self.order.batch_size))

    def _step(self, rehearsal: Rehearsal, number: int, step: int) -> float:
        """Train one step and return its loss. Every repetition sees other batches; every setting sees the same."""
        return rehearsal.train(*self.train.batch(self.order.indices(number * self.steps + step)))

    def is_enough(self, cut: int, k: int, bits: int, *, later: bool = False) -> bool | None:
        """Return whether a setting trains well enough; None: the time was up before this was known."""
        scores: list[float] = []
        for number in range(self.settings.repeats):
            rehearsal = Rehearsal(
                self.graph, self.optimizer, cut, codec=Codec(bits), replay=Replay(k, self.settings.mode), seed=number,
                device=self.settings.device, state=self.ended if later else None,
            )  # fmt: skip
            score = self._score(rehearsal, number)
            if self.is_late:
                return None
            if score is None:
                scores = []
                break
            scores.append(score)
        mean = statistics.mean(scores) if scores else math.nan
        is_good = mean >= self.limits[later] if self.measure == "accuracy" else mean <= self.limits[later]
        self.tried.append(Tried(cut, k, bits, tuple(scores), is_good, later))
        return is_good

    def _score(self, rehearsal: Rehearsal, number: int) -> float | None:
        """Return the score of a training; None: its loss was not finite, or (`is_late`) the time was up."""
        scores: list[Score] = []
        for step in range(self.steps):
            if self.settings.clock() > self.end:
                self.is_late = True
                return None
            if not math.isfinite(self._step(rehearsal, number, step)):
                return None
            if step + 1 == self.steps:
                rehearsal.drain()
            if step + 1 in self._scored_after:
                scores.append(self._scored(rehearsal))
        mean = _mean(scores)
        score = mean.accuracy if self.measure == "accuracy" else mean.loss
        return score if math.isfinite(mean.loss) else None

    def fewest_bits(self, cut: int, k: int) -> int | None:
        """Return the fewest bits that are enough at a cut; None: there was no time.

        The search begins in the middle: four bits, then fewer or more.
        """
        low, high = 0, len(WIDTHS)  # all from `high` on are enough
        while low < high:
            place = (low + high - 1) // 2
            enough = self.is_enough(cut, k, WIDTHS[place])
            if enough is None:
                return None
            low, high = (low, place) if enough else (place + 1, high)
        return WIDTHS[high] if high < len(WIDTHS) else UNPACKED

    def largest_k(self, cut: int, ks: Sequence[int], *, later: bool) -> int:
        """Return the largest K that is enough at a cut, as far as this is known; 0: none of them is."""
        low, high = 0, len(ks)  # all below `low` are enough
        while low < high:
            place = (low + high) // 2
            enough = self.is_enough(cut, ks[place], UNPACKED, later=later)
            if enough is None:
                break
            low, high = (place + 1, high) if enough else (low, place)
        return ks[low - 1] if low else 0


def _mean(scores: Sequence[Score]) -> Score:
    accuracies = [score.accuracy for score in scores if score.accuracy is not None]
    return Score(statistics.fmean(score.loss for score in scores), statistics.fmean(accuracies) if accuracies else None)


def _far_apart(cuts: Sequence[int]) -> list[int]:
    """Return the cuts in another order: the first, the last, the middle, then the middles between those."""
    ordered = [cuts[0], cuts[-1]]
    parts = [(0, len(cuts) - 1)]
    while parts:
        low, high = parts.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            ordered.append(cuts[middle])
            parts += [(low, middle), (middle, high)]
    return list(dict.fromkeys(ordered))


def _by_neighbours(cut: int, bits: Mapping[int, int]) -> int:
    """Return the bits that the nearest cuts before and after need; where nothing is known, nothing is packed."""
    before = [other for other in bits if other < cut]
    after = [other for other in bits if other > cut]
    near = ([max(before)] if before else []) + ([min(after)] if after else [])
    return max((bits[other] for other in near), default=UNPACKED)
