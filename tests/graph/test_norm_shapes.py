"""What is known of batch norms without running them is what PyTorch says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from manyhands.graph import describe
from manyhands.graph.capture import capture
from manyhands.graph.norm_shapes import fake_norm

NORM = "aten.batch_norm.default"
FORMS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.BatchNorm2d(4), (2, 4, 5, 5)),
    "two axes": (nn.BatchNorm1d(4), (2, 4)),
    "volume": (nn.BatchNorm3d(4), (2, 4, 2, 3, 3)),
    "without weights": (nn.BatchNorm2d(4, affine=False), (2, 4, 5, 5)),
    "without statistics": (nn.BatchNorm2d(4, track_running_stats=False), (2, 4, 5, 5)),
    "frozen weights": (nn.BatchNorm2d(4).requires_grad_(False), (2, 4, 5, 5)),
    "cumulative": (nn.BatchNorm2d(4, momentum=None), (2, 4, 5, 5)),
    "at rest": (nn.BatchNorm2d(4).eval(), (2, 4, 5, 5)),
    "double": (nn.BatchNorm2d(4).double(), (2, 4, 5, 5)),
}


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [True, False], ids=["after a convolution", "first"])
def test_saved_bytes_are_the_operators(form: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, shape = FORMS[form]
    dtype = torch.float64 if form == "double" else torch.float32
    first = nn.Linear(shape[-1], shape[-1], bias=False, dtype=dtype) if before else nn.Identity()
    graph = capture(nn.Sequential(first, norm, nn.ReLU()), torch.zeros(shape, dtype=dtype))
    known = describe.saved_bytes(graph)
    monkeypatch.setattr(describe, "fake_norm", lambda target, arguments: None)
    assert known == describe.saved_bytes(graph)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_output_is_laid_out_as_the_operators(memory_format: torch.memory_format) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 4, 5, 5).contiguous(memory_format=memory_format)
        arguments = [x, *(torch.empty(4) for _ in range(4)), True, 0.1, 1e-5, False]
        known, real = fake_norm(NORM, arguments), torch.ops.aten.batch_norm.default(*arguments)
    assert known is not None
    assert (known.shape, known.stride(), known.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(
    "changed",
    [
        {1: torch.empty(5)}, {2: torch.empty(4, 1)}, {3: None}, {4: torch.empty(4, dtype=torch.float64)}, {5: False},
        {6: torch.empty(())}, {0: torch.empty(4)}, {0: torch.empty(2, 4, dtype=torch.int64)}, {7: None},
    ],
)  # fmt: skip
def test_other_arguments_are_left_to_the_operator(changed: dict[int, Any]) -> None:
    arguments = [torch.empty(2, 4), *(torch.empty(4) for _ in range(4)), True, 0.1, 1e-5, False]
    assert fake_norm(NORM, arguments) is not None
    for place, argument in changed.items():
        arguments[place] = argument
    assert fake_norm(NORM, arguments) is None
    assert fake_norm("aten.instance_norm.default", arguments) is None
