"""Whole steps of a captured graph by any choice of kernels: training steps (forward, backward and SGD), or
inferences."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.facts.network import TensorSpec
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls, store_weights
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights, plain
from manyhands.profiler.clock import TimedTrial


def random_tensor(spec: TensorSpec, samples: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers; ones where the type has no fractions, which any table and mask accepts."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape = spec.shape_for(samples)
    if not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_inputs(graph: Graph, samples: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    return {spec.name: random_tensor(spec, samples, seed).to(device) for seed, spec in enumerate(graph.inputs)}


def random_state(graph: Graph) -> dict[str, torch.Tensor]:
    """Return weights made up for timing: small normal numbers, ones for buffers (a variance must not be zero)."""
    state = {}
    for seed, spec in enumerate(graph.weights):
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.buffer or not dtype.is_floating_point:
            state[spec.name] = torch.ones(spec.shape, dtype=dtype)
        else:
            generator = torch.Generator().manual_seed(seed)
            state[spec.name] = torch.randn(spec.shape, dtype=dtype, generator=generator) * 0.05
    return state


def borrowed_state(graph: Graph) -> dict[str, torch.Tensor]:
    """Return weights made up for timing that all lie in the same memory: that of the largest. They are for networks of
    which only one layer at a time is to take memory."""
    sizes: dict[torch.dtype, int] = {}
    for spec in graph.weights:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        sizes[dtype] = max(sizes.get(dtype, 0), spec.elements)
    memory = {dtype: torch.ones(size, dtype=dtype) for dtype, size in sizes.items()}
    for dtype, numbers in memory.items():
        if dtype.is_floating_point:
            numbers.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05).abs_()
    return {spec.name: memory[getattr(torch, spec.dtype)][: spec.elements].view(spec.shape) for spec in graph.weights}


class TrainingStep:
    """A step that owns a copy of the weights and one optimiser; its trials differ in their kernels only.

    The loss is the sum of the outputs and the learning rate is zero: the work of a step, and numbers that stay small.
    """

    def __init__(self, graph: Graph, samples: int, inputs: Mapping[str, torch.Tensor] | None = None) -> None:
        self.graph = graph
        self.inputs = dict(inputs) if inputs is not None else random_inputs(graph, samples)
        self.weights = Weights.copied(graph)
        self.optimizer = torch.optim.SGD(list(self.weights.trainable().values()), lr=0.0)
        self._stored: Mapping[str, Kernel] | None = None

    def trial(self, name: str, choice: Mapping[str, Kernel]) -> TimedTrial:
        """Return a step by a choice of kernels; putting the weights in their format is not timed."""
        calls = kernel_calls(self.graph, choice)
        pieces: list[Piece] = []

        def prepare() -> None:
            if self._stored != choice:
                store_weights(self.graph, self.weights, choice)
                self._stored = choice
            if not pieces:
                pieces.append(Piece(self.graph, self.weights, kernels=calls))

        return TimedTrial(name, lambda: self.run(pieces[0]), prepare)

    def run(self, piece: Piece) -> None:
        self.optimizer.zero_grad()
        outputs = piece(self.inputs)
        roots = [outputs[name] for name in self.graph.outputs if outputs[name].requires_grad]
        torch.autograd.backward([root.sum() for root in roots])
        self.optimizer.step()


class InferenceStep:
    """A step in evaluation mode: a forward pass without autograd. Its trials differ in their kernels only."""

    def __init__(self, graph: Graph, samples: int, inputs: Mapping[str, torch.Tensor] | None = None) -> None:
        self.graph, self.samples = graph, samples
        self.inputs = dict(inputs) if inputs is not None else random_inputs(graph, samples)
        self.weights = Weights.copied(graph)
        self._stored: Mapping[str, Kernel] | None = None
        self._piece = Piece(graph, self.weights)

    def trial(self, name: str, choice: Mapping[str, Kernel]) -> TimedTrial:
        """Return an inference by a choice of kernels; laying out the weights for them is not timed."""
        calls = kernel_calls(self.graph, choice)

        def prepare() -> None:
            if self._stored == choice:
                return
            tensors = self.weights.tensors
            tensors.update({weight_name: plain(tensor) for weight_name, tensor in tensors.items()})
            store_weights(self.graph, self.weights, choice)
            self._stored, self._piece = choice, Piece(self.graph, self.weights, kernels=calls)
            self._piece.rest(self.samples)

        return TimedTrial(name, self.run, prepare)

    @torch.no_grad()
    def run(self) -> None:
        self._piece(self.inputs, Context(training=False))
