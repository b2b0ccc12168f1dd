"""Inputs drawn by hypothesis: documents of any form, good inputs with drawn bytes in them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from fuzz.judging import Fault, Judge, Target

_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
documents = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def spliced(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A good input with some of its bytes replaced."""
    data = draw(st.sampled_from(seeds))
    place = draw(st.integers(0, len(data)))
    end = draw(st.integers(place, min(len(data), place + 64)))
    return data[:place] + draw(st.binary(max_size=32)) + data[end:]


@st.composite
def changed(draw: st.DrawFn, trees: tuple[Any, ...]) -> bytes:
    """A good document with one field drawn."""
    tree = draw(st.sampled_from(trees))
    if isinstance(tree, dict) and tree:
        tree = {**tree, draw(st.sampled_from(sorted(tree))): draw(documents)}
    return json.dumps(tree).encode()


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    found = st.binary(max_size=200) | spliced(target.mutator.seeds)
    if target.kind != "json":
        return found
    trees = tuple(tree[0] for tree in target.mutator.trees if tree is not None)
    return found | documents.map(lambda one: json.dumps(one).encode()) | changed(trees)


def judge_drawn(judge: Judge, target: Target, seed: int, count: int) -> list[Fault]:
    """The faults of so many drawn inputs."""
    faults: list[Fault] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(target))
    def look(data: bytes) -> None:
        fault = judge.judge(target, data)
        if fault is not None:
            faults.append(fault)

    look()
    return faults
