"""Memory that a JSON text takes once it is decoded, counted before anything is made of it.

Two letters of JSON (`[]`) become more than seventy bytes of Python, so that a limit on the text alone bounds nothing.
"""

from __future__ import annotations

VALUE_BYTES = 72
"""The bytes of a text, the largest of the small values, and its place in its list."""
LIST_BYTES = 72
OBJECT_BYTES = 240
"""The bytes of a dictionary of a few fields."""
_WIDE_CHARACTER_BYTES = 7
"""The bytes of a letter where one is beyond the Basic Multilingual Plane: all letters of its text then take four each,
beside a copy as UTF-8."""


def structure_bytes(content: bytes, value_bytes: int = VALUE_BYTES) -> int:
    """Return what the lists, objects and values of a JSON text take at most once it is decoded, without the letters of
    its texts; `value_bytes` is for one value. Signs inside texts are counted too: it is a bound, not a measure."""
    lists, objects = content.count(b"["), content.count(b"{")
    return (content.count(b",") + lists + objects) * value_bytes + lists * LIST_BYTES + objects * OBJECT_BYTES


def decoded_bytes(content: bytes) -> int:
    """Return what a JSON text takes at most once it is decoded, the letters of its texts included."""
    is_narrow = content.isascii() and b"\\u" not in content
    return structure_bytes(content) + len(content) * (1 if is_narrow else _WIDE_CHARACTER_BYTES)
