"""The schedule of a plan: policies, each of which returns a device's next action, 'wait', or 'done'.

A fixed order answers from a list known in advance. An event-driven one looks at what has arrived. Simulator and
executor use the same policies; the answers are the log, and the log is the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.schedule.actions import Action
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.interleave import InterleavedOrder, in_chunks
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.orders import passes
from manyhands.schedule.policies import EagerOrder, FixedOrder, Policy
from manyhands.schedule.replay import PlainOrder, ReplayOrder, plain_list


class Schedule:
    """The policies of a plan, one per device, and for a fixed order the whole list in advance."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan, self.network = plan, network
        self.lowering = Lowering(plan, network)
        self.is_fixed = plan.order not in ("eager", "replay", "interleave")
        self.actions: dict[str, tuple[Action, ...]] = {}
        self._chunks: dict[tuple[str, int], tuple[Action, ...]] = {}
        if self.is_fixed:
            self.actions = {device: tuple(self._list(work)) for device, work in self.lowering.work.items()}

    @property
    def _lead(self) -> int:
        """The micro-batches that inputs are sent ahead from their home: as many as the first stage may run ahead."""
        if self.plan.order == "sequential":
            return 1
        return self.plan.warm_up_of(0) if self.plan.order in ("1f1b", "eager") else self.plan.micro_batches

    def _list(self, work: DeviceWork) -> list[Action]:
        plan = self.plan
        if not work.geometries:
            return [action for number in range(plan.micro_batches) for action in work.inputs(number)]
        result = [action for number in range(self._lead) for action in work.inputs(number)]
        backwards = 0
        for kind, number in passes(plan, work.stage):
            if kind == "forward":
                if number + self._lead < plan.micro_batches:
                    result.extend(work.inputs(number + self._lead))
                result.extend(work.forward(number))
            else:
                backwards += 1
                result.extend(work.backward(number, is_last=backwards == plan.micro_batches))
        result.extend(work.finish())
        return result

    def every_action(self, device: str) -> Iterator[Action]:
        """Yield all actions of a round on a device; for an event-driven order, in some order."""
        if self.is_fixed:
            yield from self.actions[device]
            return
        work, count = self.lowering.work[device], self.plan.micro_batches
        if self.plan.order == "replay":
            yield from plain_list(work, count)
            return
        if self.plan.order == "interleave":
            for number in range(count):
                yield from self.chunks(device, number)
            return
        for number in range(count):
            yield from work.inputs(number)
            if work.geometries:
                yield from work.forward(number)
                yield from work.backward(number, is_last=number == count - 1)
        yield from work.finish()

    def policy_of(self, device: str, count: int | None = None) -> Policy:
        """Return a fresh policy for one device. `count`: mini-batches of a last round that has fewer (order replay)."""
        if self.is_fixed:
            return FixedOrder(self.actions[device])
        work = self.lowering.work[device]
        if self.plan.order == "replay":
            mini_batches = self.plan.micro_batches if count is None else count
            if not work.geometries or work.geometries[-1].is_last:
                return PlainOrder(work, mini_batches)
            return ReplayOrder(work, mini_batches, self.plan.replay, self._ahead(work))
        if self.plan.order == "interleave":
            return InterleavedOrder(
                work, self.plan.micro_batches if count is None else count, partial(self.chunks, device)
            )
        if not work.geometries:
            return FixedOrder(self._list(work))
        return EagerOrder(work, self.plan.micro_batches, self.plan.warm_up_of(work.stage), self._lead)

    @property
    def keeps_messages(self) -> bool:
        """Whether the same messages travel in every round, not others like them."""
        return self.is_fixed or self.plan.order == "interleave"

    def chunks(self, device: str, number: int) -> tuple[Action, ...]:
        """Return the actions of a device on a micro-batch, its forward pass in short parts (order interleave)."""
        chunks = self._chunks.get((device, number))
        if chunks is None:
            work = self.lowering.work[device]
            passed = in_chunks(work.forward(number), self.network)
            chunks = self._chunks[device, number] = (*work.inputs(number), *passed)
        return chunks

    def _ahead(self, work: DeviceWork) -> int | None:
        """Return how many mini-batches a plan lets a stage run ahead, if it says so; those beyond K are discarded."""
        return self.plan.warm_up[work.stage] if isinstance(self.plan.warm_up, tuple) else None

    def policies(self) -> dict[str, Policy]:
        """Return a fresh policy for every device."""
        return {device: self.policy_of(device) for device in self.lowering.work}
