"""A step on one GPU: plain PyTorch, and manyhands with that GPU as its only device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.profiler.layer_clocks import CallTimer
from manyhands_bench.gpu.networks import GpuNetwork, loss

BATCHES = 4
"""Batches of the data set, which are trained again and again."""
LEARNING_RATE, MOMENTUM = 0.01, 0.9
WARM_UP = 10
"""First steps that are not counted, on both sides."""


def plain_seconds(network: GpuNetwork, precision: str, steps: int, *, exact: bool = False) -> float:
    """Return the seconds of a step of a plain loop: batches in pinned memory, copied without waiting; a loss that is
    not fetched; PyTorch's usual step of the optimizer."""
    step = plain_step(network, precision)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    if exact:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    try:
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                torch.cuda.synchronize()
                begin = time.monotonic()
            step(number)
        torch.cuda.synchronize()
        return (time.monotonic() - begin) / steps
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before


def plain_step(network: GpuNetwork, precision: str) -> Callable[[int], None]:
    """Return a step of the plain loop, which takes its number."""
    device = torch.device("cuda")
    module = network.build().to(device).train()
    inputs, targets = (tensor.pin_memory() for tensor in network.data(BATCHES))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step(number: int) -> None:
        first = number % BATCHES * network.batch_size
        rows = slice(first, first + network.batch_size)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            value = loss(
                module(inputs[rows].to(device, non_blocking=True)), targets[rows].to(device, non_blocking=True)
            )
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def busy_seconds(network: GpuNetwork, steps: int) -> float:
    """Return the seconds of a step of the plain loop in which the GPU computes, which is what a slower one takes longer
    for: without those in which it waits for Python."""
    step, timer = plain_step(network, "float32"), CallTimer(torch.device("cuda"))
    taken = [timer(partial(step, number)) for number in range(WARM_UP + steps)]
    return statistics.median(taken[WARM_UP:])


def our_seconds(network: GpuNetwork, precision: str, steps: int, *, exact: bool = False) -> float:
    """Return the seconds of a step of `mh.train` with one worker on the GPU: the median, without the first ones."""
    ended: list[float] = []
    inputs, targets = network.data(BATCHES)
    with TemporaryDirectory() as folder:
        mh.train(
            network.build(), TensorDataset(inputs, targets), loss=loss,
            optimizer=mh.Optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM), batch_size=network.batch_size,
            steps=2 * WARM_UP + steps, cluster=mh.Cluster.local(1, gpus=1), plan="single", folder=Path(folder) / "run",
            precision=precision, exact=exact, verify=False,
            on_step=lambda *step: ended.append(time.monotonic()),
        )  # fmt: skip
    return (ended[-1] - ended[2 * WARM_UP - 1]) / (len(ended) - 2 * WARM_UP)


def step_ratio(network: GpuNetwork, precision: str, steps: int, repeats: int) -> tuple[float, float, float]:
    """Return a plain step over ours, and the seconds of both: medians of runs in turns."""
    plain, ours = [], []
    for _ in range(repeats):
        plain.append(plain_seconds(network, precision, steps))
        ours.append(our_seconds(network, precision, steps))
    return statistics.median(plain) / statistics.median(ours), statistics.median(plain), statistics.median(ours)
