"""What may arrive, where it goes, and how every wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from manyhands.facts.errors import BadValue, ManyhandsError, TimedOut, WorkerLost
from manyhands.transport.frames import Header, encode
from manyhands.transport.mailbox import STEPS_AHEAD, Mailbox
from manyhands.transport.memory import as_bytes, window
from manyhands.transport.switchboard import deliver

CONTENT = bytes(range(100))


@pytest.fixture
def box() -> Mailbox:
    mailbox = Mailbox("b", limit_seconds=5)
    mailbox.open(3, {("a", "x"): 100, ("a", "empty"): 0, ("c", "x"): 100})
    return mailbox


def frame(
    mailbox: Mailbox, first: int = 0, last: int = 100, *, peer: str = "a", origin: str = "a", generation: int = 3,
    step: int = 0, topic: str = "x", size: int = 100,
) -> None:  # fmt: skip
    header = Header(origin, generation, step, topic, size, first, last - first)
    deliver(mailbox, peer, encode(header), CONTENT[first:last])


def destination(count: int = 100) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def is_content(tensor: torch.Tensor) -> bool:
    return bytes(as_bytes(tensor)) == CONTENT


def later(action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.05, action)
    timer.start()
    return timer


def test_rounds_that_differ() -> None:
    """A message is as long as the plan of its own step says, whichever step is under way."""
    mailbox = Mailbox("b", limit_seconds=5)
    mailbox.open(3, lambda step: {("a", "x"): 100 if step == 1 else 40} if step < 3 else {})
    mailbox.expect("a", "state", 7)
    frame(mailbox, step=1)
    frame(mailbox, 0, 40, step=0, size=40)
    assert mailbox.has_arrived("a", 0, "x")
    assert mailbox.has_arrived("a", 1, "x")
    for step, size in ((2, 100), (3, 40)):
        frame(mailbox, 0, size, step=step, size=size)
    assert [refusal.rpartition("' ")[2] for refusal in mailbox.refusals] == [
        "of step 2 has 100 bytes; the plan says 40", "of step 3 is not in the plan",
    ]  # fmt: skip
    with pytest.raises(BadValue, match="has 40 bytes for 'x' from a; the plan says 100"):
        mailbox.post("a", 1, "x", [destination(40)])
    frame(mailbox, 0, 7, step=2, size=7, topic="state")
    assert mailbox.has_arrived("a", 2, "state")


def test_early_in_pieces(box: Mailbox) -> None:
    frame(box, 0, 40)
    assert not box.has_arrived("a", 0, "x")
    frame(box, 40, 100)
    assert box.has_arrived("a", 0, "x")
    into = destination()
    box.receive("a", 0, "x", [into])
    assert is_content(into)
    assert box.received_bytes["a"] == 100


def test_late(box: Mailbox) -> None:
    into = destination()
    timer = later(lambda: frame(box))
    box.receive("a", 0, "x", [into])
    timer.join()
    assert is_content(into)


def test_posted_messages_are_written_where_they_belong_at_once(box: Mailbox) -> None:
    into = destination()
    box.post("a", 0, "x", [into])
    frame(box, 0, 60)
    assert bytes(as_bytes(into))[:60] == CONTENT[:60]
    frame(box, 60, 100)
    box.receive("a", 0, "x", [into])
    assert is_content(into)


@pytest.mark.parametrize("is_posted", [True, False])
def test_scattered_destinations(box: Mailbox, is_posted: bool) -> None:
    parts = [destination(1), destination(0), destination(59), destination(40).view(torch.float32)]
    if is_posted:
        box.post("a", 0, "x", parts)
    for first in range(0, 100, 30):
        frame(box, first, min(100, first + 30))
    box.receive("a", 0, "x", parts)
    assert b"".join(bytes(as_bytes(part)) for part in parts) == CONTENT


def test_posted_in_the_middle_of_its_arrival(box: Mailbox) -> None:
    into = destination()
    frame(box, 0, 40)
    box.post("a", 0, "x", [into])
    frame(box, 40, 100)
    box.receive("a", 0, "x", [into])
    assert is_content(into)


def test_an_empty_message(box: Mailbox) -> None:
    frame(box, 0, 0, topic="empty", size=0)
    box.receive("a", 0, "empty", [])


def test_taken_without_a_place(box: Mailbox) -> None:
    """Early, in the middle of its arrival, late, and empty; what is not in the plan is not waited for."""
    frame(box)
    assert bytes(box.take("a", 0, "x")) == CONTENT
    frame(box, 0, 40, step=1)
    timer = later(lambda: frame(box, 40, 100, step=1))
    assert bytes(box.take("a", 1, "x")) == CONTENT
    timer.join()
    timer = later(lambda: frame(box, step=2))
    assert bytes(box.take("a", 2, "x")) == CONTENT
    timer.join()
    frame(box, 0, 0, topic="empty", size=0)
    assert not len(box.take("a", 0, "empty"))
    with pytest.raises(BadValue, match="not in the plan"):
        box.take("a", 0, "y")


REFUSALS = {
    "wrong size": ({"size": 200}, "200 bytes; the plan says 100"),
    "wrong topic": ({"topic": "y"}, "not in the plan"),
    "old generation": ({"generation": 2}, "generation 2; this is 3"),
    "new generation": ({"generation": 4}, "generation 4; this is 3"),
    "origin": ({"origin": "c"}, "comes from c"),
    "out of order": ({"first": 50}, "byte 50; 0 are at hand"),
    "stale": ({"step": -1}, "of step -1 comes at step 0"),
    "far ahead": ({"step": STEPS_AHEAD}, f"of step {STEPS_AHEAD} comes at step 0"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_are_noted_and_harm_nobody(box: Mailbox, kind: str) -> None:
    changes, reason = REFUSALS[kind]
    into = destination()
    box.post("a", 0, "x", [into])
    frame(box, **changes)  # type: ignore[arg-type]
    assert box.refused == 1
    assert reason in box.refusals[0]
    assert not into.any()
    frame(box)
    box.receive("a", 0, "x", [into])
    assert is_content(into)


def test_a_message_comes_once(box: Mailbox) -> None:
    frame(box)
    frame(box)
    box.receive("a", 0, "x", [destination()])
    frame(box)
    assert box.refused == 2
    assert all("has come already" in refusal for refusal in box.refusals)


def test_a_piece_comes_once(box: Mailbox) -> None:
    frame(box, 0, 40)
    frame(box, 0, 40)
    assert "byte 0; 40 are at hand" in box.refusals[0]


def test_the_notes_do_not_grow_for_ever(box: Mailbox) -> None:
    for _ in range(1000):
        frame(box, topic="y" * 1000)
    assert box.refused == 1000
    assert sum(map(len, box.refusals)) < 50_000


def test_a_new_step_drops_what_is_older(box: Mailbox) -> None:
    frame(box, step=0)
    frame(box, step=1)
    box.begin_step(1)
    assert not box.has_arrived("a", 0, "x")
    assert box.has_arrived("a", 1, "x")
    frame(box, step=0)
    assert box.refused == 1


def test_a_new_generation_forgets_everything_but_who_is_lost(box: Mailbox) -> None:
    frame(box)
    box.lose("c", WorkerLost("c was lost."))
    box.interrupt(WorkerLost("d was lost."))
    box.open(4, {("a", "x"): 100, ("c", "x"): 100}, first_step=7)
    box.check()
    assert not box.has_arrived("a", 0, "x")
    with pytest.raises(WorkerLost, match="c was lost"):
        box.receive("c", 7, "x", [destination()])
    box.join("c")
    frame(box, peer="c", origin="c", generation=4, step=7)
    box.receive("c", 7, "x", [destination()])


def test_a_destination_is_left_alone_once_its_generation_ended(box: Mailbox) -> None:
    into = destination()
    box.post("a", 0, "x", [into])
    header = Header("a", 3, 0, "x", 100, 0, 100)
    assert box.accept("a", header) is not None
    assert box.wants(header)
    box.open(4, {("a", "x"): 100})
    assert not box.wants(header)
    box.wrote(header)
    assert not box.has_arrived("a", 0, "x")


def test_a_wait_ends_with_its_generation(box: Mailbox) -> None:
    timer = later(lambda: box.open(4, {("a", "x"): 100}))
    with pytest.raises(ManyhandsError, match="in generation 3; now it is 4"):
        box.receive("a", 0, "x", [destination()])
    timer.join()


@pytest.mark.parametrize("size", [99, 101])
def test_a_destination_of_another_size_is_an_error_here(box: Mailbox, size: int) -> None:
    with pytest.raises(BadValue, match=f"{size} bytes .*; the plan says 100"):
        box.post("a", 0, "x", [destination(size)])
    with pytest.raises(BadValue, match="not in the plan"):
        box.receive("a", 0, "y", [destination()])


def test_an_interruption_ends_every_wait(box: Mailbox) -> None:
    error = ManyhandsError("stop")
    timer = later(lambda: box.interrupt(error))
    start = time.monotonic()
    with pytest.raises(ManyhandsError, match="stop"):
        box.receive("a", 0, "x", [destination()])
    timer.join()
    assert time.monotonic() - start < 4  # its limit is 5
    with pytest.raises(ManyhandsError, match="stop"):
        box.wait_for_news(box.news)
    with pytest.raises(ManyhandsError, match="stop"):
        box.check()
    with pytest.raises(ManyhandsError, match="stop"):
        box.has_arrived("a", 0, "x")


def test_a_loss_ends_the_wait_for_that_peer_only(box: Mailbox) -> None:
    timer = later(lambda: box.lose("a", WorkerLost("a was lost.")))
    with pytest.raises(WorkerLost, match="a was lost"):
        box.receive("a", 0, "x", [destination()])
    timer.join()
    with pytest.raises(WorkerLost):
        box.has_arrived("a", 0, "x")
    frame(box, peer="c", origin="c")
    box.receive("c", 0, "x", [destination()])


def test_what_a_lost_peer_had_sent_is_kept(box: Mailbox) -> None:
    frame(box)
    box.lose("a", WorkerLost("a was lost."))
    assert box.has_arrived("a", 0, "x")
    box.receive("a", 0, "x", [destination()])


def test_news_wakes(box: Mailbox) -> None:
    timer = later(lambda: frame(box))
    assert box.wait_for_news(0) == 1
    timer.join()
    timer = later(lambda: box.lose("a", WorkerLost("a was lost.")))
    assert box.wait_for_news(1) == 2
    timer.join()


def test_a_limit_passes() -> None:
    mailbox = Mailbox("b", limit_seconds=0.05)
    mailbox.open(0, {("a", "x"): 4})
    with pytest.raises(TimedOut, match=r"b has waited 0\.05 s for 'x' of step 2 from a"):
        mailbox.receive("a", 2, "x", [destination(4)])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(3.5),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.ones(3, requires_grad=True),
        torch.arange(10)[4:7],
    ],
    ids=str,
)
def test_the_memory_of_a_tensor(tensor: torch.Tensor) -> None:
    view = as_bytes(tensor)
    assert len(view) == tensor.numel() * tensor.element_size()
    assert bytes(view) == bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


def test_memory_with_gaps_does_not_travel() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        as_bytes(torch.zeros(4, 4).t()[1:])


def test_windows_over_several_views() -> None:
    views = [memoryview(CONTENT)[:10], memoryview(CONTENT)[10:10], memoryview(CONTENT)[10:35], memoryview(CONTENT)[35:]]
    for first in range(0, 100, 7):
        for last in range(first, 101, 3):
            found = window(views, first, last - first)
            assert b"".join(found) == CONTENT[first:last]
            assert all(len(view) for view in found)
