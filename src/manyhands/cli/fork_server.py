"""`manyhands nursery`, the fork server: started by whoever starts several workers on this machine. Nobody types it."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from typing import Annotated

import typer

from manyhands.facts.errors import BadValue

_NEEDED = ("manyhands.session.joining", "manyhands.runtime.shared_token", "manyhands.runtime.service")


def fork_server(
    door: Annotated[int, typer.Option("--door")], room: Annotated[str, typer.Option("--room")] = ""
) -> None:
    """Loads what workers need, then has a child for each that is asked for."""
    from manyhands.runtime.fork_server import tend
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
    gc.collect()
    gc.freeze()  # nothing of this is looked at again, so its memory stays shared
    words = tend(asking)
    if words is not None:
        os._exit(_run(words))  # tidying up would look at all of it


def _run(words: list[str]) -> int:
    """The command of a child, and its exit code."""
    from manyhands.cli.main import main

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
