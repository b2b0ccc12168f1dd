"""The dashboard's server without a browser: what it tells, whom it tells, and who cannot keep it busy."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from example_folders import LAYERS, names, write_example
from page_clients import Streamed, get, raw, view

from manyhands.dashboard import server
from manyhands.dashboard.handler import HEADERS
from manyhands.dashboard.page import page_files
from manyhands.dashboard.sections import (
    MOST_EVENT_BYTES,
    MOST_EVENTS,
    MOST_ROWS,
    NAMES,
    event_bytes,
    rows_between,
    sections,
    shown_events,
)
from manyhands.dashboard.server import Dashboard
from manyhands.files.documents import write_document
from manyhands.observe.live import MOST_LINKS, Live, LiveLink
from manyhands.observe.watching import RunWatch, View
from manyhands.transport.http_server import ConnectionLimits
from manyhands.transport.rate_limiter import RateLimiter

EVERYWHERE = "0.0.0.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_example(tmp_path / "run")


@pytest.fixture
def served(folder: Path) -> Iterator[Dashboard]:
    with Dashboard(("127.0.0.1", 0), folder) as found:
        yield found


# What it tells


def test_a_view_has_all_of_a_folder(served: Dashboard, folder: Path) -> None:
    found = view(served)
    assert found["reset"]
    assert set(NAMES) <= set(found)
    assert found["live"]["run"] == "run"
    assert found["live"]["is_live"]
    assert "pid" not in found["live"]
    assert [one["name"] for one in found["devices"]] == names(4)
    assert found["round"]["names"] == names(4)
    assert len(found["round"]["measured"]) == 4 * (4 * 4 + 2)
    assert found["plan"]["stages"][-1]["layers"][1] == LAYERS
    assert found["metrics"]["step"] == list(range(80))
    assert [one["event"] for one in found["events"]] == ["started", "checkpoint", "note"]


def test_only_what_is_new_is_told(served: Dashboard, folder: Path) -> None:
    cursor = view(served)["cursor"]
    same = view(served, cursor)
    assert same["cursor"] == cursor
    assert not same["reset"]
    assert not set(NAMES) & set(same)
    assert same["events"] == same["metrics"]["step"] == []
    with open(folder / "metrics.csv", "a") as file:
        file.write("80,4,0.25,0.4,160,\n")
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "joined", "device": "pi-9"}) + "\n")
    more = _until(served, cursor)
    assert more["metrics"] == {"step": [80], "loss": [0.25], "seconds": [0.4], "samples_per_second": [160]}
    assert [one["event"] for one in more["events"]] == ["joined"]
    assert "plan" not in more


def _until(served: Dashboard, cursor: str) -> Any:
    end = time.monotonic() + 10
    while (found := view(served, cursor))["cursor"] == cursor:
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def test_a_file_that_begins_anew_is_told_anew(served: Dashboard, folder: Path) -> None:
    """As after --resume from an earlier checkpoint."""
    cursor = view(served)["cursor"]
    write_example(folder, done=10)
    again = _until(served, cursor)
    assert again["reset"]
    assert again["metrics"]["step"] == list(range(10))


@pytest.mark.parametrize("cursor", ["x", "0.0.0.0", "ffffffff.1.2.3", "..%2f", "9" * 500])
def test_a_cursor_nobody_gave_out_is_told_everything(served: Dashboard, cursor: str) -> None:
    found = view(served, cursor)
    assert found["reset"]
    assert len(found["metrics"]["step"]) == 80


def test_the_folder_may_be_known_later(folder: Path) -> None:
    with Dashboard(("127.0.0.1", 0)) as found:
        before = view(found)
        assert "live" not in before
        found.show(folder)
        after = view(found, before["cursor"])
        assert after["reset"]
        assert after["live"]["model"] == "vgg11"


def test_the_plan_is_the_one_that_is_run_now(served: Dashboard, folder: Path) -> None:
    """A run that is planned anew replaces its plan.yaml."""
    cursor = view(served)["cursor"]
    write_document(folder / "plan.yaml", {"stages": [], "network": "other"})
    assert _until(served, cursor)["plan"]["network"] == "other"


def test_looks_at_a_link_do_not_push_out_what_happened() -> None:
    looks = [{"event": "looked", "number": number} for number in range(1, 2 * MOST_EVENTS)]
    joined = [{"event": "joined", "number": 2 * MOST_EVENTS + number} for number in range(MOST_EVENTS - 1)]
    told = [json.loads(one) for one in shown_events([{"event": "started", "number": 0}, *looks, *joined])]
    assert told == [{"event": "started", "number": 0}, *joined]


@pytest.mark.parametrize(("count", "is_limited"), [(MOST_LINKS - 1, False), (MOST_LINKS, True), (MOST_LINKS + 9, True)])
def test_of_very_many_links_the_first_are_told(tmp_path: Path, count: int, is_limited: bool) -> None:
    """The run puts the busiest first."""
    links = tuple(LiveLink("a", str(number)) for number in range(count))
    told = sections(View(tmp_path, Live(links=links)))
    assert [one["target"] for one in json.loads(told["links"])] == [str(n) for n in range(min(count, MOST_LINKS))]
    assert json.loads(told["live"])["has_busiest_links_only"] == is_limited


def test_a_stream_tells_what_happens_and_the_end(folder: Path) -> None:
    with Dashboard(("127.0.0.1", 0), folder) as found, contextlib.closing(Streamed(found)) as stream:
        messages = iter(stream)
        kind, first = next(messages)
        assert (kind, first["reset"]) == ("message", True)
        with open(folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"event": "lost", "devices": ["pi-2"], "reason": "gone"}) + "\n")
        kind, second = next(one for one in messages if one[0] == "message")
        assert [one["event"] for one in second["events"]] == ["lost"]
        write_example(folder, state="ended")
        closing = threading.Thread(target=found.close)
        closing.start()
        rest = list(messages)
        closing.join(10)
        assert not closing.is_alive()
    assert rest[-1] == ("bye", {})
    assert any(content["live"]["state"] == "ended" for kind, content in rest if kind == "message" and "live" in content)


def test_nothing_is_read_while_nobody_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = RunWatch.look
    monkeypatch.setattr(RunWatch, "look", lambda self: (looks.append(1), look(self))[1])
    with Dashboard(("127.0.0.1", 0), folder) as found:
        time.sleep(0.2)
        assert not looks
        view(found)
        assert looks


def test_odd_files_are_left_out(tmp_path: Path) -> None:
    """A run's folder may come from anybody."""
    folder = write_example(tmp_path / "odd")
    (folder / "plan.yaml").write_text("network: 2001-01-01\nstages: .nan\n? [1, 2]\n: x\n")
    (folder / "live.json").write_text('{"devices": 3}')
    lines = ['{"event": "huge", "value": 1' + "0" * 400 + "}", '{"event": "nan", "value": NaN}', "[" * 5000, "{}", "\0"]
    (folder / "events.jsonl").write_text("\n".join([*lines, json.dumps({"event": "long", "text": "x" * 10**5})]) + "\n")
    with Dashboard(("127.0.0.1", 0), folder) as found:
        told = view(found)
    assert [one["event"] for one in told["events"]] == ["huge", "nan", "long"]
    assert told["events"][1]["value"] is None


