"""Reading of datasets from files, saved folders and the Hugging Face hub, alone or mixed.

Invariant: a dataset that cannot be read is one `DataError` sentence that names it. Does not own: the meaning of
columns.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import structlog

from rollgrad.adapters.checkpoints.hub import hub_answers
from rollgrad.adapters.data.datasets.files import (
    FILE_FORMATS,
    JSON_LINES,
    check_name,
    check_other_file,
    data_files,
    file_format,
    is_pattern,
    note_files,
    split_configuration,
    stem,
)
from rollgrad.adapters.data.datasets.several import aligned, distinct_names, mixed, shares, sliced
from rollgrad.adapters.data.datasets.text_files import (
    broken_line,
    check_bare_rows,
    check_json_rows,
    read_csv,
    whole_numbers,
)
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import DataError
from rollgrad.domain.splits import parse_split

if TYPE_CHECKING:
    import datasets

    from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder

log = structlog.get_logger(__name__)

SAVED = ("state.json", "dataset_dict.json")
"""Files in folders that `save_to_disk` has written."""
_NO_OPTIONS = ("name", "version", "description", "data_dir", "data_files", "features", "sep", "delimiter")
"""Parts of what `datasets` knows of a folder that do not change how a row is read here, where separators are found."""
_MOST_FILES = 10_000
"""Files and folders below a folder of data at most: all of them are looked at."""
_EMPTY = ("corresponds to no data", "BatchSize must be greater than 0, got 0")
"""Sentences of `datasets` about a header or list without rows, and about a Parquet file."""
DECODED = ("Image", "Audio", "Video")
"""Features whose values are files, which are large when they are decoded."""


def load_dataset(
    spec: str,
    *,
    split: str,
    probs: tuple[float, ...] | None,
    seed: int,
    max_samples: int | None,
    split_flag: str = "--data.prompt_split",
    evenly: bool = False,
    builder: "PromptBuilder | None" = None,
) -> "datasets.Dataset":
    """Returns the rows of one or several comma-separated datasets, each row with its `datasource`.

    A dataset is a file (`FILE_FORMATS`), a pattern of files, a folder, or a hub name. Folders and hub names may be
    followed by `:configuration`, and hub names by `@data_dir`. verl's column `data_source` names the origin. `split` is
    read if it exists, else the only one of a dataset that has one; a slice is one of each dataset. With `probs` rows
    are drawn from the datasets with these probabilities until each has been read to its end (`seed` fixes the draws);
    without it datasets follow one another. `max_samples` keeps the first rows, with `evenly` as many of each dataset
    as of the others. `builder` finds the columns of prompts and labels, which may be called otherwise in each dataset.

    Raises:
        DataError: a dataset is missing, malformed, empty or out of reach.
    """
    import datasets

    datasets.disable_progress_bars()
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise DataError("No dataset is set: --data.prompt_dataset needs a file, a saved folder or a hub name.")
    for name in names:
        check_name(name)
    parts, chosen = [], parse_split(split)
    called = distinct_names(names, [origin(name) for name in names])
    for name, origin_name in zip(names, called, strict=True):
        with foreign_code(lambda words, name=name: DataError(f"The dataset {name[:200]} cannot be used: {words}")):  # type: ignore[misc]
            rows = sliced(_read(name, chosen.name, split_flag), chosen, name, split_flag)
            parts.append(_with_datasource(rows, origin_name))
    if len(parts) > 1 and builder is not None:
        parts = aligned(parts, called, builder.columns(parts[0][0], called[0]), builder.found)
    if len(parts) > 1 and evenly:
        sizes = shares([len(part) for part in parts], max_samples)
        parts = [part.select(range(size)) for part, size in zip(parts, sizes, strict=True) if size]
    merged = parts[0] if len(parts) == 1 else mixed(parts, names, probs, seed)
    return merged if max_samples is None else merged.select(range(min(max_samples, len(merged))))


def origin(name: str) -> str:
    """Returns the name of a dataset in metrics: the stem of a file, else its name without data directory."""
    if is_pattern(name) or file_format(Path(name)):
        return stem(name)
    if Path(name).is_dir():
        return Path(name).name
    place, _ = split_configuration(name)
    return Path(place).name if Path(place).is_dir() else place.partition("@")[0]


def _with_datasource(dataset: "datasets.Dataset", origin: str) -> "datasets.Dataset":
    if "datasource" in dataset.column_names:
        return dataset
    given = dataset["data_source"][:] if "data_source" in dataset.column_names else [None] * len(dataset)
    return dataset.add_column("datasource", [origin if source is None else str(source) for source in given])


def _read(name: str, split: str, split_flag: str) -> "datasets.Dataset":
    """Reads one split of one dataset."""
    files = data_files(name)
    if files is not None:
        return _read_files(files, name)
    folder, configuration = (name, None) if Path(name).is_dir() else split_configuration(name)
    if Path(folder).is_dir():
        listed, features = _listed(Path(folder), configuration)
        if listed is not None:
            read = _read_files(_choose_split(listed, name, split, split_flag), name)
            return read if features is None else read.cast(features)
        loaded = _read_folder(Path(folder), configuration)
    elif name.startswith((".", "/", "~")):
        check_other_file(name)
        raise DataError(f"The dataset {name} does not exist: check the path.")
    else:
        loaded = _read_hub(name)
    rows = _choose_split(loaded, name, split, split_flag)
    if len(rows) == 0:
        raise _no_rows(name)
    if not _is_saved(Path(folder)):
        _note_pandas(rows, name)
    return rows


def _note_pandas(rows: Any, name: str) -> None:
    """Logs that pandas reads the CSV of a dataset, on the hub or in a folder whose README.md says how."""
    if rows.info.builder_name == "csv":
        log.info(
            "pandas reads this CSV, to which NA and None are no values, and 007 is 7: download it, and name its files, "
            "to have them as they are",
            dataset=name,
        )


def _read_files(files: Sequence[Path], name: str) -> "datasets.Dataset":
    """Reads the files of a dataset, one after the other: each may lack columns that others have, or rows.

    Raises:
        DataError: one cannot be read, or none has rows.
    """
    note_files(name, files)
    parts, without_rows = [], []
    for path in files:
        try:
            rows = _read_file(path)
            if not len(rows):
                raise _no_rows(path)
            parts.append(rows)
        except _NoRowsError as error:
            without_rows.append(error)
    if not parts:
        raise without_rows[0] if len(files) == 1 else _no_rows(name)
    if without_rows:
        log.warning(
            "files of a dataset have no rows", pattern=name, files=len(without_rows), first=str(without_rows[0])
        )
    return parts[0] if len(parts) == 1 else mixed(parts, [name], None, 0)


def _read_file(path: Path) -> "datasets.Dataset":
    import datasets

    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise DataError(f"The dataset file {path} {what}: check the path.")
    if path.stat().st_size == 0:
        raise _no_rows(path)
    suffix = file_format(path)
    assert suffix is not None
    kind = FILE_FORMATS[suffix]
    try:
        if kind == "json":
            check_json_rows(path)
        if kind == "arrow":
            return datasets.Dataset.from_file(str(path))
        if kind == "csv":
            return whole_numbers(read_csv(path))
        with _quietly():
            rows = whole_numbers(datasets.load_dataset(kind, data_files=str(path), split="train"))
        if suffix == ".json":
            check_bare_rows(rows, path)
        return rows
    except DataError:
        raise
    except Exception as error:  # of pyarrow, pandas, json, by the file's format
        if any(words in str(_root(error)) for words in _EMPTY):
            raise _no_rows(path) from error
        place = broken_line(path) if suffix in JSON_LINES else None
        if isinstance(_root(error), UnicodeDecodeError):
            place = f"it is no UTF-8 ({_root(error)}): save it as UTF-8"
        raise DataError(
            f"The dataset file {path} cannot be read as {suffix[1:]}: {place or _one_line(_root(error))}"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps `datasets` from writing of an error what the error itself says."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


class _NoRowsError(DataError):
    """A dataset, or one of its files, is without a row."""


def _no_rows(name: str | Path) -> DataError:
    """Returns the error of a dataset without a row."""
    return _NoRowsError(f"The dataset {name} has no rows: at least one is needed.")


def _listed(folder: Path, configuration: str | None) -> "tuple[dict[str, list[Path]] | None, datasets.Features | None]":
    """Returns the files of each split of a folder, and the types of columns that its README.md sets; None for files if
    it is a saved dataset, has files that only `datasets` reads, or a README.md that says how."""
    import datasets

    if _is_saved(folder):
        return None, None
    _check_size(folder)
    try:
        with _quietly(), TemporaryDirectory() as empty:  # the usual cache may have types that pandas has found
            builder = datasets.load_dataset_builder(str(folder), configuration, cache_dir=empty)
        options = {**vars(builder.config), **dict.fromkeys(_NO_OPTIONS)}
        asked = options != {**vars(type(builder.config)()), **dict.fromkeys(_NO_OPTIONS)}
        listed = {str(split): sorted(map(Path, files)) for split, files in builder.config.data_files.items()}
    except Exception:  # it is told when the folder is read
        return None, None
    if asked or not all(file_format(path) for files in listed.values() for path in files):
        return None, None
    return listed, builder.info.features


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _read_folder(path: Path, configuration: str | None) -> Any:
    import datasets

    saved = _is_saved(path)
    if saved and configuration is not None:
        raise DataError(
            f"The dataset {path}:{configuration} names a configuration, which a saved dataset has not: leave "
            f":{configuration} out."
        )
    if not saved:
        _check_size(path)
    try:
        return datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), configuration)
    except Exception as error:  # by the files' format
        _refuse_configuration(str(path), configuration, error)
        raise DataError(f"The folder {path} cannot be read as a saved dataset: {_one_line(_root(error))}") from error


def _check_size(path: Path) -> None:
    """Refuses a folder that is not one of data, as a working directory is: everything below it would be read.

    Raises:
        DataError: it holds too much.
    """
    found = 0
    for _, folders, files in os.walk(path):
        found += len(folders) + len(files)
        if found > _MOST_FILES:
            raise DataError(
                f"The dataset {path} is a folder with more than {_MOST_FILES} files and folders below it, all of which "
                "would be read as data: name the folder that holds the data alone, or a file of it."
            )


def stream_hub(name: str, split: str, split_flag: str) -> "Iterator[Any]":
    """Yields the rows of a hub dataset as the hub sends them, of one with pictures or sounds functions that decode
    them; nothing is kept on the disk.

    Raises:
        DataError: it is missing or out of reach, or a row cannot be read.
    """
    rows = _choose_split(_read_hub(name, streaming=True), name, split, split_flag)
    _note_pandas(rows, name)
    with foreign_code(lambda words: DataError(f"The dataset {name[:200]} cannot be read further: {words}")):
        features = rows.features
        if any(f"{kind}(" in repr(features) for kind in DECODED):
            yield from (partial(features.decode_example, row) for row in rows.decode(False))
        else:
            yield from rows


def _read_hub(name: str, *, streaming: bool = False) -> Any:
    import datasets

    place, configuration = split_configuration(name)
    hub_name, _, data_dir = place.partition("@")
    check_other_file(name)
    try:
        with _short_hub_wait():
            return datasets.load_dataset(hub_name, configuration, data_dir=data_dir or None, streaming=streaming)
    except ConnectionError as error:
        raise DataError(
            f"The dataset {hub_name} is neither a local file or folder nor in the local cache, and the Hugging Face "
            "hub cannot be reached: check the name, or go online."
        ) from error
    except Exception as error:  # of the hub, or by the files' format
        _refuse_configuration(hub_name, configuration, error)
        raise DataError(f"The hub dataset {name} cannot be loaded: {_one_line(_root(error))}") from error


def _refuse_configuration(name: str, configuration: str | None, error: Exception) -> None:
    """Raises an error that lists the configurations, if `datasets` failed because one has to be chosen.

    Raises:
        DataError: a configuration is missing, or is none of the dataset's.
    """
    listed = re.search(r"available configs: \[(.*?)\]|Available: \[(.*?)\]", str(error), re.DOTALL)
    if listed is None:
        return
    known = re.findall(r"'([^']+)'", listed.group())
    given = "has several configurations" if configuration is None else f"has no configuration {configuration!r}"
    raise DataError(
        f"The dataset {name} {given}: name one of {', '.join(known)} behind a colon, such as {name}:{known[0]}."
    ) from error


@contextmanager
def _short_hub_wait() -> Iterator[None]:
    """Reads only the local cache inside the block if the hub does not answer, instead of half a minute of retries."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _choose_split(loaded: Any, name: str, split: str, split_flag: str) -> "datasets.Dataset":
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split in loaded or len(loaded) == 1:
        return loaded.get(split, next(iter(loaded.values())))
    raise DataError(
        f"The dataset {name} has no split {split!r}: set {split_flag} (or --eval.split) to one of {', '.join(loaded)}."
    )


def _root(error: BaseException) -> BaseException:
    """Returns the first cause of an error: readers wrap the line that says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    import datasets

    cache, words = Path(datasets.config.HF_DATASETS_CACHE), " ".join(f"{type(error).__name__}: {error}".split())
    unmade = isinstance(error, OSError) and cache.is_relative_to(str(error.filename))  # HOME=/nonexistent, say
    if unmade or getattr(error, "errno", None) in (errno.EROFS, errno.ENOSPC) or str(cache) in words:
        return f"{words}: it is kept in the cache of datasets, so set HF_HOME to a directory with room to write"
    return words
