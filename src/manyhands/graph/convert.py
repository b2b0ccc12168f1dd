"""torch.export's program -> Graph: names, batch-sized integers, in-place writes and buffers made plain.

* integers computed from the batch size become `Samples(factor)`, so that no integer ever crosses a cut
* in-place operators become functional, and later readers read the new value; where another view of the same memory
  is read later the module is refused, since the two would differ
* writes to buffers are marked, and happen in training only; a buffer that was assigned anew becomes a write
* what was written under torch.no_grad() is marked, and runs so
"""

from __future__ import annotations

import linecache
import math
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.custom_functions import INCOMING
from manyhands.graph.frames import is_torchs_or_ours
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
    weights_of,
)
from manyhands.graph.random_ops import RANDOM_CALLS
from manyhands.graph.replacements import advice
from manyhands.graph.rows import outer_of
from manyhands.graph.sizes import at, dtype_name, output_specs, sized, spec_of

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
_WEIGHT = "weight "  # before a weight's name, where it is the memory that a value shares


@dataclass(frozen=True)
class Exported:
    """What capture.py hands over."""

    program: Any
    name: str
    input_names: list[str]
    input_tree: Any
    output_tree: Any
    granularity: str
    wrappers: tuple[str, ...] = ("inner.",)
    """What stands before the names of the module's own weights and children; the first that fits is taken off."""
    assigned: tuple[str, ...] = ()
    """Buffers that forward assigned anew; the program's last outputs are their new values."""


@dataclass
class _State:
    """The conversion under way."""

    nodes: list[Node] = field(default_factory=list)
    arguments: dict[str, Argument] = field(default_factory=dict)
    """Name in the exported program -> what stands for it in the Graph."""
    root: dict[str, str] = field(default_factory=dict)
    """Value -> the value, or 'weight NAME', whose memory it may share."""
    prefix: str = ""
    """Set inside a sub-graph, whose names are its own."""
    buffers: set[str] = field(default_factory=set)
    weight_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    wrappers: tuple[str, ...] = ()
    around: list[tuple[Any, str]] = field(default_factory=list)
    """The nodes whose sub-graphs are being converted, with the prefix outside."""
    without_gradient: bool = False
    with_gradient: set[str] = field(default_factory=set)
    """Values, and 'weight NAME', through which gradients may flow."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    outers: dict[str, int] = field(default_factory=dict)
    """rows.py's outer factor of values whose samples are interleaved."""

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        if node.updates:
            return
        self.specs.update({spec.name: spec for spec in node.outputs})
        reads = {*values_of(node), *(_WEIGHT + name for name in weights_of(node))}
        if not self.without_gradient and node.target != "aten.detach.default" and reads & self.with_gradient:
            self.with_gradient.update(spec.name for spec in node.outputs)
        outer = outer_of(node, self.specs, self.outers)
        if outer != 1:
            self.outers.update((spec.name, outer or spec.rows_per_sample) for spec in node.outputs)


def convert(exported: Exported) -> Graph:
    """The Graph of an exported program."""
    program = exported.program
    state = _State(wrappers=exported.wrappers)
    weights, tensors, aliases = _weights(program, state)
    inputs = _inputs(program, exported.input_names, state)
    for node in program.graph.nodes:
        if node.op == "call_function":
            _convert_node(node, state)
    leaves = _outputs(program, state, exported.assigned)
    output_tree = tree_map(lambda leaf: leaves[int(leaf[1:])], exported.output_tree)
    kept = _live(state.nodes, set(leaves))
    _refuse_nonlinear_backward(kept)
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


def _refuse_nonlinear_backward(nodes: list[Node]) -> None:
    """A custom function whose gradient depends on the incoming one other than linearly (custom_functions.py)."""
    for node in nodes:
        if node.target == "aten.full_like.default" and node.arguments[1] == INCOMING:
            raise CaptureFailed(
                "The backward of an autograd function is not linear in the gradient that it gets, so shares of a batch "
                f"would not add up.{at(node.where)}",
                hint="Scaling, masking and reversing a gradient can be captured; clipping or normalising one cannot: "
                "each device has the gradient of its own samples only.",
            )


