"""PyTorch's own ways of sharing training, the baselines of `manyhands bench pipeline`.

    python -m manyhands_bench.pipeline.torch_pipeline RANK WORLD HOST INTERFACE CORE SETTING

One process for each device, started by `TorchGroup`, in a lab on the device itself. It reads requests, one line of
JSON each, and answers each with one line: {"found": ...}, or {"error": "..."} after which it ends. All ways live in the
same processes, over one gloo world, and take turns: DistributedDataParallel, and `torch.distributed.pipelining` with
stages cut by hand. One thread each; glibc keeps memory as in our workers.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.facts.errors import BadValue
from manyhands_bench.pipeline.torch_setting import (
    LEARNING_RATE,
    LIMIT_SECONDS,
    MOMENTUM,
    BareRound,
    TorchSetting,
    TorchVariant,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


# The side that asks


# The side that answers


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return a convolutional classifier as a sequence of modules, cut wherever a single tensor goes on: each
    convolution with what follows it, each block that adds its input. The places are those that `granularity="blocks"`
    finds."""
    from torch import nn

    from manyhands.models.mobilenet import ConvClassifier, InvertedResidual

    if not isinstance(module, ConvClassifier):
        raise BadValue(f"{type(module).__name__} cannot be cut by hand here; a MobileNet can.")
    units: list[nn.Module] = []
    for block in module.blocks:
        if isinstance(block, InvertedResidual) and block.adds_input:
            units.append(block)
            continue
        for part in block.residual if isinstance(block, InvertedResidual) else [block]:
            last = units[-1] if units else None
            if isinstance(part, nn.Conv2d) or not isinstance(last, nn.Sequential):
                units.append(nn.Sequential(part))
            else:
                last.append(part)
    return [*units, nn.Sequential(module.pool, nn.Flatten(1)), module.head]


def _packed_for_sending(stage: nn.Module) -> nn.Module:
    """Return a stage that computes in channels_last between contiguous tensors: gloo sends no others."""
    import torch
    from torch import nn

    class _Format(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, ahead: torch.memory_format, back: torch.memory_format) -> Tensor:
            ctx.back = back
            return value.contiguous(memory_format=ahead) if value.dim() == 4 else value

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
            (gradient,) = gradients
            return gradient.contiguous(memory_format=ctx.back) if gradient.dim() == 4 else gradient, None, None

    class _Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, value: Tensor) -> Tensor:
            plain, last = torch.contiguous_format, torch.channels_last
            apply: Callable[..., Tensor] = _Format.apply
            return apply(self.stage(apply(value, last, plain)), plain, last)

    return _Packed()


