"""Assigns each device of a run its part of the job, and the device from which each tensor of its state comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from manyhands.executor.messages import COORDINATOR
from manyhands.executor.schedules import at_start
from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.gpu_math import GpuMath
from manyhands.runtime import state
from manyhands.runtime.batch_feed import BatchFeed
from manyhands.runtime.control_parts import DeviceJob, LengthGraph, TensorEntry
from manyhands.runtime.member import Member
from manyhands.runtime.order import Order
from manyhands.runtime.state import Located
from manyhands.schedule.policy import Schedule


@dataclass(frozen=True)
class GraphDocument:
    """The job's graph as it travels, with those of shorter samples, and the digest by which a device knows them."""

    longest: dict[str, Any]
    shorter: tuple[LengthGraph, ...]
    digest: str


class Handout:
    """The devices of a run: those that compute, those that only send state, and the state that each starts with."""

    def __init__(self, order: Order, schedule: Schedule) -> None:
        self.schedule = schedule
        self.names = order.plan.devices
        """The devices that compute."""
        self.weights = {name: schedule.lowering.work[name].weights() for name in self.names}
        self.stepped = {name: schedule.lowering.work[name].stepped_weights() for name in self.names}
        located = order.located or Located.at_coordinator(order.start)
        if order.graph.loss is not None:
            located = located.with_here(state.named(state.LOSS, order.graph.loss.state))
        self.located = located
        self.sources = located.assigned({name: self._wanted(name) for name in self.names})
        """Device -> source -> tensors that the device starts with."""
        self.gives = _turned(self.sources)
        """Source -> device -> tensors that the device is sent."""
        givers = [name for name in self.gives if name not in self.names and name != COORDINATOR]
        self.participants = (*self.names, *givers)
        """The devices that compute, and those that only send the state they have."""

    def job(
        self, name: str, member: Member, order: Order, feed: BatchFeed, document: GraphDocument,
        wait_limit_seconds: float, gpu_math: GpuMath, collectives: CollectiveTerms | None = None,
        gpu_peers: tuple[str, ...] = (),
    ) -> DeviceJob:  # fmt: skip
        """Return a device's part of the job. The graph is left out where the device already has it."""
        located, lengths = self.located, order.lengths
        first = located.steps_done
        kernels = dict(order.kernels.get(name, {}))
        together = [other for stage in order.plan.stages if name in stage.devices for other in stage.devices]
        alike = all(dict(order.kernels.get(other, {})) == kernels for other in together)
        is_known = member.graph_digest == document.digest
        return DeviceJob(
            graph=None if is_known else document.longest, network=None if is_known else order.graph.network,
            digest=document.digest,
            plan=order.plan,
            optimizer=at_start(order.optimizer).to_dict() if order.optimizer is not None else None,
            is_scheduled=order.rates is not None,
            seed=order.seed, kernels=kernels, stored=kernels if alike else {},
            state=tuple(self._part(name, located.entries[tensor_name]) for tensor_name in self._wanted(name)),
            sources=self.sources[name], checksums=self._checksums(name),
            scalars=located.scalars, steps_done=first, with_targets=order.plan.is_training,
            trace_first=order.trace_steps.start, trace_last=order.trace_steps.stop,
            memory_step=order.memory_step, watch_every=order.watch_every,
            wait_limit_seconds=wait_limit_seconds, held=tuple(sorted(feed.feeder.local_names(name))),
            preload_samples=order.preload.count if order.preload is not None else 0,
            resident_dataset=feed.feeder.resident_key(name),
            is_preloaded=not feed.needs_preload(name, member),
            clipping=order.clipping, scales_loss=order.scales_loss, ema=order.ema, gpu_math=gpu_math,
            longest=max(lengths.graphs) if lengths is not None else 0,
            shorter=() if is_known else document.shorter,
            step_lengths=lengths.places(first, order.last_step) if lengths is not None else b"",
            collectives=collectives, gpu_peers=gpu_peers,
        )  # fmt: skip

    def given_here(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield each device that the coordinator sends tensors to, with those tensors."""
        stored = self.located.here
        for name, tensors in self.gives.get(COORDINATOR, {}).items():
            yield name, [self._part_of(name, key, stored[key]).detach().cpu().contiguous() for key in tensors]

    def moving_bytes(self) -> int:
        """Return the bytes of state that are sent before the run begins."""
        return sum(
            state.byte_count(self.located.entries[name] for name in names)
            for gives in self.gives.values()
            for names in gives.values()
        )

    def _wanted(self, name: str) -> list[str]:
        """Return the tensors that a device starts with: its stages' weights, the optimiser's state of those that it
        steps, loss constants."""
        constants = [name for name in self.located.here if name.startswith(state.LOSS)]
        return self.located.wanted_by(self.weights[name], self.stepped[name]) + constants

    def _part(self, device: str, entry: TensorEntry) -> TensorEntry:
        """Return the entry for the part of a tensor that a device gets: by channels, its own part of a weight."""
        box = self.schedule.lowering.work[device].weight_box(state.weight_of(entry.name))
        return entry if box is None else msgspec.structs.replace(entry, shape=box.shape)

    def _part_of(self, device: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        work = self.schedule.lowering.work
        box = work[device].weight_box(state.weight_of(name)) if device in self.names else None
        return tensor if box is None else tensor[box.slices()]

    def _checksums(self, name: str) -> dict[str, dict[str, int]]:
        """Return the checksums of the state that a device starts with, from when it was kept, by source."""
        sums = {}
        for source, tensors in self.sources[name].items():
            recorded = self.located.checksums.get(source, {})
            if tensor_sums := {tensor: recorded[tensor] for tensor in tensors if tensor in recorded}:
                sums[source] = tensor_sums
        return sums


def _turned(sources: Mapping[str, Mapping[str, tuple[str, ...]]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return source -> device -> tensors from device -> source -> tensors, without the tensors a device has itself."""
    gives: dict[str, dict[str, tuple[str, ...]]] = {}
    for device, names_by_source in sources.items():
        for source, names in names_by_source.items():
            if source != device:
                gives.setdefault(source, {})[device] = names
    return gives
