"""Conversion of torch.export's program into a Graph: names, batch-sized integers, in-place writes and buffers made
plain.

* integers computed from the batch size become `Samples(factor)`, so that no integer ever crosses a cut
* in-place operators become functional, and later readers read the new value; where another view of the same memory
  is read later the module is refused, since the two would differ
* writes to buffers are marked, and happen in training only; a buffer that was assigned anew becomes a write
* what was written under torch.no_grad() is marked, and runs so
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.autocast import cast_type, early_casts, with_cast, with_casts
from manyhands.graph.conversion import WEIGHT_MARK, Conversion, Exported, module_of, own_name
from manyhands.graph.conversion_refusals import (
    off_list,
    refuse_hidden_randomness,
    refuse_nonlinear_backward,
    refuse_unfit_randomness,
)
from manyhands.graph.cumulative_norms import counted
from manyhands.graph.decompose import decomposed, tensor_arguments
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Argument, Enum, Node, SampleCount, Special, Value, Weight, values_of
from manyhands.graph.open_masks import without_open_masks
from manyhands.graph.random_nodes import DRAWN_BY_SIZE, coin, drawn_like, note_uniform
from manyhands.graph.rewriting import rewritten
from manyhands.graph.sizes import at, dtype_name, output_specs, sized, spec_of
from manyhands.graph.source_lines import place_of
from manyhands.graph.trees import tree_map
from manyhands.graph.view_writes import COPIES, COPY, current, fresh, spread, write
from manyhands.graph.writes import (
    MASKED_WRITES,
    assign_buffer,
    check_write,
    convert_buffer_write,
    masked_fill,
    may_share_memory,
    memory_root,
    plain_write,
    without_out,
    write_buffer,
)

# Options that say where a tensor lives; a graph runs wherever its piece is placed.
_PLACEMENT = frozenset({"device", "pin_memory", "layout"})
# Checks that export writes into the graph; shapes and dtypes are checked by manyhands itself.
_CHECKS = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_scalar.default",
                     "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"})  # fmt: skip


def convert(exported: Exported) -> Graph:
    """Return the Graph of an exported program."""
    program = exported.program
    state = Conversion(wrappers=exported.wrappers)
    weights, tensors, aliases = _weights(program, state)
    inputs = _inputs(program, exported.input_names, state)
    for node in program.graph.nodes:
        if node.op == "call_function":
            _convert_node(node, state)
    leaves = _outputs(program, state, exported.assigned)
    output_tree = tree_map(lambda leaf: leaves[int(leaf[1:])], exported.output_tree)
    plain_nodes = without_open_masks(live(state.nodes, set(leaves)))
    live_nodes = live(rewritten(plain_nodes, inputs, weights), set(leaves))
    live_nodes = early_casts(live_nodes, set(leaves))
    refuse_nonlinear_backward(live_nodes)
    return Graph(
        name=exported.name,
        inputs=inputs,
        input_tree=exported.input_tree,
        output_tree=output_tree,
        nodes=tuple(live_nodes),
        weights=weights,
        aliases=aliases,
        state=tensors,
        granularity=exported.granularity,
    )


def _weights(program: Any, state: Conversion) -> tuple[tuple[WeightSpec, ...], dict[str, torch.Tensor], dict[str, str]]:
    specs: list[WeightSpec] = []
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names_by_tensor: dict[int, str] = {}
    parameters = dict(program.named_parameters())
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        is_constant = spec.target in program.constants
        tensor = program.constants[spec.target] if is_constant else program.state_dict[spec.target]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureFailed(f"The module holds a {type(tensor).__name__} ('{spec.target}') that is not a tensor.")
        name = own_name(spec.target, state.wrappers)
        original = names_by_tensor.get(id(parameters.get(spec.target, tensor)))
        if original is not None:
            aliases[name] = original
            state.arguments[spec.arg.name] = Weight(original)
            continue
        names_by_tensor[id(parameters.get(spec.target, tensor))] = name
        state.arguments[spec.arg.name] = Weight(name)
        is_parameter = spec.kind is InputKind.PARAMETER
        (state.parameters if is_parameter else state.buffers).add(name)
        state.weight_shapes[name] = tuple(tensor.shape)
        trainable = is_parameter and parameters[spec.target].requires_grad
        if trainable:
            state.with_gradient.add(WEIGHT_MARK + name)
        specs.append(
            WeightSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype, name), trainable, buffer=not is_parameter)
        )
        tensors[name] = tensor.detach()
    # Tied parameters that export already folded into one placeholder are still reachable under both names.
    by_storage = {id(tensor): own_name(name, state.wrappers) for name, tensor in reversed(parameters.items())}
    for full, tensor in program.named_parameters():
        name = own_name(full, state.wrappers)
        if name not in tensors and by_storage.get(id(tensor)) in tensors:
            aliases[name] = by_storage[id(tensor)]
    return tuple(specs), tensors, aliases


def _inputs(program: Any, names: list[str], state: Conversion) -> tuple[TensorSpec, ...]:
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


def _outputs(program: Any, state: Conversion, assigned: tuple[str, ...]) -> list[str]:
    output = next(node for node in program.graph.nodes if node.op == "output")
    count = len(program.graph_signature.user_outputs)
    nodes = list(output.args[0][-count:])
    for node, name in zip(nodes[len(nodes) - len(assigned) :], assigned, strict=True):
        assign_buffer(node, own_name(f"inner.{name}", state.wrappers), state)
    leaves = []
    for node in nodes[: len(nodes) - len(assigned)]:
        record = state.arguments[node.name]
        if not isinstance(record, Value):
            raise CaptureFailed("The module returns one of its own weights or an integer; return a computed tensor.")
        leaves.append(fresh(record.name, state))
    return leaves


def _convert_node(node: Any, state: Conversion) -> None:
    name = state.prefix + node.name
    if node.target is operator.getitem:
        source, index = node.args
        state.arguments[name] = state.arguments[state.prefix + source.name][index]
        return
    if str(node.target) in _REGIONS:
        _REGIONS[str(node.target)](node, state)
        return
    value = node.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        state.arguments[name] = _integer(value, node)
        return
    where = place_of(node)
    target = str(node.target)
    if target in _CHECKS:
        return
    is_number = isinstance(value, (float, bool, torch.SymFloat, torch.SymBool))
    if is_number or (value is None and not target.startswith("aten.")):
        raise CaptureFailed(f"The module computes a Python number from a tensor ({target}).{at(where)}")
    arguments = tuple(_argument(a, state, node) for a in node.args)
    if state.autocast is not None:
        arguments = with_casts(node, arguments, state)
    options = {k: _argument(a, state, node) for k, a in node.kwargs.items() if k not in _PLACEMENT}
    if target == "aten.to.device":  # where a tensor lives is decided where the graph is run
        target, arguments = "aten.to.dtype", (arguments[0], *arguments[2:])
    written = options.pop("out", None)
    if written is not None:
        target = without_out(target) or target
    if target in _JOINS:
        arguments = (_without_blanks(arguments[0], state), *arguments[1:])
    if target in DRAWN_BY_SIZE:
        target, arguments, options = drawn_like(name, target, arguments, options, value, node, state)
    if target in _VIEWS_AS and _is_as_before(arguments, state):
        target, arguments = "aten.alias.default", arguments[:1]
    mutated = next((a for a in arguments[:1] if isinstance(a, (Value, Weight))), None)
    is_write = target.split(".")[1].endswith("_") and not target.split(".")[1].startswith("_")
    if is_write and isinstance(mutated, Weight):
        convert_buffer_write(node, target, arguments, options, mutated.name, where, state)
        return
    in_place = False
    if target in MASKED_WRITES:
        target, arguments = masked_fill(target, arguments, state)
    if is_write:
        assert isinstance(mutated, Value)
        check_write(target, mutated.name, where, state)
        if target in COPIES:
            target, arguments = COPY, (spread(node, arguments[1], mutated.name, where, state),)
        plain, arguments = (target, arguments) if target == COPY else plain_write(target, arguments)
        if plain is None:
            raise off_list(target, node)
        in_place = plain != target and state.root[mutated.name] == mutated.name and plain == ops.functional(target)
        target = plain
    if target not in ops.ALLOWED or ops.resolve(target) is None:
        if not _decompose(node, state):
            raise off_list(target, node)
        return
    arguments = counted(target, arguments, state.buffers, where)
    refuse_hidden_randomness(target, arguments, where)
    target, arguments = coin(target, arguments, where, state)
    outputs = output_specs(name, value, where)
    is_list = isinstance(value, (tuple, list))
    state.add(
        Node(name, target, arguments, options, outputs, is_list, in_place, "", module_of(node, state), where,
             state.without_gradient)
    )  # fmt: skip
    refuse_unfit_randomness(state.nodes[-1], state)
    note_uniform(state.nodes[-1], state)
    made = [Value(spec.name) for spec in outputs]
    state.arguments[name] = made if is_list else made[0]
    shared = may_share_memory(target, arguments, len(made))
    for record, source in zip(made, shared, strict=True):
        state.root[record.name] = record.name if source is None else memory_root(source, state)
    for record, source in zip(made, shared, strict=True):
        if isinstance(source, Value):
            state.views[record.name] = (source.name, state.nodes[-1])
    if isinstance(written, Weight):
        write_buffer(node, written.name, made[0], where, state)
    elif isinstance(written, Value):
        mutated = written
    if (is_write or written is not None) and isinstance(mutated, Value):
        write(state.nodes[-1], state, state.specs[mutated.name], made[0])


_JOINS = frozenset({"aten.cat.default", "aten.concat.default"})


def _without_blanks(parts: Argument, state: Conversion) -> Argument:
    """Return what is joined without tensors of shape (0,), which PyTorch leaves out whatever the others' axes are:
    caches of keys and values begin so."""
    shapes = [
        state.specs[part.name].shape if isinstance(part, Value) else state.weight_shapes.get(part.name)
        for part in parts
    ]
    rest = tuple(part for part, shape in zip(parts, shapes, strict=True) if shape != (0,))
    return rest or parts


_VIEWS_AS = frozenset({"aten.view_as.default", "aten.reshape_as.default", "aten.expand_as.default"})


def _is_as_before(arguments: tuple[Argument, ...], state: Conversion) -> bool:
    """Return whether a tensor is to take the shape that it has."""
    if not all(isinstance(argument, Value) for argument in arguments):
        return False
    source, target = (state.specs[argument.name] for argument in arguments)
    return source.form == target.form


def _inline(node: Any, state: Conversion) -> None:
    """Convert a `with torch.no_grad():` region, which is a sub-graph: its nodes join the others, marked."""
    enabled, inner, *values = node.args
    before, state.without_gradient = state.without_gradient, not enabled
    _inline_graph(node, getattr(node.graph.owning_module, inner.target).graph, inner.name, values, state)
    state.without_gradient = before


def _inline_autocast(node: Any, state: Conversion) -> None:
    """Convert a `with torch.autocast(...):` region: its operators, with the casts that autocast makes."""
    _, dtype, enabled, _, inner, *values = node.args
    before, state.autocast = state.autocast, dtype if enabled else None
    if before is None:
        state.casts.clear()
    _inline_graph(node, getattr(node.graph.owning_module, inner.target).graph, inner.name, values, state)
    state.autocast = before


def _inline_checkpoint(node: Any, state: Conversion) -> None:
    """Convert a region under torch.utils.checkpoint. What is kept for the backward pass is the executor's decision."""
    inner, *values = node.args
    _inline_graph(node, getattr(node.graph.owning_module, inner.target).graph, inner.name, values, state)


