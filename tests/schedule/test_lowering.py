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
from manyhands.facts.plan import EVERYWHERE, BySamples, ByTiles, Codec, Order, Plan, Replay, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Action, Backward, Forward, Loss, Message, Receive, Reduce, Send, Step
from manyhands.schedule.checker import check
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.packing import HEADER_BYTES
from manyhands.schedule.policy import Schedule

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


@pytest.mark.quick(every=2)
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        "forward s0 m5 0:1", f"reduce s0 statistics m5 1:2 a,b {size}B", "forward s0 m5 1:3", "loss s0 m5",
    ]  # fmt: skip
    assert texts(work.backward(5, is_last=False)) == [
        "backward s0 m5 2:3", f"reduce s0 statistics m5b 1:2 a,b {size - 4}B", "backward s0 m5 0:2",
    ]  # fmt: skip
    local = Lowering(Plan("chain", 2, plan.stages, batch_norm="local"), network).work["a"]
    assert texts(local.forward(0)) == ["forward s0 m0 0:3", "loss s0 m0"]


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


def test_the_norm_is_formed_after_all_sums_and_before_every_step() -> None:
    stages = (
        Stage((0, 2), ("a", "b"), BySamples((1, 1)), reduce="gateway"),
        Stage((2, 4), ("c", "b"), BySamples((1, 1))),
    )
    lowering = Lowering(Plan("chain", 2, stages, order="gpipe", gradient_norm=True), CHAIN)
    norm = "reduce s0 norm 0:4 a,c,b 16B"
    updated = f"{WEIGHT_BYTES * 2}B"
    assert [text.split(" weight")[0] for text in texts(lowering.work["a"].finish())] == [
        "receive b s0 m0", norm, "step s0", "send b s0 m0",
    ]  # fmt: skip
    assert [text.split(" weight")[0] for text in texts(lowering.work["b"].finish())] == [
        "send a s0 m0", norm, "step s1", "receive a s0 m0",
    ]  # fmt: skip
    assert texts(lowering.work["c"].finish()) == [norm, "step s1"]
    assert updated in texts(lowering.work["a"].finish())[-1]
    assert lowering.norm is not None
    assert lowering.norm.parts == {"a": ("w0", "w1"), "c": ("w2",), "b": ("w3",)}, "each weight once, in turn"


def test_the_norm_is_that_of_each_micro_batch_where_each_is_stepped() -> None:
    stages = (Stage((0, 2), ("a",)), Stage((2, 4), ("b",)))
    plan = Plan("chain", 6, stages, micro_batches=3, order="replay", replay=Replay(0), gradient_norm=True)
    assert texts(Lowering(plan, CHAIN).work["a"].steps(2)) == ["reduce s0 norm m2 0:4 a,b 16B", "step s0 m2"]


def test_the_last_bucket_of_tiles_is_small() -> None:
    """All wait for it with nothing to compute. Of samples it is not: there every bucket is a cut."""
    large = msgspec.structs.replace(CHAIN.weights["w1"], shape=(64, 64))
    network = msgspec.structs.replace(CHAIN, weights={n: w if n == "w0" else large for n, w in CHAIN.weights.items()})
    size, small = large.bytes, CHAIN.weights["w0"].bytes

    def buckets(share: ByTiles | BySamples, bucket_bytes: int) -> list[tuple[int, int]]:
        plan = Plan("chain", 2, (Stage((0, 4), ("a", "b"), share),), bucket_bytes=bucket_bytes)
        actions = Lowering(plan, network).work["a"].backward(0, is_last=True)
        return [(one.first, one.bytes) for one in actions if isinstance(one, Reduce) and one.what == "gradients"]

    assert small <= 2 * size // 16
    assert buckets(ByTiles((1, 1)), 2 * size) == [(2, 2 * size), (1, size), (0, small)]
    assert buckets(BySamples((1, 1)), 2 * size) == [(2, 2 * size), (0, size + small)]
    assert buckets(ByTiles((1, 1)), 4 * size) == [(0, 3 * size + small)]  # all in one, as asked for
    assert buckets(ByTiles((1, 1)), 15 * small) == [(3, size), (2, size), (1, size), (0, small)]


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


