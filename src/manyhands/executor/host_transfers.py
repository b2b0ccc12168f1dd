"""Features and gradients of a GPU on their way to and from devices elsewhere, while it goes on computing.

    sender      a copy on the GPU ──▶ pinned memory ──▶ link         copied on a stream of their own; a thread waits for
                                                                     the copy and hands the message over
    receiver    link ──▶ pinned memory ──▶ GPU                       on another stream, which computing waits for

Without this Python waits for all that the GPU was given before it can give it more: a pipeline's next micro-batch.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from manyhands.facts.errors import TimedOut
from manyhands.transport.endpoint import Endpoint

_CLOSE_SECONDS = 5.0
Watch = Callable[[Sequence[torch.Tensor]], None]
"""Looks at tensors that may hold numbers that are not finite."""


class _Leaving(NamedTuple):
    """A message on its way out of a GPU."""

    to: str
    step: int
    topic: str
    tensors: list[torch.Tensor]
    """In pinned memory, once `copied` has happened."""
    totals: list[torch.Tensor]
    """The sum of each tensor of floating-point numbers: not finite if one of them is not."""
    copied: torch.cuda.Event


class HostTransfers:
    """Copies tensors between one GPU and the machine's memory, and sends them, beside what the GPU computes."""

    def __init__(self, endpoint: Endpoint, torch_device: torch.device, watch: Watch) -> None:
        """`watch`: is shown what leaves if its numbers may not all be finite."""
        self.endpoint, self.torch_device, self._watch = endpoint, torch_device, watch
        self._outgoing = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._incoming = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._work: queue.SimpleQueue[_Leaving | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def send(self, to: str, step: int, topic: str, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors when the GPU has computed and copied them; they may be written to meanwhile."""
        if self._error is not None:
            raise self._error
        snapshots = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        sums = [tensor.sum() for tensor in snapshots if tensor.is_floating_point()]
        self._outgoing.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._outgoing):
            staged = [self._on_host(tensor) for tensor in snapshots]
            totals = [self._on_host(total) for total in sums]
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._outgoing)
        with self._change:
            self._open += 1
        self._work.put(_Leaving(to, step, topic, staged, totals, copied))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host transfers", daemon=True)
            self._thread.start()

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        staged.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._outgoing)
        return staged

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a tensor that is to arrive."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def on_gpu(self, arrived: torch.Tensor) -> torch.Tensor:
        """Return a tensor that has arrived in pinned memory, on the GPU: what is computed from now on waits for it."""
        compute = torch.cuda.current_stream(self.torch_device)
        with torch.cuda.stream(self._incoming):
            tensor = arrived.to(self.torch_device, non_blocking=True)
        tensor.record_stream(compute)
        compute.wait_stream(self._incoming)
        return tensor

    def wait(self) -> None:
        """Wait until all that was to be sent has been handed over."""
        limit = self.endpoint.mailbox.limit_seconds + 10
        with self._change:
            while self._open and self._error is None:
                before = self._open
                if not self._change.wait(limit) and self._open == before:
                    raise TimedOut(f"A GPU has not copied what is to be sent for {limit:g} s.")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                if self._error is None:
                    self._hand_over(item)
            except Exception as error:  # whatever it is, the next `send` or `wait` raises it
                self._error = error
            with self._change:
                self._open -= 1
                self._change.notify_all()

    def _hand_over(self, item: _Leaving) -> None:
        item.copied.synchronize()
        self.endpoint.mailbox.check()
        if not all(math.isfinite(float(total)) for total in item.totals):
            self._watch(item.tensors)
        self.endpoint.send(item.to, item.step, item.topic, item.tensors, urgent=True)