def test_a_long_event_is_cut() -> None:
    found = event_bytes({"event": "note", "time": "now", "number": 3, "text": "y" * (2 * MOST_EVENT_BYTES)})
    assert len(found) < 300
    assert json.loads(found)["number"] == 3


def test_many_steps_are_told_as_means() -> None:
    count = 10 * MOST_ROWS + 7
    metrics: dict[str, list[float | None]] = {
        "step": [float(step) for step in range(count)],
        "loss": [None if step % 3 else float(step) for step in range(count)],
    }
    found = rows_between(metrics, 0, count)
    assert len(found["step"]) == len(found["loss"]) == MOST_ROWS
    assert found["step"][-1] == count - 1
    assert all(value is not None and abs(value - place * 10) < 20 for place, value in enumerate(found["loss"]))


# Whom it tells


def test_every_answer_has_strict_headers(served: Dashboard) -> None:
    for path in ("/", "/style.css", "/api/view", "/nothing"):
        _, headers, _ = get(served, path)
        assert {name.lower(): value for name, value in HEADERS.items()}.items() <= headers.items(), path
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]


def test_every_file_of_the_page_is_served(served: Dashboard) -> None:
    assert {"/", "/index.html", "/main.js", "/style.css", "/uplot/uPlot.iife.min.js"} <= set(page_files())
    for path, file in page_files().items():
        status, headers, body = get(served, path)
        assert (status, headers["content-type"], body) == (200, file.kind, file.content)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/%2e%2e/server.py", "/assets/index.html", "//etc/passwd", "/uplot/../../server.py", "/uplot",
     "/uplot/", "/uplot/LICENSE", "/api", "/api/view/x", "/index.html%00", "/\\..\\x"],
)  # fmt: skip
def test_no_other_path_leads_anywhere(served: Dashboard, path: str) -> None:
    status, _, body = get(served, path)
    assert status == 404, body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_there_is_nothing_but_get(served: Dashboard, method: str) -> None:
    status, headers, _ = get(served, "/api/view", method=method)
    assert status in (405, 501)
    assert headers["content-type"] == "application/json"


