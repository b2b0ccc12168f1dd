"""Reviews, film ratings, chairs and CIFAR-10 in the formats they are given out in, broken ones, and the stand-ins."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from manyhands.data import chairs, cifar, classes, imdb, movielens
from manyhands.data.data_sets import DataSets
from manyhands.data.loader import example, length
from manyhands.data.sets import STAND_INS, load
from manyhands.facts.errors import BadData, BadFile, ManyhandsError, UnknownName
from manyhands.models import chair as chair_model
from manyhands.models.registry import ZOO, example_batch, example_target

JPEG_COPY = Path(__file__).parents[3] / "shared" / "data" / "cifar10_jpeg.npz"


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def refused(path: Path, **options: Any) -> str:
    with pytest.raises((BadData, BadFile)) as caught:
        load(str(path), **options)
    return caught.value.message


def batch(sets: DataSets, samples: int = 64) -> tuple[Any, Tensor]:
    inputs, targets = example(sets.train, samples)
    return inputs, targets


# Reviews


def reviews(root: Path) -> Path:
    write(root / "train" / "pos" / "0_9.txt", "A great, GREAT film!<br /><br />Don't miss it; great.")
    write(root / "train" / "pos" / "1_8.txt", "a film")
    write(root / "train" / "neg" / "0_2.txt", "A bore")
    write(root / "train" / "unsup" / "0_0.txt", "never read")
    write(root / "train" / "urls_pos.txt", "http://nowhere")
    write(root / "test" / "pos" / "0_7.txt", "unheard film")
    write(root / "test" / "neg" / "0_1.txt", "\u00e9tude: a bore")
    return root


@pytest.mark.parametrize("below", ["", "aclImdb"])
def test_reviews(tmp_path: Path, below: str) -> None:
    reviews(tmp_path / below)
    sets = load(str(tmp_path), input_shape=(6,))
    assert (sets.kind, sets.num_classes, sets.classes, sets.input_shape) == ("imdb", 2, ("neg", "pos"), (6,))
    # By count, then name: a 3, great 3, film 2, bore 1, don't 1, it 1, miss 1.
    assert sets.model_options == {"vocabulary": 9}
    tokens, labels = batch(sets)
    assert tokens.dtype == labels.dtype == torch.int64
    assert labels.tolist() == [0, 1, 1]
    assert tokens.tolist() == [[2, 5, 0, 0, 0, 0], [2, 3, 3, 4, 6, 8], [2, 4, 0, 0, 0, 0]]
    assert sets.test is not None
    assert example(sets.test, 9)[0].tolist() == [[1, 2, 5, 0, 0, 0], [1, 4, 0, 0, 0, 0]]


def test_reviews_without_tests_and_with_few_words(tmp_path: Path) -> None:
    for side in ("pos", "neg"):
        for number in range(5):
            write(tmp_path / "train" / side / f"{number}.txt", f"{side} word word")
    sets = load(str(tmp_path), input_shape=(3,))
    assert sets.test is not None
    assert (length(sets.train), length(sets.test)) == (8, 2)
    small = imdb.load_imdb(tmp_path, input_shape=(3,), vocabulary=2)
    assert batch(small)[0].unique().tolist() == [imdb.UNKNOWN, 2, 3]


def test_pictures_of_two_sides_are_still_pictures(tmp_path: Path) -> None:
    for side in ("pos", "neg"):
        (tmp_path / "train" / side).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "train" / side / "1.png")
    assert load(str(tmp_path)).input_shape == (3, 64, 64)


def test_bad_reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reviews(tmp_path)
    assert "the model takes (3, 32, 32)" in refused(tmp_path, input_shape=(3, 32, 32))
    odd = write(tmp_path / "train" / "pos" / "odd.txt", b"caf\xe9 au lait")
    assert "odd.txt: is not text in UTF-8: byte 3" in refused(tmp_path)
    odd.unlink()
    os.mkfifo(odd)
    assert "odd.txt: is not a plain file" in refused(tmp_path)
    odd.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(imdb, "LARGEST_REVIEW_BYTES", 20)
        assert "0_9.txt: is longer than 20 B" in refused(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(imdb, "LARGEST_REVIEW_COUNT", 1)
        assert "holds more than 1 files" in refused(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(imdb, "LARGEST_TEXT_BYTES", 50)
        assert "with it the reviews are longer than" in refused(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(imdb, "LARGEST_TABLE_BYTES", 500)
        assert "at most 500 B are kept" in refused(tmp_path)
    (tmp_path / "test" / "neg" / "0_1.txt").unlink()
    assert "neg: there is no review in it" in refused(tmp_path)


# Film ratings

MOVIES = [(1, "Toy, Story", "Comedy|Drama"), (7, "M\u00e9tro", "Action"), (3, "Third", "(no genres listed)")]
RATINGS = [(5, 1, 4.0, 30), (5, 7, 3.5, 10), (5, 3, 5.0, 20), (2, 7, 1.0, 5), (2, 1, 4.5, 5), (9, 3, 2.0, 1)]


def films(
    root: Path, ratings: list[tuple[Any, ...]], movies: list[tuple[Any, ...]] = MOVIES, kind: str = "csv"
) -> Path:
    if kind == "csv":
        lines = [f'{number},"{title}",{genres}' for number, title, genres in movies]
        write(root / "movies.csv", "\r\n".join(["movieId,title,genres", *lines, ""]))
        write(
            root / "ratings.csv",
            "\n".join(["userId,movieId,rating,timestamp", *(",".join(map(str, r)) for r in ratings)]),
        )
    else:
        write(root / "movies.dat", "\n".join("::".join(map(str, movie)) for movie in movies).encode("latin-1"))
        write(root / "ratings.dat", "".join("::".join(map(str, rating)) + "\n" for rating in ratings))
    return root


@pytest.mark.parametrize("kind", ["csv", "dat"])
def test_ratings(tmp_path: Path, kind: str) -> None:
    sets = load(str(films(tmp_path / "ml-20m", RATINGS, kind=kind).parent), input_shape=(2,))
    assert (sets.kind, sets.num_classes, sets.input_shape, sets.test) == ("movielens", 0, (2,), None)
    assert sets.model_options == {"movies": 3, "genres": 3}
    inputs, clicks = batch(sets)
    # Films 1, 7, 3 have the numbers 1, 2, 3; "(no genres listed)", Action, Comedy 1, 2, 3. User 2, then 5; 9 rated one.
    assert clicks.tolist() == [1.0, 1.0, 1.0]
    assert clicks.dtype == torch.float32
    assert inputs["history_movies"].tolist() == [[2, 0], [2, 0], [2, 3]]
    assert inputs["history_genres"].tolist() == [[2, 0], [2, 0], [2, 1]]
    assert inputs["history_mask"].tolist() == [[1, 0], [1, 0], [1, 1]]
    assert inputs["movie"].tolist() == [1, 3, 1]
    assert inputs["genre"].tolist() == [3, 1, 3]
    shown: Any = example_batch("din", 3, input_shape=(2,))
    assert {key: (value.shape, value.dtype) for key, value in inputs.items()} == {
        key: (value.shape, value.dtype) for key, value in shown.items()
    }


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([1, 7, 3]), st.sampled_from([0.5, 3.5, 4, 5]), st.integers(0, 6)),
        min_size=2, max_size=40,
    ),
    st.integers(1, 4),
    st.integers(8, 80),
)  # fmt: skip
def test_histories_are_what_a_loop_finds(
    tmp_path_factory: pytest.TempPathFactory, ratings: list[tuple[Any, ...]], longest: int, block: int
) -> None:
    """In blocks of any length, too."""
    number = {1: 1, 7: 2, 3: 3}
    expected = []
    for person in {rating[0] for rating in ratings}:
        own = sorted((rating for rating in ratings if rating[0] == person), key=lambda rating: rating[3])
        seen = [number[rating[1]] for rating in own]
        for place in range(1, len(own)):
            history = seen[max(0, place - longest) : place]
            expected.append((history + [0] * (longest - len(history)), seen[place], float(own[place][2] >= 4)))
    root = films(tmp_path_factory.mktemp("films"), ratings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(movielens, "_BLOCK_BYTES", max(block, 64))
        if not expected:
            assert "nobody rated two films" in refused(root)
            return
        sets = movielens.load_movielens(root, input_shape=(longest,))
    found: list[Any] = []
    people = []
    for part in (sets.train, sets.test):
        clicks: Any = part
        for index in range(len(clicks) if clicks is not None else 0):
            inputs, target = clicks[index]
            found.append((inputs["history_movies"].tolist(), int(inputs["movie"]), float(target)))
        people.append(set() if clicks is None else set(clicks.ratings.people[clicks.places].tolist()))
    assert sorted(found) == sorted(expected)
    assert not people[0] & people[1], "whoever is tested on was never trained on"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("user,film\n", "begins with 'user,film'"),
        ("", "begins with ''"),
        ("HEADER", "there is no rating in it"),
        ("HEADER1,1,4,5\n1,7,x,5\n", "after line 1: could not convert string 'x' to float64 at row 1"),
        ("HEADER1,1,4,5\n1,7,4\n", "after line 1: the number of columns changed from 4 to 3 at row 2"),
        ("HEADER1,1,4\n1,7,4\n", "lines have 3 numbers"),
        ("HEADER1,1,nan,5\n", "the rating of rating 1 after line 1 is nan; it must be a number from 0 to 5"),
        ("HEADER1,1,4,5\n1,7,inf,5\n", "the rating of rating 2 after line 1 is inf"),
        ("HEADER1,1.5,4,5\n", "the movieId of rating 1 after line 1 is 1.5; it must be a whole number"),
        ("HEADER-1,1,4,5\n", "the userId of rating 1 after line 1 is -1"),
        ("HEADER1,99999999999,4,5\n", "the movieId of rating 1 after line 1 is 1e+11"),
        ("HEADER1,1,4,1e300\n", "the timestamp of rating 1"),
        ("HEADER1,2,4,5\n1,1,4,5\n", "1 ratings are of films that movies.csv does not list, such as 2"),
        ("HEADER1,\u0661,4,5\n", "after line 1: 'ascii' codec"),
        ("HEADER" + "1" * 200, "line 2 is too long to be a rating"),
    ],
)
def test_bad_ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, told: str) -> None:
    monkeypatch.setattr(movielens, "_BLOCK_BYTES", 128)
    films(tmp_path, RATINGS)
    write(tmp_path / "ratings.csv", content.replace("HEADER", "userId,movieId,rating,timestamp\n"))
    assert told in refused(tmp_path)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(1, "A", "Drama"), (1, "B", "Drama")], "line 3: film 1 is listed twice"),
        ([("one", "A", "Drama")], "line 2: 'one' is not the number of a film"),
        ([(99999999999, "A", "Drama")], "is not the number of a film"),
        ([(1, "A", "")], "the first genre has 0 letters"),
        ([(1, "A", "x" * 200)], "the first genre has 200 letters"),
        ([(1, "A", "Drama,more")], "line 2 has 4 fields"),
        ([(1, 'A" b', "Drama")], "line 2 is not CSV"),
        ([], "there is no film in it"),
    ],
)
def test_bad_lists_of_films(tmp_path: Path, rows: list[tuple[Any, ...]], told: str) -> None:
    assert told in refused(films(tmp_path, RATINGS, rows))


def test_limits_of_ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    films(tmp_path, RATINGS)
    assert "the model takes (825, 1)" in refused(tmp_path, input_shape=(825, 1))
    for name, told in (
        ("LARGEST_RATINGS_BYTES", "ratings.csv: has "),
        ("LARGEST_MOVIES_BYTES", "movies.csv: is longer than 30 B"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(movielens, name, 30)
            assert told in refused(tmp_path)
    monkeypatch.setattr(movielens, "LARGEST_GENRE_COUNT", 2)
    assert "has 3 genres; at most 2" in refused(tmp_path)


# Chairs


def render(root: Path, chair: str, name: str, colour: tuple[int, int, int] = (255, 0, 0)) -> Path:
    file = root / chair / "renders" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (60, 60), colour).save(file)
    return file


@pytest.mark.parametrize("below", ["", "rendered_chairs"])
def test_chairs(tmp_path: Path, below: str) -> None:
    root = tmp_path / below
    for turn in range(5):
        render(root, "b0", f"image_{turn:03}_p030_t{turn * 72:03}_r096.png", (0, 255, 0))
        render(root, "a9", f"image_{turn:03}_p020_t{turn * 72:03}_r096.png", (255, 0, 0))
    write(root / "all_chair_names.mat", b"MATLAB")
    sets = load(str(tmp_path), input_shape=ZOO["chair"].input_shape)
    assert (sets.kind, sets.num_classes, sets.input_shape) == ("3dchair", 0, (825,))
    assert sets.test is not None
    assert (length(sets.train), length(sets.test)) == (8, 2)
    whole: Any = sets.train
    everything = whole.dataset
    described, picture = everything[1]
    turn = math.radians(72)
    view = [math.sin(turn), math.cos(turn), math.sin(math.radians(20)), math.cos(math.radians(20))]
    assert described.nonzero()[0].tolist() == [0]
    assert described[809:].tolist() == pytest.approx([*view, *[0.0] * 12])
    assert picture.shape == (3, 128, 128)
    assert picture[:, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert everything[5][0][:2].tolist() == [0.0, 1.0]
    assert everything[5][1][:, 64, 64].tolist() == [0.0, 1.0, 0.0]
    assert (chairs.STYLES, chairs.VIEW, chairs.CHANGES) == chair_model.INPUT_PARTS


def test_bad_chairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chair in ("a", "b", "c"):
        render(tmp_path, chair, "image_001_p020_t011_r096.png")
    assert "the model takes (3, 64, 64)" in refused(tmp_path, input_shape=(3, 64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(chairs, "STYLES", 2)
        assert length(load(str(tmp_path)).train) == 2, "the first by name"
    torn = render(tmp_path, "b", "image_002_p020_t023_r096.png")
    torn.write_bytes(torn.read_bytes()[:60])
    assert "1 of 4 files cannot be read as pictures: b/renders/image_002_p020_t023_r096.png" in refused(tmp_path)
    torn.unlink()
    for name, told in (
        ("image_2.png", "image_2.png: its name does not tell the view"),
        ("image_002_p099_t023_r096.png", "an elevation of 99"),
        ("image_002_p020_t361_r096.png", "an azimuth of 361"),
    ):
        odd = render(tmp_path, "b", name)
        assert told in refused(tmp_path)
        odd.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(chairs, "LARGEST_FOLDER_COUNT", 2)
        assert "holds more than 2 files" in refused(tmp_path)
    (tmp_path / "b" / "renders" / "image_001_p020_t011_r096.png").unlink()
    assert "there is no picture in it" in refused(tmp_path)


# CIFAR-10


def records(file: Path, labels: list[int], seed: int = 0) -> numpy.ndarray:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=numpy.uint8)
    write(file, numpy.concatenate((numpy.array(labels, dtype=numpy.uint8)[:, None], pixels), axis=1).tobytes())
    return pixels.reshape(-1, 3, 32, 32)


def test_cifar_binary(tmp_path: Path) -> None:
    root = tmp_path / "cifar-10-batches-bin"
    first = records(root / "data_batch_1.bin", [3, 9])
    records(root / "data_batch_2.bin", [0, 1, 2])
    records(root / "test_batch.bin", [5], seed=1)
    write(root / "batches.meta.txt", "\n".join(cifar.CLASSES) + "\n\n")
    sets = load(str(tmp_path))
    assert (sets.kind, sets.classes, sets.input_shape, sets.name) == ("cifar10", cifar.CLASSES, (3, 32, 32), root.name)
    inputs, labels = batch(sets)
    assert labels.tolist() == [3, 9, 0, 1, 2]
    assert torch.allclose(inputs[1], torch.from_numpy(first[1]).float() / 127.5 - 1, atol=1e-6)
    assert sets.test is not None
    assert length(sets.test) == 1
    assert batch(load(str(root), input_shape=(3, 64, 48)))[0].shape == (5, 3, 64, 48)
    (root / "test_batch.bin").unlink()
    records(root / "data_batch_2.bin", [1] * 5)
    assert length(load(str(root)).test) == 1  # type: ignore[arg-type]


def test_bad_cifar_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data_batch_1.bin"
    records(file, [3, 10])
    assert "the class of picture 1 is 10; there are 10, from 0" in refused(tmp_path)
    records(file, [3, 9])
    for shape in ((1, 32, 32), (3, 32), (3, 0, 32), (3, 10**6, 1)):
        assert "pictures have 3 channels" in refused(tmp_path, input_shape=shape)
    write(tmp_path / "batches.meta.txt", "cat\ncat\n")
    assert "has 1 different names; 10 are needed" in refused(tmp_path)
    (tmp_path / "batches.meta.txt").unlink()
    write(file, file.read_bytes()[:-1])
    assert "has 6,145 bytes; records are of 3,073 bytes" in refused(tmp_path)
    write(file, b"")
    assert "has 0 bytes" in refused(tmp_path)
    records(file, [3, 9])
    monkeypatch.setattr(cifar, "LARGEST_BATCH_BYTES", 5000)
    assert "is longer than" in refused(tmp_path)
    for name in ("data_batch_1", "test_batch"):
        write(tmp_path / "python" / "cifar-10-batches-py" / name, b"\x80\x02")
    assert "holds pickles, which are not read" in refused(tmp_path / "python")


def jpeg_arrays(labels: list[int], part: str = "train", side: int = 32) -> dict[str, Any]:
    pictures = []
    for label in labels:
        packed = io.BytesIO()
        Image.new("RGB", (side, side), (20 * label, 0, 0)).save(packed, "JPEG")
        pictures.append(packed.getvalue())
    return {
        f"jpeg_{part}": numpy.frombuffer(b"".join(pictures), dtype=numpy.uint8).copy(),
        f"off_{part}": numpy.cumsum([0, *map(len, pictures)]),
        f"y_{part}": numpy.array(labels, dtype=numpy.uint8),
        "classes": numpy.array(cifar.CLASSES),
    }


def test_jpeg_copy(tmp_path: Path) -> None:
    path = tmp_path / "copy.npz"
    numpy.savez(path, **{**jpeg_arrays([7, 0, 2]), **jpeg_arrays([1], "test")})
    sets = load(str(path))
    assert (sets.kind, sets.classes, sets.input_shape) == ("cifar10", cifar.CLASSES, (3, 32, 32))
    inputs, labels = batch(sets)
    assert labels.tolist() == [7, 0, 2]
    assert ((inputs[:, 0].mean(dim=(1, 2)) + 1) * 127.5).tolist() == pytest.approx([140, 0, 40], abs=4)
    assert length(sets.test) == 1  # type: ignore[arg-type]
    assert batch(load(str(path), input_shape=(1, 8, 16)))[0].shape == (3, 1, 8, 16)
    half = classes.only(sets, [2, 7])
    assert (half.num_classes, half.classes, half.test) == (2, ("bird", "horse"), None)
    assert batch(half)[1].tolist() == [1, 0]
    numpy.savez(path, **jpeg_arrays([1] * 5))
    assert length(load(str(path)).test) == 1  # type: ignore[arg-type]


def _swap(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({key: value})


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda arrays: arrays.pop("y_train"), "has no y_train"),
        (lambda arrays: arrays.update(off_train=arrays["off_train"] + 1), "does not rise from 0 to"),
        (lambda arrays: arrays.update(off_train=arrays["off_train"][[0, 2, 1, 3]]), "does not rise from 0 to"),
        (lambda arrays: arrays.update(off_train=arrays["off_train"][:-1]), "3 pictures need one more"),
        (lambda arrays: arrays.update(off_train=arrays["off_train"] + [0, 5, 0, 0]), "picture 0 of jpeg_train is not"),
        (lambda arrays: arrays["jpeg_train"].__setitem__(0, 0), "picture 0 of jpeg_train is not a whole JPEG"),
        (_swap("y_train", numpy.array([0, 1, 10])), "the class of picture 2 is 10; there are 10"),
        (_swap("y_train", numpy.array([0, -1, 1])), "y_train is -1 for picture 1"),
        (_swap("y_train", numpy.array([0.0, 1.0, 1.0])), "y_train holds float64; it must hold whole numbers"),
        (_swap("classes", numpy.array(["cat", "cat"])), "has 1 different classes"),
        (_swap("classes", numpy.array([{}], dtype=object)), "Object arrays cannot be loaded"),
        (_swap("off_train", numpy.zeros((2, 2), dtype=int)), "off_train is not an array of one axis"),
    ],
)
def test_bad_jpeg_copies(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], told: str) -> None:
    arrays = jpeg_arrays([7, 0, 2])
    spoil(arrays)
    numpy.savez(tmp_path / "copy.npz", **arrays)
    assert told in refused(tmp_path / "copy.npz")


def test_jpegs_that_are_broken_inside_or_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = jpeg_arrays([7, 0, 2])
    arrays["jpeg_train"][2:200] = 0
    numpy.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BadData, match=r"Picture 0 cannot be read"):
        load(str(tmp_path / "a.npz")).train[0]
    numpy.savez(tmp_path / "b.npz", **jpeg_arrays([1, 2], side=64))
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "LARGEST_SIDE", 40)
        with pytest.raises(BadData, match=r"Picture 1 cannot be read: it is 64 x 64; at most 40"):
            load(str(tmp_path / "b.npz")).train[1]
    for name, told in (("LARGEST_COPY_BYTES", "at most 99 B are read"), ("LARGEST_PICTURE_BYTES", "picture 0 of")):
        with monkeypatch.context() as patch:
            patch.setattr(cifar, name, 99)
            assert told in refused(tmp_path / "b.npz")
    write(tmp_path / "c.npz", (tmp_path / "b.npz").read_bytes()[:900])
    assert "is not a .npz file" in refused(tmp_path / "c.npz")


@pytest.mark.skipif(not JPEG_COPY.exists(), reason="there is no ../shared/data/cifar10_jpeg.npz")
def test_the_real_jpeg_copy() -> None:
    sets = load(str(JPEG_COPY))
    assert (length(sets.train), length(sets.test)) == (50_000, 10_000)  # type: ignore[arg-type]
    assert (sets.kind, sets.num_classes) == ("cifar10", 10)
    inputs, labels = batch(sets, 200)
    assert labels.bincount().tolist() == [20] * 10
    assert 0.3 < float(inputs.std()) < 0.7
    half = classes.only(sets, range(5))
    assert (length(half.train), length(half.test)) == (25_000, 5_000)  # type: ignore[arg-type]


# Stand-ins


def test_names_of_what_is_not_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for stand_in in STAND_INS:
        with pytest.raises(UnknownName, match="does not come with manyhands") as caught:
            load(stand_in.removeprefix("synthetic-"))
        assert stand_in in caught.value.hint
    with pytest.raises(UnknownName) as caught:
        load("synthetic-imdbs")
    assert "synthetic-imdb" in caught.value.hint


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("name", "model", "shape"),
    [
        ("synthetic-cifar10", "resnet18", (3, 32, 32)),
        ("synthetic-imdb", "bilstm", (12,)),
        ("synthetic-movielens", "din", (6,)),
        ("synthetic-3dchair", "chair", (825,)),
    ],
)
def test_stand_ins_are_as_the_models_take_them(name: str, model: str, shape: tuple[int, ...]) -> None:
    sets = load(name, input_shape=shape)
    assert (sets.name, sets.input_shape, sets.kind) == (name, shape, name.removeprefix("synthetic-"))
    inputs, targets = batch(sets, 3)
    shown: Any = example_batch(model, 3, input_shape=shape)
    form: Callable[[Any], Any] = lambda value: (value.shape, value.dtype)  # noqa: E731
    if isinstance(shown, dict):
        assert {key: form(value) for key, value in inputs.items()} == {key: form(one) for key, one in shown.items()}
    else:
        assert form(inputs) == form(shown)
    assert form(targets) == form(example_target(model, 3, num_classes=sets.num_classes or None))
    again = batch(load(name, input_shape=shape), 3)
    assert torch.equal(targets, again[1])
    assert sets.test is not None
    assert length(sets.train) > 3 * length(sets.test)
    with pytest.raises(ManyhandsError, match="the model takes"):
        load(name, input_shape=(2, 2))


def test_stand_ins_are_the_same_everywhere() -> None:
    """Written down once: results of different machines are only comparable on the same samples."""
    assert int(batch(load("synthetic-imdb"), 9)[0].sum()) == 309384
    assert int(batch(load("synthetic-movielens"), 9)[0]["history_movies"].sum()) == 14799


def learned(sets: DataSets, model: nn.Module, steps: int, rate: float, size: int) -> float:
    """How often the model is right on the test set after some steps on one batch."""
    inputs, targets = batch(sets, size)
    weights = list(model.parameters())
    for _ in range(steps):
        gradients = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight -= rate * gradient.sign()
    assert sets.test is not None
    inputs, targets = example(sets.test, 300)
    with torch.no_grad():
        return float((model(inputs).argmax(dim=1) == targets).float().mean())


@pytest.mark.slow
def test_stand_ins_can_be_learned() -> None:
    torch.manual_seed(0)
    words = nn.Sequential(nn.EmbeddingBag(1000, 8, padding_idx=0), nn.Linear(8, 2))
    assert learned(load("synthetic-imdb", input_shape=(64,)), words, 40, 0.05, 1000) > 0.8
    pooled = [nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    stripes = nn.Sequential(nn.Conv2d(3, 16, 7, stride=2), *pooled, nn.Linear(16, 10))
    assert learned(load("synthetic-cifar10"), stripes, 60, 0.01, 200) > 0.4
    inputs, clicks = batch(load("synthetic-movielens", input_shape=(30,)), 2000)
    seen = ((inputs["history_genres"] == inputs["genre"][:, None]) & (inputs["history_mask"] > 0)).sum(dim=1)
    assert float(((seen >= 2) == (clicks > 0)).float().mean()) > 0.7, "who saw films of a genre likes another of it"
    pictures = batch(load("synthetic-3dchair"), 64)[1]
    assert 0.0 <= float(pictures.min()) < 0.6
    assert float(pictures.max()) == 1.0
    assert float(pictures.std(dim=0).mean()) > 0.02, "views differ"
