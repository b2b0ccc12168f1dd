"""Sums on one GPU report what sums by messages report: the coordinator checks either in the same way."""

from __future__ import annotations

import threading

import pytest
import torch
from test_gpu_peers import PlayedPeers

from hand_made import summed_network
from manyhands.executor.gpu_sums import GpuSums
from manyhands.executor.messages import expected_messages
from manyhands.executor.projections import SumRecord
from manyhands.executor.reducer import Reducer
from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.agreement import Evidence, evidence_of
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import chunk_points
from manyhands.transport.switchboard import Switchboard

SIZES = [700, 3, 1300, 40]


def summed(devices: tuple[str, ...], places: tuple[str, ...], *, on_gpu: bool) -> dict[str, tuple[SumRecord, list]]:
    """Each device's record of one sum, and its gradients afterwards."""
    network = summed_network(SIZES, "float64")
    reduce = Reduce(0, "gradients", 0, len(SIZES), devices, sum(SIZES) * 8, places=places)
    board, results = Switchboard(devices, limit_seconds=20.0), {}
    errors: list[ManyhandsError] = []

    def work(device: str) -> None:
        endpoint, number = board.endpoints[device], devices.index(device)
        peers = PlayedPeers(device, (), torch.device("cpu"))
        row_bytes = 512 if on_gpu else 0
        endpoint.mailbox.open(0, expected_messages([reduce], device, network, None, lambda action: row_bytes))
        opened.wait(20)
        generator = torch.Generator().manual_seed(number)
        gradients = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
        reducer = Reducer(
            endpoint, network, lambda *_: None, gpu_sums=GpuSums(endpoint, network, peers) if on_gpu else None
        )
        try:
            reducer.start(reduce, 0, gradients)
            reducer.wait()
            results[device] = (reducer.take_records()[0], gradients)
        except ManyhandsError as error:
            errors.append(error)
        finally:
            reducer.close()

    opened = threading.Barrier(len(devices))
    threads = [threading.Thread(target=work, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    return results


@pytest.mark.parametrize("places", [(), ("x", "x", "y", "y")], ids=["alike", "by host"])
def test_records_and_bits_are_those_of_sums_by_messages(places: tuple[str, ...]) -> None:
    devices = ("a", "b", "c", "d") if places else ("a", "b", "c")
    by_messages, on_gpu = (summed(devices, places, on_gpu=flag) for flag in (False, True))
    for device in devices:
        expected, expected_gradients = by_messages[device]
        record, gradients = on_gpu[device]
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected_gradients, strict=True))
        for field in ("own", "norms", "received", "sums", "after"):
            assert len(getattr(record, field)) == len(getattr(expected, field)), field
        assert record.norms == pytest.approx(expected.norms, rel=1e-12)
        assert record.key == expected.key
    network = summed_network(SIZES, "float64")
    reduce = Reduce(0, "gradients", 0, len(SIZES), devices, sum(SIZES) * 8, places=places)
    points = chunk_points(reduce, network)
    counts = [last - first for first, last in zip(points, points[1:])]
    evidence = Evidence()
    evidence_of(reduce, {name: record for name, (record, _) in on_gpu.items()}, counts, "float64", evidence)
    assert not evidence.wrong
    assert not evidence.outvoted
    assert not evidence.disputes
