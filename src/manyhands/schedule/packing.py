"""Boxes packed into messages: one for each pair of devices, its size on the wire, by sender and by receiver."""

from __future__ import annotations

from collections import defaultdict

from manyhands.facts.boxes import Box
from manyhands.facts.moves import Moves
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import Codec
from manyhands.schedule.actions import Action, Kind, Message, Part, Receive, Send

Packed = list[tuple[str, str, Message]]
"""Triples (source, target, the message that goes from one to the other)."""

HEADER_BYTES = 16
"""A packed box carries its range (two doubles, so that any float's is exact) beside its bits."""


def packed_bits(codec: Codec | None, dtype: str) -> int:
    """Return the bits in which a codec packs a number of a type.

    0: it is sent as it is, as whole numbers are, and all numbers at 32 bits.
    """
    if codec is None or not dtype.startswith(("float", "bfloat")):
        return 0
    return codec.bits if codec.bits < min(32, 8 * DTYPE_BYTES[dtype]) else 0


def packed_bytes(elements: int, bits: int) -> int:
    """Return the bytes that a packed box takes on the wire."""
    return -(-elements * bits // 8) + HEADER_BYTES


def packed_messages(
    network: Network, moved: Moves, kind: Kind, stage: int, codec: Codec | None = None, values: Moves | None = None
) -> Packed:
    """Return one message per pair of devices; `values`: moves of forward values that travel among gradients."""
    parts: dict[tuple[str, str], list[Part]] = defaultdict(list)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for tensor_moves, is_value in ((moved, False), (values or {}, True)):
        for tensor, move in ((tensor, move) for tensor, several in tensor_moves.items() for move in several):
            if not move.is_local and not move.box.is_empty:
                pair = (move.source, move.target)
                parts[pair].append(Part(tensor, move.box, is_value))
                sizes[pair] += _wire_bytes(network, tensor, move.box, codec)
    return [(*pair, Message(kind, stage, 0, tuple(boxes), sizes[pair])) for pair, boxes in parts.items()]


def _wire_bytes(network: Network, tensor: str, box: Box, codec: Codec | None) -> int:
    dtype = network.tensors[tensor].dtype if tensor in network.tensors else "float32"
    if bits := packed_bits(codec, dtype):
        return packed_bytes(box.volume, bits)
    return box.volume * DTYPE_BYTES[dtype]


class Mail:
    """Messages by the device that sends and the one that receives them.

    No device then looks through the messages of all others.
    """

    def __init__(self, *packed: Packed) -> None:
        self._sends: dict[str, list[Action]] = defaultdict(list)
        self._receives: dict[str, list[Action]] = defaultdict(list)
        for source, target, message in (entry for entries in packed for entry in entries):
            self._sends[source].append(Send(target, message))
            self._receives[target].append(Receive(source, message))

    @property
    def is_empty(self) -> bool:
        return not self._sends

    def sends(self, device: str) -> list[Action]:
        return self._sends.get(device, [])

    def receives(self, device: str) -> list[Action]:
        return self._receives.get(device, [])
