"""The sum of weight gradients, formed on a thread of its own, bucket by bucket, while backward goes on.

Each chunk is sent straight from the gradients' memory and the sum comes back into it; the others' chunks are added to
the one that this device sums itself from where they came to: on a board (device_boards.py), or in the mailbox. `wait`
releases the gradients' memory: an optimiser may write into it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
import torch

from manyhands.executor.bound_calls import MOST_KEPT
from manyhands.executor.collectives import Collectives
from manyhands.executor.device_boards import DeviceBoards
from manyhands.executor.gpu_sums import GpuSums
from manyhands.executor.host_staging import HostStaging, ready_event
from manyhands.executor.projections import Numbers, SumRecord, numbers_in, projection, projection_and_norm
from manyhands.facts.errors import TimedOut
from manyhands.facts.network import Network
from manyhands.graph.weights import memory_order
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import Hop, chunk_points, element_bytes, gradient_rounds, topic
from manyhands.transport.endpoint import Endpoint
from manyhands.transport.memory import KNOWN_TO_NUMPY, as_bytes, window

_Rounds = tuple[tuple[tuple[Hop, str], ...], ...]
OnSpan = Callable[[Reduce, float, float], None]


def row_of(tensor: torch.Tensor) -> memoryview:
    """Return a dense tensor's memory as one row, in the order in which it lies."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(memory_order(tensor))
    return as_bytes(tensor)


class _Bucket(NamedTuple):
    """Gradients to be added up."""

    reduce: Reduce
    step: int
    gradients: list[torch.Tensor]
    ready: torch.cuda.Event | None
    """When a GPU has them; None: they are there."""


