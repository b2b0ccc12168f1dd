"""Builds a device's part of a job: its graph, empty weights and optimiser, the executor, and what it will receive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from manyhands.data.silo import Silo
from manyhands.executor.boxes import dtype_of
from manyhands.executor.collectives import Collectives
from manyhands.executor.executor import Executor
from manyhands.executor.messages import COORDINATOR, feed_parts
from manyhands.executor.optimizers import build
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.process_groups import Hosts, ProcessGroups, keys_of
from manyhands.executor.resident_dataset import SAMPLES, ResidentDataset
from manyhands.facts.boxes import Box
from manyhands.facts.collectives import AUTO
from manyhands.facts.errors import BadPlan, WorkerLost
from manyhands.facts.network import WeightSpec
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan_check import resolve
from manyhands.graph.accelerators import release_memory
from manyhands.graph.check import check_weights
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import store_weights
from manyhands.graph.lengths import LengthGraphs
from manyhands.graph.weights import Weights
from manyhands.runtime import state
from manyhands.runtime.control_parts import DeviceJob, TensorEntry
from manyhands.runtime.gpu_settings import use
from manyhands.runtime.joining import Joining
from manyhands.runtime.keeping import STATE
from manyhands.runtime.memory_kills import free_bytes
from manyhands.runtime.processes import give_back_memory, keep_memory, return_memory
from manyhands.runtime.received_graph import graph_of
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policy import Schedule
from manyhands.transport.transport import ConnectedEndpoint

SPARE = 1.5
"""The free memory, in what the plan takes, that a process needs to keep what it frees."""


class PartBuilder:
    """The builder of a worker's parts.

    It keeps the graph and the resident dataset of the last job: the next one may use them again.
    """

    def __init__(self, endpoint: ConnectedEndpoint, joining: Joining, silo: Silo | None, hosts: Hosts) -> None:
        self.endpoint, self._joining, self._silo, self._hosts = endpoint, joining, silo, hosts
        self._graphs: dict[str, dict[int, Graph]] = {}
        """The last job's graphs, by their digest; of each length, or under 0 the only one."""
        self._resident_dataset: ResidentDataset | None = None
        """The samples that were preloaded last."""

    def build(self, generation: int, job: DeviceJob, kept: Mapping[str, torch.Tensor]) -> Executor:
        """Return the executor of this device's part, with the mailbox open for everything it will receive. `kept` is
        what this device has of the state that the job begins with."""
        if self._joining.compute != "cpu":
            use(job.gpu_math)
            release_memory(torch.device(self._joining.compute))  # the last part's: for other sizes, and other workers
        graph, lengths = self._graphs_of(job)
        network = graph.network
        plan = resolve(job.plan, network)
        if self.endpoint.name not in plan.devices:
            raise BadPlan(f"The plan does not name {self.endpoint.name}.")
        if job.clipping is not None:
            job.clipping.check()
        schedule = Schedule(plan, network)
        if self._joining.compute == "cpu":
            settle_allocator(schedule, self.endpoint.name, free_bytes())
        weights = self._weights(graph, schedule, job, kept)
        for other in lengths.graphs.values() if lengths is not None else ():
            if graph.loss is not None and other.loss is not None:
                other.loss.state.update(graph.loss.state)
        stepper = None
        work = schedule.lowering.work[self.endpoint.name]
        if job.optimizer is not None and plan.is_training and work.makes_steps:
            stepped = set(work.stepped_weights())
            trainable = {name: tensor for name, tensor in weights.trainable().items() if name in stepped}
            stepper = build(Optimizer.from_dict(job.optimizer), trainable)
        options = ExecutorOptions(
            seed=job.seed, kernels=job.kernels, torch_device=self._joining.compute,
            trace_steps=range(job.trace_first, job.trace_last), memory_step=job.memory_step,
            watch_every=job.watch_every, clipping=job.clipping, scales_loss=job.scales_loss, ema=job.ema,
            with_targets=job.with_targets, slowdown=self._joining.slowdown, silo=self._silo,
            local_names=frozenset(job.held),
            resident=self._resident_dataset_for(graph, schedule, job),
            is_scheduled=job.is_scheduled and stepper is not None, is_exact=job.gpu_math.is_exact,
            collectives=self._collectives(generation, job, schedule), gpu_peers=frozenset(job.gpu_peers),
        )  # fmt: skip
        self.endpoint.mailbox.limit_seconds = job.wait_limit_seconds
        self.endpoint.sent_bytes.clear()
        self.endpoint.unplanned_bytes.clear()
        self.endpoint.mailbox.received_bytes.clear()
        executor = Executor(graph, schedule, self.endpoint, weights, stepper, options, lengths)
        self.endpoint.mailbox.open(generation, executor.expected_by_step(), job.steps_done, plan.steps_per_round)
        for source, names in job.sources.items():
            if source != self.endpoint.name:
                self.endpoint.mailbox.expect(source, STATE, state.byte_count(listed(job, names)))
        if options.resident is not None and not job.is_preloaded:
            self.endpoint.mailbox.expect(COORDINATOR, SAMPLES, options.resident.bytes)
        return executor

    def _graphs_of(self, job: DeviceJob) -> tuple[Graph, LengthGraphs | None]:
        """Return the job's graph, and those of all lengths if batches have several; they may be the ones that this
        worker received before."""
        if job.graph is not None:
            shorter = {other.length: graph_of(other.graph, other.network) for other in job.shorter}
            self._graphs = {job.digest: {**shorter, job.longest: graph_of(job.graph, job.network)}}
        if job.digest not in self._graphs:
            raise BadPlan(f"The job's graph is {job.digest:.16}; this worker was given none of that digest.")
        graphs = self._graphs[job.digest]
        if job.longest not in graphs or job.longest < max(graphs):
            raise BadPlan(f"The job's longest samples have {job.longest}; its graphs are for {sorted(graphs)}.")
        if not job.longest:
            return graphs[0], None
        if job.plan.steps_per_round > 1 or not job.plan.is_training:
            raise BadPlan("Batches of several lengths are for training, one step in a round.")
        return graphs[job.longest], LengthGraphs.from_places(graphs, job.steps_done, job.step_lengths)

    def _weights(self, graph: Graph, schedule: Schedule, job: DeviceJob, kept: Mapping[str, torch.Tensor]) -> Weights:
        """Return memory for the weights and buffers of this device's part; their values come with the start. Those that
        never change and are here already are taken as they are."""
        specs = {spec.name: spec for spec in graph.weights}
        constants = state.constant_weights(graph.network, is_training=schedule.plan.is_training)
        here = job.sources.get(self.endpoint.name, ())
        tensors = {
            entry.name: kept[entry.name]
            for entry in job.state
            if entry.name in here and entry.name in kept and state.weight_of(entry.name) in constants
        }
        tensors |= state.empty(entry for entry in job.state if entry.name not in tensors)
        held = state.of(state.WEIGHT, tensors)
        work = schedule.lowering.work[self.endpoint.name]
        held |= {name: zeros(specs[name]) for name in work.weights() if name in graph.carried}
        check_weights({name: _part(specs[name], work.weight_box(name)) for name in held if name in specs}, held)
        if graph.loss is not None:
            loss_tensors = state.of(state.LOSS, tensors)
            check_weights({spec.name: spec for spec in graph.loss.weights}, loss_tensors)
            graph.loss.state.update(loss_tensors)
        device = torch.device(self._joining.compute)
        weights = Weights({n: t.to(device).requires_grad_(specs[n].trainable) for n, t in held.items()}, device)
        store_weights(graph, weights, job.stored)
        return weights

    def _collectives(self, generation: int, job: DeviceJob, schedule: Schedule) -> Collectives | None:
        """Return what forms sums through process groups, which are yet to be formed; None where messages carry them."""
        if job.collectives is None:
            return None
        keys = keys_of(schedule.every_action(self.endpoint.name))
        groups = ProcessGroups(
            self.endpoint.mailbox, job.collectives, self._hosts, generation, keys, self._joining.compute
        )
        return Collectives(
            groups, is_measured=job.collectives.way == AUTO, first_step=job.steps_done,
            stride=schedule.plan.steps_per_round,
        )  # fmt: skip

    def _resident_dataset_for(self, graph: Graph, schedule: Schedule, job: DeviceJob) -> ResidentDataset | None:
        """Return the dataset of the samples preloaded here: one that was filled before, or one to be filled."""
        if not keeps_dataset(job):
            last, self._resident_dataset = self._resident_dataset, None
        if not job.resident_dataset:
            return None
        if job.is_preloaded:
            if last is None or last.key != job.resident_dataset or not last.is_full:
                raise WorkerLost(f"{self.endpoint.name} was to have the samples; it has not.")
            self._resident_dataset = last
        else:
            fed = feed_parts(graph, schedule.lowering, self.endpoint.name, targets=job.with_targets, local=job.held)
            self._resident_dataset = ResidentDataset(self.endpoint.name, fed, job.preload_samples, job.resident_dataset)
        return self._resident_dataset


def settle_allocator(schedule: Schedule, device: str, free: int) -> None:
    """Decide whether this process keeps freed memory or returns it: where there is little to spare beside what the plan
    takes, it returns it."""
    memory = DeviceMemory(schedule.plan, schedule.network, schedule.lowering.work[device].geometries, device)
    for action in schedule.every_action(device):
        memory.act(action)
    if SPARE * memory.peak_bytes > free:
        give_back_memory()  # what measuring and probing have left
        return_memory()
    else:
        keep_memory()


def keeps_dataset(job: DeviceJob) -> bool:
    """Return whether a generation leaves the resident dataset alone: one that validates in the middle of a training."""
    return not job.plan.is_training and job.steps_done > 0


def listed(job: DeviceJob, names: Iterable[str]) -> list[TensorEntry]:
    """Return the entries of these tensors in the job's state."""
    entries = {entry.name: entry for entry in job.state}
    return [entries[name] for name in names]


def zeros(spec: WeightSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=dtype_of(spec.dtype))


def _part(spec: WeightSpec, box: Box | None) -> WeightSpec:
    """Return the spec of what a device holds of a weight: with a share by channels, its own part."""
    return spec if box is None else msgspec.structs.replace(spec, shape=box.shape)
