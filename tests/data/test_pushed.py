"""Batches that a loop pushes: taken in order, again, and forgotten; and what a batch may look like."""

from __future__ import annotations

import threading
from collections import UserDict
from typing import Any

import psutil
import pytest
import torch

from manyhands.data.kept import KeptBatches
from manyhands.data.pushed import BatchRows, PushedBatches, copied_alone, pair_of, samples_in
from manyhands.facts.errors import BadData


def test_batches_are_taken_in_order_and_again_until_they_are_forgotten() -> None:
    with KeptBatches() as kept:
        batches = PushedBatches(3, kept)
        assert not batches.is_ready()
        assert [batches.push(torch.tensor([float(number)]), number) for number in range(4)] == [3, 4, 5, 6]
        assert batches.is_ready()
        assert [next(batches)[0] for _ in range(4)] == [3, 4, 5, 6]
        assert not batches.is_ready()
        assert [batches.samples_at(step) for step in (3, 6, 7)] == [1, 1, None]
        step, inputs, targets = next(batches.from_step(4))
        assert (step, inputs.item(), targets) == (4, 1.0, 1)
        batches.forget_before(5)
        assert kept.steps == (5, 6)
        assert [batches.samples_at(step) for step in (4, 5)] == [None, 1]
        assert next(batches)[0] == 5


def test_a_batch_is_copied_and_parted() -> None:
    x, y = torch.ones(4, 2), torch.zeros(4)
    inputs, targets = pair_of(((x, y),), None)
    x.fill_(7)
    assert inputs.eq(1).all()
    assert targets.eq(0).all()
    named = UserDict({"x": x, "labels": y})
    inputs, targets = pair_of((named,), ("labels",))
    assert (list(inputs), targets.shape) == (["x"], (4,))
    assert pair_of(({"x": x},), ("labels",))[1] == ()
    assert pair_of((x,), ("labels",))[1] == ()
    assert torch.equal(pair_of(([x, y],), None)[0], x)
    rows = BatchRows({"x": x, "z": (y,)}, [y])
    assert len(rows) == 4
    assert rows[1][0]["x"].shape == (2,)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4, 5).transpose(0, 2),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(1).expand(4, 5),
        torch.rand(4, 3).bfloat16()[:, 1:],
        torch.rand(2, 2, dtype=torch.complex64).conj().imag,
        torch.tensor(3),
        torch.ones(0, 3),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=["transposed", "channels last", "expanded", "bfloat16", "negated", "a number", "empty", "parameter"],
)
def test_a_copy_is_as_torch_makes_it(tensor: torch.Tensor) -> None:
    copy = copied_alone(tensor)
    assert (copy.dtype, copy.shape, copy.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(copy, tensor)
    if tensor.numel():
        assert copy.stride() == tensor.detach().to(copy=True).stride()
        assert copy.data_ptr() != tensor.data_ptr()


def test_no_threads_of_torch_copy_a_batch() -> None:
    """They would spin for a while afterwards, on cores where devices compute."""
    batch, counts = torch.rand(16, 24, 24, 24), []

    def copy() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        for way in (lambda: pair_of((batch, batch), None), lambda: batch.to(copy=True)):
            already = psutil.Process().num_threads()
            way()
            counts.append(psutil.Process().num_threads() - already)
        torch.set_num_threads(before)

    thread = threading.Thread(target=copy)  # torch's helpers belong to the thread that they help
    thread.start()
    thread.join()
    assert counts[0] == 0
    if counts[1] == 0:
        pytest.skip("This torch copies alone anyway.")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.ones(2),), "is a Tensor, not a pair"),
        (((torch.ones(2),) * 3,), "is a tuple of 3, not a pair"),
        ((torch.ones(2),) * 3, "was called with 3 values"),
        ((["words"], torch.ones(1)), "holds a str"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(BadData, match=said):
        pair_of(batch, None)


@pytest.mark.parametrize("inputs", [{}, torch.tensor(1.0), {"a": torch.ones(2), "b": torch.ones(3)}, torch.ones(0, 2)])
def test_samples_are_counted_along_the_first_axes(inputs: Any) -> None:
    assert samples_in((torch.ones(3, 2), {"b": torch.ones(3)})) == 3
    with pytest.raises(BadData, match="same number, at least 1"):
        samples_in(inputs)
