"""Several datasets as one: their names in metrics, how many rows are taken of each, and columns that fit together.

Does not own: reading a dataset (`loading`), nor which columns hold prompts and labels (`columns`).
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgrad.adapters.data.datasets.columns import Columns, value_at
from rollgrad.domain.errors import DataError
from rollgrad.domain.splits import Split

if TYPE_CHECKING:
    import datasets

_TEXTS = ("string", "large_string")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
_FLOATS = ("float16", "float32", "float64")

FindColumns = Callable[[Mapping[str, Any], str], Columns]
"""Function from a row of a dataset, and its name, to the columns of prompts and labels."""


def distinct_names(places: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the `names` of datasets in metrics. Those that are called alike have the directories before that make
    them differ, or else the ends of their files or their configurations behind; one that is listed twice has one name.

    >>> distinct_names(["math/test.jsonl", "code/test.jsonl", "chat.jsonl"], ["test", "test", "chat"])
    ['math-test', 'code-test', 'chat']
    >>> distinct_names(["math/a/*", "code/a/*"], ["a", "a"]), distinct_names(["a.csv", "a.jsonl"], ["a", "a"])
    (['math-a', 'code-a'], ['a.csv', 'a.jsonl'])
    >>> distinct_names(["me/sums:easy", "me/sums:hard"], ["me/sums", "me/sums"])
    ['sums:easy', 'sums:hard']

    Raises:
        DataError: two would have one name.
    """
    paths = [Path(os.path.normpath(Path(place).absolute())) for place in places]
    found = dict[Path, str]()
    for name in dict.fromkeys(names):
        alike = [path for path in dict.fromkeys(paths) if names[paths.index(path)] == name]
        most = max(len(path.parts) for path in alike)
        forms = ([_longer(path, name, by, own=own) for path in alike] for own in (False, True) for by in range(most))
        taken = {*names} - {name} | {*found.values()}
        called = next((form for form in forms if len({*form}) == len(form) and not taken & {*form}), None)
        if called is None:
            raise DataError(
                f"The datasets {', '.join(map(str, alike))} would be called alike in metrics ({name}): rename one of "
                "them, or give its rows a column datasource."
            )
        found |= zip(alike, called, strict=True)
    return [found[path] for path in paths]


def _longer(path: Path, name: str, directories: int, *, own: bool) -> str:
    """Returns the name of a dataset, or if `own` that of its file, with those of its last `directories` before."""
    place = path if own else next((each for each in (path, *path.parents) if name in each.name), path)
    before = place.parent.parts[1:][-directories:] if directories else ()
    return "-".join((*before, path.name if own else name))


def shares(sizes: Sequence[int], most: int | None) -> list[int]:
    """Returns how many rows are taken of each dataset, so that they are `most` together, and as even as sizes allow.

    >>> shares([10, 2, 10], 9), shares([3, 4], None)
    ([4, 2, 3], [3, 4])
    """
    if most is None:
        return list(sizes)
    taken = [0] * len(sizes)
    left = most
    for number, part in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        taken[part] = min(sizes[part], math.ceil(left / (len(sizes) - number)))
        left -= taken[part]
    return taken


def interleaved(
    sizes: Sequence[int], probs: tuple[float, ...] | None, seed: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the dataset and the row of each place of a mixture."""
    import numpy

    if probs is None:
        of = numpy.repeat(numpy.arange(len(sizes)), sizes)
        return of.tolist(), numpy.concatenate([numpy.arange(size) for size in sizes]).tolist()
    generator = numpy.random.default_rng(seed)
    drawn: list[int] = []
    counts = [0] * len(sizes)
    while any(count < size for count, size in zip(counts, sizes, strict=True)):
        for source in generator.choice(len(sizes), size=1024, p=numpy.asarray(probs) / sum(probs)).tolist():
            drawn.append(source)
            counts[source] += 1
            if all(count >= size for count, size in zip(counts, sizes, strict=True)):
                break
    taken = [0] * len(sizes)
    rows = []
    for source in drawn:
        rows.append(taken[source] % sizes[source])
        taken[source] += 1
    return drawn, rows


def mixed(
    parts: "Sequence[datasets.Dataset]", names: Sequence[str], probs: tuple[float, ...] | None, seed: int
) -> "datasets.Dataset":
    """Returns the rows of datasets one after the other, or drawn by `probs`; a column that is text in one of them and
    numbers in another becomes text, and one of numbers of different sizes has the larger ones.

    Raises:
        DataError: a column has different types that are not so.
    """
    import datasets

    parts = _alike(parts)
    try:
        if probs is None:
            return datasets.concatenate_datasets(list(parts))
        return datasets.interleave_datasets(
            list(parts), probabilities=list(probs), seed=seed, stopping_strategy="all_exhausted"
        )
    except (ValueError, TypeError) as error:
        raise DataError(
            f"The datasets {', '.join(names)} cannot be mixed, because a column has a different type in each: "
            f"{' '.join(f'{type(error).__name__}: {error}'.split())}"
        ) from error


def _alike(parts: "Sequence[datasets.Dataset]") -> "list[datasets.Dataset]":
    """Returns datasets in which columns are texts that are numbers, or texts, in all of them, and numbers of one size
    that are whole in some of them alone."""
    from datasets import Value

    kinds: dict[str, set[str]] = {}
    for part in parts:
        for name, feature in part.features.items():
            kinds.setdefault(name, set()).add(feature.dtype if isinstance(feature, Value) else "")
    wanted = {name: kind for name, found in kinds.items() if len(found) > 1 and (kind := _common(found))}
    alike = []
    for part in parts:
        for name in wanted.keys() & set(part.column_names):
            part = part.cast_column(name, Value(wanted[name]))
        alike.append(part)
    return alike


def _common(kinds: Set[str]) -> str | None:
    """Returns the kind that can hold values of different kinds; None if there is none, or nothing is to be done."""
    if kinds & {*_TEXTS} and "" not in kinds:
        return "string"
    if kinds <= {*_WHOLE, *_FLOATS}:
        return "float64" if kinds & {*_FLOATS} else "int64"
    return None


def aligned(
    parts: "Sequence[datasets.Dataset]", names: Sequence[str], first: Columns, find: FindColumns
) -> "list[datasets.Dataset]":
    """Returns datasets that all have their prompts and labels in the columns `first`, those of the first of them; in
    the others `find` tells which they are, and they are kept under their own names, too."""
    return [
        part if number == 0 else _with_columns(part, first, find(part[0], names[number]))
        for number, part in enumerate(parts)
    ]


def _with_columns(part: "datasets.Dataset", wanted: Columns, own: Columns) -> "datasets.Dataset":
    for name, source in ((wanted.prompt, own.prompt), (wanted.label, own.label)):
        if name is None or source is None or name == source or name in part.column_names:
            continue
        read = part.select_columns([source if source in part.column_names else source.partition(".")[0]])
        part = part.add_column(name, [value_at(row, source) for row in read])
    return part


def sliced(rows: "datasets.Dataset", chosen: Split, name: str, split_flag: str) -> "datasets.Dataset":
    """Returns the rows of the dataset `name` that a split asks for; `split_flag` sets it.

    Raises:
        DataError: there are none.
    """
    return rows.select(chosen.rows(len(rows), name, split_flag)) if chosen.sliced else rows
