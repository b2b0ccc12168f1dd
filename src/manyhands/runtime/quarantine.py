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
    """Evicted processes, by the identifier that each draws when it starts: a new process is not concerned."""

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
        """Let a process join again that was kept out for what it had not done."""
        self._sentences.pop(process, None)

    def refusal(self, process: str, name: str, now: float) -> Refusal | None:
        """What a process is told that is still kept out; None where it may join."""
        sentence = self._sentences.get(process)
        if sentence is None or now >= sentence.until:
            return None
        left = sentence.until - now
        return Refusal(
            f"{name:.64} was evicted from this run: {sentence.reason}.",
            f"It may join again in {left:.0f} s. A worker that is started anew may join at once.",
            again_seconds=left,
        )
