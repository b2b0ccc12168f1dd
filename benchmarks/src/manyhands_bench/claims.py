"""The figures on the results page: what each is, whether it is measured or simulated, our aim, and a paper's figure.

A figure has the name that its bench prints. `max vs_best_rival_*` is the largest of all figures that begin so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands_bench.papers import HEADLINES, Headline

How = Literal["measured", "measured in the lab", "simulated", "modelled", "counted"]
HOWS: Mapping[How, str] = {
    "measured": "real processes on the machine named, by the clock or by the bytes they held or sent (bench split: "
    "over links shaped by recorded rates, with an edge slowed by a stated factor)",
    "measured in the lab": "real processes on one machine that plays several: shaped links, shares of cores, memory "
    "limits; speeds are those of the devices played",
    "simulated": "the simulator's answer: nothing of that size ran. It rests on a profile, the seconds of each layer: "
    "measured on the machine named (`profile of`), so that another machine gets another figure, or estimated from the "
    "device catalogue, the same on any machine",
    "modelled": "computed from what a plan holds and sends and a device's watts",
    "counted": "counted in the plan, no clock involved",
}
Profiled = Literal["", "measured", "estimated"]
ESTIMATED = "estimated from the device catalogue"
Form = Literal["times", "seconds", "part", "points", "number", "megabytes", "small", "yes"]
_DERIVED = re.compile(r"(max|min) (\S+)\*(\S*)")


@dataclass(frozen=True)
class Aim:
    """A value to reach: a least or a most value."""

    sign: Literal["≥", "≤"]
    value: float
    only_on: str = ""
    """The architecture for which it holds; empty: any."""

    def met(self, got: float) -> bool:
        return got >= self.value if self.sign == "≥" else got <= self.value


@dataclass(frozen=True)
class Claim:
    """One row of the page: a figure of a bench, with our aim and the paper's figure where there is one."""

    bench: str
    key: str
    text: str
    how: How = "measured"
    profile: Profiled = ""
    """For a simulated figure: whether its layers' seconds were measured on the machine that ran the bench, or estimated
    from the device catalogue."""
    form: Form = "times"
    aim: Aim | None = None
    paper: str = ""
    """A key of HEADLINES."""
    is_alike: bool = True
    """Whether the paper's setting is near enough to ours to be drawn beside it."""

    def __post_init__(self) -> None:
        assert bool(self.profile) == (self.how == "simulated"), (
            f"{self.bench}, {self.key}: simulated from which profile?"
        )

    def profile_of(self, machines: Sequence[str]) -> str:
        """Return which profile a simulated figure rests on, if these machines ran the bench."""
        return ESTIMATED if self.profile == "estimated" else f"profile of {', '.join(machines)}"

    @property
    def headline(self) -> Headline | None:
        return HEADLINES[self.paper] if self.paper else None

    def value(self, figures: Mapping[str, float | int | None]) -> float | None:
        """Return the claim's figure; None if the bench did not give it."""
        if match := _DERIVED.fullmatch(self.key):
            which, begin, end = match.groups()
            values = [
                value
                for key, value in figures.items()
                if key.startswith(begin) and key.endswith(end) and value is not None
            ]
            return (max(values) if which == "max" else min(values)) if values else None
        if self.key == SAVED:
            return _saved(figures)
        return figures.get(self.key)


SAVED = "saved by the best trace"


def _saved(figures: Mapping[str, float | int | None]) -> float | None:
    """Return the largest part of the edge-only seconds that any trace saves."""
    alone = figures.get("edge_only_seconds")
    ours = [value for key, value in figures.items() if key.endswith("_seconds_ours") and value]
    return 1 - min(ours) / alone if alone and ours else None


def least(value: float, only_on: str = "") -> Aim:
    return Aim("≥", value, only_on)


def most(value: float) -> Aim:
    return Aim("≤", value)


