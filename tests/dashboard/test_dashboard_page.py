"""The page in a real browser: what is drawn of a known folder, on a desk and on a phone, and when nobody answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from example_folders import LAYERS, names, write_example

from manyhands.dashboard.server import Dashboard

pytestmark = pytest.mark.xdist_group("browser")
DRAWN = "document.documentElement.dataset.drawn && document.querySelectorAll('#events li').length"
MANY_COLOURS = """(() => { const canvas = document.querySelector('#%s canvas');
  const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size; })()"""

CONTRAST = """(() => { const pill = document.getElementById('state'); pill.dataset.state = '%s';
  const light = (colour) => colour.match(/[0-9]+/g).slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0.05);
  const { color, backgroundColor } = getComputedStyle(pill);
  const [less, more] = [light(color), light(backgroundColor)].sort((one, other) => one - other);
  return more / less; })()"""


def shown(browser: Browser, served: Dashboard, width: int = 1280, *, is_dark: bool = False) -> None:
    browser.size(width, is_dark=is_dark)
    browser.open(served.url)
    browser.until(DRAWN, "the run is drawn")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Dashboard]:
    folder = write_example(tmp_path / "run", devices=4, lost=("pi-3",))
    with Dashboard(("127.0.0.1", 0), folder) as found:
        yield found


def assert_quiet(browser: Browser, served: Dashboard) -> None:
    """No error anywhere, and nothing was asked of anybody else."""
    assert not browser.problems
    assert browser.requests
    assert all(url.startswith(served.url) for url in browser.requests)


@pytest.mark.slow
def test_everything_of_a_run_is_drawn(browser: Browser, served: Dashboard) -> None:
    shown(browser, served)
    assert browser.text("#state") == "running"
    assert browser.text("#connection") == "live"
    head = browser.text("#facts")
    for words in ("vgg11", "80 of 120", "17 s", "152", "0.3100", "3 of 4"):
        assert words in head
    assert browser.count("#cluster g.device") == 4
    assert browser.count("#cluster g.device[data-state=lost]") == 1
    assert browser.count("#cluster path.edge") == browser.count("#cluster g.edge-label") == 3
    assert "Mbit/s" in browser.text("#cluster")
    assert browser.count("#link-table tbody tr") == 6
    assert "1.00 Gbit/s" in browser.ask("document.querySelector('#link-table tbody').textContent")
    assert browser.count("#plan rect.layer") == LAYERS
    assert browser.count("#plan .stage") == browser.count("#plan g.share") == 4
    assert browser.count("#timeline svg.round") == 2
    assert browser.count("#timeline g.lane") == 8
    assert browser.count("#timeline path[data-look=forward]") == browser.count("path[data-look=backward]") == 8
    assert "bubbles" in browser.text("#timeline-hint")
    assert browser.count("#memory g.memory-row") == browser.count("#memory path.budget") == 4
    kinds = browser.ask("[...document.querySelectorAll('#events li')].map((one) => one.dataset.kind)")
    assert kinds == ["note", "recovered", "lost", "checkpoint", "started"]
    assert "Jan 2026" in browser.ask("document.querySelector('#events time').title")
    for part, words in (("timeline", "pi-4 idle "), ("memory", "pi-4: process 1.20 GB, "), ("plan", "pi-4: all of it")):
        labels = browser.ask(f"[...document.querySelectorAll('#{part} [role=img]')].map((one) => one.ariaLabel)")
        assert any(words in label for label in labels), labels
    for chart in ("loss", "rate"):
        assert browser.ask(MANY_COLOURS % chart) > 5, f"{chart} is blank"
    assert browser.count("main section[aria-labelledby]") == 7
    assert browser.count("header") == browser.count("main") == browser.count("[aria-live=polite]") == 1
    assert_quiet(browser, served)


@pytest.mark.quick("samples-64-64")
@pytest.mark.parametrize(("share", "devices", "cells"), [("tiles", 6, 6), ("samples", 64, 64), ("channels", 3, 3)])
def test_all_ways_of_sharing_are_drawn(browser: Browser, tmp_path: Path, share: str, devices: int, cells: int) -> None:
    folder = write_example(tmp_path / share, devices=devices, share=share, micro_batches=2)
    with Dashboard(("127.0.0.1", 0), folder) as found:
        for width in (1280, 320):
            shown(browser, found, width)
            assert browser.count("#plan .stage") == 1
            assert browser.count("#plan g.share") == cells
            assert browser.count("#plan g.tile") == (cells if share == "tiles" else 0)
            assert browser.count("#timeline g.lane") == 2 * devices
            assert browser.count("#cluster g.device") == devices
            assert_fits(browser)
        assert_quiet(browser, found)


def test_a_touched_device_keeps_showing_its_rates(browser: Browser, tmp_path: Path) -> None:
    """Of many links not all rates fit; what was chosen stays when all is drawn anew."""
    folder = write_example(tmp_path / "run", devices=12, share="samples")
    visible = "document.querySelectorAll('#cluster g.edge-label[visibility=visible]').length"
    with Dashboard(("127.0.0.1", 0), folder) as found:
        shown(browser, found)
        assert browser.count("#cluster path.edge") == 12
        assert browser.ask(visible) == 0
        browser.ask("document.querySelector('#cluster g.device').focus()")
        assert browser.ask(visible) == 2
        browser.ask("document.querySelector('#cluster g.device').dataset.old = 'yes'")
        browser.ask(
            "(() => { window.read = []; const watch = new MutationObserver((found) => read.push(...found));"
            "for (const one of document.querySelectorAll('[role=status]')) watch.observe(one, { childList: true });"
            "scrollTo(0, document.body.scrollHeight); })()"
        )
        below = browser.ask("scrollY")
        assert below > 200
        live = json.loads((folder / "live.json").read_text())
        live["devices"][5]["busy"] = 0.01
        live["links"][0].update(bytes_per_second=None, measured_bytes_per_second=None)
        (folder / "live.json").write_text(json.dumps(live))
        browser.until("document.querySelector('#cluster g.device').dataset.old !== 'yes'", "it is drawn anew")
        assert browser.ask(visible) == 2
        assert browser.ask("document.activeElement.dataset.name") == "pi-1"
        assert browser.ask("scrollY") == below, "the page stays where it is"
        assert browser.ask("read.length") == 0, "what did not change is not read out again"
        assert "no limit" in browser.ask("document.querySelector('#link-table tbody tr').textContent")
        assert_quiet(browser, found)


def assert_fits(browser: Browser) -> None:
    """Nothing is to be found by scrolling sideways, in the page or in a part of it."""
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    wide = browser.ask(
        "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > innerWidth + 1 "
        "&& !one.closest('.skip')).map((one) => one.outerHTML.slice(0, 120))"
    )
    assert not wide


@pytest.mark.parametrize("width", [320, 375])
def test_a_phone_needs_no_scrolling_sideways(browser: Browser, served: Dashboard, width: int) -> None:
    shown(browser, served, width, is_dark=width == 375)
    assert_fits(browser)
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == (
        "rgb(17, 22, 29)" if width == 375 else "rgb(244, 245, 247)"
    )
    for state in ("running", "ended", "failed", "waiting", "stopped"):
        assert browser.ask(CONTRAST % state) >= 4.5, state
    assert_quiet(browser, served)


def test_names_are_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    """A folder may come from anybody."""
    folder = write_example(tmp_path / "<img src=x onerror=alert(1)>", devices=3)
    evil = "<img src=x onerror='window.evil=1'><script>window.evil=1</script>"
    for path in (folder / "live.json", folder / "round.json"):
        path.write_text(path.read_text().replace("pi-2", evil))
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": evil, "reason": evil, "device": evil}) + "\n")
        file.write(json.dumps({"event": "lost", "devices": evil, "reason": {"a": evil}, "time": evil}) + "\n")
    with Dashboard(("127.0.0.1", 0), folder) as found:
        shown(browser, found)
        assert evil in browser.text("#device-list")
        assert evil in browser.text("#events")
        assert browser.count("main img, main script, main iframe") == 0
        assert browser.ask("window.evil === undefined")
        assert_quiet(browser, found)


@pytest.mark.slow
def test_a_run_that_ends_and_a_server_that_goes_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run")
    with Dashboard(("127.0.0.1", 0), folder) as found:
        port = found.port
        shown(browser, found)
        assert browser.ask("document.getElementById('banner').hidden")
        write_example(folder, state="ended", done=120)
        browser.until("document.getElementById('state').textContent === 'ended'", "the end is shown")
        assert "has ended" in browser.text("#banner")
        last = "document.querySelector('#events li .kind')?.innerText === '✓ finished'"
        browser.until(last, "a look between two of the example's files is followed by one at both")
        assert_quiet(browser, found)
    browser.until("document.getElementById('connection').dataset.state !== 'live'", "that nobody answers is shown")
    assert browser.text("#connection") == "the server has ended: manyhands dashboard RUN"
    write_example(folder, state="running", done=30)
    with Dashboard(("127.0.0.1", port), folder):
        browser.until("document.getElementById('state').textContent === 'running'", "it connects again", 30)
        assert browser.text("#connection") == "live"
        assert "30 of 120" in browser.text("#facts")


@pytest.mark.slow
def test_polling_where_streams_do_not_come_through(browser: Browser, tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", done=20)
    added = browser.send("Page.addScriptToEvaluateOnNewDocument", source="delete window.EventSource")
    try:
        with Dashboard(("127.0.0.1", 0), folder) as found:
            shown(browser, found)
            write_example(folder, done=21)
            browser.until("document.getElementById('facts').innerText.includes('21 of 120')", "news are asked for")
            assert not any("stream" in url for url in browser.requests)
            assert_quiet(browser, found)
    finally:
        browser.send("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def test_a_long_run_stays_small_in_the_page(browser: Browser, served: Dashboard) -> None:
    """Of very many steps means are kept; steps that are run again replace those of before."""
    shown(browser, served)
    found = browser.ask(
        """import('./run.js').then(({ Run }) => {
          const run = new Run();
          const rows = (first, last, loss) => {
            const step = Array.from({ length: last - first }, (_, place) => first + place);
            const metrics = { step, loss: step.map(() => loss), seconds: step, samples_per_second: [] };
            return { reset: false, metrics };
          };
          run.take(rows(0, 100, 1));
          run.take(rows(90, 110, 3));
          const again = [run.metrics.step.length, run.metrics.loss[89], run.metrics.loss[90]];
          for (let first = 110; first < 50000; first += 1000) run.take(rows(first, first + 1000, 2));
          return [...again, run.metrics.step.length <= 8000, run.metrics.step.at(-1), run.metrics.loss.at(-1)];
        })"""
    )
    assert found == [110, 1, 3, True, 50109, 2]


def test_a_part_of_a_chart_stays_in_sight_while_steps_are_added(browser: Browser, served: Dashboard) -> None:
    shown(browser, served)
    found = browser.ask(
        """import('./charts.js').then(async ({ Charts }) => {
          for (const id of ['loss', 'rate']) document.getElementById(id).replaceChildren();
          const charts = new Charts();
          const step = Array.from({ length: 100 }, (_, place) => place);
          const draw = () => {
            charts.draw({ metrics: { step, loss: step.slice(), samples_per_second: step.slice() }, events: [] });
            return new Promise((done) => setTimeout(done));
          };
          const ends = (chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max];
          await draw();
          charts.loss.plot.setScale('x', { min: 10, max: 20 });
          await new Promise((done) => setTimeout(done));
          for (const last of [100, 101]) { step.push(last); await draw(); }
          return [ends(charts.loss), ends(charts.rate)];
        })"""
    )
    assert found == [[10, 20], [0, 101]]


def test_a_page_before_there_is_a_run(browser: Browser, tmp_path: Path) -> None:
    with Dashboard(("127.0.0.1", 0)) as found:
        browser.size(1280)
        browser.open(found.url)
        browser.until("document.getElementById('connection').dataset.state === 'live'", "it connects")
        browser.until("document.getElementById('banner').textContent.includes('being prepared')", "the banner says so")
        found.show(write_example(tmp_path / "run", devices=2))
        browser.until(f"document.querySelectorAll('#cluster g.device').length === {len(names(2))}", "the run appears")
        assert_quiet(browser, found)


@pytest.mark.slow
def test_beyond_loopback_the_token_becomes_a_cookie(browser: Browser, tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run")
    browser.send("Security.setIgnoreCertificateErrors", ignore=True)
    with Dashboard(("0.0.0.0", 0), folder, shown_host="127.0.0.1") as found:
        shown(browser, found)
        assert browser.ask("location.search") == ""
        assert browser.ask("document.cookie") == ""
        browser.open(found.url.partition("?")[0])
        browser.until(DRAWN, "the cookie is enough")
        assert browser.text("#state") == "running"
    with Dashboard(("0.0.0.0", found.port), folder, shown_host="127.0.0.1"):
        browser.until("document.getElementById('connection').dataset.state === 'refused'", "its token is another")
        assert browser.text("#connection") == "refused: open the address that was printed at the start"
