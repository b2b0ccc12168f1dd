"""However a command ends, no process of it is left: not after success, errors, signals, nor sudden deaths.

Real commands in process groups of their own, real signals to the whole group, as a terminal sends them; every process
they start carries a mark in its environment, by which those that are left would be found.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import psutil
import pytest
from command_processes import MARK, PROGRAM, Command, leftovers, marked

from manyhands.executor import checkpoint
from manyhands.observe.live import read_live

pytestmark = pytest.mark.xdist_group("train")  # what its workers are is measured once

GONE_SECONDS = 5.0
"""Once the command has ended."""
AT_ONCE_SECONDS = 2.0
LIMIT_SECONDS = 90.0
STOPPED = 130
DEVICES = ("--devices", "2", "--share", "samples")
LONG = "100000"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endings")
    numpy.lib.format.open_memmap(folder / "many.npy", "w+", numpy.float32, (200_000, 1, 16, 16))  # takes no room
    numpy.save(folder / "few.npy", numpy.zeros((40, 1, 16, 16), numpy.float32))
    return folder


def until(is_so: Callable[[], bool], what: str, limit_seconds: float = LIMIT_SECONDS) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {limit_seconds} s"
        time.sleep(0.1)


@dataclass
class Kind:
    """A command, how it is seen to be in the middle of its work, and how long that takes it."""

    words: tuple[str, ...]
    is_under_way: Callable[[Command, Path], None]
    short: tuple[str, ...] = ()
    """What makes it end by itself after a while."""
    error: tuple[str, ...] = ()
    """What makes it fail."""
    is_training: bool = True


def has_stepped(command: Command, folder: Path) -> None:
    def steps() -> bool:
        assert command.process.poll() is None, command.ended() or command.text
        path = folder / "metrics.csv"
        return path.exists() and len(path.read_text().splitlines()) > 8

    until(steps, "steps")


def has_answered(command: Command, folder: Path) -> None:
    path = folder.with_suffix(".jsonl")

    def answers() -> bool:
        assert command.process.poll() is None, command.ended() or command.text
        return path.exists() and len(path.read_bytes().splitlines()) > 8

    until(answers, "answers")


def is_serving(command: Command, folder: Path) -> None:
    url = command.wait_for("Answering at").split()[2].rstrip(".")
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert json.loads(answer.read())["answered"] == 0


KINDS = {
    "train": Kind(
        ("train", *DEVICES, "--batch-size", "32", "--dashboard", "off"), has_stepped, ("--steps", "300"),
        ("--optimizer", "SGD:lr=1e9"),
    ),
    "split": Kind(
        ("split", "train", "--dashboard", "off"), has_stepped, ("--steps", "300"), ("--optimizer", "SGD:lr=1e9")
    ),
    "infer": Kind(("infer", *DEVICES, "--share", "samples", "--for", "throughput"), has_answered, is_training=False),
    "serve": Kind(("infer", *DEVICES, "--share", "pipeline", "--serve", "0"), is_serving, is_training=False),
}  # fmt: skip


def started(place: Path, name: str, kind: str, more: tuple[str, ...] | None = None) -> tuple[Command, Path]:
    """A command with far too much to do, unless it is told otherwise."""
    own = KINDS[kind]
    folder = place / name
    words = own.words
    if own.is_training:
        words += ("--out", name, *(("--steps", LONG) if more is None else more))
    elif kind == "infer":
        source = "many.npy" if more is None else "few.npy"
        words += ("--input", source, "--output", f"{name}.jsonl")
    command = Command(place, words, in_group=True)
    _commands.append(command)
    return command, folder


_commands: list[Command] = []


@pytest.fixture(autouse=True)
def _none_stays() -> Iterator[None]:
    """Whatever a test found wrong."""
    yield
    while _commands:
        command = _commands.pop()
        for one in [command.process, *marked(command.mark)]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one.kill()
        command.process.wait()


def workers(command: Command) -> list[psutil.Process]:
    return [one for one in marked(command.mark) if "worker" in one.cmdline()]


def check_gone(command: Command, *, limit_seconds: float = GONE_SECONDS) -> None:
    assert leftovers(command.mark, limit_seconds) == []
    assert "Traceback" not in command.text, command.text
    assert "\x1b" not in command.text, "escape codes, and no terminal"


def check_stopped(command: Command, folder: Path, kind: str) -> None:
    """A checkpoint of the last step done, the folder says how it ended, and the command what to type next."""
    if not KINDS[kind].is_training:
        return
    again = f"manyhands {'split train' if kind == 'split' else 'train'} --resume {folder.name}"
    assert again in command.text, command.text
    rows = (folder / "metrics.csv").read_text().splitlines()
    newest = checkpoint.latest(folder)
    assert newest is not None
    done = int(newest.name.rpartition("-")[2])
    assert int(rows[-1].split(",")[0]) + 1 == done > 0, "the last step done is in the checkpoint"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["step"]) == ("stopped", done)
    live = read_live(folder)
    assert live is not None
    assert live.state == "stopped"


# However it ends

EVERY = tuple(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "split", "infer"])
def test_to_the_end(place: Path, kind: str) -> None:
    command, _ = started(place, f"whole-{kind}", kind, KINDS[kind].short)
    assert command.ended(LIMIT_SECONDS) == 0, command.text
    check_gone(command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "split"])
def test_by_an_error(place: Path, kind: str) -> None:
    command, folder = started(place, f"failed-{kind}", kind, ("--steps", LONG, *KINDS[kind].error))
    assert command.ended(LIMIT_SECONDS) == 14, command.text
    check_gone(command)
    live = read_live(folder)
    assert live is None or live.state == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("kind", EVERY)
def test_by_a_signal(place: Path, kind: str, number: signal.Signals) -> None:
    name = f"{number.name}-{kind}"
    command, folder = started(place, name, kind)
    KINDS[kind].is_under_way(command, folder)
    assert len(workers(command)) == 2
    command.signal(number)
    assert command.ended(30) == STOPPED, command.text
    assert "Stopped." in command.text
    check_gone(command)
    check_stopped(command, folder, kind)
    if KINDS[kind].is_training and number is signal.SIGINT:
        done = len((folder / "metrics.csv").read_text().splitlines()) - 1
        again = Command(
            place, (*KINDS[kind].words[: 2 if kind == "split" else 1], "--resume", name, "--steps", str(done + 5))
        )
        _commands.append(again)
        assert again.ended(LIMIT_SECONDS) == 0, again.text
        assert len((folder / "metrics.csv").read_text().splitlines()) - 1 == done + 5
        check_gone(again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_by_a_second_signal(place: Path, kind: str) -> None:
    """A worker is frozen: whoever waits for it waits for long."""
    command, folder = started(place, f"twice-{kind}", kind)
    KINDS[kind].is_under_way(command, folder)
    frozen = workers(command)[0]
    frozen.suspend()
    command.interrupt()
    time.sleep(0.6)
    assert command.process.poll() is None, "it waits for the frozen one"
    began = time.monotonic()
    command.interrupt()
    assert command.ended(LIMIT_SECONDS) == STOPPED, command.text
    assert time.monotonic() - began < AT_ONCE_SECONDS + 2.0, "`ended` itself takes two seconds"
    assert "at once" in command.text
    check_gone(command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_before_it_has_begun(place: Path, kind: str) -> None:
    """While workers are being started: nothing is left of the folder either."""
    command, folder = started(place, f"early-{kind}", kind)
    until(lambda: bool(workers(command)), "workers")
    command.interrupt()
    assert command.ended(30) == STOPPED, command.text
    check_gone(command)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("kind", EVERY)
def test_by_a_sudden_death(place: Path, kind: str, number: signal.Signals) -> None:
    """Also of one of its workers that could not end by itself."""
    command, folder = started(place, f"{number.name}-{kind}", kind)
    KINDS[kind].is_under_way(command, folder)
    workers(command)[0].suspend()
    command.process.send_signal(number)
    assert command.ended(30) == -number
    check_gone(command, limit_seconds=10.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "split"])
def test_a_worker_is_killed_and_it_goes_on(place: Path, kind: str) -> None:
    command, folder = started(place, f"bereft-{kind}", kind, ("--steps", "400"))
    KINDS[kind].is_under_way(command, folder)
    next(one for one in workers(command) if {"local-2", "server"} & set(one.cmdline())).kill()
    assert command.ended(LIMIT_SECONDS) == 0, command.text
    assert "SIGKILL" in command.text, "it was killed too late to matter"
    check_gone(command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_all_workers_are_killed(place: Path, kind: str) -> None:
    command, folder = started(place, f"alone-{kind}", kind)
    KINDS[kind].is_under_way(command, folder)
    for one in workers(command):
        one.kill()
    assert command.ended(LIMIT_SECONDS) == 11, command.text
    check_gone(command)


@pytest.mark.slow
def test_killed_while_its_workers_start(place: Path) -> None:
    """They have loaded half of what they need, and nobody has told them yet to end with it."""
    command, _ = started(place, "killed", "train")
    until(lambda: len(workers(command)) == 2, "workers")
    command.kill()
    command.ended()
    check_gone(command, limit_seconds=30.0)


# In a terminal


class Terminal:
    """A command that a pseudo-terminal belongs to: what is typed there reaches it as from a keyboard."""

    def __init__(self, folder: Path, *words: str, columns: int = 100, lines: int = 30, **environment: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [PROGRAM, *words], cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**own, "TERM": "xterm-256color", MARK: self.mark, **environment},
        )  # fmt: skip
        os.close(slave)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, seconds: float) -> bool:
        """Whether anything came."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            found = os.read(self.master, 65536)
        except OSError:  # nobody is at the other end
            return False
        self.text += self._decoder.decode(found)
        return bool(found)

    def wait_for(self, part: str, limit_seconds: float = LIMIT_SECONDS) -> None:
        end = time.monotonic() + limit_seconds
        while part not in self.text:
            assert time.monotonic() < end, f"no '{part}':\n{self.text}"
            if not self.read(0.1) and self.process.poll() is not None:
                assert part in self.text, f"it ended before '{part}':\n{self.text}"

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self, limit_seconds: float = 30.0) -> int:
        end = time.monotonic() + limit_seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self.read(0.05)
        while self.read(0.2):
            pass
        return int(self.process.returncode)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(place: Path) -> Iterator[Callable[..., Terminal]]:
    found: list[Terminal] = []

    def start(*words: str, **options: object) -> Terminal:
        found.append(Terminal(place, *words, **options))  # type: ignore[arg-type]
        return found[-1]

    try:
        yield start
    finally:
        for one in found:
            one.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(place: Path, terminal: Callable[..., Terminal]) -> None:
    """A bar with a line for each device; Ctrl-C, typed, leaves a checkpoint, and the terminal as it was."""
    own = terminal("train", *DEVICES, "--batch-size", "32", "--steps", LONG, "--out", "typed", "--dashboard", "off")
    own.wait_for("busy")
    own.wait_for("samples/s")
    own.type("\x03")
    own.wait_for("Stopping")
    assert own.ended() == STOPPED, own.text
    assert leftovers(own.mark, GONE_SECONDS) == []
    shown = plain(own.text)
    for part in (
        "training",
        f"/{LONG}",
        "loss",
        " left",
        "local-1",
        "local-2",
        "Go on with: manyhands train --resume typed",
    ):
        assert part in shown, part
    assert "Traceback" not in shown
    assert own.text.rindex("\x1b[?25h") > own.text.rindex("\x1b[?25l"), "the cursor is back"
    assert checkpoint.latest(place / "typed") is not None
    live = read_live(place / "typed")
    assert live is not None
    assert live.state == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, 44, 200])
