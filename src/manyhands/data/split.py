"""The samples that are held out for testing where the data set does not say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from manyhands.data.order import permutation

HELD_OUT_EVERY = 5
LEAST_OF = 10
"""Classes are ignored where they are so small that fewer than one sample in this many would be held out by class."""
_SEED = 1998


def held_out(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the indices to train on and to test on: one in five of every class, drawn the same way each time.

    Where most classes have fewer than five samples (50,000 people, two photographs of each), it is one in five of all:
    otherwise little or nothing would be held out, and a run would have no accuracy. So none is held out only of
    fewer than five samples in all.
    """
    train, test = _drawn(labels)
    return (train, test) if LEAST_OF * len(test) >= len(labels) else _drawn([0] * len(labels))


def _drawn(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    of_class: defaultdict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        of_class[label].append(index)
    train: list[int] = []
    test: list[int] = []
    for label, members in of_class.items():
        # Files and rows are often in order of time or writer, so counting off in the given order would be unfair.
        for place, drawn in enumerate(permutation(len(members), _SEED, label).tolist(), start=1):
            (train if place % HELD_OUT_EVERY else test).append(members[drawn])
    return sorted(train), sorted(test)
