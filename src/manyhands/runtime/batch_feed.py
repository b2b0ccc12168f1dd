"""Feeds the devices of a run: batches in order, or all samples before the first step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from manyhands.executor.feeder import Feeder
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.runtime.member import Member
from manyhands.runtime.order import Order

Batch = tuple[int, Any, Any]
Batches = Iterator[Batch]


class BatchFeed:
    """Checks batches and sends each device its part of each."""

    def __init__(self, order: Order, feeder: Feeder, first: int, others: Mapping[Graph, Feeder] | None = None) -> None:
        """`others`: the feeders of batches of other lengths, by their graphs."""
        self.feeder, self._order = feeder, order
        self._feeders = {order.graph: feeder, **(others or {})}
        self.sent = first
        """Steps whose batches were sent."""
        self.inputs: dict[int, Any] = {}
        """Inputs of the steps under way."""
        self.waits: dict[int, float] = {}
        """Step -> seconds for which the devices had nothing to do because its batch was not loaded yet."""
        self._idle_since: float | None = None

    def has_next(self, batches: Batches, *, is_idle: bool) -> bool:
        """Return whether the next batch is loaded, and one for this run; `is_idle`: the devices wait for it."""
        look = getattr(batches, "is_ready", None)
        is_ready = look is None or look()
        if is_idle and not is_ready and self._idle_since is None:
            self._idle_since = time.monotonic()
        return is_ready and self.fits(batches)

    def fits(self, batches: object) -> bool:
        """Return whether the next batch has the size that the plan is for, as far as it is known: a smaller one is for
        another generation."""
        look = getattr(batches, "samples_at", None)
        samples = look(self.sent) if look is not None else None
        return samples in (None, self._order.plan.step_size)

    def send(self, batches: Batches, round_first: int) -> None:
        """Send the next batch; `round_first`: the first step of its round."""
        step, inputs, targets = next(batches)
        assert step == self.sent, "batches come in order"
        graph = self._order.graph_at(step)
        if self._order.preload is None:
            check_labels(graph, targets, f"The targets of step {step}")
        if self._idle_since is not None:
            self.waits[step], self._idle_since = time.monotonic() - self._idle_since, None
        self.inputs[step] = inputs
        if self._order.rates is not None:
            self.feeder.send_rates(round_first, self._order.rates.at(step), step - round_first)
        self._feeders[graph].send(round_first, inputs, targets, step - round_first)
        self.sent += 1

    @property
    def may_send(self) -> bool:
        """Whether the numbers of the next step are known, which may follow from a validation before it."""
        return self._order.rates is None or self._order.rates.is_known(self.sent)

    def needs_preload(self, name: str, member: Member) -> bool:
        """Return whether a device still needs its part of all samples."""
        return self.feeder.resident_key(name) not in ("", member.resident_dataset)

    def preload(self, members: dict[str, Member], step: int) -> None:
        """Send the devices of a run their parts of all samples, where those are to be resident and are not yet."""
        if self._order.preload is not None:
            check_labels(self._order.graph, self._order.preload.targets)
        for name, member in members.items():
            if self.needs_preload(name, member):
                self.feeder.preload(name, step)
