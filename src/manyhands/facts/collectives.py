"""The ways in which devices add up numbers together: manyhands' own messages, or process groups of PyTorch."""

from __future__ import annotations

BUILTIN, TORCH, AUTO = "builtin", "torch", "auto"
COLLECTIVES = {
    BUILTIN: "manyhands' own messages, encrypted beyond this machine",
    TORCH: "torch.distributed: gloo, or NCCL between GPUs, not encrypted",
    AUTO: "the faster of both, as measured in the first rounds",
}
GLOO, NCCL = "gloo", "nccl"
NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""The environment in which NCCL is used: else its watchdog ends a process whose peer is lost."""
