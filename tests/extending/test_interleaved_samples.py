"""A new way of sharing from outside the package: planned, simulated, trained, saved; refused where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from interleaved import NAME, ByInterleavedSamples, InterleavedGeometry, document, install, register, unregister
from interleaved_runner import InterleavedRunner

from hand_made import chain, cluster, even_profile
from harness import assert_exact, plan_for, relative, run
from manyhands.executor.sharing import register_sharing
from manyhands.facts.errors import BadPlan, BadValue, UnknownName
from manyhands.facts.link import Link
from manyhands.facts.plan import BySamples, ByTiles, Codec, MissingShare, Plan, Share, Single, Stage, received_share
from manyhands.facts.plan_check import resolve
from manyhands.files.documents import read_document, write_document
from manyhands.planner.strategies import choose, plan_by_name, strategy_names
from manyhands.planner.task import Task
from manyhands.plans.planning import Prices
from manyhands.schedule.actions import Reduce
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule
from manyhands.schedule.samples import SampleGeometry
from manyhands.simulator.simulate import simulate
from small_networks import batches_of, captured

SHARE = ByInterleavedSamples()
THREE = ("d0", "d1", "d2")


def task_for(network: Any, names: tuple[str, ...] = THREE, batch_size: int = 6) -> Task:
    return Task(network, cluster(names), even_profile(network, names), batch_size)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_auto_prices_it_among_all_strategies_and_it_can_be_asked_for() -> None:
    task = task_for(chain(4))
    price = Prices(task)
    rows = {candidate.name: candidate for candidate in choose(task, price)}
    assert {"samples", "pipeline", NAME} <= rows.keys()
    assert rows[NAME].plan is not None
    assert rows[NAME].plan.stages[0].share == SHARE
    assert rows[NAME].seconds == pytest.approx(rows["samples"].seconds)  # two samples each, either way
    chosen = plan_by_name(NAME, task, price)[0]
    assert chosen.plan == rows[NAME].plan
    assert NAME in strategy_names()


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_auto_takes_it_where_its_price_is_the_least() -> None:
    task = task_for(chain(4))
    simulated = Prices(task)

    def price(plan: Plan) -> float:
        return simulated(plan) * (0.5 if plan.stages[0].share.by == NAME else 1.0)

    assert choose(task, price)[0].name == NAME


@pytest.mark.usefixtures("registered")
def test_simulates_with_its_own_messages() -> None:
    """From samples side by side to every other one: half of what each device made goes to the other."""
    network = chain(4)
    stages = (Stage((0, 2), ("a", "b"), BySamples((2, 2))), Stage((2, 4), ("c", "d"), SHARE))
    plan = resolve(Plan(network.name, 4, stages), network)
    schedule = Schedule(plan, network)
    machines = cluster(("a", "b", "c", "d"), Link(1e6, 0.001))
    result = simulate(plan, network, machines, even_profile(network, machines.names))
    assert result.seconds > 0
    check(schedule, machines)
    sizes = {
        (device, action.to): action.message.bytes
        for device in ("a", "b")
        for action in schedule.actions[device]
        if hasattr(action, "to") and action.message.kind == "value"
    }
    assert len(set(sizes.values())) == 1
    assert set(sizes) == {(source, target) for source in "ab" for target in "cd"}


def stages_of(case: str, layers: int) -> list[Stage]:
    middle = layers // 2
    if case == "one stage":
        return [Stage((0, layers), THREE[:2], SHARE)]
    if case == "three devices":
        return [Stage((0, layers), THREE, SHARE)]
    if case == "gateway":
        return [Stage((0, layers), THREE, SHARE, reduce="gateway")]
    if case == "after samples":
        return [Stage((0, middle), ("a", "b"), BySamples((1, 2))), Stage((middle, layers), THREE[:2], SHARE)]
    if case == "before one device":
        return [Stage((0, middle), THREE, SHARE), Stage((middle, layers), ("a",), Single())]
    if case == "after tiles":
        return [Stage((0, 3), ("a", "b"), ByTiles((1, 1))), Stage((3, layers), THREE[:2], SHARE)]
    assert case == "twice"
    return [Stage((0, middle), THREE[:2], SHARE), Stage((middle, layers), ("a", "b", "c"), SHARE)]


CASES = ("one stage", "three devices", "gateway", "after samples", "before one device", "after tiles", "twice")


@pytest.mark.quick(every=14)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["norms", "skips"])
def test_trains_as_one_device_does(case: str, name: str) -> None:
    """In float64 to 1e-10; `norms` has batch norms whose statistics all devices of a stage share."""
    graph = captured(name)
    plan = plan_for(graph, stages_of(case, len(graph.network.layers)), batch_size=6, micro_batches=2)
    ran = assert_exact(graph, plan, batches_of(name, 3, 6))
    runners = [runner for executor in ran.executors.values() for runner in executor.runners.values()]
    shared = [runner for runner in runners if isinstance(runner.geometry, InterleavedGeometry)]
    assert shared
    assert all(isinstance(runner, InterleavedRunner) for runner in shared)
    actions = [action for executor in ran.executors.values() for action in executor.actions]
    sums = [action for action in actions if isinstance(action, Reduce) and action.what == "statistics"]
    assert bool(sums) == (name == "norms")


@pytest.mark.usefixtures("registered")
def test_a_stream_gives_what_one_device_gives() -> None:
    graph = captured("norms")
    layers = len(graph.network.layers)
    batches = batches_of("norms", 2, 6)
    plan = plan_for(graph, [Stage((0, layers), THREE, SHARE)], batch_size=6, order="stream")
    # Of its norms, one keeps no running statistics: no device may normalise its samples by themselves.
    with pytest.raises(BadPlan, match=f"shared by {NAME}, but the batch norm still"):
        run(graph, plan, batches)
    graph = captured("skips")
    layers = len(graph.network.layers)
    batches = batches_of("skips", 2, 6)
    outputs = [
        run(graph, plan_for(graph, [stage], batch_size=6, order="stream"), batches).outputs
        for stage in (Stage((0, layers), THREE, SHARE), Stage((0, layers), ("a",)))
    ]
    for ours, theirs in zip(*outputs, strict=True):
        for name, tensor in theirs.items():
            assert relative(ours[name], tensor) <= 1e-10


@pytest.mark.usefixtures("registered")
def test_its_own_checks_refuse_what_would_not_be_exact() -> None:
    graph = captured("small")
    plan = plan_for(graph, [Stage((0, len(graph.network.layers)), THREE, SHARE)], batch_size=6)
    with pytest.raises(BadPlan, match="draws by place"):
        resolve(plan, graph.network)
    with pytest.raises(BadPlan, match="3 devices for 2 samples"):
        resolve(msgspec.structs.replace(plan, batch_size=2), graph.network)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_plan_survives_saving_loading_and_the_wire(tmp_path: Path, suffix: str) -> None:
    share = ByInterleavedSamples("as written")
    plan = Plan("n", 6, (Stage((0, 2), THREE, share, Codec(8)), Stage((2, 4), ("a",))))
    write_document(tmp_path / f"plan.{suffix}", plan.to_dict())
    assert Plan.from_dict(read_document(tmp_path / f"plan.{suffix}")) == plan
    assert plan.to_dict()["stages"][0]["share"] == {"by": NAME, "note": "as written"}
    assert Plan("n", 6, (Stage((0, 2), THREE, SHARE),)).to_dict()["stages"][0]["share"]["by"] == NAME
    sent = msgspec.json.encode(plan)
    assert msgspec.json.decode(sent, type=Plan, dec_hook=received_share) == plan


def test_a_plan_is_refused_where_it_is_not_registered() -> None:
    with pytest.raises(
        BadPlan, match=rf"stages\[0\].share.by is '{NAME}'; .* single, samples, tiles, channels"
    ) as error:
        Plan.from_dict(document(["a", "b"]))
    assert "install that on every device" in error.value.hint
    received = msgspec.json.decode(msgspec.json.encode(document(["a", "b"])), type=Plan, dec_hook=received_share)
    assert received.stages[0].share == MissingShare(NAME)
    with pytest.raises(BadPlan, match=f"is shared by '{NAME}', which is not registered on this device") as error:
        resolve(received, chain(4))
    assert "manyhands.sharing" in error.value.hint
    task = task_for(chain(4))
    with pytest.raises(UnknownName, match=NAME):
        plan_by_name(NAME, task, Prices(task))


@pytest.mark.usefixtures("registered")
def test_what_is_wrong_inside_a_registered_share_is_said_by_its_field() -> None:
    wrong = document(["a", "b"])
    wrong["stages"][0]["share"]["note"] = 3
    with pytest.raises(BadPlan, match=r"stages\[0\].share.note is 3: expected `str`"):
        Plan.from_dict(wrong)
    wrong["stages"][0]["share"] = {"by": NAME, "notes": "a"}
    with pytest.raises(BadPlan, match="there is no field 'notes'") as error:
        Plan.from_dict(wrong)
    assert "note" in error.value.hint


class Taken(msgspec.Struct, Share, frozen=True, tag="samples", tag_field="by"):
    """Its name is another's."""


