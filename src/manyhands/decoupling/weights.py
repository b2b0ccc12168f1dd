"""The weights of the new layers: fresh, or made of the original's as a start for fine-tuning.

A new channel stands for an old one (`Widths.origin`). A new weight is the old one between the two channels it stands
for; where several new inputs stand for one old one, each has its part; where a group no longer sees some of the inputs,
the others are scaled up so that the output varies as much as before. With one group and no widening nothing changes.
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
"""A row whose kept part is tiny is not scaled up by more than this times what evenly spread weights would need."""


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
    """`made` and `read`: the old channel of every new output and input."""
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
        seen = inputs[group * after.shape[1] : (group + 1) * after.shape[1]]
        after[rows] = _connected(before, old.groups, outputs[rows], seen)
    _write(new.weight, after, new.groups, isinstance(old, TRANSPOSED))


def _connected(before: Tensor, groups: int, rows: Tensor, seen: Tensor) -> Tensor:
    """Old weights between some old outputs and the old inputs that a new group has, zero where there were none."""
    size, own_rows = before.shape[1], before.shape[0] // groups
    made = before.new_zeros(len(rows), len(seen), *before.shape[2:])
    times = torch.bincount(seen)[seen].to(before.dtype).view(-1, *[1] * (before.dim() - 2))
    for group in sorted(set((rows // own_rows).tolist())):
        of_group = rows // own_rows == group
        inside = (seen >= group * size) & (seen < (group + 1) * size)
        own, places = before[rows[of_group]], seen[inside] - group * size
        block = made.new_zeros(len(own), *made.shape[1:])
        block[:, inside] = own[:, places] / times[inside]
        kept = torch.tensor(sorted(set(places.tolist())), dtype=torch.long)
        made[of_group] = block * _scale(own, kept) if len(kept) < size else block
    return made


def _scale(rows: Tensor, kept: Tensor) -> Tensor:
    """How much larger rows of weights must be, where only some of their inputs are left."""
    evenly = math.sqrt(rows.shape[1] / max(1, len(kept)))
    whole, part = rows.flatten(1).norm(dim=1), rows[:, kept].flatten(1).norm(dim=1)
    scale = torch.where(part > 0, whole / part, torch.full_like(part, evenly)).clamp(1.0, _MOST_SCALE * evenly)
    return scale.view(-1, *[1] * (rows.dim() - 1))


def _rows(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """(outputs, inputs of one group, places), whichever way a layer stores it. A copy where it is transposed."""
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
    """Every weight and buffer that has one number for each channel (or place of a flat one); others as they are."""
    numbers = (torch.tensor(made)[:, None] * places + torch.arange(places)).flatten()
    theirs = dict(old.named_parameters()) | dict(old.named_buffers())
    for name, tensor in [*new.named_parameters(), *new.named_buffers()]:
        given = theirs[name]
        tensor.copy_(given if given.dim() == 0 or given.shape[0] == 1 else given[numbers])


def take_channels(given: Tensor, made: Sequence[int], axis: int) -> Tensor:
    """A weight of the network itself, with one number for each channel along an axis."""
    return given.detach().index_select(axis, torch.tensor(made, device=given.device))
