"""Groups operators into layers, between which a plan may cut.

    operators   conv bn relu │ conv bn │ add relu │ pool │ ...     each operator that computes, with its glue
    blocks      conv bn relu conv bn add relu      │ ...           between cuts that carry one differentiable tensor

A cut is possible only where every tensor across it has one row per sample (or none): then a share of the samples is an
interval of the tensor. Views and created constants are glue; they go with the operator they serve.
"""

from __future__ import annotations

import itertools
from collections import Counter

from manyhands.facts.errors import BadValue
from manyhands.facts.network import Layer, Op, TensorSpec, WeightSpec
from manyhands.facts.reads import Whole
from manyhands.graph import ops

GRANULARITIES = ("blocks", "operators")
_LARGEST_BLOCK = 6
"""The most heavy operators in a block; a region without a narrow cut that holds more (U-Net) is cut at its heavy
operators."""


def layers_of(
    described: tuple[Op, ...],
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightSpec],
    outputs: tuple[str, ...],
    granularity: str,
    attached: frozenset[int] = frozenset(),
    uncut: frozenset[str] = frozenset(),
) -> tuple[Layer, ...]:
    """Group operators into layers. Operators in `attached` (penalties on weights) go with the operator before them; no
    cut lies where a tensor in `uncut` (numbers of samples) is still needed."""
    if granularity not in GRANULARITIES:
        raise BadValue(f"granularity must be one of {', '.join(GRANULARITIES)}, not '{granularity}'.")
    crossing = _crossings(described, outputs)
    of_weights = _of_weights_alone(described)
    glue = frozenset(
        i for i, op in enumerate(described)
        if _is_glue_to_next(op, tensors) or (i not in attached and op.outputs and of_weights.issuperset(op.outputs))
    )  # fmt: skip
    possible = [
        i for i in range(1, len(described))
        if all(tensors[n].rows_per_sample <= 1 and not tensors[n].pairs_samples and n not in uncut for n in crossing[i])
        and i - 1 not in glue and i not in attached
    ]  # fmt: skip
    starts = [i for i in possible if _computes_from(described, i, glue)]
    if granularity == "blocks":
        narrow = {i for i in starts if sum(_is_activation(tensors[n]) for n in crossing[i]) <= 1}
        starts = _block_starts(described, starts, narrow, glue, of_weights)
    bounds = [0, *starts, len(described)] if described else []
    runs = list(itertools.pairwise(bounds))
    names = _names(described, runs)
    return tuple(
        _layer(name, first, last, described, tensors, weights, crossing[last] if last < len(described) else outputs)
        for name, (first, last) in zip(names, runs)
    )


def _is_activation(spec: TensorSpec) -> bool:
    """Return whether a tensor has a gradient for every sample; a penalty on weights has only a few numbers."""
    return spec.differentiable and spec.batch_axis is not None


