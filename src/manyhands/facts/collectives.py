"""The ways in which devices add up numbers together: manyhands' own messages, or process groups of PyTorch."""

from __future__ import annotations

import msgspec

BUILTIN, TORCH, AUTO = "builtin", "torch", "auto"
COLLECTIVES = {
    BUILTIN: "manyhands' own messages, encrypted beyond this machine",
    TORCH: "torch.distributed: gloo, or NCCL between GPUs, not encrypted",
    AUTO: "the faster of both, as measured in the first rounds",
}
GLOO, NCCL = "gloo", "nccl"
NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""The environment in which NCCL is used: else its watchdog ends a process whose peer is lost."""


class CollectiveTerms(msgspec.Struct, frozen=True):
    """The terms by which a device forms process groups with the others of its generation."""

    way: str
    """TORCH or AUTO."""
    store_port: int
    """The port of the coordinator's store; its host is where the device has reached the coordinator."""
    trusts_network: bool
    """Whether they may connect beyond one machine."""
    gpu_devices: tuple[str, ...] = ()
    """Devices that have a GPU of their own: groups of these alone use NCCL, all others gloo."""
