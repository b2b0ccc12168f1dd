"""The environment variables that are options of `manyhands worker`, as a container or a service sets them."""

from __future__ import annotations

import os

WORKER_VARIABLES = tuple(
    f"MANYHANDS_{name}"
    for name in (
        "JOIN", "NAME", "COMPUTE", "THREADS", "SLOTS", "DATA_PORT", "ADVERTISE", "HEALTH_PORT", "GRACE", "WAIT",
        "STAY", "LAUNCHER", "TOKEN_FILE",
    )
)  # fmt: skip


def environment_for_children() -> dict[str, str]:
    """Return this process's environment without those: workers that it starts get their options as words."""
    return {name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES}
