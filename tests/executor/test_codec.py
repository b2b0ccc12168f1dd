"""Features in n bits: what arrives is near what was sent, takes what the plan says, and is fed back by the book."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn_numpy
from torch import Tensor, nn
from torch.nn import functional

from drawn_plans import plans
from harness import SGD, TOLERANCE, Batch, Ran, alone, plan_for, relative, run, schedule_of, shared
from manyhands.executor import codec as coding
from manyhands.executor.codec import NoRange, pack, unpack
from manyhands.executor.executor import Executor
from manyhands.executor.optimizers import build
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadPlan, BadValue, NotFinite, WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles, Codec, LayerName, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Message, Part, Receive, Send
from manyhands.schedule.packing import HEADER_BYTES, packed_bits, packed_bytes
from small_networks import batches_of, captured
from tape import CapturedLoss
from tiled_networks import Residual

WIDTHS = (2, 4, 8, 16)
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NUMPY_TYPES = {torch.float64: numpy.float64, torch.float16: numpy.float16}


def there_and_back(data: Tensor, bits: int) -> Tensor:
    error = torch.empty(data.shape, dtype=data.dtype)
    packed = pack(data, bits, error)
    assert packed.dtype == torch.uint8
    assert len(packed) == HEADER_BYTES + math.ceil(data.numel() * bits / 8)
    assert torch.equal(packed, pack(data, bits))
    found = unpack(packed, tuple(data.shape), data.dtype, bits, "cpu")
    assert (found.dtype, found.shape) == (data.dtype, data.shape)
    assert torch.equal(error, (wide(found) - wide(data)).to(data.dtype))
    return found


def wide(data: Tensor) -> Tensor:
    return data if data.dtype == torch.float64 else data.float()


@st.composite
def boxes(draw: st.DrawFn) -> Tensor:
    """Of any type and shape, with numbers near each other, near nothing, or near the ends of the type."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(drawn_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    most = float(torch.finfo(dtype).max)
    ends = sorted(draw(st.tuples(*[st.sampled_from((-most, -1000.5, -1.0, 0.0, 1e-7, 0.3, 7.0, most))] * 2)))
    elements = st.floats(*ends, allow_nan=False) | st.sampled_from(ends)
    found = draw(drawn_numpy.arrays(numpy.float64, shape, elements=elements))
    return torch.from_numpy(found).clamp(-most, most).to(dtype)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(boxes(), st.sampled_from(WIDTHS))
