"""Text and table rows about a running job: for the progress bar, `top` and `status`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from manyhands.cli.show import plain
from manyhands.facts.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from manyhands.observe.live import Live, LiveDevice, LiveLink, LiveStage
    from manyhands.observe.watching import View

MOST_NAMES = 3
MOST_DATA_WAIT = 0.1
"""A job that waits for data for more of its time than this says so."""
STATES = {
    "preparing": "getting ready", "waiting": "waiting for devices", "running": "running", "ended": "ended",
    "stopped": "stopped", "failed": "failed",
}  # fmt: skip


def number(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.3e}"


def clock(seconds: float) -> str:
    """Return a duration like 1:02:03, as progress bars show it."""
    whole = max(0, round(seconds))
    minutes, remainder = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def rate_text(samples_per_second: float | None) -> str:
    if samples_per_second is None:
        return ""
    return f"{samples_per_second:,.0f} samples/s" if samples_per_second >= 10 else f"{samples_per_second:.2g} samples/s"


def state_text(view: View) -> str:
    live = view.live
    state = STATES.get(live.state, live.state)
    return f"{state}: {live.text}" if live.text else state


def step_text(live: Live) -> str:
    """Return a job's progress in one line."""
    parts = [f"step {live.step:,} of {live.steps:,}" if live.steps else f"step {live.step:,}"]
    if live.loss is not None:
        parts.append(f"loss {number(live.loss)}")
    if live.grad_norm is not None:
        parts.append(f"norm {number(live.grad_norm)}")
    if live.samples_per_second is not None:
        parts.append(rate_text(live.samples_per_second))
    if live.seconds is not None:
        predicted = f" (predicted {format_seconds(live.predicted_seconds)})" if live.predicted_seconds else ""
        parts.append(f"{format_seconds(live.seconds)} a step{predicted}")
    if text := data_text(live):
        parts.append(text)
    if live.remaining_seconds is not None and not live.is_over:
        parts.append(f"{clock(live.remaining_seconds)} left")
    return ", ".join(parts)


def data_text(live: Live) -> str:
    """Return that data is the bottleneck of a job, where it is."""
    return f"waits for data {live.data_wait:.0%} of the time" if live.data_wait > MOST_DATA_WAIT else ""


