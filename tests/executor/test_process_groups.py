"""Process groups that are waited for: whatever ends a wait for a message ends theirs, at once and for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import distributed

from grouped_devices import HERE, on_all, process_groups
from hand_made import summed_network
from manyhands.executor.collectives import Collectives
from manyhands.executor.process_groups import (
    STAMP_NUMBERS,
    GroupKey,
    Hosts,
    NoGroups,
    ProcessGroups,
    available_backends,
)
from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.collectives import NCCL_VARIABLES
from manyhands.facts.errors import BadSchedule, ManyhandsError, NotInstalled, Refused, TimedOut, WorkerLost
from manyhands.runtime.collective_store import store_at
from manyhands.schedule.actions import Reduce
from manyhands.transport.library_sockets import listening
from manyhands.transport.mailbox import Mailbox

DEVICES = ("a", "b", "c")
KEY = GroupKey("gradients", 0, DEVICES)
PROMPT_SECONDS = 5.0
"""Much less than any limit of the library here."""


def mailboxes(limit_seconds: float = 60.0) -> dict[str, Mailbox]:
    return {name: Mailbox(name, limit_seconds=limit_seconds) for name in DEVICES}


def ones() -> torch.Tensor:
    return torch.ones(3 + STAMP_NUMBERS)


def waiting_for_c(
    groups: dict[str, ProcessGroups], boxes: dict[str, Mailbox], end: Callable[[], None]
) -> tuple[dict[str, object], float]:
    """What two devices raise whose third never comes, and how long after `end` was called."""
    ended: list[float] = []

    def end_later() -> None:
        deadline = time.monotonic() + PROMPT_SECONDS
        while not all(boxes[name].waited_for() for name in "ab"):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert {name: boxes[name].waited_for() for name in "ab"} == {"a": {"b", "c"}, "b": {"a", "c"}}
        ended.append(time.monotonic())
        end()

    raised = on_all(
        {name: lambda name=name: groups[name].all_reduce(KEY, ones(), "x") for name in "ab"} | {"end": end_later}
    )
    assert raised.pop("end") is None
    return raised, time.monotonic() - ended[0]


def test_numbers_are_added_up_and_rows_gathered_in_order() -> None:
    boxes = mailboxes()
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        numbers = {name: ones() * 2**place for place, name in enumerate(DEVICES)}
        on_all({name: lambda name=name: groups[name].all_reduce(KEY, numbers[name], "x") for name in DEVICES})
        rows = on_all({
            name: lambda name=name: groups[name].begin_all_gather(KEY, numbers[name][:2], "y").finish(torch.float32)
            for name in DEVICES
        })  # fmt: skip
    for name in DEVICES:
        assert numbers[name][:3].tolist() == [7.0] * 3
        assert [row.tolist() for row in rows[name]] == [[7.0, 7.0]] * 3


def test_an_interruption_ends_a_collective_that_hangs() -> None:
    boxes = mailboxes()
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        stop = WorkerLost("stopped by the coordinator")
        raised, seconds = waiting_for_c(groups, boxes, lambda: [boxes[name].interrupt(stop) for name in "ab"] and None)
    assert raised == {"a": stop, "b": stop}
    assert seconds < PROMPT_SECONDS


def test_a_peer_that_is_lost_ends_it_too() -> None:
    boxes = mailboxes()
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        lost = WorkerLost("c is gone")
        raised, seconds = waiting_for_c(groups, boxes, lambda: [boxes[name].lose("c", lost) for name in "ab"] and None)
    assert raised == {"a": lost, "b": lost}
    assert seconds < PROMPT_SECONDS


def test_the_mailboxs_limit_ends_it() -> None:
    boxes = mailboxes(limit_seconds=0.3)
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        started = time.monotonic()
        raised = on_all({name: lambda name=name: groups[name].all_reduce(KEY, ones(), "x") for name in "ab"})
        assert time.monotonic() - started < PROMPT_SECONDS
    assert [type(error) for error in raised.values()] == [TimedOut, TimedOut]
    assert "has waited 0.3 s for 'x' in the process group of a, b, c" in str(raised["a"])


def test_a_device_whose_groups_are_closed_breaks_those_of_the_others() -> None:
    """As when its process dies: its connections close."""
    boxes = mailboxes()
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        raised, seconds = waiting_for_c(groups, boxes, groups["c"].close)
    assert all(isinstance(error, WorkerLost) and "broke in 'x'" in str(error) for error in raised.values()), raised
    assert seconds < PROMPT_SECONDS


def test_closing_leaves_no_thread_and_no_port_behind() -> None:
    """Though two devices still wait inside the library, whose own limit is a minute away."""
    boxes = mailboxes()
    before = listening()
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        stop = WorkerLost("stopped")
        waiting_for_c(groups, boxes, lambda: [boxes[name].interrupt(stop) for name in "ab"] and None)
        assert len(listening() - before) == 4  # the store, and gloo three times
    deadline = time.monotonic() + PROMPT_SECONDS
    while any(thread.name == "closing process groups" for thread in threading.enumerate()) or listening() - before:
        assert time.monotonic() < deadline, "the library still waits"
        time.sleep(0.01)
    with pytest.raises(WorkerLost, match="closed"):
        groups["a"].all_reduce(KEY, ones(), "x")


def test_devices_that_form_different_sums_notice() -> None:
    boxes = mailboxes()
    with process_groups(boxes, dict.fromkeys(DEVICES, (KEY,))) as groups:
        raised = on_all({
            name: lambda name=name: groups[name].all_reduce(KEY, ones(), "y" if name == "c" else "x")
            for name in DEVICES
        })  # fmt: skip
        assert {type(error) for error in raised.values()} == {BadSchedule}
        raised = on_all({
            name: lambda name=name: (
                groups[name].begin_all_gather(KEY, torch.ones(2), "y" if name == "c" else "x").finish(torch.float32)
            )
            for name in DEVICES
        })  # fmt: skip
        assert {type(error) for error in raised.values()} == {BadSchedule}


def test_groups_that_one_device_does_not_join_are_given_up_at_the_limit() -> None:
    boxes = mailboxes()
    store, port = store_at("127.0.0.1")
    terms = CollectiveTerms("torch", port, trusts_network=False)
    groups = {name: ProcessGroups(boxes[name], terms, HERE, 0, (KEY,), "cpu") for name in "ab"}
    started = time.monotonic()
    raised = on_all({name: lambda name=name: groups[name].form(0.5) for name in "ab"})
    assert time.monotonic() - started < PROMPT_SECONDS
    assert [type(error) for error in raised.values()] == [NoGroups, NoGroups]
    for one in groups.values():
        one.close()
    del store


def test_what_is_missing_or_not_trusted_is_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    box, terms = Mailbox("a"), CollectiveTerms("torch", 1, trusts_network=False)
    raised: type[ManyhandsError] = Refused
    with pytest.raises(raised, match="not encrypted"):
        ProcessGroups(box, terms, Hosts("192.0.2.1", "192.0.2.2"), 0, (KEY,), "cpu").form(1.0)
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(NotInstalled, match="has no gloo"):
        ProcessGroups(box, terms, HERE, 0, (KEY,), "cpu").form(1.0)


@pytest.mark.skipif(not torch.cuda.is_available() or not distributed.is_nccl_available(), reason="needs a GPU and NCCL")
def test_nccl_forms_sums_of_one_device_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nccl" not in available_backends(), "a worker sets its variables"
    for name, value in NCCL_VARIABLES.items():
        monkeypatch.setenv(name, value)
    box, key = Mailbox("a", limit_seconds=60.0), GroupKey("gradients", 0, ("a",))
    store, port = store_at("127.0.0.1")
    terms = CollectiveTerms("torch", port, trusts_network=False, gpu_devices=("a",))
    groups = ProcessGroups(box, terms, HERE, 0, (key,), "cuda")
    groups.form(30.0)
    assert groups.backend_of(key) == "nccl"
    numbers = torch.arange(5 + STAMP_NUMBERS, dtype=torch.float32, device="cuda")
    groups.all_reduce(key, numbers, "x")
    assert numbers[:5].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    (row,) = groups.begin_all_gather(key, numbers[:5], "y").finish(torch.float32)
    assert row.is_cuda
    assert torch.equal(row, numbers[:5])
    gradients = [
        torch.randn(6, device="cuda"),
        torch.randn(1, 2, 2, 1, device="cuda").to(memory_format=torch.channels_last),
    ]
    before = [gradient.clone() for gradient in gradients]
    reduce = Reduce(0, "gradients", 0, 2, ("a",), 40)
    collectives = Collectives(groups, is_measured=False, first_step=0, stride=1)
    record = collectives.sum(reduce, summed_network([6, 4], "float32"), 0, gradients)
    assert all(map(torch.equal, gradients, before))
    assert record.own == record.after
    assert collectives.counts == {str(key): 1}
    groups.close()
    with pytest.raises(WorkerLost, match="closed"):
        groups.all_reduce(key, numbers, "x")
    del store