def test_what_arrives_is_within_half_a_step(data: Tensor, bits: int) -> None:
    found = there_and_back(data, bits)
    if not data.numel():
        return
    least, greatest = float(data.min()) / 8, float(data.max()) / 8  # an eighth: their difference is a number too
    here, there = data.double() / 8, found.double() / 8
    step, top = (greatest - least) / (2**bits - 1), max(abs(least), abs(greatest))
    rounding = torch.finfo(wide(data).dtype).eps
    limit = step / 2 * (1 + 4 * 2**bits * rounding) + 4 * torch.finfo(data.dtype).eps * top
    assert float((here - there).abs().max()) <= limit + 8 * torch.finfo(data.dtype).smallest_normal * 2.0**-10
    last_bit = torch.finfo(data.dtype).smallest_normal * torch.finfo(data.dtype).eps  # of numbers near nothing
    assert least - last_bit <= float(there.min())
    assert float(there.max()) <= greatest + last_bit


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_constant_is_exact_and_nothing_takes_its_header(dtype: torch.dtype, bits: int) -> None:
    limits = torch.finfo(dtype)
    for number in (0.0, 0.1, -3.7, limits.max, limits.min, limits.tiny, limits.smallest_normal / 4):
        data = torch.full((3, 5), number, dtype=dtype)
        assert torch.equal(there_and_back(data, bits), data)
    assert there_and_back(torch.empty((0, 4), dtype=dtype), bits).shape == (0, 4)
    assert there_and_back(torch.tensor(2.5, dtype=dtype), bits) == 2.5


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ranges_at_the_ends_of_a_type(dtype: torch.dtype, bits: int) -> None:
    limits = torch.finfo(dtype)
    for ends in ((limits.min, limits.max), (0.0, limits.max), (0.0, limits.tiny), (1e-30, 1e-30 * (1 + 2e-7))):
        data = torch.tensor([ends[0], *ends], dtype=dtype)
        assert torch.allclose(there_and_back(data, bits), data, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_numbers_that_are_on_a_level_are_exact_and_halves_go_to_even(bits: int) -> None:
    most = 2**bits - 1
    codes = torch.arange(most + 1, dtype=torch.float32)
    assert torch.equal(there_and_back(codes - 2, bits), codes - 2)
    between = torch.tensor([0.0, 0.5, 1.5, 2.5, most])
    assert there_and_back(between, bits).tolist() == [0.0, 0.0, 2.0, 2.0, most]


def test_the_format() -> None:
    """As the page on it says: two doubles, then planes."""
    data = torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0])
    head = struct.pack("<dd", 0.0, 3.0)
    assert bytes(pack(data, 2).tolist()) == head + bytes([0 | 2 << 2 | 3 << 4, 1 | 3 << 2])
    assert bytes(pack(data * 5, 4).tolist())[16:] == bytes([0 | 15 << 4, 5 | 15 << 4, 10])
    assert bytes(pack(data * 85, 8).tolist())[16:] == bytes([0, 85, 170, 255, 255])
    assert bytes(pack(data * 21845, 16).tolist())[16:] == struct.pack("<5H", 0, 21845, 43690, 65535, 65535)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_chunks_make_no_difference(dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    data = torch.randn(3, 7, 11).to(dtype)
    packed, found = pack(data, bits), there_and_back(data, bits)
    for size in (1, 10, 16, 64):
        monkeypatch.setattr(coding, "CHUNK", size)
        assert torch.equal(pack(data, bits), packed)
        assert torch.equal(there_and_back(data, bits), found)
    assert torch.equal(there_and_back(data.permute(2, 0, 1), bits), found.permute(2, 0, 1))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_no_number_has_no_range(dtype: torch.dtype, number: float) -> None:
    data = torch.zeros(4, 5, dtype=dtype)
    data[2, 3] = number
    with pytest.raises(NoRange, match="its range is"):
        pack(data, 8)


@pytest.mark.parametrize("ends", [(math.nan, 1.0), (0.0, math.inf), (2.0, 1.0)])
def test_a_header_that_is_no_range_is_refused(ends: tuple[float, float]) -> None:
    packed = pack(torch.arange(5.0), 8)
    packed[:HEADER_BYTES] = torch.tensor(list(struct.pack("<dd", *ends)), dtype=torch.uint8)
    with pytest.raises(BadValue, match="lies between"):
        unpack(packed, (5,), torch.float32, 8, "cpu")


def test_only_floats_wider_than_the_codec_are_packed() -> None:
    assert [packed_bits(Codec(8), name) for name in ("int64", "uint8", "bool", "complex64")] == [0, 0, 0, 0]
    assert [packed_bits(Codec(16), name) for name in ("float64", "float32", "float16", "bfloat16")] == [16, 16, 0, 0]
    assert [packed_bits(Codec(bits), "float32") for bits in (2, 4, 8, 16, 32)] == [2, 4, 8, 16, 0]
    assert packed_bits(Codec(32), "float64") == packed_bits(None, "float32") == 0


# Training


def coded(plan: Plan, codec: Codec) -> Plan:
    return msgspec.structs.replace(
        plan, stages=tuple(msgspec.structs.replace(stage, codec=codec) for stage in plan.stages)
    )


def cut_in_two(graph: Graph, codec: Codec, cut: LayerName = "c", *, samples: int = 4, count: int = 2) -> Plan:
    place = graph.network.find_layer(cut)
    stages = [shared(0, place, samples), shared(place, len(graph.network.layers), samples)]
    plan = plan_for(graph, stages, batch_size=samples * count, micro_batches=count, order="gpipe")
    return coded(plan, codec)


@dataclass
class Watched:
    """Every packed feature of a run with its error, and every gradient before and after it was fed back."""

    errors: dict[tuple[str, str, int, int, int, str], list[tuple[Box, Tensor]]] = field(default_factory=dict)
    gradients: list[tuple[tuple[str, str, int, int, int, str], Box, Tensor, Tensor]] = field(default_factory=list)
    most_bytes: dict[str, int] = field(default_factory=dict)

    def watch(self, executor: Executor) -> None:
        own, device = executor.messenger.coding, executor.device
        packed, feed_back = own.packed, own.feed_back

        def watched_packed(to: str, message: Message, part: Part, data: Tensor) -> Tensor:
            made = packed(to, message, part, data)
            bits = own.bits(message, part)
            if bits and message.kind == "value":
                key = (device, to, executor.step, message.stage, message.micro_batch, part.tensor)
                found = unpack(made, part.box.shape, data.dtype, bits, "cpu")
                self.errors.setdefault(key, []).append((part.box, found - data))
            self.most_bytes[device] = max(self.most_bytes.get(device, 0), own.error_bytes)
            return made

        def watched_feed_back(source: str, message: Message, part: Part, gradient: Tensor) -> None:
            before = gradient.clone()
            feed_back(source, message, part, gradient)
            key = (device, source, executor.step, message.stage, message.micro_batch, part.tensor)
            self.gradients.append((key, part.box, before, gradient.clone()))

        own.packed, own.feed_back = watched_packed, watched_feed_back  # type: ignore[method-assign]

    def assert_fed_back(self, plan: Plan) -> int:
        """Every gradient that came from elsewhere is that of Algorithm 1; how many were changed by it."""
        changed = 0
        for key, box, before, after in self.gradients:
            error = torch.zeros_like(before)
            if plan.stages[key[3]].codec.error_feedback:
                for place, own in self.errors.get(key, ()):
                    common = place.intersect(box)
                    if not common.is_empty:
                        error[coding.place_of(common, box)] = own[coding.place_of(common, place)]
            assert relative(after, before - error * before * before) <= 1e-15
            changed += not torch.equal(after, before)
        return changed


def by_hand(graph: Graph, plan: Plan, batches: list[Batch]) -> dict[str, Tensor]:
    """Two stages on one device, with Eq. 2 and Algorithm 1 written out."""
    weights = Weights.copied(graph)
    stepper, loss, codec = build(SGD, weights.trainable()), CapturedLoss(graph), plan.stages[1].codec
    cut = graph.network.layers[graph.network.find_layer(plan.stages[1].layers[0])].first
    edge, server = Piece(graph, weights, 0, cut), Piece(graph, weights, cut)

    def rounded(h: Tensor) -> Tensor:
        least, greatest = h.min(), h.max()
        step = (greatest - least) / (2**codec.bits - 1)
        return torch.round((h - least) / step) * step + least

    for step, (inputs, targets) in enumerate(batches):
        size = plan.micro_batch_size
        for start in range(0, plan.batch_size, size):
            context = Context(seed=7, step=step, first_sample=start)
            made = edge(bind_inputs(graph, inputs[start : start + size]), context)
            sent = {name: rounded(h.detach()).requires_grad_() for name, h in made.items()}
            values = server(sent, context)
            _, found = loss(values, targets[start : start + size])
            torch.autograd.backward([values[n] for n in found], [g / plan.micro_batches for g in found.values()])
            for name, h in made.items():
                returned = sent[name].grad
                assert returned is not None
                returned = rounded(returned) if codec.gradients else returned
                if codec.error_feedback:
                    returned = returned - (sent[name].detach() - h.detach()) * returned * returned
                h.backward(returned, retain_graph=True)  # type: ignore[no-untyped-call]
        stepper.step()
        stepper.zero()
    return {name: tensor.detach() for name, tensor in weights.tensors.items()}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("gradients", [False, True], ids=["features", "gradients too"])
@pytest.mark.parametrize("error_feedback", [False, True], ids=["plain", "fed back"])
@pytest.mark.parametrize("bits", [4, 8])
def test_two_stages_train_as_written_by_hand(bits: int, error_feedback: bool, gradients: bool) -> None:
    graph = captured("still")
    plan = cut_in_two(graph, Codec(bits, error_feedback, gradients))
    batches = batches_of("still", 3, plan.batch_size)
    watched = Watched()
    ran = run(graph, plan, batches, seed=7, watch=watched.watch)
    ran.assert_as_planned(len(batches))
    assert (watched.assert_fed_back(plan) > 0) == error_feedback
    expected = by_hand(graph, plan, batches)
    exact, _ = alone(graph, batches, seed=7, micro_batches=plan.micro_batches)
    for own in ran.weights.values():
        for name, tensor in own.items():
            assert relative(tensor, expected[name]) <= TOLERANCE, name
    assert any(relative(expected[name], exact[name]) > 1e-6 for name in expected)


def test_errors_are_held_from_the_feature_to_its_gradient() -> None:
    graph = captured("still")
    codec, watched = Codec(8), Watched()
    plan = cut_in_two(graph, codec, count=3)
    ran = run(graph, plan, batches_of("still", 2, plan.batch_size), watch=watched.watch)
    ran.raise_first()
    sent = [a.message for a in ran.executors["s0-0"].actions if isinstance(a, Send) and a.message.kind == "value"]
    features = sum(part.box.volume * 8 for message in sent for part in message.parts)
    assert watched.most_bytes["s0-0"] == features  # all three micro-batches, of float64
    assert all(executor.messenger.coding.error_bytes == 0 for executor in ran.executors.values())
    plain = cut_in_two(graph, Codec(8, error_feedback=False), count=3)
    watched = Watched()
    run(graph, plain, batches_of("still", 2, plan.batch_size), watch=watched.watch).raise_first()
    assert watched.most_bytes["s0-0"] == 0


def test_a_feature_that_no_gradient_returns_for_leaves_no_error() -> None:
    graph = captured("frozen")
    plan = cut_in_two(graph, Codec(8), "b")  # behind a first convolution that is not trained
    watched = Watched()
    ran = run(graph, plan, batches_of("frozen", 2, plan.batch_size), watch=watched.watch)
    ran.assert_as_planned(2)
    assert watched.errors
    assert set(watched.most_bytes.values()) == {0}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_thirty_two_bits_are_as_before_bit_by_bit(dtype: torch.dtype) -> None:
    graph = captured("small", dtype=dtype)
    plan = cut_in_two(graph, Codec())
    batches = batches_of("small", 3, plan.batch_size, dtype=dtype)
    before = run(graph, plan, batches, seed=7)
    after = run(graph, coded(plan, Codec(32, True, True)), batches, seed=7)
    after.assert_as_planned(3)
    assert before.losses == after.losses
    for device, own in before.weights.items():
        assert all(torch.equal(tensor, after.weights[device][name]) for name, tensor in own.items())
    if dtype == torch.float64:
        after.assert_equals(*alone(graph, batches, seed=7, micro_batches=plan.micro_batches))


def test_eight_bits_take_a_quarter_of_a_float() -> None:
    graph = captured("small", dtype=torch.float32)
    plan = cut_in_two(graph, Codec(8))
    batches = batches_of("small", 2, plan.batch_size, dtype=torch.float32)
    ran, plain = (run(graph, coded(plan, codec), batches, seed=7) for codec in (Codec(8), Codec()))
    ran.assert_as_planned(2)
    edge, server = (stage.devices[0] for stage in plan.stages)
    sent = [action.message for action in ran.executors[edge].actions if isinstance(action, Send)]
    packed, features = (one.logs[edge].sent_bytes[server] for one in (ran, plain))
    assert packed == 2 * sum(message.bytes for message in sent)
    assert 4 * (packed - 2 * HEADER_BYTES * sum(len(message.parts) for message in sent)) == features
    assert ran.logs[server].sent_bytes[edge] == plain.logs[server].sent_bytes[edge]  # gradients as they are


@pytest.mark.parametrize(("bits", "near"), [(16, 1e-4), (8, 2e-2), (4, 0.5)])
def test_more_bits_are_nearer(bits: int, near: float) -> None:
    graph = captured("still")
    batches = batches_of("still", 4, 8)
    ran = run(graph, cut_in_two(graph, Codec(bits)), batches, seed=7)
    _, losses = alone(graph, batches, seed=7, micro_batches=2)
    ran.raise_first()
    assert ran.losses == pytest.approx(losses, abs=near)


# Shared stages


def assert_runs(graph: Graph, plan: Plan, batches: list[Batch]) -> tuple[Ran, int]:
    watched = Watched()
    ran = run(graph, plan, batches, seed=7, watch=watched.watch)
    ran.assert_as_planned(len(batches))
    assert all(executor.messenger.coding.error_bytes == 0 for executor in ran.executors.values())
    return ran, watched.assert_fed_back(ran.schedule.plan)


def test_every_box_has_its_own_range() -> None:
    """Between stages that are shared differently each box is packed by itself, a tensor of several stages twice."""
    graph = captured("skips")
    last = len(graph.network.layers)
    stages = [shared(0, last // 3, 3, 1), shared(last // 3, last - 2, 1, 1, 2), shared(last - 2, last, 4)]
    plan = coded(plan_for(graph, stages, batch_size=8, micro_batches=2), Codec(8, gradients=True))
    batches = batches_of("skips", 2, 8)
    ran, changed = assert_runs(graph, plan, batches)
    assert changed
    parts = [
        (part, action.message.bytes)
        for executor in ran.executors.values()
        for action in executor.actions
        if isinstance(action, Receive)
        and action.message.kind in ("value", "gradient")
        and len(action.message.parts) == 1
        for part in action.message.parts
    ]
    assert parts
    assert all(size == packed_bytes(part.box.volume, 8) for part, size in parts)
    _, losses = alone(graph, batches, seed=7, micro_batches=2)
    assert ran.losses == pytest.approx(losses, abs=0.05)


def maps() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.SiLU(), Residual(nn.Conv2d(3, 3, 3, padding=1)), nn.SiLU(),
        nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 8 * 6, 3),
    )  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("groups", [None, ("2.inner",), ("2.inner", "4")], ids=["adjoint", "one group", "two groups"])
def test_tiles_on_both_sides_of_a_boundary(groups: tuple[LayerName, ...] | None) -> None:
    """Overlapping boxes go to several tiles, each in its own levels; backward groups return other boxes than came."""
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(1)
    batches: list[Batch] = [
        (torch.randn(2, 1, 8, 6, generator=generator).double(), torch.randint(0, 3, (2,), generator=generator))
        for _ in range(2)
    ]
    x, y = batches[0]
    loss = functional.cross_entropy
    graph = capture(maps().double(), x, loss=loss, target=y, granularity="operators", name="maps")
    first, tail = graph.network.find_layer("2.inner"), graph.network.find_layer("6")
    stages = [
        Stage((0, first), ("a", "b"), ByTiles((1, 2), (1,))),
        Stage((first, tail), ("c", "d"), ByTiles((1,), (1, 1), None, groups)),
        Stage((tail, len(graph.network.layers)), ("e",)),
    ]
    plan = coded(plan_for(graph, stages, batch_size=2), Codec(8, gradients=True))
    ran, changed = assert_runs(graph, plan, batches)
    assert changed
    _, losses = alone(graph, batches, seed=7)
    assert ran.losses == pytest.approx(losses, abs=0.02)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["skips", "pair"])
