"""The wheel of manyhands-bench: every module, no result."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from made_results import ROOT

pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that an earlier build leaves nothing in it; links are followed as a build in place does."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "benchmarks", source, ignore=ignored)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_every_module_is_in_the_wheel_and_no_result(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        exhaustive = file.read("manyhands_bench/pipeline/exhaustive.py")
    source = ROOT / "benchmarks/src"
    assert packed == {str(path.relative_to(source)) for path in (source / "manyhands_bench").rglob("*.py")}
    assert exhaustive == (ROOT / "tests/planner/exhaustive.py").read_bytes()


def test_the_wheel_adds_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt")]
        text = file.read(name).decode()
    assert text.split() == ["[manyhands.commands]", "bench", "=", "manyhands_bench.command:app"]
