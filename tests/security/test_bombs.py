"""Small files that would become large in memory: they are refused by their sizes, before those are taken."""

from __future__ import annotations

import io
import resource
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from hand_made import chain
from manyhands.data import packed
from manyhands.data.arrays import load_arrays
from manyhands.data.detection import _objects
from manyhands.data.samples import read_picture
from manyhands.data.silo import Silo
from manyhands.data.wanted import SampleForm
from manyhands.facts.errors import BadData, BadFile, BadPlan, ManyhandsError
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.files.documents import MOST_YAML_NODES, read_document

MOST_GROWTH_BYTES = 96 * 2**20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refused(do: Callable[[], Any], kind: type[ManyhandsError] = BadFile, seconds: float = 5.0) -> str:
    """The refusal; it costs little time and memory."""
    before, start = peak_bytes(), time.process_time()
    with pytest.raises(kind) as caught:
        do()
    assert peak_bytes() - before < MOST_GROWTH_BYTES
    assert time.process_time() - start < seconds
    return caught.value.message


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("depth", [6, 9, 40])
def test_aliases_that_stand_for_a_billion(tmp_path: Path, depth: int) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    text = refused(lambda: read_document(written(tmp_path / "a.yaml", "\n".join(lines))))
    assert f"at most {MOST_YAML_NODES} are read" in text


def test_merges_that_stand_for_a_billion(tmp_path: Path) -> None:
    lines = ["a0: &a0 {k: 1}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)]
    refused(lambda: read_document(written(tmp_path / "a.yaml", "\n".join(lines))))


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", "pi: &pi {kind: pi4, memory: 4 GB}\nmine: [*pi, {<<: *pi, name: second}]\n")
    found: Any = read_document(path)
    assert found["mine"] == [{"kind": "pi4", "memory": "4 GB"}, {"kind": "pi4", "memory": "4 GB", "name": "second"}]


@pytest.mark.parametrize("text", ["&a [*a]", "&a {k: *a}", "a: &a {<<: *a}"])
def test_a_list_in_itself(tmp_path: Path, text: str) -> None:
    assert "holds itself" in refused(lambda: read_document(written(tmp_path / "a.yaml", text)))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("number", ["9" * 5000, "9" * 41, "-" + "1" * 5000])
def test_numbers_of_a_thousand_digits(tmp_path: Path, suffix: str, number: str) -> None:
    assert "digits" in refused(lambda: read_document(written(tmp_path / f"a{suffix}", f'{{"a": {number}}}')))


def test_hexadecimal_numbers_of_a_thousand_digits(tmp_path: Path) -> None:
    """Those cost nothing to read, and cannot be printed."""
    assert "digits" in refused(lambda: read_document(written(tmp_path / "a.yaml", f"a: 0x{'f' * 5000}")))


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udc00": 1}'])
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_half_a_character_pair(tmp_path: Path, text: str, suffix: str) -> None:
    refused(lambda: read_document(written(tmp_path / f"a{suffix}", text)))
    whole: Any = read_document(written(tmp_path / "b.json", '{"a": "\\ud83d\\ude00"}'))
    assert whole == {"a": "😀"}


@pytest.mark.parametrize(
    "text", ["!!timestamp x", "!!bool x", "a: !!int x", "!!float x", "!!binary é", "!!python/name:os.system"]
)
def test_tags_that_say_what_is_not_so(tmp_path: Path, text: str) -> None:
    refused(lambda: read_document(written(tmp_path / "a.yaml", text)))


def test_empty_lists_by_the_million(tmp_path: Path) -> None:
    """Two letters each in the file, fifty times as much in memory."""
    path = written(tmp_path / "a.json", "[" + "[]," * 3_000_000 + "0]")
    assert "lists and objects" in refused(lambda: read_document(path))


def test_a_plan_of_a_billion_actions() -> None:
    network = chain(2)
    for batch_size, micro_batches in ((10**9, 10**9), (10**12, 1), (20_000, 20_000)):
        plan = Plan(network.name, batch_size, (Stage((0, 2), ("a",), Single()),), micro_batches)
        refused(lambda plan=plan: resolve(plan, network), BadPlan)  # type: ignore[misc]


def zipped(path: Path, arrays: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in arrays.items():
            file.writestr(f"{name}.npy", content)
    return path


def npy(shape: tuple[int, ...], content: bytes = b"", kind: str = "<f4") -> bytes:
    file = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def test_an_archive_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes of zeros, packed, are twenty megabytes."""
    zeros = bytes(20 * 2**20)
    path = zipped(tmp_path / "a.npz", {"x": npy((5 * 2**20, 1), zeros), "y": npy((4,), bytes(16), "<i4")})
    path_of_silo = zipped(tmp_path / "silo.npz", {"id": npy((5 * 2**20,), zeros, "<i4"), "left": npy((1,), bytes(4))})
    del zeros
    assert path.stat().st_size < 40_000

    class Memory:
        available = 10 * 2**20

    monkeypatch.setattr(packed.psutil, "virtual_memory", lambda: Memory)
    assert "of memory are left" in refused(lambda: load_arrays(path), BadData)
    assert "of memory are left" in refused(lambda: Silo.read(path_of_silo), BadData)


def test_an_array_that_says_it_is_larger_than_it_is(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.npz", {"x": npy((10**11,), bytes(16)), "y": npy((4,), bytes(16), "<i4")})
    refused(lambda: load_arrays(path), ManyhandsError)


def test_a_picture_of_a_billion_pixels() -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    )
    assert "pixels" in refused(lambda: read_picture(data, "a.png", SampleForm((1, 8, 8))), BadData)


def test_entities_that_stand_for_a_billion(tmp_path: Path) -> None:
    (tmp_path / "Annotations").mkdir()
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "x" * 10}">' for n in range(10))
    text = f"<!DOCTYPE annotation [{entities}]><annotation>&e9;</annotation>"
    written(tmp_path / "Annotations" / "a.xml", text)
    assert "document type" in refused(lambda: _objects(tmp_path, "a", "here"))


def test_two_entries_of_one_name_are_not_one(tmp_path: Path) -> None:
    """`x` is a small one, and `x.npy`, which numpy reads under the same name, is a bomb: neither hides the other."""
    path = tmp_path / "two.npz"
    small = io.BytesIO()
    numpy.save(small, numpy.zeros(4, numpy.float32))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as both:
        with both.open("x.npy", "w") as bomb:
            header = io.BytesIO()
            numpy.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**28,)})
            bomb.write(header.getvalue() + bytes(2**20))
        both.writestr("x", small.getvalue())
        both.writestr("y.npy", small.getvalue())
    assert "holds x twice" in refused(lambda: load_arrays(path))
