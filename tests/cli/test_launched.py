"""`manyhands worker` as launchers start it, end it, and ask how it is: real processes, torchrun's among them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from command_processes import PROGRAM, Command, leftovers
from test_membership import wait_for_step

from manyhands.runtime import admission
from manyhands.runtime.coordinator import Coordinator
from manyhands.transport.security import new_secret

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(port: int, path: str) -> tuple[int, str]:
    """The status and the state; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)["state"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["state"]
    except OSError:
        return 0, ""


def until(port: int, path: str, status: int, limit_seconds: float = 60.0) -> str:
    end = time.monotonic() + limit_seconds
    while (answer := health(port, path))[0] != status:
        assert time.monotonic() < end, answer
        time.sleep(0.05)
    return answer[1]


def training(folder: Path, *words: str) -> tuple[Command, list[str]]:
    """A run without end that waits for workers, and the words by which they join."""
    train = Command(folder, ("train", "--listen", "127.0.0.1:0", "--steps", "1000000", "--out", "run", *words))
    command = re.search(r"manyhands (worker --join \S+)", train.wait_for("manyhands worker --join"))
    assert command is not None
    return train, command.group(1).split()


def test_asked_to_end_it_hands_over_and_says_meanwhile_that_it_is_not_ready(tmp_path: Path) -> None:
    """SIGTERM, as Kubernetes, Docker and Slurm send it: exit code 0, and the run goes on with the other."""
    port = free_port()
    train, join = training(tmp_path, "--devices", "2", "--share", "samples")
    health_words = ("--health-port", str(port), "--grace", "25")
    leaving = Command(tmp_path, (*join, "--name", "leaving", "--threads", "1", *health_words))
    assert until(port, "/healthz", 200)
    assert until(port, "/readyz", 200) == "joined"
    staying = Command(tmp_path, (*join, "--name", "staying", "--threads", "1"))
    wait_for_step(tmp_path / "run", 5)
    leaving.signal(signal.SIGTERM)
    assert leaving.ended(25) == 0, leaving.text
    assert "leaving has left." in leaving.text
    assert health(port, "/healthz") == (0, "")
    train.wait_for("Going on with staying from step")
    train.interrupt()
    assert train.ended(60) == 130, train.text
    assert staying.ended(60) == 0, staying.text
    for command in (train, leaving, staying):
        assert leftovers(command.mark) == []


def test_it_ends_with_its_grace_period_when_nobody_takes_what_it_has(tmp_path: Path) -> None:
    """The coordinator stands still: it takes nothing over."""
    train, join = training(tmp_path, "--devices", "1")
    port = free_port()
    worker = Command(tmp_path, (*join, "--threads", "1", "--grace", "1", "--health-port", str(port)))
    wait_for_step(tmp_path / "run", 5)
    train.process.send_signal(signal.SIGSTOP)
    try:
        worker.signal(signal.SIGTERM)
        assert until(port, "/readyz", 503) == "leaving"
        assert health(port, "/healthz") == (200, "leaving")
        assert worker.ended(5) == 143, worker.text
        assert "has not handed over within 1 s, and ends." in worker.text
    finally:
        train.process.send_signal(signal.SIGCONT)
        train.kill()


def test_torchrun_says_which_rank_has_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report has the worker's exit code, and the worker has said why; each rank takes the next ports."""
    monkeypatch.setattr(admission, "__version__", "9.0")
    token, port = new_secret(), free_port()
    with Coordinator("0.0.0.0", token=token, announce=False) as coordinator:
        words = ["torchrun", "--nproc-per-node", "2", "--no-python", PROGRAM, "worker", "--health-port", str(port)]
        listen = f"0.0.0.0:{coordinator.address[1]}"
        environment = {**os.environ, "MANYHANDS_TOKEN": token, "MANYHANDS_LISTEN": listen}
        words[0] = str(Path(PROGRAM).with_name("torchrun"))
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "the coordinator runs 9.0" in text
    assert re.search(r"exitcode +: 12 ", text), text
    assert "cannot be listened on" not in text


def test_before_it_has_joined_it_ends_at_once(tmp_path: Path) -> None:
    port = free_port()
    words = ("--join", f"127.0.0.1:{free_port()}", "--token", "a long token", "--health-port", str(port))
    worker = Command(tmp_path, ("worker", *words))
    assert until(port, "/healthz", 200)
    while health(port, "/readyz")[1] != "waiting for a coordinator":
        time.sleep(0.05)
    assert health(port, "/readyz")[0] == 503
    worker.signal(signal.SIGTERM)
    assert worker.ended(5) == 143, worker.text
