"""Boards: what is left there is read as it was, and never written over while it may be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.transport.board import (
    BOARD_BYTES,
    HEAD_BYTES,
    LARGE_BYTES,
    ReadingBoard,
    TensorShape,
    WritingBoard,
    put_alike,
)

HALF, ROW = TensorShape(torch.float16, (2, 3)), TensorShape(torch.float64, (5,))
MESSAGES = {"halo": (HALF, ROW), "row": (ROW,), "nothing": (TensorShape(torch.float32, (0, 4)),)}


def pair(size: int = BOARD_BYTES) -> tuple[WritingBoard, ReadingBoard]:
    memory = memoryview(bytearray(size))
    return WritingBoard(memory, MESSAGES), ReadingBoard(memory, MESSAGES)


def drawn(name: str) -> list[torch.Tensor]:
    return [torch.randn(part.shape).to(part.dtype) for part in MESSAGES[name]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(MESSAGES)), unique=True), min_size=1, max_size=8))
def test_what_is_left_is_read_as_it_was(rounds: list[list[str]]) -> None:
    """Any messages in any rounds; what a round does not bring is not there, whatever lay in its place before."""
    writing, reading = pair()
    for number, names in enumerate(rounds):
        stamp, turn = number + 1, number % 2
        left = {name: drawn(name) for name in names}
        for name, tensors in left.items():
            assert not reading.has(name, stamp, turn)
            assert writing.put(name, stamp, turn, tensors)
        for name in MESSAGES:
            assert reading.has(name, stamp, turn) == (name in left)
        for name, tensors in left.items():
            assert all(map(torch.equal, reading.read(name, turn), tensors))
        reading.finish(stamp)


def test_tensors_of_any_layout() -> None:
    writing, reading = pair()
    half, row = torch.randn(3, 2).half().t(), torch.randn(10, dtype=torch.float64)[::2]
    assert writing.put("halo", 1, 0, [half, row])
    assert all(map(torch.equal, reading.read("halo", 0), (half, row)))


def test_a_place_is_not_written_before_its_round_is_done() -> None:
    writing, reading = pair()
    first = drawn("row")
    assert writing.put("row", 1, 0, first)
    assert writing.put("row", 2, 1, drawn("row")), "an odd round has a place of its own"
    assert not writing.put("row", 3, 0, drawn("row"))
    assert reading.has("row", 1, 0)
    assert torch.equal(reading.read("row", 0)[0], first[0])
    reading.finish(1)
    assert writing.put("row", 3, 0, drawn("row"))
    assert not writing.put("row", 4, 1, drawn("row"))


def test_nothing_is_left_for_a_device_that_does_not_read() -> None:
    memory = memoryview(bytearray(BOARD_BYTES))
    writing = WritingBoard(memory, MESSAGES)
    assert not writing.put("row", 1, 0, drawn("row"))
    reading = ReadingBoard(memory, MESSAGES)
    assert writing.put("row", 1, 0, drawn("row"))
    assert reading.has("row", 1, 0)


def test_a_large_message_has_one_place_for_all_rounds() -> None:
    size = LARGE_BYTES + 8
    messages = {"sum": (TensorShape(torch.uint8, (size,)),), "row": (ROW,)}
    memory = memoryview(bytearray(BOARD_BYTES))
    writing, reading = WritingBoard(memory, messages), ReadingBoard(memory, messages)
    pieces = [memoryview(bytes([1]) * 8), memoryview(bytes([2]) * LARGE_BYTES)]
    assert writing.put_bytes("sum", 1, 0, pieces)
    assert bytes(reading.read_bytes("sum", 0)) == b"".join(pieces)
    assert not writing.put_bytes("sum", 2, 1, pieces), "it may yet be read, in an odd round too"
    reading.finish(1)
    assert writing.put_bytes("sum", 2, 1, pieces)
    assert reading.has("sum", 2, 1)
    assert not reading.has("sum", 1, 0)


def test_small_messages_find_room_before_large_ones() -> None:
    messages = {"a": (TensorShape(torch.uint8, (4096,)),), "z": (ROW,)}
    assert WritingBoard(memoryview(bytearray(HEAD_BYTES + 1024)), messages).places.keys() == {"z"}


def test_both_sides_leave_out_what_finds_no_room() -> None:
    writing, reading = pair(HEAD_BYTES + 512)
    assert writing.places.keys() == reading.places.keys() < MESSAGES.keys()
    assert not writing.put("unknown", 1, 0, [])


def test_a_later_generation_finds_nothing_of_an_earlier_one() -> None:
    memory = memoryview(bytearray(BOARD_BYTES))
    writing, reading = WritingBoard(memory, MESSAGES), ReadingBoard(memory, MESSAGES)
    assert writing.put("row", 7, 1, drawn("row"))
    assert reading.has("row", 7, 1)
    WritingBoard(memory, MESSAGES)
    assert not reading.has("row", 7, 1)


def test_a_reader_that_has_said_nothing_is_woken() -> None:
    writing, reading = pair()
    assert writing.is_reader_asleep
    reading.say_awake(True)
    assert not writing.is_reader_asleep
    reading.say_awake(False)
    assert writing.is_reader_asleep


def test_another_shape_is_an_error() -> None:
    writing, _ = pair()
    with pytest.raises(RuntimeError, match="size"):
        writing.put("row", 1, 0, [torch.zeros(6, dtype=torch.float64)])


def test_the_same_row_is_left_on_several_boards() -> None:
    pairs, row = [pair() for _ in range(3)], drawn("row")[0]
    memory = memoryview(row.view(torch.uint8).numpy())
    put_alike([(writing, "row") for writing, _ in pairs], 1, 0, memory)
    for writing, reading in pairs:
        assert reading.has("row", 1, 0)
        assert torch.equal(reading.read("row", 0)[0], row)
        assert not writing.is_free("row", 0), "it may yet be read"
        assert writing.is_free("row", 1)
        reading.finish(1)
        assert writing.is_free("row", 0)


def test_a_row_of_another_length_is_an_error() -> None:
    writing, reading = pair()
    with pytest.raises(ValueError, match="different"):
        put_alike([(writing, "row")], 1, 0, memoryview(bytes(48)))
    assert not reading.has("row", 1, 0)
