"""`manyhands bench`: measured figures, each from one command, and all of them with a page."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.options import Json
from manyhands_bench.figures import Figures, Progress

app = typer.Typer(help="Measure the figures that manyhands claims.", no_args_is_help=True, rich_markup_mode=None)

LINE_SECONDS = 5.0
"""The time between two lines of progress if there is no terminal."""
Quick = Annotated[bool, typer.Option("--quick", help="A short run of a few minutes; its figures do not count.")]
Full = Annotated[bool, typer.Option("--full", help="Draw the paper's studies too.")]
Pictures = Annotated[
    Path,
    typer.Option(
        "--pictures", help="Pictures to train on: CIFAR-10 as JPEG bytes in an .npz file.", show_default=False
    ),
]
Only = list[str] | None
PICTURES = Path("../shared/data/cifar10_jpeg.npz")


@app.callback()
def _bench() -> None:
    """Measure the figures that manyhands claims."""


@app.command("all")
def everything(
    only: Annotated[
        Only,
        typer.Option(
            "--only",
            help="Run only this bench: capture, core, core-4, core-8, lab, tile, tile-4, tile-8, tile-16, tile-gpu, "
            "tile-lab, pipeline, pipeline-simulated, pipeline-hybrid, pipeline-studies, recovery, recovery-lab, chaos, "
            "split, split-decisions, auto, infer, infer-accuracy, networks, generate, larger, trainer, gpu, "
            "collectives, scale. Repeatable.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where results are stored: OUT/MACHINE/NAME.json.")] = Path(
        "benchmarks/results"
    ),
    page: Annotated[
        Path, typer.Option("--page", help="Where the page is written, with its pictures beside it.")
    ] = Path("docs/results.md"),
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Write the page from the stored results; measure nothing.")
    ] = False,
    quick: Quick = False,
) -> None:
    """Run every bench, each in a process of its own, then write docs/results.md from the stored results.

    It continues when a bench fails, and skips what cannot run here (the lab without root, eight tiles without eight
    cores, accuracy without a GPU).
    It takes about three hours on two cores. Leave the machine alone meanwhile: its load is stored with each result.
    """
    from manyhands.observe.figures import need_plots
    from manyhands_bench.everything import check_names, run_all
    from manyhands_bench.results_page import write_page

    need_plots()
    failed = []
    if page_only:
        check_names(only or ())
    else:
        failed = run_all(only or (), out, quick=quick, say=lambda text: typer.echo(text, err=True))
    for path in write_page(out, page):
        typer.echo(str(path))
    if failed:
        raise typer.Exit(1)


@app.command("capture")
def capture(quick: Quick = False, json: Json = False) -> None:
    """Measure the captured graph's overhead, the chosen kernels' gain, capture times and the simulator's speed.

    Figures go to standard output, the machine and the settings to standard error. About ten minutes on two cores.
    """
    from manyhands_bench.capture.bench import bench_capture

    _measure("capture", lambda say: bench_capture(quick=quick, on_progress=say), quick, json)


@app.command("core")
def core(
    workers: Annotated[int, typer.Option("--workers", min=2, help="Workers of the data-parallel figures.")] = 2,
    only: Annotated[
        Only,
        typer.Option("--only", help="Run only this part: transport, ready, ddp, vgg16, demo, overhead. Repeatable."),
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Compare data-parallel training with DDP and the transport with raw sockets; the executor's overhead.

    Figures go to standard output, the machine and the settings to standard error. About fifteen minutes on two cores.
    """
    from manyhands_bench.core.bench import bench_core

    _measure(
        "core", lambda say: bench_core(workers, quick=quick, only=only or (), on_progress=_lines(say)), quick, json
    )


@app.command("lab")
def lab(quick: Quick = False, json: Json = False) -> None:
    """Compare a lab's rates, delays, processor shares and memory with those asked for; what it leaves behind.

    Needs Linux and root. Figures go to standard output, settings to standard error. About five minutes.
    """
    from manyhands_bench.lab.bench import bench_lab

    _measure("lab", lambda say: bench_lab(quick, say), quick, json)


