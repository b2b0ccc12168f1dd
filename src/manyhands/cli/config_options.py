"""Makes a command's options from a configuration: every field with flags is one, with its help, choices and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from manyhands.cli.tokens import token_given
from manyhands.job.config import Config, Field, Option, fields_of

Command = Callable[..., None]


def takes_options_of(config: type[Config]) -> Callable[[Command], Command]:
    """Return a decorator for a command `def name(**arguments)`: typer then sees one parameter for each option.

    Every parameter is None where it was left out, so that a resumed run can tell what was given.
    """

    def decorated(command: Command) -> Command:
        parameters = list(_parameters(config))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorated


def _parameters(config: type[Config]) -> Iterator[inspect.Parameter]:
    for field in fields_of(config).values():
        for name, other in field.option.other_flags.items():
            yield _parameter(name, other, other.text(None))
        if field.option.flags:
            yield _parameter(field.name, field.option, field.help)


def _parameter(name: str, option: Option, help: str) -> inspect.Parameter:
    kind: Any = list[str] if option.is_list else option.kind
    described: Any = typer.Option(*option.flags, help=help, metavar=option.metavar, envvar=option.variable)
    if option.is_argument:
        described = typer.Argument(help=help, metavar=option.metavar, show_default=False)
    annotation = Annotated[kind | None, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_token(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the token that --token, --token-file or the environment gives."""
    from manyhands.job.resuming import is_needed_again

    typed_token = arguments.get("token") or ""
    token = token_given(typed_token, arguments.get("token_file") or "")
    return {**arguments, "token": token, "token_file": None, "needs_token": is_needed_again(typed_token) or None}


def is_unchanged(config: type[Config], arguments: dict[str, Any]) -> bool:
    """Return whether no option was given that decides what is run: it is a demonstration."""
    return not any(arguments.get(name) for name, field in fields_of(config).items() if _decides(field))


def _decides(field: Field) -> bool:
    return field.stored_key is not None
