"""Films that people rated, as clicks: folders of MovieLens (ml-20m, ml-1m and their like), and a stand-in of drawn
people.

    ml-20m/ratings.csv  userId,movieId,rating,timestamp     ml-20m/movies.csv  movieId,title,genres
    ml-1m/ratings.dat   UserID::MovieID::Rating::Timestamp  ml-1m/movies.dat   MovieID::Title::Genres

As Zhou et al., KDD 2018, section 6.1: a click is a rating of 4 or more, and is predicted from the films the same person
rated before; a person belongs to training or to testing. A film's genre is the first it lists. Films have the numbers
from 1 in the order of their file, genres from 1 in the order of their names; 0 is padding.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from manyhands.data.data_sets import DataSets
from manyhands.data.drawn import Draws
from manyhands.data.plain_files import read_text
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData, BadFile
from manyhands.facts.units import format_bytes

INPUT_SHAPE = (50,)
CLICK_RATING = 4.0
LARGEST_RATING = 5.0
LARGEST_RATINGS_BYTES = 4 * 10**9
LARGEST_MOVIES_BYTES = 100_000_000
LARGEST_ID = 2**31 - 1
LARGEST_TIME = 2**53
LARGEST_GENRE_COUNT = 1000
LARGEST_LENGTH = 10_000
SEARCHED = (".", "ml-20m", "ml-1m", "ml-25m", "ml-32m", "ml-10M100K", "ml-latest", "ml-latest-small")
_NAMES = (("ratings.csv", "movies.csv"), ("ratings.dat", "movies.dat"))
_RATINGS_HEADER = ("userId", "movieId", "rating", "timestamp")
_MOVIES_HEADER = ("movieId", "title", "genres")
_LAYOUT = "Lay it out as MovieLens: ratings.csv and movies.csv, or ratings.dat and movies.dat."
_LONGEST_GENRE = 100
_BLOCK_BYTES = 1 << 24
_DRAWN_PEOPLE, _DRAWN_RATINGS, _DRAWN_FILMS, _DRAWN_GENRES, _DRAWN_LIKED = 1000, 40, 900, 18, 3
_DRAWN_CERTAINTY = 0.9
_SEED = 2018


@dataclass(frozen=True)
class Ratings:
    """The films that people rated: a person's lie together, in the order in which they were rated."""

    people: numpy.ndarray
    """Numbers of the people, counted from 0."""
    films: numpy.ndarray
    clicks: numpy.ndarray
    genres: numpy.ndarray
    """The genre of each film, indexed by the film's number."""
    starts: numpy.ndarray
    """The places where each person's films begin, and where the last one's end."""


