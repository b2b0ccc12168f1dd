"""Which networks are walked, and which are drawn."""

from __future__ import annotations

import pytest

from manyhands.facts.errors import NotInstalled, UnknownName
from manyhands_bench.networks import catalogue
from manyhands_bench.networks.catalogue import chosen_networks, drawn_tenth
from manyhands_bench.networks.outcome import LIBRARIES

NAMES = [f"{library}:{name}" for library in LIBRARIES for name in ("a", "b", "c", "d")]


def test_networks_are_chosen_by_library_or_name() -> None:
    assert chosen_networks(NAMES, (), None) == NAMES
    assert chosen_networks(NAMES, ("timm",), None) == ["timm:a", "timm:b", "timm:c", "timm:d"]
    assert chosen_networks(NAMES, ("hf:b", "torchvision:a"), None) == ["torchvision:a", "hf:b"]
    assert chosen_networks(NAMES, ("c",), None) == ["torchvision:c", "timm:c", "hf:c"]
    with pytest.raises(UnknownName, match="tim"):
        chosen_networks(NAMES, ("tim",), None)


def test_a_limit_is_spread_over_the_list() -> None:
    assert chosen_networks(NAMES, (), 3) == ["torchvision:a", "timm:a", "hf:a"]
    assert chosen_networks(NAMES, (), 100) == NAMES
    assert chosen_networks(NAMES, ("hf",), 2) == ["hf:a", "hf:c"]


def test_a_tenth_is_drawn_the_same_each_time() -> None:
    assert drawn_tenth(NAMES) == drawn_tenth(list(reversed(NAMES)))
    assert len(drawn_tenth(NAMES)) == 2
    assert set(drawn_tenth(NAMES)) <= set(NAMES)
    assert len(drawn_tenth(NAMES[:1])) == 1
    assert drawn_tenth([]) == []


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None if name == "timm" else object())
    monkeypatch.setattr(catalogue, "_NAMES", {library: lambda: ["x"] for library in LIBRARIES})
    assert catalogue.missing_packages() == {"timm": "timm"}
    assert catalogue.all_networks() == ["torchvision:x", "hf:x"]
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    assert catalogue.detectors() == set()
    with pytest.raises(NotInstalled, match="timm"):
        catalogue.all_networks()