@app.command("tile")
def tile(
    workers: Annotated[int, typer.Option("--workers", min=2, help="How many tiles, each on its own core.")] = 2,
    only: Annotated[
        Only,
        typer.Option("--only", help="Run only this part: speed, processor, groups, memory, studies. Repeatable."),
    ] = None,
    quick: Quick = False,
    full: Full = False,
    lab: Annotated[
        bool, typer.Option("--lab", help="Only the paper's chapter 6, in the lab; needs Linux and root.")
    ] = False,
    out: Annotated[
        Path,
        typer.Option("--out", help="Where --full writes its plots; --lab goes on with the runs it has stored there."),
    ] = Path("tile-studies"),
    compute: Annotated[
        str, typer.Option("--compute", help="cuda: the paper's study of GPUs alone, on a GPU and beside processors.")
    ] = "cpu",
    json: Json = False,
) -> None:
    """Compare training in tiles with one device: speed, memory, bytes, groupings.

    Figures go to standard output, the machine and the settings to standard error. About fifteen minutes on two cores.
    """
    from manyhands_bench.tile.bench import bench_tile
    from manyhands_bench.tile.gpu_study import bench_gpu_tiles

    if compute not in ("cpu", "cuda"):
        from manyhands.facts.errors import BadValue

        raise BadValue(f"--compute {compute:.40}: tiles are measured on cpu or cuda.", hint="Write --compute cuda.")
    if lab:
        from manyhands_bench.tile.lab_study import QUICK_EXTENT, TileLabExtent, bench_tile_lab

        extent = QUICK_EXTENT if quick else TileLabExtent()
        _measure("tile", lambda say: bench_tile_lab(extent, out, _lines(say)), quick, json)
        return
    if compute == "cuda":
        _measure("tile", lambda say: bench_gpu_tiles(quick, _lines(say)), quick, json)
        return

    def measured(say: Progress) -> Figures:
        return bench_tile(workers, quick, full, only=only or (), out=out, on_progress=_lines(say))

    _measure("tile", measured, quick, json, draws=full)


@app.command("pipeline")
def pipeline(
    quick: Quick = False,
    full: Full = False,
    only: Annotated[
        Only,
        typer.Option(
            "--only",
            help="Run only this part: overhead, torch, planning, optimality, prediction, paper, hybrid, studies, "
            "scaling, accuracy. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", help="Where --full writes its plots; hybrid goes on with the runs it has stored there."),
    ] = Path("pipeline-studies"),
    json: Json = False,
) -> None:
    """Measure planning time and optimality, and compare pipelines with the baselines' and PyTorch's own.

    Figures go to standard output, settings to standard error. About fifteen minutes on two cores; as root, in a lab
    too.
    """
    from manyhands_bench.pipeline.bench import bench_pipeline

    def measured(say: Progress) -> Figures:
        return bench_pipeline(quick=quick, full=full, only=only or (), out=out, on_progress=_lines(say))

    _measure("pipeline", measured, quick, json, draws=full)


@app.command("recovery")
def recovery(
    quick: Quick = False,
    kills: Annotated[
        int | None,
        typer.Option(
            "--kills", min=1, help="Run only the soak, with this many random kills; 100 take up to ten minutes."
        ),
    ] = None,
    lab: Annotated[
        bool, typer.Option("--lab", help="Run only the kills, in the lab at 100 Mbit/s; needs Linux and root.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the plot is written.")] = Path("recovery-studies"),
    json: Json = False,
) -> None:
    """Kill and stop workers: seconds until training continues, rounds lost, the cost of backups; torchrun beside it.

    Figures go to standard output, settings to standard error. Six to eight minutes on two cores.
    """
    from manyhands_bench.recovery.bench import bench_recovery

    _measure(
        "recovery", lambda say: bench_recovery(
            quick=quick, kills=kills, lab=lab, out=out, on_progress=_lines(say) if lab else say
        ), quick,
        json, draws=kills is None,
    )  # fmt: skip


