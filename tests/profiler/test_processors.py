"""What a machine is called: the board, the processor, or on Arm, which prints numbers, its cores."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from manyhands.profiler.processors import core_names, processor_name
from manyhands.profiler.this_machine import identify
from manyhands_bench.results import Host

XEON = "processor\t: 0\nmodel name\t: Intel(R)  Xeon(R) CPU @ 2.00GHz\n\n" * 2


def _arm(*cores: tuple[str, str], family: str = "") -> str:
    return "\n".join(
        f"processor\t: {number}\n{family}BogoMIPS\t: 243.75\nCPU implementer\t: {designer}\nCPU architecture: 8\n"
        f"CPU variant\t: 0x3\nCPU part\t: {part}\nCPU revision\t: 1\n"
        for number, (designer, part) in enumerate(cores)
    )


def _told(folder: Path, cpuinfo: str, board: str = "") -> str:
    """What a machine is called whose kernel says this."""
    (folder / "cpuinfo").write_text(cpuinfo)
    if board:
        (folder / "device-tree").mkdir()
        (folder / "device-tree" / "model").write_text(board + "\0")
    return processor_name(folder)


@pytest.mark.parametrize(
    ("designer", "part", "name"),
    [
        ("0x41", "0xd03", "Cortex-A53"),
        ("0x41", "0xd07", "Cortex-A57"),
        ("0x41", "0xd08", "Cortex-A72"),
        ("0x41", "0xd0b", "Cortex-A76"),
        ("0x41", "0xd42", "Cortex-A78AE"),
        ("0x41", "0xd0c", "Neoverse-N1"),
        ("0x41", "0xd40", "Neoverse-V1"),
        ("0x41", "0xd49", "Neoverse-N2"),
        ("0x4e", "0x004", "NVIDIA Carmel"),
        ("0x61", "0x023", "Apple M1 Firestorm"),
        ("0x41", "0xfff", "Arm core 0xfff"),
        ("0x99", "0x001", "Arm designer 0x99 core 0x001"),
    ],
)
def test_arm_cores_have_names(tmp_path: Path, designer: str, part: str, name: str) -> None:
    assert _told(tmp_path, _arm((designer, part), (designer, part))) == name


def test_unlike_cores_are_all_named() -> None:
    assert core_names(_arm(*[("0x41", "0xd05")] * 4, *[("0x41", "0xd0b")] * 4)) == "Cortex-A55 + Cortex-A76"


def test_a_family_is_no_name(tmp_path: Path) -> None:
    """Kernels of Jetsons and 32-bit ones print one, for every Arm processor the same."""
    cpuinfo = _arm(("0x41", "0xd07"), family="model name\t: ARMv8 Processor rev 1 (v8l)\n")
    assert _told(tmp_path, cpuinfo) == "Cortex-A57"


@pytest.mark.parametrize(
    ("board", "name"),
    [
        ("Raspberry Pi 4 Model B Rev 1.4", "Raspberry Pi 4 Model B Rev 1.4"),
        ("linux,dummy-virt", "Cortex-A72"),
        ("", "Cortex-A72"),
    ],
)
def test_a_board_comes_first_unless_a_hypervisor_plays_it(tmp_path: Path, board: str, name: str) -> None:
    assert _told(tmp_path, _arm(("0x41", "0xd08")), board) == name


def test_x86_says_it_itself(tmp_path: Path) -> None:
    assert _told(tmp_path, XEON) == "Intel(R) Xeon(R) CPU @ 2.00GHz"


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert processor_name(tmp_path) in (platform.processor(), platform.machine())


def test_results_of_this_machine_have_a_folder_with_a_name() -> None:
    """The same at every call, and neither empty nor a bare number."""
    machine = identify(1)
    assert machine == identify(1)
    slug = Host(machine.processor, machine.cores).slug
    assert not slug.startswith(("0x", "unknown"))
    assert slug.endswith(f"-{machine.cores}-cores")