# The loss


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "sequential"])
def test_the_loss_comes_after_the_last_stages_forward(order: Order) -> None:
    stages = (Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), BySamples((1, 1))))
    work = Lowering(Plan("chain", 2, stages, order=order), CHAIN).work
    assert not any(isinstance(action, Loss) for action in work["a"].forward(0))
    for device in "bc":
        assert texts(work[device].forward(3)[-2:]) == ["forward s1 m3 2:4", "loss s1 m3"]


def test_a_stream_has_no_loss() -> None:
    for share in (BySamples((1, 1)), ByTiles((1, 1))):
        plan = Plan("chain", 2, (Stage((0, 4), ("a", "b"), share),), order="stream")
        work = Lowering(plan, CHAIN).work
        assert not any(isinstance(action, Loss) for device in "ab" for action in work[device].forward(0))


@pytest.mark.parametrize("groups", [None, (0,)])
def test_the_first_tile_gathers_the_output_and_computes_the_loss(groups: tuple[int, ...] | None) -> None:
    plan = Plan("chain", 1, (Stage((0, 4), ("a", "b"), ByTiles((1, 1), backward_groups=groups)),))
    work = Lowering(plan, CHAIN).work
    size = MAP_BYTES // 2
    assert texts(work["a"].forward(2)[-2:]) == [
        f"receive b s0 m2 output t3[0:1,0:4,4:8,0:6] {size}B", "loss s0 m2",
    ]  # fmt: skip
    assert texts(work["b"].forward(2)[-1:]) == [f"send a s0 m2 output t3[0:1,0:4,4:8,0:6] {size}B"]
    back = f"s0 m2 output-gradient t3[0:1,0:4,4:8,0:6] {size}B"
    assert texts(work["a"].backward(2, is_last=False)[:1]) == [f"send b {back}"]
    assert texts(work["b"].backward(2, is_last=False)[:1]) == [f"receive a {back}"]


# Tiles: what is sent at once, and what is computed while it travels


def test_the_weights_gradients_are_computed_while_the_rims_travel() -> None:
    plan = Plan("chain", 1, (Stage((0, 2), ("a", "b"), ByTiles((1, 1))), Stage((2, 4), ("c",))))
    row = 4 * CHANNELS * COLUMNS
    actions = texts(Lowering(plan, CHAIN).work["a"].backward(0, is_last=False))
    assert actions == [
        f"receive c s1 m0 gradient t1[0:1,0:4,0:4,0:6] {MAP_BYTES // 2}B",
        "backward s0 m0 1:2 inputs",
        f"send b s0 m0 halo-gradient t0[0:1,0:4,4:5,0:6] {row}B",
        "backward s0 m0 1:2 weights",
        f"receive b s0 m0 halo-gradient t0[0:1,0:4,3:4,0:6] {row}B",
        "backward s0 m0 0:1",
    ]


def test_a_gradient_for_the_stage_before_leaves_before_the_weights_gradients() -> None:
    plan = Plan("chain", 1, (Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), ByTiles((1, 1), backward_groups=(2,)))))
    kinds = [
        (type(action), getattr(action, "part", ""))
        for action in Lowering(plan, CHAIN).work["b"].backward(0, is_last=True)
    ]
    assert kinds == [
        (Send, ""), (Send, ""), (Receive, ""),  # the output's gradient; then what the group starts with
        (Backward, ""), (Backward, "inputs"), (Send, ""), (Backward, "weights"), (Reduce, ""),
    ]  # fmt: skip


