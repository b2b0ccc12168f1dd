"""What a notebook shows of a job; training/test_notebook.py runs a real kernel."""

from __future__ import annotations

import sys

from manyhands.job.notebook import in_notebook, shown_in_notebook
from manyhands.training.config import TrainConfig


def test_outside_of_a_notebook_nothing_changes() -> None:
    assert not in_notebook()
    config = TrainConfig(batch_size=4)
    assert shown_in_notebook(config) is config
    assert "IPython" not in sys.modules or not in_notebook()
