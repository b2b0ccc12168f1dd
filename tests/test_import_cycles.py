"""No two files of the package need each other: not at their heads, and not inside their functions either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_trees import source_tree

pytestmark = pytest.mark.xdist_group("source")
SOURCE = Path(__file__).parent.parent / "src"


def test_no_file_imports_itself_by_way_of_others() -> None:
    cycles = import_cycles(import_graph(SOURCE))
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_a_cycle_is_found_also_where_an_import_is_inside_a_function(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kitchen.py").write_text("from house import cellar\n")
    (package / "cellar.py").write_text("def wine():\n    from house.kitchen import table\n    return table\n")
    (package / "attic.py").write_text(
        "from typing import TYPE_CHECKING\nimport house.kitchen\nif TYPE_CHECKING:\n    import house.roof\n"
    )
    (package / "roof.py").write_text("import house.attic\n")
    assert import_cycles(import_graph(tmp_path)) == [["house.cellar", "house.kitchen"]]


def import_graph(source: Path) -> dict[str, set[str]]:
    """Return, for every module under `source`, the modules under `source` that it imports when it runs."""
    paths = {_module_name(path, source): path for path in source.rglob("*.py")}
    return {
        name: {target for target in _imported_names(path) if target in paths and target != name}
        for name, path in paths.items()
    }


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(path: Path) -> Iterator[str]:
    """Yield every name that a file imports, and for `from a import b` both `a` and `a.b`, as `b` may be a module.

    Imports under TYPE_CHECKING are left out: they never run.
    """
    pending: list[ast.AST] = [source_tree(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, each sorted by name (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                cycles.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(cycles)