def _own_name(name: str, wrappers: tuple[str, ...]) -> str:
    """Names in the wrapper module, without the wrapper."""
    return next((name.removeprefix(prefix) for prefix in wrappers if name.startswith(prefix)), name)


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
        name = _own_name(spec.target, state.wrappers)
        kept = seen.get(id(parameters.get(spec.target, tensor)))
        if kept is not None:
            aliases[name] = kept
            state.arguments[spec.arg.name] = Weight(kept)
            continue
        seen[id(parameters.get(spec.target, tensor))] = name
        state.arguments[spec.arg.name] = Weight(name)
        is_parameter = spec.kind is InputKind.PARAMETER
        (state.parameters if is_parameter else state.buffers).add(name)
        state.weight_shapes[name] = tuple(tensor.shape)
        trainable = is_parameter and parameters[spec.target].requires_grad
        if trainable:
            state.with_gradient.add(_WEIGHT + name)
        specs.append(
            WeightSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype, name), trainable, buffer=not is_parameter)
        )
        tensors[name] = tensor.detach()
    # Tied parameters that export already folded into one placeholder still answer to both names.
    by_storage = {id(tensor): _own_name(name, state.wrappers) for name, tensor in reversed(parameters.items())}
    for full, tensor in program.named_parameters():
        name = _own_name(full, state.wrappers)
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
        state.specs[name] = spec
    return tuple(specs)


def _outputs(program: Any, state: _State, assigned: tuple[str, ...]) -> list[str]:
    output = next(node for node in program.graph.nodes if node.op == "output")
    count = len(program.graph_signature.user_outputs)
    found = list(output.args[0][-count:])
    for node, name in zip(found[len(found) - len(assigned) :], assigned, strict=True):
        _assign_buffer(node, _own_name(f"inner.{name}", state.wrappers), state)
    leaves = []
    for node in found[: len(found) - len(assigned)]:
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
    if str(node.target) == "wrap_with_autocast":
        raise _autocast(node)
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
        raise CaptureFailed(f"The module computes a Python number from a tensor ({target}).{at(where)}")
    arguments = tuple(_argument(a, state, node) for a in node.args)
    options = {k: _argument(a, state, node) for k, a in node.kwargs.items() if k not in _PLACEMENT}
    if target == "aten.to.device":  # where a tensor lives is decided by whoever runs the graph
        target, arguments = "aten.to.dtype", (arguments[0], *arguments[2:])
    if target in _VIEWS_AS and _is_as_before(arguments, state):
        target, arguments = "aten.alias.default", arguments[:1]
    mutated = next((a for a in arguments[:1] if isinstance(a, (Value, Weight))), None)
    is_write = target.split(".")[1].endswith("_") and not target.split(".")[1].startswith("_")
    if is_write and isinstance(mutated, Weight):
        _convert_buffer_write(node, target, arguments, options, mutated.name, where, state)
        return
    in_place = False
    if target in _MASKED_WRITES:
        target, arguments = _masked_fill(target, arguments, where, state)
    if is_write:
        plain = target if target in ops.RANDOM else ops.functional(target)
        if plain is None:
            raise _off_list(target, node)
        assert isinstance(mutated, Value)
        _check_write(target, mutated.name, where, state)
        _check_no_other_view(node, mutated.name, where, state)
        target, in_place = plain, plain != target
    if target not in ops.ALLOWED or ops.resolve(target) is None:
        raise _off_list(target, node)
    _refuse_hidden_randomness(target, arguments, where)
    outputs = output_specs(name, value, where)
    several = isinstance(value, (tuple, list))
    state.add(
        Node(name, target, arguments, options, outputs, several, in_place, "", _module(node, state), where,
             state.without_gradient)
    )  # fmt: skip
    _refuse_unfit_randomness(state.nodes[-1], state)
    own = [Value(spec.name) for spec in outputs]
    state.arguments[name] = own if several else own[0]
    shared = _may_share_memory(target, arguments, len(own))
    for record, source in zip(own, shared, strict=True):
        state.root[record.name] = record.name if source is None else _root(source, state)
    if is_write and isinstance(mutated, Value):  # later readers of the old name read the new value
        for key, record in state.arguments.items():
            if record == mutated:
                state.arguments[key] = own[0]


_VIEWS_AS = frozenset({"aten.view_as.default", "aten.reshape_as.default", "aten.expand_as.default"})


def _is_as_before(arguments: tuple[Argument, ...], state: _State) -> bool:
    """Whether a tensor is to take the shape that it has."""
    if not all(isinstance(one, Value) for one in arguments):
        return False
    one, other = (state.specs[argument.name] for argument in arguments)
    return (one.shape, one.batch_axis) == (other.shape, other.batch_axis)


_MASKED_WRITES = {
    "aten.index_put.default": "aten.masked_fill.Tensor",
    "aten.index_put_.default": "aten.masked_fill_.Tensor",
}


