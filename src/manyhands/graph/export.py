"""Calls torch.export on a module and passes its program to convert.py.

The module is called through a wrapper with a flat list of tensors, so that tensors, tuples, lists and dicts as inputs
and outputs all come out as named leaves in a known order. An export inside torch.autocast is of the module under it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph import custom_functions
from manyhands.graph.conversion import Exported
from manyhands.graph.convert import convert
from manyhands.graph.cumulative_norms import marked_norms
from manyhands.graph.drawn_numbers import decided_draws
from manyhands.graph.export_errors import explain
from manyhands.graph.graph import Graph
from manyhands.graph.misfits import last_entered, shape_text
from manyhands.graph.precision import Region, entered, left, surrounding
from manyhands.graph.quiet_export import only_listener, quiet_export, where_batch_was_fixed
from manyhands.graph.tensor_trees import (
    batch_of,
    example_outputs,
    exported_samples,
    flattened,
    resized,
    tensors_alone,
    without_none,
)
from manyhands.graph.tracing import traced
from manyhands.graph.trees import rebuilt, tree_map


class LossModule(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


class _Flat(nn.Module):
    """A module that calls `inner` with arguments rebuilt from a flat list, and notes the shape of what it returns.

    Buffers that `inner` assigns anew are put back as they were, and their new values returned after the outputs.
    `note` is a function, since torch.export undoes what tracing assigned to attributes.
    """

    def __init__(
        self,
        inner: nn.Module,
        trees: list[Any],
        note: Callable[[Any, list[str]], None],
        outputs: Callable[[Any], Any],
        region: Region | None,
    ) -> None:
        super().__init__()
        self.inner, self.region = inner, region
        self.trees = trees
        self.note = note
        self.outputs = outputs

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_name = {f"#{i}": leaf for i, leaf in enumerate(leaves)}
        positional, keywords = (rebuilt(tree_map(by_name.__getitem__, tree)) for tree in self.trees)
        before = [(path, child, dict(child._buffers)) for path, child in self.inner.named_modules()]
        with entered(self.region):
            output = self.outputs(self.inner(*positional, **keywords))
        tensors: list[torch.Tensor] = []
        tree = flattened(output, tensors, "the output")
        assigned: list[str] = []
        for path, child, old in before:
            for key, tensor in old.items():
                new = child._buffers.get(key)
                if new is not tensor:
                    name = f"{path}.{key}" if path else key
                    child._buffers[key] = tensor
                    tensors.append(_new_buffer(name, tensor, new))
                    assigned.append(name)
        self.note(tree, assigned)
        return tuple(tensors)


def _new_buffer(name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor:
    """Return what forward assigned to a buffer, if the buffer can hold it."""
    if old is not None and new is not None and new.dtype == old.dtype and new.dim() == old.dim():
        sizes = tuple(new.shape)
        if all(isinstance(size, int) for size in sizes) and sizes == tuple(old.shape):
            return new
    texts = ["None" if t is None else f"{t.dtype}{tuple(t.shape)}".removeprefix("torch.") for t in (old, new)]
    raise CaptureFailed(
        f"The module assigns {texts[1]} to its buffer '{name}', which holds {texts[0]}.",
        hint="A buffer keeps its shape and dtype: register it as it will be.",
    )


def _input_names(module: nn.Module, positional: Any, keywords: Any) -> dict[str, str]:
    """Return '#0' -> 'input_ids': names that a user recognises, from forward's signature and the dict's keys."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    names: dict[str, str] = {}

    def visit(tree: Any, prefix: str) -> None:
        if isinstance(tree, str):
            names[tree] = _plain_name(prefix, names.values())
        elif isinstance(tree, dict):
            for key, item in tree.items():
                visit(item, key if not prefix or len(parameters) == 1 else f"{prefix}.{key}")
        else:
            for i, item in enumerate(tree):
                visit(item, f"{prefix}.{i}")

    for i, tree in enumerate(positional):
        variadic = i >= len(parameters) or parameters[i].kind is inspect.Parameter.VAR_POSITIONAL
        visit(tree, f"input_{i}" if variadic else parameters[i].name)
    for key, tree in keywords.items():
        visit(tree, key)
    return names


