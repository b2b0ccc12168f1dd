"""Folders as runs leave them, of any size, so that a page of sixty-four devices needs none."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.files.documents import write_document
from manyhands.observe.live import Live, LiveDevice, LiveLink, LiveRound, LiveSpan, LiveStage, write_live, write_round

LAYERS = 12


def names(count: int) -> list[str]:
    return [f"pi-{number + 1}" for number in range(count)]


def write_example(
    folder: Path,
    *,
    devices: int = 4,
    share: str = "pipeline",
    state: Any = "running",
    steps: int = 120,
    done: int = 80,
    micro_batches: int = 4,
    lost: Sequence[str] = (),
) -> Path:
    """`share`: pipeline (a stage each), samples, tiles or channels (one stage of all)."""
    folder.mkdir(parents=True, exist_ok=True)
    own = names(devices)
    stages = _stages(own, share)
    write_document(folder / "config.yaml", {"steps": steps})
    plan = {"network": "vgg11", "batch_size": 64, "stages": stages, "micro_batches": micro_batches, "order": "1f1b"}
    write_document(folder / "plan.yaml", plan)
    write_document(
        folder / "cluster.yaml",
        {
            "name": f"pi4x{devices}",
            "devices": [{"name": name, "kind": "pi4", "memory": "4 GB"} for name in own],
            "link": {"rate": "1 Gbit/s", "delay": "0.4 ms"},
        },
    )
    rows = [
        f"{step},{step // 20},{2.3 * math.exp(-step / 40) + 0.05 * math.sin(step * 2.3):.6f},"
        f"{0.4 + 0.02 * math.sin(step):.6f},{64 / (0.4 + 0.02 * math.sin(step)):.3f},"
        for step in range(done)
    ]
    (folder / "metrics.csv").write_text(
        "\n".join(["step,epoch,loss,seconds,samples_per_second,staleness", *rows]) + "\n"
    )
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(own, steps, lost, state)))
    round_ = LiveRound(
        step=done, seconds=0.42, predicted_seconds=0.36, measured=tuple(_spans(own, micro_batches, share, 0.42, "m")),
        predicted=tuple(_spans(own, micro_batches, share, 0.36, "p")),
    )  # fmt: skip
    write_round(folder, round_)
    write_live(folder, live_of(own, stages, state, steps, done, lost))
    return folder


def live_of(
    own: Sequence[str], stages: Sequence[dict[str, Any]], state: Any, steps: int, done: int, lost: Sequence[str]
) -> Live:
    pairs = [(a, b) for a, b in zip(own, own[1:])] if len(stages) > 1 else [
        (a, own[(place + 1) % len(own)]) for place, a in enumerate(own) if len(own) > 1
    ]  # fmt: skip
    both = dict.fromkeys([*pairs, *((b, a) for a, b in pairs)])
    return Live(
        state=state, text="", model="vgg11", pid=os.getpid(), host=socket.gethostname(), started=time.time() - 60,
        updated=time.time(), step=done, steps=steps, epoch=done // 20, batch_size=64, loss=0.31, seconds=0.42,
        predicted_seconds=0.36, samples_per_second=152.4, remaining_seconds=(steps - done) * 0.42, generation=len(lost),
        devices=tuple(
            LiveDevice(
                name, kind="pi4", state="lost" if name in lost else "here", reason="killed" if name in lost else "",
                memory_bytes=4e9, planned_bytes=3e8 + 1e8 * (place % 5), peak_bytes=int(2.8e8 + 9e7 * (place % 5)),
                resident_bytes=int(6e8 + 2e8 * (place % 7)), busy=0.5 + 0.08 * (place % 6), stages=(0,),
            )
            for place, name in enumerate(own)
        ),
        links=tuple(
            LiveLink(a, b, 1.25e8, 0.0004, (0.4 + 0.15 * (place % 5)) * 1.25e8 if place % 7 != 6 else None, 10**8)
            for place, (a, b) in enumerate(both)
        ),
        stages=tuple(
            LiveStage(
                number, *stage["layers"], share=stage["share"]["by"], devices=tuple(stage["devices"]), seconds=0.21,
                predicted_seconds=0.19, samples_per_second=152.0,
            )
            for number, stage in enumerate(stages)
        ),
    )  # fmt: skip


def _stages(own: Sequence[str], share: str) -> list[dict[str, Any]]:
    count = len(own)
    if share == "pipeline":
        cuts = [round(LAYERS * place / count) for place in range(count + 1)]
        return [
            {"layers": [cuts[place], cuts[place + 1]], "devices": [name], "share": {"by": "all"}}
            for place, name in enumerate(own)
        ]
    if share == "tiles":
        rows = max(row for row in range(1, count + 1) if count % row == 0 and row * row <= count)
        shared: dict[str, Any] = {"by": "tiles", "rows": [2.0] + [1.0] * (rows - 1), "columns": [1.0] * (count // rows)}
    elif share == "channels":
        shared = {"by": "channels", "groups": [1 + place % 2 for place in range(count)]}
    else:
        shared = {"by": "samples", "samples": [64 // count + (place % 3) for place in range(count)]}
    return [{"layers": [0, LAYERS], "devices": list(own), "share": shared}]


def _spans(own: Sequence[str], micro: int, share: str, seconds: float, which: str) -> Iterator[LiveSpan]:
    """A 1F1B-like staircase, or everybody at once."""
    slots = 3 * (micro + len(own) - 1) if share == "pipeline" else 3 * micro
    one = seconds * 0.94 / slots
    for place, name in enumerate(own):
        late = place if share == "pipeline" else 0
        for batch in range(micro):
            start = (late + batch) * one
            yield LiveSpan(name, "compute", start, start + 0.93 * one, "forward", f"F{batch} 0-3", place)
            yield LiveSpan(name, "send", start + one * 0.9, start + one * 1.3, "send" if which == "m" else "value")
            back = seconds * 0.94 - (late + 2 * (micro - batch)) * one
            yield LiveSpan(name, "compute", back, back + 1.93 * one, "backward", f"B{batch} 0-3", place)
            yield LiveSpan(name, "receive", back - one * 0.4, back, "receive" if which == "m" else "gradient")
        yield LiveSpan(name, "compute", seconds * 0.94, seconds * 0.97, "reduce", "reduce", place)
        yield LiveSpan(name, "compute", seconds * 0.97, seconds * 0.99, "step", "step", place)


def events(own: Sequence[str], steps: int, lost: Sequence[str], state: str) -> list[dict[str, Any]]:
    at = "2026-01-02T03:04:{:02d}.000000Z"
    found: list[dict[str, Any]] = [{"event": "started", "model": "vgg11", "step": 0, "steps": steps}]
    found += [{"event": "checkpoint", "step": 0, "path": "checkpoints/step-000000"}]
    for name in lost:
        found += [
            {"event": "lost", "device": name, "reason": f"{name} was cut off: its process is gone."},
            {"event": "recovered", "devices": [one for one in own if one not in lost], "replayed": 1, "step": 40,
             "seconds": 1.32, "how": "light", "reason": ""},
        ]  # fmt: skip
    found += [{"event": "note", "text": "Stage 0 computed for 8.5 ms a step, 0.49 times what was predicted."}]
    if state == "ended":
        found += [{"event": "finished", "steps": steps}]
    return [{"time": at.format(place), **event} for place, event in enumerate(found)]
