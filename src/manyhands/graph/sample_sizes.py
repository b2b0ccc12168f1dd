"""Sizes that grow with the batch, as numbers that note whether Python decides anything by them.

A run of a module with some number of samples shows what it does with that number. Where its code asks for more than a
tensor of that size, as in `if len(x) > 64`, it may do something else with another number, and no run can tell.

    x.view(x.shape[0], -1)              the size is passed on
    x.reshape(x.shape[0] * n, -1)       still a multiple of the samples
    if x.shape[0] > 64: ...             noted
    scale = 1 / x.shape[0]              noted: a number that is not a size any more
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from manyhands.graph.frames import is_torchs_or_ours

_STAYS_A_SIZE = (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__", "__neg__",
)  # fmt: skip
_DECIDES = (
    "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__truediv__", "__rtruediv__", "__rfloordiv__",
    "__rmod__", "__divmod__", "__rdivmod__", "__pow__", "__rpow__", "__and__", "__rand__", "__or__", "__ror__",
    "__xor__", "__rxor__", "__lshift__", "__rshift__", "__invert__", "__abs__", "__round__", "__int__", "__float__",
    "__ceil__", "__floor__", "__trunc__", "__str__", "__repr__", "__format__", "bit_length", "bit_count", "conjugate",
    "as_integer_ratio", "to_bytes",
)  # fmt: skip
_SHAPE: Any = vars(torch._C.TensorBase)["shape"]
_NBYTES: Any = vars(torch._C.TensorBase)["nbytes"]
_SIZES = frozenset({
    _SHAPE.__get__, _NBYTES.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.numel,
    torch.Tensor.stride,
})  # fmt: skip
_WRAPPERS = frozenset({torch._tensor.__file__, torch.overrides.__file__, __file__})
"""Files through which PyTorch calls a mode for `len(tensor)`."""


class SampleSize(int):
    """A size, or what was computed from one, in a run with `SizesNoted.samples` samples."""

    noted: SizesNoted

    def __eq__(self, other: object) -> bool:
        return self._is_equal(other)

    def __ne__(self, other: object) -> bool:
        return not self._is_equal(other)

    def _is_equal(self, other: object) -> bool:
        """Multiples of the samples are compared alike for every number of them."""
        both_grow = isinstance(other, SampleSize) and self.noted.grows(self) and self.noted.grows(other)
        if not both_grow:
            self.noted.decide(sys._getframe(2))
        return int.__eq__(self, other) is True

    __hash__ = int.__hash__


def plain(argument: Any) -> Any:
    """Return an argument of an operator as PyTorch takes it."""
    return int.__pos__(argument) if isinstance(argument, SampleSize) else argument


def _still_a_size(name: str) -> Callable[..., Any]:
    on_ints = getattr(int, name)

    def compute(self: SampleSize, *others: Any) -> Any:
        made = on_ints(self, *others)
        return self.noted.size(made) if type(made) is int else made

    return compute


def _decision(name: str) -> Callable[..., Any]:
    on_ints = getattr(int, name)

    def compute(self: SampleSize, *others: Any) -> Any:
        self.noted.decide(sys._getframe(1))
        return on_ints(self, *others)

    return compute


for _name in _STAYS_A_SIZE:
    setattr(SampleSize, _name, _still_a_size(_name))
for _name in _DECIDES:
    setattr(SampleSize, _name, _decision(_name))


class SampleShape(tuple[int, ...]):
    """A shape, some of whose sizes are `SampleSize`, in a run with `SizesNoted.samples` samples; so is a part of it.

    It says that it is a torch.Size, of which no class can be made, and whose `numel` gives a plain number.
    """

    noted: SizesNoted

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Size

    def numel(self) -> int:
        return self.noted.noted(math.prod(map(plain, self)))

    def __getitem__(self, place: Any) -> Any:
        sizes = tuple.__getitem__(self, place)
        return self.noted.shape(sizes) if isinstance(place, slice) else sizes

    def __add__(self, other: Any) -> Any:
        return self.noted.shape(tuple.__add__(self, tuple(other)))

    def __radd__(self, other: Any) -> Any:
        return self.noted.shape((*other, *self))


_READS_INTEGERS = frozenset({math.isqrt, math.gcd, math.lcm, math.comb, math.perm, math.factorial})
"""Functions in C that read an integer without asking it, so that no `SampleSize` notes them."""


class SizesNoted(TorchFunctionMode):
    """A context in which tensors give their sizes as `SampleSize`, where these are multiples of `samples`: a prime that
    is larger than usual sizes. `decisions`: how often the user's code decided by one."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.decisions = samples, 0
        self._type: type[SampleSize] = type("SampleSize", (SampleSize,), {"noted": self})
        self._shape: type[SampleShape] = type("SampleShape", (SampleShape,), {"noted": self})

    def __enter__(self) -> Self:
        self._profile = sys.getprofile()
        sys.setprofile(self._watch)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        sys.setprofile(self._profile)

    def _watch(self, frame: Any, event: str, function: Any) -> None:
        """Note calls in the user's code of functions that would read a size without its noting it."""
        if event == "c_call":
            is_count = type(getattr(function, "__self__", None)) is torch.Size and function.__name__ == "numel"
            if is_count or (getattr(function, "__self__", None) is math and function in _READS_INTEGERS):
                self.decide(frame)

    def size(self, number: int) -> SampleSize:
        return self._type(number)

    def shape(self, sizes: Iterable[int]) -> SampleShape:
        return self._shape(sizes)

    def grows(self, number: int) -> bool:
        return int.__mod__(number, self.samples) == 0 and int.__ne__(number, 0)

    def decide(self, frame: Any) -> None:
        """Note a decision, unless it is PyTorch's own: its checks of sizes hold for every number of samples."""
        self.decisions += not is_torchs_or_ours(frame.f_code.co_filename)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__len__ and self.grows(made):  # Python makes a plain number of it
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename in _WRAPPERS:
                frame = frame.f_back
            self.decide(frame)
        if func not in _SIZES:
            return made
        if isinstance(made, torch.Size):
            return self.shape(self.noted(size) for size in made)
        if isinstance(made, tuple):
            return type(made)(self.noted(size) for size in made)
        return self.noted(made)

    def noted(self, size: int) -> int:
        """Return a size as `SampleSize` where it grows with the batch."""
        return self.size(size) if self.grows(size) else size
