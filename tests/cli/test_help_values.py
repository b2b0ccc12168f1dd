"""What `--help` shows is accepted: every value of every option of every command, and nothing else in its place.

A command is run up to where it would start something (workers, a port, a measurement): whatever refuses a value has
done so by then, which a made-up value in the same place shows.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

import pytest
from help_values import Shown, shown, values_in

from groups import slow_if
from manyhands.cli.main import whole_app

MADE_UP = "no-such-thing"
STARTS = (
    "manyhands.training.train.expect_session", "manyhands.inference.job.open_by_name",
    "manyhands.inference.generate.generate_with",
    "manyhands.split.training.open_two",
    "manyhands.split.training.joined", "manyhands.runtime.coordinator.Coordinator.__init__",
    "manyhands.profiler.store.profile_network", "manyhands.runtime.service.serve", "manyhands.runtime.serving.listen",
    "manyhands.doctor.report._checks", "manyhands_bench.results_page.write_page",
    "manyhands_bench.infer.bench.measure_parts",
    "manyhands_bench.infer.bench.check_gpu", "manyhands_bench.auto.bench.measure_parts",
    "manyhands.inference.export.export_run", "manyhands_bench.chaos.bench._run_all",
)  # fmt: skip
"""Where something would start."""
CONTEXT = {
    "infer": "--input digits", "models": "tiny", "check": "tiny", "plan": "-m tiny -c edge-cloud --no-what-if --json",
    "simulate": "-m tiny -c edge-cloud --json", "decouple": "-m mobilenetv2 --json", "profile": "-m tiny",
    "bench all": "--page-only", "export": "weights.safetensors --onnx out.onnx -m tiny", "worker": "--token abcdefgh",
}  # fmt: skip
"""What a command needs besides."""
BESIDE = {
    ("train", "--grid"): "--share tiles", ("train", "--rows"): "--share tiles --grid 2x1",
    ("plan", "--grid"): "--share tiles -c pi3x6", ("plan", "--rows"): "--share tiles --grid 3x1 -c three.yaml",
    ("plan", "--input"): "-m resnet18", ("simulate", "--input"): "-m resnet18", ("profile", "--input"): "-m resnet18",
    ("plan", "--model"): "--share single", ("simulate", "--model"): "--plan single",
    ("split train", "--delay"): "--trace rates.txt", ("split train", "--allowed-drop"): "--calibrate 10",
    ("split train", "--silos"): "--listen 127.0.0.1:0", ("infer", "--time-limit"): "--serve 0",
    ("infer", "--serve"): "",
}  # fmt: skip
"""What an option needs besides."""
INSTEAD = {
    ("infer", "--serve"): "",
    ("infer", "--tokens"): "-m tiny",
    ("infer", "--time-limit"): "",
    ("models", "--input"): "resnet18",
    ("check", "model"): "",
    ("check", "--input"): "resnet18",
}
"""In place of the command's context."""
OTHERWISE = {
    ("plan", "--strategy"): "--for throughput",
    ("train", "--data"): "-m bilstm", ("split train", "--data"): "-m bilstm",
    ("split train", "--rival"): "--silos edge-a=left,edge-b=right,server=target --listen 127.0.0.1:0",
}  # fmt: skip
"""What some values of an option need besides, and others not."""
STANDS_FOR = {"local:N": "local:2", "decoupled:NAME": "decoupled:mobilenetv2"}
PLACES = ("folder", "file", "file.npz", "name", "preset", "cluster.yaml", "module:factory", "torchvision:NAME",
          "timm:NAME", "random", "model.onnx", "file.py:Class", "hf:TYPE", "hf:FOLDER")  # fmt: skip
