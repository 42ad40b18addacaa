"""Reads the steps of solutions, and their labels. Does not own: how a prompt and its solution become messages
(`formats`)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from rollgrad.adapters.chat.row_error import Reason, RowError
from rollgrad.adapters.data.examples.recognition import ReadingSettings, step_columns
from rollgrad.adapters.data.examples.rows import broken, column_value, text_of
from rollgrad.application.foreign import shown

WORDS = {"true": 1.0, "+": 1.0, "false": 0.0, "-": 0.0}
"""Labels that are texts."""


@frozen
class LabelledText:
    """A `text` with the numbers of characters, `ends`, up to the end of each step that has one of `labels`; `prompt` is
    None where the text has it."""

    prompt: str | None
    text: str
    ends: tuple[int, ...]
    labels: tuple[float, ...]


def read_steps(row: Mapping[str, Any], settings: ReadingSettings) -> LabelledText:
    """Returns the solution of a row.

    Raises:
        RowError: it has no steps, or not as many labels, or a label is no probability.
    """
    columns = step_columns(settings)
    prompt, text, ends = _text(row, columns, settings)
    given: Any = column_value(row, columns["labels_key"])
    if settings.placeholder is not None and isinstance(
        given, str
    ):  # Math-Shepherd: the text with a label in each place
        pieces = map(re.escape, text.split(settings.placeholder))
        found = re.fullmatch(r"(\S+)".join(pieces), given, re.DOTALL)
        if found is None:
            raise broken(f"{columns['labels_key']} is not {columns['steps_key']} with a label for each placeholder.")
        given = found.groups()
    given = _list(given, columns["labels_key"])
    if len(given) != len(ends):
        raise broken(f"The row has {len(ends)} steps and {len(given)} labels: each step needs one, or None.")
    labels = [_probability(label, columns["labels_key"]) for label in given]
    if settings.up_to_first_error:
        first = next((place for place, label in enumerate(labels) if label is not None and label <= 0.5), len(labels))
        labels = [label if place <= first else None for place, label in enumerate(labels)]
    kept = [(end, label) for end, label in zip(ends, labels, strict=True) if label is not None]
    if not kept:
        raise RowError(Reason.UNTRAINED, "None of its steps has a label.")
    return LabelledText(prompt, text, tuple(end for end, _ in kept), tuple(label for _, label in kept))


def _text(
    row: Mapping[str, Any], columns: Mapping[str, str], settings: ReadingSettings
) -> tuple[str | None, str, list[int]]:
    value, column = column_value(row, columns["steps_key"]), columns["steps_key"]
    ends: list[int] = []
    if settings.placeholder is not None:
        text = text_of(value, column)
        place = text.find(settings.placeholder)
        while place >= 0:
            ends.append(place + len(settings.placeholder))
            place = text.find(settings.placeholder, ends[-1])
        if not ends:
            raise RowError(Reason.EMPTY, f"{column} has no placeholder {settings.placeholder!r}.")
        return None, text, ends
    text = ""
    for number, step in enumerate(_list(value, column), 1):
        if not text_of(step, f"step {number} of {column}").strip():
            raise RowError(Reason.EMPTY, f"Step {number} of {column} is empty.")
        text += step + settings.separator
        ends.append(len(text))
    if not ends:
        raise RowError(Reason.EMPTY, f"{column} has no steps.")
    return text_of(column_value(row, columns["prompt_key"]), columns["prompt_key"]), text, ends


def _list(value: Any, column: str) -> Sequence[Any]:
    if value is None:
        raise RowError(Reason.EMPTY, f"{column} has no value.")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise broken(f"{column} holds {shown(value)}, which is no list.")
    return value


def _probability(label: Any, column: str) -> float | None:
    if label is None:
        return None
    number = WORDS.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(number, int | float) or not 0 <= number <= 1:
        raise broken(
            f"{column} holds {shown(label)}: a label is true, false, or the probability that its step is right."
        )
    return float(number)
