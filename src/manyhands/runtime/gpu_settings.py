"""PyTorch's settings for GPUs: those of the coordinator's process, used in its workers'.

A job computes on GPUs as PyTorch would in the process that began it: a script that allows TF32 or lets cuDNN try
kernels has that on every GPU. With exact=True kernels are deterministic and without TF32, whatever the script says.
"""

from __future__ import annotations

import torch

from manyhands.facts.gpu_math import EXACT, GpuMath


def gpu_math(*, exact: bool = False) -> GpuMath:
    """Return the settings of a job that this process begins."""
    if exact:
        return EXACT
    return GpuMath(
        matrices_in_tf32=torch.get_float32_matmul_precision() != "highest",
        convolutions_in_tf32=torch.backends.cudnn.allow_tf32, tries_kernels=torch.backends.cudnn.benchmark,
    )  # fmt: skip


def use(math: GpuMath) -> None:
    """Use these settings in this process."""
    torch.backends.cudnn.deterministic = math.is_exact
    torch.backends.cudnn.benchmark = math.tries_kernels
    torch.backends.cudnn.allow_tf32 = math.convolutions_in_tf32
    torch.set_float32_matmul_precision("high" if math.matrices_in_tf32 else "highest")
