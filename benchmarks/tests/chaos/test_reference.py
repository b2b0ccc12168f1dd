"""Plain PyTorch on one device, which weights are compared with."""

from __future__ import annotations

import pytest
import torch

from manyhands_bench.chaos.reference import Reference


def test_the_reference_goes_on_from_what_it_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands_bench.chaos.reference.STEPS_BETWEEN_KEPT", 2)
    far, kept = Reference(2), Reference(2)
    wanted = far.weights(5)
    kept.weights(3)
    assert kept.differs(wanted, 5) == 0.0
    assert kept.differs(wanted, 4) > 1e-6  # a round more or less shows
    assert Reference(1).differs(wanted, 5) > 1e-6  # and so does another way to take statistics


def test_weights_that_are_missing_or_no_numbers_differ_without_bound() -> None:
    reference = Reference(1)
    good = {name: tensor.clone() for name, tensor in reference.weights(0).items()}
    assert reference.differs(good, 0) == 0.0
    first = next(iter(good))
    assert reference.differs({**good, first: torch.full_like(good[first], float("nan"))}, 0) == float("inf")
    del good[first]
    assert reference.differs(good, 0) == float("inf")
