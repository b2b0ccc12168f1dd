"""The cost of every action: the only place where plans are priced, for planners and simulator alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy

from manyhands.facts.cluster import Cluster
from manyhands.facts.link import Link
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import Plan
from manyhands.facts.profile import DeviceProfile, Profile, op_seconds
from manyhands.schedule.actions import Backward, Forward, Receive, Reduce, Send
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.memory import weight_part
from manyhands.schedule.reduction import flow_bytes, message_counts, phases

_BACKWARD_PART = {"": 1.0, "inputs": 0.5, "weights": 0.5, "rim": 0.0}
"""The fraction of an operator's backward pass that each part of it takes."""


class CostModel:
    """Seconds of actions on a cluster, from a profile."""

    def __init__(self, network: Network, cluster: Cluster, profile: Profile) -> None:
        self.network, self.cluster, self.profile = network, cluster, profile
        for name in profile.devices:
            profile.of(name).check_matches(network)
        self._range_seconds: dict[tuple[int, int, int, float], tuple[float, float]] = {}
        self._op_shares: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self._fractions: dict[tuple[StageGeometry, str, bool], tuple[float, ...]] = {}
        self._computed: dict[tuple[object, ...], float] = {}
        self._moved: dict[tuple[object, ...], list[float]] = {}
        self._messages: dict[tuple[object, ...], list[int]] = {}
        self._delays: dict[tuple[object, ...], float] = {}

    def compute_seconds(self, geometry: StageGeometry, device: str, action: Forward | Backward) -> float:
        """Return the seconds of a forward or backward action on its device, the same for every micro-batch. Devices
        that share a stage wait for each other, so the slowest of them counts."""
        key = (geometry, device, isinstance(action, Forward), action.first, action.last, action.part)
        seconds = self._computed.get(key)
        if seconds is None:
            together = self.profile.of(device).together(len(geometry.devices))
            computed = self._compute_seconds(geometry, device, action)
            seconds = self._computed[key] = max(computed, self._launch_seconds(geometry, device, action)) * together
        return seconds

    def _launch_seconds(self, geometry: StageGeometry, device: str, action: Forward | Backward) -> float:
        """Return what Python takes to launch an action's kernels on a GPU: small ones end before the next is launched.
        A round that a GPU computes alone is one graph, and is launched at once (`executor.captured_round`)."""
        launches = self.profile.of(device).launch_seconds
        is_graph = len(geometry.devices) == 1 and geometry.first == 0 and geometry.last == len(self.network.ops)
        if not launches or is_graph:
            return 0.0
        way = int(isinstance(action, Backward))
        part = _BACKWARD_PART[action.part] if isinstance(action, Backward) else 1.0
        total = 0.0
        for op in range(action.first, action.last):
            number = self.network.layer_of_op[op]
            layer = self.network.layers[number]
            total += launches[number][way] / (layer.last - layer.first)
        return total * part

    def _compute_seconds(self, geometry: StageGeometry, device: str, action: Forward | Backward) -> float:
        key = (geometry, device, isinstance(action, Forward))
        parts = self._fractions.get(key)
        if parts is None:
            fractions_of = geometry.fractions if isinstance(action, Forward) else geometry.backward_fractions
            parts = self._fractions[key] = fractions_of(device)
        profile = self.profile.of(device)
        if not geometry.is_split_inside:
            forward, backward = self.range_seconds(
                profile, device, action.first, action.last, parts[0] * geometry.samples
            )
            return forward if isinstance(action, Forward) else backward
        total = 0.0
        for op in range(action.first, action.last):
            samples = parts[op - geometry.first] * geometry.samples
            if samples:
                forward, backward = self.range_seconds(profile, device, op, op + 1, samples)
                if isinstance(action, Forward):
                    total += forward * geometry.forward_part(device, action.first, action.part)
                else:
                    total += backward * _BACKWARD_PART[action.part]
        return total

    def range_seconds(
        self, profile: DeviceProfile, device: str, first: int, last: int, samples: float
    ) -> tuple[float, float]:
        """Return forward and backward seconds of operators [first, last) for some samples; a fraction is a tile of one
        sample."""
        key = (id(profile), first, last, samples)
        seconds = self._range_seconds.get(key)
        if seconds is not None:
            return seconds
        ahead_shares, back_shares = self._shares(profile, device)
        forward = backward = 0.0
        op = first
        while op < last:
            number = self.network.layer_of_op[op]
            layer = self.network.layers[number]
            end = min(last, layer.last)
            if op == layer.first and end == layer.last:
                ahead_part, back_part = 1.0, 1.0
            elif number in self._layers_with_fixed:
                ahead_part, back_part = self._parts(number, op, end, device, samples)
            else:
                ahead_part, back_part = sum(ahead_shares[op:end]), sum(back_shares[op:end])
            if ahead_part or back_part:
                ahead, back = profile.layer_seconds(number, samples)
                forward += ahead * ahead_part
                backward += back * back_part
            op = end
        self._range_seconds[key] = (forward, backward)
        return forward, backward

    @cached_property
    def _layers_with_fixed(self) -> frozenset[int]:
        """The layers in which weights are computed: the more samples, the less of their time that takes."""
        return frozenset(
            number
            for number, layer in enumerate(self.network.layers)
            if any(op.is_fixed for op in self.network.ops[layer.first : layer.last])
        )

    def _parts(self, number: int, first: int, last: int, device: str, samples: float) -> tuple[float, float]:
        """Return the fractions of a layer's time for so many samples, forward and backward, that operators [first,
        last) take."""
        layer = self.network.layers[number]
        ahead, back = (
            sum(seconds[first - layer.first : last - layer.first]) / (sum(seconds) or 1.0)
            for seconds in self._estimates(self.network.ops[layer.first : layer.last], device, samples)
        )
        return ahead, back

    def _estimates(self, ops: Sequence[Op], device: str, samples: float) -> tuple[list[float], list[float]]:
        """Return roofline estimates of operators, forward and backward. Those without gradients take no time
        backward."""
        kind = self.cluster.device(device)
        ahead = [op_seconds(op, kind, samples) if op.macs or op.moved_bytes else 0.0 for op in ops]
        return ahead, [seconds if self.network.backward_passes(op) else 0.0 for op, seconds in zip(ops, ahead)]

    def _shares(self, profile: DeviceProfile, device: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return each operator's fraction of its layer's time, forward and backward. Layers are measured; the roofline
        estimate divides their time."""
        stored = self._op_shares.get(id(profile))
        if stored is not None:
            return stored
        ahead, back = self._estimates(self.network.ops, device, 1)
        shares = self._op_shares[id(profile)] = (self._within_layers(ahead), self._within_layers(back))
        return shares

    def _within_layers(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return each operator's fraction of its layer's seconds; of a layer that takes none, equal ones."""
        shares: list[float] = []
        for layer in self.network.layers:
            of_layer = seconds[layer.first : layer.last]
            total = sum(of_layer)
            shares.extend(each / total if total else 1.0 / len(of_layer) for each in of_layer)
        return tuple(shares)

    def step_seconds(self, geometry: StageGeometry, device: str, plan: Plan) -> float:
        """Return the seconds of the optimiser's step: it is memory-bound, reading and writing weights, gradients and
        state once. For the norm of all gradients they are read once more, and to clip them, read and written. What each
        step costs the device however small the network is (its batch, the loss, the report) comes with it."""
        passes = 3 + 2 * plan.optimizer_slots + 3 * plan.gradient_norm
        trainable = sum(
            weight.bytes * weight_part(geometry, device, weight)
            for weight in map(self.network.weights.__getitem__, self.network.weights_of(geometry.first, geometry.last))
            if weight.trainable
        )
        facts = self.cluster.device(device)
        is_first = not any(device in stage.devices for stage in plan.stages[: geometry.index])
        return trainable * passes / facts.memory_bytes_per_second + (facts.round_seconds if is_first else 0.0)

    def copies(self, device: str) -> bool:
        """Return whether messages take a device's time from computing."""
        facts, profile = self.cluster.device(device), self.profile.of(device)
        return any((facts.copy_seconds_per_gigabyte, facts.message_seconds, profile.host_copy_seconds_per_gigabyte))

    def copy_seconds(self, device: str, action: Send | Receive | Reduce) -> float:
        """Return the computing seconds lost to an action's messages and to copying their bytes, where no other core
        does it. What leaves a GPU or comes to it is copied to the machine's memory or from there, unless all who have
        to do with it compute on the same one."""
        facts, profile = self.cluster.device(device), self.profile.of(device)
        each, message = facts.copy_seconds_per_gigabyte / 1e9, facts.message_seconds
        if profile.host_copy_seconds_per_gigabyte and not self._stays_on_gpu(device, action):
            each += profile.host_copy_seconds_per_gigabyte / 1e9
            message += profile.host_copy_seconds
        if not each and not message:
            return 0.0
        if isinstance(action, Reduce):
            place = action.devices.index(device)
            moved = self._moved_bytes(action)[place] if each else 0.0
            return each * moved + message * self._message_counts(action)[place]
        return each * action.message.bytes + message

    def _stays_on_gpu(self, device: str, action: Send | Receive | Reduce) -> bool:
        gpu = self.cluster.device(device).gpu
        if not gpu:
            return False
        if isinstance(action, Reduce):
            others = action.devices if action.what in ("gradients", "statistics") else ("",)
        else:
            others = (action.to if isinstance(action, Send) else action.source,)
        return all(name and self.cluster.device(name).gpu == gpu for name in others)

    def link(self, source: str, target: str) -> Link:
        return self.cluster.link_between(source, target)

    def _moved_bytes(self, reduce: Reduce) -> list[float]:
        """Return the bytes that each device sends and receives for a sum."""
        key = (reduce.devices, reduce.places, reduce.what, reduce.first, reduce.last, reduce.bytes)
        moved = self._moved.get(key)
        if moved is None:
            total = numpy.zeros(len(reduce.devices))
            for flows in phases(reduce):
                sizes = flow_bytes(reduce, self.network, flows)
                for ends in (flows.sources, flows.targets):
                    total += numpy.bincount(ends, weights=sizes, minlength=len(total))
            moved = self._moved[key] = total.tolist()
        return moved

    def _message_counts(self, reduce: Reduce) -> list[int]:
        """Return the number of messages that each device sends and receives for a sum."""
        key = (reduce.devices, reduce.places, reduce.what == "gradients")
        counts = self._messages.get(key)
        if counts is None:
            counts = self._messages[key] = message_counts(reduce).tolist()
        return counts

    def phase_delay_seconds(self, reduce: Reduce, number: int) -> float:
        """Return the delay of one phase of a sum: each of its rounds waits for the slowest link that it crosses."""
        key = (reduce.devices, reduce.places, reduce.what == "gradients", number)
        seconds = self._delays.get(key)
        if seconds is None:
            flows, slowest = phases(reduce)[number], self.cluster.link.delay_seconds
            if self.cluster.links:
                devices, pairs = reduce.devices, zip(flows.sources.tolist(), flows.targets.tolist())
                slowest = max(self.link(devices[a], devices[b]).delay_seconds for a, b in pairs)
            elif self.cluster.sites:
                sites = [self.cluster.device(name).site for name in reduce.devices]
                ways = {(sites[a], sites[b]) for a, b in zip(flows.sources.tolist(), flows.targets.tolist())}
                slowest = max(self.cluster.tree.way(a, b).link.delay_seconds for a, b in ways)
            seconds = self._delays[key] = flows.rounds * slowest
        return seconds
