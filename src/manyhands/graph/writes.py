"""Makes writes in place, to activations and to buffers, plain.

An in-place operator becomes functional, and later readers read the new value. Where another view of the same memory is
read later the module is refused, since the two would differ.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.facts.errors import CaptureFailed
from manyhands.graph import ops
from manyhands.graph.conversion import WEIGHT_MARK, Conversion, module_of
from manyhands.graph.conversion_refusals import (
    off_list,
)
from manyhands.graph.nodes import Argument, Node, Value, Weight, weights_of
from manyhands.graph.sizes import at, spec_of
from manyhands.graph.source_lines import place_of

_ALIASING = {"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "permute", "transpose", "t",
             "unsqueeze", "squeeze", "slice", "select", "narrow", "chunk", "split", "split_with_sizes", "expand",
             "expand_as", "unbind", "movedim", "swapaxes", "detach", "contiguous", "to", "alias", "numpy_T",
             "broadcast_to", "broadcast_tensors", "meshgrid", "type_as", "_unsafe_view"}  # fmt: skip
MASKED_WRITES = {
    "aten.index_put.default": "aten.masked_fill.Tensor",
    "aten.index_put_.default": "aten.masked_fill_.Tensor",
}


def masked_fill(target: str, arguments: tuple[Argument, ...], state: Conversion) -> tuple[str, tuple[Argument, ...]]:
    """Return `x[mask] = number` as a masked fill, which tiles can run; any other write at computed places as it is."""
    written, indices, value, *others = arguments
    specs = [state.specs[argument.name] for argument in (written, *indices) if isinstance(argument, Value)]
    if len(specs) == 2 and len(indices) == 1 and _is_scalar(value, state) and not any(others):
        whole, mask = specs
        if mask.dtype == "bool" and mask.form == whole.form:
            return MASKED_WRITES[target], (written, indices[0], value)
    return target, arguments


def _is_scalar(argument: Argument, state: Conversion) -> bool:
    """Return whether an argument is a tensor of one number without axes."""
    if isinstance(argument, Value):
        return state.specs[argument.name].shape == ()
    return isinstance(argument, Weight) and state.weight_shapes.get(argument.name) == ()


def may_share_memory(target: str, arguments: tuple[Argument, ...], count: int) -> list[Argument]:
    """Return whose memory each result may be: a view's source, or a dropout's input, which it returns in evaluation."""
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


def memory_root(source: Value | Weight, state: Conversion) -> str:
    return state.root[source.name] if isinstance(source, Value) else WEIGHT_MARK + source.name


def check_write(target: str, name: str, where: str, state: Conversion) -> None:
    """Refuse an in-place write to an activation that cannot be expressed as a separate operator."""
    root = state.root[name]
    if root.startswith(WEIGHT_MARK):
        raise CaptureFailed(
            f"{target} writes to a part or view of '{root.removeprefix(WEIGHT_MARK)}', one of the module's own tensors."
            f"{at(where)}",
            hint="Write to the whole buffer (self.buffer.add_(...)), or assign it anew (self.buffer = ...).",
        )
    if state.without_gradient and name in state.with_gradient:
        raise CaptureFailed(
            f"{target} under torch.no_grad() writes in place to a tensor that gradients flow through.{at(where)}",
            hint="Write to a clone() made under torch.no_grad().",
        )


def convert_buffer_write(
    node: Any, target: str, arguments: tuple[Argument, ...], options: dict[str, Argument], name: str, where: str,
    state: Conversion,
) -> None:  # fmt: skip
    if name in state.parameters:
        raise CaptureFailed(f"The module writes to its parameter '{name}' in forward.{at(where)}")
    if target == "aten.copy_.default" and arguments[1] == Weight(name):
        return  # export's epilogue: the buffer was already written in place
    if target not in ops.BUFFER_UPDATE:
        raise off_list(target, node)
    spec = spec_of(state.prefix + node.name, node.meta["val"], where)
    state.add(
        Node(spec.name, target, arguments, options, (spec,), False, False, name, module_of(node, state), where,
             state.without_gradient)
    )  # fmt: skip
    state.arguments[spec.name] = Weight(name)


def assign_buffer(node: Any, name: str, state: Conversion) -> None:
    """Add `self.buffer = value`, as a write to the buffer after the last node that reads the old one."""
    record = state.arguments[node.name]
    if record == Weight(name):
        return
    where = place_of(node)
    if not isinstance(record, Value) or state.root[record.name].startswith(WEIGHT_MARK):
        raise CaptureFailed(
            f"The module assigns another of its own tensors, or a view of one, to its buffer '{name}'.{at(where)}",
            hint="Assign a clone() of it.",
        )
    if name not in state.buffers:
        raise CaptureFailed(f"The module assigns '{name}', which is another buffer under a second name.{at(where)}")
    reads = [i for i, other in enumerate(state.nodes) if name in weights_of(other)]
    made = [i for i, other in enumerate(state.nodes) if record.name in {spec.name for spec in other.outputs}]
    spec = spec_of(f"{name}.assigned", node.meta["val"], where)
    state.nodes.insert(
        max([-1, *reads, *made]) + 1,
        Node(spec.name, "aten.copy_.default", (Weight(name), record), {}, (spec,), False, False, name,
             module_of(node, state), where, True),
    )  # fmt: skip


def plain_write(target: str, arguments: tuple[Argument, ...]) -> tuple[str | None, tuple[Argument, ...]]:
    """Return the operator, and its arguments, that computes what an in-place operator leaves in its first argument.

    None: there is none on the list.
    """
    written, *others = arguments
    if target == "aten.fill_.Scalar":
        return "aten.full_like.default", (written, others[0])
    if target == "aten.zero_.default":
        return "aten.zeros_like.default", (written,)
    return (target if target in ops.RANDOM else ops.functional(target)), arguments


def without_out(target: str) -> str | None:
    """Return the operator that gives what an operator with an `out` argument writes there; None: not on the list."""

    _, name, overload = target.split(".", 2)
    packet = getattr(torch.ops.aten, name)
    expected = [argument.name for argument in getattr(packet, overload)._schema.arguments if not argument.is_out]
    for other in packet.overloads():
        same = [argument.name for argument in getattr(packet, other)._schema.arguments] == expected
        if same and f"aten.{name}.{other}" in ops.ALLOWED:
            return f"aten.{name}.{other}"
    return None


def write_buffer(node: Any, name: str, value: Value, where: str, state: Conversion) -> None:
    """Add a write of a value to a buffer, whose readers read it from then on."""
    if name in state.parameters:
        raise CaptureFailed(f"The module writes to its parameter '{name}' in forward.{at(where)}")
    spec = spec_of(f"{state.prefix}{node.name}.written", node.meta["val"], where)
    state.add(
        Node(spec.name, "aten.copy_.default", (Weight(name), value), {}, (spec,), False, False, name,
             module_of(node, state), where, state.without_gradient)
    )  # fmt: skip
    state.arguments[state.prefix + node.name] = Weight(name)