@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_any_plan_runs_with_any_codecs(name: str, data: st.DataObject) -> None:
    graph = captured(name)
    kinds = ("single", "samples", "tiles") if name == "skips" else ("single", "samples")
    plan = data.draw(plans(graph.network, kinds=kinds, orders=("sequential", "gpipe", "1f1b"), repeats=True))
    *others, last = plan.stages
    if isinstance(last.share, ByTiles):  # there the maps have ended
        last = msgspec.structs.replace(last, share=Single(), devices=last.devices[:1])
    plan = msgspec.structs.replace(plan, stages=(*others, last), homes={})
    try:
        schedule_of(graph, plan)
    except BadPlan:
        assume(False)
    assert_runs(graph, plan, batches_of(name, 2, plan.batch_size))


def test_a_stream_is_packed_too() -> None:
    graph = captured("still")
    plan = msgspec.structs.replace(cut_in_two(graph, Codec(16)), order="stream")
    batches = batches_of("still", 2, plan.batch_size)
    ran, plain = (run(graph, one, batches) for one in (plan, coded(plan, Codec())))
    ran.raise_first()
    for own, other in zip(ran.outputs, plain.outputs, strict=True):
        for name, tensor in own.items():
            assert 0 < relative(tensor, other[name]) < 1e-3


