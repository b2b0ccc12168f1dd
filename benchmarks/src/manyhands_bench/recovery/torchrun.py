"""The same fault under torchrun and DistributedDataParallel: a node is killed, the others rendezvous again and go on.

    python -m torch.distributed.run ... -m manyhands_bench.recovery.torchrun LOG MODEL SHAPE SAMPLES

Every worker writes a line into LOG.RANK when it begins a step: the clock, which all processes of a machine share, the
step, and the number of ranks. Rank 0 keeps a checkpoint, from which all go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from manyhands.facts.errors import TimedOut

NODES = 3
STEPS_BEFORE = 8
"""Steps that every node has begun when one is killed."""
STEPS_BETWEEN_CHECKPOINTS = 10
LIMIT_SECONDS = 240.0
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
"""Time-outs of the rendezvous: how long it waits for others to join, and for a heartbeat."""
_MOST_STEPS = 100_000
_POLL_SECONDS = 0.05


def seconds_after_kill(model: str, shape: tuple[int, ...], samples: int, rendezvous: str = "") -> float:
    """Return the seconds from the kill of one of three nodes, agent and worker, to the start of the next step of the
    remaining nodes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="manyhands-torchrun-") as folder:
        log = Path(folder) / "steps"
        agents = [_agent(node, port, log, model, shape, samples // NODES, rendezvous) for node in range(NODES)]
        try:
            _wait(lambda: all(len(_begun(log, rank)) >= STEPS_BEFORE for rank in range(NODES)), agents, "to begin")
            killed_at = time.monotonic()
            _end_tree(agents[-1].pid)  # not the first, which hosts the rendezvous
            _wait(lambda: bool(_after(log)), agents[:-1], "to go on")
            return min(_after(log)) - killed_at
        finally:
            for agent in agents:
                _end_tree(agent.pid)
            for agent in agents:
                agent.wait(10)


def _agent(
    node: int, port: int, log: Path, model: str, shape: tuple[int, ...], samples: int, rendezvous: str
) -> subprocess.Popen[bytes]:
    words = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES - 1}:{NODES}", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", "--max-restarts=3",
        "--local-addr=127.0.0.1", *([f"--rdzv-conf={rendezvous}"] if rendezvous else []),
        "-m", "manyhands_bench.recovery.torchrun", str(log), model, "x".join(map(str, shape)), str(samples),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MANYHANDS_NODE": str(node),
    }  # fmt: skip
    return subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _begun(log: Path, rank: int) -> list[tuple[float, int, int]]:
    """Return (moment, step, number of ranks) for each step that a rank has begun."""
    try:
        lines = log.with_suffix(f".{rank}").read_text().splitlines()
    except OSError:
        return []
    moments = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that is being written
            moment, step, world = json.loads(line)
            moments.append((float(moment), int(step), int(world)))
    return moments


def _after(log: Path) -> list[float]:
    """Return the moments at which the remaining nodes began their steps."""
    return [moment for rank in range(NODES) for moment, _, world in _begun(log, rank) if world < NODES]


def _wait(is_so: Callable[[], bool], agents: list[subprocess.Popen[bytes]], purpose: str) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        ended = [agent.returncode for agent in agents if agent.poll() is not None]
        if ended or time.monotonic() > end:
            how = f"ended with exit code {ended[0]}" if ended else f"took longer than {LIMIT_SECONDS:g} s"
            raise TimedOut(f"torchrun {how} {purpose}.")
        time.sleep(_POLL_SECONDS)


def _end_tree(process: int) -> None:
    """Kill a node: the agent and every process that it has started."""
    import psutil

    children: list[int] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = [child.pid for child in psutil.Process(process).children(recursive=True)]
    for pid in (process, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# The worker


def main() -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file, save_file
    from torch.nn.parallel import DistributedDataParallel

    from manyhands.models.registry import ZOO, build, example_batch, example_target, loss_function
    from manyhands.runtime.processes import keep_memory

    log, model, size, samples = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    shape = tuple(int(extent) for extent in size.split("x"))
    torch.set_num_threads(1)
    keep_memory()  # as our workers do: the baseline is tuned alike
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = build(model)
    checkpoint = log.with_suffix(".safetensors")
    if checkpoint.exists():
        module.load_state_dict(load_file(checkpoint))
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    batch, target = example_batch(model, samples, input_shape=shape), example_target(model, samples, input_shape=shape)
    loss = loss_function(ZOO[model].loss)
    with log.with_suffix(f".{rank}").open("a", buffering=1) as lines:
        for step in range(_MOST_STEPS):
            lines.write(json.dumps([time.monotonic(), step, world]) + "\n")
            optimizer.zero_grad()
            loss(wrapped(batch), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if rank == 0 and step % STEPS_BETWEEN_CHECKPOINTS == 0:
                save_file(module.state_dict(), checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)


if __name__ == "__main__":
    main()
