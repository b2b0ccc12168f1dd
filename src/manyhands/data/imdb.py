"""Film reviews, for or against: the folder aclImdb (Maas et al., ACL 2011), and a stand-in of drawn words.

    aclImdb/train/pos/0_9.txt   a review each, in UTF-8     aclImdb/test/pos/...
    aclImdb/train/neg/0_3.txt                               aclImdb/test/neg/...

Words are numbered by how often the reviews that are trained on use them: 0 is padding, 1 a word that is not among
the 25,000 commonest, 2 the commonest. A sample is a review's first words, padded at its end.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from manyhands.data.data_sets import DataSets
from manyhands.data.drawn import Draws
from manyhands.data.plain_files import entries, has_any, read_text
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData
from manyhands.facts.units import format_bytes

INPUT_SHAPE = (256,)
CLASSES = ("neg", "pos")
PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
LARGEST_VOCABULARY = 25_000
LARGEST_REVIEW_BYTES = 1_000_000
LARGEST_REVIEW_COUNT = 1_000_000
LARGEST_TEXT_BYTES = 2 * 10**9
LARGEST_LENGTH = 100_000
LARGEST_TABLE_BYTES = 8 * 10**9
SEARCHED = (".", "aclImdb")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LINE_BREAK = "<br />"
_LAYOUT = "Lay it out as aclImdb: train/pos/*.txt and train/neg/*.txt, and the same in test/."
_DRAWN_REVIEWS = (4000, 1000)
_DRAWN_WORDS = 800
_TELLING_WORDS = 60
"""The number of words used mostly by one side; as many are used mostly by the other."""
_TELLING_SHARE = 0.12
_SEED = 2011


class TextData(Dataset[tuple[Tensor, Tensor]]):
    """A data set of rows of word numbers, each with its class."""

    def __init__(self, tokens: numpy.ndarray, labels: Sequence[int]) -> None:
        self.tokens = tokens
        self.labels = list(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.tokens[index].astype(numpy.int64)), torch.tensor(self.labels[index])


def imdb_root(path: Path) -> Path | None:
    """Return the folder that holds train/pos and train/neg with texts in them: `path` or aclImdb in it."""
    for root in (path / place for place in SEARCHED):
        if all((root / "train" / name).is_dir() and has_any(root / "train" / name, ".txt") for name in CLASSES):
            return root
    return None


def load_imdb(
    root: Path, *, input_shape: tuple[int, ...] | None = None, vocabulary: int = LARGEST_VOCABULARY
) -> DataSets:
    """Load the reviews of train/, and those of test/ to test on; where there is no test/, a fifth is held out."""
    length = _length(str(root), input_shape)
    reviews = _Reviews(length)
    train_labels = reviews.read(root / "train")
    test_labels = reviews.read(root / "test") if (root / "test").is_dir() else []
    table, words = reviews.table(len(train_labels), vocabulary)
    train = TextData(table[: len(train_labels)], train_labels)
    train_set: Dataset[object] = train
    test_set: Dataset[object] | None = TextData(table[len(train_labels) :], test_labels)
    if not test_labels:
        chosen, held_out_indices = held_out(train_labels)
        train_set, test_set = Subset(train, chosen), Subset(train, held_out_indices) if held_out_indices else None
    return _sets(root.resolve().name, train_set, test_set, length, words + FIRST_WORD)


def synthetic_imdb(*, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Return a stand-in: words drawn like those of a language, some of them used more by those for than by those
    against."""
    length = _length("synthetic-imdb", input_shape)
    parts = []
    for stream, count in enumerate(_DRAWN_REVIEWS):
        draws = Draws(_SEED, stream)
        labels = numpy.arange(count) % len(CLASSES)
        # Common words are far more common than rare ones: the logarithm of a rank is roughly uniform.
        common = numpy.floor((_DRAWN_WORDS + 1.0) ** draws.uniform(count, length)).astype(numpy.int64) - 1
        telling = _DRAWN_WORDS + draws.below(_TELLING_WORDS, count, length) + _TELLING_WORDS * labels[:, None]
        words = numpy.where(draws.uniform(count, length) < _TELLING_SHARE, telling, common) + FIRST_WORD
        lengths = length // 4 + draws.below(length - length // 4, count, 1) + 1
        words[numpy.arange(length) >= lengths] = PADDING
        parts.append(TextData(words.astype(numpy.int32), labels.tolist()))
    return _sets("synthetic-imdb", parts[0], parts[1], length, FIRST_WORD + _DRAWN_WORDS + 2 * _TELLING_WORDS)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; an apostrophe within a word belongs to it."""
    return _WORD.findall(text.replace(_LINE_BREAK, " ").lower())


class _Reviews:
    """Word numbers in the order in which words first appeared; renumbered when all have been counted."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._numbers: dict[str, int] = {}
        self._counts = array("q")
        self._tokens = array("i")
        self._ends = array("q", [0])
        self._text_bytes = 0

    def read(self, part: Path) -> list[int]:
        """Return the labels of the part's reviews, which are appended to those read before."""
        labels: list[int] = []
        counted = part.name == "train"
        for label, name in enumerate(CLASSES):
            files = [file for file in entries(part / name, most=LARGEST_REVIEW_COUNT) if file.suffix == ".txt"]
            if not files:
                raise BadData(f"{part / name}: there is no review in it.", hint=_LAYOUT)
            table_bytes = (len(self._ends) + len(files)) * self._length * 4
            if table_bytes > LARGEST_TABLE_BYTES:
                raise BadData(
                    f"{part}: its reviews of {self._length} words take {format_bytes(table_bytes)}; "
                    f"at most {format_bytes(LARGEST_TABLE_BYTES)} are kept."
                )
            for file in files:
                self._add(file, counted)
            labels += [label] * len(files)
        return labels

    def _add(self, file: Path, counted: bool) -> None:
        text = read_text(file, LARGEST_REVIEW_BYTES)
        self._text_bytes += len(text)
        if self._text_bytes > LARGEST_TEXT_BYTES:
            raise BadData(f"{file}: with it the reviews are longer than {format_bytes(LARGEST_TEXT_BYTES)}.")
        numbers = [self._number(word, counted) for word in words_of(text)]
        if counted:
            for number in numbers:
                self._counts[number] += 1
        self._tokens.extend(numbers[: self._length])
        self._ends.append(len(self._tokens))

    def _number(self, word: str, counted: bool) -> int:
        number = self._numbers.get(word, -1)
        if number < 0 and counted:
            number = self._numbers[word] = len(self._numbers)
            self._counts.append(0)
        return number

    def table(self, train: int, vocabulary: int) -> tuple[numpy.ndarray, int]:
        """Return one row for each review, and how many words have a number."""
        if not self._numbers:
            raise BadData("There is no word in any of the reviews.", hint=_LAYOUT)
        names = sorted(self._numbers, key=lambda word: (-self._counts[self._numbers[word]], word))[:vocabulary]
        renumbered = numpy.full(len(self._numbers) + 1, UNKNOWN, dtype=numpy.int32)  # the last: never trained on
        renumbered[[self._numbers[name] for name in names]] = numpy.arange(len(names)) + FIRST_WORD
        tokens = renumbered[numpy.asarray(self._tokens, dtype=numpy.int64)]
        table = numpy.zeros((len(self._ends) - 1, self._length), dtype=numpy.int32)
        for row, (start, end) in enumerate(zip(self._ends, self._ends[1:])):
            table[row, : end - start] = tokens[start:end]
        return table, len(names)


def _length(subject: str, input_shape: tuple[int, ...] | None) -> int:
    shape = input_shape or INPUT_SHAPE
    if len(shape) != 1 or not 1 <= shape[0] <= LARGEST_LENGTH:
        raise BadData(
            f"{subject}: a review is a row of 1 to {LARGEST_LENGTH:,} words; the model takes {shape}.",
            hint="Use a model for texts, such as bilstm.",
        )
    return shape[0]


def _sets(name: str, train: Dataset[object], test: Dataset[object] | None, length: int, vocabulary: int) -> DataSets:
    return DataSets(
        name=name,
        train=train,
        test=test,
        num_classes=len(CLASSES),
        input_shape=(length,),
        classes=CLASSES,
        kind="imdb",
        model_options={"vocabulary": vocabulary},
    )
