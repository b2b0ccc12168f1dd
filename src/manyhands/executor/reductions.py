"""Reductions of one device: all-gathers of statistics, waited for at once or later, and all-reduces of gradients.

Gradients are added up on a thread of their own while backward goes on (reducer.py); what this device saw of each sum is
recorded, together with the weights that the sum has led to, so that devices can be compared (`runtime.agreement`).
Where the run uses process groups of torch.distributed, both go through these (collectives.py) in place of messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from manyhands.executor.bound_calls import MOST_KEPT, Call
from manyhands.executor.collectives import Collectives
from manyhands.executor.device_boards import DeviceBoards
from manyhands.executor.diagnosis import NumberDiagnosis
from manyhands.executor.flat_row import in_memory_order
from manyhands.executor.gpu_peers import DESCRIPTOR_BYTES, GpuPeers
from manyhands.executor.gpu_projections import projected
from manyhands.executor.gpu_sums import GpuSums
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.log import Recorder
from manyhands.executor.process_groups import AllGather
from manyhands.executor.projections import SumRecord, numbers_in, projection, projection_and_norm
from manyhands.executor.reducer import Reducer, row_of
from manyhands.graph.weights import Weights, dense_gradient
from manyhands.schedule.actions import Await, Reduce
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import Hop, completed_at, row_order, statistics_rounds, topic
from manyhands.transport.endpoint import Endpoint

WEIGHT_NORM_ROUNDS = 64
"""Rounds after which the norm of weights is formed anew."""
_SumKey = tuple[int, int, int, int, str]


class _Rounds(NamedTuple):
    """A device's part of an all-gather."""

    hops: tuple[tuple[tuple[Hop, str], ...], ...]
    """Its hops round by round, with the topic of each."""
    targets: tuple[tuple[str, str], ...]
    """Those to which its own row goes first, with the topic of each."""


