"""`mh.pipeline_plan`: what is written by hand, what is filled in, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from hand_made import chain, cluster, even_profile, profile
from manyhands.facts.errors import BadPlan, OutOfMemory
from manyhands.facts.link import Link
from manyhands.facts.plan import BySamples, Single
from manyhands.models.registry import build

NETWORK = chain(6)
MACHINES = cluster(("a", "b", "c"), Link(1e8, 1e-4))


def test_all_by_hand() -> None:
    plan = mh.pipeline_plan(
        NETWORK, MACHINES, cuts=["layer2"], devices=["b", ["a", "c"]], shares=[None, [5, 3]], micro_batches=4,
        batch_size=32, warm_up="P-p", order="1f1b", batch_norm="local",
    )  # fmt: skip
    assert [(stage.layers, stage.devices) for stage in plan.stages] == [((0, 2), ("b",)), ((2, 6), ("a", "c"))]
    assert [stage.share for stage in plan.stages] == [Single(), BySamples((5, 3))]
    assert (plan.micro_batches, plan.warm_up, plan.batch_norm) == (4, "P-p", "local")
    assert mh.simulate(plan, NETWORK, MACHINES, even_profile(NETWORK, MACHINES.names)).seconds > 0


def test_cuts_are_balanced_and_shares_follow_speed() -> None:
    times = profile(NETWORK, {"a": [(0.1, 0.2)] * 6, "b": [(0.2, 0.4)] * 6, "c": [(0.1, 0.2)] * 6})
    plan = mh.pipeline_plan(NETWORK, MACHINES, devices=["a", "b"], batch_size=4, profile=times)
    assert [stage.layers for stage in plan.stages] == [(0, 4), (4, 6)]
    shared = mh.pipeline_plan(NETWORK, MACHINES, cuts=[], devices=[["a", "b"]], batch_size=12, profile=times)
    assert shared.stages[0].share == BySamples((8, 4))
    usual = mh.pipeline_plan(NETWORK, MACHINES, batch_size=4, profile=times)
    assert [len(stage.devices) for stage in usual.stages] == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cuts": [2, 4], "devices": ["a", "b"]}, "2 cuts make 3 stages; devices has 2"),
        ({"cuts": [1, 2, 3]}, "3 cuts make 4 stages; cluster made has 3 devices"),
        ({"cuts": [4, 2]}, "must increase"),
        ({"devices": ["a", []]}, "a stage without a device"),
        ({"micro_batches": 3}, "must divide batch_size = 32"),
        ({"devices": [["a", "b"]], "cuts": [], "shares": [[30, 1]]}, "add up to the 32 samples"),
        ({"devices": ["a", "b"], "shares": [None]}, "shares has 1 entries; there are 2 stages"),
        ({"devices": [["a", "b", "c"]], "cuts": [], "micro_batches": 16}, "2 sample.s. cannot be shared by 3"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(BadPlan, match=words):
        mh.pipeline_plan(NETWORK, MACHINES, **{"batch_size": 32, **options})  # type: ignore[arg-type]


def test_a_budget_that_nothing_fits_names_the_layer_and_the_bytes() -> None:
    small = cluster(("a", "b"), Link(1e8, 1e-4), memory_bytes=2500)
    with pytest.raises(OutOfMemory, match=r"layer \d+ \(layer\d+\) needs .* are missing"):
        mh.plan(NETWORK, small, batch_size=4, strategy="pipeline", profile=even_profile(NETWORK, small.names))


@pytest.mark.slow
def test_micro_batches_and_warm_up_are_chosen() -> None:
    times = even_profile(NETWORK, MACHINES.names)
    planned = mh.plan(NETWORK, MACHINES, batch_size=64, strategy="pipeline", profile=times).plan
    assert planned.micro_batches > 1 or len(planned.stages) == 1
    given = mh.plan(
        NETWORK, MACHINES, batch_size=64, strategy="pipeline", profile=times, micro_batches=2, warm_up="P-p"
    ).plan  # fmt: skip
    assert given.micro_batches == 2
    assert given.warm_up == "P-p"


@pytest.mark.slow
def test_the_best_plans_are_tried_and_the_fastest_is_taken(tmp_path: Path) -> None:
    """Trials leave no trace in what is trained: the same plan, given, ends with the same losses."""
    torch.manual_seed(3)
    images, labels = torch.randn(16, 1, 16, 16), torch.randint(0, 10, (16,))
    results = []
    plan: str | mh.Plan = "pipeline"
    for tune in (3, 0):
        torch.manual_seed(4)
        model = build("tiny")
        results.append(
            mh.train(
                model, TensorDataset(images, labels), loss=functional.cross_entropy, batch_size=8, steps=3, plan=plan,
                optimizer=mh.Optimizer("SGD", lr=0.1), cluster=mh.Cluster.local(2), folder=tmp_path / f"tune{tune}",
                tune=tune,
            )
        )  # fmt: skip
        plan = results[0].plan
    events = [json.loads(line) for line in (tmp_path / "tune3" / "events.jsonl").read_text().splitlines()]
    tried = [event for event in events if event["event"] == "tried"]
    assert 2 <= len(tried) <= 3 + 4 + 1  # those nearest to the best too, and one of them in one bucket
    assert mh.Plan.from_dict(tried[0]["plan"]) == results[0].plan
    assert results[0].losses == results[1].losses
