"""One thread is one thread, whatever ran in the process before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from manyhands.profiler.threads import with_threads

_AFTER_TWO = """
import time
import torch
from manyhands.profiler.threads import with_threads

data, weight = torch.randn(1, 64, 96, 96), torch.randn(64, 64, 3, 3)
def run(times):
    with torch.no_grad():
        for _ in range(times):
            torch.conv2d(data, weight, padding=1)
torch.set_num_threads(2)
run(2)
with with_threads(1):
    with with_threads(2):
        run(1)
    everyone, own = time.process_time(), time.thread_time()
    run(24)
    everyone, own = time.process_time() - everyone, time.thread_time() - own
assert torch.get_num_threads() == 2
print(own / everyone)
"""


@pytest.mark.slow
def test_a_convolution_on_two_threads_leaves_none_behind() -> None:
    """In a process of its own: what is computed on one thread there is computed by that thread alone."""
    ran = subprocess.run([sys.executable, "-c", _AFTER_TWO], capture_output=True, text=True, check=True, env=os.environ)
    assert float(ran.stdout) > 0.8  # one of two threads would have half of it


def test_as_many_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with with_threads(1):
        assert torch.get_num_threads() == 1
        with with_threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with with_threads(None):
        assert torch.get_num_threads() == before


def _fail() -> None:
    with with_threads(1):
        raise ZeroDivisionError


def test_also_where_something_went_wrong() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        _fail()
    assert torch.get_num_threads() == before
