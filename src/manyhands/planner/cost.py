"""What every action costs: the one place where plans are priced, for planners and simulator alike."""

from __future__ import annotations

import numpy

from manyhands.facts.cluster import Cluster, Link
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, Profile, op_seconds
from manyhands.schedule.actions import Backward, Forward, Receive, Reduce, Send
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.memory import weight_part
from manyhands.schedule.reduction import flow_bytes, flow_ends, messages_each, rounds_in
from manyhands.schedule.tiles import TileGeometry

_BACKWARD_PART = {"": 1.0, "inputs": 0.5, "weights": 0.5, "rim": 0.0}
"""How much of an operator's backward pass a part of it takes."""


class CostModel:
    """Seconds of actions on a cluster, from a profile."""

    def __init__(self, network: Network, cluster: Cluster, profile: Profile) -> None:
        self.network, self.cluster, self.profile = network, cluster, profile
        for name in profile.devices:
            profile.of(name).check_matches(network)
        self._known: dict[tuple[int, int, int, float], tuple[float, float]] = {}
        self._op_shares: dict[int, tuple[float, ...]] = {}
        self._fractions: dict[tuple[StageGeometry, str, bool], tuple[float, ...]] = {}
        self._computed: dict[tuple[object, ...], float] = {}
        self._moved: dict[tuple[object, ...], list[float]] = {}
        self._delays: dict[tuple[object, ...], float] = {}

    def compute_seconds(self, geometry: StageGeometry, device: str, action: Forward | Backward) -> float:
        """Seconds of a forward or backward action on its device: the same for every micro-batch. Devices that share a
        stage wait for each other, so the slowest of them counts."""
        key = (geometry, device, isinstance(action, Forward), action.first, action.last, action.part)
        found = self._computed.get(key)
        if found is None:
            together = self.profile.of(device).together(len(geometry.devices))
            found = self._computed[key] = self._compute_seconds(geometry, device, action) * together
        return found

    def _compute_seconds(self, geometry: StageGeometry, device: str, action: Forward | Backward) -> float:
        key = (geometry, device, isinstance(action, Forward))
        parts = self._fractions.get(key)
        if parts is None:
            found = geometry.fractions if isinstance(action, Forward) else geometry.backward_fractions
            parts = self._fractions[key] = found(device)
        own = self.profile.of(device)
        if not geometry.is_split_inside:
            forward, backward = self.range_seconds(own, device, action.first, action.last, parts[0] * geometry.samples)
            return forward if isinstance(action, Forward) else backward
        total = 0.0
        for op in range(action.first, action.last):
            samples = parts[op - geometry.first] * geometry.samples
            if samples:
                forward, backward = self.range_seconds(own, device, op, op + 1, samples)
                if isinstance(action, Forward):
                    total += forward * self._forward_part(geometry, device, action)
                else:
                    total += backward * _BACKWARD_PART[action.part]
        return total

    def _forward_part(self, geometry: StageGeometry, device: str, action: Forward) -> float:
        """How much of an operator the interior of a tile is, or its rim; adding up partial sums is next to nothing."""
        if not action.part or not isinstance(geometry, TileGeometry):
            return 0.0 if action.part == "sum" else 1.0
        whole = geometry.computed[device][self.network.ops[action.first].outputs[0]].volume
        inside = geometry.interior(device, action.first).volume / whole if whole else 0.0
        return inside if action.part == "interior" else 1.0 - inside

    def range_seconds(
        self, profile: DeviceProfile, device: str, first: int, last: int, samples: float
    ) -> tuple[float, float]:
        """Forward and backward seconds of operators [first, last) for some samples (a fraction: a tile of one)."""
        key = (id(profile), first, last, samples)
        found = self._known.get(key)
        if found is not None:
            return found
        shares = self._shares(profile, device)
        forward = backward = 0.0
        op = first
        while op < last:
            number = self.network.layer_of_op[op]
            layer = self.network.layers[number]
            end = min(last, layer.last)
            part = 1.0 if op == layer.first and end == layer.last else sum(shares[op:end])
            if part:
                ahead, back = profile.layer_seconds(number, samples)
                forward += ahead * part
                backward += back * part
            op = end
        self._known[key] = (forward, backward)
        return forward, backward

    def _shares(self, profile: DeviceProfile, device: str) -> tuple[float, ...]:
        """Each operator's part of its layer's time: measured per layer, divided by the roofline estimate."""
        found = self._op_shares.get(id(profile))
        if found is not None:
            return found
        kind = self.cluster.device(device)
        weights = [op_seconds(op, kind, 1) if op.macs or op.moved_bytes else 0.0 for op in self.network.ops]
        shares: list[float] = []
        for layer in self.network.layers:
            own = weights[layer.first : layer.last]
            total = sum(own)
            shares.extend(weight / total if total else 1.0 / len(own) for weight in own)
        self._op_shares[id(profile)] = tuple(shares)
        return self._op_shares[id(profile)]

    def step_seconds(self, geometry: StageGeometry, device: str, optimizer_slots: int) -> float:
        """The optimiser reads and writes weights, gradients and its own state once: memory-bound."""
        trainable = sum(
            weight.bytes * weight_part(geometry, device, weight)
            for weight in map(self.network.weights.__getitem__, self.network.weights_of(geometry.first, geometry.last))
            if weight.trainable
        )
        return trainable * (3 + 2 * optimizer_slots) / self.cluster.device(device).memory_bytes_per_second

    def copy_seconds(self, device: str, action: Send | Receive | Reduce) -> float:
        """Computing lost to an action's messages and to moving their bytes in and out of the network, where no other
        core does it."""
        facts = self.cluster.device(device)
        each, message = facts.copy_seconds_per_gigabyte / 1e9, facts.message_seconds
        if not each and not message:
            return 0.0
        if isinstance(action, Reduce):
            moved = self._moved_bytes(action)[action.devices.index(device)] if each else 0.0
            return each * moved + message * messages_each(action)
        return each * action.message.bytes + message

    def link(self, source: str, target: str) -> Link:
        return self.cluster.link_between(source, target)

    def _moved_bytes(self, reduce: Reduce) -> list[float]:
        """What each device of a sum sends and receives for it."""
        key = (reduce.devices, reduce.what, reduce.first, reduce.last, reduce.bytes)
        found = self._moved.get(key)
        if found is None:
            sizes, count = flow_bytes(reduce, self.network), len(reduce.devices)
            ends = [numpy.bincount(own, weights=sizes, minlength=count) for own in flow_ends(reduce)]
            found = self._moved[key] = (ends[0] + ends[1]).tolist()
        return found

    def reduction_delay_seconds(self, reduce: Reduce) -> float:
        """Every round waits for the slowest link's delay."""
        key = (reduce.devices, reduce.what)
        found = self._delays.get(key)
        if found is None:
            slowest = self.cluster.link.delay_seconds
            if self.cluster.links:
                devices, (sources, targets) = reduce.devices, flow_ends(reduce)
                pairs = zip(sources.tolist(), targets.tolist())
                slowest = max(self.link(devices[a], devices[b]).delay_seconds for a, b in pairs)
            found = self._delays[key] = rounds_in(reduce) * slowest
        return found
