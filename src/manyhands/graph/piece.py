"""A runnable piece of a graph: nodes [first, last) as a short list of calls.

A piece is what a stage computes. It takes the tensors that cross its upper cut, returns those that cross its lower
one, and does not depend on devices or messages. Autograd records inside a piece as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from manyhands.facts.errors import BadValue
from manyhands.facts.network import TensorSpec
from manyhands.graph import ops
from manyhands.graph.activations import overwriting
from manyhands.graph.argument_rules import EVERY_CALL, guarded
from manyhands.graph.convolution_kernels import product
from manyhands.graph.cumulative_norms import MOMENTUM, is_counted, with_momentum
from manyhands.graph.fusing import fused
from manyhands.graph.nodes import (
    Argument,
    Enum,
    Node,
    SampleCount,
    Special,
    Value,
    Weight,
    records_of,
    values_of,
    weights_of,
)
from manyhands.graph.packed_convolution import PackedConvolution
from manyhands.graph.random_ops import RANDOM_CALLS, RandomCall
from manyhands.graph.recording import unrecorded
from manyhands.graph.weights import Weights

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph

Call = Callable[..., Any]


@dataclass(frozen=True)
class Context:
    """The settings of one run of a piece, beside its inputs.

    `first_sample` is the place in the mini-batch of this run's first sample: random operators draw by it.
    """

    training: bool = True
    seed: int = 0
    step: int = 0
    first_sample: int = 0
    samples: int = 0
    """The number of samples in this run; 0: as many as the inputs have (a piece without inputs cannot tell)."""
    moves_buffers: bool = True
    """Whether running statistics are updated: not where a batch is run again."""
    records: bool = True
    """Whether autograd records: not where a batch will be run again."""


@dataclass(frozen=True)
class CompiledNode:
    """A compiled node: `call(*build(slots, samples), **options)` fills `outputs`; then `frees` are dropped."""

    node: Node
    call: Call
    build: Callable[[list[Any], int], list[Any]]
    options: Callable[[list[Any], int], dict[str, Any]] | None
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    random: RandomCall | None = None


@dataclass
class _Slots:
    """A mapping of names to places in the list of values."""

    places: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        return self.places.setdefault(name, len(self.places))


class Piece:
    """The nodes [first, last) of a graph, compiled."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        first: int = 0,
        last: int | None = None,
        *,
        kernels: Mapping[str, Call] | None = None,
    ) -> None:
        self.graph = graph
        self.first, self.last = first, len(graph.nodes) if last is None else last
        self.nodes = graph.nodes[self.first : self.last]
        self.weights = weights
        self.specs = {spec.name: spec for node in graph.nodes for spec in node.outputs}
        self.specs.update({spec.name: spec for spec in graph.inputs})
        made = {spec.name for node in self.nodes for spec in node.outputs}
        read = dict.fromkeys(name for node in self.nodes for name in values_of(node))
        self.inputs = tuple(name for name in read if name not in made)
        later = {name for node in graph.nodes[self.last :] for name in values_of(node)}
        later.update(graph.outputs)
        passed = [name for name in graph.outputs if name in {spec.name for spec in graph.inputs}]
        self.outputs = tuple(name for name in self.specs if name in later and name in made)
        if self.last == len(graph.nodes):
            self.outputs += tuple(name for name in passed if name not in self.outputs)
            self.inputs += tuple(name for name in passed if name not in self.inputs)
        self.weight_names = tuple(dict.fromkeys(name for node in self.nodes for name in weights_of(node)))
        self.kernels = dict(kernels or {})
        self._slots = _Slots()
        for name in (*self.inputs, *map(_weight_slot, self.weight_names)):
            self._slots.of(name)
        self._template: list[Any] | None = None
        self._steps: dict[tuple[bool, bool], tuple[CompiledNode, ...]] = {}
        self._counted: dict[tuple[bool, bool], tuple[tuple[CompiledNode, ...], tuple[int, ...]]] = {}

    def steps(self, training: bool, moves_buffers: bool = True) -> tuple[CompiledNode, ...]:
        """Return the compiled calls for training or evaluation."""
        compiled = self._steps.get((training, moves_buffers))
        if compiled is None:
            compiled = self._steps[training, moves_buffers] = tuple(_compile(self, training, moves_buffers))
            self._template = None
        return compiled

    def _without_counting(
        self, training: bool, moves_buffers: bool
    ) -> tuple[tuple[CompiledNode, ...], tuple[int, ...]]:
        """Return the steps without those that count batches in a buffer which nothing else reads, and the places of
        these buffers: all are counted up at once."""
        split = self._counted.get((training, moves_buffers))
        if split is None:
            steps, names = self.steps(training, moves_buffers), set(counters(self.nodes, self.outputs).values())
            other_steps = tuple(step for step in steps if step.node.updates not in names)
            counted = (step.node.updates for step in steps if step.node.updates in names)
            split = self._counted[training, moves_buffers] = (
                other_steps, tuple(self._slots.of(_weight_slot(name)) for name in counted)
            )  # fmt: skip
        return split

    def fresh_slots(self) -> list[Any]:
        """Return the list of values before a run: weights in place, the rest empty."""
        if self._template is None or len(self._template) != len(self._slots.places):
            self._template = [None] * len(self._slots.places)
            for name in self.weight_names:
                self._template[self._slots.of(_weight_slot(name))] = self.weights.tensors[name]
        return self._template.copy()

    def rest(self, samples: int) -> None:
        """Lay the weights out as their kernels read them for `samples` samples: they will not change any more."""
        for node in self.nodes:
            call = self.kernels.get(node.name)
            if isinstance(call, PackedConvolution) and call.pack(self.weights, call.source.shape_for(samples)):
                self._template = None

    def samples_in(self, values: Mapping[str, torch.Tensor]) -> int:
        """Return how many samples the given inputs hold; all must agree."""
        counts: dict[str, int] = {}
        for name in self.inputs:
            spec = self.specs[name]
            if spec.batch_axis is not None:
                counts[name] = values[name].shape[spec.batch_axis] // spec.rows_per_sample
        if len(set(counts.values())) > 1:
            raise BadValue(f"The inputs disagree on the number of samples: {counts}.")
        return next(iter(counts.values()), 1)

    def __call__(self, values: Mapping[str, torch.Tensor], context: Context | None = None) -> dict[str, torch.Tensor]:
        """Run the piece on the tensors that enter it; return the tensors that leave it."""
        context = context or Context()
        steps, counters = self._without_counting(context.training, context.moves_buffers)
        slots = self.fresh_slots()
        for place, name in enumerate(self.inputs):
            slots[place] = values[name]
        samples = context.samples or self.samples_in(values)
        run_steps(steps, slots, samples, context)
        if counters:
            torch._foreach_add_([slots[place] for place in counters], 1)
        place_of = self._slots.places
        return {name: slots[place_of[name]] for name in self.outputs}


