"""Weights, buffers and optimiser state: as a message (a list of the tensors, then the bytes), and where they lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.executor.boxes import dtype_of
from manyhands.executor.messages import COORDINATOR
from manyhands.executor.optimizers import state_entries
from manyhands.executor.schedules import at_start
from manyhands.facts.errors import BadValue
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.graph import Graph
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.order import RunState

WEIGHT, OPTIMIZER, LOSS = "weight:", "optimizer:", "loss:"
LARGEST_BYTES = 2**36
MOST_AXES = 64


def entries(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    return tuple(TensorEntry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


def byte_count(listed: Iterable[TensorEntry]) -> int:
    """Return the bytes of everything listed; checked before memory is allocated for it."""
    total = 0
    for entry in listed:
        is_sensible = len(entry.shape) <= MOST_AXES and all(0 <= extent <= LARGEST_BYTES for extent in entry.shape)
        if entry.dtype not in DTYPE_BYTES or not is_sensible:
            shape = f"{entry.shape}"[:80]
            raise BadValue(f"State '{entry.name:.80}' is {entry.dtype:.20} {shape}: no tensor is like that.")
        total += math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    if total > LARGEST_BYTES:
        raise BadValue(f"State of {total} bytes; at most {LARGEST_BYTES} are taken.")
    return total


def empty(listed: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Return memory to receive the listed tensors into."""
    return {entry.name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype)) for entry in listed}


def plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, contiguous, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under names that say what they are: `prefix` comes first."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def of(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under a prefix, by names without it."""
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}


def weight_of(name: str) -> str:
    """Return the weight that a tensor of a run's state is, or belongs to; empty: it belongs to the loss."""
    if name.startswith(WEIGHT):
        return name.removeprefix(WEIGHT)
    return name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else ""


def constant_weights(network: Network, *, is_training: bool = True) -> frozenset[str]:
    """Return the weights that no step changes: frozen parameters, in inference all of them, those that no operator
    reads, and buffers that are not written. The coordinator has them from the beginning, so no copy of a state needs
    them."""
    written = {name for op in network.ops for name in op.writes}
    read = {name for op in network.ops for name in op.weights}
    return frozenset(
        name
        for name, weight in network.weights.items()
        if not (weight.trainable and is_training and name in read) and name not in written
    )


def optimizer_entries(graph: Graph, optimizer: Optimizer | None) -> frozenset[str]:
    """Return what the optimizer's state has after a step: a state without is of no use."""
    if optimizer is None:
        return frozenset()
    read = {name for op in graph.network.ops for name in op.weights}
    trained = {w.name: len(w.shape) for w in graph.weights if w.trainable and w.name in read}
    return state_entries(at_start(optimizer), trained)


@dataclass
class Located:
    """A run's state after some step, wherever it lies: the tensors there are, and the holders of each."""

    steps_done: int
    scalars: dict[str, Any]
    entries: dict[str, TensorEntry]
    holders: dict[str, tuple[str, ...]]
    """Tensor -> the workers, or the coordinator, that have it."""
    here: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that the coordinator has."""
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)
    """Worker -> tensor -> checksum, from when its copy was made."""

    @classmethod
    def at_coordinator(cls, saved: RunState) -> Located:
        tensors = named(WEIGHT, saved.weights) | named(OPTIMIZER, saved.optimizer)
        listed = {entry.name: entry for entry in entries(tensors)}
        return cls(saved.steps_done, saved.scalars, listed, dict.fromkeys(tensors, (COORDINATOR,)), tensors)

    def is_saved_alone(self, constants: Collection[str]) -> bool:
        """Return whether the coordinator alone has some of it, `constants` apart, which no step changes."""
        return any(
            holders == (COORDINATOR,) and weight_of(name) not in constants for name, holders in self.holders.items()
        )

    def with_here(self, more: Mapping[str, torch.Tensor]) -> Located:
        """Return the same state with these tensors added, which the coordinator has."""
        listed = {entry.name: entry for entry in entries(more)}
        return Located(
            self.steps_done, self.scalars, self.entries | listed, self.holders | dict.fromkeys(more, (COORDINATOR,)),
            self.here | dict(more), self.checksums,
        )  # fmt: skip

    def of_weights(self) -> Located:
        """Return the same state without the optimiser's."""
        names = [name for name in self.entries if not name.startswith(OPTIMIZER)]
        return Located(
            self.steps_done, {}, {name: self.entries[name] for name in names},
            {name: self.holders[name] for name in names},
            {name: tensor for name, tensor in self.here.items() if not name.startswith(OPTIMIZER)}, self.checksums,
        )  # fmt: skip

    def wanted_by(self, weights: Collection[str], stepped: Collection[str]) -> list[str]:
        """Return the tensors that a device with these weights starts with, and the optimiser's state of those that it
        steps."""
        held, held_state = set(weights), set(stepped)
        return [
            name
            for name in self.entries
            if (weight_of(name) or None) in (held_state if name.startswith(OPTIMIZER) else held)
        ]

    def assigned(self, needs: Mapping[str, Iterable[str]]) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return device -> source -> tensors.

        The source is the device itself where it has a tensor, else the holder with the least to send so far.
        """
        sent: Counter[str] = Counter()
        assignment: dict[str, dict[str, list[str]]] = {}
        for device, names in needs.items():
            sources = assignment.setdefault(device, {})
            for name in names:
                holders = self.holders[name]
                if device in holders:
                    source = device
                else:
                    source = min(holders, key=lambda holder: (sent[holder], holders.index(holder)))
                    sent[source] += byte_count([self.entries[name]])
                sources.setdefault(source, []).append(name)
        return {
            device: {source: tuple(names) for source, names in sources.items()}
            for device, sources in assignment.items()
        }


def located(
    holdings: Mapping[str, Mapping[int, Iterable[TensorEntry]]],
    scalars: Mapping[str, Mapping[int, dict[str, Any]]],
    weights: Collection[str],
    most_steps: int,
    saved: RunState | None = None,
    checksums: Mapping[str, Mapping[int, dict[str, int]]] | None = None,
    constants: Collection[str] = (),
    optimizer_entries: Collection[str] = (),
) -> Located | None:
    """Return the latest state of which everything exists somewhere: at workers, or in what the coordinator has saved.

    `most_steps`: the steps whose loss is known. A worker may have ended one more, which was lost with another worker.
    `constants`: weights of what was saved that are the same at every step. `optimizer_entries`: what an optimiser's
    state has after a step, by `weight/key`: where weights are, it need not be, since a gateway alone steps them.
    """
    steps = {step for holding in holdings.values() for step in holding if step <= most_steps}
    if saved is not None:
        steps.add(saved.steps_done)
    for step in sorted(steps, reverse=True):
        is_saved = saved is not None and saved.steps_done == step
        state = (
            Located.at_coordinator(saved)
            if saved is not None and is_saved
            else Located(step, {}, {}, {}).with_here(
                named(WEIGHT, {name: saved.weights[name] for name in constants} if saved is not None else {})
            )
        )
        for worker, holding in holdings.items():
            if step not in holding:
                continue
            state.checksums[worker] = (checksums or {}).get(worker, {}).get(step, {})
            state.scalars = {**scalars[worker].get(step, {}), **state.scalars}
            for entry in holding[step]:
                state.entries.setdefault(entry.name, entry)
                state.holders[entry.name] = (*state.holders.get(entry.name, ()), worker)
        has_state = is_saved or all(
            name in state.scalars or OPTIMIZER + name in state.entries for name in optimizer_entries if step
        )
        if has_state and all(WEIGHT + name in state.entries for name in weights):
            return state
    return None
