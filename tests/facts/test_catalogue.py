"""The catalogue follows the measurements it names, and the presets are the papers' test beds."""

from __future__ import annotations

from collections import Counter

import pytest

from manyhands.facts.catalogue import ALIASES, CATALOGUE, CatalogueEntry, catalogue_key
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import UnknownName
from manyhands.facts.presets import PRESETS
from manyhands.facts.profile import estimate
from manyhands.plans.networks import load_network


def ratio(kind: str, to: str = "jetson-nano") -> float:
    return CATALOGUE[kind].gflops / CATALOGUE[to].gflops


def test_speeds_relative_to_the_nano_are_asteroids() -> None:
    assert ratio("jetson-tx2") == pytest.approx(3.48 / 1.14)  # Table 1, ResNet-50
    assert ratio("a100") == pytest.approx(3.48 * 3600 / 65)  # Table 1, ResNet-50
    assert ratio("jetson-nx", "jetson-tx2") == pytest.approx(51 / 25)  # Table 8; its Nano's 82 does not fit Table 1
    assert 2.4 <= ratio("jetson-tx2") <= 3.1
    assert 6.1 <= ratio("jetson-nx") <= 6.3
    assert 140 <= ratio("a100") <= 195


def test_a_nano_takes_its_epoch_in_the_papers_time() -> None:
    seconds = 48_000 * 4.1 * 2 * 3 / CATALOGUE["jetson-nano"].gflops
    assert seconds / 3600 == pytest.approx(3.48)


TABLE_1 = (
    ("resnet50", 48_000, 3.48 * 3600, 1.14 * 3600, 2.0),
    ("efficientnet-b1-32", 50_000, 26.7 * 60, 11.2 * 60, 2.0),
    ("mobilenetv2-32", 50_000, 22 * 60, 8.5 * 60, 3.0),
)
"""Network, pictures of an epoch, the paper's seconds on a Nano and a TX2, and the factor within which ours must be."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "pictures", "nano", "tx2", "factor"), TABLE_1)
def test_estimated_epochs_are_near_those_of_table_1(
    model: str, pictures: int, nano: float, tx2: float, factor: float
) -> None:
    """One speed for each device, without a correction for any network."""
    network = load_network(model)
    for kind, paper in (("jetson-nano", nano), ("jetson-tx2", tx2)):
        device = next(device for device in preset("env-c").devices if device.kind == kind)
        profile, samples = estimate(network, device), 32
        step = sum(sum(profile.layer_seconds(layer, samples)) for layer in range(len(network.layers)))
        assert 1 / factor <= step / samples * pictures / paper <= factor


def test_pis_keep_ncnns_order_and_stay_below_its_inference_speed() -> None:
    ncnn = {"pi-zero-2w": 9.93, "pi3": 13.23, "pi4": 29.48, "pi5": 168.05}
    speeds = [CATALOGUE[kind].gflops for kind in ncnn]
    assert speeds == sorted(speeds)
    assert all(CATALOGUE[kind].gflops < speed / 2 for kind, speed in ncnn.items())
    assert ratio("pi4", "pi-zero-2w") == pytest.approx(29.48 / 9.93)
    assert CATALOGUE["pi5"].gflops < CATALOGUE["laptop"].gflops < CATALOGUE["jetson-nano"].gflops


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_entry_says_where_it_comes_from_and_is_possible(kind: str) -> None:
    entry: CatalogueEntry = CATALOGUE[kind]
    assert len(entry.source) > 60
    assert "data sheet" in entry.source
    assert 0 < entry.watts_idle < entry.watts_active
    assert 0 < entry.operator_seconds < 1e-3
    assert entry.memory_bytes >= 5 * 10**8
    # Moving a number takes at most a few hundred times as long as computing with one, on anything built so far.
    assert 1 < entry.gflops * 1e9 / (entry.memory_bytes_per_second / 4) < 300


@pytest.mark.parametrize(
    ("kind", "gigabytes"), [("pi3", 1), ("pi4", 4), ("nano", 4), ("tx2", 8), ("nx", 8), ("a100", 40)]
)
def test_memory_is_what_is_sold(kind: str, gigabytes: int) -> None:
    assert CATALOGUE[catalogue_key(kind)].memory_bytes == gigabytes * 10**9


@pytest.mark.parametrize("kind", CATALOGUE)
def test_plans_may_use_what_the_system_and_cuda_leave(kind: str) -> None:
    kept = 1_500_000_000 if kind.startswith("jetson") else 0
    entry = CATALOGUE[kind]
    assert entry.free_bytes == entry.memory_bytes - kept
    assert ("kept by the system and CUDA" in entry.source) == bool(kept)
    device = Cluster.from_dict({"devices": [{"kind": kind}]}).devices[0]
    assert device.memory_bytes == entry.free_bytes


def test_aliases_lead_to_entries_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(CATALOGUE)
    assert not set(ALIASES) & set(CATALOGUE)
    assert catalogue_key("nano") == "jetson-nano"
    assert catalogue_key("pi4") == "pi4"


def test_an_unknown_kind_names_the_closest() -> None:
    with pytest.raises(UnknownName, match=r"devices\[1\]\.kind.*'jetson-nanoo'") as caught:
        catalogue_key("jetson-nanoo", "devices[1].kind")
    assert "jetson-nano" in caught.value.hint


PAPERS = {
    "pi3x6": ({"pi3": 6}, 100, 0.3),
    "env-a": ({"jetson-nano": 5}, 100, 0.3),
    "env-b": ({"jetson-nx": 3, "jetson-tx2": 2}, 100, 0.3),
    "env-b-1000": ({"jetson-nx": 3, "jetson-tx2": 2}, 1000, 0.3),
    "env-c": ({"jetson-nx": 1, "jetson-tx2": 2, "jetson-nano": 3}, 100, 0.3),
    "env-d": ({"jetson-tx2": 1, "jetson-nano": 3}, 100, 0.3),
    "decnn-880": ({"pi4": 4}, 880, 0.075),
    "decnn-480-1": ({"pi4": 4}, 480, 0.5),
    "decnn-480-5": ({"pi4": 4}, 480, 2.5),
    "decnn-240-5": ({"pi4": 4}, 240, 2.5),
    "decnn-240-10": ({"pi4": 4}, 240, 5),
    "decnn-240-20": ({"pi4": 4}, 240, 10),
    "decnn-240-40": ({"pi4": 4}, 240, 20),
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_test_beds(name: str) -> None:
    kinds, mbit, one_way_ms = PAPERS[name]
    cluster = preset(name)
    assert Counter(device.kind for device in cluster.devices) == kinds
    assert cluster.link.bytes_per_second == mbit * 1e6 / 8
    assert cluster.link.delay_seconds == pytest.approx(one_way_ms / 1e3)
    assert {device.up_bytes_per_second for device in cluster.devices} == {mbit * 1e6 / 8}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described_and_round_trips(name: str) -> None:
    cluster = preset(name)
    assert cluster.name == name
    assert PRESETS[name].description
    assert PRESETS[name].source
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_edge_and_cloud_have_different_rates_up_and_down() -> None:
    cluster = preset("edge-cloud")
    up = cluster.bytes_per_second_between("edge", "cloud")
    down = cluster.bytes_per_second_between("cloud", "edge")
    assert (up, down) == (19e6 / 8, 31e6 / 8)
    assert cluster.link_between("edge", "cloud").delay_seconds == cluster.link_between("cloud", "edge").delay_seconds


def test_an_unknown_preset_names_the_closest() -> None:
    with pytest.raises(UnknownName, match="env-e") as caught:
        preset("env-e")
    assert "env-" in caught.value.hint
