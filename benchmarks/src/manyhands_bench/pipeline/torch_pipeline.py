"""PyTorch's own ways of sharing training, which `manyhands bench pipeline` measures itself against.

    python -m manyhands_bench.pipeline.torch_pipeline RANK WORLD HOST INTERFACE CORE SETTING

One process for each device, started by `TorchGroup`, in a lab on the device itself. It reads requests, one line of
JSON each, and answers each with one line: {"found": ...}, or {"error": "..."} after which it ends. All ways live in the
same processes, over one gloo world, and take turns: DistributedDataParallel, and `torch.distributed.pipelining` with
stages cut by hand. One thread each; glibc keeps memory as in our workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from manyhands.facts.errors import BadValue, ManyhandsError, TimedOut
from manyhands_bench.core.ddp import end_all

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

START_SECONDS = 120.0
LIMIT_SECONDS = 120.0
"""For any answer, and for any message between the processes."""
LEARNING_RATE, MOMENTUM = 1e-4, 0.9
_TAIL_BYTES = 600


@dataclass(frozen=True)
class Setting:
    """A model at an input size, and the samples of a mini-batch."""

    model: str
    shape: tuple[int, ...]
    samples: int
    micro_batches: int

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{self.model} {size}, batch {self.samples} in {self.micro_batches} micro-batches"


@dataclass(frozen=True)
class Way:
    """One of PyTorch's ways, with all that a person would choose by hand."""

    kind: str
    """'1f1b', 'gpipe' or 'ddp'."""
    ranks: tuple[int, ...]
    bounds: tuple[int, ...] = ()
    """Of a pipeline: stage i has units [bounds[i], bounds[i + 1])."""
    micro_batches: int = 1
    shares: tuple[int, ...] = ()
    """Of 'ddp': samples of each rank."""
    channels_last: bool = False
    """The memory format of weights and inputs, and so of all in between."""

    def __str__(self) -> str:
        form = ", channels_last" if self.channels_last else ""
        if self.kind == "ddp":
            return f"DDP with {'+'.join(map(str, self.shares))} samples, default buckets{form}"
        name = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}[self.kind]
        cuts = ", ".join(map(str, self.bounds[1:-1]))
        return f"{name} with {len(self.ranks)} stages cut at {cuts}, {self.micro_batches} micro-batches{form}"


# The side that asks


class BareRound(NamedTuple):
    """Seconds of a stage's computing in a round: each micro-batch's forward pass (on the last stage with the loss), its
    backward pass, and the optimiser's step."""

    forward: list[float]
    backward: list[float]
    step: float


