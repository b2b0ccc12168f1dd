"""The weights of the new layers: fresh, or made of the original's as a start for fine-tuning.

A new channel stands for an old one (`Widths.origin`). A new weight is the old one between the two channels it stands
for; where several new inputs stand for one old one, each has its part; where a group no longer reads some of the
inputs, the others are scaled up so that the output varies as much as before. With one group and no widening nothing
changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.decoupling.tracing import CONVOLUTIONS

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MOST_SCALE = 2.0
"""The most by which a row with a tiny remaining part is scaled up, as a multiple of what evenly spread weights need."""


def start_fresh(module: Any) -> None:
    """Initialise as the zoo's networks do: He's normal by each group's outputs for convolutions, else PyTorch's."""
    if not isinstance(module, CONVOLUTIONS):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        return
    depthwise = module.groups > 1 and module.groups == module.in_channels
    fan_out = module.out_channels * math.prod(module.kernel_size)
    if not depthwise:
        fan_out //= module.groups
    nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
    if module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def take_convolution(new: Any, old: Any, made: Sequence[int], read: Sequence[int]) -> None:
    """Set the weights of a new convolution; `made` and `read` are the old channel of every new output and input."""
    outputs, inputs = torch.tensor(made), torch.tensor(read)
    if old.bias is not None:
        new.bias.copy_(old.bias[outputs])
    if old.groups > 1 and old.groups == old.in_channels:
        new.weight.copy_(old.weight[inputs] if isinstance(old, TRANSPOSED) else old.weight[outputs])
        return
    before, after = (_rows(module.weight, module.groups, isinstance(old, TRANSPOSED)) for module in (old, new))
    rows_of_group = after.shape[0] // new.groups
    for group in range(new.groups):
        rows = slice(group * rows_of_group, (group + 1) * rows_of_group)
        group_inputs = inputs[group * after.shape[1] : (group + 1) * after.shape[1]]
        after[rows] = _connected(before, old.groups, outputs[rows], group_inputs)
    _write(new.weight, after, new.groups, isinstance(old, TRANSPOSED))


def _connected(before: Tensor, groups: int, rows: Tensor, new_inputs: Tensor) -> Tensor:
    """Return old weights between some old outputs and the old inputs that a new group has, zero where there were
    none."""
    size, rows_per_group = before.shape[1], before.shape[0] // groups
    made = before.new_zeros(len(rows), len(new_inputs), *before.shape[2:])
    times = torch.bincount(new_inputs)[new_inputs].to(before.dtype).view(-1, *[1] * (before.dim() - 2))
    for group in sorted(set((rows // rows_per_group).tolist())):
        of_group = rows // rows_per_group == group
        inside = (new_inputs >= group * size) & (new_inputs < (group + 1) * size)
        old_rows, places = before[rows[of_group]], new_inputs[inside] - group * size
        block = made.new_zeros(len(old_rows), *made.shape[1:])
        block[:, inside] = old_rows[:, places] / times[inside]
        present = torch.tensor(sorted(set(places.tolist())), dtype=torch.long)
        made[of_group] = block * _scale(old_rows, present) if len(present) < size else block
    return made


def _scale(rows: Tensor, present: Tensor) -> Tensor:
    """Return the factors by which rows of weights must be larger, where only some of their inputs remain."""
    evenly = math.sqrt(rows.shape[1] / max(1, len(present)))
    whole, part = rows.flatten(1).norm(dim=1), rows[:, present].flatten(1).norm(dim=1)
    scale = torch.where(part > 0, whole / part, torch.full_like(part, evenly)).clamp(1.0, _MOST_SCALE * evenly)
    return scale.view(-1, *[1] * (rows.dim() - 1))


def _rows(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Return weights as (outputs, inputs of one group, places), however a layer stores them; a copy where it is
    transposed."""
    if not transposed:
        return weight
    inputs, outputs, *places = weight.shape
    return weight.view(groups, inputs // groups, outputs, *places).transpose(1, 2).flatten(0, 1)


def _write(weight: Tensor, rows: Tensor, groups: int, transposed: bool) -> None:
    if transposed:
        outputs, inputs, *places = rows.shape
        weight.copy_(rows.view(groups, outputs // groups, inputs, *places).transpose(1, 2).reshape(weight.shape))
    elif rows is not weight:
        weight.copy_(rows)


@torch.no_grad()
def take_linear(new: nn.Linear, old: nn.Linear, made: Sequence[int], read: Sequence[int], places: int) -> None:
    columns = torch.tensor(read)
    counts = torch.bincount(columns)[columns].to(old.weight.dtype)
    numbers = (columns[:, None] * places + torch.arange(places)).flatten()
    rows = torch.tensor(made)
    new.weight.copy_(old.weight[rows][:, numbers] / counts.repeat_interleave(places))
    if old.bias is not None:
        new.bias.copy_(old.bias[rows])


@torch.no_grad()
def take_per_channel(new: nn.Module, old: nn.Module, made: Sequence[int], places: int) -> None:
    """Set every weight and buffer that has one number for each channel (or place of a flat one); others are copied."""
    numbers = (torch.tensor(made)[:, None] * places + torch.arange(places)).flatten()
    originals = dict(old.named_parameters()) | dict(old.named_buffers())
    for name, tensor in [*new.named_parameters(), *new.named_buffers()]:
        original = originals[name]
        tensor.copy_(original if original.dim() == 0 or original.shape[0] == 1 else original[numbers])


def take_channels(weight: Tensor, made: Sequence[int], axis: int) -> Tensor:
    """Return a weight of the network itself, with one number for each channel along an axis, for the new channels."""
    return weight.detach().index_select(axis, torch.tensor(made, device=weight.device))
