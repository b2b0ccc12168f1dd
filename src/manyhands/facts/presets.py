"""Clusters with a name: the papers' test beds, and a few that people have at home."""

from __future__ import annotations

import msgspec


class Preset(msgspec.Struct, frozen=True):
    """A cluster as a document, with its description and its source."""

    description: str
    source: str
    document: dict[str, object]


LAN_DELAY = "0.3 ms"  # one way, for papers that do not say: a switch and two network stacks


def _wired(devices: list[tuple[str, int]], rate: str, delay: str = LAN_DELAY) -> dict[str, object]:
    """Return devices behind one switch. The rate limits each device's port, so that all it sends at once shares it."""
    return {
        "devices": [{"kind": kind, "name": kind.removeprefix("jetson-"), "count": count, "port": rate}
                    for kind, count in devices],
        "link": {"rate": rate, "delay": delay},
    }  # fmt: skip


def _asteroid(devices: list[tuple[str, int]], description: str, mbit: int = 100) -> Preset:
    source = "ASTEROID Tables 5 and 6; the paper gives no delay"
    return Preset(f"{description}, {mbit} Mbit/s", source, _wired(devices, f"{mbit} Mbit/s"))


def _decnn(mbit: int, round_trip_ms: float) -> Preset:
    return Preset(
        f"4 Pi 4, {mbit} Mbit/s, round trip {round_trip_ms:g} ms",
        "DECNN section 4.1; delay one way is half the round trip",
        _wired([("pi4", 4)], f"{mbit} Mbit/s", f"{round_trip_ms / 2:g} ms"),
    )


def _edge_cloud(kind: str, description: str) -> Preset:
    up, down = "19 Mbit/s", "31 Mbit/s"
    return Preset(
        f"{description} and a server with an RTX 2080 Ti over 4G: {up} up, {down} down, 25 ms (or a trace: --trace)",
        "SPLIT section 5.1.2; down is the mean of the Ghent 4G traces it replays, up is 0.6 of it as in mahimahi's LTE"
        " traces; the delay is an assumption",
        {
            "devices": [
                {"name": "edge", "kind": kind, "up": up, "down": down},
                {"name": "cloud", "kind": "rtx-2080ti"},
            ],
            "link": {"rate": down, "delay": "25 ms"},
            "links": [{"from": "edge", "to": "cloud", "rate": up}],
        },
    )


PRESETS: dict[str, Preset] = {
    "pi3x6": Preset(
        "6 Pi 3 of 1 GB, 100 Mbit/s",
        "TILE section 6, six Raspberry Pi 3; rate: the Pi 3's port",
        _wired([("pi3", 6)], "100 Mbit/s"),
    ),
    "env-a": _asteroid([("jetson-nano", 5)], "5 Nano"),
    "env-b": _asteroid([("jetson-nx", 3), ("jetson-tx2", 2)], "3 NX, 2 TX2"),
    "env-b-1000": _asteroid([("jetson-nx", 3), ("jetson-tx2", 2)], "3 NX, 2 TX2", 1000),
    "env-c": _asteroid([("jetson-nx", 1), ("jetson-tx2", 2), ("jetson-nano", 3)], "1 NX, 2 TX2, 3 Nano"),
    "env-d": _asteroid([("jetson-tx2", 1), ("jetson-nano", 3)], "1 TX2, 3 Nano"),
    "decnn-880": _decnn(880, 0.15),
    "decnn-480-1": _decnn(480, 1),
    "decnn-480-5": _decnn(480, 5),
    "decnn-240-5": _decnn(240, 5),
    "decnn-240-10": _decnn(240, 10),
    "decnn-240-20": _decnn(240, 20),
    "decnn-240-40": _decnn(240, 40),
    "home": Preset(
        "1 laptop, 2 Pi 4 and 1 Nano; WiFi, the Nano and the laptop on a cable",
        "no paper: what a family may own; WiFi rates and delays are assumptions",
        {
            "devices": [
                {"name": "laptop", "kind": "laptop"},
                {"kind": "pi4", "count": 2, "port": "80 Mbit/s"},
                {"name": "nano", "kind": "jetson-nano"},
            ],
            "link": {"rate": "80 Mbit/s", "delay": "2 ms"},
            "links": [{"between": ["laptop", "nano"], "rate": "940 Mbit/s", "delay": LAN_DELAY}],
        },
    ),
    "edge-cloud": _edge_cloud("jetson-tx2", "1 TX2"),
    "edge-cloud-pi": _edge_cloud("pi4", "1 Pi 4"),
}
