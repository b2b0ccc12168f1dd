"""mh.infer equals the module at rest for every way of sharing, over real workers, some of which are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from torch import Tensor, nn

import manyhands as mh
from hand_made import even_profile
from manyhands.facts.errors import BadData, BadPlan, CaptureFailed, UnknownName
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.graph.graph import Graph
from manyhands.inference import infer as inference
from manyhands.inference.infer import Inference, captured_at_rest, event_text
from manyhands.runtime.coordinator import Coordinator
from manyhands.session.session import Session
from real_runs import LAYERS, Pictures, assert_same, kill, names, network, restart, shared, workers
from stream_checks import assert_as_planned, only_whole_batches

pytestmark = pytest.mark.xdist_group("inference")  # its workers are started once

SAMPLES = 12
LIMIT_SECONDS = 30.0


def not_measured(session: Session, graph: Graph, *_: Any, **__: Any) -> tuple[mh.Cluster, Profile]:
    return session.cluster, even_profile(graph.network, session.cluster.names)


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    """Devices that are alike, as far as planning goes."""
    with pytest.MonkeyPatch.context() as patch, workers(3) as coordinator:
        patch.setattr(inference, "measure_who_stays", not_measured)
        yield coordinator


@pytest.fixture
def cluster(session: Coordinator) -> Coordinator:
    restart(session)
    return session


def stream(*stages: Stage, size: int = 1) -> Plan:
    return Plan("Sequential", size, stages, order="stream")


def plan_called(kind: str, devices: tuple[str, ...]) -> Plan:
    a, b, c = devices
    if kind == "single":
        return stream(Stage((0, LAYERS), (b,)))
    if kind == "samples":
        return stream(Stage((0, LAYERS), devices, BySamples((2, 1, 1))), size=4)
    if kind == "channels":
        return stream(Stage((0, LAYERS), devices, ByChannels((1, 2, 1))))
    if kind == "pipeline":
        return stream(Stage((0, 1), (a,)), Stage((1, 2), (b,)), Stage((2, LAYERS), (c,)))
    tiles = stream(Stage((0, 2), (a, b), ByTiles((1, 1))), Stage((2, LAYERS), (a,)))
    if kind == "interleaved":
        return msgspec.structs.replace(tiles, order="interleave", batch_size=8, micro_batches=8)
    return tiles


def used() -> nn.Sequential:
    """With buffers that are not those of a new network."""
    model = network()
    with torch.no_grad():
        model(Pictures().pictures * 3 + 1)
    return model


def answers(model: nn.Module, pictures: Tensor) -> Tensor:
    was_training = model.training
    with torch.no_grad():
        found: Tensor = model.eval()(pictures)
    model.train(was_training)
    return found


def assert_near(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    assert float((one - other).abs().max()) <= 1e-10 * float(other.abs().max())


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("kind", ["single", "samples", "pipeline", "tiles", "channels", "interleaved"])
def test_every_way_of_sharing_gives_what_the_module_gives(
    cluster: Coordinator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_whole_batches(monkeypatch)
    model, pictures = used(), Pictures(SAMPLES).pictures
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = plan_called(kind, names(cluster))
    with Inference.open(model, pictures[0], cluster=cluster, plan=plan, memory=True) as running:
        found = torch.stack(list(running.map(pictures)))
        assert running.plan.stages == plan.stages
        assert running.predicted_seconds > 0
    assert_near(found, answers(model, pictures))
    assert_as_planned(
        running.plan, running.graph.network, running.logs, running.bytes_between, SAMPLES // plan.step_size
    )
    assert all(log.peak_bytes > 0 for log in running.logs.values())
    assert (running.answered, running.reruns, running.recoveries) == (SAMPLES, 0, [])
    assert model.training
    assert_same(model.state_dict(), before)


def test_workers_are_killed_in_the_middle(cluster: Coordinator) -> None:
    """Of tiles, and of the pipeline that takes over: every answer comes, rightly and once; what was under way is run
    again, once for each loss. Others of their names come: they take part."""
    model, pictures, devices = used(), Pictures(40).pictures, names(cluster)
    order, at = list[int](), {6: devices[1], 20: devices[2]}
    everybody = plan_called("pipeline", devices)

    def other(plan: Plan, left: tuple[str, ...]) -> tuple[Plan, dict[str, Any]]:
        pair = stream(Stage((0, 1), left[:1]), Stage((1, LAYERS), left[1:]))
        chosen = {1: stream(Stage((0, LAYERS), left)), 2: pair}.get(len(left), everybody)
        return resolve(chosen, running.graph.network), {}

    def answered(number: int) -> None:
        """On the thread that talks to the workers: nothing is answered meanwhile."""
        order.append(number)
        if number in at:
            kill(cluster, at.pop(number))

    with Inference.open(model, pictures[0], cluster=cluster, plan=plan_called("tiles", devices)) as running:
        running.streaming.replan = other
        futures = []
        for number, picture in enumerate(pictures):
            futures.append(running.submit(picture))
            futures[-1].add_done_callback(lambda _, number=number: answered(number))
        found = torch.stack([future.result(LIMIT_SECONDS) for future in futures])
        assert not at, "a fault did not fire"
        assert_near(found, answers(model, pictures))
        first, second = running.recoveries
        assert (first["lost"], first["devices"]) == ([devices[1]], [devices[0], devices[2]])
        assert (second["lost"], second["devices"]) == ([devices[2]], [devices[0]])
        assert 1 <= first["samples"] + second["samples"] == running.reruns <= 6
        assert running.streaming.most_runs == 2
        assert running.answered == 40
        until(lambda: len(order) == 40)  # results are there before callbacks are called
        assert order == list(range(40))
        again = running.reruns
        restart(cluster)
        until(lambda: set(running.plan.devices) == set(devices))
        assert_near(torch.stack(list(running.map(pictures[:8]))), answers(model, pictures[:8]))
        assert running.reruns == again
    assert set(running.logs) == set(devices)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Two(nn.Module):
    """Two inputs, and a dict of what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, wide: Tensor, narrow: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.a(wide)) + self.b(narrow)
        return {"all": x, "most": x.amax(1)}


