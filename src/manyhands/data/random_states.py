"""The states of the random generators that a DataLoader draws from, as text that a checkpoint can hold.

An order of samples, and the seeds of a loader's workers, follow from the states at the beginning of an epoch: put back,
the epoch comes again as it was.
"""

from __future__ import annotations

import base64
import binascii
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from manyhands.facts.errors import BadFile

_PLACES = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator",
           "dataset.generator")  # fmt: skip
"""Where a DataLoader may have a generator of its own."""
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


def states_of(loader: Any) -> dict[str, str]:
    """Return the states of torch's, Python's and numpy's own generators, and of those that belong to the loader."""
    kind, words, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, python_words, python_gauss = random.getstate()
    states = {
        "torch": _text(torch.get_rng_state().numpy()),
        "python": f"{version} {_text(numpy.array(python_words, numpy.uint32))} {_number(python_gauss)}",
    }
    if kind == "MT19937":
        states["numpy"] = f"{_text(numpy.asarray(words))} {place} {has_gauss} {_number(float(gauss))}"
    return states | {name: _text(generator.get_state().numpy()) for name, generator in _generators(loader).items()}


def put_back(states: Mapping[str, str], loader: Any) -> None:
    """Set every generator to its state. States may come from a file: what is none is refused."""
    generators = _generators(loader)
    try:
        for name, state in states.items():
            if name == "torch":
                torch.set_rng_state(_bytes(state))
            elif name == "python":
                version, words, gauss = state.split(" ")
                drawn = tuple(int(word) for word in _words(words, _PYTHON_WORDS))
                random.setstate((int(version), drawn, None if gauss == "-" else float.fromhex(gauss)))
            elif name == "numpy":
                words, place, has_gauss, gauss = state.split(" ")
                numpy.random.set_state(
                    ("MT19937", _words(words, _NUMPY_WORDS), int(place), int(has_gauss), float.fromhex(gauss))
                )
            elif name in generators:
                generators[name].set_state(_bytes(state))
    except (ValueError, TypeError, RuntimeError, OverflowError, binascii.Error) as error:
        raise BadFile(
            f"The state of the random generator '{name:.40}' in the checkpoint is none: {str(error)[:200]}.",
            hint="Resume from another checkpoint, or start a new run.",
        ) from error


def _generators(loader: Any) -> dict[str, torch.Generator]:
    generators = {}
    for path in _PLACES:
        holder = loader
        for name in path.split("."):
            holder = getattr(holder, name, None)
        if isinstance(holder, torch.Generator) and holder.device.type == "cpu":
            generators[path] = holder
    return generators


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _number(value: float | None) -> str:
    return "-" if value is None else float(value).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _words(text: str, count: int) -> Any:
    words = numpy.frombuffer(base64.b64decode(text, validate=True), numpy.uint32)
    if len(words) != count:
        raise ValueError(f"it has {len(words)} words; {count} are needed")
    return words
