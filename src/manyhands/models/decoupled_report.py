"""Reports of what decoupling would do to a model known by name."""

from __future__ import annotations

from manyhands.decoupling.report import DecoupleReport
from manyhands.facts.errors import BadValue


def parse_shuffles(text: str) -> int | str:
    """Return '3' as 3, and 'all' as it is."""
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise BadValue(f"--shuffles '{text}' is not a number.", hint="Write a number, or all.") from error


def decouple_named(
    model: str, *, groups: int, shuffles: int | str, widen: float, input_shape: tuple[int, ...] | None = None
) -> DecoupleReport:
    """Return the report of decoupling a model of that name. The zoo's are built without memory for their weights."""
    import torch

    from manyhands.decoupling.decouple import decouple
    from manyhands.models import registry

    entry = registry.entry_of(model)
    with torch.device("meta" if entry is not None else "cpu"):
        module = registry.build(model)
        shape = input_shape or (entry.input_shape if entry else None)
        return decouple(module, groups, shuffles, widen, inputs=shape).report  # type: ignore[arg-type]
