"""What is known of a network between an edge and a server: where to cut, times, bytes, the edge's memory."""

from __future__ import annotations

import msgspec
import pytest

from hand_made import MAP_BYTES, WEIGHT_BYTES, chain, changed, even_profile
from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import Codec, Plan, Stage
from manyhands.planner.split import Side, SplitProfile
from manyhands.planner.split_profile import candidate_cuts, parse_phases, slowed, split_profile
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule


def activated(network: Network, **targets: str) -> Network:
    for name, target in targets.items():
        network = changed(network, network.op_index[name], target=f"aten.{target}")
    return network


def test_cuts_only_after_activations_and_norms() -> None:
    network = activated(chain(6), conv1="relu.default", conv3="batch_norm.default", conv4="max_pool2d.default")
    assert candidate_cuts(network) == (2, 4, 5)  # 5: pooled after a norm
    assert candidate_cuts(chain(4)) == (1, 2, 3), "where no activation allows one, every cut is possible"


def test_a_sum_needs_both_and_a_product_one() -> None:
    network = activated(chain(5, skips={3: 0}), conv2="relu.default", conv3="add.Tensor")
    assert candidate_cuts(network) == (1, 2, 3, 4), "t0 is not activated, so nothing is"
    network = activated(chain(5, skips={3: 0}), conv2="relu.default", conv3="mul.Tensor")
    assert candidate_cuts(network) == (4,)
    product = activated(network, conv3="matmul.default")
    assert candidate_cuts(product) == (1, 2, 3, 4), "by a weight"
    assert candidate_cuts(changed(product, 3, weights=())) == (4,)


def test_data_stays() -> None:
    network = activated(chain(5), conv0="relu.default", conv1="relu.default", conv3="relu.default")
    reads_input = changed(network, 2, inputs=("t1", "x"))
    assert candidate_cuts(reads_input) == (4,)
    assert candidate_cuts(reads_input, shared=("x",)) == (1, 2, 4)
    profile = split_profile(
        reads_input, *even_profile(network, ["a", "b"]).devices.values(), 8, shared=("x",), least_bits=8
    )
    assert [cut.feature_bytes / MAP_BYTES / 8 for cut in profile.cuts] == [2, 2, 1, 0]
    assert [cut.returned_bytes / MAP_BYTES / 8 for cut in profile.cuts] == [1, 1, 1, 0]


def test_tied_weights_stay_together() -> None:
    network = activated(chain(5), conv1="relu.default", conv3="relu.default")
    assert candidate_cuts(network) == (2, 4)
    assert candidate_cuts(changed(network, 4, weights=("w2",))) == (2,)


def test_a_profile_of_a_network() -> None:
    network = activated(chain(4), conv1="relu.default")
    slow, fast = even_profile(network, ["a", "b"], 0.02, 0.05), even_profile(network, ["a", "b"], 0.001, 0.002)
    found = split_profile(
        network, slow.of("a"), fast.of("b"), 8, optimizer_slots=1, step_bytes_per_second=(1e6, 1e9), least_bits={2: 4}
    )
    cut, alone = found.cuts
    assert (cut.layer, alone.layer, found.edge_only) == (2, 4, 4)
    assert cut.upstream_forward_seconds == pytest.approx(8 * 2 * 0.02)
    assert cut.upstream_backward_seconds == pytest.approx(8 * 2 * 0.05 + 2 * WEIGHT_BYTES * 5 / 1e6)
    assert cut.downstream_forward_seconds == pytest.approx(8 * 2 * 0.001)
    assert cut.feature_bytes == cut.returned_bytes == 8 * MAP_BYTES
    assert (cut.least_bits, alone.feature_bytes, alone.downstream_forward_seconds) == (4, 0, 0)
    assert found.layer_bytes == (2 * WEIGHT_BYTES,) * 4
    assert alone.edge_bytes > cut.edge_bytes > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=SplitProfile) == found


def test_a_frozen_beginning_returns_nothing() -> None:
    network = activated(chain(4), conv1="relu.default")
    tensors = dict(network.tensors)
    for name in ("t0", "t1"):
        tensors[name] = msgspec.structs.replace(tensors[name], differentiable=False)
    network = msgspec.structs.replace(network, tensors=tensors)
    both = even_profile(network, ["a", "b"]).devices.values()
    cut = split_profile(network, *both, 8).cuts[0]
    assert (cut.returned_bytes, cut.upstream_backward_seconds) == (0, 0)
    assert cut.feature_bytes > 0


def test_a_generator_ends_at_the_edge() -> None:
    network = activated(chain(4), conv1="relu.default")
    both = even_profile(network, ["a", "b"]).devices.values()
    found = split_profile(network, *both, 8, edge_side="downstream")
    assert [cut.layer for cut in found.cuts] == [0, 2]
    assert found.edge_only == 0
    assert found.cuts[0].edge_bytes > found.cuts[1].edge_bytes
    assert found.cuts[0].feature_bytes == 0


def test_phases() -> None:
    assert parse_phases("5") == ((0, 5),)
    network = activated(chain(4), conv1="relu.default")
    both = even_profile(network, ["a", "b"]).devices.values()
    profile = msgspec.structs.replace(split_profile(network, *both, 8), phases=parse_phases("4@0, 5@8,none@20"))
    assert [profile.k_at(epoch) for epoch in (0, 7, 8, 19, 20)] == [4, 4, 5, 5, None]
    for wrong in ("", "x", "4@2", "4@0,5@0", "-1", "4@x"):
        with pytest.raises(BadValue):
            parse_phases(wrong)


def test_a_slow_edge() -> None:
    network = activated(chain(4), conv1="relu.default")
    edge, server = even_profile(network, ["a", "b"], 0.02, 0.05).devices.values()
    found = split_profile(network, slowed(edge, 4), server, 8).cuts[0]
    assert found.upstream_forward_seconds == pytest.approx(4 * found.downstream_forward_seconds)
    assert found.upstream_backward_seconds == pytest.approx(4 * found.downstream_backward_seconds)
    downstream = split_profile(network, slowed(edge, 4), server, 8, edge_side="downstream").cuts[1]
    assert downstream.downstream_forward_seconds == pytest.approx(4 * downstream.upstream_forward_seconds)
    with pytest.raises(BadValue, match="0 times as slow"):
        slowed(edge, 0)


@pytest.mark.parametrize("side", ["upstream", "downstream"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_memory_is_not_less_than_the_schedules(cut: int, bits: int, side: Side) -> None:
    """One batch, back-propagated as usual: what schedule/memory.py follows action by action."""
    network, samples = chain(4, weight_elements=5000), 8
    both = even_profile(network, ["edge", "server"]).devices.values()
    names = ("edge", "server") if side == "upstream" else ("server", "edge")
    stages = (Stage((0, cut), (names[0],)), Stage((cut, 4), (names[1],), codec=Codec(bits)))
    plan = Plan(network="chain", batch_size=samples, stages=stages, homes={"x": names[0]}, optimizer_slots=2)
    peak = check(Schedule(plan, network)).peak_bytes["edge"]
    found = split_profile(network, *both, samples, cuts=[cut], edge_side=side, optimizer_slots=2).cuts[0]
    assert peak <= found.edge_bytes <= 1.5 * peak
