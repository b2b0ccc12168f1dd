"""The command that resumes a run which was stopped or failed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.models.registry import runs_code


def resume_command(command: str, folder: Path, document: Mapping[str, Any]) -> str:
    """Return the command that resumes a run of `manyhands COMMAND`; `document`: its options in config.yaml.

    For a run whose devices join, the command repeats the address and the number of devices: the folder stores these
    too, but the user should see that devices of other machines are meant. It never contains the token: hints are
    logged.
    """
    words = ["manyhands", *command.split(), "--resume", str(folder)]
    if runs_code(str(document.get("model", ""))):
        words += ["--model", str(document["model"])]  # the folder must not decide a name that runs code
    if document.get("listen"):
        words += ["--listen", str(document["listen"])]
        if document.get("devices"):
            most = document.get("max_devices")
            words += ["--devices", f"{document['devices']}:{most}" if most else f"{document['devices']}"]
        if document.get("min_devices", 1) > 1:
            words += ["--min-devices", str(document["min_devices"])]
    if document.get("has_typed_token"):
        words += ["--token", "TOKEN"]
    return shlex.join(words)


def is_needed_again(token: str) -> bool:
    """Return whether a resumed run needs the token again: one from the environment will be set the next time, too."""
    return bool(token) and token != os.environ.get("MANYHANDS_TOKEN", "")
