"""Plans: they survive being written down, and every mistake is refused by field, value and limit."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings

from drawn_plans import plans
from hand_made import chain, changed, cluster
from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, Plan, Single, Stage
from manyhands.facts.plan_check import group_ops, layer_range, resolve

CHAIN = chain(6)
CLUSTER = cluster([f"d{i}" for i in range(12)] + ["phone"])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plans(CHAIN))
def test_a_plan_survives_being_written_down(plan: Plan) -> None:
    document = plan.to_dict()
    assert Plan.from_dict(document) == plan
    assert Plan.from_dict(json.loads(json.dumps(document))) == plan
    assert Plan.from_dict(yaml.safe_load(yaml.safe_dump(document))) == plan


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(plans(CHAIN, repeats=True))
def test_a_drawn_plan_is_accepted_and_resolving_again_changes_nothing(plan: Plan) -> None:
    resolved = resolve(plan, CHAIN, CLUSTER)
    assert resolve(resolved, CHAIN, CLUSTER) == resolved


def test_only_what_was_decided_is_written() -> None:
    plan = Plan.from_dict(simple())
    assert json.loads(json.dumps(plan.to_dict())) == {**simple(), "micro_batches": 1, "order": "1f1b"}
    assert isinstance(plan.stages[0].share, Single)


def test_layers_may_be_named() -> None:
    document = simple()
    document["stages"][0]["layers"] = ["layer0", "layer2"]
    document["stages"][1]["layers"] = ["layer2", 6]
    document["stages"][1]["share"] = {"by": "tiles", "rows": [1], "forward_groups": ["layer2", "layer4"]}
    resolved = resolve(Plan.from_dict(document), CHAIN)
    assert [layer_range(stage) for stage in resolved.stages] == [(0, 2), (2, 6)]
    share = resolved.stages[1].share
    assert isinstance(share, ByTiles)
    assert (share.forward_groups, share.backward_groups) == ((2, 4), None)


def test_groups_may_start_at_operators_by_name() -> None:
    """One that starts a layer becomes that layer's number; one inside a layer keeps its name."""
    network = chain(3, operators_per_layer=3)
    share = ByTiles((1, 1), (1,), ("conv0", "conv2", "layer1", "conv7"), (0, "conv1", "conv6"))
    plan = resolve(Plan("chain", 2, (Stage((0, 3), ("d0", "d1"), share),)), network)
    resolved = plan.stages[0].share
    assert isinstance(resolved, ByTiles)
    assert resolved.forward_groups == (0, "conv2", 1, "conv7")
    assert resolved.backward_groups == (0, "conv1", 2)
    assert group_ops(resolved.forward_groups, network) == (0, 2, 3, 7)
    assert group_ops(resolved.backward_groups, network) == (0, 1, 6)
    assert resolve(plan, network) == plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_grid_is_filled_row_by_row_and_depth_by_depth() -> None:
    flat, deep = ByTiles((1, 3), (2, 1, 1)), ByTiles((1, 1), (1, 3), depths=(3, 1))
    assert [flat.cell(place) for place in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [deep.cell(place) for place in (0, 1, 2, 4, 7)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]
    assert (flat.grid_text, deep.grid_text, ByTiles((1, 1), depths=(1,)).grid_text) == ("2x3", "2x2x2", "2x1")
    assert [flat.part(place) for place in (0, 5)] == [1 / 8, 3 / 16]
    assert deep.part(1) == 3 / 4 / 2 * 3 / 4
    assert sum(deep.part(place) for place in range(8)) == pytest.approx(1)


def test_a_depth_is_written_where_it_is_cut() -> None:
    stage = Stage((0, 1), ("a", "b"), ByTiles((1,), depths=(2, 1)))
    plan = Plan("chain", 2, (stage,))
    assert plan.to_dict()["stages"][0]["share"] == {"by": "tiles", "rows": (1,), "columns": (1,), "depths": (2, 1)}
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    before = {"by": "tiles", "rows": [1, 2], "columns": [1]}  # as plans were written before there was a depth
    document = {"layers": [0, 1], "devices": ["a", "b"], "share": before}
    old = Plan.from_dict({"network": "chain", "batch_size": 2, "stages": [document]})
    assert old.stages[0].share == ByTiles((1, 2))
    assert json.loads(json.dumps(old.to_dict()))["stages"][0]["share"] == before


@pytest.mark.parametrize("depths", [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0), (1.0,) * 3])
def test_depths_that_are_no_sizes_are_refused(depths: tuple[float, ...]) -> None:
    with pytest.raises(BadPlan, match=r"all must be > 0|a grid of 3x1x1 = 3 tiles; there are 2 devices"):
        resolve(Plan("chain", 2, (Stage((0, 6), ("a", "b"), ByTiles((1,), depths=depths)),)), CHAIN)


