"""Hostile inputs made of good ones. The same seed gives the same input, in any process and in any order.

    Mutator(seeds, "json").input(random.Random("7/plans/123"))

Bytes are flipped, cut, spliced, repeated, and numbers in them made to lie. Documents (JSON, and YAML, which reads JSON)
are changed as trees too, so that what is deeper than the syntax is reached.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

LONGEST_INPUT = 64 * 1024
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 255, 256, 4095, 4096, 4097, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53 + 1, 2**63 - 1,
    2**63, -(2**63), 2**64 - 1, 2**64, 10**12, 10**18, -(10**18), 10**30, 10**100, 10**310, 0.0, -0.0, 0.1, -0.5,
    1e-320,
    1e-30, 1e18, 1e300, 1.8e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "0", "-1", "a", "x" * 300, "x" * 5000, "\0", "\n", "a\nb", "\x1b[31m", "\u202e", "\u2028", "é", "ÿ", "𐀀",
    "😀", "\ud800",
    "..", "../../etc/passwd", "/etc/passwd", "C:\\x", "nan", "NaN", "inf", "-inf", "1e999", "0x" + "f" * 400, "1_000",
    "١٢٣", "none", "null",
    "true", "__class__", "__metadata__", "{0.__class__}", "%s%n", "weight x", "coordinator", "Infinity Mbit/s",
    "10 GB", "1e400 GB", "-3 MB", "9" * 400,
)  # fmt: skip
TEXT_BITS: tuple[bytes, ...] = (
    b"", b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc0\x80", b"\xed\xa0\x80", b"\r", b"\n", b"\r\n", b"\t",
    b"#", b"'", b'"', b"\\", b":", b"- ", b",",
    b"[", b"]", b"{", b"}", b"<", b">", b"&a ", b"*a", b"<<: *a", b"!!binary ", b"!!set ", b"!!timestamp ",
    b"!!python/object:os.system ", b"%YAML 9.9\n",
    b"---\n", b"...\n", b"? ", b"| ", b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1e-999", b"-0",
    b"0x" + b"f" * 500, b"0o777", b"0b1", b"1:2:3", b".nan",
    b".inf", b"null", b"~", b"true", b"2001-02-31", b"9" * 30, b"9" * 400, b"9" * 5000, b"\xd9\xa1", b"&#0;",
    b"<!DOCTYPE a>", b"<![CDATA[", b"\\ud800",
)  # fmt: skip
_WIDTHS = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))


def deep(random_: random.Random) -> Any:
    """Lists or objects inside each other, more than anybody reads."""
    found: Any = random_.choice((0, "x", None))
    key = random_.choice((None, "a", "stages"))
    for _ in range(random_.choice((5, 20, 100, 400, 900))):
        found = [found] if key is None else {key: found}
    return found


def value(random_: random.Random) -> Any:
    """Something that a careful reader must expect in the place of anything."""
    kind = random_.randrange(20)
    if kind < 9:
        return random_.choice(NUMBERS)
    if kind < 14:
        return random_.choice(TEXTS)
    if kind == 14:
        return [random_.choice(NUMBERS)] * random_.choice((0, 1, 2, 13, 300))
    if kind == 15:
        return {random_.choice(TEXTS): random_.choice(NUMBERS)}
    if kind == 16:
        return deep(random_)
    return random_.choice((None, True, False, [], {}, [[]], "text"))


def mutated_tree(tree: Any, random_: random.Random) -> Any:
    """The tree with one place changed; what is not on the way there is shared with the old one."""
    if isinstance(tree, dict) and tree and random_.random() < 0.92:
        key = random_.choice(list(tree))
        kind = random_.randrange(12)
        if kind == 0:
            return {name: one for name, one in tree.items() if name != key}
        if kind == 1:
            return {**tree, random_.choice((*TEXTS, key + "s")): value(random_)}
        if kind == 2:
            other = random_.choice(list(tree))
            return {**tree, key: tree[other], other: tree[key]}
        return {**tree, key: mutated_tree(tree[key], random_)}
    if isinstance(tree, list) and tree and random_.random() < 0.9:
        place = random_.randrange(len(tree))
        kind = random_.randrange(12)
        if kind == 0:
            return tree[:place] + tree[place + 1 :]
        if kind == 1:
            return tree[:place] + [tree[place]] * random_.choice((2, 3, 50)) + tree[place + 1 :]
        if kind == 2:
            shuffled = list(tree)
            random_.shuffle(shuffled)
            return shuffled
        if kind == 3:
            return [*tree[: place + 1], value(random_), *tree[place + 1 :]]
        return [*tree[:place], mutated_tree(tree[place], random_), *tree[place + 1 :]]
    if isinstance(tree, (int, float)) and not isinstance(tree, bool) and random_.random() < 0.4:
        return random_.choice((tree + 1, tree - 1, -tree, tree * 2, tree * 10**9, 0.5, str(tree)[:200]))
    if isinstance(tree, str) and tree and random_.random() < 0.4:
        place = random_.randrange(len(tree))
        return random_.choice((tree[:place], tree + tree, tree[:place] + random_.choice(TEXTS) + tree[place:], [tree]))
    return value(random_)


def mutated_bytes(data: bytes, others: Sequence[bytes], random_: random.Random) -> bytes:
    """The bytes with one thing done to them."""
    kind = random_.randrange(12)
    size = len(data)
    place = random_.randrange(size + 1)
    end = min(size, place + random_.choice((1, 1, 2, 4, 8, 32, 256)))
    if kind == 0 and size:
        place = min(place, size - 1)
        return data[:place] + bytes([data[place] ^ (1 << random_.randrange(8))]) + data[place + 1 :]
    if kind == 1 and size:
        place = min(place, size - 1)
        return data[:place] + bytes([random_.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        return data[:place]
    if kind == 3:
        return data[:place] + data[end:]
    if kind == 4:
        return data[:place] + random_.randbytes(random_.choice((1, 2, 4, 8, 64))) + data[place:]
    if kind == 5:
        other = random_.choice(others)
        start = random_.randrange(len(other) + 1)
        return data[:place] + other[start:][: random_.choice((4, 64, LONGEST_INPUT))]
    if kind == 6:
        return data[:end] + data[place:end] * random_.choice((1, 2, 100)) + data[end:]
    if kind in (7, 8):  # a length that lies
        width, code = random_.choice(_WIDTHS)
        number = random_.choice(
            (0, 1, size, size + 1, size - 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 4096, 2**20)
        )
        packed = struct.pack(random_.choice("<>") + code, max(0, number) % 2 ** (8 * width))
        return data[:place] + packed + data[place + width :]
    if kind == 9:
        bit = random_.choice(TEXT_BITS)
        return data[:place] + bit * random_.choice((1, 1, 1, 3, 2000)) + data[place:]
    if kind == 10:
        return data[:place] + random_.choice(TEXT_BITS) + data[end:]
    return random_.randbytes(random_.choice((0, 1, 7, 8, 12, 40, 200)))


class Mutator:
    """Makes inputs of a kind from good ones. `finish` puts right what would hide the rest: lengths, digests."""

    def __init__(
        self, seeds: Sequence[bytes], kind: str = "bytes", finish: Callable[[bytes], bytes] | None = None
    ) -> None:
        assert seeds
        assert kind in ("bytes", "json", "msgpack")
        self.seeds, self.kind, self._finish = tuple(seeds), kind, finish
        self.trees = [_tree(seed, kind) for seed in seeds]

    def input(self, random_: random.Random) -> bytes:
        place = random_.randrange(len(self.seeds))
        data, tree = self.seeds[place], self.trees[place]
        if tree is not None and random_.random() < 0.7:
            tree = tree[0]
            with contextlib.suppress(RecursionError):
                for _ in range(random_.choice((1, 1, 1, 2, 3, 6))):
                    tree = mutated_tree(tree, random_)
            data = _written(tree, self.kind)[:LONGEST_INPUT]
            if random_.random() < 0.9:
                return self._done(data, random_)
        for _ in range(random_.choice((1, 1, 2, 3, 8))):
            data = mutated_bytes(data, self.seeds, random_)[:LONGEST_INPUT]
        return self._done(data, random_)

    def _done(self, data: bytes, random_: random.Random) -> bytes:
        return self._finish(data) if self._finish is not None and random_.random() < 0.9 else data


def _tree(seed: bytes, kind: str) -> tuple[Any] | None:
    """What a seed says, if it can be read; in a tuple, for it may say None."""
    if kind == "bytes":
        return None
    try:
        return (json.loads(seed) if kind == "json" else msgspec.msgpack.decode(seed),)
    except (ValueError, msgspec.DecodeError):
        return None


def _written(tree: Any, kind: str) -> bytes:
    if kind == "json":
        try:
            return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return b"[" * 2000
    try:
        return msgspec.msgpack.encode(tree)
    except (TypeError, ValueError, OverflowError, RecursionError):  # numbers that have no place in it
        return msgspec.msgpack.encode([str(tree)[:1000].encode("utf-8", "replace")])
