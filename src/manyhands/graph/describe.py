"""Graph -> Network: what every operator costs, reads and saves, and how operators form layers (chain.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from manyhands.facts.network import Network, Op, TensorSpec, batched_first
from manyhands.facts.spatial_axes import AxisStep, spatial_axes
from manyhands.graph import ops
from manyhands.graph.arithmetic import Shapes, macs
from manyhands.graph.autocast import early_places
from manyhands.graph.chain import layers_of
from manyhands.graph.channels import channels_of
from manyhands.graph.loss_memory import loss_bytes
from manyhands.graph.nodes import Node, Value, Weight, values_of, weights_of
from manyhands.graph.norm_shapes import fake_norm
from manyhands.graph.piece import Context, Piece, run_steps
from manyhands.graph.read_rules import reads_of
from manyhands.graph.rows import outer_of
from manyhands.graph.sample_mixing import mixes_samples
from manyhands.graph.sample_numbers import numbers_of_samples
from manyhands.graph.tiling import derives_from, tile_sums, tiling_of
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph


def describe(graph: Graph, granularity: str = "") -> Network:
    """Return the network as planner, schedule and simulator see it."""
    granularity = granularity or graph.granularity
    specs = {spec.name: spec for spec in graph.inputs}
    specs.update({spec.name: spec for node in graph.nodes for spec in node.outputs})
    weights = {spec.name: spec for spec in graph.weights}
    shapes: Shapes = {**specs, **{"weight " + name: spec for name, spec in weights.items()}}
    differentiable = _differentiable(graph)
    specs = {n: msgspec.structs.replace(spec, differentiable=n in differentiable) for n, spec in specs.items()}
    saved = saved_bytes(graph)
    outers: dict[str, int | None] = {}
    for node in graph.nodes:
        outer = outer_of(node, specs, outers)
        for spec in node.outputs:
            if outer != 1:  # an output is read by rows: those of a sample lie together, or no share has some of them
                outers[spec.name] = None if spec.name in graph.outputs else outer
    numbers = numbers_of_samples(graph.nodes, specs, frozenset(graph.outputs))
    reads_of_node = [reads_of(node, specs, weights) for node in graph.nodes]
    outputs = [tuple(spec.name for spec in node.outputs) if not node.updates else () for node in graph.nodes]
    made_and_read = zip(graph.nodes, outputs, reads_of_node, strict=True)
    steps = [AxisStep(node.target, made, reads) for node, made, reads in made_and_read]
    axes = spatial_axes(steps, {name: spec.shape for name, spec in specs.items()}, batched_first(specs))
    described = []
    for node, reads, (fixed, per_sample) in zip(graph.nodes, reads_of_node, saved, strict=True):
        tiling = tiling_of(node, reads, axes, specs, weights)
        channels, channel_weights = channels_of(node, specs, weights)
        described.append(
            Op(
                name=node.name,
                target=node.target,
                inputs=values_of(node),
                weights=weights_of(node),
                outputs=tuple(spec.name for spec in node.outputs) if not node.updates else (),
                reads=reads,
                macs=macs(node, shapes),
                moved_bytes=_moved_bytes(node, specs),
                saved_bytes=per_sample,
                saved_fixed_bytes=fixed,
                statistics=_statistics(node, specs),
                mixes_samples=mixes_samples(node, specs, outers, numbers),
                random=node.target in ops.RANDOM,
                writes=writes(node),
                carries=node.updates in graph.carried,
                module=node.module,
                where=node.where,
                tiling=tiling,
                derives_from=derives_from(node, specs),
                tile_sums=tile_sums(node, tiling),
                channels=channels,
                channel_weights=channel_weights,
                is_fixed=_is_fixed(node, specs),
            )
        )
    return Network(
        name=graph.name,
        ops=tuple(described),
        layers=layers_of(
            tuple(described),
            specs,
            weights,
            graph.outputs,
            granularity,
            _attached(graph) | _carrying(graph) | early_places(graph.nodes, graph.outputs),
            numbers,
        ),
        tensors=specs,
        weights=weights,
        inputs=tuple(spec.name for spec in graph.inputs),
        outputs=graph.outputs,
        granularity=granularity,
        fingerprint=fingerprint(graph),
        loss_combination=graph.loss_combination or ("mean" if graph.loss is None else "whole"),
        loss_bytes=loss_bytes(graph),
    )


def _attached(graph: Graph) -> frozenset[int]:
    """Return the places of nodes that serve nothing but penalties."""
    if not graph.penalties:
        return frozenset()
    needed = set(tree_leaves(graph.output_tree))
    places = []
    for index, node in reversed(list(enumerate(graph.nodes))):
        if node.updates or any(spec.name in needed for spec in node.outputs):
            needed.update(values_of(node))
        else:
            places.append(index)
    return frozenset(places)


def _carrying(graph: Graph) -> frozenset[int]:
    """Return the places of nodes that must stay with the node before them: those between a carried buffer's first node
    and its last."""
    places: set[int] = set()
    for name in graph.carried:
        users = [index for index, node in enumerate(graph.nodes) if name in weights_of(node)]
        places.update(range(users[0] + 1, users[-1] + 1))
    return frozenset(places)


def fingerprint(graph: Graph) -> str:
    """Return a short name for graph and input shape; weights' values and the user's file names do not matter."""
    nodes = [(n.target, n.arguments, sorted(n.options.items()), n.outputs) for n in graph.nodes]
    text = repr((nodes, graph.inputs, graph.weights))
    without_gradient = [i for i, node in enumerate(graph.nodes) if node.without_gradient]
    if without_gradient:
        text += repr(without_gradient)
    if graph.carried:
        text += repr(graph.carried)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _differentiable(graph: Graph) -> set[str]:
    """Return the tensors that depend on a trainable weight through differentiable operators."""
    trainable = {spec.name for spec in graph.weights if spec.trainable}
    names: set[str] = set()
    for node in graph.nodes:
        if node.target.startswith("aten.detach") or node.updates or node.without_gradient:
            continue
        if any(name in trainable for name in weights_of(node)) or any(name in names for name in values_of(node)):
            names.update(spec.name for spec in node.outputs if spec.dtype.startswith(("float", "bfloat", "complex")))
    return names


def _moved_bytes(node: Node, specs: dict[str, TensorSpec]) -> int:
    if node.updates:
        return 0
    views = node.target in ops.SHAPE and node.target.split(".")[1] not in ("cat", "concat", "stack", "embedding", "pad")
    if views:
        return 0
    return sum(specs[n].bytes_per_sample for n in values_of(node)) + sum(s.bytes_per_sample for s in node.outputs)


def _is_fixed(node: Node, specs: dict[str, TensorSpec]) -> bool:
    """Return whether neither what a node reads nor what it makes grows with the batch."""
    tensors = [*(specs[name] for name in values_of(node)), *node.outputs]
    return not node.updates and all(spec.batch_axis is None for spec in tensors)


def writes(node: Node) -> tuple[str, ...]:
    """Return the buffers that a node writes in training: by itself, or as running statistics of a normalisation."""
    if node.updates:
        return (node.updates,)
    keeps = node.target in ("aten.batch_norm.default", "aten.instance_norm.default") and node.arguments[5]
    return tuple(a.name for a in node.arguments[3:5] if isinstance(a, Weight)) if keeps else ()


def _statistics(node: Node, specs: dict[str, TensorSpec]) -> int:
    """Return the channels of a batch norm that normalises by the batch in training; 0 for other nodes, and for one
    that standardises a weight: that is the same on every device."""
    if node.target != "aten.batch_norm.default" or not node.arguments[5]:
        return 0
    data = node.arguments[0]
    is_batch = isinstance(data, Value) and specs[data.name].batch_axis is not None
    return specs[data.name].shape[1] if is_batch else 0


@dataclass
class _Saved:
    """The storages held for backward; each counts once, for the operator that held it first."""

    known: dict[int, Any]
    bytes: int = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = storage  # kept alive, so that its address is not used again
            self.bytes += storage.nbytes()
        return tensor


def saved_bytes(graph: Graph) -> list[tuple[int, int]]:
    """Return the bytes each node newly holds for backward, as (fixed, per sample). No memory is used: tensors are on
    the meta device, or fake.

    Recurrent layers are counted as torch's own kernels hold them. oneDNN's, which run them in float32 on a CPU, hold a
    workspace of their own that no fake tensor shows: two to five times as much. Only measuring shows it.
    """
    if not graph.nodes:
        return []
    with _without_onednn():
        two, three = _saved_at(graph, (2, 3))
    return [(max(0, 3 * a - 2 * b), max(0, b - a)) for a, b in zip(two, three, strict=True)]


@contextmanager
def _without_onednn() -> Iterator[None]:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _saved_at(graph: Graph, counts: Sequence[int]) -> list[list[int]]:
    """Return the bytes that each node newly holds, for each number of samples."""
    is_recurrent = any(
        node.target in ops.RECURRENT for node in graph.nodes
    )  # on the meta device they hold other tensors
    device = torch.device("cpu" if is_recurrent else "meta")
    with FakeTensorMode(allow_non_fake_inputs=True) if is_recurrent else device, torch.enable_grad():
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)).requires_grad_(spec.trainable)
            for spec in graph.weights
        }
        piece = Piece(graph, Weights(tensors, device))
        piece.steps(training=True)
        return [_held(graph, piece, samples) for samples in counts]


def _held(graph: Graph, piece: Piece, samples: int) -> list[int]:
    slots = piece.fresh_slots()
    by_name = {spec.name: spec for spec in graph.inputs}
    for place, name in enumerate(piece.inputs):
        spec = by_name[name]
        slots[place] = torch.empty(spec.shape_for(samples), dtype=getattr(torch, spec.dtype))
    saved = _Saved({tensor.untyped_storage()._cdata: tensor for tensor in piece.weights.tensors.values()})
    held: list[int] = []
    keep: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        for step in piece.steps(training=True):
            before = saved.bytes
            norm = None if step.node.without_gradient else fake_norm(step.node.target, step.build(slots, samples))
            if norm is None:
                run_steps([step], slots, samples, Context(samples=samples))
            else:
                slots[step.outputs[0]] = norm
            keep.extend(slots[place] for place in step.outputs)
            held.append(saved.bytes - before)
    return held
