"""Whether oneDNN has the Arm Compute Library is known in every version of PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from manyhands.graph import convolution_kernels
from manyhands.graph.convolution_kernels import has_acl


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("Linux", "aarch64", True), ("Linux", "x86_64", False), ("Darwin", "arm64", False)],
)
def test_a_pytorch_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, expected: bool
) -> None:
    older = SimpleNamespace(backends=SimpleNamespace(mkldnn=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(convolution_kernels, "torch", older)
    monkeypatch.setattr(convolution_kernels.platform, "system", lambda: system)
    monkeypatch.setattr(convolution_kernels.platform, "machine", lambda: machine)
    assert has_acl() is expected


def test_a_pytorch_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (True, False):
        newer = SimpleNamespace(backends=SimpleNamespace(mkldnn=SimpleNamespace(is_acl_available=lambda a=answer: a)))
        monkeypatch.setattr(convolution_kernels, "torch", newer)
        assert has_acl() is answer
