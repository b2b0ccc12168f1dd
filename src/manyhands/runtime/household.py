"""The token that a household's devices share, kept so that nobody types it twice.

    FOLDER/token           what this machine's coordinators ask for; made by the first one that others can join
    FOLDER/worker-token    what this machine's worker last joined with

FOLDER is $MANYHANDS_HOME, else $XDG_CONFIG_HOME/manyhands, else ~/.config/manyhands. Both files are one line that only
their owner can read (mode 0600). --token and MANYHANDS_TOKEN go before them. To have a new token, delete the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from manyhands.engine.security import new_token
from manyhands.facts.errors import BadFile

COORDINATOR_FILE = "token"
WORKER_FILE = "worker-token"
LONGEST_TOKEN = 400
_OTHERS = 0o077


def config_folder() -> Path:
    """Where tokens are kept: see above."""
    if home := os.environ.get("MANYHANDS_HOME"):
        return Path(home).expanduser()
    xdg = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".config") / "manyhands"


def made_config_folder() -> Path:
    """The folder, which is there from now on if it can be: a confined worker may write only into folders that exist."""
    folder = config_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def household_token(say: Callable[[str], None] = lambda text: None) -> str:
    """What workers of this household must know; made and kept at the first call. One that cannot be kept is for this
    run only, which is said."""
    path = config_folder() / COORDINATOR_FILE
    if known := _read(path):
        return known
    made = new_token()
    try:
        _write(path, made, replace=False)
    except FileExistsError:  # by another that started at the same moment
        return _read(path) or made
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        say(f"The token cannot be kept in {path} ({said}): the next run will ask for another.")
    return made


def known_token() -> str:
    """What a worker of this machine tries where it was told none; empty: it knows none."""
    folder = config_folder()
    return _read(folder / WORKER_FILE) or _read(folder / COORDINATOR_FILE)


def remember(token: str) -> Path | None:
    """A worker has joined with this token; returns the file where that is news and could be kept."""
    path = config_folder() / WORKER_FILE
    with contextlib.suppress(BadFile, OSError):
        if known_token() == token:
            return None
    with contextlib.suppress(OSError):
        _write(path, token, replace=True)
        return path
    return None


def _read(path: Path) -> str:
    """A token; empty where there is none. Others lose the right to read it, if they had it."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                with contextlib.suppress(OSError):
                    os.fchmod(file.fileno(), 0o600)
            content = file.read(LONGEST_TOKEN + 2)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise BadFile(
            f"{path}: the token cannot be read: {error.strerror or error}.", hint="Give it: --token TOKEN."
        ) from error
    text = content.decode(errors="replace").strip()
    if not 0 < len(text) <= LONGEST_TOKEN or not text.isprintable():
        raise BadFile(f"{path}: is not a token on one line.", hint=f"Delete it, and a new one is made: rm {path}")
    return text


def _write(path: Path, token: str, *, replace: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(f"{token}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
