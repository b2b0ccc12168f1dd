"""Samples as JSON: the shapes that arrays have, numbers only, and nothing decoded that is too much."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data import sample_json
from manyhands.data.sample_arrays import of_array
from manyhands.data.sample_json import read_json
from manyhands.data.samples import read_samples
from manyhands.data.wanted import SampleForm
from manyhands.facts.errors import BadData, BadFile

WANTED = SampleForm((1, 2, 2))
ONE = [[[1, 2.5], [-3e-2, 4]]]


@given(
    st.sampled_from([(), (1,), (3,), (2, 3), (1, 2, 2)]), st.integers(0, 3), st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)  # fmt: skip
def test_lists_are_read_as_the_array_they_are(
    shape: tuple[int, ...], count: int, is_named: bool, dtype: torch.dtype
) -> None:
    whole = (count, *shape) if count else shape
    array = numpy.random.default_rng(0).integers(-9, 9, whole).astype(str(dtype).removeprefix("torch."))
    text = json.dumps({"inputs": array.tolist()} if is_named else array.tolist(), indent=1).encode()
    found = list(read_json(text, "x", SampleForm(shape, dtype)))
    expected = list(of_array("x", array, SampleForm(shape, dtype)))
    assert len(found) == len(expected) == max(1, count)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.JSON"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"inputs": [ONE, ONE]}).encode())
    samples = read_samples(str(path), WANTED)
    assert [samples.name(index) for index in range(len(samples))] == ["two.JSON[0]", "two.JSON[1]"]
    assert torch.equal(torch.stack([torch.as_tensor(one) for one in samples]), torch.tensor([ONE, ONE]))
    path.write_text("[[[1, 2, 3], [4, 5, 6]]]")
    with pytest.raises(BadData, match=r"two\.JSON is 1x2x3; the network takes 1x2x2") as refused:
        read_samples(str(path), WANTED)
    assert "--resize" in refused.value.hint
    assert torch.as_tensor(read_samples(str(path), WANTED.resizing())[0]).shape == WANTED.shape


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("[[[1, 2], [3, 4]]", "truncated"),
        ("[[[1, 2], [3, 4]]] x", "trailing"),
        ("[[[1, 2], [3]]]", "different lengths"),
        ("[[[1, 2], [3, [4]]]]", "got 'array'"),
        ("[[[1, 2], 3]]", "got 'int'"),
        ('[[[1, 2], [3, "4"]]]', "got 'str'"),
        ("[[[1, 2], [3, true]]]", "got 'bool'"),
        ("[[[1, 2], [3, null]]]", "got 'null'"),
        ("[[[1, 2], [3, NaN]]]", "malformed"),
        ("[[[1, 2], [3, 1e999]]]", "out of range"),
        ("[[[]]]", "no sample"),
        ("[]", "no sample"),
        ("7", "is one number; the network takes 1x2x2"),
        ('{"inputs": 7}', "is one number; the network takes 1x2x2"),
        ("{}", "inputs"),
        ('{"input": [1]}', "input"),
        ('{"inputs": [1], "more": 2}', "more"),
        ('{"inputs": [1], "inputs": [2]}', "twice"),
        ("[" * 9 + "]" * 9, "more than 8 deep"),
        ('{"inputs": ' + "[" * 100_000 + "]" * 100_000 + "}", "deep"),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_array_of_numbers_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadData, match=r"^x") as refused:
        read_json(text.encode(), "x", WANTED)
    assert words in refused.value.message
    assert refused.value.hint


def test_whole_numbers_are_whole() -> None:
    words = SampleForm((2,), torch.int64)
    assert torch.as_tensor(read_json(b"[3, 4]", "x", words)[0]).tolist() == [3, 4]
    for text in (b"[3, 4.5]", b"[3, 1%s]" % (b"0" * 30), b"[3, %s]" % (b"9" * 5000)):
        with pytest.raises(BadData, match=r"^x"):
            read_json(text, "x", words)


def test_a_number_too_large_for_the_network_is_named() -> None:
    samples = read_json(b"[[1, 2], [3, 1e300]]", "x", SampleForm((2,)))
    assert torch.as_tensor(samples[0]).tolist() == [1, 2]
    with pytest.raises(BadData, match="sample 1 has a NaN or infinite value"):
        samples[1]


@pytest.mark.parametrize("text", ["[" + "0," * 400 + "0]", "[" + "[]," * 200 + "[]]"])
def test_too_much_is_refused_before_it_is_decoded(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("was decoded")

    (tmp_path / "x.json").write_text(text)
    monkeypatch.setattr(msgspec.json, "decode", refuse)
    monkeypatch.setattr(sample_json, "LARGEST_DECODED_BYTES", 10_000)
    with pytest.raises(BadData, match=r"decoded; at most 10 kB") as refused:
        read_samples(str(tmp_path / "x.json"), WANTED)
    assert "numpy.save" in refused.value.hint
    monkeypatch.setattr(sample_json, "LARGEST_FILE_BYTES", 500)
    with pytest.raises(BadData, match="more than 500 B"):
        read_samples(str(tmp_path / "x.json"), WANTED)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(BadFile, match="not a plain file"):
        read_samples(str(tmp_path / "pipe.json"), WANTED)
