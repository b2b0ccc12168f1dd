"""`manyhands infer` as a user types it: what it prints, what it refuses, and what happens when a device dies."""

from __future__ import annotations

import http.client
import io
import json
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
import torch
from command_processes import Command, leftovers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from manyhands.cli.main import whole_app
from manyhands.facts.errors import ManyhandsError, WorkerLost
from manyhands.facts.plan import Plan, Stage
from manyhands.inference import job as answering_job
from manyhands.models import registry
from manyhands.runtime.processes import LocalWorkers

pytestmark = pytest.mark.xdist_group("infer")  # its network is measured once

SHARED = ("--devices", "2", "--share", "tiles")
COUNT = 800


def drawn(count: int) -> Tensor:
    return torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return registry.build("tiny", num_classes=4).eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model: torch.nn.Module) -> Path:
    """Weights of another number of classes than usual, samples, pictures, and what is wrong with others."""
    folder = tmp_path_factory.mktemp("infer")
    save_file(model.state_dict(), folder / "tiny.safetensors")
    numpy.save(folder / "six.npy", drawn(6).numpy())
    numpy.save(folder / "colour.npy", numpy.zeros((2, 3, 16, 16), numpy.float32))
    numpy.save(folder / "large.npy", numpy.zeros((3, 32, 32), numpy.float32))
    (folder / "one.json").write_text(json.dumps(numpy.zeros((1, 20, 20)).tolist()))
    (folder / "words.json").write_text('[[["a"]]]')
    (folder / "six.json").write_text(json.dumps({"inputs": drawn(6).tolist()}))
    (folder / "pictures").mkdir()
    for name, grey in (("b.png", 255), ("a.png", 0)):
        Image.new("L", (20, 30), grey).save(folder / "pictures" / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "x.png").write_text("no picture")
    (folder / "tiny.txt").write_text("no weights")
    return folder


