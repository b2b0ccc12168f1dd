"""`manyhands nursery`, the fork server of this machine's workers. A coordinator starts it; users never type it."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from manyhands.facts.errors import BadValue

_NEEDED = (
    "manyhands.cli.worker",
    "manyhands.session.joining",
    "manyhands.runtime.shared_token",
    "manyhands.runtime.service",
)


def fork_server(
    door: Annotated[int, typer.Option("--door")],
    room: Annotated[str, typer.Option("--room")] = "",
    idle: Annotated[float | None, typer.Option("--idle")] = None,
) -> None:
    """Load what workers need, then fork a child for each worker that is requested."""
    from manyhands.cli.main import main

    _serve(door, idle, main)


def _serve(door: int, idle_seconds: float | None, main: Callable[[], None]) -> None:
    gc.disable()  # nearly all of what packages make as they are loaded stays
    from manyhands.runtime.fork_server import IDLE_SECONDS, tend
    from manyhands.runtime.serving import load_everything

    try:
        asking = socket.socket(fileno=door)
    except OSError as error:
        raise BadValue(
            f"--door {door}: {error.strerror}.", hint="Nobody types this; `manyhands worker` joins."
        ) from error
    for name in _NEEDED:
        importlib.import_module(name)
    load_everything()
    gc.enable()
    gc.collect()
    gc.freeze()  # the collector does not touch these objects again, so their memory stays shared
    words = tend(asking, IDLE_SECONDS if idle_seconds is None else idle_seconds)
    if words is not None:
        os._exit(_run(words, main))  # a normal exit would touch all of that memory


def _run(words: list[str], main: Callable[[], None]) -> int:
    """Run the command of a child, and return its exit code."""
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
