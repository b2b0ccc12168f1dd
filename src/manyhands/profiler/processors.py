"""The name of this machine's board or processor, under which results and profiles are kept.

An x86 kernel reports the name. An Arm kernel reports two numbers (the core's designer, and which core it is) and at
most a family (`ARMv8 Processor rev 1 (v8l)`), so names are looked up here. Sources: Linux,
arch/arm64/include/asm/cputype.h; util-linux, sys-utils/lscpu-arm.c.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

_NOT_A_BOARD = re.compile(r"dummy-virt|qemu|virtual machine", re.I)
"""Names that hypervisors give to the boards they emulate: they say nothing about the processor."""
_NOT_A_NAME = re.compile(r"ARMv\d|AArch64", re.I)
"""A family of processors that differ by a factor of ten."""

DESIGNERS = {
    0x41: "Arm", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA",
    0x50: "Applied Micro", 0x51: "Qualcomm", 0x53: "Samsung", 0x61: "Apple", 0x6D: "Microsoft", 0xC0: "Ampere",
}  # fmt: skip
CORES = {
    (0x41, 0xB76): "ARM1176",  # Raspberry Pi 1, Zero
    (0x41, 0xC07): "Cortex-A7",  # Raspberry Pi 2
    (0x41, 0xC08): "Cortex-A8",
    (0x41, 0xC09): "Cortex-A9",
    (0x41, 0xC0F): "Cortex-A15",  # Jetson TK1
    (0x41, 0xD03): "Cortex-A53",  # Raspberry Pi 3, Zero 2
    (0x41, 0xD04): "Cortex-A35",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",  # Jetson Nano, TX1, TX2
    (0x41, 0xD08): "Cortex-A72",  # Raspberry Pi 4
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",  # Raspberry Pi 5
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD0D): "Cortex-A77",
    (0x41, 0xD0E): "Cortex-A76AE",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",  # Jetson Orin
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4A): "Neoverse-E1",
    (0x41, 0xD4B): "Cortex-A78C",
    (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD4E): "Cortex-X3",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD80): "Cortex-A520",
    (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD82): "Cortex-X4",
    (0x41, 0xD83): "Neoverse-V3AE",  # Jetson Thor
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x43, 0x0AF): "ThunderX2",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "Kunpeng-920",
    (0x4E, 0x003): "NVIDIA Denver 2",  # Jetson TX2
    (0x4E, 0x004): "NVIDIA Carmel",  # Jetson Xavier
    (0x51, 0x001): "Qualcomm Oryon",
    (0x61, 0x022): "Apple M1 Icestorm",
    (0x61, 0x023): "Apple M1 Firestorm",
    (0x61, 0x024): "Apple M1 Pro Icestorm",
    (0x61, 0x025): "Apple M1 Pro Firestorm",
    (0x61, 0x028): "Apple M1 Max Icestorm",
    (0x61, 0x029): "Apple M1 Max Firestorm",
    (0x61, 0x032): "Apple M2 Blizzard",
    (0x61, 0x033): "Apple M2 Avalanche",
    (0x61, 0x034): "Apple M2 Pro Blizzard",
    (0x61, 0x035): "Apple M2 Pro Avalanche",
    (0x61, 0x038): "Apple M2 Max Blizzard",
    (0x61, 0x039): "Apple M2 Max Avalanche",
    (0x6D, 0xD49): "Azure Cobalt 100",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
"""(CPU implementer, CPU part) -> the core's name."""


def processor_name(root: Path = Path("/proc")) -> str:
    """Return the board's name, else the processor's, else its cores', else the architecture: never empty, the same at
    every call. `root`: the folder in which the kernel describes the machine."""
    board = _plain(_read(root / "device-tree" / "model"))
    if board and not _NOT_A_BOARD.search(board):
        return board
    text = _read(root / "cpuinfo")
    named = next((name for name in _fields(text, "model name") if not _NOT_A_NAME.match(name)), "")
    return named or core_names(text) or platform.processor() or platform.machine() or "unknown processor"


def core_names(cpuinfo: str) -> str:
    """Return the names of an Arm processor's kinds of cores in the kernel's order, joined by `+`; empty: it lists none.

    A kind that is not in the table is named by its numbers, which are as stable as a name.
    """
    kinds: dict[tuple[int, int], None] = {}
    for designer, part in zip(_fields(cpuinfo, "CPU implementer"), _fields(cpuinfo, "CPU part")):
        try:
            kinds[int(designer, 0), int(part, 0)] = None
        except ValueError:
            continue
    return " + ".join(CORES.get(kind) or _numbered(*kind) for kind in kinds)


def _numbered(designer: int, part: int) -> str:
    return f"{DESIGNERS.get(designer, f'Arm designer {designer:#04x}')} core {part:#05x}"


def _fields(text: str, name: str) -> Iterator[str]:
    """Return the values of a field, one for each core that has it."""
    return (_plain(match[1]) for match in re.finditer(rf"(?m)^{re.escape(name)}[ \t]*:[ \t]*(.+)$", text))


def _read(path: Path) -> str:
    """Return a file's text, empty where there is no such file."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _plain(text: str) -> str:
    return " ".join(text.replace("\0", " ").split())