def _plain_name(text: str, used_names: Collection[str]) -> str:
    """Return a name of letters, digits, '_' and '.' only that is not used yet."""
    plain = "".join(c if c in "_." or (c.isascii() and c.isalnum()) else "_" for c in text) or "input"
    name, count = plain, 2
    while name in used_names:
        name, count = f"{plain}_{count}", count + 1
    return name


def _shapes(has_batch: list[bool], second_axes: Mapping[int, tuple[int, int]] | None) -> tuple[dict[int, Any], ...]:
    """Return which axes of each input grow with the batch, as torch.export takes it."""
    dimension = torch.export.Dim("batch")
    shapes: tuple[dict[int, Any], ...] = tuple({0: dimension} if is_batched else {} for is_batched in has_batch)
    for place, (axis, rows) in (second_axes or {}).items():
        shapes[place][axis] = dimension if rows == 1 else rows * dimension
    return shapes


def export_module(
    module: nn.Module,
    positional: list[Any],
    keywords: dict[str, Any],
    functions: list[str],
    *,
    name: str,
    granularity: str,
    is_loss: bool = False,
    has_own_loss: bool = False,
    second_axes: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[Graph, Any]:
    """Return the graph, and an example of what the module returns (for the loss). Custom autograd functions that it
    calls are added to `functions`, by name. With `has_own_loss` outputs that are no tensors are left out, since nothing
    but the loss is used. `second_axes`: the place of an input among the leaves -> the second of its axes that grow with
    the batch, and its rows for a sample."""
    leaves: list[torch.Tensor] = []
    trees = [flattened(positional, leaves, "the input"), flattened(keywords, leaves, "the input")]
    batch = batch_of(leaves)
    has_batch = [leaf.dim() > 0 and leaf.shape[0] == batch for leaf in leaves]
    # torch.export makes sizes 0 and 1 special, and a size that equals the batch by chance would be mistaken for it.
    examples = [
        resized(leaf, exported_samples(batch)) if is_batched else leaf for leaf, is_batched in zip(leaves, has_batch)
    ]
    # A tensor given twice (input_ids as labels, say) would be taken for a single input.
    places = {id(leaf): place for place, leaf in reversed(list(enumerate(examples)))}
    examples = [leaf if places[id(leaf)] == place else leaf.clone() for place, leaf in enumerate(examples)]
    returned: list[tuple[Any, list[str]]] = []
    outputs = tensors_alone if has_own_loss else without_none
    flat = _Flat(module, trees, lambda tree, assigned: returned.append((tree, assigned)), outputs, surrounding())
    names = _input_names(module, *trees)

    def converted(program: Any) -> Graph:
        output_tree, assigned = returned[-1]
        exported = Exported(
            program=program,
            name=name,
            input_names=[names[f"#{i}"] for i in range(len(leaves))],
            input_tree=[tree_map(names.__getitem__, tree) for tree in trees],
            output_tree=output_tree,
            granularity=granularity,
            wrappers=("inner.loss.", "inner.") if is_loss else ("inner.",),
            assigned=tuple(assigned),
        )
        with left(), only_listener(logging.NullHandler()):
            return convert(exported)

    try:
        with left(), custom_functions.with_gradients(functions), marked_norms(module), decided_draws(module):
            program: Any = traced(flat, examples, has_batch, functions) if not second_axes else None
            if program is not None:
                with contextlib.suppress(Exception):  # torch.export knows how, or says why not
                    return converted(program), example_outputs(program, *_noted(returned))
            program = quiet_export(flat, tuple(examples), _shapes(has_batch, second_axes))
    except CaptureFailed:
        raise
    except Exception as error:
        with left(), last_entered(module) as child:
            fixed = where_batch_was_fixed(lambda: quiet_export(flat, tuple(examples), _shapes(has_batch, second_axes)))
        shape_list = ", ".join(shape_text(leaf.shape) for leaf in leaves)
        raise explain(error, module, fixed, child, shape_list, is_loss=is_loss) from error
    return converted(program), example_outputs(program, *_noted(returned))


def _noted(returned: list[tuple[Any, list[str]]]) -> tuple[Any, int]:
    """Return the tree of what the module returned last, and how many buffers it assigned."""
    tree, assigned = returned[-1]
    return tree, len(assigned)
