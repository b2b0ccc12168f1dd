"""This machine: its identity, and its speed, measured in a few seconds and cached."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import msgspec
import psutil
import torch
import torch.nn.functional as F

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.files.documents import cache_folder, read_document, write_document
from manyhands.profiler.clock import TimedTrial, Timer, interleave, stopwatch
from manyhands.profiler.processors import processor_name
from manyhands.profiler.threads import with_threads

_COPY_BYTES = 64 * 2**20
_SMALL_CALLS = 500


class Machine(msgspec.Struct, frozen=True):
    """The properties that a measurement depends on: processor, threads and torch."""

    architecture: str
    processor: str
    cores: int
    threads: int
    torch: str

    @property
    def text(self) -> str:
        return f"{self.architecture}, {self.processor}, {self.cores} cores, {self.threads} threads, torch {self.torch}"

    @property
    def slug(self) -> str:
        """A short text fit for a file's name; different machines have different slugs."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return f"{self.architecture}-{self.threads}t-{digest}"


def identify(threads: int | None = None) -> Machine:
    """Return this machine with so many threads (None: torch's setting)."""
    return Machine(
        platform.machine(), processor_name(), _cores(), threads or torch.get_num_threads(), torch.__version__
    )


def _cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def this_machine(
    *, name: str = "local", threads: int | None = None, refresh: bool = False, timer: Timer = stopwatch
) -> Device:
    """Return this machine as a device of a cluster, its speed measured once and kept in the cache folder."""
    machine = identify(threads)
    path = machine_path(machine)
    if not refresh and path.exists():
        device = _load(path, machine)
    else:
        device = measure_machine(machine, timer=timer)
        document = Cluster("this machine", (device,)).to_dict()
        with contextlib.suppress(BadFile):  # a cache that cannot be written only costs time
            write_document(path, {"machine": machine.text, "cluster": document})
    return msgspec.structs.replace(device, name=name)


def machine_path(machine: Machine) -> Path:
    """Return the path at which a machine's measured speed is kept."""
    return cache_folder() / "machines" / f"{machine.slug}.json"


def _load(path: Path, machine: Machine) -> Device:
    hint = "Delete it, or measure again."
    raw = read_document(path)
    if not isinstance(raw, dict) or set(raw) != {"machine", "cluster"}:
        raise BadFile(f"{path}: is not the description of a machine.", hint=hint)
    if raw["machine"] != machine.text:
        raise BadFile(f"{path}: describes '{raw['machine']}'; this is '{machine.text}'.", hint=hint)
    try:
        return Cluster.from_dict(raw["cluster"]).devices[0]
    except ManyhandsError as error:
        raise BadFile(f"{path}: {error.message}", hint=hint) from error


def measure_machine(machine: Machine, *, timer: Timer = stopwatch) -> Device:
    """Return the device, measured by a few seconds of convolutions, products, copies and tiny operators.

    The fastest of several runs counts: other work of the machine can only make it slower.
    """
    with with_threads(machine.threads):
        return Device(
            name="local",
            kind="local",
            gflops=round(_training_flops_per_second(timer) / 1e9, 3),
            memory_bytes=psutil.virtual_memory().total,
            memory_bytes_per_second=round(copy_bytes_per_second(timer)),
            cores=machine.cores,
            operator_seconds=_operator_seconds(timer),
            estimated=False,
            source=f"Measured on {machine.text}.",
        )


def _training_flops_per_second(timer: Timer) -> float:
    """Return the rate of forward and backward of a 3x3 convolution and of a linear layer, together, in float32."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(2, 64, 56, 56, generator=generator, requires_grad=True)
    weight = torch.randn(64, 64, 3, 3, generator=generator, requires_grad=True)
    rows = torch.randn(256, 1024, generator=generator, requires_grad=True)
    matrix = torch.randn(512, 1024, generator=generator, requires_grad=True)

    def convolve() -> None:
        torch.autograd.grad(F.conv2d(data, weight, padding=1).sum(), (data, weight))

    def multiply() -> None:
        torch.autograd.grad(F.linear(rows, matrix).sum(), (rows, matrix))

    trials = [TimedTrial("convolution", convolve), TimedTrial("product", multiply)]
    timings = interleave(trials, repeats=9, seconds=4.0, timer=timer)
    macs = 2 * 64 * 64 * 9 * 56 * 56 + 256 * 1024 * 512
    # Forward, the input's gradient and the weight's gradient each cost the same arithmetic.
    return 3 * 2 * macs / (timings.least("convolution") + timings.least("product"))


def copy_bytes_per_second(timer: Timer = stopwatch) -> float:
    """Return the bytes read and written per second by a copy that does not fit the caches."""
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    timings = interleave([TimedTrial("copy", lambda: target.copy_(source))], repeats=9, seconds=2.0, timer=timer)
    return 2 * _COPY_BYTES / timings.least("copy")


def _operator_seconds(timer: Timer) -> float:
    """Return the overhead of one operator without any work to do, with autograd recording."""
    data = torch.ones(16, requires_grad=True)

    def small() -> None:
        for _ in range(_SMALL_CALLS):
            torch.relu(data)

    return interleave([TimedTrial("small", small)], repeats=5, seconds=1.0, timer=timer).least("small") / _SMALL_CALLS
