"""Traces a plain module in a tenth of a second, as torch.export would in several.

torch.export follows symbols through every operator, so that it can tell how each size grows with the batch. For most
networks two or three plain numbers tell as much: the module runs on tensors without memory with as many samples as the
example has, and again with others, and what differs between the runs must be a multiple of the samples.

    samples          4                   1009
    conv2d           (4, 64, 16, 16)     (1009, 64, 16, 16)      (1 x samples, 64, 16, 16)
    view             [4, 256]            [1009, 256]             [1 x samples, 256]

The program is the one that torch.export gives, operator by operator: PyTorch hands both the same calls. (It has no
slices that take all there is, and a number that is written stays a number.) Whatever is not plain is left to
torch.export, which refuses it or knows how: operators that differ between the runs, sizes that are no multiples, code
that decides by the number of samples (`sample_sizes`: another number may decide otherwise, and no run can tell),
tensors from elsewhere, numbers read from a tensor, regions without gradients or under autocast, custom autograd
functions, tied weights, and attributes that forward assigns.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from manyhands.graph.compiler import without_collecting
from manyhands.graph.frames import is_torchs_or_ours
from manyhands.graph.nodes import SampleCount
from manyhands.graph.norm_shapes import is_usual_norm
from manyhands.graph.sample_sizes import SizesNoted, plain
from manyhands.graph.sizes import SIZES

MANY_SAMPLES = 1009
"""A prime, so that a size of which it is a factor grows with the batch."""
OTHER_SAMPLES = (2, MANY_SAMPLES)
"""Numbers of samples of the further runs: few, since a share of a batch may have few, and many."""
_LEFT_OUT = frozenset({"aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten._local_scalar_dense.default"})
_PREFIXES = {InputKind.PARAMETER: "p_", InputKind.BUFFER: "b_", InputKind.USER_INPUT: ""}


class NotPlain(Exception):
    """The module is not one that can be traced so; torch.export is to be asked."""


@dataclass
class _Call:
    """One call of an operator, as a run met it."""

    target: Any
    leaves: list[Any]
    """The arguments; a tensor as ("made", call, place), ("weight", name) or ("input", place)."""
    tree: Any
    outputs: Any
    """The shape and type of what it returned: of one tensor, or a list of those of several."""
    modules: tuple[tuple[str, str], ...]
    frames: str


@dataclass
class _Trace:
    """The calls of one run of a module."""

    calls: list[_Call] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class TracedProgram:
    """The facts of a program that the conversion needs, in the form in which torch.export gives them."""

    module: nn.Module
    graph: torch.fx.Graph
    graph_signature: Any

    @cached_property
    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.module.state_dict(keep_vars=True))

    @cached_property
    def constants(self) -> dict[str, torch.Tensor]:
        """Buffers that are not stored."""
        return {name: tensor for name, tensor in self.module.named_buffers() if name not in self.state_dict}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()


def traced(
    module: nn.Module, examples: Sequence[torch.Tensor], has_batch: Sequence[bool], met: list[str]
) -> TracedProgram | None:
    """Return the program of a module, called with `examples`; None where it is not plain. `met`: the names of the
    custom functions that were called, to which a run here adds none."""
    met_before = len(met)
    tensors = [*module.parameters(), *module.buffers(), *examples]
    names = [name for name, _ in (*module.named_parameters(remove_duplicate=False),
                                  *module.named_buffers(remove_duplicate=False))]  # fmt: skip
    is_alone = len(names) == len(tensors) - len(examples)
    if not is_alone or not all(map(_is_plain, tensors)):
        return None
    try:
        samples = next(len(leaf) for leaf, is_batched in zip(examples, has_batch) if is_batched)
        counts = (samples, *(count for count in OTHER_SAMPLES if count != samples))
        with warnings.catch_warnings(), without_collecting(), _meta_weights(module) as weights:
            warnings.simplefilter("ignore")
            sizes = SizesNoted(MANY_SAMPLES)
            traces = [
                _run(module, weights, examples, has_batch, count, sizes if count == MANY_SAMPLES else None)
                for count in counts
            ]
        if sizes.decisions:
            raise NotPlain("the module decides by the number of samples")
        if len(met) > met_before:
            raise NotPlain("a custom function")
        return TracedProgram(module, *_program(module, traces, counts, examples, has_batch))
    except Exception:  # whatever goes wrong here: torch.export says it better, or knows how
        del met[met_before:]
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    is_torchs = type(tensor) in (torch.Tensor, nn.Parameter)
    return is_torchs and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()


# Running


def _run(
    module: nn.Module,
    weights: dict[int, Any],
    examples: Sequence[torch.Tensor],
    has_batch: Sequence[bool],
    samples: int,
    sizes: SizesNoted | None,
) -> _Trace:
    inputs = [
        torch.empty((samples, *leaf.shape[1:]) if is_batched else leaf.shape, dtype=leaf.dtype, device="meta")
        for leaf, is_batched in zip(examples, has_batch)
    ]
    sources = weights | {id(tensor): ("input", place) for place, tensor in enumerate(inputs)}
    before = _attributes(module)
    recorder = _Recorder(module, sources)
    try:
        with contextlib.ExitStack() as stack:
            for context in (
                torch.device("meta"), torch.backends.cudnn.flags(enabled=False), recorder.following_modules(),
                torch.enable_grad(), enable_python_dispatcher(), recorder, sizes or contextlib.nullcontext(),
            ):  # fmt: skip
                stack.enter_context(context)
            returned = module(*inputs)
    finally:
        is_changed = _put_back(before)
    if is_changed:
        raise NotPlain("forward assigns an attribute")
    recorder.trace.returned = [recorder.source(tensor) for tensor in returned]
    return recorder.trace


class _Recorder(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that is called, before PyTorch takes it apart, and runs it on tensors without memory."""

    def __init__(self, module: nn.Module, sources: dict[int, Any]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self.trace = _Trace()
        self.enter_stack: list[Any] = []
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._inside: list[tuple[str, str]] = []
        self._sources = sources
        self._factories: dict[int, Any] = {}
        """Where a tensor comes from that was made of none, by the address of its storage."""
        self._alive: list[Any] = []
        """Tensors, so that no other is given the address of one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def source(self, tensor: Any) -> Any:
        """Return where a tensor comes from."""
        if not isinstance(tensor, torch.Tensor):
            raise NotPlain("no tensor")
        if id(tensor) not in self._sources:  # PyTorch gives out a copy of what a factory has made
            made = self._factories.pop(tensor.untyped_storage()._cdata, None) if tensor.is_meta else None
            if made is None:
                raise NotPlain("a tensor from elsewhere")
            self._sources[id(tensor)] = made
            self._alive.append(tensor)
        return self._sources[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or str(func) in _LEFT_OUT:
            raise NotPlain(str(func))
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise NotPlain("a region")
        leaves, tree = tree_flatten((args, kwargs or {}))
        noted = [self.source(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves]
        with torch._C._DisablePythonDispatcher():
            made = _norm_of(func, args) if kwargs is None or not kwargs else None
            made = func(*args, **(kwargs or {})) if made is None else made
        number = len(self.trace.calls)
        several = isinstance(made, (list, tuple))
        outputs = list(made) if several else [made]
        if not outputs or not all(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in outputs):
            raise NotPlain("no tensor")
        for place, tensor in enumerate(outputs):
            self._sources[id(tensor)] = ("made", number, place if several else None)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._factories[outputs[0].untyped_storage()._cdata] = self._sources[id(outputs[0])]
        self._alive.append(made)
        forms = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
        self.trace.calls.append(
            _Call(func, noted, tree, forms if several else forms[0], tuple(self._inside), _user_frames())
        )
        return made

    @contextlib.contextmanager
    def following_modules(self) -> Iterator[None]:
        """Note which child of the module is being called, within this context."""
        call = nn.Module.__call__

        def followed(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(part))
            if path is None:
                return call(part, *args, **kwargs)
            self._inside.append((path, f"{type(part).__module__}.{type(part).__qualname__}"))
            try:
                return call(part, *args, **kwargs)
            finally:
                self._inside.pop()

        nn.Module.__call__ = followed  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]


def _norm_of(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """Return what a batch norm in training makes, which PyTorch works out by running two dozen operators; None: it is
    something else."""
    if not is_usual_norm(str(func), args):
        return None
    made = torch.empty_like(args[0], requires_grad=False)
    differentiable = [tensor for tensor in args[:3] if tensor is not None and tensor.requires_grad]
    return made + differentiable[0].sum() if differentiable else made


def _user_frames() -> str:
    """Return the lines of the user's code that are being run, the innermost last, as in a traceback."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _run.__code__:
        name, code = frame.f_code.co_filename, frame.f_code
        if not is_torchs_or_ours(name):
            frames.append(f'File "{name}", line {frame.f_lineno}, in {code.co_name}\n')
        frame = frame.f_back  # type: ignore[assignment]
    return "".join(reversed(frames))


@contextlib.contextmanager
def _meta_weights(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Put tensors without memory in place of a module's, within this context; yield what each of them stands for, by
    its address."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    sources: dict[int, Any] = {}
    try:
        for path, part in module.named_modules():
            for tensors in (part._parameters, part._buffers):
                for key, tensor in list(tensors.items()):
                    if tensor is None:
                        continue
                    stand_in: Any = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                    )
                    if isinstance(tensor, nn.Parameter):
                        stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
                    before.append((tensors, key, tensor))
                    tensors[key] = stand_in
                    sources[id(stand_in)] = ("weight", f"{path}.{key}" if path else key)
        yield sources
    finally:
        for tensors, key, tensor in before:
            tensors[key] = tensor


def _attributes(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    return [(part, dict(vars(part))) for part in module.modules()]


def _put_back(before: list[tuple[nn.Module, dict[str, Any]]]) -> bool:
    """Give every module the attributes that it had; return whether any was another."""
    is_changed = False
    for part, attributes in before:
        now = vars(part)
        if now.keys() != attributes.keys() or any(now[key] is not value for key, value in attributes.items()):
            is_changed = True
            now.clear()
            now.update(attributes)
    return is_changed


# Comparing the runs


def _program(
    module: nn.Module, traces: Sequence[_Trace], counts: Sequence[int], examples: Sequence[torch.Tensor],
    has_batch: Sequence[bool],
) -> tuple[torch.fx.Graph, Any]:  # fmt: skip
    """Return the graph and the signature of what all runs did alike."""
    first, *others = traces
    if any(len(other.calls) != len(first.calls) or other.returned != first.returned for other in others):
        raise NotPlain("the runs differ")
    graph, specs = torch.fx.Graph(), []
    sources: dict[Any, torch.fx.Node] = {}
    kinds = [(InputKind.PARAMETER, module.named_parameters()), (InputKind.BUFFER, module.named_buffers())]
    for kind, tensors in kinds:
        for name, tensor in tensors:
            node = graph.placeholder(_PREFIXES[kind] + name.replace(".", "_"))
            node.meta["val"] = tensor
            sources["weight", name] = node
            specs.append(SimpleNamespace(kind=kind, target=name, arg=SimpleNamespace(name=node.name)))
    for place, (leaf, is_batched) in enumerate(zip(examples, has_batch)):
        node = graph.placeholder(f"leaves_{place}")
        sizes: tuple[Any, ...] = tuple(leaf.shape)
        node.meta["val"] = _sized(leaf.shape, leaf.dtype, (SampleCount(1), *sizes[1:]) if is_batched else sizes)
        sources["input", place] = node
        specs.append(SimpleNamespace(kind=InputKind.USER_INPUT, target=None, arg=SimpleNamespace(name=node.name)))
    for number, calls in enumerate(zip(*(trace.calls for trace in traces), strict=True)):
        _add(graph, number, calls, counts, sources)
    graph.output(tuple(sources[source] for source in first.returned))
    return graph, SimpleNamespace(input_specs=specs, user_outputs=tuple(first.returned))


def _add(
    graph: torch.fx.Graph, number: int, calls: Sequence[_Call], counts: Sequence[int], sources: dict[Any, Any]
) -> None:
    """Add what the runs called as their call of this number."""
    call = calls[0]
    if any(other.target is not call.target or other.tree != call.tree for other in calls):
        raise NotPlain("operators differ")
    leaves = [_merged(values, counts) for values in zip(*(call.leaves for call in calls), strict=True)]
    leaves = [sources[leaf] if isinstance(leaf, tuple) and leaf[:1] in _SOURCES else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, call.tree)
    outputs = _merged_outputs([call.outputs for call in calls], counts)
    name = graph._target_to_str(call.target.overloadpacket.__name__)
    node = graph.create_node("call_function", call.target, args, kwargs, name)
    node.meta.update(val=outputs, nn_module_stack=dict(enumerate(call.modules)), stack_trace=call.frames)
    sources["made", number, None] = node
    for place, output in enumerate(outputs if isinstance(outputs, list) else ()):
        item = graph.call_function(operator.getitem, (node, place))
        item.meta.update(val=output, nn_module_stack=node.meta["nn_module_stack"], stack_trace=call.frames)
        sources["made", number, place] = item


_SOURCES = (("made",), ("weight",), ("input",))


def _merged(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return what a value of each run is, for any number of samples."""
    first = values[0]
    if all(type(value) is type(first) and value == first for value in values):
        return first
    if not all(type(value) is int for value in values):
        raise NotPlain("arguments differ")
    factor = first // counts[0]
    if any(value != factor * count for value, count in zip(values, counts, strict=True)):
        raise NotPlain("a size that is no multiple")
    return SampleCount(factor)


def _merged_outputs(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    first = outputs[0]
    if isinstance(first, list):
        return [_merged_outputs(items, counts) for items in zip(*outputs, strict=True)]
    shapes, dtypes = zip(*outputs, strict=True)
    if len(set(dtypes)) > 1 or len(set(map(len, shapes))) > 1:
        raise NotPlain("outputs differ")
    return _sized(first[0], first[1], tuple(_merged(sizes, counts) for sizes in zip(*shapes, strict=True)))


def _sized(shape: Sequence[int], dtype: torch.dtype, sizes: tuple[Any, ...]) -> torch.Tensor:
    """Return a tensor without memory that knows which of its sizes grow with the batch."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
    setattr(tensor, SIZES, sizes)
    return tensor
