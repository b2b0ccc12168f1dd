"""Losses that a module computes itself: `forward` is given labels, if it takes any, and returns its loss alone or
beside its outputs.

The module is captured with its labels as inputs. Then its graph is divided:

    forward    x ──▶ logits ─┬─▶ view ─┬─▶ cross_entropy ──▶ loss
               labels ───────┼─────────┘
               ······································································
    becomes    network  x ──▶ logits            loss of (logits, labels)

All that follows from the labels is the loss, and so is what is left of the samples after the last sum over them: an
auxiliary loss of a router, say, or all of the loss of an autoencoder, which has no labels. Between the two go outputs
of the module where the loss follows from them without weights, else the tensors that the loss reads. Constants are made
on both sides; parameters that the loss reads become penalties (penalties.py). Outputs that the loss does not read are
left out: training does not need them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import TensorSpec
from manyhands.graph.arguments import bound_arguments
from manyhands.graph.convert import live
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, Value, values_of, weights_of
from manyhands.graph.random_ops import RANDOM_CALLS
from manyhands.graph.sizes import at
from manyhands.graph.source_lines import definition_of
from manyhands.graph.trees import tree_leaves
from manyhands.graph.writes import may_share_memory

OWN_LOSS: Literal["own"] = "own"
LABELS = ("labels", "label", "targets", "target", "y")
"""Names by which forward may take its labels; the first that it has and that the input does not fill."""
_RESHAPES = frozenset({
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "movedim", "swapaxes", "clone", "contiguous", "alias", "to", "_to_copy",
})  # fmt: skip
"""Operators of one tensor that keep all its elements: the loss does them itself, and reads whole samples."""


# Calling the module


def labelled_arguments(
    module: nn.Module, batch: Any, target: Any
) -> tuple[list[Any], dict[str, Any], str | tuple[str, ...]]:
    """Return the arguments of `module` for a batch and its labels, and the name of the labels' argument. A target that
    is a dict of forward's arguments gives several, and their names. Without a target there are none, and a target that
    forward has no argument for is not used."""
    positional, keywords = bound_arguments(module, batch)
    if not _holds_anything(target):
        return positional, keywords, ()
    parameters = inspect.signature(module.forward).parameters
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    ordered = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = [name for name in named if name not in keywords and name not in ordered[: len(positional)]]
    if isinstance(target, dict) and target and all(key in free for key in target):
        return positional, {**keywords, **target}, tuple(target)
    required = [name for name in free if parameters[name].default is inspect.Parameter.empty]
    candidates = [name for name in LABELS if name in free] or (required if len(required) == 1 else [])
    if not candidates and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        if isinstance(target, dict) and target and keywords.keys().isdisjoint(target):
            return positional, {**keywords, **target}, tuple(target)
        candidates = [LABELS[0]] if LABELS[0] not in keywords else []
    if not candidates:
        return positional, keywords, ()
    return positional, {**keywords, candidates[0]: target}, candidates[0]


def _holds_anything(target: Any) -> bool:
    return target is not None and not (isinstance(target, (tuple, list, dict)) and not target)


def module_loss(
    module: nn.Module, loss: Callable[..., torch.Tensor] | Literal["own"], batch: Any, target: Any
) -> torch.Tensor:
    """Return the loss of a module on a batch: that of a function of (output, target), or the module's own."""
    if not isinstance(loss, str):
        positional, keywords = bound_arguments(module, batch)
        return loss(module(*positional, **keywords), target)
    positional, keywords, _ = labelled_arguments(module, batch, target)
    output = module(*positional, **keywords)
    value = _loss_in(output, lambda item: isinstance(item, torch.Tensor) and _is_loss(item.dim(), item.dtype))
    assert isinstance(value, torch.Tensor), "a module returns its loss in every call"
    return value


def _is_loss(axes: int, dtype: torch.dtype) -> bool:
    return axes == 0 and dtype.is_floating_point


