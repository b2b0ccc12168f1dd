"""Connects to a listener and performs the handshake: the caller's end of control channels and data connections."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable

from manyhands.facts.errors import ManyhandsError, TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.transport.proofs import TakesNoProofs
from manyhands.transport.security import CutOff, Purpose, Security, enter
from manyhands.transport.wire import Broken, Wire

_RETRY_SECONDS = 0.05
_CUT_OFF_SECONDS = (0.5, 8.0)
"""The first and the longest pause after a handshake that was cut off: the server is busy, and may have counted it as a
failed proof."""
_CONNECT_POLL_MILLISECONDS = 100


def dial(
    host: str,
    port: int,
    security: Security,
    purpose: Purpose,
    deadline: float,
    is_cancelled: Callable[[], bool] = lambda: False,
    *,
    once: bool = False,
) -> Wire:
    """Connect, perform the handshake, and return the wire.

    Where nothing listens yet, or a handshake is cut off, it is tried until the deadline; then TimedOut says what the
    obstacle was. `once`: a peer that is not there, or does not answer, is not tried again. Every error raised has
    `is_before_proof` set.
    """
    try:
        return _dial(host, port, security, purpose, deadline, is_cancelled, once=once)
    except ManyhandsError as error:
        error.is_before_proof = True
        raise


def _dial(
    host: str,
    port: int,
    security: Security,
    purpose: Purpose,
    deadline: float,
    is_cancelled: Callable[[], bool],
    *,
    once: bool,
) -> Wire:
    where = host_and_port(host, port)
    start = time.monotonic()
    reason, hint = "", ""
    cut_off_seconds, longest_seconds = _CUT_OFF_SECONDS
    while True:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0 or is_cancelled() or (once and reason):
            spent = min(time.monotonic(), deadline) - start
            if hint:
                raise TimedOut(f"{where} answered, but {reason}.", hint=hint)
            raise TimedOut(
                f"Nobody answered at {where} within {round(spent, 1):g} s ({reason or 'no time to try'}).",
                hint="Is it running, is this its address, and does a firewall let it through?",
            )
        connected: socket.socket | None = None
        pause, hint = _RETRY_SECONDS, ""
        try:
            limit = time.monotonic() + min(seconds_left, security.handshake_seconds)
            connected = _connected(host, port, limit, is_cancelled)
            if connected.getsockname() == connected.getpeername():
                raise Broken("connected to itself")  # a free port on this machine can do that
            limit = min(deadline, time.monotonic() + security.handshake_seconds)
            return enter(connected, security, purpose, where, limit)
        except TimeoutError:
            reason = "no answer"
        except TakesNoProofs as error:
            reason, pause = str(error), error.seconds
            hint = "Somebody guesses tokens there, or a wrong one was tried too often. Wait, then try again."
        except CutOff as error:
            reason, pause = str(error), cut_off_seconds
            hint = "It may be busy: try again. Its log says why."
            cut_off_seconds = min(2 * cut_off_seconds, longest_seconds)
        except (Broken, OSError) as error:
            reason = ((error.strerror if isinstance(error, OSError) else "") or str(error)).lower()
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        if connected is not None:
            connected.close()
        if not once:
            _sleep(min(pause, deadline - time.monotonic()), is_cancelled)


def _sleep(seconds: float, is_cancelled: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while (seconds_left := end - time.monotonic()) > 0 and not is_cancelled():
        time.sleep(min(seconds_left, _RETRY_SECONDS))


def _connected(host: str, port: int, deadline: float, is_cancelled: Callable[[], bool]) -> socket.socket:
    """Connect like `socket.create_connection`, but give up early once `is_cancelled`."""
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            code = connecting.connect_ex(address)
            poll = select.poll()
            poll.register(connecting, select.POLLOUT)
            while code == errno.EINPROGRESS:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0 or is_cancelled():
                    raise TimeoutError
                if poll.poll(min(seconds_left * 1000, _CONNECT_POLL_MILLISECONDS)):
                    code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            return connecting
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
    raise failure
