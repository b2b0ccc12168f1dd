"""The shared token, by which new devices join the coordinators of one owner.

    FOLDER/token           what this machine's coordinators ask for; made by the first one that others can join

FOLDER is $MANYHANDS_HOME, else $XDG_CONFIG_HOME/manyhands, else ~/.config/manyhands. The file is one line that only its
owner can read (mode 0600). MANYHANDS_TOKEN_FILE names another file, such as a secret that a container is given.
--token, --token-file and MANYHANDS_TOKEN take precedence. A device that joins keeps no token: its key is remembered
(`device_book`). To make a new token: manyhands devices new-token.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from manyhands.facts.errors import BadFile
from manyhands.files.documents import home_folder
from manyhands.runtime.private_files import read_private, write_private
from manyhands.transport.security import new_token

COORDINATOR_FILE = "token"
FILE_VARIABLE = "MANYHANDS_TOKEN_FILE"
"""The environment variable that names the token's file; without it, it is in the folder above."""
LONGEST_TOKEN = 400


def config_folder() -> Path:
    """Return the folder that holds tokens and keys: see above."""
    return home_folder("XDG_CONFIG_HOME", ".config")


def made_config_folder() -> Path:
    """Make the folder if possible, and return it: a confined worker may write only into folders that exist."""
    folder = config_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def shared_token(report: Callable[[str], None] = lambda text: None) -> str:
    """Return the shared token, made and kept at the first call.

    A token that cannot be kept is for this run only, which is reported.
    """
    if token := known_token():
        return token
    path = token_path()
    made = new_token()
    try:
        write_private(path, f"{made}\n".encode(), replace=False)
    except FileExistsError:  # made by another process that started at the same moment
        return _read(path) or made
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        report(f"The token cannot be kept in {path} ({reason}): the next run will ask for another.")
    return made


def known_token() -> str:
    """Return the token that a worker of this machine tries if it was given none; empty: there is none.

    A worker that has joined before needs none (see `device_book`).
    """
    if file := os.environ.get(FILE_VARIABLE):
        return read_token_file(file)
    return _read(token_path())


def token_path() -> Path:
    """Return the path of the coordinators' token."""
    return Path(os.environ.get(FILE_VARIABLE) or config_folder() / COORDINATOR_FILE)


def read_token_file(path: str) -> str:
    """Return the token from the file that --token-file names: one line."""
    token = _read(Path(path))
    if not token:
        raise BadFile(f"{path}: there is no such file.", hint="Write the token into it: (umask 077; cat > FILE)")
    return token


def renew_token() -> Path:
    """Make another token, and return its path: later coordinators ask for it. Devices that have joined need none."""
    path = token_path()
    write_private(path, f"{new_token()}\n".encode(), replace=True)
    return path


def _read(path: Path) -> str:
    """Return a token; empty where there is none. Other users lose the right to read the file, if they had it."""
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
