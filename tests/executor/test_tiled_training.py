"""Training by tiles is training on one device: same losses, weights and buffers to 1e-10, done as planned.

Memory that nobody has written yet is no number here, and what a tile holds of a map beside what it was given is filled
with numbers that would be noticed: a device that reads what it was never sent cannot come out right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from harness import SGD, Batch, Ran, alone, assert_exact, held, relative, run
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from tiled_networks import ZOO, Beside, Classifier, LinearExcite, Residual, Resized, Shape, networks, same
from torch import Tensor, nn
from torch.nn import functional

from manyhands.executor.boxes import place_of
from manyhands.executor.tile_operators import Held
from manyhands.executor.tiles import TileRunner
from manyhands.facts.boxes import Box
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, LayerName, Order, Plan, Single, Stage
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import takes_format
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights

GRIDS: tuple[tuple[Sequence[float], Sequence[float]], ...] = (
    ((1,), (1, 1)), ((1, 1), (1,)), ((1, 1), (1, 1)), ((1, 1, 1), (1, 1)), ((2, 1), (1, 3)), ((1, 3, 1), (1,)),
)  # fmt: skip
PICTURES: tuple[tuple[int, int], ...] = ((17, 23), (16, 12), (13, 14), (24, 9))


DRAWN = settings(suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""A failing example is told as it was drawn: making it smaller would take minutes."""


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory_is_noticed() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    original = TileRunner._room

    def room(self: TileRunner, tensor: str, inside: Box) -> Held:
        made = original(self, tensor, inside)
        true = made.box.intersect(Box.whole(self.geometry.shape(tensor)))
        if not true.is_empty and made.tensor.is_floating_point():
            made.tensor[place_of(true, made.box)] = 1e3
        return made

    patch.setattr(TileRunner, "_room", room)
    patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    patch.undo()


def test_unwritten_memory_is_no_number() -> None:
    assert torch.empty(3, dtype=torch.float64).isnan().all()


def target_shape(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(module(x).shape)


@dataclass
class Case:
    """A captured network with batches, and what one device makes of them."""

    graph: Graph
    batches: list[Batch]

    @property
    def network(self) -> Network:
        return self.graph.network

    @property
    def count(self) -> int:
        return len(self.network.layers)

    @cache  # noqa: B019
    def expected(self, micro_batches: int) -> tuple[dict[str, Tensor], list[float]]:
        return alone(self.graph, self.batches, SGD, seed=7, micro_batches=micro_batches)

    def __hash__(self) -> int:
        return id(self)

    def plan(self, *stages: Stage, micro_batches: int = 1, order: Order = "sequential", **options: Any) -> Plan:
        samples = len(self.batches[0][0])
        return Plan(self.network.name, samples, stages, micro_batches, order, **options)

    def tiled(
        self, share: ByTiles, first: LayerName = 0, last: LayerName | None = None, reduce: Any = "allreduce"
    ) -> Stage:
        """Layers [first, last) on t0, t1, ..."""
        devices = tuple(f"t{number}" for number in range(len(share.rows) * len(share.columns)))
        return Stage((first, self.count if last is None else last), devices, share, reduce=reduce)

    def check(self, plan: Plan, **options: Any) -> Ran:
        if currently_in_test_context():
            note(str(plan))
        ran = run(self.graph, plan, self.batches, SGD, seed=7, **options)
        ran.assert_as_planned(len(self.batches))
        ran.assert_equals(*self.expected(plan.micro_batches))
        for executor in ran.executors.values():
            assert not held(executor)
        return ran


def case_of(module: nn.Module, shape: Shape, *, samples: int = 2, steps: int = 2, seed: int = 0) -> Case:
    """Mean squares against a random target."""
    if currently_in_test_context():
        note(f"{shape} {module}")
    module = module.double().train()
    torch.manual_seed(seed)
    x = torch.randn(samples, *shape, dtype=torch.float64)
    target = target_shape(module, x)
    y = torch.randn(target, dtype=torch.float64)
    graph = capture(module, x, loss=functional.mse_loss, target=y, granularity="operators", name="drawn")
    batches = [(torch.randn_like(x), torch.randn_like(y)) for _ in range(steps)]
    return Case(graph, batches)


@cache
def zoo_case(name: str) -> Case:
    build, shape = ZOO[name]
    torch.manual_seed(1)
    module = build()
    if name != "unet":
        return case_of(module, shape)
    module = module.double().train()
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(2, *shape, dtype=torch.float64, generator=generator),
         torch.randint(0, 2, (2, *shape[1:]), generator=generator))
        for _ in range(3)
    ]  # fmt: skip
    graph = capture(
        module, batches[0][0], loss=functional.cross_entropy, target=batches[0][1], granularity="operators", name=name
    )
    return Case(graph, batches[1:])


