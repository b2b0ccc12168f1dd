"""Probes of whether others can be reached from this machine: a connection is made and closed again, and nothing is sent
over it.

The network's own answer is kept as it is: a port that refuses and one that stays silent need different remedies. It is
for the person at this machine; what a worker reports to a coordinator is in `member_probes`.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from manyhands.transport.endpoint import Address

OPEN, REFUSED, SILENT, NO_ROUTE, NO_HOST, FAILED = "open", "refused", "silent", "no route", "no such host", "failed"
NO_MEMBER = "no member answers"
LIMIT_SECONDS = 4.0
"""Longest time of a probe. A TCP connection over a link with a second of delay takes two; the first lost packet is sent
again after one."""
_MOST_AT_ONCE = 32
_MOST_PEERS = 1024
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class ProbeAnswer(msgspec.Struct, frozen=True):
    """The network's answer to an attempt to connect."""

    host: str
    port: int
    outcome: str
    """open; refused: no process listens there, or a firewall rejects; silent: no answer within the limit; no route; no
    such host; failed; no member answers: what a worker reports for all of these, and for a peer with another token."""
    seconds: float
    text: str = ""
    """The system's message."""

    @property
    def is_open(self) -> bool:
        return self.outcome == OPEN


def probe_all(reader: str, peers: Mapping[str, Address], limit_seconds: float) -> dict[str, ProbeAnswer]:
    """Return peer -> the result of connecting, for each that `reader` is the one to connect to; all at once."""
    targets = {
        name: address
        for name, address in list(peers.items())[:_MOST_PEERS]
        if name != reader and address.is_dialled_by(reader, name)
    }
    if not targets:
        return {}
    limit = min(max(0.0, limit_seconds), LIMIT_SECONDS)
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(targets)), "probe") as pool:
        attempts = {name: pool.submit(probe, address.host, address.port, limit) for name, address in targets.items()}
    return {name: attempt.result() for name, attempt in attempts.items()}


def probe(host: str, port: int, limit_seconds: float = LIMIT_SECONDS) -> ProbeAnswer:
    """Return the result of one attempt; never raises."""
    start = time.monotonic()
    outcome, text = OPEN, ""
    try:
        socket.create_connection((host, port), timeout=limit_seconds).close()
    except socket.gaierror as error:
        outcome, text = NO_HOST, error.strerror or str(error)
    except ConnectionRefusedError as error:
        outcome, text = REFUSED, error.strerror or str(error)
    except TimeoutError:
        outcome, text = SILENT, f"no answer within {limit_seconds:g} s"
    except (OSError, OverflowError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        outcome = NO_ROUTE if number in _NO_ROUTE else FAILED
        text = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return ProbeAnswer(host, port, outcome, time.monotonic() - start, text[:200])
