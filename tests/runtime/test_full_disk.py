"""A disk that is full: one clear error, whole files, and a run that goes on once there is room."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from manyhands.api import asked
from manyhands.executor import checkpoint
from manyhands.facts.errors import BadFile, DiskFull
from manyhands.facts.optimizer import Optimizer
from manyhands.files import documents
from manyhands.files.documents import write_document
from manyhands.observe.append import LineFile, Metrics
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.record import RunRecord
from real_runs import BATCH, Ran, assert_same, names, shared, train, workers

STEPS = 6
NUMBERS = r"No space left on device; [\d.]+ k?B are needed, [\d.]+ [kMGT]?B are free\."


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(1) as coordinator:
        yield coordinator


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_for_safetensors(*_: Any, **__: Any) -> Any:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def check_whole(folder: Path) -> None:
    """Whatever is there is whole, and nothing is half made."""
    for path in folder.rglob("*"):
        assert not path.name.startswith("."), path
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix in (".jsonl", ".csv"):
            assert path.read_text() == "" or path.read_text().endswith("\n")
    for path in (folder / "checkpoints").glob("*"):
        checkpoint.load(path)


def test_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_document(tmp_path / "plan.yaml", {"old": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match=r"plan\.yaml: cannot be written: " + NUMBERS) as caught:
            write_document(tmp_path / "plan.yaml", {"new": 2})
    assert caught.value.exit_code == 4
    assert "Make room" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]
    assert documents.read_document(tmp_path / "plan.yaml") == {"old": 1}


@pytest.mark.parametrize("kind", ["refused", "short"])
def test_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    real = os.write
    with LineFile(tmp_path / "events.jsonl") as events, Metrics(tmp_path / "metrics.csv", ["loss"]) as metrics:
        events.write_event("started")
        metrics.write(loss=1)
        before = [(tmp_path / name).read_text() for name in ("events.jsonl", "metrics.csv")]
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full if kind == "refused" else lambda file, content: real(file, content[:3]))
            for write, name in (
                (lambda: events.write_event("step"), "events.jsonl"),
                (lambda: metrics.write(loss=2.25), "metrics.csv"),
            ):
                with pytest.raises(
                    DiskFull, match=rf"{name}: cannot be written: .*; .* are needed, .* are free"
                ) as caught:
                    write()
                assert caught.value.exit_code == 4
        assert [(tmp_path / name).read_text() for name in ("events.jsonl", "metrics.csv")] == before
        metrics.write(loss=3)
    assert (tmp_path / "metrics.csv").read_text() == before[1] + "3\n"


def test_a_quota_counts_too_and_other_errors_do_not(tmp_path: Path) -> None:
    quota = documents.write_failed(tmp_path / "a" / "b", OSError(errno.EDQUOT, "Disk quota exceeded"), 10**6)
    assert isinstance(quota, DiskFull)
    assert "cannot be written: Disk quota exceeded; 1 MB are needed" in quota.message
    other = documents.write_failed("x", OSError(errno.EIO, "Input/output error"), 10, what="the checkpoint")
    assert type(other) is BadFile
    assert other.message == "x: the checkpoint cannot be written: Input/output error."


def test_a_run_folder_that_cannot_be_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        with pytest.raises(DiskFull, match="run: the folder cannot be written: No space left"):
            RunRecord(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DiskFull, match=r"metrics\.csv: cannot be written: No space left"):
            RunRecord(tmp_path / "run")
    check_whole(tmp_path)
    RunRecord(tmp_path / "run").close()


def full_in(path: Path) -> Callable[[int, bytes], int]:
    """`os.write` on a disk that has no room for this file."""
    real = os.write

    def write(file: int, content: bytes) -> int:
        return full() if os.path.samestat(os.fstat(file), path.stat()) else real(file, content)  # type: ignore

    return write


def full_for_new_files(path: Path, mode: str, **options: Any) -> IO[bytes]:
    return full() if mode == "xb" else open(path, mode, **options)  # type: ignore[no-any-return]


LINE, CHECKPOINT = r"cannot be written: No space", r"/step-00000\d: the checkpoint cannot be written: No space"
BREAKS: dict[str, tuple[str, Callable[[Path], tuple[Any, str, Any]]]] = {
    "metrics": (f"/metrics.csv: {LINE}", lambda folder: (os, "write", full_in(folder / "metrics.csv"))),
    "events": (f"/events.jsonl: {LINE}", lambda folder: (os, "write", full_in(folder / "events.jsonl"))),
    "forced to disk": (f"(/metrics.csv: {LINE}|{CHECKPOINT})", lambda folder: (os, "fsync", full)),
    "model": (CHECKPOINT, lambda folder: (checkpoint, "save_file", full_for_safetensors)),
    "state": (CHECKPOINT, lambda folder: (documents, "open", full_for_new_files)),
}


@pytest.fixture(scope="module")
def whole(cluster: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run that nothing happened to."""
    return train(cluster, shared(names(cluster), BATCH), tmp_path_factory.mktemp("whole"), steps=STEPS)


