"""`manyhands worker`: joins, works, leaves; and what it says when it cannot."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import pytest
from command_processes import Command, leftovers
from forking import run_command

from manyhands.facts.version import __version__
from manyhands.runtime import admission
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.device_book import own_credentials
from manyhands.session.joining import reachable
from manyhands.transport.keys import Role


@pytest.mark.quick(every=14)
@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--join", "127.0.0.1:1", "--wait", "1", "--token", "a token 7"], 15, "127.0.0.1:1 within 1 s"),
        (["--join", "127.0.0.1:1"], 10, "--token-file FILE"),
        (["--join", "127.0.0.1:1", "--token", "t"], 10, "it must have at least 8"),
        (["--join", "127.0.0.1:1", "--token-file", "none"], 4, "none: there is no such file"),
        (["--join", "127.0.0.1:1", "--token", "a token 7", "--token-file", "x"], 10, "Leave out one"),
        (["--join", "nonsense", "--token", "t"], 10, "HOST:PORT"),
        (["--join", "127.0.0.1:99999", "--token", "t"], 10, "at most 65535"),
        (["--join", "127.0.0.1:1", "--token", "a token 7", "--name", "a b"], 10, "cannot name a device"),
        (["--join", "127.0.0.1:1", "--token", "t", "--compute", "tpu"], 10, "cuda:1"),
        (["--join", "127.0.0.1:1", "--token", "t", "--slowdown", "0.5"], 10, "it must be 1 to 1000"),
        (["--join", "127.0.0.1:1", "--token", "t", "--wait", "0"], 10, "--wait is 0"),
        (["--join", "127.0.0.1:1", "--token", "t", "--wait", "inf"], 10, "--stay"),
        ([], 10, "knows no token"),
        (["--token", "a token 7"], 10, "Give --join HOST:PORT"),
    ],
)
def test_mistakes(words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_TOKEN", raising=False)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))  # in which no token is kept
    done = run_command("worker", *words, cwd=tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert said in text
    assert "Traceback" not in text


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "__version__", "9.0")
    with Coordinator() as coordinator:
        words = ("--join", "{}:{}".format(*coordinator.address), "--token", coordinator.token)
        done = run_command("worker", *words, cwd=tmp_path, MANYHANDS_HOME=str(tmp_path / "home"))
    assert done.returncode == 12, done.stdout + done.stderr
    assert f"runs manyhands {__version__}; the coordinator runs 9.0" in done.stderr
    assert "pip install manyhands==9.0" in done.stderr
    assert not (tmp_path / "home" / "devices.json").exists(), "it did not join"


def test_a_service_for_systemd(tmp_path: Path) -> None:
    words = ("--print-service", "--name", "pi4", "--join", "10.0.0.1:7077", "--silo", "my 5%.npz", "--token", "secret")
    done = run_command("worker", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    unit = done.stdout
    command = f'-P -m manyhands worker --stay --name pi4 --join 10.0.0.1:7077 --silo "{tmp_path}/my 5%%.npz"\n'
    assert command in unit
    assert "secret" not in unit, "everybody can read a unit"
    for line in ("Restart=always", "DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict"):
        assert line in unit.splitlines()
    if shutil.which("systemd-analyze"):
        path = tmp_path / "manyhands-worker.service"
        path.write_text(unit)
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
        )
        assert "manyhands-worker.service" not in checked.stderr, checked.stderr


def alone(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A worker that finds no coordinator."""
    joining = ("--join", "127.0.0.1:1", "--token", "a-long-token", "--wait", "0.1", "--threads", "1")
    return run_command("worker", *joining, *words, cwd=folder, MANYHANDS_HOME=str(folder / "home"), **environment)


@pytest.mark.xdist_group("commands")
def test_it_says_how_it_is_confined(tmp_path: Path) -> None:
    assert "Confined: own temp folder, no new privileges" in alone(tmp_path).stdout
    assert "This worker is not confined; switched off." in alone(tmp_path, "--no-confine").stdout
    assert "not confined; switched off" in alone(tmp_path, MANYHANDS_CONFINE="off").stdout


@pytest.mark.xdist_group("commands")
def test_a_misspelt_variable_is_refused(tmp_path: Path) -> None:
    done = alone(tmp_path, MANYHANDS_CONFINE="of")
    assert done.returncode == 10
    assert "MANYHANDS_CONFINE is 'of'; it must be on or off." in done.stderr


@pytest.mark.xdist_group("commands")
def test_a_service_that_is_not_confined(tmp_path: Path) -> None:
    done = run_command("worker", "--print-service", "--no-confine", cwd=tmp_path)
    assert "worker --stay --no-confine\n" in done.stdout


@pytest.mark.slow
def test_a_worker_that_stays_finds_one_coordinator_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told the token once, and neither time where; after that the keys do. Asked to go, it goes."""
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "127.0.0.1")
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    token = uuid.uuid4().hex
    desk = own_credentials(Role.COORDINATOR, folder=tmp_path / "desk")
    once = Command(tmp_path, ("worker", "--token", token, "--name", "pi", "--threads", "1"))
    with Coordinator("0.0.0.0", token=token, credentials=desk) as coordinator:
        coordinator.wait_for(["pi"], 60)
    assert once.ended() == 0, once.text
    assert "next time no token is needed" in once.text
    assert token not in once.text
    stays = Command(tmp_path, ("worker", "--stay", "--threads", "1"))
    for number in range(2):
        with Coordinator("0.0.0.0", token=f"another token {number}", credentials=desk) as coordinator:
            stays.wait_for("Joined 127.0.0.1:")
        stays.wait_for("Waiting for the next one")
    with Coordinator("0.0.0.0", token=token, credentials=desk) as coordinator:
        coordinator.wait_for(1, 60)
        stays.process.send_signal(signal.SIGTERM)
        assert stays.ended() == 0, stays.text
    assert "has left." in stays.text
    for command in (once, stays):
        assert leftovers(command.mark) == []


@pytest.mark.slow
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
    found = re.search(r"manyhands (worker --join 127\.0\.0\.1:[1-9]\d*)", line)
    assert found is not None, line
    return found.group(1).split()


@pytest.mark.slow
def test_two_workers_join_train_and_are_sent_home(tmp_path: Path) -> None:
    train = Command(tmp_path, ("train", "--listen", "127.0.0.1:0", "--devices", "2", "--steps", "3", "--out", "run"))
    words = join_words(train)
    wrong = Command(tmp_path, (*words, "--token", "a wrong one", "--wait", "5"))
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
    assert leaving.ended(20) == 0, leaving.text
    assert "leaving has left." in leaving.text
    assert "Traceback" not in leaving.text
    train.wait_for("leaving left")
    train.kill()
    train.ended()
    assert staying.ended(40) == 11, staying.text
    assert "Waiting 5 s for it to come back." in staying.text
    assert "Traceback" not in staying.text
