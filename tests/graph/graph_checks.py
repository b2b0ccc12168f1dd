"""Shared by the graph tests: small zoo models, a module's own training step, and the same step through pieces."""

from __future__ import annotations

import contextlib
import copy
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.weights import Weights
from manyhands.models import registry
from tape import CapturedLoss, backward, forward

SMALL_INPUTS = {
    "tiny": (1, 16, 16), "unet": (3, 32, 32), "bert-small": (8,), "bilstm": (8,), "chair": (825,), "din": (6,),
    "resnet18": (3, 32, 32), "resnet34": (3, 32, 32), "resnet50": (3, 32, 32), "vgg16": (3, 32, 32),
    "vgg19": (3, 32, 32), "efficientnet-b1": (3, 48, 48), "mobilenetv2-32": (3, 16, 16),
    "efficientnet-b1-32": (3, 16, 16),
}  # fmt: skip
BUILD = {
    "unet": {"width": 8}, "bert-small": {"vocabulary": 1000, "max_length": 16}, "bilstm": {"vocabulary": 1000},
}  # fmt: skip
# Drop nothing: torch's own draws cannot be repeated by a captured graph.
STILL = {
    "efficientnet-b1": {"dropout": 0.0, "stochastic_depth": 0.0}, "bert-small": {"dropout": 0.0},
    "bilstm": {"dropout": 0.0}, "mobilenetv2": {"dropout": 0.0}, "mobilenetv3-large": {"dropout": 0.0},
    "vgg16": {"dropout": 0.0}, "vgg19": {"dropout": 0.0}, "tiny": {"dropout": 0.0}, "mobilenetv2-32": {"dropout": 0.0},
    "efficientnet-b1-32": {"dropout": 0.0, "stochastic_depth": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A model in float64 with a batch, a target and a loss, and its captured graph."""

    name: str
    module: nn.Module
    graph: Graph
    loss: Callable[..., Tensor]

    def batch(self, samples: int, seed: int = 1) -> Any:
        shape = SMALL_INPUTS.get(self.name, (3, 64, 64))
        return registry.example_batch(self.name, samples, input_shape=shape, seed=seed, dtype=torch.float64)

    def target(self, samples: int, seed: int = 1) -> Tensor:
        shape = SMALL_INPUTS.get(self.name, (3, 64, 64))
        target = registry.example_target(self.name, samples, input_shape=shape, seed=seed)
        return target.double() if target.is_floating_point() else target


@lru_cache(maxsize=4)
def zoo(name: str, still: bool = True) -> Example:
    torch.manual_seed(0)
    with small_classifier() if name.startswith("vgg") else contextlib.nullcontext():
        module = registry.build(name, **BUILD.get(name, {}), **(STILL.get(name, {}) if still else {})).double()
    loss = registry.loss_function(registry.ZOO[name].loss)
    blank = Example(name, module, None, loss)  # type: ignore[arg-type]
    batch = blank.batch(4, seed=2)
    settled(module, **batch) if isinstance(batch, dict) else settled(module, batch)
    graph = capture(module, blank.batch(2), loss=loss, target=blank.target(2), name=name)
    return Example(name, module, graph, loss)


def settled(module: nn.Module, *batch: Any, **named: Any) -> None:
    """Set batch norm's running statistics to those of a batch: untouched ones shrink a deep network's output to 0."""
    norms = [child for child in module.modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    was_training = module.training
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        module.train()(*batch, **named)
    module.train(was_training)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def small_classifier() -> Any:
    """VGG's classifier alone has 120 million parameters; a narrower one is the same graph."""
    real = nn.Linear.__init__

    def narrow(self: nn.Linear, inputs: int, outputs: int, **kwargs: Any) -> None:
        real(self, 64 if inputs == 4096 else inputs, 64 if outputs == 4096 else outputs, **kwargs)

    return mock.patch.object(nn.Linear, "__init__", narrow)


@dataclass
class Outcome:
    """Everything a training step leaves behind."""

    outputs: Any
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def call(module: nn.Module, batch: Any, graph: Graph) -> Any:
    if isinstance(batch, (tuple, list)):
        return module(*batch)
    return module(**batch) if isinstance(batch, dict) and graph.input_tree[1] else module(batch)


def by_module(module: nn.Module, graph: Graph, batch: Any, target: Any, loss: Callable[..., Tensor]) -> Outcome:
    """A step of a copy of the module itself, with its children's modes left alone."""
    own = copy.deepcopy(module)
    outputs = call(own, batch, graph)
    value = loss(outputs, target)
    value.backward()
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return Outcome(detached(outputs), value.detach(), gradients, dict(own.named_buffers()))


def by_pieces(graph: Graph, bounds: Sequence[int], batch: Any, target: Any, context: Context | None = None) -> Outcome:
    """The same step through pieces cut at the given nodes."""
    weights = Weights.copied(graph)
    pieces = cut(graph, weights, bounds)
    values, tape = forward(pieces, bind_inputs(graph, batch), context)
    value, gradients = CapturedLoss(graph)(values, target)
    backward(tape, gradients)
    buffers = {spec.name: weights.tensors[spec.name] for spec in graph.weights if spec.buffer}
    own = {name: t.grad for name, t in weights.trainable().items() if t.grad is not None}
    return Outcome(outputs_of(graph, values), value, own, buffers)


def cut(graph: Graph, weights: Weights, bounds: Sequence[int]) -> list[Piece]:
    edges = sorted({0, len(graph.nodes), *bounds})
    return [Piece(graph, weights, a, b) for a, b in itertools.pairwise(edges)]


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return [detached(item) for item in value]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in (value.values() if isinstance(value, dict) else value) for t in flat(item)]


def assert_close(
    found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-12, scale: float | None = None
) -> None:
    """Equal up to `tolerance` of the largest element, or of `scale`."""
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype, what
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), what
        return
    scale = max(1e-30, (float(wanted.abs().max()) if wanted.numel() else 1.0) if scale is None else scale)
    error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: off by {error} where the largest is {scale}"


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Each relative to its own largest element.

    Gradients that are 0 but for rounding (a key's bias under softmax, a bias before batch norm) are measured by the
    model's largest.
    """
    largest = max((float(gradient.abs().max()) for gradient in wanted.values()), default=0.0)
    for name, gradient in wanted.items():
        own = float(gradient.abs().max())
        scale = own if own > 1e-10 * largest else largest
        assert_close(found[name], gradient, f"gradient of {name}", tolerance, scale)


def assert_same(found: Outcome, wanted: Outcome, tolerance: float = 1e-12) -> None:
    for i, (one, other) in enumerate(zip(flat(found.outputs), flat(wanted.outputs), strict=True)):
        assert_close(one.detach(), other, f"output {i}", tolerance)
    assert_close(found.loss, wanted.loss, "loss", tolerance)
    assert set(found.gradients) == set(wanted.gradients)
    assert_same_gradients(found.gradients, wanted.gradients, tolerance)
    for name, buffer in wanted.buffers.items():
        if name in found.buffers:  # a buffer the forward does not read is not part of the graph
            assert_close(found.buffers[name], buffer, f"buffer {name}", tolerance)


# The hash of random.py once more, in numpy's unsigned arithmetic.


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.uint32)
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def numpy_bits(
    seed: int, step: int, operator: str, stream: int, sample_shape: tuple[int, ...], batch_axis: int | None,
    first_sample: int, samples: int,
) -> np.ndarray:  # fmt: skip
    """uint32 for all elements of samples [first_sample, first_sample + samples)."""
    key = np.array([0x9E3779B9], dtype=np.uint32)
    for part in (seed, seed >> 32, step, zlib.crc32(operator.encode()), stream):
        key = _mixed(key ^ _mixed(np.array([(part + 0x632BE59B) % 2**32], dtype=np.uint32)))
    second = _mixed(key + np.uint32(0x5851F42D))
    place = np.arange(int(np.prod(sample_shape)), dtype=np.uint64).reshape(sample_shape).astype(np.uint32)
    if batch_axis is None:
        numbers, parts = [0], [place]
    else:
        numbers, parts = list(range(first_sample, first_sample + samples)), [place] * samples
    drawn = []
    for number, part in zip(numbers, parts, strict=True):
        who = np.array([number % 2**32], dtype=np.uint32)
        drawn.append(_mixed(_mixed(part ^ _mixed(who ^ key)) + _mixed(who ^ second)))
    return drawn[0] if batch_axis is None else np.concatenate(drawn, axis=batch_axis)


def numpy_keep(drawn: np.ndarray, probability: float) -> Tensor:
    """1 where the number, read as signed, is below the threshold."""
    kept = drawn.astype(np.uint32).view(np.int32).astype(np.int64) < round(probability * 2**32) - 2**31
    return torch.from_numpy(kept.astype(np.float64))