@pytest.mark.xdist_group("full_disk")
@pytest.mark.parametrize("kind", BREAKS)
def test_a_run_that_fills_the_disk(
    cluster: Coordinator, whole: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """From its third step on nothing of one kind can be written any more."""
    monkeypatch.setattr(asked, "CHECKPOINT_SECONDS", 0.0)  # a checkpoint at every step
    words, broken = BREAKS[kind]
    plan = shared(names(cluster), BATCH)
    with monkeypatch.context() as patch:

        def at_step(step: int, *_: object) -> None:
            if step == 2:
                patch.setattr(*broken(tmp_path / "run"), raising=False)

        with pytest.raises(DiskFull, match=words) as caught:
            train(cluster, plan, tmp_path / "run", steps=STEPS, on_step=at_step)
    assert caught.value.exit_code == 4
    assert " are free." in caught.value.message
    assert f"Checkpoint: {tmp_path}" in caught.value.hint
    check_whole(tmp_path / "run")
    ran = train(cluster, plan, tmp_path / "run", steps=STEPS, resume=True)
    assert_same(ran.state, whole.state)
    assert ran.result.losses == whole.result.losses


def test_a_first_checkpoint_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "save_file", full_for_safetensors)
    with pytest.raises(
        DiskFull, match=r"step-000003: the checkpoint cannot be written: No space .*; 32 MB are needed, "
    ):
        checkpoint.save(tmp_path, large())
    assert list(tmp_path.iterdir()) == []


def large() -> checkpoint.Checkpoint:
    """Weights of 16 MB, and as much again for the optimiser."""
    weights = {"w": torch.zeros(4_000_000)}
    return checkpoint.Checkpoint(3, weights, {"w/momentum": weights["w"]}, {}, Optimizer("SGD", lr=0.1), seed=0)


# A disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 20 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.root
def test_a_checkpoint_on_a_small_disk(small_disk: Path) -> None:
    small = large()
    small.model, small.optimizer_tensors, small.step = {"w": torch.ones(10)}, {}, 2
    before = checkpoint.save(small_disk, small)
    with pytest.raises(DiskFull, match=r"No space left on device; 32 MB are needed, 2\d(\.\d)? MB are free\."):
        checkpoint.save(small_disk, large())
    assert list((small_disk / "checkpoints").iterdir()) == [before]
    assert checkpoint.latest(small_disk) == before
    assert shutil.disk_usage(small_disk).free > 20_000_000


@pytest.mark.root
@pytest.mark.xdist_group("full_disk")
def test_a_run_on_a_small_disk(cluster: Coordinator, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of 8 MB each: the third does not fit. With room, it goes on."""
    monkeypatch.setattr(asked, "CHECKPOINT_SECONDS", 0.0)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 7000)), nn.Linear(7000, 64), nn.Linear(64, 5))
    plan, folder, model = shared(names(cluster), BATCH), small_disk / "run", layers.double()
    with pytest.raises(
        DiskFull, match=r"step-00000\d: the checkpoint cannot be written: " + NUMBERS.replace("k?B", "MB")
    ):
        train(cluster, plan, folder, steps=STEPS, model=model)
    check_whole(folder)
    assert len(list((folder / "checkpoints").iterdir())) >= 1
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    ran = train(cluster, plan, folder, steps=STEPS, model=model, resume=True)
    assert len(ran.result.losses) == STEPS


@pytest.mark.root
def test_the_command_says_so(small_disk: Path) -> None:
    """Exit code 4 and one line, no traceback."""
    (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 200_000))
    words = [
        "train",
        "--model",
        "tiny",
        "--data",
        "digits",
        "--cluster",
        "local:1",
        "--steps",
        "3",
        "--out",
        str(small_disk / "run"),
    ]
    run = subprocess.run(
        [sys.executable, "-m", "manyhands", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 4, run.stderr
    assert "No space left on device" in run.stderr
    assert "Traceback" not in run.stderr
