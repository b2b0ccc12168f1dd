"""Algorithm 1 of ASTEROID gives valid shares, and no single move improves them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands_bench.pipeline.offloading import offloaded


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    st.integers(1, 24),
    st.integers(1, 4),
    st.floats(0.5, 1.0),
    st.data(),
)
def test_algorithm_1_is_valid_and_near_the_best(
    speeds: list[float], batch: int, block: int, power: float, data: st.DataObject
) -> None:
    """Its shares add up and stay within memory; moving one sample at a time, no single move would help."""
    caps = [data.draw(st.integers(1, batch)) for _ in speeds]

    def seconds_of(speed: float) -> Callable[[int], float]:
        return lambda samples: samples**power / speed

    times = [seconds_of(speed) for speed in speeds]
    shares = offloaded(times, caps, batch, block)
    if sum(caps) < batch or len(caps) > batch:
        assert shares is None
        return
    assert shares is not None
    assert sum(shares) == batch
    assert all(1 <= share <= cap for share, cap in zip(shares, caps))
    if block == 1:
        taken = [own(share) for own, share in zip(times, shares)]
        slowest = max(range(len(shares)), key=taken.__getitem__)
        room = [d for d in range(len(shares)) if d != slowest and shares[d] < caps[d]]
        if room and shares[slowest] > 1:
            fastest = min(room, key=taken.__getitem__)
            moved = max(times[fastest](shares[fastest] + 1), times[slowest](shares[slowest] - 1))
            others = [taken[d] for d in range(len(shares)) if d not in (fastest, slowest)]
            assert max([moved, *others]) >= taken[slowest] - 1e-12