def tail_of(case: Case) -> int:
    """The layer at which the maps end: the pooling of a classifier."""
    network = case.network
    op = next(i for i, op in enumerate(network.ops) if op.tiling == "pool" and len(network.readers[op.outputs[0]]) == 1
              and network.tensors[network.ops[i + 1].outputs[0]].shape[2:] == ())  # fmt: skip
    return network.layer_of_op[op]


# Drawn networks, drawn groups


@st.composite
def drawn_groups(draw: st.DrawFn, network: Network, first: int, last: int) -> tuple[LayerName, ...] | None:
    """None, one group, or groups that start at some operators of layers [first, last), by number or name."""
    kind = draw(st.sampled_from(("none", "one", "some", "some")))
    if kind == "none":
        return None
    inside = list(range(first + 1, last))
    chosen = sorted(draw(st.sets(st.sampled_from(inside), max_size=6))) if kind == "some" and inside else []
    names = [network.ops[network.layers[layer].first].name if draw(st.booleans()) else layer for layer in chosen]
    return (first, *names)


@st.composite
def drawn_tiles(draw: st.DrawFn, network: Network, first: int, last: int) -> ByTiles:
    rows, columns = draw(st.sampled_from(GRIDS))
    forward, backward = draw(drawn_groups(network, first, last)), draw(drawn_groups(network, first, last))
    return ByTiles(tuple(rows), tuple(columns), forward, backward)


@settings(DRAWN, max_examples=20)
@given(st.data())
def test_any_network_by_any_tiles(data: st.DataObject) -> None:
    """The whole network tiled, its loss on maps; three plans for each drawn network."""
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    for _ in range(3):
        share = data.draw(drawn_tiles(case.network, 0, case.count))
        micro_batches = data.draw(st.sampled_from((1, 2)))
        stage = case.tiled(share, reduce=data.draw(st.sampled_from(("allreduce", "gateway"))))
        order = data.draw(st.sampled_from(("sequential", "1f1b", "gpipe")))
        case.check(case.plan(stage, micro_batches=micro_batches, order=order, bucket_bytes=data.draw(st.sampled_from((1, 10**6)))))


@settings(DRAWN, max_examples=12)
@given(st.data())
def test_tiles_among_other_stages(data: st.DataObject) -> None:
    """Before the tiles one device or shares by samples, after them too; some device may work in both."""
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    first = data.draw(st.integers(0, min(3, case.count - 1)))
    last = data.draw(st.integers(first + 1, case.count))
    micro_batches = data.draw(st.sampled_from((1, 2)))
    repeats = data.draw(st.booleans())
    order = "sequential" if repeats else data.draw(st.sampled_from(("sequential", "1f1b", "gpipe")))
    stages = [case.tiled(data.draw(drawn_tiles(case.network, first, last)), first, last)]
    for low, high, name in ((0, first, "before"), (last, case.count, "after")):
        if low < high:
            one = "t0" if repeats else name
            by_samples = data.draw(st.booleans())
            samples = 4 // micro_batches
            share: Any = BySamples((1, samples - 1)) if by_samples else Single()
            stages.append(Stage((low, high), (one, f"{name}-2") if by_samples else (one,), share))
    stages.sort(key=lambda stage: stage.layers[0])  # type: ignore[arg-type, return-value]
    case.check(case.plan(*stages, micro_batches=micro_batches, order=order))


@settings(DRAWN, max_examples=8)
@given(st.data())
def test_a_stream_gives_what_the_whole_network_gives(data: st.DataObject) -> None:
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4)
    share = data.draw(drawn_tiles(case.network, 0, case.count))
    assert_streams(case, case.plan(case.tiled(share), order="stream", micro_batches=data.draw(st.sampled_from((1, 2)))))


def assert_streams(case: Case, plan: Plan) -> None:
    ran = run(case.graph, plan, case.batches, seed=7)
    ran.assert_as_planned(len(case.batches))
    piece = Piece(case.graph, Weights.copied(case.graph))
    size = plan.micro_batch_size
    for step, (outputs, (x, _)) in enumerate(zip(ran.outputs, case.batches, strict=True)):
        for place in range(0, plan.batch_size, size):
            rows = x[place : place + size]
            with torch.no_grad():
                whole = piece(bind_inputs(case.graph, rows), Context(False, 7, step, place, size))
            for name in case.graph.outputs:
                assert relative(outputs[name][place : place + size], whole[name]) <= 1e-10, name