class ClickData(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """A sample for each place among the ratings: what was rated before, the film itself, and whether it was a click."""

    def __init__(self, ratings: Ratings, places: numpy.ndarray, length: int) -> None:
        self.ratings = ratings
        self.places = places
        self._length = length

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        held = self.ratings
        place = int(self.places[index])
        first = max(int(held.starts[held.people[place]]), place - self._length)
        history = numpy.zeros(self._length, dtype=numpy.int64)
        history[: place - first] = held.films[first:place]
        film = int(held.films[place])
        inputs = {
            "history_movies": torch.from_numpy(history),
            "history_genres": torch.from_numpy(held.genres[history].astype(numpy.int64)),
            "history_mask": torch.from_numpy((history > 0).astype(numpy.int64)),
            "movie": torch.tensor(film),
            "genre": torch.tensor(int(held.genres[film])),
        }
        return inputs, torch.tensor(float(held.clicks[place]))


def movielens_root(path: Path) -> Path | None:
    """Return the folder with ratings and movies: `path`, or one of MovieLens' names in it."""
    for root in (path / place for place in SEARCHED):
        if any((root / ratings).is_file() and (root / movies).is_file() for ratings, movies in _NAMES):
            return root
    return None


def load_movielens(root: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load one sample for every rating but each person's first; a fifth of the people is held out."""
    length = _length(str(root), input_shape)
    files = [(root / ratings, root / movies) for ratings, movies in _NAMES if (root / ratings).is_file()]
    if not files:
        raise BadFile(f"{root}: there is no ratings.csv and no ratings.dat.", hint=_LAYOUT)
    ratings_file, movies_file = files[0]
    film_ids, genres = _movies(movies_file)
    people, ids, stars, times = _ratings(ratings_file)
    films = _numbered(ratings_file, movies_file, ids, film_ids)
    ratings = _in_order(people, films, stars, times, genres)
    return _sets(root.resolve().name, ratings, length, str(ratings_file))


def synthetic_movielens(*, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Return a stand-in in which everybody likes three genres, watches mostly films of those, and rates them well."""
    length = _length("synthetic-movielens", input_shape)
    draws = Draws(_SEED)
    shape = (_DRAWN_PEOPLE, _DRAWN_RATINGS)
    genres = numpy.concatenate(([0], 1 + numpy.arange(_DRAWN_FILMS) % _DRAWN_GENRES))
    liked = numpy.argsort(draws.uniform(_DRAWN_PEOPLE, _DRAWN_GENRES), axis=1)[:, :_DRAWN_LIKED]
    chosen = numpy.take_along_axis(liked, draws.below(_DRAWN_LIKED, *shape), axis=1)
    genre = numpy.where(draws.uniform(*shape) < 0.5, chosen, draws.below(_DRAWN_GENRES, *shape))
    films = 1 + genre + _DRAWN_GENRES * draws.below(_DRAWN_FILMS // _DRAWN_GENRES, *shape)
    well = (genre[:, :, None] == liked[:, None, :]).any(axis=2) == (draws.uniform(*shape) < _DRAWN_CERTAINTY)
    people = numpy.repeat(numpy.arange(_DRAWN_PEOPLE), _DRAWN_RATINGS)
    stars = numpy.where(well.ravel(), 5.0, 2.0)
    ratings = _in_order(people, films.ravel(), stars, numpy.arange(people.size), genres)
    return _sets("synthetic-movielens", ratings, length, "synthetic-movielens")


def _length(subject: str, input_shape: tuple[int, ...] | None) -> int:
    shape = input_shape or INPUT_SHAPE
    if len(shape) != 1 or not 1 <= shape[0] <= LARGEST_LENGTH:
        raise BadData(
            f"{subject}: a history is a row of 1 to {LARGEST_LENGTH:,} films; the model takes {shape}.",
            hint="Use a model for histories of films, such as din.",
        )
    return shape[0]


def _in_order(
    people: numpy.ndarray, films: numpy.ndarray, stars: numpy.ndarray, times: numpy.ndarray, genres: numpy.ndarray
) -> Ratings:
    """Return ratings sorted by person, then time; those of the same second stay in the order of the file."""
    order = numpy.lexsort((times, people))
    _, numbers, counts = numpy.unique(people[order], return_inverse=True, return_counts=True)
    return Ratings(
        people=numbers.astype(numpy.int32),
        films=films[order].astype(numpy.int32),
        clicks=stars[order] >= CLICK_RATING,
        genres=genres.astype(numpy.int32),
        starts=numpy.concatenate(([0], numpy.cumsum(counts))),
    )


def _sets(name: str, ratings: Ratings, length: int, place: str) -> DataSets:
    places = numpy.delete(numpy.arange(len(ratings.films)), ratings.starts[:-1])  # before the first there is nothing
    if not len(places):
        raise BadData(f"{place}: nobody rated two films; from one, nothing can be foretold.", hint=_LAYOUT)
    _, tested = held_out([0] * (len(ratings.starts) - 1))
    is_tested = numpy.isin(ratings.people[places], numpy.array(tested, dtype=numpy.int32))
    test = ClickData(ratings, places[is_tested], length)
    return DataSets(
        name=name,
        train=ClickData(ratings, places[~is_tested], length),
        test=test if len(test) else None,
        num_classes=0,
        input_shape=(length,),
        classes=(),
        kind="movielens",
        model_options={"movies": len(ratings.genres) - 1, "genres": int(ratings.genres.max())},
    )


# Files


def _movies(file: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the ids of films in the order of the file, and the genre of each number; number 0 is no film."""
    rows = _movie_rows(file)
    if not rows:
        raise BadData(f"{file}: there is no film in it.", hint=_LAYOUT)
    ids: dict[int, None] = {}
    names = []
    for line, row in rows:
        if len(row) != len(_MOVIES_HEADER):
            raise BadData(f"{file}: line {line} has {len(row)} fields; {', '.join(_MOVIES_HEADER)} are 3.")
        if not row[0].isascii() or not row[0].isdigit() or len(row[0]) > 10 or int(row[0]) > LARGEST_ID:
            raise BadData(f"{file}: line {line}: '{row[0][:40]}' is not the number of a film.")
        if int(row[0]) in ids:
            raise BadData(f"{file}: line {line}: film {row[0]} is listed twice.")
        ids[int(row[0])] = None
        names.append(row[2].split("|", 1)[0].strip())
        if not 0 < len(names[-1]) <= _LONGEST_GENRE:
            raise BadData(f"{file}: line {line}: the first genre has {len(names[-1])} letters; 1 to 100 are needed.")
    movie_names = sorted(set(names))
    if len(movie_names) > LARGEST_GENRE_COUNT:
        raise BadData(f"{file}: has {len(movie_names)} genres; at most {LARGEST_GENRE_COUNT} are taken.")
    number = {name: place for place, name in enumerate(movie_names, start=1)}
    return numpy.array(list(ids), dtype=numpy.int64), numpy.array([0, *(number[name] for name in names)])


def _movie_rows(file: Path) -> list[tuple[int, list[str]]]:
    if file.suffix == ".dat":
        text = read_text(file, LARGEST_MOVIES_BYTES, "latin-1")
        return [(line, row.split("::")) for line, row in enumerate(text.split("\n"), start=1) if row.strip()]
    reader = csv.reader(io.StringIO(read_text(file, LARGEST_MOVIES_BYTES), newline=""), strict=True)
    try:
        header = next(reader, [])
        if tuple(header) != _MOVIES_HEADER:
            raise BadData(f"{file}: begins with '{','.join(header)[:80]}', not '{','.join(_MOVIES_HEADER)}'.")
        return [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise BadFile(f"{file}: line {reader.line_num} is not CSV: {error}.") from error


def _ratings(file: Path) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return person, film, stars and time of each line, read in blocks: twenty million lines are usual."""
    blocks = []
    line = 1
    try:
        size_bytes = file.stat().st_size
        if size_bytes > LARGEST_RATINGS_BYTES:
            allowed = format_bytes(LARGEST_RATINGS_BYTES)
            raise BadFile(f"{file}: has {format_bytes(size_bytes)}; at most {allowed} are read.")
        with open(file, "rb") as opened:
            if file.suffix == ".csv":
                header = opened.readline(_BLOCK_BYTES).decode("utf-8-sig", "replace").strip()
                if header != ",".join(_RATINGS_HEADER):
                    raise BadData(f"{file}: begins with '{header[:80]}', not '{','.join(_RATINGS_HEADER)}'.")
                line += 1
            unfinished = b""
            while content := opened.read(_BLOCK_BYTES):
                whole, newline, unfinished = (unfinished + content).rpartition(b"\n")
                blocks.append(_block(file, whole, line))
                line += whole.count(b"\n") + 1 if newline else 0
                if len(unfinished) > _BLOCK_BYTES // 2:
                    raise BadFile(f"{file}: line {line} is too long to be a rating.")
            blocks.append(_block(file, unfinished, line))
    except OSError as error:
        raise BadFile(f"{file}: cannot be read: {error.strerror or error}.") from error
    people, films, stars, times = (numpy.concatenate(part) for part in zip(*blocks))
    if not len(people):
        raise BadData(f"{file}: there is no rating in it.", hint=_LAYOUT)
    return people, films, stars, times


_Block = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]


def _block(file: Path, content: bytes, first_line: int) -> _Block:
    """Return the numbers of some lines, each within its limits."""
    if not content.strip():
        nothing = numpy.zeros(0)
        return nothing.astype(numpy.int32), nothing.astype(numpy.int32), nothing.astype(numpy.float32), nothing
    where = f"{file}: after line {first_line - 1}"
    try:
        text = (content.replace(b"::", b",") if file.suffix == ".dat" else content).decode("ascii")
        table = numpy.loadtxt(io.StringIO(text), delimiter=",", comments=None, ndmin=2)
    except ValueError as error:  # also what is not ASCII
        raise BadData(f"{where}: {str(error).split(';')[0][:200]}.", hint=f"Lines are {_line(file)}.") from error
    if table.shape[1] != len(_RATINGS_HEADER):
        raise BadData(f"{where}: lines have {table.shape[1]} numbers.", hint=f"Lines are {_line(file)}.")
    for column, (name, low, high) in enumerate(
        zip(_RATINGS_HEADER, (0, 0, 0.0, 0), (LARGEST_ID, LARGEST_ID, LARGEST_RATING, LARGEST_TIME))
    ):
        values = table[:, column]
        good = (values >= low) & (values <= high)  # a NaN is neither
        if name != "rating":
            good &= values == numpy.floor(values)
        if not good.all():
            bad = int(good.argmin())
            kind = "a number" if name == "rating" else "a whole number"
            raise BadData(
                f"{file}: the {name} of rating {bad + 1} after line {first_line - 1} is {values[bad]:g}; "
                f"it must be {kind} from {low:g} to {high:g}."
            )
    return (
        table[:, 0].astype(numpy.int32),
        table[:, 1].astype(numpy.int32),
        table[:, 2].astype(numpy.float32),
        table[:, 3].copy(),
    )


def _line(file: Path) -> str:
    return ("::" if file.suffix == ".dat" else ",").join(_RATINGS_HEADER)


def _numbered(ratings_file: Path, movies_file: Path, ids: numpy.ndarray, listed_ids: numpy.ndarray) -> numpy.ndarray:
    """Return film numbers, from 1, for film ids."""
    order = numpy.argsort(listed_ids)
    places = numpy.searchsorted(listed_ids[order], ids).clip(max=len(listed_ids) - 1)
    strange = listed_ids[order][places] != ids
    if strange.any():
        first = int(ids[int(strange.argmax())])
        raise BadData(
            f"{ratings_file}: {int(strange.sum()):,} ratings are of films that {movies_file.name} does not list, "
            f"such as {first}.",
            hint="Both files must be of the same release.",
        )
    numbers: numpy.ndarray = order[places] + 1
    return numbers
