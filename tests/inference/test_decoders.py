"""A decoder with a cache returns for every token what it returns for the whole text without one; else it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.inference.decoders import TokenStep, token_step
from manyhands.inference.token_cache import TokenCache, cells_of
from tiny_decoder import LAYERS, TinyDecoder

LENGTH = 8


@pytest.fixture
def decoder() -> TinyDecoder:
    return TinyDecoder().double()


def column(values: Any) -> Tensor:
    return torch.as_tensor(list(values)).unsqueeze(1)


@torch.no_grad()
def test_tokens_one_by_one_or_many_at_once_of_several_prompts(decoder: TinyDecoder) -> None:
    step = token_step(decoder, 3, LENGTH, None)
    texts = torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(1))
    expected = decoder(texts)
    one_by_one = [step(texts[0, place : place + 1, None], column([place + 2 * LENGTH])) for place in range(6)]
    torch.testing.assert_close(torch.cat(one_by_one), expected[0], rtol=1e-12, atol=1e-12)
    mixed = step(column([*texts[0, :4], *texts[1]]), column([*cells_of(0, 0, 4, LENGTH), *cells_of(1, 0, 6, LENGTH)]))
    torch.testing.assert_close(mixed, torch.cat([expected[0, :4], expected[1]]), rtol=1e-12, atol=1e-12)
    rest = step(column(texts[0, 4:]), column(cells_of(0, 4, 2, LENGTH)))
    torch.testing.assert_close(rest, expected[0, 4:], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_what_an_earlier_text_left_in_the_cells_is_not_read(decoder: TinyDecoder) -> None:
    step = token_step(decoder, 1, LENGTH, None)
    step(column(range(LENGTH)), column(range(LENGTH)))
    text = torch.tensor([[5, 6, 7]])
    again = step(text.mT, column(range(3)))
    torch.testing.assert_close(again, decoder(text)[0], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_the_best_numbers_alone(decoder: TinyDecoder) -> None:
    everything = token_step(decoder, 1, LENGTH, None)(column([3]), column([0]))
    assert torch.equal(token_step(decoder, 1, LENGTH, 0)(column([3]), column([0])), everything.argmax(-1))
    values, places = token_step(decoder, 1, LENGTH, 4)(column([3]), column([0]))
    assert torch.equal(values, everything.topk(4).values)
    assert torch.equal(everything.gather(1, places), values)


def test_a_cache_has_a_buffer_for_the_keys_and_values_of_each_layer(decoder: TinyDecoder) -> None:
    step = token_step(decoder.train(), 2, LENGTH, None)
    assert isinstance(step, TokenStep)
    assert isinstance(step.cache, TokenCache)
    assert step.vocabulary == 29
    assert len(step.cache.carried) == 2 * LAYERS
    assert {tuple(step.cache.get_buffer(name).shape) for name in step.cache.carried} == {(2, 2, LENGTH, 8)}
    assert not any(step.cache.get_buffer(name).any() for name in step.cache.carried)
    assert decoder.training


class WithoutPositions(TinyDecoder):
    """Every token stands at the first place, but only where there is a cache."""

    def forward(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.positions = torch.zeros_like(cache.positions)
        return super().forward(input_ids, cache)


class TwiceInALayer(TinyDecoder):
    def forward(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        for layer in self.layers:
            layer.number = 0
        return super().forward(input_ids, cache)


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 4)

    def forward(self, input_ids: Tensor, cache: Any) -> Tensor:
        words: Tensor = self.words(input_ids)
        return words


def test_a_decoder_that_differs_with_its_cache_is_refused() -> None:
    with pytest.raises(CaptureFailed, match="other numbers with a cache"):
        token_step(WithoutPositions().double(), 1, LENGTH, None)


def test_a_decoder_that_keeps_nothing_or_too_much_is_refused() -> None:
    with pytest.raises(BadValue, match="updates no cache"):
        token_step(Forgetful(), 1, LENGTH, None)
    with pytest.raises(BadValue, match="more than once in layer 0"):
        token_step(TwiceInALayer(), 1, LENGTH, None)
    with pytest.raises(BadValue, match="takes no cache: its forward has input"):
        token_step(nn.Linear(2, 2), 1, LENGTH, None)