@pytest.mark.parametrize("groups", [("conv0", "conv2", "conv2"), ("conv0", "conv2", "conv1"), ("conv1", "conv2")])
def test_groups_at_operators_must_increase_too(groups: tuple[str, ...]) -> None:
    network = chain(3, operators_per_layer=3)
    plan = Plan("chain", 2, (Stage((0, 3), ("d0", "d1"), ByTiles((1, 1), (1,), groups)),))
    with pytest.raises(BadPlan, match=r"stages\[0\].share.forward_groups is .*; its first|; it must increase"):
        resolve(plan, network)


@pytest.mark.parametrize(
    ("order", "micro_batches", "may"),
    [("sequential", 4, True), ("gpipe", 4, True), ("stream", 4, True), ("1f1b", 1, True), ("1f1b", 2, False),
     ("eager", 1, False)],
)  # fmt: skip
def test_a_device_may_work_in_two_stages_where_all_pass_in_one_order(order: Any, micro_batches: int, may: bool) -> None:
    document = changed_plan({"stages.1.devices": ["d0"], "order": order, "micro_batches": micro_batches})
    if may:
        assert resolve(Plan.from_dict(document), CHAIN, CLUSTER).devices == ("d0",)
        return
    with pytest.raises(BadPlan, match="the two could wait for each other") as caught:
        resolve(Plan.from_dict(document), CHAIN, CLUSTER)
    assert "sequential" in caught.value.hint


def test_devices_come_in_the_plans_order_and_homes_last() -> None:
    document = {**simple(), "homes": {"x": "phone"}}
    assert Plan.from_dict(document).devices == ("d0", "d1", "phone")
    assert Plan.from_dict({**simple(), "homes": {"x": "everywhere"}}).devices == ("d0", "d1")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("2(P-p)-1", [5, 3, 1]),
        ("2(P-p)", [6, 4, 2]),
        ("P-p", [3, 2, 1]),
        ("2(P-p)+1", [7, 5, 3]),
        ((4, 2, 2), [4, 2, 2]),
    ],
)
def test_warm_up(rule: Any, expected: list[int]) -> None:
    """ASTEROID §3.2; with few micro-batches there is not that much to run ahead."""
    stages = tuple(Plan.from_dict(simple()).stages[0] for _ in range(3))
    plan = Plan("chain", 8, stages, micro_batches=8, warm_up=rule)
    assert [plan.warm_up_of(stage) for stage in range(3)] == expected
    if isinstance(rule, str):
        few = msgspec.structs.replace(plan, micro_batches=2)
        assert [few.warm_up_of(stage) for stage in range(3)] == [min(2, count) for count in expected]


# What is refused


