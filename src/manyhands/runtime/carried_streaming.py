"""A stream whose devices carry buffers from sample to sample, like a cache of keys and values.

What is carried lies on the devices only. When they change it is gone: samples that wait or are under way then end with
CarriedLost, and whoever submitted them begins again from their first sample.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from manyhands.executor.messages import ROWS
from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.order import Order
from manyhands.runtime.streaming import Streaming, WaitingSample


class CarriedLost(ManyhandsError):
    """The devices have changed, and what they carried is gone."""


class CarriedStreaming(Streaming):
    """Samples in, answers out, each sample computed on what the samples before it have left behind."""

    carried_since = 0
    """How often what was carried has been lost: samples that belong together are submitted under one such number."""

    def submit_all(self, samples: Sequence[Mapping[str, torch.Tensor]], since: int) -> list[Future[Any]]:
        """Submit samples in this order, at once; return the futures of their answers.

        Raises CarriedLost where `since` is not `carried_since` any more.
        """
        futures: list[Future[Any]] = [Future() for _ in samples]
        with self._change:
            if self._is_over_for_good:
                raise self._refusal()
            if since != self.carried_since:
                raise _lost()
            now = time.monotonic()
            self._waiting.extend(WaitingSample(values, future, now) for values, future in zip(samples, futures))
        self.coordinator.wake()
        return futures

    def ready_in(self, size: int) -> float:
        waits = super().ready_in(size)
        return 0.0 if waits < float("inf") else waits  # a batch with blank rows costs no more than its samples

    def take(self, step: int, size: int) -> Mapping[str, torch.Tensor] | None:
        batch = super().take(step, size)
        return None if batch is None else {**batch, ROWS: torch.tensor([len(self._under_way[step])])}

    def _next(self, order: Order, since: float, error: ManyhandsError, lost: list[str] | None = None) -> Order:
        with self._change:
            self.carried_since += 1
            gone = [*(sample for batch in self._under_way.values() for sample in batch), *self._waiting]
            self._under_way.clear()
            self._waiting.clear()
        for sample in gone:
            if sample.runs or sample.future.set_running_or_notify_cancel():
                sample.future.set_exception(_lost())
        return super()._next(order, since, error, lost)


def _lost() -> CarriedLost:
    return CarriedLost("The devices have changed, and what they carried is gone.", hint="Submit all samples again.")
