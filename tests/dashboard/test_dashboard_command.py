"""`manyhands dashboard`, and the page that other commands open."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from example_folders import write_example

from manyhands.cli.dashboard import dashboard_for
from manyhands.dashboard import server
from manyhands.facts.errors import AddressTaken, BadValue

PROGRAM = str(Path(sys.executable).with_name("manyhands"))


@pytest.mark.slow
def test_a_past_run_is_served_until_it_is_stopped(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "runs" / "past", state="ended", done=120)
    words = [PROGRAM, "dashboard", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            name, _, url = process.stdout.readline().strip().rpartition(": ")
            assert name == str(folder.relative_to(tmp_path))
            with urllib.request.urlopen(f"{url}api/view", timeout=20) as answer:
                found = json.load(answer)
            assert found["live"]["state"] == "ended"
            assert found["live"]["run"] == "past"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


def test_commands_say_where_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "PORTS", range(port, port + 1))
        with dashboard_for(None, said.append) as page:  # the usual port is taken: another
            url = page.show(write_example(tmp_path / "run"))
            assert said == [f"Dashboard: {url}"]
            with urllib.request.urlopen(f"{url}api/view", timeout=20) as answer:
                assert json.load(answer)["live"]["run"] == "run"
        with pytest.raises(AddressTaken), dashboard_for(f"127.0.0.1:{port}", said.append):
            pass
    with pytest.raises(BadValue), dashboard_for("nowhere at all", said.append):
        pass


@pytest.mark.parametrize(("option", "quiet"), [("off", False), ("off", True), (None, True)])
def test_none_is_shown_where_nobody_looks(tmp_path: Path, option: str | None, quiet: bool) -> None:
    said: list[str] = []
    with dashboard_for(option, said.append, quiet=quiet) as page:
        assert page.show(tmp_path) is None
    assert not said


def test_the_token_is_said_and_written_nowhere(tmp_path: Path) -> None:
    said: list[str] = []
    with dashboard_for("0.0.0.0:0", said.append) as page:
        shown = page.show(tmp_path)
    assert "?token=" in said[0]
    assert said[0] == f"Dashboard: {shown}?{said[0].partition('?')[2]}"
    assert shown is not None
    assert "token" not in shown
