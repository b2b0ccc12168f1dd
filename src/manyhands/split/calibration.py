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

import contextlib
import hashlib
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from manyhands.data.loader import example, length
from manyhands.data.order import BatchOrder, permutation
from manyhands.executor.boxes import dtype_of
from manyhands.executor.rehearsal import Batch, Rehearsal, Score
from manyhands.executor.share_loss import target_names
from manyhands.facts.calibration import UNPACKED, VERSION, WIDTHS, Calibration, Measure, Tried
from manyhands.facts.decode import converted
from manyhands.facts.errors import BadData, BadFile, BadValue, ManyhandsError
from manyhands.facts.network import Network, TensorSpec
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Replay, ReplayMode
from manyhands.files.documents import cache_folder, read_document, write_document
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
_REFRESH = "Delete it, or calibrate again."

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


def calibrate(
    graph: Graph,
    train: CalibrationSet,
    test: CalibrationSet,
    optimizer: Optimizer,
    *,
    batch_size: int,
    data: str = "",
    cuts: Sequence[int] | None = None,
    ks: Sequence[int] = KS,
    allowed_drop: float = 0.01,
    mode: ReplayMode = "grouped",
    steps: int = 200,
    repeats: int = 2,
    seconds: float = 120.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    say: Say | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Return the fewest bits of each cut and the largest K, found in about `seconds`.

    allowed_drop    of accuracy, as a fraction of 1; of a loss, relative to it
    steps           of each training, at most: fewer where time is short
    """
    if not 0 <= allowed_drop < 1 or not seconds > 0 or repeats < 1 or steps < 1 or sorted({*ks}) != [*ks]:
        raise BadValue(
            f"A calibration with a drop of {allowed_drop}, {seconds} s, {repeats} repeats of {steps} steps, K of "
            f"{list(ks)}: the drop must be from 0 to below 1, the others > 0, Ks must increase."
        )
    wanted = sorted(set(candidate_cuts(graph.network) if cuts is None else cuts))
    if not wanted or wanted[0] < 1 or wanted[-1] >= len(graph.network.layers):
        raise BadValue(f"{graph.name} has {len(graph.network.layers)} layers; it cannot be cut at {wanted}.")
    order = BatchOrder(train.count, min(batch_size, train.count), shuffle=True, seed=seed)
    trials = _Trials(graph, train, test, order, optimizer, mode, repeats, device, clock, clock() + seconds)
    began = clock()
    trials.fit(steps, trainings=2 + 2 * len(wanted) + 2 * math.ceil(math.log2(len(ks) + 1)))
    reference, spread = trials.reference(allowed_drop)
    trials.reference(allowed_drop, later=True)
    tell = say or (lambda text: None)
    enough = f"{trials.limits[False]:.4g} is enough"
    tell(f"{graph.name}: {trials.measure} {reference:.4g} after {trials.steps} steps, and {enough}")
    k, later_k = (trials.largest_k(wanted[-1], ks, later=later) for later in (False, True))
    found: dict[int, int] = {}
    for cut in _far_apart(wanted):
        width = trials.fewest_bits(cut, k)
        if width is not None:
            found[cut] = width
            tell(f"cut {cut}: {width} bits")
    for cut in wanted:
        found.setdefault(cut, _by_neighbours(cut, found))
    return Calibration(
        network=graph.name, fingerprint=graph.network.fingerprint, data=data, batch_size=batch_size,
        optimizer=str(optimizer), allowed_drop=allowed_drop, measure=trials.measure, reference=reference, spread=spread,
        steps=trials.steps, repeats=repeats, bits={str(cut): found[cut] for cut in wanted},
        k=k, later_k=max(k, later_k), mode=mode, tried=tuple(trials.tried),
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
    mode: ReplayMode
    repeats: int
    device: torch.device | str
    clock: Callable[[], float]
    end: float
    steps: int = 1
    limits: dict[bool, float] = field(default_factory=dict)
    """The score that is enough. False: from the initial weights; True: from those that the reference has ended with."""
    measure: Measure = "loss"
    is_late: bool = False
    tried: list[Tried] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ended: dict[str, torch.Tensor] = field(default_factory=dict)

    def fit(self, steps: int, trainings: int) -> None:
        """Set how many steps a training may have in the time that is left. Replaying takes half as long again."""
        rehearsal = Rehearsal(self.graph, self.optimizer, 0, device=self.device)
        rehearsal.train(*self.train.batch(self.order.indices(0)))  # the first step takes longer than all others
        began = self.clock()
        for step in range(_TIMED_STEPS):
            rehearsal.train(*self.train.batch(self.order.indices(step)))
        each = max((self.clock() - began) / _TIMED_STEPS, 1e-6)
        began = self.clock()
        self._scored(rehearsal)
        scoring = len(_SCORED_AT) * (self.clock() - began)
        affordable = ((self.end - self.clock()) / (trainings * self.repeats) - scoring) / (1.5 * each)
        self.steps = min(steps, max(_LEAST_STEPS, int(affordable)))

    def reference(self, allowed_drop: float, *, later: bool = False) -> tuple[float, float]:
        """Return the mean score of plain training, and half the range of its scores.

        This sets the limit, the score that is enough, for all later settings.
        """
        scores: list[Score] = []
        for number in range(self.repeats):
            rehearsal = Rehearsal(
                self.graph, self.optimizer, 0, seed=number, device=self.device, state=self.ended if later else None
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
        is_higher_better = self.measure == "accuracy"
        self.limits[later] = mean - allowed_drop - spread if is_higher_better else mean * (1 + allowed_drop) + spread
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
        for number in range(self.repeats):
            rehearsal = Rehearsal(
                self.graph, self.optimizer, cut, codec=Codec(bits), replay=Replay(k, self.mode), seed=number,
                device=self.device, state=self.ended if later else None,
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
            if self.clock() > self.end:
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


# ---- Stored calibrations


def calibration_path(network: Network, data: str, batch_size: int, folder: Path | None = None) -> Path:
    """Return the file of a calibration, named after what it depends on: the graph, the data, the batch size."""
    readable = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part)[:60].strip("-") for part in (network.name, data))
    digest = hashlib.sha256(f"{network.fingerprint}\n{network.granularity}\n{data}".encode()).hexdigest()[:12]
    return (folder or cache_folder() / "calibrations") / f"{readable}_{batch_size}_{digest}.json"


def find_calibration(network: Network, data: str, batch_size: int, *, folder: Path | None = None) -> Calibration | None:
    """Return the calibration that an earlier run stored; None: there is none. A damaged one is an error."""
    path = calibration_path(network, data, batch_size, folder)
    if not path.exists():
        return None
    raw = read_document(path)
    version = raw.get("version") if isinstance(raw, dict) else None
    if version is not None and version != VERSION:
        raise BadFile(f"{path}: has version {version}; this program reads version {VERSION}.", hint=_REFRESH)
    try:
        return converted(raw, Calibration)
    except msgspec.ValidationError as error:
        raise BadFile(f"{path}: is not a calibration: {error!s:.300}.", hint=_REFRESH) from error
    except ManyhandsError as error:
        raise BadFile(f"{path}: {error.message}", hint=_REFRESH) from error


def calibrated(
    graph: Graph,
    train: Dataset[Any],
    test: Dataset[Any] | None,
    optimizer: Optimizer,
    *,
    batch_size: int,
    data: str,
    samples: int = 2048,
    refresh: bool = False,
    folder: Path | None = None,
    seed: int = 0,
    **options: Any,
) -> Calibration:
    """Return the calibration stored for this network, data and batch size, or make one (with `calibrate`'s options) and
    store it.

    `test` is the data that trainings are scored on, a quarter as many samples; without it, they are scored on what they
    train on.
    """
    if not refresh:
        found = find_calibration(graph.network, data, batch_size, folder=folder)
        if found is not None:
            return found
    own = CalibrationSet.of(graph, train, samples, seed)
    scored = own if test is None else CalibrationSet.of(graph, test, samples // 4, seed)
    made = calibrate(graph, own, scored, optimizer, batch_size=batch_size, data=data, seed=seed, **options)
    with contextlib.suppress(BadFile):  # what was found is worth more than its copy
        write_document(calibration_path(graph.network, data, batch_size, folder), msgspec.to_builtins(made))
    return made
