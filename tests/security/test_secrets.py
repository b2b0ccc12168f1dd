"""Secrets are in no log, no error and no list of processes; what is kept is its owner's alone."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy
import pytest
from looking import assert_private, holding, processes_showing

from manyhands.executor import checkpoint
from manyhands.facts.errors import Refused
from manyhands.facts.optimizer import Optimizer
from manyhands.files.documents import make_folder, opener, write_document, write_text_atomic
from manyhands.observe.append import LineFile
from manyhands.runtime.joining import Joining
from manyhands.runtime.record import RunRecord, new_folder
from manyhands.transport.channel import Listener, connect
from manyhands.transport.security import Security, new_token

PROGRAM = (sys.executable, "-m", "manyhands")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Whatever the mask; in a folder that everybody may look into."""
    tmp_path.chmod(0o755)
    before = os.umask(request.param)
    yield int(request.param)
    os.umask(before)


def test_a_run_is_its_owners(tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "given" / "run", new_folder("train", "tiny")):
        record = RunRecord(folder)
        record.event("started", model="tiny")
        record.step(0, 0, 1.5, 0.1, 8)
        record.close()
        write_document(folder / "config.yaml", {"a": 1})
        write_text_atomic(folder / "plots" / "deeper" / "a.txt", "text")
        checkpoint.save(folder, checkpoint.Checkpoint(3, {}, {}, {}, Optimizer("SGD", lr=0.1), 1))
        assert_private(folder)
        assert len(list(folder.rglob("*"))) >= 8


def test_a_folder_that_was_open_is_closed(tmp_path: Path, umask: int) -> None:
    """A run goes on in a folder of an older version; its group is the owner's choice."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o755)
    RunRecord(folder).close()
    assert mode(folder) == 0o750
    assert mode(folder / "events.jsonl") & 0o007 == 0
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "what is above it is left alone"


def test_the_cache_is_its_owners(tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cache" / "manyhands"
    monkeypatch.setenv("MANYHANDS_HOME", str(home))
    write_document(home / "profiles" / "a.json", {"a": 1})
    assert_private(home)
    home.chmod(0o755)
    write_document(home / "networks" / "b.json", {"b": 1})
    assert mode(home) & 0o007 == 0, "one of an older version is closed"


def test_elsewhere_the_mask_decides(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        write_text_atomic(tmp_path / "new" / "plan.yaml", "a: 1")
        LineFile(tmp_path / "new" / "lines.txt").close()
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o755
    assert mode(tmp_path / "new" / "plan.yaml") == mode(tmp_path / "new" / "lines.txt") == 0o644


def test_logs_of_workers(tmp_path: Path, umask: int) -> None:
    make_folder(tmp_path / "run", is_private=True)
    make_folder(tmp_path / "run" / "workers", is_private=True)
    with open(tmp_path / "run" / "workers" / "a.log", "ab", opener=opener) as file:
        file.write(b"word")
    assert_private(tmp_path / "run")


def test_errors_and_records_do_not_show_tokens() -> None:
    token, other = new_token(), new_token()
    security = Security(token, encrypted=False)
    joining = Joining("127.0.0.1", 1, token)
    listener = Listener("127.0.0.1", 0, security)
    try:
        with pytest.raises(Refused) as caught:
            connect(*listener.address, Security(other, encrypted=False), 5)
    finally:
        listener.close()
    shown = f"{caught.value!r} {caught.value} {security!r} {joining!r} {listener.reasons}"
    assert token not in shown
    assert other not in shown


@pytest.mark.slow
def test_a_run_over_the_network_leaves_no_secret_behind(tmp_path: Path) -> None:
    """As people do it: one command that listens beyond loopback, two that join it; the token in the environment."""
    x = numpy.random.default_rng(1).normal(size=(64, 8)).astype(numpy.float32)
    numpy.savez(tmp_path / "rows.npz", x=x, y=(x.sum(1) > 0).astype(numpy.int64))
    (tmp_path / "mine.py").write_text(
        "import torch\ndef mlp(num_classes):\n    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), "
        "torch.nn.Linear(16, num_classes))\n"
    )
    token = new_token()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ, "MANYHANDS_TOKEN": token, "MANYHANDS_DISCOVERY": "off", "MANYHANDS_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with ExitStack() as stack:

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            output = stack.enter_context(open(tmp_path / f"{name}.txt", "wb"))
            process = subprocess.Popen(
                [*PROGRAM, *words],
                cwd=tmp_path,
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
            return process

        train = start(
            "train", "train", "--listen", f"0.0.0.0:{port}", "--devices", "2", "--model", "mine:mlp",
            "--data", "rows.npz", "--steps", "20", "--out", "run", "--batch-size", "16",
        )  # fmt: skip
        for name in ("left", "right"):
            start(name, "worker", "--join", f"127.0.0.1:{port}", "--name", name, "--threads", "1", "--wait", "120")
        shown: list[str] = []
        for _ in range(2400):
            shown += processes_showing(token)
            if train.poll() is not None:
                break
            train.poll()
            try:
                train.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert train.wait(1) == 0, (tmp_path / "train.txt").read_text()
    assert not shown
    assert not holding(tmp_path / "run", token)
    assert_private(tmp_path / "run")
    for name in ("left", "right"):
        said = (tmp_path / f"{name}.txt").read_text()
        assert "encrypted" in said.lower() or "Joined" in said
        assert token not in said
