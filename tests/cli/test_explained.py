"""`manyhands plan` explains itself, as a user sees it: the picture, what limits it, why others lost, what if."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forking import run_command
from PIL import Image

pytestmark = pytest.mark.xdist_group("commands")  # one process divides for all of them
HOME = """
name: flat
devices:
  - {name: fast, kind: jetson-nano, port: 50 Mbit/s}
  - {name: slow, kind: pi4, port: 50 Mbit/s}
link: {rate: 50 Mbit/s, delay: 1 ms}
"""


@pytest.mark.slow
def test_text_names_every_device_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(HOME)
    words = ("plan", "-m", "tiny", "-c", "flat.yaml", "-b", "16", "--picture", "plan.png")
    shown = run_command(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    picture = lines[next(n for n, line in enumerate(lines) if line.startswith(" layer ")) :]
    for device in ("fast", "slow"):
        assert sum(line.startswith(f" {device} ") for line in picture[: picture.index("")]) == 1
    limits = [line for line in lines if line.startswith("What limits it: ")]
    assert len(limits) == 1
    assert "twice as fast (simulated again): " in limits[0]
    for words_said in ("Plans looked at", "chosen", "computes alone", "What if", "ten times as fast", "one more"):
        assert words_said in shown.stdout
    with Image.open(tmp_path / "plan.png") as drawn:
        assert drawn.width == 1600


def test_json_carries_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(HOME)
    shown = run_command(
        "plan", "-m", "tiny", "-c", "flat.yaml", "-b", "16", "--best", "memory", "--no-what-if", "--json", cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    told = found["explanation"]
    assert found["best"] == "memory"
    assert told["binding"]["kind"] == "memory"
    assert told["binding"]["bytes"] == max(one["peak_bytes"] for one in found["simulation"]["devices"].values())
    assert told["binding"]["bytes"] == found["candidates"][0]["score"]
    assert sum(limit["part"] for limit in told["limits"]) == pytest.approx(1.0)
    assert [one["name"] for one in told["runners_up"]] == [one["name"] for one in found["candidates"][1:]]
    assert all(one["reason"] for one in told["runners_up"])
    assert told["what_if"] == []


def test_plans_for_inference_say_why_too(tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(HOME)
    words = ("plan", "-m", "tiny", "-c", "flat.yaml", "--for", "latency", "--no-what-if")
    shown = run_command(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "What limits it: " in shown.stdout
    assert "of the answer" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--picture", "plan.pdf"], "--picture is 'plan.pdf'"),
        (["--for", "latency", "--best", "memory"], "--best cannot be given with --for"),
        (["--best", "beauty"], "beauty"),
    ],
)
def test_slips_of_the_pen(words: list[str], said: str, tmp_path: Path) -> None:
    shown = run_command("plan", "-m", "tiny", "-c", "local:2", *words, cwd=tmp_path)
    assert shown.returncode in (3, 10)
    assert said in " ".join(shown.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_output_without_blocks_gets_letters(tmp_path: Path) -> None:
    """The program itself: what an output takes is settled when it starts."""
    words = ("plan", "-m", "tiny", "-c", "env-a", "-b", "20", "--share", "pipeline", "--no-what-if")
    shown = subprocess.run(
        [sys.executable, "-m", "manyhands", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert not set("█▒▚░·") & set(shown.stdout)
    assert "# all of it" in shown.stdout
