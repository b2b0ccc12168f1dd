"""Channels as they travel between devices that share a stage by channels.

What a message has of one tensor is one piece of memory, box after box along the channels; a map's channels lie last,
as they do where packed convolutions make and read them. So a device with all its own channels at hand cuts, joins and
hands over in one copy, and reads what comes in runs, not number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from manyhands.executor.boxes import Steps, dtype_of, steps_to
from manyhands.facts.boxes import Box
from manyhands.facts.network import Network
from manyhands.schedule.actions import Message, Part
from manyhands.schedule.channels import CHANNELS, Boxes


@dataclass(frozen=True)
class ChannelBundle:
    """Boxes of one tensor that travel as one."""

    tensor: str
    boxes: Boxes
    dtype: torch.dtype
    shape: tuple[int, ...]
    steps: tuple[Steps, ...]
    """How the sender cuts each box out of what it holds; nothing at the receiver's."""

    def room(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory for it, contiguous as it travels."""
        return torch.empty(_as_it_travels(self.shape), dtype=self.dtype, device=device)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Parts, one after another, as they travel: on the CPU."""
        memory = self.room(parts[0].device)
        torch.cat(parts, CHANNELS, out=as_tensor(memory))
        return memory if memory.is_cpu else memory.cpu()


def bundles_of(message: Message, network: Network, hulls: dict[str, Box] | None = None) -> tuple[ChannelBundle, ...]:
    """What a message is made of; `hulls`: what the sender holds of each tensor."""
    found = []
    for (tensor, _), own in groupby(message.parts, _kind):
        boxes = tuple(part.box for part in own)
        steps = () if hulls is None else tuple(steps_to(box, hulls[tensor]) for box in boxes)
        found.append(ChannelBundle(tensor, boxes, dtype_of(network.tensors[tensor].dtype), joined_shape(boxes), steps))
    return tuple(found)


def _kind(part: Part) -> tuple[str, tuple[object, ...]]:
    """Parts that can lie one after another along the channels."""
    return part.tensor, tuple(one for axis, one in enumerate(part.box.intervals) if axis != CHANNELS)


def _as_it_travels(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[CHANNELS]) if len(shape) == 4 else shape


def as_tensor(memory: torch.Tensor) -> torch.Tensor:
    """What travels, with its axes where they belong."""
    return memory.permute(0, 3, 1, 2) if memory.dim() == 4 else memory


def joined_shape(boxes: Boxes) -> tuple[int, ...]:
    """The shape of boxes that lie one after another along the channels."""
    first = boxes[0].shape
    return (*first[:CHANNELS], sum(box.shape[CHANNELS] for box in boxes), *first[CHANNELS + 1 :])


Recipe = list[tuple[int, Steps]]
"""In which of several tensors each piece is, and how it is cut out there."""


def recipe_for(wanted: Boxes, sources: Sequence[Boxes]) -> Recipe:
    """How boxes of a tensor are put together, channel by channel, of tensors each of which holds boxes of it one after
    another; where several hold a channel, of the first. As few pieces as possible."""
    found: Recipe = []
    for box in wanted:
        channel, end = box.intervals[CHANNELS]
        while channel < end:
            number, place, source = _holder(channel, sources)
            low, high = source.intervals[CHANNELS]
            last = min(high, end)
            beside = steps_to(box.replace(CHANNELS, (low, high)), source)
            _append(found, number, place + channel - low, last - channel, beside)
            channel = last
    sizes = [sum(box.shape[CHANNELS] for box in boxes) for boxes in sources]
    return [(number, tuple(step for step in steps if step != (CHANNELS, 0, sizes[number]))) for number, steps in found]


def _holder(channel: int, sources: Sequence[Boxes]) -> tuple[int, int, Box]:
    """Which source holds a channel, where in it the box begins that does, and that box."""
    for number, boxes in enumerate(sources):
        place = 0
        for box in boxes:
            low, high = box.intervals[CHANNELS]
            if low <= channel < high:
                return number, place, box
            place += high - low
    raise AssertionError(f"nobody has channel {channel}")


def _append(found: Recipe, number: int, start: int, length: int, beside: Steps) -> None:
    """A piece more, or the last one longer."""
    if found and found[-1][0] == number:
        (_, first, count), *others = found[-1][1]
        if tuple(others) == beside and first + count == start:
            found[-1] = (number, ((CHANNELS, first, count + length), *beside))
            return
    found.append((number, ((CHANNELS, start, length), *beside)))
