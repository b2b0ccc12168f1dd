"""Connects a worker to the other devices of a run, forms its process groups, and reports devices not reached."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping

from manyhands.executor.process_groups import NoGroups, ProcessGroups
from manyhands.facts.errors import ManyhandsError, TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.runtime.attempt import Attempt
from manyhands.transport.endpoint import Address, RelayAddress
from manyhands.transport.transport import ConnectedEndpoint

CONNECT_SECONDS = 30.0


def completed(peers: Mapping[str, Address], coordinator: tuple[str, int]) -> dict[str, Address]:
    """Return addresses of which none is left to the reader: where a host is empty it is the coordinator's, which has
    other addresses for each of the networks in between."""
    complete = {}
    for name, address in peers.items():
        relay = address.relay
        if relay is not None and not relay.host:
            address = address._replace(relay=RelayAddress(relay.name, *coordinator))
        elif relay is None and not address.host and address.is_dialled:
            address = address._replace(host=coordinator[0], port=coordinator[1])
        complete[name] = address
    return complete


def connect(
    endpoint: ConnectedEndpoint, peers: Mapping[str, Address], timeout_factor: float, check: Callable[[], None]
) -> None:
    """Connect to all other devices of the run.

    `check`: called meanwhile; it raises once the run was stopped, so that a peer that never comes is not waited for.
    """
    limit_seconds = CONNECT_SECONDS * timeout_factor
    deadline = time.monotonic() + limit_seconds
    attempt = Attempt(lambda: endpoint.connect(peers, limit_seconds), "connect")
    try:
        while not attempt.is_over(0.1):
            check()
    except ManyhandsError as error:
        if not error.is_before_proof:
            raise
        _keep_to_itself(error, deadline, check)
        raise _unreached(endpoint, peers, limit_seconds) from error


def form_groups(groups: ProcessGroups, timeout_factor: float, check: Callable[[], None]) -> None:
    """Form process groups with the other devices of the run. `check`: as of `connect`."""
    limit_seconds = CONNECT_SECONDS * timeout_factor
    deadline = time.monotonic() + limit_seconds
    attempt = Attempt(lambda: groups.form(limit_seconds), "process groups")
    try:
        while not attempt.is_over(0.1):
            check()
    except NoGroups as error:
        _keep_to_itself(error, deadline, check)
        raise TimedOut(
            f"{groups.name} could not form process groups with the other devices within {limit_seconds:g} s.",
            hint="Can all devices connect to each other's ports? Else leave out --collectives. The log of "
            f"{groups.name} says what PyTorch reported.",
        ) from error


def _keep_to_itself(error: ManyhandsError, deadline: float, check: Callable[[], None]) -> None:
    """Log what the network answered, here alone, and wait until the deadline, so that the time says nothing either."""
    with contextlib.suppress(OSError):  # the log may be on a full disk
        print(error, file=sys.stderr)
    while time.monotonic() < deadline:
        check()
        time.sleep(0.1)


def _unreached(endpoint: ConnectedEndpoint, peers: Mapping[str, Address], limit_seconds: float) -> TimedOut:
    """Return the error for peers that did not prove that they know the token.

    It is the same whatever a peer did instead and however soon: see `member_probes`. The network's answer is in this
    worker's own log.
    """
    worker = endpoint.name
    missing = [
        f"{name} at {host_and_port(address.host, address.port)}"
        for name, address in peers.items()
        if not address.relay and address.is_dialled_by(worker, name) and not endpoint.is_connected(name)
    ]
    return TimedOut(
        f"{worker} could not connect to {', '.join(missing)} within {limit_seconds:g} s: no member answers there.",
        hint="Does a firewall let it through? manyhands doctor says who cannot reach whom; the log of "
        f"{worker} says what the network answered.",
    )
