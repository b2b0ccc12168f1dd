"""Plan -> messages: everything a stage needs arrives once, gradients return the same way, bytes are counted right."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import CHANNELS, COLUMNS, MAP_BYTES, ROWS, WEIGHT_BYTES, chain
from manyhands.facts.boxes import Box
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import EVERYWHERE, BySamples, ByTiles, Codec, Plan, Stage
from manyhands.schedule.actions import Action, Backward, Forward, Message, Receive, Reduce, Send, Step
from manyhands.schedule.work import HEADER_BYTES, DeviceWork, Lowering

CHAIN = chain(4)
SKIPPING = chain(5, skips={3: 0, 4: 0})
Arrivals = dict[tuple[str, str], list[Box]]


def arrivals(lowering: Lowering, kind: str) -> dict[tuple[str, str], list[tuple[str, Box]]]:
    """(target device, tensor) -> what arrives in one micro-batch, from whom."""
    found: dict[tuple[str, str], list[tuple[str, Box]]] = defaultdict(list)
    for device, work in lowering.work.items():
        for action in (*work.forward(0), *work.backward(0, is_last=False)):
            if isinstance(action, Receive) and action.message.kind == kind:
                for one in action.message.parts:
                    found[device, one.tensor].append((action.source, one.box))
    return found


def count_of(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[box.slices()] += 1
    return count


def sent_by(work: DeviceWork) -> list[tuple[str, Message]]:
    actions = (*work.inputs(0), *work.forward(0), *work.backward(0, is_last=False))
    return [(action.to, action.message) for action in actions if isinstance(action, Send)]


@pytest.mark.parametrize("network", [CHAIN, SKIPPING], ids=["chain", "skips"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_element_a_stage_needs_arrives_once(network: Network, data: st.DataObject) -> None:
    plan: Plan = data.draw(plans(network, orders=("1f1b",)))
    lowering = Lowering(plan, network)
    values, inputs = arrivals(lowering, "value"), arrivals(lowering, "input")
    for geometry in lowering.geometries:
        reads = {name for op in network.ops[geometry.first : geometry.last] for name in op.inputs}
        for tensor in reads:
            if network.producer.get(tensor, -1) >= geometry.first:
                continue
            at_home = tensor in network.inputs and plan.homes.get(tensor, EVERYWHERE) == EVERYWHERE
            for device in geometry.devices:
                got = [box for _, box in (*values[device, tensor], *inputs[device, tensor])]
                if tensor in network.inputs and plan.homes.get(tensor) == device:
                    assert got == []
                    continue
                wanted = [] if at_home else list(geometry.entering(tensor).boxes(device))
                np.testing.assert_array_equal(
                    count_of(geometry.shape(tensor), got), count_of(geometry.shape(tensor), wanted)
                )


@settings(max_examples=60, deadline=None)
@given(plans(SKIPPING, orders=("1f1b",)))
def test_what_arrives_was_sent_by_one_who_has_it(plan: Plan) -> None:
    lowering = Lowering(plan, SKIPPING)
    for (_, tensor), found in arrivals(lowering, "value").items():
        made = SKIPPING.producer[tensor]
        producer = next(g for g in lowering.geometries if g.first <= made < g.last)
        for source, box in found:
            assert any(own.contains(box) for own in producer.owned(tensor).boxes(source))


@settings(max_examples=60, deadline=None)
@given(plans(SKIPPING, orders=("1f1b",), kinds=("single", "samples", "channels")))
def test_gradients_return_as_the_values_came(plan: Plan) -> None:
    lowering = Lowering(plan, SKIPPING)
    for there, back in (("value", "gradient"), ("halo", "halo-gradient")):
        forward = {(source, device, tensor, box) for (device, tensor), found in arrivals(lowering, there).items()
                   for source, box in found}  # fmt: skip
        backward = {(device, source, tensor, box) for (device, tensor), found in arrivals(lowering, back).items()
                    for source, box in found}  # fmt: skip
        assert backward == forward


@settings(max_examples=60, deadline=None)
@given(plans(SKIPPING, orders=("1f1b",)))
def test_bytes_are_elements_times_their_size_or_packed_bits(plan: Plan) -> None:
    lowering = Lowering(plan, SKIPPING)
    stage_of = {device: index for index, stage in enumerate(plan.stages) for device in stage.devices}
    for device, work in lowering.work.items():
        for target, message in sent_by(work):
            elements = [one.box.volume for one in message.parts]
            size = 4
            codec = Codec()
            if message.kind == "value":
                codec = plan.stages[stage_of[target]].codec
            elif message.kind == "gradient" and plan.stages[stage_of[device]].codec.gradients:
                codec = plan.stages[stage_of[device]].codec
            if codec.bits == 32:
                assert message.bytes == size * sum(elements)
            else:
                assert message.bytes == sum(-(-count * codec.bits // 8) + HEADER_BYTES for count in elements)


def test_unequal_shares_by_hand() -> None:
    """ASTEROID Fig. 10: six samples 3:3 go to a stage that takes 1:2:3, in as few messages as there are meetings."""
    lowering = Lowering(
        Plan(
            "chain",
            6,
            (
                Stage((0, 2), ("a", "b"), BySamples((3, 3))),
                Stage((2, 4), ("c", "d", "e"), BySamples((1, 2, 3)), Codec(8, gradients=False)),
            ),
        ),
        CHAIN,
    )
    element_count = CHANNELS * ROWS * COLUMNS
    sends = {(device, to): m for device in "ab" for to, m in sent_by(lowering.work[device])}
    assert {pair: str(m.parts[0]) for pair, m in sends.items()} == {
        ("a", "c"): "t1[0:1,0:4,0:8,0:6]",
        ("a", "d"): "t1[1:3,0:4,0:8,0:6]",
        ("b", "e"): "t1[3:6,0:4,0:8,0:6]",
    }
    assert [m.bytes for m in sends.values()] == [n * element_count + HEADER_BYTES for n in (1, 2, 3)]
    back = {(device, to): m for device in "cde" for to, m in sent_by(lowering.work[device])}
    assert {pair: m.bytes for pair, m in back.items()} == {
        ("c", "a"): MAP_BYTES, ("d", "a"): 2 * MAP_BYTES, ("e", "b"): 3 * MAP_BYTES,
    }  # fmt: skip


def test_a_double_is_packed_by_the_same_codec_and_a_whole_number_is_not() -> None:

    tensors = {name: msgspec.structs.replace(spec, dtype="int64") for name, spec in CHAIN.tensors.items()}
    network = msgspec.structs.replace(CHAIN, tensors=tensors)
    plan = Plan("chain", 1, (Stage((0, 2), ("a",)), Stage((2, 4), ("b",), codec=Codec(4))))
    ((_, message),) = [(to, m) for to, m in sent_by(Lowering(plan, network).work["a"]) if m.kind == "value"]
    assert message.bytes == DTYPE_BYTES["int64"] * CHANNELS * ROWS * COLUMNS
    packed = [m for _, m in sent_by(Lowering(plan, CHAIN).work["a"])]
    assert [m.bytes for m in packed] == [MAP_BYTES // 8 + HEADER_BYTES]


def test_a_skip_goes_straight_to_its_reader() -> None:
    """t0 is read by operators 1, 3 and 4: the stages of the last two get it from the first, past the stage between."""
    plan = Plan("chain", 1, (Stage((0, 1), ("a",)), Stage((1, 3), ("b",)), Stage((3, 5), ("c",))))
    sends = {(to, str(m.parts[0].tensor)) for to, m in sent_by(Lowering(plan, SKIPPING).work["a"]) if m.kind == "value"}
    assert sends == {("b", "t0"), ("c", "t0")}


def test_inputs_come_from_their_home() -> None:
    plan = Plan("chain", 2, (Stage((0, 4), ("a", "b"), BySamples((1, 1))),), homes={"x": "phone"})
    lowering = Lowering(plan, CHAIN)
    assert [(to, m.kind, m.bytes) for to, m in sent_by(lowering.work["phone"])] == [
        ("a", "input", MAP_BYTES),
        ("b", "input", MAP_BYTES),
    ]
    own = Lowering(Plan("chain", 2, plan.stages, homes={"x": "a"}), CHAIN)
    assert [(to, m.kind) for to, m in sent_by(own.work["a"])] == [("b", "input")]


def test_a_stage_with_backward_groups_returns_each_gradient_once() -> None:
    """Its devices make the entering gradient complete on what they own; the halo they received is not sent back."""
    tiles = ByTiles((1, 1), backward_groups=(2,))
    plan = Plan("chain", 1, (Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), tiles)))
    lowering = Lowering(plan, CHAIN)
    back = [m for device in "bc" for to, m in sent_by(lowering.work[device]) if to == "a"]
    assert [str(m.parts[0]) for m in back] == ["t1[0:1,0:4,0:4,0:6]", "t1[0:1,0:4,4:8,0:6]"]
    values = [m for _, m in sent_by(lowering.work["a"])]
    assert [str(m.parts[0]) for m in values] == ["t1[0:1,0:4,0:5,0:6]", "t1[0:1,0:4,3:8,0:6]"]


# The shape of a pass


def texts(actions: list[Action]) -> list[str]:
    return [str(action) for action in actions]


def test_statistics_are_added_up_before_they_are_needed() -> None:
    network = chain(3, statistics=[1])
    plan = Plan("chain", 2, (Stage((0, 3), ("a", "b"), BySamples((1, 1))),))
    work = Lowering(plan, network).work["a"]
    size = (2 * CHANNELS + 1) * 4
    assert texts(work.forward(5)) == [
        "forward s0 m5 0:1", f"reduce s0 statistics m5 1:2 a,b {size}B", "forward s0 m5 1:3",
    ]  # fmt: skip
    assert texts(work.backward(5, is_last=False)) == [
        "backward s0 m5 2:3", f"reduce s0 statistics m5b 1:2 a,b {size - 4}B", "backward s0 m5 0:2",
    ]  # fmt: skip
    local = Lowering(Plan("chain", 2, plan.stages, batch_norm="local"), network).work["a"]
    assert texts(local.forward(0)) == ["forward s0 m0 0:3"]


def test_buckets_are_reduced_as_soon_as_they_are_complete() -> None:
    stages = (Stage((0, 4), ("a", "b"), BySamples((1, 1))),)
    plan = Plan("chain", 2, stages, bucket_bytes=2 * WEIGHT_BYTES)
    work = Lowering(plan, CHAIN).work["b"]
    assert texts(work.backward(3, is_last=True)) == [
        "backward s0 m3 2:4",
        f"reduce s0 gradients 2:4 a,b {2 * WEIGHT_BYTES}B",
        "backward s0 m3 0:2",
        f"reduce s0 gradients 0:2 a,b {2 * WEIGHT_BYTES}B",
    ]
    assert texts(work.backward(3, is_last=False)) == ["backward s0 m3 0:4"]
    assert work.finish() == [Step(0)]


def test_the_stage_before_does_not_wait_for_the_last_bucket() -> None:
    stages = (Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), BySamples((1, 1))))
    work = Lowering(Plan("chain", 2, stages), CHAIN).work["b"]
    kinds = [type(action) for action in work.backward(0, is_last=True)]
    assert kinds == [Backward, Send, Reduce]


def test_frozen_weights_are_not_reduced_and_tied_ones_once() -> None:

    weights = {n: msgspec.structs.replace(w, trainable=n != "w1") for n, w in CHAIN.weights.items()}
    ops = list(CHAIN.ops)
    ops[3] = msgspec.structs.replace(ops[3], weights=("w0",))
    network = msgspec.structs.replace(CHAIN, weights=weights, ops=tuple(ops))
    stages = (Stage((0, 4), ("a", "b"), BySamples((1, 1))),)
    work = Lowering(Plan("chain", 2, stages, bucket_bytes=1), network).work["a"]
    reductions = [action for action in work.backward(0, is_last=True) if isinstance(action, Reduce)]
    assert [(r.first, r.bytes) for r in reductions] == [(2, WEIGHT_BYTES), (0, WEIGHT_BYTES)]


def test_a_gateway_collects_and_returns() -> None:
    """TILE Algorithm 1."""
    stages = (Stage((0, 4), ("a", "b", "c"), BySamples((1, 1, 1)), reduce="gateway"),)
    lowering = Lowering(Plan("chain", 3, stages), CHAIN)
    kinds = {device: [type(action) for action in lowering.work[device].finish()] for device in "abc"}
    assert kinds == {"a": [Receive, Receive, Step, Send, Send], "b": [Send, Receive], "c": [Send, Receive]}
    assert not any(isinstance(a, Reduce) for d in "abc" for a in lowering.work[d].backward(0, is_last=True))
    sent = lowering.work["b"].finish()[0]
    assert isinstance(sent, Send)
    assert sent.message.bytes == 4 * WEIGHT_BYTES


def test_a_stream_has_no_backward() -> None:
    plan = Plan("chain", 2, (Stage((0, 2), ("a",)), Stage((2, 4), ("b",))), order="stream")
    work = Lowering(plan, CHAIN).work["b"]
    assert [type(action) for action in work.forward(0)] == [Receive, Forward]
    assert work.backward(0, is_last=True) == work.finish() == []


def test_an_output_made_early_goes_to_the_stage_of_the_loss() -> None:
    """Two heads: the first stage's is sent to the last stage, and its gradient comes back."""
    two = msgspec.structs.replace(CHAIN, outputs=("t0", "t3"))
    plan = Plan("chain", 2, (Stage((0, 1), ("a",)), Stage((1, 2), ("b",)), Stage((2, 4), ("c",))))
    work = Lowering(plan, two).work
    assert {(to, part.tensor) for to, m in sent_by(work["a"]) for part in m.parts} == {("b", "t0"), ("c", "t0")}
    back = [(to, m.kind, part.tensor) for to, m in sent_by(work["c"]) for part in m.parts]
    assert ("a", "gradient", "t0") in back
    one = Lowering(plan, CHAIN).work
    assert {to for to, _ in sent_by(one["a"])} == {"b"}
