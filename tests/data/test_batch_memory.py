"""Batches in memory that is used again: never while anybody has the batch that was in it."""

from __future__ import annotations

import torch

from manyhands.data.batch_memory import LEAST_BYTES, MOST_BUFFERS, BatchMemory
from manyhands.transport.memory import as_bytes

SAMPLES = 4


def large(number: float) -> list[torch.Tensor]:
    return [torch.full((LEAST_BYTES // 4 // SAMPLES,), number + place) for place in range(SAMPLES)]


def stacked(memory: BatchMemory, number: float) -> torch.Tensor:
    batch = memory.stack(large(number))
    assert batch is not None
    assert torch.equal(batch, torch.stack(large(number)))
    return batch


def test_memory_of_a_batch_that_is_gone_is_used_again() -> None:
    memory = BatchMemory()
    place = stacked(memory, 0.0).data_ptr()
    assert stacked(memory, 5.0).data_ptr() == place


def test_whatever_still_has_a_batch_keeps_it() -> None:
    memory = BatchMemory()
    holders = [stacked(memory, 0.0), stacked(memory, 10.0)[1:2], as_bytes(stacked(memory, 20.0))]
    later = [stacked(memory, 30.0), stacked(memory, 40.0)]
    assert torch.equal(holders[0], torch.stack(large(0.0)))
    assert torch.equal(holders[1], torch.stack(large(10.0))[1:2])
    assert bytes(holders[2]) == torch.stack(large(20.0)).numpy().tobytes()
    assert len({tensor.data_ptr() for tensor in (holders[0], *later)}) == 3


def test_what_is_small_or_not_alike_is_left_to_pytorch() -> None:
    memory = BatchMemory()
    assert memory.stack([torch.ones(2), torch.ones(2)]) is None
    assert memory.stack([1.0, 2.0]) is None
    assert memory.stack([*large(0.0)[1:], torch.ones(3)]) is None
    assert memory.stack([sample.requires_grad_() for sample in large(0.0)]) is None


def test_there_are_only_so_many() -> None:
    memory = BatchMemory()
    held = [stacked(memory, float(number)) for number in range(MOST_BUFFERS)]
    assert memory.stack(large(0.0)) is None
    held.pop()
    assert memory.stack(large(0.0)) is not None
