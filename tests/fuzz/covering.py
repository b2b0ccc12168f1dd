"""Inputs led by coverage: atheris (libFuzzer) keeps what reaches new code, and goes on from there. Optional.

`python -m tests.fuzz --engine atheris` imports manyhands under its instrumentation; each parser has its own process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz.judging import Judge, Target, clock
from fuzz.mutation import LONGEST_INPUT

try:
    import atheris
except ImportError:
    atheris = None


class Misbehaved(Exception):
    """What ends libFuzzer with the input in a file."""


def instrumented() -> Any:
    """A context in which modules are imported so that they tell where they have been."""
    if atheris is None:
        sys.exit("atheris is not installed: pip install atheris (Linux, CPython 3.11 to 3.13)")
    return atheris.instrument_imports(include=["manyhands"])


def run(targets: Sequence[Target], inputs: int, seed: int, failures: Path) -> int:
    """One process for each parser: libFuzzer ends the one it is in."""
    failures.mkdir(parents=True, exist_ok=True)
    bad = 0
    for target in targets:
        child = os.fork()
        if child == 0:
            _fuzz(target, max(1, inputs // len(targets)), seed, failures)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{target.name:32} {'as it should be' if code == 0 else f'exit code {code}: see {failures}'}", flush=True)
        bad += code != 0
    return int(bad > 0)


def _fuzz(target: Target, inputs: int, seed: int, failures: Path) -> None:
    judge = Judge()

    def look(data: bytes) -> None:
        fault = judge.judge(target, data)
        if fault is not None:
            raise Misbehaved(f"{target.name}: {fault.what}\n{fault.trace}")

    with tempfile.TemporaryDirectory() as corpus, clock():
        for place, one in enumerate(target.seeds):
            (Path(corpus) / str(place)).write_bytes(one)
        words = [
            "fuzz", f"-runs={inputs}", f"-seed={seed}", f"-max_len={LONGEST_INPUT}", "-rss_limit_mb=4096",
            "-timeout=30",
            f"-artifact_prefix={failures}/", "-verbosity=0", corpus,
        ]  # fmt: skip
        atheris.Setup(words, look)
        atheris.Fuzz()
    os._exit(0)
