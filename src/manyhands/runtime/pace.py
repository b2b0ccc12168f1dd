"""The speed at which each stage of a stream computes, from the rounds that are recorded."""

from __future__ import annotations

from manyhands.facts.plan import Plan
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.living import computing


class Pace:
    """The computing time of each stage and device; the stream's thread reports it, other threads read it."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], float] = {}
        """(stage, device) -> seconds of computing in a round."""

    def reported(self, name: str, message: Progress) -> None:
        if message.seen is None:
            return
        for stage in {span.stage for span in message.seen.spans if span.stage >= 0}:
            self._seconds[stage, name] = computing(message.seen.spans, stage)

    def forget(self) -> None:
        """Forget all times: under another plan the stages are different ones."""
        self._seconds.clear()

    def rates(self, plan: Plan) -> list[float | None]:
        """Return for each stage the samples per second that its slowest device could do if it never had to wait."""
        rates: list[float | None] = []
        for number, stage in enumerate(plan.stages):
            seconds = [self._seconds.get((number, name), 0.0) for name in stage.devices]
            rates.append(plan.batch_size / max(seconds) if max(seconds) > 0 else None)
        return rates
