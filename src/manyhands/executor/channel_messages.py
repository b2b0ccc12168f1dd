"""Channels as they travel between devices that share a stage by channels.

A message's part of one tensor is one piece of memory, box after box along the channels; a map's channels lie last, as
they do where packed convolutions write and read them. So a device that holds all its own channels cuts, joins and hands
them over in one copy, and reads what arrives in runs, not number by number.
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
    """Boxes of one tensor that travel as one piece of memory."""

    tensor: str
    boxes: Boxes
    dtype: torch.dtype
    shape: tuple[int, ...]
    steps: tuple[Steps, ...]
    """The steps by which the sender cuts each box out of what it holds; empty at the receiver."""

    def room(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return memory for the bundle, contiguous in the order in which it travels."""
        return torch.empty(_as_it_travels(self.shape), dtype=self.dtype, device=device)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the parts joined one after another in the order in which they travel, on the CPU."""
        memory = self.room(parts[0].device)
        torch.cat(parts, CHANNELS, out=as_tensor(memory))
        return memory if memory.is_cpu else memory.cpu()


def bundles_of(message: Message, network: Network, hulls: dict[str, Box] | None = None) -> tuple[ChannelBundle, ...]:
    """Return the bundles that a message is made of; `hulls`: what the sender holds of each tensor."""
    bundles = []
    for (tensor, _), parts in groupby(message.parts, _kind):
        boxes = tuple(part.box for part in parts)
        steps = () if hulls is None else tuple(steps_to(box, hulls[tensor]) for box in boxes)
        bundles.append(
            ChannelBundle(tensor, boxes, dtype_of(network.tensors[tensor].dtype), joined_shape(boxes), steps)
        )
    return tuple(bundles)


def _kind(part: Part) -> tuple[str, tuple[object, ...]]:
    """Return a key that is the same for parts that can lie one after another along the channels."""
    return part.tensor, tuple(interval for axis, interval in enumerate(part.box.intervals) if axis != CHANNELS)


def _as_it_travels(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[CHANNELS]) if len(shape) == 4 else shape


def as_tensor(memory: torch.Tensor) -> torch.Tensor:
    """Return what travels with its axes where they belong."""
    return memory.permute(0, 3, 1, 2) if memory.dim() == 4 else memory


def joined_shape(boxes: Boxes) -> tuple[int, ...]:
    """Return the shape of boxes that lie one after another along the channels."""
    first = boxes[0].shape
    return (*first[:CHANNELS], sum(box.shape[CHANNELS] for box in boxes), *first[CHANNELS + 1 :])


Recipe = list[tuple[int, Steps]]
"""For each piece, the number of the tensor that holds it, and the steps that cut it out there."""


def recipe_for(targets: Boxes, sources: Sequence[Boxes]) -> Recipe:
    """Return the recipe that puts boxes of a tensor together, channel by channel, from tensors each of which holds
    boxes of it one after another. A channel that several hold is taken from the first. There are as few pieces as
    possible."""
    recipe: Recipe = []
    for box in targets:
        channel, end = box.intervals[CHANNELS]
        while channel < end:
            number, place, source = _holder(channel, sources)
            low, high = source.intervals[CHANNELS]
            last = min(high, end)
            beside = steps_to(box.replace(CHANNELS, (low, high)), source)
            _append(recipe, number, place + channel - low, last - channel, beside)
            channel = last
    sizes = [sum(box.shape[CHANNELS] for box in boxes) for boxes in sources]
    return [(number, tuple(step for step in steps if step != (CHANNELS, 0, sizes[number]))) for number, steps in recipe]


def _holder(channel: int, sources: Sequence[Boxes]) -> tuple[int, int, Box]:
    """Return the number of the source that holds a channel, the place in it where the box with that channel begins, and
    that box."""
    for number, boxes in enumerate(sources):
        place = 0
        for box in boxes:
            low, high = box.intervals[CHANNELS]
            if low <= channel < high:
                return number, place, box
            place += high - low
    raise AssertionError(f"nobody has channel {channel}")


def _append(recipe: Recipe, number: int, start: int, length: int, beside: Steps) -> None:
    """Add a piece to a recipe, or make its last piece longer."""
    if recipe and recipe[-1][0] == number:
        (_, first, count), *others = recipe[-1][1]
        if tuple(others) == beside and first + count == start:
            recipe[-1] = (number, ((CHANNELS, first, count + length), *beside))
            return
    recipe.append((number, ((CHANNELS, start, length), *beside)))
