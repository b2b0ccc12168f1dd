"""reference/api.md: every public name of `import manyhands` with its signature and docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

from making import fields, words

START = """# Python

Everything that `import manyhands as mh` offers, with signatures, fields and methods. Names are loaded when first used,
so importing manyhands does not import torch. What is not here is not public and may change. This page is made from the
docstrings by `python docs/generate.py`.

"""
_LONG = 100
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MODULES = re.compile(r"\b(?:manyhands(?:\.\w+)*|collections\.abc|typing|pathlib(?:\._local)?)\.(?=[A-Z])")


def page() -> str:
    import manyhands as mh

    names = sorted((name for name in mh.__all__ if name != "__version__"), key=str.lower)
    functions = [name for name in names if not inspect.isclass(getattr(mh, name))]
    kinds = [name for name in names if inspect.isclass(getattr(mh, name))]
    rows = []
    used: set[str] = set()
    for name in [*functions, *kinds]:  # mh.plan and mh.Plan have the same anchor but for a number
        anchor = f"mh{name.lower()}" + ("-1" if name.lower() in used else "")
        used.add(name.lower())
        rows.append([f"[`mh.{name}`](#{anchor})", _first_sentence(getattr(mh, name))])
    text = START + words.table(["name", ""], rows)
    text += "".join(_function(name, getattr(mh, name)) for name in functions)
    return text + "".join(_kind(name, getattr(mh, name)) for name in kinds)


def _first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return words.cell(re.split(r"(?<=[.:]) ", text)[0].rstrip(":"))


def signature(name: str, thing: Any) -> str:
    """Return a signature on one line, or with each parameter on its own line if that would be long."""
    try:
        declared = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    parts = []
    had_star = False
    for parameter in declared.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not had_star:
            parts.append("*")
            had_star = True
        had_star = had_star or parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_parameter(parameter))
    result = (
        ""
        if declared.return_annotation in (declared.empty, None, "None")
        else f" -> {_plain(_text(declared.return_annotation))}"
    )
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= _LONG:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _parameter(param: inspect.Parameter) -> str:
    star = "*" if param.kind is param.VAR_POSITIONAL else "**" if param.kind is param.VAR_KEYWORD else ""
    kind = "" if param.annotation is param.empty else f": {_plain(_text(param.annotation))}"
    text = f"{star}{param.name}{kind}"
    if param.default is param.empty:
        return text
    default = (
        param.default.__name__
        if inspect.isroutine(param.default) or inspect.isclass(param.default)
        else repr(param.default)
    )
    return f"{text} = {_ADDRESS.sub('', default)}"


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _plain(text: str) -> str:
    """Return an annotation without modules' names."""
    return re.sub(r"\b(?:manyhands(?:\.\w+)*|collections\.abc|typing|pathlib(?:\._local)?)\.(?=[A-Z])", "", text).strip(
        "'\""
    )


def _function(name: str, thing: Any) -> str:
    return f"\n## mh.{name}\n\n```text\n{signature('mh.' + name, thing)}\n```\n\n{words.prose(inspect.getdoc(thing))}"


def _kind(name: str, kind: type[Any]) -> str:
    is_record = hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__")
    text = f"\n## mh.{name}\n\n{words.prose(inspect.getdoc(kind))}"
    if is_record:
        text += "\n" + words.table(["field", "type", "default", ""], fields.table_rows(kind))
    elif "__init__" in vars(kind) and not issubclass(kind, Exception):
        text += f"\n```text\n{signature('mh.' + name, kind)}\n```\n"
    members = [(member, thing) for member, thing in vars(kind).items() if not member.startswith("_")]
    rows = [row for member, thing in members if (row := _member(kind, member, thing))]
    return text + ("\n" + words.table(["method or property", ""], rows) if rows else "")


def _member(kind: type[Any], member: str, thing: Any) -> list[str] | None:
    """Return the row of a method with its signature, or of a property; None for a field, or if undocumented."""
    if isinstance(thing, property) or type(thing).__name__ == "cached_property":
        docstring = inspect.getdoc(thing.fget if isinstance(thing, property) else thing.func)
        return [f"`.{member}`", words.cell(docstring or "")]
    function = getattr(kind, member)
    if not inspect.isroutine(function) or not inspect.getdoc(function):
        return None
    shown = " ".join(signature(f".{member}", function).split()).replace("( ", "(").replace(", )", ")")
    return [f"`{shown}`".replace("|", "\\|"), words.cell(inspect.getdoc(function) or "")]
