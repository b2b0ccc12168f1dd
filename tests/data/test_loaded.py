"""Batches loaded ahead and kept: any step that was not forgotten comes again as it was, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from manyhands.data.batch_errors import deaths_named
from manyhands.data.batch_stream import BatchStream
from manyhands.data.kept import KeptBatches
from manyhands.data.loaded import LoadedBatches
from manyhands.facts.errors import BadData, TimedOut

LAST = 12


def drawn(read: list[int]) -> Iterator[Any]:
    """Batches that nobody could draw again."""
    for step in range(LAST):
        read.append(step)
        yield torch.randn(3, 2, dtype=torch.float64), torch.full((3,), step)


def loaded(source: Any, most_bytes: int = 10**6, **options: Any) -> LoadedBatches:
    return LoadedBatches(BatchStream(source), LAST, KeptBatches(most_bytes=most_bytes), **options)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(0, 4))), st.sampled_from([0, 200, 10**6]))
def test_every_step_has_its_batch_however_often_it_is_taken(moves: list[tuple[int, int, int]], most_bytes: int) -> None:
    read: list[int] = []
    first: dict[int, Any] = {}
    with loaded(drawn(read), most_bytes) as batches:
        step = forgotten = 0
        for takes, back, forget in moves:
            for _ in range(takes):
                taken = next(batches, None)
                if taken is None:
                    assert step == LAST
                    break
                assert taken[0] == step
                assert int(taken[2][0]) == step
                assert torch.equal(taken[1], first.setdefault(step, taken[1]))
                step += 1
            forgotten = max(forgotten, min(step, forgotten + forget))
            batches.forget_before(forgotten)
            step = max(forgotten, step - back)
            batches.from_step(step)
    assert read == list(range(len(read))), "each is drawn once"


def test_the_samples_of_a_batch_are_known_from_when_it_is_loaded_until_it_is_forgotten() -> None:
    sizes = (3, 3, 2)
    batches = loaded(lambda: iter([(torch.ones(size, 2), torch.ones(size)) for size in sizes]), ahead=1)
    with batches:
        for step in range(6):
            assert batches.samples_at(step + 9) is None
            next(batches)
            assert batches.samples_at(step) == sizes[step % 3]
        batches.forget_before(4)
        assert [batches.samples_at(step) for step in (3, 4, 5)] == [None, 3, 2]


def test_only_a_few_are_loaded_ahead() -> None:
    read: list[int] = []
    with loaded(drawn(read), ahead=2) as batches:
        next(batches)
        time.sleep(0.1)
        assert len(read) <= 4


def test_who_waits_is_woken() -> None:
    gate, woken = threading.Event(), threading.Event()

    def gated() -> Iterator[Any]:
        gate.wait(10)
        yield torch.ones(2), torch.ones(2)

    with loaded(gated, wake=woken.set) as batches:
        assert not batches.is_ready()
        gate.set()
        assert woken.wait(10)
        assert batches.is_ready()


def test_an_error_comes_where_its_batch_would_have_come() -> None:
    def broken() -> Iterator[Any]:
        yield torch.ones(2), torch.ones(2)
        raise ValueError("bad record")

    with loaded(broken) as batches:
        assert next(batches)[0] == 0
        with pytest.raises(BadData, match=r"step 1 of the broken cannot be loaded: ValueError: bad record"):
            next(batches)
        batches.from_step(0)
        assert next(batches)[0] == 0, "what was kept comes again"


def test_waiting_has_a_limit_and_the_loaders_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hangs() -> Iterator[Any]:
        gate.wait(20)
        yield torch.ones(2), torch.ones(2)

    monkeypatch.setattr("manyhands.data.batch_stream.LIMIT_SECONDS", 0.2)
    monkeypatch.setattr("manyhands.data.loaded._JOIN_SECONDS", 0.1)
    try:
        with loaded(hangs) as batches, pytest.raises(TimedOut, match=r"step 0 was not loaded within 0\.2 s"):
            gate.set() if next(batches) else None
        stream = BatchStream(hangs)
        with pytest.raises(TimedOut, match=r"step 0"):
            stream.first_batch()
    finally:
        gate.set()
    assert BatchStream(DataLoader([(1, 1)], timeout=900, num_workers=1)).limit_seconds > 900  # type: ignore[arg-type]


class Dies(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2), index

    def __len__(self) -> int:
        return 24


def test_a_loaders_worker_that_dies_is_named_and_nothing_hangs() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        died = r"(?s)worker of the DataLoader died before the batch of step [12].*num_workers"
        batches = loaded(DataLoader(Dies(), 4, num_workers=1, timeout=2))
        with batches, pytest.raises(BadData, match=died):
            list(batches)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_death_that_torch_raises_in_the_main_thread_is_the_same_error() -> None:
    with pytest.raises(BadData, match=r"died before the batch of step 3"), deaths_named(lambda: 3):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(RuntimeError, match="another"), deaths_named(lambda: 3):
        raise RuntimeError("another")


def test_files_go_when_it_is_closed(tmp_path: Path) -> None:
    with LoadedBatches(BatchStream(drawn([])), LAST, KeptBatches(tmp_path, 0)) as batches:
        for _ in range(LAST):
            next(batches)
        assert len(list(tmp_path.rglob("*.safetensors"))) == LAST - 1
        batches.forget_before(LAST)
        assert len(list(tmp_path.rglob("*.safetensors"))) <= 1
    assert list(tmp_path.iterdir()) == []
