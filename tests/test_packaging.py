"""The package as users get it: what is in the wheel, how large it is, what a command loads, and that it runs."""

from __future__ import annotations

import compileall
import email
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from installed_sizes import needed, sizes
from manyhands.facts.extras import EXTRAS
from manyhands.facts.version import __version__

ROOT = Path(__file__).parent.parent
MOST_BYTES = 60e6
"""Of everything that is installed, torch and numpy and what they need apart."""
MOST_IMPORTS = 5.0
"""What `manyhands --help` takes at most: so many times the processor time of importing Typer alone (about 3)."""
HEAVY = {"torch", "numpy", "matplotlib", "PIL", "psutil", "cryptography", "zeroconf", "yaml", "safetensors", "asyncio"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build has left must not get into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = folder.glob("*.whl")
    return found


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [one for one in file.namelist() if one.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(file.read(name))


# The wheel


def test_everything_is_in_the_wheel(wheel: Path) -> None:
    """All of the package as it lies in src/: code, data, types, the dashboard's page; and nothing else."""
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        licences = [name for name in file.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    source = ROOT / "src"
    there = {
        str(path.relative_to(source))
        for path in (source / "manyhands").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
    assert {"manyhands/py.typed", "manyhands/data/digits.npz"} <= packed
    assert len(licences) == 1


def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    found = metadata_of(wheel)
    assert wheel.name == f"manyhands-{__version__}-py3-none-any.whl"
    assert (found["Version"], found["Requires-Python"]) == (__version__, ">=3.11")
    assert found["License-Expression"] == "Apache-2.0"
    named = [text for text in found.get_all("Classifier") or [] if re.search(r"3\.\d", text)]
    assert [text[-4:] for text in named] == ["3.11", "3.12", "3.13"]
    core = needed(found.get_all("Requires-Dist") or [])
    assert not {"matplotlib", "pillow", "pyzmq", "tensorboard", "onnx", "pytest"} & set(core)


def test_extras_are_those_that_errors_and_the_doctor_name() -> None:
    assert {extra.name for extra in EXTRAS} | {"test"} == set(PROJECT["optional-dependencies"])


def test_the_core_is_small(wheel: Path, tmp_path: Path) -> None:
    """As installed here: the distributions' own files, compiled; and the wheel, compiled."""
    brought = sizes(metadata_of(wheel).get_all("Requires-Dist") or [])
    assert {"cryptography", "msgspec", "rich", "typer"} <= set(brought)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    compileall.compile_dir(tmp_path, quiet=2)
    own = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    listed = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in brought.items())
    print(f"manyhands {own / 1e6:.1f} MB and {sum(brought.values()) / 1e6:.1f} MB: {listed}")
    assert own + sum(brought.values()) <= MOST_BYTES, listed


# What a command loads

_LOADED = """
import json, sys
sys.argv[0] = "manyhands"
from manyhands.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def loaded_by(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", _LOADED, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.strip().splitlines()[-1]))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("words", [("--help",), ("--version",), ("train", "--help"), ("devices", "pi3x6", "--json")])
def test_nothing_heavy_is_loaded_before_it_is_needed(words: tuple[str, ...]) -> None:
    light = HEAVY - {"yaml", "asyncio"} if words[0] == "devices" else HEAVY | {"rich", "msgspec"}
    assert not light & loaded_by(*words)


def test_help_comes_at_once() -> None:
    """Processor time beside that of importing Typer alone, in turns: what else runs here must not count."""
    help_seconds, import_seconds = [], []
    for _ in range(5):
        import_seconds.append(_processor_seconds("-c", "import typer.main"))
        help_seconds.append(_processor_seconds("-m", "manyhands", "--help"))
    assert min(help_seconds) <= MOST_IMPORTS * min(import_seconds), (help_seconds, import_seconds)


def _processor_seconds(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# Without extras

_WITHOUT = """
import importlib.abc, sys

class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "PIL"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Without())
sys.argv[0] = "manyhands"
from manyhands.cli.main import main
main()
"""


def without_extras(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MANYHANDS_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_simulating_without_pictures(tmp_path: Path) -> None:
    done = without_extras(tmp_path, "simulate", "--model", "tiny", "--cluster", "pi3x6", "--out", "here")
    assert done.returncode == 0, done.stderr
    assert "pip install 'manyhands[plots]'" in done.stdout
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["cluster.yaml", "plan.yaml", "trace.json"]


@pytest.mark.slow
def test_a_picture_that_was_asked_for_is_an_error_with_the_command(tmp_path: Path) -> None:
    done = without_extras(tmp_path, "plan", "--model", "tiny", "--picture", "plan.png")
    assert done.returncode == 18
    assert "pip install 'manyhands[plots]'" in done.stderr


# In an environment of its own


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, torch and the core's packages of here, and no extra."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, capture_output=True, timeout=120)
    program = folder / "venv" / "bin" / "python"
    install = [program, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    linked = folder / "linked"
    linked.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"matplotlib|PIL|pillow|__editable__|_*manyhands|.*\.pth|pip|__pycache__", path.name):
            (linked / path.name).symlink_to(path)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "here.pth").write_text(f"{linked}\n")
    return folder


@pytest.mark.slow
def test_the_installed_package_trains(fresh: Path) -> None:
    """Away from its source, without matplotlib: it says once how to have pictures, and everything else is there."""
    program = str(fresh / "venv" / "bin" / "manyhands")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["MANYHANDS_HOME"] = str(fresh / "cache")

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *words], cwd=fresh, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    assert "Usage: manyhands" in typed("--help").stdout
    assert typed("--version").stdout.strip() == f"manyhands {__version__}"
    done = typed("train", "--devices", "2", "--steps", "3", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("pip install 'manyhands[plots]'") == 1
    assert "3 steps, loss" in done.stdout
    assert (fresh / "run" / "trace.json").exists()
    assert not list(fresh.glob("run/plots/*.png"))
    health = json.loads(typed("doctor", "--workers", "0", "--json").stdout)
    assert health["fit"], health
    assert any("manyhands[plots]" in check["fix"] for check in health["checks"])
