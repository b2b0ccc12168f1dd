"""Batches that a user's own loop pushes, one by one: kept until they are safe, and taken again after a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from manyhands.data.kept import KeptBatches
from manyhands.data.loader import Batch
from manyhands.facts.errors import BadData

_KNOWN_TO_NUMPY = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)
"""Types of numbers that numpy copies: bfloat16 as the integers of its bits."""
_PAIR = "Write step((inputs, target)), or step(inputs, target)."


class PushedBatches:
    """The source of batches of an elastic job that a loop feeds: one thread pushes, the coordinator's takes.

    A batch is kept until a checkpoint has the step that it was used in: nobody could load it again.
    """

    can_come_again: ClassVar[bool] = False

    def __init__(self, first: int, kept: KeptBatches) -> None:
        self._kept = kept
        self._samples: dict[int, int] = {}
        self._next = self.end = first
        """`end`: the step of the next batch to be pushed."""

    def push(self, inputs: Any, targets: Any) -> int:
        """Keep a batch for the next step, and return that step."""
        step = self.end
        self._kept.add(step, (inputs, targets))
        self._samples[step] = samples_in(inputs)
        self.end = step + 1  # from here on another thread may take it
        return step

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield batches from a step on, be it forwards or backwards."""
        self._next = step
        return self

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        step = self._next
        inputs, targets = self._kept.at(step)
        self._next = step + 1
        return step, inputs, targets

    def samples_at(self, step: int) -> int | None:
        """Return how many samples a step's batch has; None: it has not been pushed."""
        return self._samples.get(step)

    def is_ready(self) -> bool:
        """Return whether the next batch has been pushed."""
        return self._next < self.end

    def forget_before(self, step: int) -> None:
        """Drop the batches of earlier steps: a checkpoint has what came of them."""
        for old in [kept for kept in self._kept.steps if kept < step]:
            del self._samples[old]
        self._kept.forget_before(step)


class BatchRows(Dataset[Any]):
    """The samples of one batch, as pairs."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets
        self._count = samples_in(inputs)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return _row(self.inputs, index), _row(self.targets, index)


def pair_of(batch: Sequence[Any], label_names: Sequence[str] | None) -> tuple[Any, Any]:
    """Return inputs and targets of what a loop's step was called with: both, or a batch that holds both.

    `label_names`: of a network with a loss of its own, whose batches may be dicts with labels, or inputs alone.
    """
    if len(batch) == 2:
        return _copied(batch[0]), _copied(batch[1])
    if len(batch) != 1:
        raise BadData(f"The step was called with {len(batch)} values; a batch is a pair.", hint=_PAIR)
    given = batch[0]
    if isinstance(given, Mapping) and label_names is not None:
        label = next((name for name in label_names if name in given), None)
        rest = {name: value for name, value in given.items() if name != label}
        return (_copied(rest), _copied(given[label])) if label is not None and rest else (_copied(dict(given)), ())
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return _copied(given[0]), _copied(given[1])
    if label_names is not None and not isinstance(given, Mapping):
        return _copied(given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given), ()
    what = f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, (tuple, list, Mapping)) else "")
    raise BadData(f"The batch is {what}, not a pair (inputs, target).", hint=_PAIR)


def samples_in(inputs: Any) -> int:
    """Return the number of samples of a batch: the length of the first axis of all its tensors."""
    counts = {int(tensor.shape[0]) if tensor.dim() else 0 for tensor in _tensors(inputs)}
    if len(counts) != 1 or 0 in counts:
        raise BadData(
            f"The inputs of the batch have {', '.join(map(str, sorted(counts))) or 'no'} samples along their first "
            "axes; all tensors of a batch have the same number, at least 1.",
            hint="What is the same for all samples belongs into the model.",
        )
    return counts.pop()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _copied(value: Any) -> Any:
    """Return a batch with tensors of its own on the CPU: a loop may fill the same ones again."""
    if isinstance(value, torch.Tensor):
        return copied_alone(value)
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_copied(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if value is None:
        return None
    try:
        return torch.as_tensor(value).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(
            f"The batch holds a {type(value).__name__}; it is made of tensors, in tuples, lists and dicts.",
            hint="Take what is no tensor out of it, or make it one.",
        ) from error


def copied_alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU, made by this thread alone: torch would employ other threads for a large
    one, which then spin for a while on cores where devices compute."""
    plain = tensor.detach().resolve_neg()
    is_known = type(plain) is torch.Tensor and plain.is_cpu and plain.layout == torch.strided
    if not is_known or plain.dtype not in _KNOWN_TO_NUMPY:
        return plain.to("cpu", copy=True)
    if plain.dtype == torch.bfloat16:
        return torch.from_numpy(plain.view(torch.int16).numpy().copy("K")).view(torch.bfloat16)
    return torch.from_numpy(plain.numpy().copy("K"))


def _row(value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, dict):
        return {name: _row(part, index) for name, part in value.items()}
    return type(value)(_row(part, index) for part in value) if isinstance(value, (tuple, list)) else value
