"""Which samples make which batch: each at most once an epoch, and the same wherever one begins."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manyhands.data.order import BatchOrder, permutation
from manyhands.facts.errors import BadData, BadValue

seeds = st.integers(0, 2**64 - 1)


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
    seed=seeds,
    epoch=st.integers(0, 9),
)
def test_each_sample_at_most_once_an_epoch(samples: int, batch_size: int, shuffle: bool, seed: int, epoch: int) -> None:
    assume(samples >= batch_size)
    order = BatchOrder(samples, batch_size, shuffle, seed)
    steps = order.steps_per_epoch
    batches = [order.indices(epoch * steps + step) for step in range(steps)]
    taken = [index for batch in batches for index in batch]
    assert all(len(batch) == batch_size for batch in batches)
    assert len(taken) == len(set(taken)) > samples - batch_size
    assert set(taken) <= set(range(samples))
    assert all(type(index) is int for index in taken)


@given(samples=st.integers(8, 100), shuffle=st.booleans(), seed=seeds, first=st.integers(0, 60))
def test_resuming_at_any_step_gives_the_same_batches(samples: int, shuffle: bool, seed: int, first: int) -> None:
    straight = [BatchOrder(samples, 8, shuffle, seed).indices(step) for step in range(first + 5)]
    permutation.cache_clear()
    resumed = BatchOrder(samples, 8, shuffle, seed)
    assert [resumed.indices(step) for step in range(first, first + 5)] == straight[first:]


@given(seed=seeds, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ_when_shuffled(seed: int, epoch: int) -> None:
    order = BatchOrder(64, 64, True, seed)
    assert order.indices(epoch) != order.indices(epoch + 1)
    assert order.indices(epoch) != BatchOrder(64, 64, True, (seed + 1) % 2**64).indices(epoch)


def test_without_shuffle_in_order_and_the_rest_dropped() -> None:
    order = BatchOrder(7, 3, False, 0)
    assert order.steps_per_epoch == 2
    assert [order.indices(step) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_the_dropped_rest_changes_from_epoch_to_epoch() -> None:
    order = BatchOrder(10, 9, True, 3)
    left = {(set(range(10)) - set(order.indices(epoch))).pop() for epoch in range(40)}
    assert len(left) >= 8


def test_the_order_is_the_same_on_every_machine() -> None:
    """Written down once: devices that disagree on the order would train on different batches."""
    assert permutation(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(8, 7, 3).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]


def test_the_shared_permutation_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(8, 0, 0)[0] = 1


def test_shorter_than_a_batch() -> None:
    with pytest.raises(BadData, match=r"The data set has 20 samples; a batch has 32\.") as caught:
        BatchOrder(20, 32, True, 0)
    assert "at most 20" in caught.value.hint
    with pytest.raises(BadData, match="has 0 samples"):
        BatchOrder(0, 1, False, 0)


@pytest.mark.parametrize(("batch_size", "seed"), [(0, 0), (-1, 0), (2, -1), (2, 2**64)])
def test_values_out_of_their_limits(batch_size: int, seed: int) -> None:
    with pytest.raises(BadValue, match="must be"):
        BatchOrder(10, batch_size, True, seed)


def test_no_step_before_the_first() -> None:
    with pytest.raises(BadValue, match="step is -1"):
        BatchOrder(10, 2, True, 0).indices(-1)
