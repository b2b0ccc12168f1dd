"""One device of a cluster: how fast it trains, what it holds, what it draws."""

from __future__ import annotations

import math
import re

import msgspec

from manyhands.facts.errors import BadValue

MOST_OF_ANYTHING = 1e18  # FLOP/s in billions, bytes, seconds, watts: beyond this it is a slip of the pen
NAME_HINT = "Use 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit; quote a bare number."
DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

COMPUTE = re.compile(r"cpu|mps|(cuda|xpu)(:[0-9]{1,2})?")
"""What a worker computes with: the processor, or a GPU in PyTorch's words."""
COMPUTE_HINT = "Write cpu, cuda, cuda:1, xpu or mps."


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A machine: how fast it trains, what it holds, what it draws, and the port that all its traffic shares."""

    name: str
    kind: str = "custom"  # a key of the catalogue, "local" or "custom"
    gflops: float  # sustained in float32 training; 1 multiply-accumulate = 2 FLOP
    memory_bytes: int
    memory_bytes_per_second: float = 5e9
    cores: int = 1
    operator_seconds: float = 50e-6  # fixed cost of starting one operator
    watts_active: float = 0.0  # while computing
    watts_idle: float = 0.0
    watts_transfer: float = 0.0  # added while sending or receiving
    up_bytes_per_second: float = math.inf
    down_bytes_per_second: float = math.inf
    host: str = ""  # the device whose port it shares, as one of several workers there; empty: its own
    site: str = ""  # the site whose uplink all that leaves it shares; empty: it is in none
    copy_seconds_per_gigabyte: float = 0.0  # of computing lost to sending or receiving; 0: other cores see to it
    message_seconds: float = 0.0  # of computing lost to each message sent or received, however small
    round_seconds: float = 0.0  # of each step beside its actions: getting the batch, the update, the report
    compute: str = "cpu"  # what a worker on it computes with: cpu, cuda, cuda:1, xpu or mps
    gpu: str = ""  # a name of its GPU, the same for those whose tensors stay on it between them; empty: they do not
    estimated: bool = True  # False once the numbers were measured on this very device
    source: str = ""  # where the numbers come from

    def __post_init__(self) -> None:
        if not DEVICE_NAME.fullmatch(self.name):
            raise BadValue(f"'{self.name:.80}' cannot name a device.", hint=NAME_HINT)
        if self.host and not DEVICE_NAME.fullmatch(self.host):
            raise BadValue(f"{self.name}: host '{self.host:.80}' cannot name a device.", hint=NAME_HINT)
        for field in ("gflops", "memory_bytes", "memory_bytes_per_second", "cores"):
            self._check(field, above_zero=True)
        for field in ("operator_seconds", "copy_seconds_per_gigabyte", "message_seconds", "round_seconds"):
            self._check(field, above_zero=False)
        for field in ("watts_active", "watts_idle", "watts_transfer"):
            self._check(field, above_zero=False)
        for field in ("up_bytes_per_second", "down_bytes_per_second"):
            self._check(field, above_zero=True, most=math.inf)

    @property
    def host_name(self) -> str:
        """The device whose port its traffic passes. Between devices of one host there is no port."""
        return self.host or self.name

    def _check(self, field: str, *, above_zero: bool, most: float = MOST_OF_ANYTHING) -> None:
        value = getattr(self, field)
        if not (value > 0 or (value == 0 and not above_zero)) or not value <= most:
            sign = ">" if above_zero else ">="
            raise BadValue(f"{self.name}: {field} is {value}; it must be {sign} 0 and <= {most:g}.")
