"""Figures of a walk, and failures by reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manyhands.facts.errors import BadPlan, CaptureFailed
from manyhands_bench.networks.outcome import NetworkOutcome
from manyhands_bench.networks.summary import failures, reason_of, summarize

ALL = {"samples": True, "pipeline": True, "tiles": True}


def network(name: str, **fields: Any) -> NetworkOutcome:
    return NetworkOutcome(name, is_complete=True, **fields)


def outcomes() -> list[NetworkOutcome]:
    refused = network("timm:refused", is_convolutional=True)
    refused.add_problem("capture", CaptureFailed("torch.export cannot capture Refused: no 12\n  at /a/b.py:3, in f"))
    untiled = network("timm:vit", captured=True, forward_difference=1e-3, shares={**ALL, "tiles": False})
    untiled.add_problem("tiles", BadPlan("It cannot be tiled."))
    return [
        network("torchvision:good", captured=True, is_convolutional=True, forward_difference=0.0, shares=ALL,
                is_drawn=True, trained_by="tiles", trained_difference=1e-12),
        network("torchvision:detector", is_detector=True, is_convolutional=True),
        refused,
        untiled,
        network("hf:wrong", captured=True, forward_difference=1e-13, shares={**ALL, "samples": False}, is_drawn=True,
                trained_difference=1e-3),
        network("hf:absent", not_run="ImportError: no such class"),
    ]  # fmt: skip


def test_shares_count_all_but_detectors_and_those_that_do_not_run() -> None:
    figures = summarize(outcomes())
    assert json.loads(json.dumps(figures)) == figures
    expected = {
        "networks": 5, "networks_not_run": 1, "captured_share": 3 / 4, "captured_torchvision": 1.0,
        "captured_timm": 1 / 2, "captured_hf": 1.0, "captured_detectors": 0.0, "networks_detectors": 1,
        "samples_share": 2 / 4, "pipeline_share": 3 / 4, "tiles_share_convolutional": 1 / 2,
        "networks_convolutional": 2, "trained_exact_share": 1 / 2,
        "trained_within_rounding_share": 1 / 2, "networks_drawn": 2, "forward_equal_share": 2 / 3,
        "bare_errors": 0, "networks_torchvision": 1, "networks_timm": 2, "networks_hf": 1,
    }  # fmt: skip
    assert figures == expected


@pytest.mark.parametrize(("reordered", "share"), [(2e-3, 1.0), (1e-4, 0.5)])
def test_a_network_that_rounding_alone_takes_as_far_counts_apart(reordered: float, share: float) -> None:
    walked = outcomes()
    walked[4].reordered_difference = reordered
    figures = summarize(walked)
    assert figures["trained_within_rounding_share"] == share
    assert figures["trained_exact_share"] == 1 / 2


def test_a_figure_that_nothing_was_walked_for_is_left_out() -> None:
    figures = summarize([network("timm:a", captured=True)])
    assert "captured_timm" in figures
    assert not {"captured_hf", "captured_detectors", "trained_exact_share", "tiles_share_convolutional"} & set(figures)


def test_bare_errors_are_counted() -> None:
    bare = network("hf:a")
    bare.add_problem("capture", KeyError("submod_1"))
    bare.add_end("crash", "")
    assert summarize([bare])["bare_errors"] == 2


def test_failures_by_reason_the_most_frequent_first() -> None:
    second = network("timm:another")
    second.add_problem("capture", CaptureFailed("torch.export cannot capture Other: no 7\n  at /c/d.py:8, in g"))
    rows = failures([*outcomes(), second])
    assert rows[0] == (2, "capture", "torch.export cannot capture: no N", "timm:refused, timm:another")
    steps = {(step, names) for _, step, _, names in rows[1:]}
    assert steps == {("forward", "timm:vit"), ("train", "hf:wrong"), ("not run", "hf:absent")}
    assert "tiles" not in {row[1] for row in rows}, "what is not convolutional is not expected to be tiled"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Operator 'conv2d_3' makes [3, 4]", "Operator 'conv2d' makes [5, 6, 7]"),
        ("a view of 12.5 and view_14", "a view of -3e-4 and view_2"),
        ("timm:vit_tiny: no", "hf:bert-masked: no"),
    ],
)
def test_reasons_do_not_depend_on_the_network(first: str, second: str) -> None:
    assert reason_of(first) == reason_of(second)


def test_other_reasons_stay_apart() -> None:
    assert reason_of("aten.fill_ is not known") != reason_of("aten.zero_ is not known")
    assert reason_of("") == ""
