"""Weight gradients are added up on a thread of their own, bucket by bucket, while backward goes on.

Each chunk is sent straight from the gradients' memory and the sum comes back into it; only the chunk this device adds
up itself passes through a buffer.
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
from manyhands.schedule.reduction import Hop, chunk_points, gradient_rounds, topic

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
        sums: dict[int, torch.Tensor] = {}
        for number, hops in enumerate(gradient_rounds(reduce.devices)):
            self._round(reduce, step, number, hops, chunks, sums)
        for row, copy in zip(rows, staged):
            if row.data_ptr() != copy.data_ptr():
                row.copy_(copy)

    def _round(
        self,
        reduce: Reduce,
        step: int,
        number: int,
        hops: tuple[Hop, ...],
        chunks: list[list[torch.Tensor]],
        sums: dict[int, torch.Tensor],
    ) -> None:
        own, box = self.endpoint.name, self.endpoint.mailbox
        dtype = next(part.dtype for parts in chunks for part in parts)
        into: dict[Hop, list[torch.Tensor]] = {}
        for hop in hops:
            if hop.target == own:
                into[hop] = chunks[hop.chunk]
                if hop.adds:
                    size = sum(part.numel() for part in chunks[hop.chunk])
                    into[hop] = [torch.empty(size, dtype=dtype)]
                box.post(hop.source, step, topic(reduce, number, hop.chunk), into[hop])
        for hop in hops:
            if hop.source == own:
                parts = chunks[hop.chunk]
                if not hop.adds and parts:
                    # A sum is sent from memory of its own: an optimiser may write into gradients before it has left.
                    if hop.chunk not in sums:
                        sums[hop.chunk] = _copied(parts)
                    parts = [sums[hop.chunk]]
                self.endpoint.send(hop.target, step, topic(reduce, number, hop.chunk), parts)
        for hop, parts in into.items():
            box.receive(hop.source, step, topic(reduce, number, hop.chunk), parts)
            sums.pop(hop.chunk, None)  # in a ring this device had a part of it
        added = {hop.source: parts[0] for hop, parts in into.items() if hop.adds}
        if added:
            chunk = next(hop.chunk for hop in into if hop.adds)
            terms = [added.get(name, chunks[chunk] if name == own else None) for name in reduce.devices]
            sums[chunk] = _sum(terms)
            _put(chunks[chunk], sums[chunk])


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory for numpy, which adds and copies on one thread.

    torch would start a second set of threads for this one, and the two would fight for the cores that compute.
    """
    return tensor if tensor.dtype == torch.bfloat16 else tensor.detach().numpy()


def _copied(parts: list[torch.Tensor]) -> torch.Tensor:
    row = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)
    place, target = 0, _array(row)
    for part in parts:
        target[place : place + part.numel()] = _array(part)
        place += part.numel()
    return row


def _sum(terms: Sequence[torch.Tensor | list[torch.Tensor] | None]) -> torch.Tensor:
    """Terms added in their order, into the first that was received; this device's own comes in pieces."""
    given = [term for term in terms if term is not None]
    total = next(term for term in given if isinstance(term, torch.Tensor))
    if isinstance(given[0], list):  # a + b is b + a to the last bit
        given[0], given[1] = given[1], given[0]
    array = _array(total)
    for term in given[1:]:
        if isinstance(term, torch.Tensor):
            array += _array(term)
        else:
            place = 0
            for part in term:
                array[place : place + part.numel()] += _array(part)
                place += part.numel()
    return total


def _put(parts: list[torch.Tensor], row: torch.Tensor) -> None:
    place, array = 0, _array(row)
    for part in parts:
        _array(part)[:] = array[place : place + part.numel()]
        place += part.numel()
