"""What limits a step with more spans than are kept: the port, uplink or device that is busiest."""

from __future__ import annotations

import pytest

from manyhands.explaining import bottleneck
from manyhands.facts.cluster import Cluster
from manyhands.facts.plan import Plan
from manyhands.facts.profile import estimate_cluster
from manyhands.planner.placing import placed
from manyhands.plans.networks import load_network
from manyhands.simulator.simulate import simulate


def limit(rate: str, monkeypatch: pytest.MonkeyPatch) -> bottleneck.Limit:
    """Of a step of two sites with two devices each, behind uplinks of this rate."""
    site = {"name": "home", "count": 2, "rate": rate, "delay": "1 ms", "link": {"rate": "1 Gbit/s", "delay": "1 ms"}}
    cluster = Cluster.from_dict(
        {
            "name": "homes", "sites": [site], "devices": [{"kind": "pi4", "count": 2, "site": "home"}],
            "link": {"rate": "10 Gbit/s", "delay": "1 ms"},
        }
    )  # fmt: skip
    network = load_network("tiny")
    share = {"by": "samples", "samples": [2] * 4}
    stage = {"layers": [0, len(network.layers)], "devices": list(cluster.names), "share": share}
    plan = placed(Plan.from_dict({"network": "tiny", "batch_size": 8, "stages": [stage]}), cluster)
    result = simulate(plan, network, cluster, estimate_cluster(network, cluster))
    monkeypatch.setattr(bottleneck, "MOST_SPANS", 1)
    (only,) = bottleneck.limits_of(result, plan, network, cluster)
    assert 0 < only.part <= 1
    return only


def test_an_uplink_that_carries_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = limit("0.1 Mbit/s", monkeypatch)
    assert slow.kind == "transfer"
    assert slow.text.startswith(("the uplink out of home-", "the uplink into home-"))
    assert slow.part > 0.5
    assert "at least" in slow.text


def test_a_device_that_computes_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = limit("10 Gbit/s", monkeypatch)
    assert (fast.kind, fast.seconds > 0) == ("compute", True)
    assert " computes " in fast.text
