"""Tokens are drawn as transformers draws them: by temperature, then of the likeliest so many, then of those that are
likely enough together."""

from __future__ import annotations

import pytest
import torch

from manyhands.inference.sampling import Sampling, generator_of

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def counts(sampling: Sampling, draws: int = 400) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    drawn = [sampling.next_token(LOGITS, generator) for _ in range(draws)]
    return [drawn.count(token) for token in range(len(LOGITS))]


def test_without_a_temperature_the_likeliest_is_taken() -> None:
    generator = generator_of(0, 0)
    before = generator.get_state()
    assert Sampling().is_greedy
    assert Sampling().next_token(LOGITS, generator) == 4
    assert torch.equal(generator.get_state(), before)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_of_drawn_tokens_are_their_probabilities(temperature: float) -> None:
    draws = 1000
    expected = (LOGITS / temperature).softmax(0) * draws
    drawn = torch.tensor(counts(Sampling(temperature), draws))
    assert torch.all((drawn - expected).abs() < 5 * expected.sqrt() + 5)


def test_only_the_likeliest_so_many_are_drawn() -> None:
    drawn = counts(Sampling(1.0, top_k=2))
    assert drawn[4]
    assert drawn[0]
    assert drawn[1] == drawn[2] == drawn[3] == 0


def test_only_those_that_are_likely_enough_together_are_drawn() -> None:
    """Probabilities: 0.64, 0.23, 0.09, 0.03, 0.01."""
    assert [bool(count) for count in counts(Sampling(1.0, top_p=0.5))] == [False, False, False, False, True]
    assert [bool(count) for count in counts(Sampling(1.0, top_p=0.8))] == [True, False, False, False, True]
    assert all(counts(Sampling(1.0, top_p=1.0), 800))


def test_prompts_draw_independently_of_each_other() -> None:
    draws = [torch.rand(3, generator=generator_of(5, prompt)) for prompt in range(3)]
    assert not torch.equal(draws[0], draws[1])
    torch.manual_seed(5)
    assert torch.equal(draws[0], torch.rand(3))
    assert torch.equal(draws[1], torch.rand(3, generator=generator_of(5, 1)))