@app.command("split")
def split(
    quick: Quick = False,
    full: Annotated[
        bool, typer.Option("--full", help="More traces, rates and batches, longer trainings; about two hours.")
    ] = False,
    traces: Annotated[
        Path,
        typer.Option(
            "--traces", help="Recorded rates: the folder with ghent-4g, mahimahi-100ms, lumos5g.", show_default=False
        ),
    ] = Path("../shared/data/traces"),
    only: Annotated[
        Only,
        typer.Option("--only", help="Run only this: decisions, the engine's over whole recordings, simulated."),
    ] = None,
    pictures: Pictures = PICTURES,
    out: Annotated[Path, typer.Option("--out", help="Where the plots are written.")] = Path("split-studies"),
    json: Json = False,
) -> None:
    """Compare split training over recorded links with baselines: seconds, accuracy, bytes, memory, energy.

    Figures go to standard output, settings to standard error. About fourteen minutes on two cores.
    """
    from manyhands_bench.split.bench import bench_split

    def measured(say: Progress) -> Figures:
        return bench_split(
            quick=quick, full=full, traces=traces, pictures=pictures, out=out, only=only or (),
            on_progress=_lines(say) if only else say,
        )  # fmt: skip

    _measure("split", measured, quick, json, draws=True)


@app.command("infer")
def infer(
    quick: Quick = False,
    full: Annotated[
        bool, typer.Option("--full", help="All pairs in the lab, all trainings: hours, or --compute cuda.")
    ] = False,
    only: Annotated[
        Only,
        typer.Option("--only", help="Run only this part: sync, simulated, speedup, memory, lab, accuracy. Repeatable."),
    ] = None,
    compute: Annotated[str, typer.Option("--compute", help="Where accuracy is trained: cpu or cuda.")] = "cpu",
    pictures: Pictures = PICTURES,
    out: Annotated[Path, typer.Option("--out", help="Where plots, figures and finished trainings are written.")] = Path(
        "infer-studies"
    ),
    json: Json = False,
) -> None:
    """Compare channels of decoupled networks with one device and tiles: exchanges, speed, memory, accuracy.

    Figures go to standard output, settings to standard error. About twelve minutes on two cores; as root, in a lab too.
    """
    from manyhands_bench.infer.bench import bench_infer

    def measured(say: Progress) -> Figures:
        return bench_infer(
            quick=quick, full=full, only=only or (), compute=compute, pictures=pictures, out=out,
            on_progress=_lines(say),
        )  # fmt: skip

    _measure("infer", measured, quick, json, draws=True)


@app.command("auto")
def auto(
    quick: Quick = False,
    full: Annotated[
        bool, typer.Option("--full", help="Four times the scenarios, more blocks and steps; about an hour.")
    ] = False,
    only: Annotated[
        Only,
        typer.Option("--only", help="Run only this part: simulated, scale, lab, segmentation. Repeatable."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where plots are written, and figures as they are measured.")
    ] = Path("auto-studies"),
    json: Json = False,
) -> None:
    """Measure the planner over tiles, samples and stages: its gains, planning times, mixed plans in the lab.

    Figures go to standard output, settings to standard error. About ten minutes on two cores; as root, in a lab.
    """
    from manyhands_bench.auto.bench import bench_auto

    def measured(say: Progress) -> Figures:
        return bench_auto(quick=quick, full=full, only=only or (), out=out, on_progress=_lines(say))

    _measure("auto", measured, quick, json, draws=True)


@app.command("chaos")
def chaos(
    seed: Annotated[int, typer.Option("--seed", min=0, help="The seed that faults are drawn with.")] = 30,
    faults: Annotated[
        int | None, typer.Option("--faults", help="How many faults in all. Without it and without --hours: 500.")
    ] = None,
    hours: Annotated[float | None, typer.Option("--hours", help="Start no scenario after this many hours.")] = None,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            help="Only these kinds of faults: kill, stop, hang, partition, slow-link, junk, disk-full, oom, clock, "
            "coordinator, slow-device. Separate them by commas.",
        ),
    ] = "",
    scenario: Annotated[
        int | None, typer.Option("--scenario", help="Run only this scenario of the seed, to repeat it.")
    ] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(
            "--add",
            help="A stored run (--out) whose faults are added. Repeatable; with --faults 0, nothing else is run.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where the run is stored, as OUT/chaos-SEED.json.")] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Train under random faults: kill -9, hangs, partitions, full disks and more, over every way of sharing.

    Processes and connections are real; as root each worker is in its own network, without root some kinds are skipped.
    Weights are compared with plain PyTorch on one device. Six to ten faults a minute on two cores.
    """
    from manyhands_bench.chaos.bench import QUICK_FAULTS, ChaosOptions, bench_chaos
    from manyhands_bench.chaos.summary import by_kind

    options = ChaosOptions(
        seed, QUICK_FAULTS if quick and faults is None else faults, hours,
        tuple(filter(None, (kind.strip() for kind in only.split(",")))), scenario, tuple(add or ()), out,
    )  # fmt: skip
    _measure(
        "chaos", lambda say: bench_chaos(options, _lines(say)), quick, json,
        then=lambda figures: None if json else _print_kinds(by_kind(figures)),
    )  # fmt: skip


@app.command("networks")
def networks(
    only: Annotated[
        Only, typer.Option("--only", help="Only torchvision, timm or hf, or the network of this name. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="At most so many networks, evenly spread over the list.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Networks at a time.", show_default="as many as there are cores"),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where outcomes are stored as they come; the same folder goes on with a walk.")
    ] = Path("networks-study"),
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Walk the public networks of torchvision, timm and transformers: captured, exact, shared in which ways.

    Needs at least one of these packages. Figures go to standard output, progress, settings and the failures by reason
    to standard error. The same --out goes on with a stopped walk.
    """
    from manyhands_bench.networks.bench import NetworksOptions, figures_of, walk
    from manyhands_bench.networks.outcome import NetworkOutcome
    from manyhands_bench.networks.summary import failures

    options = NetworksOptions(tuple(only or ()), limit, processes, out, quick)
    outcomes: list[NetworkOutcome] = []

    def measured(say: Progress) -> Figures:
        outcomes.extend(walk(options, _lines(say)))
        return figures_of(outcomes)

    _measure(
        "networks", measured, quick, json,
        then=lambda figures: None if json else _print_failures(failures(outcomes)),
    )  # fmt: skip


