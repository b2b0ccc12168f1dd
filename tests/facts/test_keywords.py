"""Settings of functions: a struct and its TypedDict agree, and a keyword that does not exist is refused."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.plans.planning import plan
from manyhands.plans.settings import StepSettings
from manyhands.runtime.coordinator import Coordinator

SOURCE = Path(__file__).parents[2] / "src" / "manyhands"


def test_a_typed_dict_has_the_fields_of_its_settings() -> None:
    pairs = 0
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "TypedDict" not in text:
            continue
        classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
        for name in classes:
            options = name.removesuffix("Settings") + "Options"
            if name.endswith("Settings") and options in classes:
                assert fields(name, classes) == fields(options, classes), path
                pairs += 1
    assert pairs == 6


def fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Return name -> annotation, those of base classes in the same file included."""
    node = classes[name]
    found = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= fields(base.id, classes)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found[line.target.id] = ast.unparse(line.annotation)
    return found


def test_settings_are_made_from_keywords() -> None:
    assert settings_from(StepSettings, "plan", {"order": "gpipe"}) == StepSettings(order="gpipe")


def test_a_keyword_that_a_function_does_not_have_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadValue, match="plan has no option batchnorm") as refused:
        plan("tiny", Cluster.local(2), batchnorm="local")  # type: ignore[call-arg]
    assert refused.value.hint == "Did you mean batch_norm?"
    with pytest.raises(BadValue, match="Coordinator has no option heartbeat_second"):
        Coordinator(heartbeat_second=1.0)  # type: ignore[call-arg]


def test_help_shows_every_keyword() -> None:
    assert "warm_up" in inspect.signature(plan).parameters
    assert inspect.signature(Coordinator).parameters["timeout_factor"].default == 1.0

    @takes_settings(StepSettings)
    def planned(name: str, **options: object) -> None: ...

    assert [*inspect.signature(planned).parameters] == [
        "name", "order", "warm_up", "batch_norm", "optimizer_slots", "gradient_norm",
    ]  # fmt: skip
