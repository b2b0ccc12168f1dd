"""Optimiser facts -> PyTorch optimisers over some of the weights, whose state travels as tensors and plain values.

A state has one entry per weight and key of PyTorch's, `weight/key`: keys hold no slash, so the last one separates.
Entries of several workers are merged by uniting their dictionaries, and each worker takes out its own.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.executor.by_name import check_options, classes, error_text, resolve, wrapped
from manyhands.executor.schedules import check_length, scheduler
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.optimizer import Optimizer, Option
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights, dense_gradient, memory_order
from manyhands.profiler.steps import now

SEPARATOR = "/"
_PROBE_SIZES = (2, 3, 5, 7, 11, 13)
"""Sizes of a probe's axes: all different, so that a state tensor's axes tell which of the weight's they follow."""
_MOST_NAMED = 5
_TIMED_STEPS = 6
_REFUSED_OPTIMIZERS = {
    "LBFGS": "it evaluates the loss again and again within a step, which workers cannot",
    "SparseAdam": "it needs sparse gradients, and those of workers are dense",
}
_ABOUT_FUSING = {"fused", "foreach", "differentiable", "capturable"}


def _looked_up(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


FUSED_STEPS = _looked_up("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
"""Operators of fused steps, looked up here and kept. Under a mode (`PeakBytes`) PyTorch looks up an operator at its
first use, and where two threads do that at once it goes on with the one that it has freed (2.13). This module is read
by one thread."""


class Stepper:
    """One optimiser with its schedules over the trainable weights of a mapping, in the mapping's order."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> None:
        self.optimizer = optimizer
        self._probes = _Probes(optimizer)
        self.weights: dict[str, torch.Tensor] = {}
        stepped_ids: set[int] = set()
        for name, tensor in weights.items():
            if tensor.requires_grad and id(tensor) not in stepped_ids:  # a tied weight is stepped once
                self.weights[name] = tensor
                stepped_ids.add(id(tensor))
        self._start()

    def _start(self) -> None:
        self.steps_done = 0
        self._torch, self._schedule = _construct(self.optimizer, list(self.weights.values()))
        self._laid = {name: _laid(weight) for name, weight in self.weights.items()}
        self._rows = self._laid_as_rows() if self._torch.defaults.get("fused") else {}
        if self._rows:
            over = [self._stepped(name) for name in self.weights]
            self._torch, self._schedule = _construct(self.optimizer, over)

    def _laid_as_rows(self) -> dict[str, _Row]:
        """Return, for weights in channels_last, contiguous leaves over the same memory: a fused step, which knows no
        axes, copies the gradients of others first, and takes two to three times as long."""
        rows = {}
        for name, weight in self.weights.items():
            order = memory_order(weight)
            view = weight.detach().permute(order)
            if view.is_contiguous() and not weight.is_contiguous():
                rows[name] = _Row(view.requires_grad_(), order)
        return rows

    def _stepped(self, name: str) -> torch.Tensor:
        """Return the tensor that PyTorch's optimiser has for a weight."""
        row = self._rows.get(name)
        return self.weights[name] if row is None else row.leaf

    def step(self) -> None:
        """Step the optimiser, then its schedule. Weights without a gradient stay as they are."""
        for weight in self.weights.values():
            if weight.grad is not None and weight.grad.stride() != weight.stride():
                dense_gradient(weight)  # a fused step takes both for rows of numbers
        if any(_laid(weight) != self._laid[name] for name, weight in self.weights.items()):
            self.load(*self.state(), self.steps_done)  # they have been laid out anew
        for name, row in self._rows.items():
            gradient = self.weights[name].grad
            row.leaf.grad = None if gradient is None else gradient.permute(row.order)
        self._torch.step()
        for row in self._rows.values():
            row.leaf.grad = None
        self._step_schedule()

    def skip(self) -> None:
        """Step the schedule alone: the gradients are of no use."""
        self._torch.__dict__["_opt_called"] = True  # else the schedule warns that no step came before its own
        self._step_schedule()

    def _step_schedule(self) -> None:
        try:
            if self._schedule is not None:
                self._schedule.step()
        except (ValueError, ArithmeticError) as error:
            names, why = ", ".join(name for name, _ in self.optimizer.schedule), error_text(error)
            raise BadValue(f"The schedule ({names}) cannot go on after step {self.steps_done}: {why}") from error
        self.steps_done += 1

    def zero(self) -> None:
        """Forget the gradients."""
        for weight in self.weights.values():
            weight.grad = None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._torch.param_groups[0]["lr"])

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept for the weights now, those in use."""
        states = self._torch.state.values()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def state(self, *, copy: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors, and plain values, by `weight/key`. None: not there yet, as before a weight's first gradient.

        Without `copy` the tensors are those in use, which the next step will change.
        """
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        for name, weight in self.weights.items():
            entries, row = self._torch.state.get(self._stepped(name), {}), self._rows.get(name)
            for key in dict.fromkeys([*self._probes.of(weight), *entries]):
                value = entries.get(key)
                if isinstance(value, torch.Tensor):
                    value = value if row is None else row.as_weight(value)
                    tensors[_entry(name, key)] = value.detach().clone() if copy else value.detach()
                else:
                    scalars[_entry(name, key)] = value
        return tensors, scalars

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], steps_done: int) -> None:
        """Go on from a state taken after `steps_done` steps, as if there had been no break. Weights are not touched.

        Entries of other weights are ignored. Schedules are replayed: most compute a rate from the one before.
        """
        if steps_done < 0:
            raise BadValue(f"The state is of step {steps_done}; steps are >= 0.")
        states = dict(self._find(tensors, scalars, steps_done))
        self._start()
        for name, entries in states.items():
            row = self._rows.get(name)
            self._torch.state[self._stepped(name)] = entries if row is None else row.as_rows(entries)
        self._torch.__dict__["_opt_called"] = True  # else schedules warn that no step came before theirs
        if self._schedule is not None:
            for _ in range(steps_done):
                self._step_schedule()
        self.steps_done = steps_done

    def _find(
        self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], steps_done: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (weight, its state) for the weights that have one. Everything is checked before anything is changed."""
        stored_keys: dict[str, set[str]] = {}
        for entry in (*tensors, *scalars):
            name, _, key = entry.rpartition(SEPARATOR)
            stored_keys.setdefault(name, set()).add(key)
        if steps_done == 0 and not any(name in stored_keys for name in self.weights):
            return  # before the first step there is nothing to miss
        expected = {name: self._probes.of(weight) for name, weight in self.weights.items()}
        missing = [
            _entry(name, key) for name, keys in expected.items() for key in keys if key not in stored_keys.get(name, ())
        ]
        if missing:
            raise BadFile(f"The state of {self.optimizer.name} at step {steps_done} lacks {_named(missing)}.")
        for name, weight in self.weights.items():
            strange = sorted(stored_keys.get(name, set()) - set(expected[name]))
            if strange:
                raise BadFile(
                    f"The state holds {_named([_entry(name, key) for key in strange])}, which {self.optimizer} does "
                    f"not keep: it is another optimiser's."
                )
            entries: dict[str, Any] = {}
            for key, like in expected[name].items():
                entry = _entry(name, key)
                value = tensors[entry] if entry in tensors else scalars[entry]
                if value is not None:
                    entries[key] = _restored(entry, value, like, weight)
            if entries:
                yield name, entries


class _Row(NamedTuple):
    """A weight in the order of its memory, for a step that goes over it number by number."""

    leaf: torch.Tensor
    order: tuple[int, ...]
    """The weight's axes in the leaf's order."""

    def as_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Return a state's tensor with the weight's axes."""
        if value.dim() != len(self.order):
            return value
        return value.permute([self.order.index(axis) for axis in range(len(self.order))])

    def as_rows(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return all that is kept for a weight, with the leaf's axes."""
        return {
            key: value.permute(self.order)
            if isinstance(value, torch.Tensor) and value.dim() == len(self.order)
            else value
            for key, value in entries.items()
        }


def _laid(weight: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return where a weight's memory is, and the order in which its numbers lie there."""
    return weight.data_ptr(), weight.stride()


class _Probes:
    """The state that an optimiser keeps for a weight, found by stepping a small one of its type and device, with as
    many axes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._known: dict[tuple[int, torch.dtype, torch.device], dict[str, Any]] = {}

    def of(self, weight: torch.Tensor) -> dict[str, Any]:
        kind = (weight.dim(), weight.dtype, weight.device)
        if kind not in self._known:
            sizes = (*_PROBE_SIZES, *[2] * weight.dim())[: weight.dim()]
            self._known[kind] = _state_after_a_step(self.optimizer, sizes, weight.dtype, weight.device)
        return self._known[kind]


def build(optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> Stepper:
    """Return the optimiser over the trainable tensors of `weights`; for a worker that holds none it still has the
    schedules."""
    return Stepper(optimizer, weights)


def validate(optimizer: Optimizer, steps: int | None = None) -> None:
    """Refuse, before anything starts, an optimiser that cannot be built, makes no step, or whose schedule ends before
    so many steps."""
    _state_after_a_step(optimizer, (4, 4))
    if steps is not None:
        check_length(optimizer, _construct(optimizer, [])[1], steps)


def at_start(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser as it is at its first step, without its schedule.

    Measuring and trying plans take as many steps as they need, which may be more than the schedule has.
    """
    if not optimizer.schedule:
        return optimizer
    group = _construct(optimizer, [])[0].param_groups[0]
    options: dict[str, Any] = optimizer.options
    options.update((name, group[name]) for name in ("lr", "momentum", "betas") if name in group)  # OneCycleLR's
    return Optimizer(optimizer.name, **options)


def slots(optimizer: Optimizer) -> int:
    """Return how many numbers the optimiser keeps for each parameter once it has stepped: SGD 0, with momentum 1, Adam
    2."""
    state = _state_after_a_step(optimizer, (4, 4))
    count = sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
    return math.ceil(count / 16)


def with_lower_rate(optimizer: Optimizer) -> Optimizer:
    """Return the same optimiser with a tenth of its learning rate: what to try after a run that diverged."""
    rate = optimizer.options.get("lr")
    if rate is None:
        rate = inspect.signature(getattr(torch.optim, optimizer.name)).parameters["lr"].default
    assert isinstance(rate, (int, float))
    options = {**optimizer.options, "lr": float(f"{rate / 10:.2g}")}
    return Optimizer(optimizer.name, schedule=optimizer.schedule, milestones=optimizer.milestones, **options)


def step_bytes_per_second(graph: Graph, optimizer: dict[str, Any] | None, torch_device: str = "cpu") -> float:
    """Return how many bytes per second an optimiser's step passes over, reading and writing, one step after another:
    measured on a graph's weights; 0 where there is nothing to measure."""
    if optimizer is None:
        return 0.0
    parsed = Optimizer.from_dict(optimizer)
    device = torch.device(torch_device)
    weights = Weights.copied(graph, device=device).trainable()
    byte_count = passed_bytes(graph, parsed)
    if not byte_count:
        return 0.0
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e-6)
    stepper = build(parsed, weights)
    seconds = []
    for _ in range(_TIMED_STEPS):
        start = now(device)
        stepper.step()
        seconds.append(now(device) - start)
    return byte_count / max(statistics.median(seconds[1:]), 1e-9)


def passed_bytes(graph: Graph, optimizer: Optimizer) -> int:
    """Return the bytes that a step passes over: weights, gradients and its own state, (3 + 2 slots) times the weights'
    in all."""
    trained = sum(weight.bytes for weight in graph.network.weights.values() if weight.trainable)
    return trained * (3 + 2 * slots(optimizer))


def optimizer_names() -> list[str]:
    """Return the names of this PyTorch's optimisers that workers can run."""
    return sorted(set(classes(torch.optim, torch.optim.Optimizer)) - set(_REFUSED_OPTIMIZERS))


def _state_after_a_step(
    optimizer: Optimizer,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    weight = torch.zeros(tuple(sizes), dtype=dtype, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    stepper = build(optimizer, {"weight": weight})
    wrapped(optimizer.name, optimizer.options, stepper.step)
    return dict(stepper._torch.state.get(weight, {}))


def _construct(optimizer: Optimizer, weights: list[torch.Tensor]) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    kind = resolve("optimizer", optimizer.name, classes(torch.optim, torch.optim.Optimizer), _REFUSED_OPTIMIZERS)
    check_options(kind, optimizer.options)
    over = weights or [torch.zeros(1, 1, requires_grad=True)]  # PyTorch takes no empty list, but schedules must run
    options = optimizer.options | ({"fused": True} if _may_fuse(kind, optimizer.options, over) else {})
    built = wrapped(kind.__name__, optimizer.options, lambda: kind(over, **options))
    return built, scheduler(optimizer, built)


def _may_fuse(kind: Any, options: Mapping[str, Option], weights: Sequence[torch.Tensor]) -> bool:
    """Return whether a step may pass over weights, gradients and state once, in place of once for every operation: on a
    CPU that takes a third of the time. Options about fusing that are given have the last word."""
    if "fused" not in inspect.signature(kind).parameters or not _ABOUT_FUSING.isdisjoint(options):
        return False
    return all(weight.is_cpu and weight.dtype in (torch.float32, torch.float64) for weight in weights)


def _entry(name: str, key: str) -> str:
    return f"{name}{SEPARATOR}{key}"


def _named(entries: list[str]) -> str:
    remaining = len(entries) - _MOST_NAMED
    return ", ".join(f"'{entry:.120}'" for entry in entries[:_MOST_NAMED]) + (
        f" and {remaining} more" if remaining > 0 else ""
    )


def _restored(entry: str, value: Any, like: Any, weight: torch.Tensor) -> Any:
    """Return a copy of a state's entry, laid out as PyTorch would have it; PyTorch's own loading would change its
    type."""
    if not isinstance(like, torch.Tensor):
        if isinstance(value, (bool, int, float)):
            return value
        raise BadFile(f"The optimiser's '{entry:.120}' is a {type(value).__name__}; it must be a number.")
    if not isinstance(value, torch.Tensor):
        raise BadFile(f"The optimiser's '{entry:.120}' is a {type(value).__name__}; it must be a tensor.")
    shape = _shape_of(like, weight)
    is_scalar = like.dim() == 0 and weight.dim() != 0
    if tuple(value.shape) != shape or (value.dtype != like.dtype and not (is_scalar and value.is_floating_point())):
        raise BadFile(
            f"The optimiser's '{entry:.120}' is {value.dtype} {list(value.shape)}; for a weight {weight.dtype} "
            f"{list(weight.shape)} it must be {like.dtype} {list(shape)}."
        )
    if shape == tuple(weight.shape):
        return torch.empty_like(weight, dtype=value.dtype, device=like.device, requires_grad=False).copy_(value)
    return value.detach().to(like.device, copy=True)


def _shape_of(like: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a probe's state, carried over to the weight: axes as long as the probe's become as long as
    the weight's."""
    if like.dim() != weight.dim():
        return tuple(like.shape)
    sizes = (*_PROBE_SIZES, *[2] * weight.dim())
    return tuple(real if size == probe else size for size, probe, real in zip(like.shape, sizes, weight.shape))
