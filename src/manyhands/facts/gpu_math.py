"""The settings of kernels on GPUs: PyTorch's of one process, that all GPUs of a job follow."""

from __future__ import annotations

import msgspec


class GpuMath(msgspec.Struct, frozen=True):
    """PyTorch's settings for kernels on a GPU, with PyTorch's own defaults."""

    is_exact: bool = False
    """Whether kernels are deterministic and losses are looked at before the next step: what is wrong is noticed where
    it begins."""
    matrices_in_tf32: bool = False
    convolutions_in_tf32: bool = True
    tries_kernels: bool = False
    """Whether cuDNN runs several kernels for a shape and goes on with the fastest."""


EXACT = GpuMath(is_exact=True, convolutions_in_tf32=False)
"""Deterministic kernels without TF32, as the tests of exactness want them."""
