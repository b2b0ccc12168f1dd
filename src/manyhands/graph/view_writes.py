"""In-place writes to memory that has other names, made plain: x[:, 2:4] = y, x[mask] = 0 where x is read later.

A view is computed from its source, so a write to a view is a new source: the written part is scattered back through the
views that lead to it. Everything else that lies in the same memory is out of date then, and is made anew from the new
source where it is next read. This is what torch.func.functionalize does, for the few operators that make views here.

    y = zeros(4, 8)          y    = zeros(4, 8)
    a = y[:, 2:4]            a    = slice(y, 1, 2, 4)
    a.copy_(x)         ->    y'   = slice_scatter(y, x, 1, 2, 4)
    return y + a             a'   = slice(y', 1, 2, 4);  return y' + a'
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import TensorSpec
from manyhands.graph.conversion import Conversion, module_of
from manyhands.graph.nodes import Argument, Enum, Node, SampleCount, Value
from manyhands.graph.sizes import at

_FULL = 2**62
"""An end of a slice from which on it takes everything."""
_SAME_ELEMENTS = frozenset({"view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze",
                            "_unsafe_view"})  # fmt: skip
"""Views of all elements in the same order: the way back is a reshape."""
_UNCHANGED = frozenset({"alias", "detach", "contiguous", "type_as", "to", "expand_as"})


def write(node: Node, state: Conversion, spec: TensorSpec, value: Value) -> None:
    """Make `value` the content of the memory that a view shows. `spec` is the view's, `node` the write."""
    name = spec.name
    root = state.root[name]
    while name != root:
        parent, view = state.views[name]
        value = _scattered(node, state, view, name, parent, value)
        name = parent
    state.root[value.name] = value.name
    state.views.pop(value.name, None)
    for other, memory in state.root.items():
        if memory == root:
            state.latest[other] = None
    state.latest[root] = value.name


def fresh(name: str, state: Conversion) -> str:
    """Return the value that now has what `name` shows; a view that is out of date is made anew."""
    while name in state.latest:
        latest = state.latest[name]
        if latest is None:
            latest = _made_anew(name, state)
        name = latest
    return name


COPIES = frozenset({"aten.copy_.default", "aten.fill_.Tensor"})
"""Writes of one tensor over another, which PyTorch has no functional operator with a gradient for."""


COPY = "aten.clone.default"
"""The last of the operators that such a write becomes, after `spread`."""


def spread(node: Any, source: Argument, written: str, where: str, state: Conversion) -> Argument:
    """Return a source in the shape and type of what it is written over."""
    like = state.specs[written]
    module = module_of(node, state)

    def made(target: str, arguments: tuple[Argument, ...], spec: TensorSpec) -> Value:
        name = f"{state.prefix}{node.name}.{state.count()}"
        outputs = (structs.replace(spec, name=name),)
        state.add(Node(name, target, arguments, {}, outputs, module=module, where=where,
                       without_gradient=state.without_gradient))  # fmt: skip
        state.root[name] = name
        return Value(name)

    if isinstance(source, Value) and state.specs[source.name].dtype != like.dtype:
        spec = structs.replace(state.specs[source.name], dtype=like.dtype)
        source = made("aten.to.dtype", (source, Enum(like.dtype)), spec)
    return made("aten.expand_as.default", (source, Value(fresh(written, state))), like)


def current(argument: Argument, state: Conversion) -> Argument:
    """Return an argument in which every value is the one that now has its content."""
    if isinstance(argument, Value):
        return Value(fresh(argument.name, state))
    if isinstance(argument, (list, tuple)):
        return type(argument)(current(item, state) for item in argument)
    return argument


def _made_anew(name: str, state: Conversion) -> str:
    parent, view = state.views[name]
    current = fresh(parent, state)
    number = state.count()
    renamed = {spec.name: f"{spec.name}.{number}" for spec in view.outputs}
    arguments = _renamed(view.arguments, {parent: current})
    outputs = tuple(structs.replace(spec, name=renamed[spec.name]) for spec in view.outputs)
    state.add(structs.replace(view, name=f"{view.name}.{number}", arguments=arguments, outputs=outputs))
    for old, new in renamed.items():
        state.latest[old] = new
        state.root[new] = state.root[current]
        state.views[new] = (current, state.nodes[-1])
    return renamed[name]


