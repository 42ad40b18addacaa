"""Columns of a dataset that hold its prompts and labels, and values in nested columns.

Invariant: if several columns fit, none is guessed: that is an error which names them. Does not own: the content of
prompts (`PromptBuilder`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from rollgrad.domain.errors import DataError

PROMPT_COLUMNS = ("prompt", "question", "problem", "input", "instruction")
LABEL_COLUMNS = ("answer", "solution", "label", "ground_truth", "final_answer", "target")
RESULT = " (answer is usually the result, which a reward compares with, and solution the way to it)"
ALPACA = " (where a prompt is the instruction with its input, as in Alpaca's rows, write both into one column first)"
SPEAKERS = {"role", "from"}
"""Keys of a message, of which it has one."""
VERL_LABEL = "reward_model.ground_truth"
"""Column of the label in verl's rows, beside `prompt` (messages), `data_source`, `ability` and `extra_info`."""


@frozen
class Columns:
    """Names of the prompt's and the label's column, dotted if they are nested; None for no label."""

    prompt: str
    label: str | None


def find_columns(
    row: Mapping[str, Any], datasource: str, *, input_key: str | None, label_key: str | None, labels_are_read: bool
) -> Columns:
    """Returns the columns that are named, or else the only ones that fit.

    Args:
        row: any row of the dataset.
        datasource: the dataset's name, for errors.
        input_key: the prompt's column, if it is named.
        label_key: the label's column, if it is named.
        labels_are_read: if several columns may hold labels, whether that is an error; if not, none is taken.

    Raises:
        DataError: a named column is missing, none is known to hold prompts, or several may hold them.
    """
    for key, flag in ((input_key, "--data.input_key"), (label_key, "--data.label_key")):
        if key is not None and not has_value(row, key):
            raise DataError(f"{datasource!r} has no column {key!r}: set {flag} to one of its columns ({_names(row)}).")
    return Columns(
        prompt=input_key or _find_prompt(row, datasource),
        label=label_key or _find_label(row, datasource, labels_are_read=labels_are_read),
    )


def has_value(row: Mapping[str, Any], key: str) -> bool:
    """Returns whether a row has the column `key`, dotted where it is nested."""
    try:
        value_at(row, key)
    except KeyError:
        return False
    return True


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Returns the value of the column `key`, dotted where it is nested; a column whose name has the dots comes first.

    >>> value_at({"reward_model": {"ground_truth": "72"}}, "reward_model.ground_truth")
    '72'

    Raises:
        KeyError: there is no such column.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[part]
    return value


def written_messages(value: Any) -> Any:
    """Returns the messages that a text is the JSON of, as in files whose columns hold texts alone; any other value as
    it is.

    >>> written_messages('[{"role": "user", "content": "3+4?"}]')
    [{'role': 'user', 'content': '3+4?'}]
    >>> written_messages("[1, 2] are numbers"), written_messages(None)
    ('[1, 2] are numbers', None)
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    spoken = isinstance(found, list) and found and all(isinstance(m, dict) and m.keys() & SPEAKERS for m in found)
    return found if spoken else value


def _find_prompt(row: Mapping[str, Any], datasource: str) -> str:
    found = _known(row, PROMPT_COLUMNS)
    if isinstance(row.get("prompt"), list):  # messages: the prompt of TRL and verl, whatever it was made from
        return "prompt"
    if not found:
        raise DataError(
            f"{datasource!r} has no column that is known to hold prompts ({', '.join(PROMPT_COLUMNS)}): set "
            f"--data.input_key to one of its columns ({_names(row)})."
        )
    hint = ALPACA if {"instruction", "input"} <= set(found) else ""
    return _only(found, datasource, "the prompt", "--data.input_key", hint)


def _find_label(row: Mapping[str, Any], datasource: str, *, labels_are_read: bool) -> str | None:
    if has_value(row, VERL_LABEL):
        return VERL_LABEL
    found = _known(row, LABEL_COLUMNS)
    if not found or (len(found) > 1 and not labels_are_read):
        return None
    return _only(
        found, datasource, "the label", "--data.label_key", RESULT if {"answer", "solution"} <= set(found) else ""
    )


def _known(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Returns the columns of these names; where there are none, those spelled otherwise, as in `Question`."""
    exact = [name for name in names if name in row]
    return exact or [column for name in names for column in row if column.strip().lower() == name]


def _only(found: Sequence[str], datasource: str, what: str, flag: str, hint: str = "") -> str:
    if len(found) > 1:
        columns = f"{', '.join(found[:-1])} and {found[-1]}"
        raise DataError(
            f"{datasource!r} has the columns {columns}, each of which may hold {what}: set {flag} to one of them{hint}."
        )
    return found[0]


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(_dotted(row))) or "none"


def _dotted(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in value)
        elif name != "datasource":
            yield name
