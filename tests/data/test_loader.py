"""Loading ahead: every batch in its order, every error where it happened, and no thread left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from manyhands.data import loader
from manyhands.data.loader import Prefetcher, example, length
from manyhands.data.order import BatchOrder
from manyhands.facts.errors import BadData, BadValue, TimedOut


class Made(Dataset[Any]):
    """Samples from a function of their number."""

    def __init__(self, make: Callable[[int], Any], samples: int = 40) -> None:
        self.make = make
        self.samples = samples
        self.taken: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.taken.append(index)
        return self.make(index)


def numbered(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((2, 3), float(index)), index


def in_order(batch_size: int = 4, samples: int = 40) -> BatchOrder:
    return BatchOrder(samples, batch_size, False, 0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetcher"]


def until(condition: Callable[[], bool], limit_seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    if threads():  # of a loader that nobody closed: it ends when it is collected
        gc.collect()
    assert until(lambda: not threads())


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_batches_come_in_order_with_their_step(ahead: int) -> None:
    order = BatchOrder(40, 4, True, 5)
    with Prefetcher(Made(numbered), order, 3, 27, ahead) as batches:
        seen = list(batches)
    assert [step for step, _, _ in seen] == list(range(3, 27))
    for step, inputs, targets in seen:
        assert targets.tolist() == order.indices(step)
        assert inputs.shape == (4, 2, 3)
        assert inputs[:, 0, 0].tolist() == targets.tolist()


def test_no_steps_no_batches() -> None:
    with Prefetcher(Made(numbered), in_order(), 5, 5) as batches:
        assert list(batches) == []


def test_it_loads_ahead_but_not_further() -> None:
    data = Made(numbered)
    with Prefetcher(data, in_order(), 0, 10, 2) as batches:
        # Two wait on the shelf, and one more is in the thread's hands.
        assert until(lambda: len(data.taken) == 12)
        time.sleep(0.1)
        assert len(data.taken) == 12
        next(batches)
        assert until(lambda: len(data.taken) == 16)


def test_closing_ends_the_thread_though_the_shelf_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_POLL_SECONDS", 60.0)
    data = Made(numbered)
    batches = Prefetcher(data, in_order(), 0, 10**9, 1)
    assert until(lambda: len(data.taken) == 8)
    started = time.monotonic()
    batches.close()
    assert time.monotonic() - started < 4, "it waited for the poll instead of being woken"
    assert not threads()
    assert list(batches) == []
    batches.close()


def test_closing_in_the_middle_of_a_batch() -> None:
    data = Made(lambda index: (time.sleep(0.02), numbered(index))[1], samples=10_000)
    batches = Prefetcher(data, in_order(10_000, 10_000), 0, 1)
    assert until(lambda: len(data.taken) > 1)
    batches.close()
    assert not threads()
    assert len(data.taken) < 1000


def test_closing_wakes_whoever_waits() -> None:
    gate = threading.Event()
    batches = Prefetcher(Made(lambda index: (gate.wait(10), numbered(index))[1]), in_order(), 0, 10)
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend([*batches, "end"]))
    reader.start()
    threading.Timer(0.1, gate.set).start()
    batches.close()
    reader.join(5)
    assert seen == ["end"]


@pytest.mark.slow
def test_dropped_unclosed_it_is_cleared_away() -> None:
    data = Made(numbered)
    batches = Prefetcher(data, in_order(), 0, 10**9)
    assert until(lambda: len(data.taken) >= 8)
    del batches
    gc.collect()
    assert until(lambda: not threads())


def test_a_sample_that_hangs_is_an_error_not_a_wait() -> None:
    gate = threading.Event()
    data = Made(lambda index: (gate.wait(20) if index == 4 else None, numbered(index))[1])
    with Prefetcher(data, in_order(), 0, 10, limit_seconds=0.2) as batches:
        assert until(lambda: 4 in data.taken), "the first batch is there"
        assert next(batches)[0] == 0
        with pytest.raises(TimedOut, match=r"step 1 was not loaded within 0\.2 s"):
            next(batches)
        gate.set()


def test_an_error_names_its_sample_and_comes_after_the_batches_before_it() -> None:
    def broken(index: int) -> Any:
        if index == 9:
            raise ValueError("no such shard")
        return numbered(index)

    with Prefetcher(Made(broken), in_order(), 0, 10) as batches:
        assert [next(batches)[0], next(batches)[0]] == [0, 1]
        with pytest.raises(BadData, match="Sample 9 cannot be loaded: ValueError: no such shard") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(BadData, match="Sample 9"):
            next(batches)


def test_an_error_of_our_own_keeps_its_hint() -> None:
    def broken(index: int) -> Any:
        raise BadData("a.png: torn.", hint="Delete it.")

    with Prefetcher(Made(broken), in_order(), 0, 1) as batches, pytest.raises(BadData) as caught:
        next(batches)
    assert (caught.value.message, caught.value.hint) == ("Sample 0: a.png: torn.", "Delete it.")


def test_a_thread_that_is_ended_from_within_tells() -> None:
    def leave(index: int) -> Any:
        raise SystemExit(3)

    with Prefetcher(Made(leave), in_order(), 0, 1) as batches, pytest.raises(SystemExit):
        next(batches)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (torch.zeros(3), "Sample 0 is a Tensor, not a pair"),
        (None, "Sample 0 is a NoneType, not a pair"),
        ({"x": 1, "y": 2}, "Sample 0 is a dict of .*, not a pair"),
        ((1, 2, 3), "Sample 0 has 3 parts"),
        ((torch.zeros(3), None), "targets of samples 0 to 3 do not make a batch: TypeError"),
    ],
)
def test_samples_that_are_no_pair(sample: object, message: str) -> None:
    with Prefetcher(Made(lambda index: sample), in_order(), 0, 1) as batches, pytest.raises(BadData, match=message):
        next(batches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda i: (torch.zeros(1, 8 + (i == 2)), 0),
            r"input of sample 2 has the shape \(1, 9\); .* sample 0 has \(1, 8\)",
        ),
        (lambda i: (0.0, torch.zeros(1 + (i == 1))), r"target of sample 1 has the shape \(2,\); .* has \(1,\)"),
        (lambda i: ({"a": torch.zeros(1 + i)}, 0), r"sample 1 has the shape \{'a': \(2,\)\}; .* \{'a': \(1,\)\}"),
        (lambda i: ({"a": 1, "b": 2} if i else {"a": 1}, 0), r"sample 1 .*'b'"),
    ],
)
def test_samples_of_differing_shapes(make: Callable[[int], Any], message: str) -> None:
    with Prefetcher(Made(make), in_order(), 0, 1) as batches, pytest.raises(BadData, match=message):
        next(batches)


def test_inputs_may_be_tuples_and_dicts() -> None:
    pairs, targets = example(Made(lambda i: ((torch.ones(2), torch.zeros(3)), float(i))), 4)
    assert isinstance(pairs, tuple)
    assert [part.shape for part in pairs] == [(4, 2), (4, 3)]
    assert targets.tolist() == [0.0, 1.0, 2.0, 3.0]
    named, _ = example(Made(lambda i: ({"tokens": torch.ones(5), "length": i}, 0)), 3)
    assert named["tokens"].shape == (3, 5)
    assert named["length"].tolist() == [0, 1, 2]


def test_example_is_the_first_samples_or_fewer() -> None:
    assert example(Made(numbered), 5)[1].tolist() == [0, 1, 2, 3, 4]
    assert example([numbered(7), numbered(8)], 5)[1].tolist() == [7, 8]
    with pytest.raises(BadData, match="no samples"):
        example([], 5)
    with pytest.raises(BadValue, match="1 or more"):
        example(Made(numbered), 0)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 0, 0

    def __len__(self) -> int:
        return 10


class Unmeasured(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return 0, 0


class Confused(Unmeasured):
    def __len__(self) -> int:
        raise NotImplementedError("ask later")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Endless(), "an? Endless, has no __getitem__"),
        (Unmeasured(), "a Unmeasured, has no __len__"),
        (iter([]), "has no __len__ and no __getitem__"),
        (Confused(), "cannot tell its length: NotImplementedError: ask later"),
    ],
    ids=["iterable", "no length", "iterator", "length fails"],
)
def test_data_must_be_map_style(dataset: Any, message: str) -> None:
    for use in (length, lambda data: example(data, 1), lambda data: Prefetcher(data, in_order(), 0, 1)):
        with pytest.raises(BadData, match=message):
            use(dataset)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(BadData, match="order is for 41 samples; the data set has 40"):
        Prefetcher(Made(numbered), in_order(4, 41), 0, 1)
    for first, last in ((-1, 2), (3, 2)):
        with pytest.raises(BadValue, match=f"from step {first} to {last}"):
            Prefetcher(Made(numbered), in_order(), first, last)
    with pytest.raises(BadValue, match="0 batches loaded ahead"):
        Prefetcher(Made(numbered), in_order(), 0, 1, 0)
