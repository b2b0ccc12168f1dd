"""The coordinator's side of a run: hands every device its part of each batch, and gathers the results of inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from manyhands.data.preload import Preload
from manyhands.data.silo import SiloContent
from manyhands.executor.boxes import dtype_of, packed_alone, place_of
from manyhands.executor.messages import ROWS, FeedPart, everything_fed, feed_parts
from manyhands.executor.rates import rates_topic
from manyhands.executor.resident_dataset import SAMPLES, resident_key
from manyhands.executor.share_loss import shared_totals, target_names
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadData, BadPlan
from manyhands.facts.network import DTYPE_BYTES, Network, TensorSpec
from manyhands.graph.batching import bound, bound_inputs
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.graph.loss_totals import LOSS_TOTALS
from manyhands.graph.tape import bind_tree
from manyhands.schedule.feeding import feed_topic, result_topic
from manyhands.schedule.policy import Schedule
from manyhands.transport.endpoint import Endpoint


class Feeder:
    """Cuts batches into the boxes that devices are fed with.

    The coordinator does not have what a device has in its silo (`local`): in its place a batch has the samples'
    numbers, in the agreed order, and the device is sent the numbers of its rows. With `preload` this holds for
    everything, once each device has been given its boxes of all samples (`preload`).
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        endpoint: Endpoint,
        *,
        with_targets: bool = True,
        local: Mapping[str, SiloContent] | None = None,
        preload: Preload | None = None,
    ) -> None:
        self.graph, self.schedule, self.endpoint, self.with_targets = graph, schedule, endpoint, with_targets
        self.plan, self.local, self.resident = schedule.plan, dict(local or {}), preload
        if preload is not None:
            names, rows = everything_fed(graph, targets=with_targets), torch.arange(preload.count)
            self.local = {device: SiloContent(names, rows) for device in self.plan.devices}
        self._away = frozenset(name for content in self.local.values() for name in content.names)
        self.parts: dict[str, tuple[FeedPart, ...]] = {
            device: parts
            for device in self.plan.devices
            if (
                parts := feed_parts(
                    graph, schedule.lowering, device, targets=with_targets, local=self.local_names(device)
                )
            )
        }
        self._specs = {spec.name: spec for spec in graph.inputs}
        self._target_specs = {spec.name: spec for spec in graph.loss.inputs} if graph.loss is not None else {}
        self._totals = shared_totals(graph, self.plan) if with_targets and graph.loss is not None else None
        if self._totals is not None:
            self._target_specs[LOSS_TOTALS] = self._totals.spec
        self._check_silos()
        self._preloaded = self._bound_preload()

    def local_names(self, device: str) -> frozenset[str]:
        """Return the names of what a device takes from its silo."""
        return self.local[device].names if device in self.local else frozenset()

    def bytes_of(self, device: str) -> int:
        """Return the bytes that a device is fed for one step."""
        return sum(part.bytes for part in self.parts.get(device, ())) * self._passes

    def _check_silos(self) -> None:
        """Check that what is in a silo is read there, a row for each sample."""
        if self._totals is not None and self.resident is None and not self._away.isdisjoint(target_names(self.graph)):
            raise BadPlan(
                "The loss is weighted by the targets of a whole batch, which are in a silo.",
                hint="Use one micro-batch, and a single device for the last stage.",
            )
        for device, parts in self.parts.items():
            for part in parts:
                if part.name not in self._away:
                    continue
                if not part.is_local:
                    holders = ", ".join(name for name, content in self.local.items() if part.name in content.names)
                    raise BadPlan(
                        f"{device} reads '{part.name}', which only {holders} has.",
                        hint="Give the layers that read it to the device that has it.",
                    )
                spec = (self._target_specs if part.is_target else self._specs)[part.name]
                if spec.batch_axis != 0 or spec.rows_per_sample != 1:
                    raise BadPlan(f"'{part.name}' stays at its device; its first axis must be the samples'.")

    def _bound_preload(self) -> dict[tuple[str, bool], torch.Tensor]:
        """Return the tensors of all samples by name, and by whether it is a target's."""
        if self.resident is None:
            return {}
        count = self.resident.count
        inputs = _typed(bound_inputs(self.graph, self.resident.inputs), self._specs, count)
        tensors = {(name, False): tensor for name, tensor in inputs.items()}
        if self.with_targets:
            targets = _typed(self._named_targets(self.resident.targets), self._target_specs, count)
            tensors |= {(name, True): tensor for name, tensor in targets.items()}
        return tensors

    def resident_key(self, device: str) -> str:
        """Return a key for what is preloaded on a device; empty: nothing is."""
        if self.resident is None or device not in self.parts:
            return ""
        return resident_key(self.resident.key, self.parts[device])

    def preload(self, device: str, step: int) -> None:
        """Send a device its boxes of all samples; does not wait."""
        rows = [
            self._preloaded[part.name, part.is_target][(slice(None), *part.box.slices()[1:])]
            for part in self.parts[device]
            if part.is_of_samples
        ]
        self.endpoint.send(device, step, SAMPLES, [row.contiguous() for row in rows], unplanned=True)

    def send(self, step: int, inputs: Any, targets: Any = None, place: int = 0) -> None:
        """Send one batch to every device that needs some of it; does not wait.

        Where a round has several steps, `step` is its first and `place` says which of them this is.
        """
        values = bound_inputs(self.graph, inputs)
        bound_targets = {}
        if self.with_targets:
            bound_targets = self._with_totals(self._checked(self._named_targets(targets), self._target_specs))
        self._send(step, values, bound_targets, place)

    def send_rates(self, step: int, numbers: Sequence[float], place: int = 0) -> None:
        """Send every device that steps weights the numbers that a schedule gives one step; `step` and `place` as in
        `send`."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        for device in self.plan.devices:
            if self.schedule.lowering.work[device].makes_steps:
                self.endpoint.send(device, step, rates_topic(place), [tensor])

    def send_values(self, step: int, values: Mapping[str, torch.Tensor], place: int = 0) -> None:
        """Send one batch without targets, by the names of the network's inputs; under ROWS, how many are samples."""
        self._send(step, values, {}, place)

    def _send(
        self, step: int, values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], place: int
    ) -> None:
        checked = self._checked({name: tensor for name, tensor in values.items() if name != ROWS}, self._specs)
        checked[ROWS] = values.get(ROWS, torch.tensor([self.plan.step_size]))
        for number in range(self._passes):
            for device, parts in self.parts.items():
                tensors = [self._cut(device, part, checked, targets, number) for part in parts]
                self.endpoint.send(device, step, feed_topic(place + number), tensors)

    def _with_totals(self, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch's targets with the totals that its loss makes of them, if it is shared and has any."""
        if self._totals is None:
            return dict(targets)
        here = {n: self._preloaded[n, True][t] if n in self._away else t for n, t in targets.items()}
        return {**targets, LOSS_TOTALS: self._totals.of(here, self.plan.step_size)}

    @property
    def _passes(self) -> int:
        """Micro-batches of one step."""
        return self.plan.micro_batches // self.plan.steps_per_round

    def _named_targets(self, targets: Any) -> dict[str, torch.Tensor]:
        return bound("A batch's targets are", lambda: self._bind_targets(targets), targets)

    def _bind_targets(self, targets: Any) -> dict[str, torch.Tensor]:
        assert self.graph.loss is not None
        tensors = bind_tree(self.graph.loss.input_tree[0][1], targets)
        return {name: tensors[name] for name in target_names(self.graph)}

    def _checked(self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
        """Return a batch whose shapes have been checked; what is away is there as the samples' numbers."""
        size = self.plan.step_size
        away = {name: tensor for name, tensor in tensors.items() if name in self._away}
        _check_shapes(away, dict.fromkeys(away, (size,)))
        present = {name: tensor for name, tensor in tensors.items() if name not in away}
        return away | _typed(present, specs, size)

    def _cut(
        self,
        device: str,
        part: FeedPart,
        values: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        micro_batch: int,
    ) -> torch.Tensor:
        tensor = (targets if part.is_target else values)[part.name]
        if part.name == ROWS:
            return tensor
        if part.scattered:
            return self._gathered(device, part, tensor, micro_batch)
        if part.is_local:
            first, last = (micro_batch * self.plan.micro_batch_size + place for place in part.box.intervals[0])
            return self.local[device].rows[tensor[first:last]].contiguous()
        spec = (self._target_specs if part.is_target else self._specs)[part.name]
        hull = Box.whole(tensor.shape)
        box = part.box
        if spec.batch_axis is not None:
            start = micro_batch * self.plan.micro_batch_size * spec.rows_per_sample
            low, high = box.intervals[spec.batch_axis]
            box = box.replace(spec.batch_axis, (start + low, start + high))
        return packed_alone(tensor[place_of(box, hull)])

    def _gathered(self, device: str, part: FeedPart, tensor: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Return rows of a micro-batch that do not lie side by side, as one tensor."""
        spec = self._target_specs[part.name]
        axis = 0 if part.is_local else spec.batch_axis
        assert axis is not None
        start = micro_batch * self.plan.micro_batch_size * (1 if part.is_local else spec.rows_per_sample)
        rows = torch.cat([tensor.narrow(axis, start + first, last - first) for first, last in part.scattered], axis)
        return self.local[device].rows[rows].contiguous() if part.is_local else packed_alone(rows)

    # Inference

    def expected_results(self) -> dict[tuple[str, str], int]:
        """Return (device, topic) -> bytes of the outputs that come back in a round of a stream."""
        expected = {}
        for device, parts in self.returning.items():
            size = sum(box.volume * DTYPE_BYTES[self._network.tensors[name].dtype] for name, box in parts)
            for micro_batch in range(self.plan.micro_batches):
                expected[(device, result_topic(micro_batch))] = size
        return expected

    @property
    def _network(self) -> Network:
        return self.schedule.network

    @cached_property
    def returning(self) -> dict[str, list[tuple[str, Box]]]:
        """Device -> the boxes of each output that it hands back, in the order they travel."""
        last = self.schedule.lowering.geometries[-1]
        pieces: dict[str, list[tuple[str, Box]]] = {}
        for name in self.graph.outputs:
            for device, box in last.returning(name).pieces():
                pieces.setdefault(device, []).append((name, box))
        return pieces

    def gather(self, step: int, place: int = 0) -> dict[str, torch.Tensor]:
        """Return the outputs of one step of a stream, whole; `step` and `place` as in `send`."""
        network, samples = self._network, self.plan.micro_batch_size
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in self.graph.outputs}
        for micro_batch in range(place, place + self._passes):
            for name, chunks in rows.items():
                spec = network.tensors[name]
                chunks.append(torch.empty(spec.shape_for(samples), dtype=dtype_of(spec.dtype)))
            for device, parts in self.returning.items():
                tensors = [torch.empty(box.shape, dtype=rows[name][-1].dtype) for name, box in parts]
                self.endpoint.mailbox.receive(device, step, result_topic(micro_batch), tensors)
                for (name, box), tensor in zip(parts, tensors):
                    rows[name][-1][box.slices()] = tensor
        return {
            name: torch.cat(parts, axis) if (axis := network.tensors[name].batch_axis) is not None else parts[0]
            for name, parts in rows.items()
        }


def check_batch(graph: Graph, samples: int, inputs: Any, targets: Any) -> None:
    """Refuse a batch that does not fit what the network and its loss were captured with."""
    loss = graph.loss
    assert loss is not None
    named = bound("A batch's targets are", lambda: bind_tree(loss.input_tree[0][1], targets), targets)
    named = {name: named[name] for name in target_names(graph)}
    for tensors, specs in ((bound_inputs(graph, inputs), graph.inputs), (named, loss.inputs)):
        _check_shapes(tensors, {spec.name: spec.shape_for(samples) for spec in specs})
        for spec in specs:
            tensor = tensors.get(spec.name)
            if tensor is not None and tensor.is_floating_point() and not dtype_of(spec.dtype).is_floating_point:
                given = str(tensor.dtype).removeprefix("torch.")
                raise BadData(f"A batch's '{spec.name}' is {given}; it must be {spec.dtype}.")
    check_labels(graph, targets, "The targets of the batch")


def _typed(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], samples: int
) -> dict[str, torch.Tensor]:
    """Return tensors of so many samples, checked for the shape and converted to the type that the network was captured
    with."""
    _check_shapes(tensors, {name: specs[name].shape_for(samples) for name in tensors})
    return {name: tensor.to(dtype_of(specs[name].dtype)) for name, tensor in tensors.items()}


def _check_shapes(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in tensors.items():
        shape = shapes[name]
        if not isinstance(tensor, torch.Tensor):
            raise BadData(f"A batch's '{name}' is a {type(tensor).__name__}; it must be a tensor of {shape}.")
        if tuple(tensor.shape) != shape:
            raise BadData(
                f"A batch's '{name}' has shape {tuple(tensor.shape)}; the network was captured with {shape}.",
                hint="Every sample of a data set must have the same shape.",
            )
