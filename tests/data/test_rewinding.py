"""Batches that can be asked for again: whatever is asked for in whichever order, each step has its own batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manyhands.data.loader import Prefetcher
from manyhands.data.order import BatchOrder
from manyhands.data.rewinding import Rewindable, _byte_count

LAST = 12
BATCH_BYTES = 8 * 5 + 8


class Source:
    """A prefetcher as far as it is used: yields from a step on, once, until it is closed."""

    opened: list[Source]

    def __init__(self, first: int) -> None:
        self.next, self.is_closed, self.loaded = first, False, 0

    def __next__(self) -> tuple[int, Any, Any]:
        assert not self.is_closed, "a closed source is not asked"
        if self.next >= LAST:
            raise StopIteration
        self.next += 1
        self.loaded += 1
        return batch_of(self.next - 1)

    def close(self) -> None:
        self.is_closed = True


def batch_of(step: int) -> tuple[int, Any, Any]:
    return step, torch.full((5,), float(step), dtype=torch.float64), torch.tensor([step])


def opening(opened: list[Source], most_bytes: int, first: int = 0) -> Rewindable:
    def open_at(step: int) -> Prefetcher:
        opened.append(Source(step))
        return cast(Prefetcher, opened[-1])

    return Rewindable(open_at, first, most_bytes)


class Rewinding(RuleBasedStateMachine):
    """Against the plain truth: the batch of a step is a function of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Source] = []
        self.room = 3
        self.found = opening(self.opened, self.room * BATCH_BYTES)
        self.at = 0
        self.needed = 0
        """Nobody will ask for earlier ones."""

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        for _ in range(count):
            if self.at == LAST:
                with pytest.raises(StopIteration):
                    next(self.found)
                return
            step, inputs, targets = next(self.found)
            assert step == self.at
            assert torch.equal(inputs, batch_of(step)[1])
            assert targets.item() == step
            self.at += 1

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """A few steps that were kept: nothing is loaded again."""
        kept = sorted(self.found._kept)
        back = [step for step in kept if step >= self.needed]
        step = data.draw(st.sampled_from(back)) if back else self.at
        opened = len(self.opened)
        assert self.found.from_step(step) is self.found
        if back:
            assert len(self.opened) == opened
        self.at = step

    @rule(step=st.integers(0, LAST))
    def go_anywhere(self, step: int) -> None:
        """Also to steps that were forgotten: they are loaded again."""
        self.found.from_step(step)
        self.at, self.needed = step, min(step, self.needed)

    @precondition(lambda self: self.at > self.needed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.needed = data.draw(st.integers(self.needed, self.at + 2))
        self.found.forget_before(self.needed)
        assert all(step >= min(self.needed, self.at) for step in self.found._kept)
        self.needed = min(self.needed, self.at)

    @invariant()
    def little_is_kept_and_one_is_open(self) -> None:
        assert len(self.found._kept) <= self.room
        assert [source.is_closed for source in self.opened] == [True] * (len(self.opened) - 1) + [False]

    def teardown(self) -> None:
        with self.found:
            pass
        assert self.opened[-1].is_closed


TestRewinding = Rewinding.TestCase


@given(first=st.integers(0, 5), back=st.integers(0, 5), room=st.integers(1, 8))
def test_what_was_kept_is_not_loaded_again(first: int, back: int, room: int) -> None:
    opened: list[Source] = []
    found = opening(opened, room * BATCH_BYTES, first)
    taken = [next(found)[0] for _ in range(6)]
    assert taken == list(range(first, first + 6))
    found.from_step(first + 6 - back)
    assert [step for step, _, _ in found] == list(range(first + 6 - back, LAST))
    assert len(opened) == (1 if back <= room else 2)
    assert sum(source.loaded for source in opened) == LAST - first + (0 if back <= room else back)


def test_one_batch_is_kept_however_large() -> None:
    opened: list[Source] = []
    found = opening(opened, 1)
    for _ in range(3):
        next(found)
    found.from_step(2)
    assert next(found)[0] == 2
    assert len(opened) == 1


def test_with_real_loading() -> None:
    """Over an epoch's end and back; threads of sources that were left are gone."""
    data = [(torch.tensor(float(index)), index) for index in range(10)]
    order = BatchOrder(10, 3, True, 4)
    first: list[Prefetcher] = []

    def open_at(step: int) -> Prefetcher:
        first.append(Prefetcher(data, order, step, 9))
        return first[-1]

    with Rewindable(open_at, 0, most_bytes=10**6) as found:
        once = {step: inputs.tolist() for step, inputs, _ in found}
        assert once == {step: [float(index) for index in order.indices(step)] for step in range(9)}
        for back in (7, 2, 8, 0):
            again = {step: inputs.tolist() for step, inputs, _ in found.from_step(back)}
            assert again == {step: once[step] for step in range(back, 9)}
        assert len(first) == 1
        found.forget_before(6)
        assert [step for step, _, _ in found.from_step(6)] == [6, 7, 8]
        assert len(first) == 1
        assert [step for step, _, _ in found.from_step(4)] == [4, 5, 6, 7, 8]
        assert len(first) == 2
    assert all(not one._thread.is_alive() for one in first)


def test_bytes_of_whatever_a_batch_is_made_of() -> None:
    tensor = torch.zeros(3, dtype=torch.float64)
    assert _byte_count(tensor) == 24
    assert _byte_count((4, {"a": tensor, "b": [tensor, "text"]}, (tensor, None))) == 72
