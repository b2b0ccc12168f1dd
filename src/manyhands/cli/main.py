"""The `manyhands` command. Each subcommand has its own file; this one loads what is named and maps errors to
exit codes."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from manyhands import __version__
from manyhands.cli.commands import add_installed
from manyhands.cli.show import plain
from manyhands.facts.errors import ManyhandsError

INTERNAL_ERROR = 70
INTERRUPTED = 130
COMMANDS = {
    "train": "train", "infer": "infer", "export": "export", "models": "models", "check": "check",
    "decouple": "decouple", "plan": "plan", "simulate": "simulate", "profile": "profile", "worker": "worker",
    "nursery": "fork_server", "doctor": "doctor", "dashboard": "dashboard", "top": "top", "status": "status",
}  # fmt: skip
"""Each command, and its file, which has a function of the file's name."""
HIDDEN = frozenset({"nursery"})
GROUPS = ("devices", "split", "lab")
"""Commands with commands of their own: their files have an `app`."""


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"manyhands {__version__}")
        raise typer.Exit()


def _everywhere(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    del debug, version  # read from the command line by main() and the callback


def app_with(names: Sequence[str]) -> typer.Typer:
    """Return the application with some of the commands of this package."""
    app = typer.Typer(
        name="manyhands",
        help="Many hands make light work: one training and inference machine out of the devices you already own.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_everywhere)
    for name in names:
        if name in COMMANDS:
            file = importlib.import_module(f"manyhands.cli.{COMMANDS[name]}")
            app.command(name, hidden=name in HIDDEN)(getattr(file, COMMANDS[name]))
        else:
            app.add_typer(importlib.import_module(f"manyhands.cli.{name}").app, name=name)
    return app


@functools.cache
def whole_app() -> typer.Typer:
    """Return the application with all commands, those that other distributions add among them."""
    app = app_with((*COMMANDS, *GROUPS))
    add_installed(app)
    return app


@functools.cache
def app_of(words: Sequence[str]) -> typer.Typer:
    """Return the application with the command that a command line names. To load the others and to search other
    distributions for commands takes time: it is done where no command of this package is named."""
    named = next((word for word in words if not word.startswith("-")), "")
    return app_with((named,)) if named in COMMANDS or named in GROUPS else whole_app()


def _explain_usage(error: Any) -> None:
    """Explain a misspelt command or option, and exit with code 2."""
    message = error.format_message()
    if message.startswith("Usage:"):  # called without a command
        print(message)
    else:
        print(f"Error: {message}", file=sys.stderr)
        where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "manyhands"
        print(f"Try: {where} --help", file=sys.stderr)
    sys.exit(error.exit_code)


def main() -> None:
    """Run the command line. `--debug` may stand anywhere."""
    words = sys.argv[1:]
    debug = "--debug" in words or bool(os.environ.get("MANYHANDS_DEBUG"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output without 'µ' is no reason to fail
    if "--debug" in words:
        words.remove("--debug")
    try:
        code = app_of(tuple(words))(args=words, prog_name="manyhands", standalone_mode=False)
        if code == INTERRUPTED:
            print("Stopped.", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)
    except (typer.Abort, KeyboardInterrupt):
        print("Stopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ManyhandsError as error:
        if debug:
            raise
        print(plain(f"Error: {error.message}"), file=sys.stderr)  # its text may come from another machine
        if error.hint:
            print(plain(error.hint), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone (head, less)
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of click's, which typer may carry under its own name
            _explain_usage(error)
        if debug:
            raise
        print(f"Internal error: {type(error).__name__}: {error}", file=sys.stderr)
        print("This is a bug in manyhands. Run again with --debug for the traceback.", file=sys.stderr)
        sys.exit(INTERNAL_ERROR)
