"""`manyhands split` as a user types it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_processes import MARK, Command, leftovers
from forking import run_command

from groups import thinned

pytestmark = pytest.mark.xdist_group("split")

QUICK = ("--steps", "8", "--batch-size", "16", "--lr", "0.02")  # measured once for all tests


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command has ended, and every process it started."""
    mark = uuid.uuid4().hex
    result = run_command("split", *words, cwd=cwd, **{MARK: mark})
    assert leftovers(mark) == []
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    (folder / "link.txt").write_text("0 400\n1 300\n")
    (folder / "bad.txt").write_text("one two\n")
    (folder / "held").mkdir()
    (folder / "held" / "config.yaml").write_text("{}")
    return folder


@pytest.mark.quick(every=7)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    thinned(
        [
            (["train", "--k", "4@1"], 10, "begin at epoch 0"),
            (["train", "--k", "many"], 10, "4@0,5@8"),
            (["train", "--bits", "7"], 10, "2, 4, 8, 16 or 32"),
            (["train", "--mode", "heap"], 3, "grouped"),
            (["train", "--rival", "jointdn"], 3, "jointdnn"),
            (["train", "--model", "resnet5"], 3, "resnet50"),
            (["train", "--steps", "0"], 10, "at least 1"),
            (["train", "--steps", "3", "--epochs", "2"], 10, "both say how long"),
            (["train", "--edge-slowdown", "0.5"], 10, "at least 1"),
            (["train", "--trace", "nowhere.txt"], 4, "nowhere.txt"),
            (["train", "--trace", "bad.txt"], 4, "Mbit/s"),
            (["train", "--trace", "link.txt", "--cloud", "localhost:1"], 10, "--trace and --cloud"),
            (["train", "--cloud", "localhost:1"], 10, "--token-file FILE"),
            (["train", "--memory", "lots"], 10, "lots"),
            (["train", "--labels", "moon"], 3, "cloud"),
            (["train", "--lr", "-1"], 10, "more than 0"),
            (["train", "--calibrate", "-1"], 10, "seconds"),
            (["train", "--out", "held"], 4, "manyhands split train --resume held"),
            (["train", "--resume", "nowhere"], 4, "no such run folder"),
            (["train", "--resume", "held"], 10, "not started by manyhands split train"),
            (["train", "--preset", *QUICK], 3, "no hyper-parameters for tiny"),
            (["serve", "--name", "a b"], 10, "cannot name a device"),
            (["serve", "--compute", "tpu"], 10, "cuda:1"),
            (["serve", "--port", "70000"], 2, "65535"),
            ([], 2, "serve"),
        ]
    ),
)
def test_mistakes(words: list[str], code: int, said: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_TOKEN", raising=False)
    done = run(*words, cwd=place)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert said in text
    assert not (place / "runs").exists()


def read(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_split_told_as_json_and_gone_on_with(place: Path) -> None:
    words = ("train", *QUICK, "--cut", "2", "--bits", "8", "--k", "2@0", "--out", "run", "--json")
    found = read(run(*words, cwd=place))
    assert len(found["losses"]) == len(found["staleness"]) == found["steps"] == 8
    assert max(found["staleness"]) <= 2
    assert found["cuts"] == [[0, 2]]
    assert 0 < found["bytes_up"] < 0.3 * found["bytes_down"]
    config = yaml.safe_load((place / "run" / "config.yaml").read_text())
    assert config["split_wish"]["k"] == "2@0"
    assert config["optimizer"]["options"]["lr"] == 0.02
    refused = run("train", "--resume", "run", "--batch-size", "8", cwd=place)
    assert refused.returncode == 10
    assert "--batch-size 16" in refused.stderr
    further = read(run("train", "--resume", "run", "--steps", "12", "--k", "0", "--json", cwd=place))
    assert len(further["losses"]) == 12
    assert further["staleness"] == [0] * 4


def test_a_cut_that_is_none_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("train", "--cut", "nowhere", *QUICK, cwd=tmp_path)
    assert done.returncode == 3
    assert "features#2" in done.stderr, "what there is"
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.slow
def test_a_split_on_a_trace_for_people(place: Path) -> None:
    done = run("train", *QUICK, "--trace", "link.txt", "--delay", "1 ms", "--k", "3", "--cut", "1", cwd=place)
    assert done.returncode == 0, done.stderr
    for text in ("serves both", "What ran where", "K=3", "Gradients late", "up,", "Accuracy on", "order replay"):
        assert text in done.stdout + done.stderr


@pytest.mark.slow
def test_a_cloud_that_is_dialled(tmp_path: Path) -> None:
    cloud = Command(tmp_path, ("split", "serve", "--host", "127.0.0.1", "--port", "0", "--once"))
    line = cloud.wait_for("manyhands split train --cloud")
    found = re.search(r"--cloud (127\.0\.0\.1:[1-9]\d*)", line)
    assert found is not None, line
    wrong = run("train", *QUICK, "--cloud", found.group(1), "--token", "a wrong one", cwd=tmp_path)
    assert wrong.returncode != 0
    assert "token" in wrong.stderr.lower(), wrong.stderr
    token = ("--token-file", str(Path(os.environ["MANYHANDS_HOME"]) / "token"))  # a pipe is not told it
    assert token[1] in cloud.wait_for("The token")
    words = ("--cloud", found.group(1), *token, "--cut", "1", "--k", "2", "--json")
    done = read(run("train", *QUICK, *words, cwd=tmp_path))
    assert done["bytes_up"] > 0
    assert [stage["devices"] for stage in done["plan"]["stages"]] == [["edge"], ["server"]]
    assert cloud.ended() == 0, cloud.text