def run_steps(steps: Iterable[CompiledNode], slots: list[Any], samples: int, context: Context) -> None:
    """Run compiled nodes on the list of values, in one loop with as little Python as possible between two operators."""
    for step in steps:
        arguments = step.build(slots, samples)
        if step.random is not None:
            result = step.random(step.node, context.seed, context.step, context.first_sample, *arguments)
        elif step.options is None:
            result = step.call(*arguments)
        else:
            result = step.call(*arguments, **step.options(slots, samples))
        if step.node.several:
            for place, value in zip(step.outputs, result):
                slots[place] = value
        else:
            slots[step.outputs[0]] = result
        for place in step.frees:
            slots[place] = None


def counters(nodes: Sequence[Node], outputs: Iterable[str]) -> dict[int, str]:
    """Return the nodes that count batches, as place -> buffer: they add one to a buffer which nothing else reads."""
    uses = Counter(name for node in nodes for name in weights_of(node))
    read = {name for node in nodes for name in values_of(node)} | set(outputs)
    return {
        place: node.updates
        for place, node in enumerate(nodes)
        if node.target == "aten.add_.Tensor" and node.arguments == (Weight(node.updates), 1) and not node.options
        if uses[node.updates] == 1 and node.name not in read
    }


def _weight_slot(name: str) -> str:
    return "weight " + name


