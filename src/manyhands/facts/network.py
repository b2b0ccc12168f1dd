"""A network as the planner sees it: operators, layers, cuts and their sizes. No weights, no torch.

    operators   o─o─o─o─o─o─o─o─o      the captured graph in topological order
    layers      [   )[     )[   )      a layer is a run of operators; a plan cuts between layers
    cut                     │          carries the tensors made before it and read after it

Sizes are affine in the number of samples: `fixed + per_sample * samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Literal

import msgspec

from manyhands.facts.errors import BadValue, unknown
from manyhands.facts.reads import Read
from manyhands.facts.spatial_axes import AxisStep, SpatialAxes, keeps_axes, spatial_axes
from manyhands.facts.summary import Summarized

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip


LossCombination = Literal["mean", "sum", "weighted", "whole"]
"""The way in which the losses of the shares of a batch make that of the whole: a mean weighted by samples, a sum, or
not at all, so that all samples must be in one place."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor's name, shape for one sample, and the axis that grows with the batch (None: none does).

    With several rows per sample (`x.flatten(0, 1)`) the batch axis holds shape[batch_axis] * samples rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    batch_axis: int | None = None
    differentiable: bool = False
    """Whether a gradient flows back to the tensor."""
    second_batch_axis: int | None = None
    """A further axis that grows with the batch, as of the similarities of every two samples. Such a tensor is whole on
    one device: no share of the samples has a part of it, and no cut carries it."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes_per_sample(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    def shape_for(self, samples: int) -> tuple[int, ...]:
        if self.batch_axis is None:
            return self.shape
        growing = (self.batch_axis, self.second_batch_axis)
        return tuple(e * samples if axis in growing else e for axis, e in enumerate(self.shape))

    def bytes_for(self, samples: int) -> int:
        return prod(self.shape_for(samples)) * DTYPE_BYTES[self.dtype]

    @property
    def pairs_samples(self) -> bool:
        """Whether it holds something for every two samples."""
        return self.second_batch_axis is not None

    @property
    def form(self) -> tuple[tuple[int, ...], int | None, int | None]:
        """Shape, batch axis and second batch axis."""
        return self.shape, self.batch_axis, self.second_batch_axis

    @property
    def shape_text(self) -> str:
        """'batch x 10', or 'batch x 2 batch': the sizes with their multiples of the batch."""
        growing = (self.batch_axis, self.second_batch_axis)
        sizes = [
            ("batch" if extent == 1 else f"{extent} batch") if axis in growing else str(extent)
            for axis, extent in enumerate(self.shape)
        ]
        return " x ".join(sizes) or "one number"

    @property
    def rows_per_sample(self) -> int:
        return 0 if self.batch_axis is None else self.shape[self.batch_axis]


def batched_first(tensors: Mapping[str, TensorSpec]) -> frozenset[str]:
    """Return the tensors whose first axis, and no other, is of samples."""
    return frozenset(name for name, spec in tensors.items() if spec.batch_axis == 0 and not spec.pairs_samples)


class WeightSpec(msgspec.Struct, frozen=True):
    """A parameter (trainable or frozen) or a buffer of the network."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    buffer: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


class ChannelWeight(msgspec.Struct, frozen=True):
    """The axes of a weight along which the channels lie that an operator makes, and those that it reads."""

    name: str
    makes: int | None
    reads: int | None


