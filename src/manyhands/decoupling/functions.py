"""Readers of operators on tensors: how the form of what they make follows from what they read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from manyhands.decoupling.forms import (
    BROADCAST,
    CLASSIFIER,
    COMPARED,
    FLATTENED,
    FROM_LINEAR,
    Form,
    given,
    refused,
)
from manyhands.decoupling.tracing import makes_tensors, place, shape_of

if TYPE_CHECKING:
    from manyhands.decoupling.reading import Reading


@dataclass(frozen=True)
class RewrittenView:
    """A view written anew, since it may have old widths in it: flattened from an axis on, or the channels unfolded."""

    axis: int
    unfolded: tuple[int, ...] = ()
    """The extents after the channels."""


SAME, FLAT, PLACES = RewrittenView(0), RewrittenView(1), RewrittenView(2)


def reshape(reading: Reading, node: fx.Node, source: fx.Node) -> Form:
    """Return the form after a view, squeeze or flattening: maps stay maps, or become flat, or come back."""
    form, before, after = reading.forms[source], shape_of(source) or (), shape_of(node) or ()
    if after == before:
        reading.reshapes[node] = SAME
        return form
    if before[0] == after[0] and len(after) == 2 and not form.is_flat:
        reading.reshapes[node] = FLAT
        return Form(form.width, is_flat=True, places=math.prod(before[2:]), is_pooled=form.is_pooled)
    if before[0] == after[0] and form.is_flat and len(after) > 2:
        reading.reshapes[node] = RewrittenView(1, after[2:])
        if after[1] == reading.widths.old(form.width) and math.prod(after[2:]) == form.places:
            return Form(form.width, is_pooled=form.is_pooled)
        reading.widths.pin(form.width, CLASSIFIER)
        width = reading.widths.new(after[1])
        reading.widths.pin(width, FROM_LINEAR)
        return Form(width)
    if not form.is_flat and before[:2] == after[:2] and len(after) == 3:
        reading.reshapes[node] = PLACES
        return form
    raise refused(
        node, f"turns {list(before)} into {list(after)}, which may mix channels",
        "Maps may be flattened (x.flatten(1)) or kept; write anything else as a layer without weights.",
    )  # fmt: skip


def reduce(reading: Reading, node: fx.Node, source: fx.Node) -> Form:
    """Return the form after a mean or sum over all rows and columns, or over the channels of every place."""
    form, before, after = reading.forms[source], shape_of(source) or (), shape_of(node) or ()
    reduced_axes = given(node, 1, "dim")
    axes = {
        axis % len(before)
        for axis in ([reduced_axes] if isinstance(reduced_axes, int) else reduced_axes or range(len(before)))
    }
    if 0 in axes or form.is_flat:
        raise refused(node, "adds up over samples or flat numbers")
    if axes == {1} and len(after) == len(before):
        reading.mixing[place(node)] = "reads all channels at every place"
        width = reading.widths.new(1)
        reading.widths.pin(width, BROADCAST)
        return Form(width, is_pooled=form.is_pooled)
    if axes != set(range(2, len(before))):
        raise refused(node, f"adds up over axes {sorted(axes)}", "Add up over all rows and columns, or neither.")
    return Form(form.width, is_flat=len(after) == 2, is_pooled=True)


def softmax(reading: Reading, node: fx.Node, source: fx.Node, axis: Any) -> Form:
    """Return the form after a softmax; along channels it compares all of them."""
    form = reading.forms[source]
    rank = len(shape_of(source) or ())
    if axis is None or axis % rank == 1:
        reading.widths.pin(form.width, COMPARED)
        reading.mixing[place(node)] = "compares all channels"
    return form


def pixels(reading: Reading, form: Form, factor: int, down: bool) -> Form:
    """Return the form after neighbours become channels (down), or channels neighbours. Channels of one group stay
    together."""
    if down:
        return Form(reading.widths.scaled(form.width, factor**2))
    width = reading.widths.new(reading.widths.old(form.width) // factor**2)
    reading.widths.same(form.width, reading.widths.scaled(width, factor**2))
    return Form(width)


def index(reading: Reading, node: fx.Node, source: fx.Node) -> Form:
    """Return the form of some rows and columns of a map."""
    form, index, after = reading.forms[source], node.args[1], shape_of(node) or ()
    index = index if isinstance(index, tuple) else (index,)
    whole = [item == slice(None) for item in index[:2]]
    if form.is_flat or not all(whole) or Ellipsis in index or any(item is None for item in index):
        raise refused(node, "takes some of the channels or samples", "Cut rows and columns only.")
    if len(after) == 2:
        return Form(form.width, is_flat=True, is_pooled=form.is_pooled)
    if len(after) != len(shape_of(source) or ()):
        raise refused(node, "takes single rows or columns")
    return form


def join(reading: Reading, node: fx.Node, shape: tuple[int, ...]) -> Form:
    """Return the form of two tensors, or a tensor and a weight or number, combined element by element."""
    tensors = [arg for arg in node.all_input_nodes if makes_tensors(arg)]
    moving = [arg for arg in tensors if arg in reading.forms]
    if not moving or any(len(shape_of(arg) or ()) != len(shape) for arg in moving):
        raise refused(node, "joins tensors whose axes are not aligned")
    wide = [arg for arg in moving if (shape_of(arg) or ())[1] == shape[1]]
    if not wide:
        raise refused(node, "spreads one channel over those of a weight")
    form = reading.forms[wide[0]]
    for arg in moving:
        other_form = reading.forms[arg]
        if arg not in wide:
            reading.widths.pin(other_form.width, BROADCAST)
        elif other_form.is_flat != form.is_flat or other_form.places != form.places:
            raise refused(node, "joins a map with flat numbers")
        else:
            reading.widths.same(form.width, other_form.width)
    for arg in tensors:
        if arg not in reading.forms:
            _constant(reading, node, arg, form, shape)
    pooled = all(reading.forms[arg].is_pooled for arg in moving)
    if not pooled:
        reading.joins += [arg for arg in moving if reading.forms[arg].is_pooled]
    return Form(form.width, form.is_flat, form.places, pooled)


def _constant(reading: Reading, node: fx.Node, weight: fx.Node, form: Form, shape: tuple[int, ...]) -> None:
    """Read a weight or buffer of the network itself, combined with a tensor: one for all channels, or one for each."""
    extents = shape_of(weight) or ()
    axis = 1 - (len(shape) - len(extents))
    if axis < 0 or extents[axis] == 1:
        return
    if form.places > 1:
        reading.widths.pin(form.width, FLATTENED)
    name = str(weight.target)
    if name in reading.weights:
        reading.widths.same(reading.weights[name][0], form.width)
    elif form.places == 1:
        reading.weights[name] = (form.width, axis)


def concat(reading: Reading, node: fx.Node) -> Form:
    """Return the form of a concatenation: along channels within every group; along other axes the widths are one."""
    parts = given(node, 0, "tensors")
    axis = given(node, 1, "dim") or 0
    if not isinstance(parts, (tuple, list)) or not all(isinstance(part, fx.Node) for part in parts):
        raise refused(node, "concatenates something that is no list of tensors")
    if any(part not in reading.forms for part in parts):
        raise refused(node, "concatenates weights")
    forms = [reading.forms[part] for part in parts]
    pooled = all(form.is_pooled for form in forms)
    if axis % len(shape_of(node) or ()) != 1:
        for form in forms[1:]:
            reading.widths.same(forms[0].width, form.width)
        return forms[0]
    if forms[0].is_flat and len({form.places for form in forms}) > 1:
        for form in forms:
            reading.widths.pin(form.width, FLATTENED)
        width = reading.widths.new((shape_of(node) or ())[1])
        reading.widths.pin(width, FLATTENED)
        return Form(width, is_flat=True, is_pooled=pooled)
    if not forms[0].is_flat:
        reading.concats.append(node)
    width = reading.widths.joined(tuple(form.width for form in forms), by_group=not forms[0].is_flat)
    return Form(width, forms[0].is_flat, forms[0].places, pooled)
