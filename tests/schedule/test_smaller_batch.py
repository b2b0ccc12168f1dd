"""The plan for a smaller batch: the same layers where they were, samples in proportion, no larger micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import chain, changed, cluster
from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import BySamples, ByTiles, Plan, Replay, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.policy import Schedule
from manyhands.schedule.smaller_batch import divided, for_smaller_batch

CHAIN = chain(4)
NAMES = [f"d{number}" for number in range(13)]
DRAWN = resolve(
    Plan("chain", 12, (Stage((0, 2), ("a", "b"), BySamples((2, 4))), Stage((2, 4), ("c",))), micro_batches=2), CHAIN
)
"""That of the drawing in the module."""


@pytest.mark.slow
@given(plans(CHAIN, kinds=("single", "samples", "tiles"), orders=("sequential", "gpipe", "1f1b")), st.data())
def test_drawn_plans_are_cut_down(plan: Plan, data: st.DataObject) -> None:
    if plan.batch_size < 2 or "phone" in plan.homes.values():
        return
    plan = resolve(plan, CHAIN, cluster(NAMES))
    samples = data.draw(st.integers(1, plan.batch_size - 1))
    homes = {home for home in plan.homes.values() if home in plan.devices}
    try:
        small = for_smaller_batch(plan, CHAIN, samples)
    except BadPlan:
        if homes:  # a stage may have too few samples for its gateway and a home
            return
        raise
    assert small.batch_size == samples
    if not homes:
        assert small.micro_batch_size <= plan.micro_batch_size
        divisors = [count for count in range(1, small.micro_batches) if samples % count == 0]
        assert all(samples // count > plan.micro_batch_size for count in divisors), "as few as there can be"
    for stage, cut in zip(plan.stages, small.stages, strict=True):
        assert cut.layers == stage.layers
        assert set(cut.devices) <= set(stage.devices)
        if isinstance(stage.share, BySamples):
            before = dict(zip(stage.devices, stage.share.samples))
            after = dict(zip(cut.devices, cut.share.sample_counts(small.micro_batch_size, len(cut.devices))))
            assert sum(after.values()) == small.micro_batch_size
            assert homes or all(after[device] <= before[device] for device in after)
            if stage.reduce == "gateway":
                assert cut.devices[0] == stage.devices[0]
        else:
            assert (cut.devices, cut.share) == (stage.devices, stage.share)
    assert set(Schedule(small, CHAIN).actions) == set(small.devices), "it can be lowered"


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_samples_are_divided_in_proportion(counts: list[int], data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, sum(counts)))
    parts = divided(samples, counts)
    assert sum(parts) == samples
    for part, count in zip(parts, counts):
        assert part <= count
        assert abs(part - samples * count / sum(counts)) < 1
    kept = data.draw(st.sets(st.sampled_from(range(len(counts))), max_size=samples))
    with_kept = divided(samples, counts, sorted(kept))
    assert sum(with_kept) == samples
    assert all(with_kept[place] for place in kept)
    assert all(0 <= part <= count for part, count in zip(with_kept, counts))


def test_the_drawing_in_the_module() -> None:
    five, two = for_smaller_batch(DRAWN, CHAIN, 5), for_smaller_batch(DRAWN, CHAIN, 2)
    assert (five.micro_batches, five.stages[0].share, five.stages[0].devices) == (1, BySamples((2, 3)), ("a", "b"))
    assert (two.micro_batches, two.stages[0].share) == (1, BySamples((1, 1)))
    assert five.stages[1] == two.stages[1] == DRAWN.stages[1]
    ten = for_smaller_batch(DRAWN, CHAIN, 10)
    assert (ten.micro_batches, ten.stages[0].share) == (2, BySamples((2, 3)))


def test_who_gets_no_sample_is_left_out() -> None:
    one = for_smaller_batch(DRAWN, CHAIN, 1)
    assert one.devices == ("b", "c")
    assert one.stages[0].share == Single()
    shares = Stage((0, 4), ("a", "b", "c"), BySamples((1, 1, 4)), reduce="gateway")
    gateway = for_smaller_batch(resolve(Plan("chain", 6, (shares,)), CHAIN), CHAIN, 2)
    assert gateway.devices == ("a", "c"), "the gateway has what steps the weights"


def test_a_home_of_inputs_stays() -> None:
    stage = Stage((0, 4), ("a", "b", "c"), BySamples((4, 1, 1)))
    plan = resolve(Plan("chain", 6, (stage,), homes={"x": "c"}), CHAIN)
    assert for_smaller_batch(plan, CHAIN, 2).devices == ("a", "c")


def test_warm_up_is_no_longer_than_there_are_micro_batches() -> None:
    stages = (Stage((0, 2), ("a",)), Stage((2, 4), ("b",)))
    plan = resolve(Plan("chain", 12, stages, micro_batches=4, warm_up=(4, 2)), CHAIN)
    assert for_smaller_batch(plan, CHAIN, 4).warm_up == (2, 2)


def test_tiles_stay_tiles() -> None:
    stages = (Stage((0, 2), ("a", "b"), ByTiles((2, 1))), Stage((2, 4), ("a",)))
    plan = resolve(Plan("chain", 6, stages), CHAIN)
    assert for_smaller_batch(plan, CHAIN, 1).stages == plan.stages


def test_batch_norm_over_single_values_is_refused_and_else_given_more_samples() -> None:
    """With statistics over as many numbers as one sample has, a micro-batch needs two samples."""
    network = changed(chain(4), 1, statistics=CHAIN.tensors["t0"].elements, tiling="")
    plan = resolve(Plan("chain", 12, (Stage((0, 4), ("a",)),), micro_batches=2), network)
    assert for_smaller_batch(plan, network, 10).micro_batches == 2
    assert for_smaller_batch(plan, network, 7).micro_batches == 1, "seven of one sample are refused"
    with pytest.raises(BadPlan, match=r"batch norm conv1 .* would see one value per channel: 1 sample"):
        for_smaller_batch(plan, network, 1)


def test_a_round_of_several_steps_is_of_one_size() -> None:
    stages = (Stage((0, 2), ("a",)), Stage((2, 4), ("b",)))
    plan = resolve(Plan("chain", 12, stages, micro_batches=3, order="replay", replay=Replay(1)), CHAIN)
    with pytest.raises(BadPlan, match="order is replay: a round has 3 steps, of one size") as refused:
        for_smaller_batch(plan, CHAIN, 3)
    assert refused.value.hint == "Use order: 1f1b."
