"""Known devices, so that one can plan for hardware that is not available. Every number is an estimate; profile to know.

Speeds are float32 *training* GFLOP/s (1 multiply-accumulate = 2 FLOP), derived here from published measurements, with
the arithmetic kept visible. Memory, clocks, power modes and ports are those of the vendors' data sheets, written down
from memory and not fetched; idle and transfer watts, and seconds per operator, are typical values.
"""

from __future__ import annotations

import msgspec

from manyhands.facts.errors import UnknownName, did_you_mean


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A known device, in the units of `Device`, and the source of its numbers."""

    title: str
    gflops: float
    memory_bytes: int
    """The memory that is sold."""
    reserved_bytes: int = 0
    """What the system and the context of a GPU keep of it, so that no plan may use it."""
    memory_bytes_per_second: float
    cores: int
    operator_seconds: float
    watts_active: float
    watts_idle: float
    watts_transfer: float
    port_bytes_per_second: float
    source: str

    @property
    def free_bytes(self) -> int:
        """The memory that a plan may use."""
        return self.memory_bytes - self.reserved_bytes


# ---- Speed of the Jetsons and the A100: ASTEROID Table 1, epoch time of ResNet-50 on Mini-ImageNet at 224x224.
# The paper does not say how many images an epoch has. It cites Vinyals et al. 2016, who train on 80 of the 100 classes
# of 600 images. (With the other usual split, 64 classes, every speed below would be a fifth lower; ratios stay.)
EPOCH_IMAGES = 80 * 600
RESNET50_FORWARD_GFLOP = 4.1 * 2  # 4.1 GMAC an image
TRAINING_PER_FORWARD = 3  # backward costs about two forwards
EPOCH_GFLOP = EPOCH_IMAGES * RESNET50_FORWARD_GFLOP * TRAINING_PER_FORWARD

NANO_GFLOPS = EPOCH_GFLOP / (3.48 * 3600)  # 94
TX2_GFLOPS = EPOCH_GFLOP / (1.14 * 3600)  # 288, 3.05 x Nano (2.4 x and 2.6 x on the two small networks)
A100_GFLOPS = EPOCH_GFLOP / 65  # 18,166, 193 x Nano (160 x and 140 x on the two small networks)
# The Xavier NX is not in Table 1. Table 8 gives the minutes to profile the same four networks: Nano 82, TX2 51, NX 25.
# It has the TX2 only 1.6 x the Nano, where Table 1 measures 2.4 to 3.05 x, so both cannot hold: profiling includes what
# is not computing. The NX is taken from its nearest neighbour, the TX2, and Table 8's 82/25 over the Nano does not hold
# here: it would make an NX 1.07 x a TX2. Section 5.2 agrees with 2.04: BERT-small on three NX and two TX2 is "nearly
# linear" at 3.9 x one NX, and 3 + 2 / 2.04 is 3.98 (3 + 2 / 1.07 would be 4.87).
NX_GFLOPS = TX2_GFLOPS * 51 / 25  # 587, 6.2 x Nano: inferred

# ---- GPUs no paper measured in training: the share of peak float32 that the Nano sustains.
NANO_PEAK_GFLOPS = 128 * 2 * 0.9216  # CUDA cores x FLOP a cycle x GHz = 236
SHARE_OF_PEAK = NANO_GFLOPS / NANO_PEAK_GFLOPS  # 0.40
ORIN_NANO_GFLOPS = SHARE_OF_PEAK * 1024 * 2 * 0.625  # 511: the 15 W mode
RTX_2080TI_GFLOPS = SHARE_OF_PEAK * 4352 * 2 * 1.545  # 5,372

# ---- Raspberry Pis: ncnn's ResNet-50 inference with four threads, effective GFLOP/s = 2 x 3.86 GMAC / seconds.
# ncnn is about three times as fast as PyTorch in float32 training. On a Cortex-A72 at 1.5 GHz (peak 4 x 8 x 1.5 = 48
# GFLOP/s) ncnn reaches 29, six tenths of peak, with Winograd's algorithm; PyTorch trained YOLOv2's first 16 layers at
# 608x608 (78 GFLOP a step) in 4.3 s on two Neoverse-N1 cores (peak about 90 GFLOP/s): two tenths of peak.
PYTORCH_PER_NCNN = 1 / 3
FP32_PER_FP16 = 1 / 2  # ncnn computes in fp16 where the core can (Cortex-A76): half as many numbers a register in fp32
PI3_GFLOPS = 13.23 * (1.2 / 1.4) * PYTORCH_PER_NCNN  # 3.8: measured on the 3B+, scaled to the 3B's clock
PI4_GFLOPS = 29.48 * PYTORCH_PER_NCNN  # 9.8
PI5_GFLOPS = 168.05 * FP32_PER_FP16 * PYTORCH_PER_NCNN  # 28
ZERO2W_GFLOPS = 9.93 * PYTORCH_PER_NCNN  # 3.3

# ---- A laptop: four cores with AVX2 (32 FLOP a cycle) at 2.8 GHz, at the same two tenths of peak as above.
LAPTOP_GFLOPS = 4 * 32 * 2.8 * 0.2  # 72

GB = 10**9  # memory is sold in GiB; the seven hundredths between 4 GiB and 4 GB are about what the system keeps
# A Jetson's GPU has no memory of its own. Inferred from what is usual, not measured here and in no paper: Ubuntu with
# JetPack's services keeps 0.6 GB, and a process that has opened CUDA, cuDNN and PyTorch 0.9 GB before its first tensor.
JETSON_SYSTEM, CUDA_CONTEXT = 6 * GB // 10, 9 * GB // 10
JETSON_RESERVED = JETSON_SYSTEM + CUDA_CONTEXT
SUSTAINED_MEMORY = 0.6  # share of the data sheet's memory bandwidth that plain loops reach; 0.4 to 0.85 are common
MBIT = 1e6 / 8  # bytes per second

_RESERVED = " Of the memory 1.5 GB are kept by the system and CUDA (inferred)."
_SHEET = " Memory, bandwidth (x 0.6), watts, port: vendor data sheet from memory; an estimate."
_JETSON = _RESERVED + _SHEET
_ASTEROID = "ASTEROID Table 1: ResNet-50 epoch of {}, taking 48,000 images x 24.6 GFLOP."
_NCNN = "ncnn ResNet-50 inference, {}, divided by 3 for PyTorch float32 training." + _SHEET

CATALOGUE: dict[str, CatalogueEntry] = {
    "pi3": CatalogueEntry(
        title="Raspberry Pi 3 Model B",
        gflops=PI3_GFLOPS, memory_bytes=1 * GB, memory_bytes_per_second=3.6e9 * SUSTAINED_MEMORY, cores=4,
        operator_seconds=100e-6, watts_active=5.0, watts_idle=1.5, watts_transfer=0.5, port_bytes_per_second=100 * MBIT,
        source=_NCNN.format("13.2 GFLOP/s on a 3B+ scaled from 1.4 to 1.2 GHz"),
    ),
    "pi4": CatalogueEntry(
        title="Raspberry Pi 4 Model B, 4 GB",
        gflops=PI4_GFLOPS, memory_bytes=4 * GB, memory_bytes_per_second=12.8e9 * SUSTAINED_MEMORY, cores=4,
        operator_seconds=50e-6, watts_active=6.4, watts_idle=2.7, watts_transfer=0.5, port_bytes_per_second=1000 * MBIT,
        source=_NCNN.format("29.5 GFLOP/s"),
    ),
    "pi5": CatalogueEntry(
        title="Raspberry Pi 5, 8 GB",
        gflops=PI5_GFLOPS, memory_bytes=8 * GB, memory_bytes_per_second=17.1e9 * SUSTAINED_MEMORY, cores=4,
        operator_seconds=20e-6, watts_active=9.0, watts_idle=3.0, watts_transfer=0.5, port_bytes_per_second=1000 * MBIT,
        source=_NCNN.format("168 GFLOP/s, halved because it ran in fp16"),
    ),
    "pi-zero-2w": CatalogueEntry(
        title="Raspberry Pi Zero 2 W",
        gflops=ZERO2W_GFLOPS, memory_bytes=GB // 2, memory_bytes_per_second=3.6e9 * SUSTAINED_MEMORY, cores=4,
        operator_seconds=120e-6, watts_active=3.0, watts_idle=0.6, watts_transfer=0.7, port_bytes_per_second=40 * MBIT,
        source=_NCNN.format("9.9 GFLOP/s") + " Port: WiFi n at 2.4 GHz.",
    ),
    "jetson-nano": CatalogueEntry(
        title="NVIDIA Jetson Nano, 4 GB",
        gflops=NANO_GFLOPS, memory_bytes=4 * GB, reserved_bytes=JETSON_RESERVED,
        memory_bytes_per_second=25.6e9 * SUSTAINED_MEMORY, cores=4,
        operator_seconds=60e-6, watts_active=10.0, watts_idle=2.0, watts_transfer=0.5,
        port_bytes_per_second=1000 * MBIT, source=_ASTEROID.format("3.48 h") + _JETSON,
    ),
    "jetson-tx2": CatalogueEntry(
        title="NVIDIA Jetson TX2, 8 GB",
        gflops=TX2_GFLOPS, memory_bytes=8 * GB, reserved_bytes=JETSON_RESERVED,
        memory_bytes_per_second=59.7e9 * SUSTAINED_MEMORY, cores=6,
        operator_seconds=45e-6, watts_active=15.0, watts_idle=3.0, watts_transfer=0.5,
        port_bytes_per_second=1000 * MBIT, source=_ASTEROID.format("1.14 h") + _JETSON,
    ),
    "jetson-nx": CatalogueEntry(
        title="NVIDIA Jetson Xavier NX, 8 GB",
        gflops=NX_GFLOPS, memory_bytes=8 * GB, reserved_bytes=JETSON_RESERVED,
        memory_bytes_per_second=59.7e9 * SUSTAINED_MEMORY, cores=6,
        operator_seconds=40e-6, watts_active=15.0, watts_idle=4.0, watts_transfer=0.5,
        port_bytes_per_second=1000 * MBIT,
        source="ASTEROID Table 8: profiling took 25 min against the TX2's 51, so 2.04 x the TX2 of Table 1 (inferred; "
        "the Nano's 82 min of the same table do not fit Table 1)." + _JETSON,
    ),
    "jetson-orin-nano": CatalogueEntry(
        title="NVIDIA Jetson Orin Nano, 8 GB",
        gflops=ORIN_NANO_GFLOPS, memory_bytes=8 * GB, reserved_bytes=JETSON_RESERVED,
        memory_bytes_per_second=68e9 * SUSTAINED_MEMORY, cores=6,
        operator_seconds=25e-6, watts_active=15.0, watts_idle=4.0, watts_transfer=0.5,
        port_bytes_per_second=1000 * MBIT,
        source="0.40 of its peak float32 (1,280 GFLOP/s at 625 MHz), the share the Jetson Nano sustains." + _JETSON,
    ),
    "laptop": CatalogueEntry(
        title="Laptop, four cores with AVX2, 8 GB, no GPU",
        gflops=LAPTOP_GFLOPS, memory_bytes=8 * GB, memory_bytes_per_second=38.4e9 * SUSTAINED_MEMORY, cores=4,
        operator_seconds=10e-6, watts_active=35.0, watts_idle=8.0, watts_transfer=1.0,
        port_bytes_per_second=1000 * MBIT,
        source="4 cores x 32 FLOP x 2.8 GHz at 0.2 of peak, as PyTorch trained on a Neoverse-N1." + _SHEET,
    ),
    "rtx-2080ti": CatalogueEntry(
        title="Server with one NVIDIA RTX 2080 Ti, 11 GB",
        gflops=RTX_2080TI_GFLOPS, memory_bytes=11 * GB, memory_bytes_per_second=616e9 * SUSTAINED_MEMORY, cores=8,
        operator_seconds=10e-6, watts_active=300.0, watts_idle=60.0, watts_transfer=5.0,
        port_bytes_per_second=1000 * MBIT,
        source="0.40 of its peak float32 (13,450 GFLOP/s), the share the Jetson Nano sustains." + _SHEET,
    ),
    "a100": CatalogueEntry(
        title="Server with one NVIDIA A100, 40 GB",
        gflops=A100_GFLOPS, memory_bytes=40 * GB, memory_bytes_per_second=1555e9 * SUSTAINED_MEMORY, cores=16,
        operator_seconds=8e-6, watts_active=500.0, watts_idle=120.0, watts_transfer=10.0,
        port_bytes_per_second=10_000 * MBIT,
        source=_ASTEROID.format("65 s") + _SHEET + " Probably in TF32, PyTorch's default.",
    ),
}  # fmt: skip

ALIASES = {
    "raspberry-pi-3": "pi3",
    "raspberry-pi-4": "pi4",
    "raspberry-pi-5": "pi5",
    "raspberry-pi-zero-2w": "pi-zero-2w",
    "pi-zero-2-w": "pi-zero-2w",
    "zero2w": "pi-zero-2w",
    "nano": "jetson-nano",
    "tx2": "jetson-tx2",
    "nx": "jetson-nx",
    "xavier-nx": "jetson-nx",
    "jetson-xavier-nx": "jetson-nx",
    "orin-nano": "jetson-orin-nano",
    "2080ti": "rtx-2080ti",
}


def catalogue_key(kind: str, where: str = "") -> str:
    """Return the catalogue's own name for `kind`, which may be an alias. `where` is the field's path, for the error."""
    key = ALIASES.get(kind, kind)
    if key not in CATALOGUE:
        message = f"There is no device kind called '{kind:.80}'."
        hint = did_you_mean(kind, [*CATALOGUE, *ALIASES, "custom"])
        raise UnknownName(f"{where}: {message}" if where else message, hint=hint)
    return key