@app.command("generate")
def generate(quick: Quick = False, json: Json = False) -> None:
    """Compare text generation over one and two workers with plain PyTorch: tokens per second, the same tokens.

    Figures go to standard output, the machine and the settings to standard error. About ten minutes on two cores.
    """
    from manyhands_bench.generate.bench import GenerateOptions, bench_generate

    options = GenerateOptions.quick() if quick else GenerateOptions()
    _measure("generate", lambda say: bench_generate(options, _lines(say)), quick, json)


@app.command("larger")
def larger(
    out: Annotated[
        Path | None, typer.Option("--out", help="Where what each process printed is stored.", show_default=False)
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Fine-tune a network of 0.5 G parameters on four lab devices of 1.5 GB, none of which could hold it.

    Losses against one process that holds all of it, the memory of every process, and what becomes of it on one such
    device. Needs root, for the lab, 5 GB of memory beside it and 3 GB of disk. Figures go to standard output, progress
    to standard error. About half an hour on two cores.
    """
    from manyhands_bench.larger.bench import bench_larger

    _measure("larger", lambda say: bench_larger(quick, out, _lines(say)), quick, json)


@app.command("trainer")
def trainer(
    only: Annotated[
        Only,
        typer.Option(
            "--only",
            help="Run only this part: clip, groups, validation, noise, bytes, gpu, loader, lines, loop, start, "
            "together. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where figures are stored as they are measured.", show_default=False),
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Measure the trainer beside plain PyTorch: clipping, groups, bfloat16, data loading, a loop of one's own, the
    first step.

    What needs a GPU is null without one. Figures go to standard output, settings to standard error. About ten minutes
    on two cores.
    """
    from manyhands_bench.trainer.bench import bench_trainer

    def measured(say: Progress) -> Figures:
        return bench_trainer(quick=quick, only=only or (), out=out, on_progress=_lines(say))

    _measure("trainer", measured, quick, json)


@app.command("collectives")
def collectives(quick: Quick = False, json: Json = False) -> None:
    """Compare sums of gradients by manyhands' messages with PyTorch's process groups: 2, 4, 8 workers, 1 to 100 MB.

    Figures go to standard output, the machine and the settings to standard error. About five minutes on two cores.
    """
    from manyhands_bench.collectives.bench import bench_collectives

    _measure("collectives", lambda say: bench_collectives(quick, _lines(say)), quick, json)


@app.command("gpu")
def gpu(
    only: Annotated[
        Only, typer.Option("--only", help="Run only this part: ratio, bf16, exact, shared, mixed. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where figures are stored as they are measured.", show_default=False),
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Measure one GPU by manyhands beside plain PyTorch on it: float32, bfloat16, the price of exact=True; two workers
    on it, and one beside processors.

    Needs a GPU; the BERT needs transformers, the ViT torchvision. Figures go to standard output, settings to standard
    error. About five minutes.
    """
    from manyhands_bench.gpu.bench import bench_gpu

    def measured(say: Progress) -> Figures:
        return bench_gpu(quick=quick, only=only or (), out=out, on_progress=_lines(say))

    _measure("gpu", measured, quick, json)


@app.command("scale")
def scale(
    only: Annotated[
        Only,
        typer.Option("--only", help="Run only this part: planned, largest, hosts. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where figures are stored as they are measured.", show_default=False),
    ] = None,
    quick: Quick = False,
    json: Json = False,
) -> None:
    """Plan for 1,000 devices in sites, simulate 1,000 and 10,000, and tiles on hosts with several workers.

    Steps are simulated, with the catalogue's numbers. Figures go to standard output, settings to standard error.
    """
    from manyhands_bench.parts import check_asked
    from manyhands_bench.scale.bench import PARTS, bench_scale

    check_asked(PARTS, only or (), quick, full=False)

    def measured(say: Progress) -> Figures:
        return bench_scale(quick=quick, only=only or (), out=out, on_progress=_lines(say))

    _measure("scale", measured, quick, json)


def _print_failures(rows: list[tuple[int, str, str, str]]) -> None:
    """Print a table of what could not be done, by reason."""
    from manyhands.cli.show import print_table

    cells = [[str(count), step, reason, names] for count, step, reason, names in rows]
    print_table("Failures", ["networks", "step", "reason", "which"], cells, numbers=["networks"])


def _print_kinds(rows: dict[str, tuple[int, float, float]]) -> None:
    """Print a table of the kinds of faults and their recovery times."""
    from manyhands.cli.show import print_table

    cells = [[kind, str(fired), f"{median:.2f}", f"{worst:.2f}"] for kind, (fired, median, worst) in rows.items()]
    headings = ["fault", "fired", "recovery, median s", "worst s"]
    print_table("Faults", headings, cells, numbers=headings[1:])


def _measure(
    name: str, measured: Callable[[Progress], Figures], quick: bool, json: bool, *, draws: bool = False,
    then: Callable[[Figures], None] = lambda figures: None,
) -> None:  # fmt: skip
    """Measure and print; exit with an error if a part failed, after all figures are printed.

    draws   check that matplotlib is installed before measuring
    then    prints more about the figures
    """
    from manyhands.cli.show import working
    from manyhands.observe.figures import need_plots
    from manyhands_bench.parts import failed

    if draws:
        need_plots()

    with working("measuring") as say:
        figures = measured(say)
    _print(name, figures, quick, json)
    then(figures)
    if failed(figures):
        raise typer.Exit(1)


def _lines(say: Progress) -> Progress:
    """Return a `say` that also prints a line of progress now and then if there is no terminal."""
    begin = last = time.monotonic()

    def report(text: str) -> None:
        nonlocal last
        say(text)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - last >= LINE_SECONDS:
            last = now
            typer.echo(f"{now - begin:5.0f} s  {text}", err=True)

    return report


def _print(name: str, figures: Figures, quick: bool, json: bool) -> None:
    from manyhands.cli.show import print_json, print_table
    from manyhands.profiler.this_machine import identify
    from manyhands_bench.claims import judged
    from manyhands_bench.parts import PROFILE_MACHINE

    numbers = {
        key: value for key, value in figures.items() if not isinstance(value, str) or key.endswith(PROFILE_MACHINE)
    }
    for key, text in figures.items():  # machine, settings of both sides, chosen kernels
        if isinstance(text, str):
            typer.echo(f"{key}: {text}", err=True)
    architecture = identify(1).architecture
    aims = {
        key: judged(name, key, value, architecture)
        for key, value in numbers.items()
        if not quick and not isinstance(value, str)
    }
    if json:
        for key, text in aims.items():
            if text:
                typer.echo(f"aim of {key}: {text}", err=True)
        print_json(numbers)
        return
    rows = [[key, _cell(value), aims.get(key, "")] for key, value in numbers.items()]
    print_table(f"bench {name}" + (" --quick" if quick else ""), ["figure", "value", "aim"], rows, numbers=["value"])


def _cell(value: float | int | str) -> str:
    if isinstance(value, float):
        return "not measured" if math.isnan(value) else f"{value:.4g}"
    return str(value)
