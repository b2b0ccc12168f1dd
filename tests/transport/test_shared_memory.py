"""A ring between two processes: bytes come out as they went in, and nobody gets at what is not his."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.transport.handover import Handover
from manyhands.transport.shared_memory import HEAD_BYTES, EmptyingRing, FillingRing, Unshared, find

SIZE = 100_000


@contextlib.contextmanager
def ring(size: int = SIZE) -> Iterator[tuple[FillingRing, EmptyingRing]]:
    filling = FillingRing(size)
    emptying = find(filling.place, size, filling.key)
    try:
        yield filling, emptying
    finally:
        filling.close()
        emptying.close()


def pieces(content: bytes | bytearray, cuts: list[float]) -> list[memoryview]:
    """The same memory in parts."""
    places = sorted(int(len(content) * cut) for cut in cuts)
    view = memoryview(content)
    return [view[begin:end] for begin, end in zip([0, *places], [*places, len(content)]) if begin < end]


cuts = st.lists(st.floats(0, 1), max_size=4)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE), st.booleans(), cuts, cuts), max_size=40), st.integers(0, 2**32))
def test_what_goes_in_comes_out(moves: list[tuple[int, bool, list[float], list[float]]], seed: int) -> None:
    """Any lengths, puts and takes in any order, thrown away or not, in any parts on both sides."""
    stream = os.urandom(SIZE)
    under_way: deque[tuple[int, bytes]] = deque()
    with ring() as (filling, emptying):
        for number, (length, is_taken, cuts_in, cuts_out) in enumerate(moves):
            content = stream[: length // 2] + bytes([number]) * (length - length // 2)
            place = filling.put(pieces(content, cuts_in), length)
            assert (place >= 0) == (sum(len(one) for _, one in under_way) + length <= SIZE)
            if place >= 0:
                assert place < SIZE
                under_way.append((place, content))
            if is_taken and under_way:
                place, content = under_way.popleft()
                if seed % (number + 2):
                    into = bytearray(len(content))
                    emptying.read(place, len(content), pieces(into, cuts_out))
                    assert into == content
                emptying.free(len(content))


def test_an_empty_ring_is_filled_from_its_start() -> None:
    with ring() as (filling, emptying):
        for _ in range(5):
            assert filling.put([memoryview(bytes(60_000))], 60_000) == 0
            assert filling.put([memoryview(bytes(40_000))], 40_000) == 60_000
            assert filling.put([memoryview(b"x")], 1) == -1
            emptying.free(60_000)
            emptying.free(40_000)


@pytest.mark.parametrize("lie", [2**64 - 1, 90_001, 0])
def test_a_lie_about_what_was_taken_is_not_believed(lie: int) -> None:
    with ring() as (filling, emptying):
        assert filling.put([memoryview(bytes(90_000))], 90_000) == 0
        emptying._taken[0] = lie
        assert filling.put([memoryview(bytes(20_000))], 20_000) == -1
        emptying.free(90_000)
        assert filling.put([memoryview(bytes(20_000))], 20_000) == 0


@pytest.mark.slow
@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_nothing_is_read_outside(place: int, length: int) -> None:
    if 0 <= place < SIZE and 0 <= length <= SIZE:
        return
    with ring() as (_, emptying), pytest.raises(AssertionError):
        emptying.read(place, length, [])


def test_its_size_stays() -> None:
    """Or whoever cut it short would end the other process."""
    filling = FillingRing(SIZE)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(filling.descriptor, size)
    filling.close()


def test_it_is_taken_from_the_system_as_it_fills() -> None:
    filling = FillingRing(64 * 2**20)
    assert os.fstat(filling.descriptor).st_blocks * 512 <= 2 * HEAD_BYTES
    filling.put([memoryview(bytes(2**20))], 2**20)
    assert os.fstat(filling.descriptor).st_blocks * 512 <= 2**20 + 2 * HEAD_BYTES
    filling.close()


# Who finds it


def test_who_has_not_its_key() -> None:
    filling = FillingRing(SIZE)
    for key in (os.urandom(32), b"", filling.key[:-1]):
        with pytest.raises(Unshared, match="somebody else's"):
            find(filling.place, SIZE, key)
    filling.close()


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 2**40, -HEAD_BYTES])
def test_another_size(size: int) -> None:
    filling = FillingRing(SIZE)
    with pytest.raises(Unshared, match="size"):
        find(filling.place, size, filling.key)
    filling.close()


@contextlib.contextmanager
def given_away(descriptor: int) -> Iterator[bytes]:
    """Where somebody hands over any descriptor."""
    handover = Handover(descriptor)
    try:
        yield handover.place
    finally:
        handover.close()


def test_memory_whose_size_may_change() -> None:
    descriptor = os.memfd_create("manyhands", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, bytes(32))
        os.ftruncate(descriptor, HEAD_BYTES + SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with given_away(descriptor) as place, pytest.raises(Unshared, match="size"):
            find(place, SIZE, bytes(32))
    finally:
        os.close(descriptor)


def test_any_other_file() -> None:
    with (
        open("/dev/zero", "rb") as file,
        given_away(file.fileno()) as place,
        pytest.raises(Unshared, match="no memory of ours"),
    ):
        find(place, SIZE, bytes(32))


@pytest.mark.parametrize("place", [b"", b"manyhands-0", b"manyhands-" + b"0" * 200, b"somebody-else", b"\0manyhands-0"])
def test_nothing_there(place: bytes) -> None:
    with pytest.raises(Unshared):
        find(place, SIZE, bytes(32))


def test_whoever_hands_over_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.handover.FETCH_SECONDS", 0.05)
    place = b"manyhands-" + os.urandom(8).hex().encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(b"\0" + place)
        silent.listen(1)
        with pytest.raises(Unshared, match="timed out"):
            find(place, SIZE, bytes(32))


def test_once_handed_over_nobody_else_gets_it() -> None:
    filling = FillingRing(SIZE)
    threads = threading.active_count()
    filling.hand_over()
    assert threading.active_count() == threads - 1
    with pytest.raises(Unshared):
        find(filling.place, SIZE, filling.key)
    filling.close()


def test_nothing_is_left() -> None:
    before, names = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    with ring() as (filling, _):
        filling.hand_over()
        assert set(os.listdir("/dev/shm")) == names
    assert len(os.listdir("/proc/self/fd")) == before
