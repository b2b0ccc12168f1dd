"""What is installed with manyhands: floors without known vulnerabilities, one version and hashes for every package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from manyhands.doctor.check import release, requirement, unmet

ROOT = Path(__file__).parent.parent
DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = DOCUMENT["project"]
FIXED = {
    "torch": "2.6", "cryptography": "50", "zeroconf": "0.149.16", "pillow": "12.3", "onnx": "1.21", "pytest": "9.0.3",
    "setuptools": "78.1.1", "pyyaml": "5.4", "psutil": "5.6.6", "numpy": "1.22",
}  # fmt: skip
"""Package -> the version in which what pyproject.toml names, or the last that is known, was fixed."""
PINNED = re.compile(
    r"(?m)^([a-z0-9][a-z0-9.-]*)==(\S+)(?: ; (.+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct(*, extras: bool) -> dict[str, list[tuple[str, str]]]:
    """Package -> its limits, for every one that pyproject.toml asks for."""
    texts = list(PROJECT["dependencies"])
    for listed in PROJECT["optional-dependencies"].values() if extras else ():
        texts += listed
    found = [one for text in texts if (one := requirement(text)) is not None and one[0] != "manyhands"]
    return {normal(name): limits for name, limits in found}


def pinned(name: str) -> dict[str, list[str]]:
    """Package -> its versions; several where they depend on Python's."""
    text = (ROOT / "constraints" / name).read_text()
    assert PINNED.sub("", text).strip() == "", "a line that is neither a version nor a hash"
    found: dict[str, list[str]] = {}
    for package, version, marker, _ in PINNED.findall(text):
        assert package not in found or marker, f"{package} twice"
        found.setdefault(package, []).append(version)
    return found


@pytest.mark.parametrize(("name", "extras"), [("core.txt", False), ("all.txt", True)])
def test_every_dependency_has_a_version_in_its_range_and_a_hash(name: str, extras: bool) -> None:
    found = pinned(name)
    for package, limits in direct(extras=extras).items():
        assert found.get(package), f"{package} is not in constraints/{name}: run .ci/constraints"
        for version in found[package]:
            assert unmet(version, limits) == "", f"{package} {version}: run .ci/constraints"
    assert len(found) > len(direct(extras=extras)), "what they need themselves is there too"


def test_the_core_has_the_versions_of_the_whole() -> None:
    """What is tested is what workers install."""
    core, whole = pinned("core.txt"), pinned("all.txt")
    assert {name: whole.get(name) for name in core} == core
    assert not {"pytest", "matplotlib", "pillow"} & set(core)


def test_no_address_is_in_the_constraints() -> None:
    for path in (ROOT / "constraints").iterdir():
        assert "://" not in path.read_text(), path.name


def test_floors_are_versions_that_were_fixed() -> None:
    asked = direct(extras=True)
    for package, fixed in FIXED.items():
        floors = [limit for sign, limit in asked[package] if sign == ">="]
        assert floors, f"{package} has no floor"
        assert release(floors[0]) >= release(fixed), f"{package}>={floors[0]}: known vulnerabilities before {fixed}"
    (build,) = DOCUMENT["build-system"]["requires"]
    found = requirement(build)
    assert found is not None
    assert release(dict(found[1])[">="]) >= release("83")


def test_every_dependency_has_a_floor() -> None:
    for package, limits in direct(extras=True).items():
        assert package.startswith("types-") or ">=" in dict(limits), package


def test_a_release_is_audited_and_has_an_sbom() -> None:
    """Steps that nobody sees fail: what they are called with is looked at here."""
    script = (ROOT / ".ci" / "release").read_text()
    for words in (".ci/constraints --check", 'pip-audit" --strict --require-hashes', 'cyclonedx-py" environment'):
        assert words in script
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    runs = {name: [step.get("run", "") for step in job["steps"]] for name, job in workflow["jobs"].items()}
    assert ".ci/run" in runs["test"]
    assert ".ci/release" in runs["release"]
    assert workflow["jobs"]["release"]["needs"] == "test"
