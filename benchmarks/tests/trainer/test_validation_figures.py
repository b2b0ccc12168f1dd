"""The figures of validation: exact, and without a trace in the weights."""

from __future__ import annotations

import pytest

from manyhands_bench.trainer.validation import BATCH as BATCH_SIZE
from manyhands_bench.trainer.validation import EVERY, SAMPLES, validation_figures


@pytest.mark.slow
def test_validation_is_exact_and_leaves_no_trace() -> None:
    figures = validation_figures()
    assert figures.validations == 2 * SAMPLES // BATCH_SIZE // EVERY
    assert figures.largest_difference <= 1e-10
    assert figures.weights_are_equal
    assert figures.seconds > 0
