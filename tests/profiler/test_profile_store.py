"""Profiles on disk: read back as written, refused when damaged, measured once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadFile
from manyhands.facts.profile import DeviceProfile, Kernel, estimate
from manyhands.graph.describe import describe
from manyhands.graph.graph import Graph
from manyhands.profiler import store
from manyhands.profiler.measure import measure_network
from manyhands.profiler.store import load_profile, profile_network, profile_path, save_profile
from manyhands.profiler.this_machine import identify


@pytest.fixture(scope="module")
def profile(tiny: Graph) -> DeviceProfile:
    kernels = {tiny.nodes[0].name: Kernel(channels_last=True, onednn=False, threads=1)}
    return measure_network(tiny, ladder=(1, 2), threads=1, repeats=1, kernels=kernels)


def test_a_profile_is_read_back_as_written(tiny: Graph, profile: DeviceProfile, tmp_path: Path) -> None:
    path = profile_path(tiny.network, identify(1), tmp_path)
    save_profile(profile, path)
    assert load_profile(path, tiny.network, identify(1)) == profile
    assert path.name.startswith("tiny_1x16x16_blocks_")
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".json"] == [path.name]


def test_the_file_is_keyed_by_network_granularity_and_machine(tiny: Graph) -> None:
    paths = {
        profile_path(network, identify(threads))
        for network in (tiny.network, describe(tiny, "operators"))
        for threads in (1, 2)
    }
    assert len(paths) == 4


def _without(field: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.pop(field)


def _negative(raw: dict[str, Any]) -> None:
    raw["layers"][0]["ladder"][0]["forward_seconds"] = -1.0


def _swapped(raw: dict[str, Any]) -> None:
    raw["layers"][0]["ladder"].reverse()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("layers"), "is not a profile: .*`layers`"),
        (_negative, "must be finite and >= 0"),
        (_swapped, "must increase"),
        (lambda raw: raw.update(version=99), "has version 99; this program reads version 1"),
        (lambda raw: raw.update(surprise=1), "unknown field `surprise`"),
        (lambda raw: raw.update(fingerprint="0" * 16), "does not belong to tiny"),
        (lambda raw: raw["layers"].pop(), "does not belong to tiny"),
        (lambda raw: raw.update(machine="a toaster"), "was measured on 'a toaster'"),
        (lambda raw: raw.update(source="guessed"), "is not a profile"),
    ],
)
def test_a_damaged_file_is_refused(
    tiny: Graph, profile: DeviceProfile, tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile, path)
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(BadFile, match=message) as error:
        load_profile(path, tiny.network, identify(1))
    assert str(path) in error.value.message
    assert "--refresh" in error.value.hint


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(profile: DeviceProfile, tmp_path: Path, part: float) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile, path)
    text = path.read_text()
    path.write_text(text[: int(len(text) * part)])
    with pytest.raises(BadFile, match=r"profile\.json, line"):
        load_profile(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"version": 1}', "\x00\x01"])
def test_other_content_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(BadFile):
        load_profile(path)


def test_a_stored_profile_is_reused_until_refreshed(
    tiny: Graph, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> DeviceProfile:
        calls.append(1)
        return measure_network(*arguments, **options, kernels={})

    monkeypatch.setattr(store, "measure_network", counted)
    first = profile_network(tiny, ladder=(1,), threads=1)
    assert profile_network(tiny, ladder=(1,), threads=1) == first
    assert len(calls) == 1
    profile_network(tiny, ladder=(1,), threads=1, refresh=True)
    assert len(calls) == 2
    assert [path.suffix for path in (own_cache / "profiles").iterdir()] == [".json"]
    assert profile_network(tiny, ladder=(1,), threads=1, device="pi4-1").device == "pi4-1"


def test_a_damaged_stored_profile_is_an_error_and_not_a_guess(tiny: Graph, own_cache: Path) -> None:
    path = profile_path(tiny.network, identify(1))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(BadFile):
        profile_network(tiny, threads=1)


def test_an_estimate_says_so_and_survives_the_disk(tiny: Graph, tmp_path: Path) -> None:
    device = Cluster.local(1).devices[0]
    guess = estimate(tiny.network, device)
    assert guess.source == "estimated"
    save_profile(guess, tmp_path / "guess.json")
    assert load_profile(tmp_path / "guess.json", tiny.network, identify()) == guess
