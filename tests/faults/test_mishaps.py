"""What goes wrong on a worker: said in words, with the bytes, and with what to do."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from manyhands.executor import checkpoint
from manyhands.facts.errors import BadPlan, DiskFull, ManyhandsError, OutOfMemory
from manyhands.lab import groups
from manyhands.runtime import memory_kills as memory_kills_module
from manyhands.runtime import mishaps
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.memory_kills import killed_for_memory, memory_kills
from manyhands.runtime.mishaps import as_error, asked_bytes
from real_runs import Pictures, names, pid, shared, train, workers

LAB = f"m{os.getpid()}"
SCALE = 80
"""A batch of pictures that many times larger is more than a worker keeps at hand: it asks for it at every step."""


def raised(make: object) -> BaseException:
    try:
        assert callable(make)
        make()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


CUDA = (
    "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 139.72 GiB of which 1.19 MiB is "
    "free. Including non-PyTorch memory, this process has 1.17 GiB memory in use."
)
ARM = (
    "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
    "800000000000000 bytes."
)
X86 = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "800000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
"""PyTorch's words on both architectures: each is tested on the other too."""


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (raised(lambda: torch.empty(10**14, dtype=torch.float64)), 8 * 10**14),
        (RuntimeError(ARM), 8 * 10**14),
        (RuntimeError(X86), 8 * 10**14),
        (raised(lambda: np.empty(2**47, dtype=np.uint8)), 2**47),
        (raised(lambda: bytearray(2**60)), 0),
        (torch.OutOfMemoryError(CUDA), round(20.5 * 2**20)),
        (MemoryError("std::bad_alloc"), 0),
        (RuntimeError("std::bad_alloc"), 0),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 0),
        (RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"), 0),
    ],
    ids=["torch", "torch on ARM", "torch on x86", "numpy", "python", "cuda", "c++", "c++ in torch", "system", "mmap"],
)
def test_out_of_memory(error: BaseException, asked: int) -> None:
    found = as_error(error, "nano-1")
    assert isinstance(found, OutOfMemory)
    assert found.exit_code == 8
    assert asked_bytes(error) == asked
    assert not asked or f"({asked} bytes) more were asked for" in found.message
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        total = psutil.virtual_memory().total
        assert re.search(f"; the process holds .*, the machine has {mishaps.format_bytes(total)}", found.message)
    assert found.hint.startswith("Give nano-1 less to hold: a smaller batch, more micro-batches, or more devices")


@pytest.mark.parametrize(
    "error", [RuntimeError("The size of tensor a (3) must match"), OSError(errno.EIO, "I/O error")]
)
def test_anything_else_keeps_its_words_and_its_trace(error: Exception) -> None:
    def broken() -> None:
        raise error

    found = as_error(raised(broken), "nano-1")
    assert type(found) is ManyhandsError
    assert found.message == f"{type(error).__name__}: {error}"
    assert "in broken" in found.hint
    assert len(found.hint) <= 2000


def test_our_own_errors_stay_as_they_are() -> None:
    error = BadPlan("no", hint="yes")
    assert as_error(error, "nano-1") is error