class Op(msgspec.Struct, frozen=True):
    """An operator of the graph."""

    name: str
    target: str
    inputs: tuple[str, ...]
    """The activations that it reads (graph inputs included), without weights."""
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[Read, ...]
    """The way in which its first output reads each of `inputs`."""
    macs: int = 0
    """Multiply-accumulates for one sample."""
    moved_bytes: int = 0
    """Bytes read and written for one sample: what a memory-bound operator costs."""
    saved_bytes: int = 0
    """Bytes it newly holds for backward, for one sample."""
    saved_fixed_bytes: int = 0
    statistics: int = 0
    """The number of channels whose sums over the batch it needs (batch normalisation in training); 0: none."""
    mixes_samples: bool = False
    """True where one sample's output depends on other samples in a way that is not such a statistic."""
    random: bool = False
    writes: tuple[str, ...] = ()
    """Buffers it writes in training."""
    carries: bool = False
    """Whether it writes its buffer at rest too, for later passes to read: all of them must run where the buffer is."""
    module: str = ""
    where: str = ""
    tiling: str = ""
    """The way in which a tiled stage computes it on maps. "local": from boxes, by its read rules; "norm": the same,
    after sums over all tiles; "pool": the sums of all tiles are its result, which every tile has whole; "": not
    at all."""
    derives_from: tuple[str, ...] = ()
    """Activations, of its inputs and outputs, whose values the gradients of its inputs read."""
    tile_sums: int = 0
    """Numbers per sample that tiles add up for it, forward and again backward (`statistics` apart)."""
    channels: str = ""
    """The way in which it is run on some of its channels. "free": as it stands; "shaped": with the shape of the part;
    "grouped": by whole groups; "shuffle": on parts of every group; "dense": own outputs from all inputs, or partial
    sums from own inputs; "": on all of them only."""
    channel_weights: tuple[ChannelWeight, ...] = ()
    is_fixed: bool = False
    """Whether its work is the same for any number of samples: what is computed from weights alone."""

    def work_samples(self, samples: float) -> float:
        """Return the factor of its work for one sample when there are so many."""
        return 1.0 if self.is_fixed else samples


class Layer(msgspec.Struct, frozen=True):
    """A run of operators [first, last) that is never split between stages, with its sums."""

    name: str
    first: int
    last: int
    macs: int
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    """The bytes that its operators produce for one sample."""
    output_bytes: int
    """The bytes that it passes to later layers, for one sample."""
    saved_bytes: int
    saved_fixed_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]


