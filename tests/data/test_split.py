"""Held-out samples: one in five of every class, each sample on one side only."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.split import held_out


@given(st.lists(st.integers(0, 4), max_size=120), st.integers(5, 9))
def test_each_class_gives_a_fifth(labels: list[int], least: int) -> None:
    labels = labels + [label for label in set(labels) for _ in range(least - labels.count(label))]
    train, test = held_out(labels)
    assert sorted(train + test) == list(range(len(labels)))
    counts = Counter(labels)
    tested = Counter(labels[index] for index in test)
    assert all(tested[label] == count // 5 for label, count in counts.items())
    assert (train, test) == held_out(labels)


@given(st.lists(st.integers(0, 1000), max_size=200))
def test_however_many_classes_some_are_held_out(labels: list[int]) -> None:
    train, test = held_out(labels)
    assert sorted(train + test) == list(range(len(labels)))
    assert len(test) <= len(labels) // 5
    assert 10 * len(test) >= len(labels) or len(labels) < 5 or len(test) == len(labels) // 5
    assert bool(test) is (len(labels) >= 5)


@pytest.mark.slow
def test_a_class_for_every_sample() -> None:
    train, test = held_out(list(range(50_000)))
    assert (len(train), len(test)) == (40_000, 10_000)


def test_the_given_order_does_not_decide() -> None:
    """Every fifth in the given order would test one writer, one hour, one camera."""
    _, test = held_out([0] * 100)
    assert len({index % 5 for index in test}) > 1
