"""Gets the token for a command: as typed, from a file, from the environment, or from a prompt that does not echo."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        help="A file with the token on one line: unlike --token, it shows in no list of processes and no history. "
        "MANYHANDS_TOKEN_FILE names it, too.",
    ),
]


def token_given(token: str, token_file: str) -> str:
    """Return the token of --token or MANYHANDS_TOKEN, or of the file; empty: none was given."""
    if not token_file:
        return token
    from manyhands.facts.errors import BadValue
    from manyhands.runtime.processes import TOKEN_VARIABLE
    from manyhands.runtime.shared_token import read_token_file

    if token:
        raise BadValue(
            f"A token was given, and --token-file {token_file}.", hint=f"Leave out one (or unset {TOKEN_VARIABLE})."
        )
    return read_token_file(token_file)


def ask_for_token(whose: str) -> str:
    """Ask for the token at the terminal without echoing it; empty if there is no terminal."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        return ""
    from getpass import getpass  # it prompts only once echo is off, and keeps earlier input

    return getpass(f"Token of {whose} (it is not shown): ", stream=sys.stderr).strip()
