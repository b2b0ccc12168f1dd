"""The options of `mh.train` that say how devices form sums together."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.collectives import BUILTIN, COLLECTIVES, TORCH
from manyhands.facts.errors import BadValue
from manyhands.job.config import Config, option


@dataclass(frozen=True, kw_only=True)
class CollectivesConfig(Config):
    """The way in which gradients and statistics are added up among devices."""

    collectives: str = option(
        BUILTIN, "What carries sums of gradients and statistics.", "--collectives", choices=COLLECTIVES,
        noun="way to carry sums",
    )  # fmt: skip
    trusted_network: bool = option(
        False, "Let --collectives torch or auto send gradients beyond this machine: PyTorch does not encrypt them.",
        "--trusted-network", kind=bool,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.trusted_network and self.collectives == BUILTIN:
            raise BadValue(
                "--trusted-network is for --collectives torch or auto: everything else is encrypted.",
                hint="Leave out --trusted-network.",
            )

    def check_joining(self, listen: str) -> None:
        """Refuse process groups with devices of other machines, unless the network is trusted. `listen`: where devices
        join; empty: nowhere."""
        if self.collectives != TORCH or not listen or self.trusted_network:
            return
        from manyhands.session.joining import parse_address
        from manyhands.transport.security import is_loopback

        host, _ = parse_address(listen, 0)
        if not is_loopback(host):
            raise BadValue(
                f"--collectives torch does not encrypt, and devices of other machines join at {host}.",
                hint="Add --trusted-network where nobody else can listen, or leave out --collectives.",
            )
