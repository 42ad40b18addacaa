"""Files that the name of a dataset stands for: one, or all that a pattern matches, compressed or not.

Invariant: the same files always come in the same order. Does not own: turning files into datasets (`loading`).
"""

import glob
import lzma
import re
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

import structlog

from rollgrad.domain.errors import DataError

log = structlog.get_logger(__name__)

JSON_LINES = (".jsonl", ".ndjson")
"""Suffixes of files with an object in each line."""
FILE_FORMATS = {
    **dict.fromkeys((".json", *JSON_LINES), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Readers by the suffixes of files."""
TEXTS = {suffix for suffix, kind in FILE_FORMATS.items() if kind in ("json", "csv")}
"""Suffixes of files that may be compressed as a whole."""
COMPRESSED = (".gz", ".bz2", ".zst", ".xz")
"""Suffixes that compression adds."""
UNREADABLE = (OSError, EOFError, lzma.LZMAError)
"""Errors of a file that is out of reach, or whose compression is damaged."""
_MARKS = re.compile(r"[*?[]")


def check_address(name: str) -> None:
    """Checks that a dataset is no address.

    Raises:
        DataError: it is one.
    """
    if "://" in name:
        raise DataError(
            f"The dataset {name} is an address, but datasets are files and folders of this machine, or names on the "
            "Hugging Face hub: download it, and name the file."
        )


def check_name(name: str) -> None:
    """Checks that the file system can tell whether a dataset is a file or a folder.

    Raises:
        DataError: it cannot: the name is too long, is an address, or is of a place that may not be looked into.
    """
    check_address(name)
    try:
        data_files(name)
        Path(name).exists()
    except OSError as error:
        raise DataError(f"The dataset {name} cannot be read ({error.strerror or error}): check the path.") from error


def split_configuration(name: str) -> tuple[str, str | None]:
    """Returns a dataset's name and its configuration, if it has one.

    >>> split_configuration("openai/gsm8k:main")
    ('openai/gsm8k', 'main')
    >>> split_configuration("openai/gsm8k:main@data")
    ('openai/gsm8k@data', 'main')
    """
    place, at, data_dir = name.partition("@")
    hub_name, colon, configuration = place.rpartition(":")
    return (f"{hub_name}{at}{data_dir}", configuration) if colon else (name, None)


def file_format(path: Path) -> str | None:
    """Returns the suffix that names a file's format, None if it is none that is read.

    >>> file_format(Path("a.parquet")), file_format(Path("a.jsonl.gz")), file_format(Path("a.tar.gz"))
    ('.parquet', '.jsonl', None)
    """
    if path.suffix in COMPRESSED:
        inner = Path(path.stem).suffix
        return inner if inner in TEXTS else None
    return path.suffix if path.suffix in FILE_FORMATS else None


def is_pattern(name: str) -> bool:
    """Returns whether a name is a pattern of files, as a shell has them (`*`, `?`, `[0-9]`, `**`)."""
    return _MARKS.search(name) is not None and not Path(name).exists()


def data_files(name: str) -> list[Path] | None:
    """Returns the files of a dataset, those of a pattern by their names; None where it is a folder or a hub name.

    Raises:
        DataError: a pattern matches no file, or one of a format that is not read.
    """
    if not is_pattern(name):
        return [Path(name)] if file_format(Path(name)) else None
    files = sorted(path for path in map(Path, glob.glob(name, recursive=True)) if path.is_file())
    if not files:
        raise DataError(f"The dataset {name} is a pattern that matches no file: check it.")
    others = [path for path in files if file_format(path) is None]
    if others:
        raise DataError(
            f"The dataset {name} is a pattern that matches {len(others)} of {len(files)} files which do not end in "
            f"{formats()}, such as {others[0]}: narrow it."
        )
    return files


def are_json_lines(files: Sequence[Path]) -> bool:
    """Returns whether each file has an object in each line."""
    return all(file_format(path) in JSON_LINES for path in files)


def note_files(name: str, files: Sequence[Path]) -> None:
    """Logs which files a pattern matches."""
    if is_pattern(name):
        log.info("files of a dataset", pattern=name, files=len(files), first=str(files[0]), last=str(files[-1]))


def formats() -> str:
    """Returns the suffixes that are read, for people."""
    return f"{', '.join(FILE_FORMATS)} (of texts also with {', '.join(COMPRESSED)} behind it)"


def check_other_file(name: str) -> None:
    """Checks that a dataset is no file of a format that is not read.

    Raises:
        DataError: it is one.
    """
    if Path(name).is_file():
        raise DataError(
            f"The dataset {name} is a file whose name does not end in {formats()}: unpack it, or write its rows in one "
            "of these formats."
        )


def stem(name: str) -> str:
    """Returns the name of a file or a pattern without its suffixes, and without what a pattern leaves open.

    >>> stem("data/train-*.jsonl.gz"), stem("data/*.parquet"), stem("a.b.csv")
    ('train', 'data', 'a.b')
    """
    path = Path(name)
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    if not is_pattern(name):
        return path.stem
    fixed = [_MARKS.split(part)[0].strip("-._ ") for part in (path.stem, *(parent.name for parent in path.parents))]
    return next(filter(None, fixed), "") or Path.cwd().name


def opened(path: Path) -> BinaryIO:
    """Returns the content of a file to read, decompressed.

    Raises:
        OSError: there is no such file.
    """
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    import pyarrow  # tells a file that was cut off, as zstandard does not

    return BufferedReader(pyarrow.input_stream(str(path), compression="detect"))
