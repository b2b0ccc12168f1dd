"""The backward pass of one stage as actions of each of its devices: runs of operators, and exchanges between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from manyhands.schedule.actions import Action, Await, Backward, Reduce
from manyhands.schedule.forward_pass import statistics_ops, statistics_sum
from manyhands.schedule.geometry import Exchange, StageGeometry
from manyhands.schedule.packing import Mail, Packed, packed_messages
from manyhands.schedule.reduction import completed_at


class BackwardPass:
    """The backward pass of one stage, device by device.

    `arriving`: gradients from later stages; `leaving`: to earlier ones; `returned`: from the device of this stage that
    computes the loss to the others.
    """

    def __init__(self, geometry: StageGeometry, arriving: Packed, leaving: Packed, returned: Packed) -> None:
        self.geometry = geometry
        self._arriving, self._returned = Mail(arriving), Mail(returned)
        split = geometry.backward_runs
        before, *after = [self._packed(exchange) for exchange in split.exchanges]
        self._before = Mail(before)
        low = geometry.backward_first
        self._runs = [
            ((max(first, low), last), Mail(exchange), Mail(exchange, leaving if first == geometry.first else []))
            for (first, last), exchange in zip(split.runs, after, strict=True)
            if last > low
        ]
        """Operators, what is exchanged after them, and all that leaves a device then; only of runs in which a gradient
        is needed."""

    def _packed(self, exchange: Exchange) -> Packed:
        return packed_messages(
            self.geometry.network, exchange.gradients, "halo-gradient", self.geometry.index, values=exchange.values
        )

    def actions(self, buckets: Mapping[int, Reduce]) -> dict[str, list[Action]]:
        """Return each device's actions; `buckets`: sums of gradients, by the operator at which each is complete."""
        computed = [self._run(*span, buckets, leaves=not leaving.is_empty) for span, _, leaving in self._runs]
        return {device: self._device_actions(device, computed) for device in self.geometry.devices}

    def _device_actions(self, device: str, computed: list[tuple[list[Action], list[Action]]]) -> list[Action]:
        actions = [*self._arriving.receives(device)]
        actions += self._returned.sends(device) + self._returned.receives(device)
        actions += self._before.sends(device) + self._before.receives(device)
        for (_, exchange, leaving), (body, later) in zip(self._runs, computed, strict=True):
            # Others wait for what is sent; the weights' gradients are only waited for by the step.
            actions += body + leaving.sends(device) + later + exchange.receives(device)
        return actions

    def _run(
        self, first: int, last: int, ends: Mapping[int, Reduce], *, leaves: bool
    ) -> tuple[list[Action], list[Action]]:
        """Return the backward pass over operators [first, last), cut at statistics and at the ends of gradient buckets.

        The second list is what follows where something `leaves` after the first. No device waits for weight gradients:
        those of tiles are computed while sums travel, or what leaves.
        """
        geometry, network = self.geometry, self.geometry.network
        stage, high = geometry.index, last
        statistics = {
            op for op in statistics_ops(geometry, first, last)
            if network.tensors[network.ops[op].outputs[0]].differentiable
        }  # fmt: skip
        actions: list[Action] = []
        waiting: list[Action] = []
        """Weight gradients, and buckets that end with them."""
        for op in range(last - 1, first - 1, -1):
            travels_next = leaves if op == first else any(below < op for below in statistics)
            if travels_next and geometry.splits_backward(op):
                if op + 1 < high:
                    actions.append(Backward(stage, 0, op + 1, high))
                actions.append(Backward(stage, 0, op, op + 1, "inputs"))
                waiting.append(Backward(stage, 0, op, op + 1, "weights"))
                waiting += [ends[op]] if op in ends else []
                high = op
                continue
            if op in statistics:
                if op + 1 < high:
                    actions.append(Backward(stage, 0, op + 1, high))
                high = op + 1
                rim_first = leaves and op in geometry.rim_first
                if not waiting and not rim_first:
                    actions.append(statistics_sum(geometry, op, backward=True))
                else:
                    actions.append(statistics_sum(geometry, op, backward=True, later=True))
                    follow = [*waiting, Await(stage, op, op + 1, 0, backward=True)]
                    waiting = []
                    if rim_first:
                        actions.append(Backward(stage, 0, op, op + 1, "rim"))
                        return actions, [*follow, Backward(stage, 0, op, op + 1), *([ends[op]] if op in ends else [])]
                    actions += follow
            if op in ends:
                actions += [Backward(stage, 0, op, high), *waiting, ends[op]]
                high, waiting = op, []
        if high > first:
            actions.append(Backward(stage, 0, first, high))
        if actions and isinstance(actions[-1], Reduce):
            return actions[:-1], [*waiting, actions[-1]]
        return actions, waiting


def gradient_buckets(geometry: StageGeometry, tied: Collection[str]) -> dict[int, Reduce]:
    """Return, for each operator at which a bucket of gradients is complete in backward, the sum of that bucket; weights
    in `tied` are left out."""
    if not geometry.sums_gradients:
        return {}
    network, bucket_bytes = geometry.network, geometry.plan.bucket_bytes
    completed = completed_at(network, geometry.first, geometry.last, tied)
    sizes = {op: sum(network.weights[name].bytes for name in names) for op, names in completed.items()}
    buckets: dict[int, Reduce] = {}
    pending, high, to_come = 0, geometry.last, sum(sizes.values())
    most_last = geometry.last_bucket_bytes(to_come)
    for op in range(geometry.last - 1, geometry.backward_first - 1, -1):
        size = sizes.get(op, 0)
        pending, to_come = pending + size, to_come - size
        is_last_but_one = 0 < to_come <= most_last <= pending and size > 0
        if pending >= bucket_bytes or is_last_but_one or (op == geometry.backward_first and pending):
            devices, places = geometry.devices, geometry.places
            buckets[op] = Reduce(geometry.index, "gradients", op, high, devices, pending, places=places)
            pending, high = 0, op
    return buckets
