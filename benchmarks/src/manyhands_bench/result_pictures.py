"""The contents of the results page's pictures, taken from the stored results."""

from __future__ import annotations

from pathlib import Path

from manyhands_bench.claims import CLAIMS, Aim, Claim
from manyhands_bench.lab_pictures import draw_lab_results
from manyhands_bench.papers import ASTEROID_TABLE_4
from manyhands_bench.result_plots import (
    LEAST_PART,
    MOST_PART,
    AimReached,
    Beside,
    LinePlot,
    draw_beside,
    draw_groups,
    draw_reached,
)
from manyhands_bench.results import StoredResults, first_result

LINKS = ("880_0.15", "480_1", "480_5", "240_5", "240_10", "240_20", "240_40")


def draw_results(stored: StoredResults, folder: Path) -> list[Path]:
    """Draw every picture for which there are results, and return the files."""
    drawn = [
        _papers(stored, folder / "results-papers.png"),
        _aims(stored, folder / "results-aims.png"),
        _table_4(stored, folder / "results-asteroid-table-4.png"),
        _traces(stored, folder / "results-split-traces.png"),
        _links(stored, folder / "results-decnn-links.png"),
    ]
    return [path for path in drawn if path is not None] + draw_lab_results(stored, folder)


def _own(stored: StoredResults, claim: Claim) -> dict[str, float]:
    pairs = zip(stored.hosts, stored.values(claim))
    return {host.slug: value for host, value in pairs if value is not None}


def _papers(stored: StoredResults, path: Path) -> Path | None:
    """Draw the papers' headlines beside ours; only ratios, because seconds and bytes of other devices are not on one
    scale with ours."""
    rows = [
        Beside(f"{claim.headline.paper}: {claim.text}", claim.headline.value, ours, claim.how == "simulated")
        for claim in CLAIMS
        if claim.headline is not None and claim.is_alike and claim.form == "times" and (ours := _own(stored, claim))
    ]
    return (
        draw_beside(rows, path, "Papers' headlines, each by its authors on their devices, beside ours")
        if rows
        else None
    )


def _aims(stored: StoredResults, path: Path) -> Path | None:
    rows = []
    for claim in CLAIMS:
        aim = claim.aim
        if aim is not None and not aim.only_on and (ours := _own(stored, claim)):
            parts = {name: _reached(aim, value) for name, value in ours.items()}
            rows.append(AimReached(f"{claim.bench}: {claim.key}", parts, claim.how == "simulated"))
    return draw_reached(rows, path, "Aims of our own, and how far they were reached") if rows else None


def _reached(aim: Aim, got: float) -> float:
    if aim.value == 0:
        return 1.0 if aim.met(got) else LEAST_PART
    part = got / aim.value if aim.sign == "≥" else aim.value / got if got > 0 else MOST_PART
    return min(MOST_PART, max(LEAST_PART, part))


def _table_4(stored: StoredResults, path: Path) -> Path | None:
    result = first_result(stored, "pipeline-simulated")
    if result is None:
        return None
    panels = []
    for number, (side, text) in enumerate(
        (("device", "the best device"), ("dp_one_port", "data parallel through one port"), ("pp", "pipelines"))
    ):
        rows = []
        for (model, place), reported in ASTEROID_TABLE_4.items():
            value = result.figures.get(f"speedup_{side}_{model}_{place}".replace("-", "_"))
            if value is not None:
                rows.append((f"{model}\n{place}", reported[number], value))
        if rows:
            places, paper, ours = (list(column) for column in zip(*rows))
            lines = {"ours, simulated from the device catalogue": ours, "the paper's": paper}
            title = f"ASTEROID, Table 4: speed-up over {text}; a baseline that does not fit in memory is left out"
            panels.append(LinePlot(title, places, lines, "times", is_simulated=True))
    return draw_groups(panels, path) if panels else None


def _traces(stored: StoredResults, path: Path) -> Path | None:
    result = first_result(stored, "split")
    if result is None:
        return None
    names = [key.removesuffix("_seconds_ours") for key in result.figures if key.endswith("_seconds_ours")]
    if not names:
        return None
    alone = result.figures.get("edge_only_seconds")
    methods = {"ours": "ours (grouped, K = 5)", "window": "ours (window)", "k0": "K = 0", "jointdnn": "JointDNN"}
    lines = {text: [result.figures.get(f"{name}_seconds_{key}") for name in names] for key, text in methods.items()}
    lines["edge alone"] = [alone] * len(names)
    title = f"Seconds of 100 batches over recorded links, measured ({result.host.slug}, {result.date[:10]})"
    return draw_groups([LinePlot(title, names, lines, "seconds")], path)


def _links(stored: StoredResults, path: Path) -> Path | None:
    result = first_result(stored, "infer")
    if result is None:
        return None
    models = ("vgg16", "resnet34", "resnet50")
    lines = {
        f"ours, {model}": [result.figures.get(f"speedup_latency_{model}_{link}") for link in LINKS]
        for model in models
        if f"speedup_latency_{model}_{LINKS[0]}" in result.figures
    }
    if not lines:
        return None
    places = [f"{link.partition('_')[0]} Mbit/s\n{link.partition('_')[2]} ms" for link in LINKS]
    title = "Latency on one device over that on four, decoupled networks by channels (schemes 1+2), simulated"
    title += f" from a profile of {result.host.slug}"
    return draw_groups([LinePlot(title, places, lines, "times", is_simulated=True)], path)
