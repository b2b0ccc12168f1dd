"""Tensors for workers on the same GPU travel as descriptors: wherever tensors travel, and with the same numbers.

The GPU is played by a dictionary here; tests/runtime/test_cuda.py has a real one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import msgspec
import pytest
import torch
from small_plans import staged, tiled

from harness import SGD, Ran, run
from manyhands.executor import graph_part
from manyhands.executor.gpu_peers import DESCRIPTOR_BYTES, GpuPeers
from manyhands.facts.errors import BadSchedule, WorkerLost
from manyhands.facts.plan import ByTiles, Codec, Plan
from manyhands.schedule.actions import Receive, Reduce
from small_networks import batches_of, captured


class PlayedPeers(GpuPeers):
    """All devices are peers; copies are in a dictionary, by number, until they are opened."""

    memory: ClassVar[dict[int, torch.Tensor]] = {}
    numbers: ClassVar[Iterable[int]] = itertools.count(1)
    opened_by: ClassVar[dict[str, int]] = {}
    _lock = threading.Lock()

    def __init__(self, device: str, names: Iterable[str], torch_device: torch.device) -> None:
        super().__init__(device, names, torch_device)
        self._device, self._names = device, _Everybody()

    def forget(self) -> None:
        return

    def described(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            number = next(iter(self.numbers))
            self.memory[number] = tensor.detach().clone()
        row = torch.zeros(DESCRIPTOR_BYTES, dtype=torch.uint8)
        row[:8] = torch.frombuffer(bytearray(number.to_bytes(8, "little")), dtype=torch.uint8)
        return row

    def opened(self, row: torch.Tensor | memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        content = row.numpy().tobytes() if isinstance(row, torch.Tensor) else bytes(row)
        with self._lock:
            tensor = self.memory.pop(int.from_bytes(content[:8], "little"))
            self.opened_by[self._device] = self.opened_by.get(self._device, 0) + 1
        assert tensor.dtype == dtype
        return tensor.view(tuple(shape))


class _Everybody(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return name != "coordinator"

    def __bool__(self) -> bool:
        return True


def ran(monkeypatch: pytest.MonkeyPatch, name: str, plan: Callable[..., Plan], samples: int) -> tuple[Ran, Ran]:
    """A run by messages, and the same on one played GPU."""
    graph = captured(name)
    made, batches = plan(graph), batches_of(name, 3, samples)
    plain = run(graph, made, batches, SGD)
    plain.raise_first()
    PlayedPeers.memory.clear()
    PlayedPeers.opened_by.clear()
    monkeypatch.setattr(graph_part, "GpuPeers", PlayedPeers)
    played = run(graph, made, batches, SGD)
    played.raise_first()
    return plain, played


PLANS: dict[str, Callable[..., Plan]] = {
    "stages": lambda graph: staged(graph, [3], [[3], [3]], micro_batches=2),
    "samples": lambda graph: staged(graph, [], [[2, 1, 3]]),
    "hybrid": lambda graph: staged(graph, [3], [[2, 1], [1, 2]], micro_batches=2),
    "tiles": lambda graph: tiled(graph, ByTiles((1, 1), (1, 1)), "t0"),
}


@pytest.mark.parametrize("by", PLANS)
def test_runs_on_one_gpu_have_the_bits_of_runs_by_messages(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    plain, played = ran(monkeypatch, "small", PLANS[by], 4 if by == "tiles" else 6)
    assert played.losses == plain.losses
    for device, weights in plain.weights.items():
        assert all(torch.equal(played.weights[device][name], weight) for name, weight in weights.items())
    assert not PlayedPeers.memory  # everything that was sent has been opened
    assert set(PlayedPeers.opened_by) == set(plain.weights)


def test_every_message_is_a_descriptor_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no tensor has travelled otherwise: the bytes received are those of descriptors."""
    _, played = ran(monkeypatch, "small", PLANS["hybrid"], 6)
    for device, log in played.logs.items():
        came = {source: n for source, n in log.received_bytes.items() if source != "coordinator"}
        assert came
        assert all(n % DESCRIPTOR_BYTES == 0 for n in came.values())
        actions = list(played.schedule.every_action(device))
        parts = sum(len(action.message.parts) for action in actions if isinstance(action, Receive))
        assert any(isinstance(action, Reduce) for action in actions)
        assert sum(came.values()) >= 3 * parts * DESCRIPTOR_BYTES


def test_packed_features_go_as_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan packs in few bits is packed on one GPU, too: its result is the plan's."""

    def plan(graph: object) -> Plan:
        made = PLANS["stages"](graph)
        second = msgspec.structs.replace(made.stages[1], codec=Codec(bits=8))
        return msgspec.structs.replace(made, stages=(made.stages[0], second))

    plain, played = ran(monkeypatch, "small", plan, 6)
    assert played.losses == plain.losses


@pytest.mark.parametrize(
    "row",
    [
        b"\xff\xff" + bytes(510),
        b"\x05\x00hello" + bytes(505),
        (lambda body: len(body).to_bytes(2, "little") + body)(
            msgspec.msgpack.encode([b"h" * 66, 16, 0, b"/etc/passwd", 0, b"e" * 64, True])
        ),
        (lambda body: len(body).to_bytes(2, "little") + body)(
            msgspec.msgpack.encode([b"h" * 66, 16, 0, b"/torch_1_2_3", 10**9, b"e" * 64, True])
        ),
        (lambda body: len(body).to_bytes(2, "little") + body)(
            msgspec.msgpack.encode([b"h" * 66, 99, 0, b"/torch_1_2_3", 0, b"e" * 64, True])
        ),
    ],
    ids=["nothing", "text", "another file", "beyond its counter", "another size"],
)
def test_what_describes_no_tensor_is_refused_before_anything_is_opened(row: bytes) -> None:
    peers = GpuPeers("a", ("b",), torch.device("cpu"))
    with pytest.raises(BadSchedule):
        peers.opened(memoryview(row.ljust(DESCRIPTOR_BYTES, b"\0")), (4,), torch.float32)


def test_memory_of_a_worker_that_died_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the others are asked who is gone, and the job goes on without it."""

    def gone(*arguments: object) -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", gone, raising=False)
    body = msgspec.msgpack.encode([b"h" * 66, 16, 0, b"/torch_1_2_3", 0, b"e" * 64, True])
    row = (len(body).to_bytes(2, "little") + body).ljust(DESCRIPTOR_BYTES, b"\0")
    with pytest.raises(WorkerLost, match="cannot be opened: CUDA error: invalid resource handle"):
        GpuPeers("a", ("b",), torch.device("cpu")).opened(memoryview(row), (4,), torch.float32)
