"""torch.export's program -> Graph: names, batch-sized integers, in-place writes and buffers made plain.

* integers computed from the batch size become `Samples(factor)`, so that no integer ever crosses a cut
* in-place operators become functional, and later readers read the new value; where another view of the same memory
  is read later the module is refused, since the two would differ
* writes to buffers are marked, and happen in training only
"""

from __future__ import annotations

import math
import operator
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.graph import (
    Argument,
    Enum,
    Graph,
    Node,
    Special,
    Value,
    Weight,
    records,
    tree_map,
    values_of,
)
from manyhands.graph.sizes import dtype_name, output_specs, sized, spec_of

_TORCH = str(Path(torch.__file__).parent) + os.sep  # torchvision is not torch
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Options that say where a tensor lives; a graph runs wherever its piece is placed.
_PLACEMENT = frozenset({"device", "pin_memory", "layout"})
# Checks that export writes into the graph; shapes and dtypes are checked by manyhands itself.
_CHECKS = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_scalar.default",
                     "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"})  # fmt: skip
_ALIASING = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "permute", "transpose", "t",
             "unsqueeze", "squeeze", "slice", "select", "narrow", "chunk", "split", "split_with_sizes", "expand",
             "expand_as", "unbind", "movedim", "swapaxes", "detach", "contiguous", "to", "alias", "numpy_T",
             "broadcast_to", "broadcast_tensors", "meshgrid", "type_as", "_unsafe_view"}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What capture.py hands over."""

    program: Any
    name: str
    input_names: list[str]
    input_tree: Any
    output_tree: Any
    granularity: str


@dataclass
class _State:
    """The conversion under way. `current` follows renames by in-place operators."""

    nodes: list[Node] = field(default_factory=list)
    arguments: dict[str, Argument] = field(default_factory=dict)
    """Name in the exported program -> what stands for it in the Graph."""
    root: dict[str, str] = field(default_factory=dict)
    """Value -> the value whose memory it may share."""
    prefix: str = ""
    """Set inside a sub-graph, whose names are its own."""
    buffers: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


def convert(exported: Exported) -> Graph:
    """The Graph of an exported program."""
    program = exported.program
    state = _State()
    weights, tensors, aliases = _weights(program, state)
    inputs = _inputs(program, exported.input_names, state)
    for node in program.graph.nodes:
        if node.op == "call_function":
            _convert_node(node, state)
    leaves = _outputs(program, state)
    output_tree = tree_map(lambda leaf: leaves[int(leaf[1:])], exported.output_tree)
    kept = _live(state.nodes, set(leaves))
    return Graph(
        name=exported.name,
        inputs=inputs,
        input_tree=exported.input_tree,
        output_tree=output_tree,
        nodes=tuple(kept),
        weights=weights,
        aliases=aliases,
        state=tensors,
        granularity=exported.granularity,
    )


def _own_name(name: str) -> str:
    """Names in the wrapper module, without the wrapper."""
    return name.removeprefix("inner.").removeprefix("loss.")


def _weights(program: Any, state: _State) -> tuple[tuple[WeightSpec, ...], dict[str, torch.Tensor], dict[str, str]]:
    specs: list[WeightSpec] = []
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    parameters = dict(program.named_parameters())
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        is_constant = spec.target in program.constants
        tensor = program.constants[spec.target] if is_constant else program.state_dict[spec.target]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureFailed(f"The module holds a {type(tensor).__name__} ('{spec.target}') that is not a tensor.")
        name = _own_name(spec.target)
        kept = seen.get(id(parameters.get(spec.target, tensor)))
        if kept is not None:
            aliases[name] = kept
            state.arguments[spec.arg.name] = Weight(kept)
            continue
        seen[id(parameters.get(spec.target, tensor))] = name
        state.arguments[spec.arg.name] = Weight(name)
        is_parameter = spec.kind is InputKind.PARAMETER
        (state.parameters if is_parameter else state.buffers).add(name)
        trainable = is_parameter and parameters[spec.target].requires_grad
        specs.append(
            WeightSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype, name), trainable, buffer=not is_parameter)
        )
        tensors[name] = tensor.detach()
    # Tied parameters that export already folded into one placeholder still answer to both names.
    by_storage = {id(tensor): _own_name(name) for name, tensor in reversed(parameters.items())}
    for full, tensor in program.named_parameters():
        name = _own_name(full)
        if name not in tensors and by_storage.get(id(tensor)) in tensors:
            aliases[name] = by_storage[id(tensor)]
    return tuple(specs), tensors, aliases


def _inputs(program: Any, names: list[str], state: _State) -> tuple[TensorSpec, ...]:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    users = [n for n, s in zip(placeholders, program.graph_signature.input_specs) if s.kind is InputKind.USER_INPUT]
    specs = []
    for node, name in zip(users, names, strict=True):
        spec = spec_of(name, node.meta["val"], name)
        if spec.batch_axis is None and node.meta["val"].dim() and node.users:
            raise CaptureFailed(
                f"The batch size of input '{name}' is fixed at {node.meta['val'].shape[0]} by the module's code.",
                hint="Use x.shape[0] in place of a number.",
            )
        specs.append(spec)
        state.arguments[node.name] = Value(name)
        state.root[name] = name
    return tuple(specs)


def _outputs(program: Any, state: _State) -> list[str]:
    output = next(node for node in program.graph.nodes if node.op == "output")
    count = len(program.graph_signature.user_outputs)
    leaves = []
    for node in output.args[0][-count:]:
        record = state.arguments[node.name]
        if not isinstance(record, Value):
            raise CaptureFailed("The module returns one of its own weights or an integer; return a computed tensor.")
        leaves.append(record.name)
    return leaves


def _convert_node(node: Any, state: _State) -> None:
    name = state.prefix + node.name
    if node.target is operator.getitem:
        source, index = node.args
        state.arguments[name] = state.arguments[state.prefix + source.name][index]
        return
    if str(node.target) == "wrap_with_set_grad_enabled":
        _inline(node, state)
        return
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        state.arguments[name] = _integer(value, node)
        return
    where = _where(node)
    target = str(node.target)
    if target in _CHECKS:
        return
    is_number = isinstance(value, (float, bool, torch.SymFloat, torch.SymBool))
    if is_number or (value is None and not target.startswith("aten.")):
        raise CaptureFailed(f"The module computes a Python number from a tensor ({target}).\n  at {where}")
    arguments = tuple(_argument(a, state, node) for a in node.args)
    options = {k: _argument(a, state, node) for k, a in node.kwargs.items() if k not in _PLACEMENT}
    if target == "aten.to.device":  # where a tensor lives is decided by whoever runs the graph
        target, arguments = "aten.to.dtype", (arguments[0], *arguments[2:])
    mutated = next((a for a in arguments[:1] if isinstance(a, (Value, Weight))), None)
    is_write = target.split(".")[1].endswith("_") and not target.split(".")[1].startswith("_")
    if is_write and isinstance(mutated, Weight):
        _convert_buffer_write(node, target, arguments, options, mutated.name, where, state)
        return
    in_place = False
    if is_write and target != "aten.bernoulli_.float":
        plain = ops.functional(target)
        if plain is None:
            raise _off_list(target, where)
        assert isinstance(mutated, Value)
        _check_no_other_view(node, mutated.name, where, state)
        target, in_place = plain, True
    if target not in ops.ALLOWED or ops.resolve(target) is None:
        raise _off_list(target, where)
    _refuse_hidden_randomness(target, arguments, where)
    outputs = output_specs(name, value, where)
    several = isinstance(value, (tuple, list))
    state.nodes.append(Node(name, target, arguments, options, outputs, several, in_place, "", _module(node), where))
    own = [Value(spec.name) for spec in outputs]
    state.arguments[name] = own if several else own[0]
    shared = mutated.name if isinstance(mutated, Value) and _may_share_memory(target, arguments) else None
    for record in own:
        state.root[record.name] = record.name if shared is None else state.root[shared]
    if is_write and isinstance(mutated, Value):  # later readers of the old name read the new value
        for key, record in state.arguments.items():
            if record == mutated:
                state.arguments[key] = own[0]


def _may_share_memory(target: str, arguments: tuple[Argument, ...]) -> bool:
    """Whether the result may be the first argument's memory: a view, or a dropout that drops nothing."""
    if "dropout" in target:
        return not arguments[1] or not arguments[2]
    return target.split(".")[1] in _ALIASING


