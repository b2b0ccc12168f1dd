"""The way in which an operator reads its inputs: which part of an input makes a part of the output, axis by axis.

One rule per input axis answers both questions of the geometry (docs/explanation/tiles.md):

    demand    output interval [a,b)  ->  input interval it needs          (forward: halos)
    touched   input interval [a,b)   ->  output interval it contributes to (backward: gradient halos)

              a        b                       window: kernel 3, stride 1, padding 1
    output  ..|########|..
    input   .|##########|.                     [a-1, b+1), clipped to the axis at the true border only

Sharing by samples, by tiles and by channels are the same walk over these rules; only the owned boxes differ.
"""

from __future__ import annotations

from math import ceil, floor
from typing import ClassVar

import msgspec

from manyhands.facts.boxes import Box, Interval


def _clip(low: int, high: int, extent: int) -> Interval:
    low, high = max(0, min(low, extent)), max(0, min(high, extent))
    return (low, high) if low < high else (0, 0)


class AxisRule(msgspec.Struct, frozen=True, tag_field="rule"):
    """The rule of one axis of one input. `axis` is the output axis it follows."""

    def demand(self, output: Interval, extent: int) -> Interval:
        """Return the interval of this input axis (of length `extent`) that makes `output`."""
        raise AssertionError("an axis rule must say what it demands")

    def touched(self, needed: Interval, extent: int) -> Interval:
        """Return the interval of the output axis (of length `extent`) that the input interval `needed` contributes
        to."""
        raise AssertionError("an axis rule must say what it touches")


class Whole(AxisRule, frozen=True, tag="whole"):
    """A rule by which every output needs the whole axis (a reduction, or an operator whose structure is not known)."""

    axis: ClassVar[None] = None

    def demand(self, output: Interval, extent: int) -> Interval:
        return (0, extent) if output[0] < output[1] else (0, 0)

    def touched(self, needed: Interval, extent: int) -> Interval:
        return (0, extent) if needed[0] < needed[1] else (0, 0)


