"""A fixed list of timm's networks, spread over its families of architectures, with random weights.

The list was drawn by `draw_timm_names` from timm 1.0.31: the families (timm's modules) in turn, networks of each in an
order drawn with seed 0, those with more than 40 million weights left out. It is kept here, so that another version of
timm is measured on the same networks; names that an installed version lacks are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from manyhands_bench.networks.subject import Subject, first_that_runs, images

SIDE = 128
"""The side of images for networks that take any."""
MOST_WEIGHTS = 40_000_000
COUNT = 110
TIMM_NAMES: tuple[str, ...] = (
    "cait_xxs24_384", "cait_xxs36_384", "coat_lite_small", "coat_small", "coatnet_nano_rw_224", "convit_small",
    "convit_tiny", "convmixer_1024_20_ks9_p14", "convmixer_768_32", "convnext_atto", "convnextv2_nano",
    "cpubone_b0_bfrobust", "cpubone_b2pt5_dwnorm", "crossvit_15_dagger_408", "crossvit_tiny_240", "cs3darknet_x",
    "csatv2", "csatv2_21m", "cspnext_m", "cspnext_s", "darknet17", "davit_tiny", "deit_small_distilled_patch16_224",
    "deit_tiny_distilled_patch16_224", "densenet121", "densenet201", "dla60_res2net", "dla60_res2next", "dpn48b",
    "dpn68", "eca_nfnet_l0", "edgenext_small", "edgenext_small_rw", "efficientformer_l1", "efficientformer_l3",
    "efficientformerv2_l", "efficientformerv2_s1", "efficientnet_lite2", "efficientvim_m3_dist",
    "efficientvim_m4_dist", "efficientvit_b0", "efficientvit_b1", "efficientvit_m3", "efficientvit_m4",
    "ese_vovnet19b_slim", "fasternet_t2", "fastvit_mci1", "focalnet_tiny_srf", "gcvit_tiny", "ghostnet_050",
    "hardcorenas_d", "hgnet_tiny", "hiera_small_224", "hieradet_small", "hrnet_w18_small", "iformer_l2_distilled",
    "inception_next_atto", "inception_v3", "lambda_resnet26t", "lcnetv2_large", "legacy_seresnext50_32x4d",
    "legacy_xception", "levit_conv_128", "lowformer_e2", "mambaout_tiny", "mixer_s32_224", "mobilenet_edgetpu_v2_l",
    "mobilenetv3_large_075", "mobileone_s1", "mobilevit_xxs", "mvitv2_small", "nest_small_jx", "nextvit_small",
    "pit_xs_224", "poolformer_s12", "pvt_v2_b0", "rdnet_tiny", "regnetx_004", "repghostnet_130", "repvit_m0_9",
    "res2net50_26w_4s", "resnest26d", "resnet33ts", "resnetv2_50d", "rexnet_150", "sebotnet33ts_256", "selecsls42b",
    "sequencer2d_m", "seresnext26d_32x4d", "shvit_s1", "skresnet50d", "starnet_s100", "swiftformer_l3",
    "swin_s3_tiny_224", "swinv2_cr_tiny_384", "swinv2_tiny_window16_256", "tiny_vit_5m_224",
    "tnt_s_legacy_patch16_224", "tresnet_m", "twins_pcpvt_small", "visformer_tiny", "vit_relpos_small_patch16_224",
    "vit_small_patch16_rope_224", "vit_small_patch32_384", "vit_small_plus_patch16_dinov3", "vit_small_r26_s32_224",
    "vitamin_small_224", "volo_d1_224", "xception41p", "xcit_tiny_24_p16_384",
)  # fmt: skip


def timm_names() -> list[str]:
    """Return the names of the list that the installed version has."""
    import timm

    return [name for name in TIMM_NAMES if timm.is_model(name)]


def timm_subject(name: str) -> Subject:
    """Return a network of timm with batches of the smallest size that it takes: its own, if that is fixed."""
    import timm

    module: nn.Module = timm.create_model(name, pretrained=False)
    config: Any = module.pretrained_cfg
    channels, height, width = config["input_size"]
    sizes = [(channels, height, width)]
    if not config.get("fixed_input_size"):
        least = config.get("min_input_size") or (channels, SIDE, SIDE)
        sizes = [tuple(max(a, b) for a, b in zip(least, (channels, SIDE, SIDE))), *sizes]
    return Subject(module, first_that_runs(module, [images(*size) for size in sizes]))


def draw_timm_names(count: int = COUNT, seed: int = 0) -> list[str]:
    """Return a list of networks spread over the families of the installed version of timm, sorted. It takes a minute:
    every network that is considered is built without memory to count its weights."""
    import timm

    def is_small(name: str) -> bool:
        with torch.device("meta"):
            module = timm.create_model(name, pretrained=False)
        return bool(sum(weight.numel() for weight in module.parameters()) <= MOST_WEIGHTS)

    families = {family: timm.list_models(module=family) for family in timm.list_modules()}
    return spread(families.values(), is_small, count, seed)


def spread(families: Iterable[list[str]], fits: Callable[[str], bool], count: int, seed: int) -> list[str]:
    """Return `count` of the names that fit, or all of them, sorted: in each round one of every family, in a drawn
    order."""
    generator = random.Random(seed)
    orders = [generator.sample(sorted(family), len(family)) for family in families]
    chosen: set[str] = set()
    while len(chosen) < count and any(orders):
        for order in orders:
            while order:
                name = order.pop()
                if name not in chosen and fits(name):
                    chosen.add(name)
                    break
            if len(chosen) == count:
                break
    return sorted(chosen)
