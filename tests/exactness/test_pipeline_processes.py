"""Hybrid pipelines over real processes: as one device, within predicted memory, and busy while links are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from hand_made import cluster as cluster_of
from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.facts.cluster import Cluster
from manyhands.facts.link import Link
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.job import base as job
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.measuring import probe_links
from manyhands.runtime.processes import WorkerProcess
from manyhands.schedule.actions import Message, Receive, Send, parse_action
from manyhands.session import measuring
from real_runs import ADAM, CLASSES, Pictures, Ran, assert_close, names, train, workers

pytestmark = [
    pytest.mark.xdist_group("pipeline_processes"),  # its workers are started once
    pytest.mark.usefixtures("strangers"),
]

DEVICES = 4
LAYERS = 11
"""Of the network below, one for each operator."""
MICRO_BATCHES = 6
MARGIN = 1.1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(DEVICES) as coordinator:
        yield coordinator


class Ladder(nn.Module):
    """Convolutions in four layers; the first one's maps are read by all later ones."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, width, 3, padding=1)
        self.b = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.c = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.d = nn.Linear(width * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        x = self.c(torch.cat([self.b(first), first], 1))
        out: Tensor = self.d((x + first).flatten(1))
        return out


def ladder(width: int = 4, dtype: torch.dtype = torch.float64) -> Ladder:
    torch.manual_seed(3)
    return Ladder(width).to(dtype)


def staged(devices: tuple[str, ...], *shares: tuple[int, ...], cuts: tuple[str, ...], **options: Any) -> Plan:
    """Stages between named layers, the devices in order."""
    ends: tuple[int | str, ...] = (0, *cuts, LAYERS)
    left = list(devices)
    stages = []
    for between, samples in zip(pairwise(ends), shares, strict=True):
        own = tuple(left.pop(0) for _ in samples)
        stages.append(Stage(between, own, BySamples(samples) if len(samples) > 1 else Single()))
    return Plan("Ladder", sum(shares[0]) * MICRO_BATCHES, tuple(stages), micro_batches=MICRO_BATCHES, **options)


@pytest.mark.slow
def test_shares_and_skips_over_processes_equal_one_device(cluster: Coordinator, tmp_path: Path) -> None:
    """A shared stage among single ones; what the first stage makes goes to both others."""
    plan = staged(names(cluster), (3,), (1, 2), (3,), cuts=("b.0", "c.0"))
    common = {"optimizer": ADAM, "steps": 4, "batch_size": plan.batch_size, "granularity": "operators"}
    ran = train(cluster, plan, tmp_path / "shared", model=ladder(), data=Pictures(72), **common)
    ran.assert_as_planned()
    one = train(
        cluster, "single", tmp_path / "single", model=ladder(), data=Pictures(72), micro_batches=MICRO_BATCHES, **common
    )
    assert_close(ran.state, one.state)
    assert ran.result.losses == pytest.approx(one.result.losses, rel=1e-10)
    first, last = plan.stages[0].devices[0], plan.stages[2].devices[0]
    assert ran.result.logs[first].sent_bytes[last] == 4 * 8 * 4 * 64 * plan.batch_size  # the skip, in float64


@pytest.mark.slow
def test_measured_memory_stays_within_what_was_predicted(cluster: Coordinator, tmp_path: Path) -> None:
    """Every device counts in one step of the run; 1F1B holds K_p micro-batches, GPipe all of them."""
    peaks = {}
    for order in ("1f1b", "gpipe"):
        plan = staged(names(cluster), (6,), (4, 2), (6,), cuts=("b.0", "c.0"), order=order, warm_up="P-p")
        ran = train(
            cluster, plan, tmp_path / order, model=ladder(16), data=Pictures(72), steps=3, batch_size=plan.batch_size,
            granularity="operators",
        )  # fmt: skip
        ran.assert_as_planned()
        for device, log in ran.result.logs.items():
            predicted = ran.planned.prediction.devices[device]
            assert 0 < log.peak_bytes <= MARGIN * predicted.peak_bytes, device
        first = plan.stages[0].devices[0]
        assert ran.planned.prediction.devices[first].most_micro_batches_held == (3 if order == "1f1b" else 6)
        peaks[order] = ran.result.logs[first].peak_bytes
    assert peaks["gpipe"] > 1.5 * peaks["1f1b"]


# Over slow links


class Deep(nn.Module):
    """Convolutions one after another, and a linear layer."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.convs = nn.Sequential(*(nn.Conv2d(width, width, 3, padding=1) for _ in range(4)))
        self.last = nn.Linear(width * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for conv in self.convs:
            x = torch.relu(conv(x))
        out: Tensor = self.last(x.flatten(1))
        return out


RATE = 1e6
DELAY = 0.002


@contextlib.contextmanager
def slow_workers(count: int) -> Iterator[Coordinator]:
    """Workers whose links are made slow; they are not measured, which would take long."""
    shaping: Cluster = cluster_of([f"slow{number}" for number in range(count)], Link(RATE, DELAY))
    patch = pytest.MonkeyPatch()
    patch.setattr(measuring, "_with_links", lambda _, own: own)
    patch.setattr(job.Job, "write_pictures", lambda *_: None)
    patch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    try:
        with Coordinator() as coordinator:
            coordinator.wanted, coordinator.shaping = set(shaping.names), shaping
            coordinator.start_workers([WorkerProcess((name,)) for name in shaping.names], 1, 60)
            yield coordinator
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The first stage, of four convolutions, on two devices, the second on one."""
    torch.manual_seed(3)
    with slow_workers(3) as coordinator:
        plan = staged(names(coordinator), (3, 1), (4,), cuts=("convs.3",), bucket_bytes=1)
        plan = msgspec.structs.replace(plan, network="Deep")
        yield train(
            coordinator, plan, tmp_path_factory.mktemp("slow"), model=Deep(), steps=6,
            data=Pictures(96, dtype=torch.float32), batch_size=plan.batch_size, granularity="operators",
        )  # fmt: skip


def last_step(log: DeviceLog) -> list[MeasuredSpan]:
    step = max(span.step for span in log.spans)
    return [span for span in log.spans if span.step == step]


def transfers(ran: Ran) -> Iterator[tuple[str, str, Message, float, float]]:
    """Sender, receiver, message, and when it was under way for certain: from when it was sent, at the link's rate."""
    arrived = {}
    for device, log in ran.result.logs.items():
        for span in last_step(log):
            if span.kind == "receive":
                action = parse_action(span.text)
                assert isinstance(action, Receive)
                arrived[action.source, device, action.message] = span.end
    for device, log in ran.result.logs.items():
        for span in last_step(log):
            if span.kind == "send":
                action = parse_action(span.text)
                assert isinstance(action, Send)
                least = action.message.bytes / RATE
                assert arrived[device, action.to, action.message] - span.start >= 0.9 * least  # the link is slow
                yield device, action.to, action.message, span.start, span.start + 0.9 * least


def computing(ran: Ran, device: str, start: float, end: float) -> float:
    """Seconds of forward and backward passes on a device within a time."""
    spans = [span for span in last_step(ran.result.logs[device]) if span.kind in ("forward", "backward")]
    return sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in spans)