@pytest.mark.slow
def test_inputs_of_every_kind(cluster: Coordinator) -> None:
    model, data = used().eval(), Pictures(5)
    wanted = answers(model, data.pictures)
    plan = plan_called("single", names(cluster))
    assert_near(mh.infer(model, data.pictures[:1], cluster=cluster, plan=plan), wanted[:1])
    graph = captured_at_rest(model, data.pictures[0], granularity="blocks", name="")
    for inputs in (data.pictures, data.pictures.float(), data, list(data.pictures), (x for x in data.pictures)):
        found = mh.infer(graph, inputs, cluster=cluster, plan=plan)
        assert float((found - wanted).abs().max()) < 1e-6
    assert not model.training
    torch.manual_seed(0)
    two, wide, narrow = Two(), torch.randn(5, 6), torch.randn(5, 3)
    for samples in (list(zip(wide, narrow)), [{"wide": one, "narrow": other} for one, other in zip(wide, narrow)]):
        both = mh.infer(two, samples, cluster=cluster, plan="single")
        with torch.no_grad():
            made = two(wide, narrow)
        assert both.keys() == made.keys()
        assert all(torch.allclose(both[key], made[key], atol=1e-6) for key in made)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.zeros(0, 1, 8, 8), "no samples"), ([], "no samples"), (torch.tensor(1.0), "one number"),
        ({"x": torch.zeros(2, 1, 8, 8)}, "are a dict"), (3, "are a int"),
        ([torch.zeros(1, 8, 8), torch.zeros(1, 8, 7)], r"has shape \(1, 8, 7\)"),
    ],
    ids=["none", "empty", "a number", "a dict", "an int", "two shapes"],
)  # fmt: skip
def test_inputs_that_are_none(cluster: Coordinator, inputs: Any, words: str) -> None:
    with pytest.raises(BadData, match=words):
        mh.infer(used(), inputs, cluster=cluster, plan=plan_called("single", names(cluster)))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", ["model", "graph", "array"])
def test_a_forgotten_batch_axis_is_said_to_be(kind: str) -> None:
    model, sample = used(), Pictures(1).pictures[0]
    graph = captured_at_rest(model, sample, granularity="blocks", name="")
    shape = ", ".join(map(str, sample.shape))
    inputs = sample.numpy() if kind == "array" else sample
    with pytest.raises(BadData, match=rf"shape \({shape}\).*axis is missing.*takes \(samples, {shape}\)") as error:
        mh.infer(graph if kind == "graph" else model, inputs, cluster="away.yaml")
    assert "x[None]" in error.value.hint


def test_inputs_of_a_wrong_shape_are_not_said_to_lack_an_axis() -> None:
    with pytest.raises(CaptureFailed, match="channels"):
        mh.infer(used(), torch.zeros(4, 7, 8, 8), cluster="away.yaml")


