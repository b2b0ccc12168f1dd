"""Bytes are counted as tensors are made and die."""

from __future__ import annotations

import torch

from manyhands.graph.peak_bytes import PeakBytes


def test_the_peak_is_what_lives_at_once() -> None:
    held = torch.ones(100)
    peak = PeakBytes([held, held.view(10, 10)])
    with peak:
        a = held * 2
        b = a.view(4, 25) + 1
        del a
        c = b * 3
        del b, c
    assert peak.most_bytes == 3 * 400
    assert peak.bytes == 400


def test_tensors_saved_for_backward_count_until_they_are_used() -> None:
    x = torch.ones(1000, requires_grad=True)
    peak = PeakBytes([x])
    with peak:
        y = x.exp().exp().exp()
        after_forward = peak.bytes
        y.sum().backward()
        del y
    assert after_forward == 4 * 4000
    assert peak.bytes == 2 * 4000  # x and its gradient