@pytest.mark.slow
def test_devices_compute_while_messages_travel(slow_run: Ran) -> None:
    """The first stage goes on with the next micro-batch while one leaves, the last stage while the next one comes."""
    slow_run.assert_as_planned()
    found = list(transfers(slow_run))
    assert {message.kind for _, _, message, _, _ in found} == {"value", "gradient"}
    values = [one for one in found if one[2].kind == "value"]
    first, last = slow_run.result.plan.stages
    for device in first.devices:
        assert sum(computing(slow_run, a, start, end) for a, _, _, start, end in values if a == device) > 0, device
    for device in last.devices:
        assert sum(computing(slow_run, b, start, end) for _, b, _, start, end in values if b == device) > 0, device


@pytest.mark.slow
def test_gradients_are_added_up_while_backward_goes_on(slow_run: Ran) -> None:
    """The reduction of a bucket begins before the stage's last backward pass has ended: in some step, for the thread
    that reduces may be let on late by a machine that does other things too."""
    slow_run.assert_as_planned()
    for device in slow_run.result.plan.stages[0].devices:
        has_overlapped = []
        for step in {span.step for span in slow_run.result.logs[device].spans}:
            spans = [span for span in slow_run.result.logs[device].spans if span.step == step]
            reductions = [span for span in spans if span.kind == "reduce" and " gradients " in span.text]
            ended = max(span.end for span in spans if span.kind == "backward")
            assert len(reductions) == 4
            has_overlapped.append(min(span.start for span in reductions) < ended)
        assert any(has_overlapped), device


@pytest.mark.slow
def test_every_pair_is_measured_by_itself() -> None:
    """One pair of three has a slower link, each way its own, and a longer delay; the others are alike."""
    shaping = cluster_of(["a", "b", "c"], Link(40e6, 0.001))
    shaping = shaping.with_link(Link(15e6, 0.02), ("a", "b")).with_link(Link(25e6, 0.02), ("b", "a"))
    with Coordinator() as coordinator:
        coordinator.wanted, coordinator.shaping = set(shaping.names), shaping
        coordinator.start_workers([WorkerProcess((name,)) for name in shaping.names], 1, 60)
        found = probe_links(coordinator, shaping.names)
    for sender in shaping.names:
        for receiver in set(shaping.names) - {sender}:
            measured, real = found[sender].links[receiver], shaping.link_between(sender, receiver)
            assert 0.6 * real.bytes_per_second < measured.bytes_per_second < 1.2 * real.bytes_per_second
            assert real.delay_seconds <= measured.delay_seconds < real.delay_seconds + 0.02
