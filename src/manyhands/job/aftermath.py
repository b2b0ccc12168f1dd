"""Handles errors after the last step: each is reported in a line, and the run keeps its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from manyhands.facts.errors import ManyhandsError
from manyhands.files.documents import write_failed
from manyhands.runtime.record import RunRecord
from manyhands.session.session import Say


@dataclass(frozen=True)
class Aftermath:
    """Collects the problems of a run after training; its weights are in a checkpoint by then."""

    problems: list[str]
    record: RunRecord
    say: Say | None

    @contextlib.contextmanager
    def surviving(self, failure: str) -> Iterator[None]:
        """Turn any error raised in this context into one line: `failure`, and why. Errors of every kind are caught: a
        picture, or a user's data set, is no reason to lose what was trained."""
        try:
            yield
        except Exception as error:
            text = f"{failure}: {reason(error)}"
            self.problems.append(text)
            with contextlib.suppress(Exception):  # the same disk, perhaps
                self.record.event("note", text=text)
            if self.say is not None:
                self.say(text)


def reason(error: Exception) -> str:
    """Return why something failed, in one line."""
    if isinstance(error, OSError):
        error = write_failed(error.filename or "a file", error)
    text = error.message if isinstance(error, ManyhandsError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