class Reductions:
    """Carries out a device's reductions."""

    def __init__(
        self,
        endpoint: Endpoint,
        schedule: Schedule,
        weights: Weights,
        in_flight: InFlightMicroBatches,
        diagnosis: NumberDiagnosis,
        recorder: Recorder,
        gpu_peers: GpuPeers,
        boards: DeviceBoards,
        collectives: Collectives | None = None,
    ) -> None:
        """`collectives`: what carries out reductions in place of messages; None: all are messages."""
        self.endpoint, self.weights, self.recorder, self.collectives = endpoint, weights, recorder, collectives
        self.in_flight, self.runners, self.diagnosis = in_flight, in_flight.runners, diagnosis
        self.gpu_peers, self.boards = gpu_peers, boards
        gpu_sums = GpuSums(endpoint, schedule.network, gpu_peers)
        self.reducer = Reducer(endpoint, schedule.network, self._reduced, collectives, gpu_sums, boards)
        self._completed = {
            stage: completed_at(schedule.network, runner.geometry.first, runner.geometry.last, schedule.lowering.tied)
            for stage, runner in self.runners.items()
        }
        self._keeps_messages = schedule.keeps_messages
        self._rounds: dict[int, _Rounds] = {}
        """This device's hops of all-gathers with their topics, by the action's identity: the schedule keeps it."""
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Bytes of boards -> the row in them, by the identity of the bytes."""
        self._summed: dict[_SumKey, list[str]] = {}
        """The weights of each sum of gradients, by its record's key."""
        self._weight_norms: dict[_SumKey, tuple[float | None, float, int]] = {}
        """The projection of those weights when their norm was last formed, the norm, and rounds since then."""

    def bind(self, reduce: Reduce) -> Call:
        """Return the call that begins a reduction; statistics are also waited for, unless the action puts that off."""
        return self._bind_statistics(reduce) if reduce.what == "statistics" else self._bind_sum(reduce)

    @property
    def group_sums(self) -> dict[str, int]:
        """Process group -> the reductions that have gone through it."""
        return dict(self.collectives.counts) if self.collectives is not None else {}

    def close(self) -> None:
        """End what is under way; it may belong to process groups that wait for other devices."""
        if self.collectives is not None:
            self.collectives.close()
        self.reducer.close()

    # Statistics

    def _bind_statistics(self, reduce: Reduce) -> Call:
        in_flight, runner = self.in_flight, self.runners[reduce.stage]
        stage, number, key = reduce.stage, reduce.micro_batch, reduce.key

        def call() -> None:
            in_flight.begin_pass(stage, number)
            batch = in_flight.fed(number)
            row = runner.local_statistics(reduce, in_flight.context(stage, number))
            gathering = self._begin(reduce, row)
            if reduce.later:
                batch.pending_statistics[key] = (reduce, row, gathering)
            else:
                runner.take_gathered(reduce, self._gathered(reduce, row, gathering))

        return call

    def gather(self, reduce: Reduce, row: torch.Tensor) -> list[torch.Tensor]:
        """Give this device's row, wait for the others', and return all, in the order of the devices."""
        return self._gathered(reduce, row, self._begin(reduce, row))

    def _give(self, reduce: Reduce, row: torch.Tensor) -> None:
        """Send this device's row, as far as it does not travel with those of others."""
        targets: Sequence[tuple[str, str]] = self._rounds_of(reduce).targets
        if not self.gpu_peers.takes(reduce):
            row = self._as_sent(reduce, row)
            targets = self.boards.put_row(targets, row)
        for to, name in targets:
            self.endpoint.send(to, self.in_flight.step, name, [self._as_sent(reduce, row)], urgent=True)

    def _send_rows(self, to: str, name: str, rows: Sequence[torch.Tensor]) -> None:
        if not self.boards.put(to, name, [row.reshape(-1).view(torch.uint8) for row in rows]):
            self.endpoint.send(to, self.in_flight.step, name, rows, urgent=True)

    def _as_sent(self, reduce: Reduce, row: torch.Tensor) -> torch.Tensor:
        """Return a row as it travels."""
        if self.gpu_peers.takes(reduce):
            return self.gpu_peers.described(row)
        return row if row.is_cpu else row.cpu()

    def row_bytes(self, reduce: Reduce) -> int:
        """Return the bytes of a message for each row in it; 0: as many as the row has."""
        return DESCRIPTOR_BYTES if self.gpu_peers.takes(reduce) else 0

    def finish_statistics(self, action: Await) -> None:
        """Wait for the others' rows of an all-gather that was begun before."""
        reduce, row, gathering = self.in_flight[action.micro_batch].pending_statistics.pop(action.key)
        self.runners[reduce.stage].take_gathered(reduce, self._gathered(reduce, row, gathering))

    def _begin(self, reduce: Reduce, row: torch.Tensor) -> AllGather | None:
        """Give this device's row to the others; None where messages carry it."""
        step = self.in_flight.step
        if self.collectives is not None and self.collectives.takes(reduce, step):
            return self.collectives.begin_gather(reduce, step, row)
        self._give(reduce, row)
        return None

    def _gathered(self, reduce: Reduce, row: torch.Tensor, gathering: AllGather | None) -> list[torch.Tensor]:
        """Return all devices' rows, in the order of the devices."""
        start = time.monotonic()
        rows = self._received(reduce, row) if gathering is None else self._of_group(reduce, row, gathering)
        if self.collectives is not None:
            self.collectives.took(reduce, self.in_flight.step, time.monotonic() - start)
        if reduce.what == "statistics":  # of gradients, the norm is the sum of all: it says nothing of its source
            self.diagnosis.watch_rows(dict(zip(reduce.devices, rows)))
        return rows

    def _of_group(self, reduce: Reduce, row: torch.Tensor, gathering: AllGather) -> list[torch.Tensor]:
        return [other.to(row.device) for other in gathering.finish(row.dtype)]

    def _received(self, reduce: Reduce, row: torch.Tensor) -> list[torch.Tensor]:
        """Return all devices' rows, in the order of the devices, and hand on those that others get from here."""
        device, order = self.endpoint.name, row_order(reduce.devices, reduce.places)
        rows = {device: row}
        for number, hops in enumerate(self._rounds_of(reduce).hops):
            for hop, name in hops if number else ():
                if hop.source == device:
                    handed_on = [self._as_sent(reduce, rows[each]) for each in order[hop.first : hop.last]]
                    self._send_rows(hop.target, name, handed_on)
            for hop, name in hops:
                if hop.target == device:
                    rows |= self._take_rows(reduce, order[hop.first : hop.last], hop.source, name, row)
        return [rows[name] for name in reduce.devices]

    def _take_rows(
        self, reduce: Reduce, names: Sequence[str], source: str, topic_name: str, like: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Wait for the rows of these devices, which one message brings."""
        if self.boards.has_place(source, topic_name):
            bytes_of_rows = self.boards.take(source, self.in_flight.step, topic_name)
            return {name: self._row_in(memory, like) for name, memory in zip(names, bytes_of_rows)}
        came = self.endpoint.mailbox.take(source, self.in_flight.step, topic_name)
        if self.gpu_peers.takes(reduce):
            starts = range(0, len(came), DESCRIPTOR_BYTES)
            pieces = [came[start : start + DESCRIPTOR_BYTES] for start in starts]
            opened = [self.gpu_peers.opened(piece, like.shape, like.dtype) for piece in pieces]
            return dict(zip(names, opened, strict=True))
        empty = torch.empty(0, dtype=like.dtype)
        others = (torch.frombuffer(came, dtype=like.dtype) if came else empty).view(len(names), -1)
        rows = [other.view_as(like) for other in others]
        return dict(zip(names, rows if like.is_cpu else [row.to(like.device) for row in rows]))

    def _row_in(self, memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a row that lies in some bytes. Places on boards are the same in every other round."""
        entry = self._rows.get(id(memory))
        if entry is None or entry[0] is not memory or entry[1].dtype != like.dtype or entry[1].shape != like.shape:
            if len(self._rows) >= MOST_KEPT:
                self._rows.clear()
            entry = self._rows[id(memory)] = memory, memory.view(like.dtype).view_as(like)
        return entry[1]

    def _rounds_of(self, reduce: Reduce) -> _Rounds:
        """Return this device's hops, with the topic of each, round by round."""
        rounds = self._rounds.get(id(reduce))
        if rounds is None:
            device = self.endpoint.name
            hops = tuple(
                tuple((hop, topic(reduce, number, hop.first)) for hop in hops if device in (hop.source, hop.target))
                for number, hops in enumerate(statistics_rounds(reduce.devices, reduce.places))
            )
            rounds = _Rounds(hops, tuple((hop.target, name) for hop, name in hops[0] if hop.source == device))
            if self._keeps_messages:
                self._rounds[id(reduce)] = rounds
        return rounds

    # Gradients

    def _bind_sum(self, reduce: Reduce) -> Call:
        names = list(reduce.weights)
        if not names:
            completed = self._completed[reduce.stage]
            names = [name for op in range(reduce.last - 1, reduce.first - 1, -1) for name in completed.get(op, ())]
        tied = names[0] if reduce.weights else ""
        self._summed[reduce.stage, reduce.first, reduce.last, reduce.micro_batch, tied] = names

        def call() -> None:
            gradients = [dense_gradient(self.weights.tensors[name]) for name in names]
            self.reducer.start(reduce, self.in_flight.step, gradients)

        return call

    def _reduced(self, reduce: Reduce, start: float, end: float) -> None:
        self.recorder.span(reduce, str(reduce), start, end)

    def wait(self) -> None:
        """Wait until all gradients that were handed over have been summed."""
        self.reducer.wait()

    def take_records(self) -> list[SumRecord]:
        """Return this device's records of the sums since the last call, with the weights as they are now."""
        return [self._with_weights(record) for record in self.reducer.take_records()]

    def _with_weights(self, record: SumRecord) -> SumRecord:
        """Return the record of a sum with the projection and the norm of the weights that it led to. Their norm changes
        slowly: it is formed anew after some rounds, or when the weights have moved far."""
        weights = [self.weights.tensors[name].detach() for name in self._summed[record.key]]
        if record.tied:
            weights = [weight.contiguous() for weight in weights]
        if weights and weights[0].is_cuda:
            ((now, norm),) = projected([[in_memory_order(weight) for weight in weights]])
            return msgspec.structs.replace(record, weights=now, weights_norm=norm)
        rows = [numbers_in(row_of(weight), weight.dtype) for weight in weights]
        now = projection(rows)
        before, norm, rounds = self._weight_norms.get(record.key, (None, 0.0, 0))
        if now is None or before is None or rounds == WEIGHT_NORM_ROUNDS or abs(now - before) > norm / 4:
            now, norm = projection_and_norm(rows)
            before, rounds = now, 0
        self._weight_norms[record.key] = (before, norm, rounds + 1)
        return msgspec.structs.replace(record, weights=now, weights_norm=norm)
