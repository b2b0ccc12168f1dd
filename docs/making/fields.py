"""Tables of a record's fields: name, type, default, what it is, read from the source itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import import_module
from typing import Any

from making import words
from making.words import cell


def table_rows(kind: type[Any]) -> list[list[str]]:
    """Return one row for each field. Its description is the comment behind it, or the docstring below it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for node, after in zip(body.body, [*body.body[1:], None]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(node.annotation) or node.target.id.startswith("_"):
            continue
        description = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            description = str(after.value.value)
        elif "#" in (line := lines[(node.end_lineno or 1) - 1]):
            description = line.split("#", 1)[1].strip().removesuffix("fmt: skip")
        default = "" if node.value is None else ast.unparse(node.value)
        rows.append([
            f"`{node.target.id}`", f"`{cell(ast.unparse(node.annotation))}`".replace("&lt;", "<"),
            f"`{default}`" if default else "", cell(description),
        ])  # fmt: skip
    return rows


def table(path: str) -> str:
    """Return the table of a record's fields by its path, such as manyhands.facts.plan.Plan."""
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    return words.table(["field", "type", "default", ""], table_rows(kind))


def cluster_table() -> str:
    """Return the table of a device's fields in a cluster file, whose names and units differ from the record's."""
    from manyhands.facts.cluster_document import _DEVICE
    from manyhands.facts.device import Device

    rows_by_field = {row[0].strip("`"): row for row in table_rows(Device)}
    examples = {
        "gflops": "20", "memory": "4 GB", "memory_rate": "6 GB/s", "cores": "4", "operator_time": "50 us",
        "watts_active": "6.4", "watts_idle": "2.7", "watts_transfer": "1", "up": "19 Mbit/s", "down": "31 Mbit/s",
        "host": "pi4-1", "site": "paris", "copy_time": "0.2 s", "message_time": "50 us", "round_time": "2 ms",
        "compute": "cuda:1", "gpu": "gpu-1", "estimated": "false",
        "source": "my own bench",
    }  # fmt: skip
    rows = [
        ["`name`", "`nano`", "of one device; of several, numbered from 1: `pi4-1`, `pi4-2`; default: the kind"],
        ["`kind`", "`jetson-nano`", "a key of `manyhands devices`; what is left out below comes from there"],
        ["`count`", "`2`", "so many alike"],
        ["`port`", "`100 Mbit/s`", "`up` and `down` at once"],
    ]
    more = {
        "memory": "what a worker may use", "memory_rate": "bytes its memory reads or writes a second",
        "cores": "of the processor", "watts_idle": "while it waits", "up": "what its port sends",
        "down": "what its port takes in",
    }  # fmt: skip
    for field, (record_field, _, _) in _DEVICE.items():
        rows.append([f"`{field}`", f"`{examples[field]}`", rows_by_field[record_field][3] or more[field]])
    return words.table(["field", "for example", ""], rows)
