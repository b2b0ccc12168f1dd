"""Memory for batches that is used again, once nobody has the batch that was in it.

The system zeroes fresh memory page by page when it is first written to, which takes longer than the copying: a batch of
64 pictures of 224x224 numbers is 38 MB, or 9,400 pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

LEAST_BYTES = 2**20
"""Batches from this size on have memory of this kind; smaller ones fit into what is at hand anyway."""
MOST_BUFFERS = 32
_Kind = tuple[tuple[int, ...], torch.dtype]


class BatchMemory:
    """Stacks samples into memory that was a batch's before. For one thread."""

    def __init__(self) -> None:
        self._buffers: dict[_Kind, list[_Buffer]] = {}

    def stack(self, samples: Sequence[Any]) -> torch.Tensor | None:
        """Return samples as one tensor, or None where they are not large dense tensors alike."""
        first = samples[0]
        if type(first) is not torch.Tensor or first.nbytes * len(samples) < LEAST_BYTES:
            return None
        if not all(type(sample) is torch.Tensor and _is_plain(sample, first) for sample in samples):
            return None
        batch = self._room((len(samples), *first.shape), first.dtype)
        return torch.stack(list(samples), out=batch) if batch is not None else None

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        buffers = self._buffers.setdefault((shape, dtype), [])
        for buffer in buffers:
            if buffer.is_free:
                return buffer.tensor.detach()
        if sum(map(len, self._buffers.values())) >= MOST_BUFFERS:
            return None
        buffers.append(_Buffer(torch.empty(shape, dtype=dtype)))
        return buffers[-1].tensor.detach()


class _Buffer:
    """A tensor whose memory is lent, as other tensors over it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self._own_uses = self._uses

    @property
    def _uses(self) -> int:
        """The tensors, and arrays over tensors, that have the memory: PyTorch counts them."""
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    @property
    def is_free(self) -> bool:
        return self._uses == self._own_uses


def _is_plain(sample: torch.Tensor, first: torch.Tensor) -> bool:
    is_alike = sample.shape == first.shape and sample.dtype == first.dtype
    return is_alike and sample.is_cpu and sample.layout == torch.strided and not sample.requires_grad
