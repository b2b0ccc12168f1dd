"""Frames survive the wire; noise does not pass for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.transport.frames import (
    ANSWER,
    HEARTBEAT,
    LARGEST_CHUNK_BYTES,
    LARGEST_CONTROL_BYTES,
    LARGEST_HEADER_BYTES,
    LARGEST_MESSAGE_BYTES,
    MAGIC,
    OFFER,
    PRELUDE,
    BadFrame,
    Header,
    control,
    decode,
    encode,
    header_bytes,
    is_control,
)

small_text = st.text(max_size=100)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    length = draw(st.integers(0, LARGEST_CHUNK_BYTES))
    size = draw(st.integers(length, LARGEST_MESSAGE_BYTES))
    offset = draw(st.integers(0, size - length))
    number = st.integers(-(2**63), 2**63 - 1)
    place = draw(st.one_of(st.just(-1), number))
    return Header(draw(small_text), draw(number), draw(number), draw(small_text), size, offset, length, place)


def read(frame: bytes) -> Header:
    size = header_bytes(frame[: PRELUDE.size])
    assert len(frame) == PRELUDE.size + size
    return decode(frame[PRELUDE.size :])


@pytest.mark.slow
@given(headers())
def test_a_frame_comes_back_as_it_was(header: Header) -> None:
    assert read(encode(header)) == header


@pytest.mark.slow
@given(headers(), st.data())
def test_a_header_cut_short_is_no_header(header: Header, data: st.DataObject) -> None:
    frame = encode(header)
    cut = data.draw(st.integers(0, len(frame) - PRELUDE.size - 1))
    with pytest.raises(BadFrame):
        decode(frame[PRELUDE.size : PRELUDE.size + cut])


@given(st.binary(min_size=PRELUDE.size, max_size=PRELUDE.size))
def test_noise_is_no_prelude(noise: bytes) -> None:
    if noise[:4] != MAGIC:
        with pytest.raises(BadFrame, match="begins with"):
            header_bytes(noise)


@given(st.binary(max_size=200))
def test_noise_is_a_header_within_limits_or_none(noise: bytes) -> None:
    try:
        header = decode(noise)
    except BadFrame:
        return
    assert 0 <= header.offset <= header.offset + header.length <= header.bytes <= LARGEST_MESSAGE_BYTES


@pytest.mark.parametrize("size", [0, LARGEST_HEADER_BYTES + 1, 2**32 - 1])
def test_the_size_of_a_header_is_checked_first(size: int) -> None:
    with pytest.raises(BadFrame, match=str(size)):
        header_bytes(PRELUDE.pack(MAGIC, size))


@pytest.mark.parametrize(
    ("size", "offset", "length"),
    [
        (10, 0, LARGEST_CHUNK_BYTES + 1),
        (LARGEST_MESSAGE_BYTES + 1, 0, 1),
        (-1, 0, 0),
        (10, 8, 4),
        (10, -1, 4),
        (10, 0, -4),
        (4, 0, 8),
    ],
)
def test_absurd_sizes_are_refused(size: int, offset: int, length: int) -> None:
    with pytest.raises(BadFrame):
        read(encode(Header("a", 0, 0, "x", size, offset, length)))


@pytest.mark.parametrize(
    "fields", [["a", 0, 0, "x", 1, 0], ["a", 0, 0, 7, 1, 0, 1], {"origin": "a"}, "a", ["a", 0.5, 0, "x", 1, 0, 1]]
)
def test_other_fields_are_refused(fields: object) -> None:
    with pytest.raises(BadFrame, match="none"):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.slow
@given(headers())
def test_only_frames_without_an_origin_are_for_the_engine(header: Header) -> None:
    assert not is_control(msgspec.structs.replace(header, origin="a"))
    assert not is_control(msgspec.structs.replace(header, generation=0))


@pytest.mark.slow
@given(st.sampled_from([HEARTBEAT.topic, OFFER, ANSWER]), headers())
def test_what_is_for_the_engine_is_small_and_whole(topic: str, header: Header) -> None:
    said = msgspec.structs.replace(header, origin="", generation=-1, topic=topic)
    is_right = header.length == header.bytes <= LARGEST_CONTROL_BYTES and header.place < 0
    try:
        assert is_control(said)
        assert is_right
    except BadFrame:
        assert not is_right
    assert is_control(control(topic, header.length % LARGEST_CONTROL_BYTES))


def test_a_text_that_is_none_is_no_header() -> None:
    with pytest.raises(BadFrame, match="none"):
        decode(encode(Header("a", 0, 0, "xyz", 1, 0, 1))[PRELUDE.size :].replace(b"xyz", b"\xff\xfe\xfd"))


def test_fields_beyond_the_known_ones_are_not_even_looked_at() -> None:
    known = msgspec.msgpack.encode(["a", 0, 0, "x", 1, 0, 1, -1])
    with pytest.raises(BadFrame, match="none"):
        decode(b"\x99" + known[1:] + b"\x91" * 3900 + b"\0")


def test_a_header_without_a_place_is_that_of_a_payload_behind_it() -> None:
    assert decode(msgspec.msgpack.encode(["a", 0, 0, "x", 1, 0, 1])).place == -1


def test_a_topic_too_long_is_the_senders_error() -> None:
    with pytest.raises(BadValue, match=str(LARGEST_HEADER_BYTES)):
        encode(Header("a", 0, 0, "x" * LARGEST_HEADER_BYTES, 1, 0, 1))
