"""Gradients of a GPU on their way to other machines: in pinned memory, copied on a stream of their own.

Copies begin when the gradients are there, not when the GPU has done everything that it was given meanwhile: backward
goes on while they travel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


class HostStaging:
    """Copies of gradients in the machine's memory, in the same places in every round. On a processor, the gradients."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._memory: dict[Hashable, list[torch.Tensor]] = {}

    def staged(
        self, key: Hashable, gradients: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> list[torch.Tensor]:
        """Return gradients in the machine's memory; `key` says which they are, `ready` when they will be there."""
        if ready is None:
            return list(gradients)
        memory = self._memory.get(key)
        if memory is None:
            memory = [torch.empty_like(gradient, device="cpu", pin_memory=True) for gradient in gradients]
            self._memory[key] = memory
        self._copy(memory, gradients, ready)
        return memory

    def give_back(self, gradients: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
        """Copy what was staged to where it came from."""
        if gradients and gradients[0] is not staged[0]:
            self._copy(gradients, staged, None)

    def _copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> None:
        device = targets[0].device if targets[0].is_cuda else sources[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def ready_event(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    """Return an event after everything that a GPU was given so far; None: the tensors are a processor's."""
    if not tensors or not tensors[0].is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensors[0].device))
    return event
