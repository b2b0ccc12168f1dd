"""The reports of rounds to the coordinator; that of a round whose loss a GPU still computes goes out after the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from manyhands.executor.executor import Executor
from manyhands.executor.round_result import RoundResult
from manyhands.runtime.assignment import seen_round
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.worker_status import arrivals_at
from manyhands.transport.transport import ConnectedEndpoint


class RoundReports:
    """Reports the rounds of one generation, in order."""

    def __init__(
        self, executor: Executor, generation: int, endpoint: ConnectedEndpoint, send: Callable[[Progress], None]
    ) -> None:
        self._executor, self._generation, self._endpoint, self._send = executor, generation, endpoint, send
        self._late: tuple[RoundResult, int] | None = None
        """The last round and the steps done after it, if its loss is not known yet."""
        self._settled = 0.0
        """The time when the loss of a round was last waited for."""

    def add(self, result: RoundResult, steps_done: int, *, at_once: bool) -> None:
        """Report a round, now or after the next one; `at_once`: now."""
        self.finish()
        self._late = (result, steps_done)
        if at_once or result.pending is None or self._executor.recorder.is_traced:
            self.finish()

    def finish(self) -> None:
        """Report the last round, if that is still to be done."""
        if self._late is None:
            return
        (result, steps_done), self._late = self._late, None
        if result.pending is not None:
            self._executor.settle(result)
            now = time.monotonic()
            result.seconds, self._settled = max(result.seconds, now - (self._settled or now)), now
        self._send(
            Progress(
                self._generation, steps_done - 1, result.seconds, tuple(result.losses), tuple(result.staleness),
                arrivals_at(self._endpoint), dict(self._endpoint.sent_bytes), seen_round(self._executor),
                tuple(result.sums), tuple(n if math.isfinite(n) else None for n in result.grad_norms),
                result.not_finite_from,
            )
        )  # fmt: skip
