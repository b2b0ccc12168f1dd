"""The house is in order: linters, types, import directions, and documents that tell the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from groups import LONGEST, WITH_CLOCKS, WRONG_NUMBERS, group_of, longest_first, unit_of

ROOT = Path(__file__).parent.parent


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        pytest.param(["-m", "mypy"], marks=pytest.mark.xdist_group("mypy")),
    ],
    ids=["ruff check", "ruff format", "mypy --strict"],
)
def test_linters(words: list[str]) -> None:
    result = run(sys.executable, *words)
    assert result.returncode == 0, result.stdout + result.stderr


def test_imports_point_downwards() -> None:
    result = run(str(Path(sys.executable).with_name("lint-imports")))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout


@pytest.mark.xdist_group("house")
def test_groups_of_tests_reach_xdist(request: pytest.FixtureRequest) -> None:
    """Else every process would start its own workers and capture its own networks, and nobody would be told."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run with -n")
    for item in request.session.items:
        group = group_of(item)
        assert not group or item.nodeid.endswith(f"@{group}"), item.nodeid


def test_the_longest_groups_are_there() -> None:
    """Else they would start whenever their turn comes, and be the last to end."""
    marks = "\n".join(path.read_text() for path in ROOT.glob("**/tests/**/*.py"))
    for name in LONGEST:
        assert f'xdist_group("{name}")' in marks or (ROOT / name).is_file(), name


def test_longest_first(request: pytest.FixtureRequest) -> None:
    """Then other groups, then what is in none; tests of a kind keep their order."""
    items = [item for item in request.session.items if item.path == request.node.path]
    turned = items[::-1]
    longest_first(turned)
    alone = [item for item in items[::-1] if not group_of(item)]
    assert request.node in alone
    assert turned[-len(alone) :] == alone
    are_longest = [group_of(item) in LONGEST for item in turned]
    assert are_longest == sorted(are_longest, reverse=True)


def test_tests_of_a_file_stay_together_and_so_do_those_of_a_group() -> None:
    assert unit_of("tests/a/test_b.py::TestC::test_d[x@y]") == "tests/a/test_b.py"
    assert unit_of("tests/a/test_b.py::test_d[x@y]@one machine") == "one machine"
    assert unit_of("tests/a/test_b.py::test_d@faults") == "faults"


def test_every_room_is_under_the_linter() -> None:
    """A new package must be placed in the direction of imports."""
    layers = re.findall(r"manyhands\.(\w+)", (ROOT / "pyproject.toml").read_text())
    rooms = {path.parent.name for path in (ROOT / "src" / "manyhands").glob("*/__init__.py")}
    assert rooms <= set(layers)


def test_ci_runs_the_readme_command() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert "manyhands train" in commands[0]
    assert "pytest" in commands[1]
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-4:] == ["set -x", *commands[1].split(" && ")]
    assert "set -euo pipefail" in script, "one that fails ends it, as && would"
    for path in (ROOT / ".ci").iterdir():
        assert not re.search(r"\beval\b", path.read_text()), f"{path.name} runs text as code"


def test_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in (ROOT / "src" / "manyhands").glob("*/__init__.py"):
        assert f"`{path.parent.name}/`" in text, path.parent.name


@pytest.mark.parametrize("room", ["facts", "graph", "planner", "schedule", "simulator"])
def test_hints_are_for_python_too(room: str) -> None:
    """What both a command and a call from Python may hear of has its options in brackets."""
    for path in (ROOT / "src" / "manyhands" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                words = re.sub(r"\([^)]*\)|manyhands .*", "", "".join(map(str, parts)))
                assert not re.search(r"(^| )--[a-z]", words), f"{path}:{node.value.lineno}"


def test_no_code_on_the_wire() -> None:
    """No pickle anywhere: graphs and weights are data."""
    for path in (ROOT / "src").rglob("*.py"):
        words = re.findall(r"^\s*(?:import|from)\s+(pickle|marshal|dill|cloudpickle|shelve)\b", path.read_text(), re.M)
        assert not words, path
        assert "torch.load(" not in path.read_text(), path


def test_only_tests_with_clocks_get_a_second_try(request: pytest.FixtureRequest) -> None:
    for folder in WITH_CLOCKS:
        assert (ROOT / folder).is_dir(), folder
    for item in request.session.items:
        mark = item.get_closest_marker("flaky")
        assert (mark is not None) == str(item.path.relative_to(ROOT)).startswith(WITH_CLOCKS), item.nodeid
        assert mark is None or mark.kwargs == {"reruns": 1, "rerun_except": list(WRONG_NUMBERS)}, item.nodeid


@pytest.mark.parametrize("differs", [torch.testing.assert_close, numpy.testing.assert_allclose])
def test_wrong_numbers_are_never_tried_again(differs: Callable[..., None]) -> None:
    with pytest.raises(AssertionError, match="|".join(WRONG_NUMBERS)):
        differs(torch.zeros(2), torch.ones(2))
