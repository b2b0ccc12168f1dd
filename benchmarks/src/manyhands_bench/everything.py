"""`manyhands bench all`: every bench as a process of its own, one after another; each result is stored as it comes."""

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
    "capture": "capture", "core": "core", "lab": "lab", "tile": "tile",
    "tile-4": "tile --workers 4 --only speed --only processor",
    "tile-8": "tile --workers 8", "tile-16": "tile --workers 16 --only speed --only processor",
    "core-4": "core --workers 4 --only ddp --only vgg16", "core-8": "core --workers 8 --only ddp --only vgg16",
    "tile-gpu": "tile --compute cuda", "tile-lab": "tile --lab",
    "pipeline": "pipeline --only overhead --only torch --only planning --only optimality",
    "pipeline-simulated": "pipeline --only prediction --only paper", "pipeline-hybrid": "pipeline --only hybrid",
    "pipeline-studies": "pipeline --only studies --only scaling --only accuracy",
    "recovery": "recovery", "recovery-lab": "recovery --lab", "chaos": "chaos", "split": "split",
    "split-decisions": "split --only decisions", "auto": "auto",
    "infer": "infer", "infer-accuracy": "infer --only accuracy --full --compute cuda", "networks": "networks",
    "generate": "generate", "larger": "larger", "trainer": "trainer", "gpu": "gpu", "collectives": "collectives",
    "scale": "scale",
}  # fmt: skip
"""Result -> the words after `manyhands bench` that measure it."""
CORES = {"tile-4": 4, "tile-8": 8, "tile-16": 16, "core-4": 4, "core-8": 8}
"""Result -> the least number of cores it needs."""
ON_GPU = ("infer-accuracy", "gpu", "tile-gpu")
IN_LAB = ("lab", "larger", "tile-lab", "pipeline-hybrid", "recovery-lab")
DRAWS = (
    "tile", "tile-4", "tile-8", "tile-16", "tile-gpu", "tile-lab", "pipeline", "pipeline-simulated",
    "pipeline-hybrid", "pipeline-studies", "recovery", "recovery-lab", "split", "split-decisions", "auto", "infer",
    "infer-accuracy", "networks",
)  # fmt: skip
"""Benches that take --out, the folder of plots or of what was measured so far: none are kept here, because the page has
its own."""
LIMIT_SECONDS = 3 * 3600.0
"""The limit of a bench: one that takes longer has failed."""
END_SECONDS = 30.0
"""The time between interrupting a bench and killing it."""
_PROGRESS = re.compile(r"\s*\d+ s  ")
_FAILED = re.compile(r"(?m)^(\w+_failed): (.*)$")
_LONGEST_REASON = 500


def check_names(only: Sequence[str]) -> None:
    for name in only:
        if name not in WORDS:
            raise unknown("bench", name, WORDS)


def run_all(only: Sequence[str], out: Path, *, quick: bool, say: Progress) -> list[str]:
    """Measure and store every bench in turn, and return the names of those that failed, entirely or in part."""
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
    """Return the reason that a result cannot be measured here; empty: it can."""
    from manyhands.lab.removal import missing

    if host.cores < CORES.get(name, 1):
        return f"it needs {CORES[name]} cores; this machine has {host.cores}."
    if name in ON_GPU and not host.gpu:
        return "it needs a GPU; this machine has none."
    if quick and "--full" in WORDS[name]:
        return "it is a long study without a quick form."
    if name == "networks":
        from manyhands_bench.networks.catalogue import missing_packages

        if absent := missing_packages():
            return f"it needs {', '.join(dict.fromkeys(absent.values()))}."
    return missing() if name in IN_LAB else ""


def _words(name: str, quick: bool) -> str:
    return f"manyhands bench {WORDS[name]} --json" + (" --quick" if quick else "")


# One bench


def measured(name: str, host: Host, *, quick: bool, say: Progress, limit_seconds: float = LIMIT_SECONDS) -> Result:
    """Run a bench in a process of its own and return its result, whatever becomes of it."""
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
    """The output of a process, and the code it ended with; None: it did not end within its limit."""

    printed: str
    logged: str
    code: int | None
    limit_seconds: float


def _ran(command: Sequence[str], say: Progress, limit_seconds: float) -> ProcessOutcome:
    """Run a command to its end or its limit; its progress is passed on, the rest of its output is collected."""
    log_lines: list[str] = []
    with _process(command) as process:
        assert process.stderr is not None
        listening = threading.Thread(target=_listen, args=(process.stderr, log_lines, say), daemon=True)
        listening.start()
        printed: list[str] = []
        reading = threading.Thread(target=lambda: printed.append(process.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reading.start()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_seconds)
    for thread in (listening, reading):
        thread.join(END_SECONDS)
    return ProcessOutcome("".join(printed), "".join(log_lines), code, limit_seconds)


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a process with a group of its own, which is ended afterwards: the process is interrupted first, then the
    whole group is killed."""
    parent = os.getpid()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        preexec_fn=lambda: end_with(parent),  # if this process is killed, so is the bench, and its workers with it
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


def _listen(stream: IO[str], log_lines: list[str], say: Progress) -> None:
    for line in stream:
        if _PROGRESS.match(line):
            say(line.strip())
        else:
            log_lines.append(line)


def _figures(outcome: ProcessOutcome) -> tuple[dict[str, float | int | None] | None, str]:
    """Return the figures, if the process printed them, and the reason if something went wrong."""
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
    """Return the GPUs' names by the driver; empty if there is none."""
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
    package = Path(__file__).resolve().parent
    if not _output_of(["git", "-C", str(package), "ls-files", Path(__file__).name]):
        return ""
    changed = _output_of(
        ["git", "-C", str(package), "status", "--porcelain", "--untracked-files=no", "--", str(package.parent)]
    )
    return _output_of(["git", "-C", str(package), "rev-parse", "--short=10", "HEAD"]).strip() + ("+" if changed else "")


def _output_of(command: Sequence[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return ""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