YOLO = "YOLOv2-16"
_ACCURACIES = {("1.5", "3"): "decnn_accuracy", ("1.75", "3"): "decnn_accuracy_wide"}
CLAIMS: tuple[Claim, ...] = (
    # TILE
    Claim("tile", "memory_ratio_24", f"memory, {YOLO}: tensor bytes of one device over the fullest of 24 tiles",
          aim=least(8), paper="tile_memory"),
    Claim("tile", "memory_ratio_2", f"memory, {YOLO}: tensor bytes of one device over the fuller of 2 tiles",
          aim=least(1.8)),
    Claim("tile", "rss_ratio_2", f"memory, {YOLO}: resident, above a bare import of torch, one device over 2 tiles",
          aim=least(1.45)),
    Claim("tile", "speedup_2", f"speed, {YOLO}: one device's step over that of two tiles, two cores",
          paper="tile_speedup", is_alike=False),
    Claim("tile", "limit_2",
          f"speed, {YOLO}: one device's step over that of two bare halves at once, nothing exchanged"),
    Claim("tile", "efficiency_vs_limit_2", "speed of two tiles as a part of what cutting could give", form="part",
          aim=least(0.95)),
    Claim("tile-8", "speedup_8", f"speed, {YOLO}: one device's step over that of eight tiles, eight cores",
          aim=least(4.3), paper="tile_speedup", is_alike=False),
    Claim("tile-8", "limit_8",
          f"speed, {YOLO}: one device's step over that of eight bare parts at once, nothing exchanged"),
    Claim("tile-8", "efficiency_vs_limit_8", "speed of eight tiles as a part of what cutting could give", form="part",
          aim=least(0.85)),
    Claim("tile-4", "efficiency_vs_limit_4", "speed of four tiles as a part of what cutting could give", form="part",
          aim=least(0.92)),
    Claim("tile-16", "efficiency_vs_limit_16", "speed of sixteen tiles as a part of what cutting could give",
          form="part", aim=least(0.75)),
    Claim("tile-16", "speedup_16", f"speed, {YOLO}: one device's step over that of sixteen tiles, sixteen cores",
          aim=least(6)),
    Claim("tile", "python_ms_per_step", "processor time of a tile's step above a bare half's, milliseconds",
          form="number", aim=most(10)),
    Claim("tile", "speedup_2_vs_torch_default", "two tiles over the plain module with PyTorch's default kernels"),
    Claim("tile", "grouping_gain_fast", "best grouping over the worse of one group and every layer, loopback",
          aim=least(1), paper="tile_grouping"),
    Claim("tile", "grouping_gain_slow", "best grouping over the worse of one group and every layer, 2 Mbit/s",
          how="simulated", profile="measured", aim=least(1), paper="tile_grouping"),
    Claim("tile", "batch1_vs_data_parallel", "one sample: two tiles over data parallel, which leaves one core idle",
          paper="tile_batch_1", is_alike=False),
    Claim("tile", "batch1_vs_layer_partition", "one sample: two tiles over a partition by layers", paper="tile_batch_1",
          is_alike=False),
    Claim("tile-8", "batch1_vs_data_parallel", "one sample: eight tiles over data parallel", paper="tile_batch_1"),
    Claim("tile-8", "batch1_vs_layer_partition", "one sample: eight tiles over a partition by layers",
          paper="tile_batch_1"),
    Claim("tile", "bytes_match", "every pair sent exactly the bytes of the plan", form="yes", aim=least(1)),
    Claim("tile-lab", "fig_6_1_speedup_6x4", f"speed, {YOLO}: 24 tiles on six Pi 3 over one on one core, one sample",
          how="measured in the lab", paper="tile_speedup"),
    Claim("tile-lab", "fig_6_1_speedup_6x4_without_weights", "the same without the sums of the weights",
          how="measured in the lab"),
    Claim("tile-lab", "fig_6_3_planned_vs_every_layer_least",
          "24 tiles on six Pi 3: an exchange at every layer over the planner's grouping, least of batches of 1 to 8",
          how="measured in the lab", aim=least(1)),
    Claim("tile-lab", "fig_6_3_1_group_over_planned_1", "the same, one group over the planner's, one sample",
          how="measured in the lab", paper="tile_grouping"),
    Claim("tile-lab", "fig_6_6_data_parallel_over_tiles_1",
          "eight tiles on two devices of four cores over data parallel, one sample", how="measured in the lab",
          paper="tile_batch_1"),
    Claim("tile-lab", "fig_6_6_data_parallel_over_tiles_16", "the same, 16 samples", how="measured in the lab"),
    Claim("tile-lab", "rss_ratio_24_tiles",
          f"memory, {YOLO}: resident, above a bare import of torch, one device over the fullest of 24 tiles",
          paper="tile_memory"),
    Claim("tile-lab", "rss_ratio_8_tiles", "the same of 8 tiles"),
    # ASTEROID
    Claim("pipeline-hybrid", "hybrid_lab_gain",
          "speed of a hybrid plan over the closest of data parallel, pipeline parallel and DAPPLE, MobileNetV2, "
          "environment C", how="measured in the lab", aim=least(1)),
    Claim("pipeline-hybrid", "hybrid_lab_predicted_gain", "the same as predicted", how="simulated",
          profile="measured"),
    *(Claim("pipeline-hybrid", f"hybrid_lab_over_{key}", f"the same plan over {name}", how="measured in the lab")
      for key, name in (("data_parallel", "data parallel, overlapped sums"), ("pipeline_parallel", "pipeline parallel"),
                        ("dapple", "DAPPLE"))),
    Claim("pipeline-hybrid", "hybrid_lab_prediction_error", "predicted against measured step of these four, median",
          how="measured in the lab", form="part", aim=most(0.15)),
    Claim("pipeline-simulated", "table4_within_30_percent",
          "of the 36 ratios of Table 4, within 30 % of the paper's", how="simulated", profile="estimated", form="part",
          aim=least(0.6)),
    Claim("pipeline-simulated", "table4_within_30_percent_overlapped",
          "the same if data parallel has our overlapped sums", how="simulated", profile="estimated", form="part"),
    Claim("pipeline-simulated", "speedup_pp_resnet50_env_b",
          "speed over pipeline parallel, ResNet-50, environment B, 100 Mbit/s",
          how="simulated", profile="estimated", paper="asteroid_pp"),
    Claim("pipeline-simulated", "speedup_dp_one_port_bert_small_env_b",
          "speed over data parallel through one port (inferred), BERT-small, environment B, 100 Mbit/s",
          how="simulated", profile="estimated", paper="asteroid_dp"),
    Claim("pipeline-simulated", "speedup_dp_bert_small_env_b",
          "the same over data parallel with our overlapped sums", how="simulated", profile="estimated"),
    *(Claim("pipeline-simulated", f"gain_over_{key}_geomean",
            f"speed over {name}, mean of four networks on environments B and C", how="simulated", profile="estimated",
            aim=least(at_least) if at_least else None, paper=paper, is_alike=False)
      for key, name, at_least, paper in (
          ("pipedream", "PipeDream", 1.3, "asteroid_pipedream"), ("dapple", "DAPPLE", 1.2, "asteroid_dapple"),
          ("dapple_dropping", "DAPPLE by our search, which may drop devices", None, ""),
          ("hetpipe", "HetPipe", None, "asteroid_hetpipe"), ("eddl", "EDDL", None, "asteroid_eddl"))),
    Claim("pipeline", "plan_seconds", "seconds to plan EfficientNet-B1, cut at operators, on environment C",
          form="seconds", aim=most(2), paper="asteroid_planning"),
    *(Claim("pipeline", f"plan_seconds_{key}", f"seconds to plan {name}, cut at operators, on environment C",
            form="seconds", paper=f"asteroid_planning_{key}")
      for key, name in (("mobilenetv2", "MobileNetV2"), ("resnet50", "ResNet-50"), ("bert_small", "BERT-small"))),
    Claim("pipeline", "plan_seconds_64_devices", "seconds to plan ResNet-50 on 64 devices", form="seconds",
          aim=most(20)),
    Claim("pipeline", "optimality_gap", "gap of plans to exhaustive search on drawn instances", form="small",
          aim=most(1e-9)),
    Claim("pipeline", "measured_vs_best_torch",
          "speed over the best of DDP and torch's 1F1B and GPipe; the worse of local workers and the lab",
          aim=least(1.1)),
    Claim("pipeline", "sim_error", "predicted against measured round, the worse of local workers and the lab",
          form="part", aim=most(0.15)),
    Claim("pipeline", "executor_overhead", "round of two stages on two cores over bare computing", aim=most(1.1)),
    Claim("pipeline-studies", "joules_ratio", "joules a sample of data parallel over ours, EfficientNet-B1, "
          "environment D", how="simulated", profile="estimated", paper="asteroid_energy"),
    Claim("pipeline-studies", "scaling_8_over_1_efficientnet_b1_32", "throughput of eight Nanos over one, "
          "EfficientNet-B1", how="simulated", profile="estimated"),
    Claim("pipeline-studies", "scaling_8_vs_data_parallel_efficientnet_b1_32", "the same over data parallel",
          how="simulated", profile="estimated", paper="asteroid_scaling"),
    Claim("pipeline-studies", "fig_1_communication_part_dp_efficientnet_b1",
          "of a data-parallel round on three Nanos, communication, EfficientNet-B1", how="simulated",
          profile="estimated", form="part"),
    Claim("pipeline-studies", "fig_5_activations_part_efficientnet_b1",
          "of the memory of training on an NX, activations, EfficientNet-B1", how="modelled", form="part"),
    Claim("recovery-lab", "lab_light_vs_heavy",
          "seconds to go on after a kill, EfficientNet-B1, environment D: all state gathered, planned again and given "
          "out again, over incremental re-planning", how="measured in the lab", paper="asteroid_recovery"),
    Claim("recovery-lab", "lab_throughput_after", "throughput afterwards: incremental over that", form="part",
          how="measured in the lab", aim=least(0.9), paper="asteroid_after"),
    Claim("recovery-lab", "lab_megabytes_moved_light", "megabytes of state moved by incremental re-planning",
          how="measured in the lab", form="megabytes"),
    Claim("recovery-lab", "lab_megabytes_moved_heavy", "the same by gathering and giving out all", form="megabytes",
          how="measured in the lab"),
    Claim("recovery-lab", "lab_recovery_seconds_light", "seconds to go on by incremental re-planning, the lab's time",
          how="measured in the lab", form="seconds"),
    Claim("recovery-lab", "lab_rounds_lost", "rounds whose work was lost in these kills", how="measured in the lab",
          form="number", aim=most(0)),
    Claim("recovery", "light_vs_heavy",
          "seconds to go on after a kill: full re-planning over incremental, where both move the same bytes"),
    Claim("recovery", "throughput_after", "throughput after a loss: incremental re-planning over full", form="part",
          aim=least(0.9)),
    Claim("recovery", "recovery_seconds",
          "seconds from kill -9 to the start of the next round that is completed, median over devices", form="seconds",
          aim=most(1.5)),
    Claim("recovery", "recovery_seconds_silent", "seconds to go on after a device falls silent (limit 2 s)",
          form="seconds", aim=most(3.5)),
    Claim("recovery", "torchrun_tuned_seconds", "seconds to go on after the same kill under torchrun, time-outs tuned",
          form="seconds"),
    Claim("recovery", "backup_overhead", "a round with copies over one without", aim=most(1.03)),
    Claim("recovery", "rounds_lost", "rounds whose work was lost", form="number", aim=most(0)),
    Claim("recovery", "soak_weights_differ", "weights after random kills against a calm run, float64", form="small",
          aim=most(1e-10)),
    Claim("chaos", "faults", "random faults of eleven kinds over five ways of sharing", form="number", aim=least(500)),
    Claim("chaos", "rounds_lost", "rounds lost under random faults", form="number", aim=most(0)),
    Claim("chaos", "weights_differ", "weights after random faults against one device, float64", form="small",
          aim=most(1e-10)),
    Claim("chaos", "processes_left", "processes left behind after random faults", form="number", aim=most(0)),
    Claim("chaos", "hangs", "jobs that hung under random faults", form="number", aim=most(0)),
    Claim("chaos", "recovery_seconds_median", "seconds from a random fault to the end of a round after it, median",
          form="seconds"),
    Claim("chaos", "recovery_seconds_worst", "seconds from a random fault to the end of a round after it, worst",
          form="seconds", aim=most(10)),
    Claim("chaos", "false_evictions", "devices given up without a reason, 5 times slower for 30 s among them",
          form="number", aim=most(0)),
    # SPLIT
    Claim("split", SAVED, "of 100 batches' seconds at the edge alone, saved on the best recorded network", form="part",
          paper="split_latency"),
    Claim("split", "gain_geomean", "speed over the best of edge-only, JointDNN and K = 0, mean over recorded networks",
          aim=least(1.5)),
    Claim("split", "worst_vs_best_rival",
          "speed over the best of edge-only, JointDNN and K = 0, worst recorded network", aim=least(0.95)),
    Claim("split-decisions", "gain_over_frozen",
          "speed over the first deployment kept, mean of five networks, two edges, fifteen links of 180 s",
          how="simulated", profile="estimated", aim=least(1.05)),
    Claim("split-decisions", "gain_over_frozen_where_changed", "the same where the engine changed anything",
          how="simulated", profile="estimated"),
    Claim("split-decisions", "gain_over_hindsight", "speed over the best deployment to keep, known afterwards",
          how="simulated", profile="estimated"),
    Claim("split-decisions", "redeployments", "changes of deployment in all these jobs", how="simulated",
          profile="estimated", form="number", aim=least(1)),
    Claim("split", "sim_error", "predicted against measured seconds of a batch, median", form="part", aim=most(0.15)),
    Claim("split", "accuracy_drop_pipeline",
          "accuracy lost by running ahead, K = 5 (CIFAR-10, a small network, rehearsed)", form="part", aim=most(0.01),
          paper="split_accuracy"),
    Claim("split", "accuracy_drop_8bit",
          "accuracy lost by running ahead with features in 8 bits and error feedback (the same)", form="part",
          aim=most(0.01), paper="split_accuracy_8bit"),
    Claim("split", "bytes_ratio_8bit", "bytes of features in 8 bits over those in 32", form="part", aim=most(0.26)),
    Claim("split", "edge_memory_ratio", "the edge's memory over that of training alone", how="modelled", form="part",
          paper="split_memory"),
    Claim("split", "edge_energy_ratio", "the edge's joules over those of training alone", how="modelled", form="part"),
    # DECNN
    Claim("infer", "speedup_latency_resnet50_880_0.15", "speed of ResNet-50 on 4 devices over one, 880 Mbit/s, 0.15 ms",
          how="simulated", profile="measured", paper="decnn_fast"),
    Claim("infer", "speedup_latency_resnet34_880_0.15", "speed of ResNet-34 on 4 devices over one, 880 Mbit/s, 0.15 ms",
          how="simulated", profile="measured", paper="decnn_resnet34"),
    Claim("infer", "speedup_latency_vgg16_880_0.15", "speed of VGG-16 on 4 devices over one, 880 Mbit/s, 0.15 ms",
          how="simulated", profile="measured", paper="decnn_vgg16"),
    Claim("infer", "speedup_latency_resnet50_240_40", "speed of ResNet-50 on 4 devices over one, 240 Mbit/s, 40 ms",
          how="simulated", profile="measured", paper="decnn_weak"),
    Claim("infer", "worst_vs_rivals", "speed over MoDNN and Coates, worst of three networks and seven links",
          how="simulated", profile="measured", aim=least(1)),
    Claim("infer", "lab_worst_vs_rivals", "speed over MoDNN and Coates, ResNet-50, worst of two links",
          how="measured in the lab"),
    Claim("infer", "scheme3_gain", "throughput by two samples under way, 240 Mbit/s, 40 ms",
          how="simulated", profile="measured"),
    Claim("infer", "lab_scheme3_gain_240_20", "the same at 240 Mbit/s, 20 ms", how="measured in the lab",
          aim=least(1)),
    Claim("infer", "lab_sim_error", "predicted against measured seconds of a sample in the lab, median", form="part",
          how="measured in the lab", aim=most(0.15)),
    Claim("infer", "memory_reduction_4", "memory saved on each of 4 devices, ResNet-50, tensor bytes", form="part",
          aim=least(0.65), paper="decnn_memory"),
    Claim("infer", "sync_points_channels", "synchronisation points of an inference by channels", how="counted",
          form="number", paper="decnn_points"),
    Claim("infer", "sync_points_1d", "synchronisation points of an inference by tiles", how="counted", form="number",
          paper="decnn_points_tiles"),
    Claim("infer", "megabytes_channels", "megabytes exchanged by channels", how="counted", form="megabytes",
          paper="decnn_megabytes"),
    Claim("infer", "accuracy_change_x1.5_3shuffles",
          "accuracy, decoupled less original (CIFAR-10, trained for a minute: too short to tell)", form="points"),
    Claim("infer-accuracy", "accuracy_original",
          "accuracy of the original (CIFAR-10, ResNet-18, 10 epochs, mean of 3 seeds)", form="part"),
    *(Claim("infer-accuracy", f"accuracy_change_x{widen}_{shuffles}shuffles",
            f"accuracy, decoupled less original (the same trainings): x{widen}, {shuffles} shuffles", form="points",
            paper=_ACCURACIES.get((widen, shuffles), ""))
      for widen in ("1", "1.5", "1.75") for shuffles in ("0", "3", "all")),
    Claim("infer", "speedup_2", "throughput of decoupled ResNet-50 on two cores over one, each in its best batches",
          aim=least(1.8)),
    Claim("infer", "limit_2", "the same of two halves of it that exchange nothing: what halving alone gives there"),
    Claim("infer", "speedup_2_latency", "the same network on two cores over one, one sample at a time"),
    Claim("infer", "limit_2_latency", "the same of two halves of it that exchange nothing"),
    # One planner over all
    Claim("auto", "mixed_share", "of 60 drawn scenarios, won by a plan none of the papers can make",
          how="simulated", profile="estimated", form="part"),
    Claim("auto", "gain_geomean",
          "speed over the best of single, samples, pipeline and tiles, mean of 60 drawn scenarios",
          how="simulated", profile="estimated"),
    Claim("auto", "gain_min", "speed over the best of single, samples, pipeline and tiles, worst of 60 drawn scenarios",
          how="simulated", profile="estimated", aim=least(1)),
    Claim("auto", "lab_gain_min",
          "speed of mixed plans over the best of single, samples, pipeline and tiles, least of three",
          how="measured in the lab"),
    Claim("auto", "lab_prediction_error", "predicted against measured step of mixed plans, median",
          how="measured in the lab", form="part"),
    Claim("auto", "plan_seconds_16", "seconds to plan 200 layers on 16 unequal devices", form="seconds", aim=most(5)),
    Claim("auto", "plan_seconds_64", "seconds to plan 200 layers on 64 unequal devices", form="seconds", aim=most(60)),
    Claim("auto", "simulate_seconds_1000", "seconds to simulate a plan of 1,000 devices", form="seconds", aim=most(60)),
    Claim("auto", "unet_trains", "U-Net at 1024x1024 trains on four devices of 1.5 GB", how="measured in the lab",
          form="yes", aim=least(1)),
    Claim("auto", "unet_alone_oom", "U-Net at 1024x1024 on one device of 1.5 GB: the kernel ends it",
          how="measured in the lab", form="yes", aim=least(1)),
    # The parts
    Claim("capture", "capture_overhead", "step of the captured chain over the plain module, worst of three networks",
          aim=most(1.03)),
    Claim("capture", "verify_over_step",
          "self-check before the first step over one plain step of eight samples, worst of three networks"),
    Claim("capture", "kernel_choice_gain",
          f"speed, {YOLO}: PyTorch's default kernels' step over that of the chosen ones",
          aim=least(1.3, only_on="aarch64")),
    Claim("capture", "kernel_choice_gain_min",
          "default kernels' step over the chosen ones', least over the zoo's image networks", aim=least(0.99)),
    Claim("capture", "simulate_actions_per_second", "actions simulated a second, 64 devices", form="number"),
    Claim("core", "dp_vs_ddp", "data parallel on two workers over DistributedDataParallel (gloo), ResNet-18",
          aim=least(1.05)),
    Claim("core", "dp_vs_ddp_vgg16_2", "the same with VGG-16, 500 MB of weights", aim=least(1.05)),
    *(Claim(f"core-{workers}", f"dp_vs_ddp_{network}{workers}",
            f"data parallel on {workers} workers over DistributedDataParallel (gloo), {title}", aim=least(1.05))
      for workers in (4, 8) for network, title in (("", "ResNet-18"), ("vgg16_", "VGG-16"))),
    Claim("core", "capture_overhead",
          "step by coordinator, worker and executor over the plain module, worst of three networks", aim=most(1.02)),
    Claim("core", "exchange_efficiency", "16 MB between two processes over a raw socket's rate", form="part",
          aim=least(0.7)),
    Claim("core", "latency_ratio", "latency of 4 KB over a raw socket's", aim=most(5)),
    Claim("core", "sim_error", "predicted against measured step", form="part", aim=most(0.10)),
    Claim("core", "demo_sim_error_2", "predicted against measured step of the demonstration, two workers", form="part",
          aim=most(0.15)),
    Claim("core", "demo_sim_error_4", "the same on four workers", form="part", aim=most(0.15)),
    Claim("core", "ready_seconds", "seconds until four local workers are ready", form="seconds", aim=most(10)),
    # Any network
    Claim("networks", "captured_share", "of the public networks of torchvision, timm and transformers, captured",
          form="part", aim=least(0.97)),
    Claim("networks", "samples_share", "of these, planned by samples over two devices", form="part", aim=least(0.95)),
    Claim("networks", "pipeline_share", "of these, planned as a pipeline of two devices", form="part"),
    Claim("networks", "tiles_share_convolutional", "of the convolutional ones, planned in two tiles", form="part",
          aim=least(0.95)),
    Claim("networks", "trained_exact_share",
          "of a drawn tenth, trained by two workers as by plain PyTorch, to 1e-9 in float64", form="part",
          aim=least(1)),
    Claim("networks", "bare_errors", "errors that name no line of the user's", form="number", aim=most(0)),
    Claim("networks", "forward_equal_share", "of the captured ones, computed as by the module, to 1e-12 in float64",
          form="part", aim=least(1)),
    Claim("networks", "captured_detectors", "of torchvision's detectors, captured with their own losses", form="part"),
    Claim("networks", "networks", "public networks walked", form="number"),
    Claim("generate", "1_worker_over_plain", "tokens a second by one worker over plain PyTorch's", form="part"),
    Claim("generate", "2_workers_over_plain", "tokens a second by two workers in a pipeline over plain PyTorch's",
          form="part"),
    Claim("generate", "2_workers_4_prompts_over_plain", "the same for four prompts at a time", form="part"),
    Claim("generate", "tokens_equal", "whether all tokens are those of one process", form="number", aim=least(1)),
    Claim("generate", "small_2_devices_over_1",
          "tokens a second of a network that one device cannot hold: by two over one that reads weights from its disk"),
    Claim("larger", "loss_difference", "worst difference of a step's loss from one process that holds the network",
          form="number", aim=most(1e-5)),
    Claim("larger", "refused_alone", "whether the planner refuses one such device", form="number", aim=least(1)),
    Claim("larger", "killed_alone", "whether the kernel kills it there, when forced", form="number", aim=least(1)),
    Claim("collectives", "min torch_over_builtin_*",
          "seconds of sums by PyTorch's process groups (gloo) over those by messages, least of nine settings"),
    Claim("collectives", "max torch_over_builtin_*", "the same, most of nine settings"),
    Claim("collectives", "auto_over_faster", "the way that auto takes over the faster one, worst of nine settings",
          aim=most(1.1)),
    Claim("collectives", "sums_right", "whether all these sums are right", form="yes", aim=least(1)),
    # A trainer that people can move to
    Claim("trainer", "clip_exact",
          "clipped training by samples, tiles, a pipeline, mixed, split: worst relative difference from one device, "
          "float64", form="small", aim=most(1e-10)),
    Claim("trainer", "groups_exact", "groups of weights, several optimizers and schedules: the same", form="small",
          aim=most(1e-10)),
    Claim("trainer", "validation_difference", "losses of validations while training: the same", form="small",
          aim=most(1e-10)),
    Claim("trainer", "bf16_noise_ratio",
          "distance to float64 in bfloat16 over that of plain PyTorch under autocast, worst of three ways of sharing",
          aim=most(1.5)),
    Claim("trainer", "bf16_bytes_ratio", "bytes between stages in bfloat16 over those in float32", form="part",
          aim=most(0.52)),
    Claim("trainer", "bf16_speedup_gpu", "samples a second in bfloat16 over float32, ResNet-50 at 224x224 on one GPU",
          aim=least(1)),
    Claim("trainer", "loader_ratio",
          "samples a second from a folder of JPEGs by a DataLoader over tensors in memory, two cores", form="part",
          aim=least(0.95)),
    Claim("trainer", "first_step_seconds",
          "seconds to the first step, ResNet-50 at 128x128, batch 8, two local workers, empty cache, after importing "
          "torch", form="seconds", aim=most(10)),
    Claim("trainer", "steady_step_ratio", "a later step of it over that of a run which measured thoroughly first"),
    Claim("trainer", "lines_changed_max", "most lines changed in a script that is ported, of three", form="number",
          aim=most(5)),
    Claim("trainer", "loop_overhead", "a step in a loop over mh.prepare over one of mh.train", aim=most(1.03)),
    Claim("trainer", "trainings_at_once_seconds",
          "seconds until the last of four trainings that begin at once has done two steps, after importing torch",
          form="seconds"),
    Claim("trainer", "trainings_at_once_profile_ratio",
          "what each of them measured over what it measures alone, the furthest from 1"),
    # GPUs
    Claim("gpu", "gpu_ratio_min", "a step of plain PyTorch over ours on one GPU, float32, worst of five networks",
          aim=least(0.97)),
    Claim("gpu", "gpu_ratio_bf16_min", "the same under bfloat16 autocast", aim=least(0.97)),
    Claim("gpu", "exact_price", "a step with exact=True over one without, ResNet-50 at 224x224"),
    Claim("gpu", "bytes_through_host",
          "bytes of tensors that two workers on one GPU exchange through the machine's memory, three ways of sharing",
          form="number", aim=most(0)),
    Claim("gpu", "mixed_gpu_cpu_gain",
          "speed of a GPU, slowed to a Jetson's, beside workers on processors, over that of the GPU alone",
          aim=least(1)),
    Claim("tile-gpu", "gpu_tiles_gpus_apart_fast_every_layer_over_one_group",
          "two tiles on GPUs, batch 8: an exchange at every layer over one, through this machine's memory"),
    Claim("tile-gpu", "gpu_tiles_gpus_apart_slow_every_layer_over_one_group", "the same, simulated at 2 Mbit/s"),
    Claim("tile-gpu", "gpu_tiles_gpus_fast_every_layer_over_one_group", "the same on one GPU, exchanging there"),
    Claim("tile-gpu", "gpu_tiles_gpu_cpu_fast_every_layer_over_one_group",
          "two tiles, one on a GPU and one on processors, batch 8: an exchange at every layer over one"),
    # Very many devices
    Claim("scale", "plan_seconds_1000", "seconds to plan for 1,000 devices in 20 sites", form="seconds", aim=most(60)),
    Claim("scale", "plan_cpu_seconds_1000", "of these, the processor's: what it takes where nothing else runs",
          form="seconds", aim=most(60)),
    Claim("scale", "simulate_seconds_1000", "seconds to simulate a step of that plan", form="seconds"),
    Claim("scale", "simulate_seconds_10000", "seconds to simulate a step of 10,000 devices in 100 sites",
          form="seconds"),
    Claim("scale", "tiles_4x4_over_4x3_flat",
          "a simulated step in 4x4 tiles over one in 4x3 on four Pis, every worker sending to every other"),
    Claim("scale", "tiles_4x4_over_4x3_by_host", "the same with sums inside each Pi first", aim=most(1)),
    Claim("lab", "rate_error", "worst error of rates from 0.05 to 1000 Mbit/s", form="part", aim=most(0.1)),
    Claim("lab", "delay_error", "worst error of delays from 1 to 40 ms", form="part", aim=most(0.1)),
    Claim("lab", "cpu_error", "worst error of shares from 5 to 100 % of a core", form="part", aim=most(0.1)),
    Claim("lab", "up_down_seconds", "seconds to bring six devices up and down", form="seconds", aim=most(5)),
    Claim("lab", "leftovers", "what is left of a lab afterwards, also after kill -9", form="number", aim=most(0)),
)  # fmt: skip


