"""Errors of batches that come as they are given: what was wrong with which step's, where, and what to type."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.facts.errors import BadData, TimedOut

_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_LIBRARIES = ("site-packages", "dist-packages", "lib/python", "<frozen")
_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\)[^\n]*")


def failed(error: Exception, step: int, name: str, dead_workers: Sequence[int] = ()) -> BadData:
    """Return the error for a batch that could not be made: in this process, or in a loader's worker, which may have
    died over it."""
    text = str(error)
    if isinstance(error, RuntimeError) and "DataLoader worker" in text and "Caught " not in text:
        return died(step, text)
    if isinstance(error, (ConnectionError, EOFError)) and "Caught " not in text and _is_of_a_pipe(error):
        return died(step, f"its connection ended ({type(error).__name__})")
    if dead_workers:
        return died(step, f"process {', '.join(map(str, dead_workers))}")
    if isinstance(error, RuntimeError) and text.startswith("DataLoader timed out"):
        return BadData(
            f"The batch of step {step} was not loaded in time: {text.splitlines()[0]:.200}.",
            hint="The DataLoader's timeout= is that long; a worker hangs, or it should be longer.",
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[-1] if text.startswith("Caught ") and lines else f"{type(error).__name__}: {text}"
    place = _place(text, error)
    return BadData(
        f"The batch of step {step} of the {name} cannot be loaded: {reason[:300]}".removesuffix(": ")
        + (f"\n  at {place}" if place else ""),
        hint="It is raised by the data set, the sampler or the collate_fn, in the line above." if place else "",
    )


def died(step: int, text: str) -> BadData:
    """Return the error for a loader's worker that is gone; `text`: what is known of it."""
    match = _DIED.search(text)
    reason = (match.group(0) if match else text[:200]).rstrip(". ")
    return BadData(
        f"A worker of the DataLoader died before the batch of step {step} was there: {reason}.",
        hint="It may have been killed for memory (fewer num_workers take less), or crashed: num_workers=0 shows where.",
    )


def _is_of_a_pipe(error: BaseException) -> bool:
    """Return whether an error was raised where processes are read from, not by a data set's own connection."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.endswith(("multiprocessing/connection.py", "multiprocessing/queues.py"))


def _place(text: str, error: BaseException) -> str:
    """Return the line where it went wrong: the innermost that is no library's."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(text)]
    frames = frames or [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    ours = str(Path(__file__).parent)
    others = [(file, line) for file, line in frames if not file.startswith(ours)]
    users = [(file, line) for file, line in others if not any(part in file for part in _LIBRARIES)]
    file, line = (users or others or [("", 0)])[-1]
    return f"{file}:{line}" if file else ""


@contextlib.contextmanager
def deaths_named(next_step: Callable[[], int]) -> Iterator[None]:
    """Turn what torch's handler of SIGCHLD raises into the error for a loader's worker that died: it is raised in the
    main thread, whatever that does, if that has ever iterated a DataLoader."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise died(next_step(), str(error)) from error


def too_late(step: int, limit_seconds: float) -> TimedOut:
    """Return the error for a batch that does not come."""
    return TimedOut(
        f"The batch of step {step} was not loaded within {limit_seconds:g} s.",
        hint="The data set hangs, or the disk is very slow; DataLoader(..., timeout=...) sets a limit.",
    )


def another_shape(step: int, shapes: Any, first: Any) -> BadData:
    """Return the error for a batch that does not look like the first one."""
    return BadData(
        f"The batch of step {step} has the shapes {str(shapes)[:300]}; the first had {str(first)[:300]}. A network is "
        "captured and planned for one.",
        hint="Crop, resize or pad to one shape in the data set or the collate_fn. For samples that differ in length, "
        "give the data set, not its loader: mh.train(model, loader.dataset, batch_size=..., lengths=(32, 64, 128)).",
    )


def larger(step: int, samples: int, batch_size: int) -> BadData:
    """Return the error for a batch that is larger than the first, for which everything is planned."""
    return BadData(
        f"The batch of step {step} has {samples} samples; the first had {batch_size}, and none may be larger.",
        hint="Let the first batch be the largest.",
    )


def too_small(step: int | None, samples: int, batch_size: int, reason: str) -> BadData:
    """Return the error for a smaller batch that cannot be trained as it is; `step`: None for the last of an epoch."""
    where = "The last batch of an epoch" if step is None else f"The batch of step {step}"
    return BadData(
        f"{where} has {samples} sample(s); the others have {batch_size}. It cannot be trained: {reason}",
        hint="Leave it out: DataLoader(..., drop_last=True); or take a batch size that divides the number of samples.",
    )
