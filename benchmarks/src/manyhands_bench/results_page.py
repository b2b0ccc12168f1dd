"""docs/results.md, its pictures and the README's table, made from the stored results alone: no figure is typed here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from manyhands.facts.units import format_bytes
from manyhands.files.documents import read_text, write_text_atomic
from manyhands_bench.bench_readmes import write_readmes
from manyhands_bench.claims import CLAIMS, HOWS, Claim, shown
from manyhands_bench.papers import ASTEROID_FIG_13, ASTEROID_TABLE_4, PAPERS
from manyhands_bench.pipeline.paper_tables import FIG_13, FIG_13_ENVIRONMENTS, INFERRED, TABLE_4_SIDES
from manyhands_bench.results import Result, StoredResults, first_result
from manyhands_bench.tables import BEGIN, day, markdown_table, with_table

README = "README.md"
BENCHES = Path("src/manyhands_bench")
"""The folder of the benches, relative to the parent of the results' folder."""
IN_README = (
    ("tile", "memory_ratio_24"), ("tile", "speedup_2"), ("tile-8", "speedup_8"),
    ("pipeline-simulated", "gain_over_pipedream_geomean"), ("pipeline-simulated", "gain_over_dapple_geomean"),
    ("pipeline-hybrid", "hybrid_lab_gain"), ("pipeline", "plan_seconds"), ("recovery", "recovery_seconds"),
    ("recovery-lab", "lab_light_vs_heavy"), ("split-decisions", "gain_over_frozen"),
    ("split", "gain_geomean"), ("infer", "speedup_latency_resnet50_880_0.15"), ("infer", "memory_reduction_4"),
    ("auto", "gain_geomean"), ("core", "dp_vs_ddp"),
)  # fmt: skip
_SETTING = re.compile(r"(?m)^(\w+_(?:skipped|failed|stand_in)): (.*)$")
_NONE = "–"
SIMULATED = "pipeline-simulated"
"""The result that holds ASTEROID's Table 4 and Fig. 13."""


def write_page(out: Path, page: Path) -> list[Path]:
    """Write the page, its pictures beside it, the table of the README above its folder, and those of the benches' own
    READMEs where `out` lies in a checkout; return what was written."""
    from manyhands_bench.result_pictures import draw_results

    readme = page.parent.parent / README
    stored = StoredResults.of(out)
    drawn = draw_results(stored, page.parent / "pictures")
    write_text_atomic(page, page_text(stored, pictures=[f"pictures/{path.name}" for path in drawn]))
    written = [page, *drawn]
    if readme.is_file() and BEGIN in (text := read_text(readme)):
        write_text_atomic(readme, with_table(text, short_table(stored)))
        written.append(readme)
    return written + write_readmes(stored, out.parent / BENCHES)


# The page


