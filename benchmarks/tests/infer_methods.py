"""Methods with seconds made by hand: shared by the tests of `manyhands bench infer`."""

from __future__ import annotations

from hand_made import even_profile
from manyhands_bench.infer.lab import MeasuredMethod
from manyhands_bench.infer.networks import DecnnNetwork, Library, ProfiledNetwork
from manyhands_bench.infer.simulated import (
    ALL,
    ALONE,
    BOTH,
    COATES,
    ONE,
    TILED,
    MethodSeconds,
)

TINY = DecnnNetwork("tiny", 1.5, (1, 16, 16), paper_seconds=0.3)


SLOW = {ONE: MethodSeconds(1.0, 1.0), ALONE: MethodSeconds(0.5, 0.5)}
"""One device, which is no baseline."""


def methods(baseline: float, both: float, every: float) -> dict[str, MethodSeconds]:
    """Baselines that take `baseline` seconds, one of them a little less than the others."""
    tiled = {name: MethodSeconds(baseline + 0.1, baseline + 0.2) for name in TILED}
    return {
        **SLOW,
        **tiled,
        COATES: MethodSeconds(baseline, baseline),
        BOTH: MethodSeconds(both, both),
        ALL: MethodSeconds(2 * every, every),
    }


class HandMade(Library):
    """Networks that are captured but not measured: every layer takes a hundredth of a second."""

    def profiled(self, subject: DecnnNetwork, *, decoupled: bool) -> ProfiledNetwork:
        network = self.graph(subject, decoupled=decoupled).network
        return ProfiledNetwork(network, even_profile(network, ["one"]).of("one"))


def measured(seconds: float, predicted: float, latency: float | None = None) -> MeasuredMethod:
    inside = seconds if latency is None else latency
    return MeasuredMethod(MethodSeconds(predicted, predicted), inside, seconds + 0.01, seconds)
