"""The figures that the four papers report, each with its place in the paper. None of them was measured here.

They are other people's figures, on other devices: they stand beside ours for comparison, and are never mixed with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper: its title, where it was published, and its devices."""

    title: str
    source: str
    devices: str
    """The devices that its figures were measured on."""


@dataclass(frozen=True)
class Headline:
    """One figure of a paper."""

    paper: str
    value: float
    text: str
    """The figure as the paper gives it."""
    where: str


PAPERS = {
    "TILE": Paper(
        "Distributed Convolutional Neural Network Training on Resource-Constrained Mobile and Edge Clusters",
        "P. Rama, A. Gerstlauer, UT Austin, report UT-CERC-24-02, 2024",
        "two to six Raspberry Pi 3 of four cores, YOLOv2's first 16 layers at 608x608, C code",
    ),
    "ASTEROID": Paper(
        "Asteroid: Resource-Efficient Hybrid Pipeline Parallelism for Collaborative DNN Training on Heterogeneous Edge "
        "Devices",
        "S. Ye et al., MobiCom 2024, doi:10.1145/3636534.3649363",
        "Jetson Nano, TX2 and NX at 100 and 1000 Mbit/s",
    ),
    "SPLIT": Paper(
        "Context-Aware Compilation of DNN Training Pipelines across Edge and Cloud",
        "D. Yao et al., IMWUT 5(4), 2021, doi:10.1145/3494981",
        "Raspberry Pi and Jetson TX2 with a GPU server, over WiFi, 4G and 5G",
    ),
    "DECNN": Paper(
        "Model Parallelism Optimization for Distributed Inference Via Decoupled CNN Structure",
        "J. Du et al., IEEE TPDS, 2021, doi:10.1109/TPDS.2020.3041474",
        "four Raspberry Pi 4B behind a switch, ARM Compute Library",
    ),
}

HEADLINES = {
    "tile_memory": Headline("TILE", 8.0, "up to 8x", "abstract; Fig. 6.2 (400 MB to 50 MB)"),
    "tile_grouping": Headline("TILE", 1.5, "up to 1.5x", "abstract; Fig. 6.3"),
    "tile_batch_1": Headline("TILE", 4.0, "up to 4x, on 8 cores", "abstract; Fig. 6.6"),
    "tile_speedup": Headline("TILE", 15.0, "2x to 15x, 2 to 6 devices of 4 cores over one core", "abstract; Fig. 6.1"),
    "asteroid_pp": Headline("ASTEROID", 12.2, "12.2x", "Table 4, ResNet-50, environment B"),
    "asteroid_dp": Headline("ASTEROID", 6.8, "6.8x", "Table 4, BERT-small, environment B"),
    "asteroid_pipedream": Headline("ASTEROID", 2.1, "1.3x to 2.1x", "section 5.3, Fig. 13"),
    "asteroid_dapple": Headline("ASTEROID", 1.8, "1.2x to 1.8x", "section 5.3, Fig. 13"),
    "asteroid_hetpipe": Headline("ASTEROID", 1.9, "1.2x to 1.9x", "section 5.3, Fig. 13"),
    "asteroid_eddl": Headline("ASTEROID", 6.9, "1.6x to 6.9x", "section 5.3, Fig. 13"),
    "asteroid_planning": Headline("ASTEROID", 480.0, "480 s on a Jetson NX", "Table 7, EfficientNet-B1"),
    "asteroid_planning_mobilenetv2": Headline("ASTEROID", 261.0, "261 s on a Jetson NX", "Table 7"),
    "asteroid_planning_resnet50": Headline("ASTEROID", 192.0, "192 s on a Jetson NX", "Table 7"),
    "asteroid_planning_bert_small": Headline("ASTEROID", 69.0, "69 s on a Jetson NX", "Table 7"),
    "asteroid_scaling": Headline("ASTEROID", 2.2, "1.3x to 2.2x", "section 5.6, Fig. 18"),
    "asteroid_recovery": Headline("ASTEROID", 14.0, "14x", "section 5.5, Fig. 17"),
    "asteroid_after": Headline("ASTEROID", 0.9, "90 %", "section 5.5, Fig. 17"),
    "asteroid_energy": Headline("ASTEROID", 2.0, "2x", "section 5.7, EfficientNet-B1, environment D"),
    "split_latency": Headline("SPLIT", 0.976, "up to 97.6 %", "section 6.3, Fig. 17, Raspberry Pi"),
    "split_accuracy": Headline("SPLIT", 0.01, "under 1 % for most models (1.23 %, ResNet-50, CIFAR-10)", "Table 4"),
    "split_accuracy_8bit": Headline("SPLIT", 0.01, "under 1 % for most models (-0.45 %, the same)", "Table 4"),
    "split_memory": Headline("SPLIT", 0.8049, "80 % on average (19.51 % less)", "section 6.5, Fig. 22, Raspberry Pi"),
    "decnn_fast": Headline("DECNN", 3.81, "3.81x", "section 4.3, Fig. 9"),
    "decnn_weak": Headline("DECNN", 2.95, "2.95x", "section 4.3, Fig. 8"),
    "decnn_vgg16": Headline("DECNN", 3.45, "3.45x", "section 4.3, Fig. 9"),
    "decnn_resnet34": Headline("DECNN", 4.0, "4.0x", "section 4.3, Fig. 9"),
    "decnn_memory": Headline("DECNN", 0.701, "70.1 %", "section 4.4, Fig. 12"),
    "decnn_points": Headline("DECNN", 3.0, "3", "Table 3"),
    "decnn_points_tiles": Headline("DECNN", 17.0, "17", "Table 1"),
    "decnn_megabytes": Headline("DECNN", 1.58, "1.58 MB", "Table 3"),
    "decnn_accuracy": Headline("DECNN", -0.0034, "-0.34 points, ResNet-50, ImageNet", "Table 2, x1.5"),
    "decnn_accuracy_wide": Headline("DECNN", 0.0107, "+1.07 points, ResNet-50, ImageNet", "Table 2, x1.75"),
}

