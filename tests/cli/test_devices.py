"""`manyhands devices`: who has joined, and what is done about them; and where tokens are printed."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.runtime.audit import AuditLog
from manyhands.runtime.device_book import DeviceBook
from manyhands.transport.keys import Role

PI, DESK = bytes([1]) * 32, bytes([2]) * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MANYHANDS_TOKEN", raising=False)
    return tmp_path / "home"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "manyhands", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_those_who_have_joined(home: Path) -> None:
    assert "No device has joined this one" in run("devices").stdout
    assert not home.exists(), "to look makes no key"
    DeviceBook(home).join(PI, "pi", Role.WORKER)
    DeviceBook(home).join(DESK, "desk", Role.COORDINATOR)
    shown = run("devices")
    assert re.search(r"pi\s+.*worker\s+.*([0-9a-f]{4}-){7}[0-9a-f]{4}", shown.stdout), shown.stdout
    listed = json.loads(run("devices", "--json").stdout)
    assert [(one["names"], one["roles"]) for one in listed["joined"]] == [
        (["pi"], ["worker"]), (["desk"], ["coordinator"]),
    ]  # fmt: skip
    assert listed["own_fingerprint"] is None
    assert "pi3" in listed["devices"], "the catalogue is there, too"


@pytest.mark.slow
def test_revoke_forget_allow_and_the_log(home: Path) -> None:
    book = DeviceBook(home)
    book.join(PI, "pi", Role.WORKER)
    AuditLog(home).record("joined", name="pi")
    wrong = run("devices", "revoke", "po")
    assert wrong.returncode == 10
    assert "No device called 'po' has joined; known devices: pi." in wrong.stderr
    done = run("devices", "revoke", "pi")
    assert done.returncode == 0, done.stderr
    assert "manyhands devices new-token" in done.stdout
    assert book.devices()[0].revoked
    assert "(revoked)" in run("devices").stdout
    assert run("devices", "allow", "pi", "queen").returncode == 10
    assert "coordinator" in run("devices", "allow", "pi", "coordinator").stdout
    assert run("devices", "forget", "pi").returncode == 0
    assert book.devices() == []
    told = json.loads(run("devices", "log", "--json").stdout)
    assert [one["event"] for one in told] == ["joined", "revoked", "allowed", "forgotten"]
    assert "revoked  name=pi" in run("devices", "log").stdout


@pytest.mark.slow
def test_a_new_token_is_not_printed(home: Path) -> None:
    done = run("devices", "new-token")
    assert done.returncode == 0
    assert (home / "token").read_text().strip() not in done.stdout
    assert str(home / "token") in done.stdout


@pytest.mark.slow
def test_what_is_no_command_is_a_cluster(home: Path) -> None:
    assert "env-c" in run("devices", "env-c").stdout
    assert "revoke" in run("devices", "--help").stdout
    assert run("devices", "no-such-thing").returncode != 0


WORDS = ("doctor", "--listen", "127.0.0.1:0", "--wait", "1")


@pytest.mark.slow
def test_a_pipe_is_not_told_the_token(home: Path) -> None:
    done = run(*WORDS)
    token = (home / "token").read_text().strip()
    assert token not in done.stdout + done.stderr
    assert f"is in {home / 'token'}" in done.stderr
    assert "manyhands worker --join 127.0.0.1:" in done.stderr
    assert "--token " not in done.stderr, "nothing that a list of processes would show"


@pytest.mark.slow
def test_a_terminal_is_told_it(home: Path) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", *WORDS], stdin=slave, stdout=slave, stderr=slave, close_fds=True
    )
    os.close(slave)
    shown = _read(master, process)
    token = (home / "token").read_text().strip()
    assert f"The token, which a new device asks for: {token}" in shown
    assert re.search(r"manyhands worker --join 127\.0\.0\.1:\d+\s", shown)


@pytest.mark.slow
def test_at_a_terminal_it_is_asked_for_and_not_shown(home: Path) -> None:
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "manyhands", "worker", "--join", "127.0.0.1:1", "--wait", "0.2"]
    process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    shown = _read(master, process, until=b"not shown)")
    os.write(master, b"kettle-7719\n")
    shown += _read(master, process)
    assert "Token of the coordinator" in shown
    assert "kettle-7719" not in shown
    assert "127.0.0.1:1" in shown


def _read(master: int, process: subprocess.Popen[bytes], until: bytes = b"\0") -> str:
    found, end = b"", time.monotonic() + 50
    while until not in found and time.monotonic() < end:
        try:
            data = os.read(master, 4096)
        except OSError:  # it has ended
            break
        if not data:
            break
        found += data
    if until not in found:
        process.wait(20)
    return found.decode(errors="replace")
