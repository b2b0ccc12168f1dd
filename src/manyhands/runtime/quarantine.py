"""Workers that a run went on without, and for how long they may not join it again.

    quarantine = Quarantine()
    quarantine.begin(process, "it made no progress for 4 s", now)
    quarantine.refusal(process, "pi-1", now)      # a refusal that says when to come back, or None

No thread, and no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.runtime.control_messages import Refusal

FIRST_SECONDS = 60.0
LONGEST_SECONDS = 3600.0


@dataclass(frozen=True)
class _Sentence:
    reason: str
    until: float
    count: int


class Quarantine:
    """The evicted processes, by the identifier that each draws when it starts: a restarted worker is not concerned."""

    def __init__(self) -> None:
        self._sentences: dict[str, _Sentence] = {}

    def begin(self, process: str, reason: str, now: float) -> None:
        """Keep a process out from now on: for a minute the first time, then for twice as long as the time before."""
        if not process:
            return
        count = self._sentences[process].count + 1 if process in self._sentences else 1
        seconds = min(FIRST_SECONDS * 2 ** (count - 1), LONGEST_SECONDS)
        self._sentences[process] = _Sentence(reason, now + seconds, count)

    def end(self, process: str) -> None:
        """Allow a process to join again that was kept out for a fault that was not its own."""
        self._sentences.pop(process, None)

    def refusal(self, process: str, name: str, now: float) -> Refusal | None:
        """Return the refusal for a process that is still kept out; None where it may join."""
        sentence = self._sentences.get(process)
        if sentence is None or now >= sentence.until:
            return None
        seconds_left = sentence.until - now
        return Refusal(
            f"{name:.64} was evicted from this run: {sentence.reason}.",
            f"It may join again in {seconds_left:.0f} s. A worker that is started anew may join at once.",
            again_seconds=seconds_left,
        )