ASTEROID_TABLE_2 = {"efficientnet-b1": (171.4, 76.2), "mobilenetv2": (98.0, 52.1), "resnet50": (576.2, 212.4)}
"""Megabytes per mini-batch on five Nanos: HetPipe's (Eq. 1) and ASTEROID's own (Eq. 2)."""

ASTEROID_TABLE_4: dict[tuple[str, str], tuple[float, float, float]] = {
    ("efficientnet-b1", "env-a"): (4.4, 2.1, 2.8), ("efficientnet-b1", "env-b"): (3.0, 4.8, 9.7),
    ("efficientnet-b1", "env-b-1000"): (3.7, 2.1, 1.4), ("mobilenetv2", "env-a"): (4.5, 1.5, 3.5),
    ("mobilenetv2", "env-b"): (3.2, 2.3, 11.2), ("mobilenetv2", "env-b-1000"): (3.8, 1.2, 1.3),
    ("resnet50", "env-a"): (3.4, 3.6, 5.8), ("resnet50", "env-b"): (1.5, 6.1, 12.2),
    ("resnet50", "env-b-1000"): (3.7, 2.9, 3.1), ("bert-small", "env-a"): (3.5, 6.4, 1.0),
    ("bert-small", "env-b"): (1.3, 6.8, 1.0), ("bert-small", "env-b-1000"): (3.9, 4.2, 1.3),
}  # fmt: skip
"""Speed-ups over the best device alone, data parallel and pipeline parallel."""

ASTEROID_FIG_13 = {
    "eddl": "1.6 to 6.9", "pipedream": "1.3 to 2.1", "dapple": "1.2 to 1.8", "hetpipe": "1.2 to 1.9",
}  # fmt: skip
"""Ranges of speed-ups over published systems, on environments B and C (section 5.3; the figure has no numbers)."""

DECNN_TABLES_1_AND_3 = {"1d": (17, 102, 1.8), "2d": (17, 204, 1.2), "channels": (3, 36, 1.58)}
"""ResNet-50 on four devices: synchronisation points, messages, megabytes."""

DECNN_SPEEDUPS = {
    ("resnet50", "880_0.15", "schemes 1+2"): 3.81, ("resnet34", "880_0.15", "schemes 1+2"): 4.0,
    ("vgg16", "880_0.15", "schemes 1+2"): 3.45, ("resnet50", "240_40", "schemes 1+2"): 2.95,
    ("resnet34", "240_40", "schemes 1+2"): 2.5, ("resnet50", "880_0.15", "MoDNN"): 3.03,
    ("resnet50", "880_0.15", "Coates"): 3.23, ("resnet50", "240_40", "MoDNN"): 1.77,
    ("resnet50", "240_40", "Coates"): 1.84,
}  # fmt: skip
"""(network, link (Mbit/s and round trip in ms), method) -> speed-up over one device with the original network (section
4.3)."""
