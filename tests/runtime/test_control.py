"""The control messages' wire format: the bytes that workers and coordinators of the same protocol have always sent."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from manyhands.runtime.control import (
    PROTOCOL,
    FromCoordinator,
    FromWorker,
    decode_from_coordinator,
    decode_from_worker,
    encode,
)

MESSAGES = (Path(__file__).parent / "control_messages.jsonl").read_bytes().splitlines()
"""One message of each kind, every field of it filled, as protocol 13 encodes it."""


def tag_of(data: bytes) -> str:
    return str(msgspec.json.decode(data)["type"])


def tags_of(kinds: object) -> set[str]:
    return {str(kind.__struct_config__.tag) for kind in get_args(kinds)}


@pytest.mark.quick(every=13)
@pytest.mark.parametrize("data", MESSAGES, ids=tag_of)
def test_a_message_is_encoded_in_the_bytes_of_its_protocol(data: bytes) -> None:
    decoders = {decode_from_worker: FromWorker, decode_from_coordinator: FromCoordinator}
    reading = [decode for decode, kinds in decoders.items() if tag_of(data) in tags_of(kinds)]
    assert reading
    for decode in reading:
        assert encode(decode(data)) == data


def test_every_message_is_among_them() -> None:
    assert {tag_of(data) for data in MESSAGES} == tags_of(FromWorker) | tags_of(FromCoordinator)
    assert PROTOCOL == 13, "another protocol: write its messages anew"