def test_nothing_is_split_where_nothing_is_sent_or_there_are_no_two_parts() -> None:
    """Without a message in between, without weights, or where the input has no gradient."""
    frozen = msgspec.structs.replace(
        CHAIN, weights={n: msgspec.structs.replace(w, trainable=False) for n, w in CHAIN.weights.items()}
    )
    tiles = Stage((0, 4), ("a", "b"), ByTiles((1, 1)))
    for network, stage in ((frozen, tiles), (CHAIN, Stage((0, 4), ("a", "b"), BySamples((1, 1))))):
        actions = Lowering(Plan("chain", 2, (stage,)), network).work["a"].backward(0, is_last=False)
        assert all(action.part == "" for action in actions if isinstance(action, Backward))
    actions = Lowering(Plan("chain", 2, (tiles,)), CHAIN).work["a"].backward(0, is_last=False)
    assert [a.first for a in actions if isinstance(a, Backward) and a.part == ""] == [0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plans(SKIPPING, orders=("1f1b",), kinds=("tiles", "single")))
def test_every_operator_is_differentiated_once(plan: Plan) -> None:
    """Its inputs' gradients and its weights', in one action or in two, the inputs' first; last operator first."""
    lowering = Lowering(plan, SKIPPING)
    for work in lowering.work.values():
        for is_last in (False, True):
            actions = [a for a in work.backward(0, is_last=is_last) if isinstance(a, Backward)]
            for part in ("inputs", "weights"):
                order = [op for a in actions if a.part in ("", part) for op in range(a.last - 1, a.first - 1, -1)]
                assert order == [op for g in reversed(work.geometries) for op in range(g.last - 1, g.first - 1, -1)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plans(SKIPPING, orders=("1f1b",), kinds=("tiles",)))
def test_one_packed_message_for_each_peer_at_each_group_start(plan: Plan) -> None:
    """Between two computations a device sends at most one message of a kind to another for each of its stages."""
    for work in Lowering(plan, SKIPPING).work.values():
        for actions in (work.forward(0), work.backward(0, is_last=False)):
            sent: set[tuple[str, str, int]] = set()
            for action in actions:
                if isinstance(action, (Forward, Backward)):
                    sent.clear()
                elif isinstance(action, Send):
                    key = (action.to, action.message.kind, action.message.stage)
                    assert key not in sent
                    sent.add(key)
                    names = [(part.tensor, part.is_value, part.box) for part in action.message.parts]
                    assert len(set(names)) == len(names)


def test_deltas_and_values_travel_in_one_message() -> None:
    """A backward group's start: gradients of t3, and the rows of t2 that its derivative and region want."""
    ops = [msgspec.structs.replace(op, derives_from=op.inputs) for op in CHAIN.ops]
    network = msgspec.structs.replace(CHAIN, ops=tuple(ops))
    plan = Plan("chain", 1, (Stage((0, 4), ("a", "b"), ByTiles((1, 1), backward_groups=(0, 3))),))
    actions = Lowering(plan, network).work["b"].backward(0, is_last=False)
    sent = [str(a.message) for a in actions if isinstance(a, Send) and a.message.kind == "halo-gradient"]
    row = 4 * CHANNELS * COLUMNS
    assert sent[0] == f"s0 m0 halo-gradient t3[0:1,0:4,4:5,0:6]+=t2[0:1,0:4,5:6,0:6] {2 * row}B"
    assert len(sent) == 2


def test_a_group_start_stops_for_statistics_inside_it_only() -> None:
    network = chain(3, statistics=[1])
    plan = Plan("chain", 2, (Stage((0, 3), ("a", "b"), ByTiles((1, 1), forward_groups=(0,))),))
    work = Lowering(plan, network).work["b"]
    size = (2 * CHANNELS + 1) * 4
    assert texts(work.forward(0)[:3]) == [
        "forward s0 m0 0:1", f"reduce s0 statistics m0 1:2 a,b {size}B", "forward s0 m0 1:3",
    ]  # fmt: skip
    local = Lowering(Plan("chain", 2, plan.stages, batch_norm="local"), network).work["b"]
    assert texts(local.forward(0)[:3]) == texts(work.forward(0)[:3])  # a tile has no samples of its own


