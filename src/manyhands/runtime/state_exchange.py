"""The exchange of weights and optimiser state between workers: sent and loaded at the start, copied against losses
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from manyhands.executor.averaging import divided
from manyhands.executor.executor import Executor
from manyhands.executor.messages import COORDINATOR
from manyhands.executor.resident_dataset import SAMPLES
from manyhands.facts.errors import WorkerLost
from manyhands.runtime import state
from manyhands.runtime.assignment import Assignment, Stopped
from manyhands.runtime.checksums import checksum, checksums
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import Corrupt, Hold, Holds, SendState, Start, State
from manyhands.runtime.control_parts import DeviceJob, TensorEntry
from manyhands.runtime.keeping import STATE, Keeping, topic
from manyhands.runtime.part_builder import listed
from manyhands.transport.endpoint import Endpoint


class StateExchange:
    """One worker's sending and receiving of state. The control thread calls it too."""

    def __init__(self, endpoint: Endpoint, keeping: Keeping, send: Callable[[Message], None]) -> None:
        """`send`: sends the coordinator a message."""
        self.endpoint, self._keeping, self._send = endpoint, keeping, send

    # At the start of a generation

    def give(self, assignment: Assignment, step: int) -> None:
        """Send others the tensors that they start with and this worker has."""
        copy = self._keeping.at(step)
        for peer, names in assignment.command.gives.items():
            self._check_kept(copy, names, step)
            self._send_tensors(peer, step, STATE, [copy[name] for name in names])

    def make_room_for_start(self, assignment: Assignment, executor: Executor) -> None:
        """Make room for the state that others send at the start, before it comes: it is not kept twice then. Weights
        that do not change arrive where the executor reads them, since they may be most of a device's memory."""
        job, constants = assignment.command.job, constants_of(executor)
        assert job is not None
        for source, names in job.sources.items():
            if source == self.endpoint.name:
                continue
            wanted = listed(job, names)
            tensors = {
                entry.name: executor.weights.tensors[weight]
                for entry in wanted
                if (weight := state.weight_of(entry.name)) in constants
                and is_receivable(executor.weights.tensors[weight], entry)
            }
            tensors |= state.empty(entry for entry in wanted if entry.name not in tensors)
            assignment.arriving[source] = {entry.name: tensors[entry.name] for entry in wanted}
            parts = list(assignment.arriving[source].values())
            self.endpoint.mailbox.post(source, job.steps_done, STATE, parts)

    def load(self, assignment: Assignment, executor: Executor, command: Start) -> None:
        """Load weights and the optimiser's state, from here and from others; they are a copy to come back to, too."""
        job, step = assignment.command.job, command.first_step
        assert job is not None
        tensors = self._received(assignment, job, step)
        self._check_sums(assignment.generation, job, tensors)
        with torch.no_grad():
            for name, tensor in state.of(state.WEIGHT, tensors).items():
                if not _is_same_memory(executor.weights.tensors[name], tensor):
                    executor.weights.tensors[name].copy_(tensor)
            executor.load_loss(state.of(state.LOSS, tensors))
        resident = executor.options.resident
        if resident is not None and not job.is_preloaded:
            self.endpoint.mailbox.receive(COORDINATOR, step, SAMPLES, resident.arrays)
            resident.is_full = True
        if executor.stepper is not None:
            optimizer_state, averages = divided(state.of(state.OPTIMIZER, tensors))
            executor.stepper.load(optimizer_state, job.scalars, job.steps_done)
            if executor.average is not None and job.steps_done:
                executor.average.load(averages)
        if executor.loss_scale is not None and job.steps_done:
            executor.loss_scale.load(job.scalars)
        executor.settled_step = step
        if command.backup_every or step in command.snapshots:
            constants = constants_of(executor)
            copy = {name: tensor for name, tensor in tensors.items() if state.weight_of(name) not in ("", *constants)}
            self.keep(assignment, step, copy, job.scalars)

    def _received(self, assignment: Assignment, job: DeviceJob, step: int) -> dict[str, torch.Tensor]:
        """Return all tensors that a job starts with, including those that others send."""
        copy = self._keeping.at(step)
        tensors: dict[str, torch.Tensor] = {}
        for source, names in job.sources.items():
            if source == self.endpoint.name:
                self._check_kept(copy, names, step)
                tensors |= {name: copy[name] for name in names}
                continue
            received = assignment.arriving[source]
            self.endpoint.mailbox.receive(source, step, STATE, list(received.values()))
            tensors |= received
        return tensors

    def _check_kept(self, copy: dict[str, torch.Tensor], names: Iterable[str], step: int) -> None:
        """Raise WorkerLost where a tensor is missing because another worker of this one's name had it.

        That worker is lost, and the coordinator asks all workers again.
        """
        for name in names:
            if name not in copy:
                raise WorkerLost(f"{self.endpoint.name} was to have {name:.80} after step {step}; it has not.")

    def _check_sums(self, generation: int, job: DeviceJob, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse to start with state that has changed since it was kept, here or at another worker."""
        for source, sums in job.checksums.items():
            for name, expected in sums.items():
                if name in tensors and checksum(tensors[name]) != expected:
                    self._send(Corrupt(generation, source, name))
                    raise Stopped("the coordinator looks for another copy")

    # Copies

    def keep(
        self, assignment: Assignment, step: int, tensors: dict[str, torch.Tensor], scalars: dict[str, Any]
    ) -> None:
        """Keep a copy and report that it is available; it is sent when asked for, while training goes on."""
        sums = checksums(tensors.values())
        self._keeping.keep(step, tensors, scalars, sums)
        if assignment.executor is not None:  # what never changes is here, too, and need not be sent
            weights = assignment.executor.weights.tensors
            constants = {name: weights[name].detach() for name in constants_of(assignment.executor)}
            self._keeping.keep(step, state.named(state.WEIGHT, constants), {})
        entries = state.entries(tensors)
        assignment.offered[step] = tuple(tensors)
        is_same = entries == assignment.listed
        self._send(State(assignment.generation, step, None if is_same else entries, scalars, sums))
        assignment.listed = entries

    def send_copy(self, assignment: Assignment | None, message: SendState) -> None:
        """Send a copy that was offered to the worker that is to hold it, or to the coordinator."""
        if assignment is None or assignment.generation != message.generation:
            return
        copy, names = self._keeping.at(message.step), assignment.offered.get(message.step)
        if names is None or not all(name in copy for name in names):  # a device without weights sends an empty message
            return
        if message.attempt:  # the copy did not arrive intact: has it changed here?
            offered_sums, sums = self._keeping.checksums_at(message.step), checksums(copy[name] for name in names)
            if sums != tuple(offered_sums.get(name, 0) for name in names):
                self._send(State(assignment.generation, message.step, None, {}, sums, has_changed=True))
                return
        name = topic(message.step, message.attempt)
        self._send_tensors(message.to, message.step, name, [copy[tensor_name] for tensor_name in names])

    def make_room(self, assignment: Assignment | None, message: Hold) -> None:
        """Make room for a copy of another worker's state."""
        if assignment is not None and assignment.generation == message.generation:
            self._keeping.make_room(message)
            self._send(Holds(message.generation, message.source, message.step, message.attempt))

    def report_copies(self) -> None:
        """Report the copies of other workers' state that have come."""
        for held in self._keeping.collect():
            self._send(held)

    def _send_tensors(self, to: str, step: int, name: str, tensors: Iterable[torch.Tensor]) -> None:
        self.endpoint.send(to, step, name, [_sendable(tensor) for tensor in tensors], unplanned=True)


def constants_of(executor: Executor) -> frozenset[str]:
    """Return the weights on this device that no step changes."""
    network, is_training = executor.graph.network, executor.plan.is_training
    return state.constant_weights(network, is_training=is_training) & executor.weights.tensors.keys()


def is_receivable(weight: torch.Tensor, entry: TensorEntry) -> bool:
    """Return whether a tensor of the state can be received into a weight's own memory."""
    return (
        weight.is_cpu and not weight.is_mkldnn and weight.is_contiguous() and tuple(weight.shape) == entry.shape
        and str(weight.dtype) == f"torch.{entry.dtype}"
    )  # fmt: skip


def _is_same_memory(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    return not weight.is_mkldnn and weight.data_ptr() == tensor.data_ptr() and weight.stride() == tensor.stride()


def state_of(executor: Executor, *, copy: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a device's weights, buffers and optimiser state by full name, and the scalars of its optimiser. A copy is
    made of what changes, and is without the rest."""
    tensors, scalars = executor.stepper.state(copy=False) if executor.stepper is not None else ({}, {})
    if executor.loss_scale is not None:
        scalars = scalars | executor.loss_scale.state()
    if executor.average is not None:
        tensors |= executor.average.state()
    constants = constants_of(executor) if copy else frozenset()
    weights = {name: tensor for name, tensor in executor.weights.tensors.items() if name not in constants}
    named = state.named(state.WEIGHT, weights) | state.named(state.OPTIMIZER, tensors)
    return (state.plain(named) if copy else {name: tensor.detach() for name, tensor in named.items()}), scalars


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()
