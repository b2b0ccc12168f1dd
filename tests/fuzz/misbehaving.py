"""Parsers that misbehave, each in its own way; run as a program, the fuzz command over some of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import drawing, running
from fuzz.judging import Build, Target
from manyhands.facts.errors import BadFile


def broken(data: bytes) -> object:
    if b"{" in data:
        raise KeyError("stages")
    raise BadFile("no")


def endless(data: bytes) -> object:
    while data:
        pass
    return None


def hungry(data: bytes) -> object:
    return len(b"x" * (100 * 2**20))


class Wordy(BadFile):
    def __str__(self) -> str:
        return "x" * 100_000


def wordy(data: bytes) -> object:
    raise Wordy("no")


def unkind(data: bytes) -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def waiting(data: bytes) -> object:
    time.sleep(600)
    return None


def right(data: bytes) -> object:
    raise BadFile("no")


def build_of(run: Callable[[bytes], object]) -> Build:
    def build(folder: Path) -> Target:
        return Target(run.__name__, run, [b'{"a": 1}', b"[1]"], "json")

    build.__name__ = run.__name__
    return build


if __name__ == "__main__":
    running.BUILDS = tuple(map(build_of, (broken, unkind, waiting, right)))
    running.START_SECONDS, running.HANG_SECONDS, running.MOST_FAULTS = 1.0, 0.5, 1
    drawing.judge_drawn = lambda *_: []
    sys.exit(running.main())
