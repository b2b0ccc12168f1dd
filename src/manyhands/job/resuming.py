"""How to go on with a run that was stopped or failed, as somebody types it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.models.registry import runs_code


def resume_command(command: str, folder: Path, typed: Mapping[str, Any]) -> str:
    """The command that goes on with a run of `manyhands COMMAND`; `typed`: what it was started with, by field.

    A run whose devices join says again where, and how many it waits for: the folder keeps that too, but whoever types
    the command should see that devices of other machines are meant. The token itself is never in it: hints are logged.
    """
    words = ["manyhands", *command.split(), "--resume", str(folder)]
    if runs_code(str(typed.get("model", ""))):
        words += ["--model", str(typed["model"])]  # a name that a folder may not decide
    if typed.get("listen"):
        words += ["--listen", str(typed["listen"])]
        if typed.get("devices"):
            most = typed.get("max_devices")
            words += ["--devices", f"{typed['devices']}:{most}" if most else f"{typed['devices']}"]
        if typed.get("min_devices", 1) > 1:
            words += ["--min-devices", str(typed["min_devices"])]
    if typed.get("has_typed_token"):
        words += ["--token", "TOKEN"]
    return shlex.join(words)


def is_typed_token(token: str) -> bool:
    """Whether a token was typed: one of the environment is there the next time, too."""
    return bool(token) and token != os.environ.get("MANYHANDS_TOKEN", "")