def _loss_in(output: Any, is_loss: Callable[[Any], bool]) -> Any:
    """Return the loss in what a module returns: all of it, the entry or field `loss`, or of a sequence the first item
    if that is one number, else the only one that is; None: there is none."""
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        output = {"loss": getattr(output, "loss", None)}
    if isinstance(output, dict):
        candidates = [output.get("loss")]
    elif isinstance(output, (list, tuple)):
        numbers = [item for item in output if is_loss(item)]
        candidates = numbers if len(numbers) == 1 or (numbers and is_loss(output[0])) else []
    else:
        candidates = [output]
    return candidates[0] if candidates and is_loss(candidates[0]) else None


# Dividing the graph


def divided(graph: Graph, labels: str | tuple[str, ...], module: nn.Module) -> tuple[Graph, Graph]:
    """Return the network without its labels and its loss, of a graph that was captured with labels as inputs. The loss
    of a module that was given none takes any target, and uses nothing of it."""
    specs = {spec.name: spec for node in graph.nodes for spec in node.outputs}

    def is_loss(leaf: Any) -> bool:
        spec = specs.get(leaf) if isinstance(leaf, str) else None
        return spec is not None and _is_loss(len(spec.shape), getattr(torch, spec.dtype))

    value = _loss_in(graph.output_tree, is_loss)
    if value is None and not labels:
        taken = ", ".join(inspect.signature(module.forward).parameters) or "nothing"
        raise CaptureFailed(
            f"No loss is given, and {graph.name}.forward, without labels, returns none: it takes {taken}, and returns "
            f"{_described(graph.output_tree, specs)}.{at(definition_of(module.forward))}",
            hint="Pass loss=; or let forward take labels, or return the loss itself. A dict of forward's arguments as "
            "target also works.",
        )
    if value is None:
        raise CaptureFailed(
            f"{graph.name}.forward returns no loss: given labels, it returns {_described(graph.output_tree, specs)}."
            f"{at(definition_of(module.forward))}",
            hint="Return one number, a dict or dataclass with 'loss', or (loss, outputs); or pass loss=.",
        )
    positional, keywords = graph.input_tree
    is_several = isinstance(labels, tuple)
    target_tree = {key: keywords[key] for key in labels} if is_several else keywords[labels]
    names = {labels} if isinstance(labels, str) else set(labels)
    rest = [positional, {key: tree for key, tree in keywords.items() if key not in names}]
    division = _Division(graph, frozenset(tree_leaves(target_tree)), value)
    division.refuse_unfit()
    return division.network(rest), division.loss(target_tree)


def _described(tree: Any, specs: dict[str, TensorSpec]) -> str:
    """Return what a module returns, in words."""
    if isinstance(tree, dict):
        return f"a loss that is {_described(tree['loss'], specs)}" if "loss" in tree else ", ".join(tree) or "nothing"
    if isinstance(tree, (list, tuple)):
        return "several tensors, of which none is one number" if tree else "nothing"
    spec = specs.get(tree)
    return f"a tensor of shape {spec.shape_text}" if spec is not None else "its input"


