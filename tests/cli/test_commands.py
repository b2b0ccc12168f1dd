"""Every command as a user types it, in a process of its own: output, JSON, typos, exit codes, speed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from forking import run_command as run

pytestmark = pytest.mark.xdist_group("commands")  # one process divides for all of them
PROGRAM = str(Path(sys.executable).with_name("manyhands"))


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=120, check=False)


def run_json(*words: str, cwd: Path | None = None) -> Any:
    result = run(*words, "--json", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_help_is_fast_and_does_not_import_torch() -> None:
    seconds: list[float] = []
    while not seconds or (min(seconds) > 0.5 and len(seconds) < 30):  # others may have the core for a while
        start = time.perf_counter()
        assert run_program("--help").returncode == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) <= 0.5, seconds
    code = "import sys; from manyhands.cli import main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("words", [["models", "--json"], ["simulat"]], ids=" ".join)
def test_the_program_itself(words: list[str]) -> None:
    """It imports everything anew, and says what processes say that were divided from one."""
    program, divided = run_program(*words), run(*words)
    assert program.stdout == divided.stdout
    assert program.stderr == divided.stderr
    assert program.returncode == divided.returncode


def test_models_lists_the_zoo() -> None:
    listed = {entry["name"]: entry for entry in run_json("models")}
    assert listed["resnet50"]["parameters"] == 25_557_032
    assert {"yolov2-16", "yolov2", "bert-small", "bilstm", "chair", "din", "unet", "tiny"} <= set(listed)
    assert "mobilenetv3-large" in run("models").stdout


@pytest.mark.slow
def test_models_shows_layers() -> None:
    shown = run_json("models", "tiny")
    assert sum(layer["macs"] for layer in shown["layers"]) == shown["macs"]
    assert all(layer["cut_bytes"] > 0 for layer in shown["layers"])
    finer = run_json("models", "tiny", "--granularity", "operators")
    assert len(finer["layers"]) > len(shown["layers"])
    assert finer["macs"] == shown["macs"]


def test_devices_and_presets() -> None:
    listed = run_json("devices")
    assert {"pi3", "pi4", "pi5", "jetson-nano", "a100", "laptop"} <= set(listed["devices"])
    assert all(entry["source"] for entry in listed["devices"].values())
    assert {"pi3x6", "env-a", "env-b", "env-c", "env-d", "decnn-880", "home", "edge-cloud"} <= set(listed["presets"])
    assert len(run_json("devices", "env-c")["devices"]) >= 1
    assert "100 Mbit/s" in run("devices", "env-c").stdout


def test_simulate_writes_trace_and_picture(tmp_path: Path) -> None:
    result = run_json(
        "simulate", "-m", "tiny", "-c", "env-d", "-b", "16", "-p", "samples", "--out", "out", cwd=tmp_path
    )
    assert result["simulated"] is True
    assert result["seconds"] > 0
    assert result["bytes"] == pytest.approx(sum(link["bytes"] for link in result["links"]))
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "send", "receive"} <= names
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert result["warnings"] == ["Times are estimated from the device catalogue, not measured."]


@pytest.mark.slow
def test_plan_file_round_trip(tmp_path: Path) -> None:
    planned = run_json(
        "plan", "-m", "tiny", "-c", "env-a", "-b", "20", "--strategy", "pipeline", "-o", "p.yaml", cwd=tmp_path
    )
    assert yaml.safe_load((tmp_path / "p.yaml").read_text()) == planned["plan"]
    again = run_json("simulate", "-m", "tiny", "-c", "env-a", "-p", "p.yaml", cwd=tmp_path)
    assert again["seconds"] == pytest.approx(planned["simulation"]["seconds"])


def test_plan_auto_lists_what_it_looked_at() -> None:
    planned = run_json("plan", "-m", "tiny", "-c", "env-c", "-b", "32", "--no-what-if")
    seconds = [c["seconds"] for c in planned["candidates"] if c["seconds"] is not None]
    assert seconds == sorted(seconds)
    assert planned["simulation"]["seconds"] == pytest.approx(seconds[0])
    assert any(c["name"].startswith("single") for c in planned["candidates"])


def test_plan_prints_its_schedule() -> None:
    shown = run("plan", "-m", "tiny", "-c", "env-a", "--strategy", "pipeline", "--schedule")
    assert "forward s0 m0" in shown.stdout


@pytest.mark.slow
def test_profile_measures_and_is_reused(tmp_path: Path) -> None:
    first = run_json("profile", "-m", "tiny", "--batch-sizes", "1,2", "-o", "p.json", cwd=tmp_path)
    assert first["source"] == "measured"
    assert [t["samples"] for t in first["layers"][0]["ladder"]] == [1, 2]
    assert run_json("profile", "-m", "tiny", cwd=tmp_path)["layers"] == first["layers"]
    used = run_json("simulate", "-m", "tiny", "-c", "local:2", "-p", "samples", "--profile", "p.json", cwd=tmp_path)
    assert used["warnings"] == []


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["simulat"], 2, "Did you mean 'simulate'"),
        (["simulate", "--modle", "tiny"], 2, "--model"),
        (["simulate", "-m", "resnt18"], 3, "Did you mean resnet18"),
        (["simulate", "-m", "tiny", "-c", "env-x"], 3, "Did you mean env-"),
        (["simulate", "-m", "tiny", "-p", "tilez"], 3, "Did you mean tiles"),
        (["simulate", "-m", "tiny", "-p", "missing.yaml"], 4, "missing.yaml"),
        (["plan", "-m", "tiny", "-b", "10", "--micro-batches", "3"], 5, "10"),
        (["plan", "-m", "tiny", "-c", "local:3", "--order", "1f1c"], 3, "Did you mean 1f1b"),
        (["models", "tiny", "--granularity", "block"], 10, "blocks"),
        (["models", "tiny", "--input", "3by2"], 10, "3x224x224"),
        (["plan", "-m", "no.such.module:factory"], 3, "no.such.module"),
        (["profile", "-m", "tiny", "--batch-sizes", "1,x"], 10, "1,2,4,8"),
    ],
)
def test_mistakes(words: list[str], code: int, said: str) -> None:
    result = run(*words)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback() -> None:
    result = run("simulate", "-m", "resnt18", "--debug")
    assert "Traceback" in result.stderr
    assert result.returncode != 0


def test_a_users_own_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def good():\n"
        "    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())\n"
        "class Bad(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n"
    )
    shown = run_json("models", "mine:good", "--input", "3x16x16", cwd=tmp_path)
    assert shown["parameters"] == 3 * 4 * 9 + 4
    refused = run("models", "mine:Bad", "--input", "3x16x16", cwd=tmp_path)
    assert refused.returncode == 6
    assert "mine.py:6" in refused.stderr


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_so(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "name: small\n"
        "devices: [{name: a, kind: pi3, memory: 1 MB}, {name: b, kind: pi3, memory: 1 MB}]\n"
        "link: {rate: 100 Mbit/s, delay: 1 ms}\n"
    )
    result = run("plan", "-m", "resnet18", "-c", "small.yaml", cwd=tmp_path)
    assert result.returncode == 5
    assert "would hold" in result.stderr
    assert "1 MB" in result.stderr


def test_this_machine_is_measured(tmp_path: Path) -> None:
    measured = run_json("devices", "local:3", "--measure", "-o", "here.yaml", cwd=tmp_path)
    assert len(measured["devices"]) == 3
    assert all(device["estimated"] is False for device in measured["devices"])
    assert "measured" in run("devices", "here.yaml", cwd=tmp_path).stdout
    assert run("devices", "env-a", "--measure").returncode == 10


def test_a_module_says_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(50, 8)\n"
        "        self.head = torch.nn.Linear(8, 2)\n"
        "    def forward(self, ids, mask):\n"
        "        return self.head((self.table(ids) * mask[..., None]).sum(1))\n"
        "def example_batch(batch_size):\n"
        "    return {'ids': torch.randint(50, (batch_size, 7)), 'mask': torch.ones(batch_size, 7)}\n"
    )
    shown = run_json("models", "words:Net", cwd=tmp_path)
    assert shown["parameters"] == 50 * 8 + 8 * 2 + 2
    assert set(shown["layers"][0]["inputs"]) == {"ids", "mask"}


@pytest.mark.slow
def test_out_of_memory_is_refused_and_named(tmp_path: Path) -> None:
    for words in (["plan", "--strategy", "single"], ["simulate", "-p", "single"]):
        result = run(*words, "-m", "yolov2-16", "-c", "pi3x6", "--micro-batches", "1", cwd=tmp_path)
        assert result.returncode == 8, result.stdout
        assert "3.35 GB of 1 GB" in result.stderr
    finer = run_json("plan", "-m", "yolov2-16", "-c", "pi3x6", "--strategy", "single", cwd=tmp_path)
    assert finer["plan"]["micro_batches"] > 1
    anyway = run_json("simulate", "-m", "tiny", "-c", "env-a", "-p", "single", "--overcommit", cwd=tmp_path)
    assert anyway["seconds"] > 0


@pytest.mark.slow
def test_a_plan_file_names_its_network_and_decides(tmp_path: Path) -> None:
    run_json("plan", "-m", "tiny", "-c", "env-a", "--strategy", "samples", "-o", "p.yaml", cwd=tmp_path)
    assert run_json("simulate", "-c", "env-a", "-p", "p.yaml", cwd=tmp_path)["plan"]["network"] == "tiny"
    again = run("simulate", "-c", "env-a", "-p", "p.yaml", "-b", "4", cwd=tmp_path)
    assert again.returncode == 10
    assert "--batch-size cannot be given beside p.yaml" in again.stderr
    other = run("simulate", "-m", "din", "-c", "env-a", "-p", "p.yaml", cwd=tmp_path)
    assert other.returncode == 5
    assert "network is 'tiny'; the network at hand is 'din'" in other.stderr
    (tmp_path / "twice.yaml").write_text((tmp_path / "p.yaml").read_text() + "batch_size: 4\n")
    twice = run("simulate", "-c", "env-a", "-p", "twice.yaml", cwd=tmp_path)
    assert twice.returncode == 4
    assert "'batch_size' is written twice" in twice.stderr


def test_a_document_of_aliases_does_not_hang(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi")]
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, "network: tiny", "batch_size: *i", "stages: []"]))
    result = run("simulate", "-m", "tiny", "-c", "local:2", "-p", "bomb.yaml", cwd=tmp_path)
    assert result.returncode == 4
    assert "its aliases stand for 926177119 values" in result.stderr


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", "/proc/nowhere")
    assert run_json("models", "tiny")["parameters"] == 40_506


@pytest.mark.quick("chair-3x4")
@pytest.mark.parametrize(("model", "shape"), [("bert-small", "4x4"), ("chair", "3x4")])
def test_a_wrong_input_shape_is_the_users_mistake(model: str, shape: str) -> None:
    result = run("models", model, "--input", shape)
    assert result.returncode in (6, 10), result.stderr
    assert "Traceback" not in result.stderr
