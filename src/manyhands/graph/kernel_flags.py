"""PyTorch's global flags, set for one operator and put back."""

from __future__ import annotations

from types import TracebackType

import torch

from manyhands.facts.profile import Kernel


class Flags:
    """A context that turns oneDNN off and sets the number of threads, as a kernel asks, and always restores the
    process's own."""

    __slots__ = ("kernel", "onednn_before", "threads_before")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __enter__(self) -> None:
        # torch.backends.mkldnn.flags would set three other flags too, and warn.
        if not self.kernel.onednn:
            self.onednn_before: bool = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(False)
        if self.kernel.threads:
            self.threads_before = torch.get_num_threads()
            if self.threads_before != self.kernel.threads:
                torch.set_num_threads(self.kernel.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.kernel.onednn:
            torch._C._set_mkldnn_enabled(self.onednn_before)
        if self.kernel.threads and self.threads_before != self.kernel.threads:
            torch.set_num_threads(self.threads_before)
