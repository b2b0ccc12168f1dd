"""Commands of other distributions: added where they are installed, and named where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from manyhands.cli import commands
from manyhands.facts.errors import NotInstalled


class Point:
    """An entry point, as importlib.metadata gives it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self) -> typer.Typer:
        app = typer.Typer()

        @app.callback(invoke_without_command=True)
        def main() -> None:
            typer.echo(f"this is {self.name}")

        return app


def app_with(monkeypatch: pytest.MonkeyPatch, *points: Point) -> typer.Typer:
    def entry_points(**given: Any) -> tuple[Point, ...]:
        assert given == {"group": "manyhands.commands"}
        return points

    monkeypatch.setattr(commands, "entry_points", entry_points)
    app = typer.Typer()
    app.command("other")(lambda: None)
    commands.add_installed(app)
    return app


@pytest.mark.parametrize("words", [["bench"], ["bench", "core", "--quick", "--json"]], ids=" ".join)
def test_a_missing_bench_says_what_to_install(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app_with(monkeypatch), words)
    assert isinstance(result.exception, NotInstalled)
    assert "manyhands-bench, which is not installed" in result.exception.message
    assert "pip install ./benchmarks" in result.exception.hint


def test_a_missing_bench_is_listed_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app_with(monkeypatch), ["--help"])
    assert "bench" in result.output
    assert "manyhands-bench" in result.output


def test_an_installed_command_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(monkeypatch, Point("extra"), Point("bench"))
    assert CliRunner().invoke(app, ["bench"]).output == "this is bench\n"
    assert CliRunner().invoke(app, ["extra"]).output == "this is extra\n"
