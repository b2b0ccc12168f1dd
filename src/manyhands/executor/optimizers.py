"""Optimiser facts -> PyTorch optimisers over some of the weights, whose state travels as tensors and plain values.

A state has one entry per weight and key of PyTorch's, `weight/key`: keys hold no slash, so the last one separates.
Entries of several workers are merged by uniting their dictionaries, and each worker takes out its own.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from manyhands.executor.by_name import wrapped
from manyhands.executor.group_stepper import GroupStepper
from manyhands.executor.schedules import at_start
from manyhands.executor.scheduling import Scheduling
from manyhands.executor.torch_optimizers import resolve_optimizer
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.optimizer_groups import OptimizerGroup
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.profiler.layer_clocks import CallTimer

SEPARATOR = "/"
_PROBE_SIZES = (2, 3, 5, 7, 11, 13)
"""Sizes of a probe's axes: all different, so that a state tensor's axes tell which of the weight's they follow."""
_MOST_NAMED = 5
_TIMED_STEPS = 6


class Stepper:
    """One optimiser with its groups over the trainable weights of a mapping, in the mapping's order.

    Options stay as they are, unless the numbers of a step are given (`take`): schedules run in the coordinator.
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> None:
        self.optimizer, self._groups = optimizer, optimizer.all_groups
        self._probes = _Probes()
        self.weights: dict[str, torch.Tensor] = {}
        stepped_ids: set[int] = set()
        for name, tensor in weights.items():
            if tensor.requires_grad and id(tensor) not in stepped_ids:  # a tied weight is stepped once
                self.weights[name] = tensor
                stepped_ids.add(id(tensor))
        numbers = optimizer.group_numbers
        self._number_of = {name: numbers.get(name, 0) for name in self.weights}
        self._taken: Sequence[Mapping[str, float | tuple[float, ...]]] = ()
        self._start()

    def _start(self) -> None:
        self.steps_done = 0
        members: dict[int, dict[str, torch.Tensor]] = {}
        for name, weight in self.weights.items():
            members.setdefault(self._number_of[name], {})[name] = weight
        self._steppers = {number: GroupStepper(self._groups[number], named) for number, named in members.items()}
        self._set_options()

    def take(self, options: Sequence[Mapping[str, float | tuple[float, ...]]]) -> None:
        """Take options of each of the optimizer's groups, from the next step on."""
        self._taken = options
        self._set_options()

    def _set_options(self) -> None:
        if self._taken:
            for number, stepper in self._steppers.items():
                stepper.set_options(self._taken[number])

    def step(self) -> None:
        """Step the optimiser. Weights without a gradient stay as they are."""
        if any(stepper.is_laid_anew for stepper in self._steppers.values()):
            self.load(*self.state(), self.steps_done)
        for stepper in self._steppers.values():
            stepper.step()
        self.steps_done += 1

    def add_kept(self, share: float) -> None:
        """Multiply the gradients by `share`, and add those that steps before have kept."""
        for stepper in self._steppers.values():
            stepper.add_kept(share)

    def keep_gradients(self) -> None:
        """Keep the gradients for the step after, in place of a step, which is counted."""
        for stepper in self._steppers.values():
            stepper.keep_gradients()
        self.steps_done += 1

    def skip(self) -> None:
        """Count a step whose gradients are of no use."""
        self.steps_done += 1

    def zero(self) -> None:
        """Forget the gradients."""
        for weight in self.weights.values():
            weight.grad = None

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept for the weights now, those in use."""
        return [tensor for stepper in self._steppers.values() for tensor in stepper.state_tensors()]

    def _expected(self, name: str) -> dict[str, Any]:
        """Return the state that a small weight of the same kind has."""
        return self._probes.of(self._groups[self._number_of[name]], self.weights[name])

    def state(self, *, copy: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors, and plain values, by `weight/key`. None: not there yet, as before a weight's first gradient.

        Without `copy` the tensors are those in use, which the next step will change.
        """
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        for name in self.weights:
            entries = self._steppers[self._number_of[name]].entries(name)
            for key in dict.fromkeys([*self._expected(name), *entries]):
                value = entries.get(key)
                if isinstance(value, torch.Tensor):
                    tensors[_entry(name, key)] = value.detach().clone() if copy else value.detach()
                else:
                    scalars[_entry(name, key)] = value
        return tensors, scalars

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], steps_done: int) -> None:
        """Go on from a state taken after `steps_done` steps, as if there had been no break. Weights are not touched.

        Entries of other weights are ignored.
        """
        if steps_done < 0:
            raise BadValue(f"The state is of step {steps_done}; steps are >= 0.")
        states = dict(self._find(tensors, scalars, steps_done))
        self._start()
        for name, entries in states.items():
            self._steppers[self._number_of[name]].set_entries(name, entries)
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
        expected = {name: self._expected(name) for name in self.weights}
        missing = [
            _entry(name, key) for name, keys in expected.items() for key in keys if key not in stored_keys.get(name, ())
        ]
        if missing:
            raise BadFile(f"The state of {self.optimizer.name} at step {steps_done} lacks {_named(missing)}.")
        for name, weight in self.weights.items():
            strange = sorted(stored_keys.get(name, set()) - set(expected[name]))
            if strange:
                raise BadFile(
                    f"The state holds {_named([_entry(name, key) for key in strange])}, which "
                    f"{self._groups[self._number_of[name]].name} does not keep: it is another optimiser's."
                )
            entries: dict[str, Any] = {}
            for key, like in expected[name].items():
                entry = _entry(name, key)
                value = tensors[entry] if entry in tensors else scalars[entry]
                if value is not None:
                    entries[key] = _restored(entry, value, like, weight)
            if entries:
                yield name, entries


