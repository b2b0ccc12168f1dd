"""A graph of one operator call as a document, hostile versions of it, and a run of what was taken."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from fuzz.judging import TooLong
from fuzz.operator_calls import CALLS, Call, Tensor, enum, samples
from manyhands.facts.errors import BadGraph
from manyhands.facts.network import DTYPE_BYTES, TensorSpec, WeightSpec
from manyhands.facts.profile import Kernel
from manyhands.graph import ops
from manyhands.graph.argument_types import parameters
from manyhands.graph.check import walk
from manyhands.graph.document import from_document
from manyhands.graph.document_reader import read_document, weights_in
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls
from manyhands.graph.nodes import Node
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights

RISKY = sorted(
    ops.RECURRENT | ops.CONVOLUTION | ops.POOLING | ops.RESAMPLING | ops.NORMALISATION
    | {f"aten.{name}" for name in ("to.dtype", "softmax.int", "sum.default", "clone.default", "embedding.default",
                                   "scaled_dot_product_attention.default", "gather.default", "index.Tensor",
                                   "scatter.src", "nll_loss2d.default")}
)  # fmt: skip
"""Operators that are drawn more often: native code trusts their arguments most."""
MOST_OUTPUTS = 12
"""That are declared for an operator which returns as many tensors as its arguments say."""
MOST_ELEMENTS = 2**17
"""Of all tensors together, that a run is tried with."""
INTEGERS = (-1, -2, -(2**31), -(2**40), 0, 1, 2, 3, 4, 5, 7, 8, 100, 1000, 65_536, 2**31 - 1, 2**31, 2**32, 2**40)
FLOATS = (-1.0, 0.0, 0.5, 1.0, 2.0, -0.0, 1e-30, 1e30, 1e-320, 3.5, 2.0**63, -(2.0**63), 1e308)
TEXTS = (
    "", "same", "valid", "constant", "reflect", "circular", "replicate", "tanh", "none", "floor", "trunc", "xy", "ij",
    "mean", "bij,jk->bik", "...", "->", "a,a->", "ii->i", "x",
)  # fmt: skip
SHAPE_SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 2**31, 2**33)


def document(target: str, call: Call, views: random.Random | None = None, **flags: Any) -> dict[str, Any]:
    """A graph that makes this one call; with `views`, some inputs are read through a view that is not contiguous."""
    inputs: list[dict[str, Any]] = []
    weights: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []

    def written(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [written(item) for item in argument]
        if not isinstance(argument, Tensor):
            return argument
        if argument.batch_axis is None:
            name = f"w{len(weights)}"
            trainable = not argument.is_buffer and argument.dtype.startswith(("float", "bfloat", "complex"))
            weights.append({"name": name, "shape": list(argument.shape), "dtype": argument.dtype,
                            "trainable": trainable, "buffer": argument.is_buffer})  # fmt: skip
            return {"is": "weight", "name": name}
        name, given = f"x{len(inputs)}", argument
        others = [axis for axis in range(len(given.shape)) if axis != given.batch_axis]
        if views is not None and len(others) > 1 and views.random() < 0.3:
            one, two = views.sample(others, 2)
            shape = list(given.shape)
            shape[one], shape[two] = shape[two], shape[one]
            inputs.append(_spec(name, shape, given.dtype, given.batch_axis))
            made = [_spec(f"v{len(nodes)}", list(given.shape), given.dtype, given.batch_axis)]
            nodes.append(_node(f"v{len(nodes)}", "aten.transpose.int", [_value(name), one, two], {}, made))
            return _value(made[0]["name"])
        inputs.append(_spec(name, list(given.shape), given.dtype, given.batch_axis))
        return _value(name)

    arguments = [written(argument) for argument in call.arguments]
    options = {name: written(argument) for name, argument in call.options}
    if not inputs:
        inputs.append(_spec("x0", [1, 2], "float32", 0))
    returns = ops.resolve(target)._schema.returns
    is_list = len(returns) == 1 and str(returns[0].type) != "Tensor"
    count = MOST_OUTPUTS if is_list else len(returns)
    first = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    updates = first.get("name", "") if target in ops.BUFFER_UPDATE and first.get("is") == "weight" else ""
    given = call.arguments[0] if call.arguments else None
    like = given if isinstance(given, Tensor) else Tensor((), batch_axis=None)
    outputs = [_spec(f"y:{place}", list(like.shape), like.dtype, like.batch_axis) for place in range(count)]
    nodes.append(_node("one", target, arguments, options, outputs, updates=updates, **flags))
    tree = [spec["name"] for spec in inputs]
    return {"version": 1, "name": "one", "granularity": "blocks", "inputs": inputs, "input_tree": [tree, {}],
            "output_tree": tree[0] if updates else "y:0", "nodes": nodes, "weights": weights, "aliases": {},
            "loss": None, "loss_combination": ""}  # fmt: skip


def _value(name: str) -> dict[str, Any]:
    return {"is": "value", "name": name}


def _spec(name: str, shape: list[int], dtype: str, batch_axis: int | None) -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": dtype, "batch_axis": batch_axis, "differentiable": False}


def _node(name: str, target: str, arguments: list[Any], options: dict[str, Any], outputs: list[Any],
          updates: str = "", **flags: Any) -> dict[str, Any]:  # fmt: skip
    returns = ops.resolve(target)._schema.returns
    several = len(returns) > 1 or str(returns[0].type) != "Tensor"
    return {"name": name, "target": target, "arguments": arguments, "options": options, "outputs": outputs,
            "several": several, "in_place": False, "updates": updates, "module": "", "where": "",
            "without_gradient": False, **flags}  # fmt: skip


# Hostile versions


def hostile(random_: random.Random) -> dict[str, Any]:
    """A valid call with some of its arguments changed."""
    target = random_.choice(sorted(CALLS) if random_.random() < 0.6 else RISKY)
    made = random_.choice(CALLS[target])
    arguments: Any = list(copy.deepcopy(made.arguments))
    options: Any = dict(made.options)
    for _ in range(random_.choice((0, 1, 1, 1, 1, 2, 2, 3, 5))):
        kind = random_.randrange(12)
        if kind == 0 and arguments:
            arguments.pop()
        elif kind == 1:
            arguments.append(_anything(random_))
        elif kind == 2:
            _, named = parameters(target)
            options[random_.choice([*named, "x"])] = _anything(random_)
        elif kind == 3 and len(arguments) > 1:
            one, two = random_.sample(range(len(arguments)), 2)
            arguments[one], arguments[two] = arguments[two], arguments[one]
        elif kind == 4 and len(arguments) < len(parameters(target)[0]):
            arguments.append(_of_type(parameters(target)[0][len(arguments)].type, random_))
        elif kind == 5 and options:
            name = random_.choice(list(options))
            options[name] = _changed(options[name], random_)
        elif arguments:
            arguments = _changed(arguments, random_, outermost=True)
    flags = {name: True for name in ("in_place", "without_gradient") if random_.random() < 0.05}
    return document(target, Call(tuple(arguments), tuple(options.items())), random_, **flags)


def _changed(argument: Any, random_: random.Random, *, outermost: bool = False) -> Any:
    """An argument with one place in it changed."""
    if isinstance(argument, list) and argument and (outermost or random_.random() < 0.8):
        place = random_.randrange(len(argument))
        if not outermost and random_.random() < 0.2:
            before, after = argument[:place], argument[place + 1 :]
            return random_.choice((before, argument + argument, argument[place:], before + after))
        return [*argument[:place], _changed(argument[place], random_), *argument[place + 1 :]]
    if isinstance(argument, Tensor) and random_.random() < 0.9:
        return _changed_tensor(argument, random_)
    if isinstance(argument, bool):
        return random_.choice((not argument, _anything(random_)))
    if isinstance(argument, int):
        return random_.choice((argument + 1, argument - 1, -argument, *INTEGERS, _anything(random_)))
    if isinstance(argument, float):
        special = map(_special, ("nan", "inf", "-inf"))
        return random_.choice((argument + 1, -argument, *FLOATS, *special, _anything(random_)))
    if isinstance(argument, str):
        return random_.choice((*TEXTS, _anything(random_)))
    return _anything(random_)


def _changed_tensor(tensor: Tensor, random_: random.Random) -> Tensor:
    shape, kind = list(tensor.shape), random_.randrange(10)
    axis = tensor.batch_axis
    if kind < 5 and shape:
        shape[random_.randrange(len(shape))] = random_.choice(SHAPE_SIZES)
    elif kind == 5:
        shape.append(random_.choice(SHAPE_SIZES[:10]))
    elif kind == 6 and shape:
        shape.pop()
    elif kind == 7:
        axis = random_.choice((None, *range(len(shape))))
    else:
        return Tensor(tensor.shape, random_.choice(list(DTYPE_BYTES)), axis, tensor.is_buffer)
    if axis is not None and axis < len(shape) and random_.random() < 0.9:
        shape[axis] = 1  # what an input must have
    return Tensor(tuple(shape), tensor.dtype, axis, tensor.is_buffer)


def _special(text: str) -> dict[str, str]:
    return {"is": "float", "text": text}


def _of_type(kind: str, random_: random.Random) -> Any:
    """Something that an argument of a type may be."""
    if "List" in kind:
        inner = _of_type(kind.replace("List", ""), random_)
        return [inner] * random_.randrange(5)
    if "ScalarType" in kind:
        return enum(random_.choice(list(DTYPE_BYTES)))
    if "MemoryFormat" in kind:
        return enum(random_.choice(ops.MEMORY_FORMATS))
    if "Tensor" in kind:
        shape = [random_.choice(SHAPE_SIZES[:10]) for _ in range(random_.randrange(5))]
        return Tensor(tuple(shape), random_.choice(list(DTYPE_BYTES)), None)
    if "bool" in kind:
        return random_.random() < 0.5
    if "str" in kind:
        return random_.choice(TEXTS)
    return random_.choice(INTEGERS if "int" in kind else FLOATS)


def _anything(random_: random.Random) -> Any:
    kind = random_.choice(
        (
            "List int", "List float", "List Tensor", "ScalarType", "MemoryFormat", "Tensor", "Tensor", "bool", "str",
            "int", "int", "float", "None", "samples", "special", "odd",
        )
    )  # fmt: skip
    if kind == "None":
        return None
    if kind == "samples":
        return samples(random_.choice(INTEGERS))
    if kind == "special":
        return _special(random_.choice(("nan", "inf", "-inf")))
    if kind == "odd":
        unknown = (enum("quint8"), enum("float8_e5m2"), {"is": "x"})
        return random_.choice((2**63, -(2**63), 2**63 - 1, 10**30, [[]], [None], *unknown))
    return _of_type(kind, random_)


# Loading and running


def completed(raw: object) -> dict[str, Any]:
    """The document with outputs as its operators make them; BadGraph where they make none."""
    graph = read_document(raw)
    made: dict[int, list[list[Any]]] = {2: [], 3: []}
    for count, found in made.items():
        walk(graph, (count,), lambda node, values, _, found=found: found.append(values))  # type: ignore[misc]
    assert isinstance(raw, dict)
    nodes = copy.deepcopy(raw["nodes"])
    for node, two, three in zip(nodes, made[2], made[3], strict=True):
        shapes = zip(node["outputs"], two, three, strict=True)
        node["outputs"] = [_with_shape(spec, *both) for spec, *both in shapes if isinstance(both[0], torch.Tensor)]
    return {**raw, "nodes": nodes}


def _with_shape(spec: dict[str, Any], two: torch.Tensor, three: Any) -> dict[str, Any]:
    """A declared output with the shape that two and three samples make."""
    if not isinstance(three, torch.Tensor) or two.dim() != three.dim():
        raise BadGraph("another number of samples makes another number of axes")
    axes = [axis for axis in range(two.dim()) if two.shape[axis] != three.shape[axis]]
    shape = list(two.shape)
    for axis in axes:
        shape[axis] = three.shape[axis] - two.shape[axis]
    dtype = str(two.dtype).removeprefix("torch.")
    return {**spec, "shape": shape, "dtype": dtype, "batch_axis": axes[0] if axes else None}


def loaded(raw: object) -> Graph:
    """The graph of a document, with weights of its sizes: all that load_graph checks, without a file."""
    specs = weights_in(read_document(raw))
    if sum(spec.elements for spec in specs.values()) > MOST_ELEMENTS:
        state = {name: torch.empty(spec.shape, dtype=_dtype(spec), device="meta") for name, spec in specs.items()}
    else:
        state = {name: _values(spec, spec.shape, random.Random(7), wild=False) for name, spec in specs.items()}
    return from_document(raw, state)


def _dtype(spec: WeightSpec | TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)  # type: ignore[no-any-return]


def _values(spec: Any, shape: tuple[int, ...], random_: random.Random, *, wild: bool) -> torch.Tensor:
    """Numbers of a tensor: tame ones that any table and mask accepts, or any at all."""
    generator = torch.Generator().manual_seed(random_.randrange(2**31))
    dtype = _dtype(spec)
    if dtype.is_floating_point or dtype.is_complex:
        found = torch.randn(shape, dtype=torch.float32, generator=generator).abs() / 4
        if wild and found.numel():
            odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -3.0, 1e-40])
            found.view(-1)[0 :: random_.randrange(1, 4)] = odd[random_.randrange(len(odd))]
        return found.to(dtype)
    found = torch.randint(0, 2, shape, generator=generator)
    if wild:
        odd = torch.tensor([-(2**63), -(2**31), -129, -5, -1, 2, 4, 7, 100, 2**31, 2**63 - 1])
        found.view(-1)[0 :: random_.randrange(1, 4)] = odd[random_.randrange(len(odd))]
    return found.to(dtype)


def elements_of(graph: Graph, count: int) -> int:
    specs = [*graph.inputs, *(spec for node in graph.nodes for spec in node.outputs)]
    sizes = [spec.elements * (1 if spec.batch_axis is None else count) for spec in specs]
    return sum(sizes) + sum(spec.elements for spec in graph.weights)


def run(graph: Graph, random_: random.Random, *, wild: bool | None = None) -> BaseException | None:
    """Training forward and backward, and inference, on drawn numbers, `wild` ones or not; what came out of it.

    An operator may refuse the numbers it is given; it must not end the process.
    """
    count = random_.choice((1, 2, 3, 5))
    if elements_of(graph, count) > MOST_ELEMENTS or any(tensor.is_meta for tensor in graph.state.values()):
        return None
    is_wild = random_.random() < 0.4 if wild is None else wild
    inputs: Mapping[str, torch.Tensor] = {
        spec.name: _values(spec, spec.shape_for(count), random_, wild=is_wild) for spec in graph.inputs
    }
    try:
        piece = Piece(graph, Weights.copied(graph), kernels=_kernels(graph, random_))
        for one in inputs.values():
            one.requires_grad_(one.is_floating_point() and random_.random() < 0.8)
        found = piece(inputs, Context(training=True, samples=count))
        ready = [one for one in found.values() if one.requires_grad]
        torch.autograd.backward(ready, [torch.randn_like(one) for one in ready])
        with torch.no_grad():
            piece(inputs, Context(training=False, samples=count))
    except (Exception, TooLong) as error:
        return error
    return None


def _kernels(graph: Graph, random_: random.Random) -> dict[str, Any]:
    """Now and then another kernel than PyTorch's choice, for what has several."""
    node: Node = graph.nodes[-1]
    if node.target not in ops.CONVOLUTION | {"aten.linear.default"} or random_.random() > 0.2:
        return {}
    kernels = (Kernel(channels_last=True), Kernel(onednn=False), Kernel(product=True), Kernel(packed=True))
    return kernel_calls(graph, {node.name: random_.choice(kernels)})


def judged(data: bytes) -> object:
    """One input of the fuzz target: read, checked like a graph from outside, and run if it is taken."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadGraph(f"not JSON: {error}"[:200]) from error
    graph = loaded(completed(raw))
    run(graph, random.Random(zlib.crc32(data)))
    return graph


def encoded(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw).encode()