def _masked_fill(
    target: str, arguments: tuple[Argument, ...], where: str, state: _State
) -> tuple[str, tuple[Argument, ...]]:
    """`x[mask] = number` is a masked fill; any other write at computed places has no operator on the list."""
    written, indices, value, *rest = arguments
    specs = [state.specs[one.name] for one in (written, *indices) if isinstance(one, Value)]
    if len(specs) == 2 and len(indices) == 1 and _is_scalar(value, state) and not any(rest):
        whole, mask = specs
        if mask.dtype == "bool" and (mask.shape, mask.batch_axis) == (whole.shape, whole.batch_axis):
            return _MASKED_WRITES[target], (written, indices[0], value)
    raise _off_list(target, where)


def _is_scalar(argument: Argument, state: _State) -> bool:
    """Whether an argument is a tensor of one number without axes."""
    if isinstance(argument, Value):
        return state.specs[argument.name].shape == ()
    return isinstance(argument, Weight) and state.weight_shapes.get(argument.name) == ()


def _autocast(node: Any) -> CaptureFailed:
    """A region under torch.autocast: which types it computes in would have to be repeated on every device."""
    inner = getattr(node.graph.owning_module, node.args[4].target).graph
    place = next((found for one in inner.nodes if one.op == "call_function" and (found := _where(one))), "")
    return CaptureFailed(
        f"The module computes under torch.autocast (to {str(node.args[1]).removeprefix('torch.')}), which is not "
        f"captured.{at(place)}",
        hint="Take the torch.autocast out of forward, or cast by hand there: x.to(torch.bfloat16).",
    )


def _may_share_memory(target: str, arguments: tuple[Argument, ...], count: int) -> list[Argument]:
    """Whose memory each result may be: a view's source; or what a dropout is given, which it returns in evaluation."""
    name = target.split(".")[1]
    first = arguments[0] if arguments else None
    source: Argument = None
    if "dropout" in target:
        source = first
    elif name == "einsum":  # of one tensor it permutes, or takes a diagonal
        source = arguments[1][0] if len(arguments[1]) == 1 else None
    elif name in _ALIASING:
        source = first
    if isinstance(source, (list, tuple)):  # broadcast_tensors, meshgrid
        return list(source)
    return [source if isinstance(source, (Value, Weight)) else None] * count


def _root(source: Value | Weight, state: _State) -> str:
    return state.root[source.name] if isinstance(source, Value) else _WEIGHT + source.name


def _check_write(target: str, name: str, where: str, state: _State) -> None:
    """An in-place write to an activation must be expressible as an operator of its own."""
    root = state.root[name]
    if root.startswith(_WEIGHT):
        raise CaptureFailed(
            f"{target} writes to a part or view of '{root.removeprefix(_WEIGHT)}', one of the module's own tensors."
            f"{at(where)}",
            hint="Write to the whole buffer (self.buffer.add_(...)), or assign it anew (self.buffer = ...).",
        )
    if state.without_gradient and name in state.with_gradient:
        raise CaptureFailed(
            f"{target} under torch.no_grad() writes in place to a tensor that gradients flow through.{at(where)}",
            hint="Write to a clone() made under torch.no_grad().",
        )


def _convert_buffer_write(
    node: Any, target: str, arguments: tuple[Argument, ...], options: dict[str, Argument], name: str, where: str,
    state: _State,
) -> None:  # fmt: skip
    if name in state.parameters:
        raise CaptureFailed(f"The module writes to its parameter '{name}' in forward.{at(where)}")
    if target == "aten.copy_.default" and arguments[1] == Weight(name):
        return  # export's epilogue: the buffer was already written in place
    if target not in ops.BUFFER_UPDATE:
        raise _off_list(target, node)
    spec = spec_of(state.prefix + node.name, node.meta["val"], where)
    state.add(
        Node(spec.name, target, arguments, options, (spec,), False, False, name, _module(node, state), where,
             state.without_gradient)
    )  # fmt: skip
    state.arguments[spec.name] = Weight(name)


def _assign_buffer(node: Any, name: str, state: _State) -> None:
    """`self.buffer = value`, as a write to the buffer after the last node that reads the old one."""
    record = state.arguments[node.name]
    if record == Weight(name):
        return
    where = _where(node)
    if not isinstance(record, Value) or state.root[record.name].startswith(_WEIGHT):
        raise CaptureFailed(
            f"The module assigns another of its own tensors, or a view of one, to its buffer '{name}'.{at(where)}",
            hint="Assign a clone() of it.",
        )
    if name not in state.buffers:
        raise CaptureFailed(f"The module assigns '{name}', which is another buffer under a second name.{at(where)}")
    reads = [i for i, one in enumerate(state.nodes) if name in weights_of(one)]
    made = [i for i, one in enumerate(state.nodes) if record.name in {spec.name for spec in one.outputs}]
    spec = spec_of(f"{name}.assigned", node.meta["val"], where)
    state.nodes.insert(
        max([-1, *reads, *made]) + 1,
        Node(spec.name, "aten.copy_.default", (Weight(name), record), {}, (spec,), False, False, name,
             _module(node, state), where, True),
    )  # fmt: skip


