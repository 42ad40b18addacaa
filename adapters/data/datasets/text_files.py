"""Files of rows that people write: CSV and JSON, and what is odd in them.

Does not own: turning files into datasets (`loading`).
"""

import csv
import json
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgrad.adapters.data.datasets.columns import SPEAKERS
from rollgrad.adapters.data.datasets.files import JSON_LINES, UNREADABLE, file_format, opened
from rollgrad.adapters.system.plain_values import json_fault
from rollgrad.domain.errors import DataError

if TYPE_CHECKING:
    import datasets

SEPARATORS = (";", "\t", "|")
"""Marks that separate columns where commas do not, as spreadsheets write them."""
EXACT = 2**53
"""Size of whole numbers up to which floats have them all."""
LONGEST_ROW = 2**26
"""Bytes of a row of CSV at most."""
_HEADER_BYTES = 65536
"""Bytes of a file at most in which its first line ends."""
_TRUTHS = ("True", "False", "true", "false", "TRUE", "FALSE")
_WHOLE = r"^-?(0|[1-9][0-9]*)$"
_NUMBER = r"^[+-]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?$"
"""Numbers as CSV has them; what begins with more zeros, such as 007, is a text."""


def separator(path: Path) -> str:
    """Returns what separates the columns of a file: a comma, unless its first line has none but another separator."""
    with opened(path) as file:
        header = file.readline(_HEADER_BYTES).decode(errors="replace")
    return "," if "," in header else next((each for each in SEPARATORS if each in header), ",")


def read_csv(path: Path) -> "datasets.Dataset":
    """Returns the rows of a file of CSV. An empty field alone is no value (pandas takes the words None, null and NA for
    one, too); a column is of booleans or numbers where all its values are.

    Raises:
        DataError: a row has more or fewer fields than the first line, or quotes that do not end.
        UnicodeDecodeError: it is no UTF-8.
    """
    import datasets
    import pyarrow
    from pyarrow import csv as arrow

    mark = separator(path)
    names = _checked_names(path, mark)
    with opened(path) as file:
        table = arrow.read_csv(
            file,
            read_options=arrow.ReadOptions(block_size=LONGEST_ROW),
            parse_options=arrow.ParseOptions(delimiter=mark, newlines_in_values=True),
            convert_options=arrow.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), null_values=[""], strings_can_be_null=True
            ),
        )
    return datasets.Dataset(pyarrow.table([_typed(column) for column in table.columns], table.column_names))


def _checked_names(path: Path, mark: str) -> list[str]:
    """Returns the names of the columns of a file of CSV, whose rows are looked through: Arrow takes what follows a
    quote that does not end for one field, and tells no lines."""
    before = csv.field_size_limit(LONGEST_ROW)
    begun = 0
    try:
        with opened(path) as file:
            rows = csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=mark, strict=True)
            names = next(rows, [])
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"The dataset file {path} has several columns {twice[0]!r}: rename all but one.")
            begun = rows.line_num
            for row in rows:
                if row and len(row) != len(names):
                    raise DataError(
                        f"Line {begun + 1} of the dataset file {path} has {len(row)} fields, but the first line "
                        f"{len(names)}: a text with {mark!r} in it needs quotes around it."
                    )
                begun = rows.line_num
    except csv.Error as error:
        raise DataError(
            f"The row that begins in line {begun + 1} of the dataset file {path} is no CSV ({error}): quotes stand "
            "around a whole field, and are doubled within it."
        ) from error
    finally:
        csv.field_size_limit(before)
    return names


def _typed(column: Any) -> Any:
    """Returns a column of texts as one of booleans or numbers, if all its values are."""
    import pyarrow
    import pyarrow.compute as pc

    if column.null_count == len(column):
        return column
    if pc.all(pc.is_in(column, pyarrow.array(_TRUTHS), skip_nulls=True)).as_py():
        return pc.equal(pc.utf8_lower(column), "true")
    for pattern, kind in ((_WHOLE, pyarrow.int64()), (_NUMBER, pyarrow.float64())):
        if pc.all(pc.match_substring_regex(column, pattern)).as_py():
            with suppress(pyarrow.ArrowInvalid):  # it is larger than numbers are
                return column.cast(kind)
    return column


def whole_numbers(rows: "datasets.Dataset") -> "datasets.Dataset":
    """Returns rows whose columns of whole numbers are integers also where a value is missing: pandas has floats there,
    and a label of 7 would be 7.0."""
    import pyarrow.compute as pc
    from datasets import Value

    for name, feature in rows.features.items():
        if not isinstance(feature, Value) or feature.dtype != "float64":
            continue
        column: Any = rows.data.column(name)
        if not column.null_count or column.null_count == len(column):
            continue
        whole, largest = pc.all(pc.equal(column, pc.round(column))).as_py(), pc.max(pc.abs(column)).as_py()
        if whole and largest < EXACT:
            rows = rows.cast_column(name, Value("int64"))
    return rows


def check_json_rows(path: Path) -> None:
    """Refuses JSON whose rows are not objects: pyarrow ends the whole process at a line that is `null`; and what is no
    UTF-8, which pyarrow leaves to whoever reads the row.

    Raises:
        DataError: a line of a .jsonl file, or the beginning of a .json file, is not an object, or a line is no UTF-8.
    """
    lines, begun = file_format(path) in JSON_LINES, False
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"Line {number} of the dataset file {path} is no UTF-8 ({error}): save it as UTF-8."
                ) from error
            begin = line.strip().removeprefix(b"\xef\xbb\xbf")[:1]
            if not begin or begun:
                continue
            if begin != b"{" and (lines or begin != b"["):
                raise DataError(
                    f"Line {number} of the dataset file {path} begins with {line.strip()[:20]!r}: each line "
                    "of a .jsonl is an object ({...}), and a .json begins with a list or an object of rows."
                )
            begun = not lines


def check_bare_rows(rows: "datasets.Dataset", path: Path) -> None:
    """Refuses a file with one object around its rows, which would be read as a single row.

    Raises:
        DataError: it is one.
    """
    if len(rows) != 1 or len(rows.column_names) != 1:
        return
    ((name, value),) = rows[0].items()
    if isinstance(value, list) and value and all(isinstance(v, dict) and not v.keys() & SPEAKERS for v in value):
        raise DataError(
            f"The dataset file {path} is one object, whose {name!r} is a list of {len(value)} objects: if these are "
            "the rows, write the list alone, without the object around it."
        )


def broken_line(path: Path) -> str | None:
    """Returns which line of a file of JSON lines cannot be read, and why: one that is no JSON, else an empty one, which
    pandas refuses; None where there is neither, or the file cannot be decompressed."""
    empty = None
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    empty = empty or f"line {number} is empty"
                    continue
                try:
                    json.loads(line.decode("utf-8-sig"))
                except ValueError as error:
                    return f"line {number} is not JSON ({json_fault(error)})"
    except UNREADABLE:
        return None
    return empty
