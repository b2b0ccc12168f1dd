"""Weight gradients are added up on a thread of their own, bucket by bucket, while backward goes on.

Each chunk is sent straight from the gradients' memory and the sum comes back into it; to the chunk that this
device sums itself the others' are added from where the mailbox has them. `wait` lets go of the gradients' memory: an
optimiser may write into it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from manyhands.engine.endpoint import Endpoint
from manyhands.facts.errors import TimedOut
from manyhands.facts.network import Network
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import chunk_points, gradient_rounds, topic

OnSpan = Callable[[Reduce, float, float], None]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one row, in the order it lies in."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda axis: tensor.stride(axis), reverse=True)
    return tensor.permute(order).view(-1)


def windows(rows: Sequence[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
    """Numbers [first, last) of some rows laid end to end."""
    found = []
    for row in rows:
        a, b = max(0, first), min(row.numel(), last)
        if a < b:
            found.append(row[a:b])
        first, last = first - row.numel(), last - row.numel()
    return found


def dense_gradient(weight: torch.Tensor) -> torch.Tensor:
    """A weight's gradient lying in memory like the weight itself, as everywhere; zero where none was computed."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    elif weight.grad.stride() != weight.stride():
        weight.grad = torch.empty_like(weight).copy_(weight.grad)
    return weight.grad


class Reducer:
    """Adds up gradients among the devices of a stage, in the order they are handed over."""

    def __init__(self, endpoint: Endpoint, network: Network, on_span: OnSpan) -> None:
        self.endpoint, self.network, self.on_span = endpoint, network, on_span
        self._work: queue.SimpleQueue[tuple[Reduce, int, list[torch.Tensor]] | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reducer", daemon=True)
        self._thread.start()

    def start(self, reduce: Reduce, step: int, gradients: list[torch.Tensor]) -> None:
        """Hand over a bucket; the gradients are the sum once `wait` has returned."""
        with self._change:
            self._open += 1
        self._work.put((reduce, step, gradients))

    def wait(self) -> None:
        """Until every bucket handed over is added up. The mailbox limits each wait inside; this adds a little."""
        limit = self.endpoint.mailbox.limit_seconds + 10
        with self._change:
            while self._open and self._error is None:
                before = (self._open, self._moved())
                if not self._change.wait(limit) and (self._open, self._moved()) == before:
                    raise TimedOut(f"Gradients have not been added up any further for {limit:g} s.")
            if self._error is not None:
                raise self._error
        self.endpoint.release()

    def _moved(self) -> int:
        return sum(self.endpoint.mailbox.received_bytes.values())

    def close(self) -> None:
        """End the thread; a reduction under way ends with the mailbox's interruption."""
        self._work.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            reduce, step, gradients = item
            try:
                if self._error is None:
                    start = time.monotonic()
                    self._reduce(reduce, step, gradients)
                    self.on_span(reduce, start, time.monotonic())
            except Exception as error:  # whatever it is, `wait` tells it: a thread that died would be waited for
                self._error = error
            with self._change:
                self._open -= 1
                self._change.notify_all()

    def _reduce(self, reduce: Reduce, step: int, gradients: list[torch.Tensor]) -> None:
        rows = [flat(gradient) for gradient in gradients]
        staged = [row.cpu() for row in rows]  # the same memory, unless the gradients lie on another device
        points = chunk_points(reduce, self.network)
        chunks = [windows(staged, points[i], points[i + 1]) for i in range(len(reduce.devices))]
        rounds = [
            [(hop, topic(reduce, number, hop.chunk)) for hop in hops]
            for number, hops in enumerate(gradient_rounds(reduce.devices))
        ]
        box, own = self.endpoint.mailbox, self.endpoint.name
        for hop, name in (pair for pairs in rounds for pair in pairs):
            if hop.target == own and not hop.adds:  # no sum comes before this device's part of it has arrived there
                box.post(hop.source, step, name, chunks[hop.chunk])
        for pairs in rounds:
            for hop, name in pairs:
                if hop.source == own:
                    self.endpoint.send(hop.target, step, name, chunks[hop.chunk])
            for hop, name in pairs:  # added in the order of the hops, whoever is first: the same bits in every run
                if hop.target == own and hop.adds:
                    _add(chunks[hop.chunk], box.take(hop.source, step, name))
                elif hop.target == own:
                    box.receive(hop.source, step, name, chunks[hop.chunk])
        for row, copy in zip(rows, staged):
            if row.data_ptr() != copy.data_ptr():
                row.copy_(copy)


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory for numpy, which adds on one thread.

    torch would start a second set of threads for this one, and the two would fight for the cores that compute.
    """
    return tensor if tensor.dtype == torch.bfloat16 else tensor.detach().numpy()


def _add(parts: list[torch.Tensor], came: memoryview) -> None:
    if not parts:
        return
    place, row = 0, _array(torch.frombuffer(came, dtype=parts[0].dtype))
    for part in parts:
        target = _array(part)
        target += row[place : place + part.numel()]
        place += part.numel()
