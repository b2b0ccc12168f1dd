"""The boxes of a stage shared by samples (ASTEROID §3): each device computes whole samples and has all weights.

Nothing is exchanged inside a pass but the statistics of batch norms; gradients are added up at the end of a round.
"""

from __future__ import annotations

from manyhands.facts.boxes import Interval
from manyhands.facts.network import Op
from manyhands.facts.plan import BySamples
from manyhands.schedule.geometry import StageGeometry


class WholeSampleGeometry(StageGeometry):
    """A stage whose devices compute whole samples; a subclass says which (`sample_intervals`)."""

    def adds_up(self, op: Op) -> bool:
        """Return whether an operator is a batch norm over the batch of all devices, as in training by default."""
        return bool(op.statistics) and self.plan.batch_norm == "synchronised" and self.plan.is_training


class SampleGeometry(WholeSampleGeometry):
    """The boxes of one stage shared by samples: runs of them, one after another."""

    def sample_intervals(self, device: str) -> tuple[Interval, ...]:
        share = self.stage.share
        assert isinstance(share, BySamples)
        place = self.devices.index(device)
        first = sum(share.samples[:place])
        return ((first, first + share.samples[place]),)