class Rank:
    """One of the processes."""

    def __init__(self, setting: TorchSetting, rank: int) -> None:
        from manyhands.models.registry import ZOO, example_batch, example_target, loss_function

        self.setting, self.rank = setting, rank
        self.batch: Any = example_batch(setting.model, setting.samples, input_shape=setting.shape)
        self.target: Tensor = example_target(setting.model, setting.samples, input_shape=setting.shape)
        self.loss: Callable[[Tensor, Tensor], Tensor] = loss_function(ZOO[setting.model].loss)
        self._ways: dict[str, Callable[[], None]] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        if request["do"] == "train":
            way = msgspec.convert(request["way"], TorchVariant)
            return self.train(way, request["steps"])
        if request["do"] == "units":
            return self.units(request["samples"])
        first, last = request["bounds"][self.rank : self.rank + 2]
        return self.bare(first, last, request["samples"], request["seconds"])

    def module(self, channels_last: bool = False) -> nn.Module:
        import torch

        from manyhands.models.registry import build

        torch.manual_seed(0)
        module = build(self.setting.model)
        return module.to(memory_format=torch.channels_last) if channels_last else module  # type: ignore[call-overload]

    def inputs(self, way: TorchVariant) -> Any:
        import torch

        return self.batch.contiguous(memory_format=torch.channels_last) if way.channels_last else self.batch

    # Training

    def train(self, way: TorchVariant, steps: int) -> list[float]:
        import torch.distributed as dist

        group = self._groups.get(way.ranks)
        if group is None:  # all ranks take part in making a group, also those outside it
            group = self._groups[way.ranks] = dist.new_group(list(way.ranks))
        if self.rank not in way.ranks:
            return []
        step = self._ways.get(str(way))
        if step is None:
            make = self._distributed if way.kind == "ddp" else self._pipelined
            step = self._ways[str(way)] = make(way, group)
        seconds = []
        dist.barrier(group)
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _distributed(self, way: TorchVariant, group: ProcessGroup) -> Callable[[], None]:
        """Return a step of DistributedDataParallel, which averages gradients over ranks: a rank's loss is weighted by
        its samples."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        place = way.ranks.index(self.rank)
        first, share = sum(way.shares[:place]), way.shares[place]
        batch, target = self.inputs(way)[first : first + share], self.target[first : first + share]
        weight = share * len(way.shares) / sum(way.shares)
        wrapped = DistributedDataParallel(
            self.module(way.channels_last), process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            (self.loss(wrapped(batch), target) * weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def _pipelined(self, way: TorchVariant, group: ProcessGroup) -> Callable[[], None]:
        import torch
        from torch import nn
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        place, count = way.ranks.index(self.rank), len(way.ranks)
        units = units_of(self.module(way.channels_last))
        layers = nn.Sequential(*units[way.bounds[place] : way.bounds[place + 1]])
        stage = PipelineStage(
            _packed_for_sending(layers) if way.channels_last else layers, place, count, torch.device("cpu"), group=group
        )
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[way.kind]
        schedule = kind(stage, way.micro_batches, loss_fn=self.loss)
        optimizer = torch.optim.SGD(layers.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
        arguments = (self.inputs(way),) if place == 0 else ()
        target = self.target if place == count - 1 else None

        def step() -> None:
            optimizer.zero_grad()
            schedule.step(*arguments, target=target, return_outputs=False)
            optimizer.step()

        return step

    # Computing alone

    def units(self, samples: int) -> list[tuple[float, int]]:
        import torch

        units = units_of(self.module())
        timed: list[tuple[float, int]] = []
        value = self.batch[:samples]
        for unit in units:
            entered = value.detach().requires_grad_(bool(timed))
            seconds = []
            for _ in range(6):
                start = time.perf_counter()
                made = unit(entered)
                made.backward(torch.ones_like(made))
                seconds.append(time.perf_counter() - start)
            value = made.detach()
            timed.append((statistics.median(seconds[1:]), value.numel() * value.element_size()))
        return timed

    def bare(self, first: int, last: int, samples: int, seconds: float) -> list[BareRound]:
        import torch
        import torch.distributed as dist
        from torch import nn

        units = units_of(self.module())
        with torch.no_grad():
            entered = nn.Sequential(*units[:first])(self.batch[:samples])
        layers, is_last = nn.Sequential(*units[first:last]), last == len(units)
        entered = entered.detach().requires_grad_(first > 0)
        optimizer = torch.optim.SGD(layers.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
        target = self.target[:samples]
        handed_back = torch.ones_like(layers(entered)) if not is_last else None
        rounds: list[BareRound] = []
        dist.barrier()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rounds) < 2:
            forward: list[float] = []
            backward: list[float] = []
            for _ in range(self.setting.micro_batches):
                start = time.perf_counter()
                made = layers(entered)
                if is_last:
                    made = self.loss(made, target) / self.setting.micro_batches
                between = time.perf_counter()
                made.backward(handed_back)
                entered.grad = None
                forward.append(between - start)
                backward.append(time.perf_counter() - between)
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            rounds.append(BareRound(forward, backward, time.perf_counter() - start))
        return rounds[1:]


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    rank, world, host, interface, core, setting = sys.argv[1:]
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from manyhands.runtime.processes import keep_memory

    torch.set_num_threads(1)
    keep_memory()  # as our workers do: the baseline is tuned alike
    limit = timedelta(seconds=LIMIT_SECONDS)
    is_first = int(rank) == 0
    port = 0 if is_first else json.loads(sys.stdin.readline() or "0")
    store = TCPStore(host, port, int(world), is_first, timeout=limit, wait_for_workers=False)
    if is_first:
        _say({"found": store.port})
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world), timeout=limit)
    process = Rank(msgspec.convert(json.loads(setting), TorchSetting), int(rank))
    _say({"found": None})
    for line in sys.stdin:
        try:
            answer = process.answer(json.loads(line))
        except Exception as error:
            _say({"error": f"{type(error).__name__}: {error}"})
            os._exit(1)  # the others may be waiting for it
        _say({"found": answer})
    os._exit(0)


if __name__ == "__main__":
    main()