@pytest.mark.quick(every=13)
@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((), "There is nothing to answer.", "--input FOLDER"),
        (("--input", "digits", "--serve", "0"), "--input and --serve", "one of them"),
        (("--input", "six.npy", "--share", "tilse"), "no way to share the work called 'tilse'", "tiles"),
        (("--input", "six.npy", "--plan", "away.yaml"), "no plan file or strategy called 'away.yaml'", ""),
        (("--input", "six.npy", "--share", "tiles", "--plan", "x.yaml"), "both say how", "one of them"),
        (("--input", "six.npy", "--for", "speed"), "no objective called 'speed'", "throughput"),
        (("--input", "away"), "away: there is no such file", "digits"),
        (("--input", "colour.npy"), "colour.npy is 2x3x16x16; the network takes 1x16x16", "--shape 3x16x16"),
        (("--input", "large.npy"), "large.npy is 3x32x32; the network takes 1x16x16 (one sample)", "1x16x16"),
        (("--input", "one.json"), "one.json is 1x20x20; the network takes 1x16x16", "--resize"),
        (("--input", "words.json"), "words.json: Expected 'float', got 'str'", "Nested lists"),
        (("--input", "pictures"), "2 of 2 pictures are not 1x16x16", "--resize"),
        (("--input", "pictures/a.png"), "a.png is 1x30x20; the network takes 1x16x16", "--resize"),
        (("--input", "six.npy", "--resize", "-m", "din"), "--resize: the network takes no pictures", "Leave it out"),
        (("--input", "broken"), "x.png (no picture of a known format)", "Delete or repair"),
        (("--input", "tiny.txt"), "tiny.txt: the picture cannot be read", "PNG"),
        (("--input", "six.npy", "--output", "x.txt"), "written as .npy or .jsonl", "answers.jsonl"),
        (("--input", "six.npy", "--weights", "away"), "no such run folder", "ls runs"),
        (("--input", "six.npy", "--weights", "tiny.txt"), "not a safetensors file", "save_file"),
        (("--input", "six.npy", "--weights", "tiny.safetensors", "-m", "resnet18"), "does not fit resnet18", "--model"),
        (("--input", "six.npy", "--decouple", "4;3"), "--decouple '4;3'", "4,3,1.5"),
        (("--input", "six.npy", "-m", "tinny"), "no model called 'tinny'", "tiny"),
        (("--serve", "0", "-m", "din"), "several arrays", "samples.npz"),
        (("--input", "six.npy", "--devices", "2", "--cluster", "local:2"), "--devices cannot be given", ""),
        (
            ("--input", "six.npy", "--devices", "2", "--min-devices", "3"),
            "--min-devices is 3; the run would",
            "-devices 3",
        ),
        (("--input", "six.npy", "--cluster", "pi3x6"), "pi3x6 is a preset", "manyhands plan --cluster pi3x6"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_refusals_say_what_to_type(
    place: Path, words: tuple[str, ...], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a worker is started."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(LocalWorkers, "start", lambda *_, **__: pytest.fail("workers were started"))
    with pytest.raises(ManyhandsError) as raised:
        whole_app()(args=["infer", *words], prog_name="manyhands", standalone_mode=False)
    assert message in raised.value.message
    assert hint in raised.value.hint


# Answers


class OneDevice:
    """Answers as an Inference does, from this process."""

    objective, predicted_seconds, reruns, streaming = "latency", 0.001, 0, SimpleNamespace(error=None)

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.recoveries: list[Any] = []
        self.graph = SimpleNamespace(name="tiny", network=SimpleNamespace(name="tiny", input_text="1x16x16"))
        self.plan = Plan("tiny", 1, (Stage((0, 5), ("local-1",)),), order="stream")

    def __enter__(self) -> OneDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def predicted_of(self, samples: int) -> float:
        return 0.5 * samples

    def submit(self, sample: Tensor, limit_seconds: float = 0.0) -> Future[Any]:
        found: Future[Any] = Future()
        with torch.no_grad():
            found.set_result(self.model(sample[None])[0])
        return found


@pytest.fixture
def alone(place: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No workers: what is typed and told is looked at, not who computes."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(answering_job, "open_by_name", lambda *_, **__: OneDevice(model))
    return place


def infer(*words: str) -> None:
    whole_app()(args=["infer", "--weights", "tiny.safetensors", *words], prog_name="manyhands", standalone_mode=False)


def test_answers_as_documents(alone: Path, model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        expected = model(drawn(6))
    infer("--input", "six.npy", "--output", "answers.npy", "--json", "--top", "2")
    check_told(json.loads(capsys.readouterr().out), expected)
    torch.testing.assert_close(torch.from_numpy(numpy.load(alone / "answers.npy")), expected, rtol=0, atol=1e-6)
    infer("--input", "six.npy", "--output", "answers.jsonl", "--raw")
    lines = [json.loads(line) for line in (alone / "answers.jsonl").read_text().splitlines()]
    torch.testing.assert_close(torch.tensor([line["output"] for line in lines]), expected, rtol=0, atol=1e-6)
    assert sorted(alone.glob(".answers*")) == []
    infer("--input", "six.json", "--output", "again.npy")
    torch.testing.assert_close(torch.from_numpy(numpy.load(alone / "again.npy")), expected, rtol=0, atol=1e-6)
    infer("--input", "one.json", "--resize", "--output", "again.npy")
    assert numpy.load(alone / "again.npy").shape == (1, 4)


def check_told(told: dict[str, Any], expected: Tensor) -> None:
    assert [one["name"] for one in told["answers"]] == [f"six.npy[{index}]" for index in range(6)]
    assert [[found["class"] for found in one["top"]] for one in told["answers"]] == expected.topk(2).indices.tolist()
    probabilities = [one["top"][0]["probability"] for one in told["answers"]]
    assert probabilities == pytest.approx(torch.softmax(expected.double(), 1).amax(1).tolist(), abs=1e-5)
    assert told["samples"] == 6


def test_answers_as_a_table(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infer("--input", "pictures", "--resize", "--for", "throughput")
    said = capsys.readouterr().out
    assert re.search(r"a\.png +class \d \d+\.\d%.*\n.*b\.png", said)
    assert "random" not in said
    whole_app()(args=["infer", "--input", "digits", "--top", "1"], prog_name="manyhands", standalone_mode=False)
    said = capsys.readouterr().out
    assert "The weights are random" in said
    assert re.search(r"Accuracy: \d+\.\d% of 355 samples", said)
    assert "... and 335 more" in said


def test_throughput_is_predicted_of_the_samples_at_hand(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OneDevice, "objective", "throughput")
    infer("--input", "pictures", "--resize")
    said = capsys.readouterr().out
    assert "Predicted: 1 s a sample of 2 in a row." in said
    assert "samples/s, predicted 1.0;" in said


def test_a_failure_leaves_no_half_written_array(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone / "old.npy").write_bytes(b"as it was")
    asked = iter(range(100))

    def failing(self: OneDevice, sample: Tensor, limit_seconds: float = 0.0) -> Future[Any]:
        found: Future[Any] = Future()
        if next(asked) == 3:
            found.set_exception(WorkerLost("Nobody is left."))
        else:
            found.set_result(torch.zeros(4))
        return found

    monkeypatch.setattr(OneDevice, "submit", failing)
    with pytest.raises(WorkerLost):
        infer("--input", "six.npy", "--output", "old.npy")
    assert (alone / "old.npy").read_bytes() == b"as it was"
    assert sorted(alone.glob(".old*")) == []


@pytest.mark.slow
def test_answers_of_two_devices_are_those_of_one(
    place: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    with torch.no_grad():
        expected = model(drawn(6))
    infer("--input", "six.npy", "--json", "--top", "2", *SHARED)
    told = json.loads(capsys.readouterr().out)
    check_told(told, expected)
    assert {device for stage in told["plan"]["stages"] for device in stage["devices"]} == {"local-1", "local-2"}
    assert not [child for child in psutil.Process().children() if "worker" in child.cmdline()]


# The service


class Client:
    """Asks a service on this machine."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, body: bytes, more: str = "") -> http.client.HTTPResponse:
        self.connection.request("POST", f"/infer?raw=1{more}", body)
        return self.connection.getresponse()

    def health(self) -> Any:
        self.connection.request("GET", "/health")
        return json.loads(self.connection.getresponse().read())


def worker(command: Command, name: str) -> psutil.Process:
    """The process of one worker, by its own name."""
    children = psutil.Process(command.process.pid).children(recursive=True)
    return next(child for child in children if name in child.cmdline())


@pytest.mark.slow
def test_a_worker_killed_in_a_stream_costs_no_answer(place: Path, model: torch.nn.Module) -> None:
    """Every answer comes, once, in order, and is right; Ctrl-C then ends everything."""
    command = Command(place, ("infer", "--weights", "tiny.safetensors", "--serve", "0", *SHARED))
    found = re.search(r"http://127.0.0.1:(\d+)", command.wait_for("Answering at"))
    assert found is not None
    stream, watcher = Client(int(found.group(1))), Client(int(found.group(1)))
    assert watcher.health()["devices"] == ["local-1", "local-2"]
    file = io.BytesIO()
    numpy.save(file, drawn(COUNT).numpy())
    response = stream.post(file.getvalue())
    assert response.status == 200
    lines = [json.loads(response.readline()) for _ in range(20)]
    worker(command, "local-2").kill()
    assert watcher.health()["answered"] < COUNT, "it was killed too late to matter"
    lines += [json.loads(line) for line in response.read().splitlines()]
    assert [line["index"] for line in lines] == list(range(COUNT))
    with torch.no_grad():
        expected = model(drawn(COUNT))
    torch.testing.assert_close(torch.tensor([line["output"] for line in lines]), expected, rtol=0, atol=1e-5)
    health = watcher.health()
    assert health["devices"] == ["local-1"]
    assert [one["lost"] for one in health["recoveries"]] == [["local-2"]]
    assert health["answered"] == COUNT
    assert 0 < health["reruns"] <= 8
    picture = json.loads(watcher.post((place / "pictures" / "a.png").read_bytes(), "&resize=1").read())
    with torch.no_grad():
        black = model(torch.full((1, 1, 16, 16), -1.0))[0]
    assert picture["output"] == pytest.approx(black.tolist(), abs=1e-5)
    command.interrupt()
    assert command.ended() == 130, command.text
    assert f"Answered {COUNT + 1:,} samples" in command.text
    assert "Traceback" not in command.text
    assert leftovers(command.mark) == []


@pytest.mark.slow
def test_interrupted_in_the_middle_nobody_is_left(place: Path) -> None:
    numpy.save(place / "many.npy", numpy.zeros((20_000, 1, 16, 16), numpy.float32))
    command = Command(place, ("infer", "--input", "many.npy", "--output", "many.jsonl", *SHARED))
    command.wait_for("2000 of 20000 answered")
    command.interrupt()
    assert command.ended() == 130, command.text
    assert "Stopped." in command.text
    assert "Traceback" not in command.text
    assert leftovers(command.mark) == []
    lines = (place / "many.jsonl").read_text().splitlines()
    assert 2000 <= len(lines) < 20_000
    assert json.loads(lines[-1])["index"] == len(lines) - 1