def _convert_buffer_write(
    node: Any, target: str, arguments: tuple[Argument, ...], options: dict[str, Argument], name: str, where: str,
    state: _State,
) -> None:  # fmt: skip
    if name in state.parameters:
        raise CaptureFailed(f"The module writes to its parameter '{name}' in forward.\n  at {where}")
    if target == "aten.copy_.default" and arguments[1] == Weight(name):
        return  # export's epilogue: the buffer was already written in place
    if target not in ops.BUFFER_UPDATE:
        raise _off_list(target, where)
    spec = spec_of(state.prefix + node.name, node.meta["val"], where)
    state.nodes.append(Node(spec.name, target, arguments, options, (spec,), False, False, name, _module(node), where))
    state.arguments[spec.name] = Weight(name)


def _inline(node: Any, state: _State) -> None:
    """A `with torch.no_grad():` region is a sub-graph; its nodes join the others, its results are detached."""
    enabled, inner, *given = node.args
    outer, prefix = state.prefix, f"{state.prefix}{inner.name}."
    arguments = [_argument(value, state, node) for value in given]
    state.prefix = prefix
    graph = getattr(node.graph.owning_module, inner.target).graph
    placeholders = [one for one in graph.nodes if one.op == "placeholder"]
    for placeholder, argument in zip(placeholders, arguments, strict=True):
        state.arguments[prefix + placeholder.name] = argument
    for one in graph.nodes:
        if one.op == "call_function":
            _convert_node(one, state)
    output = next(one for one in graph.nodes if one.op == "output")
    results = [state.arguments[prefix + one.name] for one in output.args[0]]
    state.prefix = outer
    if not enabled:
        results = [_detached(result, state) for result in results]
    state.arguments[outer + node.name] = results