def _compile(piece: Piece, training: bool, moves_buffers: bool) -> Iterable[CompiledNode]:
    leaving = set(piece.outputs)
    nodes, calls = (piece.nodes, {}) if training else fused(piece.nodes, piece.kernels, leaving, piece.specs)
    last_reader = {name: index for index, node in enumerate(nodes) for name in values_of(node)}
    made_by = {spec.name: node for node in nodes for spec in node.outputs}
    for index, node in enumerate(nodes):
        if node.updates and not (training and moves_buffers) and node.updates not in piece.graph.carried:
            continue
        slots = piece._slots
        random = RANDOM_CALLS.get(node.target)
        arguments = node.arguments
        call: Call
        if node.target in _KEEPS_STATISTICS and not training and arguments[3] is not None:
            arguments = (*arguments[:5], False, *arguments[6:])
        elif node.target in _KEEPS_STATISTICS and training and not moves_buffers:
            arguments = (*arguments[:3], *_without_buffers(arguments), *arguments[5:])
        if is_counted(node.target, arguments) and not (training and moves_buffers):
            arguments = (*arguments[:MOMENTUM], 0.0, *arguments[MOMENTUM + 1 :])
        if random is not None and not random.draws(node, training):
            random = None
        if random is not None:
            call = _never
            arguments = random.arguments(node)
        elif node.target in RANDOM_CALLS and not training:
            call, arguments = RANDOM_CALLS[node.target].at_rest(node)
        else:
            call = (
                calls.get(node.name)
                or piece.kernels.get(node.name)
                or _operator(piece, node, last_reader, index, leaving, made_by, training)
            )
        if random is None and node.target in EVERY_CALL:
            call = guarded(node.target, call)
        if is_counted(node.target, arguments):
            call = with_momentum(call)
        draw = random.call if random is not None else None
        if node.without_gradient or node.updates:
            call, draw = unrecorded(call), unrecorded(draw) if draw is not None else None
        freed = [name for name in values_of(node) if last_reader[name] == index and name not in leaving]
        unread = [s.name for s in node.outputs if s.name not in last_reader and s.name not in leaving]
        yield CompiledNode(
            node=node,
            call=call,
            build=_builder(arguments, slots),
            options=_options(node, slots, piece.weights.device) if _has_options(node) and random is None else None,
            outputs=tuple(slots.of(spec.name) for spec in node.outputs),
            frees=tuple(slots.of(name) for name in (*freed, *unread)),
            random=draw,
        )


# Normalisations with running statistics as arguments 3 and 4, and whether to use the batch's own as argument 5.
_KEEPS_STATISTICS = frozenset({"aten.batch_norm.default", "aten.instance_norm.default"})


def _without_buffers(arguments: tuple[Argument, ...]) -> tuple[Argument, Argument]:
    """Return the running statistics, left out where the batch's own are used anyway."""
    return (None, None) if arguments[5] is True else (arguments[3], arguments[4])


def _never(*_: Any) -> Any:
    raise AssertionError("a random operator is called through its random form")