"""Words for what is the reader's own."""
PROSE = {
    ("train", "--data"): {"synthetic"}, ("split train", "--data"): {"synthetic"},
    ("train", "--replan"): {"lost", "joins", "leaves"}, ("infer", "--weights"): {"a"}, ("infer", "--plan"): {"as"},
    ("infer", "--shape"): {"s", "the"}, ("export", "weights"): {"a"}, ("decouple", "--shuffles"): {"channels"},
    ("plan", "--profile"): {"comma-separated"}, ("simulate", "--profile"): {"comma-separated"},
    ("worker", "--silo"): {"inputs", "target"}, ("split serve", "--silo"): {"inputs", "target"},
    ("dashboard", "run"): {"on", "else"}, ("top", "run"): {"on", "else"}, ("status", "run"): {"on", "else"},
    ("split train", "--cut"): {"number"}, ("split train", "--weights"): {"a"},
    ("split train", "--freeze"): {"layers", "those"}, ("lab up", "--name"): {"the"}, ("lab heal", "device"): {"all"},
    ("devices revoke", "name"): {"joined", "its"}, ("devices forget", "name"): {"joined", "its"},
    ("devices allow", "name"): {"joined", "its"},
    ("bench split", "--traces"): {"ghent-4g", "mahimahi-100ms", "lumos5g"},
}  # fmt: skip
"""Words that only look like values."""
NEEDS_OTHERS = {("lab slow", "factor"), ("devices allow", "role"), ("bench chaos", "--only")}
FREE = {("split serve", "--host"), ("infer", "--host"), ("export", "--shape")}
"""Looked at by whoever listens there, or once the weights are read: a made-up one goes as far as this."""


class Reached(BaseException):
    """The command has accepted everything, and would start."""


def reached(*_: object, **__: object) -> NoReturn:
    raise Reached


def to_try() -> dict[tuple[str, str], list[str]]:
    """By command and option: the values that are shown."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for one in shown():
        where = (one.command, one.option)
        if one.value not in PLACES and one.value not in PROSE.get(where, ()) and where not in NEEDS_OTHERS:
            found[where].append(STANDS_FOR.get(one.value, one.value))
    return found


TO_TRY = to_try()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.txt").write_text("0 10\n1 20\n")
    (tmp_path / "three.yaml").write_text("devices: [{kind: pi4, count: 3}]\nlink: {rate: 1 Gbit/s, delay: 1 ms}\n")
    for start in STARTS:
        monkeypatch.setattr(start, reached)
    monkeypatch.setenv("MANYHANDS_CONFINE", "off")  # this very process would be
    return tmp_path


def refusal(words: list[str]) -> str:
    """Why a command refuses its words; empty: it does not."""
    try:
        whole_app()(args=words, prog_name="manyhands", standalone_mode=False)
    except Reached:
        return ""
    except Exception as error:
        return str(getattr(error, "message", error)) or type(error).__name__
    return ""


def ways_to_type(command: str, option: str, value: str) -> list[list[str]]:
    """A command with a value."""
    where = (command, option)
    context = INSTEAD.get(where, CONTEXT.get(command, ""))
    words = [*command.split(), *shlex.split(context), *shlex.split(BESIDE.get(where, ""))]
    words += [option, value] if option.startswith("-") else [value]
    return [words, [*words, *shlex.split(OTHERWISE[where])]] if where in OTHERWISE else [words]


def takes_long(command: str, option: str) -> bool:
    """Values for which models are captured or data sets are read, in commands whose other options cost a start each."""
    return option in ("--model", "--data", "model") or command in ("split train", "simulate", "profile", "plan")


@pytest.mark.quick(every=28)
@pytest.mark.parametrize(
    "where", [pytest.param(where, id=" ".join(where), marks=slow_if(takes_long(*where))) for where in TO_TRY]
)
def test_every_value_shown_is_accepted(where: tuple[str, str], place: Path, capsys: Any) -> None:
    for value in TO_TRY[where]:
        refusals = [refusal(words) for words in ways_to_type(*where, value)]
        assert "" in refusals, f"{' '.join(where)} {value}: {refusals}"
    for words in ways_to_type(*where, MADE_UP) if where not in FREE else ():
        assert refusal(words), f"{' '.join(where)} accepts anything: nothing was looked at"


@pytest.mark.slow
def test_what_counts_as_a_value() -> None:
    assert values_in("How: auto (fastest), single or mixed. Default: samples.") == [
        "auto",
        "single",
        "mixed",
        "samples",
    ]
    assert values_in("grouped (default): K+1; window: at most") == ["grouped", "window"]
    assert values_in("This alone: capture, core, lab. Repeatable.") == ["capture", "core", "lab"]
    assert values_in("Shape of one sample, like 3x64x64.") == ["3x64x64"]
    assert values_in("Where", "HOST:PORT|off") == ["off"]
    assert Shown("train", "--share", "mixed") in shown()
    assert len(TO_TRY) > 70
    unused = [
        where
        for where in (*PROSE, *BESIDE, *INSTEAD, *OTHERWISE, *FREE, *NEEDS_OTHERS)
        if where not in {(s.command, s.option) for s in shown()}
    ]
    assert unused == []
