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
    """The network's output for one sample, and how long after its submission it came."""

    index: int
    name: str
    output: Any
    seconds: float


@dataclass(frozen=True)
class Labels:
    """The classes that outputs are reported as."""

    names: tuple[str, ...] = ()
    """Names of the classes, if they are known."""
    are_classes: bool = True
    """Whether a row of outputs is a choice among classes, as a softmax makes it."""

    def has_top(self, output: Any) -> bool:
        is_row = isinstance(output, torch.Tensor) and output.dim() == 1 and output.is_floating_point()
        return self.are_classes and is_row and output.numel() > 1

    def top(self, output: torch.Tensor, count: int) -> list[dict[str, Any]]:
        """Return the most probable classes, most probable first."""
        values = torch.softmax(output.detach().double(), dim=0)
        best = torch.topk(values, min(count, MOST_CLASSES, values.numel()))
        names = self.names if len(self.names) == values.numel() else ()
        return [
            {"class": place, "label": names[place] if names else None, "probability": probability}
            for probability, place in zip(best.values.tolist(), best.indices.tolist())
        ]

    def described(self, answer: Answer, *, top: int = TOP, raw: bool = False) -> dict[str, Any]:
        """Return the line of an answer. An output that is no choice among classes is included as it is."""
        line: dict[str, Any] = {"index": answer.index, "name": answer.name}
        if raw or not self.has_top(answer.output):
            line["output"] = numbers(answer.output)
        else:
            line["top"] = self.top(answer.output, top)
        return {**line, "seconds": round(answer.seconds, 6)}


def numbers(output: Any) -> Any:
    """Return the output with tensors as lists, in the same structure."""
    if isinstance(output, torch.Tensor):
        return output.detach().cpu().tolist()
    if isinstance(output, dict):
        return {str(key): numbers(item) for key, item in output.items()}
    if isinstance(output, (list, tuple)):
        return [numbers(item) for item in output]
    return output


def json_line(document: Any) -> bytes:
    """Return one line of JSON; numbers that are not finite become null, as JSON has none."""
    try:
        text = json.dumps(document, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(document))
    return text.encode() + b"\n"


class Lines:
    """Writes answers as lines of JSON, each as soon as it is ready."""

    content_type = "application/x-ndjson"

    def one(self, line: dict[str, Any]) -> bytes:
        return json_line(line)

    def end(self, error: dict[str, str] | None = None) -> bytes:
        return json_line(error) if error else b""


class Document:
    """Writes answers as one JSON document, {"answers": [...]}, as they come. An error in the middle follows them as
    "error"."""

    content_type = "application/json"

    def __init__(self) -> None:
        self._before = b'{"answers": ['

    def one(self, line: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\n"
        return before + json_line(line).rstrip(b"\n")

    def end(self, error: dict[str, str] | None = None) -> bytes:
        return b"], " + json_line(error)[1:] if error else b"]}\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def short_text(line: dict[str, Any]) -> str:
    """Return the classes of a line for a table, as '7 98.2%, 1 1.1%'; negligible ones after the first are left out."""
    classes: Sequence[dict[str, Any]] = line.get("top", ())
    shown = [entry for place, entry in enumerate(classes) if place == 0 or entry["probability"] >= LEAST_SHOWN]
    return ", ".join(f"{_name(entry)} {entry['probability']:.1%}" for entry in shown)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["label"] if entry["label"] is not None else f"class {entry['class']}")
