"""Silos as a user types them: a file for each device, and one command that names who has what."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from pathlib import Path

import numpy
import pytest
from command_processes import MARK, Command, leftovers
from forking import run_command

from groups import thinned
from manyhands.data.sets import load
from manyhands.data.silo import write_silo

pytestmark = pytest.mark.xdist_group("split")

LEAST = ("--steps", "4", "--batch-size", "8", "--k", "1")
WHO = "edge-a=history_movies+movie,edge-b=history_genres+genre,server=history_mask+target"


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    mark = uuid.uuid4().hex
    result = run_command("split", *words, cwd=cwd, **{MARK: mark})
    assert leftovers(mark) == []
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.mark.parametrize(
    ("words", "code", "said"),
    thinned(
        [
            (["train", "--silos", "edge-a"], 10, "which device has what"),
            (["train", "--silos", "edge-a=left,edge-a=right"], 10, "which device has what"),
            (["train", "--rival", "cross-silo"], 3, "rival"),
            (["train", "--listen", "localhost:0"], 10, "--silos"),
            (["train", "--labels", "cloud", "--edge-side", "downstream"], 10, "labels are at the cloud"),
            (["train", "--freeze", "99"], 10, "nothing would be left"),
            (["train", "--weights", "nothing"], 4, "no such file"),
            (["train", "--data", "digits:7-3"], 10, "names no classes"),
            (["serve", "--silo", "nothing.npz"], 4, "no such file"),
        ]
    ),
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.slow
def test_devices_join_with_files_of_their_own(tmp_path: Path) -> None:
    """The paper's cross-silo setting: two devices have half of the films' features each, the cloud has the clicks."""
    drawn, count = numpy.random.default_rng(0), 40
    arrays = {
        "history_movies": drawn.integers(1, 900, (count, 50)), "history_genres": drawn.integers(1, 18, (count, 50)),
        "movie": drawn.integers(1, 900, count), "genre": drawn.integers(1, 18, count),
        "history_mask": numpy.ones((count, 50), dtype=numpy.int64),
        "target": drawn.integers(0, 2, count).astype(numpy.float32),
    }  # fmt: skip
    job = Command(
        tmp_path, ("split", "train", "--model", "din", "--silos", WHO, "--listen", "127.0.0.1:0", *LEAST, "--json"),
    )  # fmt: skip
    found = re.search(r"--join (127\.0\.0\.1:\d+)", job.wait_for("manyhands worker --join"))
    assert found is not None, job.text
    workers = []
    for number, part in enumerate(WHO.split(",")):
        name, _, names = part.partition("=")
        rows = numpy.arange(number, count)  # the first has all, the second one less, the third two
        file = tmp_path / f"{name}.npz"
        write_silo(file, [f"click {row}" for row in rows], {one: arrays[one][rows] for one in names.split("+")})
        words = ("worker", "--join", found.group(1), "--name", name, "--threads", "1")
        workers.append(Command(tmp_path, (*words, "--silo", str(file))))
    assert job.ended() == 0, job.text
    told = json.loads(job.text[job.text.index("\n{") :] if "\n{" in job.text else job.text)
    assert [stage["devices"] for stage in told["plan"]["stages"]] == [["edge-a"], ["edge-b"], ["server"]]
    assert len(told["losses"]) == 4
    assert "38 samples are with all of edge-a, edge-b, server" in job.text
    assert max(told["staleness"]) <= 1
    assert [worker.ended() for worker in workers] == [0, 0, 0]


@pytest.mark.slow
def test_a_cloud_that_has_the_labels(tmp_path: Path) -> None:
    """Inputs are the edge's, labels the cloud's, by the samples' numbers; what the cloud lacks is left out."""
    train = load("digits").train
    labels = [int(train[index][1]) for index in range(100)]
    write_silo(tmp_path / "labels.npz", range(100), {"target": numpy.array(labels)})
    serve = ("split", "serve", "--host", "127.0.0.1", "--port", "0", "--once", "--silo", "labels.npz")
    cloud = Command(tmp_path, serve)
    found = re.search(r"--cloud (\S+)", cloud.wait_for("manyhands split train --cloud"))
    assert found is not None, cloud.text
    where = ("--cloud", found.group(1), "--token-file", str(Path(os.environ["MANYHANDS_HOME"]) / "token"))
    done = run("train", *where, "--labels", "cloud", "--epochs", "2", "--batch-size", "20", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["steps"] == 2 * 100 // 20, "of the samples that both have"
    assert "100 samples are with all of server" in done.stderr
    assert [stage["devices"] for stage in told["plan"]["stages"]] == [["edge"], ["server"]]
    assert cloud.ended() == 0, cloud.text
