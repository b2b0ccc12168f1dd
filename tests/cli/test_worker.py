"""`manyhands worker`: joins, works, leaves; and what it says when it cannot."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from command_processes import Command, leftovers
from forking import run_command

from manyhands.api.joining import reachable


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--join", "127.0.0.1:1", "--wait", "1", "--token", "t"], 15, "127.0.0.1:1 within 1 s"),
        (["--join", "127.0.0.1:1"], 10, "--token TOKEN"),
        (["--join", "nonsense", "--token", "t"], 10, "HOST:PORT"),
        (["--join", "127.0.0.1:99999", "--token", "t"], 10, "at most 65535"),
        (["--join", "127.0.0.1:1", "--token", "t", "--name", "a b"], 10, "cannot name a device"),
        (["--join", "127.0.0.1:1", "--token", "t", "--compute", "tpu"], 10, "cuda:1"),
        (["--join", "127.0.0.1:1", "--token", "t", "--slowdown", "0.5"], 10, "it must be 1 to 1000"),
        ([], 2, "--join"),
    ],
)
def test_mistakes(words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_TOKEN", raising=False)
    done = run_command("worker", *words, cwd=tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert said in text
    assert "Traceback" not in text


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = Command(tmp_path, ("train", "--listen", f"127.0.0.1:{port}"))
        assert command.ended() == 16, command.text
        assert f"127.0.0.1:{port}" in command.text
        assert not (tmp_path / "runs").exists()


def test_every_address_becomes_one_that_others_can_type() -> None:
    assert reachable("10.1.2.3") == "10.1.2.3"
    assert reachable("0.0.0.0") not in ("0.0.0.0", "")


def join_words(train: Command) -> list[str]:
    """The command that a coordinator printed, to be typed as it stands."""
    line = train.wait_for("manyhands worker --join")
    found = re.search(r"manyhands (worker --join 127\.0\.0\.1:[1-9]\d* --token \S+)", line)
    assert found is not None, line
    return found.group(1).split()


def test_two_workers_join_train_and_are_sent_home(tmp_path: Path) -> None:
    train = Command(tmp_path, ("train", "--listen", "127.0.0.1:0", "--devices", "2", "--steps", "3", "--out", "run"))
    words = join_words(train)
    wrong = Command(tmp_path, (*words[:3], "--token", "wrong", "--wait", "5"))
    workers = [Command(tmp_path, (*words, "--name", name, "--threads", "1")) for name in ("left", "right")]
    assert wrong.ended() == 12, wrong.text
    assert "token" in wrong.text
    assert train.ended(90) == 0, train.text
    assert "left" in train.text
    for worker in workers:
        assert worker.ended(20) == 0, worker.text
        assert "has ended the run" in worker.text
        assert leftovers(worker.mark) == []


@pytest.mark.slow
def test_a_worker_leaves_when_interrupted_and_notices_a_dead_coordinator(tmp_path: Path) -> None:
    train = Command(tmp_path, ("train", "--listen", "127.0.0.1:0", "--devices", "3"))
    words = join_words(train)
    leaving, staying = (Command(tmp_path, (*words, "--name", name, "--wait", "5")) for name in ("leaving", "staying"))
    for _ in range(2):
        train.wait_for("joined from")
    leaving.interrupt()
    assert leaving.ended(20) == 130, leaving.text
    assert "Traceback" not in leaving.text
    train.wait_for("leaving lost")
    train.kill()
    train.ended()
    assert staying.ended(40) == 11, staying.text
    assert "Waiting 5 s for it to come back." in staying.text
    assert "Traceback" not in staying.text