def test_long_requests_are_refused(served: Dashboard) -> None:
    assert get(served, "/api/view?since=" + "9" * 5000)[0] == 414
    assert get(served, "/?" + "a" * 70_000)[0] == 414
    assert get(served, "/", {"X-Long": "a" * 70_000})[0] == 431


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:7070"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:7070"}, 200),
        ({"Host": "[::1]:7070"}, 200),
        ({"Origin": "http://127.0.0.1:7070"}, 200),
    ],
)
def test_pages_of_elsewhere_cannot_look(served: Dashboard, headers: dict[str, str], status: int) -> None:
    """A name that somebody points at 127.0.0.1 is still that name (DNS rebinding)."""
    assert get(served, "/api/view", headers)[0] == status


def test_beyond_loopback_a_token_is_needed(folder: Path) -> None:
    with Dashboard((EVERYWHERE, 0), folder, shown_host="192.0.2.7") as found:
        assert found.url == f"https://192.0.2.7:{found.port}/?token={found.token}"
        assert len(found.token) >= 32
        for path in ("/", "/main.js", "/api/view", "/api/stream", "/?token=", "/?token=x", f"/?token={found.token}x"):
            status, headers, body = get(found, path)
            assert status == 401
            assert "set-cookie" not in headers
            assert found.token.encode() not in body
        status, headers, _ = get(found, f"/?token={found.token}", {"Host": "192.0.2.7"})
        assert status == 200
        cookie, *flags = headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict", "Secure"} <= set(flags)
        assert get(found, "/api/view", {"Cookie": cookie})[0] == 200
        assert get(found, "/api/view", {"Cookie": cookie[:-1]})[0] == 401
        assert get(found, "/api/view", {"Cookie": "; ;=;\x01"})[0] == 401
        with contextlib.closing(raw(found)) as plain:  # who does not encrypt gets no answer
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(100)


# Who cannot keep it busy


@pytest.mark.slow
def test_slow_clients_keep_nobody_waiting(tmp_path: Path) -> None:
    """Some stop reading in the middle, some never finish their request; both are ended after a while."""
    folder = write_example(tmp_path / "large", devices=64, share="samples", micro_batches=32)
    limits = ConnectionLimits(connections=8, idle_seconds=0.6, drain_seconds=0.5)
    with Dashboard(("127.0.0.1", 0), folder, limits=limits) as found, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(contextlib.closing(raw(found))) for _ in range(6)]
        for one in slow[:3]:
            one.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for one in slow[3:]:
            one.sendall(b"GET /api/view HTTP/1.1\r\nHost: loc")
        start = time.monotonic()
        assert view(found)["reset"]
        assert time.monotonic() - start < 5
        end = time.monotonic() + 10
        while get(found, "/api/view")[0] != 200 or _threads("process_request_thread") > 2:
            assert time.monotonic() < end, "slow clients are still there"
            time.sleep(0.1)
        begun = time.monotonic()
        found.close()
        assert time.monotonic() - begun < 5


def _threads(name: str) -> int:
    return sum(name in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_a_flood_is_slowed_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask, only so much is answered: what is left of the process is the run's."""
    monkeypatch.setattr(server, "PER_SECOND", 20)
    monkeypatch.setattr(server, "AT_ONCE", 10)
    limits = ConnectionLimits(connections=4, idle_seconds=2.0, drain_seconds=0.5)
    with Dashboard(("127.0.0.1", 0), folder, limits=limits) as found:
        answered, refused = [], []
        start = time.monotonic()
        stop = start + 0.8

        def flood() -> None:
            while time.monotonic() < stop:
                try:
                    (answered if get(found, "/api/view")[0] == 200 else refused).append(1)
                except (OSError, HTTPException):
                    refused.append(1)

        threads = [threading.Thread(target=flood) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        seconds = time.monotonic() - start
        assert refused
        assert len(answered) <= 10 + 20 * seconds
        end = time.monotonic() + 10
        while get(found, "/api/view")[0] != 200:
            assert time.monotonic() < end, "it does not answer any more"
            time.sleep(0.1)


def test_a_turnstile_lets_a_burst_pass_and_then_some() -> None:
    turnstile = RateLimiter(per_second=50, burst=5)
    start = time.monotonic()
    assert all(turnstile.passes(1.0) for _ in range(15))
    assert 0.15 < time.monotonic() - start < 1.0
    slow = RateLimiter(per_second=0.5, burst=1)
    assert [slow.passes(0.01), slow.passes(0.01)] == [True, False]
