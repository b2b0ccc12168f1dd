"""Generation where one device cannot hold the network: two such devices in a pipeline, beside one that reads its
weights from its disk, again and again, as it needs them.

Every part runs in a process of its own, so that a limit of memory is its own:

    python -m manyhands_bench.generate.small_devices TASK FOLDER SETTINGS

    paged       plain PyTorch in a control group with the memory of one device, its weights mapped from their file
    devices     `mh.generate` on two devices of the lab
    refused     the same on one of them
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

import manyhands as mh
from manyhands.facts.device import Device
from manyhands.facts.link import Link
from manyhands.lab import groups
from manyhands.profiler.this_machine import this_machine
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.generate.decoder import Decoder, DecoderSize, plain_texts

WEIGHTS_FILE = "model.safetensors"
LAB, PAGED_LAB = "generate", "generate.paged"
LINK = Link(125e6, 0.0)
MOST_SECONDS = 900.0


@dataclass(frozen=True)
class SmallDevices:
    """The settings of this part of the bench."""

    size: DecoderSize = field(default_factory=lambda: DecoderSize(layers=24, width=768))
    memory_bytes: int = 800_000_000
    """Of one device; the network's weights and PyTorch take about 1.1 GB."""
    prompt_tokens: int = 16
    new_tokens: int = 16
    repetitions: int = 3


QUICK = SmallDevices(memory_bytes=800_000_000, prompt_tokens=4, new_tokens=4, repetitions=1)


def bench_small_devices(settings: SmallDevices, say: Progress) -> Figures:
    """Return tokens per second on devices of which one cannot hold the network; the repetitions take turns."""
    folder = Path(tempfile.mkdtemp(prefix="manyhands-generate-"))
    runs: dict[str, list[dict[str, Any]]] = {"paged": [], "devices": []}
    try:
        write_weights(settings.size, folder / WEIGHTS_FILE)
        for number in range(settings.repetitions):
            for task, done in runs.items():
                say(f"smaller devices, {task}, repetition {number + 1} of {settings.repetitions}")
                done.append(_process(task, settings, folder))
        refused = _process("refused", settings, folder)
        weights_bytes = (folder / WEIGHTS_FILE).stat().st_size
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    texts = {tuple(run["tokens"]) for done in runs.values() for run in done}
    rates = {task: [run["tokens_per_second"] for run in done] for task, done in runs.items()}
    return {
        "small_weights_bytes": weights_bytes, "small_device_memory_bytes": settings.memory_bytes,
        "small_1_device_tokens_per_second": statistics.median(rates["paged"]),
        "small_2_devices_tokens_per_second": statistics.median(rates["devices"]),
        "small_2_devices_over_1": statistics.median(
            ours / paged for ours, paged in zip(rates["devices"], rates["paged"])
        ),
        "small_tokens_equal": int(len(texts) == 1),
        "small_refused": int(refused["kind"] == "OutOfMemory"),
        "small_peak_bytes": max(run["peak_bytes"] for run in runs["devices"]),
    }  # fmt: skip


def write_weights(size: DecoderSize, path: Path) -> None:
    """Write a decoder's random weights, each once."""
    from safetensors.torch import save_file

    save_file({name: weight.detach() for name, weight in Decoder(size).named_parameters()}, path)


def mapped(size: DecoderSize, folder: Path) -> Decoder:
    """Return the decoder with its weights in their file."""
    with mh.without_weights():
        model = Decoder(size)
    mh.map_weights(model, folder / WEIGHTS_FILE)
    return model.eval()


def prompt_of(settings: SmallDevices) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    numbers: list[int] = torch.randint(
        settings.size.vocabulary, (settings.prompt_tokens,), generator=generator
    ).tolist()
    return numbers


def paged(settings: SmallDevices, folder: Path) -> dict[str, Any]:
    """Generate in this process alone, with the memory of one device: pages of the file that do not fit are read again
    for every token."""
    torch.set_num_threads(1)
    control = groups.find()
    control.make(PAGED_LAB, "d1", None, settings.memory_bytes)
    control.enter(PAGED_LAB, "d1")
    model = mapped(settings.size, folder)
    began = time.monotonic()
    texts = plain_texts(model, [prompt_of(settings)], settings.new_tokens)
    seconds = time.monotonic() - began
    return {
        "tokens": texts[0], "tokens_per_second": settings.new_tokens / seconds,
        "peak_bytes": control.statistics(PAGED_LAB, "d1").peak_bytes,
    }  # fmt: skip


def devices(settings: SmallDevices, folder: Path, count: int = 2) -> dict[str, Any]:
    """Generate on so many devices of the lab."""
    core = this_machine(threads=1).gflops
    share = 0.9 * len(os.sched_getaffinity(0)) / 2
    cluster = mh.Cluster(
        LAB,
        tuple(
            Device(name=f"d{place}", gflops=share * core, memory_bytes=settings.memory_bytes)
            for place in range(1, count + 1)
        ),
        LINK,
    )
    peaks: list[int] = []

    def look(prompt: int, token: int) -> None:
        peaks.extend(groups.find().statistics(LAB, name).peak_bytes for name in cluster.names)

    try:
        result = mh.generate(
            mapped(settings.size, folder), [prompt_of(settings)], on_token=look, cluster=mh.Cluster.lab(cluster),
            plan="pipeline" if count > 1 else "single", max_new_tokens=settings.new_tokens,
            say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
    except mh.ManyhandsError as error:
        return {"kind": type(error).__name__, "error": error.message}
    return {"tokens": list(result.tokens[0]), "tokens_per_second": result.tokens_per_second, "peak_bytes": max(peaks)}


def _process(task: str, settings: SmallDevices, folder: Path) -> dict[str, Any]:
    """Run one task in a process of its own and return what it printed."""
    words = [sys.executable, "-P", "-m", "manyhands_bench.generate.small_devices", task, str(folder),
             msgspec.json.encode(settings).decode()]  # fmt: skip
    try:
        ended = subprocess.run(words, stdout=subprocess.PIPE, timeout=MOST_SECONDS, env=dict(os.environ), check=False)
    finally:
        for lab in (LAB, PAGED_LAB):
            groups.find().remove(lab)
    if ended.returncode:
        raise mh.ManyhandsError(f"The process of '{task}' ended with exit code {ended.returncode}.")
    printed: dict[str, Any] = msgspec.json.decode(ended.stdout.splitlines()[-1])
    if task != "refused" and "tokens" not in printed:
        raise mh.ManyhandsError(f"The devices did not generate: {printed['error']}")
    return printed


def main() -> None:
    """Do one task and print what came of it."""
    task, folder, document = sys.argv[1:4]
    settings = msgspec.json.decode(document, type=SmallDevices)
    if task == "paged":
        printed = paged(settings, Path(folder))
    else:
        printed = devices(settings, Path(folder), 2 if task == "devices" else 1)
    print(msgspec.json.encode(printed).decode(), flush=True)


if __name__ == "__main__":
    main()
