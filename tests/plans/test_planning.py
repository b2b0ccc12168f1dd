"""What `import manyhands` offers, as the documentation shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.facts.errors import BadFile, BadValue, UnknownName
from manyhands.plans import networks
from manyhands.plans.planning import order_named, parse_ladder, read_profiles


@pytest.mark.slow
def test_importing_manyhands_does_not_import_torch() -> None:
    code = "import manyhands, sys; manyhands.Plan; manyhands.Cluster; manyhands.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_loads() -> None:
    for name in mh.__all__:
        assert getattr(mh, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mh.no_such_name


@pytest.mark.slow
def test_documented_example_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "own-model.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "my-graph" / "weights.safetensors").exists()


@pytest.mark.slow
def test_networks_are_captured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    first = networks.load_network("tiny")

    def never(*_: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(networks, "capture_model", never)
    again = networks.load_network("tiny")
    assert again == first
    assert again.cut(2) == first.cut(2)
    file = next((tmp_path / "networks").glob("tiny-*.json"))
    file.write_text(file.read_text()[:100])
    with pytest.raises(AssertionError, match="captured again"):
        networks.load_network("tiny")


def test_small_parsers() -> None:
    assert networks.parse_input("3x8x9") == (3, 8, 9)
    assert networks.parse_input("") is None
    assert parse_ladder("4,1,1") == (1, 4)
    assert order_named("gpipe") == "gpipe"
    for bad in ("3x0x9", "x", "3x-1", "99999999"):
        with pytest.raises(BadValue):
            networks.parse_input(bad)
    with pytest.raises(UnknownName):
        order_named("gpip")


def test_a_profile_of_another_network_is_refused(tmp_path: Path) -> None:
    import msgspec

    from manyhands.facts.profile import estimate
    from manyhands.files.documents import write_document

    cluster = mh.Cluster.local(1)
    tiny, other = networks.load_network("tiny"), networks.load_network("tiny", granularity="operators")
    write_document(tmp_path / "p.json", msgspec.to_builtins(estimate(tiny, cluster.devices[0])))
    assert read_profiles(str(tmp_path / "p.json"), tiny, cluster).is_estimated
    with pytest.raises(BadFile, match="does not belong"):
        read_profiles(str(tmp_path / "p.json"), other, cluster)


def test_documented_files_are_valid() -> None:
    """The clusters and the plan that the reference shows, as a person would type them."""
    import yaml

    from manyhands.facts.cluster import Cluster
    from manyhands.facts.plan import Plan

    page = (Path(__file__).parents[2] / "docs" / "reference" / "files.md").read_text()
    cluster_text, sites_text, plan_text = (part.split("```")[0] for part in page.split("```yaml\n")[1:])
    cluster = Cluster.from_dict(yaml.safe_load(cluster_text))
    assert {site.name for site in Cluster.from_dict(yaml.safe_load(sites_text)).sites} >= {"paris", "lab-1", "lab-3"}
    plan = Plan.from_dict(yaml.safe_load(plan_text))
    result = mh.simulate(plan, "resnet18", cluster)
    assert set(result.devices) == {"pi4-1", "pi4-2", "nano"}
    assert result.seconds > 0
