"""`manyhands doctor` as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from command_processes import PROGRAM

from manyhands.facts.errors import Unfit


def typed(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "doctor", *words], cwd=folder, env={**os.environ, "MANYHANDS_DISCOVERY": "127.0.0.1"} | environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_what_would_break_a_run_is_the_exit_code(tmp_path: Path) -> None:
    done = typed(tmp_path, "--workers", "0", "--json", MANYHANDS_HOME="/proc/nowhere", MANYHANDS_DISCOVERY="off")
    assert done.returncode == Unfit.exit_code
    found = json.loads(done.stdout)
    assert (found["fit"], found["broken"]) == (False, 1)
    states = {check["subject"]: check["state"] for check in found["checks"]}
    assert states["cache folder"] == "broken"
    assert states["torch"] == states["Python"] == states["run folder"] == "ok"
    assert "MANYHANDS_HOME" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_healthy_machine(tmp_path: Path) -> None:
    """Plain lines, one for each check, and no word of what could not be."""
    done = typed(tmp_path, MANYHANDS_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok       link (local-1, local-2): ") for line in lines)
    assert lines[-1].startswith("0 broken, ")
    assert lines[-1].endswith("A run would work here.")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_other_devices_join(tmp_path: Path) -> None:
    """A worker that is typed joins the doctor, and leaves when it is done."""
    environment = {**os.environ, "MANYHANDS_TOKEN": "a token for the doctor alone", "MANYHANDS_DISCOVERY": "off"}
    with subprocess.Popen(
        [PROGRAM, "doctor", "--listen", "127.0.0.1:0", "--devices", "2", "--json"], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = next(line for line in process.stderr if "--join" in line)
        address = said.split("--join ")[1].split()[0]
        words = [PROGRAM, "worker", "--join", address, "--name"]
        devices = [subprocess.Popen([*words, name], cwd=tmp_path, env=environment) for name in ("pi-1", "pi-2")]
        out, _ = process.communicate(timeout=120)
    assert [device.wait(20) for device in devices] == [0, 0]
    found = json.loads(out)
    assert process.returncode == 0, found
    assert {check["where"] for check in found["checks"]} >= {"pi-1", "pi-2", "pi-1, pi-2"}
    assert len(found["links"]) == 2
