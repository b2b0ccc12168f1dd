"""A real run on local workers, watched in a real browser while one of its workers is killed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

from manyhands.dashboard.server import Dashboard
from manyhands.runtime.coordinator import Coordinator
from real_runs import Ran, kill, names, pid, shared, train, workers

pytestmark = pytest.mark.xdist_group("browser")
STEPS = 80
PAUSE_SECONDS = 0.25
"""After each step, so that there is time to look; until it has recovered."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3, heartbeat_timeout_seconds=2.0) as coordinator:
        yield coordinator


class Running:
    """A job on a thread of its own."""

    def __init__(self, cluster: Coordinator, folder: Path, served: Dashboard) -> None:
        self.has_seen_enough = threading.Event()
        self.ran: list[Ran] = []
        self.failed: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(cluster, folder, served), daemon=True)
        self.thread.start()

    def _run(self, cluster: Coordinator, folder: Path, served: Dashboard) -> None:
        def opened(where: Path) -> str:
            served.show(where)
            return served.url

        def stepped(*_: Any) -> None:
            if not self.has_seen_enough.is_set():
                time.sleep(PAUSE_SECONDS)

        try:
            plan = shared(names(cluster), 5, 4, 3)
            options = {"steps": STEPS, "on_opened": opened, "on_step": stepped, "replan": "light", "backup_every": 2}
            self.ran.append(train(cluster, plan, folder, **options))
        except BaseException as error:
            self.failed.append(error)

    def ended(self) -> Ran:
        self.has_seen_enough.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert not self.failed, self.failed
        return self.ran[0]


@pytest.mark.slow
def test_a_killed_worker_is_shown_as_lost_and_the_run_as_recovered(
    browser: Browser, cluster: Coordinator, tmp_path: Path
) -> None:
    victim = names(cluster)[1]
    of_victim = f"document.querySelector('#cluster g.device[data-name={json.dumps(victim)}]')?.dataset.state"
    folder = tmp_path / "run"
    with Dashboard(("127.0.0.1", 0)) as served:
        browser.size(1280)
        browser.open(served.url)
        running = Running(cluster, folder, served)
        try:
            browser.until("document.getElementById('state').textContent === 'running'", "it runs", 120)
            browser.until("document.querySelectorAll('#cluster g.device').length === 3", "three devices")
            browser.until(f"{of_victim} === 'here'", "the victim is at work")
            browser.until("document.querySelectorAll('#loss canvas').length === 1", "losses are drawn")
            assert browser.count("#events li[data-kind=lost]") == 0
            process = pid(cluster, victim)
            kill(cluster, victim)
            browser.until("document.querySelector('#events li[data-kind=lost]')", "that it is lost")
            assert victim in browser.text("#events li[data-kind=lost]")
            browser.until(f"{of_victim} === 'lost'", "the victim is marked")
            browser.until("document.querySelector('#events li[data-kind=recovered]')", "that it goes on", 60)
            kinds = browser.ask("[...document.querySelectorAll('#events li')].map((one) => one.dataset.kind)")
            assert kinds.index("recovered") < kinds.index("lost"), "newest first"
            browser.until("document.getElementById('state').textContent === 'running'", "it runs on")
            assert "2 of 3" in browser.text("#facts")
            browser.until("document.querySelectorAll('#plan g.share').length === 2", "the new plan")
        finally:
            ran = running.ended()
        browser.until("document.getElementById('state').textContent === 'ended'", "the end")
        assert browser.text("#facts").count(f"{STEPS} of {STEPS}") == 1
        assert not browser.problems
        assert all(url.startswith(served.url) for url in browser.requests)
    assert process != 0
    lost = [
        one for one in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if one["event"] == "lost"
    ]
    assert [one["devices"] for one in lost] == [[victim]], "the kill was the loss"
    assert "SIGKILL" in lost[0]["reason"]
    assert ran.result.steps == STEPS
