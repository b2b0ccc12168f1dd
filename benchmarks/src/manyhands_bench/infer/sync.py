"""Synchronisation in one inference: how often devices wait for each other, and what they exchange then (DECNN Tables 1
and 3)."""

from __future__ import annotations

from manyhands.facts.cluster import preset
from manyhands.facts.network import Network
from manyhands.plans.inference import plan_for
from manyhands.schedule.synchronisation import SyncCount, sync_points
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.infer.networks import GROUPS, DecnnNetwork, Library
from manyhands_bench.infer.window_exchanges import window_exchanges
from manyhands_bench.papers import DECNN_TABLES_1_AND_3

CLUSTER = "decnn-240-20"
GRIDS = {"1d": (GROUPS, 1), "2d": (2, 2)}
STRATEGIES = {"1d": "modnn", "2d": "coates", "channels": "channels"}


def bench_sync(library: Library, subject: DecnnNetwork, say: Progress) -> Figures:
    """Count for tiles in rows, tiles in rows and columns, and channels: as the paper counts, and in our plans."""
    say("synchronisation points")
    original = library.graph(subject, decoupled=False).network
    decoupled = library.graph(subject, decoupled=True).network
    figures: Figures = {}
    for name, grid in GRIDS.items():
        figures |= _figures(name, window_exchanges(original, *grid))
        figures |= _figures(f"{name}_run", _planned(name, original))
        figures |= _figures(f"{name}_decoupled_run", _planned(name, decoupled))
    everything = _planned("channels", decoupled)
    body = without_sums(decoupled, everything)
    figures |= _figures("channels", body)
    figures |= _figures("channels_with_classifier", everything)
    figures |= _figures("channels_original_run", _planned("channels", original))
    lines = [
        f"{name}: {figures[f'sync_points_{name}']} points, {figures[f'messages_{name}']} messages, "
        f"{figures[f'megabytes_{name}']:.3g} MB (paper {points}, {messages}, {size:g} MB)"
        for name, (points, messages, size) in DECNN_TABLES_1_AND_3.items()
    ]
    return figures | {
        "sync": "; ".join(lines),
        "sync_setting": f"{subject} on {len(preset(CLUSTER).devices)} devices, one sample, float32; tiles: the "
        "original network, every convolution with a window, all neighbours, both ways, as the paper counts; channels: "
        f"decoupled ({subject.decoupled_text}), convolutional layers, the classifier's partial sums apart "
        "(_with_classifier). _run: what our plan of that strategy really sends, pooling and the classifier's input "
        "included, for the original or the decoupled network",
    }


def _planned(name: str, network: Network) -> SyncCount:
    return sync_points(plan_for(network, preset(CLUSTER), strategy=STRATEGIES[name]).plan, network)


def without_sums(network: Network, everything: SyncCount) -> SyncCount:
    """Return the count of a plan by channels without the exchanges of linear layers: the shuffles alone."""
    shuffles = [op for op in network.ops if op.channels == "shuffle"]
    devices = len(preset(CLUSTER).devices)
    messages = len(shuffles) * devices * (devices - 1)
    size = sum(network.tensors[op.outputs[0]].bytes_for(1) for op in shuffles) * (devices - 1) // devices
    assert everything.points >= len(shuffles)
    assert everything.messages >= messages
    return SyncCount(len(shuffles), messages, size)


def _figures(name: str, count: SyncCount) -> Figures:
    return {
        f"sync_points_{name}": count.points,
        f"messages_{name}": count.messages + count.between_messages,
        f"megabytes_{name}": (count.bytes + count.between_bytes) / 1e6,
    }