def test_a_full_disk_on_a_worker(tmp_path: Path) -> None:
    found = as_error(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "ring")), "nano-1")
    assert isinstance(found, DiskFull)
    assert f"{tmp_path / 'ring'}: cannot be written: No space left on device; " in found.message
    assert " are free." in found.message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_out_of_memory() -> None:
    found = as_error(raised(lambda: torch.empty(10**12, dtype=torch.float64, device="cuda")), "nano-1")
    assert isinstance(found, OutOfMemory)
    total = torch.cuda.get_device_properties(0).total_memory
    assert re.search(f"; its tensors hold .* of the GPU's {mishaps.format_bytes(total)}", found.message)
    assert "8 TB" in found.message


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up /proc and /sys/fs/cgroup: process 7 in a group of version 1, 8 in one of version 2."""
    for folder in ("proc/7", "proc/8", "groups/memory/lab/nano", "groups/lab/nano"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 12\noom_kill 4\n")
    (tmp_path / "proc/7/cgroup").write_text("4:memory:/lab/nano\n1:cpu,cpuacct:/\n0::/\n")
    (tmp_path / "proc/8/cgroup").write_text("0::/lab/nano\n")
    (tmp_path / "groups/cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "groups/memory/lab/nano/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (tmp_path / "groups/memory/lab/nano/memory.limit_in_bytes").write_text("512000000\n")
    (tmp_path / "groups/lab/nano/memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    (tmp_path / "groups/lab/nano/memory.max").write_text("max\n")
    monkeypatch.setattr(memory_kills_module, "_PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(memory_kills_module, "_CONTROL_GROUPS", tmp_path / "groups")
    return tmp_path


@pytest.mark.parametrize(
    ("process", "counter", "limit"),
    [
        (7, "memory/lab/nano/memory.oom_control", " (its control group may have 512 MB)"),
        (8, "lab/nano/memory.events", ""),
    ],
)
def test_a_kill_in_the_workers_group(kernel: Path, process: int, counter: str, limit: str) -> None:
    before = memory_kills(process)
    assert (before.in_group, before.on_machine) == (1, 4)
    assert killed_for_memory(before) == ""
    (kernel / "proc/vmstat").write_text("oom_kill 5\n")
    assert killed_for_memory(before) == "perhaps killed by the kernel: memory ran out on this machine meanwhile"
    path = kernel / "groups" / counter
    path.write_text(path.read_text().replace("oom_kill 1", "oom_kill 2"))
    assert killed_for_memory(before) == f"killed by the kernel because memory ran out{limit}"


def test_nothing_to_count(kernel: Path) -> None:
    """Another system, or a process that is gone."""
    (kernel / "proc/vmstat").unlink()
    before = memory_kills(99)
    assert before == memory_kills_module.MemoryKills(None, 0, 0)
    assert killed_for_memory(before) == ""


@pytest.mark.root
@pytest.mark.skipif(bool(groups.missing()), reason=groups.missing())
def test_a_process_that_the_kernel_kills() -> None:
    found = groups.find()
    found.make(LAB, "x", None, 100_000_000)
    try:
        program = (
            f"from manyhands.lab import groups\ngroups.find().enter({LAB!r}, 'x')\nprint(flush=True)\ninput()\n"
            "held = []\nwhile True: held.append(bytearray(b'x') * 1_000_000)"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        before = memory_kills(process.pid)
        assert killed_for_memory(before) == ""
        process.communicate(b"\n", timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert killed_for_memory(before).startswith(
            "killed by the kernel because memory ran out (its control group may"
        )
    finally:
        found.remove(LAB)


# Over real processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    """One worker whose allocator sets no address space aside: on ARM PyTorch's has a gigabyte before it is asked, and a
    limit is then not felt. It reads this when PyTorch is loaded, hence `apart`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIMALLOC_ARENA_RESERVE", "0")
        with workers(1, apart=True) as coordinator:
            yield coordinator


@pytest.mark.slow
@pytest.mark.xdist_group("mishaps")
def test_a_worker_out_of_memory_says_so_and_lives_on(cluster: Coordinator, tmp_path: Path) -> None:
    """Its memory is limited in the middle of the run; the next one, without the limit, has the same process."""
    name, process = names(cluster)[0], pid(cluster, names(cluster)[0])
    before = resource.prlimit(process, resource.RLIMIT_AS)
    torch.manual_seed(0)
    layers = [nn.Upsample(scale_factor=SCALE), nn.Conv2d(1, 1, SCALE, stride=SCALE), nn.Flatten(), nn.Linear(64, 5)]
    model = nn.Sequential(*layers).double()

    def limited(step: int, *_: object) -> None:
        if step == 1:
            sizes = [psutil.Process(process).memory_info().vms for _ in range(50) if not time.sleep(0.002)]
            resource.prlimit(process, resource.RLIMIT_AS, (min(sizes) + 10_000_000, before[1]))

    try:
        with pytest.raises(OutOfMemory) as caught:
            train(cluster, "single", tmp_path, steps=500, model=model, on_step=limited)
    finally:
        resource.prlimit(process, resource.RLIMIT_AS, before)
    assert re.match(rf"Worker {name}: out of memory: .* \(\d+ bytes\) more were asked for; ", caught.value.message)
    assert f"Checkpoint: {tmp_path}" in caught.value.hint
    newest = checkpoint.load_newest(tmp_path)
    assert newest is not None
    ran = train(cluster, "single", tmp_path, steps=newest.checkpoint.step + 3, model=model, resume=True)
    assert ran.result.steps == 3
    assert pid(cluster, name) == process


@pytest.mark.slow
@pytest.mark.xdist_group("mishaps")
def test_data_that_raises_ends_in_a_whole_folder(cluster: Coordinator, tmp_path: Path) -> None:
    """Somebody's own code fails: its words come out, and the run goes on from its checkpoint once it is mended."""

    def broken(index: int, picture: torch.Tensor, kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 17:
            raise ZeroDivisionError("sample 17 is made of nothing")
        return picture, kind

    plan = shared(names(cluster), 12)
    with pytest.raises(Exception, match="sample 17 is made of nothing") as caught:
        train(cluster, plan, tmp_path, steps=8, data=Pictures(change=broken))
    assert isinstance(caught.value, ManyhandsError)
    assert (tmp_path / "events.jsonl").read_text().splitlines()[-1].count('"failed"') == 1
    ran = train(cluster, plan, tmp_path, steps=8, resume=True)
    assert len(ran.result.losses) == 8
