"""No call of an operator that a graph may make ends the process that runs it; every valid one is taken."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.operator_calls import CALLS
from fuzz.operator_documents import completed, document, loaded, run
from manyhands.graph import ops

ROOT = Path(__file__).parents[2]


def fuzzed(inputs: int, seed: int, failures: Path, *words: str) -> tuple[int, str]:
    """The command over operators alone: its exit code, and what it says. Its children run what is hostile."""
    program = [sys.executable, "-m", "tests.fuzz", "--target", "operators", "--inputs", str(inputs), "--seed",
               str(seed), "--failures", str(failures), *words]  # fmt: skip
    found = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    return found.returncode, found.stdout + found.stderr


def test_every_operator_has_a_valid_call() -> None:
    assert set(CALLS) == ops.ALLOWED


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("part", range(8))
def test_valid_calls_are_taken_and_run(part: int) -> None:
    for target in sorted(CALLS)[part::8]:
        for call in CALLS[target]:
            graph = loaded(completed(document(target, call)))
            assert graph.nodes[-1].target == target
            problem = run(graph, random.Random(1), wild=False)
            assert problem is None or "ZeroDivisionError" in str(problem), (target, call, problem)


@pytest.mark.slow
def test_hostile_calls_end_no_process(tmp_path: Path) -> None:
    """Were arguments not checked, input 147 of this seed would end its process with a segmentation fault."""
    code, told = fuzzed(160, 1, tmp_path, "--processes", "1")
    assert code == 0, told
    assert "0 faults" in told.splitlines()[-1]


@pytest.mark.slow
def test_many_hostile_calls_end_no_process(tmp_path: Path) -> None:
    code, told = fuzzed(100_000, 7, tmp_path)
    assert code == 0, told
