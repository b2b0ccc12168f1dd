"""Reaches a device through a relay (see `relay`): the end of the two devices that cannot reach each other."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from manyhands.facts.errors import Refused, TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.transport.dialling import dial
from manyhands.transport.endpoint import RelayAddress
from manyhands.transport.relay import ABSENT, FULL, OPEN
from manyhands.transport.security import Purpose, Security
from manyhands.transport.wire import Broken, Wire, wait
from manyhands.transport.wire_hello import write_hello

_LOOK_SECONDS = 0.2


def tunnel(
    relay: RelayAddress,
    security: Security,
    name: str,
    peer: str,
    deadline: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """Return a socket whose other end is `peer`'s, once that has asked the relay for this device too.

    Nothing has been said over it yet: both ends perform the handshake of a data connection. Refused where the relay
    turns this device away; TimedOut where it cannot be reached, or the other device does not come.
    """
    wire = dial(relay.host, relay.port, security, Purpose.RELAY, deadline, is_cancelled)
    try:
        write_hello(wire, {"from": name, "to": peer}, deadline)
        verdict = _verdict(wire, deadline, is_cancelled)
    except TimeoutError:
        verdict = ABSENT
    except Broken as error:
        wire.close()
        raise Refused(
            f"The relay {relay.name} at {host_and_port(relay.host, relay.port)} broke the connection off: {error}."
        ) from None
    except BaseException:
        wire.close()
        raise
    if verdict == OPEN:
        return wire.socket
    wire.close()
    if verdict == ABSENT:
        raise TimedOut(
            f"{name} waited at the relay {relay.name} for {peer}, which has not come.",
            hint=f"Can {peer} reach {host_and_port(relay.host, relay.port)}? See: manyhands doctor",
        )
    why = "relays as many connections as it may" if verdict == FULL else "relays nothing between these two"
    raise Refused(
        f"{relay.name} at {host_and_port(relay.host, relay.port)} {why}.",
        hint="Let another device relay: worker --relay",
    )


def _verdict(wire: Wire, deadline: float, is_cancelled: Callable[[], bool]) -> bytes:
    """Return the relay's answer: one byte outside the encryption, so that no byte of the other device's can be taken
    for this connection's."""
    plain = Wire(wire.socket)
    answer = bytearray(1)
    while not plain.read([memoryview(answer)]):
        if is_cancelled():
            raise Broken("it is no longer wanted")
        try:
            wait(plain, select.POLLIN, min(deadline, time.monotonic() + _LOOK_SECONDS))
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
    return bytes(answer)
