"""The commands are put together once in a test process: typer does it anew at each call, for 0.3 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer.main
import typer.testing


class OneCommandTree:
    """Stands in for typer's `get_command`: commands made of the same application are made once."""

    def __init__(self, get_command: Callable[[typer.Typer], Any]) -> None:
        self.get_command = get_command
        self.made: dict[Any, tuple[typer.Typer, Any]] = {}

    def __call__(self, app: typer.Typer) -> Any:
        key = (id(app), *_commands_of(app))
        if key not in self.made:
            self.made[key] = (app, self.get_command(app))  # the application too: its id is not to be another's
        return self.made[key][1]


def _commands_of(app: typer.Typer) -> tuple[int, ...]:
    """What an application is made of: commands may be added to it."""
    inside = [
        item for group in app.registered_groups if group.typer_instance for item in _commands_of(group.typer_instance)
    ]
    return (*(id(command.callback) for command in app.registered_commands), *inside)


def make_commands_once() -> None:
    if not isinstance(typer.main.get_command, OneCommandTree):
        made_once = OneCommandTree(typer.main.get_command)
        typer.main.get_command = made_once  # type: ignore[assignment]
        typer.testing._get_command = made_once  # type: ignore[attr-defined]
