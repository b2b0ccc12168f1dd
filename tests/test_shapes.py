"""Shapes that the package keeps: few parameters, files of a readable length, no writes to the environment."""

from __future__ import annotations

import ast

import pytest

from source_trees import PACKAGE, source_files, source_nodes, source_text

pytestmark = pytest.mark.xdist_group("source")
MOST_PARAMETERS = 10
MOST_LINES = 400
COMMANDS = {"cli/plan.py:plan", "cli/simulate.py:simulate", "cli/split.py:serve", "cli/worker.py:worker"}
"""Commands: nobody calls them, and typer reads their parameters as the options of the command line."""
OWN_ENVIRONMENT = {"runtime/fork_server.py", "runtime/own_folder.py", "runtime/confinement.py"}
"""A worker's process takes up an environment of its own: the fork server as exec would, confinement the temporary
folder that libraries read from TMPDIR. The set may only become smaller."""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many there are; `**options: Unpack[...]` counts as one, self and cls do not count."""
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    count = sum(name not in ("self", "cls") for name in named)
    return count + (given.vararg is not None) + (given.kwarg is not None)


def test_no_function_has_more_than_ten_parameters() -> None:
    long = {
        f"{path}:{node.name}"
        for path, file in source_files(PACKAGE)
        for node in source_nodes(file)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and parameters(node) > MOST_PARAMETERS
    }
    assert long == COMMANDS


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {path: source_text(file).count("\n") for path, file in source_files(PACKAGE)}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_nothing_writes_to_the_environment() -> None:
    files = source_files(PACKAGE)
    writers = {path for path, file in files for node in source_nodes(file) if writes_environment(node)}
    assert writers == OWN_ENVIRONMENT


def writes_environment(node: ast.AST) -> bool:
    """Whether a node assigns to os.environ, deletes from it, or calls what changes it."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return ast.unparse(node.value) == "os.environ"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = ast.unparse(node.func.value), node.func.attr
        is_change = name in ("update", "setdefault", "pop", "popitem", "clear", "__setitem__")
        return (owner == "os.environ" and is_change) or (owner == "os" and name in ("putenv", "unsetenv"))
    return False


def test_writing_is_found() -> None:
    for text in ("os.environ['A'] = 'b'", "del os.environ['A']", "os.environ.update(A='b')", "os.putenv('A', 'b')"):
        assert any(writes_environment(node) for node in ast.walk(ast.parse(text))), text
    assert not any(writes_environment(node) for node in ast.walk(ast.parse("{**os.environ}; os.environ.get('A')")))