def test_an_interior_is_computed_while_the_halo_travels() -> None:
    row = 4 * CHANNELS * COLUMNS
    for starts, last in (((0, 1, 2, 3), "forward s0 m4 3:4 rim"), ((0, 1), "forward s0 m4 2:4")):
        share = ByTiles((1, 1), (1,), (0, 1) if starts == (0, 1) else None, interior_first=starts)
        plan = Plan("chain", 1, (Stage((0, 4), ("a", "b"), share),), order="stream")
        actions = texts(Lowering(plan, CHAIN).work["a"].forward(4))
        count = 3 if starts == (0, 1) else 1  # the rows that a group of three operators, or of one, reads beyond
        halo = f"s0 m4 halo t0[0:1,0:4,{{}}:{{}},0:6] {count * row}B"
        assert actions[:5] == [
            "forward s0 m4 0:1",
            "send b " + halo.format(4 - count, 4),
            "forward s0 m4 1:2 interior",
            "receive b " + halo.format(4, 4 + count),
            "forward s0 m4 1:2 rim",
        ]
        assert actions[-1] == last


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(plans(SKIPPING, orders=("1f1b", "stream"), kinds=("tiles", "single")))
def test_every_operator_is_computed_once(plan: Plan) -> None:
    """Its interior and its rim, in one action or in two; first operator first."""
    for work in Lowering(plan, SKIPPING).work.values():
        actions = [action for action in work.forward(0) if isinstance(action, Forward)]
        for part in ("interior", "rim"):
            order = [op for action in actions if action.part in ("", part) for op in range(action.first, action.last)]
            assert order == [op for geometry in work.geometries for op in range(geometry.first, geometry.last)]


def test_sums_per_sample_are_counted_by_samples_and_needed_in_a_stream_too() -> None:
    ops = list(CHAIN.ops)
    ops[1] = msgspec.structs.replace(ops[1], tiling="norm", tile_sums=6, macs=0)
    network = msgspec.structs.replace(CHAIN, ops=tuple(ops))
    stage = Stage((0, 4), ("a", "b"), ByTiles((1, 1)))
    for order in ("1f1b", "stream"):
        work = Lowering(Plan("chain", 3, (stage,), order=order), network).work["a"]  # type: ignore[arg-type]
        (found,) = [action for action in work.forward(0) if isinstance(action, Reduce)]
        assert (found.first, found.bytes) == (1, 3 * 6 * 4)
    back = Lowering(Plan("chain", 3, (stage,)), network).work["a"].backward(0, is_last=False)
    assert [(a.bytes, a.backward) for a in back if isinstance(a, Reduce)] == [(3 * 6 * 4, True)]


# A device in several stages


def twice(order: Order = "sequential", micro_batches: int = 2, reduce: str = "allreduce") -> Plan:
    """Tiles on two devices, the tail on the first of them, and a last stage on the other."""
    stages = (
        Stage((0, 2), ("a", "b"), ByTiles((1, 1)), reduce=reduce),  # type: ignore[arg-type]
        Stage((2, 3), ("a",)),
        Stage((3, 4), ("b",)),
    )
    return resolve(Plan("chain", 2 * micro_batches, stages, micro_batches, order), CHAIN)


def test_what_a_device_hands_to_itself_is_no_message() -> None:
    lowering = Lowering(twice(), CHAIN)
    half, other = Box.parse("[0:2,0:4,0:4,0:6]"), Box.parse("[0:2,0:4,4:8,0:6]")
    assert lowering.handed_over("a") == [(0, 1, "t1", half)]
    assert lowering.handed_over("b") == []
    crossing = [(to, m.kind, m.stage, [str(part) for part in m.parts]) for to, m in sent_by(lowering.work["b"])]
    assert ("a", "value", 1, [f"t1{other}"]) in crossing
    assert ("a", "gradient", 2, ["t2[0:2,0:4,0:8,0:6]"]) in crossing
    for device, work in lowering.work.items():
        assert all(to != device for to, _ in sent_by(work))