def names_text(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def memory_text(device: LiveDevice) -> str:
    """Return a device's memory use and limit: counted, or else as planned."""
    held = device.peak_bytes or device.planned_bytes
    sign = "" if device.peak_bytes else "~"
    if not held:
        return f"of {format_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    return f"{sign}{format_bytes(held)} of {format_bytes(device.memory_bytes)}" if device.memory_bytes else ""


def percent(part: float | None) -> str:
    return "" if part is None else f"{min(max(part, 0.0), 1.0):.0%}"


def busy_of(live: Live, stage: LiveStage) -> float | None:
    """Return how busy the stage's busiest device is."""
    parts = [device.busy for device in live.devices if device.name in stage.devices and device.busy is not None]
    return max(parts, default=None)


class Flows:
    """Bytes per second into and out of devices, from what was sent between two readings."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[tuple[str, str], int]] | None = None
        self.outwards: dict[str, float] = {}
        self.inwards: dict[str, float] = {}
        self.between: dict[tuple[str, str], float] = {}

    def look(self, live: Live) -> None:
        now = live.updated or time.time()
        sent = {(link.source, link.target): link.sent_bytes for link in live.links}
        before, seconds = self._before, 0.0
        if before is not None:
            seconds = now - before[0]
        if before is not None and seconds <= 0:
            return  # nothing new was written
        self._before = (now, sent)
        if before is None:
            return
        outwards: defaultdict[str, float] = defaultdict(float)
        inwards: defaultdict[str, float] = defaultdict(float)
        self.between = {}
        for (source, target), count in sent.items():
            rate = max(0, count - before[1].get((source, target), 0)) / seconds
            self.between[source, target] = rate
            outwards[source] += rate
            inwards[target] += rate
        self.outwards, self.inwards = dict(outwards), dict(inwards)


DEVICE_HEADINGS = ("device", "state", "stage", "busy", "memory", "process", "out", "in")
DEVICE_NUMBERS = ("busy", "memory", "process", "out", "in")


def device_row(device: LiveDevice, flows: Flows) -> list[str]:
    def flow(rates: Mapping[str, float]) -> str:
        return format_rate(rates[device.name]) if device.name in rates else ""

    return [
        device.name, f"{device.state}: {device.reason}" if device.reason else device.state,
        ", ".join(map(str, device.stages)), percent(device.busy), memory_text(device),
        format_bytes(device.resident_bytes) if device.resident_bytes else "", flow(flows.outwards), flow(flows.inwards),
    ]  # fmt: skip


STAGE_HEADINGS = ("stage", "layers", "devices", "shared by", "a round computes", "predicted", "could do")
STAGE_NUMBERS = STAGE_HEADINGS[4:]


def stage_row(stage: LiveStage) -> list[str]:
    return [
        str(stage.number), layers_text(stage), names_text(stage.devices), stage.share,
        format_seconds(stage.seconds) if stage.seconds is not None else "",
        format_seconds(stage.predicted_seconds) if stage.predicted_seconds else "", rate_text(stage.samples_per_second),
    ]  # fmt: skip


def layers_text(stage: LiveStage) -> str:
    return f"{stage.first}-{stage.last - 1}" if stage.last - stage.first > 1 else str(stage.first)


LINK_HEADINGS = ("from", "to", "now", "of messages", "planned with", "delay", "sent")
LINK_NUMBERS = LINK_HEADINGS[2:]


def link_row(link: LiveLink, flows: Flows) -> list[str]:
    now, measured = flows.between.get((link.source, link.target)), link.measured_bytes_per_second
    return [
        link.source, link.target, format_rate(now) if now is not None else "",
        format_rate(measured) if measured is not None else "",
        format_rate(link.bytes_per_second) if link.bytes_per_second else "no limit",
        format_seconds(link.delay_seconds) if link.delay_seconds else "", format_bytes(link.sent_bytes),
    ]  # fmt: skip


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event in words; empty for events that are not shown. A file may contain anything."""
    kind = str(event.get("event", ""))
    device, step = str(event.get("device", "")), event.get("step")
    devices = ", ".join(map(str, event["devices"])) if isinstance(event.get("devices"), list) else ""
    seconds = event.get("seconds")
    after = f" after {seconds:.2f} s" if isinstance(seconds, (int, float)) else ""
    words = {
        "started": f"started: {event.get('model', '')}, step {step} of {event.get('steps')}",
        "joined": f"{device} joined",
        "leaving": f"{device} leaves and hands over",
        "left": f"{device} has left",
        "lost": str(event.get("reason", "")) or f"{devices} lost",
        "recovered": f"going on with {devices} from step {step}{after}",
        "replanned": f"planned again ({event.get('how', '')})",
        "redeployed": f"another cut, K or packing from step {step} ({event.get('reason', '')})",
        "waiting": f"waiting for workers: {event.get('workers')} of {event.get('least')}",
        "rewound": str(event.get("reason", "")),
        "out of memory": str(event.get("reason", "")),
        "checkpoint": f"checkpoint after step {step}",
        "evaluated": _evaluated(event),
        "validated": _validated(event),
        "finished": "finished",
        "failed": f"failed: {event.get('message', '')}",
        "stopped": f"stopped after step {step}",
        "note": str(event.get("text", "")),
        "broken checkpoint": str(event.get("message", "")),
    }
    return plain(words.get(kind, ""))


def _evaluated(event: Mapping[str, Any]) -> str:
    accuracy, loss = event.get("accuracy"), event.get("loss")
    if isinstance(accuracy, (int, float)):
        return f"accuracy on held-out data: {accuracy:.1%}"
    return f"loss on held-out data: {number(loss)}" if isinstance(loss, (int, float)) else "evaluated"


def _validated(event: Mapping[str, Any]) -> str:
    metrics = event.get("metrics")
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    shown = [f"{name} {number(value)}" for name, value in numbers if isinstance(value, (int, float))]
    return f"validation after {event.get('step')} steps: {', '.join(shown)}"


def event_time(event: Mapping[str, Any]) -> str:
    """Return an event's time by this machine's clock."""
    try:
        return datetime.fromisoformat(str(event.get("time", ""))).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return ""
