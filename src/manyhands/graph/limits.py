"""Limits on the size of everything in a graph from outside, and checks of them before memory is allocated."""

from __future__ import annotations

from typing import NoReturn

from manyhands.facts.errors import BadGraph
from manyhands.facts.network import DTYPE_BYTES, TensorSpec, WeightSpec
from manyhands.graph import ops

LARGEST_NODES = 20_000
LARGEST_WEIGHTS = 100_000
LARGEST_RANK = 12
LARGEST_ELEMENTS = 2**34
LARGEST_WEIGHT_BYTES = 2**38
LARGEST_TEXT = 1024
LARGEST_INTEGER = 2**40
LARGEST_LIST = 4096
"""The most items in one node's arguments, outputs of one node, or leaves of an input or output tree."""
DEEPEST_NESTING = 8

_INT64 = 2**63


def refuse(place: str, problem: str) -> NoReturn:
    raise BadGraph(f"The graph is refused: {place}: {problem}.")


def check_integer(number: int, target: str, place: str) -> None:
    """Refuse an integer that is too large; the ends of int64 stand for 'to the end' in a slice, and are values
    elsewhere."""
    is_end = number in (_INT64 - 1, -_INT64) and (target in ops.POINTWISE or target == "aten.slice.Tensor")
    if abs(number) > LARGEST_INTEGER and not is_end:
        refuse(place, f"integer {str(number)[:40]} is larger than {LARGEST_INTEGER}")


def check_tensor(spec: TensorSpec | WeightSpec, place: str) -> None:
    if spec.dtype not in DTYPE_BYTES:
        refuse(place, f"dtype {spec.dtype!r:.80} is none of {', '.join(DTYPE_BYTES)}")
    if len(spec.shape) > LARGEST_RANK:
        refuse(place, f"{len(spec.shape)} axes; at most {LARGEST_RANK} are taken")
    if any(not 0 <= extent <= LARGEST_ELEMENTS for extent in spec.shape) or spec.elements > LARGEST_ELEMENTS:
        refuse(place, f"shape {spec.shape!r:.160}; at most {LARGEST_ELEMENTS} elements are taken")


def check_count(count: int, limit: int, place: str) -> None:
    if count > limit:
        refuse(place, f"{count}; at most {limit} are taken")


def check_name(text: str, place: str) -> None:
    check_text(text, place)
    if not text or text.startswith("weight "):  # 'weight NAME' is how pieces call a weight's place
        refuse(place, f"{text!r} is no name")


def check_text(text: str, place: str) -> None:
    if len(text) > LARGEST_TEXT or not text.isprintable():
        refuse(place, f"text {text!r:.60} of {len(text)} characters; at most {LARGEST_TEXT} printable ones are taken")