def judged(bench: str, key: str, value: float, architecture: str) -> str:
    """Return the aim of a figure as its bench printed it, and whether it is met; empty where there is none."""
    results = (bench, f"{bench}-simulated")  # a part of the bench may be stored by itself
    claim = next((claim for claim in CLAIMS if claim.bench in results and claim.key == key), None)
    if claim is None or claim.aim is None or claim.aim.only_on not in ("", architecture):
        return ""
    aim = claim.aim
    verdict = "not measured" if math.isnan(value) else "met" if aim.met(value) else "not met"
    return f"{'yes' if claim.form == 'yes' else f'{aim.sign} {shown(aim.value, claim.form)}'}: {verdict}"


def shown(value: float, form: Form) -> str:
    """Return a figure as text."""
    if form == "yes":
        return "yes" if value >= 1 else "no"
    if form == "times":
        return f"{value:.3g}x" if value == 1 or abs(value - 1) >= 0.005 else f"{value:.4g}x"  # above or below matters
    if form == "seconds":
        return f"{value:.3g} s"
    if form == "part":
        return f"{100 * value:.3g} %"
    if form == "points":
        return f"{100 * value:.3g} points"
    if form == "megabytes":
        return f"{value:.3g} MB"
    if form == "small":
        return f"{value:.2g}"
    return f"{value:,.0f}" if value == round(value) or value >= 1000 else f"{value:.3g}"
