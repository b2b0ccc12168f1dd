"""Batches as they are given: the ones that plain PyTorch iterates, in every epoch, and when a run is resumed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from manyhands.data.batch_parts import form
from manyhands.data.batch_stream import BatchStream, as_stream
from manyhands.data.given import Pairs
from manyhands.facts.errors import BadData, BadFile, BadValue, ManyhandsError

SAMPLES, BATCH = 24, 4
PER_EPOCH = SAMPLES // BATCH


class Augmented(Dataset[Any]):
    """Samples that draw from every generator there is."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        return torch.tensor([float(index), *drawn], dtype=torch.float64), index

    def __len__(self) -> int:
        return SAMPLES


class Numbers(IterableDataset[Any]):
    """A stream of samples without a length, endless unless it has one."""

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count() if self.samples is None else range(self.samples):
            yield torch.full((2,), float(number)), number


def weights() -> WeightedRandomSampler:
    generator = torch.Generator().manual_seed(8)
    return WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES, generator=generator)  # type: ignore[arg-type]


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate_fn that draws, too."""
    return torch.stack([x for x, _ in samples]) * torch.rand(()), torch.tensor([y for _, y in samples])


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "generator": lambda: DataLoader(Augmented(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "weighted": lambda: DataLoader(Augmented(), BATCH, sampler=weights(), drop_last=True),
    "distributed": lambda: DataLoader(
        Augmented(), BATCH, sampler=DistributedSampler(Augmented(), 2, 1, seed=3), drop_last=True
    ),
    "batch sampler": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(SequentialSampler(range(8)), BATCH, drop_last=False)
    ),
    "collate_fn": lambda: DataLoader(Augmented(), BATCH, collate_fn=stacked),
    "of a stream": lambda: DataLoader(Numbers(12), BATCH),
}
MANY = ["workers", "persistent"]


def iterated(loader: DataLoader[Any], epochs: int) -> list[Any]:
    """Return the batches of an ordinary loop."""
    batches = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        batches += [(x.clone(), y.clone()) for x, y in loader]
    return batches


def taken(stream: BatchStream, count: int) -> list[Any]:
    return [stream.take() for _ in range(count)]


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(6)
    numpy.random.seed(7)


def assert_same(batches: list[Any], wanted: list[Any]) -> None:
    assert len(batches) == len(wanted)
    for (step, x, y), (wanted_x, wanted_y) in zip(batches, wanted):
        assert torch.equal(x, wanted_x), step
        assert torch.equal(y, wanted_y), step


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_those_of_an_ordinary_loop(kind: str) -> None:
    seeded()
    wanted = iterated(LOADERS[kind](), 3)
    seeded()
    stream = BatchStream(LOADERS[kind]())
    stream.first_batch()
    torch.rand(100)  # as capturing does
    random.random()
    numpy.random.rand()
    stream.go_on()
    batches = [stream.take() for _ in wanted]
    assert [step for step, _, _ in batches] == list(range(len(wanted)))
    assert_same(batches, wanted)
    per_epoch = len(wanted) // 3
    assert [stream.epoch_of(step) for step in range(len(wanted))] == [step // per_epoch for step in range(len(wanted))]


RESUMED = (1, PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 2)
LOADED_HERE = ("shuffled", "generator", "weighted", "collate_fn")


@pytest.mark.quick(*(f"{kind}-{PER_EPOCH - 1}" for kind in (*LOADED_HERE, "workers")))
@pytest.mark.parametrize("step", RESUMED)
@pytest.mark.parametrize("kind", [*LOADED_HERE, "workers"])
def test_a_resumed_run_sees_the_batches_it_would_have_seen(kind: str, step: int) -> None:
    seeded()
    stream = BatchStream(LOADERS[kind]())
    stream.first_batch()
    stream.go_on()
    wanted = [(x, y) for _, x, y in (stream.take() for _ in range(3 * PER_EPOCH))]
    stored = json.loads(json.dumps(stream.start_of(step)))
    stream.close()
    torch.manual_seed(99)  # another process has other states
    random.seed(99)
    again = BatchStream(LOADERS[kind]())
    if kind == "generator":
        again.source.generator.manual_seed(1)
    again.first_batch()
    assert again.resume(step, stored) == step % PER_EPOCH or step == PER_EPOCH
    torch.rand(3)
    again.go_on()
    assert_same([again.take() for _ in range(3 * PER_EPOCH - step)], wanted[step:])


@pytest.mark.slow
def test_workers_that_persist_draw_on_and_only_the_order_is_resumed() -> None:
    seeded()
    stream = BatchStream(LOADERS["persistent"]())
    assert stream.is_drawn_by_persistent_workers
    assert not BatchStream(LOADERS["workers"]()).is_drawn_by_persistent_workers
    wanted = [y for _, _, y in (stream.take() for _ in range(2 * PER_EPOCH))]
    again = BatchStream(LOADERS["persistent"]())
    again.first_batch()
    again.resume(PER_EPOCH + 1, stream.start_of(PER_EPOCH + 1))
    assert [again.take()[2].tolist() for _ in range(PER_EPOCH - 1)] == [y.tolist() for y in wanted[PER_EPOCH + 1 :]]


def test_a_checkpoint_at_an_epochs_end_may_be_written_before_the_next_begins() -> None:
    seeded()
    stream = BatchStream(LOADERS["shuffled"]())
    taken = [stream.take() for _ in range(PER_EPOCH)]
    stored = stream.start_of(PER_EPOCH)
    assert stored["step"] == 0
    wanted = [(x, y) for _, x, y in (stream.take() for _ in range(3))]
    again = BatchStream(LOADERS["shuffled"]())
    assert again.resume(PER_EPOCH, stored) == PER_EPOCH == len(taken)
    assert_same([again.take() for _ in range(3)], wanted)


def test_beginnings_of_epochs_that_are_over_are_forgotten() -> None:
    stream = BatchStream(LOADERS["shuffled"]())
    for _ in range(3 * PER_EPOCH):
        stream.take()
    stream.forget_starts_before(PER_EPOCH + 1)
    assert stream.start_of(PER_EPOCH + 1)["step"] == PER_EPOCH
    assert stream.start_of(PER_EPOCH - 1) == {}


def pairs(count: int | None) -> Iterator[Any]:
    for number in itertools.count() if count is None else range(count):
        yield torch.full((3, 2), float(number)), torch.full((3,), number)


def test_streams_of_any_length_are_never_read_whole() -> None:
    read: list[int] = []

    def endless() -> Iterator[Any]:
        for number, batch in enumerate(pairs(None)):
            read.append(number)
            yield batch

    stream = as_stream(endless, None)
    assert stream is not None
    assert stream.batches_per_epoch is None
    assert stream.batch_size == 3
    assert [int(stream.take()[2][0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert read == [0, 1, 2, 3, 4]
    samples = as_stream(Numbers(), 4)
    assert samples is not None
    assert samples.take()[2].tolist() == [0, 1, 2, 3]


def test_an_epoch_ends_when_it_ends_and_a_function_begins_the_next() -> None:
    stream = as_stream(lambda: pairs(2), None)
    assert stream is not None
    assert [int(stream.take()[2][0]) for _ in range(5)] == [0, 1, 0, 1, 0]
    assert [stream.epoch_of(step) for step in range(5)] == [0, 0, 1, 1, 2]


def test_memory_that_is_used_again_changes_no_batch_that_is_kept() -> None:
    buffer = torch.zeros(3, 2)

    def in_place() -> Iterator[Any]:
        for number in range(3):
            buffer.fill_(number)
            yield buffer, numpy.full(3, number)

    stream = as_stream(in_place, None)
    assert stream is not None
    assert [float(x[0, 0]) for _, x, _ in [stream.take() for _ in range(3)]] == [0, 1, 2]


def test_what_came_from_a_loaders_worker_is_copied_out_of_shared_memory() -> None:
    _, x, y = BatchStream(LOADERS["workers"]()).take()
    assert not x.is_shared()
    assert not y.is_shared()


# One pass


def test_a_generator_has_one_epoch_and_is_resumed_by_skipping() -> None:
    stream = as_stream(pairs(5), None)
    assert stream is not None
    stream.first_batch()
    stored = stream.start_of(3)
    again = as_stream(pairs(5), None)
    assert again is not None
    again.first_batch()
    assert again.resume(3, stored) == 3
    assert [int(again.take()[2][0]) for _ in range(2)] == [3, 4]
    with pytest.raises(BadData, match=r"(?s)ended after 5 batches.*steps=5"):
        again.take()


# What batches are


class Encoding(dict):  # type: ignore[type-arg]
    """A mapping such as tokenizers return."""


@pytest.mark.parametrize(
    ("batch", "labels", "inputs", "targets"),
    [
        ({"ids": torch.ones(2, 3), "labels": torch.ones(2)}, ("labels",), {"ids": (2, 3)}, (2,)),
        (Encoding(ids=torch.ones(2, 3), mask=torch.ones(2, 3)), ("labels",), {"ids": (2, 3), "mask": (2, 3)}, ()),
        (torch.ones(2, 3), ("labels",), (2, 3), ()),
        ([torch.ones(2, 3)], ("labels",), (2, 3), ()),
        ([[torch.ones(2, 3), torch.ones(2)], torch.ones(2)], (), ((2, 3), (2,)), (2,)),
        (({"a": (torch.ones(2), [torch.ones(2, 1)])}, numpy.ones(2)), (), {"a": ((2,), [(2, 1)])}, (2,)),
    ],
)
def test_batches_are_parted_into_inputs_and_targets(batch: Any, labels: Any, inputs: Any, targets: Any) -> None:
    stream = as_stream([batch].__iter__, None, labels)
    assert stream is not None
    _, found, aims = stream.take()
    assert form(found) == inputs
    assert form(aims) == targets


def test_pairs_name_the_parts_of_batches() -> None:
    def named() -> Iterator[Any]:
        yield {"image": torch.ones(2, 3), "name": ["a", "b"], "label": torch.tensor([0, 1])}

    stream = as_stream(Pairs(named, "image", "label"), None)
    assert stream is not None
    assert form(stream.take()[1:]) == ((2, 3), (2,))
    stream = as_stream(named, None)
    assert stream is not None
    with pytest.raises(BadData, match=r"(?s)step 0 is a dict of 'image', 'name'.*mh\.Pairs\(data, 'image', 'label'\)"):
        stream.take()
    stream = as_stream(Pairs(named, "picture", "label"), None)
    assert stream is not None
    with pytest.raises(BadData, match=r"step 0: there is no 'picture'"):
        stream.take()


def test_samples_by_number_are_no_stream() -> None:
    for data in (Augmented(), [(torch.ones(1), 1)], Pairs(Augmented(), 0, 1), "digits"):
        assert as_stream(data, None) is None


# What goes wrong


def sized(*sizes: int) -> Callable[[], Iterator[Any]]:
    return lambda: ((torch.ones(size, 2), torch.ones(size)) for size in sizes)


def broken() -> Iterator[Any]:
    yield from pairs(1)
    raise OSError("the line is dead")


class Fails(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise KeyError("no such picture")
        return super().__getitem__(index)


CASES: list[tuple[Any, str]] = [
    (sized(4, 2, 5), r"(?s)step 2 has 5 samples; the first had 4, and none may be larger"),
    (sized(4, 4, 0), r"(?s)step 2 has the shapes \(\(0, 2\), \(0,\)\); the first had"),
    (
        lambda: iter([pair(2), pair(3)]),
        r"(?s)step 1 has the shapes \(\(4, 3\), \(4,\)\); the first had \(\(4, 2\).*pad",
    ),
    (broken, r"(?s)step 1 of the broken cannot be loaded: OSError: the line is dead\n  at .*test_batch_stream\.py:\d+"),
    (DataLoader(Fails(), 4), r"(?s)step 2 .*KeyError: .*no such picture.*test_batch_stream\.py:\d+"),
    (DataLoader(Fails(), 4, num_workers=1), r"(?s)step 2 .*KeyError: .*no such picture.*test_batch_stream\.py:\d+"),
    (lambda: iter(()), "gave no batches"),
    (lambda: 7, "gives a int, which does not yield batches"),
    (lambda: iter([3.0]), r"step 0 is a float; a batch is a pair"),
    (lambda: iter([(torch.ones(1),) * 3]), r"(?s)step 0 has 3 parts.*mh\.Pairs"),
]


def pair(width: int) -> Any:
    return torch.ones(4, width), torch.ones(4)


@pytest.mark.parametrize(("source", "text"), CASES)
def test_what_is_wrong_is_said_with_the_step(source: Any, text: str) -> None:
    stream = as_stream(source, None)
    assert stream is not None
    with pytest.raises(ManyhandsError, match=text):
        taken(stream, 4)


@pytest.mark.parametrize(("says", "text"), [(3, "ended after 2 batches"), (1, "goes on after 1 batches")])
def test_epochs_that_are_counted_have_the_length_that_was_said(says: int, text: str) -> None:
    class Said:
        def __iter__(self) -> Iterator[Any]:
            return pairs(2)

        def __len__(self) -> int:
            return says

    stream = as_stream(Said(), None)
    assert stream is not None
    assert stream.batches_per_epoch == says
    stream.expects_whole_epochs = True
    with pytest.raises(BadData, match=rf"(?s){text}; len\(\) of it says {says}.*steps="):
        taken(stream, 4)


def test_batches_may_have_fewer_samples_than_the_first() -> None:
    stream = as_stream(sized(4, 4, 1), None)
    assert stream is not None
    assert [len(inputs) for _, inputs, _ in taken(stream, 5)] == [4, 4, 1, 4, 4]
    assert stream.batch_size == 4


def test_a_stream_of_samples_needs_a_batch_size() -> None:
    with pytest.raises(BadValue, match=r"(?s)batch_size is not given.*batch_size=None"):
        as_stream(Numbers(), None)


def test_the_incomplete_batch_of_a_loader_is_known_beforehand() -> None:
    assert BatchStream(DataLoader(Augmented(), 7)).incomplete_samples == 3
    assert BatchStream(DataLoader(Augmented(), 7, drop_last=True)).incomplete_samples == 0
    assert BatchStream(DataLoader(Augmented(), 6, sampler=RandomSampler(Augmented()))).incomplete_samples == 0
    assert BatchStream(DataLoader(Numbers(7), 3)).incomplete_samples == 0, "not known"


@pytest.mark.parametrize(
    "stored",
    [
        {}, {"epoch": 0, "step": 0, "random": {"torch": "AAAA"}}, {"epoch": 0, "step": 9, "random": {}},
        {"epoch": 0, "step": 0, "random": {"python": "3 AAAA -"}}, {"epoch": -1, "step": 0, "random": {}},
        {"epoch": 0, "step": 0, "random": {"numpy": "AAAA 1 1 zero"}},
        {"epoch": 0, "step": 0, "random": {"python": "no"}}, {"epoch": 0, "step": 0, "random": {"torch": "é"}},
    ],
)  # fmt: skip
def test_a_place_that_is_none_is_refused(stored: dict[str, Any]) -> None:
    seeded()
    stream = BatchStream(LOADERS["shuffled"]())
    with pytest.raises(BadFile):
        stream.resume(2, stored)
