"""Settings of a coordinator: how it waits for its workers, and who may join it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from manyhands.facts.errors import BadValue
from manyhands.runtime.failure_detector import HEARTBEAT_TIMEOUT_SECONDS
from manyhands.runtime.heartbeats import HEARTBEAT_SECONDS
from manyhands.transport.keys import Credentials
from manyhands.transport.transport import Transport


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of a coordinator: its timeouts, and which workers may join."""

    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS
    """A worker whose heartbeats stop for so long has failed: it is taken out."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    timeout_factor: float = 1.0
    """How many times longer than usual every timeout is, the heartbeat timeout included."""
    max_devices: int | None = None
    """The most workers at a time: others are refused. How many a job waits for is `wait_for`'s argument, how few it
    goes on with an argument of `mh.train`."""
    transport: Transport | None = None
    clock: Callable[[], float] = time.monotonic
    """Times the heartbeats."""
    announce: bool = True
    """Whether to announce this coordinator on the network where other machines can join, so that they find it without
    --join."""
    title: str = ""
    """What the run is called in that announcement."""
    credentials: Credentials | None = None
    """This device's key and the devices it knows; None: those of `device_book`, where other machines can join."""

    def __post_init__(self) -> None:
        if self.max_devices is not None and self.max_devices < 1:
            raise BadValue(f"max_devices is {self.max_devices}; it must be at least 1.")


class CoordinatorOptions(TypedDict, total=False):
    """The fields of `CoordinatorSettings`, as keywords."""

    heartbeat_timeout_seconds: float
    heartbeat_seconds: float
    timeout_factor: float
    max_devices: int | None
    transport: Transport | None
    clock: Callable[[], float]
    announce: bool
    title: str
    credentials: Credentials | None
