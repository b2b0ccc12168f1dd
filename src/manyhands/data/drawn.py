"""Random numbers for data sets that are drawn: the same on every machine, whatever its version of numpy."""

from __future__ import annotations

import numpy


class Draws:
    """Random draws that never change: only the raw numbers of numpy's Philox are used, which it promises to keep."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._raw = numpy.random.Philox(key=numpy.array([seed, stream], dtype=numpy.uint64))

    def uniform(self, *shape: int) -> numpy.ndarray:
        """Return numbers drawn from [0, 1)."""
        raw = self._raw.random_raw(int(numpy.prod(shape, dtype=numpy.int64)))
        numbers: numpy.ndarray = (raw >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53
        return numbers.reshape(shape)

    def below(self, limit: int, *shape: int) -> numpy.ndarray:
        """Return whole numbers from 0 up to, but not including, `limit`."""
        return (self.uniform(*shape) * limit).astype(numpy.int64)

    def bytes(self, *shape: int) -> numpy.ndarray:
        """Return whole numbers from 0 to 255, eight for the price of one."""
        count = int(numpy.prod(shape, dtype=numpy.int64))
        return self._raw.random_raw(-(-count // 8)).astype("<u8").view(numpy.uint8)[:count].reshape(shape)
