"""Features and gradients between stages in n bits: uniform quantisation (SPLIT Eq. 2) and its error feedback (Alg. 1).

A packed box is `HEADER_BYTES` of range (its least and its greatest number, as little-endian doubles), then one code of
n bits for each number. Fewer than eight bits lie in planes: with four, the first half of the numbers is in the low
halves of the bytes and the second half in the high ones, so that nothing is shuffled on either side.

    code = round((h - least) / step), half to even           step = (greatest - least) / (2^n - 1)
    C(h) = min(least + code * step, greatest)                in float32; doubles in float64

Both sides compute C(h) by the same single operations, so the sender knows to the bit what the receiver has.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from manyhands.executor.boxes import dtype_of, place_of
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.schedule.actions import Action, Message, Part, Receive
from manyhands.schedule.packing import HEADER_BYTES, packed_bits, packed_bytes

CHUNK = 65_536
"""Numbers that a CPU packs at once: the memory it works in stays in the cache, whatever the size of the box."""
_RANGE = struct.Struct("<dd")
assert _RANGE.size == HEADER_BYTES


class NoRange(ValueError):
    """The error of a box with a number that is not finite: no range holds it, and no code stands for it."""


@dataclass(frozen=True)
class Levels:
    """The 2^n numbers that codes stand for, as both sides compute them."""

    least: float
    greatest: float
    step: float
    scale: float
    """A power of two by which numbers are multiplied on the way: 1, unless the range ends near the limits of the
    type."""

    @classmethod
    def between(cls, least: float, greatest: float, bits: int, working: torch.dtype) -> Levels:
        limits, scale = torch.finfo(working), 1.0
        if max(abs(least), abs(greatest)) > limits.max / 4:  # greatest - least would be infinite
            scale = 0.125
        elif 0 < greatest - least < limits.tiny * 2.0**40:  # a step would be nothing
            scale = 2.0**100
        low, high = least * scale, greatest * scale
        return cls(low, high, (high - low) / (2**bits - 1), scale)

    def to_codes(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """Write the codes of numbers into `into`, as whole numbers of the working type."""
        if self.scale != 1:
            numbers = numbers * self.scale
        torch.sub(numbers, self.least, out=into)
        into.mul_(1 / self.step if self.step else 0.0).round_()

    def to_numbers(self, codes: torch.Tensor) -> None:
        """Turn codes back into numbers, in place. Two single operations: one that rounds once would differ from device
        to device."""
        codes.mul_(self.step).add_(self.least).clamp_(max=self.greatest)
        if self.scale != 1:
            codes.div_(self.scale)


def range_of(data: torch.Tensor) -> tuple[float, float]:
    """Return the least and the greatest number of a box; zeros for an empty one."""
    if not data.numel():
        return 0.0, 0.0
    least, greatest = (float(end) for end in torch.aminmax(data))
    if not (math.isfinite(least) and math.isfinite(greatest)):
        raise NoRange(f"its range is {least} to {greatest}")
    return least, greatest


def pack(data: torch.Tensor, bits: int, error: torch.Tensor | None = None) -> torch.Tensor:
    """Return a box as bytes. `error`, of its shape and type, is filled with the receiver's excess: C(h) - h."""
    flat = data.detach().reshape(-1)
    packed = torch.empty(packed_bytes(len(flat), bits), dtype=torch.uint8)
    least, greatest = range_of(flat)
    packed[:HEADER_BYTES] = torch.frombuffer(bytearray(_RANGE.pack(least, greatest)), dtype=torch.uint8)
    body, working = _body(packed, bits), _working(data.dtype)
    levels = Levels.between(least, greatest, bits, working)
    room = torch.empty(min(CHUNK, len(flat)), dtype=working)
    whole = torch.empty(len(room), dtype=torch.int32)
    for shift, inside, place in _chunks(len(flat), bits, CHUNK):
        numbers = flat[place].to(working)
        codes, integers = room[: len(numbers)], whole[: len(numbers)]
        levels.to_codes(numbers, codes)
        if shift:
            body[inside].bitwise_or_(integers.copy_(codes).bitwise_left_shift_(shift).to(torch.uint8))
        else:
            body[inside].copy_(integers.copy_(codes) if bits <= 8 else codes)  # by way of int32: twice as fast
        if error is not None:
            levels.to_numbers(codes)
            torch.sub(codes.to(data.dtype).to(working), numbers, out=codes)
            error.view(-1)[place].copy_(codes)
    return packed


