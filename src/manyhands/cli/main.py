"""The `manyhands` command. Each subcommand has its own file; this one collects them and maps errors to exit codes."""

from __future__ import annotations

import functools
import io
import os
import sys
from typing import Any

import typer

from manyhands import __version__
from manyhands.cli import (
    check,
    dashboard,
    decouple,
    devices,
    doctor,
    export,
    fork_server,
    infer,
    lab,
    models,
    plan,
    profile,
    simulate,
    split,
    status,
    top,
    train,
    worker,
)
from manyhands.cli.commands import add_installed
from manyhands.cli.show import plain
from manyhands.facts.errors import ManyhandsError

INTERNAL_ERROR = 70
INTERRUPTED = 130

app = typer.Typer(
    name="manyhands",
    help="Many hands make light work: one training and inference machine out of the devices you already own.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"manyhands {__version__}")
        raise typer.Exit()


@app.callback()
def _everywhere(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    del debug, version  # read from the command line by main() and the callback


app.command("train")(train.train)
app.command("infer")(infer.infer)
app.command("export")(export.export)
app.command("models")(models.models)
app.command("check")(check.check)
app.command("decouple")(decouple.decouple)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("profile")(profile.profile)
app.command("worker")(worker.worker)
app.command("nursery", hidden=True)(fork_server.fork_server_command(lambda: main()))
app.command("doctor")(doctor.doctor)
app.command("dashboard")(dashboard.dashboard)
app.command("top")(top.top)
app.command("status")(status.status)
app.add_typer(devices.app, name="devices")
app.add_typer(split.app, name="split")
app.add_typer(lab.app, name="lab")


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


@functools.cache
def whole_app() -> typer.Typer:
    """Return the application with the commands that other distributions add."""
    add_installed(app)
    return app


def _is_built_in(words: list[str]) -> bool:
    """Return whether the first word names a command of this package: then no other distribution is searched, which
    takes time."""
    named = next((word for word in words if not word.startswith("-")), "")
    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    return named in commands


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
        if not _is_built_in(words):
            whole_app()
        code = app(args=words, prog_name="manyhands", standalone_mode=False)
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
