"""Every drawing by name: drawings/NAME.svg."""

from __future__ import annotations

from collections.abc import Callable

from making import machinery as m
from making import picture
from making import strategies as s

_BY_NAME = (
    s.tiles, s.pipeline, s.split, s.decouple, s.channels, s.mixed,
    m.alive, m.engine, m.codec, m.decision, m.silos, m.lab, m.honest,
)  # fmt: skip
DRAWINGS: dict[str, Callable[[], str]] = {"picture": picture.draw, **{draw.__name__: draw for draw in _BY_NAME}}
