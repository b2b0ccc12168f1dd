"""reference/cli.md: every command with its arguments and options, as typer knows them."""

from __future__ import annotations

from typing import Any

from making.words import cell, table

START = """# Commands

Every command of `manyhands`, with all its arguments and options. This page is made from the program itself by
`python docs/generate.py`, so it says what `--help` says.

- Every listing has `--json`. `--debug`, anywhere on the line, shows the traceback of an error.
- Exit codes: 0 for success, 2 for a misspelt command or option, 130 after Ctrl-C (a worker leaves, with 0), 70 for a
  bug of manyhands; all others are in [errors.md](errors.md).
- The options of `train`, `split train` and `infer` beside their Python keywords: [options.md](options.md).
- `MANYHANDS_HOME` is the folder that holds everything manyhands keeps between runs: see
  [files.md](files.md#what-is-kept-between-runs).

"""


def page() -> str:
    from typer.main import get_command

    from manyhands.cli.main import whole_app

    root = get_command(whole_app())
    commands = list(_commands(root, "manyhands"))
    rows = [[f"[`{path}`](#{path.replace(' ', '-')})", _first_sentence(command.help)] for path, command in commands]
    return (
        START
        + table(["command", "what it does"], rows)
        + "".join(_section(path, command) for path, command in commands)
    )


def _commands(group: Any, path: str) -> Any:
    """Yield (path, command) depth first, in the order in which --help lists them, without the groups themselves."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _first_sentence(text: str | None) -> str:
    lines = " ".join((text or "").split())
    return cell(lines.split(". ")[0].rstrip(".") + ("." if lines else ""))


def _section(path: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden and "--help" not in parameter.opts
    ]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)])
    text = f"\n## {path}\n\n    {usage}\n\n{_prose(command.help)}\n"
    if arguments:
        rows = [[f"`{_argument(parameter)}`", cell(_help_of(parameter))] for parameter in arguments]
        text += "\n" + table(["argument", ""], rows)
    if options:
        text += "\n" + table(["option", "default", ""], [_option(parameter) for parameter in options])
    return text


def _is_shown(option: Any) -> bool:
    return not option.hidden and "--help" not in option.opts


def _prose(text: str | None) -> str:
    """Return a help text as paragraphs; passages that click does not wrap (\\b) become blocks."""
    paragraphs = []
    for paragraph in (text or "").strip().split("\n\n"):
        if paragraph.lstrip().startswith("\b"):
            paragraphs.append("\n".join("    " + line for line in paragraph.replace("\b", "").strip("\n").splitlines()))
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _argument(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _help_of(parameter: Any) -> str:
    return " ".join((getattr(parameter, "help", None) or "").split())


def _option(option: Any) -> list[str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = "" if default in (None, "", False) or callable(default) or type(default).__name__ == "Sentinel" else default
    if isinstance(shown, (list, tuple)):
        shown = ", ".join(map(str, shown))
    shown = f"`{shown}`" if str(shown) else ""
    help_text = _help_of(option)
    if option.envvar:
        help_text += f" Also: the environment's `{option.envvar}`."
    return [names, shown, cell(help_text)]
