"""An answer as people and programs read it: the most probable classes with their names, or the numbers themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_CLASSES = 1000
TOP = 5
LEAST_SHOWN = 0.001


@dataclass(frozen=True)
class Answer:
    """What the network said to one sample, and how long after it was asked."""

    index: int
    name: str
    output: Any
    seconds: float


@dataclass(frozen=True)
class Labels:
    """How outputs are told."""

    names: tuple[str, ...] = ()
    """Of the classes, where they are known."""
    are_classes: bool = True
    """A row of outputs is a choice among classes, as a softmax makes it."""

    def has_top(self, output: Any) -> bool:
        is_row = isinstance(output, torch.Tensor) and output.dim() == 1 and output.is_floating_point()
        return self.are_classes and is_row and output.numel() > 1

    def top(self, output: torch.Tensor, count: int) -> list[dict[str, Any]]:
        """The most probable classes, the first first."""
        values = torch.softmax(output.detach().double(), dim=0)
        found = torch.topk(values, min(count, MOST_CLASSES, values.numel()))
        names = self.names if len(self.names) == values.numel() else ()
        return [
            {"class": place, "label": names[place] if names else None, "probability": probability}
            for probability, place in zip(found.values.tolist(), found.indices.tolist())
        ]

    def told(self, answer: Answer, *, top: int = TOP, raw: bool = False) -> dict[str, Any]:
        """What a line of an answer says. An output that is no choice among classes is told as it is."""
        said: dict[str, Any] = {"index": answer.index, "name": answer.name}
        if raw or not self.has_top(answer.output):
            said["output"] = numbers(answer.output)
        else:
            said["top"] = self.top(answer.output, top)
        return {**said, "seconds": round(answer.seconds, 6)}


def numbers(output: Any) -> Any:
    """Tensors as lists; the rest stays as it is built."""
    if isinstance(output, torch.Tensor):
        return output.detach().cpu().tolist()
    if isinstance(output, dict):
        return {str(key): numbers(item) for key, item in output.items()}
    if isinstance(output, (list, tuple)):
        return [numbers(item) for item in output]
    return output


def json_line(said: Any) -> bytes:
    """One line of JSON; what is no finite number becomes null, as JSON has none."""
    try:
        text = json.dumps(said, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(said))
    return text.encode() + b"\n"


class Lines:
    """Answers as lines of JSON, each as soon as it is there."""

    content_type = "application/x-ndjson"

    def one(self, said: dict[str, Any]) -> bytes:
        return json_line(said)

    def end(self, error: dict[str, str] | None = None) -> bytes:
        return json_line(error) if error else b""


class Document:
    """Answers as one JSON document, {"answers": [...]}, written as they come. What went wrong in the middle stands
    behind them: "error"."""

    content_type = "application/json"

    def __init__(self) -> None:
        self._before = b'{"answers": ['

    def one(self, said: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\n"
        return before + json_line(said).rstrip(b"\n")

    def end(self, error: dict[str, str] | None = None) -> bytes:
        return b"], " + json_line(error)[1:] if error else b"]}\n"


def _finite(said: Any) -> Any:
    if isinstance(said, float):
        return said if math.isfinite(said) else None
    if isinstance(said, dict):
        return {key: _finite(item) for key, item in said.items()}
    return [_finite(item) for item in said] if isinstance(said, (list, tuple)) else said


def short_text(told: dict[str, Any]) -> str:
    """'7 98.2%, 1 1.1%': the classes of a line, for a table; those of no weight are left out after the first."""
    found: Sequence[dict[str, Any]] = told.get("top", ())
    shown = [one for place, one in enumerate(found) if place == 0 or one["probability"] >= LEAST_SHOWN]
    return ", ".join(f"{_name(one)} {one['probability']:.1%}" for one in shown)


def _name(one: dict[str, Any]) -> str:
    return str(one["label"] if one["label"] is not None else f"class {one['class']}")
