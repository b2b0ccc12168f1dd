"""Sums of gradients among devices: right, and the same to the last bit everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import summed_network
from manyhands.executor.messages import expected_messages
from manyhands.executor.projections import SumRecord
from manyhands.executor.reducer import Reducer, row_of
from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.graph.weights import dense_gradient
from manyhands.runtime.agreement import Evidence, evidence_of
from manyhands.schedule.actions import Reduce
from manyhands.schedule.device_tree import MOST_DIRECT
from manyhands.schedule.reduction import chunk_points
from manyhands.transport.switchboard import Switchboard

SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3)


def reduce_all(
    gradients: dict[str, list[torch.Tensor]],
    *,
    buckets: int = 1,
    before: Callable[[Switchboard], None] | None = None,
    limit_seconds: float = 20.0,
    late: str = "",
    records: dict[str, list[SumRecord]] | None = None,
    places: tuple[str, ...] = (),
) -> dict[str, ManyhandsError]:
    """Every device hands over its gradients, bucket after bucket, and waits; returns who failed.

    `records`: filled with what each saw of the sums."""
    devices = tuple(gradients)
    first = next(iter(gradients.values()))
    dtype = str(first[0].dtype).removeprefix("torch.")
    sizes = [gradient.numel() for gradient in first]
    network = summed_network(sizes, dtype)
    bounds = [round(i * len(sizes) / buckets) for i in range(buckets + 1)]
    actions = [
        Reduce(0, "gradients", a, b, devices, sum(sizes[a:b]) * first[0].element_size(), places=places)
        for a, b in reversed(list(zip(bounds, bounds[1:])))
        if a < b
    ]
    board = Switchboard(devices, limit_seconds=limit_seconds)
    for device in devices:
        board.endpoints[device].mailbox.open(0, expected_messages(actions, device, network))
    if before is not None:
        before(board)
    errors: dict[str, ManyhandsError] = {}

    def work(device: str) -> None:
        reducer = Reducer(board.endpoints[device], network, lambda *_: None)
        if device == late:
            time.sleep(0.05)
        try:
            for action in actions:
                reducer.start(action, 0, gradients[device][action.first : action.last])
            reducer.wait()
            if records is not None:
                records[device] = reducer.take_records()
        except ManyhandsError as error:
            errors[device] = error
            for other in devices:  # as a coordinator does
                board.endpoints[other].mailbox.interrupt(WorkerLost(f"{device} stopped"))
        reducer.close()

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a device hangs"
    return errors


def drawn(count: int, shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"d{i}": [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        for i in range(count)
    }


def check_sums(
    count: int, shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype, buckets: int,
    places: tuple[str, ...] = (),
) -> None:  # fmt: skip
    gradients = drawn(count, shapes, seed, dtype)
    exact = [torch.stack([own[i].double() for own in gradients.values()]).sum(0) for i in range(len(shapes))]
    assert not reduce_all(gradients, buckets=buckets, places=places)
    for own in gradients.values():
        for found, sure in zip(own, exact):
            assert torch.allclose(found.double(), sure, rtol=0, atol=count * 10 * torch.finfo(dtype).eps)
            assert found.shape == sure.shape
        assert all(torch.equal(found, other) for found, other in zip(own, gradients["d0"]))


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(2, 5), SHAPES, st.integers(0, 999), st.sampled_from([torch.float64, torch.float32]), st.integers(1, 3)
)
def test_every_device_has_the_sum(
    count: int, shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype, buckets: int
) -> None:
    """Also where there are fewer numbers than devices."""
    check_sums(count, shapes, seed, dtype, buckets)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("count", [MOST_DIRECT, MOST_DIRECT + 1, MOST_DIRECT + 3])
def test_many_devices(count: int) -> None:
    check_sums(count, [(7, 5), (3,)], 1, torch.float64, 2)


HOSTS = {
    "2 x 2": ("a", "a", "b", "b"),
    "uneven": ("a", "b", "a", "", "a"),
    "sites": ("p/a", "p/a", "p/b", "r/c", "r/c", "r/d", "s/e"),
}


@pytest.mark.parametrize("places", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("shapes", [[(7, 5), (3,)], [(1,)]])
def test_sums_through_hosts_and_sites(places: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    check_sums(len(places), shapes, 3, torch.float64, len(shapes), places)


@pytest.mark.parametrize("message", range(1, 5))
def test_a_device_lost_between_hosts_fails_everybody(message: int) -> None:
    """At each of its messages: inside its host, then to the other one, and back."""
    boards: list[Switchboard] = []

    def arm(board: Switchboard) -> None:
        board.fail_after("d1", message)
        boards.append(board)

    errors = reduce_all(drawn(4, [(50,)], 0, torch.float64), before=arm, places=HOSTS["2 x 2"])
    assert boards[0].failed == {"d1"}
    assert "d1" in errors
    assert all(isinstance(error, WorkerLost) for error in errors.values())


def test_terms_are_added_in_an_order_of_their_own() -> None:
    """1e16 + 1 - 1e16 is not 1e16 - 1e16 + 1: own first, then the others as the devices are listed, whoever is late."""
    terms = {"a": 1e16, "b": -1e16, "c": 1.0, "d": 1.0}
    for late in terms:
        gradients = {name: [torch.full((8,), value, dtype=torch.float64)] for name, value in terms.items()}
        reduce_all(gradients, late=late)
        chunks = []
        for own in terms:
            total = terms[own]
            for other in terms:
                total += terms[other] if other != own else 0.0
            chunks += [total, total]
        assert all(own[0].tolist() == chunks for own in gradients.values())


def test_channels_last_gradients_are_added_where_they_lie() -> None:
    gradients = drawn(3, [(4, 3, 2, 2)], 1, torch.float64)
    exact = torch.stack([own[0] for own in gradients.values()]).sum(0)
    for own in gradients.values():
        own[0] = own[0].contiguous(memory_format=torch.channels_last)
    places = {name: own[0].data_ptr() for name, own in gradients.items()}
    assert not reduce_all(gradients)
    for name, own in gradients.items():
        assert own[0].data_ptr() == places[name]
        assert torch.allclose(own[0], exact, rtol=1e-14)


@pytest.mark.parametrize("message", [1, 2, 3, 4])
def test_a_lost_device_fails_everybody(message: int) -> None:
    boards: list[Switchboard] = []

    def arm(board: Switchboard) -> None:
        board.fail_after("d1", message)
        boards.append(board)

    errors = reduce_all(drawn(3, [(50,)], 0, torch.float64), before=arm)
    assert boards[0].failed == {"d1"}
    assert "d1" in errors
    assert all(isinstance(error, WorkerLost) for error in errors.values())
    if message <= 2:  # it died before it had handed over all it had: nobody has a sum
        assert set(errors) == {"d0", "d1", "d2"}


def test_waiting_has_a_limit() -> None:
    """One device never comes."""
    board = Switchboard(["a", "b"], limit_seconds=0.2)
    reduce = Reduce(0, "gradients", 0, 1, ("a", "b"), 80)
    network = summed_network([10], "float64")
    board.endpoints["a"].mailbox.open(0, expected_messages([reduce], "a", network))
    reducer = Reducer(board.endpoints["a"], network, lambda *_: None)
    reducer.start(reduce, 0, [torch.zeros(10, dtype=torch.float64)])
    with pytest.raises(TimedOut):
        reducer.wait()
    reducer.close()


def test_a_span_is_told_for_every_bucket() -> None:
    board = Switchboard(["a", "b"])
    reduce = Reduce(0, "gradients", 0, 1, ("a", "b"), 80)
    network = summed_network([10], "float64")
    spans: list[tuple[Reduce, float, float]] = []
    reducers = []
    for name in ("a", "b"):
        board.endpoints[name].mailbox.open(0, expected_messages([reduce], name, network))
    for name in ("a", "b"):
        reducers.append(Reducer(board.endpoints[name], network, lambda *span: spans.append(span)))
        reducers[-1].start(reduce, 0, [torch.zeros(10, dtype=torch.float64)])
    for reducer in reducers:
        reducer.wait()
        reducer.close()
    assert [span[0] for span in spans] == [reduce, reduce]
    assert all(start <= end for _, start, end in spans)


# Memory as rows


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_row_is_the_memory_itself_in_its_order(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(order)
    found = torch.frombuffer(row_of(tensor), dtype=tensor.dtype)
    assert torch.equal(found, torch.arange(float(tensor.numel())))
    assert found.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 1, 3, 3), (4, 3, 1, 1), (1, 3, 2, 2), (1, 1, 1, 1)])
def test_dense_gradients_lie_like_their_weight(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn(shape)
    weight.grad = gradient
    found = dense_gradient(weight)
    assert found.stride() == weight.stride()
    assert torch.equal(found, gradient)
    assert weight.grad is found
    assert dense_gradient(weight) is found


def test_no_gradient_is_a_zero() -> None:
    weight = torch.randn(2, 3).requires_grad_()
    assert torch.equal(dense_gradient(weight), torch.zeros(2, 3))
    assert weight.grad is not None


def test_an_expanded_gradient_is_made_dense() -> None:
    """What sum() hands back has no memory of its own for each number."""
    weight = torch.randn(2, 3).requires_grad_()
    weight.grad = torch.ones(1).expand(2, 3)
    assert len(row_of(dense_gradient(weight))) == 6 * 4


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 3, 5, MOST_DIRECT + 1]), st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    st.integers(0, 999), st.sampled_from(["float32", "float64", "bfloat16"]),
    st.lists(st.sampled_from([0.0, 1e-44, 1e-30, 1e-3, 1.0, 1e20, 1e36]), min_size=MOST_DIRECT + 1),
)  # fmt: skip
def test_honest_devices_never_contradict_each_other(
    count: int, sizes: list[int], seed: int, kind: str, scales: list[float]
) -> None:
    """Whatever the shapes, types and sizes of the numbers: rounding is not taken for a fault."""
    dtype = getattr(torch, kind)
    gradients = drawn(count, [(size,) for size in sizes], seed, dtype)
    for scale, own in zip(scales, gradients.values()):
        for gradient in own:
            gradient *= scale
    records: dict[str, list[SumRecord]] = {}
    assert not reduce_all(gradients, records=records)
    found = contradictions(records, sizes, kind)
    assert found == Evidence()


def contradictions(
    records: dict[str, list[SumRecord]], sizes: Sequence[int], kind: str, places: tuple[str, ...] = ()
) -> Evidence:
    devices, found = tuple(f"d{place}" for place in range(len(records))), Evidence()
    size = torch.empty(0, dtype=getattr(torch, kind)).element_size()
    reduce = Reduce(0, "gradients", 0, len(sizes), devices, sum(sizes) * size, places=places)
    counts = [b - a for a, b in pairwise(chunk_points(reduce, summed_network(sizes, kind)))]
    evidence_of(reduce, {name: own[0] for name, own in records.items()}, counts, kind, found)
    return found


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("places", [("",) * 2, ("",) * 3, ("",) * (MOST_DIRECT + 1), *HOSTS.values()])
def test_a_sum_that_is_not_the_sum_is_found(places: tuple[str, ...]) -> None:
    """In every place where the numbers pass through a device."""
    gradients = drawn(len(places), [(700,), (80,)], 1, torch.float32)
    records: dict[str, list[SumRecord]] = {}
    assert not reduce_all(gradients, records=records, places=places)
    assert contradictions(records, [700, 80], "float32", places) == Evidence()
    own = records["d1"][0]
    for field in ("own", "received", "sums", "after"):
        values = list(getattr(own, field))
        for place, value in enumerate(values):
            for wrong in (value + 1e-2, None):
                changed = msgspec.structs.replace(own, **{field: (*values[:place], wrong, *values[place + 1 :])})
                others = records | {"d1": [changed]}
                assert contradictions(others, [700, 80], "float32", places) != Evidence(), (field, place)
