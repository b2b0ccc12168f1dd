"""The shared token, by which new devices join the coordinators of one owner.

    FOLDER/token           what this machine's coordinators ask for; made by the first one that others can join

FOLDER is $MANYHANDS_HOME, else $XDG_CONFIG_HOME/manyhands, else ~/.config/manyhands. The file is one line that only its
owner can read (mode 0600). --token, --token-file and MANYHANDS_TOKEN go before it. A device that joins keeps no token:
its key is remembered (`device_book`). To have a new token: manyhands devices new-token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from manyhands.facts.errors import BadFile
from manyhands.files.documents import home_folder
from manyhands.runtime.private_files import read_private, write_private
from manyhands.transport.security import new_token

COORDINATOR_FILE = "token"
LONGEST_TOKEN = 400


def config_folder() -> Path:
    """Return where tokens and keys are kept: see above."""
    return home_folder("XDG_CONFIG_HOME", ".config")


def made_config_folder() -> Path:
    """The folder, which is there from now on if it can be: a confined worker may write only into folders that exist."""
    folder = config_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def shared_token(report: Callable[[str], None] = lambda text: None) -> str:
    """The shared token, made and kept at the first call. One that cannot be kept is for this run only, which is
    reported."""
    path = config_folder() / COORDINATOR_FILE
    if known := _read(path):
        return known
    made = new_token()
    try:
        write_private(path, f"{made}\n".encode(), replace=False)
    except FileExistsError:  # by another that started at the same moment
        return _read(path) or made
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        report(f"The token cannot be kept in {path} ({reason}): the next run will ask for another.")
    return made


def known_token() -> str:
    """The token that a worker of this machine tries where it was given none; empty: there is none. A worker that has
    joined before needs none (see `device_book`)."""
    return _read(config_folder() / COORDINATOR_FILE)


def token_path() -> Path:
    """Where the coordinators' token is kept."""
    return config_folder() / COORDINATOR_FILE


def read_token_file(path: str) -> str:
    """What --token-file names: one line."""
    found = _read(Path(path))
    if not found:
        raise BadFile(f"{path}: there is no such file.", hint="Write the token into it: (umask 077; cat > FILE)")
    return found


def renew_token() -> Path:
    """Make another token: later coordinators ask for it. Devices that have joined do not need it."""
    path = token_path()
    write_private(path, f"{new_token()}\n".encode(), replace=True)
    return path


def _read(path: Path) -> str:
    """A token; empty where there is none. Others lose the right to read it, if they had it."""
    try:
        content = read_private(path, LONGEST_TOKEN + 2)
    except OSError as error:
        raise BadFile(
            f"{path}: the token cannot be read: {error.strerror or error}.", hint="Give it: --token-file FILE."
        ) from error
    if content is None:
        return ""
    text = content.decode(errors="replace").strip()
    if not 0 < len(text) <= LONGEST_TOKEN or not text.isprintable():
        raise BadFile(f"{path}: is not a token on one line.", hint=f"Delete it, and a new one is made: rm {path}")
    return text