def test_narrow_and_wide_terminals(place: Path, terminal: Callable[..., Terminal], columns: int) -> None:
    """A line that did not fit would be drawn again and again."""
    own = terminal(
        "train", *DEVICES, "--batch-size", "32", "--steps", LONG, "--dashboard", "off", columns=columns, lines=10
    )
    own.wait_for("busy" if columns > 20 else f"/{LONG}")
    before = len(own.text)
    time.sleep(2.5)
    while own.read(0.1):
        pass
    _, _, whole = own.text[before:].partition("\n")  # not from the middle of a code
    lines = plain(whole.rpartition("\n")[0]).replace("\r", "\n").splitlines()
    frames = [line for line in lines if not re.match(r"\d\d:\d\d:\d\d ", line)]  # what is said once may be wrapped
    assert max(map(len, frames)) <= columns, [one for one in frames if len(one) > columns][:3]
    own.type("\x03")
    assert own.ended() == STOPPED
    assert leftovers(own.mark, GONE_SECONDS) == []


@pytest.mark.slow
def test_a_dumb_terminal_gets_plain_lines(place: Path, terminal: Callable[..., Terminal]) -> None:
    own = terminal("train", *DEVICES, "--batch-size", "32", "--steps", "20", "--dashboard", "off", TERM="dumb")
    assert own.ended(LIMIT_SECONDS) == 0, own.text
    assert "step 20 of 20" in own.text
    assert "\x1b[?25l" not in own.text


@pytest.mark.slow
def test_answers_in_a_terminal(place: Path, terminal: Callable[..., Terminal]) -> None:
    own = terminal("infer", *DEVICES, "--share", "samples", "--for", "throughput", "--input", "many.npy")
    own.wait_for("stage 0")
    own.wait_for(" left")
    own.type("\x03")
    assert own.ended() == STOPPED
    assert "samples were answered" in plain(own.text)
    assert leftovers(own.mark, GONE_SECONDS) == []


@pytest.mark.slow
def test_top_of_a_run_that_goes_on(place: Path, terminal: Callable[..., Terminal]) -> None:
    """It is left by q and by Ctrl-C; the run goes on."""
    command, folder = started(place, "watched", "train")
    has_stepped(command, folder)
    for key in ("q", "\x03"):
        own = terminal("top", "watched")
        own.wait_for("local-2")
        own.wait_for("bit/s")
        own.type(key)
        assert own.ended() == 0, own.text
        assert own.text.rindex("\x1b[?1049l") > own.text.rindex("\x1b[?1049h"), "the screen is back"
        assert "running" in plain(own.text)
    assert command.process.poll() is None, "nobody touched it"
    command.interrupt()
    assert command.ended(30) == STOPPED
    check_gone(command)
