"""A worker's process: joins, works, hands over when it is asked to go, and waits for a coordinator that was lost."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable

from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands.runtime.worker import Joining, Worker


def load_everything() -> None:
    """What PyTorch's optimisers load at their first step, which takes two seconds: not while others wait for it."""
    importlib.import_module("torch._dynamo")


def serve(joining: Joining, say: Callable[[str], None] | None = None) -> None:
    """Work for a coordinator until it ends. One that is lost is waited for, and joined again when it is back.

    SIGTERM asks the worker to leave: others get what it has first. A second one ends it at once.
    """
    where = f"{joining.host}:{joining.port}"
    said = say or (lambda text: None)
    asked = False
    current: list[Worker] = []

    def leave(number: int, frame: object) -> None:
        nonlocal asked
        if asked or not current:
            os._exit(128 + number)
        asked = True
        threading.Thread(target=current[-1].ask_to_leave, name="leaving", daemon=True).start()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
    loss: WorkerLost | None = None
    while True:
        try:
            worker = Worker(joining)
        except TimedOut as error:
            raise loss or error from None
        current.append(worker)
        again = " again" if loss is not None else ""
        said(f"Joining {where}{again} as {worker.endpoint.name}, from {worker.channel.local_host}. Ctrl-C leaves.")
        try:
            worker.run()
        except WorkerLost as error:
            if joining.parent or asked:  # who started it starts another
                raise
            current.clear()  # until then there is nothing to hand over
            said(f"{error.message} Waiting {joining.limit_seconds:g} s for it to come back.")
            loss = error
            continue
        said(
            f"{worker.endpoint.name} has left, as it was asked to."
            if asked
            else f"The coordinator at {where} has ended the run; {worker.endpoint.name} has left."
        )
        return
