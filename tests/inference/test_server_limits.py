"""The HTTP endpoint: time, crowds, who may ask, and its end."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_clients import NPY, StandIn, ask, connect, samples, serving, until


def test_a_request_is_given_so_much_time() -> None:
    asks = StandIn()
    asks.may_answer.clear()
    with serving(asks, request_seconds=0.8) as served:
        status, lines = ask(served, samples(1, 2), NPY)
        assert status == 504
        assert lines[0]["error"].startswith("0 of 2 samples were answered in 0.8 s")
        asks.may_answer.set()
        asks.pause = 0.2
        status, lines = ask(served, samples(*range(9)), NPY)
        assert status == 200, "the first was there"
        assert 1 <= len(lines) <= 5
        assert f"{len(lines) - 1} of 9 samples" in lines[-1]["error"]


def test_what_went_wrong_at_the_devices_is_told() -> None:
    asks = StandIn()
    asks.fails_at = 0
    with serving(asks) as served:
        status, lines = ask(served, samples(1), NPY)
        assert (status, lines) == (503, [{"error": "Nobody is left.", "hint": "Start workers."}])
        asks.fails_at = 3
        status, lines = ask(served, samples(1, 2, 3, 4), NPY)
        assert status == 200
        assert [line.get("index") for line in lines] == [0, 1, None]
        assert lines[2]["error"] == "Nobody is left."


@pytest.mark.slow
def test_slow_clients_hold_up_nobody_and_are_let_go() -> None:
    """One drips its headers, one its body, one does not take its answers."""
    asks = StandIn()
    asks.width = 2000
    with serving(asks, idle_seconds=1.5, body_seconds=1.5) as served:
        slow = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
        slow[0].sendall(b"POST /inf")
        slow[1].sendall(b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        slow[2].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = samples(*range(10_000))
        slow[2].sendall(
            b"POST /infer?raw=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(many) + many
        )
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            before = time.monotonic()
            assert ask(served, samples(1), NPY)[0] == 200
            assert time.monotonic() - before < 1.3
            with contextlib.suppress(OSError):
                slow[0].sendall(b"e")
                slow[1].sendall(b"d")
            time.sleep(0.1)
        for one in slow[:2]:
            one.settimeout(5)
        until(lambda: not slow[0].recv(1000))
        assert b" 408 " in slow[1].recv(1000)
        until(lambda: not served._server._connections)
        assert len(asks.asked) < 10_000, "all of its answers fitted into buffers"
        for one in slow:
            one.close()


def test_beyond_so_many_connections_others_wait() -> None:
    asks = StandIn()
    asks.may_answer.clear()
    with serving(asks, connections=2) as served, ThreadPoolExecutor(2) as threads:
        under_way = [threads.submit(ask, served, samples(1), NPY) for _ in range(2)]
        until(lambda: len(asks.asked) == 2)
        status, lines = ask(served, samples(1), NPY)
        assert status == 503
        assert "2 connections" in lines[0]["error"]
        asks.may_answer.set()
        assert [one.result(10)[0] for one in under_way] == [200, 200]
        until(lambda: ask(served, samples(1), NPY)[0] == 200)


def test_a_client_that_went_away_is_not_worked_for() -> None:
    asks = StandIn()
    asks.may_answer.clear()
    with serving(asks) as served:
        with contextlib.closing(connect(served)) as connection:
            connection.request("POST", "/infer", samples(*range(200)), NPY)
            until(lambda: len(asks.asked) == 8)
        asks.pause = 0.002
        asks.may_answer.set()
        until(lambda: not served._server._connections)
        assert len(asks.asked) < 200


def test_the_end_answers_what_is_under_way() -> None:
    asks = StandIn(pause=0.05)
    with ThreadPoolExecutor(1) as threads, serving(asks) as served:
        idle = socket.create_connection(("127.0.0.1", served.port))
        one = threads.submit(ask, served, samples(*range(10)), NPY)
        until(lambda: len(asks.asked) > 0)
        began = time.monotonic()
        served._server.close()
        assert time.monotonic() - began < 5, "a connection that asks nothing was waited for"
        status, lines = one.result(1)
        assert (status, len(lines)) == (200, 10)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", served.port), timeout=1)
        idle.close()
        served._server.close = lambda: None  # type: ignore[method-assign]


# Who may ask


def test_beyond_loopback_it_is_encrypted_and_asks_for_the_token() -> None:
    with serving(StandIn(), host="0.0.0.0") as served:
        assert served.url.startswith("https://")
        assert f"Authorization: Bearer {served.bearer}" in served.example
        assert f"--pinnedpubkey '{served.pin}'" in served.example
        right = {**NPY, "Authorization": f"Bearer {served.bearer}"}
        assert ask(served, samples(1), right)[0] == 200
        for wrong in ({}, {"Authorization": "Bearer guess"}, {"Authorization": served.bearer}):
            status, lines = ask(served, samples(1), {**NPY, **wrong})
            assert (status, "token" in lines[0]["error"]) == (401, True)
            assert ask(served, None, wrong, "/health", "GET")[0] == 401
        assert ask(served, None, right, "/health", "GET")[0] == 200
        with contextlib.closing(connect(served)) as connection:
            connection.connect()
            assert connection.sock.version() == "TLSv1.3"
            assert connection.sock.getpeercert(binary_form=True) == served.certificate
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=5)) as plain:
            plain.request("GET", "/health")
            with pytest.raises((OSError, http.client.HTTPException)):
                plain.getresponse()
        quiet = socket.create_connection(("127.0.0.1", served.port))  # says nothing: nobody waits for it
        assert ask(served, samples(1), right)[0] == 200
        quiet.close()
