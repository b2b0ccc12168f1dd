"""Errors for users. Each kind has its own exit code, and a hint says what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_TEXT = 8000
"""The most characters of a message or hint; a name in a hostile file may be very long."""


def _page(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


class ManyhandsError(Exception):
    """An error that a user can fix. `exit_code` tells scripts which kind it was."""

    exit_code = 1
    is_lasting = False
    """Whether the same command fails again until a person changes something: starting it again is of no use."""
    is_before_proof = False
    """Whether it was met on connecting to a peer that had not proven yet that it has the token: what it says may be
    of any port of the network, and is for this device alone."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        message, hint = _page(message), _page(hint)
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UnknownName(ManyhandsError):
    """A model, device, preset, layer or option that does not exist."""

    exit_code = 3
    is_lasting = True


class BadFile(ManyhandsError):
    """A file that is missing, unreadable, or not what its name says."""

    exit_code = 4
    is_lasting = True


class DiskFull(BadFile):
    """A file for which there is no room: what it needs, what is free."""

    is_lasting = False


class BadPlan(ManyhandsError):
    """A plan that contradicts itself, its network or its cluster."""

    exit_code = 5
    is_lasting = True


class CaptureFailed(ManyhandsError):
    """A module that torch.export, or the allow-list, cannot take."""

    exit_code = 6
    is_lasting = True


class BadGraph(ManyhandsError):
    """A stored graph that is refused: an operator off the list, wrong shapes, absurd sizes."""

    exit_code = 7
    is_lasting = True


class OutOfMemory(ManyhandsError):
    """A plan that does not fit a device's memory, or a worker that requested more than there was."""

    exit_code = 8


class GpuOutOfMemory(OutOfMemory):
    """A GPU with less memory than a worker requested there: a job tries once more with more micro-batches."""


class BadSchedule(ManyhandsError):
    """A schedule that deadlocks or leaves a message unmatched."""

    exit_code = 9
    is_lasting = True


class BadValue(ManyhandsError):
    """A value out of its limits: what it was, what it may be."""

    exit_code = 10
    is_lasting = True


class WorkerLost(ManyhandsError):
    """A device that died, or whose connection broke, while others needed it."""

    exit_code = 11


class Refused(ManyhandsError):
    """A worker that may not join: wrong token, another version, a name in use."""

    exit_code = 12
    is_lasting = True


class BadData(ManyhandsError):
    """A data set that cannot be trained on: too short, unreadable, of the wrong shape."""

    exit_code = 13
    is_lasting = True


class NotFinite(ManyhandsError):
    """A loss that is not finite: at which step, and in which layer it began."""

    exit_code = 14
    is_lasting = True


class DataNotFinite(NotFinite):
    """Data that holds a number that is not finite: at which step, and in which input."""


class TimedOut(ManyhandsError):
    """A wait that exceeded its limit: for what, from whom, how long."""

    exit_code = 15


class AddressTaken(ManyhandsError):
    """A host and port that cannot be listened on."""

    exit_code = 16


class LabError(ManyhandsError):
    """A lab that cannot be built, found or kept to its settings."""

    exit_code = 17


class NotInstalled(ManyhandsError):
    """A package of an extra that is needed but not installed."""

    exit_code = 18
    is_lasting = True


class Unfit(ManyhandsError):
    """A fault found by the doctor that would break a run."""

    exit_code = 19


USAGE = 2
"""The exit code for a command or option that does not exist, or a value that it cannot take."""


def lasting_codes() -> tuple[int, ...]:
    """Return the exit codes after which a command is not to be started again as it was: restart policies name them."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, ManyhandsError)]
    return tuple(sorted({USAGE, *(kind.exit_code for kind in kinds if kind.is_lasting)}))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint naming the closest known names, or all of them when there are few."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(close) + "?"
    return "Known: " + ", ".join(names) if len(names) <= 30 else ""


def unknown(kind: str, name: str, names: Iterable[str]) -> UnknownName:
    """Return the error for a name that is not in `names`."""
    return UnknownName(f"There is no {kind} called '{name}'.", hint=did_you_mean(name, names))


def error_named(kind: str, message: str, hint: str) -> ManyhandsError:
    """Return an error that came over the wire as text; an unknown kind becomes a plain one."""
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, ManyhandsError):
        return error_class(message, hint=hint)
    return ManyhandsError(message, hint=hint)
