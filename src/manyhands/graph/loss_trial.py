"""Runs a loss on drawn data, as a whole batch and in shares, and compares the two.

Outputs are drawn, targets are resampled, and shares have several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch

from manyhands.facts.network import LossCombination
from manyhands.graph.double_precision import cast_to_double, in_double
from manyhands.graph.graph import Graph
from manyhands.graph.loss_totals import LossTotals, totals_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread, within this context: torch's threads wait for each other longer than such small runs take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_TOLERANCE = 1e-9
_LARGE = 10_000
"""Elements of one sample above which a single draw must do, so that capture stays quick."""
_HUGE = 10_000_000
"""Elements of one sample above which numbers are drawn in their own type: in float64 they could take more memory than
the network."""
_ROUNDED_TOLERANCE = 1e-4
_DRAWS = (("normal", False), ("between 0 and 1", True), ("probabilities", False), ("normal", True))
"""Ways to draw outputs, each with whether non-integer targets are changed; a loss may not accept all of them."""


def agrees(loss: Graph, claim: LossCombination, examples: Mapping[str, torch.Tensor], power: int | None = None) -> bool:
    """Return whether values and gradients of shares add up to those of the whole, on every draw that the loss accepts.

    With a `power`, the shares are computed by the loss as it is rewritten to take the whole's totals (loss_totals.py).
    """
    try:
        is_huge = sum(spec.elements for spec in loss.inputs) > _HUGE
        double = loss if is_huge else in_double(loss)
        weights = Weights({name: tensor.detach().cpu().clone() for name, tensor in double.state.items()})
        piece = Piece(double, weights)
        totals = totals_of(double) if power is not None else None
        shared = piece if totals is None else Piece(totals.loss, weights)
        sharing = _Sharing(shared, claim, totals, power or 0, _ROUNDED_TOLERANCE if is_huge else _TOLERANCE)
    except (RuntimeError, NotImplementedError):
        return False  # e.g. weights without values
    is_large = sum(spec.elements for spec in loss.inputs) > _LARGE
    samples, splits = (3, ((1, 2),)) if is_large else (5, ((2, 3), (1, 1, 1, 2)))
    generator = torch.Generator().manual_seed(0)
    batched = {spec.name for spec in loss.inputs if spec.batch_axis is not None}
    of_outputs = set(tree_leaves(loss.input_tree[0][0])) & batched
    draws_run = 0
    for drawing, is_changed in _DRAWS:
        values = {
            name: _drawn(example, samples, generator, drawing if name in of_outputs else "", is_changed)
            if name in batched
            else example
            for name in piece.inputs
            for example in [examples[name] if is_huge else cast_to_double(examples[name])]
        }
        whole = _run(piece, values, of_outputs, samples)
        if whole is None:
            continue
        for sizes in splits:
            order = iter(torch.randperm(samples, generator=generator).tolist())
            shares = [list(islice(order, size)) for size in sizes]
            if not _adds_up(sharing, values, of_outputs, whole, shares):
                return False
        draws_run += 1
        if is_large:
            break
    return draws_run > 0


@dataclass(frozen=True)
class _Result:
    value: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Sharing:
    """The loss of a share: a piece, how its values combine, and the totals that it takes."""

    piece: Piece
    claim: LossCombination
    totals: LossTotals | None
    power: int
    tolerance: float

    def inputs(self, share: Mapping[str, torch.Tensor], totals: torch.Tensor, part: float) -> dict[str, torch.Tensor]:
        """Return what the loss of a part of the samples takes."""
        return {**share, **(self.totals.inputs(totals, part, self.power) if self.totals is not None else {})}

    def totals_in(self, values: Mapping[str, torch.Tensor], samples: int) -> torch.Tensor:
        return self.totals.of(values, samples) if self.totals is not None else torch.zeros(0)


def _adds_up(
    sharing: _Sharing,
    values: Mapping[str, torch.Tensor],
    of_outputs: set[str],
    whole: _Result,
    shares: list[list[int]],
) -> bool:
    samples = sum(len(rows) for rows in shares)
    totals, specs = sharing.totals_in(values, samples), sharing.piece.specs
    total, size = 0.0, abs(whole.value)
    for rows in shares:
        share = {name: tensor if specs[name].batch_axis is None else tensor[rows] for name, tensor in values.items()}
        part = len(rows) / samples
        result = _run(sharing.piece, sharing.inputs(share, totals, part), of_outputs, len(rows))
        if result is None:
            return False
        factor = part if sharing.claim == "mean" else 1.0
        total += factor * result.value
        size = max(size, abs(factor * result.value))
        for name, gradient in result.gradients.items():
            expected = whole.gradients[name][rows]
            # A gradient that is 0 but for rounding is measured by the loss.
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            limit = sharing.tolerance * largest + 1e-13 * abs(whole.value)
            if expected.numel() and float((expected - factor * gradient).abs().max()) > limit:
                return False
    return abs(total - whole.value) <= sharing.tolerance * size


def _run(piece: Piece, values: Mapping[str, torch.Tensor], of_outputs: set[str], samples: int) -> _Result | None:
    """Return the loss and its gradients for the outputs; None where it raises or is no number."""
    entered = {name: tensor.detach() for name, tensor in values.items()}
    inputs = {name: t.requires_grad_() for name, t in entered.items() if name in of_outputs and t.is_floating_point()}
    try:
        with torch.enable_grad():
            value = piece(entered, Context(samples=samples))[piece.graph.outputs[0]]
            results: Sequence[torch.Tensor | None] = [None] * len(inputs)
            if value.requires_grad and inputs:
                results = torch.autograd.grad(value, list(inputs.values()), allow_unused=True)
    except Exception:  # the loss is the user's: it may refuse drawn numbers, or a share of one sample, in any way
        return None
    gradients = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), results, strict=True)}
    number = float(value.detach())
    totals = [float(gradient.sum()) for gradient in gradients.values()]  # of which one is no number if any element is
    return _Result(number, gradients) if all(map(math.isfinite, (number, *totals))) else None


def _drawn(
    example: torch.Tensor, samples: int, generator: torch.Generator, drawing: str, is_changed: bool
) -> torch.Tensor:
    """Return `samples` samples like the example: an output is drawn anew, a target's rows are resampled."""
    example = torch.zeros(example.shape, dtype=example.dtype) if example.is_meta else example.detach().cpu()
    rows = torch.randint(example.shape[0], (samples,), generator=generator)
    resampled = example[rows]
    if not resampled.is_floating_point():
        return resampled  # class numbers stay valid
    if not drawing:
        return resampled * (0.5 + _uniform(resampled, generator)) if is_changed else resampled
    if drawing == "between 0 and 1":
        return 0.05 + 0.9 * _uniform(resampled, generator)
    normal = torch.randn(resampled.shape, generator=generator, dtype=resampled.dtype)
    if drawing == "probabilities":
        return normal.softmax(1) if resampled.dim() > 1 else normal.sigmoid()
    return resampled + normal


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, generator=generator, dtype=like.dtype)