# What is no number


def told(ran: Ran, device: str) -> str:
    assert isinstance(ran.errors[device], NotFinite), ran.errors
    assert all(isinstance(error, (NotFinite, WorkerLost)) for error in ran.errors.values())
    return str(ran.errors[device])


def spoilt(name: str, samples: int, change: Callable[[Tensor], object]) -> list[Batch]:
    batches = batches_of(name, 3, samples)
    change(batches[1][0])
    return batches


def test_a_feature_that_is_no_number_is_told_with_step_and_layer() -> None:
    graph = captured("logs")
    plan = cut_in_two(graph, Codec(8), "c")
    ran = run(graph, plan, batches_of("logs", 3, plan.batch_size), Optimizer("SGD", lr=1e7))
    text = told(ran, "s0-0")
    assert "'log'" in text
    assert "8 bits at step 1, on s0-0: its range is nan to nan" in text
    assert "it began in layer log" in text


def test_a_picture_that_is_no_number_is_told() -> None:
    graph = captured("still")
    plan = cut_in_two(graph, Codec(8))
    ran = run(graph, plan, spoilt("still", plan.batch_size, lambda x: x[-1].fill_(math.inf)))
    text = told(ran, "s0-0")
    assert "at step 1, on s0-0" in text
    assert "it began in the input 'x'" in text


def test_a_gradient_that_is_no_number_is_told_where_it_is_packed() -> None:
    graph = captured("still")
    plan = cut_in_two(graph, Codec(8, gradients=True))
    server = plan.stages[1].devices[0]

    def spoil(executor: Executor) -> None:
        bind_outgoing = executor.messenger._bind_outgoing

        def spoilt(message: Message, part: Part) -> Callable[[], Tensor]:
            outgoing = bind_outgoing(message, part)
            is_spoilt = message.kind == "gradient"
            return lambda: outgoing().fill_(math.inf) if is_spoilt and executor.step == 1 else outgoing()

        executor.messenger._bind_outgoing = spoilt  # type: ignore[method-assign]

    ran = run(graph, plan, batches_of("still", 3, plan.batch_size), watch=spoil)
    text = told(ran, server)
    assert f"The gradient of 'relu' cannot be packed in 8 bits at step 1, on {server}: its range is inf to inf." in text
