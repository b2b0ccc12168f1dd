"""The training baselines of `manyhands bench core`, each in processes of its own, run block by block.

A baseline reads lines 'N' from its standard input, runs N steps, and answers with their seconds as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.facts.errors import ManyhandsError, TimedOut

LIMIT_SECONDS = 300.0


def _answer(step: Callable[[], None], *, speaks: bool) -> None:
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        if speaks:
            print(json.dumps(seconds), flush=True)


def _training(model: str, shape: tuple[int, ...], samples: int) -> tuple[Any, Any, Any, Any]:
    import torch

    from manyhands.models.registry import ZOO, build, example_batch, example_target, loss_function
    from manyhands.runtime.processes import keep_memory

    torch.set_num_threads(1)
    keep_memory()  # as our workers do: the baseline is tuned alike
    torch.manual_seed(0)
    module = build(model)
    batch = example_batch(model, samples, input_shape=shape)
    target = example_target(model, samples, input_shape=shape)
    return module, batch, target, loss_function(ZOO[model].loss)


def plain(model: str, shape: tuple[int, ...], samples: int, momentum: float = 0.9) -> None:
    """Train the plain module in this process, with PyTorch's default kernels."""
    import torch

    module, batch, target, loss = _training(model, shape, samples)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=momentum)

    def step() -> None:
        optimizer.zero_grad()
        loss(module(batch), target).backward()
        optimizer.step()

    _answer(step, speaks=True)


def distributed(
    model: str, shape: tuple[int, ...], samples: int, rank: int, world: int, port: int, bucket: int
) -> None:
    """Train as one of PyTorch's DistributedDataParallel workers, over gloo."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    module, batch, target, loss = _training(model, shape, samples)
    wrapped = DistributedDataParallel(
        module, bucket_cap_mb=bucket, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(batch), target).backward()
        optimizer.step()

    _answer(step, speaks=rank == 0)


class Baseline:
    """Processes that run blocks of steps on request."""

    def __init__(self, calls: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"from manyhands_bench.core.ddp import *; {call}"], text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=environment,
            )
            for number, call in enumerate(calls)
        ]  # fmt: skip

    def run(self, steps: int) -> list[float]:
        """Run steps and return the seconds of each; raise TimedOut if the baseline does not answer within the limit."""
        import selectors

        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            except OSError as error:
                raise ManyhandsError(f"A baseline ended (exit code {process.poll()}) before it was to run.") from error
        output = self.processes[0].stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(LIMIT_SECONDS):
                raise TimedOut(f"A baseline did not run {steps} steps within {LIMIT_SECONDS:g} s.")
        line = output.readline()
        if not line:
            raise ManyhandsError("A baseline ended before it answered.")
        seconds: list[float] = json.loads(line)
        return seconds

    def close(self) -> None:
        end_all(self.processes)


def end_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill processes, wait for them, and close their pipes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
