"""Stored results and the page made of them: envelopes, machines side by side, what is simulated, what was missed."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from manyhands.facts.errors import BadFile, UnknownName
from manyhands_bench import everything as bench_all
from manyhands_bench.claims import CLAIMS, Aim, Claim, shown
from manyhands_bench.command import app
from manyhands_bench.everything import WORDS, measured, run_all, this_host
from manyhands_bench.papers import HEADLINES, PAPERS
from manyhands_bench.results import Host, Result, StoredResults, read_results, result_path, write_result
from manyhands_bench.results_page import BEGIN, END, page_text, short_table, with_table, write_page

SMALL = Host("Intel(R) Xeon(R) CPU @ 2.00GHz", 2, "x86_64", 8 * 10**9, "", "Linux 6.1")
LARGE = Host("Neoverse-N1", 16, "aarch64", 64 * 10**9, "NVIDIA T4", "Linux 6.8")
ROOT = Path(__file__).parents[2]


def result(name: str, host: Host = SMALL, **figures: float) -> Result:
    return Result(
        name, f"manyhands bench {name} --json", host, "measured", figures=figures, versions={"torch": "2.13.0"},
        date="2026-01-02T03:04:05Z", commit="abcdef0123", seconds=600.0, load_before=0.1, load_after=1.9,
    )  # fmt: skip


# The store


def test_a_result_is_kept_by_machine_and_read_back(tmp_path: Path) -> None:
    first, second = result("tile", memory_ratio_24=8.2), result("tile", LARGE, memory_ratio_24=8.5)
    assert write_result(tmp_path, first) == tmp_path / "intel-xeon-2-cores" / "tile.json"
    assert write_result(tmp_path, second) == tmp_path / "neoverse-n1-16-cores" / "tile.json"
    assert read_results(tmp_path) == [first, second]


def test_a_result_in_another_machines_folder_is_refused(tmp_path: Path) -> None:
    path = write_result(tmp_path, result("tile"))
    path.rename(path.with_name("core.json"))
    with pytest.raises(BadFile, match=r"Move it to .*tile\.json"):
        read_results(tmp_path)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="manyhands bench all"):
        StoredResults.of(tmp_path)


# Running


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


@pytest.mark.usefixtures("pretended")
def test_it_goes_on_after_failures_and_leaves_out_what_cannot_run(tmp_path: Path) -> None:
    said: list[str] = []
    failed = run_all(("works", "fails", "partly", "lab"), tmp_path, quick=False, say=said.append)
    assert failed == ["fails", "partly"]
    found = {one.name: one for one in read_results(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {
        "works": "measured", "fails": "failed", "partly": "measured", "lab": "skipped",
    }  # fmt: skip
    works = found["works"]
    assert works.figures == {"gain": 1.5, "count": 3, "nothing": None}
    assert works.said == "machine: a machine\n", "progress is told, not kept"
    assert any("working" in text for text in said)
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
    assert "not to be had quickly" in bench_all._impossible("infer-accuracy", with_gpu, quick=True)


def test_unknown_benches_are_refused() -> None:
    with pytest.raises(UnknownName, match="tilee"):
        run_all(("tilee",), Path("nowhere"), quick=False, say=print)


def test_every_word_is_a_command_of_bench() -> None:
    known = {command.name for command in app.registered_commands}
    assert {words.split()[0] for words in WORDS.values()} <= known


# The page


def test_claims_name_headlines_and_every_headline_is_shown() -> None:
    assert {claim.paper for claim in CLAIMS if claim.paper} == set(HEADLINES)
    assert {one.paper for one in HEADLINES.values()} == set(PAPERS)
    assert {claim.bench for claim in CLAIMS} <= set(WORDS)
    assert len({(claim.bench, claim.key) for claim in CLAIMS}) == len(CLAIMS)


def test_machines_stand_side_by_side_and_simulated_is_said(tmp_path: Path) -> None:
    write_result(tmp_path, result("tile", memory_ratio_24=8.25, efficiency_vs_limit_2=0.8, grouping_gain_slow=1.6))
    write_result(tmp_path, result("tile", LARGE, memory_ratio_24=7.5, efficiency_vs_limit_2=0.97))
    text = page_text(StoredResults.of(tmp_path), [])
    row = next(line for line in text.splitlines() if "fullest of 24 tiles" in line and "Fig. 6.2" in line)
    assert "| 8.25x | 7.5x | measured | `manyhands bench tile`, 2026-01-02 |" in row
    slow = next(line for line in text.splitlines() if "2 Mbit/s" in line and "Fig. 6.3" in line)
    assert "| 1.6x | – | simulated, profile of intel-xeon-2-cores |" in slow
    aim = next(line for line in text.splitlines() if "`efficiency_vs_limit_2`" in line)
    assert "| ≥ 96 % | 80 % **missed** | 97 % met |" in aim
    assert "3 met, 2 missed" in text, "memory_ratio_24 and grouping_gain_slow are aims too"


def test_simulated_figures_say_whose_profile_they_rest_on(tmp_path: Path) -> None:
    """A profile that was measured belongs to the machine of the column; one that was estimated to none."""
    for host in (SMALL, LARGE):
        write_result(
            tmp_path, result("infer", host, **{"worst_vs_rivals": 1.5, "speedup_latency_resnet50_880_0.15": 4})
        )
    write_result(tmp_path, result("auto", gain_geomean=1.1, gain_min=1.0))
    shelf = StoredResults.of(tmp_path)
    lines = page_text(shelf, []).splitlines()
    worst = next(line for line in lines if "`worst_vs_rivals`" in line)
    assert "| simulated, profile of intel-xeon-2-cores, neoverse-n1-16-cores |" in worst
    least = next(line for line in lines if "`gain_min`" in line)
    assert "| simulated, estimated from the device catalogue |" in least
    short = short_table(shelf).splitlines()
    assert next(line for line in short if "ResNet-50" in line).endswith("| profile of intel-xeon-2-cores |")
    assert next(line for line in short if "60 drawn" in line).endswith("| estimated from the device catalogue |")


def test_a_simulated_claim_without_a_profile_is_refused() -> None:
    with pytest.raises(AssertionError, match="from which profile"):
        Claim("auto", "gain_min", "", how="simulated")


def test_quick_looks_and_failures_do_not_count(tmp_path: Path) -> None:
    quick = msgspec.structs.replace(result("tile", memory_ratio_24=77.0), quick=True)
    write_result(tmp_path, quick)
    write_result(tmp_path, result("core", dp_vs_ddp=0.99))
    broken = msgspec.structs.replace(result("split"), state="failed", reason="no link")
    write_result(tmp_path, broken)
    text = page_text(StoredResults.of(tmp_path), [])
    assert "77x" not in text
    assert "a quick look, not counted" in text
    assert "failed. no link" in text


def test_aims_of_one_architecture_are_judged_there_only(tmp_path: Path) -> None:
    write_result(tmp_path, result("capture", kernel_choice_gain=1.1))
    write_result(tmp_path, result("capture", LARGE, kernel_choice_gain=1.2))
    text = page_text(StoredResults.of(tmp_path), [])
    assert "| ≥ 1.3x on aarch64 | 1.1x | 1.2x **missed** |" in text


@pytest.mark.parametrize(
    ("key", "value"), [("max gain_*", 3.0), ("min gain_*", 1.0), ("gain_a", 1.0), ("other", None), ("max none_*", None)]
)
def test_values_of_claims(key: str, value: float | None) -> None:
    assert Claim("auto", key, "").value({"gain_a": 1.0, "gain_b": 3.0, "gain_c": None}) == value


def test_aims_and_forms() -> None:
    assert Aim("≥", 1.0).met(1.0)
    assert not Aim("≤", 0.0).met(1)
    assert [shown(0.5, form) for form in ("times", "seconds", "part", "yes")] == ["0.5x", "0.5 s", "50 %", "no"]
    assert shown(62_000.4, "number") == "62,000"


def test_the_readmes_table_stands_between_its_markers(tmp_path: Path) -> None:
    write_result(tmp_path / "results", result("tile", memory_ratio_24=8.25))
    readme = tmp_path / "README.md"
    readme.write_text(f"# One\n\n{BEGIN}\nold\n{END}\n\nrest\n")
    written = write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    assert readme in written
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("# One")
    assert text.endswith("rest\n")
    assert "8.25x, measured" in text
    assert write_page(tmp_path / "results", tmp_path / "docs" / "results.md") == written
    assert readme.read_text() == text, "writing it again changes nothing"
    with pytest.raises(BadFile, match="end"):
        with_table(f"a {BEGIN} b", "table")


def test_the_page_has_its_pictures(tmp_path: Path) -> None:
    out, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    write_result(out, result("tile", memory_ratio_24=8.25, speedup_2=1.5))
    write_result(
        out, result("pipeline", speedup_pp_resnet50_env_b=9.0, speedup_dp_resnet50_env_b=4.0, plan_seconds=1.0)
    )
    write_result(out, result("split", foot_seconds_ours=10.0, foot_seconds_k0=20.0, edge_only_seconds=100.0))
    write_result(out, result("infer", **{"speedup_latency_vgg16_880_0.15": 4.0, "speedup_latency_vgg16_240_40": 2.0}))
    drawn = [path for path in write_page(out, page) if path.suffix == ".png"]
    assert len(drawn) == 5
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert all(f"(pictures/{path.name})" in page.read_text() for path in drawn)


def test_the_command_writes_the_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_result(tmp_path / "benchmarks" / "results", result("core", dp_vs_ddp=0.99))
    ran = CliRunner().invoke(app, ["all", "--page-only"])
    assert ran.exit_code == 0, ran.output
    assert "dp_vs_ddp" in (tmp_path / "docs" / "results.md").read_text()


def test_a_page_elsewhere_leaves_the_readme_here_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "README.md").write_text(text := f"# One\n{BEGIN}\na table\n{END}\n")
    write_result(tmp_path / "results", result("core", dp_vs_ddp=0.99))
    words = ["all", "--page-only", "--out", str(tmp_path / "results"), "--page", str(tmp_path / "away" / "page.md")]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert (here / "README.md").read_text() == text


# This project's own


def stored() -> Path:
    out = ROOT / "benchmarks" / "results"
    if not out.is_dir():
        pytest.skip("not in a checkout")
    return out


def test_the_page_is_what_the_stored_results_give() -> None:
    """`manyhands bench all --page-only` after a result has changed."""
    out, page = stored(), ROOT / "docs" / "results.md"
    pictures = sorted((page.parent / "pictures").glob("results-*.png"))
    text = page.read_text()
    named = re.findall(r"\]\((pictures/results-[\w-]+\.png)\)", text)
    assert sorted(named) == [f"pictures/{path.name}" for path in pictures]
    assert text == page_text(StoredResults.of(out), named)
    readme = (ROOT / "README.md").read_text()
    assert BEGIN in readme
    assert with_table(readme, short_table(StoredResults.of(out))) == readme


def test_stored_results_are_in_their_envelopes() -> None:
    for one in read_results(stored()):
        path = result_path(stored(), one)
        assert f"manyhands bench {WORDS[one.name]}" in one.command, path
        assert one.name in WORDS, path
        assert one.date, path
        assert one.versions.get("torch"), path
        assert json.loads(path.read_text())["host"]["processor"], path
