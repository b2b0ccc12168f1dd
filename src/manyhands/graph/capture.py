"""nn.Module -> Graph, by torch.export in training mode with a dynamic batch.

    module, example batch ──torch.export──▶ ATen graph ──convert.py──▶ Graph

The module is called through a wrapper with a flat list of tensors, so that tensors, tuples, lists and dicts as inputs
and outputs all come out as named leaves in a known order.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import logging
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph import custom_functions, recurrent
from manyhands.graph.arguments import bound_arguments, in_training_mode
from manyhands.graph.chain import GRANULARITIES
from manyhands.graph.convert import Exported, convert
from manyhands.graph.frames import is_torchs_or_ours, whole_stacks
from manyhands.graph.graph import Graph, tree_leaves, tree_map
from manyhands.graph.loss import combination
from manyhands.graph.misfits import Entered, last_entered, shape_text, target_misfit
from manyhands.graph.penalties import with_penalties
from manyhands.graph.sizes import at
from manyhands.graph.verify import verify as check

_SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
_DEPENDS = ("DataDependent", "ConstraintViolation", "Unbacked")
"""In the names of torch's errors about values or sizes that tracing does not know."""
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def capture(
    module: nn.Module,
    example_batch: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    target: Any = None,
    granularity: str = "blocks",
    name: str = "",
    verify: bool = False,
) -> Graph:
    """Capture `module`, called on `example_batch`, as a Graph.

    `example_batch` is a tensor, a tuple (positional arguments) or a dict (keyword arguments, or one positional dict if
    the module's forward does not take its keys). The first axis of every tensor in it is the batch. With `loss` and an
    example `target`, `loss(output, target)` is captured too, and how it combines over samples is found out (loss.py).
    `granularity` is "blocks" or "operators". With `verify`, loss and gradients on the example batch are compared with
    the module's own (verify.py); a graph with custom autograd functions is always verified if it has a loss.

    The module is captured in training mode and left as it was. Children put in evaluation mode by the user (frozen
    batch norm) stay so if the module as a whole is training. In evaluation the same graph runs at rest: batch norm
    uses its running statistics, a random operator is its expectation (random_ops.py), and no buffer is written, whether
    the module writes it under `if self.training` or always.

    The graph's state shares its memory with the module until it is copied (Weights.copied, store.save): training the
    module afterwards changes it.
    """
    _check_arguments(module, granularity)
    if verify and loss is None:
        raise BadValue("verify=True compares gradients, and there is no loss.", hint="Pass loss= and target= too.")
    functions: list[str] = []
    with _buffers_kept(module), in_training_mode(module):
        positional, keywords = bound_arguments(module, example_batch)
        graph, outputs = _export(
            module, positional, keywords, functions, name=name or type(module).__name__, granularity=granularity
        )
        if loss is not None:
            if target is None:
                raise CaptureFailed("A loss was given without an example target.", hint="Pass target=example_target.")
            examples = [outputs, _as_many(target, example_batch)]
            graph = _with_loss(graph, module, loss, examples, functions)
    if loss is not None and (verify or functions):
        check(graph, module, loss, example_batch, target)
    return graph


def _with_loss(
    graph: Graph, module: nn.Module, loss: Callable[..., torch.Tensor], examples: list[Any], functions: list[str]
) -> Graph:
    """The graph with its loss, and how that combines over samples. `examples` are of an output and a target."""
    met: list[str] = []
    try:
        loss_graph, value = _export_loss(loss, examples, met)
        if met:  # a custom function asks whether its inputs need gradients; ordinary operators do not
            for leaf in tree_flatten(examples[0])[0]:
                leaf.requires_grad_(leaf.is_floating_point())
            loss_graph, value = _export_loss(loss, examples, met)
    except CaptureFailed as error:
        raise target_misfit(loss, *examples) or error from error
    functions += met
    if not isinstance(value, torch.Tensor) or value.dim():
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "several values"
        raise CaptureFailed(f"The loss returns {what}; it must return one number.", hint="Take its mean().")
    graph = with_penalties(graph, loss_graph, module)
    return msgspec.structs.replace(graph, loss_combination=combination(graph, *examples))


