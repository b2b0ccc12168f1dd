"""Shapes that the package keeps: no function has more than ten parameters, and nothing writes to the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "manyhands"
MOST_PARAMETERS = 10
NOT_YET = {
    "cli/plan.py:plan", "cli/simulate.py:simulate", "cli/split.py:serve", "cli/worker.py:worker",
    "plans/pipelines.py:pipeline_plan", "plans/planning.py:plan", "profiler/measure.py:measure_network",
    "runtime/coordinator.py:__init__", "runtime/elastic_job.py:__init__",
    "split/calibration.py:calibrate", "split/calibration.py:calibrated", "split/controller.py:__init__",
}  # fmt: skip
"""Functions that still have more; the set may only become smaller."""
OWN_ENVIRONMENT = {"runtime/fork_server.py", "runtime/own_folder.py", "runtime/confinement.py"}
"""Processes of workers that take up an environment of their own; the set may only become smaller."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many there are; `**options: Unpack[...]` counts as one, self and cls do not count."""
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    count = sum(name not in ("self", "cls") for name in named)
    return count + (given.vararg is not None) + (given.kwarg is not None)


def test_no_function_has_more_than_ten_parameters() -> None:
    long = {
        f"{path}:{node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and parameters(node) > MOST_PARAMETERS
    }
    assert long <= NOT_YET, sorted(long - NOT_YET)
    assert long >= NOT_YET, f"no longer too long, take them out: {sorted(NOT_YET - long)}"


def test_nothing_writes_to_the_environment() -> None:
    writers = {path for path, tree in trees() for node in ast.walk(tree) if writes_environment(node)}
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
