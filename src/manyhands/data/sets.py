"""Data sets to train on: by name, from a folder, or a .npz file. Listing names does not import torch.

A folder is recognised by its content: reviews (aclImdb), film ratings (MovieLens), rendered chairs, CIFAR-10's binary
files, pictures with boxes (Pascal VOC); else it is one with a sub-folder of pictures per class.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from manyhands.data.data_sets import DataSets
from manyhands.facts.errors import BadFile, UnknownName, unknown

NAMES: tuple[str, ...] = ("digits",)
STAND_INS: tuple[str, ...] = ("synthetic-cifar10", "synthetic-imdb", "synthetic-movielens", "synthetic-3dchair")
"""Drawn data sets, for where the real ones are not available: a model can learn from them, but its accuracy means
nothing."""
_ABSENT = {
    "cifar10": "the folder cifar-10-batches-bin",
    "imdb": "the folder aclImdb",
    "movielens": "a folder such as ml-20m",
    "3dchair": "the folder rendered_chairs",
}
_OR_ELSE = "A folder of pictures or a .npz file may be given too."
_UNPACKING = {
    ".tar.gz": "tar xzf",
    ".tgz": "tar xzf",
    ".tar.bz2": "tar xjf",
    ".tar.xz": "tar xJf",
    ".tar": "tar xf",
    ".zip": "unzip",
}
_CHOSEN = re.compile(r"(.+):(\d[\d,-]*)")
"""A data set and some of its classes: digits:0-4."""


def load(name_or_path: str | Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load a data set by its name, a folder in one of the layouts above, or a .npz file.

    digits:0-4, or PATH:0,2,5-7, has only these classes, numbered anew in that order.

    `input_shape` is what the model takes for one sample, without the batch: pictures are resized to it. A name takes
    precedence over a folder of that name; ./digits is the folder.
    """
    name = str(name_or_path)
    chosen = _CHOSEN.fullmatch(name)
    if chosen is not None and not Path(name).exists():
        from manyhands.data.classes import only, parse_classes

        return only(load(chosen.group(1), input_shape=input_shape), parse_classes(chosen.group(2)))
    if name in (*NAMES, *STAND_INS):
        return _named(name, input_shape)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _folder(path, input_shape)
    if path.suffix.lower() == ".npz":
        from manyhands.data.arrays import load_arrays
        from manyhands.data.cifar import is_jpeg_copy, load_jpeg_copy

        if is_jpeg_copy(path):
            return load_jpeg_copy(path, input_shape=input_shape)
        return load_arrays(path, input_shape=input_shape)
    if path.exists():
        raise _not_data(path)
    if len(path.parts) > 1:
        raise BadFile(
            f"{path}: there is no such file or folder.",
            hint=f"Data sets with a name: {', '.join((*NAMES, *STAND_INS))}.",
        )
    if name in _ABSENT:
        raise UnknownName(
            f"The data set '{name}' does not come with manyhands.",
            hint=f"Give its path, {_ABSENT[name]}; or synthetic-{name}, a drawn stand-in.",
        )
    error = unknown("data set", name, (*NAMES, *STAND_INS))
    raise UnknownName(error.message, hint=f"{error.hint} {_OR_ELSE}".strip())


def _not_data(path: Path) -> BadFile:
    """Return the error for a file that is no .npz file."""
    suffix = next((ending for ending in _UNPACKING if path.name.lower().endswith(ending)), "")
    if not suffix:
        return BadFile(
            f"{path}: '{path.suffix}' is not the suffix of a data file.", hint="Give a .npz file or a folder of data."
        )
    file, folder = shlex.quote(str(path)), shlex.quote(path.name[: -len(suffix)])
    into = "-d" if suffix == ".zip" else "-C"
    return BadFile(
        f"{path}: is a packed archive, not a data file.",
        hint=f"Unpack it first and give the folder: mkdir -p {folder} && {_UNPACKING[suffix]} {file} {into} {folder}",
    )


def _named(name: str, input_shape: tuple[int, ...] | None) -> DataSets:
    if name == "synthetic-cifar10":
        from manyhands.data.cifar import synthetic_cifar10 as load_it
    elif name == "synthetic-imdb":
        from manyhands.data.imdb import synthetic_imdb as load_it
    elif name == "synthetic-movielens":
        from manyhands.data.movielens import synthetic_movielens as load_it
    elif name == "synthetic-3dchair":
        from manyhands.data.chairs import synthetic_chairs as load_it
    else:
        from manyhands.data.digits import load_digits as load_it
    return load_it(input_shape=input_shape)


def _folder(path: Path, input_shape: tuple[int, ...] | None) -> DataSets:
    from manyhands.data.chairs import chairs_root, load_chairs
    from manyhands.data.cifar import cifar_root, load_cifar
    from manyhands.data.detection import detection_root, load_detection
    from manyhands.data.imdb import imdb_root, load_imdb
    from manyhands.data.movielens import load_movielens, movielens_root
    from manyhands.data.pictures import load_folder

    for find, load_it in (
        (imdb_root, load_imdb),
        (movielens_root, load_movielens),
        (cifar_root, load_cifar),
        (chairs_root, load_chairs),
        (detection_root, load_detection),
    ):
        root = find(path)
        if root is not None:
            return load_it(root, input_shape=input_shape)
    return load_folder(path, input_shape=input_shape)
