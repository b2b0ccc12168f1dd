"""The package's own source, read and parsed once for all tests that look into it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "manyhands"
BENCHMARKS = ROOT / "benchmarks" / "src" / "manyhands_bench"


@cache
def source_text(path: Path) -> str:
    return path.read_text()


@cache
def source_tree(path: Path) -> ast.Module:
    return ast.parse(source_text(path))


@cache
def source_nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(source_tree(path)))


def source_files(*roots: Path) -> list[tuple[str, Path]]:
    """Return every file under the folders, each with its path inside its folder."""
    return [(path.relative_to(root).as_posix(), path) for root in roots for path in sorted(root.rglob("*.py"))]