def unpack(packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, bits: int, device: str) -> torch.Tensor:
    """Return the box that `pack` made these bytes of, on a device: the bytes travel there, not the numbers."""
    least, greatest = _RANGE.unpack(packed[:HEADER_BYTES].numpy().tobytes())
    working = _working(dtype)
    most = torch.finfo(working).max
    if not (-most <= least <= greatest <= most):
        raise BadValue(f"A packed box says that it lies between {least} and {greatest}.")
    body = _body(packed.to(device), bits)
    levels = Levels.between(least, greatest, bits, working)
    flat = torch.empty(math.prod(shape), dtype=dtype, device=device)
    size = CHUNK if flat.device.type == "cpu" else max(1, len(flat))
    room = torch.empty(min(size, len(flat)), dtype=working, device=device) if dtype != working else None
    for shift, inside, place in _chunks(len(flat), bits, size):
        codes = body[inside]
        if bits < 8:
            codes = codes.bitwise_right_shift(shift).bitwise_and_(2**bits - 1)
        numbers = flat[place] if room is None else room[: len(codes)]
        levels.to_numbers(numbers.copy_(codes))
        if room is not None:
            flat[place].copy_(numbers)
    return flat.view(shape)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _body(packed: torch.Tensor, bits: int) -> torch.Tensor:
    body = packed[HEADER_BYTES:]
    return body.view(torch.uint16) if bits == 16 else body


def _chunks(count: int, bits: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each chunk how far its codes are shifted, where they are in the bytes, and the numbers; planes one
    after another."""
    planes = max(1, 8 // bits)
    width = -(-count // planes)
    for plane in range(planes):
        first, last = plane * width, min((plane + 1) * width, count)
        for start in range(first, last, size):
            end = min(start + size, last)
            yield plane * bits, slice(start - first, end - first), slice(start, end)


class Coding:
    """The packed form of one device's messages, and the errors of its features until their gradients are back."""

    def __init__(self, plan: Plan, network: Network, actions: Iterable[Action]) -> None:
        self.plan, self.network = plan, network
        self._errors: dict[tuple[int, int, str, str], list[tuple[Box, torch.Tensor]]] = {}
        """(stage that reads it, micro-batch, device, tensor) -> boxes that went there, with their errors."""
        self._returning = {
            (action.message.stage, action.source, part.tensor)
            for action in actions
            if isinstance(action, Receive) and action.message.kind == "gradient"
            for part in action.message.parts
        }

    @property
    def expects_gradients(self) -> bool:
        """Whether gradients of what this device sends come back to it."""
        return bool(self._returning)

    @property
    def error_bytes(self) -> int:
        """Bytes of errors that are kept now."""
        return sum(error.nbytes for errors in self._errors.values() for _, error in errors)

    def bits(self, message: Message, part: Part) -> int:
        """Return the number of bits in which a number of a message travels; 0: as it is."""
        if message.kind not in ("value", "gradient"):
            return 0
        codec = self.plan.stages[message.stage].codec
        if message.kind == "gradient" and not codec.gradients:
            return 0
        return packed_bits(codec, self.network.tensors[part.tensor].dtype)

    def packed(self, to: str, message: Message, part: Part, data: torch.Tensor) -> torch.Tensor:
        """Return a box as it travels. A feature's error is kept where its gradient will come back."""
        bits = self.bits(message, part)
        if not bits:
            return data
        feeds_back = self.plan.stages[message.stage].codec.error_feedback
        if message.kind != "value" or not feeds_back or (message.stage, to, part.tensor) not in self._returning:
            return pack(data, bits)
        error = torch.empty_like(data, memory_format=torch.contiguous_format)
        made = pack(data, bits, error)
        key = (message.stage, message.micro_batch, to, part.tensor)
        self._errors.setdefault(key, []).append((part.box, error))
        return made

    def room(self, message: Message, part: Part) -> torch.Tensor | None:
        """Return memory for a packed box as it arrives, on the CPU; None: it is not packed."""
        bits = self.bits(message, part)
        return torch.empty(packed_bytes(part.box.volume, bits), dtype=torch.uint8) if bits else None

    def unpacked(self, message: Message, part: Part, arrived: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a box that has arrived, on the device that computes."""
        bits = self.bits(message, part)
        if not bits:
            return arrived.to(device)
        return unpack(arrived, part.box.shape, dtype_of(self.network.tensors[part.tensor].dtype), bits, str(device))

    @torch.no_grad()
    def feed_back(self, source: str, message: Message, part: Part, gradient: torch.Tensor) -> None:
        """Turn the gradient at C(h) into that at h, in place (Alg. 1, line 5): subtract error x gradient x gradient."""
        for box, error in self._errors.get((message.stage, message.micro_batch, source, part.tensor), ()):
            common = box.intersect(part.box)
            if not common.is_empty:
                piece = gradient[place_of(common, part.box)]
                precise = piece.to(_working(piece.dtype))
                change = error[place_of(common, box)].to(precise) * precise
                piece.copy_(precise - change.mul_(precise))

    def came_back(self, source: str, message: Message) -> None:
        """Forget the errors of a message whose gradients have all come back."""
        for part in message.parts:
            self._errors.pop((message.stage, message.micro_batch, source, part.tensor), None)

    def forget(self) -> None:
        self._errors.clear()