class Window(AxisRule, frozen=True, tag="window"):
    """A sliding window: convolution, pooling; with the defaults, element by element."""

    axis: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    def demand(self, output: Interval, extent: int) -> Interval:
        a, b = output
        if a >= b:
            return (0, 0)
        return _clip(a * self.stride - self.padding, (b - 1) * self.stride - self.padding + self.reach + 1, extent)

    def touched(self, needed: Interval, extent: int) -> Interval:
        a, b = needed
        if a >= b:
            return (0, 0)
        low = -((self.reach - a - self.padding) // self.stride)  # ceil((a + p - d(k-1)) / s)
        high = (b - 1 + self.padding) // self.stride + 1
        return _clip(low, high, extent)


class Spread(AxisRule, frozen=True, tag="spread"):
    """A transposed window: the demand of one is what the other touches."""

    axis: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def _window(self) -> Window:
        return Window(self.axis, self.kernel, self.stride, self.padding, self.dilation)

    def demand(self, output: Interval, extent: int) -> Interval:
        return self._window.touched(output, extent)

    def touched(self, needed: Interval, extent: int) -> Interval:
        return self._window.demand(needed, extent)


class Blocks(AxisRule, frozen=True, tag="blocks"):
    """A rule by which blocks of `outputs` elements are made from blocks of `inputs` elements: grouped channels,
    up-sampling by copies, a batch axis that holds several rows per sample. `margin` more input elements are read on
    each side."""

    axis: int
    inputs: int
    outputs: int
    margin: int = 0

    def demand(self, output: Interval, extent: int) -> Interval:
        a, b = output
        if a >= b:
            return (0, 0)
        low, high = a // self.outputs, -(-b // self.outputs)
        return _clip(low * self.inputs - self.margin, high * self.inputs + self.margin, extent)

    def touched(self, needed: Interval, extent: int) -> Interval:
        a, b = needed
        if a >= b:
            return (0, 0)
        low, high = (a - self.margin) // self.inputs, -(-(b + self.margin) // self.inputs)
        return _clip(low * self.outputs, high * self.outputs, extent)


class Shifted(AxisRule, frozen=True, tag="shifted"):
    """A rule by which element i of the input is element i + offset of the output: concatenation, slices, padding."""

    axis: int
    offset: int

    def demand(self, output: Interval, extent: int) -> Interval:
        return _clip(output[0] - self.offset, output[1] - self.offset, extent) if output[0] < output[1] else (0, 0)

    def touched(self, needed: Interval, extent: int) -> Interval:
        return _clip(needed[0] + self.offset, needed[1] + self.offset, extent) if needed[0] < needed[1] else (0, 0)


class Mirrored(AxisRule, frozen=True, tag="mirrored"):
    """A rule by which `before` and `after` more elements lie around those of the input: the input's own, mirrored at
    its edge; with `repeats` the edge itself, again and again."""

    axis: int
    before: int
    after: int
    repeats: bool = False

    def demand(self, output: Interval, extent: int) -> Interval:
        a, b = output
        if a >= b:
            return (0, 0)
        low, high, last = a - self.before, b - self.before, extent - 1
        parts = [(max(0, low), min(extent, high))]
        if low < 0:
            parts.append((0, 1) if self.repeats else (1 - min(0, high), 1 - low))
        if high > extent:
            first = max(extent, low)
            parts.append((last, extent) if self.repeats else (2 * last - high + 1, 2 * last - first + 1))
        return _around(parts, extent)

    def touched(self, needed: Interval, extent: int) -> Interval:
        a, b = needed
        if a >= b:
            return (0, 0)
        inputs, zero = extent - self.before - self.after, self.before
        parts, end = [(a + zero, b + zero)], 2 * (inputs - 1) + zero
        if self.repeats:
            parts += [(0, zero)] if a <= 0 else []
            parts += [(zero + inputs, extent)] if b >= inputs else []
        else:
            parts.append((zero - min(b - 1, zero), zero - max(a, 1) + 1))
            parts.append((end - min(b - 1, inputs - 2), end - max(a, inputs - 1 - self.after) + 1))
        return _around(parts, extent)


def _around(parts: list[Interval], extent: int) -> Interval:
    """Return the interval around those of the parts that are not empty."""
    filled = [(low, high) for low, high in parts if low < high]
    return _clip(min(low for low, _ in filled), max(high for _, high in filled), extent) if filled else (0, 0)


class Adaptive(AxisRule, frozen=True, tag="adaptive"):
    """A rule of adaptive pooling of `inputs` elements to `outputs`: the window of element i is [⌊i·n/m⌋,
    ⌈(i+1)·n/m⌉)."""

    axis: int
    inputs: int
    outputs: int

    def demand(self, output: Interval, extent: int) -> Interval:
        a, b = output
        if a >= b:
            return (0, 0)
        return _clip(a * self.inputs // self.outputs, -(-b * self.inputs // self.outputs), extent)

    def touched(self, needed: Interval, extent: int) -> Interval:
        a, b = needed
        if a >= b:
            return (0, 0)
        return _clip(a * self.outputs // self.inputs, -(-b * self.outputs // self.inputs), extent)


class Resampled(AxisRule, frozen=True, tag="resampled"):
    """A rule of resampling by any factor: output i looks at the place p = scale·(i + half) - half, and reads ⌊p⌋
    (nearest) or ⌊p⌋ and the next (linear), inside the axis. A little slack covers what p loses in a device's own
    arithmetic."""

    axis: int
    inputs: int
    scale: float
    half: float = 0.0
    reach: int = 0

    @property
    def _slack(self) -> float:
        return 1e-6 * self.inputs

    def demand(self, output: Interval, extent: int) -> Interval:
        a, b = output
        if a >= b:
            return (0, 0)
        low = floor(max(0.0, self.scale * (a + self.half) - self.half - self._slack))
        high = floor(max(0.0, self.scale * (b - 1 + self.half) - self.half + self._slack)) + self.reach + 1
        return _clip(min(low, extent - 1), high, extent)

    def touched(self, needed: Interval, extent: int) -> Interval:
        a, b = needed
        if a >= b:
            return (0, 0)
        if not self.scale:
            return (0, extent)
        low = ceil((a - self.reach - self._slack + self.half) / self.scale - self.half)
        high = ceil((b + self._slack + self.half) / self.scale - self.half)
        return _clip(0 if a <= self.reach else low, extent if b >= self.inputs else high, extent)


class Dealt(AxisRule, frozen=True, tag="dealt"):
    """A channel shuffle: element i of group k of the input becomes element i·groups + k of the output."""

    axis: int
    groups: int

    def demand(self, output: Interval, extent: int) -> Interval:
        return (0, extent) if output[0] < output[1] else (0, 0)

    def touched(self, needed: Interval, extent: int) -> Interval:
        return (0, extent) if needed[0] < needed[1] else (0, 0)

    def pieces(self, output: Interval, extent: int) -> tuple[Interval, ...]:
        """Return, for every group, the interval that makes `output`, whose ends are multiples of `groups`."""
        size = extent // self.groups
        low, high = output[0] // self.groups, output[1] // self.groups
        return tuple((group * size + low, group * size + high) for group in range(self.groups))


Rule = Whole | Window | Spread | Blocks | Shifted | Mirrored | Adaptive | Resampled | Dealt


class Read(msgspec.Struct, frozen=True):
    """The way in which one output of an operator reads one input: a rule for every axis of the input."""

    tensor: str
    rules: tuple[Rule, ...]

    def demand(self, output: Box, shape: tuple[int, ...]) -> Box:
        """Return the box of the input (of `shape`) that `output` needs. An empty output needs nothing."""
        if output.is_empty:
            return Box(tuple((0, 0) for _ in shape)) if shape else output
        return Box(
            tuple(
                rule.demand((0, 1) if rule.axis is None else output.intervals[rule.axis], extent)
                for rule, extent in zip(self.rules, shape, strict=True)
            )
        )

    def touched(self, needed: Box, output_shape: tuple[int, ...]) -> Box:
        """Return the box of the output (of `output_shape`) that the input box `needed` contributes to."""
        if needed.is_empty:
            return Box(tuple((0, 0) for _ in output_shape))
        intervals: list[Interval] = [(0, extent) for extent in output_shape]
        for rule, interval in zip(self.rules, needed.intervals, strict=True):
            if rule.axis is not None:
                intervals[rule.axis] = rule.touched(interval, output_shape[rule.axis])
        return Box(tuple(intervals))
