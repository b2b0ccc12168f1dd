"""reference/options.md: every option of training, splitting and inference, from the configurations themselves."""

from __future__ import annotations

from typing import Any

from making.words import cell, table
from manyhands.job.config import Field, sections_of

START = """# Options of jobs

Every option of the three jobs, as the command line and Python spell it. This page is made by `python docs/generate.py`
from `TrainConfig`, `SplitConfig` and `InferConfig`: the only places where an option, its default, its limits and its
help are written.

A run that is resumed may give another value where the column says *free*. *same*: another value is refused, since it
decides what is computed. *stored*: the command line takes the value of the run folder, and refuses another one.

"""
HEAD = ["option", "Python keyword", "default", "resumed run", ""]


def page() -> str:
    """Return the page: one table for each section of each configuration."""
    from manyhands.inference.config import InferConfig
    from manyhands.split.config import SplitConfig
    from manyhands.training.config import TrainConfig

    commands = {"train": TrainConfig, "split train": SplitConfig, "infer": InferConfig}
    return START + "\n".join(section(command, config) for command, config in commands.items())


def section(command: str, config: type[Any]) -> str:
    """Return the tables of one configuration."""
    text = f"## {config.__name__}\n\n`manyhands {command}`. {(config.__doc__ or '').strip()}\n"
    for part, fields in sections_of(config):
        rows = [row for field in fields for row in _rows(field)]
        if rows:
            text += f"\n### {command}: {_title(part)}\n\n{table(HEAD, rows)}"
    return text


def _title(part: type[Any]) -> str:
    return " ".join((part.__doc__ or "").split()).rstrip(".").lower()


def _rows(field: Field) -> list[list[str]]:
    rows = [_row(field, other.flags, other.text(None)) for other in field.option.other_flags.values()]
    if field.option.flags or field.option.is_keyword:
        rows.append(_row(field, field.option.flags, field.option.text(None)))
    return rows


def _row(field: Field, flags: tuple[str, ...], text: str) -> list[str]:
    option = field.option
    keyword = f"`{field.name}`" if option.is_keyword else ""
    default = _default(field.command_default if flags else field.default)
    if flags and option.is_keyword and field.command_default != field.default and not option.default_text:
        default = f"{default}; in Python {_default(field.default)}"
    note = f"{text} {option.in_python and 'Python: ' + option.in_python}".strip()
    resumed = option.on_resume if field.stored_key is not None else ""
    return [", ".join(f"`{flag}`" for flag in flags), keyword, default, resumed, cell(note)]


def _default(value: Any) -> str:
    return "" if value in ("", ()) else f"`{value}`"
