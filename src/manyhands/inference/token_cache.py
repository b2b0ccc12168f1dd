"""A cache of keys and values as buffers of a module: one token of one prompt is a sample, and says where it belongs.

    buffer   [prompt, head, position, width]        of every layer, for its keys and for its values
    cell     prompt * length + position             the place of a token in all of them

A pass first writes the keys and values of its tokens into their cells, and then reads for each token all cells of its
prompt. A mask hides those that come later, and those that no token has been written to yet. So the tokens of one pass
may be of several prompts, or many of one, or both; a token's result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

KEYS, VALUES = "keys", "values"


@dataclass(frozen=True)
class KeyValueShape:
    """The heads of a layer's keys and values, and how wide they are."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    dtype: torch.dtype


class TokenCache(nn.Module):
    """The `cache` that a decoder is given: where its tokens stand, what they may read, and what was kept of others.

    A decoder calls `update` once in every layer, with the keys and values of the pass's tokens: (tokens, heads, 1,
    width). It returns those of all positions, (tokens, heads, length, width), for which `mask` and `bias` are meant.
    """

    positions: Tensor
    """(tokens, 1): the place of each token in its prompt, from 0."""
    mask: Tensor
    """(tokens, 1, 1, length): True where a token may read."""

    def __init__(self, shapes: Mapping[int, KeyValueShape], prompts: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.layers = tuple(shapes)
        for layer, shape in shapes.items():
            for kind, heads, width in (
                (KEYS, shape.key_heads, shape.key_width),
                (VALUES, shape.value_heads, shape.value_width),
            ):
                buffer = torch.zeros(prompts, heads, length, width, dtype=shape.dtype)
                self.register_buffer(f"{kind}_{layer}", buffer)
        self.register_buffer("places", torch.arange(length))

    @property
    def carried(self) -> tuple[str, ...]:
        """The names of the buffers that tokens are written to."""
        return tuple(f"{kind}_{layer}" for layer in self.layers for kind in (KEYS, VALUES))

    def begin(self, cells: Tensor) -> None:
        """Begin a pass with one token for each cell."""
        self._prompts = torch.div(cells, self.length, rounding_mode="floor")
        self._places = torch.remainder(cells, self.length)
        self.positions = self._places.unsqueeze(1)
        places = self.get_buffer("places")
        self.mask = places.view(1, 1, 1, -1) <= self._places.view(-1, 1, 1, 1)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return what is added to a token's scores in place of `mask`: 0 where it may read, else the least number."""
        return self.mask.logical_not().to(dtype) * torch.finfo(dtype).min

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the pass's tokens; return those of all positions of their prompts."""
        return self._written(f"{KEYS}_{layer}", keys), self._written(f"{VALUES}_{layer}", values)

    def _written(self, name: str, rows: Tensor) -> Tensor:
        buffer = self.get_buffer(name)
        torch.ops.aten.index_put_.default(buffer, [self._prompts, None, self._places], rows.squeeze(2))
        return buffer.index_select(0, self._prompts)


class ShapeNotes(nn.Module):
    """Stands for a cache in a first pass over one token: notes what each layer keeps."""

    length = 1

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, KeyValueShape] = {}
        self.repeated: set[int] = set()
        """Layers that updated the cache more than once."""

    def begin(self, cells: Tensor) -> None:
        self.positions = torch.zeros(len(cells), 1, dtype=torch.int64)
        self.mask = torch.ones(len(cells), 1, 1, 1, dtype=torch.bool)

    def bias(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.mask.shape, dtype=dtype)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.shapes:
            self.repeated.add(layer)
        self.shapes[layer] = KeyValueShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)
        return keys, values


def cells_of(prompt: int, first: int, count: int, length: int) -> Sequence[int]:
    """Return the cells of `count` tokens of a prompt, from position `first` on."""
    return range(prompt * length + first, prompt * length + first + count)
