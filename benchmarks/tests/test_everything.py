"""`manyhands bench all` goes on after failures and leaves out what cannot run."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import msgspec
import pytest

from made_results import SMALL
from manyhands.facts.errors import UnknownName
from manyhands_bench import everything as bench_all
from manyhands_bench.command import app
from manyhands_bench.everything import WORDS, measured, run_all, this_host
from manyhands_bench.results import read_results


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of benches: one prints figures, one fails, one prints figures of which a part failed, one hangs."""
    code = """
import sys, time
name = sys.argv[-1]
if name == "hangs":
    time.sleep(60)
if name == "fails":
    sys.exit("Error: there is no such thing")
print("  12 s  working", file=sys.stderr)
print("machine: a machine", file=sys.stderr)
if name == "partly":
    print("lab_failed: no room", file=sys.stderr)
print('{"gain": 1.5, "count": 3, "nothing": null}')
sys.exit(name == "partly")
"""
    monkeypatch.setattr(bench_all, "WORDS", {name: name for name in ("works", "fails", "partly", "hangs", "lab")})
    monkeypatch.setattr(bench_all, "_words", lambda name, quick: f"manyhands bench {name}")
    real = bench_all._process

    def process(command: list[str]) -> object:
        return real([sys.executable, "-c", code, command[-1]])

    monkeypatch.setattr(bench_all, "_process", process)
    monkeypatch.setattr(
        bench_all, "_impossible", lambda name, host, quick: "you are not root." if name == "lab" else ""
    )


@pytest.mark.slow
@pytest.mark.usefixtures("pretended")
def test_it_goes_on_after_failures_and_leaves_out_what_cannot_run(tmp_path: Path) -> None:
    progress: list[str] = []
    failed = run_all(("works", "fails", "partly", "lab"), tmp_path, quick=False, say=progress.append)
    assert failed == ["fails", "partly"]
    found = {one.name: one for one in read_results(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {
        "works": "measured", "fails": "failed", "partly": "measured", "lab": "skipped",
    }  # fmt: skip
    works = found["works"]
    assert works.figures == {"gain": 1.5, "count": 3, "nothing": None}
    assert works.said == "machine: a machine\n", "progress is passed on, not kept"
    assert any("working" in text for text in progress)
    assert works.seconds is not None
    assert works.load_before is not None
    assert works.host == this_host()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", works.date)
    assert works.versions["python"] == sys.version.split()[0]
    assert "there is no such thing" in found["fails"].reason
    assert found["partly"].reason == "lab_failed: no room"
    assert found["lab"].reason == "you are not root."


@pytest.mark.usefixtures("pretended")
def test_a_bench_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_all, "END_SECONDS", 5.0)
    begin = time.monotonic()
    found = measured("hangs", SMALL, quick=False, say=lambda text: None, limit_seconds=0.5)
    assert time.monotonic() - begin < 20
    assert (found.state, found.figures) == ("failed", {})
    assert "not ended after 0.5 s" in found.reason


def test_a_study_on_a_gpu_is_left_out_where_there_is_none_and_where_all_is_to_be_quick() -> None:
    with_gpu = msgspec.structs.replace(SMALL, gpu="a GPU")
    assert bench_all._impossible("infer-accuracy", with_gpu, quick=False) == ""
    assert "needs a GPU" in bench_all._impossible("infer-accuracy", msgspec.structs.replace(SMALL, gpu=""), quick=False)
    assert "without a quick form" in bench_all._impossible("infer-accuracy", with_gpu, quick=True)


def test_unknown_benches_are_refused() -> None:
    with pytest.raises(UnknownName, match="tilee"):
        run_all(("tilee",), Path("nowhere"), quick=False, say=print)


def test_every_word_is_a_command_of_bench() -> None:
    known = {command.name for command in app.registered_commands}
    assert {words.split()[0] for words in WORDS.values()} <= known
