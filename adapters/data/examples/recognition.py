"""Recognises the format of a dataset by its columns, and of unpaired completions by their labels.

Invariant: if several formats fit, none is chosen: that is an error that names them. Does not own: what rows of a format
say (`formats`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from rollgrad.adapters.data.examples.ranked import ranked_column
from rollgrad.adapters.data.fetched_images import FetchedImages
from rollgrad.application.settings.sections.examples import ExampleFormat, TrainOn
from rollgrad.domain.errors import DataError

COLUMNS: Mapping[ExampleFormat, tuple[str, ...]] = {
    ExampleFormat.TOKENS: ("input_ids",),
    ExampleFormat.REPLIES: ("prompt_tokens", "tokens", "completion"),
    ExampleFormat.MESSAGES: ("messages",),
    ExampleFormat.SHAREGPT: ("conversations",),
    ExampleFormat.COMPLETION: ("prompt", "completion"),
    ExampleFormat.ALPACA: ("instruction", "output"),
    ExampleFormat.TEXT: ("text",),
}
"""Columns that each format needs."""

PAIR_COLUMNS = ("chosen", "rejected")
REPLY_COLUMN = "completion"
"""Column of the reply to a prompt whose column is named."""
LABEL_COLUMN = "label"
"""Column that says whether a reply is good."""

OTHER_TASKS: Mapping[str, tuple[str, ...]] = {
    "preference pairs": PAIR_COLUMNS,
    "labelled steps": ("completions", "labels"),
    "rankings": ("context", "completions"),
    "ranked answers": ("prompt", "answers"),
}
"""Columns of rows that other trainers learn from."""


@frozen(kw_only=True)
class ReadingSettings:
    """Settings of parsing rows. A column whose name is None is that of the format.

    The formats of preference pairs and of labelled replies are never recognised by columns alone: who learns from them
    sets the format.
    """

    format: ExampleFormat = ExampleFormat.AUTO
    input_key: str | None = None
    """Column of the prompt, messages or text."""
    output_key: str | None = None
    """Column of the reply."""
    chosen_key: str | None = None
    """Column of the better reply of a pair."""
    rejected_key: str | None = None
    """Column of the worse reply of a pair."""
    all_pairs: bool = False
    """Whether each two ranked replies are a pair, rather than the best and the worst alone."""
    label_key: str | None = None
    """Column that says whether a reply is good."""
    apply_chat_template: bool = True
    """Whether texts become messages of the chat template."""
    system_prompt: str | None = None
    """System message of conversations that have none."""
    input_template: str | None = None
    """Text with {} around prompts without a chat template."""
    train_on: TrainOn = TrainOn.ASSISTANT
    """Messages of a conversation that are trained."""
    placeholder: str | None = None
    separator: str = "\n"
    up_to_first_error: bool = False
    image_key: str | None = None
    """Column with images."""
    fetched: FetchedImages | None = field(default=None, eq=False)
    """Fetches images that are URLs."""
    known_role: Callable[[str], bool] | None = field(default=None, eq=False)
    """Whether the chat template has a role besides the usual ones."""


def find_format(
    columns: Sequence[str], name: str, settings: ReadingSettings, labels: Sequence[Any] = ()
) -> ExampleFormat:
    """The format of a dataset with these columns.

    Args:
        columns: names of the columns of its rows.
        name: name of the dataset, for errors.
        settings: a format and columns that are set win; of the columns those that are there where the others are of
            a sampled reply, for they name the columns of data beside it.
        labels: what the first rows have in the column `label`.

    Raises:
        DataError: no format or several fit, or columns of the one that is set are missing.
    """
    present = set(columns)
    if settings.format is ExampleFormat.STEPS:
        return _steps_format(present, name, settings)
    sampled = settings.format is ExampleFormat.AUTO and present.issuperset(COLUMNS[ExampleFormat.REPLIES])
    if sampled and not (settings.input_key and _is_there(settings.input_key, present)):
        return ExampleFormat.REPLIES
    _check_named(present, name, settings)
    match settings.format:
        case ExampleFormat.UNPAIRED:
            return _labelled_format(present, name, settings)
        case ExampleFormat.PAIRS:
            return _pairs_format(present, name, settings)
        case ExampleFormat.AUTO:
            return _recognised(present, name, settings, labels)
    missing = [] if settings.input_key else [c for c in COLUMNS[settings.format] if c not in present]
    if missing:
        raise DataError(
            f"{_lacks(name, missing)}, which --data.format {settings.format} needs: its columns are {_shown(present)}; "
            "set --data.format to another, or auto."
        )
    return settings.format


def _shown(present: set[str]) -> str:
    """Returns columns for an error, but for the one that reading adds."""
    return ", ".join(sorted(present - {"datasource"})) or "none"


def _lacks(name: str, missing: Sequence[str]) -> str:
    """Returns the beginning of an error about columns that a dataset does not have."""
    return f"{name!r} has no column {' and no column '.join(map(repr, missing))}"


def _is_there(column: str, present: set[str]) -> bool:
    """Returns whether there is a column, or the one that a nested one is in."""
    return column in present or column.partition(".")[0] in present


def _steps_format(present: set[str], name: str, settings: ReadingSettings) -> ExampleFormat:
    columns = step_columns(settings)
    missing = [column for column in columns.values() if not _is_there(column, present)]
    if missing:
        raise DataError(
            f"{_lacks(name, missing)}, which labelled steps need: its columns are {_shown(present)}; name them with "
            f"{', '.join(f'--data.{key}' for key in columns)}, and set --data.placeholder if a row is one text."
        )
    return ExampleFormat.STEPS


def _check_named(present: set[str], name: str, settings: ReadingSettings) -> None:
    """Checks that columns which are set by name are there."""
    judged = settings.format in (ExampleFormat.PAIRS, ExampleFormat.UNPAIRED)
    named = {
        "prompt" if judged else "input": settings.input_key,
        "completion" if judged else "output": settings.output_key,
        "label": settings.label_key,
    }
    for flag, key in named.items():
        if key is not None and not _is_there(key, present):
            raise DataError(f"{_lacks(name, [key])}: set --data.{flag}_key to one of its columns ({_shown(present)}).")


def _pairs_format(present: set[str], name: str, settings: ReadingSettings) -> ExampleFormat:
    given = (settings.chosen_key, settings.rejected_key)
    missing = [column for column, key in zip(PAIR_COLUMNS, given, strict=True) if key is None and column not in present]
    if missing and (any(given) or ranked_column(present) is None):
        flags = " and ".join(f"--data.{column}_key" for column in missing)
        raise DataError(
            f"{_lacks(name, missing)}, but pairs have one for each reply: its columns are {_shown(present)}; name the "
            f"columns with {flags}."
        )
    return ExampleFormat.PAIRS


def _recognised(present: set[str], name: str, settings: ReadingSettings, labels: Sequence[Any]) -> ExampleFormat:
    """Returns the format that columns tell, where none is set."""
    if settings.input_key is not None:
        answered = settings.output_key is not None or (settings.input_key != REPLY_COLUMN and REPLY_COLUMN in present)
        return ExampleFormat.COMPLETION if answered else ExampleFormat.MESSAGES
    found = [kind for kind, needed in COLUMNS.items() if present.issuperset(needed)]
    if len(found) > 1:
        readings = " or as ".join(f"{kind} ({', '.join(COLUMNS[kind])})" for kind in found)
        raise DataError(f"{name!r} can be read as {readings}: set --data.format to {' or '.join(found)}.")
    if found == [ExampleFormat.COMPLETION] and labels and all(map(_says_good_or_bad, labels)):
        raise DataError(
            f"{name!r} can be read as {found[0]} ({', '.join(COLUMNS[found[0]])}), which imitates every completion, or "
            "as good and bad completions (prompt, completion, label), which train kto learns from: keep only the rows "
            f"with a true label, or set --data.format {found[0]} to imitate all."
        )
    if found:
        return found[0]
    for task, needed in OTHER_TASKS.items():
        if present.issuperset(needed):
            raise DataError(
                f"{name!r} has {task} ({', '.join(needed)}), which train sft does not learn from: choose other data, "
                "or name the columns to imitate with --data.input_key and --data.output_key."
            )
    known = "; ".join(f"{kind}: {', '.join(needed)}" for kind, needed in COLUMNS.items())
    raise DataError(
        f"{name!r} has the columns {_shown(present)}, of which no format can be told ({known}): rename columns, or set "
        "--data.input_key and --data.output_key."
    )


def step_columns(settings: ReadingSettings) -> dict[str, str]:
    """Returns the columns of labelled steps, by the settings that name them."""
    own = {"steps_key": settings.output_key, "labels_key": settings.label_key}
    if settings.placeholder is not None:
        return {"steps_key": own["steps_key"] or "input", "labels_key": own["labels_key"] or "labels"}
    return {
        "prompt_key": settings.input_key or "prompt",
        "steps_key": own["steps_key"] or "completions",
        "labels_key": own["labels_key"] or "labels",
    }


def _labelled_format(present: set[str], name: str, settings: ReadingSettings) -> ExampleFormat:
    """Returns whether rows are labelled replies, or pairs, each of which is two of them."""
    paired = dict(zip(PAIR_COLUMNS, (settings.chosen_key, settings.rejected_key), strict=True))
    labelled = {"prompt": settings.input_key, REPLY_COLUMN: settings.output_key, LABEL_COLUMN: settings.label_key}
    are_pairs, are_labelled = (
        all(key is not None or column in present for column, key in columns.items()) for columns in (paired, labelled)
    )
    if are_pairs and are_labelled:
        raise DataError(
            f"{name!r} has both labelled replies ({', '.join(labelled)}) and pairs ({', '.join(paired)}): leave out "
            "the columns of one kind."
        )
    if are_pairs:
        return ExampleFormat.PAIRS
    if not are_labelled:
        missing = [column for column, key in labelled.items() if key is None and column not in present]
        flags = " and ".join(f"--data.{column}_key" for column in missing)
        raise DataError(
            f"{_lacks(name, missing)}, which labelled replies need, nor pairs (chosen, rejected): its columns are "
            f"{_shown(present)}; name the columns with {flags}."
        )
    return ExampleFormat.UNPAIRED


def _says_good_or_bad(label: Any) -> bool:
    """Whether a label is true or false: a boolean, 0 or 1, or one of these words."""
    return label in (0, 1) if isinstance(label, int | float) else str(label).strip().lower() in ("true", "false")
