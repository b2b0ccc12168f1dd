"""`manyhands bench all`: every bench as a process of its own, one after another; each result is kept as it comes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import psutil

from manyhands.facts.errors import unknown
from manyhands.facts.version import __version__
from manyhands.runtime.processes import end_with
from manyhands_bench.figures import Progress
from manyhands_bench.results import Host, Result, write_result

WORDS = {
    "capture": "capture", "core": "core", "lab": "lab", "tile": "tile", "tile-8": "tile --workers 8",
    "pipeline": "pipeline", "recovery": "recovery", "chaos": "chaos", "split": "split", "auto": "auto",
    "infer": "infer", "infer-accuracy": "infer --only accuracy --full --compute cuda",
}  # fmt: skip
"""What each result is measured by, after `manyhands bench`."""
CORES = {"tile-8": 8}
"""What some need at least."""
ON_GPU = ("infer-accuracy",)
DRAWS = ("tile", "tile-8", "pipeline", "recovery", "split", "auto", "infer", "infer-accuracy")
"""Take --out, where plots go: none are kept here, the page has its own."""
LIMIT_SECONDS = 3 * 3600.0
"""A bench that takes longer has failed."""
END_SECONDS = 30.0
"""Between asking a bench to end and ending it."""
_PROGRESS = re.compile(r"\s*\d+ s  ")
_FAILED = re.compile(r"(?m)^(\w+_failed): (.*)$")
_LONGEST_REASON = 500


def check_names(only: Sequence[str]) -> None:
    for name in only:
        if name not in WORDS:
            raise unknown("bench", name, WORDS)


def run_all(only: Sequence[str], out: Path, *, quick: bool, say: Progress) -> list[str]:
    """Measure, keep, go on; the names of those that failed, or of which a part did."""
    check_names(only)
    host, failed = this_host(), []
    for name in (bench for bench in WORDS if not only or bench in only):
        if why := _impossible(name, host, quick):
            say(f"{name}: left out: {why}")
            result = Result(name, _words(name, quick), host, "skipped", reason=why, quick=quick, date=_now())
        else:
            say(f"{name}: measuring")
            result = measured(name, host, quick=quick, say=say)
            say(f"{name}: {result.state} in {result.seconds or 0:.0f} s. {result.reason}".rstrip())
            failed += [name] if result.reason else []
        say(f"{name}: {write_result(out, result)}")
    return failed


def _impossible(name: str, host: Host, quick: bool) -> str:
    """Why it cannot be measured here; empty: it can."""
    from manyhands.lab.removal import missing

    if host.cores < CORES.get(name, 1):
        return f"it needs {CORES[name]} cores; this machine has {host.cores}."
    if name in ON_GPU and not host.gpu:
        return "it needs a GPU; this machine has none."
    if quick and "--full" in WORDS[name]:
        return "it is a long study without a quick form."
    return missing() if name == "lab" else ""


def _words(name: str, quick: bool) -> str:
    return f"manyhands bench {WORDS[name]} --json" + (" --quick" if quick else "")


# One bench


def measured(name: str, host: Host, *, quick: bool, say: Progress, limit_seconds: float = LIMIT_SECONDS) -> Result:
    """A bench run by a process of its own; whatever becomes of it is a result."""
    command = [sys.executable, "-P", "-m", "manyhands", *_words(name, quick).split()[1:]]
    date, begin, load = _now(), time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if name in DRAWS:
            command += ["--out", folder]
        outcome = _ran(command, lambda text: say(f"{name}: {text}"), limit_seconds)
    figures, reason = _figures(outcome)
    return Result(
        name, _words(name, quick), host, "failed" if figures is None else "measured", figures=figures or {},
        reason=reason[:_LONGEST_REASON], versions=_versions(), date=date, commit=_commit(),
        seconds=round(time.monotonic() - begin, 1), load_before=load, load_after=os.getloadavg()[0], quick=quick,
        said=outcome.logged,
    )  # fmt: skip


@dataclass(frozen=True)
class ProcessOutcome:
    """What a process printed, and the code it ended with; None: it did not end within its limit."""

    printed: str
    logged: str
    code: int | None
    limit_seconds: float


def _ran(command: Sequence[str], say: Progress, limit_seconds: float) -> ProcessOutcome:
    """Run it to its end or its limit; its progress is passed on, the rest is kept."""
    kept: list[str] = []
    with _process(command) as process:
        assert process.stderr is not None
        listening = threading.Thread(target=_listen, args=(process.stderr, kept, say), daemon=True)
        listening.start()
        printed: list[str] = []
        reading = threading.Thread(target=lambda: printed.append(process.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reading.start()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_seconds)
    for thread in (listening, reading):
        thread.join(END_SECONDS)
    return ProcessOutcome("".join(printed), "".join(kept), code, limit_seconds)


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, all of which is gone afterwards: asked to end first, then killed."""
    parent = os.getpid()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        preexec_fn=lambda: end_with(parent),  # if this one is killed, so is that one, and its workers with it
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listen(stream: IO[str], kept: list[str], say: Progress) -> None:
    for line in stream:
        if _PROGRESS.match(line):
            say(line.strip())
        else:
            kept.append(line)


def _figures(outcome: ProcessOutcome) -> tuple[dict[str, float | int | None] | None, str]:
    """The figures, if it printed them, and what went wrong."""
    if outcome.code is None:
        return None, f"It had not ended after {outcome.limit_seconds:g} s."
    try:
        raw = json.loads(outcome.printed)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        last = [line for line in outcome.logged.splitlines() if line.strip()][-3:]
        return None, " ".join(last) or f"It ended with code {outcome.code} and printed nothing."
    parts = "; ".join(f"{key}: {text}" for key, text in _FAILED.findall(outcome.logged))
    code = f"It ended with code {outcome.code}." if outcome.code and not parts else ""
    return {str(key): value for key, value in raw.items() if not isinstance(value, (str, bool))}, parts or code


# The machine


def this_host() -> Host:
    from manyhands.profiler.this_machine import identify

    machine = identify(1)
    return Host(
        processor=machine.processor, cores=machine.cores, architecture=machine.architecture,
        memory_bytes=psutil.virtual_memory().total, gpu=_gpu(), system=f"{platform.system()} {_kernel()}",
    )  # fmt: skip


def _kernel() -> str:
    """Return 6.18 of 6.18.44-some-build: the rest could identify the machine's owner."""
    return ".".join(platform.release().split("-")[0].split(".")[:2])


def _gpu() -> str:
    """As the driver names them; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    names = _output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return ", ".join(dict.fromkeys(line.strip() for line in names.splitlines() if line.strip()))


def _versions() -> dict[str, str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"python": platform.python_version(), "torch": torch, "manyhands": __version__}


def _commit() -> str:
    """Return the commit of the checkout that holds this package; empty if it was installed."""
    here = Path(__file__).resolve().parent
    if not _output_of(["git", "-C", str(here), "ls-files", Path(__file__).name]):
        return ""
    changed = _output_of(
        ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", "--", str(here.parent)]
    )
    return _output_of(["git", "-C", str(here), "rev-parse", "--short=10", "HEAD"]).strip() + ("+" if changed else "")


def _output_of(command: Sequence[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return ""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
