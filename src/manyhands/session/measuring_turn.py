"""Turns of runs that measure on one machine: what one measures while another does is too slow by what they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from manyhands.files.machine_lock import machine_lock
from manyhands.session.session import Say, Session

LOCK = "measuring"
TURNS = 5.0
"""How many times its own seconds of measuring a run waits for others to have measured."""


@contextlib.contextmanager
def turn_to_measure(session: Session, seconds: float, say: Say | None = None) -> Iterator[bool]:
    """Wait until no other run measures on this machine, and let none begin meanwhile.

    Yields False where another still measured after TURNS times `seconds`: what is measured now is coarse. Workers that
    were not started here may be on other machines: a run with these does not wait.
    """
    is_shared = False

    def met_another() -> None:
        nonlocal is_shared
        is_shared = session.is_local
        if is_shared and say is not None:
            say("waiting for another run to have measured this machine")

    with machine_lock(LOCK, TURNS * seconds if session.is_local else 0.0, met_another) as is_held:
        yield is_held or not is_shared
