"""The page that is written from stored results."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from made_results import LARGE, ROOT, SMALL, result, stored
from manyhands.facts.errors import BadFile
from manyhands_bench.command import app
from manyhands_bench.results import StoredResults, write_result
from manyhands_bench.results_page import page_text, short_table, write_page
from manyhands_bench.tables import BEGIN, END, with_table


def test_machines_stand_side_by_side_and_simulated_is_said(tmp_path: Path) -> None:
    write_result(tmp_path, result("tile", memory_ratio_24=8.25, efficiency_vs_limit_2=0.8, grouping_gain_slow=1.6))
    write_result(tmp_path, result("tile", LARGE, memory_ratio_24=7.5, efficiency_vs_limit_2=0.97))
    text = page_text(StoredResults.of(tmp_path), [])
    row = next(line for line in text.splitlines() if "fullest of 24 tiles" in line and "Fig. 6.2" in line)
    assert "| 8.25x | 7.5x | measured | `manyhands bench tile`, 2026-01-02 |" in row
    slow = next(line for line in text.splitlines() if "2 Mbit/s" in line and "Fig. 6.3" in line)
    assert "| 1.6x | – | simulated, profile of intel-xeon-2-cores |" in slow
    aim = next(line for line in text.splitlines() if "`efficiency_vs_limit_2`" in line)
    assert "| ≥ 95 % | 80 % **missed** | 97 % met |" in aim
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


def test_asteroids_tables_show_what_runs_out_of_memory(tmp_path: Path) -> None:
    table_4 = {"speedup_device_resnet50_env_b": 1.5, "speedup_dp_one_port_resnet50_env_b": 4.0,
               "speedup_pp_resnet50_env_b": None, "speedup_dp_resnet50_env_b": 1.04}  # fmt: skip
    fig_13 = {"fig13_pipedream_resnet50_env_b": 1.96, "fig13_pipedream_resnet50_env_c": None,
              "gain_over_pipedream_geomean": 1.96, "fig13_dp_resnet50_env_b": 1.04}  # fmt: skip
    write_result(tmp_path, result("pipeline-simulated", **table_4, **fig_13))
    lines = page_text(StoredResults.of(tmp_path), []).splitlines()
    assert "| resnet50 | env-b | 1.5 / 6.1 / 12.2 | 1.5 / 4.0 / out of memory | 1.0 | – |" in lines
    row = next(line for line in lines if line.startswith("| PipeDream |"))
    assert row == "| PipeDream | – | – | 2.0 | – | – | – | out of memory | – | 1.96 | 1.3 to 2.1 |"
    assert next(line for line in lines if line.startswith("| data parallel |")).endswith("| – | – |")
    assert not any(line.startswith("| DAPPLE |") for line in lines)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_page_has_its_pictures(tmp_path: Path) -> None:
    out, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    write_result(out, result("tile", memory_ratio_24=8.25, speedup_2=1.5))
    write_result(
        out, result("pipeline-simulated", speedup_pp_resnet50_env_b=9.0, speedup_dp_one_port_resnet50_env_b=4.0)
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
