"""The addresses at which devices meet: the coordinator's usual port, and where a worker says that it is reached."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_PORT = 7077
"""The port at which workers join, where none is given."""


class Advertised(NamedTuple):
    """An address at which other devices are to reach a worker, in place of the one from which it has joined."""

    host: str
    """An IP address."""
    port: int = 0
    """The port there from which another machine forwards to this worker; 0: the worker listens at `host` itself."""

    def listening_host(self, local_host: str) -> str:
        """Return where the worker listens, which reaches the coordinator from `local_host`."""
        return self.host if not self.port else "::" if ":" in local_host else "0.0.0.0"


def of_slot(number: int, advertised: Advertised | None, data_port: int) -> tuple[Advertised | None, int]:
    """Return the address and data port of one of several workers in a process, counted from 1: ports follow one
    another."""
    if advertised is not None and advertised.port:
        advertised = advertised._replace(port=advertised.port + number - 1)
    return advertised, data_port + number - 1 if data_port else 0