class _Division:
    """The division of a graph at the tensors between network and loss."""

    def __init__(self, graph: Graph, labels: frozenset[str], value: str) -> None:
        self.graph, self.labels, self.value = graph, labels, value
        self.makers = {spec.name: node for node in graph.nodes for spec in node.outputs}
        self.specs = {spec.name: spec for spec in graph.inputs}
        self.specs.update({spec.name: spec for node in graph.nodes for spec in node.outputs})
        self.labelled = _downstream(graph, labels)
        """All that follows from the labels."""
        self.sampled = _downstream(graph, [spec.name for spec in graph.inputs])
        """All that follows from any input; the rest are constants."""
        self.returned = {name for name in tree_leaves(graph.output_tree) if name in self.sampled - self.labelled}
        self.ending = self._ending()
        self.derived = self._derived()
        self.taken: set[str] = set()
        """Names of the loss's nodes."""
        self.between = self._divide()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    def _ending(self) -> set[str]:
        """Return tensors without samples, made from samples, that nothing but the end of the loss reads."""
        ending, needed = {self.value}, {self.value}
        elsewhere: set[str] = set()
        for node in reversed(self.nodes):
            made = {spec.name for spec in node.outputs} & needed
            if not made:
                continue
            needed.update(values_of(node))
            for name in made - elsewhere:
                if self.specs[name].batch_axis is None and name in self.sampled:
                    ending.add(name)
            if not made <= ending | self.labelled:
                elsewhere.update(values_of(node))
        return ending

    def _derived(self) -> set[str]:
        """Return the module's outputs, and what follows from them and constants without a weight."""
        derived = set(self.returned)
        for node in self.nodes:
            reads = [name for name in values_of(node) if name in self.sampled]
            if reads and derived.issuperset(reads) and _is_plain(node):
                derived.update(spec.name for spec in node.outputs)
        return derived

    def _divide(self) -> dict[str, TensorSpec]:
        """Take the nodes of the loss, and return the tensors that it reads of the network."""
        between: dict[str, TensorSpec] = {}
        pending, seen = [self.value], set(self.labels)
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = self.makers.get(name)
            if maker is not None and self._is_of_loss(name, maker):
                self.taken.add(maker.name)
                pending += values_of(maker)
            else:
                between[name] = self.specs[name]
        return {name: spec for name, spec in self.specs.items() if name in between}

    def _is_of_loss(self, name: str, maker: Node) -> bool:
        if name in self.labelled or name in self.ending:
            return True
        if name not in self.sampled:
            return not _draws(maker) and not maker.updates
        if name in self.returned or not _is_plain(maker):
            return False
        return name in self.derived or (
            maker.target.split(".")[1] in _RESHAPES
            and len(values_of(maker)) == 1
            and self._elements(values_of(maker)[0]) == self._elements(name)
        )

    def _elements(self, name: str) -> tuple[int, bool]:
        return self.specs[name].elements, self.specs[name].batch_axis is None

    def refuse_unfit(self) -> None:
        """Refuse what cannot be divided exactly, naming the line."""
        trained = {spec.name for spec in self.graph.weights if spec.trainable}
        outputs = {name for name in tree_leaves(self.graph.output_tree) if name != self.value} & self.labelled
        for node in self.nodes:
            is_labelled = not self.labelled.isdisjoint(values_of(node))
            if node.updates and is_labelled:
                raise CaptureFailed(
                    f"{self.graph.name} writes its buffer '{node.updates}' from the labels.{at(node.where)}",
                    hint="Write it in a function of (output, target) that is passed as loss=, or not at all.",
                )
            if node.name in self.taken and _draws(node):
                raise CaptureFailed(
                    f"{self.graph.name} draws random numbers in its loss, behind the labels.{at(node.where)}",
                    hint="Draw them before the labels are used.",
                )
            is_trained = node.name in self.taken and trained & set(weights_of(node))
            if is_labelled and is_trained and self._leads_to(outputs, node):
                raise CaptureFailed(
                    f"The labels of {self.graph.name} ({', '.join(sorted(self.labels))}) go into the network itself, "
                    f"not only into its loss.{at(node.where)}",
                    hint="Give forward that input apart from the labels, such as decoder_input_ids.",
                )
        if not self.between:
            raise CaptureFailed(
                f"The loss of {self.graph.name} does not depend on its input.{at(self.makers[self.value].where)}"
            )

    def _leads_to(self, outputs: set[str], node: Node) -> bool:
        """Return whether the loss reads one of these outputs that is made from a node."""
        made = outputs & _downstream(self.graph, [spec.name for spec in node.outputs])
        return any(made & set(values_of(reader)) for reader in self.nodes if reader.name in self.taken)

    # The two graphs

    def network(self, input_tree: list[Any]) -> Graph:
        """Return the part that makes the tensors between."""
        given = [spec.name for spec in self.graph.inputs if spec.name in self.between]
        module = self.nodes[0].module if self.nodes else ""
        passed = [
            Node(self._name(name), "aten.clone.default", (Value(name),), {}, (self._spec(name),), module=module)
            for name in given
        ]
        nodes = [*passed, *(node for node in self.nodes if not (node.updates and node.name in self.taken))]
        names = [self._name(name) for name in self.between]
        return msgspec.structs.replace(
            self.graph,
            inputs=tuple(spec for spec in self.graph.inputs if spec.name not in self.labels),
            input_tree=input_tree,
            output_tree=self._tree(names),
            nodes=tuple(_not_over(live(nodes, set(names)), names)),
        )

    def loss(self, target_tree: Any) -> Graph:
        """Return the part that computes the loss of them and the labels."""
        nodes = [msgspec.structs.replace(n, in_place=False, module="") for n in self.nodes if n.name in self.taken]
        renamed = [_reading(node, {n: self._name(n) for n in self.between if n not in self.makers}) for node in nodes]
        weights = {name for node in renamed for name in weights_of(node)}
        labels = [spec for spec in self.graph.inputs if spec.name in self.labels]
        return Graph(
            name="loss",
            inputs=(*(self._spec(name) for name in self.between), *labels),
            input_tree=[[self._tree([self._name(name) for name in self.between]), target_tree], {}],
            output_tree=self.value,
            nodes=tuple(live(renamed, {self.value})),
            weights=tuple(spec for spec in self.graph.weights if spec.name in weights),
            aliases={},
            state={name: tensor for name, tensor in self.graph.state.items() if name in weights},
            granularity="operators",
        )

    def _name(self, name: str) -> str:
        """Return the name under which the network returns a tensor: an input is returned as a copy."""
        return name if name in self.makers else f"passed.{name}"

    def _spec(self, name: str) -> TensorSpec:
        return msgspec.structs.replace(self.specs[name], name=self._name(name))

    @staticmethod
    def _tree(names: list[str]) -> Any:
        return names[0] if len(names) == 1 else names


