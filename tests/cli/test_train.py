"""`manyhands train` as a user types it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from command_processes import MARK, Command, leftovers
from forking import run_command

from manyhands.cli.main import main
from manyhands.planner.strategies import STRATEGIES
from manyhands.training.arguments import train_config

pytestmark = pytest.mark.xdist_group("train")  # its workers are started once

QUICK = ("--devices", "2", "--batch-size", "32", "--steps", "3")  # measured once for all tests


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command has ended, and every process it started."""
    mark = uuid.uuid4().hex
    result = run_command("train", *words, cwd=cwd, **{MARK: mark})
    assert leftovers(mark) == []
    assert "Traceback" not in result.stderr, result.stderr
    return result


def run_json(*words: str, cwd: Path) -> Any:
    result = run(*words, "--json", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's own data, module and plans, and what is left of a run."""
    folder = tmp_path_factory.mktemp("train")
    drawn = numpy.random.default_rng(0)
    x = drawn.normal(size=(200, 8)).astype(numpy.float32)
    y = (x.sum(1) > 0).astype(numpy.int64)
    numpy.savez(folder / "good.npz", x=x, y=y)
    numpy.savez(folder / "short.npz", x=x[:10], y=y[:10])
    numpy.savez(folder / "keys.npz", pictures=x, labels=y)
    (folder / "mine.py").write_text(
        "import torch\n"
        "def mlp(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, num_classes))\n"
    )
    (folder / "broken" / "a").mkdir(parents=True)
    (folder / "broken" / "b").mkdir()
    for name in ("a/1.png", "b/1.png"):
        (folder / "broken" / name).write_text("no picture")
    (folder / "flat").mkdir()
    (folder / "flat" / "1.png").write_text("no picture")
    (folder / "file").write_text("")
    (folder / "typo.yaml").write_text("devices: [{kind: pi4, cout: 2}]\nlink: {rate: 1 Gbit/s, delay: 1 ms}\n")
    stage: dict[str, Any] = {"layers": [0, 5], "devices": ["local-1", "local-2"]}
    shares = {"two": {"by": "samples", "samples": [20, 12]}, "channels": {"by": "channels", "groups": [1, 1]}}
    for name, share in shares.items():
        plan = {"network": "tiny", "batch_size": 32, "stages": [{**stage, "share": share}]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(plan))
    (folder / "done").mkdir()
    (folder / "done" / "config.yaml").write_text("wish: {model: tiny, batch_size: 64, devices: 2}\n")
    return folder


@pytest.mark.slow
def test_without_arguments_digits_are_learnt_on_four_workers(tmp_path: Path) -> None:
    command = run(cwd=tmp_path)
    assert command.returncode == 0, command.stderr
    for part in ("local-4", "16 of 64 samples", "demonstration asks for 4 workers", "times the prediction", "runs/"):
        assert part in command.stdout
    accuracy = float(command.stdout.partition("held-out samples: ")[2].partition("%")[0])
    assert accuracy >= 95
    assert "step 220 of 220" in command.stderr
    assert "Dashboard: http://127.0.0.1:" in command.stderr


@pytest.mark.slow
def test_a_plan_file_decides_json_is_one_document_and_the_folder_is_whole(place: Path) -> None:
    result = run_json("--plan", "two.yaml", "--steps", "3", "--out", "planned", cwd=place)
    keys = {"accuracy", "losses", "plan", "folder", "throughput", "predicted_seconds", "measured_seconds"}
    assert keys <= set(result)
    assert len(result["losses"]) == result["steps"] == 3
    assert result["plan"]["stages"][0]["share"]["samples"] == [20, 12]
    assert result["measured_seconds"] > 0
    names = {path.name for path in (place / "planned").iterdir()}
    assert {"config.yaml", "cluster.yaml", "plan.yaml", "events.jsonl", "metrics.csv", "trace.json"} <= names
    assert {"plots", "checkpoints"} <= names
    pictures = {path.name for path in (place / "planned" / "plots").iterdir()}
    assert pictures == {"loss.png", "memory.png", "timeline.png", "utilisation.png"}


@pytest.mark.parametrize("share", STRATEGIES)
def test_every_strategy_may_be_asked_for(share: str) -> None:
    config = train_config({"share": share})
    assert config.plan == share
    assert not config.has_plan_file


@pytest.mark.slow
def test_a_run_goes_on_in_another_way(tmp_path: Path) -> None:
    first = run(*QUICK, "--out", "run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "step 3 of 3" in first.stderr
    more = run_json("--resume", "run", "--steps", "5", "--share", "single", cwd=tmp_path)
    assert more["steps"] == 2
    assert len(more["losses"]) == 5
    assert [len(stage["devices"]) for stage in more["plan"]["stages"]] == [1]


@pytest.mark.slow
def test_a_users_own_module_and_data(place: Path) -> None:
    words = ("--model", "mine:mlp", "--data", "good.npz", "--optimizer", "Adam:lr=1e-2", "--seed", "3")
    result = run_json(*words, "--devices", "2", "--epochs", "5", "--share", "auto", "--out", "own", cwd=place)
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.quick(every=11)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "tinny"], 3, "Did you mean tiny"),
        (["--data", "digit"], 3, "Did you mean digits"),
        (["--optimizer", "SDG:lr=1"], 3, "Did you mean SGD"),
        pytest.param(["--optimizer", "SGD:lr=1,schedule=CosineLR"], 3, "CosineAnnealingLR", marks=pytest.mark.slow),
        (["--share", "sample"], 3, "Did you mean samples"),
        (["--share", "tiles", "--grid", "2x2", "--devices", "3"], 10, "2x2 has 4 tiles; there are 3 tile slots"),
        (["--share", "tiles", "--grid", "17x1", "--devices", "17"], 5, "17 rows of tiles cannot be cut out of the 16"),
        (["--share", "tiles", "--grid", "2x1x1"], 5, "holds pictures of 16 rows and 16 columns"),
        (["--share", "tiles", "--grid", "2x"], 10, "is not a grid of tiles"),
        (["--share", "tiles", "--grid", "2x1", "--rows", "1,2,3"], 5, "--rows has 3 numbers; the grid has 2"),
        (["--grid", "2x2"], 10, "are for --share tiles"),
        (["--share", "samples", "--plan", "two.yaml"], 10, "--plan two.yaml both"),
        (["--epochs", "1", "--steps", "1"], 10, "--steps 1 both"),
        (["--devices", "0"], 10, "--devices is '0'; it must be a number, or so many to begin with"),
        (["--devices", "4", "--batch-size", "2", "--share", "samples"], 10, "4 devices cannot share a batch of 2"),
        (["--devices", "2", "--gpus", "3"], 10, "--devices 3"),
        (["--devices", "2", "--cluster", "local:3"], 10, "beside --cluster local:3"),
        (["--model", "mine:mlp"], 10, "1x16x16"),
        pytest.param(["--model", "mine:mlp", "--data", "short.npz"], 13, "a batch has 64", marks=pytest.mark.slow),
        pytest.param(["--model", "mine:mlp", "--data", "keys.npz"], 13, "numpy.savez", marks=pytest.mark.slow),
        (["--data", "broken"], 13, "2 of 2 files"),
        pytest.param(["--data", "flat"], 13, "one sub-folder per class", marks=pytest.mark.slow),
        (["--cluster", "typo.yaml"], 3, "Did you mean count"),
        (["--cluster", "pi3x6"], 10, "pi3x6 is a preset"),
        (["--resume", "done", "--cluster", "env-c"], 10, "add --listen 0.0.0.0:7077"),
        (["--plan", "two.yaml", "--batch-size", "64"], 5, "batch_size is 32; --batch-size is 64"),
        (["--plan", "two.yaml", "--model", "din"], 5, "network is tiny; --model is din"),
        (["--plan", "two.yaml", "--devices", "1"], 5, "--devices 2"),
        (["--plan", "channels.yaml"], 5, "for inference"),
        (["--out", "file"], 4, "file is a file"),
        (["--out", "done"], 4, "--resume done"),
        (["--out", "other", "--resume", "done"], 10, "--out other"),
        (["--resume", "nowhere"], 4, "no such run folder"),
        (["--resume", "flat"], 4, "is no run folder"),
        (["--resume", "done", "--batch-size", "32"], 10, "--batch-size 64; it is now 32"),
        (["--listen", "here:port"], 10, "HOST:PORT"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    words: list[str],
    code: int,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, since nothing starts; the next test has one of its own."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["manyhands", "train", *words])
    monkeypatch.setenv("MANYHANDS_CONFINE", "off")  # this very process would be
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == code, printed.err
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not (place / "runs").exists()
    assert not (place / "other").exists()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("words", [["--devices", "2", "--gpus", "3"], ["--resume", "flat"]])
def test_a_mistake_leaves_no_process(words: list[str], place: Path) -> None:
    result = run(*words, cwd=place)
    assert result.returncode in (4, 10), result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_mixed_plans_train(tmp_path: Path) -> None:
    """Offered by --help, and refused once."""
    result = run_json(*QUICK, "--share", "mixed", "--out", "mixed", cwd=tmp_path)
    assert result["steps"] == 3
    stages = result["plan"]["stages"]
    assert len({str(stage.get("share")) for stage in stages}) > 1 or len({len(s["devices"]) for s in stages}) > 1


@pytest.mark.slow
def test_gpus_that_are_not_there(place: Path) -> None:
    result = run("--gpus", "99", "--devices", "99", "--batch-size", "99", cwd=place)
    assert result.returncode == 10
    assert "--gpus is 99" in result.stderr


@pytest.mark.slow
def test_a_loss_that_is_no_number(place: Path) -> None:
    result = run(*QUICK, "--optimizer", "SGD:lr=1e9", "--out", "nan", cwd=place)
    assert result.returncode == 14
    assert "learning rate" in result.stderr


@pytest.mark.slow
def test_interrupted_in_the_middle_nobody_is_left(place: Path) -> None:
    command = Command(place, ("train", "--devices", "2", "--batch-size", "32", "--steps", "1000", "--out", "stopped"))
    command.wait_for("step 100 of 1000")
    command.interrupt()
    assert command.ended() == 130, command.text
    assert "Stopped." in command.text
    assert "manyhands train --resume stopped" in command.text
    assert "Traceback" not in command.text
    assert leftovers(command.mark) == []


@pytest.mark.slow
def test_killed_in_the_middle_nobody_is_left(place: Path) -> None:
    command = Command(place, ("train", "--devices", "2", "--epochs", "200", "--out", "killed"))
    command.wait_for("Run folder")
    command.kill()
    command.ended()
    assert leftovers(command.mark, 15.0) == []
