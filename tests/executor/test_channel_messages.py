"""Channels as they travel: what is cut, joined and put together again is what was held, whatever lies where."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import chain
from manyhands.executor.boxes import Steps, narrowed
from manyhands.executor.channel_messages import as_tensor, bundles_of, joined_shape, recipe_for
from manyhands.facts.boxes import Box, cut_points
from manyhands.facts.network import Network, TensorSpec
from manyhands.schedule.actions import Message, Part
from manyhands.schedule.channels import CHANNELS


def network_with(shape: tuple[int, ...]) -> Network:
    spec = TensorSpec("x", shape, "float64", 0)
    found = chain(1)
    return msgspec.structs.replace(found, tensors={**found.tensors, "x": spec})


@st.composite
def shared(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[Box]], list[Box], bool]:
    """A tensor; of its channels who holds which, some twice; and what is wanted of it, in any order."""
    channels = draw(st.integers(2, 12))
    shape = (draw(st.integers(1, 2)), channels, *draw(st.sampled_from([(), (3,), (4, 3)])))
    whole = Box.whole(shape)
    devices = draw(st.integers(1, min(3, channels)))
    points = cut_points(channels, (1,) * devices)
    held = [[whole.replace(CHANNELS, (points[n], points[n + 1]))] for n in range(devices)]
    some = draw(st.lists(st.tuples(st.integers(0, channels - 1), st.integers(1, channels)), max_size=3))
    held.append([whole.replace(CHANNELS, (a, min(a + b, channels))) for a, b in some] or held[0])
    wanted = draw(st.lists(st.tuples(st.integers(0, channels - 1), st.integers(1, channels)), min_size=1, max_size=4))
    boxes = [whole.replace(CHANNELS, (a, min(a + b, channels))) for a, b in wanted]
    if len(shape) == 4 and draw(st.booleans()):  # a window's stride may leave out the last row
        boxes = [box.replace(2, (0, 3)) for box in boxes]
    return torch.randn(shape, dtype=torch.float64), held, boxes, draw(st.booleans())


def cut(tensor: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    return torch.cat([tensor[box.slices()] for box in boxes], CHANNELS)


@settings(max_examples=60)
@given(given_=shared())
def test_a_recipe_puts_together_what_was_held(given_: tuple[torch.Tensor, list[list[Box]], list[Box], bool]) -> None:
    tensor, held, wanted, _ = given_
    sources = [cut(tensor, boxes) for boxes in held]
    recipe = recipe_for(tuple(wanted), [tuple(boxes) for boxes in held])
    made = torch.cat([narrowed(sources[number], steps) for number, steps in recipe], CHANNELS)
    assert torch.equal(made, cut(tensor, wanted))
    assert tuple(made.shape) == joined_shape(tuple(wanted))
    for (one, before), (other, after) in pairwise(recipe):  # what lies side by side is one piece
        (_, end), beside = span(before, sources[one])
        (begin, _), also_beside = span(after, sources[other])
        assert one != other or beside != also_beside or end != begin


def span(steps: Steps, source: torch.Tensor) -> tuple[tuple[int, int], Steps]:
    """Which channels of a source are taken, and what is cut off beside them."""
    whole = (CHANNELS, 0, source.shape[CHANNELS])
    _, start, length = next((step for step in steps if step[0] == CHANNELS), whole)
    return (start, start + length), tuple(step for step in steps if step[0] != CHANNELS)


@settings(max_examples=60)
@given(given_=shared())
def test_what_travels_is_what_was_asked_for(given_: tuple[torch.Tensor, list[list[Box]], list[Box], bool]) -> None:
    tensor, _, boxes, is_channels_last = given_
    if is_channels_last and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    parts = tuple(Part("x", box) for box in boxes)
    message = Message("halo", 0, 0, parts, 8 * sum(box.volume for box in boxes))
    network = network_with(tuple(tensor.shape))
    (sent,) = bundles_of(message, network, {"x": Box.whole(tuple(tensor.shape))})
    (came,) = bundles_of(message, network)
    memory = sent.joined([narrowed(tensor, steps) for steps in sent.steps])
    assert memory.is_contiguous()
    assert memory.nbytes == message.bytes  # the plan's
    room = came.room()
    assert room.shape == memory.shape
    assert room.dtype == memory.dtype
    assert torch.equal(as_tensor(room.copy_(memory)), cut(tensor, boxes))
    assert came.boxes == tuple(boxes)


def test_boxes_that_differ_beside_their_channels_travel_apart() -> None:
    high, low = Box(((0, 1), (0, 2), (0, 4), (0, 4))), Box(((0, 1), (2, 4), (0, 3), (0, 4)))
    message = Message("halo", 0, 0, (Part("x", high), Part("x", low), Part("x", low)), 8 * (32 + 48))
    found = bundles_of(message, network_with((1, 8, 4, 4)))
    assert [one.boxes for one in found] == [(high,), (low, low)]
    assert sum(one.room().nbytes for one in found) == message.bytes