def _downstream(graph: Graph, sources: Iterable[str]) -> set[str]:
    """Return the tensors that are made from others, with these."""
    names = set(sources)
    for node in graph.nodes:
        if not names.isdisjoint(values_of(node)):
            names.update(spec.name for spec in node.outputs)
    return names


def _is_plain(node: Node) -> bool:
    return not (weights_of(node) or node.updates or _draws(node))


def _draws(node: Node) -> bool:
    random = RANDOM_CALLS.get(node.target)
    return random is not None and random.draws(node, training=True)


def _reading(node: Node, names: dict[str, str]) -> Node:
    """Return the node with values read under other names."""

    def changed(argument: Any) -> Any:
        if isinstance(argument, Value):
            return Value(names.get(argument.name, argument.name))
        return tuple(map(changed, argument)) if isinstance(argument, (list, tuple)) else argument

    options = {key: changed(argument) for key, argument in node.options.items()}
    return msgspec.structs.replace(node, arguments=tuple(map(changed, node.arguments)), options=options)


def _not_over(nodes: list[Node], outputs: list[str]) -> list[Node]:
    """Return the nodes, of which none writes in place to memory that an output may share: the loss reads it later."""
    shared = set(outputs)
    for node in reversed(nodes):
        sources = may_share_memory(node.target, node.arguments, len(node.outputs))
        for spec, source in zip(node.outputs, sources):
            if spec.name in shared and isinstance(source, Value):
                shared.add(source.name)
    return [
        msgspec.structs.replace(node, in_place=False) if node.in_place and shared & set(values_of(node)) else node
        for node in nodes
    ]
