"""The decision engine's equations against the simulator, which follows the executor's own policy action by action."""

from __future__ import annotations

from itertools import product

import pytest

from hand_made import chain, cluster, even_profile
from manyhands.facts.link import Link
from manyhands.facts.plan import Codec, Plan, Replay, ReplayMode, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.planner.split import Bound, Deployment, LinkRates, Side, memory_of, seconds_of
from manyhands.planner.split_profile import slowed, split_profile
from manyhands.simulator.simulate import simulate

SAMPLES, ROUND = 8, 24
NETWORK = chain(4, weight_elements=5000)
MEASURED = even_profile(NETWORK, ["edge", "server"], 0.002, 0.004)
PROFILE = Profile({"edge": slowed(MEASURED.of("edge"), 4), "server": MEASURED.of("server")})


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("side", ["upstream", "downstream"])
@pytest.mark.parametrize("mode", ["grouped", "window"])
@pytest.mark.parametrize("k", [0, 1, 5, None])
def test_equations_and_memory(side: Side, mode: ReplayMode, k: Bound) -> None:
    for bits, cut, rate in product((8, 32), (1, 3), (1e4, 1e6)):
        names = ("edge", "server") if side == "upstream" else ("server", "edge")
        stages = (Stage((0, cut), (names[0],)), Stage((cut, 4), (names[1],), codec=Codec(bits)))
        plan = Plan(
            "chain", SAMPLES * ROUND, stages, micro_batches=ROUND, order="replay", replay=Replay(k, mode),
            optimizer_slots=2,
        )  # fmt: skip
        devices = cluster(["edge", "server"], Link(rate, 0.01))
        seen = simulate(resolve(plan, NETWORK, devices), NETWORK, devices, PROFILE)
        known = split_profile(
            NETWORK, PROFILE.of("edge"), PROFILE.of("server"), SAMPLES, cuts=[cut], edge_side=side, optimizer_slots=2,
            step_bytes_per_second=(1e9, 1e9),
        )  # fmt: skip
        one = Deployment(cut, k, bits)
        said = seconds_of(known, LinkRates(rate, rate, 0.01), ROUND, one, drains=mode == "grouped")
        assert 0.8 * said <= seen.seconds <= 1.1 * said, (bits, cut, rate)
        peak = seen.devices["edge"].peak_bytes
        assert peak <= memory_of(known, one), (bits, cut, rate)
        assert k is None or memory_of(known, one) <= 1.5 * peak, (bits, cut, rate)
