"""Copies of state that have changed: never safe, never trained from, and whoever has changed them is evicted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, Trip, reference
from manyhands.runtime.checksums import checksum, checksums, combined
from manyhands.runtime.worker import Worker
from manyhands.transport.memory import as_bytes

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")
BACKUP = 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]), st.data())
def test_any_bit_that_flips_is_noticed(count: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.arange(count).to(dtype)
    before = checksum(tensor)
    flat = tensor.view(torch.uint8)
    place, bit = data.draw(st.integers(0, flat.numel() - 1)), data.draw(st.integers(0, 7))
    flat[place] ^= 1 << bit
    assert checksum(tensor) != before
    flat[place] ^= 1 << bit
    assert checksum(tensor) == before


def test_wherever_it_lies_in_memory() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == checksum(tensor)
    assert checksum(tensor) != checksum(tensor.transpose(0, 1))
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))
    one, other = checksums([torch.zeros(3), torch.ones(3)])
    assert combined([one, other]) != combined([other, one])


def flip(worker: Worker, step: int) -> None:
    """One bit of what is kept changes."""
    kept = worker.keeping.at(step)
    tensor = next(tensor for tensor in kept.values() if tensor.numel() and tensor.is_floating_point())
    as_bytes(tensor)[1] ^= 4


def flips_what_comes(times: int) -> Callable[[Worker], None]:
    """A bit of copies that come from others changes before they are looked at; the first `times` times."""

    def does(worker: Worker) -> None:
        keeping = worker.keeping
        collect = keeping.endpoint.mailbox.collect
        left = [times]

        def flipped(source: str, step: int, topic: str) -> bool:
            has_come = collect(source, step, topic)
            if has_come and left[0]:
                left[0] -= 1
                tensors = keeping._arriving[source, step][1]
                as_bytes(next(iter(tensors.values())))[3] ^= 1
            return has_come

        keeping.endpoint.mailbox.collect = flipped  # type: ignore[method-assign]

    return does


def check_evicted(trip: Trip, device: str, words: str, lost: int = 1, steps: int = STEPS) -> None:
    trip.check(reference(PLANS["pipeline"].micro_batches, steps))
    found = trip.facts("lost")
    assert len(found) == lost, found
    assert found[-1]["devices"] == [device], found
    assert words in found[-1]["reason"], found
    assert trip.cluster.coordinator.members[device].is_evicted


def test_a_copy_that_came_wrongly_once_is_sent_again() -> None:
    fault = Fault("b", "hold copy", "called", step=BACKUP, does=flips_what_comes(1))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["pipeline"])
    trip.check(reference(PLANS["pipeline"].micro_batches), generations=1)
    texts = [facts["text"] for facts in trip.facts("note")]
    assert texts == [
        f"The copy of a's state after step {BACKUP} that b received is not what a has: it is sent again."
    ]  # fmt: skip


@pytest.mark.slow
def test_a_device_that_changes_the_copies_it_holds() -> None:
    fault = Fault("b", "hold copy", "called", step=BACKUP, does=flips_what_comes(99))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["pipeline"])
    check_evicted(trip, "b", f"for the second time the copy of a's state after step {BACKUP} that b received")


@pytest.mark.slow
def test_a_device_whose_own_copy_changes_before_it_is_sent() -> None:
    fault = Fault("a", "send copy", "called", step=BACKUP, does=lambda worker: flip(worker, BACKUP))
    with FaultCluster(NAMES, fault) as cluster:
        # Training does not wait for copies: there are steps for a slow machine to look at this one in.
        slowly = {step: lambda: time.sleep(0.05) for step in range(BACKUP + 1, 20)}
        trip = cluster.travel(PLANS["pipeline"], steps=24, at_step=slowly)
    check_evicted(trip, "a", f"its copy of its state after step {BACKUP} has changed while it was kept", steps=24)


@pytest.mark.slow
def test_a_snapshot_that_changes_is_not_saved() -> None:
    """The coordinator compares what comes with what was offered; the same step is saved after it was run again."""
    fault = Fault("a", "send copy", "called", step=5, does=lambda worker: flip(worker, 5))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"], snapshots=(5,))
    trip.check(reference(1))
    assert [facts["devices"] for facts in trip.facts("lost")] == [["a"]]
    assert "has changed while it was kept" in trip.facts("lost")[0]["reason"]
    assert trip.saved == [5, 8]


@pytest.mark.slow
def test_state_that_changed_is_never_trained_from() -> None:
    """b is lost; c, who holds the copy of b's state, gives away another than it was given."""
    lost = Fault("b", "backward", step=5)
    changed = Fault("c", "give", "called", after=lost, does=flip_all)
    with FaultCluster(NAMES, lost, changed) as cluster:
        trip = cluster.travel(PLANS["pipeline"])
    check_evicted(trip, "c", "is not what it was when it was kept", lost=2)


def flip_all(worker: Worker) -> None:
    for step in worker.keeping.listing()[0]:
        for tensor in worker.keeping.at(step).values():
            if tensor.numel() and tensor.is_contiguous():
                as_bytes(tensor)[0] ^= 1


@pytest.mark.slow
def test_a_device_does_not_go_on_from_its_own_copy_that_changed() -> None:
    """b is lost in the middle of a step: the others go back to the copies they made of their own state."""
    lost = Fault("b", "backward", step=5)
    changed = Fault("c", "load", "called", after=lost, does=flip_all)
    with FaultCluster(NAMES, lost, changed) as cluster:
        trip = cluster.travel(PLANS["samples"])
    trip.check(reference(1))
    found = trip.facts("lost")
    assert [facts["devices"] for facts in found] == [["b"], ["c"]], found
    assert "its own copy of" in found[1]["reason"]
