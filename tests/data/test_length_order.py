"""Batches of similar length: each sample at most once an epoch, none too long, the same wherever one begins."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from manyhands.data.length_order import LengthOrder, padded_share
from manyhands.data.loader import Prefetcher
from manyhands.data.padding import SamplePadding, measured, wanted_lengths

lists = st.lists(st.integers(1, 30), min_size=1, max_size=80)
ends = st.lists(st.integers(1, 29), max_size=4)


def order_of(lengths: list[int], ends: list[int], size: int, *, shuffle: bool = True, seed: int = 0) -> LengthOrder:
    padding = SamplePadding((*sorted({*ends}), 30)).used_by(lengths)
    return LengthOrder(len(lengths), size, shuffle, seed, padding=padding, sample_lengths=numpy.array(lengths))


@pytest.mark.slow
@given(lengths=lists, ends=ends, size=st.integers(1, 12), shuffle=st.booleans(), epoch=st.integers(0, 5))
def test_each_sample_at_most_once_and_no_longer_than_its_batch(
    lengths: list[int], ends: list[int], size: int, shuffle: bool, epoch: int
) -> None:
    assume(len(lengths) >= size)
    order = order_of(lengths, ends, size, shuffle=shuffle)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    taken = [index for step in steps for index in order.indices(step)]
    assert len(taken) == len(set(taken)) == len(lengths) // size * size
    for step in steps:
        longest = max(lengths[index] for index in order.indices(step))
        assert longest <= order.length(step)
        assert order.length(step) in order.padding.lengths
        assert len(order.indices(step)) == size
        if not shuffle:
            assert order.length(step) == order.padding.fitting(longest)
    uses = order.uses(steps)
    assert sum(use.batches for use in uses) == len(steps)
    assert sum(use.positions - use.padded for use in uses) == sum(lengths[index] for index in taken)
    assert 0 <= padded_share(uses) < 1


@pytest.mark.slow
@given(lengths=lists, size=st.integers(1, 8), first=st.integers(0, 40))
def test_resuming_at_any_step_gives_the_same_batches(lengths: list[int], size: int, first: int) -> None:
    assume(len(lengths) >= size)
    straight, resumed = order_of(lengths, [4, 16], size, seed=3), order_of(lengths, [4, 16], size, seed=3)
    steps = range(first + 4)
    every = [(straight.indices(step), straight.length(step)) for step in steps]
    assert [(resumed.indices(step), resumed.length(step)) for step in steps[first:]] == every[first:]


def test_samples_of_one_length_come_together_and_in_another_order_each_epoch() -> None:
    lengths = [3] * 16 + [20] * 16
    order = order_of(lengths, [4], 8)
    assert {order.length(step) for step in range(4)} == {4, 30}
    assert padded_share(order.uses(range(4))) == pytest.approx((16 * 1 + 16 * 10) / (16 * 4 + 16 * 30))
    assert [order.indices(step) for step in range(4)] != [order.indices(step) for step in range(4, 8)]
    assert len({tuple(order.length(step) for step in range(4 * e, 4 * e + 4)) for e in range(20)}) > 1


def test_batches_are_loaded_at_their_length() -> None:
    data = [(torch.arange(n), torch.arange(n)) for n in (2, 9, 3, 10, 2, 11)]
    padding, lengths = measured(data, wanted_lengths((4, 12), None))
    order = LengthOrder(6, 2, True, 0, padding=padding, sample_lengths=lengths)
    with Prefetcher(data, order, 0, 9) as batches:
        for step, words, labels in batches:
            assert words.shape == labels.shape == (2, order.length(step))
            assert [int(row[1]) for row in words] == [1, 1]
            assert [int((row == -100).sum()) for row in labels] == [
                order.length(step) - int(lengths[index]) for index in order.indices(step)
            ]
