"""How fast each stage of a stream computes, from the rounds that are looked at."""

from __future__ import annotations

from manyhands.facts.plan import Plan
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.living import computing


class Pace:
    """Told by the stream's thread, asked by others."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], float] = {}
        """(stage, device) -> computing in a round."""

    def reported(self, name: str, message: Progress) -> None:
        if message.seen is None:
            return
        for stage in {span.stage for span in message.seen.spans if span.stage >= 0}:
            self._seconds[stage, name] = computing(message.seen.spans, stage)

    def forget(self) -> None:
        """Another plan: what was a stage is none any more."""
        self._seconds.clear()

    def rates(self, plan: Plan) -> list[float | None]:
        """Of each stage: samples per second that its slowest device could do, were there nothing to wait for."""
        found: list[float | None] = []
        for number, stage in enumerate(plan.stages):
            known = [self._seconds.get((number, name), 0.0) for name in stage.devices]
            found.append(plan.batch_size / max(known) if max(known) > 0 else None)
        return found
