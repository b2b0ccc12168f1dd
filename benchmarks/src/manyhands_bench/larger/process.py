"""The tasks of the bench's processes, each printed as a line of JSON: `python -m manyhands_bench.larger.process TASK`.

reference   plain PyTorch, the whole network in memory
cluster     manyhands on the lab's devices, weights from the file
alone       manyhands plans for one of the devices
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

import manyhands as mh
from manyhands.facts.device import Device
from manyhands.facts.link import Link
from manyhands.lab import groups
from manyhands.profiler.this_machine import this_machine
from manyhands.runtime.memory_kills import KILLED_IN_GROUP
from manyhands_bench.larger.network import WEIGHTS_FILE, Size, adapted, batches, built, without_memory

LEARNING_RATE = 1e-3
LINK = Link(125e6, 0.0)
LAB = "larger"
_LOOK_SECONDS = 0.5
_ROOMY = 5


def peak_bytes() -> int:
    """Return the most memory that this process has had, pages of mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def anonymous_bytes() -> int:
    """Return the memory of this process now, without the pages of mapped files."""
    words = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(words.split()[1]) * 1024


def reference(size: Size, folder: Path) -> dict[str, Any]:
    """Train in this process alone, as PyTorch does."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = built(size)
    model.load_state_dict(load_file(folder / WEIGHTS_FILE), strict=False)
    model = adapted(model).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    losses, began = [], time.monotonic()
    for tokens in torch.split(batches(size), size.batch):
        loss = model(tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "seconds": time.monotonic() - began, "peak_bytes": peak_bytes()}


def cluster_of(size: Size, count: int) -> mh.Cluster:
    """Return devices that share this machine's cores, each with so much memory."""
    core = this_machine(threads=1).gflops
    share = 0.9 * len(os.sched_getaffinity(0)) / size.devices
    devices = tuple(
        Device(name=f"d{place}", gflops=share * core, memory_bytes=size.memory_bytes) for place in range(1, count + 1)
    )
    return mh.Cluster(LAB, devices, LINK)


def mapped(size: Size, folder: Path) -> torch.nn.Module:
    """Return the network with adapters, its weights in their file."""
    return adapted(mh.map_weights(without_memory(size), folder / WEIGHTS_FILE))


class _Peaks(threading.Thread):
    """Notes the most memory of every device of the lab, for as long as it is there, and of this process without the
    pages of files."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.devices = devices
        self.most: dict[str, int] = {}
        self.own_most = 0
        self.is_done = False

    def run(self) -> None:
        while not self.is_done:
            for name in self.devices:
                with contextlib.suppress(mh.ManyhandsError, OSError):  # before it is there, and after
                    group = groups.find().statistics(LAB, name)
                    self.most[name] = max(self.most.get(name, 0), group.peak_bytes)
            self.own_most = max(self.own_most, anonymous_bytes())
            time.sleep(_LOOK_SECONDS)


def cluster(size: Size, folder: Path, *, count: int = 0, plan: str | mh.Plan = "pipeline") -> dict[str, Any]:
    """Train on the devices of a lab. A plan by hand is forced: devices have enough memory until it is accepted."""
    model, tokens = mapped(size, folder), batches(size)
    is_forced = isinstance(plan, mh.Plan)
    roomy = dataclasses.replace(size, memory_bytes=_ROOMY * size.memory_bytes)
    devices = cluster_of(roomy if is_forced else size, count or size.devices)

    def planned(_: object) -> None:
        for name in devices.names if is_forced else ():
            groups.find().make(LAB, name, None, size.memory_bytes)

    peaks = _Peaks(devices.names)
    peaks.start()
    began = time.monotonic()
    try:
        result = mh.train(
            model, torch.utils.data.TensorDataset(tokens, tokens),
            optimizer=mh.Optimizer("AdamW", lr=LEARNING_RATE, weight_decay=0.0), batch_size=size.batch,
            steps=size.steps, shuffle=False, plan=plan, cluster=mh.Cluster.lab(devices),
            micro_batches=None if is_forced else size.batch, folder=folder / f"run-{count}-{is_forced}",
            on_planned=planned,
            say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
    except mh.ManyhandsError as error:
        return {"error": error.message, "kind": type(error).__name__, "device_peak_bytes": peaks.most,
                "was_killed": KILLED_IN_GROUP in error.message}  # fmt: skip
    finally:
        peaks.is_done = True
    return {
        "losses": result.losses, "seconds": time.monotonic() - began, "step_seconds": result.measured_seconds,
        "peak_bytes": peak_bytes(), "device_peak_bytes": peaks.most, "plan": result.plan.to_dict(),
        "checkpoint_bytes": sum(file.stat().st_size for file in Path(result.checkpoint).iterdir()),
        "anonymous_peak_bytes": peaks.own_most,
    }  # fmt: skip


def alone(size: Size, folder: Path) -> dict[str, Any]:
    """Plan for one of the devices; then run there all the same."""
    refused = cluster(size, folder, count=1, plan="single")
    with mh.without_weights():
        model = adapted(built(size))
    tokens = batches(size)[: size.batch]
    graph = mh.capture(model, tokens, target=tokens)
    name = graph.network.name
    layers = len(graph.network.layers)
    forced = mh.Plan(name, size.batch, (mh.Stage((0, layers), ("d1",)),), size.batch, optimizer_slots=2)
    killed = cluster(dataclasses.replace(size, steps=1), folder, count=1, plan=forced)
    return {"refused": refused, "forced": killed}


def main() -> None:
    """Do one task and print what came of it."""
    task, folder, document = sys.argv[1:4]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    size = msgspec.json.decode(document, type=Size)
    done = {"reference": reference, "cluster": cluster, "alone": alone}[task](size, Path(folder))
    print(msgspec.json.encode(done).decode(), flush=True)


if __name__ == "__main__":
    main()
