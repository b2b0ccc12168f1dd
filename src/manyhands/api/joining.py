"""How a device is told where to join: addresses and what to compute with, as typed by a person."""

from __future__ import annotations

import re

from manyhands.facts.errors import BadValue


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """'192.168.1.5:7077' or '[::1]:7077' -> host and port."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(?::(\d{1,5}))?", text.strip())
    port = match.group(2) if match else None
    if match is None or (port is None and default_port is None) or (port is not None and int(port) > 65535):
        raise BadValue(f"'{text:.80}' is not an address.", hint="Write HOST:PORT, like 192.168.1.5:7077.")
    return match.group(1).strip("[]"), int(port) if port is not None else default_port or 0


def parse_compute(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", text):
        raise BadValue(f"--compute '{text:.40}' is not something to compute with.", hint="Write cpu, cuda or cuda:1.")
    return text
