"""A disk that is full: one clear error, whole files, and a run that goes on once there is room."""

from __future__ import annotations

import errno
import json
import os
import re
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

from manyhands.executor import checkpoint
from manyhands.facts.errors import BadFile, DiskFull
from manyhands.facts.optimizer import Optimizer
from manyhands.files import documents
from manyhands.files.documents import write_document
from manyhands.job import pictures, workload
from manyhands.job.base import Job
from manyhands.observe import figures
from manyhands.observe.append import LineFile, Metrics
from manyhands.observe.tensorboard import TensorBoardLog
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.record import RunRecord
from real_runs import BATCH, Pictures, Ran, assert_same, names, shared, train, workers

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


@pytest.mark.quick("model")
@pytest.mark.xdist_group("full_disk")
@pytest.mark.parametrize("kind", BREAKS)
def test_a_run_that_fills_the_disk(
    cluster: Coordinator, whole: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """From its third step on nothing of one kind can be written any more."""
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)  # a checkpoint at every step
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


# After the last step


class Waiting(Pictures):
    """Held-out data that does something when it is first read, which is after the last checkpoint."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(2 * BATCH)
        self.act: Callable[[], None] | None = act

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().__getitem__(index)


DRAWING = Job.write_pictures
PICTURES = "The pictures could not be written: "
LATE: dict[str, tuple[list[str], Callable[[Path], tuple[Any, str, Any]]]] = {
    "pictures": (
        [f"{PICTURES}a file: cannot be written: No space"],
        lambda folder: (figures, "write_bytes_atomic", full),
    ),
    "new files": (
        [
            rf"Predicted beside measured could not be written: .*/stages\.json: {LINE}",
            rf"{PICTURES}.*/trace\.json: {LINE}",
        ],
        lambda folder: (documents, "open", full_for_new_files),
    ),
    "lines": (
        [
            rf"The accuracy could not be written to the run's folder: .*/events\.jsonl: {LINE}",
            rf"The end of the run could not be written to its folder: .*/events\.jsonl: {LINE}",
        ],
        lambda folder: (os, "write", full_in(folder / "events.jsonl")),
    ),
    "closing": ([], lambda folder: (Metrics, "close", full)),
    "a bug": ([f"{PICTURES}ZeroDivisionError: integer division"], lambda folder: (pictures, "draw_losses", divide)),
}
"""What goes wrong after the last step -> what is said of it."""


def divide(*_: Any, **__: Any) -> Any:
    return 1 // 0


@pytest.mark.quick("closing")
@pytest.mark.xdist_group("full_disk")
@pytest.mark.parametrize("kind", LATE)
def test_a_finished_run_keeps_its_result(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    words, broken = LATE[kind]
    folder, said = tmp_path / "run", list[str]()
    monkeypatch.setattr(Job, "write_pictures", DRAWING)
    with monkeypatch.context() as patch:
        late = Waiting(lambda: patch.setattr(*broken(folder), raising=False))
        ran = train(cluster, shared(names(cluster), BATCH), folder, steps=STEPS, test=late, say=said.append)
    assert late.act is None
    result = ran.result
    assert result.accuracy is not None
    assert len(result.losses) == STEPS
    assert checkpoint.load(result.checkpoint).step == STEPS
    for wanted in words:
        assert len([text for text in result.problems if re.match(wanted, text)]) == 1, result.problems
    assert not any("\n" in text or text not in said for text in result.problems)
    assert bool(result.problems) is bool(words)
    if kind == "closing":
        assert said[-1].startswith("The run's files could not be closed: ")
    check_whole(folder)


@pytest.mark.quick(every=2)
@pytest.mark.xdist_group("full_disk")
@pytest.mark.parametrize("kind", ["data", "devices"])
def test_what_fails_before_the_pictures(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    late = Waiting(divide if kind == "data" else lambda: None)
    if kind == "devices":
        monkeypatch.setattr(RunRecord, "devices", full)
    ran = train(cluster, shared(names(cluster), BATCH), tmp_path / "run", steps=STEPS, test=late)
    assert checkpoint.load(ran.result.checkpoint).step == STEPS
    (problem,) = ran.result.problems
    if kind == "data":
        assert problem.startswith("The held-out data could not be evaluated: Sample 0 cannot be loaded: ")
        assert ran.result.accuracy is None
    else:
        assert problem.startswith("What each device did could not be written: ")
        assert ran.result.accuracy is not None
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {"event": "note", "text": problem}.items() <= next(e for e in events if e.get("text") == problem).items()
    assert events[-1]["event"] == "finished"


def test_a_log_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoardLog(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(board._writer, "add_scalar", full)
        with pytest.raises(DiskFull, match="tensorboard: the log for TensorBoard cannot be written: No space"):
            board.step(0, 0, 1.0, 0.1, 4, None)
        patch.setattr(board._writer, "close", full)
        with pytest.raises(DiskFull, match="the log for TensorBoard cannot be written"):
            board.close()
    board.close()


FILLING = """
import shutil
from pathlib import Path
from manyhands.job import base as job
from manyhands.models.registry import build

def factory(num_classes=10, channels=1):
    evaluated = job.Job.evaluated
    def late(self, *given):
        found = evaluated(self, *given)
        {act}
        return found
    job.Job.evaluated = late
    return build("tiny", num_classes=num_classes, channels=channels)
"""
"""A user's model, which fills the disk once the run is evaluated."""


def check_command(folder: Path, code: Path, act: str, why: str) -> None:
    """Exit code 0, the accuracy, and one line for the pictures."""
    (code / "mine.py").write_text(FILLING.format(act=act))
    words = ["train", "--model", "mine:factory", "--cluster", "local:1", "--steps", "3", "--out", str(folder)]
    run = subprocess.run(
        [sys.executable, "-m", "manyhands", *words], capture_output=True, text=True, timeout=200,
        check=False, cwd=code,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.search(r"^Accuracy on \d+ held-out samples: \d+\.\d%$", run.stdout, re.MULTILINE)
    lines = [line for line in run.stderr.splitlines() if line.startswith(PICTURES)]
    assert len(lines) == 1, run.stderr
    assert why in lines[0]
    assert "Traceback" not in run.stderr
    assert "pictures in plots/" not in run.stdout
    assert checkpoint.load_newest(folder) is not None


@pytest.mark.slow
def test_the_command_keeps_a_finished_run(tmp_path: Path) -> None:
    """Its pictures' folder is a file."""
    act = "(self.folder / 'plots').write_text('')"
    check_command(tmp_path / "run", tmp_path, act, f"{tmp_path / 'run' / 'plots'}")


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
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)
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


@pytest.mark.root
def test_the_command_keeps_a_finished_run_on_a_small_disk(small_disk: Path, tmp_path: Path) -> None:
    act = "(self.folder / 'ballast').write_bytes(b'x' * (shutil.disk_usage(self.folder).free - 8192))"  # two pages
    check_command(small_disk / "run", tmp_path, act, "No space left on device")
