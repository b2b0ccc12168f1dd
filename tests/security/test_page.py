"""SECURITY.md: every line of what is defended names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
DEFENDED = PAGE[PAGE.index("## What is defended") : PAGE.index("## What is not defended")]
LINES = [
    line
    for line in DEFENDED.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| attack", "| fault"))
]
NAMED = re.compile(r"`((?:benchmarks/)?tests/[\w/]+\.py)(?:::(\w+))?`")


def test_there_are_lines() -> None:
    assert len(LINES) > 20


@pytest.mark.quick(every=14)
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip()[:60])
def test_a_line_names_tests_that_exist(line: str) -> None:
    attack, defence, tests = (cell.strip() for cell in line.strip("|").split("|"))
    assert attack
    assert defence
    named = NAMED.findall(tests)
    assert named, "no test is named"
    for path, function in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert any(name.startswith("test_") for name in functions), path
        assert not function or function in functions, f"{path} has no {function}"