@pytest.mark.slow
def test_plans_of_every_kind(cluster: Coordinator, tmp_path: Path) -> None:
    model, pictures, devices = used(), Pictures(3).pictures, names(cluster)
    wanted = answers(model, pictures)
    graph = captured_at_rest(model, pictures[0], granularity="blocks", name="")
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(plan_called("pipeline", devices).to_dict()))
    training = shared(devices[:2], 2, 1)
    for plan in ("auto", "single", "pipeline", str(file), file, training):
        assert_near(mh.infer(graph, pictures, cluster=cluster, plan=plan), wanted)
    with Inference.open(graph, cluster=cluster, objective="throughput") as running:
        assert_near(torch.stack(list(running.map(pictures))), wanted)
        assert running.predicted_of(1) > running.predicted_of(1000) >= 0.99 * running.predicted_seconds
    with pytest.raises(UnknownName, match="sinlge"):
        mh.infer(graph, pictures, cluster=cluster, plan="sinlge")
    with pytest.raises(UnknownName, match="speed"):
        mh.infer(graph, pictures, cluster=cluster, objective="speed")
    with pytest.raises(BadPlan, match="nobody"):
        mh.infer(graph, pictures, cluster=cluster, plan=stream(Stage((0, LAYERS), ("nobody",))))


def test_answers_do_not_wait_for_the_next_sample(cluster: Coordinator) -> None:
    model, pictures = used(), Pictures(4).pictures
    may_come = threading.Semaphore(1)

    def slowly() -> Iterator[Tensor]:
        for picture in pictures:
            assert may_come.acquire(timeout=LIMIT_SECONDS)
            yield picture

    with Inference.open(model, pictures[0], cluster=cluster, plan=plan_called("tiles", names(cluster))) as running:
        found = []
        for answer in running.map(slowly()):
            found.append(answer)
            may_come.release()
        assert_near(torch.stack(found), answers(model, pictures))

        def breaks() -> Iterator[Tensor]:
            yield pictures[0]
            raise OSError("the camera is gone")

        rest = running.map(breaks())
        assert_near(next(rest), answers(model, pictures)[0])
        with pytest.raises(OSError, match="camera"):
            next(rest)
        some = running.map(pictures[place % 4] for place in range(1000))
        next(some)
        some.close()  # type: ignore[attr-defined]
        assert_near(running.submit(pictures[1]).result(LIMIT_SECONDS), answers(model, pictures)[1])


def test_it_is_interrupted(cluster: Coordinator) -> None:
    """As by Ctrl-C: what waits is dropped, and the workers are free for the next."""
    model, pictures = used(), Pictures(3).pictures
    plan = plan_called("pipeline", names(cluster))
    stopped: list[Any] = []

    def interrupted() -> None:
        with Inference.open(model, pictures[0], cluster=cluster, plan=plan) as running:
            stopped.extend(running.submit(pictures[0]) for _ in range(60))
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(stopped) == 60
    assert all(future.done() for future in stopped)
    assert stopped[-1].cancelled()
    assert_near(mh.infer(model, pictures, cluster=cluster, plan=plan), answers(model, pictures))


@pytest.mark.slow
def test_workers_that_were_started_for_it_end_with_it() -> None:
    model, pictures = used(), Pictures(3).pictures
    with Inference.open(model, pictures[0], cluster=mh.Cluster.local(1)) as running:
        process = running.session.coordinator.members["local-1"].facts.pid
        found = torch.stack(list(running.map(pictures)))
    assert_near(found, answers(model, pictures))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_killed_worker_is_done_without_by_whatever_the_planner_says(cluster: Coordinator) -> None:
    model, pictures = used(), Pictures(9).pictures
    devices = names(cluster)
    said: list[str] = []
    plan = plan_called("pipeline", devices)
    with Inference.open(model, pictures[0], cluster=cluster, plan=plan, say=said.append) as running:
        first = running.submit(pictures[0]).result(LIMIT_SECONDS)
        kill(cluster, devices[2])
        found = torch.stack([first, *running.map(pictures[1:])])
        assert_near(found, answers(model, pictures))
        assert devices[2] not in running.plan.devices
    assert [text for text in said if "killed by SIGKILL" in text]
    assert [text for text in said if text.startswith("Going on with")]


def test_what_people_are_told() -> None:
    lost = {"seconds": 1.234, "samples": 2, "devices": ["a", "b"]}
    assert event_text("recovered", lost) == "Going on with a, b after 1.23 s, 2 sample(s) run again."
    assert event_text("recovered", {**lost, "samples": 0}) == "Going on with a, b after 1.23 s."
    assert event_text("joined", {"device": "c"}) == "c joins."
    assert event_text("replanned", {}) == ""