def _detached(result: Argument, state: _State) -> Argument:
    if not isinstance(result, Value):
        return result
    spec = next(spec for node in reversed(state.nodes) for spec in node.outputs if spec.name == result.name)
    own = TensorSpec(f"{result.name}.detached", spec.shape, spec.dtype, spec.batch_axis)
    state.nodes.append(Node(own.name, "aten.detach.default", (result,), {}, (own,)))
    state.root[own.name] = state.root[result.name]
    return Value(own.name)


def _check_no_other_view(node: Any, name: str, where: str, state: _State) -> None:
    """An in-place write is plain only if nobody reads the same memory under another name afterwards."""
    root = state.root[name]
    shared = {n for n, r in state.root.items() if r == root and n != name}
    following = node.next
    while following.op != "root":
        for used in following.all_input_nodes:
            record = state.arguments.get(state.prefix + used.name)
            for one in records(record):
                if isinstance(one, Value) and one.name in shared and following is not node:
                    raise CaptureFailed(
                        f"{node.target} writes in place to memory that is read later under another name.\n  at {where}",
                        hint="Use the version without the underscore, or clone() first.",
                    )
        following = following.next


def _refuse_hidden_randomness(target: str, arguments: tuple[Argument, ...], where: str) -> None:
    if target in ops.RECURRENT:
        dropout = arguments[5]
        if isinstance(dropout, float) and dropout > 0 and arguments[4] > 1:
            raise CaptureFailed(
                f"A recurrent layer draws dropout (p={dropout}) inside one operator, which no share could repeat.\n"
                f"  at {where}",
                hint="Use one nn.LSTM(num_layers=1) per layer with nn.Dropout between them.",
            )


def _off_list(target: str, where: str) -> CaptureFailed:
    return CaptureFailed(
        f"Operator {target} is not on the list of operators manyhands runs.\n  at {where}",
        hint="The list is in manyhands/graph/ops.py; write the same with operators on it.",
    )


def _argument(value: Any, state: _State, node: Any) -> Argument:
    if isinstance(value, torch.fx.Node):
        return state.arguments[state.prefix + value.name]
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item, state, node) for item in value)
    if isinstance(value, torch.SymInt):
        return _integer(value, node)
    if isinstance(value, float) and not math.isfinite(value):
        return Special(str(value))
    if isinstance(value, torch.dtype):
        return Enum(dtype_name(value, _where(node)))
    if isinstance(value, torch.memory_format):
        return Enum(str(value).removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return None
    what = type(value).__name__
    raise CaptureFailed(f"{node.target} takes a {what}, which a graph cannot hold.\n  at {_where(node)}")


def _integer(value: Any, node: Any) -> Argument:
    return value if isinstance(value, int) else sized(value, _where(node))


def _module(node: Any) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return _own_name(list(stack.values())[-1][0] + ".").rstrip(".") if stack else ""


def _where(node: Any) -> str:
    """'file.py:12' of the innermost frame that is not torch's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith(_TORCH) and not f[0].endswith("graph/capture.py")]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _live(nodes: list[Node], outputs: set[str]) -> list[Node]:
    """Nodes whose result is used, or that write a buffer."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if node.updates or any(spec.name in needed for spec in node.outputs):
            needed.update(values_of(node))
            kept.append(node)
    return kept[::-1]
