"""The examples: each can be imported, and run as it says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_says_how_it_is_run_and_starts_nothing_when_imported(path: Path) -> None:
    text = path.read_text()
    assert f"python examples/{path.name}" in text
    assert callable(runpy.run_path(str(path))["main"])


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_trains(path: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines():
        if "loss" in line:
            first, last = line.split("loss ")[1].split(";")[0].split(" -> ")
            assert float(last) < float(first), line
    assert "loss" in ran.stdout
