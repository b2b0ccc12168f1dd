"""Peak tensor bytes of a computation, counted and not estimated.

Every operator's results are recorded as they are made (TorchDispatchMode); each storage is counted once, until it is
freed. Memory that a kernel allocates and frees inside one call (im2col, oneDNN's scratch pad) is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a key that identifies a tensor's memory, and its bytes; oneDNN does not show its own storage, which may be
    a bit more than the numbers in it."""
    if tensor.is_mkldnn:
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes: `with PeakBytes(weights) as peak: ...; peak.most_bytes`. `held` are tensors alive from the start.

    `on_most` is called whenever more is held than ever before.
    """

    def __init__(self, held: Iterable[torch.Tensor] = (), on_most: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_most: Callable[[], None] | None = None
        self.bytes = 0
        self.most_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in held:
            self._see(tensor)
        self.on_most = on_most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return results

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        address, size = storage_of(tensor)
        if address in self._alive:
            return

        def died(_: object) -> None:
            if self._alive.pop(address, None) is not None:
                self.bytes -= size

        self._alive[address] = weakref.ref(storage, died)
        self.bytes += size
        if self.bytes > self.most_bytes:
            self.most_bytes = self.bytes
            if self.on_most is not None:
                self.on_most()
