"""The format of a frame on the wire: a fixed prelude, a small header of known fields, raw bytes.

    ┌───────────────┬──────────────────┬───────────────────────────┐
    │ prelude 8 B   │ header           │ payload: `length` bytes   │
    │ magic, size   │ msgpack, <= 4 KB │ [offset, offset + length) │
    └───────────────┴──────────────────┴───────────────────────────┘

A message larger than a chunk travels as several frames, so that progress is seen and a small urgent message need not
wait for a large one. There is no code in a frame: fields of fixed types, and bytes that land in memory the receiver
chose before it looked at them.
"""

from __future__ import annotations

import struct

import msgspec

from manyhands.facts.errors import BadValue

MAGIC = b"mhf1"
PRELUDE = struct.Struct("<4sI")
LARGEST_HEADER_BYTES = 4096
LARGEST_CHUNK_BYTES = 4 * 2**20
LONGEST_TOPIC = LARGEST_HEADER_BYTES // 4
"""The longest topic in characters, of at most four bytes each."""
CHUNK_BYTES = 512 * 1024
SHARED_CHUNK_BYTES = 2 * CHUNK_BYTES
"""The chunk size where payloads go through shared memory: copying takes less time than a frame otherwise."""
LARGEST_MESSAGE_BYTES = 2**36


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The message that a frame belongs to, and which part of it this is."""

    origin: str
    generation: int
    step: int
    topic: str
    """The message in words: what it is, and the boxes of the tensors in it."""
    bytes: int
    """The size of the whole message."""
    offset: int
    length: int
    place: int = -1
    """The offset of the payload in shared memory (`shared_memory`); -1: the payload follows the header."""


def control(topic: str, size: int) -> Header:
    """Return the header of a frame between the transports themselves, which is never delivered."""
    return Header("", -1, 0, topic, size, 0, size)


HEARTBEAT = control("beat", 0)
"""A heartbeat: it shows only that its sender is alive."""
BELL = control("bell", 0)
"""Wakes threads that wait for what lies on a board (`board`)."""
OFFER, ANSWER = "memory offered", "memory found"
"""See `sharing`."""
CONTROL_TOPICS = frozenset({HEARTBEAT.topic, BELL.topic, OFFER, ANSWER})
LARGEST_CONTROL_BYTES = 4096


class BadFrame(Exception):
    """A frame that cannot be told from noise: the stream behind it is lost."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode(header: Header) -> bytes:
    """Return prelude and header."""
    body = _encoder.encode(header)
    if len(body) > LARGEST_HEADER_BYTES:
        raise BadValue(f"'{header.topic:.100}...' has a header of {len(body)} bytes; at most {LARGEST_HEADER_BYTES}.")
    return PRELUDE.pack(MAGIC, len(body)) + body


def header_bytes(prelude: bytes | bytearray | memoryview) -> int:
    """Return the length of the header behind a prelude, checked before anything is allocated for it."""
    magic, size = PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise BadFrame(f"a frame begins with {bytes(magic)!r}, not {MAGIC!r}")
    if not 0 < size <= LARGEST_HEADER_BYTES:
        raise BadFrame(f"a header of {size} bytes; at most {LARGEST_HEADER_BYTES} are read")
    return int(size)


def is_control(header: Header) -> bool:
    """Return whether a frame is for the transport itself. Such a frame must be small and whole."""
    if (
        header.generation != HEARTBEAT.generation
        or header.origin != HEARTBEAT.origin
        or header.topic not in CONTROL_TOPICS
    ):
        return False
    if header.length > LARGEST_CONTROL_BYTES or header.length != header.bytes or header.place >= 0:
        size = f"{header.length} of {header.bytes} bytes"
        raise BadFrame(f"'{header.topic}' with {size}; all are read, and at most {LARGEST_CONTROL_BYTES}")
    return True


def decode(body: bytes | bytearray | memoryview) -> Header:
    """Return a header with every number within its limits."""
    try:
        header = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a header that is none: {error}") from error
    if not 0 <= header.length <= LARGEST_CHUNK_BYTES:
        raise BadFrame(f"a frame of {header.length} bytes; at most {LARGEST_CHUNK_BYTES} are read")
    if not 0 <= header.bytes <= LARGEST_MESSAGE_BYTES or not 0 <= header.offset <= header.bytes - header.length:
        raise BadFrame(f"bytes {header.offset} to {header.offset + header.length} of a message of {header.bytes}")
    return header
