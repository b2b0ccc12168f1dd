"""Commands that other distributions add to `manyhands`: `manyhands bench` comes from manyhands-bench."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from manyhands.facts.errors import NotInstalled

GROUP = "manyhands.commands"
"""The entry-point group in which a distribution names its commands: `bench = "manyhands_bench.command:app"`."""


def add_installed(app: typer.Typer) -> None:
    """Add every installed command to `app`, and in place of a missing `bench` one that says what to install."""
    installed = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    for point in installed:
        app.add_typer(point.load(), name=point.name)
    if "bench" not in {point.name for point in installed}:
        # It takes any words, so that `manyhands bench core --quick` says the same as `manyhands bench`.
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("bench", context_settings=anything)(_missing_bench)


def _missing_bench() -> None:
    """Measure the figures that manyhands claims. Needs manyhands-bench, which is not installed."""
    raise NotInstalled(
        "manyhands bench needs manyhands-bench, which is not installed.",
        hint="Type, in a checkout of manyhands: pip install ./benchmarks",
    )
