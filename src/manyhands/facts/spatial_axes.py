"""The spatial axes of every tensor: which of its axes are the depth, the rows and the columns of a map.

    (sample, channel, row, column) ──permute──▶ (sample, row, column, channel) ──layer norm, linear──▶ ...
                       2    3                            1    2                                    1, 2

They are followed through the operators by their read rules, so they are known in whatever order a network puts its
axes. Where nothing can be followed, as at a network's inputs, they are those that later operators expect (a
convolution's are the last two, or three), and else the last two of a tensor with four or five axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from manyhands.facts.reads import Dealt, Read, Rule, Whole

SpatialAxes = tuple[int, ...]
"""Rows and columns, or depth, rows and columns, in this order."""
_ROOT_RANKS = (4, 5)


class AxisStep(NamedTuple):
    """An operator as far as axes go."""

    target: str
    outputs: tuple[str, ...]
    reads: tuple[Read, ...]


def spatial_axes(
    steps: Sequence[AxisStep], shapes: Mapping[str, tuple[int, ...]], batched: frozenset[str]
) -> dict[str, SpatialAxes]:
    """Return tensor -> its spatial axes, for those that have any; `batched`: tensors whose first axis is of samples."""
    expected = _expected(steps, shapes)

    def root(name: str) -> SpatialAxes:
        rank = len(shapes[name])
        last = (rank - 2, rank - 1) if rank in _ROOT_RANKS else ()
        return tuple(sorted(expected[name])) if max(expected.get(name, (rank,))) < rank else last

    made = {name for step in steps for name in step.outputs}
    axes = {name: root(name) for name in batched if name not in made}
    for step in steps:
        if not step.outputs:
            continue
        first = step.outputs[0]
        count = _own_axes(step.target)
        rank = len(shapes[first])
        followed = _followed(step, axes, shapes)
        if count and step.reads and rank == len(shapes[step.reads[0].tensor]) > count:
            last = tuple(range(rank - count, rank))
            followed = followed if sorted(followed or ()) == [*last] else last
        for name in step.outputs:
            if name in batched:
                fits = len(shapes[name]) == rank > max(followed or (rank,))
                axes[name] = followed if followed is not None and fits else root(name)
    return {name: spatial for name, spatial in axes.items() if spatial}


def follows(rule: Rule) -> bool:
    """Return whether a part of an axis makes a part of another by this rule."""
    return not isinstance(rule, (Whole, Dealt))


def keeps_axes(read: Read, shape: tuple[int, ...], spatial: SpatialAxes, made: SpatialAxes) -> bool:
    """Return whether an operator's output follows an input of this shape along all spatial axes, in their order, and
    along no other; where the input has one element, that may serve all. `made`: the output's axes."""
    if len(spatial) != len(made):
        return False
    follow_own = dict(zip(spatial, made))
    for axis, (rule, extent) in enumerate(zip(read.rules, shape, strict=True)):
        if axis in follow_own:
            is_followed = follows(rule) and rule.axis == follow_own[axis]
            if not is_followed and not (isinstance(rule, Whole) and extent == 1):
                return False
        elif rule.axis in made and extent != 1:
            return False
    return True


def _own_axes(target: str) -> int:
    """Return how many spatial axes an operator gives to what it reads and makes; 0: it takes any."""
    return 3 if "3d" in target else 2 if "2d" in target else 0


def _followed(
    step: AxisStep, axes: Mapping[str, SpatialAxes], shapes: Mapping[str, tuple[int, ...]]
) -> SpatialAxes | None:
    """Return the axes of an operator's output that follow those of what it reads; of several, those of the largest."""
    sources = [read for read in step.reads if axes.get(read.tensor)]
    for read in sorted(sources, key=lambda read: -_places(axes[read.tensor], shapes[read.tensor])):
        rules = [read.rules[axis] for axis in axes[read.tensor]]
        made = tuple(rule.axis for rule in rules if follows(rule) and rule.axis is not None)
        if len(set(made)) == len(rules):
            return made
    return None


def _places(axes: SpatialAxes, shape: tuple[int, ...]) -> int:
    return prod(shape[axis] for axis in axes)


def _expected(steps: Sequence[AxisStep], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, SpatialAxes]:
    """Return the axes that operators expect of what they read, followed back from those that say so."""
    expected: dict[str, SpatialAxes] = {}
    for step in reversed(steps):
        count = _own_axes(step.target)
        if count and step.reads:
            rank = len(shapes[step.reads[0].tensor])
            if rank > count:
                expected.setdefault(step.reads[0].tensor, tuple(range(rank - count, rank)))
            continue
        wanted = expected.get(step.outputs[0]) if step.outputs else None
        for read in step.reads if wanted else ():
            source = {rule.axis: axis for axis, rule in enumerate(read.rules) if follows(rule)}
            if wanted is not None and all(axis in source for axis in wanted):
                expected.setdefault(read.tensor, tuple(source[axis] for axis in wanted))
    return expected
