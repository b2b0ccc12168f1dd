"""Figures of `manyhands bench larger`: a network larger than any of its devices is fine-tuned in the lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.profiler.this_machine import identify
from manyhands.session.lab_session import check_possible
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.larger.network import FULL, QUICK, WEIGHTS_FILE, Size, has_packages, write_weights

MOST_SECONDS = 3600.0
_SPARE = 1.3


def bench_larger(quick: bool, out: Path | None, say: Progress) -> Figures:
    """Return every figure; what each process printed is stored in `out`."""
    check_possible()
    size = QUICK if quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="manyhands-larger-"))
    try:
        return _figures(size, folder, out, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _figures(size: Size, folder: Path, out: Path | None, say: Progress) -> Figures:
    say("writing random weights, one tensor at a time")
    weights_bytes = _written(size, folder)
    done: dict[str, Any] = {}
    for task in ("reference", "cluster", "alone"):
        say(f"{task}, in a process of its own")
        done[task] = _process(task, size, folder)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{task}.json").write_bytes(msgspec.json.encode(done[task]))
    plain, spread, alone = done["reference"], done["cluster"], done["alone"]
    if "losses" not in spread:
        raise ManyhandsError(f"The lab's devices did not train it: {spread['error']}")
    pairs = list(zip(plain["losses"], spread["losses"], strict=True))
    return {
        "machine": identify(1).text, "classes": "transformers and peft" if has_packages() else "written here",
        "weights_bytes": weights_bytes, "device_memory_bytes": size.memory_bytes, "steps": len(pairs),
        "loss_first": plain["losses"][0], "loss_last": plain["losses"][-1],
        "loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
        "stages": len(spread["plan"]["stages"]), "step_seconds": spread["step_seconds"],
        "reference_step_seconds": plain["seconds"] / len(pairs), "checkpoint_bytes": spread["checkpoint_bytes"],
        "peak_bytes_reference": plain["peak_bytes"], "peak_bytes_coordinator": spread["peak_bytes"],
        "anonymous_peak_bytes_coordinator": spread["anonymous_peak_bytes"],
        **{f"peak_bytes_{name}": peak for name, peak in sorted(spread["device_peak_bytes"].items())},
        "refused_alone": int(alone["refused"].get("kind") == "OutOfMemory"),
        "refusal": str(alone["refused"].get("error", "")),
        "killed_alone": int(alone["forced"].get("was_killed", False)), "kill": str(alone["forced"].get("error", "")),
    }  # fmt: skip


def _written(size: Size, folder: Path) -> int:
    free = shutil.disk_usage(folder).free
    weights_bytes = 4 * size.hidden * (size.vocabulary + size.layers * (3 * size.intermediate + 3 * size.hidden))
    if free < _SPARE * weights_bytes:
        raise BadFile(f"{folder}: {free} bytes are free; the weights take {weights_bytes}.", hint="Set TMPDIR.")
    return write_weights(size, folder / WEIGHTS_FILE)


def _process(task: str, size: Size, folder: Path) -> dict[str, Any]:
    """Run one task in a process of its own, so that its memory is its own, and return what it printed."""
    words = [sys.executable, "-P", "-m", "manyhands_bench.larger.process", task, str(folder),
             msgspec.json.encode(size).decode()]  # fmt: skip
    ended = subprocess.run(words, stdout=subprocess.PIPE, timeout=MOST_SECONDS, env=dict(os.environ), check=False)
    if ended.returncode:
        raise ManyhandsError(f"The process of '{task}' ended with exit code {ended.returncode}.")
    printed: dict[str, Any] = msgspec.json.decode(ended.stdout.splitlines()[-1])
    return printed