def _operator(
    piece: Piece, node: Node, last_reader: dict[str, int], index: int, leaving: set[str], made_by: dict[str, Node],
    training: bool,
) -> Call:  # fmt: skip
    """Return the torch operator; in its in-place form where the user wrote that and it makes no difference."""
    operator = ops.resolve(ops.RESHAPES.get(node.target, node.target))
    if not node.in_place:
        return operator  # type: ignore[no-any-return]
    name = next(r.name for r in node.arguments if isinstance(r, Value))
    maker = made_by.get(name)
    safe = (
        maker is not None
        and last_reader[name] == index
        and name not in leaving
        and maker.target in ops.CONVOLUTION | ops.NORMALISATION | ops.PRODUCT | {"aten.add.Tensor"}
        and not maker.several
        and piece.kernels.get(maker.name) is not product  # a view
        and _memory_of(node.outputs[0]) == _memory_of(piece.specs[name])
    )
    written = ops.in_place(node.target) if safe else None
    if written is None:
        return operator  # type: ignore[no-any-return]
    if training:
        (made,) = node.outputs
        readers = [other for other in piece.nodes if made.name in values_of(other)]
        is_alone = made.name not in leaving and len(readers) == 1 and readers[0].target in ops.CONVOLUTION
        if (call := overwriting(node.target, is_alone=is_alone)) is not None:
            return call
    return ops.resolve(written)  # type: ignore[no-any-return]


def _memory_of(spec: TensorSpec) -> tuple[Any, ...]:
    """Return a description of a tensor's memory."""
    return spec.form, spec.dtype


_CONSTANTS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ops.MEMORY_FORMATS},
    **{name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16",
                                               "int8", "uint8", "bool", "complex64")},
}  # fmt: skip


def _is_plain(argument: Argument) -> bool:
    """Return whether an argument is the same in every run."""
    if isinstance(argument, (Value, Weight, SampleCount)):
        return False
    return all(_is_plain(item) for item in argument) if isinstance(argument, (list, tuple)) else True


def _constant(argument: Argument) -> Any:
    if isinstance(argument, Enum):
        return _CONSTANTS[argument.name]
    if isinstance(argument, Special):
        return float(argument.text)
    return [_constant(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _getter(argument: Argument, slots: _Slots) -> Callable[[list[Any], int], Any]:
    if _is_plain(argument):
        constant = _constant(argument)
        return lambda values, samples: constant
    if isinstance(argument, Value):
        place = slots.of(argument.name)
        return lambda values, samples: values[place]
    if isinstance(argument, Weight):
        place = slots.of(_weight_slot(argument.name))
        return lambda values, samples: values[place]
    if isinstance(argument, SampleCount):
        factor = argument.factor
        return lambda values, samples: factor * samples
    getters = [_getter(item, slots) for item in argument]
    return lambda values, samples: [get(values, samples) for get in getters]


def _builder(arguments: tuple[Argument, ...], slots: _Slots) -> Callable[[list[Any], int], list[Any]]:
    """Return a function that makes the argument list; the common case (tensors and constants only) has no nested
    calls."""
    base = [_constant(a) if _is_plain(a) else None for a in arguments]
    direct = [(i, slots.of(a.name if isinstance(a, Value) else _weight_slot(a.name)))
              for i, a in enumerate(arguments) if isinstance(a, (Value, Weight))]  # fmt: skip
    nested = [(i, _getter(a, slots)) for i, a in enumerate(arguments)
              if not _is_plain(a) and not isinstance(a, (Value, Weight))]  # fmt: skip

    def build(values: list[Any], samples: int) -> list[Any]:
        result = base.copy()
        for position, place in direct:
            result[position] = values[place]
        for position, get in nested:
            result[position] = get(values, samples)
        return result

    return build


def _makes_from_nothing(node: Node) -> bool:
    """Return whether a node creates a tensor without another that determines its device."""
    return node.target in ops.CREATION and not any(isinstance(a, (Value, Weight)) for a in records_of(node))


def _has_options(node: Node) -> bool:
    return bool(node.options) or _makes_from_nothing(node)


def _options(node: Node, slots: _Slots, device: torch.device) -> Callable[[list[Any], int], dict[str, Any]]:
    getters = {name: _getter(argument, slots) for name, argument in node.options.items()}
    if _makes_from_nothing(node):
        getters["device"] = lambda values, samples: device
    return lambda values, samples: {name: get(values, samples) for name, get in getters.items()}