def simple() -> dict[str, Any]:
    return {
        "network": "chain",
        "batch_size": 8,
        "stages": [{"layers": [0, 2], "devices": ["d0"]}, {"layers": [2, 6], "devices": ["d1"]}],
    }


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The simple plan with one place changed: 'stages.0.codec'. `...` as the value removes it."""
    document: Any = copy.deepcopy(simple())
    place = document
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document  # type: ignore[no-any-return]


MISWRITTEN = [
    ("batch_sizes", 3, "there is no field 'batch_sizes'", "Did you mean batch_size"),
    ("stages.0.devises", [], r"stages\[0\]: there is no field 'devises'", "Did you mean devices?"),
    ("stages.0.codec", {"bit": 8}, r"stages\[0\].codec: there is no field 'bit'", "Did you mean bits?"),
    ("stages.0.share", {"by": "tiles", "rows": [1], "forward_group": [0]}, "field 'forward_group'", "forward_groups"),
    ("network", ..., "plan: the field 'network' is missing", ""),
    ("stages.1.layers", ..., r"stages\[1\]: the field 'layers' is missing", ""),
    ("stages.0.share", {"by": "samples"}, r"stages\[0\].share: the field 'samples' is missing", ""),
    ("stages.0.share", {"samples": [8]}, r"stages\[0\].share: the field 'by' is missing", ""),
    ("stages.0.share", {"by": "sample"}, r"share.by is 'sample'; .* single, samples, tiles, channels", "samples"),
    ("stages.0.share", {"by": "samples", "samples": [1.5]}, r"share.samples\[0\] is 1.5: expected `int`", ""),
    ("batch_size", "8", "batch_size is '8': expected `int`, got `str`", ""),
    ("order", "1f1", "order is '1f1'; it must be one of sequential, gpipe, 1f1b, eager, replay, stream", "1f1b"),
    ("warm_up", "P", r"warm_up is 'P'; it must be one of 2\(P-p\)-1, 2\(P-p\), P-p", ""),
    ("warm_up", [1, "2"], r"warm_up\[1\] is '2': expected `int`", ""),
    ("homes", {"x": 3}, r"homes\[...\] is \{'x': 3\}: expected `str`, got `int`", ""),
    ("stages", {}, "stages is {}: expected `array`, got `object`", ""),
    ("stages.0.layers", [0], r"stages\[0\].layers is \[0\]: expected `array` of length 2, got 1", ""),
    ("stages.0.reduce", "ring", r"reduce is 'ring'; it must be one of allreduce, gateway", ""),
    ("batch_norm", True, "batch_norm is True: expected `str`, got `bool`", ""),
    ("stages.0.devices", "d0", r"stages\[0\].devices is 'd0': expected `array`, got `str`", ""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message", "hint"), MISWRITTEN)
def test_a_miswritten_plan_is_refused_by_its_field(path: str, value: Any, message: str, hint: str) -> None:
    with pytest.raises(BadPlan, match=message) as caught:
        Plan.from_dict(with_value(path, value))
    assert hint in caught.value.hint


@pytest.mark.parametrize("document", [None, [], 3, "plan"])
def test_what_is_no_plan_at_all(document: Any) -> None:
    with pytest.raises(BadPlan, match=r"plan is .*: expected `object`"):
        Plan.from_dict(document)


TILES = {"by": "tiles", "rows": [1, 1]}
TWO = ["d0", "d2"]
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ({"micro_batches": 3}, "micro_batches is 3; it must divide batch_size = 8"),
    ({"micro_batches": 0}, "micro_batches is 0; it must divide batch_size = 8"),
    ({"optimizer_slots": 9}, "optimizer_slots is 9; it must be between 0 and 8"),
    ({"bucket_bytes": 0}, "bucket_bytes is 0; it must be at least 1"),
    ({"stages": []}, "stages is empty; a plan has at least one stage"),
    ({"stages.0.layers": ["layer9", 2]}, r"stages\[0\].layers\[0\] is 'layer9': There is no layer"),
    ({"stages.1.layers": [2, 7]}, r"stages\[1\].layers\[1\] is 7: layer 7 must be between 0 and 6"),
    ({"stages.1.layers": [3, 6]}, r"stages\[1\].layers starts at layer 3; the stage before it ends at 2"),
    ({"stages.1.layers": [2, 5]}, r"stages\[1\].layers ends at layer 5; chain has 6 layers"),
    ({"stages.1.layers": [2, 2]}, r"stages\[1\].layers is \[2, 2\]; it must hold at least one layer"),
    ({"stages.1.devices": []}, r"stages\[1\].devices is empty; a stage has at least one device"),
    (
        {"stages.1.devices": ["d0"], "micro_batches": 4},
        r"stages\[1\].devices names 'd0', which already works in stages\[0\], and order is 1f1b with 4 micro-batches",
    ),
    (
        {"stages.1.devices": ["d0"], "order": "eager"},
        r"stages\[1\].devices names 'd0', which already works in stages\[0\], and order is eager",
    ),
    (
        {"stages.1.devices": ["d1", "d1"], "stages.1.share": {"by": "samples", "samples": [4, 4]}},
        r"stages\[1\].devices names 'd1' twice",
    ),
    ({"stages.1.devices": ["d99"]}, r"stages\[1\].devices names 'd99', which is not in cluster made"),
    ({"stages.1.codec": {"bits": 3}}, r"stages\[1\].codec.bits is 3; it must be one of \(2, 4, 8, 16, 32\)"),
    ({"homes": {"y": "d0"}}, r"homes names input 'y'; chain has x"),
    ({"homes": {"x": "d99"}}, r"homes.x is 'd99', which is not in cluster made"),
    ({"warm_up": [1]}, "warm_up has 1 numbers; there are 2 stages"),
    ({"warm_up": [2, 1]}, r"warm_up\[0\] is 2; it must be between 1 and micro_batches = 1"),
    ({"micro_batches": 4, "warm_up": [1, 2]}, r"warm_up\[0\] is 1, less than warm_up\[1\] = 2: they would wait"),
    ({"stages.0.devices": TWO}, r"stages\[0\].devices has 2 devices and stages\[0\].share is single"),
    ({"stages.0.share": {"by": "samples", "samples": [4, 4]}}, r"share.samples has 2 numbers; there are 1 devices"),
    (
        {"stages.0.devices": TWO, "stages.0.share": {"by": "samples", "samples": [8, 0]}},
        r"stages\[0\].share.samples is \[8, 0\]; every device takes at least 1",
    ),
    (
        {"micro_batches": 2, "stages.0.devices": TWO, "stages.0.share": {"by": "samples", "samples": [4, 4]}},
        r"share.samples adds up to 8; a micro-batch has 4 samples \(batch_size 8 / micro_batches 2\)",
    ),
    ({"stages.0.share": TILES}, "a grid of 2x1 = 2 tiles; there are 1 devices"),
    ({"stages.0.devices": TWO, "stages.0.share": {"by": "tiles", "rows": [1, 0]}}, r"rows \[1.0, 0.0\] .* must be > 0"),
    (
        {"stages.0.devices": TWO, "stages.0.share": {"by": "tiles", "rows": [1, 20]}},
        r"stages\[0\].share.rows is \[1.0, 20.0\]: a tile would have 0 of the 8 rows of x",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "forward_groups": [3, 4]}},
        r"stages\[1\].share.forward_groups is \[3, 4\]; its first group must start at layer 2",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "backward_groups": [2, 4, 3]}},
        r"stages\[1\].share.backward_groups is \[2, 4, 3\]; it must increase and stay below layer 6",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "backward_groups": [2, 6]}},
        r"backward_groups is \[2, 6\]; it must increase and stay below layer 6",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "forward_groups": ["layer33"]}},
        r"stages\[1\].share.forward_groups is 'layer33': There is no layer",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "interior_first": ["layer33"]}},
        r"stages\[1\].share.interior_first is 'layer33': There is no layer",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "forward_groups": ["conv1", "conv3"]}},
        r"stages\[1\].share.forward_groups is \['conv1', 'conv3'\]; its first group must start at layer 2",
    ),
    (
        {"stages.1.devices": ["d1", "d2"], "stages.1.share": {**TILES, "backward_groups": ["conv2", "conv4", "conv3"]}},
        r"share.backward_groups is \['conv2', 'conv4', 'conv3'\]; it must increase",
    ),
    ({"stages.0.share": {"by": "channels", "groups": [1, 1]}}, "share.groups has 2 numbers; there are 1 devices"),
    (
        {"stages.0.devices": TWO, "stages.0.share": {"by": "channels", "groups": [1, 0]}},
        r"share.groups is \[1, 0\]; every device takes at least 1",
    ),
    (
        {"order": "eager", "stages.0.devices": TWO, "stages.0.share": TILES},
        r"order is eager, but the devices of stages\[0\] exchange data inside a pass",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_a_contradiction_is_refused_by_field_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadPlan, match=message):
        resolve(Plan.from_dict(changed_plan(changes)), CHAIN, CLUSTER)


def changed_plan(changes: dict[str, Any]) -> dict[str, Any]:
    document: Any = simple()
    for path, value in changes.items():
        *way, last = path.split(".")
        place = document
        for part in way:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    return document  # type: ignore[no-any-return]


BY_SAMPLES = {"stages.0.devices": TWO, "stages.0.share": {"by": "samples", "samples": [4, 4]}}


def test_eager_with_synchronised_batch_norm() -> None:
    network = chain(6, statistics=[1])
    document = changed_plan({**BY_SAMPLES, "order": "eager"})
    with pytest.raises(BadPlan, match=r"order is eager, but the devices of stages\[0\]") as caught:
        resolve(Plan.from_dict(document), network)
    assert "batch_norm: local" in caught.value.hint
    resolve(Plan.from_dict({**document, "batch_norm": "local"}), network)


def test_a_home_outside_the_plan_needs_a_cluster() -> None:
    document = changed_plan({"homes": {"x": "phone"}})
    resolve(Plan.from_dict(document), CHAIN, CLUSTER)
    with pytest.raises(BadPlan, match=r"homes.x is 'phone', which is in no stage"):
        resolve(Plan.from_dict(document), CHAIN)


def mixing() -> Network:
    return changed(CHAIN, 1, mixes_samples=True, where="net.py:7")


def test_an_operator_that_mixes_samples_cannot_be_shared_by_samples() -> None:
    with pytest.raises(BadPlan, match=r"stages\[0\] is shared by samples, .*conv1 .*net.py:7.* mixes samples"):
        resolve(Plan.from_dict(changed_plan(BY_SAMPLES)), mixing())
    whole = Plan.from_dict(simple())
    resolve(msgspec.structs.replace(whole, micro_batches=1), mixing())
    with pytest.raises(BadPlan, match=r"micro_batches is 2, but operator conv1 .*net.py:7.* whole batch"):
        resolve(msgspec.structs.replace(whole, batch_size=4, micro_batches=2), mixing())