def _scattered(write_node: Node, state: Conversion, view: Node, name: str, parent: str, value: Value) -> Value:
    """Return the parent of a view with the view's part replaced."""
    source = state.specs[fresh(parent, state)]
    operator = view.target.split(".")[1]
    before = Value(source.name)
    if operator == "slice":
        defaults: tuple[Argument, ...] = (0, None, None, 1)
        axis, start, end, step = [*view.arguments[1:], *defaults[len(view.arguments) - 1 :]]
        if isinstance(end, int) and end >= _FULL:
            end = None
        if start in (0, None) and step == 1 and end is None:
            return value
        return _added(write_node, state, "aten.slice_scatter.default", (before, value, axis, start, end, step), source)
    if operator == "select":
        return _added(write_node, state, "aten.select_scatter.default", (before, value, *view.arguments[1:]), source)
    if operator in _SAME_ELEMENTS:
        shape = tuple(
            SampleCount(size) if axis in (source.batch_axis, source.second_batch_axis) else size
            for axis, size in enumerate(source.shape)
        )
        return _added(write_node, state, "aten.reshape.default", (value, shape), source)
    if operator in ("transpose", "swapaxes"):
        return _added(write_node, state, "aten.transpose.int", (value, *view.arguments[1:]), source)
    if operator in ("permute", "t", "numpy_T"):
        order = view.arguments[1] if operator == "permute" else tuple(reversed(range(len(source.shape))))
        rank = len(source.shape)
        back = tuple(sorted(range(rank), key=lambda axis: order[axis] % rank))
        return _added(write_node, state, "aten.permute.default", (value, back), source)
    if operator in _UNCHANGED and source.dtype == state.specs[name].dtype:
        return value
    if operator == "narrow":
        axis, start, length = view.arguments[1:]
        if isinstance(start, int) and isinstance(length, int):
            arguments = (before, value, axis, start, start + length, 1)
            return _added(write_node, state, "aten.slice_scatter.default", arguments, source)
    if operator in ("split", "split_with_sizes", "chunk", "unbind"):
        return _added(write_node, state, *_part(view, name, before, value, source, state), source)
    raise CaptureFailed(
        f"{write_node.target} writes in place through a view made by {operator}, which is not followed back."
        f"{at(write_node.where)}",
        hint="Write to the tensor itself, or use torch.where(mask, value, x).",
    )


def _part(
    view: Node, name: str, before: Value, value: Value, source: TensorSpec, state: Conversion
) -> tuple[str, tuple[Argument, ...]]:
    """Return the scatter of one of several parts."""
    place = [spec.name for spec in view.outputs].index(name)
    if view.target.split(".")[1] == "unbind":
        axis = view.arguments[1] if len(view.arguments) > 1 else 0
        return "aten.select_scatter.default", (before, value, axis, place)
    axis = int(view.arguments[2]) if len(view.arguments) > 2 else 0
    axis %= len(source.shape)
    starts = [0]
    for spec in view.outputs:
        starts.append(starts[-1] + spec.shape[axis])
    return "aten.slice_scatter.default", (before, value, axis, starts[place], starts[place + 1], 1)


def _added(
    write_node: Node, state: Conversion, target: str, arguments: tuple[Argument, ...], like: TensorSpec
) -> Value:
    name = f"{write_node.name}.{state.count()}"
    outputs = (structs.replace(like, name=name),)
    state.add(structs.replace(write_node, name=name, target=target, arguments=arguments, options={}, outputs=outputs))
    state.root[name] = name
    return Value(name)


def _renamed(argument: Any, names: dict[str, str]) -> Any:
    if isinstance(argument, Value):
        return Value(names.get(argument.name, argument.name))
    if isinstance(argument, (list, tuple)):
        return tuple(_renamed(item, names) for item in argument)
    return argument