def _export_loss(loss: Callable[..., torch.Tensor], examples: list[Any], functions: list[str]) -> tuple[Graph, Any]:
    return _export(_Loss(loss), examples, {}, functions, name="loss", granularity="operators", is_loss=True)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """A capture that failed may have left stand-ins of its own in the place of buffers."""
    before = [(child, dict(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for child, own in before:
            child._buffers.update(own)


def _check_arguments(module: object, granularity: str) -> None:
    if not isinstance(module, nn.Module):
        what = f"class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise CaptureFailed(
            f"Only an nn.Module can be captured; this is {what}.", hint="Pass an instance of your module class."
        )
    if granularity not in GRANULARITIES:
        known = " or ".join(f'"{one}"' for one in GRANULARITIES)
        raise BadValue(f"Granularity {granularity!r} is unknown.", hint=f"Use {known}.")


class _Loss(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


class _Flat(nn.Module):
    """Calls `inner` with arguments rebuilt from a flat list; notes the shape of what it returns.

    Buffers that `inner` assigns anew are put back as they were, and their new values returned after the outputs.
    `note` is a function since torch.export undoes what tracing assigned to attributes.
    """

    def __init__(self, inner: nn.Module, trees: list[Any], note: Callable[[Any, list[str]], None]) -> None:
        super().__init__()
        self.inner = inner
        self.trees = trees
        self.note = note

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_name = {f"#{i}": leaf for i, leaf in enumerate(leaves)}
        positional, keywords = (tree_map(by_name.__getitem__, tree) for tree in self.trees)
        before = [(path, child, dict(child._buffers)) for path, child in self.inner.named_modules()]
        output = self.inner(*positional, **keywords)
        found: list[torch.Tensor] = []
        tree = _tree(output, found, "the output")
        assigned: list[str] = []
        for path, child, old in before:
            for key, tensor in old.items():
                new = child._buffers.get(key)
                if new is not tensor:
                    name = f"{path}.{key}" if path else key
                    child._buffers[key] = tensor
                    found.append(_new_buffer(name, tensor, new))
                    assigned.append(name)
        self.note(tree, assigned)
        return tuple(found)


def _new_buffer(name: str, old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor:
    """What forward assigned to a buffer, if the buffer can hold it."""
    if old is not None and new is not None and new.dtype == old.dtype and new.dim() == old.dim():
        sizes = tuple(new.shape)
        if all(isinstance(size, int) for size in sizes) and sizes == tuple(old.shape):
            return new
    texts = ["None" if t is None else f"{t.dtype}{tuple(t.shape)}".removeprefix("torch.") for t in (old, new)]
    raise CaptureFailed(
        f"The module assigns {texts[1]} to its buffer '{name}', which holds {texts[0]}.",
        hint="A buffer keeps its shape and dtype: register it as it will be.",
    )


def _tree(value: Any, leaves: list[torch.Tensor], where: str) -> Any:
    """Replace every tensor in `value` by its number in `leaves`, as '#3'."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return f"#{len(leaves) - 1}"
    if isinstance(value, dict):
        return {str(key): _tree(item, leaves, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tree(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)]
    raise CaptureFailed(
        f"{where} is a {type(value).__name__}; inputs and outputs must be tensors, or tuples, lists and dicts of them."
    )


def _input_names(module: nn.Module, positional: Any, keywords: Any) -> dict[str, str]:
    """'#0' -> 'input_ids': names a person recognises, from forward's signature and the dict's keys."""
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


def _plain_name(text: str, taken: Collection[str]) -> str:
    """Letters, digits, '_' and '.' only, and no name twice."""
    plain = "".join(c if c in "_." or (c.isascii() and c.isalnum()) else "_" for c in text) or "input"
    name, count = plain, 2
    while name in taken:
        name, count = f"{plain}_{count}", count + 1
    return name


def _batch_of(leaves: list[torch.Tensor]) -> int:
    sizes = [leaf.shape[0] for leaf in leaves if leaf.dim()]
    hint = "Pass e.g. torch.randn(4, 3, 32, 32)."
    if not sizes:
        raise CaptureFailed("The example batch holds no tensor with a batch axis.", hint=hint)
    if not sizes[0]:
        raise CaptureFailed("The example batch is empty: its first axis has no samples.", hint=hint)
    return sizes[0]


def _export(
    module: nn.Module,
    positional: list[Any],
    keywords: dict[str, Any],
    functions: list[str],
    *,
    name: str,
    granularity: str,
    is_loss: bool = False,
) -> tuple[Graph, Any]:
    """The graph, and an example of what the module returns (for the loss). Custom autograd functions that it calls are
    added to `functions`, by name."""
    leaves: list[torch.Tensor] = []
    trees = [_tree(positional, leaves, "the input"), _tree(keywords, leaves, "the input")]
    batch = _batch_of(leaves)
    has_batch = [leaf.dim() > 0 and leaf.shape[0] == batch for leaf in leaves]
    # torch.export makes sizes 0 and 1 special, and a size that equals the batch by chance would be mistaken for it.
    examples = [_resized(leaf, _exported_samples(batch)) if own else leaf for leaf, own in zip(leaves, has_batch)]
    returned: list[tuple[Any, list[str]]] = []
    flat = _Flat(module, trees, lambda tree, assigned: returned.append((tree, assigned)))
    dimension = torch.export.Dim("batch")
    shapes = tuple({0: dimension} if own else {} for own in has_batch)
    try:
        with custom_functions.with_gradients(functions):
            program = _quiet_export(flat, tuple(examples), shapes)
    except CaptureFailed:
        raise
    except Exception as error:
        with last_entered(module) as entered:
            fixed = _where_batch_was_fixed(lambda: _quiet_export(flat, tuple(examples), shapes))
        given = ", ".join(shape_text(leaf.shape) for leaf in leaves)
        raise _explain(error, module, fixed, entered, given) from error
    names = _input_names(module, *trees)
    output_tree, assigned = returned[-1]
    graph = convert(
        Exported(
            program=program,
            name=name,
            input_names=[names[f"#{i}"] for i in range(len(leaves))],
            input_tree=[tree_map(names.__getitem__, tree) for tree in trees],
            output_tree=output_tree,
            granularity=granularity,
            wrappers=("inner.loss.", "inner.") if is_loss else ("inner.",),
            assigned=tuple(assigned),
        )
    )
    return graph, _example_outputs(program, output_tree, len(assigned))


def _quiet_export(flat: nn.Module, examples: tuple[torch.Tensor, ...], shapes: Any) -> Any:
    """torch.export in training IR, without its warnings and graph dumps."""
    export = getattr(torch.export, "export_for_training", torch.export.export)
    quiet = _only_listener(logging.NullHandler())
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), quiet, recurrent.shapes_only():
        warnings.simplefilter("ignore")
        with torch.enable_grad(), whole_stacks():
            return export(flat, examples, dynamic_shapes=(shapes,), strict=False)


@contextlib.contextmanager
def _only_listener(listener: logging.Handler) -> Iterator[None]:
    """Torch logs nothing; only `listener` hears of symbolic shapes. An inner call leaves an outer listener in place."""
    logger = logging.getLogger(_SYMBOLIC)
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0].startswith("torch")]
    others = [(other, other.disabled) for name in names if name != _SYMBOLIC for other in [logging.getLogger(name)]]
    before = (logger.handlers, logger.level, logger.propagate)
    if not any(isinstance(handler, _BatchFixed) for handler in logger.handlers):
        logger.handlers, logger.propagate = [listener], False
        logger.setLevel(logging.INFO if isinstance(listener, _BatchFixed) else logging.CRITICAL)
    for other, _ in others:
        other.disabled = True
    parent = logging.getLogger("torch")  # loggers made meanwhile hand what they hear to it
    heard = (parent.handlers, parent.propagate)
    parent.handlers, parent.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        parent.handlers, parent.propagate = heard
        for other, disabled in others:
            other.disabled = disabled
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


class _BatchFixed(logging.Handler):
    """Hears that a symbol became a number, and looks up the stack for the user's line that did it."""

    place = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "set_replacement" in record.getMessage() and _is_number(record.args):
            stack = traceback.extract_stack()
            begins = max((i for i, frame in enumerate(stack) if frame.name == _quiet_export.__name__), default=0)
            own = [frame for frame in stack[begins:] if not _is_library(frame.filename)]  # not who called capture
            inside = [frame for frame in own if frame.name != "<module>"]
            if inside:
                self.place = f"{inside[-1].filename}:{inside[-1].lineno}, in {inside[-1].name}:\n    {inside[-1].line}"


def _is_number(replaced: Any) -> bool:
    """Whether a symbol was replaced by a number, of torch's log of (symbol, by what, ...); not by another symbol."""
    return isinstance(replaced, tuple) and len(replaced) > 1 and str(replaced[1]).isdecimal()


def _where_batch_was_fixed(again: Callable[[], Any]) -> str:
    """Export once more and listen: the line at which the batch size became a number, or ''."""
    listener = _BatchFixed()
    with _only_listener(listener), contextlib.suppress(Exception):
        again()
    return listener.place


def _exported_samples(batch: int) -> int:
    return 3 if batch < 2 else batch


def _as_many(target: Any, example_batch: Any) -> Any:
    """The example target with as many samples as the module was exported with."""
    given: list[torch.Tensor] = []
    _tree(example_batch, given, "the input")
    batch = _batch_of(given)
    leaves: list[torch.Tensor] = []
    tree = _tree(target, leaves, "the target")
    own = [leaf.dim() > 0 and leaf.shape[0] == batch for leaf in leaves]
    sized = [_resized(leaf, _exported_samples(batch)) if o else leaf for leaf, o in zip(leaves, own)]
    return tree_map(lambda leaf: sized[int(leaf[1:])], tree)


def _resized(leaf: torch.Tensor, samples: int) -> torch.Tensor:
    if leaf.shape[0] == samples:
        return leaf
    return leaf[:1].expand(samples, *leaf.shape[1:]).contiguous()


def _example_outputs(program: Any, tree: Any, extra: int) -> Any:
    """Zero tensors shaped as the module's outputs, for capturing the loss."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    found = output.args[0][: len(output.args[0]) - extra]
    metas = [node.meta["val"] for node in found][-len(list(tree_leaves(tree))) :]
    examples = [torch.zeros([int(_hint(s)) for s in meta.shape], dtype=meta.dtype) for meta in metas]
    return tree_map(lambda leaf: examples[int(leaf[1:])], tree)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def user_frames(error: BaseException | None) -> Iterator[traceback.FrameSummary]:
    """Frames of the user's own code in an exception and its causes, innermost last."""
    for one in reversed(_causes(error)):
        for frame in traceback.extract_tb(one.__traceback__):
            if not _is_library(frame.filename):
                yield frame


def _causes(error: BaseException | None) -> list[BaseException]:
    """An exception and what caused it, outermost first."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


def _is_library(filename: str) -> bool:
    in_standard = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    return filename.startswith(("<frozen", "<string")) or is_torchs_or_ours(filename) or in_standard


def _explain(error: Exception, module: nn.Module, fixed: str, entered: Entered, given: str) -> CaptureFailed:
    """An error that names the line in the user's code and what export said, shortly."""
    forward = inspect.unwrap(type(module).forward)
    source = inspect.getsourcefile(forward) or ""
    frames = list(user_frames(error))
    # Frames below the call of capture() itself are the caller's; the user's forward comes after torch's.
    is_loss = isinstance(module, _Loss)
    inside = [frame for frame in frames if is_loss or frame.name == "forward" or frame.filename == source]
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if inside:
        frame = frames[-1] if frames[-1].filename == inside[-1].filename else inside[-1]
        text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        place = f"{frame.filename}:{frame.lineno}, in {frame.name}:\n    {text}"
    elif fixed:
        place = fixed
    else:
        is_own = source and not _is_library(source)
        place = f"{source}:{inspect.getsourcelines(forward)[1]}, in {type(module).__name__}.forward" if is_own else ""
    depends = fixed or any(name in type(one).__name__ for one in _causes(error) for name in _DEPENDS)
    if depends or any(text in str(error) for text in ("Constraints violated", "data-dependent", "dynamic shape")):
        hint = (
            "Python control flow that depends on tensor values, or a fixed batch size, cannot be captured. "
            "Use torch.where, or x.shape[0] in place of a number."
        )
    elif entered.layer is not None:
        hint = (
            f"The data gives {given}, of which {entered}. Give samples of the shape that the network was made for, "
            "or change that layer."
        )
    else:
        hint = f"Does {'the loss' if is_loss else 'the module'} itself run on {given}, as the data gives it?"
    what = "the loss" if is_loss else type(module).__name__
    return CaptureFailed(f"torch.export cannot capture {what}: {said}{at(place)}", hint=hint)
