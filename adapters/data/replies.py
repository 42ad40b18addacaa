"""Sampled replies as rows, one JSON object a line; `reply_log.py` writes files of them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollgrad.adapters.chat.image_marks import placed_images
from rollgrad.adapters.chat.pictures import bare
from rollgrad.adapters.data.kept_images import KeptImages
from rollgrad.adapters.system.plain_values import is_json, json_fault
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.replies import Reply, UnsampledReply
from rollgrad.domain.errors import DataError

Row = dict[str, Any]
Key = tuple[int, int]
"""Row and sample."""

FAILURE = "failure"
"""Key of a row whose reply could not be sampled, or not judged: the reason."""
LONGEST_SHOWN = 60
"""Characters of a value in a message."""


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


OPTIONAL: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "row": ("a number", lambda value: isinstance(value, int)),
    "sample": ("a number", lambda value: isinstance(value, int)),
    "messages": ("a list of messages", partial(_are, dict)),
    "images": ("a list of paths", partial(_are, str)),
    "image_places": (
        "a list of places",
        lambda value: _are(list, value) and all(_are(int, place) and len(place) == 2 for place in value),
    ),
    "prompt_tokens": ("a list of token ids", partial(_are, int)),
    "tokens": ("a list of token ids", partial(_are, int)),
    "stop_reason": (f"one of {', '.join(StopReason)}", lambda value: value in list(StopReason)),
    "model": ("a name", lambda value: isinstance(value, str)),
    "datasource": ("a name", lambda value: isinstance(value, str)),
    "metadata": ("an object", lambda value: isinstance(value, dict)),
    FAILURE: ("a text", lambda value: isinstance(value, str)),
}
"""Fields that a row of another origin may lack: the kind of each in words, and a function that checks a value."""


def reply_row(reply: Reply, *, model: str, logprobs: bool, images: KeptImages | None = None) -> Row:
    """Returns a reply as a row; what JSON cannot hold of the dataset's own row (pictures, dates) is left out. `images`
    keeps those of prompts, if they may have any."""
    prompt = reply.prompt
    row: Row = {
        "row": reply.row,
        "sample": reply.sample,
        "prompt": prompt.text,
        "messages": [*map(bare, prompt.messages)],
        "completion": reply.completion,
        "prompt_tokens": list(prompt.token_ids),
        "tokens": list(reply.token_ids),
        "logprobs": list(reply.logprobs),
        "stop_reason": str(reply.stop_reason),
        "model": model,
        "seed": reply.seed,
        "label": prompt.label if is_json(prompt.label) else str(prompt.label),
        "datasource": prompt.datasource,
        "metadata": {name: value for name, value in prompt.metadata.items() if is_json(value)},
    }
    if not logprobs:
        del row["logprobs"]
    if images is not None:
        row["images"] = images.paths(prompt)
        row["image_places"] = [[placed.start, placed.stop] for placed in prompt.images]
    return row


def unsampled_row(reply: UnsampledReply, *, model: str, images: KeptImages | None = None) -> Row:
    """Returns a reply that could not be sampled as a row: its completion is null."""
    empty = Reply(
        row=reply.failure.group_id,
        sample=reply.failure.sample_id,
        prompt=reply.prompt,
        completion="",
        token_ids=(),
        logprobs=(),
        stop_reason=StopReason.ABORTED,
        seed=reply.seed,
    )
    row = reply_row(empty, model=model, logprobs=False, images=images)
    return {**row, "completion": None, "stop_reason": None, FAILURE: reply.failure.message}


def row_prompt(row: Mapping[str, Any]) -> Prompt:
    """Returns the prompt of a row, whose messages have its images.

    Raises:
        DataError: there are more images than places for them in the messages, or fewer.
    """
    messages, images = row.get("messages", ()), row.get("images", ())
    return Prompt(
        token_ids=tuple(row.get("prompt_tokens", ())),
        text=row["prompt"],
        label=row.get("label"),
        datasource=row.get("datasource", "default"),
        metadata=row.get("metadata", {}),
        messages=tuple(placed_images(messages, images) if messages and images else messages),
    )


def read_rows(path: Path, *, flag: str, keys: set[Key] | None = None) -> Iterator[Row]:
    """Yields the rows of a file of replies, each with its `row` and `sample`: by default, the number of its line and
    0. Null stands for a value that is not there. An incomplete last line, which a killed process left or another is
    writing, is left out, and so are rows whose reply could not be sampled. `keys` gets row and sample of each.

    Raises:
        DataError: the file cannot be read, or a line is no reply; the first such line is named.
    """
    seen: set[Key] = set() if keys is None else keys
    for where, row in _numbered(path, flag):
        if (key := key_of(row, where)) in seen:
            raise DataError(f"{where} is again sample {key[1]} of row {key[0]}: remove one of them.")
        seen.add(key)
        yield row


def chosen_rows(path: Path, keys: set[Key], *, flag: str) -> Iterator[Row]:
    """Yields the rows of a file whose row and sample are among `keys`, and removes these from them; raises as
    `read_rows`."""
    for where, row in _numbered(path, flag):
        if (key := key_of(row, where)) in keys:
            keys.remove(key)
            yield row


def _numbered(path: Path, flag: str) -> Iterator[tuple[str, Row]]:
    """Yields what `read_rows` does, and where each row stands."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and not _whole(line):
                    break
                if not line.strip():
                    continue
                where = f"Line {number} of {path}"
                row = parsed(line, where)
                if has_failed(row) and row.get("completion") is None:
                    continue
                yield where, _reply(row, number - 1, where, flag)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check {flag}.") from error


def _reply(row: Row, number: int, where: str, flag: str) -> Row:
    """Returns a row, by default of this number.

    Raises:
        DataError: it is no reply.
    """
    row = {name: value for name, value in row.items() if value is not None or name not in OPTIONAL}
    for name in ("prompt", "completion"):
        if not isinstance(row.get(name), str):
            raise DataError(
                f"{where} has no text {name!r}: {flag} takes rows with prompt and completion, as `rollgrad generate` "
                "writes them."
            )
    for name, (kind, holds) in OPTIONAL.items():
        if name in row and not holds(row[name]):
            raise DataError(f"{where} has the {name} {shown(row[name])}, which is not {kind}: leave it out.")
    return {"row": number, "sample": 0, **row}


def has_failed(row: Row) -> bool:
    """Returns whether the reply of a row could not be sampled, or not judged."""
    return row.get(FAILURE) is not None


def _whole(line: bytes) -> bool:
    """Returns whether a last line without an end is a whole row."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def parsed(line: bytes, where: str) -> Row:
    """Returns the row of a line; `where` names the line.

    Raises:
        DataError: it is no JSON object.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({json_fault(error)}): remove the line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object: remove the line.")
    return row


def key_of(row: Row, where: str) -> Key:
    """Returns row and sample of a row; `where` names its line.

    Raises:
        DataError: they are no numbers.
    """
    key = row.get("row"), row.get("sample")
    if not all(isinstance(number, int) for number in key):
        raise DataError(f"{where} has no numbers row and sample: remove the line.")
    return key  # type: ignore[return-value] # checked above


def line_of(row: Row) -> bytes:
    """Returns a row as a line of a file."""
    try:
        return f"{json.dumps(row, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a dataset may hold
        return f"{json.dumps(row)}\n".encode()


def shown(value: Any) -> str:
    """Returns a value for a message, not all of it where it is long."""
    text = json.dumps(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def rows_text(rows: Iterable[Row]) -> bytes:
    """Returns rows as the content of a file."""
    return b"".join(map(line_of, rows))
