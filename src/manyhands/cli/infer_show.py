"""Shows an inference job to the user: a spinner, the plan in short, a bar, a table of answers."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from manyhands.cli.following import Show

if TYPE_CHECKING:
    from manyhands.cli.moving import Moving
    from manyhands.inference.generate import Generated
    from manyhands.inference.infer import Inference
    from manyhands.inference.model import Known
    from manyhands.inference.text import TextModel
    from manyhands.observe.live import Live

SHOWN = 20


class InferShow(Show):
    """Shows a spinner, the plan in short, a bar with a line for each stage, and a table of answers."""

    what = "answering"
    is_bursty = True

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("manyhands infer", quiet=quiet)

    def ready(self, running: Inference, loaded: Known, predicted: float, count: int | None) -> None:
        """Print the plan and its prediction. `predicted`: seconds per sample, of `count`; None: their number is
        unknown."""
        if self.quiet:
            return
        from manyhands.facts.units import format_seconds

        self.stop()
        plan, network = running.plan, running.graph.network
        typer.echo(f"{network.name} ({network.input_text}) for {running.objective}, order {plan.order}:")
        self._print_stages(running)
        many = " of a long stream" if count is None else f" of {count:,} in a row"
        of = "" if running.objective == "latency" else many
        typer.echo(f"Predicted: {format_seconds(predicted)} a sample{of}. {loaded.note}")
        sys.stdout.flush()

    def _print_stages(self, running: Inference) -> None:
        from manyhands.cli.tables import share_text
        from manyhands.facts.plan_check import layer_range

        for stage in running.plan.stages:
            first, last = layer_range(stage)
            shares = [f"{device} ({share_text(stage.share, place)})" for place, device in enumerate(stage.devices)]
            typer.echo(f"  layers {first}-{last - 1}: {', '.join(shares)}")

    def ready_for_text(self, running: Inference, loaded: TextModel) -> None:
        """Print the plan for a text."""
        from manyhands.inference.text import shown

        if self.quiet:
            return
        self.stop()
        network = running.graph.network
        typer.echo(f"{network.name} goes on with {shown(loaded.prompts)}:")
        self._print_stages(running)
        typer.echo(loaded.note)
        sys.stdout.flush()

    def finished_text(self, answers: list[dict[str, Any]], generated: Generated) -> None:
        from manyhands.facts.units import format_seconds

        for answer in answers:
            typer.echo(answer.get("text") or " ".join(map(str, answer["tokens"])))
        typer.echo(
            f"{generated.count:,} tokens, {generated.tokens_per_second:,.1f} a second; the first after "
            f"{format_seconds(generated.first_seconds)}, the others {generated.following_per_second:,.1f} a second."
        )
        if generated.restarts:
            typer.echo(f"Devices came or went: {generated.restarts} time(s) a prompt was read again.")

    def begin_with(self, running: Inference, count: int) -> None:
        self.begin(count, 1)
        if self._moving is not None:
            self._moving.ask = lambda: _stages(running)
        self._answered_at = time.monotonic()

    def answered(self, seconds: float) -> None:
        """Advance the bar by the time since the last answer. `seconds`, from a sample to its answer, is not shown."""
        now = time.monotonic()
        took, self._answered_at = now - self._answered_at, now
        self.advance(took)

    def line(self, moving: Moving, seconds: float) -> str:
        return f"{self._done} of {self._steps} answered" if self._steps >= SHOWN else ""

    def finished(self, summary: dict[str, Any], output: str) -> None:
        from manyhands.cli.show import print_table
        from manyhands.facts.units import format_seconds
        from manyhands.inference.lines import short_text

        rows = [
            [line["name"], short_text(line) or _numbers(line), format_seconds(line["seconds"])]
            for line in summary["answers"][:SHOWN]
        ]
        print_table(summary["network"], ["input", "answer", "after"], rows, numbers=["after"])
        if summary["samples"] > SHOWN:
            where = output or "--output answers.jsonl has all"
            typer.echo(f"... and {summary['samples'] - SHOWN:,} more: {where}.")
        elif output:
            typer.echo(f"Answers: {output}")
        if summary["accuracy"] is not None:
            typer.echo(f"Accuracy: {summary['accuracy']:.1%} of {summary['samples']:,} samples")
        predicted, median = summary["predicted_seconds"], summary["median_latency_seconds"]
        if summary["objective"] == "latency":
            typer.echo(
                f"A sample took {format_seconds(median)} (median), predicted {format_seconds(predicted)}: "
                f"{median / predicted if predicted else 0:.2f} times the prediction"
            )
        else:
            rate = summary["samples_per_second"]
            typer.echo(
                f"{rate:,.1f} samples/s, predicted {1 / predicted if predicted else 0:,.1f}; an answer came "
                f"{format_seconds(median)} after its sample (median, {summary['samples']:,} samples)"
            )
        if summary["recoveries"]:
            typer.echo(
                f"Devices came or went {len(summary['recoveries'])} time(s); {summary['reruns']} sample(s) were run "
                "again."
            )
        if summary["weights"].startswith("The weights are random"):
            typer.echo(summary["weights"])


def _stages(running: Inference) -> Live:
    """Return the state of a stream in the form of a run's."""
    from manyhands.facts.plan_check import layer_range
    from manyhands.observe.live import Live, LiveStage

    plan = running.plan
    stages = []
    for number, (stage, rate) in enumerate(zip(plan.stages, running.stage_rates, strict=False)):
        first, last = layer_range(stage)
        stages.append(LiveStage(number, first, last, devices=stage.devices, samples_per_second=rate))
    return Live(state="running", stages=tuple(stages))


def _numbers(line: dict[str, Any]) -> str:
    """Return the start of an output that is no choice among classes."""
    text = str(line.get("output", ""))
    return text if len(text) <= 60 else f"{text[:57]}..."