class Untagged(msgspec.Struct, Share, frozen=True):
    """Plans could not name it."""


def test_registering_refuses_names_that_are_taken() -> None:
    for kind in (Taken, Untagged):
        with pytest.raises(BadValue, match="registered"):
            register_sharing(kind, SampleGeometry)
    register()
    try:
        with pytest.raises(BadValue, match=f"'{NAME}' is registered already"):
            register()  # its strategy is; the sharing is the same
    finally:
        unregister()
    assert NAME not in strategy_names()


PROCESS = """
import sys
from interleaved import NAME, document
from manyhands.facts.plan import Plan
from manyhands.planner.strategies import strategy_names
assert "torch" not in sys.modules
plan = Plan.from_dict(document(["a", "b"]))
assert plan.stages[0].share.by == NAME and NAME in strategy_names()
assert "torch" not in sys.modules, "planning with an extension needs no torch"
print("loaded")
"""


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("is_installed", [True, False])
def test_another_process_has_it_where_its_package_is_installed(tmp_path: Path, is_installed: bool) -> None:
    """By the package's entry point, as on a worker's machine: nothing of it comes over the wire."""
    if is_installed:
        install(tmp_path)
    here = [str(tmp_path), str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(here)}
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ("loaded" in ended.stdout) == is_installed, ended.stderr
    assert is_installed or "it must be one of single, samples, tiles, channels" in ended.stderr
