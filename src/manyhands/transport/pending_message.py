"""A message that a mailbox expects: how much of it is here, and where its bytes go."""

from __future__ import annotations

from manyhands.transport.timing import Seen


class PendingMessage:
    """A message under way or waiting."""

    __slots__ = ("at_hand", "begun", "came", "complete", "early", "seen", "size", "views")

    def __init__(self, size: int, views: list[memoryview]) -> None:
        self.size = size
        self.views = views
        """The destination of its bytes: the posted one, or memory allocated for it when it came early."""
        self.early: memoryview | None = None
        self.at_hand = 0
        self.begun = False
        self.complete = False
        self.seen: Seen | None = None
        """The moment at which its beginning was read."""
        self.came = 0
        """Bytes of its connection so far, as last reported."""
