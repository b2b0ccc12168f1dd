"""Parameters of the model that its loss reads, such as `0.01 * sum(p.pow(2).sum() for p in model.parameters())`.

A loss sees the network's outputs and the target; weights are spread over devices. So whatever a loss computes from
trained weights alone moves into the network, next to the operator that uses the weight, and the loss reads the result:

    before    network  x ──▶ output                  loss of  output, target, and weights
    after     network  x ──▶ output, penalties       loss of  [output, penalties], target

Penalties have no batch axis: every share of a batch computes the same ones, and the loss of a share weighs them as it
weighs everything else. A weight that the loss combines with outputs or targets becomes a penalty as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import nn

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph.describe import writes
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Argument, Node, SampleCount, Value, Weight, records_of, values_of, weights_of
from manyhands.graph.sizes import at

_PREFIX = "penalty."


def with_penalties(graph: Graph, loss: Graph, module: nn.Module) -> Graph:
    """Return the graph with its loss, in which all that the loss computes from trained parameters alone has moved into
    the network."""
    model_names = _weights_of_model(graph, loss, module)
    if not model_names:
        return msgspec.structs.replace(graph, loss=loss)
    move = _Move(loss, model_names)
    penalties = {spec.name: spec for spec in move.penalties}
    outputs, target = loss.input_tree[0]
    names = {spec.name for spec in graph.weights}
    added = [s for s in (_spec(name, module) for name in dict.fromkeys(model_names.values())) if s.name not in names]
    smaller = msgspec.structs.replace(
        loss,
        inputs=(*loss.inputs, *penalties.values()),
        input_tree=[[[outputs, list(penalties)], target], {}],
        nodes=tuple(move.rest),
        weights=tuple(spec for spec in loss.weights if spec.name not in model_names),
        state={name: tensor for name, tensor in loss.state.items() if name not in model_names},
        aliases={alias: name for alias, name in loss.aliases.items() if name not in model_names},
    )
    return msgspec.structs.replace(
        graph,
        nodes=_inserted(graph.nodes, move.moved),
        weights=(*graph.weights, *added),
        state={**graph.state, **{spec.name: module.get_parameter(spec.name).detach() for spec in added}},
        penalties=tuple(penalties),
        loss=smaller,
    )


def _weights_of_model(graph: Graph, loss: Graph, module: nn.Module) -> dict[str, str]:
    """Return the constants of the loss that are trained parameters of the module, by their memory -> the parameters'
    names."""
    written = {name for node in graph.nodes for name in writes(node)}
    tensors: dict[str, torch.Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    by_memory = {t.untyped_storage().data_ptr(): name for name, t in tensors.items() if not t.is_meta and t.numel()}
    used = {name: node for node in reversed(loss.nodes) for name in weights_of(node)}
    names: dict[str, str] = {}
    for name, tensor in loss.state.items():
        model_name = by_memory.get(tensor.untyped_storage().data_ptr()) if name in used and tensor.numel() else None
        if model_name is None:
            continue
        parameter, where = tensors[model_name], at(used[name].where)
        if model_name in written:
            raise CaptureFailed(
                f"The loss reads the buffer '{model_name}', which the model writes as it trains.{where}",
                hint="Return what the loss needs of it from forward.",
            )
        if not parameter.requires_grad:
            continue  # it stays as it is: a constant
        if (tensor.shape, tensor.stride()) != (parameter.shape, parameter.stride()):
            raise CaptureFailed(
                f"The loss reads a view of the parameter '{model_name}' that was made before it was called.{where}",
                hint="Make the view inside the loss.",
            )
        names[name] = graph.aliases.get(model_name, model_name)
    return names


def _spec(name: str, module: nn.Module) -> WeightSpec:
    """Return the description of a parameter that only the loss reads."""
    parameter = module.get_parameter(name)
    return WeightSpec(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), trainable=True)


class _Move:
    """A division of a loss's nodes into those that need weights alone, which move, and the others."""

    def __init__(self, loss: Graph, model_names: Mapping[str, str]) -> None:
        self.own = model_names
        self.moved: list[Node] = []
        self.rest: list[Node] = []
        self.penalties: list[TensorSpec] = []
        """The results of moved nodes that the other nodes read."""
        self._specs: dict[str, TensorSpec] = {}
        for node in loss.nodes:
            if self._needs_weights_alone(node):
                self._take(node)
            else:
                self.rest.append(self._reading_penalties(node, loss))
        assert not any(name in self._specs for name in loss.outputs), "a loss reads its outputs and target"

    def _needs_weights_alone(self, node: Node) -> bool:
        reads, weights = values_of(node), weights_of(node)
        return (
            bool(reads or weights)
            and all(name in self._specs for name in reads)
            and all(name in self.own for name in weights)
            and not any(isinstance(record, SampleCount) for record in records_of(node))
        )

    def _take(self, node: Node) -> None:
        outputs = tuple(msgspec.structs.replace(spec, name=_PREFIX + spec.name) for spec in node.outputs)
        self._specs.update(zip((spec.name for spec in node.outputs), outputs))
        self.moved.append(
            _with_records(
                msgspec.structs.replace(node, name=_PREFIX + node.name, outputs=outputs, module=""), self._moved_record
            )
        )

    def _moved_record(self, record: Value | Weight) -> Argument:
        return Value(self._specs[record.name].name) if isinstance(record, Value) else Weight(self.own[record.name])

    def _reading_penalties(self, node: Node, loss: Graph) -> Node:
        for name in weights_of(node):
            if name in self.own and name not in self._specs:
                self._hand_over(name, next(spec for spec in loss.weights if spec.name == name))
        for name in (*values_of(node), *weights_of(node)):
            spec = self._specs.get(name)
            if spec is not None and spec not in self.penalties:
                self.penalties.append(spec)
        return _with_records(node, lambda r: Value(self._specs[r.name].name) if r.name in self._specs else r)

    def _hand_over(self, name: str, weight: WeightSpec) -> None:
        """Make a penalty of a weight that the loss needs as it is."""
        spec = TensorSpec(f"{_PREFIX}{name}", weight.shape, weight.dtype)
        self._specs[name] = spec
        self.moved.append(Node(spec.name, "aten.alias.default", (Weight(self.own[name]),), {}, (spec,)))


def _with_records(node: Node, change: Callable[[Value | Weight], Argument]) -> Node:
    def changed(argument: Argument) -> Argument:
        if isinstance(argument, (list, tuple)):
            return tuple(changed(item) for item in argument)
        return change(argument) if isinstance(argument, (Value, Weight)) else argument

    options = {key: changed(argument) for key, argument in node.options.items()}
    return msgspec.structs.replace(node, arguments=tuple(map(changed, node.arguments)), options=options)


def _inserted(nodes: tuple[Node, ...], moved: list[Node]) -> tuple[Node, ...]:
    """Return the nodes with every moved one right after the last that reads its weights, or that makes what it
    reads."""
    last_reader = {name: place for place, node in enumerate(nodes) for name in weights_of(node)}
    place_of: dict[str, int] = {}
    after: dict[int, list[Node]] = {}
    for node in moved:
        places = [last_reader.get(name, len(nodes) - 1) for name in weights_of(node)]
        place = max([*places, *(place_of[name] for name in values_of(node))])
        place_of.update((spec.name, place) for spec in node.outputs)
        after.setdefault(place, []).append(node)
    return tuple(inserted for place, node in enumerate(nodes) for inserted in (node, *after.get(place, ())))