def _crossings(described: tuple[Op, ...], outputs: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return, for every position, the tensors made before it and still needed."""
    last_read = {name: index for index, op in enumerate(described) for name in op.inputs}
    last_read.update(dict.fromkeys(outputs, len(described)))
    alive: dict[str, None] = {}
    crossings: list[tuple[str, ...]] = []
    for index, op in enumerate(described):
        crossings.append(tuple(alive))
        for name in op.outputs:
            if last_read.get(name, -1) > index:
                alive[name] = None
        for name in [n for n in alive if last_read[n] <= index]:
            del alive[name]
    crossings.append(tuple(alive))
    return crossings


def _is_glue_to_next(op: Op, tensors: dict[str, TensorSpec]) -> bool:
    """Return whether an operator goes with the one after it, as buffer counters, created constants and flattening
    do."""
    if op.target in ops.BUFFER_UPDATE or op.target in ops.CREATION:
        return True
    if not _is_view(op) or not op.inputs or not op.outputs:
        return False
    before, after = tensors[op.inputs[0]].shape, tensors[op.outputs[0]].shape
    return len(before) == 4 and before[2] * before[3] > 1 and len(after) == 2


def _is_view(op: Op) -> bool:
    return op.target in ops.SHAPE and op.moved_bytes == 0


def _computes_from(described: tuple[Op, ...], index: int, glue: frozenset[int]) -> bool:
    """Return whether a layer that starts here starts with work: operators that are glue to the next are skipped, and a
    view is not work."""
    while index < len(described) and index in glue:
        index += 1
    return index < len(described) and not _is_view(described[index])


def _block_starts(
    described: tuple[Op, ...], starts: list[int], narrow: set[int], glue: frozenset[int], of_weights: set[str]
) -> list[int]:
    """Return where blocks start in the `blocks` granularity: each holds at least one heavy operator or global
    pooling."""
    heavy = [
        (op.target in ops.HEAVY and (bool(op.weights) or not of_weights.isdisjoint(op.inputs))) or _collapses_map(op)
        for op in described
    ]
    chosen: list[int] = []
    regions = [0, *sorted(narrow), len(described)]
    block_heavy = 0
    flattened: int | None = None
    for first, last in itertools.pairwise(regions):
        inside = sum(heavy[first:last])
        if first and flattened is None and first in glue and described[first].outputs and _is_view(described[first]):
            flattened = first  # what follows a flattened map goes with the next block
        if inside and block_heavy and first:
            chosen.append(first if flattened is None else flattened)
            block_heavy = 0
        if inside:
            flattened = None
        block_heavy += inside
        if inside > _LARGEST_BLOCK:
            for i in starts:
                since = max([0, *chosen][-1], first)
                if first < i < last and heavy[_next_work(described, i, glue)] and any(heavy[since:i]):
                    chosen.append(i)
    return chosen


def _of_weights_alone(described: tuple[Op, ...]) -> set[str]:
    """Return the tensors that are made of weights and of nothing else, such as a weight that was transposed."""
    made: set[str] = set()
    for op in described:
        if (op.weights or op.inputs) and made.issuperset(op.inputs):
            made.update(op.outputs)
    return made


def _collapses_map(op: Op) -> bool:
    """Return whether an operator is global pooling: the last place where a map can be tiled, and the first with a small
    cut. It forms a separate block."""
    is_pooling = op.target in ops.POOLING or op.target in ("aten.mean.dim", "aten.amax.default")
    rules = op.reads[0].rules if op.reads else ()
    return is_pooling and len(rules) == 4 and isinstance(rules[2], Whole) and isinstance(rules[3], Whole)


def _next_work(described: tuple[Op, ...], index: int, glue: frozenset[int]) -> int:
    while index < len(described) - 1 and index in glue:
        index += 1
    return index


def _names(described: tuple[Op, ...], runs: list[tuple[int, int]]) -> list[str]:
    """Return each run's name: the module path its operators share, else the operator's own; repeated names are
    numbered."""
    names = []
    for first, last in runs:
        paths = [op.module.split(".") for op in described[first:last] if op.module and op.weights]
        paths = paths or [op.module.split(".") for op in described[first:last] if op.module]
        shared: list[str] = []
        for parts in zip(*paths):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        work = [op for op in described[first:last] if not _is_view(op)] or described[first:last]
        if len(paths) > 1 and not shared:
            shared = paths[0]
        names.append(".".join(shared) or work[-1].name)
    counts = Counter(names)
    occurrences: Counter[str] = Counter()
    unique = []
    for name in names:
        occurrences[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}#{occurrences[name]}")
    return unique


def _layer(
    name: str,
    first: int,
    last: int,
    described: tuple[Op, ...],
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightSpec],
    leaving: tuple[str, ...],
) -> Layer:
    run = described[first:last]
    made = {n for op in run for n in op.outputs}
    own_weights = tuple(dict.fromkeys(n for op in run for n in op.weights))
    leaves = tuple(n for n in leaving if n in made)
    return Layer(
        name=name,
        first=first,
        last=last,
        macs=sum(op.macs for op in run),
        parameter_bytes=sum(weights[n].bytes for n in own_weights if not weights[n].buffer),
        buffer_bytes=sum(weights[n].bytes for n in own_weights if weights[n].buffer),
        activation_bytes=sum(tensors[n].bytes_per_sample for op in run if not _is_view(op) for n in op.outputs),
        output_bytes=sum(tensors[n].bytes_per_sample for n in leaves),
        saved_bytes=sum(op.saved_bytes for op in run),
        saved_fixed_bytes=sum(op.saved_fixed_bytes for op in run),
        inputs=tuple(dict.fromkeys(n for op in run for n in op.inputs if n not in made)),
        outputs=leaves,
        weights=own_weights,
    )
