"""Inputs and targets that do not fit: both shapes or types are said, and what to type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.errors import BadData, CaptureFailed
from manyhands.graph.capture import capture

CLASSES = torch.tensor([0, 9, 3, 4])


def captured(loss: Any, target: Tensor, outputs: int = 10) -> None:
    capture(nn.Linear(3, outputs), torch.randn(4, 3), loss=loss, target=target)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("loss", "target", "outputs", "said", "typed"),
    [
        (functional.cross_entropy, CLASSES.float(), 10, r"float32 \(batch\), like 0.0; .*takes int64", "labels.long()"),
        (functional.cross_entropy, CLASSES[:, None], 10, r"int64 \(batch, 1\), .*int64 \(batch\)", "labels.squeeze(1)"),
        (functional.cross_entropy, CLASSES[:, None].float(), 10, "int64", "labels.squeeze(1).long()"),
        (functional.binary_cross_entropy_with_logits, torch.ones(4), 1, "float32", "labels.unsqueeze(1)"),
        (functional.binary_cross_entropy_with_logits, CLASSES[:, None], 1, "int64.*float32", "labels.float()"),
        (functional.binary_cross_entropy_with_logits, CLASSES, 1, "float32", "labels.unsqueeze(1).float()"),
    ],
)
def test_targets_of_another_type(loss: Any, target: Tensor, outputs: int, said: str, typed: str) -> None:
    if loss is functional.binary_cross_entropy_with_logits and not target.is_floating_point():
        target = target.clamp(max=1)
    with pytest.raises(BadData, match=said) as caught:
        captured(loss, target, outputs)
    assert f"give {typed} in" in caught.value.hint
    assert "manyhands" not in str(caught.value), "it is not ours that is wrong"


def test_advice_is_given_only_where_it_helps() -> None:
    """Targets that no other type or shape of theirs would fit: what they are is said, and nothing of ours is shown."""
    with pytest.raises(CaptureFailed, match="cannot capture the loss") as caught:
        captured(functional.mse_loss, torch.randn(4))
    assert "the loss itself run on (batch, 10), (batch)" in caught.value.hint
    assert "capture.py" not in str(caught.value)


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.sum() > 0:  # mark
        return output.sum()
    return functional.cross_entropy(output, target)


def test_a_line_of_the_users_own_loss_is_named() -> None:
    with pytest.raises(CaptureFailed, match=r"test_misfits.py:\d+, in own_loss:\n.*# mark") as caught:
        captured(own_loss, CLASSES)
    assert "torch.where" in caught.value.hint


@pytest.mark.parametrize(
    ("module", "layer", "given"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(256, 10)), "layer '1', Linear(in_features=256", "given (batch, 1200)"),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3))), "layer '0.0', Conv2d(1, 4", "given (batch, 3, 20, 20)"),
    ],
)
def test_samples_of_another_shape(module: nn.Module, layer: str, given: str) -> None:
    with pytest.raises(CaptureFailed) as caught:
        capture(module, torch.randn(4, 3, 20, 20))
    for text in ("The data gives (batch, 3, 20, 20)", layer, given, "Give samples of the shape"):
        assert text in caught.value.hint
    assert "container.py" not in str(caught.value)
    assert not nn.modules.module._global_forward_pre_hooks, "nobody is watched any more"


def test_where_no_layer_is_to_blame_the_shape_is_said() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], 256)

    with pytest.raises(CaptureFailed, match=r"test_misfits.py:\d+, in forward") as caught:
        capture(Views(), torch.randn(4, 3, 20, 20))
    assert "run on (batch, 3, 20, 20)" in caught.value.hint