class TorchGroup:
    """The processes, for as long as they are asked; whichever dies or is silent is named."""

    def __init__(
        self, setting: Setting, places: Sequence[Sequence[str]], *, host: str = "127.0.0.1", interface: str = "lo",
        cores: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        """`places`: for each process the words before its command, such as those that bring it into a lab.
        `host`: where the first of them is found. `cores`: the core that each is kept on."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.processes: list[subprocess.Popen[str]] = []
        self._said = [tempfile.TemporaryFile() for _ in places]  # noqa: SIM115
        try:
            for rank, before in enumerate(places):
                core = cores[rank] if cores else None
                words = [
                    *before, sys.executable, "-m", "manyhands_bench.pipeline.torch_pipeline", str(rank),
                    str(len(places)), host, interface, str(-1 if core is None else core), json.dumps(asdict(setting)),
                ]  # fmt: skip
                self.processes.append(
                    subprocess.Popen(
                        words, text=True, bufsize=1, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        stderr=self._said[rank],
                    )
                )  # fmt: skip
            everyone = range(len(places))
            port = self._answers([0], "begin", START_SECONDS)[0]
            for rank in everyone[1:]:
                self._tell(rank, port)
            self._answers(everyone, "join the others", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, way: Way, steps: int) -> list[float]:
        """Seconds of each of so many training steps."""
        found = self._ask({"do": "train", "way": asdict(way), "steps": steps}, f"run {way}")
        return [float(seconds) for seconds in found[way.ranks[0]]]

    def units(self, samples: int) -> list[tuple[float, int]]:
        """For every unit that a pipeline can be cut before: its seconds for some samples on the first device, forward
        and backward, and the bytes it hands on."""
        found = self._ask({"do": "units", "samples": samples}, "time the network's parts", ranks=[0])[0]
        return [(seconds, size) for seconds, size in found]

    def bare(self, bounds: Sequence[int], samples: int, seconds: float) -> list[list[BareRound]]:
        """For every stage, one on each process at once: round after round of computing; nothing is exchanged."""
        request = {"do": "bare", "bounds": list(bounds), "samples": samples, "seconds": seconds}
        found = self._ask(request, "compute their stages alone")
        return [[BareRound(*one) for one in rounds] for rounds in found.values()]

    def _ask(self, request: dict[str, Any], what: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        asked = range(len(self.processes)) if ranks is None else ranks
        for rank in asked:
            self._tell(rank, request)
        return self._answers(asked, what, LIMIT_SECONDS)

    def _tell(self, rank: int, message: object) -> None:
        pipe = self.processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except OSError as error:
            raise self._died(rank, "take a request") from error

    def _answers(self, ranks: Sequence[int], what: str, limit_seconds: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        end = time.monotonic() + limit_seconds
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                output = self.processes[rank].stdout
                assert output is not None
                selector.register(output, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    silent = ", ".join(str(rank) for rank in ranks if rank not in found)
                    raise TimedOut(f"Torch rank {silent} did not {what} within {limit_seconds:g} s.")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise self._died(key.data, what)
                    answer = json.loads(line)
                    if "error" in answer:
                        raise ManyhandsError(f"Torch rank {key.data} could not {what}: {answer['error']}")
                    found[key.data] = answer["found"]
                    selector.unregister(key.fileobj)
        return {rank: found[rank] for rank in ranks}

    def _died(self, rank: int, what: str) -> ManyhandsError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(5)
        file = self._said[rank]
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        words = file.read().decode(errors="replace").strip()
        return ManyhandsError(
            f"Torch rank {rank} ended (exit code {self.processes[rank].poll()}) when it was to {what}: {words}"
        )

    def close(self) -> None:
        end_all(self.processes)
        for file in self._said:
            file.close()

    def __enter__(self) -> TorchGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# The side that answers


def units_of(module: nn.Module) -> list[nn.Module]:
    """A convolutional classifier as a run of modules, cut wherever one tensor goes on: each convolution with what
    follows it, each block that adds its input. The places are those that `granularity="blocks"` finds."""
    from torch import nn

    from manyhands.models.mobilenet import ConvClassifier, InvertedResidual

    if not isinstance(module, ConvClassifier):
        raise BadValue(f"{type(module).__name__} cannot be cut by hand here; a MobileNet can.")
    found: list[nn.Module] = []
    for block in module.blocks:
        if isinstance(block, InvertedResidual) and block.adds_input:
            found.append(block)
            continue
        for part in block.residual if isinstance(block, InvertedResidual) else [block]:
            last = found[-1] if found else None
            if isinstance(part, nn.Conv2d) or not isinstance(last, nn.Sequential):
                found.append(nn.Sequential(part))
            else:
                last.append(part)
    return [*found, nn.Sequential(module.pool, nn.Flatten(1)), module.head]


def _packed_for_sending(stage: nn.Module) -> nn.Module:
    """Computes in channels_last; gloo sends contiguous tensors only, there and back."""
    import torch
    from torch import nn

    class Format(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, there: torch.memory_format, back: torch.memory_format) -> Tensor:
            ctx.back = back
            return value.contiguous(memory_format=there) if value.dim() == 4 else value

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
            (own,) = gradients
            return own.contiguous(memory_format=ctx.back) if own.dim() == 4 else own, None, None

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, value: Tensor) -> Tensor:
            plain, last = torch.contiguous_format, torch.channels_last
            apply: Callable[..., Tensor] = Format.apply
            return apply(self.stage(apply(value, last, plain)), plain, last)

    return Packed()


class Rank:
    """One of the processes."""

    def __init__(self, setting: Setting, rank: int) -> None:
        from manyhands.models.registry import ZOO, example_batch, example_target, loss_function

        self.setting, self.rank = setting, rank
        self.batch: Any = example_batch(setting.model, setting.samples, input_shape=setting.shape)
        self.target: Tensor = example_target(setting.model, setting.samples, input_shape=setting.shape)
        self.loss: Callable[[Tensor, Tensor], Tensor] = loss_function(ZOO[setting.model].loss)
        self._ways: dict[str, Callable[[], None]] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        if request["do"] == "train":
            way = msgspec.convert(request["way"], Way)
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

    def inputs(self, way: Way) -> Any:
        import torch

        return self.batch.contiguous(memory_format=torch.channels_last) if way.channels_last else self.batch

    # Training

    def train(self, way: Way, steps: int) -> list[float]:
        import torch.distributed as dist

        group = self._groups.get(way.ranks)
        if group is None:  # everybody takes part in making a group, also who is not in it
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

    def _distributed(self, way: Way, group: ProcessGroup) -> Callable[[], None]:
        """Gradients are averaged over ranks, so that a rank's loss is weighted by its samples."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        place = way.ranks.index(self.rank)
        first, own = sum(way.shares[:place]), way.shares[place]
        batch, target = self.inputs(way)[first : first + own], self.target[first : first + own]
        weight = own * len(way.shares) / sum(way.shares)
        wrapped = DistributedDataParallel(
            self.module(way.channels_last), process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            (self.loss(wrapped(batch), target) * weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def _pipelined(self, way: Way, group: ProcessGroup) -> Callable[[], None]:
        import torch
        from torch import nn
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        place, count = way.ranks.index(self.rank), len(way.ranks)
        units = units_of(self.module(way.channels_last))
        own = nn.Sequential(*units[way.bounds[place] : way.bounds[place + 1]])
        stage = PipelineStage(
            _packed_for_sending(own) if way.channels_last else own, place, count, torch.device("cpu"), group=group
        )
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[way.kind]
        schedule = kind(stage, way.micro_batches, loss_fn=self.loss)
        optimizer = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
        given = (self.inputs(way),) if place == 0 else ()
        target = self.target if place == count - 1 else None

        def step() -> None:
            optimizer.zero_grad()
            schedule.step(*given, target=target, return_outputs=False)
            optimizer.step()

        return step

    # Computing alone

    def units(self, samples: int) -> list[tuple[float, int]]:
        import torch

        units = units_of(self.module())
        found: list[tuple[float, int]] = []
        value = self.batch[:samples]
        for unit in units:
            entered = value.detach().requires_grad_(bool(found))
            seconds = []
            for _ in range(6):
                start = time.perf_counter()
                made = unit(entered)
                made.backward(torch.ones_like(made))
                seconds.append(time.perf_counter() - start)
            value = made.detach()
            found.append((statistics.median(seconds[1:]), value.numel() * value.element_size()))
        return found

    def bare(self, first: int, last: int, samples: int, seconds: float) -> list[BareRound]:
        import torch
        import torch.distributed as dist
        from torch import nn

        units = units_of(self.module())
        with torch.no_grad():
            entered = nn.Sequential(*units[:first])(self.batch[:samples])
        own, is_last = nn.Sequential(*units[first:last]), last == len(units)
        entered = entered.detach().requires_grad_(first > 0)
        optimizer = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
        target = self.target[:samples]
        handed_back = torch.ones_like(own(entered)) if not is_last else None
        rounds: list[BareRound] = []
        dist.barrier()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rounds) < 2:
            forward: list[float] = []
            backward: list[float] = []
            for _ in range(self.setting.micro_batches):
                start = time.perf_counter()
                made = own(entered)
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
    keep_memory()  # what our workers do; the baseline is tuned alike
    limit = timedelta(seconds=LIMIT_SECONDS)
    is_first = int(rank) == 0
    port = 0 if is_first else json.loads(sys.stdin.readline() or "0")
    store = TCPStore(host, port, int(world), is_first, timeout=limit, wait_for_workers=False)
    if is_first:
        _say({"found": store.port})
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world), timeout=limit)
    here = Rank(msgspec.convert(json.loads(setting), Setting), int(rank))
    _say({"found": None})
    for line in sys.stdin:
        try:
            found = here.answer(json.loads(line))
        except Exception as error:
            _say({"error": f"{type(error).__name__}: {error}"})
            os._exit(1)  # the others may be waiting for it
        _say({"found": found})
    os._exit(0)


if __name__ == "__main__":
    main()
