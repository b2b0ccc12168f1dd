"""The small messages by which devices say inside a connection who they are and whom they look for: texts by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from manyhands.transport.wire import Broken, Wire, read_exactly, write_all

LARGEST_HELLO_BYTES = 4096
_LENGTH = struct.Struct("<I")


def write_hello(wire: Wire, fields: Mapping[str, str], deadline: float) -> None:
    """Send a hello. Raises Broken or TimeoutError."""
    content = json.dumps(fields).encode()
    write_all(wire, _LENGTH.pack(len(content)) + content, deadline)


def read_hello(wire: Wire, deadline: float) -> dict[str, str]:
    """Return the other side's hello. Raises Broken or TimeoutError."""
    (size,) = _LENGTH.unpack(read_exactly(wire, _LENGTH.size, deadline))
    if size > LARGEST_HELLO_BYTES:
        raise Broken(f"a hello of {size} bytes; at most {LARGEST_HELLO_BYTES} are read")
    try:
        fields = json.loads(read_exactly(wire, size, deadline))
    except (ValueError, RecursionError) as error:
        raise Broken("a hello that is none") from error
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise Broken("a hello that is none")
    return fields