class Reducer:
    """Adds up gradients among the devices of a stage, in the order they are handed over."""

    def __init__(
        self,
        endpoint: Endpoint,
        network: Network,
        on_span: OnSpan,
        collectives: Collectives | None = None,
        gpu_sums: GpuSums | None = None,
        boards: DeviceBoards | None = None,
    ) -> None:
        """`collectives`: what forms some of the sums, or all, in place of messages; None: it forms none. `gpu_sums`:
        what forms those among workers on one GPU. `boards`: those that messages go by where they can."""
        self.endpoint, self.network, self.on_span, self.collectives = endpoint, network, on_span, collectives
        self._gpu_sums, self._boards = gpu_sums, boards
        self._rounds: dict[Reduce, _Rounds] = {}
        self._staging = HostStaging()
        self.host_bytes = 0
        """Bytes of a GPU's gradients that went through the machine's memory."""
        self._work: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._open = 0
        self._records: list[SumRecord] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reducer", daemon=True)
        self._thread.start()

    def start(self, reduce: Reduce, step: int, gradients: list[torch.Tensor]) -> None:
        """Hand over a bucket; the gradients are the sum once `wait` has returned."""
        with self._change:
            self._open += 1
        self._work.put(_Bucket(reduce, step, gradients, ready_event(gradients)))

    def wait(self) -> None:
        """Wait until every bucket handed over is added up. The mailbox limits each wait inside; this limit is a little
        longer."""
        limit = self.endpoint.mailbox.limit_seconds + 10
        with self._change, self.endpoint.mailbox.waiting():
            while self._open and self._error is None:
                before = (self._open, self._moved())
                if not self._change.wait(limit) and (self._open, self._moved()) == before:
                    raise TimedOut(f"Gradients have not been added up any further for {limit:g} s.")
            if self._error is not None:
                raise self._error
        self.endpoint.release()

    def take_records(self) -> list[SumRecord]:
        """Return this device's records of the sums since the last call; to be called after `wait`."""
        records, self._records = self._records, []
        return records

    def _moved(self) -> int:
        return sum(self.endpoint.mailbox.received_bytes.values())

    def close(self) -> None:
        """End the thread; a reduction under way ends with the mailbox's interruption."""
        self._work.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                if self._error is None:
                    start = time.monotonic()
                    self._reduce(item)
                    self.on_span(item.reduce, start, time.monotonic())
            except Exception as error:  # whatever it is, `wait` raises it instead of waiting for a dead thread
                self._error = error
            with self._change:
                self._open -= 1
                self._change.notify_all()

    def _reduce(self, bucket: _Bucket) -> None:
        collectives, reduce, step = self.collectives, bucket.reduce, bucket.step
        takes_it = collectives is not None and collectives.takes(reduce, step)
        start = time.monotonic()
        if collectives is not None and takes_it:
            self._records.append(collectives.sum(reduce, self.network, step, bucket.gradients))
        elif self._gpu_sums is not None and self._gpu_sums.takes(reduce):
            self._records.append(self._gpu_sums.sum(reduce, step, bucket.gradients))
        else:
            self._records.append(self._sum_by_messages(bucket))
        if collectives is not None:
            collectives.took(reduce, step, time.monotonic() - start)

    def _sum_by_messages(self, bucket: _Bucket) -> SumRecord:
        reduce, step, gradients = bucket.reduce, bucket.step, bucket.gradients
        key = (reduce.stage, reduce.first, reduce.last, reduce.weights)
        on_host = self._staging.staged(key, gradients, bucket.ready)
        staged = on_host
        if bucket.ready is not None:
            self.host_bytes += sum(gradient.nbytes for gradient in gradients)
        if reduce.weights:  # stages may lay out their copies of a weight differently
            staged = [gradient.contiguous() for gradient in staged]
        rows = [row_of(tensor) for tensor in staged]
        points, size = chunk_points(reduce, self.network), element_bytes(reduce, self.network)
        chunks = [window(rows, size * first, size * (last - first)) for first, last in pairwise(points)]
        dtype = staged[0].dtype
        before = [projection_and_norm(_as_numbers(chunk, dtype)) for chunk in chunks]
        received, sums, after = self._exchange(reduce, step, chunks, dtype)
        for gradient, copy in zip(on_host, staged):
            if gradient is not copy:
                gradient.copy_(copy)
        self._staging.give_back(gradients, on_host)
        return SumRecord(
            reduce.stage, reduce.first, reduce.last, reduce.micro_batch, tuple(total for total, _ in before),
            tuple(norm for _, norm in before), tuple(received), tuple(sums),
            tuple(after[chunk] for chunk in range(len(chunks))), tied=reduce.weights[0] if reduce.weights else "",
        )  # fmt: skip

    def _exchange(
        self, reduce: Reduce, step: int, chunks: list[list[memoryview]], dtype: torch.dtype
    ) -> tuple[list[float | None], list[float | None], dict[int, float | None]]:
        """Add up some chunks among the devices; return the projections of what was received, of the sums that were
        formed here, and of each chunk afterwards."""
        device, rounds = self.endpoint.name, self._rounds_of(reduce)
        received, sums, after = list[float | None](), list[float | None](), dict[int, float | None]()

        def memory(hop: Hop) -> list[memoryview]:
            return [part for chunk in chunks[hop.first : hop.last] for part in chunk]

        for hop, name in (pair for pairs in rounds for pair in pairs):
            # no sum comes before this device's part of it has arrived there
            if hop.target == device and not hop.adds:
                self.endpoint.mailbox.post(hop.source, step, name, memory(hop))
        for pairs in rounds:
            added: dict[int, None] = {}
            for hop, name in pairs:
                if hop.source == device:
                    self._send(hop, step, name, memory(hop))
            for hop, name in pairs:  # added in the order of the hops, not of arrival: the same bits in every run
                if hop.source == device:
                    continue
                if not hop.adds:
                    self._store(hop, step, name, memory(hop))
                    for chunk in range(hop.first, hop.last):
                        after[chunk] = projection(_as_numbers(chunks[chunk], dtype))
                    continue
                came = self._take(hop, step, name)
                for chunk in range(hop.first, hop.last):
                    part = _split(came, chunks[chunk])
                    came = came[sum(map(len, part)) :]
                    received.append(projection(_as_numbers(part, dtype)))
                    _add(chunks[chunk], part, dtype)
                    added[chunk] = None
            for chunk in added:
                after[chunk] = projection(_as_numbers(chunks[chunk], dtype))
                sums.append(after[chunk])
        return received, sums, after

    def _rounds_of(self, reduce: Reduce) -> _Rounds:
        """Return this device's hops, with the topic of each, round by round."""
        rounds = self._rounds.get(reduce)
        if rounds is None:
            if len(self._rounds) >= MOST_KEPT:
                self._rounds.clear()
            device = self.endpoint.name
            rounds = self._rounds[reduce] = tuple(
                tuple((hop, topic(reduce, number, hop.first)) for hop in hops if device in (hop.source, hop.target))
                for number, hops in enumerate(gradient_rounds(reduce.devices, reduce.places))
            )
        return rounds

    def _send(self, hop: Hop, step: int, name: str, pieces: list[memoryview]) -> None:
        if self._boards is None or not self._boards.put_bytes(hop.target, name, pieces):
            self.endpoint.send(hop.target, step, name, pieces)

    def _store(self, hop: Hop, step: int, name: str, pieces: list[memoryview]) -> None:
        """Wait for a message and write it to some pieces."""
        if self._boards is not None and self._boards.has_place(hop.source, name):
            self._boards.store(hop.source, step, name, pieces, is_bulk=True)
        else:
            self.endpoint.mailbox.receive(hop.source, step, name, pieces)

    def _take(self, hop: Hop, step: int, name: str) -> memoryview:
        """Wait for a message and return its bytes, where they are until the round ends."""
        if self._boards is not None and self._boards.has_place(hop.source, name):
            return self._boards.take_bytes(hop.source, step, name)
        return self.endpoint.mailbox.take(hop.source, step, name)


def _numbers(memory: memoryview, dtype: torch.dtype) -> Any:
    """Return memory as numbers for numpy, which adds on one thread; as a tensor where numpy does not know their type.

    torch would start a second set of threads for this one, and the two would fight for the cores that compute.
    """
    if dtype in KNOWN_TO_NUMPY:
        return numpy.frombuffer(memory, str(dtype).removeprefix("torch."))
    return torch.frombuffer(memory, dtype=dtype)


def _as_numbers(parts: list[memoryview], dtype: torch.dtype) -> list[Numbers]:
    return [numbers_in(part, dtype) for part in parts]


def _split(came: memoryview, parts: list[memoryview]) -> list[memoryview]:
    """Return what arrived for a chunk, cut where the chunk's own memory is cut."""
    pieces, place = [], 0
    for part in parts:
        pieces.append(came[place : place + len(part)])
        place += len(part)
    return pieces


def _add(parts: list[memoryview], came: list[memoryview], dtype: torch.dtype) -> None:
    for part, more in zip(parts, came):
        target = _numbers(part, dtype)
        target += _numbers(more, dtype)