def test_a_device_in_two_stages_goes_through_them_in_order() -> None:
    work = Lowering(twice(), CHAIN).work
    assert [geometry.index for geometry in work["a"].geometries] == [0, 1]
    assert (work["a"].stage, work["a"].geometry(1).first) == (0, 2)
    assert work["a"].weights() == ("w0", "w1", "w2")
    assert work["b"].weights() == ("w0", "w1", "w3")
    passes = [str(a) for a in work["a"].forward(1) if isinstance(a, (Forward, Loss))]
    assert passes == ["forward s0 m1 0:1", "forward s0 m1 1:2", "forward s1 m1 2:3"]
    back = [a.stage for a in work["a"].backward(1, is_last=False) if isinstance(a, Backward)]
    assert back == sorted(back, reverse=True)
    assert texts(work["b"].finish()) == ["step s0", "step s2"]


@pytest.mark.parametrize("order", ["sequential", "gpipe", "stream", "1f1b"])
@pytest.mark.parametrize("reduce", ["allreduce", "gateway"])
def test_a_device_in_two_stages_passes_the_checker(order: Order, reduce: str) -> None:
    plan = twice(order, 1 if order == "1f1b" else 3, reduce)
    checked = check(Schedule(plan, CHAIN))
    held = plan.micro_batches if order == "gpipe" else 1
    assert checked.most_micro_batches_held == {"a": held, "b": held}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(plans(SKIPPING, orders=("sequential", "gpipe"), repeats=True))
def test_every_element_comes_by_message_or_is_handed_over(plan: Plan) -> None:
    """Stage by stage: what a device needs of tensors made before, counted by what arrives for that stage."""
    lowering = Lowering(plan, SKIPPING)
    for device, work in lowering.work.items():
        got: dict[tuple[int, str], list[Box]] = defaultdict(list)
        for action in work.forward(0):
            if isinstance(action, Receive) and action.message.kind == "value":
                for one in action.message.parts:
                    got[action.message.stage, one.tensor].append(one.box)
        for _, consumer, tensor, box in lowering.handed_over(device):
            got[consumer, tensor].append(box)
        for geometry in work.geometries:
            for tensor in {name for op in geometry.ops for name in op.inputs}:
                if tensor not in SKIPPING.inputs and not geometry.is_made_here(tensor):
                    shape = geometry.shape(tensor)
                    wanted = list(geometry.entering(tensor).boxes(device))
                    np.testing.assert_array_equal(count_of(shape, got[geometry.index, tensor]), count_of(shape, wanted))


# The end of a round


def test_the_end_has_phases_for_all_stages_of_a_device() -> None:
    """Partial sums leave first, then those of others come, then all steps, then weights leave and come: no device
    that is a gateway of one stage and a member of another waits for itself."""
    stages = (
        Stage((0, 2), ("a", "b"), ByTiles((1, 1)), reduce="gateway"),
        Stage((2, 3), ("b", "a"), ByTiles((1, 1)), reduce="gateway"),
        Stage((3, 4), ("c",)),
    )
    plan = resolve(Plan("chain", 2, stages, order="sequential"), CHAIN)
    schedule = Schedule(plan, CHAIN)
    check(schedule)
    two, one = 2 * WEIGHT_BYTES, WEIGHT_BYTES
    whole = "[0:100]"
    assert texts(schedule.lowering.work["a"].finish()) == [
        f"send b s1 m0 weight-gradient w2{whole} {one}B",
        f"receive b s0 m0 weight-gradient w0{whole}+w1{whole} {two}B",
        "step s0",
        f"send b s0 m0 weights w0{whole}+w1{whole} {two}B",
        f"receive b s1 m0 weights w2{whole} {one}B",
    ]
    assert [type(action) for action in schedule.lowering.work["b"].finish()] == [Send, Receive, Step, Send, Receive]
    assert texts(schedule.lowering.work["c"].finish()) == ["step s2"]


def test_a_gateway_of_nothing_trained_only_steps() -> None:
    weights = {n: msgspec.structs.replace(w, trainable=False) for n, w in CHAIN.weights.items()}
    stages = (Stage((0, 4), ("a", "b"), ByTiles((1, 1)), reduce="gateway"),)
    lowering = Lowering(Plan("chain", 2, stages), msgspec.structs.replace(CHAIN, weights=weights))
    assert {device: texts(work.finish()) for device, work in lowering.work.items()} == {
        "a": ["step s0"], "b": ["step s0"],
    }  # fmt: skip
