"""A batch's inputs and targets, as a network takes them, with every tensor the run's own.

[x, y]  (x, y)          a pair                                  also of dicts and of nested tuples
{"ids": ..., "mask":
 ..., "labels": ...}    what mh.Pairs says; without a loss function all of it, parted at the labels
x  [x]                  inputs alone, where the network needs no target for its loss
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from manyhands.data.given import Pairs
from manyhands.facts.errors import BadData

Parted = tuple[Any, Any]


@dataclass(frozen=True)
class BatchParts:
    """The way in which batches are parted into inputs and targets."""

    pairs: Pairs | None = None
    """What the caller says; None: it follows from what a batch is."""
    labels: Collection[str] = ()
    """The names of labels, for a network that computes its own loss; none: batches are pairs."""
    is_copied: bool = True
    """Whether tensors are copied: whoever made them may use their memory again."""

    def of(self, batch: Any, step: int) -> Parted:
        """Return the inputs and the targets of a step's batch."""
        inputs, targets = self._parts(plain(batch), step)
        inputs, targets = (tuple(part) if isinstance(part, list) else part for part in (inputs, targets))
        return tree_map(self._tensor, inputs), tree_map(self._tensor, targets)

    def _parts(self, batch: Any, step: int) -> Parted:
        if self.pairs is not None:
            try:
                return self.pairs.of(batch)
            except BadData as error:
                raise BadData(f"The batch of step {step}: {error.message}", hint=error.hint) from error
        if isinstance(batch, dict) and self.labels:
            label = next((name for name in self.labels if name in batch), None)
            inputs = {name: part for name, part in batch.items() if name != label}
            return (batch, ()) if label is None or not inputs else (inputs, batch[label])
        if isinstance(batch, dict):
            names = [repr(str(name)) for name in batch] or ["'input'"]
            raise BadData(
                f"The batch of step {step} is a dict of {', '.join(names[:8])}, not a pair (inputs, targets).",
                hint=f"Say which is which: mh.Pairs(data, {names[0]}, {names[-1]}).",
            )
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        if self.labels and not isinstance(batch, (tuple, list)):
            return batch, ()
        if self.labels and len(batch) == 1:
            return batch[0], ()
        what = f"has {len(batch)} parts" if isinstance(batch, (tuple, list)) else f"is a {type(batch).__name__}"
        raise BadData(
            f"The batch of step {step} {what}; a batch is a pair (inputs, targets).",
            hint="Say which parts: mh.Pairs(data, 0, 1)."
            if isinstance(batch, (tuple, list))
            else "Let it be a pair: yield inputs, targets.",
        )

    def _tensor(self, leaf: Any) -> Any:
        if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf":
            return torch.tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            # What came from a loader's worker lies in shared memory, of which there is little.
            is_copied = self.is_copied or leaf.is_shared()  # type: ignore[no-untyped-call]
            return leaf.detach().clone() if is_copied else leaf.detach()
        return leaf


def plain(batch: Any) -> Any:
    """Return a batch with plain dicts: a tokenizer's output is another kind of mapping."""
    if isinstance(batch, Mapping):
        return {key: plain(part) for key, part in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(plain(part) for part in batch)
    return batch


def form(part: Any) -> Any:
    """Return the shape of every tensor, in the structure of a batch."""
    return tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__, part)


def samples_in(inputs: Any, step: int) -> int:
    """Return how many samples a batch has."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise BadData(
        f"The inputs of the batch of step {step} have no tensor with an axis of samples: {str(form(inputs))[:200]}.",
        hint="A batch's tensors have the samples as their first axis.",
    )


class BatchSamples(Dataset[Any]):
    """The samples of one batch, by number: what a network is captured with, and compared."""

    def __init__(self, inputs: Any, targets: Any, step: int = 0) -> None:
        self.inputs, self.targets, self.count = inputs, targets, samples_in(inputs, step)
        for what, part in (("inputs", inputs), ("targets", targets)):
            for leaf in tree_leaves(part):
                if isinstance(leaf, torch.Tensor) and tuple(leaf.shape[:1]) == (self.count,):
                    continue
                shape = f"a tensor of {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)[:80]
                raise BadData(
                    f"The {what} of the batch of step {step} have {shape}; its first axis must be that of the "
                    f"{self.count} samples.",
                    hint="Leave out what is no tensor of samples: mh.Pairs(data, [names of the inputs], name of the "
                    "target), or a collate_fn that does.",
                )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return tree_map(lambda leaf: leaf[index], (self.inputs, self.targets))
