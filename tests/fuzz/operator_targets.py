"""Operators of graphs: a call of any of them with hostile arguments is refused, or runs without ending its process."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from fuzz.judging import Build, Target
from fuzz.operator_calls import CALLS
from fuzz.operator_documents import document, encoded, hostile, judged


class OperatorTarget(Target):
    """Its inputs are made from calls, not from bytes: few mutated bytes would reach an operator."""

    def input(self, seed: int, number: int) -> bytes:
        return encoded(hostile(random.Random(f"{seed}/{self.name}/{number}")))


def operator_target(folder: Path) -> Target:
    torch.set_num_threads(1)  # a process that forked has no others
    seeds = [encoded(document(target, calls[0])) for target, calls in CALLS.items()]
    return OperatorTarget("operators", judged, seeds, "json", share=0.2, may_crash=True)


TARGETS: tuple[Build, ...] = (operator_target,)