class _Probes:
    """The state that a group's optimiser keeps for a weight, found by stepping a small one of its type and device, with
    as many axes."""

    def __init__(self) -> None:
        self._known: dict[tuple[OptimizerGroup, int, torch.dtype, torch.device], dict[str, Any]] = {}

    def of(self, group: OptimizerGroup, weight: torch.Tensor) -> dict[str, Any]:
        kind = (group, weight.dim(), weight.dtype, weight.device)
        if kind not in self._known:
            sizes = (*_PROBE_SIZES, *[2] * weight.dim())[: weight.dim()]
            self._known[kind] = _state_after_a_step(group, sizes, weight.dtype, weight.device)
        return self._known[kind]


def build(optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> Stepper:
    """Return the optimiser over the trainable tensors of `weights`, of which a worker may hold none."""
    return Stepper(optimizer, weights)


def validate(optimizer: Optimizer, weights: Iterable[tuple[str, int]] = ()) -> None:
    """Refuse, before anything starts, an optimiser that cannot be built, makes no step, or cannot train a weight;
    `weights`: names with how many axes each has."""
    for group in optimizer.all_groups:
        _state_after_a_step(group, (4, 4))
        if "." in group.name:
            _check_splits(group)
    if (scheduling := Scheduling.by_name(optimizer)) is not None:
        scheduling.at(1)
    numbers, tried = optimizer.group_numbers, set[tuple[int, int]]()
    for name, axes in weights:
        number = numbers.get(name, 0)
        if axes == 2 or (number, axes) in tried:
            continue
        tried.add((number, axes))
        group = optimizer.all_groups[number]
        try:
            _state_after_a_step(group, (2,) * axes)
        except BadValue as error:
            raise BadValue(
                f"{group.name} cannot train '{name:.120}', which has {axes} axes: {error.message}",
                hint='Give such weights to another class: groups=[{"weights": ["*.bias"], "optimizer": "AdamW"}], or '
                "a list of torch.optim objects.",
            ) from error


def _check_splits(group: OptimizerGroup) -> None:
    """Refuse a class of another package that steps a weight by more than its own gradients: devices have some of the
    weights each."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    gradients = [[torch.randn(4, 4, generator=generator, dtype=torch.float64) * 9 for _ in start] for _ in range(3)]

    def stepped(places: Sequence[int]) -> list[torch.Tensor]:
        weights = {str(place): start[place].clone().requires_grad_() for place in places}
        stepper = GroupStepper(group, weights)
        for of_step in gradients:
            for place in places:
                weights[str(place)].grad = of_step[place].clone()
            stepper.step()
        return list(weights.values())

    together, alone = stepped((0, 1)), [*stepped((0,)), *stepped((1,))]
    if not all(map(torch.equal, together, alone)):
        raise BadValue(
            f"{group.name} looks at all weights at once: it is an optimizer that cannot be split over devices.",
            hint="Turn off what takes all gradients together, such as a largest norm (Lamb: max_grad_norm=None).",
        )


def slots(optimizer: Optimizer) -> int:
    """Return how many numbers the optimiser keeps for each parameter once it has stepped, in the group that keeps most:
    SGD 0, with momentum 1, Adam 2."""
    return max(map(_slots_of, at_start(optimizer).all_groups))


def _slots_of(group: OptimizerGroup) -> int:
    state = _state_after_a_step(group, (4, 4))
    count = sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
    return math.ceil(count / 16)


def state_entries(optimizer: Optimizer, weights: Mapping[str, int]) -> frozenset[str]:
    """Return what the optimiser's state has once it has stepped, by `weight/key`; `weights`: how many axes each has."""
    groups, numbers = optimizer.all_groups, optimizer.group_numbers
    keys: dict[tuple[int, int], tuple[str, ...]] = {}
    entries: list[str] = []
    for name, axes in weights.items():
        kind = (numbers.get(name, 0), axes)
        if kind not in keys:
            keys[kind] = tuple(_state_after_a_step(groups[kind[0]], (2,) * axes))
        entries += [_entry(name, key) for key in keys[kind]]
    return frozenset(entries)


def with_lower_rate(optimizer: Optimizer) -> Optimizer:
    """Return the same optimiser with a tenth of its learning rates: what to try after a run that diverged."""
    lower = []
    for group in optimizer.all_groups:
        rate = dict(group.options).get("lr")
        if rate is None:
            rate = inspect.signature(resolve_optimizer(group.name)).parameters["lr"].default
        assert isinstance(rate, (int, float))
        lower.append({"lr": float(f"{rate / 10:.2g}")})
    return optimizer.with_options(lower)


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
    return byte_count / max(statistics.median(steps_seconds(parsed, weights, device, _TIMED_STEPS)), 1e-9)


def steps_seconds(
    optimizer: Optimizer, weights: Mapping[str, torch.Tensor], device: torch.device, count: int
) -> list[float]:
    """Return the seconds of `count` steps over these weights, without the first: it makes the optimizer's state."""
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e-6)
    stepper, timer = build(optimizer, weights), CallTimer(device)
    return [timer(stepper.step) for _ in range(count)][1:]


def passed_bytes(graph: Graph, optimizer: Optimizer) -> int:
    """Return the bytes that a step passes over: weights, gradients and its own state, (3 + 2 slots) times the weights'
    in all."""
    return graph.network.trained_bytes * (3 + 2 * slots(optimizer))


def _state_after_a_step(
    group: OptimizerGroup,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    weight = torch.zeros(tuple(sizes), dtype=dtype, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    stepper = GroupStepper(group, {"weight": weight})
    wrapped(group.name, dict(group.options), stepper.step)
    return stepper.entries("weight")


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a state by weight/key with other names for weights: those that `names` has."""
    entries = {}
    for entry, value in state.items():
        name, _, key = entry.rpartition(SEPARATOR)
        entries[_entry(names.get(name, name), key)] = value
    return entries


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