def page_text(stored: StoredResults, pictures: Sequence[str]) -> str:
    """Return the text of docs/results.md."""
    claims = [claim for claim in CLAIMS if any(value is not None for value in stored.values(claim))]
    sections = [
        _head(),
        f"## In short\n\n{short_table(stored)}",
        _machines(stored),
        _headlines(stored, [claim for claim in claims if claim.paper]),
        _table_4(stored),
        _fig_13(stored),
        _aims(stored, [claim for claim in claims if claim.aim is not None]),
        _others(stored, [claim for claim in claims if claim.aim is None and not claim.paper]),
        _pictures(pictures),
        _runs(stored),
        _missing(stored, [claim for claim in CLAIMS if claim not in claims]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head() -> str:
    return "\n".join(
        [
            "# Results",
            "",
            "Made from the files under `benchmarks/results/`, which `manyhands bench all` writes; "
            "edit neither by hand. `manyhands bench all --page-only` makes it again. What the figures mean is in the "
            "explanation pages; the papers' figures were measured by their authors on their devices and are there to "
            "be compared with, not to be beaten on other hardware.",
            "",
            "Every figure of ours says how it came about:",
            "",
            *(f"- **{how}**: {text}" for how, text in HOWS.items()),
            "",
            'YOLOv2-16 is YOLOv2\'s first 16 layers at 608x608, batch 1. Aims and ratios are "more is better" unless a '
            "figure is of seconds, errors, overheads or losses.",
        ]
    )


def _machines(stored: StoredResults) -> str:
    headings = ["machine", "processor", "cores", "memory", "GPU", "system"]
    rows = [
        [
            host.slug, f"{host.processor} ({host.architecture})" if host.architecture else host.processor,
            str(host.cores), format_bytes(host.memory_bytes) if host.memory_bytes else _NONE, host.gpu or "none",
            host.system or _NONE,
        ]
        for host in stored.hosts
    ]  # fmt: skip
    return "## Machines\n\n" + markdown_table(headings, rows)


def _headlines(stored: StoredResults, claims: Sequence[Claim]) -> str:
    """Return a table for each paper."""
    parts = ["## Each paper's headline beside ours"]
    for name, paper in PAPERS.items():
        of_paper = [claim for claim in claims if claim.headline is not None and claim.headline.paper == name]
        if not of_paper:
            continue
        rows = [
            [
                claim.text,
                f"{claim.headline.text} ({claim.headline.where})",
                *_cells(stored, claim),
                _how(stored, claim),
                _run(stored, claim),
            ]
            for claim in of_paper
            if claim.headline is not None
        ]
        headings = ["", f"{name} reports", *(f"ours, {host.slug}" for host in stored.hosts), "ours is", "by, on"]
        parts.append(f"### {name}\n\n{paper.title}. {paper.source}. Measured by its authors on: {paper.devices}.")
        parts.append(markdown_table(headings, rows))
    return "\n\n".join(parts)


def _table_4(stored: StoredResults) -> str:
    """Return ASTEROID's largest table, line by line; ours is simulated from the device catalogue, the same on any
    machine."""
    run = first_result(stored, SIMULATED)
    if run is None:
        return ""
    rows = []
    for (model, place), paper in ASTEROID_TABLE_4.items():
        key = f"{model}_{place}".replace("-", "_")
        ours = [run.figures.get(f"speedup_{side}_{key}") for side in TABLE_4_SIDES]
        if any(value is not None for value in ours):
            overlapped, best = run.figures.get(f"speedup_dp_{key}"), run.figures.get(f"vs_best_rival_{key}")
            rows.append(
                [
                    model, place, " / ".join(f"{ratio:g}" for ratio in paper), " / ".join(map(_ratio, ours)),
                    _ratio(overlapped), f"{best:.2f}" if best else _NONE,
                ]
            )  # fmt: skip
    if not rows:
        return ""
    text = (
        "### ASTEROID, Table 4\n\nSpeed-up over the best device alone / data parallel / pipeline parallel. Ours is "
        f"**simulated** from the device catalogue (`{run.command}`, {day(run)}, {run.host.slug}); out of memory: that "
        "baseline does not fit. Data parallel is as the paper's figures imply that it ran (inferred): gradients and "
        "weights through one device's port, none beside computing. The next column is ours over data parallel with our "
        "overlapped sums, the last ours over the best of all baselines, which cannot be below 1: they are candidates "
        f"of our planner. {INFERRED[0].upper()}{INFERRED[1:]}."
    )
    headings = ["network", "environment", "the paper's", "ours", "over overlapped data parallel", "over the best"]
    return text + "\n\n" + markdown_table(headings, rows)


def _fig_13(stored: StoredResults) -> str:
    """Return a table of every baseline of ASTEROID's Fig. 13 by network and environment, as times that ours is as
    fast."""
    run = first_result(stored, SIMULATED)
    places = [
        (model, place) for place in FIG_13_ENVIRONMENTS for model in dict.fromkeys(m for m, _ in ASTEROID_TABLE_4)
    ]
    rows = []
    for name, title in FIG_13.items():
        keys = [f"fig13_{name}_{model}_{place}".replace("-", "_") for model, place in places]
        if run is not None and any(key in run.figures for key in keys):
            mean = run.figures.get(f"gain_over_{name}_geomean")
            cells = [_ratio(run.figures[key]) if key in run.figures else _NONE for key in keys]
            rows.append([title, *cells, f"{mean:.2f}" if mean else _NONE, ASTEROID_FIG_13.get(name, _NONE)])
    if run is None or not rows:
        return ""
    text = (
        "### ASTEROID, Fig. 13\n\nTimes that our plan is as fast as each published system's on environments B and C, "
        f"**simulated** from the device catalogue (`{run.command}`, {day(run)}, {run.host.slug}), with the geometric "
        "mean of those that run, and the range that section 5.3 gives. DAPPLE is as published: every device takes "
        'part. "DAPPLE, dropping" is its objective under our own search, which may leave devices out; "data parallel" '
        "has our overlapped sums. HetPipe is asynchronous: its staleness is not priced. Baselines get the number of "
        "micro-batches that suits them best and fits in memory, which the published planners do not look for."
    )
    headings = ["over", *(f"{model}, {place}" for model, place in places), "mean", "the paper's"]
    return text + "\n\n" + markdown_table(headings, rows)


def _ratio(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.1f}"


def _aims(stored: StoredResults, claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        assert claim.aim is not None
        only = f" on {claim.aim.only_on}" if claim.aim.only_on else ""
        aim = "yes" if claim.form == "yes" else f"{claim.aim.sign} {shown(claim.aim.value, claim.form)}{only}"
        rows.append(
            [f"`{claim.key}`: {claim.text}", aim, *_judged(stored, claim), _how(stored, claim), _run(stored, claim)]
        )
    headings = ["figure", "our aim", *(host.slug for host in stored.hosts), "ours is", "by, on"]
    missed = [text for row in rows for text in row[2 : 2 + len(stored.hosts)] if "missed" in text]
    met = [text for row in rows for text in row[2 : 2 + len(stored.hosts)] if "met" in text]
    text = f"## Aims of our own\n\nSet before they were measured; {len(met)} met, {len(missed)} missed."
    return text + "\n\n" + markdown_table(headings, rows)


def _others(stored: StoredResults, claims: Sequence[Claim]) -> str:
    rows = [
        [f"`{claim.key}`: {claim.text}", *_cells(stored, claim), _how(stored, claim), _run(stored, claim)]
        for claim in claims
    ]
    headings = ["figure", *(host.slug for host in stored.hosts), "ours is", "by, on"]
    return "## Other figures\n\n" + markdown_table(headings, rows) if rows else ""


def _pictures(pictures: Sequence[str]) -> str:
    if not pictures:
        return ""
    shown_here = [
        f"![{Path(picture).stem.removeprefix('results-').replace('-', ' ')}]({picture})" for picture in pictures
    ]
    return "## Pictures\n\n" + "\n\n".join(shown_here)


def _runs(stored: StoredResults) -> str:
    """Return a table of every stored result: command, date, duration, load of the machine, versions."""
    rows = []
    for host in stored.hosts:
        for run in (result for result in stored.results if result.host.slug == host.slug):
            versions = ", ".join(f"{name} {text}" for name, text in run.versions.items() if text)
            rows.append(
                [f"`{run.command}`" + (f", {run.how_run}" if run.how_run else ""), host.slug,
                 run.date.replace("T", " ").replace("Z", " UTC") or _NONE,
                 _state(run), f"{run.seconds / 60:.0f} min" if run.seconds is not None else _NONE, _load(run),
                 versions or _NONE, run.commit or _NONE]
            )  # fmt: skip
    headings = ["command", "machine", "begun", "", "took", "load before, after", "versions", "commit"]
    return "## Runs\n\n" + markdown_table(headings, rows)


def _missing(stored: StoredResults, claims: Sequence[Claim]) -> str:
    """Return a list of what was left out, what failed, and claims that no stored result covers."""
    lines = []
    for result in stored.results:
        if result.state != "measured" or result.reason:
            lines.append(f"- `{result.command}` on {result.host.slug}: {result.state}. {_plain(result.reason)}")
        for key, text in _SETTING.findall(result.said):
            if f"{key}: {text}" not in result.reason:
                lines.append(f"- `{result.command}` on {result.host.slug}, `{key}`: {_plain(text)}")
    lines += [f"- `{claim.key}` of `bench {claim.bench}`: {claim.text}. Not in any stored result." for claim in claims]
    return "## Left out, failed, not measured\n\n" + "\n".join(lines) if lines else ""


# Cells


def _cells(stored: StoredResults, claim: Claim) -> list[str]:
    return [_NONE if value is None else shown(value, claim.form) for value in stored.values(claim)]


def _how(stored: StoredResults, claim: Claim) -> str:
    """Return how a figure was obtained; for a simulated one also the profile it rests on, in the columns' order."""
    if claim.how != "simulated":
        return claim.how
    machines = [host.slug for host, value in zip(stored.hosts, stored.values(claim)) if value is not None]
    return f"{claim.how}, {claim.profile_of(machines)}"


def _judged(stored: StoredResults, claim: Claim) -> list[str]:
    """Return each machine's figure, and whether it meets our aim."""
    cells = []
    for host, value in zip(stored.hosts, stored.values(claim)):
        text = _NONE if value is None else shown(value, claim.form)
        if value is not None and claim.aim is not None and claim.aim.only_on in ("", host.architecture):
            if not claim.aim.met(value) and text == shown(claim.aim.value, claim.form):
                text = f"{value:.5g}"  # misses the aim by less than the shown digits
            text += " met" if claim.aim.met(value) else " **missed**"
        cells.append(text)
    return cells


def _run(stored: StoredResults, claim: Claim) -> str:
    """Return the command of a claim's bench, and the days on which it ran on the machines."""
    runs = [
        result
        for host, value in zip(stored.hosts, stored.values(claim))
        if value is not None and (result := stored.result(host, claim.bench)) is not None
    ]
    days = ", ".join(dict.fromkeys(map(day, runs)))
    return f"`{runs[0].command.removesuffix(' --json')}`, {days}" if runs else _NONE


def _state(result: Result) -> str:
    if result.state == "measured" and result.quick:
        return "a quick look, not counted"
    return "measured, but for a part" if result.state == "measured" and result.reason else result.state


def _load(result: Result) -> str:
    if result.load_before is None or result.load_after is None:
        return _NONE
    return f"{result.load_before:.1f}, {result.load_after:.1f}"


def _plain(text: str) -> str:
    return " ".join(text.split())


# The README


def short_table(stored: StoredResults) -> str:
    """Return a table of a few figures, each from the first machine that has it."""
    claims = {(claim.bench, claim.key): claim for claim in CLAIMS}
    rows = []
    for claim in (claims[name] for name in IN_README):
        for host, value in zip(stored.hosts, stored.values(claim)):
            if value is None:
                continue
            beside = f"{claim.headline.text} ({claim.headline.paper})" if claim.headline is not None else _NONE
            machine = host.slug if claim.how != "simulated" else claim.profile_of([host.slug])
            rows.append([claim.text, f"{shown(value, claim.form)}, {claim.how}", beside, machine])
            break
    return markdown_table(["", "ours", "the paper's", "machine"], rows)