class Network(Summarized, msgspec.Struct, frozen=True, dict=True):
    """A captured graph without its weights: what planner, schedule and simulator work on."""

    name: str
    ops: tuple[Op, ...]
    layers: tuple[Layer, ...]
    tensors: dict[str, TensorSpec]
    weights: dict[str, WeightSpec]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    granularity: str
    fingerprint: str
    """Identifies graph and input shape: profiles are kept under it."""
    loss_combination: LossCombination = "mean"
    loss_bytes: int = 0
    """The most bytes for each sample that the loss holds, forward and back, with what it reads of the outputs."""

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def summary(self) -> dict[str, str]:
        weights = sum(prod(weight.shape) for weight in self.weights.values())
        return {
            "name": self.name, "layers": str(len(self.layers)), "operators": f"{len(self.ops):,}",
            "weights": f"{weights:,}",
        }  # fmt: skip

    @cached_property
    def spatial(self) -> dict[str, SpatialAxes]:
        """Tensor -> the axes of its rows and columns, or of its depth, rows and columns; others are absent."""
        steps = [AxisStep(op.target, op.outputs, op.reads) for op in self.ops]
        return spatial_axes(
            steps, {name: spec.shape for name, spec in self.tensors.items()}, batched_first(self.tensors)
        )

    @cached_property
    def followed(self) -> tuple[frozenset[str], ...]:
        """For each operator the inputs whose spatial axes its first output has, each followed from one of theirs."""
        none: SpatialAxes = ()
        return tuple(
            frozenset(
                read.tensor for read in op.reads
                if op.outputs and keeps_axes(
                    read, self.tensors[read.tensor].shape, self.spatial.get(read.tensor, none),
                    self.spatial.get(op.outputs[0], none),
                )
            )
            for op in self.ops
        )  # fmt: skip

    def extents(self, tensor: str) -> tuple[int, ...]:
        """Return the extents of a tensor's spatial axes: rows and columns, or depth, rows and columns; () if none."""
        shape = self.tensors[tensor].shape
        return tuple(shape[axis] for axis in self.spatial.get(tensor, ()))

    @cached_property
    def carries(self) -> bool:
        """Whether buffers are carried from one pass to the next, at rest too."""
        return any(op.carries for op in self.ops)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Tensor -> index of the operator that makes it; graph inputs are absent."""
        return {name: index for index, op in enumerate(self.ops) for name in op.outputs}

    @cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        """Tensor -> indices of the operators that read it."""
        places: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs):
                places.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in places.items()}

    @cached_property
    def layer_of_op(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) for _ in range(layer.first, layer.last))

    @cached_property
    def op_index(self) -> dict[str, int]:
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def layer_index(self) -> dict[str, int]:
        return {layer.name: index for index, layer in enumerate(self.layers)}

    def find_layer(self, name: str | int) -> int:
        """Return the index of a layer given by name or number."""
        if isinstance(name, int):
            if not 0 <= name <= len(self.layers):
                raise BadValue(f"layer {name} must be between 0 and {len(self.layers)} in {self.name}.")
            return name
        if name not in self.layer_index:
            raise unknown("layer", name, self.layer_index)
        return self.layer_index[name]

    def first_map(self, first: int) -> TensorSpec | None:
        """Return the first map that operators from `first` on read and do not make: what a tiled stage cuts first.
        Operators before it may compute weights from weights."""
        return next(
            (
                self.tensors[name] for op in self.ops[first:] for name in op.inputs
                if self.is_map(name) and self.producer.get(name, -1) < first
            ),
            None,
        )  # fmt: skip

    def is_map(self, tensor: str, least: int = 2) -> bool:
        """Return whether a tensor has spatial axes, and as many places along them as `least`."""
        return tensor in self.spatial and prod(self.extents(tensor)) >= least

    def crossing(self, op: int) -> tuple[str, ...]:
        """Return the tensors made before operator `op` and read at or after it (or returned by the network)."""
        outputs = set(self.outputs)
        return tuple(
            name
            for name, made in self.producer.items()
            if made < op and (name in outputs or any(reader >= op for reader in self.readers.get(name, ())))
        )

    def cut(self, layer: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that a cut before `layer` carries. Graph inputs have homes of their own and do not
        count."""
        position = self.layers[layer].first if layer < len(self.layers) else len(self.ops)
        return tuple(self.tensors[name] for name in self.crossing(position))

    def cut_bytes(self, layer: int, samples: int = 1) -> int:
        return sum(spec.bytes_for(samples) for spec in self.cut(layer))

    def backward_passes(self, op: Op) -> int:
        """Return the cost of an operator's gradients, in its own forward passes: one for its inputs, one for its
        weights."""
        if not any(self.tensors[name].differentiable for name in op.outputs):
            return 0
        if not op.macs:
            return 1
        flowing = [self.tensors[name] for name in op.inputs if self.tensors[name].differentiable]
        weights = any(self.weights[name].trainable for name in op.weights) or any(
            spec.batch_axis is None
            for spec in flowing  # a computed weight
        )
        return weights + any(spec.batch_axis is not None for spec in flowing)

    def weights_of(self, first: int, last: int) -> tuple[str, ...]:
        """Return the weights read by operators [first, last), each once."""
        return tuple(dict.fromkeys(name for op in self.ops[first:last] for name in op.weights))

    @cached_property
    def may_cut(self) -> tuple[bool, ...]:
        """[layer] -> whether a stage may start before it: not between two layers that read a buffer which is written in
        training."""
        may_cut = [True] * (len(self.layers) + 1)
        written = {name for op in self.ops for name in op.writes}
        first_use: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            for name in self.weights_of(layer.first, layer.last):
                if name in written:
                    start = first_use.setdefault(name, index) + 1
                    may_cut[start : index + 1] = [False] * (index + 1 - start)
        return tuple(may_cut)

    def gradient_bytes_of_outputs(self, samples: int) -> int:
        """Return the bytes of the gradients that the loss leaves for the backward pass."""
        outputs = (self.tensors[name] for name in self.outputs)
        return sum(spec.bytes_for(samples) for spec in outputs if spec.differentiable)

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    @property
    def parameter_count(self) -> int:
        return sum(weight.elements for weight in self.weights.values() if not weight.buffer)

    @property
    def parameter_bytes(self) -> int:
        return sum(weight.bytes for weight in self.weights.values() if not weight.buffer)

    @property
    def trained_bytes(self) -> int:
        return sum(weight.bytes for weight in self.weights.values() if weight.trainable)

    @property
    def input_text(self) -> str:
        """'3x224x224' for one image input, 'input_ids 512 + attention_mask 512' for several."""
        texts = []
        for name in self.inputs:
            spec = self.tensors[name]
            shape = [str(e) for axis, e in enumerate(spec.shape) if axis != spec.batch_axis]
            text = "x".join(shape) or "scalar"
            texts.append(text if len(self.inputs) == 1 else f"{name} {text}")
        return " + ".join(texts)