def _inline(node: Any, state: _State) -> None:
    """A `with torch.no_grad():` region is a sub-graph; its nodes join the others, marked."""
    enabled, inner, *given = node.args
    outer, prefix = state.prefix, f"{state.prefix}{inner.name}."
    arguments = [_argument(value, state, node) for value in given]
    state.around.append((node, outer))
    was, state.without_gradient = state.without_gradient, not enabled
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
    state.prefix, state.without_gradient = outer, was
    state.around.pop()
    state.arguments[outer + node.name] = results


def _check_no_other_view(node: Any, name: str, where: str, state: _State) -> None:
    """An in-place write is plain only if nobody reads the same memory under another name afterwards."""
    root = state.root[name]
    shared = {n for n, r in state.root.items() if r == root and n != name}
    for start, prefix in [(node, state.prefix), *reversed(state.around)]:
        following = start.next
        while following.op != "root":
            for used in following.all_input_nodes:
                for one in records(state.arguments.get(prefix + used.name)):
                    if isinstance(one, Value) and one.name in shared:
                        raise CaptureFailed(
                            f"{node.target} writes in place to memory that is read later under another name."
                            f"{at(where)}",
                            hint="Use the version without the underscore, or clone() first.",
                        )
            following = following.next


def _refuse_unfit_randomness(node: Node, state: _State) -> None:
    """A mask is drawn sample by sample; so each sample's rows must lie together."""
    random = RANDOM_CALLS.get(node.target)
    if random is None or not random.draws(node, training=True):
        return
    spec = node.outputs[0]
    if any(name in state.outers for name in (spec.name, *values_of(node))):
        raise CaptureFailed(
            f"{node.target} draws for an axis that holds the samples interleaved, not batch first.{at(node.where)}",
            hint="Drop before merging axes, or merge them batch first: (batch, steps, ...) to (batch * steps, ...).",
        )
    if node.target == "aten.feature_dropout.default" and (spec.batch_axis or 0) > 1:
        raise CaptureFailed(
            f"{node.target} drops whole features of a tensor whose batch is axis {spec.batch_axis}.{at(node.where)}",
            hint="Bring the batch to the front (axis 0) first.",
        )


def _refuse_hidden_randomness(target: str, arguments: tuple[Argument, ...], where: str) -> None:
    if target in ops.RECURRENT:
        dropout = arguments[5]
        if isinstance(dropout, float) and dropout > 0 and arguments[4] > 1:
            raise CaptureFailed(
                f"A recurrent layer draws dropout (p={dropout}) inside one operator, which no share could repeat."
                f"{at(where)}",
                hint="Use one nn.LSTM(num_layers=1) per layer with nn.Dropout between them.",
            )


def _off_list(target: str, node: Any) -> CaptureFailed:
    return CaptureFailed(
        f"The operator {target.split('.')[1]} ({target}) is none of those that manyhands runs.{at(_line(node))}",
        hint=advice(target),
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
    raise CaptureFailed(f"{node.target} takes a {what}, which a graph cannot hold.{at(_where(node))}")


def _integer(value: Any, node: Any) -> Argument:
    return value if isinstance(value, int) else sized(value, _where(node))


def _module(node: Any, state: _State) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return _own_name(list(stack.values())[-1][0] + ".", state.wrappers).rstrip(".") if stack else ""


def _own_frames(node: Any) -> list[tuple[str, str]]:
    """(file, line) of the user's frames, innermost last."""
    frames: list[tuple[str, str]] = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [frame for frame in frames if not is_torchs_or_ours(frame[0])]


def _line(node: Any) -> str:
    """The whole path and the text of the user's line; else the layer's name."""
    own = _own_frames(node)
    if not own:
        return f"layer '{where}'" if (where := _where(node)) else ""
    file, line = own[-1]
    text = linecache.getline(file, int(line)).strip()
    return f"{file}:{line}:\n    {text}" if text else f"{file}:{line}"


def _where(node: Any) -> str:
    """'FILE:LINE' of the innermost frame that is not torch's; else the path of the child module, or ''."""
    own = _own_frames(node)
    if own:
        return f"{Path(own[-1][0]).name}:{own[-1][1]}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("inner").removeprefix(".") if stack else ""


def _live(nodes: list[Node], outputs: set[str]) -> list[Node]:
    """Nodes whose result is used, or that write a buffer."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if node.updates or any(spec.name in needed for spec in node.outputs):
            needed.update(values_of(node))
            kept.append(node)
    return kept[::-1]
