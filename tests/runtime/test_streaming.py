"""Every sample of a stream is answered once, rightly and in order, whoever is lost, comes or goes meanwhile.

Whole clusters in this process, in float64; see tests/inference/test_infer.py for processes that are killed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fault_cluster import LIMIT_SECONDS, Fault, FaultCluster, captured
from hand_made import cluster as made_cluster
from manyhands.executor.executor import Executor
from manyhands.facts.errors import BadData, BadPlan, ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel
from manyhands.graph.batching import joined, named_sample
from manyhands.graph.capture import capture
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import packable
from manyhands.graph.weights import Weights
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.stream_run import MOST_FED_AHEAD, fed_ahead
from manyhands.runtime.streaming import MOST_WAITING, Streaming
from manyhands.schedule.actions import Forward
from real_runs import LAYERS, Pictures, network
from stream_checks import assert_as_planned, only_whole_batches

pytestmark = pytest.mark.xdist_group("faults")  # captured once

SAMPLES = 20
PICTURES = Pictures(SAMPLES).pictures


def stream(*stages: Stage, size: int = 1, **options: Any) -> Plan:
    return Plan("Sequential", size, stages, **{"order": "stream", **options})


PLANS = {
    "single": stream(Stage((0, LAYERS), ("a",))),
    "samples": stream(Stage((0, LAYERS), ("a", "b", "c"), BySamples((2, 1, 1))), size=4),
    "pipeline": stream(Stage((0, 1), ("a",)), Stage((1, 2), ("b",)), Stage((2, LAYERS), ("c",))),
    "tiles": stream(Stage((0, 2), ("a", "b", "c"), ByTiles((3, 3, 2))), Stage((2, LAYERS), ("c",))),
    "tiles 2x1": stream(Stage((0, 2), ("a", "b"), ByTiles((1, 1))), Stage((2, LAYERS), ("b",))),
    "channels": stream(Stage((0, LAYERS), ("a", "b", "c"), ByChannels((1, 2, 1)))),
    "interleaved": stream(
        Stage((0, 2), ("a", "b"), ByTiles((1, 1))), Stage((2, LAYERS), ("b",)), size=8, order="interleave",
        micro_batches=8,
    ),
}  # fmt: skip


@cache
def answers() -> Tensor:
    """What the module itself gives, at rest."""
    module = network()
    with torch.no_grad():
        found: Tensor = module.eval()(PICTURES)
    return found


def in_turn(plan: Plan, names: tuple[str, ...]) -> Plan:
    """A pipeline over whoever is there."""
    if len(names) == 1:
        return stream(Stage((0, LAYERS), names))
    return stream(Stage((0, 1), names[:1]), Stage((1, LAYERS), names[-1:]))


class Stream:
    """A stream over a cluster of threads, and what it told."""

    def __init__(
        self, cluster: FaultCluster, plan: Plan, replan: Callable[..., Plan] = in_turn, limit_seconds: float = 30.0,
        retry_policy: RetryPolicy | None = None, at_event: dict[str, Callable[[], None]] | None = None,
        graph: Graph | None = None, kernels: dict[str, Kernel] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.cluster, self.graph = cluster, graph or captured()
        self.logged: list[tuple[str, dict[str, Any]]] = []
        self.plans: list[Plan] = []
        self.order: list[int] = []
        """Samples as they were answered."""
        left = dict(at_event or {})

        def log_event(event: str, /, **facts: Any) -> None:
            self.logged.append((event, facts))
            left.pop(event, lambda: None)()

        def change(old: Plan, names: tuple[str, ...]) -> tuple[Plan, dict[str, Any]]:
            self.plans.append(resolve(replan(old, names), self.graph.network, made_cluster(names)))
            return self.plans[-1], dict.fromkeys(names, kernels or {})

        first = resolve(plan, self.graph.network, made_cluster(plan.devices))
        order = Order(self.graph, first, RunState(Weights.copied(self.graph).tensors), 0)
        order.kernels = dict.fromkeys(plan.devices, kernels or {})
        order.wait_limit_seconds = limit_seconds
        self.own = Streaming(cluster.coordinator, order, change, retry_policy, log_event=log_event, **options)

    def submit(self, number: int) -> Any:
        future = self.own.submit(named_sample(self.graph, PICTURES[number]))
        future.add_done_callback(lambda _: self.order.append(number))
        return future

    def ask(self, first: int = 0, last: int = SAMPLES) -> None:
        """So many samples, answered rightly and in order."""
        futures = [self.submit(number) for number in range(first, last)]
        found = joined(self.graph, [future.result(LIMIT_SECONDS) for future in futures])
        assert torch.allclose(found, answers()[first:last], rtol=0, atol=1e-10)
        self.cluster.until(lambda: len(self.order) >= last)
        assert self.order[-len(futures) :] == list(range(first, last))

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.logged]


@contextmanager
def streaming(plan: str | Plan, *faults: Fault, names: str = "abc", **options: Any) -> Iterator[Stream]:
    with FaultCluster(tuple(names), *faults) as cluster:
        found = Stream(cluster, PLANS[plan] if isinstance(plan, str) else plan, **options)
        found.own.start()
        try:
            yield found
        finally:
            found.own.close(cancel=True)
        assert cluster.strange == []
        for fault in faults:
            assert len(fault.fired) == 1, fault


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("name", list(PLANS))
def test_answers_are_the_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_whole_batches(monkeypatch)
    with streaming(name) as found:
        found.ask()
        found.own.close()
        own = found.own
        assert_as_planned(own.plan, found.graph.network, own.logs, own.bytes_between, SAMPLES // own.plan.step_size)
        assert own.error is None
        assert (own.answered_samples, own.reruns, own.generations) == (SAMPLES, 0, 1)
        assert found.logged == []


@pytest.mark.slow
def test_weights_are_laid_out_for_kernels_when_they_have_come() -> None:
    """Before that they are empty; after a loss they come, and are laid out, anew."""
    module = network(dtype=torch.float32).eval()
    graph = capture(module, PICTURES[:2].float(), granularity="blocks")
    read_document(to_document(graph))
    kernels = {name: Kernel(channels_last=True, packed=True) for name in packable(graph)}
    assert len(kernels) == 2
    with streaming("pipeline", graph=graph, kernels=kernels) as found:

        def assert_answers(first: int, last: int) -> None:
            some = PICTURES[first:last].float()
            futures = [found.own.submit(named_sample(graph, one)) for one in some]
            answered = joined(graph, [future.result(LIMIT_SECONDS) for future in futures])
            with torch.no_grad():
                assert torch.allclose(answered, module(some), rtol=0, atol=1e-5)

        def packed_by(name: str) -> int:
            prepared = found.cluster.workers[name].prepared
            assert prepared is not None
            assert prepared.executor is not None
            return sum(tensor.is_mkldnn for tensor in prepared.executor.weights.tensors.values())

        assert_answers(0, 8)
        assert [packed_by(name) for name in "abc"] == [1, 1, 0]
        found.cluster.transport.cut("b")
        found.cluster.until(lambda: "recovered" in found.events)
        assert_answers(8, 16)
        assert [packed_by(name) for name in "ac"] == [1, 1]


FAULTS = [
    ("tiles", "a", "receive", "killed"), ("tiles", "b", "forward", "silent"), ("tiles", "c", "send", "killed"),
    ("tiles", "b", "feed", "killed"), ("pipeline", "a", "send", "silent"),
    ("pipeline", "b", "receive", "killed"), ("pipeline", "c", "forward", "killed"),
    ("samples", "b", "forward", "killed"), ("channels", "c", "receive", "silent"),
    ("channels", "a", "send", "killed"), ("interleaved", "a", "receive", "killed"),
    ("interleaved", "b", "forward", "silent"),
]  # fmt: skip


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("plan", "device", "place", "kind"), FAULTS)
def test_one_is_lost(plan: str, device: str, place: str, kind: str) -> None:
    """In the middle: what is under way is run once more, what was answered is not."""
    fault = Fault(device, place, kind, step={"samples": 3, "interleaved": 8}.get(plan, 7))
    with streaming(plan, fault) as found:
        found.ask()
        own, most = found.own, fed_ahead(PLANS[plan]) * PLANS[plan].step_size
        assert 1 <= own.reruns <= most
        assert own.most_runs == 2
        assert own.generations == 2
        (recovery,) = own.recoveries
        assert recovery["samples"] == own.reruns
        assert recovery["lost"] == [device]
        assert recovery["devices"] == list(found.plans[0].devices)
        assert device not in recovery["devices"]
        assert found.events == ["lost", "replanned", "recovered"]
        assert found.order == list(range(SAMPLES))


def test_one_after_another_until_one_is_left() -> None:
    one = Fault("b", "forward", step=3)
    with streaming("pipeline", one, Fault("a", "forward", "silent", step=9, after=one)) as found:
        found.ask()
        assert [facts["lost"] for facts in found.own.recoveries] == [["b"], ["a"]]
        assert found.own.plan.devices == ("c",)
        assert found.own.most_runs <= 3


def test_another_is_lost_while_it_recovers() -> None:
    one = Fault("b", "forward", step=5)
    with streaming("pipeline", one, Fault("a", "prepare", after=one)) as found:
        found.ask()
        assert found.own.most_runs == 2  # nothing was fed in between
        (recovery,) = found.own.recoveries
        assert recovery["lost"] == ["b", "a"]


def test_a_link_breaks_between_two_who_live() -> None:
    with streaming("pipeline", Fault("a", "forward", "unlinked", step=5, to="b")) as found:
        found.ask()
        assert len(found.own.recoveries) == 1
        assert found.own.plan.devices == ("a", "c")  # as it was planned anew


def test_one_is_lost_while_nobody_asks() -> None:
    with streaming("pipeline") as found:
        found.ask(0, 3)
        found.cluster.transport.cut("b")
        found.cluster.until(lambda: "recovered" in found.events)
        found.ask(3, 8)
        assert found.own.reruns == 0
        assert found.own.plan.devices == ("a", "c")


def test_nobody_is_left() -> None:
    with streaming("pipeline", Fault("a", "forward", step=2, also=("b", "c"))) as found:
        futures = [found.submit(number) for number in range(6)]
        lost = [future.exception(LIMIT_SECONDS) for future in futures[3:]]
        few = "0 device(s) left, at least 1 needed."
        assert all(isinstance(error, WorkerLost) and error.message.endswith(few) for error in lost)
        with pytest.raises(WorkerLost, match="was lost"):
            found.submit(6)


def test_nobody_is_left_and_others_come() -> None:
    fault = Fault("a", "forward", step=4, also=("b", "c"))

    def restart() -> None:
        for name in ("d", "b"):
            found.cluster.start(name)

    with streaming(
        "pipeline", fault, retry_policy=RetryPolicy(min_devices=2, wait_seconds=20), at_event={"waiting": restart}
    ) as found:
        found.ask()
        assert set(found.own.plan.devices) == {"b", "d"}


def test_it_gives_up_where_nothing_is_ever_answered() -> None:
    faults = [Fault("b", "forward", step=2)]
    for _ in range(6):
        faults.append(Fault("b", "load", after=faults[-1]))
    with FaultCluster(("a", "b"), *faults) as cluster:
        found = Stream(
            cluster, in_turn(PLANS["single"], ("a", "b")), retry_policy=RetryPolicy(attempts=3),
            replan=lambda plan, names: in_turn(plan, ("a", "b")),
        )  # fmt: skip
        found.own.log_event = lambda event, /, **facts: cluster.start("b") if event == "lost" else None
        found.own.start()
        futures = [found.submit(number) for number in range(8)]
        assert isinstance(futures[-1].exception(LIMIT_SECONDS), WorkerLost)
        found.own.close()
        assert [len(fault.fired) for fault in faults] == [1, 1, 1, 1, 0, 0, 0]


# Coming and going


def test_one_joins_and_one_leaves() -> None:
    with streaming("single", names="a") as found:
        found.ask(0, 4)
        found.cluster.start("b")
        found.cluster.until(lambda: found.own.generations == 2)
        found.ask(4, 10)
        assert found.own.plan.devices == ("a", "b")
        found.cluster.ask_to_leave("a")
        found.cluster.until(lambda: ("a", None) in found.cluster.ended)
        found.ask(10, 16)
        assert found.own.plan.devices == ("b",)
        assert found.own.reruns == 0
        assert [event for event in found.events if event != "replanned"] == [
            "joined", "recovered", "leaving", "left", "recovered",
        ]  # fmt: skip


def test_one_joins_while_samples_are_under_way() -> None:
    with streaming("single", names="a") as found:
        joining = threading.Thread(target=lambda: found.cluster.start("b"))
        for turn in range(40):
            futures = [found.submit(number) for number in range(SAMPLES)]
            if turn == 1:
                joining.start()
            found_now = joined(found.graph, [future.result(LIMIT_SECONDS) for future in futures])
            assert torch.allclose(found_now, answers(), rtol=0, atol=1e-10)
            if found.own.generations == 2:
                break
        joining.join(LIMIT_SECONDS)
        found.cluster.until(lambda: found.own.generations == 2)
        assert found.own.reruns == 0
        assert found.own.plan.devices == ("a", "b")


# Waiting


@pytest.mark.slow
def test_nobody_asks_for_longer_than_anybody_waits() -> None:
    """The limit is for what is under way."""
    with streaming("tiles", limit_seconds=0.3) as found:
        for first in (0, 4):
            time.sleep(0.8)
            found.ask(first, first + 4)
        assert found.own.generations == 1
        assert found.logged == []


def test_what_is_under_way_and_does_not_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, act = threading.Event(), Executor._act

    def hang(self: Executor, action: Any) -> None:
        if isinstance(action, Forward) and self.device == "b" and self.step == 2:
            hung.wait(LIMIT_SECONDS)
        act(self, action)

    monkeypatch.setattr(Executor, "_act", hang)
    with streaming("pipeline", limit_seconds=0.5) as found:
        try:
            futures = [found.submit(number) for number in range(5)]
            for number in range(200):  # others who ask are no sign of life of those who are asked
                if futures[-1].done():
                    break
                with contextlib.suppress(TimedOut):  # it may have ended since
                    futures.append(found.submit(number % SAMPLES))
                time.sleep(0.02)
            assert futures[1].done()
            error = futures[4].exception(LIMIT_SECONDS)
            assert isinstance(error, TimedOut)
            assert "to answer batch 2" in error.message
        finally:
            hung.set()


def test_there_is_room_for_so_many() -> None:
    with FaultCluster(("a",)) as cluster:
        found = Stream(cluster, PLANS["single"], most_waiting=3)
        waiting = [found.submit(number) for number in range(3)]  # before it starts
        start = time.monotonic()
        with pytest.raises(TimedOut, match=r"no room for more.*\n.*a cluster of more devices \(--devices\)"):
            found.own.submit(named_sample(found.graph, PICTURES[3]), 0.1)
        assert time.monotonic() - start < 2
        assert waiting[1].cancel()
        found.own.start()
        futures = [found.submit(number) for number in range(3, 9)]
        for number, future in zip([0, 2, *range(3, 9)], [waiting[0], waiting[2], *futures]):
            assert torch.allclose(future.result(LIMIT_SECONDS), answers()[number], rtol=0, atol=1e-10)
        found.own.close()
        assert found.own.answered_samples == 8


@pytest.mark.slow
def test_many_who_ask_at_once() -> None:
    wanted = answers()
    with streaming("tiles") as found:
        lock, asked, wrong = threading.Lock(), list[int](), list[int]()

        def ask(first: int) -> None:
            for number in range(first, SAMPLES, 4):
                with lock:
                    asked.append(number)
                    future = found.submit(number)
                if not torch.allclose(future.result(LIMIT_SECONDS), wanted[number], rtol=0, atol=1e-10):
                    wrong.append(number)

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        assert wrong == []
        assert sorted(asked) == list(range(SAMPLES))
        found.cluster.until(lambda: len(found.order) == SAMPLES)  # results are there before callbacks are called
        assert found.order == asked


# Batches


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_a_batch_that_is_not_full(count: int) -> None:
    with streaming("samples") as found:
        start = time.monotonic()
        found.ask(0, count)
        assert time.monotonic() - start < 2
        found.own.close()
        assert found.own.answered_samples == count


def test_batches_of_others_after_a_loss() -> None:
    """What was under way in batches of four is run again one by one."""
    with streaming("samples", Fault("c", "forward", step=2)) as found:
        found.ask()
        assert found.own.plan.batch_size == 1
        assert found.own.reruns % 4 == 0


# The end


def test_closed_with_samples_that_wait() -> None:
    with streaming("pipeline") as found:
        futures = [found.submit(number) for number in range(SAMPLES)]
        found.own.close()
        assert all(future.done() for future in futures)
        results = joined(found.graph, [future.result(0) for future in futures])
        assert torch.allclose(results, answers(), rtol=0, atol=1e-10)
        with pytest.raises(ManyhandsError, match="closed"):
            found.submit(0)
        found.own.close()


def test_closed_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, act = threading.Event(), Executor._act

    def hang(self: Executor, action: Any) -> None:
        if isinstance(action, Forward) and self.step == 1:
            hung.wait(LIMIT_SECONDS)
        act(self, action)

    monkeypatch.setattr(Executor, "_act", hang)
    with streaming("pipeline") as found:
        futures = [found.submit(number) for number in range(SAMPLES)]
        futures[0].result(LIMIT_SECONDS)
        found.cluster.until(lambda: futures[2].running())
        start = time.monotonic()
        found.own.close(cancel=True)
        assert time.monotonic() - start < 5
        assert all(future.done() for future in futures)
        assert futures[-1].cancelled()
        assert "closed before" in str(futures[1].exception(0))
        assert found.own.error is None
        hung.set()


def test_a_plan_that_cannot_be_run() -> None:
    """Nothing that the next try would mend."""
    with FaultCluster(("a", "b")) as cluster:
        found = Stream(cluster, stream(Stage((0, LAYERS), ("a", "b"), ByTiles((1, 1)))))
        with pytest.raises(BadPlan, match="cannot be cut into rows"):
            found.own.start()
        with pytest.raises(BadPlan, match="cannot be cut into rows"):
            found.submit(0)


def test_one_is_gone_before_it_begins() -> None:
    with streaming("pipeline", names="ac") as found:
        found.ask(0, 4)
        assert found.own.plan.devices == ("a", "c")


def test_what_does_not_fit_is_refused_and_nobody_minds() -> None:
    with streaming("single", names="a") as found:
        for sample, words in (
            (PICTURES[:1], "give them one by one"), (PICTURES[0][:, :4], r"\(1, 4, 8\)"), ("text", "must be a tensor"),
            ((PICTURES[0], PICTURES[0]), "does not fit the example"),
        ):  # fmt: skip
            with pytest.raises(BadData, match=words):
                named_sample(found.graph, sample)
        found.ask(0, 4)


def test_how_far_ahead_is_fed() -> None:
    assert fed_ahead(PLANS["single"]) == 3
    assert fed_ahead(PLANS["pipeline"]) == 4
    stages = tuple(Stage((0, 1), (str(place),)) for place in range(12))
    assert fed_ahead(stream(*stages)) == MOST_FED_AHEAD


def test_whoever_is_answered_may_ask_again() -> None:
    """On the thread that answers, which nobody else can relieve."""
    with streaming("single", names="a", most_waiting=2) as found:
        again: list[Any] = []
        first = found.submit(0)
        first.add_done_callback(lambda _: again.extend(found.submit(number) for number in range(1, 7)))
        first.result(LIMIT_SECONDS)
        found.cluster.until(lambda: len(again) == 6)
        for number, future in enumerate(again, 1):
            assert torch.allclose(future.result(LIMIT_SECONDS), answers()[number], rtol=0, atol=1e-10)


def test_memory_is_given_back_when_a_sample_is_answered() -> None:
    with streaming("single", names="a") as found:
        found.ask()
        assert found.own.waiting == 0
        assert not found.own._under_way
        assert len(found.cluster.coordinator.endpoint.mailbox._messages) == 0
        assert MOST_WAITING >= SAMPLES