def _decompose(node: Any, state: Conversion) -> bool:
    """Convert what an operator is made of in its place; return whether PyTorch knows how."""
    dtype = cast_type(node, state)
    graph = decomposed(node, dtype)
    if graph is None:
        return False
    values = tensor_arguments(node)
    arguments = [_argument(value, state, node) for value in values]
    before, state.autocast = state.autocast, None  # inside, all has the type that autocast gave it
    if dtype is not None:
        arguments = [with_cast(value, record, dtype, node, state) for value, record in zip(values, arguments)]
    _inline_arguments(node, graph, node.name, arguments, state)
    state.autocast = before
    return True


_REGIONS = {
    "wrap_with_set_grad_enabled": _inline, "wrap_with_autocast": _inline_autocast,
    "tag_activation_checkpoint": _inline_checkpoint, "wrap_activation_checkpoint": _inline_checkpoint,
}  # fmt: skip
"""Operators whose argument is a sub-graph -> the conversion of that."""


def _inline_graph(node: Any, graph: Any, name: str, values: list[Any], state: Conversion) -> None:
    """Convert the nodes of a sub-graph in place of `node`; `values` are its inputs, as nodes of the graph around it."""
    _inline_arguments(node, graph, name, [_argument(value, state, node) for value in values], state)


def _inline_arguments(node: Any, graph: Any, name: str, arguments: list[Argument], state: Conversion) -> None:
    """Convert the nodes of a sub-graph in place of `node`; `arguments` are its inputs."""
    outer, prefix = state.prefix, f"{state.prefix}{name}."
    state.prefix = prefix
    placeholders = [inner_node for inner_node in graph.nodes if inner_node.op == "placeholder"]
    for placeholder, argument in zip(placeholders, arguments, strict=True):
        state.arguments[prefix + placeholder.name] = argument
    for inner_node in graph.nodes:
        if inner_node.op == "call_function":
            _convert_node(inner_node, state)
    (result,) = next(inner_node for inner_node in graph.nodes if inner_node.op == "output").args
    is_list = isinstance(result, (list, tuple))
    results = [state.arguments[prefix + inner_node.name] for inner_node in (result if is_list else [result])]
    state.prefix = outer
    state.arguments[outer + node.name] = results if is_list else results[0]


def _argument(value: Any, state: Conversion, node: Any) -> Argument:
    if isinstance(value, torch.fx.Node):
        return current(state.arguments[state.prefix + value.name], state)
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item, state, node) for item in value)
    if isinstance(value, torch.SymInt):
        return _integer(value, node)
    if isinstance(value, float) and not math.isfinite(value):
        return Special(str(value))
    if isinstance(value, torch.dtype):
        return Enum(dtype_name(value, place_of(node)))
    if isinstance(value, torch.memory_format):
        return Enum(str(value).removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, str, SampleCount)):
        return value
    if isinstance(value, torch.device):
        return None
    kind = type(value).__name__
    raise CaptureFailed(f"{node.target} takes a {kind}, which a graph cannot hold.{at(place_of(node))}")


def _integer(value: Any, node: Any) -> Argument:
    return value if isinstance(value, int) else sized(value, place_of(node))


def live(nodes: list[Node], outputs: set[str]) -> list[Node]:
    """Return the nodes whose result is used, or that write a buffer."""
    needed = set(outputs)
    live_nodes = []
    for node in reversed(nodes):
        if node.updates or any(spec.name in needed for spec in node.outputs):
            needed.update(values_of(node))
            live_nodes.append(node)
    return live_nodes[::-1]
